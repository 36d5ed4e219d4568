//! Turns a [`Snapshot`] into metric families, at each scrape.

use std::{fmt, sync::Arc};

use numaward_topology::Bytes;
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabel, EncodeLabelSet,
        LabelSetEncoder, MetricEncoder, NoLabelSet,
    },
    metrics::MetricType,
    registry::Unit,
};

use super::{
    promises::PromiseFigures,
    snapshot::{Snapshot, WorkloadFigures},
};

/// Gives the current figures. Called once for each scrape, on a thread that may block.
pub trait Source: fmt::Debug + Send + Sync + 'static {
    /// Takes them.
    fn snapshot(&self) -> Snapshot;

    /// Takes those of what is promised.
    fn promises(&self) -> PromiseFigures {
        PromiseFigures::default()
    }
}

/// Serves what a [`Source`] gives.
#[derive(Debug)]
pub(super) struct Figures(pub(super) Arc<dyn Source>);

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let snapshot = self.0.snapshot();
        let promises = self.0.promises();
        let nodes: Vec<String> = snapshot.nodes.iter().map(|node| node.node.to_string()).collect();
        let mut families = Families { encoder, snapshot: &snapshot, promises: &promises, nodes: &nodes };
        families.allocated()?;
        families.resident()?;
        families.trouble()?;
        families.activity()?;
        families.exclusive_cpus()?;
        families.node_memory()?;
        families.promises()?;
        families.own()
    }
}

pub(super) struct Families<'a, 'e> {
    pub(super) encoder: DescriptorEncoder<'e>,
    pub(super) snapshot: &'a Snapshot,
    promises: &'a PromiseFigures,
    pub(super) nodes: &'a [String],
}

impl Families<'_, '_> {
    fn allocated(&mut self) -> fmt::Result {
        let (snapshot, nodes) = (self.snapshot, self.nodes);
        let mut family = Family::counter(
            &mut self.encoder,
            "memory_allocated",
            "User memory allocated, by node of the page and whether the allocating CPU was of that node",
            Some(&Unit::Bytes),
        )?;
        let counted = || {
            snapshot.workloads.iter().filter_map(|workload| Some((workload, workload.allocated.as_ref()?)))
        };
        for (workload, allocated) in counted() {
            let mut labels = LeadingLabels::new(&workload.name);
            for (node, bytes) in nodes.iter().zip(allocated) {
                let key = labels.then(node, "locality");
                family.count([(key, "local")], &bytes.local.0)?;
                family.count([(key, "remote")], &bytes.remote.0)?;
            }
        }
        let mut family = Family::counter(
            &mut self.encoder,
            "kernel_memory_allocated",
            "Kernel memory allocated on behalf of the workload, by node of the page; a lower bound",
            Some(&Unit::Bytes),
        )?;
        for (workload, allocated) in counted() {
            let mut labels = LeadingLabels::new(&workload.name);
            let key = labels.key("node");
            for (node, bytes) in nodes.iter().zip(allocated) {
                family.count([(key, node)], &bytes.kernel.0)?;
            }
        }
        let mut family = Family::counter(
            &mut self.encoder,
            "unknown_node_allocated",
            "Memory allocated on a page whose node the probe could not tell",
            Some(&Unit::Bytes),
        )?;
        match snapshot.unknown_node {
            Some(Bytes(bytes)) => family.0.encode_counter::<NoLabelSet, _, u64>(&bytes, None),
            None => Ok(()),
        }
    }

    fn resident(&mut self) -> fmt::Result {
        let mut family = Family::gauge(
            &mut self.encoder,
            "memory_resident",
            "Memory of the workload by the node it lies on (memory.numa_stat)",
            Some(&Unit::Bytes),
        )?;
        for workload in &self.snapshot.workloads {
            let Some(resident) = &workload.resident else { continue };
            let mut labels = LeadingLabels::new(&workload.name);
            for (node, bytes) in self.nodes.iter().zip(resident.iter()) {
                let key = labels.then(node, "type");
                for (kind, Bytes(bytes)) in
                    [("anon", bytes.anon), ("file", bytes.file), ("kernel", bytes.kernel)]
                {
                    family.set([(key, kind)], &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn trouble(&mut self) -> fmt::Result {
        let mut seconds = |name, help, value: fn(&WorkloadFigures) -> Option<f64>| {
            let mut family = Family::counter(&mut self.encoder, name, help, Some(&Unit::Seconds))?;
            self.snapshot
                .workloads
                .iter()
                .filter_map(|workload| Some((workload, value(workload)?)))
                .try_for_each(|(workload, seconds)| family.count([("workload", &*workload.name)], &seconds))
        };
        seconds(
            "memory_pressure_waiting",
            "Time in which a task of the workload waited for memory",
            |workload| Some(workload.pressure?.waiting.as_secs_f64()),
        )?;
        seconds(
            "memory_pressure_stalled",
            "Time in which all tasks of the workload that had work waited for memory",
            |workload| Some(workload.pressure?.stalled.as_secs_f64()),
        )?;
        Ok(())
    }

    fn node_memory(&mut self) -> fmt::Result {
        let help = "Memory of the node by kind (base pages or huge pages of one size) and state: all of it, what is \
                    kept for the system, what can be promised at all, what is promised, and what is left to promise \
                    (free)";
        let mut family = Family::gauge(&mut self.encoder, "node_memory", help, Some(&Unit::Bytes))?;
        for (node, memory) in self.nodes.iter().zip(&self.snapshot.nodes) {
            for (kind, total, _) in &memory.kinds {
                let kind = kind.to_string();
                family.set([("node", node.as_str()), ("kind", &kind), ("state", "total")], &total.0)?;
            }
        }
        for of in &self.promises.kinds {
            let (node, kind) = (of.node.to_string(), of.kind.to_string());
            for (state, Bytes(bytes)) in [
                ("reserved", of.reserved),
                ("allocatable", of.allocatable),
                ("promised", of.promised),
                ("free", of.free),
            ] {
                family.set([("node", node.as_str()), ("kind", &kind), ("state", state)], &bytes)?;
            }
        }
        let help =
            "Memory of the node that nobody uses, by kind: not what is left to promise, but what lies idle";
        let mut family = Family::gauge(&mut self.encoder, "node_memory_unused", help, Some(&Unit::Bytes))?;
        for (node, memory) in self.nodes.iter().zip(&self.snapshot.nodes) {
            for (kind, _, unused) in &memory.kinds {
                if let Some(Bytes(unused)) = unused {
                    family.set([("node", node.as_str()), ("kind", &kind.to_string())], unused)?;
                }
            }
        }
        let help = "Memory of the node that could still be had (free or reclaimable), less what is promised and not yet \
                    used; below zero where more is promised than can be had at once";
        let mut family = Family::gauge(&mut self.encoder, "node_headroom", help, Some(&Unit::Bytes))?;
        for (node, kind, bytes) in &self.promises.headroom {
            family.set([("node", node.to_string().as_str()), ("kind", &kind.to_string())], bytes)?;
        }
        Ok(())
    }

    fn promises(&mut self) -> fmt::Result {
        let mut family = Family::counter(
            &mut self.encoder,
            "numa_miss",
            "User memory that a workload with an allocation was given outside the nodes promised to it",
            Some(&Unit::Bytes),
        )?;
        for missed in &self.promises.missed {
            let mut labels = LeadingLabels::new(&missed.workload);
            let key = labels.key("node");
            for (node, Bytes(bytes)) in &missed.bytes {
                family.count([(key, &node.to_string())], bytes)?;
            }
        }
        let help = "Exclusive CPUs of the workload that are offline";
        let mut family = Family::gauge(&mut self.encoder, "promised_cpus_offline", help, None)?;
        for lack in &self.promises.lacks {
            family.set([("workload", &*lack.workload)], &lack.offline_cpus)?;
        }
        let help = "Memory promised to the workload that its nodes do not have (any more)";
        let mut family =
            Family::gauge(&mut self.encoder, "promised_memory_missing", help, Some(&Unit::Bytes))?;
        for lack in &self.promises.lacks {
            family.set([("workload", &*lack.workload)], &lack.uncovered.0)?;
        }
        let help = "CPUs that are exclusive to workloads, by node";
        let mut family = Family::gauge(&mut self.encoder, "cpu_manager_exclusive_cpus", help, None)?;
        for (node, cpus) in &self.promises.exclusive_cpus {
            family.set([("node", node.to_string().as_str())], cpus)?;
        }
        if let Some(cpus) = self.promises.shared_pool_cpus {
            let help = "CPUs that are exclusive to nobody";
            Family::gauge(&mut self.encoder, "cpu_manager_shared_pool_cpus", help, None)?.single(&cpus)?;
        }
        Ok(())
    }

    /// What numaward says of itself.
    fn own(&mut self) -> fmt::Result {
        let snapshot = self.snapshot;
        let help = "Workloads that are observed, by whether they have counters of their own";
        let mut family = Family::gauge(&mut self.encoder, "workloads", help, None)?;
        family.set([("counters", "own")], &snapshot.workloads_with_slot)?;
        family.set([("counters", "other")], &snapshot.workloads_without_slot)?;

        let help = "Parts that work less well than they should, see `numaward status`; the value is always 1";
        let mut family = Family::gauge(&mut self.encoder, "degraded", help, None)?;
        for part in &snapshot.degraded {
            family.set([("part", *part)], &1_u64)?;
        }

        let help = "The probes: how each is attached and why not better; the value is always 1";
        let mut family = Family::gauge(&mut self.encoder, "probe", help, None)?;
        for probe in &snapshot.probes {
            family
                .set([("probe", &*probe.probe), ("mode", &probe.mode), ("reason", &probe.reason)], &1_u64)?;
        }
        let mut family = Family::counter(
            &mut self.encoder,
            "probe_runtime",
            "Time spent in the probe while the kernel measured it: for some seconds after the start, and while \
             kernel.bpf_stats_enabled is set. Of use only beside the runs: what one costs",
            Some(&Unit::Seconds),
        )?;
        for probe in &snapshot.probes {
            if let Some(runtime) = probe.runtime {
                family.count([("probe", &*probe.probe)], &runtime.as_secs_f64())?;
            }
        }
        let help = "Runs of the probe while the kernel measured it";
        let mut family = Family::counter(&mut self.encoder, "probe_runs", help, None)?;
        for probe in &snapshot.probes {
            if let Some(runs) = probe.runs {
                family.count([("probe", &*probe.probe)], &runs)?;
            }
        }
        let help = "Which part of the time the probe watches; below 1, what it counts is multiplied accordingly, and so \
                    is an estimate";
        let mut family = Family::gauge(&mut self.encoder, "probe_sampled_ratio", help, None)?;
        for probe in &snapshot.probes {
            if let Some(ratio) = probe.sampled_ratio {
                family.set([("probe", &*probe.probe)], &ratio)?;
            }
        }
        let help = "Events that the kernel did not hand to the probe";
        let mut family = Family::counter(&mut self.encoder, "probe_events_lost", help, None)?;
        for probe in &snapshot.probes {
            if let Some(lost) = probe.events_lost {
                family.count([("probe", &*probe.probe)], &lost)?;
            }
        }
        let mut family =
            Family::gauge(&mut self.encoder, "probe_map_entries", "Entries in use in the map", None)?;
        for map in &snapshot.maps {
            family.set([("map", map.map)], &map.entries)?;
        }
        let help = "Kernel memory that the maps of the family of probes take";
        let mut family = Family::gauge(&mut self.encoder, "probe_map_memory", help, Some(&Unit::Bytes))?;
        for (name, bytes) in &snapshot.map_memory {
            family.set([("family", *name)], bytes)?;
        }
        let help = "Entries the map has room for";
        let mut family = Family::gauge(&mut self.encoder, "probe_map_capacity", help, None)?;
        for map in &snapshot.maps {
            family.set([("map", map.map)], &map.capacity)?;
        }
        Ok(())
    }
}

/// One family being written.
pub(super) struct Family<'e>(pub(super) MetricEncoder<'e>);

impl<'e> Family<'e> {
    pub(super) fn histogram(
        encoder: &'e mut DescriptorEncoder<'_>,
        name: &'e str,
        help: &str,
        unit: Option<&'e Unit>,
    ) -> Result<Self, fmt::Error> {
        encoder.encode_descriptor(name, help, unit, MetricType::Histogram).map(Self)
    }

    pub(super) fn counter(
        encoder: &'e mut DescriptorEncoder<'_>,
        name: &'e str,
        help: &str,
        unit: Option<&'e Unit>,
    ) -> Result<Self, fmt::Error> {
        encoder.encode_descriptor(name, help, unit, MetricType::Counter).map(Self)
    }

    pub(super) fn gauge(
        encoder: &'e mut DescriptorEncoder<'_>,
        name: &'e str,
        help: &str,
        unit: Option<&'e Unit>,
    ) -> Result<Self, fmt::Error> {
        encoder.encode_descriptor(name, help, unit, MetricType::Gauge).map(Self)
    }

    pub(super) fn count<const N: usize>(
        &mut self,
        labels: [(&str, &str); N],
        value: &impl EncodeCounterValue,
    ) -> fmt::Result {
        self.0.encode_family(&Labels(labels))?.encode_counter::<NoLabelSet, _, u64>(value, None)
    }

    /// The one sample of a family without labels.
    pub(super) fn single(&mut self, value: &impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_gauge(value)
    }

    pub(super) fn set<const N: usize>(
        &mut self,
        labels: [(&str, &str); N],
        value: &impl EncodeGaugeValue,
    ) -> fmt::Result {
        self.0.encode_family(&Labels(labels))?.encode_gauge(value)
    }
}

pub(super) struct Labels<'a, const N: usize>(pub(super) [(&'a str, &'a str); N]);

impl<const N: usize> EncodeLabelSet for Labels<'_, N> {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> fmt::Result {
        for label in &self.0 {
            label.encode(encoder.encode_label())?;
            for of_pod in pod_labels(*label).into_iter().flatten() {
                of_pod.encode(encoder.encode_label())?;
            }
        }
        Ok(())
    }
}

/// What goes with the label `workload` of a container of a pod, whose name is `NAMESPACE/POD/CONTAINER`: the labels by
/// which other exporters know it. No other workload's name has two slashes.
fn pod_labels<'a>((key, value): (&str, &'a str)) -> Option<[(&'static str, &'a str); 3]> {
    let mut parts = value.split('/').filter(|_| key == "workload");
    let [namespace, pod, container] = [parts.next()?, parts.next()?, parts.next()?];
    let is_whole = parts.next().is_none() && ![namespace, pod, container].contains(&"");
    is_whole.then_some([("namespace", namespace), ("pod", pod), ("container", container)])
}

/// The labels of a workload, and perhaps `node`, rendered once for all lines that share them.
///
/// The encoder hands on label by label in five writes each, and there are hundreds of thousands of
/// lines: rendered labels ride in front of the key of the last one, which the encoder writes as it is.
pub(super) struct LeadingLabels {
    text: String,
    workload_bytes: usize,
}

impl LeadingLabels {
    pub(super) fn new(workload: &str) -> Self {
        let own = ("workload", workload);
        let mut text = String::with_capacity(2 * workload.len() + 80);
        for (key, value) in [own].into_iter().chain(pod_labels(own).into_iter().flatten()) {
            text.push_str(key);
            text.push_str("=\"");
            for c in value.chars() {
                match c {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    c => text.push(c),
                }
            }
            text.push_str("\",");
        }
        let workload_bytes = text.len();
        Self { text, workload_bytes }
    }

    /// The key of the label that follows that of the workload, with that one before it.
    pub(super) fn key(&mut self, key: &str) -> &str {
        self.text.truncate(self.workload_bytes);
        self.text.push_str(key);
        &self.text
    }

    /// The key of the label that follows those of the workload and the node, with these before it.
    pub(super) fn then(&mut self, node: &str, key: &str) -> &str {
        self.text.truncate(self.workload_bytes);
        self.text.push_str("node=\"");
        self.text.push_str(node);
        self.text.push_str("\",");
        self.text.push_str(key);
        &self.text
    }
}

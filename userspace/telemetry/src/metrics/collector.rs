//! Turns a [`Snapshot`] into metric families, at each scrape.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use numaward_config::exported::MetricFilter;
use numaward_model::snapshot::{
    GuaranteeFigures, HugepagesOutside, PressureFigures, ProbeFigures, ProcessFigures, Snapshot,
    WorkloadFigures,
};
use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::{
    NODE, PREFIX,
    family::{Family, Kind, Made, NONE, Named, Number, Out, Sink, made},
    text::Labels,
};

/// Puts what a source gave into a sink: all families, or those that a filter admits.
pub(super) fn collect(
    snapshot: &Snapshot,
    sink: &mut impl Sink,
    admitted: Option<&MetricFilter>,
) -> fmt::Result {
    let nodes: Vec<_> = snapshot
        .nodes
        .iter()
        .map(|node| (node.node.to_string(), format!("numa_node=\"{}\"", node.node)))
        .collect();
    let nodes: Vec<_> = nodes.iter().map(|(value, text)| Made { name: NODE, value, text }).collect();
    let labels = Labels::new(snapshot.workloads.iter().map(|of| &*of.name));
    let workloads = snapshot.workloads.iter().zip(labels.iter());
    let workloads: Vec<_> =
        workloads.map(|(of, text)| (Named { name: &of.name, text: Some(text) }, of)).collect();
    let out = Out::new(sink, Some(PREFIX), admitted);
    let promises = &snapshot.promises;
    let mut families = Families { out, snapshot, workloads: &workloads, promises, nodes: &nodes };
    families.allocated()?;
    families.resident()?;
    families.trouble()?;
    families.activity()?;
    families.exclusive_cpus()?;
    families.node_memory()?;
    families.promises()?;
    families.own()?;
    match &snapshot.process {
        Some(process) => of_process(process, Out::new(sink, None, admitted)),
        None => Ok(()),
    }
}

/// The metrics that Prometheus' client libraries have of any process, under their names.
fn of_process<S: Sink>(process: &ProcessFigures, mut out: Out<'_, S>) -> fmt::Result {
    let help = "Total user and system CPU time spent in seconds";
    out.counter("process_cpu_seconds", help)?.put(NONE, process.cpu.as_secs_f64())?;
    let since = |start: SystemTime| start.duration_since(SystemTime::UNIX_EPOCH).ok();
    let start = process.start.and_then(since).map(|since| Number::from(since.as_secs_f64()));
    for (name, help, value) in [
        (
            "process_resident_memory_bytes",
            "Resident memory size in bytes",
            Some(process.resident_memory.0.into()),
        ),
        (
            "process_virtual_memory_bytes",
            "Virtual memory size in bytes",
            Some(process.virtual_memory.0.into()),
        ),
        ("process_open_fds", "Number of open file descriptors", process.open_fds.map(Number::from)),
        ("process_max_fds", "Maximum number of open file descriptors", process.max_fds.map(Number::from)),
        ("process_start_time_seconds", "Start time of the process since unix epoch in seconds", start),
    ] {
        out.gauge(name, help)?.put_all(value.map(|value: Number| (NONE, value)))?;
    }
    Ok(())
}

pub(super) struct Families<'a, S> {
    pub(super) out: Out<'a, S>,
    pub(super) snapshot: &'a Snapshot,
    pub(super) workloads: &'a [(Named<'a>, &'a WorkloadFigures)],
    promises: &'a GuaranteeFigures,
    /// The label `numa_node` of each.
    pub(super) nodes: &'a [Made<'a>],
}

impl<S: Sink> Families<'_, S> {
    fn allocated(&mut self) -> fmt::Result {
        let (workloads, nodes) = (self.workloads, self.nodes);
        let mut family = self.out.counter(
            "memory_allocated_bytes",
            "User memory allocated, by node of the page and whether the allocating CPU was of that node",
        )?;
        let counted = || workloads.iter().filter_map(|(name, of)| Some((*name, of.allocated.as_ref()?)));
        for (name, allocated) in counted() {
            family.of(name);
            for (&node, bytes) in nodes.iter().zip(allocated) {
                family.put([node, made!("locality", "local")], bytes.local.0)?;
                family.put([node, made!("locality", "remote")], bytes.remote.0)?;
            }
        }
        let mut family = self.out.counter(
            "kernel_memory_allocated_bytes",
            "Kernel memory allocated on behalf of the workload, by node of the page; a lower bound",
        )?;
        for (name, allocated) in counted() {
            family.of(name);
            for (&node, bytes) in nodes.iter().zip(allocated) {
                family.put([node], bytes.kernel.0)?;
            }
        }
        let help = "Memory allocated on a page whose node the probe could not determine";
        let mut family = self.out.counter("unknown_node_allocated_bytes", help)?;
        family.put_all(self.snapshot.unknown_node.map(|Bytes(bytes)| (NONE, bytes)))
    }

    fn resident(&mut self) -> fmt::Result {
        let mut family = self.out.gauge(
            "memory_resident_bytes",
            "Memory of the workload by the node it lies on (memory.numa_stat; hugepages: hugetlb.*.numa_stat)",
        )?;
        for &(name, workload) in self.workloads {
            family.of(name);
            for (&node, bytes) in self.nodes.iter().zip(workload.resident.iter().flat_map(|of| of.iter())) {
                for (kind, Bytes(bytes)) in [
                    (made!("type", "anon"), bytes.anon),
                    (made!("type", "file"), bytes.file),
                    (made!("type", "kernel"), bytes.kernel),
                ] {
                    family.put([node, kind], bytes)?;
                }
            }
            for (size, resident) in workload.hugepages.iter() {
                let kind = ZoneKind::Hugepages(*size).to_string();
                for (node, Bytes(bytes)) in self.nodes.iter().zip(resident) {
                    family.put([(NODE, node.value), ("type", &kind)], bytes)?;
                }
            }
        }
        Ok(())
    }

    fn trouble(&mut self) -> fmt::Result {
        let mut seconds = |name, help, of: fn(PressureFigures) -> Duration| {
            let workloads = self.workloads.iter();
            let pressures =
                workloads.filter_map(|(name, workload)| Some((*name, of(workload.pressure?).as_secs_f64())));
            self.out.counter(name, help)?.put_each(pressures)
        };
        seconds(
            "memory_pressure_waiting_seconds",
            "Time in which a task of the workload waited for memory",
            |of| of.waiting,
        )?;
        seconds(
            "memory_pressure_stalled_seconds",
            "Time in which all tasks of the workload that had work waited for memory",
            |of| of.stalled,
        )?;
        let help = "Memory of the workload that the kernel moved between memory tiers: `demoted` to slower memory, `promoted` \
                    to faster memory; only on machines with several tiers, and since Linux 6.12";
        let mut family = self.out.counter("tiering_bytes", help)?;
        for &(name, workload) in self.workloads {
            let Some(tiering) = workload.tiering else { continue };
            let moved = [("demoted", tiering.demoted), ("promoted", tiering.promoted)];
            family
                .of(name)
                .put_all(moved.map(|(direction, Bytes(bytes))| ([("direction", direction)], bytes)))?;
        }
        Ok(())
    }

    fn node_memory(&mut self) -> fmt::Result {
        let help = "Memory of the node by kind (base pages or huge pages of one size) and state: all of it, what is \
                    kept for the system, what can be promised at all, what is promised, and what is left to promise \
                    (free)";
        let mut family = self.out.gauge("node_memory_bytes", help)?;
        for memory in &self.snapshot.nodes {
            let node = memory.node.to_string();
            for (kind, total, _) in &memory.kinds {
                let kind = kind.to_string();
                family.put([(NODE, node.as_str()), ("kind", &kind), ("state", "total")], total.0)?;
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
                family.put([(NODE, node.as_str()), ("kind", &kind), ("state", state)], bytes)?;
            }
        }
        let help =
            "Memory of the node that nobody uses, by kind: not what is left to promise, but what lies idle";
        let unused = self.snapshot.nodes.iter().flat_map(|memory| {
            memory
                .kinds
                .iter()
                .filter_map(|(kind, _, unused)| Some((of_kind(memory.node, *kind), (*unused)?.0)))
        });
        self.out.gauge("node_memory_unused_bytes", help)?.put_all(unused)?;
        let help = "Memory of the node that is still available (free or reclaimable, less what the kernel keeps and page \
                    cache within promises; of huge pages: free), less what is promised and not yet used; below zero where \
                    more is promised than is available now";
        let headroom =
            self.promises.headroom.iter().map(|(node, kind, bytes)| (of_kind(*node, *kind), bytes));
        self.out.gauge("node_headroom_bytes", help)?.put_all(headroom)?;
        let help = "1 if the node may soon not have the memory that is promised on it and not yet used, else 0; only of \
                    nodes on which memory is promised, and not with guard: off";
        let low = self.promises.low.iter().map(|(node, low)| ([(NODE, node.to_string())], u64::from(*low)));
        self.out.gauge("node_headroom_low", help)?.put_all(low)
    }

    fn promises(&mut self) -> fmt::Result {
        let mut family = self.out.counter(
            "numa_miss_bytes",
            "User memory that a workload with an allocation was given outside the nodes promised to it; hugepages with their \
             kind",
        )?;
        for missed in &self.promises.missed {
            family.of(&missed.workload);
            for (node, Bytes(bytes)) in &missed.bytes {
                family.put([(NODE, &node.to_string())], bytes)?;
            }
        }
        outside(&mut family, &self.promises.missed_hugepages)?;
        let help = "Hugepages of a workload with an allocation that lie outside the nodes promised to it";
        outside(&mut self.out.gauge("hugepages_misplaced_bytes", help)?, &self.promises.misplaced_hugepages)?;
        let help = "Memory of the workload on the node above its share there (strategy native, memory promised on several \
                    nodes)";
        let mut family = self.out.gauge("budget_excess_bytes", help)?;
        for over in &self.promises.over_budget {
            family.of(&over.workload);
            for (node, Bytes(bytes)) in &over.bytes {
                family.put([(NODE, &node.to_string())], bytes)?;
            }
        }
        self.residency()?;
        let missing = &self.promises.missing;
        let help = "Exclusive CPUs of the workload that are offline";
        let offline = missing.iter().map(|of| (&of.workload, of.offline_cpus));
        self.out.gauge("promised_cpus_offline", help)?.put_each(offline)?;
        let help = "Memory promised to the workload that its nodes do not have (any more)";
        let memory = missing.iter().map(|of| (&of.workload, of.uncovered.0));
        self.out.gauge("promised_memory_missing_bytes", help)?.put_each(memory)?;
        let help = "CPUs that are exclusive to workloads, by node";
        let cpus = self.promises.exclusive_cpus.iter().map(|(node, cpus)| ([(NODE, node.to_string())], cpus));
        self.out.gauge("cpu_manager_exclusive_cpus", help)?.put_all(cpus)?;
        if let Some(cpus) = self.promises.shared_pool_cpus {
            let help = "CPUs that are exclusive to nobody";
            self.out.gauge("cpu_manager_shared_pool_cpus", help)?.put(NONE, cpus)?;
        }
        Ok(())
    }

    fn residency(&mut self) -> fmt::Result {
        let residency = &self.promises.residency;
        let help = "Memory promised to the workload on the node, by kind";
        let mut family = self.out.gauge("promised_bytes", help)?;
        for of in residency {
            family.of(&of.workload);
            family.put_all(of.promised.iter().map(|(node, bytes)| (of_kind(*node, of.kind), bytes.0)))?;
        }
        let help = "User memory of a workload with an allocation, by kind and where it lies now: on the nodes promised to \
                    it, or off them";
        let mut family = self.out.gauge("promise_resident_bytes", help)?;
        for of in residency {
            let Some(resident) = of.resident else { continue };
            let kind = of.kind.to_string();
            family.of(&of.workload);
            for (place, Bytes(bytes)) in [("on", resident.on), ("off", resident.off)] {
                family.put([("kind", kind.as_str()), ("where", place)], bytes)?;
            }
        }
        Ok(())
    }

    /// What numaward says about itself.
    fn own(&mut self) -> fmt::Result {
        let snapshot = self.snapshot;
        let help = "Workloads that are observed, by whether they have counters of their own";
        let mut family = self.out.gauge("workloads", help)?;
        family.put([("counters", "own")], snapshot.workloads_with_slot)?;
        family.put([("counters", "other")], snapshot.workloads_without_slot)?;

        let help = "1 if the part works less well than it should, else 0; `numaward status` says why";
        let degraded = snapshot.degraded.iter().map(|(part, is)| ([("part", *part)], u64::from(*is)));
        self.out.gauge("degraded", help)?.put_all(degraded)?;
        let help = "How the probe is attached and why not better, of which `numaward status` says more";
        let probes = snapshot.probes.iter().map(|probe| {
            ([("probe", &*probe.probe), ("mode", &probe.mode), ("reason", probe.reason)], 1_u64)
        });
        self.out.info("probe", help)?.put_all(probes)?;
        self.of_probes(
            Kind::Counter,
            "probe_runtime_seconds",
            "Time spent in the probe while the kernel measured it: for some seconds after the start, and while \
             kernel.bpf_stats_enabled is set. Divided by the runs, it is what one run costs",
            |probe| Some(probe.runtime?.as_secs_f64()),
        )?;
        let help = "Runs of the probe while the kernel measured it";
        self.of_probes(Kind::Counter, "probe_runs", help, |probe| probe.runs)?;
        self.of_probes(
            Kind::Gauge,
            "probe_sampled_ratio",
            "Which part of the time the probe watches; below 1, what it counts is multiplied accordingly, and so is an \
             estimate",
            |probe| probe.sampled_ratio,
        )?;
        let help = "Events that the kernel did not hand to the probe, or for which its maps had no room";
        self.of_probes(Kind::Counter, "probe_events_lost", help, |probe| probe.events_lost)?;
        let entries = snapshot.maps.iter().map(|map| ([("map", map.map)], map.entries));
        self.out.gauge("probe_map_entries", "Entries in use in the map")?.put_all(entries)?;
        let help = "Kernel memory that the maps of the family of probes take";
        let memory = snapshot.map_memory.iter().map(|(name, bytes)| ([("family", *name)], bytes));
        self.out.gauge("probe_map_memory_bytes", help)?.put_all(memory)?;
        let capacity = snapshot.maps.iter().map(|map| ([("map", map.map)], map.capacity));
        self.out.gauge("probe_map_capacity", "Entries the map has room for")?.put_all(capacity)
    }

    /// A family with a sample of each probe that has the value.
    fn of_probes<V: Into<Number>>(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        value: impl Fn(&ProbeFigures) -> Option<V>,
    ) -> fmt::Result {
        let probes = self.snapshot.probes.iter();
        let samples = probes.filter_map(|probe| Some(([("probe", &probe.probe)], value(probe)?)));
        self.out.begin(kind, name, help)?.put_all(samples)
    }
}

/// The labels of a node and a kind of its memory.
fn of_kind(node: NodeId, kind: ZoneKind) -> [(&'static str, String); 2] {
    [(NODE, node.to_string()), ("kind", kind.to_string())]
}

/// Puts hugepages that are outside of promises.
fn outside<S: Sink>(family: &mut Family<'_, S>, hugepages: &[HugepagesOutside]) -> fmt::Result {
    for of in hugepages {
        family.of(&of.workload);
        family.put_all(
            of.bytes.iter().map(|(node, bytes)| (of_kind(*node, ZoneKind::Hugepages(of.size)), bytes.0)),
        )?;
    }
    Ok(())
}

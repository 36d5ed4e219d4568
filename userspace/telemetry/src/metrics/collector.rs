//! Conversion of a [`Snapshot`] to metric families.

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
    family::{
        Family, FamilyKind, FamilySink, FamilyWriter, FormattedLabel, NO_LABELS, Number, WorkloadLabel,
        formatted_label,
    },
    text::WorkloadTexts,
};

/// Adds the families of a snapshot to a sink: all, or those that the filter admits.
pub(super) fn collect(
    snapshot: &Snapshot,
    sink: &mut impl FamilySink,
    admitted: Option<&MetricFilter>,
) -> fmt::Result {
    let nodes: Vec<_> = snapshot
        .nodes
        .iter()
        .map(|node| (node.node.to_string(), format!("numa_node=\"{}\"", node.node)))
        .collect();
    let nodes: Vec<_> =
        nodes.iter().map(|(value, text)| FormattedLabel { name: NODE, value, text }).collect();
    let labels = WorkloadTexts::new(snapshot.workloads.iter().map(|of| &*of.name));
    let workloads = snapshot.workloads.iter().zip(labels.iter());
    let workloads: Vec<_> = workloads
        .map(|(of, text)| (WorkloadLabel { name: &of.name, text: Some(text), start: of.start }, of))
        .collect();
    let out = FamilyWriter::new(sink, Some(PREFIX), admitted);
    let guarantees = &snapshot.guarantees;
    let mut families = Families { out, snapshot, workloads: &workloads, guarantees, nodes: &nodes };
    families.add_allocations()?;
    families.add_cpu_time()?;
    families.add_resident_memory()?;
    families.add_pressure_and_tiering()?;
    families.add_activity()?;
    families.add_exclusive_cpus()?;
    families.add_node_memory()?;
    families.add_guarantees()?;
    families.add_self_metrics()?;
    match &snapshot.process {
        Some(process) => add_process_metrics(process, FamilyWriter::new(sink, None, admitted)),
        None => Ok(()),
    }
}

/// Adds the standard process metrics of Prometheus' client libraries.
fn add_process_metrics<S: FamilySink>(process: &ProcessFigures, mut out: FamilyWriter<'_, S>) -> fmt::Result {
    let help = "Total user and system CPU time spent in seconds";
    out.counter("process_cpu_seconds", help)?.add(NO_LABELS, process.cpu.as_secs_f64())?;
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
        out.gauge(name, help)?.add_all(value.map(|value: Number| (NO_LABELS, value)))?;
    }
    Ok(())
}

pub(super) struct Families<'a, S> {
    pub(super) out: FamilyWriter<'a, S>,
    pub(super) snapshot: &'a Snapshot,
    pub(super) workloads: &'a [(WorkloadLabel<'a>, &'a WorkloadFigures)],
    guarantees: &'a GuaranteeFigures,
    /// The label `numa_node` of each node.
    pub(super) nodes: &'a [FormattedLabel<'a>],
}

impl<S: FamilySink> Families<'_, S> {
    fn add_allocations(&mut self) -> fmt::Result {
        let (workloads, nodes) = (self.workloads, self.nodes);
        let mut family = self.out.counter(
            "memory_allocated_bytes",
            "User memory allocated, by node of the page and by locality (local: allocated by a CPU of that node)",
        )?;
        let counted = || workloads.iter().filter_map(|(name, of)| Some((*name, of.allocated.as_ref()?)));
        for (name, allocated) in counted() {
            family.for_workload(name);
            for (&node, bytes) in nodes.iter().zip(allocated) {
                family.add([node, formatted_label!("locality", "local")], bytes.local.0)?;
                family.add([node, formatted_label!("locality", "remote")], bytes.remote.0)?;
            }
        }
        let mut family = self.out.counter(
            "kernel_memory_allocated_bytes",
            "Kernel memory that tasks of the workload allocated, by node of the page. A lower bound: memory of interrupts \
             (see unattributed_allocated_bytes) and bulk allocations are not included",
        )?;
        for (name, allocated) in counted() {
            family.for_workload(name);
            for (&node, bytes) in nodes.iter().zip(allocated) {
                family.add([node], bytes.kernel.0)?;
            }
        }
        let help = "Memory booked to no workload, because the allocating task does not use it, by node of the page and by \
                    reason (atomic: allocated without permission to sleep, as in interrupts; reclaim: by a task that frees \
                    memory, for pages that it demotes or compresses)";
        let mut family = self.out.counter("unattributed_allocated_bytes", help)?;
        for (&node, bytes) in nodes.iter().zip(self.snapshot.unattributed.iter().flatten()) {
            family.add([node, formatted_label!("reason", "atomic")], bytes.atomic.0)?;
            family.add([node, formatted_label!("reason", "reclaim")], bytes.reclaim.0)?;
        }
        let help = "Memory allocated on pages of a node that the probe could not determine";
        let mut family = self.out.counter("unknown_node_allocated_bytes", help)?;
        family.add_all(self.snapshot.unknown_node.map(|Bytes(bytes)| (NO_LABELS, bytes)))
    }

    fn add_cpu_time(&mut self) -> fmt::Result {
        let help = "CPU time of the workload, by node of the CPU: the kernel's own account, of which usage_usec of cpu.stat is \
                    the sum. Kernel threads, which are in the root cgroup, are of no workload";
        let mut family = self.out.counter("cpu_seconds", help)?;
        for &(name, workload) in self.workloads {
            family.for_workload(name);
            for (&node, time) in self.nodes.iter().zip(workload.cpu.iter().flatten()) {
                family.add([node], time.as_secs_f64())?;
            }
        }
        Ok(())
    }

    fn add_resident_memory(&mut self) -> fmt::Result {
        let mut family = self.out.gauge(
            "memory_resident_bytes",
            "Memory of the workload, by node and type (memory.numa_stat; hugepages: hugetlb.*.numa_stat)",
        )?;
        for &(name, workload) in self.workloads {
            family.for_workload(name);
            for (&node, bytes) in self.nodes.iter().zip(workload.resident.iter().flat_map(|of| of.iter())) {
                for (kind, Bytes(bytes)) in [
                    (formatted_label!("type", "anon"), bytes.anon),
                    (formatted_label!("type", "file"), bytes.file),
                    (formatted_label!("type", "kernel"), bytes.kernel),
                ] {
                    family.add([node, kind], bytes)?;
                }
            }
            for (size, resident) in workload.hugepages.iter() {
                let kind = ZoneKind::Hugepages(*size).to_string();
                for (node, Bytes(bytes)) in self.nodes.iter().zip(resident) {
                    family.add([(NODE, node.value), ("type", &kind)], bytes)?;
                }
            }
        }
        Ok(())
    }

    fn add_pressure_and_tiering(&mut self) -> fmt::Result {
        let mut seconds = |name, help, of: fn(PressureFigures) -> Duration| {
            let workloads = self.workloads.iter();
            let pressures =
                workloads.filter_map(|(name, workload)| Some((*name, of(workload.pressure?).as_secs_f64())));
            self.out.counter(name, help)?.add_for_each(pressures)
        };
        seconds(
            "memory_pressure_waiting_seconds",
            "Time in which at least one task of the workload waited for memory",
            |of| of.waiting,
        )?;
        seconds(
            "memory_pressure_stalled_seconds",
            "Time in which all runnable tasks of the workload waited for memory",
            |of| of.stalled,
        )?;
        let help = "Memory of the workload that the kernel moved between memory tiers: `demoted` to a slower tier, \
                    `promoted` to a faster one; only on machines with several tiers, and since Linux 6.12";
        let mut family = self.out.counter("tiering_bytes", help)?;
        for &(name, workload) in self.workloads {
            let Some(tiering) = workload.tiering else { continue };
            let moved = [("demoted", tiering.demoted), ("promoted", tiering.promoted)];
            family
                .for_workload(name)
                .add_all(moved.map(|(direction, Bytes(bytes))| ([("direction", direction)], bytes)))?;
        }
        Ok(())
    }

    fn add_node_memory(&mut self) -> fmt::Result {
        let help = "Memory of the node, by kind (base pages or hugepages of one size) and state: total, reserved for \
                    the system, allocatable (can be guaranteed), promised (is guaranteed), and free (can still be \
                    guaranteed)";
        let mut family = self.out.gauge("node_memory_bytes", help)?;
        for memory in &self.snapshot.nodes {
            let node = memory.node.to_string();
            for (kind, total, _) in &memory.kinds {
                let kind = kind.to_string();
                family.add([(NODE, node.as_str()), ("kind", &kind), ("state", "total")], total.0)?;
            }
        }
        for of in &self.guarantees.kinds {
            let (node, kind) = (of.node.to_string(), of.kind.to_string());
            for (state, Bytes(bytes)) in [
                ("reserved", of.reserved),
                ("allocatable", of.allocatable),
                ("promised", of.guaranteed),
                ("free", of.free),
            ] {
                family.add([(NODE, node.as_str()), ("kind", &kind), ("state", state)], bytes)?;
            }
        }
        let help = "Memory of the node that is not in use, by kind, even if it is guaranteed";
        let unused = self.snapshot.nodes.iter().flat_map(|memory| {
            memory
                .kinds
                .iter()
                .filter_map(|(kind, _, unused)| Some((kind_labels(memory.node, *kind), (*unused)?.0)))
        });
        self.out.gauge("node_memory_unused_bytes", help)?.add_all(unused)?;
        let help = "Available memory of the node minus the guaranteed memory that is not used yet, by kind; negative \
                    if more is guaranteed than available. Available memory is free or reclaimable, without the \
                    kernel's reserves and the page cache of workloads with a guarantee; of hugepages, only free ones \
                    are available";
        let headroom =
            self.guarantees.headroom.iter().map(|(node, kind, bytes)| (kind_labels(*node, *kind), bytes));
        self.out.gauge("node_headroom_bytes", help)?.add_all(headroom)?;
        let help = "1 if the node may soon not have the memory that is guaranteed on it and not used yet, else 0; only \
                    for nodes with guaranteed memory, and not with guard: off";
        let low = self.guarantees.low.iter().map(|(node, low)| ([(NODE, node.to_string())], u64::from(*low)));
        self.out.gauge("node_headroom_low", help)?.add_all(low)
    }

    fn add_guarantees(&mut self) -> fmt::Result {
        let mut family = self.out.counter(
            "numa_miss_bytes",
            "User memory outside its guaranteed nodes that was charged to a workload with a guarantee or, if the probe \
             charge is absent (see probe_info), that its tasks asked for; hugepages with their kind. A Burstable \
             workload has none: its memory may be anywhere, see promise_broken",
        )?;
        // Both are in the order of names.
        let mut labels = self.workloads.iter().map(|(label, _)| *label);
        for missed in &self.guarantees.missed {
            let label = labels.find(|label| *label.name == *missed.workload);
            family.for_workload(label.unwrap_or_else(|| (&missed.workload).into()));
            for (node, Bytes(bytes)) in &missed.bytes {
                family.add([(NODE, &node.to_string())], bytes)?;
            }
        }
        add_hugepages_outside(&mut family, &self.guarantees.missed_hugepages)?;
        let help = "Hugepages of a workload with a guarantee that are outside its guaranteed nodes";
        add_hugepages_outside(
            &mut self.out.gauge("hugepages_misplaced_bytes", help)?,
            &self.guarantees.misplaced_hugepages,
        )?;
        let help = "Memory of the workload on the node above its share there (strategy native, memory guaranteed on \
                    several nodes)";
        let mut family = self.out.gauge("budget_excess_bytes", help)?;
        for over in &self.guarantees.over_budget {
            family.for_workload(&over.workload);
            for (node, Bytes(bytes)) in &over.bytes {
                family.add([(NODE, &node.to_string())], bytes)?;
            }
        }
        self.add_guarantee_residency()?;
        let missing = &self.guarantees.missing;
        let help = "Exclusive CPUs of the workload that are offline";
        let offline = missing.iter().map(|of| (&of.workload, of.offline_cpus));
        self.out.gauge("promised_cpus_offline", help)?.add_for_each(offline)?;
        let help = "Memory guaranteed to the workload that its nodes do not have (any more)";
        let memory = missing.iter().map(|of| (&of.workload, of.uncovered.0));
        self.out.gauge("promised_memory_missing_bytes", help)?.add_for_each(memory)?;
        let help = "Exclusive CPUs, by node";
        let cpus =
            self.guarantees.exclusive_cpus.iter().map(|(node, cpus)| ([(NODE, node.to_string())], cpus));
        self.out.gauge("cpu_manager_exclusive_cpus", help)?.add_all(cpus)?;
        if let Some(cpus) = self.guarantees.shared_pool_cpus {
            let help = "CPUs of the shared pool";
            self.out.gauge("cpu_manager_shared_pool_cpus", help)?.add(NO_LABELS, cpus)?;
        }
        Ok(())
    }

    fn add_guarantee_residency(&mut self) -> fmt::Result {
        let residency = &self.guarantees.residency;
        let help = "Memory guaranteed to the workload on the node, by kind";
        let mut family = self.out.gauge("promised_bytes", help)?;
        for of in residency {
            family.for_workload(&of.workload);
            family
                .add_all(of.guaranteed.iter().map(|(node, bytes)| (kind_labels(*node, of.kind), bytes.0)))?;
        }
        let help = "User memory of a workload with a guarantee, by kind, by place (on its guaranteed nodes, or off \
                    them) and by type (anon, shmem, file: page cache without shared memory; the kind of hugepages). \
                    The memory of a Burstable workload beyond its guarantee is not off its nodes";
        let mut family = self.out.gauge("promise_resident_bytes", help)?;
        for of in residency {
            let Some(resident) = of.resident else { continue };
            let kind = of.kind.to_string();
            family.for_workload(&of.workload);
            for (place, memory) in [("on", resident.on), ("off", resident.off)] {
                let types = match of.kind {
                    ZoneKind::Memory => {
                        vec![("anon", memory.anon), ("shmem", memory.shmem), ("file", memory.file)]
                    }
                    ZoneKind::Hugepages(_) => vec![(kind.as_str(), memory.total())],
                };
                for (name, Bytes(bytes)) in types {
                    family.add([("kind", kind.as_str()), ("where", place), ("type", name)], bytes)?;
                }
            }
        }
        let help = "1 if the guarantee of the workload's memory of the kind is broken, else 0: more than 16 MiB and \
                    more than 1 % of its anonymous and shared memory are off its guaranteed nodes";
        let mut family = self.out.gauge("promise_broken", help)?;
        for of in residency.iter().filter(|of| of.resident.is_some()) {
            family.for_workload(&of.workload);
            family.add([("kind", of.kind.to_string())], u64::from(of.is_broken))?;
        }
        Ok(())
    }

    /// Adds the metrics of the daemon itself.
    fn add_self_metrics(&mut self) -> fmt::Result {
        let snapshot = self.snapshot;
        let help = "Observed workloads, by counters: own (each has its own), or other (counted together)";
        let mut family = self.out.gauge("workloads", help)?;
        family.add([("counters", "own")], snapshot.workloads_with_slot)?;
        family.add([("counters", "other")], snapshot.workloads_without_slot)?;

        let help = "1 if the part is degraded, else 0; `numaward status` shows the reason";
        let degraded = snapshot.degraded.iter().map(|(part, is)| ([("part", *part)], u64::from(*is)));
        self.out.gauge("degraded", help)?.add_all(degraded)?;
        let help = "Method by which the probe is attached, and the reason if it is not the best one; `numaward status` \
                    shows details";
        let probes = snapshot.probes.iter().map(|probe| {
            ([("probe", &*probe.probe), ("mode", &probe.mode), ("reason", probe.reason)], 1_u64)
        });
        self.out.info("probe", help)?.add_all(probes)?;
        self.add_probe_family(
            FamilyKind::Counter,
            "probe_runtime_seconds",
            "Run time of the probe while the kernel measured it: for some seconds after the start, and while \
             kernel.bpf_stats_enabled is set. Divided by probe_runs, it is the time of one run",
            |probe| Some(probe.runtime?.as_secs_f64()),
        )?;
        let help = "Runs of the probe while the kernel measured it";
        self.add_probe_family(FamilyKind::Counter, "probe_runs", help, |probe| probe.runs)?;
        self.add_probe_family(
            FamilyKind::Gauge,
            "probe_sampled_ratio",
            "Part of the time in which the probe is attached; below 1, its counts are scaled accordingly and are \
             estimates",
            |probe| probe.sampled_ratio,
        )?;
        let help =
            "Events that the kernel dropped before they reached the probe, or that did not fit into its maps";
        self.add_probe_family(FamilyKind::Counter, "probe_events_lost", help, |probe| probe.events_lost)?;
        let help = "Pages that the allocation probe has seen, divided by those that the kernel has allocated (pgalloc_* of \
                    /proc/vmstat), in the last hour. Below 1, because bulk allocations (vmalloc, kernel stacks, buffers of \
                    network drivers) fire no tracepoint; absent with a duty cycle, and until 10,000 pages are allocated";
        let ratio = snapshot.coverage_permille.map(|permille| f64::from(permille) / 1000.0);
        self.out.gauge("coverage_ratio", help)?.add_all(ratio.map(|ratio| (NO_LABELS, ratio)))?;
        let entries = snapshot.maps.iter().map(|map| ([("map", map.map)], map.entries));
        self.out.gauge("probe_map_entries", "Entries in use in the map")?.add_all(entries)?;
        let help = "Kernel memory of the maps of the family of probes";
        let memory = snapshot.map_memory.iter().map(|(name, bytes)| ([("family", *name)], bytes));
        self.out.gauge("probe_map_memory_bytes", help)?.add_all(memory)?;
        let capacity = snapshot.maps.iter().map(|map| ([("map", map.map)], map.capacity));
        self.out.gauge("probe_map_capacity", "Maximum number of entries in the map")?.add_all(capacity)
    }

    /// Adds a family with a sample for each probe that has the value.
    fn add_probe_family<V: Into<Number>>(
        &mut self,
        kind: FamilyKind,
        name: &str,
        help: &str,
        value: impl Fn(&ProbeFigures) -> Option<V>,
    ) -> fmt::Result {
        let probes = self.snapshot.probes.iter();
        let samples = probes.filter_map(|probe| Some(([("probe", &probe.probe)], value(probe)?)));
        self.out.begin(kind, name, help)?.add_all(samples)
    }
}

/// Returns the labels of a node and a kind of its memory.
fn kind_labels(node: NodeId, kind: ZoneKind) -> [(&'static str, String); 2] {
    [(NODE, node.to_string()), ("kind", kind.to_string())]
}

/// Adds samples of hugepages outside guaranteed nodes.
fn add_hugepages_outside<S: FamilySink>(
    family: &mut Family<'_, S>,
    hugepages: &[HugepagesOutside],
) -> fmt::Result {
    for of in hugepages {
        family.for_workload(&of.workload);
        family.add_all(
            of.bytes.iter().map(|(node, bytes)| (kind_labels(*node, ZoneKind::Hugepages(of.size)), bytes.0)),
        )?;
    }
    Ok(())
}

//! Metric families of workload activity other than allocations (accesses, migrations, stalls, OOM kills), and of the
//! use of exclusive CPUs.

use std::{fmt, time::Duration};

use numaward_model::snapshot::{
    MigratedFigures, OomKillFigures, StallFigures, WorkloadActivity, WorkloadFigures,
};
use numaward_topology::{Bytes, CpuId, ZoneKind};

use super::{
    NODE,
    collector::Families,
    family::{Bound, FamilyKind, FamilySink, WorkloadLabel, formatted_label},
};

/// The bounds of the histogram of stalls in seconds, each with the number of buckets of [`StallFigures`] below it.
const STALL_BOUNDS: [(Bound, usize); 11] = [
    (Bound(0.000_016, "0.000016"), 5),
    (Bound(0.000_064, "0.000064"), 7),
    (Bound(0.000_256, "0.000256"), 9),
    (Bound(0.001_024, "0.001024"), 11),
    (Bound(0.004_096, "0.004096"), 13),
    (Bound(0.016_384, "0.016384"), 15),
    (Bound(0.065_536, "0.065536"), 17),
    (Bound(0.262_144, "0.262144"), 19),
    (Bound(1.048_576, "1.048576"), 21),
    (Bound(4.194_304, "4.194304"), 23),
    (Bound(f64::INFINITY, "+Inf"), usize::MAX),
];

impl<S: FamilySink> Families<'_, S> {
    pub(super) fn add_activity(&mut self) -> fmt::Result {
        self.add_hugepages()?;
        self.add_accesses()?;
        self.add_dram_accesses()?;
        self.add_migrations()?;
        self.add_stalls()?;
        self.add_oom_kills()
    }

    fn add_hugepages(&mut self) -> fmt::Result {
        let nodes = self.nodes;
        let help = "Hugepages taken from the pools, by node of the page and by locality (local: taken by a CPU for \
                    which that is the nearest node with memory)";
        let mut family = self.out.counter("hugepages_allocated_bytes", help)?;
        for (name, hugepages) in with_activity(self.workloads, |of| of.hugepages.as_ref()) {
            family.for_workload(name);
            for (size, by_node) in hugepages {
                let kind = ZoneKind::Hugepages(*size).to_string();
                for (node, bytes) in nodes.iter().zip(by_node) {
                    for (locality, Bytes(bytes)) in [("local", bytes.local), ("remote", bytes.remote)] {
                        let labels = [(NODE, node.value), ("kind", &*kind), ("locality", locality)];
                        family.add(labels, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn add_accesses(&mut self) -> fmt::Result {
        let (snapshot, nodes) = (self.snapshot, self.nodes);
        let workloads = self.workloads;
        let workloads = || workloads.iter().filter_map(|(name, of)| Some((*name, of.activity.as_ref()?)));
        let help = "Pages of other nodes that the workload's tasks touched, by scan of NUMA balancing, by the node of the \
                    CPU: a page counts about once per scan, however often it is used. Without scans, they are \
                    unknown rather than zero: see remote_sampling_info";
        let mut family = self.out.counter("remote_access_pages", help)?;
        for (name, activity) in workloads() {
            family.for_workload(name);
            for (&node, pages) in nodes.iter().zip(activity.remote.iter().flatten()) {
                family.add([node, formatted_label!("source", "hint_fault")], pages)?;
            }
            if let Some(pages) = activity.moved {
                let source = ("source", "memory_stat");
                family.add([(NODE, "unknown"), source], pages)?;
            }
        }
        let help = "Pages that the workload's tasks touched, by scan of NUMA balancing, by locality (local: a page of the \
                    CPU's node). The ratio of both is the share of touched pages, not of accesses";
        let mut family = self.out.counter("touched_pages", help)?;
        for (name, activity) in workloads() {
            let (Some(local), Some(remote)) = (activity.local, activity.remote.as_ref()) else { continue };
            let remote = remote.iter().fold(0_u64, |sum, pages| sum.saturating_add(*pages));
            family.for_workload(name);
            for (locality, pages) in [("local", local), ("remote", remote)] {
                family.add([("locality", locality), ("source", "hint_fault")], pages)?;
            }
        }
        let help = "Pages that tasks of all workloads touched, by scan of NUMA balancing, by the node of the CPU and that \
                    of the memory (unknown if the page was moved at once)";
        let accesses = snapshot.accesses.iter().flatten().map(|(node, memory, pages)| {
            let memory = memory.map_or_else(|| "unknown".to_owned(), |memory| memory.to_string());
            ([(NODE, node.to_string()), ("memory_numa_node", memory)], pages)
        });
        self.out.counter("node_access_pages", help)?.add_all(accesses)?;
        let mut family = self
            .out
            .info("remote_sampling", "State of the scans of NUMA balancing: on, or the reason why the kernel does not scan the workload's memory")?;
        for (name, activity) in workloads() {
            for state in &activity.sampling {
                family.for_workload(name).add([("state", state)], 1_u64)?;
            }
        }
        let help = "Estimated share of accesses to memory of other nodes (observe.remoteEstimate), from the placement \
                    of threads and memory; only for workloads without scans. It is not a measurement";
        let estimates = workloads().filter_map(|(name, activity)| {
            Some((name, f64::from(activity.estimated_remote_permille?) / 1000.0))
        });
        self.out.gauge("remote_access_estimated_ratio", help)?.add_for_each(estimates)
    }

    fn add_dram_accesses(&mut self) -> fmt::Result {
        let nodes = self.nodes;
        let help = "Accesses to DRAM as the processor counts them, demand only (Intel: retired loads, AMD: cache \
                    lines filled on demand; neither counts prefetches; Arm: reads of other sockets), by the node of \
                    the CPU and by locality (local: memory of that node); only if probes.hardware is enabled";
        let mut family = self.out.counter("dram_accesses", help)?;
        for (name, dram) in with_activity(self.workloads, |of| of.dram.as_ref()) {
            family.for_workload(name);
            for (&node, (local, remote)) in nodes.iter().zip(dram) {
                family.add_all(local.map(|local| ([node, formatted_label!("locality", "local")], local)))?;
                family.add([node, formatted_label!("locality", "remote")], remote)?;
            }
        }
        Ok(())
    }

    fn add_migrations(&mut self) -> fmt::Result {
        let page_size = self.snapshot.page_size.0;
        let help = "Memory moved to another node by a task of the workload, by reason and by nodes. The nodes are unknown \
                    on hosts with many nodes and slots (above 18 nodes with 512 slots). Before Linux 6.1, and where programs \
                    cannot be attached to functions, they are unknown, too, and moves within a node count, except those of \
                    compaction";
        let mut family = self.out.counter("migrated_bytes", help)?;
        for (name, migrated) in with_activity(self.workloads, |of| of.migrated.as_ref()) {
            family.for_workload(name);
            for &MigratedFigures { reason, nodes, pages } in migrated {
                let (from, to) = nodes.map_or_else(
                    || ("unknown".to_owned(), "unknown".to_owned()),
                    |(from, to)| (from.to_string(), to.to_string()),
                );
                let labels =
                    [("reason", reason), ("from_numa_node", from.as_str()), ("to_numa_node", to.as_str())];
                family.add(labels, pages.saturating_mul(page_size))?;
            }
        }
        Ok(())
    }

    fn add_stalls(&mut self) -> fmt::Result {
        let help = "Time that tasks of the workload spent in direct reclaim. Throttling by memory.high is not \
                    included: see memory_pressure";
        let mut family = self.out.begin(FamilyKind::Histogram, "reclaim_stall_seconds", help)?;
        with_activity(self.workloads, |of| of.stalls.as_ref()).try_for_each(|(name, stalls)| {
            family.for_workload(name).histogram(stalls.total.as_secs_f64(), &cumulative_buckets(stalls))
        })
    }

    fn add_oom_kills(&mut self) -> fmt::Result {
        let help = "Kills of the workload's processes by the OOM killer, by the constraint of the allocation: cpuset and \
                    mempolicy come from pinning, with `elsewhere`: free if other nodes had free memory, none if the \
                    whole host was full. With memory.oom.group, all processes that are killed at once count as one; \
                    `unknown` (from memory.events, if no probe reports it) counts each process";
        let mut family = self.out.counter("oom_kills", help)?;
        for &(name, workload) in self.workloads {
            let by_constraint = workload.activity.as_ref().and_then(|of| of.oom_kills);
            match (by_constraint, workload.oom_kills) {
                (Some(kills), _) => {
                    family.for_workload(name);
                    for OomKillFigures { constraint, count, without_room } in kills {
                        let constraint = ("constraint", constraint);
                        let Some(without_room) = without_room else {
                            family.add([constraint], count)?;
                            continue;
                        };
                        family
                            .add([constraint, ("elsewhere", "free")], count.saturating_sub(without_room))?;
                        family.add([constraint, ("elsewhere", "none")], without_room)?;
                    }
                }
                (None, Some(kills)) => {
                    family.for_workload(name).add([("constraint", "unknown")], kills)?;
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    pub(super) fn add_exclusive_cpus(&mut self) -> fmt::Result {
        let cpus = &self.snapshot.exclusive_cpus;
        let help =
            "Time that tasks of other workloads ran on the CPU while it was exclusive, by class of the task";
        let intruders = cpus.iter().flat_map(|(cpu, figures)| {
            let time =
                |(class, time): (&str, Duration)| (cpu_labels(*cpu, "class", class), time.as_secs_f64());
            figures.intruders.map(time)
        });
        self.out.counter("exclusive_cpu_intruder_seconds", help)?.add_all(intruders)?;
        let help = "Interrupts on the CPU while it was exclusive";
        let interrupts = cpus.iter().flat_map(|(cpu, figures)| {
            let kinds = figures.interrupts.map(|both| [("hard", both.hard), ("soft", both.soft)]);
            kinds.into_iter().flatten().map(|(kind, count)| (cpu_labels(*cpu, "kind", kind), count))
        });
        self.out.counter("exclusive_cpu_interrupts", help)?.add_all(interrupts)?;
        let help = "Time that the CPU spent on interrupts while it was exclusive (/proc/stat: irq and softirq); exact only \
                    if the kernel has CONFIG_IRQ_TIME_ACCOUNTING, else sampled by the timer tick";
        let times = cpus.iter().flat_map(|(cpu, figures)| {
            let kinds = figures.interrupts.map(|both| [("hard", both.hard_time), ("soft", both.soft_time)]);
            let times = kinds.into_iter().flatten();
            times.map(|(kind, time)| (cpu_labels(*cpu, "kind", kind), time.as_secs_f64()))
        });
        self.out.counter("exclusive_cpu_interrupt_seconds", help)?.add_all(times)
    }
}

fn cpu_labels(cpu: CpuId, label: &'static str, value: &str) -> [(&'static str, String); 2] {
    [("cpu", cpu.to_string()), (label, value.to_owned())]
}

/// Returns the workloads that have a part of their activity, with the part.
fn with_activity<'s, T: 's>(
    workloads: &'s [(WorkloadLabel<'s>, &'s WorkloadFigures)],
    part: impl Fn(&'s WorkloadActivity) -> Option<&'s T>,
) -> impl Iterator<Item = (WorkloadLabel<'s>, &'s T)> {
    workloads.iter().filter_map(move |(name, of)| Some((*name, part(of.activity.as_ref()?)?)))
}

/// Returns the number of stalls up to each bound, saturating.
fn cumulative_buckets(stalls: &StallFigures) -> [(Bound, u64); STALL_BOUNDS.len()] {
    STALL_BOUNDS.map(|(bound, buckets)| {
        let counts = stalls.buckets.iter().take(buckets);
        (bound, counts.fold(0_u64, |sum, count| sum.saturating_add(*count)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stall_is_below_its_bound() {
        let mut stalls = StallFigures::default();
        for (bucket, count) in stalls.buckets.iter_mut().zip(1..) {
            *bucket = count;
        }
        let found = cumulative_buckets(&stalls);
        // Each bound is four times the one before.
        for ((bound, buckets), micros) in STALL_BOUNDS.iter().zip((2..12).map(|power| 1_u32 << (2 * power))) {
            assert_eq!(bound.1, (f64::from(micros) / 1e6).to_string());
            assert_eq!(bound.1, bound.0.to_string());
            assert_eq!(1 << (buckets - 1), micros);
        }
        let sum = |count: u64| count * (count + 1) / 2;
        assert_eq!(
            found.map(|(_, count)| count),
            [
                sum(5),
                sum(7),
                sum(9),
                sum(11),
                sum(13),
                sum(15),
                sum(17),
                sum(19),
                sum(21),
                sum(23),
                stalls.buckets.iter().sum()
            ]
        );
        stalls.buckets[0] = u64::MAX;
        assert_eq!(cumulative_buckets(&stalls)[10].1, u64::MAX);
    }
}

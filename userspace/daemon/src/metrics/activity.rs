//! The families of what workloads do beside allocating: accesses, migrations, stalls, kills; and who runs on
//! exclusive CPUs.

use std::fmt;

use numaward_probes::{IntruderClass, OOM_CONSTRAINT_NAMES, Stalls};
use prometheus_client::{encoding::NoLabelSet, registry::Unit};

use super::collector::{Families, Family, Labels, LeadingLabels};

/// The bounds of the histogram of stalls, as buckets of [`Stalls`]: 2^4 microseconds, and so on.
const STALL_BOUNDS: [usize; 5] = [4, 8, 12, 16, 20];

impl Families<'_, '_> {
    pub(super) fn activity(&mut self) -> fmt::Result {
        self.accesses()?;
        self.dram()?;
        self.migrated()?;
        self.stalls()?;
        self.oom_kills()
    }

    fn accesses(&mut self) -> fmt::Result {
        let (snapshot, nodes) = (self.snapshot, self.nodes);
        let workloads = || {
            let workloads = snapshot.workloads.iter();
            workloads.filter_map(|workload| Some((workload, workload.activity.as_ref()?)))
        };
        let mut family = Family::counter(
            &mut self.encoder,
            "remote_access_pages",
            "Sampled accesses to memory of other nodes, by the node of the CPU. Not sampled is not none: see remote_sampling",
            None,
        )?;
        for (workload, activity) in workloads() {
            let mut labels = LeadingLabels::new(&workload.name);
            for (node, pages) in nodes.iter().zip(activity.remote.iter().flatten()) {
                family.count([(labels.then(node, "source"), "hint_fault")], pages)?;
            }
            if let Some(pages) = activity.moved {
                let source = ("source", "memory_stat");
                family.count([("workload", &*workload.name), ("node", "unknown"), source], &pages)?;
            }
        }
        let mut family = Family::counter(
            &mut self.encoder,
            "node_access_pages",
            "Sampled accesses of all workloads, by the node of the CPU and that of the memory (unknown where the page was \
             moved at once)",
            None,
        )?;
        for (node, memory, pages) in snapshot.accesses.iter().flatten() {
            let memory = memory.map_or_else(|| "unknown".to_owned(), |memory| memory.to_string());
            family.count([("node", node.to_string().as_str()), ("memory_node", &memory)], pages)?;
        }
        let mut family = Family::gauge(
            &mut self.encoder,
            "remote_sampling",
            "Whether the kernel samples the workload's accesses (on), or why not; the value is always 1",
            None,
        )?;
        for (workload, activity) in workloads() {
            for state in &activity.sampling {
                family.set([("workload", &*workload.name), ("state", state)], &1_u64)?;
            }
        }
        let mut family = Family::gauge(
            &mut self.encoder,
            "remote_access_estimated_ratio",
            "An estimate, no measurement (observe.remoteEstimate): the share of accesses to memory of other nodes, by where \
             threads ran and where memory lies, of workloads whose accesses are not sampled",
            None,
        )?;
        for (workload, activity) in workloads() {
            if let Some(permille) = activity.estimated_remote_permille {
                family.set([("workload", &*workload.name)], &(f64::from(permille) / 1000.0))?;
            }
        }
        Ok(())
    }

    fn dram(&mut self) -> fmt::Result {
        let (snapshot, nodes) = (self.snapshot, self.nodes);
        let mut family = Family::counter(
            &mut self.encoder,
            "dram_accesses",
            "Accesses to DRAM as the processor counts them (loads or cache lines), by the node of the CPU and whether the \
             memory was of that node; only where probes.hardware is enabled",
            None,
        )?;
        for workload in &snapshot.workloads {
            let Some(dram) = workload.activity.as_ref().and_then(|of| of.dram.as_ref()) else { continue };
            for (node, (local, remote)) in nodes.iter().zip(dram) {
                for (locality, count) in [("local", *local), ("remote", Some(*remote))] {
                    if let Some(count) = count {
                        let labels = [("workload", &*workload.name), ("node", node), ("locality", locality)];
                        family.count(labels, &count)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn migrated(&mut self) -> fmt::Result {
        let (snapshot, page_size) = (self.snapshot, self.snapshot.page_size.0);
        let mut family = Family::counter(
            &mut self.encoder,
            "migrated",
            "Memory moved to another node by a task of the workload, by reason",
            Some(&Unit::Bytes),
        )?;
        for workload in &snapshot.workloads {
            let Some(migrated) = workload.activity.as_ref().and_then(|of| of.migrated.as_ref()) else {
                continue;
            };
            for (reason, pages) in migrated {
                let bytes = pages.saturating_mul(page_size);
                family.count([("workload", &*workload.name), ("reason", reason)], &bytes)?;
            }
        }
        Ok(())
    }

    fn stalls(&mut self) -> fmt::Result {
        let snapshot = self.snapshot;
        let mut family = Family::histogram(
            &mut self.encoder,
            "reclaim_stall",
            "How long tasks of the workload had to reclaim memory. Being throttled by memory.high is not in it: see memory_pressure",
            Some(&Unit::Seconds),
        )?;
        for workload in &snapshot.workloads {
            let Some(stalls) = workload.activity.as_ref().and_then(|of| of.stalls.as_ref()) else { continue };
            let labels = [("workload", &*workload.name)];
            family.0.encode_family(&Labels(labels))?.encode_histogram::<NoLabelSet>(
                stalls.total.as_secs_f64(),
                stalls.count(),
                &buckets(stalls),
                None,
            )?;
        }
        Ok(())
    }

    fn oom_kills(&mut self) -> fmt::Result {
        let snapshot = self.snapshot;
        let mut family = Family::counter(
            &mut self.encoder,
            "oom_kills",
            "Processes of the workload that the OOM killer took, by what constrained the allocation; `unknown` \
             (memory.events) where no probe tells",
            None,
        )?;
        for workload in &snapshot.workloads {
            let by_constraint = workload.activity.as_ref().and_then(|of| of.oom_kills);
            match (by_constraint, workload.oom_kills) {
                (Some(kills), _) => {
                    let mut labels = LeadingLabels::new(&workload.name);
                    let key = labels.key("constraint");
                    for (constraint, kills) in OOM_CONSTRAINT_NAMES.iter().zip(kills) {
                        family.count([(key, constraint)], &kills)?;
                    }
                }
                (None, Some(kills)) => {
                    family.count([("workload", &*workload.name), ("constraint", "unknown")], &kills)?;
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    pub(super) fn exclusive_cpus(&mut self) -> fmt::Result {
        let cpus = &self.snapshot.exclusive_cpus;
        let mut family = Family::counter(
            &mut self.encoder,
            "exclusive_cpu_intruder",
            "Time that tasks of others ran on the CPU while it was exclusive to a workload, by what they are",
            Some(&Unit::Seconds),
        )?;
        for (cpu, figures) in cpus {
            for class in IntruderClass::ALL {
                let labels = [("cpu", cpu.to_string()), ("class", class.as_str().to_owned())];
                let seconds = figures.used.of(class).as_secs_f64();
                family.count([(labels[0].0, &labels[0].1), (labels[1].0, &labels[1].1)], &seconds)?;
            }
        }
        let mut family = Family::counter(
            &mut self.encoder,
            "exclusive_cpu_interrupts",
            "Interrupts on the CPU while it was exclusive to a workload",
            None,
        )?;
        for (cpu, figures) in cpus {
            let Some(interrupts) = figures.interrupts else { continue };
            let cpu = cpu.to_string();
            family.count([("cpu", cpu.as_str()), ("kind", "hard")], &interrupts.hard)?;
            family.count([("cpu", cpu.as_str()), ("kind", "soft")], &interrupts.soft)?;
        }
        Ok(())
    }
}

/// Upper bounds in seconds, and how many stalls are between each and the one before. All together are at most the largest
/// number, as the encoder adds them up.
fn buckets(stalls: &Stalls) -> Vec<(f64, u64)> {
    let (mut from, mut room) = (0, u64::MAX);
    let mut sum_up_to = |end: usize| {
        let counts = stalls.buckets.get(from..end).unwrap_or_default();
        let sum = counts.iter().fold(0_u64, |sum, count| sum.saturating_add(*count)).min(room);
        (from, room) = (end, room - sum);
        sum
    };
    let bounded = STALL_BOUNDS.iter().map(|&bound| {
        let micros = u32::try_from(1_u64 << bound).unwrap_or(u32::MAX);
        (f64::from(micros) / 1e6, sum_up_to(bound + 1))
    });
    let mut buckets: Vec<_> = bounded.collect();
    buckets.push((f64::INFINITY, sum_up_to(stalls.buckets.len())));
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stall_is_in_one_bucket() {
        let mut stalls = Stalls::default();
        for (bucket, count) in stalls.buckets.iter_mut().zip(1..) {
            *bucket = count;
        }
        let found = buckets(&stalls);
        let bounds: Vec<f64> = found.iter().map(|(bound, _)| *bound).collect();
        assert_eq!(bounds, [0.000_016, 0.000_256, 0.004_096, 0.065_536, 1.048_576, f64::INFINITY]);
        let counts: Vec<u64> = found.iter().map(|(_, count)| *count).collect();
        assert_eq!(
            counts,
            [
                1 + 2 + 3 + 4 + 5,
                6 + 7 + 8 + 9,
                10 + 11 + 12 + 13,
                14 + 15 + 16 + 17,
                18 + 19 + 20 + 21,
                22 + 23 + 24
            ]
        );
        assert_eq!(counts.iter().sum::<u64>(), stalls.count());
    }
}

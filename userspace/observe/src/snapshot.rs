//! Snapshot of all figures that a scrape of the metrics returns.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use numaward_model::snapshot::{self, MapFigures, ProbeFigures, SnapshotSource, WorkloadFigures};
use numaward_probes::{self as probes, SlotId};
use numaward_topology::{Bytes, HugepageSize, NodeId, ZoneKind, sysfs};
use strum::VariantArray as _;

use crate::{
    cpus, guarantee_figures,
    hugepages::pools,
    naming::OTHER,
    observer::Observer,
    oom_kills,
    part::DaemonPart,
    probe_costs::ProbeReadings,
    process,
    reading::CounterReading,
    sampling::{Sampling, SamplingStates},
    table,
};

impl SnapshotSource for Observer {
    fn snapshot(&self) -> snapshot::Snapshot {
        let units = process::Units {
            ticks_per_second: rustix::param::clock_ticks_per_second(),
            page_size: self.page_size.0,
        };
        let memory = self.node_memory.read(&self.machine());
        let nodes: Vec<NodeId> = memory.iter().map(|(node, _)| *node).collect();
        let exclusive_cpus = cpus::cpu_figures(self);
        self.demand.record();
        let read = self.read();
        let (sampled, counted) = (self.latest.sampled.borrow().clone(), &read.counted);
        // False if nodes were added or removed since their memory was read. Resident memory is then absent, because it is
        // indexed by node.
        let as_before = read.machine.nodes.keys().eq(&nodes);
        let pools = pools(&read.machine);
        let without_room =
            self.node_memory.kills.without_room(&read, || self.node_memory.read_free(&self.machine()));
        let cpu_times = self.registry.cpu_times.read(&read.table, &read.machine, &self.health);
        let workloads = read.table.series().map(|(name, series)| {
            let allocated =
                counted.as_ref().and_then(|counted| series.counters(|slot| counted.slots.get(slot)));
            let pressure_stats = series.pressure_stats();
            WorkloadFigures {
                name: name.clone(),
                start: Some(series.start),
                allocated: allocated.map(|allocated| self.page_size.allocated_by_node(&nodes, &allocated)),
                cpu: cpu_times
                    .as_ref()
                    .map(|times| nodes.iter().map(|node| times.of_name(name, *node)).collect()),
                resident: series.resident().filter(|_| as_before),
                hugepages: if as_before { series.hugepages() } else { Arc::default() },
                pressure: pressure_stats.pressure,
                oom_kills: pressure_stats.oom_kills,
                tiering: pressure_stats.tiering,
                activity: Some(with_room(
                    read.activity_figures(series, &sampled, &nodes, &pools),
                    without_room.get(name),
                )),
            }
        });
        let other = counted.as_ref().map(|counted| WorkloadFigures {
            name: OTHER.into(),
            start: None,
            allocated: Some(self.page_size.allocated_by_node(&nodes, &counted.other)),
            cpu: None,
            resident: None,
            hugepages: Arc::default(),
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: Some(with_room(
                read.attached.to_metrics(&read.activity_counts.other, &nodes, &pools),
                without_room.get(OTHER),
            )),
        });
        let workloads: Vec<_> = workloads.chain(other).collect();
        let guarantees = guarantee_figures::figures(self, &read, &memory);
        let figures = ProbeReadings::take(self);
        let probes = figures.reports.iter().map(|report| {
            let cost = figures.cost(report.probe);
            ProbeFigures {
                probe: report.probe.to_string(),
                mode: sampled.mode(report),
                reason: self.obstacle(report),
                runtime: cost.map(|cost| cost.run_time),
                runs: cost.map(|cost| cost.run_count),
                sampled_ratio: figures.sampled_ratio(report),
                events_lost: cost.map(|cost| cost.events_lost),
            }
        });
        let maps = figures.maps.iter().map(|usage| MapFigures {
            map: usage.map,
            entries: usage.entries,
            capacity: usage.capacity,
        });
        let (workloads_with_slot, workloads_without_slot) = read.table.slots();
        snapshot::Snapshot {
            nodes: memory.iter().map(node_figures).collect(),
            workloads,
            page_size: Bytes(self.page_size.0),
            accesses: read.accesses().map(|accesses| pairs(&accesses)),
            exclusive_cpus,
            unattributed: counted
                .as_ref()
                .map(|counted| self.page_size.unattributed_by_node(&nodes, counted)),
            coverage_permille: *self.latest.coverage_permille.borrow(),
            unknown_node: counted.as_ref().map(|counted| self.page_size.bytes_of(counted.unknown_node)),
            probes: probes.collect(),
            maps: maps.collect(),
            map_memory: figures.map_memory.clone(),
            workloads_with_slot,
            workloads_without_slot,
            degraded: {
                let degraded = self.health.degraded();
                DaemonPart::VARIANTS.iter().map(|part| (part.name(), degraded.contains_key(part))).collect()
            },
            guarantees,
            process: process::read(Path::new("/proc"), units),
        }
    }
}

/// Adds the kills at which no other node had free memory.
fn with_room(
    mut activity: snapshot::WorkloadActivity,
    without_room: Option<&oom_kills::Kills>,
) -> snapshot::WorkloadActivity {
    let kills = activity.oom_kills.iter_mut().flatten().zip(without_room.into_iter().flatten());
    kills.for_each(|(of, count)| of.without_room = of.without_room.map(|_| *count));
    activity
}

/// Returns the accesses by the node of the CPU and the node of the memory (`None` if it is not known).
fn pairs(accesses: &[probes::NodeAccesses]) -> Vec<(NodeId, Option<NodeId>, u64)> {
    let of = |from: &probes::NodeAccesses| {
        let local = (from.node, Some(from.node), from.local.0);
        let remote = from.remote_by_memory.iter().map(|(memory, pages)| (from.node, *memory, pages.0));
        std::iter::once(local).chain(remote).collect::<Vec<_>>()
    };
    accesses.iter().flat_map(of).collect()
}

/// Converts a node's memory; all figures are absent if it could not be read.
pub(crate) fn node_figures(
    (node, memory): &(NodeId, Option<sysfs::NodeMeminfo>),
) -> snapshot::NodeMemoryFigures {
    snapshot::NodeMemoryFigures { node: *node, kinds: memory.as_ref().map(kinds).unwrap_or_default() }
}

/// Returns total and free bytes of the hugepage pools by size, and of the base pages outside the pools.
fn kinds(memory: &sysfs::NodeMeminfo) -> Vec<(ZoneKind, Bytes, Option<Bytes>)> {
    let hugepages = memory.hugepages.iter().map(|(&size, pool)| {
        let bytes = |pages: u64| Bytes(pages.saturating_mul(size.0.0));
        (ZoneKind::Hugepages(size), bytes(pool.total), Some(bytes(pool.free)))
    });
    hugepages.chain([(ZoneKind::Memory, memory.base(), Some(memory.free))]).collect()
}

impl CounterReading {
    /// Returns the activity, other than allocations, of all workloads of a name.
    fn activity_figures(
        &self,
        series: &table::Series<SlotId>,
        sampled: &SamplingStates,
        nodes: &[NodeId],
        pools: &BTreeSet<HugepageSize>,
    ) -> snapshot::WorkloadActivity {
        let mut states: Vec<Sampling> = Vec::new();
        let mut moved: Option<u64> = None;
        // Nearly all names have one member, so a short list is cheaper than a set.
        for seen in series.members.keys().filter_map(|id| sampled.seen.get(id)) {
            if !states.contains(&seen.state) {
                states.push(seen.state);
            }
            moved = seen.moved.map(|pages| moved.unwrap_or(0).saturating_add(pages)).or(moved);
        }
        states.sort_unstable();
        snapshot::WorkloadActivity {
            moved,
            sampling: states.into_iter().map(Into::into).collect(),
            estimated_remote_permille: sampled.estimates.mean(series.members.keys()),
            ..self.attached.to_metrics(
                &series.activity(|slot| self.activity_counts.slots.get(slot)),
                nodes,
                pools,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kills_by_pins_have_a_part_without_room() {
        let kills =
            ["none", "cpuset", "mempolicy", "memcg"].map(|name| snapshot::OomKillFigures::new(name, 3));
        let activity = || snapshot::WorkloadActivity { oom_kills: Some(kills), ..Default::default() };
        for (without_room, expected) in
            [(None, [None, Some(0), Some(0), None]), (Some([0, 2, 1, 0]), [None, Some(2), Some(1), None])]
        {
            let found = with_room(activity(), without_room.as_ref()).oom_kills.unwrap();
            assert_eq!(found.map(|of| of.without_room), expected);
        }
    }
}

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
        let workloads = read.table.series().map(|(name, series)| {
            let allocated =
                counted.as_ref().and_then(|counted| series.counters(|slot| counted.slots.get(slot)));
            let pressure_stats = series.pressure_stats();
            WorkloadFigures {
                name: name.clone(),
                allocated: allocated.map(|allocated| self.page_size.allocated_by_node(&nodes, &allocated)),
                resident: series.resident().filter(|_| as_before),
                hugepages: if as_before { series.hugepages() } else { Arc::default() },
                pressure: pressure_stats.pressure,
                oom_kills: pressure_stats.oom_kills,
                tiering: pressure_stats.tiering,
                activity: Some(read.activity_figures(series, &sampled, &nodes, &pools)),
            }
        });
        let other = counted.as_ref().map(|counted| WorkloadFigures {
            name: OTHER.into(),
            allocated: Some(self.page_size.allocated_by_node(&nodes, &counted.other)),
            resident: None,
            hugepages: Arc::default(),
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: Some(read.attached.to_metrics(&read.activity_counts.other, &nodes, &pools)),
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

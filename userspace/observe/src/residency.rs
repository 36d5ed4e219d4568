//! Periodic reading of each workload's resident memory by node, and of its memory pressure and kills.
//!
//! The kernel sums these figures up on each reading (about 50 µs per cgroup). Therefore they are read periodically,
//! not per scrape, and only while there are requests for them.
//!
//! `memory.numa_stat` and `hugetlb.*.numa_stat` cover a cgroup and its descendants. If workloads are nested
//! (`nginx.service` below `system.slice`), the figures of the inner ones are subtracted from those of the outer one.
//! The other files cannot be subtracted like this, so they are not read for a workload with others nested in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Instant,
};

use numaward_cgroup::{
    CgroupId, CgroupPath, ReadError,
    knob::{Knob, KnobValue},
    read::{CgroupNodeMemory, memory_events, memory_numa_stat, memory_pressure, numa_balancing},
};
use numaward_model::{
    error_chain, health,
    snapshot::{PressureFigures, ResidentFigures, ResidentHugepages, TieringFigures},
};
use numaward_probes::{Probe, SlotId, nearest_memory_node};
use numaward_topology::{Bytes, HugepageSize, NodeId};
use tokio_util::sync::CancellationToken;

use crate::{
    estimate::{self, Estimator, ThreadReading, remote_share},
    hugepages,
    observer::Observer,
    part::DaemonPart,
    reading::read_activity,
    registry::StateSnapshot,
    sampling::{Sampling, SamplingConditions, SamplingStates, balancing},
    table::{PressureStats, Readings, Table},
};

/// Reads all workloads periodically until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn run_reader(observer: &Observer, stop: &CancellationToken) {
    let interval = observer.config.observe.residency_interval.0;
    let estimate = &observer.config.observe.remote_estimate;
    let mut estimator = estimate.enabled.then(|| Estimator::new(estimate.max_files));
    let mut due = Instant::now();
    observer.demand.register_reader();
    while !stop.is_cancelled() {
        if !observer.is_requested() {
            health::rest();
            thread::park();
            continue;
        }
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            health::rest();
            thread::park_timeout(wait);
            continue;
        }
        health::beat();
        due = Instant::now() + interval;
        read_workloads(observer, stop);
        judge_sampling(observer);
        if let Some(estimator) = &mut estimator {
            estimate_remote(observer, estimator);
        }
    }
}

/// A workload to be read.
struct ResidencyTarget {
    id: CgroupId,
    path: CgroupPath,
    dir: PathBuf,
    resident: Option<Vec<ResidentFigures>>,
    hugepages: ResidentHugepages,
    pressure_stats: PressureStats,
    /// True if other workloads are nested in this one.
    is_outer: bool,
}

/// Reads every workload once.
pub(crate) fn read_workloads(observer: &Observer, stop: &CancellationToken) {
    let (mut targets, nodes, sizes, has_tiers) = {
        let Some((hierarchy, table, machine)) = observer.registry.placed() else { return };
        let targets = table.members().map(|(id, member)| ResidencyTarget {
            id,
            path: member.path.clone(),
            dir: hierarchy.dir(&member.path),
            resident: None,
            hugepages: ResidentHugepages::new(),
            pressure_stats: PressureStats::default(),
            is_outer: false,
        });
        let nodes: Vec<NodeId> = machine.nodes.keys().copied().collect();
        let tiers = machine.nodes.values().filter_map(|node| node.memory_tier).collect::<BTreeSet<_>>();
        (targets.collect::<Vec<_>>(), nodes, hugepages::pools(&machine), tiers.len() > 1)
    };
    targets.sort_by(|a, b| a.path.cmp(&b.path));
    let outer = enclosing_targets(&targets);
    for &index in outer.iter().flatten() {
        targets[index].is_outer = true;
    }
    let (mut failed, mut absent) = (None, None);
    for target in &mut targets {
        if stop.is_cancelled() {
            return;
        }
        health::beat();
        if let Err(error) = target.read(&nodes, &sizes)
            && !error.is_gone()
        {
            let first = if error.is_absent() { &mut absent } else { &mut failed };
            first.get_or_insert_with(|| error_chain(&error));
        }
    }
    // The controller may be missing in a single cgroup. If it is missing in all, this host does not provide the
    // figures.
    if targets.iter().all(|target| target.resident.is_none()) {
        failed = failed.or(absent);
    }
    subtract_nested(&mut targets, &outer);
    if !has_tiers {
        for target in &mut targets {
            target.pressure_stats.tiering = None;
        }
    }
    let readings = targets.into_iter().map(|target| {
        let ResidencyTarget { id, resident, hugepages, pressure_stats, .. } = target;
        (id, Readings { resident: resident.map(Arc::from), hugepages: Arc::new(hugepages), pressure_stats })
    });
    take_readings(observer, &readings.collect::<Vec<_>>(), &nodes);
    observer.note(DaemonPart::Residency, failed.map_or(Ok(()), Err));
}

/// Stores the readings in the table. Because this visits all workloads, it is done on a copy without the lock
/// that admissions need, unless the table changes during each of the attempts.
fn take_readings(observer: &Observer, readings: &[(CgroupId, Readings)], nodes: &[NodeId]) {
    const MAX_ATTEMPTS: usize = 3;
    // Figures are indexed by the position of their node.
    let is_as_before = || observer.machine().nodes.keys().eq(nodes);
    let take = |table: &mut Table<SlotId>, as_before: bool| {
        for (id, read) in readings {
            let pressure_stats = read.pressure_stats;
            let without_nodes = || Readings { pressure_stats, ..Readings::default() };
            table.store_readings(*id, if as_before { read.clone() } else { without_nodes() });
        }
    };
    for _ in 0..MAX_ATTEMPTS {
        let (before, as_before) = (observer.registry.lock().table.clone(), is_as_before());
        let mut table = Table::clone(&before);
        take(&mut table, as_before);
        let table = Arc::new(table);
        let mut state = observer.registry.lock();
        if Arc::ptr_eq(&state.table, &before) && is_as_before() == as_before {
            state.table = table;
            return;
        }
    }
    let mut state = observer.registry.lock();
    take(state.table_mut(), is_as_before());
}

impl ResidencyTarget {
    /// Reads all files, even after a failure; returns the first error.
    fn read(&mut self, nodes: &[NodeId], sizes: &BTreeSet<HugepageSize>) -> Result<(), ReadError> {
        let resident = memory_numa_stat(&self.dir).map(|stat| {
            let of = |node| stat.get(node).copied().unwrap_or_default();
            self.resident = Some(nodes.iter().map(of).map(resident).collect());
            if !self.is_outer {
                self.pressure_stats.tiering = tiering(stat.values(), rustix::param::page_size() as u64);
            }
        });
        let hugepages = hugepages::resident(&self.dir, sizes, nodes).map(|read| self.hugepages = read);
        let resident = resident.and(hugepages);
        if self.is_outer {
            return resident;
        }
        let events =
            memory_events(&self.dir).map(|events| self.pressure_stats.oom_kills = Some(events.oom_kill));
        let pressure = memory_pressure(&self.dir).map(|pressure| {
            let (waiting, stalled) = (pressure.some, pressure.full);
            self.pressure_stats.pressure = Some(PressureFigures { waiting, stalled });
        });
        resident.and(events).and(pressure)
    }
}

/// Updates the sampling state of every workload.
pub(crate) fn judge_sampling(observer: &Observer) {
    let (has_hints, skips_single_node_cpusets, maps) = {
        let probing = observer.registry.probing();
        let maps = probing.attached.has(Probe::Scan).then(|| probing.probes.counter_maps());
        (probing.attached.has(Probe::Hint), probing.probes.skips_single_node_cpusets(), maps)
    };
    let counters = maps.map(|maps| read_activity(&maps, &observer.health));
    let Some((hierarchy, _, machine)) = observer.registry.placed() else { return };
    let StateSnapshot { table, holders, .. } = observer.registry.snapshot();
    let activity = counters.map(|counters| counters.decode(&holders));
    let host = SamplingConditions {
        balancing: balancing(&observer.config.host_root),
        nodes: machine.nodes.values().filter(|node| node.memory.0 > 0).count(),
        skips_single_node_cpusets,
    };
    let now = Instant::now();
    let mut looked = BTreeMap::new();
    for (id, member) in table.members() {
        let dir = hierarchy.dir(&member.path);
        let allowed = match Knob::CpusetMemsEffective.read(&dir) {
            Ok(KnobValue::Nodes(nodes)) => Some(nodes.len()),
            _ => None,
        };
        // Read only if no probe provides the figures, because this file is long.
        let stat = (!has_hints).then(|| numa_balancing(&dir).ok().flatten()).flatten();
        let scanned = activity.as_ref().and_then(|(slots, _)| Some(slots.get(member.slot?)?.scanned));
        looked.insert(id, (host.judge(allowed), scanned, stat));
    }
    let mut sampled = SamplingStates::clone(&observer.latest.sampled.borrow());
    sampled.seen.retain(|id, _| looked.contains_key(id));
    sampled.memory_stat_serves = false;
    for (id, (by_host, scanned, stat)) in looked {
        let seen = sampled.seen.entry(id).or_default();
        seen.update(by_host, scanned, stat.map(|stat| stat.pte_updates), now);
        seen.moved = stat.map(|stat| stat.pages_migrated);
        sampled.memory_stat_serves |= stat.is_some();
    }
    observer.latest.sampled.send_replace(Arc::new(sampled));
}

/// Updates the estimate of every workload that is not sampled, within the budget.
pub(crate) fn estimate_remote(observer: &Observer, estimator: &mut Estimator) {
    let Some((hierarchy, table, machine)) = observer.registry.placed() else { return };
    let mut sampled = SamplingStates::clone(&observer.latest.sampled.borrow());
    let mut targets = Vec::new();
    let mut all = BTreeSet::new();
    for (id, member) in table.members() {
        let dir = hierarchy.dir(&member.path);
        all.insert(dir.clone());
        let (Some(resident), true) = (&member.resident, sampled.state(id) != Sampling::On) else {
            continue;
        };
        let mapped = |of: &ResidentFigures| of.anon.0.saturating_add(of.mapped.0);
        let memory = machine.nodes.keys().copied().zip(resident.iter().map(mapped)).collect();
        targets.push(estimate::EstimateTarget { id, dir, memory });
    }
    targets.sort_by_key(|target| target.id);
    let readings = estimator.read(&observer.config.host_root.join("proc"), &machine, &targets, &all);
    let now = Instant::now();
    let estimates = &mut sampled.estimates.0;
    let ids: BTreeSet<CgroupId> = targets.iter().map(|target| target.id).collect();
    estimates.retain(|id, _| ids.contains(id));
    for target in &targets {
        if let Some(ThreadReading::Ran(ran)) = readings.get(&target.id)
            && let Some(share) = remote_share(ran, &target.memory, |node| {
                nearest_memory_node(&machine, node, machine.nodes.keys())
            })
        {
            estimates.insert(target.id, (share, now));
        }
    }
    observer.latest.sampled.send_replace(Arc::new(sampled));
}

/// Converts a cgroup's memory on a node.
pub(crate) fn resident(memory: CgroupNodeMemory) -> ResidentFigures {
    ResidentFigures {
        anon: memory.anon,
        file: memory.file,
        kernel: memory.kernel,
        mapped: memory.file_mapped,
        shmem: memory.shmem,
        droppable: memory.droppable,
    }
}

/// Returns the bytes moved between memory tiers from and to all nodes.
fn tiering<'a>(nodes: impl Iterator<Item = &'a CgroupNodeMemory>, page_size: u64) -> Option<TieringFigures> {
    let bytes = |pages: u64| Bytes(pages.saturating_mul(page_size));
    let moved = nodes.filter_map(|node| node.tiering);
    moved
        .map(|pages| TieringFigures { demoted: bytes(pages.demoted), promoted: bytes(pages.promoted) })
        .reduce(TieringFigures::plus)
}

/// Returns the nearest enclosing target of each target. Targets are sorted by path, so descendants directly follow
/// their ancestor.
fn enclosing_targets(targets: &[ResidencyTarget]) -> Vec<Option<usize>> {
    let mut open: Vec<usize> = Vec::new();
    let mut outer = Vec::with_capacity(targets.len());
    for (index, target) in targets.iter().enumerate() {
        while open.last().is_some_and(|&last| !targets[last].path.contains(&target.path)) {
            open.pop();
        }
        outer.push(open.last().copied());
        open.push(index);
    }
    outer
}

/// Subtracts the figures of nested workloads from those of the outer ones. Pages that moved between two readings may
/// make the difference too small; it is never negative.
fn subtract_nested(targets: &mut [ResidencyTarget], outer: &[Option<usize>]) {
    let whole: Vec<(Option<Vec<ResidentFigures>>, ResidentHugepages)> =
        targets.iter().map(|target| (target.resident.clone(), target.hugepages.clone())).collect();
    for ((inner, hugepages), outer) in whole.iter().zip(outer) {
        let Some(outer) = outer else { continue };
        hugepages::subtract_nested(&mut targets[*outer].hugepages, hugepages);
        let Some(inner) = inner else { continue };
        let Some(rest) = &mut targets[*outer].resident else { continue };
        for (rest, inner) in rest.iter_mut().zip(inner) {
            let minus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_sub(b.0));
            *rest = ResidentFigures {
                anon: minus(rest.anon, inner.anon),
                file: minus(rest.file, inner.file),
                kernel: minus(rest.kernel, inner.kernel),
                mapped: minus(rest.mapped, inner.mapped),
                shmem: minus(rest.shmem, inner.shmem),
                droppable: minus(rest.droppable, inner.droppable),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE: HugepageSize = HugepageSize(Bytes::mib(2));

    fn target(path: &str, anon: Option<u64>) -> ResidencyTarget {
        let path: CgroupPath = path.parse().unwrap();
        let resident = |anon| {
            vec![
                ResidentFigures { anon: Bytes(anon), ..ResidentFigures::default() },
                ResidentFigures::default(),
            ]
        };
        ResidencyTarget {
            id: CgroupId(0),
            dir: PathBuf::from(path.as_str()),
            path,
            resident: anon.map(resident),
            hugepages: anon.map(|bytes| (HUGE, vec![Bytes(bytes), Bytes(0)])).into_iter().collect(),
            pressure_stats: PressureStats::default(),
            is_outer: false,
        }
    }

    #[test]
    fn vanished_workload_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("memory.numa_stat"), "anon N0=4096\n").unwrap();
        let mut found = ResidencyTarget { dir: dir.path().to_owned(), ..target("/a", None) };
        assert!(
            found.read(&[NodeId(0)], &[HUGE].into()).unwrap_err().is_absent(),
            "its other files are not there"
        );
        assert_eq!(found.resident.unwrap()[0].anon, Bytes(4096), "what was read stays");
        let mut gone = ResidencyTarget { dir: dir.path().to_owned(), ..target("/a", None) };
        drop(dir);
        assert!(gone.read(&[NodeId(0)], &[HUGE].into()).unwrap_err().is_gone());
        assert_eq!((gone.resident, gone.pressure_stats), (None, PressureStats::default()));
    }

    #[test]
    fn outer_figures_exclude_inner_ones() {
        let mut targets = vec![
            target("/a", Some(100)),
            target("/a/b", Some(60)),
            target("/a/b/c", Some(20)),
            target("/a/d", Some(30)),
            target("/a-1", Some(7)),
            target("/e", None),
            target("/e/f", Some(5)),
            target("/g", Some(5)),
            target("/g/h", Some(6)),
        ];
        let outer = enclosing_targets(&targets);
        assert_eq!(outer, [None, Some(0), Some(1), Some(0), None, None, Some(5), None, Some(7)]);
        subtract_nested(&mut targets, &outer);
        let left: Vec<_> = targets.iter().map(|t| t.resident.as_ref().map(|bytes| bytes[0].anon.0)).collect();
        assert_eq!(
            left,
            [Some(10), Some(40), Some(20), Some(30), Some(7), None, Some(5), Some(0), Some(6)],
            "each is taken off the nearest one, never below zero"
        );
        let huge = |target: &ResidencyTarget| Some(target.hugepages.get(&HUGE)?[0].0);
        assert_eq!(targets.iter().map(huge).collect::<Vec<_>>(), left, "the same of hugepages");
    }
}

//! Reads where each workload's memory lies, and what it lost because memory was short.
//!
//! The kernel adds the figures up on each reading (some 50 µs a cgroup), so they are read in turns, apart
//! from scrapes, and only while somebody asks: a daemon that nobody scrapes reads nothing.
//!
//! `memory.numa_stat` and `hugetlb.*.numa_stat` cover a cgroup and all below it. Where workloads are nested (`nginx.service` below
//! `system.slice`), the outer one gets what is left when the inner ones are taken off. The other files do not
//! add up so: for a workload with others below it they are not read.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupId, CgroupPath, Hierarchy, ReadError,
    knob::{Knob, KnobValue},
    read::{CgroupNodeMemory, memory_events, memory_numa_stat, memory_pressure, numa_balancing},
};
use numaward_model::{
    error_chain, health,
    snapshot::{PressureFigures, ResidentFigures, ResidentHugepages, TieringFigures},
};
use numaward_probes::{Probe, SlotId, nearest_memory_node};
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId};
use tokio_util::sync::CancellationToken;

use crate::{
    estimate::{self, Estimator, Look, remote_share},
    hugepages,
    observer::Observer,
    part::Part,
    reading::Books,
    sampling::{Host, Sampled, Sampling, balancing},
    table::{Readings, Table, Trouble},
};

/// Reads in turns until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn keep_reading(observer: &Observer, stop: &CancellationToken) {
    let interval = observer.config.observe.residency_interval.0;
    let estimate = &observer.config.observe.remote_estimate;
    let mut estimator = estimate.enabled.then(|| Estimator::new(estimate.max_files));
    let mut due = Instant::now();
    observer.demand.lock().reader = Some(thread::current());
    while !stop.is_cancelled() {
        if !observer.is_asked() {
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
        observer.read_workloads(stop);
        observer.judge_sampling();
        if let Some(estimator) = &mut estimator {
            observer.estimate_remote(estimator);
        }
    }
}

/// A workload to be read.
struct Target {
    id: CgroupId,
    path: CgroupPath,
    dir: PathBuf,
    resident: Option<Vec<ResidentFigures>>,
    hugepages: ResidentHugepages,
    trouble: Trouble,
    /// Whether other workloads are below it.
    is_outer: bool,
}

impl Observer {
    /// Whether somebody asked for the workloads of late. Readers that ask less often get figures as old as the question
    /// before.
    pub(crate) fn is_asked(&self) -> bool {
        let interest = (3 * self.config.observe.residency_interval.0).max(Duration::from_mins(1));
        self.demand.lock().asked.elapsed() < interest
    }

    /// Where cgroups are found, the workloads and the machine, of one instant; `None` while the first is not known.
    fn placed(&self) -> Option<(Hierarchy, Arc<Table<SlotId>>, Arc<Machine>)> {
        let state = self.lock();
        Some((state.hierarchy.clone()?, state.table.clone(), self.machine()))
    }

    /// Reads every workload once.
    pub(crate) fn read_workloads(&self, stop: &CancellationToken) {
        let (mut targets, nodes, sizes, has_tiers) = {
            let Some((hierarchy, table, machine)) = self.placed() else { return };
            let targets = table.members().map(|(id, member)| Target {
                id,
                path: member.path.clone(),
                dir: hierarchy.dir(&member.path),
                resident: None,
                hugepages: ResidentHugepages::new(),
                trouble: Trouble::default(),
                is_outer: false,
            });
            let nodes: Vec<NodeId> = machine.nodes.keys().copied().collect();
            let tiers = machine.nodes.values().filter_map(|node| node.memory_tier).collect::<BTreeSet<_>>();
            (targets.collect::<Vec<_>>(), nodes, hugepages::pools(&machine), tiers.len() > 1)
        };
        targets.sort_by(|a, b| a.path.cmp(&b.path));
        let outer = nest(&targets);
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
        // A controller may well be missing in a single cgroup. If all do, nothing can be read on this host.
        if targets.iter().all(|target| target.resident.is_none()) {
            failed = failed.or(absent);
        }
        take_off(&mut targets, &outer);
        if !has_tiers {
            for target in &mut targets {
                target.trouble.tiering = None;
            }
        }
        let readings = targets.into_iter().map(|target| {
            let Target { id, resident, hugepages, trouble, .. } = target;
            (id, Readings { resident: resident.map(Arc::from), hugepages: Arc::new(hugepages), trouble })
        });
        self.take_readings(&readings.collect::<Vec<_>>(), &nodes);
        self.note(Part::Residency, failed.map_or(Ok(()), Err));
    }

    /// Takes what was read of the workloads into the table. This goes through all workloads, so it is done on a copy, without the lock
    /// that an admission needs, as long as the table does not change again and again meanwhile.
    fn take_readings(&self, readings: &[(CgroupId, Readings)], nodes: &[NodeId]) {
        const MAX_ATTEMPTS: usize = 3;
        // Figures are known by the position of their node.
        let is_as_before = || self.machine().nodes.keys().eq(nodes);
        let take = |table: &mut Table<SlotId>, as_before: bool| {
            for (id, read) in readings {
                let trouble = read.trouble;
                let without_nodes = || Readings { trouble, ..Readings::default() };
                table.set_read(*id, if as_before { read.clone() } else { without_nodes() });
            }
        };
        for _ in 0..MAX_ATTEMPTS {
            let (before, as_before) = (self.lock().table.clone(), is_as_before());
            let mut table = Table::clone(&before);
            take(&mut table, as_before);
            let table = Arc::new(table);
            let mut state = self.lock();
            if Arc::ptr_eq(&state.table, &before) && is_as_before() == as_before {
                state.table = table;
                return;
            }
        }
        let mut state = self.lock();
        take(state.table_mut(), is_as_before());
    }
}

impl Target {
    /// Reads all files, also after one failed; returns the first failure.
    fn read(&mut self, nodes: &[NodeId], sizes: &BTreeSet<HugepageSize>) -> Result<(), ReadError> {
        let resident = memory_numa_stat(&self.dir).map(|stat| {
            let of = |node| stat.get(node).copied().unwrap_or_default();
            self.resident = Some(nodes.iter().map(of).map(resident).collect());
            if !self.is_outer {
                self.trouble.tiering = tiering(stat.values(), rustix::param::page_size() as u64);
            }
        });
        let hugepages = hugepages::resident(&self.dir, sizes, nodes).map(|read| self.hugepages = read);
        let resident = resident.and(hugepages);
        if self.is_outer {
            return resident;
        }
        let events = memory_events(&self.dir).map(|events| self.trouble.oom_kills = Some(events.oom_kill));
        let pressure = memory_pressure(&self.dir).map(|pressure| {
            let (waiting, stalled) = (pressure.some, pressure.full);
            self.trouble.pressure = Some(PressureFigures { waiting, stalled });
        });
        resident.and(events).and(pressure)
    }
}

impl Observer {
    /// Looks at every workload once.
    pub(crate) fn judge_sampling(&self) {
        let (has_hints, skips_single_node_cpusets, maps) = {
            let probing = self.probing();
            let maps = probing.attached.has(Probe::Scan).then(|| probing.probes.counter_maps());
            (probing.attached.has(Probe::Hint), probing.probes.skips_single_node_cpusets(), maps)
        };
        let counters = maps.map(|maps| self.read_activity(&maps));
        let Some((hierarchy, _, machine)) = self.placed() else { return };
        let Books { table, holders, .. } = self.books();
        let activity = counters.map(|counters| counters.decode(&holders));
        let host = Host {
            balancing: balancing(&self.config.host_root),
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
            // Only where no probe sees it: this file is long.
            let stat = (!has_hints).then(|| numa_balancing(&dir).ok().flatten()).flatten();
            let scanned = activity.as_ref().and_then(|(slots, _)| Some(slots.get(member.slot?)?.scanned));
            looked.insert(id, (host.judge(allowed), scanned, stat));
        }
        let mut sampled = Sampled::clone(&self.latest.sampled.borrow());
        sampled.seen.retain(|id, _| looked.contains_key(id));
        sampled.memory_stat_serves = false;
        for (id, (by_host, scanned, stat)) in looked {
            let seen = sampled.seen.entry(id).or_default();
            seen.update(by_host, scanned, stat.map(|stat| stat.pte_updates), now);
            seen.moved = stat.map(|stat| stat.pages_migrated);
            sampled.memory_stat_serves |= stat.is_some();
        }
        self.latest.sampled.send_replace(Arc::new(sampled));
    }

    /// Looks at every workload that is not sampled, as far as the budget goes.
    pub(crate) fn estimate_remote(&self, estimator: &mut Estimator) {
        let Some((hierarchy, table, machine)) = self.placed() else { return };
        let mut sampled = Sampled::clone(&self.latest.sampled.borrow());
        let mut targets = Vec::new();
        let mut all = BTreeSet::new();
        for (id, member) in table.members() {
            let dir = hierarchy.dir(&member.path);
            all.insert(dir.clone());
            let (Some(resident), true) = (&member.resident, sampled.state(id) != Sampling::On) else {
                continue;
            };
            let mapped = |of: &ResidentFigures| of.anon.0.saturating_add(of.mapped.0);
            let lies = machine.nodes.keys().copied().zip(resident.iter().map(mapped)).collect();
            targets.push(estimate::Target { id, dir, lies });
        }
        targets.sort_by_key(|target| target.id);
        let looks = estimator.look(&self.config.host_root.join("proc"), &machine, &targets, &all);
        let now = Instant::now();
        let estimates = &mut sampled.estimates.0;
        let ids: BTreeSet<CgroupId> = targets.iter().map(|target| target.id).collect();
        estimates.retain(|id, _| ids.contains(id));
        for target in &targets {
            if let Some(Look::Ran(ran)) = looks.get(&target.id)
                && let Some(share) = remote_share(ran, &target.lies, |node| {
                    nearest_memory_node(&machine, node, machine.nodes.keys())
                })
            {
                estimates.insert(target.id, (share, now));
            }
        }
        self.latest.sampled.send_replace(Arc::new(sampled));
    }
}

/// What a cgroup has on a node.
pub(crate) fn resident(memory: CgroupNodeMemory) -> ResidentFigures {
    ResidentFigures {
        anon: memory.anon,
        file: memory.file,
        kernel: memory.kernel,
        mapped: memory.file_mapped,
        droppable: memory.droppable,
    }
}

/// What was moved between tiers from and to all nodes.
fn tiering<'a>(nodes: impl Iterator<Item = &'a CgroupNodeMemory>, page_size: u64) -> Option<TieringFigures> {
    let bytes = |pages: u64| Bytes(pages.saturating_mul(page_size));
    let moved = nodes.filter_map(|node| node.tiering);
    moved
        .map(|pages| TieringFigures { demoted: bytes(pages.demoted), promoted: bytes(pages.promoted) })
        .reduce(TieringFigures::plus)
}

/// For each target the nearest one that it is below. Targets are in the order of their paths, so that one
/// is directly followed by those below it.
fn nest(targets: &[Target]) -> Vec<Option<usize>> {
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

/// Takes what nested workloads have off the ones they are nested in. What moved between two readings may make
/// the outer one's rest too small; it is never below zero.
fn take_off(targets: &mut [Target], outer: &[Option<usize>]) {
    let whole: Vec<(Option<Vec<ResidentFigures>>, ResidentHugepages)> =
        targets.iter().map(|target| (target.resident.clone(), target.hugepages.clone())).collect();
    for ((inner, hugepages), outer) in whole.iter().zip(outer) {
        let Some(outer) = outer else { continue };
        hugepages::take_off(&mut targets[*outer].hugepages, hugepages);
        let Some(inner) = inner else { continue };
        let Some(rest) = &mut targets[*outer].resident else { continue };
        for (rest, inner) in rest.iter_mut().zip(inner) {
            let minus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_sub(b.0));
            *rest = ResidentFigures {
                anon: minus(rest.anon, inner.anon),
                file: minus(rest.file, inner.file),
                kernel: minus(rest.kernel, inner.kernel),
                mapped: minus(rest.mapped, inner.mapped),
                droppable: minus(rest.droppable, inner.droppable),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE: HugepageSize = HugepageSize(Bytes::mib(2));

    fn target(path: &str, anon: Option<u64>) -> Target {
        let path: CgroupPath = path.parse().unwrap();
        let resident = |anon| {
            vec![
                ResidentFigures { anon: Bytes(anon), ..ResidentFigures::default() },
                ResidentFigures::default(),
            ]
        };
        Target {
            id: CgroupId(0),
            dir: PathBuf::from(path.as_str()),
            path,
            resident: anon.map(resident),
            hugepages: anon.map(|bytes| (HUGE, vec![Bytes(bytes), Bytes(0)])).into_iter().collect(),
            trouble: Trouble::default(),
            is_outer: false,
        }
    }

    #[test]
    fn a_workload_that_vanishes_while_it_is_read_has_no_figures_and_is_no_fault() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("memory.numa_stat"), "anon N0=4096\n").unwrap();
        let mut found = Target { dir: dir.path().to_owned(), ..target("/a", None) };
        assert!(
            found.read(&[NodeId(0)], &[HUGE].into()).unwrap_err().is_absent(),
            "its other files are not there"
        );
        assert_eq!(found.resident.unwrap()[0].anon, Bytes(4096), "what was read stays");
        let mut gone = Target { dir: dir.path().to_owned(), ..target("/a", None) };
        drop(dir);
        assert!(gone.read(&[NodeId(0)], &[HUGE].into()).unwrap_err().is_gone());
        assert_eq!((gone.resident, gone.trouble), (None, Trouble::default()));
    }

    #[test]
    fn an_outer_workload_has_what_the_inner_ones_leave() {
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
        let outer = nest(&targets);
        assert_eq!(outer, [None, Some(0), Some(1), Some(0), None, None, Some(5), None, Some(7)]);
        take_off(&mut targets, &outer);
        let left: Vec<_> = targets.iter().map(|t| t.resident.as_ref().map(|bytes| bytes[0].anon.0)).collect();
        assert_eq!(
            left,
            [Some(10), Some(40), Some(20), Some(30), Some(7), None, Some(5), Some(0), Some(6)],
            "each is taken off the nearest one, never below zero"
        );
        let huge = |target: &Target| Some(target.hugepages.get(&HUGE)?[0].0);
        assert_eq!(targets.iter().map(huge).collect::<Vec<_>>(), left, "the same of hugepages");
    }
}

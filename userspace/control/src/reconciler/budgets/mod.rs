//! Budgets: keeps the memory of a workload on each of its nodes within the amount that is guaranteed there.
//!
//! # Problem
//! With the strategy `native`, a guarantee on several nodes shares each of them with other guarantees. `cpuset.mems` limits the
//! nodes of a workload, not the amount on each. If a workload uses the memory of another one on a node, the other workload may
//! find no memory on its only node and is killed.
//!
//! # Terms
//! The *budget* of a workload on a node is the amount of memory that is guaranteed there ([`Allocation::placed`]). It applies to
//! user memory (anonymous memory and page cache) as `memory.numa_stat` reports it.
//!
//! # Algorithm
//! Every few seconds, the thread `pages` reads the memory of all workloads with budgets. Memory above a budget for longer than a
//! dwell time is reported and moved to nodes of the workload that are below their budgets, the nearest first ([`share`]).
//! Unmapped page cache that cannot be moved is dropped.
//!
//! # Invariants
//! - The reconciler's thread reads no file and waits for nothing.
//! - A move does not exceed the budget of the target node, and goes only to nodes of the guarantee.
//! - Each moved page is counted once.
//!
//! [`Allocation::placed`]: numaward_engine::Allocation::placed

mod share;

use std::{
    collections::BTreeMap,
    mem,
    ops::Bound,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::CgroupPath;
use numaward_enforce::pages::{PageMove, PageOutcome, PagesMoved};
use numaward_engine::OwnerId;
use numaward_guarantee::state::State;
use numaward_model::EventReport;
use numaward_topology::{Bytes, NodeId, ZoneKind};
use tokio_util::sync::CancellationToken;

use self::share::{ExcessChange, MemoryShares};
use super::{Controller, ControllerEvent};
use crate::{
    core::Core,
    page_worker::{self, ByNode, Job, JobOutcome, MIN_MOVE_SIZE, PageWorker},
};

/// Interval between two readings while a workload exceeds a budget.
const EXCESS_READ_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two readings while no workload exceeds a budget.
const READ_INTERVAL: Duration = Duration::from_secs(3);
/// The pause between two readings is at least the duration of a reading times this factor.
const READ_PAUSE_FACTOR: u32 = 100;
/// Seconds for which one order may move pages at the configured rate.
const MAX_ORDER_SECONDS: u64 = 10;

/// Controller of the budgets.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    worker: Option<PageWorker>,
    /// True if guarantees have changed since the last update of `workloads`.
    pub(super) is_outdated: bool,
    /// Workloads with budgets, by owner in the ledger.
    workloads: BTreeMap<String, BudgetedWorkload>,
    next_reading: Option<Instant>,
    /// Owner of the last order; empty before the first one.
    last_moved: String,
    stop: CancellationToken,
}

#[derive(Debug)]
struct BudgetedWorkload {
    /// The cgroups of the owner. A pod with pod-level memory has several.
    cgroups: Vec<CgroupPath>,
    shares: MemoryShares,
}

/// Returns the budgets of an owner; `None` if its memory is on one node only.
fn budgets_of(state: &State, owner: &str) -> Option<ByNode> {
    // Burstable workloads may have memory on any node.
    let account = state.ledger.owner(&OwnerId::from(owner)).filter(|account| !account.terms.burstable)?;
    let mut placed = ByNode::new();
    for (node, bytes) in
        account.containers.values().filter_map(|held| held.placed.get(&ZoneKind::Memory)).flatten()
    {
        placed.entry(*node).or_default().0 += bytes.0;
    }
    (placed.len() > 1).then_some(placed)
}

/// Returns true if a rebalance moves this owner. Its budgets are already those of the new nodes, and its pages are still moving.
fn is_moved(core: &Core, owner: &str) -> bool {
    core.store.state.moving.is_moved(&OwnerId::from(owner))
}

impl Budgets {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { is_outdated: true, stop, ..Self::default() }
    }

    pub(super) fn tick(&mut self, core: &Core, now: Instant) {
        if !core.config.holds_budgets() {
            return;
        }
        if mem::take(&mut self.is_outdated) {
            self.update(&core.store.state);
        }
        if self.workloads.is_empty() && self.worker.is_none() {
            return;
        }
        match self.worker.as_mut().and_then(PageWorker::take) {
            Some(JobOutcome::Read { found, took }) => {
                self.record_reading(core, found, now);
                let has_excess = self.workloads.values().any(|of| of.shares.has_excess());
                let interval = if has_excess { EXCESS_READ_INTERVAL } else { READ_INTERVAL };
                self.next_reading = Some(now + interval.max(took * READ_PAUSE_FACTOR));
            }
            Some(JobOutcome::Moved { name, order, moved }) => {
                self.record_move(core, &name, &order, &moved, now);
            }
            None => {}
        }
        self.start_next_job(core, now);
    }

    /// Updates the workloads with budgets.
    fn update(&mut self, state: &State) {
        let mut updated: BTreeMap<String, BudgetedWorkload> = BTreeMap::new();
        for (name, held) in &state.guarantees {
            let owner = held.owner(name);
            if let Some(known) = updated.get_mut(owner) {
                known.cgroups.push(held.cgroup.clone());
                continue;
            }
            let Some(placed) = budgets_of(state, owner) else { continue };
            let mut shares = self.workloads.remove(owner).map(|known| known.shares).unwrap_or_default();
            shares.set(placed);
            updated.insert(owner.to_owned(), BudgetedWorkload { cgroups: vec![held.cgroup.clone()], shares });
        }
        self.workloads = updated;
    }

    /// Gives the thread its next job, if one is due.
    fn start_next_job(&mut self, core: &Core, now: Instant) {
        if self.workloads.is_empty() || self.worker.as_ref().is_some_and(PageWorker::is_busy) {
            return;
        }
        let dirs = |of: &BudgetedWorkload| {
            of.cgroups.iter().map(|path| core.hierarchy.dir(path)).collect::<Vec<_>>()
        };
        let is_due = self.next_reading.is_none_or(|next| now >= next);
        if !is_due && self.worker.is_none() {
            return;
        }
        let job = if is_due {
            Job::Read(self.workloads.iter().map(|(name, of)| (name.clone(), dirs(of))).collect())
        } else {
            let Some((name, order)) = self.next_order(core, now) else { return };
            let Some(cgroup) = self.workloads.get(&name).and_then(|of| of.cgroups.first()) else { return };
            Job::Move { cgroup: cgroup.clone(), name, order }
        };
        match self.worker(core) {
            Some(worker) => {
                worker.give(job);
            }
            None => self.next_reading = Some(now + READ_INTERVAL),
        }
    }

    /// Returns the thread, and starts it before its first use.
    fn worker(&mut self, core: &Core) -> Option<&mut PageWorker> {
        if self.worker.is_none() {
            match page_worker::start(&core.config.host_root, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "budgets are not enforced: cannot start the thread"),
            }
        }
        self.worker.as_mut()
    }

    /// Returns the next pages to move. The memory is read again after each move. The workloads take turns, so that none of them keeps
    /// the thread from the others.
    fn next_order(&mut self, core: &Core, now: Instant) -> Option<(String, PageMove)> {
        let last = mem::take(&mut self.last_moved);
        let order = self
            .next_order_in((Bound::Excluded(&last), Bound::Unbounded), core, now)
            .or_else(|| self.next_order_in((Bound::Unbounded, Bound::Included(&last)), core, now));
        self.last_moved = order.as_ref().map_or(last, |(name, _)| name.clone());
        order
    }

    /// Returns the first pages to move of the workloads in a range of names.
    fn next_order_in(
        &mut self,
        names: (Bound<&str>, Bound<&str>),
        core: &Core,
        now: Instant,
    ) -> Option<(String, PageMove)> {
        let (machine, rate) = (&core.policy.machine, core.config.budgets.rate.0);
        let distance = |from: NodeId, to: NodeId| machine.distance(from, to).unwrap_or(u32::MAX);
        let workloads = self.workloads.range_mut::<str, _>(names).filter(|(name, _)| !is_moved(core, name));
        for (name, of) in workloads {
            let (share_move, change) = of.shares.next_move(distance, now);
            if let (Some(change), Some(cgroup)) = (change, of.cgroups.first()) {
                report(core, name, cgroup, change, None);
            }
            let Some(share_move) = share_move else { continue };
            let order = PageMove {
                dirs: of.cgroups.iter().map(|path| core.hierarchy.dir(path)).collect(),
                from: share_move.from,
                to: share_move.to,
                bytes: share_move
                    .bytes
                    .min(Bytes(rate.0.saturating_mul(MAX_ORDER_SECONDS)).max(MIN_MOVE_SIZE)),
                rate,
                heeds_policy: false,
            };
            return Some((name.clone(), order));
        }
        None
    }

    fn record_reading(&mut self, core: &Core, mut found: BTreeMap<String, ByNode>, now: Instant) {
        for (name, of) in self.workloads.iter_mut().filter(|(name, _)| !is_moved(core, name)) {
            let (Some(resident), Some(cgroup)) = (found.remove(name), of.cgroups.first()) else { continue };
            for change in of.shares.record_reading(resident, now) {
                report(core, name, cgroup, change, None);
            }
        }
    }

    fn record_move(&mut self, core: &Core, name: &str, order: &PageMove, moved: &PagesMoved, now: Instant) {
        core.metrics.budget_moved(moved);
        let bytes =
            Bytes(moved.bytes(PageOutcome::Moved).0.saturating_add(moved.bytes(PageOutcome::Reclaimed).0));
        tracing::info!(
            name, from = %order.from, to = %order.to, moved = %moved.bytes(PageOutcome::Moved),
            reclaimed = %moved.bytes(PageOutcome::Reclaimed), obstacle = moved.obstacle().map(PageOutcome::as_str),
            "moved or dropped pages above a budget"
        );
        // The last reading is outdated.
        self.next_reading = None;
        let Some(of) = self.workloads.get_mut(name) else { return };
        let change = of.shares.record_move(order.from, bytes, now);
        if let (Some(change), Some(cgroup)) = (change, of.cgroups.first()) {
            report(core, name, cgroup, change, moved.obstacle());
        }
    }
}

impl Controller for Budgets {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.tick(core, now),
            ControllerEvent::StateChanged => self.is_outdated = true,
            _ => {}
        }
    }
}

fn report(core: &Core, name: &str, cgroup: &CgroupPath, change: ExcessChange, obstacle: Option<PageOutcome>) {
    let (node, severity, message, bytes) = match change {
        ExcessChange::Begins(node, bytes) => {
            let message = format!(
                "{name} has {bytes} more on node {node} than its share there; pages move to its other nodes."
            );
            (node, Severity::Warning, message, bytes)
        }
        ExcessChange::Ends(node) => {
            let message = format!("{name} has no more than its share on node {node} again.");
            (node, Severity::Info, message, Bytes(0))
        }
        ExcessChange::Unmet(node, bytes) => {
            let why = match obstacle {
                None => "its other nodes have their shares, or nothing of it can be moved",
                Some(PageOutcome::NoRoom) => "its other nodes have no room",
                Some(PageOutcome::Shared) => "several processes share the pages",
                Some(PageOutcome::Refused) => "the daemon has no right to move them (CAP_SYS_PTRACE)",
                Some(PageOutcome::Skipped) => "the nodes of its pages cannot be read",
                Some(_) => "the kernel does not move them",
            };
            let message = format!("{name} keeps {bytes} more on node {node} than its share there: {why}.");
            (node, Severity::Critical, message, bytes)
        }
    };
    let report = EventReport::new(EventKind::BudgetExceeded, message).severity(severity).node(node);
    core.report(Some(cgroup), report.detail("excessBytes", bytes.0));
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_api as api;
    use numaward_config::{Config, policy::StrategyKind};
    use numaward_enforce::pages;
    use numaward_engine::ContainerMove;
    use numaward_guarantee::{moving::RunningMoves, request::Request};

    use prometheus_client::registry::Registry;

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    /// Starts a reconciler and guarantees 5 GiB to `/a`, on two nodes of 4 GiB.
    fn bench(burstable: bool) -> (tempfile::TempDir, Arc<TestHost>, ReconcilerLoop) {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        for cgroup in ["", "a"] {
            fixture::cgroup(&root.join(cgroup), &host.machine.lock().unwrap());
        }
        let mut config = Config { strategy: StrategyKind::Native, ..Config::default() };
        config.state_directory = dir.path().join("state");
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let request = Request::new(&api::AllocationRequest {
            placement: api::Placement { burstable, ..api::Placement::default() },
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "5Gi")
        });
        assert!(reconciler.admit(&request.unwrap(), false).is_ok());
        (dir, host, reconciler)
    }

    #[test]
    fn burstable_workload_has_no_budgets() {
        for (burstable, nodes) in [(false, 2), (true, 0)] {
            let (_dir, _host, reconciler) = bench(burstable);
            let state = &reconciler.core.store.state;
            let held = state.ledger.allocation(&"a".into(), &"a".into()).unwrap();
            assert_eq!(held.placed[&ZoneKind::Memory].len(), 2);
            assert_eq!(budgets_of(state, "a").unwrap_or_default().len(), nodes);
        }
    }

    #[test]
    fn ignores_workload_in_rebalance() {
        for is_moved in [false, true] {
            let (_dir, host, mut reconciler) = bench(false);
            let core = &mut reconciler.core;
            let held = core.store.state.ledger.allocation(&"a".into(), &"a".into()).unwrap().clone();
            if is_moved {
                let (owner, container) = ("a".into(), "a".into());
                let of = ContainerMove { owner, container, from: held.clone(), to: held, bytes: Bytes(0) };
                core.store.state.moving.running =
                    Some(RunningMoves { moves: vec![of], ..RunningMoves::default() });
            }
            let mut budgets = Budgets::new(CancellationToken::new());
            budgets.update(&core.store.state);
            let mut now = Instant::now();
            for _ in 0..2 {
                let found = [(NodeId(0), Bytes::gib(4)), (NodeId(1), Bytes(0))].into();
                budgets.record_reading(core, [("a".to_owned(), found)].into(), now);
                now += Duration::from_secs(5);
            }
            let happened = host.happened.lock().unwrap();
            let is_reported = happened.iter().any(|(_, report)| report.kind == EventKind::BudgetExceeded);
            assert_eq!((is_reported, budgets.next_order(core, now).is_some()), (!is_moved, !is_moved));
        }
    }

    /// Gives a workload 4 GiB on node 0, where its share is 1 GiB.
    fn add_excess(budgets: &mut Budgets, core: &Core, name: &str, start: Instant) {
        let mut shares = MemoryShares::default();
        shares.set([(NodeId(0), Bytes::gib(1)), (NodeId(1), Bytes::gib(4))].into());
        let cgroups = vec!["/a".parse().unwrap()];
        budgets.workloads.insert(name.to_owned(), BudgetedWorkload { cgroups, shares });
        for seconds in [0, 5] {
            let found = [(NodeId(0), Bytes::gib(4)), (NodeId(1), Bytes(0))].into();
            let found = [(name.to_owned(), found)].into();
            budgets.record_reading(core, found, start + Duration::from_secs(seconds));
        }
    }

    #[test]
    fn workloads_take_turns() {
        let (_dir, _host, reconciler) = bench(false);
        let (core, now) = (&reconciler.core, Instant::now());
        let mut budgets = Budgets::new(CancellationToken::new());
        for name in ["a", "b", "c"] {
            add_excess(&mut budgets, core, name, now);
        }
        let later = now + Duration::from_secs(5);
        let mut next = || budgets.next_order(core, later).unwrap().0;
        assert_eq!([next(), next(), next(), next()], ["a", "b", "c", "a"]);
    }

    #[test]
    fn skipped_pages_are_counted_and_reported() {
        let (dir, host, reconciler) = bench(false);
        let (core, now) = (&reconciler.core, Instant::now());
        let mut budgets = Budgets::new(CancellationToken::new());
        add_excess(&mut budgets, core, "a", now);
        let later = now + Duration::from_secs(5);
        // No process has this id. One of its lines is not in the kernel's format.
        let process = dir.path().join("proc/2147483000");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("numa_maps"), "zzz default N0=1\n").unwrap();
        fs::write(process.join("maps"), "").unwrap();
        fs::write(dir.path().join("cgroup/a/cgroup.procs"), "2147483000\n").unwrap();
        for _ in 0..3 {
            let (name, order) = budgets.next_order(core, later).unwrap();
            let moved = pages::move_pages(&dir.path().join("proc"), &order, || false);
            budgets.record_move(core, &name, &order, &moved, later);
        }
        let happened = host.happened.lock().unwrap();
        let last = happened.last().unwrap().1.message.clone();
        assert!(last.ends_with("the nodes of its pages cannot be read."), "{last}");
        let mut registry = Registry::default();
        core.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let page = rustix::param::page_size();
        let line = format!("budget_moved_bytes_total{{outcome=\"skipped\"}} {}\n", 3 * page);
        assert!(text.contains(&line), "{text}");
    }

    #[test]
    fn slow_rate_limits_order_size() {
        let (_dir, _host, mut reconciler) = bench(false);
        reconciler.core.config.budgets.rate.0 = Bytes::kib(64);
        let core = &reconciler.core;
        let mut budgets = Budgets::new(CancellationToken::new());
        budgets.update(&core.store.state);
        let now = Instant::now();
        for seconds in [0, 5] {
            let found = [(NodeId(0), Bytes::gib(4)), (NodeId(1), Bytes(0))].into();
            budgets.record_reading(
                core,
                [("a".to_owned(), found)].into(),
                now + Duration::from_secs(seconds),
            );
        }
        let (_, order) = budgets.next_order(core, now + Duration::from_secs(5)).unwrap();
        assert_eq!(order.bytes, MIN_MOVE_SIZE);
    }
}

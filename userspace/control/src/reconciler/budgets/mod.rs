//! Budgets: a workload with memory on several nodes has on each no more than it is promised there.
//!
//! Problem: the strategy `native` lets an allocation on several nodes share each of them with others. `cpuset.mems` says
//! on which nodes it may have memory, not how much on each. Where it takes the share of another, that one finds nothing on
//! its only node, and is killed.
//!
//! Terms: the *budget* is what the allocation has placed on each node ([`Allocation::placed`]). It is about user memory
//! (anonymous and page cache) by `memory.numa_stat`.
//!
//! Algorithm: where all such workloads have their memory is read every few seconds. What is above its budget for a while
//! is reported and moved to those nodes of the workload where it has less, the nearest first ([`share`]); page cache that
//! nobody maps is dropped instead. The thread `pages` reads and moves, one job at a time.
//!
//! Invariants: this thread reads no file and waits for nothing. Nothing is moved beyond a budget, or to a node that the
//! workload is not promised. A moved page is counted once.
//!
//! [`Allocation::placed`]: numaward_engine::Allocation::placed

mod share;

use std::{
    collections::BTreeMap,
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

use self::share::{News, Shares};
use crate::{
    core::Core,
    page_worker::{self, ByNode, Job, JobOutcome, MIN_MOVE_SIZE, PageWorker},
};

/// How often it is read where memory lies, while somebody has more than a budget.
const PACE: Duration = Duration::from_secs(1);
/// How often while nobody has.
const CALM: Duration = Duration::from_secs(3);
/// Reading takes no more than this share of the time: one of so many parts.
const COST: u32 = 100;
/// For how long one order moves pages, at most: then another workload has its turn.
const ORDER: u64 = 10;

/// Holds workloads to their budgets.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    worker: Option<PageWorker>,
    /// Whether somebody else may have a budget by now.
    pub(super) is_outdated: bool,
    /// By the owner in the ledger.
    workloads: BTreeMap<String, Workload>,
    next_look: Option<Instant>,
    stop: CancellationToken,
}

/// A workload with budgets.
#[derive(Debug)]
struct Workload {
    /// Its cgroups: several of a pod that holds its memory as a whole.
    cgroups: Vec<CgroupPath>,
    shares: Shares,
}

/// The memory that an owner has on each node, if it has some on several.
fn budgets_of(state: &State, owner: &str) -> Option<ByNode> {
    // What has a home may have memory anywhere.
    let account = state.ledger.owner(&OwnerId::from(owner)).filter(|account| !account.terms.burstable)?;
    let mut placed = ByNode::new();
    for (node, bytes) in
        account.containers.values().filter_map(|held| held.placed.get(&ZoneKind::Memory)).flatten()
    {
        placed.entry(*node).or_default().0 += bytes.0;
    }
    (placed.len() > 1).then_some(placed)
}

/// Whether a rebalance moves this owner: its budgets are those of the new place already, and its pages are on their way.
fn is_moved(core: &Core, owner: &str) -> bool {
    core.store.state.moving.is_moved(&OwnerId::from(owner))
}

impl Budgets {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { is_outdated: true, stop, ..Self::default() }
    }

    pub(super) fn turn(&mut self, core: &Core, now: Instant) {
        if !core.config.holds_budgets() {
            return;
        }
        if std::mem::take(&mut self.is_outdated) {
            self.follow(&core.store.state);
        }
        if self.workloads.is_empty() && self.worker.is_none() {
            return;
        }
        match self.worker.as_mut().and_then(PageWorker::take) {
            Some(JobOutcome::Read { found, took }) => {
                self.read(core, found, now);
                let is_over = self.workloads.values().any(|of| of.shares.is_over());
                let pace = if is_over { PACE } else { CALM };
                self.next_look = Some(now + pace.max(took * COST));
            }
            Some(JobOutcome::Moved { name, order, moved }) => self.moved(core, &name, &order, &moved, now),
            None => {}
        }
        self.go_on(core, now);
    }

    /// Takes note of who has a budget now.
    fn follow(&mut self, state: &State) {
        let mut now: BTreeMap<String, Workload> = BTreeMap::new();
        for (name, held) in &state.guarantees {
            let owner = held.owner(name);
            if let Some(known) = now.get_mut(owner) {
                known.cgroups.push(held.cgroup.clone());
                continue;
            }
            let Some(placed) = budgets_of(state, owner) else { continue };
            let mut shares = self.workloads.remove(owner).map(|known| known.shares).unwrap_or_default();
            shares.set(placed);
            now.insert(owner.to_owned(), Workload { cgroups: vec![held.cgroup.clone()], shares });
        }
        self.workloads = now;
    }

    /// Gives the thread its next job.
    fn go_on(&mut self, core: &Core, now: Instant) {
        if self.workloads.is_empty() || self.worker.as_ref().is_some_and(PageWorker::is_busy) {
            return;
        }
        let dirs = |of: &Workload| of.cgroups.iter().map(|path| core.hierarchy.dir(path)).collect::<Vec<_>>();
        let is_due = self.next_look.is_none_or(|next| now >= next);
        if !is_due && self.worker.is_none() {
            return;
        }
        let job = if is_due {
            Job::Read(self.workloads.iter().map(|(name, of)| (name.clone(), dirs(of))).collect())
        } else {
            let Some((name, order)) = self.next_order(core, now) else { return };
            Job::Move(name, order)
        };
        match self.worker(core) {
            Some(worker) => {
                worker.give(job);
            }
            None => self.next_look = Some(now + CALM),
        }
    }

    /// The thread, which is started when it is needed first.
    fn worker(&mut self, core: &Core) -> Option<&mut PageWorker> {
        if self.worker.is_none() {
            match page_worker::start(&core.config.host_root, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "budgets are not held: no thread can be started"),
            }
        }
        self.worker.as_mut()
    }

    /// What to move next. After each move it is read anew where memory lies.
    fn next_order(&mut self, core: &Core, now: Instant) -> Option<(String, PageMove)> {
        let (machine, rate) = (&core.policy.machine, core.config.budgets.rate.0);
        let distance = |from: NodeId, to: NodeId| machine.distance(from, to).unwrap_or(u32::MAX);
        let workloads = self.workloads.iter_mut().filter(|(name, _)| !is_moved(core, name));
        for (name, of) in workloads {
            let (wanted, news) = of.shares.next(distance, now);
            if let (Some(news), Some(cgroup)) = (news, of.cgroups.first()) {
                report(core, name, cgroup, news, None);
            }
            let Some(wanted) = wanted else { continue };
            let order = PageMove {
                dirs: of.cgroups.iter().map(|path| core.hierarchy.dir(path)).collect(),
                from: wanted.from,
                to: wanted.to,
                bytes: wanted.bytes.min(Bytes(rate.0.saturating_mul(ORDER)).max(MIN_MOVE_SIZE)),
                rate,
                heeds_policy: false,
            };
            return Some((name.clone(), order));
        }
        None
    }

    fn read(&mut self, core: &Core, mut found: BTreeMap<String, ByNode>, now: Instant) {
        for (name, of) in self.workloads.iter_mut().filter(|(name, _)| !is_moved(core, name)) {
            let (Some(resident), Some(cgroup)) = (found.remove(name), of.cgroups.first()) else { continue };
            for news in of.shares.take(resident, now) {
                report(core, name, cgroup, news, None);
            }
        }
    }

    fn moved(&mut self, core: &Core, name: &str, order: &PageMove, moved: &PagesMoved, now: Instant) {
        core.metrics.budget_moved(moved);
        let done =
            Bytes(moved.bytes(PageOutcome::Moved).0.saturating_add(moved.bytes(PageOutcome::Reclaimed).0));
        tracing::info!(
            name, from = %order.from, to = %order.to, moved = %moved.bytes(PageOutcome::Moved),
            reclaimed = %moved.bytes(PageOutcome::Reclaimed), obstacle = moved.obstacle().map(PageOutcome::as_str),
            "pages above a budget"
        );
        // What was known of where memory lies no longer holds.
        self.next_look = None;
        let Some(of) = self.workloads.get_mut(name) else { return };
        let news = of.shares.moved(order.from, done, now);
        if let (Some(news), Some(cgroup)) = (news, of.cgroups.first()) {
            report(core, name, cgroup, news, moved.obstacle());
        }
    }
}

fn report(core: &Core, name: &str, cgroup: &CgroupPath, news: News, obstacle: Option<PageOutcome>) {
    let (node, severity, message, bytes) = match news {
        News::Begins(node, bytes) => {
            let message = format!(
                "{name} has {bytes} more on node {node} than its share there; pages move to its other nodes."
            );
            (node, Severity::Warning, message, bytes)
        }
        News::Ends(node) => {
            let message = format!("{name} has no more than its share on node {node} again.");
            (node, Severity::Info, message, Bytes(0))
        }
        News::Unmet(node, bytes) => {
            let why = match obstacle {
                None => "its other nodes have their shares, or nothing of it can be moved",
                Some(PageOutcome::NoRoom) => "its other nodes have no room",
                Some(PageOutcome::Shared) => "several processes share the pages",
                Some(PageOutcome::Refused) => "the daemon has no right to move them (CAP_SYS_PTRACE)",
                Some(PageOutcome::Skipped) => "where they lie cannot be read",
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
    use std::sync::Arc;

    use numaward_api as api;
    use numaward_config::{Config, policy::StrategyKind};
    use numaward_engine::ContainerMove;
    use numaward_guarantee::{moving::RunningMoves, request::Request};

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, tests::reconciler_loop},
        testing::{self as fixture, Host},
    };

    /// `/a` has 5 GiB on two nodes of 4 GiB.
    fn bench(burstable: bool) -> (tempfile::TempDir, Arc<Host>, ReconcilerLoop) {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Host::small()));
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
    fn what_has_a_home_has_no_budgets() {
        for (burstable, nodes) in [(false, 2), (true, 0)] {
            let (_dir, _host, reconciler) = bench(burstable);
            let state = &reconciler.core.store.state;
            let held = state.ledger.allocation(&"a".into(), &"a".into()).unwrap();
            assert_eq!(held.placed[&ZoneKind::Memory].len(), 2);
            assert_eq!(budgets_of(state, "a").unwrap_or_default().len(), nodes);
        }
    }

    #[test]
    fn what_a_rebalance_moves_is_let_be() {
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
            budgets.follow(&core.store.state);
            let mut now = Instant::now();
            for _ in 0..2 {
                let found = [(NodeId(0), Bytes::gib(4)), (NodeId(1), Bytes(0))].into();
                budgets.read(core, [("a".to_owned(), found)].into(), now);
                now += Duration::from_secs(5);
            }
            let happened = host.happened.lock().unwrap();
            let is_reported = happened.iter().any(|(_, report)| report.kind == EventKind::BudgetExceeded);
            assert_eq!((is_reported, budgets.next_order(core, now).is_some()), (!is_moved, !is_moved));
        }
    }

    #[test]
    fn a_slow_rate_moves_a_little_at_a_time() {
        let (_dir, _host, mut reconciler) = bench(false);
        reconciler.core.config.budgets.rate.0 = Bytes::kib(64);
        let core = &reconciler.core;
        let mut budgets = Budgets::new(CancellationToken::new());
        budgets.follow(&core.store.state);
        let now = Instant::now();
        for seconds in [0, 5] {
            let found = [(NodeId(0), Bytes::gib(4)), (NodeId(1), Bytes(0))].into();
            budgets.read(core, [("a".to_owned(), found)].into(), now + Duration::from_secs(seconds));
        }
        let (_, order) = budgets.next_order(core, now + Duration::from_secs(5)).unwrap();
        assert_eq!(order.bytes, MIN_MOVE_SIZE);
    }
}

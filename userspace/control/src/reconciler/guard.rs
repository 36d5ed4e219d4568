//! Actions of the headroom guard (`guard: act` or `evict`): keeps workloads without a guarantee off nodes that are low.
//!
//! # Problem
//! The guard's monitor ([`ObservedHost`](numaward_model::port::ObservedHost)) finds nodes whose available memory may not
//! suffice for the guarantees on them. Page cache counts as available because the kernel drops it on demand. The
//! remaining memory cannot be dropped: anonymous memory, tmpfs, dirty and locked pages.
//!
//! # Terms
//! - *low*, *short* and *tight* nodes: see [`NodeHeadroom`].
//! - *steered* off a node: `cpuset.mems` of a cgroup without a guarantee is limited to other nodes.
//!
//! # Algorithm
//! Every few seconds, the guard steers one more workload off each short node: the one with most memory there. It skips a
//! workload if the configuration exempts it, if its other nodes do not have enough available memory or free huge pages
//! for it, or if one of its memory policies names nodes. When the node is no longer low, the original nodes of all steered
//! cgroups are restored.
//!
//! With `guardReclaim`, page cache is dropped on tight nodes before that ([`reclaim`]). With `evict`, pods are selected for
//! eviction if no further workload can be steered off a node ([`crowded`]).
//!
//! # Invariants
//! - A cgroup is not steered if it, an ancestor, a descendant or another container of its pod has a guarantee.
//! - This thread reads no usage from the kernel: it uses the monitor's latest [`Headroom`](numaward_model::headroom::Headroom).
//!   Memory policies and reserved huge pages are read by the thread `policies`, one workload at a time.

mod cache_worker;
mod crowded;
mod reclaim;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_api::{EnforcementMode, EventKind, Severity};
use numaward_cgroup::{CgroupId, CgroupPath, classify};
use numaward_config::guard::GuardMode;
use numaward_engine::ledger::NodeAccount;
use numaward_guarantee::reconciler::LatestCrowdedNodes;
use numaward_model::{
    EventReport, Retry,
    headroom::{NodeHeadroom, RECOVERY_TIME, UnguaranteedWorkload},
};
use numaward_topology::{Bytes, NodeId, NodeSet};
use tokio_util::sync::CancellationToken;

use self::{crowded::Crowding, reclaim::Reclaim};
use super::{
    Controller, ControllerEvent,
    restores::{FIRST_RETRY, LONGEST_RETRY},
};
use crate::{
    core::{Core, huge_pages, narrowing},
    page_worker::MIN_MOVE_SIZE,
    policy_worker::{PolicyFinding, PolicyReader},
};

/// Minimum time between two workloads that are steered off the same node.
const SETTLE_TIME: Duration = Duration::from_secs(3);

/// Result of an attempt to steer a workload off a node.
#[derive(Debug, PartialEq, Eq)]
enum SteerOutcome {
    Steered,
    /// The memory policies of the next candidate are being read.
    ReadingPolicies,
    /// No workload was steered. The memory policies of at least one candidate are not known, see [`PolicyFinding::is_unknown`].
    PoliciesUnknown,
    /// No workload can be steered off the node.
    Stuck,
}

/// Reason why a workload cannot be steered off a node.
#[derive(Debug)]
struct SteeringError {
    reason: String,
    /// True if the memory policies of the workload are not known.
    is_unknown: bool,
}

impl From<String> for SteeringError {
    fn from(reason: String) -> Self {
        Self { reason, is_unknown: false }
    }
}

/// Controller that steers workloads off low nodes.
#[derive(Debug)]
pub(super) struct Guard {
    /// Number of the last processed [`Headroom`](numaward_model::headroom::Headroom).
    last_look: u64,
    /// Time of the last steering off each low node.
    steered_at: BTreeMap<NodeId, Instant>,
    /// Workloads that cannot be steered off a low node and were reported.
    reported_refusals: BTreeSet<(NodeId, CgroupPath)>,
    /// Nodes that were low at any time since the daemon started.
    were_low: NodeSet,
    /// Time since which a node has enough memory, for nodes that were low only in an earlier run of the daemon.
    recovering_since: BTreeMap<NodeId, Instant>,
    /// Times of the next attempts to restore the nodes of a cgroup.
    retries: BTreeMap<CgroupPath, Retry>,
    /// Times of the next attempts to steer a workload with settings that could not be written. Until then, the guard tries
    /// another workload.
    failed: BTreeMap<CgroupPath, Retry>,
    /// Memory policies of workloads; empty while no node is low.
    policies: PolicyReader,
    crowding: Crowding,
    reclaim: Reclaim,
}

impl Guard {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            last_look: 0,
            steered_at: BTreeMap::new(),
            reported_refusals: BTreeSet::new(),
            were_low: NodeSet::new(),
            recovering_since: BTreeMap::new(),
            retries: BTreeMap::new(),
            failed: BTreeMap::new(),
            policies: PolicyReader::new("policies", stop.clone()),
            crowding: Crowding::default(),
            reclaim: Reclaim::new(stop),
        }
    }

    /// Returns the nodes from which pods may be evicted.
    pub(super) fn crowded(&self) -> LatestCrowdedNodes {
        self.crowding.published.clone()
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        if !core.config.guard.acts() || core.mode() != EnforcementMode::On {
            // Cgroups that an earlier run steered.
            self.restore_nodes(core, now, |_, _| NodeSet::new());
            return;
        }
        let headroom = core.ports.host.headroom();
        // The initial headroom also has number 0, so that steered cgroups stay steered until the first check.
        if !self.policies.take() && headroom.look == self.last_look {
            return;
        }
        self.last_look = headroom.look;
        let low: NodeSet = headroom.nodes.iter().filter(|of| of.is_low).map(|of| of.node).collect();
        self.steered_at.retain(|node, _| low.contains(*node));
        self.reported_refusals.retain(|(node, _)| low.contains(*node));
        if low.is_empty() {
            self.policies.known.clear();
        }
        self.policies.known.retain(|path, (id, _)| is_same_cgroup(core, path, *id));
        self.failed.retain(|path, _| headroom.others.iter().any(|workload| workload.cgroup == *path));
        self.were_low.extend(low.iter());
        let steered: BTreeSet<NodeId> = core.store.state.steered().values().flat_map(NodeSet::iter).collect();
        // The first checks after a start do not know the guarantees and do not list the nodes. The ledger knows them.
        let is_guaranteed = |account: &NodeAccount| account.kinds.values().any(|kind| kind.guaranteed.0 > 0);
        let guaranteed = core.store.state.ledger.nodes().iter().filter(|(_, account)| is_guaranteed(account));
        let guaranteed: NodeSet = guaranteed.map(|(node, _)| *node).collect();
        let still_low: NodeSet = steered
            .into_iter()
            .filter(|node| match headroom.node(*node) {
                Some(of) => !self.has_recovered(of, now),
                None => guaranteed.contains(*node),
            })
            .collect();
        let guaranteed_pods = guaranteed_pods(core);
        let has_guarantee =
            |path: &CgroupPath| pod_of(path).is_some_and(|uid| guaranteed_pods.contains(&uid));
        self.restore_nodes(
            core,
            now,
            |path, off| {
                if has_guarantee(path) { NodeSet::new() } else { off & &still_low }
            },
        );
        narrowing::forget_gone(core);
        self.reclaim.tick(core, &headroom, now);
        let mut stuck = NodeSet::new();
        let mut spare = headroom.spare.clone();
        for of in headroom.nodes.iter().filter(|of| of.is_low && of.is_short()) {
            let last = self.steered_at.get(&of.node);
            if last.is_some_and(|last| now.duration_since(*last) < SETTLE_TIME) {
                continue;
            }
            match self.steer_one(core, &headroom.others, &mut spare, of, now) {
                SteerOutcome::Steered => drop(self.steered_at.insert(of.node, now)),
                SteerOutcome::ReadingPolicies | SteerOutcome::PoliciesUnknown => {}
                SteerOutcome::Stuck => stuck.extend([of.node]),
            }
        }
        if core.config.guard == GuardMode::Evict {
            self.crowding.update(core, &headroom, &stuck, now);
        }
        core.metrics.steered(core.store.state.steered().len());
    }

    /// Returns true if a node that cgroups are steered off is no longer low. The monitor does not know nodes that were low
    /// in an earlier run only; for these, this applies the monitor's rule: enough memory for [`RECOVERY_TIME`].
    fn has_recovered(&mut self, of: &NodeHeadroom, now: Instant) -> bool {
        if self.were_low.contains(of.node) {
            return !of.is_low;
        }
        if !of.has_recovered() {
            self.recovering_since.remove(&of.node);
            return false;
        }
        now.duration_since(*self.recovering_since.entry(of.node).or_insert(now)) >= RECOVERY_TIME
    }

    /// Steers one workload off a node: the one with most memory there that can be steered.
    fn steer_one(
        &mut self,
        core: &mut Core,
        workloads: &[UnguaranteedWorkload],
        spare: &mut BTreeMap<NodeId, Bytes>,
        of: &NodeHeadroom,
        now: Instant,
    ) -> SteerOutcome {
        let (node, guaranteed_pods) = (of.node, guaranteed_pods(core));
        let mut candidates: Vec<&UnguaranteedWorkload> =
            workloads.iter().filter(|workload| workload.on(node) >= MIN_MOVE_SIZE).collect();
        candidates.sort_by_key(|workload| (std::cmp::Reverse(workload.on(node)), workload.cgroup.clone()));
        let mut is_any_unknown = false;
        for workload in candidates {
            let cgroup = &workload.cgroup;
            let is_steered = core.store.state.steered().get(cgroup).is_some_and(|off| off.contains(node));
            let has_failed = self.failed.get(cgroup).is_some_and(|retry| !retry.is_due(now));
            if is_steered || has_failed || !is_steerable(core, &guaranteed_pods, workload) {
                continue;
            }
            match self.steer_off(core, spare, workload, node, now) {
                Ok(None) => return SteerOutcome::ReadingPolicies,
                Ok(Some(allowed)) => {
                    let message = format!(
                        "{cgroup} is kept off node {node}, which may soon not have enough memory for its guarantees; it \
                         may use nodes {allowed}."
                    );
                    report(core, cgroup, node, Severity::Warning, message);
                    return SteerOutcome::Steered;
                }
                Err(SteeringError { reason, is_unknown }) => {
                    is_any_unknown |= is_unknown;
                    if self.reported_refusals.insert((node, cgroup.clone())) {
                        let message = format!("{cgroup} cannot be kept off node {node}: {reason}.");
                        report(core, cgroup, node, Severity::Warning, message);
                    }
                }
            }
        }
        if is_any_unknown { SteerOutcome::PoliciesUnknown } else { SteerOutcome::Stuck }
    }

    /// Steers a workload off one more node and returns the nodes that it may still use; `None` while its memory policies
    /// are read. The memory to be moved is subtracted from `spare`, the available memory of each node.
    fn steer_off(
        &mut self,
        core: &mut Core,
        spare: &mut BTreeMap<NodeId, Bytes>,
        workload: &UnguaranteedWorkload,
        node: NodeId,
        now: Instant,
    ) -> Result<Option<NodeSet>, SteeringError> {
        let cgroup = &workload.cgroup;
        let mut off = core.store.state.steered().get(cgroup).cloned().unwrap_or_default();
        off.extend([node]);
        let original = narrowing::nodes_without_steering(core, cgroup)?;
        if !original.contains(node) {
            return Err(format!(
                "it may use only nodes {original}, and its memory on node {node} does not move"
            )
            .into());
        }
        let allowed = &original - &off;
        if allowed.is_empty() {
            return Err(format!("it may use only nodes {original}").into());
        }
        let resident = workload.on(node);
        let room = allowed
            .iter()
            .filter_map(|node| spare.get(&node))
            .fold(0, |sum: u64, of| sum.saturating_add(of.0));
        if room < resident.0 {
            let room = Bytes(room);
            return Err(format!("it has {resident} there, and nodes {allowed} have room for {room}").into());
        }
        let Some(finding) = self.policies.result_for(core, cgroup, workload.id) else { return Ok(None) };
        let PolicyFinding { policies, untouched, is_unknown } = finding;
        policies.map_err(|reason| SteeringError { reason, is_unknown })?;
        huge_pages::check_untouched(core, untouched, &allowed).map_err(|shortage| shortage.to_string())?;
        if let Err(error) = narrowing::keep_off(core, cgroup, &off) {
            let retry = self.failed.entry(cgroup.clone());
            retry.or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY)).postpone(now);
            return Err(error.to_string().into());
        }
        self.failed.remove(cgroup);
        // The kernel decides how the memory is distributed, so each node is charged with all of it.
        for (_, spare) in spare.iter_mut().filter(|(node, _)| allowed.contains(**node)) {
            spare.0 = spare.0.saturating_sub(resident.0);
        }
        Ok(Some(allowed))
    }

    /// Restores nodes of steered cgroups. `still_off` returns the nodes that a cgroup stays steered off, given its path and
    /// the nodes that it is steered off now.
    fn restore_nodes(
        &mut self,
        core: &mut Core,
        now: Instant,
        still_off: impl Fn(&CgroupPath, &NodeSet) -> NodeSet,
    ) {
        self.retries.retain(|path, _| core.store.state.steered().contains_key(path));
        let steered = core.store.state.steered().iter();
        let changed: Vec<(CgroupPath, NodeSet, NodeSet)> = steered
            .map(|(path, off)| (path.clone(), off.clone(), still_off(path, off)))
            .filter(|(_, off, still_off)| off != still_off)
            .collect();
        for (path, off, still_off) in changed {
            if self.retries.get(&path).is_some_and(|retry| !retry.is_due(now)) {
                continue;
            }
            let restored = &off - &still_off;
            match narrowing::keep_off(core, &path, &still_off) {
                Ok(()) => {
                    let message = format!("{path} may use nodes {restored} again.");
                    report(core, &path, restored.first().unwrap_or(NodeId(0)), Severity::Info, message);
                }
                Err(error) => {
                    tracing::error!(cgroup = %path, %error, "the nodes of the cgroup cannot be restored yet; the guard tries again");
                    let retry = self.retries.entry(path);
                    retry.or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY)).postpone(now);
                }
            }
            core.metrics.steered(core.store.state.steered().len());
        }
    }
}

impl Controller for Guard {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        if let ControllerEvent::Tick(now) = *event {
            self.tick(core, now);
        }
    }
}

/// Returns the UID of the pod if this is the cgroup of a container.
fn pod_of(cgroup: &CgroupPath) -> Option<String> {
    classify(cgroup, |_| false).container?.pod_uid
}

/// Returns the UIDs of pods with a guarantee for the pod or one of its containers.
fn guaranteed_pods(core: &Core) -> BTreeSet<String> {
    let state = &core.store.state;
    let held = state.guarantees.values().filter_map(|held| pod_of(&held.cgroup));
    held.chain(state.pods.values().map(|admitted| admitted.pod.uid.clone())).collect()
}

/// Returns true if the configuration does not exempt a workload, its cgroup still exists, and neither a cgroup around it
/// nor its pod has a guarantee.
fn is_steerable(core: &Core, guaranteed_pods: &BTreeSet<String>, workload: &UnguaranteedWorkload) -> bool {
    let cgroup = &workload.cgroup;
    let is_exempt = core.config.guard_exempt.iter().any(|pattern| pattern.matches(cgroup));
    let has_guarantee = core.store.state.has_guarantee_around(cgroup)
        || pod_of(cgroup).is_some_and(|uid| guaranteed_pods.contains(&uid));
    !is_exempt && !has_guarantee && is_same_cgroup(core, cgroup, workload.id)
}

/// Returns true if the cgroup at the path still has this id, so that it is not a new cgroup with the same path.
fn is_same_cgroup(core: &Core, path: &CgroupPath, id: CgroupId) -> bool {
    matches!(core.hierarchy.id_of(path), Ok(Some(now)) if now == id)
}

fn report(core: &Core, cgroup: &CgroupPath, node: NodeId, severity: Severity, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::Steered, message).severity(severity).node(node));
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use numaward_api as api;
    use numaward_cgroup::pod_cgroup;
    use numaward_config::{Config, enforcement::CgroupPattern};
    use numaward_engine::PodId;
    use numaward_guarantee::{pod::AdmittedPod, request::Request};
    use numaward_model::headroom::{Headroom, PodUsage};
    use numaward_topology::{HugepagePool, HugepageSize};

    use super::*;
    use crate::{
        reconciler::{
            ReconcilerLoop, controllers::Controllers, read_model::ReadModel, tests::reconciler_loop,
            upkeep::Upkeep,
        },
        testing::{self as fixture, TestHost},
    };

    /// A host with cgroups, of which `/kept` has a guarantee on node 1.
    pub(super) struct GuardBench {
        dir: tempfile::TempDir,
        host: Arc<TestHost>,
        config: Config,
        reconciler: Option<ReconcilerLoop>,
        look: u64,
        now: Instant,
    }

    impl GuardBench {
        pub(super) fn new(cgroups: &[&str]) -> Self {
            Self::with(cgroups, GuardMode::Act, "/exempt")
        }

        pub(super) fn evicting(cgroups: &[&str], exempt: &str) -> Self {
            Self::with(cgroups, GuardMode::Evict, exempt)
        }

        fn with(cgroups: &[&str], guard: GuardMode, exempt: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
            let root = dir.path().join("cgroup");
            for cgroup in [&["", "kept"], cgroups].concat() {
                fixture::cgroup(&root.join(cgroup), &host.machine.lock().unwrap());
            }
            let config = Config {
                host_root: dir.path().to_owned(),
                state_directory: dir.path().join("state"),
                guard,
                guard_exempt: vec![CgroupPattern::new(exempt).unwrap()],
                ..Config::default()
            };
            let mut reconciler = reconciler_loop(&config, &root, &host);
            let request = Request::new(&api::AllocationRequest {
                name: "kept".to_owned(),
                target: api::Target::Cgroup("/kept".to_owned()),
                cpus: Some(api::Cpus::whole(1)),
                memory: Some("256Mi".to_owned()),
                memory_limit: None,
                hugepages: BTreeMap::new(),
                policy: None,
                partition: None,
                placement: api::Placement {
                    preferred_nodes: Some("1".parse().unwrap()),
                    ..api::Placement::default()
                },
            });
            let admitted = reconciler.admit(&request.unwrap(), false);
            assert!(admitted.is_ok(), "{:?}", admitted.err());
            Self { dir, host, config, reconciler: Some(reconciler), look: 0, now: Instant::now() }
        }

        pub(super) fn root(&self) -> std::path::PathBuf {
            self.dir.path().join("cgroup")
        }

        pub(super) fn mems(&self, cgroup: &str) -> String {
            fixture::line(&self.root().join(cgroup).join("cpuset.mems"))
        }

        /// Publishes the memory of nodes 1 and 0 above their margins and the memory of workloads on node 1, in MiB, and runs
        /// the guard.
        pub(super) fn check(&mut self, low: bool, [room, elsewhere]: [i64; 2], workloads: &[(&str, u64)]) {
            let node = |node: u32, is_low: bool, room: i64| NodeHeadroom {
                node: NodeId(node),
                obtainable: Bytes(((1 << 30) + (room << 20)).cast_unsigned()),
                free: Bytes(0),
                unused: Bytes::mib(1024 - 64),
                margin: Bytes::mib(64),
                is_low,
                is_tight: false,
            };
            let workload = |(path, mib): &(&str, u64)| UnguaranteedWorkload {
                resident: vec![(NodeId(1), Bytes::mib(*mib))],
                ..self.workload(path)
            };
            let workloads = workloads.iter().map(workload).collect();
            self.publish(vec![node(0, false, elsewhere), node(1, low, room)], workloads);
        }

        /// Returns a workload without memory.
        pub(super) fn workload(&self, path: &str) -> UnguaranteedWorkload {
            UnguaranteedWorkload {
                cgroup: format!("/{path}").parse().unwrap(),
                id: id_of(&self.root().join(path)),
                resident: Vec::new(),
                cache: Vec::new(),
            }
        }

        pub(super) fn publish(&mut self, nodes: Vec<NodeHeadroom>, others: Vec<UnguaranteedWorkload>) {
            self.look += 1;
            let spare = nodes.iter().map(|of| (of.node, of.spare())).collect();
            let mut pods: BTreeMap<String, PodUsage> = BTreeMap::new();
            for workload in &others {
                let Some((uid, cgroup)) = pod_cgroup(&workload.cgroup) else { continue };
                let none = PodUsage { uid: uid.clone(), cgroups: vec![cgroup], beyond: Vec::new() };
                let pod = pods.entry(uid).or_insert(none);
                pod.beyond = vec![(NodeId(1), Bytes(pod.on(NodeId(1)).0 + workload.on(NodeId(1)).0))];
            }
            let pods = pods.into_values().collect();
            *self.host.headroom.lock().unwrap() =
                Arc::new(Headroom { look: self.look, nodes, spare, others, pods, ..Headroom::default() });
            self.now += SETTLE_TIME;
            self.tick();
        }

        fn tick(&mut self) {
            let ReconcilerLoop { controllers: Controllers { guard, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            guard.tick(core, self.now);
            while guard.policies.is_busy() {
                std::thread::sleep(Duration::from_millis(1));
                guard.tick(core, self.now);
            }
        }

        /// Adds a process with these files in `/proc` to a cgroup.
        fn process(&self, cgroup: &str, pid: u32, files: &[(&str, &str)]) {
            fs::write(self.root().join(cgroup).join("cgroup.procs"), format!("{pid}\n")).unwrap();
            let process = self.dir.path().join(format!("proc/{pid}"));
            let defaults =
                [("task/1/numa_maps", "55d0 default\n"), ("numa_maps", "55d0 default\n"), ("maps", "")];
            for (file, text) in defaults.iter().chain(files) {
                let path = process.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        }

        /// Writes the number of free 2-MiB pages of each node's pool.
        fn huge_pages(&mut self, free: [u64; 2]) {
            let machine = &mut *self.host.machine.lock().unwrap();
            for node in Arc::make_mut(machine).nodes.values_mut() {
                let pool = HugepagePool { total: 64, ..HugepagePool::default() };
                node.hugepages.insert(HugepageSize(Bytes::mib(2)), pool);
            }
            for (node, free) in free.into_iter().enumerate() {
                let node = self.dir.path().join(format!("sys/devices/system/node/node{node}"));
                let pool = node.join("hugepages/hugepages-2048kB");
                fs::create_dir_all(&pool).unwrap();
                fs::write(node.join("meminfo"), "Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: 1024 kB\n")
                    .unwrap();
                for (file, pages) in
                    [("nr_hugepages", 64), ("free_hugepages", free), ("surplus_hugepages", 0)]
                {
                    fs::write(pool.join(file), format!("{pages}\n")).unwrap();
                }
                // Most kernels also have empty pools of other sizes.
                let empty = node.join("hugepages/hugepages-1048576kB");
                fs::create_dir_all(&empty).unwrap();
                fs::write(empty.join("nr_hugepages"), "0\n").unwrap();
            }
        }

        fn restart(&mut self) {
            drop(self.reconciler.take());
            *self.host.headroom.lock().unwrap() = Arc::default();
            self.look = 0;
            self.reconciler = Some(reconciler_loop(&self.config, &self.root(), &self.host));
            self.tick();
        }

        pub(super) fn core_and_guard(&mut self) -> (&Core, &mut Guard) {
            let ReconcilerLoop { controllers, core, .. } = self.reconciler.as_mut().unwrap();
            (core, &mut controllers.guard)
        }

        pub(super) fn guard(&self) -> &Guard {
            &self.reconciler.as_ref().unwrap().controllers.guard
        }

        /// Adds a guarantee for a pod as a whole.
        pub(super) fn admit_pod(&mut self, uid: &str) {
            let pod = PodId { uid: uid.to_owned(), ..PodId::default() };
            let explanation = api::Explanation::default();
            let admitted = AdmittedPod { pod, sandbox: String::new(), container: None, explanation };
            let core = &mut self.reconciler.as_mut().unwrap().core;
            core.store.state.pods.insert(uid.to_owned(), admitted);
        }

        /// Returns true if clients see the guarantee as enforced.
        fn is_enforced(&self, name: &str) -> bool {
            let ReconcilerLoop { controllers, core, .. } = self.reconciler.as_ref().unwrap();
            let mut model = ReadModel::default();
            model.update(core, controllers);
            model.allocation(name).unwrap().enforced
        }

        fn state(&self) -> &numaward_guarantee::state::State {
            &self.reconciler.as_ref().unwrap().core.store.state
        }

        pub(super) fn forget_reports(&self) {
            self.host.happened.lock().unwrap().clear();
        }

        pub(super) fn reported(&self) -> String {
            let happened = self.host.happened.lock().unwrap();
            happened.iter().map(|(_, report)| report.message.clone() + "\n").collect()
        }
    }

    fn id_of(dir: &Path) -> CgroupId {
        use std::os::unix::fs::MetadataExt as _;
        CgroupId(fs::metadata(dir).unwrap().ino())
    }

    /// Returns the cgroup of a container in this cgroup of a pod.
    pub(super) fn pod_container(pod: &str, first: char) -> String {
        format!("kubepods/{pod}/{first}123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")
    }

    pub(super) fn guarantee(bench: &mut GuardBench, name: &str, path: &str) {
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(1)),
            ..api::AllocationRequest::new(name, api::Target::Cgroup(path.to_owned()), "64Mi")
        });
        assert!(bench.reconciler.as_mut().unwrap().admit(&request.unwrap(), false).is_ok(), "{name}");
    }

    #[test]
    fn steers_largest_first_and_restores() {
        let mut bench = GuardBench::new(&["small", "large", "exempt", "bound"]);
        fs::write(bench.root().join("bound/cpuset.mems"), "1\n").unwrap();
        let others = [("small", 50), ("exempt", 500), ("large", 200), ("bound", 400), ("kept", 900)];
        bench.check(true, [-10, 1000], &others);
        assert_eq!(["small", "large", "exempt", "bound"].map(|of| bench.mems(of)), ["", "0", "", "1"]);
        assert!(bench.reported().contains("/bound cannot be kept off node 1: it may use only nodes 1"));
        assert!(bench.reported().contains("/large is kept off node 1"));
        bench.tick();
        assert_eq!(bench.mems("small"), "", "the headroom has not changed");
        bench.check(true, [10, 1000], &others);
        assert_eq!(bench.mems("small"), "", "low, but not short");
        bench.check(true, [-1, 1000], &others);
        assert_eq!(bench.mems("small"), "0");
        assert_eq!(bench.reported().matches("/bound cannot").count(), 1, "said once");

        // The cgroups stay steered after a restart.
        bench.restart();
        bench.publish(Vec::new(), Vec::new());
        assert_eq!(["small", "large"].map(|of| bench.mems(of)), ["0", "0"], "guarantees are not known yet");
        bench.check(false, [63, 1000], &[]);
        assert_eq!(["small", "large"].map(|of| bench.mems(of)), ["0", "0"], "below twice the margin");
        for _ in 0..RECOVERY_TIME.as_secs() / SETTLE_TIME.as_secs() {
            bench.check(false, [500, 1000], &[]);
            assert_eq!(["small", "large"].map(|of| bench.mems(of)), ["0", "0"], "enough, but not for long");
        }
        bench.check(false, [500, 1000], &[]);
        assert_eq!(["small", "large", "bound"].map(|of| bench.mems(of)), ["", "", "1"]);
        assert!(bench.state().steered().is_empty());
        assert!(bench.state().applied.held().all(|(path, _)| path.as_str() == "/kept"));
        assert!(bench.reported().contains("/large may use nodes 1 again"));
    }

    #[test]
    fn spares_pods_with_guarantees() {
        let (guaranteed, bare) = (pod_container("podp", 'a'), pod_container("podp", 'b'));
        let mut bench = GuardBench::new(&["kubepods", "kubepods/podp", &guaranteed, &bare, "hog"]);
        bench.check(true, [-10, 1000], &[(&bare, 300), ("hog", 100)]);
        assert_eq!(bench.mems(&bare), "0");
        guarantee(&mut bench, "p", &format!("/{guaranteed}"));
        for _ in 0..2 {
            bench.check(true, [-10, 1000], &[(&bare, 300), ("hog", 100)]);
            assert_eq!((bench.mems(&bare), bench.mems("hog")), (String::new(), "0".to_owned()));
        }
    }

    #[test]
    fn mode_change_spares_untouched_huge_pages() {
        let mut bench = GuardBench::new(&["db"]);
        bench.config.enforcement.mode = EnforcementMode::DryRun;
        bench.restart();
        guarantee(&mut bench, "db", "/db");
        assert_eq!(bench.mems("db"), "");
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 0 kB\n")]);
        bench.huge_pages([0, 0]);
        bench.config.enforcement.mode = EnforcementMode::On;
        bench.restart();
        assert_eq!(bench.mems("db"), "", "the next touch would kill it");
        bench.huge_pages([64, 64]);
        bench.restart();
        assert_ne!(bench.mems("db"), "");
    }

    #[test]
    fn spares_policy_that_names_nodes() {
        let mut bench = GuardBench::new(&["spread", "hog"]);
        bench.process("spread", 77, &[("numa_maps", "55d0 default\n7f00 interleave:0-1 anon=9 N0=5 N1=4\n")]);
        bench.check(true, [-10, 1000], &[("spread", 200), ("hog", 100)]);
        assert_eq!(["spread", "hog"].map(|of| bench.mems(of)), ["", "0"]);
        let reason = "/spread cannot be kept off node 1: process 77 has the memory policy interleave:0-1";
        assert!(bench.reported().contains(reason), "{}", bench.reported());
        bench.process("spread", 77, &[]);
        bench.check(true, [-10, 1000], &[("spread", 200)]);
        assert_eq!(bench.mems("spread"), "", "policies are not read again while the node is low");
        bench.check(false, [500, 1000], &[]);
        bench.check(true, [-10, 1000], &[("spread", 200)]);
        assert_eq!(bench.mems("spread"), "0");
    }

    #[test]
    fn locked_workload_delays_no_other() {
        let mut bench = GuardBench::new(&["locked", "hog"]);
        bench.process("locked", 77, &[]);
        let fifo = bench.dir.path().join("proc/77/clear_refs");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        bench.check(true, [-10, 1000], &[("locked", 200), ("hog", 100)]);
        assert_eq!(["locked", "hog"].map(|of| bench.mems(of)), ["", "0"]);
        assert!(bench.reported().contains("keeps its memory map locked"), "{}", bench.reported());
        let tried_once = bench.guard().failed.values().all(|retry| retry.is_due(bench.now + FIRST_RETRY));
        assert!(tried_once && bench.guard().failed.len() == 1);
        let lock = fs::File::options().read(true).write(true).open(&fifo).unwrap();
        while bench.mems("locked").is_empty() {
            bench.check(true, [-10, 1000], &[("locked", 200)]);
        }
        assert!(bench.guard().failed.is_empty());
        drop(lock);
    }

    #[test]
    fn spares_unreadable_policy() {
        let mut bench = GuardBench::new(&["hidden"]);
        fs::write(bench.root().join("hidden/cgroup.procs"), "0\n").unwrap();
        bench.check(true, [-10, 1000], &[("hidden", 200)]);
        assert_eq!(bench.mems("hidden"), "");
        assert!(bench.reported().contains("memory policies cannot be read"), "{}", bench.reported());
    }

    #[test]
    fn needs_free_huge_pages_elsewhere() {
        let mut bench = GuardBench::new(&["db"]);
        // 16 MiB, of which 4 MiB are touched.
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 4096 kB\n")]);
        bench.huge_pages([5, 60]);
        bench.check(true, [-10, 1000], &[("db", 200)]);
        assert_eq!(bench.mems("db"), "");
        let reason = "12Mi of huge pages that they have not touched yet, and nodes 0 have 10Mi free";
        assert!(bench.reported().contains(reason), "{}", bench.reported());
        bench.huge_pages([6, 60]);
        bench.check(true, [-10, 1000], &[("db", 200)]);
        assert_eq!(bench.mems("db"), "0");
    }

    #[test]
    fn refuses_node_without_huge_pages() {
        let mut bench = GuardBench::new(&["db"]);
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 0 kB\n")]);
        let admit = |bench: &mut GuardBench| {
            let request = Request::new(&api::AllocationRequest {
                placement: api::Placement {
                    preferred_nodes: Some("0".parse().unwrap()),
                    ..api::Placement::default()
                },
                ..api::AllocationRequest::new("db", api::Target::Cgroup("/db".to_owned()), "64Mi")
            });
            let admitted = bench.reconciler.as_mut().unwrap().admit(&request.unwrap(), false);
            admitted.map(drop).map_err(|error| error.to_string())
        };
        bench.huge_pages([7, 60]);
        bench.reconciler.as_mut().unwrap().run_maintenance();
        let error = admit(&mut bench).unwrap_err();
        assert!(
            error.contains("16Mi of huge pages that they have not touched yet, and nodes 0 have 14Mi"),
            "{error}"
        );
        assert!(bench.state().guarantees.keys().eq(["kept"]));
        bench.huge_pages([8, 60]);
        admit(&mut bench).unwrap();
        assert_eq!(bench.mems("db"), "0");
    }

    impl GuardBench {
        /// Requests a guarantee on node 0 for `/db`, which has 300 MiB on node 1. Node 0 has as many MiB free as given.
        fn admit_db(&mut self, free: u64) -> Result<(), String> {
            // Page cache stays there or is dropped.
            let numa_stat = format!("anon N0=0 N1={}\nfile N0=0 N1={}\n", 300 << 20, 900_u64 << 20);
            fs::write(self.root().join("db/memory.numa_stat"), numa_stat).unwrap();
            self.set_free(free);
            let request = Request::new(&api::AllocationRequest {
                memory_limit: Some("2Gi".to_owned()),
                placement: api::Placement {
                    preferred_nodes: Some("0".parse().unwrap()),
                    ..api::Placement::default()
                },
                ..api::AllocationRequest::new("db", api::Target::Cgroup("/db".to_owned()), "64Mi")
            });
            let admitted = self.reconciler.as_mut().unwrap().admit(&request.unwrap(), false);
            admitted.map(drop).map_err(|error| error.to_string())
        }

        /// Writes the MiB that are free on node 0.
        fn set_free(&mut self, free: u64) {
            self.huge_pages([0, 0]);
            let meminfo = format!("Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: {} kB\n", free << 10);
            fs::write(self.dir.path().join("sys/devices/system/node/node0/meminfo"), meminfo).unwrap();
        }
    }

    #[test]
    fn refuses_nodes_without_room() {
        let mut bench = GuardBench::new(&["db"]);
        let error = bench.admit_db(299).unwrap_err();
        assert!(error.contains("it has 300Mi on other nodes than 0, which have room for 299Mi"), "{error}");
        assert_eq!(bench.mems("db"), "");
        bench.admit_db(300).unwrap();
        assert_eq!(bench.mems("db"), "0");
    }

    impl GuardBench {
        /// Declares a guarantee for `/db` with this preferred node. Returns the reason why the rule is not followed.
        fn declare_db(&mut self, node: u32) -> Option<String> {
            let rule = serde_json::json!([{
                "cgroup": "/db", "memory": "64Mi", "memoryLimit": "2Gi",
                "placement": {"preferredNodes": node.to_string()},
            }]);
            let ReconcilerLoop { controllers: Controllers { declarations, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            declarations.replace(serde_json::from_value(rule).unwrap());
            declarations.reconcile(core).unwrap();
            declarations.waiting().pop().map(|waiting| waiting.reason)
        }
    }

    #[test]
    fn edited_rule_for_nodes_without_room_keeps_guarantee() {
        let mut bench = GuardBench::new(&["db"]);
        bench.set_free(1);
        assert_eq!((bench.declare_db(1), bench.mems("db").as_str()), (None, "1"));
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 0 kB\n")]);
        bench.huge_pages([7, 60]);
        let is_kept = |reason: Option<String>, words: &str| {
            let reason = reason.unwrap();
            assert!(reason.contains(words) && reason.ends_with("it keeps its present guarantee"), "{reason}");
        };
        is_kept(bench.declare_db(0), "nodes 0 have 14Mi free");
        assert_eq!(bench.mems("db"), "1");

        fs::write(bench.root().join("db/cgroup.procs"), "").unwrap();
        let numa_stat = format!("anon N0=0 N1={}\nfile N0=0 N1=0\n", 300 << 20);
        fs::write(bench.root().join("db/memory.numa_stat"), numa_stat).unwrap();
        bench.set_free(299);
        is_kept(bench.declare_db(0), "which have room for 299Mi");
        assert_eq!(bench.mems("db"), "1");
        bench.set_free(300);
        assert_eq!((bench.declare_db(0), bench.mems("db").as_str()), (None, "0"));
    }

    #[test]
    fn refused_guarantee_of_dry_run_is_tried_again() {
        let mut bench = GuardBench::new(&["db"]);
        bench.config.enforcement.mode = EnforcementMode::DryRun;
        bench.restart();
        bench.admit_db(300).unwrap();
        assert_eq!((bench.mems("db"), bench.is_enforced("db")), (String::new(), false));

        bench.config.enforcement.mode = EnforcementMode::On;
        bench.set_free(299);
        bench.restart();
        let mut upkeep = Upkeep::new(bench.now);
        for (free, mems) in [(299, ""), (300, "0")] {
            bench.set_free(free);
            bench.now += Duration::from_secs(30);
            let now = bench.now;
            upkeep.handle(&mut bench.reconciler.as_mut().unwrap().core, &ControllerEvent::Tick(now));
            assert_eq!((bench.mems("db").as_str(), bench.is_enforced("db")), (mems, free == 300));
        }
    }

    #[test]
    fn ignores_absent_nodes() {
        let mut bench = GuardBench::new(&["wide", "narrow"]);
        // The kernel reports all possible nodes after all nodes were restored while processes ran in the cgroup.
        for (cgroup, nodes) in [("wide", "0-31"), ("narrow", "1-31")] {
            fs::write(bench.root().join(cgroup).join("cpuset.mems"), nodes).unwrap();
            bench.check(true, [-10, 1000], &[(cgroup, 100)]);
        }
        assert_eq!(["wide", "narrow"].map(|of| bench.mems(of)), ["0", "1-31"]);
        bench.check(false, [500, 1000], &[]);
        assert_eq!(bench.mems("wide"), "0-31");
    }

    #[test]
    fn spares_own_pod() {
        let (own, beside, other) =
            (pod_container("podp", 'a'), pod_container("podp", 'b'), pod_container("podq", 'c'));
        let mut bench =
            GuardBench::new(&["kubepods", "kubepods/podp", &own, &beside, "kubepods/podq", &other]);
        fs::write(bench.root().join(&own).join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        bench.restart();
        bench.check(true, [-10, 1000], &[(&own, 300), (&beside, 200), (&other, 100)]);
        assert_eq!([&own, &beside, &other].map(|of| bench.mems(of)), ["", "", "0"]);
    }

    #[test]
    fn needs_room_on_other_nodes() {
        let mut bench = GuardBench::new(&["hog"]);
        bench.check(true, [-10, 99], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.reported().contains("nodes 0 have room for 99Mi"), "{}", bench.reported());
        bench.check(true, [-10, 100], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
    }

    #[test]
    fn unknown_room_counts_as_none() {
        let mut bench = GuardBench::new(&["hog"]);
        let hog =
            UnguaranteedWorkload { resident: vec![(NodeId(1), Bytes::mib(100))], ..bench.workload("hog") };
        let low = NodeHeadroom {
            node: NodeId(1),
            obtainable: Bytes::gib(1),
            free: Bytes(0),
            unused: Bytes::gib(1),
            margin: Bytes::mib(64),
            is_low: true,
            is_tight: false,
        };
        bench.publish(vec![low], vec![hog]);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.reported().contains("nodes 0 have room for 0"), "{}", bench.reported());
    }

    #[test]
    fn charges_room_of_steered_workload() {
        let mut bench = GuardBench::new(&["a", "b"]);
        let others = ["a", "b"].map(|name| UnguaranteedWorkload {
            resident: vec![(NodeId(1), Bytes::mib(100))],
            ..bench.workload(name)
        });
        let ReconcilerLoop { controllers: Controllers { guard, .. }, core, .. } =
            bench.reconciler.as_mut().unwrap();
        let (mut spare, now) = (BTreeMap::from([(NodeId(0), Bytes::mib(150))]), Instant::now());
        let steered = others.map(|other| {
            loop {
                match guard.steer_off(core, &mut spare, &other, NodeId(1), now) {
                    Ok(None) => drop(guard.policies.take()),
                    done => return done.map_err(|obstacle| obstacle.reason),
                }
            }
        });
        let refused = "it has 100Mi there, and nodes 0 have room for 50Mi".to_owned();
        assert_eq!(steered, [Ok(Some("0".parse().unwrap())), Err(refused)]);
    }

    #[test]
    fn waits_between_workloads() {
        let mut bench = GuardBench::new(&["a", "b"]);
        let others = [("a", 200), ("b", 100)];
        bench.check(true, [-10, 1000], &others);
        let mems = |bench: &GuardBench| ["a", "b"].map(|of| bench.mems(of));
        assert_eq!(mems(&bench), ["0", ""]);
        // The next check adds `SETTLE_TIME`: half of it has passed then.
        bench.now -= SETTLE_TIME / 2;
        bench.check(true, [-10, 1000], &others);
        assert_eq!(mems(&bench), ["0", ""]);
        bench.check(true, [-10, 1000], &others);
        assert_eq!(mems(&bench), ["0", "0"]);
    }

    #[test]
    fn failed_restore_is_retried() {
        let mut bench = GuardBench::new(&["hog"]);
        bench.check(true, [-10, 1000], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
        let knob = bench.root().join("hog/cpuset.mems");
        let refused = fixture::refuse(&knob);
        bench.check(false, [500, 1000], &[]);
        assert!(bench.state().steered().is_empty() && bench.mems("hog") == "0");
        let now = bench.now;
        let turn = |bench: &mut GuardBench, seconds: u64| {
            let ReconcilerLoop { controllers, core, .. } = bench.reconciler.as_mut().unwrap();
            controllers.restores.tick(core, now + Duration::from_secs(seconds));
            controllers.restores.pending()
        };
        let [pending] = &turn(&mut bench, 0)[..] else { panic!() };
        assert_eq!((pending.cgroup.as_str(), pending.knob.as_str()), ("/hog", "cpuset.mems"));
        assert_eq!((pending.written.as_str(), pending.found.as_str()), ("0", ""));
        assert!(pending.reason.is_some());
        // The restore stays pending after a restart.
        bench.restart();
        assert_eq!(turn(&mut bench, 0).len(), 1);

        drop(refused);
        fs::remove_file(&knob).unwrap();
        fs::write(&knob, "0\n").unwrap();
        assert_eq!(turn(&mut bench, 1).len(), 1, "before the first retry");
        assert_eq!(turn(&mut bench, 6), []);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.state().applied.held().all(|(path, _)| path.as_str() == "/kept"));
    }

    #[test]
    fn restore_keeps_foreign_value() {
        let mut bench = GuardBench::new(&["hog"]);
        bench.check(true, [-10, 1000], &[("hog", 100)]);
        let knob = bench.root().join("hog/cpuset.mems");
        let refused = fixture::refuse(&knob);
        bench.check(false, [500, 1000], &[]);
        drop(refused);
        fs::remove_file(&knob).unwrap();
        fs::write(&knob, "1\n").unwrap();
        let ReconcilerLoop { controllers, core, .. } = bench.reconciler.as_mut().unwrap();
        let drift = core.enforcer().drift(&core.store.state.applied, &"/hog".parse().unwrap());
        assert_eq!(drift.unwrap(), [], "the knob is not written again");
        controllers.restores.tick(core, bench.now);
        assert_eq!(controllers.restores.pending(), []);
        assert_eq!(bench.mems("hog"), "1");
    }

    #[test]
    fn forgets_replaced_cgroup() {
        let mut bench = GuardBench::new(&["hog", "gone"]);
        for hog in ["hog", "gone"] {
            bench.check(true, [-10, 1000], &[(hog, 100)]);
            assert_eq!(bench.mems(hog), "0");
        }
        let root = bench.root();
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::rename(root.join("hog"), root.join("old")).unwrap();
        fixture::cgroup(&root.join("hog"), &bench.host.machine.lock().unwrap());
        bench.check(true, [-10, 1000], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
        let steered: Vec<&str> = bench.state().steered().keys().map(CgroupPath::as_str).collect();
        assert_eq!(steered, ["/hog"]);
        bench.check(false, [500, 1000], &[]);
        assert_eq!(bench.mems("hog"), "");
    }

    #[test]
    fn disabled_guard_restores_nodes() {
        for mode in [GuardMode::Off, GuardMode::Report] {
            let mut bench = GuardBench::new(&["hog"]);
            bench.check(true, [-10, 1000], &[("hog", 100)]);
            assert_eq!(bench.mems("hog"), "0");
            bench.config.guard = mode;
            bench.restart();
            assert_eq!(bench.mems("hog"), "", "{mode:?}");
            bench.check(true, [-10, 1000], &[("hog", 100)]);
            assert_eq!(bench.mems("hog"), "", "{mode:?}");
        }
    }

    #[test]
    fn guarantee_ends_steering() {
        let mut bench = GuardBench::new(&["hog", "above", "above/below"]);
        for hog in ["hog", "above"] {
            bench.check(true, [-10, 1000], &[(hog, 100)]);
            assert_eq!(bench.mems(hog), "0");
        }
        for (name, path) in [("hog", "/hog"), ("below", "/above/below")] {
            guarantee(&mut bench, name, path);
        }
        assert_eq!(bench.mems("above"), "");
        assert!(bench.state().steered().is_empty());
        bench.check(false, [500, 1000], &[]);
        assert!(!bench.mems("hog").is_empty(), "the guarantee keeps its nodes");
    }
}

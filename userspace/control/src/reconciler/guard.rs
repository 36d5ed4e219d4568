//! The headroom guard's hand (`guard: act` or `evict`): where a node may soon not have what is promised on it, workloads without a
//! guarantee are kept off it.
//!
//! Problem: see [`HeadroomSource`](numaward_model::port::HeadroomSource), which looks. Page cache counts as available: the
//! kernel drops it when somebody needs memory. What is in the way is memory that cannot be dropped: anonymous memory, tmpfs,
//! dirty or locked pages. Page cache is dropped early only where the configuration asks for that ([`reclaim`]).
//!
//! Algorithm: while a node is short, every few seconds the workload without a guarantee that has most there is steered off
//! it, unless the configuration exempts it, its other nodes have no room for what it has or not the huge pages that it has reserved,
//! or a memory policy of it names nodes. When the node is no longer low, which takes a while, all are given back what they had.
//!
//! With `evict`, pods are named where that does not help ([`crowded`]).
//!
//! Invariants: nobody with a guarantee is touched, nor what is above or below one, nor another container of its pod. This
//! thread reads no figures: it takes those that the guard saw last. Memory policies and reserved huge pages are read by a thread of
//! their own, of one workload after the other.

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
use super::restores::{FIRST_RETRY, LONGEST_RETRY};
use crate::{
    core::Core,
    page_worker::LEAST,
    policy_worker::{Finding, Policies},
};

/// How long what was done for a node has to show, before more is.
const SETTLE: Duration = Duration::from_secs(3);

/// What could be done for a node.
#[derive(Debug, PartialEq, Eq)]
enum Relief {
    /// A workload is steered off it.
    Steered,
    /// The memory policies of a workload are being read.
    Reading,
    /// No workload can be steered off it, but perhaps one of which the daemon may not read what that takes.
    Unknown,
    /// No workload can be steered off it.
    Stuck,
}

/// Why a workload is not steered off a node.
#[derive(Debug)]
struct Obstacle {
    reason: String,
    /// Whether it is that the daemon may not read the workload's processes.
    is_denied: bool,
}

impl From<String> for Obstacle {
    fn from(reason: String) -> Self {
        Self { reason, is_denied: false }
    }
}

/// Steers workloads.
#[derive(Debug)]
pub(super) struct Guard {
    /// The look that was acted upon last.
    look: u64,
    /// When something was last done for a node.
    acted: BTreeMap<NodeId, Instant>,
    /// Who cannot be steered off a node, and was reported: as long as the node is low.
    refused: BTreeSet<(NodeId, CgroupPath)>,
    /// Nodes that were low since the daemon started.
    were_low: NodeSet,
    /// Since when the other nodes that workloads are kept off have had enough. An earlier run found them low.
    enough_since: BTreeMap<NodeId, Instant>,
    /// When those are tried again that could not be given back nodes.
    retries: BTreeMap<CgroupPath, Retry>,
    /// Memory policies of workloads, as long as a node is low.
    policies: Policies,
    crowding: Crowding,
    reclaim: Reclaim,
}

impl Guard {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            look: 0,
            acted: BTreeMap::new(),
            refused: BTreeSet::new(),
            were_low: NodeSet::new(),
            enough_since: BTreeMap::new(),
            retries: BTreeMap::new(),
            policies: Policies::new("policies", stop.clone()),
            crowding: Crowding::default(),
            reclaim: Reclaim::new(stop),
        }
    }

    /// What is shown of nodes where pods may be evicted.
    pub(super) fn crowded(&self) -> LatestCrowdedNodes {
        self.crowding.shown.clone()
    }

    pub(super) fn turn(&mut self, core: &mut Core, now: Instant) {
        if !core.config.guard.acts() || core.mode() != EnforcementMode::On {
            // What an earlier run did.
            self.give_back(core, now, |_, _| NodeSet::new());
            return;
        }
        let seen = core.ports.headroom.headroom();
        // Before the first look nothing is known: who is steered stays so.
        if !self.policies.take() && seen.look == self.look {
            return;
        }
        self.look = seen.look;
        let low: NodeSet = seen.nodes.iter().filter(|of| of.is_low).map(|of| of.node).collect();
        self.acted.retain(|node, _| low.contains(*node));
        self.refused.retain(|(node, _)| low.contains(*node));
        if low.is_empty() {
            self.policies.known.clear();
        }
        self.policies.known.retain(|path, (id, _)| is_there(core, path, *id));
        self.were_low.extend(low.iter());
        let steered: BTreeSet<NodeId> = core.store.state.steered().values().flat_map(NodeSet::iter).collect();
        // In the first looks after a start it is not known what is promised.
        let is_promised = |account: &NodeAccount| account.kinds.values().any(|kind| kind.guaranteed.0 > 0);
        let promised = core.store.state.ledger.nodes().iter().filter(|(_, account)| is_promised(account));
        let promised: NodeSet = promised.map(|(node, _)| *node).collect();
        let keep: NodeSet = steered
            .into_iter()
            .filter(|node| match seen.node(*node) {
                Some(of) => !self.is_over(of, now),
                None => promised.contains(*node),
            })
            .collect();
        let promised_pods = pods_with_promise(core);
        let is_of_them = |path: &CgroupPath| pod_of(path).is_some_and(|uid| promised_pods.contains(&uid));
        self.give_back(core, now, |path, off| if is_of_them(path) { NodeSet::new() } else { off & &keep });
        core.forget_gone();
        self.reclaim.turn(core, &seen, now);
        let mut stuck = NodeSet::new();
        let mut spare = seen.spare.clone();
        for of in seen.nodes.iter().filter(|of| of.is_low && of.is_short()) {
            let is_due = self.acted.get(&of.node).is_none_or(|acted| now.duration_since(*acted) >= SETTLE);
            if !is_due {
                continue;
            }
            match self.relieve(core, &seen.others, &mut spare, of) {
                Relief::Steered => drop(self.acted.insert(of.node, now)),
                Relief::Reading | Relief::Unknown => {}
                Relief::Stuck => stuck.extend([of.node]),
            }
        }
        if core.config.guard == GuardMode::Evict {
            self.crowding.follow(core, &seen, &stuck, now);
        }
        core.metrics.steered(core.store.state.steered().len());
    }

    /// Whether a node that workloads are kept off is no longer low. Of one that an earlier run found low this run judges
    /// as the one that looks does: there has to be enough for a while.
    fn is_over(&mut self, of: &NodeHeadroom, now: Instant) -> bool {
        if self.were_low.contains(of.node) {
            return !of.is_low;
        }
        if !of.has_recovered() {
            self.enough_since.remove(&of.node);
            return false;
        }
        now.duration_since(*self.enough_since.entry(of.node).or_insert(now)) >= RECOVERY_TIME
    }

    /// Steers one workload off a node.
    fn relieve(
        &mut self,
        core: &mut Core,
        others: &[UnguaranteedWorkload],
        spare: &mut BTreeMap<NodeId, Bytes>,
        of: &NodeHeadroom,
    ) -> Relief {
        let (node, pods) = (of.node, pods_with_promise(core));
        let mut others: Vec<&UnguaranteedWorkload> =
            others.iter().filter(|other| other.on(node) >= LEAST).collect();
        others.sort_by_key(|other| (std::cmp::Reverse(other.on(node)), other.cgroup.clone()));
        let mut is_unknown = false;
        for other in others {
            let is_off = core.store.state.steered().get(&other.cgroup).is_some_and(|off| off.contains(node));
            if is_off || !may_be_steered(core, &pods, other) {
                continue;
            }
            match self.steer_off(core, spare, other, node) {
                Ok(None) => return Relief::Reading,
                Ok(Some(left)) => {
                    let message = format!(
                        "{} is kept off node {node}, which may soon not have what is promised on it; it may use nodes \
                         {left}.",
                        other.cgroup
                    );
                    report(core, &other.cgroup, node, Severity::Warning, message);
                    return Relief::Steered;
                }
                Err(Obstacle { reason, is_denied }) => {
                    is_unknown |= is_denied;
                    if self.refused.insert((node, other.cgroup.clone())) {
                        let message = format!("{} cannot be kept off node {node}: {reason}.", other.cgroup);
                        report(core, &other.cgroup, node, Severity::Warning, message);
                    }
                }
            }
        }
        if is_unknown { Relief::Unknown } else { Relief::Stuck }
    }

    /// Steers a workload off one more node; the nodes that are left to it, or why not. What it has there comes to them, of what they
    /// have to spare. `None` while its memory policies are read.
    fn steer_off(
        &mut self,
        core: &mut Core,
        spare: &mut BTreeMap<NodeId, Bytes>,
        other: &UnguaranteedWorkload,
        node: NodeId,
    ) -> Result<Option<NodeSet>, Obstacle> {
        let mut off = core.store.state.steered().get(&other.cgroup).cloned().unwrap_or_default();
        off.extend([node]);
        let allowed = core.nodes_without_steering(&other.cgroup)?;
        if !allowed.contains(node) {
            return Err(format!("it may use nodes {allowed} only, and what it has there stays").into());
        }
        let left = &allowed - &off;
        if left.is_empty() {
            return Err(format!("it may use nodes {allowed}, and no others").into());
        }
        let has = other.on(node);
        let room =
            left.iter().filter_map(|node| spare.get(&node)).fold(0, |sum: u64, of| sum.saturating_add(of.0));
        if room < has.0 {
            let room = Bytes(room);
            return Err(format!("it has {has} there, and nodes {left} have room for {room}").into());
        }
        let Some(finding) = self.policies.of(core, &other.cgroup, other.id) else { return Ok(None) };
        let Finding { policies, untouched, is_denied } = finding;
        policies.map_err(|reason| Obstacle { reason, is_denied })?;
        core.check_untouched_huge_pages(untouched, &left).map_err(|shortage| shortage.to_string())?;
        core.keep_off(&other.cgroup, &off).map_err(|error| error.to_string())?;
        // Which of them gets how much is not known.
        for (_, spare) in spare.iter_mut().filter(|(node, _)| left.contains(**node)) {
            spare.0 = spare.0.saturating_sub(has.0);
        }
        Ok(Some(left))
    }

    /// Lets those that are steered off other nodes than `still` says have them back.
    fn give_back(&mut self, core: &mut Core, now: Instant, still: impl Fn(&CgroupPath, &NodeSet) -> NodeSet) {
        self.retries.retain(|path, _| core.store.state.steered().contains_key(path));
        let steered = core.store.state.steered().iter();
        let changed: Vec<(CgroupPath, NodeSet, NodeSet)> = steered
            .map(|(path, off)| (path.clone(), off.clone(), still(path, off)))
            .filter(|(_, off, still)| off != still)
            .collect();
        for (path, off, still) in changed {
            if self.retries.get(&path).is_some_and(|retry| !retry.is_due(now)) {
                continue;
            }
            let back = &off - &still;
            match core.keep_off(&path, &still) {
                Ok(()) => {
                    let message = format!("{path} may use nodes {back} again.");
                    report(core, &path, back.first().unwrap_or(NodeId(0)), Severity::Info, message);
                }
                Err(error) => {
                    tracing::error!(cgroup = %path, %error, "cannot be given back yet the nodes that it was kept off");
                    let retry = self.retries.entry(path);
                    retry.or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY)).postpone(now);
                }
            }
            core.metrics.steered(core.store.state.steered().len());
        }
    }
}

/// The UID of the pod whose container this cgroup is.
fn pod_of(cgroup: &CgroupPath) -> Option<String> {
    classify(cgroup, |_| false).container?.pod_uid
}

/// The pods to which, or to a container of which, something is promised, by UID.
fn pods_with_promise(core: &Core) -> BTreeSet<String> {
    let state = &core.store.state;
    let held = state.guarantees.values().filter_map(|held| pod_of(&held.cgroup));
    held.chain(state.pods.values().map(|admitted| admitted.pod.uid.clone())).collect()
}

/// Whether the configuration lets this one be steered, nothing is promised to it or to one of these pods whose container it is,
/// and it is still what was seen.
fn may_be_steered(core: &Core, promised_pods: &BTreeSet<String>, other: &UnguaranteedWorkload) -> bool {
    let is_exempt = core.config.guard_exempt.iter().any(|pattern| pattern.matches(&other.cgroup));
    let is_promised = core.store.state.has_guarantee_around(&other.cgroup)
        || pod_of(&other.cgroup).is_some_and(|uid| promised_pods.contains(&uid));
    !is_exempt && !is_promised && is_there(core, &other.cgroup, other.id)
}

/// Whether a cgroup is still the one that was seen.
fn is_there(core: &Core, path: &CgroupPath, id: CgroupId) -> bool {
    matches!(core.hierarchy.id_of(path), Ok(Some(now)) if now == id)
}

fn report(core: &Core, cgroup: &CgroupPath, node: NodeId, severity: Severity, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::Steered, message).severity(severity).node(node));
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use numaward_api as api;
    use numaward_config::{Config, enforcement::CgroupPattern};
    use numaward_guarantee::{pod::AdmittedPod, request::Request};
    use numaward_model::{headroom::Headroom, pod::PodName};
    use numaward_topology::{HugepagePool, HugepageSize};

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, controllers::Controllers, tests::reconciler_loop},
        testing::{self as fixture, Host},
    };

    /// A host with these cgroups, of which `/kept` is promised memory on a node.
    pub(super) struct Bench {
        dir: tempfile::TempDir,
        host: Arc<Host>,
        config: Config,
        reconciler: Option<ReconcilerLoop>,
        look: u64,
        now: Instant,
    }

    impl Bench {
        pub(super) fn new(cgroups: &[&str]) -> Self {
            Self::with(cgroups, GuardMode::Act, "/exempt")
        }

        pub(super) fn evicting(cgroups: &[&str], exempt: &str) -> Self {
            Self::with(cgroups, GuardMode::Evict, exempt)
        }

        fn with(cgroups: &[&str], guard: GuardMode, exempt: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Host::small()));
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

        /// Node 1 has this room above its margin, in MiB, and so has node 0; these others have so much on node 1.
        pub(super) fn see(&mut self, low: bool, [room, elsewhere]: [i64; 2], others: &[(&str, u64)]) {
            let node = |node: u32, is_low: bool, room: i64| NodeHeadroom {
                node: NodeId(node),
                obtainable: Bytes(((1 << 30) + (room << 20)).cast_unsigned()),
                free: Bytes(0),
                unused: Bytes::mib(1024 - 64),
                margin: Bytes::mib(64),
                is_low,
                is_tight: false,
            };
            let other = |(path, mib): &(&str, u64)| UnguaranteedWorkload {
                resident: vec![(NodeId(1), Bytes::mib(*mib))],
                ..self.other(path)
            };
            let others = others.iter().map(other).collect();
            self.show(vec![node(0, false, elsewhere), node(1, low, room)], others);
        }

        /// A workload that has nothing.
        pub(super) fn other(&self, path: &str) -> UnguaranteedWorkload {
            UnguaranteedWorkload {
                cgroup: format!("/{path}").parse().unwrap(),
                id: id_of(&self.root().join(path)),
                resident: Vec::new(),
                cache: Vec::new(),
            }
        }

        pub(super) fn show(&mut self, nodes: Vec<NodeHeadroom>, others: Vec<UnguaranteedWorkload>) {
            self.look += 1;
            let spare = nodes.iter().map(|of| (of.node, of.spare())).collect();
            *self.host.headroom.lock().unwrap() =
                Arc::new(Headroom { look: self.look, nodes, spare, others, ..Headroom::default() });
            self.now += SETTLE;
            self.turn();
        }

        fn turn(&mut self) {
            let ReconcilerLoop { controllers: Controllers { guard, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            guard.turn(core, self.now);
            while guard.policies.is_busy() {
                std::thread::sleep(Duration::from_millis(1));
                guard.turn(core, self.now);
            }
        }

        /// A process of a cgroup, with these files in `/proc`.
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

        /// The pool of each node: so many pages of 2 MiB are free.
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
                // Most kernels have pools of other sizes, too, and no pages in them.
                let empty = node.join("hugepages/hugepages-1048576kB");
                fs::create_dir_all(&empty).unwrap();
                fs::write(empty.join("nr_hugepages"), "0\n").unwrap();
            }
        }

        /// Ends the daemon and starts it anew.
        fn restart(&mut self) {
            drop(self.reconciler.take());
            *self.host.headroom.lock().unwrap() = Arc::default();
            self.look = 0;
            self.reconciler = Some(reconciler_loop(&self.config, &self.root(), &self.host));
            self.turn();
        }

        pub(super) fn core_and_guard(&mut self) -> (&Core, &mut Guard) {
            let ReconcilerLoop { controllers, core, .. } = self.reconciler.as_mut().unwrap();
            (core, &mut controllers.guard)
        }

        pub(super) fn guard(&self) -> &Guard {
            &self.reconciler.as_ref().unwrap().controllers.guard
        }

        /// A pod is promised what its containers share.
        pub(super) fn admit_pod(&mut self, uid: &str) {
            let pod = PodName { uid: uid.to_owned(), ..PodName::default() };
            let explanation = api::Explanation::default();
            let admitted = AdmittedPod { pod, sandbox: String::new(), container: None, explanation };
            let core = &mut self.reconciler.as_mut().unwrap().core;
            core.store.state.pods.insert(uid.to_owned(), admitted);
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

    /// The cgroup of a container, in this cgroup of a pod.
    pub(super) fn pod_container(pod: &str, first: char) -> String {
        format!("kubepods/{pod}/{first}123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")
    }

    pub(super) fn guarantee(bench: &mut Bench, name: &str, path: &str) {
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(1)),
            ..api::AllocationRequest::new(name, api::Target::Cgroup(path.to_owned()), "64Mi")
        });
        assert!(bench.reconciler.as_mut().unwrap().admit(&request.unwrap(), false).is_ok(), "{name}");
    }

    #[test]
    fn the_largest_is_kept_off_first_and_gets_back_what_it_had() {
        let mut bench = Bench::new(&["small", "large", "exempt", "bound"]);
        fs::write(bench.root().join("bound/cpuset.mems"), "1\n").unwrap();
        let others = [("small", 50), ("exempt", 500), ("large", 200), ("bound", 400), ("kept", 900)];
        bench.see(true, [-10, 1000], &others);
        assert_eq!(["small", "large", "exempt", "bound"].map(|of| bench.mems(of)), ["", "0", "", "1"]);
        assert!(
            bench.reported().contains("/bound cannot be kept off node 1: it may use nodes 1, and no others")
        );
        assert!(bench.reported().contains("/large is kept off node 1"));
        bench.turn();
        assert_eq!(bench.mems("small"), "", "the same look");
        bench.see(true, [10, 1000], &others);
        assert_eq!(bench.mems("small"), "", "low, but not short");
        bench.see(true, [-1, 1000], &others);
        assert_eq!(bench.mems("small"), "0");
        assert_eq!(bench.reported().matches("/bound cannot").count(), 1, "said once");

        // A restart goes on with it.
        bench.restart();
        bench.show(Vec::new(), Vec::new());
        assert_eq!(
            ["small", "large"].map(|of| bench.mems(of)),
            ["0", "0"],
            "it does not know what is promised yet"
        );
        bench.see(false, [63, 1000], &[]);
        assert_eq!(["small", "large"].map(|of| bench.mems(of)), ["0", "0"], "not low, as it was, but tight");
        for _ in 0..RECOVERY_TIME.as_secs() / SETTLE.as_secs() {
            bench.see(false, [500, 1000], &[]);
            assert_eq!(["small", "large"].map(|of| bench.mems(of)), ["0", "0"], "enough, but not for long");
        }
        bench.see(false, [500, 1000], &[]);
        assert_eq!(["small", "large", "bound"].map(|of| bench.mems(of)), ["", "", "1"]);
        assert!(bench.state().steered().is_empty());
        assert!(bench.state().applied.held().all(|(path, _)| path.as_str() == "/kept"));
        assert!(bench.reported().contains("/large may use nodes 1 again"));
    }

    #[test]
    fn nobody_is_kept_off_whose_pod_has_a_guarantee() {
        let (promised, bare) = (pod_container("podp", 'a'), pod_container("podp", 'b'));
        let mut bench = Bench::new(&["kubepods", "kubepods/podp", &promised, &bare, "hog"]);
        bench.see(true, [-10, 1000], &[(&bare, 300), ("hog", 100)]);
        assert_eq!(bench.mems(&bare), "0");
        // It has a guarantee from now on.
        guarantee(&mut bench, "p", &format!("/{promised}"));
        for _ in 0..2 {
            bench.see(true, [-10, 1000], &[(&bare, 300), ("hog", 100)]);
            assert_eq!((bench.mems(&bare), bench.mems("hog")), (String::new(), "0".to_owned()));
        }
    }

    #[test]
    fn workload_with_a_policy_that_names_nodes_is_not_steered() {
        let mut bench = Bench::new(&["spread", "hog"]);
        bench.process("spread", 77, &[("numa_maps", "55d0 default\n7f00 interleave:0-1 anon=9 N0=5 N1=4\n")]);
        bench.see(true, [-10, 1000], &[("spread", 200), ("hog", 100)]);
        assert_eq!(["spread", "hog"].map(|of| bench.mems(of)), ["", "0"]);
        let reason = "/spread cannot be kept off node 1: process 77 has the memory policy interleave:0-1";
        assert!(bench.reported().contains(reason), "{}", bench.reported());
        bench.process("spread", 77, &[]);
        bench.see(true, [-10, 1000], &[("spread", 200)]);
        assert_eq!(bench.mems("spread"), "", "not read again while the node is low");
        bench.see(false, [500, 1000], &[]);
        bench.see(true, [-10, 1000], &[("spread", 200)]);
        assert_eq!(bench.mems("spread"), "0");
    }

    #[test]
    fn workload_whose_policies_cannot_be_read_is_not_steered() {
        let mut bench = Bench::new(&["hidden"]);
        fs::write(bench.root().join("hidden/cgroup.procs"), "0\n").unwrap();
        bench.see(true, [-10, 1000], &[("hidden", 200)]);
        assert_eq!(bench.mems("hidden"), "");
        assert!(bench.reported().contains("memory policies cannot be read"), "{}", bench.reported());
    }

    #[test]
    fn workload_with_reserved_huge_pages_is_not_steered_onto_nodes_without_free_ones() {
        let mut bench = Bench::new(&["db"]);
        // 16 MiB, of which 4 MiB are touched.
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 4096 kB\n")]);
        bench.huge_pages([5, 60]);
        bench.see(true, [-10, 1000], &[("db", 200)]);
        assert_eq!(bench.mems("db"), "");
        let reason = "12Mi of huge pages that they have not touched yet, and nodes 0 have 10Mi free";
        assert!(bench.reported().contains(reason), "{}", bench.reported());
        bench.huge_pages([6, 60]);
        bench.see(true, [-10, 1000], &[("db", 200)]);
        assert_eq!(bench.mems("db"), "0");
    }

    #[test]
    fn guarantee_on_nodes_without_reserved_huge_pages_is_refused() {
        let mut bench = Bench::new(&["db"]);
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        bench.process("db", 77, &[("maps", maps), ("status", "HugetlbPages:\t 0 kB\n")]);
        let asked = |bench: &mut Bench| {
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
        let error = asked(&mut bench).unwrap_err();
        assert!(
            error.contains("16Mi of huge pages that they have not touched yet, and nodes 0 have 14Mi"),
            "{error}"
        );
        assert!(bench.state().guarantees.keys().eq(["kept"]));
        bench.huge_pages([8, 60]);
        asked(&mut bench).unwrap();
        assert_eq!(bench.mems("db"), "0");
    }

    #[test]
    fn nodes_that_are_not_there_are_no_place_to_go() {
        let mut bench = Bench::new(&["wide", "narrow"]);
        // As a cgroup has it that was given back all nodes while processes ran in it.
        for (cgroup, nodes) in [("wide", "0-31"), ("narrow", "1-31")] {
            fs::write(bench.root().join(cgroup).join("cpuset.mems"), nodes).unwrap();
            bench.see(true, [-10, 1000], &[(cgroup, 100)]);
        }
        assert_eq!(["wide", "narrow"].map(|of| bench.mems(of)), ["0", "1-31"]);
        bench.see(false, [500, 1000], &[]);
        assert_eq!(bench.mems("wide"), "0-31");
    }

    #[test]
    fn the_daemons_own_pod_is_left_alone() {
        let (own, beside, other) =
            (pod_container("podp", 'a'), pod_container("podp", 'b'), pod_container("podq", 'c'));
        let mut bench = Bench::new(&["kubepods", "kubepods/podp", &own, &beside, "kubepods/podq", &other]);
        fs::write(bench.root().join(&own).join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        bench.restart();
        bench.see(true, [-10, 1000], &[(&own, 300), (&beside, 200), (&other, 100)]);
        assert_eq!([&own, &beside, &other].map(|of| bench.mems(of)), ["", "", "0"]);
    }

    #[test]
    fn nobody_is_kept_off_where_the_other_nodes_have_no_room() {
        let mut bench = Bench::new(&["hog"]);
        bench.see(true, [-10, 99], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.reported().contains("nodes 0 have room for 99Mi"), "{}", bench.reported());
        bench.see(true, [-10, 100], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
    }

    #[test]
    fn no_workload_is_steered_onto_a_node_whose_room_is_unknown() {
        let mut bench = Bench::new(&["hog"]);
        let hog = UnguaranteedWorkload { resident: vec![(NodeId(1), Bytes::mib(100))], ..bench.other("hog") };
        let low = NodeHeadroom {
            node: NodeId(1),
            obtainable: Bytes::gib(1),
            free: Bytes(0),
            unused: Bytes::gib(1),
            margin: Bytes::mib(64),
            is_low: true,
            is_tight: false,
        };
        bench.show(vec![low], vec![hog]);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.reported().contains("nodes 0 have room for 0"), "{}", bench.reported());
    }

    #[test]
    fn room_that_one_workload_takes_is_not_there_for_the_next() {
        let mut bench = Bench::new(&["a", "b"]);
        let others = ["a", "b"].map(|name| UnguaranteedWorkload {
            resident: vec![(NodeId(1), Bytes::mib(100))],
            ..bench.other(name)
        });
        let ReconcilerLoop { controllers: Controllers { guard, .. }, core, .. } =
            bench.reconciler.as_mut().unwrap();
        let mut spare = BTreeMap::from([(NodeId(0), Bytes::mib(150))]);
        let steered = others.map(|other| {
            loop {
                match guard.steer_off(core, &mut spare, &other, NodeId(1)) {
                    Ok(None) => drop(guard.policies.take()),
                    done => return done.map_err(|obstacle| obstacle.reason),
                }
            }
        });
        let refused = "it has 100Mi there, and nodes 0 have room for 50Mi".to_owned();
        assert_eq!(steered, [Ok(Some("0".parse().unwrap())), Err(refused)]);
    }

    #[test]
    fn next_workload_is_not_steered_before_the_last_step_shows() {
        let mut bench = Bench::new(&["a", "b"]);
        let others = [("a", 200), ("b", 100)];
        bench.see(true, [-10, 1000], &others);
        let mems = |bench: &Bench| ["a", "b"].map(|of| bench.mems(of));
        assert_eq!(mems(&bench), ["0", ""]);
        // A look after half of that time.
        bench.now -= SETTLE / 2;
        bench.see(true, [-10, 1000], &others);
        assert_eq!(mems(&bench), ["0", ""]);
        bench.see(true, [-10, 1000], &others);
        assert_eq!(mems(&bench), ["0", "0"]);
    }

    #[test]
    fn what_cannot_be_given_back_is_listed_and_tried_again() {
        let mut bench = Bench::new(&["hog"]);
        bench.see(true, [-10, 1000], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
        let knob = bench.root().join("hog/cpuset.mems");
        let refused = fixture::refuse(&knob);
        bench.see(false, [500, 1000], &[]);
        assert!(bench.state().steered().is_empty() && bench.mems("hog") == "0");
        let now = bench.now;
        let turn = |bench: &mut Bench, seconds: u64| {
            let ReconcilerLoop { controllers, core, .. } = bench.reconciler.as_mut().unwrap();
            controllers.restores.tick(core, now + Duration::from_secs(seconds));
            controllers.restores.shown()
        };
        let [pending] = &turn(&mut bench, 0)[..] else { panic!() };
        assert_eq!((pending.cgroup.as_str(), pending.knob.as_str()), ("/hog", "cpuset.mems"));
        assert_eq!((pending.written.as_str(), pending.found.as_str()), ("0", ""));
        assert!(pending.reason.is_some());
        // A restart tries it, too.
        bench.restart();
        assert_eq!(turn(&mut bench, 0).len(), 1);

        drop(refused);
        fs::remove_file(&knob).unwrap();
        fs::write(&knob, "0\n").unwrap();
        assert_eq!(turn(&mut bench, 1).len(), 1, "not at once");
        assert_eq!(turn(&mut bench, 6), []);
        assert_eq!(bench.mems("hog"), "");
        assert!(bench.state().applied.held().all(|(path, _)| path.as_str() == "/kept"));
    }

    #[test]
    fn what_another_program_has_set_meanwhile_is_left() {
        let mut bench = Bench::new(&["hog"]);
        bench.see(true, [-10, 1000], &[("hog", 100)]);
        let knob = bench.root().join("hog/cpuset.mems");
        let refused = fixture::refuse(&knob);
        bench.see(false, [500, 1000], &[]);
        drop(refused);
        fs::remove_file(&knob).unwrap();
        fs::write(&knob, "1\n").unwrap();
        let ReconcilerLoop { controllers, core, .. } = bench.reconciler.as_mut().unwrap();
        let drift = core.enforcer().drift(&core.store.state.applied, &"/hog".parse().unwrap());
        assert_eq!(drift.unwrap(), [], "it is not written again");
        controllers.restores.tick(core, bench.now);
        assert_eq!(controllers.restores.shown(), []);
        assert_eq!(bench.mems("hog"), "1");
    }

    #[test]
    fn a_new_cgroup_of_the_same_path_is_not_taken_for_the_old_one() {
        let mut bench = Bench::new(&["hog", "gone"]);
        for hog in ["hog", "gone"] {
            bench.see(true, [-10, 1000], &[(hog, 100)]);
            assert_eq!(bench.mems(hog), "0");
        }
        let root = bench.root();
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::rename(root.join("hog"), root.join("old")).unwrap();
        fixture::cgroup(&root.join("hog"), &bench.host.machine.lock().unwrap());
        bench.see(true, [-10, 1000], &[("hog", 100)]);
        assert_eq!(bench.mems("hog"), "0");
        let steered: Vec<&str> = bench.state().steered().keys().map(CgroupPath::as_str).collect();
        assert_eq!(steered, ["/hog"]);
        bench.see(false, [500, 1000], &[]);
        assert_eq!(bench.mems("hog"), "");
    }

    #[test]
    fn a_guard_that_no_longer_acts_gives_back_what_it_took() {
        for mode in [GuardMode::Off, GuardMode::Report] {
            let mut bench = Bench::new(&["hog"]);
            bench.see(true, [-10, 1000], &[("hog", 100)]);
            assert_eq!(bench.mems("hog"), "0");
            bench.config.guard = mode;
            bench.restart();
            assert_eq!(bench.mems("hog"), "", "{mode:?}");
            bench.see(true, [-10, 1000], &[("hog", 100)]);
            assert_eq!(bench.mems("hog"), "", "{mode:?}");
        }
    }

    #[test]
    fn who_gets_a_guarantee_is_no_longer_kept_off() {
        let mut bench = Bench::new(&["hog", "above", "above/below"]);
        for hog in ["hog", "above"] {
            bench.see(true, [-10, 1000], &[(hog, 100)]);
            assert_eq!(bench.mems(hog), "0");
        }
        for (name, path) in [("hog", "/hog"), ("below", "/above/below")] {
            guarantee(&mut bench, name, path);
        }
        assert_eq!(bench.mems("above"), "");
        assert!(bench.state().steered().is_empty());
        bench.see(false, [500, 1000], &[]);
        assert!(!bench.mems("hog").is_empty(), "it holds what it was promised");
    }
}

//! Rebalances step by step, on a tree of plain files: two nodes with 3.8 GiB and 3 or 4 CPUs for guarantees.

mod automatic;
mod pods;

use std::{collections::BTreeMap, fs, path::PathBuf};

use numaward_config::{
    Config,
    enforcement::{CgroupPattern, DeclaredGuarantee, Size},
    policy::StrategyKind,
    rebalance::RebalanceMode,
};
use numaward_engine::{HostConditions, PodId, RebalanceLimits, in_flight::RESERVE_OWNER};
use numaward_guarantee::{
    command::{Command, PodCommand},
    pod::{ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest},
    state::State,
};
use numaward_model::{
    Settings,
    headroom::Headroom,
    pod::{GuaranteeSource, POD_SHARE},
    port::ObservedHost as _,
};
use numaward_topology::{HugepagePool, HugepageSize, NodeId, ZoneKind};
use tempfile::TempDir;

use super::{RebalanceCommand, *};
use crate::{
    core::{RuntimeCommand, pods::commands, release},
    reconciler::{ReconcilerLoop, tests::reconciler_loop},
    testing::{self as fixture, TestHost},
};

struct RebalanceBench {
    dir: TempDir,
    host: Arc<TestHost>,
    config: Config,
    reconciler: ReconcilerLoop,
}

impl RebalanceBench {
    /// `a` and `b` fill node 0, and `c` node 1, so that each node has 1.3 GiB left.
    fn new(mode: RebalanceMode) -> Self {
        let mut bench = Self::empty(mode);
        for (name, memory) in [("a", "1Gi"), ("b", "1536Mi"), ("c", "2560Mi")] {
            bench.admit(name, memory).unwrap();
        }
        let expected = [("a", "0"), ("b", "0"), ("c", "1")];
        assert_eq!(bench.nodes(), expected.map(|(name, nodes)| (name.to_owned(), nodes.to_owned())));
        bench
    }

    fn empty(mode: RebalanceMode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("cgroup"), Arc::new(TestHost::small()));
        for cgroup in ["", "a", "b", "c", "d", "new", "kubepods", "kubepods/pod", "kubepods/pod/c"] {
            fixture::cgroup(&root.join(cgroup), &host.machine());
        }
        let mut config = Config { strategy: StrategyKind::Native, ..Config::default() };
        config.state_directory = dir.path().join("state");
        config.rebalance.mode = mode;
        let reconciler = reconciler_loop(&config, &root, &host);
        Self { dir, host, config, reconciler }
    }

    /// Executes a command of the container runtime.
    fn runtime(&mut self, command: PodCommand) {
        if let Some(reply) =
            commands::pod_command(&mut self.reconciler.core, RuntimeCommand { number: 0, command }, false)
        {
            reply();
        }
        self.reconciler.process_effects();
        while self.reconciler.make_room() {}
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("cgroup")
    }

    /// Kills the daemon and starts it again.
    fn restart(&mut self) {
        // Another reconciler replaces the old one first, which releases the lock of the ledger.
        let (none, mut other) = (self.dir.path().join("none"), self.config.clone());
        other.state_directory = none.join("state");
        fixture::cgroup(&none.join("cgroup"), &self.host.machine());
        self.reconciler = reconciler_loop(&other, &none.join("cgroup"), &self.host);
        self.reconciler = reconciler_loop(&self.config, &self.root(), &self.host);
    }

    fn admit(&mut self, name: &str, memory: &str) -> Result<AdmissionOutcome, AdmissionError> {
        self.reconciler.admit(&request(name, memory), false)
    }

    fn nodes(&self) -> Vec<(String, String)> {
        let ledger = &self.reconciler.core.store.state.ledger;
        ledger
            .allocations()
            .map(|(owner, _, held)| (owner.to_string(), held.memory_nodes().to_string()))
            .collect()
    }

    fn knobs(&self, cgroup: &str) -> [String; 2] {
        ["cpuset.cpus", "cpuset.mems"].map(|knob| fixture::line(&self.root().join(cgroup).join(knob)))
    }

    /// Starts containers of a pod with a guarantee.
    fn run_pod(&mut self, claim: &PodClaim, slice: GuaranteeSource, names: &[&str]) {
        let pod = PodId { namespace: "n".to_owned(), name: "p".to_owned(), uid: "uid".to_owned() };
        let (sandbox, terms) = ("sandbox".to_owned(), numaward_engine::Terms::default());
        let pod = PodPlacementRequest { pod, sandbox, asked: claim.clone(), terms, notes: Vec::new() };
        for name in names {
            let ask = ContainerPlacementRequest {
                pod: pod.clone(),
                id: format!("id-{name}"),
                name: (*name).to_owned(),
                cgroup: format!("/kubepods/pod/{name}").parse().unwrap(),
                slice,
                memory: MemoryClaim::default(),
                keeps_pod_quota: false,
                has: Settings::default(),
                claims: numaward_guarantee::pod::ClaimUses::default(),
                is_placed_by_other_program: false,
            };
            let id = ask.id.clone();
            let (answer, _created) = oneshot::channel();
            self.runtime(PodCommand::Create { ask: Box::new(ask), answer });
            let (answer, _bound) = oneshot::channel();
            self.runtime(PodCommand::Bind { id, ask: None, answer });
        }
    }

    /// Publishes the memory that is withheld from guarantees on each node, in MiB.
    fn withhold(&mut self, mib: [u64; 2]) {
        let nodes = [0, 1].map(|node| (NodeId(node), Bytes::mib(mib[node as usize]))).into();
        let withheld = [(ZoneKind::Memory, nodes)].into();
        let conditions = Arc::new(HostConditions { withheld, ..HostConditions::default() });
        *self.host.headroom.lock().unwrap() = Arc::new(Headroom { conditions, ..Headroom::default() });
        self.reconciler.run_maintenance();
        self.reconciler.process_effects();
    }

    /// Writes the resident memory of a cgroup on each node, in MiB.
    fn set_resident(&self, cgroup: &str, mib: [u64; 2]) {
        let [first, second] = mib.map(|mib| Bytes::mib(mib).0);
        let text = format!("anon N0={first} N1={second}\nfile N0=0 N1=0\n");
        fs::write(self.root().join(cgroup).join("memory.numa_stat"), text).unwrap();
    }

    /// Starts a rebalance for `new`, which is then admitted.
    fn start(&mut self) -> Result<api::Rebalance, AdmissionError> {
        self.start_for(request("new", "2Gi"), true)
    }

    fn start_for(&mut self, request: Request, admit: bool) -> Result<api::Rebalance, AdmissionError> {
        let asked = RebalanceCommand { request, limits: RebalanceLimits::default(), plan: None, admit };
        self.reconciler.rebalancing.start(&mut self.reconciler.core, asked)
    }

    fn cancel(&mut self) {
        let (answer, _result) = oneshot::channel();
        self.reconciler.command(Command::Cancel { answer });
    }

    /// Declares guarantees for cgroups, with their memory, and restarts the daemon.
    fn declare(&mut self, of: &[(&str, &str)]) {
        let declared = |(cgroup, memory): &(&str, &str)| DeclaredGuarantee {
            unit: None,
            cgroup: Some(CgroupPattern::new(&format!("/{cgroup}")).unwrap()),
            cpus: Some(api::Cpus::whole(1)),
            memory: Some(Size::new(memory.parse().unwrap()).unwrap()),
            memory_limit: None,
            hugepages: BTreeMap::new(),
            policy: None,
            partition: None,
            placement: api::Placement::default(),
        };
        self.config.guarantees = of.iter().map(declared).collect();
        self.restart();
    }

    fn status(&self) -> api::Rebalance {
        let status = self.reconciler.rebalancing.status();
        let status = status.read().clone();
        api::Rebalance::clone(&status.unwrap())
    }

    /// Executes steps until the condition holds.
    fn until(&mut self, holds: impl Fn(&api::Rebalance) -> bool) -> api::Rebalance {
        for _ in 0..1000 {
            if holds(&self.status()) {
                return self.status();
            }
            if !self.reconciler.rebalancing.is_due(&self.reconciler.core) {
                std::thread::sleep(Duration::from_millis(10));
            }
            self.reconciler.rebalance();
            self.reconciler.make_room();
            crate::reconciler::upkeep::maintain(&mut self.reconciler.core, Instant::now());
        }
        panic!("{:?}", self.status());
    }

    fn until_over(&mut self) -> api::Rebalance {
        self.until(|status| status.state.is_over())
    }

    /// Returns the nodes of all guarantees, and the state without its history of moves.
    fn guarantees(&self) -> (Vec<(String, String)>, State) {
        let state = &self.reconciler.core.store.state;
        let moving =
            numaward_guarantee::moving::MoveLog { running: state.moving.running.clone(), recent: Vec::new() };
        let mut state = state.clone();
        state.moving = moving;
        (self.nodes(), state)
    }

    fn steps(&self) -> Vec<String> {
        let happened = self.host.happened.lock().unwrap();
        let of = happened.iter().filter(|(_, report)| report.kind == EventKind::Rebalance);
        of.map(|(_, report)| report.details["step"].clone()).collect()
    }
}

fn request(name: &str, memory: &str) -> Request {
    let asked = api::AllocationRequest {
        name: name.to_owned(),
        target: api::Target::Cgroup(format!("/{name}")),
        cpus: Some(api::Cpus::whole(1)),
        memory: Some(memory.to_owned()),
        memory_limit: None,
        hugepages: BTreeMap::new(),
        policy: None,
        partition: None,
        placement: api::Placement::default(),
    };
    Request::new(&asked).unwrap()
}

fn is_moving(status: &api::Rebalance) -> bool {
    status.moves[0].state == Some(MoveState::Moving)
}

#[test]
fn executes_plan_and_admits_request() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    assert!(matches!(bench.admit("new", "2Gi"), Err(AdmissionError::Rejected(..))));
    let before = bench.guarantees();
    let plan = bench.reconciler.plan(&request("new", "2Gi"), &RebalanceLimits::default()).unwrap();
    let [of] = &plan.moves[..] else { panic!("{plan:?}") };
    assert_eq!((of.workload.as_str(), of.from_nodes.as_str(), of.to_nodes.as_str()), ("a", "0", "1"));
    assert_eq!((of.bytes, of.bytes_source), (1 << 30, api::BytesSource::Guaranteed));
    assert_eq!((plan.rate.source, of.pause_milliseconds), (api::RateSource::Assumed, 2000));
    assert_eq!(plan.allocation.nodes, "0");
    assert_eq!(bench.guarantees(), before);
    let other = bench.reconciler.plan(&request("other", "2Gi"), &RebalanceLimits::default()).unwrap();
    assert_eq!(other.id, plan.id, "the moves are the same");

    // The resident memory counts if it is known.
    let numa_stat = bench.root().join("a/memory.numa_stat");
    fs::write(&numa_stat, "anon N0=8388608 N1=4096\nfile N0=8192 N1=0\n").unwrap();
    let plan = bench.reconciler.plan(&request("new", "2Gi"), &RebalanceLimits::default()).unwrap();
    assert_eq!((plan.bytes, plan.moves[0].bytes_source), (8_396_800, api::BytesSource::Resident));
    fs::remove_file(&numa_stat).unwrap();

    let capped = RebalanceLimits { bytes: Bytes::mib(512), ..RebalanceLimits::default() };
    let none = bench.reconciler.plan(&request("new", "2Gi"), &capped).unwrap_err();
    assert!(none.to_string().contains("no moves within the limits"), "{none}");

    assert_eq!(bench.start().unwrap().id, plan.id);
    let running = bench.start().unwrap_err().to_string();
    assert!(running.contains("a rebalance is in progress"), "{running}");
    bench.until(is_moving);
    // The old and the new node are charged, and the probes know both.
    assert_eq!(
        bench.nodes(),
        [
            (RESERVE_OWNER.to_owned(), "0".to_owned()),
            ("a".to_owned(), "1".to_owned()),
            ("b".to_owned(), "0".to_owned()),
            ("c".to_owned(), "1".to_owned()),
        ]
    );
    let nodes = |bench: &RebalanceBench| {
        let assigned = bench.host.assigned.lock().unwrap();
        let a = assigned.workloads().iter().find(|of| of.cgroup.as_str() == "/a").unwrap().clone();
        a.nodes.to_string()
    };
    assert_eq!(nodes(&bench), "0-1");
    assert_eq!(bench.knobs("a")[1], "0", "stored before it is written");
    bench.until(|status| status.moves[0].state == Some(MoveState::Moved));
    assert_eq!((nodes(&bench), bench.knobs("a")[1].clone()), ("1".to_owned(), "1".to_owned()));
    // Another request does not get the room.
    let refused = bench.admit("d", "2Gi").unwrap_err();
    assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");
    let done = bench.until_over();
    assert_eq!((done.state, done.allocation.unwrap().nodes), (RebalanceState::Done, "0".to_owned()));
    let expected = [("a", "1"), ("b", "0"), ("c", "1"), ("new", "0")];
    assert_eq!(bench.nodes(), expected.map(|(name, nodes)| (name.to_owned(), nodes.to_owned())));
    assert_eq!(bench.knobs("new"), ["1".to_owned(), "0".to_owned()]);
    let ledger = &bench.reconciler.core.store.state.ledger;
    assert_eq!(bench.reconciler.core.policy.strategy.rebase(ledger), (ledger.clone(), Vec::new()));
    assert_eq!(bench.steps(), ["planned", "planned", "planned", "started", "moved", "done"]);
}

#[test]
fn partial_migration_is_rolled_back() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    let (before, knobs) = (bench.guarantees(), bench.knobs("a"));
    // The new node is full, so the pages stay on the old one.
    let text = "anon N0=1073741824 N1=0\nfile N0=0 N1=0\n";
    fs::write(bench.root().join("a/memory.numa_stat"), text).unwrap();
    bench.start().unwrap();
    let over = bench.until_over();
    assert_eq!(over.state, RebalanceState::Failed);
    let reason = over.reason.unwrap();
    assert!(reason.contains("1Gi of a could not be moved to nodes 1"), "{reason}");
    assert_eq!(over.moves[0].state, Some(MoveState::TakenBack));
    let (nodes, mut state) = bench.guarantees();
    // Threads may have kept the CPUs of the other node: they are reset later.
    assert!(!state.resets.is_empty());
    for name in ["/a", "/b", "/c"] {
        let path = name.parse().unwrap();
        let record = |state: &State| {
            let record = state.applied.get(&path).unwrap();
            numaward_enforce::Record { thread_masks: None, ..numaward_enforce::Record::clone(record) }
        };
        assert_eq!(record(&state), record(&before.1), "{name}");
    }
    state.resets = before.1.resets.clone();
    state.applied = before.1.applied.clone();
    assert_eq!(((nodes, state), bench.knobs("a")), (before, knobs));
    assert_eq!(bench.steps(), ["started", "taken_back", "failed"]);
}

#[test]
fn refused_write_is_rolled_back() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    let (before, knobs) = (bench.guarantees(), bench.knobs("a"));
    // The ancestors have lost node 1.
    for cgroup in ["", "a"] {
        fs::write(bench.root().join(cgroup).join("cpuset.mems.effective"), "0\n").unwrap();
    }
    bench.start().unwrap();
    let over = bench.until_over();
    assert_eq!(over.state, RebalanceState::Failed);
    assert!(over.reason.as_ref().unwrap().contains("cpuset.mems"), "{over:?}");
    assert_eq!((bench.guarantees(), bench.knobs("a")), (before, knobs));
}

#[test]
fn runtime_gets_moved_settings() {
    let mut bench = RebalanceBench::empty(RebalanceMode::Off);
    let (sender, mut updates) = tokio::sync::mpsc::unbounded_channel();
    bench.runtime(PodCommand::SendUpdates(sender));
    let mut claim = request("uid/c", "1Gi").engine;
    claim.containers[0].name = "c".into();
    bench.run_pod(&PodClaim::Container(claim), GuaranteeSource::Own, &["c"]);
    for (name, memory) in [("b", "1536Mi"), ("c", "2560Mi")] {
        bench.admit(name, memory).unwrap();
    }
    assert_eq!(bench.knobs("kubepods/pod/c")[1], "0");
    while updates.try_recv().is_ok() {}
    bench.start().unwrap();
    let over = bench.until_over();
    assert_eq!((over.state, over.moves[0].workload.as_str()), (RebalanceState::Done, "n/p/c"), "{over:?}");
    assert_eq!(bench.knobs("kubepods/pod/c")[1], "1");
    let updates: Vec<_> = std::iter::from_fn(|| updates.try_recv().ok()).flatten().collect();
    let update = updates.iter().find(|update| update.id == "id-c").unwrap();
    assert_eq!(update.settings.mems.as_ref().unwrap().to_string(), "1");
    assert_eq!(update.settings.cpus.as_ref().unwrap().to_string(), bench.knobs("kubepods/pod/c")[0]);
    // The guarantee ends with the pod.
    let (answer, _over) = oneshot::channel();
    bench.runtime(PodCommand::PodStopped { uid: "uid".to_owned(), sandbox: "sandbox".to_owned(), answer });
    let expected = [("b", "0"), ("c", "1"), ("new", "0")];
    assert_eq!(bench.nodes(), expected.map(|(name, nodes)| (name.to_owned(), nodes.to_owned())));
}

#[test]
fn failed_rollback_keeps_new_nodes() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    bench.start().unwrap();
    bench.until(|status| status.moves[0].state == Some(MoveState::Moved));
    // The kernel refuses the old nodes.
    fs::remove_file(bench.root().join("a/cpuset.mems")).unwrap();
    bench.reconciler.rebalancing.cancel(&bench.reconciler.core).unwrap();
    let over = bench.until_over();
    assert_eq!((over.state, over.moves[0].state), (RebalanceState::Cancelled, Some(MoveState::Stays)));
    let expected =
        [("a", "1"), ("b", "0"), ("c", "1")].map(|(name, nodes)| (name.to_owned(), nodes.to_owned()));
    assert_eq!(bench.nodes(), expected, "the ledger matches the kernel");
    let ledger = &bench.reconciler.core.store.state.ledger;
    assert_eq!(bench.reconciler.core.policy.strategy.rebase(ledger), (ledger.clone(), Vec::new()));
}

#[test]
fn stale_plan_is_refused_or_stops() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    let command = RebalanceCommand {
        request: request("new", "2Gi"),
        limits: RebalanceLimits::default(),
        plan: Some("0".to_owned()),
        admit: true,
    };
    let stale = bench.reconciler.rebalancing.start(&mut bench.reconciler.core, command).unwrap_err();
    assert!(matches!(&stale, AdmissionError::Conflict(error) if error.field == "plan"), "{stale}");
    bench.start().unwrap();
    // Another request gets the room before the first step.
    bench.admit("d", "1Gi").unwrap();
    let before = bench.nodes();
    let over = bench.until_over();
    let reason = over.reason.unwrap();
    assert!(reason.contains("the plan is stale") && over.state == RebalanceState::Failed, "{reason}");
    assert_eq!(bench.nodes(), before);
    assert_eq!(bench.knobs("a")[1], "0");
}

#[test]
fn release_during_rebalance() {
    for is_begun in [false, true] {
        let mut bench = RebalanceBench::new(RebalanceMode::Off);
        bench.start().unwrap();
        if is_begun {
            bench.until(is_moving);
        }
        release::release(&mut bench.reconciler.core, "a").unwrap();
        let over = bench.until_over();
        assert_eq!(over.state, RebalanceState::Done, "{over:?}");
        let expected = [("b", "0"), ("c", "1"), ("new", "0")];
        assert_eq!(bench.nodes(), expected.map(|(name, nodes)| (name.to_owned(), nodes.to_owned())));
        for name in ["b", "c", "new"] {
            release::release(&mut bench.reconciler.core, name).unwrap();
        }
        assert_eq!(bench.reconciler.core.store.state.ledger, bench.reconciler.core.policy.strategy.idle());
    }
}

#[test]
fn rolls_back_from_any_step() {
    for is_killed in [false, true] {
        for steps in 0..5 {
            let mut bench = RebalanceBench::new(RebalanceMode::Off);
            let (before, knobs) = (bench.guarantees(), bench.knobs("a"));
            bench.start().unwrap();
            for _ in 0..steps {
                bench.reconciler.rebalance();
            }
            if is_killed {
                bench.restart();
            } else if bench.status().state == RebalanceState::Done {
                panic!("the rebalance ended too early");
            } else {
                bench.cancel();
            }
            let over = bench.until_over();
            let expected = if is_killed { RebalanceState::Failed } else { RebalanceState::Cancelled };
            assert_eq!(over.state, expected, "{over:?}");
            let after = bench.guarantees();
            assert_eq!(after.0, before.0, "after {steps} steps, killed: {is_killed}");
            assert_eq!(after.1.ledger, before.1.ledger);
            assert_eq!(after.1.moving, before.1.moving);
            assert_eq!(bench.knobs("a"), knobs);
        }
    }
}

#[test]
fn restart_resumes_rollback() {
    for (steps, back) in (1..5).flat_map(|steps| (1..4).map(move |back| (steps, back))) {
        let mut bench = RebalanceBench::new(RebalanceMode::Off);
        let (before, knobs) = (bench.guarantees(), bench.knobs("a"));
        bench.start().unwrap();
        for _ in 0..steps {
            bench.reconciler.rebalance();
        }
        bench.cancel();
        for _ in 0..back {
            bench.reconciler.rebalance();
        }
        bench.restart();
        bench.until_over();
        let after = bench.guarantees();
        let when = format!("after {steps} steps, and {back} back");
        assert_eq!((after.0, bench.knobs("a")), (before.0, knobs), "{when}");
        assert_eq!((after.1.ledger, after.1.moving), (before.1.ledger, before.1.moving), "{when}");
    }
}

#[test]
fn synchronization_keeps_reserved_room() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    bench.start().unwrap();
    bench.until(is_moving);
    let before = bench.nodes();
    assert_eq!(before[0].0, RESERVE_OWNER);
    let (answer, _done) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    bench.runtime(PodCommand::Synchronize { containers, sandboxes, complete: true, answer });
    assert_eq!(bench.nodes(), before);
}

#[test]
fn burstable_workload_is_not_moved() {
    let mut bench = RebalanceBench::empty(RebalanceMode::Off);
    let mut burstable = request("a", "1Gi");
    burstable.terms.burstable = true;
    bench.set_resident("a", [100, 0]);
    assert!(bench.reconciler.admit(&burstable, false).is_ok());
    for (name, memory) in [("b", "1536Mi"), ("c", "2560Mi")] {
        bench.admit(name, memory).unwrap();
    }
    assert_eq!(bench.nodes()[0], ("a".to_owned(), "0".to_owned()));
    let none = bench.start().unwrap_err();
    assert!(matches!(none, AdmissionError::NoPlan { .. }), "{none}");
}

#[test]
fn reserved_huge_pages_are_not_moved() {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    let put = |file: &str, text: &str| {
        let file = bench.dir.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    put("cgroup/a/cgroup.procs", "77\n");
    put("proc/77/maps", "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n");
    put("proc/77/status", "HugetlbPages:\t 0 kB\n");
    let core = &mut bench.reconciler.core;
    core.config.host_root = bench.dir.path().to_owned();
    for node in Arc::make_mut(&mut core.policy.machine).nodes.values_mut() {
        node.hugepages.insert(HugepageSize(Bytes::mib(2)), HugepagePool { total: 64, free: 64, surplus: 0 });
    }
    let moves = |bench: &mut RebalanceBench| {
        let plan = bench.reconciler.plan(&request("new", "2Gi"), &RebalanceLimits::default());
        plan.map_or(0, |plan| plan.moves.len())
    };
    assert_eq!(moves(&mut bench), 0);
    // The process has touched all of them.
    fs::write(bench.dir.path().join("proc/77/status"), "HugetlbPages:\t 16384 kB\n").unwrap();
    assert_eq!(moves(&mut bench), 1);
}

#[test]
fn moves_all_containers_of_a_pod() {
    let mut bench = RebalanceBench::empty(RebalanceMode::Off);
    fixture::cgroup(&bench.root().join("kubepods/pod/d"), &bench.host.machine());
    let mut claim = request("uid", "1Gi").engine;
    claim.containers[0].name = POD_SHARE.into();
    bench.run_pod(&PodClaim::Pod(claim), GuaranteeSource::Pod, &["c", "d"]);
    for (name, memory) in [("b", "1536Mi"), ("c", "2560Mi")] {
        bench.admit(name, memory).unwrap();
    }
    let mems = |bench: &RebalanceBench, name: &str| bench.knobs(&format!("kubepods/pod/{name}"))[1].clone();
    assert_eq!(["c", "d"].map(|name| mems(&bench, name)), ["0", "0"]);
    bench.start().unwrap();
    bench.until(|status| status.moves[0].state == Some(MoveState::Moved));
    assert_eq!(["c", "d"].map(|name| mems(&bench, name)), ["1", "1"]);
    assert_eq!(bench.pods_in_reports(), [("moved".to_owned(), "n/p uid".to_owned())]);
    // The kernel accepts the old nodes for the first container and refuses them for the second.
    fs::remove_file(bench.root().join("kubepods/pod/d/cpuset.mems")).unwrap();
    bench.cancel();
    let over = bench.until_over();
    assert_eq!(over.moves[0].state, Some(MoveState::Stays));
    assert_eq!(mems(&bench, "c"), "1", "the ledger has node 1");
    assert_eq!(bench.nodes().last().unwrap(), &("uid".to_owned(), "1".to_owned()));
}

#[test]
fn plan_counts_own_memory_as_available() {
    for admit in [false, true] {
        let mut bench = RebalanceBench::new(RebalanceMode::Off);
        // The memory in use on the nodes belongs to the workload itself.
        bench.set_resident("new", [1024, 1024]);
        bench.withhold([1024, 1024]);
        let plan = bench.reconciler.plan(&request("new", "1200Mi"), &RebalanceLimits::default()).unwrap();
        assert_eq!(plan.moves, []);
        let one = bench.reconciler.plan(&request("new", "2Gi"), &RebalanceLimits::default()).unwrap();
        assert_eq!(one.moves.len(), 1);
        bench.start_for(request("new", "2Gi"), admit).unwrap();
        let over = bench.until_over();
        assert_eq!(over.state, RebalanceState::Done, "{:?}", over.reason);
    }
    let mut bench = RebalanceBench::empty(RebalanceMode::Off);
    bench.set_resident("new", [100, 300]);
    let mut burstable = request("new", "1Gi");
    burstable.terms.burstable = true;
    let plan = bench.reconciler.plan(&burstable, &RebalanceLimits::default()).unwrap();
    assert_eq!(plan.allocation.nodes, "1", "most of its memory is on node 1");
}

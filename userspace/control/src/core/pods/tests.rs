//! Tests of containers that cannot be bound, and of their resources.

use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use numaward_api::EnforcementMode;
use numaward_cgroup::knob::Knob;
use numaward_engine::{HostConditions, Quantity, Terms, claims::allocator::Amounts};
use numaward_guarantee::{
    claim::{ReservedClaim, ReservedPart},
    command::PodCommand,
    pod::{ClaimUses, ContainerPlacementRequest, PodClaim, PodPlacementRequest, UnpinnedReason},
};
use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::*;
use crate::{
    core::{
        Attempt, claims, cpu_isolation,
        execution::tests::{ExecutionBench, container},
        release,
    },
    reconciler::{mode, upkeep},
};

/// Returns the shared pool.
fn pool(bench: &ExecutionBench) -> String {
    bench.core.store.state.ledger.shared_pool().to_string()
}

/// Creates a running container that cannot be bound, because a directory has the name of its knob.
fn create_unbound(bench: &mut ExecutionBench) -> ContainerPlacementRequest {
    let ask = container("a", 2000);
    drop(bench.create(&ask));
    bench.handle();
    let mut bound = bench.bind(&ask);
    block_knob(bench, &ask, true);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(Some(UnpinnedReason::Enforcement)));
    assert!(bench.core.store.state.guarantees.is_empty());
    ask
}

fn block_knob(bench: &ExecutionBench, ask: &ContainerPlacementRequest, is_blocked: bool) {
    let knob = bench.dir_of(ask).join("cpuset.cpus");
    if is_blocked {
        fs::remove_file(&knob).unwrap();
        fs::create_dir(&knob).unwrap();
    } else {
        fs::remove_dir(&knob).unwrap();
        fs::write(&knob, "\n").unwrap();
    }
}

/// Runs one turn of the loop without commands.
fn run_turn(bench: &mut ExecutionBench, now: Instant) {
    maintain(&mut bench.core, now);
    while bench.core.bindings.has_next() {
        binding::bind_next(&mut bench.core);
    }
}

#[test]
fn failed_bind_is_retried() {
    let mut bench = ExecutionBench::new();
    let ask = create_unbound(&mut bench);
    let now = Instant::now();
    run_turn(&mut bench, now);
    assert!(bench.core.store.state.guarantees.is_empty(), "not at once");
    block_knob(&bench, &ask, false);
    run_turn(&mut bench, now + Duration::from_secs(2));
    assert!(bench.core.store.state.guarantees.contains_key("default/a/c"));
    assert_eq!(crate::testing::line(&bench.dir_of(&ask).join("cpuset.cpus")), "1-2");
    let much_later = now + Duration::from_hours(1);
    run_turn(&mut bench, much_later);
    assert_eq!(pool(&bench), "0,3-7");
}

#[test]
fn running_unbound_container_keeps_cpus() {
    let mut bench = ExecutionBench::new();
    let ask = create_unbound(&mut bench);
    let now = Instant::now();
    for minutes in [1, 9, 11, 60] {
        run_turn(&mut bench, now + Duration::from_mins(minutes));
        assert_eq!(pool(&bench), "0,3-7", "after {minutes} minutes");
    }
    fs::write(bench.dir_of(&ask).join("cgroup.events"), "populated 0\n").unwrap();
    run_turn(&mut bench, now + Duration::from_mins(62));
    assert_eq!(pool(&bench), "0-7");
    assert!(bench.core.store.state.containers.is_empty() && !bench.core.bindings.has_unbound());
}

#[test]
fn unstarted_container_is_released() {
    let mut bench = ExecutionBench::new();
    drop(bench.create(&container("a", 2000)));
    bench.handle();
    let now = Instant::now();
    run_turn(&mut bench, now + Duration::from_mins(9));
    assert_eq!(pool(&bench), "0,3-7");
    run_turn(&mut bench, now + Duration::from_mins(11));
    assert_eq!(pool(&bench), "0-7");
}

#[test]
fn cpus_are_held_until_knobs_are_restored() {
    let mut bench = ExecutionBench::new();
    let ask = container("a", 2000);
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    block_knob(&bench, &ask, true);
    let (id, uid, sandbox) = (ask.id.clone(), ask.pod.pod.uid.clone(), ask.pod.sandbox.clone());
    let mut stopped = bench.ask(|answer| PodCommand::Stopped { id, answer });
    let mut over = bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer });
    bench.handle();
    assert_eq!((stopped.try_recv(), over.try_recv()), (Ok(()), Ok(())), "the runtime does not wait");
    let now = Instant::now();
    run_turn(&mut bench, now);
    assert_eq!(pool(&bench), "0,3-7");
    assert!(bench.core.store.state.releasing.contains("default/a/c"));

    block_knob(&bench, &ask, false);
    release::release(&mut bench.core, "default/a/c").unwrap();
    run_turn(&mut bench, now);
    assert_eq!(pool(&bench), "0-7");
    let state = &bench.core.store.state;
    assert!(state.containers.is_empty() && state.pods.is_empty() && state.releasing.is_empty());
}

#[test]
fn controllers_wait_for_the_runtime() {
    let mut bench = ExecutionBench::new();
    let mut ask = container("a", 2000);
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    let root = bench.core.hierarchy.root().to_owned();
    crate::testing::cgroup(&root.join("other/inner"), &bench.core.policy.machine);
    fs::write(root.join("other/inner/cgroup.subtree_control"), "").unwrap();
    fs::remove_file(root.join("other/inner/cpuset.cpus")).unwrap();
    fs::write(root.join("other/cgroup.subtree_control"), "memory").unwrap();
    bench.core.enable_above(&"/other/inner".parse().unwrap(), Knob::CpusetCpus).unwrap();
    // The list as the kernel writes it.
    fs::write(root.join("other/cgroup.subtree_control"), "cpuset memory").unwrap();

    bench.core.config.enforcement.mode = EnforcementMode::Off;
    mode::follow(&mut bench.core);
    assert!(bench.core.store.state.applied.is_empty() && bench.core.store.state.guarantees.is_empty());
    // The values that the runtime has, before and after it was asked to change them.
    ask.has.cpus = Some("1-2".parse().unwrap());
    // CPU 8 may be added later.
    Arc::make_mut(&mut bench.core.policy.machine).possible_cpus = "0-8".parse().unwrap();
    for has_asked in [false, true] {
        upkeep::refresh(&mut bench.core);
        assert_eq!(crate::testing::line(&root.join("other/cgroup.subtree_control")), "cpuset memory");
        let sandboxes = [(ask.pod.sandbox.clone(), ask.pod.pod.uid.clone())].into();
        let containers = vec![ask.clone()];
        let mut listed =
            bench.ask(|answer| PodCommand::Synchronize { containers, sandboxes, complete: true, answer });
        bench.handle();
        let updates = listed.try_recv().unwrap().updates;
        assert_eq!(updates.is_empty(), has_asked, "{updates:?}");
        for update in updates {
            assert_eq!(update.settings.cpus.as_ref().unwrap().to_string(), "0-8");
            ask.has = update.settings;
        }
    }
    upkeep::refresh(&mut bench.core);
    assert_eq!(crate::testing::line(&root.join("other/cgroup.subtree_control")), "-cpuset");
    assert!(bench.core.store.state.enabled.is_empty());
}

/// A container of the class `BestEffort`.
fn best_effort(name: &str) -> ContainerPlacementRequest {
    let ask = container(name, 1000);
    ContainerPlacementRequest { pod: PodPlacementRequest { asked: PodClaim::Nothing, ..ask.pod }, ..ask }
}

#[test]
fn empty_pool_means_reserved_cpus() {
    let config = serde_json::json!({
        "cpuManagerPolicyOptions": {"strict-cpu-reservation": "true"},
        "topologyManagerPolicy": "best-effort",
        "enforcement": {"herding": {"mode": "on"}},
    });
    let mut bench = ExecutionBench::with(serde_json::from_value(config).unwrap());
    let create = |bench: &mut ExecutionBench, ask: &ContainerPlacementRequest| {
        drop(bench.create(ask));
        let mut bound = bench.bind(ask);
        bench.handle();
        assert_eq!(bound.try_recv(), Ok(None));
    };
    create(&mut bench, &best_effort("before"));
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "1-7");
    create(&mut bench, &container("all", 7000));
    assert_eq!((bench.cpus("kubepods/pod-all/all").as_str(), pool(&bench).as_str()), ("1-7", ""));
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "0");
    let (settings, _) = placement::create(&mut bench.core, &best_effort("after"), Attempt::First).unwrap();
    assert_eq!(settings.cpus.unwrap().to_string(), "0");
    cpu_isolation::update(&mut bench.core, true);
    assert_eq!(bench.cpus("other"), "0");
    // The daemon starts again, and the runtime lists the running containers.
    run_turn(&mut bench, Instant::now());
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "0");

    let (uid, sandbox) = ("uid-all".to_owned(), "sandbox-all".to_owned());
    drop(bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer }));
    bench.handle();
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "1-7");
}

/// The ledger has to fit in the memory of the daemon, whatever pods ask for.
#[test]
fn refuses_too_large_account() {
    let mut bench = ExecutionBench::new();
    let mut ask = container("a", 2000);
    ask.pod.terms.labels = [("key".to_owned(), "x".repeat(1 << 20))].into();
    let error = placement::create(&mut bench.core, &ask, Attempt::First).unwrap_err();
    let said = error.to_string();
    assert!(said.starts_with("the request takes 1048") && said.ends_with("(AccountTooLarge)"), "{said}");
    assert_eq!(pool(&bench), "0-7");
    assert!(bench.core.store.state.pods.is_empty());
    ask.pod.terms.labels = [("key".to_owned(), "x".repeat(8 << 10))].into();
    placement::create(&mut bench.core, &ask, Attempt::First).unwrap();
    assert_eq!(pool(&bench), "0,3-7");
}

/// A pod can have hundreds of containers.
#[test]
fn requests_of_a_pod_are_limited() {
    let mut bench = ExecutionBench::new();
    let labels: BTreeMap<_, _> = [("key".to_owned(), "x".repeat(1 << 10))].into();
    let mut create = |number: usize| {
        // All are containers of the pod `a`.
        let mut ask = container("a", 1);
        let name = format!("c{number}");
        if let PodClaim::Container(request) = &mut ask.pod.asked {
            request.owner = format!("{}-{name}", request.owner).as_str().into();
        }
        ask.pod.terms.labels = labels.clone();
        placement::create(&mut bench.core, &ask, Attempt::First)
    };
    let refused = (0..200).find_map(|number| create(number).err().map(|error| (number, error.to_string())));
    let (admitted, error) = refused.expect("a request is refused");
    assert!((25..=31).contains(&admitted), "{admitted}");
    assert!(error.contains("with this request, those of its pod take 3"), "{error}");
    let bytes = serde_json::to_vec(&bench.core.store.state.ledger).unwrap().len();
    assert!(bytes < 64 << 10, "{bytes}");
    let mut other = container("b", 1);
    other.pod.terms.labels = labels;
    placement::create(&mut bench.core, &other, Attempt::First).unwrap();
}

/// Returns a claim with CPUs and memory of node 1, for a pod.
fn reserved_claim(pod: &str, cpus: u64) -> ReservedClaim {
    let consumed = [("cpu".into(), Quantity::whole(cpus)), ("memory".into(), Quantity::whole(1 << 30))];
    ReservedClaim {
        namespace: "default".to_owned(),
        name: "db".to_owned(),
        pod: format!("uid-{pod}"),
        parts: vec![ReservedPart {
            node: Some(NodeId(1)),
            consumed: consumed.into(),
            terms: Terms::default(),
        }],
        pending: false,
    }
}

/// Returns a container of the pod `a` that requests CPUs, and uses this claim.
fn claiming(id: &str, claims: ClaimUses) -> ContainerPlacementRequest {
    claiming_in("a", id, claims)
}

fn claiming_in(pod: &str, id: &str, claims: ClaimUses) -> ContainerPlacementRequest {
    let ask = container(pod, 2000);
    let cgroup = format!("/kubepods/pod-{pod}/{id}").parse().unwrap();
    ContainerPlacementRequest { id: id.to_owned(), name: id.to_owned(), cgroup, claims, ..ask }
}

fn named(claim: &str) -> ClaimUses {
    ClaimUses { names: [claim.to_owned()].into(), ..ClaimUses::default() }
}

#[test]
fn containers_use_claim_of_their_pod() {
    let mut bench = ExecutionBench::new();
    claims::reserve(&mut bench.core, "c", reserved_claim("a", 2), None).unwrap();
    assert_eq!(pool(&bench), "0-3,6-7");
    let reported = ClaimUses { uids: ["c".to_owned()].into(), ..ClaimUses::default() };
    let asks =
        [claiming("one", named("db")), claiming("two", reported.clone()), claiming("three", named("other"))];
    for ask in &asks {
        drop(bench.create(ask));
        let mut bound = bench.bind(ask);
        bench.handle();
        assert_eq!(bound.try_recv(), Ok(None));
    }
    assert!(claims::describe(&bench.core)[0].used);
    // Nothing is placed for the containers' own requests, and the third one shares the pool.
    assert_eq!(pool(&bench), "0-3,6-7");
    let line = |bench: &ExecutionBench, ask, knob| crate::testing::line(&bench.dir_of(ask).join(knob));
    let cpus = |bench: &ExecutionBench| asks.each_ref().map(|ask| line(bench, ask, "cpuset.cpus"));
    assert_eq!(cpus(&bench), ["4-5", "4-5", "0-3,6-7"]);
    assert_eq!(asks.each_ref().map(|ask| line(&bench, ask, "cpuset.mems")), ["1", "1", ""]);
    assert_eq!([&asks[0], &asks[1]].map(|ask| line(&bench, ask, "cpu.max")), ["max 100000"; 2]);
    // Another pod is refused, however it names the claim, while the first one has containers.
    let uses = ClaimUses { uids: reported.uids, ..named("db") };
    let other = ContainerPlacementRequest { claims: uses, ..container("b", 1000) };
    let mut refused = bench.ask(|answer| PodCommand::Create { ask: Box::new(other.clone()), answer });
    bench.handle();
    assert!(
        matches!(refused.try_recv(), Ok(Err(numaward_guarantee::error::AdmissionError::Rejected(rejection, _))) if rejection.reason == "ClaimOfAnotherPod")
    );
    assert_eq!(pool(&bench), "0-3,6-7");
    // A container that ends leaves the claim as it is.
    let mut stopped = bench.ask(|answer| PodCommand::Stopped { id: "one".to_owned(), answer });
    bench.handle();
    assert_eq!(stopped.try_recv(), Ok(()));
    assert_eq!((pool(&bench).as_str(), line(&bench, &asks[1], "cpuset.cpus").as_str()), ("0-3,6-7", "4-5"));
    // The runtime lists its containers again: the claim is theirs, and nothing waits for resources.
    let sandboxes = BTreeMap::from([("sandbox-a".to_owned(), "uid-a".to_owned())]);
    let running = vec![asks[1].clone(), asks[2].clone()];
    synchronize::synchronize(&mut bench.core, &running, &sandboxes, true);
    assert!(waiting::unplaced(&bench.core).is_empty());
    assert_eq!((pool(&bench).as_str(), line(&bench, &asks[1], "cpuset.cpus").as_str()), ("0-3,6-7", "4-5"));
    for id in ["two", "three"] {
        drop(bench.ask(|answer| PodCommand::Stopped { id: id.to_owned(), answer }));
    }
    bench.handle();
    // The kubelet does not ask again for the pod that follows.
    drop(bench.create(&other));
    drop(bench.bind(&other));
    bench.handle();
    assert_eq!((line(&bench, &other, "cpuset.cpus"), pool(&bench)), ("4-5".to_owned(), "0-3,6-7".to_owned()));
    drop(bench.ask(|answer| PodCommand::Stopped { id: other.id.clone(), answer }));
    bench.handle();
    claims::release(&mut bench.core, "c").unwrap();
    assert_eq!(pool(&bench), "0-7");
}

#[test]
fn pod_with_claim_is_not_placed_itself() {
    let mut bench = ExecutionBench::new();
    claims::reserve(&mut bench.core, "c", reserved_claim("a", 4), None).unwrap();
    let mut ask = container("a", 4000).pod;
    // Its request has no room beside its claim.
    let PodClaim::Container(request) = ask.asked else { panic!("{ask:?}") };
    ask.asked = PodClaim::Pod(request);
    placement::run_pod(&mut bench.core, &ask, Attempt::First).unwrap();
    assert!(bench.core.store.state.pods.is_empty());
    claims::release(&mut bench.core, "c").unwrap();
    assert_eq!(pool(&bench), "0-7");
}

#[test]
fn containers_follow_their_limited_claim() {
    let mut bench = ExecutionBench::new();
    claims::reserve(&mut bench.core, "c", reserved_claim("a", 3), None).unwrap();
    let ask = claiming("one", named("db"));
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    let state = |bench: &ExecutionBench| {
        let line = |knob| crate::testing::line(&bench.dir_of(&ask).join(knob));
        (pool(bench), line("cpuset.cpus"), line("cpuset.mems"), line("cpu.max"))
    };
    let texts = |pool: &str, cpus: &str, mems: &str, quota: &str| {
        (pool.to_owned(), cpus.to_owned(), mems.to_owned(), quota.to_owned())
    };
    let requests = |cpu: u64, gib: u64| -> Amounts {
        [("cpu".into(), Quantity::milli(cpu)), ("memory".into(), Quantity::whole(gib << 30))].into()
    };
    let whole = texts("0-3,7", "4-6", "1", "max 100000");
    assert_eq!(state(&bench), whole);
    // Two of its CPUs stay, without a move to others.
    let changed = claims::limit(&mut bench.core, "uid-a", Some(&requests(2900, 1))).unwrap();
    assert_eq!(
        (changed[0].given["cpu"], changed[0].allocated["cpu"]),
        (Quantity::whole(2), Quantity::whole(3))
    );
    let (_, cpus, ..) = state(&bench);
    assert!(["4-5", "5-6", "4,6"].contains(&cpus.as_str()), "{cpus}");
    assert_eq!(claims::limit(&mut bench.core, "uid-a", Some(&requests(2000, 1))).unwrap(), []);
    // A claim without CPUs uses shared CPUs. The memory that it keeps need not be free.
    let withheld = BTreeMap::from([(ZoneKind::Memory, BTreeMap::from([(NodeId(1), Bytes::gib(4))]))]);
    let tight = Arc::new(HostConditions { withheld, ..HostConditions::default() });
    bench.core.store.state.ledger.set_conditions(tight);
    claims::limit(&mut bench.core, "uid-a", Some(&requests(500, 1))).unwrap();
    let (shared, cpus, mems, _) = state(&bench);
    assert_eq!((shared.as_str(), cpus.as_str(), mems.as_str()), ("0-7", "0-7", "1"));
    let relaxed = Arc::new(HostConditions::default());
    bench.core.store.state.ledger.set_conditions(relaxed);
    claims::limit(&mut bench.core, "uid-a", Some(&Amounts::new())).unwrap();
    assert_eq!((state(&bench).0.as_str(), state(&bench).1.as_str()), ("0-7", "0-7"));
    // CPUs that another workload has got meanwhile return only after its end.
    let other = container("b", 4000);
    drop(bench.create(&other));
    bench.handle();
    claims::limit(&mut bench.core, "uid-a", Some(&requests(3000, 1))).unwrap();
    assert_eq!(claims::limit(&mut bench.core, "uid-a", Some(&requests(3000, 1))).unwrap(), []);
    let mut stopped = bench.ask(|answer| PodCommand::Stopped { id: "b".to_owned(), answer });
    bench.handle();
    assert_eq!(stopped.try_recv(), Ok(()));
    claims::limit(&mut bench.core, "uid-a", None).unwrap();
    run_turn(&mut bench, Instant::now());
    assert_eq!(state(&bench), whole);
    assert_eq!(claims::limit(&mut bench.core, "uid-a", Some(&requests(3000, 1))).unwrap(), []);
    claims::release(&mut bench.core, "c").unwrap();
    assert_eq!(pool(&bench), "0-7");
}

/// Returns a memory knob of a cgroup in MiB.
fn mib(bench: &ExecutionBench, path: &str, knob: &str) -> u64 {
    crate::testing::line(&bench.core.hierarchy.root().join(path).join(knob)).parse::<u64>().unwrap() >> 20
}

/// Returns `memory.min` of the containers `one` and `two`, of their pod, and of its parent, in MiB.
fn protected(bench: &ExecutionBench) -> [u64; 4] {
    let paths = ["kubepods/pod-a/one", "kubepods/pod-a/two", "kubepods/pod-a", "kubepods"];
    paths.map(|path| mib(bench, path, "memory.min"))
}

#[test]
fn containers_divide_memory_of_their_claim() {
    let mut bench = ExecutionBench::new();
    claims::reserve(&mut bench.core, "c", reserved_claim("a", 2), None).unwrap();
    let asks = ["one", "two"].map(|id| claiming(id, named("db")));
    drop(bench.create(&asks[0]));
    bench.handle();
    drop(bench.bind(&asks[1]));
    let mut bound = bench.bind(&asks[0]);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    assert_eq!(protected(&bench), [992, 0, 992, 992]);
    assert_eq!(mib(&bench, "kubepods/pod-a/one", "memory.low"), 1024);
    // Before the second one runs, the first one has only half.
    drop(bench.create(&asks[1]));
    bench.handle();
    assert_eq!(protected(&bench), [496, 0, 496, 496]);
    let mut bound = bench.bind(&asks[1]);
    bench.handle();
    assert_eq!((bound.try_recv(), protected(&bench)), (Ok(None), [496, 496, 992, 992]));
    // The pod is resized.
    let requests: Amounts =
        [("cpu".into(), Quantity::whole(2)), ("memory".into(), Quantity::whole(512 << 20))].into();
    claims::limit(&mut bench.core, "uid-a", Some(&requests)).unwrap();
    assert_eq!(protected(&bench), [240, 240, 480, 480]);
    claims::limit(&mut bench.core, "uid-a", None).unwrap();
    for (id, expected) in [("one", [0, 992, 992, 992]), ("two", [0; 4])] {
        drop(bench.ask(|answer| PodCommand::Stopped { id: id.to_owned(), answer }));
        bench.handle();
        run_turn(&mut bench, Instant::now());
        assert_eq!(protected(&bench), expected, "{id}");
    }
    claims::release(&mut bench.core, "c").unwrap();
    assert!(bench.core.store.state.applied.is_empty());
}

/// A daemon that died between the creation of a container and the division divides the claim at its start.
#[test]
fn claim_is_divided_after_a_failure() {
    let mut bench = ExecutionBench::new();
    claims::reserve(&mut bench.core, "c", reserved_claim("a", 2), None).unwrap();
    let asks = ["one", "two"].map(|id| claiming(id, named("db")));
    drop(bench.create(&asks[0]));
    bench.handle();
    drop(bench.bind(&asks[0]));
    bench.handle();
    claims::reserve(&mut bench.core, "d", reserved_claim("b", 2), None).unwrap();
    let others = ["three", "four"].map(|id| claiming_in("b", id, named("db")));
    drop(bench.create(&others[0]));
    bench.handle();
    drop(bench.bind(&others[0]));
    bench.handle();
    let knob = bench.dir_of(&asks[0]).join("memory.min");
    fs::remove_file(&knob).unwrap();
    fs::create_dir(&knob).unwrap();
    let mut created = bench.create(&asks[1]);
    bench.handle();
    assert!(created.try_recv().is_ok(), "the second container starts");
    // The claim of another pod is divided all the same.
    assert_eq!(mib(&bench, "kubepods/pod-b/three", "memory.min"), 992);
    drop(bench.create(&others[1]));
    bench.handle();
    assert_eq!(mib(&bench, "kubepods/pod-b/three", "memory.min"), 496);
    fs::remove_dir(&knob).unwrap();
    fs::write(&knob, (992_u64 << 20).to_string()).unwrap();
    let now = Instant::now();
    run_turn(&mut bench, now);
    assert_eq!(mib(&bench, "kubepods/pod-a/one", "memory.min"), 992, "not at once");
    run_turn(&mut bench, now + Duration::from_secs(2));
    assert_eq!(mib(&bench, "kubepods/pod-a/one", "memory.min"), 496);

    drop(bench.bind(&asks[1]));
    bench.handle();
    let id = "two".to_owned();
    bench.core.store.state.containers.remove(&id);
    let sandboxes = BTreeMap::from([("sandbox-a".to_owned(), "uid-a".to_owned())]);
    synchronize::synchronize(&mut bench.core, &asks[..1], &sandboxes, true);
    run_turn(&mut bench, now + Duration::from_mins(1));
    assert_eq!(mib(&bench, "kubepods/pod-a/one", "memory.min"), 992);
}

#[test]
fn container_uses_all_nodes_of_its_claim() {
    let mut bench = ExecutionBench::new();
    let mut both = reserved_claim("a", 3);
    let consumed = [("cpu".into(), Quantity::whole(1)), ("memory".into(), Quantity::whole(512 << 20))];
    both.parts.push(ReservedPart {
        node: Some(NodeId(0)),
        consumed: consumed.into(),
        terms: Terms::default(),
    });
    claims::reserve(&mut bench.core, "c", both, None).unwrap();
    let ask = claiming("one", named("db"));
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    let line = |bench: &ExecutionBench, knob| crate::testing::line(&bench.dir_of(&ask).join(knob));
    assert_eq!(
        (line(&bench, "cpuset.cpus"), line(&bench, "cpuset.mems")),
        ("1,4-6".to_owned(), "0-1".to_owned())
    );
    let protected = |bench: &ExecutionBench| {
        ["kubepods/pod-a/one", "kubepods/pod-a", "kubepods"].map(|path| mib(bench, path, "memory.min"))
    };
    assert_eq!(protected(&bench), [1488; 3]);
    // The container follows new decisions on the parts.
    let requests: Amounts =
        [("cpu".into(), Quantity::whole(2)), ("memory".into(), Quantity::whole(1 << 30))].into();
    claims::limit(&mut bench.core, "uid-a", Some(&requests)).unwrap();
    let (cpus, mems) = (line(&bench, "cpuset.cpus"), line(&bench, "cpuset.mems"));
    assert_eq!((cpus.as_str(), mems.as_str(), protected(&bench)[0]), ("4-5", "1", 992));
    drop(bench.ask(|answer| PodCommand::Stopped { id: "one".to_owned(), answer }));
    bench.handle();
    claims::release(&mut bench.core, "c").unwrap();
    assert_eq!((pool(&bench).as_str(), protected(&bench)), ("0-7", [0; 3]));
    // Two claims are still too many for one container.
    for uid in ["c", "d"] {
        claims::reserve(&mut bench.core, uid, reserved_claim("a", 1), None).unwrap();
    }
    let error =
        placement::create(&mut bench.core, &claiming("two", named("db")), Attempt::First).unwrap_err();
    assert!(error.to_string().contains("uses 2 resource claims"), "{error}");
}

//! Reservations for resource claims.

use std::collections::BTreeMap;

use numaward_api::EnforcementMode;
use numaward_engine::{
    Quantity, Terms,
    claims::{allocator::Amounts, devices},
    policy::CpuKind,
};
use numaward_guarantee::claim::{PlacedClaim, ReservedClaim, ReservedPart};
use numaward_topology::NodeId;

use super::*;

fn native() -> Config {
    Config { strategy: StrategyKind::Native, ..Config::default() }
}

/// Returns a claim with CPUs and 1 GiB of each of these nodes.
fn claim(parts: &[(u32, u64)]) -> ReservedClaim {
    let part = |&(node, cpus): &(u32, u64)| ReservedPart {
        node: Some(NodeId(node)),
        consumed: [("cpu".into(), Quantity::whole(cpus)), ("memory".into(), Quantity::whole(1 << 30))].into(),
        terms: Terms::default(),
    };
    ReservedClaim {
        namespace: "ns".to_owned(),
        name: "db".to_owned(),
        pod: "pod".to_owned(),
        parts: parts.iter().map(part).collect(),
        pending: false,
    }
}

/// Returns a claim of the whole host with CPUs and 1 GiB, before its pod is bound.
fn host_claim(cpus: u64) -> ReservedClaim {
    let mut claim = ReservedClaim { pending: true, ..claim(&[(0, cpus)]) };
    claim.parts[0].node = None;
    claim
}

/// Returns the charged CPUs by node, and the shared pool, as they were published.
fn published(bench: &DaemonBench) -> (BTreeMap<u32, u64>, String) {
    let assigned = bench.host.assigned.lock().unwrap();
    let charged = devices::charged(&assigned.ledger, &bench.host.machine()).into_iter();
    let cpus = charged.map(|(node, amounts)| (node.0, amounts["cpu"].units().unwrap()));
    (cpus.collect(), assigned.ledger.shared_pool().to_string())
}

#[tokio::test]
async fn reservation_survives_restarts() {
    let bench = DaemonBench::new(&["a"]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let reserved = reconciler.reserve_claim("u".to_owned(), claim(&[(1, 3)]), None).await.unwrap();
    assert_eq!(published(&bench), ([(1, 3)].into(), "0-3,7".to_owned()));
    let shown = reconciler.allocations().claims.clone();
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].name.as_str(), shown[0].cpus.as_str(), shown[0].nodes.as_str()), ("db", "4-6", "1"));
    assert_eq!((shown[0].memory[0].bytes, shown[0].used), (1 << 30, false));
    // The kubelet asks again with each of its starts.
    let again = claim(&[(1, 3)]);
    assert_eq!(reconciler.reserve_claim("u".to_owned(), again.clone(), None).await.unwrap(), reserved);
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(native());
    assert_eq!(published(&bench), ([(1, 3)].into(), "0-3,7".to_owned()));
    let claims = reconciler.reserved_claims().await.unwrap();
    assert_eq!(claims.get("u"), Some(&reserved));
    assert_eq!(reconciler.reserve_claim("u".to_owned(), again, None).await.unwrap(), reserved);
    // The runtime lists containers and sandboxes, and none is of the claim's pod: it is prepared before they exist.
    reconciler.synchronize(Vec::new(), BTreeMap::new(), true).await.unwrap();
    assert_eq!(published(&bench).0, [(1, 3)].into());
    assert_eq!(admit(&reconciler, "a", 2).await.unwrap().nodes, "0", "node 1 has one CPU");
    for _ in 0..2 {
        reconciler.release_claim("u".to_owned()).await.unwrap();
    }
    assert_eq!(published(&bench), (BTreeMap::new(), "0,3-7".to_owned()));
    assert!(reconciler.reserved_claims().await.unwrap().is_empty());
    assert!(reconciler.allocations().claims.is_empty());
    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start_with(native());
    assert!(reconciler.reserved_claims().await.unwrap().is_empty());
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn refusal_names_node_and_amounts() {
    let bench = DaemonBench::new(&["a"]);
    let (reconciler, thread, stop) = bench.start_with(native());
    // The second part does not fit, so the first one is not reserved either.
    for (parts, text) in [
        (&[(1, 2), (0, 4)][..], "node 0: cpu requested 4, free 3"),
        (&[(1, 5)], "node 1: cpu requested 5, free 4"),
        (&[(7, 1)], "this host has no node 7"),
    ] {
        let refused =
            reconciler.reserve_claim("u".to_owned(), claim(parts), None).await.unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
        assert!(reconciler.reserved_claims().await.unwrap().is_empty());
    }
    let mut memory = claim(&[(0, 1)]);
    memory.parts[0].consumed.insert("memory".into(), Quantity::whole(9 << 30));
    let refused = reconciler.reserve_claim("u".to_owned(), memory, None).await.unwrap_err().to_string();
    assert!(refused.contains("node 0: memory requested 9"), "{refused}");
    admit(&reconciler, "a", 4).await.unwrap();
    let refused =
        reconciler.reserve_claim("u".to_owned(), claim(&[(1, 1)]), None).await.unwrap_err().to_string();
    assert!(refused.contains("node 1: cpu requested 1, free 0"), "{refused}");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn other_allocation_replaces_reservation() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start_with(native());
    reconciler.reserve_claim("u".to_owned(), claim(&[(1, 4), (0, 1)]), None).await.unwrap();
    // The scheduler has allocated the claim again. It needs the CPUs of the old reservation.
    let other = ReservedClaim { pod: "later".to_owned(), ..claim(&[(1, 3)]) };
    let reserved = reconciler.reserve_claim("u".to_owned(), other, None).await.unwrap();
    assert_eq!(reserved.pod, "later");
    assert_eq!(published(&bench).0, [(1, 3)].into());
    // If the new one does not fit, the old one stays.
    assert!(reconciler.reserve_claim("u".to_owned(), claim(&[(0, 4)]), None).await.is_err());
    assert_eq!(reconciler.reserved_claims().await.unwrap().get("u"), Some(&reserved));
    assert_eq!(published(&bench).0, [(1, 3)].into());
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn nothing_is_reserved_without_ledger_or_enforcement() {
    let bench = DaemonBench::new(&[]);
    let obstacle = bench.dir.path().join("state/ledger.journal.new");
    fs::create_dir_all(&obstacle).unwrap();
    let (reconciler, thread, stop) = bench.start_with(native());
    let error = reconciler.reserve_claim("u".to_owned(), claim(&[(1, 3)]), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::Store(_)), "{error}");
    assert!(reconciler.reserved_claims().await.unwrap().is_empty());
    fs::remove_dir(&obstacle).unwrap();
    reconciler.reserve_claim("u".to_owned(), claim(&[(1, 3)]), None).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
    for mode in [EnforcementMode::Off, EnforcementMode::DryRun] {
        let mut config = native();
        config.enforcement.mode = mode;
        let (reconciler, thread, stop) = bench.start_with(config);
        let error = reconciler.reserve_claim("v".to_owned(), claim(&[(0, 1)]), None).await.unwrap_err();
        assert!(matches!(error, AdmissionError::Off), "{error}");
        // A claim that was reserved before is released.
        reconciler.release_claim("u".to_owned()).await.unwrap();
        assert!(reconciler.reserved_claims().await.unwrap().is_empty());
        stop.cancel();
        thread.join().unwrap();
    }
    // The strategy of the kubelet cannot give CPUs of a certain node.
    let (reconciler, thread, stop) =
        bench.start_with(Config { strategy: StrategyKind::Kubelet, ..Config::default() });
    let error =
        reconciler.reserve_claim("u".to_owned(), claim(&[(1, 3)]), None).await.unwrap_err().to_string();
    assert!(error.contains("native"), "{error}");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn claims_of_a_pod_get_no_more_than_it_requests() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let requests = |cpus: u64, gib: u64| -> Option<Amounts> {
        Some([("cpu".into(), Quantity::whole(cpus)), ("memory".into(), Quantity::whole(gib << 30))].into())
    };
    let reserve = |uid: &str, parts: &[(u32, u64)], requests: Option<Amounts>| {
        reconciler.reserve_claim(uid.to_owned(), claim(parts), requests)
    };
    reserve("u", &[(1, 2)], requests(2, 1)).await.unwrap();
    let error = reserve("v", &[(0, 1)], requests(2, 2)).await.unwrap_err().to_string();
    assert!(
        error.contains("the resource claims of the pod have 3 of cpu, and its requests")
            && error.ends_with("(BeyondRequests)"),
        "{error}"
    );
    let error = reserve("v", &[(0, 1)], requests(3, 1)).await.unwrap_err().to_string();
    assert!(error.contains("of memory"), "{error}");
    let error = reserve("v", &[(0, 1)], Some(Amounts::new())).await.unwrap_err().to_string();
    assert!(error.contains("its requests, which a quota counts, 0"), "{error}");
    // The kubelet asks again, and the pod is not known yet.
    reserve("u", &[(1, 2)], Some(Amounts::new())).await.unwrap();
    reserve("v", &[(0, 1)], requests(3, 2)).await.unwrap();
    let other = ReservedClaim { pod: "other".to_owned(), ..claim(&[(0, 1)]) };
    reconciler.reserve_claim("w".to_owned(), other, requests(1, 1)).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
}

/// The claims of a pod get its requests one after the other, in the order of their UIDs.
#[tokio::test]
async fn limits_of_claims_survive_restarts() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let requests = |cpus: u64, gib: u64| -> Option<Amounts> {
        Some([("cpu".into(), Quantity::milli(cpus)), ("memory".into(), Quantity::whole(gib << 30))].into())
    };
    for (uid, parts) in [("u", (1, 3)), ("v", (0, 2))] {
        reconciler.reserve_claim(uid.to_owned(), claim(&[parts]), None).await.unwrap();
    }
    let other = ReservedClaim { pod: "other".to_owned(), ..claim(&[(0, 1)]) };
    reconciler.reserve_claim("w".to_owned(), other, None).await.unwrap();
    assert_eq!(published(&bench).0, [(0, 3), (1, 3)].into());
    let limit = |requests| reconciler.limit_claims("pod".to_owned(), requests);
    assert_eq!(limit(requests(5000, 2)).await.unwrap(), []);
    let changed = limit(requests(4500, 1)).await.unwrap();
    let amounts = |cpus: u64, gib: u64| Amounts::from_iter(requests(cpus, gib).unwrap());
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0].given, [("cpu".into(), Quantity::whole(1))].into());
    assert_eq!(changed[0].allocated, amounts(2000, 1));
    assert_eq!(published(&bench).0, [(0, 2), (1, 3)].into());
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(native());
    assert_eq!(published(&bench).0, [(0, 2), (1, 3)].into());
    reconciler.reserve_claim("v".to_owned(), claim(&[(0, 2)]), None).await.unwrap();
    assert_eq!(published(&bench).0, [(0, 2), (1, 3)].into(), "the kubelet asks again");
    let changed = reconciler.limit_claims("pod".to_owned(), None).await.unwrap();
    assert_eq!(changed[0].given, changed[0].allocated);
    assert_eq!(published(&bench).0, [(0, 3), (1, 3)].into());
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn limited_claims_have_whole_cores() {
    let bench = DaemonBench::new(&[]);
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).smt(2).memory(Bytes::gib(4));
    *bench.host.machine.lock().unwrap() = Arc::new(machine.build().unwrap());
    bench.cgroup("");
    let mut config = native();
    config.cpu_manager_policy_options = [("full-pcpus-only".to_owned(), "true".to_owned())].into();
    let (reconciler, thread, stop) = bench.start_with(config);
    reconciler.reserve_claim("u".to_owned(), claim(&[(1, 6)]), None).await.unwrap();
    for (requested, given) in [(5, 4), (1, 0), (6, 6)] {
        let requests = [("cpu".into(), Quantity::whole(requested))].into();
        reconciler.limit_claims("pod".to_owned(), Some(requests)).await.unwrap();
        let assigned = bench.host.assigned.lock().unwrap();
        let cpus = devices::charged(&assigned.ledger, &bench.host.machine())
            .remove(&NodeId(1))
            .unwrap_or_default()
            .remove("cpu");
        assert_eq!(cpus.unwrap_or_default(), Quantity::whole(given), "{requested}");
    }
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn claims_of_a_pod_are_limited_in_the_ledger() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let named = |number: usize, pod: &str| {
        let mut claim = claim(&[(0, 0)]);
        claim.parts[0].consumed = [("memory".into(), Quantity::whole(1 << 20))].into();
        let (namespace, name) = ("n".repeat(63), format!("{number:0253}"));
        ReservedClaim { namespace, name, pod: format!("{pod:036}"), ..claim }
    };
    let mut reserved = 0;
    let error = loop {
        let uid = format!("{reserved:036}");
        match reconciler.reserve_claim(uid, named(reserved, "pod"), None).await {
            Ok(_) => reserved += 1,
            Err(error) => break error.to_string(),
        }
        assert!(reserved < 100, "no limit");
    };
    assert!(
        error.starts_with("the resource claims of the pod take 3") && error.contains("(AccountTooLarge)"),
        "{error}"
    );
    assert!(reserved >= 32, "{reserved} of the longest names");
    reconciler.reserve_claim("other".to_owned(), named(0, "other"), None).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn parameters_are_terms_of_the_reservation() {
    let bench = DaemonBench::new(&["a"]);
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).smt(2).memory(Bytes::gib(4));
    *bench.host.machine.lock().unwrap() = Arc::new(machine.build().unwrap());
    bench.cgroup("");
    let (reconciler, thread, stop) = bench.start_with(native());
    let with = |terms: Terms| {
        let mut claim = claim(&[(1, 3)]);
        claim.parts[0].terms = terms;
        claim
    };
    let unknown = Terms { resctrl_class: Some("batch".to_owned()), ..Terms::default() };
    let error = reconciler.reserve_claim("u".to_owned(), with(unknown), None).await.unwrap_err().to_string();
    assert!(error.contains("placement.resctrlClass") && error.contains("batch"), "{error}");
    let hidden = with(Terms { hide_siblings: true, ..Terms::default() });
    reconciler.reserve_claim("u".to_owned(), hidden.clone(), None).await.unwrap();
    let shared = |bench: &DaemonBench| {
        let shared = bench.host.assigned.lock().unwrap().ledger.shared_pool().clone();
        (&shared & &bench.host.machine().nodes[&NodeId(1)].cpus).len()
    };
    assert_eq!(shared(&bench), 2, "three cores of four are taken");
    // The claim has three CPUs in the books of the scheduler.
    assert_eq!(published(&bench).0, [(1, 3)].into());
    let limit = |cpus: u64| {
        let requests = [("cpu".into(), Quantity::whole(cpus)), ("memory".into(), Quantity::whole(1 << 30))];
        reconciler.limit_claims("pod".to_owned(), Some(requests.into()))
    };
    limit(1).await.unwrap();
    assert_eq!(shared(&bench), 6, "siblings stay hidden");
    limit(3).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(native());
    assert_eq!(shared(&bench), 2);
    assert_eq!(
        *reconciler.reserve_claim("u".to_owned(), hidden, None).await.unwrap(),
        with(Terms { hide_siblings: true, ..Terms::default() })
    );
    reconciler.release_claim("u".to_owned()).await.unwrap();
    // No CPU of this machine is isolated.
    let isolated = Terms { cpu_kinds: [CpuKind::Isolated].into(), ..Terms::default() };
    let error = reconciler.reserve_claim("v".to_owned(), with(isolated), None).await.unwrap_err().to_string();
    assert!(error.contains("isolated"), "{error}");
    assert!(reconciler.reserved_claims().await.unwrap().is_empty());
    stop.cancel();
    thread.join().unwrap();
}

/// A claim with parts on two nodes is one guarantee, with the amounts of each node.
#[tokio::test]
async fn parts_of_a_claim_are_united() {
    let bench = DaemonBench::new(&["a", "b"]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let mut both = claim(&[(0, 2), (1, 3), (1, 1)]);
    both.parts[0].consumed.insert("memory".into(), Quantity::whole(512 << 20));
    let reserved = reconciler.reserve_claim("u".to_owned(), both.clone(), None).await.unwrap();
    let cpus = || published(&bench).0;
    assert_eq!(cpus(), [(0, 2), (1, 4)].into());
    let memory = |bench: &DaemonBench| {
        let assigned = bench.host.assigned.lock().unwrap();
        let charged = devices::charged(&assigned.ledger, &bench.host.machine());
        charged
            .into_iter()
            .map(|(node, of)| (node.0, of["memory"].units().unwrap() >> 20))
            .collect::<Vec<_>>()
    };
    assert_eq!(memory(&bench), [(0, 512), (1, 2048)]);
    assert_eq!(bench.host.assigned.lock().unwrap().ledger.owners().count(), 1);
    let shown = reconciler.allocations().claims.clone();
    assert_eq!((shown[0].cpus.as_str(), shown[0].nodes.as_str()), ("1-2,4-7", "0-1"));
    assert_eq!(
        shown[0].memory.iter().map(|block| (block.nodes.as_str(), block.bytes >> 20)).collect::<Vec<_>>(),
        [("0-1", 2560)]
    );
    // Node 0 has one CPU left, and node 1 none.
    assert_eq!(admit(&reconciler, "a", 1).await.unwrap().cpus, "3");
    assert!(admit(&reconciler, "b", 1).await.is_err());
    reconciler.release("a".to_owned()).await.unwrap();

    // The pod is resized: its claims have its requests, in the order of their parts.
    let limit = |cpus: u64, mib: u64| {
        let requests = [("cpu".into(), Quantity::milli(cpus)), ("memory".into(), Quantity::whole(mib << 20))];
        reconciler.limit_claims("pod".to_owned(), Some(requests.into()))
    };
    assert_eq!(limit(6000, 2560).await.unwrap(), []);
    let changed = limit(3500, 1024).await.unwrap();
    assert_eq!(
        changed[0].given,
        [("cpu".into(), Quantity::whole(3)), ("memory".into(), Quantity::whole(1 << 30))].into()
    );
    assert_eq!(changed[0].allocated["cpu"], Quantity::whole(6));
    assert_eq!((cpus(), memory(&bench)), ([(0, 2), (1, 1)].into(), vec![(0, 512), (1, 512)]));
    // What another workload has got meanwhile is not given back, and the rest stays as it is.
    admit(&reconciler, "a", 3).await.unwrap();
    assert_eq!(limit(6000, 2560).await.unwrap(), []);
    assert_eq!(cpus(), [(0, 2), (1, 1)].into());
    // Memory is taken back although there are no further CPUs.
    assert_eq!(limit(6000, 768).await.unwrap().len(), 1);
    assert_eq!((cpus(), memory(&bench)), ([(0, 2), (1, 1)].into(), vec![(0, 512), (1, 256)]));
    reconciler.release("a".to_owned()).await.unwrap();
    let changed = reconciler.limit_claims("pod".to_owned(), None).await.unwrap();
    assert_eq!(changed[0].given, changed[0].allocated);
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(native());
    assert_eq!((published(&bench).0, memory(&bench)), ([(0, 2), (1, 4)].into(), vec![(0, 512), (1, 2048)]));
    assert_eq!(reconciler.reserve_claim("u".to_owned(), both, None).await.unwrap(), reserved);
    reconciler.release_claim("u".to_owned()).await.unwrap();
    assert_eq!(published(&bench), (BTreeMap::new(), "0-7".to_owned()));
    let ledger = bench.host.assigned.lock().unwrap().ledger.clone();
    assert!(ledger.owners().next().is_none() && ledger.nodes().values().all(|node| node.assignments == 0));
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn host_claim_is_on_nodes_of_the_strategy() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start_with(native());
    let place = |uid: &str, cpus| reconciler.place_claim(uid.to_owned(), host_claim(cpus), None);
    for _ in 0..2 {
        assert_eq!(place("u", 6).await.unwrap(), PlacedClaim::Reserved);
    }
    let assigned = |bench: &DaemonBench| {
        let assigned = bench.host.assigned.lock().unwrap();
        let of_host = devices::charged_to_host(&assigned.ledger);
        (of_host.get("cpu").and_then(|cpus| cpus.units()), assigned.ledger.shared_pool().len())
    };
    assert_eq!(assigned(&bench), (Some(6), 2));
    assert!(published(&bench).0.is_empty(), "it is charged to no node");
    let shown = reconciler.allocations().claims.clone();
    assert_eq!((shown[0].nodes.as_str(), shown[0].used), ("0-1", false));
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(native());
    assert!(reconciler.reserved_claims().await.unwrap().get("u").unwrap().pending);
    // The kubelet has it prepared, and the scheduler's wait does not begin again.
    let prepared = ReservedClaim { pending: false, ..host_claim(6) };
    let reserve = || reconciler.reserve_claim("u".to_owned(), prepared.clone(), None);
    assert!(!reserve().await.unwrap().pending);
    let place = |uid: &str, cpus| reconciler.place_claim(uid.to_owned(), host_claim(cpus), None);
    assert_eq!(place("u", 6).await.unwrap(), PlacedClaim::Reserved);
    assert!(!reconciler.reserved_claims().await.unwrap().get("u").unwrap().pending);
    assert_eq!(assigned(&bench), (Some(6), 2));
    let refused = place("v", 4).await.unwrap_err().to_string();
    assert!(refused.contains("cpu requested 4, free 1 on node"), "{refused}");
    reconciler.release_claim("u".to_owned()).await.unwrap();
    assert_eq!(assigned(&bench), (None, 8));
    assert_eq!(place("v", 4).await.unwrap(), PlacedClaim::Reserved);
    stop.cancel();
    thread.join().unwrap();
}

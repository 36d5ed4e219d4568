//! Accounting during moves: no capacity is allocated twice, and every move can be reverted.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    ContainerMove, Ledger, NativeOptions, NativeStrategy, PolicyConfig, Quantity, RebalanceLimits, Request,
    Resources, Strategy, Terms,
    in_flight::{self, MoveConflict, RESERVE_OWNER},
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, MemoryTier, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

/// Makes three nodes with four CPUs and 8 GiB each. CPU 0 and 1 GiB of node 0 are reserved.
fn native() -> NativeStrategy {
    let machine =
        Machine::builder().nodes(3).sockets(3).cores_per_node(4).memory(Bytes::gib(8)).build().unwrap();
    NativeStrategy::new(&machine, &config(TopologyManagerPolicy::SingleNumaNode), &NativeOptions::default())
        .unwrap()
}

fn config(policy: TopologyManagerPolicy) -> PolicyConfig {
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]),
        }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(1)),
        topology_manager_policy: policy,
        ..PolicyConfig::default()
    }
}

fn request(name: &str, (cpus, gib): (u64, u64)) -> Request {
    let resources = Resources::none().with_cpu(Quantity::whole(cpus));
    Request::workload(name, resources.with_memory(Quantity::whole(Bytes::gib(gib).0)))
}

fn admit(native: &NativeStrategy, ledger: &Ledger, name: &str, node: u32, size: (u64, u64)) -> Ledger {
    let mut terms = Terms::default();
    terms.preferences.preferred.insert(name.into(), [NodeId(node)].into_iter().collect());
    let decision = native.admit_watched(ledger, &request(name, size), &terms, &|_| {});
    decision.outcome.unwrap();
    let ledger = native.note_started(&decision.ledger, &name.into(), &name.into());
    assert_eq!(
        ledger.allocation(&name.into(), &name.into()).unwrap().memory_nodes().to_string(),
        node.to_string()
    );
    ledger
}

fn free(ledger: &Ledger) -> Vec<u64> {
    ledger.nodes().values().map(|node| node.kinds[&ZoneKind::Memory].free.0 >> 30).collect()
}

/// Makes a move to the place that the container would get on an otherwise empty node.
fn to(native: &NativeStrategy, ledger: &Ledger, name: &str, node: u32, size: (u64, u64)) -> ContainerMove {
    let other = admit(native, &native.idle(), name, node, size);
    let from = ledger.allocation(&name.into(), &name.into()).unwrap().clone();
    let to = other.allocation(&name.into(), &name.into()).unwrap().clone();
    ContainerMove { owner: name.into(), container: name.into(), from, to, bytes: Bytes::gib(size.1) }
}

#[test]
fn begun_moves_can_be_reverted() {
    let native = native();
    let mut ledger = native.idle();
    ledger = admit(&native, &ledger, "a", 0, (1, 5));
    ledger = admit(&native, &ledger, "b", 1, (1, 4));
    assert_eq!(free(&ledger), [2, 4, 8]);
    let start = ledger.clone();
    // `b` leaves node 1, and `a` takes its place.
    let b = to(&native, &ledger, "b", 2, (1, 4));
    let a = to(&native, &ledger, "a", 1, (1, 5));
    let early = in_flight::begin_move(&native, &ledger, &[], &a).unwrap_err();
    assert!(
        matches!(early, MoveConflict::MemoryTaken { node: NodeId(1), .. } | MoveConflict::CpusTaken { .. }),
        "{early}"
    );
    assert_eq!(in_flight::feasible_order(&native, &ledger, &[a.clone(), b.clone()], &mut 9).unwrap()[0], b);

    ledger = in_flight::begin_move(&native, &ledger, &[], &b).unwrap();
    assert_eq!(free(&ledger), [2, 4, 4], "both sides are charged");
    let made = [b.clone()];
    ledger = in_flight::reserve_for(&native, &ledger, &made);
    assert_eq!(free(&ledger), [2, 4, 4], "also when the pages have arrived");
    ledger = in_flight::begin_move(&native, &ledger, &made, &a).unwrap();
    // `a` needs more on node 1 than `b` had there.
    assert_eq!(free(&ledger), [2, 3, 4]);
    // The former CPU of `a`, the CPU that it took over from `b`, and the new CPU of `b`.
    assert_eq!(ledger.shared_pool().len(), native.idle().shared_pool().len() - 3, "{}", ledger.shared_pool());
    let done = in_flight::reserve_for(&native, &ledger, &[]);
    assert_eq!(free(&done), [7, 3, 4]);
    assert!(done.owner(&RESERVE_OWNER.into()).is_none());
    assert_eq!(native.rebase(&done), (done.clone(), Vec::new()));

    // The way back, with both sides charged each time.
    let both = [b.clone(), a.clone()];
    ledger = in_flight::revert_move(&native, &ledger, &both).unwrap();
    assert_eq!(free(&ledger), [2, 3, 4]);
    ledger = in_flight::reserve_for(&native, &ledger, &made);
    assert_eq!(free(&ledger), [2, 4, 4]);
    ledger = in_flight::revert_move(&native, &ledger, &made).unwrap();
    assert_eq!(free(&ledger), [2, 4, 4]);
    ledger = in_flight::reserve_for(&native, &ledger, &[]);
    assert_eq!(ledger, start);
}

#[test]
fn swapping_moves_has_no_order() {
    let native = native();
    let mut ledger = admit(&native, &native.idle(), "a", 1, (4, 8));
    ledger = admit(&native, &ledger, "b", 2, (4, 8));
    let (a, b) = (to(&native, &ledger, "a", 2, (4, 8)), to(&native, &ledger, "b", 1, (4, 8)));
    assert_eq!(in_flight::feasible_order(&native, &ledger, &[a, b], &mut 9), None);
}

#[test]
fn detects_changes_since_the_plan() {
    let native = native();
    let ledger = admit(&native, &native.idle(), "a", 0, (1, 5));
    let a = to(&native, &ledger, "a", 1, (1, 5));
    let new = request("new", (3, 6));
    let asked = (&new, &Terms::default());
    in_flight::check_plan(&native, &ledger, std::slice::from_ref(&a), 0, asked).unwrap();
    for (name, node, size, words) in [
        ("memory", 1, (1, 4), "of memory free, less than the 5Gi that a needs there"),
        ("cpus", 1, (4, 1), "are not free any more"),
    ] {
        let mut other = admit(&native, &ledger, name, node, size);
        if name == "memory" {
            // Keeps the CPUs, so that only memory conflicts.
            other = admit(&native, &native.rebase(&other).0, "rest", 2, (1, 1));
        }
        let mut only = a.clone();
        if name == "memory" {
            only.to.cpus.clone_from(&only.from.cpus);
        }
        let stale = in_flight::begin_move(&native, &other, &[], &only).unwrap_err().to_string();
        assert!(stale.contains(words), "{stale}");
    }
    let others = [("x", 0, (2, 1)), ("y", 1, (1, 2)), ("z", 2, (2, 1))];
    let other = others
        .iter()
        .fold(ledger.clone(), |ledger, (name, node, size)| admit(&native, &ledger, name, *node, *size));
    let mut a = a;
    a.to.cpus = Some("7".parse().unwrap());
    let stale = in_flight::check_plan(&native, &other, std::slice::from_ref(&a), 0, asked).unwrap_err();
    assert!(matches!(stale, MoveConflict::RequestRefused(_)), "{stale}");
    let changed = native.release(&ledger, &"a".into());
    assert_eq!(
        in_flight::begin_move(&native, &changed, &[], &a),
        Err(MoveConflict::AllocationChanged("a".into()))
    );
}

/// A plan can be executed in its order, and the final ledger equals that of the plan.
#[test]
fn executed_plan_matches_its_decision() {
    let native = native();
    let mut ledger = native.idle();
    for (name, node, size) in [("a", 1, (1, 3)), ("b", 1, (1, 3)), ("c", 2, (1, 4)), ("d", 0, (1, 5))] {
        ledger = admit(&native, &ledger, name, node, size);
    }
    let start = ledger.clone();
    let new = request("new", (2, 5));
    let plan =
        Strategy::plan(&native, &ledger, &new, &Terms::default(), &RebalanceLimits::default()).unwrap();
    assert!(!plan.moves.is_empty());
    let mut begun = Vec::new();
    for next in &plan.moves {
        ledger = in_flight::begin_move(&native, &ledger, &begun, next).unwrap();
        begun.push(next.clone());
        assert_eq!(native.rebase(&ledger), (ledger.clone(), Vec::new()));
    }
    let decision = native.admit(&in_flight::reserve_for(&native, &ledger, &[]), &new);
    assert_eq!(decision.outcome.as_ref().unwrap(), plan.decision.outcome.as_ref().unwrap());
    let kept = RebalanceLimits { kept: ["a".into()].into(), ..RebalanceLimits::default() };
    // An existing allocation of the requesting owner is not a move.
    for ledger in [start.clone(), admit(&native, &start, "new", 0, (1, 1))] {
        let other = Strategy::plan(&native, &ledger, &new, &Terms::default(), &kept).unwrap();
        let moved: Vec<&str> = other.moves.iter().map(|of| of.owner.as_str()).collect();
        assert_eq!(moved, ["b"]);
    }
}

/// With `strict-cpu-reservation`, a plan leaves a CPU in the shared pool if a container needs it.
#[test]
fn plan_keeps_shared_pool_nonempty() {
    let machine =
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(8)).build().unwrap();
    let options = [("strict-cpu-reservation".to_owned(), "true".to_owned())];
    let config = PolicyConfig {
        cpu_manager_policy_options: options.into(),
        ..config(TopologyManagerPolicy::SingleNumaNode)
    };
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    // Node 0 has three allocatable CPUs, node 1 four.
    let mut ledger = admit(&native, &native.idle(), "a", 0, (1, 1));
    ledger = admit(&native, &ledger, "b", 1, (2, 1));
    let new = request("new", (3, 1));
    let plan = |ledger: &Ledger, new: &Request| {
        Strategy::plan(
            &native,
            ledger,
            new,
            &Terms { nodes: "0".parse().unwrap(), ..Terms::default() },
            &RebalanceLimits::default(),
        )
    };
    assert_eq!(plan(&ledger, &new).unwrap().decision.ledger.shared_pool().len(), 1);
    ledger = admit(&native, &ledger, "c", 1, (1, 1));
    assert!(plan(&ledger, &new).unwrap().decision.ledger.shared_pool().is_empty(), "nobody shares");
    let fraction = Resources::none().with_cpu(Quantity::milli(500));
    let fraction = Request::workload("d", fraction.with_memory(Quantity::whole(Bytes::gib(1).0)));
    ledger = native.admit(&ledger, &fraction).ledger;
    let refused = plan(&ledger, &new).map(|plan| plan.moves);
    assert!(refused.is_err(), "{refused:?}");
}

/// With `best-effort`, a request for a memory type or for nodes causes moves of workloads there.
#[test]
fn plan_frees_the_requested_nodes() {
    let machine = Machine::builder().nodes(1).cores_per_node(4).memory(Bytes::gib(17));
    let machine = machine
        .node(NodeId(1), |node| node.cores(0).memory(Bytes::gib(32)))
        .distances([[10, 14], [14, 10]])
        .build()
        .unwrap();
    let options =
        NativeOptions { memory_tiers: [(NodeId(1), MemoryTier::Cxl)].into(), ..NativeOptions::default() };
    let native = NativeStrategy::new(&machine, &config(TopologyManagerPolicy::BestEffort), &options).unwrap();
    let ledger = admit(&native, &native.idle(), "a", 0, (1, 12));
    let new = request("new", (1, 8));
    let dram = Terms { memory_tiers: [MemoryTier::Dram].into(), ..Terms::default() };
    let there = Terms { nodes: "0".parse().unwrap(), ..Terms::default() };
    for terms in [dram, there] {
        let plan = Strategy::plan(&native, &ledger, &new, &terms, &RebalanceLimits::default()).unwrap();
        assert_eq!((plan.moves.len(), plan.bytes), (1, Bytes::gib(12)));
        in_flight::check_plan(&native, &ledger, &plan.moves, 0, (&new, &terms)).unwrap();
    }
    // A workload that needs the same memory type cannot move.
    let dram = Terms { memory_tiers: [MemoryTier::Dram].into(), ..Terms::default() };
    let decision = native.admit_watched(&native.idle(), &request("a", (1, 12)), &dram, &|_| {});
    let ledger = native.note_started(&decision.ledger, &"a".into(), &"a".into());
    assert!(Strategy::plan(&native, &ledger, &new, &dram, &RebalanceLimits::default()).is_err());
}

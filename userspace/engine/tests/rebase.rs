//! Guarantees carried over to a changed machine: the guaranteed bytes of each node are exact afterwards.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    Allocation, ContainerRequest, KubeletStrategy, Ledger, MemoryBlock, NativeOptions, NativeStrategy,
    OwnerAccount, PolicyConfig, Quantity, Request, Resources, Strategy,
    kubelet::Checkpoints,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

const MEMORY: ZoneKind = ZoneKind::Memory;

/// Makes two nodes with these sizes in GiB. 1 GiB of node 0 is reserved.
fn strategy(memory: [u64; 2]) -> Box<dyn Strategy> {
    let mut machine =
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
    for (node, gib) in machine.nodes.values_mut().zip(memory) {
        node.memory = Bytes::gib(gib);
    }
    let limits = BTreeMap::from([(MEMORY, Quantity::whole(Bytes::gib(1).0))]);
    let config = PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits }],
        ..PolicyConfig::default()
    };
    Box::new(KubeletStrategy::new(&machine, &config).unwrap())
}

fn gib(memory: u64) -> Resources {
    Resources::none().with_cpu(Quantity::milli(1)).with_memory(Quantity::whole(Bytes::gib(memory).0))
}

fn admit(strategy: &dyn Strategy, ledger: &Ledger, name: &str, memory: u64) -> Ledger {
    let decision = strategy.admit(ledger, &Request::workload(name, gib(memory)));
    decision.outcome.unwrap();
    strategy.note_started(&decision.ledger, &name.into(), &name.into())
}

/// Returns the placed GiB of a workload by node.
fn placed(ledger: &Ledger, name: &str) -> [u64; 2] {
    let held = ledger.allocation(&name.into(), &name.into()).unwrap();
    [NodeId(0), NodeId(1)].map(|node| held.placed[&MEMORY].get(&node).map_or(0, |bytes| bytes.0 >> 30))
}

/// Returns the GiB by node: the sum of placed bytes, and the value of the account.
fn promised(ledger: &Ledger) -> [(u64, u64); 2] {
    [NodeId(0), NodeId(1)].map(|node| {
        let account = &ledger.nodes()[&node].kinds[&MEMORY];
        (ledger.memory()[&node][&MEMORY].guaranteed.0 >> 30, account.guaranteed.0 >> 30)
    })
}

#[test]
fn moved_memory_is_placed_where_charged() {
    let strategy = strategy([4, 4]);
    let strategy = &*strategy;
    // The kubelet credits released memory to the lowest node of a group, whichever node gave it.
    let ledger = admit(strategy, &strategy.idle(), "a", 5);
    let ledger = admit(strategy, &ledger, "b", 2);
    let ledger = strategy.release(&ledger, &"a".into());
    let ledger = admit(strategy, &ledger, "c", 3);
    let ledger = strategy.release(&ledger, &"b".into());
    let ledger = admit(strategy, &ledger, "d", 3);
    assert_eq!((placed(&ledger, "c"), placed(&ledger, "d")), ([3, 0], [2, 1]));
    assert_eq!(promised(&ledger), [(5, 3), (1, 3)], "node 0 has three");

    let (ledger, uncovered) = strategy.rebase(&ledger);
    assert_eq!(uncovered, []);
    assert_eq!((placed(&ledger, "c"), placed(&ledger, "d")), ([1, 2], [2, 1]));
    assert_eq!(promised(&ledger), [(3, 3), (3, 3)]);
    assert_eq!(strategy.rebase(&ledger), (ledger.clone(), Vec::new()), "once is enough");

    // A workload only releases its own bytes on that node.
    let ledger = strategy.resize(&ledger, &"d".into(), &"d".into(), &gib(1)).unwrap();
    assert_eq!((placed(&ledger, "c"), placed(&ledger, "d")), ([1, 2], [0, 1]));
    assert_eq!(promised(&ledger), [(1, 1), (3, 3)]);
}

#[test]
fn memory_that_fits_is_not_displaced() {
    let account = |nodes: [u64; 2]| {
        let bytes: Vec<_> = nodes.into_iter().map(Bytes::gib).collect();
        let placed = (0..).map(NodeId).zip(bytes.iter().copied()).filter(|(_, bytes)| bytes.0 > 0).collect();
        let all = Bytes(bytes.iter().map(|bytes| bytes.0).sum());
        let block = MemoryBlock { kind: MEMORY, affinity: "0-1".parse().unwrap(), bytes: all };
        let held =
            Allocation { blocks: vec![block], placed: [(MEMORY, placed)].into(), ..Allocation::default() };
        move |name: &str| OwnerAccount { containers: [(name.into(), held)].into(), ..OwnerAccount::default() }
    };
    let mut ledger = Ledger::default();
    ledger.adopt("a".into(), account([3, 0])("a")).unwrap();
    ledger.adopt("b".into(), account([0, 3])("b")).unwrap();
    // Node 0 lost one of its three GiB: one GiB of `a` moves to node 1, which is full then.
    let (moved, uncovered) = strategy([3, 4]).rebase(&ledger);
    assert_eq!(uncovered, []);
    assert_eq!((placed(&moved, "a"), placed(&moved, "b")), ([2, 1], [0, 3]));
    // Node 0 lost two GiB, and `b` keeps its memory.
    let (moved, uncovered) = strategy([2, 4]).rebase(&ledger);
    let missing: Vec<_> = uncovered.iter().map(|part| (part.owner.as_str(), part.block.bytes)).collect();
    assert_eq!(missing, [("a", Bytes::gib(1))]);
    assert_eq!((placed(&moved, "a"), placed(&moved, "b")), ([2, 1], [0, 3]));
    assert_eq!(promised(&moved), [(2, 1), (4, 4)], "more than there is");
    // The memory returns.
    let (back, uncovered) = strategy([4, 4]).rebase(&moved);
    assert_eq!(uncovered, []);
    assert_eq!(promised(&back), [(2, 2), (4, 4)]);
}

#[test]
fn shared_cpu_is_freed_by_last_owner() {
    let machine = Machine::builder().nodes(1).cores_per_node(8).memory(Bytes::gib(4)).build().unwrap();
    let config = PolicyConfig {
        cpu_manager_policy: CpuManagerPolicy::Static,
        reserved_system_cpus: "0".parse().unwrap(),
        cpu_reservation: Some(Quantity::whole(1)),
        ..PolicyConfig::default()
    };
    let kubelet = KubeletStrategy::new(&machine, &config).unwrap();
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let state = r#"{"policyName":"static","defaultCpuSet":"0,4-7","entries":{"p1":{"c":"1-2"},"p2":{"c":"2-3"}},"checksum":0}"#;
    let files = Checkpoints::read(Some(state), None, "", config.kubelet_version).unwrap();
    let taken_over = kubelet.finish_restore(&kubelet.restore(files, "").ledger.unwrap());
    for strategy in [&kubelet as &dyn Strategy, &native] {
        let mut ledger = strategy.rebase(&taken_over).0;
        for owner in ["p1", "p2"] {
            let containers = vec![ContainerRequest::guaranteed("c", gib(1).with_cpu(Quantity::whole(2)))];
            ledger.set_active(Request { containers, ..Request::workload(owner, Resources::none()) });
        }
        ledger = strategy.release(&ledger, &"p1".into());
        let held = |ledger: &Ledger, name: &str| {
            let request = Request::workload(name, gib(1).with_cpu(Quantity::whole(5)));
            let decision = strategy.admit(ledger, &request);
            let held = decision.outcome.map(|grants| grants[0].allocation.cpus.clone().unwrap().to_string());
            (held.map_err(|rejection| rejection.message), decision.ledger)
        };
        let (cpus, with_new) = held(&ledger, "new");
        assert_eq!(cpus.as_deref(), Ok("1,4-7"), "{strategy:?}");
        ledger = strategy.release(&with_new, &"new".into());
        ledger = strategy.release(&ledger, &"p2".into());
        let (cpus, with_last) = held(&ledger, "last");
        assert_eq!(cpus.as_deref(), Ok("1-5"), "{strategy:?}");
        assert_eq!(with_last.shared_pool().to_string(), "0,6-7");
    }
}

/// Node 0 lost a GiB. Node 1, the other node of `a`, is full with memory of `b`, which can move to node 2.
#[test]
fn covers_shortage_by_chained_moves() {
    let machine = |memory: [u64; 3]| {
        let mut machine =
            Machine::builder().nodes(3).sockets(3).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
        for (node, gib) in machine.nodes.values_mut().zip(memory) {
            node.memory = Bytes::gib(gib);
        }
        machine
    };
    let config = PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: BTreeMap::from([(MEMORY, Quantity::whole(Bytes::gib(1).0))]),
        }],
        ..PolicyConfig::default()
    };
    let strategies = |memory| -> [Box<dyn Strategy>; 2] {
        let native = NativeStrategy::new(&machine(memory), &config, &NativeOptions::default()).unwrap();
        [Box::new(native), Box::new(KubeletStrategy::new(&machine(memory), &config).unwrap())]
    };
    let account = |nodes: &str, gib: [u64; 3]| {
        let placed: BTreeMap<_, _> =
            (0..).map(NodeId).zip(gib.map(Bytes::gib)).filter(|(_, bytes)| bytes.0 > 0).collect();
        let bytes = Bytes(placed.values().map(|of| of.0).sum());
        let block = MemoryBlock { kind: MEMORY, affinity: nodes.parse().unwrap(), bytes };
        Allocation { blocks: vec![block], placed: [(MEMORY, placed)].into(), ..Allocation::default() }
    };
    let mut ledger = Ledger::default();
    for (name, nodes, gib) in [("a", "0-1", [3, 1, 0]), ("b", "1-2", [0, 3, 1])] {
        let containers = [(name.into(), account(nodes, gib))].into();
        ledger.adopt(name.into(), OwnerAccount { containers, ..OwnerAccount::default() }).unwrap();
    }
    let placed = |ledger: &Ledger, name: &str| {
        let held = ledger.allocation(&name.into(), &name.into()).unwrap();
        [0, 1, 2].map(|node| held.placed[&MEMORY].get(&NodeId(node)).map_or(0, |bytes| bytes.0 >> 30))
    };
    for strategy in strategies([3, 4, 4]) {
        let (moved, uncovered) = strategy.rebase(&ledger);
        assert_eq!(uncovered, []);
        assert_eq!((placed(&moved, "a"), placed(&moved, "b")), ([2, 2, 0], [0, 2, 2]));
    }
    // If all nodes are full, the shortage is reported.
    for strategy in strategies([3, 4, 1]) {
        let (_, uncovered) = strategy.rebase(&ledger);
        assert_eq!(uncovered.iter().map(|part| part.block.bytes).collect::<Vec<_>>(), [Bytes::gib(1)]);
    }
}

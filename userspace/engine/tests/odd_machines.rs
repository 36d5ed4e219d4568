//! Decisions of both strategies on unusual machines: node ids with gaps, and nodes without CPUs, without memory, without both, or
//! of different sizes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    Allocation, ContainerRequest, KubeletStrategy, NativeOptions, NativeStrategy, PolicyConfig, Quantity,
    Request, Resources, Strategy, Terms,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, CpuSet, HugepageSize, Machine, NodeId, NodeSet, ZoneKind};

const TWO_MIB: HugepageSize = HugepageSize(Bytes::mib(2));

/// Returns both strategies with this policy. One CPU is reserved, and 1 GiB of the node `kept`.
fn strategies(machine: &Machine, kept: u32, policy: TopologyManagerPolicy) -> [Box<dyn Strategy>; 2] {
    let config = config(kept, policy);
    [
        Box::new(KubeletStrategy::new(machine, &config).unwrap()),
        Box::new(NativeStrategy::new(machine, &config, &NativeOptions::default()).unwrap()),
    ]
}

fn config(kept: u32, policy: TopologyManagerPolicy) -> PolicyConfig {
    let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]);
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(kept), limits }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(1)),
        topology_manager_policy: policy,
        ..PolicyConfig::default()
    }
}

/// Decides on a sequence of requests for CPUs, memory and hugepages (both in MiB). Returns the allocations; `None` for a refused
/// request.
fn decide(strategy: &dyn Strategy, asked: &[(u64, u64, u64)]) -> Vec<Option<Allocation>> {
    let mut ledger = strategy.idle();
    let decide = |(number, &(cpus, memory, huge)): (usize, &(u64, u64, u64))| {
        let mut resources = Resources::none().with_cpu(Quantity::whole(cpus));
        resources = resources.with_memory(Quantity::whole(Bytes::mib(memory).0));
        if huge > 0 {
            resources = resources.with_hugepages(TWO_MIB, Quantity::whole(Bytes::mib(huge).0));
        }
        let name = format!("w{number}");
        let request = Request {
            owner: name.as_str().into(),
            init_containers: Vec::new(),
            containers: vec![ContainerRequest::guaranteed(name, resources)],
            resources: None,
        };
        let decision = strategy.admit_watched(&ledger, &request, &Terms::default(), &|_| {});
        ledger = decision.ledger;
        decision.outcome.ok().map(|grants| grants[0].allocation.clone())
    };
    asked.iter().enumerate().map(decide).collect()
}

fn cpus_and_nodes(got: &[Option<Allocation>]) -> Vec<Option<(u64, String)>> {
    let of = |allocation: &Allocation| {
        let cpus = allocation.cpus.as_ref().map_or(0, |cpus| cpus.len() as u64);
        (cpus, allocation.memory_nodes().to_string())
    };
    got.iter().map(|allocation| allocation.as_ref().map(of)).collect()
}

fn is_disjoint(got: &[Option<Allocation>]) -> bool {
    let all: Vec<u32> =
        got.iter().flatten().flat_map(|of| of.cpus.iter().flat_map(CpuSet::iter)).map(|cpu| cpu.0).collect();
    let mut unique = all.clone();
    unique.sort_unstable();
    unique.dedup();
    unique.len() == all.len()
}

#[test]
fn eight_nodes_with_memory_only_on_two() {
    let without = |builder: numaward_topology::MachineBuilder, node: u32| {
        builder.node(NodeId(node), |node| node.memory(Bytes(0)))
    };
    let builder = Machine::builder().nodes(8).sockets(2).cores_per_node(4).memory(Bytes::gib(8));
    let machine = [1, 2, 3, 5, 6, 7].into_iter().fold(builder, without).build().unwrap();
    // The strategy `kubelet` has nodes without memory among those to which it extends a hint.
    let together = ["0-1,4", "0,4"];
    for (strategy, nodes) in strategies(&machine, 0, TopologyManagerPolicy::BestEffort).iter().zip(together) {
        // More memory than a node has, and more than is left.
        let spread = decide(&**strategy, &[(2, 9 * 1024, 0), (2, 7 * 1024, 0)]);
        assert_eq!(cpus_and_nodes(&spread), [Some((2, nodes.to_owned())), None]);
        // More CPUs than a node has, and one that fits a node.
        let got = decide(&**strategy, &[(6, 1024, 0), (2, 1024, 0)]);
        let memory: NodeSet = "0,4".parse().unwrap();
        assert!(got.iter().flatten().all(|of| !(&of.memory_nodes() & &memory).is_empty()));
        let cpus: Vec<_> = cpus_and_nodes(&got).into_iter().map(|of| of.map(|of| of.0)).collect();
        assert_eq!(cpus, [Some(6), Some(2)]);
        assert!(is_disjoint(&got));
    }
    for strategy in strategies(&machine, 0, TopologyManagerPolicy::SingleNumaNode) {
        let got = decide(&*strategy, &[(4, 1024, 0), (4, 1024, 0)]);
        let nodes = cpus_and_nodes(&got);
        assert_eq!(
            nodes,
            [Some((4, "4".to_owned())), None],
            "node 0 has three CPUs left, and the others no memory"
        );
    }
}

#[test]
fn nodes_4_to_7_without_0() {
    let builder = Machine::builder().node_ids((4..8).map(NodeId)).sockets(2).cores_per_node(4);
    let machine = builder.memory(Bytes::gib(8)).build().unwrap();
    for strategy in strategies(&machine, 4, TopologyManagerPolicy::SingleNumaNode) {
        let got =
            decide(&*strategy, &[(4, 1024, 0), (4, 1024, 0), (4, 1024, 0), (3, 7 * 1024, 0), (1, 64, 0)]);
        let nodes: NodeSet =
            got.iter().flatten().flat_map(|of| of.memory_nodes().iter().collect::<Vec<_>>()).collect();
        assert_eq!(nodes, "4-7".parse().unwrap());
        assert!(got[..4].iter().all(Option::is_some) && got[4].is_none(), "{:?}", cpus_and_nodes(&got));
        for of in got.iter().flatten() {
            let node = of.memory_nodes().first().unwrap();
            assert!(of.cpus.as_ref().unwrap().is_subset(&machine.nodes[&node].cpus));
        }
        assert!(is_disjoint(&got));
    }
}

#[test]
fn sparse_ids_and_28_nodes_with_nothing() {
    let empty = |builder: numaward_topology::MachineBuilder, node: u32| {
        builder.node(NodeId(node), |node| node.cores(0).memory(Bytes(0)))
    };
    let builder = Machine::builder().node_ids([NodeId(0), NodeId(40)]).sockets(2).cores_per_node(4);
    let builder = (2..30).fold(builder.memory(Bytes::gib(8)), empty);
    let machine = builder.build().unwrap();
    assert_eq!(machine.nodes.len(), 30);
    let config = config(0, TopologyManagerPolicy::SingleNumaNode);
    let refused = KubeletStrategy::new(&machine, &config).unwrap_err().to_string();
    assert!(refused.contains("30") && refused.contains("20"), "the kubelet takes 20 nodes: {refused}");
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let got = decide(&native, &[(3, 1024, 0), (4, 1024, 0), (1, 64, 0)]);
    let mut nodes = cpus_and_nodes(&got);
    nodes.sort();
    assert_eq!(nodes, [None, Some((3, "0".to_owned())), Some((4, "40".to_owned()))]);
}

#[test]
fn pools_of_12_and_8_huge_pages() {
    let builder = Machine::builder().nodes(2).sockets(2).cores_per_node(8).memory(Bytes::gib(8));
    let builder = builder.node(NodeId(0), |node| node.hugepages(TWO_MIB, 12));
    let machine = builder.node(NodeId(1), |node| node.hugepages(TWO_MIB, 8)).build().unwrap();
    for strategy in strategies(&machine, 0, TopologyManagerPolicy::SingleNumaNode) {
        // 10 pages fit node 0 alone, 8 node 1, and of the last 2 on node 0 one gets both.
        let got = decide(&*strategy, &[(1, 64, 20), (1, 64, 16), (1, 64, 6), (1, 64, 4), (1, 64, 2)]);
        let nodes: Vec<_> =
            got.iter().map(|of| of.as_ref().map(|of| of.memory_nodes().to_string())).collect();
        assert_eq!(nodes, [Some("0".to_owned()), Some("1".to_owned()), None, Some("0".to_owned()), None]);
    }
    for strategy in strategies(&machine, 0, TopologyManagerPolicy::BestEffort) {
        let got = decide(&*strategy, &[(1, 64, 40), (1, 64, 2)]);
        assert_eq!(got[0].as_ref().unwrap().memory_nodes(), "0-1".parse().unwrap());
        assert!(got[1].is_none());
    }
}

#[test]
fn more_than_1024_cpus() {
    let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(192).smt(2).memory(Bytes::gib(64));
    let machine = machine.build().unwrap();
    assert_eq!(machine.cpus.len(), 1536);
    for strategy in strategies(&machine, 0, TopologyManagerPolicy::SingleNumaNode) {
        let got =
            decide(&*strategy, &[(384, 1024, 0), (384, 1024, 0), (384, 1024, 0), (382, 1024, 0), (4, 64, 0)]);
        assert!(got[..4].iter().all(Option::is_some) && got[4].is_none(), "{:?}", cpus_and_nodes(&got));
        assert!(got.iter().flatten().any(|of| of.cpus.as_ref().unwrap().iter().any(|cpu| cpu.0 > 1024)));
        assert!(is_disjoint(&got));
    }
}

//! Pods designed to make decisions slow: they fit in many ways, and usually the last init container does not fit.

use std::collections::BTreeMap;

use numaward_engine::{
    ContainerRequest, Ledger, NativeOptions, NativeStrategy, PolicyConfig, Quantity, Request, Resources,
    Strategy as _, Terms,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

/// Pod with the host that decides it.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) native: NativeStrategy,
    pub(crate) ledger: Ledger,
    pub(crate) pod: Request,
}

fn config(policy: TopologyManagerPolicy) -> PolicyConfig {
    let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]);
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(2)),
        topology_manager_policy: policy,
        ..PolicyConfig::default()
    }
}

pub(crate) fn container(name: String, cpus: u64, gib: u64) -> ContainerRequest {
    let memory = Quantity::whole(Bytes::gib(gib).0);
    ContainerRequest::guaranteed(name, Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(memory))
}

/// Makes a pod of init containers and app containers with these CPUs and GiB; `stays` adds a sidecar in front.
fn pod(stays: Option<(u64, u64)>, init: &[(u64, u64)], apps: &[(u64, u64)]) -> Request {
    let named = |prefix: &'static str, of: &[(u64, u64)]| -> Vec<ContainerRequest> {
        let named = |(index, &(cpus, gib))| container(format!("{prefix}{index}"), cpus, gib);
        of.iter().enumerate().map(named).collect()
    };
    let stays = stays.map(|(cpus, gib)| ContainerRequest {
        restartable: true,
        ..container("stays".to_owned(), cpus, gib)
    });
    Request {
        owner: "pod".into(),
        init_containers: stays.into_iter().chain(named("i", init)).collect(),
        containers: named("c", apps),
        resources: None,
    }
}

/// Kind of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostKind {
    /// Equal nodes of 64 CPUs and 256 GiB.
    Even,
    /// All nodes differ in free capacity and distances.
    Uneven,
    /// Every second node has no CPUs and is near to one with CPUs. All have 64 GiB.
    MemoryOnly,
    /// Like `Even`, but only whole cores are taken, and one core has one CPU.
    UnequalCores,
}

/// Makes an idle host with memory-only nodes.
fn memory_only(nodes: u32, policy: TopologyManagerPolicy) -> (NativeStrategy, Ledger) {
    let half = nodes / 2;
    let mut builder = Machine::builder().nodes(half).cores_per_node(8).smt(2).memory(Bytes::gib(64));
    for id in half..nodes {
        builder = builder.node(NodeId(id), |node| node.cores(0).memory(Bytes::gib(64)));
    }
    let between = |a: u32, b: u32| match (a, b) {
        _ if a == b => 10,
        _ if a % half == b % half => 14,
        _ => 20,
    };
    let rows = (0..nodes).map(|a| (0..nodes).map(|b| between(a, b)).collect::<Vec<_>>());
    let machine = builder.distances(rows.collect::<Vec<_>>()).build().unwrap();
    let native = NativeStrategy::new(&machine, &config(policy), &NativeOptions::default()).unwrap();
    let ledger = native.idle();
    (native, ledger)
}

/// Makes an idle host with a core of one CPU. Only whole cores are taken.
pub(crate) fn unequal_cores(nodes: u32, policy: TopologyManagerPolicy) -> (NativeStrategy, Ledger) {
    let builder = Machine::builder().nodes(nodes).sockets(nodes.div_ceil(8)).cores_per_node(32).smt(2);
    let mut machine = builder.memory(Bytes::gib(256)).build().unwrap();
    let last = machine.cpu_ids().last().unwrap();
    machine.cpus.remove(&last);
    for node in machine.nodes.values_mut() {
        node.cpus.remove(last);
    }
    let config = PolicyConfig {
        cpu_manager_policy_options: [("full-pcpus-only".to_owned(), "true".to_owned())].into(),
        cpu_reservation: Some(Quantity::whole(1)),
        reserved_system_cpus: "0".parse().unwrap(),
        ..config(policy)
    };
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let ledger = native.idle();
    (native, ledger)
}

fn host(nodes: u32, policy: TopologyManagerPolicy, kind: HostKind) -> (NativeStrategy, Ledger) {
    let uneven = match kind {
        HostKind::MemoryOnly => return memory_only(nodes, policy),
        HostKind::UnequalCores => return unequal_cores(nodes, policy),
        HostKind::Even => false,
        HostKind::Uneven => true,
    };
    let mut builder = Machine::builder().nodes(nodes).sockets(nodes.div_ceil(8));
    builder = builder.cores_per_node(32).smt(2).memory(Bytes::gib(256));
    let between = |a: u32, b: u32| match (a.min(b), a.max(b)) {
        (low, high) if low == high => 10,
        (low, high) => 11 + (low * 31 + high * 17) % 50,
    };
    if uneven {
        let rows = (0..nodes).map(|a| (0..nodes).map(|b| between(a, b)).collect::<Vec<_>>());
        builder = builder.distances(rows.collect::<Vec<_>>());
    } else {
        builder = builder.socket_distances(12, 32);
    }
    let native =
        NativeStrategy::new(&builder.build().unwrap(), &config(policy), &NativeOptions::default()).unwrap();
    let mut ledger = native.idle();
    if uneven {
        for node in 0..nodes {
            let owner = format!("o{node:03}");
            let size = container(owner.clone(), 1 + u64::from(node * 7 % 40), 1 + u64::from(node * 13 % 150));
            let request = Request {
                owner: owner.as_str().into(),
                init_containers: Vec::new(),
                containers: vec![size],
                resources: None,
            };
            let policy = Some(TopologyManagerPolicy::SingleNumaNode);
            let mut terms = Terms { policy, ..Terms::default() };
            terms.preferences.preferred.insert(owner.as_str().into(), [NodeId(node)].into_iter().collect());
            ledger = native.admit_watched(&ledger, &request, &terms, &|_| {}).ledger;
        }
    }
    (native, ledger)
}

/// Returns all cases for a host with this number of nodes.
pub(crate) fn cases(nodes: u32) -> impl Iterator<Item = Case> {
    named(nodes, |_| true)
}

/// Returns the cases with a wanted name.
pub(crate) fn named(nodes: u32, is_wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = Case> {
    use HostKind::{Even, MemoryOnly, UnequalCores, Uneven};
    use TopologyManagerPolicy::{BestEffort, Restricted, SingleNumaNode};

    let all = u64::from(nodes) * 64;
    let case = |name, policy, kind, pod| (name, policy, kind, pod);
    // The first init container is too large by itself, or too large in addition to the sidecar.
    let too_large = |count: usize, first: (u64, u64)| -> Vec<(u64, u64)> {
        let small = (0..count as u64).map(|index| (1 + index % 3, 1 + index % 5));
        std::iter::once(first).chain(small).collect()
    };
    let wide = |count: usize, first: (u64, u64)| -> Vec<(u64, u64)> {
        let of = |index: u64| (130 + index, 530 + index);
        std::iter::once(first).chain((0..count as u64).map(of)).collect()
    };
    let small = [(2, 4), (3, 5), (4, 6), (5, 7)];
    let growing =
        |count: u64, gib: u64| -> Vec<(u64, u64)> { (0..count).map(|index| (2, gib + index)).collect() };
    let cases = vec![
        case(
            "an init container that fits no node",
            SingleNumaNode,
            Even,
            pod(None, &too_large(100, (100, 1)), &small),
        ),
        case(
            "an init container larger than the host",
            BestEffort,
            Even,
            pod(None, &too_large(500, (all + 1, 1)), &small),
        ),
        case(
            "an init container too large beside a sidecar",
            BestEffort,
            Even,
            pod(Some((4, 1)), &too_large(100, (all - 3, 1)), &small),
        ),
        case(
            "500 init containers, the first too large beside a sidecar",
            SingleNumaNode,
            Uneven,
            pod(Some((30, 1)), &too_large(500, (62, 1)), &small),
        ),
        case("all wide", BestEffort, Uneven, pod(None, &wide(11, (all + 1, 1)), &wide(3, (129, 529)))),
        case(
            "all wide beside a sidecar",
            BestEffort,
            Uneven,
            pod(Some((4, 1)), &wide(11, (all / 2, 1)), &wide(3, (129, 529))),
        ),
        case(
            "all wide, each on its least nodes",
            Restricted,
            Uneven,
            pod(Some((4, 1)), &wide(11, (all / 2, 1)), &wide(3, (129, 529))),
        ),
        case("many wide containers", BestEffort, Uneven, pod(None, &[], &wide(30, (129, 529)))),
        case("many small containers", Restricted, Uneven, pod(None, &[], &too_large(200, (63, 250)))),
        case(
            "init containers on memory-only nodes",
            Restricted,
            MemoryOnly,
            pod(None, &growing(500, all / 2), &[(2, 1)]),
        ),
        case(
            "containers on memory-only nodes",
            Restricted,
            MemoryOnly,
            pod(None, &[], &growing(30, all / 40)),
        ),
        case("whole cores of nearly all nodes", BestEffort, UnequalCores, pod(None, &[], &[(all - 10, 1)])),
        case(
            "whole cores of half of the nodes",
            Restricted,
            UnequalCores,
            pod(None, &[], &[(all / 2 - 1, 1)]),
        ),
        case("whole cores of three nodes", BestEffort, UnequalCores, pod(None, &[], &[(130, 1); 30])),
    ];
    cases.into_iter().filter(move |(name, ..)| is_wanted(name)).map(move |(name, policy, kind, pod)| {
        let (native, ledger) = host(nodes, policy, kind);
        Case { name, native, ledger, pod }
    })
}

//! Pods designed to make decisions slow: the running containers fit in many ways, and the last init container does
//! not fit.

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

fn container(name: String, cpus: u64, gib: u64) -> ContainerRequest {
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

/// Makes a host with nodes of 64 CPUs and 256 GiB. With `uneven`, all nodes differ in free capacity and distances.
fn host(nodes: u32, policy: TopologyManagerPolicy, uneven: bool) -> (NativeStrategy, Ledger) {
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
    use TopologyManagerPolicy::{BestEffort, Restricted, SingleNumaNode};
    let all = u64::from(nodes) * 64;
    let case = |name, policy, uneven, pod| (name, policy, uneven, pod);
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
    let cases = vec![
        case(
            "an init container that fits no node",
            SingleNumaNode,
            false,
            pod(None, &too_large(100, (100, 1)), &small),
        ),
        case(
            "an init container larger than the host",
            BestEffort,
            false,
            pod(None, &too_large(500, (all + 1, 1)), &small),
        ),
        case(
            "an init container too large beside a sidecar",
            BestEffort,
            false,
            pod(Some((4, 1)), &too_large(100, (all - 3, 1)), &small),
        ),
        case(
            "500 init containers, the first too large beside a sidecar",
            SingleNumaNode,
            true,
            pod(Some((30, 1)), &too_large(500, (62, 1)), &small),
        ),
        case("all wide", BestEffort, true, pod(None, &wide(11, (all + 1, 1)), &wide(3, (129, 529)))),
        case(
            "all wide beside a sidecar",
            BestEffort,
            true,
            pod(Some((4, 1)), &wide(11, (all / 2, 1)), &wide(3, (129, 529))),
        ),
        case(
            "all wide, each on its least nodes",
            Restricted,
            true,
            pod(Some((4, 1)), &wide(11, (all / 2, 1)), &wide(3, (129, 529))),
        ),
        case("many wide containers", BestEffort, true, pod(None, &[], &wide(30, (129, 529)))),
        case("many small containers", Restricted, true, pod(None, &[], &too_large(200, (63, 250)))),
    ];
    cases.into_iter().filter(move |(name, ..)| is_wanted(name)).map(move |(name, policy, uneven, pod)| {
        let (native, ledger) = host(nodes, policy, uneven);
        Case { name, native, ledger, pod }
    })
}

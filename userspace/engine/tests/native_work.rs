//! The work of a decision is bounded for every pod.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::{Duration, Instant};

use numaward_engine::{
    ContainerRequest, NativeOptions, NativeStrategy, PolicyConfig, Quantity, RebalanceLimits, Request,
    Resources, Strategy as _, Terms,
    native::MAX_WORK,
    policy::{
        CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, Tiers, TopologyManagerPolicy,
        TopologyManagerScope,
    },
};
use numaward_topology::{Bytes, HugepagePool, HugepageSize, Machine, NodeId, ZoneKind};
use proptest::{collection, prelude::*, sample};

mod adversarial;

const PAGE: HugepageSize = HugepageSize(Bytes::mib(2));

#[test]
fn decision_time_is_bounded() {
    let mut gave_up = 0;
    // The benchmark also covers 128 nodes.
    for nodes in [8, 16, 64] {
        for case in adversarial::cases(nodes) {
            let start = Instant::now();
            let decision = case.native.admit(&case.ledger, &case.pod);
            let (took, explanation) = (start.elapsed(), &decision.explanation);
            let what = format!("{nodes} nodes, {}: {took:?}, {}", case.name, explanation.work);
            // The container runtime waits two seconds. A debug build is many times slower than a release.
            assert!(took < Duration::from_secs(2), "{what}");
            assert!(explanation.work < MAX_WORK / 4 * 5, "{what}");
            if explanation.work_limit_reached {
                let rejection = decision.outcome.unwrap_err();
                gave_up += 1;
                assert!(
                    rejection.message.contains("the search stopped at its work limit"),
                    "{what}: {rejection}"
                );
            }
        }
    }
    assert!(gave_up > 0, "none of them is hard");
}

#[test]
fn places_many_fitting_containers() {
    for (nodes, name) in [
        (64, "all wide beside a sidecar"),
        (64, "500 init containers, the first too large beside a sidecar"),
        (128, "many wide containers"),
        (64, "containers on memory-only nodes"),
        (128, "containers on memory-only nodes"),
        (16, "whole cores of half of the nodes"),
        (128, "whole cores of half of the nodes"),
        (128, "whole cores of nearly all nodes"),
        (128, "whole cores of three nodes"),
    ] {
        let case = adversarial::named(nodes, |of| of == name).next().unwrap();
        let decision = case.native.admit(&case.ledger, &case.pod);
        assert!(decision.outcome.is_ok(), "{nodes} nodes, {name}: {:?}", decision.outcome);
    }
}

/// Each init container needs half of the memory.
#[test]
fn places_many_init_containers() {
    for nodes in [16, 32, 64] {
        let name = "init containers on memory-only nodes";
        let case = adversarial::named(nodes, |of| of == name).next().unwrap();
        let mut pod = case.pod;
        pod.init_containers.truncate(20);
        let decision = case.native.admit(&case.ledger, &pod);
        assert!(decision.outcome.is_ok(), "{nodes}: {:?}", decision.outcome);
    }
}

#[test]
fn whole_cores_cost_little_work() {
    use TopologyManagerPolicy::{BestEffort, Restricted};

    for (policy, nodes, sizes) in [
        (BestEffort, 16, vec![511]),
        (BestEffort, 64, vec![4086]),
        (BestEffort, 64, vec![6; 100]),
        (BestEffort, 128, vec![8182]),
        (BestEffort, 128, vec![4094]),
        (BestEffort, 128, vec![4095]),
        (Restricted, 128, vec![4095]),
        (Restricted, 16, vec![511]),
        (BestEffort, 128, vec![130; 30]),
        (BestEffort, 128, vec![6; 100]),
    ] {
        let (native, idle) = adversarial::unequal_cores(nodes, policy);
        let container = |(index, &cpus): (usize, &u64)| adversarial::container(format!("c{index}"), cpus, 1);
        let containers = sizes.iter().enumerate().map(container).collect();
        let request = Request { containers, ..Request::workload("new", Resources::none()) };
        let decision = native.admit(&idle, &request);
        let work = decision.explanation.work;
        assert!(decision.outcome.is_ok(), "{nodes} {sizes:?} {work}: {:?}", decision.outcome);
        assert!(work < MAX_WORK / 4 * 3, "{nodes} {sizes:?} {work}");
    }
}

/// The work for a plan is bounded as well, by that of about six decisions.
#[test]
fn plan_time_is_bounded() {
    for nodes in [8, 16] {
        for case in adversarial::cases(nodes) {
            let start = Instant::now();
            let plan =
                case.native.plan(&case.ledger, &case.pod, &Terms::default(), &RebalanceLimits::default());
            let took = start.elapsed();
            assert!(
                took < Duration::from_secs(10),
                "{nodes} nodes, {}: {took:?}, {}",
                case.name,
                plan.is_some()
            );
        }
    }
}

/// Makes containers of half CPUs, multiples of 256 MiB, and some huge pages.
fn containers(most: usize) -> impl Strategy<Value = Vec<(u64, u64, u64, bool)>> {
    let size = (1u64..=60, 1u64..=60, prop_oneof![Just(0), 1u64..=200], any::<bool>());
    collection::vec((size, 1usize..=4), 0..=most)
        .prop_map(|of| of.into_iter().flat_map(|(size, count)| std::iter::repeat_n(size, count)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn decision_work_is_bounded(
        nodes in collection::vec((0u32..=8, 1u64..=16, 0u64..=100), 2..=64),
        (distances, smt, offline) in (collection::vec(11u32..=14, 64), 1u32..=2, any::<bool>()),
        policy in sample::select(TopologyManagerPolicy::ALL),
        scope in sample::select(TopologyManagerScope::ALL),
        (is_strict, whole_cores, by_socket) in (any::<bool>(), any::<bool>(), any::<bool>()),
        (init, apps) in (containers(20), containers(6)),
        devices in collection::btree_set(0u32..64, 0..=3),
    ) {
        let count = u32::try_from(nodes.len()).unwrap();
        let mut builder = Machine::builder().nodes(count).sockets(1).smt(smt).cores_per_node(1).memory(Bytes::gib(1));
        for (id, &(cores, gib, _)) in (0..).zip(&nodes) {
            let cores = if id == 0 { cores + 1 } else { cores };
            builder = builder.node(NodeId(id), |node| node.cores(cores).memory(Bytes::gib(gib)));
        }
        let between = |a: u32, b: u32| {
            if a == b { 10 } else { distances[usize::try_from((a.min(b) * 7 + a.max(b)) % 64).unwrap()] }
        };
        let rows = (0..count).map(|a| (0..count).map(|b| between(a, b)).collect::<Vec<_>>());
        let mut machine = builder.distances(rows.collect::<Vec<_>>()).build().unwrap();
        for (node, (_, _, pages)) in machine.nodes.values_mut().zip(&nodes) {
            node.hugepages.insert(PAGE, HugepagePool { total: *pages, free: *pages, surplus: 0 });
        }
        if offline && machine.cpus.len() > 4 {
            let last = machine.cpu_ids().last().unwrap();
            machine.cpus.remove(&last);
            for node in machine.nodes.values_mut() {
                node.cpus.remove(last);
            }
        }
        let mut options = vec![];
        if whole_cores {
            options.push("full-pcpus-only");
        }
        if by_socket && policy != TopologyManagerPolicy::SingleNumaNode {
            options.push("align-by-socket");
        }
        let config = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: [(ZoneKind::Memory, Quantity::whole(Bytes::mib(64).0))].into(),
            }],
            cpu_manager_policy: CpuManagerPolicy::Static,
            cpu_reservation: Some(Quantity::whole(1)),
            cpu_manager_policy_options: options.into_iter().map(|name| (name.to_owned(), "true".to_owned())).collect(),
            topology_manager_policy: policy,
            topology_manager_scope: scope,
            ..PolicyConfig::default()
        };
        let tiers = if is_strict { Tiers::Strict } else { Tiers::Attached };
        let native = NativeStrategy::new(&machine, &config, &NativeOptions { tiers, ..NativeOptions::default() }).unwrap();
        let named = |prefix: &str, of: &[(u64, u64, u64, bool)]| -> Vec<ContainerRequest> {
            let container = |(index, &(cpus, memory, pages, restartable)): (usize, &(u64, u64, u64, bool))| {
                let mut resources = Resources::none()
                    .with_cpu(Quantity::milli(cpus * 500))
                    .with_memory(Quantity::whole(memory << 28));
                if pages > 0 {
                    resources = resources.with_hugepages(PAGE, Quantity::whole(pages << 21));
                }
                let container = ContainerRequest::guaranteed(format!("{prefix}{index}"), resources);
                ContainerRequest { restartable: restartable && prefix == "i", ..container }
            };
            of.iter().enumerate().map(container).collect()
        };
        let pod = Request {
            owner: "pod".into(),
            init_containers: named("i", &init),
            containers: named("c", &[&[(1, 1, 0, false)], apps.as_slice()].concat()),
            resources: None,
        };
        let mut terms = Terms::default();
        if !devices.is_empty() {
            terms.preferences.devices.insert("c0".into(), devices.into_iter().map(NodeId).collect());
        }
        let start = Instant::now();
        let decision = native.admit_watched(&native.idle(), &pod, &terms, &|_| {});
        let (took, work) = (start.elapsed(), decision.explanation.work);
        prop_assert!(work < MAX_WORK / 4 * 5, "{}", work);
        prop_assert!(took < Duration::from_secs(2), "{:?}", took);
    }
}

//! Terms of requests, resizes, moves and explanations with the strategy `native`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeMap, sync::Arc};

use numaward_engine::{
    Allocation, Cause, ContainerRequest, Decision, HostConditions, KubeletStrategy, Ledger, NativeOptions,
    NativeStrategy, OwnerAccount, PlacementPreferences, PolicyConfig, Quantity, Reason, RebalanceLimits,
    Request, Resources, Strategy, Terms,
    hint::Resource,
    placement_search::{PlacementVerdict, RankCriterion},
    policy::{
        CpuKind, CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, MemoryTier, Tiers,
        TopologyManagerPolicy, TopologyManagerScope,
    },
};
use numaward_topology::{Bytes, CpuId, CpuSet, Machine, NodeId, ZoneKind};

const MEMORY: ZoneKind = ZoneKind::Memory;

/// Makes two sockets with a node of 8 CPUs and 8 GiB each, and a node of 32 GiB without CPUs near node 1.
fn machine() -> Machine {
    Machine::builder()
        .nodes(4)
        .sockets(2)
        .cores_per_node(4)
        .smt(2)
        .memory(Bytes::gib(8))
        .node(NodeId(4), |node| node.cores(0).memory(Bytes::gib(32)))
        .distances([
            [10, 12, 32, 32, 24],
            [12, 10, 32, 32, 14],
            [32, 32, 10, 12, 34],
            [32, 32, 12, 10, 34],
            [24, 14, 34, 34, 10],
        ])
        .build()
        .unwrap()
}

fn config(policy: TopologyManagerPolicy) -> PolicyConfig {
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: BTreeMap::from([(MEMORY, Quantity::whole(Bytes::gib(1).0))]),
        }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(2)),
        topology_manager_policy: policy,
        ..PolicyConfig::default()
    }
}

fn native(policy: TopologyManagerPolicy) -> NativeStrategy {
    let options =
        NativeOptions { memory_tiers: [(NodeId(4), MemoryTier::Cxl)].into(), ..NativeOptions::default() };
    NativeStrategy::new(&machine(), &config(policy), &options).unwrap()
}

fn resources(cpus: u64, gib: u64) -> Resources {
    Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(gib).0))
}

fn decide(
    native: &NativeStrategy,
    ledger: &Ledger,
    name: &str,
    amounts: (u64, u64),
    terms: &Terms,
) -> Decision {
    let request = Request::workload(name, resources(amounts.0, amounts.1));
    native.admit_watched(ledger, &request, terms, &|_| {})
}

/// Admits a request and starts its containers.
fn admit(native: &NativeStrategy, ledger: &Ledger, name: &str, amounts: (u64, u64), terms: &Terms) -> Ledger {
    let decision = decide(native, ledger, name, amounts, terms);
    decision.outcome.unwrap();
    native.note_started(&decision.ledger, &name.into(), &name.into())
}

/// Returns the memory nodes of a workload.
fn nodes(ledger: &Ledger, name: &str) -> String {
    ledger.allocation(&name.into(), &name.into()).unwrap().memory_nodes().to_string()
}

/// Returns the memory nodes of an admission, or "refused".
fn place(native: &NativeStrategy, ledger: &Ledger, amounts: (u64, u64), terms: &Terms) -> String {
    let decision = decide(native, ledger, "new", amounts, terms);
    if decision.outcome.is_ok() { nodes(&decision.ledger, "new") } else { "refused".to_owned() }
}

#[test]
fn terms_choose_how_tiers_count() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let idle = native.idle();
    let strict = Terms { tiers: Some(Tiers::Strict), ..Terms::default() };
    assert_eq!(place(&native, &idle, (2, 20), &Terms::default()), "4");
    assert_eq!(place(&native, &idle, (2, 20), &strict), "refused");
    assert_eq!(place(&native, &idle, (2, 4), &Terms::default()), "0", "a node that has all is better");
    let dram = Terms { memory_tiers: [MemoryTier::Dram].into(), ..Terms::default() };
    let cxl = Terms { memory_tiers: [MemoryTier::Cxl].into(), ..Terms::default() };
    assert_eq!(place(&native, &idle, (2, 20), &dram), "refused");
    assert_eq!(place(&native, &idle, (2, 4), &cxl), "4");
}

#[test]
fn many_memory_only_nodes_are_attached() {
    // Twelve nodes with 4 CPUs and 16 GiB, and for each a nearby node of 64 GiB without CPUs.
    let mut builder = Machine::builder().nodes(12).cores_per_node(4).memory(Bytes::gib(16));
    for id in 12..24 {
        builder = builder.node(NodeId(id), |node| node.cores(0).memory(Bytes::gib(64)));
    }
    let between = |a: u32, b: u32| {
        if a == b {
            10
        } else if a % 12 == b % 12 {
            14
        } else {
            20
        }
    };
    let rows = (0..24).map(|a| (0..24).map(|b| between(a, b)).collect::<Vec<_>>());
    let machine = builder.distances(rows.collect::<Vec<_>>()).build().unwrap();
    let native =
        NativeStrategy::new(&machine, &config(TopologyManagerPolicy::Restricted), &NativeOptions::default())
            .unwrap();
    for cpus in [4, 8, 20, 36] {
        let decision = decide(&native, &native.idle(), "new", (cpus, 700), &Terms::default());
        assert!(decision.outcome.is_ok(), "{cpus}: {:?}", decision.outcome);
    }
    assert_eq!(place(&native, &native.idle(), (8, 1000), &Terms::default()), "refused");
}

/// Returns the exclusive CPUs of a workload.
fn cpus(ledger: &Ledger, name: &str) -> String {
    ledger.allocation(&name.into(), &name.into()).unwrap().cpus.as_ref().unwrap().to_string()
}

#[test]
fn respects_cpu_kinds() {
    use CpuKind::{Efficiency, HighFrequency, Isolated, NohzFull, Performance};

    // Two nodes with 4 CPUs each; CPU 0 is reserved.
    let machine = Machine::builder()
        .nodes(2)
        .sockets(2)
        .cores_per_node(4)
        .memory(Bytes::gib(8))
        .isolated_cpus("2-3,6".parse().unwrap())
        .nohz_full_cpus("3,6-7".parse().unwrap())
        .efficiency_cpus("4-5".parse().unwrap())
        .lower_frequency_cpus("0,2,4-6".parse().unwrap())
        .build()
        .unwrap();
    let config = PolicyConfig {
        cpu_reservation: Some(Quantity::whole(1)),
        ..config(TopologyManagerPolicy::SingleNumaNode)
    };
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let of = |kinds: &[CpuKind]| Terms { cpu_kinds: kinds.iter().copied().collect(), ..Terms::default() };
    let idle = native.idle();
    let placed = |ledger: &Ledger, count, kinds: &[CpuKind]| {
        let decision = decide(&native, ledger, "new", (count, 1), &of(kinds));
        decision.outcome.map(|_| cpus(&decision.ledger, "new")).map_err(|rejection| rejection.to_string())
    };
    let refused = |ledger: &Ledger, count, kinds: &[CpuKind]| placed(ledger, count, kinds).is_err();
    assert_eq!(placed(&idle, 2, &[Isolated]).unwrap(), "2-3");
    assert_eq!(placed(&idle, 2, &[NohzFull]).unwrap(), "6-7", "two of one node");
    assert_eq!(placed(&idle, 2, &[Efficiency]).unwrap(), "4-5");
    assert_eq!(placed(&idle, 2, &[Performance]).unwrap(), "1-2", "and not from where slower ones are");
    assert_eq!(placed(&idle, 2, &[HighFrequency]).unwrap(), "1,3");
    assert_eq!(placed(&idle, 1, &[HighFrequency, Isolated]).unwrap(), "3");
    assert!(refused(&idle, 3, &[HighFrequency]), "not on one node");
    assert_eq!(placed(&idle, 1, &[Isolated, NohzFull]).unwrap(), "3");
    assert!(refused(&idle, 1, &[Efficiency, Isolated]), "there is none that is both");
    assert!(refused(&idle, 3, &[Isolated]), "not on one node");
    let held = admit(&native, &idle, "held", (1, 1), &of(&[Isolated]));
    let resize = |count| native.resize(&held, &"held".into(), &"held".into(), &resources(count, 1));
    assert_eq!(cpus(&resize(2).unwrap(), "held"), "2-3");
    assert!(resize(3).is_err(), "no other CPU will do");
    // A workload that accepts any CPU moves away from the requested kind.
    let any = admit(&native, &idle, "any", (3, 1), &Terms::default());
    assert_eq!(cpus(&any, "any"), "1-3");
    assert!(refused(&any, 2, &[Isolated]));
    let request = Request::workload("new", resources(2, 1));
    let plan = native.plan(&any, &request, &of(&[Isolated]), &RebalanceLimits::default()).unwrap();
    assert_eq!((cpus(&plan.decision.ledger, "new"), plan.moves.len()), ("2-3".to_owned(), 1));
    // The same, restricted to a node.
    let there = Terms { nodes: "0".parse().unwrap(), ..Terms::default() };
    let plan = native.plan(&any, &request, &there, &RebalanceLimits::default()).unwrap();
    assert_eq!((cpus(&plan.decision.ledger, "new"), plan.moves.len()), ("1-2".to_owned(), 1));
}

#[test]
fn hides_sibling_threads() {
    // Two nodes with four cores of two threads each; one core is reserved.
    let machine = Machine::builder().nodes(2).cores_per_node(4).smt(2).memory(Bytes::gib(8));
    let machine = machine.build().unwrap();
    let core = |cpu: u32| {
        let core = machine.cpus[&CpuId(cpu)].core;
        machine.cpus.iter().filter(|(_, of)| of.core == core).map(|(&cpu, _)| cpu).collect::<CpuSet>()
    };
    let hide = Terms { hide_siblings: true, ..Terms::default() };
    for options in [&[][..], &["full-pcpus-only"], &["full-pcpus-only", "distribute-cpus-across-numa"]] {
        let config = PolicyConfig {
            cpu_reservation: Some(Quantity::whole(2)),
            cpu_manager_policy_options: options
                .iter()
                .map(|&name| (name.to_owned(), "true".to_owned()))
                .collect(),
            ..config(TopologyManagerPolicy::Restricted)
        };
        let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
        let idle = native.idle();
        let held = |ledger: &Ledger, name: &str| {
            let held = ledger.allocation(&name.into(), &name.into()).unwrap().clone();
            (held.cpus.unwrap(), held.hidden_cpus)
        };
        // Each CPU is on a different core, and whole cores leave the shared pool.
        let check = |ledger: &Ledger, name: &str, count: usize| {
            let (cpus, hidden) = held(ledger, name);
            assert_eq!((cpus.len(), hidden.len()), (count, count), "{options:?}: {cpus} {hidden}");
            let cores: CpuSet = cpus.iter().fold(CpuSet::new(), |cores, cpu| &cores | &core(cpu.0));
            assert_eq!(&cpus | &hidden, cores, "{options:?}");
            assert!(!ledger.shared_pool().intersects(&cores), "{options:?}");
        };
        let one = admit(&native, &idle, "one", (3, 1), &hide);
        check(&one, "one", 3);
        assert_eq!(one.shared_pool().len(), 10);
        // Shrinking and growing; released CPUs are free again.
        let resize = |count| native.resize(&one, &"one".into(), &"one".into(), &resources(count, 1));
        let fewer = resize(1).unwrap();
        check(&fewer, "one", 1);
        assert_eq!(fewer.shared_pool().len(), 14);
        assert_eq!(native.rebase(&fewer).0, fewer, "it is charged for as a whole");
        let more = native.resize(&fewer, &"one".into(), &"one".into(), &resources(2, 1)).unwrap();
        check(&more, "one", 2);
        assert_eq!(more.shared_pool().len(), 12);
        // Four cores are free, besides the reserved one and those of `one`.
        let both = admit(&native, &one, "two", (4, 1), &hide);
        check(&both, "two", 4);
        assert!(
            decide(&native, &both, "three", (1, 1), &hide).outcome.is_err(),
            "{options:?}: no core is whole"
        );
        assert_eq!(native.release(&both, &"two".into()), one);
        assert_eq!(native.release(&one, &"one".into()), idle);
    }
    // A moved workload has as many CPUs as before, again with hidden siblings.
    let config = config(TopologyManagerPolicy::SingleNumaNode);
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let there = |node: &str| Terms { nodes: node.parse().unwrap(), ..hide.clone() };
    let moved = admit(&native, &native.idle(), "moved", (2, 1), &hide);
    let node_of = |ledger: &Ledger, name: &str| {
        let first = ledger.allocation(&name.into(), &name.into()).unwrap().cpus.as_ref().unwrap().first();
        machine.cpus[&first.unwrap()].node.0
    };
    let node = node_of(&moved, "moved");
    // All allocatable cores of its node, of which it already has two.
    let count = if node == 0 { 3 } else { 4 };
    let request = Request::workload("new", resources(count, 1));
    let plan = native.plan(&moved, &request, &there(&node.to_string()), &RebalanceLimits::default()).unwrap();
    let after = plan.decision.ledger;
    assert_eq!((node_of(&after, "moved"), node_of(&after, "new")), (1 - node, node));
    for (name, count) in [("moved", 2), ("new", usize::try_from(count).unwrap())] {
        let held = after.allocation(&name.into(), &name.into()).unwrap();
        assert_eq!((held.cpus.as_ref().unwrap().len(), held.hidden_cpus.len()), (count, count), "{name}");
    }
    // The core becomes whole when the workload on one of its threads moves away.
    let half = admit(&native, &native.idle(), "half", (1, 1), &Terms::default());
    let node = node_of(&half, "half");
    let request = Request::workload("new", resources(if node == 0 { 3 } else { 4 }, 1));
    let plan = native.plan(&half, &request, &there(&node.to_string()), &RebalanceLimits::default()).unwrap();
    assert_eq!(plan.moves.len(), 1);
    // A sibling that comes online is hidden as well if it is free.
    let mut without = machine.clone();
    let held = moved.allocation(&"moved".into(), &"moved".into()).unwrap().clone();
    let sibling = held.hidden_cpus.first().unwrap();
    without.cpus.remove(&sibling);
    for node in without.nodes.values_mut() {
        node.cpus.remove(sibling);
    }
    let smaller = NativeStrategy::new(&without, &config, &NativeOptions::default()).unwrap();
    let alone = admit(&smaller, &smaller.idle(), "moved", (2, 1), &hide);
    let (after, _) = native.rebase(&alone);
    let held = after.allocation(&"moved".into(), &"moved".into()).unwrap();
    assert_eq!(held.hidden_cpus.len(), 2, "{held:?}");
    assert!(!after.shared_pool().intersects(&held.held_cpus()));
    // A core with one used thread cannot be taken.
    let some = admit(&native, &native.idle(), "some", (1, 1), &Terms::default());
    let first = some.allocation(&"some".into(), &"some".into()).unwrap().cpus.clone().unwrap();
    let with = admit(&native, &some, "with", (3, 1), &hide);
    let held = with.allocation(&"with".into(), &"with".into()).unwrap();
    assert!(!held.held_cpus().intersects(&core(first.first().unwrap().0)));
}

/// Makes a machine of 72 CPUs and 480 GiB, a GPU with 96 GiB of the configured memory type, and two empty nodes.
fn with_gpu(gpu: Option<MemoryTier>) -> NativeStrategy {
    let mut builder = Machine::builder().nodes(1).cores_per_node(72).memory(Bytes::gib(480)).distances([
        [10, 80, 80, 80],
        [80, 10, 254, 254],
        [80, 254, 10, 254],
        [80, 254, 254, 10],
    ]);
    for (id, gib) in [(1, 96), (2, 0), (3, 0)] {
        builder = builder.node(NodeId(id), |node| node.cores(0).memory(Bytes::gib(gib)));
    }
    let memory_tiers = gpu.map(|tier| (NodeId(1), tier)).into_iter().collect();
    let options = NativeOptions { memory_tiers, ..NativeOptions::default() };
    NativeStrategy::new(&builder.build().unwrap(), &config(TopologyManagerPolicy::SingleNumaNode), &options)
        .unwrap()
}

#[test]
fn gpu_memory_is_used_last() {
    let strict = Terms { tiers: Some(Tiers::Strict), ..Terms::default() };
    let dram = Terms { memory_tiers: [MemoryTier::Dram].into(), ..Terms::default() };
    let hbm = Terms { memory_tiers: [MemoryTier::Hbm].into(), ..Terms::default() };
    for gpu in [None, Some(MemoryTier::Hbm)] {
        let native = with_gpu(gpu);
        let idle = native.idle();
        assert_eq!(place(&native, &idle, (8, 90), &Terms::default()), "0");
        assert_eq!(place(&native, &idle, (70, 479), &strict), "0");
        assert_eq!(place(&native, &idle, (2, 500), &strict), "refused");
        assert_eq!(place(&native, &idle, (2, 500), &dram), "refused");
        // A request for ordinary memory gets no GPU memory, even if ordinary memory is full. A request for its type
        // gets it if the type is configured.
        let full = admit(&native, &idle, "other", (8, 470), &Terms::default());
        assert_eq!(
            place(&native, &full, (8, 50), &Terms::default()),
            "1",
            "attached to the node of the CPUs"
        );
        assert_eq!(place(&native, &full, (8, 50), &dram), "refused");
        assert_eq!(place(&native, &full, (8, 50), &hbm), if gpu.is_some() { "1" } else { "refused" });
        assert_eq!(place(&native, &full, (8, 110), &Terms::default()), "refused", "empty nodes serve nobody");
    }
}

#[test]
fn preferences_break_ties() {
    for policy in [TopologyManagerPolicy::SingleNumaNode, TopologyManagerPolicy::BestEffort] {
        let native = native(policy);
        let labels = [("app".to_owned(), "cache".to_owned())].into();
        let near: Terms = Terms { labels, ..Terms::default() };
        let mut on_two = near.clone();
        on_two.preferences.preferred.insert("other".into(), "2".parse().unwrap());
        let ledger = admit(&native, &native.idle(), "other", (2, 2), &on_two);
        assert_eq!(nodes(&ledger, "other"), "2");
        let named = |of: &str| [of.to_owned()].into();
        for selector in ["other", "app=cache"] {
            let with = Terms { with: named(selector), ..Terms::default() };
            let apart = Terms { apart: named(selector), ..Terms::default() };
            assert_eq!(place(&native, &ledger, (2, 2), &with), "2");
            assert_ne!(place(&native, &ledger, (2, 2), &apart), "2");
            assert_eq!(place(&native, &ledger, (8, 7), &with), "1", "a wish is given up");
        }
        let mut device = Terms::default();
        device.preferences.devices.insert("new".into(), "3".parse().unwrap());
        assert_eq!(place(&native, &ledger, (2, 2), &device), "3");
    }
    // A device cannot move.
    let mut device = Terms::default();
    device.preferences.devices.insert("new".into(), "0".parse().unwrap());
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    assert_eq!(place(&native, &native.idle(), (8, 2), &device), "refused");
}

#[test]
fn burstable_gets_memory_only() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let memory = Resources::none().with_memory(Quantity::whole(Bytes::gib(4).0));
    let request = Request::workload("new", memory);
    let plain = native.admit(&native.idle(), &request);
    assert!(plain.outcome.unwrap()[0].allocation.is_empty());
    let burstable = Terms { burstable: true, ..Terms::default() };
    let decision = native.admit_watched(&native.idle(), &request, &burstable, &|_| {});
    let held = &decision.outcome.unwrap()[0].allocation;
    assert_eq!((held.cpus.clone(), held.memory_nodes().len()), (None, 1));
}

#[test]
fn resize_stays_on_its_nodes() {
    let native = native(TopologyManagerPolicy::Restricted);
    let ledger = admit(&native, &native.idle(), "a", (2, 12), &Terms::default());
    let before = ledger.allocation(&"a".into(), &"a".into()).unwrap().clone();
    let resize =
        |ledger: &Ledger, cpus, gib| native.resize(ledger, &"a".into(), &"a".into(), &resources(cpus, gib));
    let grown = resize(&ledger, 4, 15).unwrap();
    let held = grown.allocation(&"a".into(), &"a".into()).unwrap();
    assert_eq!(held.cpus.as_ref().unwrap().len(), 4);
    assert_eq!(held.memory_nodes(), before.memory_nodes());
    assert_eq!(held.placed[&MEMORY].values().map(|of| of.0).sum::<u64>(), Bytes::gib(15).0);
    let shrunk = resize(&grown, 2, 1).unwrap();
    assert_eq!(native.rebase(&shrunk), (shrunk.clone(), Vec::new()));
    assert_eq!(native.release(&shrunk, &"a".into()), native.idle());
    let error = resize(&ledger, 2, 500).unwrap_err().to_string();
    assert!(error.contains("memory requested") && error.contains("free"), "{error}");
}

#[test]
fn selectors_match_pod_names() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let on = |name: &str, node: &str| Terms {
        name: Some(name.to_owned()),
        preferences: PlacementPreferences {
            preferred: [(name.into(), node.parse().unwrap())].into(),
            ..PlacementPreferences::default()
        },
        ..Terms::default()
    };
    let decision = native.admit_watched(
        &native.idle(),
        &Request {
            owner: "0a1b".into(),
            init_containers: Vec::new(),
            containers: vec![ContainerRequest::guaranteed("shop/db", resources(2, 1))],
            resources: None,
        },
        &on("shop/db", "2"),
        &|_| {},
    );
    let db = decision.outcome.unwrap()[0].allocation.memory_nodes().to_string();
    assert_eq!(db, "2");
    let with = Terms { with: ["shop/db".to_owned()].into(), ..Terms::default() };
    let ledger = admit(&native, &decision.ledger, "web", (2, 1), &with);
    assert_eq!(nodes(&ledger, "web"), "2");
    let other = Terms { with: ["shop/other".to_owned()].into(), ..Terms::default() };
    assert_ne!(nodes(&admit(&native, &decision.ledger, "web", (2, 1), &other), "web"), "2");
}

#[test]
fn growth_keeps_shared_pool_nonempty() {
    let options = [("strict-cpu-reservation".to_owned(), "true".to_owned())];
    let config = PolicyConfig {
        cpu_manager_policy_options: options.into(),
        ..config(TopologyManagerPolicy::SingleNumaNode)
    };
    let machine = Machine::builder().nodes(1).cores_per_node(4).smt(2).memory(Bytes::gib(8)).build().unwrap();
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let to = |cpus| Resources::none().with_cpu(Quantity::whole(cpus));
    let resize = |ledger: &Ledger, cpus| native.resize(ledger, &"a".into(), &"a".into(), &to(cpus));
    // Two of the eight CPUs are reserved, and no container may run there.
    let alone = admit(&native, &native.idle(), "a", (2, 1), &Terms::default());
    assert!(resize(&alone, 6).unwrap().shared_pool().is_empty(), "nobody needs the shared pool");
    let fraction = Resources::none().with_cpu(Quantity::milli(500));
    let fraction = Request::workload("b", fraction.with_memory(Quantity::whole(Bytes::gib(1).0)));
    let shared = native.admit(&alone, &fraction).ledger;
    assert_eq!(resize(&shared, 5).unwrap().shared_pool().len(), 1);
    let error = resize(&shared, 6).unwrap_err().to_string();
    assert!(error.contains("cpu requested 4, free 4: the shared pool would have no CPU left"), "{error}");
    // The same rule applies to admissions.
    let error = decide(&native, &shared, "c", (4, 1), &Terms::default()).outcome.unwrap_err();
    assert!(error.message.contains("the shared pool would have no CPU left"), "{error}");
}

/// Makes four cores of two threads with `full-pcpus-only` and these reserved CPUs.
fn whole_cores(reserved: &str) -> [Box<dyn Strategy>; 2] {
    let options = [("full-pcpus-only".to_owned(), "true".to_owned())];
    let reserved_system_cpus: CpuSet = reserved.parse().unwrap();
    let config = PolicyConfig {
        cpu_reservation: Some(Quantity::whole(reserved_system_cpus.len() as u64)),
        reserved_system_cpus,
        cpu_manager_policy_options: options.into(),
        ..config(TopologyManagerPolicy::SingleNumaNode)
    };
    let machine = Machine::builder().nodes(1).cores_per_node(4).smt(2).memory(Bytes::gib(8)).build().unwrap();
    [
        Box::new(NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap()),
        Box::new(KubeletStrategy::new(&machine, &config).unwrap()),
    ]
}

#[test]
fn growth_skips_reserved_cores() {
    let request = |name: &str, cpus| Request::workload(name, resources(cpus, 1));
    for strategy in whole_cores("0-1") {
        let mut ledger = strategy.idle();
        for name in ["a", "b"] {
            let decision = strategy.admit(&ledger, &request(name, 2));
            decision.outcome.unwrap();
            ledger = strategy.note_started(&decision.ledger, &name.into(), &name.into());
        }
        assert_eq!((cpus(&ledger, "a"), cpus(&ledger, "b")), ("2,6".to_owned(), "3,7".to_owned()));
        assert!(strategy.admit(&ledger, &request("c", 2)).outcome.is_err(), "{strategy:?}");
        let resize =
            |ledger: &Ledger, cpus| strategy.resize(ledger, &"a".into(), &"a".into(), &resources(cpus, 1));
        let refused = resize(&ledger, 4).unwrap_err().to_string();
        assert!(refused.contains("node 0: cpu requested 2, free 0"), "{refused}");
        // The core of a released workload is whole again.
        let ledger = strategy.release(&ledger, &"b".into());
        let grown = resize(&ledger, 4).unwrap();
        assert_eq!(cpus(&grown, "a"), "2-3,6-7");
        assert_eq!(cpus(&resize(&grown, 2).unwrap(), "a"), "2,6");
    }
}

fn take_offline(machine: &mut Machine, cpu: u32) {
    machine.cpus.remove(&CpuId(cpu));
    for node in machine.nodes.values_mut() {
        node.cpus.remove(CpuId(cpu));
    }
}

/// Makes two nodes with four cores of two threads, `full-pcpus-only` and these offline CPUs.
fn uneven(offline: &[u32], policy: TopologyManagerPolicy, options: &[&str]) -> NativeStrategy {
    let mut machine =
        Machine::builder().nodes(2).cores_per_node(4).smt(2).memory(Bytes::gib(8)).build().unwrap();
    for &cpu in offline {
        take_offline(&mut machine, cpu);
    }
    let options = [&["full-pcpus-only"], options].concat();
    let config = PolicyConfig {
        cpu_manager_policy_options: options
            .iter()
            .map(|&name| (name.to_owned(), "true".to_owned()))
            .collect(),
        cpu_reservation: Some(Quantity::whole(2)),
        reserved_system_cpus: "0,8".parse().unwrap(),
        ..config(policy)
    };
    NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap()
}

#[test]
fn unequal_cores_add_up() {
    let on = |native: &NativeStrategy, count: u64| {
        let decision = decide(native, &native.idle(), "new", (count, 1), &Terms::default());
        decision.outcome.map(|_| cpus(&decision.ledger, "new")).map_err(|rejection| rejection.to_string())
    };
    // Node 1 has cores of 2, 2, 2 and 1 CPUs, node 0 three cores of 2.
    let single = uneven(&[15], TopologyManagerPolicy::SingleNumaNode, &[]);
    for (count, expected) in [
        (1, "7"),
        (2, "1,9"),
        (3, "4,7,12"),
        (4, "1-2,9-10"),
        (5, "4-5,7,12-13"),
        (6, "1-3,9-11"),
        (7, "4-7,12-14"),
    ] {
        assert_eq!(on(&single, count).as_deref(), Ok(expected), "{count}");
    }
    // Node 1 has cores of 2, 1, 1 and 2 CPUs: two CPUs are the first core, whatever comes later.
    let middle = uneven(&[13, 14], TopologyManagerPolicy::SingleNumaNode, &[]);
    for (count, expected) in [(1, "5"), (3, "4-5,12"), (4, "1-2,9-10"), (5, "4-5,7,12,15")] {
        assert_eq!(on(&middle, count).as_deref(), Ok(expected), "{count}");
    }
    // On both nodes together: 3 x 2 and 2 x 2 + 2 x 1.
    let both = uneven(&[13, 14], TopologyManagerPolicy::BestEffort, &[]);
    for count in [7, 8, 9, 10, 11, 12] {
        let held = on(&both, count).unwrap();
        assert_eq!(held.parse::<CpuSet>().unwrap().len() as u64, count, "{held}");
    }
    // No such cores exist: the next best nodes would be no better.
    let even = uneven(&[], TopologyManagerPolicy::BestEffort, &[]);
    assert!(on(&even, 3).unwrap_err().contains("not multiple cpus per core = 2"));
    // Two CPUs of one node and an odd rest on the other one: one and one, then none of size one remains.
    let mut ledger = single.idle();
    for (name, expected) in [("a", "7"), ("b", "refused")] {
        let decision = decide(&single, &ledger, name, (1, 1), &Terms::default());
        let held = decision.outcome.map_or_else(
            |rejection| {
                assert!(rejection.message.contains("do not add up to the requested CPUs"), "{rejection}");
                "refused".to_owned()
            },
            |_| cpus(&decision.ledger, name),
        );
        assert_eq!(held, expected);
        ledger = decision.ledger;
    }
    // A running container grows and shrinks by sums of core sizes.
    let resize =
        |ledger: &Ledger, count| single.resize(ledger, &"a".into(), &"a".into(), &resources(count, 1));
    let grown = resize(&ledger, 3).unwrap();
    assert_eq!(cpus(&grown, "a"), "4,7,12");
    assert_eq!(cpus(&resize(&grown, 2).unwrap(), "a"), "4,12");
    assert_eq!(cpus(&resize(&grown, 1).unwrap(), "a"), "7");
    assert!(resize(&ledger, 2).is_err(), "it would have to leave its core");
}

#[test]
fn pod_containers_get_unequal_cores() {
    let container = |name: &str, count| ContainerRequest::guaranteed(name, resources(count, 1));
    for scope in [TopologyManagerScope::Container, TopologyManagerScope::Pod] {
        let native = uneven(&[13, 14, 15], TopologyManagerPolicy::SingleNumaNode, &[]);
        // Node 1 has cores of 2, 1, 1 and 1 CPUs.
        let request = Request {
            owner: "pod".into(),
            init_containers: vec![container("init", 5)],
            containers: vec![container("x", 1), container("y", 1), container("z", 2)],
            resources: None,
        };
        let terms = Terms { scope: Some(scope), ..Terms::default() };
        let decision = native.admit_watched(&native.idle(), &request, &terms, &|_| {});
        let grants = decision.outcome.unwrap();
        let held: Vec<usize> = grants.iter().map(|of| of.allocation.cpus.as_ref().unwrap().len()).collect();
        assert_eq!(held, [5, 1, 1, 2], "{scope}");
    }
}

/// Makes a request of an init container and an app container with four CPUs each; the first borrows from the second.
#[test]
fn resize_keeps_cpus_of_init_containers() {
    let policy = TopologyManagerPolicy::SingleNumaNode;
    let strategies: [Box<dyn Strategy>; 2] =
        [Box::new(native(policy)), Box::new(KubeletStrategy::new(&machine(), &config(policy)).unwrap())];
    for strategy in strategies {
        let container = |name: &str| ContainerRequest::guaranteed(name, resources(4, 1));
        let request = Request {
            owner: "a".into(),
            init_containers: vec![container("init")],
            containers: vec![container("app")],
            resources: None,
        };
        let decision = strategy.admit(&strategy.idle(), &request);
        decision.outcome.unwrap();
        let running = strategy.note_started(&decision.ledger, &"a".into(), &"init".into());
        let to = Resources::none().with_cpu(Quantity::whole(2));
        let shrunk = strategy.resize(&running, &"a".into(), &"app".into(), &to).unwrap();
        let init = shrunk.cpus_of(&"a".into(), &"init".into());
        assert_eq!(init.len(), 4, "{strategy:?}");
        assert!(!shrunk.shared_pool().intersects(init), "{strategy:?}");
        let ended = strategy.note_started(&shrunk, &"a".into(), &"app".into());
        let removed = strategy.release(&ended, &"a".into());
        assert_eq!(removed.shared_pool(), strategy.idle().shared_pool(), "{strategy:?}");
    }
}

#[test]
fn plan_moves_smallest_and_keeps_terms() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let strict = Terms { tiers: Some(Tiers::Strict), ..Terms::default() };
    let mut ledger = native.idle();
    // Each node has 6 of its 7 or 8 GiB in use: a small and a larger workload.
    for node in 0..4 {
        for (name, gib) in [("a", 1), ("b", 4)] {
            let name = format!("{name}{node}");
            let mut terms = strict.clone();
            terms.preferences.preferred.insert(name.as_str().into(), [NodeId(node)].into_iter().collect());
            ledger = admit(&native, &ledger, &name, (1, gib), &terms);
            assert_eq!(nodes(&ledger, &name), node.to_string());
        }
    }
    assert_eq!(place(&native, &ledger, (2, 4), &strict), "refused");
    let request = Request::workload("new", resources(2, 4));
    let plan = native.plan(&ledger, &request, &strict, &RebalanceLimits::default()).unwrap();
    assert_eq!((plan.moves.len(), plan.bytes), (1, Bytes::gib(1)), "{plan:?}");
    assert!(plan.moves[0].owner.as_str().starts_with('a'));
    assert_ne!(plan.moves[0].from, plan.moves[0].to);
    let kept = plan.decision.ledger.owner(&plan.moves[0].owner).unwrap();
    assert_eq!(kept.terms.tiers, Some(Tiers::Strict));
    // Limits on bytes, and owners that must not move.
    let capped = RebalanceLimits { bytes: Bytes::mib(512), ..RebalanceLimits::default() };
    assert!(native.plan(&ledger, &request, &strict, &capped).is_none());
    let mut immovable = native.idle();
    for (owner, account) in ledger.owners() {
        let mut account = (**account).clone();
        account.terms.immovable = true;
        immovable.adopt(owner.clone(), account).unwrap();
    }
    let (immovable, uncovered) = native.rebase(&immovable);
    assert_eq!(uncovered, []);
    assert!(native.plan(&immovable, &request, &strict, &RebalanceLimits::default()).is_none());
}

#[test]
fn explanation_names_deciding_rule() {
    let native = native(TopologyManagerPolicy::BestEffort);
    let decision = decide(&native, &native.idle(), "new", (10, 12), &Terms::default());
    let search = &decision.explanation.searches[0];
    assert_eq!(search.chosen, Some(0));
    assert!(search.considered >= search.candidates.len() as u64 && !search.is_incomplete);
    let verdicts = search.verdicts();
    assert_eq!(verdicts[0], PlacementVerdict::Chosen);
    let by = |nodes: &str| {
        let index = search.candidates.iter().position(|of| of.nodes.to_string() == nodes)?;
        match verdicts[index] {
            PlacementVerdict::Worse { by, .. } => Some(by),
            _ => None,
        }
    };
    assert_eq!(search.candidates[0].nodes.to_string(), "0-1");
    assert_eq!(by("2-3"), Some(RankCriterion::Stranded));
    assert_eq!(by("0,2"), Some(RankCriterion::CpuToCpu));
    assert!(verdicts[1].to_string().contains("without memory"), "{}", verdicts[1]);
}

#[test]
fn refusal_names_nodes_and_amounts() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let decision = decide(&native, &native.idle(), "new", (16, 2), &Terms::default());
    let rejection = decision.outcome.unwrap_err();
    assert_eq!(rejection.reason, Reason::TopologyAffinityError);
    assert_eq!(
        rejection.message,
        "the request does not fit on one node (policy single-numa-node); not even an idle machine could hold it"
    );
    assert_eq!(rejection.shortfalls[0].to_string(), "node 0: cpu requested 16, free 6");
    let Cause::InsufficientCapacity(detail) = &rejection.cause else { panic!("{rejection:?}") };
    assert!(detail.contains("not even an idle machine could hold it"), "{detail}");
    assert_eq!(rejection.shortfalls.len(), 5);
    assert!(rejection.shortfalls.iter().all(|of| of.requested == 16));
    assert_eq!(decision.ledger, native.idle());
    let mut wrong = config(TopologyManagerPolicy::Restricted);
    wrong.reserved_memory.clear();
    wrong.cpu_reservation = None;
    assert_eq!(NativeStrategy::problems(&machine(), &wrong).len(), 2);
}

#[test]
fn refusal_names_term_that_nothing_meets() {
    let native = native(TopologyManagerPolicy::Restricted);
    for (terms, expected) in [
        (Terms { nodes: "7".parse().unwrap(), ..Terms::default() }, "there is no node 7"),
        (Terms { memory_tiers: [MemoryTier::Hbm].into(), ..Terms::default() }, "no node has HBM memory"),
        (
            Terms { cpu_kinds: [CpuKind::Isolated].into(), ..Terms::default() },
            "no CPU is of the kind isolated",
        ),
    ] {
        let rejection = decide(&native, &native.idle(), "new", (1, 1), &terms).outcome.unwrap_err();
        assert_eq!((rejection.message.as_str(), rejection.shortfalls.len()), (expected, 0));
    }
}

#[test]
fn explanation_names_absent_nodes() {
    let native = native(TopologyManagerPolicy::Restricted);
    let mut terms = Terms { nodes: "1,7".parse().unwrap(), ..Terms::default() };
    terms.preferences.preferred.insert("new".into(), "1,8".parse().unwrap());
    let decision = decide(&native, &native.idle(), "new", (1, 1), &terms);
    assert!(decision.outcome.is_ok());
    assert_eq!(decision.explanation.absent_nodes.to_string(), "7-8");
    let none = Terms { nodes: "7".parse().unwrap(), ..Terms::default() };
    let decision = decide(&native, &native.idle(), "new", (1, 1), &none);
    assert!(decision.outcome.is_err() && decision.explanation.absent_nodes.is_empty(), "the refusal says it");
    let present = Terms { nodes: "1".parse().unwrap(), ..Terms::default() };
    let decision = decide(&native, &native.idle(), "new", (1, 1), &present);
    assert!(decision.explanation.absent_nodes.is_empty());
}

#[test]
fn readmission_keeps_the_allocation() {
    let native = native(TopologyManagerPolicy::Restricted);
    let terms = Terms::default();
    let ledger = admit(&native, &native.idle(), "first", (2, 2), &terms);
    let ledger = admit(&native, &ledger, "a", (2, 2), &terms);
    let ledger = native.release(&ledger, &"first".into());
    let again = decide(&native, &ledger, "a", (2, 2), &terms);
    assert_eq!(again.ledger, ledger);
    assert_eq!(Some(&again.outcome.unwrap()[0].allocation), ledger.allocation(&"a".into(), &"a".into()));
    // The new request is too large, so the old allocation stays.
    let more = decide(&native, &ledger, "a", (2, 500), &terms);
    assert_eq!((more.outcome.is_ok(), more.ledger == ledger), (false, true));
    let less = decide(&native, &ledger, "a", (1, 1), &terms);
    assert_eq!(native.release(&less.ledger, &"a".into()), native.idle());
}

#[test]
fn align_by_socket_allows_socket_nodes() {
    let options = [("align-by-socket".to_owned(), "true".to_owned())].into();
    let config =
        PolicyConfig { cpu_manager_policy_options: options, ..config(TopologyManagerPolicy::Restricted) };
    let native = NativeStrategy::new(&machine(), &config, &NativeOptions::default()).unwrap();
    let mut ledger = native.idle();
    for node in 0..4 {
        let mut terms = Terms::default();
        let name = format!("o{node}");
        terms.preferences.devices.insert(name.as_str().into(), [NodeId(node)].into_iter().collect());
        ledger = admit(&native, &ledger, &name, (4, 1), &terms);
    }
    let strict = Terms { tiers: Some(Tiers::Strict), ..Terms::default() };
    assert_eq!(place(&native, &ledger, (6, 6), &strict), "0");
    assert_eq!(place(&self::native(TopologyManagerPolicy::Restricted), &ledger, (6, 6), &strict), "refused");
    assert_eq!(place(&native, &ledger, (12, 6), &strict), "refused", "not on both sockets");
}

/// Makes withheld memory in GiB.
fn in_use(nodes: &[(u32, u64)]) -> Arc<HostConditions> {
    let nodes = nodes.iter().map(|(node, gib)| (NodeId(*node), Bytes::gib(*gib)));
    Arc::new(HostConditions { withheld: [(MEMORY, nodes.collect())].into(), ..HostConditions::default() })
}

#[test]
fn refusal_names_withheld_memory() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let request = Request::workload("a", resources(1, 6));
    let mut ledger = native.idle();
    ledger.set_conditions(in_use(&[(0, 1), (1, 3), (2, 3), (3, 9)]));
    let decision = native.admit(&ledger, &request);
    assert_eq!(decision.outcome.unwrap()[0].allocation.memory_nodes().to_string(), "0");

    ledger.set_conditions(in_use(&[(0, 2), (1, 3), (2, 3), (3, 9)]));
    let decision = native.admit_watched(
        &ledger,
        &request,
        &Terms { tiers: Some(Tiers::Strict), ..Terms::default() },
        &|_| {},
    );
    let rejection = decision.outcome.unwrap_err();
    let of_memory = rejection.shortfalls.iter().filter(|of| of.resource == Resource::Memory(MEMORY));
    let gib: Vec<(u64, u64)> = of_memory.map(|of| (of.free >> 30, of.withheld >> 30)).collect();
    assert_eq!(gib, [(5, 2), (5, 3), (5, 3), (0, 8), (32, 0)], "{rejection:?}");
    let of_memory = rejection.shortfalls.iter().filter(|of| of.resource == Resource::Memory(MEMORY));
    assert_eq!(
        of_memory.map(ToString::to_string).nth(3).unwrap(),
        "node 3: memory requested 6.0 GiB, free 0 B (8.0 GiB more are used by workloads without a guarantee)"
    );
    assert_eq!(decision.explanation.withheld.len(), 4);

    // A request without memory is unaffected.
    let cpus = Request::workload("b", Resources::none().with_cpu(Quantity::whole(1)));
    assert!(native.admit(&ledger, &cpus).explanation.withheld.is_empty());
}

#[test]
fn withheld_memory_does_not_rank_nodes() {
    let one = native(TopologyManagerPolicy::SingleNumaNode);
    let mut ledger = one.idle();
    for nodes in [&[][..], &[(1, 6)], &[(0, 3), (2, 7)]] {
        ledger.set_conditions(in_use(nodes));
        assert_eq!(place(&one, &ledger, (1, 1), &Terms::default()), "0", "{nodes:?}");
    }
    // Node 0 has 5 GiB free, node 1 has 4: the smaller rest is used first, even if withheld memory makes it look
    // larger.
    let machine =
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(6)).build().unwrap();
    let several =
        NativeStrategy::new(&machine, &config(TopologyManagerPolicy::BestEffort), &NativeOptions::default())
            .unwrap();
    let mut on_one = Terms::default();
    on_one.preferences.preferred.insert("first".into(), "1".parse().unwrap());
    let mut ledger = admit(&several, &several.idle(), "first", (1, 2), &on_one);
    for nodes in [&[][..], &[(0, 2)]] {
        ledger.set_conditions(in_use(nodes));
        let grants = decide(&several, &ledger, "new", (1, 6), &Terms::default()).outcome.unwrap();
        let gib = grants[0].allocation.placed[&MEMORY].values().map(|of| of.0 >> 30);
        assert_eq!(gib.collect::<Vec<_>>(), [2, 4], "{nodes:?}");
    }
}

#[test]
fn reports_withheld_on_asked_nodes_only() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let mut ledger = native.idle();
    ledger.set_conditions(in_use(&[(0, 1), (4, 30)]));
    let dram = Terms { memory_tiers: [MemoryTier::Dram].into(), ..Terms::default() };
    let decision = decide(&native, &ledger, "new", (2, 20), &dram);
    let rejection = decision.outcome.unwrap_err();
    let of_memory = rejection.shortfalls.iter().filter(|of| of.resource == Resource::Memory(MEMORY));
    let gib: Vec<(u64, u64)> = of_memory.map(|of| (of.free >> 30, of.withheld >> 30)).collect();
    assert_eq!(gib, [(6, 1), (8, 0), (8, 0), (8, 0), (0, 0)], "{rejection:?}");
    assert_eq!(decision.explanation.withheld.len(), 1);
}

#[test]
fn growth_excludes_withheld_memory() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let request = Request::workload("a", resources(1, 6));
    let mut ledger = native.admit(&native.idle(), &request).ledger;
    let before = ledger.clone();
    ledger.set_conditions(in_use(&[(0, 1), (1, 8), (2, 8), (3, 8), (4, 32)]));
    assert_eq!(ledger, before, "what the host says is no promise");
    assert!(native.admit(&ledger, &request).outcome.is_ok(), "it has it already");
    assert_eq!(native.rebase(&ledger).0, before);
    let (owner, container) = (request.owner.clone(), request.containers[0].name.clone());
    let to = |gib| Resources::none().with_memory(Quantity::whole(Bytes::gib(gib).0));
    assert!(native.resize(&before, &owner, &container, &to(7)).is_ok());
    let refused = native.resize(&ledger, &owner, &container, &to(7)).unwrap_err();
    assert!(
        refused.to_string().contains("(1.0 GiB more are used by workloads without a guarantee)"),
        "{refused}"
    );
    assert!(native.resize(&ledger, &owner, &container, &to(5)).is_ok());
}

#[test]
fn load_breaks_ties() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let mut ledger = native.idle();
    let request = Request::workload("a", resources(1, 1));
    let preferred = [(request.containers[0].name.clone(), "2-3".parse().unwrap())].into();
    let preferences = PlacementPreferences { preferred, ..PlacementPreferences::default() };
    let terms = Terms { preferences, ..Terms::default() };
    let busy = |nodes: [(u32, u64); 4]| {
        let load = nodes.map(|(node, load)| (NodeId(node), load)).into();
        Arc::new(HostConditions { load, ..HostConditions::default() })
    };
    for (load, expected) in [
        ([(0, 0), (1, 0), (2, 0), (3, 0)], "2"),
        ([(0, 0), (1, 0), (2, 7), (3, 7)], "2"),
        ([(0, 0), (1, 0), (2, 7), (3, 6)], "3"),
    ] {
        ledger.set_conditions(busy(load));
        let decision = native.admit_watched(&ledger, &request, &terms, &|_| {});
        let grants = decision.outcome.unwrap();
        assert_eq!(grants[0].allocation.memory_nodes().to_string(), expected);
        if expected == "3" {
            let search = &decision.explanation.searches[0];
            let loser = search.candidates.iter().position(|of| of.nodes.to_string() == "2").unwrap();
            assert_eq!(
                search.verdicts()[loser],
                PlacementVerdict::Worse { by: RankCriterion::Load, own: 7, chosen: 6 }
            );
        }
    }
}

#[test]
fn excludes_cpus_of_other_partitions() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let mut ledger = native.idle();
    let partition_cpus = &native.allocatable().cpus - &"2,3".parse().unwrap();
    ledger.set_conditions(Arc::new(HostConditions { partition_cpus, ..HostConditions::default() }));
    let refused = decide(&native, &ledger, "a", (3, 1), &Terms::default());
    assert!(refused.outcome.is_err());
    assert_eq!(refused.explanation.partition_cpus, ledger.conditions().partition_cpus);
    let taken = admit(&native, &ledger, "b", (2, 1), &Terms::default());
    assert_eq!(taken.cpus_of(&"b".into(), &"b".into()).to_string(), "2-3");
}

#[test]
fn excludes_offline_cpus() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let mut ledger = native.idle();
    let offline_cpus = &native.allocatable().cpus - &"2".parse().unwrap();
    ledger.set_conditions(Arc::new(HostConditions { offline_cpus, ..HostConditions::default() }));
    let cpus = |count| {
        Request::workload(
            "a",
            Resources::none().with_cpu(Quantity::whole(count)).with_memory(Quantity::whole(1 << 30)),
        )
    };
    let refused = native.admit(&ledger, &cpus(2));
    assert!(refused.outcome.is_err());
    assert_eq!(refused.explanation.offline_cpus, ledger.conditions().offline_cpus);
    let grants = native.admit(&ledger, &cpus(1)).outcome.unwrap();
    assert_eq!(grants[0].allocation.cpus.as_ref().unwrap().to_string(), "2");
    // A running container on the node grows by CPUs that are online.
    let resize = |ledger: &Ledger, cpus| {
        native.resize(ledger, &"b".into(), &"b".into(), &Resources::none().with_cpu(Quantity::whole(cpus)))
    };
    let mut running = admit(&native, &native.idle(), "b", (1, 1), &Terms::default());
    let held = running.cpus_of(&"b".into(), &"b".into()).clone();
    let free = &(running.shared_pool() & &native.allocatable().cpus) - &"3".parse().unwrap();
    running.set_conditions(Arc::new(HostConditions { offline_cpus: free, ..HostConditions::default() }));
    let grown = resize(&running, 2).unwrap();
    assert_eq!(grown.cpus_of(&"b".into(), &"b".into()), &(&held | &"3".parse().unwrap()));
    assert!(resize(&running, 3).is_err());
}

#[test]
fn init_uses_memory_nodes_if_attached() {
    let native = native(TopologyManagerPolicy::SingleNumaNode);
    let on = |tiers| {
        let request = Request {
            owner: "pod".into(),
            init_containers: vec![ContainerRequest::guaranteed("init", resources(1, 20))],
            containers: vec![ContainerRequest::guaranteed("app", resources(2, 2))],
            resources: None,
        };
        let terms = Terms {
            tiers: Some(tiers),
            scope: Some(TopologyManagerScope::Pod),
            nodes: "1,4".parse().unwrap(),
            ..Terms::default()
        };
        let decision = native.admit_watched(&native.idle(), &request, &terms, &|_| {});
        decision.outcome.map(|grants| grants[0].allocation.memory_nodes().to_string()).map_err(drop)
    };
    assert_eq!(on(Tiers::Attached), Ok("4".to_owned()));
    assert_eq!(on(Tiers::Strict), Err(()));
    // With memory only, the policy does not refuse it earlier.
    let memory = |name: &str, gib| {
        ContainerRequest::guaranteed(
            name,
            Resources::none().with_cpu(Quantity::milli(500)).with_memory(Quantity::whole(Bytes::gib(gib).0)),
        )
    };
    let request = Request {
        owner: "pod".into(),
        init_containers: vec![memory("init", 20)],
        containers: vec![memory("app", 2)],
        resources: None,
    };
    let terms = Terms {
        tiers: Some(Tiers::Strict),
        scope: Some(TopologyManagerScope::Pod),
        preferences: PlacementPreferences {
            preferred: [("app".into(), "1".parse().unwrap())].into(),
            ..PlacementPreferences::default()
        },
        ..Terms::default()
    };
    let decision = native.admit_watched(&native.idle(), &request, &terms, &|_| {});
    let held = |decision: &Decision| {
        let nodes = decision
            .outcome
            .as_ref()
            .unwrap()
            .iter()
            .map(|grant| grant.allocation.memory_nodes().to_string());
        nodes.collect::<Vec<_>>()
    };
    assert!(matches!(held(&decision).as_slice(), [init, app] if init == app), "{:?}", held(&decision));
}

#[test]
fn offline_cpu_is_no_shared_cpu() {
    let options = [("strict-cpu-reservation".to_owned(), "true".to_owned())];
    let config = PolicyConfig {
        cpu_manager_policy_options: options.into(),
        ..config(TopologyManagerPolicy::SingleNumaNode)
    };
    let machine = Machine::builder().nodes(1).cores_per_node(8).memory(Bytes::gib(8)).build().unwrap();
    let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
    let fraction = Resources::none().with_cpu(Quantity::milli(500));
    let fraction = Request::workload("b", fraction.with_memory(Quantity::whole(Bytes::gib(1).0)));
    let mut ledger = native.admit(&native.idle(), &fraction).ledger;
    // One of the six allocatable CPUs is offline.
    let last: CpuSet = "7".parse().unwrap();
    ledger.set_conditions(Arc::new(HostConditions { offline_cpus: last, ..HostConditions::default() }));
    assert!(decide(&native, &ledger, "new", (4, 1), &Terms::default()).outcome.is_ok());
    let error = decide(&native, &ledger, "new", (5, 1), &Terms::default()).outcome.unwrap_err();
    assert!(
        error.message.contains("cpu requested 5, free 5: the shared pool would have no CPU left"),
        "{error}"
    );
    let ledger = admit(&native, &ledger, "a", (3, 1), &Terms::default());
    let resize = |cpus| native.resize(&ledger, &"a".into(), &"a".into(), &resources(cpus, 1));
    assert!(resize(4).is_ok());
    assert!(resize(5).unwrap_err().to_string().contains("the shared pool would have no CPU left"));
}

/// With sockets of different sizes, the kubelet treats a socket as free if its number of free CPUs equals the average
/// size, and takes all its CPUs.
#[test]
fn unequal_sockets_do_not_overlap() {
    let mut builder = Machine::builder().nodes(3).sockets(3).cores_per_node(3).memory(Bytes::gib(8));
    builder = builder.node(NodeId(1), |node| node.cores(6));
    let machine = builder.build().unwrap();
    let config = PolicyConfig {
        cpu_reservation: Some(Quantity::whole(1)),
        reserved_system_cpus: "0".parse().unwrap(),
        ..config(TopologyManagerPolicy::None)
    };
    let kubelet = KubeletStrategy::new(&machine, &config).unwrap();
    // Another workload holds two of the six CPUs of the second socket.
    let mut account = OwnerAccount {
        request: Some(Request::workload("a", resources(2, 1)).into()),
        ..OwnerAccount::default()
    };
    let second = machine.nodes[&NodeId(1)].cpus.iter().take(2).collect::<CpuSet>();
    account.containers.insert("a".into(), Allocation { cpus: Some(second.clone()), ..Allocation::default() });
    let mut ledger = kubelet.idle();
    ledger.adopt("a".into(), account).unwrap();
    let ledger = kubelet.rebase(&ledger).0;
    let refused = kubelet.admit(&ledger, &Request::workload("new", resources(9, 1)));
    let rejection = refused.outcome.unwrap_err();
    assert_eq!(rejection.reason, Reason::UnexpectedAdmissionError);
    assert!(rejection.message.contains("not free"), "{rejection}");
    assert!(refused.ledger.allocation(&"new".into(), &"new".into()).is_none_or(|held| held.cpus.is_none()));
    assert!(kubelet.admit(&ledger, &Request::workload("new", resources(4, 1))).outcome.is_ok());
}

/// With cores of different sizes, the kubelet treats a core as free if its number of free CPUs equals the average size,
/// and takes its other CPUs as well.
#[test]
fn unequal_cores_do_not_overlap() {
    for (cores, offline, reserved, sizes) in [(6, 4, "0", &[6, 4][..]), (4, 7, "0,4", &[2, 3])] {
        let mut machine =
            Machine::builder().nodes(1).cores_per_node(cores).smt(2).memory(Bytes::gib(8)).build().unwrap();
        take_offline(&mut machine, offline);
        let reserved: CpuSet = reserved.parse().unwrap();
        let config = PolicyConfig {
            cpu_reservation: Some(Quantity::whole(reserved.len() as u64)),
            reserved_system_cpus: reserved,
            ..config(TopologyManagerPolicy::BestEffort)
        };
        let kubelet = KubeletStrategy::new(&machine, &config).unwrap();
        let container = |(index, &cpus): (usize, &u64)| {
            let memory = Quantity::whole(Bytes::mib(1).0);
            let size = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(memory);
            ContainerRequest::guaranteed(format!("c{index}"), size)
        };
        let containers = sizes.iter().enumerate().map(container).collect();
        let request = Request { containers, ..Request::workload("new", Resources::none()) };
        let refused = kubelet.admit(&kubelet.idle(), &request);
        let rejection = refused.outcome.unwrap_err();
        assert_eq!(rejection.reason, Reason::UnexpectedAdmissionError);
        assert!(rejection.message.contains("not free"), "{rejection}");
        assert_eq!(refused.ledger.allocations().count(), 0);
    }
}

#[test]
fn cores_add_up_over_more_nodes() {
    let four = Terms { nodes: "1".parse().unwrap(), ..Terms::default() };
    for policy in [TopologyManagerPolicy::BestEffort, TopologyManagerPolicy::None] {
        let native = uneven(&[15], policy, &[]);
        let decision = decide(&native, &native.idle(), "first", (4, 1), &four);
        assert_eq!(cpus(&decision.ledger, "first"), "4-5,12-13");
        // Node 0 has three cores of two CPUs, node 1 has one of two and one of one.
        for count in 1..=9 {
            let new = decide(&native, &decision.ledger, "new", (count, 1), &Terms::default());
            assert!(new.outcome.is_ok(), "{policy:?} {count}: {:?}", new.outcome);
            assert_eq!(new.ledger.allocations().count(), 2);
        }
        let new = decide(&native, &decision.ledger, "new", (5, 1), &Terms::default());
        assert_eq!(cpus(&new.ledger, "new"), "1,6-7,9,14", "the node with the fewest CPUs comes first");
    }
}

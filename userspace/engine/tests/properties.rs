//! Properties for arbitrary machines, configurations and sequences of requests.
//!
//! Defects of the kubelet are exempt only where they violate a property: a ledger is *intact* while all nodes of each
//! group agree on the group (see `kubelet::defects`, `one_node_skips_the_growth_rule`).

#![expect(clippy::unwrap_used, reason = "what makes random cases fails the test if it fails")]

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::{
    ContainerName, ContainerRequest, KubeletStrategy, Ledger, OwnerId, PolicyConfig, QosClass, Quantity,
    Request, Resources, Strategy as _,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    kubelet::Checkpoints,
    policy::{
        CPU_OPTIONS, CpuManagerPolicy, KubeletVersion, MemoryManagerPolicy, MemoryReservation,
        TopologyManagerPolicy, TopologyManagerScope,
    },
};
use numaward_topology::{
    Bytes, CacheId, CoreId, Cpu, CpuId, CpuSet, HugepagePool, HugepageSize, Machine, NodeId, NodeSet,
    NumaNode, SocketId, ZoneKind,
};
use proptest::{collection, option, prelude::*, sample};

const PAGE_2M: HugepageSize = HugepageSize(Bytes::mib(2));
const PAGE_1G: HugepageSize = HugepageSize(Bytes::gib(1));

// ---------------------------------------------------------------------------------------------------------
// Plausible machines and requests

fn machine() -> impl Strategy<Value = Machine> {
    (1u32..=4, 1u32..=2, 1u32..=4, 1u32..=2, 0u32..=2, 0u64..=8, option::of(0u32..=2)).prop_map(
        |(nodes, sockets, cores, smt, caches, hugepages, memory_only)| {
            let caches = if cores % caches.max(1) == 0 { caches } else { 1 };
            let sockets = if nodes % sockets == 0 { sockets } else { 1 };
            let mut builder = Machine::builder()
                .nodes(nodes)
                .sockets(sockets)
                .cores_per_node(cores)
                .smt(smt)
                .caches_per_node(caches)
                .memory(Bytes::mib(256))
                .hugepages(PAGE_2M, hugepages);
            if let Some(gap) = memory_only {
                builder = builder.node(NodeId(nodes + gap), |node| node.cores(0));
            }
            builder.build().unwrap()
        },
    )
}

fn resources(cpu: impl Strategy<Value = u64>) -> impl Strategy<Value = Resources> {
    (cpu, 1u64..=300, option::weighted(0.2, 1u64..=8)).prop_map(|(milli_cpus, memory, pages)| {
        let mut resources = Resources::none()
            .with_cpu(Quantity::milli(milli_cpus))
            .with_memory(Quantity::whole(memory << 20));
        if let Some(pages) = pages {
            resources = resources.with_hugepages(PAGE_2M, Quantity::whole(pages << 21));
        }
        resources
    })
}

fn container() -> impl Strategy<Value = ContainerRequest> {
    let cpus = prop_oneof![3 => (1u64..=6).prop_map(|cpus| cpus * 1000), 1 => 100u64..=1500];
    let guaranteed = sample::select(vec![true, true, true, false]);
    (resources(cpus), guaranteed).prop_map(|(resources, guaranteed)| {
        let mut container = ContainerRequest::guaranteed("", resources);
        if !guaranteed {
            container.limits = Resources::none();
        }
        container
    })
}

/// Makes a request; the caller sets the owner.
fn request(max_init: usize) -> impl Strategy<Value = Request> {
    let init = collection::vec((container(), any::<bool>()), 0..=max_init);
    (init, collection::vec(container(), 1..=3)).prop_map(|(init, apps)| {
        let named = |prefix: &str, index: usize, mut container: ContainerRequest| {
            container.name = format!("{prefix}{index}").into();
            container
        };
        let init_containers = init.into_iter().enumerate().map(|(index, (container, restartable))| {
            ContainerRequest { restartable, ..named("i", index, container) }
        });
        let containers = apps.into_iter().enumerate().map(|(index, container)| named("c", index, container));
        Request {
            owner: "".into(),
            init_containers: init_containers.collect(),
            containers: containers.collect(),
            resources: None,
        }
    })
}

#[derive(Clone, Debug)]
enum LedgerStep {
    Admit(Request),
    /// Removes the n-th running owner.
    Remove(sample::Index),
}

fn steps(max_init: usize) -> impl Strategy<Value = Vec<LedgerStep>> {
    let step = prop_oneof![
        3 => request(max_init).prop_map(LedgerStep::Admit),
        1 => any::<sample::Index>().prop_map(LedgerStep::Remove),
    ];
    collection::vec(step, 1..16)
}

fn config() -> impl Strategy<Value = PolicyConfig> {
    let cpu_options = sample::subsequence(CPU_OPTIONS.to_vec(), 0..=2);
    let topology = sample::select(TopologyManagerPolicy::ALL);
    (cpu_options, topology, any::<[bool; 4]>()).prop_map(
        |(cpu_options, topology, [pod, closest, cpus, memory])| {
            let on = |name: &str| (name.to_owned(), "true".to_owned());
            let mut config = PolicyConfig {
                topology_manager_policy: topology,
                topology_manager_scope: if pod {
                    TopologyManagerScope::Pod
                } else {
                    TopologyManagerScope::Container
                },
                ..PolicyConfig::default()
            };
            if closest {
                config.topology_manager_policy_options = BTreeMap::from([on("prefer-closest-numa-nodes")]);
            }
            if cpus {
                config.cpu_manager_policy = CpuManagerPolicy::Static;
                config.cpu_manager_policy_options = cpu_options.into_iter().map(on).collect();
                config.cpu_reservation = Some(Quantity::whole(1));
            }
            if memory || !cpus {
                config.memory_manager_policy = MemoryManagerPolicy::Static;
                let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(16 << 20))]);
                config.reserved_memory = vec![MemoryReservation { numa_node: NodeId(0), limits }];
            }
            config
        },
    )
}

// ---------------------------------------------------------------------------------------------------------
// A run

struct KubeletRun {
    kubelet: KubeletStrategy,
    ledger: Ledger,
    running: Vec<Request>,
}

impl KubeletRun {
    fn new(machine: &Machine, config: &PolicyConfig) -> Option<Self> {
        let kubelet = KubeletStrategy::new(machine, config).ok()?;
        let ledger = kubelet.finish_restore(&kubelet.restore(Checkpoints::default(), "").ledger.unwrap());
        assert_eq!(kubelet.idle(), ledger);
        Some(Self { kubelet, ledger, running: Vec::new() })
    }

    /// Admits and starts a request; returns whether it was admitted.
    fn admit(&mut self, request: &Request) -> bool {
        let decision = self.kubelet.admit(&self.ledger, request);
        self.ledger = decision.ledger;
        if decision.outcome.is_err() {
            return false;
        }
        for container in request.all_containers() {
            self.ledger = self.kubelet.note_started(&self.ledger, &request.owner, &container.name);
        }
        self.running.push(request.clone());
        true
    }

    fn step(&mut self, number: usize, step: &LedgerStep, name: impl Fn(usize) -> String) {
        match step {
            LedgerStep::Admit(request) => {
                let request = Request { owner: name(number).into(), ..request.clone() };
                self.admit(&request);
            }
            LedgerStep::Remove(index) if !self.running.is_empty() => {
                let request = self.running.remove(index.index(self.running.len()));
                self.ledger = self.kubelet.release(&self.ledger, &request.owner);
            }
            LedgerStep::Remove(_) => {}
        }
    }
}

/// Returns whether all nodes of each group agree on the group.
fn is_intact(ledger: &Ledger) -> bool {
    ledger.nodes().values().all(|account| {
        account
            .group
            .iter()
            .all(|node| ledger.nodes().get(&node).is_some_and(|other| other.group == account.group))
    })
}

/// Returns the guaranteed bytes by group and kind, from the node accounts and from the containers.
fn books(ledger: &Ledger) -> BTreeMap<(NodeSet, ZoneKind), (u64, u64, u64)> {
    let mut sums: BTreeMap<(NodeSet, ZoneKind), (u64, u64, u64)> = BTreeMap::new();
    for account in ledger.nodes().values() {
        for (&kind, of) in &account.kinds {
            sums.entry((account.group.clone(), kind)).or_default().0 += of.guaranteed.0;
        }
    }
    for (_, _, allocation) in ledger.allocations() {
        for block in &allocation.blocks {
            sums.entry((block.affinity.clone(), block.kind)).or_default().1 += block.bytes.0;
        }
        for (&kind, nodes) in &allocation.placed {
            for (node, bytes) in nodes {
                sums.entry((ledger.nodes()[node].group.clone(), kind)).or_default().2 += bytes.0;
            }
        }
    }
    sums
}

/// Returns all guarantees without the distribution within groups, which the kubelet does not know.
fn promises(ledger: &Ledger) -> impl PartialEq + std::fmt::Debug + use<> {
    let nodes: BTreeMap<_, _> =
        ledger.nodes().iter().map(|(node, of)| (*node, (of.assignments, of.group.clone()))).collect();
    let held: BTreeMap<_, _> = ledger
        .allocations()
        .map(|(owner, container, of)| {
            let mut blocks = of.blocks.clone();
            blocks.sort();
            ((owner.clone(), container.clone()), (of.cpus.clone(), blocks))
        })
        .collect();
    (
        nodes,
        held,
        ledger.shared_pool().clone(),
        books(ledger).into_iter().map(|(of, sums)| (of, sums.0)).collect::<Vec<_>>(),
    )
}

/// Returns the regular init containers, which may share CPUs with later containers.
fn is_init(run: &KubeletRun, owner: &OwnerId, container: &ContainerName) -> bool {
    run.running.iter().any(|request| &request.owner == owner && request.is_regular_init(container))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_cpu_or_byte_is_given_twice(machine in machine(), config in config(), steps in steps(2)) {
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        let mut intact = true;
        for (number, step) in steps.iter().enumerate() {
            run.step(number, step, |number| format!("p{number}"));
            let mut taken = CpuSet::new();
            for (owner, container, allocation) in run.ledger.allocations() {
                let Some(cpus) = &allocation.cpus else { continue };
                prop_assert!(!cpus.intersects(run.ledger.shared_pool()), "{owner} {container} shares {cpus}");
                // The init containers of a stale owner are unknown.
                if run.running.iter().any(|request| &request.owner == owner) && !is_init(&run, owner, container) {
                    prop_assert!(!cpus.intersects(&taken), "{owner} {container}: {cpus} taken twice");
                    taken = &taken | cpus;
                }
            }
            intact &= is_intact(&run.ledger);
            for (node, account) in run.ledger.nodes() {
                for (kind, of) in &account.kinds {
                    prop_assert_eq!(of.guaranteed.0 + of.free.0, of.allocatable.0, "node {} {}", node, kind);
                }
            }
            if intact {
                for ((group, kind), (nodes, blocks, placed)) in books(&run.ledger) {
                    prop_assert_eq!(nodes, blocks, "{:?} {}: nodes and blocks", &group, kind);
                    prop_assert_eq!(nodes, placed, "{:?} {}: nodes and containers", &group, kind);
                }
            }
        }
    }

    #[test]
    fn release_restores_the_ledger(
        machine in machine(),
        config in config(),
        steps in steps(2),
        request in request(2),
    ) {
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        for (number, step) in steps.iter().enumerate() {
            run.step(number, step, |number| format!("p{number}"));
            prop_assume!(is_intact(&run.ledger));
        }
        // Releases the remains of rejected owners.
        run.admit(&Request::workload("sweeper", Resources::none()));
        run.ledger = run.kubelet.release(&run.ledger, &"sweeper".into());
        let before = promises(&run.ledger);
        if run.admit(&Request { owner: "guest".into(), ..request }) {
            prop_assume!(is_intact(&run.ledger));
            run.ledger = run.kubelet.release(&run.ledger, &"guest".into());
            prop_assert_eq!(promises(&run.ledger), before);
        }
    }

    #[test]
    fn restart_changes_nothing(
        machine in machine(),
        config in config(),
        steps in steps(0),
        shuffle in any::<sample::Index>(),
    ) {
        // Running owners can be rejected because of the defects in `kubelet::defects`, or by policies that refuse
        // allocations made with `align-by-socket`.
        prop_assume!(config.topology_manager_policy <= TopologyManagerPolicy::BestEffort);
        prop_assume!(!config.cpu_manager_policy_options.contains_key("full-pcpus-only"));
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        for (number, step) in steps.iter().enumerate() {
            run.step(number, step, |number| format!("p{number}"));
            prop_assume!(is_intact(&run.ledger));
        }
        run.admit(&Request::workload("sweeper", Resources::none()));
        // With `strict-cpu-reservation`, an empty pool is refused.
        prop_assume!(config.cpu_manager_policy == CpuManagerPolicy::None || !run.ledger.shared_pool().is_empty());

        let files = run.kubelet.checkpoints(&run.ledger);
        let [cpus, memory] =
            [files.cpus.as_ref().unwrap().write().unwrap(), files.memory.as_ref().unwrap().write().unwrap()];
        let read = Checkpoints::read(Some(&cpus), Some(&memory), "", KubeletVersion::V1_32).unwrap();
        prop_assert_eq!(&read, &files);
        let restored = run.kubelet.restore(read, "");
        prop_assert_eq!(&restored.checkpoints, &files);
        let mut ledger = restored.ledger.unwrap();
        prop_assert_eq!(promises(&ledger), promises(&run.ledger));
        if !run.running.is_empty() {
            let first = shuffle.index(run.running.len());
            run.running.rotate_left(first);
        }
        for request in &run.running {
            let decision = run.kubelet.admit(&ledger, request);
            prop_assert!(decision.outcome.is_ok(), "{} is rejected: {:?}", &request.owner, decision.outcome);
            ledger = decision.ledger;
        }
        prop_assert_eq!(promises(&run.kubelet.finish_restore(&ledger)), promises(&run.ledger));
    }

    #[test]
    fn rebase_on_same_machine_is_identity(machine in machine(), config in config(), steps in steps(2)) {
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        for (number, step) in steps.iter().enumerate() {
            run.step(number, step, |number| format!("p{number}"));
            prop_assume!(is_intact(&run.ledger));
        }
        let (rebased, uncovered) = run.kubelet.rebase(&run.ledger);
        prop_assert_eq!(uncovered, Vec::new());
        prop_assert_eq!(promises(&rebased), promises(&run.ledger));
        // From then on, the bytes of each container by node are exact.
        for (node, kinds) in rebased.memory() {
            prop_assert_eq!(&kinds, &rebased.nodes()[&node].kinds, "node {}", node);
        }
    }

    #[test]
    fn names_do_not_affect_decisions(machine in machine(), config in config(), steps in steps(2)) {
        let Some(mut one) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        let Some(mut other) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        // Owners in ascending and in descending order, so that maps have the opposite order.
        for (number, step) in steps.iter().enumerate() {
            one.step(number, step, |number| format!("p{number:02}"));
            other.step(number, step, |number| format!("p{:02}", 99 - number));
            prop_assume!(is_intact(&one.ledger));
            prop_assert_eq!(one.running.len(), other.running.len());
            prop_assert_eq!(one.ledger.nodes(), other.ledger.nodes());
            prop_assert_eq!(one.ledger.shared_pool(), other.ledger.shared_pool());
        }
    }

    #[test]
    fn ledgers_survive_serialization(machine in machine(), config in config(), steps in steps(2)) {
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        for (number, step) in steps.iter().enumerate() {
            run.step(number, step, |number| format!("p{number}"));
        }
        let text = serde_json::to_string(&run.ledger).unwrap();
        prop_assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), run.ledger);
    }

    #[test]
    fn explanations_agree_with_decisions(machine in machine(), config in config(), steps in steps(2)) {
        let Some(mut run) = KubeletRun::new(&machine, &config) else { return Ok(()) };
        for (number, step) in steps.iter().enumerate() {
            if let LedgerStep::Admit(request) = step {
                let request = Request { owner: format!("p{number}").into(), ..request.clone() };
                let decision = run.kubelet.admit(&run.ledger, &request);
                for merge in &decision.explanation.merges {
                    let candidates = merge.candidates();
                    let chosen: Vec<_> = candidates
                        .iter()
                        .filter(|candidate| candidate.verdict == numaward_engine::explain::MergeVerdict::Chosen)
                        .collect();
                    let seen: BTreeSet<_> = candidates.iter().map(|candidate| &candidate.affinity).collect();
                    prop_assert_eq!(seen.len(), candidates.len(), "a candidate comes once");
                    prop_assert!(chosen.len() <= 1);
                    if let (Some(chosen), Some(best)) = (chosen.first(), &merge.best.affinity) {
                        prop_assert_eq!(&chosen.affinity, best);
                        prop_assert_eq!(&candidates[0], *chosen, "the best comes first");
                    }
                    prop_assert!(!chosen.is_empty() || !merge.best.preferred, "{:?}", merge.best);
                }
                if let Err(rejection) = &decision.outcome
                    && request.qos() == QosClass::Guaranteed
                {
                    prop_assert!(!rejection.shortfalls.is_empty(), "{:?}", rejection);
                }
            }
            run.step(number, step, |number| format!("p{number}"));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Anything at all

fn any_id() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 0u32..6, 2 => 60u32..70, 1 => Just(250), 1 => Just(65_535), 1 => any::<u32>()]
}

fn any_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 6 => 1u64..=1 << 32, 1 => any::<u64>()]
}

fn any_machine() -> impl Strategy<Value = Machine> {
    let pools = collection::btree_map(
        sample::select(vec![PAGE_2M, PAGE_1G, HugepageSize(Bytes(0)), HugepageSize(Bytes(u64::MAX))]),
        (any_bytes(), any_bytes()).prop_map(|(total, free)| HugepagePool { total, free, surplus: 0 }),
        0..=2,
    );
    let node = (any_bytes(), pools, collection::btree_map(any_id().prop_map(NodeId), any::<u32>(), 0..=4))
        .prop_map(|(memory, hugepages, distances)| NumaNode {
            memory: Bytes(memory),
            hugepages,
            distances,
            ..NumaNode::default()
        });
    let cpu =
        (any_id(), any_id(), any_id(), option::of(any_id())).prop_map(|(node, core, socket, cache)| Cpu {
            node: NodeId(node),
            core: CoreId(core),
            socket: SocketId(socket),
            last_level_cache: cache.map(CacheId),
        });
    let nodes = collection::btree_map(any_id().prop_map(NodeId), node, 0..=7);
    let cpus = collection::vec((any_id(), cpu), 0..=24);
    (nodes, cpus, any::<[bool; 2]>()).prop_map(|(nodes, cpus, [mend_nodes, mend_ids])| {
        let mut machine = Machine { nodes, ..Machine::default() };
        if mend_ids {
            machine.nodes.retain(|node, _| node.0 <= 65_535);
        }
        let ids: Vec<_> = machine.nodes.keys().copied().collect();
        for (index, (id, mut cpu)) in cpus.into_iter().enumerate() {
            if mend_nodes && !ids.is_empty() {
                cpu.node = ids[index % ids.len()];
            }
            let id = if mend_ids { id % 65_536 } else { id };
            machine.cpus.insert(CpuId(id), cpu);
            // The CPU list of a node may contradict the nodes of the CPUs.
            if let Some(node) = machine.nodes.get_mut(&cpu.node).filter(|_| id <= 65_535) {
                node.cpus.insert(CpuId(id));
            }
        }
        machine
    })
}

fn any_quantity() -> impl Strategy<Value = Quantity> {
    prop_oneof![
        (1u64..8).prop_map(Quantity::whole),
        any::<u64>().prop_map(Quantity::whole),
        any::<u64>().prop_map(Quantity::milli),
        sample::select(vec!["0", "1500m", "1.5Gi", "12E", "9E", "16Ei", "1n", "1e20", "64Mi"])
            .prop_map(|text| text.parse().unwrap()),
    ]
}

fn any_resources() -> impl Strategy<Value = Resources> {
    let kind = sample::select(vec![
        ZoneKind::Memory,
        ZoneKind::Hugepages(PAGE_2M),
        ZoneKind::Hugepages(PAGE_1G),
        ZoneKind::Hugepages(HugepageSize(Bytes(0))),
    ]);
    (option::of(any_quantity()), collection::btree_map(kind, any_quantity(), 0..=3))
        .prop_map(|(cpu, memory)| Resources { cpu, memory })
}

fn any_container() -> impl Strategy<Value = ContainerRequest> {
    let name = sample::select(vec!["a", "b", "c", "d", ""]);
    (name, any::<bool>(), any_resources(), any_resources(), sample::select(vec![true, true, true, false]))
        .prop_map(|(name, restartable, requests, limits, equal)| ContainerRequest {
            name: name.into(),
            restartable,
            limits: if equal { requests.clone() } else { limits },
            requests,
        })
}

fn any_request() -> impl Strategy<Value = Request> {
    let owner = sample::select(vec!["p", "q", ""]);
    (owner, collection::vec(any_container(), 0..=2), collection::vec(any_container(), 0..=3)).prop_map(
        |(owner, init_containers, containers)| Request {
            owner: owner.into(),
            init_containers,
            containers,
            resources: None,
        },
    )
}

fn any_config() -> impl Strategy<Value = PolicyConfig> {
    let reservation = (any_id(), collection::btree_map(Just(ZoneKind::Memory), any_quantity(), 0..=1))
        .prop_map(|(node, limits)| MemoryReservation { numa_node: NodeId(node), limits });
    let reserved_cpus = collection::vec(0u32..80, 0..3).prop_map(|ids| ids.into_iter().map(CpuId).collect());
    let value = sample::select(vec!["true", "false", "", "9", "99999999999999999999", "-1"]);
    let option = sample::select(vec!["max-allowable-numa-nodes", "prefer-closest-numa-nodes", "x"]);
    let options = collection::btree_map(option.prop_map(str::to_owned), value.prop_map(str::to_owned), 0..=1);
    (
        config(),
        any::<[bool; 3]>(),
        collection::vec(reservation, 0..3),
        reserved_cpus,
        option::of(any_quantity()),
        options,
    )
        .prop_map(
            |(config, [own_memory, own_cpus, own_options], reserved_memory, cpus, quantity, options)| {
                let mut config = config;
                if own_memory {
                    config.reserved_memory = reserved_memory;
                }
                if own_cpus {
                    config.reserved_system_cpus = cpus;
                    config.cpu_reservation = quantity;
                }
                if own_options {
                    config.topology_manager_policy_options = options;
                }
                config
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn nothing_panics(
        machine in any_machine(),
        config in any_config(),
        requests in collection::vec((any_request(), any::<bool>()), 1..6),
        other in any_machine(),
    ) {
        let problems = KubeletStrategy::problems(&machine, &config);
        for problem in &problems {
            prop_assert!(!problem.to_string().is_empty());
        }
        let Some(mut run) = KubeletRun::new(&machine, &config) else {
            prop_assert!(!problems.is_empty());
            return Ok(());
        };
        prop_assert!(problems.is_empty(), "{problems:?}");
        for (request, remove) in &requests {
            let decision = run.kubelet.admit(&run.ledger, request);
            for merge in &decision.explanation.merges {
                merge.candidates();
            }
            if let Err(rejection) = &decision.outcome {
                prop_assert!(!rejection.message.is_empty());
            }
            run.admit(request);
            if *remove {
                run.ledger = run.kubelet.release(&run.ledger, &request.owner);
            }
        }
        // The state of one machine on another one.
        let files = run.kubelet.checkpoints(&run.ledger);
        if let Ok(kubelet) = KubeletStrategy::new(&other, &config) {
            let restored = kubelet.restore(files, "dir");
            if let Ok(ledger) = restored.ledger {
                kubelet.admit(&ledger, &requests[0].0);
            }
        }
    }

    #[test]
    fn parsers_do_not_panic(text in ".{0,40}", digits in "[0-9]{0,30}\\.?[0-9]{0,30}(Ki|Mi|Ei|m|k|E|e-?[0-9]{1,12})?") {
        let _ = text.parse::<Quantity>();
        let _ = digits.parse::<Quantity>();
        let _ = CpuCheckpoint::read(&text);
        let _ = MemoryCheckpoint::read(&text, KubeletVersion::V1_36);
    }

    #[test]
    fn refuses_damaged_checkpoints(at in any::<sample::Index>(), byte in any::<u8>()) {
        let machine = Machine::builder().nodes(2).cores_per_node(4).build().unwrap();
        let mut config = PolicyConfig { cpu_manager_policy: CpuManagerPolicy::Static, ..PolicyConfig::default() };
        config.cpu_reservation = Some(Quantity::whole(1));
        config.memory_manager_policy = MemoryManagerPolicy::Static;
        let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(16 << 20))]);
        config.reserved_memory = vec![MemoryReservation { numa_node: NodeId(0), limits }];
        let mut run = KubeletRun::new(&machine, &config).unwrap();
        let full = Resources::none().with_cpu(Quantity::whole(2)).with_memory(Quantity::whole(64 << 20));
        prop_assert!(run.admit(&Request::workload("p", full)));
        let files = run.kubelet.checkpoints(&run.ledger);
        for text in [files.cpus.unwrap().write().unwrap(), files.memory.unwrap().write().unwrap()] {
            let mut bytes = text.clone().into_bytes();
            let position = at.index(bytes.len());
            prop_assume!(bytes[position] != byte);
            bytes[position] = byte;
            // A damaged byte is detected unless JSON ignores it.
            if let Ok(damaged) = String::from_utf8(bytes) {
                let same = |read: &str| read == text || damaged.split_whitespace().collect::<String>() == text;
                if text.contains("defaultCpuSet") {
                    if let Ok(state) = CpuCheckpoint::read(&damaged) {
                        prop_assert!(same(&state.write().unwrap()), "{damaged}");
                    }
                } else if let Ok(state) = MemoryCheckpoint::read(&damaged, KubeletVersion::V1_32) {
                    prop_assert!(same(&state.write().unwrap()), "{damaged}");
                }
            }
        }
    }
}

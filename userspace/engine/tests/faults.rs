//! Invalid configurations, unusual machines and impossible requests: each has a clear error.

#![expect(clippy::unwrap_used, reason = "what prepares a case fails the test if it fails")]

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::{
    Cause, ContainerRequest, Decision, KubeletStrategy, Ledger, PolicyConfig, Quantity, Reason, Request,
    Resources, Strategy as _,
    checkpoint::CheckpointError,
    explain::MergeVerdict,
    hint::Resource,
    kubelet::{Checkpoints, MAX_NODES, as_reported_to_kubelet, share_one_cache},
    policy::{
        Component, CpuManagerPolicy, KubeletVersion, MachineProblem, MemoryManagerPolicy, MemoryReservation,
        RestoreProblem, StartPhase, StartProblem, TopologyManagerPolicy,
    },
};
use numaward_topology::{Bytes, CacheId, CpuId, HugepageSize, Machine, NodeId, ZoneKind};

const PAGE_2M: HugepageSize = HugepageSize(Bytes::mib(2));
const PAGE_1G: HugepageSize = HugepageSize(Bytes::gib(1));

fn machine() -> Machine {
    Machine::builder()
        .nodes(2)
        .sockets(2)
        .cores_per_node(4)
        .smt(2)
        .memory(Bytes::gib(10))
        .hugepages(PAGE_2M, 512)
        .build()
        .unwrap()
}

fn reserved(amounts: &[(u32, ZoneKind, &str)]) -> Vec<MemoryReservation> {
    let reservation = |&(node, kind, amount): &(u32, ZoneKind, &str)| MemoryReservation {
        numa_node: NodeId(node),
        limits: BTreeMap::from([(kind, amount.parse().unwrap())]),
    };
    amounts.iter().map(reservation).collect()
}

fn config() -> PolicyConfig {
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: reserved(&[(0, ZoneKind::Memory, "1Gi")]),
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(1)),
        topology_manager_policy: TopologyManagerPolicy::SingleNumaNode,
        ..PolicyConfig::default()
    }
}

fn options(options: &[(&str, &str)]) -> BTreeMap<String, String> {
    options.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn start(machine: &Machine, config: &PolicyConfig) -> (KubeletStrategy, Ledger) {
    let kubelet = KubeletStrategy::new(machine, config).unwrap();
    let ledger = kubelet.idle();
    (kubelet, ledger)
}

fn full(cpus: u64, memory: Bytes) -> Resources {
    Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(memory.0))
}

/// Change that makes the configuration invalid, and the texts of the error.
type Fault = (fn(&mut PolicyConfig), &'static [&'static str]);

/// Checks that the component refuses each faulty configuration.
fn refused(component: Component, faults: &[Fault]) {
    for (change, texts) in faults {
        let mut config = config();
        change(&mut config);
        let error = KubeletStrategy::new(&machine(), &config).unwrap_err();
        assert_eq!((error.component, error.phase), (component, StartPhase::New), "{error}");
        for text in *texts {
            assert!(error.to_string().contains(text), "{error:?}\nlacks {text:?}");
        }
    }
}

#[test]
fn accepts_valid_configuration() {
    assert!(KubeletStrategy::problems(&machine(), &config()).is_empty());
}

#[test]
fn refuses_faulty_reservations() {
    let configuration: &[Fault] = &[
        (
            |c| c.reserved_memory = reserved(&[(0, ZoneKind::Memory, "1Gi"), (0, ZoneKind::Memory, "2Gi")]),
            &["duplicate value for NUMA node 0 and type memory: 1073741824 and 2147483648"],
        ),
        (|c| c.reserved_memory = reserved(&[(0, ZoneKind::Memory, "0")]), &["memory on NUMA node 0 is zero"]),
    ];
    refused(Component::Configuration, configuration);
    let memory: &[Fault] = &[
        (
            |c| c.reserved_memory = reserved(&[(7, ZoneKind::Memory, "1Gi")]),
            &["references a NUMA node 7 that does not exist on this machine"],
        ),
        (
            |c| c.reserved_memory.extend(reserved(&[(1, ZoneKind::Hugepages(PAGE_1G), "1Gi")])),
            &["hugepages-1Gi on NUMA node 1", "no such hugepages"],
        ),
        (
            |c| c.reserved_memory.extend(reserved(&[(1, ZoneKind::Hugepages(PAGE_2M), "2Gi")])),
            &["hugepages-2Mi on NUMA node 1 is 2Gi, more than the 1Gi it has"],
        ),
        (
            // 1 Gi of the 10 Gi is in huge page pools.
            |c| c.reserved_memory = reserved(&[(0, ZoneKind::Memory, "9217Mi")]),
            &["memory on NUMA node 0 is 9217Mi, more than the 9Gi it has"],
        ),
        (
            |c| c.reserved_memory = reserved(&[(0, ZoneKind::Memory, "1.5Gi")]),
            &["could not covert a variable of type Quantity to int64", "memory on NUMA node 0"],
        ),
        (
            |c| c.node_reservation = Some(BTreeMap::from([(ZoneKind::Memory, "2Gi".parse().unwrap())])),
            &["\"1Gi\" of type \"memory\" is not equal to the value \"2Gi\""],
        ),
        (
            |c| {
                c.node_reservation = Some(BTreeMap::from([
                    (ZoneKind::Memory, "1Gi".parse().unwrap()),
                    (ZoneKind::Hugepages(PAGE_2M), "4Mi".parse().unwrap()),
                ]));
            },
            &["\"0\" of type \"hugepages-2Mi\" is not equal to the value \"4Mi\""],
        ),
        (|c| c.reserved_memory.clear(), &["you should specify the system reserved memory"]),
    ];
    refused(Component::MemoryManager, memory);
}

#[test]
fn refuses_faulty_cpu_policies() {
    let faults: &[Fault] = &[
        (|c| c.cpu_reservation = None, &["unable to determine reserved CPU resources for static policy"]),
        (|c| c.cpu_reservation = Some(Quantity::whole(0)), &["to be greater than zero"]),
        (|c| c.cpu_reservation = Some(Quantity::whole(17)), &["(size of  did not equal 17)"]),
        (|c| c.reserved_system_cpus = "0,99".parse().unwrap(), &["unknown CPU ID: 99"]),
        (
            |c| c.cpu_manager_policy_options = options(&[("align-by-socket", "true")]),
            &["single-numa-node policy is incompatible with CPUManager align-by-socket"],
        ),
        (
            |c| c.cpu_manager_policy_options = options(&[("full-cpus", "true")]),
            &["unknown CPU Manager Policy option: \"full-cpus\""],
        ),
        (
            |c| c.cpu_manager_policy_options = options(&[("full-pcpus-only", "yes")]),
            &["bad value for option \"full-pcpus-only\"", "parsing \"yes\""],
        ),
        (
            |c| {
                c.cpu_manager_policy_options = options(&[
                    ("distribute-cpus-across-numa", "true"),
                    ("prefer-align-cpus-by-uncorecache", "true"),
                ]);
            },
            &["prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa can not be used"],
        ),
        (
            |c| {
                c.kubelet_version = KubeletVersion::V1_32;
                c.feature_gates = BTreeMap::from([("CPUManagerPolicyBetaOptions".to_owned(), false)]);
                c.cpu_manager_policy_options = options(&[("full-pcpus-only", "true")]);
            },
            &["Beta-level Options not enabled, but option \"full-pcpus-only\" provided"],
        ),
        (
            |c| {
                c.cpu_manager_policy = CpuManagerPolicy::None;
                c.cpu_manager_policy_options = options(&[("full-pcpus-only", "true"), ("x", "1")]);
            },
            &["received unsupported options=map[full-pcpus-only:true x:1]"],
        ),
    ];
    refused(Component::CpuManager, faults);
}

#[test]
fn refuses_faulty_topology_policies() {
    let faults: &[Fault] = &[
        (
            |c| c.topology_manager_policy_options = options(&[("foo", "true")]),
            &["unknown Topology Manager Policy option: \"foo\""],
        ),
        (
            |c| c.topology_manager_policy_options = options(&[("max-allowable-numa-nodes", "eight")]),
            &["integer \"max-allowable-numa-nodes\": strconv.Atoi: parsing \"eight\": invalid syntax"],
        ),
        (
            |c| c.topology_manager_policy_options = options(&[("max-allowable-numa-nodes", "4")]),
            &["\"max-allowable-numa-nodes\" should not be less than 8"],
        ),
    ];
    refused(Component::TopologyManager, faults);
}

#[test]
fn problems_cover_all_components() {
    let config = PolicyConfig {
        topology_manager_policy_options: options(&[("foo", "true")]),
        cpu_reservation: None,
        reserved_memory: Vec::new(),
        ..config()
    };
    let components: Vec<_> =
        KubeletStrategy::problems(&machine(), &config).iter().map(|problem| problem.component).collect();
    assert_eq!(components, [Component::TopologyManager, Component::CpuManager, Component::MemoryManager]);
}

#[test]
fn refuses_impossible_machines() {
    let two_nodes = |change: fn(&mut Machine)| {
        let mut machine = machine();
        change(&mut machine);
        *KubeletStrategy::new(&machine, &config()).unwrap_err().problem
    };
    assert_eq!(two_nodes(|m| m.nodes.clear()), MachineProblem::NoNodes.into());
    let nodes = MAX_NODES + 1;
    let many = Machine::builder().nodes(u32::try_from(nodes).unwrap()).build().unwrap();
    let error = KubeletStrategy::new(&many, &config()).unwrap_err();
    assert_eq!(*error.problem, MachineProblem::TooManyNodes { nodes, limit: MAX_NODES }.into());
    let id = 70_000;
    assert_eq!(
        two_nodes(|m| {
            let node = m.nodes[&NodeId(1)].clone();
            m.nodes.insert(NodeId(70_000), node);
        }),
        MachineProblem::IdTooLarge("NUMA node", id).into()
    );
    assert_eq!(
        two_nodes(|m| {
            let cpu = m.cpus[&CpuId(1)];
            m.cpus.insert(CpuId(70_000), cpu);
        }),
        MachineProblem::IdTooLarge("CPU", id).into()
    );
    assert_eq!(
        two_nodes(|m| {
            m.nodes.remove(&NodeId(1));
        }),
        MachineProblem::CpuOnUnknownNode(CpuId(4), NodeId(1)).into()
    );
    assert_eq!(
        two_nodes(|m| m.nodes.get_mut(&NodeId(1)).unwrap().memory = Bytes(u64::MAX)),
        MachineProblem::MemoryTooLarge(NodeId(1)).into()
    );
    assert_eq!(
        two_nodes(|m| m.nodes.get_mut(&NodeId(1)).unwrap().memory = Bytes::mib(10)),
        MachineProblem::HugepagesTooLarge {
            node: NodeId(1),
            hugepages: Bytes::gib(1),
            memory: Bytes::mib(10)
        }
        .into()
    );
    assert_eq!(
        *KubeletStrategy::new(
            &Machine::builder().nodes(9).memory(Bytes::gib(2)).build().unwrap(),
            &PolicyConfig { topology_manager_policy: TopologyManagerPolicy::Restricted, ..config() }
        )
        .unwrap_err()
        .problem,
        StartProblem::TooManyNodes(8)
    );
    let mut no_distances = machine();
    no_distances.nodes.get_mut(&NodeId(1)).unwrap().distances.clear();
    let closest = options(&[("prefer-closest-numa-nodes", "true")]);
    let config = PolicyConfig { topology_manager_policy_options: closest, ..config() };
    let error = KubeletStrategy::new(&no_distances, &config).unwrap_err();
    assert!(error.to_string().contains("none from node 1 to node 0"), "{error}");
}

#[test]
fn serves_requests_that_crash_kubelets() {
    // Node ids of 64 and more, and ids above the number of nodes with `prefer-closest-numa-nodes`.
    let machine = Machine::builder()
        .node_ids([NodeId(0), NodeId(64), NodeId(250)])
        .cores_per_node(4)
        .memory(Bytes::gib(4))
        .build()
        .unwrap();
    let closest = options(&[("prefer-closest-numa-nodes", "true")]);
    let config = PolicyConfig {
        topology_manager_policy: TopologyManagerPolicy::Restricted,
        topology_manager_policy_options: closest,
        ..config()
    };
    let (kubelet, ledger) = start(&machine, &config);
    let decision = kubelet.admit(&ledger, &Request::workload("w", full(6, Bytes::gib(6))));
    let grants = decision.outcome.unwrap();
    assert_eq!(grants[0].allocation.memory_nodes(), "0,64".parse().unwrap());

    // A huge page size that a node does not have counts as zero.
    let mut machine = self::machine();
    machine.nodes.get_mut(&NodeId(0)).unwrap().hugepages.clear();
    let (kubelet, ledger) = start(&machine, &self::config());
    let with_pages = |size, bytes: Bytes| {
        let resources = full(1, Bytes::gib(1)).with_hugepages(size, Quantity::whole(bytes.0));
        Request::workload("w", resources)
    };
    let grants = kubelet.admit(&ledger, &with_pages(PAGE_2M, Bytes::mib(4))).outcome.unwrap();
    assert_eq!(grants[0].allocation.memory_nodes(), "1".parse().unwrap());
    let rejection = kubelet.admit(&ledger, &with_pages(PAGE_1G, Bytes::gib(1))).outcome.unwrap_err();
    assert_eq!(rejection.reason, Reason::UnexpectedAdmissionError);
    let pages = ZoneKind::Hugepages(PAGE_1G);
    assert!(rejection.shortfalls.iter().any(|of| of.resource == Resource::Memory(pages) && of.free == 0));
}

#[test]
fn hides_cache_of_a_whole_node() {
    let machine =
        |caches| Machine::builder().nodes(2).cores_per_node(4).caches_per_node(caches).build().unwrap();
    assert_eq!(as_reported_to_kubelet(&machine(1)), machine(0));
    assert_eq!(as_reported_to_kubelet(&machine(2)), machine(2));
    assert_eq!(as_reported_to_kubelet(&machine(0)), machine(0));
}

#[test]
fn siblings_share_the_reported_cache() {
    let mut machine =
        Machine::builder().nodes(1).cores_per_node(4).smt(2).caches_per_node(2).build().unwrap();
    let expected = as_reported_to_kubelet(&machine);
    assert_eq!(expected, machine);
    // As in QEMU, each CPU has its own cache.
    for (id, cpu) in &mut machine.cpus {
        cpu.last_level_cache = Some(CacheId(id.0));
    }
    let reported = as_reported_to_kubelet(&machine);
    let pairs: BTreeSet<_> = reported.cpus.values().map(|cpu| (cpu.core, cpu.last_level_cache)).collect();
    assert_eq!(pairs.len(), 4, "{pairs:?}");
}

#[test]
fn one_cache_check_matches_kubelet() {
    let of_one = |caches, cpus: &str| {
        let machine = Machine::builder().nodes(2).sockets(1).cores_per_node(4).caches_per_node(caches);
        let machine = as_reported_to_kubelet(&machine.build().unwrap());
        share_one_cache(&machine, &cpus.parse().unwrap())
    };
    for (caches, cpus, expected) in [
        (2, "0-1", true),
        (2, "1-2", false),
        (2, "1,5", false),
        // The socket replaces the cache.
        (1, "1,5", true),
        (0, "1,5", true),
        // No such CPU.
        (2, "0,99", false),
        (2, "99", true),
        (2, "", true),
    ] {
        assert_eq!(of_one(caches, cpus), expected, "{caches} {cpus}");
    }
}

#[test]
fn rejections_name_missing_amounts() {
    let (kubelet, ledger) = start(&machine(), &config());
    let Decision { outcome, ledger, .. } =
        kubelet.admit(&ledger, &Request::workload("a", full(2, Bytes::gib(4))));
    assert_eq!(outcome.unwrap()[0].allocation.memory_nodes(), "0".parse().unwrap());

    // More CPUs than a node has.
    let rejection =
        kubelet.admit(&ledger, &Request::workload("b", full(9, Bytes::gib(1)))).outcome.unwrap_err();
    assert_eq!(rejection.reason, Reason::TopologyAffinityError);
    assert_eq!(rejection.message, "Resources cannot be allocated with Topology locality");
    assert_eq!(rejection.cause, Cause::Topology);
    let shortfalls: Vec<_> = rejection.shortfalls.iter().map(ToString::to_string).collect();
    assert_eq!(
        shortfalls,
        [
            "node 0: cpu requested 9, free 5",
            "node 1: cpu requested 9, free 8",
            "node 0: memory requested 1.0 GiB, free 4.0 GiB",
            "node 1: memory requested 1.0 GiB, free 9.0 GiB",
        ]
    );

    // More memory than a node has: the hints are empty, and the allocation fails.
    let rejection =
        kubelet.admit(&ledger, &Request::workload("c", full(1, Bytes::gib(10)))).outcome.unwrap_err();
    assert_eq!(rejection.reason, Reason::UnexpectedAdmissionError);
    let cause = "[memorymanager] failed to find NUMA nodes to extend the current topology hint";
    assert_eq!(rejection.cause, Cause::Memory(cause.to_owned()));
    assert!(rejection.shortfalls.iter().any(|of| {
        of.node == NodeId(1)
            && of.resource == Resource::Memory(ZoneKind::Memory)
            && of.requested == Bytes::gib(10).0
            && of.free == Bytes::gib(9).0
    }));
}

#[test]
fn refuses_contradictory_requests() {
    let (kubelet, ledger) = start(&machine(), &config());
    let mut twice = Request::workload("w", full(1, Bytes::gib(1)));
    twice.init_containers = vec![ContainerRequest::guaranteed("w", Resources::none())];
    let mut empty = twice.clone();
    empty.containers.clear();
    for (request, cause) in [(twice, Cause::DuplicateContainer("w".to_owned())), (empty, Cause::NoContainers)]
    {
        let decision = kubelet.admit(&ledger, &request);
        let rejection = decision.outcome.unwrap_err();
        assert_eq!((rejection.reason, &rejection.cause), (Reason::InvalidRequest, &cause));
        assert_eq!(decision.ledger, ledger);
    }
}

#[test]
fn explains_why_candidates_lost() {
    let machine = Machine::builder()
        .nodes(3)
        .cores_per_node(4)
        .memory(Bytes::gib(4))
        .distances([[10, 30, 20], [30, 10, 30], [20, 30, 10]])
        .build()
        .unwrap();
    let config = PolicyConfig {
        topology_manager_policy: TopologyManagerPolicy::Restricted,
        topology_manager_policy_options: options(&[("prefer-closest-numa-nodes", "true")]),
        ..config()
    };
    let (kubelet, ledger) = start(&machine, &config);
    let decision = kubelet.admit(&ledger, &Request::workload("w", full(6, Bytes::gib(6))));
    let [merge] = decision.explanation.merges.as_slice() else { panic!("one merge") };
    let candidates: Vec<_> =
        merge.candidates().iter().map(|of| (of.affinity.to_string(), of.preferred, of.verdict)).collect();
    assert_eq!(
        candidates,
        [
            ("0,2".to_owned(), true, MergeVerdict::Chosen),
            ("0-1".to_owned(), true, MergeVerdict::Farther { distance: 80, chosen: 60 }),
            ("1-2".to_owned(), true, MergeVerdict::Farther { distance: 80, chosen: 60 }),
            ("0".to_owned(), false, MergeVerdict::NotPreferred),
            ("1".to_owned(), false, MergeVerdict::NotPreferred),
            ("2".to_owned(), false, MergeVerdict::NotPreferred),
            ("0-2".to_owned(), false, MergeVerdict::NotPreferred),
        ]
    );
    assert_eq!(merge.best.affinity, Some("0,2".parse().unwrap()));

    // CPUs need one node and memory two: nothing is preferred, and the target size is two nodes.
    let config = PolicyConfig { topology_manager_policy: TopologyManagerPolicy::BestEffort, ..config };
    let (kubelet, ledger) = start(&machine, &config);
    let decision = kubelet.admit(&ledger, &Request::workload("w", full(1, Bytes::gib(6))));
    let merge = &decision.explanation.merges[0];
    assert!(!merge.best.preferred);
    let verdicts: BTreeMap<_, _> =
        merge.candidates().iter().map(|of| (of.affinity.to_string(), of.verdict)).collect();
    assert_eq!(verdicts["0,2"], MergeVerdict::Chosen);
    assert_eq!(verdicts["1"], MergeVerdict::TooNarrow { nodes: 1, needed: 2 });
    assert_eq!(verdicts["0-2"], MergeVerdict::Wider { nodes: 3, chosen: 2 });
}

#[test]
fn keeps_damaged_state_files() {
    use std::error::Error as _;

    let error = Checkpoints::read(None, Some("{}"), "/var/lib/kubelet", KubeletVersion::V1_36).unwrap_err();
    assert_eq!((error.component, error.phase), (Component::MemoryManager, StartPhase::Start));
    assert_eq!(
        error.to_string(),
        "could not restore state from checkpoint: checkpoint is corrupted, please drain this node and delete \
         the memory manager checkpoint file \"/var/lib/kubelet/memory_manager_state\" before restarting Kubelet"
    );
    let problem = error.source().unwrap();
    assert!(matches!(
        problem.downcast_ref::<Box<RestoreProblem>>().map(|problem| &**problem),
        Some(RestoreProblem::Corrupt(_))
    ));
    let reason = problem.source().unwrap();
    assert!(matches!(reason.downcast_ref(), Some(CheckpointError::Json { line: 1, .. })), "{reason}");
    assert!(reason.to_string().contains("missing field `policyName`"), "{reason}");
    let error = Checkpoints::read(Some("x"), None, "dir", KubeletVersion::V1_36).unwrap_err();
    assert!(error.to_string().contains("CPU manager checkpoint file \"dir/cpu_manager_state\""), "{error}");
}

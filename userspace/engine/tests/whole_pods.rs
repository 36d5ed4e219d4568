//! Pods with pod-level resources, as a kubelet v1.36 with the gate `PodLevelResourceManagers` places them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    ContainerRequest, Decision, KubeletStrategy, Ledger, NativeOptions, NativeStrategy, PodResources,
    PolicyConfig, Reason, Request, ResizeError, Resources, Strategy as _,
    kubelet::Checkpoints,
    policy::{
        CpuManagerPolicy, KubeletVersion, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy,
        TopologyManagerScope,
    },
};
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId, ZoneKind};

const GATE: &str = "PodLevelResourceManagers";

/// Makes two nodes of four CPUs without siblings: 0-3 and 4-7.
fn machine() -> Machine {
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
    machine.build().unwrap()
}

fn config(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> PolicyConfig {
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: [(ZoneKind::Memory, "1Gi".parse().unwrap())].into(),
        }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        reserved_system_cpus: "0".parse().unwrap(),
        topology_manager_policy: policy,
        topology_manager_scope: scope,
        feature_gates: [(GATE.to_owned(), true)].into(),
        kubelet_version: KubeletVersion::V1_36,
        ..PolicyConfig::default()
    }
}

fn kubelet(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> KubeletStrategy {
    KubeletStrategy::new(&machine(), &config(policy, scope)).unwrap()
}

fn in_pod_scope() -> KubeletStrategy {
    kubelet(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod)
}

fn amounts(cpu: &str, memory: &str) -> Resources {
    Resources::none().with_cpu(cpu.parse().unwrap()).with_memory(memory.parse().unwrap())
}

fn own(name: &str, cpu: &str, memory: &str) -> ContainerRequest {
    ContainerRequest::guaranteed(name, amounts(cpu, memory))
}

fn sharing(name: &str) -> ContainerRequest {
    ContainerRequest::guaranteed(name, Resources::none())
}

fn sidecar(container: ContainerRequest) -> ContainerRequest {
    ContainerRequest { restartable: true, ..container }
}

fn pod(
    cpu: &str,
    memory: &str,
    init_containers: Vec<ContainerRequest>,
    containers: Vec<ContainerRequest>,
) -> Request {
    let all = amounts(cpu, memory);
    let resources = Some(PodResources { requests: all.clone(), limits: all });
    Request { owner: "pod".into(), init_containers, containers, resources }
}

/// Makes a pod with a container of two CPUs and 1 GiB, and a container that shares the rest.
fn mixed() -> Request {
    pod("3", "2Gi", vec![], vec![own("db", "2", "1Gi"), sharing("log")])
}

/// Returns CPUs and GiB by node of each container.
fn held(decision: &Decision) -> Vec<String> {
    let grants = decision.outcome.as_ref().unwrap().iter();
    let text = |grant: &numaward_engine::Grant| {
        let cpus = grant.allocation.cpus.as_ref().map(ToString::to_string).unwrap_or_default();
        let blocks = grant.allocation.blocks.iter();
        let blocks = blocks.map(|block| format!(" {}Gi on {}", block.bytes.0 >> 30, block.affinity));
        format!("{}: {cpus}{}", grant.container, blocks.collect::<String>())
    };
    grants.map(text).collect()
}

/// Checks that the guaranteed bytes equal the placed ones.
fn adds_up(ledger: &Ledger) {
    for (node, kinds) in ledger.memory() {
        assert_eq!(kinds, ledger.nodes()[&node].kinds, "node {node}");
    }
}

#[test]
fn pod_is_placed_once_and_divided() {
    let kubelet = in_pod_scope();
    let decision = kubelet.admit(&kubelet.idle(), &mixed());
    assert_eq!(held(&decision), ["db: 1-2 1Gi on 0", "log: 3 1Gi on 0"]);
    let ledger = &decision.ledger;
    let whole = &ledger.owner(&"pod".into()).unwrap().pod_level;
    assert_eq!(whole.cpus.as_ref().unwrap().to_string(), "1-3");
    assert_eq!(whole.blocks.iter().map(|block| block.bytes).collect::<Vec<_>>(), [Bytes::gib(2)]);
    assert_eq!(ledger.shared_pool().to_string(), "0,4-7");
    assert_eq!(ledger.nodes()[&NodeId(0)].assignments, 1, "it is charged once");
    adds_up(ledger);
    assert_eq!(kubelet.rebase(ledger).0, *ledger);
    // The division does not change.
    let resized = kubelet.resize(ledger, &"pod".into(), &"db".into(), &amounts("1", "1Gi"));
    assert_eq!(resized.unwrap_err(), ResizeError::PartOfWhole);
}

#[test]
fn last_container_releases_the_pod() {
    let kubelet = in_pod_scope();
    let mut ledger = kubelet.admit(&kubelet.idle(), &mixed()).ledger;
    ledger = kubelet.note_started(&ledger, &"pod".into(), &"db".into());
    let left = kubelet.release(&ledger, &"pod".into());
    assert_eq!(left.shared_pool().to_string(), "0,4-7", "log was not started, and is stale");
    adds_up(&left);
    ledger = kubelet.note_started(&ledger, &"pod".into(), &"log".into());
    assert_eq!(kubelet.release(&ledger, &"pod".into()), kubelet.idle());
    // The next admission releases stale allocations.
    let next = kubelet.admit(&left, &Request { owner: "next".into(), ..mixed() });
    assert_eq!(held(&next), ["db: 1-2 1Gi on 0", "log: 3 1Gi on 0"]);
    assert!(next.ledger.owner(&"pod".into()).is_none());
}

#[test]
fn init_containers_use_sidecar_rest() {
    let kubelet = in_pod_scope();
    let init =
        vec![sharing("first"), sidecar(own("proxy", "1", "1Gi")), sharing("second"), own("big", "3", "3Gi")];
    let request = pod("4", "4Gi", init, vec![own("db", "1", "1Gi"), sharing("log")]);
    let decision = kubelet.admit(&kubelet.idle(), &request);
    assert_eq!(
        held(&decision),
        [
            "first: 4-7 4Gi on 1",
            "proxy: 4 1Gi on 1",
            "second: 5-7 3Gi on 1",
            "big: 5-7 3Gi on 1",
            "db: 5 1Gi on 1",
            "log: 6-7 2Gi on 1"
        ]
    );
    adds_up(&decision.ledger);
    // The end of the init containers releases nothing.
    let mut ledger = decision.ledger;
    for container in request.all_containers() {
        ledger = kubelet.note_started(&ledger, &"pod".into(), &container.name);
        adds_up(&ledger);
    }
    assert_eq!(ledger.nodes()[&NodeId(1)].kinds[&ZoneKind::Memory].free, Bytes(0));
    assert_eq!(kubelet.release(&ledger, &"pod".into()), kubelet.idle());
}

#[test]
fn refuses_empty_shared_part() {
    let no_cpus = pod("2", "2Gi", vec![], vec![own("db", "2", "1Gi"), sharing("log")]);
    let no_memory = pod("3", "2Gi", vec![], vec![own("db", "2", "2Gi"), sharing("log")]);
    let no_first =
        pod("2", "2Gi", vec![sidecar(own("proxy", "2", "1Gi")), sharing("first")], vec![sharing("log")]);
    for (request, words) in [
        (
            no_cpus,
            "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers",
        ),
        (
            no_memory,
            "pod rejected, sum of exclusive container memory requests equals pod budget, leaving no memory for shared \
             containers",
        ),
        (no_first, "pod rejected, pod has shared init containers but no cpus available for them"),
    ] {
        let kubelet = kubelet(TopologyManagerPolicy::BestEffort, TopologyManagerScope::Pod);
        let rejection = kubelet.admit(&kubelet.idle(), &request).outcome.unwrap_err();
        assert_eq!((rejection.reason, &*rejection.message), (Reason::EmptyPodSharedPoolError, words));
        let rejection = in_pod_scope().admit(&in_pod_scope().idle(), &request).outcome.unwrap_err();
        let words =
            "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager";
        assert_eq!((rejection.reason, &*rejection.message), (Reason::TopologyAffinityError, words));
    }
    // If no container shares, the containers may use everything.
    let kubelet = in_pod_scope();
    let full = pod("3", "2Gi", vec![], vec![own("db", "2", "1Gi"), own("web", "1", "1Gi")]);
    assert_eq!(held(&kubelet.admit(&kubelet.idle(), &full)), ["db: 1-2 1Gi on 0", "web: 3 1Gi on 0"]);
}

#[test]
fn guaranteed_container_has_own_part() {
    let kubelet = in_pod_scope();
    let unequal = ContainerRequest { limits: amounts("1", "2Gi"), ..own("unequal", "1", "1Gi") };
    let request = pod("2", "2Gi", vec![], vec![unequal, own("part", "500m", "1Gi")]);
    let decision = kubelet.admit(&kubelet.idle(), &request);
    assert_eq!(held(&decision), ["unequal: 1-2 1Gi on 0", "part: 1-2 1Gi on 0"]);
    // A fraction of a CPU for the pod gives no exclusive CPUs.
    let request = pod("2500m", "2Gi", vec![], vec![own("db", "1", "1Gi"), sharing("log")]);
    let decision = kubelet.admit(&kubelet.idle(), &request);
    assert_eq!(held(&decision), ["db:  1Gi on 0", "log:  1Gi on 0"]);
}

/// Each container is placed by itself. A container without amounts gets nothing, or is refused if the nodes are used
/// by another group.
#[test]
fn container_scope_places_one_by_one() {
    let kubelet = kubelet(TopologyManagerPolicy::Restricted, TopologyManagerScope::Container);
    let alone = pod("3", "2Gi", vec![], vec![own("db", "2", "1Gi"), own("web", "1", "1Gi")]);
    let decision = kubelet.admit(&kubelet.idle(), &alone);
    assert_eq!(held(&decision), ["db: 1-2 1Gi on 0", "web: 3 1Gi on 0"]);
    assert!(decision.ledger.owner(&"pod".into()).unwrap().pod_level.is_empty());
    let sharing_first = pod("3", "2Gi", vec![], vec![sharing("log"), own("db", "2", "1Gi")]);
    let decision = kubelet.admit(&kubelet.idle(), &sharing_first);
    assert_eq!(held(&decision), ["log: ", "db: 1-2 1Gi on 0"]);
    let log = decision.ledger.allocation(&"pod".into(), &"log".into()).unwrap();
    assert!(log.without_memory);
    let file = kubelet.checkpoints(&decision.ledger).memory.unwrap().write().unwrap();
    assert!(file.contains(r#""log":[]"#), "{file}");
    let rejection = kubelet.admit(&kubelet.idle(), &mixed()).outcome.unwrap_err();
    assert!(rejection.message.contains("preferred hint violates NUMA node allocation"), "{rejection}");
    let wide = pod("8", "2Gi", vec![], vec![own("db", "8", "1Gi"), sharing("log")]);
    let rejection = kubelet.admit(&kubelet.idle(), &wide).outcome.unwrap_err();
    assert_eq!(
        rejection.message,
        "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
    );
}

#[test]
fn whole_cores_are_counted_per_pod() {
    let machine = Machine::builder().nodes(1).cores_per_node(4).smt(2).memory(Bytes::gib(4)).build().unwrap();
    let config = PolicyConfig {
        cpu_manager_policy_options: [("full-pcpus-only".to_owned(), "true".to_owned())].into(),
        ..config(TopologyManagerPolicy::BestEffort, TopologyManagerScope::Pod)
    };
    let kubelet = KubeletStrategy::new(&machine, &config).unwrap();
    let odd = pod("3", "2Gi", vec![], vec![own("db", "2", "1Gi"), sharing("log")]);
    let rejection = kubelet.admit(&kubelet.idle(), &odd).outcome.unwrap_err();
    assert_eq!(rejection.message, "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2");
    // An even number of CPUs is divided as the containers request.
    let even = pod("4", "2Gi", vec![], vec![own("db", "1", "1Gi"), sharing("log")]);
    let decision = kubelet.admit(&kubelet.idle(), &even);
    assert_eq!(held(&decision), ["db: 1 1Gi on 0", "log: 2,5-6 1Gi on 0"]);
}

#[test]
fn gate_enables_pod_level_placement() {
    let of = |version, gates: &[(&str, bool)]| {
        let feature_gates = gates.iter().map(|&(name, is_on)| (name.to_owned(), is_on)).collect();
        let config = PolicyConfig {
            feature_gates,
            kubelet_version: version,
            ..config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod)
        };
        let kubelet = KubeletStrategy::new(&machine(), &config).unwrap();
        let request = pod("3", "2Gi", vec![], vec![own("db", "2", "1Gi")]);
        held(&kubelet.admit(&kubelet.idle(), &request))
    };
    assert_eq!(of(KubeletVersion::V1_36, &[]), ["db: "]);
    assert_eq!(of(KubeletVersion::V1_36, &[(GATE, true)]), ["db: 1-2 1Gi on 0"]);
    assert_eq!(of(KubeletVersion::V1_36, &[("PodLevelResources", false)]), ["db: 1-2 1Gi on 0"]);
    assert_eq!(of(KubeletVersion::V1_32, &[]), ["db: 1-2 1Gi on 0"]);
}

/// Returns the files as text.
fn files(kubelet: &KubeletStrategy, ledger: &Ledger) -> [String; 2] {
    let Checkpoints { cpus, memory } = kubelet.checkpoints(ledger);
    [cpus.unwrap().write().unwrap(), memory.unwrap().write().unwrap()]
}

fn read([cpus, memory]: &[String; 2]) -> Checkpoints {
    Checkpoints::read(Some(cpus), Some(memory), "dir", KubeletVersion::V1_36).unwrap()
}

#[test]
fn state_files_have_pod_entries() {
    let kubelet = in_pod_scope();
    let ledger = kubelet.admit(&kubelet.idle(), &mixed()).ledger;
    let texts = files(&kubelet, &ledger);
    assert!(texts[0].contains(r#""podEntries":{"pod":{"cpuSet":"1-3"}}"#), "{}", texts[0]);
    let blocks =
        r#""podEntries":{"pod":{"memoryBlocks":[{"numaAffinity":[0],"type":"memory","size":2147483648}]}}"#;
    assert!(texts[1].contains(blocks), "{}", texts[1]);
    // The state is restored, and visible in reports.
    let restored = kubelet.restore(read(&texts), "dir").ledger.unwrap();
    adds_up(&restored);
    assert_eq!(files(&kubelet, &restored), texts);
    adds_up(&read(&texts).ledger());
    // No owner is active any more.
    let next =
        kubelet.admit(&kubelet.finish_restore(&restored), &Request { owner: "next".into(), ..mixed() });
    assert_eq!(held(&next), ["db: 1-2 1Gi on 0", "log: 3 1Gi on 0"]);
}

/// A reproduced defect of the kubelet.
#[test]
fn restart_allocates_pods_again() {
    let kubelet = in_pod_scope();
    let restarted = |request: &Request| {
        let ledger = kubelet.admit(&kubelet.idle(), request).ledger;
        kubelet.restore(read(&files(&kubelet, &ledger)), "dir").ledger.unwrap()
    };
    let full = pod("3", "1Gi", vec![], vec![own("db", "2", "512Mi"), own("web", "1", "512Mi")]);
    let again = kubelet.admit(&restarted(&full), &full);
    assert_eq!(held(&again), ["db: 4-5 0Gi on 0", "web: 6 0Gi on 0"]);
    // No container requests the shared part.
    let again = kubelet.admit(&restarted(&mixed()), &mixed()).outcome.unwrap_err();
    assert_eq!(again.reason, Reason::TopologyAffinityError);
}

/// The last container by name has no part of the huge pages.
#[test]
fn undivided_memory_is_placed() {
    let size = HugepageSize(Bytes::mib(2));
    let huge = |resources: Resources, mib: &str| resources.with_hugepages(size, mib.parse().unwrap());
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
    let machine = machine.hugepages(size, 64).build().unwrap();
    let config = config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod);
    let kubelet = KubeletStrategy::new(&machine, &config).unwrap();
    let all = huge(amounts("3", "2Gi"), "100Mi");
    let db = ContainerRequest::guaranteed("db", huge(amounts("2", "1Gi"), "60Mi"));
    let request = Request {
        resources: Some(PodResources { requests: all.clone(), limits: all }),
        ..pod("3", "2Gi", vec![], vec![db, own("web", "1", "512Mi")])
    };
    let ledger = kubelet.admit(&kubelet.idle(), &request).ledger;
    let whole = &ledger.owner(&"pod".into()).unwrap().pod_level;
    assert_eq!(whole.blocks.len(), 2, "{whole:?}");
    adds_up(&ledger);
    let restored = kubelet.restore(read(&files(&kubelet, &ledger)), "dir").ledger.unwrap();
    adds_up(&restored);
}

#[test]
fn state_file_versions_migrate() {
    let with = in_pod_scope();
    let mut config = config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod);
    config.feature_gates = BTreeMap::new();
    let without = KubeletStrategy::new(&machine(), &config).unwrap();
    let plain = Request { resources: None, ..pod("2", "1Gi", vec![], vec![own("db", "2", "1Gi")]) };
    let ledger = without.admit(&without.idle(), &plain).ledger;
    let (old, new) = (files(&without, &ledger), files(&with, &ledger));
    assert_ne!(old, new, "the checksums differ");
    let migrated = with.restore(read(&old), "dir").checkpoints;
    assert_eq!([migrated.cpus.unwrap().write().unwrap(), migrated.memory.unwrap().write().unwrap()], new);
    let (old, new) = (read(&old), read(&new));
    for (mixed, file) in [
        (Checkpoints { cpus: new.cpus.clone(), ..old.clone() }, "cpu_manager_state"),
        (Checkpoints { memory: new.memory, ..old }, "memory_manager_state"),
    ] {
        let error = without.restore(mixed, "dir").ledger.unwrap_err().to_string();
        assert!(error.contains("checkpoint is corrupted") && error.contains(file), "{error}");
    }
}

/// `native` continues with the allocations of the containers.
#[test]
fn native_adopts_divided_pods() {
    let kubelet = in_pod_scope();
    let mut ledger = kubelet.admit(&kubelet.idle(), &mixed()).ledger;
    for container in ["db", "log"] {
        ledger = kubelet.note_started(&ledger, &"pod".into(), &container.into());
    }
    let config = config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod);
    let native = NativeStrategy::new(&machine(), &config, &NativeOptions::default()).unwrap();
    let (taken, uncovered) = native.rebase(&ledger);
    assert_eq!((taken.shared_pool(), uncovered.len()), (ledger.shared_pool(), 0));
    adds_up(&taken);
    let text = serde_json::to_string(&ledger).unwrap();
    assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
    assert_eq!(native.release(&taken, &"pod".into()).shared_pool(), native.idle().shared_pool());
}

//! Tests of the metrics of decisions.

use numaward_engine::{Resources, policy::TopologyManagerScope};
use numaward_topology::Machine;

use super::{
    kubelet::{NUMA_NODE, PHYSICAL_CPU, UNCORE_CACHE},
    *,
};

fn encode(metrics: &ControlMetrics) -> String {
    let (mut ours, mut kubelets) = (Registry::with_prefix("numaward"), Registry::default());
    metrics.register(&mut ours);
    metrics.register_kubelet(&mut kubelets);
    let mut text = String::new();
    for registry in [&ours, &kubelets] {
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    }
    text
}

fn sum(text: &str, name: &str) -> u64 {
    let of_name = |line: &&str| line.split(['{', ' ']).next() == Some(name);
    let values = text.lines().filter(of_name).map(|line| line.rsplit(' ').next().unwrap());
    values.map(|value| value.parse::<u64>().unwrap()).sum()
}

fn rules(policy: TopologyManagerPolicy, machine: &Machine) -> KubeletRules<'_> {
    KubeletRules { policy, scope: TopologyManagerScope::Container, has_whole_cores: false, machine }
}

fn guaranteed(name: &str, cpu: &str, gibibytes: u64) -> ContainerRequest {
    let resources = Resources::none().with_cpu(cpu.parse().unwrap());
    ContainerRequest::guaranteed(name, resources.with_memory(Quantity::whole(Bytes::gib(gibibytes).0)))
}

/// Like the kubelet, containers count as aligned up to the first one that cannot be aligned.
#[test]
fn counts_alignment_like_the_kubelet() {
    use TopologyManagerScope::{Container, Pod};
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).smt(2).caches_per_node(2);
    let machine = machine.memory(Bytes::gib(4)).build().unwrap();
    let request = |containers: &[&str]| Request {
        owner: "pod".into(),
        init_containers: vec![guaranteed("i", "2", 1)],
        containers: containers.iter().map(|cpu| guaranteed(&format!("c{cpu}"), cpu, 1)).collect(),
        resources: None,
    };
    let single = TopologyManagerPolicy::SingleNumaNode;
    for (policy, scope, has_whole_cores, containers, expected) in [
        // Aligned: to a node in the scopes container and pod, to cores, to a cache. Then the failures, except for caches.
        (single, Container, false, &["2", "500m"][..], [3, 0, 0, 2, 0, 0, 0]),
        (single, Pod, false, &["2", "500m"], [0, 1, 0, 2, 0, 0, 0]),
        (single, Container, true, &["2", "500m"], [3, 0, 2, 2, 0, 0, 0]),
        // Six CPUs of a node are in two caches.
        (single, Container, false, &["6"], [2, 0, 0, 1, 0, 0, 0]),
        // A node has eight CPUs.
        (single, Container, false, &["2", "12"], [2, 0, 0, 0, 1, 0, 0]),
        (single, Pod, false, &["2", "12"], [0, 0, 0, 0, 0, 1, 0]),
        (single, Container, true, &["3"], [1, 0, 1, 0, 0, 0, 1]),
        (TopologyManagerPolicy::Restricted, Container, false, &["2"], [0, 0, 0, 2, 0, 0, 0]),
        (TopologyManagerPolicy::Restricted, Container, false, &["100"], [0; 7]),
    ] {
        let options = has_whole_cores.then(|| ("full-pcpus-only".to_owned(), "true".to_owned()));
        let config = numaward_config::Config {
            strategy: numaward_config::policy::StrategyKind::Kubelet,
            topology_manager_policy: Some(policy),
            topology_manager_scope: Some(scope),
            cpu_manager_policy_options: options.into_iter().collect(),
            ..numaward_config::Config::default()
        };
        let strategy = numaward_guarantee::policy::strategy(&config, &machine).unwrap();
        let metrics = ControlMetrics::default();
        let request = request(containers);
        let decision = strategy.admit(&strategy.idle(), &request);
        let rules = KubeletRules { policy, scope, has_whole_cores, machine: &machine };
        metrics.decided_on_pod(&request, &decision, &rules, Duration::ZERO);
        let text = encode(&metrics);
        let found = [
            ("count", NUMA_NODE, "container"),
            ("count", NUMA_NODE, "pod"),
            ("count", PHYSICAL_CPU, "container"),
            ("count", UNCORE_CACHE, "container"),
            ("failure_count", NUMA_NODE, "container"),
            ("failure_count", NUMA_NODE, "pod"),
            ("failure_count", PHYSICAL_CPU, "container"),
        ]
        .map(|(name, boundary, scope)| {
            let name = format!("kubelet_container_aligned_compute_resources_{name}");
            let series = format!("{name}{{boundary=\"{boundary}\",scope=\"{scope}\"}} ");
            let value = text.lines().find_map(|line| line.strip_prefix(&series));
            value.unwrap_or_else(|| panic!("{series}:\n{text}")).parse::<u64>().unwrap()
        });
        assert_eq!(found, expected, "{policy:?} {scope:?} {containers:?} {:?}", decision.outcome);
    }
}

/// Like the kubelet, containers with exclusive resources count up to the first rejected one.
#[test]
fn counts_containers_passed_to_managers() {
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4);
    let machine = machine.memory(Bytes::gib(4)).build().unwrap();
    let container = guaranteed;
    let request = |init_containers: Vec<_>, containers: Vec<_>| Request {
        owner: "pod".into(),
        init_containers,
        containers,
        resources: None,
    };
    let mut shared = container("a", "1", 1);
    shared.limits = Resources::none();
    let one = |cpu: &str, gibibytes| request(vec![], vec![container("a", cpu, gibibytes)]);
    let (none, restricted) = (TopologyManagerPolicy::None, TopologyManagerPolicy::Restricted);
    for (policy, request, expected) in [
        // CPU requests and errors, memory requests and errors, errors of the topology manager.
        (restricted, one("2", 1), [1, 0, 1, 0, 0]),
        (restricted, one("500m", 1), [0, 0, 1, 0, 0]),
        (restricted, request(vec![], vec![shared]), [0, 0, 0, 0, 0]),
        (
            restricted,
            request(vec![container("i", "1", 1)], vec![container("a", "2", 1), container("b", "300m", 1)]),
            [2, 0, 3, 0, 0],
        ),
        (restricted, one("100", 1), [0, 0, 0, 0, 1]),
        (
            restricted,
            request(vec![], vec![container("a", "2", 1), container("b", "100", 1)]),
            [1, 0, 1, 0, 1],
        ),
        (none, one("100", 1), [1, 1, 0, 0, 0]),
        (none, one("2", 100), [1, 0, 1, 1, 0]),
        (none, request(vec![], vec![container("a", "2", 1), container("b", "100", 1)]), [2, 1, 1, 0, 0]),
    ] {
        let config = numaward_config::Config {
            strategy: numaward_config::policy::StrategyKind::Kubelet,
            topology_manager_policy: Some(policy),
            ..numaward_config::Config::default()
        };
        let strategy = numaward_guarantee::policy::strategy(&config, &machine).unwrap();
        let metrics = ControlMetrics::default();
        let decision = strategy.admit(&strategy.idle(), &request);
        let took = Duration::from_millis(3);
        metrics.decided(&request, &decision, took);
        metrics.decided_on_pod(&request, &decision, &rules(policy, &machine), took);
        let text = encode(&metrics);
        let found = |prefix: &str| {
            [
                "cpu_manager_pinning_requests_total",
                "cpu_manager_pinning_errors_total",
                "memory_manager_pinning_requests_total",
                "memory_manager_pinning_errors_total",
                "topology_manager_admission_errors_total",
            ]
            .map(|name| sum(&text, &format!("{prefix}_{name}")))
        };
        assert_eq!(found("kubelet"), expected, "{policy:?} {request:?} {:?}", decision.outcome);
        assert_eq!(found("numaward")[..4], expected[..4]);
        assert!(text.contains("\nkubelet_topology_manager_admission_requests_total 1\n"), "{text}");
        assert!(text.contains("\nkubelet_topology_manager_admission_duration_ms_sum 3.0\n"), "{text}");
    }
}

#[test]
fn series_start_at_zero() {
    let text = encode(&ControlMetrics::default());
    for line in [
        "numaward_topology_manager_admission_requests_total 0",
        "numaward_memory_manager_pinning_errors_total{reason=\"UnexpectedAdmissionError\"} 0",
        "numaward_enforcement_writes_total{backend=\"cgroupfs\",knob=\"cpuset.mems\",result=\"error\"} 0",
        "numaward_drift_total{knob=\"cpuset.cpus\"} 0",
        "numaward_drift_repaired_total{knob=\"memory.min\"} 0",
        "numaward_guarantee_migrated_bytes_total 0",
        "numaward_budget_moved_bytes_total{outcome=\"moved\"} 0",
        "numaward_memory_high_stalls_total 0",
        "numaward_memory_high_raised_total 0",
        "numaward_herd_cgroups{state=\"refused\"} 0",
        "numaward_declared_guarantees{state=\"held\"} 0",
        "numaward_interrupt_affinities{state=\"stays\"} 0",
        "numaward_interrupt_affinity_writes_total{result=\"fixed\"} 0",
        "numaward_rebalances_total{outcome=\"done\"} 0",
        "numaward_rebalance_moves_total{outcome=\"moved\"} 0",
        "numaward_rebalance_moved_bytes_total 0",
        "numaward_rebalance_running 0",
        "kubelet_memory_manager_pinning_errors_total 0",
        "kubelet_topology_manager_admission_duration_ms_count 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

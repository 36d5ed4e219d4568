//! Conversion of the configuration to the engine's policy, with defaults for unset keys.
//!
//! # Defaults
//! Without configuration, guarantees work and leave resources for the system:
//!
//! - exclusive CPUs (`cpuManagerPolicy: static`); the first core of the machine is reserved;
//! - memory on nodes (`memoryManagerPolicy: Static`); a twentieth of each node is reserved, at least 64Mi and at most 1Gi;
//! - `topologyManagerPolicy: restricted`: a request that cannot be aligned is rejected.
//!
//! A key that is set replaces only its own default. Reservations by `kubeReserved`, `systemReserved` and
//! `evictionHard` follow the kubelet's rules: if any of them is set, their sum must equal `reservedMemory`, and an
//! unset `evictionHard` has the kubelet's default. With the strategy `kubelet`, the sum is checked even if none of
//! them is set.

use std::collections::BTreeMap;

use numaward_config::{
    Config, gate_problems,
    memory_qos::MemoryReservationPolicy,
    policy::{Amount, CpuManagerPolicy, MEMORY_AVAILABLE, MemoryManagerPolicy, MemoryTier, StrategyKind},
};
use numaward_engine::{
    KubeletStrategy, NativeOptions, NativeStrategy, PolicyConfig, Quantity, Request, StartError, Strategy,
    kubelet::as_reported_to_kubelet,
    memory_qos::{MemoryQos, MemorySettings, ThrottlingFactor},
    native::memory_tier,
    policy::{
        MemoryReservation,
        gates::{self, FeatureGates},
    },
};
use numaward_topology::{Bytes, CpuSet, Machine, NodeId, NodeSet, NumaNode, ZoneKind};

/// Minimum and maximum memory that is reserved on each node by default.
const RESERVED_MEMORY_RANGE: (Bytes, Bytes) = (Bytes::mib(64), Bytes::gib(1));

/// A problem of the configured policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A reservation of an unknown resource, or one that is too large.
    #[error("{key}.{resource}: {problem}")]
    Reservation {
        /// `kubeReserved`, `systemReserved` or `evictionHard`.
        key: &'static str,
        resource: String,
        problem: &'static str,
    },
    /// A feature gate that does not exist or cannot be set, or a key that needs a gate.
    #[error("{key}: {problem}")]
    Gate {
        /// Configuration key, with dots.
        key: String,
        problem: String,
    },
    /// `memoryTiers` has a node that the machine cannot have.
    #[error("memoryTiers.{node}: this machine has no such node")]
    NoSuchNode { node: NodeId },
    /// The engine refuses the policy for this machine.
    #[error("{0}")]
    Engine(#[from] StartError),
}

/// Returns the engine's policy for a machine, or all problems of the configuration.
pub fn engine_config(config: &Config, machine: &Machine) -> Result<PolicyConfig, Vec<PolicyError>> {
    let mut problems = Vec::new();
    let policy = engine_policy(config, machine, &mut problems);
    if problems.is_empty() { Ok(policy) } else { Err(problems) }
}

/// Creates the configured strategy, or returns all problems of the configuration.
pub fn strategy(config: &Config, machine: &Machine) -> Result<Box<dyn Strategy>, Vec<PolicyError>> {
    Ok(match config.strategy {
        StrategyKind::Kubelet => Box::new(kubelet(config, machine)?),
        StrategyKind::Native => Box::new(native(config, machine)?),
    })
}

/// Returns a strategy for the present guarantees when the configured policy does not fit the machine. CPUs are
/// reserved as configured, if that part fits.
pub fn fallback(config: &Config, machine: &Machine) -> Option<Box<dyn Strategy>> {
    let without_memory = Config {
        memory_manager_policy: None,
        reserved_memory: None,
        kube_reserved: None,
        system_reserved: None,
        eviction_hard: None,
        memory_tiers: BTreeMap::new(),
        ..config.clone()
    };
    let fitting = [without_memory, Config::default()].iter().find_map(|config| native(config, machine).ok());
    fitting.map(|native| Box::new(native) as Box<dyn Strategy>)
}

/// Joins the problems on one line.
pub fn join_problems(problems: &[PolicyError]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Creates the strategy `native`, or returns all problems of the configuration.
fn native(config: &Config, machine: &Machine) -> Result<NativeStrategy, Vec<PolicyError>> {
    let mut problems = Vec::new();
    let policy = engine_policy(config, machine, &mut problems);
    problems.extend(NativeStrategy::problems(machine, &policy).into_iter().map(PolicyError::from));
    let unknown = config.memory_tiers.keys().filter(|node| !machine.possible_nodes.contains(**node));
    problems.extend(unknown.map(|&node| PolicyError::NoSuchNode { node }));
    if !problems.is_empty() {
        return Err(problems);
    }
    let options = NativeOptions { tiers: config.tiers, memory_tiers: memory_tiers(config, machine) };
    NativeStrategy::new(machine, &policy, &options).map_err(|error| vec![error.into()])
}

/// Returns the memory tier of each node: the configured one, otherwise that which the kernel reports.
pub fn memory_tiers(config: &Config, machine: &Machine) -> BTreeMap<NodeId, MemoryTier> {
    let reported = |(&id, node): (&NodeId, &NumaNode)| Some((id, memory_tier(node)?));
    let mut tiers: BTreeMap<_, _> = machine.nodes.iter().filter_map(reported).collect();
    tiers.extend(config.memory_tiers.iter().map(|(&node, &tier)| (node, tier)));
    tiers
}

/// Returns the nodes with unknown memory tier, if the strategy is `native`.
pub fn nodes_of_unknown_tier(config: &Config, machine: &Machine) -> NodeSet {
    let tiers = memory_tiers(config, machine);
    let unknown = machine.nodes.iter().filter(|(id, node)| node.memory.0 > 0 && !tiers.contains_key(id));
    unknown.filter(|_| config.strategy == StrategyKind::Native).map(|(&id, _)| id).collect()
}

/// Creates the strategy `kubelet`, or returns all problems of the configuration.
///
/// The strategy sees the machine as the kubelet does; otherwise `prefer-align-cpus-by-uncorecache` could decide differently.
pub fn kubelet(config: &Config, machine: &Machine) -> Result<KubeletStrategy, Vec<PolicyError>> {
    let machine = &as_reported_to_kubelet(machine);
    let mut problems = Vec::new();
    let policy = engine_policy(config, machine, &mut problems);
    problems.extend(KubeletStrategy::problems(machine, &policy).into_iter().map(PolicyError::from));
    if !problems.is_empty() {
        return Err(problems);
    }
    KubeletStrategy::new(machine, &policy).map_err(|error| vec![error.into()])
}

/// Returns the configured Memory `QoS`. `default` is the reservation policy if the key is unset; `ceiling` replaces
/// the limit of a container without limit.
pub fn memory_qos(config: &Config, default: MemoryReservationPolicy, ceiling: Bytes) -> MemoryQos {
    let reservation = config.memory_reservation_policy.unwrap_or(default);
    MemoryQos {
        reservation: reservation.into(),
        throttling: throttling(config),
        formula: config.memory_throttling_formula,
        page_size: Bytes(rustix::param::page_size() as u64),
        node_allocatable: ceiling,
    }
}

/// Returns the factor for `memory.high`, or `None` if workloads are not throttled. If the gate `MemoryQoS` is set, it
/// decides; the factor then has the kubelet's default.
fn throttling(config: &Config) -> Option<ThrottlingFactor> {
    let factor = config.memory_throttling_factor.map(|factor| factor.0);
    match config.gates().setting(gates::MEMORY_QOS) {
        None => factor,
        Some(false) => None,
        Some(true) => factor.or(Some(ThrottlingFactor::KUBELET_DEFAULT)),
    }
}

/// Returns the memory protection and throttling of a workload with this request.
pub fn memory_settings(config: &Config, request: &Request) -> MemorySettings {
    // Unlike the kubelet's pods, a guarantee is protected by default. It always has a limit, so that the ceiling is not used.
    let qos = memory_qos(config, MemoryReservationPolicy::TieredReservation, Bytes(0));
    let settings = request.containers.first().map(|container| qos.container(request, container));
    settings.unwrap_or_default()
}

fn engine_policy(config: &Config, machine: &Machine, problems: &mut Vec<PolicyError>) -> PolicyConfig {
    let (node_reservation, cpu_reservation) = reservations(config, machine, problems);
    let (memory, cpu) = (config.memory_policy(), config.cpu_policy());
    let reserved_memory = match &config.reserved_memory {
        Some(reserved) => reserved
            .iter()
            .map(|reserved| MemoryReservation {
                numa_node: NodeId(reserved.numa_node),
                limits: reserved.limits.iter().map(|(&kind, &Amount(amount))| (kind, amount)).collect(),
            })
            .collect(),
        None if memory == MemoryManagerPolicy::Static => default_memory(machine),
        None => Vec::new(),
    };
    let reserved_cpus = match &config.reserved_system_cpus {
        Some(reserved) => reserved.0.clone(),
        None if cpu == CpuManagerPolicy::Static && cpu_reservation.is_none() => first_core(machine),
        None => CpuSet::new(),
    };
    let version = config.kubelet_version.unwrap_or_default();
    let of_gates = gate_problems(config, version).into_iter();
    problems.extend(of_gates.map(|(path, problem)| PolicyError::Gate { key: path.join("."), problem }));
    let gate = |name: &'static str| {
        let setting = match config.strategy {
            StrategyKind::Kubelet => Some(config.gates().is_on(name)),
            // The options of `native` need no gates, but a gate that is set is respected.
            StrategyKind::Native => config.gates().setting(name),
        };
        Some((name.to_owned(), setting?))
    };
    PolicyConfig {
        memory_manager_policy: memory,
        reserved_memory,
        node_reservation,
        cpu_manager_policy: cpu,
        cpu_manager_policy_options: config.cpu_manager_policy_options.clone(),
        // The engine needs the number of reserved CPUs also if it does not choose them itself.
        cpu_reservation: cpu_reservation
            .or_else(|| (!reserved_cpus.is_empty()).then(|| Quantity::whole(reserved_cpus.len() as u64))),
        reserved_system_cpus: reserved_cpus,
        topology_manager_policy: config.topology_policy(),
        topology_manager_scope: config.topology_scope(),
        topology_manager_policy_options: config.topology_manager_policy_options.clone(),
        feature_gates: FeatureGates::names().filter_map(gate).collect(),
        kubelet_version: version,
    }
}

/// Returns the sums of all reservations: memory by kind, and CPUs. `None` if no reservation is configured.
fn reservations(
    config: &Config,
    machine: &Machine,
    problems: &mut Vec<PolicyError>,
) -> (Option<BTreeMap<ZoneKind, Quantity>>, Option<Quantity>) {
    let Some(thresholds) = config.thresholds() else { return (None, None) };
    let keys = [("kubeReserved", &config.kube_reserved), ("systemReserved", &config.system_reserved)];
    let (mut memory, mut cpus) = (BTreeMap::<ZoneKind, Quantity>::new(), None);
    for (key, reservation) in keys {
        for (resource, &Amount(amount)) in reservation.iter().flatten() {
            let sum = match (resource.as_str(), resource.parse::<ZoneKind>()) {
                ("cpu", _) => cpus.get_or_insert_with(Quantity::default),
                (_, Ok(kind)) => memory.entry(kind).or_default(),
                // The engine does not manage the other resources of the kubelet.
                ("ephemeral-storage" | "pid", _) => continue,
                _ => {
                    let problem = "no such resource (expected cpu, memory or hugepages-SIZE)";
                    problems.push(PolicyError::Reservation { key, resource: resource.clone(), problem });
                    continue;
                }
            };
            add(sum, amount, (key, resource), problems);
        }
    }
    if let Some(threshold) = thresholds.get(MEMORY_AVAILABLE) {
        let capacity = machine.nodes.values().fold(0, |sum: u64, node| sum.saturating_add(node.memory.0));
        let sum = memory.entry(ZoneKind::Memory).or_default();
        add(sum, threshold.resolve(Bytes(capacity)), ("evictionHard", MEMORY_AVAILABLE), problems);
    }
    (Some(memory), cpus)
}

fn add(
    sum: &mut Quantity,
    amount: Quantity,
    (key, resource): (&'static str, &str),
    problems: &mut Vec<PolicyError>,
) {
    if let Some(total) = sum.checked_add(amount) {
        *sum = total;
    } else {
        let problem = "the sum is too large";
        problems.push(PolicyError::Reservation { key, resource: resource.to_owned(), problem });
    }
}

/// Returns the CPUs of the core of the first CPU, with all its threads.
fn first_core(machine: &Machine) -> CpuSet {
    let Some(first) = machine.cpus.values().next() else { return CpuSet::new() };
    machine.cpus.iter().filter(|(_, cpu)| cpu.core == first.core).map(|(&id, _)| id).collect()
}

fn default_memory(machine: &Machine) -> Vec<MemoryReservation> {
    let (least, most) = RESERVED_MEMORY_RANGE;
    let kept = |node: &NumaNode| {
        let pools = node.hugepages.iter().map(|(size, pool)| pool.total.saturating_mul(size.0.0));
        let base = node.memory.0.saturating_sub(pools.fold(0, u64::saturating_add));
        (node.memory.0 / 20).clamp(least.0, most.0).min(base)
    };
    machine
        .nodes
        .iter()
        .map(|(&numa_node, node)| (numa_node, kept(node)))
        .filter(|(_, kept)| *kept > 0)
        .map(|(numa_node, kept)| MemoryReservation {
            numa_node,
            limits: [(ZoneKind::Memory, Quantity::whole(kept))].into(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use numaward_topology::HugepageSize;

    use super::*;

    fn machine() -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(2).smt(2).memory(Bytes::gib(4)).build().unwrap()
    }

    fn problems(yaml: &str, machine: &Machine) -> Vec<String> {
        let config: Config = serde_json::from_str(yaml).unwrap();
        strategy(&config, machine)
            .map_or_else(|problems| problems.iter().map(ToString::to_string).collect(), |_| Vec::new())
    }

    #[test]
    fn default_reserves_core_and_memory() {
        let allocatable = strategy(&Config::default(), &machine()).unwrap().allocatable();
        assert_eq!(allocatable.cpus.to_string(), "1-3,5-7");
        let kept = Bytes::gib(4).0 / 20;
        for bytes in allocatable.memory[&ZoneKind::Memory].values() {
            assert_eq!(bytes.0, Bytes::gib(4).0 - kept);
        }
    }

    #[test]
    fn memory_settings_follow_config() {
        let settings = |yaml: &str, limit: u64| {
            let config: Config = serde_json::from_str(yaml).unwrap();
            let resources = numaward_engine::Resources::none().with_cpu(Quantity::whole(1));
            let mut request =
                Request::workload("a", resources.with_memory(Quantity::whole(Bytes::mib(100).0)));
            let limits = &mut request.containers[0].limits.memory;
            limits.insert(ZoneKind::Memory, Quantity::whole(Bytes::mib(limit).0));
            let MemorySettings { min, low, high } = memory_settings(&config, &request);
            [min, low, high].map(|bytes| bytes.map(|bytes| bytes.0 >> 20))
        };
        let factor = r#"{"memoryThrottlingFactor": 0.5}"#;
        assert_eq!(settings("{}", 100), [Some(100), None, None]);
        assert_eq!(settings(factor, 100), [Some(100), None, None], "guaranteed memory is not throttled");
        assert_eq!(settings("{}", 200), [None, Some(100), None]);
        assert_eq!(settings(factor, 200), [None, Some(100), Some(150)]);
        let older = r#"{"memoryThrottlingFactor": 0.9, "memoryThrottlingFormula": "1.22"}"#;
        assert_eq!(settings(older, 200), [None, Some(100), Some(180)]);
        assert_eq!(settings(r#"{"memoryReservationPolicy": "None"}"#, 100), [None; 3]);
        for wrong in [r#"{"memoryThrottlingFactor": 0}"#, r#"{"memoryThrottlingFactor": 1.5}"#] {
            assert!(serde_json::from_str::<Config>(wrong).is_err(), "{wrong}");
        }
    }

    /// Same rule as in the kubelet: if the gate is on, the default factor is 0.9; if it is off, no factor is used.
    #[test]
    fn memory_qos_gate_decides_throttling() {
        for (config, factor) in [
            ("{}", None),
            (r#"{"memoryThrottlingFactor": 0.5}"#, Some("0.5")),
            (r#"{"featureGates": {"MemoryQoS": true}}"#, Some("0.9")),
            (r#"{"featureGates": {"AllAlpha": true}}"#, Some("0.9")),
            (r#"{"featureGates": {"MemoryQoS": true}, "memoryThrottlingFactor": 0.5}"#, Some("0.5")),
            (r#"{"featureGates": {"MemoryQoS": false}, "memoryThrottlingFactor": 0.5}"#, None),
        ] {
            let read: Config = serde_json::from_str(config).unwrap();
            assert_eq!(throttling(&read).map(|factor| factor.to_string()).as_deref(), factor, "{config}");
        }
    }

    /// With the strategy `kubelet`, an unset gate has the kubelet's default; `native` needs no gates.
    #[test]
    fn feature_gates_restrict_options() {
        let refused = |keys: &str| problems(&format!("{{{keys}}}"), &machine());
        let alpha = r#""cpuManagerPolicyOptions": {"distribute-cpus-across-cores": "true"}"#;
        let words = "new static policy error: CPU Manager Policy Alpha-level Options not enabled, but option \
            \"distribute-cpus-across-cores\" provided";
        let on = r#""featureGates": {"CPUManagerPolicyAlphaOptions": true}"#;
        let off = r#""featureGates": {"CPUManagerPolicyAlphaOptions": false}"#;
        let kubelet = r#""strategy": "kubelet""#;
        assert_eq!(refused(&format!("{kubelet}, {alpha}")), [words]);
        assert_eq!(refused(&format!("{kubelet}, {alpha}, {off}")), [words]);
        assert_eq!(refused(&format!("{kubelet}, {alpha}, {on}")), [""; 0]);
        assert_eq!(refused(alpha), [""; 0]);
        assert_eq!(refused(&format!("{alpha}, {off}")), [words]);
        // An option that is alpha in 1.32 may be stable in 1.36.
        let strict = r#""cpuManagerPolicyOptions": {"strict-cpu-reservation": "true"}"#;
        assert_eq!(refused(&format!("{kubelet}, {strict}")), [""; 0]);
        let found = refused(&format!(r#"{kubelet}, {strict}, "kubeletVersion": "1.32""#));
        assert!(found[0].contains("Alpha-level Options not enabled"), "{found:?}");
        // The version may become known only after the configuration was read.
        let found =
            refused(r#""kubeletVersion": "1.36", "featureGates": {"CPUManagerPolicyOptions": false}"#);
        let words = "featureGates.CPUManagerPolicyOptions: cannot set feature gate CPUManagerPolicyOptions to false, \
            feature is locked to true";
        assert_eq!(found, [words]);
    }

    #[test]
    fn default_fits_tiny_machines() {
        let tiny = Machine::builder().nodes(1).cores_per_node(1).memory(Bytes::mib(48)).build().unwrap();
        assert!(strategy(&Config::default(), &tiny).unwrap().allocatable().cpus.is_empty());
        let full = Machine::builder()
            .nodes(2)
            .cores_per_node(2)
            .memory(Bytes::mib(128))
            .hugepages(HugepageSize(Bytes::mib(2)), 60)
            .build()
            .unwrap();
        strategy(&Config::default(), &full).unwrap();
    }

    #[test]
    fn key_replaces_only_its_default() {
        let config = r#"{"reservedSystemCPUs": "3", "topologyManagerPolicy": "best-effort",
            "reservedMemory": [{"numaNode": 1, "limits": {"memory": "1Gi"}}], "systemReserved": {"memory": "924Mi"}}"#;
        let config: Config = serde_json::from_str(config).unwrap();
        let allocatable = strategy(&config, &machine()).unwrap().allocatable();
        assert_eq!(allocatable.cpus.to_string(), "0-2,4-7");
        assert_eq!(allocatable.memory[&ZoneKind::Memory][&NodeId(0)], Bytes::gib(4));
        assert_eq!(allocatable.memory[&ZoneKind::Memory][&NodeId(1)], Bytes::gib(3));
    }

    #[test]
    fn config_overrides_kernel_tiers() {
        let mut machine = Machine::builder()
            .nodes(2)
            .cores_per_node(2)
            .memory(Bytes::gib(4))
            .node(NodeId(2), |node| node.cores(0).memory(Bytes::gib(8)))
            .node(NodeId(3), |node| node.cores(0).memory(Bytes::gib(8)))
            .build()
            .unwrap();
        machine.nodes.get_mut(&NodeId(2)).unwrap().memory_tier = Some(22);
        let read = |yaml: &str| -> Config { serde_json::from_str(yaml).unwrap() };
        let config = read(r#"{"strategy": "native"}"#);
        let tiers = |config: &Config| {
            let tiers = memory_tiers(config, &machine);
            tiers.iter().map(|(node, tier)| format!("{node}:{tier}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(tiers(&config), "0:dram 1:dram 2:cxl");
        assert_eq!(nodes_of_unknown_tier(&config, &machine).to_string(), "3");
        let own = read(r#"{"strategy": "native", "memoryTiers": {"1": "hbm", "3": "cxl"}}"#);
        assert_eq!(tiers(&own), "0:dram 1:hbm 2:cxl 3:cxl");
        assert!(nodes_of_unknown_tier(&own, &machine).is_empty());
        let wrong = problems(r#"{"strategy": "native", "memoryTiers": {"9": "cxl"}}"#, &machine);
        assert_eq!(wrong, ["memoryTiers.9: this machine has no such node"]);

        // A request for a tier gets neither another tier nor a node of unknown tier.
        let strategy = strategy(&config, &machine).unwrap();
        let place = |tier: MemoryTier, gib: u64| {
            let resources = numaward_engine::Resources::none().with_cpu(Quantity::milli(1));
            let resources = resources.with_memory(Quantity::whole(Bytes::gib(gib).0));
            let terms = numaward_engine::Terms { memory_tiers: [tier].into(), ..Default::default() };
            let request = Request::workload("a", resources);
            let decision = strategy.admit_watched(&strategy.idle(), &request, &terms, &|_| {});
            decision.outcome.map(|grants| grants[0].allocation.memory_nodes().to_string())
        };
        assert_eq!(place(MemoryTier::Cxl, 6).unwrap(), "2");
        assert_eq!(place(MemoryTier::Dram, 3).unwrap(), "0");
        assert!(place(MemoryTier::Cxl, 12).is_err(), "node 3 is not known to be CXL");
    }

    #[test]
    fn reports_all_problems_at_once() {
        let found = problems(
            r#"{"reservedSystemCPUs": "99", "topologyManagerPolicyOptions": {"nonsense": "true"},
            "reservedMemory": [{"numaNode": 7, "limits": {"memory": "1Gi"}}], "kubeReserved": {"gpu": 1}}"#,
            &machine(),
        );
        for words in ["kubeReserved.gpu", "unknown CPU ID: 99", "nonsense", "NUMA node 7"] {
            assert!(found.iter().any(|problem| problem.contains(words)), "{words}: {found:?}");
        }
    }

    /// Same rule as in the kubelet: unset, the threshold is 100Mi; without `memory.available` it is 0; percentages are of the whole memory.
    #[test]
    fn eviction_threshold_is_reserved() {
        let eight = machine();
        for (keys, reserved) in [
            (r#""kubeReserved": {"memory": "400Mi"}, "systemReserved": {"memory": "524Mi"}"#, "1Gi"),
            (r#""kubeReserved": {"cpu": 1}"#, "100Mi"),
            (r#""kubeReserved": {"memory": "1Gi"}, "evictionHard": {}"#, "1Gi"),
            (r#""kubeReserved": {"memory": "1Gi"}, "evictionHard": {"nodefs.available": "10%"}"#, "1Gi"),
            (r#""evictionHard": {"memory.available": "200Mi", "pid.available": "5%"}"#, "200Mi"),
            (r#""evictionHard": {"memory.available": "25%"}"#, "2Gi"),
            // 5% in 32-bit floating point is slightly more than a twentieth.
            (r#""evictionHard": {"memory.available": "5%"}"#, "429496736"),
            (r#""kubeReserved": {"memory": "1Gi"}, "evictionHard": {"memory.available": "0%"}"#, "1Gi"),
            (r#""kubeReserved": {"memory": "1Gi"}, "evictionHard": {"memory.available": "100%"}"#, "1Gi"),
        ] {
            let text = format!(
                r#"{{"reservedMemory": [{{"numaNode": 0, "limits": {{"memory": "{reserved}"}}}}], {keys}}}"#
            );
            assert_eq!(problems(&text, &eight), [""; 0], "{keys}");
        }
        let found = problems(
            r#"{"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}], "kubeReserved": {"memory": "1Gi"}}"#,
            &eight,
        );
        assert!(found[0].contains("1Gi") && found[0].contains("1124Mi"), "{found:?}");
        // With `reservedMemory` alone, a kubelet starts only if it is 100Mi. The strategy `native` has no such rule.
        let alone = |strategy: &str, reserved: &str| {
            let memory = format!(r#"[{{"numaNode": 0, "limits": {{"memory": "{reserved}"}}}}]"#);
            problems(&format!(r#"{{"strategy": "{strategy}", "reservedMemory": {memory}}}"#), &eight)
        };
        let [problem] = &alone("kubelet", "1Gi")[..] else { panic!("{:?}", alone("kubelet", "1Gi")) };
        assert!(problem.contains("1Gi") && problem.contains("100Mi"), "{problem}");
        assert_eq!([alone("kubelet", "100Mi"), alone("native", "1Gi")], [[""; 0]; 2]);
    }

    #[test]
    fn error_names_both_sums() {
        let found = problems(
            r#"{"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
            "systemReserved": {"memory": "512Mi"}, "evictionHard": {"memory.available": "100Mi"}}"#,
            &machine(),
        );
        let [problem] = found.as_slice() else { panic!("{found:?}") };
        assert!(problem.contains("1Gi") && problem.contains("612Mi"), "{problem}");
    }
}

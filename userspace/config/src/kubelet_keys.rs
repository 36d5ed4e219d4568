//! Checks of the keys that come from a `KubeletConfiguration`.

use numaward_engine::policy::{
    KubeletVersion,
    gates::{self, FeatureGates, GateCheck},
};

use super::{
    config::Config,
    memory_qos::MemoryReservationPolicy,
    policy::{MEMORY_AVAILABLE, StrategyKind},
    schema::closest,
};

/// The eviction signals of the kubelet.
const EVICTION_SIGNALS: [&str; 9] = [
    MEMORY_AVAILABLE,
    "allocatableMemory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
];

/// Returns the problems of these keys that go beyond single values: the path of the key, and the problem.
pub(super) fn problems(config: &Config) -> Vec<(Vec<String>, String)> {
    let signals = config.eviction_hard.iter().flatten().map(|(signal, _)| signal);
    let unknown = signals.filter(|signal| !EVICTION_SIGNALS.contains(&signal.as_str()));
    let problem = |signal: &String| {
        let path = vec!["evictionHard".to_owned(), signal.clone()];
        (path, format!("unsupported eviction signal {signal} (known are {})", EVICTION_SIGNALS.join(", ")))
    };
    let mut problems: Vec<_> = unknown.map(problem).collect();
    // The version of the node is not known yet, and one version may accept what another refuses.
    let versions = match (config.kubelet_version, &config.kubernetes.node_name) {
        (None, Some(_)) => KubeletVersion::ALL,
        (version, _) => &[version.unwrap_or_default()],
    };
    let of_each = versions.iter().rev().map(|&version| gate_problems(config, version));
    problems.extend(of_each.min_by_key(Vec::len).unwrap_or_default());
    problems
}

/// Returns the problems of feature gates for a version of the kubelet: the path of the key, and the problem, in the
/// kubelet's words if it has any.
pub fn gate_problems(config: &Config, version: KubeletVersion) -> Vec<(Vec<String>, String)> {
    let gates = FeatureGates { set: &config.feature_gates, version };
    let at = |gate: &str| vec!["featureGates".to_owned(), gate.to_owned()];
    let known: Vec<String> = FeatureGates::names().map(str::to_owned).collect();
    let refused = |(name, &is_on): (&String, &bool)| match gates.check(name, is_on) {
        GateCheck::Refused(words) => Some((at(name), words)),
        GateCheck::Known => None,
        GateCheck::Other => {
            let meant = closest(name, known.iter())?;
            Some((at(name), format!("unrecognized feature gate: {name} (did you mean {meant:?}?)")))
        }
    };
    let mut problems: Vec<_> = config.feature_gates.iter().filter_map(refused).collect();
    if !gates.is_on(gates::CPU_OPTIONS) && !config.cpu_manager_policy_options.is_empty() {
        let options = config.cpu_manager_policy_options.iter().map(|(name, value)| format!("{name}:{value}"));
        let options = options.collect::<Vec<_>>().join(" ");
        let words = format!(
            "CPU Manager policy options map[{options}] require feature gates \"CPUManager\", \"{}\" enabled",
            gates::CPU_OPTIONS
        );
        problems.push((vec!["cpuManagerPolicyOptions".to_owned()], words));
    }
    let is_off = gates.setting(gates::MEMORY_QOS) == Some(false);
    if is_off && config.memory_reservation_policy == Some(MemoryReservationPolicy::TieredReservation) {
        let words = format!("TieredReservation needs the feature gate {}, which is off", gates::MEMORY_QOS);
        problems.push((vec!["memoryReservationPolicy".to_owned()], words));
    }
    let (resources, managers) = (gates::POD_LEVEL_RESOURCES, gates::POD_LEVEL_MANAGERS);
    let key = |gate| if config.feature_gates.contains_key(gate) { gate } else { "AllAlpha" };
    if config.strategy == StrategyKind::Kubelet && version == KubeletVersion::V1_32 && gates.is_on(resources)
    {
        let words = format!(
            "{resources} is on, but the strategy kubelet does not imitate the kubelet {version} with it: switch it off, or \
             use the strategy native"
        );
        problems.push((at(key(resources)), words));
    }
    if gates.is_on(managers) && !gates.is_on(resources) {
        let words =
            format!("{managers} is enabled, but depends on features that are disabled: [{resources}]");
        problems.push((at(key(managers)), words));
    }
    problems
}

/// Returns warnings about feature gates without effect.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let ignored = |(name, &is_on): (&String, &bool)| {
        let is_ignored = config.gates().check(name, is_on) == GateCheck::Other;
        is_ignored.then(|| format!("featureGates.{name} has no effect here"))
    };
    config.feature_gates.iter().filter_map(ignored).collect()
}

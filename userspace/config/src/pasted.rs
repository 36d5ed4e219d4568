//! What is wrong, or odd, between the keys that are pasted from a `KubeletConfiguration`.

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

/// The signals that the kubelet knows.
const SIGNALS: [&str; 9] = [
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

/// What is wrong with what is pasted from a kubelet's configuration, beyond single values: the path of the key, and why.
pub(super) fn problems(config: &Config) -> Vec<(Vec<String>, String)> {
    let signals = config.eviction_hard.iter().flatten().map(|(signal, _)| signal);
    let unknown = signals.filter(|signal| !SIGNALS.contains(&signal.as_str()));
    let problem = |signal: &String| {
        let path = vec!["evictionHard".to_owned(), signal.clone()];
        (path, format!("unsupported eviction signal {signal} (known are {})", SIGNALS.join(", ")))
    };
    let mut problems: Vec<_> = unknown.map(problem).collect();
    // The version of the node is not known yet; what one version refuses, the other may take.
    let versions = match (config.kubelet_version, &config.kubernetes.node_name) {
        (None, Some(_)) => KubeletVersion::ALL,
        (version, _) => &[version.unwrap_or_default()],
    };
    let of_each = versions.iter().rev().map(|&version| gate_problems(config, version));
    problems.extend(of_each.min_by_key(Vec::len).unwrap_or_default());
    problems
}

/// What is wrong with feature gates for this version of the kubelet: the path of the key, and why, in the kubelet's words
/// where it has any.
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
            "{resources} is on, and what the kubelet {version} does then is not repeated: switch it off, or use the \
             strategy native, which places containers within what their pod has as a whole"
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

/// What is odd with feature gates but no error.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let ignored = |(name, &is_on): (&String, &bool)| {
        let is_ignored = config.gates().check(name, is_on) == GateCheck::Other;
        is_ignored.then(|| format!("featureGates.{name} has no effect here"))
    };
    config.feature_gates.iter().filter_map(ignored).collect()
}

//! Feature gates that affect the kubelet's managers.

use std::collections::BTreeMap;

use crate::policy_names::KubeletVersion;

/// Enables the CPU manager's options below general availability.
pub const CPU_OPTIONS: &str = "CPUManagerPolicyOptions";
/// Makes the managers consider pod-level resources.
pub const POD_LEVEL_RESOURCES: &str = "PodLevelResources";
/// Makes the managers place containers within the pod-level resources.
pub const POD_LEVEL_MANAGERS: &str = "PodLevelResourceManagers";
/// Enables Memory `QoS`.
pub const MEMORY_QOS: &str = "MemoryQoS";

/// Gates for all gates of a stage that are not set themselves.
const ALL_ALPHA: &str = "AllAlpha";
const ALL_BETA: &str = "AllBeta";

/// Maturity of a gate, which determines its default and whether it can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GateStage {
    /// The gate does not exist.
    Absent,
    /// Off by default.
    Alpha,
    /// On by default.
    Beta,
    /// Always on.
    Locked,
}

/// Gates, each with its stage in v1.32 and v1.36.
const GATES: [(&str, [GateStage; 2]); 12] = {
    use GateStage::{Absent, Alpha, Beta, Locked};
    [
        ("CPUManager", [Locked, Locked]),
        (CPU_OPTIONS, [Beta, Locked]),
        ("CPUManagerPolicyAlphaOptions", [Alpha, Alpha]),
        ("CPUManagerPolicyBetaOptions", [Beta, Beta]),
        ("MemoryManager", [Locked, Locked]),
        (MEMORY_QOS, [Alpha, Alpha]),
        (POD_LEVEL_MANAGERS, [Absent, Alpha]),
        (POD_LEVEL_RESOURCES, [Alpha, Beta]),
        ("TopologyManager", [Locked, Locked]),
        ("TopologyManagerPolicyOptions", [Locked, Locked]),
        ("TopologyManagerPolicyAlphaOptions", [Alpha, Alpha]),
        ("TopologyManagerPolicyBetaOptions", [Beta, Beta]),
    ]
};

/// Result of the kubelet's check of a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateCheck {
    /// The gate affects the managers.
    Known,
    /// The gate does not affect the managers, or is unknown here.
    Other,
    /// The kubelet refuses to start; its message.
    Refused(String),
}

/// Treatment of pods with pod-level resources by the kubelet's managers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodLevelSupport {
    /// Pod-level resources are ignored; the containers are placed by their own requests.
    Ignored,
    /// No container of such a pod is placed.
    Unmanaged,
    /// Such pods are placed.
    Placed,
}

/// Configured gates for a version of the kubelet.
#[derive(Clone, Copy, Debug)]
pub struct FeatureGates<'a> {
    /// Configured gates.
    pub set: &'a BTreeMap<String, bool>,
    pub version: KubeletVersion,
}

impl FeatureGates<'_> {
    /// Returns the names of the gates that affect the managers.
    pub fn names() -> impl Iterator<Item = &'static str> + Clone {
        GATES.iter().map(|(name, _)| *name).chain([ALL_ALPHA, ALL_BETA])
    }

    /// Returns the stage of a gate in this version.
    fn stage(self, name: &str) -> Option<GateStage> {
        let (_, stages) = GATES.iter().find(|(gate, _)| *gate == name)?;
        Some(self.version.select(*stages))
    }

    /// Returns the configured value of a gate, set by itself or with all gates of its stage.
    pub fn setting(self, name: &str) -> Option<bool> {
        let all = match self.stage(name)? {
            GateStage::Alpha => ALL_ALPHA,
            GateStage::Beta => ALL_BETA,
            GateStage::Absent | GateStage::Locked => return None,
        };
        self.set.get(name).or_else(|| self.set.get(all)).copied()
    }

    /// Returns whether a gate is on.
    pub fn is_on(self, name: &str) -> bool {
        let default = || matches!(self.stage(name), Some(GateStage::Beta | GateStage::Locked));
        self.setting(name).unwrap_or_else(default)
    }

    /// Returns the treatment of pods with pod-level resources.
    pub fn pod_level_support(self) -> PodLevelSupport {
        match (self.is_on(POD_LEVEL_RESOURCES), self.is_on(POD_LEVEL_MANAGERS)) {
            (false, _) => PodLevelSupport::Ignored,
            (true, false) => PodLevelSupport::Unmanaged,
            (true, true) => PodLevelSupport::Placed,
        }
    }

    /// Checks a configured gate as the kubelet does.
    pub fn check(self, name: &str, is_on: bool) -> GateCheck {
        match self.stage(name) {
            Some(GateStage::Absent) => GateCheck::Refused(format!("unrecognized feature gate: {name}")),
            Some(GateStage::Locked) if !is_on => GateCheck::Refused(format!(
                "cannot set feature gate {name} to false, feature is locked to true"
            )),
            Some(_) => GateCheck::Known,
            None if [ALL_ALPHA, ALL_BETA].contains(&name) => GateCheck::Known,
            None => GateCheck::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_follow_setting_then_stage() {
        const NEW: KubeletVersion = KubeletVersion::V1_36;
        const OLD: KubeletVersion = KubeletVersion::V1_32;
        const ALPHA_OPTIONS: &str = "CPUManagerPolicyAlphaOptions";
        for (set, version, name, is_on) in [
            ([].as_slice(), NEW, POD_LEVEL_RESOURCES, true),
            (&[], OLD, POD_LEVEL_RESOURCES, false),
            (&[], NEW, POD_LEVEL_MANAGERS, false),
            (&[(POD_LEVEL_MANAGERS, true)], NEW, POD_LEVEL_MANAGERS, true),
            (&[(POD_LEVEL_MANAGERS, true)], OLD, POD_LEVEL_MANAGERS, false),
            (&[], NEW, ALPHA_OPTIONS, false),
            (&[(ALL_ALPHA, true)], NEW, ALPHA_OPTIONS, true),
            (&[(ALL_ALPHA, true), (ALPHA_OPTIONS, false)], NEW, ALPHA_OPTIONS, false),
            (&[], NEW, "CPUManagerPolicyBetaOptions", true),
            (&[(ALL_BETA, false)], NEW, "CPUManagerPolicyBetaOptions", false),
            (&[(ALL_BETA, false)], NEW, CPU_OPTIONS, true),
            (&[(ALL_BETA, false)], OLD, CPU_OPTIONS, false),
            (&[], NEW, "Nonsense", false),
        ] {
            let set = set.iter().map(|&(name, is_on)| (name.to_owned(), is_on)).collect();
            let gates = FeatureGates { set: &set, version };
            assert_eq!(gates.is_on(name), is_on, "{name} of {version}, {set:?}");
        }
    }

    #[test]
    fn pod_level_placement_needs_both_gates() {
        let of = |set: &[(&str, bool)], version| {
            let set = set.iter().map(|&(name, is_on)| (name.to_owned(), is_on)).collect();
            FeatureGates { set: &set, version }.pod_level_support()
        };
        let (old, new) = (KubeletVersion::V1_32, KubeletVersion::V1_36);
        assert_eq!(of(&[], old), PodLevelSupport::Ignored);
        assert_eq!(of(&[], new), PodLevelSupport::Unmanaged);
        assert_eq!(of(&[(POD_LEVEL_MANAGERS, true)], new), PodLevelSupport::Placed);
        assert_eq!(of(&[(POD_LEVEL_MANAGERS, true)], old), PodLevelSupport::Ignored);
        assert_eq!(of(&[(POD_LEVEL_RESOURCES, false)], new), PodLevelSupport::Ignored);
    }

    #[test]
    fn refuses_gates_in_kubelet_words() {
        let check = |version, name, is_on| FeatureGates { set: &BTreeMap::new(), version }.check(name, is_on);
        for version in [KubeletVersion::V1_32, KubeletVersion::V1_36] {
            assert_eq!(check(version, MEMORY_QOS, true), GateCheck::Known);
            assert_eq!(check(version, ALL_ALPHA, true), GateCheck::Known);
            assert_eq!(check(version, "NodeSwap", false), GateCheck::Other);
            assert_eq!(check(version, "MemoryManager", true), GateCheck::Known);
            let words = "cannot set feature gate MemoryManager to false, feature is locked to true";
            assert_eq!(check(version, "MemoryManager", false), GateCheck::Refused(words.to_owned()));
        }
        assert_eq!(check(KubeletVersion::V1_32, CPU_OPTIONS, false), GateCheck::Known);
        assert!(matches!(check(KubeletVersion::V1_36, CPU_OPTIONS, false), GateCheck::Refused(_)));
        let words = "unrecognized feature gate: PodLevelResourceManagers";
        assert_eq!(
            check(KubeletVersion::V1_32, POD_LEVEL_MANAGERS, true),
            GateCheck::Refused(words.to_owned())
        );
        let quota = "DisableCPUQuotaWithExclusiveCPUs";
        assert_eq!(check(KubeletVersion::V1_36, quota, true), GateCheck::Other);
    }
}

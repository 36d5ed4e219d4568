//! Keeping what is promised and not yet used: budgets of allocations on several nodes, and the headroom guard.

use educe::Educe;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::enforcement::{CgroupPattern, Size};

/// What holds a workload with memory on several nodes to the bytes that it is promised on each. Only for the strategy
/// `native`, and where guarantees are enforced.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Budgets {
    /// Whether pages are moved from a node of which a workload has more than its share to those of which it has less.
    #[educe(Default = true)]
    pub enabled: bool,
    /// How much is moved in a second, at most.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
}

/// What is done where a node may soon not have what is promised on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GuardMode {
    /// Nothing is looked at.
    Off,
    /// It is reported.
    #[default]
    Report,
    /// Workloads without a guarantee are kept off the node as well, until there is room again. Only where guarantees are
    /// enforced: else this is the same as `report`.
    Act,
    /// The same as `act`. Where a node has been short for 30 seconds although nobody else can be kept off it, pods without
    /// a guarantee are evicted: `BestEffort` before `Burstable`, and of these the one first that has most there. One at a time,
    /// with 30 seconds in between, and as each `PodDisruptionBudget` allows. Pods of a `DaemonSet`, static pods, pods without
    /// a controller, those with the priority of what the cluster needs (`system-cluster-critical`, `system-node-critical`),
    /// and those in `kubernetes.placementOffNamespaces` stay. Needs `kubernetes.nodeName`, and the right to create `pods/eviction`.
    Evict,
}

impl GuardMode {
    /// Whether workloads without a guarantee are kept off nodes.
    pub fn acts(self) -> bool {
        matches!(self, Self::Act | Self::Evict)
    }
}

/// Whether what is promised and not used yet is kept free, by dropping page cache of workloads without a guarantee before it is
/// needed. Only with `guard: act` or `evict`, and where guarantees are enforced.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GuardReclaim {
    /// Whether that is done. Without it, the kernel drops page cache when a workload asks for what it was promised, which then
    /// waits for that, or gets memory of another node.
    pub enabled: bool,
    /// How much is dropped in a second, at most, of all nodes.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
}

/// Cgroups that the guard leaves alone, unless the configuration says otherwise: without them a host cannot be reached or
/// run workloads at all.
const ESSENTIAL: &[&str] = &[
    "/init.scope",
    "/podruntime.slice/*.service",
    "/runtime.slice/*.service",
    "/system.slice/containerd.service",
    "/system.slice/crio.service",
    "/system.slice/dbus*.service",
    "/system.slice/docker.service",
    "/system.slice/k0s*.service",
    "/system.slice/k3s*.service",
    "/system.slice/kubelet.service",
    "/system.slice/numaward.service",
    "/system.slice/rke2*.service",
    "/system.slice/ssh*.service",
    "/system.slice/systemd-*.service",
];

/// The default of `guardExempt`.
pub(super) fn essential() -> Vec<CgroupPattern> {
    ESSENTIAL.iter().filter_map(|pattern| CgroupPattern::new(pattern).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_evicts_acts_as_well() {
        let acts = |text: &str| serde_json::from_str::<GuardMode>(text).unwrap().acts();
        assert_eq!(["\"off\"", "\"report\"", "\"act\"", "\"evict\""].map(acts), [false, false, true, true]);
    }

    #[test]
    fn what_is_essential_is_a_list_of_patterns() {
        assert_eq!(essential().len(), ESSENTIAL.len());
        let exempt = |path: &str| essential().iter().any(|pattern| pattern.matches(&path.parse().unwrap()));
        for path in [
            "/init.scope",
            "/system.slice/systemd-journald.service",
            "/system.slice/sshd.service",
            "/system.slice/k3s-agent.service",
            "/system.slice/rke2-server.service",
            "/system.slice/k0scontroller.service",
            "/runtime.slice/kubelet.service",
            "/runtime.slice/containerd.service",
            "/podruntime.slice/crio.service",
        ] {
            assert!(exempt(path), "{path}");
        }
        for path in ["/system.slice", "/system.slice/backup.service", "/user.slice", "/runtime.slice"] {
            assert!(!exempt(path), "{path}");
        }
    }
}

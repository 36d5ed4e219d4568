//! Protection of guaranteed memory that is not used yet: budgets of workloads on several nodes, and the headroom guard.

use educe::Educe;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::enforcement::{CgroupPattern, Size};

/// Budgets: enforcement of the share of each node for workloads with memory on several nodes. Only for the strategy
/// `native`, and if guarantees are enforced.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Budgets {
    /// Moves pages of a workload from nodes on which it has more than its share to nodes on which it has less.
    #[educe(Default = true)]
    pub enabled: bool,
    /// The maximum memory that is moved per second.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
}

/// The reaction to a node that may soon not have the memory that is guaranteed on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GuardMode {
    /// No check.
    Off,
    /// The node is reported.
    #[default]
    Report,
    /// Workloads without a guarantee are also kept off the node until it has enough memory again. Only if guarantees
    /// are enforced; otherwise the same as `report`.
    Act,
    /// Like `act`. In addition, if a node has been short for 30 seconds although no further workload can be kept off
    /// it, pods without a guarantee are evicted: `BestEffort` before `Burstable`, and within a class the pod with the
    /// most memory on the node. One pod at a time, with 30 seconds between two, and as each `PodDisruptionBudget`
    /// allows. Pods of a `DaemonSet`, static pods, pods without a controller, pods with a system priority
    /// (`system-cluster-critical`, `system-node-critical`), and pods in `kubernetes.placementOffNamespaces` stay, and as
    /// long as one of them is in the way, so do pods with less memory on the node. Needs `kubernetes.nodeName`,
    /// and permission to create `pods/eviction`.
    Evict,
}

impl GuardMode {
    /// Returns true if workloads without a guarantee are kept off nodes.
    pub fn acts(self) -> bool {
        matches!(self, Self::Act | Self::Evict)
    }
}

/// Dropping of page cache of workloads without a guarantee, so that guaranteed memory is free before it is needed. Only
/// with `guard: act` or `evict`, and if guarantees are enforced.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GuardReclaim {
    /// Drops page cache. Otherwise, the kernel drops it only when a workload allocates its guaranteed memory; the
    /// workload then waits, or gets memory of another node.
    pub enabled: bool,
    /// The maximum page cache that is dropped per second, on all nodes together.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
}

/// Cgroups that the guard and automatic placement do not touch by default: without them, a host cannot be reached or
/// run workloads.
const ESSENTIAL_SERVICES: &[&str] = &[
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
    "/system.slice/snap.microk8s.daemon-*.service",
    "/system.slice/ssh*.service",
    "/system.slice/systemd-*.service",
];

/// Returns the default of `guardExempt` and `home.exclude`.
pub(super) fn essential_services() -> Vec<CgroupPattern> {
    ESSENTIAL_SERVICES.iter().filter_map(|pattern| CgroupPattern::new(pattern).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evict_includes_act() {
        let acts = |text: &str| serde_json::from_str::<GuardMode>(text).unwrap().acts();
        assert_eq!(["\"off\"", "\"report\"", "\"act\"", "\"evict\""].map(acts), [false, false, true, true]);
    }

    #[test]
    fn essential_services_are_exempt() {
        assert_eq!(essential_services().len(), ESSENTIAL_SERVICES.len());
        let exempt =
            |path: &str| essential_services().iter().any(|pattern| pattern.matches(&path.parse().unwrap()));
        for path in [
            "/init.scope",
            "/system.slice/systemd-journald.service",
            "/system.slice/sshd.service",
            "/system.slice/k3s-agent.service",
            "/system.slice/rke2-server.service",
            "/system.slice/snap.microk8s.daemon-kubelite.service",
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

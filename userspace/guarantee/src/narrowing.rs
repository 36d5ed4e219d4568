//! Narrowing: the reduced CPU and node sets of a cgroup without a guarantee, and the features that require them.

use std::collections::BTreeMap;

use numaward_cgroup::CgroupId;
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet};
use serde::{Deserialize, Serialize};

/// Restrictions of one cgroup by CPU isolation, automatic placement and the headroom guard. Empty if there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Narrowing {
    /// True if CPU isolation keeps the cgroup off exclusive CPUs.
    pub is_isolated: bool,
    /// The preferred node that automatic placement has chosen.
    pub home: Option<PreferredNode>,
    /// Nodes on which the headroom guard forbids new pages.
    pub off: NodeSet,
}

impl Narrowing {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Preferred node of a workload without a guarantee.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferredNode {
    pub node: NodeId,
    /// Share of remote accesses before the placement, in thousandths.
    pub remote_before: u32,
    /// True if the share of remote accesses has fallen since. Until then the placement is on trial.
    #[serde(default)]
    pub is_kept: bool,
    /// Bytes that were migrated to the node, by source node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub moved: BTreeMap<NodeId, Bytes>,
    /// CPUs of the workload before the last change on this node. They are still in the knob if the daemon died before
    /// it wrote the new ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus_before: Option<CpuSet>,
}

impl PreferredNode {
    /// Returns a placement on trial.
    pub fn new(node: NodeId, remote_before: u32) -> Self {
        Self { node, remote_before, is_kept: false, moved: BTreeMap::new(), cpus_before: None }
    }
}

/// Pause of automatic placement for a workload after its placement was reverted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementBackoff {
    /// ID of the cgroup, because a path can be used again.
    pub id: CgroupId,
    /// Number of reverted placements.
    pub times: u32,
    /// End of the pause, in seconds since 1970.
    pub until: u64,
}

//! Narrowing: what a cgroup without a guarantee is kept to, and which feature asks for it.

use std::collections::BTreeMap;

use numaward_cgroup::CgroupId;
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet};
use serde::{Deserialize, Serialize};

/// What CPU isolation, automatic placement and the headroom guard ask for in one cgroup. Empty for one that is not narrowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Narrowing {
    /// Whether CPU isolation keeps it off exclusive CPUs.
    pub is_isolated: bool,
    /// Where automatic placement has put it.
    pub home: Option<PreferredNode>,
    /// The nodes off which the headroom guard keeps it.
    pub off: NodeSet,
}

impl Narrowing {
    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The home of a workload without a guarantee.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferredNode {
    /// The node.
    pub node: NodeId,
    /// How many of its accesses were remote before, in thousandths.
    pub remote_before: u32,
    /// Whether fewer are since. Until that is known it is on trial.
    #[serde(default)]
    pub is_kept: bool,
    /// What was moved there for it, by the node on which it was.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub moved: BTreeMap<NodeId, Bytes>,
    /// The CPUs that it had there before those that it has: it still has them if the daemon died before the write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus_before: Option<CpuSet>,
}

impl PreferredNode {
    /// A home on trial, for a workload of whose accesses so many thousandths are remote.
    pub fn new(node: NodeId, remote_before: u32) -> Self {
        Self { node, remote_before, is_kept: false, moved: BTreeMap::new(), cpus_before: None }
    }
}

/// A workload that was put back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementBackoff {
    /// Which cgroup of that path.
    pub id: CgroupId,
    /// How often it was.
    pub times: u32,
    /// Until then it gets no home, in seconds since 1970.
    pub until: u64,
}

//! Samples: the current state of nodes and workloads, for clients that follow it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ExclusiveCpu, Node, NodeAccesses, Workload};

/// The nodes and workloads at one time. The first sample of a stream is complete; later ones contain only the workloads
/// that changed since the previous one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// The time of the sample, in milliseconds since the daemon started.
    pub at_millis: u64,
    /// True if the sample is complete.
    pub full: bool,
    /// A number that grows with each change of a guarantee: the client should then request `/api/v1/allocations` again.
    #[serde(rename = "promises")]
    pub guarantee_revision: u64,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// Sampled accesses of all workloads, by the node of the CPU; absent if no probe samples accesses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<Vec<NodeAccesses>>,
    /// The exclusive CPUs, with the time that tasks used them.
    #[serde(default)]
    pub exclusive_cpus: Vec<ExclusiveCpu>,
    /// All workloads, or those that changed.
    pub workloads: Vec<Workload>,
    /// Removed workloads, by [`Workload::key`].
    pub removed: Vec<String>,
}

impl Workload {
    /// Returns the key of the workload: its cgroup, or its name if it has none.
    pub fn key(&self) -> &str {
        self.cgroup.as_deref().unwrap_or(&self.workload)
    }
}

//! Samples: what is seen now, for those who watch.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ExclusiveCpu, Node, NodeAccesses, Workload};

/// The nodes and workloads at one moment. The first of a stream is complete; later ones hold the workloads
/// that changed since the one before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// When it was taken, in milliseconds since the daemon started.
    pub at_millis: u64,
    /// Whether it is complete.
    pub full: bool,
    /// Grows with each change of what is promised: time to ask for `/api/v1/allocations` again.
    pub promises: u64,
    /// The nodes, all of them.
    pub nodes: Vec<Node>,
    /// Sampled accesses of all workloads, by the node of the CPUs; absent where no probe samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<Vec<NodeAccesses>>,
    /// The exclusive CPUs, and who used each.
    #[serde(default)]
    pub exclusive_cpus: Vec<ExclusiveCpu>,
    /// The workloads: all, or those that changed.
    pub workloads: Vec<Workload>,
    /// Workloads that are gone, by [`Workload::key`].
    pub removed: Vec<String>,
}

impl Workload {
    /// What distinguishes workloads: the cgroup, or the name where there is none.
    pub fn key(&self) -> &str {
        self.cgroup.as_deref().unwrap_or(&self.workload)
    }
}

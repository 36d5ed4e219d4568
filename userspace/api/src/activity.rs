//! Activity of workloads other than allocations: accesses, migrations, stalls and OOM kills.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// Activity of a workload since it was first seen, other than allocations. A part is absent if its probe is not
/// attached.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Activity {
    /// The state of the scans of NUMA balancing. Few remote pages are meaningful only with `on`.
    #[schema(examples("on", "off", "mode2", "skipped_cpuset", "bound", "unknown"))]
    pub sampling: Option<String>,
    /// The estimated percentage of accesses to memory of other nodes, from the placement of threads and memory
    /// (`observe.remoteEstimate`). Absent if the kernel scans the memory.
    pub estimated_remote_percent: Option<u32>,
    /// Pages touched, by scan of NUMA balancing, by the node of the CPU. A page counts about once per scan, however often
    /// it is used.
    pub accesses: Option<Vec<NodeAccesses>>,
    /// Memory that tasks of the workload moved to another node, by reason.
    pub migrated_bytes: Option<BTreeMap<String, u64>>,
    /// Times in which tasks had to reclaim memory.
    pub stalls: Option<Stalls>,
    /// Processes that the OOM killer killed, by the constraint of the allocation.
    pub oom_kills: Option<BTreeMap<String, u64>>,
}

/// Pages that CPUs of one node touched, by scan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeAccesses {
    /// The node of the CPUs; the nearest node with memory if theirs has none.
    pub node: u32,
    /// Pages of this node.
    pub local_pages: u64,
    /// Pages of other nodes.
    pub remote_pages: u64,
    /// The pages of other nodes, by node, if there are any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remote: Vec<RemoteAccesses>,
}

/// Pages of one node that CPUs of another touched, by scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemoteAccesses {
    /// The node of the memory; absent if unknown because the page was moved at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_node: Option<u32>,
    /// The number of pages.
    pub pages: u64,
}

/// Time spent in direct reclaim. Throttling by `memory.high` is not included: see `pressure`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stalls {
    /// The number of stalls.
    pub count: u64,
    /// The total time of all stalls, in microseconds.
    pub micros: u64,
}

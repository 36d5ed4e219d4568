//! What workloads do beside allocating: accesses, migrations, stalls, kills.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// What a workload did beside allocating since it was seen first. A part whose probe is not attached is absent.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Activity {
    /// Whether the kernel samples its accesses: only with `on` do few remote ones mean that there are few.
    #[schema(examples("on", "off", "mode2", "skipped_cpuset", "bound", "unknown"))]
    pub sampling: Option<String>,
    /// An estimate, not a measurement (`observe.remoteEstimate`): the share of its accesses to memory of other nodes, by where
    /// its threads ran and where its memory lies. Absent where accesses are sampled.
    pub estimated_remote_percent: Option<u32>,
    /// Sampled accesses, by the node of the CPUs.
    pub accesses: Option<Vec<NodeAccesses>>,
    /// Memory moved to another node by its tasks, by reason.
    pub migrated_bytes: Option<BTreeMap<String, u64>>,
    /// How often its tasks had to reclaim memory.
    pub stalls: Option<Stalls>,
    /// Processes that the OOM killer took, by what constrained the allocation.
    pub oom_kills: Option<BTreeMap<String, u64>>,
}

/// Sampled accesses from the CPUs of one node, in pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeAccesses {
    /// The node of the CPUs; the nearest with memory where that has none.
    pub node: u32,
    /// To memory of this node.
    pub local_pages: u64,
    /// To memory of other nodes.
    pub remote_pages: u64,
    /// The remote ones by the node of the memory, where there are some.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remote: Vec<RemoteAccesses>,
}

/// Sampled accesses from the CPUs of one node to the memory of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemoteAccesses {
    /// The node of the memory; absent where that is not known, as the page was moved at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_node: Option<u32>,
    /// So many pages.
    pub pages: u64,
}

/// Time lost in reclaim. Being throttled by `memory.high` is not in it: see `pressure`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stalls {
    /// How often.
    pub count: u64,
    /// All of them together, in microseconds.
    pub micros: u64,
}

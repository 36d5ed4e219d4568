//! Memory regions of a workload and the nodes of their pages.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// The maximum number of regions in a list.
pub const MAX_REGIONS: usize = 200;

/// The memory of a workload, by region.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Regions {
    /// The number of processes that were read completely.
    pub processes: u32,
    /// Missing parts, with the reason.
    pub notes: Vec<String>,
    /// The nodes of its guaranteed memory, as a list; absent without a memory guarantee.
    #[schema(examples("0-1"))]
    #[serde(rename = "promised")]
    pub guaranteed: Option<String>,
    /// The preferred node of a workload without a memory guarantee, as a list; absent if it has none.
    #[schema(examples("1"))]
    pub home: Option<String>,
    /// The regions, largest first; at most 200. In a longer list, the last entry stands for all further regions.
    pub regions: Vec<Region>,
}

/// A region of the memory that processes of a workload have mapped.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Region {
    /// The name of the region: `[heap]`, `[stack]`, `[anonymous]`, or a file. Shared memory is counted in each process
    /// that maps it.
    #[schema(examples("[heap]", "/usr/lib/libc.so.6"))]
    pub name: String,
    /// The bytes of the region, by node; nodes without any are not listed.
    pub nodes: Vec<RegionNode>,
    /// The bytes on nodes other than the guaranteed or preferred ones; absent if the workload has neither.
    pub off_bytes: Option<u64>,
}

/// The bytes of a region on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RegionNode {
    /// The node.
    pub node: u32,
    /// The bytes on this node.
    pub bytes: u64,
}

impl Region {
    /// Returns the bytes on all nodes.
    pub fn bytes(&self) -> u64 {
        self.nodes.iter().fold(0, |sum, node| sum.saturating_add(node.bytes))
    }
}

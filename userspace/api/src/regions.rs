//! Where which part of a workload's memory lies.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// Regions that are listed, at most.
pub const MAX_REGIONS: usize = 200;

/// Where the memory of a workload lies, by what it is for.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Regions {
    /// How many processes were looked at, as a whole.
    pub processes: u32,
    /// What is missing, and why.
    pub notes: Vec<String>,
    /// The nodes promised to it, as a list; absent where no memory is promised.
    #[schema(examples("0-1"))]
    pub promised: Option<String>,
    /// Where it has a home, if nothing is promised to it, as a list; absent where it has none.
    #[schema(examples("1"))]
    pub home: Option<String>,
    /// The regions, those with the most bytes first; 200 at most. The last one then stands for all others.
    pub regions: Vec<Region>,
}

/// A part of the memory that processes of a workload have mapped.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Region {
    /// What it is: `[heap]`, `[stack]`, `[anonymous]`, or a file. Memory that processes share is counted in each of them.
    #[schema(examples("[heap]", "/usr/lib/libc.so.6"))]
    pub name: String,
    /// Its bytes, by node; nodes with none are not listed.
    pub nodes: Vec<RegionNode>,
    /// Its bytes on nodes that are neither promised nor a home; absent where there are no such nodes.
    pub off_bytes: Option<u64>,
}

/// What a region has on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RegionNode {
    /// The node.
    pub node: u32,
    /// Its bytes there.
    pub bytes: u64,
}

impl Region {
    /// Its bytes on all nodes.
    pub fn bytes(&self) -> u64 {
        self.nodes.iter().fold(0, |sum, node| sum.saturating_add(node.bytes))
    }
}

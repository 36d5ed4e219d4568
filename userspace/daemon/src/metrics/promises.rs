//! What is promised, as figures.

use std::sync::Arc;

use numaward_topology::{Bytes, NodeId, ZoneKind};

/// What is promised on this host, and what came of it. Empty where nothing can be promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromiseFigures {
    /// Of each workload with an allocation.
    pub missed: Vec<Missed>,
    /// Memory, by node and kind.
    pub kinds: Vec<KindPromised>,
    /// By node.
    pub exclusive_cpus: Vec<(NodeId, u64)>,
    /// Of each workload with an allocation, what of it is not there.
    pub lacks: Vec<Lacking>,
    /// Memory that could still be had, less what is promised and not yet used: by node and kind, in bytes. Below zero
    /// where more is promised than can be had at once.
    pub headroom: Vec<(NodeId, ZoneKind, i64)>,
    /// CPUs that are exclusive to nobody; absent where nothing can be promised.
    pub shared_pool_cpus: Option<u64>,
}

/// User memory that a workload allocated outside the nodes promised to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// The workload.
    pub workload: Arc<str>,
    /// By the node of the page.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// What is promised to a workload and not there (any more), as the machine changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// The workload.
    pub workload: Arc<str>,
    /// Exclusive CPUs that are offline.
    pub offline_cpus: u64,
    /// Memory of all kinds that its nodes do not have.
    pub uncovered: Bytes,
}

/// Promises of one kind of memory on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindPromised {
    /// The node.
    pub node: NodeId,
    /// The kind.
    pub kind: ZoneKind,
    /// Kept for the system.
    pub reserved: Bytes,
    /// What can be promised at all.
    pub allocatable: Bytes,
    /// What is promised.
    pub promised: Bytes,
    /// What can still be promised.
    pub free: Bytes,
}

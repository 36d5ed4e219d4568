//! How each node is doing against what is promised on it and not yet used.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_engine::HostConditions;
use numaward_topology::{Bytes, NodeId};

/// For how long there has to be enough until a node is no longer low.
pub const RECOVERY_TIME: Duration = Duration::from_secs(30);

/// What the guard saw last. Readers keep an `Arc` of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headroom {
    /// Grows with each look; 0 before the first.
    pub look: u64,
    /// The nodes on which memory is promised.
    pub nodes: Vec<NodeHeadroom>,
    /// What each node can give to workloads without a guarantee ([`NodeHeadroom::spare`]), also a node without a promise. A node
    /// whose memory could not be read is not in it, and has none.
    pub spare: BTreeMap<NodeId, Bytes>,
    /// Workloads without a guarantee, where a node is low or tight and somebody is to act.
    pub others: Vec<UnguaranteedWorkload>,
    /// Whether their page cache was read.
    pub is_cache_read: bool,
    /// What decisions have to heed; nothing with the strategy `kubelet`. As long as it is the same one, it did not change.
    pub conditions: Arc<HostConditions>,
}

impl Headroom {
    /// How this node is doing, if memory is promised on it.
    pub fn node(&self, node: NodeId) -> Option<&NodeHeadroom> {
        self.nodes.iter().find(|of| of.node == node)
    }
}

/// How a node is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeHeadroom {
    /// The node.
    pub node: NodeId,
    /// Base pages that are still available: free or reclaimable, without what the kernel keeps and what workloads with a
    /// guarantee hold as page cache.
    pub obtainable: Bytes,
    /// What of that is free: nothing has to be reclaimed for it.
    pub free: Bytes,
    /// What is promised there and not used yet.
    pub unused: Bytes,
    /// How much more than that is to be there.
    pub margin: Bytes,
    /// Whether the node is low: there was less, and there has not been enough for a while since.
    pub is_low: bool,
    /// Whether the node is tight, if that is looked at (`guardReclaim`): less than what is to be there was free, and
    /// enough has not been since.
    pub is_tight: bool,
}

impl NodeHeadroom {
    /// What is available beyond what is promised, in bytes; below zero where a promise cannot be kept.
    pub fn headroom_bytes(&self) -> i64 {
        self.obtainable.0.cast_signed().saturating_sub_unsigned(self.unused.0)
    }

    /// What is available beyond what is promised and the margin.
    pub fn spare(&self) -> Bytes {
        Bytes(self.headroom_bytes().saturating_sub_unsigned(self.margin.0).max(0).cast_unsigned())
    }

    /// Returns true where there is so much that the node need not be low any more: twice what [`NodeHeadroom::is_short`] asks for.
    pub fn has_recovered(&self) -> bool {
        self.headroom_bytes() >= self.margin_of_unused().saturating_mul(2).cast_signed()
    }

    /// Returns true where what is promised and not used may not be there when it is asked for: there is less room than the margin. On a
    /// node that its owners have filled themselves, nothing is missing.
    pub fn is_short(&self) -> bool {
        self.headroom_bytes() < self.margin_of_unused().cast_signed()
    }

    /// The margin; a larger one than what is promised and not used would be for nobody.
    fn margin_of_unused(&self) -> u64 {
        self.margin.0.min(self.unused.0)
    }

    /// What of this has to become free for the node not to be tight any more: all that is promised and not used, with twice
    /// the margin, but at most twice as much.
    pub fn bytes_to_free(&self) -> Bytes {
        self.lacks(self.margin.0.saturating_mul(2))
    }

    /// Whether the node is to be tight from now on, or still.
    pub fn becomes_tight(&self, was: bool) -> bool {
        let lacks = if was { self.bytes_to_free() } else { self.lacks(self.margin.0) };
        lacks.0 > 0
    }

    fn lacks(&self, margin: u64) -> Bytes {
        let wanted = self.unused.0.saturating_add(margin.min(self.unused.0));
        Bytes(wanted.saturating_sub(self.free.0))
    }
}

/// A workload without a guarantee, with none above it or below it either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnguaranteedWorkload {
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Which cgroup of that path.
    pub id: CgroupId,
    /// What it has on the nodes that are low, of memory that is in the way there: anonymous and shared memory, and files
    /// of a tmpfs. Other page cache counts as available memory.
    pub resident: Vec<(NodeId, Bytes)>,
    /// Its page cache on each node that nobody maps, where a node is tight.
    pub cache: Vec<(NodeId, Bytes)>,
}

impl UnguaranteedWorkload {
    /// What it has of that on a node that is low.
    pub fn on(&self, node: NodeId) -> Bytes {
        on(&self.resident, node)
    }

    /// Its page cache on a node, where one is tight.
    pub fn cache_on(&self, node: NodeId) -> Bytes {
        on(&self.cache, node)
    }
}

fn on(by_node: &[(NodeId, Bytes)], node: NodeId) -> Bytes {
    by_node.iter().find(|(of, _)| *of == node).map_or(Bytes(0), |(_, bytes)| *bytes)
}

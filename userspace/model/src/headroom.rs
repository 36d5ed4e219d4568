//! Memory headroom of nodes: available memory compared with guaranteed memory that is not used yet.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_engine::HostConditions;
use numaward_topology::{Bytes, NodeId};

/// The time for which a low node must have enough memory before it is no longer low.
pub const RECOVERY_TIME: Duration = Duration::from_secs(30);

/// The result of the guard's last check. Readers keep an `Arc` of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headroom {
    /// The number of checks so far; 0 before the first.
    pub look: u64,
    /// The nodes on which memory is guaranteed.
    pub nodes: Vec<NodeHeadroom>,
    /// The memory of each node that is available to workloads without a guarantee ([`NodeHeadroom::spare`]), including
    /// nodes without guarantees. A node whose memory could not be read is missing and counts as 0.
    pub spare: BTreeMap<NodeId, Bytes>,
    /// Workloads without a guarantee; empty unless a node is low or tight and the guard is to act.
    pub others: Vec<UnguaranteedWorkload>,
    /// Pods with memory beyond their guarantees on low nodes; empty unless a node is low and pods are evicted.
    pub pods: Vec<PodUsage>,
    /// True if the page cache of these workloads was read.
    pub is_cache_read: bool,
    /// Conditions for decisions; empty with the strategy `kubelet`. The same `Arc` means unchanged conditions.
    pub conditions: Arc<HostConditions>,
}

impl Headroom {
    /// Returns the headroom of a node on which memory is guaranteed.
    pub fn node(&self, node: NodeId) -> Option<&NodeHeadroom> {
        self.nodes.iter().find(|of| of.node == node)
    }
}

/// The headroom of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeHeadroom {
    pub node: NodeId,
    /// Available base pages: free or reclaimable, without the kernel's reserves and the page cache of workloads with a
    /// guarantee.
    pub obtainable: Bytes,
    /// The free part of this, which needs no reclaim.
    pub free: Bytes,
    /// Guaranteed memory that is not used yet.
    pub unused: Bytes,
    /// The margin that should be available in addition.
    pub margin: Bytes,
    /// True if the node is low: it was short ([`Self::is_short`]) and has not recovered for [`RECOVERY_TIME`] since.
    pub is_low: bool,
    /// True if the node is tight: less memory was free than the unused guarantees with the margin, and not enough has
    /// been free since. False without `guardReclaim`.
    pub is_tight: bool,
}

impl NodeHeadroom {
    /// Returns the available memory beyond the unused guarantees, in bytes; negative if a guarantee cannot be
    /// fulfilled.
    pub fn headroom_bytes(&self) -> i64 {
        self.obtainable.0.cast_signed().saturating_sub_unsigned(self.unused.0)
    }

    /// Returns the available memory beyond the unused guarantees and the margin.
    pub fn spare(&self) -> Bytes {
        Bytes(self.headroom_bytes().saturating_sub_unsigned(self.margin.0).max(0).cast_unsigned())
    }

    /// Returns true if a low node has enough memory again: twice the headroom below which [`NodeHeadroom::is_short`] is
    /// true.
    pub fn has_recovered(&self) -> bool {
        self.headroom_bytes() >= self.margin_of_unused().saturating_mul(2).cast_signed()
    }

    /// Returns true if the headroom is below the margin, so that unused guarantees may not be available when they are
    /// needed. A node with fully used guarantees is not short.
    pub fn is_short(&self) -> bool {
        self.headroom_bytes() < self.margin_of_unused().cast_signed()
    }

    /// Returns the margin, limited to the unused guarantees.
    fn margin_of_unused(&self) -> u64 {
        self.margin.0.min(self.unused.0)
    }

    /// Returns the bytes that must become free before the node is no longer tight: unused guarantees with twice the
    /// margin, limited to twice the unused guarantees.
    pub fn bytes_to_free(&self) -> Bytes {
        self.lacks(self.margin.0.saturating_mul(2))
    }

    /// Returns true if the node is tight; `was`: true if it was tight before.
    pub fn becomes_tight(&self, was: bool) -> bool {
        let lacks = if was { self.bytes_to_free() } else { self.lacks(self.margin.0) };
        lacks.0 > 0
    }

    fn lacks(&self, margin: u64) -> Bytes {
        let wanted = self.unused.0.saturating_add(margin.min(self.unused.0));
        Bytes(wanted.saturating_sub(self.free.0))
    }
}

/// A workload without a guarantee, and with no workload above or below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnguaranteedWorkload {
    pub cgroup: CgroupPath,
    /// The id of the cgroup, which distinguishes it from earlier cgroups at the path.
    pub id: CgroupId,
    /// Memory on the low nodes that reduces the headroom: anonymous and shared memory, and files of a tmpfs. Other page
    /// cache counts as available memory.
    pub resident: Vec<(NodeId, Bytes)>,
    /// Unmapped page cache on each node, if a node is tight.
    pub cache: Vec<(NodeId, Bytes)>,
}

impl UnguaranteedWorkload {
    /// Returns the memory on a low node ([`Self::resident`]).
    pub fn on(&self, node: NodeId) -> Bytes {
        on(&self.resident, node)
    }

    /// Returns the unmapped page cache on a node, if a node is tight.
    pub fn cache_on(&self, node: NodeId) -> Bytes {
        on(&self.cache, node)
    }
}

/// The memory of a pod beyond its guarantees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodUsage {
    /// The UID as the container runtime reports it.
    pub uid: String,
    /// Its cgroup, or those of its containers.
    pub cgroups: Vec<CgroupPath>,
    /// Anonymous and shared memory and files of a tmpfs on the low nodes, in all containers and in none, beyond the guaranteed memory.
    pub beyond: Vec<(NodeId, Bytes)>,
}

impl PodUsage {
    /// Returns the memory on a low node ([`Self::beyond`]).
    pub fn on(&self, node: NodeId) -> Bytes {
        on(&self.beyond, node)
    }
}

fn on(by_node: &[(NodeId, Bytes)], node: NodeId) -> Bytes {
    by_node.iter().find(|(of, _)| *of == node).map_or(Bytes(0), |(_, bytes)| *bytes)
}

//! Types and constants shared by the probes and userspace.
//!
//! Everything here lies in eBPF maps, so layouts are fixed (`repr(C)`, padding spelled out) and values
//! are in the host's byte order. How they come about is told
//! in the probes.
//!
//! **Node indices.** Maps are indexed by a dense *node index*, not by node id: ids may have gaps (0, 8,
//! 252), and a row for each unused id would be paid for on every CPU. Userspace numbers the machine's
//! nodes 0, 1, 2… in the order of their ids, and those that come later after them.

#![no_std]

/// How many nodes a machine may have for all of them to be counted.
pub const MAX_NODES: usize = 256;

/// Node ids that the kernel may use: `MAX_NUMNODES` at its largest, `CONFIG_NODES_SHIFT=10`.
pub const MAX_NODE_IDS: usize = 1024;

/// The node index of what is on no known node.
pub const UNKNOWN_NODE: u16 = u16::MAX;

/// The slot of whatever belongs to no registered workload.
pub const OTHER_SLOT: u32 = 0;

/// Pages allocated for one slot on one node, counted on one CPU or by several.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocCounters {
    /// User pages on the home node of the allocating CPU.
    pub user_local: u64,
    /// User pages on other nodes.
    pub user_remote: u64,
    /// User pages, local or remote, on nodes outside [`Slot::allowed`].
    pub user_outside: u64,
    /// Pages for the kernel's own use.
    pub kernel: u64,
}

/// What the allocation probe counts beside the slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocTotals {
    /// Pages on no known node.
    pub unknown_node: u64,
    /// How often the slot of a cgroup had to be searched.
    pub resolved: u64,
    /// How often, of these, the task could be preempted inside the probe.
    pub preemptible: u64,
}

/// What the probes know of a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The nodes promised to the workload, a bit for each node index. All set where nothing is
    /// promised, so that nothing is outside.
    pub allowed: [u64; MAX_NODES / 64],
}

/// What the probes know of the machine's nodes, by node id.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeTable {
    /// The node's index; [`UNKNOWN_NODE`] for ids that the machine does not have.
    pub index: [u16; MAX_NODE_IDS],
    /// The index of the *home node* of the node's CPUs: itself, or the nearest node with memory.
    /// [`UNKNOWN_NODE`] as above.
    pub home: [u16; MAX_NODE_IDS],
}

// SAFETY: `repr(C)`, made of integers only, without padding: any bytes are a value.
#[cfg(feature = "user")]
unsafe impl aya::Pod for AllocCounters {}
// SAFETY: as above.
#[cfg(feature = "user")]
unsafe impl aya::Pod for AllocTotals {}
// SAFETY: as above.
#[cfg(feature = "user")]
unsafe impl aya::Pod for Slot {}
// SAFETY: as above.
#[cfg(feature = "user")]
unsafe impl aya::Pod for NodeTable {}

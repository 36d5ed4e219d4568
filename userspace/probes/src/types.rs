//! Slots, pages, and what is counted of them.

use std::collections::BTreeMap;

use numaward_topology::NodeId;

/// The place of a registered workload in the probes' maps. Reused after [`Probes::release`](crate::Probes::release).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub(crate) u32);

/// A number of base pages (4 KiB on `x86_64`; `sysconf(_SC_PAGESIZE)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pages(pub u64);

/// Pages allocated on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// User pages (anonymous memory and page cache: movable ones) allocated by CPUs of this node, or
    /// by CPUs for which it is the nearest node with memory.
    pub user_local: Pages,
    /// User pages allocated by CPUs of other nodes.
    pub user_remote: Pages,
    /// Those of `user_local` and `user_remote` that are outside the nodes allowed to the workload.
    pub user_outside: Pages,
    /// Pages for the kernel's own use (page tables, slab, buffers): a lower bound, since the kernel's
    /// bulk allocations pass the tracepoint only from some kernels on.
    pub kernel: Pages,
}

/// [`Counters`] by the node on which the pages are.
pub type NodeCounters = BTreeMap<NodeId, Counters>;

/// All counters at (nearly) one time. None of them ever goes down while its slot stays registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Pages allocated by each registered workload since it was registered.
    pub slots: BTreeMap<SlotId, NodeCounters>,
    /// Pages allocated by everything else since the probe was attached.
    pub other: NodeCounters,
    /// Pages whose node is not known, of any owner: on a node or in a memory block that was added
    /// after [`Probes::load`](crate::Probes::load), until [`Probes::refresh`](crate::Probes::refresh). Not part of the other counters.
    pub unknown_node: Pages,
}

//! What a hinting fault of NUMA balancing says: `task_numa_fault(int last_cpupid, int mem_node, int pages, int flags)`.
//!
//! Whether the page was local is in `flags`, never in `mem_node`: after a migration that succeeded, it is the destination.

use numaward_abi::{MAX_NODE_IDS, NodeTable, UNKNOWN_NODE};

use crate::nodes::home;

/// `TNF_MIGRATED` and `TNF_FAULT_LOCAL` of linux/sched/numa_balancing.h.
const MIGRATED: i32 = 0x01;
const LOCAL: i32 = 0x08;

/// An access that was seen.
pub(crate) struct Access {
    /// The index of the home node of the CPU.
    pub(crate) home: u32,
    /// Whether the memory was of that node.
    pub(crate) local: bool,
    /// The index of the memory's node; none of a node where it is not known, as the page was moved at once.
    pub(crate) memory: u32,
}

#[inline(always)]
pub(crate) fn access(nodes: &NodeTable, mem_node: i32, flags: i32) -> Access {
    let home = u32::from(home(nodes));
    let memory = match mem_node as usize {
        id if id < MAX_NODE_IDS => nodes.index[id],
        _ => UNKNOWN_NODE,
    };
    let memory = u32::from(memory);
    let moved = flags & MIGRATED != 0;
    // CPUs of a node without memory are at home on the nearest with some; the kernel does not know of this.
    let local = flags & LOCAL != 0 || (!moved && memory == home);
    Access { home, local, memory: if moved { u32::from(UNKNOWN_NODE) } else { memory } }
}

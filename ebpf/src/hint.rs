//! Decodes a hinting fault of NUMA balancing: `task_numa_fault(int last_cpupid, int mem_node, int pages, int flags)`.
//!
//! `flags` says if the page was local. `mem_node` does not: after a successful migration, it is the destination.

use numaward_abi::{MAX_NODE_IDS, NodeTable, UNKNOWN_NODE};

use crate::nodes::memory_node;

/// `TNF_MIGRATED` and `TNF_FAULT_LOCAL` of linux/sched/numa_balancing.h.
const MIGRATED: i32 = 0x01;
const LOCAL: i32 = 0x08;

/// A sampled access to memory.
pub(crate) struct SampledAccess {
    /// The index of the CPU's memory node.
    pub(crate) cpu_node: u32,
    /// True if the page was on that node.
    pub(crate) is_local: bool,
    /// The index of the page's node; [`UNKNOWN_NODE`] if the page was migrated at once.
    pub(crate) page_node: u32,
}

#[inline(always)]
pub(crate) fn sampled_access(nodes: &NodeTable, mem_node: i32, flags: i32) -> SampledAccess {
    let cpu_node = u32::from(memory_node(nodes));
    let page_node = match mem_node as usize {
        id if id < MAX_NODE_IDS => nodes.index[id],
        _ => UNKNOWN_NODE,
    };
    let page_node = u32::from(page_node);
    let moved = flags & MIGRATED != 0;
    // The kernel does not count a CPU of a node without memory as local to its memory node.
    let is_local = flags & LOCAL != 0 || (!moved && page_node == cpu_node);
    SampledAccess { cpu_node, is_local, page_node: if moved { u32::from(UNKNOWN_NODE) } else { page_node } }
}

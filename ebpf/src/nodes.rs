//! The machine's nodes.

use aya_ebpf::{Global, helpers::bpf_get_numa_node_id, macros::map, maps::Array};
use numaward_abi::{MAX_NODE_IDS, NodeTable, UNKNOWN_NODE};

/// Rows per slot: nodes of the machine, with room for some that may come.
#[unsafe(no_mangle)]
pub(crate) static NODES: Global<u32> = Global::new(1);

/// One entry.
#[map]
pub(crate) static NODE_TABLE: Array<NodeTable> = Array::with_max_entries(1, 0);

/// The index of the home node of this CPU.
#[inline(always)]
pub(crate) fn home(nodes: &NodeTable) -> u16 {
    // SAFETY: the helper takes nothing and always succeeds.
    let own_node = unsafe { bpf_get_numa_node_id() } as usize;
    if own_node < MAX_NODE_IDS { nodes.home[own_node] } else { UNKNOWN_NODE }
}

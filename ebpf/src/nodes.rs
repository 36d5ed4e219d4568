use aya_ebpf::{Global, helpers::bpf_get_numa_node_id, macros::map, maps::Array};
use numaward_abi::{MAX_NODE_IDS, NodeTable, UNKNOWN_NODE};

/// Rows per slot: one for each node of the machine, and spare ones for nodes that may be added.
#[unsafe(no_mangle)]
pub(crate) static NODES: Global<u32> = Global::new(1);

/// The node table: one entry.
#[map]
pub(crate) static NODE_TABLE: Array<NodeTable> = Array::with_max_entries(1, 0);

/// Returns the index of this CPU's memory node.
#[inline(always)]
pub(crate) fn memory_node(nodes: &NodeTable) -> u16 {
    // SAFETY: the helper takes nothing and always succeeds.
    let own_node = unsafe { bpf_get_numa_node_id() } as usize;
    if own_node < MAX_NODE_IDS { nodes.memory_node[own_node] } else { UNKNOWN_NODE }
}

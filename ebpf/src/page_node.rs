//! From a page of the kernel to its node.

use aya_ebpf::Global;
use numaward_abi::{MAX_NODE_IDS, UNKNOWN_NODE};

use crate::nodes::NODE_TABLE;

/// Where the node id begins in `page->flags`; 64 on kernels with one node.
#[unsafe(no_mangle)]
static NODE_SHIFT: Global<u32> = Global::new(64);

/// The index of the node that `page->flags` names.
#[inline(always)]
pub(crate) fn node_of(flags: u64) -> u16 {
    let id = match NODE_SHIFT.load() {
        shift @ 0..64 => flags >> shift,
        _ => 0,
    };
    match NODE_TABLE.get(0) {
        Some(nodes) if id < MAX_NODE_IDS as u64 => nodes.index[id as usize],
        _ => UNKNOWN_NODE,
    }
}

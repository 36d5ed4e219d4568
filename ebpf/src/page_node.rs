//! Finds the node of a page.

use aya_ebpf::Global;
use numaward_abi::{MAX_NODE_IDS, UNKNOWN_NODE};

use crate::nodes::NODE_TABLE;

/// The shift of the node id in `page->flags`; 64 on kernels that support one node only.
#[unsafe(no_mangle)]
static NODE_SHIFT: Global<u32> = Global::new(64);

/// Returns the index of the node in `page->flags`.
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

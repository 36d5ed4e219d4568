//! From any cgroup to the slot of its workload, by the kernel's structures.

use numaward_abi::OTHER_SLOT;

use crate::{
    cgroup_node::CgroupNode,
    cgroup_path::KERNFS_PARENT,
    roots::{MAX_LEVELS, slot_of_root},
};

/// The slot of the deepest registered cgroup at or above this one.
#[inline(always)]
pub(crate) fn slot_of(mut node: CgroupNode) -> u32 {
    for _ in 0..MAX_LEVELS {
        if node.address.is_null() {
            break;
        }
        if let Some(found) = slot_of_root(node.id()) {
            return found;
        }
        // SAFETY: not null; else as in `CgroupNode::of_task`.
        node.address = unsafe { *node.address.add(KERNFS_PARENT.load() as usize).cast() };
    }
    OTHER_SLOT
}

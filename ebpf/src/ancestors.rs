//! Finds the slot of any cgroup by walking up the kernel's structures.

use numaward_abi::OTHER_SLOT;

use crate::{
    cgroup_node::CgroupNode,
    cgroup_path::KERNFS_PARENT,
    roots::{MAX_LEVELS, slot_of_root},
};

/// Returns the slot of the deepest registered cgroup among this one and its ancestors.
#[inline(always)]
pub(crate) fn slot_of(mut node: CgroupNode) -> u32 {
    for _ in 0..MAX_LEVELS {
        if node.address.is_null() {
            break;
        }
        if let Some(found) = slot_of_root(node.id()) {
            return found;
        }
        // SAFETY: the address is not null; otherwise as in `CgroupNode::of_task`.
        node.address = unsafe { *node.address.add(KERNFS_PARENT.load() as usize).cast() };
    }
    OTHER_SLOT
}

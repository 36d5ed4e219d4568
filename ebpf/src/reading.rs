//! Reads the kernel's memory by a helper, for pointers that the verifier does not know.

use core::ffi::c_void;

use aya_ebpf::helpers::bpf_probe_read_kernel;
use numaward_abi::{CgroupId, OTHER_SLOT};

use crate::{
    cgroup_path::{CGROUP_PATH, KERNFS_PARENT},
    roots::{MAX_LEVELS, slot_of_root},
};

/// Returns the slot of the deepest registered cgroup among the one with this kernfs node and its ancestors.
#[inline(always)]
pub(crate) fn slot_by_reading(mut node: u64) -> u32 {
    let [_, _, _, id] = CGROUP_PATH.load();
    for _ in 0..MAX_LEVELS {
        if node == 0 {
            break;
        }
        if let Some(found) = slot_of_root(CgroupId(read_word(node, id))) {
            return found;
        }
        node = read_word(node, KERNFS_PARENT.load());
    }
    OTHER_SLOT
}

/// Returns the 64-bit number at an offset of a kernel structure; 0 if it cannot be read.
#[inline(always)]
pub(crate) fn read_word(structure: u64, offset: u32) -> u64 {
    let address = (structure + u64::from(offset)) as *const c_void;
    // SAFETY: the helper takes any address.
    unsafe { bpf_probe_read_kernel(address.cast::<u64>()) }.unwrap_or(0)
}

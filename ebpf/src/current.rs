//! From the current task to the slot of its workload.
//!
//! Linux 5.14 and newer have a helper for the ancestors of a cgroup. It needs nothing of the kernel's structures, so that
//! the programs load without BTF, and under `lockdown=confidentiality`. Older kernels have the helper, but not for these
//! programs: there the way from the task to its cgroup and upwards is read step by step.

use core::ffi::c_void;

use aya_ebpf::{
    Global,
    helpers::{
        bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_task,
        bpf_get_current_task_btf, bpf_probe_read_kernel,
    },
};
use numaward_abi::{CgroupId, OTHER_SLOT};

use crate::{
    cgroup_node::CgroupNode,
    cgroup_path::{CGROUP_PATH, KERNFS_PARENT},
    roots::{MAX_LEVELS, slot_of_root},
};

/// Whether there is a helper for the ancestors. The verifier does not look at the way that is not taken.
#[unsafe(no_mangle)]
pub(crate) static HAS_ANCESTORS: Global<u32> = Global::new(1);

/// Whether programs may read the current task's structures directly.
#[unsafe(no_mangle)]
static READS_TASK: Global<u32> = Global::new(0);

/// The id of the current task's cgroup.
#[inline(always)]
pub(crate) fn current_cgroup() -> CgroupId {
    if READS_TASK.load() == 0 {
        // SAFETY: the helper takes nothing and always succeeds.
        return CgroupId(unsafe { bpf_get_current_cgroup_id() });
    }
    // SAFETY: userspace sets the path where it sets the above, and the current task is one as the verifier knows it.
    unsafe { CgroupNode::of_task(CGROUP_PATH.load(), bpf_get_current_task_btf().cast()) }.id()
}

/// The slot of the current task.
#[inline(always)]
pub(crate) fn current_slot() -> u32 {
    if HAS_ANCESTORS.load() != 0 { by_helper() } else { by_reading() }
}

#[inline(always)]
fn by_helper() -> u32 {
    let mut slot = OTHER_SLOT;
    for level in 0..MAX_LEVELS {
        // SAFETY: any level is allowed; the helper returns 0 below the current cgroup.
        let ancestor = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if ancestor == 0 {
            break;
        }
        if let Some(found) = slot_of_root(CgroupId(ancestor)) {
            slot = found;
        }
    }
    slot
}

#[inline(always)]
fn by_reading() -> u32 {
    let [cgroups, dfl_cgrp, kn, id] = CGROUP_PATH.load();
    // SAFETY: the helper takes nothing and always succeeds.
    let task = unsafe { bpf_get_current_task() };
    let mut node = word(word(word(task, cgroups), dfl_cgrp), kn);
    for _ in 0..MAX_LEVELS {
        if node == 0 {
            break;
        }
        if let Some(found) = slot_of_root(CgroupId(word(node, id))) {
            return found;
        }
        node = word(node, KERNFS_PARENT.load());
    }
    OTHER_SLOT
}

/// The number at an offset of a structure of the kernel; 0 where it cannot be read.
#[inline(always)]
fn word(structure: u64, offset: u32) -> u64 {
    let address = (structure + u64::from(offset)) as *const c_void;
    // SAFETY: the helper takes any address.
    unsafe { bpf_probe_read_kernel(address.cast::<u64>()) }.unwrap_or(0)
}

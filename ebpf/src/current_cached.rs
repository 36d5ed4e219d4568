//! Finds the slot of the current task's workload, with a cache on each CPU.

use aya_ebpf::helpers::{bpf_get_current_cgroup_id, bpf_get_current_task_btf};
use numaward_abi::CgroupId;

use crate::{
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    current::{HAS_ANCESTORS, READS_TASK, current_slot},
    slot_cache::{SlotCache, cached_slot},
};

/// Returns the slot of the current task. Each program has its own cache.
#[inline(always)]
pub(crate) fn cached_current_slot(cache: &SlotCache) -> u32 {
    if HAS_ANCESTORS.load() == 0 {
        return current_slot();
    }
    let cgroup = current_cgroup();
    // If the task is moved to another cgroup meanwhile, the slot may be wrong and is not cached.
    cached_slot(cache, cgroup.0, || (current_slot(), current_cgroup() == cgroup))
}

/// Returns the id of the current task's cgroup.
#[inline(always)]
fn current_cgroup() -> CgroupId {
    if READS_TASK.load() == 0 {
        // SAFETY: the helper takes nothing and always succeeds.
        return CgroupId(unsafe { bpf_get_current_cgroup_id() });
    }
    // SAFETY: if userspace sets READS_TASK, it also sets the path; the verifier knows the current task as a `struct
    // task_struct`.
    unsafe { CgroupNode::of_task(CGROUP_PATH.load(), bpf_get_current_task_btf().cast()) }.id()
}

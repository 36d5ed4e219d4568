//! Finds the slot of the current task's workload.
//!
//! Linux 5.14 and newer let these programs call a helper for the ancestors of a cgroup. It needs no knowledge of the
//! kernel's structures, so the programs load without BTF and under `lockdown=confidentiality`. Older kernels refuse the
//! helper to these programs: there, the path from the task to its cgroup and upwards is read step by step.

use aya_ebpf::{
    Global,
    helpers::{bpf_get_current_ancestor_cgroup_id, bpf_get_current_task},
};
use numaward_abi::{CgroupId, OTHER_SLOT};

use crate::{
    cgroup_path::CGROUP_PATH,
    reading::{read_word, slot_by_reading},
    roots::{MAX_LEVELS, slot_of_root},
};

/// 1 if the helper for ancestors is available. The verifier does not check the branch that is not taken.
#[unsafe(no_mangle)]
pub(crate) static HAS_ANCESTORS: Global<u32> = Global::new(1);

/// 1 if programs may read the current task's structures directly.
#[unsafe(no_mangle)]
pub(crate) static READS_TASK: Global<u32> = Global::new(0);

/// Returns the slot of the current task.
#[inline(always)]
pub(crate) fn current_slot() -> u32 {
    if HAS_ANCESTORS.load() != 0 { slot_by_helper() } else { slot_of_task_by_reading() }
}

#[inline(always)]
fn slot_by_helper() -> u32 {
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
fn slot_of_task_by_reading() -> u32 {
    let [cgroups, dfl_cgrp, kn, _] = CGROUP_PATH.load();
    // SAFETY: the helper takes nothing and always succeeds.
    let task = unsafe { bpf_get_current_task() };
    slot_by_reading(read_word(read_word(read_word(task, cgroups), dfl_cgrp), kn))
}

//! From the current task to the slot of its workload, by helpers that every kernel has.
//!
//! They do not use `bpf_probe_read_kernel`, so that the programs load under `lockdown=confidentiality`.

use aya_ebpf::helpers::bpf_get_current_ancestor_cgroup_id;
use numaward_abi::{CgroupId, OTHER_SLOT};

use crate::roots::{MAX_LEVELS, slot_of_root};

/// The slot of the current task.
#[inline(always)]
pub(crate) fn current_slot() -> u32 {
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

//! The slot of the current task's workload, where each CPU remembers it.

use crate::{
    current::{HAS_ANCESTORS, current_cgroup, current_slot},
    slot_cache::{SlotCache, remembered},
};

/// The slot of the current task. The cache is that of the calling program.
#[inline(always)]
pub(crate) fn cached_current_slot(cache: &SlotCache) -> u32 {
    if HAS_ANCESTORS.load() == 0 {
        return current_slot();
    }
    let cgroup = current_cgroup();
    // The task may be moved to another cgroup meanwhile: whose slot it is, is not sure then.
    remembered(cache, cgroup, || (current_slot(), current_cgroup() == cgroup))
}

//! Finds the slot of the current task's workload, with a cache on each CPU.

use crate::{
    current::{HAS_ANCESTORS, current_cgroup, current_slot},
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
    cached_slot(cache, cgroup, || (current_slot(), current_cgroup() == cgroup))
}

//! The slots of the cgroups that a CPU saw last, for programs that run often.
//!
//! An entry has one user at a time: the kernel runs a tracing program at most once at a time on each CPU, and tasks do
//! not migrate inside (see `alloc.rs`). So each program has a cache of its own. The guard is older than the
//! helper for ancestors (Linux 5.12 and 5.14): who has the helper may use a cache.

use aya_ebpf::maps::PerCpuArray;
use numaward_abi::CgroupId;

use crate::cache::{GENERATION, load_first, place};

const CACHE_BITS: u32 = 5;

/// What a CPU remembers of a cgroup.
#[repr(C)]
pub(crate) struct CacheEntry {
    cgroup: CgroupId,
    /// GENERATION when the search began.
    generation: u64,
    slot: u64,
}

/// What the CPUs remember for one program.
pub(crate) type SlotCache = PerCpuArray<CacheEntry>;

/// A cache that is empty.
pub(crate) const fn slot_cache() -> SlotCache {
    PerCpuArray::with_max_entries(1 << CACHE_BITS, 0)
}

/// The slot of a cgroup: as it is remembered, or as `search` finds it, which also says whether it is sure.
#[inline(always)]
pub(crate) fn remembered(cache: &SlotCache, cgroup: CgroupId, search: impl FnOnce() -> (u32, bool)) -> u32 {
    let entry = cache.get_ptr_mut(place(cgroup, CACHE_BITS));
    let (Some(entry), Some(generation)) = (entry, GENERATION.get_ptr_mut(0)) else {
        return search().0;
    };
    // SAFETY: this CPU is the only user, and the program does not interrupt itself.
    let entry = unsafe { &mut *entry };
    // SAFETY: the pointer is of the map's value, which lives as long as the program.
    if entry.cgroup != cgroup || entry.generation != unsafe { generation.read_volatile() } {
        // SAFETY: as above.
        let generation = unsafe { load_first(generation) };
        let (slot, is_sure) = search();
        entry.slot = u64::from(slot);
        entry.cgroup = cgroup;
        entry.generation = if is_sure { generation } else { 0 };
    }
    entry.slot as u32
}

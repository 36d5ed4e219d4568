//! A per-CPU cache of the slots of cgroups, for programs that run often.
//!
//! An entry has one user at a time, because the kernel runs a tracing program at most once at a time on each CPU, and
//! tasks do not migrate inside (see `alloc.rs`). Each program therefore has its own cache. Linux 5.12 has this guard,
//! Linux 5.14 the helper for ancestors: if the helper is available, a cache is safe.

use aya_ebpf::maps::PerCpuArray;

use crate::cache::{GENERATION, cache_index, load_first};

const CACHE_BITS: u32 = 5;

/// A CPU's cached answer for a cgroup.
#[repr(C)]
pub(crate) struct CacheEntry {
    /// The cgroup's id, or the serial number of its memory controller. Neither is ever reused.
    number: u64,
    /// GENERATION when the search began.
    generation: u64,
    slot: u64,
}

/// The caches of all CPUs for one program.
pub(crate) type SlotCache = PerCpuArray<CacheEntry>;

/// Returns an empty cache.
pub(crate) const fn slot_cache() -> SlotCache {
    PerCpuArray::with_max_entries(1 << CACHE_BITS, 0)
}

/// Returns the slot of the cgroup with this number from the cache, or from `search`, which also returns true if its answer may be cached.
#[inline(always)]
pub(crate) fn cached_slot(cache: &SlotCache, number: u64, search: impl FnOnce() -> (u32, bool)) -> u32 {
    let entry = cache.get_ptr_mut(cache_index(number, CACHE_BITS));
    let (Some(entry), Some(generation)) = (entry, GENERATION.get_ptr_mut(0)) else {
        return search().0;
    };
    // SAFETY: this CPU is the only user, and the program does not interrupt itself.
    let entry = unsafe { &mut *entry };
    // SAFETY: the pointer is of the map's value, which lives as long as the program.
    if entry.number != number || entry.generation != unsafe { generation.read_volatile() } {
        // SAFETY: as above.
        let generation = unsafe { load_first(generation) };
        let (slot, is_sure) = search();
        entry.slot = u64::from(slot);
        entry.number = number;
        entry.generation = if is_sure { generation } else { 0 };
    }
    entry.slot as u32
}

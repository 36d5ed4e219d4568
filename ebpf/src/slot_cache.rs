//! The slots of the cgroups that a CPU saw last, for programs that run at each switch of tasks.
//!
//! Only for programs that run with interrupts off: an entry has one user at a time then.

use aya_ebpf::{macros::map, maps::PerCpuArray};
use numaward_abi::CgroupId;

use crate::{
    ancestors,
    cache::{GENERATION, place},
    cgroup_node::CgroupNode,
};

const CACHE_BITS: u32 = 5;

/// What a CPU remembers of a cgroup.
#[repr(C)]
struct CacheEntry {
    cgroup: CgroupId,
    /// GENERATION when it was searched.
    generation: u64,
    slot: u64,
}

#[map]
static CACHE: PerCpuArray<CacheEntry> = PerCpuArray::with_max_entries(1 << CACHE_BITS, 0);

/// The slot of a cgroup, as [`ancestors::slot_of`] finds it.
#[inline(always)]
pub(crate) fn slot_of(node: CgroupNode) -> u32 {
    let cgroup = node.id();
    let entry = CACHE.get_ptr_mut(place(cgroup, CACHE_BITS));
    let (Some(entry), Some(generation)) = (entry, GENERATION.get(0)) else {
        return ancestors::slot_of(node);
    };
    // SAFETY: this CPU is the only user, and the program is not interrupted.
    let entry = unsafe { &mut *entry };
    // SAFETY: the reference is to the map's value, which userspace changes.
    let generation = unsafe { core::ptr::from_ref(generation).read_volatile() };
    if entry.cgroup != cgroup || entry.generation != generation {
        entry.slot = u64::from(ancestors::slot_of(node));
        entry.cgroup = cgroup;
        entry.generation = generation;
    }
    entry.slot as u32
}

//! The slots of the cgroups that a CPU saw last, for programs that run at each switch of tasks.
//!
//! Only for programs that run with interrupts off: an entry has one user at a time then.

use aya_ebpf::{
    macros::map,
    maps::{Array, PerCpuArray},
};

use crate::cgroup_node::CgroupNode;

const CACHE_BITS: u32 = 5;

/// What a CPU remembers of a cgroup.
#[repr(C)]
struct CacheEntry {
    cgroup: u64,
    /// GENERATION when it was searched. That starts at 1: 0 never fits.
    generation: u64,
    slot: u64,
}

/// Raised by userspace after each change of ROOTS.
#[map]
static GENERATION: Array<u64> = Array::with_max_entries(1, 0);
#[map]
static CACHE: PerCpuArray<CacheEntry> = PerCpuArray::with_max_entries(1 << CACHE_BITS, 0);

/// The slot of a cgroup, as [`CgroupNode::slot`] finds it.
#[inline(always)]
pub(crate) fn slot_of(node: CgroupNode) -> u32 {
    let cgroup = node.id();
    // As in the probe of allocations.
    let bucket = cgroup.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CACHE_BITS);
    let (Some(entry), Some(generation)) = (CACHE.get_ptr_mut(bucket as u32), GENERATION.get(0)) else {
        return node.slot();
    };
    // SAFETY: this CPU is the only user, and the program is not interrupted.
    let entry = unsafe { &mut *entry };
    // SAFETY: the reference is to the map's value, which userspace changes.
    let generation = unsafe { core::ptr::from_ref(generation).read_volatile() };
    if entry.cgroup != cgroup || entry.generation != generation {
        entry.slot = u64::from(node.slot());
        entry.cgroup = cgroup;
        entry.generation = generation;
    }
    entry.slot as u32
}

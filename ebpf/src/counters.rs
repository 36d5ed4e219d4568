//! Counters that all CPUs share.

use core::arch::asm;

use aya_ebpf::maps::Array;

/// Adds to a counter of a map. Does nothing if the map has no such index.
#[inline(always)]
pub(crate) fn add_at(map: &Array<u64>, index: u32, value: u64) {
    if let Some(counter) = map.get_ptr_mut(index) {
        // SAFETY: the pointer is of the map's value.
        unsafe { add_shared(counter, value) };
    }
}

/// Adds to a counter that other CPUs also add to, in assembly because the target has no atomic intrinsics.
///
/// # Safety
///
/// `counter` points into a map's value.
#[inline(always)]
pub(crate) unsafe fn add_shared(counter: *mut u64, value: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) value) };
}

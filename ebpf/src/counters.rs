//! Counters that all CPUs share.

use core::arch::asm;

/// Adds to a counter that other CPUs add to as well. The target has no atomic intrinsics.
///
/// # Safety
///
/// `counter` points into a map's value.
#[inline(always)]
pub(crate) unsafe fn add_shared(counter: *mut u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) value) };
}

//! Events of which the first is told, and then none for a while.
//!
//! Userspace *arms* a slot, and the first event *disarms* it. So what happens a million times a second costs a load and
//! a comparison each, and no clock. When to arm again is userspace's affair.

use core::arch::asm;

use aya_ebpf::{macros::map, maps::Array};

/// By slot: 1 where the next event is to be told. Its size is set by userspace.
#[map]
static ARMED: Array<u64> = Array::with_max_entries(1, 0);

/// Whether an event of this slot is to be told. It is then disarmed: of several at once, one is told.
#[inline(always)]
pub(crate) fn disarm(slot: u32) -> bool {
    let Some(armed) = ARMED.get_ptr_mut(slot) else { return false };
    // Looked at first, as an exchange is dear.
    // SAFETY: the pointer is of the map's value.
    if unsafe { armed.read_volatile() } == 0 {
        return false;
    }
    let mut before = 0_u64;
    // SAFETY: as above. The target has no atomic intrinsics.
    unsafe { asm!("{1} = xchg_64({0} + 0, {1})", in(reg) armed, inout(reg) before) };
    before != 0
}

/// The event could not be told: the next one may be.
#[inline(always)]
pub(crate) fn arm(slot: u32) {
    if let Some(armed) = ARMED.get_ptr_mut(slot) {
        // SAFETY: the pointer is of the map's value.
        unsafe { armed.write_volatile(1) };
    }
}

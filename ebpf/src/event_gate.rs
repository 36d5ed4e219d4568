//! Limits events to the first one of each slot until userspace asks for the next.
//!
//! Each slot has a *gate*. Userspace opens it, and the first event that passes closes it. An event that happens a
//! million times a second therefore costs a load and a comparison, and no clock. Userspace decides when to open the
//! gate again.
//!
//! The gate is closed by a plain store, because kernels before Linux 5.12 have no atomic exchange. Two CPUs may
//! therefore pass in the same instant. Userspace takes the first of these events and drops the second one.

use aya_ebpf::{
    helpers::{bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_pid_tgid},
    macros::map,
    maps::{Array, RingBuf},
};
use numaward_abi::{CgroupId, EventTask};

use crate::lost::count_lost;

/// 1 if the gate is open, by slot. Userspace sets the map's size.
#[map]
static EVENT_GATE: Array<u64> = Array::with_max_entries(1, 0);

/// Returns true if an event of this slot has to be reported, and closes the gate.
#[inline(always)]
pub(crate) fn passes(slot: u32) -> bool {
    let Some(gate) = EVENT_GATE.get_ptr_mut(slot) else { return false };
    // SAFETY: the pointer is of the map's value.
    if unsafe { gate.read_volatile() } == 0 {
        return false;
    }
    // SAFETY: as above.
    unsafe { gate.write_volatile(0) };
    true
}

/// Reports an event of the current task, which has passed the gate. If `ring` is full, the event is lost, and the gate
/// opens for the next one.
#[inline(always)]
pub(crate) fn report<T: 'static>(ring: &RingBuf, slot: u32, event: impl FnOnce(EventTask) -> T) {
    let Some(mut entry) = ring.reserve::<T>(0) else {
        if let Some(gate) = EVENT_GATE.get_ptr_mut(slot) {
            // SAFETY: the pointer is of the map's value.
            unsafe { gate.write_volatile(1) };
        }
        return count_lost();
    };
    let cgroup = current_cgroup_by_helper();
    let pid = (bpf_get_current_pid_tgid() >> 32) as u32;
    let comm = bpf_get_current_comm().unwrap_or_default();
    entry.write(event(EventTask { cgroup, slot, pid, comm }));
    entry.submit(0);
}

/// Returns the id of the current task's cgroup.
#[inline(always)]
pub(crate) fn current_cgroup_by_helper() -> CgroupId {
    // SAFETY: the helper takes nothing and always succeeds.
    CgroupId(unsafe { bpf_get_current_cgroup_id() })
}

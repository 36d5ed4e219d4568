//! Events of which the first one of a slot is reported, and then none for a while.
//!
//! Each slot has a *gate*. Userspace opens it, and the first event that passes closes it. So what happens a million times
//! a second costs a load and a comparison each, and no clock. When to open the gate again is up to userspace.
//!
//! The gate is closed by a plain store: kernels before Linux 5.12 know no atomic exchange. So two CPUs may pass in the
//! same instant. Userspace takes the first of these events, and drops the other.

use aya_ebpf::{
    helpers::{bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_pid_tgid},
    macros::map,
    maps::{Array, RingBuf},
};
use numaward_abi::{CgroupId, EventTask};

use crate::lost::count_lost;

/// By slot: 1 where the gate is open. Its size is set by userspace.
#[map]
static EVENT_GATE: Array<u64> = Array::with_max_entries(1, 0);

/// Whether an event of this slot is to be reported. The gate is then closed.
#[inline(always)]
pub(crate) fn pass(slot: u32) -> bool {
    let Some(gate) = EVENT_GATE.get_ptr_mut(slot) else { return false };
    // SAFETY: the pointer is of the map's value.
    if unsafe { gate.read_volatile() } == 0 {
        return false;
    }
    // SAFETY: as above.
    unsafe { gate.write_volatile(0) };
    true
}

/// Reports an event of the current task that has passed the gate. Where `ring` has no room, it is lost, and the gate opens
/// for the next one.
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

/// The id of the current task's cgroup.
#[inline(always)]
pub(crate) fn current_cgroup_by_helper() -> CgroupId {
    // SAFETY: the helper takes nothing and always succeeds.
    CgroupId(unsafe { bpf_get_current_cgroup_id() })
}

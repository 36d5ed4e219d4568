//! Who runs on CPUs that are exclusive to a workload, and for how long.
//!
//! **Hook.** `sched:sched_switch(bool preempt, prev, next, …)` as `tp_btf`. It is attached only while a CPU is
//! exclusive. On CPUs without an owner it ends after one lookup.
//!
//! **Accounting.** At each switch, the time since the last one is booked to the class of the task that ran, which
//! was found when that task was switched in. So userspace can add the time of the task that runs now, which may
//! not be switched out for long. A task of the owner's slot is the owner's own; another is an *intruder*: a kernel
//! thread, a process of another workload, or of the host (of no registered workload).
//!
//! **No races.** The scheduler switches with interrupts off, so that TIMES and CACHE, per CPU, have one writer.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod common;
mod counters;
mod roots;

use aya_ebpf::{
    Global,
    helpers::{bpf_get_current_comm, bpf_get_smp_processor_id, bpf_ktime_get_ns},
    macros::{btf_tracepoint, map},
    maps::{Array, HashMap, PerCpuArray},
    programs::BtfTracePointContext,
};
use numaward_abi::{CpuTimes, IntruderKey, IntruderTime, OTHER_SLOT, RunClass};

use crate::{counters::add_shared, roots::CgroupNode};

/// `PF_KTHREAD` of linux/sched.h.
const KERNEL_THREAD: u32 = 0x0020_0000;
const CACHE_BITS: u32 = 5;

/// What a CPU remembers of a cgroup.
#[repr(C)]
struct CacheEntry {
    cgroup: u64,
    /// GENERATION when it was searched. That starts at 1: 0 never fits.
    generation: u64,
    slot: u64,
}

/// Offsets of `task_struct.flags` and `task_struct.pid`.
#[unsafe(no_mangle)]
static TASK: Global<[u32; 2]> = Global::new([0; 2]);

/// The slot of the workload to which each CPU is exclusive; 0 for none.
#[map]
static OWNER: Array<u32> = Array::with_max_entries(1, 0);
/// Raised by userspace after each change of ROOTS.
#[map]
static GENERATION: Array<u64> = Array::with_max_entries(1, 0);
#[map]
static CACHE: PerCpuArray<CacheEntry> = PerCpuArray::with_max_entries(1 << CACHE_BITS, 0);
#[map]
static TIMES: PerCpuArray<CpuTimes> = PerCpuArray::with_max_entries(1, 0);
/// The intruders by name.
#[map]
static INTRUDERS: HashMap<IntruderKey, IntruderTime> = HashMap::with_max_entries(4096, 0);
/// Runs of intruders that found no place in INTRUDERS.
#[map]
static LOST: Array<u64> = Array::with_max_entries(1, 0);

#[btf_tracepoint(function = "sched_switch")]
fn switch_tp_btf(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: the helper takes nothing and always succeeds.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let owner = OWNER.get(cpu).copied().unwrap_or(OTHER_SLOT);
    let Some(times) = TIMES.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
    let times = unsafe { &mut *times };
    if owner == OTHER_SLOT {
        times.since = 0;
        return 0;
    }
    // SAFETY: the helper takes nothing and always succeeds.
    let now = unsafe { bpf_ktime_get_ns() };
    if times.since != 0 && times.owner == owner {
        charge(times, now.saturating_sub(times.since));
    }
    let next: *const u8 = ctx.arg(2);
    if next.is_null() {
        times.since = 0;
        return 0;
    }
    let [flags, pid] = TASK.load();
    // SAFETY: `next` is a `struct task_struct`, not null, and the offset is of its member.
    let flags = unsafe { *next.add(flags as usize).cast::<u32>() };
    // SAFETY: as above.
    let pid = unsafe { *next.add(pid as usize).cast::<u32>() };
    times.since = now;
    times.owner = owner;
    times.slot = OTHER_SLOT;
    times.class = RunClass::Idle as u32;
    if pid != 0 {
        // SAFETY: as above.
        times.slot = slot_of(unsafe { CgroupNode::of_task(next) });
        times.class = if times.slot == owner {
            RunClass::Own
        } else if flags & KERNEL_THREAD != 0 {
            RunClass::KernelThread
        } else if times.slot == OTHER_SLOT {
            RunClass::Host
        } else {
            RunClass::Workload
        } as u32;
    }
    0
}

/// Books time to the class of the task that ran, which is the current one.
#[inline(always)]
fn charge(times: &mut CpuTimes, nanoseconds: u64) {
    let class = times.class;
    if class == RunClass::Idle as u32 {
        return;
    }
    if let Some(counter) = times.nanoseconds.get_mut(class as usize) {
        *counter += nanoseconds;
    }
    if class == RunClass::Own as u32 {
        return;
    }
    let comm = bpf_get_current_comm().unwrap_or_default();
    let key = IntruderKey { owner: times.owner, slot: times.slot, class, padding: 0, comm };
    if let Some(time) = INTRUDERS.get_ptr_mut(key) {
        // SAFETY: the pointer is of the map's value.
        unsafe {
            add_shared(&raw mut (*time).nanoseconds, nanoseconds);
            add_shared(&raw mut (*time).runs, 1);
        }
    } else if INTRUDERS.insert(key, IntruderTime { nanoseconds, runs: 1 }, 0).is_err()
        && let Some(lost) = LOST.get_ptr_mut(0)
    {
        // SAFETY: the pointer is of the map's value.
        unsafe { add_shared(lost, 1) };
    }
}

#[inline(always)]
fn slot_of(node: CgroupNode) -> u32 {
    let cgroup = node.id();
    let bucket = cgroup.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CACHE_BITS);
    let (Some(entry), Some(generation)) = (CACHE.get_ptr_mut(bucket as u32), GENERATION.get(0)) else {
        return node.slot();
    };
    // SAFETY: this CPU is the only user, and the program does not interrupt itself.
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

//! Measures how long tasks run on CPUs that are exclusive to a workload.
//!
//! # Hook
//! `sched:sched_switch(bool preempt, prev, next, …)` as `tp_btf`. It is attached only while a CPU is exclusive. On CPUs
//! without an owner it ends after one lookup.
//!
//! # Terms
//! A task of the owner's slot is the owner's own. Any other task is an *intruder*: a kernel thread, a process of
//! another workload, or a process of the host (of no registered workload).
//!
//! # Algorithm
//! At each switch, the time since the last one is booked to the class of the task that ran. The class was determined
//! when that task was switched in, so userspace can add the time of the current task, which may not be switched out for
//! long.
//!
//! # Without BTF
//! The fallback is the classic tracepoint. It does not give access to the next task. A task's time is therefore booked
//! when it is switched out, by its slot at that time, and kernel threads count as processes of the host.
//!
//! # Concurrency
//! The scheduler switches with interrupts off, so TIMES, which is per CPU, has one writer.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod ancestors;
mod cache;
mod cgroup_node;
mod cgroup_path;
mod common;
mod counters;
mod current;
mod current_cached;
mod lost;
mod reading;
mod roots;
mod slot_cache;

use aya_ebpf::{
    Global,
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_get_smp_processor_id, bpf_ktime_get_ns},
    macros::{btf_tracepoint, map, tracepoint},
    maps::{Array, LruHashMap, PerCpuArray},
    programs::{BtfTracePointContext, TracePointContext},
};
use numaward_abi::{CpuTimes, IntruderKey, IntruderTime, OTHER_SLOT, RunClass};

use crate::{
    ancestors::slot_of,
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    counters::add_shared,
    current_cached::cached_current_slot,
    lost::count_lost,
    slot_cache::{SlotCache, cached_slot, slot_cache},
};

/// The flag of kernel threads: `PF_KTHREAD` of linux/sched.h.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Offsets of `task_struct.flags` and `task_struct.pid`.
#[unsafe(no_mangle)]
static TASK: Global<[u32; 2]> = Global::new([0; 2]);

/// The slot of the workload to which each CPU is exclusive; 0 for none.
#[map]
static OWNER: Array<u32> = Array::with_max_entries(1, 0);
#[map]
static CACHE: SlotCache = slot_cache();
#[map]
static TIMES: PerCpuArray<CpuTimes> = PerCpuArray::with_max_entries(1, 0);
/// The intruders by name. Programs choose their names freely: if the map is full, the entries that ran least recently
/// are dropped.
#[map]
static INTRUDERS: LruHashMap<IntruderKey, IntruderTime> = LruHashMap::with_max_entries(4096, 0);

#[btf_tracepoint(function = "sched_switch")]
fn switch_tp_btf(ctx: BtfTracePointContext) -> i32 {
    let Some((times, owner, now)) = begin() else { return 0 };
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
        let node = unsafe { CgroupNode::of_task(CGROUP_PATH.load(), next) };
        times.slot = cached_slot(&CACHE, node.id().0, || (slot_of(node), true));
        times.class = run_class(times.slot, owner, flags & KERNEL_THREAD != 0);
    }
    0
}

#[tracepoint]
fn switch_tracepoint(_ctx: TracePointContext) -> u32 {
    let Some((times, owner, now)) = begin() else { return 0 };
    // The task that is switched out is still the current one; 0 is the idle task.
    if times.since != 0 && times.owner == owner && bpf_get_current_pid_tgid() as u32 != 0 {
        times.slot = cached_current_slot(&CACHE);
        times.class = run_class(times.slot, owner, false);
        charge(times, now.saturating_sub(times.since));
    }
    times.since = now;
    times.owner = owner;
    // The next task is unknown, so userspace must not add its time to any class.
    times.class = RunClass::Idle as u32;
    0
}

/// Returns this CPU's times, its owner and the current time; `None` if the CPU has no owner.
#[inline(always)]
fn begin() -> Option<(&'static mut CpuTimes, u32, u64)> {
    // SAFETY: the helper takes nothing and always succeeds.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let owner = OWNER.get(cpu).copied().unwrap_or(OTHER_SLOT);
    // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
    let times = unsafe { &mut *TIMES.get_ptr_mut(0)? };
    if owner == OTHER_SLOT {
        times.since = 0;
        return None;
    }
    // SAFETY: the helper takes nothing and always succeeds.
    Some((times, owner, unsafe { bpf_ktime_get_ns() }))
}

#[inline(always)]
fn run_class(slot: u32, owner: u32, is_kernel_thread: bool) -> u32 {
    let class = if slot == owner {
        RunClass::Own
    } else if is_kernel_thread {
        RunClass::KernelThread
    } else if slot == OTHER_SLOT {
        RunClass::Host
    } else {
        RunClass::Workload
    };
    class as u32
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
    } else if INTRUDERS.insert(key, IntruderTime { nanoseconds, runs: 1 }, 0).is_err() {
        count_lost();
    }
}

//! Measures the effects of memory shortage: the time that tasks lose in reclaim, and kills by the OOM killer.
//!
//! # Stalls
//! A task that finds no free memory reclaims some itself: for the machine (`direct_reclaim`) or within its cgroup's
//! limit (`memcg_reclaim`). The tracepoints at the start and the end of each enclose the lost time. Only the current
//! task matters, not the arguments, which changed over time. Throttling by `memory.high` is not included;
//! `memory.pressure` shows it. A stall of [`LONG_STALL`] nanoseconds or more is also reported as an event, the first
//! one of each slot with an open gate.
//!
//! # Kills
//! `oom_kill_process(struct oom_control *oc, const char *message)` (mm/oom_kill.c) has the victim and the constraint of
//! the failed allocation: a cpuset, a memory policy, a cgroup's limit, or none. It runs in the task that allocates; the
//! kill is booked to the victim's workload.

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
mod event_gate;
mod lost;
mod reading;
mod roots;
mod slot_cache;

use core::arch::asm;

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_ns},
    macros::{btf_tracepoint, fentry, map, tracepoint},
    maps::{Array, RingBuf},
    programs::{BtfTracePointContext, FEntryContext, TracePointContext},
};
use numaward_abi::{EventTask, LongStall, OOM_CONSTRAINTS, OomKill, STALL_BUCKETS, StallCounters};

use crate::{
    ancestors::slot_of,
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    counters::{add_at, add_shared},
    current_cached::cached_current_slot,
    lost::count_lost,
    slot_cache::{SlotCache, slot_cache},
};

/// The duration in nanoseconds from which a stall is reported. Userspace sets it.
#[unsafe(no_mangle)]
static LONG_STALL: Global<u64> = Global::new(u64::MAX);

/// Offsets of `oom_control.constraint`, `oom_control.chosen`, `task_struct.tgid` and `task_struct.comm`.
#[unsafe(no_mangle)]
static OOM_LAYOUT: Global<[u32; 4]> = Global::new([0; 4]);

/// The number of threads with consecutive ids that can be measured at the same time, as a power of two.
const STALLED_BITS: u32 = 14;
/// The number of bits of a time in [`STALLED_SINCE`]: 417 days, longer than any stall.
const TIME_BITS: u32 = 55;

/// The start of a thread's reclaim, by the lower bits of its id. The bits above the time hold the upper bits of the id
/// plus one (ids have at most 22 bits, `PID_MAX_LIMIT`). 0 if no thread reclaims. Both are in one word, so that two
/// threads with the same index are never mixed up.
#[map]
static STALLED_SINCE: Array<u64> = Array::with_max_entries(1 << STALLED_BITS, 0);
#[map]
static DIRECT_CACHE: SlotCache = slot_cache();
#[map]
static MEMCG_CACHE: SlotCache = slot_cache();
/// Counters by slot.
#[map]
static STALLS: Array<StallCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Kills by slot * OOM_CONSTRAINTS + constraint.
#[map]
static OOM_KILLS: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Events for userspace: values of [`OomKill`].
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);
/// Events for userspace: values of [`LongStall`].
#[map]
static LONG_STALLS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_begin")]
fn stall_direct_begin(_ctx: BtfTracePointContext) -> i32 {
    begin_stall();
    0
}

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_end")]
fn stall_direct_end(_ctx: BtfTracePointContext) -> i32 {
    end_stall(&DIRECT_CACHE);
    0
}

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_begin")]
fn stall_memcg_begin(_ctx: BtfTracePointContext) -> i32 {
    begin_stall();
    0
}

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_end")]
fn stall_memcg_end(_ctx: BtfTracePointContext) -> i32 {
    end_stall(&MEMCG_CACHE);
    0
}

#[tracepoint]
fn stall_tracepoint_begin(_ctx: TracePointContext) -> u32 {
    begin_stall();
    0
}

#[tracepoint]
fn stall_tracepoint_end(_ctx: TracePointContext) -> u32 {
    end_stall(&DIRECT_CACHE);
    0
}

const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// Returns the current thread's index in [`STALLED_SINCE`], and the upper bits of its id at their position in the word.
#[inline(always)]
fn stall_index() -> (u32, u64) {
    let thread = bpf_get_current_pid_tgid() as u32;
    let above = u64::from(thread >> STALLED_BITS) + 1;
    (thread & ((1 << STALLED_BITS) - 1), above << TIME_BITS)
}

#[inline(always)]
fn begin_stall() {
    let (index, owner) = stall_index();
    // SAFETY: the helper takes nothing and always succeeds.
    let now = unsafe { bpf_ktime_get_ns() } & TIME_MASK;
    let Some(since) = STALLED_SINCE.get_ptr_mut(index) else { return };
    // SAFETY: the pointer is of the map's value; other threads may have the same index.
    unsafe {
        // The stall of another thread with this index can no longer be measured.
        if since.read_volatile() != 0 {
            count_lost();
        }
        since.write_volatile(owner | now);
    }
}

#[inline(always)]
fn end_stall(cache: &SlotCache) {
    let (index, owner) = stall_index();
    let Some(entry) = STALLED_SINCE.get_ptr_mut(index) else { return };
    // SAFETY: as in `begin`.
    let since = unsafe { entry.read_volatile() };
    if since & !TIME_MASK != owner {
        return;
    }
    // SAFETY: as above.
    unsafe { entry.write_volatile(0) };
    // SAFETY: the helper takes nothing and always succeeds.
    let nanoseconds = unsafe { bpf_ktime_get_ns() }.wrapping_sub(since) & TIME_MASK;
    let mut bucket = u64::from(64 - (nanoseconds / 1000).leading_zeros());
    // Adds 0, so that the compiler forgets the value's range and keeps the bound below, which the verifier needs. An
    // instruction is necessary: the kernel refuses two line entries for one instruction. SAFETY: the value stays as it
    // is.
    unsafe { asm!("{0} += 0", inout(reg) bucket) };
    if bucket >= STALL_BUCKETS as u64 {
        bucket = STALL_BUCKETS as u64 - 1;
    }
    let slot = cached_current_slot(cache);
    if let Some(counters) = STALLS.get_ptr_mut(slot) {
        // SAFETY: the pointer is of the map's value, and the bucket is inside.
        unsafe {
            add_shared((&raw mut (*counters).buckets).cast::<u64>().add(bucket as usize), 1);
            add_shared(&raw mut (*counters).nanoseconds, nanoseconds);
        }
    }
    if nanoseconds >= LONG_STALL.load() && event_gate::passes(slot) {
        event_gate::report(&LONG_STALLS, slot, |task| LongStall { task, nanoseconds });
    }
}

#[fentry(function = "oom_kill_process")]
fn oom_fentry(ctx: FEntryContext) -> i32 {
    let oc: *const u8 = ctx.arg(0);
    if oc.is_null() {
        return 0;
    }
    let [constraint, chosen, tgid, comm] = OOM_LAYOUT.load();
    // SAFETY: `oc` is a `struct oom_control`, not null, and the offset is of its member.
    let constraint = unsafe { *oc.add(constraint as usize).cast::<u32>() };
    // SAFETY: as above.
    let victim = unsafe { *oc.add(chosen as usize).cast::<*const u8>() };
    if victim.is_null() {
        return 0;
    }
    // SAFETY: the victim is a `struct task_struct`, not null, on which the OOM killer holds a reference.
    let node = unsafe { CgroupNode::of_task(CGROUP_PATH.load(), victim) };
    let slot = slot_of(node);
    if (constraint as usize) < OOM_CONSTRAINTS {
        add_at(&OOM_KILLS, slot * OOM_CONSTRAINTS as u32 + constraint, 1);
    }
    let mut name = [0; 16];
    for (index, byte) in name.iter_mut().enumerate() {
        // Byte by byte: the verifier refuses loads that cross the elements of an array. SAFETY: `comm` has 16 bytes.
        *byte = unsafe { *victim.add(comm as usize + index) };
    }
    // SAFETY: the offset is of a member of the task.
    let pid = unsafe { *victim.add(tgid as usize).cast::<u32>() };
    let task = EventTask { cgroup: node.id(), slot, pid, comm: name };
    let event = OomKill { task, constraint, padding: 0 };
    if EVENTS.output::<OomKill>(event, 0).is_err() {
        count_lost();
    }
    0
}

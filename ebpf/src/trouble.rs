//! What goes wrong where memory is short: the time tasks lose in reclaim, and processes that the OOM killer takes.
//!
//! **Stalls.** A task that finds no free memory reclaims some itself: for the machine (`direct_reclaim`) or
//! within its cgroup's limit (`memcg_reclaim`). The tracepoints at the start and the end of each bracket the time it
//! loses; only the current task matters, not their arguments, which changed over time. Being slept off by
//! `memory.high` is not in it: that is in `memory.pressure`. A stall of [`LONG_STALL`] nanoseconds is also reported as
//! an event, the first of a slot whose gate is open.
//!
//! **Kills.** `oom_kill_process(struct oom_control *oc, const char *message)` (mm/oom_kill.c) knows the victim and what
//! constrained the allocation that found nothing: a cpuset, a memory policy, a cgroup's limit, or nothing but the
//! machine. It runs in the task that allocates; what is booked is the victim's workload.

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

/// From how many nanoseconds on a stall is reported. Userspace sets it.
#[unsafe(no_mangle)]
static LONG_STALL: Global<u64> = Global::new(u64::MAX);

/// Offsets of `oom_control.constraint`, `oom_control.chosen`, `task_struct.tgid` and `task_struct.comm`.
#[unsafe(no_mangle)]
static OOM_LAYOUT: Global<[u32; 4]> = Global::new([0; 4]);

/// Threads that can reclaim at the same time, as a power of two, if their ids follow each other.
const STALLED_BITS: u32 = 14;
/// The bits of a time in [`STALLED_SINCE`]: 417 days, which no stall takes.
const TIME_BITS: u32 = 55;

/// Since when a thread reclaims, by the lower bits of its id. Above the time are the other bits of the id, plus
/// one: ids have 22 bits at most (`PID_MAX_LIMIT`). 0 where nobody reclaims. One word, so that two threads
/// with the same place never mix.
#[map]
static STALLED_SINCE: Array<u64> = Array::with_max_entries(1 << STALLED_BITS, 0);
#[map]
static DIRECT_CACHE: SlotCache = slot_cache();
#[map]
static MEMCG_CACHE: SlotCache = slot_cache();
/// By slot.
#[map]
static STALLS: Array<StallCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// By slot * OOM_CONSTRAINTS + constraint.
#[map]
static OOM_KILLS: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// What is reported to userspace at once: values of [`OomKill`].
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);
/// The same of stalls: values of [`LongStall`].
#[map]
static LONG_STALLS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_begin")]
fn stall_direct_begin(_ctx: BtfTracePointContext) -> i32 {
    begin();
    0
}

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_end")]
fn stall_direct_end(_ctx: BtfTracePointContext) -> i32 {
    end(&DIRECT_CACHE);
    0
}

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_begin")]
fn stall_memcg_begin(_ctx: BtfTracePointContext) -> i32 {
    begin();
    0
}

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_end")]
fn stall_memcg_end(_ctx: BtfTracePointContext) -> i32 {
    end(&MEMCG_CACHE);
    0
}

#[tracepoint]
fn stall_tracepoint_begin(_ctx: TracePointContext) -> u32 {
    begin();
    0
}

#[tracepoint]
fn stall_tracepoint_end(_ctx: TracePointContext) -> u32 {
    end(&DIRECT_CACHE);
    0
}

const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// The place of the current thread in [`STALLED_SINCE`], and what of its id is above the time there.
#[inline(always)]
fn place() -> (u32, u64) {
    let thread = bpf_get_current_pid_tgid() as u32;
    let above = u64::from(thread >> STALLED_BITS) + 1;
    (thread & ((1 << STALLED_BITS) - 1), above << TIME_BITS)
}

#[inline(always)]
fn begin() {
    let (place, owner) = place();
    // SAFETY: the helper takes nothing and always succeeds.
    let now = unsafe { bpf_ktime_get_ns() } & TIME_MASK;
    let Some(since) = STALLED_SINCE.get_ptr_mut(place) else { return };
    // SAFETY: the pointer is of the map's value; other threads may have the same place.
    unsafe {
        // What another one had begun cannot be measured any more.
        if since.read_volatile() != 0 {
            count_lost();
        }
        since.write_volatile(owner | now);
    }
}

#[inline(always)]
fn end(cache: &SlotCache) {
    let (place, owner) = place();
    let Some(entry) = STALLED_SINCE.get_ptr_mut(place) else { return };
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
    // Nothing is added: so that the compiler forgets what it knows of the value and the bound below is to be seen by
    // the verifier, which does not know it. An instruction has to be there: the kernel takes no two lines for one.
    // SAFETY: the value stays as it is.
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
    if nanoseconds >= LONG_STALL.load() && event_gate::pass(slot) {
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
        // Byte by byte: the verifier lets no load cross the elements of an array.
        // SAFETY: `comm` has 16 bytes.
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

//! Counts accesses to local and remote DRAM with the processor's counters, by workload.
//!
//! # Counters
//! Userspace opens two perf events on each CPU (LOCAL, REMOTE), which count all that runs there. The processor
//! determines which events. If they were opened for each cgroup instead, events * CPUs * cgroups descriptors would be
//! needed, and the few counters of a CPU would be multiplexed.
//!
//! # Hook
//! `sched:sched_switch` as `tp_btf`: the counts since the last switch on this CPU are booked to the workload of the
//! task that is switched out. The counts of a task are therefore known once it is switched out, even if only for a
//! moment. Reading the counters is most of the cost, so up to `MAX_SKIPPED` switches between tasks of one workload do
//! without.
//!
//! # Concurrency
//! The scheduler switches with interrupts off, so LAST, which is per CPU, has one writer.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod ancestors;
mod cache;
mod cgroup_node;
mod cgroup_path;
mod common;
mod counters;
mod lost;
mod nodes;
mod roots;
mod slot_cache;

use core::ptr;

use aya_ebpf::{
    Global,
    bindings::{BPF_F_CURRENT_CPU, BPF_F_MMAPABLE},
    helpers::bpf_perf_event_read,
    macros::{btf_tracepoint, map},
    maps::{Array, PerCpuArray, PerfEventArray},
    programs::BtfTracePointContext,
};
use numaward_abi::{DramCounters, DramReading};

use crate::{
    ancestors::slot_of,
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    counters::add_shared,
    lost::count_lost,
    nodes::{NODE_TABLE, NODES, memory_node},
    slot_cache::{SlotCache, cached_slot, slot_cache},
};

/// The maximum number of consecutive switches between tasks of one workload without a reading.
const MAX_SKIPPED: u32 = 16;

/// 1 if the processor has an event for local memory.
#[unsafe(no_mangle)]
static HAS_LOCAL: Global<u32> = Global::new(1);

/// The events that count accesses to local memory, by CPU.
#[map]
static LOCAL: PerfEventArray<u64> = PerfEventArray::new(0);
/// The events that count accesses to remote memory, by CPU.
#[map]
static REMOTE: PerfEventArray<u64> = PerfEventArray::new(0);
#[map]
static CACHE: SlotCache = slot_cache();
#[map]
static LAST: PerCpuArray<DramReading> = PerCpuArray::with_max_entries(1, 0);
/// Counters by slot * NODES + the CPU's memory node.
#[map]
static DRAM: Array<DramCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

#[btf_tracepoint(function = "sched_switch")]
fn hardware_tp_btf(ctx: BtfTracePointContext) -> i32 {
    let Some(last) = LAST.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
    let last = unsafe { &mut *last };
    let (previous, next): (*const u8, *const u8) = (ctx.arg(1), ctx.arg(2));
    if previous.is_null() || next.is_null() {
        return 0;
    }
    let path = CGROUP_PATH.load();
    // SAFETY: both are a `struct task_struct`, not null; userspace sets the offsets.
    let [previous, next] = unsafe { [CgroupNode::of_task(path, previous), CgroupNode::of_task(path, next)] };
    let slot = slot_of_cgroup(previous);
    if last.is_known != 0 && last.skipped < MAX_SKIPPED && slot == slot_of_cgroup(next) {
        last.skipped += 1;
        return 0;
    }
    last.skipped = 0;
    let local = if HAS_LOCAL.load() != 0 { read_event(&LOCAL) } else { Some(0) };
    let (Some(local), Some(remote)) = (local, read_event(&REMOTE)) else {
        count_lost();
        last.is_known = 0;
        return 0;
    };
    let counted =
        DramCounters { local: local.wrapping_sub(last.local), remote: remote.wrapping_sub(last.remote) };
    let was_known = last.is_known != 0;
    last.local = local;
    last.remote = remote;
    last.is_known = 1;
    if !was_known || counted.local | counted.remote == 0 {
        return 0;
    }
    let Some(nodes) = NODE_TABLE.get(0) else { return 0 };
    let (memory_node, count) = (u32::from(memory_node(nodes)), NODES.load());
    if memory_node >= count {
        return 0;
    }
    if let Some(counters) = DRAM.get_ptr_mut(slot * count + memory_node) {
        // SAFETY: the pointer is of the map's value.
        unsafe {
            add_shared(&raw mut (*counters).local, counted.local);
            add_shared(&raw mut (*counters).remote, counted.remote);
        }
    }
    0
}

#[inline(always)]
fn slot_of_cgroup(node: CgroupNode) -> u32 {
    cached_slot(&CACHE, node.id().0, || (slot_of(node), true))
}

/// Returns the count of this CPU's event; `None` if there is no event.
#[inline(always)]
fn read_event(events: &'static PerfEventArray<u64>) -> Option<u64> {
    let map = ptr::from_ref(events).cast_mut().cast();
    // SAFETY: the pointer is to the map, as the helper demands.
    let value = unsafe { bpf_perf_event_read(map, BPF_F_CURRENT_CPU) };
    // The last 4095 numbers are errors.
    (value < u64::MAX - 4095).then_some(value)
}

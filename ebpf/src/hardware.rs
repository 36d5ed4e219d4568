//! Counts accesses to local and remote DRAM by the CPU's own counters, split by workload.
//!
//! **Counters.** Userspace opens two perf events on each CPU (LOCAL, REMOTE); which ones depends on the processor. They
//! count all that runs there. Opening them for each cgroup would take events times CPUs times cgroups descriptors, and
//! the few counters of a CPU would be multiplexed.
//!
//! **Hook.** `sched:sched_switch` as `tp_btf`: what was counted since the last switch on this CPU is booked to the
//! workload of the task that is switched out. So the counts of a task come in when
//! it is switched out, be it by a kernel thread for a moment. To read the counters is most of the cost: between
//! tasks of one workload they are not, for some switches.
//!
//! **No races.** The scheduler switches with interrupts off, so that LAST, per CPU, has one writer.

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
    nodes::{NODE_TABLE, NODES, home},
    slot_cache::{SlotCache, remembered, slot_cache},
};

/// So many switches between tasks of one workload go without a reading.
const MOST_SKIPPED: u32 = 16;

/// Whether there is a counter for local memory.
#[unsafe(no_mangle)]
static HAS_LOCAL: Global<u32> = Global::new(1);

/// The events of each CPU that count accesses to local memory.
#[map]
static LOCAL: PerfEventArray<u64> = PerfEventArray::new(0);
/// The same for remote memory.
#[map]
static REMOTE: PerfEventArray<u64> = PerfEventArray::new(0);
#[map]
static CACHE: SlotCache = slot_cache();
#[map]
static LAST: PerCpuArray<DramReading> = PerCpuArray::with_max_entries(1, 0);
/// By slot * NODES + the home node of the CPU.
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
    if last.is_known != 0 && last.skipped < MOST_SKIPPED && slot == slot_of_cgroup(next) {
        last.skipped += 1;
        return 0;
    }
    last.skipped = 0;
    let local = if HAS_LOCAL.load() != 0 { read(&LOCAL) } else { Some(0) };
    let (Some(local), Some(remote)) = (local, read(&REMOTE)) else {
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
    let (home, count) = (u32::from(home(nodes)), NODES.load());
    if home >= count {
        return 0;
    }
    if let Some(counters) = DRAM.get_ptr_mut(slot * count + home) {
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
    remembered(&CACHE, node.id(), || (slot_of(node), true))
}

/// What this CPU's event has counted; `None` where it has none.
#[inline(always)]
fn read(events: &'static PerfEventArray<u64>) -> Option<u64> {
    let map = ptr::from_ref(events).cast_mut().cast();
    // SAFETY: the pointer is to the map, as the helper demands.
    let value = unsafe { bpf_perf_event_read(map, BPF_F_CURRENT_CPU) };
    // Errors are the last 4095 numbers.
    (value < u64::MAX - 4095).then_some(value)
}

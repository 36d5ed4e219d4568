//! Counts what automatic NUMA balancing sees: sampled accesses from the CPUs of one node to the memory of another,
//! which mappings it samples at all, and pages that move between nodes.
//!
//! **Accesses.** `task_numa_fault(int last_cpupid, int mem_node, int pages, int flags)` (kernel/sched/fair.c) is
//! called for each hinting fault: see `hint.rs`. Where a page that was moved at once came from is not known (column
//! "unknown").
//!
//! **Which mappings.** `vma_policy_mof(vma)` (mm/mempolicy.c) decides for each mapping whether it may be sampled. A
//! policy without `MPOL_F_MOF`, such as plain `MPOL_BIND`, excludes it: no fault ever reports its accesses.
//!
//! **Migrations.** `migrate:mm_migrate_pages`; `succeeded` is its first argument, `reason` its last (their number
//! grew over time). They are booked to the task that moves the pages: the one that accessed them, for those of
//! NUMA balancing.
//!
//! All of these are rare compared with page allocations, so counters are shared by all CPUs, with atomic additions.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod cache;
mod cgroup_node;
mod cgroup_path;
mod common;
mod counters;
mod current;
mod current_cached;
mod hint;
mod nodes;
mod roots;
mod slot_cache;

use core::arch::asm;

use aya_ebpf::{
    EbpfContext, Global,
    bindings::BPF_F_MMAPABLE,
    macros::{btf_tracepoint, fentry, fexit, kprobe, map, tracepoint},
    maps::Array,
    programs::{BtfTracePointContext, FEntryContext, FExitContext, ProbeContext, TracePointContext},
};
use numaward_abi::{MIGRATE_REASONS, ScanCounters};

use crate::{
    counters::{add_at, add_shared},
    current_cached::cached_current_slot,
    hint::{Access, access},
    nodes::{NODE_TABLE, NODES},
    slot_cache::{SlotCache, slot_cache},
};

/// Counters per row: one for each node and one for "unknown"; or 2, for local and remote, where that would be
/// too many.
#[unsafe(no_mangle)]
static COLUMNS: Global<u32> = Global::new(2);
/// Which argument of `mm_migrate_pages` is the reason.
#[unsafe(no_mangle)]
static REASON_ARGUMENT: Global<u32> = Global::new(7);
/// Where it is in the record of the classic tracepoint.
#[unsafe(no_mangle)]
static REASON_OFFSET: Global<u32> = Global::new(60);
/// Offsets of `vm_area_struct.vm_start` and `vm_end`.
#[unsafe(no_mangle)]
static VMA_RANGE: Global<[u32; 2]> = Global::new([0; 2]);
/// The size of a page as a power of two.
#[unsafe(no_mangle)]
static PAGE_SHIFT: Global<u32> = Global::new(12);

/// Pages, by (slot * NODES + the home node of the CPU) * COLUMNS + column.
#[map]
static ACCESS: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// By slot.
#[map]
static SCAN: Array<ScanCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Pages, by slot * MIGRATE_REASONS + reason.
#[map]
static MIGRATED_PAGES: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
#[map]
static HINT_CACHE: SlotCache = slot_cache();
#[map]
static SCAN_CACHE: SlotCache = slot_cache();
#[map]
static MIGRATE_CACHE: SlotCache = slot_cache();

#[fentry(function = "task_numa_fault")]
fn hint_fentry(ctx: FEntryContext) -> i32 {
    hint(ctx.arg(1), ctx.arg(2), ctx.arg(3));
    0
}

#[kprobe(function = "task_numa_fault")]
fn hint_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(mem_node), Some(pages), Some(flags)) = (ctx.arg(1), ctx.arg(2), ctx.arg(3)) {
        hint(mem_node, pages, flags);
    }
    0
}

#[inline(always)]
fn hint(mem_node: i32, pages: i32, flags: i32) {
    let Ok(pages) = u64::try_from(pages) else { return };
    let Some(nodes) = NODE_TABLE.get(0) else { return };
    let Access { home, local, memory } = access(nodes, mem_node, flags);
    let (count, columns) = (NODES.load(), COLUMNS.load());
    if home >= count {
        return;
    }
    let column = if columns == 2 {
        u32::from(!local)
    } else if local {
        home
    } else if memory >= count {
        count
    } else {
        memory
    };
    add_at(&ACCESS, (cached_current_slot(&HINT_CACHE) * count + home) * columns + column, pages);
}

#[fexit(function = "vma_policy_mof")]
fn scan_fexit(ctx: FExitContext) -> i32 {
    let vma: *const u8 = ctx.arg(0);
    if vma.is_null() {
        return 0;
    }
    // The function has one argument, which userspace has checked; what it returns comes after.
    let returned: u64 = ctx.arg(1);
    let [start, end] = VMA_RANGE.load();
    // SAFETY: `vma` is a `struct vm_area_struct`, not null, and the offsets are of its members.
    let start = unsafe { *vma.add(start as usize).cast::<u64>() };
    // SAFETY: as above.
    let end = unsafe { *vma.add(end as usize).cast::<u64>() };
    let pages = end.wrapping_sub(start) >> PAGE_SHIFT.load();
    if let Some(counters) = SCAN.get_ptr_mut(cached_current_slot(&SCAN_CACHE)) {
        // A C `bool`: the rest of the register is not defined.
        let sampled = returned & 0xff != 0;
        // SAFETY: the pointer is of the map's value.
        unsafe {
            let counter = if sampled { &raw mut (*counters).sampled } else { &raw mut (*counters).excluded };
            add_shared(counter, pages);
        }
    }
    0
}

#[btf_tracepoint(function = "mm_migrate_pages")]
fn migrate_tp_btf(ctx: BtfTracePointContext) -> i32 {
    let succeeded: u64 = ctx.arg(0);
    let record = ctx.as_ptr();
    let reason: u64;
    // Written out, because the verifier takes only constant offsets, and the compiler would make a variable of them.
    // SAFETY: the argument is inside of what the tracepoint has, which the verifier checks.
    unsafe {
        match REASON_ARGUMENT.load() {
            3 => asm!("{0} = *(u64 *)({1} + 24)", out(reg) reason, in(reg) record),
            6 => asm!("{0} = *(u64 *)({1} + 48)", out(reg) reason, in(reg) record),
            7 => asm!("{0} = *(u64 *)({1} + 56)", out(reg) reason, in(reg) record),
            8 => asm!("{0} = *(u64 *)({1} + 64)", out(reg) reason, in(reg) record),
            _ => return 0,
        }
    }
    // An `int`: the rest of the register is not defined.
    migrated(succeeded, reason as u32);
    0
}

#[tracepoint]
fn migrate_tracepoint(ctx: TracePointContext) -> u32 {
    // /sys/kernel/tracing/events/migrate/mm_migrate_pages/format; userspace compares it before attaching.
    let record = ctx.as_ptr();
    let succeeded: u64;
    let reason: u64;
    // Written out for the verifier, as above.
    // SAFETY: the offsets are inside of the record, which the verifier checks.
    unsafe {
        asm!("{0} = *(u64 *)({1} + 8)", out(reg) succeeded, in(reg) record);
        match REASON_OFFSET.load() {
            28 => asm!("{0} = *(u32 *)({1} + 28)", out(reg) reason, in(reg) record),
            52 => asm!("{0} = *(u32 *)({1} + 52)", out(reg) reason, in(reg) record),
            60 => asm!("{0} = *(u32 *)({1} + 60)", out(reg) reason, in(reg) record),
            _ => return 0,
        }
    }
    migrated(succeeded, reason as u32);
    0
}

#[inline(always)]
fn migrated(pages: u64, reason: u32) {
    let last = MIGRATE_REASONS as u32 - 1;
    let reason = if reason < last { reason } else { last };
    let slot = cached_current_slot(&MIGRATE_CACHE);
    add_at(&MIGRATED_PAGES, slot * MIGRATE_REASONS as u32 + reason, pages);
}

//! Counts the work of automatic NUMA balancing: sampled accesses by node of the CPU and of the memory, scanned
//! mappings, and migrated pages.
//!
//! # Accesses
//! The kernel calls `task_numa_fault(int last_cpupid, int mem_node, int pages, int flags)` (kernel/sched/fair.c) for
//! each hinting fault: see `count_access.rs`. The original node of a page that was migrated at once is not known (column
//! "unknown").
//!
//! # Mappings
//! `vma_policy_mof(vma)` (mm/mempolicy.c) decides for each mapping if it may be sampled. A policy without `MPOL_F_MOF`,
//! such as plain `MPOL_BIND`, excludes the mapping: no fault ever reports its accesses.
//!
//! # Migrations
//! The return of `move_to_new_folio(dst, src, mode)` (mm/migrate.c, since Linux 6.0) has the nodes and the size of each
//! folio that moves. The reason is that of the enclosing call of `migrate_pages`: between the tracepoints
//! `mm_migrate_pages_start` and `mm_migrate_pages`, it is kept in [`MIGRATING`]. A thread that allocates a page to move
//! another one may have to compact memory, so the calls nest.
//!
//! If the kernel has no such function, the tracepoint `migrate:mm_migrate_pages` counts alone. Its first argument is
//! `succeeded`, its last one is `reason`; the number of arguments grew over time. The nodes are then unknown. Compaction
//! does not count, because it moves pages within a zone.
//!
//! Pages are booked to the task that moves them. For NUMA balancing, that is the task that accessed them.
//!
//! # Concurrency
//! These events are rare compared with page allocations. All CPUs share the counters and update them atomically.

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
mod page_node;
mod reading;
mod roots;
mod slot_cache;

use core::arch::asm;

use aya_ebpf::{
    EbpfContext, Global,
    bindings::BPF_F_MMAPABLE,
    helpers::bpf_get_current_pid_tgid,
    macros::{btf_tracepoint, fentry, fexit, kprobe, map, tracepoint},
    maps::Array,
    programs::{BtfTracePointContext, FEntryContext, FExitContext, ProbeContext, TracePointContext},
};
use numaward_abi::{MIGRATE_REASONS, ScanCounters};

use crate::{
    counters::{add_at, add_shared},
    current_cached::cached_current_slot,
    hint::{SampledAccess, sampled_access},
    nodes::{NODE_TABLE, NODES},
    page_node::node_of,
    slot_cache::{SlotCache, slot_cache},
};

/// Counters per row: one for each node and one for "unknown"; or 2, for local and remote, if the full matrix would be
/// too large.
#[unsafe(no_mangle)]
static COLUMNS: Global<u32> = Global::new(2);
/// The index of the argument `reason` of `mm_migrate_pages`.
#[unsafe(no_mangle)]
static REASON_ARGUMENT: Global<u32> = Global::new(7);
/// The offset of `reason` in the record of the classic tracepoint.
#[unsafe(no_mangle)]
static REASON_OFFSET: Global<u32> = Global::new(60);
/// Offsets of `vm_area_struct.vm_start` and `vm_end`.
#[unsafe(no_mangle)]
static VMA_RANGE: Global<[u32; 2]> = Global::new([0; 2]);
/// Offsets of the second page's reference to its head in `struct folio`, and of the number of pages.
#[unsafe(no_mangle)]
static FOLIO_SIZE: Global<[u32; 2]> = Global::new([0; 2]);
/// The number of pairs of nodes that are distinguished: the square of NODES, or 1.
#[unsafe(no_mangle)]
static NODE_PAIRS: Global<u32> = Global::new(1);
/// The size of a page as a power of two.
#[unsafe(no_mangle)]
static PAGE_SHIFT: Global<u32> = Global::new(12);

/// Pages by (slot * NODES + the CPU's memory node) * COLUMNS + column.
#[map]
static ACCESS: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Pages by slot.
#[map]
static SCAN: Array<ScanCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Pages by (slot * NODE_PAIRS + pair) * MIGRATE_REASONS + reason. The pair is the index of the source node * NODES + that of
/// the destination. Pair 0, which is no pair of two nodes, is for unknown nodes.
#[map]
static MIGRATED_PAGES: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// The reasons of a thread's nested calls of `migrate_pages`, by the lower bits of its id: the number of the innermost one
/// plus one in the lowest [`REASON_BITS`] bits, and so on. The bits from [`STACK_BITS`] on hold the upper bits of the id
/// plus one. If two threads with the same index migrate at the same time, the reason of some pages is unknown.
#[map]
static MIGRATING: Array<u64> = Array::with_max_entries(1 << MIGRATING_BITS, 0);
#[map]
static HINT_CACHE: SlotCache = slot_cache();
#[map]
static SCAN_CACHE: SlotCache = slot_cache();
#[map]
static MIGRATE_CACHE: SlotCache = slot_cache();

/// The number of compaction in `enum migrate_reason`.
const COMPACTION: u32 = 0;

/// The number of threads with consecutive ids that can migrate pages at the same time, as a power of two.
const MIGRATING_BITS: u32 = 14;
/// The number of bits of the reasons in [`MIGRATING`]: 13 nested calls.
const STACK_BITS: u32 = 52;
/// The number of bits of a reason.
const REASON_BITS: u32 = 4;
const _: () = assert!(MIGRATE_REASONS < 1 << REASON_BITS, "each reason plus one fits");

#[fentry(function = "task_numa_fault")]
fn hint_fentry(ctx: FEntryContext) -> i32 {
    count_access(ctx.arg(1), ctx.arg(2), ctx.arg(3));
    0
}

#[kprobe(function = "task_numa_fault")]
fn hint_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(mem_node), Some(pages), Some(flags)) = (ctx.arg(1), ctx.arg(2), ctx.arg(3)) {
        count_access(mem_node, pages, flags);
    }
    0
}

#[inline(always)]
fn count_access(mem_node: i32, pages: i32, flags: i32) {
    let Ok(pages) = u64::try_from(pages) else { return };
    let Some(nodes) = NODE_TABLE.get(0) else { return };
    let SampledAccess { cpu_node, is_local, page_node } = sampled_access(nodes, mem_node, flags);
    let (count, columns) = (NODES.load(), COLUMNS.load());
    if cpu_node >= count {
        return;
    }
    let column = if columns == 2 {
        u32::from(!is_local)
    } else if is_local {
        cpu_node
    } else if page_node >= count {
        count
    } else {
        page_node
    };
    add_at(&ACCESS, (cached_current_slot(&HINT_CACHE) * count + cpu_node) * columns + column, pages);
}

#[fexit(function = "vma_policy_mof")]
fn scan_fexit(ctx: FExitContext) -> i32 {
    let vma: *const u8 = ctx.arg(0);
    if vma.is_null() {
        return 0;
    }
    // The function has one argument, which userspace has checked; the return value follows it.
    let returned: u64 = ctx.arg(1);
    let [start, end] = VMA_RANGE.load();
    // SAFETY: `vma` is a `struct vm_area_struct`, not null, and the offsets are of its members.
    let start = unsafe { *vma.add(start as usize).cast::<u64>() };
    // SAFETY: as above.
    let end = unsafe { *vma.add(end as usize).cast::<u64>() };
    let pages = end.wrapping_sub(start) >> PAGE_SHIFT.load();
    if let Some(counters) = SCAN.get_ptr_mut(cached_current_slot(&SCAN_CACHE)) {
        // The value is a C `bool`: the upper bits of the register are undefined.
        let sampled = returned & 0xff != 0;
        // SAFETY: the pointer is of the map's value.
        unsafe {
            let counter = if sampled { &raw mut (*counters).sampled } else { &raw mut (*counters).excluded };
            add_shared(counter, pages);
        }
    }
    0
}

#[btf_tracepoint(function = "mm_migrate_pages_start")]
fn migrate_begin(ctx: BtfTracePointContext) -> i32 {
    // TP_PROTO(enum migrate_mode mode, int reason)
    let reason: u64 = ctx.arg(1);
    let (index, owner) = migrating_index();
    let Some(stack) = MIGRATING.get_ptr_mut(index) else { return 0 };
    let outer = reasons(stack, owner);
    let reason = u64::from(clamped(reason as u32)) + 1;
    // SAFETY: the pointer is of the map's value.
    unsafe { stack.write_volatile(owner | (outer << REASON_BITS | reason) & STACK_MASK) };
    0
}

#[btf_tracepoint(function = "mm_migrate_pages")]
fn migrate_end(_ctx: BtfTracePointContext) -> i32 {
    let (index, owner) = migrating_index();
    let Some(stack) = MIGRATING.get_ptr_mut(index) else { return 0 };
    let outer = reasons(stack, owner) >> REASON_BITS;
    // SAFETY: the pointer is of the map's value.
    unsafe { stack.write_volatile(owner | outer) };
    0
}

#[fexit(function = "move_to_new_folio")]
fn migrate_fexit(ctx: FExitContext) -> i32 {
    let dst: *const u64 = ctx.arg(0);
    let src: *const u64 = ctx.arg(1);
    // The function has three arguments, which userspace has checked; the return value follows them.
    let returned: u64 = ctx.arg(3);
    // The value is an `int`: the upper half of the register is undefined.
    if dst.is_null() || src.is_null() || returned as u32 != 0 {
        return 0;
    }
    // SAFETY: both are a `struct folio`, not null, which begins with the flags (userspace checks this in the kernel's
    // BTF). The verifier turns these loads into ones that cannot fault.
    let (from, to) = unsafe { (u32::from(node_of(*src)), u32::from(node_of(*dst))) };
    let nodes = NODES.load();
    if from == to || from >= nodes || to >= nodes {
        return 0;
    }
    let [head, size] = FOLIO_SIZE.load();
    // SAFETY: as above, and the offsets are of members.
    let head = unsafe { *dst.cast::<u8>().add(head as usize).cast::<u64>() };
    // Behind a folio of one page is another folio, the second page of which would be no tail.
    let pages = if head & 1 == 0 {
        1
    } else {
        // SAFETY: as above.
        u64::from(unsafe { *dst.cast::<u8>().add(size as usize).cast::<u32>() })
    };
    let (index, owner) = migrating_index();
    let innermost = MIGRATING.get_ptr_mut(index).map_or(0, |stack| reasons(stack, owner)) as u32;
    // Without a reason, this is the last number.
    let reason = clamped((innermost & ((1 << REASON_BITS) - 1)).wrapping_sub(1));
    add_migrated(from * nodes + to, reason, pages);
    0
}

const STACK_MASK: u64 = (1 << STACK_BITS) - 1;

/// Returns the current thread's index in [`MIGRATING`], and the upper bits of its id at their position in the word.
#[inline(always)]
fn migrating_index() -> (u32, u64) {
    let thread = bpf_get_current_pid_tgid() as u32;
    let above = u64::from(thread >> MIGRATING_BITS) + 1;
    (thread & ((1 << MIGRATING_BITS) - 1), above << STACK_BITS)
}

/// Returns the reasons of the current thread; 0 if the entry is another thread's.
#[inline(always)]
fn reasons(stack: *mut u64, owner: u64) -> u64 {
    // SAFETY: the pointer is of the map's value.
    let word = unsafe { stack.read_volatile() };
    if word & !STACK_MASK == owner { word & STACK_MASK } else { 0 }
}

#[btf_tracepoint(function = "mm_migrate_pages")]
fn migrate_tp_btf(ctx: BtfTracePointContext) -> i32 {
    let succeeded: u64 = ctx.arg(0);
    let record = ctx.as_ptr();
    let reason: u64;
    // In assembly, because the verifier accepts only constant offsets and the compiler would use a variable. SAFETY:
    // the argument is one of the tracepoint's, which the verifier checks.
    unsafe {
        match REASON_ARGUMENT.load() {
            3 => asm!("{0} = *(u64 *)({1} + 24)", out(reg) reason, in(reg) record),
            6 => asm!("{0} = *(u64 *)({1} + 48)", out(reg) reason, in(reg) record),
            7 => asm!("{0} = *(u64 *)({1} + 56)", out(reg) reason, in(reg) record),
            8 => asm!("{0} = *(u64 *)({1} + 64)", out(reg) reason, in(reg) record),
            _ => return 0,
        }
    }
    // The value is an `int`: the upper half of the register is undefined.
    count_migrated(succeeded, reason as u32);
    0
}

#[tracepoint]
fn migrate_tracepoint(ctx: TracePointContext) -> u32 {
    // Userspace checks the format before attaching: /sys/kernel/tracing/events/migrate/mm_migrate_pages/format.
    let record = ctx.as_ptr();
    let succeeded: u64;
    let reason: u64;
    // In assembly for the verifier, as in `migrate_tp_btf`. SAFETY: the offsets are inside the record, which the
    // verifier checks.
    unsafe {
        asm!("{0} = *(u64 *)({1} + 8)", out(reg) succeeded, in(reg) record);
        match REASON_OFFSET.load() {
            28 => asm!("{0} = *(u32 *)({1} + 28)", out(reg) reason, in(reg) record),
            52 => asm!("{0} = *(u32 *)({1} + 52)", out(reg) reason, in(reg) record),
            60 => asm!("{0} = *(u32 *)({1} + 60)", out(reg) reason, in(reg) record),
            _ => return 0,
        }
    }
    count_migrated(succeeded, reason as u32);
    0
}

/// Counts the pages of a call of `migrate_pages`, the nodes of which are unknown.
#[inline(always)]
fn count_migrated(pages: u64, reason: u32) {
    if reason != COMPACTION {
        add_migrated(0, clamped(reason), pages);
    }
}

/// Returns the number of a reason, or the last number for all further ones.
#[inline(always)]
fn clamped(reason: u32) -> u32 {
    let last = MIGRATE_REASONS as u32 - 1;
    if reason < last { reason } else { last }
}

#[inline(always)]
fn add_migrated(pair: u32, reason: u32, pages: u64) {
    let pairs = NODE_PAIRS.load();
    let pair = if pairs == 1 { 0 } else { pair };
    let slot = cached_current_slot(&MIGRATE_CACHE);
    add_at(&MIGRATED_PAGES, (slot * pairs + pair) * MIGRATE_REASONS as u32 + reason, pages);
}

//! Counts page allocations per workload slot and node of the page: local, remote, outside the promised
//! nodes; pages of the kernel apart.
//!
//! **Hook.** The tracepoint `kmem:mm_page_alloc`, as `tp_btf` (the node is in `page->flags`) or, where
//! that is refused, as a classic tracepoint (the node is looked up by the page's memory section). Neither
//! program calls `bpf_probe_read_kernel`, so that `tp_btf` loads under `lockdown=confidentiality`.
//!
//! **From cgroup to slot.** ROOTS holds the registered cgroups. A task's cgroup belongs to the deepest
//! of them among itself and its ancestors. The search costs a lookup for each level, so each CPU remembers
//! its last answers in CACHE, a small direct-mapped table. An answer is good while GENERATION is what it
//! was when the search began: userspace raises it after each change of ROOTS or SLOTS, so nothing in the
//! cache ever needs to be found and removed, be it a freed slot, a new mask, or a cgroup that had no
//! slot before.
//!
//! **Misses.** The first page outside the promised nodes is reported to userspace as an event, with the task that
//! asked for it; then none of that slot until userspace opens its gate again.
//!
//! **Call chains.** Where they are taken, `tp_btf` ends with a tail call of the program for them (`chains.rs`), for remote user
//! pages only. A second program on the tracepoint would cost each allocation as much again as this one.
//!
//! **Cost.** A helper call is expensive on CPUs with mitigations (some 20 ns of 30 for the id of the cgroup), so the
//! id is read through `current->cgroups->dfl_cgrp->kn->id` where the kernel's BTF has the offsets, from Linux 5.11 on.
//!
//! **No races.** The kernel runs a tracing program at most once at a time on each CPU, and tasks do not migrate
//! inside. An allocation that interrupts the program is not delivered but counted as `recursion_misses`
//! (`prog->active` in `__bpf_trace_run` for `tp_btf`, `bpf_prog_active` in `trace_call_bpf` for tracepoints).
//! So what is per CPU (CACHE, TOTALS, a shard of CTR) has one writer, and needs no atomics. Where CPUs share a shard, it
//! has many and uses them. On a kernel too old for the first of these guards, an interrupt between a counter's load and its
//! store would cost that one count; a cache entry would not be harmed, as an interrupt has the same current
//! task.
//!
//! **Preemption.** Newer kernels (tracepoints guarded by SRCU instead of disabled preemption) preempt tasks inside
//! `tp_btf` programs. Until such a task runs again, the guard above keeps the program from all other tasks
//! of that CPU: their events are lost. There the kernel disables migration instead, which can be seen in
//! `current->migration_disabled`; userspace then prefers the tracepoint, whose programs are not preempted.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod cache;
mod cgroup_node;
mod cgroup_path;
mod common;
mod counters;
mod current;
mod event_gate;
mod lost;
mod nodes;
mod page_node;
mod roots;

use core::arch::asm;

use aya_ebpf::{
    EbpfContext, Global,
    bindings::BPF_F_MMAPABLE,
    helpers::{bpf_get_current_task_btf, bpf_get_smp_processor_id},
    macros::{btf_tracepoint, map, tracepoint},
    maps::{Array, PerCpuArray, ProgramArray, RingBuf},
    programs::{BtfTracePointContext, TracePointContext},
};
use aya_log_ebpf::debug;
use numaward_abi::{AllocCounters, AllocTotals, CgroupId, MAX_NODES, Miss, Slot, UNKNOWN_NODE};

use crate::{
    cache::{GENERATION, load_first, place},
    counters::add_shared,
    current::{current_cgroup, current_slot},
    event_gate::current_cgroup_by_helper,
    nodes::{NODE_TABLE, NODES, home},
    page_node::node_of,
};

/// A user page: anonymous memory and page cache. `___GFP_MOVABLE` of `linux/gfp_types.h`.
const GFP_MOVABLE: u32 = 0x08;

const CACHE_BITS: u32 = 6;

/// What a CPU remembers of a cgroup. One cache line.
#[repr(C)]
struct CacheEntry {
    cgroup: CgroupId,
    /// GENERATION when the search began.
    generation: u64,
    /// Copied from [`Slot`].
    allowed: [u64; MAX_NODES / 64],
    /// The first row of the slot, in the shard of this CPU; one row per node follows.
    row: u32,
    /// The index of this CPU's home node: its own, or the nearest with memory.
    home: u32,
    slot: u32,
    padding: u32,
}

/// Shards of CTR that CPUs share; 0 where each has its own.
#[unsafe(no_mangle)]
static SHARDS: Global<u32> = Global::new(0);
/// Rows per shard.
#[unsafe(no_mangle)]
static SHARD_ROWS: Global<u32> = Global::new(0);
/// Where the section number begins in a page frame number.
#[unsafe(no_mangle)]
static SECTION_SHIFT: Global<u32> = Global::new(15);

/// Where the flags are in the record of the classic tracepoint.
#[unsafe(no_mangle)]
static GFP_OFFSET: Global<u32> = Global::new(24);
/// The offset of `task_struct.migration_disabled`, a `u16`; 0 where it is not known or means nothing.
#[unsafe(no_mangle)]
static MIGRATION_DISABLED: Global<u32> = Global::new(0);

/// 1 if the probe runs `CHAIN_PROGRAM`.
#[unsafe(no_mangle)]
static RUNS_CHAINS: Global<u32> = Global::new(0);

// Sizes that depend on the machine are set by userspace.

/// By slot.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);
/// The node index plus one of each memory section; 0 where that is not known.
#[map]
static SECTION_NODE: Array<u16> = Array::with_max_entries(1, 0);
#[map]
static CACHE: PerCpuArray<CacheEntry> = PerCpuArray::with_max_entries(1 << CACHE_BITS, 0);
/// By shard * SHARD_ROWS + slot * NODES + node index. The shard is that of the CPU, or where this would be too large that
/// of one home node or several. Userspace reads it as memory: to look up each value would take far longer.
#[map]
static CTR: Array<AllocCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
#[map]
static TOTALS: PerCpuArray<AllocTotals> = PerCpuArray::with_max_entries(1, 0);
/// The program that takes call chains of remote user pages.
#[map]
static CHAIN_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);
/// What is reported to userspace at once: values of [`Miss`].
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);

#[btf_tracepoint(function = "mm_page_alloc")]
fn alloc_tp_btf(ctx: BtfTracePointContext) -> i32 {
    // TP_PROTO(struct page *page, unsigned int order, gfp_t gfp_flags, int migratetype)
    let page: *const u64 = ctx.arg(0);
    if page.is_null() {
        return 0;
    }
    let order: u32 = ctx.arg(1);
    let gfp: u32 = ctx.arg(2);
    // SAFETY: `page` is a `struct page` of the kernel, not null; `flags` is its first member (userspace
    // checks this in the kernel's BTF). The verifier turns the load into one that cannot fault.
    let flags = unsafe { *page };
    let is_remote = count(&ctx, node_of(flags), order, gfp);
    if is_remote && RUNS_CHAINS.load() != 0 {
        // SAFETY: userspace puts only a program for this tracepoint there. Without one, this program goes on.
        unsafe { CHAIN_PROGRAM.tail_call(&ctx, 0) };
    }
    0
}

#[tracepoint]
fn alloc_tracepoint(ctx: TracePointContext) -> u32 {
    // /sys/kernel/tracing/events/kmem/mm_page_alloc/format; userspace compares it before attaching.
    let record = ctx.as_ptr().cast::<u8>();
    // SAFETY: the offset is inside the record, and the verifier checks it.
    let pfn = unsafe { *record.add(8).cast::<u64>() };
    // SAFETY: as above.
    let order = unsafe { *record.add(16).cast::<u32>() };
    let gfp: u64;
    // Written out, because the verifier takes only constant offsets, and the compiler would make a variable of them. The
    // flags of interest are in the lower half, wherever that is.
    // SAFETY: as above.
    unsafe {
        match GFP_OFFSET.load() {
            20 => asm!("{0} = *(u32 *)({1} + 20)", out(reg) gfp, in(reg) record),
            24 => asm!("{0} = *(u64 *)({1} + 24)", out(reg) gfp, in(reg) record),
            _ => return 0,
        }
    }
    // The allocation failed.
    if pfn == u64::MAX {
        return 0;
    }
    let section = pfn >> SECTION_SHIFT.load();
    let node = match u32::try_from(section) {
        // 0, as the map begins, becomes UNKNOWN_NODE.
        Ok(section) => SECTION_NODE.get(section).copied().unwrap_or(0).wrapping_sub(1),
        Err(_) => UNKNOWN_NODE,
    };
    count(&ctx, node, order, gfp as u32);
    0
}

/// Counts the pages of an allocation. Returns whether they are remote user pages.
#[inline(always)]
fn count(ctx: &impl EbpfContext, node: u16, order: u32, gfp: u32) -> bool {
    let pages = 1u64 << (order & 63);
    if node == UNKNOWN_NODE {
        if let Some(totals) = TOTALS.get_ptr_mut(0) {
            // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
            unsafe { (*totals).unknown_node += pages };
        }
        return false;
    }
    let node = u32::from(node);

    let cgroup = current_cgroup();
    let Some(entry) = CACHE.get_ptr_mut(place(cgroup, CACHE_BITS)) else { return false };
    let Some(generation) = GENERATION.get_ptr_mut(0) else { return false };
    // SAFETY: this CPU is the only user, and the program does not interrupt itself.
    let entry = unsafe { &mut *entry };
    // SAFETY: the pointer is of the map's value, which lives as long as the program.
    if entry.cgroup != cgroup || entry.generation != unsafe { generation.read_volatile() } {
        if !resolve(entry, generation) {
            return false;
        }
        debug!(ctx, "cgroup {} counts in row {}", entry.cgroup.0, entry.row);
    }

    let user = gfp & GFP_MOVABLE != 0;
    let remote = node != entry.home;
    let outside = entry.allowed[(node / 64) as usize % (MAX_NODES / 64)] >> (node % 64) & 1 == 0;
    let row = entry.row + node;
    let Some(counters) = CTR.get_ptr_mut(row) else { return false };
    // SAFETY: `counters` is a valid pointer to a value of the map.
    unsafe {
        let counter = match (user, remote) {
            (false, _) => &raw mut (*counters).kernel,
            (true, false) => &raw mut (*counters).user_local,
            (true, true) => &raw mut (*counters).user_remote,
        };
        add(counter, pages);
        if user && outside {
            add(&raw mut (*counters).user_outside, pages);
            if event_gate::pass(entry.slot) {
                report_miss(entry.slot, node, pages);
            }
        }
    }
    user && remote
}

/// Reports pages outside the promised nodes.
#[inline(never)]
fn report_miss(slot: u32, node: u32, pages: u64) {
    event_gate::report(&EVENTS, slot, |task| Miss { task, pages, node, padding: 0 });
}

/// Whether the kernel may preempt the task here. It then keeps it from migrating, which it need not do
/// where preemption is disabled.
#[inline(always)]
fn preemptible() -> bool {
    let offset = MIGRATION_DISABLED.load() as usize;
    // SAFETY: the offset is of a member of the task; see `CgroupNode::of_task`.
    offset != 0 && unsafe { *bpf_get_current_task_btf().cast::<u8>().add(offset).cast::<u16>() } != 0
}

/// Searches the slot of the current task's cgroup and fills the entry; `false` where a map has no
/// such value, which userspace rules out.
#[inline(never)]
fn resolve(entry: &mut CacheEntry, generation: *mut u64) -> bool {
    // SAFETY: the caller passes the map's value.
    let generation = unsafe { load_first(generation) };
    let cgroup = current_cgroup_by_helper();
    let slot = current_slot();
    let Some(slot_value) = SLOTS.get(slot) else { return false };
    let Some(nodes) = NODE_TABLE.get(0) else { return false };
    let home = home(nodes);
    // SAFETY: the helper takes nothing and always succeeds.
    let own = || unsafe { bpf_get_smp_processor_id() };
    let shard = u32::from(home).checked_rem(SHARDS.load()).unwrap_or_else(own);
    entry.cgroup = cgroup;
    entry.allowed = slot_value.allowed;
    entry.row = shard * SHARD_ROWS.load() + slot * NODES.load();
    entry.slot = slot;
    entry.home = u32::from(home);
    // The task was moved to another cgroup meanwhile: whose slot this is, is not sure. Good for one event.
    let moved = cgroup != current_cgroup_by_helper();
    entry.generation = if moved { 0 } else { generation };
    if let Some(totals) = TOTALS.get_ptr_mut(0) {
        // SAFETY: as in `count`.
        let totals = unsafe { &mut *totals };
        totals.resolved += 1;
        totals.preemptible += u64::from(preemptible());
    }
    true
}

/// # Safety
///
/// `counter` points into a value of CTR.
#[inline(always)]
unsafe fn add(counter: *mut u64, pages: u64) {
    if SHARDS.load() == 0 {
        // SAFETY: the caller's promise; this CPU is the only writer of its shard.
        unsafe { *counter += pages };
    } else {
        // SAFETY: the caller's promise.
        unsafe { add_shared(counter, pages) };
    }
}

//! Counts page allocations by workload slot and node: local, remote, outside the guaranteed nodes, and pages of the
//! kernel.
//!
//! # Hook
//! The tracepoint `kmem:mm_page_alloc`. As `tp_btf`, the program reads the node from `page->flags`. As a classic
//! tracepoint, which is the fallback, it looks the node up by the page's memory section. Under
//! `lockdown=confidentiality`, neither program calls `bpf_probe_read_kernel`, so that `tp_btf` loads.
//!
//! # From cgroup to slot
//! ROOTS holds the registered cgroups. A task belongs to the deepest registered cgroup among its own cgroup and its
//! ancestors. The search costs one lookup for each level, so each CPU caches its last answers in CACHE, a small
//! direct-mapped table. An entry is valid if its generation equals GENERATION. Userspace raises GENERATION after each
//! change of ROOTS or SLOTS, so no entry has to be removed after a slot was freed, a mask changed or a cgroup was
//! registered.
//!
//! # Pages of no workload
//! An interrupt allocates for whatever it handles, not for the task that it interrupts, and the tracepoint does not
//! say whether it fired in an interrupt. The GFP flags do: an interrupt must not sleep, so its flags permit neither
//! direct reclaim nor I/O. These pages are counted by node in UNATTRIBUTED. I/O is part of the condition because SLUB
//! tries large slabs without direct reclaim (`allocate_slab` in mm/slub.c), as sockets do with their buffers
//! (`skb_page_frag_refill` in net/core/sock.c), for tasks that may sleep.
//!
//! A task that frees memory allocates, too: for pages that it demotes to a slower node, or compresses (zswap, zram). They
//! belong to any workload. Such a task has the flag `PF_MEMALLOC`. If programs cannot read the current task's structures
//! directly, the flag is only read for pages that would be misses, because it takes another two helpers.
//!
//! # Misses
//! A *miss* is a user page outside the guaranteed nodes. `charge.rs` counts misses where the kernel charges pages to their
//! owner. This program counts them only for slots where that is not possible: it takes movable pages for user pages, and the
//! allocating task for the owner. The first miss of a slot is reported to userspace as an event with the allocating task.
//! No further miss of the slot is reported until userspace opens its gate again (`event_gate.rs`).
//!
//! # Call chains
//! If call chains are enabled, `tp_btf` ends with a tail call of the program in `chains.rs`, for remote user pages
//! only. A second program on the tracepoint would double the cost of each allocation.
//!
//! # Cost
//! Helper calls are expensive on CPUs with mitigations: reading the cgroup's id takes 20 of 30 ns. From Linux 5.11 on,
//! if the kernel's BTF has the offsets, the id is therefore read through `current->cgroups->dfl_cgrp->kn->id`.
//!
//! # Concurrency
//! The kernel runs a tracing program at most once at a time on each CPU, and tasks do not migrate inside. An allocation
//! in an interrupt of the program is not delivered; the kernel counts it in `recursion_misses` (`prog->active` in
//! `__bpf_trace_run` for `tp_btf`, `bpf_prog_active` in `trace_call_bpf` for tracepoints). Per-CPU data (CACHE, TOTALS,
//! a CPU's own shard of CTR) therefore has one writer and needs no atomics. Shards that several CPUs share are updated
//! atomically. On kernels without the first of these guards, an interrupt between the load and the store of a counter
//! loses one count. It does not corrupt a cache entry, because an interrupt has the same current task.
//!
//! # Preemption
//! Newer kernels guard tracepoints by SRCU instead of disabled preemption, and preempt tasks inside `tp_btf` programs.
//! Until such a task runs again, the guard above skips the program for all other tasks on that CPU: their events are
//! lost. These kernels disable migration inside the program, which `current->migration_disabled` shows. In this case
//! userspace prefers the classic tracepoint, as its programs are not preempted.

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
mod reading;
mod roots;

use core::arch::asm;

use aya_ebpf::{
    EbpfContext, Global,
    bindings::BPF_F_MMAPABLE,
    helpers::{
        bpf_get_current_task, bpf_get_current_task_btf, bpf_get_smp_processor_id, bpf_probe_read_kernel,
    },
    macros::{btf_tracepoint, map, tracepoint},
    maps::{Array, PerCpuArray, ProgramArray, RingBuf},
    programs::{BtfTracePointContext, TracePointContext},
};
use aya_log_ebpf::debug;
use numaward_abi::{
    AllocCounters, AllocTotals, CgroupId, MAX_NODES, Miss, Slot, UNKNOWN_NODE, UnattributedCounters,
};

use crate::{
    cache::{GENERATION, cache_index, load_first},
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    counters::add_shared,
    current::{READS_TASK, current_slot},
    event_gate::current_cgroup_by_helper,
    nodes::{NODE_TABLE, NODES, memory_node},
    page_node::node_of,
};

/// The GFP flag of user pages (anonymous memory and page cache): `___GFP_MOVABLE` of `linux/gfp_types.h`.
const GFP_MOVABLE: u32 = 0x08;
/// The GFP flags of allocations that may sleep: `___GFP_IO` and `___GFP_DIRECT_RECLAIM`.
const GFP_SLEEPS: u32 = 0x40 | 0x400;

/// The flag of tasks that free memory: `PF_MEMALLOC` of `linux/sched.h`.
const PF_MEMALLOC: u32 = 0x800;

const CACHE_BITS: u32 = 6;

/// A CPU's cached answer for a cgroup. One cache line.
#[repr(C)]
struct CacheEntry {
    cgroup: CgroupId,
    /// GENERATION when the search began.
    generation: u64,
    /// Copied from [`Slot`].
    allowed: [u64; MAX_NODES / 64],
    /// The first row of the slot in this CPU's shard; each node has one row.
    row: u32,
    /// The index of this CPU's memory node.
    memory_node: u32,
    slot: u32,
    /// Copied from [`Slot`].
    counts_misses: u32,
}

/// The number of shards of CTR that CPUs share; 0 if each CPU has its own shard.
#[unsafe(no_mangle)]
static SHARDS: Global<u32> = Global::new(0);
/// Rows per shard.
#[unsafe(no_mangle)]
static SHARD_ROWS: Global<u32> = Global::new(0);
/// The shift that turns a page frame number into a section number.
#[unsafe(no_mangle)]
static SECTION_SHIFT: Global<u32> = Global::new(15);

/// The offset of the GFP flags in the record of the classic tracepoint.
#[unsafe(no_mangle)]
static GFP_OFFSET: Global<u32> = Global::new(24);
/// The offset of `task_struct.migration_disabled`, a `u16`; 0 if it is unknown or has no meaning for this program.
#[unsafe(no_mangle)]
static MIGRATION_DISABLED: Global<u32> = Global::new(0);

/// The offset of `task_struct.flags`; 0 if it is unknown.
#[unsafe(no_mangle)]
static TASK_FLAGS: Global<u32> = Global::new(0);

/// 1 if the probe runs `CHAIN_PROGRAM`.
#[unsafe(no_mangle)]
static RUNS_CHAINS: Global<u32> = Global::new(0);

// Userspace sets sizes that depend on the machine.

/// Settings by slot.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);
/// The node index plus one by memory section; 0 if unknown.
#[map]
static SECTION_NODE: Array<u16> = Array::with_max_entries(1, 0);
#[map]
static CACHE: PerCpuArray<CacheEntry> = PerCpuArray::with_max_entries(1 << CACHE_BITS, 0);
/// Counters by shard * SHARD_ROWS + slot * NODES + node index. Each CPU has a shard; if that would take too much
/// memory, CPUs of one or several memory nodes share one. Userspace maps it into its memory, which is far faster than
/// looking up each value.
#[map]
static CTR: Array<AllocCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Counters by node index. Userspace sets the map's size.
#[map]
static UNATTRIBUTED: PerCpuArray<UnattributedCounters> = PerCpuArray::with_max_entries(1, 0);
#[map]
static TOTALS: PerCpuArray<AllocTotals> = PerCpuArray::with_max_entries(1, 0);
/// The program that takes call chains of remote user pages.
#[map]
static CHAIN_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);
/// Events for userspace: values of [`Miss`].
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
    // SAFETY: `page` is a `struct page` of the kernel, not null; `flags` is its first member (userspace checks this in
    // the kernel's BTF). The verifier turns the load into one that cannot fault.
    let flags = unsafe { *page };
    let is_remote = count(&ctx, node_of(flags), order, gfp);
    if is_remote && RUNS_CHAINS.load() != 0 {
        // SAFETY: userspace only enters a program for this tracepoint. If there is none, this program continues.
        unsafe { CHAIN_PROGRAM.tail_call(&ctx, 0) };
    }
    0
}

#[tracepoint]
fn alloc_tracepoint(ctx: TracePointContext) -> u32 {
    // Userspace checks the format before attaching: /sys/kernel/tracing/events/kmem/mm_page_alloc/format.
    let record = ctx.as_ptr().cast::<u8>();
    // SAFETY: the offset is inside the record, and the verifier checks it.
    let pfn = unsafe { *record.add(8).cast::<u64>() };
    // SAFETY: as above.
    let order = unsafe { *record.add(16).cast::<u32>() };
    let gfp: u64;
    // In assembly, because the verifier accepts only constant offsets and the compiler would use a variable. The
    // relevant flags are in the lower half in both layouts. SAFETY: the offset is inside the record, and the verifier
    // checks it.
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
        // 0, the map's initial value, becomes UNKNOWN_NODE.
        Ok(section) => SECTION_NODE.get(section).copied().unwrap_or(0).wrapping_sub(1),
        Err(_) => UNKNOWN_NODE,
    };
    count(&ctx, node, order, gfp as u32);
    0
}

/// Counts the pages of an allocation. Returns true if they are remote user pages.
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
    if gfp & (GFP_MOVABLE | GFP_SLEEPS) == 0 {
        count_unattributed(node, |counters| counters.atomic += pages);
        return false;
    }

    let (cgroup, is_reclaiming) = current_task();
    if is_reclaiming {
        count_unattributed(node, |counters| counters.reclaim += pages);
        return false;
    }
    let Some(entry) = CACHE.get_ptr_mut(cache_index(cgroup.0, CACHE_BITS)) else { return false };
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
    let remote = node != entry.memory_node;
    let outside = user && entry.allowed[(node / 64) as usize % (MAX_NODES / 64)] >> (node % 64) & 1 == 0;
    if outside && READS_TASK.load() == 0 && is_reclaiming_by_helpers() {
        count_unattributed(node, |counters| counters.reclaim += pages);
        return false;
    }
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
        if outside && entry.counts_misses != 0 {
            add(&raw mut (*counters).user_outside, pages);
            if event_gate::passes(entry.slot) {
                report_miss(entry.slot, node, pages);
            }
        }
    }
    user && remote
}

/// Counts pages that are booked to no slot.
#[inline(always)]
fn count_unattributed(node: u32, add: impl FnOnce(&mut UnattributedCounters)) {
    if let Some(counters) = UNATTRIBUTED.get_ptr_mut(node) {
        // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
        add(unsafe { &mut *counters });
    }
}

/// Returns the current task's cgroup, and true if the task is known to free memory.
#[inline(always)]
fn current_task() -> (CgroupId, bool) {
    if READS_TASK.load() == 0 {
        return (current_cgroup_by_helper(), false);
    }
    // The verifier knows the current task as a `struct task_struct`. SAFETY: if userspace sets READS_TASK, it also sets
    // the path and the offset; see `CgroupNode::of_task`.
    unsafe {
        let task = bpf_get_current_task_btf().cast::<u8>();
        let flags = *task.add(TASK_FLAGS.load() as usize).cast::<u32>();
        (CgroupNode::of_task(CGROUP_PATH.load(), task).id(), flags & PF_MEMALLOC != 0)
    }
}

/// Returns true if the current task frees memory, without direct reads of its structures.
#[inline(never)]
fn is_reclaiming_by_helpers() -> bool {
    let offset = TASK_FLAGS.load();
    if offset == 0 {
        return false;
    }
    // SAFETY: the first helper takes nothing and always succeeds; the second one takes any address.
    let flags = unsafe { bpf_probe_read_kernel((bpf_get_current_task() + u64::from(offset)) as *const u32) };
    flags.unwrap_or(0) & PF_MEMALLOC != 0
}

/// Reports pages outside the guaranteed nodes.
#[inline(never)]
fn report_miss(slot: u32, node: u32, pages: u64) {
    event_gate::report(&EVENTS, slot, |task| Miss { task, pages, node, padding: 0 });
}

/// Returns true if the kernel may preempt the task inside the program. The kernel then disables migration, which it
/// need not do while preemption is disabled.
#[inline(always)]
fn is_preemptible() -> bool {
    let offset = MIGRATION_DISABLED.load() as usize;
    // SAFETY: the offset is of a member of the task; see `CgroupNode::of_task`.
    offset != 0 && unsafe { *bpf_get_current_task_btf().cast::<u8>().add(offset).cast::<u16>() } != 0
}

/// Finds the slot of the current task's cgroup and fills the entry. Returns `false` if a map does not have the value, which
/// userspace prevents.
#[inline(never)]
fn resolve(entry: &mut CacheEntry, generation: *mut u64) -> bool {
    // SAFETY: the caller passes the map's value.
    let generation = unsafe { load_first(generation) };
    let cgroup = current_cgroup_by_helper();
    let slot = current_slot();
    let Some(slot_value) = SLOTS.get(slot) else { return false };
    let Some(nodes) = NODE_TABLE.get(0) else { return false };
    let memory_node = memory_node(nodes);
    // SAFETY: the helper takes nothing and always succeeds.
    let own = || unsafe { bpf_get_smp_processor_id() };
    let shard = u32::from(memory_node).checked_rem(SHARDS.load()).unwrap_or_else(own);
    entry.cgroup = cgroup;
    entry.allowed = slot_value.allowed;
    entry.row = shard * SHARD_ROWS.load() + slot * NODES.load();
    entry.slot = slot;
    entry.counts_misses = slot_value.counts_misses as u32;
    entry.memory_node = u32::from(memory_node);
    // If the task was moved to another cgroup meanwhile, the slot may be wrong: the entry is used for this event only.
    let moved = cgroup != current_cgroup_by_helper();
    entry.generation = if moved { 0 } else { generation };
    if let Some(totals) = TOTALS.get_ptr_mut(0) {
        // SAFETY: as in `count`.
        let totals = unsafe { &mut *totals };
        totals.resolved += 1;
        totals.preemptible += u64::from(is_preemptible());
    }
    true
}

/// # Safety
///
/// `counter` points into a value of CTR.
#[inline(always)]
unsafe fn add(counter: *mut u64, pages: u64) {
    if SHARDS.load() == 0 {
        // SAFETY: guaranteed by the caller; this CPU is the only writer of its shard.
        unsafe { *counter += pages };
    } else {
        // SAFETY: guaranteed by the caller.
        unsafe { add_shared(counter, pages) };
    }
}

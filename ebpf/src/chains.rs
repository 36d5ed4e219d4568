//! Samples the call chains of remote allocations and remote accesses (`observe.callChains`).
//!
//! The programs are loaded only if call chains are enabled.
//!
//! # Events
//! - User pages that are allocated on another node than the CPU's memory node, by the tracepoint `kmem:mm_page_alloc`.
//! - Accesses to memory of another node that NUMA balancing samples, by the function `task_numa_fault`.
//!
//! Only tasks of workloads with a slot are sampled; all other tasks would fill the maps.
//!
//! # Hook of allocations
//! The program of `alloc.rs` knows which pages are remote and ends with a tail call of `alloc_chain_tail` for these. If
//! it cannot do so, `alloc_chain_tp_btf` is attached to the tracepoint as a second program.
//!
//! # Sampling
//! Each CPU adds up the remote pages. When the sum reaches SAMPLE_EVERY, the current call chain is taken and stands for
//! all of these pages. The pages of all chains therefore add up to the total, and a huge page is always sampled.
//!
//! # Chains
//! The kernel follows frame pointers in user space, and its own tables in the kernel. Both parts are stored once in
//! STACKS, at an index given by their hash. A stack with an index that is taken by another one is lost, and so is a new chain
//! if CHAINS is full. LOST counts both.
//!
//! # Concurrency
//! All CPUs share the counters of a chain and update them atomically. If two CPUs insert a chain at once, the second
//! one finds the entry and adds to it.

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
mod lost;
mod nodes;
mod page_node;
mod reading;
mod roots;
mod slot_cache;

use aya_ebpf::{
    Global,
    bindings::{BPF_F_USER_STACK, BPF_NOEXIST},
    cty::c_long,
    helpers::bpf_get_current_pid_tgid,
    macros::{btf_tracepoint, fentry, kprobe, map},
    maps::{HashMap, PerCpuArray, StackTrace},
    programs::{BtfTracePointContext, FEntryContext, ProbeContext, tracing::StackIdContext},
};
use numaward_abi::{
    CHAIN_KINDS, ChainKey, ChainKind, ChainPages, NO_NODE, NO_ROOM, NO_STACK, OTHER_SLOT, UNKNOWN_NODE,
};

use crate::{
    counters::add_shared,
    current_cached::cached_current_slot,
    hint::sampled_access,
    lost::count_lost,
    nodes::{NODE_TABLE, NODES, memory_node},
    page_node::node_of,
    slot_cache::{SlotCache, slot_cache},
};

/// The GFP flag of user pages (anonymous memory and page cache): `___GFP_MOVABLE` of `linux/gfp_types.h`.
const GFP_MOVABLE: u32 = 0x08;
/// The kernel's error if another stack has the index: `-EEXIST`.
const EEXIST: i32 = -17;

/// The number of remote pages for which one chain is taken.
#[unsafe(no_mangle)]
static SAMPLE_EVERY: Global<u32> = Global::new(1);
/// 1 if the machine has two nodes: memory that is not on the one is on the other.
#[unsafe(no_mangle)]
static TWO_NODES: Global<u32> = Global::new(0);

#[map]
static STACKS: StackTrace = StackTrace::with_max_entries(1, 0);
#[map]
static CHAINS: HashMap<ChainKey, ChainPages> = HashMap::with_max_entries(1, 0);
/// Remote pages since the last sample, by kind.
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(CHAIN_KINDS, 0);
#[map]
static ALLOC_CACHE: SlotCache = slot_cache();
#[map]
static HINT_CACHE: SlotCache = slot_cache();

#[btf_tracepoint(function = "mm_page_alloc")]
fn alloc_chain_tp_btf(ctx: BtfTracePointContext) -> i32 {
    let gfp: u32 = ctx.arg(2);
    if gfp & GFP_MOVABLE == 0 {
        return 0;
    }
    let Some(nodes) = NODE_TABLE.get(0) else { return 0 };
    sample_allocation(&ctx, |node| node != memory_node(nodes))
}

/// Runs for remote user pages only.
#[btf_tracepoint(function = "mm_page_alloc")]
fn alloc_chain_tail(ctx: BtfTracePointContext) -> i32 {
    sample_allocation(&ctx, |_| true)
}

#[inline(always)]
fn sample_allocation(ctx: &BtfTracePointContext, is_remote: impl FnOnce(u16) -> bool) -> i32 {
    // TP_PROTO(struct page *page, unsigned int order, gfp_t gfp_flags, int migratetype)
    let page: *const u64 = ctx.arg(0);
    let order: u32 = ctx.arg(1);
    if page.is_null() {
        return 0;
    }
    // SAFETY: `page` is a `struct page` of the kernel, not null; `flags` is its first member (userspace checks this in the
    // kernel's BTF). The verifier turns the load into one that cannot fault.
    let node = node_of(unsafe { *page });
    if node == UNKNOWN_NODE || !is_remote(node) {
        return 0;
    }
    if let Some(pages) = sample(ChainKind::Allocations, 1 << (order & 63)) {
        let slot = cached_current_slot(&ALLOC_CACHE);
        count(
            ctx,
            ChainKey { slot, kind: ChainKind::Allocations as u32, node: node.into(), user: 0, kernel: 0 },
            pages,
        );
    }
    0
}

#[fentry(function = "task_numa_fault")]
fn access_chain_fentry(ctx: FEntryContext) -> i32 {
    sample_access(&ctx, ctx.arg(1), ctx.arg(2), ctx.arg(3));
    0
}

#[kprobe(function = "task_numa_fault")]
fn access_chain_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(mem_node), Some(pages), Some(flags)) = (ctx.arg(1), ctx.arg(2), ctx.arg(3)) {
        sample_access(&ctx, mem_node, pages, flags);
    }
    0
}

#[inline(always)]
fn sample_access(ctx: &impl StackIdContext, mem_node: i32, pages: i32, flags: i32) {
    let Ok(pages) = u64::try_from(pages) else { return };
    let Some(nodes) = NODE_TABLE.get(0) else { return };
    let seen = sampled_access(nodes, mem_node, flags);
    if seen.is_local || seen.cpu_node >= NODES.load() {
        return;
    }
    let node = if seen.page_node < NODES.load() {
        seen.page_node
    } else if TWO_NODES.load() != 0 {
        1 - (seen.cpu_node & 1)
    } else {
        NO_NODE
    };
    if let Some(pages) = sample(ChainKind::Accesses, pages) {
        let slot = cached_current_slot(&HINT_CACHE);
        count(ctx, ChainKey { slot, kind: ChainKind::Accesses as u32, node, user: 0, kernel: 0 }, pages);
    }
}

/// Returns the number of pages for which the current chain stands; `None` if no sample is due.
#[inline(always)]
fn sample(kind: ChainKind, pages: u64) -> Option<u64> {
    let seen = SEEN.get_ptr_mut(kind as u32)?;
    // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
    let sum = unsafe { *seen } + pages;
    let is_due = sum >= u64::from(SAMPLE_EVERY.load());
    // SAFETY: as above.
    unsafe { *seen = if is_due { 0 } else { sum } };
    is_due.then_some(sum)
}

/// Adds pages to the current chain. `key` has no stacks yet.
#[inline(always)]
fn count(ctx: &impl StackIdContext, mut key: ChainKey, pages: u64) {
    if key.slot == OTHER_SLOT {
        return;
    }
    key.user = stack_id(ctx.get_stackid(&STACKS, u64::from(BPF_F_USER_STACK)));
    key.kernel = stack_id(ctx.get_stackid(&STACKS, 0));
    if key.user == NO_ROOM || key.kernel == NO_ROOM {
        count_lost();
    }
    if add(&key, pages) {
        return;
    }
    let pid = (bpf_get_current_pid_tgid() >> 32) as u32;
    let first = ChainPages { pages, pid, padding: 0 };
    if CHAINS.insert(&key, &first, u64::from(BPF_NOEXIST)).is_err() && !add(&key, pages) {
        count_lost();
    }
}

/// Adds pages to a chain. Returns `false` if it is not in the map.
#[inline(always)]
fn add(key: &ChainKey, pages: u64) -> bool {
    let Some(counted) = CHAINS.get_ptr_mut(key) else { return false };
    // SAFETY: the pointer is of the map's value.
    unsafe { add_shared(&raw mut (*counted).pages, pages) };
    true
}

#[inline(always)]
fn stack_id(found: Result<c_long, i32>) -> i32 {
    match found {
        Ok(id) => id as i32,
        Err(EEXIST) => NO_ROOM,
        Err(_) => NO_STACK,
    }
}

//! Which code allocates pages on other nodes, and which accesses them: call chains, sampled (`observe.callChains`).
//!
//! Not loaded unless it is asked for, so that it costs nothing where it is off.
//!
//! **What is seen.** User pages that are allocated on another node than the home node of the CPU, by the tracepoint
//! `kmem:mm_page_alloc`; and accesses to memory of another node that NUMA balancing sees, by the function `task_numa_fault`.
//! Only of workloads that hold a slot: what belongs to nobody would fill the maps.
//!
//! **Hook of allocations.** The program of `alloc.rs` knows which pages are remote, and ends with a tail call of
//! `alloc_chain_tail` for these. Where that program does not do so, `alloc_chain_tp_btf` is attached to the tracepoint beside it.
//!
//! **Sampling.** Each CPU adds up the remote pages it sees. Whenever there are SAMPLE_EVERY, the call chain of that moment
//! stands for all of them. So the pages of all chains add up to what was seen, and a huge page always counts.
//!
//! **Chains.** The kernel follows frame pointers in user space, and its own tables in the kernel. Both parts are kept once
//! in STACKS, which has a place for each by its hash: another chain with that place finds no room, as does one that is new
//! when CHAINS is full. Both are counted in LOST.
//!
//! **Races.** Counters of a chain are shared by all CPUs, with atomic additions. Two CPUs may enter a chain at once: the
//! second finds it there and adds to it.

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
    hint::access,
    lost::count_lost,
    nodes::{NODE_TABLE, NODES, home},
    page_node::node_of,
    slot_cache::{SlotCache, slot_cache},
};

/// A user page: anonymous memory and page cache. `___GFP_MOVABLE` of `linux/gfp_types.h`.
const GFP_MOVABLE: u32 = 0x08;
/// What the kernel answers where another stack has the place: `-EEXIST`.
const EEXIST: i32 = -17;

/// Remote pages for which one chain is taken.
#[unsafe(no_mangle)]
static SAMPLE_EVERY: Global<u32> = Global::new(1);
/// Whether there are two nodes, so that what is not here is there.
#[unsafe(no_mangle)]
static TWO_NODES: Global<u32> = Global::new(0);

#[map]
static STACKS: StackTrace = StackTrace::with_max_entries(1, 0);
#[map]
static CHAINS: HashMap<ChainKey, ChainPages> = HashMap::with_max_entries(1, 0);
/// Remote pages since the last chain, by kind.
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
    allocation(&ctx, |node| node != home(nodes))
}

/// Runs for remote user pages only.
#[btf_tracepoint(function = "mm_page_alloc")]
fn alloc_chain_tail(ctx: BtfTracePointContext) -> i32 {
    allocation(&ctx, |_| true)
}

#[inline(always)]
fn allocation(ctx: &BtfTracePointContext, is_remote: impl FnOnce(u16) -> bool) -> i32 {
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
    if let Some(pages) = sampled(ChainKind::Allocations, 1 << (order & 63)) {
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
    hint(&ctx, ctx.arg(1), ctx.arg(2), ctx.arg(3));
    0
}

#[kprobe(function = "task_numa_fault")]
fn access_chain_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(mem_node), Some(pages), Some(flags)) = (ctx.arg(1), ctx.arg(2), ctx.arg(3)) {
        hint(&ctx, mem_node, pages, flags);
    }
    0
}

#[inline(always)]
fn hint(ctx: &impl StackIdContext, mem_node: i32, pages: i32, flags: i32) {
    let Ok(pages) = u64::try_from(pages) else { return };
    let Some(nodes) = NODE_TABLE.get(0) else { return };
    let seen = access(nodes, mem_node, flags);
    if seen.local || seen.home >= NODES.load() {
        return;
    }
    let node = if seen.memory < NODES.load() {
        seen.memory
    } else if TWO_NODES.load() != 0 {
        1 - (seen.home & 1)
    } else {
        NO_NODE
    };
    if let Some(pages) = sampled(ChainKind::Accesses, pages) {
        let slot = cached_current_slot(&HINT_CACHE);
        count(ctx, ChainKey { slot, kind: ChainKind::Accesses as u32, node, user: 0, kernel: 0 }, pages);
    }
}

/// For how many pages the chain of this moment stands; `None` where none is to be taken yet.
#[inline(always)]
fn sampled(kind: ChainKind, pages: u64) -> Option<u64> {
    let seen = SEEN.get_ptr_mut(kind as u32)?;
    // SAFETY: this CPU is the only writer, and the program does not interrupt itself.
    let sum = unsafe { *seen } + pages;
    let is_due = sum >= u64::from(SAMPLE_EVERY.load());
    // SAFETY: as above.
    unsafe { *seen = if is_due { 0 } else { sum } };
    is_due.then_some(sum)
}

/// Adds pages to the chain of this moment. The key has no stacks yet.
#[inline(always)]
fn count(ctx: &impl StackIdContext, mut key: ChainKey, pages: u64) {
    if key.slot == OTHER_SLOT {
        return;
    }
    key.user = id(ctx.get_stackid(&STACKS, u64::from(BPF_F_USER_STACK)));
    key.kernel = id(ctx.get_stackid(&STACKS, 0));
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

/// Adds pages to a chain, if it is there.
#[inline(always)]
fn add(key: &ChainKey, pages: u64) -> bool {
    let Some(counted) = CHAINS.get_ptr_mut(key) else { return false };
    // SAFETY: the pointer is of the map's value.
    unsafe { add_shared(&raw mut (*counted).pages, pages) };
    true
}

#[inline(always)]
fn id(found: Result<c_long, i32>) -> i32 {
    match found {
        Ok(id) => id as i32,
        Err(EEXIST) => NO_ROOM,
        Err(_) => NO_STACK,
    }
}

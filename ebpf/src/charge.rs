//! Counts pages outside the guaranteed nodes where the kernel charges them to a memory cgroup, by the slot of their owner
//! and by node.
//!
//! `mm_page_alloc` shows which task asks for a page, not whose memory it becomes. Swap readahead brings in pages of other
//! cgroups; loop devices read for the cgroup of the request; khugepaged and asynchronous page faults of KVM allocate in
//! kernel threads. The kernel charges each of these pages to its owner.
//!
//! # Hook
//! The return of the function that charges user pages (mm/memcontrol.c). Userspace takes the first of these that the kernel
//! has, so no page is counted twice:
//! - `charge_memcg(folio, memcg, gfp)`: all charges pass it, those of pages that are swapped in, too. Linux 5.14 calls it
//!   `__mem_cgroup_charge`.
//! - `__mem_cgroup_charge(folio, mm, gfp)` where the compiler has inlined the former, together with
//!   `mem_cgroup_swapin_charge_folio(folio, …)`, which charges pages that are swapped in.
//! - `mem_cgroup_charge(page, mm, gfp)` before Linux 5.16. Until 5.13 it charges pages that are swapped in, too, and returns
//!   success for those that were charged before.
//!
//! # Migration
//! A page that moves to another node is no new memory of its owner: `mem_cgroup_migrate` hands the charge over, and the
//! page is not counted here. `faults.rs` counts it. Pages of a hugepage that khugepaged collapses are charged anew.
//!
//! # Owner
//! If the function has the memory cgroup as an argument, the verifier knows its type, as it does for `page->mem_cgroup` of
//! Linux 5.10. The number `memcg_data`, which replaced that, has no type for the verifier, so it is read with
//! `bpf_probe_read_kernel`. It is the address of a memory cgroup or, where object cgroups can belong to the root, of an
//! object cgroup. The cache of slots is searched by the serial number of the memory cgroup, which takes one read.
//!
//! # Task
//! The event about the first miss names the task that ran: for work on behalf of the owner, that is a kernel thread or
//! another process.
//!
//! # Concurrency
//! Only misses are counted. Each CPU has counters of its own, or several share them, and all update them atomically. Kernels with full preemption may
//! preempt tasks inside; until such a task runs again, the kernel skips the program for other tasks on that CPU, and counts
//! these runs as lost.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod ancestors;
mod cache;
mod cgroup_node;
mod cgroup_path;
mod common;
mod counters;
mod event_gate;
mod lost;
mod nodes;
mod page_node;
mod reading;
mod roots;
mod slot_cache;

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    helpers::bpf_get_smp_processor_id,
    macros::{fexit, map},
    maps::{Array, RingBuf},
    programs::FExitContext,
};
use numaward_abi::{ChargeOwner, MAX_NODES, Miss, OTHER_SLOT, Slot};

use crate::{
    ancestors::slot_of,
    cgroup_node::CgroupNode,
    cgroup_path::CGROUP_PATH,
    counters::add_at,
    nodes::NODES,
    page_node::node_of,
    reading::{read_word, slot_by_reading},
    slot_cache::{SlotCache, cached_slot, slot_cache},
};

/// A [`ChargeOwner`].
#[unsafe(no_mangle)]
static CHARGE_OWNER: Global<u32> = Global::new(0);
/// The offset of `memcg_data` or `mem_cgroup` in the page, if the owner is read from there.
#[unsafe(no_mangle)]
static MEMCG_DATA: Global<u32> = Global::new(0);
/// The offset of `obj_cgroup.memcg`.
#[unsafe(no_mangle)]
static OBJCG_MEMCG: Global<u32> = Global::new(0);
/// Offsets of `css.serial_nr` and `css.cgroup` in `struct mem_cgroup`.
#[unsafe(no_mangle)]
static MEMCG: Global<[u32; 2]> = Global::new([0; 2]);
/// The number of the flag `PG_head`.
#[unsafe(no_mangle)]
static HEAD_BIT: Global<u32> = Global::new(0);
/// The offset of the number of pages in a `struct folio` of several pages; 0 if the function takes a `struct page`.
#[unsafe(no_mangle)]
static FOLIO_PAGES: Global<u32> = Global::new(0);
/// The number of pages of all compound pages, if the function takes a `struct page`.
#[unsafe(no_mangle)]
static COMPOUND_PAGES: Global<u32> = Global::new(1);
/// The flags of pages that were charged before, all of which are set; 0 if the function never gets such pages.
#[unsafe(no_mangle)]
static CHARGED_BEFORE: Global<u64> = Global::new(0);
/// The offset of `page_type` in `struct page`, and the type of hugepages from pools in its highest byte; zeros if these are
/// not charged by the function.
#[unsafe(no_mangle)]
static HUGETLB: Global<[u32; 2]> = Global::new([0; 2]);
/// The number of shards of MISSES, and the rows of each. CPUs share them if there are fewer than CPUs.
#[unsafe(no_mangle)]
static SHARDS: Global<[u32; 2]> = Global::new([1, 0]);
/// 1 if the kernel runs a program at most once at a time on each CPU.
#[unsafe(no_mangle)]
static IS_EXCLUSIVE: Global<u32> = Global::new(0);

#[map]
static CACHE: SlotCache = slot_cache();
#[map]
static SWAPIN_CACHE: SlotCache = slot_cache();
/// Settings by slot.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);
/// Pages outside the guaranteed nodes by shard * rows + slot * NODES + node index.
#[map]
static MISSES: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Events for userspace: values of [`Miss`].
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 16, 0);

/// The function is chosen when the program is loaded. All of them have three arguments, which userspace has checked; the
/// return value follows them.
#[fexit(function = "charge_memcg")]
fn charge_fexit(ctx: FExitContext) -> i32 {
    count(&CACHE, ctx.arg(0), ctx.arg(1), ctx.arg(3));
    0
}

/// As above, with four arguments. None of them is the memory cgroup.
#[fexit(function = "mem_cgroup_swapin_charge_folio")]
fn charge_swapin_fexit(ctx: FExitContext) -> i32 {
    count(&SWAPIN_CACHE, ctx.arg(0), core::ptr::null(), ctx.arg(4));
    0
}

/// Counts a page or folio that was charged. `memcg` is the owner if the function has it as an argument.
#[inline(always)]
fn count(cache: &SlotCache, page: *const u8, memcg: *const u8, returned: u64) {
    // The value is an `int`: the upper half of the register is undefined.
    if page.is_null() || returned as u32 != 0 {
        return;
    }
    // SAFETY: `page` is a `struct page` or `struct folio`, not null; both begin with the flags (userspace checks this in
    // the kernel's BTF). The verifier turns the load into one that cannot fault.
    let flags = unsafe { *page.cast::<u64>() };
    let node = u32::from(node_of(flags));
    if node >= NODES.load() {
        return;
    }
    let slot = owner(cache, page, memcg);
    let Some(settings) = SLOTS.get(slot) else { return };
    if settings.allowed[(node / 64) as usize % (MAX_NODES / 64)] >> (node % 64) & 1 != 0 {
        return;
    }
    count_miss(page, flags, slot, node);
}

#[inline(always)]
fn count_miss(page: *const u8, flags: u64, slot: u32, node: u32) {
    let before = CHARGED_BEFORE.load();
    if before != 0 && flags & before == before {
        return;
    }
    let [page_type, hugetlb] = HUGETLB.load();
    // SAFETY: the offset is of a member of the page; see `count`.
    if hugetlb != 0 && unsafe { *page.add(page_type as usize).cast::<u32>() } >> 24 == hugetlb {
        return;
    }
    let pages = match FOLIO_PAGES.load() {
        _ if flags >> HEAD_BIT.load() & 1 == 0 => 1,
        0 => COMPOUND_PAGES.load(),
        // SAFETY: as above.
        offset => unsafe { *page.add(offset as usize).cast::<u32>() },
    };
    let [shards, rows] = SHARDS.load();
    // SAFETY: the helper takes nothing and always succeeds.
    let shard = unsafe { bpf_get_smp_processor_id() }.checked_rem(shards).unwrap_or(0);
    add_at(&MISSES, shard * rows + slot * NODES.load() + node, u64::from(pages));
    if event_gate::passes(slot) {
        report_miss(slot, node, pages);
    }
}

/// Reports pages outside the guaranteed nodes.
#[inline(never)]
fn report_miss(slot: u32, node: u32, pages: u32) {
    event_gate::report(&EVENTS, slot, |task| Miss { task, pages: u64::from(pages), node, padding: 0 });
}

/// Returns the slot of the memory cgroup to which a page is charged.
#[inline(always)]
fn owner(cache: &SlotCache, page: *const u8, memcg: *const u8) -> u32 {
    let offset = MEMCG_DATA.load() as usize;
    let kind = CHARGE_OWNER.load();
    if kind == ChargeOwner::Argument as u32 {
        return slot_of_memcg(cache, memcg);
    }
    if kind == ChargeOwner::Pointer as u32 {
        // SAFETY: the offset is of a pointer in the page; see `count`.
        return slot_of_memcg(cache, unsafe { *page.add(offset).cast() });
    }
    // SAFETY: as above, of a number.
    let data = unsafe { *page.add(offset).cast::<u64>() };
    // The lowest bits are flags, which pages of the kernel have.
    if data == 0 || data & 7 != 0 {
        return OTHER_SLOT;
    }
    let memcg =
        if kind == ChargeOwner::ObjectCgroup as u32 { read_word(data, OBJCG_MEMCG.load()) } else { data };
    let [serial, cgroup] = MEMCG.load();
    let search = || {
        let [_, _, kn, _] = CGROUP_PATH.load();
        slot_by_reading(read_word(read_word(memcg, cgroup), kn))
    };
    if IS_EXCLUSIVE.load() == 0 {
        return search();
    }
    cached_slot(cache, read_word(memcg, serial), || (search(), true))
}

/// Returns the slot of a memory cgroup.
#[inline(always)]
fn slot_of_memcg(cache: &SlotCache, memcg: *const u8) -> u32 {
    if memcg.is_null() {
        return OTHER_SLOT;
    }
    let [serial, cgroup] = MEMCG.load();
    // SAFETY: the verifier knows `memcg` as a `struct mem_cgroup`, not null, and the offsets are of its members.
    let search =
        || slot_of(unsafe { CgroupNode::of_pointer(CGROUP_PATH.load(), memcg.add(cgroup as usize)) });
    if IS_EXCLUSIVE.load() == 0 {
        return search();
    }
    // SAFETY: as above.
    let serial = unsafe { *memcg.add(serial as usize).cast::<u64>() };
    cached_slot(cache, serial, || (search(), true))
}

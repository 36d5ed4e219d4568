//! Counts hugepages that workloads are given from the pools (hugetlb), by size, by node of the page, and by whether the
//! node is promised to the workload.
//!
//! The pools are filled long before: `mm_page_alloc` reports their pages then, for the task that fills them, and nothing when
//! another gets one. So this is another hook.
//!
//! **Hook.** The return of the function that takes a page from a pool for a mapping or a file: `alloc_hugetlb_folio(vma,
//! addr, …)` (mm/hugetlb.c), before Linux 6.3 `alloc_huge_page`. It serves faults, copies on write and `fallocate(2)`;
//! not migration, which makes another page of one that was counted.
//!
//! **Size.** A file of hugetlbfs, of which each such mapping has one, has blocks of the size of its pages:
//! `vma->vm_file->f_inode->i_blkbits`.
//!
//! A hugepage takes far longer to clear than this takes to run, so counters are shared by all CPUs, with atomic additions.

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
mod nodes;
mod page_node;
mod roots;
mod slot_cache;

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    macros::{fexit, map},
    maps::Array,
    programs::FExitContext,
};
use numaward_abi::{HUGEPAGE_SIZES, HugepageCounters, MAX_NODES, Slot};

use crate::{
    counters::add_shared,
    current_cached::cached_current_slot,
    nodes::{NODE_TABLE, NODES, home},
    page_node::node_of,
    slot_cache::{SlotCache, slot_cache},
};

/// Offsets of `vm_area_struct.vm_file`, `file.f_inode` and `inode.i_blkbits`.
#[unsafe(no_mangle)]
static SIZE_PATH: Global<[u32; 3]> = Global::new([0; 3]);
/// The sizes that are counted, as powers of two; 0 for none.
#[unsafe(no_mangle)]
static SIZE_BITS: Global<[u32; HUGEPAGE_SIZES]> = Global::new([0; HUGEPAGE_SIZES]);
/// How many these are.
#[unsafe(no_mangle)]
static SIZES: Global<u32> = Global::new(1);

#[map]
static CACHE: SlotCache = slot_cache();
/// By slot.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);
/// By (slot * NODES + node index) * SIZES + the size's place in SIZE_BITS.
#[map]
static HUGEPAGES: Array<HugepageCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

#[fexit(function = "alloc_hugetlb_folio")]
fn hugepages_fexit(ctx: FExitContext) -> i32 {
    let vma: *const u8 = ctx.arg(0);
    // The function has three arguments, which userspace has checked; what it returns comes after.
    let page: *const u64 = ctx.arg(3);
    // The last 4095 addresses are errors.
    if vma.is_null() || page.is_null() || page.addr() > usize::MAX - 4095 {
        return 0;
    }
    let [file, inode, bits] = SIZE_PATH.load();
    // SAFETY: `vma` is a `struct vm_area_struct`, not null, and the offsets are of the members on the way. The verifier
    // makes these loads such that cannot fault.
    let bits = unsafe {
        let file = *vma.add(file as usize).cast::<*const u8>();
        let inode = *file.add(inode as usize).cast::<*const u8>();
        *inode.add(bits as usize)
    };
    let Some(size) = place_of(u32::from(bits)) else { return 0 };
    // SAFETY: `page` is a `struct page` or `struct folio`, neither null nor an error; both begin with the flags
    // (userspace checks this in the kernel's BTF).
    let node = u32::from(node_of(unsafe { *page }));
    let count = NODES.load();
    if node >= count {
        return 0;
    }
    let Some(nodes) = NODE_TABLE.get(0) else { return 0 };
    let is_local = node == u32::from(home(nodes));
    let slot = cached_current_slot(&CACHE);
    let Some(promise) = SLOTS.get(slot) else { return 0 };
    let is_outside = promise.allowed[(node / 64) as usize % (MAX_NODES / 64)] >> (node % 64) & 1 == 0;
    let row = (slot * count + node) * SIZES.load() + size;
    if let Some(counters) = HUGEPAGES.get_ptr_mut(row) {
        // SAFETY: the pointer is of the map's value.
        unsafe {
            let counter = if is_local { &raw mut (*counters).local } else { &raw mut (*counters).remote };
            add_shared(counter, 1);
            if is_outside {
                add_shared(&raw mut (*counters).outside, 1);
            }
        }
    }
    0
}

/// The place of a size among those that are counted.
#[inline(always)]
fn place_of(bits: u32) -> Option<u32> {
    let [first, second, third, fourth] = SIZE_BITS.load();
    match bits {
        0 => None,
        _ if bits == first => Some(0),
        _ if bits == second => Some(1),
        _ if bits == third => Some(2),
        _ if bits == fourth => Some(3),
        _ => None,
    }
}

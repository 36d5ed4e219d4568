//! Counts hugepages that workloads take from the pools (hugetlb), by size, by node, and by membership in the guaranteed
//! nodes.
//!
//! `mm_page_alloc` cannot count them: it fires when a pool is filled, for the task that fills it, and not when a task
//! takes a page from the pool.
//!
//! # Hook
//! The return of the function that takes a page from a pool for a mapping or a file: `alloc_hugetlb_folio(vma, addr,
//! …)` (mm/hugetlb.c), or `alloc_huge_page` before Linux 6.3. It serves faults, copies on write and `fallocate(2)`. It
//! does not serve migration, which replaces a page that was already counted.
//!
//! # Size
//! Each such mapping has a file of hugetlbfs with the page size as block size: `vma->vm_file->f_inode->i_blkbits`.
//!
//! # Concurrency
//! Clearing a hugepage takes far longer than this program. All CPUs share the counters and update them atomically.

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
mod reading;
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
    nodes::{NODE_TABLE, NODES, memory_node},
    page_node::node_of,
    slot_cache::{SlotCache, slot_cache},
};

/// Offsets of `vm_area_struct.vm_file`, `file.f_inode` and `inode.i_blkbits`.
#[unsafe(no_mangle)]
static SIZE_PATH: Global<[u32; 3]> = Global::new([0; 3]);
/// The counted sizes as powers of two; 0 for unused entries.
#[unsafe(no_mangle)]
static SIZE_BITS: Global<[u32; HUGEPAGE_SIZES]> = Global::new([0; HUGEPAGE_SIZES]);
/// The number of counted sizes.
#[unsafe(no_mangle)]
static SIZES: Global<u32> = Global::new(1);

#[map]
static CACHE: SlotCache = slot_cache();
/// Settings by slot.
#[map]
static SLOTS: Array<Slot> = Array::with_max_entries(1, 0);
/// Counters by (slot * NODES + node index) * SIZES + the index of the size in SIZE_BITS.
#[map]
static HUGEPAGES: Array<HugepageCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

#[fexit(function = "alloc_hugetlb_folio")]
fn hugepages_fexit(ctx: FExitContext) -> i32 {
    let vma: *const u8 = ctx.arg(0);
    // The function has three arguments, which userspace has checked; the return value follows them.
    let page: *const u64 = ctx.arg(3);
    // The last 4095 addresses are errors.
    if vma.is_null() || page.is_null() || page.addr() > usize::MAX - 4095 {
        return 0;
    }
    let [file, inode, bits] = SIZE_PATH.load();
    // SAFETY: `vma` is a `struct vm_area_struct`, not null, and the offsets are of the members on the path. The
    // verifier turns these loads into ones that cannot fault.
    let bits = unsafe {
        let file = *vma.add(file as usize).cast::<*const u8>();
        let inode = *file.add(inode as usize).cast::<*const u8>();
        *inode.add(bits as usize)
    };
    let Some(size) = size_index(u32::from(bits)) else { return 0 };
    // SAFETY: `page` is a `struct page` or `struct folio`, neither null nor an error; both begin with the flags
    // (userspace checks this in the kernel's BTF).
    let node = u32::from(node_of(unsafe { *page }));
    let count = NODES.load();
    if node >= count {
        return 0;
    }
    let Some(nodes) = NODE_TABLE.get(0) else { return 0 };
    let is_local = node == u32::from(memory_node(nodes));
    let slot = cached_current_slot(&CACHE);
    let Some(settings) = SLOTS.get(slot) else { return 0 };
    let is_outside = settings.allowed[(node / 64) as usize % (MAX_NODES / 64)] >> (node % 64) & 1 == 0;
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

/// Returns the index of a size in SIZE_BITS.
#[inline(always)]
fn size_index(bits: u32) -> Option<u32> {
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

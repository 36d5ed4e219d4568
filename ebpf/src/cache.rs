//! What the caches of cgroups have in common, which each CPU keeps. They are small and direct-mapped.

use core::arch::asm;

use aya_ebpf::{macros::map, maps::Array};
use numaward_abi::CgroupId;

/// Raised by userspace after each change of what the caches were filled from. It starts at 1, so that 0 never fits.
#[map]
pub(crate) static GENERATION: Array<u64> = Array::with_max_entries(1, 0);

/// The place of a cgroup in a cache of 2^`bits` entries. Ids are inode numbers and step by the number of files in a
/// cgroup's directory; multiplying by the golden ratio spreads such steps over the table.
#[inline(always)]
pub(crate) fn place(cgroup: CgroupId, bits: u32) -> u32 {
    (cgroup.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as u32
}

/// Reads a value before what it vouches for.
///
/// x86-64 keeps loads in order. Elsewhere a plain load is not enough, but a fetching atomic is a full barrier. Kernels
/// before Linux 5.12 refuse objects with one, whether or not it is reached.
///
/// # Safety
///
/// `word` points into a map's value.
#[inline(always)]
pub(crate) unsafe fn load_first(word: *mut u64) -> u64 {
    #[cfg(bpf_target_arch = "x86_64")]
    {
        // SAFETY: the caller's promise.
        unsafe { word.read_volatile() }
    }
    #[cfg(not(bpf_target_arch = "x86_64"))]
    {
        let mut value = 0_u64;
        // SAFETY: the caller's promise. The target has no atomic intrinsics.
        unsafe { asm!("{1} = atomic_fetch_add((u64 *)({0} + 0), {1})", in(reg) word, inout(reg) value) };
        value
    }
}

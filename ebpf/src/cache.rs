//! Common parts of the per-CPU caches of cgroups. They are small and direct-mapped.

use core::arch::asm;

use aya_ebpf::{macros::map, maps::Array};

/// The generation of ROOTS and SLOTS. Userspace raises it after each change. It starts at 1, so that a new entry, with
/// 0, is never valid.
#[map]
pub(crate) static GENERATION: Array<u64> = Array::with_max_entries(1, 0);

/// Returns the index of a cgroup in a cache of 2^`bits` entries, by its id or its serial number. Ids are inode numbers and
/// increase by the number of files in a cgroup's directory; multiplying by the golden ratio spreads such steps over the
/// table.
#[inline(always)]
pub(crate) fn cache_index(number: u64, bits: u32) -> u32 {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as u32
}

/// Loads a word before all later loads of the data that it guards.
///
/// x86-64 keeps loads in order. Other architectures need a full barrier, which an atomic fetch provides. Kernels before
/// Linux 5.12 refuse objects with such an instruction, even if it is never reached.
///
/// # Safety
///
/// `word` points into a map's value.
#[inline(always)]
pub(crate) unsafe fn load_first(word: *mut u64) -> u64 {
    #[cfg(bpf_target_arch = "x86_64")]
    {
        // SAFETY: guaranteed by the caller.
        unsafe { word.read_volatile() }
    }
    #[cfg(not(bpf_target_arch = "x86_64"))]
    {
        let mut value = 0_u64;
        // SAFETY: guaranteed by the caller. The target has no atomic intrinsics.
        unsafe { asm!("{1} = atomic_fetch_add((u64 *)({0} + 0), {1})", in(reg) word, inout(reg) value) };
        value
    }
}

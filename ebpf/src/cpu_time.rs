//! Reads the CPU time of cgroups by CPU from the kernel's own account, when userspace asks for it.
//!
//! # Source
//! The kernel adds the run time of each task to a per-CPU counter of its cgroup (`__cgroup_account_cputime` in
//! kernel/cgroup/rstat.c). `cpu.stat` shows their sum only. These programs read the counters themselves:
//! `cgroup->rstat_cpu->bstat.cputime.sum_exec_runtime`. A counter is of the tasks in the cgroup itself, without its
//! descendants, and is never reset.
//!
//! # Hook
//! None. The programs are of the type for raw tracepoints, which userspace can run by `BPF_PROG_TEST_RUN`. Nothing runs when a
//! task is switched.
//!
//! # From descriptor to counter
//! Userspace puts descriptors of cgroups' directories into CGROUPS. The kernel keeps a pointer to the cgroup there, and
//! with it a reference, so that a removed cgroup can be read until userspace takes it out. Programs cannot look up such an
//! entry, so they read it from the map's structure. A per-CPU pointer is not an address: the offset of the CPU has to be
//! added. A program on that CPU finds the offset by comparing the address and the pointer of a per-CPU value, here the one
//! in OWN.
//!
//! # Concurrency
//! Userspace runs one program at a time. The kernel disables preemption meanwhile. On 64-bit machines, a counter is read in
//! one piece.

#![no_std]
#![no_main]

mod common;

use core::ptr;

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    helpers::{bpf_get_smp_processor_id, bpf_probe_read_kernel},
    macros::{map, raw_tracepoint},
    maps::{Array, CgroupArray, PerCpuArray},
    programs::RawTracePointContext,
};
use numaward_abi::{CPU_TIME_BATCH, CpuTime};

/// The offset of the entries' pointers in `struct bpf_array`.
#[unsafe(no_mangle)]
static POINTERS: Global<u32> = Global::new(0);
/// The offset of the per-CPU pointer to the counters in `struct cgroup`.
#[unsafe(no_mangle)]
static COUNTERS: Global<u32> = Global::new(0);
/// The offset of the run time in the counters.
#[unsafe(no_mangle)]
static RUN_TIME: Global<u32> = Global::new(0);

/// The cgroups that can be read. Userspace sets the map's size.
#[map]
static CGROUPS: CgroupArray = CgroupArray::with_max_entries(1, 0);
/// The offsets of the CPUs, and the last reading. Userspace sets the map's size.
#[map]
static TIMES: Array<CpuTime> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// A value whose address on each CPU is known.
#[map]
static OWN: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Finds the offset of per-CPU data of the CPU that it runs on.
#[raw_tracepoint]
fn cpu_time_locate(_ctx: RawTracePointContext) {
    let Some(own) = OWN.get_ptr_mut(0) else { return };
    let (address, map) = (number(own, own), number(own, ptr::from_ref(&OWN)));
    let Some(pointer) = read(map + u64::from(POINTERS.load())) else { return };
    // SAFETY: the helper takes nothing and always succeeds.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    if let Some(time) = TIMES.get_ptr_mut(cpu) {
        // SAFETY: the pointer is of the map's value, and no other program runs.
        unsafe { (*time).offset = address.wrapping_sub(pointer) };
    }
}

/// Reads the time of a cgroup on [`CPU_TIME_BATCH`] CPUs. Arguments: the index in CGROUPS, and the first CPU.
#[raw_tracepoint]
fn cpu_time_read(ctx: RawTracePointContext) {
    let (index, first): (u32, u32) = (ctx.arg(0), ctx.arg(1));
    let counters = counters(index);
    for step in 0..CPU_TIME_BATCH {
        let Some(time) = TIMES.get_ptr_mut(first.wrapping_add(step)) else { return };
        // SAFETY: the pointer is of the map's value, and no other program runs.
        let time = unsafe { &mut *time };
        time.nanoseconds = match (counters, time.offset) {
            (None, _) => CpuTime::UNREADABLE,
            // Nothing has run on a CPU that was never online.
            (_, 0) => 0,
            (Some(counters), offset) => {
                let address = counters.wrapping_add(offset);
                read(address.wrapping_add(u64::from(RUN_TIME.load()))).unwrap_or(CpuTime::UNREADABLE)
            }
        };
    }
}

/// Returns the per-CPU pointer to the counters of a cgroup; `None` if there is no such cgroup.
#[inline(always)]
fn counters(index: u32) -> Option<u64> {
    let own = OWN.get_ptr_mut(0)?;
    let map = number(own, ptr::from_ref(&CGROUPS));
    let cgroup = read(map + u64::from(POINTERS.load()) + u64::from(index) * 8)?;
    if cgroup == 0 {
        return None;
    }
    read(cgroup + u64::from(COUNTERS.load()))
}

/// Returns a pointer as a number, with which the verifier permits any arithmetic.
#[inline(always)]
fn number<T>(own: *mut u64, pointer: *const T) -> u64 {
    // SAFETY: `own` points to a map's value of this CPU.
    unsafe {
        own.write_volatile(pointer as u64);
        own.read_volatile()
    }
}

#[inline(always)]
fn read(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(address as *const u64) }.ok()
}

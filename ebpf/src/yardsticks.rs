//! Programs for benchmarks, on the same hooks as the probes. One does nothing; each of the others does one thing.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod common;
mod counters;

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::{btf_tracepoint, fentry, map, tracepoint},
    maps::Array,
    programs::{BtfTracePointContext, FEntryContext, TracePointContext},
};

use crate::counters::add_at;

#[map]
static COUNTER: Array<u64> = Array::with_max_entries(1, 0);

/// The tracepoint is chosen when the program is loaded.
#[btf_tracepoint(function = "mm_page_alloc")]
fn empty_tp_btf(_ctx: BtfTracePointContext) -> i32 {
    0
}

/// Adds to a counter.
#[btf_tracepoint(function = "mm_page_alloc")]
fn counter_tp_btf(_ctx: BtfTracePointContext) -> i32 {
    add_at(&COUNTER, 0, 1);
    0
}

/// Reads the clock.
#[btf_tracepoint(function = "mm_page_alloc")]
fn clock_tp_btf(_ctx: BtfTracePointContext) -> i32 {
    // SAFETY: the helper takes nothing and always succeeds.
    let now = unsafe { bpf_ktime_get_ns() };
    // The kernel ignores the return value. The compiler does not know that, so it keeps the clock reading.
    (now >> 63) as i32
}

/// The function is chosen when the program is loaded.
#[fentry(function = "task_numa_fault")]
fn empty_fentry(_ctx: FEntryContext) -> i32 {
    0
}

#[tracepoint]
fn empty_tracepoint(_ctx: TracePointContext) -> u32 {
    0
}

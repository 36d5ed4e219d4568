//! Programs that do nothing, on the hooks of the probes: the yardstick of their cost.

#![no_std]
#![no_main]

mod common;

use aya_ebpf::{
    macros::{btf_tracepoint, fentry, tracepoint},
    programs::{BtfTracePointContext, FEntryContext, TracePointContext},
};

/// Its tracepoint is chosen when it is loaded.
#[btf_tracepoint(function = "mm_page_alloc")]
fn empty_tp_btf(_ctx: BtfTracePointContext) -> i32 {
    0
}

/// As above, its function.
#[fentry(function = "task_numa_fault")]
fn empty_fentry(_ctx: FEntryContext) -> i32 {
    0
}

#[tracepoint]
fn empty_tracepoint(_ctx: TracePointContext) -> u32 {
    0
}

//! Programs that do nothing, on the hooks of the allocation probe: the yardstick of its cost.

#![no_std]
#![no_main]

mod common;

use aya_ebpf::{
    macros::{btf_tracepoint, tracepoint},
    programs::{BtfTracePointContext, TracePointContext},
};

#[btf_tracepoint(function = "mm_page_alloc")]
fn empty_tp_btf(_ctx: BtfTracePointContext) -> i32 {
    0
}

#[tracepoint]
fn empty_tracepoint(_ctx: TracePointContext) -> u32 {
    0
}

//! Which areas of a workload's memory are accessed: `numaward regions` with `--hot`, by the kernel's monitor, and with
//! `--sampled`, by addresses that the processor samples.

mod ends;
pub(crate) mod hot;
mod maps;
pub(crate) mod sampled;
mod sys;
mod workload;

use serde::Serialize;

/// Areas in a table.
const ROWS: usize = 20;

/// How much of something is on a node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Share {
    node: u32,
    percent: f64,
}

fn percent(share: f64) -> String {
    format!("{share:.0} %")
}

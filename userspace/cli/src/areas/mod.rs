//! Areas of a workload's memory that are accessed: `numaward regions` with `--hot`, from the kernel's monitor, and with
//! `--sampled`, from addresses that the processor samples.

pub(crate) mod hot;
mod maps;
pub(crate) mod sampled;
mod sys;
mod workload;

use serde::Serialize;

/// Maximum number of areas in a table.
const MAX_TABLE_ROWS: usize = 20;

/// Share of something on a node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct NodeShare {
    node: u32,
    percent: f64,
}

fn format_percent(share: f64) -> String {
    format!("{share:.0} %")
}

/// Returns the share of a part in percent.
#[expect(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn percent_of(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64 * 100.0
}

/// Formats shares by node: `node 0 75 %, node 1 25 %`.
fn format_shares(shares: &[NodeShare]) -> String {
    let shares = shares.iter().map(|share| format!("node {} {}", share.node, format_percent(share.percent)));
    shares.collect::<Vec<_>>().join(", ")
}

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

/// The share that a part is of all, in percent.
#[expect(clippy::cast_precision_loss, reason = "a share needs no more")]
fn percent_of(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64 * 100.0
}

/// For people: `node 0 75 %, node 1 25 %`.
fn on_nodes(shares: &[Share]) -> String {
    let shares = shares.iter().map(|share| format!("node {} {}", share.node, percent(share.percent)));
    shares.collect::<Vec<_>>().join(", ")
}

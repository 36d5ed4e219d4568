//! Accesses of a workload to its memory, by area.
//!
//! | module | source |
//! |---|---|
//! | [`hot`] | the kernel's monitor of accesses (DAMON) |
//! | [`sampled`] | addresses that the processor samples (AMD: IBS, Intel: PEBS, Arm: SPE) |
//! | [`processes`] | the processes of a workload |

pub mod hot;
mod maps;
pub mod processes;
pub mod sampled;
mod sys;

use serde::Serialize;

/// Share of something on a node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NodeShare {
    pub node: u32,
    pub percent: f64,
}

/// Returns the share of a part in percent.
#[expect(clippy::cast_precision_loss, reason = "a share needs few digits")]
pub fn percent_of(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64 * 100.0
}

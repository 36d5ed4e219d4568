//! Shared types of the daemon's parts. No module here does input or output.
//!
//! - [`Guarantees`]: the guarantees of all workloads; [`Settings`]: the values that numaward writes to a cgroup.
//! - [`pod`]: names of pods and containers.
//! - [`EventReport`]: an event before it gets an id.
//! - [`snapshot`]: the figures of one scrape; [`headroom`]: the result of the guard's last check.
//! - [`verdict`]: whether guaranteed memory is on its nodes.
//! - [`accesses`]: memory accesses of workloads.
//! - [`backoff`] and [`Retry`]: waiting times between retries.
//! - [`error_chain`]: an error with its causes as text; [`FileStamp`]: detection of a changed file.
//! - [`port`]: traits by which the parts call each other; [`health`]: readiness and liveness.

#![forbid(unsafe_code)]

pub mod accesses;
mod backoff;
mod error;
mod file_stamp;
mod guarantees;
pub mod hash;
pub mod headroom;
pub mod health;
pub mod pod;
pub mod port;
mod report;
pub mod settings;
mod shared;
pub mod snapshot;
#[cfg(feature = "testing")]
pub mod testing;
pub mod verdict;

/// The target of spans for traces. Logs do not contain spans with this target.
pub const SPAN_TARGET: &str = "numaward_trace";

pub use self::{
    backoff::{Retry, backoff},
    error::error_chain,
    file_stamp::FileStamp,
    guarantees::{Guarantees, WorkloadGuarantee, placed},
    report::EventReport,
    settings::{Settings, SettingsError, ValueError, Values},
    shared::SharedMap,
};

//! The daemon's words: what its parts say to each other, as plain types.
//!
//! - [`Guarantees`] are what is promised to whom; [`Settings`] what a cgroup is to hold for it.
//! - [`pod`] names pods and containers.
//! - [`EventReport`] is an event on its way to those who read it.
//! - [`snapshot`] is what a scrape serves; [`headroom`] what the guard saw last.
//! - [`accesses`] says which node's memory workloads use.
//! - [`backoff`] and [`Retry`] say when what failed is tried again.
//! - [`error_chain`] is an error with its causes; [`FileStamp`] one version of a file.
//! - [`port`] has the traits by which parts reach each other; [`health`] says who is ready and alive.
//!
//! Nothing here does input or output.

#![forbid(unsafe_code)]

pub mod accesses;
mod backoff;
mod error;
mod file_stamp;
pub mod hash;
pub mod headroom;
pub mod health;
pub mod pod;
pub mod port;
mod promise;
mod report;
pub mod settings;
mod shared;
pub mod snapshot;
#[cfg(feature = "testing")]
pub mod testing;

/// The target of spans for traces; logs leave them out.
pub const SPAN_TARGET: &str = "numaward_trace";

pub use self::{
    backoff::{Retry, backoff},
    error::error_chain,
    file_stamp::FileStamp,
    promise::{Guarantees, WorkloadGuarantee, placed},
    report::EventReport,
    settings::{Settings, SettingsError, ValueError, Values},
    shared::SharedMap,
};

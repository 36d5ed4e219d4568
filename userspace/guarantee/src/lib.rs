//! Requests for guarantees, the durable state of the guarantees, and the client of the reconciler's thread.
//!
//! # Terms
//! - *guarantee*: the exclusive CPUs, the memory on nodes and the settings that a workload is given, with its cgroup.
//! - [`state::State`]: everything that is stored on disk: the engine's ledger, the guarantees, and the settings that
//!   were applied to cgroups and to the host.
//!
//! This crate starts no thread and applies no settings; `numaward_control` does. The daemon's servers depend only on
//! this crate, so that they need not be rebuilt after a change of the reconciler.

#![forbid(unsafe_code)]

pub mod caches;
pub mod claim;
pub mod command;
pub mod decisions;
pub mod error;
pub mod explain;
pub mod export;
pub mod import;
pub mod moving;
pub mod narrowing;
pub mod pod;
pub mod policy;
pub mod ports;
pub mod power;
pub mod private_directory;
pub mod rebuild;
pub mod reconciler;
pub mod request;
pub mod serialization_cache;
pub mod state;
pub mod weights;
pub mod xattr_backup;

//! What workloads ask for, what is promised to them, how both outlive the daemon, and the way to the thread that decides.
//!
//! Terms: a *guarantee* is a workload that holds an allocation, with its cgroup. The [`state::State`] is all that must
//! survive: the engine's ledger, the guarantees, and the settings applied to each cgroup.
//!
//! Nothing here decides when something happens, and nothing runs on its own: that is `numaward_control`. The
//! daemon's servers ask for guarantees through this crate alone, so that a change of the reconciler does not build them anew.

#![forbid(unsafe_code)]

pub mod caches;
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

//! The daemon as a library.

#![forbid(unsafe_code)]

pub mod config;
pub mod metrics;

/// This version of numaward.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

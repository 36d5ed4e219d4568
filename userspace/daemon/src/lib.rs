//! The daemon: puts the parts together, and ends them.
//!
//! Problem: on each host, see where every workload's memory is allocated and lies, promise CPUs and memory to those who
//! ask, hold it, and serve all that, with whatever this kernel and these privileges allow.
//!
//! Ways: [`service`] builds the parts, from the crates below, and ends them. [`allocations`] serves what is promised and
//! takes requests, beside what the HTTP server serves of itself. [`kubernetes`] connects them to the container runtime,
//! the kubelet and the API server. [`doctor`] says what is missing on this host.
//!
//! Invariants: no globals but the log; nothing below [`service`] reads the environment; no failure while observing ends
//! the daemon.

#![forbid(unsafe_code)]

pub mod allocations;
pub mod doctor;
pub mod kubernetes;
mod logging;
mod one_shot;
mod privileges;
mod service;
pub mod socket;

pub use self::{
    one_shot::run_one_shot,
    service::{RunError, run},
};

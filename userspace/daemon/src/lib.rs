//! The daemon: starts the parts of numaward on a host, connects and stops them.
//!
//! # Problem
//! On each host, the daemon observes where the memory of each workload is allocated, guarantees CPUs and memory on request,
//! enforces the guarantees, and serves the results. It has to make do with the features of the running kernel and with its privileges.
//!
//! # Parts
//! - `service` builds the parts, which other crates implement, and stops them.
//! - [`allocations`]: the HTTP routes of guarantees and of the reload, beside the routes of `numaward_http`.
//! - [`kubernetes`]: connections to the container runtime, the kubelet and the API server.
//! - [`doctor`]: checks of the host.
//!
//! # Invariants
//! - There is no global state but the log.
//! - Only `service` reads the environment.
//! - An error while observing does not end the daemon.

#![forbid(unsafe_code)]

pub mod allocations;
pub mod doctor;
pub mod kubernetes;
mod logging;
mod node_configuration;
mod one_shot;
mod privileges;
mod service;
pub mod socket;

pub use self::{
    one_shot::run_one_shot,
    service::{RunError, run},
};

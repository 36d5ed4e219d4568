//! The daemon as a library: configuration, observation, metrics, HTTP.
//!
//! Problem: on each host, see where every workload's memory is allocated and lies, and serve that, with
//! whatever this kernel and these privileges allow.
//!
//! Ways: [`config`] is read once. [`observe`] holds the state of the host and keeps it up to date.
//! [`metrics`] and [`http`] serve it; [`api`] is the form in which they do. [`service`] puts the parts
//! together and ends them. [`doctor`] says what this host lacks.
//!
//! Invariants: no globals but the log; nothing below [`service`] reads the environment; no failure while
//! observing ends the daemon.

#![forbid(unsafe_code)]

mod affinity;
pub mod alerts;
pub mod cluster;
pub mod doctor;
pub mod enforce;
pub mod events;
mod fault;
#[cfg(test)]
mod fixture;
pub mod guarantee;
pub mod health;
pub mod http;
pub mod kubelet;
pub mod kubernetes;
pub mod ledger;
pub mod logging;
pub mod metrics;
pub mod observe;
pub mod otlp;
mod post;
mod privileges;
pub mod service;
mod shared;
pub mod sharing;

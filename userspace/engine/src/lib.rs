//! The engine: who gets which CPUs and memory on which NUMA nodes.
//!
//! Everything here is a pure function of values: no files, no clock, no threads, no logging. A strategy is made
//! of a machine and a configuration; it reads a ledger and a request and gives a decision with the ledger
//! afterwards.
//!
//! | module | what |
//! |---|---|
//! | [`quantity`], [`request`], [`qos`] | what is asked for |
//! | [`policy`] | the configuration and its faults |
//! | [`ledger`] | what is promised |
//! | [`strategy`], [`decision`] | the interface of a strategy, and its answers |
//! | [`hint`], [`explain`] | why an answer came out as it did |
//! | [`kubelet`] | the strategy that decides as the kubelet does |
//! | [`memory_qos`] | the cgroup settings that follow for memory |
//! | [`checkpoint`] | the kubelet's state files |

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod decision;
pub mod explain;
pub mod hint;
pub mod kubelet;
pub mod ledger;
pub mod memory_qos;
pub mod policy;
pub mod qos;
pub mod quantity;
mod rebase;
pub mod request;
pub mod strategy;

pub use checkpoint::CheckpointError;
pub use decision::{Cause, Decision, Grant, Reason, Rejection, Shortfall};
pub use kubelet::Kubelet;
pub use ledger::{Allocation, Block, Ledger};
pub use policy::{PolicyConfig, StartError};
pub use qos::QosClass;
pub use quantity::Quantity;
pub use request::{ContainerName, ContainerRequest, OwnerId, Request, Resources};
pub use strategy::Strategy;

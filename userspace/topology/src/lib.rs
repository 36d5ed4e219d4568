//! The topology of the machine: NUMA nodes, distances, CPUs, cores, sockets, caches, memory and hugepages.
//!
//! [`machine`], [`set`] and [`units`] are plain types for every other crate. The readers of sysfs and procfs, and the CPUs of threads, are behind
//! the feature `sysfs`, so that crates without input and output cannot access a file.

#![deny(unsafe_code)]

#[cfg(feature = "sysfs")]
pub mod affinity;
pub mod as_text;
pub mod builder;
pub mod kernel;
pub mod machine;
pub mod set;
#[cfg(feature = "sysfs")]
pub mod sysfs;
pub mod units;

pub use builder::MachineBuilder;
pub use kernel::{KernelFeature, KernelRelease};
pub use machine::{CacheId, CoreId, Cpu, HugepagePool, Machine, NumaNode, SocketId};
pub use set::{CpuId, CpuSet, NodeId, NodeSet};
pub use units::{Bytes, HugepageSize, ZoneKind};

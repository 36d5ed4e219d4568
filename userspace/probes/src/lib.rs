//! Loads the eBPF probes, attaches them, and reads their counters.
//!
//! # Slots
//! Counters are kept per *slot*: a number that a workload holds from [`Probes::register`] to [`Probes::release`]. A
//! page is booked to the deepest registered cgroup among the allocating task's cgroup and its ancestors, or to
//! [`AllocationSnapshot::other`] if none of them is registered.
//!
//! # Errors
//! No error is fatal. A probe that cannot be attached is reported as [`Mode::Absent`] with its reason, and calls that
//! need it do nothing: registering still works, and counters are empty.
//!
//! # Privileges
//! [`Probes::load`] needs `CAP_BPF` and `CAP_PERFMON` (for the classic tracepoint `CAP_SYS_ADMIN`, if
//! `kernel.perf_event_paranoid` is above 2). It opens all file descriptors that are needed later, so everything except
//! [`stats_window`] works after the privileges are dropped. On older kernels `CAP_BPF` has to stay, see
//! [`Probes::needs_cap_bpf`].

#![deny(unsafe_code)]

mod activity;
mod alloc;
mod btf;
mod chains;
mod charge;
mod costs;
mod counter_maps;
mod cpu_time;
mod duty;
mod error;
mod event;
mod event_gate;
mod explain;
mod family;
mod hardware;
mod hugepages;
mod intruders;
mod kernel;
pub mod kernel_features;
mod loader;
mod maps;
mod nodes;
mod objects;
mod options;
pub mod pmu;
mod probes;
mod report;
mod rows;
mod secondary;
mod self_check;
mod slots;
mod sys;
mod tables;
#[cfg(feature = "testing")]
pub mod testing;
mod tracefs;
mod types;

pub use activity::{
    Activity, DramAccesses, MIGRATION_REASONS, MigratedPages, NodeAccesses, NodeHugepages,
    OOM_CONSTRAINT_NAMES, ScannedPages, Stalls,
};
pub use chains::{CallChain, Stack};
pub use costs::CostReader;
pub use counter_maps::{ActivityCounters, AllocationCounters, CounterMaps};
pub use cpu_time::{CgroupPlace, CpuTimeReader};
pub use duty::DutyCycle;
pub use error::{
    CpuTimeError, DutyError, MapAccessError, RefreshError, RegisterError, SlotError, StatsError,
};
pub use event::{Incident, ProbeEvent};
pub use intruders::{CpuUsage, Intruder, IntruderClass};
pub use nodes::{NoSections, nearest_memory_node};
pub use numaward_abi::{CgroupId, ChainKind};
pub use options::{ChainOptions, DEFAULT_SLOTS, ProbeOptions, TestOverrides};
pub use probes::{Probes, stats_window};
pub use report::{MapUsage, Mode, Obstacle, Probe, ProbeReport, ProbeStats, SelfCheck};
pub use slots::SlotHolders;
pub use sys::trim_heap;
pub use types::{AllocationSnapshot, Counters, NodeCounters, Pages, SlotId, SlotMap, UnattributedPages};

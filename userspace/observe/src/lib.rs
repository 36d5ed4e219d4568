//! Observation of this host: its machine, its workloads, and the counts of the probes.
//!
//! One [`Observer`] holds the state, and threads keep it up to date ([`spawn`]). One follows the cgroups and the
//! machine. Another reads each workload's resident memory by node while there are requests for it. A third keeps the
//! history, and the guard checks whether the nodes can keep their guarantees. Scrapes and the API read the probes'
//! counters directly and all other figures from memory.
//!
//! Code that assigns CPUs and memory must not wait for these threads, because a container waits for it. Therefore no
//! lock is held while files are read, except for a few in `/proc/self` (see [`Observer`]); the probes and the state
//! have a lock each; and long operations work on copies of the state, which share unchanged parts.
//!
//! No failure here ends the daemon. A failure is logged once, listed by `/api/v1/status`, and the operation is tried
//! again.

#![forbid(unsafe_code)]

mod accesses;
mod activity;
mod affinity;
mod conditions;
mod container_names;
mod coverage;
mod cpu_time;
mod cpus;
mod demand;
mod documents;
mod estimate;
pub mod events;
mod exclusive;
mod follow;
mod foreign;
mod guarantee_figures;
mod guard;
mod headroom;
mod history;
mod history_worker;
mod hotplug;
mod hugepages;
mod inspection;
mod intrusions;
mod load;
mod naming;
mod node_memory;
mod observer;
mod oom_kills;
mod page_size;
mod part;
mod ports;
mod probe_costs;
mod probe_events;
mod probing;
mod process;
mod reading;
mod regions;
mod registry;
mod residency;
mod sampling;
mod shares;
mod slot_policy;
mod slots;
mod small_map;
mod snapshot;
mod stacks;
mod state;
mod table;
mod usage;

pub use self::{
    follow::{CgroupSource, Latches, spawn},
    foreign::ForeignGuarantees,
    inspection::InspectError,
    observer::Observer,
    part::DaemonPart,
};
#[cfg(feature = "testing")]
pub use self::{
    regions::regions_of,
    stacks::{code_mappings, function_names},
};

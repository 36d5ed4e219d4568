//! What this host does: its machine, its workloads, and what the probes count.
//!
//! One [`Observer`] holds the state; threads keep it up to date ([`spawn`]): one follows the cgroups and
//! the machine, another reads where each workload's memory lies, but only while somebody asks, and the guard looks
//! whether the nodes can keep what is promised on them. Scrapes
//! and the API read the probes' counters at once and the rest from memory.
//!
//! What assigns CPUs and memory must not wait for any of them, as a container waits for it. So no lock is held
//! while files are read, but for a few in `/proc/self` ([`Observer`] says which); the probes and the books have a lock
//! each; and what takes time works on copies of the books, which share what did not change since.
//!
//! Nothing here ends the daemon. What does not work is logged once, listed by `/api/v1/status`, and
//! tried again.

#![forbid(unsafe_code)]

mod accesses;
mod activity;
mod affinity;
mod conditions;
mod cpus;
mod documents;
mod estimate;
pub mod events;
mod exclusive;
mod follow;
mod foreign;
mod guard;
mod headroom;
mod history;
mod hotplug;
mod hugepages;
mod inside;
mod intrusions;
mod load;
mod naming;
mod observer;
mod part;
mod ports;
mod probe_costs;
mod probe_events;
mod probing;
mod process;
mod reading;
mod regions;
mod remember;
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

pub use self::{
    follow::{CgroupSource, Latches, spawn},
    foreign::ForeignPromises,
    inside::NotInside,
    observer::Observer,
    part::Part,
};
#[cfg(feature = "testing")]
pub use self::{regions::regions_of, stacks::function_names};

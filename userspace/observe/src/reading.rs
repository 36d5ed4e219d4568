//! Reading of the probes' maps together with a matching copy of the state.
//!
//! # Problem
//! Scrapes and API requests are served by threads of low priority. If such a thread held a lock that an admission
//! needs while it reads the maps, the admission would wait behind all other readers (priority inversion).
//!
//! # Algorithm
//! The maps are read without a lock. Then the state is copied, which clones a few `Arc`s under both locks. Slots that
//! were reassigned in between are ignored when the counters are decoded ([`SlotHolders`]), because the copied state
//! contains the last counts of their former holders.

use std::sync::Arc;

use numaward_model::Guarantees;
use numaward_probes::{
    self as probes, ActivityCounters, AllocationCounters, CounterMaps, NodeAccesses, Probe, SlotId,
};
use numaward_topology::Machine;

use crate::{
    activity::{ActivityCounts, AttachedProbes},
    part::{DaemonPart, Health},
    registry::{StateSnapshot, WorkloadRegistry},
    table::Table,
};

/// Decoded counters of all probes, with the state to which they belong.
#[derive(Debug)]
pub(crate) struct CounterReading {
    pub(crate) machine: Arc<Machine>,
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) guarantees: Arc<Guarantees>,
    /// Counters of allocations; `None` if the allocation probe is absent or could not be read.
    pub(crate) counted: Option<probes::AllocationSnapshot>,
    /// Counters of all other probes.
    pub(crate) activity_counts: ActivityCounts,
    pub(crate) attached: Arc<AttachedProbes>,
}

impl CounterReading {
    /// Reads each map once.
    pub(crate) fn take(registry: &WorkloadRegistry, health: &Health) -> Self {
        let maps = registry.probing().probes.counter_maps();
        let (allocations, activity) = (read_allocations(&maps, health), read_activity(&maps, health));
        let StateSnapshot { table, holders, machine, guarantees, attached } = registry.snapshot();
        let (slots, other) = activity.decode(&holders);
        Self {
            machine,
            table,
            guarantees,
            counted: allocations.map(|counters| counters.decode(&holders)),
            activity_counts: ActivityCounts { slots, other },
            attached,
        }
    }

    /// Returns the accesses of all workloads together; `None` if the probe that samples them is absent.
    pub(crate) fn accesses(&self) -> Option<Vec<NodeAccesses>> {
        self.attached.has(Probe::Hint).then(|| self.activity_counts.accesses(&self.table))
    }
}

/// Reads the counters of allocations. Returns `None` if the probe is absent or reading fails.
pub(crate) fn read_allocations(maps: &CounterMaps, health: &Health) -> Option<AllocationCounters> {
    health.note_result(DaemonPart::Counters, maps.allocations()).flatten()
}

/// Reads the counters of all other probes. Returns empty counters if that fails.
pub(crate) fn read_activity(maps: &CounterMaps, health: &Health) -> ActivityCounters {
    health.note_result(DaemonPart::Activity, maps.activity()).unwrap_or_default()
}

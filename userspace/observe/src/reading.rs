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
    self as probes, ActivityCounters, AllocationCounters, CounterMaps, NodeAccesses, Probe, SlotHolders,
    SlotId,
};
use numaward_topology::Machine;

use crate::{
    activity::{ActivityCounts, AttachedProbes},
    observer::Observer,
    part::DaemonPart,
    table::Table,
};

/// Consistent copy of the workloads and of the holders of the probes' slots.
pub(crate) struct StateSnapshot {
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) holders: SlotHolders,
    machine: Arc<Machine>,
    guarantees: Arc<Guarantees>,
    attached: Arc<AttachedProbes>,
}

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

impl Observer {
    /// Reads each map once.
    pub(crate) fn read(&self) -> CounterReading {
        let maps = self.probing().probes.counter_maps();
        let (allocations, activity) = (self.read_allocations(&maps), self.read_activity(&maps));
        let StateSnapshot { table, holders, machine, guarantees, attached } = self.state_snapshot();
        let (slots, other) = activity.decode(&holders);
        CounterReading {
            machine,
            table,
            guarantees,
            counted: allocations.map(|counters| counters.decode(&holders)),
            activity_counts: ActivityCounts { slots, other },
            attached,
        }
    }

    /// Reads the counters of allocations. Returns `None` if the probe is absent or reading fails.
    pub(crate) fn read_allocations(&self, maps: &CounterMaps) -> Option<AllocationCounters> {
        self.health.note_result(DaemonPart::Counters, maps.allocations()).flatten()
    }

    /// Reads the counters of all other probes. Returns empty counters if that fails.
    pub(crate) fn read_activity(&self, maps: &CounterMaps) -> ActivityCounters {
        self.health.note_result(DaemonPart::Activity, maps.activity()).unwrap_or_default()
    }

    /// Copies the current state. Counters must be read before this call.
    pub(crate) fn state_snapshot(&self) -> StateSnapshot {
        let probing = self.probing();
        let state = self.lock();
        StateSnapshot {
            table: state.table.clone(),
            holders: probing.probes.holders(),
            machine: self.machine(),
            guarantees: state.guarantees.clone(),
            attached: probing.attached.clone(),
        }
    }
}

impl CounterReading {
    /// Returns the accesses of all workloads together; `None` if the probe that samples them is absent.
    pub(crate) fn accesses(&self) -> Option<Vec<NodeAccesses>> {
        self.attached.has(Probe::Hint).then(|| self.activity_counts.accesses(&self.table))
    }
}

//! One reading of the probes' maps, with the books that fit it.
//!
//! # Problem
//! Clients that read are served by threads of low priority. If one of them held a lock that an admission needs while it reads the maps,
//! the admission would wait until all other readers have had their turn (priority inversion).
//!
//! # Algorithm
//! The maps are read without a lock, then the books are taken, which clones a few `Arc`s under both locks. Slots that changed hands in
//! between are ignored when the counters are decoded ([`SlotHolders`]): the books have the last counts of their former holders.

use std::sync::Arc;

use numaward_model::Guarantees;
use numaward_probes::{
    self as probes, ActivityCounters, AllocationCounters, CounterMaps, NodeAccesses, Probe, SlotHolders,
    SlotId,
};
use numaward_topology::Machine;

use crate::{
    activity::{Attached, Counted},
    observer::Observer,
    part::DaemonPart,
    table::Table,
};

/// The workloads and the holders of the probes' slots, of one instant.
pub(crate) struct Books {
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) holders: SlotHolders,
    machine: Arc<Machine>,
    promises: Arc<Guarantees>,
    attached: Arc<Attached>,
}

/// A decoded reading.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) machine: Arc<Machine>,
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) promises: Arc<Guarantees>,
    /// The counters of allocations; `None` without that probe.
    pub(crate) counted: Option<probes::AllocationSnapshot>,
    /// The counters of all other probes.
    pub(crate) done: Counted,
    pub(crate) attached: Arc<Attached>,
}

impl Observer {
    /// Reads each map once.
    pub(crate) fn read(&self) -> Read {
        let maps = self.probing().probes.counter_maps();
        let (allocations, activity) = (self.read_allocations(&maps), self.read_activity(&maps));
        let Books { table, holders, machine, promises, attached } = self.books();
        let (slots, other) = activity.decode(&holders);
        Read {
            machine,
            table,
            promises,
            counted: allocations.map(|counters| counters.decode(&holders)),
            done: Counted { slots, other },
            attached,
        }
    }

    /// Reads the counters of allocations; `None` without that probe, and if that fails.
    pub(crate) fn read_allocations(&self, maps: &CounterMaps) -> Option<AllocationCounters> {
        self.health.noted(DaemonPart::Counters, maps.allocations()).flatten()
    }

    /// Reads the counters of all other probes; none if that fails.
    pub(crate) fn read_activity(&self, maps: &CounterMaps) -> ActivityCounters {
        self.health.noted(DaemonPart::Activity, maps.activity()).unwrap_or_default()
    }

    /// The books as they are now. Counters that fit them were read before.
    pub(crate) fn books(&self) -> Books {
        let probing = self.probing();
        let state = self.lock();
        Books {
            table: state.table.clone(),
            holders: probing.probes.holders(),
            machine: self.machine(),
            promises: state.promises.clone(),
            attached: probing.attached.clone(),
        }
    }
}

impl Read {
    /// The accesses of all workloads together; `None` where no probe samples.
    pub(crate) fn accesses(&self) -> Option<Vec<NodeAccesses>> {
        self.attached.has(Probe::Hint).then(|| self.done.accesses(&self.table))
    }
}

//! One reading of the probes' maps, with the books of the same instant.

use std::sync::Arc;

use numaward_model::Promises;
use numaward_probes::{self as probes, NodeAccesses, Probe, SlotId};
use numaward_topology::Machine;

use crate::{
    activity::{Attached, Counted},
    observer::Observer,
    table::Table,
};

/// What was read. Working on it holds no lock.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) machine: Arc<Machine>,
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) promises: Arc<Promises>,
    /// What was allocated; `None` where no probe counts that.
    pub(crate) counted: Option<probes::Snapshot>,
    /// What workloads did apart from allocating.
    pub(crate) done: Counted,
    pub(crate) attached: Arc<Attached>,
}

impl Observer {
    /// Reads each map once. Slots change hands under both locks only, so the books fit the counters. An admission needs the locks too:
    /// what can be done later is done without them.
    pub(crate) fn read(&self) -> Read {
        let probing = self.probing();
        let (counted, activity) = (probing.counters(), probing.activity());
        let state = self.lock();
        let (machine, table, promises) = (self.machine(), state.table.clone(), state.promises.clone());
        drop(state);
        let attached = probing.attached.clone();
        drop(probing);
        let (slots, other) = activity.decode();
        Read { machine, table, promises, counted, done: Counted { slots, other }, attached }
    }
}

impl Read {
    /// The accesses of all workloads together; `None` where no probe samples.
    pub(crate) fn accesses(&self) -> Option<Vec<NodeAccesses>> {
        self.attached.has(Probe::Hint).then(|| self.done.accesses(&self.table))
    }
}

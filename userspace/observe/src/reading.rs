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
    /// Reads each map once. Slots change hands under both locks only, so the books fit the counters.
    pub(crate) fn read(&self) -> Read {
        let probing = self.probing();
        let counted = probing.counters();
        let (slots, other) = probing.activity();
        let state = self.lock();
        Read {
            machine: self.machine(),
            table: state.table.clone(),
            promises: state.promises.clone(),
            counted,
            done: Counted { slots, other },
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

//! A copy of the probes' maps.

use std::sync::Arc;

use numaward_model::Promises;
use numaward_probes::{ActivityCounters, SlotId, Snapshot};
use numaward_topology::Machine;

use crate::{activity::Attached, table::Table};

/// The maps, and the books of the same instant.
#[derive(Debug)]
pub(crate) struct MapCopy {
    pub(crate) machine: Arc<Machine>,
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) promises: Arc<Promises>,
    /// `None` without the probe of allocations.
    pub(crate) counted: Option<Arc<Snapshot>>,
    pub(crate) activity: ActivityCounters,
    pub(crate) attached: Arc<Attached>,
}

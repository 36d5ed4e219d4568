//! Conversion of the probes' pages to bytes.

use numaward_model::snapshot::{AllocatedFigures, UnattributedFigures};
use numaward_probes::{AllocationSnapshot, Counters, NodeCounters, Pages};
use numaward_topology::{Bytes, NodeId};

/// Size of a base page in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageSize(pub(crate) u64);

impl PageSize {
    /// Returns the page size of the running kernel.
    pub(crate) fn of_kernel() -> Self {
        Self(rustix::param::page_size() as u64)
    }

    /// Converts pages to bytes; saturates, so that a counter does not decrease.
    pub(crate) fn bytes_of(self, pages: Pages) -> Bytes {
        Bytes(pages.0.saturating_mul(self.0))
    }

    /// Converts the counters of a single node.
    pub(crate) fn allocated(self, counters: Option<&Counters>) -> AllocatedFigures {
        let counters = counters.copied().unwrap_or_default();
        AllocatedFigures {
            local: self.bytes_of(counters.user_local),
            remote: self.bytes_of(counters.user_remote),
            kernel: self.bytes_of(counters.kernel),
        }
    }

    /// Converts counters in the order of `nodes`.
    pub(crate) fn allocated_by_node(
        self,
        nodes: &[NodeId],
        counters: &NodeCounters,
    ) -> Vec<AllocatedFigures> {
        nodes.iter().map(|&node| self.allocated(counters.get(node))).collect()
    }

    /// Converts the pages that are booked to no workload, in the order of `nodes`.
    pub(crate) fn unattributed_by_node(
        self,
        nodes: &[NodeId],
        counted: &AllocationSnapshot,
    ) -> Vec<UnattributedFigures> {
        let figures = |node: &NodeId| {
            let found = counted.unattributed.iter().find(|(of, _)| of == node);
            let pages = found.map(|(_, pages)| *pages).unwrap_or_default();
            UnattributedFigures { atomic: self.bytes_of(pages.atomic), reclaim: self.bytes_of(pages.reclaim) }
        };
        nodes.iter().map(figures).collect()
    }
}

//! Slots, pages, and their counters.

use numaward_topology::NodeId;

/// The index of a registered workload in the probes' maps. It is reused after
/// [`Probes::release`](crate::Probes::release).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub(crate) u32);

/// A number of base pages (4 KiB on `x86_64`; `sysconf(_SC_PAGESIZE)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pages(pub u64);

/// Pages allocated on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// User pages (anonymous memory and page cache: movable ones) allocated by CPUs with this memory node.
    pub user_local: Pages,
    /// User pages allocated by other CPUs.
    pub user_remote: Pages,
    /// The part of `user_local` and `user_remote` outside the guaranteed nodes of the workload.
    pub user_outside: Pages,
    /// Pages for the kernel's own use (page tables, slab, buffers). This is a lower bound: bulk allocations pass no
    /// tracepoint, and [`UnattributedPages`] are not included.
    pub kernel: Pages,
}

impl Counters {
    fn plus(self, more: Self) -> Self {
        let plus = |a: Pages, b: Pages| Pages(a.0.saturating_add(b.0));
        Self {
            user_local: plus(self.user_local, more.user_local),
            user_remote: plus(self.user_remote, more.user_remote),
            user_outside: plus(self.user_outside, more.user_outside),
            kernel: plus(self.kernel, more.kernel),
        }
    }
}

/// [`Counters`] by the node of the pages, in the order of nodes. They are stored contiguously, because there are few
/// nodes and thousands of these values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCounters(Vec<(NodeId, Counters)>);

impl NodeCounters {
    /// Creates empty counters.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns true if there is no node.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the counters of one node.
    pub fn get(&self, node: NodeId) -> Option<&Counters> {
        self.0.iter().find(|(of, _)| *of == node).map(|(_, counters)| counters)
    }

    /// Returns the counters of each node.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Counters)> {
        self.0.iter().map(|(node, counters)| (*node, counters))
    }

    pub fn values(&self) -> impl Iterator<Item = &Counters> {
        self.0.iter().map(|(_, counters)| counters)
    }

    /// Adds other counters. Sums saturate at the highest 64-bit number.
    pub fn add(&mut self, more: &Self) {
        for &(node, more) in &more.0 {
            match self.0.binary_search_by_key(&node, |(of, _)| *of) {
                Ok(place) => self.0[place].1 = self.0[place].1.plus(more),
                Err(place) => self.0.insert(place, (node, more)),
            }
        }
    }
}

impl FromIterator<(NodeId, Counters)> for NodeCounters {
    fn from_iter<T: IntoIterator<Item = (NodeId, Counters)>>(counters: T) -> Self {
        let mut counters: Vec<_> = counters.into_iter().collect();
        counters.sort_by_key(|(node, _)| *node);
        Self(counters)
    }
}

/// Pages on one node that are booked to no workload, because the allocating task does not use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnattributedPages {
    /// Pages allocated without permission to sleep: by interrupts, and by tasks that must not wait.
    pub atomic: Pages,
    /// Pages allocated by tasks that free memory, for pages of any workload that they move or compress.
    pub reclaim: Pages,
}

/// A value for each registered workload, stored at the index of its slot, because slot numbers are small and dense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMap<T>(Vec<Option<T>>);

impl<T> SlotMap<T> {
    /// Returns the value of one slot.
    pub fn get(&self, slot: SlotId) -> Option<&T> {
        self.0.get(slot.0 as usize)?.as_ref()
    }

    /// Returns all values in the order of slots.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten()
    }

    /// Creates a map from values of slots below `end`, in ascending order.
    pub(crate) fn new(end: u32, values: impl Iterator<Item = (u32, T)>) -> Self {
        let mut all = Vec::with_capacity(end as usize);
        for (slot, value) in values {
            all.resize_with(slot as usize, || None);
            all.push(Some(value));
        }
        Self(all)
    }
}

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// All counters at (nearly) one instant. No counter decreases while its slot is registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationSnapshot {
    /// Pages allocated by each registered workload since it was registered.
    pub slots: SlotMap<NodeCounters>,
    /// Pages allocated by all other tasks since the probe was attached.
    pub other: NodeCounters,
    /// Pages that are booked to no workload since the probe was attached, by node.
    pub unattributed: Vec<(NodeId, UnattributedPages)>,
    /// Pages on unknown nodes, of all tasks: on a node or in a memory block that was added after
    /// [`Probes::load`](crate::Probes::load), until [`Probes::refresh`](crate::Probes::refresh). The other counters do
    /// not include them.
    pub unknown_node: Pages,
    /// All pages that the probe has seen since it was attached, those of released workloads included; `None` with a duty
    /// cycle.
    pub total: Option<Pages>,
}

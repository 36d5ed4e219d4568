//! Topology hints: the sets of NUMA nodes that can serve a resource.
//!
//! For each resource of a request, a *provider* (CPUs, memory, devices) lists the sets of nodes that can serve it, in
//! a fixed order, and marks the preferred ones. A list can have 2ⁿ entries for n nodes, so hints are packed into bit
//! masks. A bit stands for the *position* of a node among the machine's nodes in ascending order of ids. This keeps
//! the order of the sets and allows any node ids.

use std::sync::Arc;

use numaward_topology::{NodeId, NodeSet, ZoneKind};

use crate::request::ContainerRequest;

/// Set of nodes; bit n stands for the node at position n.
pub(crate) type Mask = u32;

/// Bit of a packed hint that marks it as preferred.
const PREFERRED: u32 = 1 << 31;

/// Mapping between node ids and positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeIndex {
    ids: Arc<[NodeId]>,
}

impl NodeIndex {
    /// Takes at most 31 ids in ascending order: one bit of a packed hint is reserved.
    pub(crate) fn new(ids: impl IntoIterator<Item = NodeId>) -> Self {
        Self { ids: ids.into_iter().collect() }
    }

    /// Returns all ids in ascending order.
    pub(crate) fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// Returns the mask of all nodes.
    pub(crate) fn all(&self) -> Mask {
        (0..self.ids.len()).fold(0, |mask, position| mask | 1 << position)
    }

    pub(crate) fn position(&self, id: NodeId) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// Returns the mask of a set. Nodes that the machine does not have are ignored.
    pub(crate) fn mask(&self, nodes: &NodeSet) -> Mask {
        nodes.iter().filter_map(|id| self.position(id)).fold(0, |mask, position| mask | 1 << position)
    }

    /// Returns the set of nodes of a mask.
    pub(crate) fn set(&self, mask: Mask) -> NodeSet {
        positions(mask).filter_map(|position| self.ids.get(position).copied()).collect()
    }

    /// Returns the node ids of a mask in ascending order.
    pub(crate) fn nodes(&self, mask: Mask) -> impl Iterator<Item = NodeId> {
        positions(mask).filter_map(|position| self.ids.get(position).copied())
    }
}

/// Returns the positions in a mask in ascending order.
pub(crate) fn positions(mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::successors((mask != 0).then_some(mask), |rest| {
        let next = rest & (rest - 1);
        (next != 0).then_some(next)
    })
    .map(|rest| rest.trailing_zeros() as usize)
}

/// Visits all non-empty subsets: smaller sets first, sets of equal size in lexicographic order.
pub(crate) fn for_each_subset(of: Mask, mut visit: impl FnMut(Mask)) {
    fn extend(set: Mask, rest: Mask, missing: u32, visit: &mut impl FnMut(Mask)) {
        if missing == 0 {
            return visit(set);
        }
        let mut rest = rest;
        while rest.count_ones() >= missing {
            let lowest = rest & rest.wrapping_neg();
            rest &= !lowest;
            extend(set | lowest, rest, missing - 1, visit);
        }
    }
    for size in 1..=of.count_ones() {
        extend(0, of, size, &mut visit);
    }
}

/// Resource for which hints are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Resource {
    /// Exclusive CPUs.
    #[display("cpu")]
    Cpu,
    /// Memory of one kind.
    Memory(ZoneKind),
    #[display("devices")]
    Devices,
    /// Nodes that the request prefers.
    #[display("preferred nodes")]
    PreferredNodes,
}

/// Set of nodes that can serve a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// `None` if all nodes are equally good.
    pub affinity: Option<NodeSet>,
    /// True if no smaller set can serve the resource.
    pub preferred: bool,
}

/// Hints for one resource, in the order of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintList {
    nodes: NodeIndex,
    packed: Arc<[u32]>,
}

impl HintList {
    /// Packs masks. Masks of `preferred_size` nodes are preferred, and masks for which `also` returns true.
    pub(crate) fn new(
        nodes: &NodeIndex,
        mut masks: Vec<Mask>,
        preferred_size: u32,
        also: impl Fn(Mask) -> bool,
    ) -> Self {
        for mask in &mut masks {
            if mask.count_ones() == preferred_size || also(*mask) {
                *mask |= PREFERRED;
            }
        }
        Self { nodes: nodes.clone(), packed: masks.into() }
    }

    /// Returns the number of hints. Zero means that the resource cannot be served.
    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// Returns whether the resource cannot be served.
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Hint> + '_ {
        self.masks().map(|(mask, preferred)| Hint { affinity: Some(self.nodes.set(mask)), preferred })
    }

    /// Returns the hints as masks, each with whether it is preferred.
    pub(crate) fn masks(&self) -> impl Iterator<Item = (Mask, bool)> + '_ {
        self.packed.iter().map(|packed| (packed & !PREFERRED, packed & PREFERRED != 0))
    }
}

/// Containers for which hints are requested.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope<'a> {
    Container(&'a ContainerRequest),
    /// All containers of the owner together.
    Owner,
}

/// Hints of one provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderHints {
    /// The request needs nothing of this provider, so any nodes are acceptable.
    NoPreference,
    /// No set of nodes can serve the request. The kubelet treats this like `NoPreference`.
    NothingFeasible,
    /// Hints by resource. An empty list means that the resource cannot be served.
    ByResource(Vec<(Resource, HintList)>),
}

/// Source of hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display(rename_all = "lowercase")]
pub enum Provider {
    /// Exclusive CPUs (the kubelet's CPU manager).
    Cpus,
    /// Memory and huge pages (the kubelet's memory manager).
    Memory,
    /// NUMA nodes of a container's devices.
    Devices,
    /// NUMA nodes that a container prefers.
    #[display("preferred nodes")]
    PreferredNodes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_are_ordered_by_size() {
        let mut seen = Vec::new();
        for_each_subset(0b1101, |mask| seen.push(mask));
        assert_eq!(seen, [0b0001, 0b0100, 0b1000, 0b0101, 0b1001, 0b1100, 0b1101]);
        for_each_subset(0, |_| panic!("the empty set is not visited"));
    }

    #[test]
    fn supports_node_ids_beyond_64() {
        let nodes = NodeIndex::new([NodeId(3), NodeId(64), NodeId(250)]);
        let set: NodeSet = "3,250".parse().unwrap();
        assert_eq!(nodes.mask(&set), 0b101);
        assert_eq!(nodes.set(0b101), set);
        assert_eq!(nodes.all(), 0b111);
        let list = HintList::new(&nodes, vec![0b1, 0b101], 1, |_| false);
        let hints: Vec<_> =
            list.iter().map(|hint| (hint.affinity.unwrap().to_string(), hint.preferred)).collect();
        assert_eq!(hints, [("3".to_owned(), true), ("3,250".to_owned(), false)]);
    }
}

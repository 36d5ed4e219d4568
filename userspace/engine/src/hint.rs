//! Hints: on which sets of nodes a resource could be served.
//!
//! A *provider* (CPUs, memory, later devices) gives for each resource of a request the sets of nodes on which
//! it could serve it, in a fixed order, and marks those it prefers. The lists can have 2ⁿ entries for n nodes,
//! so they are kept packed: a node is a bit at its *position* among the machine's nodes in ascending order of
//! ids, which keeps the order of sets and sets no limit on ids.

use std::sync::Arc;

use numaward_topology::{NodeId, NodeSet, ZoneKind};

use crate::request::ContainerRequest;

/// A set of nodes by position.
pub(crate) type Mask = u32;

/// In a packed hint: whether it is preferred.
const PREFERRED: u32 = 1 << 31;

/// The nodes of a machine by position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeIndex {
    ids: Arc<[NodeId]>,
}

impl NodeIndex {
    /// Takes ids in ascending order, at most 31: one bit of a packed hint is no node.
    pub(crate) fn new(ids: impl IntoIterator<Item = NodeId>) -> Self {
        Self { ids: ids.into_iter().collect() }
    }

    /// All ids, in ascending order.
    pub(crate) fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// All nodes.
    pub(crate) fn all(&self) -> Mask {
        (0..self.ids.len()).fold(0, |mask, position| mask | 1 << position)
    }

    /// The position of a node.
    pub(crate) fn position(&self, id: NodeId) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// The mask of a set; nodes that the machine does not have are ignored.
    pub(crate) fn mask(&self, nodes: &NodeSet) -> Mask {
        nodes.iter().filter_map(|id| self.position(id)).fold(0, |mask, position| mask | 1 << position)
    }

    /// The set of a mask.
    pub(crate) fn set(&self, mask: Mask) -> NodeSet {
        positions(mask).filter_map(|position| self.ids.get(position).copied()).collect()
    }

    /// The ids of a mask, in ascending order.
    pub(crate) fn nodes(&self, mask: Mask) -> impl Iterator<Item = NodeId> {
        positions(mask).filter_map(|position| self.ids.get(position).copied())
    }
}

/// The positions in a mask, in ascending order.
pub(crate) fn positions(mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::successors((mask != 0).then_some(mask), |rest| {
        let next = rest & (rest - 1);
        (next != 0).then_some(next)
    })
    .map(|rest| rest.trailing_zeros() as usize)
}

/// Visits all sets of the given nodes but the empty one: small sets first, sets of one size in the order of
/// their members.
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

/// A resource for which hints are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Resource {
    /// Exclusive CPUs.
    #[display("cpu")]
    Cpu,
    /// A kind of memory.
    Memory(ZoneKind),
    /// Devices.
    #[display("devices")]
    Devices,
    /// Nodes that are wished for.
    #[display("preferred nodes")]
    PreferredNodes,
}

/// A set of nodes on which a resource could be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The nodes. `None`: no node is better or worse than another.
    pub affinity: Option<NodeSet>,
    /// Whether no smaller set could do.
    pub preferred: bool,
}

/// Hints for one resource, in the order in which the provider found them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintList {
    nodes: NodeIndex,
    packed: Arc<[u32]>,
}

impl HintList {
    /// Packs masks; those of `preferred_size` nodes are preferred, and those that `also` says.
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

    /// Number of hints. None means that the request cannot be satisfied.
    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// Whether the request cannot be satisfied.
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// The hints.
    pub fn iter(&self) -> impl Iterator<Item = Hint> + '_ {
        self.masks().map(|(mask, preferred)| Hint { affinity: Some(self.nodes.set(mask)), preferred })
    }

    /// The hints as masks, with their preference.
    pub(crate) fn masks(&self) -> impl Iterator<Item = (Mask, bool)> + '_ {
        self.packed.iter().map(|packed| (packed & !PREFERRED, packed & PREFERRED != 0))
    }
}

/// Whom hints are for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope<'a> {
    /// One container.
    Container(&'a ContainerRequest),
    /// All containers of an owner together.
    Owner,
}

/// What a provider says about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderHints {
    /// It has nothing to give to this request, so it does not mind.
    NoPreference,
    /// It finds no set of nodes at all. The kubelet takes this for "does not mind".
    NothingFeasible,
    /// Hints by resource; an empty list says that the resource cannot be given.
    ByResource(Vec<(Resource, HintList)>),
}

/// A source of hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display(rename_all = "lowercase")]
pub enum Provider {
    /// Exclusive CPUs (the kubelet's CPU Manager).
    Cpus,
    /// Memory and hugepages (the kubelet's Memory Manager).
    Memory,
    /// Where a container's devices are.
    Devices,
    /// Where a container would like to be.
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

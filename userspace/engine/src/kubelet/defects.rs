//! The kubelet's defects, each by name.
//!
//! The strategy `kubelet` decides as the kubelet does, faults included, so that a host that moves away from it
//! gets the same placements. What is a fault is done through an item of this module, or named here, so that
//! no other strategy inherits it by accident. They are known for Kubernetes v1.32.
//!
//! | defect | where |
//! |---|---|
//! | memory that nobody can give counts as "no preference" | [`NOTHING_FEASIBLE_IS_NO_PREFERENCE`] |
//! | a node of a live group can be given to a container alone | [`one_node_skips_the_growth_rule`] |
//! | memory of a group goes back to its lowest node, not to those that gave it | [`lowest_nodes_first`] |
//! | after a restart the total of an owner is compared with its first container | [`first_blocks_found`] |
//! | init containers hand on the largest of their blocks, not their sum | [`largest_init_container`] |
//! | init containers that ended keep their CPUs | [`INIT_CONTAINERS_KEEP_CPUS`] |
//! | after a restart, init containers that ended are allocated again | [`INIT_CONTAINERS_ARE_ALLOCATED_AGAIN`] |
//! | what a rejected owner was given stays until the next admission | [`REJECTED_OWNERS_KEEP_ALLOCATIONS`] |
//! | a node whose memory changed by a byte refuses the start | [`SIZES_MUST_BE_EQUAL`] |
//! | a shared pool that was given away in full refuses the next start | [`AN_EMPTY_POOL_IS_REFUSED`] |
//! | running owners are decided on again after a restart, and can be rejected | [`super::restore`] |
//! | a container that has its cores is rejected when no others are free | [`CORES_ARE_COUNTED_BEFORE_LOOKING_AT_WHAT_IS_HELD`] |
//! | after a restart, pods with resources as a whole are allocated again, beside what they have | `allocate_pod` of both managers |
//! | a container without amounts in a pod with some as a whole is refused memory that it does not ask for | `choose` of the memory manager |
//! | a chosen combination of nodes is overwritten by a later one | [`Combinations`] |
//!
//! Not repeated is what makes the kubelet crash, hang or lose count: a hugepage size that a node does not have (it
//! has none of it), node ids of 64 and more (ids do not matter), distances looked up by node id instead of by
//! place (all must be known), CPUs that a state file gives to two pods (when one of them goes, the kubelet gives them to
//! the next, beside the other), sockets or cores that count as free as they have as many free CPUs as an average one, and
//! are then taken with the CPUs of others (a request that would be admitted so is refused), a remainder of CPUs that no node can give (the combination is passed over), and
//! reserved memory larger than the node, which leaves the kubelet nearly 2^64 free bytes (the start is refused).

use std::{cell::Cell, ops::ControlFlow, rc::Rc};

use numaward_topology::NodeId;

use crate::{
    hint::Mask,
    ledger::{Ledger, MemoryBlock},
    request::Request,
};

/// A Memory Manager that finds no set of nodes says nothing at all, and the merge takes silence for consent.
/// The owner is then rejected later, while its memory is allocated, when it has CPUs already.
///
/// Upstream: kubernetes #120733, #128708.
pub(crate) const NOTHING_FEASIBLE_IS_NO_PREFERENCE: bool = true;

/// A rejected owner keeps what its first containers were given, until the stale allocations are cleared at
/// the next admission of anybody.
///
/// Upstream: kubernetes #120733.
pub(crate) const REJECTED_OWNERS_KEEP_ALLOCATIONS: bool = true;

/// Nobody knows after a restart which init containers have ended, so they are allocated again; where others
/// took their memory in the meantime, a running owner is rejected.
///
/// Upstream: kubernetes #123971.
pub(crate) const INIT_CONTAINERS_ARE_ALLOCATED_AGAIN: bool = true;

/// With `full-pcpus-only`, whether enough cores are free is checked before whether the container has its
/// cores already. After a restart on a full machine, running owners are rejected.
///
/// Upstream: kubernetes #129078.
pub(crate) const CORES_ARE_COUNTED_BEFORE_LOOKING_AT_WHAT_IS_HELD: bool = true;

/// An allocation on one node is not checked against the growth rule, so it can be taken from a node that
/// belongs to a live group. The books of that group are wrong from then on: memory is lost for ever, and the
/// next start may refuse the state.
///
/// Reached where the merged affinity is narrower than the memory hints (memory on two nodes, CPUs on one of
/// them), and where the total of an owner is infeasible but its first container is not.
///
/// Upstream: kubernetes #113035, #113130.
pub(crate) fn one_node_skips_the_growth_rule(mask: Mask) -> bool {
    mask.is_power_of_two()
}

/// The nodes of a block in the order in which they get their memory back. The kubelet does not know which node
/// gave how much, so what a group's nodes have free drifts away from what was taken from each.
pub(crate) fn lowest_nodes_first(block: &MemoryBlock) -> impl Iterator<Item = NodeId> {
    block.affinity.iter()
}

/// The size, reservation and allocatable memory of every node must be to the byte what they were, although
/// `MemTotal` moves a little from boot to boot.
///
/// Upstream: kubernetes #109996, #131253.
pub(crate) const SIZES_MUST_BE_EQUAL: bool = true;

/// With `strict-cpu-reservation` all CPUs can become exclusive. The shared pool is then empty, which the next
/// start takes for a damaged state.
///
/// Upstream: kubernetes #141196.
pub(crate) const AN_EMPTY_POOL_IS_REFUSED: bool = true;

/// In pod scope, what an owner holds is taken to be what the first of its containers holds that holds
/// anything. As this is compared with the total, an owner of several containers has no hints after a restart.
pub(crate) fn first_blocks_found<'a>(ledger: &'a Ledger, request: &Request) -> Option<&'a [MemoryBlock]> {
    request
        .all_containers()
        .map(|container| ledger.blocks(&request.owner, &container.name))
        .find(|blocks| !blocks.is_empty())
}

/// What several init containers hand on: as much as the largest of them holds, although each may have been
/// charged in addition to those before it.
pub(crate) fn largest_init_container(before: u64, bytes: u64) -> u64 {
    before.max(bytes)
}

/// The CPUs of init containers stay theirs when the next container starts. Their memory is given back at that
/// moment; their CPUs only when the owner is gone.
///
/// Upstream: kubernetes #112228.
pub(crate) const INIT_CONTAINERS_KEEP_CPUS: bool = true;

/// All combinations of `k` of some items, as the kubelet's iterator hands them out.
///
/// It builds a combination by appending to a Go slice, and the caller keeps combinations without copying
/// them. Appending to a slice that is full makes a larger copy, of twice the capacity; appending to one that
/// is not full writes into the array that it shares with its siblings. A slice of length d is full where d is
/// 0, 1, 2, 4, 8, 16 …; so the elements at the indices 3, 5, 6, 7, 9 and so on are overwritten by the
/// combinations that follow with the same beginning. A combination that was kept as the best one can thus
/// change afterwards.
pub(crate) struct Combinations<'a> {
    items: &'a [usize],
}

/// A combination: the first elements of an array that others may still write to.
#[derive(Clone, Debug)]
pub(crate) struct Combination {
    array: Rc<[Cell<usize>]>,
    len: usize,
}

impl Combination {
    /// The elements as they are now.
    pub(crate) fn items(&self) -> impl Iterator<Item = usize> + '_ {
        self.array.iter().take(self.len).map(Cell::get)
    }

    /// Appends as Go does.
    fn append(&self, item: usize) -> Self {
        let array = if self.len < self.array.len() {
            Rc::clone(&self.array)
        } else {
            let capacity = (2 * self.len).max(1);
            self.items().chain(std::iter::repeat(0)).take(capacity).map(Cell::new).collect()
        };
        if let Some(slot) = array.get(self.len) {
            slot.set(item);
        }
        Self { array, len: self.len + 1 }
    }
}

impl<'a> Combinations<'a> {
    pub(crate) fn new(items: &'a [usize]) -> Self {
        Self { items }
    }

    /// Visits the combinations of `k` items, in the order of the items, until asked to stop. There are none of
    /// no items.
    pub(crate) fn for_each(&self, k: usize, mut visit: impl FnMut(&Combination) -> ControlFlow<()>) {
        if k > 0 {
            let empty = Combination { array: Rc::from([]), len: 0 };
            let _ = self.extend(&empty, 0, k, &mut visit);
        }
    }

    fn extend(
        &self,
        beginning: &Combination,
        start: usize,
        missing: usize,
        visit: &mut impl FnMut(&Combination) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if missing == 0 {
            return visit(beginning);
        }
        for index in start..self.items.len().saturating_sub(missing - 1) {
            self.extend(&beginning.append(self.items[index]), index + 1, missing - 1, visit)?;
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps the combination at the given index, and says what it is in the end.
    fn kept(items: &[usize], k: usize, index: usize) -> Vec<usize> {
        let mut kept = Vec::new();
        let mut seen = 0;
        Combinations::new(items).for_each(k, |combination| {
            if seen == index {
                kept.push(combination.clone());
            }
            seen += 1;
            ControlFlow::Continue(())
        });
        kept.iter().flat_map(|combination| combination.items().collect::<Vec<_>>()).collect()
    }

    #[test]
    fn kept_combination_is_overwritten() {
        let items: Vec<usize> = (0..8).collect();
        for k in [1, 2, 3, 5] {
            assert_eq!(kept(&items, k, 0), (0..k).collect::<Vec<_>>(), "{k} are safe");
        }
        assert_eq!(kept(&items, 4, 0), [0, 1, 2, 7], "the last of four is overwritten");
        assert_eq!(kept(&items, 6, 0), [0, 1, 2, 3, 4, 7]);
        assert_eq!(kept(&items, 7, 0), [0, 1, 2, 3, 4, 6, 7], "the last two of seven");
    }

    #[test]
    fn visits_all_combinations() {
        let mut seen = Vec::new();
        Combinations::new(&[4, 5, 6]).for_each(2, |combination| {
            seen.push(combination.items().collect::<Vec<_>>());
            ControlFlow::Continue(())
        });
        assert_eq!(seen, [[4, 5], [4, 6], [5, 6]]);
        let mut count = 0;
        Combinations::new(&[4, 5, 6]).for_each(1, |_| {
            count += 1;
            if count == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(count, 2);
        Combinations::new(&[]).for_each(1, |_| panic!("there are none"));
        Combinations::new(&[1]).for_each(0, |_| panic!("there are none of nothing"));
    }
}

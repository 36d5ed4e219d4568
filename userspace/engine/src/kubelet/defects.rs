//! Known defects of the kubelet that the strategy `kubelet` reproduces.
//!
//! The strategy decides exactly as the kubelet does, so that a host keeps its placements when it stops using the
//! kubelet's managers. Each defect has an item in this module or is listed here, so that no other strategy inherits
//! one by accident. The list is for Kubernetes v1.32.
//!
//! | defect | item |
//! |---|---|
//! | infeasible memory counts as "no preference" | [`NOTHING_FEASIBLE_IS_NO_PREFERENCE`] |
//! | a node of a group in use can be allocated to one container | [`one_node_skips_the_growth_rule`] |
//! | released memory of a group is credited to its lowest node | [`lowest_nodes_first`] |
//! | after a restart, an owner's total is compared with its first container | [`first_blocks_found`] |
//! | init containers pass on their largest block instead of the sum | [`largest_init_container`] |
//! | completed init containers keep their CPUs | [`INIT_CONTAINERS_KEEP_CPUS`] |
//! | after a restart, completed init containers are allocated again | [`INIT_CONTAINERS_ARE_ALLOCATED_AGAIN`] |
//! | a rejected owner keeps allocations until the next admission | [`REJECTED_OWNERS_KEEP_ALLOCATIONS`] |
//! | any change of a node's memory size prevents the start | [`SIZES_MUST_BE_EQUAL`] |
//! | an empty shared pool prevents the next start | [`EMPTY_POOL_IS_REFUSED`] |
//! | after a restart, running owners are admitted again and can be rejected | [`super::restore`] |
//! | a container that holds its cores is rejected if no further cores are free | [`CORES_ARE_CHECKED_BEFORE_HELD_CPUS`] |
//! | after a restart, pods with pod-level resources are allocated again, in addition to their allocation | `allocate_pod` of both managers |
//! | a container without amounts in a pod with pod-level resources is refused memory that it does not request | `choose` of the memory manager |
//! | a chosen combination of nodes is overwritten by a later one | [`Combinations`] |
//!
//! Defects that crash the kubelet, hang it or corrupt its accounts are not reproduced:
//!
//! - A huge page size that a node does not have counts as zero free pages.
//! - Node ids of 64 and more work.
//! - Distances are looked up by position instead of node id; all of them must be known.
//! - If a state file assigns a CPU to two pods, the CPU is not given to another pod when one of the two ends.
//! - The kubelet treats a socket or core as completely free if its number of free CPUs equals the average size, and
//!   takes all its CPUs: also those of other containers, even of the same pod. Such a request is refused. It may also
//!   take reserved CPUs; this is repeated, because no CPU is given twice.
//! - If no node of a combination can give the remainder of CPUs, the combination is skipped.
//! - A memory reservation larger than the node is refused; the kubelet computes nearly 2^64 free bytes.

use std::{cell::Cell, ops::ControlFlow, rc::Rc};

use numaward_topology::NodeId;

use crate::{
    hint::Mask,
    ledger::{Ledger, MemoryBlock},
    request::Request,
};

/// A memory manager without feasible nodes returns no hints, which the merge treats as "no preference". The owner is
/// rejected later, during the memory allocation, when it already holds CPUs.
///
/// Upstream: kubernetes #120733, #128708.
pub(crate) const NOTHING_FEASIBLE_IS_NO_PREFERENCE: bool = true;

/// A rejected owner keeps the allocations of its first containers until the next admission of any owner removes stale
/// allocations.
///
/// Upstream: kubernetes #120733.
pub(crate) const REJECTED_OWNERS_KEEP_ALLOCATIONS: bool = true;

/// After a restart the kubelet does not know which init containers have completed, and allocates all of them again.
/// If their memory is taken, a running owner is rejected.
///
/// Upstream: kubernetes #123971.
pub(crate) const INIT_CONTAINERS_ARE_ALLOCATED_AGAIN: bool = true;

/// With `full-pcpus-only`, the number of free cores is checked before the CPUs that a container already holds are
/// considered. After a restart on a full machine, running owners are rejected.
///
/// Upstream: kubernetes #129078.
pub(crate) const CORES_ARE_CHECKED_BEFORE_HELD_CPUS: bool = true;

/// The growth rule is not applied to allocations on one node, so a node of a group in use can be allocated. The
/// accounts of the group are wrong from then on: memory is lost, and the next start may refuse the state.
///
/// This happens if the merged affinity is narrower than the memory hints (memory on two nodes, CPUs on one of them),
/// and if the total of an owner is infeasible but its first container is not.
///
/// Upstream: kubernetes #113035, #113130.
pub(crate) fn one_node_skips_the_growth_rule(mask: Mask) -> bool {
    mask.is_power_of_two()
}

/// Returns the nodes of a block in the order in which released memory is credited. The kubelet does not know how much
/// each node gave, so the free amounts within a group become wrong.
pub(crate) fn lowest_nodes_first(block: &MemoryBlock) -> impl Iterator<Item = NodeId> {
    block.affinity.iter()
}

/// The size, reservation and allocatable memory of every node must be exactly as before, although `MemTotal` differs
/// slightly from boot to boot.
///
/// Upstream: kubernetes #109996, #131253.
pub(crate) const SIZES_MUST_BE_EQUAL: bool = true;

/// With `strict-cpu-reservation` all CPUs can become exclusive. The next start treats the empty shared pool as a
/// damaged state.
///
/// Upstream: kubernetes #141196.
pub(crate) const EMPTY_POOL_IS_REFUSED: bool = true;

/// In pod scope, the blocks of the first container that has any count as those of the owner. They are compared with
/// the owner's total, so an owner with several containers has no hints after a restart.
pub(crate) fn first_blocks_found<'a>(ledger: &'a Ledger, request: &Request) -> Option<&'a [MemoryBlock]> {
    request
        .all_containers()
        .map(|container| ledger.blocks(&request.owner, &container.name))
        .find(|blocks| !blocks.is_empty())
}

/// Init containers pass on only the largest of their blocks, although each may have been charged in addition to the
/// earlier ones.
pub(crate) fn largest_init_container(before: u64, bytes: u64) -> u64 {
    before.max(bytes)
}

/// Init containers keep their CPUs when the next container starts. Their memory is released at that time, the CPUs
/// only with the owner.
///
/// Upstream: kubernetes #112228.
pub(crate) const INIT_CONTAINERS_KEEP_CPUS: bool = true;

/// All combinations of `k` items, as the kubelet's iterator produces them.
///
/// The iterator appends to a Go slice, and the caller keeps combinations without copying them. Appending to a full
/// slice copies it into an array of twice the capacity; appending to another slice writes into the array that it
/// shares with its siblings. A slice is full at the lengths 0, 1, 2, 4, 8, 16 …, so the elements at the indices 3, 5,
/// 6, 7, 9 and so on are overwritten by later combinations with the same prefix. A combination that was kept as the
/// best one can therefore change.
pub(crate) struct Combinations<'a> {
    items: &'a [usize],
}

/// Combination: the first elements of a possibly shared array.
#[derive(Clone, Debug)]
pub(crate) struct Combination {
    array: Rc<[Cell<usize>]>,
    len: usize,
}

impl Combination {
    /// Returns the current elements.
    pub(crate) fn items(&self) -> impl Iterator<Item = usize> + '_ {
        self.array.iter().take(self.len).map(Cell::get)
    }

    /// Appends an item with the semantics of Go's `append`.
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

    /// Visits the combinations of `k` items until `visit` breaks. There are none for `k` = 0.
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

    /// Keeps the combination at the given index and returns its final elements.
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

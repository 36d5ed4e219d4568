//! Carrying guarantees over to a changed machine.
//!
//! If a node has more placed than allocatable, blocks over several nodes move bytes to their other nodes. If these are
//! full, blocks over those nodes move bytes in turn, so that as much as possible is covered. Blocks on a single node do
//! not move. The remaining shortage is reported, and the node offers no memory until the shortage is gone.

use std::collections::{BTreeMap, VecDeque};

use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

use crate::{
    ledger::{Ledger, MemoryBlock, NodeAccount, OwnerAccount},
    request::{ContainerName, OwnerId},
};

/// Reason why an existing allocation cannot be added to the ledger.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The owner already has an account.
    #[error("{0} has an account already")]
    AccountExists(OwnerId),
    /// Another owner holds the CPUs exclusively.
    #[error("CPUs {cpus} are exclusive to {other}")]
    CpusTaken {
        cpus: CpuSet,
        /// Owner that holds the CPUs.
        other: OwnerId,
    },
}

/// Guaranteed memory that the machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncoveredMemory {
    pub owner: OwnerId,
    /// Kind of memory, nodes of the guarantee, and number of missing bytes.
    pub block: MemoryBlock,
}

impl Ledger {
    /// Adds an existing allocation that no decision of this ledger made. The caller has to charge it with
    /// [`crate::Strategy::rebase`].
    pub fn adopt(&mut self, owner: OwnerId, account: OwnerAccount) -> Result<(), AdoptError> {
        if self.owner(&owner).is_some() {
            return Err(AdoptError::AccountExists(owner));
        }
        let wanted: CpuSet = account.exclusive_cpus().flat_map(CpuSet::iter).collect();
        for (other, of_other) in self.owners() {
            let taken = of_other.exclusive_cpus().map(|cpus| cpus & &wanted);
            if let Some(cpus) = taken.into_iter().find(|cpus| !cpus.is_empty()) {
                return Err(AdoptError::CpusTaken { cpus, other: other.clone() });
            }
        }
        *self.owner_mut(&owner) = account;
        Ok(())
    }

    /// Charges all allocations to the accounts of `idle`, the ledger of a possibly changed machine without
    /// guarantees. Running workloads keep their allocations. Returns the memory that the machine does not have.
    pub(crate) fn rebase(&mut self, idle: &Self) -> Vec<UncoveredMemory> {
        let mut nodes = idle.nodes.clone();
        let mut shared_pool = idle.shared_pool.clone();
        for (_, account) in self.owners() {
            for cpus in account.exclusive_cpus() {
                shared_pool = &shared_pool - cpus;
            }
            for block in account.charged_blocks() {
                for node in block.affinity.iter() {
                    if let Some(account) = nodes.get_mut(&node) {
                        account.assignments += 1;
                        account.group.clone_from(&block.affinity);
                    }
                }
            }
        }
        let uncovered = self.relocate_excess(&nodes);
        for (_, _, allocation) in self.allocations() {
            for (kind, placed) in &allocation.placed {
                for (node, bytes) in placed {
                    if let Some(account) = nodes.get_mut(node).and_then(|node| node.kinds.get_mut(kind)) {
                        account.charge(bytes.0);
                    }
                }
            }
        }
        self.nodes = nodes;
        self.shared_pool = shared_pool;
        uncovered
    }

    /// Relocates placed bytes away from nodes that have more placed than allocatable, and returns the shortage that
    /// remains.
    pub(crate) fn relocate_excess(&mut self, nodes: &BTreeMap<NodeId, NodeAccount>) -> Vec<UncoveredMemory> {
        let mut free = FreeBytes::new();
        for (&node, account) in nodes {
            for (&kind, account) in &account.kinds {
                free.insert((kind, node), account.allocatable.0.into());
            }
        }
        for (_, _, allocation) in self.allocations() {
            for (&kind, placed) in &allocation.placed {
                for (&node, bytes) in placed {
                    *free.entry((kind, node)).or_insert(0) -= i128::from(bytes.0);
                }
            }
        }
        relocate_excess(self, &mut free);
        uncovered(self, &free)
    }
}

/// Free bytes by kind and node; negative if more is placed than allocatable.
type FreeBytes = BTreeMap<(ZoneKind, NodeId), i128>;

type Holder = (OwnerId, ContainerName, ZoneKind);

/// Returns the nodes of a container's blocks of a kind.
fn affinity(ledger: &Ledger, (owner, container, kind): &Holder) -> NodeSet {
    let of_kind = ledger.blocks(owner, container).iter().filter(|block| block.kind == *kind);
    of_kind.flat_map(|block| block.affinity.iter()).collect()
}

/// Memory of a container that may be on several nodes.
struct SpreadMemory {
    holder: Holder,
    affinity: NodeSet,
    placed: BTreeMap<NodeId, u64>,
}

/// Step of a relocation path: source, destination, and index of the memory that moves.
type RelocationStep = (NodeId, NodeId, usize);

/// Relocates memory that may be on several nodes away from overcommitted nodes, each time along the shortest path:
/// memory at the destination may have to move on.
fn relocate_excess(ledger: &mut Ledger, free: &mut FreeBytes) {
    let short: Vec<(ZoneKind, NodeId)> =
        free.iter().filter(|(_, free)| **free < 0).map(|(&of, _)| of).collect();
    for (kind, node) in short {
        let mut spread = spread(ledger, kind);
        while let Some(steps) = shortest_path(&spread, kind, node, free) {
            let Some(&(_, to, _)) = steps.last() else { break };
            let missing = free.get(&(kind, node)).map_or(0, |free| -free);
            let free_capacity = free.get(&(kind, to)).copied().unwrap_or(0);
            let at_once = steps.iter().filter_map(|(from, _, of)| spread[*of].placed.get(from)).min();
            let share = i128::from(at_once.copied().unwrap_or(0)).min(missing).min(free_capacity);
            let Some(bytes) = u64::try_from(share).ok().filter(|&bytes| bytes > 0) else { break };
            for (from, to, of) in steps {
                let SpreadMemory { holder: (owner, container, _), placed, .. } = &mut spread[of];
                *placed.entry(from).or_default() -= bytes;
                *placed.entry(to).or_default() += bytes;
                ledger.allocation_mut(owner, container).move_placed(kind, from, to, bytes);
            }
            *free.entry((kind, node)).or_insert(0) += share;
            *free.entry((kind, to)).or_insert(0) -= share;
        }
    }
}

fn spread(ledger: &Ledger, kind: ZoneKind) -> Vec<SpreadMemory> {
    let of = ledger.allocations().filter_map(|(owner, container, held)| {
        let holder = (owner.clone(), container.clone(), kind);
        let affinity = affinity(ledger, &holder);
        let placed = held.placed.get(&kind)?.iter().map(|(&node, bytes)| (node, bytes.0)).collect();
        (affinity.len() > 1).then_some(SpreadMemory { holder, affinity, placed })
    });
    of.collect()
}

/// Returns the shortest path from an overcommitted node to a node with free memory; `None` if the node is not
/// overcommitted or there is no path.
fn shortest_path(
    spread: &[SpreadMemory],
    kind: ZoneKind,
    node: NodeId,
    free: &FreeBytes,
) -> Option<Vec<RelocationStep>> {
    let free = |node| free.get(&(kind, node)).copied().unwrap_or(0);
    if free(node) >= 0 {
        return None;
    }
    let mut came: BTreeMap<NodeId, Option<RelocationStep>> = BTreeMap::from([(node, None)]);
    let mut queue = VecDeque::from([node]);
    while let Some(from) = queue.pop_front() {
        if free(from) > 0 {
            let back = std::iter::successors(came.get(&from).copied().flatten(), |(before, _, _)| {
                came.get(before).copied().flatten()
            });
            return Some(back.collect::<Vec<_>>().into_iter().rev().collect());
        }
        let movable = |of: &SpreadMemory| of.placed.get(&from).is_some_and(|&bytes| bytes > 0);
        for (index, of) in spread.iter().enumerate().filter(|(_, of)| movable(of)) {
            for to in of.affinity.iter() {
                came.entry(to).or_insert_with(|| {
                    queue.push_back(to);
                    Some((from, to, index))
                });
            }
        }
    }
    None
}

/// Returns the shortage by owner. On each node, the last containers in the order of names bear it.
fn uncovered(ledger: &Ledger, free: &FreeBytes) -> Vec<UncoveredMemory> {
    let mut missing: BTreeMap<(ZoneKind, NodeId), i128> =
        free.iter().filter(|(_, free)| **free < 0).map(|(&of, &free)| (of, -free)).collect();
    if missing.is_empty() {
        return Vec::new();
    }
    let mut uncovered = Vec::new();
    let holders: Vec<_> = ledger.allocations().collect();
    for (owner, container, held) in holders.into_iter().rev() {
        for (&kind, placed) in held.placed.iter().rev() {
            let mut bytes = 0u64;
            for (&node, placed) in placed {
                let Some(missing) = missing.get_mut(&(kind, node)) else { continue };
                let share = u64::try_from(*missing).unwrap_or(u64::MAX).min(placed.0);
                *missing -= i128::from(share);
                bytes += share;
            }
            if bytes > 0 {
                let affinity = affinity(ledger, &(owner.clone(), container.clone(), kind));
                uncovered.push(UncoveredMemory {
                    owner: owner.clone(),
                    block: MemoryBlock { kind, affinity, bytes: Bytes(bytes) },
                });
            }
        }
    }
    uncovered.reverse();
    uncovered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Allocation;

    #[test]
    fn adopt_refuses_conflicts() {
        let account = |cpus: &str| {
            let held = Allocation { cpus: Some(cpus.parse().unwrap()), ..Allocation::default() };
            OwnerAccount { containers: [("c".into(), held)].into(), ..OwnerAccount::default() }
        };
        let mut ledger = Ledger::default();
        ledger.adopt("a".into(), account("1-2")).unwrap();
        ledger.adopt("b".into(), account("3")).unwrap();
        assert_eq!(ledger.adopt("a".into(), account("5")), Err(AdoptError::AccountExists("a".into())));
        let taken = ledger.adopt("c".into(), account("2-4")).unwrap_err();
        assert_eq!(taken, AdoptError::CpusTaken { cpus: "2".parse().unwrap(), other: "a".into() });
        assert_eq!(ledger.owners().count(), 2);
    }
}

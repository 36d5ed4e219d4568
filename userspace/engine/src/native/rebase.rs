//! Carrying guarantees over to a changed machine or configuration.
//!
//! # Problem
//! After a reboot a node can have slightly less memory, or a node or a CPU can be missing. Running workloads keep
//! their guarantees, whatever the current policy is.
//!
//! # Algorithm
//! The accounts are recomputed from the placed bytes. If a node has more placed than allocatable, blocks over several
//! nodes move bytes to their other nodes. If these are full, blocks over those nodes move bytes in turn, so that as
//! much as possible is covered. Blocks on a single node do not move. The remaining shortage is reported, and the node
//! offers no memory until the shortage is gone.

use std::collections::{BTreeMap, VecDeque};

use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

use super::NativeStrategy;
use crate::{
    ledger::{Ledger, MemoryBlock, NodeAccount, PodAllocation},
    rebase::UncoveredMemory,
    request::{ContainerName, OwnerId},
};

/// Implements [`crate::Strategy::rebase`].
pub(super) fn rebase(native: &NativeStrategy, ledger: &Ledger) -> (Ledger, Vec<UncoveredMemory>) {
    let mut next = ledger.clone();
    // Only the allocations of containers count: each byte of a pod is placed for one of its containers.
    let whole = ledger.owners().filter(|(_, account)| !account.pod_level.is_empty());
    for owner in whole.map(|(owner, _)| owner) {
        next.owner_mut(owner).pod_level = PodAllocation::default();
    }
    let mut nodes: BTreeMap<NodeId, NodeAccount> = native.host.idle.clone();
    // Free bytes by kind and node; negative if more is placed than allocatable.
    let mut free: BTreeMap<(ZoneKind, NodeId), i128> = BTreeMap::new();
    for (&node, account) in &nodes {
        for (&kind, account) in &account.kinds {
            free.insert((kind, node), account.allocatable.0.into());
        }
    }
    hide_new_siblings(native, &mut next);
    let mut exclusive = CpuSet::new();
    for (_, _, held) in next.allocations() {
        exclusive.extend(held.held_sets().flat_map(CpuSet::iter));
        for (&kind, placed) in &held.placed {
            for (&node, bytes) in placed {
                *free.entry((kind, node)).or_insert(0) -= i128::from(bytes.0);
            }
        }
        for node in held.blocks.iter().flat_map(|block| block.affinity.iter()) {
            if let Some(account) = nodes.get_mut(&node) {
                account.assignments += 1;
            }
        }
    }
    if !nodes.is_empty() && free.values().any(|&free| free < 0) {
        relocate_excess(&mut next, &mut free);
    }
    let uncovered = if nodes.is_empty() { Vec::new() } else { uncovered(&next, &free) };
    for (_, _, held) in next.allocations() {
        for (kind, placed) in &held.placed {
            for (node, bytes) in placed {
                let account = nodes.get_mut(node).and_then(|node| node.kinds.get_mut(kind));
                if let Some(account) = account {
                    account.guaranteed.0 = account.guaranteed.0.saturating_add(bytes.0);
                    account.free.0 = account.allocatable.0.saturating_sub(account.guaranteed.0);
                }
            }
        }
    }
    next.nodes = nodes;
    next.shared_pool = native.host.cpus.as_ref().map(|cpus| &cpus.idle_pool - &exclusive).unwrap_or_default();
    (next, uncovered)
}

/// Hides free sibling threads that came online next to CPUs with hidden siblings.
fn hide_new_siblings(native: &NativeStrategy, ledger: &mut Ledger) {
    let Some(cpus) = &native.host.cpus else { return };
    let exclusive = ledger.all_exclusive_cpus();
    let mut came = Vec::new();
    for (owner, account) in ledger.owners().filter(|(_, account)| account.terms.hide_siblings) {
        for (container, held) in &account.containers {
            let beside = held.cpus.as_ref().map(|held| cpus.hidden_beside(held, &account.terms));
            let free = &beside.unwrap_or_default() - &exclusive;
            if !free.is_empty() {
                came.push((owner.clone(), container.clone(), free));
            }
        }
    }
    for (owner, container, free) in came {
        let held = ledger.allocation_mut(&owner, &container);
        held.hidden_cpus = &held.hidden_cpus | &free;
    }
}

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
fn relocate_excess(ledger: &mut Ledger, free: &mut BTreeMap<(ZoneKind, NodeId), i128>) {
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
    free: &BTreeMap<(ZoneKind, NodeId), i128>,
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
fn uncovered(ledger: &Ledger, free: &BTreeMap<(ZoneKind, NodeId), i128>) -> Vec<UncoveredMemory> {
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

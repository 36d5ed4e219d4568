//! Carrying promises over to a machine, or a configuration, that changed.
//!
//! Problem: after a boot a node has a little less memory than before, or a node or a CPU is gone; those that run keep
//! what they were promised, whatever the policy says now.
//!
//! Algorithm: the accounts are made anew from what is placed. Where a node has more placed on it than it can promise,
//! blocks that span several nodes give way: their bytes there are placed on other nodes of the block that have room.
//! Nobody else is moved. What is missing then is reported, and the node offers nothing until it is gone.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

use super::Native;
use crate::{
    ledger::{Block, Ledger, NodeAccount, Whole},
    rebase::Uncovered,
    request::{ContainerName, OwnerId},
};

/// See [`crate::Strategy::rebase`].
pub(super) fn rebase(native: &Native, ledger: &Ledger) -> (Ledger, Vec<Uncovered>) {
    let mut next = ledger.clone();
    // Parts are all that counts here: each byte is placed for one of them.
    let whole = ledger.owners().filter(|(_, account)| !account.whole.is_empty());
    for owner in whole.map(|(owner, _)| owner) {
        next.owner_mut(owner).whole = Whole::default();
    }
    let mut nodes: BTreeMap<NodeId, NodeAccount> = native.host.idle.clone();
    // What each node can still promise, or by how much it has promised too much.
    let mut free: BTreeMap<(ZoneKind, NodeId), i128> = BTreeMap::new();
    for (&node, account) in &nodes {
        for (&kind, account) in &account.kinds {
            free.insert((kind, node), account.allocatable.0.into());
        }
    }
    hide_siblings_that_came(native, &mut next);
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
        give_way(&mut next, &mut free);
    }
    let uncovered = if nodes.is_empty() { Vec::new() } else { uncovered(&next, &free) };
    for (_, _, held) in next.allocations() {
        for (kind, placed) in &held.placed {
            for (node, bytes) in placed {
                let account = nodes.get_mut(node).and_then(|node| node.kinds.get_mut(kind));
                if let Some(account) = account {
                    account.promised.0 = account.promised.0.saturating_add(bytes.0);
                    account.free.0 = account.allocatable.0.saturating_sub(account.promised.0);
                }
            }
        }
    }
    next.nodes = nodes;
    next.shared_pool = native.host.cpus.as_ref().map(|cpus| &cpus.idle_pool - &exclusive).unwrap_or_default();
    (next, uncovered)
}

/// Hides the threads of cores that came online beside CPUs whose siblings are hidden, if they are free.
fn hide_siblings_that_came(native: &Native, ledger: &mut Ledger) {
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

/// The nodes of the blocks of a kind that a container has.
fn affinity(ledger: &Ledger, (owner, container, kind): &Holder) -> NodeSet {
    let of_kind = ledger.blocks(owner, container).iter().filter(|block| block.kind == *kind);
    of_kind.flat_map(|block| block.affinity.iter()).collect()
}

/// Has blocks that span several nodes make room on those that have promised too much.
fn give_way(ledger: &mut Ledger, free: &mut BTreeMap<(ZoneKind, NodeId), i128>) {
    let holders = |ledger: &Ledger, kind: ZoneKind, node: NodeId| -> Vec<(Holder, u64)> {
        let placed = ledger.allocations().filter_map(|(owner, container, held)| {
            let bytes = held.placed.get(&kind)?.get(&node)?.0;
            Some(((owner.clone(), container.clone(), kind), bytes))
        });
        placed.collect()
    };
    let short: Vec<(ZoneKind, NodeId)> =
        free.iter().filter(|(_, free)| **free < 0).map(|(&of, _)| of).collect();
    for (kind, node) in short {
        for (holder, mut bytes) in holders(ledger, kind, node) {
            for to in affinity(ledger, &holder).iter().filter(|&to| to != node) {
                let missing = free.get(&(kind, node)).map_or(0, |free| (-free).max(0));
                let room = free.get(&(kind, to)).map_or(0, |&free| free.max(0));
                let share = u64::try_from(missing.min(room)).unwrap_or(u64::MAX).min(bytes);
                if share > 0 {
                    ledger.allocation_mut(&holder.0, &holder.1).move_placed(kind, node, to, share);
                    *free.entry((kind, node)).or_insert(0) += i128::from(share);
                    *free.entry((kind, to)).or_insert(0) -= i128::from(share);
                    bytes -= share;
                }
            }
        }
    }
}

/// What is missing, and of whom: on each node of the last ones in the order of names.
fn uncovered(ledger: &Ledger, free: &BTreeMap<(ZoneKind, NodeId), i128>) -> Vec<Uncovered> {
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
                uncovered.push(Uncovered {
                    owner: owner.clone(),
                    block: Block { kind, affinity, bytes: Bytes(bytes) },
                });
            }
        }
    }
    uncovered.reverse();
    uncovered
}

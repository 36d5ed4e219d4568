//! Charging and giving back.
//!
//! What is promised on a node is the sum of what is placed there, and what is free is the rest of what can be promised,
//! or nothing: a node that lost memory can have more promised than it has.

use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::host::HostModel;
use crate::{
    ledger::{Allocation, KindAccount, Ledger},
    request::{ContainerName, OwnerId},
};

fn account(ledger: &mut Ledger, node: NodeId, kind: ZoneKind) -> Option<&mut KindAccount> {
    ledger.nodes.get_mut(&node)?.kinds.get_mut(&kind)
}

/// Promises bytes on a node.
pub(super) fn charge(ledger: &mut Ledger, node: NodeId, kind: ZoneKind, bytes: u64) {
    if let Some(account) = account(ledger, node, kind) {
        account.guaranteed.0 = account.guaranteed.0.saturating_add(bytes);
        account.free.0 = account.allocatable.0.saturating_sub(account.guaranteed.0);
    }
}

/// Gives back bytes that were promised on a node.
pub(super) fn refund(ledger: &mut Ledger, node: NodeId, kind: ZoneKind, bytes: u64) {
    if let Some(account) = account(ledger, node, kind) {
        account.guaranteed.0 = account.guaranteed.0.saturating_sub(bytes);
        account.free.0 = account.allocatable.0.saturating_sub(account.guaranteed.0);
    }
}

/// Gives a container what an allocation says. It must hold nothing.
pub(super) fn charge_allocation(
    ledger: &mut Ledger,
    owner: &OwnerId,
    container: &ContainerName,
    allocation: Allocation,
) {
    ledger.shared_pool = &ledger.shared_pool - &allocation.held_cpus();
    for block in &allocation.blocks {
        for node in block.affinity.iter() {
            if let Some(account) = ledger.nodes.get_mut(&node) {
                account.assignments += 1;
            }
        }
    }
    for (&kind, nodes) in &allocation.placed {
        for (&node, bytes) in nodes {
            charge(ledger, node, kind, bytes.0);
        }
    }
    if !allocation.is_empty() {
        *ledger.allocation_mut(owner, container) = allocation;
    }
}

/// Gives back what a container holds; of CPUs those that no other container of its owner holds as well.
pub(super) fn release(host: &HostModel, ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
    let Some(held) = ledger.allocation(owner, container).cloned() else { return };
    *ledger.allocation_mut(owner, container) = Allocation::default();
    ledger.drop_empty(owner, Some(container));
    for block in &held.blocks {
        for node in block.affinity.iter() {
            if let Some(account) = ledger.nodes.get_mut(&node) {
                account.assignments = account.assignments.saturating_sub(1);
                if account.assignments == 0 {
                    account.group = NodeSet::single(node);
                }
            }
        }
    }
    for (&kind, nodes) in &held.placed {
        for (&node, &Bytes(bytes)) in nodes {
            refund(ledger, node, kind, bytes);
        }
    }
    if held.cpus.is_some() {
        let mut free = &held.held_cpus() - &ledger.cpus_of_other_containers(owner, container);
        // CPUs that went offline, or were reserved, since they were given.
        if let Some(manager) = &host.cpus {
            free = &free & &manager.idle_pool;
        }
        ledger.shared_pool = &ledger.shared_pool | &free;
    }
}

/// Forgets an owner and gives back all that it holds.
pub(super) fn remove(host: &HostModel, ledger: &mut Ledger, owner: &OwnerId) {
    let Some(account) = ledger.owner(owner).cloned() else { return };
    for container in account.containers.keys() {
        release(host, ledger, owner, container);
    }
    if ledger.owner(owner).is_some() {
        let account = ledger.owner_mut(owner);
        account.request = None;
        ledger.drop_empty(owner, None);
    }
}

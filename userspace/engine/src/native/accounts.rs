//! Charging and releasing allocations.
//!
//! The guaranteed memory of a node is the sum of the placed bytes. The free memory is the remaining allocatable
//! memory, or zero: a node that lost memory can have more guaranteed than allocatable.

use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::host::HostModel;
use crate::{
    ledger::{Allocation, KindAccount, Ledger},
    request::{ContainerName, OwnerId},
};

fn account(ledger: &mut Ledger, node: NodeId, kind: ZoneKind) -> Option<&mut KindAccount> {
    ledger.nodes.get_mut(&node)?.kinds.get_mut(&kind)
}

/// Charges bytes to a node.
pub(super) fn charge(ledger: &mut Ledger, node: NodeId, kind: ZoneKind, bytes: u64) {
    if let Some(account) = account(ledger, node, kind) {
        account.guaranteed.0 = account.guaranteed.0.saturating_add(bytes);
        account.free.0 = account.allocatable.0.saturating_sub(account.guaranteed.0);
    }
}

/// Refunds bytes of a node.
pub(super) fn refund(ledger: &mut Ledger, node: NodeId, kind: ZoneKind, bytes: u64) {
    if let Some(account) = account(ledger, node, kind) {
        account.guaranteed.0 = account.guaranteed.0.saturating_sub(bytes);
        account.free.0 = account.allocatable.0.saturating_sub(account.guaranteed.0);
    }
}

/// Charges an allocation for a container that holds nothing.
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

/// Releases the allocation of a container. CPUs that another container also holds stay exclusive.
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
        // CPUs that were taken offline or reserved in the meantime do not return to the pool.
        if let Some(manager) = &host.cpus {
            free = &free & &manager.idle_pool;
        }
        ledger.shared_pool = &ledger.shared_pool | &free;
    }
}

/// Removes an owner and releases all its allocations.
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

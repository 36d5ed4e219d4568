//! Carrying guarantees over to a changed machine or configuration.
//!
//! # Problem
//! After a reboot a node can have slightly less memory, or a node or a CPU can be missing. Running workloads keep
//! their guarantees, whatever the current policy is.
//!
//! # Algorithm
//! The accounts are recomputed from the placed bytes, after [`Ledger::relocate_excess`].

use std::collections::BTreeMap;

use numaward_topology::{CpuSet, NodeId};

use super::NativeStrategy;
use crate::{
    ledger::{Ledger, NodeAccount, PodAllocation},
    rebase::UncoveredMemory,
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
    hide_new_siblings(native, &mut next);
    let mut exclusive = CpuSet::new();
    for (_, _, held) in next.allocations() {
        exclusive.extend(held.held_sets().flat_map(CpuSet::iter));
        for node in held.blocks.iter().flat_map(|block| block.affinity.iter()) {
            if let Some(account) = nodes.get_mut(&node) {
                account.assignments += 1;
            }
        }
    }
    let uncovered = if nodes.is_empty() { Vec::new() } else { next.relocate_excess(&nodes) };
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

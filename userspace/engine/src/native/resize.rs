//! Resizing the guarantee of a running container.
//!
//! The container keeps its place: CPUs are added on the nodes of its CPUs and, if no policy restricts it, on those of
//! its memory; memory is added on the nodes of its blocks. Memory is released on the node with the smallest part
//! first. If the resize is impossible, nothing changes. The terms of the admission stay.

use numaward_topology::{Bytes, NodeId};

use super::{
    NativeStrategy, accounts, free_capacity,
    host::{HostModel, column},
    rank,
};
use crate::{
    decision::{ResizeError, Shortfall},
    hint::Resource,
    kubelet::resize::update_request,
    ledger::{Ledger, MemoryBlock},
    policy::TopologyManagerPolicy,
    request::{ContainerName, OwnerId, Resources},
};

/// Implements [`crate::Strategy::resize`].
pub(super) fn resized(
    strategy: &NativeStrategy,
    ledger: &Ledger,
    owner: &OwnerId,
    container: &ContainerName,
    to: &Resources,
) -> Result<Ledger, ResizeError> {
    let mut next = ledger.clone();
    if let Some(held) = ledger.allocation(owner, container) {
        if let (Some(cpus), Some(wanted), Some(manager)) = (&held.cpus, to.cpu, &strategy.host.cpus) {
            let whole = wanted.whole_cpus().filter(|&whole| whole > 0);
            let whole = whole.and_then(|whole| usize::try_from(whole).ok());
            let whole = whole.ok_or(ResizeError::NotWholeCpus(wanted))?;
            let mut nodes = strategy.host.set(&manager.nodes_of(cpus));
            let terms = ledger.owner(owner).map(|account| account.terms.clone()).unwrap_or_default();
            let policy = terms.policy.unwrap_or(strategy.policy);
            if matches!(policy, TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort) {
                nodes.extend(held.memory_nodes().iter());
            }
            let chosen = manager.resized(ledger, &terms, cpus, whole, &nodes)?;
            // CPUs that were taken offline or reserved in the meantime do not return to the pool.
            let free = &(&held.held_cpus() & &manager.idle_pool)
                - &ledger.cpus_of_other_containers(owner, container);
            let hidden = manager.hidden_beside(&chosen, &terms);
            next.shared_pool = &(&(&next.shared_pool | &free) - &chosen) - &hidden;
            let grows = chosen.len() > cpus.len();
            let holds = next.allocation_mut(owner, container);
            (holds.cpus, holds.hidden_cpus) = (Some(chosen), hidden);
            if grows && let Err((requested, free)) = strategy.check_shared_pool(&ledger.shared_pool, &next) {
                return Err(ResizeError::SharedPool { requested, free });
            }
        }
        for block in &held.blocks {
            let Some(&wanted) = to.memory.get(&block.kind) else { continue };
            let resource = Resource::Memory(block.kind);
            let bytes = wanted.units().ok_or(ResizeError::TooLarge { resource, amount: wanted })?;
            resize_block(&strategy.host, &mut next, (owner, container), block, bytes)?;
        }
    }
    update_request(&mut next, owner, container, to);
    Ok(next)
}

fn resize_block(
    host: &HostModel,
    ledger: &mut Ledger,
    (owner, container): (&OwnerId, &ContainerName),
    block: &MemoryBlock,
    bytes: u64,
) -> Result<(), ResizeError> {
    let kind = block.kind;
    if bytes < block.bytes.0 {
        let mut left = block.bytes.0 - bytes;
        let placed = ledger.allocation(owner, container).and_then(|held| held.placed.get(&kind)).cloned();
        let mut placed: Vec<(Bytes, NodeId)> =
            placed.into_iter().flatten().map(|(node, bytes)| (bytes, node)).collect();
        placed.sort_unstable();
        for (of_node, node) in placed {
            let share = of_node.0.min(left);
            left -= share;
            ledger.allocation_mut(owner, container).remove_placed(kind, node, share);
            accounts::refund(ledger, node, kind, share);
        }
    } else {
        let missing = bytes - block.bytes.0;
        let all = column(&host.ids, &ledger.nodes, kind, |account| account.free);
        let free = free_capacity::offered(host, ledger, kind);
        let withheld: Vec<u64> = all.iter().zip(&free).map(|(all, free)| all.saturating_sub(*free)).collect();
        let set = host.positions(&block.affinity);
        let sum = set.iter().fold(0u64, |sum, &at| sum.saturating_add(free[at]));
        if missing > sum {
            let shortfall = |&at: &usize| Shortfall {
                node: host.id(at),
                resource: Resource::Memory(kind),
                requested: missing,
                free: free[at],
                withheld: withheld[at],
            };
            return Err(ResizeError::Shortfall(set.iter().map(shortfall).collect()));
        }
        for (at, share) in rank::split(&free, &withheld, &set, missing) {
            let node = host.id(at);
            accounts::charge(ledger, node, kind, share);
            ledger.allocation_mut(owner, container).place(kind, node, share);
        }
    }
    let held = ledger.allocation_mut(owner, container);
    for held in held.blocks.iter_mut().filter(|held| held.kind == kind) {
        held.bytes = Bytes(bytes);
    }
    Ok(())
}

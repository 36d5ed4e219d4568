//! Memory of pods with pod-level resources, and its division among the containers.
//!
//! The pod is charged once. A container with equal requests and limits gets its own memory. The other containers
//! share the rest. An init container that is not a sidecar draws from all memory that no earlier sidecar owns. The
//! blocks of containers can therefore overlap; all are on the nodes of the pod.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::{Affinity, MemoryError, RequestedBytes, StaticMemoryManager, own_bytes, requested_bytes};
use crate::{
    decision::Cause,
    hint::Provider,
    kubelet::pod_level_resources::{self, EmptyShare},
    ledger::{Ledger, MemoryBlock},
    qos::QosClass,
    request::{ContainerName, ContainerRequest, OwnerId, Request},
};

/// Returns the bytes that a pod requests in total.
pub(super) fn requested(request: &Request) -> Result<RequestedBytes, MemoryError> {
    let mut requested = request
        .resources
        .as_ref()
        .map_or_else(|| Ok(RequestedBytes::new()), |of| requested_bytes(&of.requests))?;
    requested.retain(|_, bytes| *bytes > 0);
    Ok(requested)
}

/// Checks that the containers without memory of their own get some.
pub(super) fn check_shared_part(request: &Request, whole: &RequestedBytes) -> Result<(), Cause> {
    if request.resources.is_none() {
        return Ok(());
    }
    // Invalid amounts are refused by the allocation.
    let own = |container: &ContainerRequest| own_bytes(request, container).unwrap_or_default();
    let find_empty_share = whole.iter().filter_map(|(kind, &bytes)| {
        let of_kind = |container: &ContainerRequest| own(container).get(kind).copied().unwrap_or(0);
        let shares = |container: &ContainerRequest| own(container).is_empty();
        pod_level_resources::find_empty_share(request, bytes, of_kind, shares)
            .map(|who| (who == EmptyShare::AppContainer, kind))
    });
    let words = match find_empty_share.min() {
        None => return Ok(()),
        Some((false, kind)) => {
            format!("pod rejected, pod has shared init containers but no {kind} available for them")
        }
        Some((true, kind)) => format!(
            "pod rejected, sum of exclusive container {kind} requests equals pod budget, leaving no memory for shared \
             containers"
        ),
    };
    Err(Cause::NothingToShare(Provider::Memory, words))
}

/// Subtracts amounts, saturating at zero.
fn subtract(whole: &RequestedBytes, taken: &RequestedBytes) -> RequestedBytes {
    let left = |(&kind, bytes): (&ZoneKind, &u64)| {
        (kind, bytes.saturating_sub(taken.get(&kind).copied().unwrap_or(0)))
    };
    whole.iter().map(left).collect()
}

impl StaticMemoryManager {
    /// Allocates memory for a pod and divides it among its containers.
    pub(super) fn divide(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        affinity: Affinity,
    ) -> Result<(), Cause> {
        if request.qos() != QosClass::Guaranteed {
            return Ok(());
        }
        let Ok(whole) = requested(request) else { return Ok(()) };
        check_shared_part(request, &whole)?;
        let owner = &request.owner;
        let mask = self.choose(ledger, owner, &whole, affinity)?;
        let nodes = self.nodes.set(mask);
        let blocks = |amounts: &RequestedBytes| -> Vec<MemoryBlock> {
            let block = |(&kind, &bytes)| MemoryBlock { kind, affinity: nodes.clone(), bytes: Bytes(bytes) };
            amounts.iter().filter(|(_, bytes)| **bytes > 0).map(block).collect()
        };
        let mut parts: Vec<(&ContainerName, Option<Vec<MemoryBlock>>)> = Vec::new();
        // Sidecars and app containers, each with the bytes of its own.
        let mut staying: Vec<(&ContainerName, RequestedBytes)> = Vec::new();
        let mut left = whole.clone();
        for (index, container) in request.all_containers().enumerate() {
            let is_first = index < request.init_containers.len() && !container.restartable;
            let own = own_bytes(request, container)?;
            let part = match (own.is_empty(), is_first) {
                (true, true) => Some(blocks(&left)),
                (true, false) => None,
                (false, _) => Some(blocks(&own)),
            };
            parts.push((&container.name, part));
            if !is_first {
                left = subtract(&left, &own);
                staying.push((&container.name, own));
            }
        }
        for (&kind, &bytes) in &whole {
            let charged = self.charge(ledger, kind, mask, bytes);
            place(ledger, owner, kind, charged, &staying);
        }
        let shared = blocks(&left);
        for (name, part) in parts {
            let held = ledger.allocation_mut(owner, name);
            held.blocks = part.unwrap_or_else(|| shared.clone());
            held.without_memory = held.blocks.is_empty();
        }
        ledger.owner_mut(owner).pod_level.blocks = blocks(&whole);
        Ok(())
    }
}

/// Attributes the charged bytes of a pod to its containers: first the bytes of their own; the rest to the first
/// sharing container by name, or to the last container if none shares.
fn place(
    ledger: &mut Ledger,
    owner: &OwnerId,
    kind: ZoneKind,
    charged: Vec<(NodeId, u64)>,
    staying: &[(&ContainerName, RequestedBytes)],
) {
    let sharing = staying.iter().filter(|(_, own)| own.is_empty()).min().or(staying.last());
    let mut own = staying.iter().filter_map(|(name, own)| Some((*name, *own.get(&kind)?)));
    let mut current = own.next();
    for (node, mut bytes) in charged {
        while bytes > 0 {
            let Some((name, wanted)) = &mut current else { break };
            let share = bytes.min(*wanted);
            ledger.allocation_mut(owner, name).place(kind, node, share);
            bytes -= share;
            *wanted -= share;
            if *wanted == 0 {
                current = own.next();
            }
        }
        if let Some((name, _)) = sharing {
            ledger.allocation_mut(owner, name).place(kind, node, bytes);
        }
    }
}

/// Returns the blocks to release when a container has ended: all blocks of the pod if it was the last container,
/// otherwise none. The bytes attributed to the container move to another one.
pub(super) fn release_part(
    ledger: &mut Ledger,
    owner: &OwnerId,
    placed: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
) -> Vec<MemoryBlock> {
    let account = ledger.owner_mut(owner);
    let heir = account.containers.values_mut().find(|held| !held.blocks.is_empty() || held.without_memory);
    let Some(heir) = heir else {
        let blocks = std::mem::take(&mut account.pod_level.blocks);
        ledger.drop_empty(owner, None);
        return blocks;
    };
    for (kind, nodes) in placed {
        for (node, bytes) in nodes {
            heir.place(kind, node, bytes.0);
        }
    }
    Vec::new()
}

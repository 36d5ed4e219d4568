//! The static memory manager: memory and huge pages of Guaranteed requests on sets of NUMA nodes.
//!
//! # Terms
//! - *allocatable*: bytes that a set of nodes can guarantee on an idle machine.
//! - *free*: bytes that it can still guarantee.
//! - *group*: nodes that share a block.
//!
//! # Growth rule
//! A node serves either blocks on this node alone or blocks of one group, never both, and a group neither grows nor
//! shrinks. A set of several nodes can therefore serve a block only if each of its nodes is unused or has exactly
//! this set as its group. A node leaves its group with its last block.
//!
//! # Algorithm
//! A set of nodes is a hint if it has enough allocatable memory of every kind, the growth rule permits it, and it has
//! enough free memory. The preferred hints are those of the smallest size that has enough *allocatable* memory,
//! whether it is free or not. All kinds have the same hints.
//!
//! An allocation uses the affinity from the merge of hints if it has enough free memory; otherwise the best hint that
//! includes it. Nodes are filled in ascending order.
//!
//! The containers after an init container reuse its memory on the same set of nodes, up to the size of the largest
//! init container. When a later container starts, the earlier init containers release the rest.
//!
//! # Invariant
//! On every node and for every kind, `allocatable == guaranteed + free`.

mod accounts;
mod pod_level_resources;
mod view;

use std::collections::BTreeMap;

use numaward_topology::{Bytes, Machine, NodeId, NodeSet, ZoneKind};

use self::view::RequestView;
use super::{Affinity, HintProvider, defects};
use crate::{
    decision::{Cause, Shortfall},
    hint::{HintList, Mask, NodeIndex, ProviderHints, Resource, Scope, for_each_subset},
    ledger::{Ledger, MemoryBlock, NodeAccount, ReusableMemory},
    policy::{PolicyConfig, StartProblem},
    qos::QosClass,
    quantity::Quantity,
    request::{ContainerName, ContainerRequest, OwnerId, Request, Resources},
};

/// Reason why memory cannot be allocated. The texts are the kubelet's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MemoryError {
    /// The spelling of a quantity is not a whole number of bytes.
    #[error("[memorymanager] failed to represent quantity as int64")]
    NotInteger,
    /// The merge chose no affinity, and no set of nodes can serve the request.
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NoDefaultHint,
    /// The merge chose no affinity, and the best set of nodes is not preferred.
    #[error("[memorymanager] failed to find the default preferred hint")]
    DefaultHintNotPreferred,
    /// The affinity is too small, and no set of nodes that includes it can serve the request.
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NoExtension,
    /// The affinity is preferred but too small, and the best set that includes it is not preferred.
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtensionNotPreferred,
    /// The growth rule forbids the affinity.
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    GroupViolation,
}

impl From<MemoryError> for Cause {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error.to_string())
    }
}

/// Memory manager with the policy `Static`.
#[derive(Clone, Debug)]
pub(crate) struct StaticMemoryManager {
    nodes: NodeIndex,
    /// Accounts of an idle machine.
    idle: BTreeMap<NodeId, NodeAccount>,
}

/// Requested bytes by kind of memory.
type RequestedBytes = BTreeMap<ZoneKind, u64>;

impl StaticMemoryManager {
    /// Checks the reservations against the machine and makes the accounts.
    pub(crate) fn new(
        machine: &Machine,
        nodes: &NodeIndex,
        config: &PolicyConfig,
    ) -> Result<Self, StartProblem> {
        Ok(Self { nodes: nodes.clone(), idle: accounts::make_accounts(machine, config)? })
    }

    pub(crate) fn idle(&self) -> &BTreeMap<NodeId, NodeAccount> {
        &self.idle
    }

    /// Returns the bytes that are requested in this scope. Returns `None` if a sum exceeds 64 bits; such a request
    /// cannot be served and has no hints.
    fn requested(request: &Request, scope: Scope<'_>) -> Result<Option<RequestedBytes>, MemoryError> {
        match scope {
            Scope::Container(container) => own_bytes(request, container).map(Some),
            Scope::Owner if request.resources.is_some() => pod_level_resources::requested(request).map(Some),
            Scope::Owner => {
                let of = |container: &ContainerRequest| {
                    Ok((container.restartable, requested_bytes(&container.requests)?))
                };
                let init = request.init_containers.iter().map(of).collect::<Result<Vec<_>, MemoryError>>()?;
                let apps = request.containers.iter().map(of).collect::<Result<Vec<_>, MemoryError>>()?;
                Ok(requested_by_owner(init, apps))
            }
        }
    }

    /// Returns the hints for a request with the current ledger.
    fn calculate_hints(&self, ledger: &Ledger, owner: &OwnerId, requested: &RequestedBytes) -> HintList {
        let view = RequestView::new(self, ledger, owner, requested);
        let mut least = self.nodes.ids().len();
        let mut masks = Vec::new();
        for_each_subset(self.nodes.all(), |mask| {
            if !view.enough(mask, |kind| &kind.allocatable, |_| 0) {
                return;
            }
            least = least.min(mask.count_ones() as usize);
            if view.group_allows_hint(mask)
                && view.enough(mask, |kind| &kind.free, |kind| kind.reusable(mask))
            {
                masks.push(mask);
            }
        });
        HintList::new(&self.nodes, masks, u32::try_from(least).unwrap_or(u32::MAX), |_| false)
    }

    /// Returns the best hint: by preference, then by size, then by node ids.
    fn best(hints: impl Iterator<Item = (Mask, bool)>) -> Option<(Mask, bool)> {
        hints.min_by_key(|&(mask, preferred)| (!preferred, mask.count_ones(), mask))
    }

    /// Returns the nodes on which a container gets its memory.
    fn choose(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        requested: &RequestedBytes,
        affinity: Affinity,
    ) -> Result<Mask, MemoryError> {
        let (mut mask, preferred) = if let Some(mask) = affinity.mask {
            (mask, affinity.preferred)
        } else if requested.is_empty() {
            return Err(MemoryError::NoDefaultHint);
        } else {
            let hints = self.calculate_hints(ledger, owner, requested);
            let (mask, preferred) = Self::best(hints.masks()).ok_or(MemoryError::NoDefaultHint)?;
            if affinity.preferred && !preferred {
                return Err(MemoryError::DefaultHintNotPreferred);
            }
            (mask, preferred)
        };
        let view = RequestView::new(self, ledger, owner, requested);
        if !view.enough(mask, |kind| &kind.free, |_| 0) {
            let hints = self.calculate_hints(ledger, owner, requested);
            let including = hints.masks().filter(|(hint, _)| hint & mask == mask);
            let (extension, extension_preferred) = Self::best(including).ok_or(MemoryError::NoExtension)?;
            if preferred && !extension_preferred {
                return Err(MemoryError::ExtensionNotPreferred);
            }
            mask = extension;
        }
        if view.group_allows(mask) { Ok(mask) } else { Err(MemoryError::GroupViolation) }
    }
}

/// Returns the bytes that an owner requests: the maximum of what all running containers need together and what each
/// init container needs together with the sidecars before it. Kinds that only init containers request are ignored.
/// The flag of a container says whether it is a sidecar.
fn requested_by_owner(
    init: Vec<(bool, RequestedBytes)>,
    apps: Vec<(bool, RequestedBytes)>,
) -> Option<RequestedBytes> {
    let (mut peak, mut sidecars, mut running) =
        (RequestedBytes::new(), RequestedBytes::new(), RequestedBytes::new());
    for (is_sidecar, requested) in init {
        for (kind, bytes) in requested {
            let before = sidecars.entry(kind).or_default();
            let together = before.checked_add(bytes)?;
            if is_sidecar {
                *before = together;
            } else {
                let peak = peak.entry(kind).or_default();
                *peak = together.max(*peak);
            }
        }
    }
    for (kind, bytes) in apps.into_iter().flat_map(|(_, requested)| requested) {
        let sum = running.entry(kind).or_insert_with(|| sidecars.get(&kind).copied().unwrap_or(0));
        *sum = sum.checked_add(bytes)?;
    }
    for (kind, sum) in &mut running {
        *sum = peak.get(kind).copied().unwrap_or(0).max(*sum);
    }
    Some(running)
}

/// Returns the requested bytes by kind.
fn requested_bytes(resources: &Resources) -> Result<RequestedBytes, MemoryError> {
    let amount = |(&kind, &quantity): (&ZoneKind, &Quantity)| {
        Ok((kind, quantity.as_int64().ok_or(MemoryError::NotInteger)?))
    };
    resources.memory.iter().map(amount).collect()
}

/// Returns the bytes of a container itself; none if it shares pod-level resources.
fn own_bytes(request: &Request, container: &ContainerRequest) -> Result<RequestedBytes, MemoryError> {
    if request.resources.is_some() && !container.is_guaranteed() {
        return Ok(RequestedBytes::new());
    }
    requested_bytes(&container.requests)
}

impl HintProvider for StaticMemoryManager {
    fn hints(&self, ledger: &mut Ledger, request: &Request, scope: Scope<'_>) -> ProviderHints {
        self.remove_stale(ledger);
        if request.qos() != QosClass::Guaranteed {
            return ProviderHints::NoPreference;
        }
        let Ok(Some(requested)) = Self::requested(request, scope) else { return ProviderHints::NoPreference };
        if matches!(scope, Scope::Owner)
            && pod_level_resources::check_shared_part(request, &requested).is_err()
        {
            let none = HintList::new(&self.nodes, Vec::new(), 0, |_| false);
            let by_kind = requested.keys().map(|&kind| (Resource::Memory(kind), none.clone()));
            return ProviderHints::ByResource(by_kind.collect());
        }
        let held = match scope {
            Scope::Container(container) => Some(ledger.blocks(&request.owner, &container.name)),
            Scope::Owner => defects::first_blocks_found(ledger, request),
        };
        if let Some(blocks) = held
            && !blocks.is_empty()
        {
            return self.hints_from_blocks(blocks, &requested);
        }
        let hints = self.calculate_hints(ledger, &request.owner, &requested);
        if hints.is_empty() || requested.is_empty() {
            return ProviderHints::NothingFeasible;
        }
        let by_kind = requested.keys().map(|&kind| (Resource::Memory(kind), hints.clone()));
        ProviderHints::ByResource(by_kind.collect())
    }

    fn allocate(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        container: &ContainerRequest,
        affinity: Affinity,
    ) -> Result<(), Cause> {
        self.remove_stale(ledger);
        if request.qos() != QosClass::Guaranteed {
            return Ok(());
        }
        let (owner, name) = (&request.owner, &container.name);
        let held = ledger.blocks(owner, name);
        let is_served = ledger.allocation(owner, name).is_some_and(|held| held.without_memory);
        if !held.is_empty() || is_served {
            let held = held.to_vec();
            ledger.notes.reusable_memory.update(request, name, &held);
            return Ok(());
        }
        let requested = own_bytes(request, container)?;
        let mask = self.choose(ledger, owner, &requested, affinity)?;
        let affinity = self.nodes.set(mask);
        let mut blocks = Vec::with_capacity(requested.len());
        for (&kind, &bytes) in &requested {
            let inherited = ledger.notes.reusable_memory.on(owner, kind, &affinity);
            let charged = self.charge(ledger, kind, mask, bytes.saturating_sub(inherited));
            for (node, share) in charged {
                ledger.allocation_mut(owner, name).place(kind, node, share);
            }
            blocks.push(MemoryBlock { kind, affinity: affinity.clone(), bytes: Bytes(bytes) });
        }
        ledger.notes.reusable_memory.update(request, name, &blocks);
        let held = ledger.allocation_mut(owner, name);
        held.blocks.clone_from(&blocks);
        held.without_memory = blocks.is_empty();
        reuse_init_memory(ledger, request, name, &blocks);
        ledger.drop_empty(owner, Some(name));
        Ok(())
    }

    fn allocate_pod(&self, ledger: &mut Ledger, request: &Request, affinity: Affinity) -> Result<(), Cause> {
        self.remove_stale(ledger);
        self.divide(ledger, request, affinity)
    }

    fn remove(&self, ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
        release(ledger, owner, container);
    }

    fn shortfalls(&self, ledger: &Ledger, request: &Request, scope: Scope<'_>) -> Vec<Shortfall> {
        if request.qos() != QosClass::Guaranteed {
            return Vec::new();
        }
        let Ok(Some(requested)) = Self::requested(request, scope) else { return Vec::new() };
        let of_kind = |(&kind, &requested): (&ZoneKind, &u64)| {
            let free =
                move |account: &NodeAccount| account.kinds.get(&kind).map_or(0, |account| account.free.0);
            let shortfall = move |(&node, account): (&NodeId, &NodeAccount)| {
                Shortfall::new(node, Resource::Memory(kind), requested, free(account))
            };
            ledger.nodes.iter().map(shortfall).collect::<Vec<_>>()
        };
        requested.iter().flat_map(of_kind).collect()
    }
}

impl StaticMemoryManager {
    /// Returns the nodes of existing blocks as hints. Returns no preference if the blocks do not match the request.
    fn hints_from_blocks(&self, blocks: &[MemoryBlock], requested: &RequestedBytes) -> ProviderHints {
        if blocks.len() != requested.len() {
            return ProviderHints::NoPreference;
        }
        let mut by_kind = BTreeMap::new();
        for block in blocks {
            if requested.get(&block.kind) != Some(&block.bytes.0) {
                return ProviderHints::NoPreference;
            }
            let mask = self.nodes.mask(&block.affinity);
            let hints = HintList::new(&self.nodes, vec![mask], mask.count_ones(), |_| false);
            by_kind.insert(Resource::Memory(block.kind), hints);
        }
        ProviderHints::ByResource(by_kind.into_iter().collect())
    }

    /// Charges bytes to a set of nodes in ascending order and returns the bytes by node. Every node counts the block.
    fn charge(&self, ledger: &mut Ledger, kind: ZoneKind, mask: Mask, mut bytes: u64) -> Vec<(NodeId, u64)> {
        let mut charged = Vec::new();
        let group = self.nodes.set(mask);
        for node in self.nodes.nodes(mask) {
            let Some(account) = ledger.nodes.get_mut(&node) else { continue };
            account.assignments += 1;
            account.group.clone_from(&group);
            let Some(account) = account.kinds.get_mut(&kind) else { continue };
            let share = account.charge(bytes);
            bytes -= share;
            charged.push((node, share));
        }
        charged
    }
}

/// Shrinks the blocks of earlier init containers by the memory that this container reuses.
fn reuse_init_memory(
    ledger: &mut Ledger,
    request: &Request,
    container: &ContainerName,
    blocks: &[MemoryBlock],
) {
    for block in blocks {
        let mut wanted = block.bytes.0;
        for init in request.init_containers.iter().take_while(|init| &init.name != container) {
            if init.restartable || ledger.blocks(&request.owner, &init.name).is_empty() {
                continue;
            }
            let allocation = ledger.allocation_mut(&request.owner, &init.name);
            let mut moved = Vec::new();
            let same = |held: &&mut MemoryBlock| held.kind == block.kind && held.affinity == block.affinity;
            if let Some(held) = allocation.blocks.iter_mut().find(same) {
                let share = held.bytes.0.min(wanted);
                held.bytes.0 -= share;
                wanted -= share;
                moved = allocation.take_placed(block.kind, share);
            }
            let heir = ledger.allocation_mut(&request.owner, container);
            for (node, bytes) in moved {
                heir.place(block.kind, node, bytes);
            }
        }
    }
}

/// Releases the memory of a container.
pub(crate) fn release(ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
    let Some(held) = ledger.allocation(owner, container) else { return };
    if held.blocks.is_empty() && !held.without_memory {
        return;
    }
    let allocation = ledger.allocation_mut(owner, container);
    let mut blocks = std::mem::take(&mut allocation.blocks);
    let placed = std::mem::take(&mut allocation.placed);
    allocation.without_memory = false;
    ledger.drop_empty(owner, Some(container));
    if ledger.owner(owner).is_some_and(|account| !account.pod_level.blocks.is_empty()) {
        blocks = pod_level_resources::release_part(ledger, owner, placed);
    }
    for block in blocks {
        let mut bytes = block.bytes.0;
        for node in defects::lowest_nodes_first(&block) {
            let Some(account) = ledger.nodes.get_mut(&node) else { continue };
            account.assignments = account.assignments.saturating_sub(1);
            if account.assignments == 0 {
                account.group = NodeSet::single(node);
            }
            if let Some(account) = account.kinds.get_mut(&block.kind) {
                bytes -= account.refund(bytes);
            }
        }
    }
}

impl ReusableMemory {
    /// Returns the reusable bytes of the owner's init containers by set of nodes.
    fn by_set(&self, owner: &OwnerId, kind: ZoneKind, nodes: &NodeIndex) -> Vec<(Mask, u64)> {
        let Some((_, sets)) = self.0.as_ref().filter(|(of, _)| of == owner) else { return Vec::new() };
        sets.iter()
            .filter_map(|(set, kinds)| kinds.get(&kind).map(|&bytes| (nodes.mask(set), bytes)))
            .collect()
    }

    /// Returns the reusable bytes of the owner's init containers on a set of nodes.
    fn on(&self, owner: &OwnerId, kind: ZoneKind, set: &NodeSet) -> u64 {
        let of_owner = self.0.as_ref().filter(|(of, _)| of == owner);
        of_owner.and_then(|(_, sets)| sets.get(set)?.get(&kind)).copied().unwrap_or(0)
    }

    /// Updates the reusable memory: an init container adds its blocks, another container uses them up.
    fn update(&mut self, request: &Request, container: &ContainerName, blocks: &[MemoryBlock]) {
        if self.0.as_ref().is_some_and(|(of, _)| of != &request.owner) {
            self.0 = None;
        }
        if request.is_regular_init(container) {
            let (_, sets) = self.0.get_or_insert_with(|| (request.owner.clone(), BTreeMap::new()));
            for block in blocks {
                let bytes = sets.entry(block.affinity.clone()).or_default().entry(block.kind).or_default();
                *bytes = defects::largest_init_container(*bytes, block.bytes.0);
            }
        } else if let Some((_, sets)) = &mut self.0 {
            for block in blocks {
                if let Some(bytes) =
                    sets.get_mut(&block.affinity).and_then(|kinds| kinds.get_mut(&block.kind))
                {
                    *bytes = bytes.saturating_sub(block.bytes.0);
                }
            }
        }
    }
}

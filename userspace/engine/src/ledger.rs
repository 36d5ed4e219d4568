//! The ledger: the guarantees of all workloads, and the guaranteed and free memory of each NUMA node.
//!
//! A ledger is a value: a strategy takes one and returns the next. Nothing here performs I/O. A ledger is cheap to
//! clone, because unchanged accounts of owners are shared.
//!
//! # Terms
//! - *owner*: a pod, or a workload outside Kubernetes. It is *active* from its admission until its release; the
//!   account of an inactive owner is *stale*.
//! - *block*: memory that is guaranteed on a set of nodes.
//! - *group*: the nodes of a block over several nodes.
//!
//! # Two accounts of memory
//! [`Allocation::blocks`] has the guaranteed bytes by set of nodes, as the kubelet does. [`Allocation::placed`] also
//! has the bytes that are charged to each single node for a container; their sum is the guaranteed memory of a node
//! ([`Ledger::memory`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::{
    conditions::HostConditions,
    request::{ContainerName, OwnerId, Request},
    terms::Terms,
};

/// Memory that is guaranteed on a set of nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemoryBlock {
    pub kind: ZoneKind,
    /// Nodes on which the memory is guaranteed.
    pub affinity: NodeSet,
    /// Bytes over all these nodes.
    pub bytes: Bytes,
}

/// CPUs and memory of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Exclusive CPUs. Without any, the container runs on the shared pool.
    pub cpus: Option<CpuSet>,
    /// CPUs that neither this nor any other container may use: the sibling threads of the exclusive CPUs.
    #[serde(default, skip_serializing_if = "CpuSet::is_empty")]
    pub hidden_cpus: CpuSet,
    /// Guaranteed memory, at most one block for each kind.
    pub blocks: Vec<MemoryBlock>,
    /// Bytes charged to each node for this container, by kind. Zeros are omitted.
    pub placed: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
    /// True if the container was served without a block: it requests no memory itself, and its pod has pod-level
    /// resources.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_memory: bool,
}

impl Allocation {
    pub fn is_empty(&self) -> bool {
        self.cpus.is_none() && self.blocks.is_empty() && !self.without_memory
    }

    /// Returns the CPUs that no other container may use.
    pub fn held_cpus(&self) -> CpuSet {
        self.held_sets().fold(CpuSet::new(), |all, cpus| &all | cpus)
    }

    /// Returns the exclusive CPUs and the hidden ones.
    pub(crate) fn held_sets(&self) -> impl Iterator<Item = &CpuSet> {
        self.cpus.iter().chain([&self.hidden_cpus])
    }

    /// Returns the nodes with guaranteed memory (`cpuset.mems`); empty if there are none.
    pub fn memory_nodes(&self) -> NodeSet {
        self.blocks.iter().flat_map(|block| block.affinity.iter()).collect()
    }

    /// Adds bytes that are charged to a node.
    pub(crate) fn place(&mut self, kind: ZoneKind, node: NodeId, bytes: u64) {
        if bytes > 0 {
            let placed = self.placed.entry(kind).or_default().entry(node).or_default();
            placed.0 = placed.0.saturating_add(bytes);
        }
    }

    /// Subtracts bytes that are charged to a node.
    pub(crate) fn remove_placed(&mut self, kind: ZoneKind, from: NodeId, bytes: u64) {
        if let Some(nodes) = self.placed.get_mut(&kind) {
            if let Some(placed) = nodes.get_mut(&from) {
                placed.0 = placed.0.saturating_sub(bytes);
            }
            nodes.retain(|_, placed| placed.0 > 0);
            if nodes.is_empty() {
                self.placed.remove(&kind);
            }
        }
    }

    /// Moves charged bytes from one node to another.
    pub(crate) fn move_placed(&mut self, kind: ZoneKind, from: NodeId, to: NodeId, bytes: u64) {
        self.remove_placed(kind, from, bytes);
        self.place(kind, to, bytes);
    }

    /// Removes up to `bytes` charged bytes of a kind, lowest node first, and returns the bytes by node.
    pub(crate) fn take_placed(&mut self, kind: ZoneKind, mut bytes: u64) -> Vec<(NodeId, u64)> {
        let mut taken = Vec::new();
        if let Some(nodes) = self.placed.get_mut(&kind) {
            for (&node, placed) in nodes.iter_mut() {
                let share = placed.0.min(bytes);
                placed.0 -= share;
                bytes -= share;
                if share > 0 {
                    taken.push((node, share));
                }
            }
            nodes.retain(|_, placed| placed.0 > 0);
            if nodes.is_empty() {
                self.placed.remove(&kind);
            }
        }
        taken
    }
}

/// Account of one kind of memory on one node, in bytes.
///
/// In the accounts that a strategy uses for decisions ([`Ledger::nodes`]), `allocatable == guaranteed + free` holds,
/// with one exception: with `native`, a node that lost memory can have more guaranteed than allocatable, and then has
/// nothing free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindAccount {
    /// All memory: `MemTotal` of the node including huge page pools, or the size of the pool.
    pub total: Bytes,
    /// Memory reserved for the system.
    pub reserved: Bytes,
    /// Memory that can be guaranteed: the total minus the reservation and, for base pages, minus huge page pools.
    pub allocatable: Bytes,
    #[serde(rename = "promised")]
    pub guaranteed: Bytes,
    /// Memory that can still be guaranteed.
    pub free: Bytes,
}

impl KindAccount {
    /// Charges up to `bytes` and returns the charged number.
    pub(crate) fn charge(&mut self, bytes: u64) -> u64 {
        let share = self.free.0.min(bytes);
        self.free.0 -= share;
        self.guaranteed.0 = self.guaranteed.0.saturating_add(share);
        share
    }

    /// Refunds up to `bytes` and returns the refunded number.
    pub(crate) fn refund(&mut self, bytes: u64) -> u64 {
        let share = self.guaranteed.0.min(bytes);
        self.guaranteed.0 -= share;
        self.free.0 = self.free.0.saturating_add(share);
        share
    }
}

/// Memory account of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAccount {
    /// Number of blocks that include this node, whatever their size.
    pub assignments: u64,
    /// Nodes that share blocks with this one, including itself (the kubelet's `cells`).
    pub group: NodeSet,
    pub kinds: BTreeMap<ZoneKind, KindAccount>,
}

/// Pod-level allocation of an owner, of which its containers have parts.
///
/// Parts can overlap and need not add up to the total. Each byte is placed for one of the containers
/// ([`Allocation::placed`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodAllocation {
    /// CPUs that only the containers of this owner may use.
    pub cpus: Option<CpuSet>,
    /// Memory that the containers have together, at most one block for each kind.
    pub blocks: Vec<MemoryBlock>,
}

impl PodAllocation {
    pub fn is_empty(&self) -> bool {
        self.cpus.is_none() && self.blocks.is_empty()
    }
}

/// Account of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerAccount {
    /// Request of an active owner; `None` if the account is stale.
    pub request: Option<Arc<Request>>,
    /// Terms of the admission.
    #[serde(default, skip_serializing_if = "Terms::is_default")]
    pub terms: Terms,
    pub started: BTreeSet<ContainerName>,
    /// Allocations by container. Empty ones are omitted.
    pub containers: BTreeMap<ContainerName, Allocation>,
    /// Allocation that the containers share.
    #[serde(rename = "whole", default, skip_serializing_if = "PodAllocation::is_empty")]
    pub pod_level: PodAllocation,
}

impl OwnerAccount {
    /// Returns the charged blocks: those of the pod if there are any, otherwise those of the containers.
    pub(crate) fn charged_blocks(&self) -> impl Iterator<Item = &MemoryBlock> {
        let apart = self.pod_level.blocks.is_empty().then(|| self.containers.values());
        self.pod_level.blocks.iter().chain(apart.into_iter().flatten().flat_map(|held| &held.blocks))
    }

    /// Returns the CPUs that only the containers of this owner may use.
    pub(crate) fn exclusive_cpus(&self) -> impl Iterator<Item = &CpuSet> {
        self.containers.values().flat_map(Allocation::held_sets).chain(&self.pod_level.cpus)
    }
}

/// All guarantees, and the remaining capacity. Two ledgers are equal if their guarantees are; the strategy's notes
/// and the host conditions, which a restart loses, are not compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ledger {
    pub(crate) nodes: BTreeMap<NodeId, NodeAccount>,
    pub(crate) shared_pool: CpuSet,
    owners: BTreeMap<OwnerId, Arc<OwnerAccount>>,
    #[serde(skip)]
    pub(crate) notes: Notes,
    #[serde(skip)]
    conditions: Arc<HostConditions>,
}

/// CPUs of init containers that later containers can reuse, for the owner that was admitted last.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReusableCpus(pub(crate) Option<(OwnerId, CpuSet)>);

/// Memory of init containers that later containers can reuse, for the owner that was admitted last.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReusableMemory(pub(crate) Option<(OwnerId, BytesBySet)>);

/// Bytes by set of nodes and kind.
pub(crate) type BytesBySet = BTreeMap<NodeSet, BTreeMap<ZoneKind, u64>>;

/// State of a strategy that does not survive a restart.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    /// True if owners are being admitted again after a restart. Until all of them are, no allocation is stale.
    pub(crate) restoring: bool,
    pub(crate) reusable_cpus: ReusableCpus,
    pub(crate) reusable_memory: ReusableMemory,
    /// CPUs that the kubelet took in the current admission although they were not free.
    pub(crate) not_free: CpuSet,
}

impl Notes {
    /// Notes those of the taken CPUs that were not free.
    pub(crate) fn note_taken(&mut self, taken: &CpuSet, free: &CpuSet) {
        self.not_free = &self.not_free | &(taken - free);
    }
}

impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.nodes == other.nodes && self.shared_pool == other.shared_pool && self.owners == other.owners
    }
}

impl Eq for Ledger {}

impl Ledger {
    /// Makes a ledger without guarantees.
    pub(crate) fn idle(nodes: BTreeMap<NodeId, NodeAccount>, shared_pool: CpuSet) -> Self {
        Self { nodes, shared_pool, ..Self::default() }
    }

    /// Returns the memory accounts by node that the strategy uses for decisions. Empty if memory is not managed.
    pub fn nodes(&self) -> &BTreeMap<NodeId, NodeAccount> {
        &self.nodes
    }

    /// Returns the host conditions for the next decisions.
    pub fn conditions(&self) -> &Arc<HostConditions> {
        &self.conditions
    }

    /// Replaces the host conditions. Existing guarantees do not change.
    pub fn set_conditions(&mut self, conditions: Arc<HostConditions>) {
        self.conditions = conditions;
    }

    /// Returns the CPUs that no container has exclusively. Empty if CPUs are not managed.
    pub fn shared_pool(&self) -> &CpuSet {
        &self.shared_pool
    }

    /// Returns the accounts of all owners. Unchanged accounts are shared with the previous ledger.
    pub fn owners(&self) -> impl Iterator<Item = (&OwnerId, &Arc<OwnerAccount>)> {
        self.owners.iter()
    }

    pub fn owner(&self, owner: &OwnerId) -> Option<&Arc<OwnerAccount>> {
        self.owners.get(owner)
    }

    /// Copies the accounts that differ between `from` and `to` from `to` into this ledger. The caller has to
    /// recompute the node accounts with [`crate::Strategy::rebase`].
    pub fn copy_changed_owners(&mut self, from: &Self, to: &Self) {
        let differs = |owner: &&OwnerId| from.owner(owner) != to.owner(owner);
        for owner in from.owners.keys().chain(to.owners.keys()).filter(differs) {
            match to.owners.get(owner) {
                Some(account) => drop(self.owners.insert(owner.clone(), account.clone())),
                None => drop(self.owners.remove(owner)),
            }
        }
    }

    /// Returns the allocations of all containers, in the order of names.
    pub fn allocations(&self) -> impl Iterator<Item = (&OwnerId, &ContainerName, &Allocation)> {
        self.owners.iter().flat_map(|(owner, account)| {
            account.containers.iter().map(move |(container, allocation)| (owner, container, allocation))
        })
    }

    /// Returns the exclusive CPUs of all containers and the hidden CPUs.
    pub fn all_exclusive_cpus(&self) -> CpuSet {
        self.allocations().flat_map(|(_, _, held)| held.held_sets()).flat_map(CpuSet::iter).collect()
    }

    /// Returns the memory accounts by node and kind for reports. The guaranteed memory of a node is the sum of the
    /// placed bytes.
    ///
    /// The accounts in [`Ledger::nodes`] can differ: the kubelet does not know how much each node of a group gave,
    /// and a node that lost memory can have more placed than it has.
    pub fn memory(&self) -> BTreeMap<NodeId, BTreeMap<ZoneKind, KindAccount>> {
        let with_none = |kinds: &BTreeMap<ZoneKind, KindAccount>| {
            kinds
                .iter()
                .map(|(&kind, account)| (kind, KindAccount { guaranteed: Bytes(0), ..*account }))
                .collect()
        };
        let mut memory: BTreeMap<NodeId, BTreeMap<ZoneKind, KindAccount>> =
            self.nodes.iter().map(|(&node, account)| (node, with_none(&account.kinds))).collect();
        for (_, _, allocation) in self.allocations() {
            for (kind, nodes) in &allocation.placed {
                for (node, bytes) in nodes {
                    if let Some(account) = memory.get_mut(node).and_then(|kinds| kinds.get_mut(kind)) {
                        account.guaranteed.0 = account.guaranteed.0.saturating_add(bytes.0);
                    }
                }
            }
        }
        memory
    }

    pub fn allocation(&self, owner: &OwnerId, container: &ContainerName) -> Option<&Allocation> {
        self.owners.get(owner)?.containers.get(container)
    }

    /// Returns the CPUs on which a container may run: its exclusive CPUs, otherwise the shared pool.
    pub fn cpus_of(&self, owner: &OwnerId, container: &ContainerName) -> &CpuSet {
        self.allocation(owner, container)
            .and_then(|allocation| allocation.cpus.as_ref())
            .unwrap_or(&self.shared_pool)
    }

    /// Makes an owner active that already holds its allocations.
    pub fn set_active(&mut self, request: Request) {
        let owner = request.owner.clone();
        self.owner_mut(&owner).request = Some(Arc::new(request));
    }

    /// Records that a container of an active owner was already running before a restart.
    pub fn set_started(&mut self, owner: &OwnerId, container: &ContainerName) {
        if self.owner(owner).is_some_and(|account| account.request.is_some()) {
            self.owner_mut(owner).started.insert(container.clone());
        }
    }

    pub(crate) fn exclusive_cpus(&self, owner: &OwnerId, container: &ContainerName) -> Option<&CpuSet> {
        self.allocation(owner, container)?.cpus.as_ref()
    }

    /// Returns the CPUs of all other containers. A container can share CPUs with another one of its owner, because an
    /// init container borrows CPUs of later containers, and with any container in a state that was taken over.
    pub(crate) fn cpus_of_other_containers(&self, owner: &OwnerId, container: &ContainerName) -> CpuSet {
        let others = self.allocations().filter(|(of, name, _)| (*of, *name) != (owner, container));
        let wholes =
            self.owners().filter(|(of, _)| *of != owner).filter_map(|(_, of)| of.pod_level.cpus.as_ref());
        let held = others.flat_map(|(_, _, held)| held.held_sets());
        held.chain(wholes).flat_map(CpuSet::iter).collect()
    }

    /// Returns the blocks of a container; empty if it has no memory.
    pub(crate) fn blocks(&self, owner: &OwnerId, container: &ContainerName) -> &[MemoryBlock] {
        self.allocation(owner, container).map_or(&[], |allocation| &allocation.blocks)
    }

    /// Returns the account of an owner, created if absent.
    pub(crate) fn owner_mut(&mut self, owner: &OwnerId) -> &mut OwnerAccount {
        Arc::make_mut(self.owners.entry(owner.clone()).or_default())
    }

    /// Returns the allocation of a container, created if absent. The caller has to call [`Self::drop_empty`] if it
    /// may be empty afterwards.
    pub(crate) fn allocation_mut(&mut self, owner: &OwnerId, container: &ContainerName) -> &mut Allocation {
        self.owner_mut(owner).containers.entry(container.clone()).or_default()
    }

    /// Gives the allocations of these owners to one owner, as those of the only container of its request, which has started. The charged
    /// CPUs and bytes of each node do not change.
    pub fn unite(&mut self, parts: &[OwnerId], owner: &OwnerId, request: Request, terms: Terms) {
        let accounts: Vec<_> = parts.iter().filter_map(|part| self.owners.remove(part)).collect();
        let mut united = Allocation::default();
        for held in accounts.iter().flat_map(|account| account.containers.values()) {
            if let Some(cpus) = &held.cpus {
                united.cpus = Some(&united.cpus.unwrap_or_default() | cpus);
            }
            united.hidden_cpus = &united.hidden_cpus | &held.hidden_cpus;
            for block in &held.blocks {
                self.count_block(block, |count| count.saturating_sub(1));
                match united.blocks.iter_mut().find(|other| other.kind == block.kind) {
                    Some(other) => {
                        other.affinity.extend(block.affinity.iter());
                        other.bytes.0 = other.bytes.0.saturating_add(block.bytes.0);
                    }
                    None => united.blocks.push(block.clone()),
                }
            }
            for (&kind, nodes) in &held.placed {
                for (&node, bytes) in nodes {
                    united.place(kind, node, bytes.0);
                }
            }
        }
        for block in &united.blocks {
            self.count_block(block, |count| count.saturating_add(1));
        }
        let names: BTreeSet<_> = request.containers.iter().map(|container| container.name.clone()).collect();
        let held = names.first().filter(|_| !united.is_empty()).map(|name| (name.clone(), united));
        let account = OwnerAccount {
            request: Some(Arc::new(request)),
            terms,
            started: names,
            containers: held.into_iter().collect(),
            pod_level: PodAllocation::default(),
        };
        self.owners.insert(owner.clone(), Arc::new(account));
    }

    /// Changes the number of blocks of the nodes of a block.
    fn count_block(&mut self, block: &MemoryBlock, change: impl Fn(u64) -> u64) {
        for node in block.affinity.iter() {
            if let Some(account) = self.nodes.get_mut(&node) {
                account.assignments = change(account.assignments);
            }
        }
    }

    /// Removes an empty allocation of the container, and the account of the owner if it is stale and empty.
    pub(crate) fn drop_empty(&mut self, owner: &OwnerId, container: Option<&ContainerName>) {
        let Some(account) = self.owners.get_mut(owner) else { return };
        if let Some(container) = container
            && account.containers.get(container).is_some_and(Allocation::is_empty)
        {
            Arc::make_mut(account).containers.remove(container);
        }
        if account.request.is_none() && account.containers.is_empty() && account.pod_level.is_empty() {
            self.owners.remove(owner);
        }
    }

    /// Returns the containers with an allocation that belong to no active owner.
    pub(crate) fn stale(&self) -> Vec<(OwnerId, ContainerName)> {
        let is_stale = |account: &OwnerAccount, container: &ContainerName| {
            !account.request.as_ref().is_some_and(|request| request.has_container(container))
        };
        self.owners
            .iter()
            .flat_map(|(owner, account)| {
                account
                    .containers
                    .keys()
                    .filter(|container| is_stale(account, container))
                    .map(|container| (owner.clone(), container.clone()))
            })
            .collect()
    }
}

//! The ledger: who holds what. All allocations, and per node and kind of memory what is promised and free.
//!
//! A ledger is a value. A strategy reads one and gives back its successor; nothing here does I/O. It is cheap
//! to clone: the accounts of owners are shared until they change.
//!
//! Terms: an *owner* is a pod, or a workload outside Kubernetes; it is *active* while somebody wants it to
//! run. A *block* promises memory on a set of nodes; a *group* is what a block over several nodes joins.
//!
//! The ledger keeps two books of memory. [`Allocation::blocks`] says what was promised on which set of nodes;
//! this is all that the kubelet knows. [`Allocation::placed`] says in addition how many bytes were charged to
//! which node for this container; what is promised on a node is the sum of these ([`Ledger::memory`]).

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

/// Memory promised on a set of nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemoryBlock {
    /// The kind of memory.
    pub kind: ZoneKind,
    /// The nodes on which it is promised.
    pub affinity: NodeSet,
    /// How much, over all these nodes.
    pub bytes: Bytes,
}

/// What one container holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// CPUs that only this container may use. Without any, it runs on the shared pool.
    pub cpus: Option<CpuSet>,
    /// CPUs that nobody may use, not even this container: the other threads of the cores of its own.
    #[serde(default, skip_serializing_if = "CpuSet::is_empty")]
    pub hidden_cpus: CpuSet,
    /// Memory promised to it, at most one block a kind.
    pub blocks: Vec<MemoryBlock>,
    /// The bytes charged to each node for it, by kind. Zeros are omitted.
    pub placed: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
    /// It was served without a block: it has no amounts of its own, and its pod has some as a whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_memory: bool,
}

impl Allocation {
    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.cpus.is_none() && self.blocks.is_empty() && !self.without_memory
    }

    /// The CPUs that no other container may use.
    pub fn held_cpus(&self) -> CpuSet {
        self.held_sets().fold(CpuSet::new(), |all, cpus| &all | cpus)
    }

    /// The same in parts: its own, and those that are hidden beside them.
    pub(crate) fn held_sets(&self) -> impl Iterator<Item = &CpuSet> {
        self.cpus.iter().chain([&self.hidden_cpus])
    }

    /// The nodes on which memory is promised (`cpuset.mems`); empty if none is.
    pub fn memory_nodes(&self) -> NodeSet {
        self.blocks.iter().flat_map(|block| block.affinity.iter()).collect()
    }

    /// Adds to the bytes charged to a node.
    pub(crate) fn place(&mut self, kind: ZoneKind, node: NodeId, bytes: u64) {
        if bytes > 0 {
            let placed = self.placed.entry(kind).or_default().entry(node).or_default();
            placed.0 = placed.0.saturating_add(bytes);
        }
    }

    /// Takes bytes off those charged to a node.
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

    /// Has bytes charged to another node than before.
    pub(crate) fn move_placed(&mut self, kind: ZoneKind, from: NodeId, to: NodeId, bytes: u64) {
        self.remove_placed(kind, from, bytes);
        self.place(kind, to, bytes);
    }

    /// Takes up to `bytes` charged bytes of a kind away, lowest node first, and says from where.
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

/// The account of one kind of memory on one node, in bytes.
///
/// In the accounts by which a strategy decides ([`Ledger::nodes`]) `allocatable == promised + free` always holds, but
/// for this: with `native` a node that lost memory has all promised that is placed on it, and nothing free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindAccount {
    /// All there is (`MemTotal` of the node, pages in hugepage pools included; or the pool).
    pub total: Bytes,
    /// Kept for the system.
    pub reserved: Bytes,
    /// What can be promised: the total without the reservation, for base pages also without hugepage pools.
    pub allocatable: Bytes,
    /// What is promised.
    #[serde(rename = "promised")]
    pub guaranteed: Bytes,
    /// What can still be promised.
    pub free: Bytes,
}

impl KindAccount {
    /// Promises up to `bytes` and says how much it was.
    pub(crate) fn charge(&mut self, bytes: u64) -> u64 {
        let share = self.free.0.min(bytes);
        self.free.0 -= share;
        self.guaranteed.0 = self.guaranteed.0.saturating_add(share);
        share
    }

    /// Gives up to `bytes` of what is promised back and says how much it was.
    pub(crate) fn refund(&mut self, bytes: u64) -> u64 {
        let share = self.guaranteed.0.min(bytes);
        self.guaranteed.0 -= share;
        self.free.0 = self.free.0.saturating_add(share);
        share
    }
}

/// The account of one node's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAccount {
    /// Blocks that name this node; one a block, whatever its size.
    pub assignments: u64,
    /// The nodes that share blocks with this one, itself included (the kubelet's `cells`).
    pub group: NodeSet,
    /// By kind of memory.
    pub kinds: BTreeMap<ZoneKind, KindAccount>,
}

/// What an owner holds as a whole, of which its containers have parts.
///
/// The parts can overlap, and need not add up to the whole. Each byte of it is placed ([`Allocation::placed`]) for one
/// of the containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodAllocation {
    /// CPUs that only this owner's containers may use.
    pub cpus: Option<CpuSet>,
    /// Memory promised to them together, at most one block a kind.
    pub blocks: Vec<MemoryBlock>,
}

impl PodAllocation {
    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.cpus.is_none() && self.blocks.is_empty()
    }
}

/// The account of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerAccount {
    /// What it asked for, while it is active. Without it the account is stale: nobody wants it any more.
    pub request: Option<Arc<Request>>,
    /// On which terms it was admitted.
    #[serde(default, skip_serializing_if = "Terms::is_default")]
    pub terms: Terms,
    /// Containers that have been started.
    pub started: BTreeSet<ContainerName>,
    /// What its containers hold. Containers that hold nothing are omitted.
    pub containers: BTreeMap<ContainerName, Allocation>,
    /// What they hold parts of.
    #[serde(rename = "whole", default, skip_serializing_if = "PodAllocation::is_empty")]
    pub pod_level: PodAllocation,
}

impl OwnerAccount {
    /// The blocks that count: of the whole where there is one, else those of the containers.
    pub(crate) fn charged_blocks(&self) -> impl Iterator<Item = &MemoryBlock> {
        let apart = self.pod_level.blocks.is_empty().then(|| self.containers.values());
        self.pod_level.blocks.iter().chain(apart.into_iter().flatten().flat_map(|held| &held.blocks))
    }

    /// The CPUs that only this owner's containers may use.
    pub(crate) fn exclusive_cpus(&self) -> impl Iterator<Item = &CpuSet> {
        self.containers.values().flat_map(Allocation::held_sets).chain(&self.pod_level.cpus)
    }
}

/// All promises, and what is left to promise. Compared by promises alone: the strategy's short-lived notes and the host's
/// conditions (both are lost in a restart) do not count.
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

/// What init containers leave to the containers after them, for the owner that was admitted last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reusable {
    pub(crate) cpus: Option<(OwnerId, CpuSet)>,
    pub(crate) memory: Option<(OwnerId, BytesBySet)>,
}

/// Bytes by set of nodes and kind.
pub(crate) type BytesBySet = BTreeMap<NodeSet, BTreeMap<ZoneKind, u64>>;

/// What a strategy remembers between decisions, but not over a restart.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    /// Owners are being admitted again after a restart: what nobody asked for yet is not stale.
    pub(crate) restoring: bool,
    /// What the init containers of the owner admitted last leave to its later containers.
    pub(crate) reusable: Reusable,
}

impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.nodes == other.nodes && self.shared_pool == other.shared_pool && self.owners == other.owners
    }
}

impl Eq for Ledger {}

impl Ledger {
    /// Nothing is promised.
    pub(crate) fn idle(nodes: BTreeMap<NodeId, NodeAccount>, shared_pool: CpuSet) -> Self {
        Self { nodes, shared_pool, ..Self::default() }
    }

    /// The accounts of memory by node, by which the strategy decides. Empty where memory is not managed.
    pub fn nodes(&self) -> &BTreeMap<NodeId, NodeAccount> {
        &self.nodes
    }

    /// What the host says, for the next decisions.
    pub fn conditions(&self) -> &Arc<HostConditions> {
        &self.conditions
    }

    /// Takes over what the host says now. Nothing that is promised changes.
    pub fn set_conditions(&mut self, conditions: Arc<HostConditions>) {
        self.conditions = conditions;
    }

    /// CPUs that are exclusive to nobody. Empty where CPUs are not managed.
    pub fn shared_pool(&self) -> &CpuSet {
        &self.shared_pool
    }

    /// The accounts of all owners. One that did not change is the same in a ledger and its successor.
    pub fn owners(&self) -> impl Iterator<Item = (&OwnerId, &Arc<OwnerAccount>)> {
        self.owners.iter()
    }

    /// The account of an owner.
    pub fn owner(&self, owner: &OwnerId) -> Option<&Arc<OwnerAccount>> {
        self.owners.get(owner)
    }

    /// Gives the owners whose accounts differ between two ledgers those of the second. The accounts of the nodes are to
    /// be made anew afterwards, by [`crate::Strategy::rebase`].
    pub fn copy_changed_owners(&mut self, from: &Self, to: &Self) {
        let differs = |owner: &&OwnerId| from.owner(owner) != to.owner(owner);
        for owner in from.owners.keys().chain(to.owners.keys()).filter(differs) {
            match to.owners.get(owner) {
                Some(account) => drop(self.owners.insert(owner.clone(), account.clone())),
                None => drop(self.owners.remove(owner)),
            }
        }
    }

    /// What every container holds, in the order of names.
    pub fn allocations(&self) -> impl Iterator<Item = (&OwnerId, &ContainerName, &Allocation)> {
        self.owners.iter().flat_map(|(owner, account)| {
            account.containers.iter().map(move |(container, allocation)| (owner, container, allocation))
        })
    }

    /// The CPUs that are exclusive to any container, with those that are hidden beside them.
    pub fn all_exclusive_cpus(&self) -> CpuSet {
        self.allocations().flat_map(|(_, _, held)| held.held_sets()).flat_map(CpuSet::iter).collect()
    }

    /// The accounts of memory by node and kind, for those who report them: what is promised on a node is the sum of
    /// what is placed there.
    ///
    /// A strategy may know less exactly ([`Ledger::nodes`]): the kubelet's does not know which nodes of a group gave how
    /// much, and a node that lost memory has more placed on it than it has.
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

    /// What a container holds, if anything.
    pub fn allocation(&self, owner: &OwnerId, container: &ContainerName) -> Option<&Allocation> {
        self.owners.get(owner)?.containers.get(container)
    }

    /// The CPUs on which a container may run: its own, else the shared pool.
    pub fn cpus_of(&self, owner: &OwnerId, container: &ContainerName) -> &CpuSet {
        self.allocation(owner, container)
            .and_then(|allocation| allocation.cpus.as_ref())
            .unwrap_or(&self.shared_pool)
    }

    /// Takes note that somebody wants an owner to run, that holds all that it asks for already.
    pub fn set_active(&mut self, request: Request) {
        let owner = request.owner.clone();
        self.owner_mut(&owner).request = Some(Arc::new(request));
    }

    /// Takes note that a container of an active owner runs since before a restart.
    pub fn set_started(&mut self, owner: &OwnerId, container: &ContainerName) {
        if self.owner(owner).is_some_and(|account| account.request.is_some()) {
            self.owner_mut(owner).started.insert(container.clone());
        }
    }

    /// The exclusive CPUs of a container.
    pub(crate) fn exclusive_cpus(&self, owner: &OwnerId, container: &ContainerName) -> Option<&CpuSet> {
        self.allocation(owner, container)?.cpus.as_ref()
    }

    /// The CPUs that all other containers hold. A container can share some with those of its owner: an init container
    /// borrows from those that start after it has ended. What was taken over can overlap with any.
    pub(crate) fn cpus_of_other_containers(&self, owner: &OwnerId, container: &ContainerName) -> CpuSet {
        let others = self.allocations().filter(|(of, name, _)| (*of, *name) != (owner, container));
        let wholes =
            self.owners().filter(|(of, _)| *of != owner).filter_map(|(_, of)| of.pod_level.cpus.as_ref());
        let held = others.flat_map(|(_, _, held)| held.held_sets());
        held.chain(wholes).flat_map(CpuSet::iter).collect()
    }

    /// The blocks of a container; none if it holds no memory.
    pub(crate) fn blocks(&self, owner: &OwnerId, container: &ContainerName) -> &[MemoryBlock] {
        self.allocation(owner, container).map_or(&[], |allocation| &allocation.blocks)
    }

    /// The account of an owner, made if there is none.
    pub(crate) fn owner_mut(&mut self, owner: &OwnerId) -> &mut OwnerAccount {
        Arc::make_mut(self.owners.entry(owner.clone()).or_default())
    }

    /// What a container holds, made if it holds nothing. To be followed by [`Self::drop_empty`] if it may
    /// still hold nothing afterwards.
    pub(crate) fn allocation_mut(&mut self, owner: &OwnerId, container: &ContainerName) -> &mut Allocation {
        self.owner_mut(owner).containers.entry(container.clone()).or_default()
    }

    /// Forgets a container that holds nothing, and an owner that is stale and holds nothing.
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

    /// Containers that hold something although no active owner has them.
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

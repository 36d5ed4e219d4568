//! Restoring the state of a previous run.
//!
//! The kubelet starts its CPU manager, then its memory manager. Each reads its state file and compares it with the
//! machine and the configuration; a mismatch prevents the start. Then the running owners are admitted again one by
//! one. Allocations of other owners are released only afterwards.

use std::{collections::BTreeMap, sync::Arc};

use numaward_topology::{CpuId, CpuSet, NodeId, NodeSet, ZoneKind};

use super::{KubeletStrategy, StaticMemoryManager, defects};
use crate::{
    checkpoint::{CheckpointError, CpuCheckpoint, MemoryCheckpoint},
    ledger::{Allocation, KindAccount, Ledger, MemoryBlock, NodeAccount, PodAllocation},
    policy::{Component, KubeletVersion, RestoreProblem, StartError, StartPhase, StartProblem},
    request::{ContainerName, OwnerId},
    strategy::Strategy as _,
};

/// State files of a previous run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoints {
    /// Content of `cpu_manager_state`.
    pub cpus: Option<CpuCheckpoint>,
    /// Content of `memory_manager_state`.
    pub memory: Option<MemoryCheckpoint>,
}

/// A CPU that is exclusive to containers of two pods in a state file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: CPU {cpu} is exclusive to containers of pod {} and of pod {}", CpuCheckpoint::FILE, .pods[0], .pods[1])]
pub struct SharedCpus {
    cpu: CpuId,
    pods: [OwnerId; 2],
}

/// Name of the manager in messages, and name of the state file.
const CPU_STATE: (&str, &str) = ("CPU manager", CpuCheckpoint::FILE);
const MEMORY_STATE: (&str, &str) = ("memory manager", MemoryCheckpoint::FILE);

fn unusable((manager, file): (&'static str, &str), directory: &str, problem: RestoreProblem) -> StartProblem {
    StartProblem::Restore { manager, file: format!("{directory}/{file}"), problem: problem.into() }
}

fn start_error(component: Component) -> impl Fn(StartProblem) -> StartError {
    StartError::with_context(component, StartPhase::Start)
}

impl Checkpoints {
    /// Parses state files as a kubelet of this version does. `directory` only appears in messages.
    pub fn read(
        cpus: Option<&str>,
        memory: Option<&str>,
        directory: &str,
        version: KubeletVersion,
    ) -> Result<Self, StartError> {
        let corrupt = |state| move |error| unusable(state, directory, RestoreProblem::Corrupt(error));
        let cpus = cpus.map(CpuCheckpoint::read).transpose().map_err(corrupt(CPU_STATE));
        let memory = memory
            .map(|text| MemoryCheckpoint::read(text, version))
            .transpose()
            .map_err(corrupt(MEMORY_STATE));
        Ok(Self {
            cpus: cpus.map_err(start_error(Component::CpuManager))?,
            memory: memory.map_err(start_error(Component::MemoryManager))?,
        })
    }

    /// Turns the CPUs of a pod into pod-level CPUs if its containers share some: CPUs of an init container that has ended, or
    /// of a pod with pod-level resources in a file without pod entries. No CPU is exclusive to two containers afterwards.
    ///
    /// # Errors
    ///
    /// If containers of two pods share a CPU.
    pub fn share_within_pods(&mut self) -> Result<(), SharedCpus> {
        let Some(checkpoint) = &mut self.cpus else { return Ok(()) };
        let mut holders: BTreeMap<CpuId, &OwnerId> = BTreeMap::new();
        let mut wholes = Vec::new();
        for (owner, containers) in &checkpoint.entries {
            let whole = checkpoint.pods.as_ref().and_then(|pods| pods.get(owner));
            let union: CpuSet = containers.values().chain(whole).flat_map(CpuSet::iter).collect();
            for cpu in union.iter() {
                if let Some(other) = holders.insert(cpu, owner) {
                    return Err(SharedCpus { cpu, pods: [other.clone(), owner.clone()] });
                }
            }
            if whole.is_none() && containers.values().map(CpuSet::len).sum::<usize>() > union.len() {
                wholes.push((owner.clone(), union));
            }
        }
        if !wholes.is_empty() {
            checkpoint.pods.get_or_insert_default().extend(wholes);
        }
        Ok(())
    }

    /// Returns whether a file has pod entries.
    pub fn has_pod_entries(&self) -> bool {
        self.cpus.as_ref().is_some_and(|cpus| cpus.pods.is_some())
            || self.memory.as_ref().is_some_and(|memory| memory.pods.is_some())
    }

    /// Returns the ledger that the files describe, without any check against a machine or a policy. Suitable for
    /// reports, not for decisions.
    pub fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::default();
        if let Some(checkpoint) = &self.cpus {
            take_cpus(&mut ledger, checkpoint);
        }
        if let Some(checkpoint) = &self.memory {
            take_memory(&mut ledger, checkpoint);
        }
        place(&mut ledger);
        ledger
    }
}

fn take_cpus(ledger: &mut Ledger, checkpoint: &CpuCheckpoint) {
    ledger.shared_pool.clone_from(&checkpoint.shared_pool);
    for (owner, containers) in &checkpoint.entries {
        for (container, cpus) in containers {
            ledger.allocation_mut(owner, container).cpus = Some(cpus.clone());
        }
    }
    for (owner, cpus) in checkpoint.pods.iter().flatten() {
        ledger.owner_mut(owner).pod_level.cpus = Some(cpus.clone());
    }
}

fn take_memory(ledger: &mut Ledger, checkpoint: &MemoryCheckpoint) {
    ledger.nodes.clone_from(&checkpoint.nodes);
    for (owner, containers) in &checkpoint.entries {
        for (container, blocks) in containers {
            let held = ledger.allocation_mut(owner, container);
            held.blocks.clone_from(blocks);
            held.without_memory = blocks.is_empty();
        }
    }
    for (owner, blocks) in checkpoint.pods.iter().flatten() {
        ledger.owner_mut(owner).pod_level.blocks.clone_from(blocks);
    }
}

/// Outcome of a start.
#[derive(Clone, Debug)]
pub struct RestoreOutcome {
    /// Ledger, or the error that prevents the start. No allocation is stale until
    /// [`KubeletStrategy::finish_restore`].
    pub ledger: Result<Ledger, StartError>,
    /// Current state files. A component that started has written its file, even if a later component failed.
    pub checkpoints: Checkpoints,
}

impl KubeletStrategy {
    /// Restores the state of a previous run, or starts with an idle ledger. `directory` only appears in messages.
    pub fn restore(&self, mut checkpoints: Checkpoints, directory: &str) -> RestoreOutcome {
        let mut ledger = Ledger::default();
        ledger.notes.restoring = true;
        let restored = self
            .restore_cpus(&mut ledger, &mut checkpoints.cpus, directory)
            .map_err(start_error(Component::CpuManager))
            .and_then(|()| {
                self.restore_memory(&mut ledger, &mut checkpoints.memory, directory)
                    .map_err(start_error(Component::MemoryManager))
            });
        RestoreOutcome { ledger: restored.map(|()| ledger), checkpoints }
    }

    /// Ends the restore: all running owners have been admitted again, and other allocations become stale.
    pub fn finish_restore(&self, ledger: &Ledger) -> Ledger {
        let mut next = ledger.clone();
        next.notes.restoring = false;
        next
    }

    /// Returns the state files for a ledger.
    pub fn checkpoints(&self, ledger: &Ledger) -> Checkpoints {
        Checkpoints {
            cpus: Some(CpuCheckpoint::from_ledger(
                self.cpu_policy(),
                ledger,
                self.places_pod_level_resources(),
            )),
            memory: Some(MemoryCheckpoint::from_ledger(
                self.memory_policy(),
                ledger,
                self.places_pod_level_resources(),
            )),
        }
    }

    /// Returns the state files of a kubelet with these allocations of containers and pods, which any strategy may
    /// have decided. The shared pool and the node accounts are recomputed, as the kubelet does to check its files.
    pub fn checkpoints_for(
        &self,
        held: impl IntoIterator<Item = (OwnerId, ContainerName, Allocation)>,
        wholes: impl IntoIterator<Item = (OwnerId, PodAllocation)>,
    ) -> Result<Checkpoints, StartProblem> {
        let mut ledger = self.idle();
        for (owner, whole) in wholes {
            ledger.owner_mut(&owner).pod_level = whole;
        }
        for (owner, container, allocation) in held {
            *ledger.allocation_mut(&owner, &container) = allocation;
        }
        let given: CpuSet =
            ledger.owners().flat_map(|(_, of)| of.exclusive_cpus()).flat_map(CpuSet::iter).collect();
        ledger.shared_pool = &ledger.shared_pool - &given;
        if let Some(memory) = &self.memory {
            ledger.nodes = recharge(memory, &ledger)?;
        }
        Ok(self.checkpoints(&ledger))
    }

    /// Checks that pod entries are supported. To a kubelet without the feature gate, a file with pod entries looks
    /// damaged.
    fn check_version(&self, has_pods: bool) -> Result<(), RestoreProblem> {
        if has_pods && !self.places_pod_level_resources() {
            return Err(RestoreProblem::Corrupt(CheckpointError::OtherVersion));
        }
        Ok(())
    }

    fn restore_cpus(
        &self,
        ledger: &mut Ledger,
        checkpoint: &mut Option<CpuCheckpoint>,
        directory: &str,
    ) -> Result<(), StartProblem> {
        let configured = self.cpu_policy();
        if let Some(checkpoint) = checkpoint {
            self.check_version(checkpoint.pods.is_some())
                .map_err(|problem| unusable(CPU_STATE, directory, problem))?;
            if checkpoint.policy != configured {
                let problem = RestoreProblem::OtherCpuPolicy { configured, saved: checkpoint.policy.clone() };
                return Err(unusable(CPU_STATE, directory, problem));
            }
            take_cpus(ledger, checkpoint);
        }
        if let Some(cpus) = &self.cpus {
            cpus.check(ledger)?;
        }
        *checkpoint = Some(CpuCheckpoint::from_ledger(configured, ledger, self.places_pod_level_resources()));
        Ok(())
    }

    fn restore_memory(
        &self,
        ledger: &mut Ledger,
        checkpoint: &mut Option<MemoryCheckpoint>,
        directory: &str,
    ) -> Result<(), StartProblem> {
        let configured = self.memory_policy();
        if let Some(checkpoint) = checkpoint {
            self.check_version(checkpoint.pods.is_some())
                .map_err(|problem| unusable(MEMORY_STATE, directory, problem))?;
            if checkpoint.policy != configured {
                let problem =
                    RestoreProblem::OtherMemoryPolicy { configured, saved: checkpoint.policy.clone() };
                return Err(unusable(MEMORY_STATE, directory, problem));
            }
            take_memory(ledger, checkpoint);
        }
        match &self.memory {
            None => {}
            Some(memory) if ledger.nodes.is_empty() => {
                let has_memory = |held: &Allocation| !held.blocks.is_empty() || held.without_memory;
                if ledger.allocations().any(|(_, _, held)| has_memory(held)) {
                    return Err(StartProblem::NoMachineState);
                }
                ledger.nodes.clone_from(memory.idle());
            }
            Some(memory) => {
                check_accounts(memory, ledger)?;
                place(ledger);
            }
        }
        *checkpoint =
            Some(MemoryCheckpoint::from_ledger(configured, ledger, self.places_pod_level_resources()));
        Ok(())
    }
}

/// Compares the accounts of a previous run with those recomputed from its allocations.
fn check_accounts(memory: &StaticMemoryManager, ledger: &Ledger) -> Result<(), StartProblem> {
    let expected = recharge(memory, ledger)?;
    if is_same(&ledger.nodes, &expected) { Ok(()) } else { Err(StartProblem::OtherMachineState) }
}

/// Recomputes the node accounts from the allocations of a ledger, in the order of names.
fn recharge(memory: &StaticMemoryManager, ledger: &Ledger) -> Result<Nodes, StartProblem> {
    let mut expected = memory.idle().clone();
    let mut charged: Vec<(&OwnerId, ContainerName, &[MemoryBlock])> = Vec::new();
    for (owner, account) in ledger.owners() {
        match account.pod_level.blocks.as_slice() {
            [] => charged.extend(
                account.containers.iter().map(|(name, held)| (owner, name.clone(), held.blocks.as_slice())),
            ),
            // The kubelet skips a pod without containers in the file.
            _ if account.containers.is_empty() => {}
            whole => charged.push((owner, "".into(), whole)),
        }
    }
    for (owner, container, blocks) in charged {
        for block in blocks {
            let mut bytes = block.bytes.0;
            for node in block.affinity.iter() {
                let unknown = || StartProblem::BlockOnUnknownNode(owner.clone(), container.clone());
                let account = expected.get_mut(&node).ok_or_else(unknown)?;
                account.assignments += 1;
                account.group.clone_from(&block.affinity);
                let unknown = || StartProblem::BlockOfUnknownKind(owner.clone(), container.clone());
                let account = account.kinds.get_mut(&block.kind).ok_or_else(unknown)?;
                bytes -= account.charge(bytes);
            }
        }
    }
    Ok(expected)
}

type Nodes = BTreeMap<NodeId, NodeAccount>;

/// Returns whether a saved state is the expected one. Free and guaranteed bytes are compared as sums over a node's
/// group, because the order in which its nodes were filled is unknown.
fn is_same(saved: &Nodes, expected: &Nodes) -> bool {
    let size = |of: &KindAccount| (of.total, of.reserved, of.allocatable);
    saved.keys().eq(expected.keys())
        && saved.values().zip(expected.values()).all(|(a, b)| {
            let same_kind = |((&kind, of_a), of_b): ((&ZoneKind, &KindAccount), &KindAccount)| {
                (!defects::SIZES_MUST_BE_EQUAL || size(of_a) == size(of_b))
                    && group_sums(saved, a, kind) == group_sums(expected, a, kind)
            };
            (a.assignments, &a.group) == (b.assignments, &b.group)
                && a.kinds.keys().eq(b.kinds.keys())
                && a.kinds.iter().zip(b.kinds.values()).all(same_kind)
        })
}

/// Returns the free and guaranteed bytes of a kind over a node's group.
fn group_sums(nodes: &Nodes, of: &NodeAccount, kind: ZoneKind) -> (u128, u128) {
    let accounts = of.group.iter().filter_map(|node| nodes.get(&node)?.kinds.get(&kind));
    accounts.fold((0, 0), |(free, promised), account| {
        (free + u128::from(account.free.0), promised + u128::from(account.guaranteed.0))
    })
}

/// Attributes the guaranteed bytes of each node to the containers with blocks there, in the order of names and from
/// the lowest node of each block. The state file does not say which container got which bytes.
fn place(ledger: &mut Ledger) {
    let mut left: BTreeMap<(NodeId, ZoneKind), u64> = BTreeMap::new();
    for (&node, account) in &ledger.nodes {
        for (&kind, account) in &account.kinds {
            left.insert((node, kind), account.guaranteed.0);
        }
    }
    let owners: Vec<_> =
        ledger.owners().map(|(owner, account)| (owner.clone(), Arc::clone(account))).collect();
    for (owner, account) in owners {
        let mut whole: BTreeMap<(ZoneKind, &NodeSet), u64> = BTreeMap::new();
        for block in &account.pod_level.blocks {
            whole.insert((block.kind, &block.affinity), block.bytes.0);
        }
        let mut draw = |container: &ContainerName, kind: ZoneKind, nodes: &NodeSet, mut bytes: u64| {
            for node in nodes.iter() {
                let Some(left) = left.get_mut(&(node, kind)) else { continue };
                let share = bytes.min(*left);
                bytes -= share;
                *left -= share;
                ledger.allocation_mut(&owner, container).place(kind, node, share);
            }
        };
        for (container, held) in &account.containers {
            for block in &held.blocks {
                let mut bytes = block.bytes.0;
                if let Some(left) = whole.get_mut(&(block.kind, &block.affinity)) {
                    bytes = bytes.min(*left);
                    *left -= bytes;
                }
                draw(container, block.kind, &block.affinity, bytes);
            }
        }
        // Parts can overlap; the last container gets the rest.
        if let Some(last) = account.containers.keys().next_back() {
            for ((kind, nodes), bytes) in whole {
                draw(last, kind, nodes, bytes);
            }
        }
    }
}

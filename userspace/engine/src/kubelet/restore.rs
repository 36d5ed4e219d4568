//! Taking over the state of an earlier run.
//!
//! The kubelet starts its CPU Manager, then its Memory Manager; each reads its state file and compares it with
//! the machine and the configuration. A file that differs refuses the start. Then the owners that still run are
//! admitted again one by one, and only after that is cleared what nobody asked for.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::{Kubelet, StaticMemory, defects};
use crate::{
    checkpoint::{CheckpointError, CpuCheckpoint, CpuState, MemoryCheckpoint},
    ledger::{Ledger, NodeAccount},
    policy::{Component, Phase, RestoreProblem, StartError, StartProblem, StateField},
    request::{ContainerName, OwnerId},
};

/// The state files of an earlier run, if there are any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoints {
    /// `cpu_manager_state`
    pub cpus: Option<CpuCheckpoint>,
    /// `memory_manager_state`
    pub memory: Option<MemoryCheckpoint>,
}

impl Checkpoints {
    /// Reads the content of state files, where there are any. `containers` are the containers by the runtime's
    /// ids, for a CPU state of version 1; `directory` is where the files are, for messages.
    pub fn read(
        cpus: Option<&str>,
        memory: Option<&str>,
        containers: &BTreeMap<String, (OwnerId, ContainerName)>,
        directory: &str,
    ) -> Result<Self, StartError> {
        let corrupt = |component, manager, file: &str, error: CheckpointError| {
            let file = format!("{directory}/{file}");
            let problem = Box::new(RestoreProblem::Corrupt(error));
            StartError::new(component, Phase::Start, StartProblem::Restore { manager, file, problem })
        };
        let read_cpus = |text| match CpuState::read(text)? {
            CpuState::V1(state) => state.migrate(containers),
            CpuState::V2(state) => Ok(state),
        };
        let cpus = cpus.map(read_cpus).transpose();
        let memory = memory.map(MemoryCheckpoint::read).transpose();
        Ok(Self {
            cpus: cpus
                .map_err(|error| corrupt(Component::CpuManager, "CPU manager", CpuCheckpoint::FILE, error))?,
            memory: memory.map_err(|error| {
                corrupt(Component::MemoryManager, "memory manager", MemoryCheckpoint::FILE, error)
            })?,
        })
    }
}

impl Checkpoints {
    /// The ledger as the files report it, whatever the machine and the policy of who reads them: to look at, not to
    /// go on from.
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
}

fn take_memory(ledger: &mut Ledger, checkpoint: &MemoryCheckpoint) {
    ledger.nodes.clone_from(&checkpoint.nodes);
    for (owner, containers) in &checkpoint.entries {
        for (container, blocks) in containers {
            if !blocks.is_empty() {
                ledger.allocation_mut(owner, container).blocks.clone_from(blocks);
            }
        }
    }
}

/// The result of a start.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The ledger, or why there is none. In the ledger nothing is stale until [`Kubelet::ready`].
    pub ledger: Result<Ledger, StartError>,
    /// The state files as they are now: a component that started has written its own, also where a later one
    /// refused.
    pub checkpoints: Checkpoints,
}

impl Kubelet {
    /// Takes over the state of an earlier run, or begins anew where there is none. `directory` is where the
    /// state files are, for messages.
    pub fn restore(&self, mut checkpoints: Checkpoints, directory: &str) -> Restored {
        let refuse = |component, problem| StartError::new(component, Phase::Start, problem);
        let mut ledger = Ledger::default();
        ledger.notes.restoring = true;
        let cpus = self.restore_cpus(&mut ledger, checkpoints.cpus.as_ref(), directory);
        if let Err(problem) = cpus {
            return Restored { ledger: Err(refuse(Component::CpuManager, problem)), checkpoints };
        }
        checkpoints.cpus = Some(CpuCheckpoint::of(self.cpu_policy(), &ledger));
        let memory = self.restore_memory(&mut ledger, checkpoints.memory.as_ref(), directory);
        if let Err(problem) = memory {
            return Restored { ledger: Err(refuse(Component::MemoryManager, problem)), checkpoints };
        }
        checkpoints.memory = Some(MemoryCheckpoint::of(self.memory_policy(), &ledger));
        Restored { ledger: Ok(ledger), checkpoints }
    }

    /// All owners that still run have been admitted again: what nobody asked for is stale from now on.
    pub fn ready(&self, ledger: &Ledger) -> Ledger {
        let mut next = ledger.clone();
        next.notes.restoring = false;
        next
    }

    /// The state files for a ledger.
    pub fn checkpoints(&self, ledger: &Ledger) -> Checkpoints {
        Checkpoints {
            cpus: Some(CpuCheckpoint::of(self.cpu_policy(), ledger)),
            memory: Some(MemoryCheckpoint::of(self.memory_policy(), ledger)),
        }
    }

    fn restore_cpus(
        &self,
        ledger: &mut Ledger,
        checkpoint: Option<&CpuCheckpoint>,
        directory: &str,
    ) -> Result<(), StartProblem> {
        if let Some(checkpoint) = checkpoint {
            if checkpoint.policy != self.cpu_policy() {
                let (configured, saved) = (self.cpu_policy().to_owned(), checkpoint.policy.clone());
                return Err(StartProblem::Restore {
                    manager: "CPU manager",
                    file: format!("{directory}/{}", CpuCheckpoint::FILE),
                    problem: RestoreProblem::OtherCpuPolicy { configured, saved }.into(),
                });
            }
            take_cpus(ledger, checkpoint);
        }
        self.cpus.as_ref().map_or(Ok(()), |cpus| cpus.check(ledger))
    }

    fn restore_memory(
        &self,
        ledger: &mut Ledger,
        checkpoint: Option<&MemoryCheckpoint>,
        directory: &str,
    ) -> Result<(), StartProblem> {
        if let Some(checkpoint) = checkpoint {
            if checkpoint.policy != self.memory_policy() {
                let (configured, saved) = (self.memory_policy().to_owned(), checkpoint.policy.clone());
                return Err(StartProblem::Restore {
                    manager: "memory manager",
                    file: format!("{directory}/{}", MemoryCheckpoint::FILE),
                    problem: RestoreProblem::OtherMemoryPolicy { configured, saved }.into(),
                });
            }
            take_memory(ledger, checkpoint);
        }
        let Some(memory) = &self.memory else { return Ok(()) };
        if ledger.nodes.is_empty() {
            if ledger.allocations().any(|(_, _, allocation)| !allocation.blocks.is_empty()) {
                return Err(StartProblem::NoMachineState);
            }
            ledger.nodes.clone_from(memory.idle());
            return Ok(());
        }
        memory.check(ledger)?;
        place(ledger);
        Ok(())
    }
}

impl StaticMemory {
    /// Compares the accounts of an earlier run with what they would be if its allocations were made anew.
    fn check(&self, ledger: &Ledger) -> Result<(), StartProblem> {
        let mut expected = self.idle().clone();
        for (owner, container, allocation) in ledger.allocations() {
            for block in &allocation.blocks {
                let mut bytes = block.bytes.0;
                for node in block.affinity.iter() {
                    let names = || (owner.to_string(), container.to_string());
                    let Some(account) = expected.get_mut(&node) else {
                        let (owner, container) = names();
                        return Err(StartProblem::BlockOnUnknownNode { owner, container });
                    };
                    account.assignments += 1;
                    account.group.clone_from(&block.affinity);
                    let Some(account) = account.kinds.get_mut(&block.kind) else {
                        let (owner, container) = names();
                        return Err(StartProblem::BlockOfUnknownKind { owner, container });
                    };
                    bytes -= account.charge(bytes);
                }
            }
        }
        match first_difference(&ledger.nodes, &expected) {
            None => Ok(()),
            Some((node, field)) => Err(StartProblem::OtherMachineState { node, field }),
        }
    }
}

type Nodes = BTreeMap<NodeId, NodeAccount>;

/// The first node that differs, and in what. What is free and promised is compared over the node's group: the
/// order in which a group's nodes were filled is not known.
fn first_difference(saved: &Nodes, expected: &Nodes) -> Option<(NodeId, StateField)> {
    if let Some(&node) = saved
        .keys()
        .chain(expected.keys())
        .find(|node| !(saved.contains_key(node) && expected.contains_key(node)))
    {
        return Some((node, StateField::Presence));
    }
    saved.iter().zip(expected.values()).find_map(|((&node, a), b)| {
        let field = if a.assignments != b.assignments {
            StateField::Assignments
        } else if a.group != b.group {
            StateField::Group
        } else if !a.kinds.keys().eq(b.kinds.keys()) {
            StateField::Kinds
        } else {
            a.kinds.iter().zip(b.kinds.values()).find_map(|((&kind, of_a), of_b)| {
                let size = |of: &crate::ledger::KindAccount| (of.total, of.reserved, of.allocatable);
                let sums = |nodes: &Nodes| group_sums(nodes, a, kind);
                let ((free, promised), (expected_free, expected_promised)) = (sums(saved), sums(expected));
                if defects::SIZES_MUST_BE_EQUAL && size(of_a) != size(of_b) {
                    Some(StateField::Size(kind))
                } else if free != expected_free {
                    Some(StateField::Free(kind))
                } else if promised != expected_promised {
                    Some(StateField::Promised(kind))
                } else {
                    None
                }
            })?
        };
        Some((node, field))
    })
}

/// What is free and promised of a kind in the group of a node.
fn group_sums(nodes: &Nodes, of: &NodeAccount, kind: ZoneKind) -> (u128, u128) {
    let accounts = of.group.iter().filter_map(|node| nodes.get(&node)?.kinds.get(&kind));
    accounts.fold((0, 0), |(free, promised), account| {
        (free + u128::from(account.free.0), promised + u128::from(account.promised.0))
    })
}

/// Distributes what is promised on each node over the containers that have blocks there, as the state file
/// does not say who got it from where: in the order of names, from the lowest node of each block.
fn place(ledger: &mut Ledger) {
    let mut left: BTreeMap<(NodeId, ZoneKind), u64> = BTreeMap::new();
    for (&node, account) in &ledger.nodes {
        for (&kind, account) in &account.kinds {
            left.insert((node, kind), account.promised.0);
        }
    }
    let holders: Vec<_> = ledger
        .allocations()
        .filter(|(_, _, allocation)| !allocation.blocks.is_empty())
        .map(|(owner, container, allocation)| (owner.clone(), container.clone(), allocation.blocks.clone()))
        .collect();
    for (owner, container, blocks) in holders {
        let allocation = ledger.allocation_mut(&owner, &container);
        for block in blocks {
            let Bytes(mut bytes) = block.bytes;
            for node in block.affinity.iter() {
                let Some(left) = left.get_mut(&(node, block.kind)) else { continue };
                let share = bytes.min(*left);
                bytes -= share;
                *left -= share;
                allocation.place(block.kind, node, share);
            }
        }
    }
}

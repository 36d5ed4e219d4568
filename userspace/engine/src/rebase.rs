//! Carrying guarantees over to a changed machine.

use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

use crate::{
    ledger::{Ledger, MemoryBlock, OwnerAccount},
    request::OwnerId,
};

/// Reason why an existing allocation cannot be added to the ledger.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The owner already has an account.
    #[error("{0} has an account already")]
    AccountExists(OwnerId),
    /// Another owner holds the CPUs exclusively.
    #[error("CPUs {cpus} are exclusive to {other}")]
    CpusTaken {
        cpus: CpuSet,
        /// Owner that holds the CPUs.
        other: OwnerId,
    },
}

/// Guaranteed memory that the machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncoveredMemory {
    pub owner: OwnerId,
    /// Kind of memory, nodes of the guarantee, and number of missing bytes.
    pub block: MemoryBlock,
}

impl Ledger {
    /// Adds an existing allocation that no decision of this ledger made. The caller has to charge it with
    /// [`crate::Strategy::rebase`].
    pub fn adopt(&mut self, owner: OwnerId, account: OwnerAccount) -> Result<(), AdoptError> {
        if self.owner(&owner).is_some() {
            return Err(AdoptError::AccountExists(owner));
        }
        let wanted: CpuSet = account.exclusive_cpus().flat_map(CpuSet::iter).collect();
        for (other, of_other) in self.owners() {
            let taken = of_other.exclusive_cpus().map(|cpus| cpus & &wanted);
            if let Some(cpus) = taken.into_iter().find(|cpus| !cpus.is_empty()) {
                return Err(AdoptError::CpusTaken { cpus, other: other.clone() });
            }
        }
        *self.owner_mut(&owner) = account;
        Ok(())
    }

    /// Charges all allocations to the accounts of `idle`, the ledger of a possibly changed machine without
    /// guarantees. Running workloads keep their allocations. Bytes that do not fit their node are placed on other
    /// nodes of the block, if these have free memory. The remaining shortage is returned; it stays placed on its
    /// node, which then has no free memory.
    pub(crate) fn rebase(&mut self, idle: &Self) -> Vec<UncoveredMemory> {
        let mut nodes = idle.nodes.clone();
        let mut shared_pool = idle.shared_pool.clone();
        for (_, account) in self.owners() {
            for cpus in account.exclusive_cpus() {
                shared_pool = &shared_pool - cpus;
            }
            for block in account.charged_blocks() {
                for node in block.affinity.iter() {
                    if let Some(account) = nodes.get_mut(&node) {
                        account.assignments += 1;
                        account.group.clone_from(&block.affinity);
                    }
                }
            }
        }
        let mut charge = |kind: ZoneKind, node: NodeId, bytes: u64| {
            let account = nodes.get_mut(&node).and_then(|node| node.kinds.get_mut(&kind));
            account.map_or(0, |account| account.charge(bytes))
        };
        // Memory that fits its node is charged first, so that relocated memory does not displace it.
        let mut without_room = Vec::new();
        for (owner, container, allocation) in self.allocations() {
            for (&kind, placed) in &allocation.placed {
                let rest = |(&node, bytes): (&NodeId, &Bytes)| (node, bytes.0 - charge(kind, node, bytes.0));
                let rests: Vec<_> = placed.iter().map(rest).filter(|(_, rest)| *rest > 0).collect();
                if !rests.is_empty() {
                    without_room.push((owner.clone(), container.clone(), kind, rests));
                }
            }
        }
        let mut uncovered = Vec::new();
        for (owner, container, kind, rests) in without_room {
            let of_kind = self.blocks(&owner, &container).iter().filter(|block| block.kind == kind);
            let affinity: NodeSet = of_kind.flat_map(|block| block.affinity.iter()).collect();
            let mut missing = 0;
            for (from, mut rest) in rests {
                for to in affinity.iter() {
                    let share = charge(kind, to, rest);
                    if share > 0 {
                        self.allocation_mut(&owner, &container).move_placed(kind, from, to, share);
                    }
                    rest -= share;
                }
                missing += rest;
            }
            if missing > 0 {
                uncovered.push(UncoveredMemory {
                    owner,
                    block: MemoryBlock { kind, affinity, bytes: Bytes(missing) },
                });
            }
        }
        self.nodes = nodes;
        self.shared_pool = shared_pool;
        uncovered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Allocation;

    #[test]
    fn adopt_refuses_conflicts() {
        let account = |cpus: &str| {
            let held = Allocation { cpus: Some(cpus.parse().unwrap()), ..Allocation::default() };
            OwnerAccount { containers: [("c".into(), held)].into(), ..OwnerAccount::default() }
        };
        let mut ledger = Ledger::default();
        ledger.adopt("a".into(), account("1-2")).unwrap();
        ledger.adopt("b".into(), account("3")).unwrap();
        assert_eq!(ledger.adopt("a".into(), account("5")), Err(AdoptError::AccountExists("a".into())));
        let taken = ledger.adopt("c".into(), account("2-4")).unwrap_err();
        assert_eq!(taken, AdoptError::CpusTaken { cpus: "2".parse().unwrap(), other: "a".into() });
        assert_eq!(ledger.owners().count(), 2);
    }
}

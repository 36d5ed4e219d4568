//! The part of a rebalance that is stored in the ledger.

use numaward_engine::{Allocation, ContainerMove, ContainerName, OwnerId};
use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};

/// Moves of containers: those in progress and the recent ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoveLog {
    /// Moves in progress. If the daemon restarts, it reverts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<RunningMoves>,
    /// Moves of the past day or so, for the limits on automatic rebalancing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent: Vec<RecentMove>,
}

/// Moves of a plan that is being executed or reverted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunningMoves {
    /// All moves of the plan, in order of execution.
    pub moves: Vec<ContainerMove>,
    /// Number of moves that have begun and were not reverted.
    pub begun: usize,
    /// The container that is being migrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaving: Option<MigratingContainer>,
}

/// A container during the migration of its pages to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigratingContainer {
    pub owner: OwnerId,
    pub container: ContainerName,
    /// Allocation before the move.
    pub held: Allocation,
}

/// A move in the past.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecentMove {
    pub owner: OwnerId,
    /// Time of the move, in seconds since 1970.
    pub at: u64,
    /// Size of the memory that had to be migrated to another node.
    pub bytes: Bytes,
}

impl MoveLog {
    /// Returns true if the plan in progress moves this owner.
    pub fn is_moved(&self, owner: &OwnerId) -> bool {
        self.running.iter().flat_map(|running| &running.moves).any(|of| of.owner == *owner)
    }

    pub fn is_empty(&self) -> bool {
        self.running.is_none() && self.recent.is_empty()
    }

    /// Returns the allocation of a container before its move, while its pages are being migrated.
    pub fn allocation_before_move(&self, owner: &OwnerId, container: &ContainerName) -> Option<&Allocation> {
        let leaving = self.running.as_ref()?.leaving.as_ref()?;
        (leaving.owner == *owner && leaving.container == *container).then_some(&leaving.held)
    }

    /// Returns the moves at or after this time, in seconds since 1970.
    pub fn since(&self, second: u64) -> impl Iterator<Item = &RecentMove> {
        self.recent.iter().filter(move |of| of.at >= second)
    }
}

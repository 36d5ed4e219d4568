//! What of a rebalance survives a restart.

use numaward_engine::{Allocation, ContainerMove, ContainerName, OwnerId};
use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};

/// Workloads that are being moved, and those that were moved lately.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoveLog {
    /// The moves that are being made: a start takes them back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<RunningMoves>,
    /// The moves of late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent: Vec<RecentMove>,
}

/// Moves that are being made, or taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunningMoves {
    /// The moves, in their order.
    pub moves: Vec<ContainerMove>,
    /// So many of them are begun and not taken back.
    pub begun: usize,
    /// Whose pages are on their way, if anybody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaving: Option<MigratingContainer>,
}

/// A container whose pages are on their way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigratingContainer {
    /// Whose it is.
    pub owner: OwnerId,
    /// Which.
    pub container: ContainerName,
    /// What it held before.
    pub held: Allocation,
}

/// A move of late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecentMove {
    /// Who was moved.
    pub owner: OwnerId,
    /// When, in seconds since 1970.
    pub at: u64,
    /// How much memory had to go to another node.
    pub bytes: Bytes,
}

impl MoveLog {
    /// Whether a plan that is being carried out moves this owner.
    pub fn is_moved(&self, owner: &OwnerId) -> bool {
        self.running.iter().flat_map(|running| &running.moves).any(|of| of.owner == *owner)
    }

    /// Whether there is nothing to keep.
    pub fn is_empty(&self) -> bool {
        self.running.is_none() && self.recent.is_empty()
    }

    /// What a container held before, while its pages are on their way.
    pub fn allocation_before_move(&self, owner: &OwnerId, container: &ContainerName) -> Option<&Allocation> {
        let leaving = self.running.as_ref()?.leaving.as_ref()?;
        (leaving.owner == *owner && leaving.container == *container).then_some(&leaving.held)
    }

    /// The moves since this second.
    pub fn since(&self, second: u64) -> impl Iterator<Item = &RecentMove> {
        self.recent.iter().filter(move |of| of.at >= second)
    }
}

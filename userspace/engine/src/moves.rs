//! Plans: moves of those that run, which make room for a request.

use std::collections::BTreeSet;

use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    decision::{Decision, Rejection},
    ledger::Allocation,
    request::{ContainerName, OwnerId},
};

/// What a plan may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebalanceLimits {
    /// Containers that are moved. Those of an owner in pod scope move together and count as one.
    pub moves: usize,
    /// Memory that is moved, in all.
    pub bytes: Bytes,
    /// Who stays where it is.
    pub kept: BTreeSet<OwnerId>,
    /// Whether there has to be an order in which each move has room on both sides. Without it, two could change places.
    pub in_order: bool,
}

impl Default for RebalanceLimits {
    /// Three containers, of any size, in any way.
    fn default() -> Self {
        Self { moves: 3, bytes: Bytes(u64::MAX), kept: BTreeSet::new(), in_order: false }
    }
}

/// A container that is moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerMove {
    /// Whose it is.
    pub owner: OwnerId,
    /// The container.
    pub container: ContainerName,
    /// What it holds before.
    pub from: Allocation,
    /// What it is to hold.
    pub to: Allocation,
    /// Memory that has to go to another node.
    pub bytes: Bytes,
}

/// Moves that make room for a request.
#[derive(Clone, Debug)]
pub struct RebalancePlan {
    /// The moves, in their order; none where the request fits as it is.
    pub moves: Vec<ContainerMove>,
    /// Memory that has to go to another node, in all.
    pub bytes: Bytes,
    /// The admission of the request after all moves.
    pub decision: Decision,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {rejection}")]
pub struct PlanError {
    /// Why nobody is moved.
    pub reason: &'static str,
    /// Why the request does not fit as things are.
    pub rejection: Box<Rejection>,
}

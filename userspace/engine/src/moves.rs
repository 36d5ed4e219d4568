//! Plans of container moves that free capacity for a request.

use std::collections::BTreeSet;

use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    decision::{Decision, Rejection},
    ledger::Allocation,
    request::{ContainerName, OwnerId},
};

/// Limits of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebalanceLimits {
    /// Maximum number of moved containers. With pod scope, the containers of an owner move together and count as one.
    pub moves: usize,
    /// Maximum number of moved bytes over all moves.
    pub bytes: Bytes,
    /// Owners that must not move.
    pub kept: BTreeSet<OwnerId>,
    /// True if there must be an order in which each move has capacity on both sides. Without it, two containers can
    /// swap places.
    pub in_order: bool,
}

impl Default for RebalanceLimits {
    /// Up to three containers of any size, in any order.
    fn default() -> Self {
        Self { moves: 3, bytes: Bytes(u64::MAX), kept: BTreeSet::new(), in_order: false }
    }
}

/// Move of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerMove {
    pub owner: OwnerId,
    pub container: ContainerName,
    /// Allocation before the move.
    pub from: Allocation,
    /// Allocation after the move.
    pub to: Allocation,
    /// Bytes that have to migrate to another node.
    pub bytes: Bytes,
}

/// Moves that free capacity for a request.
#[derive(Clone, Debug)]
pub struct RebalancePlan {
    /// Moves in order of execution; empty if the request fits without any.
    pub moves: Vec<ContainerMove>,
    /// Bytes that have to migrate to another node, over all moves.
    pub bytes: Bytes,
    /// Admission of the request after all moves.
    pub decision: Decision,
}

/// Reason why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {rejection}")]
pub struct PlanError {
    /// Reason why no container can be moved.
    pub reason: &'static str,
    /// Rejection of the request without moves.
    pub rejection: Box<Rejection>,
}

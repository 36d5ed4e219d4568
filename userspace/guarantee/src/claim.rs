//! Reservations for resource claims (Dynamic Resource Allocation).
//!
//! The kubelet has a claim prepared before the containers that use it exist. Until the claim is unprepared, its CPUs and memory are
//! reserved: each part of the claim is an owner in the ledger, [`devices::part_owner`].

use numaward_engine::OwnerId;
use numaward_engine::claims::{allocator::Amounts, devices};
use numaward_topology::NodeId;
use serde::{Deserialize, Serialize};

/// A claim with reserved parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservedClaim {
    pub namespace: String,
    pub name: String,
    /// UID of the pod, as the API server has it.
    pub pod: String,
    pub parts: Vec<ReservedPart>,
}

/// Reserved amounts of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedPart {
    pub node: NodeId,
    pub consumed: Amounts,
}

impl ReservedClaim {
    /// Returns the owners of the parts in the ledger; `uid` is that of the claim.
    pub fn owners(&self, uid: &str) -> impl Iterator<Item = OwnerId> {
        (0..self.parts.len()).map(move |part| devices::part_owner(uid, part))
    }
}

//! Host conditions: current facts about the host, outside the ledger, that decisions consider.
//!
//! # Problem
//! The ledger only knows its own guarantees. Huge pages that another program took, or memory that the host uses
//! beyond its reservation, are free in the ledger but not available.
//!
//! # Invariants
//! - Conditions reduce the capacity offered to new requests and growth. An existing guarantee is never reduced.
//! - Withheld memory decides whether a request fits, but never which of several fitting nodes is better. Otherwise
//!   placements would depend on the host's momentary memory use.
//! - Empty conditions do not change any decision.
//! - Only the strategy `native` considers conditions.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, CpuSet, NodeId, ZoneKind};

/// Current state of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostConditions {
    /// Memory by kind and node that programs without a guarantee use beyond the reservation.
    pub withheld: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
    pub offline_cpus: CpuSet,
    /// CPUs of the shared pool that cpuset partitions of other programs hold; the kernel gives these to no other
    /// cgroup.
    pub partition_cpus: CpuSet,
    /// Bandwidth by node that CPUs of other nodes use there, as a coarse class: the binary logarithm of MiB/s,
    /// starting at 64 MiB/s. Among otherwise equal placements, the one with less load wins. An absent node has no
    /// load.
    pub load: BTreeMap<NodeId, u64>,
}

impl HostConditions {
    /// Returns the bytes of a kind that are withheld on a node.
    pub fn withheld_on(&self, kind: ZoneKind, node: NodeId) -> Bytes {
        self.withheld.get(&kind).and_then(|nodes| nodes.get(&node)).copied().unwrap_or_default()
    }

    /// Returns the conditions without this memory, for example because the workload that uses it is about to get a
    /// guarantee.
    #[must_use]
    pub fn without(&self, used: &BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>) -> Self {
        let mut rest = self.clone();
        for (kind, nodes) in used {
            let Some(withheld) = rest.withheld.get_mut(kind) else { continue };
            for (node, bytes) in nodes {
                if let Some(of) = withheld.get_mut(node) {
                    of.0 = of.0.saturating_sub(bytes.0);
                }
            }
        }
        rest
    }
}

/// Memory of one kind that is withheld on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithheldMemory {
    pub node: NodeId,
    pub kind: ZoneKind,
    /// Bytes that are free in the ledger but not offered.
    pub bytes: Bytes,
}

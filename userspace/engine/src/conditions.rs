//! What the host says now, beside what is promised: an input of decisions.
//!
//! Problem: the ledger knows what it promised, not what others use. Huge pages that somebody took without asking, or
//! memory of the host beyond its reservation, are free in the books and not available.
//!
//! Invariants: conditions lower what is offered to those who ask now; nobody loses what it holds. What is withheld decides
//! what fits, and never which of several nodes that fit is better: else placements would change with what the host uses at
//! the moment. Without any a decision is the same as if there were none. Only the strategy `native` heeds them.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, CpuSet, NodeId, ZoneKind};

/// What the host says now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostConditions {
    /// By kind and node: what others than those with a promise use beyond what is reserved.
    pub withheld: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
    /// CPUs that are offline.
    pub offline_cpus: CpuSet,
    /// CPUs of the shared pool that belong to cpuset partitions of other programs: the kernel gives them to no other cgroup.
    pub partition_cpus: CpuSet,
    /// By node, how fast CPUs of other nodes take memory there, as a coarse class (the binary logarithm of MiB/s, from
    /// 64 MiB/s): of equally good candidates the one whose nodes have less of it is taken. A node that is not named has none.
    pub load: BTreeMap<NodeId, u64>,
}

impl HostConditions {
    /// What is withheld of a kind on a node, in bytes.
    pub fn withheld_on(&self, kind: ZoneKind, node: NodeId) -> Bytes {
        self.withheld.get(&kind).and_then(|nodes| nodes.get(&node)).copied().unwrap_or_default()
    }

    /// The same, as if this memory were not in use: that of somebody who is to have a promise now.
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

/// What is withheld of one kind on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithheldMemory {
    /// The node.
    pub node: NodeId,
    /// The kind of memory.
    pub kind: ZoneKind,
    /// How much would have been free without it, but was not offered.
    pub bytes: Bytes,
}

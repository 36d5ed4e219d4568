//! Accesses of workloads to memory, as far as a probe counts them.

use std::collections::BTreeMap;

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_topology::NodeId;

/// How accesses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountingMethod {
    /// The processor counts them.
    Hardware,
    /// NUMA balancing samples them, in pages.
    Sampling,
}

/// Accesses of one workload since its counters began: only the difference of two readings means something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accesses {
    /// How they are counted. Numbers that were counted otherwise cannot be compared.
    pub by: CountingMethod,
    /// To memory of the CPU's node.
    pub local: u64,
    /// To memory of other nodes.
    pub remote: u64,
    /// By the node of the memory, as far as that is known.
    pub memory: BTreeMap<NodeId, u64>,
}

/// A workload that has no other below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadAccesses {
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Which cgroup of that path.
    pub id: CgroupId,
    /// Its accesses; absent where nothing counts them.
    pub accesses: Option<Accesses>,
}

//! Memory accesses of workloads, as counted by a probe.

use std::collections::BTreeMap;

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_topology::NodeId;

/// The method by which accesses are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountingMethod {
    /// The processor's counters: accesses to DRAM.
    Hardware,
    /// Scans of NUMA balancing: pages touched. A page counts about once per scan, however often it is used.
    #[default]
    Sampling,
}

impl CountingMethod {
    /// Returns the name of the method, as for the label `source`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Sampling => "hint_fault",
        }
    }

    /// Returns a description of the counted accesses of a workload.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Hardware => "its accesses to DRAM (by the processor's counters)",
            Self::Sampling => "the pages it touched (by scan)",
        }
    }
}

/// Accesses of one workload since its counters began. Only the difference of two readings is meaningful.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accesses {
    /// The method. Numbers of different methods cannot be compared.
    pub by: CountingMethod,
    /// Accesses to memory of the CPU's node.
    pub local: u64,
    /// Accesses to memory of other nodes.
    pub remote: u64,
    /// Accesses by the node of the memory, if known.
    pub memory: BTreeMap<NodeId, u64>,
}

/// Accesses of a workload with no other workload below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadAccesses {
    pub cgroup: CgroupPath,
    /// The id of the cgroup, which distinguishes it from earlier cgroups at the path.
    pub id: CgroupId,
    /// The accesses; `None` if no probe counts them.
    pub accesses: Option<Accesses>,
}

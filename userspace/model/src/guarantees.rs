//! The guarantees of workloads, for the parts that observe them.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api::PodContainer;
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_engine::{Allocation, Ledger, MemoryBlock, OwnerId};
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

/// The guarantees of all workloads, and the ledger that they come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guarantees {
    /// Workloads with a guarantee, by the id of their cgroup. Two copies share the entries that did not change.
    workloads: Vec<Arc<WorkloadGuarantee>>,
    pub ledger: Ledger,
    /// CPUs that can still become exclusive.
    pub free_cpus: CpuSet,
    /// The preferred nodes of workloads without a guarantee, by cgroup. Nothing is guaranteed to these workloads.
    pub homes: BTreeMap<CgroupPath, NodeId>,
    /// The reason why the policy does not fit the machine. Then no new guarantees are given.
    pub unfit: Option<String>,
}

impl Guarantees {
    /// Creates the guarantees of the given workloads, in any order.
    pub fn new(mut workloads: Vec<Arc<WorkloadGuarantee>>, ledger: Ledger) -> Self {
        workloads.sort_by_key(|guarantee| guarantee.id);
        Self { workloads, ledger, ..Self::default() }
    }

    /// Returns the workloads with a guarantee, by the id of their cgroup.
    pub fn workloads(&self) -> &[Arc<WorkloadGuarantee>] {
        &self.workloads
    }

    /// Returns the guarantee of the workload with this cgroup.
    pub fn get(&self, id: CgroupId) -> Option<&Arc<WorkloadGuarantee>> {
        self.workloads.get(self.search(id).ok()?)
    }

    fn search(&self, id: CgroupId) -> Result<usize, usize> {
        self.workloads.binary_search_by_key(&id, |guarantee| guarantee.id)
    }

    /// Returns the CPUs that workloads hold, including hidden SMT siblings.
    pub fn held_cpus(&self) -> CpuSet {
        self.workloads.iter().fold(CpuSet::new(), |all, guarantee| &all | &guarantee.held_cpus())
    }

    /// Returns true if the workload with this cgroup has a guarantee.
    pub fn has(&self, id: CgroupId) -> bool {
        self.search(id).is_ok()
    }

    /// Adds or replaces a guarantee.
    pub fn insert(&mut self, guarantee: WorkloadGuarantee) {
        let guarantee = Arc::new(guarantee);
        match self.search(guarantee.id) {
            Ok(index) => self.workloads[index] = guarantee,
            Err(index) => self.workloads.insert(index, guarantee),
        }
    }

    /// Removes the guarantee of the workload with this cgroup.
    pub fn remove(&mut self, id: CgroupId) {
        self.workloads.retain(|guarantee| guarantee.id != id);
    }

    /// Returns the nodes of the guaranteed memory of the workload with this cgroup; `None` without a memory guarantee.
    pub fn nodes_of(&self, id: CgroupId) -> Option<&NodeSet> {
        let guarantee = self.get(id)?;
        (!guarantee.nodes.is_empty()).then_some(&guarantee.nodes)
    }

    /// Returns the nodes outside of which all memory that the workload with this cgroup allocates is a miss; `None` without a
    /// memory guarantee, and for a Burstable workload: its memory beyond the guarantee may be on any node, so only its
    /// resident memory shows whether the guarantee holds.
    pub fn binding_nodes_of(&self, id: CgroupId) -> Option<&NodeSet> {
        let guarantee = self.get(id)?;
        self.nodes_of(id).filter(|_| !guarantee.is_burstable)
    }
}

/// The guarantee of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadGuarantee {
    pub cgroup: CgroupPath,
    /// The id of the cgroup, which distinguishes it from earlier cgroups at the path.
    pub id: CgroupId,
    /// The owner in the ledger. Several containers have the same owner if their pod was admitted as a whole.
    pub owner: OwnerId,
    /// The container, if the workload is a container of a pod.
    pub container: Option<PodContainer>,
    /// The nodes of the guaranteed memory.
    pub nodes: NodeSet,
    /// The exclusive CPUs.
    pub cpus: CpuSet,
    /// The SMT siblings of these CPUs that no workload may use.
    pub hidden_cpus: CpuSet,
    /// True if memory beyond the guarantee may be on any node.
    pub is_burstable: bool,
    /// The guaranteed memory, at most one block per kind.
    pub blocks: Vec<MemoryBlock>,
    /// The guaranteed memory, by kind and charged node.
    pub placed: Vec<(ZoneKind, NodeId, Bytes)>,
    /// The exclusive CPUs that are offline.
    pub offline_cpus: CpuSet,
    /// The guaranteed memory that the machine does not have (any more).
    pub uncovered: Vec<MemoryBlock>,
}

impl WorkloadGuarantee {
    /// Returns the CPUs that no other workload may use.
    pub fn held_cpus(&self) -> CpuSet {
        &self.cpus | &self.hidden_cpus
    }
}

/// Returns the memory of an allocation, by kind and charged node: see [`WorkloadGuarantee::placed`].
pub fn placed(allocation: &Allocation) -> Vec<(ZoneKind, NodeId, Bytes)> {
    let by_kind = allocation.placed.iter();
    by_kind.flat_map(|(kind, nodes)| nodes.iter().map(|(node, bytes)| (*kind, *node, *bytes))).collect()
}

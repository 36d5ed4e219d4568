//! What is promised to whom, for the parts that watch over it.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api::PodContainer;
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_engine::{Allocation, Ledger, MemoryBlock, OwnerId};
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};

/// What others need to know of what is promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guarantees {
    /// Workloads with an allocation, in the order of their cgroups' ids. Of two of these, what did not change in
    /// between is the same.
    workloads: Vec<Arc<WorkloadGuarantee>>,
    /// The engine's ledger.
    pub ledger: Ledger,
    /// CPUs that can still become exclusive.
    pub free_cpus: CpuSet,
    /// The nodes on which workloads without a guarantee have a home, by their cgroups. Nothing is promised to them.
    pub homes: BTreeMap<CgroupPath, NodeId>,
    /// Why the policy does not fit the machine, if so. Nothing new is promised then.
    pub unfit: Option<String>,
}

impl Guarantees {
    /// Those to these workloads.
    pub fn new(mut workloads: Vec<Arc<WorkloadGuarantee>>, ledger: Ledger) -> Self {
        workloads.sort_by_key(|promise| promise.id);
        Self { workloads, ledger, ..Self::default() }
    }

    /// Workloads with an allocation, in the order of their cgroups' ids.
    pub fn workloads(&self) -> &[Arc<WorkloadGuarantee>] {
        &self.workloads
    }

    /// What is promised to the workload with this cgroup.
    pub fn get(&self, id: CgroupId) -> Option<&Arc<WorkloadGuarantee>> {
        self.workloads.get(self.place(id).ok()?)
    }

    fn place(&self, id: CgroupId) -> Result<usize, usize> {
        self.workloads.binary_search_by_key(&id, |promise| promise.id)
    }

    /// The CPUs that workloads hold, used or hidden.
    pub fn held_cpus(&self) -> CpuSet {
        self.workloads.iter().fold(CpuSet::new(), |all, promise| &all | &promise.held_cpus())
    }

    /// Whether the workload with this cgroup has an allocation.
    pub fn has(&self, id: CgroupId) -> bool {
        self.place(id).is_ok()
    }

    /// Adds one.
    pub fn insert(&mut self, promise: WorkloadGuarantee) {
        let promise = Arc::new(promise);
        match self.place(promise.id) {
            Ok(index) => self.workloads[index] = promise,
            Err(index) => self.workloads.insert(index, promise),
        }
    }

    /// Takes away that of the workload with this cgroup.
    pub fn remove(&mut self, id: CgroupId) {
        self.workloads.retain(|promise| promise.id != id);
    }

    /// The nodes on which memory is promised to the workload with this cgroup; none where only CPUs are.
    pub fn nodes_of(&self, id: CgroupId) -> Option<&NodeSet> {
        let promise = self.get(id)?;
        (!promise.nodes.is_empty()).then_some(&promise.nodes)
    }
}

/// A workload with an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadGuarantee {
    /// The path of its cgroup.
    pub cgroup: CgroupPath,
    /// Which cgroup of that path.
    pub id: CgroupId,
    /// Who holds it in the ledger: several containers, where their pod was admitted as a whole.
    pub owner: OwnerId,
    /// The container, if it is one of a pod.
    pub container: Option<PodContainer>,
    /// The nodes on which memory is promised to it.
    pub nodes: NodeSet,
    /// Its exclusive CPUs.
    pub cpus: CpuSet,
    /// The other threads of their cores, where nobody may use them.
    pub hidden_cpus: CpuSet,
    /// Whether what it has beyond its promise may lie on any node.
    pub is_burstable: bool,
    /// Memory promised to it, at most one block a kind.
    pub blocks: Vec<MemoryBlock>,
    /// The same, by kind and the node that is charged.
    pub placed: Vec<(ZoneKind, NodeId, Bytes)>,
    /// Those of its CPUs that are offline.
    pub offline_cpus: CpuSet,
    /// Memory promised to it that the machine does not have (any more).
    pub uncovered: Vec<MemoryBlock>,
}

impl WorkloadGuarantee {
    /// The CPUs that nobody else may use.
    pub fn held_cpus(&self) -> CpuSet {
        &self.cpus | &self.hidden_cpus
    }
}

/// Memory of an allocation, by kind and the node that is charged: [`WorkloadGuarantee::placed`].
pub fn placed(allocation: &Allocation) -> Vec<(ZoneKind, NodeId, Bytes)> {
    let by_kind = allocation.placed.iter();
    by_kind.flat_map(|(kind, nodes)| nodes.iter().map(|(node, bytes)| (*kind, *node, *bytes))).collect()
}

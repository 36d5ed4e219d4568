//! Guarantees of another program, which this daemon adopts for containers with an existing cgroup.

use std::fmt;

use numaward_cgroup::{CgroupId, CgroupPath, ContainerIdentity};
use numaward_engine::Ledger;
use numaward_model::WorkloadGuarantee;
use numaward_topology::CpuSet;

/// Source of another program's guarantees.
pub trait ForeignGuarantees: fmt::Debug + Send + Sync {
    /// Returns the guarantee of the container with this cgroup.
    fn guarantee(
        &self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: &ContainerIdentity,
    ) -> Option<WorkloadGuarantee>;
    /// Returns the name under which a container is served, if it is known.
    fn label(&self, container: &ContainerIdentity) -> Option<String>;
    /// Returns the accounts of the nodes.
    fn ledger(&self) -> &Ledger;
    /// Returns the CPUs that can still become exclusive.
    fn free_cpus(&self) -> CpuSet;
}

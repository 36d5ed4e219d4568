//! Promises that somebody else made: they are taken for our own, for containers whose cgroups are there.

use std::fmt;

use numaward_cgroup::{CgroupId, CgroupPath, ContainerIdentity};
use numaward_engine::Ledger;
use numaward_model::WorkloadGuarantee;
use numaward_topology::CpuSet;

/// What somebody else promised, and to whom.
pub trait ForeignPromises: fmt::Debug + Send + Sync {
    /// What is promised to the container with this cgroup.
    fn promise(
        &self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: &ContainerIdentity,
    ) -> Option<WorkloadGuarantee>;
    /// The name under which a container is served, where it is known.
    fn label(&self, container: &ContainerIdentity) -> Option<String>;
    /// The accounts of the nodes.
    fn ledger(&self) -> &Ledger;
    /// CPUs that can still become exclusive.
    fn free_cpus(&self) -> CpuSet;
}

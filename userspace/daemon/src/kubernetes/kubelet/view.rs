//! Guarantees of the kubelet in the forms that the observer, the HTTP API and the exports use.

use std::{path::Path, sync::Arc};

use numaward_api::{self as api, PodContainer, Target};
use numaward_cgroup::{CgroupId, CgroupPath, ContainerIdentity};
use numaward_engine::Ledger;
use numaward_guarantee::reconciler::View;
use numaward_model::{WorkloadGuarantee, placed};
use numaward_observe::{ForeignGuarantees, Observer};
use numaward_topology::{CpuSet, Machine, NodeSet};
use parking_lot::RwLock;

use super::names::Names;
use crate::kubernetes::export::{AssignedResources, HeldResources, Source};

/// Guarantees of the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeletGuarantees {
    /// The guarantees by the UID of the pod and the name of the container, including init containers.
    pub ledger: Ledger,
    /// Names of the pods and containers.
    pub names: Names,
    /// The CPUs that the kubelet can assign: all but the reserved ones. Empty if the kubelet did not report them.
    pub allocatable_cpus: CpuSet,
}

impl KubeletGuarantees {
    /// Returns the CPUs that can still become exclusive.
    fn free_cpus(&self) -> CpuSet {
        let exclusive = self.ledger.allocations().filter_map(|(_, _, allocation)| allocation.cpus.as_ref());
        let free = exclusive.fold(self.ledger.shared_pool().clone(), |free, cpus| &free - cpus);
        if self.allocatable_cpus.is_empty() { free } else { &free & &self.allocatable_cpus }
    }
}

impl ForeignGuarantees for KubeletGuarantees {
    fn guarantee(
        &self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: &ContainerIdentity,
    ) -> Option<WorkloadGuarantee> {
        let owner = container.pod_uid.as_deref()?.into();
        let pod = self.ledger.owner(&owner)?;
        let name = self.names.container(container);
        // Without a known name, the cgroup may be any container of the pod.
        let held: Vec<_> = pod
            .containers
            .iter()
            .filter(|(candidate, _)| name.is_none_or(|name| candidate.as_str() == name))
            .collect();
        let (mut nodes, mut cpus) = (NodeSet::new(), CpuSet::new());
        for (_, held) in &held {
            nodes.extend(held.memory_nodes().iter());
            cpus.extend(held.cpus.iter().flat_map(CpuSet::iter));
        }
        if nodes.is_empty() && cpus.is_empty() {
            return None;
        }
        Some(WorkloadGuarantee {
            cgroup: cgroup.clone(),
            id,
            owner,
            container: None,
            nodes,
            cpus,
            hidden_cpus: CpuSet::new(),
            is_burstable: false,
            // The kubelet itself has to detect that the machine lost guaranteed CPUs or memory.
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
            blocks: Vec::new(),
            // Bytes by node as in the checkpoints of the kubelet. If the cgroup may be one of several containers, the bytes would count
            // for each of them, so none are given.
            placed: match held[..] {
                [(_, held)] => placed(held),
                _ => Vec::new(),
            },
        })
    }

    fn label(&self, container: &ContainerIdentity) -> Option<String> {
        self.names.label(container)
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn free_cpus(&self) -> CpuSet {
        Self::free_cpus(self)
    }
}

/// The guarantees of the kubelet that were read last. Clones are handles to the same value.
#[derive(Clone, Debug, Default)]
pub struct LatestGuarantees(Arc<RwLock<Arc<KubeletGuarantees>>>);

impl LatestGuarantees {
    pub fn get(&self) -> Arc<KubeletGuarantees> {
        self.0.read().clone()
    }

    pub(super) fn set(&self, guarantees: Arc<KubeletGuarantees>) {
        *self.0.write() = guarantees;
    }

    /// Returns the source of the guarantees for the HTTP API, with the cgroups of `observer`.
    pub fn view(self, observer: Arc<Observer>) -> View {
        Arc::new(move || Arc::new(allocations(&self.get(), &observer)))
    }

    /// Returns the source of the guarantees for exports.
    pub fn source(self, observer: Arc<Observer>) -> Source {
        Arc::new(move || assigned(&self.get(), &observer.machine()))
    }
}

fn assigned(guarantees: &KubeletGuarantees, machine: &Machine) -> AssignedResources {
    let ledger = &guarantees.ledger;
    let held = ledger.allocations().map(|(uid, container, allocation)| {
        let (namespace, pod) = guarantees.names.pod(uid.as_str()).cloned().unwrap_or_default();
        let (container, pod_uid) = (container.to_string(), uid.to_string());
        HeldResources {
            container: Some(PodContainer { namespace, pod, container, pod_uid, shares_pod: false }),
            cpus: allocation.cpus.clone().unwrap_or_default(),
            hidden_cpus: allocation.hidden_cpus.clone(),
            blocks: allocation.blocks.clone(),
        }
    });
    AssignedResources::new(held.collect(), &guarantees.free_cpus(), ledger, machine)
}

/// Returns the guarantees as the HTTP API serves them, with the cgroups of running containers.
fn allocations(guarantees: &KubeletGuarantees, observer: &Observer) -> api::Allocations {
    let (containers, root, machine) = (observer.containers(), observer.cgroup_root(), observer.machine());
    let AssignedResources { held, free_cpus, memory, .. } = assigned(guarantees, &machine);
    let nodes = machine.nodes.iter().map(|(id, node)| api::NodeCapacity {
        node: id.0,
        free_cpus: (&free_cpus & &node.cpus).to_string(),
        memory: memory.get(id).into_iter().flatten().map(Into::into).collect(),
    });
    let held = held.into_iter().filter_map(|held| allocation(guarantees, &containers, root.as_deref(), held));
    api::Allocations {
        allocations: held.map(Into::into).collect(),
        shared_cpus: guarantees.ledger.shared_pool().to_string(),
        nodes: nodes.collect(),
        ..api::Allocations::default()
    }
}

fn allocation(
    guarantees: &KubeletGuarantees,
    containers: &[(CgroupPath, ContainerIdentity)],
    root: Option<&Path>,
    HeldResources { container, cpus, blocks, .. }: HeldResources,
) -> Option<api::Allocation> {
    let container = container?;
    let of_pod = containers.iter().filter(|(_, found)| found.pod_uid.as_ref() == Some(&container.pod_uid));
    let of_pod: Vec<_> = of_pod.map(|(path, found)| (path, guarantees.names.container(found))).collect();
    let named = of_pod.iter().find(|(_, name)| *name == Some(&container.container));
    let cgroup = match (named, of_pod.as_slice()) {
        // The name of the cgroup's container is unknown, but the pod has only one cgroup.
        (Some((path, _)), _) | (None, [(path, None)]) => path.to_string(),
        (None, _) => String::new(),
    };
    let directory = root.filter(|_| !cgroup.is_empty());
    let directory = directory.map(|root| root.join(cgroup.trim_start_matches('/')).display().to_string());
    let pod = if container.pod.is_empty() {
        container.pod_uid.clone()
    } else {
        format!("{}/{}", container.namespace, container.pod)
    };
    Some(api::Allocation {
        name: format!("{pod}/{}", container.container),
        target: Target::Container(container),
        directory: directory.unwrap_or_default(),
        cgroup,
        cpus: cpus.to_string(),
        nodes: blocks.iter().flat_map(|block| block.affinity.iter()).collect::<NodeSet>().to_string(),
        memory: blocks.iter().map(Into::into).collect(),
        // numaward writes nothing for this guarantee.
        ..api::Allocation::default()
    })
}

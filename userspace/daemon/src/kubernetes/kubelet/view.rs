//! Holding the kubelet to its promises: they are taken for our own, for containers whose cgroups are there; and they are
//! given in the forms in which they are served and exported.

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
use crate::kubernetes::export::{Assigned, Held, Source};

/// What the kubelet promised, and to whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What it promised, by the UID of the pod and the name of the container: init containers and others alike.
    pub ledger: Ledger,
    /// To whom.
    pub names: Names,
    /// The CPUs that can be promised: all but those that are reserved. Empty if the kubelet did not say.
    pub allocatable_cpus: CpuSet,
}

impl Kept {
    /// CPUs that can still become exclusive.
    fn free_cpus(&self) -> CpuSet {
        let exclusive = self.ledger.allocations().filter_map(|(_, _, of)| of.cpus.as_ref());
        let free = exclusive.fold(self.ledger.shared_pool().clone(), |free, cpus| &free - cpus);
        if self.allocatable_cpus.is_empty() { free } else { &free & &self.allocatable_cpus }
    }
}

impl ForeignGuarantees for Kept {
    fn guarantee(
        &self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: &ContainerIdentity,
    ) -> Option<WorkloadGuarantee> {
        let owner = container.pod_uid.as_deref()?.into();
        let pod = self.ledger.owner(&owner)?;
        let name = self.names.container(container);
        // Where it is not known which container it is, it may be any of the pod's.
        let held: Vec<_> =
            pod.containers.iter().filter(|(of, _)| name.is_none_or(|name| of.as_str() == name)).collect();
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
            // What the machine lost of the kubelet's promises is the kubelet's to find out.
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
            blocks: Vec::new(),
            // By node as the kubelet charges them, as far as its checkpoints say. What is promised to one of several
            // containers is not to count for each.
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

/// The kubelet's promises as they were last read. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct LastRead(Arc<RwLock<Arc<Kept>>>);

impl LastRead {
    /// What was read last.
    pub fn get(&self) -> Arc<Kept> {
        self.0.read().clone()
    }

    pub(super) fn set(&self, kept: Arc<Kept>) {
        *self.0.write() = kept;
    }

    /// Gives them as allocations to the containers that this observer sees.
    pub fn view(self, observer: Arc<Observer>) -> View {
        Arc::new(move || Arc::new(allocations(&self.get(), &observer)))
    }

    /// Gives them for export.
    pub fn source(self, observer: Arc<Observer>) -> Source {
        Arc::new(move || assigned(&self.get(), &observer.machine()))
    }
}

/// What the kubelet promised.
fn assigned(kept: &Kept, machine: &Machine) -> Assigned {
    let ledger = &kept.ledger;
    let held = ledger.allocations().map(|(uid, container, of)| {
        let (namespace, pod) = kept.names.pod(uid.as_str()).cloned().unwrap_or_default();
        let (container, pod_uid) = (container.to_string(), uid.to_string());
        Held {
            container: Some(PodContainer { namespace, pod, container, pod_uid, shares_pod: false }),
            cpus: of.cpus.clone().unwrap_or_default(),
            hidden_cpus: of.hidden_cpus.clone(),
            blocks: of.blocks.clone(),
        }
    });
    Assigned::new(held.collect(), &kept.free_cpus(), ledger, machine)
}

/// The same as it is served, with the cgroups of those that run.
fn allocations(kept: &Kept, observer: &Observer) -> api::Allocations {
    let (containers, root, machine) = (observer.containers(), observer.cgroup_root(), observer.machine());
    let Assigned { held, free_cpus, memory, .. } = assigned(kept, &machine);
    let nodes = machine.nodes.iter().map(|(id, node)| api::NodeCapacity {
        node: id.0,
        free_cpus: (&free_cpus & &node.cpus).to_string(),
        memory: memory.get(id).into_iter().flatten().map(Into::into).collect(),
    });
    let held = held.into_iter().filter_map(|held| allocation(kept, &containers, root.as_deref(), held));
    api::Allocations {
        allocations: held.map(Into::into).collect(),
        shared_cpus: kept.ledger.shared_pool().to_string(),
        nodes: nodes.collect(),
        ..api::Allocations::default()
    }
}

fn allocation(
    kept: &Kept,
    containers: &[(CgroupPath, ContainerIdentity)],
    root: Option<&Path>,
    Held { container, cpus, blocks, .. }: Held,
) -> Option<api::Allocation> {
    let of = container?;
    let of_pod = containers.iter().filter(|(_, found)| found.pod_uid.as_ref() == Some(&of.pod_uid));
    let of_pod: Vec<_> = of_pod.map(|(path, found)| (path, kept.names.container(found))).collect();
    let named = of_pod.iter().find(|(_, name)| *name == Some(&of.container));
    let cgroup = match (named, of_pod.as_slice()) {
        // Which one it is, is not known; but there is but one.
        (Some((path, _)), _) | (None, [(path, None)]) => path.to_string(),
        (None, _) => String::new(),
    };
    let directory = root.filter(|_| !cgroup.is_empty());
    let directory = directory.map(|root| root.join(cgroup.trim_start_matches('/')).display().to_string());
    let pod = if of.pod.is_empty() { of.pod_uid.clone() } else { format!("{}/{}", of.namespace, of.pod) };
    Some(api::Allocation {
        name: format!("{pod}/{}", of.container),
        target: Target::Container(of),
        directory: directory.unwrap_or_default(),
        cgroup,
        cpus: cpus.to_string(),
        nodes: blocks.iter().flat_map(|block| block.affinity.iter()).collect::<NodeSet>().to_string(),
        memory: blocks.iter().map(Into::into).collect(),
        // The kubelet writes its settings.
        ..api::Allocation::default()
    })
}

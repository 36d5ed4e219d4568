//! Holding the kubelet to its promises: they are taken for our own, for containers whose cgroups are there.

use std::sync::{Arc, PoisonError, RwLock};

use numaward_cgroup::{CgroupId, CgroupPath, Container};
use numaward_control::View;
use numaward_engine::Ledger;
use numaward_model::Promise;
use numaward_observe::{ForeignPromises, Observer};
use numaward_topology::{CpuSet, NodeSet};

use super::{
    allocations::{allocations, assigned},
    names::Names,
};
use crate::kubernetes::export::Source;

/// What the kubelet promised, and to whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What it promised, by the UID of the pod and the name of the container: init containers and others alike.
    pub ledger: Ledger,
    /// To whom.
    pub names: Names,
}

impl ForeignPromises for Kept {
    fn promise(&self, id: CgroupId, cgroup: &CgroupPath, container: &Container) -> Option<Promise> {
        let pod = self.ledger.owner(&container.pod_uid.as_deref()?.into())?;
        let name = self.names.container(container);
        // Where it is not known which container it is, it may be any of the pod's.
        let held = pod.containers.iter().filter(|(of, _)| name.is_none_or(|name| of.as_str() == name));
        let (mut nodes, mut cpus) = (NodeSet::new(), CpuSet::new());
        for (_, held) in held {
            nodes.extend(held.memory_nodes().iter());
            cpus.extend(held.cpus.iter().flat_map(CpuSet::iter));
        }
        if nodes.is_empty() && cpus.is_empty() {
            return None;
        }
        Some(Promise {
            cgroup: cgroup.clone(),
            id,
            container: None,
            nodes,
            cpus,
            // What the machine lost of the kubelet's promises is the kubelet's to find out.
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
            blocks: Vec::new(),
            // Its checkpoints say the nodes of a block, not how much of it each is to hold: headroom is not known.
            placed: Vec::new(),
        })
    }

    fn label(&self, container: &Container) -> Option<String> {
        self.names.label(container)
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// The kubelet's promises as they were last read. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct LastRead(Arc<RwLock<Arc<Kept>>>);

impl LastRead {
    /// What was read last.
    pub fn get(&self) -> Arc<Kept> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, kept: Arc<Kept>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    /// Gives them as allocations to the containers that this observer sees.
    pub fn view(self, observer: Arc<Observer>) -> View {
        Arc::new(move || {
            let (containers, root) = (observer.containers(), observer.cgroup_root());
            Arc::new(allocations(&self.get(), &containers, &observer.machine(), root.as_deref()))
        })
    }

    /// Gives them to those who are told what is assigned.
    pub fn source(self, observer: Arc<Observer>) -> Source {
        Arc::new(move || assigned(&self.get(), &observer.machine()))
    }
}

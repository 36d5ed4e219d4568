//! Holding the kubelet to its promises: they are taken for our own, for containers whose cgroups are there.

use std::sync::{Arc, PoisonError, RwLock};

use numaward_cgroup::{CgroupId, CgroupPath, Container};
use numaward_engine::Ledger;
use numaward_model::Promise;
use numaward_observe::{ForeignPromises, Observer};
use numaward_topology::CpuSet;

use super::{allocations, names::Names, state::Promised};
use crate::kubernetes::export::View;

/// What the kubelet promised, and to whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What it promised.
    pub promised: Promised,
    /// To whom.
    pub names: Names,
}

impl ForeignPromises for Kept {
    fn promise(&self, id: CgroupId, cgroup: &CgroupPath, container: &Container) -> Option<Promise> {
        let pod = container.pod_uid.as_deref()?;
        let name = self.names.container(container);
        let nodes = self.promised.nodes_of(pod, name);
        let cpus = self.promised.cpus_of(pod, name);
        if nodes.is_none() && cpus.is_empty() {
            return None;
        }
        Some(Promise {
            cgroup: cgroup.clone(),
            id,
            container: None,
            nodes: nodes.unwrap_or_default(),
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
        &self.promised.ledger
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
}

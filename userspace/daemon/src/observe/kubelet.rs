//! Holding the kubelet to its promises: they are taken for our own, for containers whose cgroups are there.

use std::sync::Arc;

use numaward_cgroup::{CgroupId, CgroupPath, Container};
use numaward_topology::CpuSet;
use tokio::sync::Notify;

use super::{Observer, State};
use crate::{
    guarantee::keeper::Listener as _, guarantee::keeper::Promise, guarantee::keeper::Promises, kubelet,
    kubelet::names::Names, kubelet::state::Promised, sharing::View,
};
use numaward_api as api;

/// What the kubelet promised, and to whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What it promised.
    pub promised: Promised,
    /// To whom.
    pub names: Names,
}

impl Kept {
    /// What is promised to the container with this cgroup.
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
            nodes: nodes.unwrap_or_default(),
            cpus,
            // What the machine lost of the kubelet's promises is the kubelet's to find out.
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
            // Its checkpoints tell the nodes of a block, not how much of it each is to hold: headroom is not told.
            placed: Vec::new(),
        })
    }
}

impl Observer {
    /// Takes the kubelet's promises for our own from now on.
    pub(crate) fn hold_kubelet_to(&self, kept: &Arc<Kept>) {
        let workloads = {
            let mut state = self.lock();
            if state.kept.as_ref() == Some(kept) {
                return;
            }
            state.kept = Some(kept.clone());
            state.rename();
            let containers = state
                .table
                .members()
                .filter_map(|(id, member)| kept.promise(id, &member.path, member.container.as_ref()?));
            containers.map(Arc::new).collect()
        };
        self.promised(Promises::new(workloads, kept.promised.ledger.clone()));
    }

    /// Is notified when a container comes to which nothing is known to be promised.
    pub(crate) fn containers_came(&self) -> Arc<Notify> {
        self.lock().containers_came.clone()
    }

    /// Gives the kubelet's promises as allocations.
    pub fn kubelet_view(self: Arc<Self>) -> View {
        Arc::new(move || Arc::new(self.kubelet_allocations()))
    }

    fn kubelet_allocations(&self) -> api::Allocations {
        let (kept, machine, root, containers) = {
            let state = self.lock();
            let containers = state
                .table
                .members()
                .filter_map(|(_, member)| Some((member.path.clone(), member.container.clone()?)))
                .collect::<Vec<_>>();
            let root = state.hierarchy.as_ref().map(|hierarchy| hierarchy.root().to_owned());
            (state.kept.clone(), state.machine.clone(), root, containers)
        };
        kubelet::allocations(&kept.unwrap_or_default(), &containers, &machine, root.as_deref())
    }
}

impl State {
    /// The name under which a container is served, where it is known.
    pub(super) fn label(&self, container: Option<&Container>) -> Option<String> {
        let container = container?;
        let told = self.containers.get(container).map(ToString::to_string);
        told.or_else(|| self.kept.as_ref()?.names.label(container))
    }

    /// The cgroup of a container came: what the kubelet promised to it holds from its first page.
    pub(super) fn container_came(
        &mut self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: Option<&Container>,
    ) {
        let promise = self
            .kept
            .as_ref()
            .zip(container)
            .and_then(|(kept, container)| kept.promise(id, cgroup, container));
        match promise {
            Some(promise) => Arc::make_mut(&mut self.promises).insert(promise),
            // Maybe the promise is news too.
            None => self.containers_came.notify_one(),
        }
    }

    /// The cgroup of a container went.
    pub(super) fn container_went(&mut self, id: CgroupId) {
        if self.kept.is_some() && self.promises.has(id) {
            Arc::make_mut(&mut self.promises).remove(id);
        }
    }
}

//! Promises that somebody else made: they are taken for our own, for containers whose cgroups are there.

use std::{fmt, path::PathBuf, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath, Container};
use numaward_engine::Ledger;
use numaward_model::{Promise, Promises, port::AssignmentSink as _};
use tokio::sync::Notify;

use super::{Observer, State};

/// What somebody else promised, and to whom.
pub trait ForeignPromises: fmt::Debug + Send + Sync {
    /// What is promised to the container with this cgroup.
    fn promise(&self, id: CgroupId, cgroup: &CgroupPath, container: &Container) -> Option<Promise>;
    /// The name under which a container is served, where it is known.
    fn label(&self, container: &Container) -> Option<String>;
    /// The accounts of the nodes.
    fn ledger(&self) -> &Ledger;
}

impl Observer {
    /// Takes these promises for our own from now on. Those that are held already, by identity, change nothing.
    pub fn hold_to(&self, foreign: Arc<dyn ForeignPromises>) {
        let ledger = foreign.ledger().clone();
        let workloads = {
            let mut state = self.lock();
            if state.foreign.as_ref().is_some_and(|held| Arc::ptr_eq(held, &foreign)) {
                return;
            }
            state.foreign = Some(foreign.clone());
            state.rename();
            let containers = state
                .table
                .members()
                .filter_map(|(id, member)| foreign.promise(id, &member.path, member.container.as_ref()?));
            containers.map(Arc::new).collect()
        };
        self.assigned(Promises::new(workloads, ledger));
    }

    /// Is notified when a container comes to which nothing is known to be promised.
    pub fn containers_came(&self) -> Arc<Notify> {
        self.lock().containers_came.clone()
    }

    /// The containers whose cgroups are there.
    pub fn containers(&self) -> Vec<(CgroupPath, Container)> {
        let state = self.lock();
        let members = state.table.members();
        members.filter_map(|(_, member)| Some((member.path.clone(), member.container.clone()?))).collect()
    }

    /// Where the hierarchy of cgroups is, once that is known.
    pub fn cgroup_root(&self) -> Option<PathBuf> {
        self.lock().hierarchy.as_ref().map(|hierarchy| hierarchy.root().to_owned())
    }
}

impl State {
    /// The name under which a container is served, where it is known.
    pub(super) fn label(&self, container: Option<&Container>) -> Option<String> {
        let container = container?;
        let known = self.containers.get(container).map(ToString::to_string);
        known.or_else(|| self.foreign.as_ref()?.label(container))
    }

    /// The cgroup of a container came: what is promised to it holds from its first page.
    pub(super) fn container_came(
        &mut self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: Option<&Container>,
    ) {
        let promise = self
            .foreign
            .as_ref()
            .zip(container)
            .and_then(|(foreign, container)| foreign.promise(id, cgroup, container));
        match promise {
            Some(promise) => Arc::make_mut(&mut self.promises).insert(promise),
            // Maybe the promise is news too.
            None => self.containers_came.notify_one(),
        }
    }

    /// The cgroup of a container went.
    pub(super) fn container_went(&mut self, id: CgroupId) {
        if self.foreign.is_some() && self.promises.has(id) {
            Arc::make_mut(&mut self.promises).remove(id);
        }
    }
}

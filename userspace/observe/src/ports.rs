//! What other parts of the daemon ask of the observer, or report to it.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use numaward_cgroup::{CgroupPath, Container, classify};
use numaward_model::{
    Promises, Report,
    port::{AssignmentSink, CgroupEvents, CgroupListener, ContainerNames, EventSink, MachineSource},
};
use numaward_topology::Machine;
use tokio::sync::Notify;

use crate::{foreign::ForeignPromises, observer::Observer, state::Listening, table::Member};

impl MachineSource for Observer {
    fn machine(&self) -> Arc<Machine> {
        Self::machine(self)
    }
}

impl EventSink for Observer {
    fn report(&self, cgroup: Option<&CgroupPath>, report: Report) {
        let name = cgroup.map(|cgroup| self.lock().name_of(&classify(cgroup, |path| path == cgroup)));
        self.events().report(match name {
            Some(name) => report.workload(name),
            None => report,
        });
    }
}

impl CgroupEvents for Observer {
    fn subscribe(&self, listener: CgroupListener) {
        self.lock().cgroup_listeners.push(Listening(listener));
    }
}

impl AssignmentSink for Observer {
    /// The probes know the nodes of a workload when this returns: its first page is judged by them.
    fn assigned(&self, promises: Promises) {
        // While it is known what was promised before.
        self.report_probe_events();
        let mut state = self.lock();
        state.revision += 1;
        let before = std::mem::replace(&mut state.promises, Arc::new(promises));
        let now = state.promises.clone();
        for ended in before.workloads().iter().filter(|promise| !now.has(promise.id)) {
            state.allow(ended.id);
        }
        for promise in now.workloads() {
            if state.table.slot(promise.id).is_some() {
                let was = before.of(promise.id);
                let is_same = was.is_some_and(|was| Arc::ptr_eq(was, promise));
                if !is_same && before.nodes_of(promise.id) != now.nodes_of(promise.id) {
                    state.allow(promise.id);
                }
                continue;
            }
            let workload = classify(&promise.cgroup, |path| *path == promise.cgroup);
            let name = state.name_of(&workload);
            let member = Member::new(promise.cgroup.clone(), workload.kind, workload.container);
            state.table.add(promise.id, &name, member);
            state.table.prefer(promise.id);
        }
        state.keep_books(self.config.observe.keep_removed.0);
        state.follow_exclusive_cpus(&self.config.host_root);
        state.step_aside();
    }
}

impl ContainerNames for Observer {
    fn containers_are(&self, named: Vec<(String, String)>, all: bool) {
        let mut state = self.lock();
        let mut told = HashSet::new();
        for (id, name) in named {
            told.insert(id.clone());
            let is_known = state.containers.0.get(&id).is_some_and(|known| **known == *name);
            if !is_known {
                state.containers.0.insert(id, name.into());
            }
        }
        if all {
            state.containers.0.retain(|id, _| told.contains(id));
        }
        state.rename();
    }

    fn container_is_gone(&self, id: &str) {
        self.lock().containers.0.remove(id);
    }
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
            state.foreign = Some(foreign);
            state.rename();
            let containers = state.table.members().filter_map(|(id, member)| {
                state.foreign.as_ref()?.promise(id, &member.path, member.container.as_ref()?)
            });
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

//! The names of pods' containers, which their cgroups do not tell.
//!
//! Whoever knows them tells: the container runtime when it creates them, else the API server, else what the kubelet
//! promises and to whom ([`super::ForeignPromises`]). A container that was seen before is served under its name from then on;
//! what was counted before stays under the old one. A name is forgotten when its container is.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use numaward_cgroup::{Container, Workload};
use numaward_model::port::ContainerNames;

use super::{Observer, State, naming, table::Member};

/// Names by the runtime's ids of the containers.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<String, Arc<str>>);

impl Names {
    pub(super) fn get(&self, container: &Container) -> Option<&Arc<str>> {
        self.0.get(&container.id)
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

impl State {
    /// The name under which a workload is served.
    pub(super) fn name_of(&self, workload: &Workload) -> String {
        self.label(workload.container.as_ref()).unwrap_or_else(|| naming::name(workload))
    }

    /// Serves under its name who has become known.
    pub(super) fn rename(&mut self) {
        let renamed: Vec<_> = self
            .table
            .members()
            .filter_map(|(id, member)| {
                let container = member.container.clone()?;
                let label = self.label(Some(&container))?;
                let is_new = self.table.name(id).is_none_or(|name| **name != *label);
                is_new.then(|| (id, label, Member::new(member.path.clone(), member.kind, Some(container))))
            })
            .collect();
        for (id, label, member) in renamed {
            self.give_up(id);
            self.table.add(id, &label, member);
        }
    }
}

//! The books of this host: its workloads, their names, and what is promised to them. No file and no map is read here.

use std::{collections::HashMap, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath, CgroupWorkload, ContainerIdentity, Hierarchy};
use numaward_model::Guarantees;
use numaward_probes::SlotId;
use tokio::sync::Notify;

use crate::{
    exclusive::Exclusive,
    foreign::ForeignPromises,
    naming,
    slot_policy::SlotPolicy,
    table::{Member, Table},
};

/// The books. What is shared with readers is copied when it changes while they hold it.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) table: Arc<Table<SlotId>>,
    /// Where cgroups are found, once that is known.
    pub(crate) hierarchy: Option<Hierarchy>,
    pub(crate) promises: Arc<Guarantees>,
    /// How often that changed.
    pub(crate) revision: u64,
    /// Somebody else's promises, where they are taken for our own.
    pub(crate) foreign: Option<Arc<dyn ForeignPromises>>,
    /// The names of pods' containers, which their cgroups do not say, by the runtime's ids.
    ///
    /// They come from the container runtime when it creates them, else from the API server, else from `foreign`. A
    /// container that was seen before is served under its name from then on; what was counted before stays under the old
    /// one. A name is forgotten when its container is.
    pub(crate) containers: HashMap<String, Arc<str>>,
    /// Is notified of containers to which nothing is known to be promised.
    pub(crate) containers_came: Arc<Notify>,
    pub(crate) exclusive: Exclusive,
    pub(crate) slot_policy: SlotPolicy,
}

impl State {
    /// The workloads, to be changed.
    pub(crate) fn table_mut(&mut self) -> &mut Table<SlotId> {
        Arc::make_mut(&mut self.table)
    }

    /// The name under which a workload is served.
    pub(crate) fn name_of(&self, workload: &CgroupWorkload) -> String {
        self.label(workload.container.as_ref()).unwrap_or_else(|| naming::name(workload))
    }

    /// The name under which a container of a pod is served, where it is known. Another container with the same id may be
    /// anybody's cgroup.
    pub(crate) fn label(&self, container: Option<&ContainerIdentity>) -> Option<String> {
        let container = container.filter(|container| container.pod_uid.is_some())?;
        let known = self.containers.get(&container.id).map(ToString::to_string);
        known.or_else(|| self.foreign.as_ref()?.label(container))
    }

    /// Returns the workloads that are to be served under another name than before, with that name.
    pub(crate) fn renamed(&self) -> impl Iterator<Item = (CgroupId, String, &Member<SlotId>)> {
        self.table.members().filter_map(|(id, member)| {
            let label = self.label(member.container.as_ref())?;
            let is_new = self.table.name(id).is_none_or(|name| **name != *label);
            is_new.then_some((id, label, member))
        })
    }

    /// The cgroup of a container came: what is promised to it holds from its first page.
    pub(crate) fn container_came(
        &mut self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: Option<&ContainerIdentity>,
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
    pub(crate) fn container_went(&mut self, id: CgroupId) {
        if self.foreign.is_some() && self.promises.has(id) {
            Arc::make_mut(&mut self.promises).remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::classify;

    use super::*;

    #[test]
    fn a_pods_name_is_not_had_by_its_containers_id() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let containers = HashMap::from([(ID.to_owned(), "prod/db/main".into())]);
        let state = State { containers, ..State::default() };
        for (path, name) in [
            (format!("/kubepods/podu1/{ID}"), "prod/db/main"),
            (
                format!("/user.slice/user-1000.slice/user@1000.service/kubepods/podu1/{ID}"),
                "user@1000.service",
            ),
            (format!("/machine.slice/libpod-{ID}.scope"), "libpod"),
            (format!("/batch/kubepods/podu1/{ID}"), "containers"),
        ] {
            let path: CgroupPath = path.parse().unwrap();
            assert_eq!(state.name_of(&classify(&path, |_| false)), name, "{path}");
        }
    }
}

//! State of this host: its workloads, their names and their guarantees. This module reads no file and no BPF map.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use numaward_cgroup::{CgroupId, CgroupPath, CgroupWorkload, ContainerIdentity, Hierarchy};
use numaward_model::Guarantees;
use numaward_probes::SlotId;
use tokio::sync::Notify;

use crate::{
    exclusive::ExclusiveCpus,
    foreign::ForeignGuarantees,
    naming,
    slot_policy::SlotPolicy,
    table::{Member, Table},
};

/// State of this host. Parts shared with readers are copied on write while a reader holds them.
#[derive(Debug, Default)]
pub(crate) struct ObserverState {
    pub(crate) table: Arc<Table<SlotId>>,
    /// The cgroup hierarchy, once it is open.
    pub(crate) hierarchy: Option<Hierarchy>,
    pub(crate) guarantees: Arc<Guarantees>,
    /// Number of changes of `guarantees`.
    pub(crate) revision: u64,
    /// Guarantees of another program that this daemon adopts, if configured.
    pub(crate) foreign: Option<Arc<dyn ForeignGuarantees>>,
    /// Names of pods' containers by the runtime's container ids, because the cgroup path does not contain them.
    ///
    /// The container runtime reports a name when it creates the container; otherwise it comes from the API server or
    /// from `foreign`. A container that was served under another name before is served under this name from then on;
    /// earlier counts stay under the old name. A name is removed together with its container.
    pub(crate) containers: HashMap<String, Arc<str>>,
    /// Names of the containers of Docker and Podman by id; `None` if all containers of a runtime are counted together.
    pub(crate) runtime_names: Option<HashMap<String, Arc<str>>>,
    /// Notified when a container without a known guarantee appears.
    pub(crate) new_container: Arc<Notify>,
    pub(crate) exclusive: ExclusiveCpus,
    pub(crate) slot_policy: SlotPolicy,
    /// Revision and time of the last reading of the guaranteed workloads' memory controllers.
    pub(crate) charges_read: Option<(u64, Instant)>,
}

impl ObserverState {
    pub(crate) fn table_mut(&mut self) -> &mut Table<SlotId> {
        Arc::make_mut(&mut self.table)
    }

    /// Returns the name under which a workload is served.
    pub(crate) fn name_of(&self, workload: &CgroupWorkload) -> String {
        self.label(workload.container.as_ref()).unwrap_or_else(|| naming::name(workload))
    }

    /// Returns the name under which a container is served, if it has a name of its own. Otherwise, a container id outside of
    /// a pod is not trusted, because any cgroup can carry it.
    pub(crate) fn label(&self, container: Option<&ContainerIdentity>) -> Option<String> {
        let container = container?;
        if let Some(runtime) = container.name_keeper {
            let names = self.runtime_names.as_ref()?;
            return Some(naming::runtime_container(runtime, &container.id, names.get(&container.id)));
        }
        let container = Some(container).filter(|container| container.pod_uid.is_some())?;
        let known = self.containers.get(&container.id).map(ToString::to_string);
        known.or_else(|| self.foreign.as_ref()?.label(container))
    }

    /// Returns the renamed workloads with their new names.
    pub(crate) fn renamed(&self) -> impl Iterator<Item = (CgroupId, String, &Member<SlotId>)> {
        self.table.members().filter_map(|(id, member)| {
            let label = self.label(member.container.as_ref())?;
            let is_new = self.table.name(id).is_none_or(|name| **name != *label);
            is_new.then_some((id, label, member))
        })
    }

    /// Removes the names of containers without a cgroup.
    pub(crate) fn forget_runtime_names(&mut self) {
        let Some(names) = self.runtime_names.as_mut().filter(|names| !names.is_empty()) else { return };
        let containers = self.table.members().filter_map(|(_, member)| member.container.as_ref());
        let ids: HashSet<&str> = containers.map(|container| container.id.as_str()).collect();
        names.retain(|id, _| ids.contains(id.as_str()));
    }

    /// Handles a new cgroup of a container. A guarantee of another program applies from the container's first page.
    pub(crate) fn handle_new_container(
        &mut self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: Option<&ContainerIdentity>,
    ) {
        let guarantee = self
            .foreign
            .as_ref()
            .zip(container)
            .and_then(|(foreign, container)| foreign.guarantee(id, cgroup, container));
        match guarantee {
            Some(guarantee) => Arc::make_mut(&mut self.guarantees).insert(guarantee),
            // The guarantee may be new, too.
            None => self.new_container.notify_one(),
        }
    }

    /// Handles the removal of a container's cgroup.
    pub(crate) fn handle_removed_container(&mut self, id: CgroupId) {
        if self.foreign.is_some() && self.guarantees.has(id) {
            Arc::make_mut(&mut self.guarantees).remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use numaward_cgroup::classify;
    use numaward_probes::NodeCounters;

    use super::*;

    #[test]
    fn container_id_alone_gives_no_pod_name() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let containers = HashMap::from([(ID.to_owned(), "prod/db/main".into())]);
        let state = ObserverState { containers, ..ObserverState::default() };
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

    #[test]
    fn runtime_name_ends_with_its_cgroup() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let names = HashMap::from([(ID.to_owned(), "web".into())]);
        let mut state = ObserverState { runtime_names: Some(names), ..ObserverState::default() };
        let name = |state: &ObserverState, path: &str| {
            state.name_of(&classify(&path.replace("{ID}", ID).parse().unwrap(), |_| false))
        };
        assert_eq!(name(&state, "/system.slice/docker-{ID}.scope/init"), "docker/web");
        assert_eq!(name(&state, "/machine.slice/libpod-{ID}.scope"), "podman/web");
        assert_eq!(name(&state, "/batch/docker-{ID}.scope"), "docker", "a user can create this cgroup");
        let path: CgroupPath = format!("/docker/{ID}").parse().unwrap();
        let workload = classify(&path, |_| false);
        let member = Member::new(path, workload.kind, workload.container);
        state.table_mut().add(CgroupId(1), "docker/web", member);
        state.forget_runtime_names();
        assert_eq!(name(&state, "/docker/{ID}"), "docker/web");
        state.table_mut().remove(CgroupId(1), &NodeCounters::new(), Instant::now());
        state.forget_runtime_names();
        assert_eq!(name(&state, "/docker/{ID}"), "docker/0123456789ab");
        state.runtime_names = None;
        assert_eq!(name(&state, "/docker/{ID}"), "containers");
    }
}

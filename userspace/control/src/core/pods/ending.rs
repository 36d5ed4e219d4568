//! Release of containers and pods that have ended.
//!
//! If a container cannot be released, its resources (and those of its pod) stay guaranteed until its knobs are restored or its cgroup no
//! longer exists.

use std::{collections::BTreeSet, mem, sync::Arc};

use numaward_engine::OwnerId;
use numaward_guarantee::{
    request::Target,
    state::{Guarantee, State},
};
use numaward_model::pod::GuaranteeSource;

use crate::core::{Core, release, shared_pool};

/// Ended containers and pods that could not be released yet. They are not stored.
#[derive(Debug, Default)]
pub(super) struct EndedContainers {
    containers: BTreeSet<String>,
    /// Pods with such containers: UIDs and sandboxes.
    sandboxes: BTreeSet<(String, String)>,
}

impl EndedContainers {
    pub(super) fn contains(&self, id: &str) -> bool {
        self.containers.contains(id)
    }

    /// Removes and returns the containers without a guarantee, which can be released now.
    fn take_released(&mut self, state: &State) -> Vec<String> {
        let is_held = |id: &String| {
            let is_of = |held: &Arc<Guarantee>| matches!(&held.target, Target::Container(of) if of.id == *id);
            state.guarantees.values().any(is_of)
        };
        self.containers.extract_if(.., |id| !is_held(id)).collect()
    }
}

/// Releases a container that ended or was never started. The allocation of a whole pod remains until the pod ends.
pub(crate) fn container_stopped(core: &mut Core, id: &str) {
    let Some(placed) = core.store.state.containers.get(id).cloned() else { return };
    let mut names =
        core.store.state.guarantees.iter().filter_map(|(name, guarantee)| match &guarantee.target {
            Target::Container(of) if of.id == id => Some(name.clone()),
            _ => None,
        });
    if let Some(name) = names.next()
        && let Err(error) = release::release(core, &name)
    {
        tracing::error!(name, %error, "an ended container cannot be released; it is retried");
        core.store.state.releasing.insert(name);
        core.bindings.give_up(id);
        core.pods.ended.containers.insert(id.to_owned());
        return;
    }
    let before = core.store.state.clone();
    forget_container(core, id);
    if placed.of.slice == GuaranteeSource::Claim {
        core.pods.shared_claims.note_changed(&placed.of.owner);
    }
    let mut containers = core.store.state.containers.values();
    let is_shared = containers.any(|other| other.of.owner == placed.of.owner);
    let is_alone = core.store.state.pods.get(&placed.of.owner).is_some_and(|owner| owner.container.is_some());
    if is_alone && !is_shared {
        remove_owner(core, &placed.of.owner);
    }
    store_release(core, &before);
}

fn forget_container(core: &mut Core, id: &str) {
    core.store.state.containers.remove(id);
    core.bindings.forget(id);
    core.pods.ended.containers.remove(id);
    core.pods.waiting.forget(id);
}

pub(crate) fn remove_owner(core: &mut Core, owner: &str) {
    core.store.state.pods.remove(owner);
    core.store.state.release_owner(&OwnerId::from(owner), &*core.policy.strategy);
    core.policy.replace_missing(&mut core.store.state, &*core.ports.host);
}

/// Stores a release. If that fails, the release holds nevertheless: a restart compares the ledger with the running containers.
pub(crate) fn store_release(core: &mut Core, before: &State) {
    if core.store.state == *before {
        return;
    }
    if let Err(error) = core.save() {
        tracing::error!(%error, "the ledger cannot be stored");
    }
    shared_pool::note_guarantees_changed(core);
}

/// Releases the pod of a stopped sandbox, unless the pod has another sandbox by now.
pub(crate) fn pod_stopped(core: &mut Core, uid: &str, sandbox: &str) {
    core.pods.refused_for_room.remove_sandbox(sandbox);
    let of_sandbox: Vec<String> = core
        .store
        .state
        .containers
        .values()
        .filter(|placed| placed.of.sandbox == sandbox)
        .map(|placed| placed.of.id.clone())
        .collect();
    for id in of_sandbox {
        container_stopped(core, &id);
    }
    if has_containers(core, sandbox) {
        core.pods.ended.sandboxes.insert((uid.to_owned(), sandbox.to_owned()));
        return;
    }
    let before = core.store.state.clone();
    let owners: Vec<String> = core
        .store
        .state
        .pods
        .iter()
        .filter(|(_, admitted)| admitted.pod.uid == uid && admitted.sandbox == sandbox)
        .map(|(owner, _)| owner.clone())
        .collect();
    for owner in owners {
        remove_owner(core, &owner);
        tracing::info!(owner, "the pod has ended; its resources are free");
    }
    store_release(core, &before);
}

/// Returns true if a sandbox has containers that are not released yet.
fn has_containers(core: &Core, sandbox: &str) -> bool {
    core.store.state.containers.values().any(|placed| placed.of.sandbox == sandbox)
}

/// Continues the release of containers and pods that could not be released at once.
pub(crate) fn continue_ending(core: &mut Core) {
    for id in core.pods.ended.take_released(&core.store.state) {
        container_stopped(core, &id);
    }
    for (uid, sandbox) in mem::take(&mut core.pods.ended.sandboxes) {
        if has_containers(core, &sandbox) {
            core.pods.ended.sandboxes.insert((uid, sandbox));
        } else {
            pod_stopped(core, &uid, &sandbox);
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_api as api;
    use numaward_engine::PodId;
    use numaward_model::{
        Settings,
        pod::{GuaranteeSource, PodContainer},
    };

    use super::*;

    #[test]
    fn released_container_is_taken_once() {
        let container = |id: &str| PodContainer {
            pod: PodId { namespace: "n".to_owned(), name: "p".to_owned(), uid: "u".to_owned() },
            container: "c".to_owned(),
            id: id.to_owned(),
            sandbox: "s".to_owned(),
            slice: GuaranteeSource::Own,
            owner: "u/c".to_owned(),
        };
        let guarantee = Guarantee {
            target: Target::Container(container("held")),
            cgroup: "/held".parse().unwrap(),
            id: numaward_cgroup::CgroupId(1),
            settings: Settings::default(),
            declared: None,
            explanation: api::Explanation::default(),
        };
        let mut state = State::default();
        state.guarantees.insert("n/p/c".to_owned(), guarantee);
        let mut ended = EndedContainers::default();
        ended.containers.extend(["free".to_owned(), "held".to_owned()]);
        assert_eq!(ended.take_released(&state), ["free"]);
        assert_eq!(ended.take_released(&state), <[String; 0]>::default());
        assert!(ended.contains("held") && !ended.contains("free"));
        state.guarantees.remove("n/p/c");
        assert_eq!(ended.take_released(&state), ["held"]);
    }
}

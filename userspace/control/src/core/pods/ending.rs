//! Containers and pods that are over.
//!
//! What cannot be released stays promised: a container that ended, with its pod, waits until its knobs are given back or
//! its cgroup is gone.

use std::{mem, sync::Arc};

use numaward_engine::OwnerId;
use numaward_guarantee::{
    request::Target,
    state::{Guarantee, State},
};

use crate::core::Core;

impl Core {
    /// A container ended, or was never started. What its pod holds stays until the pod is over.
    pub(super) fn stopped(&mut self, id: &str) {
        let Some(placed) = self.store.state.containers.get(id).cloned() else { return };
        let mut names =
            self.store.state.guarantees.iter().filter_map(|(name, guarantee)| match &guarantee.target {
                Target::Container(of) if of.id == id => Some(name.clone()),
                _ => None,
            });
        if let Some(name) = names.next()
            && let Err(error) = self.release(&name)
        {
            tracing::error!(name, %error, "a container that ended cannot be released; tried again");
            self.store.state.releasing.insert(name);
            self.pods.unbound.remove(id);
            self.pods.ended.insert(id.to_owned());
            return;
        }
        let before = self.store.state.clone();
        self.forget_container(id);
        let mut containers = self.store.state.containers.values();
        let is_shared = containers.any(|other| other.of.owner == placed.of.owner);
        let is_alone =
            self.store.state.pods.get(&placed.of.owner).is_some_and(|owner| owner.container.is_some());
        if is_alone && !is_shared {
            self.remove_owner(&placed.of.owner);
        }
        self.store_given_back(&before);
    }

    fn forget_container(&mut self, id: &str) {
        self.store.state.containers.remove(id);
        self.pods.bound.remove(id);
        self.pods.unbound.remove(id);
        self.pods.ended.remove(id);
        self.pods.waiting.forget(id);
    }

    pub(super) fn remove_owner(&mut self, owner: &str) {
        self.store.state.pods.remove(owner);
        self.store.state.release_owner(&OwnerId::from(owner), &*self.policy.strategy);
        if !self.policy.missing.is_empty() {
            // What it gives back belongs to those that miss it.
            self.recharge();
        }
    }

    /// Stores what was given back. What cannot be stored stays given back: a restart compares with what runs.
    pub(super) fn store_given_back(&mut self, before: &State) {
        if self.store.state == *before {
            return;
        }
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored");
        }
        self.note_guarantees_changed();
    }

    /// A sandbox was stopped: what its pod holds is free, unless the pod has another sandbox by now.
    pub(super) fn pod_stopped(&mut self, uid: &str, sandbox: &str) {
        let of_sandbox: Vec<String> = self
            .store
            .state
            .containers
            .values()
            .filter(|placed| placed.of.sandbox == sandbox)
            .map(|placed| placed.of.id.clone())
            .collect();
        for id in of_sandbox {
            self.stopped(&id);
        }
        if self.has_containers(sandbox) {
            self.pods.over.insert((uid.to_owned(), sandbox.to_owned()));
            return;
        }
        let before = self.store.state.clone();
        let owners: Vec<String> = self
            .store
            .state
            .pods
            .iter()
            .filter(|(_, admitted)| admitted.pod.uid == uid && admitted.sandbox == sandbox)
            .map(|(owner, _)| owner.clone())
            .collect();
        for owner in owners {
            self.remove_owner(&owner);
            tracing::info!(owner, "the pod is over; what it held is free");
        }
        self.store_given_back(&before);
    }

    /// Whether containers of a sandbox are there, or not released yet.
    fn has_containers(&self, sandbox: &str) -> bool {
        self.store.state.containers.values().any(|placed| placed.of.sandbox == sandbox)
    }

    /// Goes on with containers and pods that were over and could not be released at once.
    pub(super) fn go_on_ending(&mut self) {
        let released = self.pods.ended.iter().filter(|id| {
            let is_of =
                |held: &Arc<Guarantee>| matches!(&held.target, Target::Container(of) if of.id == **id);
            !self.store.state.guarantees.values().any(is_of)
        });
        for id in released.cloned().collect::<Vec<_>>() {
            self.pods.ended.remove(&id);
            self.stopped(&id);
        }
        for (uid, sandbox) in mem::take(&mut self.pods.over) {
            if self.has_containers(&sandbox) {
                self.pods.over.insert((uid, sandbox));
            } else {
                self.pod_stopped(&uid, &sandbox);
            }
        }
    }
}

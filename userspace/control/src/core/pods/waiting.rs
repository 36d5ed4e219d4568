//! Containers that run without what they ask for, and pods whose promises come from a kubelet.
//!
//! A container that was started while we were away may find that what it asks for is not there. It runs, so it is not
//! refused: it shares what is nobody's, and waits. Whenever something was given back, those that wait are tried again,
//! in the order of their ids, and pinned as they run. So does one whose creation could not be answered in time.
//!
//! What `numaward import-kubelet-state` took over is in the ledger under the pods' UIDs. The first container of such a
//! pod makes it an admitted pod; what is held for a UID that has no sandbox, when the runtime lists them all, is given
//! back.

use std::collections::{BTreeMap, BTreeSet};

use numaward_api::{self as api, EnforcementMode};
use numaward_engine::{Ledger, OwnerId, in_flight::RESERVE_OWNER};
use numaward_guarantee::pod::{
    AdmittedPod, ContainerPlacementRequest, MemoryClaim, PlacedContainer, PodPlacementRequest, Update,
};
use numaward_model::pod::PodName;

use super::{Attempt, Core};

/// Those that wait.
#[derive(Default)]
pub(crate) struct UnplacedContainers {
    asks: BTreeMap<String, ContainerPlacementRequest>,
    /// What was promised when they were tried last.
    tried: Option<Ledger>,
}

impl UnplacedContainers {
    /// One more waits.
    pub(crate) fn add(&mut self, ask: &ContainerPlacementRequest) {
        self.asks.insert(ask.id.clone(), ask.clone());
    }

    /// One waits no longer.
    pub(crate) fn forget(&mut self, id: &str) {
        self.asks.remove(id);
    }
}

impl Core {
    /// A container that is known runs: what is reported of it now counts, and what it still misses is waited for.
    pub(super) fn note_known(
        &mut self,
        ask: &ContainerPlacementRequest,
        known: &PlacedContainer,
    ) -> PlacedContainer {
        let memory = if ask.memory == MemoryClaim::default() { known.memory } else { ask.memory };
        let without_us = known.without_us.clone().or_else(|| self.known_without_us(&ask.has));
        let placed = PlacedContainer { memory, without_us, ..known.clone() };
        if placed != *known {
            self.store.state.containers.insert(ask.id.clone(), placed.clone());
        }
        if placed.memory != known.memory {
            // To be held to it.
            self.pods.bound.remove(&ask.id);
        }
        // One that was admitted may hold nothing all the same: no CPUs where it asks for parts of them.
        if ask.has_claim() && !self.store.state.pods.contains_key(&placed.of.owner) {
            self.pods.waiting.add(ask);
        }
        placed
    }

    /// Takes note of a container that runs and is not known, with what it asks for if that is there (`true`). Nothing is
    /// stored yet.
    pub(super) fn adopt_container(&mut self, ask: &ContainerPlacementRequest) -> (PlacedContainer, bool) {
        match self.place(ask, Attempt::First) {
            Ok(owner) => (self.note_placed(ask, owner), true),
            Err(error) => {
                tracing::warn!(
                    pod = ask.pod.pod.name, container = ask.name, %error,
                    "runs already and is not promised what it asks for"
                );
                self.pods.waiting.add(ask);
                (self.note_placed(ask, ask.container_owner()), false)
            }
        }
    }

    /// A container starts that is not known: its creation was not answered in time, so it cannot be refused any more,
    /// but must keep off what is promised to others.
    pub(super) fn adopt_started(&mut self, ask: &ContainerPlacementRequest) {
        let mut change = self.begin();
        let (placed, _) = change.adopt_container(ask);
        if let Err(error) = change.store() {
            tracing::error!(container = ask.id, %error, "what runs is not adopted");
            return;
        }
        self.note_guarantees_changed();
        if self.mode() == EnforcementMode::On {
            // It repeats what it knows of whenever it writes.
            let settings = self.settings_of(&placed);
            self.pods.send(vec![Update { id: ask.id.clone(), settings }]);
        }
    }

    /// Pods of which a container waits. None where nothing could be promised to them wherever they were.
    pub(crate) fn unplaced(&self) -> Vec<PodName> {
        let asks = self.pods.waiting.asks.values();
        if self.mode() != EnforcementMode::On || asks.len() == 0 || self.check_fit().is_err() {
            return Vec::new();
        }
        let pods: BTreeMap<&str, &PodName> =
            asks.map(|ask| (ask.pod.pod.uid.as_str(), &ask.pod.pod)).collect();
        pods.into_values().cloned().collect()
    }

    /// Tries again to give to those that wait, if anything was given back or taken since.
    pub(crate) fn try_waiting(&mut self) {
        if self.pods.waiting.asks.is_empty() || self.mode() == EnforcementMode::Off {
            return;
        }
        if self.pods.waiting.tried.as_ref() == Some(&self.store.state.ledger) {
            return;
        }
        let asks: Vec<ContainerPlacementRequest> = self.pods.waiting.asks.values().cloned().collect();
        let mut updates = Vec::new();
        for ask in asks {
            let mut change = self.begin();
            let Ok(owner) = change.place(&ask, Attempt::Again) else { continue };
            let placed = change.note_placed(&ask, owner);
            if let Err(error) = change.store() {
                tracing::error!(container = ask.id, %error, "what came free cannot be promised");
                break;
            }
            self.pods.waiting.forget(&ask.id);
            self.pods.bound.remove(&ask.id);
            self.note_guarantees_changed();
            self.bind(&ask.id);
            let name = placed.of.full_name();
            tracing::info!(name, cgroup = %placed.cgroup, "got what it asked for, and had been started without");
            updates.push(Update { id: ask.id, settings: self.settings_of(&placed) });
        }
        self.pods.waiting.tried = Some(self.store.state.ledger.clone());
        if self.mode() == EnforcementMode::On {
            self.pods.send(updates);
        }
    }

    /// A pod to which a kubelet promised something keeps that; `true` if it is one.
    pub(super) fn take_over_imported(&mut self, ask: &PodPlacementRequest) -> bool {
        let uid = ask.pod.uid.as_str();
        if self.store.state.pods.contains_key(uid)
            || self.store.state.ledger.owner(&OwnerId::from(uid)).is_none()
        {
            return false;
        }
        let mut notes = ask.notes.clone();
        notes.push("taken over from the state of the kubelet, which placed it".to_owned());
        let admitted = AdmittedPod {
            pod: ask.pod.clone(),
            sandbox: ask.sandbox.clone(),
            container: None,
            explanation: api::Explanation { notes, ..api::Explanation::default() },
        };
        tracing::info!(pod = ask.pod.name, uid, "keeps what the kubelet promised to it");
        self.store.state.pods.insert(uid.to_owned(), admitted);
        true
    }

    /// The UIDs of pods to which a kubelet promised something, and of which no container was seen yet.
    pub(super) fn imported(&self) -> impl Iterator<Item = &str> {
        self.store.state.ledger.owners().map(|(owner, _)| owner.as_str()).filter(|owner| {
            let is_held = self.store.state.guarantees.iter().any(|(name, held)| held.owner(name) == *owner);
            !is_held && !self.store.state.pods.contains_key(*owner) && *owner != RESERVE_OWNER
        })
    }

    /// What a kubelet promised to pods that are gone is given back.
    pub(super) fn drop_imported(&mut self, sandboxes: &BTreeMap<String, String>) {
        let runs: BTreeSet<&str> = sandboxes.values().map(String::as_str).collect();
        let before = self.store.state.clone();
        let gone: Vec<String> =
            self.imported().filter(|owner| !runs.contains(owner)).map(str::to_owned).collect();
        for owner in gone {
            tracing::info!(owner, "the kubelet promised something to this pod, which is gone: it is free");
            self.remove_owner(&owner);
        }
        self.store_given_back(&before);
    }
}

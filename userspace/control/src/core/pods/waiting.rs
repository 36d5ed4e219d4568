//! Containers that run without their requested resources, and pods with guarantees of a kubelet.
//!
//! A container that was started while the daemon did not run may find its requested resources in use. A running container is not refused:
//! it runs on the shared pool and waits. After each release, waiting containers are retried in the order of their ids, and pinned while
//! they run. The same holds for a container if its creation could not be answered in time.
//!
//! The guarantees that `numaward import-kubelet-state` has imported are in the ledger under the UIDs of their pods. The first container of
//! such a pod makes it an admitted pod. A guarantee for a UID without a sandbox is released at the next complete list of the runtime.

use std::collections::{BTreeMap, BTreeSet};

use numaward_api::EnforcementMode;
use numaward_engine::{Ledger, OwnerId, PodId, claims::devices, in_flight::RESERVE_OWNER};
use numaward_guarantee::pod::{ContainerPlacementRequest, MemoryClaim, PlacedContainer, Update};

use super::{binding, ending, placement, uninstall};
use crate::core::{Attempt, Core, claims, settings, shared_pool};

/// The waiting containers.
#[derive(Default)]
pub(crate) struct UnplacedContainers {
    asks: BTreeMap<String, ContainerPlacementRequest>,
    /// The ledger at the last retry.
    tried: Option<Ledger>,
}

impl UnplacedContainers {
    pub(crate) fn add(&mut self, ask: &ContainerPlacementRequest) {
        self.asks.insert(ask.id.clone(), ask.clone());
    }

    pub(crate) fn forget(&mut self, id: &str) {
        self.asks.remove(id);
    }
}

/// Updates a known container that runs to the reported values. It waits if it has no allocation for its request.
pub(crate) fn update_known(
    core: &mut Core,
    ask: &ContainerPlacementRequest,
    known: &PlacedContainer,
) -> PlacedContainer {
    let memory = if ask.memory == MemoryClaim::default() { known.memory } else { ask.memory };
    let without_us =
        known.without_us.clone().or_else(|| uninstall::original_settings_of_known(core, &ask.has));
    let placed = PlacedContainer { memory, without_us, ..known.clone() };
    if placed != *known {
        core.store.state.containers.insert(ask.id.clone(), placed.clone());
    }
    if placed.memory != known.memory {
        // It must be bound again with the new settings.
        core.bindings.unbind(&ask.id);
    }
    // An admitted container may have no exclusive CPUs: a request for parts of CPUs has none.
    let is_admitted = core.store.state.pods.contains_key(&placed.of.owner);
    if ask.has_claim() && !is_admitted && !claims::has_pod(core, &ask.pod.pod.uid) {
        core.pods.waiting.add(ask);
    }
    placed
}

/// Adds an unknown container that runs, with its requested resources if they are free (`true`). Nothing is stored yet.
pub(crate) fn adopt_container(core: &mut Core, ask: &ContainerPlacementRequest) -> (PlacedContainer, bool) {
    match placement::place(core, ask, Attempt::First) {
        Ok(owner) => (placement::note_placed(core, ask, owner), true),
        Err(error) => {
            tracing::warn!(
                pod = ask.pod.pod.name, container = ask.name, %error,
                "the container runs already and gets no guarantee"
            );
            core.pods.waiting.add(ask);
            (placement::note_placed(core, ask, ask.container_owner()), false)
        }
    }
}

/// Adopts an unknown container that starts: its creation was not answered in time, so it cannot be refused any more, but it must not
/// use CPUs of guarantees.
pub(crate) fn adopt_started(core: &mut Core, ask: &ContainerPlacementRequest) {
    let mut change = core.begin();
    let (placed, _) = adopt_container(change.core(), ask);
    if let Err(error) = change.store() {
        tracing::error!(container = ask.id, %error, "the running container could not be adopted");
        return;
    }
    shared_pool::note_guarantees_changed(core);
    if core.mode() == EnforcementMode::On {
        // The runtime writes the settings that it knows again at each change.
        let settings = settings::container_settings(core, &placed);
        core.execution.outbox.send(vec![Update { id: ask.id.clone(), settings }]);
    }
}

/// Returns the pods with waiting containers; none if this host gives no guarantees (enforcement is not on, or the policy does not fit
/// the machine).
pub(crate) fn unplaced(core: &Core) -> Vec<PodId> {
    let asks = core.pods.waiting.asks.values();
    if core.mode() != EnforcementMode::On || asks.len() == 0 || core.policy.check_fit().is_err() {
        return Vec::new();
    }
    let pods: BTreeMap<&str, &PodId> = asks.map(|ask| (ask.pod.pod.uid.as_str(), &ask.pod.pod)).collect();
    pods.into_values().cloned().collect()
}

/// Retries the waiting containers if the ledger has changed since the last retry.
pub(crate) fn retry(core: &mut Core) {
    if core.pods.waiting.asks.is_empty() || core.mode() == EnforcementMode::Off {
        return;
    }
    if core.pods.waiting.tried.as_ref() == Some(&core.store.state.ledger) {
        return;
    }
    let asks: Vec<ContainerPlacementRequest> = core.pods.waiting.asks.values().cloned().collect();
    let mut updates = Vec::new();
    for ask in asks {
        let mut change = core.begin();
        let Ok(owner) = placement::place(change.core(), &ask, Attempt::Again) else { continue };
        let placed = placement::note_placed(change.core(), &ask, owner);
        if let Err(error) = change.store() {
            tracing::error!(container = ask.id, %error, "the ledger cannot be stored: a waiting container gets no guarantee");
            break;
        }
        core.pods.waiting.forget(&ask.id);
        core.bindings.unbind(&ask.id);
        shared_pool::note_guarantees_changed(core);
        binding::bind(core, &ask.id);
        let name = placed.of.full_name();
        tracing::info!(name, cgroup = %placed.cgroup, "pinned late: the container had been started without a guarantee");
        updates.push(Update { id: ask.id, settings: settings::container_settings(core, &placed) });
    }
    core.pods.waiting.tried = Some(core.store.state.ledger.clone());
    if core.mode() == EnforcementMode::On {
        core.execution.outbox.send(updates);
    }
}

/// Returns the UIDs of pods with an imported guarantee of which no container has been seen yet.
pub(crate) fn imported(core: &Core) -> impl Iterator<Item = &str> {
    let owners =
        core.store.state.ledger.owners().map(|(owner, _)| owner).filter(|owner| !devices::is_part(owner));
    owners.map(OwnerId::as_str).filter(|owner| {
        let is_held = core.store.state.guarantees.iter().any(|(name, held)| held.owner(name) == *owner);
        !is_held && !core.store.state.pods.contains_key(*owner) && *owner != RESERVE_OWNER
    })
}

/// Releases imported guarantees of pods that no longer run.
pub(crate) fn drop_imported(core: &mut Core, sandboxes: &BTreeMap<String, String>) {
    let runs: BTreeSet<&str> = sandboxes.values().map(String::as_str).collect();
    let before = core.store.state.clone();
    let gone: Vec<String> = imported(core).filter(|owner| !runs.contains(owner)).map(str::to_owned).collect();
    for owner in gone {
        tracing::info!(
            owner,
            "a pod with an imported guarantee of the kubelet has ended; its resources are free"
        );
        ending::remove_owner(core, &owner);
    }
    ending::store_release(core, &before);
}

//! In-place resizing of containers and pods, within the nodes of their guarantee.

use numaward_enforce::SettingsChange;
use numaward_engine::{ContainerName, OwnerId, Quantity, Resources};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{MemoryClaim, PlacedContainer},
};
use numaward_model::{Settings, pod::POD_SHARE};

use crate::core::{Core, conditions, settings, shared_pool};

/// Changes the requests of a container to these amounts, or refuses. `has`: the values of our knobs that the runtime is asked to set.
/// Returns the new settings; `None` if the container is unknown.
pub(crate) fn resize_container(
    core: &mut Core,
    id: &str,
    to: &Resources,
    memory: Option<MemoryClaim>,
    has: Settings,
) -> Result<Option<Settings>, AdmissionError> {
    let placed = core.store.state.containers.get(id).filter(|_| !core.pods.ended.contains(id));
    let Some(placed) = placed else { return Ok(None) };
    let mut placed = PlacedContainer::clone(placed);
    let to = &match (settings::terms_of(core, &placed.of), memory.and_then(|memory| memory.request)) {
        // The guarantee of a Burstable container is its requested memory; the runtime enforces its limits.
        (Some(terms), request) if terms.burstable => {
            let request = request.filter(|request| request.0 > 0);
            request.map_or_else(Resources::none, |request| {
                Resources::none().with_memory(Quantity::whole(request.0))
            })
        }
        _ => to.clone(),
    };
    let mut change = core.begin();
    // The allocation of a whole pod does not change with one of its containers.
    if !placed.of.shares_pod() {
        let (owner, container) = (OwnerId::from(placed.of.owner.as_str()), placed.of.ledger_name());
        let held = change.store.state.ledger.allocation(&owner, &container);
        let ledger = conditions::ledger_for(&change, Some(&placed.cgroup), held);
        change.state().ledger = change.policy.strategy.resize(&ledger, &owner, &container, to)?;
    }
    placed.memory = memory.unwrap_or(placed.memory);
    if let Some(without_us) = placed.without_us.take() {
        change.state().applied.note_found(&placed.cgroup, &has.values());
        placed.without_us = Some(Settings {
            cpus: has.cpus.or(without_us.cpus),
            mems: has.mems.or(without_us.mems),
            memory_min: has.memory_min.or(without_us.memory_min),
            memory_low: has.memory_low.or(without_us.memory_low),
            memory_high: has.memory_high.or(without_us.memory_high),
            cpu_max: has.cpu_max.or(without_us.cpu_max),
            ..Settings::default()
        });
    }
    if change.store.state.containers.get(id).is_none_or(|known| **known != placed) {
        change.state().containers.insert(id.to_owned(), placed.clone());
    }
    let settings = settings::container_settings(&change, &placed);
    if !change.is_change() {
        return Ok(Some(settings));
    }
    if shared_pool::note_settings(change.state(), &placed.cgroup, &settings) {
        shared_pool::change_held(change, SettingsChange::Hold(placed.cgroup.clone(), settings.clone()))?;
    } else {
        change.store()?;
        if settings::is_guaranteed(core, &placed) {
            core.bindings.rebind(id);
        }
    }
    let cpus = settings.cpus.clone().unwrap_or_default();
    tracing::info!(name = placed.of.full_name(), %cpus, "resized");
    shared_pool::note_guarantees_changed(core);
    Ok(Some(settings))
}

/// Changes the resources that the containers of a pod share to these amounts, or refuses.
pub(crate) fn resize_pod(core: &mut Core, uid: &str, to: &Resources) -> Result<(), AdmissionError> {
    let (owner, slice) = (OwnerId::from(uid), ContainerName::from(POD_SHARE));
    let ledger = core.policy.strategy.resize(&core.store.state.ledger, &owner, &slice, to)?;
    if ledger == core.store.state.ledger {
        return Ok(());
    }
    let containers = shared_pool::change_containers(core, Some(ledger), |placed| {
        placed.of.owner == uid && placed.of.shares_pod()
    })?;
    tracing::info!(pod = uid, containers, "the shared resources of the pod were resized");
    Ok(())
}

//! Binding of placed containers: their settings are enforced once their cgroups exist.

use std::time::Instant;

use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, read};
use numaward_enforce::{EnforceError, SettingsChange};
use numaward_engine::OwnerId;
use numaward_guarantee::{
    error::AdmissionError,
    narrowing::Narrowing,
    pod::{PlacedContainer, UnpinnedReason},
    request::Target,
    state::Guarantee,
};
use numaward_model::pod::GuaranteeSource;

use super::ending;
use crate::core::{Core, HeldChange, bindings::UnboundStep, narrowing, settings, shared_pool};

/// Enforces the settings of a container after its cgroup was created, and informs the probes.
pub(crate) fn bind(core: &mut Core, id: &str) -> Option<UnpinnedReason> {
    let placed = core.store.state.containers.get(id)?.clone();
    let unpinned = match try_bind(core, &placed) {
        Ok(()) => {
            core.bindings.note_bound(id);
            // While that blocked, another container may have got exclusive CPUs from the pool that was written here.
            let cpus = settings::container_settings(core, &placed).cpus;
            let record = core.store.state.applied.get(&placed.cgroup);
            core.pool.note_behind(record.is_some_and(|record| record.settings.cpus != cpus));
            shared_pool::follow(core);
            return None;
        }
        Err(AdmissionError::Enforce(error)) if error.is_gone() => {
            tracing::debug!(container = id, cgroup = %placed.cgroup, "the container has no cgroup yet");
            None
        }
        Err(error) => {
            let name = placed.of.full_name();
            tracing::error!(
                name, cgroup = %placed.cgroup, %error, "the guarantee of a container could not be enforced; it is retried"
            );
            Some(match error {
                AdmissionError::Store(_) => UnpinnedReason::Ledger,
                _ => UnpinnedReason::Enforcement,
            })
        }
    };
    core.bindings.note_failed(id, Instant::now());
    unpinned
}

/// Retries failed binds, and removes containers that were never started.
pub(super) fn maintain(core: &mut Core, now: Instant) {
    for id in core.bindings.due(now) {
        let Some(placed) = core.store.state.containers.get(&id) else { continue };
        let is_empty = is_empty(core, &placed.cgroup);
        if core.bindings.retry(&id, is_empty, now) == UnboundStep::Release {
            tracing::info!(
                container = id,
                "the container was created but never started; its resources are free"
            );
            ending::container_stopped(core, &id);
        }
    }
}

/// Returns true if a cgroup has no processes, or does not exist.
fn is_empty(core: &Core, cgroup: &CgroupPath) -> bool {
    match core.hierarchy.id_of(cgroup) {
        Ok(None) => true,
        Ok(Some(_)) => matches!(read::populated(&core.hierarchy.dir(cgroup)), Ok(false)),
        // The state is unknown.
        Err(_) => false,
    }
}

/// Binds the next container.
pub(crate) fn bind_next(core: &mut Core) {
    let Some(id) = core.bindings.take_next() else { return };
    if !core.bindings.is_bound(&id) && !core.pods.ended.contains(&id) {
        bind(core, &id);
    }
}

fn try_bind(core: &mut Core, placed: &PlacedContainer) -> Result<(), AdmissionError> {
    let gone = || EnforceError::Gone { cgroup: placed.cgroup.clone() };
    let id = core.hierarchy.id_of(&placed.cgroup).ok().flatten().ok_or_else(gone)?;
    let mut change = core.begin();
    if placed.of.slice != GuaranteeSource::PodInit {
        // Init containers that ran before it have ended, and their resources are free.
        let owner = OwnerId::from(placed.of.owner.as_str());
        change.state().ledger =
            change.policy.strategy.note_started(&change.store.state.ledger, &owner, &placed.of.ledger_name());
    }
    let settings = settings::container_settings(&change, placed);
    if !settings::is_guaranteed(&change, placed) {
        shared_pool::set_to_shared_pool(change.core(), [&placed.cgroup]).pop().transpose()?;
        if change.is_change() {
            change.store()?;
            shared_pool::note_guarantees_changed(core);
        }
        return Ok(());
    }
    narrowing::widen_around(change.core(), &placed.cgroup);
    if let Some(without_us) = placed.without_us.as_ref().filter(|_| change.mode() == EnforcementMode::On) {
        let (enforcer, knobs) = (change.enforcer().clone(), settings.values().0.into_keys());
        enforcer.record_created(&mut change.state().applied, &placed.cgroup, without_us, knobs);
    }
    let plan = change.plan(SettingsChange::Hold(placed.cgroup.clone(), settings.clone()))?;
    change.state().set_narrowing(&placed.cgroup, Narrowing::default());
    let mut name = placed.of.full_name();
    if change.store.state.guarantees.get(&name).is_some_and(|held| held.cgroup != placed.cgroup) {
        // The previous container of this name has not been removed yet.
        name = format!("{name}@{}", placed.of.id);
    }
    let admitted = change.store.state.pods.get(&placed.of.owner);
    let guarantee = Guarantee {
        target: Target::Container(placed.of.clone()),
        cgroup: placed.cgroup.clone(),
        id,
        settings,
        declared: None,
        explanation: admitted.map(|admitted| admitted.explanation.clone()).unwrap_or_default(),
    };
    change.state().guarantees.insert(name.clone(), guarantee);
    change.enforce(plan)?;
    core.store.storage.decisions.note(&name, &core.store.state);
    core.effects.held.push(HeldChange::Given(name.clone()));
    shared_pool::note_guarantees_changed(core);
    let allocation = core.allocation_for(&placed.of).cloned().unwrap_or_default();
    tracing::info!(
        name, cgroup = %placed.cgroup, cpus = %allocation.cpus.clone().unwrap_or_default(),
        nodes = %allocation.memory_nodes(), "guarantee given"
    );
    Ok(())
}

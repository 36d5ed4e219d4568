//! Release of guarantees, of one or of several as one change.
//!
//! A release is stored twice: its beginning, before the first knob is restored; and its end, with the outcome of the plan. A start in
//! between continues the release.

use std::{collections::BTreeSet, sync::Arc};

use numaward_cgroup::CgroupPath;
use numaward_enforce::SettingsChange;
use numaward_engine::OwnerId;
use numaward_guarantee::{error::AdmissionError, request::Target, state::Guarantee};
use numaward_model::Settings;
use numaward_store::fault;

use super::{cpu_isolation, shared_pool};
use crate::{
    core::{Core, HeldChange},
    spans,
};

/// Releases guarantees on request. The names must differ.
pub(crate) fn release_batch(core: &mut Core, names: &[&str]) -> Vec<Result<(), AdmissionError>> {
    let mut results: Vec<_> = names.iter().map(|name| check_release(core, name)).collect();
    let may: Vec<&str> =
        names.iter().zip(&results).filter(|(_, may)| may.is_ok()).map(|(name, _)| *name).collect();
    let done = release_all(core, &may);
    for (result, done) in results.iter_mut().filter(|may| may.is_ok()).zip(done) {
        *result = done;
    }
    results
}

/// Releases a guarantee.
pub(crate) fn release(core: &mut Core, name: &str) -> Result<(), AdmissionError> {
    let _span = spans::release(name);
    try_release(core, &[name]).and_then(|results| results.into_iter().collect())
}

/// Releases guarantees. The names must differ.
fn release_all(core: &mut Core, names: &[&str]) -> Vec<Result<(), AdmissionError>> {
    if let [name] = names {
        return vec![release(core, name)];
    }
    let span = spans::batch("release", names.len());
    let results = try_release(core, names);
    drop(span);
    results.unwrap_or_else(|error| {
        tracing::debug!(%error, "the guarantees cannot be released as one batch and are released one by one");
        names.iter().map(|name| release(core, name)).collect()
    })
}

/// Releases guarantees as one change. If this returns an error, none is released.
fn try_release(core: &mut Core, names: &[&str]) -> Result<Vec<Result<(), AdmissionError>>, AdmissionError> {
    let mut results: Vec<_> = names.iter().map(|name| guarantee_named(core, name).map(drop)).collect();
    let held = names.iter().enumerate().filter_map(|(place, &name)| {
        guarantee_named(core, name).ok().map(|guarantee| (place, name, guarantee))
    });
    let held: Vec<(usize, &str, Arc<Guarantee>)> = held.collect();
    if held.is_empty() {
        return Ok(results);
    }
    let changes = held.iter().map(|(_, name, guarantee)| {
        let settings = match guarantee.target {
            Target::Exec => None,
            _ => settings_after_end(core, name, &guarantee.cgroup),
        };
        (guarantee.cgroup.clone(), settings)
    });
    let changes = changes.collect();
    let plan = core.plan(SettingsChange::Each(changes))?;
    // The CPUs are not free until the knobs are restored. After a crash in between, the next start continues the release.
    let begun = core.store.state.releasing.clone();
    core.store.state.releasing.extend(held.iter().map(|(_, name, _)| (*name).to_owned()));
    let done = match core.write(plan) {
        Ok(done) => done,
        Err(refused) => {
            core.store.state.releasing = begun;
            return Err(refused);
        }
    };
    let paths: Vec<&CgroupPath> = held.iter().map(|(_, _, guarantee)| &guarantee.cgroup).collect();
    let failed = match done.result {
        Ok(()) => Vec::new(),
        Err(failure) => failure.split(&paths),
    };
    let mut stays = BTreeSet::new();
    for ((place, name, guarantee), failed) in held.iter().zip(failed) {
        let Some(failure) = failed else { continue };
        // Processes may still use its CPUs and memory.
        if may_exist(core, guarantee) {
            core.effects.view = true;
            results[*place] = Err(AdmissionError::Releasing(failure));
            stays.insert(*place);
        } else {
            tracing::warn!(name, error = %failure, "not all settings could be restored, because the cgroup no longer exists");
        }
    }
    let over: Vec<_> = held.iter().filter(|(place, ..)| !stays.contains(place)).collect();
    if over.is_empty() {
        if !done.is_stored {
            core.store_outcome();
        }
        return Ok(results);
    }
    fault::point("guarantee.released");
    let mut change = core.begin();
    for (_, name, _) in &over {
        change.state().guarantees.remove(*name);
        change.state().releasing.remove(*name);
        change.state().ledger =
            change.policy.strategy.release(&change.store.state.ledger, &OwnerId::from(*name));
    }
    let Core { policy, store, ports, .. } = change.core();
    policy.replace_missing(&mut store.state, &*ports.host);
    change.store()?;
    for (_, name, guarantee) in over {
        core.execution.migrations.forget(&guarantee.cgroup);
        tracing::info!(name, cgroup = %guarantee.cgroup, "released");
        let directory = core.hierarchy.dir(&guarantee.cgroup);
        core.effects.held.push(HeldChange::Released {
            name: (*name).to_owned(),
            cgroup: guarantee.cgroup.clone(),
            // The directory is removed only after the release, so that a client which sees it disappear finds the guarantee released.
            remove: (guarantee.target == Target::Exec).then_some(directory),
        });
    }
    shared_pool::note_guarantees_changed(core);
    Ok(results)
}

fn guarantee_named(core: &Core, name: &str) -> Result<Arc<Guarantee>, AdmissionError> {
    let held = core.store.state.guarantees.get(name).cloned();
    held.ok_or_else(|| AdmissionError::Unknown(name.to_owned()))
}

/// Returns the settings of this cgroup after the release of its guarantee; `None` if it has none.
fn settings_after_end(core: &mut Core, name: &str, cgroup: &CgroupPath) -> Option<Settings> {
    // Other guarantees of the same batch keep their CPUs until their knobs are restored.
    let after = core.policy.strategy.release(&core.store.state.ledger, &OwnerId::from(name));
    cpu_isolation::settings_after_release(core, cgroup, &after)
}

/// Refuses to release a declared guarantee, which would be admitted again at once, and a guarantee of a container, which its runtime
/// ends.
pub(crate) fn check_release(core: &Core, name: &str) -> Result<(), AdmissionError> {
    let Some(held) = core.store.state.guarantees.get(name) else { return Ok(()) };
    if let Target::Container(_) = held.target {
        return Err(AdmissionError::Conflict(numaward_guarantee::request::runtime_owned_error()));
    }
    if let Some(declared) = &held.declared {
        let problem = format!("it is declared in the configuration, for {:?}", declared.pattern());
        let allowed = "a guarantee that was requested; remove this one from the configuration and run `numaward reload`";
        return Err(AdmissionError::conflict("name", problem, allowed));
    }
    Ok(())
}

/// Returns true if the cgroup of a guarantee exists, or if that is unknown.
pub(crate) fn may_exist(core: &Core, guarantee: &Guarantee) -> bool {
    core.hierarchy.id_of(&guarantee.cgroup).map_or(true, |id| id == Some(guarantee.id))
}

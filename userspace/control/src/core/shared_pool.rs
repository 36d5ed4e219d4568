//! The shared pool: workloads without exclusive CPUs follow its changes.
//!
//! # Problem
//! Containers and guarantees without exclusive CPUs leave CPUs before these become exclusive, also while another operation blocks.
//!
//! # Algorithm
//! `cpuset.cpus` of all sharing workloads is written at once. Their applied settings follow in a plan; while another operation blocks, the
//! pool stays *behind* and they follow after it.

use std::{collections::BTreeMap, slice, sync::Arc};

use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, knob::Knob};
use numaward_enforce::{EnforceError, EnforcementReport, SettingsChange};
use numaward_engine::{Ledger, OwnerId};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{PlacedContainer, Update},
    request::Target,
    state::{Guarantee, State},
};
use numaward_model::Settings;
use numaward_topology::CpuSet;

use super::{Core, bindings::Bindings, execution::Transaction, settings};

/// Number of containers that are checked in one turn.
const CHECKS_PER_TURN: usize = 16;

/// The shared pool as its workloads have it. It is not stored.
#[derive(Debug, Default)]
pub(crate) struct SharedPool {
    /// The CPUs that the workloads were last set to.
    cpus: CpuSet,
    /// True if the applied settings of some workloads are of an earlier pool.
    is_behind: bool,
    /// The last container that was checked.
    last_checked: Option<String>,
}

impl SharedPool {
    /// Takes over the present pool; returns true if workloads have to follow it. The applied settings cannot change while another operation
    /// blocks.
    fn update(&mut self, present: CpuSet, is_blocked: bool) -> bool {
        if self.cpus == present && (!self.is_behind || is_blocked) {
            return false;
        }
        (self.cpus, self.is_behind) = (present, false);
        true
    }

    /// Records that the applied settings of a workload may be of an earlier pool.
    pub(super) fn note_behind(&mut self, is_behind: bool) {
        self.is_behind |= is_behind;
    }

    /// Returns the next of these containers to check, in the order of their ids. After the last one, nothing is checked in one turn.
    fn next_to_check<'a>(
        &mut self,
        sharing: impl Iterator<Item = &'a Arc<PlacedContainer>>,
    ) -> Vec<Arc<PlacedContainer>> {
        let after = self.last_checked.take();
        let next = sharing.filter(|placed| after.as_ref().is_none_or(|after| placed.of.id > *after));
        next.take(CHECKS_PER_TURN).cloned().collect()
    }
}

/// Records that guarantees changed. Containers on the shared pool follow at once, the other effects follow later.
pub(crate) fn note_guarantees_changed(core: &mut Core) {
    core.effects.guarantees = true;
    core.effects.isolate = true;
    core.effects.declared = true;
    follow(core);
}

/// Records that workloads run again that may have missed changes of the shared pool.
pub(crate) fn note_restarted(core: &mut Core) {
    core.pool.note_behind(true);
    note_guarantees_changed(core);
}

/// Sets the CPUs of these containers to the shared pool; returns for each whether its set was different.
pub(crate) fn set_to_shared_pool<'a>(
    core: &mut Core,
    cgroups: impl IntoIterator<Item = &'a CgroupPath>,
) -> Vec<Result<bool, EnforceError>> {
    let cgroups = cgroups.into_iter();
    let Some(pool) = settings::sharing_settings(core).cpus else {
        return cgroups.map(|_| Ok(false)).collect();
    };
    let wanted: Vec<_> = cgroups.map(|cgroup| (cgroup.clone(), pool.clone())).collect();
    set_cpus(core, &wanted)
}

/// Sets the CPUs of cgroups at once; returns for each whether its set was different.
fn set_cpus(core: &mut Core, wanted: &[(CgroupPath, CpuSet)]) -> Vec<Result<bool, EnforceError>> {
    if core.mode() != EnforcementMode::On {
        return wanted.iter().map(|_| Ok(false)).collect();
    }
    let mut written = core.execution.enforcer.set_cpus(wanted);
    for (one, written) in wanted.iter().zip(&mut written) {
        if written.as_ref().is_err_and(EnforceError::is_missing) {
            let enabled = core.enable_above(&one.0, Knob::CpusetCpus);
            *written = enabled.and_then(|()| {
                let again = core.execution.enforcer.set_cpus(slice::from_ref(one)).pop();
                again.unwrap_or_else(|| Ok(EnforcementReport::default()))
            });
        }
    }
    let note = |written: EnforcementReport| {
        core.metrics.enforced(&written);
        !written.written.is_empty()
    };
    written.into_iter().map(|written| written.map(note)).collect()
}

/// Returns the bound containers without exclusive CPUs.
fn sharing_containers<'a>(
    state: &'a State,
    bindings: &'a Bindings,
) -> impl Iterator<Item = &'a Arc<PlacedContainer>> {
    state.containers.values().filter(|placed| {
        let held =
            state.ledger.allocation(&OwnerId::from(placed.of.owner.as_str()), &placed.of.ledger_name());
        held.is_none_or(|held| held.cpus.is_none()) && bindings.is_bound(&placed.of.id)
    })
}

/// Sets the containers and guarantees without exclusive CPUs to the present shared pool: admissions take CPUs from it, and releases
/// return them.
pub(crate) fn follow(core: &mut Core) {
    let pool = core.shared_pool();
    if !core.pool.update(pool, core.execution.busy.is_some()) {
        return;
    }
    let (mut updates, mut changes) = (Vec::new(), Vec::new());
    let sharing: Vec<_> = sharing_containers(&core.store.state, &core.bindings).cloned().collect();
    let kept = set_to_shared_pool(core, sharing.iter().map(|placed| &placed.cgroup));
    for (placed, kept) in sharing.into_iter().zip(kept) {
        match kept {
            Ok(_) => {}
            Err(error) if error.is_gone() => continue,
            Err(error) => {
                tracing::error!(cgroup = %placed.cgroup, %error, "the CPUs of a container could not be set to the shared pool");
            }
        }
        let mut settings = Settings { cpus: Some(core.pool.cpus.clone()), ..Settings::default() };
        // The applied settings of a container with guaranteed memory include its CPUs.
        if core.store.state.applied.get(&placed.cgroup).is_some_and(|record| record.settings.cpus.is_some()) {
            settings = settings::container_settings(core, &placed);
            changes.push((placed.cgroup.clone(), Some(settings.clone())));
        }
        updates.push(Update { id: placed.of.id.clone(), settings });
    }
    let off_pool = guarantees_off_pool(core);
    set_cpus_of(core, &off_pool);
    for (path, settings) in off_pool {
        note_settings(&mut core.store.state, &path, &settings);
        changes.push((path, Some(settings)));
    }
    // A cgroup that no longer exists must not make the plan for the remaining ones fail.
    changes.retain(|(path, _)| !matches!(core.hierarchy.id_of(path), Ok(None)));
    if core.execution.busy.is_some() {
        core.pool.note_behind(!changes.is_empty());
    } else if !changes.is_empty() {
        let plan = core.plan(SettingsChange::Each(changes)).map_err(AdmissionError::from);
        match plan.and_then(|plan| core.execute_plan(plan)) {
            Ok(()) => {}
            // The cgroup was just removed.
            Err(AdmissionError::Enforce(error)) if error.is_gone() => core.pool.note_behind(true),
            Err(error) => tracing::error!(%error, "not all containers could be set to the shared pool"),
        }
    }
    updates.retain(|update| update.settings.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty()));
    if core.mode() == EnforcementMode::On {
        core.execution.outbox.send(updates);
    }
}

/// Returns the guarantees without exclusive CPUs (except those of containers) that are not on the present shared pool, and their
/// intended settings.
fn guarantees_off_pool(core: &Core) -> Vec<(CgroupPath, Settings)> {
    let wanted = |(name, held): (&String, &Arc<Guarantee>)| {
        let is_other = matches!(held.target, Target::Container(_)) || held.has_no_guarantee();
        // The original CPUs of a cgroup that was created again at this path are not recorded.
        let is_replaced = || core.hierarchy.id_of(&held.cgroup).is_ok_and(|id| id != Some(held.id));
        if is_other || core.store.state.releasing.contains(name) || is_replaced() {
            return None;
        }
        let account = core.store.state.ledger.owner(&OwnerId::from(name.as_str()))?;
        let allocation = account.containers.values().next().filter(|held| held.cpus.is_none())?;
        let cpus = settings::shared_cpus(core, &account.terms, &allocation.memory_nodes())?;
        let held_settings = &core.store.state.applied.get(&held.cgroup)?.settings;
        // During a blocking operation, only the guarantee has the latest settings.
        [&held_settings.cpus, &held.settings.cpus]
            .iter()
            .any(|held| held.as_ref() != Some(&cpus))
            .then(|| (held.cgroup.clone(), Settings { cpus: Some(cpus), ..held_settings.clone() }))
    };
    core.store.state.guarantees.iter().filter_map(wanted).collect()
}

/// Sets cgroups to the CPUs of these settings at once: another workload may wait for the CPUs that they leave.
fn set_cpus_of(core: &mut Core, given: &[(CgroupPath, Settings)]) {
    let cpus = |(path, settings): &(CgroupPath, Settings)| Some((path.clone(), settings.cpus.clone()?));
    let wanted: Vec<_> = given.iter().filter_map(cpus).collect();
    for ((cgroup, _), left) in wanted.iter().zip(set_cpus(core, &wanted)) {
        if let Err(error) = left
            && !error.is_gone()
        {
            tracing::error!(%cgroup, %error, "the CPUs of a workload could not be set to the shared pool");
        }
    }
}

/// Records the shared pool in the applied settings, if a blocking operation has prevented that.
pub(crate) fn catch_up(core: &mut Core) {
    if core.pool.is_behind {
        follow(core);
    }
}

/// Replaces the settings of the guarantee of this cgroup; returns false if it has none.
pub(crate) fn note_settings(state: &mut State, cgroup: &CgroupPath, settings: &Settings) -> bool {
    let held = state.guarantees.iter().find(|(_, held)| held.cgroup == *cgroup);
    let Some(name) = held.map(|(name, _)| name.clone()) else { return false };
    if let Some(held) = state.guarantees.get_mut(&name) {
        held.settings = settings.clone();
    }
    true
}

/// Checks the CPUs of a few containers without exclusive ones.
pub(super) fn check_next(core: &mut Core) {
    let Core { pool, store, bindings, .. } = core;
    let mut next = pool.next_to_check(sharing_containers(&store.state, bindings));
    next.retain(|placed| !core.store.state.guarantees.values().any(|held| held.cgroup == placed.cgroup));
    core.pool.last_checked = next.last().map(|placed| placed.of.id.clone());
    let kept = set_to_shared_pool(core, next.iter().map(|placed| &placed.cgroup));
    for (placed, kept) in next.into_iter().zip(kept) {
        match kept {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(cgroup = %placed.cgroup, "cpuset.cpus differed from the shared pool and was repaired");
                core.metrics.drifted(Knob::CpusetCpus);
                core.metrics.repaired(Knob::CpusetCpus);
            }
            Err(error) if error.is_gone() => {}
            Err(error) => {
                tracing::debug!(cgroup = %placed.cgroup, %error, "the CPUs of a container cannot be set to the shared pool");
            }
        }
    }
}

/// Changes the settings of containers after a change of a guarantee or of its division. `ledger` replaces the present one. After a failure,
/// the change is undone completely. Returns the number of containers; 0 if nothing changes.
pub(super) fn change_containers(
    core: &mut Core,
    ledger: Option<Ledger>,
    is_concerned: impl Fn(&PlacedContainer) -> bool,
) -> Result<usize, AdmissionError> {
    let mut change = core.begin();
    if let Some(ledger) = ledger {
        change.state().ledger = ledger;
    }
    let containers = change.store.state.containers.values().filter(|placed| is_concerned(placed));
    let containers: BTreeMap<_, _> =
        containers.map(|placed| (placed.cgroup.clone(), placed.clone())).collect();
    let (mut changes, mut updates, mut unbound) = (Vec::new(), Vec::new(), Vec::new());
    for (path, placed) in containers {
        let settings = settings::container_settings(&change, &placed);
        updates.push(Update { id: placed.of.id.clone(), settings: settings.clone() });
        if note_settings(change.state(), &path, &settings) {
            // A cgroup that no longer exists must not make the plan for the remaining ones fail.
            if !matches!(change.hierarchy.id_of(&path), Ok(None)) {
                changes.push((path, Some(settings)));
            }
        } else if settings::is_guaranteed(&change, &placed) {
            unbound.push(placed.of.id.clone());
        }
    }
    if !change.is_change() {
        return Ok(0);
    }
    change_held(change, SettingsChange::Each(changes))?;
    for id in &unbound {
        core.bindings.rebind(id);
    }
    note_guarantees_changed(core);
    let count = updates.len();
    if core.mode() == EnforcementMode::On {
        core.execution.outbox.send(updates);
    }
    Ok(count)
}

/// Changes the applied settings of guarantees. After a failure, the change is undone completely.
pub(super) fn change_held(mut change: Transaction<'_>, to: SettingsChange) -> Result<(), AdmissionError> {
    // Containers on the shared pool leave the CPUs before these become exclusive.
    follow(change.core());
    let plan = change.plan(to).map_err(AdmissionError::from);
    let done = plan.and_then(|plan| change.enforce_within(plan));
    if done.is_err() {
        // Knobs that were already written count as drift now, and are repaired.
        change.roll_back();
        follow(change.core());
        note_guarantees_changed(change.core());
    }
    change.keep();
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::execution::tests::container;

    #[test]
    fn blocked_pool_is_followed_later() {
        let (mut pool, cpus) = (SharedPool::default(), |text: &str| text.parse::<CpuSet>().unwrap());
        assert!(pool.update(cpus("0-7"), false) && !pool.update(cpus("0-7"), false));
        assert!(pool.update(cpus("0-3"), true), "the CPUs themselves follow at once");
        pool.note_behind(true);
        pool.note_behind(false);
        assert!(!pool.update(cpus("0-3"), true) && pool.is_behind);
        assert!(pool.update(cpus("0-3"), false) && !pool.is_behind);
    }

    #[test]
    fn containers_are_checked_in_turns() {
        let placed = |number: usize| {
            let ask = container(&format!("{number:02}"), 100);
            Arc::new(PlacedContainer {
                of: numaward_model::pod::PodContainer {
                    pod: ask.pod.pod.clone(),
                    container: ask.name.clone(),
                    id: ask.id.clone(),
                    sandbox: ask.pod.sandbox.clone(),
                    slice: ask.slice,
                    owner: ask.container_owner(),
                },
                cgroup: ask.cgroup.clone(),
                memory: ask.memory,
                keeps_pod_quota: false,
                without_us: None,
            })
        };
        let (mut pool, all) = (SharedPool::default(), (0..20).map(placed).collect::<Vec<_>>());
        let mut turn = || {
            let next = pool.next_to_check(all.iter());
            pool.last_checked = next.last().map(|placed| placed.of.id.clone());
            next.len()
        };
        assert_eq!([turn(), turn(), turn(), turn()], [CHECKS_PER_TURN, 4, 0, CHECKS_PER_TURN]);
    }
}

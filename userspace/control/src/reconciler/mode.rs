//! Enforcement modes: `enforcement.mode`.
//!
//! - `on` writes the decisions to the kernel.
//! - `dry-run` decides, keeps the ledger and logs the intended writes, but writes nothing; only the cgroup of a
//!   command is created, without settings.
//! - `off` gives no guarantees.
//!
//! The latter two restore the settings of earlier runs. With `off`, the controllers that an earlier run enabled are
//! disabled once no setting is held any more.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use numaward_api::EnforcementMode;
use numaward_cgroup::CgroupPath;
use numaward_enforce::{SettingsChange, controllers, weights::Weights};
use numaward_guarantee::{
    error::AdmissionError,
    narrowing::Narrowing,
    state::{Guarantee, State},
};
use numaward_model::Settings;
use numaward_topology::CpuSet;

use super::Core;
use crate::core::{admission, cpu_isolation, huge_pages, pods::uninstall, release};

/// Progress of the restores of an earlier run's settings. It is published for clients.
#[derive(Debug, Default)]
pub(super) struct ModeStatus {
    has_pending_host_restores: Arc<AtomicBool>,
}

impl ModeStatus {
    /// Returns the published state.
    pub(super) fn has_pending_host_restores(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_pending_host_restores)
    }

    /// Publishes whether host-wide settings have a pending restore. `is_busy`: affinities of threads are being reset.
    pub(super) fn publish(&self, core: &Core, is_busy: bool) {
        let (state, online) = (&core.store.state, core.policy.machine.cpu_ids());
        let has_pending = core.mode() == EnforcementMode::Off
            && has_pending_host_restores(state, &online, &core.config.host_root);
        self.has_pending_host_restores.store(has_pending || is_busy, Ordering::Relaxed);
    }
}

/// Returns true if settings of the host are still to be restored. Those that wait for an absent node or CPU do not count.
fn has_pending_host_restores(state: &State, online: &CpuSet, host_root: &Path) -> bool {
    let State { interrupts, power, weights, .. } = state;
    let has_pending_power = power.values().any(|held| !(&held.cpus & online).is_empty());
    let has_pending_weight = || {
        let left = Weights::new(host_root).unrestored(weights);
        left.iter().any(|(_, reason)| reason.is_none())
    };
    !interrupts.is_empty() || has_pending_power || has_pending_weight()
}

/// Adapts the state and the settings of an earlier run to the mode.
pub(crate) fn follow(core: &mut Core) {
    // Settings without a guarantee and without a narrowing are from CPU isolation, also in a rebuilt ledger.
    let guaranteed = core.guaranteed_cgroups();
    let is_other =
        |path: &&CgroupPath| !guaranteed.contains(*path) && core.store.state.narrowing(path).is_empty();
    let isolated = core.store.state.applied.held().map(|(path, _)| path).filter(is_other);
    for path in isolated.cloned().collect::<Vec<_>>() {
        core.store.state.set_narrowing(&path, Narrowing { is_isolated: true, ..Narrowing::default() });
    }
    match core.mode() {
        EnforcementMode::On => log_refused(&enforce_again(core)),
        EnforcementMode::DryRun => restore_all(core),
        EnforcementMode::Off => {
            restore_all(core);
            let names: Vec<String> = core.store.state.guarantees.keys().cloned().collect();
            for name in names {
                tracing::info!(name, "the guarantee is released, because enforcement is off");
                if let Err(error) = release::release(core, &name) {
                    tracing::error!(name, %error, "the guarantee cannot be released; the release is retried");
                    core.store.state.releasing.insert(name);
                }
            }
        }
    }
    disable_controllers(core);
}

/// With enforcement off, disables the enabled controllers once no setting is held any more. A dry run keeps its
/// guarantees, which may be enforced again later.
pub(crate) fn disable_controllers(core: &mut Core) {
    let state = &core.store.state;
    if core.mode() != EnforcementMode::Off || state.enabled.is_empty() {
        return;
    }
    // The runtime is informed after the settings are restored, and writes to the cgroups once more.
    let waits_for_runtime = state.containers.values().any(|placed| placed.without_us.is_some());
    if !state.applied.is_empty() || waits_for_runtime {
        return;
    }
    let mut enabled = state.enabled.clone();
    for left in controllers::disable(core.hierarchy.root(), &mut enabled) {
        let controllers::StillEnabled { cgroup, controller, reason } = left;
        tracing::debug!(%cgroup, controller, reason, "a controller stays enabled");
    }
    if enabled == core.store.state.enabled {
        return;
    }
    let rest = if enabled.is_empty() { "" } else { ", except those in use by cgroups" };
    tracing::info!("controllers that an earlier run enabled are disabled{rest}");
    for state in core.store.all_mut() {
        state.enabled = enabled.clone();
    }
    core.store_outcome();
}

/// Enforces guarantees that are not enforced, for example those of a dry run, or of a unit with a new cgroup that systemd does not manage.
/// Returns the reasons of those that cannot be; they are tried again.
pub(crate) fn enforce_again(core: &mut Core) -> BTreeMap<CgroupPath, String> {
    if core.mode() != EnforcementMode::On {
        return BTreeMap::new();
    }
    let kept =
        core.store.state.guarantees.iter().filter(|(name, _)| !core.store.state.releasing.contains(*name));
    // A stopped unit has no cgroup, and another cgroup may be at its path by now.
    let is_present =
        |held: &Guarantee| matches!(core.hierarchy.id_of(&held.cgroup), Ok(Some(id)) if id == held.id);
    let missing = kept.map(|(_, held)| held).filter(|held| !is_written(core, held) && is_present(held));
    let missing: Vec<_> = missing.map(|held| (held.cgroup.clone(), held.settings.clone())).collect();
    let mut refused = BTreeMap::new();
    for (path, settings) in missing {
        match enforce(core, &path, settings) {
            Ok(()) => tracing::info!(cgroup = %path, "the guarantee is enforced again"),
            Err(error) => drop(refused.insert(path, error.to_string())),
        }
    }
    refused
}

/// Returns true if the settings of a guarantee are written to its cgroup.
pub(super) fn is_written(core: &Core, guarantee: &Guarantee) -> bool {
    let State { applied, .. } = &core.store.state;
    let is_held = applied.get(&guarantee.cgroup).is_some_and(|record| !record.settings.is_empty());
    guarantee.settings.is_empty() || (is_held && !core.store.state.isolated().contains(&guarantee.cgroup))
}

/// Logs that guarantees cannot be enforced.
pub(crate) fn log_refused<'a>(refused: impl IntoIterator<Item = (&'a CgroupPath, &'a String)>) {
    for (cgroup, error) in refused {
        tracing::error!(%cgroup, %error, "the guarantee cannot be enforced; it is tried again");
    }
}

fn enforce(core: &mut Core, path: &CgroupPath, settings: Settings) -> Result<(), AdmissionError> {
    let untouched = huge_pages::untouched_huge_pages(core, path);
    huge_pages::check_nodes(core, path, settings.mems.as_ref(), untouched)?;
    admission::check_room(core, path, settings.mems.as_ref())?;
    cpu_isolation::confine_others(core, &[path]);
    let mut change = core.begin();
    change.state().set_narrowing(path, Narrowing::default());
    let plan = change.plan(SettingsChange::Hold(path.clone(), settings))?;
    change.execute_plan(plan)
}

/// Restores all settings that were written.
fn restore_all(core: &mut Core) {
    uninstall::record_original_settings(core);
    // This includes records that were just added, and restores that a crash interrupted.
    let held = core.store.state.applied.iter().count();
    if held == 0 {
        return;
    }
    tracing::info!(cgroups = held, mode = ?core.mode(), "settings of an earlier run are restored");
    core.store.state.clear_narrowings();
    // Knobs that this round does not restore are pending restores, and are retried.
    let written: Vec<_> = core.store.state.applied.iter().map(|(path, _)| path.clone()).collect();
    for path in written {
        core.store.state.applied.replace_settings(&path, Settings::default());
    }
    // If the first round ends partitions, other cgroups get their CPUs back in the second.
    for _ in 0..2 {
        let held: Vec<_> = core.store.state.applied.iter().map(|(path, _)| (path.clone(), None)).collect();
        if held.is_empty() {
            return;
        }
        let plan = core.plan(SettingsChange::Each(held));
        if let Err(error) = plan.map_err(AdmissionError::from).and_then(|plan| core.execute_plan(plan)) {
            tracing::error!(%error, "not all settings could be restored");
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_enforce::{
        power::{PowerKnob, PowerRecord},
        records::WrittenValue,
    };

    use super::*;

    #[test]
    fn offline_cpus_have_nothing_pending() {
        let mut state = State::default();
        let root = Path::new("/nonexistent");
        let is_pending =
            |state: &State, online: &str| has_pending_host_restores(state, &online.parse().unwrap(), root);
        assert!(!is_pending(&state, "0-3"));
        let record = PowerRecord {
            knob: PowerKnob::Governor,
            cpus: "2".parse().unwrap(),
            value: WrittenValue {
                found: "schedutil".to_owned(),
                written: "performance".to_owned(),
                before: None,
                is_given_up: false,
            },
        };
        state.power.insert("sys/governor".to_owned(), record);
        assert!(is_pending(&state, "0-3") && !is_pending(&state, "0-1"));
    }
}

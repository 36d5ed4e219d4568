//! Enforcement modes: `enforcement.mode`.
//!
//! - `on` writes the decisions to the kernel.
//! - `dry-run` decides, keeps the ledger and logs the intended writes, but writes nothing; only the cgroup of a
//!   command is created, without settings.
//! - `off` gives no guarantees.
//!
//! The latter two restore the settings of earlier runs. With `off`, the controllers that an earlier run enabled are
//! disabled once no setting is held any more.

use numaward_api::EnforcementMode;
use numaward_cgroup::CgroupPath;
use numaward_enforce::{SettingsChange, controllers, weights::Weights};
use numaward_guarantee::{error::AdmissionError, narrowing::Narrowing, state::State};

use super::Core;

impl Core {
    pub(crate) fn mode(&self) -> EnforcementMode {
        self.config.enforcement.mode
    }

    /// Makes what an earlier run left fit the mode.
    pub(crate) fn follow_mode(&mut self) {
        // Whatever holds settings and no allocation is isolated, also where the ledger had to be rebuilt.
        let promised = self.guaranteed_cgroups();
        let is_other =
            |path: &&CgroupPath| !promised.contains(*path) && self.store.state.narrowing(path).is_empty();
        let isolated = self.store.state.applied.held().map(|(path, _)| path).filter(is_other);
        for path in isolated.cloned().collect::<Vec<_>>() {
            self.store.state.set_narrowing(&path, Narrowing { is_isolated: true, ..Narrowing::default() });
        }
        match self.mode() {
            EnforcementMode::On => self.enforce_again(),
            EnforcementMode::DryRun => self.restore_all(),
            EnforcementMode::Off => {
                self.restore_all();
                let names: Vec<String> = self.store.state.guarantees.keys().cloned().collect();
                for name in names {
                    tracing::info!(name, "to be released: enforcement is off");
                    if let Err(error) = self.release(&name) {
                        tracing::error!(name, %error, "cannot be released");
                    }
                }
            }
        }
        self.disable_controllers();
    }

    /// Returns true if enforcement is off and settings of the host are still to be restored. Those that wait for an
    /// absent node or CPU do not count.
    pub(crate) fn has_pending_host_restores(&self) -> bool {
        let State { interrupts, power, weights, .. } = &self.store.state;
        let online = self.policy.machine.cpu_ids();
        let owes_power = power.values().any(|held| !(&held.cpus & &online).is_empty());
        let owes_weight = || {
            let left = Weights::new(&self.config.host_root).unrestored(weights);
            left.iter().any(|(_, reason)| reason.is_none())
        };
        self.mode() == EnforcementMode::Off && (!interrupts.is_empty() || owes_power || owes_weight())
    }

    /// With enforcement off, disables the enabled controllers once no setting is held any more. A dry run keeps its
    /// guarantees, which may be enforced again later.
    pub(super) fn disable_controllers(&mut self) {
        let state = &self.store.state;
        if self.mode() != EnforcementMode::Off || state.enabled.is_empty() {
            return;
        }
        // The runtime is informed later than cgroups get back what they had, and writes to them then.
        let waits_for_runtime = state.containers.values().any(|placed| placed.without_us.is_some());
        if !state.applied.is_empty() || waits_for_runtime {
            return;
        }
        let mut enabled = state.enabled.clone();
        for left in controllers::disable(self.hierarchy.root(), &mut enabled) {
            let controllers::StillEnabled { cgroup, controller, reason } = left;
            tracing::debug!(%cgroup, controller, reason, "a controller stays enabled");
        }
        if enabled == self.store.state.enabled {
            return;
        }
        let rest = if enabled.is_empty() { "" } else { ", but for those that cgroups use" };
        tracing::info!("controllers that an earlier run enabled are disabled{rest}");
        for state in self.store.all_mut() {
            state.enabled = enabled.clone();
        }
        self.store_outcome();
    }

    /// Enforces guarantees that are not enforced, for example those of a dry run.
    fn enforce_again(&mut self) {
        let is_held =
            |path| self.store.state.applied.get(path).is_some_and(|record| !record.settings.is_empty());
        let kept = self
            .store
            .state
            .guarantees
            .iter()
            .filter(|(name, _)| !self.store.state.releasing.contains(*name));
        let missing = kept.map(|(_, held)| held).filter(|held| {
            !held.settings.is_empty()
                && (!is_held(&held.cgroup) || self.store.state.isolated().contains(&held.cgroup))
        });
        let missing: Vec<_> = missing.map(|held| (held.cgroup.clone(), held.settings.clone())).collect();
        for (path, settings) in missing {
            self.confine_others(&[&path]);
            let mut change = self.begin();
            change.store.state.set_narrowing(&path, Narrowing::default());
            let plan = change.plan(SettingsChange::Hold(path.clone(), settings));
            let done = plan.map_err(AdmissionError::from).and_then(|plan| change.carry_out(plan));
            match done {
                Ok(()) => tracing::info!(cgroup = %path, "what was promised is enforced again"),
                Err(error) => tracing::error!(cgroup = %path, %error, "what was promised cannot be enforced"),
            }
        }
    }

    /// Restores all settings that were written.
    fn restore_all(&mut self) {
        self.note_unrecorded();
        // Also what was noted just now, and what a crash left half given back.
        let held = self.store.state.applied.iter().count();
        if held == 0 {
            return;
        }
        tracing::info!(cgroups = held, mode = ?self.mode(), "what an earlier run wrote is given back");
        self.store.state.clear_narrowings();
        // Where partitions end by the first round, others get back their CPUs by the second.
        for _ in 0..2 {
            let held: Vec<_> =
                self.store.state.applied.iter().map(|(path, _)| (path.clone(), None)).collect();
            if held.is_empty() {
                return;
            }
            let plan = self.plan(SettingsChange::Each(held));
            if let Err(error) = plan.map_err(AdmissionError::from).and_then(|plan| self.carry_out(plan)) {
                tracing::error!(%error, "not everything could be given back");
            }
        }
    }
}

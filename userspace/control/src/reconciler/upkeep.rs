//! Upkeep: knobs that differ from the guarantees are written, and records that no longer apply are removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_cgroup::CgroupPath;
use numaward_enforce::SettingsChange;

use super::{Controller, ControllerEvent, mode};
use crate::core::{Core, admission, conditions, cpu_isolation, pods, shared_pool};

/// Interval for reading again what other programs change.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);

/// Controller that removes records which no longer apply, confines cgroups again, and enforces guarantees that were refused.
#[derive(Debug)]
pub(super) struct Upkeep {
    last_refresh: Instant,
    /// Reasons of the guarantees that could not be enforced the last time.
    refused: BTreeMap<CgroupPath, String>,
}

impl Upkeep {
    pub(super) fn new(now: Instant) -> Self {
        Self { last_refresh: now, refused: BTreeMap::new() }
    }

    /// Returns true once per interval.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.last_refresh) >= REFRESH_INTERVAL;
        if is_due {
            self.last_refresh = now;
        }
        is_due
    }
}

impl Controller for Upkeep {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        if let ControllerEvent::Tick(now) = *event
            && self.is_due(now)
        {
            refresh(core);
            let refused = mode::enforce_again(core);
            mode::log_refused(
                refused.iter().filter(|(cgroup, error)| self.refused.get(*cgroup) != Some(*error)),
            );
            self.refused = refused;
        }
    }
}

/// Writes the knobs that differ from the guarantees; returns the number of writes, or `None` if the kernel's values
/// cannot be read.
pub(crate) fn enforce_guarantees(core: &mut Core) -> Option<usize> {
    // This includes controllers that were recorded but not yet enabled when the daemon died.
    core.forget_disabled();
    shared_pool::catch_up(core);
    match core.plan(SettingsChange::Upkeep) {
        Ok(plan) => {
            let rewritten = plan.steps().len();
            if let Err(refused) = core.execute_plan(plan) {
                tracing::error!(error = %refused, "not all guarantees could be enforced again");
            }
            Some(rewritten)
        }
        Err(error) => {
            tracing::error!(%error, "the guarantees cannot be compared with the values in the kernel");
            None
        }
    }
}

/// Reads the systemd properties and the enabled controllers again, and removes records that no longer apply.
pub(crate) fn refresh(core: &mut Core) {
    core.execution.enforcer.refresh();
    // At a start after a reboot, D-Bus may not have been available yet.
    let left: BTreeSet<CgroupPath> = core.store.state.applied.unwritten().cloned().collect();
    core.store.unwritten.retain(|path| left.contains(path));
    if core.store.unwritten.iter().any(|path| core.hierarchy.dir(path).is_dir()) {
        enforce_guarantees(core);
    }
    if core.forget_disabled()
        && let Err(error) = core.save()
    {
        tracing::error!(%error, "the ledger cannot be stored");
    }
    core.execution.migrations.retain_held(&core.store.state.applied);
    admission::remove_stray_cgroups(core);
    cpu_isolation::update(core, true);
    mode::disable_controllers(core);
    core.effects.declared = true;
}

/// Updates migrations, conditions, the machine, pods and the ledger file; returns true if the machine changed.
pub(crate) fn maintain(core: &mut Core, now: Instant) -> bool {
    core.execution.migrations.collect(&core.metrics, &mut core.effects);
    conditions::update(core);
    core.store.storage.write_out(false);
    let Core { config, policy, store, ports, .. } = core;
    let is_changed = policy.follow(config, ports.host.machine(), &mut store.state, &*ports.host);
    if is_changed {
        shared_pool::note_guarantees_changed(core);
    }
    pods::maintain(core, now);
    is_changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refresh_is_due_once_per_interval() {
        let start = Instant::now();
        let mut upkeep = Upkeep::new(start);
        let due = [29, 30, 31, 59, 60].map(|seconds| upkeep.is_due(start + Duration::from_secs(seconds)));
        assert_eq!(due, [false, true, false, false, true]);
    }
}

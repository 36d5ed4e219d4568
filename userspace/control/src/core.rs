//! What is promised, how it is stored and carried out, and everything that a decision needs.
//!
//! Problem: admissions, pods, CPU isolation and those who look after what is held change the same state, store it and
//! write knobs for it. While one of them waits for the kernel or for systemd, the container runtime waits for no longer
//! than a fraction of a second.
//!
//! Terms: the *effects* of a change are what others do about it once it is done, see [`Effects`].
//!
//! Algorithm: [`Core`] has what changes together. A change is a [`execution::Transaction`]. Pods are part of the core, as
//! what a runtime asks is answered while a change waits; CPU isolation is, as it makes room in the middle of an admission.
//! All others look after what is held between two changes, see [`crate::reconciler`].

mod admission;
mod auto_placement;
mod batch;
mod burstable_home;
mod conditions;
mod cpu_isolation;
#[cfg(test)]
pub(crate) mod disorder;
mod effects;
mod execution;
mod huge_pages;
mod inbox;
mod machine;
mod migrations;
mod mode;
mod narrowing;
pub(crate) mod pods;
mod rebalance;
mod resize;
mod storage;

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use numaward_cgroup::{CgroupPath, Hierarchy, LockError, classify};
use numaward_config::{Config, enforcement::CgroupPattern, home::HomeMode};
use numaward_enforce::{Enforcer, SettingsChange};
use numaward_guarantee::{
    error::StartError,
    ports::Ports,
    private_directory, rebuild,
    state::boot_id,
    xattr_backup::{self, XattrBackup},
};
use numaward_model::{EventReport, headroom::Headroom};
use numaward_store::{LoadedLedger, Store};
use numaward_topology::CpuSet;

#[cfg(test)]
pub(crate) use self::inbox::Numbered;
pub(crate) use self::{
    admission::{Admission, remove_cgroup},
    burstable_home::most,
    effects::{Effects, HeldChange, WidenedCgroup},
    execution::Worker,
    inbox::{CgroupNews, Inbox, Kind, Waiting, goes_with},
    machine::MissingCapacity,
    rebalance::{Begun, id as plan_id},
};
use self::{
    cpu_isolation::CpuIsolation,
    execution::Execution,
    machine::Policy,
    pods::Pods,
    storage::{StateStore, Storage},
};
use crate::ControlMetrics;

/// Whether something is asked for the first time, or tried again. What is refused again is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    First,
    Again,
    /// It was decided on already, and counted.
    Counted,
}

/// What changes together.
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) hierarchy: Hierarchy,
    pub(crate) ports: Ports,
    pub(crate) metrics: ControlMetrics,
    pub(crate) policy: Policy,
    pub(crate) store: StateStore,
    pub(crate) execution: Execution,
    pods: Pods,
    pub(crate) isolation: CpuIsolation,
    pub(crate) effects: Effects,
    /// What was seen last of what decisions have to heed.
    last_headroom: Arc<Headroom>,
}

impl Core {
    /// Takes over what an earlier run stored.
    pub(crate) fn open(
        config: &Config,
        hierarchy: Hierarchy,
        enforcer: Enforcer,
        ports: Ports,
        metrics: ControlMetrics,
    ) -> Result<Self, StartError> {
        let policy = Policy::new(config, ports.machine.machine())?;
        private_directory::prepare(&config.state_directory)?;
        let (store, loaded) = Store::open(&config.state_directory)?;
        let lock = match hierarchy.lock() {
            Err(held @ LockError::Held { .. }) => return Err(held.into()),
            Err(error) => {
                tracing::warn!(%error, "a second daemon with another state directory would not be noticed");
                None
            }
            Ok(lock) => lock,
        };
        let (found, boot) = (xattr_backup::read(&hierarchy), boot_id(&config.host_root));
        let is_complete = matches!(loaded, LoadedLedger::Current { .. });
        let is_fresh = matches!(loaded, LoadedLedger::Fresh) && found.is_empty();
        let (mut state, set_aside) = rebuild::take_over_ledger(loaded, &found, &hierarchy, boot);
        for file in set_aside {
            let (path, reason) = (file.path.display(), &file.reason);
            if is_complete {
                tracing::warn!(%path, reason, "a damaged ledger was set aside; nothing is missing, as there is another");
                continue;
            }
            let allocations = state.guarantees.len();
            tracing::error!(%path, reason, allocations, "a damaged ledger was set aside, and rebuilt from live cgroups");
        }
        let backup = XattrBackup::new(hierarchy.clone(), found, &state);
        let storage = Storage::new((store, lock), backup, &config.state_directory, &mut state);
        state.undo_admitting(&*policy.strategy);
        let isolation = CpuIsolation::new(
            config.enforcement.isolation_mode(),
            config.enforcement.herding.system_slices.clone(),
        );
        let mut core = Self {
            config: without_own_cgroup(config, &hierarchy),
            hierarchy,
            ports,
            metrics,
            policy,
            store: StateStore::new(state, storage, !is_complete && !is_fresh),
            execution: Execution::new(enforcer),
            pods: Pods::default(),
            isolation,
            effects: Effects::default(),
            last_headroom: Arc::default(),
        };
        core.report_unfit();
        core.recharge();
        Ok(core)
    }

    pub(crate) fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        self.ports.events.report(cgroup, report);
    }

    /// Whether the guarantee of this cgroup is being released.
    pub(crate) fn is_releasing(&self, cgroup: &CgroupPath) -> bool {
        let mut releasing =
            self.store.state.releasing.iter().filter_map(|name| self.store.state.guarantees.get(name));
        releasing.any(|held| held.cgroup == *cgroup)
    }

    /// The CPUs of workloads that hold none.
    pub(crate) fn shared_pool(&self) -> CpuSet {
        self.policy.shared_pool(&self.store.state.ledger)
    }

    /// CPUs that can still become exclusive.
    pub(crate) fn free_cpus(&self) -> CpuSet {
        let ledger = &self.store.state.ledger;
        &(&self.policy.strategy.allocatable().cpus & ledger.shared_pool())
            - &ledger.conditions().partition_cpus
    }

    /// What is promised changed: containers that share what is left follow at once, and the others afterwards.
    pub(crate) fn promises_changed(&mut self) {
        self.effects.promises = true;
        self.effects.isolate = true;
        self.effects.declared = true;
        self.follow_pool();
    }

    /// Writes what does not hold; returns how much that was.
    pub(crate) fn uphold(&mut self) -> Option<usize> {
        // Also what was about to be enabled when the daemon died.
        self.forget_disabled();
        self.catch_up_with_pool();
        match self.plan(SettingsChange::Upkeep) {
            Ok(plan) => {
                let rewritten = plan.steps().len();
                if let Err(refused) = self.carry_out(plan) {
                    tracing::error!(error = %refused, "not all that is promised could be enforced again");
                }
                Some(rewritten)
            }
            Err(error) => {
                tracing::error!(%error, "what is promised cannot be compared with the kernel");
                None
            }
        }
    }

    /// Reads others' claims and the enabled controllers anew.
    pub(crate) fn refresh(&mut self) {
        self.execution.enforcer.refresh();
        // At a start after a reboot, the bus may not have been there yet.
        let left: BTreeSet<CgroupPath> = self.store.state.applied.unwritten().cloned().collect();
        self.store.unwritten.retain(|path| left.contains(path));
        if self.store.unwritten.iter().any(|path| self.hierarchy.dir(path).is_dir()) {
            self.uphold();
        }
        if self.forget_disabled()
            && let Err(error) = self.save()
        {
            tracing::error!(%error, "the ledger cannot be stored");
        }
        self.execution.migrations.retain_held(&self.store.state.applied);
        self.remove_strays();
        self.herd(true);
        self.disable_controllers();
        self.effects.declared = true;
    }

    /// Looks after migrations, pods and the ledger file; whether the machine changed.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        self.note_moved();
        self.heed_conditions();
        self.store.storage.write_out(false);
        let is_changed = self.follow_machine();
        self.look_after_pods(now);
        is_changed
    }

    /// Starts to carry out on a thread of its own what may wait, and to take these commands meanwhile.
    pub(crate) fn serve(&mut self, worker: Worker, inbox: Inbox) {
        (self.execution.worker, self.execution.inbox) = (Some(worker), Some(inbox));
    }

    pub(crate) fn enforcer(&self) -> &Arc<Enforcer> {
        &self.execution.enforcer
    }
}

/// The configuration, with the daemon's own cgroup, and the others of its pod, among those that are neither kept off nodes nor
/// placed.
fn without_own_cgroup(config: &Config, hierarchy: &Hierarchy) -> Config {
    let mut config = config.clone();
    let is_of_use = config.guard.acts() || config.home.mode != HomeMode::Off;
    if let Some(own) = is_of_use.then(|| hierarchy.own_cgroup()).flatten() {
        let is_container = classify(&own, |_| false).container.is_some();
        let own = if is_container { own.parent().unwrap_or(own) } else { own };
        config.guard_exempt.extend(CgroupPattern::subtree(&own));
        config.home.exclude.extend(CgroupPattern::subtree(&own));
    }
    config
}

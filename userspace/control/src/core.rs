//! The state that guarantees share, how it is stored, and how changes are enforced.
//!
//! # Problem
//! Admissions, pods, CPU isolation and periodic checks change the same state, store it and write knobs for it. While
//! one of them waits for the kernel or for systemd, the container runtime waits no longer than a fraction of a second.
//!
//! # Terms
//! The *effects* of a change are the reactions of other parts after it is complete, see [`Effects`].
//!
//! # Algorithm
//! [`Core`] owns the state; a change is an [`execution::Transaction`]. Pods are part of the core because requests of
//! the runtime are answered while a change waits. CPU isolation is part of it because an admission confines other
//! cgroups. All other controllers run between two changes, see [`crate::reconciler`].

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
pub(crate) use self::inbox::RuntimeCommand;
pub(crate) use self::{
    admission::{Admission, remove_cgroup},
    burstable_home::node_with_most,
    effects::{Effects, HeldChange, WidenedCgroup},
    execution::Worker,
    inbox::{BatchKind, CgroupNews, Inbox, QueuedCommand, batch_key},
    machine::MissingCapacity,
    rebalance::{MoveStart, id as plan_id},
};
use self::{
    cpu_isolation::CpuIsolation,
    execution::Execution,
    machine::Policy,
    pods::Pods,
    storage::{StateStore, Storage},
};
use crate::ControlMetrics;

/// The attempt of an admission. A repeated refusal is not counted in the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    First,
    Again,
    /// The decision was counted already.
    Counted,
}

/// The shared state and the means to change it.
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
    /// The headroom snapshot that decisions use.
    last_headroom: Arc<Headroom>,
}

impl Core {
    /// Opens the ledger, locks the hierarchy, and takes over the state of an earlier run.
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

    /// Returns true if the guarantee of this cgroup is being released.
    pub(crate) fn is_releasing(&self, cgroup: &CgroupPath) -> bool {
        let mut releasing =
            self.store.state.releasing.iter().filter_map(|name| self.store.state.guarantees.get(name));
        releasing.any(|held| held.cgroup == *cgroup)
    }

    /// Returns the CPUs of workloads without exclusive CPUs.
    pub(crate) fn shared_pool(&self) -> CpuSet {
        self.policy.shared_pool(&self.store.state.ledger)
    }

    /// Returns the CPUs that can still become exclusive.
    pub(crate) fn free_cpus(&self) -> CpuSet {
        let ledger = &self.store.state.ledger;
        &(&self.policy.strategy.allocatable().cpus & ledger.shared_pool())
            - &ledger.conditions().partition_cpus
    }

    /// Records that guarantees changed. Containers on the shared pool follow at once, the other effects follow later.
    pub(crate) fn note_guarantees_changed(&mut self) {
        self.effects.guarantees = true;
        self.effects.isolate = true;
        self.effects.declared = true;
        self.follow_pool();
    }

    /// Writes the knobs that differ from the guarantees; returns the number of writes, or `None` if the kernel's values
    /// cannot be read.
    pub(crate) fn enforce_guarantees(&mut self) -> Option<usize> {
        // This includes controllers that were recorded but not yet enabled when the daemon died.
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

    /// Reads the systemd properties and the enabled controllers again, and removes records that no longer apply.
    pub(crate) fn refresh(&mut self) {
        self.execution.enforcer.refresh();
        // At a start after a reboot, D-Bus may not have been available yet.
        let left: BTreeSet<CgroupPath> = self.store.state.applied.unwritten().cloned().collect();
        self.store.unwritten.retain(|path| left.contains(path));
        if self.store.unwritten.iter().any(|path| self.hierarchy.dir(path).is_dir()) {
            self.enforce_guarantees();
        }
        if self.forget_disabled()
            && let Err(error) = self.save()
        {
            tracing::error!(%error, "the ledger cannot be stored");
        }
        self.execution.migrations.retain_held(&self.store.state.applied);
        self.remove_strays();
        self.update_confinement(true);
        self.disable_controllers();
        self.effects.declared = true;
    }

    /// Updates migrations, conditions, pods and the ledger file; returns true if the machine changed.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        self.collect_migrations();
        self.update_conditions();
        self.store.storage.write_out(false);
        let is_changed = self.follow_machine();
        self.maintain_pods(now);
        is_changed
    }

    /// Moves blocking work to the worker thread from now on; commands from this inbox are answered meanwhile.
    pub(crate) fn serve(&mut self, worker: Worker, inbox: Inbox) {
        (self.execution.worker, self.execution.inbox) = (Some(worker), Some(inbox));
    }

    pub(crate) fn enforcer(&self) -> &Arc<Enforcer> {
        &self.execution.enforcer
    }
}

/// Returns the configuration with the daemon's own cgroup (or its pod) exempt from the guard and from automatic
/// placement.
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

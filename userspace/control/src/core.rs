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
//! [`Core`] owns the state; a change is an [`execution::Transaction`]. Each concern is a file below: functions that take the
//! core, and a type for the state that only this concern has. The files form no circle. Requests of the runtime are answered
//! while a change waits: [`execution`] calls the function that [`Core::open`] gives to it. All other controllers run between
//! two changes, see [`crate::reconciler`].

pub(crate) mod admission;
pub(crate) mod batch;
pub(crate) mod bindings;
pub(crate) mod burstable_home;
pub(crate) mod claims;
pub(crate) mod conditions;
pub(crate) mod cpu_isolation;
#[cfg(test)]
pub(crate) mod disorder;
pub(crate) mod effects;
pub(crate) mod execution;
pub(crate) mod huge_pages;
pub(crate) mod inbox;
pub(crate) mod machine;
pub(crate) mod migrations;
pub(crate) mod narrowing;
pub(crate) mod pods;
pub(crate) mod preferred_node;
pub(crate) mod rebalance;
pub(crate) mod release;
pub(crate) mod resize;
pub(crate) mod settings;
pub(crate) mod shared_pool;
pub(crate) mod storage;

use std::{collections::BTreeSet, sync::Arc};

use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy, LockError, classify};
use numaward_config::{Config, enforcement::CgroupPattern, home::HomeMode};
use numaward_enforce::{EnforceError, Enforcer};
use numaward_engine::{Allocation, OwnerId};
use numaward_guarantee::{
    error::StartError,
    ports::Ports,
    private_directory, rebuild,
    state::boot_id,
    xattr_backup::{self, XattrBackup},
};
use numaward_model::{EventReport, Settings, pod::PodContainer};
use numaward_store::{LoadedLedger, Store, StoreError};
use numaward_topology::{CpuSet, NodeId};

use self::{
    bindings::Bindings,
    cpu_isolation::CpuIsolation,
    execution::Execution,
    machine::Policy,
    pods::Pods,
    shared_pool::SharedPool,
    storage::{StateStore, Storage},
};
use crate::ControlMetrics;

#[cfg(test)]
pub(crate) use self::inbox::RuntimeCommand;
pub(crate) use self::{
    admission::Admission,
    effects::{Effects, HeldChange},
    execution::EnforcementWorker,
    inbox::{BatchKind, CgroupNews, Inbox, QueuedCommand, batch_key},
    machine::MissingCapacity,
    rebalance::MoveStart,
};

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
    pub(crate) bindings: Bindings,
    pool: SharedPool,
    pub(crate) isolation: CpuIsolation,
    pub(crate) effects: Effects,
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
        let policy = Policy::new(config, ports.host.machine())?;
        private_directory::prepare(&config.state_directory)?;
        let (store, loaded) = Store::open(&config.state_directory)?;
        let lock = match hierarchy.lock() {
            Err(held @ LockError::Held { .. }) => return Err(held.into()),
            Err(error) => {
                tracing::warn!(%error, "the cgroup hierarchy cannot be locked: a second daemon with another state directory would not be detected");
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
                tracing::warn!(%path, reason, "a damaged ledger was set aside; nothing is missing, because another complete ledger is used");
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
            execution: Execution::new(enforcer, pods::commands::pod_command),
            pods: Pods::default(),
            bindings: Bindings::default(),
            pool: SharedPool::default(),
            isolation,
            effects: Effects::default(),
        };
        core.policy.report_unfit(&*core.ports.host);
        core.policy.recharge(&mut core.store.state, &*core.ports.host);
        let state = &mut core.store.state;
        let headroom = core.ports.host.headroom();
        let conditions =
            conditions::present_conditions(&headroom, &core.hierarchy, &core.policy.machine, &state.ledger);
        state.ledger.set_conditions(Arc::new(conditions));
        Ok(core)
    }

    pub(crate) fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        self.ports.host.report(cgroup, report);
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

    /// Moves blocking work to the worker thread from now on; commands from this inbox are answered meanwhile.
    pub(crate) fn serve(&mut self, worker: EnforcementWorker, inbox: Inbox) {
        (self.execution.worker, self.execution.inbox) = (Some(worker), Some(inbox));
    }

    pub(crate) fn enforcer(&self) -> &Arc<Enforcer> {
        &self.execution.enforcer
    }

    pub(crate) fn mode(&self) -> EnforcementMode {
        self.config.enforcement.mode
    }

    pub(crate) fn allocation_for(&self, of: &PodContainer) -> Option<&Allocation> {
        self.store.state.ledger.allocation(&OwnerId::from(of.owner.as_str()), &of.ledger_name())
    }

    /// Returns the settings that are applied to a cgroup.
    pub(crate) fn applied_settings(&self, path: &CgroupPath) -> Option<&Settings> {
        self.store.state.applied.get(path).map(|record| &record.settings)
    }

    pub(crate) fn save(&mut self) -> Result<(), StoreError> {
        self.store.save()
    }

    pub(crate) fn guaranteed_cgroups(&self) -> BTreeSet<CgroupPath> {
        let guaranteed =
            self.store.state.guarantees.values().filter(|guarantee| !guarantee.has_no_guarantee());
        let guaranteed = guaranteed.map(|guarantee| &guarantee.cgroup);
        // Containers keep to the shared pool by themselves.
        let placed = self.store.state.containers.values().map(|placed| &placed.cgroup);
        guaranteed.chain(placed).cloned().collect()
    }

    /// Returns the CPUs of a node that are not exclusive.
    pub(crate) fn shared_cpus_of(&self, node: NodeId) -> CpuSet {
        let of = self.policy.machine.nodes.get(&node).map(|node| node.cpus.clone()).unwrap_or_default();
        &of & self.store.state.ledger.shared_pool()
    }

    /// Returns the identifier of an existing cgroup.
    pub(crate) fn id_of(&self, path: &CgroupPath) -> Result<CgroupId, EnforceError> {
        let id = self.hierarchy.id_of(path).ok().flatten();
        id.ok_or_else(|| EnforceError::Gone { cgroup: path.clone() })
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

//! Restores all settings that were written, for `numaward uninstall`.
//!
//! # Problem
//! After numaward is removed, the host should have its original settings. They are in the ledger, and on the cgroups
//! themselves.
//!
//! # Algorithm
//! Take the ledger over like a daemon whose enforcement is off, wait until no setting is held any more, disable the
//! controllers that were enabled, and read the ledger again.
//!
//! # Invariants
//! - No daemon runs meanwhile: the ledger is locked.
//! - A setting that cannot be restored stays in the ledger and is reported.

use std::{
    collections::BTreeMap,
    fs,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numaward_api::{
    EnforcementMode,
    restore::{RestoreReport, RestoredCgroup, UnrestoredItem},
};
use numaward_cgroup::{CgroupId, CgroupPath, EXEC_PARENT, Hierarchy, OpenError, knob::Knob};
use numaward_config::Config;
use numaward_enforce::{
    controllers::{self, StillEnabled},
    resctrl::{HostKernel, Resctrl},
    weights::Weights,
};
use numaward_guarantee::{error::StartError, ports::Ports, reconciler::ReconcilerHandle, state::State};
use numaward_model::{
    EventReport, Guarantees,
    accesses::WorkloadAccesses,
    headroom::Headroom,
    port::{CgroupListener, ObservedHost},
};
use numaward_store::{Store, StoreError};
use numaward_topology::Machine;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::{ControlMetrics, hierarchy, start_on_this_host};

/// Time for which a failed write is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two checks whether all settings are restored.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Reason why settings cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The ledger cannot be read, or is locked by a running daemon.
    #[error("{0} (if the daemon runs, stop it first)")]
    Store(#[from] StoreError),
    /// There is no cgroup hierarchy in which settings could have been written.
    #[error(transparent)]
    Hierarchy(#[from] OpenError),
    /// The ledger cannot be taken over.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The ledger cannot be taken over on this machine.
    #[error("guarantees are not supported on this machine, so nothing was restored; the log has the reason")]
    Unusable,
    /// The thread ended before all settings were restored.
    #[error("the reconciler ended before all settings were restored; the log has the reason")]
    Ended,
}

/// Restores all settings recorded in this configuration's ledger and on the cgroups. No guarantee remains.
pub fn restore(config: &Config, machine: Machine, runtime: &Handle) -> Result<RestoreReport, RestoreError> {
    let hierarchy = hierarchy(config)?;
    let mut config = config.clone();
    config.enforcement.mode = EnforcementMode::Off;
    let before = read_ledger(&config)?;
    let (alone, stop) = (Arc::new(NoopPorts(Arc::new(machine))), CancellationToken::new());
    let metrics = ControlMetrics::default();
    let started = start_on_this_host(&config, Ports::new(alone), metrics, None, runtime, &stop)?;
    let (reconciler, thread) = started.ok_or(RestoreError::Unusable)?;
    let until = Instant::now() + RETRY_TIMEOUT;
    while !thread.is_finished() && Instant::now() < until && !is_all_restored(&reconciler) {
        thread::sleep(POLL_INTERVAL);
    }
    stop.cancel();
    thread.join().map_err(|_| RestoreError::Ended)?;
    remove_exec_parent(&hierarchy);
    let (after, kept) = disable_controllers(&config, &hierarchy)?;
    let is_there = |path: &CgroupPath, id: CgroupId| hierarchy.id_of(path).ok().flatten() == Some(id);
    let restored = before.applied.iter().filter(|(path, record)| {
        after.applied.get(path).is_none() && !record.found.0.is_empty() && is_there(path, record.id)
    });
    let restored = restored.map(|(path, record)| {
        let knobs = record.found.0.iter().map(|(knob, value)| (knob.to_string(), value.to_string()));
        (path, knobs.collect())
    });
    let mut restored: BTreeMap<&CgroupPath, BTreeMap<String, String>> = restored.collect();
    for (path, enabled) in before.enabled.iter() {
        let is_left = after.enabled.iter().any(|(left, _)| left == path);
        if !is_left
            && is_there(path, enabled.id)
            && let Ok(now) = Knob::SubtreeControl.read(&hierarchy.dir(path))
        {
            restored.entry(path).or_default().insert(Knob::SubtreeControl.to_string(), now.to_string());
        }
    }
    let pending = &reconciler.allocations().enforcement.pending_restores;
    let cgroups = after.applied.iter().filter(|(path, record)| is_there(path, record.id));
    let cgroups = cgroups.map(|(path, _)| UnrestoredItem {
        reason: pending.iter().find(|of| of.cgroup == path.as_str()).and_then(|of| of.reason.clone()),
        name: path.to_string(),
    });
    let affinities = after.interrupts.affinities.into_values().map(|of| of.name);
    let irqbalance = after.interrupts.banned.map(|_| "irqbalance".to_owned());
    let power =
        after.power.into_iter().map(|(path, of)| format!("{} of CPUs {} (/{path})", of.knob, of.cpus));
    let weights = Weights::new(&config.host_root).unrestored(&after.weights).into_iter();
    let weights = weights.map(|(name, reason)| UnrestoredItem { name, reason });
    let groups = Resctrl::new(&config.resctrl_root(), Arc::new(HostKernel)).own_groups().into_iter();
    let groups = groups.map(|group| group.display().to_string());
    let default = (!after.cache_ways.is_empty())
        .then(|| "ways of resctrl's default group (unmounting resctrl restores them, too)".to_owned());
    let left = affinities.chain(irqbalance).chain(power).chain(groups).chain(default);
    let left = cgroups.chain(left.map(|name| UnrestoredItem { name, reason: None })).chain(weights);
    let kept = kept.into_iter().map(|kept| UnrestoredItem {
        name: kept.cgroup.to_string(),
        reason: Some(format!("the controller {} stays enabled: {}", kept.controller, kept.reason)),
    });
    let restored =
        restored.into_iter().map(|(path, knobs)| RestoredCgroup { cgroup: path.to_string(), knobs });
    Ok(RestoreReport { cgroups: restored.collect(), left: left.chain(kept).collect() })
}

/// Returns true if no guarantee, no confined cgroup and no pending restore remains.
pub(crate) fn is_all_restored(reconciler: &ReconcilerHandle) -> bool {
    let held = reconciler.allocations();
    held.allocations.is_empty()
        && held.enforcement.herding.cgroups.is_empty()
        && held.enforcement.pending_restores.is_empty()
        && !reconciler.has_pending_host_restores()
}

/// Disables the controllers that were enabled, and returns the final content of the ledger and the controllers left.
pub(crate) fn disable_controllers(
    config: &Config,
    hierarchy: &Hierarchy,
) -> Result<(State, Vec<StillEnabled>), StoreError> {
    let (mut store, loaded) = Store::<State>::open(&config.state_directory)?;
    let mut state = loaded.ledger().unwrap_or_default();
    let before = state.enabled.clone();
    let left = controllers::disable(hierarchy.root(), &mut state.enabled);
    if state.enabled != before {
        store.save(&state)?;
        store.write_out()?;
    }
    Ok((state, left))
}

/// Returns the readable content of the ledger.
fn read_ledger(config: &Config) -> Result<State, StoreError> {
    let (_, loaded) = Store::<State>::open(&config.state_directory)?;
    Ok(loaded.ledger().unwrap_or_default())
}

/// Removes the parent cgroup of commands if no command runs.
fn remove_exec_parent(hierarchy: &Hierarchy) {
    let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
    if let Err(error) = fs::remove_dir(hierarchy.dir(&parent)) {
        tracing::debug!(cgroup = %parent, %error, "the parent cgroup of commands is not removed");
    }
}

/// A machine without subscribers; events are only logged.
struct NoopPorts(Arc<Machine>);

impl ObservedHost for NoopPorts {
    fn machine(&self) -> Arc<Machine> {
        self.0.clone()
    }

    fn headroom(&self) -> Arc<Headroom> {
        Arc::default()
    }

    fn accesses(&self) -> Vec<WorkloadAccesses> {
        Vec::new()
    }

    fn subscribe(&self, _: CgroupListener) {}

    fn publish_guarantees(&self, _: Guarantees) {}

    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        let cgroup = cgroup.map(ToString::to_string);
        tracing::info!(cgroup, event = report.message, "event");
    }

    fn update_containers(&self, _: Vec<(String, String)>, _: bool) {}

    fn remove_container(&self, _: &str) {}
}

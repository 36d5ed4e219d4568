//! Shares of L3 caches and memory bandwidth, and the use of both by workloads (`resctrl` in the configuration).
//!
//! # Algorithm
//! The thread `caches` updates the kernel's tree of resctrl groups and reads its counters, see [`numaward_enforce::resctrl`]. It
//! does so when the guarantees have changed, and every second while a workload has a class or is monitored; less often if an
//! update takes long.
//!
//! # Invariants
//! - The reconciler's thread uses the files of the tree only at the start of the daemon, and waits for nothing.
//! - The originals of the default group are stored before that group is written.
//! - If resctrl is no longer configured, groups of the previous run are removed before the first client is answered.
//! - A request is admitted whether or not its class can be applied.
//! - Each problem is reported once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_config::resctrl::Monitor;
use numaward_enforce::resctrl::{
    HostKernel, Resctrl, ResctrlKernel, ResctrlOutcome, ResctrlSpec, ResctrlWorkload,
};
use numaward_engine::OwnerId;
use numaward_guarantee::{caches::shares, request::Target};
use numaward_model::EventReport;
use tokio_util::sync::CancellationToken;

use super::{Controller, ControllerEvent};
use crate::{core::Core, metrics::CacheLabels, worker::Worker};

/// Interval between two updates of the tree.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// The pause between two updates is at least the duration of an update times this factor.
const UPDATE_PAUSE_FACTOR: u32 = 100;
/// Time for one group of an update, after which the thread counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(5);

/// The thread. Its result is the outcome of an update and the duration.
type CacheWorker = Worker<ResctrlSpec, (ResctrlOutcome, Duration)>;

/// Controller of the resctrl groups.
#[derive(Debug)]
pub(super) struct CacheClasses {
    pub(super) kernel: Arc<dyn ResctrlKernel>,
    worker: Option<CacheWorker>,
    spec: ResctrlSpec,
    /// True if guarantees have changed since `spec` was computed.
    pub(super) is_outdated: bool,
    /// Time of the next update; `None` if one is due at once.
    next_update: Option<Instant>,
    /// The problems of the last update, which were reported.
    problems: BTreeSet<String>,
    /// Labels of the exported metrics of each workload.
    labels: BTreeMap<String, CacheLabels>,
    stop: CancellationToken,
}

impl CacheClasses {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            kernel: Arc::new(HostKernel),
            worker: None,
            spec: ResctrlSpec::default(),
            is_outdated: true,
            next_update: None,
            problems: BTreeSet::new(),
            labels: BTreeMap::new(),
            stop,
        }
    }

    /// If resctrl is not configured, removes the groups of the previous run and restores the default group.
    pub(super) fn adopt(&mut self, core: &mut Core) {
        if core.config.enabled_resctrl().is_some() {
            return;
        }
        let mut tree = Resctrl::new(&core.config.resctrl_root(), self.kernel.clone());
        let empty = ResctrlSpec { reduced: core.store.state.cache_ways.clone(), ..ResctrlSpec::default() };
        if empty.is_needed() || !tree.own_groups().is_empty() {
            let mut outcome = tree.reconcile(&empty);
            store_originals(core, &mut outcome);
            self.report(core, &outcome);
        }
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        let Some(config) = core.config.enabled_resctrl() else { return };
        if std::mem::take(&mut self.is_outdated) {
            let classes = shares(config);
            let monitors = config.monitor != Monitor::Off;
            let (workloads, labels) = workloads_and_labels(core);
            let reduced = self.spec.reduced.clone();
            let spec = ResctrlSpec { classes, workloads, monitors, reduced };
            if spec != self.spec {
                (self.spec, self.next_update) = (spec, None);
            }
            self.labels = labels;
        }
        if let Some((mut outcome, took)) = self.worker.as_mut().and_then(CacheWorker::take) {
            // The thread waits for the originals to be stored and then completes the update.
            let is_incomplete = store_originals(core, &mut outcome) && outcome.waits;
            if !is_incomplete {
                self.report(core, &outcome);
            }
            if self.next_update.is_some() {
                self.next_update =
                    (!is_incomplete).then(|| now + UPDATE_INTERVAL.max(took * UPDATE_PAUSE_FACTOR));
            }
        }
        self.spec.reduced.clone_from(&core.store.state.cache_ways);
        let is_busy = self.worker.as_ref().is_some_and(CacheWorker::is_busy);
        let is_idle = !self.spec.is_needed() && self.problems.is_empty() && self.next_update.is_some();
        if is_busy || is_idle || self.next_update.is_some_and(|next| now < next) {
            return;
        }
        let spec = self.spec.clone();
        let Some(worker) = self.worker(core) else { return };
        if worker.give(spec) {
            self.next_update = Some(now + UPDATE_INTERVAL);
        }
    }

    /// Returns the thread, and starts it before its first use.
    fn worker(&mut self, core: &Core) -> Option<&mut CacheWorker> {
        if self.worker.is_none() {
            let mut tree = Resctrl::new(&core.config.resctrl_root(), self.kernel.clone());
            let perform = move |spec| {
                let started = Instant::now();
                (tree.reconcile(&spec), started.elapsed())
            };
            match Worker::start("caches", HANG_TIMEOUT, &core.ports.heartbeats, &self.stop, perform) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    tracing::error!(%error, "resctrl classes are not applied: cannot start the thread");
                }
            }
        }
        self.worker.as_mut()
    }

    /// Reports changes and new problems, and exports the counters.
    fn report(&mut self, core: &Core, outcome: &ResctrlOutcome) {
        let ResctrlOutcome {
            is_made_up, set, removed, problems, held, refused, groups, moved, readings, ..
        } = outcome;
        let metrics = &core.metrics;
        metrics.caches.set_classes(held.len(), refused.len(), *groups, *moved);
        let exported = &core.config.metrics.workloads;
        let readings = readings.iter().filter(|of| exported.admits(&of.workload));
        let readings = readings.filter_map(|of| Some((self.labels.get(&of.workload)?, of.cache, of.counted)));
        metrics.caches.set_readings(readings);
        let tree = if *is_made_up { " in a fake tree, which is not the kernel's" } else { "" };
        let report = |severity, text: String| {
            let report = EventReport::new(EventKind::Resctrl, text).severity(severity);
            core.report(None, report.detail("madeUp", is_made_up));
        };
        if !set.is_empty() {
            report(Severity::Info, format!("The shares of classes were set{tree}: {}.", set.join("; ")));
        }
        if !removed.is_empty() {
            report(Severity::Info, format!("Unused classes were removed{tree}: {}.", removed.join(", ")));
        }
        if *problems != self.problems {
            let new: Vec<&str> = problems.difference(&self.problems).map(String::as_str).collect();
            if !new.is_empty() {
                report(
                    Severity::Warning,
                    format!("The configuration could not be applied{tree}: {}.", new.join("; ")),
                );
            }
            self.problems.clone_from(problems);
        }
    }
}

impl Controller for CacheClasses {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.tick(core, now),
            ControllerEvent::StateChanged => self.is_outdated = true,
            _ => {}
        }
    }
}

/// Stores the originals of the default group in the ledger. Returns false, and adds a problem, if that fails.
fn store_originals(core: &mut Core, outcome: &mut ResctrlOutcome) -> bool {
    let stored = core.save_part(|state| &mut state.cache_ways, outcome.reduced.clone());
    if let Err(error) = &stored {
        outcome
            .problems
            .insert(format!("the original shares of resctrl's default group cannot be stored: {error}"));
    }
    stored.is_ok()
}

/// Returns the workloads with a guarantee, and the labels of their metrics.
fn workloads_and_labels(core: &Core) -> (BTreeMap<String, ResctrlWorkload>, BTreeMap<String, CacheLabels>) {
    let state = &core.store.state;
    let (mut workloads, mut labels) = (BTreeMap::new(), BTreeMap::new());
    for (name, held) in &state.guarantees {
        let account = state.ledger.owner(&OwnerId::from(held.owner(name)));
        let class = account.and_then(|account| account.terms.resctrl_class.clone());
        let cgroup = core.hierarchy.dir(&held.cgroup);
        workloads.insert(name.clone(), ResctrlWorkload { class, cgroup });
        let workload_labels = match &held.target {
            Target::Container(of) => vec![
                ("namespace", of.pod.namespace.clone()),
                ("pod", of.pod.name.clone()),
                ("container", of.container.clone()),
            ],
            _ => vec![("workload", name.clone())],
        };
        labels.insert(name.clone(), workload_labels);
    }
    (workloads, labels)
}

#[cfg(test)]
mod tests;

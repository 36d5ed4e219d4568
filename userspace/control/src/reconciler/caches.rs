//! Shares of L3 caches and memory bandwidth, and what workloads have of both: `resctrl` in the configuration.
//!
//! Algorithm: when other workloads hold a guarantee than before, and every second while any of them has a class or is counted,
//! the thread `caches` makes the kernel's tree as it is to be and reads what is counted, see [`numaward_enforce::resctrl`].
//! Where that takes long, it is done less often.
//!
//! Invariants: this thread reads no file of the tree but at its start, and waits for nothing. What was found in the
//! default group is stored before anything is written there. Where nothing is configured any more, what an earlier
//! run made is gone before anybody is answered. A guarantee is given whether its class can be held or not. What is
//! not as it is to be is reported once.

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

use crate::{core::Core, metrics::CacheLabels, worker::Worker};

/// How often the tree is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Looking takes no more than this share of the time: one of so many parts.
const COST: u32 = 100;
/// How long one look may take before the thread counts as hung. It beats with each group.
const LIMIT: Duration = Duration::from_mins(5);

/// The thread, which says what was done and how long that took.
type CacheWorker = Worker<ResctrlSpec, (ResctrlOutcome, Duration)>;

/// Has the tree follow what is held.
#[derive(Debug)]
pub(super) struct CacheClasses {
    pub(super) kernel: Arc<dyn ResctrlKernel>,
    worker: Option<CacheWorker>,
    wanted: ResctrlSpec,
    /// Whether other workloads may hold a guarantee by now.
    pub(super) is_outdated: bool,
    next_look: Option<Instant>,
    /// What is not as it is to be, as reported last.
    problems: BTreeSet<String>,
    /// By which labels figures are served, by workload.
    labels: BTreeMap<String, CacheLabels>,
    stop: CancellationToken,
}

impl CacheClasses {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            kernel: Arc::new(HostKernel),
            worker: None,
            wanted: ResctrlSpec::default(),
            is_outdated: true,
            next_look: None,
            problems: BTreeSet::new(),
            labels: BTreeMap::new(),
            stop,
        }
    }

    /// Removes what an earlier run made, where nothing of the kind is to be done.
    pub(super) fn adopt(&mut self, core: &mut Core) {
        if core.config.enabled_resctrl().is_some() {
            return;
        }
        let mut tree = Resctrl::new(&core.config.resctrl_root(), self.kernel.clone());
        let nothing = ResctrlSpec { reduced: core.store.state.cache_ways.clone(), ..ResctrlSpec::default() };
        if nothing.is_needed() || !tree.own_groups().is_empty() {
            let mut done = tree.reconcile(&nothing);
            store(core, &mut done);
            self.report(core, &done);
        }
    }

    pub(super) fn turn(&mut self, core: &mut Core, now: Instant) {
        let Some(config) = core.config.enabled_resctrl() else { return };
        if std::mem::take(&mut self.is_outdated) {
            let classes = shares(config);
            let monitors = config.monitor != Monitor::Off;
            let (workloads, labels) = workloads(core);
            let reduced = self.wanted.reduced.clone();
            let wanted = ResctrlSpec { classes, workloads, monitors, reduced };
            if wanted != self.wanted {
                (self.wanted, self.next_look) = (wanted, None);
            }
            self.labels = labels;
        }
        if let Some((mut done, took)) = self.worker.as_mut().and_then(CacheWorker::take) {
            let goes_on = store(core, &mut done) && done.waits;
            if !goes_on {
                self.report(core, &done);
            }
            if self.next_look.is_some() {
                self.next_look = (!goes_on).then(|| now + LOOK.max(took * COST));
            }
        }
        self.wanted.reduced.clone_from(&core.store.state.cache_ways);
        let is_busy = self.worker.as_ref().is_some_and(CacheWorker::is_busy);
        let is_idle = !self.wanted.is_needed() && self.problems.is_empty() && self.next_look.is_some();
        if is_busy || is_idle || self.next_look.is_some_and(|next| now < next) {
            return;
        }
        let wanted = self.wanted.clone();
        let Some(worker) = self.worker(core) else { return };
        if worker.give(wanted) {
            self.next_look = Some(now + LOOK);
        }
    }

    /// The thread, which is started when it is needed first.
    fn worker(&mut self, core: &Core) -> Option<&mut CacheWorker> {
        if self.worker.is_none() {
            let mut tree = Resctrl::new(&core.config.resctrl_root(), self.kernel.clone());
            let follow = move |wanted| {
                let started = Instant::now();
                (tree.reconcile(&wanted), started.elapsed())
            };
            match Worker::start("caches", LIMIT, &core.ports.heartbeats, &self.stop, follow) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "classes are not held: no thread can be started"),
            }
        }
        self.worker.as_mut()
    }

    fn report(&mut self, core: &Core, done: &ResctrlOutcome) {
        let ResctrlOutcome {
            is_made_up, set, removed, problems, held, refused, groups, moved, readings, ..
        } = done;
        let metrics = &core.metrics;
        metrics.cache_classes(held.len(), refused.len(), *groups, *moved);
        let exported = &core.config.metrics.workloads;
        let shown = readings.iter().filter(|of| exported.admits(&of.workload));
        let shown = shown.filter_map(|of| Some((self.labels.get(&of.workload)?, of.cache, of.counted)));
        metrics.cache_readings(shown);
        let whose = if *is_made_up { " in a made-up tree, which is not the kernel's" } else { "" };
        let report = |severity, text: String| {
            let report = EventReport::new(EventKind::Resctrl, text).severity(severity);
            core.report(None, report.detail("madeUp", is_made_up));
        };
        if !set.is_empty() {
            report(Severity::Info, format!("Classes were given their shares{whose}: {}.", set.join("; ")));
        }
        if !removed.is_empty() {
            report(
                Severity::Info,
                format!("Classes that nobody has any more were removed{whose}: {}.", removed.join(", ")),
            );
        }
        if *problems != self.problems {
            let new: Vec<&str> = problems.difference(&self.problems).map(String::as_str).collect();
            if !new.is_empty() {
                report(Severity::Warning, format!("Not as configured{whose}: {}.", new.join("; ")));
            }
            self.problems.clone_from(problems);
        }
    }
}

/// Stores what was found in the default group and is written there; whether that worked.
fn store(core: &mut Core, done: &mut ResctrlOutcome) -> bool {
    let stored = core.save_part(|state| &mut state.cache_ways, done.reduced.clone());
    if let Err(error) = &stored {
        done.problems.insert(format!("what resctrl's default group had before cannot be stored: {error}"));
    }
    stored.is_ok()
}

/// All who hold a guarantee, and the labels of their figures.
fn workloads(core: &Core) -> (BTreeMap<String, ResctrlWorkload>, BTreeMap<String, CacheLabels>) {
    let state = &core.store.state;
    let (mut workloads, mut labels) = (BTreeMap::new(), BTreeMap::new());
    for (name, held) in &state.guarantees {
        let account = state.ledger.owner(&OwnerId::from(held.owner(name)));
        let class = account.and_then(|account| account.terms.resctrl_class.clone());
        let cgroup = core.hierarchy.dir(&held.cgroup);
        workloads.insert(name.clone(), ResctrlWorkload { class, cgroup });
        let of = match &held.target {
            Target::Container(of) => vec![
                ("namespace", of.pod.namespace.clone()),
                ("pod", of.pod.name.clone()),
                ("container", of.container.clone()),
            ],
            _ => vec![("workload", name.clone())],
        };
        labels.insert(name.clone(), of);
    }
    (workloads, labels)
}

#[cfg(test)]
mod tests;

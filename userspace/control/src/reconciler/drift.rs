//! Drift: knobs with a value other than the written one are detected, reported and repaired.
//!
//! # Problem
//! Other programs write the same knobs, and the kernel takes CPUs and nodes away. Drift should be detected within a
//! second, with the process that caused it, but reading all knobs continuously costs too much.
//!
//! # Terms
//! - *watched* cgroup: the kernel reports writes to all knobs that were written here. The other cgroups are polled.
//! - *left* knob: another program keeps writing it, and its value is kept (see [`numaward_enforce::ConflictBackoff`]).
//!
//! # Algorithm
//! Each tick checks the cgroups with reported writes, the repairs that are due, and a part of the rest: polled
//! cgroups within a second, watched ones within a minute, because marks get lost and the kernel's own changes are not
//! reported. A write to an ancestor can narrow a cgroup, so ancestors are watched too, and everything below a written
//! one is checked.
//!
//! The kernel reports a write when it is complete. The new value of a cpuset is visible earlier, because the
//! scheduling domains are rebuilt in between. A check that finds such a knob waits one tick for the name of the
//! writer.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api as api;
use numaward_api::{EventKind, Severity};
use numaward_cgroup::{CgroupPath, KnobWriter, knob::Knob};
use numaward_enforce::{
    AppliedSettings, ConflictBackoff, ConflictPolicy, Drift, DriftCause, DriftKind, DriftVerdict,
};
use numaward_model::EventReport;

use super::{Controller, ControllerEvent, MAINTENANCE_INTERVAL};
use crate::{
    core::{Core, HeldChange, preferred_node, shared_pool},
    spans,
    write_monitor::{ObservedWrites, WriteMonitor},
};

/// Time within which all polled cgroups are checked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time within which all watched cgroups are checked.
const SWEEP_INTERVAL: Duration = Duration::from_mins(1);
/// Minimum delay before a failed repair is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Names of the processes that are, or contain, a kubelet.
const KUBELETS: [&str; 4] = ["kubelet", "kubelite", "k3s-server", "k3s-agent"];
/// Knobs that the kubelet's Memory `QoS` writes.
const MEMORY_QOS: [Knob; 3] = [Knob::MemoryMin, Knob::MemoryLow, Knob::MemoryHigh];
/// PID of systemd. It resets knobs: `daemon-reload` in cgroups below units with `Delegate=`, and wherever it disables a controller.
const SERVICE_MANAGER: u32 = 1;
/// Knobs of an ancestor that restrict the CPUs, nodes or controllers of its descendants.
const NARROWING: [Knob; 4] =
    [Knob::CpusetCpus, Knob::CpusetMems, Knob::CpusetPartition, Knob::SubtreeControl];

/// State of drift detection.
#[derive(Debug)]
pub(super) struct DriftController {
    start: Instant,
    write_monitor: Option<Arc<WriteMonitor>>,
    conflicts: ConflictBackoff,
    /// Watched knobs by cgroup.
    marks: BTreeMap<CgroupPath, BTreeSet<Knob>>,
    /// Applied settings at the last update.
    followed: AppliedSettings,
    /// Cgroups that may have been created again, so that their knobs have to be marked again.
    replaced: BTreeSet<CgroupPath>,
    /// Polled cgroups.
    polled: Rotation<CgroupPath>,
    watched: Rotation<CgroupPath>,
    /// Time of the next check, by cgroup.
    due: BTreeMap<CgroupPath, Duration>,
    /// Drift without a reported writer yet.
    awaited: BTreeSet<(CgroupPath, Knob)>,
    noted: BTreeMap<CgroupPath, BTreeMap<Knob, DriftRecord>>,
}

/// Items that are checked in rotation.
#[derive(Debug)]
pub(super) struct Rotation<T> {
    /// Time within which all items are checked.
    pub(super) within: Duration,
    pub(super) items: BTreeSet<T>,
    /// The item that was checked last.
    last: Option<T>,
}

/// A knob that drifted at least once.
#[derive(Clone, Debug, PartialEq)]
struct DriftRecord {
    drift: Drift,
    state: api::DriftState,
    /// Number of times that the knob drifted.
    count: u64,
    noticed: api::DriftDetection,
    writer: Option<KnobWriter>,
}

impl<T: Clone + Ord> Rotation<T> {
    pub(super) fn new(within: Duration) -> Self {
        Self { within, items: BTreeSet::new(), last: None }
    }

    /// Returns the items to check in this tick.
    pub(super) fn next_batch(&mut self) -> Vec<T> {
        let turns = (self.within.as_millis() / MAINTENANCE_INTERVAL.as_millis()).max(1);
        let count = self.items.len().div_ceil(usize::try_from(turns).unwrap_or(1));
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let items = self.items.range((after, Bound::Unbounded)).chain(&self.items);
        let turn: Vec<T> = items.take(count).cloned().collect();
        self.last = turn.last().cloned();
        turn
    }
}

impl DriftController {
    pub(super) fn new(write_monitor: Option<Arc<WriteMonitor>>) -> Self {
        Self {
            start: Instant::now(),
            write_monitor,
            conflicts: ConflictBackoff::new(ConflictPolicy::default()),
            marks: BTreeMap::new(),
            followed: AppliedSettings::default(),
            replaced: BTreeSet::new(),
            polled: Rotation::new(POLL_INTERVAL),
            watched: Rotation::new(SWEEP_INTERVAL),
            due: BTreeMap::new(),
            awaited: BTreeSet::new(),
            noted: BTreeMap::new(),
        }
    }

    /// Updates the watched cgroups after a change of the applied settings.
    pub(super) fn follow(&mut self, applied: &AppliedSettings) {
        let before = std::mem::replace(&mut self.followed, applied.clone());
        let mut replaced = std::mem::take(&mut self.replaced);
        let mut changed = replaced.clone();
        for path in applied.records().changed_since(before.records()) {
            let id = |applied: &AppliedSettings| applied.get(&path).map(|record| record.id);
            changed.extend(path.ancestors());
            if id(&before) != id(applied) {
                replaced.insert(path);
            }
        }
        if changed.is_empty() {
            return;
        }
        for path in changed {
            self.mark(&path, replaced.contains(&path), applied);
        }
        self.due.retain(|path, _| applied.get(path).is_some());
        self.awaited.retain(|(path, _)| applied.get(path).is_some());
        let is_held = |path: &CgroupPath, knob| {
            applied.get(path).is_some_and(|record| record.written.0.contains_key(&knob))
        };
        self.conflicts.retain(is_held);
        self.noted.retain(|path, knobs| {
            knobs.retain(|knob, _| is_held(path, *knob));
            !knobs.is_empty()
        });
    }

    /// Watches the relevant knobs of a cgroup.
    fn mark(&mut self, path: &CgroupPath, is_replaced: bool, applied: &AppliedSettings) {
        let record = applied.get(path);
        let held = || record.iter().flat_map(|record| record.written.0.keys());
        let mut wanted: BTreeSet<Knob> = held().copied().collect();
        if applied.is_above(path) {
            wanted.insert(Knob::SubtreeControl);
        }
        if wanted.contains(&Knob::SubtreeControl) && !path.is_root() {
            wanted.extend(NARROWING);
        }
        let before = self.marks.remove(path).unwrap_or_default();
        let mut is_watched = false;
        if let Some(write_monitor) = &self.write_monitor {
            before.difference(&wanted).for_each(|knob| write_monitor.remove(path, *knob));
            wanted.retain(|knob| !is_replaced && before.contains(knob) || write_monitor.add(path, *knob));
            is_watched = write_monitor.is_working() && held().all(|knob| wanted.contains(knob));
            if !wanted.is_empty() {
                self.marks.insert(path.clone(), wanted);
            }
        }
        for (round, is_here) in [(&mut self.watched, is_watched), (&mut self.polled, !is_watched)] {
            if record.is_some() && is_here {
                round.items.insert(path.clone());
            } else {
                round.items.remove(path);
            }
        }
    }

    /// Returns the polled and watched cgroups to check in this tick.
    fn next_cgroups(&mut self) -> Vec<CgroupPath> {
        if self.write_monitor.as_ref().is_some_and(|write_monitor| !write_monitor.is_working()) {
            // Writes are not reported any more, so everything is polled.
            self.polled.items.append(&mut self.watched.items);
        }
        let watched = self.watched.next_batch();
        for path in &watched {
            // Marks get lost; setting one twice has no effect.
            if let (Some(write_monitor), Some(knobs)) = (&self.write_monitor, self.marks.get(path)) {
                for knob in knobs {
                    write_monitor.add(path, *knob);
                }
            }
        }
        [watched, self.polled.next_batch()].concat()
    }

    /// Forgets a cgroup that was removed, released or gets new settings.
    fn forget(&mut self, cgroup: &CgroupPath) {
        self.conflicts.forget(cgroup);
        // A new cgroup with this path has knobs that are not marked.
        self.replaced.insert(cgroup.clone());
        self.noted.remove(cgroup);
    }

    /// Returns the drift of a cgroup and its ancestors.
    pub(super) fn drift_of(&self, cgroup: &CgroupPath) -> Vec<api::Drift> {
        let mut above: Vec<_> = cgroup.ancestors().filter_map(|path| self.noted.get(&path)).collect();
        above.reverse();
        above.into_iter().flat_map(BTreeMap::values).map(api::Drift::from).collect()
    }

    fn take(&self) -> ObservedWrites {
        self.write_monitor.as_ref().map(|write_monitor| write_monitor.take()).unwrap_or_default()
    }

    /// Returns true if the kernel reports writes to this knob.
    fn is_watched(&self, drift: &Drift) -> bool {
        self.marks.get(&drift.cgroup).is_some_and(|knobs| knobs.contains(&drift.knob))
    }

    /// Returns true, once per drift, if the kernel has not reported the writer of a watched knob yet. The drift is checked again in
    /// the next tick.
    fn awaits_writer(&mut self, drift: &Drift, now: Duration) -> bool {
        let noted = self.noted.get(&drift.cgroup).and_then(|knobs| knobs.get(&drift.knob));
        let is_standing = noted.is_some_and(|noted| noted.state != api::DriftState::Repaired);
        if is_standing || drift.kind != DriftKind::Rewritten || !self.is_watched(drift) {
            return false;
        }
        let key = (drift.cgroup.clone(), drift.knob);
        if self.awaited.remove(&key) {
            return false;
        }
        self.awaited.insert(key);
        self.due.insert(drift.cgroup.clone(), now);
        true
    }
}

impl Controller for DriftController {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.check(core, now, true),
            ControllerEvent::KnobsWritten(now) => self.check(core, now, false),
            ControllerEvent::MachineChanged(now) => self.check_all(core, now),
            ControllerEvent::SettingsChanged(change) => self.follow_held(change),
            ControllerEvent::StateChanged => self.follow(&core.store.state.applied),
            _ => {}
        }
    }
}

impl From<&DriftRecord> for api::Drift {
    fn from(noted: &DriftRecord) -> Self {
        let DriftRecord { drift, state, count, noticed, writer } = noted;
        Self {
            cgroup: drift.cgroup.to_string(),
            knob: drift.knob.to_string(),
            wanted: drift.wanted.to_string(),
            found: drift.found.as_ref().map(ToString::to_string),
            state: *state,
            count: *count,
            noticed: *noticed,
            writer: writer.as_ref().map(|writer| api::KnobWriter {
                pid: writer.pid,
                command: writer.name.clone(),
                cgroup: writer.cgroup.clone(),
            }),
        }
    }
}

impl DriftRecord {
    /// Returns a description of the writer.
    fn writer_text(&self) -> String {
        match (&self.writer, self.noticed) {
            (Some(writer), _) => writer.to_string(),
            (None, api::DriftDetection::Write) => "a process outside of this PID namespace".to_owned(),
            (None, api::DriftDetection::Check) => "unknown: found by a check".to_owned(),
        }
    }
}

impl DriftRecord {
    /// Returns the event with the drift, the outcome and the writer.
    fn report(&self, outcome: &str) -> EventReport {
        let Drift { cgroup, knob, wanted, found, .. } = &self.drift;
        let mut report = EventReport::new(
            EventKind::Drift,
            format!("{}; {outcome}. Written by: {}.", self.drift, self.writer_text()),
        )
        .detail("cgroup", cgroup)
        .detail("knob", knob)
        .detail("wanted", wanted);
        if let Some(found) = found {
            report = report.detail("found", found);
        }
        if let Some(writer) = &self.writer {
            report = report.detail("writerPid", writer.pid);
            for (key, value) in [("writerCommand", &writer.name), ("writerCgroup", &writer.cgroup)] {
                report = value.iter().fold(report, |report, value| report.detail(key, value));
            }
        }
        match self.state {
            api::DriftState::Left => report.severity(Severity::Critical),
            _ => report,
        }
    }
}

/// Returns the write that can have caused a drift; `None` if none was reported.
fn cause<'a>(drift: &Drift, seen: &'a ObservedWrites) -> Option<&'a Option<KnobWriter>> {
    let of = |cgroup: CgroupPath, knob| seen.knobs.get(&(cgroup, knob));
    let above = |knob| drift.cgroup.ancestors().skip(1).find_map(|above| of(above, knob));
    of(drift.cgroup.clone(), drift.knob).or_else(|| match drift {
        Drift { kind: DriftKind::Ineffective, knob, .. } => {
            above(*knob).or_else(|| above(Knob::CpusetPartition))
        }
        // Disabling and enabling a controller resets its knobs.
        drift if drift.is_reset() => above(Knob::SubtreeControl),
        _ => None,
    })
}

/// Returns true if another program set the CPUs or nodes of a cgroup without a guarantee. It gets them when the cgroup is no longer narrowed.
fn is_narrowed_set(core: &Core, drift: &Drift, cause: Option<&Option<KnobWriter>>) -> bool {
    let Some(Some(writer)) = cause else { return false };
    // systemd writes the properties of units, which the daemon may have set.
    writer.pid != SERVICE_MANAGER
        && matches!(drift.knob, Knob::CpusetCpus | Knob::CpusetMems)
        && !drift.is_reset()
        && !core.store.state.narrowing(&drift.cgroup).is_empty()
}

/// Classifies the cause for the conflict over the knob.
fn drift_cause(drift: &Drift, cause: Option<&Option<KnobWriter>>, is_written: bool) -> DriftCause {
    let is_of_pods = || drift.cgroup.as_str().contains("kubepods");
    let is_kubelet = |writer: &KnobWriter| {
        let is_named = writer.name.as_deref().is_some_and(|name| KUBELETS.contains(&name));
        // With the driver `systemd`, the kubelet writes through systemd, too.
        MEMORY_QOS.contains(&drift.knob) && is_of_pods() && (is_named || writer.pid == SERVICE_MANAGER)
    };
    match cause {
        Some(Some(writer)) if is_kubelet(writer) && drift.is_reset() => DriftCause::KubeletReset,
        Some(Some(writer)) if writer.pid == SERVICE_MANAGER && drift.is_reset() => DriftCause::Reset,
        Some(Some(writer)) if is_kubelet(writer) => DriftCause::Kubelet,
        _ if is_written => DriftCause::Written,
        _ => DriftCause::Unseen,
    }
}

impl DriftController {
    /// Forgets a cgroup after its settings changed.
    pub(super) fn follow_held(&mut self, change: &HeldChange) {
        match change {
            HeldChange::Released { cgroup, .. } | HeldChange::Rewritten(cgroup) => self.forget(cgroup),
            HeldChange::Given(_) => {}
        }
    }

    /// Checks all cgroups after a change of the machine.
    pub(super) fn check_all(&mut self, core: &mut Core, now: Instant) {
        let seen = self.take();
        let paths = core.store.state.applied.iter().map(|(path, _)| path.clone()).collect();
        self.check_cgroup(core, paths, seen, now.duration_since(self.start));
    }

    /// Checks reported writes, due repairs and, with `turn`, a part of the rest.
    pub(super) fn check(&mut self, core: &mut Core, now: Instant, turn: bool) {
        let now = now.duration_since(self.start);
        let seen = self.take();
        let mut paths = BTreeSet::new();
        if seen.everything {
            paths.extend(core.store.state.applied.iter().map(|(path, _)| path.clone()));
        }
        for (path, knob) in seen.knobs.keys() {
            if core.store.state.applied.get(path).is_some_and(|record| record.written.0.contains_key(knob)) {
                paths.insert(path.clone());
            }
            if NARROWING.contains(knob) {
                let below = core.store.state.applied.iter().map(|(path, _)| path);
                paths.extend(below.filter(|below| path.contains(below)).cloned());
            }
        }
        if turn {
            paths.extend(self.due.iter().filter(|(_, due)| **due <= now).map(|(path, _)| path.clone()));
            paths.extend(self.next_cgroups());
        }
        self.check_cgroup(core, paths, seen, now);
    }

    fn check_cgroup(
        &mut self,
        core: &mut Core,
        paths: BTreeSet<CgroupPath>,
        mut seen: ObservedWrites,
        now: Duration,
    ) {
        let mut changed = false;
        for path in paths {
            self.due.remove(&path);
            shared_pool::catch_up(core);
            if core.store.state.applied.get(&path).is_none() || core.is_releasing(&path) {
                // The cgroup was released in this tick, or is being restored.
                continue;
            }
            let drifts = match core.enforcer().drift(&core.store.state.applied, &path) {
                Ok(drifts) => drifts,
                Err(error) if error.is_gone() => continue,
                Err(error) => {
                    tracing::warn!(cgroup = %path, %error, "the cgroup cannot be checked for drift");
                    continue;
                }
            };
            changed |= self.note_holding(core, &path, &drifts, now);
            for drift in drifts {
                if cause(&drift, &seen).is_none() {
                    // The write may have been reported after the last call.
                    let more = self.take();
                    self.due.extend(more.knobs.keys().map(|(path, _)| (path.clone(), now)));
                    seen.knobs.extend(more.knobs);
                    seen.everything |= more.everything;
                }
                if cause(&drift, &seen).is_none() && !seen.everything && self.awaits_writer(&drift, now) {
                    continue;
                }
                self.awaited.remove(&(drift.cgroup.clone(), drift.knob));
                if preferred_node::end_overridden(core, &drift) {
                    changed = true;
                    continue;
                }
                changed |= self.note_drift(core, drift, &seen, now);
            }
        }
        core.effects.view |= changed;
    }

    /// Ends the reported drift of knobs that have their written values again. Returns true if that changed a state.
    fn note_holding(&mut self, core: &Core, path: &CgroupPath, drifts: &[Drift], now: Duration) -> bool {
        let holds = |knob: Knob| drifts.iter().all(|drift| drift.knob != knob);
        if self.conflicts.is_contested(path)
            && let Some(record) = core.store.state.applied.get(path)
        {
            for knob in record.written.0.keys().filter(|knob| holds(**knob)) {
                self.conflicts.holds(path, *knob, now);
            }
        }
        let mut is_changed = false;
        let Some(noted) = self.noted.get_mut(path) else { return false };
        noted.retain(|knob, noted| {
            if !holds(*knob) || noted.state == api::DriftState::Repaired {
                return true;
            }
            is_changed = true;
            tracing::info!(cgroup = %path, %knob, "the knob has the written value again");
            // Values that the kernel restored have no writer.
            let was_written = noted.state != api::DriftState::Ineffective;
            noted.state = api::DriftState::Repaired;
            was_written
        });
        is_changed
    }

    /// Takes note of a drift and repairs it if it is time; returns true if the change has to be published.
    fn note_drift(&mut self, core: &mut Core, drift: Drift, seen: &ObservedWrites, now: Duration) -> bool {
        let cause = cause(&drift, seen);
        let is_written = cause.is_some() || seen.everything || !self.is_watched(&drift);
        // A drift that waits for its repair still has the cause of its detection.
        let noted = self.noted.get(&drift.cgroup).and_then(|knobs| knobs.get(&drift.knob));
        let awaited = noted.filter(|noted| noted.state == api::DriftState::Waiting && noted.drift == drift);
        let earlier = awaited.and_then(|noted| noted.writer.as_ref()).map(|writer| Some(writer.clone()));
        let how = drift_cause(&drift, cause.or(earlier.as_ref()), is_written);
        let verdict = match drift.kind {
            DriftKind::Ineffective => None,
            DriftKind::Rewritten => Some(self.conflicts.drifted(&drift.cgroup, drift.knob, how, now)),
        };
        let by_kubelet = matches!(how, DriftCause::Kubelet | DriftCause::KubeletReset);
        let (path, knob) = (drift.cgroup.clone(), drift.knob);
        let before = self.noted.get(&path).and_then(|knobs| knobs.get(&knob)).cloned();
        let before = before.unwrap_or_else(|| DriftRecord {
            drift: drift.clone(),
            state: api::DriftState::Repaired,
            count: 0,
            noticed: api::DriftDetection::Check,
            writer: None,
        });
        let mut noted = before.clone();
        // A drift that persists keeps the writer of its first detection.
        if cause.is_some() || noted.state == api::DriftState::Repaired {
            noted.noticed =
                if cause.is_some() { api::DriftDetection::Write } else { api::DriftDetection::Check };
            noted.writer = cause.cloned().flatten();
        }
        noted.drift = drift;
        let mut message = None;
        match verdict {
            None => {
                noted.state = api::DriftState::Ineffective;
                if before.state != noted.state || before.drift.found != noted.drift.found {
                    noted.count += 1;
                    message = Some("a part of the guarantee is not available".to_owned());
                }
            }
            Some(DriftVerdict::Repair) => {
                noted.count += 1;
                if !by_kubelet {
                    // The kubelet writes many cgroups at once, and is yielded to, or resets some once a minute: that is no reason for an
                    // alert.
                    core.metrics.drifted(knob);
                }
                // The kubelet changes the limits of a pod after a resize.
                if knob == Knob::CpuMax || is_narrowed_set(core, &noted.drift, cause) {
                    core.note_found(&noted.drift);
                    core.effects.isolate |= knob == Knob::CpusetCpus;
                }
                let _tree = spans::reconcile();
                let span = spans::knobs(1);
                let repaired = core.repair(&noted.drift);
                if let Err(error) = &repaired {
                    spans::failed(&span, error);
                }
                drop(span);
                match repaired {
                    Ok(report) => {
                        noted.state = api::DriftState::Repaired;
                        let is_known = how == DriftCause::KubeletReset && noted.count > 1;
                        message = (!is_known).then(|| "written again".to_owned());
                        core.metrics.enforced(&report);
                        core.metrics.repaired(knob);
                        core.execution.migrations.add(report.moving);
                    }
                    Err(error) => {
                        noted.state = api::DriftState::Waiting;
                        self.due.insert(path.clone(), now + RETRY_INTERVAL);
                        message = Some(format!("cannot be written again: {error}"));
                    }
                }
            }
            Some(DriftVerdict::Wait(until)) => {
                noted.state = api::DriftState::Waiting;
                self.due.insert(path.clone(), until);
            }
            Some(DriftVerdict::GiveUp) => {
                noted.state = api::DriftState::Left;
                let outcome = if by_kubelet {
                    "the kubelet's Memory QoS writes it too, and its value is kept: memory below this cgroup is protected and throttled as the \
                     kubelet decides"
                } else {
                    "another program keeps writing it, and its value is kept"
                };
                message = Some(outcome.to_owned());
            }
            Some(DriftVerdict::GivenUp) => noted.state = api::DriftState::Left,
        }
        if let Some(message) = message {
            // Drift of an ancestor concerns no particular workload.
            let is_held = core.store.state.guarantees.values().any(|held| held.cgroup == path);
            let mut report = noted.report(&message);
            if by_kubelet {
                report = report.severity(Severity::Warning);
            }
            core.report(is_held.then_some(&path), report);
        }
        let is_new = before != noted;
        self.noted.entry(path).or_default().insert(knob, noted);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_cgroup::CgroupId;
    use numaward_config::Config;
    use numaward_enforce::{Owner, Record};
    use numaward_guarantee::request::Request;
    use numaward_model::port::ObservedHost as _;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::{
        core::release,
        reconciler::{ReconcilerLoop, controllers::Controllers, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    #[test]
    fn conflict_ends_with_cgroup() {
        let (gone, kept): (CgroupPath, CgroupPath) = ("/pod".parse().unwrap(), "/kept".parse().unwrap());
        let knob = Knob::MemoryMin;
        let mut record = Record::new(CgroupId(7), Owner::Cgroupfs);
        record.written.0.insert(knob, knob.parse("1").unwrap());
        let mut applied = AppliedSettings::default();
        applied.insert(kept.clone(), record.clone().into());
        let before = applied.clone();
        applied.insert(gone.clone(), record.into());
        let mut controller = DriftController::new(None);
        controller.follow(&applied);
        for path in [&gone, &kept] {
            controller.conflicts.drifted(path, knob, DriftCause::Written, Duration::ZERO);
        }
        controller.follow(&before);
        assert!(controller.conflicts.is_contested(&kept));
        assert!(!controller.conflicts.is_contested(&gone));
    }

    #[test]
    fn reset_by_systemd_is_no_conflict() {
        let inner: CgroupPath = "/machine.slice/vm.scope/vcpu0".parse().unwrap();
        let knob = Knob::CpusetCpus;
        let drift = |found: Option<&str>| Drift {
            cgroup: inner.clone(),
            knob,
            wanted: knob.parse("1").unwrap(),
            found: found.map(|found| knob.parse(found).unwrap()),
            kind: DriftKind::Rewritten,
        };
        let seen = |path: &str, knob, pid| {
            let writer = KnobWriter { pid, name: None, cgroup: None };
            let knobs = [((path.parse().unwrap(), knob), Some(writer))].into();
            ObservedWrites { knobs, everything: false }
        };
        let above = |pid| seen("/machine.slice", Knob::SubtreeControl, pid);
        let itself = |pid| seen(inner.as_str(), knob, pid);
        for (found, seen, expected) in [
            (None, above(1), DriftCause::Reset),
            (Some(""), above(1), DriftCause::Reset),
            (Some(""), itself(1), DriftCause::Reset),
            (Some(""), itself(7), DriftCause::Written),
            (Some(""), above(7), DriftCause::Written),
            (Some("0-3"), itself(1), DriftCause::Written),
            (Some("0-3"), above(1), DriftCause::Unseen),
        ] {
            let drift = drift(found);
            let cause = cause(&drift, &seen);
            assert_eq!(drift_cause(&drift, cause, cause.is_some()), expected, "{found:?} {seen:?}");
        }
    }

    #[test]
    fn resets_by_systemd_never_end_repairs() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        // systemd does not manage the cgroups that a unit with `Delegate=` makes.
        let inner = "system.slice/db.service/payload";
        for path in ["", "system.slice", "system.slice/db.service", inner, "other"] {
            fixture::cgroup(&root.join(path), &host.machine());
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        for (name, path) in [("inner", inner), ("other", "other")] {
            let request = Request::new(&api::AllocationRequest {
                cpus: Some(api::Cpus::whole(1)),
                ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{path}")), "64Mi")
            });
            assert!(reconciler.admit(&request.unwrap(), false).is_ok());
        }
        let knobs = [inner, "other"].map(|path| root.join(path).join("cpuset.cpus"));
        let wanted = knobs.each_ref().map(|knob| fixture::line(knob));
        let ReconcilerLoop { controllers: Controllers { drift, .. }, core, .. } = &mut reconciler;
        let mut repaired = [0, 0];
        for second in 0..30_u64 {
            // The administrator empties the other one.
            for (index, (path, pid)) in [(inner, SERVICE_MANAGER), ("other", 77)].into_iter().enumerate() {
                fs::write(&knobs[index], "\n").unwrap();
                let path: CgroupPath = format!("/{path}").parse().unwrap();
                let writer = KnobWriter { pid, name: None, cgroup: None };
                let seen = ObservedWrites {
                    knobs: [((path.clone(), Knob::CpusetCpus), Some(writer))].into(),
                    everything: false,
                };
                drift.check_cgroup(core, [path].into(), seen, Duration::from_secs(second));
                repaired[index] += u32::from(fixture::line(&knobs[index]) == wanted[index]);
            }
        }
        assert_eq!(repaired[0], 30, "as often as systemd resets it");
        assert!(repaired[1] <= 10, "not against an administrator: {repaired:?}");
    }

    #[test]
    fn narrowed_cgroup_gets_set_of_administrator() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        for path in ["", "a", "b", "c"] {
            fixture::cgroup(&root.join(path), &host.machine());
        }
        let config: Config = serde_json::from_str(r#"{"enforcement": {"herding": {"mode": "on"}}}"#).unwrap();
        let config = Config { state_directory: dir.path().join("state"), ..config };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(2)),
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "64Mi")
        });
        assert!(reconciler.admit(&request.unwrap(), false).is_ok());
        let cpus = || ["b", "c"].map(|path| fixture::line(&root.join(path).join("cpuset.cpus")));
        assert_eq!(cpus(), ["0,3-7", "0,3-7"]);
        let ReconcilerLoop { controllers: Controllers { drift, .. }, core, .. } = &mut reconciler;
        for (path, set) in [("b", "1-4"), ("c", "4-5")] {
            fs::write(root.join(path).join("cpuset.cpus"), format!("{set}\n")).unwrap();
            let path: CgroupPath = format!("/{path}").parse().unwrap();
            let writer = KnobWriter { pid: 77, name: None, cgroup: None };
            let knobs = [((path.clone(), Knob::CpusetCpus), Some(writer))].into();
            let seen = ObservedWrites { knobs, everything: false };
            drift.check_cgroup(core, [path].into(), seen, Duration::ZERO);
        }
        reconciler.process_effects();
        assert_eq!(cpus(), ["3-4", "4-5"], "within the set of the administrator");
        release::release(&mut reconciler.core, "a").unwrap();
        reconciler.process_effects();
        assert_eq!(cpus(), ["1-4", "4-5"]);
    }

    #[test]
    fn kubelet_writes_memory_qos() {
        let drift = |knob: Knob| Drift {
            cgroup: "/kubepods.slice".parse().unwrap(),
            knob,
            wanted: knob.parse("4096").unwrap(),
            found: Some(knob.parse("8192").unwrap()),
            kind: DriftKind::Rewritten,
        };
        let found_by = |drift: &Drift, pid, name: &str| {
            let writer = Some(KnobWriter { pid, name: Some(name.to_owned()), cgroup: None });
            drift_cause(drift, Some(&writer), true)
        };
        let found = |knob, name: &str| found_by(&drift(knob), 7, name);
        for kubelet in KUBELETS {
            assert_eq!(found(Knob::MemoryMin, kubelet), DriftCause::Kubelet);
        }
        let reset = Drift { found: Some(Knob::MemoryMin.parse("0").unwrap()), ..drift(Knob::MemoryMin) };
        assert_eq!(found_by(&reset, 7, "kubelet"), DriftCause::KubeletReset);
        assert_eq!(found_by(&reset, 1, "systemd"), DriftCause::KubeletReset);
        assert_eq!(found_by(&reset, 7, "sh"), DriftCause::Written);
        assert_eq!(found(Knob::MemoryHigh, "kubelet"), DriftCause::Kubelet);
        assert_eq!(found(Knob::CpusetCpus, "kubelet"), DriftCause::Written);
        assert_eq!(found(Knob::MemoryMin, "sh"), DriftCause::Written);
        assert_eq!(found_by(&drift(Knob::MemoryMin), 1, "systemd"), DriftCause::Kubelet);
        let other = Drift { cgroup: "/a.slice".parse().unwrap(), ..drift(Knob::MemoryMin) };
        assert_eq!(found_by(&other, 1, "systemd"), DriftCause::Written);
        let other = Drift { cgroup: "/a.slice".parse().unwrap(), ..reset };
        assert_eq!(found_by(&other, 1, "systemd"), DriftCause::Reset);
        assert_eq!(found_by(&other, 7, "kubelet"), DriftCause::Written);
    }

    #[test]
    fn kubelet_writes_do_not_count() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        for path in ["", "kubepods", "kubepods/pod"] {
            fixture::cgroup(&root.join(path), &host.machine());
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let path: CgroupPath = "/kubepods/pod".parse().unwrap();
        let request =
            Request::new(&api::AllocationRequest::new("pod", api::Target::Cgroup(path.to_string()), "64Mi"));
        assert!(reconciler.admit(&request.unwrap(), false).is_ok());
        let ReconcilerLoop { controllers: Controllers { drift, .. }, core, .. } = &mut reconciler;
        let knob = root.join("kubepods/pod/memory.min");
        let wanted = fixture::line(&knob);
        let counted = |core: &Core| {
            let mut registry = Registry::default();
            core.metrics.register(&mut registry);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let line =
                text.lines().find(|line| line.starts_with("drift_total{knob=\"memory.min\"}")).unwrap();
            line.rsplit(' ').next().unwrap().to_owned()
        };
        // Resets and the first write of the kubelet are repaired, and the second write is left. A reset within a second after another one is
        // repaired when that is over, also if no write is seen then.
        for (millis, writer, value, count, is_repaired) in [
            (0, Some("kubelet"), "0", "0", true),
            (60_000, Some("kubelet"), "0", "0", true),
            (60_200, Some("kubelet"), "0", "0", false),
            (61_200, None, "0", "0", true),
            (120_000, Some("kubelet"), "1048576", "0", true),
            (121_000, Some("kubelet"), "1048576", "0", false),
            (2_000_000, Some("sh"), "1048576", "1", true),
        ] {
            fs::write(&knob, format!("{value}\n")).unwrap();
            let write = writer.map(|name| {
                let writer = KnobWriter { pid: 77, name: Some(name.to_owned()), cgroup: None };
                ((path.clone(), Knob::MemoryMin), Some(writer))
            });
            let seen = ObservedWrites { knobs: write.into_iter().collect(), everything: false };
            drift.check_cgroup(core, [path.clone()].into(), seen, Duration::from_millis(millis));
            assert_eq!(counted(core), count, "after {millis} ms");
            assert_eq!(fixture::line(&knob) == wanted, is_repaired, "after {millis} ms");
        }
    }

    #[test]
    fn waits_once_for_writer() {
        let cgroup: CgroupPath = "/a".parse().unwrap();
        let knob = Knob::CpusetCpus;
        let drift = |kind| Drift {
            cgroup: cgroup.clone(),
            knob,
            wanted: knob.parse("1").unwrap(),
            found: Some(knob.parse("0-7").unwrap()),
            kind,
        };
        let rewritten = drift(DriftKind::Rewritten);
        let now = Duration::from_secs(1);
        let mut controller = DriftController::new(None);
        assert!(!controller.awaits_writer(&rewritten, now), "nothing is reported");
        controller.marks.insert(cgroup.clone(), BTreeSet::from([knob]));
        assert!(!controller.awaits_writer(&drift(DriftKind::Ineffective), now), "no program wrote it");
        assert!(controller.awaits_writer(&rewritten, now));
        assert_eq!(controller.due.get(&cgroup), Some(&now), "it is looked at again");
        assert!(!controller.awaits_writer(&rewritten, now), "once");
        assert!(controller.awaits_writer(&rewritten, now), "and so the next time");

        controller.awaited.clear();
        let noted = DriftRecord {
            drift: rewritten.clone(),
            state: api::DriftState::Waiting,
            count: 1,
            noticed: api::DriftDetection::Check,
            writer: None,
        };
        controller.noted.insert(cgroup.clone(), BTreeMap::from([(knob, noted)]));
        assert!(!controller.awaits_writer(&rewritten, now), "it has been reported already");
    }
}

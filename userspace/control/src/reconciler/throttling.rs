//! Detection of workloads that make no progress above `memory.high`.
//!
//! # Problem
//! Above `memory.high` the kernel reclaims memory and delays each allocation by up to two seconds. If nothing can be
//! reclaimed, the workload neither makes progress nor is it killed.
//!
//! # Algorithm
//! The kernel reports changes of `memory.events` for each workload with `memory.high`. After a change, until nothing
//! happens for ten seconds, two values are read every two seconds: the number of throttled allocations, and the time
//! in which all tasks waited (`full` of `memory.pressure`). If changes are not reported, all workloads are read.
//!
//! A workload *stalls* if, within ten seconds, it was throttled and waited for nine tenths of the time. An event
//! reports this. With `memoryQos.raiseHighOnStall`, `memory.high` is raised half the way to the limit, and at last
//! removed: the workload then makes progress, or is killed at its limit and restarted.
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy, Notice, WatchSubject, knob::Limit, read};
use numaward_enforce::SettingsChange;
use numaward_guarantee::state::State;
use numaward_model::{EventReport, Settings};
use numaward_topology::Bytes;

use super::{Controller, ControllerEvent, notices::Notices};
use crate::core::{Core, shared_pool};

/// Interval between samples of a workload.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// Period over which a stall is detected.
const STALL_WINDOW: Duration = Duration::from_secs(10);
/// Divisor: within 1/64 of the limit, `memory.high` is removed instead of raised.
const REMOVE_HIGH_DIVISOR: u64 = 64;

/// Stall detection for the workloads with `memory.high`.
#[derive(Debug)]
pub(super) struct Throttling {
    notices: Notices,
    last_sampled: Option<Instant>,
    limited: BTreeMap<String, LimitedWorkload>,
    /// True if the state has changed since `limited` was updated.
    pub(super) is_outdated: bool,
    /// The workloads that are sampled.
    workloads: BTreeMap<String, StallSamples>,
}

/// A workload with `memory.high`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LimitedWorkload {
    cgroup: CgroupPath,
    id: CgroupId,
    high: Bytes,
}

/// Samples of one workload.
#[derive(Debug, Default)]
struct StallSamples {
    samples: VecDeque<StallSample>,
    stalls: bool,
}

/// Values of a cgroup at one time.
#[derive(Clone, Copy, Debug)]
struct StallSample {
    at: Instant,
    /// Total time in which all tasks waited for memory.
    waited: Duration,
    /// Total number of throttled allocations.
    throttled: u64,
}

impl StallSamples {
    /// Adds a sample. Returns true if the workload begins to stall.
    fn take(&mut self, sample: StallSample) -> bool {
        self.samples.push_back(sample);
        // The oldest sample is at least as old as the window.
        while self.samples.get(1).is_some_and(|second| sample.at.duration_since(second.at) >= STALL_WINDOW) {
            self.samples.pop_front();
        }
        let stalls = self.samples.front().is_some_and(|first| {
            let time = sample.at.duration_since(first.at);
            let waited = sample.waited.saturating_sub(first.waited);
            time >= STALL_WINDOW && sample.throttled > first.throttled && waited * 10 >= time * 9
        });
        stalls && !std::mem::replace(&mut self.stalls, stalls) || {
            self.stalls = stalls;
            false
        }
    }

    /// Returns true if the workload was not throttled for the whole window.
    fn is_calm(&self) -> bool {
        let (first, last) = (self.samples.front(), self.samples.back());
        first.zip(last).is_some_and(|(first, last)| {
            last.at.duration_since(first.at) >= STALL_WINDOW && last.throttled == first.throttled
        })
    }
}

impl Throttling {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        Self {
            notices: Notices::new(hierarchy),
            last_sampled: None,
            limited: BTreeMap::new(),
            is_outdated: true,
            workloads: BTreeMap::new(),
        }
    }

    pub(super) fn stalls(&self, name: &str) -> bool {
        self.workloads.get(name).is_some_and(|history| history.stalls)
    }
}

impl Controller for Throttling {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.sample(core, now),
            ControllerEvent::StateChanged => self.is_outdated = true,
            _ => {}
        }
    }
}

/// Returns the next `memory.high` of a workload that stalls at `high`.
fn next_high(high: Bytes, ceiling: Bytes) -> Limit {
    let room = ceiling.0.saturating_sub(high.0);
    if room <= ceiling.0 / REMOVE_HIGH_DIVISOR { Limit::Max } else { Limit::Bytes(Bytes(high.0 + room / 2)) }
}

impl Throttling {
    /// Samples the workloads that may be throttled.
    pub(super) fn sample(&mut self, core: &mut Core, now: Instant) {
        if self.last_sampled.is_some_and(|last_sampled| now.duration_since(last_sampled) < SAMPLE_INTERVAL) {
            return;
        }
        self.last_sampled = Some(now);
        if std::mem::take(&mut self.is_outdated) {
            self.update_limited(&core.store.state);
        }
        let mut notified = BTreeSet::new();
        let mut is_everything = !self.notices.is_working();
        for notice in self.notices.read() {
            match notice {
                Notice::ChildChanged(path) | Notice::Changed(path, _) => drop(notified.insert(path)),
                Notice::Overflow => is_everything = true,
            }
        }
        for (name, limited) in &self.limited {
            if is_everything || notified.contains(&limited.cgroup) {
                self.workloads.entry(name.clone()).or_default();
            }
        }
        let candidates: Vec<String> = self.workloads.keys().cloned().collect();
        for name in candidates {
            let Some(LimitedWorkload { cgroup, high, .. }) = self.limited.get(&name).cloned() else {
                continue;
            };
            let dir = core.hierarchy.dir(&cgroup);
            // Without these files there are no samples: the cgroup was removed, or the kernel has no PSI.
            let (Ok(events), Ok(pressure)) = (read::memory_events(&dir), read::memory_pressure(&dir)) else {
                continue;
            };
            let sample = StallSample { at: now, waited: pressure.full, throttled: events.high };
            let history = self.workloads.entry(name.clone()).or_default();
            let before = history.stalls;
            let begins = history.take(sample);
            let changed = history.stalls != before;
            if history.is_calm() {
                self.workloads.remove(&name);
            }
            core.effects.view |= changed;
            if begins {
                self.handle_stall(core, &name, &cgroup, high);
            }
        }
    }

    /// Updates the workloads with `memory.high`.
    fn update_limited(&mut self, state: &State) {
        let limited: BTreeMap<String, LimitedWorkload> = state
            .guarantees
            .iter()
            .filter_map(|(name, held)| match state.applied.get(&held.cgroup)?.settings.memory_high? {
                Limit::Bytes(high) => {
                    Some((name.clone(), LimitedWorkload { cgroup: held.cgroup.clone(), id: held.id, high }))
                }
                Limit::Max => None,
            })
            .collect();
        let is_same = |a: &LimitedWorkload, b: Option<&LimitedWorkload>| {
            b.is_some_and(|b| (&a.cgroup, a.id) == (&b.cgroup, b.id))
        };
        let before = std::mem::take(&mut self.limited);
        for (name, ended) in before.iter().filter(|(name, ended)| !is_same(ended, limited.get(*name))) {
            self.notices.unwatch(&ended.cgroup, WatchSubject::Memory);
            self.workloads.remove(name);
        }
        for (name, new) in limited.iter().filter(|(name, new)| !is_same(new, before.get(*name))) {
            self.notices.watch(&new.cgroup, WatchSubject::Memory);
            // The workload may have been throttled before the watch.
            self.workloads.entry(name.clone()).or_default();
        }
        self.limited = limited;
    }

    fn handle_stall(&mut self, core: &mut Core, name: &str, cgroup: &CgroupPath, high: Bytes) {
        core.metrics.stalled();
        let raised =
            core.config.memory_qos.raise_high_on_stall.then(|| self.raise_high(core, name, cgroup, high));
        let outcome = match &raised {
            None => "memoryQos.raiseHighOnStall is off, so memory.high is not changed".to_owned(),
            Some(Ok(Limit::Max)) => "memory.high is removed".to_owned(),
            Some(Ok(Limit::Bytes(now))) => format!("memory.high is raised to {now}"),
            Some(Err(error)) => format!("memory.high cannot be raised: {error}"),
        };
        let message =
            format!("{name} is slowed down at memory.high ({high}) and makes no progress; {outcome}.");
        let report = EventReport::new(EventKind::Stall, message).detail("memoryHigh", high.0);
        let report = match raised {
            None | Some(Err(_)) => report.severity(Severity::Critical),
            Some(Ok(_)) => report,
        };
        core.report(Some(cgroup), report);
    }

    /// Raises `memory.high` and returns the new value.
    fn raise_high(
        &mut self,
        core: &mut Core,
        name: &str,
        cgroup: &CgroupPath,
        high: Bytes,
    ) -> Result<Limit, String> {
        let Some(held) = core.store.state.guarantees.get(name) else {
            return Err("the guarantee was released".to_owned());
        };
        let ceiling = match held.settings.memory_max {
            Some(Limit::Bytes(max)) => max,
            _ => Bytes(u64::MAX),
        };
        let to = next_high(high, ceiling);
        let settings = Settings { memory_high: Some(to), ..held.settings.clone() };
        let mut change = core.begin();
        let plan = change.plan(SettingsChange::Hold(cgroup.clone(), settings.clone()));
        let plan = plan.map_err(|error| error.to_string())?;
        if let Some(held) = change.state().guarantees.get_mut(name) {
            held.settings = settings;
        }
        change.enforce(plan).map_err(|refused| refused.to_string())?;
        core.metrics.raised();
        // The next window begins now.
        self.workloads.insert(name.to_owned(), StallSamples::default());
        shared_pool::note_guarantees_changed(core);
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use super::*;
    use crate::{
        reconciler::{AdmissionOutcome, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };
    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::request::Request;

    /// Runs a workload with a limit of four times its guaranteed memory, which stalls at half of the limit. Returns
    /// `memory.high`, true if the API shows the workload as stalled, and the events.
    fn stalled(raise: bool) -> (String, bool, Vec<(Option<CgroupPath>, EventReport)>) {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("cgroup"), Arc::new(TestHost::small()));
        let cgroup = root.join("a");
        for dir in [&root, &cgroup] {
            fixture::cgroup(dir, &host.machine.lock().unwrap());
        }
        let say = |throttled: u32, waited: u32| {
            let events = format!("low 0\nhigh {throttled}\nmax 0\noom 0\noom_kill 0\n");
            fs::write(cgroup.join("memory.events"), events).unwrap();
            let line = format!("avg10=0.00 avg60=0.00 avg300=0.00 total={waited}000000");
            fs::write(cgroup.join("memory.pressure"), format!("some {line}\nfull {line}\n")).unwrap();
        };
        say(0, 0);
        let config = format!(
            r#"{{"memoryThrottlingFactor": 0.5, "memoryQos": {{"raiseHighOnStall": {raise}}}, "stateDirectory": {:?}}}"#,
            dir.path().join("state")
        );
        let config: Config = serde_json::from_str(&config).unwrap();
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(1)),
            memory_limit: Some("1Gi".to_owned()),
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
        });
        assert!(matches!(reconciler.admit(&request.unwrap(), false), Ok(AdmissionOutcome::Admitted(_))));
        let high = || fixture::line(&cgroup.join("memory.high"));
        assert_eq!(high(), (640_u64 << 20).to_string());

        let start = Instant::now();
        let mut at = |seconds: u32| {
            let now = start + Duration::from_secs(seconds.into());
            reconciler.controllers.throttling.sample(&mut reconciler.core, now);
            reconciler.publish();
            reconciler.read_model.allocation("a").unwrap().stalled
        };
        for seconds in [0, 2, 4, 6, 8] {
            assert!(!at(seconds), "it may still get on");
            say(seconds + 1, seconds + 2);
        }
        let is_stalled = at(10);
        let happened = host.happened.lock().unwrap().clone();
        (high(), is_stalled, happened)
    }

    #[test]
    fn stall_is_reported_and_raises_high() {
        for (raise, mib, outcome, severity) in [
            (false, 640_u64, "raiseHighOnStall is off, so memory.high is not changed", Severity::Critical),
            (true, 832, "memory.high is raised to 832Mi", Severity::Warning),
        ] {
            let (high, is_stalled, happened) = stalled(raise);
            assert_eq!((high, is_stalled), ((mib << 20).to_string(), !raise));
            let [(cgroup, report)] = &happened[..] else { panic!("{happened:?}") };
            assert_eq!(cgroup.as_ref().map(CgroupPath::as_str), Some("/a"));
            let reported = format!("{report:?}");
            assert!(
                reported.contains("a is slowed down at memory.high (640Mi) and makes no progress"),
                "{reported}"
            );
            assert!(reported.contains(outcome) && reported.contains(&format!("{severity:?}")), "{reported}");
        }
    }

    #[test]
    fn throttled_and_waiting_is_stalled() {
        let start = Instant::now();
        let mut history = StallSamples::default();
        let mut take = |seconds: u64, waited: u64, throttled: u64| {
            let (at, waited) = (start + Duration::from_secs(seconds), Duration::from_millis(waited));
            let begins = history.take(StallSample { at, waited, throttled });
            (begins, history.stalls)
        };
        assert_eq!(take(0, 0, 0), (false, false));
        assert_eq!(take(8, 8_000, 8), (false, false), "the window is not over");
        assert_eq!(take(10, 9_500, 9), (true, true), "reported once");
        assert_eq!(take(12, 11_500, 9), (false, true));
        assert_eq!(take(18, 17_500, 9), (false, true), "throttled within the window");
        assert_eq!(take(22, 20_000, 9), (false, false), "the workload waits without being throttled");
        assert_eq!(take(24, 21_900, 10), (false, false), "the workload makes progress");
        assert_eq!(take(34, 31_900, 11), (true, true));
    }

    #[test]
    fn calm_workload_is_not_sampled() {
        let start = Instant::now();
        let mut history = StallSamples::default();
        let mut calm = |seconds: u64, throttled: u64| {
            let at = start + Duration::from_secs(seconds);
            history.take(StallSample { at, waited: Duration::ZERO, throttled });
            history.is_calm()
        };
        assert!(!calm(0, 3));
        assert!(!calm(8, 3));
        assert!(!calm(10, 4));
        assert!(!calm(18, 4));
        assert!(calm(20, 4));
    }

    #[test]
    fn high_rises_to_limit_in_steps() {
        let (mut high, ceiling) = (Bytes::mib(64), Bytes::mib(512));
        let mut steps = Vec::new();
        while let Limit::Bytes(next) = next_high(high, ceiling) {
            assert!(next > high && next < ceiling);
            steps.push(next.0 >> 20);
            high = next;
        }
        assert_eq!(steps, [288, 400, 456, 484, 498, 505]);
        assert_eq!(next_high(ceiling, ceiling), Limit::Max);
    }
}

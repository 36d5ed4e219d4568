//! Workloads that are slowed down at `memory.high` and do not get on.
//!
//! Problem: above `memory.high` the kernel reclaims, and puts the workload to sleep for up to two seconds at each
//! allocation. Where there is nothing to reclaim, it neither gets on nor is it killed: it hangs.
//!
//! Algorithm: of a workload for which we set `memory.high`, the kernel reports when `memory.events` changes. From then on,
//! until nothing happened for ten seconds, how often it was throttled and how long all of its tasks waited at once
//! (`full` of `memory.pressure`) is read every two seconds; always, where nothing is reported. It *stalls* when, over ten
//! seconds, it was throttled and waited for nine tenths of the time. That is reported, and if it is configured
//! (`memoryQos.raiseHighOnStall`), `memory.high` is raised half the way to the limit, and at last taken away: then the
//! workload gets on, or is killed at its limit and starts anew.
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

use super::notices::Notices;
use crate::core::Core;

/// How often each workload is looked at.
const PACE: Duration = Duration::from_secs(2);
/// Over which time it has to have waited.
const WINDOW: Duration = Duration::from_secs(10);
/// A workload whose limit is no farther above than this share gets no limit but that one.
const CLOSE: u64 = 64;

/// The workloads with `memory.high`.
#[derive(Debug)]
pub(super) struct Throttling {
    notices: Notices,
    looked: Option<Instant>,
    limited: BTreeMap<String, Limited>,
    /// Whether other workloads are limited since, or otherwise.
    pub(super) is_outdated: bool,
    /// Those that are looked at.
    workloads: BTreeMap<String, Waits>,
}

/// A workload with `memory.high`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limited {
    cgroup: CgroupPath,
    id: CgroupId,
    high: Bytes,
}

/// What is known of one.
#[derive(Debug, Default)]
struct Waits {
    samples: VecDeque<Sample>,
    stalls: bool,
}

/// What a cgroup's files said.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    /// How long all tasks waited.
    waited: Duration,
    /// How often it was throttled.
    throttled: u64,
}

impl Waits {
    /// Takes a sample; `true` if the workload begins to stall.
    fn take(&mut self, sample: Sample) -> bool {
        self.samples.push_back(sample);
        // One sample stays that is as old as the window.
        while self.samples.get(1).is_some_and(|second| sample.at.duration_since(second.at) >= WINDOW) {
            self.samples.pop_front();
        }
        let stalls = self.samples.front().is_some_and(|first| {
            let time = sample.at.duration_since(first.at);
            let waited = sample.waited.saturating_sub(first.waited);
            time >= WINDOW && sample.throttled > first.throttled && waited * 10 >= time * 9
        });
        stalls && !std::mem::replace(&mut self.stalls, stalls) || {
            self.stalls = stalls;
            false
        }
    }

    /// Whether it was not throttled for as long as it was looked at.
    fn is_calm(&self) -> bool {
        let (first, last) = (self.samples.front(), self.samples.back());
        first.zip(last).is_some_and(|(first, last)| {
            last.at.duration_since(first.at) >= WINDOW && last.throttled == first.throttled
        })
    }
}

impl Throttling {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        Self {
            notices: Notices::new(hierarchy),
            looked: None,
            limited: BTreeMap::new(),
            is_outdated: true,
            workloads: BTreeMap::new(),
        }
    }

    /// Whether this workload stalls.
    pub(super) fn stalls(&self, name: &str) -> bool {
        self.workloads.get(name).is_some_and(|waits| waits.stalls)
    }
}

/// The next `memory.high` of a workload that stalls at `high`.
fn raised(high: Bytes, ceiling: Bytes) -> Limit {
    let room = ceiling.0.saturating_sub(high.0);
    if room <= ceiling.0 / CLOSE { Limit::Max } else { Limit::Bytes(Bytes(high.0 + room / 2)) }
}

impl Throttling {
    /// Looks at the workloads that may be throttled.
    pub(super) fn look(&mut self, core: &mut Core, now: Instant) {
        if self.looked.is_some_and(|looked| now.duration_since(looked) < PACE) {
            return;
        }
        self.looked = Some(now);
        if std::mem::take(&mut self.is_outdated) {
            self.follow_limited(&core.store.state);
        }
        let mut heard = BTreeSet::new();
        let mut is_everything = !self.notices.work();
        for notice in self.notices.read() {
            match notice {
                Notice::ChildChanged(path) | Notice::Changed(path, _) => drop(heard.insert(path)),
                Notice::Overflow => is_everything = true,
            }
        }
        for (name, limited) in &self.limited {
            if is_everything || heard.contains(&limited.cgroup) {
                self.workloads.entry(name.clone()).or_default();
            }
        }
        let looked_at: Vec<String> = self.workloads.keys().cloned().collect();
        for name in looked_at {
            let Some(Limited { cgroup, high, .. }) = self.limited.get(&name).cloned() else {
                continue;
            };
            let dir = core.hierarchy.dir(&cgroup);
            // What is not there, or without PSI, cannot be judged.
            let (Ok(events), Ok(pressure)) = (read::memory_events(&dir), read::memory_pressure(&dir)) else {
                continue;
            };
            let sample = Sample { at: now, waited: pressure.full, throttled: events.high };
            let waits = self.workloads.entry(name.clone()).or_default();
            let before = waits.stalls;
            let begins = waits.take(sample);
            let changed = waits.stalls != before;
            if waits.is_calm() {
                self.workloads.remove(&name);
            }
            core.effects.view |= changed;
            if begins {
                self.stalled(core, &name, &cgroup, high);
            }
        }
    }

    /// Takes note of who is limited now.
    fn follow_limited(&mut self, state: &State) {
        let limited: BTreeMap<String, Limited> = state
            .guarantees
            .iter()
            .filter_map(|(name, held)| match state.applied.get(&held.cgroup)?.settings.memory_high? {
                Limit::Bytes(high) => {
                    Some((name.clone(), Limited { cgroup: held.cgroup.clone(), id: held.id, high }))
                }
                Limit::Max => None,
            })
            .collect();
        let is_same =
            |a: &Limited, b: Option<&Limited>| b.is_some_and(|b| (&a.cgroup, a.id) == (&b.cgroup, b.id));
        let before = std::mem::take(&mut self.limited);
        for (name, over) in before.iter().filter(|(name, over)| !is_same(over, limited.get(*name))) {
            self.notices.unwatch(&over.cgroup, WatchSubject::Memory);
            self.workloads.remove(name);
        }
        for (name, new) in limited.iter().filter(|(name, new)| !is_same(new, before.get(*name))) {
            self.notices.watch(&new.cgroup, WatchSubject::Memory);
            // What happened before it was watched.
            self.workloads.entry(name.clone()).or_default();
        }
        self.limited = limited;
    }

    fn stalled(&mut self, core: &mut Core, name: &str, cgroup: &CgroupPath, high: Bytes) {
        core.metrics.stalled();
        let raised =
            core.config.memory_qos.raise_high_on_stall.then(|| self.raise_high(core, name, cgroup, high));
        let outcome = match &raised {
            None => "memoryQos.raiseHighOnStall is off, so it is left as it is".to_owned(),
            Some(Ok(Limit::Max)) => "memory.high is taken away".to_owned(),
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

    /// Raises `memory.high`, and says to what.
    fn raise_high(
        &mut self,
        core: &mut Core,
        name: &str,
        cgroup: &CgroupPath,
        high: Bytes,
    ) -> Result<Limit, String> {
        let Some(held) = core.store.state.guarantees.get(name) else {
            return Err("it is released".to_owned());
        };
        let ceiling = match held.settings.memory_max {
            Some(Limit::Bytes(max)) => max,
            _ => Bytes(u64::MAX),
        };
        let to = raised(high, ceiling);
        let settings = Settings { memory_high: Some(to), ..held.settings.clone() };
        let mut change = core.begin();
        let plan = change.plan(SettingsChange::Hold(cgroup.clone(), settings.clone()));
        let plan = plan.map_err(|error| error.to_string())?;
        if let Some(held) = change.store.state.guarantees.get_mut(name) {
            held.settings = settings;
        }
        change.enforce(plan).map_err(|refused| refused.to_string())?;
        core.metrics.raised();
        // Another ten seconds to get on.
        self.workloads.insert(name.to_owned(), Waits::default());
        core.promises_changed();
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use super::*;
    use crate::{
        reconciler::{Answer, tests::reconciler_loop},
        testing::{self as fixture, Host},
    };
    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::request::Request;

    /// A workload that may use four times what it is promised, from which it is kept at half of that, makes no progress
    /// there: what it is kept at in the end, whether it is shown as stalled, and what was reported.
    fn stalled(raise: bool) -> (String, bool, Vec<(Option<CgroupPath>, EventReport)>) {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("cgroup"), Arc::new(Host::small()));
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
        assert!(matches!(reconciler.admit(&request.unwrap(), false), Ok(Answer::Admitted(_))));
        let high = || fixture::line(&cgroup.join("memory.high"));
        assert_eq!(high(), (640_u64 << 20).to_string());

        let start = Instant::now();
        let mut at = |seconds: u32| {
            let now = start + Duration::from_secs(seconds.into());
            reconciler.controllers.throttling.look(&mut reconciler.core, now);
            reconciler.show();
            reconciler.read_model.of("a").unwrap().stalled
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
    fn a_workload_that_stalls_is_told_and_gets_more_if_that_is_configured() {
        for (raise, mib, outcome, severity) in [
            (false, 640_u64, "raiseHighOnStall is off, so it is left as it is", Severity::Critical),
            (true, 832, "memory.high is raised to 832Mi", Severity::Warning),
        ] {
            let (high, is_stalled, happened) = stalled(raise);
            assert_eq!((high, is_stalled), ((mib << 20).to_string(), !raise));
            let [(cgroup, report)] = &happened[..] else { panic!("{happened:?}") };
            assert_eq!(cgroup.as_ref().map(CgroupPath::as_str), Some("/a"));
            let told = format!("{report:?}");
            assert!(told.contains("a is slowed down at memory.high (640Mi) and makes no progress"), "{told}");
            assert!(told.contains(outcome) && told.contains(&format!("{severity:?}")), "{told}");
        }
    }

    #[test]
    fn a_workload_stalls_when_it_is_throttled_and_only_waits() {
        let start = Instant::now();
        let mut waits = Waits::default();
        let mut take = |seconds: u64, waited: u64, throttled: u64| {
            let (at, waited) = (start + Duration::from_secs(seconds), Duration::from_millis(waited));
            let begins = waits.take(Sample { at, waited, throttled });
            (begins, waits.stalls)
        };
        assert_eq!(take(0, 0, 0), (false, false));
        assert_eq!(take(8, 8_000, 8), (false, false), "not for long enough");
        assert_eq!(take(10, 9_500, 9), (true, true), "reported once");
        assert_eq!(take(12, 11_500, 9), (false, true));
        assert_eq!(take(18, 17_500, 9), (false, true), "throttled within the window");
        assert_eq!(take(22, 20_000, 9), (false, false), "it waits for something else");
        assert_eq!(take(24, 21_900, 10), (false, false), "it gets on");
        assert_eq!(take(34, 31_900, 11), (true, true));
    }

    #[test]
    fn a_workload_that_is_not_throttled_is_not_looked_at_for_long() {
        let start = Instant::now();
        let mut waits = Waits::default();
        let mut calm = |seconds: u64, throttled: u64| {
            let at = start + Duration::from_secs(seconds);
            waits.take(Sample { at, waited: Duration::ZERO, throttled });
            waits.is_calm()
        };
        assert!(!calm(0, 3));
        assert!(!calm(8, 3));
        assert!(!calm(10, 4));
        assert!(!calm(18, 4));
        assert!(calm(20, 4));
    }

    #[test]
    fn the_limit_is_approached_and_reached() {
        let (mut high, ceiling) = (Bytes::mib(64), Bytes::mib(512));
        let mut steps = Vec::new();
        while let Limit::Bytes(next) = raised(high, ceiling) {
            assert!(next > high && next < ceiling);
            steps.push(next.0 >> 20);
            high = next;
        }
        assert_eq!(steps, [288, 400, 456, 484, 498, 505]);
        assert_eq!(raised(ceiling, ceiling), Limit::Max);
    }
}

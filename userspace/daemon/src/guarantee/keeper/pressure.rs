//! Workloads that are slowed down at `memory.high` and do not get on.
//!
//! Problem: above `memory.high` the kernel reclaims, and puts the workload to sleep for up to two seconds at each
//! allocation. Where there is nothing to reclaim, it neither gets on nor is it killed: it hangs.
//!
//! Algorithm: of every workload for which we set `memory.high`, how often it was throttled (`memory.events`) and how long
//! all of its tasks waited at once (`full` of `memory.pressure`) is read every two seconds. It *stalls* when, over ten
//! seconds, it was throttled and waited for nine tenths of the time. That is told, and if it is configured
//! (`memoryQos.raiseHighOnStall`), `memory.high` is raised half the way to the limit, and at last taken away: then the
//! workload gets on, or is killed at its limit and starts anew.
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupPath, knob::Limit, read};
use numaward_topology::Bytes;

use super::Owner;
use crate::{
    enforce::{Change, Settings},
    events::{EventKind, Report, Severity},
};

/// How often each workload is looked at.
const PACE: Duration = Duration::from_secs(2);
/// Over which time it has to have waited.
const WINDOW: Duration = Duration::from_secs(10);
/// A workload whose limit is no farther above than this share gets no limit but that one.
const CLOSE: u64 = 64;

/// The workloads with `memory.high`.
#[derive(Debug, Default)]
pub(super) struct Throttled {
    looked: Option<Instant>,
    workloads: BTreeMap<String, Waits>,
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
}

impl Throttled {
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

impl Owner {
    /// Looks at the workloads that may be throttled.
    pub(super) fn look_at_throttled(&mut self, now: Instant) {
        if self.throttled.looked.is_some_and(|looked| now.duration_since(looked) < PACE) {
            return;
        }
        self.throttled.looked = Some(now);
        let limited: BTreeMap<String, (CgroupPath, Bytes)> = self
            .state
            .guarantees
            .iter()
            .filter_map(|(name, held)| match self.state.book.get(&held.cgroup)?.settings.memory_high? {
                Limit::Bytes(high) => Some((name.clone(), (held.cgroup.clone(), high))),
                Limit::Max => None,
            })
            .collect();
        self.throttled.workloads.retain(|name, _| limited.contains_key(name));
        for (name, (cgroup, high)) in limited {
            let dir = self.hierarchy.dir(&cgroup);
            // What is not there, or without PSI, cannot be told.
            let (Ok(events), Ok(pressure)) = (read::memory_events(&dir), read::memory_pressure(&dir)) else {
                continue;
            };
            let sample = Sample { at: now, waited: pressure.full.total, throttled: events.high };
            let waits = self.throttled.workloads.entry(name.clone()).or_default();
            let before = waits.stalls;
            let begins = waits.take(sample);
            if waits.stalls != before {
                self.publish_view();
            }
            if begins {
                self.stalled(&name, &cgroup, high);
            }
        }
    }

    fn stalled(&mut self, name: &str, cgroup: &CgroupPath, high: Bytes) {
        self.figures.stalled();
        let raised = self.config.memory_qos.raise_high_on_stall.then(|| self.raise_high(name, cgroup, high));
        let outcome = match &raised {
            None => "memoryQos.raiseHighOnStall is off, so it is left as it is".to_owned(),
            Some(Ok(Limit::Max)) => "memory.high is taken away".to_owned(),
            Some(Ok(now)) => format!("memory.high is raised to {now}"),
            Some(Err(error)) => format!("memory.high cannot be raised: {error}"),
        };
        let message =
            format!("{name} is slowed down at memory.high ({high}) and does not get on; {outcome}.");
        let report = Report::new(EventKind::Stall, message).detail("memoryHigh", high.0);
        let report = match raised {
            None | Some(Err(_)) => report.severity(Severity::Critical),
            Some(Ok(_)) => report,
        };
        self.tell(Some(cgroup), report);
    }

    /// Raises `memory.high`, and says to what.
    fn raise_high(&mut self, name: &str, cgroup: &CgroupPath, high: Bytes) -> Result<Limit, String> {
        let Some(held) = self.state.guarantees.get(name) else { return Err("it is released".to_owned()) };
        let ceiling = match held.settings.memory_max {
            Some(Limit::Bytes(max)) => max,
            _ => Bytes(u64::MAX),
        };
        let to = raised(high, ceiling);
        let settings = Settings { memory_high: Some(to), ..held.settings.clone() };
        let plan = self
            .enforcer
            .plan(&self.state.book, &Change::Hold(cgroup.clone(), settings.clone()))
            .map_err(|error| error.to_string())?;
        let before = self.state.clone();
        if let Some(held) = self.state.guarantees.get_mut(name) {
            held.settings = settings;
        }
        self.enforce(plan, before).map_err(|refused| refused.to_string())?;
        self.figures.raised();
        // Another ten seconds to get on.
        self.throttled.workloads.remove(name);
        self.publish();
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(take(10, 9_500, 9), (true, true), "told once");
        assert_eq!(take(12, 11_500, 9), (false, true));
        assert_eq!(take(18, 17_500, 9), (false, true), "throttled within the window");
        assert_eq!(take(22, 20_000, 9), (false, false), "it waits for something else");
        assert_eq!(take(24, 21_900, 10), (false, false), "it gets on");
        assert_eq!(take(34, 31_900, 11), (true, true));
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

//! Model of the host for the screen: the latest sample, rates between samples, and a short history of each workload.
//!
//! The first sample of a connection is complete; later ones contain only changes. Counters never decrease: a counter
//! that is lower than before belongs to a new workload, and its rate is known from the next sample on. A value that is
//! not counted is absent, never zero.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{
    AllocatedBytes, Allocation, Allocations, DriftState, EnforcementMode, Event, KindCapacity, Node, Sample,
    Status, Topology, Trends, Version, Workload,
};
use numaward_topology::NodeSet;
use serde::Serialize;

use super::feed::{FeedHost, FeedUpdate};

/// Number of samples that are kept of a workload: two minutes at one per second.
pub(crate) const MAX_HISTORY_SAMPLES: usize = 120;
/// Number of events that are kept.
const MAX_EVENTS: usize = 200;
/// Age from which the figures count as stale. Samples come each second.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// User memory of a workload in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rates {
    /// Allocated by a CPU of the page's node.
    pub(crate) local: f64,
    /// Allocated by a CPU of another node.
    pub(crate) remote: f64,
    /// Placed outside the guaranteed nodes.
    pub(crate) missed: f64,
}

/// User memory on a node in bytes per second.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeRates {
    pub(crate) local_bytes_per_second: f64,
    pub(crate) remote_bytes_per_second: f64,
}

/// Sums over all nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Bytes allocated: local and remote. Absent if they are not counted.
    pub(crate) allocated: Option<(u64, u64)>,
    /// Bytes outside the guaranteed nodes; absent without a guarantee.
    pub(crate) missed: Option<u64>,
    /// Resident bytes by node. Absent if they cannot be read.
    pub(crate) resident: Option<BTreeMap<u32, u64>>,
}

impl Totals {
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        self.resident
            .as_ref()
            .map(|nodes| nodes.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes)))
    }

    pub(crate) fn from_workload(workload: &Workload) -> Self {
        let mut totals = Self::default();
        for node in &workload.nodes {
            if let Some(AllocatedBytes { local_bytes, remote_bytes, .. }) = node.allocated {
                let (local, remote) = totals.allocated.get_or_insert_default();
                *local = local.saturating_add(local_bytes);
                *remote = remote.saturating_add(remote_bytes);
            }
            if let Some(missed) = node.missed_bytes {
                let all = totals.missed.get_or_insert_default();
                *all = all.saturating_add(missed);
            }
            let base = node.resident.map(|resident| {
                resident.anon_bytes.saturating_add(resident.file_bytes).saturating_add(resident.kernel_bytes)
            });
            let huge = node.hugepages.iter().filter_map(|pages| pages.resident_bytes);
            if let Some(bytes) = base.into_iter().chain(huge).reduce(u64::saturating_add) {
                totals.resident.get_or_insert_default().insert(node.node, bytes);
            }
            for huge in &node.hugepages {
                // Without the base pages, the huge pages alone would be misleading.
                if let (Some((local, remote)), Some(more)) = (&mut totals.allocated, huge.allocated) {
                    *local = local.saturating_add(more.local_bytes);
                    *remote = remote.saturating_add(more.remote_bytes);
                }
                if let (Some(missed), Some(more)) = (&mut totals.missed, huge.missed_bytes) {
                    *missed = missed.saturating_add(more);
                }
            }
        }
        totals
    }
}

/// Rating of a workload's local share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Good,
    Warn,
    Bad,
}

/// A workload with its derived values.
#[derive(Debug)]
pub(crate) struct WorkloadRow {
    pub(crate) workload: Workload,
    pub(crate) totals: Totals,
    /// Absent until the second sample, and if nothing is counted.
    pub(crate) rates: Option<Rates>,
    /// Rates of earlier samples, latest last.
    pub(crate) history: VecDeque<Rates>,
    pub(crate) allocation: Option<Arc<Allocation>>,
    /// True if the guarantee should be written to the kernel, and is not.
    pub(crate) is_unwritten: bool,
}

impl WorkloadRow {
    /// Returns the share of the memory that is local: with a guarantee, the user memory on the guaranteed nodes;
    /// otherwise, the memory that was allocated by a CPU of the page's node.
    pub(crate) fn local_share(&self) -> Option<f64> {
        if self.guaranteed_nodes().is_some() {
            let memory = self.workload.residency.iter();
            let sum = |sum: (u64, u64), on, off| (sum.0.saturating_add(on), sum.1.saturating_add(off));
            let (on, off) =
                memory.fold((0, 0), |all, of| sum(all, of.on.total_bytes(), of.off.total_bytes()));
            return share(on, on.saturating_add(off));
        }
        let (local, remote) = self.totals.allocated?;
        share(local, local.saturating_add(remote))
    }

    /// Returns the guaranteed nodes.
    pub(crate) fn guaranteed_nodes(&self) -> Option<NodeSet> {
        let nodes: NodeSet = self.allocation.as_ref()?.nodes.parse().ok()?;
        (!nodes.is_empty()).then_some(nodes)
    }

    /// Returns the name of the guarantee, or else of the workload.
    pub(crate) fn name(&self) -> &str {
        self.allocation.as_ref().map_or(&self.workload.workload, |allocation| &allocation.name)
    }

    /// Returns whether the daemon's events name the workload like this.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.workload.workload == name
            || self.allocation.as_ref().is_some_and(|allocation| allocation.name == name)
    }

    /// Returns the rating of the guarantee, as the page of the daemon has it: broken if memory is off its nodes, if other
    /// tasks run on its exclusive CPUs, if it is not written, if a knob differs and is not being repaired, or if the machine
    /// no longer has all of it. Without a guarantee, that of the local share, which is never [`Level::Bad`].
    pub(crate) fn level(&self) -> Option<Level> {
        if let Some(allocation) = &self.allocation {
            let mut drift = allocation.present_drift().map(|drift| drift.state);
            if self.workload.intruded_cpus.is_some()
                || self.is_unwritten
                || allocation.missing.is_some()
                || self.workload.residency.iter().any(|of| of.broken)
                || drift.any(|state| state != DriftState::Waiting)
            {
                return Some(Level::Bad);
            }
            if allocation.stalled || allocation.present_drift().next().is_some() {
                return Some(Level::Warn);
            }
        }
        let share = self.local_share()?;
        Some(match self.guaranteed_nodes() {
            Some(_) => Level::Good,
            None if share >= 0.9 => Level::Good,
            None => Level::Warn,
        })
    }

    fn append_to_history(&mut self) {
        if self.history.len() == MAX_HISTORY_SAMPLES {
            self.history.pop_front();
        }
        self.history.push_back(self.rates.unwrap_or_default());
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no more digits than a float has")]
pub(crate) fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

#[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a float has")]
fn rate(before: u64, now: u64, seconds: f64) -> Option<f64> {
    now.checked_sub(before).map(|grown| grown as f64 / seconds)
}

/// State of the host that is shown.
#[derive(Debug)]
pub(crate) struct TopModel {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    pub(crate) nodes: Vec<Node>,
    pub(crate) node_rates: BTreeMap<u32, NodeRates>,
    /// Workloads by [`Workload::key`].
    pub(crate) rows: BTreeMap<String, WorkloadRow>,
    pub(crate) allocations: Option<Allocations>,
    pub(crate) status: Option<Status>,
    /// Reasons of failed requests, by their subject.
    pub(crate) failures: BTreeMap<&'static str, String>,
    /// Latest event first.
    pub(crate) events: VecDeque<Event>,
    /// Number of events that were missed because they came faster than they were read.
    pub(crate) missed_events: u64,
    /// Reason why no samples come, and the time of the next attempt; absent while samples come.
    lost: Option<(String, Instant)>,
    /// Time of the latest sample in the daemon's clock; absent until the first sample of this connection.
    at_millis: Option<u64>,
    /// Time at which that sample was received.
    received_at: Instant,
    /// Number of samples of this connection.
    pub(crate) samples: u64,
    /// History from before the first sample of this connection.
    past: Option<Trends>,
    /// Seconds between two samples.
    pub(crate) step_seconds: u32,
    /// Position in a recording; absent for live data.
    pub(crate) recorded: Option<ReplayPosition>,
}

/// Position in a recording.
#[derive(Debug)]
pub(crate) struct ReplayPosition {
    /// Time of the moment in RFC 3339.
    pub(crate) time: String,
    /// Number of the moment among those that are shown, from 1.
    pub(crate) number: usize,
    /// Number of moments that are shown.
    pub(crate) count: usize,
    pub(crate) is_playing: bool,
}

impl TopModel {
    /// Creates a model without samples.
    pub(crate) fn new(topology: Topology, version: Version, now: Instant) -> Self {
        Self {
            topology,
            version,
            nodes: Vec::new(),
            node_rates: BTreeMap::new(),
            rows: BTreeMap::new(),
            allocations: None,
            status: None,
            failures: BTreeMap::new(),
            events: VecDeque::new(),
            missed_events: 0,
            lost: None,
            at_millis: None,
            received_at: now,
            samples: 0,
            past: None,
            step_seconds: 1,
            recorded: None,
        }
    }

    /// Returns whether rates are known: after two samples of this connection.
    pub(crate) fn shows_rates(&self) -> bool {
        self.samples >= 2
    }

    /// Returns whether no samples come.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Takes an update of the feed.
    pub(crate) fn take(&mut self, update: FeedUpdate, now: Instant) {
        match update {
            FeedUpdate::Connected(host) => {
                let FeedHost { topology, version, events, past } = *host;
                self.past = past;
                (self.topology, self.version) = (topology, version);
                (self.at_millis, self.samples, self.received_at, self.lost) = (None, 0, now, None);
                for event in events {
                    self.add_event(event);
                }
            }
            FeedUpdate::Sample(sample) => self.add_sample(*sample, now),
            FeedUpdate::Event(event) => self.add_event(*event),
            FeedUpdate::Missed(missed) => self.missed_events += missed,
            FeedUpdate::Allocations(answer) => {
                if let Some(allocations) = self.record_answer("allocations", answer) {
                    self.set_allocations(allocations);
                }
            }
            FeedUpdate::Status(answer) => {
                self.status = self.record_answer("status", answer).or(self.status.take());
            }
            FeedUpdate::Lost { reason, retry_in } => self.lost = Some((reason, now + retry_in)),
        }
    }

    fn record_answer<T>(&mut self, subject: &'static str, answer: Result<Box<T>, String>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.failures.remove(subject);
                Some(*value)
            }
            Err(reason) => {
                self.failures.insert(subject, reason);
                None
            }
        }
    }

    /// Returns the reason why the figures are stale; `None` if they are current.
    pub(crate) fn staleness(&self, now: Instant) -> Option<String> {
        let age = now.duration_since(self.received_at);
        match &self.lost {
            Some((reason, _)) if self.recorded.is_some() => Some(reason.clone()),
            Some((reason, retry_at)) => Some(match retry_at.saturating_duration_since(now).as_secs() {
                0 => format!("{reason}; connecting"),
                left => format!("{reason}; again in {left} s"),
            }),
            None => (age >= STALE_AFTER).then(|| format!("no new figures for {} s", age.as_secs())),
        }
    }

    /// Returns the guarantees on a node's memory of one kind.
    pub(crate) fn node_guarantees(&self, node: u32, kind: &str) -> Option<&KindCapacity> {
        let node = self.allocations.as_ref()?.nodes.iter().find(|guarantees| guarantees.node == node)?;
        node.memory.iter().find(|memory| memory.kind == kind)
    }

    fn add_sample(&mut self, sample: Sample, now: Instant) {
        #[expect(clippy::cast_precision_loss, reason = "seconds between samples are few")]
        let seconds = self
            .at_millis
            .and_then(|before| sample.at_millis.checked_sub(before))
            .filter(|millis| *millis > 0)
            .map(|millis| millis as f64 / 1000.0);
        (self.at_millis, self.received_at) = (Some(sample.at_millis), now);
        self.samples += 1;
        self.lost = None;
        self.sample_nodes(sample.nodes, seconds);

        let mut seen = BTreeSet::new();
        for workload in sample.workloads {
            seen.insert(workload.key().to_owned());
            self.sample_workload(workload, seconds);
        }
        if let Some(past) = self.past.take() {
            self.add_past(past);
        }
        if sample.full {
            self.rows.retain(|key, _| seen.contains(key));
        } else {
            sample.removed.iter().for_each(|key| drop(self.rows.remove(key)));
            // A workload that is not in the sample had no activity.
            for (_, row) in self.rows.iter_mut().filter(|(key, _)| !seen.contains(*key)) {
                row.rates = row.totals.allocated.map(|_| Rates::default());
                row.append_to_history();
            }
        }
    }

    /// Gives new workloads the history that the daemon keeps: the mean of each step, repeated for each sample of the
    /// step.
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a float has")]
    fn add_past(&mut self, past: Trends) {
        for trend in past.workloads {
            let Some(row) = self.rows.get_mut(&trend.key).filter(|row| row.history.len() <= 1) else {
                continue;
            };
            let latest = row.history.pop_back();
            let steps = trend.local_bytes_per_second.iter().zip(&trend.remote_bytes_per_second);
            // The history has no gaps: it starts after the last unknown step.
            let known = steps.rev().map_while(|(local, remote)| {
                Some(Rates { local: (*local)? as f64, remote: (*remote)? as f64, missed: 0.0 })
            });
            let samples =
                known.flat_map(|rates| (0..past.step_seconds / self.step_seconds).map(move |_| rates));
            samples.take(MAX_HISTORY_SAMPLES - 1).for_each(|rates| row.history.push_front(rates));
            row.history.extend(latest);
        }
    }

    fn sample_nodes(&mut self, nodes: Vec<Node>, seconds: Option<f64>) {
        let before: BTreeMap<u32, AllocatedBytes> =
            self.nodes.iter().filter_map(|node| Some((node.node, node.allocated?))).collect();
        let rates = nodes.iter().filter_map(|node| {
            let (before, now, seconds) = (before.get(&node.node)?, node.allocated?, seconds?);
            let local_bytes_per_second = rate(before.local_bytes, now.local_bytes, seconds)?;
            let remote_bytes_per_second = rate(before.remote_bytes, now.remote_bytes, seconds)?;
            Some((node.node, NodeRates { local_bytes_per_second, remote_bytes_per_second }))
        });
        self.node_rates = rates.collect();
        self.nodes = nodes;
    }

    fn sample_workload(&mut self, workload: Workload, seconds: Option<f64>) {
        let totals = Totals::from_workload(&workload);
        let allocations = self.allocations.as_ref();
        let row = self.rows.entry(workload.key().to_owned()).or_insert_with(|| WorkloadRow {
            allocation: find_allocation(allocations, &workload),
            workload: workload.clone(),
            totals: Totals::default(),
            rates: None,
            history: VecDeque::new(),
            is_unwritten: false,
        });
        row.is_unwritten = is_unwritten(allocations, row.allocation.as_deref());
        let known = row.totals.allocated.zip(totals.allocated).zip(seconds);
        row.rates = known.and_then(|((before, now), seconds)| {
            Some(Rates {
                local: rate(before.0, now.0, seconds)?,
                remote: rate(before.1, now.1, seconds)?,
                missed: rate(row.totals.missed.unwrap_or(0), totals.missed.unwrap_or(0), seconds)
                    .unwrap_or(0.0),
            })
        });
        row.totals = totals;
        row.workload = workload;
        row.append_to_history();
    }

    fn set_allocations(&mut self, allocations: Allocations) {
        for row in self.rows.values_mut() {
            row.allocation = find_allocation(Some(&allocations), &row.workload);
            row.is_unwritten = is_unwritten(Some(&allocations), row.allocation.as_deref());
        }
        self.allocations = Some(allocations);
    }

    fn add_event(&mut self, event: Event) {
        if self.events.iter().any(|known| known.id == event.id) {
            return;
        }
        self.events.push_front(event);
        self.events.truncate(MAX_EVENTS);
    }
}

/// Returns the guarantee of a workload.
fn find_allocation(allocations: Option<&Allocations>, workload: &Workload) -> Option<Arc<Allocation>> {
    let cgroup = workload.cgroup.as_ref()?;
    let mut allocations = allocations?.allocations.iter();
    allocations.find(|allocation| allocation.cgroup == *cgroup).cloned()
}

/// Returns whether a guarantee should be written to the kernel, and is not.
fn is_unwritten(allocations: Option<&Allocations>, allocation: Option<&Allocation>) -> bool {
    let is_on = allocations.is_some_and(|all| all.enforcement.mode == EnforcementMode::On);
    is_on && allocation.is_some_and(|allocation| !allocation.enforced)
}

#[cfg(test)]
mod tests {
    use numaward_api::{Counters, GuaranteeResidency, Trend, UserMemory};

    use super::*;

    fn workload(key: &str) -> Workload {
        Workload {
            workload: key[1..].to_owned(),
            kind: "unit".to_owned(),
            cgroup: Some(key.to_owned()),
            container: None,
            counters: Counters::Own,
            nodes: Vec::new(),
            residency: Vec::new(),
            intruded_cpus: None,
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: None,
        }
    }

    #[test]
    fn no_bad_level_without_guarantee() {
        let row = |local, remote| WorkloadRow {
            workload: workload("/a"),
            totals: Totals { allocated: Some((local, remote)), ..Totals::default() },
            rates: None,
            history: VecDeque::new(),
            allocation: None,
            is_unwritten: false,
        };
        for (local, remote, level) in
            [(0, 9, Level::Warn), (1, 99, Level::Warn), (89, 11, Level::Warn), (9, 1, Level::Good)]
        {
            assert_eq!(row(local, remote).level(), Some(level), "{local} local, {remote} remote");
        }
        assert_eq!(row(0, 0).level(), None);
    }

    #[test]
    fn level_with_guarantee_is_daemons_verdict() {
        let memory = |bytes| UserMemory { anon_bytes: bytes, ..UserMemory::default() };
        let row = |residency: &[(u64, u64, bool)]| WorkloadRow {
            workload: Workload {
                residency: residency
                    .iter()
                    .map(|(on, off, broken)| GuaranteeResidency {
                        kind: "memory".to_owned(),
                        on: memory(*on),
                        off: memory(*off),
                        broken: *broken,
                    })
                    .collect(),
                ..workload("/a")
            },
            // Most of the memory of the cgroup is off the nodes, as that of a Burstable workload may be.
            totals: Totals { resident: Some([(0, 10), (1, 90)].into()), ..Totals::default() },
            rates: None,
            history: VecDeque::new(),
            allocation: Some(Arc::new(Allocation { nodes: "0".to_owned(), ..Allocation::default() })),
            is_unwritten: false,
        };
        for (residency, share, level) in [
            (&[][..], None, None),
            (&[(10, 0, false)], Some(1.0), Some(Level::Good)),
            (&[(10, 10, false)], Some(0.5), Some(Level::Good)),
            (&[(10, 0, false), (80, 10, true)], Some(0.9), Some(Level::Bad)),
        ] {
            let row = row(residency);
            assert_eq!((row.local_share(), row.level()), (share, level), "{residency:?}");
        }
    }

    fn row_with(allocation: Allocation, workload: Workload) -> WorkloadRow {
        WorkloadRow {
            workload,
            totals: Totals::default(),
            rates: None,
            history: VecDeque::new(),
            allocation: Some(Arc::new(allocation)),
            is_unwritten: false,
        }
    }

    #[test]
    fn intruders_break_guarantee_of_exclusive_cpus() {
        for (intruded_cpus, level) in [(Some("3"), Some(Level::Bad)), (None, None)] {
            let intruded = Workload { intruded_cpus: intruded_cpus.map(str::to_owned), ..workload("/a") };
            assert_eq!(row_with(Allocation::default(), intruded).level(), level, "{intruded_cpus:?}");
        }
    }

    #[test]
    fn unwritten_guarantee_is_broken_unless_it_is_a_dry_run() {
        for (mode, enforced, is_broken) in [
            (EnforcementMode::On, false, true),
            (EnforcementMode::On, true, false),
            (EnforcementMode::DryRun, false, false),
        ] {
            let enforcement = numaward_api::Enforcement { mode, ..Default::default() };
            let allocations = Allocations { enforcement, ..Allocations::default() };
            let allocation = Allocation { enforced, ..Allocation::default() };
            assert_eq!(is_unwritten(Some(&allocations), Some(&allocation)), is_broken, "{mode:?} {enforced}");
        }
    }

    #[test]
    fn drift_breaks_guarantee_unless_it_is_repaired() {
        for (cgroup, state, level) in [
            ("/a", "repaired", None),
            ("/a", "waiting", Some(Level::Warn)),
            ("/a", "left", Some(Level::Bad)),
            ("/a", "ineffective", Some(Level::Bad)),
            ("/", "left", None),
        ] {
            let drift = serde_json::json!({
                "cgroup": cgroup, "knob": "cpuset.cpus", "wanted": "2", "found": "0-3", "state": state, "count": 1,
                "noticed": "write",
            });
            let drift = vec![serde_json::from_value(drift).unwrap()];
            let allocation = Allocation { cgroup: "/a".to_owned(), drift, ..Allocation::default() };
            assert_eq!(row_with(allocation, workload("/a")).level(), level, "{cgroup} {state}");
        }
    }

    #[test]
    fn history_starts_with_daemons_history() {
        let topology = Topology::from(&numaward_topology::Machine::default());
        let now = Instant::now();
        let mut model = TopModel::new(topology.clone(), Version::on("6.12"), now);
        let trend = |key: &str, local: Vec<Option<u64>>| Trend {
            key: key.to_owned(),
            remote_bytes_per_second: vec![Some(1); local.len()],
            local_bytes_per_second: local,
        };
        let workloads = vec![
            trend("/a", vec![Some(7), None, Some(20), Some(30)]),
            trend("/gone", vec![Some(1)]),
            trend("/long", vec![Some(5); 60]),
        ];
        let past = Some(Trends { step_seconds: 10, end_millis: 60_000, workloads });
        let host = FeedHost { topology, version: Version::on("6.12"), events: Vec::new(), past };
        model.take(FeedUpdate::Connected(Box::new(host)), now);
        let sample = Sample {
            at_millis: 61_000,
            full: true,
            guarantee_revision: 0,
            nodes: Vec::new(),
            accesses: None,
            exclusive_cpus: Vec::new(),
            workloads: ["/a", "/long", "/new"].map(workload).to_vec(),
            removed: Vec::new(),
        };
        model.take(FeedUpdate::Sample(Box::new(sample)), now);
        let lengths: Vec<usize> = model.rows.values().map(|row| row.history.len()).collect();
        assert_eq!(lengths, [21, MAX_HISTORY_SAMPLES, 1]);
        let locals: Vec<f64> = model.rows["/a"].history.iter().map(|rates| rates.local).collect();
        assert_eq!((locals[0], locals[10], locals[20]), (20.0, 30.0, 0.0), "oldest known step first");
    }
}

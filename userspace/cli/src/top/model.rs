//! What is known of the host: the last sample, the rates between samples, and a short history of each workload.
//!
//! The first sample of a connection is complete, later ones hold what changed. Counters only grow: one that went back
//! belongs to another workload, and its rate is not known until the next sample. What is not counted is absent and
//! never a zero.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{
    AllocatedBytes, Allocation, Allocations, Event, KindCapacity, Node, Sample, Status, Topology, Trends,
    Version, Workload,
};
use numaward_topology::{NodeId, NodeSet};
use serde::Serialize;

use super::feed::{Host, Update};

/// Samples of a workload that are kept: two minutes, where they come each second.
pub(crate) const HISTORY: usize = 120;
/// Events that are kept.
const EVENTS: usize = 200;
/// Samples come each second; without one for so long what is shown is old.
const STALE: Duration = Duration::from_secs(5);

/// Bytes per second of user memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rates {
    /// Allocated by a CPU of the page's node.
    pub(crate) local: f64,
    /// Allocated by a CPU of another node.
    pub(crate) remote: f64,
    /// Placed outside the promised nodes.
    pub(crate) missed: f64,
}

/// Bytes per second of user memory on a node.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeRates {
    pub(crate) local_bytes_per_second: f64,
    pub(crate) remote_bytes_per_second: f64,
}

/// Sums over nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Bytes allocated: local, remote. Absent where they are not counted.
    pub(crate) allocated: Option<(u64, u64)>,
    /// Bytes outside the promised nodes; absent without a promise.
    pub(crate) missed: Option<u64>,
    /// Bytes that lie on each node. Absent where that cannot be read.
    pub(crate) resident: Option<BTreeMap<u32, u64>>,
}

impl Totals {
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        self.resident
            .as_ref()
            .map(|nodes| nodes.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes)))
    }

    pub(crate) fn of(workload: &Workload) -> Self {
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
            let base = node.resident.map(|lies| {
                lies.anon_bytes.saturating_add(lies.file_bytes).saturating_add(lies.kernel_bytes)
            });
            let huge = node.hugepages.iter().filter_map(|of| of.resident_bytes);
            if let Some(bytes) = base.into_iter().chain(huge).reduce(u64::saturating_add) {
                totals.resident.get_or_insert_default().insert(node.node, bytes);
            }
            for huge in &node.hugepages {
                // Alone, where base pages are not counted, they would say too little.
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

/// How near memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Good,
    Warn,
    Bad,
}

/// A workload.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) workload: Workload,
    pub(crate) totals: Totals,
    /// Absent until two samples are known, and where nothing is counted.
    pub(crate) rates: Option<Rates>,
    /// The latest last.
    pub(crate) history: VecDeque<Rates>,
    pub(crate) allocation: Option<Arc<Allocation>>,
}

impl Row {
    /// The share of its memory that is near: with a guarantee, what lies on the promised nodes; without one, what was
    /// allocated by a CPU of the page's node.
    pub(crate) fn local_share(&self) -> Option<f64> {
        if let Some(promised) = self.promised_nodes() {
            let resident = self.totals.resident.as_ref()?.iter();
            let inside = resident.filter(|(node, _)| promised.contains(NodeId(**node)));
            return share(
                inside.fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes)),
                self.totals.resident_bytes()?,
            );
        }
        let (local, remote) = self.totals.allocated?;
        share(local, local.saturating_add(remote))
    }

    /// The nodes that are promised to it.
    pub(crate) fn promised_nodes(&self) -> Option<NodeSet> {
        let nodes: NodeSet = self.allocation.as_ref()?.nodes.parse().ok()?;
        (!nodes.is_empty()).then_some(nodes)
    }

    /// Whether the daemon means it by this name.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.workload.workload == name || self.allocation.as_ref().is_some_and(|held| held.name == name)
    }

    /// How good its share is. Only a promise can be broken.
    pub(crate) fn level(&self) -> Option<Level> {
        let share = self.local_share()?;
        let has_promise = self.promised_nodes().is_some();
        let (good, warn) = if has_promise { (0.999, 0.95) } else { (0.9, 0.0) };
        Some(match () {
            () if share >= good => Level::Good,
            () if share >= warn => Level::Warn,
            () => Level::Bad,
        })
    }

    fn remember(&mut self) {
        if self.history.len() == HISTORY {
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

/// All that is known.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    pub(crate) nodes: Vec<Node>,
    pub(crate) node_rates: BTreeMap<u32, NodeRates>,
    /// By [`Workload::key`].
    pub(crate) rows: BTreeMap<String, Row>,
    pub(crate) allocations: Option<Allocations>,
    pub(crate) status: Option<Status>,
    /// What cannot be asked for, and why.
    pub(crate) troubles: BTreeMap<&'static str, String>,
    /// The latest first.
    pub(crate) events: VecDeque<Event>,
    /// Events that came faster than they were read.
    pub(crate) missed_events: u64,
    /// Why no samples come, and when it is tried again; absent while they come.
    lost: Option<(String, Instant)>,
    /// When the last sample was taken, in the daemon's clock; absent until one came over this connection.
    at_millis: Option<u64>,
    /// When it came, in ours.
    came: Instant,
    /// Samples over this connection.
    pub(crate) samples: u64,
    /// What was before the first sample of this connection.
    past: Option<Trends>,
    /// Seconds from one sample to the next.
    pub(crate) step_seconds: u32,
    /// Which moment of a recording it is; absent for what is now.
    pub(crate) recorded: Option<Recorded>,
}

/// A moment of a recording.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// In RFC 3339.
    pub(crate) time: String,
    /// Its number among those that are shown, from 1.
    pub(crate) number: usize,
    /// How many are shown.
    pub(crate) count: usize,
    pub(crate) is_playing: bool,
}

impl Model {
    /// Of a host of which no sample came yet.
    pub(crate) fn new(topology: Topology, version: Version, now: Instant) -> Self {
        Self {
            topology,
            version,
            nodes: Vec::new(),
            node_rates: BTreeMap::new(),
            rows: BTreeMap::new(),
            allocations: None,
            status: None,
            troubles: BTreeMap::new(),
            events: VecDeque::new(),
            missed_events: 0,
            lost: None,
            at_millis: None,
            came: now,
            samples: 0,
            past: None,
            step_seconds: 1,
            recorded: None,
        }
    }

    /// Whether two samples were seen over this connection.
    pub(crate) fn shows_rates(&self) -> bool {
        self.samples >= 2
    }

    /// Whether no samples come.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Takes in what the daemon sent.
    pub(crate) fn take(&mut self, update: Update, now: Instant) {
        match update {
            Update::Connected(host) => {
                let Host { topology, version, events, past } = *host;
                self.past = past;
                (self.topology, self.version) = (topology, version);
                (self.at_millis, self.samples, self.came, self.lost) = (None, 0, now, None);
                for event in events {
                    self.event(event);
                }
            }
            Update::Sample(sample) => self.sample(*sample, now),
            Update::Event(event) => self.event(*event),
            Update::Missed(missed) => self.missed_events += missed,
            Update::Allocations(answer) => {
                if let Some(allocations) = self.answered("allocations", answer) {
                    self.promise(allocations);
                }
            }
            Update::Status(answer) => self.status = self.answered("status", answer).or(self.status.take()),
            Update::Lost { reason, again } => self.lost = Some((reason, now + again)),
        }
    }

    fn answered<T>(&mut self, what: &'static str, answer: Result<Box<T>, String>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.troubles.remove(what);
                Some(*value)
            }
            Err(reason) => {
                self.troubles.insert(what, reason);
                None
            }
        }
    }

    /// Whether what is shown is of now; if not, why.
    pub(crate) fn staleness(&self, now: Instant) -> Option<String> {
        let age = now.duration_since(self.came);
        match &self.lost {
            Some((reason, _)) if self.recorded.is_some() => Some(reason.clone()),
            Some((reason, again)) => Some(match again.saturating_duration_since(now).as_secs() {
                0 => format!("{reason}; connecting"),
                left => format!("{reason}; again in {left} s"),
            }),
            None => (age >= STALE).then(|| format!("no figures for {} s", age.as_secs())),
        }
    }

    /// What is promised of a kind of memory on a node.
    pub(crate) fn promises(&self, node: u32, kind: &str) -> Option<&KindCapacity> {
        let node = self.allocations.as_ref()?.nodes.iter().find(|promises| promises.node == node)?;
        node.memory.iter().find(|promises| promises.kind == kind)
    }

    fn sample(&mut self, sample: Sample, now: Instant) {
        #[expect(clippy::cast_precision_loss, reason = "seconds between samples are few")]
        let seconds = self
            .at_millis
            .and_then(|before| sample.at_millis.checked_sub(before))
            .filter(|millis| *millis > 0)
            .map(|millis| millis as f64 / 1000.0);
        (self.at_millis, self.came) = (Some(sample.at_millis), now);
        self.samples += 1;
        self.lost = None;
        self.sample_nodes(sample.nodes, seconds);

        let mut seen = BTreeSet::new();
        for workload in sample.workloads {
            seen.insert(workload.key().to_owned());
            self.sample_workload(workload, seconds);
        }
        if let Some(past) = self.past.take() {
            self.begin_with(past);
        }
        if sample.full {
            self.rows.retain(|key, _| seen.contains(key));
        } else {
            sample.removed.iter().for_each(|key| drop(self.rows.remove(key)));
            // What is not in it did nothing.
            for (_, row) in self.rows.iter_mut().filter(|(key, _)| !seen.contains(*key)) {
                row.rates = row.totals.allocated.map(|_| Rates::default());
                row.remember();
            }
        }
    }

    /// Gives workloads that were not known before the past that the daemon remembers: a mean for each sample of a step.
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a float has")]
    fn begin_with(&mut self, past: Trends) {
        for trend in past.workloads {
            let Some(row) = self.rows.get_mut(&trend.key).filter(|row| row.history.len() <= 1) else {
                continue;
            };
            let latest = row.history.pop_back();
            let steps = trend.local_bytes_per_second.iter().zip(&trend.remote_bytes_per_second);
            // What is not known has no place in a line without gaps: it begins after that.
            let known = steps.rev().map_while(|(local, remote)| {
                Some(Rates { local: (*local)? as f64, remote: (*remote)? as f64, missed: 0.0 })
            });
            let samples =
                known.flat_map(|rates| (0..past.step_seconds / self.step_seconds).map(move |_| rates));
            samples.take(HISTORY - 1).for_each(|rates| row.history.push_front(rates));
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
        let totals = Totals::of(&workload);
        let allocations = self.allocations.as_ref();
        let row = self.rows.entry(workload.key().to_owned()).or_insert_with(|| Row {
            allocation: held(allocations, &workload),
            workload: workload.clone(),
            totals: Totals::default(),
            rates: None,
            history: VecDeque::new(),
        });
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
        row.remember();
    }

    fn promise(&mut self, allocations: Allocations) {
        for row in self.rows.values_mut() {
            row.allocation = held(Some(&allocations), &row.workload);
        }
        self.allocations = Some(allocations);
    }

    fn event(&mut self, event: Event) {
        if self.events.iter().any(|known| known.id == event.id) {
            return;
        }
        self.events.push_front(event);
        self.events.truncate(EVENTS);
    }
}

/// What is promised to a workload.
fn held(allocations: Option<&Allocations>, workload: &Workload) -> Option<Arc<Allocation>> {
    let cgroup = workload.cgroup.as_ref()?;
    let mut allocations = allocations?.allocations.iter();
    allocations.find(|allocation| allocation.cgroup == *cgroup).cloned()
}

#[cfg(test)]
mod tests {
    use numaward_api::{Counters, Trend};

    use super::*;

    fn workload(key: &str) -> Workload {
        Workload {
            workload: key[1..].to_owned(),
            kind: "unit".to_owned(),
            cgroup: Some(key.to_owned()),
            container: None,
            counters: Counters::Own,
            nodes: Vec::new(),
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: None,
        }
    }

    #[test]
    fn nothing_is_bad_without_a_guarantee() {
        let row = |local, remote| Row {
            workload: workload("/a"),
            totals: Totals { allocated: Some((local, remote)), ..Totals::default() },
            rates: None,
            history: VecDeque::new(),
            allocation: None,
        };
        for (local, remote, level) in
            [(0, 9, Level::Warn), (1, 99, Level::Warn), (89, 11, Level::Warn), (9, 1, Level::Good)]
        {
            assert_eq!(row(local, remote).level(), Some(level), "{local} local, {remote} remote");
        }
        assert_eq!(row(0, 0).level(), None);
    }

    #[test]
    fn workloads_begin_with_what_the_daemon_remembers() {
        let topology = Topology::from(&numaward_topology::Machine::default());
        let now = Instant::now();
        let mut model = Model::new(topology.clone(), Version::on("6.12"), now);
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
        let host = Host { topology, version: Version::on("6.12"), events: Vec::new(), past };
        model.take(Update::Connected(Box::new(host)), now);
        let sample = Sample {
            at_millis: 61_000,
            full: true,
            promises: 0,
            nodes: Vec::new(),
            accesses: None,
            exclusive_cpus: Vec::new(),
            workloads: ["/a", "/long", "/new"].map(workload).to_vec(),
            removed: Vec::new(),
        };
        model.take(Update::Sample(Box::new(sample)), now);
        let lengths: Vec<usize> = model.rows.values().map(|row| row.history.len()).collect();
        assert_eq!(lengths, [21, HISTORY, 1]);
        let locals: Vec<f64> = model.rows["/a"].history.iter().map(|rates| rates.local).collect();
        assert_eq!((locals[0], locals[10], locals[20]), (20.0, 30.0, 0.0), "the oldest that is known first");
    }
}

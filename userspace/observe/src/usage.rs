//! CPU time and memory of workloads over the last hour.
//!
//! # Problem
//! Guarantees are planned by the usage of the past, also on hosts without Prometheus.
//!
//! # Algorithm
//! The history's thread reads the cgroup of each workload about once a minute: with each of its samples, a twelfth of the workloads, so that
//! one sample takes little time. A reading has the mean CPU usage since the previous one, and the memory at its time.
//!
//! The CPU time by node is the growth since the begin of the previous one of two windows of half an hour each, so that
//! it is read twice an hour only.
//!
//! # Bounds
//! There are readings of at most [`MAX_HISTORIES`] workloads, and of the last hour. A removed workload is forgotten after an hour, so that a
//! restarted unit keeps its past; if there are too many workloads, at once.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use numaward_api::{MAX_HISTORIES, NodeCpuUsage, UsageLevels, WorkloadUsage};
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_topology::NodeId;

/// Interval between two readings of a workload.
const READ_INTERVAL: Duration = Duration::from_mins(1);
/// Time by which a reading may come early, so that it comes with one of the history's samples.
const TOLERANCE: Duration = Duration::from_millis(2500);
/// Number of samples in which all workloads are read.
const SAMPLES_PER_ROUND: usize = 12;
/// Age at which readings are forgotten.
const MAX_AGE: Duration = Duration::from_hours(1);

/// Length of a window of the CPU time by node.
const CPU_WINDOW: Duration = Duration::from_mins(30);

/// CPU time of each workload by node.
pub(crate) type CpuTimesByNode = BTreeMap<CgroupId, Vec<(NodeId, Duration)>>;

/// A workload to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsageTarget {
    pub(crate) id: CgroupId,
    pub(crate) path: CgroupPath,
    pub(crate) name: String,
}

/// Counters of a cgroup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageCounters {
    pub(crate) cpu_time: Duration,
    /// `None` if the cgroup has no memory controller.
    pub(crate) memory: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct UsageReading {
    at: Instant,
    span: Duration,
    cpu_millis: u64,
    memory: Option<u64>,
}

#[derive(Debug)]
struct UsageRecord {
    id: CgroupId,
    name: String,
    read_at: Instant,
    cpu_time: Duration,
    readings: VecDeque<UsageReading>,
}

/// Usage of all workloads in the last hour.
#[derive(Debug, Default)]
pub(crate) struct UsageHistory {
    workloads: BTreeMap<CgroupPath, UsageRecord>,
    /// CPU time by node at the beginnings of the previous window and of this one.
    window_starts: VecDeque<(Instant, CpuTimesByNode)>,
}

impl UsageHistory {
    /// Returns the workloads to read now, and forgets old ones.
    pub(crate) fn take_due(&mut self, now: Instant, present: Vec<UsageTarget>) -> Vec<UsageTarget> {
        let paths: BTreeSet<&CgroupPath> = present.iter().map(|target| &target.path).collect();
        let is_full = present.len() > MAX_HISTORIES;
        self.workloads.retain(|path, record| {
            record.readings.retain(|reading| now.duration_since(reading.at) < MAX_AGE);
            paths.contains(path) || !is_full && !record.readings.is_empty()
        });
        let at_once = present.len().min(MAX_HISTORIES).div_ceil(SAMPLES_PER_ROUND);
        let mut room = MAX_HISTORIES.saturating_sub(self.workloads.len());
        let mut due: Vec<(Option<Instant>, UsageTarget)> = Vec::new();
        for target in present {
            match self.workloads.get(&target.path) {
                Some(record) if record.read_at + READ_INTERVAL <= now + TOLERANCE => {
                    due.push((Some(record.read_at), target));
                }
                None if room > 0 => {
                    room -= 1;
                    due.push((None, target));
                }
                Some(_) | None => {}
            }
        }
        due.sort_by_key(|(read_at, _)| *read_at);
        due.truncate(at_once);
        due.into_iter().map(|(_, target)| target).collect()
    }

    pub(crate) fn add(&mut self, target: UsageTarget, now: Instant, counters: UsageCounters) {
        let UsageTarget { id, path, name } = target;
        let record = self.workloads.entry(path).or_insert_with(|| UsageRecord {
            id,
            name: String::new(),
            read_at: now,
            cpu_time: counters.cpu_time,
            readings: VecDeque::new(),
        });
        let span = now.duration_since(record.read_at);
        // The counter of a new cgroup with the same path begins at zero.
        let used = counters.cpu_time.checked_sub(record.cpu_time).filter(|_| record.id == id);
        if let Some(used) = used.filter(|_| !span.is_zero()) {
            let millis = used.as_micros().saturating_mul(1000) / span.as_micros().max(1);
            let cpu_millis = u64::try_from(millis).unwrap_or(u64::MAX);
            record.readings.push_back(UsageReading { at: now, span, cpu_millis, memory: counters.memory });
        }
        record.id = id;
        record.name = name;
        record.read_at = now;
        record.cpu_time = counters.cpu_time;
    }

    /// Returns whether a window of the CPU time by node begins now.
    pub(crate) fn is_window_due(&self, now: Instant) -> bool {
        self.window_starts.back().is_none_or(|(start, _)| now.duration_since(*start) >= CPU_WINDOW)
    }

    /// Begins a window of the CPU time by node.
    pub(crate) fn start_window(&mut self, now: Instant, times: CpuTimesByNode) {
        self.window_starts.push_back((now, times));
        while self.window_starts.len() > 2 {
            self.window_starts.pop_front();
        }
    }

    /// Returns the CPU time by node since the begin of the previous window, by cgroup.
    pub(crate) fn cpu_by_node(&self, now: &CpuTimesByNode) -> BTreeMap<String, Vec<NodeCpuUsage>> {
        let Some((_, start)) = self.window_starts.front() else { return BTreeMap::new() };
        let grown = |(path, record): (&CgroupPath, &UsageRecord)| {
            let before = start.get(&record.id);
            let on = |(node, time): &(NodeId, Duration)| {
                let before = before.and_then(|before| before.iter().find(|(of, _)| of == node));
                let grown = time.saturating_sub(before.map_or(Duration::ZERO, |(_, before)| *before));
                NodeCpuUsage { node: node.0, micros: u64::try_from(grown.as_micros()).unwrap_or(u64::MAX) }
            };
            Some((path.to_string(), now.get(&record.id)?.iter().map(on).collect()))
        };
        self.workloads.iter().filter_map(grown).collect()
    }

    /// Returns the usage of each workload that was read at least twice, by cgroup, without allocations and CPU time by node.
    pub(crate) fn workloads(&self) -> Vec<WorkloadUsage> {
        let known = self.workloads.iter().filter(|(_, record)| !record.readings.is_empty());
        let usage = known.map(|(path, record)| WorkloadUsage {
            cgroup: path.to_string(),
            workload: record.name.clone(),
            observed_seconds: record.readings.iter().map(|reading| reading.span).sum::<Duration>().as_secs(),
            cpu_millis: levels(record.readings.iter().map(|reading| reading.cpu_millis)).unwrap_or_default(),
            memory_bytes: levels(record.readings.iter().filter_map(|reading| reading.memory)),
            cpu_by_node: Vec::new(),
            allocated: None,
        });
        usage.collect()
    }
}

/// Returns the distribution of figures; `None` if there are none.
fn levels(figures: impl Iterator<Item = u64>) -> Option<UsageLevels> {
    let mut figures: Vec<u64> = figures.collect();
    figures.sort_unstable();
    // The nearest rank.
    let at = |percent: usize| figures.get((figures.len() * percent).div_ceil(100).saturating_sub(1)).copied();
    Some(UsageLevels { median: at(50)?, p95: at(95)?, peak: *figures.last()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(number: usize, id: u64) -> UsageTarget {
        UsageTarget {
            id: CgroupId(id),
            path: format!("/w{number}").parse().unwrap(),
            name: format!("w{number}"),
        }
    }

    fn counters(cpu_seconds: u64, memory: u64) -> UsageCounters {
        UsageCounters { cpu_time: Duration::from_secs(cpu_seconds), memory: Some(memory) }
    }

    #[test]
    fn summarizes_readings_of_an_hour() {
        let (start, mut usage) = (Instant::now(), UsageHistory::default());
        let minute = |number: u64| start + Duration::from_mins(number);
        let mut cpu_seconds = 0;
        for number in 0..=100 {
            let due = usage.take_due(minute(number), vec![target(1, 1)]);
            assert_eq!(due, [target(1, 1)], "{number}");
            // Ten minutes with two CPUs, which are forgotten, then half a CPU, and one minute with four.
            cpu_seconds += match number {
                0 => 7,
                1..=10 => 120,
                90 => 240,
                _ => 30,
            };
            usage.add(target(1, 1), minute(number), counters(cpu_seconds, number));
        }
        let found = usage.workloads();
        assert_eq!((found.len(), found[0].cgroup.as_str(), found[0].workload.as_str()), (1, "/w1", "w1"));
        assert_eq!(found[0].observed_seconds, 3600);
        assert_eq!(found[0].cpu_millis, UsageLevels { median: 500, p95: 500, peak: 4000 });
        assert_eq!(found[0].memory_bytes, Some(UsageLevels { median: 70, p95: 97, peak: 100 }));

        // A restarted unit has a new cgroup, and keeps its past. One that is gone is forgotten in the end.
        usage.add(target(1, 2), minute(101), counters(1, 0));
        assert_eq!(usage.workloads()[0].cpu_millis.peak, 4000);
        usage.take_due(minute(150), Vec::new());
        assert_eq!(usage.workloads().len(), 1);
        usage.take_due(minute(170), Vec::new());
        assert_eq!(usage.workloads(), []);
    }

    #[test]
    fn cpu_time_by_node_is_that_of_two_windows() {
        let (start, mut usage) = (Instant::now(), UsageHistory::default());
        let times = |id: u64, seconds: [u64; 2]| -> CpuTimesByNode {
            let on = |(node, seconds)| (NodeId(node), Duration::from_secs(seconds));
            [(CgroupId(id), (0..).zip(seconds).map(on).collect())].into()
        };
        let grown = |usage: &UsageHistory, now: &CpuTimesByNode| {
            let found = usage.cpu_by_node(now).remove("/w1");
            found.map(|nodes| nodes.iter().map(|of| of.micros / 1_000_000).collect::<Vec<_>>())
        };
        usage.add(target(1, 1), start, counters(0, 0));
        assert_eq!(grown(&usage, &times(1, [5, 0])), None, "no window has begun");
        for (minutes, is_due, at) in
            [(0, true, [100, 0]), (29, false, [0, 0]), (30, true, [130, 0]), (60, true, [130, 20])]
        {
            let now = start + Duration::from_mins(minutes);
            assert_eq!(usage.is_window_due(now), is_due, "{minutes}");
            if is_due {
                usage.start_window(now, times(1, at));
            }
        }
        assert_eq!(grown(&usage, &times(1, [131, 50])), Some(vec![1, 50]), "of the last 30 to 60 minutes");
        usage.add(target(1, 2), start, counters(0, 0));
        assert_eq!(grown(&usage, &times(2, [7, 9])), Some(vec![7, 9]), "a restarted unit begins at zero");
        assert_eq!(grown(&usage, &CpuTimesByNode::new()), None);
    }

    #[test]
    fn reads_are_spread_and_bounded() {
        let (start, mut usage) = (Instant::now(), UsageHistory::default());
        let all: Vec<_> = (0..MAX_HISTORIES + 5).map(|number| target(number, 1)).collect();
        let mut read = 0;
        for sample in 0..24 {
            let now = start + Duration::from_secs(5) * sample;
            let due = usage.take_due(now, all.clone());
            assert!(due.len() <= MAX_HISTORIES.div_ceil(12), "{sample}: {}", due.len());
            read += due.len();
            for target in due {
                usage.add(target, now, counters(u64::from(sample), 1));
            }
            if sample == 11 {
                assert_eq!(read, MAX_HISTORIES, "each once in the first minute");
            }
        }
        assert_eq!((read, usage.workloads().len()), (2 * MAX_HISTORIES, MAX_HISTORIES));
    }
}

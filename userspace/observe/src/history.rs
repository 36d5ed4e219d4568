//! History of the last hour, kept in memory.
//!
//! # Problem
//! An engineer who opens the page, possibly after an alert, needs the recent past. Prometheus may not be installed.
//!
//! # Terms
//! - *step*: five seconds.
//! - *rings*: two ring buffers of figures: the last ten minutes by step, and the last hour by minute.
//! - *key*: identifies a workload: the path of its cgroup, or `other` for everything without counters of its own.
//!
//! # Algorithm
//! A sample is one reading of the probes' counters. The mean rates since the previous sample are added to the rings of
//! every node and workload once for each step in between, so that all rings end at the same time. Sampling may take
//! a thousandth of a CPU at most: the pause before the next sample grows with the cost of the last one, up to a
//! minute. Every twelve steps are summarized into a minute: the mean of the rates, and the last known value of the
//! levels (free and resident memory). After a pause of more than two minutes, only the last step is known.
//!
//! # Bounds
//! [`MAX_HISTORIES`] workloads have rings. A further workload takes the rings of a removed workload, else of a
//! workload without a guarantee that has been idle for ten minutes, the longest idle first. A workload with a
//! guarantee may take the rings of any workload without one. A removed workload is forgotten after an hour.
//!
//! Resident memory is only recorded while there are requests for the workloads, because it is only read then.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures of charts: 24 bits are enough, and none is negative"
)]

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, VecDeque},
    time::{Duration, Instant},
};

use numaward_api as api;
use numaward_api::MAX_HISTORIES;
use numaward_topology::NodeId;

const STEP: Duration = Duration::from_secs(5);
const STEP_SECS: u32 = 5;
/// Number of steps in the ring of ten minutes.
const RECENT_STEPS: usize = 120;
/// Number of steps per minute.
const STEPS_PER_MINUTE: usize = 12;
/// Number of minutes in the ring of an hour.
const HOUR_MINUTES: usize = 60;
/// Number of steps per point of a trend.
const STEPS_PER_POINT: usize = 2;
/// Inverse of the largest share of one CPU that sampling may take.
const CPU_SHARE_INVERSE: u32 = 1000;
/// Longest pause between samples.
const MAX_PAUSE: Duration = Duration::from_mins(1);

/// A figure of one step in bytes or bytes per second; NaN if unknown. 24 bits of precision are enough for a chart.
type Figure = f32;
const UNKNOWN: Figure = Figure::NAN;

/// Resolution of a ring.
#[derive(Clone, Copy)]
enum Resolution {
    Recent,
    Hour,
}

impl Resolution {
    fn step_seconds(self) -> u32 {
        match self {
            Self::Recent => STEP_SECS,
            Self::Hour => 60,
        }
    }
}

/// Rings of `N` figures per step. The last `LEVELS` figures are levels; the first ones are rates.
#[derive(Debug)]
struct Rings<const N: usize, const LEVELS: usize> {
    recent: VecDeque<[Figure; N]>,
    hour: VecDeque<[Figure; N]>,
}

type WorkloadRings = Rings<4, 1>;
type NodeRings = Rings<3, 1>;
type HostRings = Rings<1, 0>;

impl<const N: usize, const LEVELS: usize> Default for Rings<N, LEVELS> {
    fn default() -> Self {
        Self { recent: VecDeque::new(), hour: VecDeque::new() }
    }
}

impl<const N: usize, const LEVELS: usize> Rings<N, LEVELS> {
    fn push(&mut self, figures: [Figure; N]) {
        push(&mut self.recent, figures, RECENT_STEPS);
    }

    /// Adds a finished minute to the ring of the hour.
    fn summarize(&mut self) {
        let minute = self.recent.range(self.recent.len().saturating_sub(STEPS_PER_MINUTE)..);
        let mut figures = [UNKNOWN; N];
        for (index, figure) in figures.iter_mut().enumerate() {
            let mut known = minute.clone().map(|step| step[index]).filter(|figure| !figure.is_nan());
            *figure = if index >= N - LEVELS {
                known.next_back().unwrap_or(UNKNOWN)
            } else {
                let (sum, count) = known.fold((0.0, 0.0), |(sum, count), figure| (sum + figure, count + 1.0));
                // NaN if no step is known.
                sum / count
            };
        }
        push(&mut self.hour, figures, HOUR_MINUTES);
    }
}

/// Appends to a ring of at most `most` values. The ring grows in steps, and never reserves memory for more.
fn push<T>(ring: &mut VecDeque<T>, value: T, most: usize) {
    if ring.len() == most {
        ring.pop_front();
    } else if ring.len() == ring.capacity() {
        ring.reserve_exact((most - ring.len()).min(ring.len().max(STEPS_PER_MINUTE)));
    }
    ring.push_back(value);
}

/// Bytes that a workload has allocated so far: local, remote, missed.
pub(crate) type AllocatedSoFar = [u64; 3];

/// A workload in a sample.
#[derive(Debug)]
pub(crate) struct WorkloadSample<'a> {
    pub(crate) key: &'a str,
    pub(crate) name: &'a str,
    pub(crate) has_guarantee: bool,
    /// Absent if the workload has no counters of its own.
    pub(crate) counted: Option<AllocatedSoFar>,
    /// Absent if the resident memory was not read.
    pub(crate) resident: Option<u64>,
}

/// A node in a sample: bytes allocated there so far (local and remote), and free bytes.
#[derive(Debug)]
pub(crate) struct NodeSample {
    pub(crate) node: NodeId,
    pub(crate) counted: Option<[u64; 2]>,
    pub(crate) free: Option<u64>,
}

#[derive(Debug)]
struct WorkloadRecord {
    name: Box<str>,
    has_guarantee: bool,
    counted: Option<AllocatedSoFar>,
    /// Step at which the workload was last present.
    seen: u64,
    /// Step at which the workload last allocated.
    active: u64,
    /// `None` if the number of rings is exhausted.
    rings: Option<WorkloadRings>,
}

#[derive(Debug, Default)]
struct NodeRecord {
    counted: Option<[u64; 2]>,
    rings: NodeRings,
}

/// Rings of the host and of all workloads for the last hour.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Time of the last sample, at which the rings end.
    at: Option<Instant>,
    /// Number of steps so far.
    steps: u64,
    host: HostRings,
    nodes: BTreeMap<NodeId, NodeRecord>,
    workloads: HashMap<Box<str>, WorkloadRecord>,
}

/// Returns the growth per second; counts from 0 if the counter was reset, for example by another cgroup of the same
/// name.
fn rate(now: u64, before: u64, seconds: f32) -> Figure {
    now.checked_sub(before).unwrap_or(now) as Figure / seconds
}

fn rates<const N: usize>(now: Option<[u64; N]>, before: Option<[u64; N]>, seconds: f32) -> [Figure; N] {
    let Some(now) = now else { return [UNKNOWN; N] };
    let before = before.unwrap_or([0; N]);
    std::array::from_fn(|index| rate(now[index], before[index], seconds))
}

fn figure(bytes: Option<u64>) -> Figure {
    bytes.map_or(UNKNOWN, |bytes| bytes as Figure)
}

impl History {
    /// Adds a sample. The first sample only sets the baseline, because the time span of its counts is unknown.
    pub(crate) fn add_sample<'a>(
        &mut self,
        at: Instant,
        nodes: impl IntoIterator<Item = NodeSample>,
        workloads: impl IntoIterator<Item = WorkloadSample<'a>>,
    ) {
        let before = self.at.replace(at);
        let elapsed = before.map(|before| at.duration_since(before)).unwrap_or_default();
        let seconds = elapsed.as_secs_f32();
        // Unknown steps are added, too, because the position in a ring determines the time.
        let steps = if before.is_some() { (seconds / STEP.as_secs_f32()).round().max(1.0) as u64 } else { 0 };
        // After a long pause, the mean rate says nothing about single steps.
        let known = if elapsed > 2 * MAX_PAUSE { 1 } else { steps };
        self.steps += steps;
        let now = self.steps;

        let mut node_points = Vec::new();
        let mut there = Vec::new();
        for seen in nodes {
            let past = self.nodes.entry(seen.node).or_default();
            let [local, remote] = rates(seen.counted, past.counted, seconds);
            past.counted = seen.counted;
            there.push(seen.node);
            node_points.push((seen.node, [local, remote, figure(seen.free)]));
        }
        self.nodes.retain(|node, _| there.contains(node));

        let mut points: HashMap<Box<str>, [Figure; 4]> = HashMap::new();
        let mut missed_by_all = None;
        for seen in workloads {
            let past = match self.workloads.get_mut(seen.key) {
                Some(past) => past,
                None => self.workloads.entry(seen.key.into()).or_insert_with(|| WorkloadRecord {
                    name: seen.name.into(),
                    has_guarantee: false,
                    counted: None,
                    seen: now,
                    // Not active at this step, unless the rates below say so.
                    active: now.saturating_sub(1),
                    rings: None,
                }),
            };
            let [local, remote, missed] = rates(seen.counted, past.counted, seconds);
            if *past.name != *seen.name {
                past.name = seen.name.into();
            }
            past.counted = seen.counted;
            past.has_guarantee = seen.has_guarantee;
            past.seen = now;
            if local + remote > 0.0 {
                past.active = now;
            }
            if !missed.is_nan() {
                *missed_by_all.get_or_insert(0.0) += missed;
            }
            points.insert(seen.key.into(), [local, remote, missed, figure(seen.resident)]);
        }
        self.assign_rings(now);
        self.workloads.retain(|_, past| past.seen == now || past.rings.is_some() && past.is_remembered(now));

        // No ring is longer than an hour.
        for step in (0..steps.min((HOUR_MINUTES * STEPS_PER_MINUTE) as u64)).rev() {
            let is_known = step < known;
            let ends_minute = (now - step).is_multiple_of(STEPS_PER_MINUTE as u64);
            for (node, figures) in &node_points {
                let Some(past) = self.nodes.get_mut(node) else { continue };
                past.rings.push(if is_known { *figures } else { [UNKNOWN; 3] });
                if ends_minute {
                    past.rings.summarize();
                }
            }
            for (key, past) in &mut self.workloads {
                let Some(rings) = &mut past.rings else { continue };
                let figures = points.get(key).filter(|_| is_known);
                rings.push(figures.copied().unwrap_or([UNKNOWN; 4]));
                if ends_minute {
                    rings.summarize();
                }
            }
            self.host.push([missed_by_all.filter(|_| is_known).unwrap_or(UNKNOWN)]);
            if ends_minute {
                self.host.summarize();
            }
        }
    }

    /// Assigns rings to present workloads without any: free ones first, then those of workloads of less importance.
    fn assign_rings(&mut self, now: u64) {
        let mut room = MAX_HISTORIES.saturating_sub(self.count_rings());
        let mut candidates: Vec<(bool, u64, Box<str>)> = Vec::new();
        for (key, past) in &mut self.workloads {
            if past.rings.is_some() || past.seen != now {
                continue;
            }
            if room > 0 {
                room -= 1;
                past.rings = Some(WorkloadRings::default());
            } else if past.has_guarantee || past.active == now {
                candidates.push((past.has_guarantee, past.active, key.clone()));
            }
        }
        if candidates.is_empty() {
            return;
        }
        candidates.sort_by_key(|(has_guarantee, active, _)| Reverse((*has_guarantee, *active)));
        let worth = |past: &WorkloadRecord| (past.seen == now, past.has_guarantee, past.active);
        let mut holders: Vec<((bool, bool, u64), Box<str>)> = self
            .workloads
            .iter()
            .filter(|(_, past)| past.rings.is_some())
            .map(|(key, past)| (worth(past), key.clone()))
            .collect();
        holders.sort();
        for ((candidate_has_guarantee, _, candidates), ((is_there, has_guarantee, active), holder)) in
            candidates.into_iter().zip(holders)
        {
            let is_idle = now.saturating_sub(active) >= RECENT_STEPS as u64;
            let gives = !is_there || !has_guarantee && (is_idle || candidate_has_guarantee);
            if !gives {
                break;
            }
            if let Some(past) = self.workloads.get_mut(&holder) {
                past.rings = None;
            }
            if let Some(past) = self.workloads.get_mut(&candidates) {
                past.rings = Some(WorkloadRings::default());
            }
        }
    }

    fn count_rings(&self) -> usize {
        self.workloads.values().filter(|past| past.rings.is_some()).count()
    }

    /// Returns the host's last hour.
    pub(crate) fn host(&self, start: Instant) -> api::History {
        let series = |resolution: Resolution, pick: fn(&NodeRings) -> &VecDeque<[Figure; 3]>, missed| {
            api::HostSeries {
                step_seconds: resolution.step_seconds(),
                end_millis: self.end_millis(resolution, start),
                nodes: self
                    .nodes
                    .iter()
                    .map(|(node, past)| {
                        let ring = pick(&past.rings);
                        api::NodeSeries {
                            node: node.0,
                            local_bytes_per_second: figures_at(ring, 0),
                            remote_bytes_per_second: figures_at(ring, 1),
                            free_bytes: figures_at(ring, 2),
                        }
                    })
                    .collect(),
                missed_bytes_per_second: figures_at(missed, 0),
            }
        };
        let kept = self.count_rings();
        api::History {
            kept: kept as u64,
            dropped: (self.workloads.len() - kept) as u64,
            recent: series(Resolution::Recent, |rings| &rings.recent, &self.host.recent),
            hour: series(Resolution::Hour, |rings| &rings.hour, &self.host.hour),
        }
    }

    /// Returns the last hour of the workload with this key, or the sum of all workloads with this name. `None` if
    /// there is no history.
    pub(crate) fn workload(&self, start: Instant, key_or_name: &str) -> Option<api::WorkloadHistory> {
        let of_key = self.workloads.get(key_or_name).and_then(|past| past.rings.as_ref());
        let of_name = || {
            let named = self.workloads.values().filter(|past| *past.name == *key_or_name);
            named.filter_map(|past| past.rings.as_ref()).collect()
        };
        let found: Vec<&WorkloadRings> = of_key.map_or_else(of_name, |rings| vec![rings]);
        if found.is_empty() {
            return None;
        }
        let series = |resolution: Resolution, pick: fn(&WorkloadRings) -> &VecDeque<[Figure; 4]>| {
            let sum = sum_rings(found.iter().map(|rings| pick(rings)));
            api::WorkloadSeries {
                step_seconds: resolution.step_seconds(),
                end_millis: self.end_millis(resolution, start),
                local_bytes_per_second: figures_at(&sum, 0),
                remote_bytes_per_second: figures_at(&sum, 1),
                missed_bytes_per_second: figures_at(&sum, 2),
                resident_bytes: figures_at(&sum, 3),
            }
        };
        Some(api::WorkloadHistory {
            recent: series(Resolution::Recent, |rings| &rings.recent),
            hour: series(Resolution::Hour, |rings| &rings.hour),
        })
    }

    /// Returns the bytes that the workload with this key allocated in the full minutes of the last hour.
    pub(crate) fn hourly(&self, key: &str) -> Option<api::HourlyAllocations> {
        let minutes = &self.workloads.get(key)?.rings.as_ref()?.hour;
        let mut known = minutes.iter().filter(|minute| !minute[0].is_nan()).peekable();
        known.peek()?;
        let sums = known.fold([0.0_f64; 3], |sums, minute| {
            std::array::from_fn(|index| sums[index] + f64::from(minute[index]) * 60.0)
        });
        let [local_bytes, remote_bytes, missed_bytes] = sums.map(|sum| sum.round() as u64);
        Some(api::HourlyAllocations { local_bytes, remote_bytes, missed_bytes })
    }

    /// Returns the last ten minutes of all workloads.
    pub(crate) fn trends(&self, start: Instant) -> api::Trends {
        let mut workloads: Vec<api::Trend> = self
            .workloads
            .iter()
            .filter_map(|(key, past)| {
                let ring = &past.rings.as_ref()?.recent;
                let is_idle = ring.iter().all(|step| !(step[0] > 0.0 || step[1] > 0.0));
                let trend = |index| if is_idle { Vec::new() } else { downsample(&figures_at(ring, index)) };
                Some(api::Trend {
                    key: key.to_string(),
                    local_bytes_per_second: trend(0),
                    remote_bytes_per_second: trend(1),
                })
            })
            .collect();
        workloads.sort_by(|a, b| a.key.cmp(&b.key));
        api::Trends {
            step_seconds: STEP_SECS * STEPS_PER_POINT as u32,
            end_millis: self.end_millis(Resolution::Recent, start),
            workloads,
        }
    }

    /// Returns the end of a ring in milliseconds since `start`.
    fn end_millis(&self, resolution: Resolution, start: Instant) -> u64 {
        let since = self.at.map(|at| at.saturating_duration_since(start)).unwrap_or_default();
        let after = match resolution {
            Resolution::Recent => 0,
            // Without the unfinished minute.
            Resolution::Hour => self.steps % STEPS_PER_MINUTE as u64 * u64::from(STEP_SECS) * 1000,
        };
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX).saturating_sub(after)
    }
}

impl WorkloadRecord {
    fn is_remembered(&self, now: u64) -> bool {
        now - self.seen < (HOUR_MINUTES * STEPS_PER_MINUTE) as u64
    }
}

/// Returns the sum of rings that end at the same time. Unknown figures are skipped.
fn sum_rings<'a, const N: usize>(
    rings: impl Iterator<Item = &'a VecDeque<[Figure; N]>>,
) -> VecDeque<[Figure; N]> {
    let mut sum = VecDeque::new();
    for ring in rings {
        while sum.len() < ring.len() {
            sum.push_front([UNKNOWN; N]);
        }
        for (sum, step) in sum.iter_mut().rev().zip(ring.iter().rev()) {
            for (sum, figure) in sum.iter_mut().zip(step).filter(|(_, figure)| !figure.is_nan()) {
                *sum = if sum.is_nan() { *figure } else { *sum + figure };
            }
        }
    }
    sum
}

fn figures_at<const N: usize>(ring: &VecDeque<[Figure; N]>, index: usize) -> Vec<Option<u64>> {
    ring.iter().map(|step| (!step[index].is_nan()).then(|| step[index].round() as u64)).collect()
}

/// Returns means of [`STEPS_PER_POINT`] steps each, the latest last.
fn downsample(figures: &[Option<u64>]) -> Vec<Option<u64>> {
    let mean = |steps: &[Option<u64>]| {
        let (sum, count) = steps
            .iter()
            .flatten()
            .fold((0_u64, 0), |(sum, count), one| (sum.saturating_add(*one), count + 1));
        sum.checked_div(count)
    };
    figures.rchunks(STEPS_PER_POINT).map(mean).rev().collect()
}

/// Returns the pause after a sample of the given cost: a whole number of steps.
pub(crate) fn pause_after(cost: Duration) -> Duration {
    let steps = (cost * CPU_SHARE_INVERSE).as_secs().div_ceil(STEP.as_secs()).max(1);
    (STEP * u32::try_from(steps).unwrap_or(u32::MAX)).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    struct HistoryBench {
        start: Instant,
        history: History,
        /// Counted bytes of each workload, and true if it has a guarantee.
        workloads: BTreeMap<String, (AllocatedSoFar, bool)>,
        node: [u64; 2],
    }

    impl HistoryBench {
        fn new(workloads: usize) -> Self {
            let workloads = (0..workloads).map(|index| (format!("/w{index:04}"), ([0; 3], false)));
            let (start, history) = (Instant::now(), History::default());
            let mut host = Self { start, history, workloads: workloads.collect(), node: [0; 2] };
            host.sample(0);
            host
        }

        fn sample(&mut self, second: u64) {
            let nodes = [NodeSample { node: NodeId(0), counted: Some(self.node), free: Some(GIB) }];
            let workloads = self.workloads.iter().map(|(key, (counted, has_guarantee))| WorkloadSample {
                key,
                name: &key[1..],
                has_guarantee: *has_guarantee,
                counted: Some(*counted),
                resident: None,
            });
            self.history.add_sample(self.start + Duration::from_secs(second), nodes, workloads);
        }

        fn allocate(&mut self, key: &str, local: u64) {
            self.workloads.entry(key.to_owned()).or_default().0[0] += local;
        }

        fn has(&self, key: &str) -> bool {
            self.history.workload(self.start, key).is_some()
        }
    }

    #[test]
    fn keeps_rates_by_step_and_minute() {
        let mut host = HistoryBench::new(1);
        for step in 1..=24 {
            host.allocate("/w0000", if step == 13 { 600 } else { 5 });
            host.node = [10 * step, 5 * step];
            host.sample(5 * step);
        }
        let history = host.history.workload(host.start, "/w0000").unwrap();
        assert_eq!((history.recent.end_millis, history.hour.end_millis), (120_000, 120_000));
        let recent = history.recent.local_bytes_per_second;
        assert_eq!((recent.len(), recent[11], recent[12], recent[13]), (24, Some(1), Some(120), Some(1)));
        assert_eq!(history.hour.local_bytes_per_second, [Some(1), Some(11)], "(120 + 11) / 12 is near 11");
        assert_eq!(history.recent.resident_bytes[0], None);
        let node = &host.history.host(host.start).hour.nodes[0];
        assert_eq!(node.local_bytes_per_second, [Some(2), Some(2)]);
        assert_eq!(node.remote_bytes_per_second, [Some(1), Some(1)]);
        assert_eq!(node.free_bytes, [Some(GIB), Some(GIB)]);
        host.sample(125);
        let late = host.history.workload(host.start, "/w0000").unwrap();
        assert_eq!((late.recent.end_millis, late.hour.end_millis), (125_000, 120_000));
        let trends = host.history.trends(host.start);
        let trend = &trends.workloads[0].local_bytes_per_second;
        assert_eq!((trends.step_seconds, trend.len(), trend[6]), (10, 13, Some(60)));
    }

    #[test]
    fn late_sample_fills_missed_steps() {
        let mut host = HistoryBench::new(1);
        host.allocate("/w0000", 2000);
        host.sample(20);
        let recent = |host: &HistoryBench| {
            host.history.workload(host.start, "/w0000").unwrap().recent.local_bytes_per_second
        };
        assert_eq!(recent(&host), [Some(100); 4]);
        host.allocate("/w0000", 1 << 40);
        host.sample(20 + 180);
        let figures = recent(&host);
        assert_eq!(figures.len(), 4 + 36);
        assert_eq!(figures[4..39], [None; 35]);
        assert!(figures[39].is_some());
        host.sample(1_000_000);
        assert_eq!(recent(&host).len(), RECENT_STEPS, "however long nothing was seen");
    }

    #[test]
    fn reset_counters_start_from_zero() {
        let mut host = HistoryBench::new(1);
        host.allocate("/w0000", 5000);
        host.sample(5);
        host.workloads.insert("/w0000".to_owned(), ([50, 0, 0], false));
        host.allocate("/new", 500);
        host.sample(10);
        let of = |key: &str| host.history.workload(host.start, key).unwrap().recent.local_bytes_per_second;
        assert_eq!(of("/w0000"), [Some(1000), Some(10)]);
        assert_eq!(of("/new"), [Some(100)]);
        // By name, and two of one name together: they end at the same time.
        assert_eq!(of("new"), of("/new"));
        host.workloads.remove("/w0000");
        host.sample(15);
        let gone = host.history.workload(host.start, "w0000").unwrap().recent.local_bytes_per_second;
        assert_eq!(gone, [Some(1000), Some(10), None], "its past is kept");
        for minute in 1..=61 {
            host.sample(15 + 60 * minute);
        }
        assert!(!host.has("/w0000"), "for an hour");
        assert!(host.history.workload(host.start, "never").is_none());
    }

    #[test]
    fn idle_workloads_lose_rings_first() {
        let mut host = HistoryBench::new(MAX_HISTORIES + 2);
        host.sample(5);
        let coverage = |host: &HistoryBench| {
            let history = host.history.host(host.start);
            (history.kept, history.dropped)
        };
        assert_eq!(coverage(&host), (1000, 2));
        let kept: Vec<String> = host.workloads.keys().filter(|key| host.has(key)).cloned().collect();
        // A busy workload without rings gets none while no other workload has been idle for ten minutes.
        let out: Vec<String> = host.workloads.keys().filter(|key| !host.has(key)).cloned().collect();
        host.allocate(&out[0], 1 << 20);
        host.sample(10);
        assert!(!host.has(&out[0]));
        // A workload with a guarantee gets them at once.
        host.workloads.insert(out[1].clone(), ([0; 3], true));
        host.sample(15);
        assert!(host.has(&out[1]));
        assert_eq!(coverage(&host), (1000, 2));
        // A workload that has been idle for ten minutes loses its rings.
        let kept: Vec<String> = kept.into_iter().filter(|key| host.has(key)).collect();
        let idle = kept[0].clone();
        for second in [300, 600, 610, 615, 620] {
            for key in kept.iter().filter(|key| **key != idle) {
                host.allocate(key, 4096);
            }
            host.allocate(&out[0], 4096);
            host.sample(second);
        }
        assert!(host.has(&out[0]) && !host.has(&idle));
        assert_eq!(coverage(&host), (1000, 2));
        // A removed workload loses its rings at once.
        let gone = kept[1].clone();
        host.workloads.remove(&gone);
        host.allocate(&idle, 4096);
        host.sample(625);
        assert!(host.has(&idle) && !host.has(&gone));
    }

    #[test]
    fn hour_of_1000_workloads_fits_in_4_mib() {
        let mut host = HistoryBench::new(MAX_HISTORIES + 500);
        for step in 1..=800 {
            for index in 0..MAX_HISTORIES {
                host.allocate(&format!("/w{index:04}"), 4096);
            }
            host.sample(5 * step);
        }
        let rings = |past: &WorkloadRecord| {
            let of = |rings: &WorkloadRings| {
                rings.recent.capacity() * size_of::<[Figure; 4]>()
                    + rings.hour.capacity() * size_of::<[Figure; 4]>()
            };
            past.rings.as_ref().map_or(0, of)
        };
        let workloads = &host.history.workloads;
        let entry = size_of::<(Box<str>, WorkloadRecord)>() + 1;
        let bytes = workloads.capacity() * 8 / 7 * entry
            + workloads.iter().map(|(key, past)| key.len() + past.name.len() + rings(past)).sum::<usize>();
        println!("1,000 workloads with a past, 500 without: {bytes} bytes");
        assert_eq!(host.history.count_rings(), MAX_HISTORIES);
        assert!(bytes < 4 << 20, "{bytes}");
    }

    #[test]
    fn sampling_takes_one_thousandth_at_most() {
        for (millis, seconds) in [(0, 5), (4, 5), (5, 5), (6, 10), (25, 25), (59, 60), (5000, 60)] {
            assert_eq!(pause_after(Duration::from_millis(millis)).as_secs(), seconds, "{millis} ms");
        }
    }
}

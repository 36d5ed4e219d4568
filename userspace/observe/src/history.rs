//! History of the last hour, kept in memory.
//!
//! # Problem
//! An engineer who opens the page, possibly after an alert, needs the recent past. Prometheus may not be installed.
//!
//! # Terms
//! - *step*: five seconds.
//! - *rings*: figures of the last ten minutes by step and of the last hour by minute.
//! - *key*: identifies a workload; its cgroup or, without one, its name.
//!
//! # Algorithm
//! A sample is one reading of the probes' counters. The rates since the previous sample are added to the rings of
//! every node and workload, once for each step in between, so that all rings end at the same time. Sampling may take
//! a thousandth of a CPU at most: the pause before the next sample grows with the cost of the last one, up to a
//! minute. Every twelve steps are summarized into a minute: the mean of rates, the last value of levels.
//!
//! # Bounds
//! [`MAX_HISTORIES`] workloads have rings. A further workload takes the rings of a removed workload, else of a
//! workload without a guarantee that has been idle for ten minutes, the longest idle first. A workload with a
//! guarantee may take the rings of any workload without one. A removed workload is forgotten after an hour.
//!
//! Resident memory is not read for the history: it is available while there are requests for the workloads.

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
const STEP_SECONDS: u32 = 5;
/// Number of steps in the ring of ten minutes.
const RECENT: usize = 120;
/// Number of steps per minute.
const MINUTE: usize = 12;
/// Number of minutes in the ring of an hour.
const HOUR: usize = 60;
/// Number of steps per point of a trend.
const TREND: usize = 2;
/// Inverse of the largest share of one CPU that samples may take.
const COST: u32 = 1000;
/// Longest time between samples for which a mean rate is meaningful.
const LONGEST: Duration = Duration::from_mins(1);

/// A figure of one step in bytes or bytes per second; NaN if unknown. 24 bits of precision are enough for a chart.
type Figure = f32;
const UNKNOWN: Figure = Figure::NAN;

/// Selects one of the two rings.
#[derive(Clone, Copy)]
enum Length {
    Recent,
    Hour,
}

impl Length {
    fn step_seconds(self) -> u32 {
        match self {
            Self::Recent => STEP_SECONDS,
            Self::Hour => 60,
        }
    }
}

/// Rings of `N` figures per step. The last `LEVELS` figures are levels; the others are rates.
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
        push(&mut self.recent, figures, RECENT);
    }

    /// Adds a finished minute to the ring of the hour.
    fn summarize(&mut self) {
        let minute = self.recent.range(self.recent.len().saturating_sub(MINUTE)..);
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
        push(&mut self.hour, figures, HOUR);
    }
}

/// Appends to a ring of at most `most` values, and reserves no memory for more.
fn push<T>(ring: &mut VecDeque<T>, value: T, most: usize) {
    if ring.len() == most {
        ring.pop_front();
    } else if ring.len() == ring.capacity() {
        ring.reserve_exact((most - ring.len()).min(ring.len().max(MINUTE)));
    }
    ring.push_back(value);
}

/// Bytes that a workload has allocated so far: local, remote, missed.
pub(crate) type Counted = [u64; 3];

/// A workload in a sample.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) key: &'a str,
    pub(crate) name: &'a str,
    pub(crate) is_promised: bool,
    /// Absent if the workload has no counters of its own.
    pub(crate) counted: Option<Counted>,
    /// Absent if the resident memory was not read.
    pub(crate) resident: Option<u64>,
}

/// A node in a sample: bytes allocated there (local and remote) and free bytes.
#[derive(Debug)]
pub(crate) struct SeenNode {
    pub(crate) node: NodeId,
    pub(crate) counted: Option<[u64; 2]>,
    pub(crate) free: Option<u64>,
}

#[derive(Debug)]
struct Past {
    name: Box<str>,
    is_promised: bool,
    counted: Option<Counted>,
    /// Step at which the workload was last present.
    seen: u64,
    /// Step at which the workload last allocated.
    active: u64,
    /// `None` if the number of rings is exhausted.
    rings: Option<WorkloadRings>,
}

#[derive(Debug, Default)]
struct NodePast {
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
    nodes: BTreeMap<NodeId, NodePast>,
    workloads: HashMap<Box<str>, Past>,
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
    pub(crate) fn take<'a>(
        &mut self,
        at: Instant,
        nodes: impl IntoIterator<Item = SeenNode>,
        workloads: impl IntoIterator<Item = Seen<'a>>,
    ) {
        let before = self.at.replace(at);
        let elapsed = before.map(|before| at.duration_since(before)).unwrap_or_default();
        let seconds = elapsed.as_secs_f32();
        // All steps since the last sample, so that a ring that ends now starts at the right time.
        let steps = if before.is_some() { (seconds / STEP.as_secs_f32()).round().max(1.0) as u64 } else { 0 };
        // After a long pause, a mean would claim to describe the time in between.
        let known = if elapsed > 2 * LONGEST { 1 } else { steps };
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
                None => self.workloads.entry(seen.key.into()).or_insert_with(|| Past {
                    name: seen.name.into(),
                    is_promised: false,
                    counted: None,
                    seen: now,
                    // Idle, unless it has allocated since it appeared.
                    active: now.saturating_sub(1),
                    rings: None,
                }),
            };
            let [local, remote, missed] = rates(seen.counted, past.counted, seconds);
            if *past.name != *seen.name {
                past.name = seen.name.into();
            }
            past.counted = seen.counted;
            past.is_promised = seen.is_promised;
            past.seen = now;
            if local + remote > 0.0 {
                past.active = now;
            }
            if !missed.is_nan() {
                *missed_by_all.get_or_insert(0.0) += missed;
            }
            points.insert(seen.key.into(), [local, remote, missed, figure(seen.resident)]);
        }
        self.give_rings(now);
        self.workloads.retain(|_, past| past.seen == now || past.rings.is_some() && past.is_remembered(now));

        // No ring is longer than an hour.
        for step in (0..steps.min((HOUR * MINUTE) as u64)).rev() {
            let is_known = step < known;
            let ends_minute = (now - step).is_multiple_of(MINUTE as u64);
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

    /// Assigns rings to workloads without any, up to the bound.
    fn give_rings(&mut self, now: u64) {
        let mut room = MAX_HISTORIES.saturating_sub(self.kept());
        let mut wanting: Vec<(bool, u64, Box<str>)> = Vec::new();
        for (key, past) in &mut self.workloads {
            if past.rings.is_some() || past.seen != now {
                continue;
            }
            if room > 0 {
                room -= 1;
                past.rings = Some(WorkloadRings::default());
            } else if past.is_promised || past.active == now {
                wanting.push((past.is_promised, past.active, key.clone()));
            }
        }
        if wanting.is_empty() {
            return;
        }
        wanting.sort_by_key(|(is_promised, active, _)| Reverse((*is_promised, *active)));
        let worth = |past: &Past| (past.seen == now, past.is_promised, past.active);
        let mut holding: Vec<((bool, bool, u64), Box<str>)> = self
            .workloads
            .iter()
            .filter(|(_, past)| past.rings.is_some())
            .map(|(key, past)| (worth(past), key.clone()))
            .collect();
        holding.sort();
        for ((is_wanting_promised, _, wanting), ((is_there, is_promised, active), holder)) in
            wanting.into_iter().zip(holding)
        {
            let is_idle = now.saturating_sub(active) >= RECENT as u64;
            let gives = !is_there || !is_promised && (is_idle || is_wanting_promised);
            if !gives {
                break;
            }
            if let Some(past) = self.workloads.get_mut(&holder) {
                past.rings = None;
            }
            if let Some(past) = self.workloads.get_mut(&wanting) {
                past.rings = Some(WorkloadRings::default());
            }
        }
    }

    fn kept(&self) -> usize {
        self.workloads.values().filter(|past| past.rings.is_some()).count()
    }

    /// Returns the host's last hour.
    pub(crate) fn host(&self, start: Instant) -> api::History {
        let series =
            |length: Length, pick: fn(&NodeRings) -> &VecDeque<[Figure; 3]>, missed| api::HostSeries {
                step_seconds: length.step_seconds(),
                end_millis: self.end_millis(length, start),
                nodes: self
                    .nodes
                    .iter()
                    .map(|(node, past)| {
                        let ring = pick(&past.rings);
                        api::NodeSeries {
                            node: node.0,
                            local_bytes_per_second: column(ring, 0),
                            remote_bytes_per_second: column(ring, 1),
                            free_bytes: column(ring, 2),
                        }
                    })
                    .collect(),
                missed_bytes_per_second: column(missed, 0),
            };
        let kept = self.kept();
        api::History {
            kept: kept as u64,
            dropped: (self.workloads.len() - kept) as u64,
            recent: series(Length::Recent, |rings| &rings.recent, &self.host.recent),
            hour: series(Length::Hour, |rings| &rings.hour, &self.host.hour),
        }
    }

    /// Returns the last hour of the workload with this key, or the sum of all workloads with this name. `None` if
    /// there is no history.
    pub(crate) fn workload(&self, start: Instant, asked: &str) -> Option<api::WorkloadHistory> {
        let of_key = self.workloads.get(asked).and_then(|past| past.rings.as_ref());
        let of_name = || {
            let named = self.workloads.values().filter(|past| *past.name == *asked);
            named.filter_map(|past| past.rings.as_ref()).collect()
        };
        let found: Vec<&WorkloadRings> = of_key.map_or_else(of_name, |rings| vec![rings]);
        if found.is_empty() {
            return None;
        }
        let series = |length: Length, pick: fn(&WorkloadRings) -> &VecDeque<[Figure; 4]>| {
            let sum = total(found.iter().map(|rings| pick(rings)));
            api::WorkloadSeries {
                step_seconds: length.step_seconds(),
                end_millis: self.end_millis(length, start),
                local_bytes_per_second: column(&sum, 0),
                remote_bytes_per_second: column(&sum, 1),
                missed_bytes_per_second: column(&sum, 2),
                resident_bytes: column(&sum, 3),
            }
        };
        Some(api::WorkloadHistory {
            recent: series(Length::Recent, |rings| &rings.recent),
            hour: series(Length::Hour, |rings| &rings.hour),
        })
    }

    /// Returns the last ten minutes of all workloads.
    pub(crate) fn trends(&self, start: Instant) -> api::Trends {
        let mut workloads: Vec<api::Trend> = self
            .workloads
            .iter()
            .filter_map(|(key, past)| {
                let ring = &past.rings.as_ref()?.recent;
                let is_idle = ring.iter().all(|step| !(step[0] > 0.0 || step[1] > 0.0));
                let trend = |index| if is_idle { Vec::new() } else { coarse(&column(ring, index)) };
                Some(api::Trend {
                    key: key.to_string(),
                    local_bytes_per_second: trend(0),
                    remote_bytes_per_second: trend(1),
                })
            })
            .collect();
        workloads.sort_by(|a, b| a.key.cmp(&b.key));
        api::Trends {
            step_seconds: STEP_SECONDS * TREND as u32,
            end_millis: self.end_millis(Length::Recent, start),
            workloads,
        }
    }

    /// Returns the end of a ring in milliseconds.
    fn end_millis(&self, length: Length, start: Instant) -> u64 {
        let since = self.at.map(|at| at.saturating_duration_since(start)).unwrap_or_default();
        let after = match length {
            Length::Recent => 0,
            // Without the unfinished minute.
            Length::Hour => self.steps % MINUTE as u64 * u64::from(STEP_SECONDS) * 1000,
        };
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX).saturating_sub(after)
    }
}

impl Past {
    fn is_remembered(&self, now: u64) -> bool {
        now - self.seen < (HOUR * MINUTE) as u64
    }
}

/// Returns the sum of rings that end at the same time. Unknown figures are skipped.
fn total<'a, const N: usize>(
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

fn column<const N: usize>(ring: &VecDeque<[Figure; N]>, index: usize) -> Vec<Option<u64>> {
    ring.iter().map(|step| (!step[index].is_nan()).then(|| step[index].round() as u64)).collect()
}

/// Returns means of [`TREND`] steps each, the latest last.
fn coarse(figures: &[Option<u64>]) -> Vec<Option<u64>> {
    let mean = |steps: &[Option<u64>]| {
        let (sum, count) = steps
            .iter()
            .flatten()
            .fold((0_u64, 0), |(sum, count), one| (sum.saturating_add(*one), count + 1));
        sum.checked_div(count)
    };
    figures.rchunks(TREND).map(mean).rev().collect()
}

/// Returns the pause after a sample of the given cost: a whole number of steps.
pub(crate) fn pause(cost: Duration) -> Duration {
    let steps = (cost * COST).as_secs().div_ceil(STEP.as_secs()).max(1);
    (STEP * u32::try_from(steps).unwrap_or(u32::MAX)).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    struct Host {
        start: Instant,
        history: History,
        /// What each workload has counted, and whether something is promised to it.
        workloads: BTreeMap<String, (Counted, bool)>,
        node: [u64; 2],
    }

    impl Host {
        fn new(workloads: usize) -> Self {
            let workloads = (0..workloads).map(|index| (format!("/w{index:04}"), ([0; 3], false)));
            let (start, history) = (Instant::now(), History::default());
            let mut host = Self { start, history, workloads: workloads.collect(), node: [0; 2] };
            host.sample(0);
            host
        }

        fn sample(&mut self, second: u64) {
            let nodes = [SeenNode { node: NodeId(0), counted: Some(self.node), free: Some(GIB) }];
            let workloads = self.workloads.iter().map(|(key, (counted, is_promised))| Seen {
                key,
                name: &key[1..],
                is_promised: *is_promised,
                counted: Some(*counted),
                resident: None,
            });
            self.history.take(self.start + Duration::from_secs(second), nodes, workloads);
        }

        fn allocate(&mut self, key: &str, local: u64) {
            self.workloads.entry(key.to_owned()).or_default().0[0] += local;
        }

        fn has(&self, key: &str) -> bool {
            self.history.workload(self.start, key).is_some()
        }
    }

    #[test]
    fn rates_are_kept_by_step_and_by_minute() {
        let mut host = Host::new(1);
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
    fn a_late_sample_fills_the_steps_before_it_and_a_pause_leaves_them_unknown() {
        let mut host = Host::new(1);
        host.allocate("/w0000", 2000);
        host.sample(20);
        let recent =
            |host: &Host| host.history.workload(host.start, "/w0000").unwrap().recent.local_bytes_per_second;
        assert_eq!(recent(&host), [Some(100); 4]);
        host.allocate("/w0000", 1 << 40);
        host.sample(20 + 180);
        let figures = recent(&host);
        assert_eq!(figures.len(), 4 + 36);
        assert_eq!(figures[4..39], [None; 35]);
        assert!(figures[39].is_some());
        host.sample(1_000_000);
        assert_eq!(recent(&host).len(), RECENT, "however long nothing was seen");
    }

    #[test]
    fn what_begins_anew_counts_from_there_and_what_comes_has_no_past() {
        let mut host = Host::new(1);
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
    fn beyond_the_cap_the_idle_are_dropped_and_the_promised_are_not() {
        let mut host = Host::new(MAX_HISTORIES + 2);
        host.sample(5);
        let coverage = |host: &Host| {
            let history = host.history.host(host.start);
            (history.kept, history.dropped)
        };
        assert_eq!(coverage(&host), (1000, 2));
        let kept: Vec<String> = host.workloads.keys().filter(|key| host.has(key)).cloned().collect();
        // One that works gets no other's past before that has been idle for ten minutes.
        let out: Vec<String> = host.workloads.keys().filter(|key| !host.has(key)).cloned().collect();
        host.allocate(&out[0], 1 << 20);
        host.sample(10);
        assert!(!host.has(&out[0]));
        // With a guarantee it does.
        host.workloads.insert(out[1].clone(), ([0; 3], true));
        host.sample(15);
        assert!(host.has(&out[1]));
        assert_eq!(coverage(&host), (1000, 2));
        // After ten minutes in which all but one of the others worked, that one is dropped.
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
        // Who is gone makes room at once.
        let gone = kept[1].clone();
        host.workloads.remove(&gone);
        host.allocate(&idle, 4096);
        host.sample(625);
        assert!(host.has(&idle) && !host.has(&gone));
    }

    #[test]
    fn a_thousand_workloads_for_an_hour_take_less_than_4_mib() {
        let mut host = Host::new(MAX_HISTORIES + 500);
        for step in 1..=800 {
            for index in 0..MAX_HISTORIES {
                host.allocate(&format!("/w{index:04}"), 4096);
            }
            host.sample(5 * step);
        }
        let rings = |past: &Past| {
            let of = |rings: &WorkloadRings| {
                rings.recent.capacity() * size_of::<[Figure; 4]>()
                    + rings.hour.capacity() * size_of::<[Figure; 4]>()
            };
            past.rings.as_ref().map_or(0, of)
        };
        let workloads = &host.history.workloads;
        let entry = size_of::<(Box<str>, Past)>() + 1;
        let bytes = workloads.capacity() * 8 / 7 * entry
            + workloads.iter().map(|(key, past)| key.len() + past.name.len() + rings(past)).sum::<usize>();
        println!("1,000 workloads with a past, 500 without: {bytes} bytes");
        assert_eq!(host.history.kept(), MAX_HISTORIES);
        assert!(bytes < 4 << 20, "{bytes}");
    }

    #[test]
    fn samples_take_no_more_than_a_thousandth() {
        for (millis, seconds) in [(0, 5), (4, 5), (5, 5), (6, 10), (25, 25), (59, 60), (5000, 60)] {
            assert_eq!(pause(Duration::from_millis(millis)).as_secs(), seconds, "{millis} ms");
        }
    }
}

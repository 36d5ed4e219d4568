//! The conditions of `dashboards/prometheus/rules.yaml`, watched without Prometheus.
//!
//! Problem: the same conditions are to fire at the same time, from the same counters, where nobody scrapes.
//!
//! Terms: a *condition* takes samples of some names, and of each *subject* (what is left of the labels) a *measure*; it
//! is *active* for a subject while the measure is above a bound, and *fires* once it was so for a while.
//!
//! Algorithm: of counters, each series' changes are kept for as long as the longest window; an increase is the sum of
//! the steps within the window, as in Prometheus (one that falls started anew), without extrapolation. All that is counted
//! here starts at zero, with the daemon or with the workload: so does a series that appears. Series are summed after that.
//!
//! The two alerts about scraping are not watched: that the daemon is down, and that scrapes are slow.
//!
//! Invariants: a test holds the table against the rules, and runs the rules' own tests on it; the number of series is
//! bounded.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use numaward_topology::Bytes;

use crate::metrics::{Description, Sample, Value};

/// Series that are followed; workloads come and go, and most have none.
const MAX_SERIES: usize = 1 << 16;
const MINUTE: Duration = Duration::from_mins(1);
const MINUTES_5: Duration = Duration::from_mins(5);
const MINUTES_10: Duration = Duration::from_mins(10);
const MINUTES_15: Duration = Duration::from_mins(15);

const WARNING: &str = "warning";
pub(super) const CRITICAL: &str = "critical";

/// The labels of a workload.
const WORKLOAD: &[&str] = &["namespace", "pod", "container", "workload"];

/// What an alert is about: labels and their values, in the order of the condition.
pub(super) type Subject = Vec<(&'static str, String)>;

/// How much there is of something.
#[derive(Clone, Copy, Debug)]
enum Measure {
    /// How much a second, over a window.
    Rate(Duration),
    /// How much in a window.
    Increase(Duration),
    /// The value itself.
    Value,
}

/// A condition.
#[derive(Debug)]
pub(super) struct Condition {
    /// Its name.
    pub(super) alert: &'static str,
    /// How bad it is: the label of the rules.
    pub(super) severity: &'static str,
    /// What it means.
    pub(super) summary: &'static str,
    /// For how long it has to hold.
    hold: Duration,
    samples: &'static [&'static str],
    /// A label and the values of which it has to have one.
    only: Option<(&'static str, &'static [&'static str])>,
    /// A label and the value that it must not have.
    without: Option<(&'static str, &'static str)>,
    by: &'static [&'static str],
    measure: Measure,
    above: f64,
    /// Says it of a subject, with the value.
    pub(super) describe: fn(&Subject, f64) -> String,
}

/// The name of a workload, for sentences and logs.
pub(super) fn workload(of: &Subject) -> String {
    match ["namespace", "pod", "container"].map(|name| label(of, name)) {
        [namespace, pod, container] if !pod.is_empty() => format!("{namespace}/{pod}/{container}"),
        _ => label(of, "workload").to_owned(),
    }
}

/// A label of a subject, for sentences.
fn label<'a>(of: &'a Subject, label: &str) -> &'a str {
    of.iter().find(|(name, _)| *name == label).map_or("", |(_, value)| value)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for people to read")]
fn bytes(value: f64) -> Bytes {
    // Two digits are enough: 1.2Mi rather than 1234567.
    let (mut unit, value) = (1_u64, value.abs().round() as u64);
    while value / unit >= 10 * 1024 {
        unit *= 1024;
    }
    Bytes(value / unit * unit)
}

pub(super) const CONDITIONS: [Condition; 11] = [
    Condition {
        alert: "NumawardNumaMisses",
        severity: WARNING,
        summary: "A workload with a guarantee gets memory outside its nodes.",
        hold: MINUTE,
        samples: &["numaward_numa_miss_bytes_total"],
        only: None,
        without: None,
        by: WORKLOAD,
        measure: Measure::Rate(MINUTES_5),
        above: 64.0 * 1024.0,
        describe: |of, value| {
            format!("{} gets {}/s on nodes that are not promised to it.", workload(of), bytes(value))
        },
    },
    Condition {
        alert: "NumawardMemoryMisplaced",
        severity: WARNING,
        summary: "Memory of a workload with a guarantee lies outside its nodes.",
        hold: MINUTES_5,
        samples: &["numaward_promise_resident_bytes"],
        only: Some(("where", &["off"])),
        without: None,
        by: &["namespace", "pod", "container", "workload", "kind"],
        measure: Measure::Value,
        above: 16_777_216.0,
        describe: |of, value| {
            let (workload, kind) = (workload(of), label(of, "kind"));
            format!("{workload} has {} ({kind}) on nodes that are not promised to it.", bytes(value))
        },
    },
    Condition {
        alert: "NumawardHeadroomLow",
        severity: WARNING,
        summary: "A promise of memory on a node is about to be broken.",
        hold: MINUTES_5,
        samples: &["numaward_node_headroom_low"],
        only: None,
        without: None,
        by: &["numa_node"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| {
            format!(
                "Node {} may soon not have the memory that is promised on it and not used yet.",
                label(of, "numa_node")
            )
        },
    },
    Condition {
        alert: "NumawardBudgetExceeded",
        severity: WARNING,
        summary: "A workload keeps more memory on a node than its share there.",
        hold: MINUTES_10,
        samples: &["numaward_budget_excess_bytes"],
        only: None,
        without: None,
        by: &["namespace", "pod", "container", "workload", "numa_node"],
        measure: Measure::Value,
        above: 16_777_216.0,
        describe: |of, value| {
            format!(
                "{} has {} on node {} that may be promised to others.",
                workload(of),
                bytes(value),
                label(of, "numa_node")
            )
        },
    },
    Condition {
        alert: "NumawardPinningErrors",
        severity: WARNING,
        summary: "Requests for guarantees are refused.",
        hold: MINUTES_10,
        samples: &[
            "numaward_memory_manager_pinning_errors_total",
            "numaward_cpu_manager_pinning_errors_total",
            "numaward_topology_manager_admission_errors_total",
        ],
        only: None,
        without: None,
        by: &[],
        measure: Measure::Rate(MINUTES_5),
        above: 0.0,
        describe: |_, value| format!("{:.1} requests a minute were refused for 10 minutes.", value * 60.0),
    },
    Condition {
        alert: "NumawardAdmissionStorm",
        severity: WARNING,
        summary: "Something asks for guarantees over and over.",
        hold: MINUTES_10,
        samples: &["numaward_topology_manager_admission_requests_total"],
        only: None,
        without: None,
        by: &[],
        measure: Measure::Rate(MINUTES_5),
        above: 1.0,
        describe: |_, value| {
            format!(
                "{value:.1} requests a second are decided on; a controller that is refused and tries again at once does \
                 this."
            )
        },
    },
    Condition {
        alert: "NumawardDriftReturns",
        severity: WARNING,
        summary: "Somebody keeps rewriting what numaward enforces.",
        hold: MINUTES_5,
        samples: &["numaward_drift_total"],
        only: None,
        without: None,
        by: &["knob"],
        measure: Measure::Increase(MINUTES_15),
        above: 5.0,
        describe: |of, value| {
            format!("{} was found changed {value:.0} times in 15 minutes.", label(of, "knob"))
        },
    },
    Condition {
        alert: "NumawardPinCausedOomKill",
        severity: CRITICAL,
        summary: "A process was killed because of its pins while other nodes may have had memory.",
        hold: Duration::ZERO,
        samples: &["numaward_oom_kills_total"],
        only: Some(("constraint", &["cpuset", "mempolicy"])),
        without: None,
        by: &["namespace", "pod", "container", "workload", "constraint"],
        measure: Measure::Increase(MINUTES_10),
        above: 0.0,
        describe: |of, value| {
            let (workload, constraint) = (workload(of), label(of, "constraint"));
            format!("{value:.0} processes of {workload} were killed with the constraint {constraint}.")
        },
    },
    Condition {
        alert: "NumawardUnpinnedStarts",
        severity: WARNING,
        summary: "Containers start without the pins that they were promised.",
        hold: MINUTES_5,
        samples: &["numaward_containers_started_unpinned_total"],
        only: None,
        without: None,
        by: &["reason"],
        measure: Measure::Increase(MINUTES_15),
        above: 0.0,
        describe: |of, value| {
            format!(
                "{value:.0} containers started before they could be placed ({}); their first pages may lie anywhere.",
                label(of, "reason")
            )
        },
    },
    Condition {
        alert: "NumawardIntruders",
        severity: WARNING,
        summary: "Tasks of others run on CPUs that are exclusive to a workload.",
        hold: MINUTES_10,
        samples: &["numaward_exclusive_cpu_intruder_seconds_total"],
        only: None,
        without: Some(("class", "kernel_thread")),
        by: &["class"],
        measure: Measure::Rate(MINUTES_5),
        above: 0.01,
        describe: |of, value| {
            format!(
                "Tasks of the class {} use {:.1}% of a CPU on exclusive CPUs.",
                label(of, "class"),
                value * 100.0
            )
        },
    },
    Condition {
        alert: "NumawardProbeAbsent",
        severity: WARNING,
        summary: "A probe could not be attached, so its figures are missing.",
        hold: MINUTES_15,
        samples: &["numaward_probe_info"],
        only: Some(("mode", &["absent"])),
        without: Some(("reason", "switched_off")),
        by: &["probe", "mode", "reason"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| format!("The probe {} is absent: {}.", label(of, "probe"), label(of, "reason")),
    },
];

impl Condition {
    /// The subject of a sample, if the condition is about it.
    fn subject(&self, sample: &Sample<'_>) -> Option<Subject> {
        let mut subject = Subject::new();
        let mut is_wanted = self.only.is_none();
        for (name, value) in sample.labels() {
            if let Some((label, values)) = self.only
                && label == name
            {
                is_wanted = values.contains(&value);
            }
            if self.without.is_some_and(|(label, other)| label == name && other == value) {
                return None;
            }
            if let Some(label) = self.by.iter().find(|label| **label == name) {
                subject.push((*label, value.to_owned()));
            }
        }
        is_wanted.then_some(subject)
    }
}

/// The changes of one counter.
#[derive(Debug, Default)]
struct History {
    /// When it had a new value, and which.
    changes: VecDeque<(Duration, f64)>,
    /// When it was there last.
    seen: Duration,
}

impl History {
    fn note(&mut self, now: Duration, value: f64) {
        self.seen = now;
        #[expect(clippy::float_cmp, reason = "the same number is no change")]
        let is_new = self.changes.back().is_none_or(|(_, last)| *last != value);
        if self.changes.is_empty() {
            self.changes.push_back((now, 0.0));
        }
        if is_new {
            self.changes.push_back((now, value));
        }
        // The value at the beginning of the longest window is that of the last change before it.
        while self.changes.get(1).is_some_and(|(time, _)| *time + MINUTES_15 <= now) {
            self.changes.pop_front();
        }
    }

    fn increase(&self, now: Duration, window: Duration) -> f64 {
        let changes = self.changes.iter().zip(self.changes.iter().skip(1));
        let within = changes.filter(|(_, (time, _))| *time + window > now);
        within.map(|((_, before), (_, after))| if after >= before { after - before } else { *after }).sum()
    }
}

/// A condition that is active for a subject.
#[derive(Debug)]
struct Active {
    since: Duration,
    firing: bool,
}

/// A condition that begins to fire for a subject, or ends to.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// The place in [`CONDITIONS`].
    pub(super) condition: usize,
    pub(super) subject: Subject,
    /// The measure, while it fires; none when it is over.
    pub(super) value: Option<f64>,
}

/// Evaluates the conditions again and again.
#[derive(Debug, Default)]
pub(super) struct Evaluator {
    /// By condition, name and labels.
    series: HashMap<(usize, String), History>,
    active: BTreeMap<(usize, Subject), Active>,
    /// Whether series are skipped because there are too many.
    overflowed: bool,
}

/// What is read at one time.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    evaluator: &'a mut Evaluator,
    now: Duration,
    /// The subject of each series of a counter.
    counters: Vec<(usize, String, Subject)>,
    measures: BTreeMap<(usize, Subject), f64>,
}

impl Evaluator {
    /// Begins to read. Time is counted from any point; it only grows.
    pub(super) fn read(&mut self, now: Duration) -> Reading<'_> {
        Reading { evaluator: self, now, counters: Vec::new(), measures: BTreeMap::new() }
    }
}

impl Reading<'_> {
    /// Takes a sample.
    pub(super) fn take(&mut self, family: &Description, sample: &Sample<'_>) {
        let Value::Number(value) = sample.value else { return };
        let (name, value) = (family.sample_name.as_str(), value.as_f64());
        for (index, condition) in CONDITIONS.iter().enumerate() {
            if !condition.samples.contains(&name) {
                continue;
            }
            let Some(subject) = condition.subject(sample) else { continue };
            match condition.measure {
                Measure::Value => {
                    self.measures.insert((index, subject), value);
                }
                Measure::Rate(_) | Measure::Increase(_) => {
                    let evaluator = &mut *self.evaluator;
                    let labels = sample.labels().map(|(label, value)| format!(",{label}={value:?}"));
                    let key = (index, name.to_owned() + &labels.collect::<String>());
                    if evaluator.series.len() >= MAX_SERIES && !evaluator.series.contains_key(&key) {
                        if !std::mem::replace(&mut evaluator.overflowed, true) {
                            tracing::warn!(
                                MAX_SERIES,
                                "too many series to watch for alerts: new ones are not watched"
                            );
                        }
                        continue;
                    }
                    evaluator.series.entry(key.clone()).or_default().note(self.now, value);
                    self.counters.push((index, key.1, subject));
                }
            }
        }
    }

    /// Ends the reading; says what changed.
    pub(super) fn finish(self) -> Vec<Change> {
        let Self { evaluator, now, counters, mut measures } = self;
        let Evaluator { series, active, .. } = evaluator;
        for (index, key, subject) in counters {
            let Some(history) = series.get(&(index, key)) else { continue };
            let measure = match CONDITIONS[index].measure {
                Measure::Rate(window) => history.increase(now, window) / window.as_secs_f64(),
                Measure::Increase(window) => history.increase(now, window),
                Measure::Value => continue,
            };
            *measures.entry((index, subject)).or_default() += measure;
        }
        series.retain(|_, history| history.seen + MINUTES_15 > now);
        let mut changes = Vec::new();
        let holds = |(key, measure): ((usize, Subject), f64)| {
            (measure > CONDITIONS[key.0].above).then_some((key, measure))
        };
        let holding: BTreeMap<_, _> = measures.into_iter().filter_map(holds).collect();
        active.retain(|key, state| {
            let stays = holding.contains_key(key);
            if !stays && state.firing {
                changes.push(Change { condition: key.0, subject: key.1.clone(), value: None });
            }
            stays
        });
        for (key, measure) in holding {
            let state = active.entry(key.clone()).or_insert(Active { since: now, firing: false });
            if !state.firing && now.saturating_sub(state.since) >= CONDITIONS[key.0].hold {
                state.firing = true;
                changes.push(Change { condition: key.0, subject: key.1, value: Some(measure) });
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests;

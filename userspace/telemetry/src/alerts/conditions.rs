//! The conditions of `dashboards/prometheus/rules.yaml`, evaluated without Prometheus.
//!
//! # Problem
//! Without Prometheus, the same conditions must fire at the same time, from the same metrics.
//!
//! # Terms
//! - *condition*: a row of [`CONDITIONS`]. It selects samples by name and labels.
//! - *subject*: the labels by which a condition groups its samples, such as those of a workload.
//! - *measure*: the number that a condition computes for each subject.
//! - *active*: the measure of a subject is above the threshold.
//! - *firing*: the condition was active for its hold time.
//!
//! # Algorithm
//! The changes of each counter are kept for the longest window. An increase is the sum of the steps within the window,
//! without extrapolation; a counter that falls was reset, as in Prometheus. Each counter starts at zero with the daemon
//! or with its workload, and so does a new series. The series of a subject are summed afterwards.
//!
//! Two alerts about scraping are not evaluated: the daemon is down, and scrapes are slow.
//!
//! # Invariants
//! - A test compares the table with the rules, and runs the tests of the rules on it.
//! - The number of series is bounded.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Duration,
};

use numaward_topology::Bytes;

use crate::metrics::{FamilyDescription, MetricSample, SampleValue};

/// The maximum number of counters that are followed. Most workloads have none.
const MAX_SERIES: usize = 1 << 16;
const MINUTE: Duration = Duration::from_mins(1);
const MINUTES_5: Duration = Duration::from_mins(5);
const MINUTES_10: Duration = Duration::from_mins(10);
const MINUTES_15: Duration = Duration::from_mins(15);

const WARNING: &str = "warning";
pub(super) const CRITICAL: &str = "critical";

/// The labels of a workload.
const WORKLOAD: &[&str] = &["namespace", "pod", "container", "workload"];

/// The labels of an alert's subject with their values, in the order of the condition.
pub(super) type AlertSubject = Vec<(&'static str, String)>;

/// The number that a condition computes from a sample.
#[derive(Clone, Copy, Debug)]
enum Measure {
    /// The increase per second in a window.
    Rate(Duration),
    /// The increase in a window.
    Increase(Duration),
    /// The value itself.
    Value,
    /// One if the value is zero, else zero.
    IsZero,
    /// The distance of the value from one.
    Deviation,
}

/// A condition of an alert.
#[derive(Debug)]
pub(super) struct Condition {
    /// The name of the alert.
    pub(super) alert: &'static str,
    /// The severity: a label in the rules.
    pub(super) severity: &'static str,
    /// The summary: an annotation in the rules.
    pub(super) summary: &'static str,
    /// The time for which the condition must be active before it fires.
    hold: Duration,
    samples: &'static [&'static str],
    /// A label, and the values of which it must have one.
    only: Option<(&'static str, &'static [&'static str])>,
    /// A label, and the values that it must not have.
    without: Option<(&'static str, &'static [&'static str])>,
    /// A sample with a label and its value. The condition is not active while the sample is above zero.
    unless: Option<(&'static str, (&'static str, &'static str))>,
    by: &'static [&'static str],
    measure: Measure,
    above: f64,
    /// Formats the description for a subject and a value.
    pub(super) describe: fn(&AlertSubject, f64) -> String,
}

/// Returns the name of a workload for messages.
pub(super) fn workload_name(of: &AlertSubject) -> String {
    match ["namespace", "pod", "container"].map(|name| label(of, name)) {
        [namespace, pod, container] if !pod.is_empty() => format!("{namespace}/{pod}/{container}"),
        _ => label(of, "workload").to_owned(),
    }
}

/// Returns a label of a subject, or an empty text.
fn label<'a>(of: &'a AlertSubject, label: &str) -> &'a str {
    of.iter().find(|(name, _)| *name == label).map_or("", |(_, value)| value)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for people to read")]
fn rounded_bytes(value: f64) -> Bytes {
    // Two digits are sufficient: 1.2Mi instead of 1234567.
    let (mut unit, value) = (1_u64, value.abs().round() as u64);
    while value / unit >= 10 * 1024 {
        unit *= 1024;
    }
    Bytes(value / unit * unit)
}

pub(super) const CONDITIONS: [Condition; 18] = [
    Condition {
        alert: "NumawardNumaMisses",
        severity: WARNING,
        summary: "A workload with a guarantee gets memory outside its nodes.",
        hold: MINUTE,
        samples: &["numaward_numa_miss_bytes_total"],
        only: None,
        without: None,
        unless: None,
        by: WORKLOAD,
        measure: Measure::Rate(MINUTES_5),
        above: 64.0 * 1024.0,
        describe: |of, value| {
            format!("{} gets {}/s outside its guaranteed nodes.", workload_name(of), rounded_bytes(value))
        },
    },
    Condition {
        alert: "NumawardMemoryMisplaced",
        severity: WARNING,
        summary: "Memory of a workload with a guarantee lies outside its nodes.",
        hold: MINUTES_5,
        samples: &["numaward_promise_broken"],
        only: None,
        without: None,
        unless: None,
        by: &["namespace", "pod", "container", "workload", "kind"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| {
            let (workload, kind) = (workload_name(of), label(of, "kind"));
            format!(
                "The guarantee of {workload} is broken: its memory ({kind}) is outside its guaranteed nodes."
            )
        },
    },
    Condition {
        alert: "NumawardHeadroomLow",
        severity: WARNING,
        summary: "A node may soon not have the memory that is guaranteed on it.",
        hold: MINUTES_5,
        samples: &["numaward_node_headroom_low"],
        only: None,
        without: None,
        unless: None,
        by: &["numa_node"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| {
            format!(
                "Node {} may soon not have the guaranteed memory that is not used yet.",
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
        unless: None,
        by: &["namespace", "pod", "container", "workload", "numa_node"],
        measure: Measure::Value,
        above: 16_777_216.0,
        describe: |of, value| {
            format!(
                "{} has {} on node {} above its share there.",
                workload_name(of),
                rounded_bytes(value),
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
        unless: None,
        by: &[],
        measure: Measure::Rate(MINUTES_5),
        above: 0.0,
        describe: |_, value| format!("{:.1} requests a minute were refused for 10 minutes.", value * 60.0),
    },
    Condition {
        alert: "NumawardAdmissionStorm",
        severity: WARNING,
        summary: "Requests for guarantees are repeated at a high rate.",
        hold: MINUTES_10,
        samples: &["numaward_topology_manager_admission_requests_total"],
        only: None,
        without: None,
        unless: None,
        by: &[],
        measure: Measure::Rate(MINUTES_5),
        above: 1.0,
        describe: |_, value| {
            format!(
                "{value:.1} requests a second are decided on; a cause may be a controller that retries refused \
                 requests at once."
            )
        },
    },
    Condition {
        alert: "NumawardDriftReturns",
        severity: WARNING,
        summary: "Another program keeps rewriting knobs that numaward enforces.",
        hold: MINUTES_5,
        samples: &["numaward_drift_total"],
        only: None,
        without: None,
        unless: None,
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
        summary: "A process was killed because of its pinning, although other nodes had free memory.",
        hold: Duration::ZERO,
        samples: &["numaward_oom_kills_total"],
        // Only kills with the constraint `cpuset` or `mempolicy` have the label.
        only: Some(("elsewhere", &["free"])),
        without: None,
        unless: None,
        by: &["namespace", "pod", "container", "workload", "constraint"],
        measure: Measure::Increase(MINUTES_10),
        above: 0.0,
        describe: |of, value| {
            let (workload, constraint) = (workload_name(of), label(of, "constraint"));
            format!(
                "{value:.0} processes of {workload} were killed with the constraint {constraint} while other nodes had \
                 free memory."
            )
        },
    },
    Condition {
        alert: "NumawardUnpinnedStarts",
        severity: WARNING,
        summary: "Containers start without the settings of their guarantee.",
        hold: MINUTES_5,
        samples: &["numaward_containers_started_unpinned_total"],
        only: None,
        without: None,
        unless: None,
        by: &["reason"],
        measure: Measure::Increase(MINUTES_15),
        above: 0.0,
        describe: |of, value| {
            format!(
                "{value:.0} containers started before numaward could place them ({}); their first pages may lie \
                 anywhere.",
                label(of, "reason")
            )
        },
    },
    Condition {
        alert: "NumawardMemoryMissing",
        severity: WARNING,
        summary: "The nodes of a workload have less memory than is guaranteed to it.",
        hold: MINUTES_5,
        samples: &["numaward_promised_memory_missing_bytes"],
        only: None,
        without: None,
        unless: None,
        by: WORKLOAD,
        measure: Measure::Value,
        above: 0.0,
        describe: |of, value| {
            let missing = rounded_bytes(value);
            format!("{} is guaranteed {missing} that its nodes do not have.", workload_name(of))
        },
    },
    Condition {
        alert: "NumawardCpusOffline",
        severity: WARNING,
        summary: "Exclusive CPUs of a workload are offline.",
        hold: MINUTES_5,
        samples: &["numaward_promised_cpus_offline"],
        only: None,
        without: None,
        unless: None,
        by: WORKLOAD,
        measure: Measure::Value,
        above: 0.0,
        describe: |of, value| {
            format!("{} has {value:.0} exclusive CPUs that are offline.", workload_name(of))
        },
    },
    Condition {
        alert: "NumawardIntruders",
        severity: WARNING,
        summary: "Tasks of other workloads run on an exclusive CPU.",
        hold: MINUTES_10,
        samples: &["numaward_exclusive_cpu_intruder_seconds_total"],
        only: None,
        without: Some(("class", &["kernel_thread"])),
        // In a dry run of CPU isolation, other workloads may run there.
        unless: Some(("numaward_herd_cgroups", ("state", "dry_run"))),
        by: &["cpu", "class"],
        measure: Measure::Rate(MINUTES_5),
        above: 0.01,
        describe: |of, value| {
            format!(
                "Tasks of the class {} use {:.1}% of the exclusive CPU {}.",
                label(of, "class"),
                value * 100.0,
                label(of, "cpu")
            )
        },
    },
    Condition {
        alert: "NumawardProbeAbsent",
        severity: WARNING,
        summary: "A probe could not be attached, so its figures are missing or less accurate.",
        hold: MINUTES_15,
        samples: &["numaward_probe_info"],
        only: Some(("mode", &["absent"])),
        without: Some(("reason", &["switched_off", "unsupported"])),
        unless: None,
        by: &["probe", "mode", "reason"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| format!("The probe {} is absent: {}.", label(of, "probe"), label(of, "reason")),
    },
    Condition {
        alert: "NumawardProbeEventsLost",
        severity: WARNING,
        summary: "A probe keeps losing events, so its figures are too low.",
        hold: MINUTES_15,
        samples: &["numaward_probe_events_lost_total"],
        only: None,
        without: None,
        unless: None,
        by: &["probe"],
        measure: Measure::Increase(MINUTES_15),
        above: 0.0,
        describe: |of, value| {
            format!("The probe {} lost {value:.0} events in 15 minutes.", label(of, "probe"))
        },
    },
    Condition {
        alert: "NumawardCountsDisagree",
        severity: WARNING,
        summary: "The allocation probe and the kernel count different numbers of pages.",
        hold: MINUTES_15,
        samples: &["numaward_coverage_ratio"],
        only: None,
        without: None,
        unless: None,
        by: &[],
        measure: Measure::Deviation,
        above: 0.3,
        describe: |_, value| {
            format!(
                "The pages that the allocation probe has seen in an hour differ by {:.0} % from those that the kernel has allocated.",
                value * 100.0
            )
        },
    },
    Condition {
        alert: "NumawardCountersShared",
        severity: WARNING,
        summary: "Some workloads have no counters of their own.",
        hold: MINUTES_15,
        samples: &["numaward_workloads"],
        only: Some(("counters", &["other"])),
        without: None,
        unless: None,
        by: &[],
        measure: Measure::Value,
        above: 0.0,
        describe: |_, value| {
            format!("{value:.0} workloads are counted together, because all slots of the probes are in use.")
        },
    },
    Condition {
        alert: "NumawardDegraded",
        severity: WARNING,
        summary: "A part of the daemon does not work.",
        hold: MINUTES_15,
        samples: &["numaward_degraded"],
        only: None,
        // An operator decides when a changed configuration takes effect.
        without: Some(("part", &["pending_configuration"])),
        unless: None,
        by: &["part"],
        measure: Measure::Value,
        above: 0.0,
        describe: |of, _| format!("The part {} is degraded.", label(of, "part")),
    },
    Condition {
        alert: "NumawardRuntimeDisconnected",
        severity: CRITICAL,
        summary: "The container runtime is not connected, so new containers get no guarantees.",
        hold: MINUTES_5,
        samples: &["numaward_nri_connected"],
        only: None,
        without: None,
        unless: None,
        by: &[],
        measure: Measure::IsZero,
        above: 0.0,
        describe: |_, _| "The container runtime has not been connected to numaward for 5 minutes.".to_owned(),
    },
];

impl Condition {
    /// Returns the subject of a sample; `None` if the condition does not select the sample.
    fn subject(&self, sample: &MetricSample<'_>) -> Option<AlertSubject> {
        let mut subject = AlertSubject::new();
        let mut is_wanted = self.only.is_none();
        for (name, value) in sample.labels() {
            if let Some((label, values)) = self.only
                && label == name
            {
                is_wanted = values.contains(&value);
            }
            if self.without.is_some_and(|(label, others)| label == name && others.contains(&value)) {
                return None;
            }
            if let Some(label) = self.by.iter().find(|label| **label == name) {
                subject.push((*label, value.to_owned()));
            }
        }
        is_wanted.then_some(subject)
    }
}

/// The changes of a counter.
#[derive(Debug, Default)]
struct CounterHistory {
    /// The time and the new value of each change.
    changes: VecDeque<(Duration, f64)>,
    /// The time of the last sample.
    seen: Duration,
}

impl CounterHistory {
    fn record(&mut self, now: Duration, value: f64) {
        self.seen = now;
        #[expect(clippy::float_cmp, reason = "the same number is no change")]
        let is_new = self.changes.back().is_none_or(|(_, last)| *last != value);
        if self.changes.is_empty() {
            self.changes.push_back((now, 0.0));
        }
        if is_new {
            self.changes.push_back((now, value));
        }
        // The last change before the window gives the value at its beginning.
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
struct ActiveCondition {
    since: Duration,
    firing: bool,
}

/// A condition that starts or stops firing for a subject.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AlertChange {
    /// The index in [`CONDITIONS`].
    pub(super) condition: usize,
    pub(super) subject: AlertSubject,
    /// The measure while it fires; `None` when it is resolved.
    pub(super) value: Option<f64>,
}

/// The state of all conditions between evaluations.
#[derive(Debug, Default)]
pub(super) struct Evaluator {
    /// The counters by condition, name and labels.
    series: HashMap<(usize, String), CounterHistory>,
    active: BTreeMap<(usize, AlertSubject), ActiveCondition>,
    /// True if series are skipped because there are too many.
    overflowed: bool,
}

/// An evaluation of all conditions with the samples of one time.
#[derive(Debug)]
pub(super) struct Evaluation<'a> {
    evaluator: &'a mut Evaluator,
    now: Duration,
    /// The subject of each counter.
    counters: Vec<(usize, String, AlertSubject)>,
    measures: BTreeMap<(usize, AlertSubject), f64>,
    /// The indices of conditions that are not active because of another sample.
    suppressed: BTreeSet<usize>,
}

impl Evaluator {
    /// Starts an evaluation. `now` is the time since any fixed point.
    pub(super) fn begin(&mut self, now: Duration) -> Evaluation<'_> {
        Evaluation {
            evaluator: self,
            now,
            counters: Vec::new(),
            measures: BTreeMap::new(),
            suppressed: BTreeSet::new(),
        }
    }
}

impl Evaluation<'_> {
    /// Adds a sample.
    pub(super) fn add_sample(&mut self, family: &FamilyDescription, sample: &MetricSample<'_>) {
        let SampleValue::Number(value) = sample.value else { return };
        let (name, value) = (family.sample_name.as_str(), value.as_f64());
        for (index, condition) in CONDITIONS.iter().enumerate() {
            if condition.unless.is_some_and(|(other, wanted)| {
                other == name && value > 0.0 && sample.labels().any(|label| label == wanted)
            }) {
                self.suppressed.insert(index);
            }
            if !condition.samples.contains(&name) {
                continue;
            }
            let Some(subject) = condition.subject(sample) else { continue };
            match condition.measure {
                Measure::Value => {
                    self.measures.insert((index, subject), value);
                }
                Measure::IsZero => {
                    self.measures.insert((index, subject), f64::from(u8::from(value == 0.0)));
                }
                Measure::Deviation => {
                    self.measures.insert((index, subject), (value - 1.0).abs());
                }
                Measure::Rate(_) | Measure::Increase(_) => {
                    let evaluator = &mut *self.evaluator;
                    let labels = sample.labels().map(|(label, value)| format!(",{label}={value:?}"));
                    let key = (index, name.to_owned() + &labels.collect::<String>());
                    if evaluator.series.len() >= MAX_SERIES && !evaluator.series.contains_key(&key) {
                        if !std::mem::replace(&mut evaluator.overflowed, true) {
                            tracing::warn!(MAX_SERIES, "too many series for alerts: new series are ignored");
                        }
                        continue;
                    }
                    evaluator.series.entry(key.clone()).or_default().record(self.now, value);
                    self.counters.push((index, key.1, subject));
                }
            }
        }
    }

    /// Ends the evaluation, and returns what changed.
    pub(super) fn finish(self) -> Vec<AlertChange> {
        let Self { evaluator, now, counters, mut measures, suppressed } = self;
        let Evaluator { series, active, .. } = evaluator;
        for (index, key, subject) in counters {
            let Some(history) = series.get(&(index, key)) else { continue };
            let measure = match CONDITIONS[index].measure {
                Measure::Rate(window) => history.increase(now, window) / window.as_secs_f64(),
                Measure::Increase(window) => history.increase(now, window),
                Measure::Value | Measure::IsZero | Measure::Deviation => continue,
            };
            *measures.entry((index, subject)).or_default() += measure;
        }
        series.retain(|_, history| history.seen + MINUTES_15 > now);
        let mut changes = Vec::new();
        let holds = |(key, measure): ((usize, AlertSubject), f64)| {
            let is_active = measure > CONDITIONS[key.0].above && !suppressed.contains(&key.0);
            is_active.then_some((key, measure))
        };
        let holding: BTreeMap<_, _> = measures.into_iter().filter_map(holds).collect();
        active.retain(|key, state| {
            let stays = holding.contains_key(key);
            if !stays && state.firing {
                changes.push(AlertChange { condition: key.0, subject: key.1.clone(), value: None });
            }
            stays
        });
        for (key, measure) in holding {
            let state = active.entry(key.clone()).or_insert(ActiveCondition { since: now, firing: false });
            if !state.firing && now.saturating_sub(state.since) >= CONDITIONS[key.0].hold {
                state.firing = true;
                changes.push(AlertChange { condition: key.0, subject: key.1, value: Some(measure) });
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests;

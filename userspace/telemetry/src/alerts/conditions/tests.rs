use std::path::Path;

use serde_json::Value as Json;

use super::*;
use crate::metrics::Number;

const RULES: &str = include_str!("../../../../../dashboards/prometheus/rules.yaml");
const RULES_TEST: &str = include_str!("../../../../../dashboards/prometheus/rules_test.yaml");
/// Alerts about scraping, which the daemon does not evaluate.
const SCRAPE_ALERTS: [&str; 2] = ["NumawardDown", "NumawardScrapeSlow"];
/// The base of the links to runbooks in the rules: the daemon, if the label is an address.
const RUNBOOK_BASE: &str = "http://{{ if match `:[0-9]+$` $labels.instance }}{{ $labels.instance }}{{ else }}localhost:9560{{ end }}";

fn yaml(text: &str) -> Json {
    numaward_config::read_yaml(text, Path::new("rules")).unwrap()
}

fn condition(alert: &str) -> &'static Condition {
    CONDITIONS.iter().find(|condition| condition.alert == alert).expect(alert)
}

/// Compares the numbers of the rules. Their expressions are compared by the tests of the rules, below.
#[test]
fn conditions_match_rules() {
    let rules = yaml(RULES);
    let groups = rules["groups"].as_array().unwrap().iter();
    let alerts =
        groups.flat_map(|group| group["rules"].as_array().unwrap()).filter(|rule| rule["alert"].is_string());
    let alerts: Vec<_> =
        alerts.filter(|rule| !SCRAPE_ALERTS.contains(&rule["alert"].as_str().unwrap())).collect();
    assert_eq!(alerts.len(), CONDITIONS.len());
    for rule in alerts {
        let condition = condition(rule["alert"].as_str().unwrap());
        let hold =
            rule["for"].as_str().map_or(Duration::ZERO, |text| humantime::parse_duration(text).unwrap());
        assert_eq!(condition.hold, hold, "{rule}");
        assert_eq!(condition.summary, rule["annotations"]["summary"], "{rule}");
        assert_eq!(condition.severity, rule["labels"]["severity"], "{rule}");
        assert_eq!(
            rule["annotations"]["runbook_url"].as_str().unwrap(),
            format!("{RUNBOOK_BASE}/runbooks/{}", condition.alert)
        );
    }
}

/// Parses a series in the notation of promtool: `0+6x30`, `7x30`, `0x5 _x2 2x20`.
fn values(text: &str) -> Vec<Option<f64>> {
    let mut values = Vec::new();
    for part in text.split_whitespace() {
        let (value, times) = part.split_once('x').unwrap();
        if value == "_" {
            values.extend(std::iter::repeat_n(None, times.parse().unwrap()));
            continue;
        }
        let (first, step) = value.split_once('+').unwrap_or((value, "0"));
        let (first, step): (f64, f64) = (first.parse().unwrap(), step.parse().unwrap());
        let times: u32 = times.parse().unwrap();
        values.extend((0..=times).map(|time| Some(first + step * f64::from(time))));
    }
    values
}

/// Parses labels without escapes: `a="b",c="d"`.
fn labels(text: &str) -> Vec<(&str, &str)> {
    let labels = text.split(',').filter_map(|label| label.trim().split_once('='));
    labels.map(|(name, value)| (name, value.trim_matches('"'))).collect()
}

fn add_sample(evaluation: &mut Evaluation<'_>, name: &str, labels: &[(&str, &str)], value: f64) {
    let family = FamilyDescription { sample_name: name.to_owned(), ..FamilyDescription::default() };
    evaluation.add_sample(&family, &MetricSample::new(labels, SampleValue::Number(Number::Real(value))));
}

fn minutes(text: &str) -> u64 {
    text.strip_suffix('m').unwrap().parse().unwrap()
}

/// The labels of a firing alert.
type Firing = BTreeMap<String, String>;

/// Returns the firing alerts of one host after each minute.
fn course(test: &Json, instance: &str, minutes: u64) -> Vec<Vec<(&'static str, Firing)>> {
    let mut series = Vec::new();
    for line in test["input_series"].as_array().unwrap() {
        let (name, rest) = line["series"].as_str().unwrap().split_once('{').unwrap();
        let labels = labels(rest.strip_suffix('}').unwrap());
        if labels.contains(&("instance", instance)) {
            // A YAML parser reads `0x30` (thirty more zeros) as a number.
            let course = match &line["values"] {
                Json::String(written) => written.clone(),
                number => format!("{:#x}", number.as_u64().unwrap()),
            };
            series.push((name, labels, values(&course)));
        }
    }
    let at = |values: &[Option<f64>], minute: u64| *values.get(usize::try_from(minute).unwrap())?;
    let start = |minute| {
        let (.., values) = series.iter().find(|(name, ..)| *name == "process_start_time_seconds")?;
        at(values, minute)
    };
    // Counters that exist at the start were counted long before, unless the daemon starts later.
    let mut evaluator = Evaluator::default();
    let mut evaluation = evaluator.begin(Duration::ZERO);
    for (name, labels, values) in series.iter().filter(|(name, ..)| name.ends_with("_total")) {
        if let Some(value) = at(values, 0) {
            add_sample(&mut evaluation, name, labels, value);
        }
    }
    evaluation.finish();
    let mut firing: BTreeMap<(usize, AlertSubject), Firing> = BTreeMap::new();
    let (mut course, mut has_started) = (Vec::new(), false);
    for minute in 0..=minutes {
        if !has_started && start(minute).is_some_and(|start| start > 0.0) {
            has_started = true;
            (evaluator, firing) = (Evaluator::default(), BTreeMap::new());
        }
        let mut evaluation = evaluator.begin(MINUTES_15 + MINUTE * u32::try_from(minute).unwrap());
        for (name, labels, values) in &series {
            if let Some(value) = at(values, minute) {
                add_sample(&mut evaluation, name, labels, value);
            }
        }
        for change in evaluation.finish() {
            let key = (change.condition, change.subject.clone());
            match change.value {
                Some(value) => {
                    assert!(!(CONDITIONS[change.condition].describe)(&change.subject, value).is_empty());
                    let labels = change.subject.into_iter().map(|(name, value)| (name.to_owned(), value));
                    firing.insert(key, labels.collect());
                }
                None => assert!(firing.remove(&key).is_some(), "resolved without firing"),
            }
        }
        course.push(
            firing.iter().map(|((index, _), labels)| (CONDITIONS[*index].alert, labels.clone())).collect(),
        );
    }
    course
}

#[test]
fn fire_like_tests_of_rules() {
    let tests = yaml(RULES_TEST);
    let mut fired = BTreeMap::new();
    for test in tests["tests"].as_array().unwrap() {
        for case in test["alert_rule_test"].as_array().unwrap() {
            let alert = case["alertname"].as_str().unwrap();
            if SCRAPE_ALERTS.contains(&alert) {
                continue;
            }
            let time = minutes(case["eval_time"].as_str().unwrap());
            for instance in ["a", "b", "node-1", "10.0.0.1:9560"] {
                let expected: Vec<Firing> = case["exp_alerts"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|alert| serde_json::from_value::<Firing>(alert["exp_labels"].clone()).unwrap())
                    .filter(|labels| labels["instance"] == instance)
                    .map(|mut labels| {
                        labels
                            .retain(|name, _| !["severity", "cluster", "instance"].contains(&name.as_str()));
                        labels
                    })
                    .collect();
                let mut got: Vec<Firing> = course(test, instance, time)
                    .pop()
                    .unwrap()
                    .into_iter()
                    .filter(|(name, _)| *name == alert)
                    .map(|(_, labels)| labels)
                    .collect();
                got.sort();
                let mut expected = expected;
                expected.sort();
                assert_eq!(got, expected, "{alert} on {instance} after {time} minutes");
                *fired.entry(alert.to_owned()).or_insert(0) += got.len();
            }
        }
    }
    let quiet: Vec<_> =
        CONDITIONS.iter().filter(|condition| fired.get(condition.alert).is_none_or(|n| *n == 0)).collect();
    assert!(quiet.is_empty(), "no test makes these fire: {quiet:?}");
}

fn read(evaluator: &mut Evaluator, minute: u32, samples: &[(&str, &str, f64)]) -> Vec<(&'static str, bool)> {
    let mut evaluation = evaluator.begin(MINUTE * minute);
    for (name, text, value) in samples {
        add_sample(&mut evaluation, name, &labels(text), *value);
    }
    let changes = evaluation.finish().into_iter();
    changes.map(|change| (CONDITIONS[change.condition].alert, change.value.is_some())).collect()
}

#[test]
fn alert_resolves_and_fires_again() {
    let mut evaluator = Evaluator::default();
    let kills = |count| {
        [("numaward_oom_kills_total", "workload=\"w\",constraint=\"cpuset\",elsewhere=\"free\"", count)]
    };
    let alert = "NumawardPinCausedOomKill";
    assert_eq!(read(&mut evaluator, 0, &kills(0.0)), []);
    assert_eq!(read(&mut evaluator, 1, &kills(1.0)), [(alert, true)]);
    assert_eq!(read(&mut evaluator, 2, &kills(1.0)), []);
    assert_eq!(read(&mut evaluator, 11, &kills(1.0)), [(alert, false)]);
    // The counter is reset; there was one kill since.
    assert_eq!(read(&mut evaluator, 12, &kills(0.0)), []);
    assert_eq!(read(&mut evaluator, 13, &kills(1.0)), [(alert, true)]);
    // The alert of a removed workload is resolved.
    assert_eq!(read(&mut evaluator, 14, &[]), [(alert, false)]);
    assert_eq!(read(&mut evaluator, 40, &[]), []);
    assert!(evaluator.series.is_empty() && evaluator.active.is_empty());
}

#[test]
fn break_restarts_hold_time() {
    let mut evaluator = Evaluator::default();
    let absent = [("numaward_probe_info", "probe=\"alloc\",mode=\"absent\",reason=\"btf\"", 1.0)];
    for minute in 0..15 {
        assert_eq!(read(&mut evaluator, minute, &absent), []);
    }
    assert_eq!(
        read(
            &mut evaluator,
            15,
            &[("numaward_probe_info", "probe=\"alloc\",mode=\"tp_btf\",reason=\"\"", 1.0)]
        ),
        []
    );
    for minute in 16..31 {
        assert_eq!(read(&mut evaluator, minute, &absent), []);
    }
    assert_eq!(read(&mut evaluator, 31, &absent), [("NumawardProbeAbsent", true)]);
}

#[test]
fn series_are_bounded() {
    let mut evaluator = Evaluator::default();
    let mut evaluation = evaluator.begin(Duration::ZERO);
    for number in 0..MAX_SERIES + 10 {
        let workload = format!("w{number}");
        let labels = [("workload", workload.as_str()), ("numa_node", "0")];
        add_sample(&mut evaluation, "numaward_numa_miss_bytes_total", &labels, 0.0);
    }
    assert_eq!(evaluation.finish(), []);
    assert_eq!(evaluator.series.len(), MAX_SERIES);
    let mut history = CounterHistory::default();
    for second in 0..7200 {
        history.record(Duration::from_secs(second * 10), f64::from(u32::try_from(second).unwrap()));
    }
    assert!(history.changes.len() <= 92, "{}", history.changes.len());
}

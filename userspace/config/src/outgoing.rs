//! What the daemon sends by itself: alerts to a webhook, metrics and traces to a collector. Nothing, unless asked for.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use educe::Educe;
use http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::types::{HttpUrl, Interval};

/// Alerts of a host without a monitoring stack: the conditions of the rules for Prometheus, watched by the daemon itself.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Alerts {
    /// Whether the conditions are watched, and logged when they begin and end.
    pub log: bool,
    /// Where to post alerts that fire and are resolved, in the form of Alertmanager's webhook. They are logged, too.
    pub webhook: Option<HttpUrl>,
    /// File with a bearer token for the webhook. It is read for each post.
    pub token_file: Option<PathBuf>,
    /// Where the runbooks are; the name of the alert is appended. Default: this daemon, which serves them at `/runbooks/`.
    pub runbooks: Option<HttpUrl>,
    /// How often the conditions are looked at.
    #[educe(Default(expression = Interval(Duration::from_secs(30))))]
    pub interval: Interval,
    /// The least time between two posts; what changes in between goes into one.
    #[educe(Default(expression = Interval(Duration::from_secs(30))))]
    pub group_interval: Interval,
}

impl Alerts {
    /// Whether the conditions are watched.
    pub fn is_on(&self) -> bool {
        self.log || self.webhook.is_some()
    }
}

/// OpenTelemetry: metrics and traces, sent by OTLP over HTTP (protobuf).
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Otlp {
    /// The receiver, without the path of a signal: `http://localhost:4318`; `/v1/metrics` and `/v1/traces` are appended.
    /// Default: nothing is sent.
    pub endpoint: Option<HttpUrl>,
    /// File with a bearer token for the receiver. It is read for each request.
    pub token_file: Option<PathBuf>,
    /// Headers of each request.
    pub headers: BTreeMap<String, String>,
    /// Whether metrics are sent.
    #[educe(Default = true)]
    pub metrics: bool,
    /// Whether traces are sent.
    #[educe(Default = true)]
    pub traces: bool,
    /// How often metrics are sent.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub interval: Interval,
}

/// The shortest window of the rules is five minutes; two values in it are the least.
const MAX_ALERTS_INTERVAL: Duration = Duration::from_secs(150);
/// Metrics are read for this, which takes its time on a host of many workloads.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// What is wrong with the values: the key that is to be changed, and why.
pub(super) fn problems(alerts: &Alerts, otlp: &Otlp) -> Vec<(&'static str, String)> {
    let mut problems = Vec::new();
    for (key, interval, longest) in [
        ("alerts.interval", alerts.interval, Some(MAX_ALERTS_INTERVAL)),
        ("otlp.interval", otlp.interval, None),
    ] {
        if interval.0 < MIN_INTERVAL || longest.is_some_and(|longest| interval.0 > longest) {
            let longest =
                longest.map_or(String::new(), |longest| format!(" and at most {}", Interval(longest)));
            problems.push((key, format!("{interval} is not at least {}{longest}", Interval(MIN_INTERVAL))));
        }
    }
    for (name, value) in &otlp.headers {
        if name.parse::<HeaderName>().is_err() {
            problems.push(("otlp.headers", format!("{name:?} is no name of an HTTP header")));
        } else if value.parse::<HeaderValue>().is_err() {
            // The value may be a secret.
            problems.push((
                "otlp.headers",
                format!("the value of {name} has characters that no HTTP header has"),
            ));
        }
    }
    problems
}

/// What is odd but no error.
pub(super) fn warnings(alerts: &Alerts, otlp: &Otlp) -> Vec<String> {
    let mut warnings = Vec::new();
    if alerts.webhook.is_none() && alerts.token_file.is_some() {
        warnings.push("alerts.tokenFile has no effect without alerts.webhook".to_owned());
    }
    if alerts.webhook.is_none() && alerts.runbooks.is_some() {
        warnings.push("alerts.runbooks has no effect without alerts.webhook".to_owned());
    }
    if otlp.endpoint.is_none() && *otlp != Otlp::default() {
        warnings.push("otlp has no effect without otlp.endpoint".to_owned());
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::{super::Config, *};

    fn config(text: &str) -> Result<Config, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn urls_are_checked() {
        for (url, problem) in [
            ("ftp://host/", "does not begin with http:// or https://"),
            ("host:80", "does not begin with http:// or https://"),
            ("/hook", "does not begin with http:// or https://"),
            ("http://user:secret@host/", "give a token in a file"),
            ("http://a b/", "is not a URL"),
        ] {
            let error = config(&format!(r#"{{"alerts": {{"webhook": {url:?}}}}}"#)).unwrap_err();
            assert!(error.contains(problem) && !error.contains("secret"), "{url}: {error}");
        }
        let url = "https://[::1]:8443/hook?key=1";
        let read =
            config(&format!(r#"{{"alerts": {{"webhook": {url:?}}}, "otlp": {{"endpoint": {url:?}}}}}"#))
                .unwrap();
        assert_eq!(read.alerts.webhook.unwrap().to_string(), url);
        assert!(problems(&Alerts::default(), &read.otlp).is_empty());
    }

    #[test]
    fn values_that_cannot_be_used_are_reported_and_odd_ones_warned_of() {
        for (text, problem) in [
            (
                r#"{"alerts": {"interval": "10ms"}}"#,
                "alerts.interval: 10ms is not at least 1s and at most 2m30s",
            ),
            (r#"{"alerts": {"interval": "3m"}}"#, "alerts.interval: 3m is not at least 1s and at most 2m30s"),
            (r#"{"otlp": {"interval": "10ms"}}"#, "otlp.interval: 10ms is not at least 1s"),
            (r#"{"otlp": {"headers": {"a b": "c"}}}"#, "otlp.headers: \"a b\" is no name of an HTTP header"),
            (
                r#"{"otlp": {"headers": {"a": "secret\n"}}}"#,
                "otlp.headers: the value of a has characters that no HTTP header has",
            ),
        ] {
            let config = config(text).unwrap();
            let found: Vec<_> = problems(&config.alerts, &config.otlp)
                .into_iter()
                .map(|(key, problem)| format!("{key}: {problem}"))
                .collect();
            assert_eq!(found, [problem]);
        }
        assert!(warnings(&Alerts::default(), &Otlp::default()).is_empty());
        let odd = config(
            r#"{"alerts": {"tokenFile": "/t", "runbooks": "https://wiki/"}, "otlp": {"traces": false}}"#,
        )
        .unwrap();
        assert_eq!(warnings(&odd.alerts, &odd.otlp).len(), 3);
    }
}

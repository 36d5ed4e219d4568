//! Data that the daemon sends on its own: alerts to a webhook, metrics and traces to a collector. By default, nothing
//! is sent.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use educe::Educe;
use http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::types::{HttpUrl, Interval};

/// Alerts for a host without a monitoring stack: the daemon itself evaluates the conditions of the Prometheus rules.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Alerts {
    /// Evaluates the conditions, and logs when they begin and end.
    pub log: bool,
    /// The URL to which firing and resolved alerts are posted, in the format of Alertmanager's webhook. Alerts are then
    /// logged as well.
    pub webhook: Option<HttpUrl>,
    /// File with a bearer token for the webhook. It is read for each post.
    pub token_file: Option<PathBuf>,
    /// The base URL of the runbooks, to which the name of the alert is appended. Default: this daemon, which serves
    /// them at `/runbooks/`.
    pub runbooks: Option<HttpUrl>,
    /// The interval at which the conditions are evaluated.
    #[educe(Default(expression = Interval(Duration::from_secs(30))))]
    pub interval: Interval,
    /// The minimum time between two posts; all changes in between go into one post.
    #[educe(Default(expression = Interval(Duration::from_secs(30))))]
    pub group_interval: Interval,
}

impl Alerts {
    /// Returns true if the conditions are evaluated.
    pub fn is_on(&self) -> bool {
        self.log || self.webhook.is_some()
    }
}

/// OpenTelemetry: metrics and traces, sent by OTLP over HTTP (protobuf).
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Otlp {
    /// The URL of the receiver without the path of a signal, such as `http://localhost:4318`; `/v1/metrics` and
    /// `/v1/traces` are appended. Default: nothing is sent.
    pub endpoint: Option<HttpUrl>,
    /// File with a bearer token for the receiver. It is read for each request.
    pub token_file: Option<PathBuf>,
    /// Headers of each request.
    pub headers: BTreeMap<String, String>,
    /// Sends metrics.
    #[educe(Default = true)]
    pub metrics: bool,
    /// Sends traces.
    #[educe(Default = true)]
    pub traces: bool,
    /// The interval at which metrics are sent.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub interval: Interval,
}

/// The longest interval at which the shortest window of the rules (five minutes) has two values.
const MAX_ALERTS_INTERVAL: Duration = Duration::from_secs(150);
/// The shortest interval: reading all metrics takes time on a host with many workloads.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the problems of the values: the key to change, and the reason.
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
            problems.push(("otlp.headers", format!("{name:?} is not the name of an HTTP header")));
        } else if value.parse::<HeaderValue>().is_err() {
            // The value may be a secret.
            problems.push((
                "otlp.headers",
                format!("the value of {name} has characters that an HTTP header cannot have"),
            ));
        }
    }
    problems
}

/// Returns warnings about settings without effect.
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
    fn refuses_invalid_urls() {
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
    fn refuses_unusable_values() {
        for (text, problem) in [
            (
                r#"{"alerts": {"interval": "10ms"}}"#,
                "alerts.interval: 10ms is not at least 1s and at most 2m30s",
            ),
            (r#"{"alerts": {"interval": "3m"}}"#, "alerts.interval: 3m is not at least 1s and at most 2m30s"),
            (r#"{"otlp": {"interval": "10ms"}}"#, "otlp.interval: 10ms is not at least 1s"),
            (
                r#"{"otlp": {"headers": {"a b": "c"}}}"#,
                "otlp.headers: \"a b\" is not the name of an HTTP header",
            ),
            (
                r#"{"otlp": {"headers": {"a": "secret\n"}}}"#,
                "otlp.headers: the value of a has characters that an HTTP header cannot have",
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

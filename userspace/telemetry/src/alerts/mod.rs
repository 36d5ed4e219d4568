//! Alerts of a host without a monitoring stack.
//!
//! # Problem
//! The rules of `dashboards/prometheus/` need Prometheus. A host without it must report the same conditions from the
//! same metrics, in its log and to a webhook.
//!
//! # Algorithm
//! Every `alerts.interval`, the metrics are read and the [conditions](conditions) are evaluated. Alerts that begin or
//! end are logged and queued for the [webhook], which posts them in its own task.
//!
//! # Invariants
//! - No task waits for the receiver of the webhook.
//! - The queue is bounded, and lost alerts are counted.

mod conditions;
mod webhook;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Instant, SystemTime},
};

use hyper::HeaderMap;
use numaward_config::outgoing::Alerts;
use numaward_model::hash::fnv1a;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

pub use self::webhook::AlertMetrics;
use self::{
    conditions::{AlertChange, AlertSubject, CONDITIONS, CRITICAL, Evaluator, workload_name},
    webhook::Webhook,
};
use crate::{http_client::Poster, metrics::Metrics};

/// The status of an alert, in Alertmanager's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum AlertStatus {
    Firing,
    Resolved,
}

/// An alert in the format of Alertmanager's webhook, version 4
/// (<https://prometheus.io/docs/alerting/latest/configuration/#webhook_config>).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Alert {
    status: AlertStatus,
    labels: BTreeMap<&'static str, String>,
    annotations: BTreeMap<&'static str, String>,
    starts_at: String,
    ends_at: String,
    #[serde(rename = "generatorURL")]
    generator_url: &'static str,
    fingerprint: String,
}

/// The end time of a firing alert: Go's zero time.
const NOT_ENDED: &str = "0001-01-01T00:00:00Z";

/// Returns the fingerprint by which Prometheus distinguishes sets of labels: FNV-1a of names and values.
fn fingerprint(labels: &BTreeMap<&'static str, String>) -> u64 {
    const SEPARATOR: u8 = 255;
    let bytes = labels
        .iter()
        .flat_map(|(name, value)| name.bytes().chain([SEPARATOR]).chain(value.bytes()).chain([SEPARATOR]));
    fnv1a(bytes)
}

fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// The firing alerts, and the creation of new ones from changes.
#[derive(Debug)]
struct AlertTracker {
    host: String,
    /// The base URL to which the name of the alert is appended.
    runbooks: String,
    firing: BTreeMap<(usize, AlertSubject), Alert>,
}

impl AlertTracker {
    fn apply(&mut self, change: AlertChange, time: SystemTime) -> Option<Alert> {
        let AlertChange { condition: index, subject, value } = change;
        let condition = &CONDITIONS[index];
        let Some(value) = value else {
            let fired = self.firing.remove(&(index, subject))?;
            return Some(Alert { status: AlertStatus::Resolved, ends_at: rfc3339(time), ..fired });
        };
        let mut labels: BTreeMap<_, _> = subject.iter().cloned().collect();
        labels.insert("alertname", condition.alert.to_owned());
        labels.insert("severity", condition.severity.to_owned());
        labels.insert("instance", self.host.clone());
        let annotations = BTreeMap::from([
            ("summary", condition.summary.to_owned()),
            ("description", (condition.describe)(&subject, value)),
            ("runbook_url", format!("{}/{}", self.runbooks, condition.alert)),
        ]);
        let alert = Alert {
            status: AlertStatus::Firing,
            fingerprint: format!("{:016x}", fingerprint(&labels)),
            labels,
            annotations,
            starts_at: rfc3339(time),
            ends_at: NOT_ENDED.to_owned(),
            generator_url: "",
        };
        self.firing.insert((index, subject), alert.clone());
        Some(alert)
    }
}

fn log(alert: &Alert, subject: &AlertSubject) {
    let of = |key: &str| alert.labels.get(key).map(String::as_str);
    let (name, numa_node) = (of("alertname"), of("numa_node"));
    let workload = Some(workload_name(subject)).filter(|name| !name.is_empty());
    let description = alert.annotations.get("description").map_or("", String::as_str);
    match alert.status {
        AlertStatus::Resolved => {
            tracing::info!(
                alert = name,
                workload,
                numa_node,
                since = alert.starts_at,
                "the alert is resolved"
            );
        }
        AlertStatus::Firing if of("severity") == Some(CRITICAL) => {
            tracing::error!(alert = name, workload, numa_node, "{description}");
        }
        AlertStatus::Firing => tracing::warn!(alert = name, workload, numa_node, "{description}"),
    }
}

/// Returns the base URL of the runbooks: the configured one, or this daemon.
fn runbooks(config: &Alerts, (host, scheme, address): (&str, &str, SocketAddr)) -> String {
    match &config.runbooks {
        Some(url) => url.to_string().trim_end_matches('/').to_owned(),
        // A daemon that listens on all addresses is reached by its host name.
        None if address.ip().is_unspecified() => format!("{scheme}://{host}:{}/runbooks", address.port()),
        None => format!("{scheme}://{address}/runbooks"),
    }
}

/// Starts the evaluation of the conditions, if it is configured, until `stop` is cancelled. `here` is the name of this
/// host, and the scheme and address of the daemon's HTTP server.
///
/// # Errors
/// Fails if the webhook needs TLS and there are no certificate authorities.
pub fn start(
    config: &Alerts,
    here: (&str, &str, SocketAddr),
    metrics: &Arc<Metrics>,
    counted: &AlertMetrics,
    stop: &CancellationToken,
) -> io::Result<()> {
    if !config.is_on() {
        return Ok(());
    }
    let (host, ..) = here;
    let webhook = match &config.webhook {
        None => None,
        Some(url) => {
            let token = config.token_file.clone();
            let poster = Poster::new(url.0.clone(), "application/json", HeaderMap::new(), token)?;
            tracing::info!(receiver = poster.receiver(), "alerts are posted to the webhook");
            let webhook = Arc::new(Webhook::new(host, config.group_interval.0, counted.clone()));
            tokio::spawn(stop.clone().run_until_cancelled_owned(webhook.clone().run(poster)));
            Some(webhook)
        }
    };
    let tracker =
        AlertTracker { host: host.to_owned(), runbooks: runbooks(config, here), firing: BTreeMap::new() };
    let watching = watch(config.clone(), metrics.clone(), tracker, webhook);
    tokio::spawn(stop.clone().run_until_cancelled_owned(watching));
    Ok(())
}

async fn watch(
    config: Alerts,
    metrics: Arc<Metrics>,
    mut tracker: AlertTracker,
    webhook: Option<Arc<Webhook>>,
) {
    let mut ticks = interval(config.interval.0);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let start = Instant::now();
    let mut evaluator = Evaluator::default();
    loop {
        ticks.tick().await;
        let metrics = metrics.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut evaluation = evaluator.begin(start.elapsed());
            let read = metrics.visit(|family, sample| evaluation.add_sample(family, sample));
            // An incomplete reading is discarded.
            let changes = read.map(|()| evaluation.finish());
            (evaluator, changes)
        });
        let changes;
        (evaluator, changes) = match read.await {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "the evaluation of alerts failed and has stopped");
                return;
            }
        };
        let Ok(changes) = changes else {
            tracing::warn!("the metrics for alerts cannot be read");
            continue;
        };
        let time = SystemTime::now();
        for change in changes {
            let subject = change.subject.clone();
            let Some(alert) = tracker.apply(change, time) else { continue };
            log(&alert, &subject);
            if let Some(webhook) = &webhook {
                webhook.enqueue(alert);
            }
        }
    }
}

#[cfg(test)]
mod tests;

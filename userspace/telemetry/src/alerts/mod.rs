//! Alerts of a host without a monitoring stack.
//!
//! Problem: the rules of `dashboards/prometheus/` need a Prometheus. A host without one is to report the same conditions,
//! from the same counters: in its log, and to a webhook.
//!
//! Algorithm: every `alerts.interval` a reading of the metrics is taken and the [conditions](conditions) evaluated.
//! What begins or ends is logged and handed to the [webhook], which posts by itself.
//!
//! Invariants: nothing waits for the webhook; what waits for it is bounded, and what is lost counted.

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
    conditions::{CONDITIONS, CRITICAL, Change, Evaluator, Subject, workload},
    webhook::Webhook,
};
use crate::{http_client::Poster, metrics::Metrics};

/// Whether a condition holds, in Alertmanager's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Firing,
    Resolved,
}

/// An alert as it is posted: as by Alertmanager's webhook, version 4
/// (<https://prometheus.io/docs/alerting/latest/configuration/#webhook_config>).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Alert {
    status: Status,
    labels: BTreeMap<&'static str, String>,
    annotations: BTreeMap<&'static str, String>,
    starts_at: String,
    ends_at: String,
    #[serde(rename = "generatorURL")]
    generator_url: &'static str,
    fingerprint: String,
}

/// When an alert ends that fires: Go's time zero.
const NOT_ENDED: &str = "0001-01-01T00:00:00Z";

/// As Prometheus distinguishes sets of labels: FNV-1a of names and values.
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

/// Makes alerts of changes, and remembers those that fire.
#[derive(Debug)]
struct Book {
    host: String,
    /// What the name of an alert is appended to.
    runbooks: String,
    firing: BTreeMap<(usize, Subject), Alert>,
}

impl Book {
    fn note(&mut self, change: Change, time: SystemTime) -> Option<Alert> {
        let Change { condition: index, subject, value } = change;
        let condition = &CONDITIONS[index];
        let Some(value) = value else {
            let fired = self.firing.remove(&(index, subject))?;
            return Some(Alert { status: Status::Resolved, ends_at: rfc3339(time), ..fired });
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
            status: Status::Firing,
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

fn log(alert: &Alert, subject: &Subject) {
    let of = |key: &str| alert.labels.get(key).map(String::as_str);
    let (name, numa_node) = (of("alertname"), of("numa_node"));
    let workload = Some(workload(subject)).filter(|name| !name.is_empty());
    let description = alert.annotations.get("description").map_or("", String::as_str);
    match alert.status {
        Status::Resolved => {
            tracing::info!(alert = name, workload, numa_node, since = alert.starts_at, "resolved");
        }
        Status::Firing if of("severity") == Some(CRITICAL) => {
            tracing::error!(alert = name, workload, numa_node, "{description}");
        }
        Status::Firing => tracing::warn!(alert = name, workload, numa_node, "{description}"),
    }
}

/// Where the runbooks are: where the user has said, else here.
fn runbooks(config: &Alerts, (host, scheme, address): (&str, &str, SocketAddr)) -> String {
    match &config.runbooks {
        Some(url) => url.to_string().trim_end_matches('/').to_owned(),
        // Who listens on all addresses is best known by name.
        None if address.ip().is_unspecified() => format!("{scheme}://{host}:{}/runbooks", address.port()),
        None => format!("{scheme}://{address}/runbooks"),
    }
}

/// Watches the conditions until `stop`, if that is asked for. `here` is the name of this host, and by which scheme and where
/// the daemon serves.
///
/// Fails where the webhook can never be reached, because there are no certificate authorities.
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
            tracing::info!(receiver = poster.receiver(), "alerts are posted");
            let webhook = Arc::new(Webhook::new(host, config.group_interval.0, counted.clone()));
            tokio::spawn(stop.clone().run_until_cancelled_owned(webhook.clone().run(poster)));
            Some(webhook)
        }
    };
    let book = Book { host: host.to_owned(), runbooks: runbooks(config, here), firing: BTreeMap::new() };
    let watching = watch(config.clone(), metrics.clone(), book, webhook);
    tokio::spawn(stop.clone().run_until_cancelled_owned(watching));
    Ok(())
}

async fn watch(config: Alerts, metrics: Arc<Metrics>, mut book: Book, webhook: Option<Arc<Webhook>>) {
    let mut ticks = interval(config.interval.0);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let start = Instant::now();
    let mut evaluator = Evaluator::default();
    loop {
        ticks.tick().await;
        let metrics = metrics.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut reading = evaluator.read(start.elapsed());
            let read = metrics.visit(|family, sample| reading.take(family, sample));
            // Half a reading says nothing.
            let changes = read.map(|()| reading.finish());
            (evaluator, changes)
        });
        let changes;
        (evaluator, changes) = match read.await {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "alerts are not watched any more");
                return;
            }
        };
        let Ok(changes) = changes else {
            tracing::warn!("the metrics cannot be read for alerts");
            continue;
        };
        let time = SystemTime::now();
        for change in changes {
            let subject = change.subject.clone();
            let Some(alert) = book.note(change, time) else { continue };
            log(&alert, &subject);
            if let Some(webhook) = &webhook {
                webhook.report(alert);
            }
        }
    }
}

#[cfg(test)]
mod tests;

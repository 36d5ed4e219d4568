//! Posting of alerts to a webhook.
//!
//! The queue contains the latest state of each alert: an alert that is resolved before its post is reported once, as
//! resolved. A post takes up to [`MAX_ALERTS_PER_POST`] alerts from the queue; the next post follows after
//! `alerts.groupInterval` at the earliest. A failed post is repeated with increasing waits. Alerts that the receiver
//! refuses (4xx) are dropped at once, all other alerts after [`MAX_RETRY_TIME`].

use std::{
    collections::BTreeMap,
    mem,
    time::{Duration, Instant},
};

use backon::BackoffBuilder as _;
use bytes::Bytes;
use hyper::StatusCode;
use numaward_model::backoff;
use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use serde::Serialize;
use strum::VariantArray as _;
use tokio::{sync::Notify, time::sleep};

use super::{Alert, AlertStatus};
use crate::http_client::Poster;

/// The maximum number of queued alerts.
pub(super) const MAX_QUEUED_ALERTS: usize = 1024;
/// The maximum number of alerts in one post.
pub(super) const MAX_ALERTS_PER_POST: usize = 100;
/// The time after which an alert that could not be posted is dropped.
const MAX_RETRY_TIME: Duration = Duration::from_hours(1);
const MIN_RETRY_WAIT: Duration = Duration::from_secs(1);
const MAX_RETRY_WAIT: Duration = Duration::from_mins(5);

/// The result of posting an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(super) enum PostOutcome {
    Delivered,
    Refused,
    Expired,
    Overflowed,
}

/// Counters since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct AlertMetrics {
    notices: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) failed: Counter,
}

impl Default for AlertMetrics {
    /// Creates all counters at zero.
    fn default() -> Self {
        let counted = Self { notices: Family::default(), failed: Counter::default() };
        for outcome in PostOutcome::VARIANTS {
            counted.count(*outcome, 0);
        }
        counted
    }
}

impl AlertMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "alert_notices",
            "Alerts that began or ended, by the result of their post to the webhook: delivered; refused by the \
             receiver; expired after an hour of retries; or overflowed, because too many were queued",
            self.notices.clone(),
        );
        registry.register(
            "alert_posts_failed",
            "Posts to the webhook that failed or were answered with an error",
            self.failed.clone(),
        );
    }

    fn count(&self, outcome: PostOutcome, alerts: usize) {
        self.counter(outcome).inc_by(alerts as u64);
    }

    pub(super) fn counter(&self, outcome: PostOutcome) -> Counter {
        self.notices.get_or_create_owned(&[("result", outcome.into())])
    }
}

/// The body of a post in Alertmanager's format.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WebhookBody<'a> {
    version: &'static str,
    group_key: String,
    truncated_alerts: usize,
    status: AlertStatus,
    receiver: &'static str,
    group_labels: BTreeMap<&'static str, &'a str>,
    common_labels: BTreeMap<&'static str, &'a str>,
    common_annotations: BTreeMap<&'static str, &'a str>,
    #[serde(rename = "externalURL")]
    external_url: &'static str,
    alerts: &'a [Alert],
}

#[derive(Debug)]
pub(super) struct QueuedAlert {
    alert: Alert,
    since: Instant,
}

/// A queue of alerts, and their receiver.
#[derive(Debug)]
pub(super) struct Webhook {
    host: String,
    group_interval: Duration,
    /// The queued alerts, by fingerprint.
    pub(super) queued: Mutex<BTreeMap<String, QueuedAlert>>,
    changed: Notify,
    counted: AlertMetrics,
    pub(super) min_retry_wait: Duration,
    pub(super) max_retry_time: Duration,
}

impl Webhook {
    pub(super) fn new(host: &str, group_interval: Duration, counted: AlertMetrics) -> Self {
        Self {
            host: host.to_owned(),
            group_interval,
            queued: Mutex::default(),
            changed: Notify::new(),
            counted,
            min_retry_wait: MIN_RETRY_WAIT,
            max_retry_time: MAX_RETRY_TIME,
        }
    }

    /// Adds an alert to the queue, without blocking.
    pub(super) fn enqueue(&self, alert: Alert) {
        let mut queued = self.queued.lock();
        if queued.len() >= MAX_QUEUED_ALERTS && !queued.contains_key(&alert.fingerprint) {
            self.counted.count(PostOutcome::Overflowed, 1);
            return;
        }
        queued.insert(alert.fingerprint.clone(), QueuedAlert { alert, since: Instant::now() });
        drop(queued);
        self.changed.notify_one();
    }

    /// Returns the alerts to post next, oldest first. Drops alerts that have expired.
    fn next_batch(&self) -> Vec<Alert> {
        let mut queued = self.queued.lock();
        let before = queued.len();
        queued.retain(|_, queued| queued.since.elapsed() < self.max_retry_time);
        let expired = before - queued.len();
        self.counted.count(PostOutcome::Expired, expired);
        let mut alerts: Vec<_> = queued.values().collect();
        alerts.sort_by_key(|queued| queued.since);
        alerts.into_iter().take(MAX_ALERTS_PER_POST).map(|queued| queued.alert.clone()).collect()
    }

    /// Removes posted alerts from the queue, unless their state has changed since, and counts the outcome.
    fn complete(&self, alerts: &[Alert], outcome: PostOutcome) {
        let mut queued = self.queued.lock();
        for alert in alerts {
            if queued.get(&alert.fingerprint).is_some_and(|queued| queued.alert == *alert) {
                queued.remove(&alert.fingerprint);
            }
        }
        self.counted.count(outcome, alerts.len());
    }

    fn body(&self, alerts: &[Alert]) -> Bytes {
        let is_firing = alerts.iter().any(|alert| alert.status == AlertStatus::Firing);
        let host = BTreeMap::from([("instance", self.host.as_str())]);
        let body = WebhookBody {
            version: "4",
            group_key: format!("{{}}:{{instance={:?}}}", self.host),
            truncated_alerts: 0,
            status: if is_firing { AlertStatus::Firing } else { AlertStatus::Resolved },
            receiver: "numaward",
            group_labels: host.clone(),
            common_labels: host,
            common_annotations: BTreeMap::new(),
            external_url: "",
            alerts,
        };
        // Serialization of texts and maps of texts cannot fail.
        serde_json::to_vec(&body).unwrap_or_default().into()
    }

    /// Posts queued alerts until it is cancelled.
    pub(super) async fn run(self: std::sync::Arc<Self>, poster: Poster) {
        let receiver = poster.receiver();
        let backoff = backoff(self.min_retry_wait, MAX_RETRY_WAIT);
        let mut waits = backoff.build();
        let mut is_failing = false;
        loop {
            let alerts = self.next_batch();
            if alerts.is_empty() {
                self.changed.notified().await;
                continue;
            }
            let Err(failure) = poster.post(self.body(&alerts)).await else {
                self.complete(&alerts, PostOutcome::Delivered);
                if mem::take(&mut is_failing) {
                    tracing::info!(receiver, "the webhook accepts alerts again");
                }
                waits = backoff.build();
                sleep(self.group_interval).await;
                continue;
            };
            self.counted.failed.inc();
            let problem = &failure.problem;
            if failure.status.is_some_and(is_final) {
                self.complete(&alerts, PostOutcome::Refused);
                tracing::warn!(
                    receiver,
                    problem,
                    alerts = alerts.len(),
                    "the webhook refused alerts, which are dropped"
                );
                sleep(self.group_interval).await;
                continue;
            }
            if !mem::replace(&mut is_failing, true) {
                tracing::warn!(
                    receiver,
                    problem,
                    "alerts cannot be posted to the webhook; the daemon tries again"
                );
            }
            sleep(failure.retry_wait(waits.next().unwrap_or_default(), MAX_RETRY_WAIT)).await;
        }
    }
}

/// Returns true if a retry is useless.
fn is_final(status: StatusCode) -> bool {
    !status.is_server_error()
        && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

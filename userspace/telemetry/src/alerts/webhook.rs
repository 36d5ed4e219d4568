//! Posts alerts.
//!
//! What waits is the newest state of each alert: one that is resolved before it could be reported is reported as resolved,
//! once. A post takes what waits, up to [`PER_POST`]; the next may follow after `alerts.groupInterval`. What fails is
//! tried again, waiting longer each time; what the receiver refuses (4xx) is given up at once, what nobody takes after
//! [`PATIENCE`].

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

use super::{Alert, Status};
use crate::http_client::Poster;

/// Alerts that may wait.
pub(super) const MAX_WAITING: usize = 1024;
/// Alerts in one post.
pub(super) const PER_POST: usize = 100;
/// For how long an alert is tried to be posted.
const PATIENCE: Duration = Duration::from_hours(1);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_mins(5);

/// What became of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Fate {
    Delivered,
    Refused,
    Expired,
    Overflowed,
}

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct AlertMetrics {
    notices: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) failed: Counter,
}

impl Default for AlertMetrics {
    /// All at zero.
    fn default() -> Self {
        let counted = Self { notices: Family::default(), failed: Counter::default() };
        for fate in Fate::VARIANTS {
            counted.count(*fate, 0);
        }
        counted
    }
}

impl AlertMetrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "alert_notices",
            "Alerts that began or ended, by what became of their post to the webhook: delivered; refused by it; expired, \
             after an hour of trying; or overflowed, as too many waited",
            self.notices.clone(),
        );
        registry.register(
            "alert_posts_failed",
            "Posts to the webhook that were not answered, or with an error",
            self.failed.clone(),
        );
    }

    fn count(&self, fate: Fate, alerts: usize) {
        self.of(fate).inc_by(alerts as u64);
    }

    pub(super) fn of(&self, fate: Fate) -> Counter {
        self.notices.get_or_create_owned(&[("result", fate.into())])
    }
}

/// The body of a post, as Alertmanager's.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    version: &'static str,
    group_key: String,
    truncated_alerts: usize,
    status: Status,
    receiver: &'static str,
    group_labels: BTreeMap<&'static str, &'a str>,
    common_labels: BTreeMap<&'static str, &'a str>,
    common_annotations: BTreeMap<&'static str, &'a str>,
    #[serde(rename = "externalURL")]
    external_url: &'static str,
    alerts: &'a [Alert],
}

#[derive(Debug)]
pub(super) struct Waiting {
    alert: Alert,
    since: Instant,
}

/// Takes alerts and posts them.
#[derive(Debug)]
pub(super) struct Webhook {
    host: String,
    group_interval: Duration,
    /// By fingerprint.
    pub(super) waiting: Mutex<BTreeMap<String, Waiting>>,
    news: Notify,
    counted: AlertMetrics,
    pub(super) first_wait: Duration,
    pub(super) patience: Duration,
}

impl Webhook {
    pub(super) fn new(host: &str, group_interval: Duration, counted: AlertMetrics) -> Self {
        Self {
            host: host.to_owned(),
            group_interval,
            waiting: Mutex::default(),
            news: Notify::new(),
            counted,
            first_wait: FIRST_WAIT,
            patience: PATIENCE,
        }
    }

    /// Takes an alert. Never waits.
    pub(super) fn report(&self, alert: Alert) {
        let mut waiting = self.waiting.lock();
        if waiting.len() >= MAX_WAITING && !waiting.contains_key(&alert.fingerprint) {
            self.counted.count(Fate::Overflowed, 1);
            return;
        }
        waiting.insert(alert.fingerprint.clone(), Waiting { alert, since: Instant::now() });
        drop(waiting);
        self.news.notify_one();
    }

    /// What is posted next: what waits longest. What waits too long is given up.
    fn next(&self) -> Vec<Alert> {
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        waiting.retain(|_, waiting| waiting.since.elapsed() < self.patience);
        let expired = before - waiting.len();
        self.counted.count(Fate::Expired, expired);
        let mut alerts: Vec<_> = waiting.values().collect();
        alerts.sort_by_key(|waiting| waiting.since);
        alerts.into_iter().take(PER_POST).map(|waiting| waiting.alert.clone()).collect()
    }

    /// These are done with, unless there is something newer to report.
    fn done(&self, alerts: &[Alert], fate: Fate) {
        let mut waiting = self.waiting.lock();
        for alert in alerts {
            if waiting.get(&alert.fingerprint).is_some_and(|waiting| waiting.alert == *alert) {
                waiting.remove(&alert.fingerprint);
            }
        }
        self.counted.count(fate, alerts.len());
    }

    fn body(&self, alerts: &[Alert]) -> Bytes {
        let is_firing = alerts.iter().any(|alert| alert.status == Status::Firing);
        let host = BTreeMap::from([("instance", self.host.as_str())]);
        let body = Body {
            version: "4",
            group_key: format!("{{}}:{{instance={:?}}}", self.host),
            truncated_alerts: 0,
            status: if is_firing { Status::Firing } else { Status::Resolved },
            receiver: "numaward",
            group_labels: host.clone(),
            common_labels: host,
            common_annotations: BTreeMap::new(),
            external_url: "",
            alerts,
        };
        // Texts and maps of texts: that cannot fail.
        serde_json::to_vec(&body).unwrap_or_default().into()
    }

    /// Posts what comes, for ever.
    pub(super) async fn run(self: std::sync::Arc<Self>, poster: Poster) {
        let receiver = poster.receiver();
        let backoff = backoff(self.first_wait, LONGEST_WAIT);
        let mut waits = backoff.build();
        let mut failing = false;
        loop {
            let alerts = self.next();
            if alerts.is_empty() {
                self.news.notified().await;
                continue;
            }
            let Err(failure) = poster.post(self.body(&alerts)).await else {
                self.done(&alerts, Fate::Delivered);
                if mem::take(&mut failing) {
                    tracing::info!(receiver, "alerts are taken again");
                }
                waits = backoff.build();
                sleep(self.group_interval).await;
                continue;
            };
            self.counted.failed.inc();
            let problem = &failure.problem;
            if failure.status.is_some_and(is_final) {
                self.done(&alerts, Fate::Refused);
                tracing::warn!(receiver, problem, alerts = alerts.len(), "alerts are refused");
                sleep(self.group_interval).await;
                continue;
            }
            if !mem::replace(&mut failing, true) {
                tracing::warn!(receiver, problem, "alerts cannot be posted; it is tried again");
            }
            sleep(failure.wait(waits.next().unwrap_or_default(), LONGEST_WAIT)).await;
        }
    }
}

/// Whether it is of no use to try again.
fn is_final(status: StatusCode) -> bool {
    !status.is_server_error()
        && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

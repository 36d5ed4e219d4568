//! Tests of the webhook with a receiver.

use std::{sync::Mutex, time::Duration};

use numaward_config::{HttpUrl, Interval};
use numaward_model::snapshot::{OomKillFigures, Snapshot, SnapshotSource, WorkloadActivity, WorkloadFigures};
use serde_json::{Value as Json, json};
use tokio::time::timeout;

use super::{
    webhook::{MAX_ALERTS_PER_POST, MAX_QUEUED_ALERTS, PostOutcome},
    *,
};
use crate::http_client::tests::{ReceivedPost, Receiver, ReceiverAnswer};

fn alert(name: &str, status: AlertStatus) -> Alert {
    let condition = CONDITIONS.iter().position(|of| of.alert == "NumawardPinCausedOomKill").unwrap();
    let change = |value| AlertChange { condition, subject: vec![("workload", name.to_owned())], value };
    let address = SocketAddr::from(([0, 0, 0, 0], 9560));
    let runbooks = runbooks(&Alerts::default(), ("host", "http", address));
    let mut tracker = AlertTracker { host: "host".to_owned(), runbooks, firing: BTreeMap::new() };
    let firing = tracker.apply(change(Some(1.0)), SystemTime::UNIX_EPOCH).unwrap();
    match status {
        AlertStatus::Firing => firing,
        AlertStatus::Resolved => {
            tracker.apply(change(None), SystemTime::UNIX_EPOCH + Duration::from_mins(1)).unwrap()
        }
    }
}

struct WebhookFixture {
    webhook: Arc<Webhook>,
    counted: AlertMetrics,
    _stop: tokio_util::sync::DropGuard,
}

fn fixture(url: &str, adjust: impl FnOnce(&mut Webhook)) -> WebhookFixture {
    let counted = AlertMetrics::default();
    let mut webhook = Webhook::new("host", Duration::from_millis(1), counted.clone());
    webhook.min_retry_wait = Duration::from_millis(10);
    adjust(&mut webhook);
    let webhook = Arc::new(webhook);
    let poster = Poster::new(url.parse().unwrap(), "application/json", HeaderMap::new(), None).unwrap();
    let poster = poster.with_time_limit(Duration::from_secs(5));
    let stop = CancellationToken::new();
    tokio::spawn(stop.clone().run_until_cancelled_owned(webhook.clone().run(poster)));
    WebhookFixture { webhook, counted, _stop: stop.drop_guard() }
}

impl WebhookFixture {
    async fn until(&self, outcome: PostOutcome, alerts: u64) {
        let wait = async {
            while self.counted.counter(outcome).get() < alerts {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_mins(1), wait)
            .await
            .unwrap_or_else(|_| panic!("{outcome:?}: {:?}", self.counted));
        assert_eq!(self.counted.counter(outcome).get(), alerts);
    }
}

fn bodies(posted: &[ReceivedPost]) -> Vec<Json> {
    posted.iter().map(|(_, _, body)| serde_json::from_slice(body).unwrap()).collect()
}

#[tokio::test]
async fn post_has_format_of_alertmanager() {
    let receiver = Receiver::start([]).await;
    let fixture = fixture(&receiver.url, |_| ());
    fixture.webhook.enqueue(alert("w", AlertStatus::Resolved));
    let posted = bodies(&receiver.until(|posted| !posted.is_empty()).await);
    let labels = json!({"alertname": "NumawardPinCausedOomKill", "instance": "host", "severity": "critical", "workload": "w"});
    let expected = json!({
        "version": "4",
        "groupKey": "{}:{instance=\"host\"}",
        "truncatedAlerts": 0,
        "status": "resolved",
        "receiver": "numaward",
        "groupLabels": {"instance": "host"},
        "commonLabels": {"instance": "host"},
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": [{
            "status": "resolved",
            "labels": labels,
            "annotations": {
                "summary": "A process was killed because of its pinning, although other nodes had free memory.",
                "description": "1 processes of w were killed with the constraint  while other nodes had free memory.",
                "runbook_url": "http://host:9560/runbooks/NumawardPinCausedOomKill",
            },
            "startsAt": "1970-01-01T00:00:00Z",
            "endsAt": "1970-01-01T00:01:00Z",
            "generatorURL": "",
            "fingerprint": posted[0]["alerts"][0]["fingerprint"],
        }],
    });
    assert_eq!(posted, [expected]);
    assert_eq!(posted[0]["alerts"][0]["fingerprint"].as_str().unwrap().len(), 16);
    fixture.until(PostOutcome::Delivered, 1).await;
}

#[tokio::test]
async fn retries_failures_but_not_refusals() {
    let receiver = Receiver::start([
        ReceiverAnswer::Status(500),
        ReceiverAnswer::Status(429),
        ReceiverAnswer::Status(200),
        ReceiverAnswer::Status(400),
    ])
    .await;
    let fixture = fixture(&receiver.url, |_| ());
    fixture.webhook.enqueue(alert("a", AlertStatus::Firing));
    fixture.until(PostOutcome::Delivered, 1).await;
    let posted = bodies(&receiver.posted());
    assert_eq!(posted.len(), 3);
    assert!(posted.iter().all(|body| body == &posted[0]), "{posted:?}");
    fixture.webhook.enqueue(alert("b", AlertStatus::Firing));
    fixture.until(PostOutcome::Refused, 1).await;
    fixture.webhook.enqueue(alert("c", AlertStatus::Firing));
    fixture.until(PostOutcome::Delivered, 2).await;
    let posted = bodies(&receiver.posted());
    assert_eq!((posted.len(), &posted[4]["alerts"][0]["labels"]["workload"]), (5, &json!("c")));
    assert_eq!(fixture.counted.failed.get(), 3);
}

#[tokio::test]
async fn hanging_receiver_gets_latest_state() {
    let receiver = Receiver::start([ReceiverAnswer::Silence]).await;
    let fixture = fixture(&receiver.url, |_| ());
    fixture.webhook.enqueue(alert("first", AlertStatus::Firing));
    receiver.until(|posted| posted.len() == 1).await;
    // The receiver took the first alert and does not answer. The later alerts are queued; those beyond the limit are counted.
    fixture.webhook.enqueue(alert("first", AlertStatus::Resolved));
    for number in 0..MAX_QUEUED_ALERTS + 9 {
        fixture.webhook.enqueue(alert(&format!("w{number}"), AlertStatus::Firing));
    }
    assert_eq!(fixture.counted.counter(PostOutcome::Overflowed).get(), 10);
    fixture.until(PostOutcome::Delivered, MAX_QUEUED_ALERTS as u64).await;
    let posted = bodies(&receiver.posted());
    let sizes: Vec<_> = posted.iter().map(|body| body["alerts"].as_array().unwrap().len()).collect();
    assert!(sizes.iter().all(|size| *size <= MAX_ALERTS_PER_POST), "{sizes:?}");
    assert_eq!((sizes[0], sizes.iter().sum::<usize>()), (1, MAX_QUEUED_ALERTS + 1));
    assert_eq!(
        (&posted[0]["status"], &posted[1]["alerts"][0]["status"]),
        (&json!("firing"), &json!("resolved"))
    );
}

#[tokio::test]
async fn drops_expired_alerts() {
    let fixture = fixture("http://127.0.0.1:9/", |webhook| webhook.max_retry_time = Duration::ZERO);
    fixture.webhook.enqueue(alert("a", AlertStatus::Firing));
    fixture.until(PostOutcome::Expired, 1).await;
    assert!(fixture.webhook.queued.lock().is_empty());
}

/// A source with OOM kills of a workload.
#[derive(Debug, Default)]
struct Kills(Mutex<u64>);

impl SnapshotSource for Kills {
    fn snapshot(&self) -> Snapshot {
        let kills = *self.0.lock().unwrap();
        let activity = WorkloadActivity {
            oom_kills: Some(
                [("none", 0), ("cpuset", kills), ("mempolicy", 0), ("memcg", 0)]
                    .map(|(constraint, count)| OomKillFigures::new(constraint, count)),
            ),
            ..WorkloadActivity::default()
        };
        let workload = WorkloadFigures {
            name: "a\"b\nc".into(),
            start: None,
            allocated: None,
            cpu: None,
            resident: None,
            hugepages: Arc::default(),
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: Some(activity),
        };
        Snapshot { workloads: vec![workload], ..Snapshot::default() }
    }
}

#[tokio::test]
async fn posts_condition_of_metrics() {
    let receiver = Receiver::start([]).await;
    let kills = Arc::new(Kills::default());
    let counted = AlertMetrics::default();
    let metrics = Arc::new(Metrics::new(kills.clone()));
    let config = Alerts {
        webhook: Some(format!("{}/hook", receiver.url).parse::<HttpUrl>().unwrap()),
        runbooks: Some("https://wiki/numaward/".parse::<HttpUrl>().unwrap()),
        interval: Interval(Duration::from_millis(20)),
        group_interval: Interval(Duration::from_millis(20)),
        ..Alerts::default()
    };
    let stop = CancellationToken::new();
    let address = SocketAddr::from(([127, 0, 0, 1], 9560));
    start(&config, ("host", "http", address), &metrics, &counted, &stop).unwrap();
    // A counter is known only after its first value, so that the value must change repeatedly.
    let grow = tokio::spawn(async move {
        loop {
            *kills.0.lock().unwrap() += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let posted = receiver.until(|posted| !posted.is_empty()).await;
    let body = &bodies(&posted)[0];
    assert_eq!(posted[0].0, "/hook");
    assert_eq!(body["alerts"][0]["labels"]["workload"], "a\"b\nc");
    assert_eq!(body["alerts"][0]["labels"]["constraint"], "cpuset");
    let runbook = &body["alerts"][0]["annotations"]["runbook_url"];
    assert_eq!(runbook, "https://wiki/numaward/NumawardPinCausedOomKill");
    grow.abort();
    stop.cancel();
}

#[test]
fn runbooks_default_to_daemon() {
    for (scheme, address, base) in [
        ("http", "127.0.0.1:9560", "http://127.0.0.1:9560/runbooks"),
        ("https", "[::1]:80", "https://[::1]:80/runbooks"),
        ("https", "[::]:9561", "https://host:9561/runbooks"),
    ] {
        let here = ("host", scheme, address.parse().unwrap());
        assert_eq!(runbooks(&Alerts::default(), here), base);
    }
}

#[test]
fn fingerprint_is_that_of_prometheus() {
    // The FNV offset basis is the hash of no labels.
    assert_eq!(fingerprint(&BTreeMap::new()), 14_695_981_039_346_656_037);
    let labels = |name, value: &str| BTreeMap::from([(name, value.to_owned())]);
    assert_ne!(fingerprint(&labels("a", "bc")), fingerprint(&labels("ab", "c")));
}

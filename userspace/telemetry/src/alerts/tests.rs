//! The webhook against a receiver.

use std::{sync::Mutex, time::Duration};

use numaward_config::{HttpUrl, Interval};
use numaward_model::snapshot::{Snapshot, SnapshotSource, WorkloadActivity, WorkloadFigures};
use serde_json::{Value as Json, json};
use tokio::time::timeout;

use super::{
    webhook::{Fate, MAX_WAITING, PER_POST},
    *,
};
use crate::http_client::tests::{Answer, Posted, Receiver};

fn alert(name: &str, status: Status) -> Alert {
    let condition = CONDITIONS.iter().position(|of| of.alert == "NumawardPinCausedOomKill").unwrap();
    let change = |value| Change { condition, subject: vec![("workload", name.to_owned())], value };
    let address = SocketAddr::from(([0, 0, 0, 0], 9560));
    let runbooks = runbooks(&Alerts::default(), ("host", "http", address));
    let mut book = Book { host: "host".to_owned(), runbooks, firing: BTreeMap::new() };
    let firing = book.note(change(Some(1.0)), SystemTime::UNIX_EPOCH).unwrap();
    match status {
        Status::Firing => firing,
        Status::Resolved => book.note(change(None), SystemTime::UNIX_EPOCH + Duration::from_mins(1)).unwrap(),
    }
}

struct Bench {
    webhook: Arc<Webhook>,
    counted: AlertMetrics,
    _stop: tokio_util::sync::DropGuard,
}

fn bench(url: &str, adjust: impl FnOnce(&mut Webhook)) -> Bench {
    let counted = AlertMetrics::default();
    let mut webhook = Webhook::new("host", Duration::from_millis(1), counted.clone());
    webhook.first_wait = Duration::from_millis(10);
    adjust(&mut webhook);
    let webhook = Arc::new(webhook);
    let poster = Poster::new(url.parse().unwrap(), "application/json", HeaderMap::new(), None).unwrap();
    let poster = poster.with_time_limit(Duration::from_secs(5));
    let stop = CancellationToken::new();
    tokio::spawn(stop.clone().run_until_cancelled_owned(webhook.clone().run(poster)));
    Bench { webhook, counted, _stop: stop.drop_guard() }
}

impl Bench {
    async fn until(&self, fate: Fate, alerts: u64) {
        let wait = async {
            while self.counted.of(fate).get() < alerts {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_mins(1), wait)
            .await
            .unwrap_or_else(|_| panic!("{fate:?}: {:?}", self.counted));
        assert_eq!(self.counted.of(fate).get(), alerts);
    }
}

fn bodies(posted: &[Posted]) -> Vec<Json> {
    posted.iter().map(|(_, _, body)| serde_json::from_slice(body).unwrap()).collect()
}

#[tokio::test]
async fn a_post_has_alertmanagers_form() {
    let receiver = Receiver::start([]).await;
    let bench = bench(&receiver.url, |_| ());
    bench.webhook.report(alert("w", Status::Resolved));
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
                "summary": "A process was killed because of its pins while other nodes may have had memory.",
                "description": "1 processes of w were killed with the constraint .",
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
    bench.until(Fate::Delivered, 1).await;
}

#[tokio::test]
async fn what_fails_is_tried_again_and_what_is_refused_is_not() {
    let receiver =
        Receiver::start([Answer::Status(500), Answer::Status(429), Answer::Status(200), Answer::Status(400)])
            .await;
    let bench = bench(&receiver.url, |_| ());
    bench.webhook.report(alert("a", Status::Firing));
    bench.until(Fate::Delivered, 1).await;
    let posted = bodies(&receiver.posted());
    assert_eq!(posted.len(), 3);
    assert!(posted.iter().all(|body| body == &posted[0]), "{posted:?}");
    bench.webhook.report(alert("b", Status::Firing));
    bench.until(Fate::Refused, 1).await;
    bench.webhook.report(alert("c", Status::Firing));
    bench.until(Fate::Delivered, 2).await;
    let posted = bodies(&receiver.posted());
    assert_eq!((posted.len(), &posted[4]["alerts"][0]["labels"]["workload"]), (5, &json!("c")));
    assert_eq!(bench.counted.failed.get(), 3);
}

#[tokio::test]
async fn one_that_hangs_holds_up_nobody_and_hears_the_newest_state() {
    let receiver = Receiver::start([Answer::Silence]).await;
    let bench = bench(&receiver.url, |_| ());
    bench.webhook.report(alert("first", Status::Firing));
    receiver.until(|posted| posted.len() == 1).await;
    // It took that one and says nothing. All these wait, and those that are too many are counted.
    bench.webhook.report(alert("first", Status::Resolved));
    for number in 0..MAX_WAITING + 9 {
        bench.webhook.report(alert(&format!("w{number}"), Status::Firing));
    }
    assert_eq!(bench.counted.of(Fate::Overflowed).get(), 10);
    bench.until(Fate::Delivered, MAX_WAITING as u64).await;
    let posted = bodies(&receiver.posted());
    let sizes: Vec<_> = posted.iter().map(|body| body["alerts"].as_array().unwrap().len()).collect();
    assert!(sizes.iter().all(|size| *size <= PER_POST), "{sizes:?}");
    assert_eq!((sizes[0], sizes.iter().sum::<usize>()), (1, MAX_WAITING + 1));
    assert_eq!(
        (&posted[0]["status"], &posted[1]["alerts"][0]["status"]),
        (&json!("firing"), &json!("resolved"))
    );
}

#[tokio::test]
async fn what_nobody_takes_is_given_up() {
    let bench = bench("http://127.0.0.1:9/", |webhook| webhook.patience = Duration::ZERO);
    bench.webhook.report(alert("a", Status::Firing));
    bench.until(Fate::Expired, 1).await;
    assert!(bench.webhook.waiting.lock().is_empty());
}

/// A workload that loses processes.
#[derive(Debug, Default)]
struct Kills(Mutex<u64>);

impl SnapshotSource for Kills {
    fn snapshot(&self) -> Snapshot {
        let kills = *self.0.lock().unwrap();
        let activity = WorkloadActivity {
            oom_kills: Some([("none", 0), ("cpuset", kills), ("mempolicy", 0), ("memcg", 0)]),
            ..WorkloadActivity::default()
        };
        let workload = WorkloadFigures {
            name: "a\"b\nc".into(),
            allocated: None,
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
async fn a_condition_of_the_metrics_is_posted() {
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
    // A counter is known from its first value on; more than one has to be seen.
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
fn runbooks_are_here_unless_they_are_elsewhere() {
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
fn alerts_are_distinguished_as_prometheus_does() {
    // The offset basis: no labels at all.
    assert_eq!(fingerprint(&BTreeMap::new()), 14_695_981_039_346_656_037);
    let labels = |name, value: &str| BTreeMap::from([(name, value.to_owned())]);
    assert_ne!(fingerprint(&labels("a", "bc")), fingerprint(&labels("ab", "c")));
}

//! Tests that decode the sent messages like a receiver.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use numaward_config::{HttpUrl, Interval};
use numaward_model::{
    SPAN_TARGET,
    snapshot::{
        AllocatedFigures, NodeMemoryFigures, Snapshot, SnapshotSource, WorkloadActivity, WorkloadFigures,
    },
};
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        },
        trace::v1::ExportTraceServiceRequest,
    },
    common::v1::{KeyValue as ProtoKeyValue, any_value},
    metrics::v1::{metric::Data, number_data_point::Value},
};
use prost::Message as _;
use tokio::time::timeout;
use tracing_subscriber::layer::SubscriberExt as _;

use super::{
    metrics::{TimeRange, nanoseconds, requests},
    outbox::{Batch, ItemOutcome},
    *,
};
use crate::http_client::tests::{ReceivedPost, Receiver, ReceiverAnswer};
use crate::metrics::Format;

#[derive(Debug)]
pub(crate) struct FixedSource(pub(crate) usize);

impl SnapshotSource for FixedSource {
    fn snapshot(&self) -> Snapshot {
        let node = NodeMemoryFigures { node: numaward_topology::NodeId(0), kinds: Vec::new() };
        let workload = |number| WorkloadFigures {
            name: format!("w\"{number}\n").into(),
            start: None,
            allocated: Some(vec![AllocatedFigures {
                local: numaward_topology::Bytes(1 << 60),
                ..AllocatedFigures::default()
            }]),
            cpu: None,
            resident: None,
            hugepages: Arc::default(),
            pressure: Some(numaward_model::snapshot::PressureFigures {
                waiting: Duration::from_millis(1500),
                ..Default::default()
            }),
            oom_kills: None,
            tiering: None,
            activity: Some(WorkloadActivity {
                stalls: Some(numaward_model::snapshot::StallFigures::default()),
                ..WorkloadActivity::default()
            }),
        };
        let workloads = (0..self.0).map(workload).collect();
        Snapshot { nodes: vec![node], workloads, workloads_with_slot: 7, ..Snapshot::default() }
    }
}

pub(crate) fn config(endpoint: &str) -> Config {
    let mut config = Config::default();
    config.otlp.endpoint = Some(endpoint.parse::<HttpUrl>().unwrap());
    config.otlp.interval = Interval(Duration::from_millis(50));
    config.otlp.headers.insert("X-Tenant".to_owned(), "one".to_owned());
    config.kubernetes.node_name = Some("k".to_owned());
    config
}

pub(crate) fn texts(attributes: &[ProtoKeyValue]) -> BTreeMap<String, String> {
    let text = |value: &ProtoKeyValue| match value.value.as_ref().unwrap().value.as_ref().unwrap() {
        any_value::Value::StringValue(text) => text.clone(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|value| (value.key.clone(), text(value))).collect()
}

/// Returns all numbers that were sent, by their name and labels in `/metrics`.
fn numbers(posted: &[ReceivedPost]) -> BTreeMap<String, String> {
    let mut numbers = BTreeMap::new();
    let mut add = |name: String, attributes: &[ProtoKeyValue], value: String| {
        assert_eq!(numbers.insert(format!("{name}{:?}", texts(attributes)), value), None, "{name} twice");
    };
    for (_, _, body) in posted {
        let request = ExportMetricsServiceRequest::decode(body.clone()).unwrap();
        let resource = texts(&request.resource_metrics[0].resource.as_ref().unwrap().attributes);
        assert_eq!((resource["service.name"].as_str(), resource["host.name"].as_str()), ("numaward", "host"));
        assert_eq!((resource["k8s.node.name"].as_str(), resource["os.type"].as_str()), ("k", "linux"));
        for metric in &request.resource_metrics[0].scope_metrics[0].metrics {
            let name = &metric.name;
            let written = |value: &Value| match value {
                Value::AsInt(whole) => whole.to_string(),
                Value::AsDouble(value) => format!("{value:?}"),
            };
            match metric.data.as_ref().unwrap() {
                Data::Sum(sum) => {
                    assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
                    for point in &sum.data_points {
                        assert!(
                            point.start_time_unix_nano > 0
                                && point.time_unix_nano >= point.start_time_unix_nano
                        );
                        let value = written(point.value.as_ref().unwrap());
                        add(format!("{name}_total"), &point.attributes, value);
                    }
                }
                Data::Gauge(gauge) => {
                    for point in &gauge.data_points {
                        add(name.clone(), &point.attributes, written(point.value.as_ref().unwrap()));
                    }
                }
                Data::Histogram(histogram) => {
                    for point in &histogram.data_points {
                        assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                        assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
                        add(format!("{name}_count"), &point.attributes, point.count.to_string());
                        add(format!("{name}_sum"), &point.attributes, format!("{:?}", point.sum.unwrap()));
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }
    numbers
}

/// Returns the same numbers from `/metrics`, without buckets.
fn scraped(metrics: &Metrics) -> BTreeMap<String, String> {
    let mut text = Vec::new();
    let written = metrics.encode(Format::OpenMetrics, |piece| {
        text.extend_from_slice(&piece);
        true
    });
    written.unwrap();
    let text = String::from_utf8(text).unwrap();
    let samples = text.lines().filter(|line| !line.starts_with('#') && !line.contains("_bucket{"));
    let numbers = samples.map(|line| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        // Both sides escape these characters alike.
        let labels = labels.strip_suffix('}').unwrap().replace("\",", "\",\0");
        let mut labels: Vec<_> = labels.split(",\0").filter_map(|label| label.split_once('=')).collect();
        labels.sort_unstable();
        let labels: Vec<_> = labels.iter().map(|(name, value)| format!("{name:?}: {value}")).collect();
        (format!("{name}{{{}}}", labels.join(", ")), value.to_owned())
    });
    numbers.collect()
}

#[tokio::test]
async fn numbers_equal_scrape() {
    let receiver = Receiver::start([]).await;
    let metrics = Arc::new(Metrics::new(Arc::new(FixedSource(3))));
    let (config, counted, stop) =
        (config(&format!("{}/base/", receiver.url)), OtlpMetrics::default(), CancellationToken::new());
    let traces = spans::Traces::new(&Otlp::default());
    start(&config, "host", &metrics, traces, &counted, &stop).unwrap();
    let posted = receiver.until(|posted| !posted.is_empty()).await;
    stop.cancel();
    let (path, headers, _) = &posted[0];
    assert_eq!(path, "/base/v1/metrics");
    assert_eq!(headers["content-type"], "application/x-protobuf");
    assert_eq!(headers["x-tenant"], "one");
    let sent = numbers(&posted[..1]);
    assert_eq!(sent, scraped(&metrics));
    let allocated = r#"numaward_memory_allocated_bytes_total{"locality": "local", "numa_node": "0", "workload": "w\"1\n"}"#;
    assert_eq!(sent[allocated], (1_u64 << 60).to_string());
    assert_eq!(sent[r#"numaward_workloads{"counters": "own"}"#], "7");
}

/// Source of a container whose counters started after the daemon.
#[derive(Debug)]
struct LateContainer(SystemTime);

impl SnapshotSource for LateContainer {
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = FixedSource(1).snapshot();
        snapshot.workloads[0].name = "shop/web-0/main".into();
        snapshot.workloads[0].start = Some(self.0);
        snapshot.guarantees.missed = vec![numaward_model::snapshot::MissFigures {
            workload: "shop/web-0/main".into(),
            bytes: vec![(numaward_topology::NodeId(0), numaward_topology::Bytes(1))],
        }];
        snapshot
    }
}

#[test]
fn container_has_semantic_attributes_and_its_own_start() {
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
    let metrics = Metrics::new(Arc::new(LateContainer(start + Duration::from_secs(5))));
    let times = TimeRange { start, now: start + Duration::from_mins(1) };
    let mut points = BTreeMap::new();
    requests(&metrics, &resource(&config("http://localhost"), "host"), times, |batch| {
        let request = ExportMetricsServiceRequest::decode(batch.body).unwrap();
        for metric in &request.resource_metrics[0].scope_metrics[0].metrics {
            let (started, attributes) = match metric.data.as_ref().unwrap() {
                Data::Sum(sum) => (sum.data_points[0].start_time_unix_nano, &sum.data_points[0].attributes),
                Data::Histogram(of) => {
                    (of.data_points[0].start_time_unix_nano, &of.data_points[0].attributes)
                }
                _ => continue,
            };
            points.insert(metric.name.clone(), (started, texts(attributes)));
        }
    })
    .unwrap();
    for name in
        ["numaward_memory_allocated_bytes", "numaward_reclaim_stall_seconds", "numaward_numa_miss_bytes"]
    {
        let (started, attributes) = &points[name];
        assert_eq!(*started, 1_005_000_000_000, "{name}");
        for (label, semantic, value) in [
            ("namespace", "k8s.namespace.name", "shop"),
            ("pod", "k8s.pod.name", "web-0"),
            ("container", "k8s.container.name", "main"),
        ] {
            assert_eq!((attributes[label].as_str(), attributes[semantic].as_str()), (value, value), "{name}");
        }
    }
    let own = points.iter().filter(|(_, (_, attributes))| !attributes.contains_key("pod"));
    assert!(own.map(|(_, (started, _))| *started).all(|started| started == 1_000_000_000_000));
}

#[test]
fn query_of_endpoint_is_kept() {
    for (endpoint, expected) in [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/in/?key=k", "http://c:4318/in/v1/metrics?key=k"),
    ] {
        assert_eq!(url(&endpoint.parse().unwrap(), Signal::Metrics).unwrap(), expected);
    }
}

#[test]
fn many_workloads_need_several_requests() {
    let metrics = Metrics::new(Arc::new(FixedSource(2000)));
    let resource = resource(&config("http://localhost"), "host");
    let now = SystemTime::now();
    let mut posted: Vec<ReceivedPost> = Vec::new();
    let mut items = 0;
    requests(&metrics, &resource, TimeRange { start: now, now }, |batch| {
        items += batch.items;
        posted.push((String::new(), HeaderMap::new(), batch.body));
    })
    .unwrap();
    assert!(posted.len() > 1, "{}", posted.len());
    let (sent, scraped) = (numbers(&posted), scraped(&metrics));
    assert!(sent == scraped, "{} sent, {} scraped", sent.len(), scraped.len());
    let histograms = sent.keys().filter(|name| name.contains("_count{")).count();
    assert_eq!(items, (sent.len() - histograms) as u64);
}

fn batch(text: &'static str, items: u64) -> Batch {
    Batch { body: Bytes::from_static(text.as_bytes()), items }
}

struct OutboxFixture {
    outbox: Arc<Outbox>,
    counted: OtlpMetrics,
    _stop: tokio_util::sync::DropGuard,
}

fn fixture(url: &str, capacity: usize) -> OutboxFixture {
    let counted = OtlpMetrics::default();
    let mut outbox = Outbox::new(Signal::Metrics, counted.clone());
    (outbox.min_retry_wait, outbox.capacity) = (Duration::from_millis(10), capacity);
    let outbox = Arc::new(outbox);
    let endpoint = config(url).otlp.endpoint.unwrap();
    let poster = poster(&Otlp::default(), &endpoint.0, Signal::Metrics).unwrap();
    let stop = CancellationToken::new();
    let run = outbox.clone().run(poster.with_time_limit(Duration::from_secs(5)));
    tokio::spawn(stop.clone().run_until_cancelled_owned(run));
    OutboxFixture { outbox, counted, _stop: stop.drop_guard() }
}

impl OutboxFixture {
    async fn until(&self, outcome: ItemOutcome, items: u64) {
        let wait = async {
            while self.counted.counter(Signal::Metrics, outcome).get() < items {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_mins(1), wait)
            .await
            .unwrap_or_else(|_| panic!("{outcome:?}: {:?}", self.counted));
        assert_eq!(self.counted.counter(Signal::Metrics, outcome).get(), items);
    }
}

#[tokio::test]
async fn retries_and_counts_failures() {
    let receiver = Receiver::start([
        ReceiverAnswer::Later(0),
        ReceiverAnswer::Status(429),
        ReceiverAnswer::Status(200),
        ReceiverAnswer::Status(500),
    ])
    .await;
    let fixture = fixture(&receiver.url, 1000);
    fixture.outbox.push(batch("a", 2));
    fixture.until(ItemOutcome::Delivered, 2).await;
    fixture.outbox.push(batch("b", 3));
    fixture.until(ItemOutcome::Rejected, 3).await;
    fixture.outbox.push(batch("c", 4));
    fixture.until(ItemOutcome::Delivered, 6).await;
    let bodies: Vec<_> = receiver.posted().into_iter().map(|(_, _, body)| body).collect();
    assert_eq!(bodies, ["a", "a", "a", "b", "c"]);
}

#[tokio::test]
async fn full_queue_drops_oldest() {
    let receiver = Receiver::start([ReceiverAnswer::Silence]).await;
    let fixture = fixture(&receiver.url, 4);
    fixture.outbox.push(batch("first", 1));
    // A batch that is larger than the queue is dropped.
    fixture.until(ItemOutcome::Dropped, 1).await;
    fixture.outbox.push(batch("a", 1));
    receiver.until(|posted| posted.len() == 1).await;
    for (text, items) in [("bb", 10), ("cc", 20), ("dd", 40)] {
        fixture.outbox.push(batch(text, items));
    }
    fixture.until(ItemOutcome::Dropped, 11).await;
    fixture.until(ItemOutcome::Delivered, 61).await;
    let bodies: Vec<_> = receiver.posted().into_iter().map(|(_, _, body)| body).collect();
    assert_eq!(bodies, ["a", "a", "cc", "dd"]);
}

#[test]
fn counts_rejected_items() {
    let success = ExportMetricsPartialSuccess { rejected_data_points: 3, error_message: "old".to_owned() };
    let answer = ExportMetricsServiceResponse { partial_success: Some(success) }.encode_to_vec();
    assert_eq!(Signal::Metrics.rejected(&answer), 3);
    for nothing in [&b""[..], b"no protobuf", b"{}"] {
        assert_eq!(Signal::Metrics.rejected(nothing), 0);
    }
}

/// Collects the spans of `work`, while other tests run without a collector.
pub(crate) fn with_traces(traces: &spans::Traces, work: impl FnOnce()) {
    // With a single subscriber, `tracing` caches the decision of the first thread that reaches a span, which may belong
    // to another test.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = tracing_subscriber::registry().with(traces.layer());
    tracing::subscriber::with_default(subscriber, work);
}

#[tokio::test]
async fn nested_spans_keep_parent_and_times() {
    let receiver = Receiver::start([]).await;
    let mut config = config(&receiver.url);
    config.otlp.metrics = false;
    let traces = spans::Traces::new(&config.otlp);
    let before = SystemTime::now();
    with_traces(&traces, || {
        let _outer = tracing::info_span!(target: SPAN_TARGET, "admit").entered();
        drop(tracing::info_span!("of no interest").entered());
        drop(tracing::info_span!(target: SPAN_TARGET, "ledger").entered());
    });
    let after = SystemTime::now();
    let (metrics, counted) = (Arc::new(Metrics::new(Arc::new(FixedSource(0)))), traces.metrics());
    let stop = CancellationToken::new();
    start(&config, "host", &metrics, traces, &counted, &stop).unwrap();
    let posted = receiver.until(|posted| !posted.is_empty()).await;
    stop.cancel();
    let (path, _, body) = &posted[0];
    assert_eq!(path, "/v1/traces");
    let request = ExportTraceServiceRequest::decode(body.clone()).unwrap();
    let [sent] = request.resource_spans.as_slice() else { panic!("{request:?}") };
    assert_eq!(texts(&sent.resource.as_ref().unwrap().attributes)["service.name"], "numaward");
    let [inner, outer] = sent.scope_spans[0].spans.as_slice() else { panic!("{sent:?}") };
    assert_eq!((inner.name.as_str(), outer.name.as_str()), ("ledger", "admit"));
    assert!(outer.span_id.iter().any(|&byte| byte != 0) && outer.trace_id.iter().any(|&byte| byte != 0));
    assert_eq!((&inner.parent_span_id, &inner.trace_id), (&outer.span_id, &outer.trace_id));
    assert!(outer.parent_span_id.is_empty(), "{outer:?}");
    let times = [
        nanoseconds(before),
        outer.start_time_unix_nano,
        inner.start_time_unix_nano,
        inner.end_time_unix_nano,
        outer.end_time_unix_nano,
        nanoseconds(after),
    ];
    assert!(times.is_sorted(), "{times:?}");
}

#[tokio::test]
async fn full_queue_drops_spans() {
    let traces = spans::Traces::new(&config("http://localhost").otlp);
    with_traces(&traces, || {
        for _ in 0..4096 + 5 {
            drop(tracing::info_span!(target: SPAN_TARGET, "ledger").entered());
        }
    });
    assert_eq!(traces.metrics().counter(Signal::Traces, ItemOutcome::Dropped).get(), 5);
}

#[test]
fn no_endpoint_no_spans() {
    let traces = spans::Traces::new(&Otlp::default());
    assert!(traces.layer::<tracing_subscriber::Registry>().is_none());
}

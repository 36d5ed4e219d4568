//! Removal of the startup taint against an API server that checks the patch.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use numaward_kube::api::{self, ApiMetrics, TaintRemover, TaintTiming, fake::FakeApiServer};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const FAST: TaintTiming = TaintTiming {
    poll_interval: Duration::from_millis(5),
    report_after: Duration::from_millis(20),
    retry_delay: Duration::from_millis(20),
    max_retry_delay: Duration::from_millis(40),
};

struct Removal {
    server: FakeApiServer,
    is_ready: Arc<AtomicBool>,
    reports: Arc<Mutex<Vec<Result<(), String>>>>,
    metrics: ApiMetrics,
    task: tokio::task::JoinHandle<()>,
}

/// Starts the removal of `numaward.io/not-ready` from a node with these taints.
async fn start(taints: &Value) -> Removal {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "uid-1", "v1.36.2");
    server.put_taints("n1", taints);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig()).unwrap();
    let client = api::connect(Some(&path)).await.unwrap();
    let (is_ready, reports) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let metrics = ApiMetrics::default();
    let remover = TaintRemover {
        client,
        node: "n1".to_owned(),
        key: "numaward.io/not-ready".to_owned(),
        is_ready: {
            let is_ready = is_ready.clone();
            Arc::new(move || is_ready.load(Ordering::Acquire))
        },
        timing: FAST,
        metrics: metrics.clone(),
        report: {
            let reports = reports.clone();
            Arc::new(move |result| reports.lock().unwrap().push(result))
        },
    };
    let task = tokio::spawn(remover.run(CancellationToken::new()));
    Removal { server, is_ready, reports, metrics, task }
}

impl Removal {
    async fn finish(&mut self) {
        self.is_ready.store(true, Ordering::Release);
        tokio::time::timeout(Duration::from_mins(1), &mut self.task).await.unwrap().unwrap();
    }

    fn patches(&self) -> usize {
        self.server.requests().iter().filter(|request| request.starts_with("PATCH ")).count()
    }
}

fn taint(key: &str, effect: &str) -> Value {
    json!({"key": key, "effect": effect})
}

#[tokio::test]
async fn removes_taint_once_ready() {
    let other = taint("node.kubernetes.io/not-ready", "NoSchedule");
    let own = |effect| taint("numaward.io/not-ready", effect);
    let mut run = start(&json!([own("NoSchedule"), other, own("NoExecute")])).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(run.server.requests().is_empty(), "it is not ready");
    run.finish().await;
    assert_eq!(run.server.taints("n1"), json!([other]));
    let reports = run.reports.lock().unwrap().clone();
    assert!(matches!(&reports[..], [Err(first), Ok(())] if first.contains("stays")), "{reports:?}");
}

#[tokio::test]
async fn writes_nothing_without_taint() {
    for taints in [json!([taint("a", "NoSchedule")]), Value::Null] {
        let mut run = start(&taints).await;
        run.finish().await;
        assert_eq!((run.server.taints("n1"), run.patches()), (taints, 0));
    }
}

#[tokio::test]
async fn repeats_refused_removal() {
    let mut run = start(&json!([taint("numaward.io/not-ready", "NoSchedule")])).await;
    // The first is the request that reads the node.
    run.server.refuse_next("/nodes/n1", StatusCode::INTERNAL_SERVER_ERROR);
    run.server.refuse_next("/nodes/n1", StatusCode::FORBIDDEN);
    run.finish().await;
    assert_eq!(run.server.taints("n1"), json!([]));
    let reports = run.reports.lock().unwrap().clone();
    let [Err(first), Err(second), Ok(())] = &reports[..] else { panic!("{reports:?}") };
    assert!(first.contains("numaward.io/not-ready cannot be removed: 500"), "{first}");
    assert!(second.contains("verbs get and patch of the resource nodes"), "{second}");
    let mut registry = Registry::default();
    run.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let counted = "kubernetes_api_errors_total{operation=\"remove_taint\",reason=\"forbidden\"} 1\n";
    assert!(text.contains(counted), "{text}");
}

#[tokio::test]
async fn keeps_taints_of_other_writers() {
    let own = taint("numaward.io/not-ready", "NoSchedule");
    let other = taint("a", "NoSchedule");
    let mut run = start(&json!([own])).await;
    // Each answer takes long enough for the change between the read and the patch.
    run.server.delay(Duration::from_millis(200));
    run.is_ready.store(true, Ordering::Release);
    while run.patches() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    run.server.put_taints("n1", &json!([own, other]));
    run.server.delay(Duration::ZERO);
    run.finish().await;
    assert_eq!(run.server.taints("n1"), json!([other]));
    assert_eq!(run.patches(), 2, "the first one was made of an older list");
}

//! Evictions against an API server that checks each request, and refuses requests if a test demands it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use numaward_config::kubernetes::Kubernetes;
use numaward_kube::{
    api::{
        self, ApiMetrics, EventWriter, EvictionReason, EvictionTiming, Evictor, Pods, fake::FakeApiServer,
    },
    pod::{PodId, PodSource as _},
};
use numaward_topology::{Bytes, NodeId};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

const FAST: EvictionTiming = EvictionTiming {
    poll_interval: Duration::from_millis(5),
    unplaced_delay: Duration::from_millis(100),
    pause_after_eviction: Duration::from_millis(300),
    max_wait: Duration::from_mins(10),
    retry_delay: Duration::from_millis(50),
    max_retry_delay: Duration::from_millis(200),
};

struct RunningEvictor {
    server: FakeApiServer,
    listed: Arc<Mutex<Vec<(PodId, EvictionReason)>>>,
    metrics: ApiMetrics,
    reports: Arc<Mutex<Vec<Result<(), String>>>>,
    kubernetes: watch::Sender<Kubernetes>,
    _stop: DropGuard,
}

/// Starts an evictor on a node with these pods, all of which run without their claims.
async fn run(pods: &[Value]) -> RunningEvictor {
    run_at(FAST, EvictionReason::Unplaced, pods).await
}

async fn run_at(timing: EvictionTiming, why: EvictionReason, pods: &[Value]) -> RunningEvictor {
    run_on(FakeApiServer::start().await.unwrap(), timing, why, pods).await
}

async fn run_on(
    server: FakeApiServer,
    timing: EvictionTiming,
    why: EvictionReason,
    pods: &[Value],
) -> RunningEvictor {
    for pod in pods {
        server.put_pod(pod.clone());
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig()).unwrap();
    let client = api::connect(Some(&path)).await.unwrap();
    let metrics = ApiMetrics::default();
    let (known, stop) = (Pods::new(EventWriter::new(metrics.clone()).0), CancellationToken::new());
    let following = (known.clone(), client.clone(), metrics.clone(), stop.clone());
    tokio::spawn(async move {
        let (known, client, metrics, stop) = following;
        known.follow(client, "n1".to_owned(), metrics, Arc::new(|_| {}), stop).await;
    });
    until("pods are known", || known.is_synced()).await;
    let ids = pods.iter().map(|pod| {
        let text = |key: &str| pod["metadata"][key].as_str().unwrap().to_owned();
        let uid = pod["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str();
        PodId {
            namespace: text("namespace"),
            name: text("name"),
            uid: uid.map_or_else(|| text("uid"), str::to_owned),
        }
    });
    let listed = Arc::new(Mutex::new(ids.map(|id| (id, why)).collect::<Vec<_>>()));
    let reports = Arc::new(Mutex::new(Vec::new()));
    let kubernetes = watch::Sender::new(Kubernetes::default());
    let evictor = Evictor {
        pods: known,
        to_evict: {
            let listed = listed.clone();
            Arc::new(move || listed.lock().unwrap().clone())
        },
        kubernetes: kubernetes.subscribe(),
        own_pod: Some("uid-own".to_owned()),
        timing,
        metrics: metrics.clone(),
        report: {
            let reports = reports.clone();
            Arc::new(move |result| reports.lock().unwrap().push(result))
        },
    };
    tokio::spawn(evictor.run(client, "n1".to_owned(), stop.clone()));
    RunningEvictor { server, listed, metrics, reports, kubernetes, _stop: stop.drop_guard() }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(Duration::from_mins(1), async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| unreachable_in_time(what));
}

#[expect(clippy::panic, reason = "a test that cannot go on fails")]
fn unreachable_in_time(what: &str) {
    panic!("waited in vain: {what}");
}

impl RunningEvictor {
    fn evictions(&self) -> Vec<String> {
        let asked = self.server.requests();
        asked.into_iter().filter(|asked| asked.contains("/eviction")).collect()
    }

    /// Returns reason and note of each event on a pod.
    fn events(&self, name: &str) -> Vec<(String, String)> {
        let of = self.server.events().into_iter().filter(|event| event["regarding"]["name"] == name);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        of.map(|event| (text(&event["reason"]), text(&event["note"]))).collect()
    }

    fn count(&self, result: &str) -> u64 {
        self.count_of("unplaced", result)
    }

    fn count_of(&self, reason: &str, result: &str) -> u64 {
        let mut registry = Registry::default();
        self.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line = format!("kubernetes_evictions_total{{reason=\"{reason}\",result=\"{result}\"}} ");
        text.lines().find_map(|found| found.strip_prefix(&line)).unwrap().parse().unwrap()
    }

    /// Removes a pod from the list and from the API server, as after the end of its containers.
    fn end(&self, name: &str) {
        self.listed.lock().unwrap().retain(|(id, _)| id.name != name);
        self.server.delete_pod("ns", name);
    }
}

fn pod(name: &str, controller: Option<&str>) -> Value {
    let mut pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}]}});
    if let Some(kind) = controller {
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": kind, "name": "n1", "uid": "o", "controller": true}]);
    }
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn evicts_one_pod_at_a_time() {
    let run = run(&[pod("a", Some("ReplicaSet")), pod("b", Some("StatefulSet"))]).await;
    until("the first eviction", || run.count("evicted") == 1).await;
    assert_eq!(run.evictions(), ["POST /api/v1/namespaces/ns/pods/a/eviction"]);
    let (reason, note) = run.events("a").remove(0);
    assert_eq!(reason, "NumaPlacementEviction");
    assert!(note.contains("without the CPUs or memory") && note.contains("the ReplicaSet n1"), "{note}");
    let asked = run.server.requests();
    let at = |part: &str| asked.iter().position(|asked| asked.contains(part)).unwrap();
    assert!(at("/events") < at("/eviction"), "{asked:?}");

    // Until the first pod is gone, and for a pause afterwards, no further pod is evicted.
    tokio::time::sleep(FAST.pause_after_eviction * 2).await;
    assert_eq!((run.evictions().len(), run.events("b").len()), (1, 0));
    let ended = Instant::now();
    run.end("a");
    until("the second eviction", || run.count("evicted") == 2).await;
    assert!(ended.elapsed() + 2 * FAST.poll_interval >= FAST.pause_after_eviction, "{:?}", ended.elapsed());
    assert_eq!(run.evictions().len(), 2);
    assert!(run.evictions()[1].contains("/pods/b/"));
}

/// A finalizer keeps the object of an evicted pod after the end of the containers.
#[tokio::test(flavor = "multi_thread")]
async fn ended_pod_with_finalizer_delays_no_eviction() {
    let run = run(&[pod("a", Some("ReplicaSet")), pod("b", Some("ReplicaSet"))]).await;
    until("the first eviction", || run.count("evicted") == 1).await;
    let mut ended = pod("a", Some("ReplicaSet"));
    ended["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    ended["metadata"]["finalizers"] = json!(["a.example/x"]);
    ended["status"] = json!({"phase": "Failed"});
    run.server.put_pod(ended);
    until("the second eviction", || run.count("evicted") == 2).await;
    assert!(run.evictions()[1].contains("/pods/b/"), "{:?}", run.evictions());
}

/// Pods may take a year to end (`terminationGracePeriodSeconds`), and each may begin to end after the one before.
#[tokio::test(flavor = "multi_thread")]
async fn endless_ends_are_awaited_for_limited_time() {
    let timing = EvictionTiming { max_wait: Duration::from_secs(1), ..FAST };
    let mut pods = ["a", "b", "c", "d"].map(|name| pod(name, Some("ReplicaSet")));
    pods[0]["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let began = Instant::now();
    let run = run_at(timing, EvictionReason::Unplaced, &pods).await;
    tokio::time::sleep(timing.max_wait / 2).await;
    assert_eq!(run.evictions(), [""; 0]);
    pods[1]["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    run.server.put_pod(pods[1].clone());
    until("the first eviction", || run.count("evicted") == 1).await;
    assert!(began.elapsed() >= timing.max_wait, "{:?}", began.elapsed());
    // The evicted pod does not end either.
    until("the second eviction", || run.count("evicted") == 2).await;
    assert!(began.elapsed() >= 2 * timing.max_wait, "{:?}", began.elapsed());
    let asked = run.evictions();
    assert!(asked[0].contains("/pods/c/") && asked[1].contains("/pods/d/"), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_pod_placed_in_time() {
    let timing = EvictionTiming { unplaced_delay: Duration::from_secs(3), ..FAST };
    let run = run_at(timing, EvictionReason::Unplaced, &[pod("a", Some("ReplicaSet"))]).await;
    run.listed.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(run.evictions(), [""; 0]);
    assert_eq!(run.server.events(), [Value::Null; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_pods_that_would_not_move() {
    let mut mirror = pod("mirror", Some("Node"));
    mirror["metadata"]["annotations"] =
        json!({"kubernetes.io/config.hash": "hash", "kubernetes.io/config.mirror": "hash"});
    let mut spared = pod("spared", Some("ReplicaSet"));
    spared["metadata"]["namespace"] = json!("kube-system");
    // An owner that is not the controller does not create the pod again.
    let mut owned = pod("owned", Some("ReplicaSet"));
    owned["metadata"]["ownerReferences"][0]["controller"] = json!(false);
    let own = pod("own", Some("ReplicaSet"));
    let pods = [pod("bare", None), owned, pod("daemon", Some("DaemonSet")), mirror, spared, own];
    let run = run(&pods).await;
    let words = [
        ("bare", "no controller"),
        ("owned", "no controller"),
        ("daemon", "the DaemonSet n1"),
        ("mirror", "a static pod"),
        ("spared", "placementOffNamespaces"),
        ("own", "numaward's own"),
    ];
    for (name, words) in words {
        until(name, || !run.events(name).is_empty()).await;
        let (reason, note) = run.events(name).remove(0);
        assert!(reason == "NumaPlacementMissing" && note.contains(words), "{name}: {reason}: {note}");
    }
    tokio::time::sleep(FAST.unplaced_delay * 3).await;
    assert_eq!((run.evictions(), run.server.events().len()), (vec![], words.len()));
}

#[tokio::test(flavor = "multi_thread")]
async fn excluded_namespaces_may_change() {
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("/eviction", StatusCode::TOO_MANY_REQUESTS)));
    let pod = pod("a", Some("ReplicaSet"));
    let namespace = pod["metadata"]["namespace"].as_str().unwrap().to_owned();
    let run = run_on(server, FAST, EvictionReason::Unplaced, &[pod]).await;
    until("a try", || run.count("blocked") >= 1).await;
    run.kubernetes.send_modify(|settings| {
        settings.placement_off_namespaces.insert(namespace);
    });
    run.server.refuse(None);
    let is_kept = || run.events("a").iter().any(|(_, note)| note.contains("placementOffNamespaces"));
    until("it stays", is_kept).await;
    assert_eq!(run.count("evicted"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn delays_grow_while_budget_blocks() {
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("/eviction", StatusCode::TOO_MANY_REQUESTS)));
    let run = run_on(server, FAST, EvictionReason::Unplaced, &[pod("a", Some("ReplicaSet"))]).await;
    until("a try", || run.count("blocked") >= 1).await;
    let first = Instant::now();
    until("some tries", || run.count("blocked") >= 4).await;
    // The delays are 50, 100 and 200 ms; the first request may have been noticed late.
    assert!(first.elapsed() >= FAST.retry_delay * 5, "{:?}", first.elapsed());
    run.server.refuse(None);
    until("it goes", || run.count("evicted") == 1).await;
    assert_eq!(run.events("a").len(), 1, "one event for all tries");
    assert!(run.reports.lock().unwrap().iter().all(Result::is_ok), "a blocked eviction is not an error");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_missing_right() {
    let run = run(&[pod("a", Some("ReplicaSet"))]).await;
    run.server.refuse(Some(("/eviction", StatusCode::FORBIDDEN)));
    until("it is said", || run.count("forbidden") == 1).await;
    until("it is said", || !run.reports.lock().unwrap().is_empty()).await;
    let problem = run.reports.lock().unwrap()[0].clone().unwrap_err();
    assert!(problem.contains("create") && problem.contains("pods/eviction"), "{problem}");

    run.server.refuse(Some(("/eviction", StatusCode::NOT_FOUND)));
    until("it is gone", || run.count("gone") == 1).await;
    let tries = run.evictions().len();
    tokio::time::sleep(FAST.max_retry_delay * 3).await;
    assert_eq!(run.evictions().len(), tries);
}

const SHORT: EvictionReason = EvictionReason::NodeShort { node: NodeId(1), has: Bytes::mib(300) };

#[tokio::test(flavor = "multi_thread")]
async fn skips_pods_that_cannot_be_evicted() {
    // The guard has waited before it lists the pods, so there is no further delay.
    let timing = EvictionTiming { unplaced_delay: Duration::from_mins(5), ..FAST };
    let mut critical = pod("critical", Some("ReplicaSet"));
    critical["spec"]["priority"] = json!(2_000_000_000);
    let pods = [
        critical,
        pod("daemon", Some("DaemonSet")),
        pod("bare", None),
        pod("budget", Some("ReplicaSet")),
        pod("a", Some("ReplicaSet")),
    ];
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("/pods/budget/eviction", StatusCode::TOO_MANY_REQUESTS)));
    let run = run_on(server, timing, SHORT, &pods).await;
    until("the pod that may go goes", || run.count_of("node_short", "evicted") == 1).await;
    let evictions = run.evictions();
    let last = evictions.last().map(String::as_str);
    assert_eq!(last, Some("POST /api/v1/namespaces/ns/pods/a/eviction"), "{evictions:?}");
    assert!(evictions[0].contains("/pods/budget/"), "{evictions:?}");
    assert!(evictions.iter().all(|asked| ["/a/", "/budget/"].iter().any(|pod| asked.contains(pod))));
    let (reason, note) = run.events("a").remove(0);
    assert_eq!(reason, "NumaNodeShortEviction");
    let words = "Node 1 may soon not have enough memory for its guarantees, and no further workload can be kept off it. \
        This pod has no guarantee and uses 300Mi there. It is evicted, so that the ReplicaSet n1 creates it again.";
    assert_eq!(note, words);
    for name in ["critical", "daemon", "bare"] {
        assert_eq!(run.events(name), [], "{name}");
    }
    assert_eq!(run.count("evicted"), 0);

    // The blocked pod is tried again after the first one is gone and the pause is over.
    let asked = run.evictions().len();
    tokio::time::sleep(FAST.pause_after_eviction * 2).await;
    assert_eq!(run.evictions().len(), asked, "one at a time");
    run.server.refuse(None);
    let ended = Instant::now();
    run.end("a");
    until("the other one goes", || run.count_of("node_short", "evicted") == 2).await;
    assert!(ended.elapsed() + 2 * FAST.poll_interval >= FAST.pause_after_eviction, "{:?}", ended.elapsed());
    assert!(run.evictions().last().unwrap().contains("/pods/budget/"));
}

/// Otherwise a tenant could fill a node with a pod that cannot be evicted, and have all pods of other tenants evicted.
#[tokio::test(flavor = "multi_thread")]
async fn larger_unevictable_pod_blocks_smaller() {
    let pods = [
        pod("larger", Some("ReplicaSet")),
        pod("bare", None),
        pod("budget", Some("ReplicaSet")),
        pod("smaller", Some("ReplicaSet")),
        pod("elsewhere", Some("ReplicaSet")),
    ];
    let run = run_at(FAST, SHORT, &pods[..0]).await;
    for pod in &pods {
        run.server.put_pod(pod.clone());
    }
    run.server.refuse(Some(("/pods/budget/eviction", StatusCode::TOO_MANY_REQUESTS)));
    let listed = |names: &[(usize, u32, u64)]| {
        let name = |(index, node, mib): &(usize, u32, u64)| {
            let text = |key: &str| pods[*index]["metadata"][key].as_str().unwrap().to_owned();
            let id = PodId { namespace: text("namespace"), name: text("name"), uid: text("uid") };
            (id, EvictionReason::NodeShort { node: NodeId(*node), has: Bytes::mib(*mib) })
        };
        *run.listed.lock().unwrap() = names.iter().map(name).collect();
    };
    let gone = |name: &str| run.evictions().iter().any(|asked| asked.contains(&format!("/pods/{name}/")));
    listed(&[(1, 1, 300), (3, 1, 200)]);
    tokio::time::sleep(FAST.max_retry_delay).await;
    assert_eq!(run.evictions(), [""; 0], "behind a bare pod");
    listed(&[(2, 1, 300), (3, 1, 200)]);
    until("the larger one is asked for", || gone("budget")).await;
    tokio::time::sleep(FAST.max_retry_delay).await;
    assert!(!gone("smaller"), "behind a pod with a budget: {:?}", run.evictions());
    listed(&[(0, 1, 400), (1, 1, 300), (3, 1, 200)]);
    until("the larger one goes", || gone("larger")).await;
    run.end("larger");
    listed(&[(1, 1, 300), (3, 1, 200), (4, 2, 100)]);
    until("one of another node goes", || gone("elsewhere")).await;
    assert!(!gone("smaller"), "{:?}", run.evictions());
}

/// A Burstable pod comes after all `BestEffort` ones, however much memory it uses.
#[tokio::test(flavor = "multi_thread")]
async fn larger_blocked_pod_of_later_class_blocks_smaller() {
    let pods = [pod("smaller", Some("ReplicaSet")), pod("budget", Some("ReplicaSet"))];
    let run = run_at(FAST, SHORT, &[]).await;
    for pod in &pods {
        run.server.put_pod(pod.clone());
    }
    run.server.refuse(Some(("/pods/budget/eviction", StatusCode::TOO_MANY_REQUESTS)));
    let listed = [("smaller", 200), ("budget", 300)].map(|(name, mib)| {
        let id = PodId { namespace: "ns".to_owned(), name: name.to_owned(), uid: format!("uid-{name}") };
        (id, EvictionReason::NodeShort { node: NodeId(1), has: Bytes::mib(mib) })
    });
    *run.listed.lock().unwrap() = listed.to_vec();
    until("the larger pod is asked for some times", || run.count_of("node_short", "blocked") >= 3).await;
    let asked = run.evictions();
    assert!(asked.iter().all(|asked| asked.contains("/pods/budget/")), "{asked:?}");

    run.server.refuse(None);
    until("the pod of the first class goes", || run.count_of("node_short", "evicted") == 1).await;
    let asked = run.evictions();
    let path = |name: &str, query: &str| format!("POST /api/v1/namespaces/ns/pods/{name}/eviction{query}");
    assert_eq!(asked[asked.len() - 2..], [path("budget", "?dryRun=All"), path("smaller", "")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn evicts_unplaced_critical_pod() {
    let mut critical = pod("critical", Some("ReplicaSet"));
    critical["spec"]["priority"] = json!(2_000_000_000);
    let run = run(&[critical]).await;
    until("it goes", || run.count("evicted") == 1).await;
}

const REFUSED: EvictionReason = EvictionReason::Refused { after: Duration::from_millis(200) };

#[tokio::test(flavor = "multi_thread")]
async fn refused_pod_is_evicted_after_delay() {
    // The delay for running pods does not apply.
    let timing = EvictionTiming { unplaced_delay: Duration::from_mins(5), ..FAST };
    let mut running = pod("running", Some("ReplicaSet"));
    running["status"] = json!({"phase": "Pending", "containerStatuses": [
        {"name": "main", "containerID": "containerd://abc"},
        {"name": "side", "state": {"waiting": {"reason": "CreateContainerError"}}},
    ]});
    let mut over = pod("over", Some("ReplicaSet"));
    over["status"] = json!({"phase": "Failed"});
    let mut critical = pod("critical", Some("ReplicaSet"));
    critical["spec"]["priority"] = json!(2_000_000_000);
    let pods = [
        running,
        over,
        pod("daemon", Some("DaemonSet")),
        pod("static", Some("Node")),
        pod("bare", None),
        critical,
        pod("job", Some("Job")),
        pod("a", Some("StatefulSet")),
    ];
    let began = Instant::now();
    let run = run_at(timing, REFUSED, &pods).await;
    until("one goes", || run.count_of("refused", "evicted") == 1).await;
    assert!(began.elapsed() >= Duration::from_millis(200), "{:?}", began.elapsed());
    assert_eq!(run.evictions(), ["POST /api/v1/namespaces/ns/pods/critical/eviction"]);
    let expected = "It has been refused on this node for 200ms. It is evicted, so that the ReplicaSet n1 creates it again.";
    assert_eq!(run.events("critical"), [("NumaRefusalEviction".to_owned(), expected.to_owned())]);
    run.end("critical");
    until("the other goes", || run.count_of("refused", "evicted") == 2).await;
    assert_eq!(run.evictions()[1..], ["POST /api/v1/namespaces/ns/pods/a/eviction"]);
    run.end("a");
    tokio::time::sleep(FAST.pause_after_eviction * 2).await;
    assert_eq!((run.evictions().len(), run.server.events().len()), (2, 2), "the others stay");
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_pod_started_meanwhile() {
    let run = run_at(FAST, REFUSED, &[pod("a", Some("ReplicaSet"))]).await;
    run.server.delay(Duration::from_secs(1));
    until("it is to go", || run.server.requests().iter().any(|asked| asked.contains("/events"))).await;
    run.listed.lock().unwrap().clear();
    until("it has its event", || run.events("a").len() == 1).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(run.evictions(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_right_names_component() {
    for (why, component, value) in [
        (SHORT, "guard-evict", "guardEvict.enabled"),
        (REFUSED, "kubernetes.refused: wait", "evictRefused.enabled"),
    ] {
        let server = FakeApiServer::start().await.unwrap();
        server.refuse(Some(("/eviction", StatusCode::FORBIDDEN)));
        let run = run_on(server, FAST, why, &[pod("a", Some("ReplicaSet"))]).await;
        until("it is said", || !run.reports.lock().unwrap().is_empty()).await;
        let problem = run.reports.lock().unwrap()[0].clone().unwrap_err();
        assert!(problem.contains(component) && problem.contains(value), "{problem}");
    }
}

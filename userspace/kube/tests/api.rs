//! Pods and events against an API server that supports list, watch and create, and fails if a test demands it.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{body::Body, http::StatusCode};
use futures_util::stream;
use numaward_kube::{
    api::{self, ApiMetrics, EventWriter, Pods, StoredPod, fake::FakeApiServer},
    pod::{Notice, PodId, PodSource as _},
};
use numaward_tests_support::{is_alone, peak, reset_peak};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

struct RunningPodWatch {
    server: FakeApiServer,
    pods: Pods,
    metrics: ApiMetrics,
    /// All reports, the newest last.
    reports: Arc<Mutex<Vec<Result<(), String>>>>,
    _stop: DropGuard,
}

/// Starts a run and waits until the first watch is open.
async fn run() -> RunningPodWatch {
    let run = run_with(FakeApiServer::start().await.unwrap()).await;
    run.synced().await;
    run
}

async fn run_with(server: FakeApiServer) -> RunningPodWatch {
    let kubeconfig = server.kubeconfig();
    run_as(server, &kubeconfig).await
}

async fn run_as(server: FakeApiServer, kubeconfig: &str) -> RunningPodWatch {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, kubeconfig).unwrap();
    let client = api::connect(Some(&path)).await.unwrap();
    let metrics = ApiMetrics::default();
    let (writer, queue) = EventWriter::new(metrics.clone());
    let pods = Pods::new(writer);
    let stop = CancellationToken::new();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let report = {
        let reports = reports.clone();
        Arc::new(move |result| reports.lock().unwrap().push(result))
    };
    tokio::spawn(queue.run(client.clone(), "n1".to_owned(), metrics.clone(), stop.clone()));
    tokio::spawn({
        let (pods, metrics, stop) = (pods.clone(), metrics.clone(), stop.clone());
        async move { pods.follow(client, "n1".to_owned(), metrics, report, stop).await }
    });
    RunningPodWatch { server, pods, metrics, reports, _stop: stop.drop_guard() }
}

impl RunningPodWatch {
    async fn wait<T>(&self, what: &str, look: impl Fn(&Self) -> Option<T>) -> T {
        let mut changes = self.pods.changes();
        let until = async {
            loop {
                if let Some(found) = look(self) {
                    return found;
                }
                // The timeout covers changes of which the pods do not notify.
                let _ = tokio::time::timeout(Duration::from_millis(50), changes.changed()).await;
            }
        };
        match tokio::time::timeout(WAIT_TIMEOUT, until).await {
            Ok(found) => found,
            Err(tokio::time::error::Elapsed { .. }) => {
                panic!("{what} did not happen; asked: {:#?}", self.server.requests())
            }
        }
    }

    async fn synced(&self) {
        self.wait("the first list", |run| run.pods.is_synced().then_some(())).await;
    }

    fn by_uid(&self, uid: &str) -> Option<Arc<StoredPod>> {
        self.pods.all().into_iter().find(|stored| stored.pod.id.uid == uid)
    }

    async fn pod(&self, uid: &str) -> Arc<StoredPod> {
        self.wait(uid, |run| run.by_uid(uid)).await
    }

    fn problem(&self) -> Option<String> {
        self.reports.lock().unwrap().last()?.clone().err()
    }

    fn metric(&self, line: &str) -> u64 {
        let mut registry = Registry::default();
        self.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let value =
            text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' ')).map(str::parse);
        value.unwrap_or_else(|| panic!("{line}\n{text}")).unwrap()
    }

    fn count(&self, part: &str) -> usize {
        self.server.requests().iter().filter(|asked| asked.contains(part)).count()
    }
}

fn id(name: &str, uid: &str) -> PodId {
    PodId { namespace: "ns".to_owned(), name: name.to_owned(), uid: uid.to_owned() }
}

/// Returns the mirror of a static pod, as the kubelet of n1 creates it.
fn mirror(name: &str, uid: &str, hash: &str) -> Value {
    let mut mirror = pod(name, uid, "n1");
    mirror["metadata"]["annotations"] =
        json!({"kubernetes.io/config.hash": hash, "kubernetes.io/config.mirror": hash});
    mirror["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node", "controller": true}]);
    mirror
}

fn pod(name: &str, uid: &str, node: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns", "uid": uid}, "spec": {"nodeName": node,
        "containers": [{"name": "main", "resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}}]}})
}

#[tokio::test]
async fn trims_token_file() {
    let server = FakeApiServer::start().await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret\n").unwrap();
    let with_file = format!("tokenFile: \"{}\"", file.path().display());
    let kubeconfig = server.kubeconfig().replace("token: secret", &with_file);
    assert!(kubeconfig.contains(&with_file), "{kubeconfig}");
    run_as(server, &kubeconfig).await.synced().await;

    let server = FakeApiServer::start().await.unwrap();
    let kubeconfig = server.kubeconfig().replace("token: secret", "token: another");
    let run = run_as(server, &kubeconfig).await;
    let problem = run.wait("a refusal", RunningPodWatch::problem).await;
    assert!(problem.contains("the token or certificate is not valid"), "{problem}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rereads_replaced_token() {
    let server = FakeApiServer::start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let kubeconfig =
        server.kubeconfig().replace("token: secret", &format!("tokenFile: \"{}\"", file.display()));
    let run = run_as(server, &kubeconfig).await;
    let problem = run.wait("a missing file", RunningPodWatch::problem).await;
    assert!(problem.contains("No such file") && problem.contains("/token"), "{problem}");
    for (text, words) in [("\n", "it is empty"), ("first\n", "401")] {
        std::fs::write(&file, text).unwrap();
        run.wait(words, |run| run.problem()?.contains(words).then_some(())).await;
    }
    assert!(run.metric("kubernetes_api_errors_total{operation=\"list_pods\",reason=\"unauthorized\"}") >= 3);
    std::fs::write(&file, "secret\n").unwrap();
    run.synced().await;

    // While the file has no valid token, the previous one is used.
    std::fs::write(&file, "two\ntokens").unwrap();
    let watches = run.count("watch=true");
    run.server.hang_up();
    run.wait("another watch", |run| (run.count("watch=true") > watches).then_some(())).await;
    run.server.put_pod(pod("a", "1", "n1"));
    run.pod("1").await;
    assert_eq!(run.problem(), None);
}

#[tokio::test]
async fn inline_token_overrides_token_file() {
    let server = FakeApiServer::start().await.unwrap();
    let kubeconfig = server.kubeconfig().replace("token: secret", "token: secret, tokenFile: /nowhere/token");
    let run = run_as(server, &kubeconfig).await;
    run.wait("a first report", |run| run.reports.lock().unwrap().first().cloned()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn follows_pod_changes() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_pod(pod("a", "1", "n1"));
    server.put_pod(pod("elsewhere", "2", "n2"));
    let run = run_with(server).await;
    run.synced().await;
    assert_eq!(run.pods.all().len(), 1, "only the pods of this Kubernetes node");
    assert!(run.pods.get(&id("a", "1")).is_some());

    run.server.put_pod(pod("b", "3", "n1"));
    let b = run.pod("3").await;
    assert!(b.container_ids.is_empty() && !b.is_running);
    let mut started = pod("b", "3", "n1");
    started["status"] = json!({"phase": "Running",
        "containerStatuses": [{"name": "main", "containerID": "containerd://c1"}]});
    run.server.put_pod(started);
    run.wait("the container's id", |run| run.by_uid("3")?.container_ids.get("c1").cloned()).await;
    run.server.delete_pod("ns", "b");
    run.wait("the end of b", |run| run.by_uid("3").is_none().then_some(())).await;
    assert_eq!(run.metric("kubernetes_pods"), 1);
    assert_eq!(run.count("GET /api/v1/pods?&"), 2, "one list, one watch: {:?}", run.server.requests());
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_cannot_claim_foreign_uids() {
    let server = FakeApiServer::start().await.unwrap();
    let mut author = pod("a", "1", "n1");
    author["metadata"]["annotations"] = json!({"kubernetes.io/config.hash": "2"});
    server.put_pod(author);
    // All fields of a mirror pod can be written by a user with the right to create pods.
    server.put_pod(mirror("forged", "3", "2"));
    server.put_pod(pod("victim", "2", "n1"));
    server.put_pod(mirror("static", "4", "hash"));
    server.put_pod(mirror("in-doubt", "5", "claimed twice"));
    server.put_pod(mirror("forged-too", "6", "claimed twice"));
    let run = run_with(server).await;
    run.synced().await;
    let name = |id: &PodId| run.pods.pod(id).map(|pod| pod.id.name.clone());
    for id in [id("a", "1"), id("victim", "2"), id("static", "hash"), id("in-doubt", "claimed twice")] {
        assert_eq!(name(&id), Some(id.name.clone()));
    }
    // A UID is only found together with its name.
    for id in [id("a", "2"), id("victim", "1"), id("static", "4"), id("victim", "hash")] {
        assert_eq!(name(&id), None, "{id:?}");
    }
    assert_eq!(run.by_uid("2").unwrap().pod.id.name, "victim");
    assert!(run.by_uid("claimed twice").is_none(), "two mirror pods claim the UID");
    assert_eq!(run.pods.all().len(), 3, "forged mirror pods are not included");
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_in_pages() {
    let server = FakeApiServer::start().await.unwrap();
    for number in 0..600 {
        server.put_pod(pod(&format!("p{number}"), &number.to_string(), "n1"));
    }
    let run = run_with(server).await;
    run.synced().await;
    assert_eq!(run.pods.all().len(), 600);
    assert_eq!(run.count("continue="), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_pods_take_few_requests() {
    let server = FakeApiServer::start().await.unwrap();
    for number in 0..120 {
        let mut pod = pod(&format!("p{number}"), &number.to_string(), "n1");
        if number % 10 == 0 {
            pod["metadata"]["annotations"] = json!({"text": "\u{1}".repeat(1_500_000)});
        }
        server.put_pod(pod);
    }
    let run = run_with(server).await;
    run.synced().await;
    assert_eq!(run.pods.all().len(), 120);
    assert_eq!((run.count("limit=100"), run.count("limit=")), (2, 2), "{:?}", run.server.requests());
    assert_eq!(run.metric("kubernetes_pods_ignored_total"), 0);
}

/// Returns a list of pods, which is written while it is sent.
fn list_body<T: Iterator<Item = String> + Send + 'static>(pods: usize, pod: fn(usize) -> T) -> Body {
    let start = r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":["#;
    let pods = (0..pods).flat_map(move |number| {
        let comma = if number == 0 { "" } else { "," };
        [comma.to_owned()].into_iter().chain(pod(number))
    });
    let pieces = [start.to_owned()].into_iter().chain(pods).chain(["]}".to_owned()]);
    Body::from_stream(stream::iter(pieces.map(Ok::<_, std::convert::Infallible>)))
}

/// Lists the pods of this body, and fails if that takes too much memory.
async fn listing_takes_little_memory(pods: usize, body: fn() -> Body) {
    const CEILING: u64 = 48 << 20;
    if !is_alone() {
        return;
    }
    let server = FakeApiServer::start().await.unwrap();
    server.answer_with("limit=", Some(body));
    reset_peak();
    let before = peak();
    let run = run_with(server).await;
    run.synced().await;
    let most = peak();
    assert_eq!((run.pods.all().len(), run.count("limit=")), (pods, 1));
    assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
}

/// Any tenant can create pods with as many entries of a list.
#[tokio::test(flavor = "multi_thread")]
async fn pods_with_long_lists_take_little_memory() {
    const PODS: usize = 10;
    const ENTRIES: usize = 600_000;
    fn pod(number: usize) -> impl Iterator<Item = String> {
        let start = format!(
            r#"{{"metadata":{{"name":"p{number}","namespace":"ns","uid":"{number}","resourceVersion":"7",
            "managedFields":[{{"fieldsType":"FieldsV1","fieldsV1":{{"f:spec":{{"f:volumes":{{"#
        );
        let fields = (0..10_000).map(|field| format!(r#""k:{{\"name\":\"v{field}\"}}":{{".":{{}}}},"#));
        let spec = r#"".":{}}}}}]},"spec":{"nodeName":"n1","containers":[{"name":"main"}],
            "securityContext":{"supplementalGroups":[0"#;
        let groups = (0..ENTRIES / 1000).map(|_| ",0".repeat(1000));
        [start].into_iter().chain(fields).chain([spec.to_owned()]).chain(groups).chain(["]}}}".to_owned()])
    }
    listing_takes_little_memory(PODS, || list_body(PODS, pod)).await;
}

/// Each control character of a pod has six bytes as JSON.
#[tokio::test(flavor = "multi_thread")]
async fn large_pods_take_little_memory() {
    const PODS: usize = 20;
    const CHARACTERS: usize = 1_500_000;
    fn pod(number: usize) -> impl Iterator<Item = String> {
        let start = format!(
            r#"{{"metadata":{{"name":"p{number}","namespace":"ns","uid":"{number}","annotations":{{"text":""#
        );
        let text = (0..CHARACTERS / 1000).map(|_| r"\u0001".repeat(1000));
        let end = r#""}},"spec":{"nodeName":"n1","containers":[{"name":"main"}]}}"#;
        [start].into_iter().chain(text).chain([end.to_owned()])
    }
    listing_takes_little_memory(PODS, || list_body(PODS, pod)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_watch_resumes_at_version() {
    let run = run().await;
    run.server.put_pod(pod("a", "1", "n1"));
    run.pod("1").await;
    run.server.bookmark();
    run.server.hang_up();
    run.server.put_pod(pod("b", "2", "n1"));
    run.pod("2").await;
    assert_eq!(run.count("limit="), 1, "no second list: {:?}", run.server.requests());
    assert!(run.by_uid("1").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_rate_of_watches() {
    let run = run().await;
    for _ in 0..200 {
        run.server.hang_up();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let watches = run.count("watch=true");
    assert!((2..=20).contains(&watches), "{watches}");
    assert!(run.pods.is_synced() && run.problem().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_number_of_pods() {
    const MAX_PODS: usize = 4096;
    let server = FakeApiServer::start().await.unwrap();
    for number in 0..=MAX_PODS {
        server.put_pod(pod(&format!("p{number:04}"), &number.to_string(), "n1"));
    }
    let run = run_with(server).await;
    run.synced().await;
    assert_eq!((run.pods.all().len(), run.metric("kubernetes_pods_ignored_total")), (MAX_PODS, 1));
    run.server.put_pod(pod("one more", "one more", "n1"));
    let mut known = pod("p0000", "0", "n1");
    known["status"] = json!({"phase": "Running"});
    run.server.put_pod(known);
    run.wait("a change", |run| run.by_uid("0")?.is_running.then_some(())).await;
    assert_eq!((run.pods.all().len(), run.metric("kubernetes_pods_ignored_total")), (MAX_PODS, 2));
    run.server.delete_pod("ns", "one more");
    run.server.delete_pod("ns", "p0001");
    run.server.put_pod(pod("now", "now", "n1"));
    run.pod("now").await;
    assert_eq!(run.metric("kubernetes_pods_ignored_total"), 2, "the end of a pod is not ignored");
}

/// 410 in the stream, and as the answer to the request.
#[tokio::test(flavor = "multi_thread")]
async fn lists_again_if_version_is_gone() {
    let run = run().await;
    run.server.put_pod(pod("a", "1", "n1"));
    run.pod("1").await;
    run.server.put_pod(pod("old", "2", "n2"));
    run.server.compact();
    // No watch reports the deletion.
    run.server.refuse(Some(("watch=true", StatusCode::SERVICE_UNAVAILABLE)));
    run.server.hang_up();
    run.server.delete_pod("ns", "a");
    run.server.compact();
    run.server.refuse(None);
    run.wait("the new list", |run| run.by_uid("1").is_none().then_some(())).await;
    let lists = run.count("limit=");
    assert!(lists >= 2, "{:?}", run.server.requests());
    assert_eq!(run.metric("kubernetes_api_errors_total{operation=\"watch_pods\",reason=\"gone\"}"), 1);

    // A reported change shows that the new watch is open.
    run.server.put_pod(pod("b", "3", "n1"));
    run.pod("3").await;
    run.server.refuse_next("watch=true", StatusCode::GONE);
    run.server.hang_up();
    run.wait("one more list", |run| (run.count("limit=") > lists).then_some(())).await;
    run.synced().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_keeps_known_pods() {
    for (status, reason, words) in [
        (StatusCode::UNAUTHORIZED, "unauthorized", "the token or certificate is not valid"),
        (StatusCode::FORBIDDEN, "forbidden", "give the service account this right"),
        (StatusCode::SERVICE_UNAVAILABLE, "server_error", "503"),
        (StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "429"),
    ] {
        let run = run().await;
        run.server.put_pod(pod("a", "1", "n1"));
        run.pod("1").await;
        run.server.refuse(Some(("pods", status)));
        run.server.hang_up();
        let problem = run.wait("the problem", RunningPodWatch::problem).await;
        assert!(problem.contains(words) && problem.contains("refused by the test"), "{problem}");
        assert!(!run.pods.is_synced() && run.by_uid("1").is_some());
        let counted = format!("kubernetes_api_errors_total{{operation=\"watch_pods\",reason=\"{reason}\"}}");
        assert!(run.metric(&counted) >= 1, "{counted}");
        run.server.refuse(None);
        run.synced().await;
        run.wait("the problem's end", |run| run.problem().is_none().then_some(())).await;
        assert_eq!(run.metric("kubernetes_pods_synced"), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_list_is_reported() {
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("pods", StatusCode::FORBIDDEN)));
    let run = run_with(server).await;
    let problem = run.wait("the problem", RunningPodWatch::problem).await;
    assert!(problem.contains("pods cannot be read from the API server: 403"), "{problem}");
    assert!(!run.pods.is_synced());
    assert!(run.metric("kubernetes_api_errors_total{operation=\"list_pods\",reason=\"forbidden\"}") >= 1);
}

/// Time is simulated: it advances while all tasks are idle.
#[tokio::test(start_paused = true)]
async fn retry_delays_grow() {
    for part in ["limit=", "watch=true"] {
        let server = FakeApiServer::start().await.unwrap();
        server.refuse(Some((part, StatusCode::SERVICE_UNAVAILABLE)));
        let run = run_with(server).await;
        tokio::time::sleep(Duration::from_mins(10)).await;
        let requests = run.count(part);
        assert!((10..35).contains(&requests), "{part}: {requests}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recovers_from_server_error() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_pod(pod("a", "1", "n1"));
    let run = run_with(server).await;
    run.synced().await;
    run.server.send_error(StatusCode::INTERNAL_SERVER_ERROR);
    run.wait("the error", |run| {
        let errors =
            run.metric("kubernetes_api_errors_total{operation=\"watch_pods\",reason=\"server_error\"}");
        (errors >= 1).then_some(())
    })
    .await;
    // Changes after the error are reported.
    run.server.put_pod(pod("b", "2", "n1"));
    run.pod("2").await;
    run.synced().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_server_is_no_failure() {
    let server = FakeApiServer::start().await.unwrap();
    server.delay(Duration::from_millis(700));
    server.put_pod(pod("a", "1", "n1"));
    let run = run_with(server).await;
    run.synced().await;
    assert!(run.by_uid("1").is_some() && run.problem().is_none());
}

#[tokio::test(start_paused = true)]
async fn silent_server_times_out() {
    let server = FakeApiServer::start().await.unwrap();
    server.delay(Duration::from_secs(100_000));
    let run = run_with(server).await;
    let problem = run.wait("the timeout", RunningPodWatch::problem).await;
    assert!(problem.contains("no answer within 30s"), "{problem}");
    assert!(run.metric("kubernetes_api_errors_total{operation=\"list_pods\",reason=\"timeout\"}") >= 1);
}

#[tokio::test(start_paused = true)]
async fn endless_answer_times_out() {
    let server = FakeApiServer::start().await.unwrap();
    server.answer_with("", Some(|| Body::from_stream(stream::pending::<Result<&str, std::io::Error>>())));
    let run = run_with(server).await;
    let problem = run.wait("the timeout", RunningPodWatch::problem).await;
    assert!(problem.contains("no answer within 30s"), "{problem}");
    run.wait("a smaller page", |run| (run.count("limit=50") > 0).then_some(())).await;

    let pod = id("a", "1");
    let (reason, message) = ("Reason".to_owned(), "message".to_owned());
    run.pods.notify(Notice { pod, reason, message, is_warning: true });
    run.wait("the timeout", |run| {
        let errors = run.metric("kubernetes_api_errors_total{operation=\"create_event\",reason=\"timeout\"}");
        (errors == 1).then_some(())
    })
    .await;
}

/// An interrupted list begins without an error.
#[tokio::test(flavor = "multi_thread")]
async fn synced_only_with_open_watch() {
    let run = run().await;
    run.server.put_pod(pod("a", "1", "n1"));
    run.pod("1").await;
    run.server.answer_with("limit=", Some(|| Body::from("{")));
    run.server.refuse_next("watch=true", StatusCode::GONE);
    run.server.hang_up();
    run.wait("lists that break off", |run| {
        let errors = run.metric("kubernetes_api_errors_total{operation=\"list_pods\",reason=\"malformed\"}");
        (errors >= 2).then_some(())
    })
    .await;
    let reports = run.reports.lock().unwrap().clone();
    assert!(reports.iter().skip_while(|report| report.is_ok()).all(Result::is_err), "{reports:#?}");
    assert!(!run.pods.is_synced() && run.by_uid("1").is_some());
    run.server.answer_with("", None);
    run.wait("the problem's end", |run| run.problem().is_none().then_some(())).await;
    assert!(run.pods.is_synced());
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_pod_is_ignored() {
    let server = FakeApiServer::start().await.unwrap();
    let odd = |uid: &str| {
        let mut pod = pod(&format!("odd{uid}"), uid, "n1");
        pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("many");
        pod
    };
    server.put_pod(odd("1"));
    server.put_pod(pod("good", "2", "n1"));
    let run = run_with(server).await;
    run.pod("2").await;
    run.server.put_pod(odd("3"));
    run.server.put_pod(pod("better", "4", "n1"));
    run.pod("4").await;
    assert!(run.by_uid("1").is_none() && run.by_uid("3").is_none());
    assert_eq!(run.metric("kubernetes_pods_ignored_total"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn survives_garbage_in_watch() {
    let run = run().await;
    let endless = "x".repeat(17 << 20);
    for (number, (garbage, reason)) in
        [("not JSON\n", "malformed"), (&endless, "too_large")].into_iter().enumerate()
    {
        run.synced().await;
        run.server.send_garbage(garbage.to_owned());
        let errors = format!("kubernetes_api_errors_total{{operation=\"watch_pods\",reason=\"{reason}\"}}");
        run.wait("the error", |run| (run.metric(&errors) >= 1).then_some(())).await;
        let uid = number.to_string();
        run.server.put_pod(pod(&uid, &uid, "n1"));
        run.pod(&uid).await;
    }
    run.synced().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notice_becomes_event() {
    let run = run().await;
    run.server.put_pod(mirror("static", "api-uid", "hash"));
    let stored = run.pod("hash").await;
    let notice = Notice {
        pod: stored.pod.id.clone(),
        reason: "PlacementRefused".to_owned(),
        message: "node 0: cpu requested 8, free 2".to_owned(),
        is_warning: true,
    };
    run.pods.notify(notice.clone());
    let event = run.wait("the event", |run| run.server.events().pop()).await;
    assert_eq!(event["regarding"]["uid"], "api-uid");
    assert_eq!(event["metadata"]["namespace"], "ns");
    assert!(event["metadata"]["name"].as_str().unwrap().starts_with("static."), "{event}");
    assert_eq!(
        (event["type"].as_str(), event["reason"].as_str(), event["note"].as_str()),
        (Some("Warning"), Some("PlacementRefused"), Some(notice.message.as_str()))
    );
    assert_eq!(
        (event["reportingInstance"].as_str(), event["regarding"]["kind"].as_str()),
        (Some("n1"), Some("Pod"))
    );

    // An equal notice increases the event's count. A refused event is counted, and created with the next equal notice.
    run.pods.notify(notice.clone());
    run.wait("the count", |run| (run.server.events()[0]["series"]["count"] == 2).then_some(())).await;
    run.server.refuse_next("events", StatusCode::FORBIDDEN);
    let other = Notice { message: "other".to_owned(), ..notice };
    run.pods.notify(other.clone());
    run.wait("the refusal", |run| {
        let errors =
            run.metric("kubernetes_api_errors_total{operation=\"create_event\",reason=\"forbidden\"}");
        (errors == 1).then_some(())
    })
    .await;
    run.pods.notify(other);
    run.wait("the second event", |run| (run.server.events().len() == 2).then_some(())).await;
    assert_eq!(
        (run.metric("kubernetes_events_total"), run.metric("kubernetes_events_dropped_total")),
        (3, 1)
    );
}

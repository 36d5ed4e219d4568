//! Tests of all routes in one process: formats, errors, limits. The host is a directory, and no probe is attached.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "http/reference.rs"]
mod reference;

use std::{fs, future::poll_fn, io::Read as _, path::Path, pin::Pin, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, header},
};
use flate2::read::GzDecoder;
use http_body::Body as _;
use numaward_api::{self as api, Problem, problem::CONTENT_TYPE as PROBLEM_CONTENT_TYPE};
use numaward_config::Config;
use numaward_daemon::allocations::{self, router};
use numaward_http::{App, HostNames, MAX_BODY_BYTES, open_api};
use numaward_model::{
    EventReport,
    health::{Heartbeats, Latch, Readiness},
};
use numaward_observe::{Observer, events::Events};
use numaward_telemetry::metrics::Metrics;
use numaward_tests_support::assert_golden;
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::Value;
use tokio::time::timeout;
use tower::ServiceExt;

const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct HttpDaemon {
    app: Arc<App>,
    router: Router,
    /// The latch that a test releases when the daemon has to be ready.
    latch: Latch,
    heartbeats: Heartbeats,
    events: Events,
    root: tempfile::TempDir,
}

/// A host with two nodes, the second without CPUs.
fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/cpu/online", "0-1\n");
    write("sys/devices/system/node/online", "0-1\n");
    for (node, cpus, distance) in [(0, "0-1\n", "10 20\n"), (1, "\n", "20 10\n")] {
        let path = format!("sys/devices/system/node/node{node}");
        write(&format!("{path}/cpulist"), cpus);
        write(&format!("{path}/distance"), distance);
        let meminfo = format!("Node {node} MemTotal:  1048576 kB\nNode {node} MemFree:  524288 kB\n");
        write(&format!("{path}/meminfo"), &meminfo);
        for (file, pages) in [("nr_hugepages", 4), ("free_hugepages", 3), ("surplus_hugepages", 0)] {
            write(&format!("{path}/hugepages/hugepages-2048kB/{file}"), &format!("{pages}\n"));
        }
    }
    dir
}

fn daemon_on(root: tempfile::TempDir) -> HttpDaemon {
    let mut config = Config { host_root: root.path().to_owned(), ..Config::default() };
    config.probes = config.probes.all_off();
    let observer = Arc::new(Observer::new(&config));
    let metrics = Arc::new(Metrics::new(observer.clone()));
    let events = observer.events().clone();
    let mut readiness = Readiness::default();
    let latch = readiness.latch("cgroups");
    let heartbeats = Heartbeats::default();
    let app = App::new(&observer, &metrics, &readiness, &heartbeats, allocations::open_api());
    HttpDaemon {
        router: router(app.clone(), None, None, HostNames::new(&[])),
        app,
        latch,
        heartbeats,
        events,
        root,
    }
}

fn daemon() -> HttpDaemon {
    daemon_on(host())
}

impl HttpDaemon {
    async fn ask(&self, request: Request<Body>) -> (StatusCode, HeaderMap, String) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn get(&self, path: &str, accept: Option<&str>) -> (StatusCode, HeaderMap, String) {
        let mut request = Request::get(path);
        if let Some(accept) = accept {
            request = request.header(header::ACCEPT, accept);
        }
        self.ask(request.body(Body::empty()).unwrap()).await
    }

    async fn json<T: serde::de::DeserializeOwned>(&self, path: &str) -> T {
        let (status, headers, body) = self.get(path, Some("application/json")).await;
        assert_eq!(status, StatusCode::OK, "{path}: {body}");
        assert_eq!(headers[header::CONTENT_TYPE], "application/json");
        serde_json::from_str(&body).unwrap()
    }

    async fn problem(&self, request: Request<Body>) -> (Problem, HeaderMap) {
        let uri = request.uri().clone();
        let (status, headers, body) = self.ask(request).await;
        assert_eq!(headers[header::CONTENT_TYPE], PROBLEM_CONTENT_TYPE, "{uri}: {body}");
        let problem: Problem = serde_json::from_str(&body).unwrap();
        assert_eq!(problem.status, status.as_u16());
        assert_eq!(problem.instance, uri.path());
        assert!(!problem.detail.is_empty() && !problem.title.is_empty());
        (problem, headers)
    }
}

#[tokio::test]
async fn serves_requested_metrics_format() {
    let daemon = daemon();
    for (accept, expected) in [
        (None, PROMETHEUS),
        (Some("*/*"), PROMETHEUS),
        (Some("text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), PROMETHEUS),
        (Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"), OPEN_METRICS),
        (Some("application/openmetrics-text;q=0.2,text/plain;q=0.5"), PROMETHEUS),
    ] {
        let (status, headers, body) = daemon.get("/metrics", accept).await;
        assert_eq!((status, headers[header::CONTENT_TYPE].to_str().unwrap()), (StatusCode::OK, expected));
        assert_eq!(body.ends_with("# EOF\n"), expected == OPEN_METRICS, "{accept:?}");
        let node = "numaward_node_memory_bytes{numa_node=\"1\",kind=";
        assert!(
            body.contains(&format!("{node}\"memory\",state=\"total\"}} {}\n", (1024 - 8) << 20)),
            "{body}"
        );
        let unused = "numaward_node_memory_unused_bytes{numa_node=\"1\",kind=";
        assert!(body.contains(&format!("{unused}\"memory\"}} {}\n", 512 << 20)), "{body}");
        assert!(body.contains(&format!("{unused}\"hugepages-2Mi\"}} {}\n", 6 << 20)), "{body}");
        let probe = "numaward_probe_info{probe=\"alloc\",mode=\"absent\",reason=\"switched_off\"} 1";
        assert!(body.contains(probe), "{body}");
        // A value that is not counted is absent, not zero.
        assert!(!body.contains("numaward_memory_allocated_bytes_total{"), "{body}");
    }
}

#[tokio::test]
async fn compresses_metrics_with_gzip() {
    let daemon = daemon();
    let mut bodies = Vec::new();
    for (encoding, is_compressed) in [
        (None, false),
        (Some("gzip"), true),
        (Some("br, deflate, gzip;q=0.1"), true),
        (Some("br, gzip;q=0"), false),
    ] {
        let mut request = Request::get("/metrics");
        if let Some(encoding) = encoding {
            request = request.header(header::ACCEPT_ENCODING, encoding);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = daemon.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let (head, body) = response.into_parts();
        let encoded = head.headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap());
        assert_eq!(encoded, is_compressed.then_some("gzip"), "{encoding:?}");
        assert_eq!(head.headers[header::CONTENT_TYPE], PROMETHEUS);
        let vary: Vec<_> =
            head.headers.get_all(header::VARY).iter().map(|value| value.to_str().unwrap()).collect();
        assert_eq!(vary, ["accept", "accept-encoding"]);
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let mut text = String::new();
        if is_compressed {
            GzDecoder::new(&*body).read_to_string(&mut text).unwrap();
            assert!(body.len() * 2 < text.len(), "{} of {}", body.len(), text.len());
        } else {
            text = String::from_utf8(body.into()).unwrap();
        }
        // The values may differ from one scrape to the next.
        bodies.push(text.lines().map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect::<Vec<_>>());
    }
    assert!(bodies[0].len() > 100 && bodies.iter().all(|body| *body == bodies[0]));

    // Errors are not compressed.
    for (path, accept, encoding, status, detail) in [
        ("/metrics?x=y", "*/*", "gzip", StatusCode::BAD_REQUEST, "unknown parameter \"x=y\""),
        ("/metrics", "application/json", "gzip", StatusCode::NOT_ACCEPTABLE, "the header Accept takes none"),
        (
            "/metrics",
            "*/*",
            "br, *;q=0",
            StatusCode::NOT_ACCEPTABLE,
            "the header Accept-Encoding accepts neither",
        ),
    ] {
        let request =
            Request::get(path).header(header::ACCEPT, accept).header(header::ACCEPT_ENCODING, encoding);
        let (problem, headers) = daemon.problem(request.body(Body::empty()).unwrap()).await;
        assert_eq!(problem.status, status.as_u16());
        assert!(problem.detail.starts_with(detail), "{}", problem.detail);
        assert!(!headers.contains_key(header::CONTENT_ENCODING));
    }
}

#[tokio::test]
async fn refuses_unknown_format() {
    let daemon = daemon();
    for (path, accept) in [
        ("/metrics", "application/json"),
        ("/metrics", "application/openmetrics-text;version=2.0.0"),
        ("/livez", "application/json"),
        ("/readyz", "image/png"),
        ("/api/v1/topology", "text/html"),
        ("/api/v1/nodes", "text/html"),
        ("/api/v1/workloads", "text/html"),
        ("/api/v1/status", "text/html"),
        ("/api/v1/version", "text/html"),
        ("/openapi.json", "text/html;q=0.9, application/json;q=0"),
    ] {
        let request = Request::get(path).header(header::ACCEPT, accept).body(Body::empty()).unwrap();
        let (problem, _) = daemon.problem(request).await;
        assert_eq!(problem.status, 406, "{path} {accept}");
        assert!(problem.detail.contains("Accept"), "{problem:?}");
    }
}

#[tokio::test]
async fn is_ready_when_all_parts_are() {
    let daemon = daemon();
    let (problem, _) = daemon.problem(Request::get("/readyz").body(Body::empty()).unwrap()).await;
    assert_eq!((problem.status, problem.detail.as_str()), (503, "not ready yet: cgroups"));
    assert_eq!(daemon.get("/livez", None).await.0, StatusCode::OK);

    let HttpDaemon { router, latch, root: _root, .. } = daemon;
    latch.release();
    let get = |path: &str| router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap());
    for (path, expected) in
        [("/readyz", "ok\n"), ("/readyz?verbose", "[+] cgroups\nok\n"), ("/livez", "ok\n")]
    {
        let response = get(path).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        assert_eq!(to_bytes(response.into_body(), 1000).await.unwrap(), expected, "{path}");
    }
}

#[tokio::test]
async fn livez_names_hanging_thread() {
    let daemon = daemon();
    daemon.heartbeats.register("beats", Duration::from_mins(1));
    assert_eq!(daemon.get("/livez", None).await.0, StatusCode::OK);
    daemon.heartbeats.register("hangs", Duration::ZERO);
    let (problem, _) = daemon.problem(Request::get("/livez").body(Body::empty()).unwrap()).await;
    let expected = "the thread hangs has not responded for 0 s; 0 s is its limit";
    assert_eq!((problem.status, problem.detail.as_str()), (503, expected));
}

#[tokio::test]
async fn serves_machine_and_nodes() {
    let daemon = daemon();
    let topology: api::Topology = daemon.json("/api/v1/topology").await;
    let nodes: Vec<_> = topology.nodes.iter().map(|n| (n.node, n.cpus.as_str(), n.memory_only)).collect();
    assert_eq!(nodes, [(0, "0-1", false), (1, "", true)]);
    assert_eq!(topology.nodes[0].distances, [(0, 10), (1, 20)].into());
    assert_eq!(topology.nodes[1].hugepages[0].total_pages, 4);

    let nodes: api::Nodes = daemon.json("/api/v1/nodes").await;
    let memory: Vec<_> =
        nodes.nodes[1].memory.iter().map(|m| (m.kind.as_str(), m.total_bytes, m.free_bytes)).collect();
    assert_eq!(
        memory,
        [("hugepages-2Mi", 8 << 20, Some(6 << 20)), ("memory", (1024 - 8) << 20, Some(512 << 20))]
    );
    assert_eq!(nodes.nodes[1].allocated, None, "no probe counts");

    let workloads: api::Workloads = daemon.json("/api/v1/workloads").await;
    assert_eq!(workloads.workloads, []);
    let version: api::Version = daemon.json("/api/v1/version").await;
    assert_eq!(version.version, numaward_api::VERSION);
    let status: api::Status = daemon.json("/api/v1/status").await;
    assert_eq!(status.probes[0].mode, "absent");
    assert_eq!(status.degraded, []);
    assert!(!status.host.is_empty());
    let history: api::History = daemon.json("/api/v1/history").await;
    assert_eq!((history.kept, history.recent.step_seconds, history.hour.step_seconds), (0, 5, 60));
    let trends: api::Trends = daemon.json("/api/v1/history/workloads").await;
    assert_eq!(trends.workloads, []);
    let request = Request::get("/api/v1/workloads/%2Fa.slice%2Fb/history").body(Body::empty()).unwrap();
    let (problem, _) = daemon.problem(request).await;
    assert!(problem.status == 404 && problem.detail.contains("\"/a.slice/b\""), "{problem:?}");
}

#[tokio::test]
async fn reports_and_serves_broken_host() {
    for (break_it, words) in [
        ((|path| fs::remove_dir_all(path)) as fn(&Path) -> std::io::Result<()>, "cannot"),
        (|path| fs::write(path.join("devices/system/node/node1/meminfo"), "junk\n"), "node1/meminfo"),
        (|path| fs::write(path.join("devices/system/cpu/online"), "x\n"), "cpu/online"),
    ] {
        let root = host();
        break_it(&root.path().join("sys")).unwrap();
        let daemon = daemon_on(root);
        let status: api::Status = daemon.json("/api/v1/status").await;
        assert_eq!(status.degraded[0].part, "topology", "{status:?}");
        assert!(status.degraded[0].reason.contains(words), "{words}: {status:?}");
        let (status, _, body) = daemon.get("/metrics", None).await;
        assert_eq!(status, StatusCode::OK);
        assert!(body.contains("numaward_degraded{part=\"topology\"} 1\n"), "{body}");
    }
}

#[tokio::test]
async fn unreadable_node_degrades_and_recovers() {
    let daemon = daemon();
    let meminfo = daemon.root.path().join("sys/devices/system/node/node1/meminfo");
    let good = fs::read(&meminfo).unwrap();
    fs::remove_file(&meminfo).unwrap();
    let (_, _, body) = daemon.get("/metrics", None).await;
    assert!(body.contains("numaward_degraded{part=\"node_memory\"} 1\n"), "{body}");
    assert!(body.contains("numaward_node_memory_bytes{numa_node=\"0\""), "{body}");
    assert!(!body.contains("numaward_node_memory_bytes{numa_node=\"1\""), "{body}");
    fs::write(&meminfo, good).unwrap();
    let (_, _, body) = daemon.get("/metrics", None).await;
    assert!(body.contains("numaward_degraded{part=\"node_memory\"} 0\n"), "{body}");
    assert!(body.contains("numaward_node_memory_bytes{numa_node=\"1\""), "{body}");
}

#[tokio::test]
async fn errors_are_problem_details() {
    let daemon = daemon();
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();

    for path in ["/nope", "/api/v1", "/metrics/", "//metrics"] {
        let (problem, _) = daemon.problem(get(path)).await;
        assert_eq!((problem.status, problem.title.as_str()), (404, "Not Found"));
        assert!(problem.detail.contains(path), "{problem:?}");
    }
    for (path, words) in [
        ("/metrics?collect=x", "\"collect=x\""),
        ("/api/v1/workloads?limit=1", "takes none"),
        ("/readyz?exclude=cgroups", "takes verbose alone"),
        ("/api/v1/status?%ff", "\"%ff\""),
    ] {
        let (problem, _) = daemon.problem(get(path)).await;
        assert_eq!(problem.status, 400, "{path}");
        assert!(problem.detail.contains(words), "{problem:?}");
    }
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        let request = Request::builder().method(method).uri("/metrics").body(Body::empty()).unwrap();
        let (problem, headers) = daemon.problem(request).await;
        assert_eq!((problem.status, headers[header::ALLOW].to_str().unwrap()), (405, "GET,HEAD"));
        assert!(problem.detail.contains(method), "{problem:?}");
    }
}

#[tokio::test]
async fn refuses_too_large_body() {
    let daemon = daemon();
    let request = |size: usize| {
        let body = Body::from(vec![b'x'; size]);
        Request::get("/livez").header(header::CONTENT_LENGTH, size).body(body).unwrap()
    };
    let (problem, _) = daemon.problem(request(MAX_BODY_BYTES + 1)).await;
    assert_eq!(problem.status, 413);
    assert!(problem.detail.contains(&MAX_BODY_BYTES.to_string()), "{problem:?}");
    assert_eq!(daemon.ask(request(MAX_BODY_BYTES)).await.0, StatusCode::OK);
}

#[tokio::test]
async fn head_has_no_body() {
    let daemon = daemon();
    let (status, headers, body) = daemon.ask(Request::head("/metrics").body(Body::empty()).unwrap()).await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, ""));
    assert_eq!(headers[header::CONTENT_TYPE], PROMETHEUS);
}

/// Files that hang delay requests that read files, and no other request.
#[tokio::test(flavor = "multi_thread")]
async fn hanging_file_delays_its_route_only() {
    let mut daemon = daemon();
    let held = Arc::new(api::Allocations::default());
    daemon.router =
        router(daemon.app.clone(), Some(Arc::new(move || held.clone())), None, HostNames::new(&[]));
    let file = daemon.root.path().join("sys/devices/system/node/node0/meminfo");
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    mkfifoat(CWD, &file, Mode::RUSR | Mode::WUSR).unwrap();
    let get = |path| daemon.router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap());
    let hanging: Vec<_> = (0..8).map(|_| tokio::spawn(get("/api/v1/nodes"))).collect();
    let answers = tokio::join!(
        timeout(Duration::from_secs(10), get("/api/v1/status")),
        timeout(Duration::from_secs(10), get("/api/v1/workloads")),
        timeout(Duration::from_secs(10), get("/api/v1/allocations")),
        timeout(Duration::from_secs(10), get("/api/v1/events")),
    );
    let is_hanging = !hanging.iter().any(tokio::task::JoinHandle::is_finished);
    // Ends the hanging read. The next one, which the other requests share, reads the file.
    let fifo = fs::File::options().write(true).open(&file).unwrap();
    fs::remove_file(&file).unwrap();
    fs::write(&file, text).unwrap();
    drop(fifo);
    assert!(is_hanging, "the file delays nothing");
    for answer in [answers.0, answers.1, answers.2, answers.3] {
        assert_eq!(answer.unwrap().unwrap().status(), StatusCode::OK);
    }
    for hanging in hanging {
        assert_eq!(hanging.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

/// Compares the checked-in document with the served one. `cargo xtask generate` writes it.
#[tokio::test]
async fn openapi_document_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    let served: Value = daemon().json("/openapi.json").await;
    assert_eq!(served, open_api(allocations::open_api()));
    let text = format!("{}\n", serde_json::to_string_pretty(&served).unwrap());
    assert_golden(&path, &text);
}

/// Requests every change on the read-only address.
#[tokio::test]
async fn read_only_address_changes_nothing() {
    let daemon = daemon();
    let document = open_api(allocations::open_api());
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys().filter(|method| *method != "get") {
            let request = Request::builder().method(method.to_uppercase().as_str());
            let request =
                request.uri(path.replace("{name}", "a")).header(header::CONTENT_TYPE, "application/json");
            let (problem, _) = daemon.problem(request.body(Body::from("{}")).unwrap()).await;
            assert!([404, 405].contains(&problem.status), "{method} {path}: {problem:?}");
            assert_eq!(
                problem.detail,
                "this address is read-only; use the control socket (by default /run/numaward/control.sock) or the address in \
                 control.listen",
                "{method} {path}"
            );
            tried += 1;
        }
    }
    assert_eq!(tried, 7);
}

/// The document has all routes and no other.
#[tokio::test]
async fn all_routes_are_documented() {
    let daemon = daemon();
    let document = open_api(allocations::open_api());
    let paths: Vec<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        paths,
        [
            "/api/v1/allocations",
            "/api/v1/allocations/{name}",
            "/api/v1/events",
            "/api/v1/history",
            "/api/v1/history/workloads",
            "/api/v1/kubelet-state",
            "/api/v1/nodes",
            "/api/v1/plan",
            "/api/v1/rebalance",
            "/api/v1/reload",
            "/api/v1/status",
            "/api/v1/stream",
            "/api/v1/topology",
            "/api/v1/usage",
            "/api/v1/version",
            "/api/v1/workloads",
            "/api/v1/workloads/{name}/history",
            "/api/v1/workloads/{name}/intruders",
            "/api/v1/workloads/{name}/regions",
            "/api/v1/workloads/{name}/stacks",
            "/livez",
            "/metrics",
            "/openapi.json",
            "/readyz",
        ]
    );
    // This ends the stream of events.
    daemon.events.close();
    // Only reads: the control socket serves changes.
    for path in paths.into_iter().filter(|path| document["paths"][path]["get"].is_object()) {
        let (status, headers, _) = daemon.get(path, None).await;
        let responses = &document["paths"][path]["get"]["responses"];
        let response = &responses[status.as_str()];
        let content_type = headers[header::CONTENT_TYPE].to_str().unwrap();
        assert!(
            response["content"][content_type].is_object(),
            "{path}: {status} {content_type} in {response}"
        );
        assert!(responses["default"]["content"][PROBLEM_CONTENT_TYPE].is_object(), "{path}");
    }
}

#[tokio::test]
async fn unknown_clients_read_no_process() {
    let daemon = daemon();
    for path in ["/api/v1/workloads/web/regions", "/api/v1/workloads/web/stacks"] {
        let (status, headers, body) = daemon.get(path, None).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}: {body}");
        assert_eq!(headers[header::CONTENT_TYPE], PROBLEM_CONTENT_TYPE);
        assert!(body.contains("listenTokenFile"), "{path}: {body}");
    }
}

#[tokio::test]
async fn serves_and_streams_events() {
    let daemon = daemon();
    let report = |workload: &str| {
        daemon
            .events
            .report(EventReport::new(api::EventKind::Drift, "moved").workload(workload).detail("knob", "x"));
    };
    report("a");
    let page: api::EventPage = daemon.json("/api/v1/events").await;
    let first = page.latest.unwrap();
    assert_eq!((page.events.len(), page.events[0].workload.as_deref()), (1, Some("a")));
    report("b");
    let page: api::EventPage = daemon.json(&format!("/api/v1/events?since={first}&kind=drift&limit=5")).await;
    assert_eq!(page.events[0].workload.as_deref(), Some("b"));
    let (status, _, body) = daemon.get("/api/v1/events?limit=x", None).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");

    let request = Request::get("/api/v1/stream").header("Last-Event-ID", first.to_string());
    let response = daemon.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let mut body = response.into_body();
    let mut next = async || {
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        frame.map(|frame| String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap())
    };
    assert_eq!(next().await.unwrap(), ": numaward\n\n");
    let missed = next().await.unwrap();
    assert!(missed.starts_with(&format!("id: {}\ndata: {{", first + 1)), "{missed}");
    report("c");
    let reported = next().await.unwrap();
    assert!(reported.contains("\"workload\":\"c\"") && reported.ends_with("}\n\n"), "{reported}");
    daemon.events.close();
    assert_eq!(next().await, None, "the stream ends with the daemon");
}

#[tokio::test]
async fn limits_streams_and_checks_parameters() {
    let daemon = daemon();
    let mut open = Vec::new();
    let refused = loop {
        let request = Request::get("/api/v1/stream").body(Body::empty()).unwrap();
        let response = daemon.router.clone().oneshot(request).await.unwrap();
        if response.status() != StatusCode::OK {
            break response.status();
        }
        open.push(response);
        assert!(open.len() < 1000, "streams are not bounded");
    };
    assert_eq!(refused, StatusCode::SERVICE_UNAVAILABLE);
    // Streams of another listener have a limit of their own.
    let control = numaward_http::control_router(daemon.app.clone(), Router::new());
    let request = Request::get("/api/v1/stream").body(Body::empty()).unwrap();
    assert_eq!(control.oneshot(request).await.unwrap().status(), StatusCode::OK);
    for path in ["/api/v1/stream?since=x", "/api/v1/stream?kind=miss"] {
        let (status, _, body) = daemon.get(path, None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
    }
}

#[tokio::test]
async fn streams_samples_on_request() {
    let daemon = daemon();
    let request = Request::get("/api/v1/stream?samples=true").body(Body::empty()).unwrap();
    let response = daemon.router.clone().oneshot(request).await.unwrap();
    let mut body = response.into_body();
    let mut next = async || {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
            let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
            if let Some(json) = text.strip_prefix("event: sample\ndata: ") {
                return serde_json::from_str::<api::Sample>(json.trim_end()).unwrap();
            }
        }
    };
    let first = next().await;
    assert!(first.full);
    assert_eq!(first.nodes.iter().map(|node| node.node).collect::<Vec<_>>(), [0, 1]);
    assert_eq!((first.accesses, first.exclusive_cpus), (None, Vec::new()), "unknown without probes");
    let second = next().await;
    assert!(!second.full && second.at_millis > first.at_millis, "{second:?}");
    assert_eq!((second.workloads, second.removed), (Vec::new(), Vec::new()), "nothing changed");
    let (status, _, body) = daemon.get("/api/v1/stream?samples=yes", None).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
    assert!(body.contains("neither true nor false"), "{body}");
}

/// All files that the page refers to are served, with a policy that forbids other hosts.
#[tokio::test]
async fn page_has_all_its_files() {
    let daemon = daemon();
    let mut wanted = vec!["/".to_owned()];
    let mut served = Vec::new();
    while let Some(path) = wanted.pop() {
        if served.contains(&path) {
            continue;
        }
        let (status, headers, body) = daemon.get(&path, None).await;
        assert_eq!(status, StatusCode::OK, "{path}");
        let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none'") && policy.ends_with("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(!body.contains("//cdn") && !body.contains("https://"), "{path} names another host");
        let quoted = body.split('"').skip(1).step_by(2);
        for name in quoted.filter_map(|text| text.strip_prefix("page/").or_else(|| text.strip_prefix("./"))) {
            wanted.push(format!("/page/{name}"));
        }
        served.push(path);
    }
    assert!(served.len() > 10, "{served:?}");
    let (status, _, body) = daemon.get("/page/../config.yaml", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{body}");
    let (status, _, body) = daemon.get("/page/nothing.js", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(body.contains("the page has no file"), "{body}");
}

//! Target for HTTP requests: from the request line to the response of a reconciler with plain files as cgroups.
//!
//! Splitting a connection into requests is left to hyper and is not fuzzed. The first line of an input is the method and the
//! request target, the lines up to an empty one are headers, and the rest is the body.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode, header},
};
use numaward_config::Config;
use numaward_control::testing;
use numaward_daemon::allocations::{self, ReloadHandle};
use numaward_guarantee::ports::Ports;
use numaward_http::{App, HostNames, Peer};
use numaward_model::health::{Heartbeats, Readiness};
use numaward_observe::Observer;
use numaward_telemetry::metrics::Metrics;
use numaward_topology::{Bytes, Machine};
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

/// Most bytes of a response.
const MAX_RESPONSE_BYTES: usize = 8 << 20;
/// Longest duration of a request before it counts as hung.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(8);
/// Paths of the existing cgroups.
const CGROUPS: [&str; 4] = ["", "w0", "system.slice", "system.slice/db.service"];

/// A daemon without probes. Its ledger and its cgroups are files below a temporary directory.
struct FuzzDaemon {
    runtime: Runtime,
    reading: Router,
    control: Router,
    host: Arc<testing::TestHost>,
}

impl FuzzDaemon {
    fn start() -> Self {
        let machine =
            Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
        let dir = tempfile::tempdir().unwrap().keep();
        let root = dir.join("cgroup");
        for path in CGROUPS {
            testing::cgroup(&root.join(path), &machine);
        }
        let mut config =
            Config { host_root: dir.clone(), state_directory: dir.join("state"), ..Config::default() };
        config.probes.allocation.enabled = false;
        let host = Arc::new(testing::TestHost::new(machine));
        let (reconciler, _, _) = testing::reconciler(&config, &root, Ports::new(host.clone()), None, None);
        let observer = Arc::new(Observer::new(&config));
        let metrics = Arc::new(Metrics::new(observer.clone()));
        let (readiness, heartbeats) = (Readiness::default(), Heartbeats::default());
        let app = App::new(&observer, &metrics, &readiness, &heartbeats, allocations::open_api());
        let view = Some(reconciler.view());
        Self {
            runtime: Runtime::new().unwrap(),
            reading: allocations::router(app.clone(), view, None, HostNames::new(&[])),
            control: allocations::control_router(app, reconciler, ReloadHandle::new().0),
            host,
        }
    }
}

/// Parses an input into a request; `None` if it has no request line or an invalid header.
fn request(data: &[u8]) -> Option<Request<Body>> {
    let end = data.windows(2).position(|two| two == b"\n\n");
    let (head, body) = end.map_or((data, &[][..]), |end| (&data[..end], &data[end + 2..]));
    let mut lines = head.split(|byte| *byte == b'\n');
    let mut words = lines.next()?.splitn(2, |byte| *byte == b' ');
    let mut request = Request::builder().method(words.next()?).uri(words.next()?).extension(Peer::default());
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        request = request.header(&line[..colon], line[colon + 1..].trim_ascii());
    }
    request.body(Body::from(body.to_vec())).ok()
}

async fn answer(router: &Router, request: Request<Body>) {
    let asked = format!("{request:?}");
    let response = router.clone().oneshot(request).await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let of_type = |kind: &str| {
        let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        given.is_some_and(|given| given.starts_with(kind))
    };
    assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{asked}");
    if of_type("text/event-stream") {
        return;
    }
    let body = to_bytes(response.into_body(), MAX_RESPONSE_BYTES).await.unwrap();
    if !body.is_empty() && (status.is_client_error() || status.is_server_error()) {
        assert!(of_type("application/problem+json"), "{asked}: {status} {headers:?}");
    }
    if of_type("application/json") || of_type("application/problem+json") {
        assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok(), "{asked}: {body:?}");
    }
}

/// Sends a request to the public address and to the control socket.
pub(crate) fn run(data: &[u8]) {
    static DAEMON: OnceLock<FuzzDaemon> = OnceLock::new();
    let Some((first, second)) = request(data).zip(request(data)) else { return };
    let daemon = DAEMON.get_or_init(FuzzDaemon::start);
    daemon.runtime.block_on(async {
        let both = async {
            answer(&daemon.reading, first).await;
            answer(&daemon.control, second).await;
        };
        tokio::time::timeout(RESPONSE_TIMEOUT, both).await.unwrap();
    });
    daemon.host.happened.lock().unwrap().clear();
}

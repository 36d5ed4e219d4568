//! A host as a tree of plain files, its daemon, and requests to it.

#![allow(dead_code, reason = "not every test and benchmark uses all of it")]
#![allow(clippy::unwrap_used, reason = "a test or benchmark that cannot go on fails")]

pub(crate) mod load;
pub(crate) mod local_daemon;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
};

use numaward_cgroup::{Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_control::testing;
use numaward_daemon::allocations;
use numaward_guarantee::{ports::Ports, reconciler::ReconcilerHandle};
use numaward_http::App;
use numaward_model::health::{Heartbeats, Readiness};
use numaward_observe::Observer;
use numaward_telemetry::metrics::Metrics;
use numaward_topology::Machine;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

/// A machine, and a cgroup hierarchy below a directory that is removed on drop.
pub(crate) struct TempHost {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) machine: Machine,
}

impl TempHost {
    pub(crate) fn new(machine: Machine) -> Self {
        // The files are in memory if possible, so that syncing the ledger takes no time.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let host = Self { dir: dir.unwrap(), machine };
        host.cgroup("");
        host
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("cgroup")
    }

    /// Creates a cgroup with the knobs that guarantees need.
    pub(crate) fn cgroup(&self, path: &str) {
        testing::cgroup(&self.root().join(path), &self.machine);
    }

    pub(crate) fn start(&self) -> GuaranteeDaemon {
        self.start_on(&Hierarchy::at(&self.root()), &self.dir.path().join("state"))
    }

    /// Starts a daemon with this hierarchy, and with the ledger in the directory `state`.
    pub(crate) fn start_on(&self, hierarchy: &Hierarchy, state: &Path) -> GuaranteeDaemon {
        let mut config = Config {
            host_root: self.dir.path().to_owned(),
            state_directory: state.to_owned(),
            ..Config::default()
        };
        config.probes.allocation.enabled = false;
        // Without the privilege for fanotify, knobs are polled.
        let watch = KnobWatch::new(hierarchy.root()).ok();
        let ports = Ports::new(Arc::new(testing::TestHost::new(self.machine.clone())));
        let (reconciler, thread, stop) = testing::reconciler(&config, hierarchy.root(), ports, watch, None);
        let observer = Arc::new(Observer::new(&config));
        let metrics = Arc::new(Metrics::new(observer.clone()));
        let app = App::new(
            &observer,
            &metrics,
            &Readiness::default(),
            &Heartbeats::default(),
            allocations::open_api(),
        );
        GuaranteeDaemon { app, observer, reconciler, stop, thread: Some(thread) }
    }
}

/// The parts of a daemon that give guarantees. It stops on drop.
pub(crate) struct GuaranteeDaemon {
    pub(crate) app: Arc<App>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) reconciler: ReconcilerHandle,
    pub(crate) stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Drop for GuaranteeDaemon {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The answer of a server.
#[derive(Debug)]
pub(crate) struct HttpAnswer {
    pub(crate) status: u16,
    pub(crate) head: String,
    /// Null if it is not JSON.
    pub(crate) body: Value,
}

/// Sends one request on a new connection.
pub(crate) async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> std::io::Result<HttpAnswer> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request.push_str("host: localhost\r\n");
    }
    for (name, value) in headers {
        request.extend([name, ": ", value, "\r\n"]);
    }
    let is_named = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    if !body.is_empty() && !is_named {
        request.push_str("content-type: application/json\r\n");
    }
    request.extend(["content-length: ", &body.len().to_string(), "\r\n\r\n", body]);
    // A client that is refused early cannot send everything, but reads the answer.
    let sent = stream.write_all(request.as_bytes()).await;
    let mut text = Vec::new();
    match stream.read_to_end(&mut text).await {
        Ok(_) => {}
        // TLS without `close_notify`, or a reset after the answer.
        Err(_) if text.ends_with(b"}") => {}
        Err(error) => return Err(error),
    }
    let text = String::from_utf8_lossy(&text);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        sent?;
        return Err(std::io::Error::other(format!("no answer: {text:?}")));
    };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok(HttpAnswer { status, head: head.to_owned(), body: serde_json::from_str(body).unwrap_or(Value::Null) })
}

/// Returns a request for a guarantee as JSON.
pub(crate) fn request(name: &str, cgroup: &str, cpus: u32, memory: &str) -> String {
    let target = serde_json::json!({ "cgroup": cgroup });
    serde_json::json!({ "name": name, "target": target, "cpus": cpus, "memory": memory }).to_string()
}

//! A host on which guarantees can be given, as a tree of plain files, and requests to its daemon.

#![allow(dead_code, reason = "not every test and benchmark uses all of it")]
#![allow(clippy::unwrap_used, reason = "a test or benchmark that cannot go on fails")]

pub(crate) mod load;
pub(crate) mod whole;

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

/// A machine, and a hierarchy of cgroups below a directory. Removed with this.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) machine: Machine,
}

impl Host {
    pub(crate) fn new(machine: Machine) -> Self {
        // In memory where there is such a place: syncing the ledger is not what is tested here.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let host = Self { dir: dir.unwrap(), machine };
        host.cgroup("");
        host
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("cgroup")
    }

    /// Makes a cgroup with the knobs that guarantees need.
    pub(crate) fn cgroup(&self, path: &str) {
        testing::cgroup(&self.root().join(path), &self.machine);
    }

    pub(crate) fn start(&self) -> Daemon {
        self.start_on(&Hierarchy::at(&self.root()), &self.dir.path().join("state"))
    }

    /// Starts to give guarantees in any hierarchy, with the ledger in a directory.
    pub(crate) fn start_on(&self, hierarchy: &Hierarchy, state: &Path) -> Daemon {
        let mut config = Config {
            host_root: self.dir.path().to_owned(),
            state_directory: state.to_owned(),
            ..Config::default()
        };
        config.probes.allocation.enabled = false;
        // Without the privilege, knobs are looked at all the time.
        let watch = KnobWatch::new(hierarchy.root()).ok();
        let ports = Ports::from_part(&Arc::new(testing::Host::new(self.machine.clone())));
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
        Daemon { app, reconciler, stop, thread: Some(thread) }
    }
}

/// The parts of a daemon that give guarantees. Dropped, it ends.
pub(crate) struct Daemon {
    pub(crate) app: Arc<App>,
    pub(crate) reconciler: ReconcilerHandle,
    pub(crate) stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// What a server answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    /// Null if it is no JSON.
    pub(crate) body: Value,
}

/// Asks on a connection that is used once.
pub(crate) async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> std::io::Result<Answer> {
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
    // A client that is turned away at once cannot send all, and reads the answer all the same.
    let sent = stream.write_all(request.as_bytes()).await;
    let mut text = Vec::new();
    match stream.read_to_end(&mut text).await {
        Ok(_) => {}
        // TLS without a farewell, or a reset after the answer.
        Err(_) if text.ends_with(b"}") => {}
        Err(error) => return Err(error),
    }
    let text = String::from_utf8_lossy(&text);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        sent?;
        return Err(std::io::Error::other(format!("no answer: {text:?}")));
    };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok(Answer { status, head: head.to_owned(), body: serde_json::from_str(body).unwrap_or(Value::Null) })
}

/// A request for an allocation, as JSON.
pub(crate) fn request(name: &str, cgroup: &str, cpus: u32, memory: &str) -> String {
    let target = serde_json::json!({ "cgroup": cgroup });
    serde_json::json!({ "name": name, "target": target, "cpus": cpus, "memory": memory }).to_string()
}

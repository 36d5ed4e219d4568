//! A fake daemon that serves given workloads and can be made unreachable.

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// A name with control sequences that clear the screen, set the title and break the line.
pub(crate) const HOSTILE_NAME: &str = "evil\u{1b}[2J\u{1b}]0;owned\u{7}\r\n\u{9b}31m\u{202e}\"quoted\"";

/// A fake daemon.
pub(crate) struct FakeDaemon {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<FakeDaemonState>>,
}

struct FakeDaemonState {
    workloads: Vec<Value>,
    turn: u64,
    streams: Vec<TcpStream>,
    /// True while it accepts requests.
    serves: bool,
}

impl FakeDaemonState {
    fn sample(&self, full: bool) -> String {
        let node = |node: u64| {
            json!({
                "node": node,
                "cpus": if node == 1 { String::new() } else { "0-3".to_owned() },
                "memory": [{"kind": "memory", "totalBytes": 64 * GIB, "freeBytes": 32 * GIB}],
                "allocated": {"localBytes": self.turn << 20, "remoteBytes": 0, "kernelBytes": 0},
            })
        };
        let sample = json!({
            "atMillis": 60_000 + self.turn * 1000,
            "full": full,
            "promises": 1,
            "nodes": [node(0), node(1)],
            "workloads": self.workloads,
            "removed": [],
        });
        format!("event: sample\ndata: {sample}\n\n")
    }
}

/// Returns a workload with `near` bytes on node 0 and `far` bytes on node 1. Each turn, it allocates one MiB on node 0
/// and half a MiB on node 1.
pub(crate) fn workload(name: &str, near: u64, far: u64, turn: u64) -> Value {
    let node = |node: u64, resident: u64, local: u64, remote: u64| {
        json!({
            "node": node,
            "allocated": {"localBytes": local, "remoteBytes": remote, "kernelBytes": 0},
            "missedBytes": remote,
            "resident": {"anonBytes": resident, "fileBytes": 0, "kernelBytes": 0},
        })
    };
    let anon = |bytes: u64| json!({"anonBytes": bytes, "shmemBytes": 0, "fileBytes": 0});
    let residency = json!({"kind": "memory", "on": anon(near), "off": anon(far), "broken": far > 16 << 20});
    json!({
        "residency": if name == "database" { vec![residency] } else { Vec::new() },
        "workload": name,
        "kind": "unit",
        "cgroup": format!("/{name}"),
        "counters": "own",
        "nodes": [node(0, near, (turn + 3) << 20, 0), node(1, far, 0, (turn + 1) << 19)],
        "activity": {
            "sampling": if far > 0 { "on" } else { "skipped_cpuset" },
            "accesses": [{"node": 0, "localPages": 60, "remotePages": 20, "remote": [{"memoryNode": 1, "pages": 20}]}],
        },
    })
}

fn allocations() -> Value {
    let node_capacity = |node: u64, guaranteed: u64| {
        json!({"node": node, "freeCpus": "", "memory": [{
            "kind": "memory", "totalBytes": 64 * GIB, "reservedBytes": GIB, "allocatableBytes": 63 * GIB,
            "promisedBytes": guaranteed, "freeBytes": 63 * GIB - guaranteed,
        }]})
    };
    json!({
        "allocations": [{
            "name": "database", "target": {"cgroup": "/database"}, "cgroup": "/database",
            "directory": "/sys/fs/cgroup/database", "cpus": "2-3", "nodes": "0", "enforced": true,
            "memory": [{"kind": "memory", "nodes": "0", "bytes": 8 * GIB}],
            "settings": {"cpuset.cpus": "2-3", "cpuset.mems": "0"}, "drift": [],
            "explanation": {"merges": [{
                "hints": [{"resource": "cpu", "sets": [{"nodes": "0", "preferred": true}]}],
                "candidates": [{"nodes": "0", "preferred": true, "verdict": "best of all"}],
                "nodes": "0", "accepted": true,
            }]},
        }],
        "sharedCpus": "0-1",
        "nodes": [node_capacity(0, 8 * GIB), node_capacity(1, 0)],
        "enforcement": {"mode": "on", "herding": {"mode": "off", "cgroups": []}},
        "waiting": [],
    })
}

fn answer(path: &str) -> Option<Value> {
    let node = |node: u64| {
        json!({"node": node, "cpus": "0-3", "memoryBytes": 64 * GIB, "hugepages": [],
               "distances": {"0": 10, "1": 17}, "memoryOnly": false})
    };
    Some(match path {
        "/api/v1/topology" => json!({
            "nodes": [node(0), node(1)], "sockets": [], "lastLevelCaches": [], "onlineCpus": "0-3",
            "possibleCpus": "0-3", "isolatedCpus": "", "memoryBlockSizeBytes": 0,
        }),
        "/api/v1/workloads" => json!({
            "workloads": [workload("small.service", 1 << 20, 0, 1), workload("database", 3 << 30, 1 << 30, 1)],
        }),
        "/api/v1/version" => json!({"version": "1.2.3", "kernel": "6.12", "architecture": "x86_64"}),
        "/api/v1/events" => json!({"events": [{
            "id": 5, "time": "2026-01-01T07:08:09.000Z", "kind": "miss", "severity": "warning",
            "workload": "database", "node": 1, "message": "pages on node 1", "suppressed": 2,
        }]}),
        "/api/v1/allocations" => allocations(),
        "/api/v1/status" => json!({
            "version": "1.2.3", "uptimeSeconds": 60, "probes": [], "maps": [], "workloads": {"own": 2, "other": 0},
            "exclusiveCpus": [{"cpu": 2, "workload": "database", "ownMicros": 5_000_000, "kernelThreadMicros": 1_000_000,
                               "hostMicros": 2_500_000, "workloadMicros": 0}],
            "degraded": [],
        }),
        _ => return None,
    })
}

impl FakeDaemon {
    /// Starts to serve workloads.
    pub(crate) fn start(workloads: Vec<Value>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = FakeDaemonState { workloads, turn: 0, streams: Vec::new(), serves: true };
        let state = Arc::new(Mutex::new(state));
        let fake = Self { address, state: state.clone() };
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = state.clone();
                thread::spawn(move || serve(stream, &state));
            }
        });
        fake
    }

    /// Sends the next sample, with the given workloads.
    pub(crate) fn tick(&self, workloads: Vec<Value>) {
        let mut state = self.state.lock().unwrap();
        state.turn += 1;
        state.workloads = workloads;
        let sample = state.sample(false);
        state.streams.retain_mut(|stream| stream.write_all(sample.as_bytes()).is_ok());
    }

    /// Sends an event.
    pub(crate) fn report(&self, event: &Value) {
        let message = format!("id: {}\ndata: {event}\n\n", event["id"]);
        let mut state = self.state.lock().unwrap();
        state.streams.retain_mut(|stream| stream.write_all(message.as_bytes()).is_ok());
    }

    /// Closes all streams and refuses requests.
    pub(crate) fn leave(&self) {
        let mut state = self.state.lock().unwrap();
        state.serves = false;
        state.streams.clear();
    }

    /// Accepts requests again, like a restarted daemon.
    pub(crate) fn come_back(&self) {
        let mut state = self.state.lock().unwrap();
        (state.serves, state.turn) = (true, 0);
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<FakeDaemonState>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    // Skip the other headers.
    lines.by_ref().take_while(|line| !line.is_empty()).for_each(drop);
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default();
    let mut state = state.lock().unwrap();
    if !state.serves {
        return;
    }
    if path == "/api/v1/stream" {
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n: hello\n\n";
        let first = state.sample(true);
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(first.as_bytes())).is_ok() {
            state.streams.push(stream);
        }
        return;
    }
    drop(state);
    let (status, body) = match answer(path) {
        Some(body) => ("200 OK", body.to_string()),
        None => (
            "404 Not Found",
            json!({"title": "Not Found", "status": 404, "detail": path, "instance": path}).to_string(),
        ),
    };
    let length = body.len();
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
}

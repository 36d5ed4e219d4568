//! The `numaward` command, and a daemon for tests.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use serde_json::Value;

/// Returns the command without any `NUMAWARD_*` variables.
pub(crate) fn numaward(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_numaward"));
    let ours = std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| name.to_string_lossy().starts_with("NUMAWARD_"));
    for name in ours {
        command.env_remove(name);
    }
    // Use the default width of the help.
    command.args(args).env_remove("COLUMNS");
    command
}

/// Creates a host with two nodes.
pub(crate) fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/cpu/online", "0-3\n");
    write("sys/devices/system/node/online", "0,2\n");
    for (node, cpus, distance) in [(0, "0-3\n", "10 17\n"), (2, "\n", "17 10\n")] {
        let path = format!("sys/devices/system/node/node{node}");
        write(&format!("{path}/cpulist"), cpus);
        write(&format!("{path}/distance"), distance);
        write(
            &format!("{path}/meminfo"),
            &format!("Node {node} MemTotal: 2097152 kB\nNode {node} MemFree: 1 kB\n"),
        );
    }
    dir
}

/// A daemon on a free port that observes a directory. It is killed at the end of the test.
pub(crate) struct ChildDaemon {
    pub(crate) child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) socket: PathBuf,
    _host: tempfile::TempDir,
}

impl Drop for ChildDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn daemon() -> ChildDaemon {
    let host = host();
    let socket = host.path().join("control.sock");
    let here = |args: &[&str]| {
        let mut command = numaward(args);
        command
            .env("NUMAWARD_HOST_ROOT", host.path())
            .env("NUMAWARD_STATE_DIRECTORY", host.path().join("state"))
            .env("NUMAWARD_CONTROL_SOCKET", &socket)
            .env("NUMAWARD_PROBES_ALLOCATION_ENABLED", "false")
            .env("NUMAWARD_LISTEN", "127.0.0.1:0");
        command
    };
    let mut child = here(&["run", "--log-format", "json"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (mut differences, mut configuration) = (String::new(), Value::Null);
    let address = lines.by_ref().find_map(|line| {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        differences += event["differences"].as_str().unwrap_or_default();
        if let Some(text) = event["configuration"].as_str() {
            assert_eq!(event["level"], "INFO");
            configuration = serde_json::from_str(text).unwrap();
        }
        (event["message"] == "serving").then(|| event["address"].as_str().unwrap().parse().unwrap())
    });
    for key in ["listen: 127.0.0.1:0, log.format: json", "probes.allocation.enabled: false"] {
        assert!(differences.contains(key), "{key}: {differences}");
    }
    let view = here(&["config", "view", "-o", "json"]).env("NUMAWARD_LOG_FORMAT", "json").output().unwrap();
    assert_eq!(configuration, serde_json::from_slice::<Value>(&view.stdout).unwrap());
    // Drain the pipe, because the daemon would block when it is full.
    std::thread::spawn(move || lines.for_each(drop));
    ChildDaemon { child, address: address.unwrap(), socket, _host: host }
}

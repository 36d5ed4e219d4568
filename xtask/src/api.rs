//! `cargo xtask test api`: schemathesis makes valid and invalid requests from the daemon's OpenAPI document. No request
//! may make the daemon fail, and every answer must be in the document.
//!
//! The daemon runs on a fake host in a directory and writes nothing to the kernel. Requests go to its read-only
//! address, and to its control address for the routes that exist only there.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_vm::Cache;
use serde_json::Value;

use crate::setup::PythonTool;
use crate::{build, command};

/// The time limit of a start on a busy host.
const START_TIMEOUT: Duration = Duration::from_mins(2);
/// Path of an endless stream, for which schemathesis would wait; the daemon's own tests read it.
const STREAM_PATH: &str = "/api/v1/stream";
const TOKEN: &str = "a-token-for-one-test";

/// Runs schemathesis with this seed, which is printed: the same seed makes the same requests.
pub(crate) fn test(thorough: bool, seed: u32) -> Result<()> {
    println!("seed {seed}");
    let seed = seed.to_string();
    let daemon = TestDaemon::start(&build::tested_program("numaward")?)?;
    let examples = if thorough { "1000" } else { "40" };
    let run = |address: SocketAddr, more: &[&str]| {
        let mut command = PythonTool::SCHEMATHESIS.command(&Cache::locate()?);
        command
            .args(["run", &format!("http://{address}/openapi.json"), "--exclude-path", STREAM_PATH])
            .args(["--checks", "all", "--max-examples", examples, "--request-timeout", "60"])
            .args(["--seed", &seed])
            .args(more)
            .current_dir(daemon.directory.path());
        command::run(&mut command)
    };
    // The document describes changes too, which this address refuses.
    let reading = ["--include-method", "GET", "--exclude-checks", "allow_header_conformance"];
    run(daemon.listen, &reading).with_context(|| format!("on the read-only address, with seed {seed}"))?;
    let authorization = format!("Authorization: Bearer {TOKEN}");
    // A valid request may still be refused: the cgroup does not exist, or there is no capacity.
    let changing = [
        "--include-tag",
        "control",
        "--header",
        &authorization,
        "--exclude-checks",
        "positive_data_acceptance",
    ];
    run(daemon.control, &changing).with_context(|| format!("on the control address, with seed {seed}"))?;
    daemon.stop()
}

/// A daemon on free ports.
struct TestDaemon {
    child: Child,
    listen: SocketAddr,
    control: SocketAddr,
    directory: tempfile::TempDir,
}

impl TestDaemon {
    fn start(program: &Path) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("numaward-api-").tempdir()?;
        let root = directory.path();
        host(root)?;
        let token = root.join("token");
        fs::write(&token, TOKEN)?;
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
        let config = format!(
            "hostRoot: {root}\nstateDirectory: {root}/state\ncontrolSocket: {root}/control.sock\n\
             listen: 127.0.0.1:0\ncontrol: {{listen: '127.0.0.1:0', tokenFile: {root}/token}}\n\
             enforcement: {{mode: dry-run}}\nlog: {{format: json}}\n",
            root = root.display()
        );
        let file = root.join("config.yaml");
        fs::write(&file, config)?;
        let mut child = Command::new(program)
            .arg("run")
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let log = child.stderr.take().context("the daemon's log is a pipe")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(log).lines().map_while(Result::ok) {
                // The pipe is read to its end even without a receiver, because the daemon would wait on a full pipe.
                let _ = sender.send(line);
            }
        });
        let mut said = String::new();
        let (mut listen, mut control) = (None, None);
        while listen.is_none() || control.is_none() {
            let Ok(line) = lines.recv_timeout(START_TIMEOUT) else {
                let _ = child.kill();
                let _ = child.wait();
                bail!("the daemon does not serve; it said:\n{said}");
            };
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            let address = || event["address"].as_str().and_then(|address| address.parse().ok());
            match event["message"].as_str() {
                Some("serving") => listen = address(),
                Some("serving the control address") => control = address(),
                _ => {}
            }
            said.push_str(&line);
            said.push('\n');
        }
        let (listen, control) = listen.zip(control).context("both are known")?;
        Ok(Self { child, listen, control, directory })
    }

    /// Checks that the daemon is still running, and that it stops when asked to.
    fn stop(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the daemon has ended by itself");
        command::run(Command::new("kill").arg(self.child.id().to_string()))?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        // The daemon may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Creates a host with two nodes of four CPUs.
fn host(root: &Path) -> Result<()> {
    let write = |path: String, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    let system = "sys/devices/system";
    write(format!("{system}/cpu/online"), "0-7\n")?;
    write(format!("{system}/cpu/possible"), "0-7\n")?;
    write(format!("{system}/node/online"), "0-1\n")?;
    for (node, cpus, distance) in [(0, "0-3\n", "10 20\n"), (1, "4-7\n", "20 10\n")] {
        let path = format!("{system}/node/node{node}");
        write(format!("{path}/cpulist"), cpus)?;
        write(format!("{path}/distance"), distance)?;
        let meminfo = format!("Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: 2097152 kB\n");
        write(format!("{path}/meminfo"), &meminfo)?;
    }
    for cpu in 0..8 {
        let path = format!("{system}/cpu/cpu{cpu}/topology");
        write(format!("{path}/physical_package_id"), &format!("{}\n", cpu / 4))?;
        write(format!("{path}/core_id"), &format!("{cpu}\n"))?;
    }
    Ok(())
}

//! The daemon, started as users start it.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, ensure};
use numaward_tests_daemon::{self as daemon, DaemonProcess, wait};

/// Socket of the container runtime.
pub(crate) const NRI: &str = "/tmp/answers/nri.sock";
/// Socket of the system bus.
pub(crate) const BUS: &str = "/tmp/answers/bus";
const SOCKET: &str = "/tmp/answers/control.sock";
const CONFIG: &str = "/tmp/answers/config.yaml";
const LOG: &str = "/tmp/answers/daemon.log";

/// Starts the daemon, and waits until it is ready.
pub(crate) fn start() -> Result<DaemonProcess> {
    let config = format!(
        "controlSocket: {SOCKET}\nstateDirectory: /tmp/answers/state\n\
         kubernetes: {{nri: {{enabled: true, socket: {NRI}}}}}\n"
    );
    fs::write(CONFIG, config)?;
    let mut command = Command::new("numaward");
    command.args(["run", "--config", CONFIG]).env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={BUS}"));
    let process = DaemonProcess::start(&mut command, LOG.as_ref()).context("numaward")?;
    wait("the daemon to be ready", || Ok(matches!(ask("GET", "/readyz", ""), Ok((200, _)))))?;
    Ok(process)
}

/// Returns the last lines of the daemon's log.
pub(crate) fn log_tail() -> String {
    daemon::log_tail(LOG.as_ref())
}

/// Sends a request to the control socket.
pub(crate) fn ask(method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    daemon::ask(SOCKET.as_ref(), method, path, body)?.context("incomplete answer")
}

pub(crate) fn release(name: &str) -> Result<()> {
    let (status, answer) = ask("DELETE", &format!("/api/v1/allocations/{name}"), "")?;
    ensure!(status == 204, "released {name}: {status} {answer}");
    Ok(())
}

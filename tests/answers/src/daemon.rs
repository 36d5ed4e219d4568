//! The daemon, as users run it.

use std::{
    fs::{self, File},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::http;

/// Where the container runtime listens.
pub(crate) const NRI: &str = "/tmp/answers/nri.sock";
/// Where the system bus does.
pub(crate) const BUS: &str = "/tmp/answers/bus";
const SOCKET: &str = "/tmp/answers/control.sock";
const LOG: &str = "/tmp/answers/daemon.log";
/// For a start or an end on a busy host.
const LIMIT: Duration = Duration::from_mins(1);
const PACE: Duration = Duration::from_millis(50);

pub(crate) struct Daemon(Child);

impl Daemon {
    /// Starts it, and waits until it is ready.
    pub(crate) fn start() -> Result<Self> {
        let config = format!(
            "controlSocket: {SOCKET}\nstateDirectory: /tmp/answers/state\n\
             kubernetes: {{nri: {{enabled: true, socket: {NRI}}}}}\n"
        );
        fs::write("/tmp/answers/config.yaml", config)?;
        let child = Command::new("numaward")
            .args(["run", "--config", "/tmp/answers/config.yaml"])
            .env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={BUS}"))
            .stdin(Stdio::null())
            .stderr(File::create(LOG)?)
            .spawn()
            .context("numaward")?;
        let daemon = Self(child);
        let start = Instant::now();
        while !matches!(ask("GET", "/readyz", ""), Ok((200, _))) {
            ensure!(start.elapsed() < LIMIT, "the daemon is not ready");
            thread::sleep(PACE);
        }
        Ok(daemon)
    }

    /// Ends it as a service manager does.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "told to stop, the daemon ended with {status}");
                return Ok(());
            }
            ensure!(start.elapsed() < LIMIT, "the daemon does not end");
            thread::sleep(PACE);
        }
    }

    /// What it logged last.
    pub(crate) fn last_words() -> String {
        let text = fs::read_to_string(LOG).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asks on the control socket.
pub(crate) fn ask(method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    http::exchange(UnixStream::connect(SOCKET)?, method, path, body)
}

pub(crate) fn release(name: &str) -> Result<()> {
    let (status, answer) = ask("DELETE", &format!("/api/v1/allocations/{name}"), "")?;
    ensure!(status == 204, "released {name}: {status} {answer}");
    Ok(())
}

//! The daemon as a child process of tests, which start it, send it HTTP requests, and stop it.

#![forbid(unsafe_code)]

mod http;

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

pub use self::http::{Reply, ask, get, reply};

/// The time limit of a start, an answer or an end, on a busy host.
pub const TIMEOUT: Duration = Duration::from_mins(2);
/// The interval of checks in a wait.
pub const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A running daemon. It is killed on drop.
#[derive(Debug)]
pub struct DaemonProcess(Child);

impl DaemonProcess {
    /// Starts the daemon, with its log in this file.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(log)?);
        Ok(Self(command.spawn()?))
    }

    /// Returns the id of the process, which is not reused before [`DaemonProcess::wait`].
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Returns whether the daemon has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }

    /// Waits until the daemon has ended.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        wait("the daemon's end", || self.has_ended())?;
        Ok(self.0.wait()?)
    }

    /// Stops the daemon as a service manager does.
    pub fn stop(mut self) -> Result<()> {
        kill_process(self.pid(), Signal::TERM)?;
        let status = self.wait()?;
        ensure!(status.success(), "asked to stop, the daemon ended with {status}");
        Ok(())
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // The daemon may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the last lines of a log.
pub fn log_tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// Blocks until the condition holds.
pub fn wait(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !holds()? {
        ensure!(start.elapsed() < TIMEOUT, "waited in vain for {what}");
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

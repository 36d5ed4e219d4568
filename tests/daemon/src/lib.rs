//! The daemon in tests that run inside a machine: a child that they start, ask over HTTP, and end.

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

/// What a start, an answer or an end may take on a busy host.
pub const TIMEOUT: Duration = Duration::from_mins(2);
/// Time between two looks at what is waited for.
pub const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A daemon that runs. It is killed when this is dropped.
#[derive(Debug)]
pub struct DaemonProcess(Child);

impl DaemonProcess {
    /// Starts it. What it logs goes to this file.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(log)?);
        Ok(Self(command.spawn()?))
    }

    /// Its id, which is its own until it was waited for.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        wait("the daemon's end", || self.has_ended())?;
        Ok(self.0.wait()?)
    }

    /// Ends it as a service manager does.
    pub fn stop(mut self) -> Result<()> {
        kill_process(self.pid(), Signal::TERM)?;
        let status = self.wait()?;
        ensure!(status.success(), "asked to stop, the daemon ended with {status}");
        Ok(())
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The end of a log.
pub fn log_tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// Waits, on this thread, until something holds.
pub fn wait(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !holds()? {
        ensure!(start.elapsed() < TIMEOUT, "waited in vain for {what}");
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

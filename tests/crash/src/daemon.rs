//! The daemon as a child process that dies during its work.

use std::{
    fs, io, os::unix::process::ExitStatusExt as _, path::PathBuf, process::Command, thread, time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_config::{self as config, Sources};
use numaward_control::Control;
use numaward_tests_daemon::{DaemonProcess, get, log_tail, wait};

use crate::client::ControlClient;

const SIGKILL: i32 = 9;
const SIGABRT: i32 = 6;

/// Runs the daemon in this process.
pub(crate) fn main(config: PathBuf) -> Result<()> {
    let sources = Sources { file: Some(config), ..Sources::default() };
    Ok(numaward_daemon::run(&sources, config::load(&sources)?, Box::<Control>::default())?)
}

/// Folder with the daemon's files.
pub(crate) struct DaemonFolder {
    dir: PathBuf,
}

impl DaemonFolder {
    pub(crate) fn new(dir: &str) -> Result<Self> {
        let dir = PathBuf::from(dir);
        fs::create_dir_all(&dir)?;
        // The probes leave nothing behind when they end, and take half the time of a start.
        let text = format!(
            "stateDirectory: {0}/state\ncontrolSocket: {0}/control.sock\nlog: {{level: debug}}\n\
             probes: {{allocation: {{enabled: false}}}}\n",
            dir.display()
        );
        fs::write(dir.join("config.yaml"), text)?;
        Ok(Self { dir })
    }

    /// Returns the folder of a daemon that another program starts.
    pub(crate) fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(crate) fn client(&self) -> ControlClient {
        ControlClient::new(self.dir.join("control.sock"))
    }

    /// Reads the ledger file; `None` if it does not exist yet.
    pub(crate) fn ledger(&self) -> Result<Option<String>> {
        let path = self.dir.join("state/ledger.json");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// Returns the path of a damaged ledger that was set aside, if there is one.
    pub(crate) fn damaged(&self) -> Result<Option<PathBuf>> {
        for entry in fs::read_dir(self.dir.join("state"))? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().contains("damaged")) {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    fn log(&self) -> PathBuf {
        self.dir.join("daemon.log")
    }

    /// Returns the last log lines of the present or the last daemon.
    pub(crate) fn log_tail(&self) -> String {
        log_tail(&self.log())
    }
}

/// Kinds of a daemon's end.
#[derive(Clone, Debug)]
pub(crate) enum Death {
    /// A death at a fault point: `NAME@COUNT`.
    At(String),
    /// A kill by SIGKILL, this long after its first answer.
    After(Duration),
    /// A regular stop.
    Never,
}

/// A running daemon.
pub(crate) struct RunningDaemon {
    process: DaemonProcess,
    death: Death,
    log: PathBuf,
}

impl RunningDaemon {
    pub(crate) fn start(home: &DaemonFolder, death: &Death) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("daemon").arg(home.dir.join("config.yaml"));
        if let Death::At(point) = death {
            command.env("NUMAWARD_FAULT", point);
        }
        let log = home.log();
        Ok(Self { process: DaemonProcess::start(&mut command, &log)?, death: death.clone(), log })
    }

    /// Waits for the first answer. Returns false if the daemon died as intended before it.
    pub(crate) fn comes_up(&mut self, client: &ControlClient) -> Result<bool> {
        let mut answers = false;
        wait("an answer of the daemon", || {
            answers = client.allocations()?.is_some();
            Ok(answers || self.process.has_ended()?)
        })?;
        if !answers {
            return Ok(false);
        }
        if let Death::After(time) = self.death {
            let pid = self.process.pid();
            thread::spawn(move || {
                thread::sleep(time);
                // The process has not been waited for, so its id is not reused.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            });
        }
        Ok(true)
    }

    /// Waits for the daemon's death, and returns the fault point. Fails if the daemon ended in another way.
    pub(crate) fn dies(mut self) -> Result<String> {
        let status = self.process.wait()?;
        let log = self.log_without_errors()?;
        let point = log.lines().find_map(|line| line.strip_prefix("fault point "));
        match (&self.death, status.signal(), point) {
            (Death::At(_), Some(SIGABRT), Some(point)) => Ok(point.to_owned()),
            (Death::After(_), Some(SIGKILL), None) => Ok("killed".to_owned()),
            (death, ..) => bail!("the daemon was to die {death:?}, and ended with {status}"),
        }
    }

    /// Stops the daemon as a service manager does.
    pub(crate) fn stop(self) -> Result<()> {
        self.log_without_errors()?;
        self.process.stop()
    }

    /// Returns the log of this daemon so far; fails if it has an error or a panic.
    fn log_without_errors(&self) -> Result<String> {
        let log = fs::read_to_string(&self.log).with_context(|| self.log.display().to_string())?;
        let is_error = |line: &&str| line.contains(" ERROR ") || line.contains("panicked at");
        let errors: Vec<_> = log.lines().filter(is_error).collect();
        ensure!(errors.is_empty(), "the daemon logged errors: {errors:#?}");
        Ok(log)
    }
}

/// Reads the metrics from their default address; `None` if the daemon does not serve them.
pub(crate) fn metrics() -> Result<Option<String>> {
    let Some((status, body)) = get("127.0.0.1:9560", "/metrics")? else { return Ok(None) };
    ensure!(status == 200, "/metrics answers {status}");
    Ok(Some(body))
}

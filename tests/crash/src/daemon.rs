//! The daemon as a child that is to die.

use std::{
    fs, io, os::unix::process::ExitStatusExt as _, path::PathBuf, process::Command, thread, time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_config::{self as config, Sources};
use numaward_control::Control;
use numaward_tests_daemon::{DaemonProcess, get, log_tail, wait};

use crate::client::Client;

const SIGKILL: i32 = 9;
const SIGABRT: i32 = 6;

/// Runs the daemon in this process.
pub(crate) fn main(config: PathBuf) -> Result<()> {
    let loaded = config::load(&Sources { file: Some(config), ..Sources::default() })?;
    Ok(numaward_daemon::run(&loaded.config, Box::<Control>::default())?)
}

/// Where the daemon has its files.
pub(crate) struct Home {
    dir: PathBuf,
}

impl Home {
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

    /// That of a daemon which somebody else starts.
    pub(crate) fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.dir.join("control.sock"))
    }

    /// The text of the ledger file, once one was written.
    pub(crate) fn ledger(&self) -> Result<Option<String>> {
        let path = self.dir.join("state/ledger.json");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// A ledger that was set aside, if there is one.
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

    /// What the daemon logged last in this or its last life.
    pub(crate) fn log_tail(&self) -> String {
        log_tail(&self.log())
    }
}

/// How a life ends.
#[derive(Clone, Debug)]
pub(crate) enum Death {
    /// At a fault point: `NAME@COUNT`.
    At(String),
    /// Killed so long after it answers for the first time.
    After(Duration),
    /// Not at all.
    Never,
}

/// A life of the daemon.
pub(crate) struct Daemon {
    process: DaemonProcess,
    death: Death,
    log: PathBuf,
}

impl Daemon {
    pub(crate) fn start(home: &Home, death: &Death) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("daemon").arg(home.dir.join("config.yaml"));
        if let Death::At(point) = death {
            command.env("NUMAWARD_FAULT", point);
        }
        let log = home.log();
        Ok(Self { process: DaemonProcess::start(&mut command, &log)?, death: death.clone(), log })
    }

    /// Whether it came to answer; if not, it died as it was to.
    pub(crate) fn comes_up(&mut self, client: &Client) -> Result<bool> {
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
                // Nobody waits for it before it is dead, so the id is its own.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            });
        }
        Ok(true)
    }

    /// Waits for its death, and says where it died. Another end than the one intended is an error.
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

    /// Ends it as a service manager does.
    pub(crate) fn stop(self) -> Result<()> {
        self.log_without_errors()?;
        self.process.stop()
    }

    /// The log of this life so far, which must have neither an error nor a panic.
    fn log_without_errors(&self) -> Result<String> {
        let log = fs::read_to_string(&self.log).with_context(|| self.log.display().to_string())?;
        let is_error = |line: &&str| line.contains(" ERROR ") || line.contains("panicked at");
        let errors: Vec<_> = log.lines().filter(is_error).collect();
        ensure!(errors.is_empty(), "the daemon logged errors: {errors:#?}");
        Ok(log)
    }
}

/// The metrics, from where the daemon serves them by default; none if nobody does.
pub(crate) fn metrics() -> Result<Option<String>> {
    let Some((status, body)) = get("127.0.0.1:9560", "/metrics")? else { return Ok(None) };
    ensure!(status == 200, "/metrics answers {status}");
    Ok(Some(body))
}

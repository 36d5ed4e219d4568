//! `numaward exec`: a command with a guarantee.
//!
//! The daemon makes a cgroup that holds the guarantee. This program starts itself anew (`enter`), which moves into
//! the cgroup and becomes the command: so the command runs there from its first instruction. Meanwhile
//! this program passes signals on and waits. When it is killed itself, the daemon sees the cgroup empty and
//! releases it.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, Command, ExitCode, ExitStatus},
    time::Duration,
};

use anyhow::Context;
use numaward_api as api;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    signal::unix::{Signal as Incoming, SignalKind, signal},
    sync::mpsc,
    time::sleep,
};

use crate::{client::ClientError, control::Control};

/// As shells have it: the command was found and cannot be executed; it was not found.
const CANNOT_EXECUTE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// The signals that are passed on. The second ones come from the terminal, which sends them to the command as
/// well.
const PASSED_ON: [(Signal, SignalKind, bool); 6] = [
    (Signal::TERM, SignalKind::terminate(), false),
    (Signal::USR1, SignalKind::user_defined1(), false),
    (Signal::USR2, SignalKind::user_defined2(), false),
    (Signal::HUP, SignalKind::hangup(), true),
    (Signal::INT, SignalKind::interrupt(), true),
    (Signal::QUIT, SignalKind::quit(), true),
];

/// Runs the command and returns its exit code; 128 and the signal if one ended it.
pub(crate) async fn run(
    control: &Control,
    asked: &api::AllocationRequest,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    let mut signals = signals()?;
    let mut children = signal(SignalKind::child())?;
    let allocation = control.admit(asked).await?;
    let status = match start(&allocation.directory, command) {
        Ok(mut child) => wait(&mut child, &mut children, &mut signals).await,
        Err(error) => Err(error),
    };
    release(control, &allocation).await;
    let status = status.context("the command cannot be started")?;
    Ok(ExitCode::from(exit_code(status)))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

fn start(directory: &str, command: &[OsString]) -> io::Result<Child> {
    Command::new("/proc/self/exe").arg("enter").arg(directory).arg("--").args(command).spawn()
}

/// Takes the signals that are to be passed on. Those that were ignored before (`nohup`) stay so.
fn signals() -> io::Result<mpsc::Receiver<Signal>> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let (sender, receiver) = mpsc::channel(16);
    for (number, kind, from_terminal) in PASSED_ON {
        if ignored & (1 << (number.as_raw() - 1)) != 0 {
            continue;
        }
        let incoming = signal(kind)?;
        tokio::spawn(pass_on(incoming, number, from_terminal, sender.clone()));
    }
    Ok(receiver)
}

async fn pass_on(mut incoming: Incoming, number: Signal, from_terminal: bool, sender: mpsc::Sender<Signal>) {
    while incoming.recv().await.is_some() {
        if from_terminal && is_in_foreground() {
            continue;
        }
        if sender.send(number).await.is_err() {
            return;
        }
    }
}

/// Whether this process group, and with it the command, gets the signals of a terminal's keys (proc(5)).
fn is_in_foreground() -> bool {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in brackets, may hold anything.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let fields: Vec<&str> = rest.split(' ').collect();
    // State, parent, process group, session, terminal, its foreground process group.
    matches!((fields.get(2), fields.get(5)), (Some(own), Some(foreground)) if own == foreground)
}

async fn wait(
    child: &mut Child,
    children: &mut Incoming,
    signals: &mut mpsc::Receiver<Signal>,
) -> io::Result<ExitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        tokio::select! {
            _ = children.recv() => {}
            Some(signal) = signals.recv() => {
                // It has not been waited for, so the id is still its own.
                if let Some(pid) = pid {
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// Releases at once what is not in use any more. What is, the daemon releases when its last process ends.
async fn release(control: &Control, allocation: &api::Allocation) {
    let events = Path::new(&allocation.directory).join("cgroup.events");
    for _ in 0..20 {
        // A cgroup that cannot be read is gone.
        let is_empty = fs::read_to_string(&events).map_or(true, |text| text.contains("populated 0"));
        if is_empty {
            match control.release(&allocation.name).await {
                Ok(()) => {}
                // The daemon was quicker.
                Err(ClientError::Refused(refusal)) if refusal.status == 404 => {}
                Err(error) => eprintln!("numaward: {}: not released yet: {error}", allocation.name),
            }
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Moves into a cgroup and becomes a command. Returns only if that fails.
pub(crate) fn enter(directory: &Path, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let procs = directory.join("cgroup.procs");
    // Opened without `create`: a cgroup that is gone must not become a file.
    fs::OpenOptions::new()
        .write(true)
        .open(&procs)
        .and_then(|mut file| io::Write::write_all(&mut file, b"0\n"))
        .with_context(|| format!("{}: cannot enter this cgroup", procs.display()))?;
    let (program, arguments) = command.split_first().context("no command was given")?;
    let error = Command::new(program).args(arguments).exec();
    eprintln!("numaward: {}: {error}", program.to_string_lossy());
    Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_EXECUTE }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_the_commands() {
        for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
            let status = Command::new("sh").args(["-c", script]).status().unwrap();
            assert_eq!(exit_code(status), code, "{script}");
        }
    }

    #[test]
    fn a_cgroup_that_is_gone_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let error = enter(dir.path(), &["true".into()]).unwrap_err();
        assert!(error.to_string().contains("cannot enter this cgroup"), "{error:#}");
        assert!(!dir.path().join("cgroup.procs").exists());
    }
}

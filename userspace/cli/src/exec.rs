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
    process::{Command, ExitCode, ExitStatus},
    time::Duration,
};

use anyhow::Context;
use numaward_api as api;
use numaward_topology::affinity;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{self, Child},
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::sleep,
};

use crate::{
    client::{ClientError, Server},
    mempolicy::Spread,
    text,
};

/// As env(1), chroot(1) and container engines have it: this program failed itself; the command was found and cannot be
/// executed; it was not found.
pub(crate) const FAILED: u8 = 125;
const CANNOT_EXECUTE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// The signals that are passed on. Of the second ones, those from the terminal go to the command as well: they are not
/// passed on.
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
    control: &Server,
    asked: &api::AllocationRequest,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    let mut signals = signals()?;
    // A parent that ignores SIGCHLD hands that down, and the kernel would not keep the exit code.
    let _kept = signal(SignalKind::child())?;
    let allocation = tokio::select! {
        admitted = control.admit(asked) => admitted?,
        // The daemon releases what nobody waits for.
        Some(Incoming { signal, .. }) = signals.recv() => return Ok(ended_by(signal)),
    };
    report_others(control, &allocation).await;
    let mut enter = process::Command::new("/proc/self/exe");
    enter.args(enter_arguments(asked, &allocation)).arg("--").args(command);
    let status = match enter.spawn() {
        Ok(child) => wait(child, &mut signals).await,
        Err(error) => Err(error),
    };
    release(control, &allocation).await;
    let status = status.context("the command cannot be started")?;
    Ok(ExitCode::from(exit_code(status)))
}

/// The arguments with which this program becomes the command.
fn enter_arguments(asked: &api::AllocationRequest, allocation: &api::Allocation) -> Vec<String> {
    let mut arguments = vec!["enter".to_owned(), allocation.directory.clone()];
    if let Some(policy) = asked.placement.memory_policy {
        arguments.extend(["--spread".to_owned(), Spread::over(policy, &allocation.memory).to_string()]);
    }
    // Without CPUs of its own, the command keeps the affinity that it inherits.
    if asked.cpus.is_some() && allocation.enforced {
        arguments.push("--all-cpus".to_owned());
    }
    arguments
}

/// As shells have it.
fn ended_by(signal: Signal) -> ExitCode {
    u8::try_from(128 + signal.as_raw()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// A signal that came.
struct Incoming {
    signal: Signal,
    /// Whether the command got it as well.
    is_from_terminal: bool,
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Takes the signals that are to be passed on. Those that were ignored before (`nohup`) stay so.
fn signals() -> io::Result<mpsc::Receiver<Incoming>> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let (sender, receiver) = mpsc::channel(16);
    for (number, kind, may_be_a_key) in PASSED_ON {
        if ignored & (1 << (number.as_raw() - 1)) != 0 {
            continue;
        }
        let (mut incoming, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(async move {
            while incoming.recv().await.is_some() {
                let is_from_terminal = may_be_a_key && is_in_foreground();
                if sender.send(Incoming { signal: number, is_from_terminal }).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
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

async fn wait(mut child: Child, signals: &mut mpsc::Receiver<Incoming>) -> io::Result<ExitStatus> {
    // Until it has been waited for, the id is its own.
    let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    loop {
        tokio::select! {
            status = child.wait() => return status,
            Some(Incoming { signal, is_from_terminal }) = signals.recv() => {
                // It may have ended just now.
                let _ = pid.filter(|_| !is_from_terminal).map(|pid| kill_process(pid, signal));
            }
        }
    }
}

/// Releases at once what is not in use any more. What is, the daemon releases when its last process ends.
async fn release(control: &Server, allocation: &api::Allocation) {
    let events = Path::new(&allocation.directory).join("cgroup.events");
    for _ in 0..20 {
        // A cgroup that cannot be read is gone.
        let is_empty = fs::read_to_string(&events).map_or(true, |text| text.contains("populated 0"));
        if is_empty {
            match control.release(&allocation.name).await {
                Ok(()) => {}
                // The daemon was quicker.
                Err(ClientError::Refused(refusal)) if refusal.status == 404 => {}
                Err(error) => {
                    let line = format!("{}: not released yet: {error}", allocation.name);
                    eprintln!("numaward: {}", text::clean(&line));
                }
            }
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Reports in a line that a workload that runs is limited to the memory that is asked for, before it is. A limit that was given needs no
/// word.
pub(crate) fn report_limit(asked: &api::AllocationRequest) {
    if let Some(line) = limit(asked) {
        eprintln!("numaward: {}", text::clean(&line));
    }
}

fn limit(asked: &api::AllocationRequest) -> Option<String> {
    let memory = asked.memory.as_ref().filter(|_| asked.memory_limit.is_none())?;
    matches!(asked.target, api::Target::Unit(_) | api::Target::Cgroup(_)).then(|| {
        format!(
            "--memory {memory} also limits {} to {memory} (memory.max): above that, the kernel reclaims its memory, and kills its \
             processes if that is not enough. --memory-limit sets a higher limit",
            asked.name
        )
    })
}

/// Reports in a line how exclusive the CPUs of an allocation are, unless others are kept off them.
pub(crate) async fn report_others(server: &Server, allocation: &api::Allocation) {
    if allocation.cpus.is_empty() {
        return;
    }
    // What is promised is given, whether this can be asked or not.
    let Ok(api::Allocations { enforcement, .. }) = server.allocations().await else { return };
    if let Some(line) = others(allocation, &enforcement) {
        eprintln!("numaward: {}", text::clean(&line));
    }
}

fn others(allocation: &api::Allocation, enforcement: &api::Enforcement) -> Option<String> {
    let cpus = &allocation.cpus;
    let herding = &enforcement.herding;
    if !allocation.enforced {
        return Some(format!(
            "CPUs {cpus} are not written to the kernel: enforcement.mode of the configuration is not on"
        ));
    }
    if herding.mode != api::EnforcementMode::On {
        let mode = if herding.mode == api::EnforcementMode::Off { "off" } else { "dry-run" };
        return Some(format!(
            "other processes on CPUs {cpus} are reported, not moved off: enforcement.herding.mode of the configuration is \
             {mode} (--isolate moves them off for this workload)"
        ));
    }
    let refused = herding.cgroups.iter().filter(|of| of.state == api::ConfinementState::Refused).count();
    let in_root = herding.processes_in_root.unwrap_or(0);
    (refused > 0 || in_root > 0).then(|| {
        format!(
            "{refused} cgroups and {in_root} processes of the root cgroup may still run on CPUs {cpus}: they cannot be moved \
             off (numaward status has the reasons)"
        )
    })
}

/// Moves this process into a cgroup.
pub(crate) fn enter_cgroup(directory: &Path) -> anyhow::Result<()> {
    let procs = directory.join("cgroup.procs");
    // Opened without `create`: a cgroup that is gone must not become a file.
    fs::OpenOptions::new()
        .write(true)
        .open(&procs)
        .and_then(|mut file| io::Write::write_all(&mut file, b"0\n"))
        .with_context(|| format!("{}: cannot enter this cgroup", procs.display()))
}

/// Moves into a cgroup, takes a memory policy and, if `all_cpus`, all CPUs of the cgroup, and becomes a command. Returns only if that
/// fails.
pub(crate) fn enter(
    directory: &Path,
    spread: Option<&Spread>,
    all_cpus: bool,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    // Started as /proc/self/exe, it would be called `exe` wherever tasks are named.
    let _ = rustix::thread::set_name(c"numaward");
    enter_cgroup(directory)?;
    if let Some(spread) = spread {
        spread.set()?;
    }
    if all_cpus {
        affinity::reset_affinity(None).context("the affinity of this process cannot be reset")?;
    }
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

    #[tokio::test]
    async fn a_command_gets_signals_until_it_ends() {
        let (sender, mut signals) = mpsc::channel(2);
        sender.send(Incoming { signal: Signal::INT, is_from_terminal: true }).await.unwrap();
        sender.send(Incoming { signal: Signal::TERM, is_from_terminal: false }).await.unwrap();
        let child = process::Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(exit_code(wait(child, &mut signals).await.unwrap()), 143);
        let child = process::Command::new("sh").args(["-c", "exit 7"]).spawn().unwrap();
        assert_eq!(exit_code(wait(child, &mut signals).await.unwrap()), 7);
    }

    fn allocation(enforced: bool) -> api::Allocation {
        serde_json::from_value(serde_json::json!({
            "name": "a",
            "target": "exec",
            "cgroup": "/numaward/a",
            "directory": "/sys/fs/cgroup/numaward/a",
            "cpus": "2-3",
            "nodes": "1",
            "memory": [],
            "enforced": enforced,
            "settings": {},
            "drift": [],
        }))
        .unwrap()
    }

    #[test]
    fn limit_of_a_workload_that_runs_is_said() {
        let said = |target, memory_limit: Option<&str>| {
            let asked = api::AllocationRequest::new("db.service", target, "8Gi");
            limit(&api::AllocationRequest { memory_limit: memory_limit.map(str::to_owned), ..asked })
        };
        let unit = || api::Target::Unit("db.service".to_owned());
        let line = said(unit(), None).unwrap();
        assert!(line.starts_with("--memory 8Gi also limits db.service to 8Gi (memory.max)"), "{line}");
        assert!(line.contains("kills its processes"), "{line}");
        assert_eq!((said(unit(), Some("12Gi")), said(api::Target::Exec, None)), (None, None));
        assert_eq!(limit(&api::AllocationRequest::unpromised("db.service", unit())), None);
    }

    #[test]
    fn inherited_affinity_is_reset_if_cpus_were_asked_for_and_given() {
        let resets = |cpus: Option<u32>, enforced| {
            let asked = api::AllocationRequest {
                cpus: cpus.map(api::Cpus::whole),
                ..api::AllocationRequest::unpromised("a", api::Target::Exec)
            };
            enter_arguments(&asked, &allocation(enforced)).contains(&"--all-cpus".to_owned())
        };
        assert_eq!([resets(Some(2), true), resets(None, true), resets(Some(2), false)], [true, false, false]);
    }

    /// Enforcement in which others are kept off exclusive CPUs in this mode, but for so many cgroups and processes.
    fn keeps_off(
        mode: api::EnforcementMode,
        refused: usize,
        processes_in_root: Option<u64>,
    ) -> api::Enforcement {
        let cgroup = |state| api::ConfinedCgroup {
            cgroup: "/a".to_owned(),
            cpus: String::new(),
            state,
            reason: None,
            drift: Vec::new(),
        };
        let mut cgroups = vec![cgroup(api::ConfinementState::Confined)];
        cgroups.extend((0..refused).map(|_| cgroup(api::ConfinementState::Refused)));
        let herding = api::CpuIsolation { mode, cgroups, processes_in_root };
        api::Enforcement { mode: api::EnforcementMode::On, herding, ..api::Enforcement::default() }
    }

    #[test]
    fn whether_others_are_kept_off_is_said() {
        use api::EnforcementMode::{DryRun, Off, On};
        let said = |mode, refused, in_root| others(&allocation(true), &keeps_off(mode, refused, in_root));
        for (mode, name) in [(Off, "off"), (DryRun, "dry-run")] {
            let line = said(mode, 0, None).unwrap();
            let expected = format!(
                "other processes on CPUs 2-3 are reported, not moved off: enforcement.herding.mode of the configuration is {name} \
                 (--isolate moves them off for this workload)"
            );
            assert_eq!(line, expected);
        }
        // All others are kept off: there is nothing to say.
        assert_eq!(said(On, 0, None), None);
        assert_eq!(said(On, 0, Some(0)), None);
        let expected = |cgroups, processes| {
            Some(format!(
                "{cgroups} cgroups and {processes} processes of the root cgroup may still run on CPUs 2-3: they cannot be moved \
                 off (numaward status has the reasons)"
            ))
        };
        assert_eq!(said(On, 2, Some(1)), expected(2, 1));
        assert_eq!(said(On, 1, None), expected(1, 0));
        assert_eq!(said(On, 0, Some(3)), expected(0, 3));
        // What is not written at all is said first, whatever others are.
        for mode in [Off, DryRun, On] {
            assert_eq!(
                others(&allocation(false), &keeps_off(mode, 1, None)).unwrap(),
                "CPUs 2-3 are not written to the kernel: enforcement.mode of the configuration is not on"
            );
        }
    }

    #[test]
    fn a_cgroup_that_is_gone_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let error = enter(dir.path(), None, false, &["true".into()]).unwrap_err();
        assert!(error.to_string().contains("cannot enter this cgroup"), "{error:#}");
        assert!(!dir.path().join("cgroup.procs").exists());
    }
}

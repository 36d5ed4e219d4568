//! `numaward exec`: runs a command with a guarantee.
//!
//! # Problem
//! The command must run in its cgroup from its first instruction, so that no page is allocated outside the guarantee.
//!
//! # Algorithm
//! The daemon creates a cgroup for the guarantee. This program then starts itself again with the hidden subcommand
//! `enter`, which moves itself into the cgroup and executes the command. The parent forwards signals and waits. If the
//! parent is killed, the daemon releases the guarantee once the cgroup is empty.

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
    mempolicy::NodeMemoryPolicy,
    text,
};

// Exit codes as in env(1), chroot(1) and container engines: this program failed; the command cannot be executed; the
// command was not found.
pub(crate) const EXIT_FAILED: u8 = 125;
const EXIT_CANNOT_EXECUTE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// Signals that are forwarded, and whether a terminal's keys can send them. Such a signal from a terminal reaches the
/// command, too, and is not forwarded.
const FORWARDED_SIGNALS: [(Signal, SignalKind, bool); 6] = [
    (Signal::TERM, SignalKind::terminate(), false),
    (Signal::USR1, SignalKind::user_defined1(), false),
    (Signal::USR2, SignalKind::user_defined2(), false),
    (Signal::HUP, SignalKind::hangup(), true),
    (Signal::INT, SignalKind::interrupt(), true),
    (Signal::QUIT, SignalKind::quit(), true),
];

/// Runs the command and returns its exit code, or 128 plus the number of the signal that ended it.
pub(crate) async fn run(
    control: &Server,
    request: &api::AllocationRequest,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    let mut signals = forwarded_signals()?;
    // A parent that ignores SIGCHLD passes that on to its children, and the kernel would then discard the exit code.
    let _sigchld = signal(SignalKind::child())?;
    let allocation = tokio::select! {
        admitted = control.admit(request) => admitted?,
        // The daemon releases the guarantee, as the connection is closed.
        Some(ReceivedSignal { signal, .. }) = signals.recv() => return Ok(signal_exit_code(signal)),
    };
    warn_about_absent_nodes(&allocation);
    warn_about_shared_cpus(control, &allocation).await;
    let mut enter = process::Command::new("/proc/self/exe");
    enter.args(enter_arguments(request, &allocation)).arg("--").args(command);
    let status = match enter.spawn() {
        Ok(child) => wait(child, &mut signals).await,
        Err(error) => Err(error),
    };
    release(control, &allocation).await;
    let status = status.context("the command cannot be started")?;
    Ok(ExitCode::from(exit_code(status)))
}

/// Returns the arguments with which this program executes the command.
fn enter_arguments(request: &api::AllocationRequest, allocation: &api::Allocation) -> Vec<String> {
    let mut arguments = vec!["enter".to_owned(), allocation.directory.clone()];
    if let Some(policy) = request.placement.memory_policy {
        arguments.extend([
            "--spread".to_owned(),
            NodeMemoryPolicy::from_blocks(policy, &allocation.memory).to_string(),
        ]);
    }
    // If no CPUs were requested, the command keeps the affinity that it inherits.
    if request.cpus.is_some() && allocation.enforced {
        arguments.push("--all-cpus".to_owned());
    }
    arguments
}

/// Returns the exit code of a command that a signal ended, as shells do.
fn signal_exit_code(signal: Signal) -> ExitCode {
    u8::try_from(128 + signal.as_raw()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// A signal that this process received.
struct ReceivedSignal {
    signal: Signal,
    /// True if a terminal sent it, so that the command received it as well.
    is_from_terminal: bool,
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Receives the signals that are forwarded. Signals that were ignored before (`nohup`) stay ignored.
fn forwarded_signals() -> io::Result<mpsc::Receiver<ReceivedSignal>> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let (sender, receiver) = mpsc::channel(16);
    for (number, kind, is_key) in FORWARDED_SIGNALS {
        if ignored & (1 << (number.as_raw() - 1)) != 0 {
            continue;
        }
        let (mut incoming, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(async move {
            while incoming.recv().await.is_some() {
                let is_from_terminal = is_key && is_in_foreground();
                if sender.send(ReceivedSignal { signal: number, is_from_terminal }).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}

/// Returns whether this process group, and thus the command, receives the signals of a terminal's keys (proc(5)).
fn is_in_foreground() -> bool {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in brackets can contain any character.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let fields: Vec<&str> = rest.split(' ').collect();
    // The fields are: state, parent, process group, session, terminal, foreground process group of the terminal.
    matches!((fields.get(2), fields.get(5)), (Some(own), Some(foreground)) if own == foreground)
}

async fn wait(mut child: Child, signals: &mut mpsc::Receiver<ReceivedSignal>) -> io::Result<ExitStatus> {
    // The id is valid until the child has been waited for.
    let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    loop {
        tokio::select! {
            status = child.wait() => return status,
            Some(ReceivedSignal { signal, is_from_terminal }) = signals.recv() => {
                // The child may have ended just now.
                let _ = pid.filter(|_| !is_from_terminal).map(|pid| kill_process(pid, signal));
            }
        }
    }
}

/// Releases the guarantee if its cgroup is empty. Otherwise, the daemon releases it when the last process in it ends.
async fn release(control: &Server, allocation: &api::Allocation) {
    let events = Path::new(&allocation.directory).join("cgroup.events");
    for _ in 0..20 {
        // A cgroup that cannot be read does not exist any more.
        let is_empty = fs::read_to_string(&events).map_or(true, |text| text.contains("populated 0"));
        if is_empty {
            match control.release(&allocation.name).await {
                Ok(()) => {}
                // The daemon has already released it.
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

/// Warns that the guarantee limits a running workload to the guaranteed memory. Prints nothing if the request sets a
/// limit itself.
pub(crate) fn warn_about_memory_limit(request: &api::AllocationRequest) {
    if let Some(line) = memory_limit_warning(request) {
        eprintln!("numaward: {}", text::clean(&line));
    }
}

fn memory_limit_warning(request: &api::AllocationRequest) -> Option<String> {
    let memory = request.memory.as_ref().filter(|_| request.memory_limit.is_none())?;
    let knob = match request.target {
        api::Target::Unit(_) => "MemoryMax, memory.max",
        api::Target::Cgroup(_) => "memory.max",
        _ => return None,
    };
    let name = &request.name;
    Some(format!(
        "--memory {memory} also limits {name} to {memory} ({knob}): above that, the kernel reclaims its memory, and kills its \
         processes if that is not enough. --memory-limit sets a higher limit"
    ))
}

/// Warns of nodes that the request names and the machine does not have.
pub(crate) fn warn_about_absent_nodes(allocation: &api::Allocation) {
    if let Some(note) = allocation.explanation.as_ref().and_then(api::Explanation::absent_nodes_note) {
        eprintln!("numaward: {}", text::clean(&note));
    }
}

/// Warns if other processes can run on the exclusive CPUs of a guarantee.
pub(crate) async fn warn_about_shared_cpus(server: &Server, allocation: &api::Allocation) {
    if allocation.cpus.is_empty() {
        return;
    }
    // The guarantee holds, whether or not this request succeeds.
    let Ok(api::Allocations { enforcement, .. }) = server.allocations().await else { return };
    if let Some(line) = shared_cpus_warning(allocation, &enforcement) {
        eprintln!("numaward: {}", text::clean(&line));
    }
}

fn shared_cpus_warning(allocation: &api::Allocation, enforcement: &api::Enforcement) -> Option<String> {
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
    let refused =
        herding.cgroups.iter().filter(|confined| confined.state == api::ConfinementState::Refused).count();
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
    // Without `create`, so that no file is created if the cgroup does not exist.
    fs::OpenOptions::new()
        .write(true)
        .open(&procs)
        .and_then(|mut file| io::Write::write_all(&mut file, b"0\n"))
        .with_context(|| format!("{}: cannot enter this cgroup", procs.display()))
}

/// Moves this process into a cgroup, sets a memory policy and, if `all_cpus`, resets the affinity to all CPUs of the
/// cgroup; then executes a command. Returns only if that fails.
pub(crate) fn enter(
    directory: &Path,
    policy: Option<&NodeMemoryPolicy>,
    all_cpus: bool,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    // A process that was started as /proc/self/exe would otherwise be named `exe`.
    let _ = rustix::thread::set_name(c"numaward");
    enter_cgroup(directory)?;
    if let Some(policy) = policy {
        policy.apply()?;
    }
    if all_cpus {
        affinity::reset_affinity(None).context("the affinity of this process cannot be reset")?;
    }
    let (program, arguments) = command.split_first().context("no command was given")?;
    let error = Command::new(program).args(arguments).exec();
    eprintln!("numaward: {}: {error}", program.to_string_lossy());
    Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        EXIT_NOT_FOUND
    } else {
        EXIT_CANNOT_EXECUTE
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_exit_code_of_command() {
        for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
            let status = Command::new("sh").args(["-c", script]).status().unwrap();
            assert_eq!(exit_code(status), code, "{script}");
        }
    }

    #[tokio::test]
    async fn forwards_signals_to_command() {
        let (sender, mut signals) = mpsc::channel(2);
        sender.send(ReceivedSignal { signal: Signal::INT, is_from_terminal: true }).await.unwrap();
        sender.send(ReceivedSignal { signal: Signal::TERM, is_from_terminal: false }).await.unwrap();
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
    fn warns_about_implied_memory_limit() {
        let warning = |target, memory_limit: Option<&str>| {
            let request = api::AllocationRequest::new("db.service", target, "8Gi");
            memory_limit_warning(&api::AllocationRequest {
                memory_limit: memory_limit.map(str::to_owned),
                ..request
            })
        };
        let unit = || api::Target::Unit("db.service".to_owned());
        let line = warning(unit(), None).unwrap();
        assert!(
            line.starts_with("--memory 8Gi also limits db.service to 8Gi (MemoryMax, memory.max)"),
            "{line}"
        );
        assert!(line.contains("kills its processes"), "{line}");
        let line = warning(api::Target::Cgroup("/db".to_owned()), None).unwrap();
        assert!(line.contains("to 8Gi (memory.max)"), "{line}");
        assert_eq!((warning(unit(), Some("12Gi")), warning(api::Target::Exec, None)), (None, None));
        assert_eq!(
            memory_limit_warning(&api::AllocationRequest::without_guarantee("db.service", unit())),
            None
        );
    }

    #[test]
    fn resets_affinity_with_own_cpus() {
        let resets = |cpus: Option<u32>, enforced| {
            let request = api::AllocationRequest {
                cpus: cpus.map(api::Cpus::whole),
                ..api::AllocationRequest::without_guarantee("a", api::Target::Exec)
            };
            enter_arguments(&request, &allocation(enforced)).contains(&"--all-cpus".to_owned())
        };
        assert_eq!([resets(Some(2), true), resets(None, true), resets(Some(2), false)], [true, false, false]);
    }

    /// Enforcement with CPU isolation in a mode, and numbers of cgroups and processes that cannot be confined.
    fn isolation(
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
    fn warns_about_shared_cpus() {
        use api::EnforcementMode::{DryRun, Off, On};
        let warning = |mode, refused, in_root| {
            shared_cpus_warning(&allocation(true), &isolation(mode, refused, in_root))
        };
        for (mode, name) in [(Off, "off"), (DryRun, "dry-run")] {
            let line = warning(mode, 0, None).unwrap();
            let expected = format!(
                "other processes on CPUs 2-3 are reported, not moved off: enforcement.herding.mode of the configuration is {name} \
                 (--isolate moves them off for this workload)"
            );
            assert_eq!(line, expected);
        }
        // All other processes are off the CPUs: no warning.
        assert_eq!(warning(On, 0, None), None);
        assert_eq!(warning(On, 0, Some(0)), None);
        let expected = |cgroups, processes| {
            Some(format!(
                "{cgroups} cgroups and {processes} processes of the root cgroup may still run on CPUs 2-3: they cannot be moved \
                 off (numaward status has the reasons)"
            ))
        };
        assert_eq!(warning(On, 2, Some(1)), expected(2, 1));
        assert_eq!(warning(On, 1, None), expected(1, 0));
        assert_eq!(warning(On, 0, Some(3)), expected(0, 3));
        // A guarantee that is not enforced comes first, whatever the state of the isolation.
        for mode in [Off, DryRun, On] {
            assert_eq!(
                shared_cpus_warning(&allocation(false), &isolation(mode, 1, None)).unwrap(),
                "CPUs 2-3 are not written to the kernel: enforcement.mode of the configuration is not on"
            );
        }
    }

    #[test]
    fn does_not_create_missing_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let error = enter(dir.path(), None, false, &["true".into()]).unwrap_err();
        assert!(error.to_string().contains("cannot enter this cgroup"), "{error:#}");
        assert!(!dir.path().join("cgroup.procs").exists());
    }
}

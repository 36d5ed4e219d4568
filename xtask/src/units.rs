//! The unit and integration tests of the workspace, built once together with those for machines, and run in parallel.
//!
//! Cargo would run one program after the other, although most of them wait: together they use a fourth of a CPU.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::build::{self, BuiltProgram};
use crate::command;
use crate::report::{self, Times};

/// The time limit of a program of tests. The slowest takes less than a minute.
const MAX_SECONDS: &str = "600";
/// Exit code of `timeout` after it stopped its command.
const TIMEOUT_EXIT_CODE: i32 = 124;
/// Number of programs at once on each CPU.
const PROGRAMS_PER_CPU: usize = 3;
/// The programs that take longest, in this order: they start first where no earlier run has left times.
const LONGEST: [&str; 6] = [
    "userspace/control numaward_control",
    "userspace/daemon numaward_daemon",
    "userspace/probes host",
    "userspace/numaward record",
    "userspace/kube api",
    "userspace/http numaward_http",
];
/// Number of programs in the list of the slowest.
const MAX_SLOWEST: usize = 5;

/// Result of a program of tests.
struct ProgramOutcome {
    name: String,
    status: ExitStatus,
    took: Duration,
}

/// Builds and runs all programs of tests, and the tests in documentation, which need a CPU while the programs wait.
pub(crate) fn test() -> Result<()> {
    let tests = build::tests(&["--tests"])?;
    let mut cargo = build::tested_cargo("test")?;
    let (outcomes, documentation) = thread::scope(|scope| {
        let documentation = scope.spawn(|| cargo.arg("--doc").output());
        (run_all(tests), documentation.join())
    });
    let Ok(documentation) = documentation else { bail!("the thread that tests documentation panicked") };
    let documentation = documentation.context("cannot run cargo")?;
    io::stdout().write_all(&documentation.stdout)?;
    io::stderr().write_all(&documentation.stderr)?;
    check(outcomes?)?;
    ensure!(documentation.status.success(), "tests in documentation failed: see above");
    Ok(())
}

/// Builds and runs the integration tests of this name.
pub(crate) fn test_by_name(name: &str) -> Result<()> {
    build::tests_by_name(name)?.iter().try_for_each(|test| command::run(&mut command(test)))
}

/// Returns the program as cargo would run it, stopped after [`MAX_SECONDS`].
pub(crate) fn command(test: &BuiltProgram) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", MAX_SECONDS]).arg(&test.path);
    command.current_dir(&test.package).env("CARGO_MANIFEST_DIR", &test.package);
    command
}

/// Runs the programs, [`PROGRAMS_PER_CPU`] at a time; those that took longest in the last run come first. The output of
/// each is printed at its end.
fn run_all(mut tests: Vec<BuiltProgram>) -> Result<Vec<ProgramOutcome>> {
    let target = build::target_directory()?;
    let logs = target.join("test-logs/unit");
    fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
    let mut times = Times::read(&target);
    tests.sort_by_key(|test| {
        let name = name(test);
        let time = times.get(&key(&name)).unwrap_or(Duration::MAX);
        let place = LONGEST.iter().position(|long| *long == name).unwrap_or(LONGEST.len());
        (std::cmp::Reverse(time), place)
    });
    let waiting = Mutex::new(VecDeque::from(tests));
    let outcomes = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(test) = next else { return Ok(()) };
            let outcome = run(&test, &logs)?;
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
        }
    };
    let slots = thread::available_parallelism()?.get() * PROGRAMS_PER_CPU;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..slots).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => bail!("a thread that runs tests panicked"),
        })
    })?;
    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    for outcome in outcomes.iter().filter(|outcome| outcome.status.success()) {
        times.set(key(&outcome.name), outcome.took);
    }
    times.write()?;
    Ok(outcomes)
}

/// Returns the key of a program's time.
fn key(name: &str) -> String {
    format!("unit {name}")
}

/// Returns the package and the target, without the hash that cargo adds.
fn name(test: &BuiltProgram) -> String {
    let package = test.package.strip_prefix(command::root()).unwrap_or(&test.package);
    let target = test.name.rsplit_once('-').map_or(test.name.as_str(), |(name, _)| name);
    format!("{} {target}", package.display())
}

fn run(test: &BuiltProgram, logs: &Path) -> Result<ProgramOutcome> {
    let name = name(test);
    let path = logs.join(format!("{}.log", name.replace(['/', ' '], "-")));
    let log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let started = Instant::now();
    let mut command = command(test);
    command.stdin(Stdio::null()).stderr(log.try_clone()?).stdout(log);
    let status = command.status().with_context(|| format!("cannot run {}", test.path.display()))?;
    let took = started.elapsed();
    let printed = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut out = io::stdout().lock();
    writeln!(out, "\n=== {name}: {} s", took.as_secs())?;
    out.write_all(&printed)?;
    Ok(ProgramOutcome { name, status, took })
}

/// Prints the slowest programs, and fails if one failed.
fn check(mut outcomes: Vec<ProgramOutcome>) -> Result<()> {
    outcomes.sort_by_key(|outcome| std::cmp::Reverse(outcome.took));
    println!("\nslowest programs of tests:");
    for ProgramOutcome { name, took, .. } in outcomes.iter().take(MAX_SLOWEST) {
        println!("{:>6}  {name}", report::spell(*took));
    }
    ensure!(!outcomes.is_empty(), "there are no tests");
    let failed: Vec<_> = outcomes.iter().filter(|outcome| !outcome.status.success()).collect();
    for ProgramOutcome { name, status, .. } in &failed {
        if status.code() == Some(TIMEOUT_EXIT_CODE) {
            eprintln!("FAILED: {name}: stopped after {MAX_SECONDS} s; a test without a result hangs");
        } else {
            eprintln!("FAILED: {name} ({status})");
        }
    }
    ensure!(failed.is_empty(), "{} of {} programs of tests failed", failed.len(), outcomes.len());
    println!("{} programs of tests passed", outcomes.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn outcome(script: &str) -> ProgramOutcome {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program-0123");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let package = folder.path().to_owned();
        run(&BuiltProgram { name: "program-0123".to_owned(), path, package, is_test: true }, folder.path())
            .unwrap()
    }

    #[test]
    fn exit_status_decides() {
        check(vec![outcome("exit 0")]).unwrap();
        assert!(check(vec![outcome("exit 0"), outcome("exit 101")]).is_err());
        assert!(check(Vec::new()).is_err());
    }

    #[test]
    fn program_runs_in_package_folder() {
        let outcome = outcome("[ \"$PWD\" = \"$CARGO_MANIFEST_DIR\" ]");
        assert!(outcome.status.success());
        assert!(outcome.name.ends_with(" program"), "{}", outcome.name);
    }
}

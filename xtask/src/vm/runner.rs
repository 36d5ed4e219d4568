//! Runs end-to-end tests, each in a separate process, one per CPU at a time, and one more on a kernel that has no virtual
//! time: such a machine sleeps for most of its test.
//!
//! A separate process gives each test a log, a time and a memory of its own. Tests of all kernels share one queue, so
//! that no CPU waits for the last test of a kernel. The longest tests of the last run come first, without one those of the
//! table.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use numaward_vm::{Arch, Clock};

use super::lanes;
use crate::{build, command, report};

/// A test on one kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) test: &'static str,
    pub(crate) kernel: &'static str,
    /// If true, the test runs in full, although this takes minutes.
    pub(crate) is_long: bool,
    /// Number of the repetition, from 1 on.
    pub(crate) round: u32,
}

impl Job {
    /// Returns the key of its time.
    fn key(&self) -> String {
        let length = if self.is_long { " in full" } else { "" };
        format!("{} on {}{length}", self.test, self.kernel)
    }

    fn log(&self, folder: &Path) -> PathBuf {
        let round = if self.round > 1 { format!("-{}", self.round) } else { String::new() };
        folder.join(self.kernel).join(format!("{}{round}.log", self.test.replace("::", "-")))
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobVerdict {
    Passed,
    Failed,
    /// A requirement of the test is missing.
    Skipped,
}

/// Result of a job.
#[derive(Debug)]
pub(crate) struct JobOutcome {
    pub(crate) job: Job,
    pub(crate) verdict: JobVerdict,
    pub(crate) took: Duration,
    /// Number of machines that did not boot and were started again.
    pub(crate) restarts: usize,
}

/// Settings of the runs.
pub(crate) struct Runner {
    pub(crate) arch: Arch,
    /// Program of the tests.
    pub(crate) program: PathBuf,
    /// Variables for the tests.
    pub(crate) variables: BTreeMap<&'static str, String>,
    /// Number of tests at the same time.
    pub(crate) slots: usize,
}

/// Jobs that wait, and the state that the progress line shows.
struct Queue {
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    outcomes: Vec<JobOutcome>,
}

impl Runner {
    /// Runs all jobs, even after one has failed.
    pub(crate) fn run(&self, jobs: Vec<Job>) -> Result<Vec<JobOutcome>> {
        let target = build::target_directory()?;
        let logs = target.join("test-logs").join(self.arch.name());
        let mut times = report::Times::read(&target);
        let total = jobs.len();
        let mut waiting = jobs;
        waiting.sort_by_key(|job| {
            let time = times.get(&job.key()).unwrap_or(Duration::MAX);
            (job.round, std::cmp::Reverse(time), lanes::place(job.test))
        });
        let known: BTreeMap<_, _> = waiting.iter().map(|job| (job.key(), times.get(&job.key()))).collect();
        let queue = Mutex::new(Queue { waiting: waiting.into(), running: Vec::new(), outcomes: Vec::new() });
        let started = Instant::now();
        let work = |clock| self.work(clock, &queue, &logs, &known, total, started);
        thread::scope(|scope| {
            let mut workers: Vec<_> =
                (0..self.slots).map(|_| scope.spawn(|| work(Clock::Instructions))).collect();
            if self.arch == Arch::Amd64 {
                workers.push(scope.spawn(|| work(Clock::RealTime)));
            }
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(_) => anyhow::bail!("a thread that runs tests panicked"),
            })
        })?;
        let queue = queue.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        for outcome in &queue.outcomes {
            if outcome.verdict == JobVerdict::Passed {
                times.set(outcome.job.key(), outcome.took);
            }
        }
        times.write()?;
        Ok(queue.outcomes)
    }

    fn work(
        &self,
        clock: Clock,
        queue: &Mutex<Queue>,
        logs: &Path,
        known: &BTreeMap<String, Option<Duration>>,
        total: usize,
        started: Instant,
    ) -> Result<()> {
        let lock = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        loop {
            let job = {
                let mut queue = lock();
                let Some(job) = self.next(&mut queue.waiting, clock) else { return Ok(()) };
                queue.running.push(job.clone());
                job
            };
            let outcome = self.attend(&job, &job.log(logs))?;
            let mut queue = lock();
            queue.running.retain(|running| *running != job);
            let text = fs::read(job.log(logs)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let word = match outcome.verdict {
                JobVerdict::Passed => "ok",
                JobVerdict::Failed => "FAILED",
                JobVerdict::Skipped => "skipped",
            };
            let reason = match outcome.verdict {
                JobVerdict::Skipped => {
                    skip_reason(&text).map_or_else(String::new, |reason| format!(": {reason}"))
                }
                _ => String::new(),
            };
            let left = queue
                .waiting
                .iter()
                .chain(&queue.running)
                .map(|job| known.get(&job.key()).copied().flatten());
            let left = report::time_left(left, self.slots);
            println!(
                "{word:<7} {job}{reason}: {} s  ({} of {total}, {} s so far{left})",
                outcome.took.as_secs(),
                queue.outcomes.len() + 1,
                started.elapsed().as_secs(),
            );
            if outcome.verdict == JobVerdict::Failed {
                println!("{}", report::excerpt(&text));
                println!("  all of it: {}", job.log(logs).display());
                println!("  again:     {}", self.command_for(&job));
            }
            queue.outcomes.push(outcome);
        }
    }

    /// Returns the next job for a worker of machines with this clock.
    fn next(&self, waiting: &mut VecDeque<Job>, clock: Clock) -> Option<Job> {
        match waiting.iter().position(|job| Clock::of_kernel(self.arch, job.kernel) == clock) {
            Some(place) => waiting.remove(place),
            None if clock == Clock::RealTime => None,
            None => waiting.pop_front(),
        }
    }

    /// Returns the command that repeats a single job.
    fn command_for(&self, job: &Job) -> String {
        let arch = if self.arch == Arch::Amd64 { String::new() } else { format!(" --arch {}", self.arch) };
        let full = if job.is_long { " --full" } else { "" };
        format!("cargo xtask vm test {} --kernel {}{arch}{full}", job.test, job.kernel)
    }

    fn attend(&self, job: &Job, log: &Path) -> Result<JobOutcome> {
        let started = Instant::now();
        let status = self.start(job, log)?.wait().with_context(|| format!("cannot wait for {job}"))?;
        let text = fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
        let text = String::from_utf8_lossy(&text);
        let verdict = match (status.success(), skip_reason(&text)) {
            (false, _) => JobVerdict::Failed,
            (true, Some(_)) => JobVerdict::Skipped,
            (true, None) => JobVerdict::Passed,
        };
        let restarts = text.lines().filter(|line| line.contains(numaward_vm::RESTARTED)).count();
        Ok(JobOutcome { job: job.clone(), verdict, took: started.elapsed(), restarts })
    }

    fn start(&self, job: &Job, log: &Path) -> Result<Child> {
        if let Some(folder) = log.parent() {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new("setpriv");
        // The machines end with the test, and the test with this program.
        command.args(["--pdeathsig", "TERM"]).arg(&self.program).args(["--exact", job.test, "--nocapture"]);
        command.current_dir(command::root().join("tests")).envs(&self.variables);
        command
            .env("RUST_BACKTRACE", "0")
            .env("NUMAWARD_VM_KERNEL", job.kernel)
            .env("NUMAWARD_VM_SLOW", job.is_long.to_string());
        command.stdin(Stdio::null()).stderr(log.try_clone()?).stdout(log);
        command.spawn().with_context(|| format!("cannot run {job}"))
    }
}

fn skip_reason(log: &str) -> Option<&str> {
    log.lines().find_map(|line| line.strip_prefix("skipped: "))
}

/// Processes that keep CPUs busy, until the value is dropped.
pub(crate) struct CpuLoad(Vec<Child>);

impl CpuLoad {
    /// Starts one process per CPU.
    pub(crate) fn start() -> Result<Self> {
        let count = thread::available_parallelism()?.get();
        let busy = || {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "sh", "-c", "while :; do :; done"]);
            command.spawn().context("cannot start a busy process")
        };
        Ok(Self((0..count).map(|_| busy()).collect::<Result<_>>()?))
    }
}

impl Drop for CpuLoad {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> Vec<JobOutcome> {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let runner = Runner { arch: Arch::Amd64, program, variables: BTreeMap::new(), slots: 1 };
        let job = Job { test: "runner::test", kernel: "none", is_long: false, round: 1 };
        let log = folder.path().join("log");
        vec![runner.attend(&job, &log).unwrap()]
    }

    #[test]
    fn verdict_follows_exit_status_and_skip_line() {
        for (script, verdict, restarts) in [
            ("exit 0", JobVerdict::Passed, 0),
            ("exit 101", JobVerdict::Failed, 0),
            ("echo 'skipped: no QEMU'", JobVerdict::Skipped, 0),
            ("echo 'skipped: no QEMU'; exit 1", JobVerdict::Failed, 0),
            (&*format!("echo 'x {} y'", numaward_vm::RESTARTED), JobVerdict::Passed, 1),
        ] {
            let outcome = run(script).pop().unwrap();
            assert_eq!((outcome.verdict, outcome.restarts), (verdict, restarts), "{script}");
        }
    }

    #[test]
    fn one_more_worker_takes_machines_in_real_time() {
        let runner =
            Runner { arch: Arch::Amd64, program: PathBuf::new(), variables: BTreeMap::new(), slots: 1 };
        let job = |kernel| Job { test: "runner::test", kernel, is_long: false, round: 1 };
        let mut waiting = VecDeque::from(["6.1", "6.12", "6.1", "latest"].map(job));
        let mut next = |clock| runner.next(&mut waiting, clock).map(|job| job.kernel);
        assert_eq!(next(Clock::Instructions), Some("6.12"));
        assert_eq!(next(Clock::RealTime), Some("6.1"));
        assert_eq!(next(Clock::Instructions), Some("latest"));
        assert_eq!(next(Clock::Instructions), Some("6.1"), "no other machine is left");
        assert_eq!(next(Clock::RealTime), None);
        assert_eq!(next(Clock::Instructions), None);
    }

    #[test]
    fn test_gets_name_and_kernel() {
        let script = r#"[ "$1 $2" = "--exact runner::test" ] && [ "$NUMAWARD_VM_KERNEL" = none ]"#;
        assert_eq!(run(script)[0].verdict, JobVerdict::Passed);
    }

    #[test]
    fn load_ends_on_drop() {
        let load = CpuLoad::start().unwrap();
        let id = load.0[0].id();
        assert!(Path::new(&format!("/proc/{id}")).exists());
        drop(load);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }
}

//! `cargo xtask bench idle`: what the daemon takes while nothing happens.
//!
//! The program that users get runs on this host with its defaults, but on a free port and with its state in a folder of its own.
//! After a while to settle, its CPU time and memory are read from /proc as often as it takes. On a busy host
//! workloads come and go, and the daemon follows them: the least busy host gives the truest figure.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::build;
use crate::setup::{self, Part};

/// Of one CPU.
const CPU_BUDGET_PERCENT: f64 = 0.1;
const MEMORY_BUDGET_KIB: u64 = 32 << 10;
/// Until the first reading of all workloads is over.
const SETTLE: Duration = Duration::from_secs(5);

/// Ends with it, however this ends.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn measure(span: Duration) -> Result<ExitCode> {
    setup::ensure(&[Part::Ebpf])?;
    let programs = build::programs(&["numaward"], build::DIST)?;
    let (_, path) = programs.into_iter().next().context("cargo has built no program `numaward`")?;
    let folder = tempfile::tempdir().context("cannot make a folder for the daemon")?;
    let mut child = Command::new(&path)
        .args(["run", "--listen", "127.0.0.1:0", "--log-format", "json"])
        .env("NUMAWARD_STATE_DIRECTORY", folder.path().join("state"))
        .env("NUMAWARD_CONTROL_SOCKET", folder.path().join("control.sock"))
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", path.display()))?;
    let log = child.stderr.take().context("the daemon has no log")?;
    let mut daemon = Daemon(child);
    let mut lines = BufReader::new(log).lines();
    let is_ready = lines.by_ref().map_while(Result::ok).any(|line| {
        println!("{line}");
        line.contains("\"message\":\"ready\"")
    });
    ensure!(is_ready, "the daemon ended before it was ready; its log is above");
    // It would wait for a reader of its log.
    thread::spawn(move || lines.for_each(drop));
    thread::sleep(SETTLE);

    let (start, before) = (Instant::now(), Usage::read(daemon.0.id())?);
    thread::sleep(span);
    let (took, after) = (start.elapsed(), Usage::read(daemon.0.id())?);
    ensure!(daemon.0.try_wait()?.is_none(), "the daemon ended meanwhile");

    let busy = after.cpu.saturating_sub(before.cpu);
    let percent = 100.0 * busy.as_secs_f64() / took.as_secs_f64();
    let kept = percent < CPU_BUDGET_PERCENT && after.resident_kib < MEMORY_BUDGET_KIB;
    println!("CPU: {percent:.3} % of one ({busy:.1?} in {took:.1?}); budget {CPU_BUDGET_PERCENT} %");
    println!(
        "memory: {} KiB resident, of it {} KiB its own; budget {MEMORY_BUDGET_KIB} KiB",
        after.resident_kib, after.own_kib
    );
    println!("budget: {}", if kept { "kept" } else { "EXCEEDED" });
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Usage {
    cpu: Duration,
    resident_kib: u64,
    /// Not shared with files, as the program itself is.
    own_kib: u64,
}

impl Usage {
    fn read(process: u32) -> Result<Self> {
        let read = |file: String| fs::read_to_string(&file).with_context(|| format!("cannot read {file}"));
        // Documentation/scheduler/sched-stats.rst: nanoseconds on a CPU, first; of each thread.
        let mut nanoseconds = 0;
        for thread in fs::read_dir(format!("/proc/{process}/task")).context("the daemon is gone")? {
            let path = thread?.path().join("schedstat").display().to_string();
            let stat = read(path)?;
            nanoseconds += stat.split(' ').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        }
        let status = read(format!("/proc/{process}/status"))?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok())
                .with_context(|| format!("/proc/{process}/status has no {key}"))
        };
        Ok(Self {
            cpu: Duration::from_nanos(nanoseconds),
            resident_kib: kib("VmRSS:")?,
            own_kib: kib("RssAnon:")?,
        })
    }
}

//! `cargo xtask bench idle`: measures the CPU time and memory of an idle daemon.
//!
//! The released program runs on this host with its defaults, except for a free port and a separate folder for its
//! state. After a warm-up, its CPU time and memory are read from /proc repeatedly. On a busy host workloads begin and
//! end, and the daemon follows them: the result is most accurate on an idle host.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use numaward_vm::Arch;

use crate::setup::{self, Part};
use crate::{budgets, build};

/// Budget in percent of one CPU.
const CPU_BUDGET_PERCENT: f64 = 0.1;
const MEMORY_BUDGET_MIB: f64 = 24.0;
/// The duration of the warm-up, in which the daemon reads all workloads for the first time.
const WARM_UP: Duration = Duration::from_secs(5);

/// The daemon's process, which is killed on drop.
struct IdleDaemon(Child);

impl Drop for IdleDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn measure(span: Duration) -> Result<ExitCode> {
    setup::ensure(&[Part::Ebpf])?;
    let path = build::portable_program(Arch::of_host().context("no users have this processor")?, "numaward")?;
    let folder = tempfile::tempdir().context("cannot make a folder for the daemon")?;
    let mut child = Command::new(&path)
        .args(["run", "--listen", "127.0.0.1:0", "--log-format", "json"])
        .env("NUMAWARD_STATE_DIRECTORY", folder.path().join("state"))
        .env("NUMAWARD_CONTROL_SOCKET", folder.path().join("control.sock"))
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", path.display()))?;
    let log = child.stderr.take().context("the daemon has no log")?;
    let mut daemon = IdleDaemon(child);
    let mut lines = BufReader::new(log).lines();
    let is_ready = lines.by_ref().map_while(Result::ok).any(|line| {
        println!("{line}");
        line.contains("\"message\":\"ready\"")
    });
    ensure!(is_ready, "the daemon ended before it was ready; its log is above");
    // The daemon would wait for a reader of its log.
    thread::spawn(move || lines.for_each(drop));
    thread::sleep(WARM_UP);

    let (start, before) = (Instant::now(), Usage::read(daemon.0.id())?);
    thread::sleep(span);
    let (took, after) = (start.elapsed(), Usage::read(daemon.0.id())?);
    ensure!(daemon.0.try_wait()?.is_none(), "the daemon ended meanwhile");

    let percent_of = |busy: Duration| 100.0 * busy.as_secs_f64() / took.as_secs_f64();
    let mut busy = Duration::ZERO;
    for (name, total) in after.threads {
        let since = total.saturating_sub(before.threads.get(&name).copied().unwrap_or_default());
        println!("thread {name}: {:.4} % of a CPU", percent_of(since));
        busy += since;
    }
    let percent = percent_of(busy);
    let kept = percent <= CPU_BUDGET_PERCENT && after.resident_mib <= MEMORY_BUDGET_MIB;
    println!("CPU: {percent:.3} % of one ({busy:.1?} in {took:.1?})");
    println!("memory: {:.1} MiB resident, of it {:.1} MiB its own", after.resident_mib, after.own_mib);
    budgets::print("idle/cpu", percent, "%", CPU_BUDGET_PERCENT);
    budgets::print("idle/memory", after.resident_mib, "MiB", MEMORY_BUDGET_MIB);
    println!("{}", if kept { "kept" } else { "EXCEEDED" });
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Usage {
    /// CPU time by the names of the threads.
    threads: BTreeMap<String, Duration>,
    resident_mib: f64,
    /// Memory that is not shared with files, such as the program itself.
    own_mib: f64,
}

impl Usage {
    fn read(process: u32) -> Result<Self> {
        let read = |file: String| fs::read_to_string(&file).with_context(|| format!("cannot read {file}"));
        // Documentation/scheduler/sched-stats.rst: the first number is the nanoseconds of a thread on a CPU.
        let mut threads = BTreeMap::<String, Duration>::new();
        for thread in fs::read_dir(format!("/proc/{process}/task")).context("the daemon is gone")? {
            let thread = thread?.path();
            let stat = read(thread.join("schedstat").display().to_string())?;
            let name = read(thread.join("comm").display().to_string())?;
            let nanoseconds = stat.split(' ').next().and_then(|number| number.parse().ok());
            let nanoseconds = nanoseconds.with_context(|| format!("{} has no CPU time", thread.display()))?;
            *threads.entry(name.trim_end().to_owned()).or_default() += Duration::from_nanos(nanoseconds);
        }
        let status = read(format!("/proc/{process}/status"))?;
        let mib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let kib: Option<f64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
            kib.map(|kib| kib / 1024.0).with_context(|| format!("/proc/{process}/status has no {key}"))
        };
        Ok(Self { threads, resident_mib: mib("VmRSS:")?, own_mib: mib("RssAnon:")? })
    }
}

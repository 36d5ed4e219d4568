//! Time from a request to its answer, which the daemon sends after the last knob is written, with 1 to 1,000 guaranteed workloads.
//!
//! `cargo bench -p numaward-daemon --bench enforce [-- --real]`, or `cargo xtask bench enforce [--vm]`.
//!
//! The default is a synthetic machine and a tree of plain files in memory. It measures the engine, the ledger and the plans, but not the
//! kernel's time for a write: once with the ledger in memory, and once on the disk of the temporary directory, where each admission syncs
//! the ledger. It also prints the CPU time of the maintenance of all workloads while idle. With `--real`, it uses the cgroup v2 hierarchy
//! of this host, with as many workloads as it has CPUs for; in an emulated machine, the times are not meaningful.
//!
//! The exit status is 1 if the budget of the design is exceeded: 10 ms for 99 of 100 admissions.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    fs, io,
    path::Path,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::Hierarchy;
use numaward_guarantee::{error::AdmissionError, request::Request};
use numaward_topology::{Bytes, Machine};

use self::support::{GuaranteeDaemon, TempHost};

const BUDGET: Duration = Duration::from_millis(10);
const WORKLOADS: usize = 1000;
/// The upper bounds of the ranges of workloads for which times are reported.
const RANGE_ENDS: [usize; 4] = [1, 10, 100, WORKLOADS];
/// The number of admissions that are measured on a real hierarchy.
const REAL_SAMPLES: usize = 200;

fn build_request(name: &str, cgroup: &str, memory: &str) -> Request {
    Request::new(&serde_json::from_str(&support::request(name, cgroup, 1, memory)).unwrap()).unwrap()
}

async fn admit(daemon: &GuaranteeDaemon, request: Request) -> Result<Duration, AdmissionError> {
    let start = Instant::now();
    daemon.reconciler.admit(request, false).await?;
    Ok(start.elapsed())
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort();
    times[(times.len() * percent).div_ceil(100).max(1) - 1]
}

/// Prints the times and returns the 99th percentile.
fn report(what: &str, times: &mut [Duration]) -> Duration {
    let (median, high) = (percentile(times, 50), percentile(times, 99));
    let verdict = if high < BUDGET { "" } else { "  EXCEEDED" };
    println!("{what:<24} p50 {median:>9.1?}  p99 {high:>9.1?}  of {}{verdict}", times.len());
    high
}

/// Prints a 99th percentile in the format of `cargo xtask bench budgets`. Returns true if it is within the budget.
fn check(name: &str, high: Duration) -> bool {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!("budget: enforce/{name} {:.4} ms {}", ms(high), ms(BUDGET));
    high < BUDGET
}

/// Admits one workload after the other on a synthetic machine. Returns the highest 99th percentile.
async fn measure_synthetic(ledger: &Path, location: &str) -> Duration {
    // 8 nodes with 144 CPUs each: room for 1,000 exclusive ones.
    let machine = Machine::builder().nodes(8).sockets(8).cores_per_node(144).memory(Bytes::gib(256));
    let host = TempHost::new(machine.build().unwrap());
    for workload in 0..WORKLOADS {
        host.cgroup(&format!("w{workload}"));
    }
    let daemon = host.start_on(&Hierarchy::at(&host.root()), ledger);
    let mut times = Vec::with_capacity(WORKLOADS);
    for workload in 0..WORKLOADS {
        let request = build_request(&format!("w{workload}"), &format!("/w{workload}"), "64Mi");
        times.push(admit(&daemon, request).await.unwrap());
        apply_cpuset(&host, workload);
    }
    println!("8 nodes, 1,152 CPUs, plain files in memory, ledger {location}:");
    let mut highest = Duration::ZERO;
    let mut from = 0;
    for to in RANGE_ENDS {
        highest = highest.max(report(&format!("  workloads {}-{to}", from + 1), &mut times[from..to]));
        from = to;
    }
    print_idle_time();
    highest
}

/// Updates the effective sets as the kernel does after a write; otherwise, the daemon would report drift.
fn apply_cpuset(host: &TempHost, workload: usize) {
    let dir = host.root().join(format!("w{workload}"));
    for knob in ["cpuset.cpus", "cpuset.mems"] {
        fs::copy(dir.join(knob), dir.join(format!("{knob}.effective"))).unwrap();
    }
}

/// Prints the CPU time of the maintenance of all workloads while idle.
fn print_idle_time() {
    const MEASURE_TIME: Duration = Duration::from_secs(10);
    let used = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::try_from(time).unwrap()
    };
    // Work that is still pending ends first.
    thread::sleep(MEASURE_TIME / 5);
    let before = used();
    thread::sleep(MEASURE_TIME);
    let busy = used().saturating_sub(before);
    let percent = 100.0 * busy.as_secs_f64() / MEASURE_TIME.as_secs_f64();
    println!("  idle, with all of them   {percent:.3} % of one CPU ({busy:.1?} in {MEASURE_TIME:?})");
}

/// Admits as many workloads as fit on this host, repeatedly.
async fn measure_real() -> io::Result<bool> {
    let machine = numaward_topology::sysfs::read(Path::new("/")).map_err(io::Error::other)?;
    let hierarchy = Hierarchy::open().map_err(io::Error::other)?;
    let (nodes, cpus) = (machine.nodes.len(), machine.possible_cpus.len());
    let parent = hierarchy.root().join("numaward-bench");
    fs::create_dir(&parent)?;
    let names: Vec<String> = (0..cpus).map(|cpu| format!("w{cpu}")).collect();
    let measured = measure(machine, &hierarchy, &parent, &names).await;
    for name in &names {
        let _ = fs::remove_dir(parent.join(name));
    }
    let _ = fs::remove_dir(&parent);
    let (mut times, most) = measured?;
    println!("{nodes} nodes, {cpus} CPUs, {}, ledger in memory, {most} workloads at most:", parent.display());
    Ok(check("real", report("  this host", &mut times)))
}

async fn measure(
    machine: Machine,
    hierarchy: &Hierarchy,
    parent: &Path,
    names: &[String],
) -> io::Result<(Vec<Duration>, usize)> {
    for name in names {
        fs::create_dir(parent.join(name))?;
    }
    let host = TempHost::new(machine);
    let daemon = host.start_on(&Hierarchy::at(hierarchy.root()), &host.dir.path().join("state"));
    let (mut times, mut most) = (Vec::new(), 0);
    while times.len() < REAL_SAMPLES {
        let mut held = Vec::new();
        for name in names {
            let request = build_request(name, &format!("/numaward-bench/{name}"), "16Mi");
            match admit(&daemon, request).await {
                Ok(time) => times.push(time),
                // No more workloads fit.
                Err(AdmissionError::Rejected(..)) => break,
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
            held.push(name);
        }
        if held.is_empty() {
            return Err(io::Error::other("this host has no CPU that could become exclusive"));
        }
        most = most.max(held.len());
        for name in held {
            daemon
                .reconciler
                .release(name.clone())
                .await
                .map_err(|error| io::Error::other(error.to_string()))?;
        }
    }
    Ok((times, most))
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let kept = if std::env::args().any(|argument| argument == "--real") {
        match runtime.block_on(measure_real()) {
            Ok(kept) => kept,
            Err(error) => {
                eprintln!("this host's hierarchy cannot be measured: {error}");
                return ExitCode::FAILURE;
            }
        }
    } else {
        let (memory, disk) = (Path::new("/dev/shm"), tempfile::tempdir().unwrap());
        let memory = tempfile::tempdir_in(if memory.is_dir() { memory } else { disk.path() }).unwrap();
        let in_memory = runtime.block_on(measure_synthetic(memory.path(), "in memory"));
        let location = format!("below {}", std::env::temp_dir().display());
        let on_disk = runtime.block_on(measure_synthetic(disk.path(), &location));
        check("memory", in_memory) & check("disk", on_disk)
    };
    println!("{BUDGET:?} for 99 of 100: {}", if kept { "kept" } else { "EXCEEDED" });
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

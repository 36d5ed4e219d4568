//! Many clients at once: admissions at a rate, clients that read the metrics each second, and clients that read one byte per second.
//!
//! `cargo bench -p numaward-daemon --bench load [-- NAME=NUMBER...]`, or `cargo xtask bench load`. Options and defaults:
//! - `seconds=60`: the duration.
//! - `rate=1000`: admissions per second, by `clients=64` clients.
//! - `scrapers=50`: clients that read the metrics each second.
//! - `slow=1000`: clients that read one byte per second, from `peers=40` addresses.
//! - `together=0`: 1 starts all readers at the same time.
//!
//! The daemon is a process of its own, without the probe of allocations, on a host of plain files in memory, so that the kernel's time for
//! a write is not measured. There is first a phase with admissions only, at a hundredth of the rate, and then one with all clients. The
//! exit status is 1 if a scrape fails, an admission is refused, less than 95 % of the rate is reached, the daemon uses more than 128 MiB,
//! or the 99th percentile of admissions is ten times that of the first phase or more. The clients share the CPUs with the daemon, so the
//! benchmark also prints the CPU time of the daemon and of its thread `guarantee`.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use self::support::{
    load::{Figures, Load, LoadPlan, cpu_time, percentile, resident},
    local_daemon::{DaemonProcess, HostDirectory, serve_if_requested},
};

const MEMORY_BUDGET_KIB: u64 = 128 << 10;
/// The factor to the 99th percentile of the first phase below which that of the second has to be.
const MAX_SLOWDOWN: u32 = 10;
/// The duration of the first phase, in seconds.
const FIRST_PHASE_SECONDS: u64 = 10;
/// The percentage of the configured admissions that has to be reached.
const MIN_ADMISSIONS_PERCENT: usize = 95;

fn option(name: &str, default: usize) -> usize {
    let is_given = |argument: String| argument.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    std::env::args().find_map(is_given).unwrap_or(default)
}

/// Runs a plan. Returns the results, and the peak of the daemon's resident memory in KiB.
async fn measure(
    plan: &LoadPlan,
    host: &Arc<HostDirectory>,
    daemon: &DaemonProcess,
    seconds: u64,
) -> (Figures, u64) {
    println!("{plan:?}");
    println!(
        "  s  admitted  refused       p50       p99   scrapes  failed       p99  slow served, closed  memory"
    );
    let (mut all, mut peak) = (Figures::default(), 0);
    let load = Load::start(plan, host, daemon.address);
    let started = Instant::now();
    for second in 1..=seconds {
        tokio::time::sleep(Duration::from_secs(second).saturating_sub(started.elapsed())).await;
        let now = resident(daemon.id()).unwrap();
        peak = peak.max(now);
        let mut figures = load.take();
        println!(
            "{second:>3} {:>9} {:>8} {:>9.1?} {:>9.1?} {:>9} {:>7} {:>9.1?} {:>12} {:>7} {:>7} KiB",
            figures.admissions.len(),
            figures.refused,
            percentile(&mut figures.admissions, 50),
            percentile(&mut figures.admissions, 99),
            figures.scrapes.len(),
            figures.failed_scrapes.len(),
            percentile(&mut figures.scrapes, 99),
            figures.slow_served,
            figures.slow_closed,
            now,
        );
        all.add(figures);
    }
    let last = load.end().await;
    all.add(Figures { admissions: Vec::new(), ..last });
    (all, peak)
}

/// CPU time of the daemon: of all threads, and of the thread `guarantee`.
struct DaemonCpuTime {
    all: Duration,
    guarantee: Duration,
}

impl DaemonCpuTime {
    fn read(daemon: &DaemonProcess) -> Self {
        let time = |thread| cpu_time(daemon.id(), thread).unwrap();
        Self { all: time(None), guarantee: time(Some("guarantee")) }
    }
}

fn main() -> ExitCode {
    if serve_if_requested() {
        return ExitCode::SUCCESS;
    }
    let plan = LoadPlan {
        clients: option("clients", 64),
        rate: u32::try_from(option("rate", 1000)).unwrap(),
        scrapers: option("scrapers", 50),
        // The default of Prometheus.
        scrape_timeout: Duration::from_secs(10),
        slow: option("slow", 1000),
        slow_peers: option("peers", 40),
        together: option("together", 0) != 0,
    };
    let seconds = option("seconds", 60) as u64;
    let expected = option("rate", 1000) * option("seconds", 60);
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let host = Arc::new(HostDirectory::new(dir.path()).unwrap());
    for client in 0..plan.clients {
        host.cgroup(&format!("w{client}")).unwrap();
    }
    let daemon = DaemonProcess::start(dir.path(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut alone, start) = runtime.block_on(async {
        let alone =
            LoadPlan { clients: 1, rate: (plan.rate / 100).max(1), scrapers: 0, slow: 0, ..plan.clone() };
        measure(&alone, &host, &daemon, FIRST_PHASE_SECONDS).await
    });
    let before = DaemonCpuTime::read(&daemon);
    let (mut all, peak) = runtime.block_on(measure(&plan, &host, &daemon, seconds));
    let spent = DaemonCpuTime::read(&daemon);
    let end = resident(daemon.id()).unwrap();

    let (idle, busy) = (percentile(&mut alone.admissions, 99), percentile(&mut all.admissions, 99));
    println!(
        "admissions: {} of {expected} in {seconds} s, {} refused; p50 {:.1?} p99 {busy:.1?}, alone p50 {:.1?} p99 {idle:.1?}",
        all.admissions.len(),
        all.refused,
        percentile(&mut all.admissions, 50),
        percentile(&mut alone.admissions, 50),
    );
    let admissions = all.admissions.len();
    println!(
        "CPU time of the daemon: {:.1?}, {:.1?} of it of guarantee: {:.0?} and {:.0?} for an admission and its release",
        spent.all.saturating_sub(before.all),
        spent.guarantee.saturating_sub(before.guarantee),
        spent.all.saturating_sub(before.all) / u32::try_from(admissions.max(1)).unwrap(),
        spent.guarantee.saturating_sub(before.guarantee) / u32::try_from(admissions.max(1)).unwrap(),
    );
    println!(
        "scrapes: {} whole, p99 {:.1?}, {} failed {:?}",
        all.scrapes.len(),
        percentile(&mut all.scrapes, 99),
        all.failed_scrapes.len(),
        all.failed_scrapes.first(),
    );
    println!("slow clients: {} times served, {} times closed at once", all.slow_served, all.slow_closed);
    println!("memory: {start} KiB alone, {peak} KiB at most, {end} KiB at the end");
    for error in &all.errors {
        println!("error: {error}");
    }
    let kept = all.failed_scrapes.is_empty()
        && all.errors.is_empty()
        && all.refused == 0
        && admissions * 100 >= expected * MIN_ADMISSIONS_PERCENT
        && peak < MEMORY_BUDGET_KIB
        && busy < idle * MAX_SLOWDOWN;
    println!("budget: {}", if kept { "kept" } else { "EXCEEDED" });
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

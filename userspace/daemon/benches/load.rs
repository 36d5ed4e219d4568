//! Many clients at once: admissions at a rate, clients that read the metrics each second, and clients that read a byte a
//! second.
//!
//! `cargo bench -p numaward-daemon --bench load [-- NAME=NUMBER...]`, or `cargo xtask bench load`. Names and defaults:
//! `seconds=60`, `rate=1000` admissions a second, `clients=64` that ask for them, `scrapers=50`, `slow=1000`,
//! `peers=40`: slow clients come from so many addresses, `together=0`: 1 has all that read begin in the same moment.
//!
//! The daemon is a process of its own, with all its parts but the probe of allocations, on a host of plain files in memory: what the kernel
//! takes for a write is not measured. First there are admissions alone, a hundredth as many; then all come. Exits with 1
//! if a scrape failed, if an admission was refused, if fewer than 95 % of the rate were reached, if the daemon took more than
//! 128 MiB, or if 99 of 100 admissions did not take less than ten times of what they take alone. The clients share the CPUs
//! with the daemon: how much CPU time it took, and its thread `guarantee` alone, is printed.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use self::support::{
    load::{Figures, Load, Plan, cpu_time, percentile, resident},
    whole::{Place, Process, serve_if_asked},
};

const MEMORY_BUDGET_KIB: u64 = 128 << 10;
const SLOWER: u32 = 10;
const ALONE: u64 = 10;
/// Of a hundred admissions that are to be, so many have to be reached.
const REACHED: usize = 95;

fn option(name: &str, default: usize) -> usize {
    let is_given = |argument: String| argument.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    std::env::args().find_map(is_given).unwrap_or(default)
}

/// Runs a plan for so many seconds; all that came of it, and the most memory that was resident.
async fn measure(plan: &Plan, place: &Arc<Place>, daemon: &Process, seconds: u64) -> (Figures, u64) {
    println!("{plan:?}");
    println!(
        "  s  admitted  refused       p50       p99   scrapes  failed       p99  slow served, closed  memory"
    );
    let (mut all, mut peak) = (Figures::default(), 0);
    let load = Load::start(plan, place, daemon.address);
    let started = Instant::now();
    for second in 1..=seconds {
        tokio::time::sleep(Duration::from_secs(second).saturating_sub(started.elapsed())).await;
        let now = resident(daemon.id()).unwrap();
        peak = peak.max(now);
        let mut seen = load.take();
        println!(
            "{second:>3} {:>9} {:>8} {:>9.1?} {:>9.1?} {:>9} {:>7} {:>9.1?} {:>12} {:>7} {:>7} KiB",
            seen.admissions.len(),
            seen.refused,
            percentile(&mut seen.admissions, 50),
            percentile(&mut seen.admissions, 99),
            seen.scrapes.len(),
            seen.failed_scrapes.len(),
            percentile(&mut seen.scrapes, 99),
            seen.slow_served,
            seen.slow_closed,
            now,
        );
        all.add(seen);
    }
    let last = load.end().await;
    all.add(Figures { admissions: Vec::new(), ..last });
    (all, peak)
}

/// CPU time that the daemon has taken.
struct Spent {
    all: Duration,
    guarantee: Duration,
}

impl Spent {
    fn of(daemon: &Process) -> Self {
        let of = |thread| cpu_time(daemon.id(), thread).unwrap();
        Self { all: of(None), guarantee: of(Some("guarantee")) }
    }
}

fn main() -> ExitCode {
    if serve_if_asked() {
        return ExitCode::SUCCESS;
    }
    let plan = Plan {
        clients: option("clients", 64),
        rate: u32::try_from(option("rate", 1000)).unwrap(),
        scrapers: option("scrapers", 50),
        // As Prometheus does by default.
        scrape_limit: Duration::from_secs(10),
        slow: option("slow", 1000),
        slow_peers: option("peers", 40),
        together: option("together", 0) != 0,
    };
    let seconds = option("seconds", 60) as u64;
    let asked = option("rate", 1000) * option("seconds", 60);
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let place = Arc::new(Place::new(dir.path()).unwrap());
    for client in 0..plan.clients {
        place.cgroup(&format!("w{client}")).unwrap();
    }
    let daemon = Process::start(dir.path(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut alone, start) = runtime.block_on(async {
        let alone = Plan { clients: 1, rate: (plan.rate / 100).max(1), scrapers: 0, slow: 0, ..plan.clone() };
        measure(&alone, &place, &daemon, ALONE).await
    });
    let before = Spent::of(&daemon);
    let (mut all, peak) = runtime.block_on(measure(&plan, &place, &daemon, seconds));
    let spent = Spent::of(&daemon);
    let end = resident(daemon.id()).unwrap();

    let (idle, busy) = (percentile(&mut alone.admissions, 99), percentile(&mut all.admissions, 99));
    println!(
        "admissions: {} of {asked} in {seconds} s, {} refused; p50 {:.1?} p99 {busy:.1?}, alone p50 {:.1?} p99 {idle:.1?}",
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
        && admissions * 100 >= asked * REACHED
        && peak < MEMORY_BUDGET_KIB
        && busy < idle * SLOWER;
    println!("budget: {}", if kept { "kept" } else { "EXCEEDED" });
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

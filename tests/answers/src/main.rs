//! `numaward-answers-check` measures how fast the daemon answers `CreateContainer`, and checks that the container is
//! pinned, while the daemon waits for something else or has many clients.
//!
//! # Problem
//! A container runtime delays every creation until its plugins have answered, and continues without a plugin that is
//! late: the container then runs unpinned. While the daemon waits for something, its clients must not have to wait.
//!
//! # Terms
//! In a *phase*, [`CALLS`] containers are created during one other operation. A call counts only if the operation
//! lasted from its beginning to its end. The phase `idle` has no other operation, and shows the speed of the machine.
//!
//! # Algorithm
//! Each phase prints one line, `NAME: {"calls": …, "medianMs": …, "maxMs": …, …}`, for the calling test to check. This
//! program checks that each container is pinned, to CPUs that no other container has.
//!
//! # Limits
//! The kernel, its cgroups, the pages that move, the daemon (`numaward run`) and its sockets are real. The container
//! runtime is a fake that speaks NRI as containerd does and writes cgroups as runc does, but runs no process; the bus
//! ([`bus`]) only accepts calls. The test therefore proves the protocol and the latency of the daemon, but not that a
//! product works with it. The ledger is on the machine's root, which is in memory; `cargo xtask bench enforce` measures
//! the effect of a disk.
//!
//! The daemon, this program and the kernel's worker that moves pages run on CPU 0, so that the scheduler decides as on
//! a fully loaded host. The reading clients run on a CPU of the other node, because in production they are on other
//! hosts.
//!
//! Run it as root on a machine that can be discarded, with cgroup v2 at /sys/fs/cgroup.

#![forbid(unsafe_code)]

mod bus;
mod daemon;
mod runtime;
mod scrapers;

use std::{
    fs,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use numaward_tests_daemon::{POLL_INTERVAL, TIMEOUT, wait};

use self::{
    bus::Bus,
    runtime::{CALLS, CGROUPS, Runtime, millis},
    scrapers::Scrapers,
};

/// Number of workloads in the phase with many workloads.
const WORKLOADS: usize = 1000;
/// Number of clients that read these workloads.
const CLIENTS: usize = 50;
/// Interval between bursts of creations while clients read.
const BURST_INTERVAL: Duration = Duration::from_secs(1);
/// Memory on the node that it has to leave, in base pages.
const LOAD: &str = "400M";
/// Memory that its guarantee asks for: more than node 0 has, so that it gets node 1.
const GUARANTEED: &str = "1200M";

fn main() -> ExitCode {
    if let Err(error) = stay_on_cpu_0() {
        println!("FAILED: {error:#}");
        return ExitCode::FAILURE;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(run())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error:#}");
            println!("{}", daemon::log_tail());
            ExitCode::FAILURE
        }
    }
}

/// Restricts this process, its children and the kernel's unbound workers to CPU 0.
fn stay_on_cpu_0() -> Result<()> {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(0);
    rustix::thread::sched_setaffinity(None, &cpus)?;
    let workers = "/sys/devices/virtual/workqueue/cpumask";
    fs::write(workers, "1").context(workers)
}

async fn run() -> Result<()> {
    // Makes the daemon believe that systemd is the first process.
    fs::create_dir_all("/run/systemd/system")?;
    fs::create_dir_all("/tmp/answers")?;
    let bus = Bus::start(daemon::BUS)?;
    let mut runtime = Runtime::start(Path::new(daemon::NRI))?;
    let daemon = daemon::start()?;
    runtime.is_connected().await?;
    runtime.run_shared().await?;

    runtime.idle("idle").await?;
    page_move(&mut runtime).await?;
    for (name, unit, talks) in [("silent systemd", "a", true), ("silent bus", "b", false)] {
        bus.talks(talks);
        hanging_call(&mut runtime, &bus, name, unit).await?;
    }
    scraped(&mut runtime).await?;
    daemon.stop()
}

/// A request for a guarantee, which another thread makes.
struct PendingRequest {
    answered: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<(u16, String)>>,
    start: Instant,
}

impl PendingRequest {
    fn start(name: &str, cgroup: &str, memory: &str) -> Self {
        let asked = serde_json::json!({
            "name": name, "target": {"cgroup": cgroup}, "cpus": 1, "memory": memory,
        });
        let answered = Arc::new(AtomicBool::new(false));
        let ended = answered.clone();
        let thread = thread::spawn(move || {
            let answer = daemon::ask("POST", "/api/v1/allocations", &asked.to_string());
            ended.store(true, Ordering::Relaxed);
            answer
        });
        Self { answered, thread, start: Instant::now() }
    }

    fn is_pending(&self) -> bool {
        !self.answered.load(Ordering::Relaxed)
    }

    /// Waits for the answer.
    fn end(self) -> Result<(u16, String)> {
        self.thread.join().ok().context("the thread that asks has panicked")?
    }
}

/// Measures while pages move between nodes, base page by base page: the write to `cpuset.mems` returns when all have
/// moved.
async fn page_move(runtime: &mut Runtime) -> Result<()> {
    let dir = Path::new(CGROUPS).join("mover");
    fs::create_dir(&dir)?;
    let mut load = load(&dir)?;
    let (mut done, mut rounds, mut shortest) = (0, 0, Duration::MAX);
    while done < CALLS {
        rounds += 1;
        ensure!(rounds <= 10, "pages move too soon: {done} calls in {rounds} moves");
        let asking = PendingRequest::start("mover", "/mover", GUARANTEED);
        wait("the pages to move", || Ok(holds(&dir, "cpuset.mems", "1") || !asking.is_pending()))?;
        let begun = Instant::now();
        done += runtime.calls(CALLS - done, false, || asking.is_pending()).await?;
        while asking.is_pending() {
            // The fake runtime still has to answer the daemon's requests.
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        shortest = shortest.min(begun.elapsed());
        let (status, answer) = asking.end()?;
        ensure!(status == 201, "asked for the mover's guarantee: {status} {answer}");
        // The daemon waits for two seconds at most, the kernel until all pages have moved.
        wait("the pages to have moved", || Ok(on_node_0(&dir)? < 4 << 20))?;
        daemon::release("mover")?;
        if done < CALLS {
            fs::write(dir.join("cpuset.mems"), "0").context("moving pages back")?;
            fs::write(dir.join("cpuset.mems"), "0-1")?;
        }
    }
    load.kill()?;
    load.wait()?;
    wait("the load to be gone", || Ok(fs::remove_dir(&dir).is_ok()))?;
    runtime.print("page move", &[("moves", rounds.into()), ("shortestMoveMs", millis(shortest))])
}

/// Starts a process in this cgroup with anonymous memory on node 0, in base pages.
fn load(dir: &Path) -> Result<Child> {
    let report = "/tmp/answers/load";
    let child = Command::new("numaward-load")
        .args(["--policy", "preferred:0", "--size", LOAD, "--report", "json", "--cgroup"])
        .arg(dir)
        .stdout(fs::File::create(report)?)
        .stdin(Stdio::null())
        .spawn()
        .context("numaward-load")?;
    wait("the load's memory", || Ok(!fs::read_to_string(report)?.is_empty()))?;
    Ok(child)
}

/// Returns the bytes of anonymous memory on node 0.
fn on_node_0(dir: &Path) -> Result<u64> {
    let text = fs::read_to_string(dir.join("memory.numa_stat"))?;
    let anon = text.lines().find_map(|line| line.strip_prefix("anon N0=")).context("no anon on node 0")?;
    Ok(anon.split(' ').next().unwrap_or_default().parse()?)
}

/// Measures while the daemon waits for an answer of systemd.
async fn hanging_call(runtime: &mut Runtime, bus: &Bus, name: &str, unit: &str) -> Result<()> {
    let cgroup = format!("/system.slice/{unit}.service");
    fs::create_dir_all(format!("{CGROUPS}{cgroup}"))?;
    // The daemon cancels a call after ten seconds, in which a slow machine does not create all containers.
    let (mut done, mut rounds, mut longest) = (0, 0, Duration::ZERO);
    while done < CALLS {
        rounds += 1;
        ensure!(rounds <= 10, "calls are given up too soon: {done} creations in {rounds} of them");
        let calls = bus.waiting();
        let asking = PendingRequest::start(unit, &cgroup, "16Mi");
        wait("a call to wait", || Ok(bus.waiting() > calls || !asking.is_pending()))?;
        ensure!(asking.is_pending(), "the daemon made no call to systemd: {:?}", asking.end()?);
        done += runtime.calls(CALLS - done, true, || asking.is_pending()).await?;
        while asking.is_pending() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        longest = longest.max(asking.start.elapsed());
        let (status, answer) = asking.end()?;
        ensure!(status >= 400, "systemd said nothing, and the daemon: {status} {answer}");
    }
    runtime.print(name, &[("systemdAsked", rounds.into()), ("waitedMs", millis(longest))])?;
    // Other requests are served again.
    let other = Path::new(CGROUPS).join("other");
    fs::create_dir_all(&other)?;
    let asking = PendingRequest::start("other", "/other", "16Mi");
    while asking.is_pending() {
        ensure!(asking.start.elapsed() < TIMEOUT, "{name}: no other request is admitted any more");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let (status, answer) = asking.end()?;
    ensure!(status == 201, "{name}: asked for something else: {status} {answer}");
    daemon::release("other")
}

/// Measures while many clients read the state of many workloads.
async fn scraped(runtime: &mut Runtime) -> Result<()> {
    for number in 0..WORKLOADS {
        fs::create_dir(format!("{CGROUPS}/load{number}"))?;
    }
    wait("all workloads to be seen", || {
        Ok(scrapers::get("/api/v1/workloads")?.matches("\"/load").count() >= WORKLOADS)
    })?;
    runtime.idle("idle with workloads").await?;
    let scrapers = Scrapers::start(CLIENTS);
    wait("clients to be answered", || Ok(scrapers.answers() > 4))?;
    let (before, start) = (scrapers.answers(), Instant::now());
    // Containers are created until each client has an answer. Without a pause, creations would leave the readers
    // little CPU time.
    while start.elapsed() < TIMEOUT && (scrapers.clients_answered() < CLIENTS || runtime.is_short_of_calls())
    {
        runtime.calls(CALLS / 5, true, || true).await?;
        tokio::time::sleep(BURST_INTERVAL).await;
    }
    let (answers, took) = (scrapers.answers() - before, start.elapsed());
    let figures = [
        ("answersMeanwhile", answers.into()),
        ("clientsAnswered", scrapers.clients_answered().into()),
        ("tookMs", millis(took)),
        ("bytes", scrapers.bytes().into()),
        ("refusals", scrapers.refusals().into()),
        ("failures", scrapers.failures().into()),
        ("firstFailure", scrapers.first_failure().into()),
    ];
    scrapers.stop()?;
    runtime.print("scraped", &figures)
}

fn holds(dir: &Path, knob: &str, wanted: &str) -> bool {
    fs::read_to_string(dir.join(knob)).is_ok_and(|text| text.trim() == wanted)
}

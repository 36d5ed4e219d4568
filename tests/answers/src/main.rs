//! `numaward-answers-check` measures how soon the daemon answers `CreateContainer`, and whether the container is
//! pinned, while the daemon waits for something else or many others ask it something.
//!
//! Problem: a container runtime holds up every creation until its plugins have answered, and goes on without a plugin
//! that is late: the container then runs unpinned. What the daemon waits for itself must not be waited for by those
//! who ask.
//!
//! Terms: in a *phase*, [`CALLS`] containers are created while one thing is in progress. A call counts only if that
//! was so from its beginning to its end. The phase `idle` has nothing in progress: it says what the machine itself
//! takes.
//!
//! Algorithm: each phase prints one line, `NAME: {"calls": …, "medianMs": …, "maxMs": …, …}`. Whether that is soon
//! enough is for the test outside to say. Whether containers are pinned, to CPUs that no other has, is checked
//! here, for each of them.
//!
//! What is real: the kernel, its cgroups, the pages that move, the daemon (`numaward run`, as users run it) and its
//! sockets. What is not: the container runtime is the one of the project's tests, which speaks NRI as containerd does
//! and writes cgroups as runc does, but runs no process; the bus ([`bus`]) only accepts calls. So this proves the
//! protocol and the times of the daemon's answers, not that a product works with it. The ledger is on the machine's
//! root, which is memory: what a disk adds, `cargo xtask bench enforce` measures.
//!
//! All of it runs on CPU 0, and so does the kernel's worker that moves pages: the machine's own scheduler decides which
//! runs, as on a host that is fully loaded. The clients that read run on a CPU of the other node: elsewhere they are on other hosts.
//!
//! To be run as root on a machine that nobody needs, with cgroup v2 at /sys/fs/cgroup.

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

/// Workloads, where there are many.
const WORKLOADS: usize = 1000;
/// Clients that read them all the time.
const CLIENTS: usize = 50;
/// Time between bursts of creations while clients read.
const BURST_INTERVAL: Duration = Duration::from_secs(1);
/// What lies on the node that it is to leave: base pages, one by one.
const LOAD: &str = "400M";
/// What is promised to it: more than node 0 has, so that it is on node 1.
const PROMISED: &str = "1200M";

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

/// For this process, all that it starts, and the kernel's unbound workers.
fn stay_on_cpu_0() -> Result<()> {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(0);
    rustix::thread::sched_setaffinity(None, &cpus)?;
    let workers = "/sys/devices/virtual/workqueue/cpumask";
    fs::write(workers, "1").context(workers)
}

async fn run() -> Result<()> {
    // systemd is the first process, as far as the daemon can see.
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

/// A guarantee that is being asked for on another thread.
struct Asking {
    answered: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<(u16, String)>>,
    start: Instant,
}

impl Asking {
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

    fn goes_on(&self) -> bool {
        !self.answered.load(Ordering::Relaxed)
    }

    /// What came of it.
    fn end(self) -> Result<(u16, String)> {
        self.thread.join().ok().context("the thread that asks has panicked")?
    }
}

/// Pages move from node to node, base page by base page: the write to `cpuset.mems` returns when all have moved.
async fn page_move(runtime: &mut Runtime) -> Result<()> {
    let dir = Path::new(CGROUPS).join("mover");
    fs::create_dir(&dir)?;
    let mut load = load(&dir)?;
    let (mut done, mut rounds, mut shortest) = (0, 0, Duration::MAX);
    while done < CALLS {
        rounds += 1;
        ensure!(rounds <= 10, "pages move too soon: {done} calls in {rounds} moves");
        let asking = Asking::start("mover", "/mover", PROMISED);
        wait("the pages to move", || Ok(holds(&dir, "cpuset.mems", "1") || !asking.goes_on()))?;
        let begun = Instant::now();
        done += runtime.calls(CALLS - done, false, || asking.goes_on()).await?;
        while asking.goes_on() {
            // What the daemon asks of the runtime is still answered.
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        shortest = shortest.min(begun.elapsed());
        let (status, answer) = asking.end()?;
        ensure!(status == 201, "asked for the mover's guarantee: {status} {answer}");
        // The daemon waits no longer than two seconds, the kernel until all have moved.
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

/// Anonymous memory on node 0, in base pages, of a process in this cgroup.
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

/// Bytes of anonymous memory on node 0.
fn on_node_0(dir: &Path) -> Result<u64> {
    let text = fs::read_to_string(dir.join("memory.numa_stat"))?;
    let anon = text.lines().find_map(|line| line.strip_prefix("anon N0=")).context("no anon on node 0")?;
    Ok(anon.split(' ').next().unwrap_or_default().parse()?)
}

/// systemd is asked for a unit, and says nothing.
async fn hanging_call(runtime: &mut Runtime, bus: &Bus, name: &str, unit: &str) -> Result<()> {
    let cgroup = format!("/system.slice/{unit}.service");
    fs::create_dir_all(format!("{CGROUPS}{cgroup}"))?;
    // The daemon gives a call up after ten seconds, in which a slow machine does not create all containers.
    let (mut done, mut rounds, mut longest) = (0, 0, Duration::ZERO);
    while done < CALLS {
        rounds += 1;
        ensure!(rounds <= 10, "calls are given up too soon: {done} creations in {rounds} of them");
        let calls = bus.waiting();
        let asking = Asking::start(unit, &cgroup, "16Mi");
        wait("a call to wait", || Ok(bus.waiting() > calls || !asking.goes_on()))?;
        ensure!(asking.goes_on(), "nobody asked systemd: {:?}", asking.end()?);
        done += runtime.calls(CALLS - done, true, || asking.goes_on()).await?;
        while asking.goes_on() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        longest = longest.max(asking.start.elapsed());
        let (status, answer) = asking.end()?;
        ensure!(status >= 400, "systemd said nothing, and the daemon: {status} {answer}");
    }
    runtime.print(name, &[("systemdAsked", rounds.into()), ("waitedMs", millis(longest))])?;
    // What others ask for is served again.
    let other = Path::new(CGROUPS).join("other");
    fs::create_dir_all(&other)?;
    let asking = Asking::start("other", "/other", "16Mi");
    while asking.goes_on() {
        ensure!(asking.start.elapsed() < TIMEOUT, "{name}: nothing is promised to others any more");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let (status, answer) = asking.end()?;
    ensure!(status == 201, "{name}: asked for something else: {status} {answer}");
    daemon::release("other")
}

/// Many clients read what the daemon says about many workloads.
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
    // Containers are created until each client has an answer. Without a pause, creations would leave the readers little of the CPU.
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

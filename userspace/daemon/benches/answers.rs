//! How long a container waits for its CPUs while many clients read all there is to read.
//!
//! `cargo bench -p numaward-daemon --bench answers [-- NAME=NUMBER...]`, or `cargo xtask bench answers`. Names and
//! defaults: `workloads=1000`, of which `pods=250` have a container without a CPU of its own and the rest are cgroups of
//! others, `clients=50` that read `/api/v1/workloads` and `/metrics` in turn without a pause, `containers=50` that are
//! created meanwhile. Each takes a CPU from all containers that have none of their own.
//!
//! The daemon is a process of its own, with all its parts but the probe of allocations, on a host of plain files in memory. The container
//! runtime is a fake: it speaks NRI over a socket as containerd does, and runs nothing. Exits with 1 if a creation took 100 ms
//! or more, or was answered without CPUs.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use numaward_kube::nri::{
    fake::{Config, ContainerSpec, FakeRuntime, PodSpec},
    types::Online,
};
use numaward_topology::Bytes;
use rustix::process::{getpriority_process, setpriority_process};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    task::JoinSet,
};

use self::support::{
    ask,
    load::{connect, from, metrics, percentile},
    whole::{Place, Process, serve_if_asked},
};

const PLUGIN: &str = "90-numaward";
const BUDGET: Duration = Duration::from_millis(100);
/// More than the daemon's own readers give way.
const GIVE_WAY: i32 = 10;

fn option(name: &str, default: usize) -> usize {
    let is_given = |argument: String| argument.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    std::env::args().find_map(is_given).unwrap_or(default)
}

struct Node {
    place: Place,
    runtime: FakeRuntime,
}

impl Node {
    /// Makes a pod with one container, with a CPU of its own or `BestEffort`; how long its creation took, and whether it got
    /// a CPU.
    async fn create(&self, number: usize, has_cpu: bool) -> Result<(Duration, bool), String> {
        let uid = format!("pod-{number}");
        let parent = if has_cpu { "/kubepods" } else { "/kubepods/besteffort" };
        let pod = PodSpec {
            id: format!("sandbox-{number}"),
            name: uid.clone(),
            namespace: "answers".to_owned(),
            cgroup_parent: format!("{parent}/pod{uid}"),
            uid,
            ..PodSpec::default()
        };
        let container = ContainerSpec {
            id: format!("container-{number}"),
            pod_id: pod.id.clone(),
            name: "main".to_owned(),
            cgroups_path: format!("{}/container-{number}", pod.cgroup_parent),
            cpu_shares: Some(if has_cpu { 1024 } else { 2 }),
            cpu_quota: has_cpu.then_some(100_000),
            memory_limit: has_cpu.then(|| Bytes::mib(64)),
            ..ContainerSpec::default()
        };
        let io = |error: std::io::Error| error.to_string();
        self.place.cgroup(&pod.cgroup_parent).map_err(io)?;
        self.runtime.run_pod(&pod).await?;
        let asked = Instant::now();
        let made = self.runtime.create_container(&container).await?.resources;
        let took = asked.elapsed();
        self.place.cgroup(&container.cgroups_path).map_err(io)?;
        self.runtime.start_container(&container.id).await?;
        Ok((took, made.cpus.is_some_and(|cpus| cpus.len() == 1)))
    }

    /// Creates so many in turn; how long each took, and how many got no CPU.
    async fn create_all(&self, first: usize, count: usize) -> Result<(Vec<Duration>, usize), String> {
        let (mut times, mut without) = (Vec::new(), 0);
        for number in first..first + count {
            let (took, has_cpu) = self.create(number, true).await?;
            times.push(took);
            without += usize::from(!has_cpu);
        }
        Ok((times, without))
    }
}

fn print(what: &str, times: &mut [Duration], without: usize) {
    println!(
        "{what}: {} containers created, median {:.1?}, at most {:.1?}; {without} without a CPU",
        times.len(),
        percentile(times, 50),
        percentile(times, 100),
    );
}

/// Where the readers run. They stand for other machines, whose CPUs are not this one's: they have threads of their own, which
/// give way to the daemon's and to the runtime's, as a creation is not to be timed while it waits behind a client.
fn other_machines() -> Runtime {
    let give_way = || {
        let own = getpriority_process(None).unwrap();
        setpriority_process(None, (own + GIVE_WAY).min(19)).unwrap();
    };
    Builder::new_multi_thread().worker_threads(2).enable_all().on_thread_start(give_way).build().unwrap()
}

/// Waits until the daemon shows so many workloads, and its metrics grow no more: it takes in what is new piece by piece.
async fn all_are_served(daemon: &Process, workloads: usize) -> Result<(), String> {
    let (started, mut before) = (Instant::now(), 0);
    let text = |error: std::io::Error| error.to_string();
    loop {
        let stream = connect(from(2, 0), daemon.address, None).await.map_err(text)?;
        let answer = ask(stream, "GET", "/api/v1/workloads", &[], "").await.map_err(text)?;
        let shown = answer.body["workloads"].as_array().map_or(0, Vec::len);
        let mut stream = connect(from(2, 0), daemon.address, None).await.map_err(text)?;
        let bytes = metrics(&mut stream).await.map_err(text)?.len();
        if shown >= workloads && bytes.abs_diff(before) < bytes / 100 {
            return Ok(());
        }
        if started.elapsed() > Duration::from_mins(2) {
            return Err(format!(
                "the daemon shows {shown} workloads of {workloads}, in {bytes} bytes of metrics"
            ));
        }
        before = bytes;
        tokio::time::sleep(Duration::from_secs(15)).await;
    }
}

async fn measure(node: Node, daemon: &Process, readers: &Handle) -> Result<bool, String> {
    let (workloads, pods) = (option("workloads", 1000), option("pods", 250));
    let (clients, containers) = (option("clients", 50), option("containers", 50));
    assert!(node.runtime.has_plugins(&[PLUGIN]).await, "{:?}", node.runtime.log());
    for number in 0..workloads {
        if number < pods {
            node.create(number, false).await?;
        } else {
            node.place.cgroup(&format!("/workload-{number}")).map_err(|error| error.to_string())?;
        }
    }
    all_are_served(daemon, workloads).await?;
    let (mut idle, without) = node.create_all(workloads, containers).await?;
    print(&format!("{workloads} workloads, no clients"), &mut idle, without);

    let (read, bytes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        let (address, read, bytes) = (daemon.address, read.clone(), bytes.clone());
        let reads = async move {
            loop {
                let stream = connect(from(1, client), address, None).await.unwrap();
                let answer = ask(stream, "GET", "/api/v1/workloads", &[], "").await.unwrap();
                assert_eq!(answer.status, 200);
                let mut stream = connect(from(1, client), address, None).await.unwrap();
                bytes.fetch_add(metrics(&mut stream).await.unwrap().len(), Relaxed);
                read.fetch_add(1, Relaxed);
            }
        };
        tasks.spawn_on(reads, readers);
    }
    // Until all are in the middle of it.
    while read.load(Relaxed) < clients {
        if let Some(ended) = tasks.try_join_next() {
            return Err(format!("a client ended: {ended:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (before, started) = (read.load(Relaxed), Instant::now());
    let (mut busy, without_too) = node.create_all(workloads + containers, containers).await?;
    let rounds = read.load(Relaxed) - before;
    print(&format!("{clients} clients"), &mut busy, without_too);
    println!(
        "meanwhile, in {:.1?}, both were read {rounds} times; the metrics have {} bytes",
        started.elapsed(),
        bytes.load(Relaxed) / read.load(Relaxed)
    );
    tasks.shutdown().await;
    let kept = percentile(&mut busy, 100) < BUDGET && without + without_too == 0;
    println!("budget: each in less than {BUDGET:?}, with a CPU: {}", if kept { "kept" } else { "EXCEEDED" });
    Ok(kept)
}

fn main() -> ExitCode {
    if serve_if_asked() {
        return ExitCode::SUCCESS;
    }
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let tokio = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let readers = other_machines();
    let kept = tokio.block_on(async {
        let place = Place::new(dir.path()).unwrap();
        let runtime = FakeRuntime::new(Config::containerd_2_1(Online::from(&place.machine)));
        let socket = dir.path().join("nri.sock");
        runtime.listen(&socket).unwrap();
        let daemon = Process::start(dir.path(), Some(&socket)).unwrap();
        measure(Node { place, runtime }, &daemon, readers.handle()).await
    });
    match kept {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

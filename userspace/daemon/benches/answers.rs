//! Time of the creation of a container while many clients read all workloads and metrics.
//!
//! `cargo bench -p numaward-daemon --bench answers [-- NAME=NUMBER...]`, or `cargo xtask bench answers`. Options and defaults:
//! - `workloads=1000`: workloads, of which `pods=250` have a container without exclusive CPUs; the rest are other cgroups.
//! - `clients=50`: clients that read `/api/v1/workloads` and `/metrics` in turn without a pause.
//! - `containers=50`: containers that are created meanwhile. Each gets an exclusive CPU, which confines all containers without one.
//!
//! The daemon is a process of its own, without the probe of allocations, on a host of plain files in memory. The container runtime is a
//! fake that speaks NRI over a socket like containerd, and starts no processes. The exit status is 1 if a creation took 100 ms or more, or
//! was answered without CPUs.

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
    fake::{ContainerSpec, FakeRuntime, FakeRuntimeConfig, PodSpec},
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
    load::{connect, loopback_address, metrics, percentile},
    local_daemon::{DaemonProcess, HostDirectory, serve_if_requested},
};

const PLUGIN: &str = "90-numaward";
const BUDGET: Duration = Duration::from_millis(100);
/// The nice value of clients, which is higher than that of the daemon's own reading threads.
const CLIENT_NICE: i32 = 10;

fn option(name: &str, default: usize) -> usize {
    let is_given = |argument: String| argument.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    std::env::args().find_map(is_given).unwrap_or(default)
}

struct BenchNode {
    host: HostDirectory,
    runtime: FakeRuntime,
}

impl BenchNode {
    /// Creates a pod with one container, with an exclusive CPU or `BestEffort`. Returns the time of the creation, and true if the container
    /// got one CPU.
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
        self.host.cgroup(&pod.cgroup_parent).map_err(io)?;
        self.runtime.run_pod(&pod).await?;
        let sent = Instant::now();
        let applied = self.runtime.create_container(&container).await?.resources;
        let took = sent.elapsed();
        self.host.cgroup(&container.cgroups_path).map_err(io)?;
        self.runtime.start_container(&container.id).await?;
        Ok((took, applied.cpus.is_some_and(|cpus| cpus.len() == 1)))
    }

    /// Creates containers in turn. Returns the time of each, and the number of those without a CPU.
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

/// Returns the runtime of the clients, which represent other machines with CPUs of their own. Its threads have a lower priority than those
/// of the daemon and of the container runtime, so that the time of a creation does not include a wait for the clients.
fn client_runtime() -> Runtime {
    let lower_priority = || {
        let own = getpriority_process(None).unwrap();
        setpriority_process(None, (own + CLIENT_NICE).min(19)).unwrap();
    };
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .on_thread_start(lower_priority)
        .build()
        .unwrap()
}

/// Waits until the daemon serves all workloads, and the size of its metrics is stable: it adds new workloads gradually.
async fn await_all_served(daemon: &DaemonProcess, workloads: usize) -> Result<(), String> {
    let (started, mut before) = (Instant::now(), 0);
    let text = |error: std::io::Error| error.to_string();
    loop {
        let stream = connect(loopback_address(2, 0), daemon.address, None).await.map_err(text)?;
        let answer = ask(stream, "GET", "/api/v1/workloads", &[], "").await.map_err(text)?;
        let shown = answer.body["workloads"].as_array().map_or(0, Vec::len);
        let mut stream = connect(loopback_address(2, 0), daemon.address, None).await.map_err(text)?;
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

async fn measure(node: BenchNode, daemon: &DaemonProcess, readers: &Handle) -> Result<bool, String> {
    let (workloads, pods) = (option("workloads", 1000), option("pods", 250));
    let (clients, containers) = (option("clients", 50), option("containers", 50));
    assert!(node.runtime.has_plugins(&[PLUGIN]).await, "{:?}", node.runtime.log());
    for number in 0..workloads {
        if number < pods {
            node.create(number, false).await?;
        } else {
            node.host.cgroup(&format!("/workload-{number}")).map_err(|error| error.to_string())?;
        }
    }
    await_all_served(daemon, workloads).await?;
    let (mut idle, without) = node.create_all(workloads, containers).await?;
    print(&format!("{workloads} workloads, no clients"), &mut idle, without);

    let (read, bytes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        let (address, read, bytes) = (daemon.address, read.clone(), bytes.clone());
        let reads = async move {
            loop {
                let stream = connect(loopback_address(1, client), address, None).await.unwrap();
                let answer = ask(stream, "GET", "/api/v1/workloads", &[], "").await.unwrap();
                assert_eq!(answer.status, 200);
                let mut stream = connect(loopback_address(1, client), address, None).await.unwrap();
                bytes.fetch_add(metrics(&mut stream).await.unwrap().len(), Relaxed);
                read.fetch_add(1, Relaxed);
            }
        };
        tasks.spawn_on(reads, readers);
    }
    // Wait until all clients read.
    while read.load(Relaxed) < clients {
        if let Some(ended) = tasks.try_join_next() {
            return Err(format!("a client ended: {ended:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (before, started) = (read.load(Relaxed), Instant::now());
    let (mut busy, without_under_load) = node.create_all(workloads + containers, containers).await?;
    let rounds = read.load(Relaxed) - before;
    print(&format!("{clients} clients"), &mut busy, without_under_load);
    println!(
        "meanwhile, in {:.1?}, both were read {rounds} times; the metrics have {} bytes",
        started.elapsed(),
        bytes.load(Relaxed) / read.load(Relaxed)
    );
    tasks.shutdown().await;
    let kept = percentile(&mut busy, 100) < BUDGET && without + without_under_load == 0;
    println!("budget: each in less than {BUDGET:?}, with a CPU: {}", if kept { "kept" } else { "EXCEEDED" });
    Ok(kept)
}

fn main() -> ExitCode {
    if serve_if_requested() {
        return ExitCode::SUCCESS;
    }
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let tokio = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let readers = client_runtime();
    let kept = tokio.block_on(async {
        let host = HostDirectory::new(dir.path()).unwrap();
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(Online::from(&host.machine)));
        let socket = dir.path().join("nri.sock");
        runtime.listen(&socket).unwrap();
        let daemon = DaemonProcess::start(dir.path(), Some(&socket)).unwrap();
        measure(BenchNode { host, runtime }, &daemon, readers.handle()).await
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

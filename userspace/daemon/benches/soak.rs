//! Memory and other resources of the daemon while many pods start and end.
//!
//! `cargo bench -p numaward-daemon --bench soak [-- NAME=NUMBER...]`, or `cargo xtask bench soak`. Options and defaults: `pods=10000` in
//! all, `live=100` at once, `samples=20`. `svg=FILE` draws the samples.
//!
//! The daemon is a process of its own, without the probe of allocations, on a host of plain files in memory. The container runtime is a
//! fake that speaks NRI over a socket like containerd, and starts no processes. A removed workload is served for 5 more seconds
//! (`observe.keepRemoved`, 5 minutes by default). A third of the pods is Guaranteed with exclusive CPUs, a third Burstable, and a third
//! `BestEffort`; one in four is updated while it runs.
//!
//! The exit status is 1 if, compared with the sample after a fifth of the pods, memory has grown by more than 5 %, descriptors, threads,
//! series of metrics or guarantees have become more, or a scrape takes more than twice the time.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    collections::VecDeque,
    fmt::Write as _,
    fs,
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use numaward_kube::nri::{
    fake::{ContainerSpec, FakeRuntime, FakeRuntimeConfig, PodSpec},
    types::Online,
};
use numaward_topology::Bytes;
use tokio::net::TcpStream;

use self::support::{
    ask,
    load::{percentile, resident},
    local_daemon::{DaemonProcess, HostDirectory, serve_if_requested},
};

const PLUGIN: &str = "90-numaward";
const SCRAPES: usize = 9;

fn text(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| Some(argument.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

fn option(name: &str, default: usize) -> usize {
    text(name).and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Resources of the daemon at a time.
#[derive(Clone, Debug)]
struct ResourceSample {
    pods: usize,
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
    allocations: usize,
    series: usize,
    ledger: u64,
    scrape: Duration,
}

struct Soak {
    host: HostDirectory,
    runtime: FakeRuntime,
    daemon: DaemonProcess,
    /// The number of Guaranteed containers that the runtime created before the daemon answered.
    late: AtomicUsize,
}

impl Soak {
    /// Creates a pod with one container, and starts it.
    async fn run(&self, number: usize) -> Result<(PodSpec, ContainerSpec), String> {
        let uid = format!("pod-{number}");
        let (parent, cpus) = match number % 3 {
            0 => ("/kubepods", 1 + number as u64 % 2),
            1 => ("/kubepods/burstable", 0),
            _ => ("/kubepods/besteffort", 0),
        };
        let pod = PodSpec {
            id: format!("sandbox-{number}"),
            name: uid.clone(),
            namespace: "soak".to_owned(),
            uid: uid.clone(),
            cgroup_parent: format!("{parent}/pod{uid}"),
            ..PodSpec::default()
        };
        let container = ContainerSpec {
            id: format!("container-{number}"),
            pod_id: pod.id.clone(),
            name: "main".to_owned(),
            cgroups_path: format!("{}/container-{number}", pod.cgroup_parent),
            cpu_shares: Some(match number % 3 {
                0 => 1024 * cpus,
                1 => 100,
                _ => 2,
            }),
            cpu_quota: (cpus > 0).then(|| 100_000 * i64::try_from(cpus).unwrap()),
            memory_limit: (number % 3 < 2).then(|| Bytes::mib(64)),
            ..ContainerSpec::default()
        };
        let io = |error: std::io::Error| error.to_string();
        self.host.cgroup(&pod.cgroup_parent).map_err(io)?;
        self.runtime.run_pod(&pod).await?;
        let applied = self.runtime.create_container(&container).await?.resources;
        self.host.cgroup(&container.cgroups_path).map_err(io)?;
        let dir = self.host.cgroup_dir(&container.cgroups_path);
        for (knob, value) in [
            ("cpuset.cpus", applied.cpus.map(|set| set.to_string())),
            ("cpuset.mems", applied.mems.map(|set| set.to_string())),
        ] {
            if let Some(value) = value {
                fs::write(dir.join(knob), value + "\n").map_err(io)?;
            }
        }
        if cpus > 0 && fs::read_to_string(dir.join("cpuset.cpus")).map_err(io)?.trim().is_empty() {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
        self.runtime.start_container(&container.id).await?;
        self.host.apply_cpuset(&container.cgroups_path).map_err(io)?;
        if number.is_multiple_of(4) && cpus == 0 {
            let more = ContainerSpec { memory_limit: Some(Bytes::mib(128)), ..container.clone() };
            self.runtime.update_container(&container.id, &more).await?;
        }
        Ok((pod, container))
    }

    async fn end(&self, (pod, container): (PodSpec, ContainerSpec)) -> Result<(), String> {
        self.runtime.stop_container(&container.id).await?;
        self.runtime.remove_container(&container.id).await?;
        self.runtime.remove_pod(&pod.id).await?;
        let dir = self.host.cgroup_dir(&pod.cgroup_parent);
        fs::remove_dir_all(dir).map_err(|error| error.to_string())
    }

    async fn get(&self, path: &str) -> support::HttpAnswer {
        let stream = TcpStream::connect(self.daemon.address).await.unwrap();
        ask(stream, "GET", path, &[], "").await.unwrap()
    }

    async fn sample(&self, pods: usize) -> ResourceSample {
        let (mut times, mut series) = (Vec::new(), 0);
        for _ in 0..SCRAPES {
            let (start, mut stream) =
                (Instant::now(), TcpStream::connect(self.daemon.address).await.unwrap());
            let text = support::load::metrics(&mut stream).await.unwrap();
            times.push(start.elapsed());
            series = text.lines().filter(|line| line.starts_with("numaward_")).count();
        }
        let proc = |list: &str| fs::read_dir(format!("/proc/{}/{list}", self.daemon.id())).unwrap().count();
        let files = fs::read_dir(self.host.dir.join("state")).unwrap().flatten();
        let held = self.get("/api/v1/allocations").await;
        ResourceSample {
            pods,
            resident_kib: resident(self.daemon.id()).unwrap(),
            descriptors: proc("fd"),
            threads: proc("task"),
            allocations: held.body["allocations"].as_array().map(Vec::len).unwrap_or_default(),
            series,
            ledger: files.filter_map(|file| Some(file.metadata().ok()?.len())).sum(),
            scrape: percentile(&mut times, 50),
        }
    }

    async fn soak(&self, pods: usize, live: usize, samples: usize) -> Result<Vec<ResourceSample>, String> {
        assert!(self.runtime.has_plugins(&[PLUGIN]).await, "{:?}", self.runtime.log());
        println!("   pods   memory KiB  descriptors  threads  allocations  series  ledger B  scrape");
        let (mut running, mut taken) = (VecDeque::new(), Vec::new());
        for number in 0..pods {
            if running.len() >= live {
                // One in seven ends is of a pod in the middle of the queue, so that lifetimes differ.
                let next = if number % 7 == 0 { live / 2 } else { 0 };
                self.end(running.remove(next).unwrap()).await?;
            }
            running.push_back(self.run(number).await?);
            if (number + 1) % (pods / samples).max(1) == 0 {
                let sample = self.sample(number + 1).await;
                println!(
                    "{:>7} {:>12} {:>12} {:>8} {:>12} {:>7} {:>9} {:>7.1?}",
                    sample.pods,
                    sample.resident_kib,
                    sample.descriptors,
                    sample.threads,
                    sample.allocations,
                    sample.series,
                    sample.ledger,
                    sample.scrape
                );
                taken.push(sample);
            }
        }
        for pod in running {
            self.end(pod).await?;
        }
        let empty = self.sample(pods).await;
        println!("all are gone: {empty:?}");
        println!("made before the daemon had answered: {}", self.late.load(Ordering::Relaxed));
        if empty.allocations > 0 {
            return Err(format!("{} allocations are left", empty.allocations));
        }
        Ok(taken)
    }
}

/// Describes the resources that have grown beyond their limits.
fn describe_growth(first: &ResourceSample, last: &ResourceSample) -> Vec<String> {
    let counts = [
        ("descriptors", first.descriptors, last.descriptors),
        ("threads", first.threads, last.threads),
        ("allocations", first.allocations, last.allocations),
        ("series", first.series, last.series),
    ];
    // The tolerance covers changes during the count, and differences between pods.
    let mut grown: Vec<String> = counts
        .iter()
        .filter(|(_, first, last)| *last > first + first / 20 + 3)
        .map(|(name, first, last)| format!("{name}: {first} to {last}"))
        .collect();
    if last.resident_kib * 100 > first.resident_kib * 105 {
        grown.push(format!("memory: {} to {} KiB", first.resident_kib, last.resident_kib));
    }
    if last.scrape > first.scrape * 2 {
        grown.push(format!("a scrape: {:.1?} to {:.1?}", first.scrape, last.scrape));
    }
    grown
}

/// Returns a figure of a sample.
type SampleFigure = fn(&ResourceSample) -> f64;

/// Draws the samples over the number of pods, each panel from zero to its maximum.
#[expect(clippy::cast_precision_loss, reason = "less than a pixel")]
fn svg(samples: &[ResourceSample]) -> String {
    const WIDTH: f64 = 760.0;
    const HEIGHT: f64 = 110.0;
    const GAP: f64 = 34.0;
    let panels: [(&str, SampleFigure); 4] = [
        ("resident memory, MiB", |sample| sample.resident_kib as f64 / 1024.0),
        ("open descriptors", |sample| sample.descriptors as f64),
        ("series of metrics", |sample| sample.series as f64),
        ("time of a scrape, ms", |sample| sample.scrape.as_secs_f64() * 1000.0),
    ];
    let pods = samples.last().map_or(1.0, |sample| sample.pods as f64);
    let height = (HEIGHT + GAP) * panels.len() as f64 + 30.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 840 {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"840\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, (name, value)) in panels.iter().enumerate() {
        let top = GAP + (HEIGHT + GAP) * index as f64;
        let max = samples.iter().map(value).fold(0.0, f64::max);
        let points = samples.iter().map(|sample| {
            let (x, y) = (
                40.0 + WIDTH * sample.pods as f64 / pods,
                top + HEIGHT * (1.0 - value(sample) / max.max(1e-9)),
            );
            format!("{x:.1},{y:.1}")
        });
        let last = samples.last().map(value).unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "<text x=\"40\" y=\"{:.0}\" fill=\"#24292f\">{name}: {last:.1} at the end, {max:.1} at most</text>\n\
             <path d=\"M40 {top} V{:.0} H800\" fill=\"none\" stroke=\"#8c959f\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"#0969da\" stroke-width=\"2\"/>",
            top - 8.0,
            top + HEIGHT,
            points.collect::<Vec<_>>().join(" ")
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"800\" y=\"{:.0}\" text-anchor=\"end\" fill=\"#24292f\">{pods} pods</text>\n</svg>",
        height - 12.0
    );
    text
}

fn main() -> ExitCode {
    if serve_if_requested() {
        return ExitCode::SUCCESS;
    }
    let (pods, live, sample_count) = (option("pods", 10_000), option("live", 100), option("samples", 20));
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let soaked = tokio.block_on(async {
        let host = HostDirectory::new(dir.path()).unwrap();
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(Online::from(&host.machine)));
        let socket = dir.path().join("nri.sock");
        runtime.listen(&socket).unwrap();
        let daemon = DaemonProcess::start(dir.path(), Some(&socket)).unwrap();
        Soak { host, runtime, daemon, late: AtomicUsize::new(0) }.soak(pods, live, sample_count).await
    });
    let samples = match soaked {
        Ok(samples) => samples,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    if let Some(path) = text("svg") {
        fs::write(path, svg(&samples)).unwrap();
    }
    let (Some(first), Some(last)) = (samples.get(samples.len() / 5), samples.last()) else {
        return ExitCode::FAILURE;
    };
    let grown = describe_growth(first, last);
    println!("since {} pods, these grew: {grown:?}", first.pods);
    if grown.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

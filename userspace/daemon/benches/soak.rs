//! Pods that come and go, and what the daemon holds meanwhile.
//!
//! `cargo bench -p numaward-daemon --bench soak [-- NAME=NUMBER...]`, or `cargo xtask bench soak`. Names and defaults:
//! `pods=10000`, `live=100` at once, `samples=20`. `svg=FILE` draws what was measured.
//!
//! The daemon is a process of its own, with all its parts but the probe of allocations, on a host of plain files in memory. The container
//! runtime is a fake: it speaks NRI over a socket as containerd does, and runs nothing. What is gone is served for 5 seconds
//! more (`observe.keepRemoved`, 5 minutes by default). A third of the pods is
//! Guaranteed with CPUs of its own, a third Burstable, a third `BestEffort`; one in four is changed while it runs. Exits with 1
//! if, against what it was after a fifth of the pods, memory grew by more than 5 %, or descriptors, threads, series
//! of metrics or allocations became more, or a scrape takes more than twice as long.

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
    fake::{Config, ContainerSpec, FakeRuntime, PodSpec},
    types::Online,
};
use numaward_topology::Bytes;
use tokio::net::TcpStream;

use self::support::{
    ask,
    load::{percentile, resident},
    whole::{Place, Process, serve_if_asked},
};

const PLUGIN: &str = "90-numaward";
const SCRAPES: usize = 9;

fn text(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| Some(argument.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

fn option(name: &str, default: usize) -> usize {
    text(name).and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// What the daemon holds.
#[derive(Clone, Debug)]
struct Sample {
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
    place: Place,
    runtime: FakeRuntime,
    daemon: Process,
    /// Guaranteed containers that were made before the daemon had answered.
    late: AtomicUsize,
}

impl Soak {
    /// Makes a pod with one container, and starts it.
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
        self.place.cgroup(&pod.cgroup_parent).map_err(io)?;
        self.runtime.run_pod(&pod).await?;
        let made = self.runtime.create_container(&container).await?.resources;
        self.place.cgroup(&container.cgroups_path).map_err(io)?;
        let dir = self.place.cgroup_dir(&container.cgroups_path);
        for (knob, value) in [
            ("cpuset.cpus", made.cpus.map(|set| set.to_string())),
            ("cpuset.mems", made.mems.map(|set| set.to_string())),
        ] {
            if let Some(value) = value {
                fs::write(dir.join(knob), value + "\n").map_err(io)?;
            }
        }
        if cpus > 0 && fs::read_to_string(dir.join("cpuset.cpus")).map_err(io)?.trim().is_empty() {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
        self.runtime.start_container(&container.id).await?;
        self.place.obey(&container.cgroups_path).map_err(io)?;
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
        let dir = self.place.cgroup_dir(&pod.cgroup_parent);
        fs::remove_dir_all(dir).map_err(|error| error.to_string())
    }

    async fn get(&self, path: &str) -> support::Answer {
        let stream = TcpStream::connect(self.daemon.address).await.unwrap();
        ask(stream, "GET", path, &[], "").await.unwrap()
    }

    async fn sample(&self, pods: usize) -> Sample {
        let (mut times, mut series) = (Vec::new(), 0);
        for _ in 0..SCRAPES {
            let (start, mut stream) =
                (Instant::now(), TcpStream::connect(self.daemon.address).await.unwrap());
            let text = support::load::metrics(&mut stream).await.unwrap();
            times.push(start.elapsed());
            series = text.lines().filter(|line| line.starts_with("numaward_")).count();
        }
        let proc = |list: &str| fs::read_dir(format!("/proc/{}/{list}", self.daemon.id())).unwrap().count();
        let files = fs::read_dir(self.place.dir.join("state")).unwrap().flatten();
        let held = self.get("/api/v1/allocations").await;
        Sample {
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

    async fn soak(&self, pods: usize, live: usize, samples: usize) -> Result<Vec<Sample>, String> {
        assert!(self.runtime.has_plugins(&[PLUGIN]).await, "{:?}", self.runtime.log());
        println!("   pods   memory KiB  descriptors  threads  allocations  series  ledger B  scrape");
        let (mut running, mut seen) = (VecDeque::new(), Vec::new());
        for number in 0..pods {
            if running.len() >= live {
                // Some live long.
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
                seen.push(sample);
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
        Ok(seen)
    }
}

/// What is more than it was.
fn grown(first: &Sample, last: &Sample) -> Vec<String> {
    let counts = [
        ("descriptors", first.descriptors, last.descriptors),
        ("threads", first.threads, last.threads),
        ("allocations", first.allocations, last.allocations),
        ("series", first.series, last.series),
    ];
    // One may come or go while it is counted; pods differ in what they have.
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

/// A figure of a sample.
type Figure = fn(&Sample) -> f64;

/// Lines over the number of pods, each from zero to its most.
#[expect(clippy::cast_precision_loss, reason = "less than a pixel")]
fn svg(seen: &[Sample]) -> String {
    const WIDTH: f64 = 760.0;
    const HEIGHT: f64 = 110.0;
    const GAP: f64 = 34.0;
    let panels: [(&str, Figure); 4] = [
        ("resident memory, MiB", |it| it.resident_kib as f64 / 1024.0),
        ("open descriptors", |it| it.descriptors as f64),
        ("series of metrics", |it| it.series as f64),
        ("time of a scrape, ms", |it| it.scrape.as_secs_f64() * 1000.0),
    ];
    let pods = seen.last().map_or(1.0, |it| it.pods as f64);
    let height = (HEIGHT + GAP) * panels.len() as f64 + 30.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 840 {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"840\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, (name, value)) in panels.iter().enumerate() {
        let top = GAP + (HEIGHT + GAP) * index as f64;
        let most = seen.iter().map(value).fold(0.0, f64::max);
        let points = seen.iter().map(|it| {
            let (x, y) =
                (40.0 + WIDTH * it.pods as f64 / pods, top + HEIGHT * (1.0 - value(it) / most.max(1e-9)));
            format!("{x:.1},{y:.1}")
        });
        let last = seen.last().map(value).unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "<text x=\"40\" y=\"{:.0}\" fill=\"#24292f\">{name}: {last:.1} in the end, {most:.1} at most</text>\n\
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
    if serve_if_asked() {
        return ExitCode::SUCCESS;
    }
    let (pods, live, samples) = (option("pods", 10_000), option("live", 100), option("samples", 20));
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let soaked = tokio.block_on(async {
        let place = Place::new(dir.path()).unwrap();
        let runtime = FakeRuntime::new(Config::containerd_2_1(Online::from(&place.machine)));
        let socket = dir.path().join("nri.sock");
        runtime.listen(&socket).unwrap();
        let daemon = Process::start(dir.path(), Some(&socket)).unwrap();
        Soak { place, runtime, daemon, late: AtomicUsize::new(0) }.soak(pods, live, samples).await
    });
    let seen = match soaked {
        Ok(seen) => seen,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    if let Some(path) = text("svg") {
        fs::write(path, svg(&seen)).unwrap();
    }
    let (Some(first), Some(last)) = (seen.get(seen.len() / 5), seen.last()) else { return ExitCode::FAILURE };
    let grown = grown(first, last);
    println!("since {} pods, these grew: {grown:?}", first.pods);
    if grown.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! Time, size and memory of a scrape with many workloads, with the code that serves `/metrics`.
//!
//! `cargo bench -p numaward-daemon --bench scrape [-- WORKLOADS NODES]`, by default 10,000 and 8.
//!
//! The first part has synthetic figures in all families, and measures the encoding. The second part has an observer of a directory with as
//! many cgroups on 256 CPUs and the probes of this host, and measures the reads of the maps too. It also prints the time until the observer
//! follows all cgroups, the memory of the maps (for ten workloads too), and the time of a scrape by HTTP, plain and compressed.
//!
//! The exit status is 1 if a budget of the design is exceeded: 50 ms, 96 MiB, and 2 s until all cgroups are followed. The time of a scrape
//! is the CPU time of its thread, so that a busy host does not change it.

use std::{
    error::Error,
    fs,
    future::poll_fn,
    io,
    path::Path,
    pin::Pin,
    process::ExitCode,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes as Text},
    http::{Request, header},
};
use http_body::Body as _;
use numaward_config::Config;
use numaward_daemon::allocations::{self, router};
use numaward_http::{App, HostNames};
use numaward_model::{
    health::{Heartbeats, Readiness},
    snapshot::{
        self, AllocatedFigures, CpuFigures, GuaranteeFigures, GuaranteeResidency, InterruptFigures,
        KindFigures, MapFigures, MigratedFigures, MissFigures, MissingCapacityFigures, NodeMemoryFigures,
        OomKillFigures, PressureFigures, ProbeFigures, ResidentFigures, Snapshot, SnapshotSource,
        UnattributedFigures, WorkloadActivity, WorkloadFigures,
    },
    verdict::{ResidencySplit, UserMemory},
};
use numaward_observe::{CgroupSource, Latches, Observer, spawn};
use numaward_telemetry::metrics::{Format, Metrics};
use numaward_topology::{Bytes, CpuId, NodeId, ZoneKind};
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

const RUNS: usize = 15;
const CPUS: u32 = 256;
/// One of this number of workloads has a guarantee.
const WORKLOADS_PER_GUARANTEE: usize = 10;
const TIME_BUDGET: Duration = Duration::from_millis(50);
const MEMORY_BUDGET: Bytes = Bytes::mib(96);
const START_BUDGET: Duration = Duration::from_secs(2);
/// The number of workloads on a small host.
const SMALL_HOST_WORKLOADS: u32 = 10;

/// Source of synthetic figures.
#[derive(Debug)]
struct SyntheticFigures {
    names: Vec<Arc<str>>,
    resident: Vec<Arc<[ResidentFigures]>>,
    nodes: u32,
}

impl SyntheticFigures {
    fn new(workloads: u32, nodes: u32) -> Self {
        // The names have the length of names of real services and containers.
        let name = |i| format!("system.slice/measured-service-{i}.service").into();
        let resident = |i| {
            let node = |n| ResidentFigures {
                anon: Bytes::kib(u64::from(i * 97 + n) * 4),
                file: Bytes::kib(u64::from(i * 31 + n) * 4),
                kernel: Bytes::kib(u64::from(i + n)),
                mapped: Bytes(0),
                shmem: Bytes(0),
                droppable: Bytes(0),
            };
            (0..nodes).map(node).collect()
        };
        Self {
            names: (0..workloads).map(name).collect(),
            resident: (0..workloads).map(resident).collect(),
            nodes,
        }
    }

    fn guarantees(&self) -> GuaranteeFigures {
        let nodes = || (0..self.nodes).map(NodeId);
        let guaranteed = || self.names.iter().step_by(WORKLOADS_PER_GUARANTEE).cloned();
        let kind = |node| KindFigures {
            node,
            kind: ZoneKind::Memory,
            reserved: Bytes::gib(1),
            allocatable: Bytes::gib(63),
            guaranteed: Bytes::gib(40),
            free: Bytes::gib(23),
        };
        GuaranteeFigures {
            missed: guaranteed()
                .map(|workload| MissFigures {
                    workload,
                    bytes: nodes().map(|node| (node, Bytes::kib(4))).collect(),
                })
                .collect(),
            missed_hugepages: Vec::new(),
            misplaced_hugepages: Vec::new(),
            kinds: nodes().map(kind).collect(),
            exclusive_cpus: nodes().map(|node| (node, 16)).collect(),
            missing: guaranteed()
                .map(|workload| MissingCapacityFigures { workload, offline_cpus: 0, uncovered: Bytes(0) })
                .collect(),
            residency: guaranteed()
                .map(|workload| GuaranteeResidency {
                    workload,
                    kind: ZoneKind::Memory,
                    guaranteed: vec![(NodeId(0), Bytes::gib(1))],
                    resident: Some(ResidencySplit {
                        on: UserMemory::hugepages(Bytes::gib(1)),
                        ..ResidencySplit::default()
                    }),
                    is_broken: false,
                })
                .collect(),
            headroom: nodes().map(|node| (node, ZoneKind::Memory, 1 << 34)).collect(),
            low: nodes().map(|node| (node, false)).collect(),
            over_budget: Vec::new(),
            shared_pool_cpus: Some(128),
            free_cpus: 120,
        }
    }
}

impl SnapshotSource for SyntheticFigures {
    fn snapshot(&self) -> Snapshot {
        let workloads = self.names.iter().zip(&self.resident).zip(0_u64..).map(|((name, resident), i)| {
            let allocated = (0..u64::from(self.nodes)).map(|node| AllocatedFigures {
                local: Bytes::mib(i * 1013 + node * 7),
                remote: Bytes::mib(i * 3 + node),
                kernel: Bytes::kib(i * 5 + node),
            });
            WorkloadFigures {
                name: name.clone(),
                start: None,
                allocated: Some(allocated.collect()),
                cpu: Some(
                    (0..u64::from(self.nodes)).map(|node| Duration::from_micros(i * 977 + node)).collect(),
                ),
                resident: Some(resident.clone()),
                hugepages: Arc::default(),
                pressure: Some(PressureFigures {
                    waiting: Duration::from_micros(i * 1_234_567),
                    stalled: Duration::from_micros(i * 234_567),
                }),
                oom_kills: Some(i % 3),
                tiering: None,
                activity: Some(WorkloadActivity {
                    local: Some(i),
                    remote: Some((0..u64::from(self.nodes)).map(|node| i * 11 + node).collect()),
                    moved: None,
                    sampling: vec!["skipped_cpuset"],
                    estimated_remote_permille: Some(u32::try_from(i % 1000).unwrap_or_default()),
                    migrated: Some(vec![MigratedFigures {
                        reason: "numa_misplaced",
                        nodes: Some((NodeId(0), NodeId(1))),
                        pages: i * 7,
                    }]),
                    stalls: Some(snapshot::StallFigures::default()),
                    oom_kills: Some(
                        [("none", 0), ("cpuset", 0), ("mempolicy", 0), ("memcg", i % 3)]
                            .map(|(constraint, count)| OomKillFigures::new(constraint, count)),
                    ),
                    hugepages: None,
                    dram: None,
                }),
            }
        });
        let node = |node| NodeMemoryFigures {
            node: NodeId(node),
            kinds: vec![(ZoneKind::Memory, Bytes::gib(64), Some(Bytes::gib(12)))],
        };
        let accesses = (0..self.nodes).flat_map(|from| {
            (0..self.nodes).map(move |to| (NodeId(from), Some(NodeId(to)), u64::from(from * to)))
        });
        let cpu_figures = CpuFigures {
            intruders: ["kernel_thread", "host", "workload"].map(|class| (class, Duration::ZERO)),
            interrupts: Some(InterruptFigures { hard: 1234, soft: 5678, ..InterruptFigures::default() }),
        };
        Snapshot {
            nodes: (0..self.nodes).map(node).collect(),
            workloads: workloads.collect(),
            page_size: Bytes::kib(4),
            accesses: Some(accesses.collect()),
            exclusive_cpus: (0..CPUS).map(|cpu| (CpuId(cpu), cpu_figures)).collect(),
            unattributed: Some(vec![UnattributedFigures::default(); self.nodes as usize]),
            coverage_permille: Some(990),
            unknown_node: Some(Bytes(0)),
            probes: vec![ProbeFigures {
                probe: "alloc".to_owned(),
                mode: "tp_btf".to_owned(),
                reason: "",
                runtime: Some(Duration::from_millis(1)),
                runs: Some(1000),
                sampled_ratio: Some(1.0),
                events_lost: Some(0),
            }],
            maps: vec![MapFigures { map: "LEAF", entries: 10_000, capacity: 16_384 }],
            map_memory: vec![("alloc", 64 << 20)],
            workloads_with_slot: self.names.len() as u64,
            workloads_without_slot: 0,
            degraded: Vec::new(),
            guarantees: self.guarantees(),
            process: None,
        }
    }
}

/// Starts an observer of a directory with the files of a host with many workloads, and with the probes of this host. Returns it with the
/// time until it followed all cgroups.
fn start_observer(
    root: &Path,
    workloads: u32,
    slots: u32,
    nodes: u32,
    stop: &CancellationToken,
) -> io::Result<(Arc<Observer>, Duration)> {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, text)
    };
    for cpus in ["online", "possible"] {
        write(&format!("sys/devices/system/cpu/{cpus}"), &format!("0-{}\n", CPUS - 1))?;
    }
    write("sys/devices/system/node/online", &format!("0-{}\n", nodes - 1))?;
    let cpus = CPUS / nodes;
    for node in 0..nodes {
        let dir = format!("sys/devices/system/node/node{node}");
        write(&format!("{dir}/cpulist"), &format!("{}-{}\n", node * cpus, (node + 1) * cpus - 1))?;
        let memory = format!("Node {node} MemTotal: 67108864 kB\nNode {node} MemFree: 1048576 kB\n");
        write(&format!("{dir}/meminfo"), &memory)?;
    }
    write("proc/sys/kernel/numa_balancing", "1\n")?;
    let by_node = |pages: u32| {
        let by_node = (0..nodes).map(|node| format!(" N{node}={}", u64::from(pages) * 4096));
        by_node.collect::<Vec<_>>().concat()
    };
    let pressure = "avg10=0.00 avg60=0.00 avg300=0.00 total";
    for i in 0..workloads {
        let dir = format!("cgroups/system.slice/measured-service-{i}.service");
        let stat = format!("anon{}\nfile{}\nkernel_stack{}\n", by_node(i), by_node(1), by_node(2));
        write(&format!("{dir}/memory.numa_stat"), &stat)?;
        write(&format!("{dir}/memory.events"), "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")?;
        write(&format!("{dir}/memory.pressure"), &format!("some {pressure}={i}\nfull {pressure}={i}\n"))?;
        write(&format!("{dir}/cpuset.mems.effective"), &format!("0-{}\n", nodes - 1))?;
    }
    let mut config = Config { host_root: root.to_owned(), ..Config::default() };
    config.probes.slots = slots;
    let observer = Arc::new(Observer::new(&config));
    let mut readiness = Readiness::default();
    let latches = Latches::new(&mut readiness);
    let source = CgroupSource::Directory(root.join("cgroups").into());
    let start = Instant::now();
    drop(spawn(&observer, source, latches, &Heartbeats::default(), stop)?);
    while !readiness.is_ready() {
        thread::sleep(Duration::from_millis(1));
    }
    Ok((observer, start.elapsed()))
}

/// Returns the kernel memory of the maps of all probes.
fn map_memory(snapshot: &Snapshot) -> Bytes {
    Bytes(snapshot.map_memory.iter().map(|(_, bytes)| bytes).sum())
}

/// Waits until all workloads have been read; `None` after a timeout.
fn await_all_read(observer: &Observer, workloads: u32) -> Option<Snapshot> {
    let deadline = Instant::now() + Duration::from_mins(5);
    while Instant::now() < deadline {
        let snapshot = observer.snapshot();
        let read = snapshot.workloads.iter().filter(|workload| workload.resident.is_some()).count();
        if read >= workloads as usize {
            return Some(snapshot);
        }
        thread::sleep(Duration::from_secs(1));
    }
    None
}

/// Measures the scrapes of an observer.
fn observe(workloads: u32, slots: u32, nodes: u32, highest: &mut HighestFigures) -> Result<(), String> {
    let root = tempfile::tempdir().map_err(|error| error.to_string())?;
    let stop = CancellationToken::new().drop_guard();
    let started = start_observer(root.path(), workloads, slots, nodes, stop.token());
    let (observer, start) = started.map_err(|error| error.to_string())?;
    {
        // The snapshot is dropped before the measurement: it would count as memory of the daemon.
        let snapshot = await_all_read(&observer, workloads).ok_or("not all workloads were read")?;
        let absent = snapshot.probes.iter().filter(|probe| probe.mode == "absent");
        let absent: Vec<_> = absent.map(|probe| probe.probe.as_str()).collect();
        println!("with counters of their own: {}; absent probes: {absent:?}", snapshot.workloads_with_slot);
        println!(
            "followed after {start:.1?}; maps: {} KiB of the kernel's memory",
            map_memory(&snapshot).0 >> 10
        );
    }
    let metrics = Arc::new(Metrics::new(observer.clone()));
    highest.start = highest.start.max(start);
    measure(&metrics, highest)?;
    measure_http(&observer, &metrics).map_err(|error| error.to_string())
}

/// Measures the CPU time of all threads of this process for scrapes by HTTP, plain and compressed.
fn measure_http(observer: &Arc<Observer>, metrics: &Arc<Metrics>) -> Result<(), Box<dyn Error>> {
    let (readiness, heartbeats) = (Readiness::default(), Heartbeats::default());
    let app = App::new(observer, metrics, &readiness, &heartbeats, allocations::open_api());
    let router = router(app, None, None, HostNames::new(&[]));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for encoding in ["identity", "gzip"] {
        let mut times = Vec::new();
        let mut bytes = 0;
        for _ in 0..RUNS {
            let request = Request::get("/metrics").header(header::ACCEPT_ENCODING, encoding);
            let request = request.body(Body::empty())?;
            let start = process_time();
            bytes = runtime.block_on(async {
                let mut body = router.clone().oneshot(request).await?.into_body();
                let mut bytes = 0;
                while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
                    bytes += frame?.data_ref().map_or(0, Text::len);
                }
                Ok::<_, Box<dyn Error>>(bytes)
            })?;
            times.push(process_time().saturating_sub(start));
        }
        times.sort();
        println!("by HTTP, {encoding}: median {:.1?}, {bytes} bytes", times[RUNS / 2]);
    }
    Ok(())
}

fn process_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

fn main() -> ExitCode {
    // Cargo adds the argument `--bench`.
    let mut sizes = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let workloads = sizes.next().unwrap_or(10_000);
    let nodes = sizes.next().unwrap_or(8);
    println!("{workloads} workloads, {nodes} nodes, {RUNS} scrapes, time on the CPU");
    println!("\nfigures that are made up, in all families:");
    let mut highest = HighestFigures::default();
    if let Err(error) =
        measure(&Metrics::new(Arc::new(SyntheticFigures::new(workloads, nodes))), &mut highest)
    {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    // The slice counts as a workload too.
    for (workloads, slots) in
        [(SMALL_HOST_WORKLOADS, Config::default().probes.slots), (workloads, workloads + 1)]
    {
        println!("\nan observer of {workloads} cgroups, with {slots} slots and the probes of this host:");
        if let Err(error) = observe(workloads, slots, nodes, &mut highest) {
            eprintln!("the observer cannot be measured: {error}");
            return ExitCode::FAILURE;
        }
    }
    if highest.check() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The highest figures of all measurements.
#[derive(Default)]
struct HighestFigures {
    /// Median CPU time of a scrape.
    time: Duration,
    memory: Bytes,
    /// Time until all cgroups are followed.
    start: Duration,
}

impl HighestFigures {
    /// Prints the figures in the format of `cargo xtask bench budgets`. Returns true if all are within the budget.
    #[expect(clippy::cast_precision_loss, reason = "sizes of memory are far below 2^52")]
    fn check(&self) -> bool {
        let mib = |bytes: Bytes| bytes.0 as f64 / f64::from(1 << 20);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!("\nbudget: scrape/time {:.4} ms {}", ms(self.time), ms(TIME_BUDGET));
        println!("budget: scrape/memory {:.4} MiB {}", mib(self.memory), mib(MEMORY_BUDGET));
        println!("budget: scrape/start {:.4} ms {}", ms(self.start), ms(START_BUDGET));
        let kept = self.time <= TIME_BUDGET && self.memory <= MEMORY_BUDGET && self.start <= START_BUDGET;
        println!("{}", if kept { "kept" } else { "EXCEEDED" });
        kept
    }
}

/// Measures the encoding of the metrics.
fn measure(metrics: &Metrics, highest: &mut HighestFigures) -> Result<(), String> {
    for (name, format) in [("Prometheus text", Format::Prometheus), ("OpenMetrics", Format::OpenMetrics)] {
        let mut times = Vec::new();
        let (mut bytes, mut lines) = (0, 0);
        for _ in 0..RUNS {
            (bytes, lines) = (0, 0);
            let start = cpu_time();
            let written = metrics.encode(format, |piece| {
                bytes += piece.len();
                true
            });
            times.push(cpu_time().saturating_sub(start));
            if written.is_err() {
                return Err("the metrics could not be written".to_owned());
            }
        }
        let _ = metrics.encode(format, |piece| {
            lines += piece.split(|&byte| byte == b'\n').count() - 1;
            true
        });
        times.sort();
        let median = times[RUNS / 2];
        println!("{name}: median {median:.1?}, min {:.1?}, {lines} lines, {bytes} bytes", times[0]);
        highest.time = highest.time.max(median);
    }
    let peak = peak_memory().ok_or("/proc/self/status has no VmHWM")?;
    println!("peak RSS: {} KiB", peak.0 >> 10);
    highest.memory = highest.memory.max(peak);
    Ok(())
}

/// Returns the CPU time of this thread (Documentation/scheduler/sched-stats.rst).
fn cpu_time() -> Duration {
    // A kernel without the file: elapsed time is used instead.
    static START: OnceLock<Instant> = OnceLock::new();
    let stat = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = stat.and_then(|stat| stat.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| START.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

fn peak_memory() -> Option<Bytes> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok().map(Bytes::kib)
}

//! Time, size and memory of a scrape with many workloads, through the code that serves `/metrics`.
//!
//! `cargo bench -p numaward-daemon --bench scrape [-- WORKLOADS NODES]`, by default 10,000 and 8.
//! Exits with 1 if the budget of the design is exceeded: 100 ms and 128 MiB. What counts is the time on the CPU,
//! so that a busy host does not spoil it; writing is the work of one thread.

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use numaward_daemon::metrics::{
    Allocated, Format, MapFigures, Metrics, NodeMemory, Pressure, ProbeFigures, Resident, Snapshot, Source,
    WorkloadActivity, WorkloadFigures,
};
use numaward_topology::{Bytes, NodeId, ZoneKind};

const RUNS: usize = 15;
const TIME_BUDGET: Duration = Duration::from_millis(100);
const MEMORY_BUDGET: Bytes = Bytes::mib(128);

/// Gives new numbers at each scrape, as real counters would be.
#[derive(Debug)]
struct Synthetic {
    names: Vec<Arc<str>>,
    resident: Vec<Arc<[Resident]>>,
    nodes: u32,
}

impl Synthetic {
    fn new(workloads: u32, nodes: u32) -> Self {
        // As long as names of real services and containers are.
        let name = |i| format!("system.slice/measured-service-{i}.service").into();
        let resident = |i| {
            let node = |n| Resident {
                anon: Bytes::kib(u64::from(i * 97 + n) * 4),
                file: Bytes::kib(u64::from(i * 31 + n) * 4),
                kernel: Bytes::kib(u64::from(i + n)),
            };
            (0..nodes).map(node).collect()
        };
        Self {
            names: (0..workloads).map(name).collect(),
            resident: (0..workloads).map(resident).collect(),
            nodes,
        }
    }
}

impl Source for Synthetic {
    fn snapshot(&self) -> Snapshot {
        let workloads = self.names.iter().zip(&self.resident).zip(0_u64..).map(|((name, resident), i)| {
            let allocated = (0..u64::from(self.nodes)).map(|node| Allocated {
                local: Bytes::mib(i * 1013 + node * 7),
                remote: Bytes::mib(i * 3 + node),
                kernel: Bytes::kib(i * 5 + node),
            });
            WorkloadFigures {
                name: name.clone(),
                allocated: Some(allocated.collect()),
                resident: Some(resident.clone()),
                pressure: Some(Pressure {
                    waiting: Duration::from_micros(i * 1_234_567),
                    stalled: Duration::from_micros(i * 234_567),
                }),
                oom_kills: Some(i % 3),
                activity: Some(WorkloadActivity {
                    remote: Some((0..u64::from(self.nodes)).map(|node| i * 11 + node).collect()),
                    moved: None,
                    sampling: vec!["on"],
                    migrated: Some(vec![("numa_misplaced", i * 7)]),
                    stalls: Some(numaward_probes::Stalls::default()),
                    oom_kills: Some([0, 0, 0, i % 3]),
                    dram: None,
                }),
            }
        });
        let node = |node| NodeMemory {
            node: NodeId(node),
            kinds: vec![(ZoneKind::Memory, Bytes::gib(64), Some(Bytes::gib(12)))],
        };
        Snapshot {
            nodes: (0..self.nodes).map(node).collect(),
            workloads: workloads.collect(),
            page_size: Bytes::kib(4),
            exclusive_cpus: Vec::new(),
            unknown_node: Some(Bytes(0)),
            probes: vec![ProbeFigures {
                probe: "alloc".to_owned(),
                mode: "tp_btf".to_owned(),
                reason: String::new(),
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
        }
    }
}

fn main() -> ExitCode {
    // Cargo passes `--bench`.
    let mut sizes = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let workloads = sizes.next().unwrap_or(10_000);
    let nodes = sizes.next().unwrap_or(8);
    let metrics = Metrics::new(Arc::new(Synthetic::new(workloads, nodes)));
    let mut ok = true;
    println!("{workloads} workloads, {nodes} nodes, {RUNS} scrapes, time on the CPU");
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
                eprintln!("the metrics could not be written");
                return ExitCode::FAILURE;
            }
        }
        let _ = metrics.encode(format, |piece| {
            lines += piece.split(|&byte| byte == b'\n').count() - 1;
            true
        });
        times.sort();
        let median = times[RUNS / 2];
        println!("{name}: median {median:.1?}, min {:.1?}, {lines} lines, {bytes} bytes", times[0]);
        ok &= median <= TIME_BUDGET;
    }
    match peak_memory() {
        Some(peak) => {
            println!("peak RSS: {} KiB", peak.0 >> 10);
            ok &= peak <= MEMORY_BUDGET;
        }
        None => println!("peak RSS: unknown, /proc/self/status has no VmHWM"),
    }
    println!("budget: {TIME_BUDGET:?}, {MEMORY_BUDGET}: {}", if ok { "kept" } else { "EXCEEDED" });
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What this thread has had of a CPU (Documentation/scheduler/sched-stats.rst).
fn cpu_time() -> Duration {
    // For a kernel without the file: then the time that passed has to do.
    static START: OnceLock<Instant> = OnceLock::new();
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = stat.and_then(|stat| stat.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| START.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

fn peak_memory() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok().map(Bytes::kib)
}

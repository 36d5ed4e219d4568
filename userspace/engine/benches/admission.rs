//! Duration and memory of an admission, compared with the kubelet.
//!
//! The machine has 16 CPUs (8 cores of 2 threads) and 64 GiB on each node, with the policy `best-effort` and the
//! scope `container`. A Guaranteed container with 2 CPUs and 4 GiB is admitted to an idle machine, to a machine with
//! half-full nodes (`spread`), and to a machine on which half of the nodes are full (`packed`). Two further requests
//! go to an idle machine: one with 2 GiB in huge pages of 2 MiB (`pages`), and one with CPUs for two nodes while
//! its memory needs one, so that no set of nodes is preferred by both (`apart`).
//!
//! The kubelet's figures are those of Kubernetes v1.32.10 with its state files on tmpfs, measured on another day on a
//! similar machine. They include writing two state files twice. The column "with state" includes making the text of
//! both files, the column "admit" is the decision alone.
//!
//! The run fails if an admission misses its budget: 500 us on 8 idle nodes, 20 ms on 12, 1 s on 16, and never longer
//! than the kubelet.
//!
//! `cargo bench -p numaward-engine --bench admission`

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use numaward_engine::{
    KubeletStrategy, Ledger, PolicyConfig, Quantity, Request, Resources, Strategy as _,
    explain::Merge,
    hint::ProviderHints,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId, ZoneKind};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Initial load of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// Idle machine.
    Empty,
    /// Every node is half full, with owners on that node only.
    Spread,
    /// Half of the nodes are full.
    Packed,
    /// Idle machine; the request also has huge pages.
    Pages,
    /// Idle machine; the CPUs of the request need two nodes, the memory one.
    Apart,
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Empty => "idle",
            Self::Spread => "spread",
            Self::Packed => "packed",
            Self::Pages => "pages",
            Self::Apart => "apart",
        })
    }
}

/// Duration of the kubelet's admission in microseconds.
#[derive(Clone, Copy)]
enum KubeletDuration {
    /// Median and minimum.
    Measured(f64, f64),
    /// Approximate value: measured once, or extrapolated.
    AtLeast(f64),
}

struct Case {
    nodes: u32,
    fill: Fill,
    /// Number of hints for CPUs and for memory in the kubelet's record.
    hints: Option<(usize, usize)>,
    kubelet: Option<KubeletDuration>,
}

const PAGE: HugepageSize = HugepageSize(Bytes::mib(2));

const MILLISECOND: f64 = 1e3;
const SECOND: f64 = 1e6;

impl Case {
    /// Maximum duration of an admission in microseconds.
    fn budget(&self) -> f64 {
        let own = match (self.nodes, self.fill) {
            (8, Fill::Empty) => 500.0,
            (12, Fill::Empty) => 20.0 * MILLISECOND,
            _ => SECOND,
        };
        match self.kubelet {
            Some(KubeletDuration::Measured(median, _)) => own.min(median),
            _ => own,
        }
    }
}

fn cases() -> Vec<Case> {
    use KubeletDuration::{AtLeast, Measured};
    let case = |nodes, fill, hints, kubelet| Case { nodes, fill, hints, kubelet };
    vec![
        case(1, Fill::Empty, None, None),
        case(1, Fill::Spread, None, None),
        case(2, Fill::Empty, Some((3, 3)), Some(Measured(0.385 * MILLISECOND, 0.313 * MILLISECOND))),
        case(2, Fill::Spread, Some((3, 2)), Some(Measured(0.420 * MILLISECOND, 0.294 * MILLISECOND))),
        case(2, Fill::Packed, Some((2, 1)), Some(Measured(0.602 * MILLISECOND, 0.321 * MILLISECOND))),
        case(4, Fill::Empty, Some((15, 15)), Some(Measured(0.927 * MILLISECOND, 0.627 * MILLISECOND))),
        case(4, Fill::Spread, Some((15, 4)), Some(Measured(0.971 * MILLISECOND, 0.555 * MILLISECOND))),
        case(4, Fill::Packed, Some((12, 3)), Some(Measured(0.992 * MILLISECOND, 0.565 * MILLISECOND))),
        case(8, Fill::Empty, Some((255, 255)), Some(Measured(50.6 * MILLISECOND, 28.9 * MILLISECOND))),
        case(8, Fill::Spread, Some((255, 8)), Some(Measured(10.4 * MILLISECOND, 6.2 * MILLISECOND))),
        case(8, Fill::Packed, Some((240, 15)), Some(Measured(13.2 * MILLISECOND, 7.5 * MILLISECOND))),
        case(8, Fill::Pages, Some((255, 510)), Some(AtLeast(12.9 * SECOND))),
        case(8, Fill::Apart, None, None),
        case(12, Fill::Empty, Some((4095, 4095)), Some(Measured(20.6 * SECOND, 17.2 * SECOND))),
        case(12, Fill::Spread, Some((4095, 12)), Some(Measured(305.0 * MILLISECOND, 286.0 * MILLISECOND))),
        case(12, Fill::Packed, Some((4032, 63)), Some(Measured(599.0 * MILLISECOND, 480.0 * MILLISECOND))),
        case(16, Fill::Empty, Some((65535, 65535)), Some(AtLeast(1200.0 * SECOND))),
        case(16, Fill::Spread, Some((65535, 16)), Some(Measured(7.8 * SECOND, 7.7 * SECOND))),
        case(16, Fill::Packed, Some((65280, 255)), Some(Measured(19.2 * SECOND, 15.6 * SECOND))),
        case(16, Fill::Pages, None, None),
        case(16, Fill::Apart, None, None),
    ]
}

fn machine(nodes: u32, hugepages: bool) -> Result<Machine, String> {
    Machine::builder()
        .nodes(nodes)
        .sockets(nodes.min(2))
        .cores_per_node(8)
        .smt(2)
        .memory(Bytes::gib(64))
        .hugepages(PAGE, if hugepages { 4096 } else { 0 })
        .build()
        .map_err(|error| error.to_string())
}

fn config() -> PolicyConfig {
    let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]);
    let option = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(2)),
        topology_manager_policy: TopologyManagerPolicy::BestEffort,
        topology_manager_policy_options: BTreeMap::from([option("max-allowable-numa-nodes", "20")]),
        ..PolicyConfig::default()
    }
}

fn request(owner: &str, cpus: u64, memory: Bytes) -> Request {
    let resources = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(memory.0));
    Request::workload(owner, resources)
}

/// Fills the machine. Owners go to the lowest node with free capacity, so nodes are filled in turn.
fn fill(kubelet: &KubeletStrategy, mut ledger: Ledger, nodes: u32, fill: Fill) -> Result<Ledger, String> {
    let admit = |ledger: &Ledger, owner: &str, cpus: u64, memory: Bytes| {
        let decision = kubelet.admit(ledger, &request(owner, cpus, memory));
        let grants = decision.outcome.map_err(|rejection| format!("{owner}: {}", rejection.message))?;
        let on = grants.first().map(|grant| grant.allocation.memory_nodes()).unwrap_or_default();
        if on.len() != 1 {
            return Err(format!("{owner} is on nodes {on}"));
        }
        Ok::<_, String>(kubelet.note_started(&decision.ledger, &owner.into(), &owner.into()))
    };
    let filled = match fill {
        Fill::Empty | Fill::Pages | Fill::Apart => 0,
        Fill::Spread => nodes,
        Fill::Packed => nodes / 2,
    };
    for node in 0..filled {
        // The lowest node has the reserved CPUs and memory.
        let (cpus, memory) = if node == 0 { (6, 31) } else { (8, 32) };
        ledger = admit(&ledger, &format!("half-{node}"), 8, Bytes::gib(32))?;
        ledger = admit(&ledger, &format!("rest-{node}"), cpus, Bytes::gib(memory))?;
    }
    if fill == Fill::Spread {
        for node in 0..filled {
            ledger = kubelet.release(&ledger, &format!("rest-{node}").as_str().into());
        }
    }
    Ok(ledger)
}

/// Runs for about a second, at least five times. Returns median and minimum.
fn measure(mut run: impl FnMut()) -> (Duration, Duration) {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 5 || begin.elapsed() < Duration::from_secs(1) {
        let start = Instant::now();
        run();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    (times[times.len() / 2], times[0])
}

fn hints(merge: &Merge) -> Vec<usize> {
    let count = |hints: &ProviderHints| match hints {
        ProviderHints::ByResource(resources) => resources.iter().map(|(_, hints)| hints.len()).sum(),
        _ => 0,
    };
    merge.hints.iter().map(|(_, hints)| count(hints)).collect()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * SECOND
}

/// Formats three significant digits with a unit.
fn time(micros: f64) -> String {
    let (value, unit) = match micros {
        micros if micros < MILLISECOND => (micros, "us"),
        micros if micros < SECOND => (micros / MILLISECOND, "ms"),
        micros => (micros / SECOND, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

fn row(case: &Case) -> Result<String, String> {
    let machine = machine(case.nodes, case.fill == Fill::Pages)?;
    let kubelet = KubeletStrategy::new(&machine, &config()).map_err(|error| error.to_string())?;
    let ledger = fill(&kubelet, kubelet.idle(), case.nodes, case.fill)?;
    let cpus = if case.fill == Fill::Apart { 18 } else { 2 };
    let mut request = request("guest", cpus, Bytes::gib(4));
    if case.fill == Fill::Pages {
        for resources in request.containers.iter_mut().flat_map(|of| [&mut of.requests, &mut of.limits]) {
            resources.memory.insert(ZoneKind::Hugepages(PAGE), Quantity::whole(Bytes::gib(2).0));
        }
    }

    let decision = kubelet.admit(&ledger, &request);
    decision.outcome.as_ref().map_err(|rejection| rejection.message.clone())?;
    let hints = decision.explanation.merges.first().map(hints).unwrap_or_default();
    if let Some((cpus, memory)) = case.hints
        && hints != [cpus, memory]
    {
        return Err(format!("not the same case: hints {hints:?}, the kubelet had {cpus} and {memory}"));
    }
    drop(decision);

    let (median, least) = measure(|| {
        black_box(kubelet.admit(black_box(&ledger), black_box(&request)));
    });
    let (with_state, _) = measure(|| {
        let decision = kubelet.admit(black_box(&ledger), black_box(&request));
        let files = kubelet.checkpoints(&decision.ledger);
        black_box((files.cpus.map(|cpus| cpus.write()), files.memory.map(|memory| memory.write())));
    });
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    black_box(kubelet.admit(&ledger, &request));
    let peak = ALLOCATOR.peak_usage().saturating_sub(before);

    let mut row = String::new();
    let hints = hints.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
    let ours = format!("{} / {}", time(micros(median)), time(micros(least)));
    let (recorded, ratio) = match case.kubelet {
        None => ("-".to_owned(), "-".to_owned()),
        Some(KubeletDuration::Measured(of, least)) => {
            (format!("{} / {}", time(of), time(least)), format!("{:.0}x", of / micros(with_state)))
        }
        Some(KubeletDuration::AtLeast(of)) => {
            (format!("about {}", time(of)), format!("{:.0}x", of / micros(with_state)))
        }
    };
    write!(
        row,
        "{:>5}  {:<6}  {hints:>11}  {ours:>19}  {:>10}  {recorded:>19}  {ratio:>9}  {:>8}",
        case.nodes,
        case.fill,
        time(micros(with_state)),
        peak.div_ceil(1024),
    )
    .map_err(|error| error.to_string())?;
    // Sizes with a budget, as `cargo xtask bench budgets` reads them.
    if let (8.., Fill::Empty) = (case.nodes, case.fill) {
        println!("budget: kubelet/{}-{} {:.4} us {}", case.nodes, case.fill, micros(least), case.budget());
    }
    if micros(least) > case.budget() {
        return Err(format!("took {}, the budget is {}\n{row}", time(micros(least)), time(case.budget())));
    }
    Ok(row)
}

fn main() -> ExitCode {
    println!(
        "{:>5}  {:<6}  {:>11}  {:>19}  {:>10}  {:>19}  {:>9}  {:>8}",
        "nodes",
        "fill",
        "hints",
        "admit: med / min",
        "with state",
        "kubelet: med / min",
        "faster",
        "peak KiB"
    );
    for case in cases() {
        match row(&case) {
            Ok(row) => println!("{row}"),
            Err(error) => {
                eprintln!("{} nodes, {}: {error}", case.nodes, case.fill);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("faster: the kubelet's median over ours with state");
    ExitCode::SUCCESS
}

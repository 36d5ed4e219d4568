//! Duration of a decision of the strategy `native`, by size of the machine.
//!
//! The machine has 16 CPUs (8 cores of 2 threads) and 64 GiB on each node, on sockets of up to 8 nodes with distances
//! of 10, 12 and 32. It is half full: every node half (`spread`), or half of the nodes completely and one more
//! partially (`packed`). The requests are 2 CPUs and 4 GiB, which fit one node (`small`); a request for three nodes
//! (`wide`); and a request for slightly more memory than is free (`refused`). Each is decided with the policies
//! `best-effort` and `restricted`.
//!
//! In addition, adversarial pods (`tests/adversarial`) are decided: at most 20 ms on a host of any size.
//!
//! The budgets are 20 us for 8 nodes, 100 us for 16, 1 ms for 64 (1,024 CPUs) and 4 ms for 128. The run fails if a
//! median exceeds its budget.
//!
//! `cargo bench -p numaward-engine --bench native`

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on fails")]

use std::{
    collections::BTreeMap,
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use numaward_engine::{
    Ledger, NativeOptions, NativeStrategy, PolicyConfig, Quantity, Request, Resources, Strategy as _,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

#[path = "../tests/adversarial/mod.rs"]
mod adversarial;

/// Maximum duration of a decision for any pod.
const MAX_DECISION_TIME: Duration = Duration::from_millis(20);

/// Number of nodes, and maximum duration of a decision.
const BUDGETS_BY_NODES: [(u32, Duration); 4] = [
    (8, Duration::from_micros(20)),
    (16, Duration::from_micros(100)),
    (64, Duration::from_millis(1)),
    (128, Duration::from_millis(4)),
];

fn config(policy: TopologyManagerPolicy) -> PolicyConfig {
    let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]);
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(2)),
        topology_manager_policy: policy,
        ..PolicyConfig::default()
    }
}

fn request(owner: &str, cpus: u64, gib: u64) -> Request {
    let memory = Quantity::whole(Bytes::gib(gib).0);
    let resources = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(memory);
    Request::workload(owner, resources)
}

/// Fills the machine with owners of half a node each.
fn fill(native: &NativeStrategy, nodes: u32, packed: bool) -> Result<Ledger, String> {
    let mut ledger = native.idle();
    let admit = |ledger: &Ledger, owner: String| {
        let decision = native.admit(ledger, &request(&owner, 7, 31));
        decision.outcome.map_err(|rejection| format!("{owner}: {rejection}"))?;
        Ok::<_, String>(native.note_started(&decision.ledger, &owner.as_str().into(), &owner.as_str().into()))
    };
    for number in 0..nodes * 2 {
        ledger = admit(&ledger, format!("o{number:03}"))?;
    }
    // Two owners on each node, in the order of names; one or both of a node leave.
    let by_node = |ledger: &Ledger| {
        let mut by_node: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for (owner, _, held) in ledger.allocations() {
            by_node.entry(held.memory_nodes().to_string()).or_default().push(owner.clone());
        }
        by_node
    };
    for (index, owners) in by_node(&ledger).into_values().enumerate() {
        let leave = if packed { if index % 2 == 0 { 2 } else { 0 } } else { 1 };
        for owner in owners.into_iter().take(leave) {
            ledger = native.release(&ledger, &owner);
        }
    }
    Ok(ledger)
}

/// Returns median and minimum over a fifth of a second, at least 21 runs.
fn measure(mut run: impl FnMut()) -> (Duration, Duration) {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 21 || begin.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        run();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    (times[times.len() / 2], times[0])
}

fn main() -> ExitCode {
    let mut missed = 0;
    println!(
        "{:>5} {:>5}  {:<12} {:<7} {:<8} {:>12} {:>12} {:>12}  result",
        "nodes", "CPUs", "policy", "fill", "request", "median", "least", "budget"
    );
    for (nodes, budget) in BUDGETS_BY_NODES {
        let mut slowest = Duration::ZERO;
        for policy in [TopologyManagerPolicy::BestEffort, TopologyManagerPolicy::Restricted] {
            for packed in [false, true] {
                match cases(nodes, budget, policy, packed) {
                    Ok(median) => slowest = slowest.max(median),
                    Err(error) => {
                        eprintln!("{nodes} nodes, {policy}: {error}");
                        return ExitCode::FAILURE;
                    }
                }
            }
        }
        // The format that `cargo xtask bench budgets` reads.
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        println!("budget: native/{nodes} {:.4} us {}", us(slowest), us(budget));
        let hardest = hard(nodes);
        println!("budget: native/any-{nodes} {:.4} us {}", us(hardest), us(MAX_DECISION_TIME));
        missed += u32::from(slowest > budget || hardest > MAX_DECISION_TIME);
    }
    if missed > 0 {
        eprintln!("on machines of {missed} sizes, a decision took longer than it may");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Measures adversarial pods and returns the longest median.
fn hard(nodes: u32) -> Duration {
    let mut slowest = Duration::ZERO;
    for adversarial::Case { name, native, ledger, pod } in adversarial::cases(nodes) {
        let decision = native.admit(&ledger, &pod);
        let (median, least) = measure(|| drop(black_box(native.admit(black_box(&ledger), black_box(&pod)))));
        let result = if decision.outcome.is_ok() { "admitted" } else { "refused" };
        let gave_up = if decision.explanation.work_limit_reached { ", gave up" } else { "" };
        println!(
            "{nodes:>5} {name:<58} {median:>12.1?} {least:>12.1?} {MAX_DECISION_TIME:>12.1?}  {result}{gave_up}"
        );
        slowest = slowest.max(median);
    }
    slowest
}

/// Measures all requests and returns the longest median.
fn cases(
    nodes: u32,
    budget: Duration,
    policy: TopologyManagerPolicy,
    packed: bool,
) -> Result<Duration, String> {
    let machine = Machine::builder()
        .nodes(nodes)
        .sockets(nodes.div_ceil(8))
        .cores_per_node(8)
        .smt(2)
        .memory(Bytes::gib(64))
        .socket_distances(12, 32)
        .build()
        .map_err(|error| error.to_string())?;
    let native = NativeStrategy::new(&machine, &config(policy), &NativeOptions::default())
        .map_err(|error| error.to_string())?;
    let ledger = fill(&native, nodes, packed)?;
    let mut slowest = Duration::ZERO;
    let wide = if packed { (34, 130) } else { (20, 90) };
    for (name, cpus, gib) in
        [("small", 2, 4), ("wide", wide.0, wide.1), ("refused", 2, u64::from(nodes) * 64)]
    {
        let request = request("guest", cpus, gib);
        let decision = native.admit(&ledger, &request);
        let result = match &decision.outcome {
            Ok(grants) => {
                let cut = decision.explanation.searches.iter().any(|search| search.is_incomplete);
                let on = grants.first().map(|grant| grant.allocation.memory_nodes()).unwrap_or_default();
                format!("nodes {on}{}", if cut { ", cut off" } else { "" })
            }
            Err(rejection) => rejection.reason.to_string(),
        };
        let (median, least) =
            measure(|| drop(black_box(native.admit(black_box(&ledger), black_box(&request)))));
        println!(
            "{nodes:>5} {:>5}  {policy:<12} {:<7} {name:<8} {median:>12.1?} {least:>12.1?} {budget:>12.1?}  {result}",
            machine.cpus.len(),
            if packed { "packed" } else { "spread" },
        );
        slowest = slowest.max(median);
    }
    Ok(slowest)
}

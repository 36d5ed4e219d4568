//! Replay of a trace with a strategy on one machine.
//!
//! At each tick, pods leave at the end of their lifetime, then rejected pods with a due retry are tried again, then new pods arrive.
//! All containers of an admitted pod start at once, init containers first.

use std::collections::BTreeMap;

use numaward_topology::{CpuSet, Machine, NodeId, ZoneKind};

use super::{
    quality::{PodSizes, Quality},
    trace::{Sums, Trace},
};
use numaward_engine::{
    ledger::Ledger,
    request::{OwnerId, Request},
    strategy::{Allocatable, Strategy},
    terms::Terms,
};

/// The outcome of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// One letter per pod: `A` admitted at the first try, `R` on retry, `X` dropped.
    pub outcome: String,
    /// Sums over the Guaranteed pods.
    pub sums: Sums,
    /// Quality of the placements of Guaranteed pods.
    pub quality: Quality,
    /// Violated invariants; at most a few are reported.
    pub faults: Vec<String>,
}

/// Replays a trace on a machine.
pub fn replay(trace: &Trace, (machine, requests): (&Machine, &[Request]), strategy: &dyn Strategy) -> Replay {
    let mut replay = Replay::default();
    let mut letters = vec![' '; requests.len()];
    let (mut departures, mut retries) = (Due::default(), Due::default());
    let mut arrivals = Due::default();
    for (index, pod) in trace.pods.iter().enumerate().take(requests.len()) {
        arrivals.add(pod.at, index);
    }
    let mut ledger = strategy.idle();
    let allocatable = strategy.allocatable();
    let shapes = PodSizes::from_trace(trace);
    let mut last = None;
    while let Some(tick) = [&departures, &retries, &arrivals].into_iter().filter_map(Due::next).min() {
        if let Some(last) = last.replace(tick) {
            shapes.add_free(&mut replay.quality, &ledger, machine, &allocatable, tick - last);
        }
        for index in departures.take(tick) {
            ledger = strategy.release(&ledger, &requests[index].owner);
        }
        let again = retries.take(tick);
        let first = arrivals.take(tick);
        let tries =
            again.into_iter().map(|index| (index, 'R')).chain(first.into_iter().map(|index| (index, 'A')));
        for (index, letter) in tries {
            let request = &requests[index];
            let is_admitted = admit(strategy, &mut ledger, request, &Terms::default());
            if is_admitted {
                letters[index] = letter;
                let pod = &trace.pods[index];
                departures.add(tick.saturating_add(pod.life), index);
                if pod.guaranteed {
                    let account = ledger.owner(&request.owner).into_iter();
                    let held = account.flat_map(|account| account.containers.values());
                    replay.quality.add_placement(machine, held, pod.life);
                }
            } else if letter == 'A' {
                retries.add(tick.saturating_add(trace.retry_after), index);
            } else {
                letters[index] = 'X';
            }
        }
        if replay.faults.len() < 3 {
            replay.faults.extend(
                faults(&ledger, &allocatable).into_iter().map(|fault| format!("tick {tick}: {fault}")),
            );
        }
    }
    if ledger != strategy.idle() && replay.faults.is_empty() && ledger.allocations().next().is_none() {
        replay.faults.push("after all pods have left, the ledger is not as in the beginning".to_owned());
    }
    replay.outcome = letters.into_iter().collect();
    replay.sums = trace.sums(&replay.outcome);
    replay
}

/// Decides on a request, and starts all containers of an admitted pod. Returns whether it is admitted.
pub(super) fn admit(strategy: &dyn Strategy, ledger: &mut Ledger, request: &Request, terms: &Terms) -> bool {
    let decision = strategy.admit_watched(ledger, request, terms, &|_| {});
    *ledger = decision.ledger;
    if decision.outcome.is_err() {
        return false;
    }
    for container in request.all_containers() {
        *ledger = strategy.note_started(ledger, &request.owner, &container.name);
    }
    true
}

/// Due events by tick.
#[derive(Default)]
pub(super) struct Due(BTreeMap<u64, Vec<usize>>);

impl Due {
    pub(super) fn add(&mut self, tick: u64, index: usize) {
        self.0.entry(tick).or_default().push(index);
    }

    pub(super) fn next(&self) -> Option<u64> {
        self.0.keys().next().copied()
    }

    /// Returns the due events in the order of the trace.
    pub(super) fn take(&mut self, tick: u64) -> Vec<usize> {
        let mut due = self.0.remove(&tick).unwrap_or_default();
        due.sort_unstable();
        due
    }
}

/// Returns messages about violated invariants: a CPU that is exclusive to two owners, or reserved and exclusive, or more
/// guaranteed bytes on a node than it has.
pub fn faults(ledger: &Ledger, allocatable: &Allocatable) -> Vec<String> {
    let mut faults = Vec::new();
    let mut seen: BTreeMap<&OwnerId, CpuSet> = BTreeMap::new();
    let mut bytes: BTreeMap<(ZoneKind, NodeId), u128> = BTreeMap::new();
    for (owner, container, held) in ledger.allocations() {
        let cpus = held.held_cpus();
        if !cpus.is_subset(&allocatable.cpus) {
            faults.push(format!("{owner}: {container} has CPUs {cpus}, some of which are reserved"));
        }
        seen.entry(owner).or_default().extend(cpus.iter());
        for (&kind, placed) in &held.placed {
            for (&node, placed) in placed {
                *bytes.entry((kind, node)).or_default() += u128::from(placed.0);
            }
        }
    }
    let mut all = CpuSet::new();
    for (owner, cpus) in seen {
        if cpus.intersects(&all) || cpus.intersects(ledger.shared_pool()) {
            faults.push(format!(
                "{owner} has CPUs {cpus}, some of which belong to another owner or to the shared pool"
            ));
        }
        all.extend(cpus.iter());
    }
    for ((kind, node), placed) in bytes {
        let most =
            allocatable.memory.get(&kind).and_then(|nodes| nodes.get(&node)).copied().unwrap_or_default();
        if placed > u128::from(most.0) {
            faults.push(format!("node {node}: {placed} bytes of {kind} are guaranteed of {}", most.0));
        }
        let account = ledger.nodes().get(&node).and_then(|account| account.kinds.get(&kind));
        let free = account.map_or(0, |account| account.free.0);
        if placed + u128::from(free) != u128::from(most.0) {
            faults.push(format!(
                "node {node}: {placed} bytes of {kind} guaranteed and {free} free are not {}",
                most.0
            ));
        }
    }
    faults
}

//! A fleet on paper: hosts alike, the pods of traces, and a scheduler that picks a host for each.
//!
//! Each host brings the pods of one trace, shifted in time by a random number of ticks and repeated until the longest
//! trace of its group is over; so the mean load of a host is that of the traces. Hosts with the same machine and the same
//! configuration are a [`Group`], with a scheduler of its own.
//!
//! At each tick pods leave, then those are tried again that are due, then pods arrive. A try is:
//!
//! 1. The [`scheduler`] picks a host. Where none has room, the pod waits, and is tried again whenever pods have left.
//! 2. The host decides as its strategy does. A pod that is refused has failed and holds nothing. Its controller makes a
//!    new one: after the first refusal at once, after the following ones in 1, 2, 4, 8 … ticks.
//!
//! A pod that is not placed `retry_after` ticks after its arrival is lost; for one that was refused, the last try is then.

mod load;
mod scheduler;
pub mod topology_match;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use numaward_topology::{Machine, NodeId, NumaNode, ZoneKind};

pub use self::load::{Fleet, FleetError, Group, Member};
use self::scheduler::{Asked, Scheduler};
use super::{
    replay::{Due, MakeRoom, Moves, admit, faults},
    trace::Sums,
    variant::Variant,
};
use crate::{
    ledger::Ledger,
    policy::{MemoryReservation, PolicyConfig},
    quantity::Quantity,
    request::{OwnerId, Request},
    strategy::{Allocatable, Strategy},
};

/// Who decides in a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deciders {
    /// On the hosts. `None`: each host is one node, and the kubelet decides. What is lost against that is lost to NUMA.
    pub host: Option<Variant>,
    /// Whether the scheduler has the plugin `NodeResourceTopologyMatch`, beside `NodeResourcesFit`.
    pub topology_match: bool,
}

/// What became of the pods of a group, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The sums over the Guaranteed pods.
    pub sums: Sums,
    /// How often a host refused a pod.
    pub refusals: u64,
    /// How often a controller made a new pod for one that was refused.
    pub retries: u64,
    /// What was moved.
    pub moves: Moves,
    /// What must not be and was; empty if all is well.
    pub faults: Vec<String>,
}

impl Outcome {
    /// Adds that of another group.
    pub fn add(&mut self, other: &Self) {
        self.sums.add(&other.sums);
        self.refusals += other.refusals;
        self.retries += other.retries;
        self.moves.add(&other.moves);
        self.faults.extend_from_slice(&other.faults);
    }
}

impl Group<'_> {
    /// What became of the pods, or why strategy or scheduler do not start.
    pub fn run(&self, deciders: Deciders) -> Result<Outcome, String> {
        let (machine, policy) = match deciders.host {
            Some(_) => (Cow::Borrowed(&self.machine), Cow::Borrowed(&self.policy)),
            None => (Cow::Owned(one_node(&self.machine)), Cow::Owned(of_one_node(&self.policy))),
        };
        let variant = deciders.host.unwrap_or(Variant::Kubelet);
        let outcome = variant.with(&machine, &policy, |strategy, make_room| {
            let on = (&*machine, &*policy, &allocatable(strategy, &machine));
            let scheduler = Scheduler::new(on, self.requests(), deciders.topology_match, self.seed)?;
            Ok(Run::new(self, (strategy, make_room), scheduler).run())
        });
        outcome.map_err(|error| error.to_string())?
    }
}

/// The same machine, as if it had one node.
fn one_node(machine: &Machine) -> Machine {
    let mut merged = NumaNode { distances: [(NodeId(0), 10)].into(), ..NumaNode::default() };
    for node in machine.nodes.values() {
        merged.cpus.extend(node.cpus.iter());
        merged.memory.0 = merged.memory.0.saturating_add(node.memory.0);
        for (&size, pool) in &node.hugepages {
            let all = merged.hugepages.entry(size).or_default();
            all.total = all.total.saturating_add(pool.total);
            all.free = all.free.saturating_add(pool.free);
        }
    }
    let mut one = machine.clone();
    one.nodes = [(NodeId(0), merged)].into();
    one.cpus.values_mut().for_each(|cpu| cpu.node = NodeId(0));
    one
}

/// The same configuration, for a machine with one node.
fn of_one_node(policy: &PolicyConfig) -> PolicyConfig {
    let mut limits: BTreeMap<ZoneKind, Quantity> = BTreeMap::new();
    for (&kind, &amount) in policy.reserved_memory.iter().flat_map(|of| &of.limits) {
        let add = |all: &mut Quantity| *all = all.checked_add(amount).unwrap_or(amount);
        limits.entry(kind).and_modify(add).or_insert(amount);
    }
    let reserved = MemoryReservation { numa_node: NodeId(0), limits };
    let reserved_memory = if reserved.limits.is_empty() { Vec::new() } else { vec![reserved] };
    PolicyConfig { reserved_memory, ..policy.clone() }
}

/// What a host can allocate: all there is of what the strategy does not manage.
fn allocatable(strategy: &dyn Strategy, machine: &Machine) -> Allocatable {
    let mut allocatable = strategy.allocatable();
    if allocatable.cpus.is_empty() {
        allocatable.cpus = machine.cpu_ids();
    }
    let all = || machine.nodes.iter().map(|(&id, node)| (id, node.memory)).collect();
    allocatable.memory.entry(ZoneKind::Memory).or_insert_with(all);
    allocatable
}

/// A pod that runs: on which host, and as whom.
struct Placed {
    host: usize,
    owner: OwnerId,
}

/// What came of a try.
enum Try {
    Placed,
    /// No host has room.
    Waits,
    /// A host refused it.
    Refused,
}

struct Run<'a> {
    group: &'a Group<'a>,
    strategy: &'a dyn Strategy,
    make_room: &'a MakeRoom<'a>,
    scheduler: Scheduler,
    /// By trace and pod.
    asked: Vec<Vec<Asked>>,
    ledgers: Vec<Ledger>,
    running: BTreeMap<usize, Placed>,
    departures: Due,
    retries: Due,
    /// Pods for which no host has room.
    waiting: BTreeSet<usize>,
    /// How often hosts refused a pod.
    refused: BTreeMap<usize, u32>,
    outcome: Outcome,
}

impl<'a> Run<'a> {
    fn new(
        group: &'a Group<'a>,
        (strategy, make_room): (&'a dyn Strategy, &'a MakeRoom<'a>),
        mut scheduler: Scheduler,
    ) -> Self {
        let all = |requests: &Vec<Request>| requests.iter().map(|request| scheduler.asked(request)).collect();
        let asked = group.traces.iter().map(|(_, requests)| all(requests)).collect();
        let idle = strategy.idle();
        scheduler.add_hosts(group.hosts, &idle);
        Self {
            group,
            strategy,
            make_room,
            scheduler,
            asked,
            ledgers: vec![idle; group.hosts],
            running: BTreeMap::new(),
            departures: Due::default(),
            retries: Due::default(),
            waiting: BTreeSet::new(),
            refused: BTreeMap::new(),
            outcome: Outcome::default(),
        }
    }

    fn run(mut self) -> Outcome {
        let mut arrivals = Due::default();
        for (index, arrival) in self.group.arrivals.iter().enumerate() {
            arrivals.add(arrival.at, index);
        }
        while let Some(tick) =
            [&self.departures, &self.retries, &arrivals].into_iter().filter_map(Due::next).min()
        {
            let departed = self.departures.take(tick);
            let mut again: BTreeSet<usize> = self.retries.take(tick).into_iter().collect();
            if !departed.is_empty() {
                again.append(&mut self.waiting);
            }
            for index in departed {
                self.leave(index);
            }
            for index in again {
                self.place(index, tick);
            }
            let arrived = arrivals.take(tick);
            let is_last = !arrived.is_empty() && arrivals.next().is_none();
            for index in arrived {
                self.place(index, tick);
            }
            if is_last {
                self.check();
            }
        }
        let sums = &mut self.outcome.sums;
        sums.guaranteed = self.group.asked().guaranteed;
        sums.dropped = sums.guaranteed - sums.admitted();
        self.outcome
    }

    fn leave(&mut self, index: usize) {
        let Some(Placed { host, owner }) = self.running.remove(&index) else { return };
        let ledger = self.strategy.release(&self.ledgers[host], &owner);
        let arrival = &self.group.arrivals[index];
        self.scheduler.left(host, &self.asked[arrival.trace][arrival.pod], &ledger);
        self.ledgers[host] = ledger;
    }

    /// Tries to place a pod, and sees to the next try where it cannot be.
    fn place(&mut self, index: usize, tick: u64) {
        let arrival = &self.group.arrivals[index];
        let last = arrival.at.saturating_add(self.group.traces[arrival.trace].0.retry_after);
        if tick > last {
            return;
        }
        loop {
            match self.attempt(index, tick) {
                Try::Placed => return,
                Try::Waits => {
                    self.waiting.insert(index);
                    return;
                }
                Try::Refused => {
                    self.outcome.refusals += 1;
                    let refused = self.refused.entry(index).or_default();
                    *refused += 1;
                    if tick == last {
                        return;
                    }
                    self.outcome.retries += 1;
                    if *refused > 1 {
                        let delay = 1_u64.checked_shl(*refused - 2).unwrap_or(u64::MAX);
                        self.retries.add(tick.saturating_add(delay).min(last), index);
                        return;
                    }
                }
            }
        }
    }

    fn attempt(&mut self, index: usize, tick: u64) -> Try {
        let group = self.group;
        let arrival = &group.arrivals[index];
        let asked = &self.asked[arrival.trace][arrival.pod];
        let Some(host) = self.scheduler.pick(asked) else { return Try::Waits };
        let (trace, requests) = &group.traces[arrival.trace];
        let tries = self.refused.get(&index).copied().unwrap_or(0);
        // Each is a pod of its own.
        let owner: OwnerId = format!("{index}.{tries}").into();
        let request = Request { owner: owner.clone(), ..requests[arrival.pod].clone() };
        let ledger = &mut self.ledgers[host];
        let is_admitted = admit(self.strategy, self.make_room, ledger, &request, &mut self.outcome.moves);
        self.scheduler.decided(host, asked, is_admitted, ledger);
        if !is_admitted {
            return Try::Refused;
        }
        let pod = &trace.pods[arrival.pod];
        self.running.insert(index, Placed { host, owner });
        self.departures.add(tick.saturating_add(pod.life), index);
        let letter = if tries == 0 && tick == arrival.at { 'A' } else { 'R' };
        self.outcome.sums.count(pod, letter);
        Try::Placed
    }

    /// Looks at every host while there is most on it.
    fn check(&mut self) {
        let allocatable = self.strategy.allocatable();
        for (host, ledger) in self.ledgers.iter().enumerate() {
            let faults = faults(ledger, &allocatable).into_iter().take(3);
            self.outcome.faults.extend(faults.map(|fault| format!("host {host}: {fault}")));
        }
    }
}

//! A fleet on paper: hosts alike, the pods of traces, and a scheduler that picks a host for each.
//!
//! Each host brings the pods of one trace, shifted in time by a random number of ticks and repeated until the longest
//! trace of its group is over; so the mean load of a host is that of the traces. Hosts with the same machine and the same
//! configuration are a [`Group`], with a scheduler of its own.
//!
//! At each tick, in this order and each time the oldest pods first:
//!
//! 1. Pods leave whose life is over, and pods are given up that had no host for too long.
//! 2. A host that pods have left tries those again that it refused and that are still bound to it.
//! 3. Pods are evicted that were refused a while ago: of each host the one that was refused first.
//! 4. The [`scheduler`] picks a host for pods that were made anew, and for those for which none had room, if any has more now.
//! 5. Pods arrive, and the scheduler picks a host for each.
//!
//! The host that gets a pod decides as its strategy does. [`RefusalPolicy`] says what becomes of a pod that is refused. A pod that does
//! not run `retry_after` ticks after its arrival is given up; it has its last try then.

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
    replay::{Due, admit, faults},
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

/// The handling of a pod that a host refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalPolicy {
    /// It has failed, as with the kubelet, and takes nothing of the host. Its controller makes a new one: after the first refusal
    /// at once, after the following ones in 1, 2, 4, 8 … ticks.
    Fail,
    /// It stays bound to the host, so that the scheduler counts what it requests there, and is tried again on that host only
    /// (`kubernetes.refused: wait`).
    Wait,
    /// The same for a while. Then it is evicted, one pod of each host a tick, and its controller makes a new one at once
    /// (`kubernetes.refused: evict`).
    Evict {
        /// The number of ticks after the refusal.
        after: u64,
    },
}

/// The deciders in a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deciders {
    /// On the hosts. `None`: each host is one node, and the kubelet decides. What is lost against that is lost to NUMA.
    pub host: Option<Variant>,
    /// On pods that a host refused.
    pub refused: RefusalPolicy,
    /// True if the scheduler has the plugin `NodeResourceTopologyMatch`, beside `NodeResourcesFit`.
    pub topology_match: bool,
}

/// The outcome for the pods of one or several groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The sums over the Guaranteed pods.
    pub sums: Sums,
    /// Pods that a host refused when they were bound to it.
    pub refusals: u64,
    /// Of these, pods that started there later.
    pub started_later: u64,
    /// The number of new pods that controllers created for refused ones.
    pub retries: u64,
    /// Violated invariants.
    pub faults: Vec<String>,
}

impl Outcome {
    /// Adds that of another group.
    pub fn add(&mut self, other: &Self) {
        self.sums.add(&other.sums);
        self.refusals += other.refusals;
        self.started_later += other.started_later;
        self.retries += other.retries;
        self.faults.extend_from_slice(&other.faults);
    }
}

/// An event on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A pod is bound to it that it admits, or refuses.
    Bound {
        /// True if the pod is admitted.
        is_admitted: bool,
    },
    /// A pod that it refused is tried again.
    Again {
        /// True if the pod is admitted.
        is_admitted: bool,
    },
    /// A pod's life is over.
    Left,
    /// A pod that it refused is given up.
    GivenUp,
    /// A pod that it refused is evicted.
    Evicted,
}

/// A callback for each step: the host, the pod, the event, and the ledger of the host afterwards.
pub type Watch<'a> = dyn FnMut(usize, &Request, Step, &Ledger) + 'a;

impl Group<'_> {
    /// Returns the outcome, or the reason why the strategy or the scheduler does not start.
    pub fn run(&self, deciders: Deciders) -> Result<Outcome, String> {
        self.run_with(deciders, None)
    }

    /// The same, with a look at each step.
    pub fn run_watched(&self, deciders: Deciders, watch: &mut Watch<'_>) -> Result<Outcome, String> {
        self.run_with(deciders, Some(watch))
    }

    fn run_with(&self, deciders: Deciders, watch: Option<&mut Watch<'_>>) -> Result<Outcome, String> {
        let (machine, policy) = match deciders.host {
            Some(_) => (Cow::Borrowed(&self.machine), Cow::Borrowed(&self.policy)),
            None => (Cow::Owned(one_node(&self.machine)), Cow::Owned(of_one_node(&self.policy))),
        };
        let variant = deciders.host.unwrap_or(Variant::Kubelet);
        let outcome = variant.with(&machine, &policy, |strategy| {
            let on = (&*machine, &*policy, &allocatable(strategy, &machine));
            let scheduler = Scheduler::new(on, self.requests(), deciders.topology_match, self.seed)?;
            Ok(Run::new(self, (strategy, deciders.refused), scheduler, watch).run())
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

/// Returns the allocatable resources of a host: all of a resource that the strategy does not manage.
fn allocatable(strategy: &dyn Strategy, machine: &Machine) -> Allocatable {
    let mut allocatable = strategy.allocatable();
    if allocatable.cpus.is_empty() {
        allocatable.cpus = machine.cpu_ids();
    }
    let all = || machine.nodes.iter().map(|(&id, node)| (id, node.memory)).collect();
    allocatable.memory.entry(ZoneKind::Memory).or_insert_with(all);
    allocatable
}

/// A pod that is bound to a host.
struct Bound {
    host: usize,
    since: u64,
    /// Each pod that a controller makes is one of its own.
    owner: OwnerId,
}

struct Run<'a, 'w> {
    group: &'a Group<'a>,
    strategy: &'a dyn Strategy,
    refused: RefusalPolicy,
    scheduler: Scheduler,
    watch: Option<&'a mut Watch<'w>>,
    /// By trace and pod.
    asked: Vec<Vec<Asked>>,
    ledgers: Vec<Ledger>,
    running: BTreeMap<usize, Bound>,
    /// Bound to a host that refused them.
    stuck: BTreeMap<usize, Bound>,
    due: Dates,
    /// Pods for which no host has room.
    waiting: BTreeSet<usize>,
    /// The number of refusals by hosts.
    refusals: BTreeMap<usize, u32>,
    outcome: Outcome,
}

/// When something is to be done with which pod.
#[derive(Default)]
struct Dates {
    arrivals: Due,
    departures: Due,
    /// A controller makes a new one.
    retries: Due,
    evictions: Due,
    give_up: Due,
}

impl Dates {
    fn next(&self) -> Option<u64> {
        let Self { arrivals, departures, retries, evictions, give_up } = self;
        [arrivals, departures, retries, evictions, give_up].into_iter().filter_map(Due::next).min()
    }
}

impl<'a, 'w> Run<'a, 'w> {
    fn new(
        group: &'a Group<'a>,
        (strategy, refused): (&'a dyn Strategy, RefusalPolicy),
        mut scheduler: Scheduler,
        watch: Option<&'a mut Watch<'w>>,
    ) -> Self {
        let all = |requests: &Vec<Request>| requests.iter().map(|request| scheduler.asked(request)).collect();
        let asked = group.traces.iter().map(|(_, requests)| all(requests)).collect();
        let idle = strategy.idle();
        scheduler.add_hosts(group.hosts, &idle);
        let mut due = Dates::default();
        for (index, arrival) in group.arrivals.iter().enumerate() {
            due.arrivals.add(arrival.at, index);
        }
        Self {
            group,
            strategy,
            refused,
            scheduler,
            watch,
            asked,
            ledgers: vec![idle; group.hosts],
            running: BTreeMap::new(),
            stuck: BTreeMap::new(),
            due,
            waiting: BTreeSet::new(),
            refusals: BTreeMap::new(),
            outcome: Outcome::default(),
        }
    }

    fn run(mut self) -> Outcome {
        while let Some(tick) = self.due.next() {
            let mut again: BTreeSet<usize> = self.due.retries.take(tick).into_iter().collect();
            let mut has_more_room = self.give_up(tick);
            let left = self.leave(tick);
            has_more_room |= !left.is_empty();
            self.try_stuck(&left, tick);
            let evicted = self.evict(tick);
            has_more_room |= !evicted.is_empty();
            again.extend(evicted);
            if has_more_room {
                again.append(&mut self.waiting);
            }
            for index in again {
                self.place(index, tick);
            }
            let arrived = self.due.arrivals.take(tick);
            let is_last = !arrived.is_empty() && self.due.arrivals.next().is_none();
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

    fn asked(&self, index: usize) -> &Asked {
        let arrival = &self.group.arrivals[index];
        &self.asked[arrival.trace][arrival.pod]
    }

    fn request(&self, index: usize, owner: &OwnerId) -> Request {
        let arrival = &self.group.arrivals[index];
        Request { owner: owner.clone(), ..self.group.traces[arrival.trace].1[arrival.pod].clone() }
    }

    /// The tick of the last try.
    fn last(&self, index: usize) -> u64 {
        let arrival = &self.group.arrivals[index];
        arrival.at.saturating_add(self.group.traces[arrival.trace].0.retry_after)
    }

    fn note(&mut self, index: usize, bound: &Bound, step: Step) {
        if self.watch.is_some() {
            let request = self.request(index, &bound.owner);
            if let Some(watch) = &mut self.watch {
                watch(bound.host, &request, step, &self.ledgers[bound.host]);
            }
        }
    }

    /// Gives up the pods that have had their last try; whether hosts have more room for it.
    fn give_up(&mut self, tick: u64) -> bool {
        let mut has_room = false;
        for index in self.due.give_up.take(tick) {
            if let Some(bound) = self.stuck.remove(&index) {
                self.unbind(index, &bound, Step::GivenUp);
                has_room = true;
            }
        }
        has_room
    }

    /// Has pods leave whose life is over; from which hosts.
    fn leave(&mut self, tick: u64) -> BTreeSet<usize> {
        let mut hosts = BTreeSet::new();
        for index in self.due.departures.take(tick) {
            let Some(bound) = self.running.remove(&index) else { continue };
            self.ledgers[bound.host] = self.strategy.release(&self.ledgers[bound.host], &bound.owner);
            self.scheduler.published(bound.host, &self.ledgers[bound.host]);
            self.unbind(index, &bound, Step::Left);
            hosts.insert(bound.host);
        }
        hosts
    }

    /// Has hosts that pods have left try those again that are bound to them.
    fn try_stuck(&mut self, hosts: &BTreeSet<usize>, tick: u64) {
        let stuck = self.stuck.iter().filter(|(_, bound)| hosts.contains(&bound.host));
        let stuck: Vec<usize> = stuck.map(|(&index, _)| index).collect();
        for index in stuck {
            let Some(bound) = self.stuck.remove(&index) else { continue };
            let is_admitted = self.decide(index, &bound);
            self.note(index, &bound, Step::Again { is_admitted });
            if is_admitted {
                self.outcome.started_later += 1;
                self.start(index, bound, tick);
            } else {
                self.stuck.insert(index, bound);
            }
        }
    }

    /// Evicts pods that are due, and returns those for which controllers create new ones.
    fn evict(&mut self, tick: u64) -> Vec<usize> {
        let (mut hosts, mut evicted) = (BTreeSet::new(), Vec::new());
        let mut due = self.due.evictions.take(tick);
        due.sort_by_key(|index| self.stuck.get(index).map(|bound| bound.since));
        for index in due {
            let Some(bound) = self.stuck.remove(&index) else { continue };
            if hosts.insert(bound.host) {
                self.unbind(index, &bound, Step::Evicted);
                self.outcome.retries += 1;
                evicted.push(index);
            } else {
                self.due.evictions.add(tick.saturating_add(1), index);
                self.stuck.insert(index, bound);
            }
        }
        evicted
    }

    fn unbind(&mut self, index: usize, bound: &Bound, step: Step) {
        let arrival = &self.group.arrivals[index];
        self.scheduler.unbind(bound.host, &self.asked[arrival.trace][arrival.pod]);
        self.note(index, bound, step);
    }

    /// Has the scheduler pick a host for a pod and that host decide, and sees to what comes next.
    fn place(&mut self, index: usize, tick: u64) {
        let last = self.last(index);
        if tick > last {
            return;
        }
        loop {
            let asked = self.asked(index).clone();
            let Some(host) = self.scheduler.pick(&asked) else {
                self.waiting.insert(index);
                return;
            };
            let refusals = self.refusals.get(&index).copied().unwrap_or(0);
            let bound = Bound { host, since: tick, owner: format!("{index}.{refusals}").into() };
            let is_admitted = self.decide(index, &bound);
            self.note(index, &bound, Step::Bound { is_admitted });
            if is_admitted {
                self.scheduler.bind(host, &asked);
                return self.start(index, bound, tick);
            }
            self.outcome.refusals += 1;
            self.refusals.insert(index, refusals + 1);
            match self.refused {
                RefusalPolicy::Fail if tick == last => return,
                RefusalPolicy::Fail => {
                    self.outcome.retries += 1;
                    if let Some(exponent) = refusals.checked_sub(1) {
                        let delay = 1_u64.checked_shl(exponent).unwrap_or(u64::MAX);
                        return self.due.retries.add(tick.saturating_add(delay).min(last), index);
                    }
                }
                RefusalPolicy::Wait | RefusalPolicy::Evict { .. } => {
                    self.scheduler.bind(host, &asked);
                    self.stuck.insert(index, bound);
                    self.due.give_up.add(last.saturating_add(1), index);
                    if let RefusalPolicy::Evict { after } = self.refused {
                        self.due.evictions.add(tick.saturating_add(after), index);
                    }
                    return;
                }
            }
        }
    }

    /// Has the host decide that a pod is bound to.
    fn decide(&mut self, index: usize, bound: &Bound) -> bool {
        let request = self.request(index, &bound.owner);
        let is_admitted = admit(self.strategy, &mut self.ledgers[bound.host], &request);
        self.scheduler.published(bound.host, &self.ledgers[bound.host]);
        is_admitted
    }

    fn start(&mut self, index: usize, bound: Bound, tick: u64) {
        let arrival = &self.group.arrivals[index];
        let pod = &self.group.traces[arrival.trace].0.pods[arrival.pod];
        self.running.insert(index, bound);
        self.due.departures.add(tick.saturating_add(pod.life), index);
        let is_first = tick == arrival.at && !self.refusals.contains_key(&index);
        self.outcome.sums.count(pod, if is_first { 'A' } else { 'R' });
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

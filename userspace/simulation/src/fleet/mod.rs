//! Simulation of a fleet: equal hosts, the pods of traces, and a scheduler that selects a host for each pod.
//!
//! # Terms
//! Hosts with the same machine and the same configuration are a [`Group`] with its own scheduler. Each host adds the pods of
//! one trace to its group. They are shifted by a random number of ticks, and repeated until the longest trace of the group is
//! over, so the mean load per host is that of the traces.
//!
//! # Algorithm
//! At each tick, in this order, and in each step the oldest pods first:
//!
//! 1. Refused pods that are still bound to a host are given up if their time is over, and running pods leave at the end of their
//!    lifetime.
//! 2. Each host that a pod has left tries its refused pods again.
//! 3. Refused pods that are due are evicted, at most one per host: the one that was refused first.
//! 4. The [`scheduler`] selects hosts for new pods that controllers created in place of refused ones. If a host has become less
//!    full, it also tries the pods for which no host had enough resources.
//! 5. New pods arrive, and the scheduler selects a host for each.
//!
//! The selected host decides with its strategy. [`RefusalPolicy`] determines the handling of refused pods. A pod is tried for the
//! last time `retry_after` ticks after its arrival.

mod claims;
mod load;
mod scheduler;
pub mod topology_match;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    iter,
};

use numaward_topology::{Bytes, Machine, NodeId, NumaNode, ZoneKind};

pub use self::load::{Fleet, FleetError, Group, Member};
use self::{
    claims::{ClaimDevices, ClaimShare},
    scheduler::{PodRequests, Scheduler},
};
use super::{
    replay::{Due, admit, faults},
    trace::{Sums, TracePod},
    variant::Variant,
};
use numaward_engine::{
    claims::{allocator::Claim, devices::placement_request},
    ledger::Ledger,
    moves::RebalanceLimits,
    policy::{MemoryReservation, PolicyConfig, Tiers},
    qos::QosClass,
    quantity::Quantity,
    request::{OwnerId, Request},
    strategy::{Allocatable, Strategy},
    terms::Terms,
};

/// The handling of a pod that a host refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalPolicy {
    /// The pod fails, as with the kubelet, and uses nothing of the host. Its controller creates a new pod: at once after the first
    /// refusal, and after 1, 2, 4, 8 … ticks after the following ones.
    Fail,
    /// The pod stays bound to the host, so the scheduler counts its requests there, and it is only tried again on that host
    /// (`kubernetes.refused: wait`).
    Wait,
    /// The pod stays bound for some ticks and is then evicted, one pod per host and tick. Its controller creates a new pod at once
    /// (`kubernetes.refused: evict`).
    Evict {
        /// Ticks from the refusal to the eviction.
        after: u64,
    },
    /// Running pods of the host are moved if the pod fits then; otherwise as with `Evict` (`kubernetes.refused: make-room`). A
    /// move takes no time.
    MakeRoom {
        /// Ticks from the refusal to the eviction.
        after: u64,
        /// Limits of the moves on each host.
        limits: MoveLimits,
    },
}

/// Limits of the moves on a host, as in the configuration `rebalance`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveLimits {
    /// Maximum number of moves for one pod.
    pub moves: usize,
    /// Maximum number of moved bytes within `window`.
    pub bytes: Bytes,
    /// Window of the limit on bytes, in ticks.
    pub window: u64,
    /// Ticks for which a moved pod is not moved again.
    pub dwell: u64,
}

/// Plugin that the scheduler uses in addition to `NodeResourcesFit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulerPlugin {
    #[default]
    None,
    NodeResourceTopologyMatch,
    /// `DynamicResources`: Guaranteed pods have resource claims for devices of the hosts.
    ResourceClaims {
        /// True if there is a device for all nodes of a host in addition to those for single nodes.
        has_host_device: bool,
    },
}

/// Strategy of the hosts, handling of refused pods, and plugin of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deciders {
    /// Strategy of the hosts. `None` is the baseline for the loss by NUMA: each host has a single node, and the kubelet's strategy
    /// decides.
    pub host: Option<Variant>,
    /// Handling of refused pods.
    pub refused: RefusalPolicy,
    pub plugin: SchedulerPlugin,
}

/// Outcome for the pods of one or several groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Sums over the Guaranteed pods.
    pub sums: Sums,
    /// Number of refusals of newly bound pods.
    pub refusals: u64,
    /// Number of refused pods that started later on the same host.
    pub started_later: u64,
    /// Number of new pods that controllers created in place of refused ones.
    pub retries: u64,
    /// Number of moves of running containers.
    pub moves: u64,
    /// Memory that these moves took to other nodes.
    pub moved: Bytes,
    /// Violated invariants.
    pub faults: Vec<String>,
}

impl Outcome {
    /// Adds the outcome of another group.
    pub fn add(&mut self, other: &Self) {
        self.sums.add(&other.sums);
        self.refusals += other.refusals;
        self.started_later += other.started_later;
        self.retries += other.retries;
        self.moves += other.moves;
        self.moved.0 = self.moved.0.saturating_add(other.moved.0);
        self.faults.extend_from_slice(&other.faults);
    }
}

/// An event on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// A pod was bound to the host, which admitted or refused it.
    Bound {
        /// True if the pod is admitted.
        is_admitted: bool,
    },
    /// The host decided again on a refused pod.
    Again {
        /// True if the pod is admitted.
        is_admitted: bool,
    },
    /// A pod left at the end of its lifetime.
    Left,
    /// A refused pod was given up.
    GivenUp,
    /// A refused pod was evicted.
    Evicted,
}

/// Callback for each event. The arguments are the host, the pod, the event, and the host's ledger afterwards.
pub type Watch<'a> = dyn FnMut(usize, &Request, HostEvent, &Ledger) + 'a;

/// A pod of a group, for a scheduler outside this crate.
#[derive(Clone, Debug)]
pub struct FleetPod<'a> {
    /// Tick of the arrival.
    pub at: u64,
    /// Ticks from the arrival to the last try.
    pub retry_after: u64,
    pub pod: &'a TracePod,
    pub request: &'a Request,
    /// The claim that the pod has with [`SchedulerPlugin::ResourceClaims`], without a host device.
    pub claim: Option<Claim>,
}

impl Group<'_> {
    /// Returns the pods in the order of their arrivals. The error is the reason why `native` refuses the configuration.
    pub fn pods(&self) -> Result<Vec<FleetPod<'_>>, String> {
        let native = Variant::Native { tiers: Tiers::default() };
        let claims = native.with(&self.machine, &self.policy, |strategy| {
            let on = (&self.machine, &self.policy, &allocatable(strategy, &self.machine));
            let mut devices = ClaimDevices::new(on, false)?;
            devices.idle_host(&strategy.idle());
            let of_pod = |request: &Request| {
                (request.qos() == QosClass::Guaranteed).then(|| devices.claim(request)).flatten()
            };
            let of_trace = |(_, requests): &(_, Vec<Request>)| requests.iter().map(of_pod).collect();
            Ok::<Vec<Vec<_>>, String>(self.traces.iter().map(of_trace).collect())
        });
        let claims = claims.map_err(|error| error.to_string())??;
        let pod = |arrival: &load::Arrival| {
            let (trace, requests) = &self.traces[arrival.trace];
            FleetPod {
                at: arrival.at,
                retry_after: trace.retry_after,
                pod: &trace.pods[arrival.pod],
                request: &requests[arrival.pod],
                claim: claims[arrival.trace][arrival.pod].clone(),
            }
        };
        Ok(self.arrivals.iter().map(pod).collect())
    }

    /// Runs the simulation. The error is the reason why the strategy or the scheduler refuses the configuration.
    pub fn run(&self, deciders: Deciders) -> Result<Outcome, String> {
        self.run_with(deciders, None)
    }

    /// Runs the simulation with a callback for each event.
    pub fn run_watched(&self, deciders: Deciders, watch: &mut Watch<'_>) -> Result<Outcome, String> {
        self.run_with(deciders, Some(watch))
    }

    fn run_with(&self, deciders: Deciders, watch: Option<&mut Watch<'_>>) -> Result<Outcome, String> {
        let (machine, policy) = match deciders.host {
            Some(_) => (Cow::Borrowed(&self.machine), Cow::Borrowed(&self.policy)),
            None => (Cow::Owned(one_node(&self.machine)), Cow::Owned(one_node_policy(&self.policy))),
        };
        let variant = deciders.host.unwrap_or(Variant::Kubelet);
        let outcome = variant.with(&machine, &policy, |strategy| {
            let on = (&*machine, &*policy, &allocatable(strategy, &machine));
            let scheduler = Scheduler::new(on, self.requests(), deciders.plugin, self.seed)?;
            Ok(FleetRun::new(self, (strategy, deciders.refused), scheduler, watch).run())
        });
        outcome.map_err(|error| error.to_string())?
    }
}

/// Merges all nodes of a machine into one.
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

/// Merges the reservations of all nodes into one.
fn one_node_policy(policy: &PolicyConfig) -> PolicyConfig {
    let mut limits: BTreeMap<ZoneKind, Quantity> = BTreeMap::new();
    for (&kind, &amount) in policy.reserved_memory.iter().flat_map(|of| &of.limits) {
        let add = |all: &mut Quantity| *all = all.checked_add(amount).unwrap_or(amount);
        limits.entry(kind).and_modify(add).or_insert(amount);
    }
    let reserved = MemoryReservation { numa_node: NodeId(0), limits };
    let reserved_memory = if reserved.limits.is_empty() { Vec::new() } else { vec![reserved] };
    PolicyConfig { reserved_memory, ..policy.clone() }
}

/// Returns the allocatable resources of a host. If the strategy does not manage a resource, all of it is allocatable.
pub fn allocatable(strategy: &dyn Strategy, machine: &Machine) -> Allocatable {
    let mut allocatable = strategy.allocatable();
    if allocatable.cpus.is_empty() {
        allocatable.cpus = machine.cpu_ids();
    }
    let all = || machine.nodes.iter().map(|(&id, node)| (id, node.memory)).collect();
    allocatable.memory.entry(ZoneKind::Memory).or_insert_with(all);
    allocatable
}

/// A pod that is bound to a host.
struct BoundPod {
    host: usize,
    since: u64,
    /// Owner in the ledger; each new pod of a controller has its own.
    owner: OwnerId,
    /// Devices of the pod's claim.
    shares: Vec<ClaimShare>,
}

impl BoundPod {
    /// Returns the owners in the ledger: the pod, or the parts of its claim.
    fn owners(&self) -> Vec<OwnerId> {
        if self.shares.is_empty() {
            return vec![self.owner.clone()];
        }
        (0..self.shares.len()).map(|part| format!("{}.{part}", self.owner).into()).collect()
    }
}

struct FleetRun<'a, 'w> {
    group: &'a Group<'a>,
    strategy: &'a dyn Strategy,
    refused: RefusalPolicy,
    scheduler: Scheduler,
    watch: Option<&'a mut Watch<'w>>,
    /// Requests by trace and pod.
    requests: Vec<Vec<PodRequests>>,
    ledgers: Vec<Ledger>,
    running: BTreeMap<usize, BoundPod>,
    /// Refused pods that are bound to their host.
    stuck: BTreeMap<usize, BoundPod>,
    due: Schedule,
    /// Pods for which no host has enough resources.
    waiting: BTreeSet<usize>,
    /// Number of refusals of each pod that was refused.
    refusals: BTreeMap<usize, u32>,
    /// Recent moves of each host.
    moved: Vec<Vec<MovedPod>>,
    outcome: Outcome,
}

/// A move of a container.
struct MovedPod {
    at: u64,
    owner: OwnerId,
    bytes: Bytes,
}

/// Ticks at which actions on pods are due.
#[derive(Default)]
struct Schedule {
    arrivals: Due,
    departures: Due,
    /// A controller creates a new pod in place of a refused one.
    retries: Due,
    evictions: Due,
    give_up: Due,
}

impl Schedule {
    fn next(&self) -> Option<u64> {
        let Self { arrivals, departures, retries, evictions, give_up } = self;
        [arrivals, departures, retries, evictions, give_up].into_iter().filter_map(Due::next).min()
    }
}

impl<'a, 'w> FleetRun<'a, 'w> {
    fn new(
        group: &'a Group<'a>,
        (strategy, refused): (&'a dyn Strategy, RefusalPolicy),
        mut scheduler: Scheduler,
        watch: Option<&'a mut Watch<'w>>,
    ) -> Self {
        let idle = strategy.idle();
        // First: claims depend on the devices of an idle host.
        scheduler.add_hosts(group.hosts, &idle);
        let all = |requests: &Vec<Request>| {
            requests.iter().map(|request| scheduler.pod_requests(request)).collect()
        };
        let pod_requests = group.traces.iter().map(|(_, requests)| all(requests)).collect();
        let mut due = Schedule::default();
        for (index, arrival) in group.arrivals.iter().enumerate() {
            due.arrivals.add(arrival.at, index);
        }
        Self {
            group,
            strategy,
            refused,
            scheduler,
            watch,
            requests: pod_requests,
            ledgers: vec![idle; group.hosts],
            running: BTreeMap::new(),
            stuck: BTreeMap::new(),
            due,
            waiting: BTreeSet::new(),
            refusals: BTreeMap::new(),
            moved: iter::repeat_with(Vec::new).take(group.hosts).collect(),
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

    fn pod_requests(&self, index: usize) -> &PodRequests {
        let arrival = &self.group.arrivals[index];
        &self.requests[arrival.trace][arrival.pod]
    }

    fn request(&self, index: usize, owner: &OwnerId) -> Request {
        let arrival = &self.group.arrivals[index];
        Request { owner: owner.clone(), ..self.group.traces[arrival.trace].1[arrival.pod].clone() }
    }

    /// Returns the tick of a pod's last try.
    fn last_try(&self, index: usize) -> u64 {
        let arrival = &self.group.arrivals[index];
        arrival.at.saturating_add(self.group.traces[arrival.trace].0.retry_after)
    }

    fn note(&mut self, index: usize, bound: &BoundPod, step: HostEvent) {
        if self.watch.is_some() {
            let request = self.request(index, &bound.owner);
            if let Some(watch) = &mut self.watch {
                watch(bound.host, &request, step, &self.ledgers[bound.host]);
            }
        }
    }

    /// Gives up refused pods after their last try. Returns whether this freed resources of a host.
    fn give_up(&mut self, tick: u64) -> bool {
        let mut has_room = false;
        for index in self.due.give_up.take(tick) {
            if let Some(bound) = self.stuck.remove(&index) {
                self.unbind(index, &bound, HostEvent::GivenUp);
                has_room = true;
            }
        }
        has_room
    }

    /// Removes pods at the end of their lifetime, and returns their hosts.
    fn leave(&mut self, tick: u64) -> BTreeSet<usize> {
        let mut hosts = BTreeSet::new();
        for index in self.due.departures.take(tick) {
            let Some(bound) = self.running.remove(&index) else { continue };
            let ledger = &mut self.ledgers[bound.host];
            for owner in bound.owners() {
                *ledger = self.strategy.release(ledger, &owner);
            }
            self.scheduler.unprepare(bound.host, &bound.shares);
            self.scheduler.publish(bound.host, &self.ledgers[bound.host]);
            self.unbind(index, &bound, HostEvent::Left);
            hosts.insert(bound.host);
        }
        hosts
    }

    /// Decides again on the refused pods of these hosts.
    fn try_stuck(&mut self, hosts: &BTreeSet<usize>, tick: u64) {
        let stuck = self.stuck.iter().filter(|(_, bound)| hosts.contains(&bound.host));
        let stuck: Vec<usize> = stuck.map(|(&index, _)| index).collect();
        for index in stuck {
            let Some(bound) = self.stuck.remove(&index) else { continue };
            let is_admitted = self.decide(index, &bound, tick) || self.make_room(index, &bound, tick);
            self.note(index, &bound, HostEvent::Again { is_admitted });
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
                self.unbind(index, &bound, HostEvent::Evicted);
                self.outcome.retries += 1;
                evicted.push(index);
            } else {
                self.due.evictions.add(tick.saturating_add(1), index);
                self.stuck.insert(index, bound);
            }
        }
        evicted
    }

    fn unbind(&mut self, index: usize, bound: &BoundPod, step: HostEvent) {
        let arrival = &self.group.arrivals[index];
        self.scheduler.unbind(bound.host, &self.requests[arrival.trace][arrival.pod], &bound.shares);
        self.note(index, bound, step);
    }

    /// Selects a host for a pod, has the host decide, and handles a refusal.
    fn place(&mut self, index: usize, tick: u64) {
        let last = self.last_try(index);
        if tick > last {
            return;
        }
        loop {
            let asked = self.pod_requests(index).clone();
            let Some((host, shares)) = self.scheduler.pick(&asked) else {
                self.waiting.insert(index);
                return;
            };
            let refusals = self.refusals.get(&index).copied().unwrap_or(0);
            let bound = BoundPod { host, since: tick, owner: format!("{index}.{refusals}").into(), shares };
            let is_admitted = self.decide(index, &bound, tick);
            if !is_admitted && bound.shares.iter().any(|share| share.node.is_none()) {
                // The host reports this before the pod is bound.
                self.scheduler.close_host_device(host);
                continue;
            }
            self.note(index, &bound, HostEvent::Bound { is_admitted });
            if is_admitted {
                self.scheduler.bind(host, &asked, &bound.shares);
                return self.start(index, bound, tick);
            }
            self.outcome.refusals += 1;
            self.refusals.insert(index, refusals + 1);
            if self.make_room(index, &bound, tick) {
                self.note(index, &bound, HostEvent::Again { is_admitted: true });
                self.outcome.started_later += 1;
                self.scheduler.bind(host, &asked, &bound.shares);
                return self.start(index, bound, tick);
            }
            match self.refused {
                RefusalPolicy::Fail if tick == last => return,
                RefusalPolicy::Fail => {
                    self.outcome.retries += 1;
                    if let Some(exponent) = refusals.checked_sub(1) {
                        let delay = 1_u64.checked_shl(exponent).unwrap_or(u64::MAX);
                        return self.due.retries.add(tick.saturating_add(delay).min(last), index);
                    }
                }
                RefusalPolicy::Wait | RefusalPolicy::Evict { .. } | RefusalPolicy::MakeRoom { .. } => {
                    self.scheduler.bind(host, &asked, &bound.shares);
                    self.stuck.insert(index, bound);
                    self.due.give_up.add(last.saturating_add(1), index);
                    if let RefusalPolicy::Evict { after } | RefusalPolicy::MakeRoom { after, .. } =
                        self.refused
                    {
                        self.due.evictions.add(tick.saturating_add(after), index);
                    }
                    return;
                }
            }
        }
    }

    /// Has a pod's host decide. Returns whether the pod is admitted.
    fn decide(&mut self, index: usize, bound: &BoundPod, tick: u64) -> bool {
        let is_admitted = if bound.shares.is_empty() {
            let request = self.request(index, &bound.owner);
            admit(self.strategy, &mut self.ledgers[bound.host], &request, &Terms::default())
        } else {
            self.prepare(bound, tick)
        };
        self.scheduler.publish(bound.host, &self.ledgers[bound.host]);
        is_admitted
    }

    /// Has a host prepare the claim of a pod. Returns whether it has room for all parts.
    fn prepare(&mut self, bound: &BoundPod, tick: u64) -> bool {
        let before = self.ledgers[bound.host].clone();
        for (owner, share) in bound.owners().into_iter().zip(&bound.shares) {
            let (request, terms) = placement_request(owner, share.node, &share.consumed);
            let is_placed = admit(self.strategy, &mut self.ledgers[bound.host], &request, &terms)
                || (share.node.is_none() && self.move_for(bound.host, &request, &terms, tick));
            if !is_placed {
                self.ledgers[bound.host] = before;
                return false;
            }
        }
        self.scheduler.prepare(bound.host, &bound.shares);
        true
    }

    /// Moves running pods of a refused pod's host so that the pod is admitted. Returns whether that was possible.
    fn make_room(&mut self, index: usize, bound: &BoundPod, tick: u64) -> bool {
        if !bound.shares.is_empty() {
            return false;
        }
        let request = self.request(index, &bound.owner);
        let has_room = self.move_for(bound.host, &request, &Terms::default(), tick);
        if has_room {
            self.scheduler.publish(bound.host, &self.ledgers[bound.host]);
        }
        has_room
    }

    /// Moves running pods of a host so that a request is admitted. Returns whether that was possible.
    fn move_for(&mut self, host: usize, request: &Request, terms: &Terms, tick: u64) -> bool {
        let RefusalPolicy::MakeRoom { limits, .. } = self.refused else { return false };
        let moved = &mut self.moved[host];
        moved.retain(|of| tick.saturating_sub(of.at) < limits.window.max(limits.dwell));
        let is_within = |of: &&MovedPod, ticks: u64| tick.saturating_sub(of.at) < ticks;
        let bytes =
            moved.iter().filter(|of| is_within(of, limits.window)).fold(0_u64, |sum, of| sum + of.bytes.0);
        let kept = moved.iter().filter(|of| is_within(of, limits.dwell)).map(|of| of.owner.clone());
        let limits = RebalanceLimits {
            moves: limits.moves,
            bytes: Bytes(limits.bytes.0.saturating_sub(bytes)),
            kept: kept.collect(),
            in_order: true,
        };
        let ledger = &mut self.ledgers[host];
        let Ok(plan) = self.strategy.plan(ledger, request, terms, &limits) else { return false };
        *ledger = plan.decision.ledger;
        for container in request.all_containers() {
            *ledger = self.strategy.note_started(ledger, &request.owner, &container.name);
        }
        self.outcome.moves += plan.moves.len() as u64;
        self.outcome.moved.0 = self.outcome.moved.0.saturating_add(plan.bytes.0);
        moved.extend(plan.moves.into_iter().map(|of| MovedPod {
            at: tick,
            owner: of.owner,
            bytes: of.bytes,
        }));
        true
    }

    fn start(&mut self, index: usize, bound: BoundPod, tick: u64) {
        let arrival = &self.group.arrivals[index];
        let pod = &self.group.traces[arrival.trace].0.pods[arrival.pod];
        self.running.insert(index, bound);
        self.due.departures.add(tick.saturating_add(pod.life), index);
        let is_first = tick == arrival.at && !self.refusals.contains_key(&index);
        self.outcome.sums.count(pod, if is_first { 'A' } else { 'R' });
    }

    /// Checks the invariants of every host after the last arrival.
    fn check(&mut self) {
        let allocatable = self.strategy.allocatable();
        for (host, ledger) in self.ledgers.iter().enumerate() {
            let faults = faults(ledger, &allocatable).into_iter().take(3);
            self.outcome.faults.extend(faults.map(|fault| format!("host {host}: {fault}")));
        }
    }
}

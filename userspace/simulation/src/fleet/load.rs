//! Hosts of a fleet, and the arrivals of their pods.

use numaward_topology::Machine;

use super::super::trace::{Sums, Trace};
use numaward_engine::{policy::PolicyConfig, request::Request};

/// Most pods of a fleet.
const MAX_PODS: u64 = 10_000_000;

/// Reason why a fleet cannot be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// Each host runs the pods of one trace.
    #[error("{hosts} hosts are too few for {traces} traces: each host runs the pods of one")]
    TooFewHosts { hosts: usize, traces: usize },
    /// The traces have many pods, or very different lengths, so that short ones are repeated often.
    #[error("{0} pods are too many for one fleet: the limit is {MAX_PODS}")]
    TooManyPods(u64),
}

/// A trace with its hosts' machine and configuration.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    pub trace: &'a Trace,
    pub machine: Machine,
    /// Configuration of the hosts.
    pub policy: PolicyConfig,
    /// Requests of the trace's pods.
    pub requests: Vec<Request>,
}

/// Hosts of several groups.
#[derive(Clone, Debug)]
pub struct Fleet<'a> {
    /// Groups in the order of their first traces.
    pub groups: Vec<Group<'a>>,
}

/// Hosts with the same machine and configuration.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    pub machine: Machine,
    pub policy: PolicyConfig,
    /// Number of hosts.
    pub hosts: usize,
    /// First tick after the arrival of the last pod.
    pub window: u64,
    pub(super) traces: Vec<(&'a Trace, Vec<Request>)>,
    /// Number of hosts of each trace.
    hosts_of: Vec<usize>,
    /// Arrivals in the order of time.
    pub(super) arrivals: Vec<Arrival>,
    /// Seed of the scheduler's random choices.
    pub(super) seed: u64,
}

/// Arrival of a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) at: u64,
    pub(super) trace: usize,
    pub(super) pod: usize,
}

impl<'a> Fleet<'a> {
    /// Creates a fleet. The hosts are distributed evenly to the traces; the first traces get one more if there is a remainder.
    pub fn new(members: Vec<Member<'a>>, hosts: usize, seed: u64) -> Result<Self, FleetError> {
        let traces = members.len();
        if hosts < traces || traces == 0 {
            return Err(FleetError::TooFewHosts { hosts, traces });
        }
        let mut groups: Vec<Group<'_>> = Vec::new();
        for (number, Member { trace, machine, policy, requests }) in members.into_iter().enumerate() {
            let hosts = hosts / traces + usize::from(number < hosts % traces);
            let same = groups.iter().position(|group| group.machine == machine && group.policy == policy);
            let at = same.unwrap_or(groups.len());
            if same.is_none() {
                groups.push(Group::new(machine, policy));
            }
            let group = &mut groups[at];
            group.hosts += hosts;
            group.window = group.window.max(window(trace));
            group.traces.push((trace, requests));
            group.hosts_of.push(hosts);
        }
        let pods = groups.iter().map(Group::max_pods).fold(0, u64::saturating_add);
        if pods > MAX_PODS {
            return Err(FleetError::TooManyPods(pods));
        }
        let mut random = Random::new(seed);
        for group in &mut groups {
            group.draw_arrivals(&mut random);
        }
        Ok(Self { groups })
    }

    /// Removes the pods that arrive at this tick or later.
    pub fn retain_before(&mut self, tick: u64) {
        for group in &mut self.groups {
            group.arrivals.retain(|arrival| arrival.at < tick);
            group.window = group.window.min(tick);
        }
    }
}

/// Returns the first tick after the last arrival of a trace.
fn window(trace: &Trace) -> u64 {
    trace.pods.iter().map(|pod| pod.at).max().unwrap_or(0).saturating_add(1)
}

impl<'a> Group<'a> {
    const fn new(machine: Machine, policy: PolicyConfig) -> Self {
        Self {
            machine,
            policy,
            hosts: 0,
            window: 0,
            traces: Vec::new(),
            hosts_of: Vec::new(),
            arrivals: Vec::new(),
            seed: 0,
        }
    }

    /// Returns the traces of the group.
    pub fn traces(&self) -> impl Iterator<Item = &'a Trace> + '_ {
        self.traces.iter().map(|&(trace, _)| trace)
    }

    /// Returns the sums for the case that all pods of the group are admitted.
    pub fn asked(&self) -> Sums {
        let mut sums = Sums::default();
        for arrival in &self.arrivals {
            sums.count(&self.traces[arrival.trace].0.pods[arrival.pod], 'A');
        }
        sums
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.traces.iter().flat_map(|(_, requests)| requests)
    }

    /// Returns an upper bound of the number of arrivals.
    fn max_pods(&self) -> u64 {
        let of_trace = |((trace, _), &hosts): (&(&Trace, _), &usize)| {
            let repeated = self.window.div_ceil(window(trace));
            repeated.saturating_mul(trace.pods.len() as u64).saturating_mul(hosts as u64)
        };
        self.traces.iter().zip(&self.hosts_of).map(of_trace).fold(0, u64::saturating_add)
    }

    /// Shifts each host's pods by a random number of ticks, and creates the arrivals.
    fn draw_arrivals(&mut self, random: &mut Random) {
        self.seed = random.next();
        for (number, ((trace, requests), &hosts)) in self.traces.iter().zip(&self.hosts_of).enumerate() {
            let every = window(trace);
            for _ in 0..hosts {
                let shift = random.below(every);
                for (pod, of) in trace.pods.iter().enumerate().take(requests.len()) {
                    let mut at = (u128::from(of.at) + u128::from(shift)) % u128::from(every);
                    while let Some(tick) = u64::try_from(at).ok().filter(|&tick| tick < self.window) {
                        self.arrivals.push(Arrival { at: tick, trace: number, pod });
                        at += u128::from(every);
                    }
                }
            }
        }
        self.arrivals.sort_by_key(|arrival| arrival.at);
    }
}

/// Deterministic random numbers (`SplitMix64`).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`, which must not be zero.
    pub(super) const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }
}

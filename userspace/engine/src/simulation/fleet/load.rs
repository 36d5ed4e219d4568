//! The load of a fleet: which hosts there are, and when which pod arrives.

use numaward_topology::Machine;

use super::super::trace::{Sums, Trace};
use crate::{policy::PolicyConfig, request::Request};

/// The most pods of a fleet.
const MAX_PODS: u64 = 10_000_000;

/// Why there is no such fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// Each host brings the pods of one trace.
    #[error("{hosts} hosts are too few for {traces} traces: each host brings the pods of one")]
    TooFewHosts {
        /// The hosts.
        hosts: usize,
        /// The traces.
        traces: usize,
    },
    /// The traces are long, or of very different length.
    #[error("{0} pods are too many for one fleet: the most are {MAX_PODS}")]
    TooManyPods(u64),
}

/// A trace, and what it is replayed on.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// The machine.
    pub machine: Machine,
    /// The configuration of its hosts.
    pub policy: PolicyConfig,
    /// The requests of its pods.
    pub requests: Vec<Request>,
}

/// Hosts of several groups.
#[derive(Clone, Debug)]
pub struct Fleet<'a> {
    /// The groups, in the order of their first traces.
    pub groups: Vec<Group<'a>>,
}

/// Hosts alike.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Their machine.
    pub machine: Machine,
    /// Their configuration.
    pub policy: PolicyConfig,
    /// The number of hosts.
    pub hosts: usize,
    /// The tick before which the last pod arrives.
    pub window: u64,
    pub(super) traces: Vec<(&'a Trace, Vec<Request>)>,
    /// The hosts that bring each trace's pods.
    hosts_of: Vec<usize>,
    /// In the order in which they come.
    pub(super) arrivals: Vec<Arrival>,
    /// For what the scheduler leaves to chance.
    pub(super) seed: u64,
}

/// A pod arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) at: u64,
    pub(super) trace: usize,
    pub(super) pod: usize,
}

impl<'a> Fleet<'a> {
    /// Shares so many hosts out to the traces, evenly; what remains goes to the first ones.
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
        let pods = groups.iter().map(Group::most_pods).fold(0, u64::saturating_add);
        if pods > MAX_PODS {
            return Err(FleetError::TooManyPods(pods));
        }
        let mut random = Random::new(seed);
        for group in &mut groups {
            group.draw(&mut random);
        }
        Ok(Self { groups })
    }
}

/// The ticks in which pods arrive.
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

    /// The traces whose pods it gets.
    pub fn traces(&self) -> impl Iterator<Item = &'a Trace> + '_ {
        self.traces.iter().map(|&(trace, _)| trace)
    }

    /// The requests of all pods.
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

    /// No fewer pods than will arrive.
    fn most_pods(&self) -> u64 {
        let of_trace = |((trace, _), &hosts): (&(&Trace, _), &usize)| {
            let repeated = self.window.div_ceil(window(trace));
            repeated.saturating_mul(trace.pods.len() as u64).saturating_mul(hosts as u64)
        };
        self.traces.iter().zip(&self.hosts_of).map(of_trace).fold(0, u64::saturating_add)
    }

    /// Has chance decide by how much each host's pods are shifted.
    fn draw(&mut self, random: &mut Random) {
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

/// Random numbers that are the same for the same seed (`SplitMix64`).
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

    /// A number below another, which is not zero.
    pub(super) const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }
}

//! Which of several placements is better, and by which rule.
//!
//! A *placement* says for every resource on which nodes it is. Of two, the better one is better by the first of these
//! rules in which they differ:
//!
//! 1. fewer nodes in all, nodes of devices included;
//! 2. fewer nodes per resource, added up;
//! 3. fewer nodes that are not wished for;
//! 4. smaller distances: from devices, then from CPU to CPU, from CPU to memory, from memory to memory;
//! 5. less stranding: the sum over all nodes of free CPUs times free memory goes down by less. A node that is out of
//!    one of these is of no use to most who come later, so what is left of it is lost. Free is what is not promised,
//!    whether others use it or not;
//! 6. less use of the nodes by other nodes, where it is known;
//! 7. lower node ids.
//!
//! Only integers are compared, so the order is the same everywhere.

use std::cmp::Ordering;

use super::{
    free_capacity::{FreeCapacity, PlacementGroup},
    host::{CPU, HostModel},
};
use crate::placement_search::Rank;

/// Where each resource of a unit is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) key: Rank,
    /// All nodes, ascending.
    pub(super) nodes: Vec<usize>,
    /// By resource; empty where nothing is needed.
    pub(super) sets: Vec<Vec<usize>>,
}

impl PartialOrd for Placement {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Placement {
    fn cmp(&self, other: &Self) -> Ordering {
        (&self.key, &self.nodes, &self.sets).cmp(&(&other.key, &other.nodes, &other.sets))
    }
}

/// What the ledger has free on a node: what is offered and what is withheld.
fn free_and_withheld(free: &[u64], withheld: &[u64], at: usize) -> u64 {
    free[at].saturating_add(withheld.get(at).copied().unwrap_or(0))
}

/// Divides an amount over the nodes of a set, of which each has so much free: the smallest rest first, so that what
/// is left is in one piece. What is withheld is not given, but counts as left: what others use at the moment does not
/// change the order.
pub(super) fn split(free: &[u64], withheld: &[u64], set: &[usize], mut needed: u64) -> Vec<(usize, u64)> {
    if let [at] = set {
        return vec![(*at, needed)];
    }
    let mut order: Vec<usize> = set.to_vec();
    order.sort_by_key(|&at| (free_and_withheld(free, withheld, at), at));
    let mut shares = Vec::with_capacity(order.len());
    for at in order {
        let share = free[at].min(needed);
        needed -= share;
        if share > 0 {
            shares.push((at, share));
        }
    }
    shares.sort_unstable();
    shares
}

/// What of a resource comes from which node.
pub(super) fn amounts(
    host: &HostModel,
    free_capacity: &FreeCapacity,
    resource: usize,
    set: &[usize],
    needed: u64,
) -> Vec<(usize, u64)> {
    match &host.cpus {
        Some(cpus) if resource == CPU => {
            let whole =
                if free_capacity.cores.is_empty() { None } else { free_capacity.whole_cores(set, needed) };
            whole.unwrap_or_else(|| {
                cpus.split(&free_capacity.free[CPU], set, needed, free_capacity.cpu_granularity)
            })
        }
        _ => split(&free_capacity.free[resource], free_capacity.withheld_of(resource), set, needed),
    }
}

pub(super) fn pairs(host: &HostModel, set: &[usize]) -> u64 {
    let mut sum = 0;
    for (index, &from) in set.iter().enumerate() {
        for &to in &set[index + 1..] {
            sum += host.distance(from, to);
        }
    }
    sum
}

fn between(host: &HostModel, from: &[usize], to: &[usize]) -> u64 {
    from.iter().map(|&from| to.iter().map(|&to| host.distance(from, to)).sum::<u64>()).sum()
}

/// The union of sets of positions, ascending.
pub(super) fn union<'a>(sets: impl IntoIterator<Item = &'a [usize]>) -> Vec<usize> {
    let mut all: Vec<usize> = Vec::new();
    for set in sets {
        if all != set {
            all.extend_from_slice(set);
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// What is known of the rank of all placements on just these nodes, with so many of all resources.
pub(super) fn lead(host: &HostModel, group: &PlacementGroup, nodes: &[usize], per_resource: u64) -> Rank {
    let count = |len: usize| len as u64;
    let mut lead = Rank {
        nodes: count(nodes.len()),
        nodes_per_resource: per_resource,
        not_preferred: count(nodes.iter().filter(|&&at| group.not_preferred.get(at) == Some(&true)).count()),
        ..Rank::default()
    };
    if !group.devices.is_empty() {
        lead.nodes += count(group.devices.iter().filter(|at| !nodes.contains(at)).count());
        lead.from_devices = between(host, &group.devices, nodes);
    }
    lead
}

/// The rank of where each resource is, but for what it strands, and all its nodes.
pub(super) fn rank(host: &HostModel, group: &PlacementGroup, sets: &[&[usize]]) -> (Rank, Vec<usize>) {
    let nodes = union(sets.iter().copied());
    let mut rank = lead(host, group, &nodes, sets.iter().map(|set| set.len() as u64).sum());
    let (cpus, memory) = (sets[CPU], &sets[CPU + 1..]);
    if nodes.len() > 1 {
        // Mostly all memory is on the same nodes.
        let first = memory.iter().find(|set| !set.is_empty()).copied().unwrap_or(&[]);
        let same = memory.iter().all(|set| set.is_empty() || *set == first);
        let all = if same { Vec::new() } else { union(memory.iter().copied()) };
        let memory = if same { first } else { &all[..] };
        rank.cpu_to_cpu = pairs(host, cpus);
        rank.cpu_to_memory = between(host, cpus, memory);
        rank.memory_to_memory = pairs(host, memory);
    } else if !cpus.is_empty() && memory.iter().any(|set| !set.is_empty()) {
        rank.cpu_to_memory = between(host, cpus, cpus);
    }
    if cpus.is_empty() {
        // It runs on the shared pool, so anywhere.
        rank.cpu_to_memory = nodes.iter().map(|&at| host.distance_from_cpus(at)).sum();
    }
    (rank, nodes)
}

/// By how much the sum of free CPUs times free memory goes down.
pub(super) fn stranded(
    host: &HostModel,
    free_capacity: &FreeCapacity,
    group: &PlacementGroup,
    sets: &[&[usize]],
    nodes: &[usize],
) -> u128 {
    let Some(memory) = free_capacity.memory else { return 0 };
    let product = |cpus: u64, memory: u64| u128::from(cpus) * u128::from(memory);
    // Where nobody manages CPUs, every node counts as having one.
    let free_cpus = |at: usize| if host.cpus.is_some() { free_capacity.free[CPU][at] } else { 1 };
    let even = host.cpus.as_ref().filter(|cpus| cpus.options.distribute_across_numa && sets[CPU].len() > 1);
    let even = even.map(|cpus| {
        cpus.split(&free_capacity.free[CPU], sets[CPU], group.need[CPU], free_capacity.cpu_granularity)
    });
    let of_cpus = |at: usize| match &even {
        Some(shares) => shares.iter().find(|(of, _)| *of == at).map_or(0, |(_, share)| *share),
        None => share(|at| free_capacity.free[CPU][at], sets[CPU], group.need[CPU], at),
    };
    // As if nobody used what is withheld, also where a node of several cannot give that much now: what others use at the
    // moment does not change the order.
    let bytes_of =
        |at: usize| free_and_withheld(&free_capacity.free[memory], free_capacity.withheld_of(memory), at);
    let lost = nodes.iter().map(|&at| {
        let (cpus, bytes) = (free_cpus(at), bytes_of(at));
        let fewer = cpus.saturating_sub(of_cpus(at));
        let less = bytes.saturating_sub(share(bytes_of, sets[memory], group.need[memory], at));
        product(cpus, bytes).saturating_sub(product(fewer, less))
    });
    lost.sum()
}

/// What one node of a set gives: the rest that those with less free leave.
fn share(free: impl Fn(usize) -> u64, set: &[usize], needed: u64, at: usize) -> u64 {
    if needed == 0 || !set.contains(&at) {
        return 0;
    }
    let own = (free(at), at);
    let before = set.iter().filter(|&&of| (free(of), of) < own);
    let left = before.fold(needed, |left, &of| left.saturating_sub(free(of)));
    left.min(own.0)
}

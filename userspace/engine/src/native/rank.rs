//! Ranking of placements.
//!
//! A *placement* has the nodes of each resource. Of two placements, the better one is determined by the first of
//! these criteria in which they differ:
//!
//! 1. fewer nodes in total, including the nodes of devices;
//! 2. smaller sum of the numbers of nodes per resource;
//! 3. fewer nodes that are not preferred;
//! 4. smaller distances: from devices, then between CPUs, from CPUs to memory, between memory;
//! 5. less stranded capacity: the sum over all nodes of free CPUs times free memory decreases by less. A node without
//!    free CPUs or without free memory is useless to most later requests. All memory without a guarantee counts as
//!    free here, even if other programs use it;
//! 6. less load by other nodes, if it is known;
//! 7. lower node ids.
//!
//! Only integers are compared, so the order is the same on all platforms.

use std::cmp::Ordering;

use super::{
    free_capacity::{FreeCapacity, PlacementGroup},
    host::{CPU, HostModel},
};
use crate::placement_search::Rank;

/// Nodes of each resource of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankedPlacement {
    pub(super) key: Rank,
    /// All nodes in ascending order.
    pub(super) nodes: Vec<usize>,
    /// Nodes by resource; empty if nothing is needed.
    pub(super) sets: Vec<Vec<usize>>,
}

impl PartialOrd for RankedPlacement {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for RankedPlacement {
    fn cmp(&self, other: &Self) -> Ordering {
        (&self.key, &self.nodes, &self.sets).cmp(&(&other.key, &other.nodes, &other.sets))
    }
}

/// Returns the free amount of a node including the withheld one.
fn free_and_withheld(free: &[u64], withheld: &[u64], at: usize) -> u64 {
    free[at].saturating_add(withheld.get(at).copied().unwrap_or(0))
}

/// Divides an amount among the nodes of a set, nodes with the fewest free amounts first, so that the rest stays in
/// one piece. Withheld amounts are not given, but count for the order, so that momentary memory use does not change
/// it.
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

/// Returns the amounts of a resource by node.
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

/// Returns the union of sets of positions in ascending order.
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

/// Returns the criteria that all placements on exactly these nodes have in common.
pub(super) fn common_rank(
    host: &HostModel,
    group: &PlacementGroup,
    nodes: &[usize],
    per_resource: u64,
) -> Rank {
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

/// Returns the rank of a placement without stranding and load, and all its nodes.
pub(super) fn rank(host: &HostModel, group: &PlacementGroup, sets: &[&[usize]]) -> (Rank, Vec<usize>) {
    let nodes = union(sets.iter().copied());
    let mut rank = common_rank(host, group, &nodes, sets.iter().map(|set| set.len() as u64).sum());
    let (cpus, memory) = (sets[CPU], &sets[CPU + 1..]);
    if nodes.len() > 1 {
        // Usually all memory is on the same nodes.
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
        // Without exclusive CPUs the container can run anywhere.
        rank.cpu_to_memory = nodes.iter().map(|&at| host.distance_from_cpus(at)).sum();
    }
    (rank, nodes)
}

/// Returns the decrease of the sum over nodes of free CPUs times free memory.
pub(super) fn stranded_capacity(
    host: &HostModel,
    free_capacity: &FreeCapacity,
    group: &PlacementGroup,
    sets: &[&[usize]],
    nodes: &[usize],
) -> u128 {
    let Some(memory) = free_capacity.memory else { return 0 };
    let product = |cpus: u64, memory: u64| u128::from(cpus) * u128::from(memory);
    // If CPUs are not managed, every node counts as having one.
    let free_cpus = |at: usize| if host.cpus.is_some() { free_capacity.free[CPU][at] } else { 1 };
    let even = host.cpus.as_ref().filter(|cpus| cpus.options.distribute_across_numa && sets[CPU].len() > 1);
    let even = even.map(|cpus| {
        cpus.split(&free_capacity.free[CPU], sets[CPU], group.need[CPU], free_capacity.cpu_granularity)
    });
    let of_cpus = |at: usize| match &even {
        Some(shares) => shares.iter().find(|(of, _)| *of == at).map_or(0, |(_, share)| *share),
        None => share(|at| free_capacity.free[CPU][at], sets[CPU], group.need[CPU], at),
    };
    // Withheld memory counts as free here, even if a node cannot give that much at the moment, so that momentary
    // memory use does not change the order.
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

/// Returns the amount of one node of a set: the rest after the nodes with fewer free amounts.
fn share(free: impl Fn(usize) -> u64, set: &[usize], needed: u64, at: usize) -> u64 {
    if needed == 0 || !set.contains(&at) {
        return 0;
    }
    let own = (free(at), at);
    let before = set.iter().filter(|&&of| (free(of), of) < own);
    let left = before.fold(needed, |left, &of| left.saturating_sub(free(of)));
    left.min(own.0)
}

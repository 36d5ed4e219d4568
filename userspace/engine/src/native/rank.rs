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
//!    one of these is of no use to most who come later, so what is left of it is lost;
//! 6. lower node ids.
//!
//! Only integers are compared, so the order is the same everywhere.

use std::cmp::Ordering;

use super::{
    host::{CPU, Host},
    room::{Room, Unit},
};
use crate::searches::Rank;

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

/// Divides an amount over the nodes of a set, of which each has so much free: the smallest rest first, so that what
/// is left is in one piece.
pub(super) fn split(free: &[u64], set: &[usize], mut needed: u64) -> Vec<(usize, u64)> {
    if let [at] = set {
        return vec![(*at, needed)];
    }
    let mut order: Vec<usize> = set.to_vec();
    order.sort_by_key(|&at| (free[at], at));
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
    host: &Host,
    room: &Room,
    resource: usize,
    set: &[usize],
    needed: u64,
) -> Vec<(usize, u64)> {
    match &host.cpus {
        Some(cpus) if resource == CPU => cpus.split(&room.free[CPU], set, needed),
        _ => split(&room.free[resource], set, needed),
    }
}

fn pairs(host: &Host, set: &[usize]) -> u64 {
    let mut sum = 0;
    for (index, &from) in set.iter().enumerate() {
        for &to in &set[index + 1..] {
            sum += host.distance(from, to);
        }
    }
    sum
}

fn between(host: &Host, from: &[usize], to: &[usize]) -> u64 {
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

/// Makes a placement of where each resource is.
pub(super) fn placement(host: &Host, room: &Room, unit: &Unit, sets: &[&[usize]]) -> Placement {
    let nodes = union(sets.iter().copied());
    let count = |len: usize| len as u64;
    let mut key = Rank {
        nodes: count(nodes.len()),
        nodes_per_resource: sets.iter().map(|set| count(set.len())).sum(),
        unwished: count(nodes.iter().filter(|&&at| unit.unwished.get(at) == Some(&true)).count()),
        ..Rank::default()
    };
    if !unit.devices.is_empty() {
        key.nodes += count(unit.devices.iter().filter(|at| !nodes.contains(at)).count());
        key.from_devices = between(host, &unit.devices, &nodes);
    }
    let cpus = sets[CPU];
    if nodes.len() > 1 {
        let memory = union(sets[CPU + 1..].iter().copied());
        key.cpu_to_cpu = pairs(host, cpus);
        key.cpu_to_memory = between(host, cpus, &memory);
        key.memory_to_memory = pairs(host, &memory);
    } else if !cpus.is_empty() && sets[CPU + 1..].iter().any(|set| !set.is_empty()) {
        key.cpu_to_memory = between(host, cpus, cpus);
    }
    key.stranded = stranded(host, room, unit, sets, &nodes);
    Placement { key, nodes, sets: sets.iter().map(|set| set.to_vec()).collect() }
}

/// By how much the sum of free CPUs times free memory goes down.
fn stranded(host: &Host, room: &Room, unit: &Unit, sets: &[&[usize]], nodes: &[usize]) -> u128 {
    let Some(memory) = room.memory else { return 0 };
    let product = |cpus: u64, memory: u64| u128::from(cpus) * u128::from(memory);
    // Where nobody manages CPUs, every node counts as having one.
    let free_cpus = |at: usize| if host.cpus.is_some() { room.free[CPU][at] } else { 1 };
    let (needed_cpus, needed_memory) = (unit.need[CPU], unit.need[memory]);
    if let [at] = *nodes {
        let (cpus, bytes) = (free_cpus(at), room.free[memory][at]);
        return product(cpus, bytes)
            .saturating_sub(product(cpus.saturating_sub(needed_cpus), bytes.saturating_sub(needed_memory)));
    }
    let of_cpus = if needed_cpus > 0 { amounts(host, room, CPU, sets[CPU], needed_cpus) } else { Vec::new() };
    let of_memory =
        if needed_memory > 0 { amounts(host, room, memory, sets[memory], needed_memory) } else { Vec::new() };
    let taken =
        |of: &[(usize, u64)], at: usize| of.iter().find(|(of, _)| *of == at).map_or(0, |(_, share)| *share);
    nodes
        .iter()
        .map(|&at| {
            let (cpus, bytes) = (free_cpus(at), room.free[memory][at]);
            let (fewer, less) =
                (cpus.saturating_sub(taken(&of_cpus, at)), bytes.saturating_sub(taken(&of_memory, at)));
            product(cpus, bytes).saturating_sub(product(fewer, less))
        })
        .sum()
}

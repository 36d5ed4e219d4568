//! Distribution of CPUs over several nodes (`distribute-cpus-across-numa`, KEP-2902).
//!
//! # Terms
//! - *group*: CPUs that are taken together, either one CPU or all CPUs of a core.
//! - *balance*: standard deviation of the free CPUs of all nodes after the allocation, rounded to thousandths.
//!
//! # Algorithm
//! Combinations of 1, 2, 3 … nodes are tried until each node of a combination can give the same number of CPUs and
//! some of them the remainder of the division, group by group. Among combinations of equal size, the one with the
//! smallest balance wins. If no combination is possible, the CPUs are taken packed (module `take`).

use std::ops::ControlFlow;

use numaward_topology::CpuSet;

use super::{
    CpuError,
    take::{Accumulator, Packing, packed},
    topology::CpuTopology,
};
use crate::kubelet::defects::{Combination, Combinations};

/// Rounds to thousandths, halves away from zero.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the standard deviation, with the kubelet's rounding.
#[expect(clippy::cast_precision_loss, reason = "numbers of CPUs are far below 2^52")]
fn balance(numbers: &[usize]) -> f64 {
    let count = numbers.len() as f64;
    let mean = rounded(numbers.iter().map(|&number| number as f64).sum::<f64>() / count);
    let squares: f64 = numbers.iter().map(|&number| (number as f64 - mean) * (number as f64 - mean)).sum();
    rounded((squares / count).sqrt())
}

/// Parameters of a search for the best combination.
struct DistributionSearch {
    needed: usize,
    group: usize,
    /// Nodes with free CPUs, in the order of the search. A node can occur twice.
    nodes: Vec<usize>,
    /// Free CPUs by node of the machine.
    free: Vec<usize>,
}

/// Best distribution over a given number of nodes.
struct Distribution {
    balance: f64,
    nodes: Combination,
    /// Nodes that give the remainder of the division.
    remainder: Option<Combination>,
}

impl DistributionSearch {
    /// Returns the number of CPUs that each node gives if there are `nodes` of them.
    fn share(&self, nodes: usize) -> usize {
        self.needed / nodes / self.group * self.group
    }

    /// Returns the balance of the machine for these free CPUs by node.
    fn balance(&self, free: &[usize]) -> f64 {
        let mut nodes = self.nodes.clone();
        nodes.sort_unstable();
        nodes.dedup();
        balance(&nodes.into_iter().map(|node| free[node]).collect::<Vec<_>>())
    }

    /// Returns the best combination of `count` nodes.
    fn best(&self, count: usize) -> Option<Distribution> {
        let mut best: Option<Distribution> = None;
        Combinations::new(&self.nodes).for_each(count, |nodes| {
            if best.as_ref().is_some_and(|best| best.balance == 0.0) {
                return ControlFlow::Break(());
            }
            if let Some((balance, remainder)) = self.evaluate(nodes)
                && best.as_ref().is_none_or(|best| balance < best.balance)
            {
                // The kubelet does not copy the combination either, so it can change while the search continues.
                best = Some(Distribution { balance, nodes: nodes.clone(), remainder });
            }
            ControlFlow::Continue(())
        });
        best
    }

    /// Returns the balance after an allocation on a combination, and the nodes that give the remainder. Returns
    /// `None` if the combination has too few free CPUs.
    fn evaluate(&self, combination: &Combination) -> Option<(f64, Option<Combination>)> {
        let nodes: Vec<usize> = combination.items().collect();
        let mut distinct = nodes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let free: usize = distinct.iter().map(|&node| self.free[node]).sum();
        let groups: usize = nodes.iter().map(|&node| self.free[node] / self.group).sum();
        let share = self.share(nodes.len());
        if free < self.needed
            || groups * self.group < self.needed
            || nodes.iter().any(|&node| self.free[node] < share)
        {
            return None;
        }
        let mut left = self.free.clone();
        for &node in &nodes {
            left[node] = left[node].saturating_sub(share);
        }
        let remainder = self.needed - share * nodes.len();
        if remainder == 0 {
            return Some((self.balance(&left), None));
        }
        let givers: Vec<usize> = nodes.iter().copied().filter(|&node| left[node] >= self.group).collect();
        let mut best: Option<(f64, Option<Combination>)> = None;
        for count in (1..=givers.len()).rev() {
            Combinations::new(&givers).for_each(count, |givers| {
                if let Some(balance) = self.balance_with_remainder(&left, givers, remainder)
                    && best.as_ref().is_none_or(|(least, _)| balance < *least)
                {
                    best = Some((balance, Some(givers.clone())));
                }
                ControlFlow::Continue(())
            });
        }
        best
    }

    /// Returns the balance if these nodes give the remainder, one group each in turn.
    fn balance_with_remainder(
        &self,
        left: &[usize],
        givers: &Combination,
        mut remainder: usize,
    ) -> Option<f64> {
        let mut left = left.to_vec();
        if givers.items().map(|node| left[node]).sum::<usize>() < remainder {
            return None;
        }
        while remainder > 0 {
            let before = remainder;
            for node in givers.items() {
                if remainder > 0 && left[node] >= self.group {
                    left[node] -= self.group;
                    remainder = remainder.saturating_sub(self.group);
                }
            }
            if remainder == before {
                // The rest is scattered over incomplete groups. The kubelet loops forever here.
                return None;
            }
        }
        Some(self.balance(&left))
    }
}

/// Takes `needed` CPUs in groups of `group`, evenly from several nodes.
pub(crate) fn distributed(
    topology: &CpuTopology,
    available: &CpuSet,
    needed: usize,
    group: usize,
    packing: Packing,
) -> Result<CpuSet, CpuError> {
    let packing = Packing { by_cache: None, ..packing };
    if group == 0 || !needed.is_multiple_of(group) {
        return packed(topology, available, needed, packing);
    }
    let mut accumulator = Accumulator::new(topology, available, needed)?;
    if needed == 0 {
        return Ok(accumulator.taken);
    }
    let free: Vec<usize> = topology.nodes.iter().map(|node| accumulator.free_in(node)).collect();
    let search = DistributionSearch { needed, group, nodes: accumulator.nodes(), free };

    // Bounds of the number of nodes, counted in groups.
    let groups = needed.div_ceil(group);
    let groups_per_node = topology.size.div_ceil(group).div_ceil(topology.nodes.len().max(1)).max(1);
    let least = groups.div_ceil(groups_per_node);
    let most = groups.min(search.free.iter().filter(|&&free| free > 0).count());
    let Some(best) = (least..=most).find_map(|count| search.best(count)) else {
        return packed(topology, available, needed, packing);
    };

    let nodes: Vec<usize> = best.nodes.items().collect();
    let share = search.share(nodes.len());
    for &node in &nodes {
        take_from(&mut accumulator, topology, node, share, packing);
    }
    let mut remainder = needed - share * nodes.len();
    let givers: Vec<usize> = best.remainder.iter().flat_map(Combination::items).collect();
    while remainder > 0 {
        let before = remainder;
        for &node in &givers {
            if remainder > 0 && accumulator.free_in(&topology.nodes[node]) >= group {
                take_from(&mut accumulator, topology, node, group, packing);
                remainder = remainder.saturating_sub(group);
            }
        }
        if remainder == before {
            break;
        }
    }
    match accumulator.needed {
        0 => Ok(accumulator.taken),
        missing @ 1.. => Err(CpuError::TooFewDistributed(missing)),
        missing => Err(CpuError::TooManyDistributed(missing)),
    }
}

/// Takes CPUs from one node. Takes none if the node has too few, which happens if the combination was overwritten.
fn take_from(
    accumulator: &mut Accumulator<'_>,
    topology: &CpuTopology,
    node: usize,
    count: usize,
    packing: Packing,
) {
    let free = &topology.nodes[node].cpus & &accumulator.free;
    if let Ok(cpus) = packed(topology, &free, count, packing) {
        accumulator.take(&cpus);
    }
}

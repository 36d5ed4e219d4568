//! Init containers that end before the next container starts.
//!
//! Problem: they may need more than what runs afterwards, but only for a while, and they are alone: what starts later
//! does not use its own yet.
//!
//! Algorithm: each is looked at alone first, beside nothing of its own request: one that has no room then never has any.
//! When all that runs has its place, the init containers are placed in reverse order. Each has to fit into
//! what is free together with what all containers hold that start after it, by the policy of the request; where there
//! is a choice it takes as little as possible beyond what these hold. It is charged only for that surplus, which it
//! gives back when the next container starts. In pod scope with `single-numa-node` it stays on the node of its pod, and on what counts
//! with it.

use std::collections::BTreeSet;

use super::{
    decide::{ContainerRefusal, ContainerShares, ResolvedPolicy},
    free_capacity::{FreeCapacity, PlacementGroup},
    host::CPU,
    placement_groups::{ContainerNeeds, RequestNeeds},
    rank::{Placement, union},
    refusal::ContainerKind,
    search,
};
use crate::policy::{Tiers, TopologyManagerPolicy, TopologyManagerScope};

/// An init container that has no room, and what there was.
pub(super) struct InitShortage {
    group: PlacementGroup,
    free_capacity: FreeCapacity,
}

impl InitShortage {
    /// Why it is refused, and at which container.
    pub(super) fn refusal(self, policy: &ResolvedPolicy<'_>) -> ContainerRefusal {
        (policy.refusal_for(&self.free_capacity, &self.group, ContainerKind::Init), self.group.container)
    }
}

/// The init containers of a request that need something, by their places.
fn ending(needs: &RequestNeeds) -> impl DoubleEndedIterator<Item = (usize, &ContainerNeeds)> {
    needs.containers.iter().enumerate().filter(|(_, need)| need.ends && !need.is_nothing())
}

fn to_group(need: &ContainerNeeds) -> PlacementGroup {
    let container = Some(need.name.clone());
    PlacementGroup {
        container,
        need: need.amounts.clone(),
        devices: Vec::new(),
        not_preferred: Vec::new(),
        named: Vec::new(),
    }
}

/// Whether each init container of a request has room in what is free, if nothing else is placed of it.
pub(super) fn check(
    policy: &ResolvedPolicy<'_>,
    free_capacity: &FreeCapacity,
    needs: &RequestNeeds,
) -> Result<(), Box<InitShortage>> {
    let mut seen = BTreeSet::new();
    for (_, need) in ending(needs).filter(|(_, need)| seen.insert(&need.amounts)) {
        let group = to_group(need);
        let found = policy.candidates(free_capacity, &group);
        if found.placements.is_empty() && !found.is_incomplete {
            return Err(InitShortage { group, free_capacity: free_capacity.clone() }.into());
        }
    }
    Ok(())
}

/// Places the init containers of a request. `room` is what all that runs leaves, `units` where that was placed.
pub(super) fn place(
    policy: &ResolvedPolicy<'_>,
    free_capacity: &FreeCapacity,
    needs: &RequestNeeds,
    groups: &[&Placement],
    result: &mut [ContainerShares],
) -> Result<(), Box<InitShortage>> {
    if ending(needs).next().is_none() {
        return Ok(());
    }
    let mut free_capacity = free_capacity.clone();
    // What those have that start later than the one that is placed; they are added as it is their turn.
    let mut later: Vec<Vec<u64>> = free_capacity.free.iter().map(|free| vec![0; free.len()]).collect();
    let mut added = needs.containers.len();
    for (index, need) in ending(needs).rev() {
        if policy.work.is_spent() {
            return Err(InitShortage { group: to_group(need), free_capacity }.into());
        }
        policy.work.charge(150 + 6 * later.len() * policy.host.len());
        for holding in &result[index + 1..added] {
            for (resource, shares) in holding.shares.iter().enumerate() {
                for &(at, share) in shares {
                    later[resource][at] += share;
                }
            }
        }
        added = index + 1;
        let mut within = free_capacity.clone();
        // Whether whole cores add up with those of later containers is seen when they are chosen.
        within.cores.clear();
        for (free, later) in within.free.iter_mut().zip(&later) {
            for (free, later) in free.iter_mut().zip(later) {
                *free = free.saturating_add(*later);
            }
        }
        let one = policy.policy == TopologyManagerPolicy::SingleNumaNode;
        if one && policy.scope == TopologyManagerScope::Pod && !groups.is_empty() {
            let nodes = union(groups.iter().map(|group| group.nodes.as_slice()));
            let attached = policy.tiers == Tiers::Attached;
            within.keep_only(&if attached { search::members(policy.host, &nodes) } else { nodes });
        }
        let group = to_group(need);
        let found = policy.candidates(&within, &group);
        // As if nobody used what is withheld: that does not decide which is better.
        let with_withheld = within.with_withheld();
        let surplus = |placement: &Placement| -> Vec<u64> {
            let beyond = |(resource, shares): (usize, Vec<(usize, u64)>)| {
                shares.into_iter().map(|(at, share)| share.saturating_sub(later[resource][at])).sum()
            };
            policy.work.charge(24 + placement.nodes.len());
            let taken = with_withheld.shares(policy.host, &group, placement);
            taken.into_iter().enumerate().map(beyond).collect()
        };
        let Some(best) = found.placements.iter().min_by_key(|placement| surplus(placement)) else {
            return Err(InitShortage { group, free_capacity: within }.into());
        };
        let mut holding = ContainerShares { sets: best.sets.clone(), ..ContainerShares::default() };
        for (resource, shares) in within.take(policy.host, &group, best).into_iter().enumerate() {
            let mut own = Vec::new();
            for (at, share) in shares {
                let borrowed = share.min(later[resource][at]);
                if resource == CPU && borrowed > 0 {
                    holding.borrowed_cpus.push((at, borrowed));
                }
                if share > borrowed {
                    own.push((at, share - borrowed));
                    free_capacity.free[resource][at] =
                        free_capacity.free[resource][at].saturating_sub(share - borrowed);
                    if resource == CPU {
                        free_capacity.take_cores(at, share - borrowed);
                    }
                }
            }
            holding.shares.push(own);
        }
        result[index] = holding;
    }
    Ok(())
}

//! Placement of init containers that are not sidecars.
//!
//! # Problem
//! An init container can need more than the containers that run afterwards, but only for a while. Later containers do
//! not use their resources yet.
//!
//! # Algorithm
//! First, each init container is checked by itself: if it does not fit then, it never will. Any placement suffices for
//! that, and the checks end after half of the work. After all running containers are placed, the init containers are
//! placed in reverse order. Each may use the free capacity and the shares of all later containers, subject to the
//! policy of the request. Among the possible placements it uses the one with the smallest surplus over these shares.
//! Only the surplus is charged, and released when the next container starts. In pod scope with `single-numa-node`, an
//! init container stays on the node of its pod and the attached memory-only nodes.

use std::collections::BTreeSet;

use super::{
    decide::{ContainerRefusal, ContainerShares, ResolvedPolicy},
    free_capacity::{FreeCapacity, PlacementGroup},
    host::CPU,
    placement_groups::{ContainerNeeds, RequestNeeds},
    rank::{RankedPlacement, union},
    refusal::ContainerKind,
    search::{self, SearchExtent},
};
use crate::policy::{Tiers, TopologyManagerPolicy, TopologyManagerScope};

/// Init container that does not fit, with the capacity at that time.
pub(super) struct InitShortage {
    group: PlacementGroup,
    free_capacity: FreeCapacity,
}

impl InitShortage {
    /// Makes the refusal.
    pub(super) fn refusal(self, policy: &ResolvedPolicy<'_>) -> ContainerRefusal {
        (policy.refusal_for(&self.free_capacity, &self.group, ContainerKind::Init), self.group.container)
    }
}

/// Returns the init containers with needs, by index.
fn ending_containers(needs: &RequestNeeds) -> impl DoubleEndedIterator<Item = (usize, &ContainerNeeds)> {
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

/// Checks that each init container fits the free capacity by itself.
pub(super) fn check(
    policy: &ResolvedPolicy<'_>,
    free_capacity: &FreeCapacity,
    needs: &RequestNeeds,
) -> Result<(), Box<InitShortage>> {
    let mut seen = BTreeSet::new();
    let share = policy.work.all().half();
    for (_, need) in ending_containers(needs).filter(|(_, need)| seen.insert(&need.amounts)) {
        // The rest is for the placement, which can fail as well.
        if share.is_spent() {
            break;
        }
        let group = to_group(need);
        let found = policy.search(free_capacity, &group, SearchExtent::Any);
        if found.placements.is_empty() && !found.is_incomplete {
            return Err(InitShortage { group, free_capacity: free_capacity.clone() }.into());
        }
    }
    Ok(())
}

/// Places the init containers. `free_capacity` is the rest after all running containers, `groups` are their
/// placements.
pub(super) fn place(
    policy: &ResolvedPolicy<'_>,
    free_capacity: &FreeCapacity,
    needs: &RequestNeeds,
    groups: &[&RankedPlacement],
    result: &mut [ContainerShares],
) -> Result<(), Box<InitShortage>> {
    if ending_containers(needs).next().is_none() {
        return Ok(());
    }
    let mut free_capacity = free_capacity.clone();
    // Shares of the containers after the current one.
    let mut later: Vec<Vec<u64>> = free_capacity.free.iter().map(|free| vec![0; free.len()]).collect();
    let mut added = needs.containers.len();
    let mut left = ending_containers(needs).count();
    for (index, need) in ending_containers(needs).rev() {
        // A search exceeds its share by the operation in progress.
        policy.work.expect_searches(2 * left);
        left -= 1;
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
        // The selection of CPUs checks whether whole cores add up with those of later containers.
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
            within.keep_only(&if attached {
                search::with_attached_nodes(policy.host, &nodes)
            } else {
                nodes
            });
        }
        let group = to_group(need);
        let found = policy.candidates(&within, &group);
        // Withheld memory counts as free here, because it must not affect which placement is better.
        let with_withheld = within.with_withheld();
        let surplus = |placement: &RankedPlacement| -> Vec<u64> {
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

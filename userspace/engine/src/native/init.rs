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
    decide::{Agreed, Holding, Refused},
    free_capacity::{Room, Unit},
    host::CPU,
    placement_groups::{Need, Needs},
    rank::{Placement, union},
    refusal::ContainerKind,
    search,
};
use crate::policy::{Tiers, TopologyManagerPolicy, TopologyManagerScope};

/// An init container that has no room, and what there was.
pub(super) struct Short {
    unit: Unit,
    room: Room,
}

impl Short {
    /// Why it is refused, and at which container.
    pub(super) fn refusal(self, agreed: &Agreed<'_>) -> Refused {
        (agreed.no_room(&self.room, &self.unit, ContainerKind::Init), self.unit.container)
    }
}

/// The init containers of a request that need something, by their places.
fn ending(needs: &Needs) -> impl DoubleEndedIterator<Item = (usize, &Need)> {
    needs.containers.iter().enumerate().filter(|(_, need)| need.ends && !need.is_nothing())
}

fn unit(need: &Need) -> Unit {
    let container = Some(need.name.clone());
    Unit {
        container,
        need: need.amounts.clone(),
        devices: Vec::new(),
        unwished: Vec::new(),
        named: Vec::new(),
    }
}

/// Whether each init container of a request has room in what is free, if nothing else is placed of it.
pub(super) fn check(agreed: &Agreed<'_>, room: &Room, needs: &Needs) -> Result<(), Box<Short>> {
    let mut seen = BTreeSet::new();
    for (_, need) in ending(needs).filter(|(_, need)| seen.insert(&need.amounts)) {
        let unit = unit(need);
        let found = agreed.candidates(room, &unit);
        if found.placements.is_empty() && !found.cut_off {
            return Err(Short { unit, room: room.clone() }.into());
        }
    }
    Ok(())
}

/// Places the init containers of a request. `room` is what all that runs leaves, `units` where that was placed.
pub(super) fn place(
    agreed: &Agreed<'_>,
    room: &Room,
    needs: &Needs,
    units: &[&Placement],
    result: &mut [Holding],
) -> Result<(), Box<Short>> {
    if ending(needs).next().is_none() {
        return Ok(());
    }
    let mut room = room.clone();
    // What those have that start later than the one that is placed; they are added as it is their turn.
    let mut later: Vec<Vec<u64>> = room.free.iter().map(|free| vec![0; free.len()]).collect();
    let mut added = needs.containers.len();
    for (index, need) in ending(needs).rev() {
        if agreed.work.is_spent() {
            return Err(Short { unit: unit(need), room }.into());
        }
        agreed.work.charge(150 + 6 * later.len() * agreed.host.len());
        for holding in &result[index + 1..added] {
            for (resource, shares) in holding.shares.iter().enumerate() {
                for &(at, share) in shares {
                    later[resource][at] += share;
                }
            }
        }
        added = index + 1;
        let mut within = room.clone();
        // Whether whole cores add up with those of later containers is seen when they are chosen.
        within.cores.clear();
        for (free, later) in within.free.iter_mut().zip(&later) {
            for (free, later) in free.iter_mut().zip(later) {
                *free = free.saturating_add(*later);
            }
        }
        let one = agreed.policy == TopologyManagerPolicy::SingleNumaNode;
        if one && agreed.scope == TopologyManagerScope::Pod && !units.is_empty() {
            let nodes = union(units.iter().map(|unit| unit.nodes.as_slice()));
            let attached = agreed.tiers == Tiers::Attached;
            within.keep_only(&if attached { search::members(agreed.host, &nodes) } else { nodes });
        }
        let unit = unit(need);
        let found = agreed.candidates(&within, &unit);
        // As if nobody used what is withheld: that does not decide which is better.
        let by_ledger = within.by_ledger();
        let surplus = |placement: &Placement| -> Vec<u64> {
            let beyond = |(resource, shares): (usize, Vec<(usize, u64)>)| {
                shares.into_iter().map(|(at, share)| share.saturating_sub(later[resource][at])).sum()
            };
            agreed.work.charge(24 + placement.nodes.len());
            let taken = by_ledger.shares(agreed.host, &unit, placement);
            taken.into_iter().enumerate().map(beyond).collect()
        };
        let Some(best) = found.placements.iter().min_by_key(|placement| surplus(placement)) else {
            return Err(Short { unit, room: within }.into());
        };
        let mut holding = Holding { sets: best.sets.clone(), ..Holding::default() };
        for (resource, shares) in within.take(agreed.host, &unit, best).into_iter().enumerate() {
            let mut own = Vec::new();
            for (at, share) in shares {
                let borrowed = share.min(later[resource][at]);
                if resource == CPU && borrowed > 0 {
                    holding.borrowed_cpus.push((at, borrowed));
                }
                if share > borrowed {
                    own.push((at, share - borrowed));
                    room.free[resource][at] = room.free[resource][at].saturating_sub(share - borrowed);
                    if resource == CPU {
                        room.take_cores(at, share - borrowed);
                    }
                }
            }
            holding.shares.push(own);
        }
        result[index] = holding;
    }
    Ok(())
}

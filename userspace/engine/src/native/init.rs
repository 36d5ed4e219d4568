//! Init containers that end before the next container starts.
//!
//! Problem: they may need more than what runs afterwards, but only for a while, and they are alone: what starts later
//! does not use its own yet.
//!
//! Algorithm: when all that runs has its place, the init containers are placed in reverse order. Each has to fit into
//! what is free together with what all containers hold that start after it, by the policy of the request; where there
//! is a choice it takes as little as possible beyond what these hold. It is charged only for that surplus, which it
//! gives back when the next container starts. In pod scope with `single-numa-node` it stays on the node of its pod.

use super::{
    decide::{Agreed, Holding},
    host::CPU,
    rank::{Placement, union},
    refusal::{Refusal, What},
    room::{Room, Unit},
    search,
    units::Needs,
};
use crate::{
    policy::{TopologyManagerPolicy, TopologyManagerScope},
    request::ContainerName,
};

/// Places the init containers of a request. `room` is what all that runs leaves, `units` where that was placed.
pub(super) fn place(
    agreed: &Agreed<'_>,
    room: &Room,
    needs: &Needs,
    units: &[&Placement],
    result: &mut [Holding],
) -> Result<(), (Refusal, ContainerName)> {
    if !needs.containers.iter().any(|need| need.ends && !need.is_nothing()) {
        return Ok(());
    }
    let mut room = room.clone();
    for index in (0..needs.containers.len()).rev() {
        let need = &needs.containers[index];
        if !need.ends || need.is_nothing() {
            continue;
        }
        // What those have that start later.
        let mut later: Vec<Vec<u64>> = room.free.iter().map(|free| vec![0; free.len()]).collect();
        for holding in &result[index + 1..] {
            for (resource, shares) in holding.shares.iter().enumerate() {
                for &(at, share) in shares {
                    later[resource][at] += share;
                }
            }
        }
        let mut within = room.clone();
        for (free, later) in within.free.iter_mut().zip(&later) {
            for (free, later) in free.iter_mut().zip(later) {
                *free = free.saturating_add(*later);
            }
        }
        let one = agreed.policy == TopologyManagerPolicy::SingleNumaNode;
        if one && agreed.scope == TopologyManagerScope::Pod && !units.is_empty() {
            let nodes = union(units.iter().map(|unit| unit.nodes.as_slice()));
            let nodes = search::members(agreed.host, &nodes);
            within.keep_only(&nodes);
        }
        let unit = Unit {
            container: Some(need.name.clone()),
            need: need.amounts.clone(),
            devices: Vec::new(),
            unwished: Vec::new(),
        };
        let found = agreed.candidates(&within, &unit);
        // As if nobody used what is withheld: that does not decide which is better.
        let by_ledger = within.by_ledger();
        let surplus = |placement: &Placement| -> Vec<u64> {
            let beyond = |(resource, shares): (usize, Vec<(usize, u64)>)| {
                shares.into_iter().map(|(at, share)| share.saturating_sub(later[resource][at])).sum()
            };
            let taken = by_ledger.clone().take(agreed.host, &unit, placement);
            taken.into_iter().enumerate().map(beyond).collect()
        };
        let Some(best) = found.placements.iter().min_by_key(|placement| surplus(placement)) else {
            return Err((agreed.no_room(&within, &unit, What::Init), need.name.clone()));
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
                }
            }
            holding.shares.push(own);
        }
        result[index] = holding;
    }
    Ok(())
}

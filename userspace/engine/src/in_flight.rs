//! Accounting for container moves that are being executed.
//!
//! # Problem
//! A moving container needs capacity on both sides until its pages have arrived. If a later move fails, the earlier
//! ones are reverted. No other workload may get that capacity in the meantime.
//!
//! # Terms
//! - *begun*: the ledger already has the container at its new place.
//! - *stage n*: moves before n are complete, move n is being executed, later ones have not begun.
//!
//! # Algorithm
//! A begun move holds its new place. In addition, the owner [`RESERVE_OWNER`] holds the difference to the peak of all
//! stages so far, so that every stage can be reached again in reverse order. A move can begin if the additional
//! demand of its stage is free. The moves of a plan are ordered so that each can begin.
//!
//! # Invariant
//! The charged amounts never decrease before the end, so a move can always be reverted.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, CpuSet, NodeId, ZoneKind};

use crate::{
    decision::Rejection,
    ledger::{Allocation, Ledger, MemoryBlock, OwnerAccount},
    moves::ContainerMove,
    request::{ContainerName, OwnerId, Request, Resources},
    strategy::Strategy,
    terms::Terms,
};

/// Owner of the reserve. No workload can have this name.
pub const RESERVE_OWNER: &str = ".rebalance";

/// Reason why a move cannot begin, or a plan cannot be completed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveConflict {
    /// The container does not hold the allocation that the move starts from.
    #[error("{0} no longer holds the allocation from which it is to move")]
    AllocationChanged(OwnerId),
    /// Another container holds CPUs of the destination.
    #[error("CPUs {cpus}, the destination of {owner}, are not free any more")]
    CpusTaken { owner: OwnerId, cpus: CpuSet },
    /// The request for which the moves free capacity would still be refused.
    #[error("the request would not fit after the moves: {0}")]
    RequestRefused(Box<Rejection>),
    /// The destination does not have enough free memory.
    #[error("node {node} has {free} of {kind} free, less than the {needed} that {owner} needs there")]
    MemoryTaken {
        owner: OwnerId,
        node: NodeId,
        kind: ZoneKind,
        /// Bytes that the move needs in addition to those already charged.
        needed: Bytes,
        free: Bytes,
    },
}

/// Set of CPUs, and bytes by kind and node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Charge {
    cpus: CpuSet,
    bytes: BTreeMap<(ZoneKind, NodeId), u64>,
}

impl Charge {
    fn from_allocation(held: &Allocation) -> Self {
        let bytes = held
            .placed
            .iter()
            .flat_map(|(&kind, nodes)| nodes.iter().map(move |(&node, bytes)| ((kind, node), bytes.0)));
        Self { cpus: held.held_cpus(), bytes: bytes.collect() }
    }

    /// Adds another charge.
    fn add(&mut self, other: &Self) {
        self.cpus = &self.cpus | &other.cpus;
        for (&place, &bytes) in &other.bytes {
            let sum = self.bytes.entry(place).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Raises this charge to at least the other one, place by place.
    fn raise_to(&mut self, other: &Self) {
        self.cpus = &self.cpus | &other.cpus;
        for (&place, &bytes) in &other.bytes {
            let most = self.bytes.entry(place).or_default();
            *most = (*most).max(bytes);
        }
    }

    /// Returns the part of this charge that exceeds the other one.
    fn minus(&self, other: &Self) -> Self {
        let rest = |(&place, &bytes): (&(ZoneKind, NodeId), &u64)| {
            let rest = bytes.saturating_sub(other.bytes.get(&place).copied().unwrap_or(0));
            (rest > 0).then_some((place, rest))
        };
        Self { cpus: &self.cpus - &other.cpus, bytes: self.bytes.iter().filter_map(rest).collect() }
    }

    fn into_allocation(self) -> Allocation {
        let mut held =
            Allocation { cpus: Some(self.cpus).filter(|cpus| !cpus.is_empty()), ..Allocation::default() };
        for ((kind, node), bytes) in self.bytes {
            held.place(kind, node, bytes);
        }
        held.blocks = held
            .placed
            .iter()
            .map(|(&kind, nodes)| MemoryBlock {
                kind,
                affinity: nodes.keys().copied().collect(),
                bytes: Bytes(nodes.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0))),
            })
            .collect();
        held
    }
}

/// Returns the charge when all these moves are complete.
fn charge_at_end(moves: &[ContainerMove]) -> Charge {
    let mut sum = Charge::default();
    for of in moves {
        sum.add(&Charge::from_allocation(&of.to));
    }
    sum
}

/// Returns the maximum charge over all stages of these moves.
fn peak_charge(moves: &[ContainerMove]) -> Charge {
    let mut most = Charge::default();
    for current in 0..moves.len() {
        let mut stage = Charge::default();
        for (place, of) in moves.iter().enumerate() {
            let mut charge = Charge::from_allocation(if place < current { &of.to } else { &of.from });
            if place == current {
                charge.raise_to(&Charge::from_allocation(&of.to));
            }
            stage.add(&charge);
        }
        most.raise_to(&stage);
    }
    most
}

impl Ledger {
    /// Replaces the allocation of a container. The caller has to charge it with [`Strategy::rebase`].
    fn reassign(&mut self, of: &ContainerMove, to: &Allocation) {
        if self.owner(&of.owner).is_some() {
            *self.allocation_mut(&of.owner, &of.container) = to.clone();
            self.drop_empty(&of.owner, Some(&of.container));
        }
    }

    /// Replaces the allocation of [`RESERVE_OWNER`].
    fn set_reserve(&mut self, aside: Allocation) {
        let (owner, container) = (OwnerId::from(RESERVE_OWNER), ContainerName::from(RESERVE_OWNER));
        if aside.is_empty() {
            if self.owner(&owner).is_some() {
                *self.owner_mut(&owner) = OwnerAccount::default();
                self.drop_empty(&owner, None);
            }
            return;
        }
        *self.owner_mut(&owner) = OwnerAccount {
            // The request keeps the account active; otherwise the strategy would release it. The terms exclude it
            // from moves.
            request: Some(Request::workload(RESERVE_OWNER, Resources::none()).into()),
            terms: Terms { immovable: true, ..Terms::default() },
            started: [container.clone()].into(),
            containers: [(container, aside)].into(),
            ..OwnerAccount::default()
        };
    }

    /// Returns the begun moves that are still in place: the container holds the new allocation. A container that was
    /// removed needs no reserve.
    fn moves_in_place(&self, begun: &[ContainerMove]) -> Vec<ContainerMove> {
        let is_there = |of: &&ContainerMove| self.allocation(&of.owner, &of.container) == Some(&of.to);
        begun.iter().filter(is_there).cloned().collect()
    }
}

/// Begins a move after those in `begun`. From now on, the container is charged on both sides.
pub fn begin_move(
    strategy: &dyn Strategy,
    ledger: &Ledger,
    begun: &[ContainerMove],
    next: &ContainerMove,
) -> Result<Ledger, MoveConflict> {
    if ledger.allocation(&next.owner, &next.container) != Some(&next.from) {
        return Err(MoveConflict::AllocationChanged(next.owner.clone()));
    }
    let aside = OwnerId::from(RESERVE_OWNER);
    let of_others: CpuSet = ledger
        .allocations()
        .filter(|(owner, container, _)| {
            **owner != aside && !(**owner == next.owner && **container == next.container)
        })
        .flat_map(|(_, _, held)| held.held_sets())
        .flat_map(CpuSet::iter)
        .collect();
    let begun = ledger.moves_in_place(begun);
    let mut all = begun.clone();
    all.push(next.clone());
    let mut before = peak_charge(&begun);
    before.raise_to(&charge_at_end(&begun));
    before.add(&Charge::from_allocation(&next.from));
    let mut after = peak_charge(&all);
    after.raise_to(&charge_at_end(&all));
    let more = after.minus(&before);
    let wanted = next.to.held_cpus();
    let taken = &(&wanted & &of_others) | &(&more.cpus - ledger.shared_pool());
    if !taken.is_empty() {
        return Err(MoveConflict::CpusTaken { owner: next.owner.clone(), cpus: taken });
    }
    for ((kind, node), needed) in more.bytes {
        let account = ledger.nodes().get(&node).and_then(|node| node.kinds.get(&kind));
        let free = account.map_or(0, |account| account.free.0);
        if needed > free {
            let (needed, free) = (Bytes(needed), Bytes(free));
            return Err(MoveConflict::MemoryTaken { owner: next.owner.clone(), node, kind, needed, free });
        }
    }
    let mut changed = ledger.clone();
    changed.reassign(next, &next.to);
    changed.set_reserve(peak_charge(&all).minus(&charge_at_end(&all)).into_allocation());
    Ok(strategy.rebase(&changed).0)
}

/// Reverts the last of the begun moves. The container is charged on both sides until [`reserve_for`] is called with
/// the remaining moves. Returns `None`, and leaves the ledger as it is, if the container does not hold the new
/// allocation.
pub fn revert_move(strategy: &dyn Strategy, ledger: &Ledger, begun: &[ContainerMove]) -> Option<Ledger> {
    let (last, before) = begun.split_last()?;
    if ledger.allocation(&last.owner, &last.container) != Some(&last.to) {
        return None;
    }
    let before = ledger.moves_in_place(before);
    let mut holds = charge_at_end(&before);
    holds.add(&Charge::from_allocation(&last.from));
    let mut all = before;
    all.push(last.clone());
    let mut changed = ledger.clone();
    changed.reassign(last, &last.from);
    changed.set_reserve(peak_charge(&all).minus(&holds).into_allocation());
    Some(strategy.rebase(&changed).0)
}

/// Reserves exactly the capacity that these begun moves need for being reverted; with no moves, nothing.
pub fn reserve_for(strategy: &dyn Strategy, ledger: &Ledger, begun: &[ContainerMove]) -> Ledger {
    let mut changed = ledger.clone();
    let begun = ledger.moves_in_place(begun);
    changed.set_reserve(peak_charge(&begun).minus(&charge_at_end(&begun)).into_allocation());
    strategy.rebase(&changed).0
}

/// Checks a partially executed plan against the ledger: whether the remaining moves can begin, and whether the
/// request fits afterwards. The first `begun` moves have begun.
pub fn check_plan(
    strategy: &dyn Strategy,
    ledger: &Ledger,
    moves: &[ContainerMove],
    begun: usize,
    (request, terms): (&Request, &Terms),
) -> Result<(), MoveConflict> {
    let (before, rest) = moves.split_at(begun.min(moves.len()));
    let (mut begun, mut ledger) = (before.to_vec(), ledger.clone());
    for next in rest {
        // A container that was removed needs no move.
        if ledger.allocation(&next.owner, &next.container).is_some() {
            ledger = begin_move(strategy, &ledger, &begun, next)?;
        }
        begun.push(next.clone());
    }
    let ledger = reserve_for(strategy, &ledger, &[]);
    let decision = strategy.admit_watched(&ledger, request, terms, &|_| {});
    decision.outcome.map(drop).map_err(MoveConflict::RequestRefused)
}

/// Returns an order in which each of these moves can begin, or `None` if none was found within `steps` attempts.
pub fn feasible_order(
    strategy: &dyn Strategy,
    ledger: &Ledger,
    moves: &[ContainerMove],
    steps: &mut usize,
) -> Option<Vec<ContainerMove>> {
    fn extend(
        strategy: &dyn Strategy,
        ledger: &Ledger,
        begun: &mut Vec<ContainerMove>,
        left: &[ContainerMove],
        steps: &mut usize,
    ) -> bool {
        if left.is_empty() {
            return true;
        }
        for (place, next) in left.iter().enumerate() {
            if *steps == 0 {
                return false;
            }
            *steps -= 1;
            let Ok(after) = begin_move(strategy, ledger, begun, next) else { continue };
            begun.push(next.clone());
            let rest: Vec<ContainerMove> = left
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != place)
                .map(|(_, of)| of.clone())
                .collect();
            if extend(strategy, &after, begun, &rest, steps) {
                return true;
            }
            begun.pop();
        }
        false
    }
    let mut begun = Vec::new();
    extend(strategy, ledger, &mut begun, moves, steps).then_some(begun)
}

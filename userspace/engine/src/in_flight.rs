//! Moves of containers that run to other nodes, and what is charged for while they are made.
//!
//! Problem: a container that moves needs room on both sides until its pages have arrived, and where a later move fails,
//! those before it go back. Nobody else may be promised that room meanwhile.
//!
//! Terms: a move is *begun* from the moment at which the ledger has the container at its new place. A *stage* is a move that
//! is being made, with those before it made and those after it not.
//!
//! Algorithm: what is begun holds its new place. Besides, the owner [`RESERVE_OWNER`] holds what any stage so far needed more
//! than that: so each stage can be reached again, in the reverse order. A move can be begun if what its stage needs beyond all
//! this is free. The moves of a plan are put in an order in which each can be begun.
//!
//! Invariant: what is charged never becomes less before the end, so that who goes back has room.

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

/// The owner that holds what is set aside. No workload can have this name.
pub const RESERVE_OWNER: &str = ".rebalance";

/// Why a move cannot be begun, or a plan not be carried out to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveConflict {
    /// The container does not hold any more what it is to leave.
    #[error("{0} does not hold any more what the plan has it leave")]
    AllocationChanged(OwnerId),
    /// CPUs that it is to have are another's.
    #[error("CPUs {cpus}, to which {owner} is to go, are not free any more")]
    CpusTaken {
        /// Whose move it is.
        owner: OwnerId,
        /// The CPUs.
        cpus: CpuSet,
    },
    /// What room is made for would not fit after all.
    #[error("the request would not fit after the moves: {0}")]
    RequestRefused(Box<Rejection>),
    /// Memory that it is to have is another's.
    #[error("node {node} has {free} of {kind} free, less than the {needed} that {owner} needs there")]
    MemoryTaken {
        /// Whose move it is.
        owner: OwnerId,
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
        /// What it needs besides what it holds.
        needed: Bytes,
        /// What is free.
        free: Bytes,
    },
}

/// CPUs, and bytes by kind and node.
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

    /// Both, each with its own.
    fn add(&mut self, other: &Self) {
        self.cpus = &self.cpus | &other.cpus;
        for (&place, &bytes) in &other.bytes {
            let sum = self.bytes.entry(place).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// As much as each of them.
    fn raise_to(&mut self, other: &Self) {
        self.cpus = &self.cpus | &other.cpus;
        for (&place, &bytes) in &other.bytes {
            let most = self.bytes.entry(place).or_default();
            *most = (*most).max(bytes);
        }
    }

    /// What this has more than another.
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

/// What these moves hold when all are made.
fn charge_at_end(moves: &[ContainerMove]) -> Charge {
    let mut sum = Charge::default();
    for of in moves {
        sum.add(&Charge::from_allocation(&of.to));
    }
    sum
}

/// As much as any stage of these moves needs.
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
    /// Has a container of an active owner hold something else. To be followed by [`Strategy::rebase`], which charges it.
    fn reassign(&mut self, of: &ContainerMove, to: &Allocation) {
        if self.owner(&of.owner).is_some() {
            *self.allocation_mut(&of.owner, &of.container) = to.clone();
            self.drop_empty(&of.owner, Some(&of.container));
        }
    }

    /// Sets this aside, and nothing else.
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
            // Active, or it would be cleared away; and never moved.
            request: Some(Request::workload(RESERVE_OWNER, Resources::none()).into()),
            terms: Terms { immovable: true, ..Terms::default() },
            started: [container.clone()].into(),
            containers: [(container, aside)].into(),
            ..OwnerAccount::default()
        };
    }

    /// Those of these begun moves whose containers are still where they went. Who is gone needs no room.
    fn moves_in_place(&self, begun: &[ContainerMove]) -> Vec<ContainerMove> {
        let is_there = |of: &&ContainerMove| self.allocation(&of.owner, &of.container) == Some(&of.to);
        begun.iter().filter(is_there).cloned().collect()
    }
}

/// Begins a move, after these. The container is charged for on both sides from now on.
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

/// Takes back the last of these begun moves: the container is charged for on both sides until the rest is
/// [kept](reserve_for). `None`: it holds something else by now, or nothing, and is left as it is.
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

/// Sets aside what these begun moves need and no more; with none of them, nothing.
pub fn reserve_for(strategy: &dyn Strategy, ledger: &Ledger, begun: &[ContainerMove]) -> Ledger {
    let mut changed = ledger.clone();
    let begun = ledger.moves_in_place(begun);
    changed.set_reserve(peak_charge(&begun).minus(&charge_at_end(&begun)).into_allocation());
    strategy.rebase(&changed).0
}

/// Holds what is left of a plan against the ledger: whether the rest of these moves can be begun, and the request fits
/// then. So many are begun already.
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
        // Who is gone needs no room.
        if ledger.allocation(&next.owner, &next.container).is_some() {
            ledger = begin_move(strategy, &ledger, &begun, next)?;
        }
        begun.push(next.clone());
    }
    let ledger = reserve_for(strategy, &ledger, &[]);
    let decision = strategy.admit_watched(&ledger, request, terms, &|_| {});
    decision.outcome.map(drop).map_err(MoveConflict::RequestRefused)
}

/// An order in which each of these moves can be begun. It is looked for as long as there are steps left.
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

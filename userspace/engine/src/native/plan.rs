//! Plans of container moves that free capacity for a request.
//!
//! # Problem
//! A request is refused although the machine has enough free capacity in total, because the free capacity is on the
//! wrong nodes. The plan should move few containers and few bytes.
//!
//! # Algorithm
//! The placement group that does not fit could go to several sets of nodes (*targets*). For each target, combinations
//! of movable groups are collected that would free enough there, by the sums of their amounts. The
//! combinations of all targets are tried in ascending order of bytes: release the groups, place the request, then
//! place the groups again, largest first, each with the usual ranking and its own terms. The first combination that
//! works becomes the plan. In pod scope the containers of an owner move together and count as one move.
//!
//! A plan is only a proposal. During its execution the caller charges both sides of each move (see
//! [`crate::in_flight`]). If the limits demand an order, only plans are returned that can be executed this way.

use std::collections::BTreeSet;

use numaward_topology::{Bytes, CpuSet};

use super::{
    NativeStrategy, accounts,
    free_capacity::{FreeCapacity, PlacementGroup},
    host::CPU,
    placement_groups::{self, ContainerNeeds, NodePreferences, RequestNeeds},
    search::{self, NodeCountRule},
    work_budget::{WorkBudget, WorkShare},
};
use crate::{
    decision::{Decision, Grant, Rejection},
    explain::Explanation,
    in_flight,
    ledger::{Allocation, Ledger},
    moves::{ContainerMove, RebalanceLimits, RebalancePlan},
    policy::{TopologyManagerPolicy, TopologyManagerScope},
    request::{ContainerName, ContainerRequest, OwnerId, Request},
    strategy::Strategy as _,
    terms::Terms,
};

/// Limit of the work for a plan, in the units of [`super::MAX_WORK`]: about 50 ms.
const MAX_PLAN_WORK: u64 = 10_000_000;
/// Work for one attempt, in addition to its decisions, for each node and for each eight owners.
const TRY_COST: usize = 2_500;
/// Maximum number of movable groups for each target; the smallest ones are used.
const MAX_MOVABLE_GROUPS: usize = 64;

/// Containers that move together.
struct MovableGroup {
    owner: OwnerId,
    containers: Vec<ContainerName>,
    bytes: u64,
    /// Amount by resource and position that a move frees.
    leaves: Vec<Vec<u64>>,
}

/// Request, or moved group, that needs a place.
struct PlacementTask<'a> {
    owner: OwnerId,
    request: Option<&'a Request>,
    needs: RequestNeeds,
    terms: &'a Terms,
}

/// Remaining limits of the search for a plan.
#[derive(Clone)]
struct PlanBudget<'a> {
    work: WorkShare<'a>,
    moves: usize,
    /// Bytes that may still move.
    bytes: u64,
    /// True if a moved group may cause further moves.
    chains: bool,
    /// Containers that have moved already.
    frozen: BTreeSet<(OwnerId, ContainerName)>,
}

impl PlanBudget<'_> {
    /// Restores the previous limits, except for the work.
    fn undo<T>(&mut self, before: Self) -> Option<T> {
        *self = before;
        None
    }
}

impl NativeStrategy {
    /// Returns few and small moves that make a request fit, not always the cheapest ones. Returns `None` if there are
    /// none within the limits.
    pub fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Option<RebalancePlan> {
        self.plan_or_rejection(ledger, request, terms, limits).ok()
    }

    /// Like [`Self::plan`], but returns the rejection of the request on failure.
    pub(super) fn plan_or_rejection(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Result<RebalancePlan, Box<Rejection>> {
        let decision = self.admit_watched(ledger, request, terms, &|_| {});
        match decision.outcome {
            Ok(_) => Ok(RebalancePlan { moves: Vec::new(), bytes: Bytes(0), decision }),
            Err(rejection) => self.moves_for(ledger, request, terms, limits).ok_or(rejection),
        }
    }

    /// Returns the moves for a request that is refused without any.
    fn moves_for(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Option<RebalancePlan> {
        if limits.moves == 0 || self.check(terms).is_err() {
            return None;
        }
        let needs = RequestNeeds::new(&self.host, request, terms).ok()?;
        let task = PlacementTask { owner: request.owner.clone(), request: Some(request), needs, terms };
        let containers =
            |owner: &OwnerId| ledger.owner(owner).map(|account| account.containers.keys().cloned());
        let kept: BTreeSet<_> = limits
            .kept
            .iter()
            .flat_map(|owner| containers(owner).into_iter().flatten().map(|name| (owner.clone(), name)))
            .collect();
        let work = WorkBudget::up_to(MAX_PLAN_WORK);
        for (chains, work) in [(false, work.all().half()), (true, work.all())] {
            let mut search =
                PlanBudget { work, moves: limits.moves, bytes: limits.bytes.0, chains, frozen: kept.clone() };
            let accept = |after: Ledger| {
                let moves = moved(ledger, &after, &request.owner);
                // Every move needs capacity on both sides.
                let ordered = limits.in_order.then(|| self.in_order(ledger, &moves, &work));
                Some((ordered.unwrap_or(Some(moves))?, after))
            };
            let found = self.free_capacity_by_moves(ledger, &task, &mut search, &accept);
            let Some((moves, after)) = found else { continue };
            let bytes = Bytes(moves.iter().fold(0, |sum, of| sum.saturating_add(of.bytes.0)));
            let account = after.owner(&request.owner)?;
            let grant = |container: &ContainerRequest| Grant {
                container: container.name.clone(),
                allocation: account.containers.get(&container.name).cloned().unwrap_or_default(),
            };
            let grants = request.all_containers().map(grant).collect();
            let decision =
                Decision { outcome: Ok(grants), explanation: Explanation::default(), ledger: after };
            return Some(RebalancePlan { moves, bytes, decision });
        }
        None
    }

    /// Returns an order in which each move has capacity on both sides.
    fn in_order(
        &self,
        ledger: &Ledger,
        moves: &[ContainerMove],
        work: &WorkShare<'_>,
    ) -> Option<Vec<ContainerMove>> {
        let cost = self.cost(ledger) / 4;
        let steps = usize::try_from(work.left()).unwrap_or(usize::MAX).div_ceil(cost);
        let mut left = steps;
        let ordered = in_flight::feasible_order(self, ledger, moves, &mut left);
        work.charge((steps - left) * cost);
        ordered
    }

    /// Returns the work for one attempt to change a ledger.
    fn cost(&self, ledger: &Ledger) -> usize {
        TRY_COST * (self.host.len() + ledger.owners().count() / 8).max(1)
    }

    /// Returns the group of a request that does not fit, and the free capacity after the placement of the groups
    /// before it.
    fn find_group_without_capacity(
        &self,
        ledger: &Ledger,
        task: &PlacementTask<'_>,
    ) -> Option<(PlacementGroup, FreeCapacity)> {
        let PlacementTask { owner, needs, terms, .. } = task;
        let work = WorkBudget::default();
        let policy = self.resolve_policy(terms, &work);
        let mut free_capacity = self.free_capacity(ledger, terms);
        let wishes = NodePreferences::new(ledger, owner, terms, &self.host);
        let groups = placement_groups::group_containers(
            &self.host,
            &free_capacity,
            needs,
            policy.policy,
            policy.scope,
            &wishes,
        )
        .ok()?;
        for (group, _) in groups {
            let found = policy.candidates(&free_capacity, &group);
            let Some(best) = found.placements.first() else { return Some((group, free_capacity)) };
            free_capacity.take(&self.host, &group, best);
        }
        // All running containers fit, so an init container does not.
        let init = needs.containers.iter().filter(|need| need.ends);
        let largest = init.max_by_key(|need| need.amounts.clone())?;
        let group = PlacementGroup {
            container: Some(largest.name.clone()),
            need: largest.amounts.clone(),
            devices: Vec::new(),
            not_preferred: Vec::new(),
            named: Vec::new(),
        };
        Some((group, self.free_capacity(ledger, terms)))
    }

    /// Returns all groups that may move.
    fn movable(
        &self,
        ledger: &Ledger,
        task: &PlacementTask<'_>,
        search: &PlanBudget<'_>,
    ) -> Vec<MovableGroup> {
        let mut movable = Vec::new();
        let cpus = self.host.cpus.as_ref().map(|cpus| (cpus, cpus.free(ledger)));
        for (owner, account) in ledger.owners().filter(|(owner, _)| **owner != task.owner) {
            let Some(request) = account.request.as_ref().filter(|_| !account.terms.immovable) else {
                continue;
            };
            // Containers that are still starting do not move.
            if account
                .containers
                .keys()
                .any(|name| request.is_regular_init(name) || !account.started.contains(name))
            {
                continue;
            }
            let (policy, scope) = self.policy_and_scope(&account.terms);
            let names: Vec<ContainerName> = account.containers.keys().cloned().collect();
            let together = scope == TopologyManagerScope::Pod && policy != TopologyManagerPolicy::None;
            if names.iter().any(|name| search.frozen.contains(&(owner.clone(), name.clone()))) {
                continue;
            }
            let groups =
                if together { vec![names] } else { names.into_iter().map(|name| vec![name]).collect() };
            for containers in groups.into_iter().filter(|of| !of.is_empty()) {
                let mut leaves = vec![vec![0u64; self.host.len()]; self.host.resources.len()];
                let mut bytes = 0u64;
                let held = || containers.iter().filter_map(|name| account.containers.get(name));
                if let Some((cpus, free)) = &cpus {
                    // A freed CPU can complete a core if its other CPUs are already free.
                    let after = held().fold(free.clone(), |free, held| &free | &held.held_cpus());
                    let wanted = |of: &CpuSet| cpus.count(&cpus.wanted(of, task.terms));
                    let more = wanted(&after).into_iter().zip(wanted(free));
                    leaves[CPU] = more.map(|(after, before)| after.saturating_sub(before)).collect();
                }
                for held in held() {
                    self.add_memory(held, &mut leaves);
                    bytes = held
                        .placed
                        .values()
                        .flat_map(|nodes| nodes.values())
                        .fold(bytes, |sum, of| sum.saturating_add(of.0));
                }
                movable.push(MovableGroup { owner: owner.clone(), containers, bytes, leaves });
            }
        }
        movable
    }

    /// Adds the memory of an allocation to the columns.
    fn add_memory(&self, held: &Allocation, to: &mut [Vec<u64>]) {
        for (&kind, nodes) in &held.placed {
            let Some(number) = self.host.number_of(kind) else { continue };
            for (node, bytes) in nodes {
                if let Ok(at) = self.host.ids.binary_search(node) {
                    to[number][at] += bytes.0;
                }
            }
        }
    }

    /// Returns the sets of nodes to which a group could go.
    fn targets(
        &self,
        group: &PlacementGroup,
        free_capacity: &FreeCapacity,
        terms: &Terms,
        movable: &[MovableGroup],
    ) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..self.host.len()).collect();
        let (sizes, with_attached) =
            match self.resolve_policy(terms, &WorkBudget::default()).rule(free_capacity, group) {
                Some(NodeCountRule::Sized { sizes, with_attached, .. }) => (sizes, with_attached),
                Some(NodeCountRule::Anywhere) => return vec![all],
                None => return Vec::new(),
            };
        let mut targets = Vec::new();
        for (sizes, attached) in [(Some(sizes), false), (with_attached, true)] {
            let Some(size) = sizes.and_then(|sizes| sizes.into_iter().max()) else { continue };
            let items: Vec<usize> =
                all.iter().copied().filter(|&at| !attached || self.host.has_cpus(at)).collect();
            let mut add = |set: &[usize]| {
                let set = if attached { search::with_attached_nodes(&self.host, set) } else { set.to_vec() };
                if targets.len() < search::MAX_SETS && !targets.contains(&set) {
                    targets.push(set);
                }
            };
            if size == 1 || fits(items.len(), size) {
                search::subsets(&items, size, &mut add);
            } else {
                // For each node: the nearest nodes, and among equally near ones those that could have most of the
                // need.
                let weight = |at: usize| {
                    let could = |resource: usize| {
                        let leaves: u64 = movable.iter().map(|of| of.leaves[resource][at]).sum();
                        let most = group.need[resource].max(1);
                        u128::from(free_capacity.free[resource][at].saturating_add(leaves).min(most)) * 1024
                            / u128::from(most)
                    };
                    group.resources().map(could).sum::<u128>()
                };
                for &root in &items {
                    let mut near: Vec<usize> = items.iter().copied().filter(|&at| at != root).collect();
                    near.sort_by_key(|&at| (self.host.distance(root, at), std::cmp::Reverse(weight(at)), at));
                    near.truncate(size.saturating_sub(1));
                    near.push(root);
                    near.sort_unstable();
                    add(&near);
                }
            }
        }
        targets
    }

    /// Returns the combinations of movable groups that would free enough for a group, in ascending order of
    /// bytes.
    fn groups(
        &self,
        group: &PlacementGroup,
        free_capacity: &FreeCapacity,
        terms: &Terms,
        movable: &[MovableGroup],
        search: &PlanBudget<'_>,
    ) -> BTreeSet<(u64, Vec<usize>)> {
        let mut groups = BTreeSet::new();
        // The rest of the work is for trying the combinations.
        let share = search.work.search_share();
        for target in self.targets(group, free_capacity, terms, movable) {
            // Excluded nodes do not count.
            let sum = |resource: usize, column: &[u64]| {
                let allowed = target.iter().filter(|&&at| free_capacity.capacity[resource][at] > 0);
                allowed.fold(0u64, |sum, &at| sum.saturating_add(column[at]))
            };
            let missing = |(resource, need): (usize, &u64)| {
                need.saturating_sub(sum(resource, &free_capacity.free[resource]))
            };
            let missing: Vec<u64> = group.need.iter().enumerate().map(missing).collect();
            // On several nodes, sufficient sums do not imply that the group fits; then any group that frees something
            // may help.
            let any = missing.iter().all(|&missing| missing == 0);
            let mut there: Vec<(usize, Vec<u64>)> = Vec::new();
            for (index, of) in movable.iter().enumerate() {
                let leaves: Vec<u64> =
                    of.leaves.iter().enumerate().map(|(resource, column)| sum(resource, column)).collect();
                let helps =
                    leaves.iter().zip(&missing).any(|(leaves, missing)| *leaves > 0 && (any || *missing > 0));
                if helps && of.bytes <= search.bytes {
                    there.push((index, leaves));
                }
            }
            there.sort_by_key(|(index, _)| (movable[*index].bytes, *index));
            there.truncate(MAX_MOVABLE_GROUPS);
            let mut chosen = Vec::new();
            collect(&there, movable, &missing, search.moves, &mut chosen, &share, &mut groups);
        }
        groups
    }

    /// Releases the groups, places the request, and places the groups again. If allowed, a group that does not fit
    /// causes further moves.
    fn try_group(
        &self,
        ledger: &Ledger,
        task: &PlacementTask<'_>,
        group: &[&MovableGroup],
        search: &mut PlanBudget<'_>,
    ) -> Option<Ledger> {
        if search.work.is_spent() {
            return None;
        }
        search.work.charge(self.cost(ledger));
        let bytes = group.iter().fold(0u64, |sum, of| sum.saturating_add(of.bytes));
        if bytes > search.bytes || group.len() > search.moves {
            return None;
        }
        let mut next = ledger.clone();
        for of in group {
            for container in &of.containers {
                accounts::release(&self.host, &mut next, &of.owner, container);
            }
        }
        let mut next = self.try_place(&next, task, &search.work)?;
        let mut order: Vec<(u128, &&MovableGroup)> = group.iter().map(|of| (self.share(of), of)).collect();
        order.sort_by_key(|(share, of)| (std::cmp::Reverse(*share), &of.owner, &of.containers));
        let before = search.clone();
        search.moves -= group.len();
        search.bytes -= bytes;
        search.frozen.extend(
            group.iter().flat_map(|of| of.containers.iter().map(|name| (of.owner.clone(), name.clone()))),
        );
        for (_, of) in order {
            let Some(again) = self.task_for_group(ledger, of) else { return search.undo(before) };
            let placed = match self.try_place(&next, &again, &search.work) {
                None if search.chains => {
                    self.free_capacity_by_moves(&next, &again, search, &|after| Some(after))
                }
                placed => placed,
            };
            match placed {
                Some(placed) => next = placed,
                None => return search.undo(before),
            }
        }
        // Like an admission, a plan leaves a CPU in the shared pool.
        if self.check_shared_pool(&ledger.shared_pool, &next).is_err() {
            return search.undo(before);
        }
        Some(next)
    }

    /// Makes the placement task for a moved group.
    fn task_for_group<'a>(&self, ledger: &'a Ledger, of: &MovableGroup) -> Option<PlacementTask<'a>> {
        let account = ledger.owner(&of.owner)?;
        let need = |name: &ContainerName| {
            let held = account.containers.get(name)?;
            let mut columns = vec![vec![0u64; self.host.len()]; self.host.resources.len()];
            self.add_memory(held, &mut columns);
            let mut amounts: Vec<u64> = columns.iter().map(|column| column.iter().sum()).collect();
            // Hidden CPUs are added by the placement.
            amounts[CPU] = held.cpus.as_ref().map_or(0, |cpus| cpus.len() as u64);
            Some(ContainerNeeds { name: name.clone(), amounts, ends: false })
        };
        let needs = RequestNeeds { containers: of.containers.iter().map(need).collect::<Option<_>>()? };
        Some(PlacementTask { owner: of.owner.clone(), request: None, needs, terms: &account.terms })
    }

    /// Places a task if it fits without moves.
    fn try_place(&self, ledger: &Ledger, task: &PlacementTask<'_>, work: &WorkShare<'_>) -> Option<Ledger> {
        if let Some(request) = task.request {
            let decision = self.admit_watched(ledger, request, task.terms, &|_| {});
            work.charge(usize::try_from(decision.explanation.work).unwrap_or(usize::MAX));
            return decision.outcome.is_ok().then_some(decision.ledger);
        }
        let (placed, explanation) = self.place(ledger, &task.owner, &task.needs, task.terms, &|_| {});
        work.charge(usize::try_from(explanation.work).unwrap_or(usize::MAX));
        let mut next = ledger.clone();
        for (need, allocation) in task.needs.containers.iter().zip(placed.ok()?) {
            accounts::charge_allocation(&mut next, &task.owner, &need.name, allocation);
        }
        Some(next)
    }

    /// Returns the largest share of the machine that a group uses, in millionths.
    fn share(&self, of: &MovableGroup) -> u128 {
        let share = |(leaves, capacity): (&Vec<u64>, &Vec<u64>)| {
            let sum = |column: &[u64]| column.iter().map(|&of| u128::from(of)).sum::<u128>();
            sum(leaves) * 1_000_000 / sum(capacity).max(1)
        };
        of.leaves.iter().zip(&self.host.capacity).map(share).max().unwrap_or(0)
    }

    /// Searches moves after which the task has its place, and returns the first accepted result.
    fn free_capacity_by_moves<T>(
        &self,
        ledger: &Ledger,
        task: &PlacementTask<'_>,
        search: &mut PlanBudget<'_>,
        accept: &dyn Fn(Ledger) -> Option<T>,
    ) -> Option<T> {
        if search.moves == 0 {
            return None;
        }
        let (group, free_capacity) = self.find_group_without_capacity(ledger, task)?;
        // Moves do not increase the total capacity of the machine, only the capacity of the permitted nodes.
        let all = FreeCapacity::new(&self.host, ledger, &Terms::default()).free;
        let enough = |resource: usize| {
            let free = all[resource].iter().fold(0u64, |sum, &free| sum.saturating_add(free));
            free >= group.need[resource]
        };
        if !group.resources().all(enough) {
            return None;
        }
        let movable = self.movable(ledger, task, search);
        let groups = self.groups(&group, &free_capacity, task.terms, &movable, search);
        for (_, group) in groups {
            if search.work.is_spent() {
                return None;
            }
            let members: Vec<&MovableGroup> = group.iter().map(|&index| &movable[index]).collect();
            let before = search.clone();
            let Some(next) = self.try_group(ledger, task, &members, search) else { continue };
            match accept(next) {
                Some(accepted) => return Some(accepted),
                None => drop(search.undo::<()>(before)),
            }
        }
        None
    }
}

/// Returns whether the number of subsets of this size is at most [`search::MAX_SETS`].
fn fits(nodes: usize, size: usize) -> bool {
    let sets = (0..size.min(nodes - size.min(nodes))).try_fold(1usize, |sets, index| {
        Some(sets.checked_mul(nodes - index)? / (index + 1)).filter(|&sets| sets <= search::MAX_SETS)
    });
    sets.is_some()
}

/// Collects all combinations that start with `chosen` and free the missing amounts.
fn collect(
    there: &[(usize, Vec<u64>)],
    movable: &[MovableGroup],
    missing: &[u64],
    moves: usize,
    chosen: &mut Vec<usize>,
    share: &WorkShare<'_>,
    groups: &mut BTreeSet<(u64, Vec<usize>)>,
) {
    for (place, (index, leaves)) in there.iter().enumerate() {
        if moves == 0 || share.is_spent() {
            return;
        }
        share.charge(40);
        chosen.push(*index);
        let still: Vec<u64> =
            missing.iter().zip(leaves).map(|(missing, of)| missing.saturating_sub(*of)).collect();
        if still.iter().all(|&missing| missing == 0) {
            let bytes = chosen.iter().fold(0u64, |sum, &of| sum.saturating_add(movable[of].bytes));
            let mut group = chosen.clone();
            group.sort_unstable();
            groups.insert((bytes, group));
        } else {
            collect(&there[place + 1..], movable, &still, moves - 1, chosen, share, groups);
        }
        chosen.pop();
    }
}

/// Returns the moves between two ledgers, except for those of the owner that requested capacity.
fn moved(before: &Ledger, after: &Ledger, task: &OwnerId) -> Vec<ContainerMove> {
    let others = before.allocations().filter(|(owner, ..)| *owner != task);
    let moves = others.filter_map(|(owner, container, from)| {
        let to = after.allocation(owner, container)?;
        (from != to).then(|| ContainerMove {
            owner: owner.clone(),
            container: container.clone(),
            bytes: Bytes(moved_bytes(from, to)),
            from: from.clone(),
            to: to.clone(),
        })
    });
    moves.collect()
}

/// Returns the bytes that have to migrate to another node.
fn moved_bytes(from: &Allocation, to: &Allocation) -> u64 {
    let mut moved = 0u64;
    for (kind, nodes) in &to.placed {
        for (node, bytes) in nodes {
            let before = from.placed.get(kind).and_then(|nodes| nodes.get(node)).map_or(0, |bytes| bytes.0);
            moved = moved.saturating_add(bytes.0.saturating_sub(before));
        }
    }
    moved
}

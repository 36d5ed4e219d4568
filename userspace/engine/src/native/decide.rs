//! Admission: places everything that a request needs, or nothing.
//!
//! Placement groups (containers or, in pod scope, all running containers together) are placed depth first, largest
//! first. The best few placements of each are tried, and a placement is withdrawn if a later group or an init
//! container does not fit. The first compatible combination wins, so the largest groups get their best placements.
//! The request is refused when all combinations, or the work limit ([`WorkBudget`]), are exhausted. An init container
//! that does not fit by itself is detected before the search.

use std::sync::Arc;

use numaward_topology::{Bytes, CpuSet, NodeSet};

use super::{
    NativeStrategy, accounts,
    cpus::{AvailableCpus, offered},
    free_capacity::{AmountsByResource, FreeCapacity, PlacementGroup},
    host::{CPU, HostModel},
    init,
    placement_groups::{self, NodePreferences, RequestNeeds},
    rank::RankedPlacement,
    refusal::{ContainerKind, PlacementRefusal},
    search::{self, FewestNodes, NodeCountRule, SearchExtent, SearchResult},
    work_budget::WorkBudget,
};
use crate::{
    decision::{Cause, Decision, Grant, Rejection},
    explain::Explanation,
    hint::Resource,
    ledger::{Allocation, Ledger, MemoryBlock, OwnerAccount},
    placement_search::{PlacementCandidate, PlacementSearch},
    policy::{Tiers, TopologyManagerPolicy, TopologyManagerScope},
    request::{ContainerName, ContainerRequest, OwnerId, Request},
    strategy::DecisionStage,
    terms::Terms,
};

/// Policy for one request, with the machine and the remaining work.
#[derive(Clone, Copy)]
pub(super) struct ResolvedPolicy<'a> {
    pub(super) host: &'a HostModel,
    pub(super) policy: TopologyManagerPolicy,
    pub(super) scope: TopologyManagerScope,
    pub(super) tiers: Tiers,
    pub(super) work: &'a WorkBudget,
}

impl ResolvedPolicy<'_> {
    /// Returns the node counts that the policy permits for a group.
    pub(super) fn rule(&self, free_capacity: &FreeCapacity, group: &PlacementGroup) -> Option<NodeCountRule> {
        let resources = || group.need.iter().enumerate();
        let sizes = |fewest: &dyn Fn(usize, u64) -> Option<usize>| -> Option<Vec<usize>> {
            resources().map(|(of, &need)| if need == 0 { Some(0) } else { fewest(of, need) }).collect()
        };
        let attached = self.tiers == Tiers::Attached && self.host.has_attached();
        self.work.charge(free_capacity.free.len() * self.host.len());
        match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => Some(NodeCountRule::Anywhere),
            TopologyManagerPolicy::SingleNumaNode => {
                let sizes = sizes(&|_, _| Some(1))?;
                let with_attached = attached.then(|| sizes.clone());
                Some(NodeCountRule::Sized { sizes, with_attached, is_incomplete: false })
            }
            TopologyManagerPolicy::Restricted => {
                let capacity = &free_capacity.capacity;
                let least = sizes(&|of, need| search::fewest(capacity[of].iter().copied(), need))?;
                let mut is_incomplete = false;
                let with_attached = attached.then(|| {
                    resources()
                        .map(|(of, &need)| match least[of] {
                            fewest if of == CPU || need == 0 => Some(fewest),
                            _ => {
                                match search::fewest_with_attached(self.host, &capacity[of], need, self.work)
                                {
                                    FewestNodes::Known(fewest) => Some(fewest),
                                    FewestNodes::Impossible => None,
                                    FewestNodes::Unknown => {
                                        is_incomplete = true;
                                        None
                                    }
                                }
                            }
                        })
                        .collect()
                });
                Some(NodeCountRule::Sized {
                    sizes: least,
                    with_attached: with_attached.flatten(),
                    is_incomplete,
                })
            }
        }
    }

    /// Returns the best placements of a group.
    pub(super) fn candidates(&self, free_capacity: &FreeCapacity, group: &PlacementGroup) -> SearchResult {
        self.search(free_capacity, group, SearchExtent::Best)
    }

    /// Returns possible placements of a group.
    pub(super) fn search(
        &self,
        free_capacity: &FreeCapacity,
        group: &PlacementGroup,
        extent: SearchExtent,
    ) -> SearchResult {
        let found = self.rule(free_capacity, group).map_or_else(SearchResult::default, |rule| {
            search::search(self.host, free_capacity, group, &rule, extent, self.work)
        });
        let by_socket = self.policy == TopologyManagerPolicy::Restricted
            && self.host.cpus.as_ref().is_some_and(|cpus| cpus.options.align_by_socket);
        if by_socket && found.placements.is_empty() {
            self.within_sockets(free_capacity, group, extent)
        } else {
            found
        }
    }

    /// Returns placements on any nodes of one socket.
    fn within_sockets(
        &self,
        free_capacity: &FreeCapacity,
        group: &PlacementGroup,
        extent: SearchExtent,
    ) -> SearchResult {
        let mut found = SearchResult::default();
        for socket in &self.host.sockets {
            self.work.charge(free_capacity.free.len() * self.host.len());
            let mut within = free_capacity.clone();
            within.keep_only(socket);
            let on_this =
                search::search(self.host, &within, group, &NodeCountRule::Anywhere, extent, self.work);
            found.placements.extend(on_this.placements);
            found.considered += on_this.considered;
            found.is_incomplete |= on_this.is_incomplete;
        }
        found.placements.sort();
        found.placements.truncate(search::MAX_PLACEMENTS);
        found
    }

    /// Makes the refusal for a group that does not fit.
    pub(super) fn refusal_for(
        &self,
        free_capacity: &FreeCapacity,
        group: &PlacementGroup,
        kind: ContainerKind,
    ) -> PlacementRefusal {
        let mut short: Vec<usize> =
            group.resources().filter(|&of| !self.could_have_resource(free_capacity, group, of)).collect();
        if short.is_empty() {
            if !free_capacity.cores.is_empty() && group.container.is_some() {
                return PlacementRefusal::CoresDoNotAddUp;
            }
            short = group.resources().collect();
        }
        PlacementRefusal::InsufficientCapacity {
            container: group.container.clone(),
            policy: self.policy,
            fits_idle_machine: self.fits_idle_machine(free_capacity, group),
            kind,
            missing: free_capacity.shortfalls(self.host, group, &short),
        }
    }

    /// Returns whether a group would fit if it needed only this resource.
    fn could_have_resource(
        &self,
        free_capacity: &FreeCapacity,
        group: &PlacementGroup,
        resource: usize,
    ) -> bool {
        let Some(rule) = self.rule(free_capacity, group) else { return false };
        let fewest = search::fewest(free_capacity.free[resource].iter().copied(), group.need[resource]);
        match rule {
            NodeCountRule::Anywhere => fewest.is_some(),
            NodeCountRule::Sized { sizes, with_attached, is_incomplete } => {
                let attached = with_attached.is_some_and(|sizes| {
                    let (free, need) = (&free_capacity.free[resource], group.need[resource]);
                    resource != CPU
                        && match search::fewest_with_attached(self.host, free, need, self.work) {
                            FewestNodes::Known(fewest) => fewest <= sizes[resource],
                            FewestNodes::Impossible => false,
                            FewestNodes::Unknown => true,
                        }
                });
                let attached = attached || is_incomplete && resource != CPU;
                attached || fewest.is_some_and(|fewest| fewest <= sizes[resource])
            }
        }
    }

    /// Returns whether a group fits the idle machine.
    fn fits_idle_machine(&self, free_capacity: &FreeCapacity, group: &PlacementGroup) -> bool {
        match self.rule(free_capacity, group) {
            None => false,
            Some(NodeCountRule::Anywhere) => group.resources().all(|of| {
                search::fewest(free_capacity.capacity[of].iter().copied(), group.need[of]).is_some()
            }),
            Some(NodeCountRule::Sized { .. }) => {
                // A fresh work budget: the message must not depend on the work done before.
                let found = ResolvedPolicy { work: &WorkBudget::default(), ..*self }
                    .candidates(&free_capacity.empty(), group);
                found.is_incomplete || !found.placements.is_empty()
            }
        }
    }
}

/// Refusal, and the container that does not fit.
pub(super) type ContainerRefusal = (PlacementRefusal, Option<ContainerName>);

/// Group with its candidate placements and the chosen one.
struct PlacedGroup {
    found: SearchResult,
    chosen: usize,
}

/// Function that chooses CPUs and makes the allocations.
type ChooseCpus<'a> = dyn Fn(&[ContainerShares]) -> Result<Vec<Allocation>, PlacementRefusal> + 'a;

/// State of the depth-first search.
struct PlacementAttempt<'a> {
    policy: ResolvedPolicy<'a>,
    needs: &'a RequestNeeds,
    groups: &'a [(PlacementGroup, Vec<usize>)],
    free_capacity: FreeCapacity,
    placed: Vec<PlacedGroup>,
    /// Result by container.
    result: Vec<ContainerShares>,
    choose: &'a ChooseCpus<'a>,
    allocations: Vec<Allocation>,
    /// First failure, and the search result of the group that failed.
    failure: Option<ContainerRefusal>,
    failed: Option<(usize, SearchResult)>,
}

/// Share of one container, as numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct ContainerShares {
    /// Amount by resource and node.
    pub(super) shares: AmountsByResource,
    /// Permitted nodes by resource.
    pub(super) sets: Vec<Vec<usize>>,
    /// CPUs shared with containers that start after this one has ended, by node position.
    pub(super) borrowed_cpus: Vec<(usize, u64)>,
}

impl PlacementAttempt<'_> {
    /// Places everything, if each init container fits by itself.
    fn begin(&mut self) -> bool {
        match init::check(&self.policy, &self.free_capacity, self.needs) {
            Ok(()) => self.place(0),
            Err(short) => {
                self.failure = Some(short.refusal(&self.policy));
                false
            }
        }
    }

    fn place(&mut self, index: usize) -> bool {
        let Some((group, _)) = self.groups.get(index) else { return self.finish() };
        if self.failure.is_some() && (self.policy.work.is_spent() || !self.is_enough_from(index)) {
            return false;
        }
        let found = self.policy.candidates(&self.free_capacity, group);
        if found.placements.is_empty() {
            if self.failure.is_none() {
                let refusal = self.policy.refusal_for(&self.free_capacity, group, ContainerKind::Running);
                self.failure = Some((refusal, group.container.clone()));
                self.failed = Some((index, found));
            }
            return false;
        }
        self.placed.push(PlacedGroup { found, chosen: 0 });
        let count = self.placed[index].found.placements.len();
        for chosen in 0..count {
            if self.policy.work.is_spent() {
                break;
            }
            self.policy.work.charge(24 + group.need.len() * self.policy.host.len());
            self.placed[index].chosen = chosen;
            let placement = &self.placed[index].found.placements[chosen];
            if !self.free_capacity.cores.is_empty() {
                // The possible sums are computed again for each run of equal cores.
                let cpus = &placement.sets[CPU];
                let one = self.free_capacity.matching_work(cpus, group.need[CPU]);
                self.policy.work.charge(4 * self.policy.host.len() + cpus.len() * one);
            }
            let cores = self.free_capacity.cores.clone();
            let shares = self.free_capacity.take(self.policy.host, group, placement);
            for &container in &self.groups[index].1 {
                self.result[container].shares.clear();
            }
            if self.divide_among_containers(index, &shares) && self.place(index + 1) {
                return true;
            }
            self.free_capacity.restore(&shares);
            self.free_capacity.cores = cores;
        }
        if self.failure.is_none() {
            self.failure = Some((
                self.policy.refusal_for(&self.free_capacity, group, ContainerKind::Running),
                group.container.clone(),
            ));
        }
        let placed = self.placed.pop();
        self.failed = self.failed.take().or(placed.map(|placed| (index, placed.found)));
        false
    }

    /// Returns whether the totals suffice for this group and the later ones.
    fn is_enough_from(&self, index: usize) -> bool {
        let needed = |resource: usize| {
            let of = self.groups[index..].iter().map(|(group, _)| group.need[resource]);
            of.fold(0u64, u64::saturating_add)
        };
        let free = |column: &[u64]| column.iter().fold(0u64, |sum, &free| sum.saturating_add(free));
        self.free_capacity.free.iter().enumerate().all(|(resource, column)| needed(resource) <= free(column))
    }

    /// Divides the share of a group among its containers, largest first, each on as few nodes as possible.
    fn divide_among_containers(&mut self, index: usize, shares: &AmountsByResource) -> bool {
        let (group, containers) = &self.groups[index];
        let placement = &self.placed[index].found.placements[self.placed[index].chosen];
        if let [container] = containers.as_slice() {
            self.result[*container] = ContainerShares {
                shares: shares.clone(),
                sets: placement.sets.clone(),
                borrowed_cpus: Vec::new(),
            };
            return true;
        }
        let mut free_capacity = self.free_capacity.clone();
        free_capacity.withheld.clear();
        free_capacity.cores.clear();
        for (of, free) in free_capacity.free.iter_mut().enumerate() {
            free.fill(0);
            for &(at, share) in &shares[of] {
                free[at] = share;
            }
        }
        let part = |&container: &usize| PlacementGroup {
            container: Some(self.needs.containers[container].name.clone()),
            need: self.needs.containers[container].amounts.clone(),
            ..group.clone()
        };
        let mut parts: Vec<(PlacementGroup, usize)> = containers.iter().map(|of| (part(of), *of)).collect();
        parts.sort_by_key(|(part, of)| (std::cmp::Reverse(part.dominant_share(&free_capacity)), *of));
        for (part, container) in parts {
            let found = search::search(
                self.policy.host,
                &free_capacity,
                &part,
                &NodeCountRule::Anywhere,
                SearchExtent::Best,
                self.policy.work,
            );
            let Some(best) = found.placements.into_iter().next() else { return false };
            let shares = free_capacity.take(self.policy.host, &part, &best);
            self.result[container] = ContainerShares { shares, sets: best.sets, borrowed_cpus: Vec::new() };
        }
        true
    }

    /// Completes the search: places the init containers and chooses CPUs.
    fn finish(&mut self) -> bool {
        let groups: Vec<&RankedPlacement> =
            self.placed.iter().map(|placed| &placed.found.placements[placed.chosen]).collect();
        let placed = init::place(&self.policy, &self.free_capacity, self.needs, &groups, &mut self.result);
        self.policy.work.expect_searches(1);
        match placed {
            Ok(()) => {}
            Err(short) => {
                if self.failure.is_none() {
                    self.failure = Some(short.refusal(&self.policy));
                }
                return false;
            }
        }
        self.policy.work.charge(100 * self.result.len());
        match (self.choose)(&self.result) {
            Ok(allocations) => self.allocations = allocations,
            Err(refusal) => {
                self.failure.get_or_insert((refusal, None));
                return false;
            }
        }
        true
    }

    fn explanation(&self) -> Explanation {
        let search = |index: usize, found: &SearchResult, chosen: Option<usize>| PlacementSearch {
            container: self.groups[index].0.container.clone(),
            policy: self.policy.policy,
            considered: found.considered,
            is_incomplete: found.is_incomplete,
            candidates: found.placements.iter().map(|of| candidate(self.policy.host, of)).collect(),
            chosen,
        };
        let placed = self.placed.iter().enumerate();
        let mut searches: Vec<PlacementSearch> =
            placed.map(|(index, placed)| search(index, &placed.found, Some(placed.chosen))).collect();
        if let Some((index, found)) = &self.failed
            && searches.len() <= *index
        {
            searches.push(search(*index, found, None));
        }
        let work = self.policy.work;
        Explanation { searches, work: work.done(), ..Explanation::default() }
    }
}

/// Returns the existing allocations if the same request was admitted on the same terms before.
fn existing_decision(ledger: &Ledger, request: &Request, terms: &Terms) -> Option<Decision> {
    let account = ledger.owner(&request.owner)?;
    if account.request.as_deref() != Some(request) || account.terms != *terms {
        return None;
    }
    let grant = |container: &ContainerRequest| Grant {
        container: container.name.clone(),
        allocation: account.containers.get(&container.name).cloned().unwrap_or_default(),
    };
    let grants = request.all_containers().map(grant).collect();
    Some(Decision { outcome: Ok(grants), explanation: Explanation::default(), ledger: ledger.clone() })
}

fn candidate(host: &HostModel, placement: &RankedPlacement) -> PlacementCandidate {
    let sets = host.resources.iter().zip(&placement.sets).filter(|(_, set)| !set.is_empty());
    PlacementCandidate {
        nodes: host.set(&placement.nodes),
        by_resource: sets.map(|(&resource, set)| (resource, host.set(set))).collect(),
        rank: placement.key,
    }
}

impl NativeStrategy {
    /// Returns the nodes that the terms name and the machine does not have, unless it has none of those required.
    fn absent_nodes(&self, terms: &Terms) -> NodeSet {
        if !terms.nodes.is_empty() && !self.host.ids.iter().any(|&node| terms.nodes.contains(node)) {
            return NodeSet::default();
        }
        let preferred = terms.preferences.preferred.values();
        let named = preferred.fold(terms.nodes.clone(), |named, nodes| &named | nodes);
        &named - &self.host.ids.iter().copied().collect::<NodeSet>()
    }

    /// Returns the problem with a term that nothing on the machine meets, whatever is free.
    fn unmet_term(&self, Terms { nodes, memory_tiers, cpu_kinds, .. }: &Terms) -> Option<String> {
        let host = &self.host;
        if !nodes.is_empty() && !host.ids.iter().any(|&node| nodes.contains(node)) {
            return Some(format!("there is no node {nodes}"));
        }
        let tier = |at| placement_groups::memory_tier(host, &self.options.memory_tiers, at);
        if !memory_tiers.is_empty()
            && !(0..host.len()).filter_map(tier).any(|tier| memory_tiers.contains(&tier))
        {
            let tiers: Vec<_> = memory_tiers.iter().map(|tier| tier.as_str().to_uppercase()).collect();
            return Some(format!("no node has {} memory", tiers.join(" or ")));
        }
        let cpus = host.cpus.as_ref()?;
        let kind = cpu_kinds.iter().find(|kind| !cpus.has_kind(**kind))?;
        Some(format!("no CPU is of the kind {kind}"))
    }

    /// Decides a request that passed the checks.
    pub(super) fn decide(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision {
        watch(DecisionStage::Hints);
        if let Some(decision) = existing_decision(ledger, request, terms) {
            return decision;
        }
        // A changed request is decided as if the old one did not exist. If it is refused, the old allocation stays.
        let mut next = ledger.clone();
        accounts::remove(&self.host, &mut next, &request.owner);
        let refuse = |refusal: PlacementRefusal, container, explanation| {
            let is_only = request.all_containers().count() == 1;
            let refusal = if is_only { refusal.of_only_container() } else { refusal };
            let shortfalls = refusal.shortfalls().to_vec();
            let cause = Cause::from(refusal);
            let message = cause.to_string();
            let rejection = Rejection::new(&request.owner, container, cause, message, shortfalls);
            Decision { outcome: Err(Box::new(rejection)), explanation, ledger: ledger.clone() }
        };
        let needs = match RequestNeeds::new(&self.host, request, terms) {
            Ok(needs) => needs,
            Err(refusal) => return refuse(refusal, None, Explanation::default()),
        };
        let (placed, explanation) = self.place(&next, &request.owner, &needs, terms, watch);
        let allocations = match placed {
            Ok(allocations) => allocations,
            Err((refusal, container)) => {
                let refusal = self.unmet_term(terms).map_or(refusal, PlacementRefusal::UnmetTerm);
                return refuse(refusal, container, explanation);
            }
        };
        let account = next.owner_mut(&request.owner);
        account.request = Some(Arc::new(request.clone()));
        account.terms.clone_from(terms);
        let before = next.shared_pool.clone();
        for (need, allocation) in needs.containers.iter().zip(&allocations) {
            accounts::charge_allocation(&mut next, &request.owner, &need.name, allocation.clone());
        }
        if let Err((requested, free)) = self.check_shared_pool(&before, &next) {
            return refuse(PlacementRefusal::SharedPool { requested, free }, None, explanation);
        }
        let grants = needs.containers.into_iter().zip(allocations);
        let grants = grants.map(|(need, allocation)| Grant { container: need.name, allocation });
        Decision { outcome: Ok(grants.collect()), explanation, ledger: next }
    }

    /// Returns the policy for a request with these terms.
    pub(super) fn resolve_policy<'a>(&'a self, terms: &Terms, work: &'a WorkBudget) -> ResolvedPolicy<'a> {
        let (policy, scope) = self.policy_and_scope(terms);
        ResolvedPolicy {
            host: &self.host,
            policy,
            scope,
            tiers: terms.tiers.unwrap_or(self.options.tiers),
            work,
        }
    }

    /// Returns the capacity that a ledger leaves for requests with these terms.
    pub(super) fn free_capacity(&self, ledger: &Ledger, terms: &Terms) -> FreeCapacity {
        let mut free_capacity = FreeCapacity::new(&self.host, ledger, terms);
        placement_groups::close_unwanted_nodes(
            &self.host,
            &mut free_capacity,
            terms,
            &self.options.memory_tiers,
        );
        free_capacity
    }

    /// Places containers according to the terms. Returns their allocations in the same order.
    pub(super) fn place(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        needs: &RequestNeeds,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> (Result<Vec<Allocation>, ContainerRefusal>, Explanation) {
        let work = WorkBudget::default();
        let policy = self.resolve_policy(terms, &work);
        let free_capacity = self.free_capacity(ledger, terms);
        let wishes = NodePreferences::new(ledger, owner, terms, &self.host);
        let groups = match placement_groups::group_containers(
            &self.host,
            &free_capacity,
            needs,
            policy.policy,
            policy.scope,
            &wishes,
        ) {
            Ok(groups) => groups,
            Err(refusal) => return (Err((refusal, None)), Explanation::default()),
        };
        watch(DecisionStage::Merge);
        let choose = |result: &[ContainerShares]| {
            watch(DecisionStage::Allocate);
            self.allocations(ledger, result, terms)
        };
        let mut attempt = PlacementAttempt {
            policy,
            needs,
            groups: &groups,
            free_capacity,
            placed: Vec::new(),
            result: vec![ContainerShares::default(); needs.containers.len()],
            choose: &choose,
            allocations: Vec::new(),
            failure: None,
            failed: None,
        };
        let placed = attempt.begin();
        let is_needed = |&number: &usize| needs.containers.iter().any(|need| need.amounts[number] > 0);
        let needed = (0..self.host.resources.len()).filter(is_needed);
        let withheld =
            needed.flat_map(|number| attempt.free_capacity.withheld_by_node(&self.host, number)).collect();
        let conditions = is_needed(&CPU).then(|| ledger.conditions());
        let not_offered = conditions.map(|of| (of.offline_cpus.clone(), of.partition_cpus.clone()));
        let (offline_cpus, partition_cpus) = not_offered.unwrap_or_default();
        let work_limit_reached = !placed && work.is_spent();
        let explanation = Explanation {
            work_limit_reached,
            withheld,
            offline_cpus,
            partition_cpus,
            absent_nodes: self.absent_nodes(terms),
            ..attempt.explanation()
        };
        if !placed {
            let (refusal, container) = attempt.failure.unwrap_or((PlacementRefusal::SumTooLarge, None));
            let refusal =
                if work_limit_reached { PlacementRefusal::WorkLimitReached(refusal.into()) } else { refusal };
            return (Err((refusal, container)), explanation);
        }
        (Ok(attempt.allocations), explanation)
    }

    /// Chooses the CPUs and makes the allocations.
    pub(super) fn allocations(
        &self,
        ledger: &Ledger,
        result: &[ContainerShares],
        terms: &Terms,
    ) -> Result<Vec<Allocation>, PlacementRefusal> {
        let mut allocations = vec![Allocation::default(); result.len()];
        let mut available =
            self.host.cpus.as_ref().map(|cpus| cpus.available(ledger, terms)).unwrap_or_default();
        // In reverse order of start, because earlier containers borrow from later ones.
        let mut later = CpuSet::new();
        for index in (0..result.len()).rev() {
            let holding = &result[index];
            let mut chosen = CpuSet::new();
            if let (Some(cpus), Some(shares)) = (&self.host.cpus, holding.shares.first()) {
                for &(at, share) in shares {
                    let part = cpus.pick(at, &available, share).ok_or(PlacementRefusal::CoresDoNotAddUp)?;
                    available.cpus = &available.cpus - &part;
                    chosen = &chosen | &part;
                }
                let of_later = AvailableCpus { cpus: later.clone(), ..available };
                for &(at, share) in &holding.borrowed_cpus {
                    let part = cpus.pick(at, &of_later, share).ok_or(PlacementRefusal::CoresDoNotAddUp)?;
                    chosen = &chosen | &part;
                }
            }
            later = &later | &chosen;
            let hidden = self.host.cpus.as_ref().map(|cpus| cpus.hidden_beside(&chosen, terms));
            allocations[index] =
                Allocation { hidden_cpus: hidden.unwrap_or_default(), ..self.allocation(holding, chosen) };
        }
        Ok(allocations)
    }

    fn allocation(&self, holding: &ContainerShares, cpus: CpuSet) -> Allocation {
        let mut allocation = Allocation { cpus: (!cpus.is_empty()).then_some(cpus), ..Allocation::default() };
        for (number, resource) in self.host.resources.iter().enumerate() {
            let &Resource::Memory(kind) = resource else { continue };
            let Some(set) = holding.sets.get(number).filter(|set| !set.is_empty()) else { continue };
            let shares = holding.shares.get(number).map_or(&[][..], Vec::as_slice);
            let bytes = shares.iter().map(|(_, share)| share).sum();
            allocation.blocks.push(MemoryBlock { kind, affinity: self.host.set(set), bytes: Bytes(bytes) });
            for &(at, share) in shares {
                allocation.place(kind, self.host.id(at), share);
            }
        }
        allocation.blocks.sort();
        allocation
    }

    /// With `strict-cpu-reservation` all CPUs can become exclusive. If a container without exclusive CPUs runs, the
    /// shared pool needs a CPU that is online and in no partition of another program. On failure returns the number
    /// of CPUs taken from the pool, and the number that was free.
    pub(super) fn check_shared_pool(&self, before: &CpuSet, next: &Ledger) -> Result<(), (u64, u64)> {
        let Some(cpus) = self.host.cpus.as_ref().filter(|cpus| cpus.options.strict_reservation) else {
            return Ok(());
        };
        let shares = |account: &OwnerAccount| {
            let holds =
                |name: &ContainerName| account.containers.get(name).is_some_and(|of| of.cpus.is_some());
            account.request.as_ref().is_some_and(|request| {
                request.all_containers().any(|of| !request.is_regular_init(&of.name) && !holds(&of.name))
            })
        };
        if !offered(&next.shared_pool, next).is_empty() || !next.owners().any(|(_, account)| shares(account))
        {
            return Ok(());
        }
        let before = &offered(before, next);
        Err((before.len() as u64, cpus.allocatable_of(before).len() as u64))
    }
}

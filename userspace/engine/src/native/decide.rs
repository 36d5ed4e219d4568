//! An admission: everything a request asks for is placed, or nothing.
//!
//! Units (containers; in pod scope all that run together) are placed depth first, the largest first. Of each the best
//! few placements are tried; a placement that leaves no room for a later unit or an init container is taken back. The
//! first placements that go together are taken, so the best ones of the largest units. It is refused when nothing is left
//! to try, or nothing of what a decision may look at ([`Work`]). An init container that has no room even beside nothing of
//! its own request is found before anything is tried.

use std::sync::Arc;

use numaward_topology::{Bytes, CpuSet};

use super::{
    NativeStrategy, accounts,
    cpus::{Available, offered},
    free_capacity::{Room, Shares, Unit},
    host::{CPU, Host},
    init,
    placement_groups::{self, Needs, Wishes},
    rank::Placement,
    refusal::{ContainerKind, PlacementRefusal},
    search::{self, Found, Rule},
    work_budget::Work,
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

/// What a request is decided on.
#[derive(Clone, Copy)]
pub(super) struct Agreed<'a> {
    pub(super) host: &'a Host,
    pub(super) policy: TopologyManagerPolicy,
    pub(super) scope: TopologyManagerScope,
    pub(super) tiers: Tiers,
    pub(super) work: &'a Work,
}

impl Agreed<'_> {
    /// What the policy allows a unit.
    pub(super) fn rule(&self, room: &Room, unit: &Unit) -> Option<Rule> {
        let resources = || unit.need.iter().enumerate();
        let sizes = |fewest: &dyn Fn(usize, u64) -> Option<usize>| -> Option<Vec<usize>> {
            resources().map(|(of, &need)| if need == 0 { Some(0) } else { fewest(of, need) }).collect()
        };
        let attached = self.tiers == Tiers::Attached && self.host.has_attached();
        self.work.charge(room.free.len() * self.host.len());
        match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => Some(Rule::Anywhere),
            TopologyManagerPolicy::SingleNumaNode => {
                let sizes = sizes(&|_, _| Some(1))?;
                Some(Rule::Sized { with_attached: attached.then(|| sizes.clone()), sizes })
            }
            TopologyManagerPolicy::Restricted => {
                let capacity = &room.capacity;
                let least = sizes(&|of, need| search::fewest(capacity[of].iter().copied(), need))?;
                let with_attached = attached.then(|| {
                    sizes(&|of, need| {
                        if of == CPU {
                            return search::fewest(capacity[of].iter().copied(), need);
                        }
                        search::fewest_with_attached(self.host, &capacity[of], need, self.work)
                    })
                });
                Some(Rule::Sized { sizes: least, with_attached: with_attached.flatten() })
            }
        }
    }

    /// Where a unit can go.
    pub(super) fn candidates(&self, room: &Room, unit: &Unit) -> Found {
        let found = self
            .rule(room, unit)
            .map_or_else(Found::default, |rule| search::search(self.host, room, unit, &rule, self.work));
        let by_socket = self.policy == TopologyManagerPolicy::Restricted
            && self.host.cpus.as_ref().is_some_and(|cpus| cpus.options.align_by_socket);
        if by_socket && found.placements.is_empty() { self.within_sockets(room, unit) } else { found }
    }

    /// On any nodes of one socket.
    fn within_sockets(&self, room: &Room, unit: &Unit) -> Found {
        let mut found = Found::default();
        for socket in &self.host.sockets {
            self.work.charge(room.free.len() * self.host.len());
            let mut within = room.clone();
            within.keep_only(socket);
            let on_this = search::search(self.host, &within, unit, &Rule::Anywhere, self.work);
            found.placements.extend(on_this.placements);
            found.considered += on_this.considered;
            found.cut_off |= on_this.cut_off;
        }
        found.placements.sort();
        found.placements.truncate(search::KEPT);
        found
    }

    /// Why there is no room for a unit.
    pub(super) fn no_room(&self, room: &Room, unit: &Unit, what: ContainerKind) -> PlacementRefusal {
        let mut short: Vec<usize> = unit.resources().filter(|&of| !self.could(room, unit, of)).collect();
        if short.is_empty() {
            if let (false, Some(container)) = (room.cores.is_empty(), &unit.container) {
                return PlacementRefusal::Uncollected { container: container.clone() };
            }
            short = unit.resources().collect();
        }
        PlacementRefusal::NoRoom {
            container: unit.container.clone(),
            policy: self.policy,
            ever: self.ever(room, unit),
            what,
            missing: room.shortfalls(self.host, unit, &short),
        }
    }

    /// Whether a unit could have a resource if it needed nothing else.
    fn could(&self, room: &Room, unit: &Unit, resource: usize) -> bool {
        let Some(rule) = self.rule(room, unit) else { return false };
        let fewest = search::fewest(room.free[resource].iter().copied(), unit.need[resource]);
        match rule {
            Rule::Anywhere => fewest.is_some(),
            Rule::Sized { sizes, with_attached } => {
                let attached = with_attached.is_some_and(|sizes| {
                    let (free, need) = (&room.free[resource], unit.need[resource]);
                    let fewest = search::fewest_with_attached(self.host, free, need, self.work);
                    resource != CPU && fewest.is_some_and(|fewest| fewest <= sizes[resource])
                });
                attached || fewest.is_some_and(|fewest| fewest <= sizes[resource])
            }
        }
    }

    /// Whether the empty machine could hold a unit.
    fn ever(&self, room: &Room, unit: &Unit) -> bool {
        match self.rule(room, unit) {
            None => false,
            Some(Rule::Anywhere) => unit
                .resources()
                .all(|of| search::fewest(room.capacity[of].iter().copied(), unit.need[of]).is_some()),
            Some(Rule::Sized { .. }) => {
                // For the message alone: it does not depend on how much was looked at before.
                let found = Agreed { work: &Work::default(), ..*self }.candidates(&room.empty(), unit);
                found.cut_off || !found.placements.is_empty()
            }
        }
    }
}

/// Why a request is refused, and at which container.
pub(super) type Refused = (PlacementRefusal, Option<ContainerName>);

/// A unit that was placed.
struct Placed {
    found: Found,
    chosen: usize,
}

/// Makes allocations of what containers are to hold.
type Choose<'a> = dyn Fn(&[Holding]) -> Result<Vec<Allocation>, PlacementRefusal> + 'a;

/// What an attempt goes through.
struct Attempt<'a> {
    agreed: Agreed<'a>,
    needs: &'a Needs,
    units: &'a [(Unit, Vec<usize>)],
    room: Room,
    placed: Vec<Placed>,
    /// By container: what it holds in the end, and the sets of nodes of each resource.
    result: Vec<Holding>,
    /// Makes allocations of that.
    choose: &'a Choose<'a>,
    allocations: Vec<Allocation>,
    /// Why it failed at first, and what had been found for the unit at which it did.
    failure: Option<Refused>,
    failed: Option<(usize, Found)>,
}

/// What a container holds, as numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Holding {
    /// By resource: how much from which node.
    pub(super) shares: Shares,
    /// By resource: the nodes on which it may use it.
    pub(super) sets: Vec<Vec<usize>>,
    /// CPUs that it shares with containers that start after it has ended, by position.
    pub(super) borrowed_cpus: Vec<(usize, u64)>,
}

impl Attempt<'_> {
    /// Places everything, if each init container has room for itself.
    fn begin(&mut self) -> bool {
        match init::check(&self.agreed, &self.room, self.needs) {
            Ok(()) => self.place(0),
            Err(short) => {
                self.failure = Some(short.refusal(&self.agreed));
                false
            }
        }
    }

    fn place(&mut self, index: usize) -> bool {
        let Some((unit, _)) = self.units.get(index) else { return self.finish() };
        if self.failure.is_some() && (self.agreed.work.is_spent() || !self.is_enough_from(index)) {
            return false;
        }
        let found = self.agreed.candidates(&self.room, unit);
        if found.placements.is_empty() {
            if self.failure.is_none() {
                let refusal = self.agreed.no_room(&self.room, unit, ContainerKind::Running);
                self.failure = Some((refusal, unit.container.clone()));
                self.failed = Some((index, found));
            }
            return false;
        }
        self.placed.push(Placed { found, chosen: 0 });
        let count = self.placed[index].found.placements.len();
        for chosen in 0..count {
            if self.agreed.work.is_spent() {
                break;
            }
            self.agreed.work.charge(24 + unit.need.len() * self.agreed.host.len());
            self.placed[index].chosen = chosen;
            let placement = &self.placed[index].found.placements[chosen];
            let cores = self.room.cores.clone();
            let shares = self.room.take(self.agreed.host, unit, placement);
            for &container in &self.units[index].1 {
                self.result[container].shares.clear();
            }
            if self.hand_out(index, &shares) && self.place(index + 1) {
                return true;
            }
            self.room.give_back(&shares);
            self.room.cores = cores;
        }
        if self.failure.is_none() {
            self.failure =
                Some((self.agreed.no_room(&self.room, unit, ContainerKind::Running), unit.container.clone()));
        }
        let placed = self.placed.pop();
        self.failed = self.failed.take().or(placed.map(|placed| (index, placed.found)));
        false
    }

    /// Whether there is enough in all for this unit and those after it.
    fn is_enough_from(&self, index: usize) -> bool {
        let needed = |resource: usize| {
            let of = self.units[index..].iter().map(|(unit, _)| unit.need[resource]);
            of.fold(0u64, u64::saturating_add)
        };
        let free = |column: &[u64]| column.iter().fold(0u64, |sum, &free| sum.saturating_add(free));
        self.room.free.iter().enumerate().all(|(resource, column)| needed(resource) <= free(column))
    }

    /// Divides what a unit was given among its containers, the largest first, each on as few nodes as possible.
    fn hand_out(&mut self, index: usize, shares: &Shares) -> bool {
        let (unit, containers) = &self.units[index];
        let placement = &self.placed[index].found.placements[self.placed[index].chosen];
        if let [container] = containers.as_slice() {
            self.result[*container] =
                Holding { shares: shares.clone(), sets: placement.sets.clone(), borrowed_cpus: Vec::new() };
            return true;
        }
        let mut room = self.room.clone();
        room.withheld.clear();
        room.cores.clear();
        for (of, free) in room.free.iter_mut().enumerate() {
            free.fill(0);
            for &(at, share) in &shares[of] {
                free[at] = share;
            }
        }
        let part = |&container: &usize| Unit {
            container: Some(self.needs.containers[container].name.clone()),
            need: self.needs.containers[container].amounts.clone(),
            ..unit.clone()
        };
        let mut parts: Vec<(Unit, usize)> = containers.iter().map(|of| (part(of), *of)).collect();
        parts.sort_by_key(|(part, of)| (std::cmp::Reverse(part.dominant_share(&room)), *of));
        for (part, container) in parts {
            let found = search::search(self.agreed.host, &room, &part, &Rule::Anywhere, self.agreed.work);
            let Some(best) = found.placements.into_iter().next() else { return false };
            let shares = room.take(self.agreed.host, &part, &best);
            self.result[container] = Holding { shares, sets: best.sets, borrowed_cpus: Vec::new() };
        }
        true
    }

    /// All that runs is placed: now the init containers, and which CPUs these are.
    fn finish(&mut self) -> bool {
        let units: Vec<&Placement> =
            self.placed.iter().map(|placed| &placed.found.placements[placed.chosen]).collect();
        match init::place(&self.agreed, &self.room, self.needs, &units, &mut self.result) {
            Ok(()) => {}
            Err(short) => {
                if self.failure.is_none() {
                    self.failure = Some(short.refusal(&self.agreed));
                }
                return false;
            }
        }
        self.agreed.work.charge(100 * self.result.len());
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
        let search = |index: usize, found: &Found, chosen: Option<usize>| PlacementSearch {
            container: self.units[index].0.container.clone(),
            policy: self.agreed.policy,
            considered: found.considered,
            is_incomplete: found.cut_off,
            candidates: found.placements.iter().map(|of| candidate(self.agreed.host, of)).collect(),
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
        let work = self.agreed.work;
        Explanation { searches, work: work.done(), ..Explanation::default() }
    }
}

/// A request that is admitted already on the same terms keeps what it has.
fn kept(ledger: &Ledger, request: &Request, terms: &Terms) -> Option<Decision> {
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

fn candidate(host: &Host, placement: &Placement) -> PlacementCandidate {
    let sets = host.resources.iter().zip(&placement.sets).filter(|(_, set)| !set.is_empty());
    PlacementCandidate {
        nodes: host.set(&placement.nodes),
        by_resource: sets.map(|(&resource, set)| (resource, host.set(set))).collect(),
        rank: placement.key,
    }
}

impl NativeStrategy {
    /// Decides on a request that is not contradictory.
    pub(super) fn decide(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision {
        watch(DecisionStage::Hints);
        if let Some(decision) = kept(ledger, request, terms) {
            return decision;
        }
        // A request for something else than before is decided on as if it were not there, and keeps what it has if
        // it is refused.
        let mut next = ledger.clone();
        accounts::remove(&self.host, &mut next, &request.owner);
        let refuse = |refusal: PlacementRefusal, container, explanation| {
            let shortfalls = refusal.shortfalls().to_vec();
            let cause = Cause::from(refusal);
            let message = cause.to_string();
            let rejection = Rejection::new(&request.owner, container, cause, message, shortfalls);
            Decision { outcome: Err(Box::new(rejection)), explanation, ledger: ledger.clone() }
        };
        let needs = match Needs::new(&self.host, request, terms) {
            Ok(needs) => needs,
            Err(refusal) => return refuse(refusal, None, Explanation::default()),
        };
        let (placed, explanation) = self.place(&next, &request.owner, &needs, terms, watch);
        let allocations = match placed {
            Ok(allocations) => allocations,
            Err((refusal, container)) => return refuse(refusal, container, explanation),
        };
        let account = next.owner_mut(&request.owner);
        account.request = Some(Arc::new(request.clone()));
        account.terms.clone_from(terms);
        let before = next.shared_pool.clone();
        for (need, allocation) in needs.containers.iter().zip(&allocations) {
            accounts::hold(&mut next, &request.owner, &need.name, allocation.clone());
        }
        if let Err((requested, free)) = self.check_shared_pool(&before, &next) {
            return refuse(PlacementRefusal::SharedPool { requested, free }, None, explanation);
        }
        let grants = needs.containers.into_iter().zip(allocations);
        let grants = grants.map(|(need, allocation)| Grant { container: need.name, allocation });
        Decision { outcome: Ok(grants.collect()), explanation, ledger: next }
    }

    /// What a request is decided on.
    pub(super) fn agreed<'a>(&'a self, terms: &Terms, work: &'a Work) -> Agreed<'a> {
        let (policy, scope) = self.agreement(terms);
        Agreed { host: &self.host, policy, scope, tiers: terms.tiers.unwrap_or(self.options.tiers), work }
    }

    /// What a ledger leaves for those with these terms.
    pub(super) fn room(&self, ledger: &Ledger, terms: &Terms) -> Room {
        let mut room = Room::new(&self.host, ledger, terms);
        placement_groups::only_wanted(&self.host, &mut room, terms, &self.options.memory_tiers);
        room
    }

    /// Places what containers need, as their terms say: what each is to hold, in their order.
    pub(super) fn place(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        needs: &Needs,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> (Result<Vec<Allocation>, Refused>, Explanation) {
        let work = Work::default();
        let agreed = self.agreed(terms, &work);
        let room = self.room(ledger, terms);
        let wishes = Wishes::new(ledger, owner, terms, &self.host);
        let units =
            match placement_groups::units(&self.host, &room, needs, agreed.policy, agreed.scope, &wishes) {
                Ok(units) => units,
                Err(refusal) => return (Err((refusal, None)), Explanation::default()),
            };
        watch(DecisionStage::Merge);
        let choose = |result: &[Holding]| {
            watch(DecisionStage::Allocate);
            self.allocations(ledger, needs, result, terms)
        };
        let mut attempt = Attempt {
            agreed,
            needs,
            units: &units,
            room,
            placed: Vec::new(),
            result: vec![Holding::default(); needs.containers.len()],
            choose: &choose,
            allocations: Vec::new(),
            failure: None,
            failed: None,
        };
        let placed = attempt.begin();
        let is_needed = |&number: &usize| needs.containers.iter().any(|need| need.amounts[number] > 0);
        let needed = (0..self.host.resources.len()).filter(is_needed);
        let withheld = needed.flat_map(|number| attempt.room.not_offered(&self.host, number)).collect();
        let conditions = is_needed(&CPU).then(|| ledger.conditions());
        let not_offered = conditions.map(|of| (of.offline_cpus.clone(), of.partition_cpus.clone()));
        let (offline_cpus, partition_cpus) = not_offered.unwrap_or_default();
        let gave_up = !placed && work.is_spent();
        let explanation = Explanation {
            work_limit_reached: gave_up,
            withheld,
            offline_cpus,
            partition_cpus,
            ..attempt.explanation()
        };
        if !placed {
            let (refusal, container) = attempt.failure.unwrap_or((PlacementRefusal::SumTooLarge, None));
            let refusal = if gave_up { PlacementRefusal::GaveUp(refusal.into()) } else { refusal };
            return (Err((refusal, container)), explanation);
        }
        (Ok(attempt.allocations), explanation)
    }

    /// Makes allocations of numbers: chooses the CPUs.
    pub(super) fn allocations(
        &self,
        ledger: &Ledger,
        needs: &Needs,
        result: &[Holding],
        terms: &Terms,
    ) -> Result<Vec<Allocation>, PlacementRefusal> {
        let mut allocations = vec![Allocation::default(); result.len()];
        let mut available =
            self.host.cpus.as_ref().map(|cpus| cpus.available(ledger, terms)).unwrap_or_default();
        let uncollected =
            |index: usize| PlacementRefusal::Uncollected { container: needs.containers[index].name.clone() };
        // Those that start last first: those before borrow from them.
        let mut later = CpuSet::new();
        for index in (0..result.len()).rev() {
            let holding = &result[index];
            let mut chosen = CpuSet::new();
            if let (Some(cpus), Some(shares)) = (&self.host.cpus, holding.shares.first()) {
                for &(at, share) in shares {
                    let part = cpus.pick(at, &available, share).ok_or_else(|| uncollected(index))?;
                    available.cpus = &available.cpus - &part;
                    chosen = &chosen | &part;
                }
                let of_later = Available { cpus: later.clone(), ..available };
                for &(at, share) in &holding.borrowed_cpus {
                    let part = cpus.pick(at, &of_later, share).ok_or_else(|| uncollected(index))?;
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

    fn allocation(&self, holding: &Holding, cpus: CpuSet) -> Allocation {
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

    /// With `strict-cpu-reservation` all CPUs can become exclusive. Those that have none need one to run on, which is online
    /// and in no partition of another program: a ledger that leaves them none is refused, with the CPUs that were taken from the shared pool and those that were free.
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

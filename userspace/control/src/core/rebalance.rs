//! Moves of running workloads to other nodes, so that a request fits.
//!
//! # Problem
//! A move takes as long as the migration of its pages. Meanwhile, other workloads start, end and change. No CPU and no byte may be
//! guaranteed twice, even if the daemon dies in between, and a failure must leave every workload at its original place.
//!
//! # Terms
//! A move is *begun* when the ledger has the container at its new place. Its pages follow once its knobs are written.
//!
//! # Algorithm
//! To begin a move, the plan is checked against the current ledger, the new place is taken, the old place stays [set
//! aside](numaward_engine::in_flight), and this state is stored. Then the knobs are written, as for any other guarantee. When the pages
//! have arrived, the next move is begun. The old places stay set aside until the last move has ended; the request is admitted in the
//! transaction that frees them. Begun moves are taken back in reverse order.
//!
//! `reconciler::rebalancing` decides when the next step follows.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use numaward_api as api;
use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, read};
use numaward_config::{kubernetes::RefusedPolicy, rebalance::RebalanceMode};
use numaward_enforce::SettingsChange;
use numaward_engine::{
    self as engine, Allocation, ContainerMove, ContainerName, Ledger, OwnerId, RebalanceLimits,
    RebalancePlan, Terms, claims::allocator::Amounts, in_flight,
};
use numaward_guarantee::{
    claim::ReservedClaim,
    error::AdmissionError,
    explain,
    moving::{MigratingContainer, RecentMove, RunningMoves},
    pod::Update,
    request::{Request, Target},
};
use numaward_model::Settings;
use numaward_store::fault;
use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::{
    Attempt, Core, admission, burstable_home, claims, conditions, cpu_isolation, huge_pages,
    pods::{
        placement,
        room::{self, RefusedPod},
    },
    settings, shared_pool,
};

/// Window of the limit on moved bytes.
const RATE_WINDOW: Duration = Duration::from_hours(1);
/// Size of the batches, in pages per CPU, in which the kernel counts the memory of a cgroup (`MEMCG_CHARGE_BATCH`).
const MEMCG_CHARGE_BATCH: u64 = 64;

/// Outcome of beginning a move.
#[derive(Debug)]
pub(crate) enum MoveStart {
    /// The knobs of these guarantees must be written.
    Moves(Vec<String>),
    /// The workload has ended.
    Gone,
}

/// A request for which room is made.
#[derive(Clone, Debug)]
pub(crate) enum RoomRequest {
    /// The request of a client or a declared guarantee, and true if it is admitted after the moves.
    Workload(Box<Request>, bool),
    /// The request of a refused pod, which is admitted after the moves.
    Pod(Box<RefusedPod>),
    /// A resource claim of the whole host, which is reserved after the moves.
    Claim(Box<WaitingClaim>),
}

/// A resource claim for which room is made.
#[derive(Clone, Debug)]
pub(crate) struct WaitingClaim {
    pub(crate) uid: String,
    pub(crate) claim: ReservedClaim,
    /// Requests of the pod, if its claims may not have more.
    pub(crate) limit: Option<Amounts>,
    pub(crate) request: engine::Request,
    pub(crate) terms: Terms,
}

impl RoomRequest {
    /// Returns the name of the request for people.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Workload(request, _) => request.name.clone(),
            Self::Pod(pod) => format!("{}/{}", pod.ask.pod.namespace, pod.ask.pod.name),
            Self::Claim(of) => format!("resource claim {}/{}", of.claim.namespace, of.claim.name),
        }
    }

    /// Returns the owner of the allocation, which is unique on this host.
    pub(crate) fn owner(&self) -> &OwnerId {
        &self.engine().owner
    }

    fn engine(&self) -> &engine::Request {
        match self {
            Self::Workload(request, _) => &request.engine,
            Self::Pod(pod) => &pod.asked.request,
            Self::Claim(of) => &of.request,
        }
    }

    /// Returns true if a refused pod was admitted meanwhile, possibly as a whole instead of by container, or the reverse. The same for a
    /// claim that was reserved.
    pub(crate) fn is_admitted_already(&self, core: &Core) -> bool {
        let pod = match self {
            Self::Workload(..) => return false,
            Self::Claim(of) => {
                return core.store.state.claims.get(&of.uid).is_some_and(|known| known.is_same(&of.claim));
            }
            Self::Pod(pod) => pod,
        };
        let RefusedPod { asked, ask } = &**pod;
        let (owner, uid) = (asked.request.owner.as_str(), ask.pod.uid.as_str());
        let mut of_pod = core.store.state.pods.iter().filter(|(_, admitted)| admitted.pod.uid == uid);
        of_pod.any(|(admitted, _)| admitted == owner || admitted == uid || owner == uid)
    }

    /// Returns true if the sandbox of a refused pod has stopped, or if a claim was released.
    pub(crate) fn is_gone(&self, core: &Core) -> bool {
        match self {
            Self::Workload(..) => false,
            Self::Pod(_) => room::latest(core, self.owner()).is_none(),
            Self::Claim(of) => !claims::is_waiting(core, &of.uid),
        }
    }

    /// Returns the ledger and the terms for a decision.
    fn ledger_and_terms(&self, core: &Core) -> Result<(Ledger, Terms), AdmissionError> {
        match self {
            Self::Workload(request, _) => {
                let path = admission::cgroup(core, request)?;
                let terms = burstable_home::with_preferred_node(core, &request.terms, &request.name, &path);
                Ok((conditions::ledger_for(core, Some(&path), None), terms))
            }
            Self::Pod(pod) => Ok((
                conditions::ledger_for(core, pod.asked.cgroup.as_ref(), None),
                placement::applicable_terms(core, &pod.ask.terms, &mut Vec::new()),
            )),
            Self::Claim(of) => Ok((conditions::ledger_for(core, None, None), of.terms.clone())),
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Plans moves after which a request fits.
pub(crate) fn plan_moves(
    core: &mut Core,
    request: &RoomRequest,
    limits: &RebalanceLimits,
) -> Result<RebalancePlan, AdmissionError> {
    core.policy.check_fit()?;
    let unguaranteed = huge_pages::cgroups_with_unguaranteed_huge_pages(core);
    let (ledger, terms) = request.ledger_and_terms(core)?;
    admission::check_terms(core, &terms)?;
    let mut limits = limits.clone();
    limits.kept.extend(immovable(core, &unguaranteed));
    let plan = core.policy.strategy.plan(&ledger, request.engine(), &terms, &limits);
    plan.map_err(|none| AdmissionError::NoPlan {
        reason: none.reason,
        rejection: explain::rejection(&none.rejection),
    })
}

/// Returns the owners that cannot be moved: those without an enforced guarantee or a bound set of nodes, those with an admission or
/// release in progress, and those of `unguaranteed`, which have reserved huge pages without a guarantee for them.
fn immovable(core: &Core, unguaranteed: &BTreeSet<CgroupPath>) -> BTreeSet<OwnerId> {
    let state = &core.store.state;
    let is_held = |name: &str| !state.releasing.contains(name) && !state.admitting.contains(name);
    let held: BTreeSet<&str> = state
        .guarantees
        .iter()
        .filter(|(name, held)| is_held(name) && matches!(core.hierarchy.id_of(&held.cgroup), Ok(Some(_))))
        .filter(|(_, held)| !unguaranteed.contains(&held.cgroup))
        .map(|(name, held)| held.owner(name))
        .collect();
    let owners = state.ledger.owners().filter(|(owner, account)| {
        // A Burstable workload is not bound to its preferred node, so that its pages would stay.
        account.terms.burstable || !held.contains(owner.as_str())
    });
    owners.map(|(owner, _)| owner.clone()).collect()
}

/// Returns the limits of automatic moves for a request; `None` if they are off.
pub(crate) fn automatic_limits(core: &Core, request: &RoomRequest) -> Option<RebalanceLimits> {
    let config = &core.config.rebalance;
    let is_on = match request {
        RoomRequest::Workload(..) => config.mode == RebalanceMode::Auto,
        RoomRequest::Pod(_) | RoomRequest::Claim(_) => {
            core.config.kubernetes.refused == RefusedPolicy::MakeRoom
        }
    };
    if !is_on || core.mode() != EnforcementMode::On {
        return None;
    }
    let ago = |span: Duration| now().saturating_sub(span.as_secs());
    let moved =
        core.store.state.moving.since(ago(RATE_WINDOW)).fold(0u64, |sum, of| sum.saturating_add(of.bytes.0));
    Some(RebalanceLimits {
        moves: config.max_moves as usize,
        bytes: Bytes(config.max_bytes_per_hour.0.0.saturating_sub(moved)),
        kept: core.store.state.moving.since(ago(config.dwell_time.0)).map(|of| of.owner.clone()).collect(),
        ..RebalanceLimits::default()
    })
}

/// Returns the guarantees that hold the allocation of a container: several if containers share the allocation of their pod.
fn holders(core: &Core, owner: &OwnerId, container: &ContainerName) -> Vec<String> {
    let holds = |name: &str, target: &Target| match target {
        Target::Container(of) => of.owner == owner.as_str() && of.ledger_name() == *container,
        _ => name == owner.as_str(),
    };
    let holders = core.store.state.guarantees.iter().filter(|(name, held)| holds(name, &held.target));
    holders.map(|(name, _)| name.clone()).collect()
}

/// Stores the moves of a plan, before the first of them.
pub(crate) fn start_moves(core: &mut Core, moves: Vec<ContainerMove>) -> Result<(), AdmissionError> {
    let mut change = core.begin();
    change.state().moving.running = Some(RunningMoves { moves, ..RunningMoves::default() });
    change.store()
}

/// Checks that the remaining moves are still possible, and that the request fits after them.
pub(crate) fn check_moves(core: &Core, request: &RoomRequest) -> Result<(), AdmissionError> {
    let Some(RunningMoves { moves, begun, .. }) = &core.store.state.moving.running else { return Ok(()) };
    check_remaining_moves(core, request, moves, *begun)
}

/// Begins the next move in the ledger, which charges both places. No knob is written yet.
pub(crate) fn begin_move(core: &mut Core) -> Result<MoveStart, AdmissionError> {
    let Some(running) = core.store.state.moving.running.clone() else { return Ok(MoveStart::Gone) };
    let Some(next) = running.moves.get(running.begun) else { return Ok(MoveStart::Gone) };
    let begun = &running.moves[..running.begun];
    let is_gone = core.store.state.ledger.allocation(&next.owner, &next.container).is_none();
    let ledger = (!is_gone)
        .then(|| in_flight::begin_move(&*core.policy.strategy, &core.store.state.ledger, begun, next))
        .transpose()?;
    let mut change = core.begin();
    let leaving = ledger.as_ref().map(|_| MigratingContainer {
        owner: next.owner.clone(),
        container: next.container.clone(),
        held: next.from.clone(),
    });
    if let Some(running) = &mut change.state().moving.running {
        (running.begun, running.leaving) = (running.begun + 1, leaving);
    }
    let Some(ledger) = ledger else {
        change.store()?;
        return Ok(MoveStart::Gone);
    };
    change.state().ledger = ledger;
    let keep = now().saturating_sub(RATE_WINDOW.max(change.config.rebalance.dwell_time.0).as_secs());
    let recent = &mut change.state().moving.recent;
    recent.retain(|of| of.at >= keep);
    recent.push(RecentMove { owner: next.owner.clone(), at: now(), bytes: next.bytes });
    change.store()?;
    fault::point("rebalance.begun");
    shared_pool::note_guarantees_changed(core);
    Ok(MoveStart::Moves(holders(core, &next.owner, &next.container)))
}

/// Writes the knobs of a guarantee for its place in the ledger. Pages may still move afterwards, see
/// [`Migrations::is_running`](super::migrations::Migrations::is_running).
pub(crate) fn write_place(core: &mut Core, name: &str) -> Result<Option<CgroupPath>, AdmissionError> {
    let held = core.store.state.guarantees.get(name).filter(|_| !core.store.state.releasing.contains(name));
    let Some(held) = held.cloned() else { return Ok(None) };
    let path = held.cgroup.clone();
    // Other workloads leave the CPUs before these become exclusive.
    shared_pool::follow(core);
    cpu_isolation::confine_others(core, &[&path]);
    let mut change = core.begin();
    let placed = match &held.target {
        Target::Container(of) => change.store.state.containers.get(&of.id).cloned(),
        _ => None,
    };
    let settings = if let Some(placed) = &placed {
        settings::container_settings(&change, placed)
    } else {
        let account = change.store.state.ledger.owner(&OwnerId::from(held.owner(name)));
        let place = account.and_then(|account| account.containers.values().next());
        let mut settings = settings_at(&held.settings, place);
        if let Some((account, place)) = account.zip(place).filter(|(_, place)| place.cpus.is_none()) {
            settings.cpus = settings::shared_cpus(&change, &account.terms, &place.memory_nodes());
        }
        settings
    };
    let plan = change.plan(SettingsChange::Hold(path.clone(), settings.clone()))?;
    if let Some(held) = change.state().guarantees.get_mut(name) {
        held.settings = settings.clone();
    }
    change.enforce(plan)?;
    fault::point("rebalance.written");
    if let Some(placed) = placed.filter(|_| core.mode() == EnforcementMode::On) {
        core.execution.outbox.send(vec![Update { id: placed.of.id.clone(), settings }]);
    }
    shared_pool::note_guarantees_changed(core);
    Ok(Some(path))
}

/// Records that the pages of the last begun move have arrived at the new place, or, with `is_back`, at the original place again.
pub(crate) fn finish_move(core: &mut Core, is_back: bool) -> Result<(), AdmissionError> {
    let mut change = core.begin();
    let Some(running) = &mut change.state().moving.running else { return Ok(()) };
    running.leaving = None;
    if is_back {
        running.begun = running.begun.saturating_sub(1);
        let begun = running.moves[..running.begun].to_vec();
        change.state().ledger =
            in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &begun);
    }
    change.store()?;
    fault::point("rebalance.arrived");
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

/// Takes the last begun move back in the ledger, which charges both places. No knob is written yet.
pub(crate) fn take_back_move(core: &mut Core) -> Result<MoveStart, AdmissionError> {
    let Some(running) = core.store.state.moving.running.clone() else { return Ok(MoveStart::Gone) };
    let begun = &running.moves[..running.begun.min(running.moves.len())];
    let Some(last) = begun.last() else { return Ok(MoveStart::Gone) };
    // An earlier attempt was stored, but its knobs were not written.
    let is_taken_back = running
        .leaving
        .as_ref()
        .is_some_and(|of| of.owner == last.owner && of.container == last.container && of.held == last.to)
        && core.store.state.ledger.allocation(&last.owner, &last.container) == Some(&last.from);
    if is_taken_back {
        return Ok(MoveStart::Moves(holders(core, &last.owner, &last.container)));
    }
    let Some(ledger) = in_flight::revert_move(&*core.policy.strategy, &core.store.state.ledger, begun) else {
        finish_move(core, true)?;
        return Ok(MoveStart::Gone);
    };
    let mut change = core.begin();
    change.state().ledger = ledger;
    if let Some(running) = &mut change.state().moving.running {
        let (owner, container) = (last.owner.clone(), last.container.clone());
        running.leaving = Some(MigratingContainer { owner, container, held: last.to.clone() });
    }
    change.store()?;
    fault::point("rebalance.taken-back");
    shared_pool::note_guarantees_changed(core);
    Ok(MoveStart::Moves(holders(core, &last.owner, &last.container)))
}

/// Keeps a move that cannot be taken back: the kernel has the workload at its new place, and the ledger follows.
pub(crate) fn keep_move(core: &mut Core) -> Result<(), AdmissionError> {
    let Some(mut running) = core.store.state.moving.running.clone() else { return Ok(()) };
    if running.begun == 0 {
        return Ok(());
    }
    running.begun -= 1;
    let last = running.moves.remove(running.begun);
    running.leaving = None;
    let begun = running.moves[..running.begun].to_vec();
    let strategy = &*core.policy.strategy;
    // The new place is only reserved at this point; the container takes it again.
    let ledger = in_flight::reserve_for(strategy, &core.store.state.ledger, &begun);
    let ledger = in_flight::begin_move(strategy, &ledger, &begun, &last)?;
    let ledger = in_flight::reserve_for(strategy, &ledger, &begun);
    let mut change = core.begin();
    change.state().ledger = ledger;
    change.state().moving.running = Some(running);
    change.store()?;
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

/// Ends the moves after all of them were taken back. No place remains set aside.
pub(crate) fn end_moves(core: &mut Core) -> Result<(), AdmissionError> {
    let mut change = core.begin();
    change.state().moving.running = None;
    change.state().ledger = in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &[]);
    change.store()?;
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

/// Ends the moves after all of them were made, and admits the request (or only checks that it fits). If it does not fit, nothing
/// changes.
pub(crate) fn finish_rebalance(core: &mut Core, request: &RoomRequest) -> Result<(), AdmissionError> {
    let mut change = core.begin();
    change.state().moving.running = None;
    change.state().ledger = in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &[]);
    match request {
        RoomRequest::Workload(request, true) => {
            admission::admit(change.core(), request, false)?;
        }
        RoomRequest::Workload(_, false) => check_remaining_moves(&change, request, &[], 0)?,
        RoomRequest::Pod(_) | RoomRequest::Claim(_) if request.is_admitted_already(&change) => {}
        RoomRequest::Claim(of) => {
            claims::reserve(change.core(), &of.uid, of.claim.clone(), of.limit.as_ref())?;
        }
        RoomRequest::Pod(refused) => {
            // The kubelet may have tried again with another sandbox or another amount.
            let RefusedPod { asked, ask } = room::latest(&change, request.owner()).unwrap_or(refused).clone();
            placement::admit_owner(change.core(), &asked, &ask, Attempt::Again)?;
        }
    }
    change.store()?;
    fault::point("rebalance.done");
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

/// Checks that the moves from `begun` on are possible, and that the request fits after them.
fn check_remaining_moves(
    core: &Core,
    request: &RoomRequest,
    moves: &[ContainerMove],
    begun: usize,
) -> Result<(), AdmissionError> {
    let (ledger, terms) = request.ledger_and_terms(core)?;
    Ok(in_flight::check_plan(&*core.policy.strategy, &ledger, moves, begun, (request.engine(), &terms))?)
}

/// Returns the memory of a guarantee on nodes that a move has left, if it exceeds the error of the kernel's counters. Page cache that
/// no process has mapped is not migrated and does not count.
pub(crate) fn left_behind(core: &Core, path: &CgroupPath, from: &Allocation, to: &Allocation) -> Bytes {
    let dir = core.hierarchy.dir(path);
    let left: NodeSet =
        from.memory_nodes().iter().filter(|node| !to.memory_nodes().contains(*node)).collect();
    if to.memory_nodes().is_empty() {
        return Bytes(0);
    }
    let anon = read::memory_numa_stat(&dir).unwrap_or_default();
    let anon = anon.iter().filter(|(node, _)| left.contains(**node)).fold(0, |sum, (_, of)| sum + of.anon.0);
    let error =
        MEMCG_CHARGE_BATCH * core.policy.machine.cpus.len() as u64 * rustix::param::page_size() as u64;
    let huge = hugepages(to).filter_map(|size| read::hugetlb_numa_stat(&dir, size).ok());
    let huge: u64 = huge.flatten().filter(|(node, _)| left.contains(*node)).map(|(_, bytes)| bytes.0).sum();
    Bytes(if anon > error { anon } else { 0 } + huge)
}

/// Returns the memory of these guarantees on nodes other than those of the allocation; `None` if it cannot be read.
pub(crate) fn resident_outside(core: &Core, holders: &[String], to: &Allocation) -> Option<Bytes> {
    let nodes = to.memory_nodes();
    let mut sum = 0u64;
    for name in holders {
        let dir = core.hierarchy.dir(&core.store.state.guarantees.get(name)?.cgroup);
        let memory = read::memory_numa_stat(&dir).ok()?;
        let mut by_node: BTreeMap<NodeId, u64> =
            memory.iter().map(|(&node, of)| (node, of.anon.0.saturating_add(of.file.0))).collect();
        for size in hugepages(to) {
            for (node, bytes) in read::hugetlb_numa_stat(&dir, size).ok()? {
                *by_node.entry(node).or_default() += bytes.0;
            }
        }
        let outside = by_node.iter().filter(|(node, _)| !nodes.contains(**node));
        sum = outside.fold(sum, |sum, (_, bytes)| sum.saturating_add(*bytes));
    }
    (!holders.is_empty()).then_some(Bytes(sum))
}

/// Converts a plan for the API.
pub(crate) fn describe_plan(
    core: &mut Core,
    request: &Request,
    plan: &RebalancePlan,
) -> Result<api::MovePlan, AdmissionError> {
    let rate = core.execution.migrations.rate();
    let moves = describe_moves(core, &plan.moves);
    let bytes = sum_bytes(&moves);
    let grants = plan.decision.outcome.as_deref().unwrap_or_default();
    let held = grants.first().map(|grant| grant.allocation.clone()).unwrap_or_default();
    let path = admission::cgroup(core, request)?;
    let terms = burstable_home::with_preferred_node(core, &request.terms, &request.name, &path);
    let settings = settings::request_settings(core, request, &held);
    Ok(api::MovePlan {
        id: id(plan),
        bytes,
        pause_milliseconds: pause(core, bytes),
        rate,
        allocation: admission::describe(
            core,
            &request.name,
            &request.target,
            &path,
            (&held, &terms),
            &settings,
        ),
        moves,
    })
}

/// Returns the time for which the pages of a move keep a workload waiting, in milliseconds.
fn pause(core: &Core, bytes: u64) -> u64 {
    let rate = core.execution.migrations.rate();
    u64::try_from(u128::from(bytes) * 1000 / u128::from(rate.bytes_per_second.max(1))).unwrap_or(u64::MAX)
}

/// Returns the memory of these moves in bytes.
pub(crate) fn sum_bytes(moves: &[api::Move]) -> u64 {
    moves.iter().fold(0u64, |sum, of| sum.saturating_add(of.bytes))
}

fn describe_move(core: &Core, of: &ContainerMove) -> api::Move {
    let holders = holders(core, &of.owner, &of.container);
    let resident = resident_outside(core, &holders, &of.to);
    let bytes = resident.unwrap_or(of.bytes).0;
    let cpus = |held: &Allocation| held.cpus.clone().unwrap_or_default().to_string();
    api::Move {
        workload: holders.into_iter().next().unwrap_or_else(|| of.owner.to_string()),
        from_nodes: of.from.memory_nodes().to_string(),
        to_nodes: of.to.memory_nodes().to_string(),
        from_cpus: cpus(&of.from),
        to_cpus: cpus(&of.to),
        bytes,
        bytes_source: match resident {
            Some(_) => api::BytesSource::Resident,
            None => api::BytesSource::Guaranteed,
        },
        pause_milliseconds: pause(core, bytes),
        state: None,
        moved_bytes: None,
    }
}

/// Converts moves for the API.
pub(crate) fn describe_moves(core: &Core, moves: &[ContainerMove]) -> Vec<api::Move> {
    moves.iter().map(|of| describe_move(core, of)).collect()
}

fn hugepages(held: &Allocation) -> impl Iterator<Item = numaward_topology::HugepageSize> {
    held.placed.keys().filter_map(|kind| match kind {
        ZoneKind::Hugepages(size) => Some(*size),
        ZoneKind::Memory => None,
    })
}

/// Returns these settings with the CPUs and nodes of this allocation.
fn settings_at(settings: &Settings, place: Option<&Allocation>) -> Settings {
    let mut settings = settings.clone();
    let Some(place) = place else { return settings };
    if place.cpus.is_some() {
        settings.cpus.clone_from(&place.cpus);
    }
    let nodes = place.memory_nodes();
    // A workload with only a preferred node is not bound to it.
    if settings.mems.is_some() && !nodes.is_empty() {
        settings.mems = Some(nodes);
    }
    settings
}

/// Returns the identifier of a plan: a hash of its moves and of the place of the request.
pub(crate) fn id(plan: &RebalancePlan) -> String {
    let grants = plan.decision.outcome.as_deref().unwrap_or_default();
    // The name of the request is not part of it: a client that only plans uses a generated name.
    let places: Vec<_> = grants.iter().map(|grant| &grant.allocation).collect();
    let mut hasher = DefaultHasher::new();
    format!("{:?} {places:?}", plan.moves).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

//! Moves of workloads that run, which make room for a request: what is planned, and each step of carrying it out.
//!
//! Problem: a move takes as long as its pages take, during which others come, go and change. No CPU and no byte may be
//! promised twice meanwhile, also if the daemon dies, and whatever fails must leave everything where it was.
//!
//! Terms: a move is *begun* when the ledger has the container at its new place. Its pages follow when its knobs are
//! written.
//!
//! Algorithm: to begin, the ledger is held against the plan, the new place is taken, what is left stays
//! [set aside](numaward_engine::in_flight), and that is stored. Then the knobs are written, as for any other guarantee.
//! When the pages have arrived, the next move is begun. The request is admitted in the same breath in which nothing is
//! set aside any more. What was begun is taken back in the reverse order.
//!
//! Who goes on to the next step, and when, is up to `reconciler::rebalancing`.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use numaward_api as api;
use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, read};
use numaward_config::rebalance::RebalanceMode;
use numaward_enforce::SettingsChange;
use numaward_engine::{
    Allocation, ContainerMove, ContainerName, Ledger, OwnerId, RebalanceLimits, RebalancePlan, Terms,
    in_flight,
};
use numaward_guarantee::{
    error::AdmissionError,
    explain,
    moving::{MigratingContainer, RecentMove, RunningMoves},
    pod::Update,
    request::{Request, Target},
};
use numaward_model::Settings;
use numaward_store::fault;
use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::Core;

/// The time to which the cap of moved bytes applies.
const RATE_WINDOW: Duration = Duration::from_hours(1);
/// The kernel counts memory of a cgroup in batches of so many pages on each CPU (`MEMCG_CHARGE_BATCH`).
const MEMCG_CHARGE_BATCH: u64 = 64;

/// What came of beginning a move.
#[derive(Debug)]
pub(crate) enum MoveStart {
    /// These guarantees are to be written.
    Moves(Vec<String>),
    /// The workload is gone.
    Gone,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Core {
    /// The moves that make a request fit.
    pub(crate) fn plan_moves(
        &mut self,
        request: &Request,
        limits: &RebalanceLimits,
    ) -> Result<RebalancePlan, AdmissionError> {
        self.check_fit()?;
        let unpromised = self.with_unpromised_huge_pages();
        let (ledger, terms) = self.ledger_and_terms(request)?;
        self.check_terms(&terms)?;
        let mut limits = limits.clone();
        limits.kept.extend(self.immovable(&unpromised));
        let plan = self.policy.strategy.plan(&ledger, &request.engine, &terms, &limits);
        plan.map_err(|none| AdmissionError::NoPlan {
            reason: none.reason,
            rejection: explain::rejection(&none.rejection),
        })
    }

    /// Owners that cannot be moved: their cgroups are not held, or not for long, or not bound to nodes, or have
    /// reserved huge pages of no node, as these cgroups have.
    fn immovable(&self, unpromised: &BTreeSet<CgroupPath>) -> BTreeSet<OwnerId> {
        let state = &self.store.state;
        let is_held = |name: &str| !state.releasing.contains(name) && !state.admitting.contains(name);
        let held: BTreeSet<&str> = state
            .guarantees
            .iter()
            .filter(|(name, held)| is_held(name) && matches!(self.hierarchy.id_of(&held.cgroup), Ok(Some(_))))
            .filter(|(_, held)| !unpromised.contains(&held.cgroup))
            .map(|(name, held)| held.owner(name))
            .collect();
        let owners = state.ledger.owners().filter(|(owner, account)| {
            // What has a home is not bound: its pages would stay.
            account.terms.burstable || !held.contains(owner.as_str())
        });
        owners.map(|(owner, _)| owner.clone()).collect()
    }

    /// What may be moved without being asked for; `None` if nothing may.
    pub(crate) fn automatic_limits(&self) -> Option<RebalanceLimits> {
        let config = &self.config.rebalance;
        if config.mode != RebalanceMode::Auto || self.mode() != EnforcementMode::On {
            return None;
        }
        let ago = |span: Duration| now().saturating_sub(span.as_secs());
        let moved = self
            .store
            .state
            .moving
            .since(ago(RATE_WINDOW))
            .fold(0u64, |sum, of| sum.saturating_add(of.bytes.0));
        Some(RebalanceLimits {
            moves: config.max_moves as usize,
            bytes: Bytes(config.max_bytes_per_hour.0.0.saturating_sub(moved)),
            kept: self
                .store
                .state
                .moving
                .since(ago(config.dwell_time.0))
                .map(|of| of.owner.clone())
                .collect(),
            ..RebalanceLimits::default()
        })
    }

    /// The guarantees that hold what a container is promised: several where containers share what their pod holds.
    fn holders(&self, owner: &OwnerId, container: &ContainerName) -> Vec<String> {
        let holds = |name: &str, target: &Target| match target {
            Target::Container(of) => of.owner == owner.as_str() && of.ledger_name() == *container,
            _ => name == owner.as_str(),
        };
        let holders = self.store.state.guarantees.iter().filter(|(name, held)| holds(name, &held.target));
        holders.map(|(name, _)| name.clone()).collect()
    }

    /// Takes note of moves that are to be made.
    pub(crate) fn start_moves(&mut self, moves: Vec<ContainerMove>) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        change.store.state.moving.running = Some(RunningMoves { moves, ..RunningMoves::default() });
        change.store()
    }

    /// Whether what is left of the moves can still be made, and the request fits then.
    pub(crate) fn check_moves(&self, request: &Request) -> Result<(), AdmissionError> {
        let Some(RunningMoves { moves, begun, .. }) = &self.store.state.moving.running else { return Ok(()) };
        self.check_remaining_moves(request, moves, *begun)
    }

    /// Begins the next move: the ledger has it, both sides are charged for, and nothing is written yet.
    pub(crate) fn begin_move(&mut self) -> Result<MoveStart, AdmissionError> {
        let Some(running) = self.store.state.moving.running.clone() else { return Ok(MoveStart::Gone) };
        let Some(next) = running.moves.get(running.begun) else { return Ok(MoveStart::Gone) };
        let begun = &running.moves[..running.begun];
        let is_gone = self.store.state.ledger.allocation(&next.owner, &next.container).is_none();
        let ledger = (!is_gone)
            .then(|| in_flight::begin_move(&*self.policy.strategy, &self.store.state.ledger, begun, next))
            .transpose()?;
        let mut change = self.begin();
        let leaving = ledger.as_ref().map(|_| MigratingContainer {
            owner: next.owner.clone(),
            container: next.container.clone(),
            held: next.from.clone(),
        });
        if let Some(running) = &mut change.store.state.moving.running {
            (running.begun, running.leaving) = (running.begun + 1, leaving);
        }
        let Some(ledger) = ledger else {
            change.store()?;
            return Ok(MoveStart::Gone);
        };
        change.store.state.ledger = ledger;
        let keep = now().saturating_sub(RATE_WINDOW.max(change.config.rebalance.dwell_time.0).as_secs());
        let recent = &mut change.store.state.moving.recent;
        recent.retain(|of| of.at >= keep);
        recent.push(RecentMove { owner: next.owner.clone(), at: now(), bytes: next.bytes });
        change.store()?;
        fault::point("rebalance.begun");
        self.note_guarantees_changed();
        Ok(MoveStart::Moves(self.holders(&next.owner, &next.container)))
    }

    /// Writes the place that the ledger has for a guarantee. Pages may go on moving afterwards, see [`Core::is_moving`].
    pub(crate) fn write_place(&mut self, name: &str) -> Result<Option<CgroupPath>, AdmissionError> {
        let held =
            self.store.state.guarantees.get(name).filter(|_| !self.store.state.releasing.contains(name));
        let Some(held) = held.cloned() else { return Ok(None) };
        let path = held.cgroup.clone();
        // Others leave the CPUs before they are given.
        self.follow_pool();
        self.confine_others(&[&path]);
        let mut change = self.begin();
        let placed = match &held.target {
            Target::Container(of) => change.store.state.containers.get(&of.id).cloned(),
            _ => None,
        };
        let settings = if let Some(placed) = &placed {
            change.settings_of(placed)
        } else {
            let account = change.store.state.ledger.owner(&OwnerId::from(held.owner(name)));
            let place = account.and_then(|account| account.containers.values().next());
            let mut settings = settings_at(&held.settings, place);
            if let Some((account, place)) = account.zip(place).filter(|(_, place)| place.cpus.is_none()) {
                settings.cpus = change.shared_cpus(&account.terms, &place.memory_nodes());
            }
            settings
        };
        let plan = change.plan(SettingsChange::Hold(path.clone(), settings.clone()))?;
        if let Some(held) = change.store.state.guarantees.get_mut(name) {
            held.settings = settings.clone();
        }
        change.enforce(plan)?;
        fault::point("rebalance.written");
        if let Some(placed) = placed.filter(|_| self.mode() == EnforcementMode::On) {
            self.send_updates(vec![Update { id: placed.of.id.clone(), settings }]);
        }
        self.note_guarantees_changed();
        Ok(Some(path))
    }

    /// The pages of the move that was begun last have arrived: forwards, or back.
    pub(crate) fn finish_move(&mut self, is_back: bool) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        let Some(running) = &mut change.store.state.moving.running else { return Ok(()) };
        running.leaving = None;
        if is_back {
            running.begun = running.begun.saturating_sub(1);
            let begun = running.moves[..running.begun].to_vec();
            change.store.state.ledger =
                in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &begun);
        }
        change.store()?;
        fault::point("rebalance.arrived");
        self.note_guarantees_changed();
        Ok(())
    }

    /// Takes the move that was begun last back: the ledger has the container where it was, both sides are charged for,
    /// and nothing is written yet.
    pub(crate) fn take_back_move(&mut self) -> Result<MoveStart, AdmissionError> {
        let Some(running) = self.store.state.moving.running.clone() else { return Ok(MoveStart::Gone) };
        let begun = &running.moves[..running.begun.min(running.moves.len())];
        let Some(last) = begun.last() else { return Ok(MoveStart::Gone) };
        // An earlier attempt was stored and not written.
        let is_taken_back =
            running.leaving.as_ref().is_some_and(|of| {
                of.owner == last.owner && of.container == last.container && of.held == last.to
            }) && self.store.state.ledger.allocation(&last.owner, &last.container) == Some(&last.from);
        if is_taken_back {
            return Ok(MoveStart::Moves(self.holders(&last.owner, &last.container)));
        }
        let Some(ledger) = in_flight::revert_move(&*self.policy.strategy, &self.store.state.ledger, begun)
        else {
            self.finish_move(true)?;
            return Ok(MoveStart::Gone);
        };
        let mut change = self.begin();
        change.store.state.ledger = ledger;
        if let Some(running) = &mut change.store.state.moving.running {
            let (owner, container) = (last.owner.clone(), last.container.clone());
            running.leaving = Some(MigratingContainer { owner, container, held: last.to.clone() });
        }
        change.store()?;
        fault::point("rebalance.taken-back");
        self.note_guarantees_changed();
        Ok(MoveStart::Moves(self.holders(&last.owner, &last.container)))
    }

    /// The move that is being taken back cannot be: the kernel has the workload at its new place, and so has the ledger
    /// again.
    pub(crate) fn keep_move(&mut self) -> Result<(), AdmissionError> {
        let Some(mut running) = self.store.state.moving.running.clone() else { return Ok(()) };
        if running.begun == 0 {
            return Ok(());
        }
        running.begun -= 1;
        let last = running.moves.remove(running.begun);
        running.leaving = None;
        let begun = running.moves[..running.begun].to_vec();
        let strategy = &*self.policy.strategy;
        // Where it is to stay is set aside by now, and no place of its own.
        let ledger = in_flight::reserve_for(strategy, &self.store.state.ledger, &begun);
        let ledger = in_flight::begin_move(strategy, &ledger, &begun, &last)?;
        let ledger = in_flight::reserve_for(strategy, &ledger, &begun);
        let mut change = self.begin();
        change.store.state.ledger = ledger;
        change.store.state.moving.running = Some(running);
        change.store()?;
        self.note_guarantees_changed();
        Ok(())
    }

    /// Nothing is set aside any more: all was taken back.
    pub(crate) fn end_moves(&mut self) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        change.store.state.moving.running = None;
        change.store.state.ledger =
            in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &[]);
        change.store()?;
        self.note_guarantees_changed();
        Ok(())
    }

    /// All moves are made: the request is admitted, or just found to fit. If it does not, nothing changes.
    pub(crate) fn finish_rebalance(
        &mut self,
        request: &Request,
        is_admitted: bool,
    ) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        change.store.state.moving.running = None;
        change.store.state.ledger =
            in_flight::reserve_for(&*change.policy.strategy, &change.store.state.ledger, &[]);
        if is_admitted {
            change.admit(request, false)?;
        } else {
            change.check_remaining_moves(request, &[], 0)?;
        }
        change.store()?;
        fault::point("rebalance.done");
        self.note_guarantees_changed();
        Ok(())
    }

    /// Whether the rest of these moves can be made, and the request fits then.
    fn check_remaining_moves(
        &self,
        request: &Request,
        moves: &[ContainerMove],
        begun: usize,
    ) -> Result<(), AdmissionError> {
        let (ledger, terms) = self.ledger_and_terms(request)?;
        Ok(in_flight::check_plan(&*self.policy.strategy, &ledger, moves, begun, (&request.engine, &terms))?)
    }

    /// The ledger and the terms on which a request is decided.
    fn ledger_and_terms(&self, request: &Request) -> Result<(Ledger, Terms), AdmissionError> {
        let path = self.cgroup(request)?;
        let terms = self.with_home(&request.terms, &request.name, &path);
        Ok((self.ledger_for(Some(&path), None), terms))
    }

    /// Memory of a guarantee that is still on nodes that a container has left, beyond what the kernel's counters may be
    /// off by. Page cache that no process has mapped stays where it is, and does not count.
    pub(crate) fn left_behind(&self, path: &CgroupPath, from: &Allocation, to: &Allocation) -> Bytes {
        let dir = self.hierarchy.dir(path);
        let left: NodeSet =
            from.memory_nodes().iter().filter(|node| !to.memory_nodes().contains(*node)).collect();
        if to.memory_nodes().is_empty() {
            return Bytes(0);
        }
        let anon = read::memory_numa_stat(&dir).unwrap_or_default();
        let anon =
            anon.iter().filter(|(node, _)| left.contains(**node)).fold(0, |sum, (_, of)| sum + of.anon.0);
        let error =
            MEMCG_CHARGE_BATCH * self.policy.machine.cpus.len() as u64 * rustix::param::page_size() as u64;
        let huge = hugepages(to).filter_map(|size| read::hugetlb_numa_stat(&dir, size).ok());
        let huge: u64 =
            huge.flatten().filter(|(node, _)| left.contains(*node)).map(|(_, bytes)| bytes.0).sum();
        Bytes(if anon > error { anon } else { 0 } + huge)
    }

    /// Memory of these guarantees that is on other nodes than these; `None` where it is not known.
    pub(crate) fn resident_outside(&self, holders: &[String], to: &Allocation) -> Option<Bytes> {
        let nodes = to.memory_nodes();
        let mut sum = 0u64;
        for name in holders {
            let dir = self.hierarchy.dir(&self.store.state.guarantees.get(name)?.cgroup);
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

    /// A plan as it is shown.
    pub(crate) fn describe_plan(
        &mut self,
        request: &Request,
        plan: &RebalancePlan,
    ) -> Result<api::MovePlan, AdmissionError> {
        let rate = self.execution.migrations.rate();
        let pause = |bytes: u64| {
            u64::try_from(u128::from(bytes) * 1000 / u128::from(rate.bytes_per_second.max(1)))
                .unwrap_or(u64::MAX)
        };
        let moves: Vec<api::Move> = plan.moves.iter().map(|of| self.describe_move(of, &pause)).collect();
        let bytes = moves.iter().fold(0u64, |sum, of| sum.saturating_add(of.bytes));
        let grants = plan.decision.outcome.as_deref().unwrap_or_default();
        let held = grants.first().map(|grant| grant.allocation.clone()).unwrap_or_default();
        let path = self.cgroup(request)?;
        let terms = self.with_home(&request.terms, &request.name, &path);
        let settings = self.settings(request, &held);
        Ok(api::MovePlan {
            id: id(plan),
            bytes,
            pause_milliseconds: pause(bytes),
            rate,
            allocation: self.describe(&request.name, &request.target, &path, (&held, &terms), &settings),
            moves,
        })
    }

    fn describe_move(&self, of: &ContainerMove, pause: &dyn Fn(u64) -> u64) -> api::Move {
        let holders = self.holders(&of.owner, &of.container);
        let resident = self.resident_outside(&holders, &of.to);
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
                None => api::BytesSource::Promised,
            },
            pause_milliseconds: pause(bytes),
            state: None,
            moved_bytes: None,
        }
    }

    /// Moves that an earlier run began, as they are shown.
    pub(crate) fn describe_moves(&self, moves: &[ContainerMove]) -> Vec<api::Move> {
        moves.iter().map(|of| self.describe_move(of, &|_| 0)).collect()
    }
}

fn hugepages(held: &Allocation) -> impl Iterator<Item = numaward_topology::HugepageSize> {
    held.placed.keys().filter_map(|kind| match kind {
        ZoneKind::Hugepages(size) => Some(*size),
        ZoneKind::Memory => None,
    })
}

/// These settings at this place.
fn settings_at(settings: &Settings, place: Option<&Allocation>) -> Settings {
    let mut settings = settings.clone();
    let Some(place) = place else { return settings };
    if place.cpus.is_some() {
        settings.cpus.clone_from(&place.cpus);
    }
    let nodes = place.memory_nodes();
    // What has a home only is not bound to it.
    if settings.mems.is_some() && !nodes.is_empty() {
        settings.mems = Some(nodes);
    }
    settings
}

/// The name of a plan: of what it moves where, and where the request goes then.
pub(crate) fn id(plan: &RebalancePlan) -> String {
    let grants = plan.decision.outcome.as_deref().unwrap_or_default();
    // Not of the request's name: who only plans makes one up.
    let places: Vec<_> = grants.iter().map(|grant| &grant.allocation).collect();
    let mut hasher = DefaultHasher::new();
    format!("{:?} {places:?}", plan.moves).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

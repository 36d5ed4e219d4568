//! Carries moves out that make room for a request, one step at a time.
//!
//! Problem: moves take seconds to minutes. Meanwhile everybody else is answered, and whatever changes, the ledger must be
//! right and all of it can be taken back.
//!
//! Terms: a *rebalance* is a plan that is carried out. It *rolls back* when a move fails, the plan is stale or somebody
//! cancels it: what was begun is taken back, the last move first.
//!
//! Algorithm: each step is one of: begin a move, write one cgroup, see whether the pages have arrived. Between two steps the
//! loop does all that others ask, the container runtime first. Then the request is admitted, in the same transaction in
//! which the room is no longer set aside. A start of the daemon that finds moves begun rolls them back.
//!
//! Invariants: there is one rebalance at a time; a client that waits for its request always gets an answer.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode, EventKind, MoveState, RebalanceState, Severity};
use numaward_cgroup::CgroupPath;
use numaward_engine::{Allocation, Ledger, RebalancePlan};
use numaward_guarantee::{
    command::{Answer, RebalanceCommand},
    error::AdmissionError,
    reconciler::LatestRebalance,
    request::Request,
};
use numaward_model::EventReport;
use numaward_topology::Bytes;
use tokio::sync::oneshot;

use crate::core::{Begun, Core, plan_id};

/// What cannot be stored is tried again after so long.
const RETRY: Duration = Duration::from_secs(5);

/// What has no plan is tried again after so long, also if nothing else is promised by then.
const AGAIN: Duration = Duration::from_mins(1);
/// How long memory may be left on the old nodes when the pages have moved: a process may just have been forked, and ends.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Who waits for an admission.
type Waiter = oneshot::Sender<Result<Answer, AdmissionError>>;

/// Makes room, if anybody asks for it.
#[derive(Default)]
pub(super) struct Rebalancing {
    run: Option<Run>,
    shown: LatestRebalance,
    /// What no room was made for lately, by the name of the request.
    tried: BTreeMap<String, Tried>,
}

/// A request for which no room was made.
struct Tried {
    /// It is not tried again before then,
    until: Instant,
    /// unless something else is promised by now. Absent: not even then.
    promised: Option<Ledger>,
}

/// A rebalance that goes on.
struct Run {
    shown: api::Rebalance,
    /// Absent where an earlier run of the daemon began it.
    request: Option<(Request, bool)>,
    /// Who waits for the admission, with the refusal that they get if nothing comes of it.
    waiter: Option<(Waiter, AdmissionError)>,
    phase: Phase,
    /// How it ends if it rolls back.
    back: Option<RebalanceState>,
    /// What was outside the new nodes when the move that is being made began.
    outside: Option<Bytes>,
    /// Since when its pages have moved, and some are left all the same.
    left_since: Option<Instant>,
}

/// What comes next.
#[derive(Debug)]
enum Phase {
    /// The next move is begun, or the last one taken back.
    Next,
    /// These guarantees are written; pages of these cgroups may be moving.
    Write(VecDeque<String>, Vec<(String, CgroupPath)>),
    /// The pages of these are waited for.
    Await(Vec<(String, CgroupPath)>),
    /// This is tried again from then on.
    Rest(Instant, Box<Phase>),
}

/// A rebalance that is over.
pub(super) struct RebalanceOutcome {
    /// How it ended.
    pub(super) shown: api::Rebalance,
    /// The request that was admitted, by its name.
    pub(super) admitted: Option<String>,
    /// Who waits for it, with the refusal if it was not.
    pub(super) waiter: Option<(Waiter, AdmissionError)>,
}

impl Rebalancing {
    /// What is shown of the latest one.
    pub(super) fn shown(&self) -> LatestRebalance {
        self.shown.clone()
    }

    /// Rolls back what an earlier run of the daemon began.
    pub(super) fn adopt(&mut self, core: &mut Core) {
        let Some(running) = &core.store.state.moving.running else { return };
        let mut shown = core.describe_moves(&running.moves);
        for (place, of) in shown.iter_mut().enumerate() {
            of.state = Some(if place < running.begun { MoveState::Moved } else { MoveState::Planned });
        }
        let reason = "the daemon ended while it went on";
        self.run = Some(Run {
            shown: api::Rebalance {
                id: String::new(),
                request: None,
                automatic: false,
                state: RebalanceState::RollingBack,
                moves: shown,
                reason: Some(reason.to_owned()),
                allocation: None,
            },
            request: None,
            waiter: None,
            phase: Phase::Next,
            back: Some(RebalanceState::Failed),
            outside: None,
            left_since: None,
        });
        report_step(
            core,
            "failed",
            Severity::Warning,
            &format!("A rebalance is rolled back: {reason}."),
            |report| report,
        );
        self.show(core);
    }

    /// Begins to carry out what is asked for.
    pub(super) fn start(
        &mut self,
        core: &mut Core,
        asked: RebalanceCommand,
    ) -> Result<api::Rebalance, AdmissionError> {
        let RebalanceCommand { request, limits, plan: expected, admit } = asked;
        self.check_start(core)?;
        let plan = core.plan_moves(&request, &limits)?;
        if let Some(expected) = expected.filter(|expected| *expected != plan_id(&plan)) {
            let problem = format!("{expected:?} is stale: by now, something else would be moved");
            return Err(AdmissionError::conflict(
                "plan",
                problem,
                "the id of a plan that was made of what is held now",
            ));
        }
        self.run(core, request, &plan, admit)
    }

    /// Begins to make room for a request that was refused, where the configuration allows that. Otherwise returns who
    /// waits for it. Without a waiter the caller asks again and again, and is not heeded each time.
    pub(super) fn start_automatic(
        &mut self,
        core: &mut Core,
        request: &Request,
        waiter: Option<(Waiter, AdmissionError)>,
    ) -> Option<(Waiter, AdmissionError)> {
        let Some(limits) = core.automatic_limits().filter(|_| self.check_start(core).is_ok()) else {
            return waiter;
        };
        let now = Instant::now();
        self.tried.retain(|_, tried| now < tried.until);
        let is_same = |tried: &Tried| tried.promised.as_ref().is_none_or(|of| *of == core.store.state.ledger);
        if waiter.is_none() && self.tried.get(&request.name).is_some_and(is_same) {
            return None;
        }
        let plan = core.plan_moves(request, &limits).ok().filter(|plan| !plan.moves.is_empty());
        match plan.map(|plan| self.run(core, request.clone(), &plan, true)) {
            Some(Ok(_)) => {
                if let Some(run) = &mut self.run {
                    (run.waiter, run.shown.automatic) = (waiter, true);
                }
                self.show(core);
                return None;
            }
            Some(Err(error)) => tracing::error!(name = request.name, %error, "no room can be made"),
            None => {}
        }
        let tried = Tried { until: now + AGAIN, promised: Some(core.store.state.ledger.clone()) };
        self.tried.insert(request.name.clone(), tried);
        waiter
    }

    fn check_start(&self, core: &Core) -> Result<(), AdmissionError> {
        if self.run.is_some() {
            let problem = "a rebalance is going on";
            return Err(AdmissionError::conflict(
                "request",
                problem,
                "one at a time: wait for its end, or cancel it",
            ));
        }
        if core.mode() != EnforcementMode::On {
            let problem = "enforcement.mode is not on: nobody is moved";
            return Err(AdmissionError::conflict("request", problem, "a plan, without carrying it out"));
        }
        Ok(())
    }

    fn run(
        &mut self,
        core: &mut Core,
        request: Request,
        plan: &RebalancePlan,
        admit: bool,
    ) -> Result<api::Rebalance, AdmissionError> {
        let described = core.describe_plan(&request, plan)?;
        let planned = |of| api::Move { state: Some(MoveState::Planned), ..of };
        let shown = api::Rebalance {
            id: described.id,
            request: Some(request.name.clone()),
            automatic: false,
            state: RebalanceState::Running,
            moves: described.moves.into_iter().map(planned).collect(),
            reason: None,
            allocation: None,
        };
        let (count, bytes) = (shown.moves.len(), Bytes(described.bytes));
        core.start_moves(plan.moves.clone())?;
        self.run = Some(Run {
            shown: shown.clone(),
            request: Some((request, admit)),
            waiter: None,
            phase: Phase::Next,
            back: None,
            outside: None,
            left_since: None,
        });
        let name = shown.request.clone().unwrap_or_default();
        let message = format!("Room is made for {name}: moves of workloads: {count}, with {bytes} in all.");
        report_step(core, "started", Severity::Info, &message, |report| {
            report.detail("plan", &shown.id).detail("moves", count).detail("bytes", bytes.0)
        });
        self.show(core);
        Ok(shown)
    }

    /// Cancels what goes on: it is rolled back.
    pub(super) fn cancel(&mut self, core: &Core) -> Result<api::Rebalance, AdmissionError> {
        let Some(run) = &mut self.run else {
            let problem = "no rebalance is going on";
            return Err(AdmissionError::conflict("rebalance", problem, "to cancel one that is going on"));
        };
        run.go_back(RebalanceState::Cancelled, "it was cancelled".to_owned());
        let shown = run.shown.clone();
        self.show(core);
        Ok(shown)
    }

    /// Whether there is a step to be done now.
    pub(super) fn is_due(&self, core: &Core) -> bool {
        self.run.as_ref().is_some_and(|run| match &run.phase {
            Phase::Next | Phase::Write(..) => true,
            Phase::Await(cgroups) => !cgroups.iter().any(|(_, cgroup)| core.is_moving(cgroup)),
            Phase::Rest(until, _) => Instant::now() >= *until,
        })
    }

    /// Does the next step; what is over, if it is.
    pub(super) fn step(&mut self, core: &mut Core) -> Option<RebalanceOutcome> {
        let run = self.run.as_mut()?;
        if run.back.is_none() && run.waiter.as_ref().is_some_and(|(waiter, _)| waiter.is_closed()) {
            run.go_back(RebalanceState::Cancelled, "nobody waits for the request any more".to_owned());
        }
        let mut phase = mem::replace(&mut run.phase, Phase::Next);
        if let Phase::Rest(_, resumed) = phase {
            phase = *resumed;
        }
        let is_over = match phase {
            Phase::Next => run.next(core),
            Phase::Write(names, written) => run.write(core, names, written),
            Phase::Await(cgroups) => run.wait(core, cgroups),
            // It rests once at a time.
            Phase::Rest(..) => false,
        };
        if !is_over {
            self.show(core);
            return None;
        }
        let run = self.run.take()?;
        core.metrics.rebalancing(false);
        let is_admitted = run.shown.state == RebalanceState::Done;
        if let Some((request, _)) = run.request.as_ref().filter(|_| run.shown.automatic && !is_admitted) {
            let until = Instant::now() + core.config.rebalance.dwell_time.0;
            self.tried.insert(request.name.clone(), Tried { until, promised: None });
        }
        let admitted =
            run.request.filter(|(_, admit)| is_admitted && *admit).map(|(request, _)| request.name);
        // Those that are declared are tried again.
        core.effects.declared = true;
        Some(RebalanceOutcome { shown: run.shown, admitted, waiter: run.waiter })
    }

    /// Shows how a rebalance ended.
    pub(super) fn publish_end(&self, shown: api::Rebalance) {
        *self.shown.write() = Some(Arc::new(shown));
    }

    /// While pages move: how far they are.
    pub(super) fn look(&mut self, core: &Core) {
        let Some(run) = &mut self.run else { return };
        if let (Phase::Await(cgroups), Some(outside)) = (&run.phase, run.outside) {
            let names: Vec<String> = cgroups.iter().map(|(name, _)| name.clone()).collect();
            let left = run.target(core).and_then(|(_, to)| core.resident_outside(&names, &to));
            if let (Some(left), Some(of)) =
                (left, Run::current(core).and_then(|at| run.shown.moves.get_mut(at)))
            {
                of.moved_bytes = Some(outside.0.saturating_sub(left.0));
            }
            self.show(core);
        }
    }

    fn show(&self, core: &Core) {
        core.metrics.rebalancing(self.run.is_some());
        if let Some(run) = &self.run {
            let shown = Some(Arc::new(run.shown.clone()));
            *self.shown.write() = shown;
        }
    }
}

/// Reports that moves were planned.
pub(super) fn report_planned(core: &Core, request: &Request, plan: &api::MovePlan) {
    let (count, bytes) = (plan.moves.len(), Bytes(plan.bytes));
    let message =
        format!("Room for {} is planned: moves of workloads: {count}, with {bytes} in all.", request.name);
    report_step(core, "planned", Severity::Info, &message, |report| {
        report.detail("plan", &plan.id).detail("moves", count).detail("bytes", bytes.0)
    });
}

fn report_step(
    core: &Core,
    step: &str,
    severity: Severity,
    message: &str,
    with: impl FnOnce(EventReport) -> EventReport,
) {
    let report = EventReport::new(EventKind::Rebalance, message).severity(severity).detail("step", step);
    core.report(None, with(report));
}

impl Run {
    /// The place of the move that is being made, or taken back.
    fn current(core: &Core) -> Option<usize> {
        core.store.state.moving.running.as_ref()?.begun.checked_sub(1)
    }

    /// What the move that is being made, or taken back, leaves and goes to.
    fn target(&self, core: &Core) -> Option<(Allocation, Allocation)> {
        let of = core.store.state.moving.running.as_ref()?.moves.get(Self::current(core)?)?;
        let (from, to) = (of.from.clone(), of.to.clone());
        Some(if self.back.is_some() { (to, from) } else { (from, to) })
    }

    fn note(&mut self, place: Option<usize>, state: MoveState) {
        if let Some(of) = place.and_then(|place| self.shown.moves.get_mut(place)) {
            of.state = Some(state);
        }
    }

    /// Takes back what was begun, and ends so.
    fn go_back(&mut self, end: RebalanceState, reason: String) {
        if self.back.is_some() {
            return;
        }
        tracing::info!(plan = self.shown.id, reason, "a rebalance is rolled back");
        (self.back, self.shown.state) = (Some(end), RebalanceState::RollingBack);
        (self.shown.reason, self.left_since) = (Some(reason), None);
        // Pages that are on their way are waited for when the move is taken back.
        self.phase = Phase::Next;
    }

    fn fail(&mut self, error: &impl ToString) {
        self.go_back(RebalanceState::Failed, error.to_string());
    }

    /// Begins the next move, or takes the last one back, or ends; whether it is over.
    fn next(&mut self, core: &mut Core) -> bool {
        let Some(running) = &core.store.state.moving.running else { return self.end(core) };
        let (begun, count) = (running.begun, running.moves.len());
        if self.back.is_some() {
            if begun == 0 {
                return self.end(core);
            }
            let taken_back = core.take_back_move();
            self.begun(core, begun - 1, MoveState::MovingBack, taken_back);
        } else if begun == count {
            let Some((request, admit)) = self.request.clone() else { return self.end(core) };
            match core.use_room(&request, admit) {
                Ok(()) => return self.end(core),
                Err(error) => self.fail(&error),
            }
        } else if let Some(Err(stale)) = self.request.as_ref().map(|(request, _)| core.check_moves(request)) {
            self.fail(&stale);
        } else {
            let moved = core.begin_move();
            self.begun(core, begun, MoveState::Moving, moved);
        }
        false
    }

    fn begun(
        &mut self,
        core: &mut Core,
        place: usize,
        state: MoveState,
        begun: Result<Begun, AdmissionError>,
    ) {
        match begun {
            Ok(Begun::Moves(names)) => {
                self.outside = self.target(core).and_then(|(_, to)| core.resident_outside(&names, &to));
                self.note(Some(place), state);
                self.phase = Phase::Write(names.into(), Vec::new());
            }
            Ok(Begun::Gone) => {
                self.note(Some(place), MoveState::Gone);
                core.metrics.relocated("gone", Bytes(0));
            }
            Err(error) if self.back.is_some() => self.rest(&error, Phase::Next),
            Err(error) => self.fail(&error),
        }
    }

    /// Writes one guarantee.
    fn write(
        &mut self,
        core: &mut Core,
        mut names: VecDeque<String>,
        mut written: Vec<(String, CgroupPath)>,
    ) -> bool {
        let Some(name) = names.pop_front() else {
            self.phase = Phase::Await(written);
            return false;
        };
        match core.write_place(&name) {
            Ok(path) => {
                written.extend(path.map(|path| (name, path)));
                self.phase = Phase::Write(names, written);
            }
            Err(error @ AdmissionError::Store(_)) if self.back.is_some() => {
                names.push_front(name);
                self.rest(&error, Phase::Write(names, written));
            }
            Err(error) if self.back.is_some() => self.stays(core, &error, &written),
            Err(error) => self.fail(&error),
        }
        false
    }

    /// The pages of a move have arrived, unless they are still on their way.
    fn wait(&mut self, core: &mut Core, cgroups: Vec<(String, CgroupPath)>) -> bool {
        if cgroups.iter().any(|(_, cgroup)| core.is_moving(cgroup)) {
            self.phase = Phase::Await(cgroups);
            return false;
        }
        let (place, target) = (Self::current(core), self.target(core));
        let is_back = self.back.is_some();
        let mut left = Bytes(0);
        if let Some((from, to)) = &target {
            let of_each = cgroups.iter().map(|(_, cgroup)| core.left_behind(cgroup, from, to).0);
            left = Bytes(of_each.sum());
        }
        let workload = place.and_then(|place| self.shown.moves.get(place)).map(|of| of.workload.clone());
        let workload = workload.unwrap_or_default();
        if left.0 > 0 && self.left_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            self.phase = Phase::Rest(Instant::now() + LOOK, Box::new(Phase::Await(cgroups)));
            return false;
        }
        self.left_since = None;
        if left.0 > 0 && !is_back {
            let nodes = target.map(|(_, to)| to.memory_nodes()).unwrap_or_default();
            self.fail(&format!(
                "{left} of {workload} could not be moved to nodes {nodes}: is there no room left?"
            ));
            return false;
        }
        if left.0 > 0 {
            tracing::warn!(workload, %left, "not all pages could be moved back");
        }
        let names: Vec<String> = cgroups.iter().map(|(name, _)| name.clone()).collect();
        let rest = target.and_then(|(_, to)| core.resident_outside(&names, &to));
        let moved = self.outside.zip(rest).map(|(before, after)| Bytes(before.0.saturating_sub(after.0)));
        if let Err(error) = core.arrived(is_back) {
            if is_back {
                self.rest(&error, Phase::Await(cgroups));
            } else {
                self.fail(&error);
            }
            return false;
        }
        let (state, outcome) =
            if is_back { (MoveState::TakenBack, "taken_back") } else { (MoveState::Moved, "moved") };
        self.note(place, state);
        if let Some(of) = place.and_then(|place| self.shown.moves.get_mut(place)) {
            of.moved_bytes = moved.map(|bytes| bytes.0);
        }
        core.metrics.relocated(outcome, moved.unwrap_or_default());
        let (_, cgroup) = cgroups.first().cloned().unzip();
        let direction = if is_back { "back" } else { "to make room" };
        let report = EventReport::new(EventKind::Rebalance, format!("{workload} was moved {direction}."))
            .detail("step", outcome)
            .detail("plan", &self.shown.id);
        let report = match moved {
            Some(bytes) => report.detail("bytes", bytes.0),
            None => report,
        };
        core.report(cgroup.as_ref(), report);
        false
    }

    /// A move cannot be taken back: the workload keeps its new place, also the cgroups that were written already.
    fn stays(&mut self, core: &mut Core, error: &AdmissionError, written: &[(String, CgroupPath)]) {
        let place = Self::current(core);
        self.phase = Phase::Next;
        if let Err(error) = core.stay() {
            return self.rest(&error, Phase::Next);
        }
        for (name, _) in written {
            if let Err(error) = core.write_place(name) {
                tracing::error!(name, %error, "does not hold the place that the workload keeps");
            }
        }
        let workload = place.and_then(|place| self.shown.moves.get(place)).map(|of| of.workload.clone());
        let message =
            format!("{} cannot be moved back, and stays where it is: {error}.", workload.unwrap_or_default());
        report_step(core, "failed", Severity::Warning, &message, |report| {
            report.detail("plan", &self.shown.id)
        });
        core.metrics.relocated("stays", Bytes(0));
        self.note(place, MoveState::Stays);
    }

    /// What cannot be stored is tried again.
    fn rest(&mut self, error: &AdmissionError, phase: Phase) {
        tracing::error!(%error, "a rebalance cannot be rolled back now: tried again");
        self.phase = Phase::Rest(Instant::now() + RETRY, Box::new(phase));
    }

    /// It is over.
    fn end(&mut self, core: &mut Core) -> bool {
        let end = self.back.unwrap_or(RebalanceState::Done);
        if core.store.state.moving.running.is_some()
            && let Err(error) = core.end_moves()
        {
            self.rest(&error, Phase::Next);
            return false;
        }
        self.shown.state = end;
        let name = self.shown.request.clone().unwrap_or_else(|| "a request of an earlier run".to_owned());
        let reason = self.shown.reason.clone().unwrap_or_default();
        let (outcome, severity, message) = match end {
            RebalanceState::Done => ("done", Severity::Info, format!("There is room for {name}.")),
            RebalanceState::Cancelled => {
                ("cancelled", Severity::Info, format!("No room is made for {name}: {reason}."))
            }
            _ => ("failed", Severity::Warning, format!("No room could be made for {name}: {reason}.")),
        };
        core.metrics.rebalanced(outcome);
        report_step(core, outcome, severity, &message, |report| report.detail("plan", &self.shown.id));
        true
    }
}

#[cfg(test)]
mod tests;

//! Execution of rebalance plans, one step at a time.
//!
//! # Problem
//! Moves take seconds to minutes. Meanwhile the daemon answers all other requests, and whatever they change, the ledger stays
//! consistent and every move can be taken back.
//!
//! # Terms
//! - *rebalance*: the execution of a plan that moves workloads to make room for a request.
//! - *rollback*: begun moves are taken back, the last one first, because a move failed, the plan is stale or the rebalance was
//!   cancelled.
//!
//! # Algorithm
//! A step begins a move, writes one cgroup, or checks whether the pages have arrived. Between two steps the loop handles all
//! other commands, those of the container runtime first. After the last move, one transaction admits the request and ends the
//! reservation of its room. A daemon that finds begun moves at its start rolls them back.
//!
//! # Invariants
//! - At most one rebalance is in progress.
//! - A client that waits for its request always gets an answer.

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

use crate::core::{Core, MoveStart, plan_id};

/// Time between attempts to store a rollback step.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Time before a request without a plan is planned again with an unchanged ledger.
const PLAN_RETRY_INTERVAL: Duration = Duration::from_mins(1);
/// Time for which memory may remain on the old nodes after the migration: a process may just have been forked, and ends soon.
const REMAINDER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between checks of the remaining memory.
const REMAINDER_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Reply channel of a client that waits for an admission.
type Waiter = oneshot::Sender<Result<Answer, AdmissionError>>;

/// Executor of rebalance plans.
#[derive(Default)]
pub(super) struct Rebalancing {
    run: Option<RebalanceRun>,
    shown: LatestRebalance,
    /// Failed automatic attempts, by the name of the request.
    failed_attempts: BTreeMap<String, FailedAttempt>,
}

/// Automatic attempt that made no room for a request.
struct FailedAttempt {
    /// Time before which the request is not tried again with the same ledger.
    retry_at: Instant,
    /// Ledger at the time of the attempt. If it is absent, a different ledger does not permit an earlier attempt.
    ledger: Option<Ledger>,
}

/// Rebalance in progress.
struct RebalanceRun {
    shown: api::Rebalance,
    /// The request, and true if it is to be admitted. Absent if an earlier run of the daemon began the rebalance.
    request: Option<(Request, bool)>,
    /// Client that waits for the admission, and the refusal that it gets if the rebalance fails.
    waiter: Option<(Waiter, AdmissionError)>,
    phase: StepPhase,
    /// Final state after the rollback; absent if the rebalance is not rolled back.
    rollback: Option<RebalanceState>,
    /// Memory outside the new nodes at the beginning of the current move.
    outside: Option<Bytes>,
    /// Time at which memory was first found on the old nodes after the migration.
    remainder_since: Option<Instant>,
}

/// Next step of a rebalance.
#[derive(Debug)]
enum StepPhase {
    /// Begin the next move, or take the last one back.
    Next,
    /// Write these guarantees. Pages of these cgroups, which were written already, may be moving.
    Write(VecDeque<String>, Vec<(String, CgroupPath)>),
    /// Wait for the pages of these guarantees.
    Await(Vec<(String, CgroupPath)>),
    /// Pause until this time, then continue with this phase.
    Pause(Instant, Box<StepPhase>),
}

/// Result of a rebalance that is over.
pub(super) struct RebalanceOutcome {
    pub(super) shown: api::Rebalance,
    /// Name of the request, if it was admitted.
    pub(super) admitted: Option<String>,
    /// Client that waits for the request, and its refusal if the request was not admitted.
    pub(super) waiter: Option<(Waiter, AdmissionError)>,
}

impl Rebalancing {
    /// Returns the published state of the latest rebalance.
    pub(super) fn shown(&self) -> LatestRebalance {
        self.shown.clone()
    }

    /// Begins to roll back moves that an earlier run of the daemon began.
    pub(super) fn adopt(&mut self, core: &mut Core) {
        let Some(running) = &core.store.state.moving.running else { return };
        let mut shown = core.describe_moves(&running.moves);
        for (place, of) in shown.iter_mut().enumerate() {
            of.state = Some(if place < running.begun { MoveState::Moved } else { MoveState::Planned });
        }
        let reason = "the daemon ended during the rebalance";
        self.run = Some(RebalanceRun {
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
            phase: StepPhase::Next,
            rollback: Some(RebalanceState::Failed),
            outside: None,
            remainder_since: None,
        });
        report_step(
            core,
            "failed",
            Severity::Warning,
            &format!("A rebalance is rolled back: {reason}."),
            |report| report,
        );
        self.publish(core);
    }

    /// Plans moves for a request and begins to execute them. Fails if the command names a plan that is stale.
    pub(super) fn start(
        &mut self,
        core: &mut Core,
        command: RebalanceCommand,
    ) -> Result<api::Rebalance, AdmissionError> {
        let RebalanceCommand { request, limits, plan: expected, admit } = command;
        self.check_start(core)?;
        let plan = core.plan_moves(&request, &limits)?;
        if let Some(expected) = expected.filter(|expected| *expected != plan_id(&plan)) {
            let problem = format!("{expected:?} is stale: a plan for the present guarantees has other moves");
            return Err(AdmissionError::conflict(
                "plan",
                problem,
                "the id of a plan that was made for the present guarantees",
            ));
        }
        self.run(core, request, &plan, admit)
    }

    /// Begins to make room for a refused request, if the configuration allows that and a plan exists. Otherwise returns the
    /// waiter. Without a waiter the caller retries regularly, so a failed attempt is not repeated for a while.
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
        self.failed_attempts.retain(|_, attempt| now < attempt.retry_at);
        let is_same = |attempt: &FailedAttempt| {
            attempt.ledger.as_ref().is_none_or(|ledger| *ledger == core.store.state.ledger)
        };
        if waiter.is_none() && self.failed_attempts.get(&request.name).is_some_and(is_same) {
            return None;
        }
        let plan = core.plan_moves(request, &limits).ok().filter(|plan| !plan.moves.is_empty());
        match plan.map(|plan| self.run(core, request.clone(), &plan, true)) {
            Some(Ok(_)) => {
                if let Some(run) = &mut self.run {
                    (run.waiter, run.shown.automatic) = (waiter, true);
                }
                self.publish(core);
                return None;
            }
            Some(Err(error)) => {
                tracing::error!(name = request.name, %error, "the rebalance cannot be started");
            }
            None => {}
        }
        let attempt = FailedAttempt {
            retry_at: now + PLAN_RETRY_INTERVAL,
            ledger: Some(core.store.state.ledger.clone()),
        };
        self.failed_attempts.insert(request.name.clone(), attempt);
        waiter
    }

    /// Fails if a rebalance is in progress or guarantees are not enforced.
    fn check_start(&self, core: &Core) -> Result<(), AdmissionError> {
        if self.run.is_some() {
            let problem = "a rebalance is in progress";
            return Err(AdmissionError::conflict(
                "request",
                problem,
                "one at a time: wait for its end, or cancel it",
            ));
        }
        if core.mode() != EnforcementMode::On {
            let problem = "enforcement.mode is not on: no workload is moved";
            return Err(AdmissionError::conflict("request", problem, "a plan, without its execution"));
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
        self.run = Some(RebalanceRun {
            shown: shown.clone(),
            request: Some((request, admit)),
            waiter: None,
            phase: StepPhase::Next,
            rollback: None,
            outside: None,
            remainder_since: None,
        });
        let name = shown.request.clone().unwrap_or_default();
        let message = format!("Room for {name} is being made (moves: {count}, memory: {bytes}).");
        report_step(core, "started", Severity::Info, &message, |report| {
            report.detail("plan", &shown.id).detail("moves", count).detail("bytes", bytes.0)
        });
        self.publish(core);
        Ok(shown)
    }

    /// Cancels the rebalance in progress, which begins its rollback.
    pub(super) fn cancel(&mut self, core: &Core) -> Result<api::Rebalance, AdmissionError> {
        let Some(run) = &mut self.run else {
            let problem = "no rebalance is in progress";
            return Err(AdmissionError::conflict("rebalance", problem, "a rebalance in progress"));
        };
        run.roll_back(RebalanceState::Cancelled, "it was cancelled".to_owned());
        let shown = run.shown.clone();
        self.publish(core);
        Ok(shown)
    }

    /// Returns true if the next step can be executed now.
    pub(super) fn is_due(&self, core: &Core) -> bool {
        self.run.as_ref().is_some_and(|run| match &run.phase {
            StepPhase::Next | StepPhase::Write(..) => true,
            StepPhase::Await(cgroups) => !cgroups.iter().any(|(_, cgroup)| core.is_moving(cgroup)),
            StepPhase::Pause(until, _) => Instant::now() >= *until,
        })
    }

    /// Executes the next step. Returns the outcome if the rebalance is over.
    pub(super) fn step(&mut self, core: &mut Core) -> Option<RebalanceOutcome> {
        let run = self.run.as_mut()?;
        if run.rollback.is_none() && run.waiter.as_ref().is_some_and(|(waiter, _)| waiter.is_closed()) {
            run.roll_back(RebalanceState::Cancelled, "the client no longer waits for the request".to_owned());
        }
        let mut phase = mem::replace(&mut run.phase, StepPhase::Next);
        if let StepPhase::Pause(_, resumed) = phase {
            phase = *resumed;
        }
        let is_over = match phase {
            StepPhase::Next => run.next(core),
            StepPhase::Write(names, written) => run.write(core, names, written),
            StepPhase::Await(cgroups) => run.complete_move(core, cgroups),
            // A pause is never nested in another one.
            StepPhase::Pause(..) => false,
        };
        if !is_over {
            self.publish(core);
            return None;
        }
        let run = self.run.take()?;
        core.metrics.rebalancing(false);
        let is_admitted = run.shown.state == RebalanceState::Done;
        if let Some((request, _)) = run.request.as_ref().filter(|_| run.shown.automatic && !is_admitted) {
            let retry_at = Instant::now() + core.config.rebalance.dwell_time.0;
            self.failed_attempts.insert(request.name.clone(), FailedAttempt { retry_at, ledger: None });
        }
        let admitted =
            run.request.filter(|(_, admit)| is_admitted && *admit).map(|(request, _)| request.name);
        // Declared guarantees are tried again.
        core.effects.declared = true;
        Some(RebalanceOutcome { shown: run.shown, admitted, waiter: run.waiter })
    }

    /// Publishes the final state of a rebalance.
    pub(super) fn publish_end(&self, shown: api::Rebalance) {
        *self.shown.write() = Some(Arc::new(shown));
    }

    /// Updates and publishes the number of moved bytes while pages move.
    pub(super) fn look(&mut self, core: &Core) {
        let Some(run) = &mut self.run else { return };
        if let (StepPhase::Await(cgroups), Some(outside)) = (&run.phase, run.outside) {
            let names: Vec<String> = cgroups.iter().map(|(name, _)| name.clone()).collect();
            let left = run.target(core).and_then(|(_, to)| core.resident_outside(&names, &to));
            if let (Some(left), Some(of)) =
                (left, RebalanceRun::current(core).and_then(|at| run.shown.moves.get_mut(at)))
            {
                of.moved_bytes = Some(outside.0.saturating_sub(left.0));
            }
            self.publish(core);
        }
    }

    fn publish(&self, core: &Core) {
        core.metrics.rebalancing(self.run.is_some());
        if let Some(run) = &self.run {
            let shown = Some(Arc::new(run.shown.clone()));
            *self.shown.write() = shown;
        }
    }
}

/// Reports a plan that is not executed.
pub(super) fn report_planned(core: &Core, request: &Request, plan: &api::MovePlan) {
    let (count, bytes) = (plan.moves.len(), Bytes(plan.bytes));
    let message = format!("Room for {} is planned (moves: {count}, memory: {bytes}).", request.name);
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

impl RebalanceRun {
    /// Returns the index of the move that is being made or taken back.
    fn current(core: &Core) -> Option<usize> {
        core.store.state.moving.running.as_ref()?.begun.checked_sub(1)
    }

    /// Returns the old and the new allocation of the move that is being made or taken back.
    fn target(&self, core: &Core) -> Option<(Allocation, Allocation)> {
        let of = core.store.state.moving.running.as_ref()?.moves.get(Self::current(core)?)?;
        let (from, to) = (of.from.clone(), of.to.clone());
        Some(if self.rollback.is_some() { (to, from) } else { (from, to) })
    }

    fn set_move_state(&mut self, place: Option<usize>, state: MoveState) {
        if let Some(of) = place.and_then(|place| self.shown.moves.get_mut(place)) {
            of.state = Some(state);
        }
    }

    /// Begins the rollback, after which the rebalance has the state `end`.
    fn roll_back(&mut self, end: RebalanceState, reason: String) {
        if self.rollback.is_some() {
            return;
        }
        tracing::info!(plan = self.shown.id, reason, "the rebalance is rolled back");
        (self.rollback, self.shown.state) = (Some(end), RebalanceState::RollingBack);
        (self.shown.reason, self.remainder_since) = (Some(reason), None);
        // Moving pages are awaited when the move is taken back.
        self.phase = StepPhase::Next;
    }

    fn fail(&mut self, error: &impl ToString) {
        self.roll_back(RebalanceState::Failed, error.to_string());
    }

    /// Begins the next move, takes the last one back, or ends the rebalance. Returns true if it is over.
    fn next(&mut self, core: &mut Core) -> bool {
        let Some(running) = &core.store.state.moving.running else { return self.end(core) };
        let (begun, count) = (running.begun, running.moves.len());
        if self.rollback.is_some() {
            if begun == 0 {
                return self.end(core);
            }
            let taken_back = core.take_back_move();
            self.process_begun(core, begun - 1, MoveState::MovingBack, taken_back);
        } else if begun == count {
            let Some((request, admit)) = self.request.clone() else { return self.end(core) };
            match core.finish_rebalance(&request, admit) {
                Ok(()) => return self.end(core),
                Err(error) => self.fail(&error),
            }
        } else if let Some(Err(stale)) = self.request.as_ref().map(|(request, _)| core.check_moves(request)) {
            self.fail(&stale);
        } else {
            let moved = core.begin_move();
            self.process_begun(core, begun, MoveState::Moving, moved);
        }
        false
    }

    fn process_begun(
        &mut self,
        core: &mut Core,
        place: usize,
        state: MoveState,
        begun: Result<MoveStart, AdmissionError>,
    ) {
        match begun {
            Ok(MoveStart::Moves(names)) => {
                self.outside = self.target(core).and_then(|(_, to)| core.resident_outside(&names, &to));
                self.set_move_state(Some(place), state);
                self.phase = StepPhase::Write(names.into(), Vec::new());
            }
            Ok(MoveStart::Gone) => {
                self.set_move_state(Some(place), MoveState::Gone);
                core.metrics.relocated("gone", Bytes(0));
            }
            Err(error) if self.rollback.is_some() => self.retry_later(&error, StepPhase::Next),
            Err(error) => self.fail(&error),
        }
    }

    /// Writes the settings of one guarantee.
    fn write(
        &mut self,
        core: &mut Core,
        mut names: VecDeque<String>,
        mut written: Vec<(String, CgroupPath)>,
    ) -> bool {
        let Some(name) = names.pop_front() else {
            self.phase = StepPhase::Await(written);
            return false;
        };
        match core.write_place(&name) {
            Ok(path) => {
                written.extend(path.map(|path| (name, path)));
                self.phase = StepPhase::Write(names, written);
            }
            Err(error @ AdmissionError::Store(_)) if self.rollback.is_some() => {
                names.push_front(name);
                self.retry_later(&error, StepPhase::Write(names, written));
            }
            Err(error) if self.rollback.is_some() => self.keep_new_place(core, &error, &written),
            Err(error) => self.fail(&error),
        }
        false
    }

    /// Completes the move if its pages have arrived.
    fn complete_move(&mut self, core: &mut Core, cgroups: Vec<(String, CgroupPath)>) -> bool {
        if cgroups.iter().any(|(_, cgroup)| core.is_moving(cgroup)) {
            self.phase = StepPhase::Await(cgroups);
            return false;
        }
        let (place, target) = (Self::current(core), self.target(core));
        let is_back = self.rollback.is_some();
        let mut left = Bytes(0);
        if let Some((from, to)) = &target {
            let of_each = cgroups.iter().map(|(_, cgroup)| core.left_behind(cgroup, from, to).0);
            left = Bytes(of_each.sum());
        }
        let workload = place.and_then(|place| self.shown.moves.get(place)).map(|of| of.workload.clone());
        let workload = workload.unwrap_or_default();
        if left.0 > 0 && self.remainder_since.get_or_insert_with(Instant::now).elapsed() < REMAINDER_TIMEOUT {
            self.phase = StepPhase::Pause(
                Instant::now() + REMAINDER_POLL_INTERVAL,
                Box::new(StepPhase::Await(cgroups)),
            );
            return false;
        }
        self.remainder_since = None;
        if left.0 > 0 && !is_back {
            let nodes = target.map(|(_, to)| to.memory_nodes()).unwrap_or_default();
            self.fail(&format!(
                "{left} of {workload} could not be moved to nodes {nodes}, which may have no free memory left"
            ));
            return false;
        }
        if left.0 > 0 {
            tracing::warn!(workload, %left, "not all pages of the workload could be moved back");
        }
        let names: Vec<String> = cgroups.iter().map(|(name, _)| name.clone()).collect();
        let rest = target.and_then(|(_, to)| core.resident_outside(&names, &to));
        let moved = self.outside.zip(rest).map(|(before, after)| Bytes(before.0.saturating_sub(after.0)));
        if let Err(error) = core.finish_move(is_back) {
            if is_back {
                self.retry_later(&error, StepPhase::Await(cgroups));
            } else {
                self.fail(&error);
            }
            return false;
        }
        let (state, outcome) =
            if is_back { (MoveState::TakenBack, "taken_back") } else { (MoveState::Moved, "moved") };
        self.set_move_state(place, state);
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

    /// Ends a move that cannot be taken back: the workload stays at its new place. Cgroups that were written back already are
    /// written again.
    fn keep_new_place(&mut self, core: &mut Core, error: &AdmissionError, written: &[(String, CgroupPath)]) {
        let place = Self::current(core);
        self.phase = StepPhase::Next;
        if let Err(error) = core.keep_move() {
            return self.retry_later(&error, StepPhase::Next);
        }
        for (name, _) in written {
            if let Err(error) = core.write_place(name) {
                tracing::error!(name, %error, "the settings of the new place cannot be written");
            }
        }
        let workload = place.and_then(|place| self.shown.moves.get(place)).map(|of| of.workload.clone());
        let message = format!(
            "{} cannot be moved back and stays on its new nodes: {error}.",
            workload.unwrap_or_default()
        );
        report_step(core, "failed", Severity::Warning, &message, |report| {
            report.detail("plan", &self.shown.id)
        });
        core.metrics.relocated("stays", Bytes(0));
        self.set_move_state(place, MoveState::Stays);
    }

    /// Repeats a rollback step later, after its state could not be stored.
    fn retry_later(&mut self, error: &AdmissionError, phase: StepPhase) {
        tracing::error!(%error, "the rebalance cannot be rolled back now; the daemon tries again");
        self.phase = StepPhase::Pause(Instant::now() + STORE_RETRY_INTERVAL, Box::new(phase));
    }

    /// Ends the rebalance. Returns false if that cannot be stored yet.
    fn end(&mut self, core: &mut Core) -> bool {
        let end = self.rollback.unwrap_or(RebalanceState::Done);
        if core.store.state.moving.running.is_some()
            && let Err(error) = core.end_moves()
        {
            self.retry_later(&error, StepPhase::Next);
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

//! Execution of rebalance plans, one step at a time.
//!
//! # Problem
//! Moves take seconds to minutes. Meanwhile the daemon answers all other requests, and whatever they change, the ledger stays
//! consistent and every move can be rolled back.
//!
//! # Terms
//! - *rebalance*: the execution of a plan that moves workloads to make room for a request.
//! - *rollback*: begun moves are undone, the last one first, because a move failed, the plan is stale or the rebalance was
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
use numaward_engine::{Allocation, Ledger, PodId, RebalancePlan};
use numaward_guarantee::{
    command::{AdmissionOutcome, RebalanceCommand},
    error::AdmissionError,
    reconciler::LatestRebalance,
    request::Request,
};
use numaward_model::EventReport;
use numaward_topology::Bytes;
use tokio::sync::oneshot;

use crate::core::{
    Core, MoveStart,
    rebalance::{self, RoomRequest},
};

/// Time between attempts to store a rollback step.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Time before a request without a plan is planned again with an unchanged ledger.
const PLAN_RETRY_INTERVAL: Duration = Duration::from_mins(1);
/// Maximum number of times that the delay after moves that failed is doubled.
const MAX_DOUBLINGS: u32 = 6;
/// Time for which memory may remain on the old nodes after the migration: a process may just have been forked, and ends soon.
const REMAINDER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between checks of the remaining memory.
const REMAINDER_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Reply channel of a client that waits for an admission.
type Waiter = oneshot::Sender<Result<AdmissionOutcome, AdmissionError>>;

/// Executor of rebalance plans.
#[derive(Default)]
pub(super) struct Rebalancing {
    run: Option<RebalanceRun>,
    status: LatestRebalance,
    /// Failed automatic attempts, by the name of the request.
    failed_attempts: BTreeMap<String, FailedAttempt>,
}

/// Automatic attempt that made no room for a request.
struct FailedAttempt {
    /// Time before which the request is not tried again with the same ledger.
    retry_at: Instant,
    /// Ledger at the time of the attempt. If it is absent, a different ledger does not permit an earlier attempt.
    ledger: Option<Ledger>,
    /// Number of successive attempts with moves that failed.
    failures: u32,
}

/// Rebalance in progress.
struct RebalanceRun {
    status: api::Rebalance,
    /// Absent if an earlier run of the daemon began the rebalance.
    request: Option<RoomRequest>,
    /// Client that waits for the admission, and the refusal that it gets if the rebalance fails.
    waiter: Option<(Waiter, AdmissionError)>,
    phase: StepPhase,
    /// True if the pod for which room was being made has ended.
    is_gone: bool,
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
    /// Begin the next move, or undo the last one.
    Next,
    /// Write these guarantees. Pages of these cgroups, which were written already, may be moving.
    Write(VecDeque<String>, Vec<(String, CgroupPath)>),
    /// Wait for the pages of these guarantees.
    Await(Vec<(String, CgroupPath)>),
    /// Pause until this time, then continue with this phase.
    Pause(Instant, Box<StepPhase>),
}

/// Result of an ended rebalance.
pub(super) struct RebalanceOutcome {
    pub(super) status: api::Rebalance,
    /// Name of the request, if it was admitted.
    pub(super) admitted: Option<String>,
    /// Client that waits for the request, and its refusal if the request was not admitted.
    pub(super) waiter: Option<(Waiter, AdmissionError)>,
}

impl Rebalancing {
    /// Returns the published state of the latest rebalance.
    pub(super) fn status(&self) -> LatestRebalance {
        self.status.clone()
    }

    pub(super) fn is_running(&self) -> bool {
        self.run.is_some()
    }

    /// Returns the UID of the pod for which room is being made.
    pub(super) fn pod_uid(&self) -> Option<&str> {
        match self.run.as_ref()?.request.as_ref()? {
            RoomRequest::Pod(pod) => Some(&pod.ask.pod.uid),
            RoomRequest::Claim(of) => Some(&of.claim.pod),
            RoomRequest::Workload(..) => None,
        }
    }

    /// Begins to roll back moves that an earlier run of the daemon began.
    pub(super) fn adopt(&mut self, core: &mut Core) {
        let Some(running) = &core.store.state.moving.running else { return };
        let mut moves = rebalance::describe_moves(core, &running.moves);
        for (place, of) in moves.iter_mut().enumerate() {
            of.state = Some(if place < running.begun { MoveState::Moved } else { MoveState::Planned });
        }
        let reason = "the daemon ended during the rebalance";
        self.run = Some(RebalanceRun {
            status: api::Rebalance {
                id: String::new(),
                request: None,
                automatic: false,
                state: RebalanceState::RollingBack,
                moves,
                reason: Some(reason.to_owned()),
                allocation: None,
            },
            request: None,
            waiter: None,
            is_gone: false,
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
        let request = RoomRequest::Workload(Box::new(request), admit);
        let plan = rebalance::plan_moves(core, &request, &limits)?;
        if let Some(expected) = expected.filter(|expected| *expected != rebalance::id(&plan)) {
            let problem = format!("{expected:?} is stale: a plan for the present guarantees has other moves");
            return Err(AdmissionError::conflict(
                "plan",
                problem,
                "the id of a plan that was made for the present guarantees",
            ));
        }
        self.run(core, request, &plan)
    }

    /// Begins to make room for a refused request, if the configuration allows that and a plan exists. Otherwise returns the
    /// waiter. Without a waiter the caller retries regularly, so a failed attempt is not repeated for a while.
    pub(super) fn start_automatic(
        &mut self,
        core: &mut Core,
        request: &RoomRequest,
        waiter: Option<(Waiter, AdmissionError)>,
    ) -> Option<(Waiter, AdmissionError)> {
        let Some(limits) =
            rebalance::automatic_limits(core, request).filter(|_| self.check_start(core).is_ok())
        else {
            return waiter;
        };
        let now = Instant::now();
        let dwell_time = core.config.rebalance.dwell_time.0;
        self.failed_attempts.retain(|_, attempt| now < attempt.retry_at + dwell_time);
        let is_same = |attempt: &FailedAttempt| {
            now < attempt.retry_at
                && attempt.ledger.as_ref().is_none_or(|ledger| *ledger == core.store.state.ledger)
        };
        if waiter.is_none() && self.failed_attempts.get(request.owner().as_str()).is_some_and(is_same) {
            return None;
        }
        let plan = rebalance::plan_moves(core, request, &limits).ok().filter(|plan| !plan.moves.is_empty());
        match plan.map(|plan| self.run(core, request.clone(), &plan)) {
            Some(Ok(_)) => {
                if let Some(run) = &mut self.run {
                    (run.waiter, run.status.automatic) = (waiter, true);
                }
                self.publish(core);
                return None;
            }
            Some(Err(error)) => {
                tracing::error!(name = request.name(), %error, "the rebalance cannot be started");
            }
            None => {}
        }
        let owner = request.owner().to_string();
        let failures = self.failed_attempts.get(&owner).map_or(0, |attempt| attempt.failures);
        let ledger = Some(core.store.state.ledger.clone());
        let attempt = FailedAttempt { retry_at: now + PLAN_RETRY_INTERVAL, ledger, failures };
        self.failed_attempts.insert(owner, attempt);
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
        request: RoomRequest,
        plan: &RebalancePlan,
    ) -> Result<api::Rebalance, AdmissionError> {
        let planned = |of| api::Move { state: Some(MoveState::Planned), ..of };
        let status = api::Rebalance {
            id: rebalance::id(plan),
            request: Some(request.name()),
            automatic: false,
            state: RebalanceState::Running,
            moves: rebalance::describe_moves(core, &plan.moves).into_iter().map(planned).collect(),
            reason: None,
            allocation: None,
        };
        let (count, bytes) = (status.moves.len(), Bytes(rebalance::sum_bytes(&status.moves)));
        rebalance::start_moves(core, plan.moves.clone())?;
        self.run = Some(RebalanceRun {
            status: status.clone(),
            request: Some(request),
            waiter: None,
            is_gone: false,
            phase: StepPhase::Next,
            rollback: None,
            outside: None,
            remainder_since: None,
        });
        let name = status.request.clone().unwrap_or_default();
        let message = format!("Room for {name} is being made (moves: {count}, memory: {bytes}).");
        report_step(core, "started", Severity::Info, &message, |report| {
            report.detail("plan", &status.id).detail("moves", count).detail("bytes", bytes.0)
        });
        self.publish(core);
        Ok(status)
    }

    /// Cancels the rebalance in progress, which begins its rollback.
    pub(super) fn cancel(&mut self, core: &Core) -> Result<api::Rebalance, AdmissionError> {
        let Some(run) = &mut self.run else {
            let problem = "no rebalance is in progress";
            return Err(AdmissionError::conflict("rebalance", problem, "a rebalance in progress"));
        };
        run.roll_back(RebalanceState::Cancelled, "it was cancelled".to_owned());
        let status = run.status.clone();
        self.publish(core);
        Ok(status)
    }

    /// Returns true if the next step can be executed now.
    pub(super) fn is_due(&self, core: &Core) -> bool {
        self.run.as_ref().is_some_and(|run| match &run.phase {
            StepPhase::Next | StepPhase::Write(..) => true,
            StepPhase::Await(cgroups) => {
                !cgroups.iter().any(|(_, cgroup)| core.execution.migrations.is_running(cgroup))
            }
            StepPhase::Pause(until, _) => Instant::now() >= *until,
        })
    }

    /// Executes the next step. Returns the outcome if the rebalance has ended.
    pub(super) fn step(&mut self, core: &mut Core) -> Option<RebalanceOutcome> {
        let run = self.run.as_mut()?;
        if run.rollback.is_none() && run.waiter.as_ref().is_some_and(|(waiter, _)| waiter.is_closed()) {
            run.roll_back(RebalanceState::Cancelled, "the client no longer waits for the request".to_owned());
        }
        let is_gone = |request: &RoomRequest| request.is_gone(core) && !request.is_admitted_already(core);
        if run.rollback.is_none() && run.request.as_ref().is_some_and(is_gone) {
            run.roll_back(RebalanceState::Cancelled, "the pod has ended".to_owned());
            run.is_gone = true;
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
        let is_admitted = run.status.state == RebalanceState::Done;
        if let Some(request) = run.request.as_ref().filter(|_| run.status.automatic) {
            let owner = request.owner().to_string();
            let failures = self.failed_attempts.remove(&owner).map_or(0, |attempt| attempt.failures);
            if !is_admitted && !run.is_gone {
                let delay = core.config.rebalance.dwell_time.0 * (1 << failures.min(MAX_DOUBLINGS));
                let attempt = FailedAttempt {
                    retry_at: Instant::now() + delay,
                    ledger: None,
                    failures: failures.saturating_add(1),
                };
                self.failed_attempts.insert(owner, attempt);
            }
        }
        let admitted = match run.request {
            Some(RoomRequest::Workload(request, true)) if is_admitted => Some(request.name),
            _ => None,
        };
        // Declared guarantees are tried again.
        core.effects.declared = true;
        Some(RebalanceOutcome { status: run.status, admitted, waiter: run.waiter })
    }

    /// Publishes the final state of a rebalance.
    pub(super) fn publish_end(&self, status: api::Rebalance) {
        *self.status.write() = Some(Arc::new(status));
    }

    /// Updates and publishes the number of moved bytes while pages move.
    pub(super) fn update_moved_bytes(&mut self, core: &Core) {
        let Some(run) = &mut self.run else { return };
        if let (StepPhase::Await(cgroups), Some(outside)) = (&run.phase, run.outside) {
            let names: Vec<String> = cgroups.iter().map(|(name, _)| name.clone()).collect();
            let left = run.target(core).and_then(|(_, to)| rebalance::resident_outside(core, &names, &to));
            if let (Some(left), Some(of)) =
                (left, RebalanceRun::current(core).and_then(|at| run.status.moves.get_mut(at)))
            {
                of.moved_bytes = Some(outside.0.saturating_sub(left.0));
            }
            self.publish(core);
        }
    }

    fn publish(&self, core: &Core) {
        core.metrics.rebalancing(self.run.is_some());
        if let Some(run) = &self.run {
            let status = Some(Arc::new(run.status.clone()));
            *self.status.write() = status;
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

/// Adds the pod that a report is about, from which the daemon creates an event of the cluster.
fn with_pod(report: EventReport, pod: Option<&PodId>) -> EventReport {
    match pod {
        Some(PodId { namespace, name, uid }) => {
            report.detail("pod", format_args!("{namespace}/{name}")).detail("uid", uid)
        }
        None => report,
    }
}

impl RebalanceRun {
    /// Returns the index of the move in progress or being undone.
    fn current(core: &Core) -> Option<usize> {
        core.store.state.moving.running.as_ref()?.begun.checked_sub(1)
    }

    /// Returns the pod of the move in progress or being undone; `None` if the workload is no pod.
    fn current_pod(core: &Core) -> Option<PodId> {
        let of = core.store.state.moving.running.as_ref()?.moves.get(Self::current(core)?)?;
        core.store.state.pods.get(of.owner.as_str()).map(|admitted| admitted.pod.clone())
    }

    /// Returns the old and the new allocation of the move in progress or being undone.
    fn target(&self, core: &Core) -> Option<(Allocation, Allocation)> {
        let of = core.store.state.moving.running.as_ref()?.moves.get(Self::current(core)?)?;
        let (from, to) = (of.from.clone(), of.to.clone());
        Some(if self.rollback.is_some() { (to, from) } else { (from, to) })
    }

    fn set_move_state(&mut self, place: Option<usize>, state: MoveState) {
        if let Some(of) = place.and_then(|place| self.status.moves.get_mut(place)) {
            of.state = Some(state);
        }
    }

    /// Begins the rollback, after which the rebalance has the state `end`.
    fn roll_back(&mut self, end: RebalanceState, reason: String) {
        if self.rollback.is_some() {
            return;
        }
        tracing::info!(plan = self.status.id, reason, "the rebalance is rolled back");
        (self.rollback, self.status.state) = (Some(end), RebalanceState::RollingBack);
        (self.status.reason, self.remainder_since) = (Some(reason), None);
        // The undo of the move waits for its pages.
        self.phase = StepPhase::Next;
    }

    fn fail(&mut self, error: &impl ToString) {
        self.roll_back(RebalanceState::Failed, error.to_string());
    }

    /// Begins the next move, undoes the last one, or ends the rebalance. Returns true if it has ended.
    fn next(&mut self, core: &mut Core) -> bool {
        let Some(running) = &core.store.state.moving.running else { return self.end(core) };
        let (begun, count) = (running.begun, running.moves.len());
        if self.rollback.is_some() {
            if begun == 0 {
                return self.end(core);
            }
            let move_start = rebalance::take_back_move(core);
            self.process_begun(core, begun - 1, MoveState::MovingBack, move_start);
        } else if begun == count
            || self.request.as_ref().is_some_and(|request| request.is_admitted_already(core))
        {
            let Some(request) = self.request.clone() else { return self.end(core) };
            match rebalance::finish_rebalance(core, &request) {
                Ok(()) => return self.end(core),
                Err(error) => self.fail(&error),
            }
        } else if let Some(Err(stale)) =
            self.request.as_ref().map(|request| rebalance::check_moves(core, request))
        {
            self.fail(&stale);
        } else {
            let moved = rebalance::begin_move(core);
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
                self.outside =
                    self.target(core).and_then(|(_, to)| rebalance::resident_outside(core, &names, &to));
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
        match rebalance::write_place(core, &name) {
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
        if cgroups.iter().any(|(_, cgroup)| core.execution.migrations.is_running(cgroup)) {
            self.phase = StepPhase::Await(cgroups);
            return false;
        }
        let (place, target) = (Self::current(core), self.target(core));
        let is_back = self.rollback.is_some();
        let mut left = Bytes(0);
        if let Some((from, to)) = &target {
            let of_each = cgroups.iter().map(|(_, cgroup)| rebalance::left_behind(core, cgroup, from, to).0);
            left = Bytes(of_each.sum());
        }
        let workload = place.and_then(|place| self.status.moves.get(place)).map(|of| of.workload.clone());
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
        let pod = Self::current_pod(core);
        let rest = target.and_then(|(_, to)| rebalance::resident_outside(core, &names, &to));
        let moved = self.outside.zip(rest).map(|(before, after)| Bytes(before.0.saturating_sub(after.0)));
        if let Err(error) = rebalance::finish_move(core, is_back) {
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
        if let Some(of) = place.and_then(|place| self.status.moves.get_mut(place)) {
            of.moved_bytes = moved.map(|bytes| bytes.0);
        }
        core.metrics.relocated(outcome, moved.unwrap_or_default());
        let (_, cgroup) = cgroups.first().cloned().unzip();
        let direction = if is_back { "back" } else { "to make room" };
        let report = EventReport::new(EventKind::Rebalance, format!("{workload} was moved {direction}."))
            .detail("step", outcome)
            .detail("plan", &self.status.id);
        let report = with_pod(report, pod.as_ref());
        let report = match moved {
            Some(bytes) => report.detail("bytes", bytes.0),
            None => report,
        };
        core.report(cgroup.as_ref(), report);
        false
    }

    /// Ends a move that cannot be undone: the workload stays at its new place. Cgroups that were written back already are
    /// written again.
    fn keep_new_place(&mut self, core: &mut Core, error: &AdmissionError, written: &[(String, CgroupPath)]) {
        let place = Self::current(core);
        self.phase = StepPhase::Next;
        if let Err(error) = rebalance::keep_move(core) {
            return self.retry_later(&error, StepPhase::Next);
        }
        for (name, _) in written {
            if let Err(error) = rebalance::write_place(core, name) {
                tracing::error!(name, %error, "the settings of the new place cannot be written");
            }
        }
        let workload = place.and_then(|place| self.status.moves.get(place)).map(|of| of.workload.clone());
        let message = format!(
            "{} cannot be moved back and stays on its new nodes: {error}.",
            workload.unwrap_or_default()
        );
        report_step(core, "failed", Severity::Warning, &message, |report| {
            report.detail("plan", &self.status.id)
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
            && let Err(error) = rebalance::end_moves(core)
        {
            self.retry_later(&error, StepPhase::Next);
            return false;
        }
        self.status.state = end;
        let name = self.status.request.clone().unwrap_or_else(|| "a request of an earlier run".to_owned());
        let reason = self.status.reason.clone().unwrap_or_default();
        let (outcome, severity, message) = match end {
            RebalanceState::Done => ("done", Severity::Info, format!("There is room for {name}.")),
            RebalanceState::Cancelled => {
                ("cancelled", Severity::Info, format!("No room is made for {name}: {reason}."))
            }
            _ => ("failed", Severity::Warning, format!("No room could be made for {name}: {reason}.")),
        };
        core.metrics.rebalanced(outcome);
        let pod = match &self.request {
            Some(RoomRequest::Pod(pod)) => Some(&pod.ask.pod),
            Some(RoomRequest::Workload(..) | RoomRequest::Claim(_)) | None => None,
        };
        report_step(core, outcome, severity, &message, |report| {
            with_pod(report.detail("plan", &self.status.id), pod)
        });
        true
    }
}

#[cfg(test)]
mod tests;

//! Executes enforcement plans: stores the intended settings, writes the knobs, and stores the outcome.
//!
//! # Problem
//! A plan may block: up to two seconds while pages move to other nodes, up to ten while systemd answers on D-Bus. A container runtime that
//! sends a request meanwhile waits no longer than a fraction of a second.
//!
//! # Terms
//! A [`Transaction`] is an unfinished change of the state. If it is dropped before its commit, the change is undone.
//!
//! # Algorithm
//! Operations that may block run on a thread of their own. Meanwhile, the reconciler answers requests of the container runtime that do not
//! affect the same cgroups, and starts nothing else.
//!
//! # Invariants
//! - The state is stored before any knob is written for it.
//! - Changes by requests that are answered meanwhile become part of the state, and also of the state to which an open transaction rolls
//!   back. They are stored at once, together with the open transaction; after a crash, the next start undoes unfinished admissions
//!   ([`State::admitting`]).

use std::{
    collections::BTreeSet,
    io, mem,
    ops::Deref,
    sync::{
        Arc,
        mpsc::{self, Sender, TryRecvError},
    },
    time::Duration,
};

use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, knob::Knob};
use numaward_enforce::{
    AppliedSettings, DetachedReads, Drift, EnabledControllers, EnforceError, EnforcementFailure,
    EnforcementPlan, EnforcementReport, Enforcer, PendingReset, SettingsChange, StepError,
};
use numaward_guarantee::{
    command::{Message, PodCommand},
    error::AdmissionError,
    state::State,
};
use numaward_model::{
    Values,
    health::{self, Heartbeats},
};
use numaward_topology::{CpuSet, NodeSet};
use tokio_util::sync::CancellationToken;

use super::{
    Core, Inbox,
    inbox::{Outbox, RuntimeCommand},
    migrations::Migrations,
};
use crate::spans;

#[cfg(test)]
use super::disorder::{self, Disorder};

/// Interval after which the result of a blocking operation is checked even without a message about its completion.
const WAKE_INTERVAL: Duration = Duration::from_millis(250);

/// Time that one write, or one query to systemd, may take before the worker thread counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

type Work = Box<dyn FnOnce(&Enforcer) + Send>;

/// A reply that is sent after the decision is published.
pub(crate) type DeferredReply = Box<dyn FnOnce() + Send>;

/// Handler of a command of the runtime. The last argument is true if an earlier command of the runtime is not handled yet. Returns the reply that
/// must be sent after the decision is published, if any.
pub(crate) type AnswerFn = fn(&mut Core, RuntimeCommand, bool) -> Option<DeferredReply>;

/// Execution of plans, and the state of the operation that the reconciler waits for.
pub(crate) struct Execution {
    pub(crate) enforcer: Arc<Enforcer>,
    /// Thread for blocking operations; set when the reconciler's loop starts.
    pub(super) worker: Option<EnforcementWorker>,
    /// Cgroups that the current blocking operation affects; `None` if there is none.
    pub(super) busy: Option<BTreeSet<CgroupPath>>,
    /// Received commands; set when the reconciler's loop starts.
    pub(crate) inbox: Option<Inbox>,
    pub(super) outbox: Outbox,
    /// Commands of the runtime that were taken too early, and are handled again after the current operation.
    pub(super) deferred: Vec<RuntimeCommand>,
    /// Handles a command of the runtime during an operation.
    answer: AnswerFn,
    pub(crate) migrations: Migrations,
    pub(super) reads: DetachedReads,
}

/// Number of loop steps between two checks whether a container runtime waits for an answer.
pub(super) const STEPS_PER_POLL: u32 = 8;

impl Execution {
    pub(super) fn new(enforcer: Enforcer, answer: AnswerFn) -> Self {
        Self {
            enforcer: Arc::new(enforcer),
            worker: None,
            busy: None,
            inbox: None,
            outbox: Outbox::default(),
            deferred: Vec::new(),
            answer,
            migrations: Migrations::default(),
            reads: DetachedReads::default(),
        }
    }

    /// Returns true during a blocking operation.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Returns true while a container runtime waits for an answer.
    pub(super) fn is_runtime_waiting(&mut self) -> bool {
        self.inbox.as_mut().is_some_and(|inbox| {
            inbox.receive(Duration::ZERO);
            Inbox::has_runtime(inbox)
        })
    }

    /// Returns a condition to be evaluated at each step of a loop: true if the loop must end because a container runtime waits for an
    /// answer. It is always false if `is_on` is false.
    pub(super) fn interrupt_condition(&mut self, is_on: bool) -> impl FnMut() -> bool {
        let mut step = 0_u32;
        move || {
            step = step.wrapping_add(1);
            is_on && step.is_multiple_of(STEPS_PER_POLL) && self.is_runtime_waiting()
        }
    }
}

/// Handle of the thread that executes blocking operations.
#[derive(Debug)]
pub(crate) struct EnforcementWorker {
    work: Sender<Work>,
    done: Sender<Message>,
}

impl EnforcementWorker {
    /// Starts the thread, which ends when this handle is dropped.
    pub(crate) fn start(
        enforcer: Arc<Enforcer>,
        done: Sender<Message>,
        heartbeats: &Heartbeats,
        stop: &CancellationToken,
    ) -> io::Result<Self> {
        let (work, queue) = mpsc::channel::<Work>();
        let run = move || {
            health::rest();
            for work in queue {
                health::beat();
                work(&enforcer);
                health::rest();
            }
        };
        heartbeats.spawn("enforcement", HANG_TIMEOUT, stop, run)?;
        Ok(Self { work, done })
    }

    /// Creates a worker without a thread. The returned function executes the next operation, and returns false if there was none.
    #[cfg(test)]
    pub(crate) fn stepped(
        enforcer: Arc<Enforcer>,
        done: Sender<Message>,
    ) -> (Self, impl FnMut() -> bool + Send + use<>) {
        let (work, queue) = mpsc::channel::<Work>();
        let step = move || queue.try_recv().map(|work| work(&enforcer)).is_ok();
        (Self { work, done }, step)
    }
}

/// Outcome of an enforcement plan.
pub(crate) struct PlanOutcome {
    pub(crate) result: Result<(), Box<EnforcementFailure>>,
    /// True if the outcome equals the stored intent, so that it need not be stored again.
    pub(crate) is_stored: bool,
    /// Failed writes of restores, which are retried later.
    pub(crate) late: Vec<StepError>,
}

/// An unfinished change of the state. If it is dropped before its commit, the change is undone.
pub(crate) struct Transaction<'a> {
    core: &'a mut Core,
    is_committed: bool,
}

impl Deref for Transaction<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        self.core
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.core.store.end(self.is_committed);
    }
}

impl Transaction<'_> {
    /// Returns the state, which this transaction changes.
    pub(crate) fn state(&mut self) -> &mut State {
        &mut self.core.store.state
    }

    /// Returns the core for operations with transactions of their own. If this transaction is undone, only the knobs that they wrote remain.
    pub(super) fn core(&mut self) -> &mut Core {
        self.core
    }

    /// Plans a change. This may block if systemd must be queried.
    pub(crate) fn plan(&mut self, change: SettingsChange) -> Result<EnforcementPlan, EnforceError> {
        self.core.plan(change)
    }

    /// Returns true if the state differs from the state at the start of the transaction.
    pub(crate) fn is_change(&self) -> bool {
        self.core.store.is_changed()
    }

    /// Stores the changed state and commits. If the state cannot be stored, the change is undone.
    pub(crate) fn store(mut self) -> Result<(), AdmissionError> {
        #[cfg(test)]
        if disorder::is_injected(Disorder::AnswerBeforeSave) {
            self.is_committed = true;
            return Ok(());
        }
        if self.is_change() {
            self.core.save()?;
        }
        self.is_committed = true;
        Ok(())
    }

    /// Stores the changed state with the intent of the plan, writes the knobs, and stores the outcome. The change is undone if it cannot be
    /// stored, or if the writes were undone.
    pub(crate) fn execute_plan(mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        let is_undone = plan.is_undone();
        let result = self.core.execute_plan(plan);
        match &result {
            Err(AdmissionError::Failed(_)) if is_undone => self.roll_back(),
            Err(AdmissionError::Store(_)) => return result,
            _ => self.keep_in_enclosing(),
        }
        self.is_committed = true;
        result
    }

    /// Like [`execute_plan`](Self::execute_plan), for a plan that applies new settings: in a dry run, the writes are only logged.
    pub(crate) fn enforce(mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        if self.mode() == EnforcementMode::On {
            return self.execute_plan(plan);
        }
        self.log_dry_run(&plan);
        self.core.save()?;
        self.is_committed = true;
        Ok(())
    }

    /// Like [`enforce`](Self::enforce), but the transaction stays open.
    pub(super) fn enforce_within(&mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        if self.mode() == EnforcementMode::On {
            return self.core.execute_plan(plan);
        }
        self.log_dry_run(&plan);
        Ok(self.core.save()?)
    }

    /// Commits without storing the state again.
    pub(super) fn keep(mut self) {
        self.is_committed = true;
    }

    /// Applies this change also to the states to which enclosing transactions roll back: their rollback does not undo written knobs.
    fn keep_in_enclosing(&mut self) {
        let of = &mut *self.core;
        if let Some((before, around)) = of.store.open.split_last_mut() {
            for open in around {
                open.patch(before, &of.store.state, &*of.policy.strategy);
            }
        }
    }

    /// Restores the state from the start of the transaction, and stores it. The transaction stays open.
    pub(super) fn roll_back(&mut self) {
        if let Some(before) = self.core.store.open.last() {
            self.core.store.state = before.clone();
        }
        if let Err(error) = self.core.save() {
            tracing::error!(%error, "the ledger cannot be stored: a restart would load the undone change");
        }
    }
}

impl Core {
    /// Starts a transaction. Copying the state is cheap: its maps are shared until they are modified.
    pub(crate) fn begin(&mut self) -> Transaction<'_> {
        self.store.begin();
        Transaction { core: self, is_committed: false }
    }

    /// Replaces a part of the state, and stores the state if it changed.
    pub(crate) fn save_part<T: PartialEq>(
        &mut self,
        part: fn(&mut State) -> &mut T,
        now: T,
    ) -> Result<(), AdmissionError> {
        if *part(&mut self.store.state) == now {
            return Ok(());
        }
        let mut change = self.begin();
        *part(change.state()) = now;
        change.store()
    }

    /// Plans a change. This may block if systemd must be queried.
    pub(crate) fn plan(&mut self, change: SettingsChange) -> Result<EnforcementPlan, EnforceError> {
        let cgroups = change.cgroups(&self.store.state.applied);
        if !self.execution.enforcer.asks_systemd(&cgroups) {
            return self.execution.enforcer.plan(&self.store.state.applied, &change);
        }
        let applied = self.store.state.applied.clone();
        self.wait_for(cgroups, move |enforcer| enforcer.plan(&applied, &change))?
    }

    /// Logs the writes that a plan would make, and counts them in the metrics.
    fn log_dry_run(&self, plan: &EnforcementPlan) {
        for step in plan.steps() {
            tracing::info!(cgroup = %step.cgroup, knob = %step.knob, from = %step.from, to = %step.to, "dry run: the knob would be written");
            self.metrics.would_write(step);
        }
    }

    /// Queries systemd for the cgroup of a running unit; blocks until the answer.
    pub(super) fn query_unit_cgroup(&mut self, unit: &str) -> Result<Option<CgroupPath>, EnforceError> {
        let unit = unit.to_owned();
        // This operation affects no cgroup.
        self.wait_for(BTreeSet::new(), move |enforcer| enforcer.unit_cgroup(&unit))?
    }

    /// Queries systemd whether a unit is loaded, so that it may be started again; blocks until the answer.
    pub(crate) fn is_unit_loaded(&mut self, unit: &str) -> Result<bool, EnforceError> {
        let unit = unit.to_owned();
        self.wait_for(BTreeSet::new(), move |enforcer| enforcer.is_unit_loaded(&unit))?
    }

    /// Returns the original `cpuset.cpus` of a cgroup.
    pub(super) fn cpus_found(&mut self, path: &CgroupPath) -> Result<CpuSet, EnforceError> {
        self.found(path, Enforcer::cpus_found)
    }

    /// Returns the original `cpuset.mems` of a cgroup.
    pub(super) fn nodes_found(&mut self, path: &CgroupPath) -> Result<NodeSet, EnforceError> {
        self.found(path, Enforcer::nodes_found)
    }

    /// Returns an original value of a cgroup. This may block if systemd must be queried.
    fn found<T: Send + 'static>(
        &mut self,
        path: &CgroupPath,
        found: fn(&Enforcer, &AppliedSettings, &CgroupPath) -> Result<T, EnforceError>,
    ) -> Result<T, EnforceError> {
        let cgroups = BTreeSet::from([path.clone()]);
        if self.store.state.applied.get(path).is_some() || !self.execution.enforcer.asks_systemd(&cgroups) {
            return found(&self.execution.enforcer, &self.store.state.applied, path);
        }
        let (applied, path) = (self.store.state.applied.clone(), path.clone());
        self.wait_for(cgroups, move |enforcer| found(enforcer, &applied, &path))?
    }

    /// Stores the intent of a plan, writes the knobs, and stores the outcome.
    pub(crate) fn execute_plan(&mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        let done = self.write(plan)?;
        if !done.is_stored {
            self.store_outcome();
        }
        done.result.map_err(AdmissionError::from)
    }

    /// Stores the outcome of a plan. If this fails, the stored intent remains, from which a restart restores more than necessary; this does
    /// no harm.
    pub(crate) fn store_outcome(&mut self) {
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored");
        }
    }

    /// Records cgroups with threads that may keep the CPUs of before, so that a restart resets their affinities.
    fn note_resets(&mut self, resets: &[(CgroupPath, PendingReset)]) {
        for state in self.store.all_mut() {
            for (path, reset) in resets {
                state.resets.insert(path.clone(), reset.clone());
            }
        }
    }

    /// Removes cgroups with threads that need no reset any more. A restart may reset these again, which changes nothing.
    pub(crate) fn forget_resets(&mut self, resets: &[(CgroupPath, PendingReset)]) {
        for state in self.store.all_mut() {
            for (path, reset) in resets {
                if state.resets.get(path).is_some_and(|known| **known == *reset) {
                    state.resets.remove(path);
                }
            }
        }
    }

    /// Stores the intent of a plan and writes the knobs. The outcome becomes part of the state; the caller must store it unless
    /// [`PlanOutcome::is_stored`] is true.
    pub(crate) fn write(&mut self, plan: EnforcementPlan) -> Result<PlanOutcome, AdmissionError> {
        let _span = spans::reconcile();
        self.store.state.applied.patch(&plan.base, &plan.intent);
        self.note_enabled(&plan.enable);
        let mut resets = plan.outcome.resets_since(&plan.base);
        // A reset of an earlier plan stays pending if this plan changes no CPUs.
        resets
            .retain(|(path, reset)| self.store.state.resets.get(path).is_none_or(|known| **known != *reset));
        self.note_resets(&resets);
        if let Err(error) = self.save() {
            self.store.state.applied.patch(&plan.intent, &plan.base);
            self.forget_resets(&resets);
            self.forget_disabled();
            return Err(error.into());
        }
        let span = spans::knobs(plan.steps().len());
        let plan = Arc::new(plan);
        // Writes to many cgroups take long in sum.
        let executed = if plan.holds_several() || self.execution.enforcer.may_wait(plan.steps()) {
            let plan = plan.clone();
            let executed = self.wait_for(plan.cgroups(), move |enforcer| enforcer.execute(&plan));
            executed.map_err(EnforcementFailure::before_writes).and_then(|executed| executed)
        } else {
            self.execution.enforcer.execute(&plan)
        };
        if let Err(failure) = &executed {
            spans::failed(&span, failure);
        }
        drop(span);
        let outcome = match &executed {
            Ok(report) => plan.outcome_of(report),
            Err(failure) if plan.is_undone() => plan.undone(&failure.undo),
            Err(failure) => plan.outcome_of(&failure.report),
        };
        self.store.state.applied.patch(&plan.intent, &outcome);
        let resets_of_outcome = outcome.resets_since(&plan.base);
        self.forget_resets(&resets);
        self.note_resets(&resets_of_outcome);
        self.effects.widened.extend(resets_of_outcome);
        if executed.is_ok() || plan.is_undone() {
            // A rollback of an enclosing transaction must keep this outcome.
            for open in &mut self.store.open {
                open.applied.patch(&plan.base, &outcome);
            }
        }
        let mut late = Vec::new();
        let result = match executed {
            Ok(report) => {
                self.metrics.enforced(&report);
                for kept in &report.kept {
                    tracing::warn!(%kept, "another program changed this knob: it is left as it is");
                }
                let was_pending = |cgroup: &CgroupPath| !plan.base.pending_knobs(cgroup).is_empty();
                for (cgroup, cpus) in report.owed.iter().filter(|(cgroup, _)| !was_pending(cgroup)) {
                    tracing::info!(%cgroup, %cpus, "CPUs are not restored completely: cpuset partitions of other cgroups hold the rest");
                }
                for failed in report.late.iter().filter(|failed| !was_pending(&failed.step.cgroup)) {
                    tracing::warn!(cgroup = %failed.step.cgroup, error = %failed.error, "the original value cannot be restored yet; it is retried");
                }
                self.execution.migrations.add(report.moving);
                self.execution.migrations.collect(&self.metrics, &mut self.effects);
                late = report.late;
                Ok(())
            }
            Err(mut failure) => {
                self.metrics.failed(&failure);
                if !plan.is_undone() {
                    self.execution.migrations.add(mem::take(&mut failure.report.moving));
                }
                self.execution.enforcer.refresh();
                self.forget_disabled();
                Err(failure)
            }
        };
        let is_stored =
            if result.is_ok() { outcome.is_equal_when_written(&plan.intent) } else { plan.is_undone() };
        Ok(PlanOutcome { result, is_stored, late })
    }

    /// Records the value that another program wrote to a knob, before our value is written again. The cgroup gets the recorded value when
    /// the knob is restored.
    pub(crate) fn note_found(&mut self, drift: &Drift) {
        let Some(found) = drift.found.clone() else { return };
        self.store.state.applied.note_found(&drift.cgroup, &Values([(drift.knob, found)].into()));
        self.store_outcome();
    }

    /// Repairs a knob that drifted.
    pub(crate) fn repair(&mut self, drift: &Drift) -> Result<EnforcementReport, EnforceError> {
        let step = self.execution.enforcer.repair_step(&self.store.state.applied, drift);
        if drift.found.is_none() {
            self.enable_above(&step.cgroup, step.knob)?;
        }
        if !self.execution.enforcer.may_wait(std::slice::from_ref(&step)) {
            return self.execution.enforcer.repair(&self.store.state.applied, drift);
        }
        let (applied, drift) = (self.store.state.applied.clone(), drift.clone());
        self.wait_for(BTreeSet::from([step.cgroup]), move |enforcer| enforcer.repair(&applied, &drift))?
    }

    /// Enables the controllers that a missing knob requires. If the ledger cannot be stored before, they are not enabled and the knob stays
    /// missing.
    pub(super) fn enable_above(&mut self, cgroup: &CgroupPath, knob: Knob) -> Result<(), EnforceError> {
        let missing = self.execution.enforcer.missing_above(cgroup, knob)?;
        if missing.is_empty() {
            return Ok(());
        }
        self.note_enabled(&missing);
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored");
            self.forget_disabled();
            return Ok(());
        }
        self.execution.enforcer.enable(&missing)
    }

    /// Records controllers that are about to be enabled, also in the states to which open transactions roll back: a rollback does not
    /// disable controllers.
    fn note_enabled(&mut self, controllers: &EnabledControllers) {
        for state in self.store.all_mut() {
            state.enabled.note(controllers);
        }
    }

    /// Removes records of controllers that are not enabled, because a change failed or another program disabled them. If they are enabled
    /// again later, another program does it. Returns true if there were any.
    pub(crate) fn forget_disabled(&mut self) -> bool {
        let still = self.execution.enforcer.still_enabled(&self.store.state.enabled);
        let is_change = still != self.store.state.enabled;
        if is_change {
            for state in self.store.all_mut() {
                state.enabled = still.clone();
            }
        }
        is_change
    }

    /// Executes an operation that may block and affects these cgroups. Meanwhile, requests of the container runtime that affect other
    /// cgroups are answered.
    pub(super) fn wait_for<T: Send + 'static>(
        &mut self,
        cgroups: BTreeSet<CgroupPath>,
        work: impl FnOnce(&Enforcer) -> T + Send + 'static,
    ) -> Result<T, EnforceError> {
        // Only one operation runs at a time. Before the loop starts, there are no requests to answer.
        let Some(worker) = self.execution.worker.as_ref().filter(|_| self.execution.busy.is_none()) else {
            return Ok(work(&self.execution.enforcer));
        };
        let (sender, result) = mpsc::sync_channel(1);
        let done = worker.done.clone();
        let work = move |enforcer: &Enforcer| {
            // The receiver is closed only if the loop has ended.
            let _ = sender.send(work(enforcer));
            let _ = done.send(Message::Completed);
        };
        // If the thread has ended, the channel of the result is disconnected.
        let _ = worker.work.send(Box::new(work));
        self.execution.busy = Some(cgroups);
        let result = loop {
            match result.try_recv() {
                Ok(result) => break Ok(result),
                Err(TryRecvError::Disconnected) => {
                    break Err(EnforceError::Thread(io::Error::other(
                        "the thread that writes knobs has ended",
                    )));
                }
                Err(TryRecvError::Empty) => {}
            }
            health::beat();
            match self.next_meanwhile() {
                Some((command, overtakes)) => self.answer_meanwhile(command, overtakes),
                None => drop(self.execution.inbox.as_mut().map(|inbox| inbox.receive(WAKE_INTERVAL))),
            }
        };
        self.execution.busy = None;
        if let Some(inbox) = &mut self.execution.inbox {
            inbox.requeue_runtime(mem::take(&mut self.execution.deferred));
        }
        result
    }

    /// Removes the oldest command of the runtime that can be answered during the current operation; also returns true if it overtakes an
    /// earlier command.
    pub(super) fn next_meanwhile(&mut self) -> Option<(RuntimeCommand, bool)> {
        let mut inbox = self.execution.inbox.take()?;
        let next = inbox.next_answerable(|command| self.may_answer(command));
        self.execution.inbox = Some(inbox);
        next
    }

    /// Returns true if a command of the runtime can be handled during the current operation.
    fn may_answer(&self, command: &PodCommand) -> bool {
        let is_apart = |cgroup: &CgroupPath| {
            let top = |cgroup: &CgroupPath| cgroup.components().next().map(str::to_owned);
            // Memory protection is raised in all ancestors, so cgroups under the same top-level cgroup affect each other.
            let mut busy = self.execution.busy.iter().flatten();
            busy.all(|busy| top(busy) != top(cgroup))
                && !self.execution.enforcer.asks_systemd(&BTreeSet::from([cgroup.clone()]))
        };
        let is_container_apart =
            |id: &str| self.store.state.containers.get(id).is_none_or(|placed| is_apart(&placed.cgroup));
        match command {
            PodCommand::RunPod { .. } | PodCommand::Create { .. } | PodCommand::SendUpdates(_) => true,
            PodCommand::Bind { id, ask, .. } => {
                !self.is_deferred(id, None)
                    && is_container_apart(id)
                    && ask.as_ref().is_none_or(|ask| is_apart(&ask.cgroup))
            }
            PodCommand::Stopped { id, .. } => !self.is_deferred(id, None) && is_container_apart(id),
            PodCommand::PodStopped { uid, sandbox, .. } => {
                let mut containers = self.store.state.containers.values();
                !self.is_deferred("", Some(uid))
                    && containers.all(|placed| placed.of.sandbox != *sandbox || is_apart(&placed.cgroup))
            }
            PodCommand::Synchronize { .. } | PodCommand::Resize { .. } | PodCommand::ResizePod { .. } => {
                false
            }
        }
    }

    /// Returns true if a command for this container, or for the pod with this UID, is deferred.
    fn is_deferred(&self, id: &str, uid: Option<&str>) -> bool {
        self.execution.deferred.iter().any(|numbered| match &numbered.command {
            PodCommand::Create { ask, .. } => ask.id == id || uid == Some(ask.pod.pod.uid.as_str()),
            PodCommand::RunPod { ask, .. } => uid == Some(ask.pod.uid.as_str()),
            PodCommand::Bind { id: of, .. } => {
                let pod = self.store.state.containers.get(of).map(|placed| placed.of.pod.uid.as_str());
                of == id || uid.is_some() && uid == pod
            }
            _ => false,
        })
    }

    /// Handles a command of the runtime during the current operation. Its changes survive a rollback of open transactions.
    pub(super) fn answer_meanwhile(&mut self, command: RuntimeCommand, overtakes: bool) {
        let before = self.store.state.clone();
        if let Some(reply) = (self.execution.answer)(self, command, overtakes) {
            reply();
        }
        for open in &mut self.store.open {
            open.patch(&before, &self.store.state, &*self.policy.strategy);
        }
    }
}

#[cfg(test)]
pub(in crate::core) mod tests;

//! Carrying plans out: first stored, then written, then stored what came of it.
//!
//! Problem: a plan may wait: for pages that move to other nodes (two seconds), for systemd on the bus (ten). A container
//! runtime that asks meanwhile waits no longer than a fraction of a second.
//!
//! Algorithm: what may wait is done on a thread of its own. Until it is done, the reconciler answers what a runtime waits
//! for, unless that touches the same cgroups; nothing else is begun.
//!
//! Terms: a [`Transaction`] is a change of the state that is not finished yet. Dropped, it has not happened.
//!
//! Invariants: the state is stored before any knob is written for it. What is answered in between is part of the state,
//! and of what an open transaction goes back to. It is stored at once, and what is open with it: a start undoes an
//! admission that was not finished ([`State::admitting`]).

use std::{
    collections::BTreeSet,
    io, mem,
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        mpsc::{self, Sender, TryRecvError},
    },
    time::Duration,
};

use numaward_api::EnforcementMode;
use numaward_cgroup::{CgroupPath, knob::Knob};
use numaward_enforce::{
    AppliedSettings, Drift, EnabledControllers, EnforceError, EnforcementFailure, EnforcementPlan,
    EnforcementReport, Enforcer, SettingsChange, StepError,
};
use numaward_guarantee::{
    command::{Message, PodCommand},
    error::AdmissionError,
};
use numaward_model::{
    Values,
    health::{self, Heartbeats},
};
use numaward_topology::{CpuSet, NodeSet};
use tokio_util::sync::CancellationToken;

#[cfg(test)]
use super::disorder::{self, Disorder};
use super::{Core, HeldChange, Inbox, inbox::RuntimeCommand, migrations::Migrations};
use crate::spans;

/// How long the end of what is waited for may go unnoticed, should its message get lost.
const WAKE_INTERVAL: Duration = Duration::from_millis(250);

/// How long one write, or one question to systemd, may take before the thread for what may wait counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

type Work = Box<dyn FnOnce(&Enforcer) + Send>;

/// Writes knobs, and knows what is waited for.
pub(crate) struct Execution {
    pub(super) enforcer: Arc<Enforcer>,
    /// Once the loop runs: for what may wait.
    pub(super) worker: Option<Worker>,
    /// The cgroups of what is waited for.
    pub(super) busy: Option<BTreeSet<CgroupPath>>,
    /// Once the loop runs: what it is asked.
    pub(crate) inbox: Option<Inbox>,
    /// What the runtime asked, and what has to wait for what it asked before.
    pub(super) deferred: Vec<RuntimeCommand>,
    pub(super) migrations: Migrations,
}

/// Steps of a loop that gives way to the container runtime, between two looks for a call.
pub(super) const STEPS_PER_POLL: u32 = 8;

impl Execution {
    pub(super) fn new(enforcer: Enforcer) -> Self {
        Self {
            enforcer: Arc::new(enforcer),
            worker: None,
            busy: None,
            inbox: None,
            deferred: Vec::new(),
            migrations: Migrations::default(),
        }
    }

    /// Returns true while a container runtime waits for an answer.
    pub(super) fn is_runtime_waiting(&mut self) -> bool {
        self.inbox.as_mut().is_some_and(|inbox| {
            inbox.receive(Duration::ZERO);
            Inbox::has_runtime(inbox)
        })
    }

    /// Returns the condition on which a loop ends early, to be asked at each step: a container runtime waits. Where it is not
    /// on, it is always false.
    pub(super) fn interrupt_condition(&mut self, is_on: bool) -> impl FnMut() -> bool {
        let mut step = 0_u32;
        move || {
            step = step.wrapping_add(1);
            is_on && step.is_multiple_of(STEPS_PER_POLL) && self.is_runtime_waiting()
        }
    }
}

/// The thread for what may wait.
#[derive(Debug)]
pub(crate) struct Worker {
    work: Sender<Work>,
    done: Sender<Message>,
}

impl Worker {
    /// Starts it. It ends with this.
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

    /// Without a thread: what comes with it does the next work, and says whether there was any.
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

/// What came of a plan.
pub(super) struct PlanOutcome {
    pub(super) result: Result<(), Box<EnforcementFailure>>,
    /// Whether that is what was stored before.
    pub(super) is_stored: bool,
    /// Writes that were not done, of cgroups that are yet to get back what was found.
    pub(super) late: Vec<StepError>,
}

/// A change of the state that is not finished yet. Dropped, it has not happened.
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

impl DerefMut for Transaction<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.core.store.end(self.is_committed);
    }
}

impl Transaction<'_> {
    /// Whether anything changed.
    pub(super) fn is_change(&self) -> bool {
        self.core.store.is_changed()
    }

    /// Stores what changed, or nothing does.
    pub(super) fn store(mut self) -> Result<(), AdmissionError> {
        #[cfg(test)]
        if disorder::is_injected(Disorder::AnswerBeforeSave) {
            self.is_committed = true;
            return Ok(());
        }
        if self.is_change() {
            self.save()?;
        }
        self.is_committed = true;
        Ok(())
    }

    /// Stores what changed with what a plan intends, writes the knobs, stores what came of it. Nothing changes if it
    /// cannot be stored, or if what was written is undone.
    pub(super) fn carry_out(mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        let is_undone = plan.is_undone();
        let result = self.core.carry_out(plan);
        match &result {
            Err(AdmissionError::Failed(_)) if is_undone => self.roll_back(),
            Err(AdmissionError::Store(_)) => return result,
            _ => self.keep_in_enclosing(),
        }
        self.is_committed = true;
        result
    }

    /// Likewise, for a plan that gives settings: where these are not enforced, it is only said what would be written.
    pub(crate) fn enforce(mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        if self.mode() == EnforcementMode::On {
            return self.carry_out(plan);
        }
        self.log_dry_run(&plan);
        self.save()?;
        self.is_committed = true;
        Ok(())
    }

    /// Makes a change of what is held already, or none of it.
    pub(super) fn change_held(mut self, change: SettingsChange) -> Result<(), AdmissionError> {
        // Those who share what is nobody's leave the CPUs before they are given.
        self.follow_pool();
        let done = self.plan(change).map_err(AdmissionError::from).and_then(|plan| {
            if self.mode() == EnforcementMode::On {
                return self.core.carry_out(plan);
            }
            self.log_dry_run(&plan);
            Ok(self.save()?)
        });
        if done.is_err() {
            // What was written already is drift now, and goes back.
            self.roll_back();
            self.follow_pool();
            self.note_guarantees_changed();
        }
        self.is_committed = true;
        done
    }

    /// What was written stays written, also where a change around this one goes back.
    fn keep_in_enclosing(&mut self) {
        let of = &mut *self.core;
        if let Some((before, around)) = of.store.open.split_last_mut() {
            for open in around {
                open.patch(before, &of.store.state, &*of.policy.strategy);
            }
        }
    }

    /// Stores what was before. It goes on as an open change.
    fn roll_back(&mut self) {
        if let Some(before) = self.core.store.open.last() {
            self.core.store.state = before.clone();
        }
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored: a restart would bring back what was undone");
        }
    }
}

impl Core {
    /// Begins a change. It costs a few pointers.
    pub(crate) fn begin(&mut self) -> Transaction<'_> {
        self.store.begin();
        Transaction { core: self, is_committed: false }
    }

    /// Plans a change. Where systemd has to be asked for it, this may wait.
    pub(crate) fn plan(&mut self, change: SettingsChange) -> Result<EnforcementPlan, EnforceError> {
        let cgroups = change.cgroups(&self.store.state.applied);
        if !self.execution.enforcer.asks_systemd(&cgroups) {
            return self.execution.enforcer.plan(&self.store.state.applied, &change);
        }
        let applied = self.store.state.applied.clone();
        self.wait_for(cgroups, move |enforcer| enforcer.plan(&applied, &change))?
    }

    /// Says what a plan would write.
    fn log_dry_run(&self, plan: &EnforcementPlan) {
        for step in plan.steps() {
            tracing::info!(cgroup = %step.cgroup, knob = %step.knob, from = %step.from, to = %step.to, "dry run: would be written");
            self.metrics.would_write(step);
        }
    }

    /// The cgroup of a unit that runs, by systemd, which this waits for.
    pub(super) fn query_unit_cgroup(&mut self, unit: &str) -> Result<Option<CgroupPath>, EnforceError> {
        let unit = unit.to_owned();
        // No cgroup is touched.
        self.wait_for(BTreeSet::new(), move |enforcer| enforcer.unit_cgroup(&unit))?
    }

    /// Whether a unit may be started again, by systemd, which this waits for.
    pub(crate) fn is_unit_loaded(&mut self, unit: &str) -> Result<bool, EnforceError> {
        let unit = unit.to_owned();
        self.wait_for(BTreeSet::new(), move |enforcer| enforcer.is_unit_loaded(&unit))?
    }

    /// The CPUs that a cgroup was set to before us.
    pub(super) fn cpus_found(&mut self, path: &CgroupPath) -> Result<CpuSet, EnforceError> {
        self.found(path, Enforcer::cpus_found)
    }

    /// The nodes that a cgroup was set to before us.
    pub(super) fn nodes_found(&mut self, path: &CgroupPath) -> Result<NodeSet, EnforceError> {
        self.found(path, Enforcer::nodes_found)
    }

    /// What a cgroup was set to before us. Where systemd has to be asked for it, this may wait.
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

    /// Stores what is intended, writes the knobs, stores what came of it.
    pub(super) fn carry_out(&mut self, plan: EnforcementPlan) -> Result<(), AdmissionError> {
        let done = self.write(plan)?;
        if !done.is_stored {
            self.store_outcome();
        }
        done.result.map_err(AdmissionError::from)
    }

    /// Stores what came of a plan. What is stored otherwise brings more back than it has to; that does no harm.
    pub(super) fn store_outcome(&mut self) {
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored");
        }
    }

    /// Stores what is intended, and writes the knobs. What came of it is part of the state, and not stored yet where
    /// [`PlanOutcome`] says so.
    pub(super) fn write(&mut self, plan: EnforcementPlan) -> Result<PlanOutcome, AdmissionError> {
        let _span = spans::reconcile();
        self.store.state.applied.patch(&plan.base, &plan.intent);
        self.note_enabled(&plan.enable);
        if let Err(error) = self.save() {
            self.store.state.applied.patch(&plan.intent, &plan.base);
            self.forget_disabled();
            return Err(error.into());
        }
        let span = spans::knobs(plan.steps().len());
        let plan = Arc::new(plan);
        // The writes for many take long together.
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
        self.effects.widened.extend(outcome.thread_masks_since(&plan.base));
        if executed.is_ok() || plan.is_undone() {
            // Likewise where a change around it goes back.
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
                    tracing::info!(%cgroup, %cpus, "has not got back all CPUs: partitions have the others");
                }
                for failed in report.late.iter().filter(|failed| !was_pending(&failed.step.cgroup)) {
                    tracing::warn!(cgroup = %failed.step.cgroup, error = %failed.error, "cannot get back yet what it had");
                }
                self.migrations_begun(report.moving);
                self.collect_migrations();
                late = report.late;
                Ok(())
            }
            Err(mut failure) => {
                self.metrics.failed(&failure);
                if !plan.is_undone() {
                    self.migrations_begun(mem::take(&mut failure.report.moving));
                }
                self.execution.enforcer.refresh();
                self.forget_disabled();
                Err(failure)
            }
        };
        let is_stored = if result.is_ok() { outcome == plan.intent } else { plan.is_undone() };
        Ok(PlanOutcome { result, is_stored, late })
    }

    /// Tries again to give a cgroup back what was found in knobs that nothing asks for any more. An error says why
    /// not all are, without the cgroup.
    pub(crate) fn retry_restore(&mut self, path: &CgroupPath) -> Result<(), String> {
        let of_cgroup = format!("{path}: ");
        self.restore_pending(path).map_err(|error| match error.strip_prefix(&of_cgroup) {
            Some(reason) => reason.to_owned(),
            None => error,
        })
    }

    fn restore_pending(&mut self, path: &CgroupPath) -> Result<(), String> {
        let settings = self.applied_settings(path).filter(|settings| !settings.is_empty()).cloned();
        let plan = self
            .plan(SettingsChange::Each(vec![(path.clone(), settings)]))
            .map_err(|error| error.to_string())?;
        let done = self.write(plan).map_err(|error| error.to_string())?;
        if !done.is_stored {
            self.store_outcome();
        }
        self.effects.held.push(HeldChange::Rewritten(path.clone()));
        if let Some(late) = done.late.into_iter().next() {
            return Err(late.error.to_string());
        }
        done.result.map_err(|failure| failure.to_string())?;
        let record = self.store.state.applied.get(path);
        match record
            .filter(|record| record.has_pending_cpus())
            .and_then(|record| record.written.0.get(&Knob::CpusetCpus))
        {
            Some(cpus) => {
                Err(format!("it has CPUs {cpus} so far: cpuset partitions of other cgroups have the others"))
            }
            None => Ok(()),
        }
    }

    /// What others have set a knob to, over which ours is about to be written again, is what its cgroup gets back.
    pub(crate) fn note_found(&mut self, drift: &Drift) {
        let Some(found) = drift.found.clone() else { return };
        self.store.state.applied.note_found(&drift.cgroup, &Values([(drift.knob, found)].into()));
        self.store_outcome();
    }

    /// Writes one knob again that drifted.
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

    /// Enables the controllers of a knob that is not there. Where that cannot be stored before, the knob stays missing.
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

    /// Takes note of controllers that are about to be enabled: they stay so, also where a change goes back.
    fn note_enabled(&mut self, controllers: &EnabledControllers) {
        for state in self.store.all_mut() {
            state.enabled.note(controllers);
        }
    }

    /// Forgets controllers that are not enabled, as a change has failed or somebody else disabled them: if they are enabled
    /// again, that is not by us. Says whether there were any.
    pub(super) fn forget_disabled(&mut self) -> bool {
        let still = self.execution.enforcer.still_enabled(&self.store.state.enabled);
        let is_change = still != self.store.state.enabled;
        if is_change {
            for state in self.store.all_mut() {
                state.enabled = still.clone();
            }
        }
        is_change
    }

    /// Does what may wait; meanwhile answers what the container runtime waits for and does not touch these cgroups.
    pub(super) fn wait_for<T: Send + 'static>(
        &mut self,
        cgroups: BTreeSet<CgroupPath>,
        work: impl FnOnce(&Enforcer) -> T + Send + 'static,
    ) -> Result<T, EnforceError> {
        // One thing at a time. Before the loop runs, nobody asks.
        let Some(worker) = self.execution.worker.as_ref().filter(|_| self.execution.busy.is_none()) else {
            return Ok(work(&self.execution.enforcer));
        };
        let (sender, result) = mpsc::sync_channel(1);
        let done = worker.done.clone();
        let work = move |enforcer: &Enforcer| {
            // The loop waits for it, or has ended.
            let _ = sender.send(work(enforcer));
            let _ = done.send(Message::Completed);
        };
        // A thread that has ended has dropped its end of the result.
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

    /// What the runtime asked first of that which can be answered while something else is waited for, and whether it
    /// overtakes something.
    pub(super) fn next_meanwhile(&mut self) -> Option<(RuntimeCommand, bool)> {
        let mut inbox = self.execution.inbox.take()?;
        let next = inbox.next_answerable(|command| self.may_answer(command));
        self.execution.inbox = Some(inbox);
        next
    }

    /// Whether a command of the runtime can be handled although something is waited for.
    fn may_answer(&self, command: &PodCommand) -> bool {
        let is_apart = |cgroup: &CgroupPath| {
            let top = |cgroup: &CgroupPath| cgroup.components().next().map(str::to_owned);
            // What protects memory is raised in all cgroups above.
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

    /// Whether something of this container, or of the pod with this UID, was tried too early and is to be tried again.
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

    /// Handles a command of the runtime while something is waited for. What changes is no part of what is waited for.
    pub(super) fn answer_meanwhile(&mut self, command: RuntimeCommand, overtakes: bool) {
        let before = self.store.state.clone();
        if let Some(reply) = self.pod_command(command, overtakes) {
            reply();
        }
        for open in &mut self.store.open {
            open.patch(&before, &self.store.state, &*self.policy.strategy);
        }
    }
}

#[cfg(test)]
pub(in crate::core) mod tests;

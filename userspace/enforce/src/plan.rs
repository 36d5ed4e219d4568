//! Changes of settings, and the plans that make them.

use std::{collections::BTreeSet, time::Duration};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};
use numaward_model::Settings;

use super::{
    applied::{AppliedSettings, Record},
    backend::StepError,
    controllers::EnabledControllers,
    drift::Drift,
    migration::MigrationState,
    order::WriteStep,
};

/// A change of the settings of cgroups.
#[derive(Clone, Debug)]
pub enum SettingsChange {
    /// Replaces the settings of a cgroup.
    Hold(CgroupPath, Settings),
    /// Replaces the settings of each of these cgroups. An error ends the writes to its cgroup and undoes nothing.
    HoldAll(Vec<(CgroupPath, Settings)>),
    /// Removes the settings of a cgroup and restores the original values.
    Release(CgroupPath),
    /// Replaces the settings of each of these cgroups, or restores its original values. An error does not undo the
    /// other writes.
    Each(Vec<(CgroupPath, Option<Settings>)>),
    /// Changes no settings: finishes the work that a crash interrupted, removes records of cgroups that are gone, and
    /// writes values that drifted.
    Upkeep,
}

impl SettingsChange {
    /// Returns the cgroups of the change and those with pending CPUs that it may restore.
    pub fn cgroups(&self, applied: &AppliedSettings) -> BTreeSet<CgroupPath> {
        let mut cgroups: BTreeSet<_> = match self {
            Self::Hold(path, _) | Self::Release(path) => [path.clone()].into(),
            Self::HoldAll(holds) => holds.iter().map(|(path, _)| path.clone()).collect(),
            Self::Each(changes) => changes.iter().map(|(path, _)| path.clone()).collect(),
            Self::Upkeep => applied.iter().map(|(path, _)| path.clone()).collect(),
        };
        cgroups.extend(self.pending_cpus_beside(applied));
        cgroups
    }

    /// Returns the siblings with pending CPUs that may be restored because partitions end.
    pub(super) fn pending_cpus_beside(&self, applied: &AppliedSettings) -> BTreeSet<CgroupPath> {
        match self {
            Self::Release(path) => applied.pending_cpus_beside(&[path]),
            Self::Each(changes) => {
                let ends = |settings: &Option<Settings>| {
                    settings.as_ref().is_none_or(|settings| !settings.has_partition())
                };
                let ended = changes.iter().filter(|(_, settings)| ends(settings));
                let mut owed = applied.pending_cpus_beside(&ended.map(|(path, _)| path).collect::<Vec<_>>());
                owed.retain(|path| changes.iter().all(|(other, _)| other != path));
                owed
            }
            Self::Hold(..) | Self::HoldAll(_) | Self::Upkeep => BTreeSet::new(),
        }
    }
}

/// The writes that make a change, and the state to store before and after them.
#[derive(Clone, Debug)]
pub struct EnforcementPlan {
    /// State at the time of planning.
    pub base: AppliedSettings,
    /// State to store before the plan is executed.
    pub intent: AppliedSettings,
    /// State after all writes succeeded.
    pub outcome: AppliedSettings,
    /// Controllers to enable. To be stored before, as `intent` is.
    pub enable: EnabledControllers,
    /// The writes, in their order.
    pub(super) steps: Vec<WriteStep>,
    /// Knobs that another program has changed and that keep its values.
    pub(super) kept: Vec<Drift>,
    /// Drop-ins of the daemon to remove once the original values are restored.
    pub(super) drop_ins: Vec<(CgroupPath, Knob)>,
    /// Cgroups with pending CPUs that the plan tries to restore; a failure to do so is no error.
    pub(super) owed: BTreeSet<CgroupPath>,
    /// Settings that the plan applies.
    pub(super) holds: Vec<(CgroupPath, Settings)>,
    /// If true, an error undoes the writes before it.
    pub(super) is_undone: bool,
    /// The time that is left to read affinities of threads for it.
    pub(super) thread_time: Duration,
    /// Number of cgroups that share this time.
    pub(super) unread_cgroups: usize,
}

impl EnforcementPlan {
    pub fn steps(&self) -> &[WriteStep] {
        &self.steps
    }

    /// Returns the cgroups with writes.
    pub fn cgroups(&self) -> BTreeSet<CgroupPath> {
        self.steps.iter().map(|step| step.cgroup.clone()).collect()
    }

    /// Returns the state after execution. A knob that was not written keeps its intended value, and CPUs that were
    /// not restored in full stay pending.
    pub fn outcome_of(&self, report: &EnforcementReport) -> AppliedSettings {
        let mut outcome = self.outcome.clone();
        let is_all_done = report.written.len() + report.gone.len() == self.steps.len();
        let is_done =
            |step: &&WriteStep| is_all_done || report.written.contains(step) || report.gone.contains(step);
        for step in self.steps.iter().filter(|step| !is_done(step)) {
            let intended = self.intent.get(&step.cgroup).and_then(|record| record.written.0.get(&step.knob));
            if let Some(intended) = intended {
                self.note_unwritten(&mut outcome, &step.cgroup, step.knob, intended);
            }
        }
        for (path, held) in &report.owed {
            self.note_unwritten(&mut outcome, path, Knob::CpusetCpus, held);
        }
        outcome
    }

    /// Returns the state after the plan failed and its writes were undone: the original state, with a pending restore
    /// for each write that could not be undone.
    pub fn undone(&self, failed: &[StepError]) -> AppliedSettings {
        let mut outcome = self.base.clone();
        for StepError { step, .. } in failed {
            match outcome.get(&step.cgroup).map(|record| Record::clone(record)) {
                // The value that was held before has drifted now; the present one is the daemon's as well.
                Some(mut record) if record.written.0.contains_key(&step.knob) => {
                    record.replaced.0.insert(step.knob, step.from.clone());
                    outcome.update(&step.cgroup, record);
                }
                _ => self.note_unwritten(&mut outcome, &step.cgroup, step.knob, &step.from),
            }
        }
        outcome
    }

    /// Records the value of a knob that was not written.
    fn note_unwritten(
        &self,
        outcome: &mut AppliedSettings,
        path: &CgroupPath,
        knob: Knob,
        written: &KnobValue,
    ) {
        let Some(intent) = self.intent.get(path) else { return };
        let Some(found) = intent.found.0.get(&knob) else { return };
        let mut record = match outcome.get(path) {
            Some(record) => Record::clone(record),
            None => Record::new(intent.id, intent.owner.clone()),
        };
        record.written.0.insert(knob, written.clone());
        record.found.0.insert(knob, found.clone());
        if let Some(replaced) = intent.replaced.0.get(&knob) {
            record.replaced.0.insert(knob, replaced.clone());
        }
        record.own_drop_ins.extend(intent.own_drop_ins.get(&knob));
        if knob == Knob::CpusetCpus {
            record.thread_masks.clone_from(&intent.thread_masks);
        }
        outcome.update(path, record);
    }

    /// Returns whether a write restores the original value.
    pub(super) fn restores_original(&self, step: &WriteStep) -> bool {
        let after = self.outcome.get(&step.cgroup);
        after.is_none_or(|record| !record.written.0.contains_key(&step.knob))
    }

    /// Returns whether a knob's property had no drop-in before this plan.
    pub(super) fn creates_drop_in(&self, step: &WriteStep) -> bool {
        let owns = |applied: &AppliedSettings| {
            applied.get(&step.cgroup).is_some_and(|record| record.own_drop_ins.contains(&step.knob))
        };
        owns(&self.intent) && !owns(&self.base)
    }

    /// Returns whether a failed write is no error, because it restores a value and will be repeated.
    pub(super) fn may_be_late(&self, failed: &StepError) -> bool {
        self.owed.contains(&failed.step.cgroup)
            || failed.error.is_in_use() && self.restores_original(&failed.step)
    }

    /// Returns whether the plan applies settings to several cgroups.
    pub fn holds_several(&self) -> bool {
        self.holds.len() > 1
    }

    /// Returns whether an error undoes the writes before it.
    pub fn is_undone(&self) -> bool {
        self.is_undone
    }
}

/// The writes that an executed plan has made.
#[derive(Debug, Default)]
pub struct EnforcementReport {
    /// The writes, in their order.
    pub written: Vec<WriteStep>,
    /// Migrations of pages, by cgroup.
    pub moving: Vec<(CgroupPath, MigrationState)>,
    /// Knobs that another program changed since the daemon wrote them; a release keeps their values.
    pub kept: Vec<Drift>,
    /// Writes that were not necessary because their cgroups are gone.
    pub gone: Vec<WriteStep>,
    /// Cgroups that got back only a part of their CPUs, because partitions have the rest, with the CPUs that they hold.
    pub owed: Vec<(CgroupPath, KnobValue)>,
    /// Failed writes that restore a value and will be repeated.
    pub late: Vec<StepError>,
}

//! What is to change, and the writes that make it so.

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
    error::EnforceError,
    migration::MigrationState,
    order::WriteStep,
};

/// What is to change.
#[derive(Clone, Debug)]
pub enum SettingsChange {
    /// The cgroup is to hold these settings, instead of those it held.
    Hold(CgroupPath, Settings),
    /// Each of these cgroups is to hold these settings, instead of those it held. What fails in one ends the writes to it,
    /// and undoes nothing.
    HoldAll(Vec<(CgroupPath, Settings)>),
    /// The cgroup gets back what was found.
    Release(CgroupPath),
    /// Each of these cgroups is to hold these settings, or gets back what was found. What fails does not undo the
    /// rest.
    Each(Vec<(CgroupPath, Option<Settings>)>),
    /// Nothing new: finish what a crash left, forget cgroups that are gone, write what does not hold.
    Upkeep,
}

impl SettingsChange {
    /// The cgroups that it is about, where these are held, and those that may get back CPUs by it.
    pub fn cgroups(&self, applied: &AppliedSettings) -> BTreeSet<CgroupPath> {
        let mut cgroups: BTreeSet<_> = match self {
            Self::Hold(path, _) | Self::Release(path) => [path.clone()].into(),
            Self::HoldAll(holds) => holds.iter().map(|(path, _)| path.clone()).collect(),
            Self::Each(changes) => changes.iter().map(|(path, _)| path.clone()).collect(),
            Self::Upkeep => applied.iter().map(|(path, _)| path.clone()).collect(),
        };
        cgroups.extend(self.owed_beside(applied));
        cgroups
    }

    /// Those that may get back CPUs, beside these cgroups, as partitions end.
    pub(super) fn owed_beside(&self, applied: &AppliedSettings) -> BTreeSet<CgroupPath> {
        match self {
            Self::Release(path) => applied.owed_beside(&[path]),
            Self::Each(changes) => {
                let ends = |settings: &Option<Settings>| {
                    settings.as_ref().is_none_or(|settings| !settings.has_partition())
                };
                let ended = changes.iter().filter(|(_, settings)| ends(settings));
                let mut owed = applied.owed_beside(&ended.map(|(path, _)| path).collect::<Vec<_>>());
                owed.retain(|path| changes.iter().all(|(other, _)| other != path));
                owed
            }
            Self::Hold(..) | Self::HoldAll(_) | Self::Upkeep => BTreeSet::new(),
        }
    }
}

/// The way from what is to what is wanted.
#[derive(Clone, Debug)]
pub struct EnforcementPlan {
    /// What was true when it was planned.
    pub base: AppliedSettings,
    /// What to store before the plan is executed.
    pub intent: AppliedSettings,
    /// What is true afterwards.
    pub outcome: AppliedSettings,
    /// Controllers to enable. To be stored before, as `intent` is.
    pub enable: EnabledControllers,
    /// The writes, in their order.
    pub(super) steps: Vec<WriteStep>,
    /// What somebody else has changed and is left as it is.
    pub(super) kept: Vec<Drift>,
    /// Drop-ins of ours that are of no use once the knobs have got back what was found: the unit and the knob.
    pub(super) drop_ins: Vec<(CgroupPath, Knob)>,
    /// Those that may get back CPUs by it: where they do not, nothing has failed.
    pub(super) owed: BTreeSet<CgroupPath>,
    /// What is to be held from now on, if anything.
    pub(super) holds: Vec<(CgroupPath, Settings)>,
    /// Whether a write that fails undoes those before it.
    pub(super) is_undone: bool,
    /// The time that is left to read affinities of threads for it.
    pub(super) thread_time: Duration,
}

impl EnforcementPlan {
    /// The writes, in their order.
    pub fn steps(&self) -> &[WriteStep] {
        &self.steps
    }

    /// The cgroups that are written.
    pub fn cgroups(&self) -> BTreeSet<CgroupPath> {
        self.steps.iter().map(|step| step.cgroup.clone()).collect()
    }

    /// What is true after what was done: a knob of which a write was not done stays as intended, and of a cgroup that has
    /// not got back all CPUs it is still known which those are.
    pub fn outcome_of(&self, report: &EnforcementReport) -> AppliedSettings {
        let mut outcome = self.outcome.clone();
        let is_all_done = report.written.len() + report.gone.len() == self.steps.len();
        let is_done =
            |step: &&WriteStep| is_all_done || report.written.contains(step) || report.gone.contains(step);
        for step in self.steps.iter().filter(|step| !is_done(step)) {
            let intended = self.intent.get(&step.cgroup).and_then(|record| record.written.0.get(&step.knob));
            if let Some(intended) = intended {
                self.note_left(&mut outcome, &step.cgroup, step.knob, intended);
            }
        }
        for (path, held) in &report.owed {
            self.note_left(&mut outcome, path, Knob::CpusetCpus, held);
        }
        outcome
    }

    /// What is true after this plan failed and was undone: what was true before. The writes that `failed` to undo it are yet to be given
    /// back.
    pub fn undone(&self, failed: &[StepError]) -> AppliedSettings {
        let mut outcome = self.base.clone();
        for StepError { step, .. } in failed {
            let known = outcome.get(&step.cgroup).and_then(|record| record.written.0.get(&step.knob));
            // What was held before has drifted now.
            if known.is_none() {
                self.note_left(&mut outcome, &step.cgroup, step.knob, &step.from);
            }
        }
        outcome
    }

    /// Takes note of what was written to a knob that is not as it is to be.
    fn note_left(&self, outcome: &mut AppliedSettings, path: &CgroupPath, knob: Knob, written: &KnobValue) {
        let Some(intent) = self.intent.get(path) else { return };
        let Some(found) = intent.found.0.get(&knob) else { return };
        let mut record = match outcome.get(path) {
            Some(record) => Record::clone(record),
            None => Record::new(intent.id, intent.owner.clone()),
        };
        record.written.0.insert(knob, written.clone());
        record.found.0.insert(knob, found.clone());
        record.own_drop_ins.extend(intent.own_drop_ins.get(&knob));
        if knob == Knob::CpusetCpus {
            record.thread_masks.clone_from(&intent.thread_masks);
        }
        outcome.put(path, record);
    }

    /// Whether a write gives back what was found.
    pub(super) fn gives_back(&self, step: &WriteStep) -> bool {
        let after = self.outcome.get(&step.cgroup);
        after.is_none_or(|record| !record.written.0.contains_key(&step.knob))
    }

    /// Whether a knob's property had no drop-in before this plan.
    pub(super) fn made_drop_in(&self, step: &WriteStep) -> bool {
        let owns = |applied: &AppliedSettings| {
            applied.get(&step.cgroup).is_some_and(|record| record.own_drop_ins.contains(&step.knob))
        };
        owns(&self.intent) && !owns(&self.base)
    }

    /// Whether nothing has failed although this write was not done: it gives something back, and is tried again.
    pub(super) fn may_be_late(&self, failed: &StepError) -> bool {
        self.owed.contains(&failed.step.cgroup)
            || matches!(failed.error, EnforceError::InUse { .. }) && self.gives_back(&failed.step)
    }

    /// Whether several cgroups are to hold something from now on.
    pub fn holds_several(&self) -> bool {
        self.holds.len() > 1
    }

    /// Whether a write that fails undoes those before it.
    pub fn is_undone(&self) -> bool {
        self.is_undone
    }
}

/// What a plan has done.
#[derive(Debug, Default)]
pub struct EnforcementReport {
    /// The writes, in their order.
    pub written: Vec<WriteStep>,
    /// Pages that were moved, by cgroup.
    pub moving: Vec<(CgroupPath, MigrationState)>,
    /// Knobs that somebody else changed since we wrote them: a release leaves them as they are.
    pub kept: Vec<Drift>,
    /// Writes that were not needed, as their cgroups are gone.
    pub gone: Vec<WriteStep>,
    /// Cgroups that have got back these CPUs alone so far, as partitions have the others.
    pub owed: Vec<(CgroupPath, KnobValue)>,
    /// Writes that were not done, of cgroups that are yet to get back what was found.
    pub late: Vec<StepError>,
}

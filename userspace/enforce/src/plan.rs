//! What is to change, and the writes that make it so.

use std::collections::BTreeSet;

use numaward_cgroup::CgroupPath;
use numaward_model::Settings;

use super::{applied::AppliedSettings, controllers::EnabledControllers, drift::Drift, order::Step};

/// What is to change.
#[derive(Clone, Debug)]
pub enum Change {
    /// The cgroup is to hold these settings, instead of those it held.
    Hold(CgroupPath, Settings),
    /// The cgroup gets back what was found.
    Release(CgroupPath),
    /// Each of these cgroups is to hold these settings, or gets back what was found. What fails does not undo the
    /// rest.
    Each(Vec<(CgroupPath, Option<Settings>)>),
    /// Nothing new: finish what a crash left, forget cgroups that are gone, write what does not hold.
    Upkeep,
}

impl Change {
    /// The cgroups that it is about, where these are held.
    pub fn cgroups(&self, applied: &AppliedSettings) -> BTreeSet<CgroupPath> {
        match self {
            Self::Hold(path, _) | Self::Release(path) => [path.clone()].into(),
            Self::Each(changes) => changes.iter().map(|(path, _)| path.clone()).collect(),
            Self::Upkeep => applied.iter().map(|(path, _)| path.clone()).collect(),
        }
    }
}

/// The way from what is to what is wanted.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What was true when it was planned.
    pub base: AppliedSettings,
    /// What to store before the plan is executed.
    pub intent: AppliedSettings,
    /// What is true afterwards.
    pub outcome: AppliedSettings,
    /// Controllers to enable. To be stored before, as `intent` is.
    pub enable: EnabledControllers,
    /// The writes, in their order.
    pub(super) steps: Vec<Step>,
    /// What somebody else has changed and is left as it is.
    pub(super) kept: Vec<Drift>,
    /// What is to be held, if anything: then a failed write undoes the others.
    pub(super) hold: Option<(CgroupPath, Settings)>,
}

impl Plan {
    /// The writes, in their order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The cgroups that are written.
    pub fn cgroups(&self) -> BTreeSet<CgroupPath> {
        self.steps.iter().map(|step| step.cgroup.clone()).collect()
    }

    /// What is true where only these of the writes were done: a cgroup of which one was not stays as intended.
    pub fn outcome_of(&self, written: &[Step]) -> AppliedSettings {
        let mut outcome = self.outcome.clone();
        for step in self.steps.iter().filter(|step| !written.contains(step)) {
            if let Some(record) = self.intent.get(&step.cgroup) {
                outcome.insert(step.cgroup.clone(), record.clone());
            }
        }
        outcome
    }

    /// Whether a write that fails undoes those before it.
    pub fn is_undone(&self) -> bool {
        self.hold.is_some()
    }
}

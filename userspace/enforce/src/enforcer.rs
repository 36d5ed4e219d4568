//! Execution of plans, and detection of drift.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use numaward_cgroup::{
    CgroupId, CgroupPath,
    knob::{Knob, KnobError, KnobValue, Limit, enable_controllers},
    read,
};
use numaward_model::{Settings, health};
use numaward_topology::{Bytes, CpuSet, HugepageSize};
use parking_lot::Mutex;

use super::{
    applied::{AppliedSettings, Owner, Record, id_of},
    backend::{Cgroupfs, EnforcerOptions, StepError, covers, unset},
    controllers::{EnabledControllers, is_enabled},
    drift::{Drift, DriftKind},
    error::EnforceError,
    migration::MigrationState,
    order::WriteStep,
    plan::{EnforcementPlan, EnforcementReport},
    systemd::{self, Systemd},
};

/// Plans and writes settings.
#[derive(Debug)]
pub struct Enforcer {
    pub(super) cgroupfs: Cgroupfs,
    pub(super) systemd: Option<Systemd>,
    /// Protection claimed by the children of a cgroup, as last read. Cleared by [`Enforcer::refresh`].
    pub(super) claims: Mutex<HashMap<(CgroupPath, Knob), BTreeMap<CgroupPath, Limit>>>,
}

/// Error of a plan that was not executed in full.
#[derive(Debug, thiserror::Error)]
#[error("{error}{}", further_errors(.others, .undo))]
pub struct EnforcementFailure {
    /// The first error.
    #[source]
    pub error: EnforceError,
    /// The write that failed; `None` if the error came before the first write.
    pub step: Option<WriteStep>,
    /// The other writes that failed.
    pub others: Vec<StepError>,
    /// Writes that were to undo earlier ones, and failed.
    pub undo: Vec<StepError>,
    /// The writes before the failure, which have been undone if the plan is one that is undone.
    pub report: EnforcementReport,
}

fn further_errors(others: &[StepError], undo: &[StepError]) -> String {
    let failed = others.iter().chain(undo);
    failed.fold(String::new(), |text, failed| text + "; then " + &failed.error.to_string())
}

impl EnforcementFailure {
    /// Creates a failure before the first write.
    pub fn before_writes(error: EnforceError) -> Box<Self> {
        let (others, undo, report) = (Vec::new(), Vec::new(), EnforcementReport::default());
        Box::new(Self { error, step: None, others, undo, report })
    }

    /// Splits the failure by cgroup: each gets the first error in itself or in one of its ancestors. An error before
    /// the first write applies to all.
    pub fn split(self, cgroups: &[&CgroupPath]) -> Vec<Option<Box<Self>>> {
        let mut parts: Vec<Option<Box<Self>>> = cgroups.iter().map(|_| None).collect();
        let others = self.others.into_iter().map(|failed| (failed.error, Some(failed.step)));
        for (error, step) in [(self.error, self.step)].into_iter().chain(others) {
            let message = error.to_string();
            let mut first = Some(error);
            let is_hit = |cgroup: &CgroupPath| step.as_ref().is_none_or(|step| step.cgroup.contains(cgroup));
            for (part, _) in parts.iter_mut().zip(cgroups).filter(|(part, of)| part.is_none() && is_hit(of)) {
                let error = first.take();
                let error = error.unwrap_or_else(|| EnforceError::Shared { message: message.clone() });
                *part = Some(Box::new(Self { step: step.clone(), ..*Self::before_writes(error) }));
            }
        }
        parts
    }
}

/// Returns the new limit if a write lowers it.
fn lowered(step: &WriteStep) -> Option<Bytes> {
    match (&step.from, &step.to) {
        (KnobValue::Limit(from), KnobValue::Limit(to @ Limit::Bytes(bytes))) if to < from => Some(*bytes),
        _ => None,
    }
}

impl Enforcer {
    /// Creates an enforcer for the cgroup v2 hierarchy mounted at `root`. With `systemd`, cgroups of units are written
    /// through it; without, all are written directly.
    pub fn new(root: PathBuf, systemd: Option<Systemd>, options: EnforcerOptions) -> Self {
        Self { cgroupfs: Cgroupfs::new(root, options), systemd, claims: Mutex::default() }
    }

    /// Returns the mount point of the hierarchy.
    pub fn root(&self) -> &Path {
        self.cgroupfs.root()
    }

    /// Returns the program that writes the knobs of a cgroup.
    pub fn owner(&self, path: &CgroupPath) -> Owner {
        match self.systemd {
            Some(_) => Owner::under_systemd(path),
            None => Owner::Cgroupfs,
        }
    }

    /// Clears the cached claims of other cgroups, so that the next plan reads them again.
    pub fn refresh(&self) {
        self.claims.lock().clear();
    }

    /// Returns whether systemd is available.
    pub fn has_systemd(&self) -> bool {
        self.systemd.is_some()
    }

    /// Returns the cgroup of a running unit; `None` if the unit is not running or systemd is not available.
    pub fn unit_cgroup(&self, unit: &str) -> Result<Option<CgroupPath>, EnforceError> {
        let Some(systemd) = &self.systemd else { return Ok(None) };
        match systemd.cgroup_of(unit) {
            Ok(path) => Ok(path.parse().ok()),
            Err(EnforceError::UnknownUnit { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether systemd could start a unit; false if systemd is not available.
    pub fn is_unit_loaded(&self, unit: &str) -> Result<bool, EnforceError> {
        let Some(systemd) = &self.systemd else { return Ok(false) };
        match systemd.is_loaded(unit) {
            Err(EnforceError::UnknownUnit { .. }) => Ok(false),
            loaded => loaded,
        }
    }

    /// Returns whether a plan for these cgroups requires calls to systemd.
    pub fn asks_systemd(&self, cgroups: &BTreeSet<CgroupPath>) -> bool {
        let is_systemds = |path: CgroupPath| matches!(self.owner(&path), Owner::Systemd(_));
        self.systemd.is_some() && cgroups.iter().flat_map(CgroupPath::ancestors).any(is_systemds)
    }

    /// Returns whether these writes may take long: pages may have to be moved or reclaimed, mappings are read, or systemd
    /// is called.
    pub fn may_wait(&self, steps: &[WriteStep]) -> bool {
        let may_wait = |step: &WriteStep| {
            step.knob == Knob::CpusetMems
                || self.is_systemds(&step.owner, step.knob)
                || self.lowers_slowly(step)
        };
        steps.iter().any(may_wait)
    }

    /// Returns whether a write lowers a limit and takes long: the kernel reclaims memory, because the limit falls below the charged
    /// memory, or the mappings of processes are read before.
    fn lowers_slowly(&self, step: &WriteStep) -> bool {
        let (Some(limit), dir) = (lowered(step), step.cgroup.dir(self.root())) else { return false };
        match step.knob {
            Knob::MemoryHigh | Knob::MemoryMax => {
                read::memory_current(&dir).is_ok_and(|charged| charged > limit)
            }
            Knob::HugetlbMax(_) => read::populated(&dir).unwrap_or(true),
            _ => false,
        }
    }

    /// Writes the knobs of a plan. The caller must have stored the plan's `intent` and `enable` before.
    pub fn execute(&self, plan: &EnforcementPlan) -> Result<EnforcementReport, Box<EnforcementFailure>> {
        let mut report = EnforcementReport { kept: plan.kept.clone(), ..EnforcementReport::default() };
        let mut failures = match self.prepare(plan) {
            Ok(excluded) => excluded,
            Err(error) => {
                return Err(Box::new(EnforcementFailure {
                    report,
                    ..*EnforcementFailure::before_writes(error)
                }));
            }
        };
        let mut half_written: &[WriteStep] = &[];
        // Consecutive writes to one unit are sent together, except for `memory.max`, which may have to keep its value.
        let go_together = |a: &WriteStep, b: &WriteStep| {
            [a, b].iter().all(|step| step.knob != Knob::MemoryMax)
                && a.cgroup == b.cgroup
                && self.is_systemds(&a.owner, a.knob)
                && self.is_systemds(&b.owner, b.knob)
        };
        for batch in plan.steps.chunk_by(go_together) {
            let is_held = |step: &WriteStep| plan.holds.iter().any(|(path, _)| *path == step.cgroup);
            let has_failed =
                |step: &WriteStep| failures.iter().any(|failed| failed.step.cgroup == step.cgroup);
            if batch.first().is_some_and(|step| is_held(step) && has_failed(step)) {
                continue;
            }
            health::beat();
            numaward_store::fault::point("enforce.write");
            match self.write(&plan.intent, batch, &mut report.moving) {
                Ok(()) => {
                    report.owed.extend(self.cpus_not_restored(plan, batch));
                    report.written.extend_from_slice(batch);
                }
                // A cgroup that is gone has nothing to restore.
                Err(failed) if failed.error.is_gone() && !plan.is_undone && !is_held(&failed.step) => {
                    report.gone.extend_from_slice(batch);
                }
                Err(failed) if plan.may_be_late(&failed) => report.late.push(*failed),
                Err(failed) => {
                    failures.push(*failed);
                    if plan.is_undone {
                        half_written = batch;
                        break;
                    }
                }
            }
        }
        numaward_store::fault::point("enforce.written");
        for (path, knob) in &plan.drop_ins {
            let is_it = |step: &&WriteStep| step.cgroup == *path && step.knob == *knob;
            if plan.steps.iter().find(is_it).is_none_or(|step| report.written.contains(step)) {
                self.remove_drop_in(path, *knob);
            }
        }
        let mut failures = failures.into_iter();
        let Some(StepError { error, step }) = failures.next() else { return Ok(report) };
        let mut undo = Vec::new();
        if plan.is_undone {
            let back: Vec<_> =
                report.written.iter().chain(half_written).rev().map(WriteStep::reversed).collect();
            undo.extend(back.iter().filter_map(|step| {
                let found = self.cgroupfs.read(&step.cgroup, step.knob);
                if !self.is_systemds(&step.owner, step.knob)
                    && found.is_ok_and(|found| self.cgroupfs.holds(step.knob, &step.to, &found))
                {
                    return None;
                }
                let written = self.write(&plan.intent, std::slice::from_ref(step), &mut report.moving);
                if written.is_ok() && plan.creates_drop_in(step) {
                    self.remove_drop_in(&step.cgroup, step.knob);
                }
                written.err().map(|failed| *failed)
            }));
        }
        undo.retain(|failed: &StepError| !failed.error.is_gone());
        // If several cgroups get settings, the caller has to learn which of them are gone.
        let others = failures.filter(|failed| !failed.error.is_gone() || plan.holds_several()).collect();
        Err(Box::new(EnforcementFailure { error, step: Some(step), others, undo, report }))
    }

    /// Removes the drop-in of a knob that was restored.
    fn remove_drop_in(&self, path: &CgroupPath, knob: Knob) {
        if let (Some(systemd), Owner::Systemd(unit)) = (&self.systemd, self.owner(path)) {
            systemd.remove_drop_in(&unit, knob);
        }
    }

    /// Returns the cgroups that did not get back all CPUs by these writes, with the CPUs that they hold.
    fn cpus_not_restored(
        &self,
        plan: &EnforcementPlan,
        written: &[WriteStep],
    ) -> Vec<(CgroupPath, KnobValue)> {
        let is_given_back = |step: &&WriteStep| step.knob == Knob::CpusetCpus && plan.restores_original(step);
        let held = |step: &WriteStep| {
            let held = self.cgroupfs.read(&step.cgroup, step.knob).ok()?;
            (!self.cgroupfs.is_restored(step.knob, &step.to, &held)).then(|| (step.cgroup.clone(), held))
        };
        written.iter().filter(is_given_back).filter_map(held).collect()
    }

    /// Does everything that precedes the first write. If several cgroups get settings, returns those that cannot hold
    /// them any more.
    fn prepare(&self, plan: &EnforcementPlan) -> Result<Vec<StepError>, EnforceError> {
        let mut excluded = Vec::new();
        // Another program may have taken CPUs since the plan was made, and its partition must not end.
        for (path, settings) in &plan.holds {
            let Err(error) = self.check_available(path, settings) else { continue };
            match plan.steps.iter().find(|step| step.cgroup == *path) {
                Some(step) if !plan.is_undone => excluded.push(StepError { error, step: step.clone() }),
                _ => return Err(error),
            }
        }
        self.enable(&plan.enable)?;
        Ok(excluded)
    }

    /// Records a cgroup that was created with the daemon's values. The original values cannot be read any more, so they
    /// are those that the cgroup would have without the daemon (`without_us`).
    pub fn record_created(
        &self,
        applied: &mut AppliedSettings,
        path: &CgroupPath,
        without_us: &Settings,
        knobs: impl IntoIterator<Item = Knob>,
    ) {
        let Some(id) = id_of(&path.dir(self.root())) else { return };
        let mut record = match applied.get(path).filter(|record| record.id == id) {
            Some(record) => Record::clone(record),
            None => Record::new(id, self.owner(path)),
        };
        let mut without_us = without_us.values();
        for knob in knobs {
            if let (Ok(held), None) = (self.cgroupfs.read(path, knob), record.found.0.get(&knob)) {
                record.written.0.insert(knob, held);
                record.found.0.insert(knob, without_us.0.remove(&knob).unwrap_or_else(|| unset(knob)));
            }
        }
        if !record.written.0.is_empty() {
            applied.update(path, record);
        }
    }

    /// Returns the write that repairs a drift.
    pub fn repair_step(&self, applied: &AppliedSettings, drift: &Drift) -> WriteStep {
        let owner = applied.get(&drift.cgroup).map_or(Owner::Cgroupfs, |record| record.owner.clone());
        let from = drift.found.clone().unwrap_or_else(|| unset(drift.knob));
        WriteStep { cgroup: drift.cgroup.clone(), owner, knob: drift.knob, from, to: drift.wanted.clone() }
    }

    /// Repairs a knob that drifted. The controller of a knob that does not exist must be [enabled](Enforcer::enable)
    /// before.
    pub fn repair(
        &self,
        applied: &AppliedSettings,
        drift: &Drift,
    ) -> Result<EnforcementReport, EnforceError> {
        let step = self.repair_step(applied, drift);
        let mut report = EnforcementReport::default();
        let written = self.write(applied, std::slice::from_ref(&step), &mut report.moving);
        written.map_err(|failed| failed.error)?;
        report.written.push(step);
        Ok(report)
    }

    /// Writes `cpuset.cpus` of several cgroups directly, without recording original values and without systemd: nothing
    /// will be restored. Each set must name CPUs. A report has no write if the cgroup holds the CPUs already. Fails if
    /// the knob does not exist: its controller must be [enabled](Enforcer::enable) before.
    pub fn set_cpus(&self, wanted: &[(CgroupPath, CpuSet)]) -> Vec<Result<EnforcementReport, EnforceError>> {
        let steps: Vec<_> = wanted.iter().map(|(cgroup, cpus)| self.cpus_step(cgroup, cpus)).collect();
        let given: Vec<_> = steps.iter().flatten().flatten().cloned().collect();
        let mut written = self.cgroupfs.write_cpus(&given).into_iter();
        let done = |step| {
            let mut report = EnforcementReport::default();
            if let Some(step) = step? {
                written.next().transpose()?;
                report.written.push(step);
            }
            Ok(report)
        };
        steps.into_iter().map(done).collect()
    }

    /// Returns the write that sets these CPUs; `None` if the cgroup holds them already.
    fn cpus_step(&self, cgroup: &CgroupPath, cpus: &CpuSet) -> Result<Option<WriteStep>, EnforceError> {
        health::beat();
        let (knob, to) = (Knob::CpusetCpus, KnobValue::Cpus(cpus.clone()));
        let from = match self.cgroupfs.read(cgroup, knob) {
            Ok(held) if self.cgroupfs.holds(knob, &to, &held) => return Ok(None),
            held => held?,
        };
        Ok(Some(WriteStep { cgroup: cgroup.clone(), owner: Owner::Cgroupfs, knob, from, to }))
    }

    /// Returns the knobs of one cgroup that drifted. If the cgroup is gone, [`EnforceError::is_gone`] is true of the
    /// error.
    pub fn drift(&self, applied: &AppliedSettings, path: &CgroupPath) -> Result<Vec<Drift>, EnforceError> {
        let Some(record) = applied.get(path) else { return Ok(Vec::new()) };
        let dir = path.dir(self.root());
        if id_of(&dir).is_none_or(|id| id != record.id && record.owner == Owner::Cgroupfs) {
            return Err(EnforceError::Gone { cgroup: path.clone() });
        }
        let drift = |knob, wanted: &KnobValue, found, kind| Drift {
            cgroup: path.clone(),
            knob,
            wanted: wanted.clone(),
            found,
            kind,
        };
        let asked = record.settings.values();
        let pending = applied.pending_knobs(path);
        let mut drifts = Vec::new();
        for (&knob, wanted) in &record.written.0 {
            if pending.contains(&knob) {
                continue;
            }
            match knob.read(&dir) {
                Ok(found) if self.cgroupfs.holds(knob, wanted, &found) => {}
                // More than necessary is enough for an ancestor.
                Ok(found) if !asked.0.contains_key(&knob) && covers(&found, wanted) => {}
                Ok(found) => drifts.push(drift(knob, wanted, Some(found), DriftKind::Rewritten)),
                Err(KnobError::Missing { .. }) => {
                    drifts.push(drift(knob, wanted, None, DriftKind::Rewritten));
                }
                Err(error) => return Err(error.into()),
            }
        }
        for (knob, effective) in
            [(Knob::CpusetCpus, Knob::CpusetCpusEffective), (Knob::CpusetMems, Knob::CpusetMemsEffective)]
        {
            let Some(wanted) = asked.0.get(&knob).filter(|_| drifts.iter().all(|drift| drift.knob != knob))
            else {
                continue;
            };
            let given = effective.read(&dir)?;
            if given == *wanted {
                continue;
            }
            // The knob itself may have been written since it was read.
            let found = knob.read(&dir)?;
            let is_held = self.cgroupfs.holds(knob, wanted, &found);
            let (found, kind) =
                if is_held { (given, DriftKind::Ineffective) } else { (found, DriftKind::Rewritten) };
            drifts.push(drift(knob, wanted, Some(found), kind));
        }
        Ok(drifts)
    }

    /// Refuses CPUs and nodes that the ancestors do not have.
    pub(super) fn check_available(&self, path: &CgroupPath, settings: &Settings) -> Result<(), EnforceError> {
        let cpus = settings.cpus.clone().map(KnobValue::Cpus);
        let mems = settings.mems.clone().map(KnobValue::Nodes);
        for (knob, effective, wanted) in [
            (Knob::CpusetCpus, Knob::CpusetCpusEffective, cpus),
            (Knob::CpusetMems, Knob::CpusetMemsEffective, mems),
        ] {
            let Some(wanted) = wanted else { continue };
            // A partition has CPUs that its parent has no longer.
            let own = self.cgroupfs.read(path, effective).unwrap_or_else(|_| unset(effective));
            for by in path.ancestors().skip(1) {
                let allowed = match (self.cgroupfs.read(&by, effective), &own) {
                    (Err(KnobError::Missing { .. }), _) => continue,
                    (Ok(KnobValue::Cpus(cpus)), KnobValue::Cpus(own)) => KnobValue::Cpus(&cpus | own),
                    (Ok(KnobValue::Nodes(nodes)), KnobValue::Nodes(own)) => KnobValue::Nodes(&nodes | own),
                    (other, _) => other?,
                };
                let fits = match (&wanted, &allowed) {
                    (KnobValue::Cpus(wanted), KnobValue::Cpus(allowed)) => wanted.is_subset(allowed),
                    (KnobValue::Nodes(wanted), KnobValue::Nodes(allowed)) => wanted.is_subset(allowed),
                    _ => false,
                };
                if !fits {
                    let (wanted, allowed) = (Box::new(wanted), Box::new(allowed));
                    return Err(EnforceError::Excluded { cgroup: path.clone(), knob, wanted, allowed, by });
                }
                break;
            }
        }
        Ok(())
    }

    /// Returns whether systemd writes this knob of a cgroup.
    pub(super) fn is_systemds(&self, owner: &Owner, knob: Knob) -> bool {
        self.systemd.is_some() && matches!(owner, Owner::Systemd(_)) && systemd::property(knob).is_some()
    }

    /// Returns the identity of the cgroup at this path.
    pub(super) fn id_of(&self, path: &CgroupPath) -> Result<CgroupId, EnforceError> {
        id_of(&path.dir(self.root())).ok_or_else(|| EnforceError::Gone { cgroup: path.clone() })
    }

    /// Returns the configured value of a knob: the unit's property, or the kernel's value. A release has to restore it.
    pub(super) fn found_by(
        &self,
        owner: &Owner,
        path: &CgroupPath,
        knob: Knob,
    ) -> Result<KnobValue, EnforceError> {
        match (&self.systemd, owner, systemd::property(knob)) {
            (Some(systemd), Owner::Systemd(unit), Some(property)) => systemd.read(unit, knob, property),
            _ => self.cgroupfs.found(path, knob),
        }
    }

    /// Refuses to lower a limit below the memory in use, for which the kernel would kill processes.
    fn check_in_use(&self, step: &WriteStep) -> Result<(), EnforceError> {
        let Some(limit) = lowered(step) else { return Ok(()) };
        match step.knob {
            Knob::MemoryMax => self.check_memory_in_use(step, limit),
            Knob::HugetlbMax(size) => self.check_mapped_huge_pages(step, size, limit),
            _ => Ok(()),
        }
    }

    /// The size of the mapped pages is not known, so each size must have room for all of them. If the mappings cannot be read, they count as none.
    fn check_mapped_huge_pages(
        &self,
        step: &WriteStep,
        size: HugepageSize,
        limit: Bytes,
    ) -> Result<(), EnforceError> {
        let touched = read::hugetlb_current(&step.cgroup.dir(self.root()), size).unwrap_or_default();
        let untouched = self.cgroupfs.untouched_huge_pages(&step.cgroup);
        let mapped = Bytes(touched.0.saturating_add(untouched.0));
        if mapped <= limit {
            return Ok(());
        }
        let (cgroup, held) = (step.cgroup.clone(), Box::new(step.from.clone()));
        Err(EnforceError::HugePagesMapped { cgroup, knob: step.knob, held, limit, mapped })
    }

    fn check_memory_in_use(&self, step: &WriteStep, limit: Bytes) -> Result<(), EnforceError> {
        let dir = step.cgroup.dir(self.root());
        // The kernel takes longer to count the page cache that can be dropped.
        if read::memory_current(&dir).is_ok_and(|charged| charged <= limit) {
            return Ok(());
        }
        match read::memory_in_use(&dir) {
            Ok(used) if used > limit => {
                let (cgroup, held) = (step.cgroup.clone(), Box::new(step.from.clone()));
                Err(EnforceError::InUse { cgroup, knob: step.knob, held, limit, used })
            }
            Ok(_) => Ok(()),
            // Without the controller there is no limit either.
            Err(error) if error.is_gone() || error.is_absent() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether the cgroup at this path is not the recorded one. A unit keeps its properties in a new cgroup.
    fn is_replaced(&self, path: &CgroupPath, record: &Record) -> bool {
        record.owner == Owner::Cgroupfs && id_of(&path.dir(self.root())) != Some(record.id)
    }

    /// Returns the record of the cgroup that has this path now.
    pub(super) fn record_now<'a>(
        &self,
        applied: &'a AppliedSettings,
        path: &CgroupPath,
    ) -> Option<&'a Arc<Record>> {
        applied.get(path).filter(|record| !self.is_replaced(path, record))
    }

    /// Writes steps of one cgroup with the same owner. Fails if the cgroup was replaced since it was recorded, because
    /// its original values would not be known.
    fn write(
        &self,
        applied: &AppliedSettings,
        steps: &[WriteStep],
        moving: &mut Vec<(CgroupPath, MigrationState)>,
    ) -> Result<(), Box<StepError>> {
        let Some(first) = steps.first() else { return Ok(()) };
        // A unit keeps its properties in a new cgroup, and nothing else.
        let is_lasting = self.is_systemds(&first.owner, first.knob);
        let is_recorded = |record: &Arc<Record>| id_of(&first.cgroup.dir(self.root())) == Some(record.id);
        if !is_lasting && applied.get(&first.cgroup).is_some_and(|record| !is_recorded(record)) {
            let error = EnforceError::Gone { cgroup: first.cgroup.clone() };
            return Err(Box::new(StepError { error, step: first.clone() }));
        }
        for step in steps {
            self.check_in_use(step).map_err(|error| StepError { error, step: step.clone() })?;
        }
        let moved = match (&self.systemd, &first.owner) {
            (Some(systemd), Owner::Systemd(unit)) if systemd::property(first.knob).is_some() => {
                systemd.write_steps(unit, &self.cgroupfs, steps)?
            }
            _ => self.cgroupfs.write(steps)?,
        };
        moving.extend(moved.map(|moving| (first.cgroup.clone(), moving)));
        Ok(())
    }

    /// Adds the controllers that are missing above a cgroup with knobs that need them.
    pub(super) fn add_missing_above(
        &self,
        missing: &mut EnabledControllers,
        path: &CgroupPath,
        needed: &BTreeSet<&str>,
    ) -> Result<(), EnforceError> {
        if needed.is_empty() {
            return Ok(());
        }
        path.ancestors().skip(1).try_for_each(|above| missing.add_missing(self.root(), &above, needed))
    }

    /// Returns the controllers to enable so that a cgroup has this knob. Store them, then call [`Enforcer::enable`].
    pub fn missing_above(&self, path: &CgroupPath, knob: Knob) -> Result<EnabledControllers, EnforceError> {
        let mut missing = EnabledControllers::default();
        self.add_missing_above(&mut missing, path, &knob.controller().into_iter().collect())?;
        Ok(missing)
    }

    /// Enables controllers, from the root down.
    pub fn enable(&self, controllers: &EnabledControllers) -> Result<(), EnforceError> {
        for (cgroup, enabled) in controllers.iter() {
            numaward_store::fault::point("enforce.enable");
            let wanted = enabled.controllers.iter().map(String::as_str).collect();
            enable_controllers(&cgroup.dir(self.root()), &wanted)?;
        }
        Ok(())
    }

    /// Returns those of the controllers that are still enabled in the same cgroups.
    pub fn still_enabled(&self, controllers: &EnabledControllers) -> EnabledControllers {
        let mut still = controllers.clone();
        still.retain(|path, id, controller| {
            is_enabled(&path.dir(self.root()), id, controller).unwrap_or(true)
        });
        still
    }
}

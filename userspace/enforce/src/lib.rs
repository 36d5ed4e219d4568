//! Enforcement: from settings to what the kernel does, and back.
//!
//! Problem: a promise is a handful of knobs in one cgroup and, because protection is hierarchical, some in
//! each of its ancestors. Others own some of these cgroups, others write them, and the daemon may die between
//! any two writes. What was there before has to come back when the promise ends.
//!
//! Terms: [`Settings`] are what a cgroup is to hold. The [`Book`] says what was written where and what was found
//! there; it is stored with the ledger. A [`Plan`] is the way from what is to what is wanted. A [`Backend`] writes
//! knobs: cgroupfs directly, systemd as properties of its units. [`Drift`] is a knob that holds something else.
//!
//! Algorithm: [`Enforcer::plan`] reads the kernel and decides, [`Plan::intent`] is stored, then
//! [`Enforcer::execute`] writes, in the order of [`order`], reads each knob back, and [`Plan::outcome`] is
//! stored at leisure. A plan that gives settings is undone if any write fails; one that takes them back goes on
//! with the rest. After a crash, [`Change::Upkeep`] plans what is left to do; where nothing is, nothing is written.
//!
//! `memory.min` and `memory.low` of an ancestor are raised to the sum of what its children claim, as the kernel
//! scales claims down when they sum up to more than the parent has, and never below what was found. An ancestor
//! that holds more than needed is no drift.
//!
//! Everything here blocks: file I/O, page migration, the bus. It runs on a thread that may block, one plan at a
//! time.

#![forbid(unsafe_code)]

mod backend;
mod book;
mod drift;
mod error;
mod migration;
pub mod order;
mod plan;
pub mod systemd;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

pub use backend::{Backend, Cgroupfs, StepError};
pub use book::{Book, Owner, Record};
pub use drift::{Drift, DriftKind, FightPolicy, Fights, Verdict};
pub use error::EnforceError;
pub use migration::{Migration, Moving, Resident};
use numaward_cgroup::{
    CgroupPath,
    knob::{self, Knob, KnobError, Limit, Value},
};
use numaward_model::{Settings, Values};
use numaward_topology::{Bytes, CpuSet, NodeSet};
pub use order::Step;
pub use plan::{Change, Plan};
pub use systemd::Systemd;

/// How the enforcer works.
#[derive(Clone, Debug)]
pub struct Options {
    /// The CPUs that may ever be there: what a running cgroup gets back that had no `cpuset.cpus`.
    pub possible_cpus: CpuSet,
    /// The nodes that may ever be there, likewise.
    pub possible_nodes: NodeSet,
    /// How long a write to `cpuset.mems` is waited for.
    pub migration_wait: Duration,
}

impl Options {
    /// The usual waits, for a machine with these CPUs and nodes.
    pub fn new(possible_cpus: CpuSet, possible_nodes: NodeSet) -> Self {
        Self { possible_cpus, possible_nodes, migration_wait: Duration::from_secs(2) }
    }
}

/// Plans and writes settings.
#[derive(Debug)]
pub struct Enforcer {
    cgroupfs: Cgroupfs,
    systemd: Option<Systemd>,
    /// Protection claimed by the children of a cgroup, as last read. Forgotten by [`Enforcer::refresh`].
    claims: Mutex<HashMap<(CgroupPath, Knob), BTreeMap<CgroupPath, Limit>>>,
}

/// What a plan has done.
#[derive(Debug, Default)]
pub struct Report {
    /// The writes, in their order.
    pub written: Vec<Step>,
    /// Pages that were moved, by cgroup.
    pub moving: Vec<(CgroupPath, Moving)>,
    /// Knobs that somebody else changed since we wrote them: a release leaves them as they are.
    pub kept: Vec<Drift>,
}

/// A plan could not be carried out in full.
#[derive(Debug, thiserror::Error)]
#[error("{error}{}", not_undone(.undo))]
pub struct Failure {
    /// The first error.
    #[source]
    pub error: EnforceError,
    /// The write that failed; `None` if it did not come to that.
    pub step: Option<Step>,
    /// Further errors: of undoing what was written before, or of the other writes of a release.
    pub undo: Vec<EnforceError>,
    /// What was done before (and undone, if settings were to be given).
    pub report: Report,
}

fn not_undone(errors: &[EnforceError]) -> String {
    errors.iter().fold(String::new(), |text, error| text + "; then " + &error.to_string())
}

impl Enforcer {
    /// An enforcer for the cgroup v2 hierarchy mounted at `root`; with `systemd` for its units' cgroups, without
    /// it for all.
    pub fn new(root: PathBuf, systemd: Option<Systemd>, options: Options) -> Self {
        Self { cgroupfs: Cgroupfs::new(root, options), systemd, claims: Mutex::default() }
    }

    /// Where the hierarchy is mounted.
    pub fn root(&self) -> &Path {
        self.cgroupfs.root()
    }

    /// Who writes the knobs of a cgroup.
    pub fn owner(&self, path: &CgroupPath) -> Owner {
        match self.systemd {
            Some(_) => Owner::under_systemd(path),
            None => Owner::Cgroupfs,
        }
    }

    /// Forgets what other cgroups were seen to claim: the next plan reads it anew. For the slow tick.
    pub fn refresh(&self) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether systemd is asked when something is planned for these cgroups.
    pub fn asks_systemd(&self, cgroups: &BTreeSet<CgroupPath>) -> bool {
        let is_systemds = |path: CgroupPath| matches!(self.owner(&path), Owner::Systemd(_));
        self.systemd.is_some() && cgroups.iter().flat_map(CgroupPath::ancestors).any(is_systemds)
    }

    /// Whether these writes may take long: pages may have to be moved, or systemd is asked.
    pub fn may_wait(&self, steps: &[Step]) -> bool {
        steps.iter().any(|step| step.knob == Knob::CpusetMems || self.is_systemds(&step.owner, step.knob))
    }

    /// Writes a plan's knobs. The plan's `intent` must be stored before.
    pub fn execute(&self, plan: &Plan) -> Result<Report, Box<Failure>> {
        let mut report = Report { kept: plan.kept.clone(), ..Report::default() };
        let prepared = self.prepare(plan);
        if let Err(error) = prepared {
            return Err(Box::new(Failure { error, step: None, undo: Vec::new(), report }));
        }
        let mut failures = Vec::new();
        let mut half_written: &[Step] = &[];
        // Consecutive writes to one unit go out together.
        let go_together = |a: &Step, b: &Step| {
            a.cgroup == b.cgroup && self.is_systemds(&a.owner, a.knob) && self.is_systemds(&b.owner, b.knob)
        };
        for batch in plan.steps.chunk_by(go_together) {
            numaward_store::fault::point("enforce.write");
            match self.write(batch, &mut report.moving) {
                Ok(()) => report.written.extend_from_slice(batch),
                // What is gone needs nothing brought back.
                Err(failed) if failed.error.is_gone() && plan.hold.is_none() => {}
                Err(failed) => {
                    failures.push(*failed);
                    if plan.hold.is_some() {
                        half_written = batch;
                        break;
                    }
                }
            }
        }
        numaward_store::fault::point("enforce.written");
        let mut failures = failures.into_iter();
        let Some(StepError { error, step }) = failures.next() else { return Ok(report) };
        let mut undo: Vec<_> = failures.map(|failed| failed.error).collect();
        if plan.hold.is_some() {
            let back: Vec<_> = report.written.iter().chain(half_written).rev().map(Step::reversed).collect();
            undo.extend(back.iter().filter_map(|step| {
                let found = self.cgroupfs.read(&step.cgroup, step.knob);
                if !self.is_systemds(&step.owner, step.knob)
                    && found.is_ok_and(|found| self.cgroupfs.holds(step.knob, &step.to, &found))
                {
                    return None;
                }
                self.write(std::slice::from_ref(step), &mut report.moving).err().map(|failed| failed.error)
            }));
        }
        undo.retain(|error| !error.is_gone());
        Err(Box::new(Failure { error, step: Some(step), undo, report }))
    }

    /// What comes before the first write.
    fn prepare(&self, plan: &Plan) -> Result<(), EnforceError> {
        // Others may have taken CPUs since the plan was made, and a partition of theirs must not suffer.
        if let Some((path, settings)) = &plan.hold {
            self.check_available(path, settings)?;
        }
        for (cgroup, controllers) in &plan.enable {
            numaward_store::fault::point("enforce.enable");
            knob::enable_controllers(&cgroup.dir(self.root()), controllers)?;
        }
        Ok(())
    }

    /// The write that repairs a drift.
    pub fn repair_step(&self, book: &Book, drift: &Drift) -> Step {
        let owner = book.get(&drift.cgroup).map_or(Owner::Cgroupfs, |record| record.owner.clone());
        let from = drift.found.clone().unwrap_or_else(|| plan::unset(drift.knob));
        Step { cgroup: drift.cgroup.clone(), owner, knob: drift.knob, from, to: drift.wanted.clone() }
    }

    /// Writes one knob again that drifted.
    pub fn repair(&self, book: &Book, drift: &Drift) -> Result<Report, EnforceError> {
        let step = self.repair_step(book, drift);
        if drift.found.is_none() {
            self.enable_above(&step.cgroup, step.knob)?;
        }
        let mut report = Report::default();
        self.write(std::slice::from_ref(&step), &mut report.moving).map_err(|failed| failed.error)?;
        report.written.push(step);
        Ok(report)
    }

    /// Makes a knob of a cgroup hold a value at once, without taking note of what it held: nothing will be given back,
    /// and systemd is not told. Reports no write where it holds it already.
    pub fn set(&self, cgroup: &CgroupPath, knob: Knob, to: &Value) -> Result<Report, EnforceError> {
        let from = match self.cgroupfs.read(cgroup, knob) {
            Ok(held) if self.cgroupfs.holds(knob, to, &held) => return Ok(Report::default()),
            Ok(held) => held,
            Err(KnobError::Missing { .. }) if book::id_of(&cgroup.dir(self.root())).is_some() => {
                self.enable_above(cgroup, knob)?;
                plan::unset(knob)
            }
            Err(error) => return Err(error.into()),
        };
        let step = Step { cgroup: cgroup.clone(), owner: Owner::Cgroupfs, knob, from, to: to.clone() };
        let mut report = Report::default();
        self.write(std::slice::from_ref(&step), &mut report.moving).map_err(|failed| failed.error)?;
        report.written.push(step);
        Ok(report)
    }

    /// The knobs of one cgroup that do not hold what the book says. An error that
    /// [is gone](EnforceError::is_gone) says that the cgroup is.
    pub fn drift(&self, book: &Book, path: &CgroupPath) -> Result<Vec<Drift>, EnforceError> {
        let Some(record) = book.get(path) else { return Ok(Vec::new()) };
        let dir = path.dir(self.root());
        if book::id_of(&dir).is_none_or(|id| id != record.id && record.owner == Owner::Cgroupfs) {
            return Err(EnforceError::Gone { cgroup: path.clone() });
        }
        let drift = |knob, wanted: &Value, found, kind| Drift {
            cgroup: path.clone(),
            knob,
            wanted: wanted.clone(),
            found,
            kind,
        };
        let asked = record.settings.values();
        let mut drifts = Vec::new();
        for (&knob, wanted) in &record.written.0 {
            match knob.read(&dir) {
                Ok(found) if self.cgroupfs.holds(knob, wanted, &found) => {}
                // Of an ancestor, more is enough.
                Ok(found) if !asked.0.contains_key(&knob) && plan::covers(&found, wanted) => {}
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

    /// Whether this knob of a cgroup is written by systemd.
    fn is_systemds(&self, owner: &Owner, knob: Knob) -> bool {
        self.systemd.is_some() && matches!(owner, Owner::Systemd(_)) && systemd::property(knob).is_some()
    }

    fn backend(&self, owner: &Owner, knob: Knob) -> &dyn Backend {
        match &self.systemd {
            Some(systemd) if self.is_systemds(owner, knob) => systemd,
            _ => &self.cgroupfs,
        }
    }

    /// Writes steps of one cgroup and one backend.
    fn write(&self, steps: &[Step], moving: &mut Vec<(CgroupPath, Moving)>) -> Result<(), Box<StepError>> {
        let Some(first) = steps.first() else { return Ok(()) };
        let moved = self.backend(&first.owner, first.knob).write(&self.cgroupfs, steps)?;
        moving.extend(moved.map(|moving| (first.cgroup.clone(), moving)));
        Ok(())
    }
}

impl Step {
    /// The way back.
    fn reversed(&self) -> Self {
        Self { from: self.to.clone(), to: self.from.clone(), ..self.clone() }
    }
}

/// The size of a page of memory.
fn page_size() -> Bytes {
    Bytes(rustix::param::page_size() as u64)
}

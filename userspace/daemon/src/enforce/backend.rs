//! Who writes knobs, and how it is seen that they hold.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobError, Value},
};
use numaward_topology::{Bytes, NodeSet};

use super::{
    EnforceError, Options, Owner, Step, Systemd,
    migration::{Moving, migrate},
    page_size,
    plan::unset,
    systemd::property,
};

/// systemd writes the knobs of a unit soon after it took the properties; not within this, it did not.
const SYSTEMD_SETTLES: Duration = Duration::from_secs(3);
/// How often to look meanwhile.
const SETTLE_PACE: Duration = Duration::from_millis(5);

/// Writes knobs of cgroups.
pub trait Backend {
    /// What a knob of a cgroup is set to in the backend's own books: what a release has to write back.
    fn found(
        &self,
        cgroupfs: &Cgroupfs,
        cgroup: &CgroupPath,
        owner: &Owner,
        knob: Knob,
    ) -> Result<Value, EnforceError>;

    /// Makes the knobs of one cgroup hold what the steps say, and returns when the kernel's files, read through
    /// `cgroupfs`, say so.
    fn write(&self, cgroupfs: &Cgroupfs, steps: &[Step]) -> Result<Option<Moving>, Box<StepError>>;
}

/// A step that failed.
#[derive(Debug)]
pub struct StepError {
    /// Why.
    pub error: EnforceError,
    /// Which.
    pub step: Step,
}

impl StepError {
    fn new(error: EnforceError, step: &Step) -> Box<Self> {
        Box::new(Self { error, step: step.clone() })
    }
}

/// The knobs themselves.
#[derive(Clone, Debug)]
pub struct Cgroupfs {
    root: PathBuf,
    options: Options,
    page_size: Bytes,
}

impl Cgroupfs {
    pub(super) fn new(root: PathBuf, options: Options) -> Self {
        Self { root, options, page_size: page_size() }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn read(&self, cgroup: &CgroupPath, knob: Knob) -> Result<Value, KnobError> {
        knob.read(&cgroup.dir(&self.root))
    }

    pub(super) fn holds(&self, knob: Knob, wanted: &Value, found: &Value) -> bool {
        knob.holds(wanted, found, self.page_size)
    }

    /// Whether a knob is back to what was found, in the words of [`Self::put`].
    pub(super) fn is_back(&self, knob: Knob, found: &Value, held: &Value) -> bool {
        self.holds(knob, found, held)
            || is_everything(found)
                && match held {
                    Value::Cpus(cpus) => *cpus == self.options.possible_cpus,
                    Value::Nodes(nodes) => *nodes == self.options.possible_nodes,
                    _ => false,
                }
    }

    /// Writes one step, in other words if the kernel does not take these.
    ///
    /// The kernel refuses to empty the set of a cgroup with tasks (`ENOSPC`), although the empty set, all that
    /// the parent has, was there before. All that the machine may ever have means the same; where a sibling's
    /// partition stands against it, what the parent has now comes close.
    fn put(&self, step: &Step) -> Result<(), KnobError> {
        let dir = step.cgroup.dir(&self.root);
        let write = |value: &Value| step.knob.write(&dir, &value.to_string());
        let refused = match write(&step.to) {
            Err(error @ KnobError::Refused { .. }) if is_everything(&step.to) => error,
            // Without the knob, the cgroup has all that the parent has.
            Err(KnobError::Missing { .. }) if is_everything(&step.to) => return Ok(()),
            result => return result,
        };
        let (all, effective) = match step.knob {
            Knob::CpusetCpus => (Value::Cpus(self.options.possible_cpus.clone()), Knob::CpusetCpusEffective),
            Knob::CpusetMems => {
                (Value::Nodes(self.options.possible_nodes.clone()), Knob::CpusetMemsEffective)
            }
            _ => return Err(refused),
        };
        write(&all).or_else(|_| {
            let parent = step.cgroup.parent().ok_or(refused)?;
            write(&self.read(&parent, effective)?)
        })
    }

    /// Whether the step's knob holds what it should.
    fn check(&self, step: &Step) -> Result<(), EnforceError> {
        let found = match self.read(&step.cgroup, step.knob) {
            _ if is_everything(&step.to) => return Ok(()),
            Err(KnobError::Missing { .. }) if step.to == unset(step.knob) => return Ok(()),
            found => found?,
        };
        let (cgroup, knob) = (step.cgroup.clone(), step.knob);
        match &found {
            _ if self.holds(knob, &step.to, &found) => Ok(()),
            Value::Partition(state) if state.invalid.is_some() => Err(EnforceError::InvalidPartition {
                cgroup,
                reason: state.invalid.clone().unwrap_or_default(),
            }),
            _ => Err(EnforceError::NotTaken {
                cgroup,
                knob,
                wanted: Box::new(step.to.clone()),
                found: Box::new(found),
            }),
        }
    }

    /// The nodes that a step leaves the cgroup.
    fn nodes(&self, step: &Step) -> NodeSet {
        match &step.to {
            Value::Nodes(nodes) if !nodes.is_empty() => nodes.clone(),
            _ => self.options.possible_nodes.clone(),
        }
    }

    /// Writes `cpuset.mems`, which moves pages.
    fn move_pages(&self, step: &Step) -> Result<Moving, EnforceError> {
        let dir = step.cgroup.dir(&self.root);
        let (this, own) = (self.clone(), step.clone());
        let moving = migrate(&dir, self.nodes(step), self.options.migration_wait, move || this.put(&own))?;
        self.check(step).map(|()| moving)
    }
}

/// Whether this is the empty set, which means all that the parent has.
fn is_everything(value: &Value) -> bool {
    match value {
        Value::Cpus(cpus) => cpus.is_empty(),
        Value::Nodes(nodes) => nodes.is_empty(),
        _ => false,
    }
}

impl Backend for Cgroupfs {
    fn found(
        &self,
        _cgroupfs: &Cgroupfs,
        cgroup: &CgroupPath,
        _owner: &Owner,
        knob: Knob,
    ) -> Result<Value, EnforceError> {
        match self.read(cgroup, knob) {
            Err(KnobError::Missing { .. }) => Ok(unset(knob)),
            result => Ok(result?),
        }
    }

    fn write(&self, _cgroupfs: &Cgroupfs, steps: &[Step]) -> Result<Option<Moving>, Box<StepError>> {
        let mut moving = None;
        for step in steps {
            let fail = |error| StepError::new(error, step);
            if step.knob == Knob::CpusetMems {
                moving = Some(self.move_pages(step).map_err(fail)?);
            } else {
                self.put(step).map_err(|error| fail(error.into()))?;
                self.check(step).map_err(fail)?;
            }
        }
        Ok(moving)
    }
}

impl Backend for Systemd {
    fn found(
        &self,
        cgroupfs: &Cgroupfs,
        cgroup: &CgroupPath,
        owner: &Owner,
        knob: Knob,
    ) -> Result<Value, EnforceError> {
        match (owner, property(knob)) {
            (Owner::Systemd(unit), Some(property)) => self.read(unit, knob, property),
            _ => cgroupfs.found(cgroupfs, cgroup, owner, knob),
        }
    }

    fn write(&self, cgroupfs: &Cgroupfs, steps: &[Step]) -> Result<Option<Moving>, Box<StepError>> {
        let Some(first) = steps.first() else { return Ok(None) };
        let Owner::Systemd(unit) = &first.owner else { return cgroupfs.write(cgroupfs, steps) };
        let mut moving = None;
        // Pages move while the writer waits, and that should not be the init of the host.
        for step in steps.iter().filter(|step| step.knob == Knob::CpusetMems) {
            match cgroupfs.move_pages(step) {
                Ok(moved) => moving = Some(moved),
                // The unit is not running, or systemd enables the controller when it has the property.
                Err(EnforceError::Knob(KnobError::Missing { .. } | KnobError::Gone { .. })) => {}
                Err(error) => return Err(StepError::new(error, step)),
            }
        }
        let values: Vec<_> = steps.iter().map(|step| (step.knob, &step.to)).collect();
        self.write(unit, &values).map_err(|error| StepError::new(error, first))?;

        let deadline = Instant::now() + SYSTEMD_SETTLES;
        for step in steps {
            if is_everything(&step.to) {
                // systemd writes the empty set too, and does not mind that the kernel refuses it.
                match cgroupfs.put(step) {
                    Err(error) if !error.is_gone() => return Err(StepError::new(error.into(), step)),
                    _ => continue,
                }
            }
            loop {
                match cgroupfs.check(step) {
                    Ok(()) => break,
                    // A unit that does not run has its properties for the next start.
                    Err(error) if error.is_gone() => break,
                    Err(error) if Instant::now() >= deadline => return Err(StepError::new(error, step)),
                    Err(_) => thread::sleep(SETTLE_PACE),
                }
            }
        }
        Ok(moving)
    }
}

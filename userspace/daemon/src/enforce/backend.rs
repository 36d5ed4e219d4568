//! Who writes knobs, and how it is seen that they hold.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::knob::{Knob, KnobError, Value};
use numaward_topology::Bytes;

use super::{
    CgroupPath, EnforceError, Options, Owner, Step, Systemd, invalid_partition,
    migration::{self, Migration, Moving},
    page_size,
};

/// systemd writes the knobs of a unit soon after it took the properties; not within this, it did not.
const SYSTEMD_SETTLES: Duration = Duration::from_secs(3);
/// How often to look meanwhile.
const SETTLE_PACE: Duration = Duration::from_millis(5);

/// Writes knobs of cgroups.
pub trait Backend {
    /// What the knob holds, in the backend's own books: what a release has to write back through it.
    fn found(&self, cgroupfs: &Cgroupfs, cgroup: &CgroupPath, owner: &Owner, knob: Knob)
    -> Result<Value, EnforceError>;

    /// Makes the knobs of one cgroup hold what the steps say, in their order, and returns when the kernel's
    /// files say so (read through `cgroupfs`). The error names the step that failed.
    fn write(&self, cgroupfs: &Cgroupfs, steps: &[Step]) -> Result<Option<Moving>, (EnforceError, Step)>;
}

/// The knobs themselves.
#[derive(Debug)]
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

    /// What a step's knob holds.
    pub(super) fn read(&self, step: &Step) -> Result<Value, KnobError> {
        step.knob.read(&step.cgroup.dir(&self.root))
    }

    /// Whether this is what the step wants.
    pub(super) fn holds(&self, step: &Step, found: &Value) -> bool {
        self.knob_holds(step.knob, &step.to, found)
    }

    pub(super) fn knob_holds(&self, knob: Knob, wanted: &Value, found: &Value) -> bool {
        knob.holds(wanted, found, self.page_size)
    }

    /// Writes one step, in other words if the kernel does not take these.
    ///
    /// The kernel refuses to empty the set of a cgroup with tasks (`ENOSPC`), although the empty set, all that
    /// the parent has, was there before. All that the machine may ever have means the same; where a sibling's
    /// partition stands against it, what the parent has now comes close.
    fn put(&self, step: &Step) -> Result<Value, KnobError> {
        let dir = step.cgroup.dir(&self.root);
        let write = |value: Value| step.knob.write(&dir, &value.to_string()).map(|()| value);
        let refused = match write(step.to.clone()) {
            Err(error @ KnobError::Refused { .. }) => error,
            result => return result,
        };
        let (all, effective) = match (step.knob, &step.to) {
            (Knob::CpusetCpus, Value::Cpus(cpus)) if cpus.is_empty() => {
                (Value::Cpus(self.options.possible_cpus.clone()), Knob::CpusetCpusEffective)
            }
            (Knob::CpusetMems, Value::Nodes(nodes)) if nodes.is_empty() => {
                (Value::Nodes(self.options.possible_nodes.clone()), Knob::CpusetMemsEffective)
            }
            _ => return Err(refused),
        };
        write(all).or_else(|_| {
            let parent = step.cgroup.parent().ok_or(refused)?;
            write(effective.read(&parent.dir(&self.root))?)
        })
    }

    fn put_and_check(&self, step: &Step) -> Result<(), EnforceError> {
        let written = self.put(step)?;
        let found = self.read(step)?;
        match &found {
            _ if self.knob_holds(step.knob, &written, &found) => Ok(()),
            Value::Partition(state) if state.invalid.is_some() => {
                invalid_partition(&step.cgroup, state).map_or(Ok(()), Err)
            }
            _ => Err(EnforceError::NotTaken {
                cgroup: step.cgroup.clone(),
                knob: step.knob,
                wanted: written,
                found,
            }),
        }
    }
}

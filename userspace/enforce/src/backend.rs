//! Writing of knobs, directly or through systemd, and the check that the kernel took them.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobError, KnobValue, Limit, Partition, PartitionState, Quota},
};
use numaward_topology::{Bytes, CpuSet, NodeSet};

use super::{
    EnforceError, Systemd, WriteStep,
    batch::{self, KnobWrite},
    detached_reads::DetachedReads,
    map_locks::MapLocks,
    migration::{MemoryByNode, Migration, MigrationState, left_on, migrate, resident, stayed},
    pages,
    turns::{Turn, Turns},
    writers::Writers,
};

/// The amount of time within which systemd writes the knobs of a unit after it took the properties.
const SYSTEMD_WRITE_TIMEOUT: Duration = Duration::from_secs(3);
/// The time to read the mappings of the processes of a cgroup.
const MAPPINGS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the read of a cgroup's mappings counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval of checks while systemd writes.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Settings of the enforcer.
#[derive(Clone, Debug)]
pub struct EnforcerOptions {
    /// All CPUs that the machine can ever have: the value that restores an empty `cpuset.cpus` while processes run.
    pub possible_cpus: CpuSet,
    /// All nodes that the machine can ever have, for `cpuset.mems`.
    pub possible_nodes: NodeSet,
    /// The amount of time that a caller waits for the pages to follow a write to `cpuset.mems`.
    pub migration_wait: Duration,
    /// Time in which the memory maps of a cgroup's processes have to be unlocked before `cpuset.mems` is written.
    pub lock_wait: Duration,
    /// Time to read the affinities of the threads of all cgroups that a plan narrows: what waits for the plan waits for that.
    pub thread_time: Duration,
    /// Mount point of procfs, with the processes of the cgroups.
    pub proc: PathBuf,
}

impl EnforcerOptions {
    /// Returns the options with the default times and this host's processes.
    pub fn new(possible_cpus: CpuSet, possible_nodes: NodeSet) -> Self {
        Self {
            possible_cpus,
            possible_nodes,
            migration_wait: Duration::from_secs(2),
            lock_wait: Duration::from_secs(2),
            thread_time: Duration::from_millis(10),
            proc: PathBuf::from("/proc"),
        }
    }
}

#[derive(Debug)]
pub struct StepError {
    pub error: EnforceError,
    pub step: WriteStep,
}

impl StepError {
    fn new(error: EnforceError, step: &WriteStep) -> Box<Self> {
        Box::new(Self { error, step: step.clone() })
    }
}

/// Access to the files of the cgroup v2 hierarchy.
#[derive(Clone, Debug)]
pub struct Cgroupfs {
    root: PathBuf,
    pub(super) options: EnforcerOptions,
    page_size: Bytes,
    /// Threads that write `cpuset.cpus` and `cpuset.mems`.
    writers: Writers,
    /// Order of the writes to `cpuset.mems`.
    turns: Turns,
    /// Reads of the mappings of processes.
    reads: DetachedReads,
    /// Checks of memory maps before `cpuset.mems` is written.
    map_locks: MapLocks,
}

impl Cgroupfs {
    pub(super) fn new(root: PathBuf, options: EnforcerOptions) -> Self {
        Self {
            root,
            options,
            page_size: Bytes(rustix::param::page_size() as u64),
            writers: Writers::default(),
            turns: Turns::default(),
            reads: DetachedReads::default(),
            map_locks: MapLocks::new(),
        }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the huge pages that the processes of a cgroup have mapped and not touched; none if this cannot be read.
    pub(super) fn untouched_huge_pages(&self, cgroup: &CgroupPath) -> Bytes {
        let deadline = Instant::now() + MAPPINGS_TIMEOUT;
        let (proc, dir) = (self.options.proc.clone(), cgroup.dir(&self.root));
        let own_dir = dir.clone();
        let read = move || pages::untouched_huge_pages(&proc, &own_dir, deadline);
        self.reads.run(cgroup, &dir, HANG_TIMEOUT, read).flatten().unwrap_or_else(|error| {
            tracing::debug!(%cgroup, %error, "the mapped huge pages cannot be read");
            Bytes(0)
        })
    }

    pub(super) fn read(&self, cgroup: &CgroupPath, knob: Knob) -> Result<KnobValue, KnobError> {
        knob.read(&cgroup.dir(&self.root))
    }

    pub(super) fn holds(&self, knob: Knob, wanted: &KnobValue, found: &KnobValue) -> bool {
        knob.holds(wanted, found, self.page_size)
    }

    /// Returns whether a knob holds its original value, or the value that stands for the empty set (see `write_step`).
    pub(super) fn is_restored(&self, knob: Knob, found: &KnobValue, held: &KnobValue) -> bool {
        self.holds(knob, found, held)
            || is_empty_set(found)
                && match held {
                    KnobValue::Cpus(cpus) => *cpus == self.options.possible_cpus,
                    KnobValue::Nodes(nodes) => *nodes == self.options.possible_nodes,
                    _ => false,
                }
    }

    /// Writes one step and returns the value that was written, without CPUs that are not available any more.
    ///
    /// The kernel refuses to empty the set of a cgroup with processes (`ENOSPC`), although the set was empty before,
    /// which means all of the parent's. The set of everything that the machine can ever have is written instead; it
    /// means the same.
    ///
    /// CPUs that the partition of a sibling has taken since must not be named: some kernels refuse the write, and some
    /// end the partition.
    fn write_step(&self, step: &WriteStep) -> Result<KnobValue, KnobError> {
        let dir = step.cgroup.dir(&self.root);
        let write = |value: KnobValue| self.write_knob(&dir, step.knob, &value).map(|()| value);
        let written = match (step.knob, &step.to) {
            (Knob::CpusetCpus, KnobValue::Cpus(cpus)) if !cpus.is_empty() => {
                write(KnobValue::Cpus(self.without_partitions(&step.cgroup, cpus.clone())?))
            }
            _ => match write(step.to.clone()) {
                Err(KnobError::Refused { .. }) if is_empty_set(&step.to) => {
                    write(if step.knob == Knob::CpusetMems {
                        KnobValue::Nodes(self.options.possible_nodes.clone())
                    } else {
                        KnobValue::Cpus(
                            self.without_partitions(&step.cgroup, self.options.possible_cpus.clone())?,
                        )
                    })
                }
                result => result,
            },
        };
        match written {
            // Without the knob, the cgroup has all that its parent has. systemd disables the controller when no
            // sibling unit needs it
            // any more, also between two writes.
            Err(KnobError::Missing { .. }) if is_empty_set(&step.to) => Ok(step.to.clone()),
            written => written,
        }
    }

    /// Writes a knob, and returns when the kernel has taken the value.
    fn write_knob(&self, dir: &Path, knob: Knob, value: &KnobValue) -> Result<(), KnobError> {
        if knob != Knob::CpusetCpus {
            return knob.write(dir, &value.to_string());
        }
        if knob.read(dir).is_ok_and(|found| self.holds(knob, value, &found)) {
            return Ok(());
        }
        let write = KnobWrite { dir: dir.to_owned(), knob, value: value.clone() };
        self.write_knobs(vec![write]).pop().unwrap_or(Ok(()))
    }

    /// Writes several knobs that do not hold their values yet.
    fn write_knobs(&self, writes: Vec<KnobWrite>) -> Vec<Result<(), KnobError>> {
        let holds = |write: &KnobWrite| {
            let found = write.knob.read(&write.dir);
            found.is_ok_and(|found| self.holds(write.knob, &write.value, &found))
        };
        batch::write(&self.writers, writes, holds)
    }

    /// Writes steps of `cpuset.cpus` to different cgroups in parallel. Each step must name CPUs. Returns the result of
    /// each.
    pub(super) fn write_cpus(&self, steps: &[WriteStep]) -> Vec<Result<(), EnforceError>> {
        let value = |step: &WriteStep| match &step.to {
            KnobValue::Cpus(cpus) => self.without_partitions(&step.cgroup, cpus.clone()).map(KnobValue::Cpus),
            other => Ok(other.clone()),
        };
        let values: Vec<_> = steps.iter().map(value).collect();
        let write = |(step, value): (&WriteStep, &Result<KnobValue, KnobError>)| {
            let dir = step.cgroup.dir(&self.root);
            value.as_ref().ok().map(|value| KnobWrite { dir, knob: step.knob, value: value.clone() })
        };
        let mut written = self.write_knobs(steps.iter().zip(&values).filter_map(write).collect()).into_iter();
        let done = |(step, value): (&WriteStep, Result<KnobValue, KnobError>)| {
            let value = value?;
            written.next().transpose()?;
            self.check(step, &value)
        };
        steps.iter().zip(values).map(done).collect()
    }

    /// Returns these CPUs without those of siblings' partitions, or the CPUs of the parent if none remain.
    fn without_partitions(&self, cgroup: &CgroupPath, cpus: CpuSet) -> Result<CpuSet, KnobError> {
        let Some(parent) = cgroup.parent() else { return Ok(cpus) };
        let available = self.cpus(&parent, Knob::CpusetCpusEffective)?;
        if cpus.is_subset(&available)
            || cpus.is_subset(&(&available | &self.cpus(cgroup, Knob::CpusetCpusEffective)?))
        {
            return Ok(cpus);
        }
        let mut left = cpus;
        for sibling in parent.children(&self.root) {
            let state = self.read(&sibling, Knob::CpusetPartition);
            let is_partition = matches!(
                state,
                Ok(KnobValue::Partition(PartitionState {
                    partition: Partition::Root | Partition::Isolated,
                    ..
                }))
            );
            if sibling == *cgroup || state.is_err() {
                continue;
            }
            let mut taken = self.cpus(&sibling, Knob::CpusetCpusExclusive)?;
            if is_partition {
                taken = &taken | &self.cpus(&sibling, Knob::CpusetCpus)?;
            }
            left = &left - &taken;
        }
        Ok(if left.is_empty() { available } else { left })
    }

    /// Returns whether a cgroup holds its original CPUs except for those that partitions of siblings have.
    pub(super) fn is_reduced(&self, cgroup: &CgroupPath, found: &KnobValue, held: &KnobValue) -> bool {
        let (KnobValue::Cpus(found), KnobValue::Cpus(held)) = (found, held) else { return false };
        let whole = if found.is_empty() { &self.options.possible_cpus } else { found };
        held != whole && self.without_partitions(cgroup, whole.clone()).is_ok_and(|left| left == *held)
    }

    /// Returns the siblings with a `cpuset.cpus` that overlaps that of this cgroup, which keeps it from being a partition.
    pub(super) fn overlapping_siblings(&self, cgroup: &CgroupPath) -> Result<Vec<CgroupPath>, KnobError> {
        let own = self.cpus(cgroup, Knob::CpusetCpus)?;
        let Some(parent) = cgroup.parent() else { return Ok(Vec::new()) };
        let siblings = parent.children(&self.root);
        let names_them = |sibling: &CgroupPath| {
            self.cpus(sibling, Knob::CpusetCpus).is_ok_and(|cpus| !(&cpus & &own).is_empty())
        };
        let mut beside: Vec<_> = siblings.filter(|sibling| sibling != cgroup).filter(names_them).collect();
        beside.sort();
        Ok(beside)
    }

    /// Returns the CPUs that a knob names; none if the knob does not exist.
    fn cpus(&self, cgroup: &CgroupPath, knob: Knob) -> Result<CpuSet, KnobError> {
        match self.read(cgroup, knob) {
            Ok(KnobValue::Cpus(cpus)) => Ok(cpus),
            Ok(_) | Err(KnobError::Missing { .. }) => Ok(CpuSet::new()),
            Err(error) => Err(error),
        }
    }

    /// Checks that the step's knob holds the written value.
    fn check(&self, step: &WriteStep, written: &KnobValue) -> Result<(), EnforceError> {
        let found = match self.read(&step.cgroup, step.knob) {
            Err(KnobError::Missing { .. }) if *written == unset(step.knob) => return Ok(()),
            found => found?,
        };
        let (cgroup, knob) = (step.cgroup.clone(), step.knob);
        match &found {
            _ if self.holds(knob, written, &found) => Ok(()),
            KnobValue::Partition(PartitionState { invalid: Some(reason), .. }) => {
                let beside = self.overlapping_siblings(&cgroup)?;
                Err(EnforceError::InvalidPartition { cgroup, reason: reason.clone(), beside })
            }
            _ => Err(EnforceError::NotTaken {
                cgroup,
                knob,
                wanted: Box::new(written.clone()),
                found: Box::new(found),
            }),
        }
    }

    /// Returns the nodes that the cgroup may use after a step.
    fn nodes(&self, step: &WriteStep) -> NodeSet {
        match &step.to {
            KnobValue::Nodes(nodes) if !nodes.is_empty() => nodes.clone(),
            _ => self.options.possible_nodes.clone(),
        }
    }

    /// Writes `cpuset.mems`, which moves pages.
    fn move_pages(&self, step: &WriteStep) -> Result<MigrationState, EnforceError> {
        let dir = step.cgroup.dir(&self.root);
        // The kernel does nothing if the value is the same.
        if !self.still_holds(step) {
            let EnforcerOptions { proc, lock_wait, .. } = &self.options;
            let checked = self.map_locks.check(proc, &step.cgroup, &dir, *lock_wait);
            checked.map_err(|holder| EnforceError::MapLocked { cgroup: step.cgroup.clone(), holder })?;
        }
        let (this, own, turn) = (self.clone(), step.clone(), self.turns.begin(step));
        let moving =
            migrate(&self.writers, &dir, self.nodes(step), None, self.options.migration_wait, move || {
                let dir = own.cgroup.dir(&this.root);
                let is_first = this.read(&own.cgroup, own.knob).is_ok_and(|found| is_empty_set(&found));
                let before = resident(&dir);
                this.write_in_turn(&turn, &own)?;
                let nodes = this.nodes(&own);
                if is_first && stayed(&before, &resident(&dir), &nodes) {
                    this.write_twice(&turn, &own)?;
                }
                this.migrate_remaining_pages(&turn, &own, &before, &nodes);
                Ok(())
            })?;
        if !is_empty_set(&step.to) {
            self.check(step, &step.to)?;
        }
        Ok(moving)
    }

    /// Writes `cpuset.mems` twice, first with the nodes of the parent, to move pages that the first write has not
    /// moved; see [`migration`](super::migration).
    fn write_twice(&self, turn: &Turn, step: &WriteStep) -> Result<(), KnobError> {
        let parent = step.cgroup.parent().map(|parent| self.read(&parent, Knob::CpusetMemsEffective));
        let Some(Ok(to @ KnobValue::Nodes(_))) = parent else { return Ok(()) };
        let wide = WriteStep { to, ..step.clone() };
        for (held, next) in [(step, &wide), (&wide, step)] {
            if !self.still_holds(held) {
                break;
            }
            self.write_in_turn(turn, next)?;
        }
        Ok(())
    }

    /// Writes a step of `cpuset.mems` unless a later write has begun. If one begins meanwhile, writes the later value
    /// afterwards.
    fn write_in_turn(&self, turn: &Turn, step: &WriteStep) -> Result<(), KnobError> {
        if turn.is_last() {
            self.write_step(step)?;
        }
        match turn.later() {
            Some(later) if self.still_holds(step) => self.write_step(&later).map(drop),
            _ => Ok(()),
        }
    }

    /// Returns whether a knob still holds the value of this step.
    fn still_holds(&self, step: &WriteStep) -> bool {
        let found = self.read(&step.cgroup, step.knob);
        found.is_ok_and(|found| self.is_restored(step.knob, &step.to, &found))
    }

    /// Moves the pages of each process if the kernel has not moved them, see [`migration`](super::migration).
    fn migrate_remaining_pages(&self, turn: &Turn, step: &WriteStep, before: &MemoryByNode, nodes: &NodeSet) {
        let dir = step.cgroup.dir(&self.root);
        let after = resident(&dir);
        if stayed(before, &after, nodes) && self.still_holds(step) {
            pages::migrate(&dir, &left_on(&after, nodes), nodes, || !turn.is_last());
        }
    }

    /// Moves the pages after systemd was the first to write `cpuset.mems` since the cgroup has had memory, in which
    /// case the kernel may not move them.
    fn migrate_after_first_write(
        &self,
        step: &WriteStep,
        before: MemoryByNode,
        began: Instant,
    ) -> Result<MigrationState, EnforceError> {
        let (dir, nodes) = (step.cgroup.dir(&self.root), self.nodes(step));
        let after = resident(&dir);
        if !stayed(&before, &after, &nodes) {
            return Ok(MigrationState::Done(Migration { nodes, before, after, took: began.elapsed() }));
        }
        let (this, own, turn) = (self.clone(), step.clone(), self.turns.begin(step));
        let (found, to) = (before.clone(), nodes.clone());
        let moving =
            migrate(&self.writers, &dir, nodes, Some(before), self.options.migration_wait, move || {
                this.write_twice(&turn, &own)?;
                this.migrate_remaining_pages(&turn, &own, &found, &to);
                Ok(())
            })?;
        self.check(step, &step.to)?;
        Ok(moving)
    }
}

/// Returns the value of a knob in a new cgroup.
pub(super) fn unset(knob: Knob) -> KnobValue {
    match knob {
        Knob::CpusetCpus | Knob::CpusetCpusEffective | Knob::CpusetCpusExclusive => {
            KnobValue::Cpus(CpuSet::new())
        }
        Knob::CpusetMems | Knob::CpusetMemsEffective => KnobValue::Nodes(NodeSet::new()),
        Knob::CpusetPartition => KnobValue::Partition(Partition::Member.into()),
        Knob::MemoryMin | Knob::MemoryLow => KnobValue::Limit(Limit::Bytes(Bytes(0))),
        Knob::MemoryHigh | Knob::MemoryMax | Knob::HugetlbMax(_) => KnobValue::Limit(Limit::Max),
        Knob::CpuMax => KnobValue::Quota(Quota::Max),
        Knob::SubtreeControl => KnobValue::Controllers(BTreeSet::new()),
        Knob::Procs => KnobValue::Processes(Vec::new()),
    }
}

/// Returns whether the value of an ancestor is sufficient for the wanted value.
pub(super) fn covers(found: &KnobValue, wanted: &KnobValue) -> bool {
    match (found, wanted) {
        (KnobValue::Limit(found), KnobValue::Limit(wanted)) => found >= wanted,
        (KnobValue::Cpus(found), KnobValue::Cpus(wanted)) => wanted.is_subset(found),
        _ => found == wanted,
    }
}

/// Returns whether this is the empty set, which means all that the parent has.
fn is_empty_set(value: &KnobValue) -> bool {
    match value {
        KnobValue::Cpus(cpus) => cpus.is_empty(),
        KnobValue::Nodes(nodes) => nodes.is_empty(),
        _ => false,
    }
}

impl Cgroupfs {
    /// Returns the value of a knob, or that of a new cgroup if the knob does not exist.
    pub(super) fn found(&self, cgroup: &CgroupPath, knob: Knob) -> Result<KnobValue, EnforceError> {
        match self.read(cgroup, knob) {
            Err(KnobError::Missing { .. }) => Ok(unset(knob)),
            result => Ok(result?),
        }
    }

    /// Writes steps to the knobs of one cgroup, and returns when the knobs hold the values.
    pub(super) fn write(&self, steps: &[WriteStep]) -> Result<Option<MigrationState>, Box<StepError>> {
        let mut moving = None;
        for step in steps {
            let fail = |error| StepError::new(error, step);
            if step.knob == Knob::CpusetMems {
                moving = Some(self.move_pages(step).map_err(fail)?);
            } else {
                let written = self.write_step(step).map_err(|error| fail(error.into()))?;
                self.check(step, &written).map_err(fail)?;
            }
        }
        Ok(moving)
    }
}

impl Systemd {
    /// Writes steps to the properties of a unit, and returns when the kernel's files, read through `cgroupfs`, hold the
    /// values.
    pub(super) fn write_steps(
        &self,
        unit: &str,
        cgroupfs: &Cgroupfs,
        steps: &[WriteStep],
    ) -> Result<Option<MigrationState>, Box<StepError>> {
        let Some(first) = steps.first() else { return Ok(None) };
        let mut moving = None;
        let mut first_time = None;
        // The writer waits while pages move; this should not be the init of the host.
        for step in steps.iter().filter(|step| step.knob == Knob::CpusetMems) {
            match cgroupfs.move_pages(step) {
                Ok(moved) => moving = Some(moved),
                // systemd enables the controller when the property is set.
                Err(EnforceError::Knob(KnobError::Missing { .. })) => {
                    first_time = Some((step, resident(&step.cgroup.dir(cgroupfs.root())), Instant::now()));
                }
                // The unit is not running.
                Err(EnforceError::Knob(KnobError::Gone { .. })) => {}
                Err(error) => return Err(StepError::new(error, step)),
            }
        }
        // systemd may disable the controller once no unit needs it. A write to the knob at that moment is lost, and
        // the processes
        // keep their CPUs: the kernel does not find them in this cgroup any more, and does not change them in the
        // parent.
        for step in steps.iter().filter(|step| step.knob == Knob::CpusetCpus && is_empty_set(&step.to)) {
            if let Err(error) = cgroupfs.write_step(step)
                && !error.is_gone()
            {
                return Err(StepError::new(error.into(), step));
            }
        }
        let values: Vec<_> = steps.iter().map(|step| (step.knob, &step.to)).collect();
        self.write(unit, &values).map_err(|error| StepError::new(error, first))?;

        let deadline = Instant::now() + SYSTEMD_WRITE_TIMEOUT;
        for step in steps {
            if is_empty_set(&step.to) {
                // systemd writes the empty set too, and ignores that the kernel refuses it.
                let held = cgroupfs.read(&step.cgroup, step.knob);
                let is_set = held.is_ok_and(|held| !cgroupfs.is_restored(step.knob, &step.to, &held));
                if is_set
                    && let Err(error) = cgroupfs.write_step(step)
                    && !error.is_gone()
                {
                    return Err(StepError::new(error.into(), step));
                }
                continue;
            }
            loop {
                match cgroupfs.check(step, &step.to) {
                    Ok(()) => break,
                    // A unit that is not running keeps its properties for the next start.
                    Err(error) if error.is_gone() => break,
                    Err(error) if Instant::now() >= deadline => return Err(StepError::new(error, step)),
                    Err(_) => thread::sleep(POLL_INTERVAL),
                }
            }
        }
        if let Some((step, before, began)) = first_time
            && !is_empty_set(&step.to)
        {
            match cgroupfs.migrate_after_first_write(step, before, began) {
                Ok(moved) => moving = Some(moved),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(StepError::new(error, step)),
            }
        }
        Ok(moving)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc::Receiver};

    use super::*;
    use crate::Owner;

    #[test]
    fn does_not_write_held_value_again() {
        let dir = tempfile::tempdir().unwrap();
        let knob = dir.path().join("cpuset.cpus");
        fs::write(&knob, "0,1\n").unwrap();
        let cgroupfs = Cgroupfs::new(
            dir.path().to_owned(),
            EnforcerOptions::new("0-3".parse().unwrap(), NodeSet::new()),
        );
        let write = |cpus: &str| {
            cgroupfs
                .write_knob(dir.path(), Knob::CpusetCpus, &KnobValue::Cpus(cpus.parse().unwrap()))
                .unwrap();
            fs::read_to_string(&knob).unwrap()
        };
        assert_eq!(write("0-1"), "0,1\n");
        assert!(write("2").starts_with("2\n"));
    }

    /// Begins a write of node 1 to the `cpuset.mems` of a cgroup with pages that do not move, so that the write is
    /// repeated. The nodes of the parent are a pipe, which holds up the repetition until the test writes it.
    fn slow_move(dir: &Path) -> (Cgroupfs, WriteStep, Receiver<Result<Migration, KnobError>>) {
        use rustix::fs::{CWD, Mode, mkfifoat};
        fs::create_dir(dir.join("a")).unwrap();
        fs::write(dir.join("a/cpuset.mems"), "\n").unwrap();
        fs::write(dir.join("a/memory.numa_stat"), "anon N0=8192 N1=0\nfile N0=0 N1=0\n").unwrap();
        mkfifoat(CWD, dir.join("cpuset.mems.effective"), Mode::RUSR | Mode::WUSR).unwrap();
        let mut options = EnforcerOptions::new(CpuSet::new(), "0-1".parse().unwrap());
        options.migration_wait = Duration::from_millis(20);
        let cgroupfs = Cgroupfs::new(dir.to_owned(), options);
        let step = WriteStep {
            cgroup: "/a".parse().unwrap(),
            owner: Owner::Cgroupfs,
            knob: Knob::CpusetMems,
            from: KnobValue::Nodes(NodeSet::new()),
            to: KnobValue::Nodes("1".parse().unwrap()),
        };
        let Ok(MigrationState::Running(result)) = cgroupfs.move_pages(&step) else {
            panic!("it does not wait")
        };
        (cgroupfs, step, result)
    }

    #[test]
    fn slow_migration_keeps_later_value() {
        let dir = tempfile::tempdir().unwrap();
        let (knob, parent) = (dir.path().join("a/cpuset.mems"), dir.path().join("cpuset.mems.effective"));
        let (_cgroupfs, _, result) = slow_move(dir.path());
        assert_eq!(fs::read_to_string(&knob).unwrap().trim(), "1");
        // The administrator writes.
        fs::write(&knob, "0-1\n").unwrap();
        fs::write(&parent, "0-3\n").unwrap();
        result.recv().unwrap().unwrap();
        assert_eq!(fs::read_to_string(&knob).unwrap(), "0-1\n");
    }

    #[test]
    fn slow_write_yields_to_later_write() {
        let dir = tempfile::tempdir().unwrap();
        let (knob, parent) = (dir.path().join("a/cpuset.mems"), dir.path().join("cpuset.mems.effective"));
        let (cgroupfs, step, result) = slow_move(dir.path());
        // The new write holds the same value.
        let later = cgroupfs.turns.begin(&step);
        fs::write(&parent, "0-3\n").unwrap();
        result.recv().unwrap().unwrap();
        assert_eq!(fs::read_to_string(&knob).unwrap(), "1\n", "not written once more");

        // A write that was about to be made when a later one began.
        let wide = WriteStep { to: KnobValue::Nodes("0-1".parse().unwrap()), ..step.clone() };
        let last = cgroupfs.turns.begin(&wide);
        cgroupfs.write_in_turn(&last, &wide).unwrap();
        fs::write(&knob, "1\n").unwrap();
        cgroupfs.write_in_turn(&later, &step).unwrap();
        assert_eq!(fs::read_to_string(&knob).unwrap().lines().next(), Some("0-1"));
        drop((later, last));
        assert!(cgroupfs.turns.begin(&step).is_last());
    }

    #[test]
    fn restored_nodes_may_be_offline() {
        let (all, online): (NodeSet, NodeSet) = ("0-2".parse().unwrap(), "0-1".parse().unwrap());
        let cgroupfs = Cgroupfs::new(
            PathBuf::from("/nonexistent"),
            EnforcerOptions::new("0-7".parse().unwrap(), all.clone()),
        );
        let [none, narrow, wide] = [NodeSet::new(), online, all.clone()].map(KnobValue::Nodes);
        // A cgroup that is released while node 2 is offline gets it as soon as it is online.
        let step = WriteStep {
            cgroup: "/a".parse().unwrap(),
            owner: Owner::Cgroupfs,
            knob: Knob::CpusetMems,
            from: narrow.clone(),
            to: none.clone(),
        };
        assert_eq!(cgroupfs.nodes(&step), all);
        let is_restored = |held: &KnobValue| cgroupfs.is_restored(Knob::CpusetMems, &none, held);
        assert_eq!([&none, &wide, &narrow].map(is_restored), [true, true, false]);
    }

    #[test]
    fn invalid_partition_names_siblings() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (cgroup, cpus) in
            [("part", "2-3"), ("all", "0-7"), ("more", "3"), ("others", "0-1"), ("none", "")]
        {
            file(&format!("{cgroup}/cpuset.cpus"), cpus);
        }
        file("without/cgroup.procs", "");
        let cgroupfs = Cgroupfs::new(
            dir.path().to_owned(),
            EnforcerOptions::new("0-7".parse().unwrap(), NodeSet::new()),
        );
        let to = KnobValue::Partition(PartitionState { partition: Partition::Root, invalid: None });
        let step = WriteStep {
            cgroup: "/part".parse().unwrap(),
            owner: Owner::Cgroupfs,
            knob: Knob::CpusetPartition,
            from: to.clone(),
            to: to.clone(),
        };
        let check = |text: &str| {
            file("part/cpuset.cpus.partition", text);
            cgroupfs.check(&step, &to).map_err(|error| error.to_string())
        };
        assert_eq!(check("root\n"), Ok(()));
        let expected = "/part: the partition is invalid: Cpu list in cpuset.cpus not exclusive \
                        (its CPUs are also in cpuset.cpus of /all, /more)";
        let refused = check("root invalid (Cpu list in cpuset.cpus not exclusive)\n");
        assert_eq!(refused, Err(expected.to_owned()));
    }
}

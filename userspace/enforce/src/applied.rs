//! What was written where, and what was found there before: the durable half of enforcement.
//!
//! [`AppliedSettings`] are part of the ledger's payload, and a value: a [`EnforcementPlan`](super::EnforcementPlan) carries those to store
//! before the first knob is written and those that are true after the last.
//!
//! Invariant: for every knob that may differ from what was found because of us, a stored record says what was
//! found. So a crash at any moment loses no value that a release has to bring back.

use std::{collections::BTreeSet, ops::Bound, path::Path, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath, knob::Knob};
use numaward_model::{Settings, SharedMap, Values};
use serde::{Deserialize, Serialize};

use super::thread_masks::ThreadMasks;

/// Who writes the knobs of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, derive_more::Display)]
#[serde(rename_all = "lowercase")]
#[display(rename_all = "lowercase")]
pub enum Owner {
    /// We do, directly.
    Cgroupfs,
    /// systemd does, for this unit; what it has no property for is written directly.
    #[display("systemd ({_0})")]
    Systemd(String),
}

impl Owner {
    /// The owner of a cgroup on a host whose init is systemd.
    ///
    /// systemd owns the cgroups of its units: slices, nested in each other, and the services, scopes,
    /// sockets, mounts and swaps in them. What is below one of those is delegated (the container in a scope,
    /// the units of a user's manager), and what does not look like a unit was made by somebody else.
    ///
    /// Source: systemd's `CGROUP_DELEGATION.md`; `cg_escape` for the leading underscore.
    pub fn under_systemd(path: &CgroupPath) -> Self {
        let mut components = path.components().peekable();
        while let Some(component) = components.next() {
            let name = component.strip_prefix('_').unwrap_or(component);
            let is_last = components.peek().is_none();
            match name.rsplit_once('.') {
                Some((_, "slice")) if !is_last => {}
                Some((_, "slice" | "service" | "scope" | "socket" | "mount" | "swap")) if is_last => {
                    return Self::Systemd(name.to_owned());
                }
                _ => return Self::Cgroupfs,
            }
        }
        Self::Cgroupfs
    }

    /// The word for the label `backend`.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd(_) => "systemd",
        }
    }
}

/// What is known of one cgroup: held itself, an ancestor of one that is held, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Which cgroup had the path: a new one of the same name has another id and none of our values.
    pub id: CgroupId,
    /// Who writes its knobs.
    pub owner: Owner,
    /// What was asked for; empty for a mere ancestor.
    #[serde(default, skip_serializing_if = "Settings::is_empty")]
    pub settings: Settings,
    /// What it is to hold: the settings, and what descendants need here.
    pub written: Values,
    /// What each of these knobs held before.
    pub found: Values,
    /// Those of these knobs whose property had no runtime drop-in before: the one that is there now is ours.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub own_drop_ins: BTreeSet<Knob>,
    /// The state of its threads while its CPUs are narrowed; absent if it is not known which threads had affinities of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_masks: Option<Arc<ThreadMasks>>,
}

impl Record {
    /// Of a cgroup in which nothing was written yet.
    pub fn new(id: CgroupId, owner: Owner) -> Self {
        let (settings, written, found, own_drop_ins, thread_masks) = Default::default();
        Self { id, owner, settings, written, found, own_drop_ins, thread_masks }
    }

    /// Whether it has yet to get back CPUs, because a partition of another cgroup has them or a write failed.
    pub fn has_pending_cpus(&self) -> bool {
        self.settings.cpus.is_none() && self.written.0.contains_key(&Knob::CpusetCpus)
    }

    /// Whether it is a partition, or may be one.
    fn has_partition(&self) -> bool {
        self.written.0.contains_key(&Knob::CpusetPartition)
    }
}

/// All that enforcement has to remember. Cheap to copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AppliedSettings {
    pub(super) records: SharedMap<CgroupPath, Record>,
}

impl AppliedSettings {
    /// The record of a cgroup.
    pub fn get(&self, path: &CgroupPath) -> Option<&Arc<Record>> {
        self.records.get(path)
    }

    /// Enters what was learnt elsewhere.
    pub fn insert(&mut self, path: CgroupPath, record: Arc<Record>) {
        self.records.insert(path, record);
    }

    /// Enters a record, unless it is there already.
    pub(super) fn put(&mut self, path: &CgroupPath, record: Record) {
        if self.get(path).is_none_or(|known| **known != record) {
            self.records.insert(path.clone(), record);
        }
    }

    /// All records, parents before children.
    pub fn iter(&self) -> impl Iterator<Item = (&CgroupPath, &Arc<Record>)> {
        self.records.iter()
    }

    /// Whether there are records of cgroups below this one.
    pub fn is_above(&self, path: &CgroupPath) -> bool {
        let mut from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        from.next().is_some_and(|(below, _)| path.contains(below))
    }

    /// The knobs of which what was found is yet to be given back, by cgroup: nothing asks any more for what was written.
    pub fn pending_restores(&self) -> impl Iterator<Item = (&CgroupPath, &Arc<Record>, Vec<Knob>)> {
        let pending = self.iter().map(|(path, record)| (path, record, self.pending_knobs(path)));
        pending.filter(|(.., knobs)| !knobs.is_empty())
    }

    /// Likewise, of one cgroup. What a cgroup below it may need does not count.
    pub fn pending_knobs(&self, path: &CgroupPath) -> Vec<Knob> {
        let Some(record) = self.get(path) else { return Vec::new() };
        let asked = record.settings.values();
        let mut pending: Vec<Knob> =
            record.written.0.keys().filter(|knob| !asked.0.contains_key(knob)).copied().collect();
        if record.settings.has_partition() {
            pending.retain(|knob| *knob != Knob::CpusetCpusExclusive);
        }
        if pending.iter().any(serves_descendants) && self.is_held_below(path) {
            pending.retain(|knob| !serves_descendants(knob));
        }
        pending
    }

    /// What is known of threads in narrowed cgroups above and below this one.
    pub(super) fn thread_masks_around(&self, path: &CgroupPath) -> impl Iterator<Item = Option<ThreadMasks>> {
        let above = path.ancestors().skip(1).filter_map(|above| self.get(&above));
        let from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        let below = from.take_while(|(below, _)| path.contains(below)).map(|(_, record)| record);
        let narrowed = above.chain(below).filter(|record| record.written.0.contains_key(&Knob::CpusetCpus));
        narrowed.map(|record| record.thread_masks.as_deref().cloned())
    }

    /// The cgroups that have got other CPUs since, with their id and what was noted of their threads.
    pub fn thread_masks_since(&self, before: &Self) -> Vec<(CgroupPath, CgroupId, Arc<ThreadMasks>)> {
        let changed = self.records.changed_since(&before.records).into_iter();
        let other_cpus = |path: CgroupPath| {
            let was = before.get(&path)?;
            let now = self.get(&path).and_then(|record| record.written.0.get(&Knob::CpusetCpus));
            let masks = was.thread_masks.clone()?;
            (was.written.0.get(&Knob::CpusetCpus) != now).then_some((path, was.id, masks))
        };
        changed.filter_map(other_cpus).collect()
    }

    /// Whether a cgroup below this one holds settings.
    fn is_held_below(&self, path: &CgroupPath) -> bool {
        let from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        let mut below = from.take_while(|(below, _)| path.contains(below));
        below.any(|(_, record)| !record.settings.is_empty())
    }

    /// The records themselves.
    pub fn records(&self) -> &SharedMap<CgroupPath, Record> {
        &self.records
    }

    /// The cgroups that hold settings.
    pub fn held(&self) -> impl Iterator<Item = (&CgroupPath, &Settings)> {
        self.records
            .iter()
            .filter(|(_, record)| !record.settings.is_empty())
            .map(|(path, record)| (path, &record.settings))
    }

    /// Those that may get back CPUs when these are no partitions any more: the children of each cgroup above one, as one of
    /// them has the partition's CPUs as well.
    pub(super) fn owed_beside(&self, ended: &[&CgroupPath]) -> BTreeSet<CgroupPath> {
        let is_partition = |path: &&CgroupPath| self.get(path).is_some_and(|record| record.has_partition());
        let partitions = ended.iter().copied().filter(is_partition);
        let above: BTreeSet<_> = partitions.flat_map(|path| path.ancestors().skip(1)).collect();
        if above.is_empty() {
            return BTreeSet::new();
        }
        let is_beside = |path: &CgroupPath| path.parent().is_some_and(|parent| above.contains(&parent));
        let owed = self
            .iter()
            .filter(|(path, record)| record.has_pending_cpus() && is_beside(path) && !ended.contains(path));
        owed.map(|(path, _)| path.clone()).collect()
    }

    /// Somebody has set these knobs of a cgroup to other values, over which ours are written: these are what it gets back.
    pub fn note_found(&mut self, path: &CgroupPath, values: &Values) {
        let Some(record) = self.records.get_mut(path) else { return };
        for (knob, found) in &mut record.found.0 {
            if let Some(value) = values.0.get(knob) {
                found.clone_from(value);
                record.own_drop_ins.remove(knob);
            }
        }
    }

    /// The host was started anew: none of the cgroups is there any more, whatever has their paths and ids. systemd's runtime
    /// properties have ended too: what was written and found there is over, and units may have been edited since.
    pub fn forget_boot(&mut self) {
        for record in self.records.values_mut() {
            record.id = CgroupId::NONE;
            (record.written, record.found, record.own_drop_ins, record.thread_masks) = Default::default();
        }
    }

    /// The cgroups that are to hold settings of which nothing was written since the host was started.
    pub fn unwritten(&self) -> impl Iterator<Item = &CgroupPath> {
        let is_unwritten = |record: &Record| !record.settings.is_empty() && record.written.0.is_empty();
        self.records.iter().filter(move |(_, record)| is_unwritten(record)).map(|(path, _)| path)
    }

    /// The cgroup is to get back what was found.
    pub(super) fn release(&mut self, path: &CgroupPath) {
        if let Some(record) = self.records.get_mut(path) {
            record.settings = Settings::default();
        }
    }

    /// Applies the difference between two others to this one, which may differ elsewhere.
    pub fn patch(&mut self, from: &Self, to: &Self) {
        self.records.patch(&from.records, &to.records);
    }

    /// Whether nothing was written that a release would have to bring back.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

/// Whether a cgroup may hold this knob for cgroups below it.
fn serves_descendants(knob: &Knob) -> bool {
    matches!(knob, Knob::MemoryMin | Knob::MemoryLow | Knob::CpusetCpusExclusive | Knob::CpuMax)
}

/// The id of the cgroup that has this directory now.
pub(super) fn id_of(dir: &Path) -> Option<CgroupId> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(dir).ok().filter(std::fs::Metadata::is_dir).map(|dir| CgroupId(dir.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_systemds_and_what_is_below_is_ours() {
        for (path, unit) in [
            ("/system.slice/nginx.service", Some("nginx.service")),
            ("/system.slice", Some("system.slice")),
            ("/init.scope", Some("init.scope")),
            ("/machine.slice/machine-qemu.slice/vm-1.scope", Some("vm-1.scope")),
            ("/system.slice/_memory.service", Some("memory.service")),
            ("/kubepods.slice/kubepods-podx.slice/cri-containerd-1.scope", Some("cri-containerd-1.scope")),
            ("/kubepods.slice/kubepods-podx.slice/cri-containerd-1.scope/init", None),
            ("/user.slice/user-0.slice/user@0.service/app.slice/a.service", None),
            ("/system.slice/nginx.service/worker", None),
            ("/system.slice/made-by-hand", None),
            ("/kubepods/burstable/podx", None),
            ("/numaward/a.service", None),
            ("/a.service/b.service", None),
        ] {
            let owner = Owner::under_systemd(&path.parse().unwrap());
            match unit {
                Some(unit) => assert_eq!(owner, Owner::Systemd(unit.to_owned()), "{path}"),
                None => assert_eq!(owner, Owner::Cgroupfs, "{path}"),
            }
        }
    }
}

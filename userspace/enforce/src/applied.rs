//! Durable state of enforcement: the settings of each cgroup, the values that were written for them, and the original
//! values.
//!
//! [`AppliedSettings`] are a value and part of the ledger's payload. An [`EnforcementPlan`](super::EnforcementPlan) has
//! the state to store before the first knob is written and the state after the last write.
//!
//! Invariant: for every knob that the daemon may have changed, a stored record has the original value. A crash at any
//! moment therefore loses no value that a release has to restore.

use std::{collections::BTreeSet, mem, ops::Bound, path::Path, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath, knob::Knob};
use numaward_model::{Settings, SharedMap, Values};
use serde::{Deserialize, Serialize};

use super::thread_masks::{PendingReset, ThreadMasks};

/// The program that writes the knobs of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, derive_more::Display)]
#[serde(rename_all = "lowercase")]
#[display(rename_all = "lowercase")]
pub enum Owner {
    /// The daemon, directly.
    Cgroupfs,
    /// systemd, for this unit. A knob without a property of the unit is written directly.
    #[display("systemd ({_0})")]
    Systemd(String),
}

impl Owner {
    /// Returns the owner of a cgroup on a host with systemd as init.
    ///
    /// systemd owns the cgroups of its units: nested slices, and the services, scopes, sockets, mounts and swaps in
    /// them. Everything below one of those is delegated (the container in a scope, the units of a user's manager). A
    /// cgroup with another kind of name was created by another program.
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

    /// Returns the value of the metric label `backend`.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd(_) => "systemd",
        }
    }
}

/// State of one cgroup that has settings, is an ancestor of one with settings, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Identity of the cgroup. A new cgroup at the same path has another id and none of the written values.
    pub id: CgroupId,
    pub owner: Owner,
    /// Settings of the cgroup itself; empty if it is only an ancestor.
    #[serde(default, skip_serializing_if = "Settings::is_empty")]
    pub settings: Settings,
    /// Values to hold: the settings, and the values that descendants need here.
    pub written: Values,
    /// Original value of each of these knobs.
    pub found: Values,
    /// Earlier written value of each knob that may still have it: its last write is not finished, or failed.
    #[serde(default, skip_serializing_if = "Values::is_empty")]
    pub replaced: Values,
    /// Knobs in `written` with a property that had no runtime drop-in before: the present one belongs to the
    /// daemon.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub own_drop_ins: BTreeSet<Knob>,
    /// The state of its threads while its CPUs are narrowed; absent if it is not known which threads had affinities of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_masks: Option<Arc<ThreadMasks>>,
}

impl Record {
    /// Creates the record of a cgroup in which nothing was written yet.
    pub fn new(id: CgroupId, owner: Owner) -> Self {
        let (settings, written, found, replaced, own_drop_ins, thread_masks) = Default::default();
        Self { id, owner, settings, written, found, replaced, own_drop_ins, thread_masks }
    }

    /// Returns whether two records are equal once their writes are finished.
    pub fn is_equal_when_written(&self, other: &Self) -> bool {
        let Self { id, owner, settings, written, found, replaced: _, own_drop_ins, thread_masks } = self;
        *id == other.id
            && *owner == other.owner
            && *settings == other.settings
            && *written == other.written
            && *found == other.found
            && *own_drop_ins == other.own_drop_ins
            && *thread_masks == other.thread_masks
    }

    /// Removes all values of a knob.
    pub(super) fn remove(&mut self, knob: Knob) {
        for values in [&mut self.written, &mut self.found, &mut self.replaced] {
            values.0.remove(&knob);
        }
    }

    /// Returns whether CPUs of the cgroup are still to be restored: a partition of another cgroup has them, or a write
    /// failed.
    pub fn has_pending_cpus(&self) -> bool {
        self.settings.cpus.is_none() && self.written.0.contains_key(&Knob::CpusetCpus)
    }

    /// Returns whether the cgroup is a partition, or may be one.
    fn has_partition(&self) -> bool {
        self.written.0.contains_key(&Knob::CpusetPartition)
    }
}

/// The records of all cgroups. Cheap to copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AppliedSettings {
    pub(super) records: SharedMap<CgroupPath, Record>,
}

impl AppliedSettings {
    pub fn get(&self, path: &CgroupPath) -> Option<&Arc<Record>> {
        self.records.get(path)
    }

    /// Inserts a record that was read elsewhere, such as in a backup.
    pub fn insert(&mut self, path: CgroupPath, record: Arc<Record>) {
        self.records.insert(path, record);
    }

    /// Inserts a record if it differs from the present one.
    pub(super) fn update(&mut self, path: &CgroupPath, record: Record) {
        if self.get(path).is_none_or(|known| **known != record) {
            self.records.insert(path.clone(), record);
        }
    }

    /// Iterates over the records, parents before children.
    pub fn iter(&self) -> impl Iterator<Item = (&CgroupPath, &Arc<Record>)> {
        self.records.iter()
    }

    /// Returns whether there are records of cgroups below this one.
    pub fn is_above(&self, path: &CgroupPath) -> bool {
        let mut from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        from.next().is_some_and(|(below, _)| path.contains(below))
    }

    /// Returns the knobs with a pending restore, by cgroup: they were written, and no settings ask for them any more.
    pub fn pending_restores(&self) -> impl Iterator<Item = (&CgroupPath, &Arc<Record>, Vec<Knob>)> {
        let pending = self.iter().map(|(path, record)| (path, record, self.pending_knobs(path)));
        pending.filter(|(.., knobs)| !knobs.is_empty())
    }

    /// Returns the knobs of one cgroup with a pending restore. Knobs that a descendant may need are not among them.
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

    /// Returns the narrowed cgroups above and below this one, and the affinities that were recorded for them.
    pub(super) fn thread_masks_around(
        &self,
        path: &CgroupPath,
    ) -> impl Iterator<Item = (CgroupPath, Option<&ThreadMasks>)> {
        let above = path.ancestors().skip(1).filter_map(|above| Some((self.get(&above)?, above)));
        let from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        let below = from.take_while(|(below, _)| path.contains(below));
        let all = above.chain(below.map(|(below, record)| (record, below.clone())));
        let narrowed = all.filter(|(record, _)| record.written.0.contains_key(&Knob::CpusetCpus));
        narrowed.map(|(record, path)| (path, record.thread_masks.as_deref()))
    }

    /// Returns the cgroups with other CPUs than before, and the recorded affinities of their threads.
    pub fn resets_since(&self, before: &Self) -> Vec<(CgroupPath, PendingReset)> {
        let changed = self.records.changed_since(&before.records).into_iter();
        let other_cpus = |path: CgroupPath| {
            let was = before.get(&path)?;
            let now = self.get(&path).and_then(|record| record.written.0.get(&Knob::CpusetCpus));
            let masks = was.thread_masks.clone()?;
            (was.written.0.get(&Knob::CpusetCpus) != now)
                .then_some((path, PendingReset { id: was.id, masks }))
        };
        changed.filter_map(other_cpus).collect()
    }

    /// Returns whether a cgroup below this one has settings.
    fn is_held_below(&self, path: &CgroupPath) -> bool {
        let from = self.records.range((Bound::Excluded(path), Bound::Unbounded));
        let mut below = from.take_while(|(below, _)| path.contains(below));
        below.any(|(_, record)| !record.settings.is_empty())
    }

    pub fn records(&self) -> &SharedMap<CgroupPath, Record> {
        &self.records
    }

    /// Returns the cgroups with settings.
    pub fn held(&self) -> impl Iterator<Item = (&CgroupPath, &Settings)> {
        self.records
            .iter()
            .filter(|(_, record)| !record.settings.is_empty())
            .map(|(path, record)| (path, &record.settings))
    }

    /// Returns the cgroups with pending CPUs that can be restored when the partitions among `ended` end: the children
    /// of all ancestors of each partition, because one of these has the partition's CPUs as well.
    pub(super) fn pending_cpus_beside(&self, ended: &[&CgroupPath]) -> BTreeSet<CgroupPath> {
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

    /// Replaces original values by those that another program wrote. To be called before these are overwritten, so that
    /// the release restores them.
    pub fn note_found(&mut self, path: &CgroupPath, values: &Values) {
        let Some(record) = self.records.get_mut(path) else { return };
        for (knob, found) in &mut record.found.0 {
            if let Some(value) = values.0.get(knob) {
                found.clone_from(value);
                record.own_drop_ins.remove(knob);
            }
        }
    }

    /// Forgets values after the host restarted: no cgroup has the same identity any more, and systemd's runtime
    /// properties have ended, so that units may have other properties now.
    pub fn forget_boot(&mut self) {
        for record in self.records.values_mut() {
            *record = Record {
                settings: mem::take(&mut record.settings),
                ..Record::new(CgroupId::NONE, record.owner.clone())
            };
        }
    }

    /// Returns the cgroups with settings of which nothing was written since the host started.
    pub fn unwritten(&self) -> impl Iterator<Item = &CgroupPath> {
        let is_unwritten = |record: &Record| !record.settings.is_empty() && record.written.0.is_empty();
        self.records.iter().filter(move |(_, record)| is_unwritten(record)).map(|(path, _)| path)
    }

    /// Replaces the settings of a cgroup. Written knobs without a setting become pending restores.
    pub fn replace_settings(&mut self, path: &CgroupPath, settings: Settings) {
        if let Some(record) = self.records.get_mut(path) {
            record.settings = settings;
        }
    }

    /// Applies the difference between `from` and `to` to these records, which may differ elsewhere.
    pub fn patch(&mut self, from: &Self, to: &Self) {
        self.records.patch(&from.records, &to.records);
    }

    /// Returns whether these records are equal to others once the writes of these are finished.
    pub fn is_equal_when_written(&self, others: &Self) -> bool {
        self.records.changed_since(&others.records).iter().all(|path| {
            match (self.get(path), others.get(path)) {
                (Some(record), Some(other)) => record.is_equal_when_written(other),
                (record, other) => record.is_none() && other.is_none(),
            }
        })
    }

    /// Returns whether there is nothing that a release would have to restore.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

/// Returns whether a cgroup may hold this knob for its descendants.
fn serves_descendants(knob: &Knob) -> bool {
    matches!(knob, Knob::MemoryMin | Knob::MemoryLow | Knob::CpusetCpusExclusive | Knob::CpuMax)
}

/// Returns the id of the cgroup that has this directory now.
pub(super) fn id_of(dir: &Path) -> Option<CgroupId> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(dir).ok().filter(std::fs::Metadata::is_dir).map(|dir| CgroupId(dir.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_owns_units_only() {
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

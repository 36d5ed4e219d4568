//! The workloads and their books.
//!
//! Problem: probes count per slot, slots are fewer than workloads and are reused, cgroups come and go;
//! but a counter that is served must never go down, and the sum over all workloads must never lose a
//! page.
//!
//! Terms: a *workload* has a name and, while it lives, one or more cgroups (a name can be shared, as
//! by two mounts of one template). A cgroup may hold a *slot* or *wait* for one. The *base* of a workload is what
//! its slots had counted when they were given back.
//!
//! Algorithm: slots go to the cgroups in the order in which they were seen, parents before children;
//! who finds none waits, and gets the next that is free, the longest waiting first. A workload's counter is its base
//! plus its slots. When its last cgroup is gone it is kept for a while, so that its last values are
//! scraped; then it goes, and its base is added to `other`. `other` also has what the probes
//! count outside all slots.
//!
//! Invariants: while a workload is listed, its counters do not go down; nor does their sum over all, `other` included, ever.
//!
//! No I/O and no clock here: the caller passes counts and times.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_probes::{CgroupId, Counters, NodeCounters, Pages, SlotId, Snapshot};

use crate::metrics::{Pressure, Resident};

/// The name under which everything without counters of its own is counted.
pub(super) const OTHER: &str = "other";

/// All workloads.
#[derive(Debug, Default)]
pub(super) struct Table {
    workloads: BTreeMap<Arc<str>, Entry>,
    /// Which workload a cgroup is of.
    names: BTreeMap<CgroupId, Arc<str>>,
    waiting: VecDeque<CgroupId>,
    /// What workloads that are no longer listed had counted.
    gone: NodeCounters,
}

/// A workload.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) kind: &'static str,
    pub(super) members: BTreeMap<CgroupId, Member>,
    base: NodeCounters,
    base_trouble: Trouble,
    /// Whether it ever held a slot: if not, it has no counters of its own to serve.
    counted: bool,
    removed: Option<Instant>,
}

/// A cgroup of a workload.
#[derive(Debug)]
pub(super) struct Member {
    /// Below the cgroup mount, with a leading slash.
    pub(super) path: String,
    pub(super) slot: Option<SlotId>,
    pub(super) resident: Option<Arc<[Resident]>>,
    pub(super) trouble: Trouble,
}

/// What went wrong in a cgroup for want of memory; parts that cannot be read are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) pressure: Option<Pressure>,
    pub(super) oom_kills: Option<u64>,
}

impl Table {
    /// A cgroup of a workload appeared; it waits for a slot. `false` if it was known.
    pub(super) fn add(&mut self, id: CgroupId, path: String, name: &str, kind: &'static str) -> bool {
        if self.names.contains_key(&id) {
            return false;
        }
        let name =
            self.workloads.get_key_value(name).map_or_else(|| Arc::from(name), |(name, _)| name.clone());
        let entry = self.workloads.entry(name.clone()).or_default();
        entry.kind = kind;
        entry.removed = None;
        let member = Member { path, slot: None, resident: None, trouble: Trouble::default() };
        entry.members.insert(id, member);
        self.names.insert(id, name);
        self.waiting.push_back(id);
        true
    }

    /// The cgroup that is next to get a slot.
    pub(super) fn next_waiting(&self) -> Option<CgroupId> {
        self.waiting.front().copied()
    }

    /// The cgroup that waited longest got a slot, or cannot have one (`None`).
    pub(super) fn settle_waiting(&mut self, slot: Option<SlotId>) {
        let Some(id) = self.waiting.pop_front() else { return };
        let Some(name) = self.names.get(&id) else { return };
        let Some(entry) = self.workloads.get_mut(name) else { return };
        if let (Some(member), Some(slot)) = (entry.members.get_mut(&id), slot) {
            member.slot = Some(slot);
            entry.counted = true;
        }
    }

    /// The slot of a cgroup.
    pub(super) fn slot(&self, id: CgroupId) -> Option<SlotId> {
        self.workloads.get(self.names.get(&id)?)?.members.get(&id)?.slot
    }

    /// A cgroup is gone; `counted` is what its slot, now given back, had counted.
    pub(super) fn remove(&mut self, id: CgroupId, counted: &NodeCounters, now: Instant) {
        let Some(name) = self.names.remove(&id) else { return };
        self.waiting.retain(|&waiting| waiting != id);
        let Some(entry) = self.workloads.get_mut(&name) else { return };
        add(&mut entry.base, counted);
        if let Some(member) = entry.members.remove(&id) {
            entry.base_trouble = entry.base_trouble.plus(member.trouble);
        }
        if entry.members.is_empty() {
            entry.removed = Some(now);
        }
    }

    /// Takes workloads from the list that have been gone for `keep`.
    pub(super) fn expire(&mut self, now: Instant, keep: Duration) {
        let gone = &mut self.gone;
        self.workloads.retain(|_, entry| {
            let expired = entry.removed.is_some_and(|removed| now.duration_since(removed) >= keep);
            if expired {
                add(gone, &entry.base);
            }
            !expired
        });
    }

    /// The workloads by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Entry)> {
        self.workloads.iter()
    }

    /// The known cgroups.
    pub(super) fn cgroups(&self) -> impl Iterator<Item = (CgroupId, &str)> {
        self.workloads
            .values()
            .flat_map(|entry| &entry.members)
            .map(|(&id, member)| (id, member.path.as_str()))
    }

    /// What was read of a cgroup. One that is gone meanwhile is left alone.
    pub(super) fn set_read(&mut self, id: CgroupId, resident: Option<Arc<[Resident]>>, trouble: Trouble) {
        let entry = self.names.get(&id).and_then(|name| self.workloads.get_mut(name));
        if let Some(member) = entry.and_then(|entry| entry.members.get_mut(&id)) {
            member.resident = resident;
            // A file that cannot be read for once does not take back what it said before.
            member.trouble = Trouble {
                pressure: trouble.pressure.or(member.trouble.pressure),
                oom_kills: trouble.oom_kills.or(member.trouble.oom_kills),
            };
        }
    }

    /// What is counted as [`OTHER`].
    pub(super) fn other(&self, counters: &Snapshot) -> NodeCounters {
        let mut sum = counters.other.clone();
        add(&mut sum, &self.gone);
        sum
    }

    /// Cgroups with a slot, and without.
    pub(super) fn slots(&self) -> (u64, u64) {
        let members = self.workloads.values().flat_map(|entry| entry.members.values());
        members.fold((0, 0), |(with, without), member| match member.slot {
            Some(_) => (with + 1, without),
            None => (with, without + 1),
        })
    }
}

impl Entry {
    /// What the workload has allocated since it was seen first; `None` if it never had a slot.
    pub(super) fn counters(&self, counters: &Snapshot) -> Option<NodeCounters> {
        self.counted.then(|| {
            let mut sum = self.base.clone();
            for slot in self.members.values().filter_map(|member| member.slot) {
                if let Some(counted) = counters.slots.get(&slot) {
                    add(&mut sum, counted);
                }
            }
            sum
        })
    }

    /// Whether any of its cgroups has a slot.
    pub(super) fn has_slot(&self) -> bool {
        self.members.values().any(|member| member.slot.is_some())
    }

    /// Whether its last cgroup is gone.
    pub(super) fn is_removed(&self) -> bool {
        self.removed.is_some()
    }

    /// Where its memory lies, by node; `None` if none of its cgroups could be read.
    pub(super) fn resident(&self) -> Option<Arc<[Resident]>> {
        let mut read = self.members.values().filter_map(|member| member.resident.as_ref());
        let first = read.next()?;
        let Some(second) = read.next() else { return Some(first.clone()) };
        let mut sum = first.to_vec();
        for other in std::iter::once(second).chain(read) {
            for (sum, other) in sum.iter_mut().zip(other.iter()) {
                sum.anon.0 += other.anon.0;
                sum.file.0 += other.file.0;
                sum.kernel.0 += other.kernel.0;
            }
        }
        Some(sum.into())
    }

    /// What went wrong for want of memory since the workload was seen first.
    pub(super) fn trouble(&self) -> Trouble {
        self.members.values().fold(self.base_trouble, |sum, member| sum.plus(member.trouble))
    }
}

impl Trouble {
    fn plus(self, other: Self) -> Self {
        let pressure = match (self.pressure, other.pressure) {
            (Some(a), Some(b)) => {
                Some(Pressure { waiting: a.waiting + b.waiting, stalled: a.stalled + b.stalled })
            }
            (a, b) => a.or(b),
        };
        let oom_kills = match (self.oom_kills, other.oom_kills) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        Self { pressure, oom_kills }
    }
}

fn add(sum: &mut NodeCounters, counted: &NodeCounters) {
    for (&node, more) in counted {
        let sum: &mut Counters = sum.entry(node).or_default();
        let plus = |a: Pages, b: Pages| Pages(a.0 + b.0);
        *sum = Counters {
            user_local: plus(sum.user_local, more.user_local),
            user_remote: plus(sum.user_remote, more.user_remote),
            user_outside: plus(sum.user_outside, more.user_outside),
            kernel: plus(sum.kernel, more.kernel),
        };
    }
}

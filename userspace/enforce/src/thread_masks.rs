//! Threads that keep a narrow affinity after their cgroup has its CPUs back.
//!
//! # Problem
//! Since Linux 6.2, the kernel remembers the affinity that a thread requested. A runtime that reads its affinity while its cgroup is
//! narrowed, and sets it again, has requested the narrow set, and keeps it. Users choose the number and the paths of cgroups that are
//! delegated to them, and of their threads: those of other cgroups must get their CPUs back nevertheless.
//!
//! # Algorithm
//! Before a cgroup is narrowed, the daemon records the cgroups at and below it in which a thread may use fewer CPUs than the cgroup:
//! these threads have their own affinities. While the cgroup is narrowed, the daemon records the CPU sets that the cgroup is given.
//! When it gets other CPUs, the affinity of each thread that equals one of these sets, intersected with the CPUs of the thread's cgroup,
//! is widened to all CPUs of that cgroup.
//!
//! The children of a cgroup share its time equally: time that one does not need goes to those that are not finished. A delegated cgroup
//! counts as one, and is read again from its start. Where most of the recorded cgroups are, one record covers them, with all
//! descendants of their parent.
//!
//! # Invariants
//! - No thread is changed in a cgroup with recorded own affinities, nor where they could not be read.
//! - The time is limited, and the memory: a record has [`MAX_RECORDED`] paths of [`MAX_RECORDED_PATH`] bytes; while threads are read,
//!   there are up to [`MAX_CHILDREN`] paths for each level above delegated cgroups, and one [`read::Subtree`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, CgroupPath, affinity::available_cpus, read};
use numaward_topology::{
    CpuSet,
    affinity::{affinity, reset_affinity},
};
use serde::{Deserialize, Serialize};

/// Maximum number of CPU sets that are recorded for a cgroup. Later ones replace the first.
const MAX_GIVEN: usize = 16;
/// Maximum number of cgroups that are recorded for a narrowed one, and maximum size of their paths. The record is part of the ledger.
const MAX_RECORDED: usize = 64;
const MAX_RECORDED_PATH: usize = 512;
/// Maximum number of cgroups that share the time of their parent.
const MAX_CHILDREN: usize = 1024;
/// Minimum time for one of them, for some ten cgroups or 500 threads. With more than there is time for, the first ones are read.
const MIN_SHARE: Duration = Duration::from_micros(500);
/// Number of threads between two checks of the deadline; reading them takes some 50 µs.
const THREADS_PER_CHECK: usize = 64;
/// Size of a path from which the kernel does not open it (`PATH_MAX`).
const TOO_LONG_PATH: usize = 4096;

/// Record of the affinities in a narrowed cgroup and its descendants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadMasks {
    /// The CPU sets that the cgroup was given.
    given: Vec<CpuSet>,
    /// The cgroups in which a thread had its own affinity before.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    own: BTreeSet<CgroupPath>,
    /// The cgroups that may have such threads, as may their descendants.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    unread: BTreeSet<CgroupPath>,
}

/// A cgroup that is getting other CPUs, whose threads may keep a set that it was given before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReset {
    pub id: CgroupId,
    pub masks: Arc<ThreadMasks>,
}

/// Outcome of [`ThreadMasks::reset`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResetThreads {
    /// Number of threads that may run on all CPUs of their cgroup again.
    pub reset: usize,
    /// Number of threads for which the kernel refused it.
    pub refused: usize,
    /// The cgroups that could not be read, now or before they were narrowed. Their threads keep their affinities, as do those of their
    /// descendants.
    pub unread: BTreeSet<CgroupPath>,
}

/// Returns the share of one cgroup in the time that is left for this number of them.
pub(super) fn fair_share(left: Duration, cgroups: usize) -> Duration {
    let share = left.checked_div(u32::try_from(cgroups).unwrap_or(u32::MAX)).unwrap_or(left);
    share.max(MIN_SHARE).min(left)
}

impl ThreadMasks {
    /// Reads the record of a cgroup before it is narrowed, including the records of narrowed cgroups above and below it, `None` if
    /// they are unknown.
    pub(super) fn read<'a>(
        root: &Path,
        path: &CgroupPath,
        around: impl IntoIterator<Item = (CgroupPath, Option<&'a Self>)>,
        deadline: Instant,
    ) -> Self {
        let mut masks = Self::default();
        let common = |other: &CgroupPath| {
            let deeper = if other.contains(path) { path } else { other };
            path.contains(deeper).then(|| deeper.clone())
        };
        for (other, record) in around {
            let Some(record) = record else {
                masks.unread.extend(common(&other));
                continue;
            };
            record.given.iter().for_each(|cpus| masks.give(cpus));
            masks.own.extend(record.own.iter().filter(|cgroup| path.contains(cgroup)).cloned());
            masks.unread.extend(record.unread.iter().filter_map(common));
        }
        let unread = read_threads(root, path, deadline, |cgroup, available, _, cpus| {
            let is_own = !available.is_subset(cpus);
            if is_own && !masks.is_given(available, cpus) && !masks.is_exempt(cgroup) {
                let recorded = shortened(cgroup);
                let records = if recorded == *cgroup { &mut masks.own } else { &mut masks.unread };
                records.insert(recorded);
                fold(path, &mut masks.own, &mut masks.unread);
            }
        });
        masks.unread.extend(unread);
        fold(path, &mut masks.own, &mut masks.unread);
        masks
    }

    /// Records CPUs that the cgroup is about to be given.
    pub(super) fn give(&mut self, cpus: &CpuSet) {
        if !self.given.contains(cpus) {
            if self.given.len() == MAX_GIVEN {
                self.given.remove(0);
            }
            self.given.push(cpus.clone());
        }
    }

    /// Returns true if an affinity is a set that the cgroup was given, in a cgroup with these CPUs.
    fn is_given(&self, available: &CpuSet, affinity: &CpuSet) -> bool {
        self.given.iter().any(|given| given & available == *affinity)
    }

    /// Returns true if a thread of the cgroup may have had its own affinity.
    fn is_exempt(&self, cgroup: &CgroupPath) -> bool {
        self.own.contains(cgroup) || self.unread.iter().any(|unread| unread.contains(cgroup))
    }

    /// Widens the affinity of each thread that has kept a set of the cgroup to all CPUs of its own cgroup, except in the cgroup
    /// `except`. Stops after `limit`.
    pub fn reset(
        &self,
        root: &Path,
        path: &CgroupPath,
        except: Option<&CgroupPath>,
        limit: Duration,
    ) -> ResetThreads {
        let (mut reset, mut refused) = (0, 0);
        let mut unread =
            read_threads(root, path, Instant::now() + limit, |cgroup, available, thread, cpus| {
                let is_kept = !available.is_subset(cpus) && self.is_given(available, cpus);
                if !is_kept || self.is_exempt(cgroup) || except == Some(cgroup) {
                    return;
                }
                match reset_affinity(Some(thread)) {
                    Ok(()) => reset += 1,
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(_) => refused += 1,
                }
            });
        unread.extend(self.unread.iter().cloned());
        fold(path, &mut BTreeSet::new(), &mut unread);
        ResetThreads { reset, refused, unread }
    }
}

/// Replaces records below `top` while there are too many: by one for the descendants of a cgroup with at least two of them, which is
/// found by going down from `top` to the child with the most records.
fn fold(top: &CgroupPath, own: &mut BTreeSet<CgroupPath>, unread: &mut BTreeSet<CgroupPath>) {
    while own.len() + unread.len() > MAX_RECORDED {
        let mut crowded = top.clone();
        loop {
            let mut records: BTreeMap<CgroupPath, usize> = BTreeMap::new();
            for cgroup in own.iter().chain(&*unread) {
                if let Some(child) = cgroup.ancestors().find(|above| crowded.is_parent_of(above)) {
                    *records.entry(child).or_default() += 1;
                }
            }
            match records.into_iter().max_by_key(|(_, count)| *count) {
                Some((child, count)) if count > 1 => crowded = child,
                _ => break,
            }
        }
        own.retain(|cgroup| !crowded.contains(cgroup));
        unread.retain(|cgroup| !crowded.contains(cgroup));
        unread.insert(crowded);
    }
}

/// Visits the threads of a cgroup and its descendants until the deadline, with the CPUs of their cgroup and their affinity, some of them
/// several times. Returns the cgroups that could not be read, or not with all their descendants.
fn read_threads<F: FnMut(&CgroupPath, &CpuSet, i32, &CpuSet)>(
    root: &Path,
    path: &CgroupPath,
    deadline: Instant,
    visit: F,
) -> BTreeSet<CgroupPath> {
    let owner = owner_of(root);
    let mut walk = ThreadWalk { root, top: path, owner, unread: BTreeSet::new(), visit };
    let mut top = Branch { cgroup: path.clone(), children: None };
    if !walk.read(&mut top, deadline) {
        walk.note_rest(&top);
    }
    walk.unread
}

fn owner_of(dir: &Path) -> Option<u32> {
    fs::symlink_metadata(dir).ok().map(|dir| dir.uid())
}

/// Reading of the threads of a cgroup and its descendants.
struct ThreadWalk<'a, F> {
    root: &'a Path,
    top: &'a CgroupPath,
    /// The owner of the root cgroup. A cgroup with another one is delegated.
    owner: Option<u32>,
    unread: BTreeSet<CgroupPath>,
    visit: F,
}

/// A cgroup that has not been read, or not with all its descendants.
struct Branch {
    cgroup: CgroupPath,
    /// The children that are not finished; `None` if the cgroup itself is not.
    children: Option<Vec<Branch>>,
}

impl<F: FnMut(&CgroupPath, &CpuSet, i32, &CpuSet)> ThreadWalk<'_, F> {
    /// Continues with a cgroup and its descendants. Returns false if they are not finished at the deadline.
    fn read(&mut self, branch: &mut Branch, deadline: Instant) -> bool {
        let children = match &mut branch.children {
            Some(children) => children,
            unread => {
                let Some(below) = self.children(&branch.cgroup) else {
                    return self.read_subtree(&branch.cgroup, deadline);
                };
                if !self.read_cgroup(&branch.cgroup, deadline) {
                    return false;
                }
                unread.insert(below)
            }
        };
        while !children.is_empty() {
            let share = fair_share(deadline.saturating_duration_since(Instant::now()), children.len());
            children.retain_mut(|child| {
                let now = Instant::now();
                now >= deadline || !self.read(child, deadline.min(now + share))
            });
            if Instant::now() >= deadline {
                break;
            }
        }
        children.is_empty()
    }

    /// Returns the children of a cgroup, if they share its time.
    fn children(&self, cgroup: &CgroupPath) -> Option<Vec<Branch>> {
        let is_delegated = owner_of(&cgroup.dir(self.root)) != self.owner;
        if is_delegated || cgroup.as_str().len() > MAX_RECORDED_PATH {
            return None;
        }
        let children = cgroup.children(self.root).take(MAX_CHILDREN + 1);
        let children: Vec<_> = children.map(|cgroup| Branch { cgroup, children: None }).collect();
        (children.len() <= MAX_CHILDREN).then_some(children)
    }

    /// Reads a cgroup and its descendants, few names at a time. Returns false at the deadline.
    fn read_subtree(&mut self, top: &CgroupPath, deadline: Instant) -> bool {
        let (root, mut too_long) = (self.root, None);
        // Cgroups whose names are not UTF-8 have no path, as everywhere.
        let mut dirs = read::subtree_with(&top.dir(root), |dir| {
            let is_short = dir.as_os_str().len() < TOO_LONG_PATH;
            if !is_short && too_long.is_none() {
                too_long = CgroupPath::from_dir(root, dir);
            }
            is_short && dir.file_name().is_some_and(|name| name.to_str().is_some())
        });
        for (number, cgroup) in dirs.by_ref().filter_map(|dir| CgroupPath::from_dir(root, &dir)).enumerate() {
            if number > 0 && Instant::now() >= deadline || !self.read_cgroup(&cgroup, deadline) {
                return false;
            }
        }
        let skipped = if dirs.is_complete() { too_long } else { Some(top.clone()) };
        if let Some(cgroup) = skipped {
            self.note_unread(&cgroup);
        }
        true
    }

    /// Reads the threads in a cgroup itself. Returns false at the deadline.
    fn read_cgroup(&mut self, cgroup: &CgroupPath, deadline: Instant) -> bool {
        let dir = cgroup.dir(self.root);
        let (mut available, mut threads, mut is_late, mut is_known) = (None, 0_usize, false, true);
        let read = read::visit_threads(&dir, |thread| {
            let available = available.get_or_insert_with(|| available_cpus(&dir));
            // 0 is a thread of another PID namespace.
            let thread = i32::try_from(thread).ok().filter(|thread| *thread > 0);
            match (thread, available) {
                (Some(thread), Some(available)) => match affinity(Some(thread)) {
                    Ok(cpus) => (self.visit)(cgroup, available, thread, &cpus),
                    Err(error) => is_known = error.raw_os_error() == Some(libc::ESRCH),
                },
                _ => is_known = false,
            }
            threads += 1;
            is_late = threads.is_multiple_of(THREADS_PER_CHECK) && Instant::now() >= deadline;
            is_known && !is_late
        });
        if is_late {
            return false;
        }
        if !is_known || read.is_err_and(|error| !error.is_gone()) {
            self.note_unread(cgroup);
        }
        true
    }

    fn note_unread(&mut self, cgroup: &CgroupPath) {
        let recorded = shortened(cgroup);
        if !self.unread.iter().any(|unread| unread.contains(&recorded)) {
            self.unread.insert(recorded);
            fold(self.top, &mut BTreeSet::new(), &mut self.unread);
        }
    }

    /// Notes the rest of a cgroup that is not finished.
    fn note_rest(&mut self, branch: &Branch) {
        match &branch.children {
            Some(children) => children.iter().for_each(|child| self.note_rest(child)),
            None => self.note_unread(&branch.cgroup),
        }
    }
}

/// Returns the cgroup, or the nearest one above it with a path that can be recorded.
fn shortened(cgroup: &CgroupPath) -> CgroupPath {
    let text = cgroup.as_str();
    let end = text
        .as_bytes()
        .get(..=MAX_RECORDED_PATH)
        .and_then(|start| start.iter().rposition(|byte| *byte == b'/'));
    let above = end.and_then(|end| text.get(..end)?.parse().ok());
    above.unwrap_or_else(|| cgroup.clone())
}

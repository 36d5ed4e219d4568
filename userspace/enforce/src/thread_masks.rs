//! Threads that keep a narrow affinity after their cgroup has its CPUs back.
//!
//! # Problem
//! Since Linux 6.2, the kernel remembers the affinity that a thread requested. A runtime that reads its affinity while its cgroup is
//! narrowed, and sets it again, has requested the narrow set, and keeps it.
//!
//! # Algorithm
//! Before a cgroup is narrowed, the daemon records the cgroups at and below it in which a thread may use fewer CPUs than the cgroup:
//! these threads have their own affinities. While the cgroup is narrowed, the daemon records the CPU sets that the cgroup is given.
//! When it gets other CPUs, the affinity of each thread that equals one of these sets, intersected with the CPUs of the thread's cgroup,
//! is widened to all CPUs of that cgroup.
//!
//! # Invariants
//! - No thread is changed in a cgroup with recorded own affinities, nor if they could not be read.
//! - The number of cgroups and threads, and the time, are limited.

use std::{
    collections::BTreeSet,
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

/// Maximum number of CPU sets that are recorded for a cgroup.
const MAX_GIVEN: usize = 16;
/// Maximum numbers of cgroups with own affinities, and of bytes of their paths, that are recorded for a narrowed one.
const MAX_OWN: usize = 32;
const MAX_OWN_BYTES: usize = 16 << 10;
/// Maximum numbers of cgroups and threads that are read for a narrowed cgroup.
const MAX_CGROUPS: usize = 4096;
const MAX_THREADS: usize = 65_536;
/// Number of threads between two checks of the deadline; reading them takes some 50 µs.
const THREADS_PER_CHECK: usize = 64;

/// Record of the affinities in a narrowed cgroup and its descendants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadMasks {
    /// The CPU sets that the cgroup was given.
    given: Vec<CpuSet>,
    /// The cgroups in which a thread had its own affinity before.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    own: BTreeSet<CgroupPath>,
}

/// A cgroup that is getting other CPUs, whose threads may keep a set that it was given before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReset {
    pub id: CgroupId,
    pub masks: Arc<ThreadMasks>,
}

/// Outcome of [`ThreadMasks::reset`], in threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetThreads {
    /// Threads that may run on all CPUs of their cgroup again.
    pub reset: usize,
    /// Threads for which the kernel refused it.
    pub refused: usize,
    /// True if not all threads could be read.
    pub is_partial: bool,
}

impl ThreadMasks {
    /// Reads the record of a cgroup before it is narrowed, including the records of narrowed cgroups above and below it. Returns `None`
    /// if one of those is unknown, or if the threads cannot be read until the deadline.
    pub(super) fn read(
        root: &Path,
        path: &CgroupPath,
        around: impl IntoIterator<Item = Option<Self>>,
        deadline: Instant,
    ) -> Option<Self> {
        let mut masks = Self::default();
        for other in around {
            let other = other?;
            masks.own.extend(other.own);
            other.given.iter().try_for_each(|cpus| masks.give(cpus))?;
        }
        let is_complete = masks.is_small()
            && each_thread(root, path, deadline, |cgroup, available, _, cpus| {
                let is_own = !available.is_subset(cpus);
                let is_new = is_own
                    && !masks.given.iter().any(|given| given & available == *cpus)
                    && masks.own.insert(cgroup.clone());
                !is_new || masks.is_small()
            });
        is_complete.then_some(masks)
    }

    fn is_small(&self) -> bool {
        let bytes: usize = self.own.iter().map(|cgroup| cgroup.as_str().len()).sum();
        self.own.len() <= MAX_OWN && bytes <= MAX_OWN_BYTES
    }

    /// Records CPUs that the cgroup is about to be given. Returns `None` if there are too many sets.
    pub(super) fn give(&mut self, cpus: &CpuSet) -> Option<()> {
        if !self.given.contains(cpus) {
            self.given.push(cpus.clone());
        }
        (self.given.len() <= MAX_GIVEN).then_some(())
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
        let mut done = ResetThreads::default();
        let deadline = Instant::now() + limit;
        let is_complete = each_thread(root, path, deadline, |cgroup, available, thread, cpus| {
            let has_kept = |given: &CpuSet| given & available == *cpus;
            let is_exempt = self.own.contains(cgroup) || except == Some(cgroup);
            if is_exempt || available.is_subset(cpus) || !self.given.iter().any(has_kept) {
                return true;
            }
            match reset_affinity(Some(thread)) {
                Ok(()) => done.reset += 1,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(_) => done.refused += 1,
            }
            true
        });
        ResetThreads { is_partial: !is_complete, ..done }
    }
}

/// Visits the threads of a cgroup and its descendants, with the CPUs of their cgroup and their affinity, until `visit` returns false.
/// Returns true if all were visited.
fn each_thread(
    root: &Path,
    path: &CgroupPath,
    deadline: Instant,
    mut visit: impl FnMut(&CgroupPath, &CpuSet, i32, &CpuSet) -> bool,
) -> bool {
    let (mut cgroups, mut threads) = (0, 0);
    // Cgroups whose names are not UTF-8 have no path, as everywhere.
    let mut dirs = read::subtree_with(&path.dir(root), |dir| {
        dir.file_name().is_some_and(|name| name.to_str().is_some())
    });
    for dir in &mut dirs {
        if cgroups > 0 && Instant::now() >= deadline {
            return false;
        }
        let here = match read::threads(&dir, MAX_THREADS + 1) {
            Ok(here) => here,
            Err(error) if error.is_gone() => continue,
            Err(_) => return false,
        };
        (cgroups, threads) = (cgroups + 1, threads + here.len());
        if cgroups > MAX_CGROUPS || threads > MAX_THREADS {
            return false;
        }
        let available = if here.is_empty() { None } else { available_cpus(&dir) };
        let cgroup = CgroupPath::from_dir(root, &dir);
        for (index, thread) in here.into_iter().enumerate() {
            if index % THREADS_PER_CHECK == THREADS_PER_CHECK - 1 && Instant::now() >= deadline {
                return false;
            }
            // 0 is a thread of another PID namespace.
            let thread = i32::try_from(thread).ok().filter(|thread| *thread > 0);
            let (Some(thread), Some(available), Some(cgroup)) = (thread, &available, &cgroup) else {
                return false;
            };
            match affinity(Some(thread)) {
                Ok(cpus) if visit(cgroup, available, thread, &cpus) => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Ok(_) | Err(_) => return false,
            }
        }
    }
    dirs.is_complete()
}

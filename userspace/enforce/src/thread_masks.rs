//! Threads that stay on the CPUs to which their cgroup was narrowed once it is wide again.
//!
//! Problem: since Linux 6.2, the kernel remembers the CPUs that a thread has asked for. A runtime that reads its affinity while its
//! cgroup is narrowed, and sets it again, has asked for the CPUs of that time, and keeps them.
//!
//! Algorithm: before a cgroup is narrowed, the cgroups at and below it are noted in which a thread runs on fewer CPUs than it could:
//! these have affinities of their own. While the cgroup is narrowed, the sets of CPUs that it is given are noted. When it gets others,
//! each thread of the other cgroups whose affinity is exactly one of these sets, as far as its cgroup has it, may run on all CPUs
//! of its cgroup again.
//!
//! Invariants: no thread is changed in a cgroup that had threads with affinities of their own, nor if it is not known which ones had.
//! What is read and changed is bounded in number and in time.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupPath, affinity::available_cpus, read};
use numaward_topology::{
    CpuSet,
    affinity::{affinity, reset_affinity},
};
use serde::{Deserialize, Serialize};

/// Sets of CPUs that are noted for one cgroup.
const MAX_GIVEN: usize = 16;
/// Cgroups that are noted for one that is narrowed.
const MAX_OWN: usize = 32;
/// Cgroups and threads that are read at once.
const MAX_CGROUPS: usize = 4096;
const MAX_THREADS: usize = 65_536;

/// The state of the threads of a narrowed cgroup, and of those below it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadMasks {
    /// The CPUs that the cgroup was given.
    given: Vec<CpuSet>,
    /// The cgroups in which a thread had an affinity of its own before.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    own: BTreeSet<CgroupPath>,
}

/// What became of threads that kept the CPUs of a narrowed cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetThreads {
    /// May run on all CPUs of their cgroup again.
    pub reset: usize,
    /// The kernel refused it.
    pub refused: usize,
    /// Whether not all could be read.
    pub is_partial: bool,
}

impl ThreadMasks {
    /// The state before a cgroup is narrowed, with what is known of cgroups above and below it that are narrowed already; `None` if
    /// it cannot be read until the deadline.
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
        let is_complete = each_thread(root, path, deadline, |cgroup, available, _, cpus| {
            let is_own = !available.is_subset(cpus);
            if is_own && !masks.given.iter().any(|given| given & available == *cpus) {
                masks.own.insert(cgroup.clone());
            }
        });
        (is_complete && masks.own.len() <= MAX_OWN).then_some(masks)
    }

    /// Takes note of CPUs that the cgroup is about to be given; `None` if there were too many sets.
    pub(super) fn give(&mut self, cpus: &CpuSet) -> Option<()> {
        if !self.given.contains(cpus) {
            self.given.push(cpus.clone());
        }
        (self.given.len() <= MAX_GIVEN).then_some(())
    }

    /// Lets the threads run on all CPUs of their cgroup again that have kept those which a cgroup was given, but for those of the
    /// cgroup `except`. Takes no longer than `limit`.
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
                return;
            }
            match reset_affinity(Some(thread)) {
                Ok(()) => done.reset += 1,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(_) => done.refused += 1,
            }
        });
        ResetThreads { is_partial: !is_complete, ..done }
    }
}

/// Reads the threads of a cgroup and of those below it, with the CPUs that their cgroup has and those on which they may run. Returns
/// whether these are all.
fn each_thread(
    root: &Path,
    path: &CgroupPath,
    deadline: Instant,
    mut visit: impl FnMut(&CgroupPath, &CpuSet, i32, &CpuSet),
) -> bool {
    let (mut cgroups, mut threads, mut open) = (0, 0, vec![path.clone()]);
    while let Some(cgroup) = open.pop() {
        let dir = cgroup.dir(root);
        let here = match read::threads(&dir) {
            Ok(here) => here,
            Err(error) if error.is_gone() => continue,
            Err(_) => return false,
        };
        (cgroups, threads) = (cgroups + 1, threads + here.len());
        if cgroups > MAX_CGROUPS || threads > MAX_THREADS {
            return false;
        }
        let available = if here.is_empty() { None } else { available_cpus(&dir) };
        for thread in here {
            // 0 is a thread of another PID namespace.
            let thread = i32::try_from(thread).ok().filter(|thread| *thread > 0);
            let (Some(thread), Some(available)) = (thread, &available) else { return false };
            match affinity(Some(thread)) {
                Ok(cpus) => visit(&cgroup, available, thread, &cpus),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(_) => return false,
            }
        }
        open.extend(cgroup.children(root));
        if !open.is_empty() && Instant::now() >= deadline {
            return false;
        }
    }
    true
}

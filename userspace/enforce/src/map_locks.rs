//! Check that the kernel can lock the memory maps of a cgroup's processes.
//!
//! # Problem
//! A write to `cpuset.mems` locks the memory map of each process while the kernel holds the lock of all cpusets
//! (`mpol_rebind_mm`). A process can keep its map locked for ever, with a file of a file system that does not respond, and every
//! user may run the server of one (FUSE): by `mmap` of a file with direct I/O that is being read, `munmap` of a file that is
//! written back, or a read of `/proc/PID/mem`. No cgroup of the host could be created or changed until then.
//!
//! # Algorithm
//! Before the write, a thread of its own takes the lock of each map as the write does, but no other lock with it: 5 in
//! `/proc/PID/clear_refs` only resets the peak of the resident memory (`VmHWM`), and needs no privilege beyond `CAP_DAC_OVERRIDE`.
//! If the check is not over in time, it fails, and the thread continues until the locks are free: until then, checks of the
//! cgroup fail at once. A cgroup without processes needs no thread, unless it has more descendants than the caller looks at.
//!
//! A read, as of `cmdline`, would not suffice: it only waits for locks that are held for writing. It is done instead where the
//! kernel or a security module has no `clear_refs` for the daemon.
//!
//! # Limits
//! A lock that is taken between the check and the write is not seen, nor is the lock of a single mapping, which cannot be tested.
//!
//! Source: `kernel/cgroup/cpuset.c`, `mm/mempolicy.c`, `fs/proc/task_mmu.c`, `fs/fuse/file.c` of Linux 6.12.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{Read as _, Write as _},
    path::Path,
    sync::Arc,
    time::Duration,
};

use numaward_cgroup::{CgroupPath, read, read_lossy};
use parking_lot::Mutex;

use super::{detached_reads::DetachedReads, pages::has_ended};

/// Maximum number of checks in progress, including those that hang.
const MAX_CHECKS: usize = 64;
/// Maximum number of cgroups that the caller searches for processes itself.
const MAX_SEARCHED: usize = 64;

/// The checks in progress. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct MapLocks {
    checks: DetachedReads,
    /// The process that each check waits for.
    waiting: Waiting,
}

type Waiting = Arc<Mutex<BTreeMap<CgroupPath, u32>>>;

/// A process that has not released the lock of its memory map in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// `None` if there are too many processes, cgroups or checks, in all or of one owner, or not all cgroups can be listed.
    process: Option<(u32, String)>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some((process, name)) => write!(
                f,
                "process {process} ({name}) keeps its memory map locked, as with a file system (FUSE, NFS) that does not respond, \
                 and the write would hold up all cgroups of the host: end the process or the server of the file system \
                 (releases and repairs are tried again)"
            ),
            None => f.write_str(
                "the memory maps of its processes cannot be checked in time: it may have too many processes or cgroups, or \
                 cgroups with too long paths (end the unit then), or there may be too many other cgroups with locked maps \
                 (releases and repairs are tried again)",
            ),
        }
    }
}

impl MapLocks {
    pub(super) fn new() -> Self {
        Self { checks: DetachedReads::new(MAX_CHECKS), waiting: Waiting::default() }
    }

    /// Waits at most `timeout` for the locks of the memory maps of a cgroup's processes and of those of its descendants. `dir` is its
    /// directory.
    pub(super) fn check(
        &self,
        proc: &Path,
        cgroup: &CgroupPath,
        dir: &Path,
        timeout: Duration,
    ) -> Result<(), LockHolder> {
        if is_empty(dir) {
            return Ok(());
        }
        let (waiting, of, proc_of_check, own_dir) =
            (self.waiting.clone(), cgroup.clone(), proc.to_owned(), dir.to_owned());
        let run = move || {
            let check = WaitingCheck { waiting, cgroup: of };
            wait_for_locks(&proc_of_check, &own_dir, |process| check.note(process))
        };
        if let Ok(true) = self.checks.run(cgroup, dir, timeout, run) {
            return Ok(());
        }
        let process = self.waiting.lock().get(cgroup).copied();
        let name =
            |process: u32| read_lossy(&proc.join(process.to_string()).join("comm")).unwrap_or_default();
        Err(LockHolder { process: process.map(|process| (process, name(process).trim_end().to_owned())) })
    }
}

/// A check in progress. Its process is forgotten when it is dropped.
struct WaitingCheck {
    waiting: Waiting,
    cgroup: CgroupPath,
}

impl WaitingCheck {
    fn note(&self, process: u32) {
        self.waiting.lock().insert(self.cgroup.clone(), process);
    }
}

impl Drop for WaitingCheck {
    fn drop(&mut self) {
        self.waiting.lock().remove(&self.cgroup);
    }
}

/// Returns true if no cgroup of a subtree has a process; false also for one of more than [`MAX_SEARCHED`] cgroups.
fn is_empty(dir: &Path) -> bool {
    let mut dirs = read::subtree(dir);
    let is_empty = dirs.by_ref().take(MAX_SEARCHED).all(|dir| {
        let mut is_empty = true;
        let visited = visit_present(&dir, |_| is_empty = false);
        visited && is_empty
    });
    is_empty && dirs.next().is_none() && dirs.is_complete()
}

/// Calls `visit` for each process of a cgroup, or for each thread of a threaded one, where the kernel lists no processes. Returns
/// false if they cannot be read although the cgroup exists.
fn visit_present(dir: &Path, mut visit: impl FnMut(u32)) -> bool {
    let mut visited = |id| {
        visit(id);
        true
    };
    match read::visit_processes(dir, &mut visited) {
        Err(error) if !error.is_gone() => read::visit_threads(dir, &mut visited),
        visited => visited,
    }
    .map_or_else(|error| error.is_gone() || error.is_absent(), |()| true)
}

/// Returns once the memory map of each process was unlocked: false if not all can be found. `note` is called with the process that
/// is waited for.
fn wait_for_locks(proc: &Path, dir: &Path, note: impl Fn(u32)) -> bool {
    let mut dirs = read::subtree(dir);
    let are_listed = dirs.by_ref().all(|dir| {
        visit_present(&dir, |process| {
            note(process);
            wait_for_lock(&proc.join(process.to_string()));
        })
    });
    are_listed && dirs.is_complete()
}

/// Returns once the memory map of a process was unlocked.
fn wait_for_lock(process: &Path) {
    let written = fs::OpenOptions::new().write(true).open(process.join("clear_refs"));
    match written.and_then(|mut file| file.write_all(b"5")) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
            // The kernel reads the arguments under the lock, if there are any.
            let read = File::open(process.join("cmdline")).and_then(|mut file| file.read(&mut [0]));
            if let Err(error) = read
                && !has_ended(&error)
            {
                tracing::debug!(process = %process.display(), %error, "the lock of a memory map cannot be checked");
            }
        }
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No check may run, as if as many hang as may run.
    #[test]
    fn few_cgroups_are_searched_without_a_check() {
        let root = tempfile::tempdir().unwrap();
        let locks = MapLocks { checks: DetachedReads::new(0), waiting: Waiting::default() };
        let cgroup = CgroupPath::root();
        let check = || locks.check(root.path(), &cgroup, root.path(), Duration::from_mins(1)).is_ok();
        fs::write(root.path().join("cgroup.procs"), "").unwrap();
        for number in 1..MAX_SEARCHED {
            let dir = root.path().join(number.to_string());
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("cgroup.procs"), "").unwrap();
        }
        assert!(check());
        fs::write(root.path().join("1/cgroup.procs"), "7\n").unwrap();
        assert!(!check());
        fs::write(root.path().join("1/cgroup.procs"), "").unwrap();
        fs::create_dir(root.path().join("1/more")).unwrap();
        assert!(!check(), "the owner of a subtree chooses the number of its cgroups");
    }
}

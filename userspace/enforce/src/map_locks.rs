//! Check that the kernel can lock the memory maps of a cgroup's processes.
//!
//! # Problem
//! A write to `cpuset.mems` locks the memory map of each process, and each of its mappings, while the kernel holds the lock of all
//! cpusets (`mpol_rebind_mm`). A process can hold these locks for ever, with a file of a file system that does not respond, and every
//! user may run the server of one (FUSE). No cgroup of the host could be created or changed until then.
//!
//! # Algorithm
//! Before the write, a thread of its own takes the lock of each map as the write does, but no other lock with it: 5 in
//! `/proc/PID/clear_refs` only resets the peak of the resident memory (`VmHWM`), and needs no privilege beyond `CAP_DAC_OVERRIDE`. The
//! lock of a single mapping cannot be tested. While a page of a file waits to become writable (`page_mkwrite`), its holder is in an
//! uninterruptible sleep, so a thread counts as a holder as long as it stays in one such sleep.
//!
//! If the check is not over in time, it fails, and the thread continues until the locks are free: until then, checks of the
//! cgroup fail at once.
//!
//! A read, as of `cmdline`, would not suffice: it only waits for locks that are held for writing. It is done instead where the kernel
//! or a security module has no `clear_refs` for the daemon.
//!
//! Source: `kernel/cgroup/cpuset.c`, `mm/mempolicy.c`, `fs/proc/task_mmu.c`, `fs/fuse/file.c` of Linux 6.12.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, BufReader, Read as _, Write as _},
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use numaward_cgroup::{CgroupPath, TruncatedLines, read, read_lossy};
use parking_lot::Mutex;

use super::{detached_reads::DetachedReads, pages::has_ended};

/// Maximum number of checks in progress, including those that hang.
const MAX_CHECKS: usize = 64;
/// Maximum number of sleeping threads that are stored.
const MAX_SLEEPING: usize = 4096;
/// First interval of the checks of a sleeping thread; each next one is twice as long.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(250);

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
    /// `None` if there are too many processes or checks.
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
                "the memory maps of its processes cannot be checked in time: there may be too many processes, or too many \
                 other cgroups with locked maps (releases and repairs are tried again)",
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
        let (waiting, of, proc_of_check, dir) =
            (self.waiting.clone(), cgroup.clone(), proc.to_owned(), dir.to_owned());
        let run = move || {
            let check = WaitingCheck { waiting, cgroup: of };
            wait_for_locks(&proc_of_check, &dir, |process| check.note(process))
        };
        if let Ok(true) = self.checks.run(cgroup.as_str(), timeout, run) {
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

/// State of a thread.
#[derive(Debug, Default, PartialEq, Eq)]
struct ThreadState {
    process: u32,
    has_ended: bool,
    /// Number of sleeps before the present one; `None` if the thread is not in an uninterruptible sleep.
    sleep: Option<u64>,
}

/// Returns once the memory map of each process was unlocked: false if not all cgroups can be searched. `note` is called with the process that
/// is waited for.
fn wait_for_locks(proc: &Path, dir: &Path, note: impl Fn(u32)) -> bool {
    let (mut last, mut sleeping) = (None, Vec::new());
    let mut dirs = read::subtree(dir);
    // In a threaded cgroup, only the threads can be listed. Those of a process mostly follow each other.
    for dir in dirs.by_ref() {
        let _absent = read::visit_threads(&dir, |thread| {
            let Some(state) = thread_state(proc, thread).ok().filter(|state| !state.has_ended) else {
                return true;
            };
            if last != Some(state.process) {
                last = Some(state.process);
                note(state.process);
                wait_for_lock(&proc.join(thread.to_string()));
            }
            if state.sleep.is_some() {
                sleeping.push((thread, state));
                if sleeping.len() == MAX_SLEEPING {
                    wait_for_sleeps(proc, &mut sleeping, &note);
                }
            }
            true
        });
    }
    wait_for_sleeps(proc, &mut sleeping, &note);
    dirs.is_complete()
}

/// Returns once none of the threads is in the same sleep any more.
fn wait_for_sleeps(proc: &Path, sleeping: &mut Vec<(u32, ThreadState)>, note: &impl Fn(u32)) {
    for (thread, state) in sleeping.drain(..) {
        note(state.process);
        let mut interval = POLL_INTERVAL;
        while thread_state(proc, thread).is_ok_and(|now| now == state) {
            thread::sleep(interval);
            interval = (interval * 2).min(MAX_POLL_INTERVAL);
        }
    }
}

/// Reads `status` of a thread.
fn thread_state(proc: &Path, thread: u32) -> io::Result<ThreadState> {
    let mut lines =
        TruncatedLines::new(BufReader::new(File::open(proc.join(thread.to_string()).join("status"))?));
    let (mut state, mut is_blocked) = (ThreadState::default(), false);
    while let Some(line) = lines.next_line()? {
        let line = String::from_utf8_lossy(line);
        let Some((key, value)) = line.split_once(':') else { continue };
        match key {
            "State" => {
                is_blocked = value.trim_start().starts_with('D');
                state.has_ended = value.trim_start().starts_with(['X', 'Z']);
            }
            "Tgid" => state.process = value.trim().parse().map_err(io::Error::other)?,
            "voluntary_ctxt_switches" if is_blocked => state.sleep = value.trim().parse().ok(),
            _ => {}
        }
    }
    Ok(state)
}

/// Returns once the memory map of a thread was unlocked.
fn wait_for_lock(thread: &Path) {
    let written = fs::OpenOptions::new().write(true).open(thread.join("clear_refs"));
    match written.and_then(|mut file| file.write_all(b"5")) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
            // The kernel reads the arguments under the lock, if there are any.
            let read = File::open(thread.join("cmdline")).and_then(|mut file| file.read(&mut [0]));
            if let Err(error) = read
                && !has_ended(&error)
            {
                tracing::debug!(thread = %thread.display(), %error, "the lock of a memory map cannot be checked");
            }
        }
        Ok(()) | Err(_) => {}
    }
}

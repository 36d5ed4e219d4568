//! Reads of processes that may never return.
//!
//! # Problem
//! The kernel reads the mappings of a process under a lock of the process. A process can hold this lock for ever: it maps a
//! file of a file system that does not respond, and every user may run the server of a file system (FUSE). The
//! daemon cannot interrupt such a read, and one workload must not delay work for other workloads.
//!
//! # Algorithm
//! A read runs on a thread of its own. If it takes too long, the caller continues without a result, and the thread
//! remains until the read returns. Until then, reads of the same cgroup fail at once. The number of threads is
//! limited, also for each owner ([`owner_of`]): a pod or a user with many cgroups can use up an eighth of them.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use numaward_cgroup::{CgroupPath, owner_of};
use parking_lot::Mutex;

/// Maximum number of threads, including those that hang, unless another one is stated.
const MAX_THREADS: usize = 16;
/// Number of owners that can together use all threads.
const OWNERS: usize = 8;

/// The cgroups that are being read, with their owners.
type Running = Mutex<BTreeMap<CgroupPath, String>>;

/// The reads in progress. Clones share them.
#[derive(Clone, Debug)]
pub struct DetachedReads {
    running: Arc<Running>,
    max_threads: usize,
}

impl Default for DetachedReads {
    fn default() -> Self {
        Self::new(MAX_THREADS)
    }
}

/// Removes its read when it is dropped.
struct RunningRead {
    reads: Arc<Running>,
    cgroup: CgroupPath,
}

impl Drop for RunningRead {
    fn drop(&mut self) {
        self.reads.lock().remove(&self.cgroup);
    }
}

impl DetachedReads {
    /// Creates an empty set of reads with at most this number of threads.
    pub(super) fn new(max_threads: usize) -> Self {
        Self { running: Arc::default(), max_threads }
    }

    /// Runs `read` for a cgroup with the directory `dir`, and waits for its result for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::TimedOut`] if the read or an earlier one of the cgroup hangs, or the limit of threads is reached.
    pub fn run<T: Send + 'static>(
        &self,
        cgroup: &CgroupPath,
        dir: &Path,
        timeout: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let hung = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "a process or a file system that it uses does not respond",
            )
        };
        let running = self.begin(cgroup, dir).ok_or_else(hung)?;
        let (sender, result) = mpsc::sync_channel(1);
        thread::Builder::new().name("detached_read".to_owned()).spawn(move || {
            let found = read();
            // The next read of this cgroup may begin as soon as the result is there.
            drop(running);
            let _ = sender.send(found);
        })?;
        result.recv_timeout(timeout).map_err(|_| hung())
    }

    /// Returns the entry of a new read; `None` if the cgroup is being read, or the limit of threads is reached.
    fn begin(&self, cgroup: &CgroupPath, dir: &Path) -> Option<RunningRead> {
        let owner = owner_of(cgroup, dir);
        let mut running = self.running.lock();
        let of_owner = running.values().filter(|other| **other == owner).count();
        let is_full = running.len() >= self.max_threads || of_owner >= self.max_threads.div_ceil(OWNERS);
        if is_full || running.contains_key(cgroup) {
            return None;
        }
        running.insert(cgroup.clone(), owner);
        Some(RunningRead { reads: self.running.clone(), cgroup: cgroup.clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_mins(1);

    /// Runs a read of a cgroup without a directory.
    fn run<T: Send + 'static>(
        reads: &DetachedReads,
        cgroup: &CgroupPath,
        timeout: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        reads.run(cgroup, Path::new(""), timeout, read)
    }

    fn cgroup(path: &str) -> CgroupPath {
        path.parse().unwrap()
    }

    #[test]
    fn hung_read_delays_no_other_workload() {
        let reads = DetachedReads::default();
        let mut release = Vec::new();
        let (other, first) = (cgroup("/other"), cgroup("/hung-0"));
        for number in 0..MAX_THREADS {
            assert_eq!(run(&reads, &other, LONG, || 1).unwrap(), 1, "{number}");
            let (hold, wait) = mpsc::channel::<()>();
            let hung = cgroup(&format!("/hung-{number}"));
            let error = run(&reads, &hung, SHORT, move || wait.recv().is_ok()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            release.push(hold);
            let again = Instant::now();
            run(&reads, &hung, LONG, || false).unwrap_err();
            assert!(again.elapsed() < LONG / 2, "it is not read again meanwhile");
        }
        run(&reads, &other, LONG, || 1).unwrap_err();
        drop(release);
        let start = Instant::now();
        while !reads.running.lock().is_empty() {
            assert!(start.elapsed() < LONG);
            thread::sleep(SHORT);
        }
        assert_eq!(run(&reads, &first, LONG, || 2).unwrap(), 2);
    }

    #[test]
    fn hung_reads_of_one_owner_leave_threads_to_others() {
        let reads = DetachedReads::default();
        let of_user = |number: usize| cgroup(&format!("/user.slice/user-1000.slice/session-{number}.scope"));
        let mut release = Vec::new();
        for number in 0..2 * MAX_THREADS {
            let (hold, wait) = mpsc::channel::<()>();
            run(&reads, &of_user(number), Duration::ZERO, move || wait.recv().is_ok()).unwrap_err();
            release.push(hold);
        }
        assert_eq!(reads.running.lock().len(), MAX_THREADS / OWNERS);
        for other in ["/user.slice/user-1001.slice/session-1.scope", "/system.slice/a.service"] {
            assert_eq!(run(&reads, &cgroup(other), LONG, || 1).unwrap(), 1);
        }
    }

    #[test]
    fn panicking_read_is_an_error() {
        let (reads, cgroup) = (DetachedReads::default(), cgroup("/a"));
        assert!(run(&reads, &cgroup, LONG, || assert!(reads_nothing(), "on purpose")).is_err());
        assert!(run(&reads, &cgroup, LONG, || ()).is_ok());
    }

    fn reads_nothing() -> bool {
        false
    }
}

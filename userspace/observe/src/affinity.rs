//! CPU affinity of the daemon's own threads, which avoid exclusive CPUs whatever the cpuset of its cgroup, so that
//! the daemon is not an intruder itself.

use std::{collections::BTreeSet, fs, io};

use numaward_topology::{
    CpuSet,
    affinity::{affinity, set_affinity},
};
use parking_lot::Mutex;
use rustix::io::Errno;

/// CPU affinity of this process's threads.
#[derive(Debug)]
struct Affinity {
    /// CPUs allowed when the process was started.
    allowed: CpuSet,
    now: CpuSet,
}

impl Affinity {
    /// Reads the affinity of this thread, which threads started by it inherit.
    fn of_this_thread() -> io::Result<Self> {
        let allowed = affinity(None)?;
        Ok(Self { now: allowed.clone(), allowed })
    }

    /// Moves all threads off the exclusive CPUs, to the remaining allowed ones. Does nothing if there are no
    /// remaining CPUs.
    fn keep_off(&mut self, exclusive: &CpuSet) -> io::Result<()> {
        let wanted = &self.allowed - exclusive;
        if wanted.is_empty() || wanted == self.now {
            return Ok(());
        }
        let mut done = BTreeSet::new();
        // A thread that was started meanwhile may have inherited an affinity that is not updated yet.
        loop {
            let threads = fs::read_dir("/proc/self/task")?
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
            let new: Vec<i32> = threads.filter(|thread| done.insert(*thread)).collect();
            if new.is_empty() {
                break;
            }
            for thread in new {
                match set_affinity(Some(thread), &wanted) {
                    // The thread has ended.
                    Err(error) if Errno::from_io_error(&error) != Some(Errno::SRCH) => return Err(error),
                    Ok(()) | Err(_) => {}
                }
            }
        }
        self.now = wanted;
        Ok(())
    }
}

/// This process's threads, which avoid exclusive CPUs on request.
#[derive(Debug, Default)]
pub(crate) struct OwnThreads(Mutex<Option<Affinity>>);

impl OwnThreads {
    /// Makes [`OwnThreads::keep_off`] move the threads.
    pub(crate) fn start_avoiding(&self) {
        match Affinity::of_this_thread() {
            Ok(affinity) => *self.0.lock() = Some(affinity),
            Err(error) => tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs"),
        }
    }

    /// Moves the threads off the exclusive CPUs, which are determined under the lock, so that the latest ones count.
    pub(crate) fn keep_off(&self, exclusive: impl FnOnce() -> CpuSet) {
        let mut held = self.0.lock();
        let Some(affinity) = held.as_mut() else { return };
        if let Err(error) = affinity.keep_off(&exclusive()) {
            tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs");
            *held = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The effect on other threads is tested with a running daemon, because here it would move all tests.
    #[test]
    fn affinity_stays_without_alternatives() {
        let before = affinity(None).unwrap();
        let mut affinity = Affinity::of_this_thread().unwrap();
        let all = affinity.allowed.clone();
        assert!(!all.is_empty());
        for exclusive in [CpuSet::new(), all.clone(), "60000-60001".parse().unwrap()] {
            affinity.keep_off(&exclusive).unwrap();
            assert_eq!(affinity.now, all);
            assert_eq!(super::affinity(None).unwrap(), before);
        }
    }

    #[test]
    fn masks_have_more_than_1024_cpus() {
        let before = affinity(None).unwrap();
        let far: CpuSet = "1024-1100,5000".parse().unwrap();
        let mut affinity = Affinity { allowed: &before | &far, now: CpuSet::new() };
        for exclusive in [CpuSet::new(), "1024".parse().unwrap(), far] {
            affinity.keep_off(&exclusive).unwrap();
            assert_eq!(affinity.now, &affinity.allowed - &exclusive);
            assert_eq!(super::affinity(None).unwrap(), before, "the kernel does not have the other CPUs");
        }
    }
}

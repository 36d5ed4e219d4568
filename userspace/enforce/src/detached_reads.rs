//! Reads of processes that may never return.
//!
//! # Problem
//! The kernel reads the mappings of a process under a lock of the process. A process can hold this lock for ever: it maps a
//! file of a file system that does not respond, and every user may run the server of a file system (FUSE). The
//! daemon cannot interrupt such a read, and one workload must not delay work for other workloads.
//!
//! # Algorithm
//! A read runs on a thread of its own. If it takes too long, the caller continues without a result, and the thread
//! remains until the read returns. Until then, reads of the same workload fail at once. The number of threads is
//! limited.

use std::{
    collections::BTreeSet,
    io,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;

/// Maximum number of threads, including those that hang, unless another one is stated.
const MAX_THREADS: usize = 16;

type Keys = Mutex<BTreeSet<String>>;

/// The reads in progress, by workload. Clones share them.
#[derive(Clone, Debug)]
pub struct DetachedReads {
    running: Arc<Keys>,
    max_threads: usize,
}

impl Default for DetachedReads {
    fn default() -> Self {
        Self::new(MAX_THREADS)
    }
}

/// Removes its read when it is dropped.
struct RunningRead {
    reads: Arc<Keys>,
    key: String,
}

impl Drop for RunningRead {
    fn drop(&mut self) {
        self.reads.lock().remove(&self.key);
    }
}

impl DetachedReads {
    /// Creates an empty set of reads with at most this number of threads.
    pub(super) fn new(max_threads: usize) -> Self {
        Self { running: Arc::default(), max_threads }
    }

    /// Runs `read` for the workload `key`, and waits for its result for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::TimedOut`] if the read or an earlier one of the workload hangs, or the limit of threads is reached.
    pub fn run<T: Send + 'static>(
        &self,
        key: &str,
        timeout: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let hung = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "a process or a file system that it uses does not respond",
            )
        };
        {
            let mut keys = self.running.lock();
            if keys.len() >= self.max_threads || !keys.insert(key.to_owned()) {
                return Err(hung());
            }
        }
        let running = RunningRead { reads: self.running.clone(), key: key.to_owned() };
        let (sender, result) = mpsc::sync_channel(1);
        thread::Builder::new().name("detached_read".to_owned()).spawn(move || {
            let found = read();
            // The next read of this workload may begin as soon as the result is there.
            drop(running);
            let _ = sender.send(found);
        })?;
        result.recv_timeout(timeout).map_err(|_| hung())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn hung_read_delays_no_other_workload() {
        let reads = DetachedReads::default();
        let mut release = Vec::new();
        for number in 0..MAX_THREADS {
            assert_eq!(reads.run("other", LONG, || 1).unwrap(), 1, "{number}");
            let (hold, wait) = mpsc::channel::<()>();
            let error = reads.run(&format!("hung {number}"), SHORT, move || wait.recv().is_ok()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            release.push(hold);
            let again = Instant::now();
            reads.run(&format!("hung {number}"), LONG, || false).unwrap_err();
            assert!(again.elapsed() < LONG / 2, "it is not read again meanwhile");
        }
        reads.run("other", LONG, || 1).unwrap_err();
        drop(release);
        let start = Instant::now();
        while !reads.running.lock().is_empty() {
            assert!(start.elapsed() < LONG);
            thread::sleep(SHORT);
        }
        assert_eq!(reads.run("hung 0", LONG, || 2).unwrap(), 2);
    }

    #[test]
    fn panicking_read_is_an_error() {
        let reads = DetachedReads::default();
        assert!(reads.run("a", LONG, || assert!(reads_nothing(), "on purpose")).is_err());
        assert!(reads.run("a", LONG, || ()).is_ok());
    }

    fn reads_nothing() -> bool {
        false
    }
}

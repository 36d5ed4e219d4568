//! Parallel writes to `cpuset.cpus`, for which the caller does not wait longer than necessary.
//!
//! # Problem
//! While pages of any cgroup are being moved, no write to a `cpuset.cpus` returns, although the written value is in
//! effect. When CPUs become exclusive, every container's knob is written while a container runtime waits.
//!
//! # Algorithm
//! A thread makes one write after the other. If a write does not return but its value is in effect, the thread is
//! abandoned to wait by itself, and another thread makes the remaining writes.
//!
//! The kernel first changes the knob, then the processes of the cgroup, and waits for the pages last. A thread that is
//! not asleep is therefore never abandoned: on a busy host it may have been preempted before the processes were
//! changed.
//!
//! # Invariants
//! Each write is made by one thread only, so none comes after a later write to the same knob.

use std::{collections::BTreeMap, fs, mem, path::PathBuf, sync::Arc, time::Duration};

use numaward_cgroup::knob::{Knob, KnobError, KnobValue};
use numaward_model::health;
use parking_lot::{Condvar, Mutex};
use rustix::thread::{Pid, gettid};

use super::writers::Writers;

/// The shortest and the longest interval of checks whether a pending write is in effect.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(200);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Threads that may wait for pages at the same time; with more, the caller waits itself.
const MAX_WRITERS: usize = 256;

#[derive(Debug)]
pub(crate) struct KnobWrite {
    /// Directory of the cgroup.
    pub(crate) dir: PathBuf,
    pub(crate) knob: Knob,
    pub(crate) value: KnobValue,
}

impl KnobWrite {
    fn write(&self) -> Result<(), KnobError> {
        self.knob.write(&self.dir, &self.value.to_string())
    }
}

/// Writes values that are not in effect yet, and returns when all are. Returns the result of each write.
pub(crate) fn write(
    threads: &Writers,
    writes: Vec<KnobWrite>,
    holds: impl Fn(&KnobWrite) -> bool,
) -> Vec<Result<(), KnobError>> {
    let results = writes.iter().map(|_| None).collect();
    let state = Mutex::new(BatchState { results, ..BatchState::default() });
    Arc::new(Batch { writes, state, changed: Condvar::new() }).finish(threads, holds)
}

/// Returns whether a thread of this process waits for something other than a CPU.
fn is_asleep(thread: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    // proc(5): thread id, name in parentheses, state.
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
    state.is_some_and(|state| state != 'R')
}

#[derive(Debug)]
struct Batch {
    writes: Vec<KnobWrite>,
    state: Mutex<BatchState>,
    /// Signals that all writes are done, or that a thread panicked.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BatchState {
    /// Index of the first write that no thread has taken.
    next: usize,
    /// Writes that a thread is making, with its id.
    taken: BTreeMap<usize, Pid>,
    /// Writes of threads that panicked.
    dropped: Vec<usize>,
    results: Vec<Option<Result<(), KnobError>>>,
    done: usize,
}

impl BatchState {
    /// Sets the result of a write. Returns whether it had none before.
    fn finish(&mut self, index: usize, result: Result<(), KnobError>) -> bool {
        let is_first = self.taken.remove(&index).is_some();
        if is_first {
            self.results[index] = Some(result);
            self.done += 1;
        }
        is_first
    }
}

impl Batch {
    /// Makes writes until none is left.
    fn work(&self) {
        while let Some(taken) = self.take() {
            let result = self.writes[taken.index].write();
            taken.finish(result);
        }
    }

    fn take(&self) -> Option<TakenWrite<'_>> {
        let mut state = self.state.lock();
        let index = state.next;
        (index < self.writes.len()).then(|| {
            state.next += 1;
            state.taken.insert(index, gettid());
            TakenWrite { batch: self, index }
        })
    }

    /// Continues with the remaining writes on another thread, or on this one.
    fn continue_work(self: &Arc<Self>, threads: &Writers) {
        if self.state.lock().next == self.writes.len() {
            return;
        }
        let batch = Arc::clone(self);
        if threads.busy() >= MAX_WRITERS || threads.run(move || batch.work()).is_err() {
            self.work();
        }
    }

    fn finish(
        self: &Arc<Self>,
        threads: &Writers,
        holds: impl Fn(&KnobWrite) -> bool,
    ) -> Vec<Result<(), KnobError>> {
        let (mut pace, mut seen) = (MIN_POLL_INTERVAL, 0);
        self.continue_work(threads);
        loop {
            health::beat();
            let mut state = self.state.lock();
            if state.done < self.writes.len() && state.dropped.is_empty() {
                self.changed.wait_for(&mut state, pace);
            }
            if state.done == self.writes.len() {
                return mem::take(&mut state.results).into_iter().flatten().collect();
            }
            let dropped = mem::take(&mut state.dropped);
            let is_stuck = state.done == seen;
            seen = state.done;
            let taken = state.taken.clone();
            drop(state);

            let is_dropped = !dropped.is_empty();
            for index in dropped {
                let result = self.writes[index].write();
                self.state.lock().finish(index, result);
            }
            pace = if is_stuck { (pace * 2).min(MAX_POLL_INTERVAL) } else { MIN_POLL_INTERVAL };
            let held = taken
                .into_iter()
                .filter(|(index, thread)| is_stuck && is_asleep(*thread) && holds(&self.writes[*index]));
            let abandoned = held.filter(|(index, _)| self.state.lock().finish(*index, Ok(()))).count();
            if is_dropped || abandoned > 0 {
                self.continue_work(threads);
            }
        }
    }
}

/// A write that the current thread makes.
struct TakenWrite<'a> {
    batch: &'a Batch,
    index: usize,
}

impl TakenWrite<'_> {
    fn finish(self, result: Result<(), KnobError>) {
        let mut state = self.batch.state.lock();
        state.finish(self.index, result);
        if state.done == self.batch.writes.len() {
            self.batch.changed.notify_one();
        }
    }
}

impl Drop for TakenWrite<'_> {
    fn drop(&mut self) {
        let mut state = self.batch.state.lock();
        // The thread panicked.
        if state.taken.contains_key(&self.index) {
            state.dropped.push(self.index);
            self.batch.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread, time::Instant};

    use super::*;

    /// Creates directories with a `cpuset.cpus` each; a pipe stands for a write that does not return.
    fn cgroups(count: usize, stuck: &[usize]) -> (tempfile::TempDir, Vec<KnobWrite>) {
        let dir = tempfile::tempdir().unwrap();
        let writes = (0..count).map(|index| {
            let cgroup = dir.path().join(index.to_string());
            fs::create_dir(&cgroup).unwrap();
            let file = cgroup.join("cpuset.cpus");
            if stuck.contains(&index) {
                let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
                rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            } else {
                fs::write(&file, "").unwrap();
            }
            KnobWrite { dir: cgroup, knob: Knob::CpusetCpus, value: KnobValue::Cpus("1".parse().unwrap()) }
        });
        let writes = writes.collect();
        (dir, writes)
    }

    fn held(dir: &tempfile::TempDir, index: usize) -> String {
        fs::read_to_string(dir.path().join(index.to_string()).join("cpuset.cpus")).unwrap()
    }

    #[test]
    fn writes_each_value_once() {
        let (dir, writes) = cgroups(300, &[]);
        let results = write(&Writers::default(), writes, |_| false);
        assert_eq!(results.len(), 300);
        assert!(results.iter().all(Result::is_ok));
        assert!((0..300).all(|index| held(&dir, index).trim() == "1"));
    }

    #[test]
    fn returns_each_error() {
        let (dir, writes) = cgroups(5, &[]);
        fs::remove_dir_all(dir.path().join("3")).unwrap();
        let results = write(&Writers::default(), writes, |_| false);
        let failed: Vec<_> = results.iter().map(Result::is_err).collect();
        assert_eq!(failed, [false, false, false, true, false]);
        assert!(matches!(results[3], Err(KnobError::Gone { .. })));
    }

    #[test]
    fn slow_write_delays_no_other() {
        let stuck = [0, 7, 8, 19];
        let (dir, writes) = cgroups(20, &stuck);
        let pipes: Vec<_> = stuck.map(|index| dir.path().join(index.to_string()).join("cpuset.cpus")).into();
        let threads = Writers::default();
        let held_already = dir.path().join("8");
        let started = Instant::now();
        // The write to cgroup 8 is not in effect before it returns.
        let end = thread::spawn({
            let pipe = pipes[2].clone();
            move || {
                thread::sleep(Duration::from_millis(200));
                fs::read_to_string(pipe).unwrap()
            }
        });
        let results = write(&threads, writes, |write| write.dir != held_already);
        assert!(results.iter().all(Result::is_ok));
        assert!(started.elapsed() >= Duration::from_millis(200));
        assert_eq!(end.join().unwrap().trim(), "1");
        assert!((0..20).filter(|index| !stuck.contains(index)).all(|index| held(&dir, index).trim() == "1"));
        // The other threads still wait.
        assert_eq!(threads.busy(), 3);
        for index in [0, 1, 3] {
            assert_eq!(fs::read_to_string(&pipes[index]).unwrap().trim(), "1");
        }
        while threads.busy() > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn running_thread_is_not_asleep() {
        let (sender, ids) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let spins = thread::spawn({
            let (sender, is_over) = (sender.clone(), is_over.clone());
            move || {
                sender.send(gettid()).unwrap();
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        });
        let spinning = ids.recv().unwrap();
        let sleeps = thread::spawn(move || {
            sender.send(gettid()).unwrap();
            ended.recv().is_err()
        });
        let sleeping = ids.recv().unwrap();
        while !is_asleep(sleeping) {
            thread::yield_now();
        }
        assert!(!is_asleep(spinning));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        spins.join().unwrap();
        drop(end);
        assert!(sleeps.join().unwrap());
        // The kernel may list the thread for a moment after its end.
        while is_asleep(spinning) {
            thread::yield_now();
        }
    }

    #[test]
    fn repeats_write_after_panic() {
        let (dir, writes) = cgroups(3, &[]);
        let batch = Arc::new(Batch {
            state: Mutex::new(BatchState {
                results: writes.iter().map(|_| None).collect(),
                ..BatchState::default()
            }),
            writes,
            changed: Condvar::new(),
        });
        let panicked = Arc::clone(&batch);
        let thread = thread::spawn(move || {
            let _taken = panicked.take().unwrap();
            panic!("a write that panics");
        });
        thread.join().unwrap_err();
        let results = batch.finish(&Writers::default(), |_| false);
        assert!(results.iter().all(Result::is_ok));
        assert!((0..3).all(|index| held(&dir, index).trim() == "1"));
    }
}

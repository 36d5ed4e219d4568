//! Writes that hold at once, and that the kernel may end much later.
//!
//! Problem: while pages of any cgroup are being moved, the kernel ends no write to a `cpuset.cpus` before all have moved,
//! although what was written holds already. And where CPUs become exclusive, as many of them are written as there are
//! containers, while a container runtime waits.
//!
//! Algorithm: a thread takes one write after the other. Where it gets no further and what it writes holds, it is left
//! behind, and another goes on with the rest.
//!
//! The kernel changes the knob first, then the processes of the cgroup, and waits for the pages last. A thread that is not asleep
//! is therefore not left behind, whatever the knob holds: on a busy host it may have been interrupted before the processes.
//!
//! Invariants: each write is taken once, so that none comes after a later one to the same knob.

use std::{collections::BTreeMap, fs, mem, path::PathBuf, sync::Arc, time::Duration};

use numaward_cgroup::knob::{Knob, KnobError, KnobValue};
use numaward_model::health;
use parking_lot::{Condvar, Mutex};
use rustix::thread::{Pid, gettid};

use super::writers::Writers;

/// How long a thread may take for one write until it is looked whether that holds: at first, and later.
const PACE: Duration = Duration::from_micros(200);
const SLOWEST_PACE: Duration = Duration::from_millis(5);
/// Threads that may wait for pages at once; with more, the caller waits itself.
const MAX_WRITERS: usize = 256;

/// A value for a knob.
#[derive(Debug)]
pub(crate) struct Write {
    /// The cgroup's directory.
    pub(crate) dir: PathBuf,
    pub(crate) knob: Knob,
    pub(crate) value: KnobValue,
}

impl Write {
    fn write(&self) -> Result<(), KnobError> {
        self.knob.write(&self.dir, &self.value.to_string())
    }
}

/// Writes values that do not hold yet, and returns when the kernel has taken all: what came of each.
pub(crate) fn write(
    threads: &Writers,
    writes: Vec<Write>,
    holds: impl Fn(&Write) -> bool,
) -> Vec<Result<(), KnobError>> {
    let results = writes.iter().map(|_| None).collect();
    let state = Mutex::new(State { results, ..State::default() });
    Arc::new(Batch { writes, state, news: Condvar::new() }).finish(threads, holds)
}

/// Whether a thread of this process waits for something other than a CPU.
fn is_asleep(thread: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    // proc(5): its id, its name in parentheses, its state.
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
    state.is_some_and(|state| state != 'R')
}

#[derive(Debug)]
struct Batch {
    writes: Vec<Write>,
    state: Mutex<State>,
    /// All are done, or one has to be written anew.
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The first that no thread has taken.
    next: usize,
    /// Those that a thread writes, with its id.
    taken: BTreeMap<usize, Pid>,
    /// Those whose thread has panicked.
    dropped: Vec<usize>,
    results: Vec<Option<Result<(), KnobError>>>,
    done: usize,
}

impl State {
    /// Whether it was not done before.
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
    /// Takes and does writes until none is left.
    fn work(&self) {
        while let Some(taken) = self.take() {
            let result = self.writes[taken.index].write();
            taken.finish(result);
        }
    }

    fn take(&self) -> Option<Taken<'_>> {
        let mut state = self.state.lock();
        let index = state.next;
        (index < self.writes.len()).then(|| {
            state.next += 1;
            state.taken.insert(index, gettid());
            Taken { batch: self, index }
        })
    }

    /// Another thread does what is left, or this one.
    fn go_on(self: &Arc<Self>, threads: &Writers) {
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
        holds: impl Fn(&Write) -> bool,
    ) -> Vec<Result<(), KnobError>> {
        let (mut pace, mut seen) = (PACE, 0);
        self.go_on(threads);
        loop {
            health::beat();
            let mut state = self.state.lock();
            if state.done < self.writes.len() && state.dropped.is_empty() {
                self.news.wait_for(&mut state, pace);
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
            pace = if is_stuck { (pace * 2).min(SLOWEST_PACE) } else { PACE };
            let held = taken
                .into_iter()
                .filter(|(index, thread)| is_stuck && is_asleep(*thread) && holds(&self.writes[*index]));
            let left_behind = held.filter(|(index, _)| self.state.lock().finish(*index, Ok(()))).count();
            if is_dropped || left_behind > 0 {
                self.go_on(threads);
            }
        }
    }
}

/// A write that this thread has taken.
struct Taken<'a> {
    batch: &'a Batch,
    index: usize,
}

impl Taken<'_> {
    fn finish(self, result: Result<(), KnobError>) {
        let mut state = self.batch.state.lock();
        state.finish(self.index, result);
        if state.done == self.batch.writes.len() {
            self.batch.news.notify_one();
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.batch.state.lock();
        // It panicked.
        if state.taken.contains_key(&self.index) {
            state.dropped.push(self.index);
            self.batch.news.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread, time::Instant};

    use super::*;

    /// Directories with a `cpuset.cpus` each, a pipe where the kernel would not end the write.
    fn cgroups(count: usize, stuck: &[usize]) -> (tempfile::TempDir, Vec<Write>) {
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
            Write { dir: cgroup, knob: Knob::CpusetCpus, value: KnobValue::Cpus("1".parse().unwrap()) }
        });
        let writes = writes.collect();
        (dir, writes)
    }

    fn held(dir: &tempfile::TempDir, index: usize) -> String {
        fs::read_to_string(dir.path().join(index.to_string()).join("cpuset.cpus")).unwrap()
    }

    #[test]
    fn each_is_written_once() {
        let (dir, writes) = cgroups(300, &[]);
        let results = write(&Writers::default(), writes, |_| false);
        assert_eq!(results.len(), 300);
        assert!(results.iter().all(Result::is_ok));
        assert!((0..300).all(|index| held(&dir, index).trim() == "1"));
    }

    #[test]
    fn errors_are_of_their_writes() {
        let (dir, writes) = cgroups(5, &[]);
        fs::remove_dir_all(dir.path().join("3")).unwrap();
        let results = write(&Writers::default(), writes, |_| false);
        let failed: Vec<_> = results.iter().map(Result::is_err).collect();
        assert_eq!(failed, [false, false, false, true, false]);
        assert!(matches!(results[3], Err(KnobError::Gone { .. })));
    }

    #[test]
    fn what_holds_and_does_not_end_holds_up_no_other() {
        let stuck = [0, 7, 8, 19];
        let (dir, writes) = cgroups(20, &stuck);
        let pipes: Vec<_> = stuck.map(|index| dir.path().join(index.to_string()).join("cpuset.cpus")).into();
        let threads = Writers::default();
        let held_already = dir.path().join("8");
        let started = Instant::now();
        // That of the cgroup 8 does not hold until its write ends.
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
        // Their threads wait still.
        assert_eq!(threads.busy(), 3);
        for index in [0, 1, 3] {
            assert_eq!(fs::read_to_string(&pipes[index]).unwrap().trim(), "1");
        }
        while threads.busy() > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_runs_is_not_asleep() {
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
        // The kernel may list it for a moment after its end.
        while is_asleep(spinning) {
            thread::yield_now();
        }
    }

    #[test]
    fn one_whose_thread_panicked_is_written_anew() {
        let (dir, writes) = cgroups(3, &[]);
        let batch = Arc::new(Batch {
            state: Mutex::new(State { results: writes.iter().map(|_| None).collect(), ..State::default() }),
            writes,
            news: Condvar::new(),
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

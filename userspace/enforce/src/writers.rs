//! Threads for writes that may take the kernel a long time.
//!
//! Most writes are quick, and an admission makes several, so a few idle threads are kept for the next write.

use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{self, Sender},
    },
    thread,
};

use parking_lot::Mutex;

/// Maximum number of idle threads.
const MAX_IDLE_THREADS: usize = 4;
/// Stack size of a thread, in bytes. The deepest call moves pages, process by process.
const STACK_SIZE: usize = 256 << 10;

type WriteJob = Box<dyn FnOnce() + Send>;

/// Pool of threads. When it is dropped, idle threads end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Writers(Arc<Mutex<ThreadPool>>);

#[derive(Debug, Default)]
struct ThreadPool {
    idle: Vec<Sender<WriteJob>>,
    busy: usize,
}

impl Writers {
    /// Returns the number of threads that are writing.
    pub(crate) fn busy(&self) -> usize {
        self.0.lock().busy
    }

    /// Runs a write on an idle or a new thread. Fails if no thread could be started.
    pub(crate) fn run(&self, write: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut write: WriteJob = Box::new(write);
        let idle = {
            let mut threads = self.0.lock();
            threads.busy += 1;
            threads.idle.pop()
        };
        if let Some(thread) = idle {
            match thread.send(write) {
                Ok(()) => return Ok(()),
                // The thread panicked at its last write.
                Err(unsent) => write = unsent.0,
            }
        }
        let threads = Arc::downgrade(&self.0);
        let started = thread::Builder::new()
            .name("writer".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(move || work(write, &threads));
        if started.is_err() {
            self.0.lock().busy -= 1;
        }
        started.map(drop)
    }
}

/// Makes writes until the pool is gone or has enough idle threads.
fn work(first: WriteJob, threads: &Weak<Mutex<ThreadPool>>) {
    let mut write = first;
    loop {
        // Decrements the counter also if the write panics.
        let done = BusyGuard(threads);
        write();
        drop(done);
        let (sender, more) = mpsc::channel();
        {
            let Some(threads) = threads.upgrade() else { return };
            let mut threads = threads.lock();
            if threads.idle.len() >= MAX_IDLE_THREADS {
                return;
            }
            threads.idle.push(sender);
        }
        let Ok(next) = more.recv() else { return };
        write = next;
    }
}

struct BusyGuard<'a>(&'a Weak<Mutex<ThreadPool>>);

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        if let Some(threads) = self.0.upgrade() {
            threads.lock().busy -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::channel, time::Duration};

    use super::*;

    #[test]
    fn reuses_idle_thread() {
        let writers = Writers::default();
        let (sender, ids) = channel();
        let mut seen = Vec::new();
        for _ in 0..20 {
            let sender = sender.clone();
            writers.run(move || sender.send(thread::current().id()).unwrap()).unwrap();
            seen.push(ids.recv_timeout(Duration::from_secs(10)).unwrap());
            // The thread becomes idle soon after the write.
            while writers.0.lock().idle.is_empty() {
                thread::yield_now();
            }
        }
        seen.dedup();
        assert_eq!((seen.len(), writers.busy()), (1, 0));
    }

    #[test]
    fn slow_write_delays_no_other() {
        let writers = Writers::default();
        let (sender, done) = channel();
        let go: Vec<_> = (0..2 * MAX_IDLE_THREADS)
            .map(|number| {
                let (go, wait) = channel::<()>();
                let sender = sender.clone();
                writers
                    .run(move || {
                        wait.recv().unwrap();
                        sender.send(number).unwrap();
                    })
                    .unwrap();
                go
            })
            .collect();
        assert_eq!(writers.busy(), 2 * MAX_IDLE_THREADS);
        for (number, go) in go.iter().enumerate().rev() {
            go.send(()).unwrap();
            assert_eq!(done.recv_timeout(Duration::from_secs(10)).unwrap(), number);
        }
        while writers.busy() > 0 {
            thread::yield_now();
        }
        assert!(writers.0.lock().idle.len() <= MAX_IDLE_THREADS);
    }

    #[test]
    fn replaces_panicked_thread() {
        let writers = Writers::default();
        writers.run(|| panic!("a write that panics")).unwrap();
        while writers.busy() > 0 {
            thread::yield_now();
        }
        let (sender, done) = channel();
        writers.run(move || sender.send(()).unwrap()).unwrap();
        done.recv_timeout(Duration::from_secs(10)).unwrap();
    }
}

//! Threads for writes that the kernel may not end for a long time.
//!
//! Most end at once, and an admission takes several: a thread that is done stays for the next write.

use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{self, Sender},
    },
    thread,
};

use parking_lot::Mutex;

/// Threads that stay although there is nothing to write.
const IDLE: usize = 4;
/// What the deepest of them takes: it moves pages, process by process.
const STACK: usize = 256 << 10;

type Write = Box<dyn FnOnce() + Send>;

/// The threads. When it is dropped, those without work end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Writers(Arc<Mutex<Threads>>);

#[derive(Debug, Default)]
struct Threads {
    /// Those without work.
    idle: Vec<Sender<Write>>,
    busy: usize,
}

impl Writers {
    /// How many are writing.
    pub(crate) fn busy(&self) -> usize {
        self.0.lock().busy
    }

    /// Lets a thread write. The error is that none could be started.
    pub(crate) fn run(&self, write: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut write: Write = Box::new(write);
        let idle = {
            let mut threads = self.0.lock();
            threads.busy += 1;
            threads.idle.pop()
        };
        if let Some(thread) = idle {
            match thread.send(write) {
                Ok(()) => return Ok(()),
                // It panicked at its last write.
                Err(unsent) => write = unsent.0,
            }
        }
        let threads = Arc::downgrade(&self.0);
        let started = thread::Builder::new()
            .name("writer".to_owned())
            .stack_size(STACK)
            .spawn(move || work(write, &threads));
        if started.is_err() {
            self.0.lock().busy -= 1;
        }
        started.map(drop)
    }
}

/// Writes, and goes on while there is more to write, or few others wait for that.
fn work(first: Write, threads: &Weak<Mutex<Threads>>) {
    let mut write = first;
    loop {
        // Also if it panics.
        let done = Done(threads);
        write();
        drop(done);
        let (sender, more) = mpsc::channel();
        {
            let Some(threads) = threads.upgrade() else { return };
            let mut threads = threads.lock();
            if threads.idle.len() >= IDLE {
                return;
            }
            threads.idle.push(sender);
        }
        let Ok(next) = more.recv() else { return };
        write = next;
    }
}

struct Done<'a>(&'a Weak<Mutex<Threads>>);

impl Drop for Done<'_> {
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
    fn a_thread_that_is_done_writes_again() {
        let writers = Writers::default();
        let (sender, ids) = channel();
        let mut seen = Vec::new();
        for _ in 0..20 {
            let sender = sender.clone();
            writers.run(move || sender.send(thread::current().id()).unwrap()).unwrap();
            seen.push(ids.recv_timeout(Duration::from_secs(10)).unwrap());
            // It is among the idle ones soon after.
            while writers.0.lock().idle.is_empty() {
                thread::yield_now();
            }
        }
        seen.dedup();
        assert_eq!((seen.len(), writers.busy()), (1, 0));
    }

    #[test]
    fn one_that_waits_holds_up_no_other() {
        let writers = Writers::default();
        let (sender, done) = channel();
        let go: Vec<_> = (0..2 * IDLE)
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
        assert_eq!(writers.busy(), 2 * IDLE);
        for (number, go) in go.iter().enumerate().rev() {
            go.send(()).unwrap();
            assert_eq!(done.recv_timeout(Duration::from_secs(10)).unwrap(), number);
        }
        while writers.busy() > 0 {
            thread::yield_now();
        }
        assert!(writers.0.lock().idle.len() <= IDLE);
    }

    #[test]
    fn one_that_panics_is_replaced() {
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

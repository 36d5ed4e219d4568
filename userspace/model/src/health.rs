//! Is the daemon ready, and is it alive?
//!
//! *Ready* once every part has released its latch: it has done what it could, degraded or not.
//! *Alive* while each core thread beats: at least once within the limit that it was started with, unless it *rests*, as it
//! has nothing to do. A core thread that ends unasked ends the daemon, which is then started again.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

/// The parts that the daemon waits for before it is ready.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    latches: Vec<(&'static str, Arc<AtomicBool>)>,
}

impl Readiness {
    /// A latch for one more part. All are made before the listener binds.
    pub fn latch(&mut self, part: &'static str) -> Latch {
        let released = Arc::new(AtomicBool::new(false));
        self.latches.push((part, released.clone()));
        Latch(released)
    }

    /// Whether every latch is released.
    pub fn is_ready(&self) -> bool {
        self.parts().all(|(_, released)| released)
    }

    /// Each part and whether its latch is released.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.latches.iter().map(|(part, released)| (*part, released.load(Ordering::Acquire)))
    }
}

/// Held by a part until it is ready. Dropping it does not release it: a part that failed is not ready.
#[derive(Debug)]
#[must_use = "the daemon is not ready until the latch is released"]
pub struct Latch(Arc<AtomicBool>);

impl Latch {
    /// The part is ready.
    pub fn release(self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The core threads: whether each of them beats, and whether one has ended. Clones are of the same ones.
#[derive(Clone, Debug)]
pub struct Heartbeats(Arc<Threads>);

#[derive(Debug)]
struct Threads {
    start: Instant,
    hearts: Mutex<BTreeMap<&'static str, Heartbeat>>,
    ended: OnceLock<EndedThread>,
}

/// The pulse of a thread.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    start: Instant,
    limit: Duration,
    /// The last beat, or [`RESTING`].
    last_millis: Arc<AtomicU64>,
}

/// Stands for a beat that never gets old.
const RESTING: u64 = u64::MAX;

thread_local! {
    /// Of the thread itself, if it is a core thread.
    static HEART: RefCell<Option<Heartbeat>> = const { RefCell::new(None) };
}

/// The thread that calls this gets on with its work.
pub fn beat() {
    HEART.with_borrow(|heart| heart.iter().for_each(Heartbeat::beat));
}

/// The thread that calls this has nothing to do until it beats again.
pub fn rest() {
    HEART.with_borrow(|heart| heart.iter().for_each(Heartbeat::rest));
}

impl Heartbeat {
    /// The thread gets on with its work.
    pub fn beat(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(RESTING);
        self.last_millis.store(millis, Ordering::Release);
    }

    fn rest(&self) {
        self.last_millis.store(RESTING, Ordering::Release);
    }

    /// Time since the last beat; none while it rests.
    fn silent(&self) -> Option<Duration> {
        let last = Some(self.last_millis.load(Ordering::Acquire)).filter(|last| *last != RESTING)?;
        Some(self.start.elapsed().saturating_sub(Duration::from_millis(last)))
    }
}

/// A thread that has not beaten for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display(
    "the thread {thread} has not responded for {} s; {} s is its limit",
    silent.as_secs(),
    limit.as_secs()
)]
pub struct LateThread {
    thread: &'static str,
    silent: Duration,
    limit: Duration,
}

/// A core thread that ended unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thread {thread} {}", if *.panicked { "panicked" } else { "ended, and nothing had asked it to" })]
pub struct EndedThread {
    thread: &'static str,
    panicked: bool,
}

impl Default for Heartbeats {
    fn default() -> Self {
        Self(Arc::new(Threads { start: Instant::now(), hearts: Mutex::default(), ended: OnceLock::new() }))
    }
}

impl Heartbeats {
    fn hearts(&self) -> MutexGuard<'_, BTreeMap<&'static str, Heartbeat>> {
        self.0.hearts.lock()
    }

    /// A heart that beats now for the first time, and has to beat again within `limit`.
    pub fn register(&self, name: &'static str, limit: Duration) -> Heartbeat {
        let heart = Heartbeat { start: self.0.start, limit, last_millis: Arc::default() };
        heart.beat();
        self.hearts().insert(name, heart.clone());
        heart
    }

    /// Starts a core thread, which calls [`beat`] within each `limit`, or [`rest`]. It may end once `stop` is cancelled,
    /// or while it rests; if it does otherwise, `stop` is cancelled.
    pub fn spawn(
        &self,
        name: &'static str,
        limit: Duration,
        stop: &CancellationToken,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let heart = self.register(name, limit);
        let heartbeats = self.clone();
        let guard = EndGuard { heartbeats, name, heart: Some(heart.clone()), stop: stop.clone() };
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _guard = guard;
            HEART.set(Some(heart));
            run();
        })
    }

    /// A task that ends the daemon if it ends before `stop` is cancelled. How long it waits is its own affair.
    pub fn watch<F: Future<Output = ()>>(
        &self,
        name: &'static str,
        stop: &CancellationToken,
        task: F,
    ) -> impl Future<Output = ()> + use<F> {
        let guard = EndGuard { heartbeats: self.clone(), name, heart: None, stop: stop.clone() };
        async move {
            let _guard = guard;
            task.await;
        }
    }

    /// The first thread, in the order of their names, that has not beaten for too long.
    pub fn late_thread(&self) -> Option<LateThread> {
        self.hearts().iter().find_map(|(&thread, heart)| {
            let (silent, limit) = (heart.silent()?, heart.limit);
            (silent >= limit).then_some(LateThread { thread, silent, limit })
        })
    }

    /// The first thread that ended unasked.
    pub fn ended_thread(&self) -> Option<EndedThread> {
        self.0.ended.get().copied()
    }
}

/// Goes with a thread or a task, and sees how it ends.
struct EndGuard {
    heartbeats: Heartbeats,
    name: &'static str,
    heart: Option<Heartbeat>,
    stop: CancellationToken,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        let panicked = thread::panicking();
        let is_asked =
            self.stop.is_cancelled() || self.heart.as_ref().is_some_and(|heart| heart.silent().is_none());
        self.heart.iter().for_each(Heartbeat::rest);
        if panicked || !is_asked {
            // Only the first one is the cause.
            let _ = self.heartbeats.0.ended.set(EndedThread { thread: self.name, panicked });
            self.stop.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn ready_is_when_all_latches_are_released() {
        let mut readiness = Readiness::default();
        assert!(readiness.is_ready());
        let (topology, probes) = (readiness.latch("topology"), readiness.latch("probes"));
        topology.release();
        assert!(!readiness.is_ready());
        assert_eq!(readiness.parts().collect::<Vec<_>>(), [("topology", true), ("probes", false)]);
        probes.release();
        assert!(readiness.is_ready());
    }

    #[test]
    fn a_dropped_latch_is_not_released() {
        let mut readiness = Readiness::default();
        drop(readiness.latch("topology"));
        assert!(!readiness.is_ready());
    }

    /// Of a thread that is always late, and of one that never is.
    const NEVER: Duration = Duration::ZERO;
    const ALWAYS: Duration = Duration::MAX;

    #[test]
    fn a_thread_that_does_not_beat_is_late_unless_it_rests() {
        let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
        heartbeats.register("beats", ALWAYS);
        let (go, wait) = mpsc::channel::<fn()>();
        let (done, is_done) = mpsc::channel();
        let hangs = move || {
            for step in wait {
                step();
                done.send(()).unwrap();
            }
        };
        let thread = heartbeats.spawn("hangs", NEVER, &stop, hangs).unwrap();
        let late_after = |step| {
            go.send(step).unwrap();
            is_done.recv().unwrap();
            heartbeats.late_thread().map(|late| late.to_string())
        };
        let late = late_after(beat).unwrap();
        assert!(late.starts_with("the thread hangs has not responded for 0 s"), "{late}");
        assert_eq!(late_after(rest), None, "it rests");
        assert!(late_after(beat).is_some(), "it works again");
        assert_eq!(late_after(rest), None);
        drop(go);
        thread.join().unwrap();
        assert_eq!((heartbeats.ended_thread(), stop.is_cancelled()), (None, false), "it rested");
    }

    #[test]
    fn a_thread_that_ends_unasked_ends_the_daemon() {
        for (panics, expected) in
            [(false, "the thread it ended, and nothing had asked it to"), (true, "the thread it panicked")]
        {
            let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
            let run = move || assert!(!panics, "as the test wants");
            let _ = heartbeats.spawn("it", NEVER, &stop, run).unwrap().join();
            assert!(stop.is_cancelled());
            assert_eq!(heartbeats.ended_thread().unwrap().to_string(), expected);
            assert_eq!(heartbeats.late_thread(), None, "what has ended is not late as well");
        }
    }

    #[test]
    fn a_thread_that_was_asked_to_end_may() {
        let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
        stop.cancel();
        heartbeats.spawn("it", NEVER, &stop, || {}).unwrap().join().unwrap();
        assert_eq!(heartbeats.ended_thread(), None);
    }
}

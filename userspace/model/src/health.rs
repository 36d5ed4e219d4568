//! Readiness and liveness of the daemon.
//!
//! The daemon is *ready* once each part has released its latch. A part releases its latch when it has started, even if
//! it is degraded.
//!
//! The daemon is *alive* while each core thread sends a heartbeat within its limit. A thread that *rests* has nothing
//! to do and needs no heartbeat. A core thread that ends unexpectedly stops the daemon, which is then restarted.

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

/// The latches of the parts that must start before the daemon is ready.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    latches: Vec<(&'static str, Arc<AtomicBool>)>,
}

impl Readiness {
    /// Adds a latch for a part. All latches are created before the listener binds.
    pub fn latch(&mut self, part: &'static str) -> Latch {
        let released = Arc::new(AtomicBool::new(false));
        self.latches.push((part, released.clone()));
        Latch(released)
    }

    pub fn is_ready(&self) -> bool {
        self.parts().all(|(_, released)| released)
    }

    /// Returns each part, with true if its latch is released.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.latches.iter().map(|(part, released)| (*part, released.load(Ordering::Acquire)))
    }
}

/// A latch that a part holds until it is ready. Dropping it does not release it, so a part that fails stays not ready.
#[derive(Debug)]
#[must_use = "the daemon is not ready until the latch is released"]
pub struct Latch(Arc<AtomicBool>);

impl Latch {
    /// Marks the part as ready.
    pub fn release(self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Heartbeats of all core threads, and the first unexpected end of one. Clones share the state.
#[derive(Clone, Debug)]
pub struct Heartbeats(Arc<Threads>);

#[derive(Debug)]
struct Threads {
    start: Instant,
    heartbeats: Mutex<BTreeMap<&'static str, Heartbeat>>,
    ended: OnceLock<EndedThread>,
}

/// The heartbeat of a thread.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    start: Instant,
    limit: Duration,
    /// Milliseconds from `start` to the last beat, or [`RESTING`].
    last_millis: Arc<AtomicU64>,
}

/// The value of a resting thread, which is never late.
const RESTING: u64 = u64::MAX;

thread_local! {
    /// The heartbeat of the current thread, if it is a core thread.
    static CURRENT_HEARTBEAT: RefCell<Option<Heartbeat>> = const { RefCell::new(None) };
}

/// Records a heartbeat of the current thread.
pub fn beat() {
    CURRENT_HEARTBEAT.with_borrow(|heart| heart.iter().for_each(Heartbeat::beat));
}

/// Marks the current thread as resting until its next heartbeat.
pub fn rest() {
    CURRENT_HEARTBEAT.with_borrow(|heart| heart.iter().for_each(Heartbeat::rest));
}

impl Heartbeat {
    /// Records a heartbeat.
    pub fn beat(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(RESTING);
        self.last_millis.store(millis, Ordering::Release);
    }

    fn rest(&self) {
        self.last_millis.store(RESTING, Ordering::Release);
    }

    /// Returns the time since the last heartbeat; `None` while the thread rests.
    fn silent(&self) -> Option<Duration> {
        let last = Some(self.last_millis.load(Ordering::Acquire)).filter(|last| *last != RESTING)?;
        Some(self.start.elapsed().saturating_sub(Duration::from_millis(last)))
    }
}

/// A thread with a late heartbeat.
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

/// A core thread that ended unexpectedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thread {thread} {}", if *.panicked { "panicked" } else { "ended unexpectedly" })]
pub struct EndedThread {
    thread: &'static str,
    panicked: bool,
}

impl Default for Heartbeats {
    fn default() -> Self {
        Self(Arc::new(Threads {
            start: Instant::now(),
            heartbeats: Mutex::default(),
            ended: OnceLock::new(),
        }))
    }
}

impl Heartbeats {
    fn heartbeats(&self) -> MutexGuard<'_, BTreeMap<&'static str, Heartbeat>> {
        self.0.heartbeats.lock()
    }

    /// Registers a thread with a first heartbeat; the next ones are due within `limit`.
    pub fn register(&self, name: &'static str, limit: Duration) -> Heartbeat {
        let heart = Heartbeat { start: self.0.start, limit, last_millis: Arc::default() };
        heart.beat();
        self.heartbeats().insert(name, heart.clone());
        heart
    }

    /// Starts a core thread, which must call [`beat`] within each `limit`, or [`rest`]. The thread may end after `stop`
    /// is cancelled, or while it rests. Otherwise its end cancels `stop`.
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
            CURRENT_HEARTBEAT.set(Some(heart));
            run();
        })
    }

    /// Wraps a task so that its end cancels `stop`, unless `stop` was cancelled before. The task needs no heartbeat.
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

    /// Returns the first thread, by name, with a late heartbeat.
    pub fn late_thread(&self) -> Option<LateThread> {
        self.heartbeats().iter().find_map(|(&thread, heart)| {
            let (silent, limit) = (heart.silent()?, heart.limit);
            (silent >= limit).then_some(LateThread { thread, silent, limit })
        })
    }

    /// Returns the first thread that ended unexpectedly.
    pub fn ended_thread(&self) -> Option<EndedThread> {
        self.0.ended.get().copied()
    }
}

/// A guard that records the end of a thread or a task when it is dropped.
struct EndGuard {
    heartbeats: Heartbeats,
    name: &'static str,
    heart: Option<Heartbeat>,
    stop: CancellationToken,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        let panicked = thread::panicking();
        let is_expected =
            self.stop.is_cancelled() || self.heart.as_ref().is_some_and(|heart| heart.silent().is_none());
        self.heart.iter().for_each(Heartbeat::rest);
        if panicked || !is_expected {
            // The first end is the cause; later ones are consequences.
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
    fn ready_after_all_latches() {
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
    fn dropped_latch_is_not_released() {
        let mut readiness = Readiness::default();
        drop(readiness.latch("topology"));
        assert!(!readiness.is_ready());
    }

    /// Limits of a thread that is always late, and of one that never is.
    const ALWAYS_LATE: Duration = Duration::ZERO;
    const NEVER_LATE: Duration = Duration::MAX;

    #[test]
    fn silent_thread_is_late_unless_resting() {
        let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
        heartbeats.register("beats", NEVER_LATE);
        let (go, wait) = mpsc::channel::<fn()>();
        let (done, is_done) = mpsc::channel();
        let hangs = move || {
            for step in wait {
                step();
                done.send(()).unwrap();
            }
        };
        let thread = heartbeats.spawn("hangs", ALWAYS_LATE, &stop, hangs).unwrap();
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
    fn unexpected_end_stops_daemon() {
        for (panics, expected) in
            [(false, "the thread it ended unexpectedly"), (true, "the thread it panicked")]
        {
            let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
            let run = move || assert!(!panics, "panics as the test requires");
            let _ = heartbeats.spawn("it", ALWAYS_LATE, &stop, run).unwrap().join();
            assert!(stop.is_cancelled());
            assert_eq!(heartbeats.ended_thread().unwrap().to_string(), expected);
            assert_eq!(heartbeats.late_thread(), None, "an ended thread is not late");
        }
    }

    #[test]
    fn thread_may_end_after_stop() {
        let (heartbeats, stop) = (Heartbeats::default(), CancellationToken::new());
        stop.cancel();
        heartbeats.spawn("it", ALWAYS_LATE, &stop, || {}).unwrap().join().unwrap();
        assert_eq!(heartbeats.ended_thread(), None);
    }
}

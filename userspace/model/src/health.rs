//! Is the daemon ready, and is it alive?
//!
//! *Ready* once every part has released its latch: it has done what it could, degraded or not.
//! *Alive* while the observing loop comes round: it beats at least every [`BEAT_LIMIT`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A loop that has not come round for so long is taken for hung.
pub const BEAT_LIMIT: Duration = Duration::from_secs(30);

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

/// The pulse of a loop.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    start: Instant,
    last_millis: Arc<AtomicU64>,
}

impl Heartbeat {
    /// A heart that beats now for the first time.
    pub fn new() -> Self {
        Self { start: Instant::now(), last_millis: Arc::new(AtomicU64::new(0)) }
    }

    /// The loop came round.
    pub fn beat(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_millis.store(millis, Ordering::Release);
    }

    /// Time since the last beat.
    pub fn age(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last_millis.load(Ordering::Acquire)))
    }

    /// Whether the last beat is recent enough.
    pub fn is_alive(&self) -> bool {
        self.age() < BEAT_LIMIT
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_heart_that_beats_is_alive() {
        let heart = Heartbeat::new();
        heart.beat();
        assert!(heart.is_alive() && heart.age() < Duration::from_secs(5));
    }
}

//! Exponential backoff for retries.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// Returns the waiting times between retries: doubled each time up to `longest`, with jitter so that hosts do not retry
/// at once.
pub fn backoff(first: Duration, longest: Duration) -> ExponentialBuilder {
    // Jitter adds up to the same time again.
    let backoff = ExponentialBuilder::new().with_min_delay(first / 2).with_max_delay(longest / 2);
    backoff.with_jitter().without_max_times()
}

/// The schedule of an operation that is retried without limit.
#[derive(Debug)]
pub struct Retry {
    due: Instant,
    waits: ExponentialBackoff,
}

impl Retry {
    /// Creates a schedule with the first try due at once.
    pub fn new(now: Instant, first: Duration, longest: Duration) -> Self {
        Self { due: now, waits: backoff(first, longest).build() }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// Schedules the next try after a longer wait.
    pub fn postpone(&mut self, now: Instant) {
        self.due = now + self.waits.next().unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_longest() {
        let longest = [1, 2, 4, 8, 16, 32, 60, 60];
        let waits = backoff(Duration::from_secs(1), Duration::from_mins(1)).build();
        let waits: Vec<_> = waits.take(longest.len()).collect();
        assert_eq!(waits.len(), longest.len(), "it is tried again without end");
        for (whole, wait) in longest.into_iter().zip(waits) {
            assert!(wait >= Duration::from_secs(whole) / 2 && wait <= Duration::from_secs(whole), "{wait:?}");
        }
    }

    #[test]
    fn first_try_is_due_at_once() {
        let now = Instant::now();
        let mut retry = Retry::new(now, Duration::from_secs(2), Duration::from_mins(1));
        assert!(retry.is_due(now));
        retry.postpone(now);
        assert!(!retry.is_due(now) && retry.is_due(now + Duration::from_secs(2)));
    }
}

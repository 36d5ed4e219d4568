//! When what failed is tried again.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// How long to wait before each further try: twice as long each time, up to the longest, and not all hosts at once.
pub fn backoff(first: Duration, longest: Duration) -> ExponentialBuilder {
    // Jitter makes each up to twice as long.
    let backoff = ExponentialBuilder::new().with_min_delay(first / 2).with_max_delay(longest / 2);
    backoff.with_jitter().without_max_times()
}

/// Something that failed and is tried again, without end.
#[derive(Debug)]
pub struct Retry {
    due: Instant,
    waits: ExponentialBackoff,
}

impl Retry {
    /// It is due at once.
    pub fn new(now: Instant, first: Duration, longest: Duration) -> Self {
        Self { due: now, waits: backoff(first, longest).build() }
    }

    /// Whether it is time to try again.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// It is tried, or looked at: the next time comes later.
    pub fn postpone(&mut self, now: Instant) {
        self.due = now + self.waits.next().unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_the_longest() {
        let longest = [1, 2, 4, 8, 16, 32, 60, 60];
        let waits = backoff(Duration::from_secs(1), Duration::from_mins(1)).build();
        let waits: Vec<_> = waits.take(longest.len()).collect();
        assert_eq!(waits.len(), longest.len(), "it is tried again without end");
        for (whole, wait) in longest.into_iter().zip(waits) {
            assert!(wait >= Duration::from_secs(whole) / 2 && wait <= Duration::from_secs(whole), "{wait:?}");
        }
    }

    #[test]
    fn what_is_tried_again_is_due_at_once_and_then_later() {
        let now = Instant::now();
        let mut retry = Retry::new(now, Duration::from_secs(2), Duration::from_mins(1));
        assert!(retry.is_due(now));
        retry.postpone(now);
        assert!(!retry.is_due(now) && retry.is_due(now + Duration::from_secs(2)));
    }
}

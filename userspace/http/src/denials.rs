//! What the log says about clients that are turned away: some lines a minute, however many come.

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
/// Lines in a minute.
const LINES: u32 = 10;
const MINUTE: Duration = Duration::from_mins(1);

/// The log of an address.
#[derive(Debug, Default)]
pub(crate) struct Denials(Mutex<Option<Minute>>);

#[derive(Debug)]
struct Minute {
    start: Instant,
    lines: u32,
    suppressed: u64,
}

impl Denials {
    /// Logs that a client was turned away, or counts it.
    pub(crate) fn log(&self, address: Option<SocketAddr>, reason: &dyn fmt::Display) {
        let Some(suppressed) = self.allow(Instant::now()) else { return };
        let peer = address.map(tracing::field::display);
        tracing::warn!(peer, %reason, suppressed, "turned away");
    }

    /// Whether a line may be written; with the number of those that were not since the one before.
    fn allow(&self, now: Instant) -> Option<u64> {
        let mut minute = self.0.lock();
        let fresh = |suppressed| Minute { start: now, lines: 0, suppressed };
        let current = minute.get_or_insert_with(|| fresh(0));
        if now.saturating_duration_since(current.start) >= MINUTE {
            *current = fresh(current.suppressed);
        }
        if current.lines == LINES {
            current.suppressed += 1;
            return None;
        }
        current.lines += 1;
        Some(std::mem::take(&mut current.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_ten_lines_a_minute_and_a_number() {
        let (denials, start) = (Denials::default(), Instant::now());
        let allow = |seconds: u64| denials.allow(start + Duration::from_secs(seconds));
        assert_eq!((0..1000).filter_map(|_| allow(1)).collect::<Vec<_>>(), [0; LINES as usize]);
        assert_eq!(allow(60), None);
        assert_eq!((allow(61), allow(61)), (Some(991), Some(0)));
    }
}

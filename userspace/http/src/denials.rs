//! The log of refused clients, limited to some lines a minute.

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Maximum number of lines in a minute.
const MAX_LINES: u32 = 10;
const MINUTE: Duration = Duration::from_mins(1);

/// The log of the refused clients of one address.
#[derive(Debug, Default)]
pub(crate) struct Denials(Mutex<Option<Minute>>);

#[derive(Debug)]
struct Minute {
    start: Instant,
    lines: u32,
    suppressed: u64,
}

impl Denials {
    /// Logs that a client was refused, or counts it if there are too many lines.
    pub(crate) fn log(&self, address: Option<SocketAddr>, reason: &dyn fmt::Display) {
        let Some(suppressed) = self.allow(Instant::now()) else { return };
        let peer = address.map(tracing::field::display);
        tracing::warn!(peer, %reason, suppressed, "a client was refused");
    }

    /// Returns the number of suppressed lines since the last one if a line may be written.
    fn allow(&self, now: Instant) -> Option<u64> {
        let mut minute = self.0.lock();
        let fresh = |suppressed| Minute { start: now, lines: 0, suppressed };
        let current = minute.get_or_insert_with(|| fresh(0));
        if now.saturating_duration_since(current.start) >= MINUTE {
            *current = fresh(current.suppressed);
        }
        if current.lines == MAX_LINES {
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
    fn logs_ten_lines_a_minute() {
        let (denials, start) = (Denials::default(), Instant::now());
        let allow = |seconds: u64| denials.allow(start + Duration::from_secs(seconds));
        assert_eq!((0..1000).filter_map(|_| allow(1)).collect::<Vec<_>>(), [0; MAX_LINES as usize]);
        assert_eq!(allow(60), None);
        assert_eq!((allow(61), allow(61)), (Some(991), Some(0)));
    }
}

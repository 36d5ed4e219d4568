//! The frequency of the processor's time stamp counter.
//!
//! # Problem
//! In real time, the emulated counter is that of the host. The guest measures its frequency at boot against an emulated timer. If the host
//! does not run the emulator in the meantime, the result is wrong, and the guest's clock runs several times as fast as the host's until
//! its end.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use quanta::Clock;

const INTERVAL: Duration = Duration::from_millis(100);
/// Number of readings of which the shortest counts: the others may have been interrupted.
const READINGS: usize = 32;
/// Frequency of a clock in nanoseconds, which stands for a processor without a usable counter.
const NANOSECONDS_KHZ: u64 = 1_000_000;

/// Returns the frequency of this host's counter in kHz, if there is a counter.
pub(crate) fn frequency() -> Option<u64> {
    static FREQUENCY: OnceLock<Option<u64>> = OnceLock::new();
    *FREQUENCY.get_or_init(measure)
}

fn measure() -> Option<u64> {
    let clock = Clock::new();
    let (before, first) = read(&clock)?;
    thread::sleep(INTERVAL);
    let (after, last) = read(&clock)?;
    let nanoseconds = last.duration_since(first).as_nanos();
    let counts = u128::from(after.wrapping_sub(before));
    let frequency = u64::try_from((counts * 1_000_000).checked_div(nanoseconds)?).ok()?;
    (frequency.abs_diff(NANOSECONDS_KHZ) > NANOSECONDS_KHZ / 1000).then_some(frequency)
}

/// Returns the counter and the time of one moment.
fn read(clock: &Clock) -> Option<(u64, Instant)> {
    let readings = (0..READINGS).map(|_| {
        let before = Instant::now();
        let count = clock.raw();
        (before.elapsed(), count, before)
    });
    readings.min_by_key(|(took, ..)| *took).map(|(_, count, at)| (count, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_agree() {
        let of = |frequency: Option<u64>| frequency.unwrap_or(NANOSECONDS_KHZ);
        let (one, other) = (of(measure()), of(measure()));
        assert!(one.abs_diff(other) < one / 1000, "{one} and {other} kHz");
    }
}

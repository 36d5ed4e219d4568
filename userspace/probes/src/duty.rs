//! When a probe that is attached for a part of the time only is to be attached.
//!
//! What it counts is multiplied by period / on, so the time in which it was attached must make up exactly that part of
//! all time. Turns come late: a time attached is as long as it is, and the time detached that follows is measured by
//! it; what that gets too long is taken off the next one.

use std::time::{Duration, Instant};

/// For which part of the time a probe is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DutyCycle {
    on: Duration,
    period: Duration,
}

impl DutyCycle {
    /// Attached for `on` of each `period`: more than nothing and less than all of it, else this is `None`.
    pub fn new(on: Duration, period: Duration) -> Option<Self> {
        (!on.is_zero() && on < period).then_some(Self { on, period })
    }

    /// The part of the time, above 0 and below 1.
    pub fn ratio(self) -> f64 {
        self.on.as_secs_f64() / self.period.as_secs_f64()
    }

    /// An estimate of all that happened, from what was counted.
    pub(crate) fn scale(self, counted: u64) -> u64 {
        let all = u128::from(counted) * self.period.as_nanos() / self.on.as_nanos();
        u64::try_from(all).unwrap_or(u64::MAX)
    }
}

/// Keeps to a duty cycle.
#[derive(Debug)]
pub(crate) struct Duty {
    pub(crate) cycle: DutyCycle,
    on: bool,
    since: Instant,
    /// How long this time, attached or detached, is to be.
    length: Duration,
    /// How much too long the times detached were.
    too_long: Duration,
}

impl Duty {
    /// The probe has just been attached.
    pub(crate) fn new(cycle: DutyCycle, now: Instant) -> Self {
        Self { cycle, on: true, since: now, length: cycle.on, too_long: Duration::ZERO }
    }

    /// Whether the probe is to be attached from now on.
    pub(crate) fn is_on(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        if passed < self.length {
            return self.on;
        }
        if self.on {
            let off = passed.mul_f64(1.0 / self.cycle.ratio() - 1.0);
            self.length = off.saturating_sub(self.too_long);
            self.too_long = self.too_long.saturating_sub(off);
        } else {
            self.too_long += passed.saturating_sub(self.length);
            self.length = self.cycle.on;
        }
        self.on = !self.on;
        self.since = now;
        self.on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_has_time_on_and_time_off() {
        let new = |on, period| DutyCycle::new(Duration::from_secs(on), Duration::from_secs(period));
        for (on, period) in [(0, 60), (60, 60), (61, 60), (0, 0)] {
            assert_eq!(new(on, period), None);
        }
        let cycle = new(5, 60).unwrap();
        assert_eq!(cycle.scale(10), 120);
        assert_eq!(cycle.scale(1), 12);
        assert_eq!(cycle.scale(u64::MAX), u64::MAX);
        assert_eq!(new(7, 60).unwrap().scale(7_000_000), 60_000_000);
    }

    /// The part of the time in which it is on, when turns come every `turn` milliseconds and each 37th is late.
    fn part_on(turn: u64, late: u64) -> f64 {
        let cycle = DutyCycle::new(Duration::from_secs(5), Duration::from_mins(1)).unwrap();
        let start = Instant::now();
        let mut duty = Duty::new(cycle, start);
        let (mut now, mut on, mut was_on) = (start, Duration::ZERO, true);
        let (mut cycles, mut step) = (0, 0_u64);
        // Whole cycles: each begins when it is attached.
        while cycles < 100 {
            step += 1;
            let next = now + Duration::from_millis(turn + if step.is_multiple_of(37) { late } else { 0 });
            if was_on {
                on += next - now;
            }
            now = next;
            let is_on = duty.is_on(now);
            cycles += u32::from(is_on && !was_on);
            was_on = is_on;
        }
        on.as_secs_f64() / (now - start).as_secs_f64()
    }

    #[test]
    fn the_time_on_is_the_part_that_was_asked_for_also_when_turns_are_late() {
        for (turn, late) in [(10, 0), (250, 0), (333, 0), (250, 4_000), (7_000, 0)] {
            let part = part_on(turn, late);
            assert!((part * 12.0 - 1.0).abs() < 0.005, "turns of {turn} ms, {late} ms late: {part}");
        }
    }
}

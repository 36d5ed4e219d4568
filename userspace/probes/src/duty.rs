//! The schedule of a probe that is attached for a part of the time only.
//!
//! Its counts are multiplied by period / on, so it must be attached for exactly this part of the time. Calls of the
//! scheduler may be late: an attached phase lasts until the next call, and the length of the following detached phase
//! is derived from it. The excess of a detached phase is subtracted from the next one.

use std::time::{Duration, Instant};

/// The part of the time in which a probe is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DutyCycle {
    on: Duration,
    period: Duration,
}

impl DutyCycle {
    /// Creates a cycle that is attached for `on` of each `period`. `None` if `on` is zero or not less than `period`.
    pub fn new(on: Duration, period: Duration) -> Option<Self> {
        (!on.is_zero() && on < period).then_some(Self { on, period })
    }

    /// Returns the part of the time, above 0 and below 1.
    pub fn ratio(self) -> f64 {
        self.on.as_secs_f64() / self.period.as_secs_f64()
    }

    /// Estimates the number of all events from the counted ones.
    pub(crate) fn scale(self, counted: u64) -> u64 {
        let all = u128::from(counted) * self.period.as_nanos() / self.on.as_nanos();
        u64::try_from(all).unwrap_or(u64::MAX)
    }
}

/// The state of a duty cycle.
#[derive(Debug)]
pub(crate) struct DutySchedule {
    pub(crate) cycle: DutyCycle,
    on: bool,
    since: Instant,
    /// The planned length of the current phase.
    length: Duration,
    /// The total excess of the detached phases.
    excess: Duration,
}

impl DutySchedule {
    /// Starts the cycle. The probe has just been attached.
    pub(crate) fn new(cycle: DutyCycle, now: Instant) -> Self {
        Self { cycle, on: true, since: now, length: cycle.on, excess: Duration::ZERO }
    }

    /// Returns true if the probe has to be attached from now on.
    pub(crate) fn is_on(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        if passed < self.length {
            return self.on;
        }
        if self.on {
            let off = passed.mul_f64(1.0 / self.cycle.ratio() - 1.0);
            self.length = off.saturating_sub(self.excess);
            self.excess = self.excess.saturating_sub(off);
        } else {
            self.excess += passed.saturating_sub(self.length);
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
    fn cycle_has_both_phases() {
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

    /// Returns the part of the time in which the probe is attached, with a call every `turn` milliseconds, of which
    /// each 37th is late.
    fn part_on(turn: u64, late: u64) -> f64 {
        let cycle = DutyCycle::new(Duration::from_secs(5), Duration::from_mins(1)).unwrap();
        let start = Instant::now();
        let mut duty = DutySchedule::new(cycle, start);
        let (mut now, mut on, mut was_on) = (start, Duration::ZERO, true);
        let (mut cycles, mut step) = (0, 0_u64);
        // Only complete cycles are measured; each begins with an attached phase.
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
    fn duty_ratio_holds_with_late_calls() {
        for (turn, late) in [(10, 0), (250, 0), (333, 0), (250, 4_000), (7_000, 0)] {
            let part = part_on(turn, late);
            assert!((part * 12.0 - 1.0).abs() < 0.005, "turns of {turn} ms, {late} ms late: {part}");
        }
    }
}

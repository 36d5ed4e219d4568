//! Times of a recording, as a user writes them.

use std::{
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const SECOND: u64 = 1000;
const DAY: u64 = 24 * 3600 * SECOND;

/// A time of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// In milliseconds since 1970.
    At(u64),
    /// In milliseconds of a day: the first such time of what was recorded; if it has none, the nearest before or after it.
    OfDay(u64),
    /// So many milliseconds after the first moment.
    After(u64),
}

/// The part that is asked for of what was recorded between two times: its first and its last millisecond since 1970.
///
/// A time of day that ends the part is the first one from its begin on: 23:00 to 01:00 is over midnight, in any night.
pub(crate) fn part(begin: Option<When>, end: Option<When>, recorded: (u64, u64)) -> (u64, u64) {
    let (first, last) = recorded;
    let at = |when: When, from: u64| match when {
        When::At(at) => at,
        When::After(millis) => first.saturating_add(millis),
        When::OfDay(millis) => of_day_from(millis, from, last),
    };
    let from = begin.map_or(first, |when| at(when, first));
    // A second is asked for with all of it.
    let to = end.map_or(last, |when| at(when, from.max(first)).saturating_add(SECOND - 1));
    (from, to)
}

/// The first such time of day in a span; if it has none, the nearest before or after it.
fn of_day_from(millis: u64, first: u64, last: u64) -> u64 {
    let today = (first - first % DAY).saturating_add(millis);
    // A second that has begun is not over.
    let is_over = today.saturating_add(SECOND) <= first;
    let next = if is_over { today.saturating_add(DAY) } else { today };
    let before = next.saturating_sub(DAY);
    if next > last && first.saturating_sub(before) < next - last { before } else { next }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The hour, the minute and possibly the second.
fn of_day(text: &str) -> Option<u64> {
    let mut parts = text.split(':').map(|part| part.parse::<u64>().ok().filter(|_| part.len() <= 2));
    let (hour, minute) = (parts.next()??, parts.next()??);
    let second = parts.next().unwrap_or(Some(0))?;
    let is_one = hour < 24 && minute < 60 && second < 60 && parts.next().is_none();
    is_one.then(|| ((hour * 60 + minute) * 60 + second) * 1000)
}

impl FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(after) = text.strip_prefix('+') {
            let after = humantime::parse_duration(after);
            let after = after.map_err(|error| {
                format!("{text:?} is not a time after the beginning, such as +5m: {error}")
            })?;
            return Ok(Self::After(millis(after)));
        }
        if let Some(millis) = of_day(text) {
            return Ok(Self::OfDay(millis));
        }
        let at = humantime::parse_rfc3339_weak(text).map_err(|_| {
            format!("{text:?} is not a time such as 14:30, 14:30:05, 2026-11-21T14:30:05Z (all UTC) or +5m")
        })?;
        Ok(Self::At(millis(at.duration_since(UNIX_EPOCH).unwrap_or_default())))
    }
}

/// A time in RFC 3339.
pub(crate) fn time(at_millis: u64) -> String {
    // The formatter knows no later year than 9999.
    let latest = 253_402_300_799_999;
    let at: SystemTime = UNIX_EPOCH + Duration::from_millis(at_millis.min(latest));
    humantime::format_rfc3339_millis(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_the_recording() {
        // 2026-11-21T23:59:30.500Z, and for an hour.
        let recorded = (1_795_305_570_500, 1_795_309_170_500);
        for (text, is) in [
            ("2026-11-21T23:59:40Z", "2026-11-21T23:59:40.000Z"),
            ("2026-11-22 00:00:01", "2026-11-22T00:00:01.000Z"),
            ("23:59:31", "2026-11-21T23:59:31.000Z"),
            ("23:59:30", "2026-11-21T23:59:30.000Z"),
            ("0:00", "2026-11-22T00:00:00.000Z"),
            ("+1m30s", "2026-11-22T00:01:00.500Z"),
            ("+0s", "2026-11-21T23:59:30.500Z"),
        ] {
            let (from, _) = part(Some(text.parse().unwrap()), None, recorded);
            assert_eq!(time(from), is, "{text}");
        }
        for wrong in ["", "+", "24:00", "12", "12:60", "1:2:3:4", "yesterday", "+5 parsecs", "-5m", "12:001"]
        {
            assert!(wrong.parse::<When>().is_err(), "{wrong}");
        }
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.999Z");
    }

    /// What was recorded from a time on for so many minutes, and is asked for: its part, as times.
    fn asked(begin: &str, end: &str, recorded: &str, minutes: u64) -> (String, String) {
        let first = humantime::parse_rfc3339_weak(recorded).unwrap().duration_since(UNIX_EPOCH).unwrap();
        let first = millis(first);
        let when = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
        let (from, to) = part(when(begin), when(end), (first, first + minutes * 60 * SECOND));
        (time(from), time(to))
    }

    #[test]
    fn a_time_of_day_is_in_the_recording_or_next_to_it() {
        for (begin, recorded, minutes, is) in [
            // Before the first moment, of the same night: from the first moment on.
            ("02:30", "2026-11-21T02:40:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:00", "2026-11-21T02:10:00Z", 1, "2026-11-21T02:00:00.000Z"),
            ("02:09", "2026-11-21T02:09:30Z", 60, "2026-11-21T02:09:00.000Z"),
            ("23:50", "2026-11-22T00:10:00Z", 60, "2026-11-21T23:50:00.000Z"),
            // In it.
            ("02:30", "2026-11-21T02:10:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:30", "2026-11-21T02:30:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:30", "2026-11-20T23:00:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("0:00", "2026-11-20T23:00:00Z", 60, "2026-11-21T00:00:00.000Z"),
            ("23:30", "2026-11-20T23:00:00Z", 240, "2026-11-20T23:30:00.000Z"),
            // In it on the second day only.
            ("02:00", "2026-11-20T02:10:00Z", 1500, "2026-11-21T02:00:00.000Z"),
            // After the last moment.
            ("02:30", "2026-11-20T23:00:00Z", 30, "2026-11-21T02:30:00.000Z"),
            ("04:00", "2026-11-21T02:10:00Z", 60, "2026-11-21T04:00:00.000Z"),
            ("00:10", "2026-11-20T23:00:00Z", 50, "2026-11-21T00:10:00.000Z"),
        ] {
            assert_eq!(asked(begin, "", recorded, minutes).0, is, "{begin} of {recorded}");
        }
    }

    #[test]
    fn a_part_ends_after_its_begin() {
        for (begin, end, recorded, minutes, from, to) in [
            ("02:00", "02:45", "2026-11-21T02:10:00Z", 240, "21T02:00:00.000", "21T02:45:00.999"),
            ("23:30", "01:00", "2026-11-20T23:00:00Z", 240, "20T23:30:00.000", "21T01:00:00.999"),
            // The recording has two such ends; the first is before the part.
            ("23:00", "01:00", "2026-11-20T00:30:00Z", 2880, "20T23:00:00.000", "21T01:00:00.999"),
            ("", "01:00", "2026-11-20T00:30:00Z", 2880, "20T00:30:00.000", "20T01:00:00.999"),
            ("+5m", "+10m", "2026-11-20T23:58:00Z", 60, "21T00:03:00.000", "21T00:08:00.999"),
            // Nothing: the end is before what was recorded, or before the beginning.
            ("", "02:00", "2026-11-21T02:10:00Z", 60, "21T02:10:00.000", "21T02:00:00.999"),
            ("02:45", "02:30", "2026-11-21T02:10:00Z", 60, "21T02:45:00.000", "21T02:30:00.999"),
            // Beyond what was recorded: to its end.
            ("", "04:00", "2026-11-21T02:10:00Z", 60, "21T02:10:00.000", "21T04:00:00.999"),
        ] {
            let is = (format!("2026-11-{from}Z"), format!("2026-11-{to}Z"));
            assert_eq!(asked(begin, end, recorded, minutes), is, "{begin} to {end} of {recorded}");
        }
    }

    #[test]
    fn times_of_a_damaged_file_are_times() {
        let end = u64::MAX;
        for recorded in [(0, 0), (end, end), (end, 0), (0, end)] {
            for text in ["00:00", "23:59:59", "+1h", "1970-01-01T00:00:00Z"] {
                let when = Some(text.parse().unwrap());
                let (from, to) = part(when, when, recorded);
                assert!(from <= to, "{text} of {recorded:?}: {from} to {to}");
            }
        }
    }
}

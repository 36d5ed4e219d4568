//! Times of a recording in the notations that users write.

use std::{
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const MILLIS_PER_SECOND: u64 = 1000;
const MILLIS_PER_DAY: u64 = 24 * 3600 * MILLIS_PER_SECOND;

/// A time of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplayTime {
    /// Absolute time in milliseconds since 1970.
    At(u64),
    /// Time of day in milliseconds: the first such time within the recording, or else the nearest one before or after
    /// it.
    OfDay(u64),
    /// Milliseconds after the first moment.
    After(u64),
}

/// Returns the requested part of a recording between two times: its first and its last millisecond since 1970.
///
/// A time of day that ends the part is the first one after its beginning: 23:00 to 01:00 includes midnight, in any
/// night.
pub(crate) fn time_range(
    begin: Option<ReplayTime>,
    end: Option<ReplayTime>,
    recorded: (u64, u64),
) -> (u64, u64) {
    let (first, last) = recorded;
    let at = |time: ReplayTime, from: u64| match time {
        ReplayTime::At(at) => at,
        ReplayTime::After(millis) => first.saturating_add(millis),
        ReplayTime::OfDay(millis) => time_of_day_from(millis, from, last),
    };
    let from = begin.map_or(first, |time| at(time, first));
    // The end includes its whole second.
    let to = end.map_or(last, |time| at(time, from.max(first)).saturating_add(MILLIS_PER_SECOND - 1));
    (from, to)
}

/// Returns the first such time of day in a span; if it has none, the nearest before or after it.
fn time_of_day_from(millis: u64, first: u64, last: u64) -> u64 {
    let today = (first - first % MILLIS_PER_DAY).saturating_add(millis);
    // The span may begin within the second that is asked for.
    let is_over = today.saturating_add(MILLIS_PER_SECOND) <= first;
    let next = if is_over { today.saturating_add(MILLIS_PER_DAY) } else { today };
    let before = next.saturating_sub(MILLIS_PER_DAY);
    if next > last && first.saturating_sub(before) < next - last { before } else { next }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Parses an hour, a minute and an optional second into milliseconds of the day.
fn parse_time_of_day(text: &str) -> Option<u64> {
    let mut parts = text.split(':').map(|part| part.parse::<u64>().ok().filter(|_| part.len() <= 2));
    let (hour, minute) = (parts.next()??, parts.next()??);
    let second = parts.next().unwrap_or(Some(0))?;
    let is_valid = hour < 24 && minute < 60 && second < 60 && parts.next().is_none();
    is_valid.then(|| ((hour * 60 + minute) * 60 + second) * 1000)
}

impl FromStr for ReplayTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(after) = text.strip_prefix('+') {
            let after = humantime::parse_duration(after);
            let after = after.map_err(|error| {
                format!("{text:?} is not a time after the beginning, such as +5m: {error}")
            })?;
            return Ok(Self::After(millis(after)));
        }
        if let Some(millis) = parse_time_of_day(text) {
            return Ok(Self::OfDay(millis));
        }
        let at = humantime::parse_rfc3339_weak(text).map_err(|_| {
            format!("{text:?} is not a time such as 14:30, 14:30:05, 2026-11-21T14:30:05Z (all UTC) or +5m")
        })?;
        Ok(Self::At(millis(at.duration_since(UNIX_EPOCH).unwrap_or_default())))
    }
}

/// Formats a time as RFC 3339.
pub(crate) fn format_time(at_millis: u64) -> String {
    // The formatter supports years up to 9999.
    let latest = 253_402_300_799_999;
    let at: SystemTime = UNIX_EPOCH + Duration::from_millis(at_millis.min(latest));
    humantime::format_rfc3339_millis(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_times() {
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
            let (from, _) = time_range(Some(text.parse().unwrap()), None, recorded);
            assert_eq!(format_time(from), is, "{text}");
        }
        for wrong in ["", "+", "24:00", "12", "12:60", "1:2:3:4", "yesterday", "+5 parsecs", "-5m", "12:001"]
        {
            assert!(wrong.parse::<ReplayTime>().is_err(), "{wrong}");
        }
        assert_eq!(format_time(u64::MAX), "9999-12-31T23:59:59.999Z");
    }

    /// Returns the part that is requested of a recording with this start and length.
    fn range_of(begin: &str, end: &str, recorded: &str, minutes: u64) -> (String, String) {
        let first = humantime::parse_rfc3339_weak(recorded).unwrap().duration_since(UNIX_EPOCH).unwrap();
        let first = millis(first);
        let when = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
        let (from, to) =
            time_range(when(begin), when(end), (first, first + minutes * 60 * MILLIS_PER_SECOND));
        (format_time(from), format_time(to))
    }

    #[test]
    fn time_of_day_is_near_recording() {
        for (begin, recorded, minutes, is) in [
            // Before the first moment, in the same night: the range starts with the first moment.
            ("02:30", "2026-11-21T02:40:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:00", "2026-11-21T02:10:00Z", 1, "2026-11-21T02:00:00.000Z"),
            ("02:09", "2026-11-21T02:09:30Z", 60, "2026-11-21T02:09:00.000Z"),
            ("23:50", "2026-11-22T00:10:00Z", 60, "2026-11-21T23:50:00.000Z"),
            // Within the recording.
            ("02:30", "2026-11-21T02:10:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:30", "2026-11-21T02:30:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("02:30", "2026-11-20T23:00:00Z", 240, "2026-11-21T02:30:00.000Z"),
            ("0:00", "2026-11-20T23:00:00Z", 60, "2026-11-21T00:00:00.000Z"),
            ("23:30", "2026-11-20T23:00:00Z", 240, "2026-11-20T23:30:00.000Z"),
            // Within the recording on the second day only.
            ("02:00", "2026-11-20T02:10:00Z", 1500, "2026-11-21T02:00:00.000Z"),
            // After the last moment.
            ("02:30", "2026-11-20T23:00:00Z", 30, "2026-11-21T02:30:00.000Z"),
            ("04:00", "2026-11-21T02:10:00Z", 60, "2026-11-21T04:00:00.000Z"),
            ("00:10", "2026-11-20T23:00:00Z", 50, "2026-11-21T00:10:00.000Z"),
        ] {
            assert_eq!(range_of(begin, "", recorded, minutes).0, is, "{begin} of {recorded}");
        }
    }

    #[test]
    fn range_ends_after_its_beginning() {
        for (begin, end, recorded, minutes, from, to) in [
            ("02:00", "02:45", "2026-11-21T02:10:00Z", 240, "21T02:00:00.000", "21T02:45:00.999"),
            ("23:30", "01:00", "2026-11-20T23:00:00Z", 240, "20T23:30:00.000", "21T01:00:00.999"),
            // The recording has two such ends; the first is before the beginning of the range.
            ("23:00", "01:00", "2026-11-20T00:30:00Z", 2880, "20T23:00:00.000", "21T01:00:00.999"),
            ("", "01:00", "2026-11-20T00:30:00Z", 2880, "20T00:30:00.000", "20T01:00:00.999"),
            ("+5m", "+10m", "2026-11-20T23:58:00Z", 60, "21T00:03:00.000", "21T00:08:00.999"),
            // Empty: the end is before the recording, or before the beginning of the range.
            ("", "02:00", "2026-11-21T02:10:00Z", 60, "21T02:10:00.000", "21T02:00:00.999"),
            ("02:45", "02:30", "2026-11-21T02:10:00Z", 60, "21T02:45:00.000", "21T02:30:00.999"),
            // After the recording: the range ends with it.
            ("", "04:00", "2026-11-21T02:10:00Z", 60, "21T02:10:00.000", "21T04:00:00.999"),
        ] {
            let is = (format!("2026-11-{from}Z"), format!("2026-11-{to}Z"));
            assert_eq!(range_of(begin, end, recorded, minutes), is, "{begin} to {end} of {recorded}");
        }
    }

    #[test]
    fn accepts_times_of_damaged_file() {
        let end = u64::MAX;
        for recorded in [(0, 0), (end, end), (end, 0), (0, end)] {
            for text in ["00:00", "23:59:59", "+1h", "1970-01-01T00:00:00Z"] {
                let when = Some(text.parse().unwrap());
                let (from, to) = time_range(when, when, recorded);
                assert!(from <= to, "{text} of {recorded:?}: {from} to {to}");
            }
        }
    }
}

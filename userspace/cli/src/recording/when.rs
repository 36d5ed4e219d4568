//! Times of a recording, as a user writes them.

use std::{
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const DAY: u64 = 24 * 3600 * 1000;

/// A time of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// In milliseconds since 1970.
    At(u64),
    /// In milliseconds of a day: the first such time.
    OfDay(u64),
    /// So many milliseconds after the first moment.
    After(u64),
}

impl When {
    /// In milliseconds since 1970, of a recording that begins then.
    pub(crate) fn of(self, begin: u64) -> u64 {
        match self {
            Self::At(at) => at,
            Self::After(millis) => begin.saturating_add(millis),
            Self::OfDay(millis) => {
                let at = begin - begin % DAY + millis;
                // A second that has begun is not over.
                if at + 1000 <= begin { at + DAY } else { at }
            }
        }
    }
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
            let after = after
                .map_err(|error| format!("{text:?} is not a time after the begin, such as +5m: {error}"))?;
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
        // 2026-11-21T23:59:30.500Z
        let begin = 1_795_305_570_500;
        for (text, is) in [
            ("2026-11-21T23:59:40Z", "2026-11-21T23:59:40.000Z"),
            ("2026-11-22 00:00:01", "2026-11-22T00:00:01.000Z"),
            ("23:59:31", "2026-11-21T23:59:31.000Z"),
            ("23:59:30", "2026-11-21T23:59:30.000Z"),
            ("0:00", "2026-11-22T00:00:00.000Z"),
            ("+1m30s", "2026-11-22T00:01:00.500Z"),
            ("+0s", "2026-11-21T23:59:30.500Z"),
        ] {
            assert_eq!(time(text.parse::<When>().unwrap().of(begin)), is, "{text}");
        }
        for wrong in ["", "+", "24:00", "12", "12:60", "1:2:3:4", "yesterday", "+5 parsecs", "-5m", "12:001"]
        {
            assert!(wrong.parse::<When>().is_err(), "{wrong}");
        }
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.999Z");
    }
}

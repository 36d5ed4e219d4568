//! Value types with their own textual form.

use std::{net::SocketAddr, str::FromStr, time::Duration};

use http::Uri;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// The least severe level of events to log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Failures and degraded operation.
    Warn,
    /// Warnings and changes.
    #[default]
    Info,
    /// Also each request and decision.
    Debug,
    /// Everything.
    Trace,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// The format of a logged event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A line of text.
    #[default]
    Text,
    /// A JSON object on a line.
    Json,
}

/// An address and port to listen on. Port 0 is any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub struct ListenAddress(pub SocketAddr);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!("{text:?} is not an address and port (write it like 127.0.0.1:9560, 0.0.0.0:9560 or [::]:9560)")
        })
    }
}

/// A duration such as `10s`, `1m30s` or `500ms`. It is used as an interval, so it is never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
// The notation of Kubernetes, without spaces.
#[display("{}", humantime::format_duration(*_0).to_string().replace(' ', ""))]
pub struct Interval(pub Duration);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match humantime::parse_duration(text) {
            Ok(duration) if duration.is_zero() => Err("a duration must be above zero".to_owned()),
            Ok(duration) => Ok(Self(duration)),
            Err(error) => Err(format!("{text:?} is not a duration such as 10s or 1m30s: {error}")),
        }
    }
}

/// A URL: `https://host/path` or `http://host:port`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct HttpUrl(pub Uri);

impl FromStr for HttpUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url: Uri = text
            .parse()
            .map_err(|error| format!("{text:?} is not a URL such as https://host/path: {error}"))?;
        if !matches!(url.scheme_str(), Some("http" | "https")) {
            return Err(format!("{text:?} does not begin with http:// or https://"));
        }
        match url.authority() {
            Some(authority) if authority.as_str().contains('@') => {
                Err("a URL with a user name or password is not accepted: give a token in a file".to_owned())
            }
            Some(authority) if !authority.host().is_empty() => Ok(Self(url)),
            _ => Err(format!("{text:?} has no host")),
        }
    }
}

/// A part of the time: `5s/60s` is five seconds of each minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{on}/{period}")]
pub struct DutyCycle {
    /// The length of the active phase.
    pub on: Interval,
    /// The length of the whole period.
    pub period: Interval,
}

impl FromStr for DutyCycle {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// The shortest active phase; the daemon checks the phase four times a second.
        const MIN_ACTIVE: Duration = Duration::from_secs(1);
        let form = || format!("{text:?} is not a duty cycle such as 5s/60s (5 seconds of each minute)");
        let (on, period) = text.split_once('/').ok_or_else(form)?;
        let interval = |part: &str| part.trim().parse().map_err(|error| format!("{}: {error}", form()));
        let (on, period): (Interval, Interval) = (interval(on)?, interval(period)?);
        if on.0 < MIN_ACTIVE {
            return Err(format!("{text:?}: {on} is too short; the least is 1s"));
        }
        if on.0 >= period.0 {
            return Err(format!(
                "{text:?}: {on} is not shorter than {period}; remove the key to watch all the time"
            ));
        }
        Ok(Self { on, period })
    }
}

serde_as_text!(ListenAddress);
serde_as_text!(Interval);
serde_as_text!(DutyCycle);
serde_as_text!(HttpUrl);

inline_schema!(ListenAddress, {
    "type": "string",
    "pattern": r"^(\d+\.\d+\.\d+\.\d+|\[[0-9a-fA-F:.]+(%\d+)?\]):\d+$",
    "examples": ["127.0.0.1:9560"],
});
inline_schema!(Interval, {
    "type": "string",
    "pattern": r"^(\d+\s*[a-zµ]+\s*)+$",
    "examples": ["1m30s"],
});
inline_schema!(DutyCycle, {
    "type": "string",
    "pattern": r"^(\d+\s*[a-zµ]+\s*)+/(\s*\d+\s*[a-zµ]+)+$",
    "examples": ["5s/60s"],
});
inline_schema!(HttpUrl, {
    "type": "string",
    "pattern": r"^https?://.+$",
    "examples": ["https://metrics.example.com"],
});

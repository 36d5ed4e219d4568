//! Values with a form of their own.

use std::{net::SocketAddr, str::FromStr, time::Duration};

use http::Uri;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// How severe an event must be to be logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// And what works less well than it could.
    Warn,
    /// And what changed.
    #[default]
    Info,
    /// And each request and decision.
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

/// The form of a logged event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// A JSON object on a line.
    Json,
}

/// Address and port to listen on. Port 0 takes any free one.
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

/// A span of time: `10s`, `1m30s`, `500ms`. Serves as an interval, so it is never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
// As Kubernetes writes durations: without spaces.
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

/// An address on the web: `https://host/path` or `http://host:port`.
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
                Err("a URL with a user name or password is not taken: give a token in a file".to_owned())
            }
            Some(authority) if !authority.host().is_empty() => Ok(Self(url)),
            _ => Err(format!("{text:?} names no host")),
        }
    }
}

/// For which part of the time something is done: `5s/60s` is five seconds of each minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{on}/{period}")]
pub struct DutyCycle {
    /// How long it is done.
    pub on: Interval,
    /// Of how long.
    pub period: Interval,
}

impl FromStr for DutyCycle {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// The daemon looks four times a second whether it is time.
        const SHORTEST: Duration = Duration::from_secs(1);
        let form = || format!("{text:?} is not a duty cycle such as 5s/60s (5 seconds of each minute)");
        let (on, period) = text.split_once('/').ok_or_else(form)?;
        let interval = |part: &str| part.trim().parse().map_err(|error| format!("{}: {error}", form()));
        let (on, period): (Interval, Interval) = (interval(on)?, interval(period)?);
        if on.0 < SHORTEST {
            return Err(format!("{text:?}: {on} is too short; the least is 1s"));
        }
        if on.0 >= period.0 {
            return Err(format!(
                "{text:?}: {on} is not a part of {period}; leave it out to watch all the time"
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
    "examples": ["https://alerts.example.com/hook"],
});

//! Logs: one event a line, as text or as JSON, to standard error.

use std::io::{IsTerminal, stderr};

use tracing::level_filters::LevelFilter;

use crate::config::{Log, LogFormat};

/// Starts to log as configured. Where something logs already, as in tests, that one goes on.
pub fn start(config: &Log) {
    let level = LevelFilter::from_level(config.level.into());
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(stderr);
    let _ = match config.format {
        // journald and container runtimes keep the bytes: colours only for people.
        LogFormat::Text => builder.with_ansi(stderr().is_terminal()).with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

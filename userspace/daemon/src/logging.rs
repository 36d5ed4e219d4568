//! The log: one event a line, as text or as JSON, on standard error.
//!
//! Users choose some of the names in an event, such as those of workloads. So that a name cannot forge a line or control a terminal,
//! line breaks and other control characters are escaped.

use std::{
    io::{self, IsTerminal, Write, stderr},
    sync::Arc,
};

use numaward_api::safe_text::{clean, clean_json};
use numaward_config::{Log, LogFormat, LogLevel};
use numaward_telemetry::otlp::spans::Traces;
use tracing::{Subscriber, field::Field, level_filters::LevelFilter};
use tracing_subscriber::{
    Layer,
    field::MakeExt as _,
    filter::Targets,
    fmt::{
        self,
        format::{Writer, debug_fn},
    },
    layer::SubscriberExt,
    registry,
    registry::LookupSpan,
    reload,
    util::SubscriberInitExt,
};

/// Target of the log messages of the probes: the name of their eBPF program.
const PROBES: &str = "alloc";

/// Switch of the log's level.
#[derive(Clone)]
pub(crate) struct LogSwitch(Arc<dyn Fn(LogLevel) + Send + Sync>);

impl LogSwitch {
    pub(crate) fn new(set: impl Fn(LogLevel) + Send + Sync + 'static) -> Self {
        Self(Arc::new(set))
    }

    pub(crate) fn set_level(&self, level: LogLevel) {
        (self.0)(level);
    }
}

/// Starts the log as configured, and the collection of spans if traces are to be exported. Keeps a log that is already set up, as in
/// tests.
pub(crate) fn start(config: &Log, traces: &Traces) -> LogSwitch {
    let (filtering, handle) = reload::Layer::new(filter(config.level));
    let layer = layer(config.format, stderr).with_filter(filtering);
    let _ = registry().with(traces.layer()).with(layer).try_init();
    LogSwitch::new(move |level| {
        // Fails if another log was kept.
        let _ = handle.reload(filter(level));
    })
}

fn layer<S, M, W>(format: LogFormat, writer: M) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    M: Fn() -> W + Send + Sync + 'static,
    W: Write + 'static,
{
    match format {
        // journald and container runtimes store the bytes, so colours are only for terminals.
        LogFormat::Text => fmt::layer()
            .with_writer(writer)
            .with_ansi(stderr().is_terminal())
            .with_target(false)
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .boxed(),
        LogFormat::Json => {
            fmt::layer().json().flatten_event(true).with_writer(move || JsonLine(writer())).boxed()
        }
    }
}

/// Writes a field as text in one line, the message without its name.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn std::fmt::Debug) -> std::fmt::Result {
    let value = format!("{value:?}");
    match field.name() {
        "message" => writer.write_str(&clean(&value)),
        name => write!(writer, "{name}={}", clean(&value)),
    }
}

/// Writer of JSON lines that escapes the control characters of terminals.
struct JsonLine<W>(W);

impl<W: Write> Write for JsonLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(clean_json(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Returns the filter for a level, which is that of numaward itself. Libraries log each of their steps at `debug`, so they log at most
/// at `info` unless the level is `trace`.
fn filter(level: LogLevel) -> Targets {
    let own = LevelFilter::from_level(level.into());
    let libraries = if level == LogLevel::Trace { own } else { own.min(LevelFilter::INFO) };
    Targets::new()
        .with_default(libraries)
        .with_target("numaward", own)
        .with_target(PROBES, own)
        // It warns of each failed attempt, which the daemon itself reports once.
        .with_target("kube_runtime", LevelFilter::ERROR)
        .with_target(numaward_model::SPAN_TARGET, LevelFilter::OFF)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Writer that stores the log of a test.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn escapes_control_characters_in_names() {
        let name = "evil\r\n2026-01-01 INFO forged\u{9b}31m\u{202e}\x1b[2J";
        for (format, expected) in [
            (
                LogFormat::Text,
                r"a workload: evil\r\n2026-01-01 INFO forged\x9b31m\u{202e}\x1b[2J is=a b=evil\r\n",
            ),
            (LogFormat::Json, r"evil\r\n2026-01-01 INFO forged\u009b31m\u202e\u001b[2J"),
        ] {
            let lines = Lines::default();
            let writer = lines.clone();
            let subscriber = registry().with(layer(format, move || writer.clone()));
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(is = %"a", b = %name, c = name, "a workload: {name}");
            });
            let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
            assert!(text.contains(expected), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
            assert_eq!(clean(text.trim_end()), text.trim_end());
        }
    }
}

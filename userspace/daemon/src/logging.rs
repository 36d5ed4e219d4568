//! Logs: one event a line, as text or as JSON, to standard error.

use std::io::{IsTerminal, stderr};

use numaward_config::{Log, LogFormat, LogLevel};
use numaward_telemetry::otlp::spans::Traces;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Layer, filter::Targets, fmt, layer::SubscriberExt, registry, util::SubscriberInitExt,
};

/// What the probes log bears the name of their program.
const PROBES: &str = "alloc";

/// Starts to log as configured, and to take spans for traces if they are to be sent. Where something logs already, as in tests, that one goes on.
pub(crate) fn start(config: &Log, traces: &Traces) {
    let layer = fmt::layer().with_writer(stderr);
    let layer = match config.format {
        // journald and container runtimes keep the bytes: colours only for people.
        LogFormat::Text => layer.with_ansi(stderr().is_terminal()).with_target(false).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    let layer = layer.with_filter(filter(config.level));
    let _ = registry().with(traces.layer()).with(layer).try_init();
}

/// The level holds for numaward itself. Libraries log their every step at `debug`, which is no help to
/// who looks for numaward's: they are heard in full only at `trace`.
fn filter(level: LogLevel) -> Targets {
    let own = LevelFilter::from_level(level.into());
    let others = if level == LogLevel::Trace { own } else { own.min(LevelFilter::INFO) };
    Targets::new()
        .with_default(others)
        .with_target("numaward", own)
        .with_target(PROBES, own)
        // It warns of each attempt that the daemon itself reports once.
        .with_target("kube_runtime", LevelFilter::ERROR)
        .with_target(numaward_model::SPAN_TARGET, LevelFilter::OFF)
}

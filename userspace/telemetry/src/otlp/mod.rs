//! OpenTelemetry: metrics and traces, sent by OTLP over HTTP to the configured receiver.
//!
//! # Problem
//! A site with an OpenTelemetry collector instead of Prometheus needs the same metrics there, and traces that show the
//! steps of a decision and their duration.
//!
//! # Algorithm
//! Every `otlp.interval`, the [metrics] are read as for a scrape, so that both have the same numbers. [Spans](spans)
//! are opened around decisions and writes. Both are encoded as OTLP messages (`opentelemetry-proto`) and put into an
//! [outbox], one for each signal, which sends them in its own task.
//!
//! The exporters of `opentelemetry-otlp` (0.33) are not used. They export only instruments of the SDK, which have no
//! histograms with externally counted buckets, and which keep every set of labels in memory. They also do not report
//! what [`OtlpMetrics`] counts: the items that a receiver rejects, and the reason why a request failed.
//!
//! # Invariants
//! - Nothing is done without `otlp.endpoint`.
//! - No task waits for the receiver.
//! - The queues are bounded, and lost items are counted.
//!
//! Sources: OTLP 1.10 (<https://opentelemetry.io/docs/specs/otlp/>), the semantic conventions for resources.

mod metrics;
mod outbox;
pub mod spans;

use std::{io, sync::Arc, time::SystemTime};

use hyper::{HeaderMap, Uri, http::uri::PathAndQuery};
use numaward_config::{Config, outgoing::Otlp};
use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

pub use self::outbox::OtlpMetrics;
use self::outbox::{Outbox, Signal};
use crate::{http_client::Poster, metrics::Metrics};

/// The schema of the attribute names.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.37.0";
/// The instrumentation scope of metrics and spans.
const SCOPE: &str = "numaward";

/// Returns the resource that sends: this daemon on this host.
fn resource(config: &Config, host: &str) -> Resource {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let mut attributes = vec![
        KeyValue::new("service.name", "numaward"),
        KeyValue::new("service.version", numaward_api::VERSION),
        KeyValue::new("service.instance.id", host.to_owned()),
        KeyValue::new("host.name", host.to_owned()),
        KeyValue::new("host.arch", arch),
        KeyValue::new("os.type", "linux"),
    ];
    if let Some(name) = &config.kubernetes.node_name {
        attributes.push(KeyValue::new("k8s.node.name", name.clone()));
    }
    Resource::builder_empty().with_schema_url(attributes, SCHEMA_URL).build()
}

/// Returns the URL of a signal. Its query is that of the endpoint, in which some collectors expect a key.
fn url(endpoint: &Uri, signal: Signal) -> io::Result<Uri> {
    let mut parts = endpoint.clone().into_parts();
    let query = endpoint.query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = format!("{}/v1/{}{query}", endpoint.path().trim_end_matches('/'), signal.name());
    parts.path_and_query = Some(PathAndQuery::try_from(path).map_err(io::Error::other)?);
    Uri::from_parts(parts).map_err(io::Error::other)
}

fn poster(config: &Otlp, endpoint: &Uri, signal: Signal) -> io::Result<Poster> {
    let mut headers = HeaderMap::new();
    for (name, value) in &config.headers {
        let name = name.parse::<hyper::http::HeaderName>().map_err(io::Error::other)?;
        headers.insert(name, value.parse().map_err(io::Error::other)?);
    }
    Poster::new(url(endpoint, signal)?, "application/x-protobuf", headers, config.token_file.clone())
}

/// Starts to send the configured signals until `stop` is cancelled. `traces` is the source of spans.
///
/// # Errors
/// Fails if the receiver needs TLS and there are no certificate authorities.
pub fn start(
    config: &Config,
    host: &str,
    metrics: &Arc<Metrics>,
    traces: spans::Traces,
    counted: &OtlpMetrics,
    stop: &CancellationToken,
) -> io::Result<()> {
    let Some(endpoint) = &config.otlp.endpoint else { return Ok(()) };
    let resource = resource(config, host);
    let outbox = |signal| {
        let poster = poster(&config.otlp, &endpoint.0, signal)?;
        tracing::info!(signal = signal.name(), receiver = poster.receiver(), "the signal is sent by OTLP");
        let outbox = Arc::new(Outbox::new(signal, counted.clone()));
        tokio::spawn(stop.clone().run_until_cancelled_owned(outbox.clone().run(poster)));
        Ok::<_, io::Error>(outbox)
    };
    if config.otlp.metrics {
        let outbox = outbox(Signal::Metrics)?;
        let send = send_metrics(config.otlp.clone(), metrics.clone(), resource.clone(), outbox);
        tokio::spawn(stop.clone().run_until_cancelled_owned(send));
    }
    if config.otlp.traces {
        let outbox = outbox(Signal::Traces)?;
        tokio::spawn(stop.clone().run_until_cancelled_owned(traces.send(resource, outbox)));
    }
    Ok(())
}

async fn send_metrics(config: Otlp, metrics: Arc<Metrics>, resource: Resource, outbox: Arc<Outbox>) {
    let mut ticks = interval(config.interval.0);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let start = SystemTime::now();
    loop {
        ticks.tick().await;
        let (metrics, resource, outbox) = (metrics.clone(), resource.clone(), outbox.clone());
        let sent = tokio::task::spawn_blocking(move || {
            let time = metrics::TimeRange { start, now: SystemTime::now() };
            metrics::requests(&metrics, &resource, time, |batch| outbox.push(batch))
        });
        match sent.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the metrics for OTLP cannot be read"),
            Err(error) => {
                tracing::error!(%error, "the sender of metrics by OTLP failed and has stopped");
                return;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;

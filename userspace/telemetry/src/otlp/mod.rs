//! OpenTelemetry: metrics and traces, sent by OTLP over HTTP to the configured receiver.
//!
//! Problem: who has a collector instead of a Prometheus wants the same numbers there, and sees by traces how a decision
//! came about and where its time went.
//!
//! Algorithm: every `otlp.interval` a reading of the [metrics] is taken as for a scrape, so that both say the same.
//! [Spans](spans) are opened where something is decided and written. Both are encoded as OTLP's own messages
//! (`opentelemetry-proto`) and put into an [outbox], one for each signal, which posts by itself.
//!
//! The exporters of `opentelemetry-otlp` (0.33) are not used. Its metrics are `ResourceMetrics`, which only the SDK can
//! make, of its own instruments: those have no histograms whose buckets are counted elsewhere, and keep every set of
//! labels in memory. Its spans would be sent by another path than metrics, for one line that encodes them; and it
//! keeps what [`OtlpMetrics`] counts to itself: what a receiver rejects of a request, and why a request failed.
//!
//! Invariants: nothing is done without `otlp.endpoint`; nothing waits for the receiver; what waits for it is bounded, and
//! what is lost counted.
//!
//! Source: OTLP 1.10 (<https://opentelemetry.io/docs/specs/otlp/>), the semantic conventions for resources.

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

/// What the attributes' names mean.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.37.0";
/// Who says so, of metrics and spans.
const SCOPE: &str = "numaward";

/// Who sends: this daemon on this host.
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

/// Where a signal is sent.
fn url(endpoint: &Uri, signal: Signal) -> io::Result<Uri> {
    let mut parts = endpoint.clone().into_parts();
    let path = format!("{}/v1/{}", endpoint.path().trim_end_matches('/'), signal.name());
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

/// Sends until `stop` what is configured to be sent. `traces` is where the spans come from.
///
/// Fails where the receiver can never be reached, because there are no certificate authorities.
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
        tracing::info!(signal = signal.name(), receiver = poster.receiver(), "sent by OTLP");
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
            let time = metrics::Times { start, now: SystemTime::now() };
            metrics::requests(&metrics, &resource, time, |batch| outbox.push(batch))
        });
        match sent.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the metrics cannot be read for OTLP"),
            Err(error) => {
                tracing::error!(%error, "metrics are not sent by OTLP any more");
                return;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! Collection of spans for OTLP.
//!
//! Spans that end are put into a queue of fixed length; those that do not fit are counted as dropped. Without a
//! receiver, no layer is installed, so `tracing` creates no spans.

use std::time::Duration;

use numaward_config::outgoing::Otlp;
use numaward_model::SPAN_TARGET;
use opentelemetry::{Context, trace::TracerProvider as _};
use opentelemetry_proto::{
    tonic::collector::trace::v1::ExportTraceServiceRequest,
    transform::{
        common::tonic::ResourceAttributesWithSchema, trace::tonic::group_spans_by_resource_and_scope,
    },
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanProcessor},
};
use prost::Message as _;
use tokio::{sync::mpsc, time::sleep};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};

use super::{
    OtlpMetrics, SCOPE,
    outbox::{Batch, ItemOutcome, Outbox, Signal},
};

/// The maximum number of spans that wait to be encoded.
const MAX_QUEUED_SPANS: usize = 4096;
/// The maximum number of spans in one request.
const MAX_SPANS_PER_REQUEST: usize = 512;
/// The time for which an incomplete batch waits for more spans.
const BATCH_DELAY: Duration = Duration::from_secs(1);

/// The spans to send.
#[derive(Debug)]
pub struct Traces {
    provider: Option<SdkTracerProvider>,
    ended: mpsc::Receiver<SpanData>,
    counted: OtlpMetrics,
}

#[derive(Debug)]
struct SpanQueue {
    ended: mpsc::Sender<SpanData>,
    counted: OtlpMetrics,
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.ended.try_send(span).is_err() {
            self.counted.count(Signal::Traces, ItemOutcome::Dropped, 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Traces {
    /// Creates the queue, if traces are configured.
    pub fn new(config: &Otlp) -> Self {
        let counted = OtlpMetrics::default();
        let (sender, ended) = mpsc::channel(MAX_QUEUED_SPANS);
        let is_on = config.endpoint.is_some() && config.traces;
        let provider = is_on.then(|| {
            SdkTracerProvider::builder()
                .with_sampler(Sampler::AlwaysOn)
                .with_resource(Resource::builder_empty().build())
                .with_span_processor(SpanQueue { ended: sender, counted: counted.clone() })
                .build()
        });
        Self { provider, ended, counted }
    }

    /// Returns the counters of sent and lost items.
    pub fn metrics(&self) -> OtlpMetrics {
        self.counted.clone()
    }

    /// Returns the layer that collects spans from `tracing`; `None` if no traces are sent.
    pub fn layer<S>(&self) -> Option<impl Layer<S> + use<S>>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let tracer = self.provider.as_ref()?.tracer(SCOPE);
        let layer = tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_target(false)
            .with_level(false);
        Some(layer.with_filter(Targets::new().with_target(SPAN_TARGET, LevelFilter::INFO)))
    }

    /// Encodes spans that end, and puts them into the outbox.
    pub(super) async fn send(mut self, resource: Resource, outbox: std::sync::Arc<Outbox>) {
        let resource = ResourceAttributesWithSchema::from(&resource);
        let mut spans = Vec::with_capacity(MAX_SPANS_PER_REQUEST);
        while self.ended.recv_many(&mut spans, MAX_SPANS_PER_REQUEST).await > 0 {
            if spans.len() < MAX_SPANS_PER_REQUEST {
                // Wait for the other spans of the same tree.
                sleep(BATCH_DELAY).await;
                while spans.len() < MAX_SPANS_PER_REQUEST
                    && let Ok(span) = self.ended.try_recv()
                {
                    spans.push(span);
                }
            }
            let items = spans.len() as u64;
            let resource_spans = group_spans_by_resource_and_scope(std::mem::take(&mut spans), &resource);
            let body = ExportTraceServiceRequest { resource_spans }.encode_to_vec().into();
            outbox.push(Batch { body, items });
        }
    }
}

//! Spans on their way out.
//!
//! Spans that end go into a queue of fixed length; what does not fit is counted as dropped. Without a receiver no span
//! is ever made: nobody is interested in them, which `tracing` finds out once.

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
    outbox::{Batch, Fate, Outbox, Signal},
};

/// Spans that may wait to be encoded.
const MAX_WAITING: usize = 4096;
/// Spans in one request.
const PER_REQUEST: usize = 512;
/// How long more spans are waited for.
const LINGER: Duration = Duration::from_secs(1);

/// Spans that are to be sent.
#[derive(Debug)]
pub struct Traces {
    provider: Option<SdkTracerProvider>,
    ended: mpsc::Receiver<SpanData>,
    counted: OtlpMetrics,
}

#[derive(Debug)]
struct Queue {
    ended: mpsc::Sender<SpanData>,
    counted: OtlpMetrics,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.ended.try_send(span).is_err() {
            self.counted.count(Signal::Traces, Fate::Dropped, 1);
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
    /// As configured.
    pub fn new(config: &Otlp) -> Self {
        let counted = OtlpMetrics::default();
        let (sender, ended) = mpsc::channel(MAX_WAITING);
        let is_on = config.endpoint.is_some() && config.traces;
        let provider = is_on.then(|| {
            SdkTracerProvider::builder()
                .with_sampler(Sampler::AlwaysOn)
                .with_resource(Resource::builder_empty().build())
                .with_span_processor(Queue { ended: sender, counted: counted.clone() })
                .build()
        });
        Self { provider, ended, counted }
    }

    /// Where it is counted what is sent, and what is lost.
    pub fn metrics(&self) -> OtlpMetrics {
        self.counted.clone()
    }

    /// Takes spans from `tracing`; none where none are to be sent.
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

    /// Puts spans that end into the outbox.
    pub(super) async fn send(mut self, resource: Resource, outbox: std::sync::Arc<Outbox>) {
        let resource = ResourceAttributesWithSchema::from(&resource);
        let mut spans = Vec::with_capacity(PER_REQUEST);
        while self.ended.recv_many(&mut spans, PER_REQUEST).await > 0 {
            if spans.len() < PER_REQUEST {
                // The rest of the tree follows.
                sleep(LINGER).await;
                while spans.len() < PER_REQUEST
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

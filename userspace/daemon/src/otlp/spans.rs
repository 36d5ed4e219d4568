//! Spans: where the time of a decision goes.
//!
//! An admission is a tree: `admit` over `decide` (over `hints`, `merge`, `allocate`), `ledger` and `knobs`. What is
//! written without being asked for (drift, herding, upkeep) is a tree of its own, `reconcile`, and so is what a `release` gives back. A look that finds
//! nothing to do is no span.
//!
//! Spans that end go into a queue of fixed length; what does not fit is counted as dropped. Without a receiver no span
//! is ever made: nobody is interested in them, which `tracing` finds out once.

use std::{cell::RefCell, fmt, time::Duration};

use numaward_engine::{Decision, Ledger, Request, Stage, Strategy, Terms};
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
use tracing::{Level, Subscriber, field::Empty, level_filters::LevelFilter, span::EnteredSpan};
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};

use super::{
    Figures, SCOPE,
    outbox::{Batch, Fate, Outbox, Signal},
};
use crate::config::outgoing::Otlp;

/// The target of spans; logs leave them out.
pub const TARGET: &str = "numaward_trace";
/// Spans that may wait to be encoded.
const MAX_WAITING: usize = 4096;
/// Spans in one request.
const PER_REQUEST: usize = 512;
/// How long more spans are waited for.
const LINGER: Duration = Duration::from_secs(1);

macro_rules! span {
    ($name:literal $($fields:tt)*) => {
        tracing::span!(target: TARGET, Level::INFO, $name $($fields)*)
    };
}

/// An admission. What is done while it is held is part of it.
pub(crate) fn admit(name: &str, dry_run: bool) -> EnteredSpan {
    span!("admit", numaward.workload = name, numaward.dry_run = dry_run).entered()
}

/// Something is about to be written: part of an admission, or a tree of its own.
pub(crate) fn reconcile() -> EnteredSpan {
    let is_part = tracing::Span::current().metadata().is_some_and(|metadata| metadata.target() == TARGET);
    if is_part { tracing::Span::none().entered() } else { span!("reconcile").entered() }
}

/// An allocation ends.
pub(crate) fn release(name: &str) -> EnteredSpan {
    span!("release", numaward.workload = name).entered()
}

/// The ledger is stored.
pub(crate) fn ledger() -> EnteredSpan {
    span!("ledger").entered()
}

/// Knobs are written.
pub(crate) fn knobs(writes: usize) -> EnteredSpan {
    span!("knobs", numaward.writes = writes, otel.status_code = Empty, otel.status_description = Empty)
        .entered()
}

/// What was done in a span failed.
pub(crate) fn failed(span: &EnteredSpan, error: &dyn fmt::Display) {
    span.record("otel.status_code", "ERROR");
    span.record("otel.status_description", tracing::field::display(error));
}

/// Lets the engine decide, and tells of the stages.
pub(crate) fn decide(strategy: &dyn Strategy, ledger: &Ledger, request: &Request, terms: &Terms) -> Decision {
    let span = span!(
        "decide",
        numaward.owner = request.owner.as_str(),
        numaward.outcome = Empty,
        numaward.reason = Empty
    )
    .entered();
    let current = RefCell::new(None);
    let decision = strategy.admit_watched(ledger, request, terms, &|stage| {
        // The one before ends before the next begins.
        current.take();
        current.replace(Some(match stage {
            Stage::Hints => span!("hints").entered(),
            Stage::Merge => span!("merge").entered(),
            Stage::Allocate => span!("allocate").entered(),
        }));
    });
    current.take();
    match &decision.outcome {
        Ok(_) => span.record("numaward.outcome", "admitted"),
        Err(rejection) => span
            .record("numaward.outcome", "rejected")
            .record("numaward.reason", tracing::field::display(&rejection.reason)),
    };
    decision
}

/// Spans that are to be sent.
#[derive(Debug)]
pub struct Traces {
    provider: Option<SdkTracerProvider>,
    ended: mpsc::Receiver<SpanData>,
    figures: Figures,
}

#[derive(Debug)]
struct Queue {
    ended: mpsc::Sender<SpanData>,
    figures: Figures,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.ended.try_send(span).is_err() {
            self.figures.count(Signal::Traces, Fate::Dropped, 1);
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
        let figures = Figures::default();
        let (sender, ended) = mpsc::channel(MAX_WAITING);
        let is_on = config.endpoint.is_some() && config.traces;
        let provider = is_on.then(|| {
            SdkTracerProvider::builder()
                .with_sampler(Sampler::AlwaysOn)
                .with_resource(Resource::builder_empty().build())
                .with_span_processor(Queue { ended: sender, figures: figures.clone() })
                .build()
        });
        Self { provider, ended, figures }
    }

    /// Where it is counted what is sent, and what is lost.
    pub fn figures(&self) -> Figures {
        self.figures.clone()
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
        Some(layer.with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO)))
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

//! The queue of a signal, and its sender.
//!
//! New data is more valuable than old data: if the queue is full, the oldest batch is dropped. A failure that OTLP
//! calls retryable is retried with increasing waits for [`MAX_RETRY_TIME`]; after any other failure, the batch is
//! dropped at once.

use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use backon::Retryable as _;
use bytes::Bytes;
use hyper::StatusCode;
use numaward_model::backoff;
use opentelemetry_proto::tonic::collector::{
    metrics::v1::ExportMetricsServiceResponse, trace::v1::ExportTraceServiceResponse,
};
use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use prost::Message as _;
use tokio::{sync::Notify, time::sleep};

use crate::http_client::{PostError, Poster};

/// The maximum size of the queue in bytes.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// The time after which a batch that could not be sent is dropped.
const MAX_RETRY_TIME: Duration = Duration::from_mins(5);
const MIN_RETRY_WAIT: Duration = Duration::from_secs(1);
const MAX_RETRY_WAIT: Duration = Duration::from_mins(1);

/// A signal of OpenTelemetry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Signal {
    Metrics,
    Traces,
}

impl Signal {
    pub(super) fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the number of items that the receiver rejected in its answer.
    pub(super) fn rejected(self, answer: &[u8]) -> u64 {
        // An empty or invalid answer rejects no items.
        let rejected = match self {
            Self::Metrics => ExportMetricsServiceResponse::decode(answer)
                .ok()
                .and_then(|answer| Some(answer.partial_success?.rejected_data_points)),
            Self::Traces => ExportTraceServiceResponse::decode(answer)
                .ok()
                .and_then(|answer| Some(answer.partial_success?.rejected_spans)),
        };
        rejected.and_then(|rejected| rejected.try_into().ok()).unwrap_or(0)
    }
}

/// The result of sending an item: a data point or a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum ItemOutcome {
    Delivered,
    Rejected,
    Dropped,
}

/// Counters since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct OtlpMetrics(Family<[(&'static str, &'static str); 2], Counter>);

impl Default for OtlpMetrics {
    /// Creates all counters at zero.
    fn default() -> Self {
        let counted = Self(Family::default());
        for signal in [Signal::Metrics, Signal::Traces] {
            for outcome in [ItemOutcome::Delivered, ItemOutcome::Rejected, ItemOutcome::Dropped] {
                counted.count(signal, outcome, 0);
            }
        }
        counted
    }
}

impl OtlpMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "otlp_items",
            "Data points and spans for OTLP, by result: delivered; rejected by the receiver; or dropped, because the \
             receiver was not reachable in time or too many were queued",
            self.0.clone(),
        );
    }

    pub(super) fn count(&self, signal: Signal, outcome: ItemOutcome, items: u64) {
        self.counter(signal, outcome).inc_by(items);
    }

    pub(super) fn counter(&self, signal: Signal, outcome: ItemOutcome) -> Counter {
        self.0.get_or_create_owned(&[("signal", signal.into()), ("result", outcome.into())])
    }
}

/// An encoded request.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) body: Bytes,
    /// The number of data points or spans.
    pub(super) items: u64,
}

#[derive(Debug, Default)]
struct BatchQueue {
    batches: VecDeque<(Instant, Batch)>,
    bytes: usize,
}

impl BatchQueue {
    fn pop(&mut self) -> Option<(Instant, Batch)> {
        let oldest = self.batches.pop_front()?;
        self.bytes -= oldest.1.body.len();
        Some(oldest)
    }
}

/// A queue of batches, and their sender.
#[derive(Debug)]
pub(super) struct Outbox {
    signal: Signal,
    queue: Mutex<BatchQueue>,
    changed: Notify,
    counted: OtlpMetrics,
    pub(super) min_retry_wait: Duration,
    pub(super) capacity: usize,
}

impl Outbox {
    pub(super) fn new(signal: Signal, counted: OtlpMetrics) -> Self {
        Self {
            signal,
            queue: Mutex::default(),
            changed: Notify::new(),
            counted,
            min_retry_wait: MIN_RETRY_WAIT,
            capacity: MAX_QUEUED_BYTES,
        }
    }

    /// Adds a batch to the queue, without blocking.
    pub(super) fn push(&self, batch: Batch) {
        let mut queue = self.queue.lock();
        queue.bytes += batch.body.len();
        queue.batches.push_back((Instant::now(), batch));
        while queue.bytes > self.capacity {
            let Some((_, oldest)) = queue.pop() else { break };
            self.count(ItemOutcome::Dropped, oldest.items);
        }
        drop(queue);
        self.changed.notify_one();
    }

    /// Counts the result of items.
    pub(super) fn count(&self, outcome: ItemOutcome, items: u64) {
        self.counted.count(self.signal, outcome, items);
    }

    /// Sends queued batches until it is cancelled.
    pub(super) async fn run(self: Arc<Self>, poster: Poster) {
        let (signal, receiver) = (self.signal.name(), poster.receiver());
        let mut is_failing = false;
        loop {
            let next = self.queue.lock().pop();
            let Some((since, Batch { body, items })) = next else {
                self.changed.notified().await;
                continue;
            };
            let mut reported = is_failing;
            let sent = (|| poster.post(body.clone()))
                .retry(backoff(self.min_retry_wait, MAX_RETRY_WAIT))
                .sleep(sleep)
                .when(|failure| failure.status.is_none_or(is_retryable) && since.elapsed() < MAX_RETRY_TIME)
                .adjust(|failure, wait| Some(failure.retry_wait(wait?, MAX_RETRY_WAIT)))
                .notify(|PostError { problem, .. }, _| {
                    if !mem::replace(&mut reported, true) {
                        tracing::warn!(
                            signal,
                            receiver,
                            problem,
                            "the signal cannot be sent by OTLP; the daemon tries again"
                        );
                    }
                });
            match sent.await {
                Ok(answer) => {
                    let rejected = self.signal.rejected(&answer).min(items);
                    self.count(ItemOutcome::Rejected, rejected);
                    self.count(ItemOutcome::Delivered, items - rejected);
                    if mem::take(&mut is_failing) {
                        tracing::info!(signal, receiver, "the receiver accepts the signal again");
                    }
                }
                Err(PostError { status, problem, .. }) => {
                    let is_refused = status.is_some_and(|status| !is_retryable(status));
                    self.count(if is_refused { ItemOutcome::Rejected } else { ItemOutcome::Dropped }, items);
                    if !mem::replace(&mut is_failing, true) {
                        tracing::warn!(
                            signal,
                            receiver,
                            problem,
                            items,
                            "items were dropped because they could not be sent by OTLP; later ones are still sent"
                        );
                    }
                }
            }
        }
    }
}

/// Returns true for OTLP's "Retryable Response Codes".
fn is_retryable(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

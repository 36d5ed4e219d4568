//! What waits to be sent, of one signal.
//!
//! What is new is worth more than what is old: where there is no room, the oldest is given up. What fails in a way that
//! OTLP calls retryable is tried again, waiting longer each time, for [`PATIENCE`]; all else is given up at once.

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

use crate::http_client::{Failure, Poster};

/// Bytes that may wait.
const MAX_WAITING: usize = 16 << 20;
/// For how long a batch is tried to be sent.
const PATIENCE: Duration = Duration::from_mins(5);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_mins(1);

/// What is sent.
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

    /// How many of the items that the receiver took it then rejected.
    pub(super) fn rejected(self, answer: &[u8]) -> u64 {
        // No answer at all, or one that is none, says nothing against what was sent.
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

/// What became of an item: a data point, a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Fate {
    Delivered,
    Rejected,
    Dropped,
}

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct OtlpMetrics(Family<[(&'static str, &'static str); 2], Counter>);

impl Default for OtlpMetrics {
    /// All at zero.
    fn default() -> Self {
        let counted = Self(Family::default());
        for signal in [Signal::Metrics, Signal::Traces] {
            for fate in [Fate::Delivered, Fate::Rejected, Fate::Dropped] {
                counted.count(signal, fate, 0);
            }
        }
        counted
    }
}

impl OtlpMetrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "otlp_items",
            "Data points and spans to be sent by OTLP, by what became of them: delivered; rejected by the receiver; or \
             dropped, because it could not be reached in time or too many waited",
            self.0.clone(),
        );
    }

    pub(super) fn count(&self, signal: Signal, fate: Fate, items: u64) {
        self.of(signal, fate).inc_by(items);
    }

    pub(super) fn of(&self, signal: Signal, fate: Fate) -> Counter {
        self.0.get_or_create_owned(&[("signal", signal.into()), ("result", fate.into())])
    }
}

/// A request, encoded.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) body: Bytes,
    /// Data points or spans in it.
    pub(super) items: u64,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<(Instant, Batch)>,
    bytes: usize,
}

impl Waiting {
    fn pop(&mut self) -> Option<(Instant, Batch)> {
        let oldest = self.batches.pop_front()?;
        self.bytes -= oldest.1.body.len();
        Some(oldest)
    }
}

/// Takes batches and sends them.
#[derive(Debug)]
pub(super) struct Outbox {
    signal: Signal,
    waiting: Mutex<Waiting>,
    news: Notify,
    counted: OtlpMetrics,
    pub(super) first_wait: Duration,
    pub(super) capacity: usize,
}

impl Outbox {
    pub(super) fn new(signal: Signal, counted: OtlpMetrics) -> Self {
        Self {
            signal,
            waiting: Mutex::default(),
            news: Notify::new(),
            counted,
            first_wait: FIRST_WAIT,
            capacity: MAX_WAITING,
        }
    }

    /// Takes a batch. Never waits.
    pub(super) fn push(&self, batch: Batch) {
        let mut waiting = self.waiting.lock();
        waiting.bytes += batch.body.len();
        waiting.batches.push_back((Instant::now(), batch));
        while waiting.bytes > self.capacity {
            let Some((_, oldest)) = waiting.pop() else { break };
            self.count(Fate::Dropped, oldest.items);
        }
        drop(waiting);
        self.news.notify_one();
    }

    /// Counts what became of items.
    pub(super) fn count(&self, fate: Fate, items: u64) {
        self.counted.count(self.signal, fate, items);
    }

    /// Sends what comes, for ever.
    pub(super) async fn run(self: Arc<Self>, poster: Poster) {
        let (signal, receiver) = (self.signal.name(), poster.receiver());
        let mut failing = false;
        loop {
            let next = self.waiting.lock().pop();
            let Some((since, Batch { body, items })) = next else {
                self.news.notified().await;
                continue;
            };
            let mut reported = failing;
            let sent = (|| poster.post(body.clone()))
                .retry(backoff(self.first_wait, LONGEST_WAIT))
                .sleep(sleep)
                .when(|failure| failure.status.is_none_or(is_retryable) && since.elapsed() < PATIENCE)
                .adjust(|failure, wait| Some(failure.wait(wait?, LONGEST_WAIT)))
                .notify(|Failure { problem, .. }, _| {
                    if !mem::replace(&mut reported, true) {
                        tracing::warn!(
                            signal,
                            receiver,
                            problem,
                            "cannot be sent by OTLP; it is tried again"
                        );
                    }
                });
            match sent.await {
                Ok(answer) => {
                    let rejected = self.signal.rejected(&answer).min(items);
                    self.count(Fate::Rejected, rejected);
                    self.count(Fate::Delivered, items - rejected);
                    if mem::take(&mut failing) {
                        tracing::info!(signal, receiver, "taken again by OTLP");
                    }
                }
                Err(Failure { status, problem, .. }) => {
                    let is_refused = status.is_some_and(|status| !is_retryable(status));
                    self.count(if is_refused { Fate::Rejected } else { Fate::Dropped }, items);
                    if !mem::replace(&mut failing, true) {
                        tracing::warn!(
                            signal,
                            receiver,
                            problem,
                            items,
                            "given up by OTLP; what follows is tried"
                        );
                    }
                }
            }
        }
    }
}

/// OTLP, "Retryable Response Codes".
fn is_retryable(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

//! Kubernetes Events on pods, which `kubectl describe pod` shows.
//!
//! The sender of a notice must not wait for the API server, so notices go through a short queue, and are dropped if it is full. The
//! kubelet repeatedly tries to start a refused container, so the same notice is sent again and again; the recorder of the crate `kube`
//! then increases the count of the existing event.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{ApiMetrics, RequestError, limited, metrics::Operation};
use crate::pod::Notice;

/// Maximum number of queued notices.
const MAX_QUEUED: usize = 64;
/// Rate limit: number of requests, and the period.
pub(super) const RATE_LIMIT: (u64, Duration) = (60, Duration::from_mins(1));
/// Maximum length of an event's note in the API server.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Maximum length of an event's `reportingInstance` in the API server.
const MAX_INSTANCE_BYTES: usize = 128;
/// The events' `reportingController`.
const COMPONENT: &str = "numaward";

/// A notice, and the pod's UID in the API server if it is known.
type QueuedNotice = (Notice, Option<String>);

/// Queues notices. Clones share the queue.
#[derive(Clone, Debug)]
pub struct EventWriter {
    queue: mpsc::Sender<QueuedNotice>,
    metrics: ApiMetrics,
}

/// Queued notices, for which events are yet to be created.
#[derive(Debug)]
pub struct EventQueue(mpsc::Receiver<QueuedNotice>);

impl EventWriter {
    /// Creates a writer, and the queue that it fills.
    pub fn new(metrics: ApiMetrics) -> (Self, EventQueue) {
        let (queue, notices) = mpsc::channel(MAX_QUEUED);
        (Self { queue, metrics }, EventQueue(notices))
    }

    /// Queues a notice. `api_uid` is the pod's UID in the API server, if it is known. A notice that does not fit is dropped and counted.
    pub(super) fn write(&self, notice: Notice, api_uid: Option<String>) {
        if self.queue.try_send((notice, api_uid)).is_err() {
            self.metrics.events_dropped.inc();
        }
    }
}

impl EventQueue {
    /// Creates events for the queued notices until the token is cancelled. `node` is the name of this Kubernetes node.
    pub fn run(
        mut self,
        client: Client,
        node: String,
        metrics: ApiMetrics,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        async move {
            let recorder = EventRecorder::new(client, &node, metrics);
            let record = async {
                while let Some((notice, api_uid)) = self.0.recv().await {
                    recorder.publish(&notice, api_uid).await;
                }
            };
            stop.run_until_cancelled(record).await;
        }
        .boxed()
    }
}

/// Creates events, one after the other.
pub(super) struct EventRecorder {
    recorder: Recorder,
    metrics: ApiMetrics,
}

impl EventRecorder {
    /// Creates a recorder. `node` is the name of this Kubernetes node.
    pub(super) fn new(client: Client, node: &str, metrics: ApiMetrics) -> Self {
        let instance = Some(shortened(node, MAX_INSTANCE_BYTES));
        let reporter = Reporter { controller: COMPONENT.to_owned(), instance };
        Self { recorder: Recorder::new(limited(client, RATE_LIMIT), reporter), metrics }
    }

    /// Creates an event, or increases the count of an equal one. A failure is counted and logged.
    pub(super) async fn publish(&self, notice: &Notice, api_uid: Option<String>) {
        let published = self.recorder.publish(&event(notice), &pod(notice, api_uid)).await;
        match published.map_err(RequestError::from) {
            Ok(()) => drop(self.metrics.events.inc()),
            Err(error) => {
                self.metrics.failed(Operation::Event, &error);
                self.metrics.events_dropped.inc();
                tracing::warn!(%error, pod = %notice.pod, reason = notice.reason, "a Kubernetes Event could not be created");
            }
        }
    }
}

fn event(notice: &Notice) -> Event {
    // The recorder compares events by their action and not by their note, so the action contains a hash of the message.
    let mut hasher = DefaultHasher::new();
    notice.message.hash(&mut hasher);
    Event {
        type_: if notice.is_warning { EventType::Warning } else { EventType::Normal },
        reason: notice.reason.clone(),
        note: Some(shortened(&notice.message, MAX_MESSAGE_BYTES)),
        action: format!("Placement-{:016x}", hasher.finish()),
        secondary: None,
    }
}

fn pod(notice: &Notice, api_uid: Option<String>) -> ObjectReference {
    let id = notice.pod.clone();
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(id.namespace),
        name: Some(id.name),
        uid: Some(api_uid.unwrap_or(id.uid)),
        ..ObjectReference::default()
    }
}

/// Returns the text, cut to at most `limit` bytes.
fn shortened(text: &str, limit: usize) -> String {
    const MARK: &str = " …";
    if text.len() <= limit {
        return text.to_owned();
    }
    format!("{}{MARK}", &text[..text.floor_char_boundary(limit - MARK.len())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::PodId;

    fn notice(message: &str) -> Notice {
        Notice {
            pod: PodId { namespace: "n".to_owned(), name: "p".to_owned(), uid: "u".to_owned() },
            reason: "Refused".to_owned(),
            message: message.to_owned(),
            is_warning: true,
        }
    }

    #[test]
    fn cuts_messages_between_characters() {
        assert_eq!(shortened("short", MAX_MESSAGE_BYTES), "short");
        for text in ["x".repeat(2000), "ö".repeat(1000), format!("x{}", "ö".repeat(1000))] {
            let cut = shortened(&text, MAX_MESSAGE_BYTES);
            assert!(cut.len() <= MAX_MESSAGE_BYTES && cut.len() > MAX_MESSAGE_BYTES - 4, "{}", cut.len());
            assert!(cut.ends_with(" …"));
        }
    }

    #[tokio::test]
    async fn full_queue_drops_and_counts() {
        let metrics = ApiMetrics::default();
        let (writer, queue) = EventWriter::new(metrics.clone());
        for number in 0..MAX_QUEUED + 3 {
            writer.write(notice(&number.to_string()), None);
        }
        assert_eq!(metrics.events_dropped.get(), 3);
        drop(queue);
    }
}

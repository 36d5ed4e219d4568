//! Kubernetes Events on pods: what whoever looks at a pod should know.
//!
//! Whoever has something to tell must not wait for the API server, so notices go through a short queue, and are
//! dropped where it is full. The kubelet tries again and again to start a container that was refused; the same notice
//! on the same pod is made an event of only once in a while.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, Instant, SystemTime},
};

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Figures, RequestError, answer, figures::Operation};
use crate::pod::Notice;

/// Notices that wait.
const QUEUE: usize = 64;
/// The same notice is not repeated within this time.
const REPEAT: Duration = Duration::from_mins(10);
/// Notices that are remembered.
const REMEMBERED: usize = 256;
/// The API server takes no longer message.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Who reports.
const COMPONENT: &str = "numaward";

type Queued = (Notice, Option<String>);

/// Makes events. Clones share the queue.
#[derive(Clone, Debug)]
pub struct EventWriter {
    queue: mpsc::Sender<Queued>,
    figures: Figures,
}

/// The notices that wait to be made events.
#[derive(Debug)]
pub struct EventQueue(mpsc::Receiver<Queued>);

impl EventWriter {
    /// A writer, and the queue that it fills.
    pub fn new(figures: Figures) -> (Self, EventQueue) {
        let (queue, waiting) = mpsc::channel(QUEUE);
        (Self { queue, figures }, EventQueue(waiting))
    }

    /// Queues a notice. `api_uid` is the pod's UID in the API server, where it is known.
    pub(super) fn write(&self, notice: Notice, api_uid: Option<String>) {
        if self.queue.try_send((notice, api_uid)).is_err() {
            self.figures.events_dropped.inc();
        }
    }
}

impl EventQueue {
    /// Makes events of what is queued until the token is cancelled. `instance` is the name of this Kubernetes node.
    pub async fn run(mut self, client: Client, instance: String, figures: Figures, stop: CancellationToken) {
        let mut made = Made::default();
        loop {
            let queued = tokio::select! {
                () = stop.cancelled() => return,
                queued = self.0.recv() => queued,
            };
            let Some((notice, api_uid)) = queued else { return };
            if !made.is_new(&notice, Instant::now()) {
                figures.events_dropped.inc();
                continue;
            }
            match create(&client, &notice, api_uid, &instance).await {
                Ok(()) => drop(figures.events.inc()),
                Err(error) => {
                    figures.failed(Operation::Event, &error);
                    figures.events_dropped.inc();
                    made.forget(&notice);
                    tracing::warn!(%error, pod = %notice.pod, reason = notice.reason, "no Kubernetes Event could be made");
                }
            }
        }
    }
}

/// When a notice was made an event last.
#[derive(Debug, Default)]
struct Made(HashMap<u64, Instant>);

impl Made {
    fn key(notice: &Notice) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&notice.pod, &notice.reason, &notice.message).hash(&mut hasher);
        hasher.finish()
    }

    fn is_new(&mut self, notice: &Notice, now: Instant) -> bool {
        self.0.retain(|_, made| now.duration_since(*made) < REPEAT);
        let key = Self::key(notice);
        if self.0.contains_key(&key) {
            return false;
        }
        if self.0.len() >= REMEMBERED
            && let Some(oldest) = self.0.iter().min_by_key(|(_, made)| **made).map(|(&key, _)| key)
        {
            self.0.remove(&oldest);
        }
        self.0.insert(key, now);
        true
    }

    fn forget(&mut self, notice: &Notice) {
        self.0.remove(&Self::key(notice));
    }
}

async fn create(
    client: &Client,
    notice: &Notice,
    api_uid: Option<String>,
    instance: &str,
) -> Result<(), RequestError> {
    let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Event>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &notice.pod.namespace, &resource);
    let now = SystemTime::now();
    let unique = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let time = humantime::format_rfc3339_seconds(now).to_string();
    let uid = api_uid.as_ref().unwrap_or(&notice.pod.uid);
    let mut event = DynamicObject::new(&format!("{}.{unique:x}", notice.pod.name), &resource);
    event.metadata.namespace = Some(notice.pod.namespace.clone());
    event.data = json!({
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "namespace": notice.pod.namespace, "name": notice.pod.name, "uid": uid,
        },
        "type": if notice.is_warning { "Warning" } else { "Normal" },
        "reason": notice.reason,
        "message": shortened(&notice.message),
        "source": {"component": COMPONENT, "host": instance},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    });
    answer(api.create(&PostParams::default(), &event)).await.map(drop)
}

/// As much of the text as the API server takes.
fn shortened(text: &str) -> String {
    const MARK: &str = " …";
    if text.len() <= MAX_MESSAGE_BYTES {
        return text.to_owned();
    }
    let end = (0..=MAX_MESSAGE_BYTES - MARK.len()).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}{MARK}", &text[..end])
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
    fn the_same_notice_is_not_repeated_at_once() {
        let (mut made, start) = (Made::default(), Instant::now());
        assert!(made.is_new(&notice("a"), start));
        assert!(!made.is_new(&notice("a"), start + REPEAT / 2));
        assert!(made.is_new(&notice("b"), start + REPEAT / 2));
        assert!(made.is_new(&notice("a"), start + REPEAT));
        made.forget(&notice("a"));
        assert!(made.is_new(&notice("a"), start + REPEAT));
        for number in 0..2 * REMEMBERED {
            assert!(made.is_new(&notice(&number.to_string()), start + REPEAT));
        }
        assert_eq!(made.0.len(), REMEMBERED);
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(shortened("short"), "short");
        for text in ["x".repeat(2000), "ö".repeat(1000), format!("x{}", "ö".repeat(1000))] {
            let cut = shortened(&text);
            assert!(cut.len() <= MAX_MESSAGE_BYTES && cut.len() > MAX_MESSAGE_BYTES - 4, "{}", cut.len());
            assert!(cut.ends_with(" …"));
        }
    }

    #[tokio::test]
    async fn a_full_queue_drops_and_counts() {
        let figures = Figures::default();
        let (writer, queue) = EventWriter::new(figures.clone());
        for number in 0..QUEUE + 3 {
            writer.write(notice(&number.to_string()), None);
        }
        assert_eq!(figures.events_dropped.get(), 3);
        drop(queue);
    }
}

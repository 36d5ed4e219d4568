//! Samples of what is seen, once a second, shared by all who watch.
//!
//! Problem: a page shows live figures of thousands of workloads, to several people, for hours.
//!
//! Algorithm: while anybody watches, one task takes a [`Frame`] each second and puts it where watchers find the
//! latest. The difference to the frame before is written once for all. A watcher that is too slow
//! skips frames and gets a complete one; nobody is waited for.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use axum::body::Bytes;
use numaward_api as api;
use numaward_observe::Observer;
use tokio::{
    sync::{Mutex, OnceCell, watch},
    time::{MissedTickBehavior, interval},
};

use crate::blocking;

/// Time between samples.
const TURN: Duration = Duration::from_secs(1);

/// A message that says nothing: instead of one that cannot be written, which nothing in an event or a frame causes.
pub(crate) const COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// What was seen at one moment.
#[derive(Debug)]
struct Frame {
    number: u64,
    /// But for workloads.
    sample: api::Sample,
    workloads: BTreeMap<String, api::Workload>,
    /// The message with what changed since the frame before.
    change: Bytes,
    /// The complete message, once somebody needs it.
    full: OnceCell<Bytes>,
}

/// Hands out watchers.
#[derive(Debug)]
pub(crate) struct Samples {
    observer: Arc<Observer>,
    latest: watch::Sender<Option<Arc<Frame>>>,
    /// Whether the task runs. Locked while that is decided.
    running: Mutex<bool>,
}

impl Samples {
    pub(crate) fn new(observer: Arc<Observer>) -> Arc<Self> {
        let (latest, running) = (watch::Sender::new(None), Mutex::new(false));
        Arc::new(Self { observer, latest, running })
    }

    /// Starts to watch. Must be called in a runtime.
    pub(crate) async fn watch(self: &Arc<Self>) -> Watcher {
        let mut running = self.running.lock().await;
        let mut latest = self.latest.subscribe();
        // What is there may be old; if it is not, it is soon followed by another.
        latest.mark_unchanged();
        if !*running {
            *running = true;
            tokio::spawn(self.clone().take());
        }
        Watcher { latest, pending: Weak::new(), sent: None }
    }

    /// Takes frames until nobody watches.
    async fn take(self: Arc<Self>) {
        let mut ticks = interval(TURN);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            {
                let mut running = self.running.lock().await;
                if self.latest.receiver_count() == 0 {
                    *running = false;
                    self.latest.send_replace(None);
                    return;
                }
            }
            let samples = self.clone();
            match blocking::spawn(move || samples.frame()).await {
                Ok(frame) => drop(self.latest.send_replace(Some(Arc::new(frame)))),
                Err(error) => tracing::error!(%error, "a sample failed"),
            }
        }
    }

    fn frame(&self) -> Frame {
        let before = self.latest.borrow().clone();
        let api::Nodes { nodes, accesses, .. } = self.observer.nodes();
        let workloads = self.observer.workloads().workloads;
        let workloads = workloads.into_iter().map(|workload| (workload.key().to_owned(), workload)).collect();
        let sample = api::Sample {
            at_millis: u64::try_from(self.observer.uptime().as_millis()).unwrap_or(u64::MAX),
            full: false,
            promises: self.observer.revision(),
            nodes,
            accesses,
            exclusive_cpus: self.observer.exclusive_cpus(),
            workloads: Vec::new(),
            removed: Vec::new(),
        };
        let number = before.as_ref().map_or(0, |before| before.number + 1);
        let mut frame = Frame { number, sample, workloads, change: Bytes::new(), full: OnceCell::new() };
        if let Some(before) = before {
            frame.change = frame.since(&before);
        }
        frame
    }
}

impl Frame {
    fn since(&self, before: &Self) -> Bytes {
        let changed = self.workloads.iter().filter(|(key, of)| before.workloads.get(*key) != Some(*of));
        let removed = before.workloads.keys().filter(|key| !self.workloads.contains_key(*key));
        self.message(false, changed.map(|(_, workload)| workload), removed.cloned().collect())
    }

    /// The complete message. Written by a thread that may take its time, for the first that asks.
    async fn full(self: &Arc<Self>) -> Bytes {
        let write = || async {
            let frame = self.clone();
            let whole = move || frame.message(true, frame.workloads.values(), Vec::new());
            blocking::spawn(whole).await.unwrap_or(COMMENT)
        };
        self.full.get_or_init(write).await.clone()
    }

    fn message<'a>(
        &self,
        full: bool,
        workloads: impl Iterator<Item = &'a api::Workload>,
        removed: Vec<String>,
    ) -> Bytes {
        let workloads = workloads.cloned().collect();
        let sample = api::Sample { full, workloads, removed, ..self.sample.clone() };
        match serde_json::to_string(&sample) {
            Ok(json) => format!("event: sample\ndata: {json}\n\n").into(),
            Err(_) => COMMENT,
        }
    }
}

/// Gets the samples one after the other.
#[derive(Debug)]
pub(crate) struct Watcher {
    latest: watch::Receiver<Option<Arc<Frame>>>,
    /// The frame that is to be sent next. A watcher that is slow keeps none that others do not see any more.
    pending: Weak<Frame>,
    /// The number of the frame that was sent last.
    sent: Option<u64>,
}

impl Watcher {
    /// The next message. May be cancelled without loss.
    pub(crate) async fn next(&mut self) -> Bytes {
        loop {
            if let Some(frame) = self.pending.upgrade() {
                let is_next = self.sent.is_some_and(|sent| sent + 1 == frame.number);
                let message = if is_next { frame.change.clone() } else { frame.full().await };
                (self.pending, self.sent) = (Weak::new(), Some(frame.number));
                return message;
            }
            if self.latest.changed().await.is_err() {
                // The sender lives as long as the server.
                return std::future::pending().await;
            }
            self.pending = self.latest.borrow_and_update().as_ref().map(Arc::downgrade).unwrap_or_default();
        }
    }

    /// The last message was not sent: the next one is complete.
    pub(crate) fn skipped(&mut self) {
        self.sent = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u64) -> Arc<Frame> {
        let sample = api::Sample {
            at_millis: number,
            full: false,
            promises: 0,
            nodes: Vec::new(),
            accesses: None,
            exclusive_cpus: Vec::new(),
            workloads: Vec::new(),
            removed: Vec::new(),
        };
        let change = format!("change {number}").into();
        Arc::new(Frame { number, sample, workloads: BTreeMap::new(), change, full: OnceCell::new() })
    }

    #[tokio::test]
    async fn slow_watcher_keeps_no_frame_and_gets_a_complete_one() {
        let (latest, receiver) = watch::channel(None);
        let mut watcher = Watcher { latest: receiver, pending: Weak::new(), sent: None };
        latest.send_replace(Some(frame(0)));
        assert!(watcher.next().await.starts_with(b"event: sample"));
        latest.send_replace(Some(frame(1)));
        assert_eq!(watcher.next().await, "change 1");
        watcher.skipped();
        let old = frame(2);
        latest.send_replace(Some(old.clone()));
        watcher.latest.changed().await.unwrap();
        watcher.pending = Arc::downgrade(&old);
        // A message of another kind is sent meanwhile, and its client is slow.
        latest.send_replace(Some(frame(3)));
        assert_eq!(Arc::strong_count(&old), 1);
        drop(old);
        let message = watcher.next().await;
        assert!(message.windows(13).any(|part| part == b"\"atMillis\":3,"), "{message:?}");
        latest.send_replace(Some(frame(4)));
        assert_eq!(watcher.next().await, "change 4");
    }
}

//! Samples of the host and its workloads, once a second, shared by all clients of the stream.
//!
//! # Problem
//! A page shows live figures of thousands of workloads, to several clients, for hours.
//!
//! # Algorithm
//! While there is a watcher, one task takes a [`Frame`] each second and publishes it in a [`watch`] channel. The
//! difference from the previous frame is encoded once for all watchers. A slow watcher skips frames and gets a
//! complete one next; the task waits for no watcher.

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
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// An empty server-sent event: a keep-alive, and the replacement of a message that cannot be encoded as JSON (which does not happen).
pub(crate) const COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// The state of the host at one moment.
#[derive(Debug)]
struct Frame {
    number: u64,
    /// The sample without its workloads.
    sample: api::Sample,
    workloads: BTreeMap<String, api::Workload>,
    /// The message with the differences from the previous frame.
    change: Bytes,
    /// The complete message, encoded when a watcher first needs it.
    full: OnceCell<Bytes>,
}

/// Source of watchers.
#[derive(Debug)]
pub(crate) struct Samples {
    observer: Arc<Observer>,
    latest: watch::Sender<Option<Arc<Frame>>>,
    /// True while the task runs. The lock is held while the task is started or decides to end.
    running: Mutex<bool>,
}

impl Samples {
    pub(crate) fn new(observer: Arc<Observer>) -> Arc<Self> {
        let (latest, running) = (watch::Sender::new(None), Mutex::new(false));
        Arc::new(Self { observer, latest, running })
    }

    /// Returns a new watcher and starts the task if necessary. Must be called in a runtime.
    pub(crate) async fn watch(self: &Arc<Self>) -> Watcher {
        let mut running = self.running.lock().await;
        let mut latest = self.latest.subscribe();
        // The latest frame may be old; a new one follows within a second.
        latest.mark_unchanged();
        if !*running {
            *running = true;
            tokio::spawn(self.clone().run());
        }
        Watcher { latest, pending: Weak::new(), sent: None }
    }

    /// Takes frames until there is no watcher.
    async fn run(self: Arc<Self>) {
        let mut ticks = interval(SAMPLE_INTERVAL);
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
            match blocking::spawn(move || samples.take_frame()).await {
                Ok(frame) => drop(self.latest.send_replace(Some(Arc::new(frame)))),
                Err(error) => tracing::error!(%error, "a sample could not be taken"),
            }
        }
    }

    fn take_frame(&self) -> Frame {
        let before = self.latest.borrow().clone();
        let api::Nodes { nodes, accesses, .. } = self.observer.nodes();
        let workloads = self.observer.workloads().workloads;
        let workloads = workloads.into_iter().map(|workload| (workload.key().to_owned(), workload)).collect();
        let sample = api::Sample {
            at_millis: u64::try_from(self.observer.uptime().as_millis()).unwrap_or(u64::MAX),
            full: false,
            guarantee_revision: self.observer.revision(),
            nodes,
            accesses,
            exclusive_cpus: self.observer.exclusive_cpus(),
            workloads: Vec::new(),
            removed: Vec::new(),
        };
        let number = before.as_ref().map_or(0, |before| before.number + 1);
        let mut frame = Frame { number, sample, workloads, change: Bytes::new(), full: OnceCell::new() };
        if let Some(before) = before {
            frame.change = frame.difference(&before);
        }
        frame
    }
}

impl Frame {
    fn difference(&self, before: &Self) -> Bytes {
        let changed =
            self.workloads.iter().filter(|(key, workload)| before.workloads.get(*key) != Some(*workload));
        let removed = before.workloads.keys().filter(|key| !self.workloads.contains_key(*key));
        self.message(false, changed.map(|(_, workload)| workload), removed.cloned().collect())
    }

    /// Returns the complete message. The first call encodes it on a blocking thread.
    async fn full_message(self: &Arc<Self>) -> Bytes {
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

/// Receiver of samples for one client.
#[derive(Debug)]
pub(crate) struct Watcher {
    latest: watch::Receiver<Option<Arc<Frame>>>,
    /// The frame to send next. The reference is weak, so that a slow watcher does not keep an old frame in memory.
    pending: Weak<Frame>,
    /// The number of the last frame sent.
    sent: Option<u64>,
}

impl Watcher {
    /// Returns the next message. Safe to cancel: no message is lost.
    pub(crate) async fn next(&mut self) -> Bytes {
        loop {
            if let Some(frame) = self.pending.upgrade() {
                let is_next = self.sent.is_some_and(|sent| sent + 1 == frame.number);
                let message = if is_next { frame.change.clone() } else { frame.full_message().await };
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

    /// Notes that the last message was not sent, so that the next one is complete.
    pub(crate) fn skip(&mut self) {
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
            guarantee_revision: 0,
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
    async fn slow_watcher_gets_complete_frame() {
        let (latest, receiver) = watch::channel(None);
        let mut watcher = Watcher { latest: receiver, pending: Weak::new(), sent: None };
        latest.send_replace(Some(frame(0)));
        assert!(watcher.next().await.starts_with(b"event: sample"));
        latest.send_replace(Some(frame(1)));
        assert_eq!(watcher.next().await, "change 1");
        watcher.skip();
        let old = frame(2);
        latest.send_replace(Some(old.clone()));
        watcher.latest.changed().await.unwrap();
        watcher.pending = Arc::downgrade(&old);
        // The client reads a message of another kind slowly, and frame 2 is replaced meanwhile.
        latest.send_replace(Some(frame(3)));
        assert_eq!(Arc::strong_count(&old), 1);
        drop(old);
        let message = watcher.next().await;
        assert!(message.windows(13).any(|part| part == b"\"atMillis\":3,"), "{message:?}");
        latest.send_replace(Some(frame(4)));
        assert_eq!(watcher.next().await, "change 4");
    }
}

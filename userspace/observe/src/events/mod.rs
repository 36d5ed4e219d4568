//! Events of this host that operators should see: a broken guarantee, a killed process, a changed knob.
//!
//! # Problem
//! Events come from all parts of the daemon, rarely or in bursts. Operators want to see the first one at once,
//! scripts must not miss any, and a thousand identical lines help neither.
//!
//! # Terms
//! - *kind*: category of an event. An event is about a *workload* or about the host.
//! - *suppressed*: for each kind and workload, [`EventKind::per_minute`] events are accepted per minute, and any that is
//!   more severe than those. Further events are only counted, and the count is reported with the next accepted event.
//!
//! # Algorithm
//! [`Events::report`] accepts an event, assigns an id, logs it, appends it to a bounded history and sends it to all
//! [subscribers](Events::subscribe). It never waits: a subscriber that is too slow receives the number of missed
//! events.
//!
//! # Invariants
//! - Ids only increase, also across restarts, because they begin at the time of the start.
//! - The history, the queues of subscribers and the record of suppressed events are bounded.

mod metrics;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use numaward_api::{Event, EventFilter, EventKind, EventPage, Severity};
use numaward_model::EventReport;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use self::metrics::{DropReason, EventMetrics};

/// Most events in the history.
pub const MAX_EVENTS: usize = 1024;
/// Most events that wait for a subscriber.
const QUEUE_CAPACITY: usize = 256;
/// Maximum number of tracked rates, by kind and workload; events of further pairs are suppressed.
const MAX_WINDOWS: usize = 4096;
/// Period to which the limit on the number of events applies.
const RATE_WINDOW: Duration = Duration::from_mins(1);

/// Hub that accepts events and distributes them. Clones are handles to the same hub.
#[derive(Clone, Debug)]
pub struct Events(Arc<Hub>);

#[derive(Debug)]
struct Hub {
    log: Mutex<EventLog>,
    subscribers: broadcast::Sender<Arc<Event>>,
    metrics: EventMetrics,
    closed: CancellationToken,
}

#[derive(Debug)]
struct EventLog {
    next_id: u64,
    history: VecDeque<Arc<Event>>,
    windows: HashMap<(EventKind, Option<Arc<str>>), Window>,
}

/// Number of accepted and suppressed events of a kind and workload since `start`.
#[derive(Debug)]
struct Window {
    start: Instant,
    taken: u32,
    /// Highest severity of the accepted events.
    severity: Severity,
    suppressed: u64,
}

impl Default for Events {
    fn default() -> Self {
        // A million ids per second of the clock, so that a restarted daemon continues above the ids of its
        // predecessor.
        let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(Hub {
            log: Mutex::new(EventLog {
                next_id: start.as_secs() * 1_000_000 + 1,
                history: VecDeque::new(),
                windows: HashMap::new(),
            }),
            subscribers: broadcast::Sender::new(QUEUE_CAPACITY),
            metrics: EventMetrics::default(),
            closed: CancellationToken::new(),
        }))
    }
}

impl Events {
    /// Accepts an event, or suppresses it if there were too many similar ones within a minute. Never waits.
    pub fn report(&self, report: EventReport) {
        self.report_at(report, Instant::now(), SystemTime::now());
    }

    fn report_at(&self, report: EventReport, now: Instant, time: SystemTime) {
        let event = {
            let mut log = self.0.log.lock();
            let Some(suppressed) = log.allow(&report, now) else {
                drop(log);
                self.0.metrics.suppressed.get_or_create(&[("kind", report.kind.as_str())]).inc();
                return;
            };
            let event = Arc::new(Event {
                id: log.next_id,
                time: humantime::format_rfc3339_millis(time).to_string(),
                kind: report.kind,
                severity: report.severity,
                workload: report.workload.as_deref().map(str::to_owned),
                node: report.node,
                message: report.message,
                details: report.details,
                suppressed,
            });
            log.next_id += 1;
            if log.history.len() == MAX_EVENTS {
                log.history.pop_front();
            }
            log.history.push_back(event.clone());
            // Sent under the lock, so that subscribers see ids in order. Sending does not wait; it fails if there is
            // no subscriber.
            let _ = self.0.subscribers.send(event.clone());
            event
        };
        self.0.metrics.taken.get_or_create(&[("kind", event.kind.as_str())]).inc();
        write_log(&event);
    }

    /// Returns the events that match `filter`: the ones after [`EventFilter::since`], oldest first, or the latest
    /// ones.
    pub fn page(&self, filter: &EventFilter) -> EventPage {
        let log = self.0.log.lock();
        let matching = log.history.iter().filter(|event| filter.matches(event));
        let mut events: Vec<Event> = match filter.since {
            Some(_) => matching.take(filter.limit).map(|event| Event::clone(event)).collect(),
            None => matching.rev().take(filter.limit).map(|event| Event::clone(event)).collect(),
        };
        if filter.since.is_none() {
            events.reverse();
        }
        EventPage {
            events,
            oldest: log.history.front().map(|event| event.id),
            latest: log.history.back().map(|event| event.id),
        }
    }

    /// Subscribes to all events from now on, preceded without a gap by those of the history after `since`.
    pub fn subscribe(&self, since: Option<u64>) -> Subscription {
        let log = self.0.log.lock();
        let missed =
            since.map(|since| log.history.iter().filter(|event| event.id > since).cloned().collect());
        Subscription {
            missed: missed.unwrap_or_default(),
            events: self.0.subscribers.subscribe(),
            closed: self.0.closed.clone(),
            hub: self.0.clone(),
        }
    }

    /// Ends all subscriptions when the daemon stops.
    pub fn close(&self) {
        self.0.closed.cancel();
    }

    /// Registers the metrics of events.
    pub fn register(&self, registry: &mut Registry) {
        self.0.metrics.register(registry);
    }
}

impl EventLog {
    /// Returns the number of events suppressed before this one, or `None` if this one is suppressed.
    fn allow(&mut self, report: &EventReport, now: Instant) -> Option<u64> {
        let EventReport { kind, severity, .. } = *report;
        let key = (kind, report.workload.clone());
        if !self.windows.contains_key(&key) && self.windows.len() >= MAX_WINDOWS {
            self.windows.retain(|_, window| now.saturating_duration_since(window.start) < RATE_WINDOW);
            if self.windows.len() >= MAX_WINDOWS {
                return None;
            }
        }
        let new = Window { start: now, taken: 0, severity, suppressed: 0 };
        let window = self.windows.entry(key).or_insert(new);
        if now.saturating_duration_since(window.start) >= RATE_WINDOW {
            (window.start, window.taken, window.severity) = (now, 0, severity);
        }
        if window.taken >= kind.per_minute() && severity <= window.severity {
            window.suppressed += 1;
            return None;
        }
        window.taken += 1;
        window.severity = window.severity.max(severity);
        Some(std::mem::take(&mut window.suppressed))
    }
}

fn write_log(event: &Event) {
    let (kind, workload, node) = (event.kind.as_str(), event.workload.as_deref(), event.node);
    let suppressed = Some(event.suppressed).filter(|&suppressed| suppressed > 0);
    let details = Some(&event.details).filter(|details| !details.is_empty());
    let message = &event.message;
    match event.severity {
        Severity::Info => tracing::info!(kind, workload, node, suppressed, ?details, "{message}"),
        Severity::Warning => tracing::warn!(kind, workload, node, suppressed, ?details, "{message}"),
        Severity::Critical => tracing::error!(kind, workload, node, suppressed, ?details, "{message}"),
    }
}

/// Item of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamItem {
    Event(Arc<Event>),
    /// The subscriber was too slow and missed this number of events.
    Missed(u64),
    /// The daemon is stopping.
    Closed,
}

/// A subscription to events.
#[derive(Debug)]
pub struct Subscription {
    missed: VecDeque<Arc<Event>>,
    events: broadcast::Receiver<Arc<Event>>,
    closed: CancellationToken,
    hub: Arc<Hub>,
}

impl Subscription {
    /// Waits for the next item. Cancel-safe.
    pub async fn next(&mut self) -> StreamItem {
        if let Some(event) = self.missed.pop_front() {
            return StreamItem::Event(event);
        }
        tokio::select! {
            () = self.closed.cancelled() => StreamItem::Closed,
            received = self.events.recv() => match received {
                Ok(event) => StreamItem::Event(event),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    self.hub.metrics.dropped(DropReason::Lagged, missed);
                    StreamItem::Missed(missed)
                }
                Err(broadcast::error::RecvError::Closed) => StreamItem::Closed,
            },
        }
    }

    /// Ends the subscription of a client that has read nothing for too long.
    pub fn close_as_hung(self) {
        let waiting = self.events.len() + self.missed.len() + 1;
        self.hub.metrics.dropped(DropReason::Hung, waiting as u64);
    }
}

#[cfg(test)]
mod tests;

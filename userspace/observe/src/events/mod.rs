//! What happened on this host that somebody should know of: a promise broken, a process killed, a knob changed.
//!
//! Problem: events come from all parts of the daemon, seldom or in storms; people want the first of them at once,
//! scripts want to miss none, and nobody wants a thousand lines that say the same.
//!
//! Terms: a *kind* is what sort of event it is; an event is about a *workload* or about the host. Of each
//! kind and workload, [`EventKind::per_minute`] are taken in a minute; what exceeds this is *suppressed*: only
//! counted, and reported with the next event that is taken.
//!
//! Algorithm: [`Events::report`] takes an event, gives it an id, logs it, appends it to a bounded history
//! and hands it to all who [subscribed](Events::subscribe). Nobody is waited for: a subscriber that is too
//! slow learns how many it missed.
//!
//! Invariants: ids only grow, also over restarts (they begin at the time of the start); the history, the
//! subscribers' queues and the book of what was suppressed are bounded.

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

use self::metrics::{Dropped, EventMetrics};

/// Events that are kept.
pub const HISTORY: usize = 1024;
/// Events that a subscriber may be behind.
const QUEUE: usize = 256;
/// Pairs of kind and workload whose rate is known; in a storm of more, the rest is suppressed.
const MAX_WINDOWS: usize = 4096;
/// For which a number of events is allowed.
const WINDOW: Duration = Duration::from_mins(1);

/// Takes events and hands them on. Clones are handles to the same hub.
#[derive(Clone, Debug)]
pub struct Events(Arc<Hub>);

#[derive(Debug)]
struct Hub {
    books: Mutex<Books>,
    subscribers: broadcast::Sender<Arc<Event>>,
    metrics: EventMetrics,
    closed: CancellationToken,
}

#[derive(Debug)]
struct Books {
    next_id: u64,
    history: VecDeque<Arc<Event>>,
    windows: HashMap<(EventKind, Option<Arc<str>>), Window>,
}

/// What was taken of one kind and workload since `start`.
#[derive(Debug)]
struct Window {
    start: Instant,
    taken: u32,
    suppressed: u64,
}

impl Default for Events {
    fn default() -> Self {
        // A million ids for each second of the clock: a daemon that restarts goes on above those it gave before.
        let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(Hub {
            books: Mutex::new(Books {
                next_id: start.as_secs() * 1_000_000 + 1,
                history: VecDeque::new(),
                windows: HashMap::new(),
            }),
            subscribers: broadcast::Sender::new(QUEUE),
            metrics: EventMetrics::default(),
            closed: CancellationToken::new(),
        }))
    }
}

impl Events {
    /// Takes an event, or suppresses it where too many like it came within a minute. Never waits.
    pub fn report(&self, report: EventReport) {
        self.report_at(report, Instant::now(), SystemTime::now());
    }

    fn report_at(&self, report: EventReport, now: Instant, time: SystemTime) {
        let event = {
            let mut books = self.0.books.lock();
            let Some(suppressed) = books.allow(report.kind, report.workload.clone(), now) else {
                drop(books);
                self.0.metrics.suppressed.get_or_create(&[("kind", report.kind.as_str())]).inc();
                return;
            };
            let event = Arc::new(Event {
                id: books.next_id,
                time: humantime::format_rfc3339_millis(time).to_string(),
                kind: report.kind,
                severity: report.severity,
                workload: report.workload.as_deref().map(str::to_owned),
                node: report.node,
                message: report.message,
                details: report.details,
                suppressed,
            });
            books.next_id += 1;
            if books.history.len() == HISTORY {
                books.history.pop_front();
            }
            books.history.push_back(event.clone());
            // Sent under the lock, so that subscribers see ids in order. Sending does not wait; it fails
            // where nobody is subscribed.
            let _ = self.0.subscribers.send(event.clone());
            event
        };
        self.0.metrics.taken.get_or_create(&[("kind", event.kind.as_str())]).inc();
        log(&event);
    }

    /// Events that match `filter`: those that follow [`EventFilter::since`], oldest first, or the last ones.
    pub fn page(&self, filter: &EventFilter) -> EventPage {
        let books = self.0.books.lock();
        let matching = books.history.iter().filter(|event| filter.matches(event));
        let mut events: Vec<Event> = match filter.since {
            Some(_) => matching.take(filter.limit).map(|event| Event::clone(event)).collect(),
            None => matching.rev().take(filter.limit).map(|event| Event::clone(event)).collect(),
        };
        if filter.since.is_none() {
            events.reverse();
        }
        EventPage {
            events,
            oldest: books.history.front().map(|event| event.id),
            latest: books.history.back().map(|event| event.id),
        }
    }

    /// Hands on every event from now on, and those of the history that follow `since`, without a gap between.
    pub fn subscribe(&self, since: Option<u64>) -> Subscription {
        let books = self.0.books.lock();
        let missed =
            since.map(|since| books.history.iter().filter(|event| event.id > since).cloned().collect());
        Subscription {
            missed: missed.unwrap_or_default(),
            events: self.0.subscribers.subscribe(),
            closed: self.0.closed.clone(),
            hub: self.0.clone(),
        }
    }

    /// Ends all subscriptions: the daemon stops.
    pub fn close(&self) {
        self.0.closed.cancel();
    }

    /// Registers what is counted of events.
    pub fn register(&self, registry: &mut Registry) {
        self.0.metrics.register(registry);
    }
}

impl Books {
    /// Whether one more event of this kind is taken; how many were suppressed before it.
    fn allow(&mut self, kind: EventKind, workload: Option<Arc<str>>, now: Instant) -> Option<u64> {
        let key = (kind, workload);
        if !self.windows.contains_key(&key) && self.windows.len() >= MAX_WINDOWS {
            self.windows.retain(|_, window| now.saturating_duration_since(window.start) < WINDOW);
            if self.windows.len() >= MAX_WINDOWS {
                return None;
            }
        }
        let window = self.windows.entry(key).or_insert(Window { start: now, taken: 0, suppressed: 0 });
        if now.saturating_duration_since(window.start) >= WINDOW {
            (window.start, window.taken) = (now, 0);
        }
        if window.taken >= kind.per_minute() {
            window.suppressed += 1;
            return None;
        }
        window.taken += 1;
        Some(std::mem::take(&mut window.suppressed))
    }
}

fn log(event: &Event) {
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

/// What comes next of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// An event.
    Event(Arc<Event>),
    /// The subscriber was too slow, and so many events are lost to it.
    Missed(u64),
    /// The daemon stops.
    Closed,
}

/// Hands on events.
#[derive(Debug)]
pub struct Subscription {
    missed: VecDeque<Arc<Event>>,
    events: broadcast::Receiver<Arc<Event>>,
    closed: CancellationToken,
    hub: Arc<Hub>,
}

impl Subscription {
    /// Waits for what comes next. May be cancelled without loss.
    pub async fn next(&mut self) -> Next {
        if let Some(event) = self.missed.pop_front() {
            return Next::Event(event);
        }
        tokio::select! {
            () = self.closed.cancelled() => Next::Closed,
            received = self.events.recv() => match received {
                Ok(event) => Next::Event(event),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    self.hub.metrics.dropped(Dropped::Lagged, missed);
                    Next::Missed(missed)
                }
                Err(broadcast::error::RecvError::Closed) => Next::Closed,
            },
        }
    }

    /// The subscriber took nothing for too long and is given up.
    pub fn give_up(self) {
        let waiting = self.events.len() + self.missed.len() + 1;
        self.hub.metrics.dropped(Dropped::Hung, waiting as u64);
    }
}

#[cfg(test)]
mod tests;

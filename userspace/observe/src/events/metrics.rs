//! Metrics of events.

use numaward_api::EventKind;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

type CountersByLabel = Family<[(&'static str, &'static str); 1], Counter>;

/// Reason why a reader of the stream missed an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum DropReason {
    /// The reader was too slow, received the number of missed events, and continues.
    Lagged,
    /// The reader read nothing for too long; the stream was closed.
    Hung,
}

/// Counts since the daemon started.
#[derive(Debug)]
pub(super) struct EventMetrics {
    /// Accepted events by kind.
    pub(super) taken: CountersByLabel,
    /// Suppressed events by kind.
    pub(super) suppressed: CountersByLabel,
    dropped: CountersByLabel,
}

impl Default for EventMetrics {
    fn default() -> Self {
        let metrics = Self {
            taken: CountersByLabel::default(),
            suppressed: CountersByLabel::default(),
            dropped: CountersByLabel::default(),
        };
        for kind in EventKind::ALL {
            drop(metrics.taken.get_or_create(&[("kind", kind.as_str())]));
            drop(metrics.suppressed.get_or_create(&[("kind", kind.as_str())]));
        }
        metrics.dropped(DropReason::Lagged, 0);
        metrics.dropped(DropReason::Hung, 0);
        metrics
    }
}

impl EventMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("events", "Events that were reported", self.taken.clone());
        registry.register(
            "events_suppressed",
            "Events that were not reported, because too many like them came within a minute",
            self.suppressed.clone(),
        );
        registry.register(
            "event_stream_dropped",
            "Events that a reader of the stream did not get, because it was too slow",
            self.dropped.clone(),
        );
    }

    pub(super) fn dropped(&self, reason: DropReason, events: u64) {
        self.dropped.get_or_create(&[("reason", reason.into())]).inc_by(events);
    }
}

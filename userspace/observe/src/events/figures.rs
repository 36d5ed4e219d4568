//! What is counted of events.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use super::EventKind;

type By = Family<[(&'static str, &'static str); 1], Counter>;

/// Why a reader of the stream did not get an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// It was too slow, was told how many it missed, and goes on.
    Lagged,
    /// It took nothing at all for too long; the stream was closed.
    Hung,
}

impl Dropped {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Lagged => "lagged",
            Self::Hung => "hung",
        }
    }
}

/// Counts since the daemon started.
#[derive(Debug)]
pub(super) struct Figures {
    taken: By,
    suppressed: By,
    dropped: By,
}

impl Default for Figures {
    fn default() -> Self {
        let figures = Self { taken: By::default(), suppressed: By::default(), dropped: By::default() };
        for kind in EventKind::ALL {
            drop(figures.taken.get_or_create(&[("kind", kind.as_str())]));
            drop(figures.suppressed.get_or_create(&[("kind", kind.as_str())]));
        }
        for reason in [Dropped::Lagged, Dropped::Hung] {
            drop(figures.dropped.get_or_create(&[("reason", reason.as_str())]));
        }
        figures
    }
}

impl Figures {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("events", "Events that were told", self.taken.clone());
        registry.register(
            "events_suppressed",
            "Events that were not told, because too many like them came within a minute",
            self.suppressed.clone(),
        );
        registry.register(
            "event_stream_dropped",
            "Events that a reader of the stream did not get, because it was too slow",
            self.dropped.clone(),
        );
    }

    pub(super) fn taken(&self, kind: EventKind) {
        self.taken.get_or_create(&[("kind", kind.as_str())]).inc();
    }

    pub(super) fn suppressed(&self, kind: EventKind) {
        self.suppressed.get_or_create(&[("kind", kind.as_str())]).inc();
    }

    pub(super) fn dropped(&self, reason: Dropped, events: u64) {
        self.dropped.get_or_create(&[("reason", reason.as_str())]).inc_by(events);
    }
}

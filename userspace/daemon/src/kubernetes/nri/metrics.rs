//! How placing containers goes, counted.

use std::sync::atomic::AtomicU64;

use numaward_control::pod::Unpinned;
use numaward_kube::nri::types::NoAnswerReason;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct NriMetrics {
    pub(super) connected: Gauge<u64, AtomicU64>,
    pub(super) disconnects: Counter,
    unpinned: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) placed: Counter,
    pub(super) refused: Counter,
}

impl Default for NriMetrics {
    /// All at zero.
    fn default() -> Self {
        let figures = Self {
            connected: Gauge::default(),
            disconnects: Counter::default(),
            unpinned: Family::default(),
            placed: Counter::default(),
            refused: Counter::default(),
        };
        for reason in NoAnswerReason::LABELS.into_iter().chain(Unpinned::ALL.map(Unpinned::label)) {
            drop(figures.unpinned.get_or_create(&[("reason", reason)]));
        }
        figures
    }
}

impl NriMetrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "nri_connected",
            "Whether the container runtime asks us where containers shall run",
            self.connected.clone(),
        );
        registry.register(
            "nri_disconnects",
            "How often the container runtime was lost",
            self.disconnects.clone(),
        );
        registry.register(
            "containers_started_unpinned",
            "Containers that were started without what they should have had, by reason",
            self.unpinned.clone(),
        );
        registry.register(
            "nri_containers_placed",
            "Containers that were created as we said",
            self.placed.clone(),
        );
        registry.register(
            "nri_refusals",
            "Pods and containers whose creation we refused",
            self.refused.clone(),
        );
    }

    /// A container was started without what it should have had.
    pub(super) fn unpinned(&self, reason: &'static str) {
        self.unpinned.get_or_create(&[("reason", reason)]).inc();
    }

    /// How many were, for this reason.
    #[cfg(test)]
    pub(super) fn unpinned_for(&self, reason: &'static str) -> u64 {
        self.unpinned.get_or_create(&[("reason", reason)]).get()
    }
}

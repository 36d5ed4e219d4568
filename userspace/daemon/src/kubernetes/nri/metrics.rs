//! How placing containers goes, counted.

use std::sync::atomic::AtomicU64;

use numaward_guarantee::pod::UnpinnedReason;
use numaward_kube::nri::types::NoAnswerReason;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct NriMetrics {
    pub(super) connected: Gauge<u64, AtomicU64>,
    pub(super) disconnects: Counter,
    pub(super) unpinned: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) placed: Counter,
    pub(super) refused: Counter,
    pub(super) memory_policies_missing: Counter,
}

impl NriMetrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        let Self { connected, disconnects, unpinned, placed, refused, memory_policies_missing } =
            self.clone();
        // All at zero from the start.
        for reason in
            NoAnswerReason::LABELS.iter().copied().chain(UnpinnedReason::ALL.iter().map(|of| of.label()))
        {
            drop(unpinned.get_or_create(&[("reason", reason)]));
        }
        let help = "Whether the container runtime asks numaward where containers are to run";
        registry.register("nri_connected", help, connected);
        registry.register(
            "nri_disconnects",
            "Times that the connection to the container runtime was lost",
            disconnects,
        );
        let help = "Containers that were started without what they should have had, by reason";
        registry.register("containers_started_unpinned", help, unpinned);
        registry.register(
            "nri_containers_placed",
            "Containers that were created where numaward placed them",
            placed,
        );
        let help = "Containers that were started without the memory policy that their pod asks for";
        registry.register("nri_memory_policies_missing", help, memory_policies_missing);
        registry.register("nri_refusals", "Pods and containers whose creation numaward refused", refused);
    }

    /// A container was started without what it should have had.
    pub(super) fn unpinned(&self, reason: &'static str) {
        self.unpinned.get_or_create(&[("reason", reason)]).inc();
    }
}

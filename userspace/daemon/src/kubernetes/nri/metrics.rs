//! Metrics of the placement of containers.

use std::sync::atomic::AtomicU64;

use numaward_guarantee::pod::UnpinnedReason;
use numaward_kube::nri::types::NoAnswerReason;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Metrics of the NRI plugin. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct NriMetrics {
    pub(super) connected: Gauge<u64, AtomicU64>,
    pub(super) disconnects: Counter,
    pub(super) unpinned: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) placed: Counter,
    pub(super) refused: Counter,
    pub(super) refused_pods: Gauge<u64, AtomicU64>,
    pub(super) memory_policies_missing: Counter,
}

impl NriMetrics {
    /// Returns true while the container runtime is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.get() == 1
    }

    pub fn register(&self, registry: &mut Registry) {
        let Self { connected, disconnects, unpinned, placed, refused, refused_pods, memory_policies_missing } =
            self.clone();
        // Each label exists from the start, with the value 0.
        for reason in NoAnswerReason::LABELS
            .iter()
            .copied()
            .chain(UnpinnedReason::ALL.iter().map(|reason| reason.label()))
        {
            drop(unpinned.get_or_create(&[("reason", reason)]));
        }
        let help = "1 if the container runtime is connected to numaward over NRI, otherwise 0";
        registry.register("nri_connected", help, connected);
        registry.register(
            "nri_disconnects",
            "Times that the connection to the container runtime was lost",
            disconnects,
        );
        let help = "Containers that started without the CPUs and nodes of a guarantee, by reason";
        registry.register("containers_started_unpinned", help, unpinned);
        registry.register(
            "nri_containers_placed",
            "Containers that were created with a placement by numaward",
            placed,
        );
        let help = "Containers that started without the memory policy that their pod requests";
        registry.register("nri_memory_policies_missing", help, memory_policies_missing);
        registry.register("nri_refusals", "Pods and containers whose creation numaward refused", refused);
        let help = "Pods that are refused on this host and wait: none of their containers was created yet";
        registry.register("nri_refused_pods", help, refused_pods);
    }

    /// Counts a container that started without the CPUs and nodes of a guarantee.
    pub(super) fn unpinned(&self, reason: &'static str) {
        self.unpinned.get_or_create(&[("reason", reason)]).inc();
    }
}

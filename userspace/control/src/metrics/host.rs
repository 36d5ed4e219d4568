//! What is done beside cgroups for exclusive CPUs: affinities of interrupts and the like, power settings; and weights of
//! nodes.

use numaward_enforce::{interrupts::AffinityError, weights::NodeWeights};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::{ControlMetrics, LabeledCounter, StateGauge, set, start};

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct HostMetrics {
    affinities: StateGauge,
    affinity_writes: LabeledCounter<1>,
    power_settings: StateGauge,
    power_writes: LabeledCounter<1>,
    interleave_weight: Family<[(&'static str, String); 1], Gauge>,
}

impl HostMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        start(&self.affinities, "state", &["moved", "stays"]);
        start(&self.affinity_writes, "result", &["ok", "fixed", "error"]);
        start(&self.power_settings, "state", &["set", "given_up", "refused"]);
        start(&self.power_writes, "result", &["ok", "error"]);
        registry.register(
            "interrupt_affinities",
            "Interrupts, queues of network interfaces and workqueues that are kept off exclusive CPUs, and those that stay \
             there",
            self.affinities.clone(),
        );
        registry.register(
            "interrupt_affinity_writes",
            "Affinities of interrupts, network queues and workqueues written, and whether the kernel took it; fixed: it \
             lets nobody move that one",
            self.affinity_writes.clone(),
        );
        registry.register(
            "cpu_power_settings",
            "Power settings of exclusive CPUs that hold what is configured, that somebody else wrote since, and that cannot \
             be made",
            self.power_settings.clone(),
        );
        registry.register(
            "cpu_power_writes",
            "Power settings written, also to give them back, and whether the kernel took it",
            self.power_writes.clone(),
        );
        registry.register(
            "interleave_weight",
            "Weight of a node for the memory policy weighted-interleave that numaward set and holds; only with \
             enforcement.interleaveWeights",
            self.interleave_weight.clone(),
        );
    }
}

impl ControlMetrics {
    /// So much is kept off exclusive CPUs now, and so much stays there.
    pub(crate) fn affinities(&self, moved: usize, stay: usize) {
        set(&self.host.affinities, [("moved", moved), ("stays", stay)]);
    }

    /// An affinity was written.
    pub(crate) fn wrote_affinity(&self, written: &Result<(), AffinityError>) {
        let result = match written {
            Ok(()) => "ok",
            Err(AffinityError::Fixed) => "fixed",
            Err(_) => "error",
        };
        self.host.affinity_writes.get_or_create(&[("result", result.to_owned())]).inc();
    }

    /// So many power settings hold what is configured, are somebody else's, and cannot be made.
    pub(crate) fn power_settings(&self, set_now: usize, given_up: usize, refused: usize) {
        set(&self.host.power_settings, [("set", set_now), ("given_up", given_up), ("refused", refused)]);
    }

    /// A power setting was written.
    pub(crate) fn wrote_power(&self, is_ok: bool) {
        let result = if is_ok { "ok" } else { "error" };
        self.host.power_writes.get_or_create(&[("result", result.to_owned())]).inc();
    }

    /// The nodes have these weights for weighted-interleave, as configured, and no others. Before, they had those.
    pub(crate) fn interleave_weights(&self, weights: &NodeWeights, before: &NodeWeights) {
        for (node, weight) in weights {
            let of = self.host.interleave_weight.get_or_create(&[("numa_node", node.to_string())]);
            of.set(i64::from(*weight));
        }
        // Never all at once: somebody may read them meanwhile.
        for node in before.keys().filter(|node| !weights.contains_key(node)) {
            self.host.interleave_weight.remove(&[("numa_node", node.to_string())]);
        }
    }

    /// A weight of a node, for the pages that list the families.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_interleave_weights(&self) {
        self.interleave_weights(&[(numaward_topology::NodeId(0), 1)].into(), &NodeWeights::new());
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::NodeId;

    use super::*;

    #[test]
    fn a_weight_that_stays_is_the_same_series() {
        let metrics = ControlMetrics::default();
        let of = |weights: &[(u32, u8)]| -> NodeWeights {
            weights.iter().map(|(node, weight)| (NodeId(*node), *weight)).collect()
        };
        metrics.interleave_weights(&of(&[(0, 3), (2, 1)]), &NodeWeights::new());
        let weight = metrics.host.interleave_weight.get_or_create(&[("numa_node", "0".to_owned())]).clone();
        metrics.interleave_weights(&of(&[(0, 5)]), &of(&[(0, 3), (2, 1)]));
        assert_eq!(weight.get(), 5, "it was not made anew");
        assert!(metrics.host.interleave_weight.get(&[("numa_node", "2".to_owned())]).is_none());
    }
}

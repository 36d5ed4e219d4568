//! Metrics of host-wide settings: affinities of interrupts, network queues and workqueues; power settings of CPUs; weights of
//! nodes.

use numaward_enforce::{interrupts::AffinityError, weights::NodeWeights};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::{ControlMetrics, LabeledCounter, StateGauge, create_series, set};

/// Metrics since the start of the daemon. Clones share them.
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
        create_series(&self.affinities, "state", &["moved", "stays"]);
        create_series(&self.affinity_writes, "result", &["ok", "fixed", "error"]);
        create_series(&self.power_settings, "state", &["set", "given_up", "refused"]);
        create_series(&self.power_writes, "result", &["ok", "error"]);
        registry.register(
            "interrupt_affinities",
            "Interrupts, queues of network interfaces and workqueues that were moved off exclusive CPUs, and those that stay there",
            self.affinities.clone(),
        );
        registry.register(
            "interrupt_affinity_writes",
            "Writes of affinities of interrupts, network queues and workqueues, by result; fixed: the kernel does not let the interrupt be moved",
            self.affinity_writes.clone(),
        );
        registry.register(
            "cpu_power_settings",
            "Power settings of exclusive CPUs that are as configured (set), that another program has written since (given_up), and that cannot be written (refused)",
            self.power_settings.clone(),
        );
        registry.register(
            "cpu_power_writes",
            "Writes of power settings, including restores, by result",
            self.power_writes.clone(),
        );
        registry.register(
            "interleave_weight",
            "Weight of a node for the memory policy weighted-interleave, if numaward has set it; only with enforcement.interleaveWeights",
            self.interleave_weight.clone(),
        );
    }
}

impl ControlMetrics {
    /// Sets the numbers of interrupts, queues and workqueues that were moved off exclusive CPUs, and that stay there.
    pub(crate) fn affinities(&self, moved: usize, stay: usize) {
        set(&self.host.affinities, [("moved", moved), ("stays", stay)]);
    }

    /// Counts a write of an affinity.
    pub(crate) fn wrote_affinity(&self, written: &Result<(), AffinityError>) {
        let result = match written {
            Ok(()) => "ok",
            Err(AffinityError::Fixed) => "fixed",
            Err(_) => "error",
        };
        self.host.affinity_writes.get_or_create(&[("result", result.to_owned())]).inc();
    }

    /// Sets the numbers of power settings that are as configured, that another program has written, and that cannot be written.
    pub(crate) fn power_settings(&self, set_now: usize, given_up: usize, refused: usize) {
        set(&self.host.power_settings, [("set", set_now), ("given_up", given_up), ("refused", refused)]);
    }

    /// Counts a write of a power setting.
    pub(crate) fn wrote_power(&self, is_ok: bool) {
        let result = if is_ok { "ok" } else { "error" };
        self.host.power_writes.get_or_create(&[("result", result.to_owned())]).inc();
    }

    /// Exports the weights that numaward has set, and removes the series of nodes that are only in `before`.
    pub(crate) fn interleave_weights(&self, weights: &NodeWeights, before: &NodeWeights) {
        for (node, weight) in weights {
            let of = self.host.interleave_weight.get_or_create(&[("numa_node", node.to_string())]);
            of.set(i64::from(*weight));
        }
        // The family is not cleared, because a scrape may read it at the same time.
        for node in before.keys().filter(|node| !weights.contains_key(node)) {
            self.host.interleave_weight.remove(&[("numa_node", node.to_string())]);
        }
    }

    /// Creates one series, for the reference of all metrics.
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
    fn changed_weight_keeps_its_series() {
        let metrics = ControlMetrics::default();
        let of = |weights: &[(u32, u8)]| -> NodeWeights {
            weights.iter().map(|(node, weight)| (NodeId(*node), *weight)).collect()
        };
        metrics.interleave_weights(&of(&[(0, 3), (2, 1)]), &NodeWeights::new());
        let weight = metrics.host.interleave_weight.get_or_create(&[("numa_node", "0".to_owned())]).clone();
        metrics.interleave_weights(&of(&[(0, 5)]), &of(&[(0, 3), (2, 1)]));
        assert_eq!(weight.get(), 5, "the series was created again");
        assert!(metrics.host.interleave_weight.get(&[("numa_node", "2".to_owned())]).is_none());
    }
}

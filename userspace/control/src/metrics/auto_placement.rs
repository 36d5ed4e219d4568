//! Metrics of automatic placement.

use numaward_topology::{Bytes, NodeId};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::{ControlMetrics, LabeledCounter, StateGauge, create_series};

/// Values of the label `outcome`.
const OUTCOMES: [&str; 6] = ["placed", "kept", "no_gain", "outgrown", "not_measured", "no_cpus"];

/// Reason why a candidate cannot be placed now; the label `reason`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum PlacementRefusal {
    /// No node has enough free CPUs.
    Cpus,
    /// No node with enough CPUs has room for the memory.
    Memory,
    /// Another program set the cpuset of the cgroup.
    Cpuset,
    /// A memory policy names nodes, or the policies cannot be read.
    MemoryPolicy,
    /// The last placement ended, and the back-off has not.
    #[strum(serialize = "left_alone")]
    BackOff,
    /// The knob could not be written.
    Write,
}

/// Metrics since the start of the daemon. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct PlacementMetrics {
    workloads: Family<[(&'static str, String); 1], Gauge>,
    outcomes: LabeledCounter<1>,
    refused: StateGauge,
    moved: Counter,
}

impl PlacementMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        create_series(&self.outcomes, "outcome", &OUTCOMES);
        registry.register(
            "home_workloads",
            "Workloads without a guarantee whose preferred node is this node, during or after the trial; only with home.mode",
            self.workloads.clone(),
        );
        registry.register(
            "home_placements",
            "Automatic placements of workloads without a guarantee, by outcome: placed, kept after the trial, or the reason for the end",
            self.outcomes.clone(),
        );
        registry.register(
            "home_refused_workloads",
            "Candidates for automatic placement that could not be placed at the last survey, by reason; only with home.mode",
            self.refused.clone(),
        );
        registry.register_with_unit(
            "home_moved",
            "User memory that was moved to the preferred node of its workload, or back",
            Unit::Bytes,
            self.moved.clone(),
        );
    }
}

impl ControlMetrics {
    /// Sets the number of workloads with this preferred node.
    pub(crate) fn placed_workloads(&self, node: NodeId, workloads: usize) {
        let of = self.placements.workloads.get_or_create(&[("numa_node", node.to_string())]);
        of.set(i64::try_from(workloads).unwrap_or(i64::MAX));
    }

    /// Creates series of all families, for the reference of all metrics.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_homes(&self) {
        self.placed_workloads(NodeId(0), 0);
        for &reason in <PlacementRefusal as strum::VariantArray>::VARIANTS {
            self.refused_placements(reason, 0);
        }
    }

    /// Counts an outcome of a placement.
    pub(crate) fn placement_outcome(&self, outcome: &str) {
        self.placements.outcomes.get_or_create(&[("outcome", outcome.to_owned())]).inc();
    }

    /// Sets the number of candidates that cannot be placed for this reason.
    pub(crate) fn refused_placements(&self, reason: PlacementRefusal, workloads: usize) {
        let of = self.placements.refused.get_or_create(&[("reason", reason.into())]);
        of.set(i64::try_from(workloads).unwrap_or(i64::MAX));
    }

    /// Counts memory that was moved to or from a preferred node.
    pub(crate) fn placement_moved(&self, bytes: Bytes) {
        self.placements.moved.inc_by(bytes.0);
    }
}

//! Homes of workloads without a guarantee.

use numaward_topology::{Bytes, NodeId};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::{ControlMetrics, LabeledCounter, StateGauge, start};

/// What became of workloads that were given a home.
const OUTCOMES: [&str; 6] = ["placed", "kept", "no_gain", "outgrown", "not_measured", "no_cpus"];

/// Why a workload can have no home now. The word is the label `reason`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum HomeRefusal {
    /// It uses more CPUs than any node has left.
    Cpus,
    /// No node that has the CPUs has room for its memory.
    Memory,
    /// Its cpuset is somebody else's.
    Cpuset,
    /// A memory policy of it names nodes, or its policies cannot be read.
    MemoryPolicy,
    /// It was put back, and is left alone for a while.
    LeftAlone,
    /// The knob could not be written.
    Write,
}

/// Since the daemon started. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct HomeMetrics {
    workloads: Family<[(&'static str, String); 1], Gauge>,
    outcomes: LabeledCounter<1>,
    refused: StateGauge,
    moved: Counter,
}

impl HomeMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        start(&self.outcomes, "outcome", &OUTCOMES);
        registry.register(
            "home_workloads",
            "Workloads without a guarantee that have a home on the node, on trial or for good; only with home.mode",
            self.workloads.clone(),
        );
        registry.register(
            "home_placements",
            "What became of workloads without a guarantee that were given a home: placed, kept, or put back and why",
            self.outcomes.clone(),
        );
        registry.register(
            "home_refused_workloads",
            "Workloads without a guarantee that would get a home at the last look and cannot have one, by reason; only with home.mode",
            self.refused.clone(),
        );
        registry.register_with_unit(
            "home_moved",
            "User memory that was moved to the home of its workload, or back",
            Unit::Bytes,
            self.moved.clone(),
        );
    }
}

impl ControlMetrics {
    /// So many workloads have a home on a node.
    pub(crate) fn homes(&self, node: NodeId, workloads: usize) {
        let of = self.homes.workloads.get_or_create(&[("numa_node", node.to_string())]);
        of.set(i64::try_from(workloads).unwrap_or(i64::MAX));
    }

    /// A figure of each family and reason, for the pages that list them.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_homes(&self) {
        self.homes(NodeId(0), 0);
        for &reason in <HomeRefusal as strum::VariantArray>::VARIANTS {
            self.homes_refused(reason, 0);
        }
    }

    /// A workload was given a home, keeps it, or was put back.
    pub(crate) fn home_outcome(&self, outcome: &str) {
        self.homes.outcomes.get_or_create(&[("outcome", outcome.to_owned())]).inc();
    }

    /// So many can have no home for this reason.
    pub(crate) fn homes_refused(&self, reason: HomeRefusal, workloads: usize) {
        let of = self.homes.refused.get_or_create(&[("reason", reason.into())]);
        of.set(i64::try_from(workloads).unwrap_or(i64::MAX));
    }

    /// Pages were moved for a home.
    pub(crate) fn home_moved(&self, bytes: Bytes) {
        self.homes.moved.inc_by(bytes.0);
    }
}

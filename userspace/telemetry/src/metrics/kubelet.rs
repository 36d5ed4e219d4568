//! The kubelet's gauges of exclusive CPUs, under its names (pkg/kubelet/metrics/metrics.go).

use std::fmt;

use numaward_config::exported::MetricFilter;
use numaward_model::snapshot::GuaranteeFigures;

use super::NODE;
use super::family::{FamilySink, FamilyWriter, NO_LABELS};

/// Adds the kubelet's families to a sink.
pub(super) fn collect(
    guarantees: &GuaranteeFigures,
    sink: &mut impl FamilySink,
    families: Option<&MetricFilter>,
) -> fmt::Result {
    let mut out = FamilyWriter::new(sink, None, families);
    // Without guarantees, these values are zero, like those of the kubelet's policy `none`.
    let shared = guarantees.free_cpus;
    let exclusive: u64 = guarantees.exclusive_cpus.iter().map(|(_, cpus)| cpus).sum();
    let help = "The size of the shared CPU pool for non-guaranteed QoS pods, in millicores";
    out.gauge("kubelet_cpu_manager_shared_pool_size_millicores", help)?.add(NO_LABELS, shared * 1000)?;
    let help = "The total number of CPUs exclusively allocated to containers";
    out.gauge("kubelet_cpu_manager_exclusive_cpu_allocation_count", help)?.add(NO_LABELS, exclusive)?;
    let help = "Number of CPUs allocated per NUMA node";
    let cpus = guarantees.exclusive_cpus.iter().map(|(node, cpus)| ([(NODE, node.to_string())], cpus));
    out.gauge("kubelet_cpu_manager_allocation_per_numa", help)?.add_all(cpus)
}

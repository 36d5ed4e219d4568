//! The kubelet's gauges of exclusive CPUs, under its names (pkg/kubelet/metrics/metrics.go).

use std::{fmt, sync::Arc};

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use super::collector::{Family, Source};

/// Serves them from a [`Source`].
#[derive(Debug)]
pub(super) struct Gauges(pub(super) Arc<dyn Source>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let promises = self.0.promises();
        // Where nothing can be promised, the kubelet's policy `none` has them at zero.
        let shared = promises.shared_pool_cpus.unwrap_or(0);
        let exclusive: u64 = promises.exclusive_cpus.iter().map(|(_, cpus)| cpus).sum();
        let help = "The size of the shared CPU pool for non-guaranteed QoS pods, in millicores";
        Family::gauge(&mut encoder, "kubelet_cpu_manager_shared_pool_size_millicores", help, None)?
            .single(&(shared * 1000))?;
        let help = "The total number of CPUs exclusively allocated to containers";
        Family::gauge(&mut encoder, "kubelet_cpu_manager_exclusive_cpu_allocation_count", help, None)?
            .single(&exclusive)?;
        let help = "Number of CPUs allocated per NUMA node";
        let mut family = Family::gauge(&mut encoder, "kubelet_cpu_manager_allocation_per_numa", help, None)?;
        for (node, cpus) in &promises.exclusive_cpus {
            family.set([("numa_node", node.to_string().as_str())], cpus)?;
        }
        Ok(())
    }
}

//! The kubelet's metrics of its resource managers, for the decisions of numaward.

use educe::Educe;
use numaward_engine::{
    Cause, Decision, Request,
    kubelet::{as_reported_to_kubelet, share_one_cache},
    policy::{TopologyManagerPolicy, TopologyManagerScope},
};
use numaward_topology::Machine;
use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::ManagerRequests;

/// Metrics with the semantics of the kubelet, which decides on each pod once. If a manager rejects a container that the topology
/// policy accepted, both count an error. Errors have no reason, and durations are in milliseconds.
#[derive(Clone, Debug, Educe)]
#[educe(Default)]
pub(super) struct KubeletMetrics {
    pub(super) topology_requests: Counter,
    pub(super) topology_errors: Counter,
    #[educe(Default(expression = Histogram::new(exponential_buckets(0.05, 2.0, 15))))]
    pub(super) topology_duration: Histogram,
    pub(super) cpu_requests: Counter,
    pub(super) cpu_errors: Counter,
    pub(super) memory_requests: Counter,
    pub(super) memory_errors: Counter,
    aligned: AlignmentGauge,
    misaligned: AlignmentGauge,
}

/// Containers or pods by scope and by the boundary within which their resources are. The values are counters. The type is a gauge
/// because the exported name of a counter would end with `_total`, unlike the kubelet's.
type AlignmentGauge = Family<[(&'static str, &'static str); 2], Gauge>;

/// Boundary: all resources are on one node.
pub(super) const NUMA_NODE: &str = "numa_node";
/// Boundary: the CPUs are whole cores.
pub(super) const PHYSICAL_CPU: &str = "physical_cpu";
/// Boundary: the CPUs share one last-level cache.
pub(super) const UNCORE_CACHE: &str = "uncore_cache";

fn add_aligned(gauge: &AlignmentGauge, boundary: &'static str, scope: TopologyManagerScope, count: u64) {
    let scope = match scope {
        TopologyManagerScope::Container => "container",
        TopologyManagerScope::Pod => "pod",
    };
    let labels = [("boundary", boundary), ("scope", scope)];
    gauge.get_or_create(&labels).inc_by(i64::try_from(count).unwrap_or(i64::MAX));
}

/// The rules by which the kubelet would have decided on a pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KubeletRules<'a> {
    pub(crate) policy: TopologyManagerPolicy,
    pub(crate) scope: TopologyManagerScope,
    /// True if only whole cores are allocated (`full-pcpus-only`).
    pub(crate) has_whole_cores: bool,
    pub(crate) machine: &'a Machine,
}

impl KubeletMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let Self { aligned, misaligned, .. } = self;
        for (gauge, boundary, scope) in [
            (aligned, NUMA_NODE, TopologyManagerScope::Pod),
            (aligned, NUMA_NODE, TopologyManagerScope::Container),
            (aligned, PHYSICAL_CPU, TopologyManagerScope::Container),
            (aligned, UNCORE_CACHE, TopologyManagerScope::Container),
            (misaligned, NUMA_NODE, TopologyManagerScope::Pod),
            (misaligned, NUMA_NODE, TopologyManagerScope::Container),
            (misaligned, PHYSICAL_CPU, TopologyManagerScope::Container),
        ] {
            add_aligned(gauge, boundary, scope, 0);
        }
        for (name, counter) in [
            ("kubelet_topology_manager_admission_requests", &self.topology_requests),
            ("kubelet_topology_manager_admission_errors", &self.topology_errors),
            ("kubelet_cpu_manager_pinning_requests", &self.cpu_requests),
            ("kubelet_cpu_manager_pinning_errors", &self.cpu_errors),
            ("kubelet_memory_manager_pinning_requests", &self.memory_requests),
            ("kubelet_memory_manager_pinning_errors", &self.memory_errors),
        ] {
            registry.register(name, "As the kubelet counts it, for numaward's decisions", counter.clone());
        }
        for (name, family) in [
            ("kubelet_container_aligned_compute_resources_count", &self.aligned),
            ("kubelet_container_aligned_compute_resources_failure_count", &self.misaligned),
        ] {
            registry.register(name, "As the kubelet counts it, for numaward's decisions", family.clone());
        }
        registry.register(
            "kubelet_topology_manager_admission_duration_ms",
            "As the kubelet measures it, for numaward's decisions, in milliseconds",
            self.topology_duration.clone(),
        );
    }

    /// Counts the alignment of a decision, as the kubelet does: `numa_node` only with the policy `single-numa-node`, and
    /// `physical_cpu` only with `full-pcpus-only`.
    pub(super) fn count_aligned(
        &self,
        request: &Request,
        decision: &Decision,
        rules: &KubeletRules<'_>,
        cpus: &ManagerRequests,
    ) {
        let (aligned, misaligned, container) =
            (&self.aligned, &self.misaligned, TopologyManagerScope::Container);
        let rejection = decision.outcome.as_ref().err();
        if rules.policy == TopologyManagerPolicy::SingleNumaNode {
            let before = |name| request.all_containers().take_while(|of| Some(&of.name) != name).count();
            let agreed = match (rules.scope, rejection) {
                (TopologyManagerScope::Pod, _) => u64::from(rejection.is_none()),
                (TopologyManagerScope::Container, None) => before(None) as u64,
                (TopologyManagerScope::Container, Some(rejection)) => {
                    rejection.container.as_ref().map_or(0, |name| before(Some(name)) as u64)
                }
            };
            add_aligned(aligned, NUMA_NODE, rules.scope, agreed);
            let is_refused = rejection
                .is_some_and(|it| matches!(it.cause, Cause::Topology | Cause::InsufficientCapacity(_)));
            add_aligned(misaligned, NUMA_NODE, rules.scope, u64::from(is_refused));
        }
        if rules.has_whole_cores {
            let errors = u64::from(cpus.error.is_some());
            add_aligned(aligned, PHYSICAL_CPU, container, cpus.containers.saturating_sub(errors));
            add_aligned(misaligned, PHYSICAL_CPU, container, errors);
        }
        let allocated = decision.outcome.iter().flatten().filter_map(|of| of.allocation.cpus.as_ref());
        let machine = as_reported_to_kubelet(rules.machine);
        let of_one_cache = allocated.filter(|cpus| share_one_cache(&machine, cpus)).count();
        add_aligned(aligned, UNCORE_CACHE, container, of_one_cache as u64);
    }
}

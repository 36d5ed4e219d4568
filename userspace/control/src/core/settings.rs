//! Settings of workloads with a guarantee, and of containers on the shared pool, from their allocations and the configuration.

pub(crate) mod memory;

use numaward_cgroup::knob::{Limit, Partition, Quota};
use numaward_config::kubernetes::CpuQuota;
use numaward_engine::{Allocation, OwnerId, Terms, policy::TopologyManagerPolicy};
use numaward_guarantee::{pod::PlacedContainer, policy, request::Request};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodContainer},
};
use numaward_topology::{Bytes, CpuSet, NodeSet};

use self::memory::MemoryKnobs;
use super::Core;

/// Returns the terms of a container's owner.
pub(crate) fn terms_of<'a>(core: &'a Core, of: &PodContainer) -> Option<&'a Terms> {
    core.store.state.ledger.owner(&OwnerId::from(of.owner.as_str())).map(|account| &account.terms)
}

/// Returns the settings of a container.
pub(crate) fn container_settings(core: &Core, placed: &PlacedContainer) -> Settings {
    let limit = |bytes: Option<Bytes>| bytes.map(Limit::Bytes);
    let memory = memory::memory_knobs(core, placed);
    let mut settings = Settings {
        memory_min: limit(memory.min),
        memory_low: limit(memory.low),
        memory_high: limit(memory.high),
        beside: placed.memory.overhead.filter(|_| memory.min.is_some() || memory.low.is_some()),
        ..sharing_settings(core)
    };
    if let Some(allocation) = core.allocation_for(&placed.of) {
        let is_own = matches!(placed.of.slice, GuaranteeSource::Own | GuaranteeSource::Claim);
        let has_own = allocation.cpus.is_some() && is_own;
        if has_own && core.config.kubernetes.cpu_quota == CpuQuota::Remove {
            (settings.cpu_max, settings.lifts_parent) = (Some(Quota::Max), !placed.keeps_pod_quota);
        }
        settings.cpus = allocation.cpus.clone().or(settings.cpus);
        // A Burstable workload is not bound to its preferred node.
        let is_bound = !terms_of(core, &placed.of).is_some_and(|terms| terms.burstable);
        settings.mems = Some(allocation.memory_nodes()).filter(|nodes| is_bound && !nodes.is_empty());
    }
    settings
}

/// Returns the settings of a container without an allocation.
pub(crate) fn sharing_settings(core: &Core) -> Settings {
    // The kernel takes the empty set as all CPUs.
    let cpus = Some(core.shared_pool()).filter(|pool| !pool.is_empty());
    Settings { cpus, ..Settings::default() }
}

/// Returns true if a container has an allocation or protected memory.
pub(crate) fn is_guaranteed(core: &Core, placed: &PlacedContainer) -> bool {
    core.allocation_for(&placed.of).is_some() || memory::memory_knobs(core, placed) != MemoryKnobs::default()
}

/// Returns the settings for an allocation.
pub(crate) fn request_settings(core: &Core, request: &Request, allocation: &Allocation) -> Settings {
    // CPU isolation confines it like any cgroup without a guarantee.
    if request.has_no_guarantee() {
        return Settings::default();
    }
    let nodes = allocation.memory_nodes();
    let memory = policy::memory_settings(&core.config, &request.limited());
    Settings {
        cpus: allocation.cpus.clone().or_else(|| shared_cpus(core, &request.terms, &nodes)),
        // A Burstable workload is not bound to its preferred node.
        mems: (!nodes.is_empty() && !request.terms.burstable).then_some(nodes),
        memory_min: memory.min.map(Limit::Bytes),
        memory_low: memory.low.map(Limit::Bytes),
        memory_high: memory.high.map(Limit::Bytes),
        memory_max: request.limit.map(Limit::Bytes),
        partition: Some(request.partition).filter(|partition| *partition != Partition::Member),
        hugetlb: request.hugepages().map(|(size, bytes)| (size, Limit::Bytes(bytes))).collect(),
        ..Settings::default()
    }
}

/// Returns the CPUs of a workload without exclusive CPUs: the shared pool, or its part on the nodes of the workload if the topology
/// policy aligns CPUs with memory. `None` if no CPUs are managed.
pub(crate) fn shared_cpus(core: &Core, terms: &Terms, nodes: &NodeSet) -> Option<CpuSet> {
    let pool = core.shared_pool();
    let policy = terms.policy.unwrap_or(core.config.topology_policy());
    let is_tied = !terms.burstable
        && matches!(policy, TopologyManagerPolicy::Restricted | TopologyManagerPolicy::SingleNumaNode);
    let of_nodes = nodes.iter().filter_map(|node| core.policy.machine.nodes.get(&node));
    let near: CpuSet = of_nodes.flat_map(|node| node.cpus.iter()).filter(|_| is_tied).collect();
    let near = &near & &pool;
    Some(if near.is_empty() { pool } else { near }).filter(|cpus| !cpus.is_empty())
}

//! What is free on each NUMA node, as the scheduler is told.
//!
//! *Allocatable* is what pods can have at all, so what workloads outside Kubernetes hold is not; *available* is what is
//! left of it. Shared CPUs are no amount that a node runs out of: like the kubelet's, the CPUs here are whole ones, and
//! only exclusive ones are taken from them.

use std::collections::BTreeSet;

use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
use numaward_kube::node_topology::{NodeTopology, Resource, Zone};
use numaward_topology::{Machine, Node, NodeId, ZoneKind};

use super::Assigned;

/// What is free on each node.
pub fn topology(
    machine: &Machine,
    assigned: &Assigned,
    (policy, scope): (TopologyManagerPolicy, TopologyManagerScope),
    fingerprint: Option<String>,
) -> NodeTopology {
    // A resource that only some nodes have is none of the others, not one without a node.
    let kinds: BTreeSet<ZoneKind> = machine
        .nodes
        .values()
        .flat_map(|node| node.hugepages.keys().map(|&size| ZoneKind::Hugepages(size)))
        .chain([ZoneKind::Memory])
        .collect();
    let zone = |(&node, data): (&NodeId, &Node)| {
        let cpus = Resource {
            kind: None,
            capacity: data.cpus.len() as u64,
            allocatable: (&assigned.pod_cpus & &data.cpus).len() as u64,
            available: (&assigned.free_cpus & &data.cpus).len() as u64,
        };
        let accounts = assigned.memory.get(&node);
        let memory = kinds.iter().map(|&kind| {
            let capacity = match kind {
                ZoneKind::Memory => data.memory.0,
                ZoneKind::Hugepages(size) => {
                    data.hugepages.get(&size).map_or(0, |pool| pool.total.saturating_mul(size.0.0))
                }
            };
            let account = accounts.and_then(|kinds| kinds.get(&kind)).copied().unwrap_or_default();
            let (allocatable, available) = (account.allocatable.0, account.free.0);
            Resource { kind: Some(kind), capacity, allocatable, available }
        });
        Zone {
            node,
            distances: data.distances.iter().map(|(&other, &distance)| (other, distance)).collect(),
            resources: std::iter::once(cpus).chain(memory).collect(),
        }
    };
    NodeTopology { policy, scope, zones: machine.nodes.iter().map(zone).collect(), fingerprint }
}

//! What is free on each NUMA node, as the scheduler is told.
//!
//! *Allocatable* is what pods can have at all, so what workloads outside Kubernetes hold is not; *available* is what is
//! left of it. Shared CPUs are no amount that a node runs out of: like the kubelet's, the CPUs here are whole ones, and
//! only exclusive ones are taken from them.

use std::collections::{BTreeMap, BTreeSet};

use numaward_api::{self as api, Target};
use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
use numaward_kube::node_topology::{NodeTopology, Resource, Zone};
use numaward_topology::{CpuSet, Machine, NodeId, NodeSet, ZoneKind};

use super::list;

/// What workloads outside Kubernetes hold.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    pub(super) cpus: CpuSet,
    pub(super) memory: BTreeMap<(u32, String), u64>,
}

impl Foreign {
    /// Of a block on several nodes it is not told how much is where: the lowest node is filled first, as the kubelet
    /// does.
    pub(super) fn of(allocations: &api::Allocations) -> Self {
        let mut foreign = Self::default();
        for allocation in &allocations.allocations {
            if matches!(allocation.target, Target::Container(_)) {
                continue;
            }
            foreign.cpus = foreign.cpus.iter().chain(list::<CpuSet>(&allocation.cpus).iter()).collect();
            for block in &allocation.memory {
                let mut bytes = block.bytes;
                for node in list::<NodeSet>(&block.nodes).iter() {
                    let promised = allocations
                        .nodes
                        .iter()
                        .filter(|of| of.node == node.0)
                        .flat_map(|of| &of.memory)
                        .find(|of| of.kind == block.kind)
                        .map_or(0, |of| of.promised_bytes);
                    let held = foreign.memory.entry((node.0, block.kind.clone())).or_default();
                    let share = bytes.min(promised.saturating_sub(*held));
                    *held += share;
                    bytes -= share;
                }
            }
        }
        foreign
    }

    pub(super) fn memory(&self, node: u32, kind: &str) -> u64 {
        self.memory.get(&(node, kind.to_owned())).copied().unwrap_or(0)
    }
}

/// The exclusive CPUs of all allocations.
pub(super) fn exclusive(allocations: &api::Allocations) -> CpuSet {
    allocations
        .allocations
        .iter()
        .flat_map(|of| list::<CpuSet>(&of.cpus).iter().collect::<Vec<_>>())
        .collect()
}

/// What is free on each node.
pub fn topology(
    machine: &Machine,
    allocations: &api::Allocations,
    (policy, scope): (TopologyManagerPolicy, TopologyManagerScope),
    fingerprint: Option<String>,
) -> NodeTopology {
    let foreign = Foreign::of(allocations);
    let exclusive = exclusive(allocations);
    // A resource that only some nodes have is none of the others, not one without a node.
    let kinds: BTreeSet<ZoneKind> = machine
        .nodes
        .values()
        .flat_map(|node| node.hugepages.keys().map(|&size| ZoneKind::Hugepages(size)))
        .chain([ZoneKind::Memory])
        .collect();
    let zone = |(&node, data): (&NodeId, &numaward_topology::Node)| {
        let promises = allocations.nodes.iter().find(|of| of.node == node.0);
        let count = |cpus: &mut dyn Iterator<Item = numaward_topology::CpuId>| cpus.count() as u64;
        let free: CpuSet = promises.map(|of| list(&of.free_cpus)).unwrap_or_default();
        let held = count(&mut data.cpus.iter().filter(|&cpu| exclusive.contains(cpu)));
        let outside = count(&mut data.cpus.iter().filter(|&cpu| foreign.cpus.contains(cpu)));
        let available = free.len() as u64;
        let cpus = Resource {
            kind: None,
            capacity: data.cpus.len() as u64,
            allocatable: available + held - outside.min(held),
            available,
        };
        let memory = kinds.iter().map(|&kind| {
            let name = kind.to_string();
            let of = promises.and_then(|of| of.memory.iter().find(|of| of.kind == name));
            let capacity = match kind {
                ZoneKind::Memory => data.memory.0,
                ZoneKind::Hugepages(size) => {
                    data.hugepages.get(&size).map_or(0, |pool| pool.total.saturating_mul(size.0.0))
                }
            };
            Resource {
                kind: Some(kind),
                capacity,
                allocatable: of
                    .map_or(0, |of| of.allocatable_bytes.saturating_sub(foreign.memory(node.0, &name))),
                available: of.map_or(0, |of| of.free_bytes),
            }
        });
        Zone {
            node,
            distances: data.distances.iter().map(|(&other, &distance)| (other, distance)).collect(),
            resources: std::iter::once(cpus).chain(memory).collect(),
        }
    };
    NodeTopology { policy, scope, zones: machine.nodes.iter().map(zone).collect(), fingerprint }
}

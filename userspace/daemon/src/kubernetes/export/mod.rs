//! Export of the assigned resources: to agents on this host by the PodResources API, and to the scheduler of the cluster by a
//! NodeResourceTopology.
//!
//! Both are computed from [`AssignedResources`], which the engine or, in the mode `observe`, the kubelet decided.

pub mod assigned;
pub mod devices;
pub mod load;
pub mod placement;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_api::PodContainer;
use numaward_engine::{
    HostConditions, Ledger, MemoryBlock,
    claims::{
        allocator::Amounts,
        devices::{self as claimable, NodeAmounts, NodeDevices},
    },
    ledger::KindAccount,
    policy::{TopologyManagerPolicy, TopologyManagerScope},
};
use numaward_kube::node_topology::{NodeTopology, Resource, Zone};
use numaward_model::{Guarantees, port::ObservedHost as _};
use numaward_observe::Observer;
use numaward_topology::{CpuSet, Machine, NodeId, NumaNode, ZoneKind};

/// Returns the resources that are assigned now.
pub type Source = Arc<dyn Fn() -> AssignedResources + Send + Sync>;

/// Returns a source of the guarantees that the reconciler published to the observer.
pub fn engine_source(observer: Arc<Observer>) -> Source {
    Arc::new(move || {
        let assigned = AssignedResources::from_guarantees(&observer.guarantees(), &observer.machine());
        assigned.without_withheld(&observer.headroom().conditions)
    })
}

/// Resources of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldResources {
    /// `None` for a workload outside Kubernetes.
    pub container: Option<PodContainer>,
    /// Exclusive CPUs.
    pub cpus: CpuSet,
    /// The sibling threads of the exclusive CPUs, if no workload may use them.
    pub hidden_cpus: CpuSet,
    /// Guaranteed memory.
    pub blocks: Vec<MemoryBlock>,
}

/// Assigned resources of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedResources {
    /// One element for each workload.
    pub held: Vec<HeldResources>,
    /// CPUs that can still become exclusive.
    pub free_cpus: CpuSet,
    /// CPUs that are exclusive to pods, or can become so.
    pub pod_cpus: CpuSet,
    /// Memory by node and kind. The memory of workloads outside Kubernetes is neither guaranteed nor allocatable here: pods cannot get it.
    pub memory: BTreeMap<NodeId, BTreeMap<ZoneKind, KindAccount>>,
    /// Amounts that prepared resource claims consume.
    pub charged: BTreeMap<NodeId, Amounts>,
    /// Amounts that resource claims of the whole host consume.
    pub charged_to_host: Amounts,
}

impl AssignedResources {
    /// Returns the resources that the engine assigned.
    pub fn from_guarantees(guarantees: &Guarantees, machine: &Machine) -> Self {
        let held = guarantees.workloads().iter().map(|workload| HeldResources {
            container: workload.container.clone(),
            cpus: workload.cpus.clone(),
            hidden_cpus: workload.hidden_cpus.clone(),
            blocks: workload.blocks.clone(),
        });
        Self::new(held.collect(), &guarantees.free_cpus, &guarantees.ledger, machine)
    }

    /// Returns the resources in a ledger. `held` has the same guarantees with their containers; `free_cpus` can still become exclusive.
    pub fn new(held: Vec<HeldResources>, free_cpus: &CpuSet, ledger: &Ledger, machine: &Machine) -> Self {
        let free_cpus = free_cpus & &machine.cpu_ids();
        let mut pod_cpus = free_cpus.clone();
        let mut memory = ledger.memory();
        memory.retain(|node, _| machine.nodes.contains_key(node));
        for workload in &held {
            if workload.container.is_some() {
                pod_cpus = &(&pod_cpus | &workload.cpus) | &workload.hidden_cpus;
                continue;
            }
            for block in &workload.blocks {
                let mut bytes = block.bytes.0;
                // A block on several nodes is charged to the lowest node first, as by the kubelet.
                for node in block.affinity.iter() {
                    let account = memory.get_mut(&node).and_then(|kinds| kinds.get_mut(&block.kind));
                    let Some(account) = account else { continue };
                    let share = bytes.min(account.guaranteed.0);
                    bytes -= share;
                    account.guaranteed.0 -= share;
                    account.allocatable.0 = account.allocatable.0.saturating_sub(share);
                }
            }
        }
        let charged_to_host = claimable::charged_to_host(ledger);
        Self {
            held,
            free_cpus,
            pod_cpus,
            memory,
            charged: claimable::charged(ledger, machine),
            charged_to_host,
        }
    }

    /// Subtracts the memory that admissions withhold from the free memory: the scheduler would send pods that are refused otherwise.
    #[must_use]
    pub fn without_withheld(mut self, conditions: &HostConditions) -> Self {
        for (node, kinds) in &mut self.memory {
            for (kind, account) in kinds {
                let withheld = conditions.withheld_on(*kind, *node);
                account.free.0 = account.free.0.saturating_sub(withheld.0);
            }
        }
        self
    }

    /// Returns the free amounts of each node for resource claims.
    pub fn free_amounts(&self, machine: &Machine, devices: &NodeDevices) -> BTreeMap<NodeId, NodeAmounts> {
        let of_node = |(&node, data): (&NodeId, &NumaNode)| {
            let memory = self.memory.get(&node).into_iter().flatten();
            let amounts = NodeAmounts {
                cpus: devices.usable_cpus(node, &(&self.free_cpus & &data.cpus)),
                memory: memory.map(|(&kind, account)| (kind, account.free.0)).collect(),
            };
            (node, amounts)
        };
        machine.nodes.iter().map(of_node).collect()
    }

    /// Returns the resources of each node for the scheduler: *allocatable* ones can be assigned to pods, *available* ones are free. Like
    /// in the kubelet's report, CPUs are whole ones, and only exclusive CPUs are subtracted from the available ones. The included pods are
    /// left out.
    pub fn topology(
        &self,
        machine: &Machine,
        (policy, scope): (TopologyManagerPolicy, TopologyManagerScope),
    ) -> NodeTopology {
        // A resource that only some nodes have is listed for all nodes, with 0 on nodes without it.
        let kinds: BTreeSet<ZoneKind> = machine
            .nodes
            .values()
            .flat_map(|node| node.hugepages.keys().map(|&size| ZoneKind::Hugepages(size)))
            .chain([ZoneKind::Memory])
            .collect();
        let zone = |(&node, data): (&NodeId, &NumaNode)| {
            let cpus = Resource {
                name: "cpu".to_owned(),
                capacity: data.cpus.len() as u64,
                allocatable: (&self.pod_cpus & &data.cpus).len() as u64,
                available: (&self.free_cpus & &data.cpus).len() as u64,
            };
            let accounts = self.memory.get(&node);
            let memory = kinds.iter().map(|&kind| {
                let capacity = match kind {
                    ZoneKind::Memory => data.memory.0,
                    ZoneKind::Hugepages(size) => {
                        data.hugepages.get(&size).map_or(0, |pool| pool.total.saturating_mul(size.0.0))
                    }
                };
                let account = accounts.and_then(|kinds| kinds.get(&kind)).copied().unwrap_or_default();
                let (allocatable, available) = (account.allocatable.0, account.free.0);
                Resource { name: kind.to_string(), capacity, allocatable, available }
            });
            Zone {
                node,
                distances: data.distances.iter().map(|(&other, &distance)| (other, distance)).collect(),
                resources: std::iter::once(cpus).chain(memory).collect(),
                attributes: Vec::new(),
            }
        };
        let zones = machine.nodes.iter().map(zone).collect();
        NodeTopology { policy, scope, zones, fingerprint: None, placement: None }
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::Bytes;

    use super::*;

    #[test]
    fn withheld_memory_is_not_free() {
        let account = KindAccount { allocatable: Bytes(100), free: Bytes(60), ..KindAccount::default() };
        let memory: BTreeMap<_, _> =
            [0, 1, 2].map(|node| (NodeId(node), [(ZoneKind::Memory, account)].into())).into();
        let assigned = AssignedResources {
            held: Vec::new(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: memory.clone(),
            charged: BTreeMap::new(),
            charged_to_host: Amounts::new(),
        };
        assert_eq!(assigned.clone().without_withheld(&HostConditions::default()).memory, memory);
        let nodes = [(NodeId(0), Bytes(50)), (NodeId(1), Bytes(70))].into();
        let conditions =
            HostConditions { withheld: [(ZoneKind::Memory, nodes)].into(), ..HostConditions::default() };
        let memory = assigned.without_withheld(&conditions).memory;
        let accounts = memory.values().map(|kinds| kinds[&ZoneKind::Memory]);
        let accounts: Vec<(u64, u64)> =
            accounts.map(|account| (account.allocatable.0, account.free.0)).collect();
        assert_eq!(accounts, [(100, 10), (100, 0), (100, 60)]);
    }
}

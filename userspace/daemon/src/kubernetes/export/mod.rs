//! What is assigned, for others in their own words.
//!
//! Others are agents on this host, by the PodResources API, and the cluster's scheduler, by a NodeResourceTopology.
//! Both are made of one source, [`Assigned`]: what the engine decided, or the kubelet.

pub mod assigned;
pub mod devices;
pub mod load;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_api::PodContainer;
use numaward_engine::{
    HostConditions, Ledger, MemoryBlock,
    ledger::KindAccount,
    policy::{TopologyManagerPolicy, TopologyManagerScope},
};
use numaward_kube::node_topology::{NodeTopology, Resource, Zone};
use numaward_model::{Guarantees, port::HeadroomSource as _};
use numaward_observe::Observer;
use numaward_topology::{CpuSet, Machine, NodeId, NumaNode, ZoneKind};

/// Gives what is assigned now.
pub type Source = Arc<dyn Fn() -> Assigned + Send + Sync>;

/// Gives what the engine promised, as it was published to the observer.
pub fn promised(observer: Arc<Observer>) -> Source {
    Arc::new(move || {
        let assigned = Assigned::promised(&observer.guarantees(), &observer.machine());
        assigned.without_withheld(&observer.headroom().conditions)
    })
}

/// What a workload holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The container, if it is one of a pod.
    pub container: Option<PodContainer>,
    /// Its exclusive CPUs.
    pub cpus: CpuSet,
    /// The other threads of their cores, where nobody may use them.
    pub hidden_cpus: CpuSet,
    /// Memory promised to it.
    pub blocks: Vec<MemoryBlock>,
}

/// What is assigned on a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// To whom.
    pub held: Vec<Held>,
    /// CPUs that can still become exclusive.
    pub free_cpus: CpuSet,
    /// CPUs that are exclusive to pods, or can become so.
    pub pod_cpus: CpuSet,
    /// Memory by node and kind. What workloads outside Kubernetes hold is neither promised nor allocatable here: pods
    /// cannot have it.
    pub memory: BTreeMap<NodeId, BTreeMap<ZoneKind, KindAccount>>,
}

impl Assigned {
    /// What the engine promised.
    pub fn promised(promises: &Guarantees, machine: &Machine) -> Self {
        let held = promises.workloads().iter().map(|of| Held {
            container: of.container.clone(),
            cpus: of.cpus.clone(),
            hidden_cpus: of.hidden_cpus.clone(),
            blocks: of.blocks.clone(),
        });
        Self::new(held.collect(), &promises.free_cpus, &promises.ledger, machine)
    }

    /// What is held, of a ledger of which these CPUs can still become exclusive.
    pub fn new(held: Vec<Held>, free_cpus: &CpuSet, ledger: &Ledger, machine: &Machine) -> Self {
        let free_cpus = free_cpus & &machine.cpu_ids();
        let mut pod_cpus = free_cpus.clone();
        let mut memory = ledger.memory();
        memory.retain(|node, _| machine.nodes.contains_key(node));
        for of in &held {
            if of.container.is_some() {
                pod_cpus = &(&pod_cpus | &of.cpus) | &of.hidden_cpus;
                continue;
            }
            for block in &of.blocks {
                let mut bytes = block.bytes.0;
                // Of a block on several nodes the lowest is taken to give first, as the kubelet does.
                for node in block.affinity.iter() {
                    let of_node = memory.get_mut(&node).and_then(|kinds| kinds.get_mut(&block.kind));
                    let Some(account) = of_node else { continue };
                    let share = bytes.min(account.guaranteed.0);
                    bytes -= share;
                    account.guaranteed.0 -= share;
                    account.allocatable.0 = account.allocatable.0.saturating_sub(share);
                }
            }
        }
        Self { held, free_cpus, pod_cpus, memory }
    }

    /// The same, with what admissions withhold not offered as free: the scheduler would send pods that are refused.
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

    /// What is free on each node, as the scheduler reads it: *allocatable* is what pods can have at all, *available* what
    /// is left of it. Shared CPUs are no amount that a node runs out of: like the kubelet's, the CPUs here are whole
    /// ones, and only exclusive ones are taken from them.
    pub fn topology(
        &self,
        machine: &Machine,
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
        NodeTopology { policy, scope, zones: machine.nodes.iter().map(zone).collect(), fingerprint }
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::Bytes;

    use super::*;

    #[test]
    fn what_is_withheld_is_not_free() {
        let account = KindAccount { allocatable: Bytes(100), free: Bytes(60), ..KindAccount::default() };
        let memory: BTreeMap<_, _> =
            [0, 1, 2].map(|node| (NodeId(node), [(ZoneKind::Memory, account)].into())).into();
        let assigned = Assigned {
            held: Vec::new(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: memory.clone(),
        };
        assert_eq!(assigned.clone().without_withheld(&HostConditions::default()).memory, memory);
        let nodes = [(NodeId(0), Bytes(50)), (NodeId(1), Bytes(70))].into();
        let conditions =
            HostConditions { withheld: [(ZoneKind::Memory, nodes)].into(), ..HostConditions::default() };
        let memory = assigned.without_withheld(&conditions).memory;
        let of = memory.values().map(|kinds| kinds[&ZoneKind::Memory]);
        let of: Vec<(u64, u64)> = of.map(|account| (account.allocatable.0, account.free.0)).collect();
        assert_eq!(of, [(100, 10), (100, 0), (100, 60)]);
    }
}

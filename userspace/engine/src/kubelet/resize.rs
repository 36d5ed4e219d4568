//! Resizing the guarantee of a running container.
//!
//! # Problem
//! Kubernetes changes the requests of a running container (in-place resize). A new admission is no option: it could
//! move the container, or refuse it.
//!
//! # Algorithm
//! The container keeps its place. CPUs are released or added on the nodes of its memory, or of its CPUs if it has no
//! memory. Memory is released or added on the nodes of its blocks, lowest node first. If this is impossible, the
//! ledger does not change. The kubelet itself refuses resizes with static policies, so there is no reference to
//! compare with.

use std::sync::Arc;

use numaward_topology::{Bytes, CpuSet};

use super::KubeletStrategy;
use crate::{
    decision::{ResizeError, Shortfall},
    hint::Resource,
    ledger::{Ledger, MemoryBlock},
    request::{ContainerName, OwnerId, Resources},
};

impl KubeletStrategy {
    /// Implements [`crate::Strategy::resize`].
    pub(super) fn resized(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        container: &ContainerName,
        to: &Resources,
    ) -> Result<Ledger, ResizeError> {
        let mut next = ledger.clone();
        if ledger.owner(owner).is_some_and(|account| !account.pod_level.is_empty()) {
            return Err(ResizeError::PartOfWhole);
        }
        if let Some(held) = ledger.allocation(owner, container) {
            let mut nodes = held.memory_nodes();
            if let (Some(cpus), Some(wanted), Some(manager)) = (&held.cpus, to.cpu, &self.cpus) {
                if nodes.is_empty() {
                    nodes = manager.nodes_of(cpus);
                }
                let whole = wanted.whole_cpus().and_then(|whole| usize::try_from(whole).ok());
                let whole = whole.filter(|&whole| whole > 0).ok_or(ResizeError::NotWholeCpus(wanted))?;
                let checked = manager.check_whole_cores(whole);
                checked.map_err(|error| ResizeError::Cores(error.to_string()))?;
                let chosen = manager.resized(
                    &ledger.shared_pool,
                    cpus,
                    whole,
                    &nodes,
                    manager.requires_whole_cores(),
                )?;
                let free = &held.held_cpus() - &ledger.cpus_of_other_containers(owner, container);
                next.shared_pool = &(&next.shared_pool | &free) - &chosen;
                let holds = next.allocation_mut(owner, container);
                (holds.cpus, holds.hidden_cpus) = (Some(chosen), CpuSet::new());
            }
            for block in &held.blocks {
                let Some(&wanted) = to.memory.get(&block.kind) else { continue };
                let resource = Resource::Memory(block.kind);
                let bytes = wanted.as_int64().ok_or(ResizeError::TooLarge { resource, amount: wanted })?;
                resize_block(&mut next, owner, container, block, bytes)?;
            }
        }
        update_request(&mut next, owner, container, to);
        Ok(next)
    }
}

fn resize_block(
    ledger: &mut Ledger,
    owner: &OwnerId,
    container: &ContainerName,
    block: &MemoryBlock,
    bytes: u64,
) -> Result<(), ResizeError> {
    let kind = block.kind;
    if bytes < block.bytes.0 {
        let given_back = ledger.allocation_mut(owner, container).take_placed(kind, block.bytes.0 - bytes);
        for (node, share) in given_back {
            if let Some(account) = ledger.nodes.get_mut(&node).and_then(|node| node.kinds.get_mut(&kind)) {
                account.refund(share);
            }
        }
    } else {
        let mut missing = bytes - block.bytes.0;
        let mut shortfalls = Vec::new();
        for node in block.affinity.iter() {
            let account = ledger.nodes.get_mut(&node).and_then(|node| node.kinds.get_mut(&kind));
            let Some(account) = account else { continue };
            let (requested, free) = (bytes - block.bytes.0, account.free.0);
            shortfalls.push(Shortfall::new(node, Resource::Memory(kind), requested, free));
            let share = account.charge(missing);
            missing -= share;
            ledger.allocation_mut(owner, container).place(kind, node, share);
        }
        if missing > 0 {
            return Err(ResizeError::Shortfall(shortfalls));
        }
    }
    let held = ledger.allocation_mut(owner, container);
    for held in held.blocks.iter_mut().filter(|held| held.kind == kind) {
        held.bytes = Bytes(bytes);
    }
    Ok(())
}

/// Updates the stored request of the owner.
pub(crate) fn update_request(
    ledger: &mut Ledger,
    owner: &OwnerId,
    container: &ContainerName,
    to: &Resources,
) {
    let Some(request) = ledger.owner(owner).and_then(|account| account.request.clone()) else { return };
    let mut request = (*request).clone();
    let asked = request.init_containers.iter_mut().chain(&mut request.containers);
    for asked in asked.filter(|asked| &asked.name == container) {
        asked.requests.cpu = to.cpu.or(asked.requests.cpu);
        asked.requests.memory.extend(to.memory.iter().map(|(&kind, &amount)| (kind, amount)));
        // An absent limit stays absent; otherwise the QoS class would change.
        asked.limits.cpu = asked.limits.cpu.map(|cpu| to.cpu.unwrap_or(cpu));
        for (kind, limit) in &mut asked.limits.memory {
            *limit = to.memory.get(kind).copied().unwrap_or(*limit);
        }
    }
    ledger.owner_mut(owner).request = Some(Arc::new(request));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use numaward_topology::{Machine, NodeId, ZoneKind};

    use super::*;
    use crate::{
        Quantity,
        policy::{
            CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, PolicyConfig, TopologyManagerPolicy,
        },
        request::Request,
        strategy::Strategy as _,
    };

    /// Makes a machine of two nodes with four cores of two CPUs and 8 GiB each. The first core and 1 GiB are
    /// reserved.
    fn bench() -> (KubeletStrategy, Ledger) {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).smt(2).memory(Bytes::gib(8));
        let config = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]),
            }],
            cpu_manager_policy: CpuManagerPolicy::Static,
            cpu_reservation: Some(Quantity::whole(2)),
            reserved_system_cpus: "0,8".parse().unwrap(),
            topology_manager_policy: TopologyManagerPolicy::SingleNumaNode,
            ..PolicyConfig::default()
        };
        let strategy = KubeletStrategy::new(&machine.build().unwrap(), &config).unwrap();
        let ledger = strategy.idle();
        (strategy, ledger)
    }

    fn resources(cpus: &str, memory: Bytes) -> Resources {
        Resources::none().with_cpu(cpus.parse().unwrap()).with_memory(Quantity::whole(memory.0))
    }

    fn admit(strategy: &KubeletStrategy, ledger: &Ledger, name: &str, cpus: &str, memory: Bytes) -> Ledger {
        let decision = strategy.admit(ledger, &Request::workload(name, resources(cpus, memory)));
        decision.outcome.unwrap();
        strategy.note_started(&decision.ledger, &name.into(), &name.into())
    }

    fn cpus(ledger: &Ledger, name: &str) -> String {
        ledger.allocation(&name.into(), &name.into()).unwrap().cpus.clone().unwrap().to_string()
    }

    #[test]
    fn resize_stays_on_its_node() {
        let (strategy, idle) = bench();
        let ledger = admit(&strategy, &idle, "a", "2", Bytes::gib(2));
        assert_eq!(cpus(&ledger, "a"), "1,9");
        let to = |cpus, memory| strategy.resize(&ledger, &"a".into(), &"a".into(), &resources(cpus, memory));
        let grown = to("5", Bytes::gib(6)).unwrap();
        assert_eq!(cpus(&grown, "a"), "1-3,9-10");
        assert_eq!(grown.shared_pool().to_string(), "0,4-8,11-15");
        let account = &grown.nodes()[&NodeId(0)].kinds[&ZoneKind::Memory];
        assert_eq!((account.free, account.guaranteed), (Bytes::gib(1), Bytes::gib(6)));
        let back = strategy.resize(&grown, &"a".into(), &"a".into(), &resources("2", Bytes::gib(2))).unwrap();
        assert_eq!(back, ledger, "grown and shrunk again is as before");
        let less = to("1", Bytes::gib(1)).unwrap();
        assert_eq!(cpus(&less, "a"), "1");
        assert_eq!(strategy.release(&less, &"a".into()), idle, "all is given back in the end");
    }

    #[test]
    fn refused_resize_changes_nothing() {
        let (strategy, idle) = bench();
        let ledger = admit(&strategy, &idle, "a", "2", Bytes::gib(2));
        let ledger = admit(&strategy, &ledger, "b", "2", Bytes::gib(4));
        let before = ledger.clone();
        for (to, words) in [
            (resources("5", Bytes::gib(2)), "node 0: cpu requested 3, free 2"),
            (resources("2", Bytes::gib(4)), "node 0: memory requested 2.0 GiB, free 1.0 GiB"),
            (resources("1500m", Bytes::gib(2)), "needs whole CPUs"),
            (resources("0", Bytes::gib(2)), "needs whole CPUs"),
        ] {
            let error = strategy.resize(&ledger, &"a".into(), &"a".into(), &to).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(ledger, before);
        // A container without a guarantee can request any amount.
        let shared = admit(&strategy, &ledger, "c", "500m", Bytes::gib(1));
        let to = Resources::none().with_cpu("3".parse().unwrap());
        let noted = strategy.resize(&shared, &"c".into(), &"c".into(), &to).unwrap();
        assert_eq!(noted.shared_pool(), shared.shared_pool());
    }
}

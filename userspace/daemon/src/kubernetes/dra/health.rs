//! States of the nodes as devices, for the kubelet: a node is unhealthy while CPUs or memory of its claims are gone, or while memory with
//! errors is in use.
//!
//! CPUs that an administrator takes offline before a claim has them are no problem: the device then has fewer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_engine::{
    Ledger,
    claims::devices::{self, CPU},
};
use numaward_kube::dra::health::{DeviceState, HealthSource};
use numaward_model::Guarantees;
use numaward_topology::{Machine, NodeId, sysfs};
use tokio::task::spawn_blocking;

use super::ClaimPreparer;

/// Reader of the present guarantees, and of the machine.
pub(in crate::kubernetes) type HostReader = Arc<dyn Fn() -> (Arc<Guarantees>, Arc<Machine>) + Send + Sync>;

/// Returns the states of all devices. `failed_pages`: pages with memory errors that could not be taken out of use.
fn states(ledger: &Ledger, machine: &Machine, failed_pages: &BTreeMap<NodeId, u64>) -> Vec<DeviceState> {
    let (charged, offline) = (devices::charged(ledger, machine), devices::offline_cpus(ledger, machine));
    let nodes: BTreeSet<NodeId> = machine.nodes.keys().chain(charged.keys()).copied().collect();
    let state = |node: NodeId| {
        let (data, claims) = (machine.nodes.get(&node), charged.get(&node));
        let claimed = |name: &str| {
            claims.and_then(|amounts| amounts.get(name)).and_then(|amount| amount.units()).unwrap_or(0)
        };
        let mut problems = Vec::new();
        if data.is_none() {
            problems.push("the node is gone".to_owned());
        } else if let Some(cpus) = offline.get(&node) {
            problems.push(format!("CPUs {cpus} of claims are offline"));
        }
        if let Some(data) = data.filter(|data| data.memory.0 < claimed("memory")) {
            problems.push(format!("claims have more memory than the node, which has {}", data.memory));
        }
        if let Some(pages) = failed_pages.get(&node).filter(|pages| **pages > 0) {
            problems.push(format!("{pages} pages with memory errors are in use"));
        }
        let has_cpus = data.is_some_and(|data| !data.cpus.is_empty()) || claimed(CPU) > 0;
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        DeviceState { device: devices::device_name(node, has_cpus), problem }
    };
    nodes.into_iter().map(state).collect()
}

impl HealthSource for ClaimPreparer {
    fn states(&self) -> BoxFuture<'_, Vec<DeviceState>> {
        let (guarantees, machine) = (self.0.host)();
        let (host_root, nodes) =
            (self.0.host_root.clone(), machine.nodes.keys().copied().collect::<Vec<_>>());
        async move {
            let read = move || {
                let pages = |node| Some((node, sysfs::failed_pages(&host_root, node)?));
                nodes.into_iter().filter_map(pages).collect()
            };
            let failed_pages = spawn_blocking(read).await.unwrap_or_default();
            states(&guarantees.ledger, &machine, &failed_pages)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::{
        Quantity,
        native::{NativeOptions, NativeStrategy},
        policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, PolicyConfig},
        strategy::Strategy as _,
    };
    use numaward_topology::{Bytes, ZoneKind};

    use super::*;

    /// Returns two nodes with four CPUs each, and a ledger with a claim for all CPUs and 1 GiB of node 1.
    fn claimed() -> (Machine, Ledger) {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
        let machine = machine.build().unwrap();
        let config = PolicyConfig {
            cpu_manager_policy: CpuManagerPolicy::Static,
            reserved_system_cpus: "0".parse().unwrap(),
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: [(ZoneKind::Memory, "1Gi".parse().unwrap())].into(),
            }],
            ..PolicyConfig::default()
        };
        let strategy = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
        let consumed = [(CPU.into(), Quantity::whole(4)), ("memory".into(), Quantity::whole(1 << 30))].into();
        let (request, terms) =
            devices::placement_request(devices::part_owner("u", 0), Some(NodeId(1)), &consumed);
        let decision = strategy.admit_watched(&strategy.idle(), &request, &terms, &|_| {});
        decision.outcome.unwrap();
        (machine, decision.ledger)
    }

    fn texts(states: &[DeviceState]) -> Vec<(&str, Option<&str>)> {
        states.iter().map(|state| (state.device.as_str(), state.problem.as_deref())).collect()
    }

    #[test]
    fn problems_are_those_of_claims() {
        let (machine, ledger) = claimed();
        let none = BTreeMap::new();
        let of = |change: &dyn Fn(&mut Machine), failed: &BTreeMap<NodeId, u64>| {
            let mut machine = machine.clone();
            change(&mut machine);
            let states = states(&ledger, &machine, failed);
            texts(&states)
                .into_iter()
                .map(|(device, problem)| format!("{device}: {}", problem.unwrap_or("healthy")))
                .collect::<Vec<_>>()
        };
        let offline = |machine: &mut Machine, node: u32, cpus: &[u32]| {
            for cpu in cpus {
                machine.cpus.remove(&numaward_topology::CpuId(*cpu));
                let data = machine.nodes.get_mut(&NodeId(node)).unwrap();
                data.cpus = data.cpus.iter().filter(|of| of.0 != *cpu).collect();
            }
        };
        assert_eq!(of(&|_| {}, &none), ["node-0: healthy", "node-1: healthy"]);
        assert_eq!(of(&|machine| offline(machine, 0, &[2]), &none), ["node-0: healthy", "node-1: healthy"]);
        assert_eq!(
            of(&|machine| offline(machine, 1, &[6, 7]), &none),
            ["node-0: healthy", "node-1: CPUs 6-7 of claims are offline"]
        );
        assert_eq!(
            of(&|machine| offline(machine, 1, &[4, 5, 6, 7]), &[(NodeId(0), 2), (NodeId(1), 0)].into()),
            ["node-0: 2 pages with memory errors are in use", "node-1: CPUs 4-7 of claims are offline"]
        );
        let smaller =
            |machine: &mut Machine| machine.nodes.get_mut(&NodeId(1)).unwrap().memory = Bytes::mib(512);
        assert_eq!(of(&smaller, &none)[1], "node-1: claims have more memory than the node, which has 512Mi");
        let gone = |machine: &mut Machine| drop(machine.nodes.remove(&NodeId(1)));
        assert_eq!(of(&gone, &none), ["node-0: healthy", "node-1: the node is gone"]);
    }
}

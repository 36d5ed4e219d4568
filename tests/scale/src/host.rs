//! Books of synthetic hosts, kept as numaward keeps them: the strategy `native` decides, and the devices are those that the daemon publishes.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result};
use numaward_daemon::kubernetes::export::AssignedResources;
use numaward_engine::{
    Ledger, NativeOptions, NativeStrategy, OwnerId, Request, Strategy,
    claims::{
        allocator::{Amounts, Device},
        devices::{NodeDevices, part_owner},
    },
    policy::CpuOptions,
    quantity::Quantity,
    strategy::Allocatable,
};
use numaward_guarantee::claim::{self, ReservedClaim, ReservedPart};
use numaward_kube::dra::claim::ClaimPart;
use numaward_simulation::fleet::{Group, allocatable};
use numaward_topology::{Machine, ZoneKind};

use crate::load::{Totals, resource_name};

/// Order in which the scheduler tries the devices of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceOrder {
    /// By the numbers of the nodes.
    Fixed,
    /// The order of the daemon: the least free amounts first.
    LeastFree,
}

/// Facts about equal hosts.
pub(crate) struct HostKind {
    machine: Machine,
    strategy: NativeStrategy,
    allocatable: Allocatable,
    devices: NodeDevices,
}

impl HostKind {
    pub(crate) fn new(group: &Group<'_>) -> Result<Self> {
        let strategy = NativeStrategy::new(&group.machine, &group.policy, &NativeOptions::default())
            .context("the strategy native refuses the configuration of a trace")?;
        let options = CpuOptions::parse(&group.policy)?;
        let devices = NodeDevices::new(&group.machine, &BTreeMap::new(), options.full_pcpus_only);
        let allocatable = allocatable(&strategy, &group.machine);
        Ok(Self { machine: group.machine.clone(), strategy, allocatable, devices })
    }

    /// Returns the allocatable amounts of a host.
    pub(crate) fn totals(&self) -> Totals {
        let of_kind = |(&kind, nodes): (&ZoneKind, &BTreeMap<_, numaward_topology::Bytes>)| {
            (resource_name(kind), nodes.values().map(|bytes| bytes.0).sum())
        };
        let cpus = ("cpu".to_owned(), 1000 * self.allocatable.cpus.len() as u64);
        self.allocatable.memory.iter().map(of_kind).chain([cpus]).collect()
    }
}

/// The books of a host.
pub(crate) struct Host {
    kind: Arc<HostKind>,
    ledger: Ledger,
}

impl Host {
    pub(crate) fn new(kind: Arc<HostKind>) -> Self {
        let ledger = kind.strategy.idle();
        Self { kind, ledger }
    }

    /// Returns the devices that the daemon would publish.
    pub(crate) fn devices(&self, order: DeviceOrder) -> Vec<Device> {
        let HostKind { machine, allocatable, devices, .. } = &*self.kind;
        let free_cpus = self.ledger.shared_pool() & &allocatable.cpus;
        let assigned = AssignedResources::new(Vec::new(), &free_cpus, &self.ledger, machine);
        let mut devices = devices.publish(&assigned.free_amounts(machine, devices), &assigned.charged);
        if order == DeviceOrder::Fixed {
            devices.sort_by(|a, b| a.name.cmp(&b.name));
        }
        devices
    }

    /// Places a pod; the error is the reason of a refusal.
    pub(crate) fn admit(&mut self, request: &Request) -> Result<(), String> {
        let strategy = &self.kind.strategy;
        let decision = strategy.admit(&self.ledger, request);
        decision.outcome.map_err(|rejection| rejection.to_string())?;
        self.ledger = started(strategy, decision.ledger, request);
        Ok(())
    }

    /// Reserves the parts of a claim, or none of them; the error is the reason of a refusal. `requests`: those of the pod.
    pub(crate) fn reserve(
        &mut self,
        uid: &str,
        parts: &[ClaimPart],
        requests: &Amounts,
    ) -> Result<(), String> {
        let part = |part: &ClaimPart| ReservedPart {
            node: part.node,
            consumed: part.consumed.clone(),
            terms: part.terms.clone(),
        };
        let reserved = ReservedClaim {
            namespace: String::new(),
            name: String::new(),
            pod: String::new(),
            parts: parts.iter().map(part).collect(),
            pending: false,
        };
        claim::check_pod([(uid, &reserved)], Some(requests)).map_err(|rejection| rejection.message)?;
        let strategy = &self.kind.strategy;
        let mut ledger = self.ledger.clone();
        for (number, part) in reserved.parts.iter().enumerate() {
            let (request, terms) = part.placement_request(part_owner(uid, number), &part.consumed);
            let decision = strategy.admit_watched(&ledger, &request, &terms, &|_| {});
            decision.outcome.map_err(|rejection| {
                let amounts = part.consumed.iter().filter(|(_, amount)| **amount > Quantity::default());
                let amounts: Vec<_> = amounts.map(|(name, amount)| format!("{amount} of {name}")).collect();
                let node = part.node.map_or_else(|| "the host".to_owned(), |node| format!("node {node}"));
                format!("{node} lacks {}: {rejection}", amounts.join(", "))
            })?;
            ledger = started(strategy, decision.ledger, &request);
        }
        if reserved.parts.len() > 1 {
            let owners: Vec<_> = (0..reserved.parts.len()).map(|number| part_owner(uid, number)).collect();
            let (request, terms) = reserved.placement_request(uid, &reserved.consumed());
            ledger.unite(&owners, &claim::owner(uid), request, terms);
        }
        self.ledger = ledger;
        Ok(())
    }

    /// Releases a pod, or a claim with [`claim::owner`].
    pub(crate) fn release(&mut self, owner: &OwnerId) {
        self.ledger = self.kind.strategy.release(&self.ledger, owner);
    }

    /// Returns the largest amounts that claims can have of each device: those of an idle host.
    pub(crate) fn limits(&self) -> BTreeMap<String, Amounts> {
        let idle = Self::new(self.kind.clone()).devices(DeviceOrder::Fixed);
        let values = |device: Device| {
            let amounts = device.capacity.into_iter().map(|(name, capacity)| (name, capacity.value));
            (device.name.to_string(), amounts.collect())
        };
        idle.into_iter().map(values).collect()
    }

    pub(crate) fn kind(&self) -> &HostKind {
        &self.kind
    }
}

/// Returns the ledger after the start of all containers.
fn started(strategy: &NativeStrategy, mut ledger: Ledger, request: &Request) -> Ledger {
    for container in request.all_containers() {
        ledger = strategy.note_started(&ledger, &request.owner, &container.name);
    }
    ledger
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use numaward_kube::{
        api::{ApiMetrics, connect, fake::FakeApiServer},
        dra::{claim::AllocationReader, messages::ClaimId},
    };
    use serde_json::json;

    use super::*;
    use crate::load::{fleet, read_traces};

    /// Returns a host of the first group, and the amount of CPUs on its node 0.
    pub(crate) fn host() -> (Host, u64) {
        let traces = read_traces(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../traces")).unwrap();
        let fleet = fleet(&traces, 18, 1).unwrap();
        let host = Host::new(Arc::new(HostKind::new(&fleet.groups[0]).unwrap()));
        let cpus = host.limits()["node-0"]["cpu"].units().unwrap();
        (host, cpus)
    }

    #[tokio::test]
    async fn host_keeps_books_of_claims() {
        let (mut host, cpus) = host();
        let idle = host.devices(DeviceOrder::Fixed);
        let server = FakeApiServer::start().await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("config");
        std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
        let client = connect(Some(&kubeconfig)).await.unwrap();
        let reader = AllocationReader { client, node: "h0".to_owned(), metrics: ApiMetrics::default() };
        let claim = |uid: &str, devices: &[(&str, u64)]| {
            let result = |(device, cpus): &(&str, u64)| {
                json!({"request": "unit-0/any-2", "driver": "numaward.io", "pool": "h0", "device": device,
                    "shareID": "s", "consumedCapacity": {"cpu": cpus.to_string(), "memory": "1Gi"}})
            };
            let results: Vec<_> = devices.iter().map(result).collect();
            server.put_claim(json!({"metadata": {"name": uid, "namespace": "default", "uid": uid},
                "status": {"allocation": {"devices": {"results": results}},
                    "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod"}]}}));
            ClaimId { namespace: "default".to_owned(), uid: uid.to_owned(), name: uid.to_owned() }
        };
        let read = async |id: ClaimId| reader.read(&id).await.unwrap().parts;
        // All CPUs of node 0, then one more, and a claim on both nodes of which one has no room.
        let all = read(claim("all", &[("node-0", cpus)])).await;
        let one = read(claim("one", &[("node-0", 1)])).await;
        let both = read(claim("both", &[("node-1", 2), ("node-0", 2)])).await;
        let requests = host.limits().into_values().fold(Amounts::new(), |mut sum, amounts| {
            claim::add(&mut sum, &amounts);
            sum
        });
        let error = host.reserve("all", &all, &Amounts::new()).unwrap_err();
        assert!(error.contains("its requests"), "{error}");
        host.reserve("all", &all, &requests).unwrap();
        let charged = host.devices(DeviceOrder::Fixed);
        assert_eq!(charged, idle, "the value is what claims consume plus what is free");
        let error = host.reserve("one", &one, &requests).unwrap_err();
        assert!(error.contains("node 0"), "{error}");
        host.reserve("both", &both, &requests).unwrap_err();
        host.release(&claim::owner("all"));
        host.reserve("both", &both, &requests).unwrap();
        host.reserve("one", &one, &requests).unwrap();
        host.release(&claim::owner("both"));
        host.release(&claim::owner("one"));
        assert!(host.ledger.allocations().next().is_none());
        assert_eq!(host.devices(DeviceOrder::Fixed), idle);
    }

    #[test]
    fn placed_pods_reduce_devices() {
        let (mut host, _) = host();
        let resources = numaward_engine::Resources::none()
            .with_cpu("4".parse().unwrap())
            .with_memory("1Gi".parse().unwrap());
        let request = Request::workload("p", resources);
        host.admit(&request).unwrap();
        let left: u64 = host
            .devices(DeviceOrder::LeastFree)
            .iter()
            .filter(|device| device.name.starts_with("node-"))
            .map(|device| device.capacity["cpu"].value.units().unwrap())
            .sum();
        let all: u64 = host.limits().values().map(|amounts| amounts["cpu"].units().unwrap()).sum();
        assert_eq!(left, all - 4);
        // The node with the pod has the least free amounts, and is first.
        let first = &host.devices(DeviceOrder::LeastFree)[0];
        let limit = host.limits()[&*first.name]["cpu"].units().unwrap();
        assert_eq!(first.capacity["cpu"].value.units().unwrap(), limit - 4);
        let names =
            |order| host.devices(order).iter().map(|device| device.name.to_string()).collect::<Vec<_>>();
        assert!(names(DeviceOrder::Fixed).is_sorted());
        host.release(&"p".into());
        assert!(host.ledger.allocations().next().is_none());
    }
}

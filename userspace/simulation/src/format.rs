//! JSON formats of machines, configurations and pods in conformance vectors, fault scenarios and traces.
//!
//! Sizes are in bytes, CPU sets are Linux CPU lists, and amounts of pods are Kubernetes quantities. Names of policies are stored
//! as text, because scenarios also test names that do not exist.

use std::{collections::BTreeMap, str::FromStr};

use numaward_topology::{
    Bytes, CacheId, CoreId, Cpu, CpuId, CpuSet, HugepagePool, HugepageSize, Machine, NodeId, NumaNode,
    SocketId, ZoneKind,
};
use serde::Deserialize;
use serde_json::Value;

use numaward_engine::{
    policy::{Component, KubeletVersion, MemoryReservation, PolicyConfig, UnknownName},
    quantity::Quantity,
    request::{ContainerRequest, PodResources, Request, Resources},
};

#[derive(Clone, Debug, Deserialize)]
pub struct MachineVector {
    nodes: Vec<NodeVector>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeVector {
    id: u32,
    memory_bytes: u64,
    #[serde(default)]
    hugepages: BTreeMap<String, u64>,
    distances: Vec<u32>,
    /// CPU, core, socket, last-level cache.
    cpus: Vec<(u32, u32, u32, Option<u32>)>,
}

/// A kubelet's configuration.
#[derive(Clone, Debug, Deserialize)]
pub struct ConfigVector {
    memory_manager_policy: String,
    #[serde(default)]
    reserved_memory: Vec<ReservationVector>,
    node_reservation: Option<BTreeMap<String, Value>>,
    cpu_manager_policy: String,
    #[serde(default)]
    cpu_manager_policy_options: BTreeMap<String, String>,
    #[serde(default)]
    reserved_cpus: String,
    reserved_cpu_quantity: Option<Quantity>,
    topology_manager_policy: String,
    topology_manager_scope: String,
    #[serde(default)]
    topology_manager_policy_options: BTreeMap<String, String>,
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
    /// Version of the kubelet that was recorded.
    #[serde(default = "recorded")]
    kubelet_version: KubeletVersion,
}

fn recorded() -> KubeletVersion {
    KubeletVersion::V1_32
}

#[derive(Clone, Debug, Deserialize)]
struct ReservationVector {
    node: u32,
    limits: BTreeMap<ZoneKind, u64>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct PodVector {
    /// Name and UID of the pod.
    pub name: String,
    #[serde(default)]
    init_containers: Vec<ContainerVector>,
    containers: Vec<ContainerVector>,
    /// Pod-level resources.
    #[serde(flatten)]
    amounts: Amounts,
}

#[derive(Clone, Debug, Deserialize)]
struct ContainerVector {
    name: String,
    restart_policy: Option<String>,
    #[serde(flatten)]
    amounts: Amounts,
}

#[derive(Clone, Debug, Deserialize)]
struct Amounts {
    /// Amounts that are both requests and limits.
    resources: Option<BTreeMap<String, Quantity>>,
    requests: Option<BTreeMap<String, Quantity>>,
    limits: Option<BTreeMap<String, Quantity>>,
}

impl MachineVector {
    /// Converts the vector to a machine. The error says which value is invalid.
    pub fn machine(&self) -> Result<Machine, String> {
        let ids: Vec<NodeId> = self.nodes.iter().map(|node| NodeId(node.id)).collect();
        // The machine identifies a core by its lowest CPU, the vectors by any unique number.
        let mut cores: BTreeMap<u32, u32> = BTreeMap::new();
        for &(cpu, core, _, _) in self.nodes.iter().flat_map(|node| &node.cpus) {
            let lowest = cores.entry(core).or_insert(cpu);
            *lowest = cpu.min(*lowest);
        }
        let mut machine = Machine::default();
        for node in &self.nodes {
            let mut hugepages = BTreeMap::new();
            for (size, &pages) in &node.hugepages {
                let kind: ZoneKind =
                    format!("hugepages-{size}").parse().map_err(|error| format!("{error}"))?;
                let ZoneKind::Hugepages(size) = kind else { continue };
                let size: HugepageSize = size;
                hugepages.insert(size, HugepagePool { total: pages, free: pages, surplus: 0 });
            }
            for &(id, core, socket, cache) in &node.cpus {
                let cpu = Cpu {
                    node: NodeId(node.id),
                    core: CoreId(cores.get(&core).copied().unwrap_or(id)),
                    socket: SocketId(socket),
                    last_level_cache: cache.map(CacheId),
                };
                machine.cpus.insert(CpuId(id), cpu);
            }
            let cpus: CpuSet = node.cpus.iter().map(|&(id, ..)| CpuId(id)).collect();
            let node_data = NumaNode {
                cpus,
                memory: Bytes(node.memory_bytes),
                hugepages,
                distances: ids.iter().copied().zip(node.distances.iter().copied()).collect(),
                memory_blocks: Vec::new(),
                memory_tier: None,
            };
            machine.nodes.insert(NodeId(node.id), node_data);
        }
        machine.possible_cpus = machine.cpu_ids();
        Ok(machine)
    }
}

/// A configuration, or the component that refuses an unknown name in it.
pub type ParsedConfig = Result<PolicyConfig, (Component, UnknownName)>;

impl ConfigVector {
    /// Converts the vector to a configuration. The outer error says which value has an invalid form.
    pub fn config(&self) -> Result<ParsedConfig, String> {
        fn named<T: FromStr<Err = UnknownName>>(
            component: Component,
            name: &str,
        ) -> Result<T, (Component, UnknownName)> {
            name.parse().map_err(|unknown| (component, unknown))
        }
        // In the order in which the kubelet creates its managers, because the first error ends its start.
        let names = || {
            Ok((
                named(Component::TopologyManager, &self.topology_manager_policy)?,
                named(Component::TopologyManager, &self.topology_manager_scope)?,
                named(Component::CpuManager, &self.cpu_manager_policy)?,
                named(Component::MemoryManager, &self.memory_manager_policy)?,
            ))
        };
        let (topology_policy, topology_scope, cpu_policy, memory_policy) = match names() {
            Ok(names) => names,
            Err(unknown) => return Ok(Err(unknown)),
        };
        let mut node_reservation = None;
        if let Some(by_kind) = &self.node_reservation {
            let mut of_kinds = BTreeMap::new();
            for (name, amount) in by_kind {
                let Ok(kind) = name.parse::<ZoneKind>() else { continue };
                let amount = match amount {
                    Value::Number(bytes) => Quantity::whole(bytes.as_u64().ok_or("not a number of bytes")?),
                    Value::String(text) => text.parse().map_err(|error| format!("{error}"))?,
                    other => return Err(format!("node_reservation: {other}")),
                };
                of_kinds.insert(kind, amount);
            }
            node_reservation = Some(of_kinds);
        }
        Ok(Ok(PolicyConfig {
            memory_manager_policy: memory_policy,
            reserved_memory: self
                .reserved_memory
                .iter()
                .map(|reservation| MemoryReservation {
                    numa_node: NodeId(reservation.node),
                    limits: reservation
                        .limits
                        .iter()
                        .map(|(&kind, &of)| (kind, Quantity::whole(of)))
                        .collect(),
                })
                .collect(),
            node_reservation,
            cpu_manager_policy: cpu_policy,
            cpu_manager_policy_options: self.cpu_manager_policy_options.clone(),
            reserved_system_cpus: self.reserved_cpus.parse().map_err(|error| format!("{error}"))?,
            cpu_reservation: self.reserved_cpu_quantity,
            topology_manager_policy: topology_policy,
            topology_manager_scope: topology_scope,
            topology_manager_policy_options: self.topology_manager_policy_options.clone(),
            feature_gates: self.feature_gates.clone(),
            kubelet_version: self.kubelet_version,
        }))
    }
}

fn resources(amounts: &BTreeMap<String, Quantity>) -> Result<Resources, String> {
    let mut resources = Resources::none();
    for (name, &amount) in amounts {
        if name == "cpu" {
            resources.cpu = Some(amount);
        } else {
            let kind: ZoneKind = name.parse().map_err(|error| format!("{error}"))?;
            resources.memory.insert(kind, amount);
        }
    }
    Ok(resources)
}

impl Amounts {
    /// Returns requests and limits. `name` is used in messages.
    fn pair(&self, name: &str) -> Result<[Resources; 2], String> {
        let either = |separate: &Option<_>| match (&self.resources, separate) {
            (Some(both), None) => resources(both),
            (None, Some(separate)) => resources(separate),
            (None, None) => Ok(Resources::none()),
            (Some(_), Some(_)) => Err(format!("{name}: resources twice")),
        };
        Ok([either(&self.requests)?, either(&self.limits)?])
    }
}

impl ContainerVector {
    fn container(&self) -> Result<ContainerRequest, String> {
        let [requests, limits] = self.amounts.pair(&self.name)?;
        Ok(ContainerRequest {
            name: self.name.as_str().into(),
            restartable: self.restart_policy.as_deref() == Some("Always"),
            requests,
            limits,
        })
    }
}

impl PodVector {
    /// Converts the vector to a request. The error says which value is invalid.
    pub fn request(&self) -> Result<Request, String> {
        let containers = |of: &[ContainerVector]| of.iter().map(ContainerVector::container).collect();
        let init_containers: Result<Vec<_>, String> = containers(&self.init_containers);
        let app_containers: Result<Vec<_>, String> = containers(&self.containers);
        let Amounts { resources: both, requests, limits } = &self.amounts;
        let is_whole = both.is_some() || requests.is_some() || limits.is_some();
        let [requests, limits] = self.amounts.pair(&self.name)?;
        Ok(Request {
            owner: self.name.as_str().into(),
            init_containers: init_containers?,
            containers: app_containers?,
            resources: is_whole.then_some(PodResources { requests, limits }),
        })
    }
}

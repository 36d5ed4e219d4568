//! Devices of a host for resource claims: one for each NUMA node, of which claims consume CPUs and memory, and one for the whole host.
//!
//! # Published value
//! The value of a capacity is the amount that claims consume plus the free amount. The scheduler subtracts the amounts of all claims,
//! so the free amount remains. If a claim is prepared, the free amount becomes a consumed one, and the value does not change.
//!
//! # Order
//! The scheduler takes the first device that fits. The devices with the least free amounts come first, so that large free amounts
//! remain for large claims. Nodes without CPUs are last.
//!
//! # Host
//! The device [`HOST`] has the amounts of all nodes together. It has binding conditions: the scheduler waits until the host has chosen the
//! nodes. A claim of it is charged to no node, so the free amounts of the nodes fall. The scheduler cannot know whether a request fits on
//! the nodes. After a refusal, less is published as free until the free amounts change, so that the scheduler tries another host.

use std::{collections::BTreeMap, sync::Arc};

use numaward_topology::{Bytes, CpuSet, HugepageSize, Machine, NodeId, NumaNode, ZoneKind};

use super::allocator::{Amounts, Attribute, Capacity, Device, RequestPolicy, ValidRange};
use crate::{
    ledger::Ledger,
    native::memory_tier,
    policy::{MemoryTier, TopologyManagerPolicy},
    quantity::Quantity,
    request::{OwnerId, Request, Resources},
    terms::Terms,
};

/// Name of the driver.
pub const DRIVER: &str = "numaward.io";

/// Attribute with the number of the NUMA node. Its name and meaning are defined by Kubernetes.
pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Values of the attribute `kind`.
pub const NODE: &str = "node";
pub const MEMORY_NODE: &str = "memory";
/// Value of the attribute `kind` of the device of the whole host, and its name.
pub const HOST: &str = "host";

/// Condition of a claim of the host device: its CPUs and memory are reserved, and the pod can be bound.
pub const PLACED: &str = "numaward.io/placed";
/// Condition of a claim of the host device that does not fit: the scheduler tries again.
pub const NO_ROOM: &str = "numaward.io/no-room";

/// Capacity in CPUs.
pub const CPU: &str = "cpu";

/// Beginning of the names of claims' parts in the ledger. The name of a workload and the UID of a pod do not begin with a dot.
const OWNER_PREFIX: &str = ".claim/";

/// Largest number of nodes whose distances are attributes.
const MAX_NODES_WITH_DISTANCES: usize = 8;

/// Names of the capacities in bytes, with their kinds and steps.
const MEMORY_CAPACITIES: [(&str, ZoneKind, u64); 3] = [
    ("memory", ZoneKind::Memory, 1 << 20),
    ("hugepages2Mi", ZoneKind::Hugepages(HugepageSize(Bytes::mib(2))), 2 << 20),
    ("hugepages1Gi", ZoneKind::Hugepages(HugepageSize(Bytes::gib(1))), 1 << 30),
];

/// Returns the capacity for a kind of memory; `None` if devices have none.
pub fn capacity_name(kind: ZoneKind) -> Option<&'static str> {
    MEMORY_CAPACITIES.iter().find(|(_, of, _)| *of == kind).map(|(name, ..)| *name)
}

/// Returns the kind of memory of a capacity; `None` if it is not one of memory.
pub fn memory_kind(name: &str) -> Option<ZoneKind> {
    MEMORY_CAPACITIES.iter().find(|(of, ..)| *of == name).map(|(_, kind, _)| *kind)
}

/// Names of the capacities that devices can have.
pub const CAPACITIES: [&str; 4] = {
    let [(memory, ..), (small, ..), (large, ..)] = MEMORY_CAPACITIES;
    [CPU, memory, small, large]
};

/// Returns true if devices have a capacity with this name.
pub fn is_capacity(name: &str) -> bool {
    CAPACITIES.contains(&name)
}

/// Returns the amounts of a claim for the CPUs and memory of a container: whole CPUs, and bytes rounded up to the steps of the capacities. A
/// fraction of a CPU is none: it is shared. The error is a kind of memory of which devices have no capacity.
pub fn claim_amounts(resources: &Resources) -> Result<Amounts, ZoneKind> {
    let cpus = resources.cpu.and_then(Quantity::whole_cpus).filter(|cpus| *cpus > 0);
    let mut amounts: Amounts = cpus.map(|cpus| (CPU.into(), Quantity::whole(cpus))).into_iter().collect();
    for (&kind, amount) in resources.memory.iter().filter(|(_, amount)| !amount.is_zero()) {
        let of_kind = MEMORY_CAPACITIES.iter().find(|(_, of, _)| *of == kind).ok_or(kind)?;
        let (name, _, step) = *of_kind;
        let steps = amount.units().unwrap_or(u64::MAX).div_ceil(step);
        amounts.insert(name.into(), Quantity::whole(steps.saturating_mul(step)));
    }
    Ok(amounts)
}

/// Returns the node of a device by its name; `None` if the name is not that of a device.
pub fn node_of_device(name: &str) -> Option<NodeId> {
    let number = [NODE, MEMORY_NODE].iter().find_map(|kind| name.strip_prefix(kind)?.strip_prefix('-'))?;
    let node = number.parse().ok().map(NodeId)?;
    // No sign, and no leading zero.
    (node.to_string() == number).then_some(node)
}

/// Returns the name of the device of a node.
pub fn device_name(node: NodeId, has_cpus: bool) -> String {
    format!("{}-{node}", if has_cpus { NODE } else { MEMORY_NODE })
}

/// Returns the name of the pool with the host device of a Kubernetes node.
pub fn host_pool(node: &str) -> String {
    format!("{node}/{HOST}")
}

/// Returns the owner in the ledger for a part of a claim.
pub fn part_owner(uid: &str, part: usize) -> OwnerId {
    format!("{OWNER_PREFIX}{uid}/{part}").into()
}

/// Returns true if the owner in the ledger is a part of a claim.
pub fn is_part(owner: &OwnerId) -> bool {
    owner.as_str().starts_with(OWNER_PREFIX)
}

/// Returns the amounts that the claims in a ledger consume, by node. The CPUs of a claim on several nodes are those that the machine has
/// at present.
pub fn charged(ledger: &Ledger, machine: &Machine) -> BTreeMap<NodeId, Amounts> {
    let mut charged = BTreeMap::<NodeId, Amounts>::new();
    let mut add = |node: NodeId, name: &str, amount: Quantity| {
        let sum = charged.entry(node).or_default().entry(name.into()).or_default();
        *sum = sum.checked_add(amount).unwrap_or(*sum);
    };
    for (_, account) in ledger.owners().filter(|(owner, _)| is_part(owner)) {
        let (Some(request), Some(node)) = (&account.request, account.terms.nodes.first()) else { continue };
        if account.terms.nodes.len() > 1 {
            for held in account.containers.values() {
                for node in account.terms.nodes.iter() {
                    let cpus = held.cpus.as_ref().zip(machine.nodes.get(&node));
                    let cpus = cpus.map_or(0, |(cpus, of)| (cpus & &of.cpus).len() as u64);
                    add(node, CPU, Quantity::whole(cpus));
                }
                for (&kind, nodes) in &held.placed {
                    let Some(name) = capacity_name(kind) else { continue };
                    for (&node, bytes) in nodes {
                        add(node, name, Quantity::whole(bytes.0));
                    }
                }
            }
            continue;
        }
        for resources in request.containers.iter().map(|container| &container.requests) {
            let memory =
                resources.memory.iter().filter_map(|(&kind, amount)| Some((capacity_name(kind)?, *amount)));
            for (name, amount) in resources.cpu.map(|amount| (CPU, amount)).into_iter().chain(memory) {
                add(node, name, amount);
            }
        }
    }
    charged
}

/// Returns the amounts that the claims of the host device in a ledger consume.
pub fn charged_to_host(ledger: &Ledger) -> Amounts {
    let mut charged = Amounts::new();
    let of_host = ledger.owners().filter(|(owner, account)| is_part(owner) && account.terms.nodes.is_empty());
    for resources in of_host
        .filter_map(|(_, account)| account.request.as_ref())
        .flat_map(|request| request.containers.iter().map(|container| &container.requests))
    {
        let memory = resources.memory.iter();
        let memory = memory.filter_map(|(&kind, amount)| Some((capacity_name(kind)?, *amount)));
        for (name, amount) in resources.cpu.map(|amount| (CPU, amount)).into_iter().chain(memory) {
            let sum: &mut Quantity = charged.entry(name.into()).or_default();
            *sum = sum.checked_add(amount).unwrap_or(*sum);
        }
    }
    charged
}

/// Returns the CPUs of claims in a ledger that the machine does not have at present, by node. Those of a claim on several nodes count for
/// each of these.
pub fn offline_cpus(ledger: &Ledger, machine: &Machine) -> BTreeMap<NodeId, CpuSet> {
    let (mut offline, present) = (BTreeMap::<NodeId, CpuSet>::new(), machine.cpu_ids());
    for (_, account) in ledger.owners().filter(|(owner, _)| is_part(owner)) {
        let held = account.containers.values().filter_map(|allocation| allocation.cpus.as_ref());
        let missing: CpuSet = held.flat_map(|cpus| (cpus - &present).iter().collect::<Vec<_>>()).collect();
        for node in account.terms.nodes.iter().filter(|_| !missing.is_empty()) {
            let of_node = offline.entry(node).or_default();
            *of_node = &*of_node | &missing;
        }
    }
    offline
}

/// Returns the resources of these amounts.
pub fn resources(amounts: &Amounts) -> Resources {
    let amount = |name: &str| amounts.get(name).copied().filter(|amount| !amount.is_zero());
    let memory = MEMORY_CAPACITIES.iter().filter_map(|&(name, kind, _)| Some((kind, amount(name)?)));
    Resources { cpu: amount(CPU), memory: memory.collect() }
}

/// Returns the request of a part of a claim to the strategy of the host, with its terms. `node`: the node of the device; `None` if the
/// strategy chooses the nodes.
pub fn placement_request(owner: OwnerId, node: Option<NodeId>, consumed: &Amounts) -> (Request, Terms) {
    let terms = Terms {
        // On a given node, there is nothing that a policy could forbid.
        policy: node.map(|_| TopologyManagerPolicy::BestEffort),
        nodes: node.into_iter().collect(),
        without_memory: true,
        // The scheduler chose the node, and has the claim in its books there.
        immovable: node.is_some(),
        ..Terms::default()
    };
    (Request::workload(owner, resources(consumed)), terms)
}

/// Amounts of a NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAmounts {
    pub cpus: u64,
    /// Bytes by kind.
    pub memory: BTreeMap<ZoneKind, u64>,
}

impl NodeAmounts {
    fn get(&self, capacity: &str) -> u64 {
        if capacity == CPU {
            return self.cpus;
        }
        memory_kind(capacity).and_then(|kind| self.memory.get(&kind)).copied().unwrap_or(0)
    }
}

/// Devices of a machine.
#[derive(Clone, Debug)]
pub struct NodeDevices {
    /// Devices without capacities, by node.
    devices: BTreeMap<NodeId, Device>,
    /// CPUs of each core, in groups that claims get as a whole.
    cores: BTreeMap<NodeId, Vec<CpuSet>>,
    /// Number of CPUs in a group.
    cpu_step: u64,
}

impl NodeDevices {
    /// Creates the devices of a machine. `has_whole_cores`: claims get whole cores (`full-pcpus-only`).
    pub fn new(machine: &Machine, tiers: &BTreeMap<NodeId, MemoryTier>, has_whole_cores: bool) -> Self {
        let cpus_by = |groups: &dyn Fn(NodeId, &NumaNode) -> Vec<CpuSet>| {
            machine.nodes.iter().map(|(&node, of)| (node, groups(node, of))).collect::<BTreeMap<_, _>>()
        };
        let cores = cpus_by(&|_, of| {
            let mut cores: BTreeMap<_, CpuSet> = BTreeMap::new();
            for cpu in of.cpus.iter() {
                if let Some(core) = machine.cpus.get(&cpu).map(|cpu| cpu.core) {
                    cores.entry(core).or_default().insert(cpu);
                }
            }
            cores.into_values().collect()
        });
        let threads = cores.values().flatten().map(CpuSet::len).max().unwrap_or(1);
        let devices = machine.nodes.keys().map(|&node| (node, device(machine, node, tiers, threads)));
        let (cores, cpu_step) = if has_whole_cores {
            (cores, threads as u64)
        } else {
            (cpus_by(&|_, of| of.cpus.iter().map(CpuSet::single).collect()), 1)
        };
        Self { devices: devices.collect(), cores, cpu_step }
    }

    /// Returns the number of CPUs of a node that claims can get, of these CPUs: those in whole groups.
    pub fn usable_cpus(&self, node: NodeId, cpus: &CpuSet) -> u64 {
        let cores = self.cores.get(&node).into_iter().flatten();
        let whole = cores.filter(|core| core.len() as u64 == self.cpu_step && core.is_subset(cpus));
        whole.count() as u64 * self.cpu_step
    }

    /// Returns the devices in their order. `free` and `charged` have the free and the consumed amounts of the nodes.
    pub fn publish(
        &self,
        free: &BTreeMap<NodeId, NodeAmounts>,
        charged: &BTreeMap<NodeId, Amounts>,
    ) -> Vec<Device> {
        let (no_amounts, no_claims) = (NodeAmounts::default(), Amounts::new());
        let mut devices: Vec<_> = self
            .devices
            .iter()
            .map(|(node, device)| {
                let free = free.get(node).unwrap_or(&no_amounts);
                let charged = charged.get(node).unwrap_or(&no_claims);
                let device = Device { capacity: self.capacities(free, charged), ..device.clone() };
                (order_key(&device, free), device)
            })
            .collect();
        devices.sort_by_key(|(key, _)| *key);
        devices.into_iter().map(|(_, device)| device).collect()
    }

    /// Returns the device of the whole host. `charged`: the amounts that its claims consume. `refused`: requests that the host refused with
    /// these free amounts.
    pub fn publish_host<'a>(
        &self,
        free: &BTreeMap<NodeId, NodeAmounts>,
        charged: &Amounts,
        refused: impl IntoIterator<Item = &'a Amounts>,
    ) -> Device {
        let mut sum = NodeAmounts::default();
        for amounts in free.values() {
            sum.cpus = sum.cpus.saturating_add(amounts.cpus);
            for (&kind, bytes) in &amounts.memory {
                let of_kind = sum.memory.entry(kind).or_default();
                *of_kind = of_kind.saturating_add(*bytes);
            }
        }
        for request in refused {
            self.lower(&mut sum, request);
        }
        Device {
            name: HOST.into(),
            attributes: [("kind".into(), Attribute::Text(HOST.into()))].into(),
            capacity: self.capacities(&sum, charged),
            allow_multiple_allocations: true,
            has_binding_conditions: true,
            consumed: Amounts::new(),
            is_taken: false,
        }
    }

    /// Lowers the amount of which a refused request takes the largest part, so that the request does not fit any more.
    fn lower(&self, free: &mut NodeAmounts, request: &Amounts) {
        let share = |(name, step): (&'static str, u64)| {
            let requested = request.get(name).and_then(|amount| amount.units()).filter(|units| *units > 0)?;
            let share = u128::from(requested) * 1_000_000 / u128::from(free.get(name).max(1));
            Some((share, requested, name, step))
        };
        let largest = self.steps().filter_map(share).max_by_key(|(share, ..)| *share);
        if let Some((_, requested, name, step)) = largest {
            let below = requested.saturating_sub(1) / step * step;
            match memory_kind(name) {
                Some(kind) => drop(free.memory.insert(kind, free.get(name).min(below))),
                None => free.cpus = free.cpus.min(below),
            }
        }
    }

    /// Returns the names of the capacities with their steps.
    fn steps(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let memory = MEMORY_CAPACITIES.iter().map(|&(name, _, step)| (name, step));
        std::iter::once((CPU, self.cpu_step)).chain(memory)
    }

    fn capacities(&self, free: &NodeAmounts, charged: &Amounts) -> BTreeMap<Arc<str>, Capacity> {
        let capacities = self.steps().map(|(name, step)| {
            let consumed = charged.get(name).copied().unwrap_or_default();
            let value = Quantity::whole(free.get(name)).checked_add(consumed).unwrap_or(consumed);
            (Arc::from(name), capacity(value, step))
        });
        capacities.collect()
    }
}

/// Returns a capacity whose requests are multiples of a step.
fn capacity(value: Quantity, step: u64) -> Capacity {
    let (min, step) = (Quantity::whole(0), Quantity::whole(step));
    // The API requires that a step is not larger than the value.
    let valid_range = (value >= step).then_some(ValidRange { min, max: None, step: Some(step) });
    Capacity { value, request_policy: Some(RequestPolicy { default: min, valid_range }) }
}

/// Returns the sort key of a device: the sum of its free CPUs and memory, in thousandths of the values.
fn order_key(device: &Device, free: &NodeAmounts) -> (bool, u64) {
    let share = |name: &str| {
        let value = device.capacity.get(name).and_then(|capacity| capacity.value.units()).unwrap_or(0);
        let share = u128::from(free.get(name)) * 1000 / u128::from(value.max(1));
        u64::try_from(share).unwrap_or(u64::MAX)
    };
    let is_memory_node = device.attributes.get("kind") == Some(&Attribute::Text(MEMORY_NODE.into()));
    (is_memory_node, share(CPU).saturating_add(share("memory")))
}

/// Returns the device of a node without its capacities.
fn device(machine: &Machine, node: NodeId, tiers: &BTreeMap<NodeId, MemoryTier>, threads: usize) -> Device {
    let empty = NumaNode::default();
    let data = machine.nodes.get(&node).unwrap_or(&empty);
    let kind = if data.cpus.is_empty() { MEMORY_NODE } else { NODE };
    let with_cpus = machine.nodes.iter().filter(|(_, of)| !of.cpus.is_empty());
    let home = with_cpus.min_by_key(|&(&of, _)| (of != node, machine.distance(of, node), of));
    let (home, home_cpus) = home.map_or((node, &empty.cpus), |(&home, of)| (home, &of.cpus));
    let socket = home_cpus.first().and_then(|cpu| machine.cpus.get(&cpu)).map(|cpu| cpu.socket.0);
    let caches = data.cpus.iter().filter_map(|cpu| machine.cpus.get(&cpu)?.last_level_cache);
    let mut cpus_of_caches: BTreeMap<_, i64> = BTreeMap::new();
    for cache in caches {
        *cpus_of_caches.entry(cache).or_default() += 1;
    }
    let int = |value: i64| Attribute::Int(value);
    let mut attributes: BTreeMap<Arc<str>, Attribute> = [
        (NUMA_NODE.into(), int(node.0.into())),
        ("kind".into(), Attribute::Text(kind.into())),
        ("home".into(), int(home.0.into())),
    ]
    .into();
    let mut add = |name: &str, value: Option<Attribute>| {
        attributes.extend(value.map(|value| (name.into(), value)));
    };
    add("socket", socket.map(|socket| int(socket.into())));
    let tier = tiers.get(&node).copied().or_else(|| memory_tier(data));
    add("tier", tier.map(|tier| Attribute::Text(tier.as_str().into())));
    if kind == NODE {
        add("threadsPerCore", i64::try_from(threads).ok().map(Attribute::Int));
        if let Some(&cpus) = cpus_of_caches.values().max() {
            add("lastLevelCaches", i64::try_from(cpus_of_caches.len()).ok().map(Attribute::Int));
            add("cpusPerCache", Some(Attribute::Int(cpus)));
        }
    }
    if machine.nodes.len() <= MAX_NODES_WITH_DISTANCES {
        for &to in machine.nodes.keys() {
            let distance = machine.distance(node, to).map(|distance| int(distance.into()));
            add(&format!("distanceTo{to}"), distance);
        }
    }
    Device {
        name: device_name(node, !data.cpus.is_empty()).into(),
        attributes,
        capacity: BTreeMap::new(),
        allow_multiple_allocations: true,
        has_binding_conditions: false,
        consumed: Amounts::new(),
        is_taken: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        native::{NativeOptions, NativeStrategy},
        policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, PolicyConfig},
        strategy::Strategy as _,
    };

    fn amounts(cpus: u64, mib: u64) -> NodeAmounts {
        NodeAmounts { cpus, memory: [(ZoneKind::Memory, mib << 20)].into() }
    }

    /// Returns two nodes with four cores of two threads, and one node with memory only.
    fn machine() -> Machine {
        let mut machine = Machine::builder()
            .nodes(2)
            .sockets(2)
            .cores_per_node(4)
            .smt(2)
            .memory(Bytes::gib(8))
            .build()
            .unwrap();
        let cxl = NumaNode {
            memory: Bytes::gib(16),
            distances: [(NodeId(0), 30), (NodeId(1), 20), (NodeId(2), 10)].into(),
            memory_tier: Some(22),
            ..NumaNode::default()
        };
        for (node, distance) in [(NodeId(0), 30), (NodeId(1), 20)] {
            machine.nodes.get_mut(&node).unwrap().distances.insert(NodeId(2), distance);
        }
        machine.nodes.insert(NodeId(2), cxl);
        machine
    }

    fn names(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| &*device.name).collect()
    }

    #[test]
    fn device_has_attributes_of_its_node() {
        let devices = NodeDevices::new(&machine(), &BTreeMap::new(), false);
        let devices = devices.publish(&BTreeMap::new(), &BTreeMap::new());
        assert_eq!(names(&devices), ["node-0", "node-1", "memory-2"]);
        let text = |device: &Device| {
            let attributes = device.attributes.iter().map(|(name, value)| match value {
                Attribute::Int(value) => format!("{name}={value}"),
                Attribute::Text(value) => format!("{name}={value}"),
                Attribute::Bool(value) => format!("{name}={value}"),
            });
            attributes.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            text(&devices[1]),
            "cpusPerCache=8 distanceTo0=20 distanceTo1=10 distanceTo2=20 home=1 kind=node lastLevelCaches=1 \
             resource.kubernetes.io/numaNode=1 socket=1 threadsPerCore=2 tier=dram"
        );
        assert_eq!(
            text(&devices[2]),
            "distanceTo0=30 distanceTo1=20 distanceTo2=10 home=1 kind=memory resource.kubernetes.io/numaNode=2 socket=1 tier=cxl"
        );
    }

    #[test]
    fn value_is_charged_and_free_amount() {
        let devices = NodeDevices::new(&machine(), &BTreeMap::new(), true);
        let free = [(NodeId(0), amounts(6, 1024)), (NodeId(1), amounts(0, 0))].into();
        let consumed: Amounts =
            [(CPU.into(), Quantity::whole(2)), ("memory".into(), Quantity::whole(7 << 30))].into();
        let devices = devices.publish(&free, &[(NodeId(0), consumed)].into());
        let node = devices.iter().find(|device| &*device.name == "node-0").unwrap();
        let capacity = |name: &str| {
            let Capacity { value, request_policy } = node.capacity[name];
            let policy = request_policy.unwrap();
            let range = policy.valid_range.map(|range| (range.min, range.max, range.step));
            (value.units().unwrap(), policy.default.units().unwrap(), range)
        };
        let range = |step| Some((Quantity::whole(0), None, Some(Quantity::whole(step))));
        assert_eq!(capacity("cpu"), (8, 0, range(2)));
        assert_eq!(capacity("memory"), (8 << 30, 0, range(1 << 20)));
        assert_eq!(capacity("hugepages2Mi"), (0, 0, None), "a step above the value is invalid");
        assert_eq!(node.capacity.len(), 4);
    }

    #[test]
    fn least_free_node_is_first() {
        let devices = NodeDevices::new(&machine(), &BTreeMap::new(), false);
        let order = |zero: NodeAmounts, one: NodeAmounts| {
            let consumed = |cpus, mib: u64| -> Amounts {
                [
                    (CPU.into(), Quantity::whole(8 - cpus)),
                    ("memory".into(), Quantity::whole((8192 - mib) << 20)),
                ]
                .into()
            };
            let charged = [&zero, &one].map(|of| consumed(of.cpus, of.memory[&ZoneKind::Memory] >> 20));
            let charged = charged.into_iter().enumerate();
            let charged = charged.map(|(node, amounts)| (NodeId(u32::try_from(node).unwrap()), amounts));
            let free = [(NodeId(0), zero), (NodeId(1), one), (NodeId(2), amounts(0, 0))].into();
            names(&devices.publish(&free, &charged.collect())).join(" ")
        };
        assert_eq!(order(amounts(8, 8192), amounts(8, 8192)), "node-0 node-1 memory-2");
        assert_eq!(order(amounts(8, 8192), amounts(7, 8192)), "node-1 node-0 memory-2");
        assert_eq!(order(amounts(8, 4096), amounts(7, 8192)), "node-0 node-1 memory-2");
        assert_eq!(order(amounts(4, 8192), amounts(7, 1024)), "node-1 node-0 memory-2");
    }

    #[test]
    fn host_has_amounts_of_all_nodes() {
        let devices = NodeDevices::new(&machine(), &BTreeMap::new(), true);
        let free =
            [(NodeId(0), amounts(6, 1024)), (NodeId(1), amounts(4, 2048)), (NodeId(2), amounts(0, 512))];
        let request = |cpus, mib: u64| -> Amounts {
            [(CPU.into(), Quantity::whole(cpus)), ("memory".into(), Quantity::whole(mib << 20))].into()
        };
        let values = |charged: &Amounts, refused: &[Amounts]| {
            let host = devices.publish_host(&free.clone().into(), charged, refused);
            assert_eq!((&*host.name, host.has_binding_conditions), ("host", true));
            assert_eq!(host.attributes["kind"], Attribute::Text("host".into()));
            [CPU, "memory"]
                .map(|name| host.capacity[name].value.units().unwrap() >> if name == CPU { 0 } else { 20 })
        };
        assert_eq!(values(&Amounts::new(), &[]), [10, 3584]);
        assert_eq!(values(&request(2, 1024), &[]), [12, 4608]);
        // Eight CPUs of ten are a larger part than one of 3.5 GiB. The scheduler still counts what claims have.
        assert_eq!(values(&Amounts::new(), &[request(8, 1024)]), [6, 3584]);
        assert_eq!(values(&request(2, 0), &[request(8, 1024)]), [8, 3584]);
        assert_eq!(values(&Amounts::new(), &[request(2, 3000)]), [10, 2999]);
        assert_eq!(values(&Amounts::new(), &[request(2, 3000), request(8, 8)]), [6, 2999]);
        assert_eq!(values(&Amounts::new(), &[request(0, 0)]), [10, 3584]);
    }

    #[test]
    fn devices_have_nodes() {
        assert_eq!(["node-0", "memory-12"].map(node_of_device), [Some(NodeId(0)), Some(NodeId(12))]);
        let invalid =
            ["", "node", "node-", "node-+1", "node-01", "node--1", "node-1x", "node-4294967296", "host"];
        assert_eq!(invalid.map(node_of_device), [None; 9]);
    }

    #[test]
    fn claims_charge_their_nodes() {
        let machine = machine();
        let reserved = [(ZoneKind::Memory, "1Gi".parse().unwrap())].into();
        let config = PolicyConfig {
            cpu_manager_policy: CpuManagerPolicy::Static,
            reserved_system_cpus: "0".parse().unwrap(),
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits: reserved }],
            ..PolicyConfig::default()
        };
        let strategy = NativeStrategy::new(&machine, &config, &NativeOptions::default()).unwrap();
        let consumed: Amounts =
            [(CPU.into(), Quantity::whole(2)), ("memory".into(), Quantity::whole(1 << 30))].into();
        let mut ledger = strategy.idle();
        for (part, node) in [(0, NodeId(1)), (1, NodeId(1)), (2, NodeId(0))] {
            let (request, terms) = placement_request(part_owner("uid", part), Some(node), &consumed);
            let decision = strategy.admit_watched(&ledger, &request, &terms, &|_| {});
            decision.outcome.unwrap();
            ledger = decision.ledger;
        }
        ledger = strategy.admit(&ledger, &Request::workload("other", Resources::none())).ledger;
        assert_eq!(charged_to_host(&ledger), Amounts::new());
        let (request, terms) = placement_request(part_owner("host", 0), None, &consumed);
        ledger = strategy.admit_watched(&ledger, &request, &terms, &|_| {}).ledger;
        assert_eq!(charged_to_host(&ledger), consumed);
        let charged = charged(&ledger, &machine);
        let of = |node| {
            charged.get(&NodeId(node)).map(|of| (of[CPU].units().unwrap(), of["memory"].units().unwrap()))
        };
        assert_eq!([0, 1, 2].map(of), [Some((2, 1 << 30)), Some((4, 2 << 30)), None]);
    }

    #[test]
    fn only_whole_cores_count() {
        let machine = machine();
        let pool: CpuSet = machine.nodes[&NodeId(0)].cpus.iter().skip(1).collect();
        let of = |has_whole_cores| {
            NodeDevices::new(&machine, &BTreeMap::new(), has_whole_cores).usable_cpus(NodeId(0), &pool)
        };
        assert_eq!((of(false), of(true)), (7, 6));
    }
}

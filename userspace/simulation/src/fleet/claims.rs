//! Simulation of resource claims: the claims of pods, and the devices that hosts publish for them.
//!
//! # Claims
//! Each Guaranteed pod has one claim, with a request for each container that runs together with others, or in pod scope one for
//! all of them, with its whole CPUs and its memory; CPUs that are not whole are shared. The topology policy determines the
//! alternatives of a request:
//!
//! | policy | alternatives |
//! |---|---|
//! | `single-numa-node` | one node |
//! | `restricted` | equal parts on the smallest power of two of nodes that an idle host could serve |
//! | `best-effort`, `none` | one node; equal parts on 2, 4 and 8 nodes |
//!
//! Several nodes are preferably on one socket. With [`ClaimDevices::has_host_device`], the last alternative is the host device, unless
//! the policy is `single-numa-node`. All other pods share the CPUs, and have no claims.
//!
//! # Hosts
//! A host publishes a device for each node with CPUs, and the host device with the sum of the free amounts. The slices are always up
//! to date. It prepares a claim when the pod is bound: each part on its node, as a workload of its own that is not moved. For the host
//! device, its strategy chooses the nodes, and moves other workloads on this device if necessary, before the pod is bound.

use std::{collections::BTreeMap, sync::Arc};

use numaward_topology::{CpuSet, Machine, NodeId};

use numaward_engine::{
    claims::{
        allocator::{
            Alternatives, Amounts, Attribute, Capacity, Claim, ClaimRequest, Constraint, Device,
            DeviceRequest, Relation, RequestPolicy, Selector, Slice, allocate,
        },
        devices::{CPU, DRIVER, NODE, NUMA_NODE, NodeAmounts, NodeDevices, capacity_name},
    },
    ledger::Ledger,
    policy::{CpuOptions, PolicyConfig, TopologyManagerPolicy, TopologyManagerScope},
    quantity::Quantity,
    request::{ContainerRequest, Request, Resources},
    strategy::Allocatable,
};

/// Value of the attribute `kind` of the host device.
const HOST: &str = "host";

/// Number of points for an allocation of the first alternative: the largest number of alternatives.
const FIRST_SCORE: u64 = 8;

/// Name of the only request of a claim's alternatives on one socket.
const NEAR: &str = "near";

/// A part of a claim on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimShare {
    /// `None` on the host device.
    pub(super) node: Option<NodeId>,
    pub(super) consumed: Amounts,
}

/// An allocation of a pod's claim on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClaimAllocation {
    pub(super) shares: Vec<ClaimShare>,
    /// Points of the scheduler for the alternatives.
    pub(super) score: u64,
}

/// The devices of a host, and the amounts that claims have of them.
#[derive(Clone, Debug, Default)]
pub(super) struct HostDevices {
    slices: Vec<Slice>,
    /// Amounts of the claims of all bound pods.
    allocated: BTreeMap<Option<NodeId>, Amounts>,
    /// Amounts of the claims that the host has prepared.
    prepared: BTreeMap<Option<NodeId>, Amounts>,
}

/// Devices of equal hosts.
pub(super) struct ClaimDevices {
    devices: NodeDevices,
    /// Allocatable CPUs of each node.
    cpus: BTreeMap<NodeId, CpuSet>,
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    has_host_device: bool,
    /// Slices of an idle host.
    idle: Vec<Slice>,
}

impl ClaimDevices {
    /// Creates the devices of hosts. Fails if the policy has an option that does not exist.
    pub(super) fn new(
        (machine, policy, allocatable): (&Machine, &PolicyConfig, &Allocatable),
        has_host_device: bool,
    ) -> Result<Self, String> {
        let options = CpuOptions::parse(policy).map_err(|error| error.to_string())?;
        let cpus = machine.nodes.iter().map(|(&node, of)| (node, &allocatable.cpus & &of.cpus)).collect();
        Ok(Self {
            devices: NodeDevices::new(machine, &BTreeMap::new(), options.full_pcpus_only),
            cpus,
            policy: policy.topology_manager_policy,
            scope: policy.topology_manager_scope,
            has_host_device,
            idle: Vec::new(),
        })
    }

    /// Returns the devices of an idle host.
    pub(super) fn idle_host(&mut self, idle: &Ledger) -> HostDevices {
        let mut host = HostDevices::default();
        self.publish(&mut host, idle);
        self.idle.clone_from(&host.slices);
        host
    }

    /// Updates the devices of a host.
    pub(super) fn publish(&self, host: &mut HostDevices, ledger: &Ledger) {
        let free = |(&node, cpus): (&NodeId, &CpuSet)| {
            let account = ledger.nodes().get(&node);
            let memory = account.into_iter().flat_map(|account| &account.kinds);
            let amounts = NodeAmounts {
                cpus: self.devices.usable_cpus(node, &(ledger.shared_pool() & cpus)),
                memory: memory.map(|(&kind, account)| (kind, account.free.0)).collect(),
            };
            (node, amounts)
        };
        let free: BTreeMap<_, _> = self.cpus.iter().map(free).collect();
        let prepared = host.prepared.iter().filter_map(|(node, amounts)| Some(((*node)?, amounts.clone())));
        let mut devices = self.devices.publish(&free, &prepared.collect());
        devices.retain(|device| device.attributes.get("kind") == Some(&Attribute::Text(NODE.into())));
        for device in &mut devices {
            device.consumed = host.allocated.get(&node_of(device)).cloned().unwrap_or_default();
        }
        let slice = |pool: &str, devices| Slice {
            name: pool.into(),
            driver: DRIVER.into(),
            pool: pool.into(),
            devices,
        };
        host.slices = vec![slice("nodes", devices)];
        if self.has_host_device {
            host.slices.push(slice(HOST, vec![self.host_device(host, &free)]));
        }
    }

    /// Returns the host device: the free amounts of all nodes, and those of its own claims.
    fn host_device(&self, host: &HostDevices, free: &BTreeMap<NodeId, NodeAmounts>) -> Device {
        let of_claims = |claims: &BTreeMap<_, Amounts>| claims.get(&None).cloned().unwrap_or_default();
        let mut sums = of_claims(&host.prepared);
        let mut add = |name: &str, amount: u64| {
            let sum = sums.entry(name.into()).or_default();
            *sum = sum.checked_add(Quantity::whole(amount)).unwrap_or(*sum);
        };
        for free in free.values() {
            add(CPU, free.cpus);
            for (&kind, &bytes) in &free.memory {
                if let Some(name) = capacity_name(kind) {
                    add(name, bytes);
                }
            }
        }
        let nodes = self.idle.iter().chain(&host.slices).flat_map(|slice| &slice.devices);
        let policies = nodes.flat_map(|device| &device.capacity);
        let mut capacity: BTreeMap<_, Capacity> = BTreeMap::new();
        for (name, of_node) in policies {
            let value = sums.get(name).copied().unwrap_or_default();
            let known = capacity.entry(Arc::clone(name)).or_insert(Capacity { value, ..*of_node });
            let range = of_node.request_policy.and_then(|policy| policy.valid_range);
            if let Some(policy) = &mut known.request_policy {
                policy.valid_range = policy.valid_range.or(range);
            }
        }
        for capacity in capacity.values_mut() {
            let step = |policy: &RequestPolicy| policy.valid_range.and_then(|range| range.step);
            if let Some(policy) = &mut capacity.request_policy
                && step(policy).is_some_and(|step| step > capacity.value)
            {
                policy.valid_range = None;
            }
        }
        Device {
            name: HOST.into(),
            attributes: [("kind".into(), Attribute::Text(HOST.into()))].into(),
            capacity,
            allow_multiple_allocations: true,
            has_binding_conditions: true,
            consumed: of_claims(&host.allocated),
            is_taken: false,
        }
    }

    /// Returns the claim of a pod; `None` if it needs none.
    pub(super) fn claim(&self, request: &Request) -> Option<Claim> {
        let units = self.units(request);
        let mut claim = Claim::default();
        for (number, unit) in units.into_iter().filter(|unit| !unit.is_empty()).enumerate() {
            let name: Arc<str> = format!("unit-{number}").into();
            let alternatives = self.alternatives(&unit);
            if let Alternatives::FirstAvailable(all) = &alternatives {
                let near = all.iter().filter(|(alternative, _)| alternative.starts_with(NEAR));
                claim.constraints.extend(near.map(|(alternative, _)| Constraint {
                    relation: Relation::MatchAttribute(format!("{DRIVER}/socket").into()),
                    requests: vec![format!("{name}/{alternative}").into()],
                }));
            }
            claim.requests.push(ClaimRequest { name, alternatives });
        }
        (!claim.requests.is_empty()).then_some(claim)
    }

    /// Returns the amounts that have to be near to each other.
    fn units(&self, request: &Request) -> Vec<Amounts> {
        let amounts = |container: &ContainerRequest| unit(&container.requests);
        let running = request.init_containers.iter().filter(|init| init.restartable);
        let mut units: Vec<Amounts> = running.chain(&request.containers).map(amounts).collect();
        let combine = |units: &[Amounts]| {
            let mut all = Amounts::new();
            for (name, &amount) in units.iter().flatten() {
                let sum = all.entry(Arc::clone(name)).or_default();
                *sum = sum.checked_add(amount).unwrap_or(*sum);
            }
            all
        };
        if let Some(pod) = &request.resources {
            units = vec![unit(&pod.requests)];
        } else if self.scope == TopologyManagerScope::Pod {
            units = vec![combine(&units)];
        }
        // An init container uses the resources of the app containers before these start.
        if let Some(first) = units.first_mut() {
            for init in request.init_containers.iter().filter(|init| !init.restartable) {
                for (name, amount) in amounts(init) {
                    let most = first.entry(name).or_default();
                    *most = (*most).max(amount);
                }
            }
        }
        units
    }

    fn alternatives(&self, unit: &Amounts) -> Alternatives {
        use TopologyManagerPolicy::{BestEffort, None, Restricted, SingleNumaNode};
        let nodes = self.cpus.values().filter(|cpus| !cpus.is_empty()).count();
        let counts = || [1, 2, 4, 8].into_iter().filter(|&count| count <= nodes);
        let is_served = |&count: &usize| {
            let alternatives = Alternatives::Exactly(part(unit, count, NODE));
            let request = ClaimRequest { name: "idle".into(), alternatives };
            allocate(&self.idle, &[Claim { requests: vec![request], constraints: Vec::new() }]).is_some()
        };
        let counts: Vec<usize> = match self.policy {
            SingleNumaNode => vec![1],
            Restricted => vec![counts().find(is_served).unwrap_or(1)],
            BestEffort | None => counts().collect(),
        };
        let mut all: Vec<(Arc<str>, DeviceRequest)> = Vec::new();
        for count in counts {
            if count > 1 && count < nodes {
                all.push((format!("{NEAR}-{count}").into(), part(unit, count, NODE)));
            }
            all.push((format!("any-{count}").into(), part(unit, count, NODE)));
        }
        if self.has_host_device && self.policy != SingleNumaNode {
            all.push((HOST.into(), part(unit, 1, HOST)));
        }
        match <[_; 1]>::try_from(all) {
            Ok([(_, only)]) => Alternatives::Exactly(only),
            Err(all) => Alternatives::FirstAvailable(all),
        }
    }
}

impl HostDevices {
    /// Returns the allocation of a claim on the host; `None` if it does not fit.
    pub(super) fn allocate(&self, claim: &Claim) -> Option<ClaimAllocation> {
        let mut allocated = ClaimAllocation::default();
        let results = allocate(&self.slices, std::slice::from_ref(claim))?.pop()?;
        let mut scored = None;
        for result in results {
            let (slice, device) = result.device;
            let device = self.slices.get(slice)?.devices.get(device)?;
            if let Some(alternative) =
                result.alternative.filter(|_| scored.replace(result.request) != Some(result.request))
            {
                allocated.score += FIRST_SCORE.saturating_sub(alternative as u64);
            }
            allocated.shares.push(ClaimShare { node: node_of(device), consumed: result.consumed });
        }
        Some(allocated)
    }

    /// Adds the claim of a bound pod.
    pub(super) fn bind(&mut self, shares: &[ClaimShare]) {
        change(&mut self.allocated, shares, |sum, amount| sum.checked_add(amount).unwrap_or(sum));
        self.update_consumed();
    }

    /// Removes the claim of a pod.
    pub(super) fn unbind(&mut self, shares: &[ClaimShare]) {
        change(&mut self.allocated, shares, Quantity::saturating_sub);
        self.update_consumed();
    }

    pub(super) fn prepare(&mut self, shares: &[ClaimShare]) {
        change(&mut self.prepared, shares, |sum, amount| sum.checked_add(amount).unwrap_or(sum));
    }

    pub(super) fn unprepare(&mut self, shares: &[ClaimShare]) {
        change(&mut self.prepared, shares, Quantity::saturating_sub);
    }

    /// Sets the capacities of the host device to the amounts that are in use.
    pub(super) fn close_host_device(&mut self) {
        let devices = self.slices.iter_mut().flat_map(|slice| &mut slice.devices);
        for device in devices.filter(|device| node_of(device).is_none()) {
            for (name, capacity) in &mut device.capacity {
                capacity.value = device.consumed.get(name).copied().unwrap_or_default();
            }
        }
    }

    fn update_consumed(&mut self) {
        for device in self.slices.iter_mut().flat_map(|slice| &mut slice.devices) {
            device.consumed = self.allocated.get(&node_of(device)).cloned().unwrap_or_default();
        }
    }
}

fn change(
    sums: &mut BTreeMap<Option<NodeId>, Amounts>,
    shares: &[ClaimShare],
    by: impl Fn(Quantity, Quantity) -> Quantity,
) {
    for share in shares {
        let sums = sums.entry(share.node).or_default();
        for (name, &amount) in &share.consumed {
            let sum = sums.entry(Arc::clone(name)).or_default();
            *sum = by(*sum, amount);
        }
    }
}

/// Returns the node of a device; `None` for the host device.
fn node_of(device: &Device) -> Option<NodeId> {
    match device.attributes.get(NUMA_NODE) {
        Some(&Attribute::Int(node)) => u32::try_from(node).ok().map(NodeId),
        _ => None,
    }
}

/// Returns the amounts of a claim for these requests: whole CPUs, and memory.
fn unit(requests: &Resources) -> Amounts {
    let cpus = requests.cpu.and_then(Quantity::whole_cpus).map(|cpus| (CPU, Quantity::whole(cpus)));
    let memory = requests.memory.iter().filter_map(|(&kind, &amount)| Some((capacity_name(kind)?, amount)));
    let amounts = cpus.into_iter().chain(memory).filter(|(_, amount)| !amount.is_zero());
    amounts.map(|(name, amount)| (name.into(), amount)).collect()
}

/// Returns the request of equal parts on a number of devices.
fn part(unit: &Amounts, count: usize, kind: &str) -> DeviceRequest {
    let equal =
        |amount: &Quantity| Quantity::whole(amount.units().unwrap_or(u64::MAX).div_ceil(count.max(1) as u64));
    let selectors = vec![
        Selector::Driver(DRIVER.into()),
        Selector::Attribute { name: format!("{DRIVER}/kind").into(), value: Attribute::Text(kind.into()) },
    ];
    let capacity = unit.iter().map(|(name, amount)| (Arc::clone(name), equal(amount))).collect();
    DeviceRequest { selectors, count, capacity }
}

//! Simulation of the Kubernetes scheduler, which selects the host of each pod.
//!
//! # Algorithm
//! The filter is that of the plugin `NodeResourcesFit`: for each resource, the requests of all pods of a host must not exceed its
//! allocatable amount, regardless of NUMA nodes. Among the hosts that pass, the one with the highest score gets the pod; ties are
//! broken at random. The score is `LeastAllocated`: the mean of the free shares of CPUs and memory in whole percent. A container
//! without a request counts with a small default. A plugin, if one is enabled, filters as well, and its score is added:
//! [`super::topology_match`], or `DynamicResources` for the [`super::claims`] of pods. The score of the latter is that of the
//! alternatives, scaled to 100 points for the best host, with the weight 2.
//!
//! Every host is evaluated for each pod. The other plugins of the default profile are not simulated. Except for
//! `NodeResourcesBalancedAllocation`, they would treat all hosts and pods of a simulation alike.
//!
//! Sources: `pkg/scheduler/framework/plugins/noderesources`, `pkg/scheduler/schedule_one.go` and
//! `PodRequests` in `k8s.io/component-helpers/resource`.

use std::collections::BTreeSet;

use numaward_topology::{CpuSet, Machine, NodeId, ZoneKind};

use super::{
    SchedulerPlugin,
    claims::{ClaimAllocation, ClaimDevices, ClaimShare, HostDevices},
    load::Random,
    topology_match::{AlignedRequests, TopologyMatch},
};
use numaward_engine::{
    claims::allocator::Claim,
    ledger::Ledger,
    policy::PolicyConfig,
    qos::QosClass,
    request::{ContainerRequest, Request, Resources, add, raise},
    strategy::Allocatable,
};

/// Default requests in the score of a container without requests: thousandths of a CPU, and bytes.
const DEFAULT_REQUESTS: [u64; 2] = [100, 200 << 20];

/// Amounts of resources: thousandths of CPUs, bytes of base pages, bytes of hugepages by size.
pub(super) type Amounts = Vec<u64>;

/// Requests of a pod as the scheduler counts them.
#[derive(Clone, Debug)]
pub(super) struct PodRequests {
    /// Amounts for the filter.
    total: Amounts,
    /// CPUs and memory for the score.
    weight: [u64; 2],
    /// Amounts for the plugin `NodeResourceTopologyMatch`; `None` unless the pod is Guaranteed.
    pub(super) aligned: Option<AlignedRequests>,
    /// Claim of the pod; `None` unless the pod is Guaranteed and hosts have devices.
    claim: Option<Claim>,
}

/// The scheduler's state of a host.
#[derive(Clone, Debug)]
struct SchedulerHost {
    used: Amounts,
    weight: [u64; 2],
    /// Amounts available on each node, as in the host's `NodeResourceTopology`. Empty if that plugin is not enabled.
    available: Amounts,
    /// Devices for claims. Empty unless they are enabled.
    devices: HostDevices,
}

pub(super) struct Scheduler {
    /// Kinds of memory; base pages come first.
    kinds: Vec<ZoneKind>,
    /// Allocatable amounts of each host.
    capacity: Amounts,
    topology_match: Option<TopologyMatch>,
    claims: Option<ClaimDevices>,
    /// Allocatable CPUs of each node.
    nodes: Vec<(NodeId, CpuSet)>,
    hosts: Vec<SchedulerHost>,
    random: Random,
}

impl Scheduler {
    /// Creates a scheduler without hosts. Fails if the hosts have too many nodes for the plugin.
    pub(super) fn new<'a>(
        (machine, policy, allocatable): (&Machine, &PolicyConfig, &Allocatable),
        requests: impl Iterator<Item = &'a Request>,
        plugin: SchedulerPlugin,
        seed: u64,
    ) -> Result<Self, String> {
        let asked = requests.flat_map(Request::all_containers).flat_map(|of| of.requests.memory.keys());
        let kinds: BTreeSet<ZoneKind> = allocatable.memory.keys().chain(asked).copied().collect();
        let hugepages = kinds.into_iter().filter(|&kind| kind != ZoneKind::Memory);
        let kinds: Vec<ZoneKind> = [ZoneKind::Memory].into_iter().chain(hugepages).collect();
        let of_kind = |kind| {
            let nodes = allocatable.memory.get(kind).into_iter().flat_map(|nodes| nodes.values());
            nodes.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0))
        };
        let mut capacity = vec![1000 * allocatable.cpus.len() as u64];
        capacity.extend(kinds.iter().map(of_kind));
        let nodes = machine.nodes.iter().map(|(&id, node)| (id, &allocatable.cpus & &node.cpus)).collect();
        let topology_match = || {
            let plugin = TopologyMatch::new(machine, policy, capacity.len());
            plugin.ok_or_else(|| {
                "NodeResourceTopologyMatch cannot be simulated on hosts with more than 16 nodes".to_owned()
            })
        };
        let (topology_match, claims) = match plugin {
            SchedulerPlugin::None => (None, None),
            SchedulerPlugin::NodeResourceTopologyMatch => (Some(topology_match()?), None),
            SchedulerPlugin::ResourceClaims { has_host_device } => {
                (None, Some(ClaimDevices::new((machine, policy, allocatable), has_host_device)?))
            }
        };
        let (hosts, random) = (Vec::new(), Random::new(seed));
        Ok(Self { kinds, capacity, topology_match, claims, nodes, hosts, random })
    }

    /// Adds `count` hosts with this ledger.
    pub(super) fn add_hosts(&mut self, count: usize, idle: &Ledger) {
        let host = SchedulerHost {
            used: vec![0; self.capacity.len()],
            weight: [0; 2],
            available: self.available(idle),
            devices: self.claims.as_mut().map(|claims| claims.idle_host(idle)).unwrap_or_default(),
        };
        self.hosts.extend(vec![host; count]);
    }

    /// Returns the requests of a pod.
    pub(super) fn pod_requests(&self, request: &Request) -> PodRequests {
        let amounts = |of: &ContainerRequest| self.amounts(&of.requests);
        let weight = request.effective_amounts(2, |of| {
            let Resources { cpu, memory } = &of.requests;
            let amounts = amounts(of);
            let cpu = if cpu.is_some() { amounts[0] } else { DEFAULT_REQUESTS[0] };
            let memory =
                if memory.contains_key(&ZoneKind::Memory) { amounts[1] } else { DEFAULT_REQUESTS[1] };
            vec![cpu, memory]
        });
        let aligned = || {
            let all = |of: &[ContainerRequest]| of.iter().map(amounts).collect::<Vec<_>>();
            let (init_containers, containers) = (all(&request.init_containers), all(&request.containers));
            // The plugin does not know sidecars: it treats all init containers alike.
            let mut pod = vec![0; self.capacity.len()];
            for container in &containers {
                add(&mut pod, container);
            }
            for container in &init_containers {
                raise(&mut pod, container);
            }
            AlignedRequests { init_containers, containers, pod }
        };
        let is_guaranteed = request.qos() == QosClass::Guaranteed;
        PodRequests {
            total: request.effective_amounts(self.capacity.len(), amounts),
            weight: [weight[0], weight[1]],
            aligned: is_guaranteed.then(aligned),
            claim: self.claims.as_ref().filter(|_| is_guaranteed).and_then(|claims| claims.claim(request)),
        }
    }

    fn amounts(&self, resources: &Resources) -> Amounts {
        let cpu = resources.cpu.map_or(0, |cpu| cpu.millis().unwrap_or(u64::MAX));
        let of_kind = |kind| resources.memory.get(kind).map_or(0, |of| of.units().unwrap_or(u64::MAX));
        [cpu].into_iter().chain(self.kinds.iter().map(of_kind)).collect()
    }

    /// Selects the host of a pod, and the devices of its claim; `None` if no host passes the filters.
    pub(super) fn pick(&mut self, asked: &PodRequests) -> Option<(usize, Vec<ClaimShare>)> {
        let mut hosts: Vec<(usize, u64, ClaimAllocation)> = Vec::new();
        for (number, host) in self.hosts.iter().enumerate() {
            let mut sums = host.used.iter().zip(&asked.total).zip(&self.capacity);
            if sums.any(|((used, asked), all)| *asked > 0 && used.saturating_add(*asked) > *all) {
                continue;
            }
            let mut score = self.least_allocated(host, asked);
            if let (Some(topology_match), Some(aligned)) = (&self.topology_match, &asked.aligned) {
                if !topology_match.fits(&host.available, aligned) {
                    continue;
                }
                score += topology_match.score(&host.available, aligned);
            }
            let mut allocation = ClaimAllocation::default();
            if let Some(claim) = &asked.claim {
                match host.devices.allocate(claim) {
                    Some(found) => allocation = found,
                    None => continue,
                }
            }
            hosts.push((number, score, allocation));
        }
        let most = hosts.iter().map(|(.., allocation)| allocation.score).max().unwrap_or(0);
        let (mut best, mut equal) = (None::<(u64, usize, Vec<ClaimShare>)>, 0);
        for (number, score, allocation) in hosts {
            let score = score + 2 * (allocation.score * 100).checked_div(most).unwrap_or(0);
            match &best {
                Some((most, ..)) if score < *most => continue,
                Some((most, ..)) if score == *most => equal += 1,
                _ => equal = 1,
            }
            // Reservoir sampling: all hosts with the highest score have the same probability.
            if self.random.below(equal) == 0 {
                best = Some((score, number, allocation.shares));
            }
        }
        best.map(|(_, host, shares)| (host, shares))
    }

    fn least_allocated(&self, host: &SchedulerHost, asked: &PodRequests) -> u64 {
        let left = (0..2).map(|of| {
            let (all, used) = (self.capacity[of], host.weight[of].saturating_add(asked.weight[of]));
            let left = u128::from(all.saturating_sub(used)) * 100;
            left.checked_div(u128::from(all)).and_then(|left| u64::try_from(left).ok()).unwrap_or(0)
        });
        left.sum::<u64>() / 2
    }

    /// Adds the requests of a pod, and its claim, to a host.
    pub(super) fn bind(&mut self, host: usize, asked: &PodRequests, shares: &[ClaimShare]) {
        let host = &mut self.hosts[host];
        host.devices.bind(shares);
        add(&mut host.used, &asked.total);
        add(&mut host.weight, &asked.weight);
    }

    /// Subtracts the requests of a pod, and its claim, from a host.
    pub(super) fn unbind(&mut self, host: usize, asked: &PodRequests, shares: &[ClaimShare]) {
        let host = &mut self.hosts[host];
        host.devices.unbind(shares);
        let both = host.used.iter_mut().zip(&asked.total).chain(host.weight.iter_mut().zip(&asked.weight));
        both.for_each(|(used, asked)| *used = used.saturating_sub(*asked));
    }

    /// Updates the amounts that a host publishes.
    pub(super) fn publish(&mut self, host: usize, ledger: &Ledger) {
        self.hosts[host].available = self.available(ledger);
        if let Some(claims) = &self.claims {
            claims.publish(&mut self.hosts[host].devices, ledger);
        }
    }

    /// Notes that a host has prepared a claim.
    pub(super) fn prepare(&mut self, host: usize, shares: &[ClaimShare]) {
        self.hosts[host].devices.prepare(shares);
    }

    /// Offers nothing on a host's device for all nodes until the host publishes its devices again.
    pub(super) fn close_host_device(&mut self, host: usize) {
        self.hosts[host].devices.close_host_device();
    }

    /// Notes that a host has released a prepared claim.
    pub(super) fn unprepare(&mut self, host: usize, shares: &[ClaimShare]) {
        self.hosts[host].devices.unprepare(shares);
    }

    /// Returns the available amounts that the daemon would publish for a host.
    fn available(&self, ledger: &Ledger) -> Amounts {
        if self.topology_match.is_none() {
            return Amounts::new();
        }
        let free = |(node, cpus): &(_, CpuSet)| {
            let account = ledger.nodes().get(node);
            let memory = self.kinds.iter().map(move |kind| {
                account.and_then(|account| account.kinds.get(kind)).map_or(0, |account| account.free.0)
            });
            [1000 * (ledger.shared_pool() & cpus).len() as u64].into_iter().chain(memory)
        };
        self.nodes.iter().flat_map(free).collect()
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::Bytes;

    use super::*;
    use numaward_engine::policy::TopologyManagerPolicy;

    fn container(cpu: &str, memory: &str) -> ContainerRequest {
        let mut resources = Resources::none();
        if !cpu.is_empty() {
            resources = resources.with_cpu(cpu.parse().unwrap());
        }
        if !memory.is_empty() {
            resources = resources.with_memory(memory.parse().unwrap());
        }
        ContainerRequest::guaranteed("c", resources)
    }

    fn scheduler() -> Scheduler {
        let machine = Machine::builder().nodes(1).cores_per_node(10).memory(Bytes::gib(10)).build().unwrap();
        let allocatable = Allocatable {
            cpus: machine.cpu_ids(),
            memory: [(ZoneKind::Memory, [(NodeId(0), Bytes::gib(10))].into())].into(),
        };
        let policy =
            PolicyConfig { topology_manager_policy: TopologyManagerPolicy::None, ..PolicyConfig::default() };
        let mut scheduler =
            Scheduler::new((&machine, &policy, &allocatable), [].into_iter(), SchedulerPlugin::None, 1)
                .unwrap();
        scheduler.add_hosts(2, &Ledger::default());
        scheduler
    }

    #[test]
    fn pod_counts_with_effective_requests() {
        let scheduler = scheduler();
        let sidecar = ContainerRequest { restartable: true, ..container("1", "1Gi") };
        let mut request = Request {
            owner: "p".into(),
            init_containers: vec![container("3", "1Gi"), sidecar, container("2", "7Gi")],
            containers: vec![container("1500m", "1Gi"), container("1", "2Gi")],
            resources: None,
        };
        let asked = scheduler.pod_requests(&request);
        // CPUs of the containers with the sidecar; memory of the last init container with the sidecar.
        assert_eq!(asked.total, [3500, 8 << 30]);
        // The plugin does not add the sidecar.
        assert_eq!(asked.aligned.unwrap().pod, [3000, 7 << 30]);
        request.containers.push(container("", ""));
        let asked = scheduler.pod_requests(&request);
        assert!(asked.aligned.is_none(), "not Guaranteed");
        assert_eq!((asked.total[0], asked.weight[0]), (3500, 3600));
    }

    #[test]
    fn hugepages_are_separate_resources() {
        let machine = Machine::builder().nodes(1).cores_per_node(10).memory(Bytes::gib(10)).build().unwrap();
        let mut huge = container("1", "1Gi");
        huge.requests.memory.insert("hugepages-2Mi".parse().unwrap(), "4Mi".parse().unwrap());
        let request = Request {
            owner: "p".into(),
            init_containers: Vec::new(),
            containers: vec![huge],
            resources: None,
        };
        let memory: std::collections::BTreeMap<_, _> = [("memory", 10 << 30), ("hugepages-2Mi", 6 << 20)]
            .map(|(kind, bytes)| (kind.parse().unwrap(), [(NodeId(0), Bytes(bytes))].into()))
            .into();
        let allocatable = Allocatable { cpus: machine.cpu_ids(), memory };
        let on = (&machine, &PolicyConfig::default(), &allocatable);
        let mut scheduler = Scheduler::new(on, [&request].into_iter(), SchedulerPlugin::None, 1).unwrap();
        scheduler.add_hosts(1, &Ledger::default());
        let asked = scheduler.pod_requests(&request);
        assert_eq!((asked.total.as_slice(), asked.weight), (&[1000, 1 << 30, 4 << 20][..], [1000, 1 << 30]));
        assert_eq!(scheduler.pick(&asked), Some((0, Vec::new())));
        scheduler.bind(0, &asked, &[]);
        assert_eq!(scheduler.pick(&asked), None);
    }

    #[test]
    fn emptiest_host_gets_the_pod() {
        let mut scheduler = scheduler();
        let workload = |cpu: &str, memory: &str| Request {
            owner: "p".into(),
            init_containers: Vec::new(),
            containers: vec![container(cpu, memory)],
            resources: None,
        };
        let small = scheduler.pod_requests(&workload("1", "1Gi"));
        let chosen: BTreeSet<_> = (0..20).map(|_| scheduler.pick(&small).map(|(host, _)| host)).collect();
        assert_eq!(chosen, [Some(0), Some(1)].into(), "chance picks of equal ones");
        let large = scheduler.pod_requests(&workload("2", "6Gi"));
        scheduler.bind(0, &large, &[]);
        let asked = scheduler.pod_requests(&workload("4", "1Gi"));
        scheduler.bind(1, &asked, &[]);
        // With the pod, 70 % of CPUs and 30 % of memory are free on the first host, 50 % and 80 % on the second.
        assert_eq!(scheduler.least_allocated(&scheduler.hosts[0], &small), 50);
        assert_eq!(scheduler.least_allocated(&scheduler.hosts[1], &small), 65);
        assert_eq!(scheduler.pick(&small), Some((1, Vec::new())));
        assert_eq!(
            scheduler.pick(&scheduler.pod_requests(&workload("7", "1Gi"))),
            Some((0, Vec::new())),
            "only there is room"
        );
        assert_eq!(scheduler.pick(&scheduler.pod_requests(&workload("9", "1Gi"))), None);
        scheduler.unbind(0, &large, &[]);
        assert_eq!(scheduler.pick(&small), Some((0, Vec::new())));
    }
}

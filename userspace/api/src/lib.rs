//! Types of the HTTP API and of `-o json`.
//!
//! Names are camelCase and sizes are in bytes. Sets of CPUs and nodes are lists in the kernel's format (`0-3,8`); a
//! single node is a number.

#![forbid(unsafe_code)]

mod activity;
mod allocation;
pub mod claim_template;
pub mod doctor;
mod enforcement;
mod event;
mod history;
pub mod import;
mod kubelet_state;
mod placement;
pub mod problem;
mod rebalance;
mod regions;
mod reload;
pub mod restore;
pub mod safe_text;
mod sample;
pub mod simulation;
mod stacks;
mod usage;

use std::collections::{BTreeMap, BTreeSet};

use numaward_topology::{CpuSet, Machine, NodeSet, SocketId};
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

pub use self::{
    activity::{Activity, NodeAccesses, RemoteAccesses, Stalls},
    allocation::{
        Allocation, AllocationRequest, Allocations, CpuKind, DryRun, Explanation, GuaranteeRefusal, Hint,
        KindCapacity, MemoryBlock, MemoryPolicy, MemoryTier, Merge, MergeCandidate, MissingCapacity,
        MissingKind, MovedPages, NodeCapacity, PartitionKind, PendingGuarantee, PodContainer, Rejection,
        ReservedClaim, ResizeOutcome, ResourceHints, Shortfall, Target, Tiers, TopologyManagerPolicy,
        UnknownName,
    },
    enforcement::{
        AutoPlacedWorkload, ConfinedCgroup, ConfinementState, CpuIsolation, Drift, DriftDetection,
        DriftState, Enforcement, EnforcementMode, KnobWriter, PendingRestore,
    },
    event::{Event, EventFilter, EventKind, EventPage, Severity},
    history::{
        History, HostSeries, MAX_HISTORIES, NodeSeries, Trend, Trends, WorkloadHistory, WorkloadSeries,
    },
    kubelet_state::KubeletState,
    placement::{Cpus, Placement, Resize},
    problem::Problem,
    rebalance::{
        BytesSource, MigrationRate, Move, MovePlan, MoveState, PlanRequest, RateSource, Rebalance,
        RebalanceRequest, RebalanceState,
    },
    regions::{MAX_REGIONS, Region, RegionNode, Regions},
    reload::{ChangedKey, Reload},
    sample::Sample,
    stacks::{CallStack, MAX_STACKS, StackKind, Stacks},
    usage::{HourlyAllocations, NodeCpuUsage, Usage, UsageLevels, WorkloadUsage},
};

/// The version of numaward.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The machine: nodes, distances, sockets and caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// The online NUMA nodes, by id.
    pub nodes: Vec<TopologyNode>,
    /// The sockets, by id.
    pub sockets: Vec<Socket>,
    /// The last-level caches.
    pub last_level_caches: Vec<Cache>,
    /// The physical cores.
    #[serde(default)]
    pub cores: Vec<Core>,
    /// Online CPUs, as a list.
    #[schema(examples("0-7"))]
    pub online_cpus: String,
    /// CPUs that may ever come online, as a list.
    pub possible_cpus: String,
    /// CPUs kept from the scheduler's load balancing (`isolcpus=`), as a list.
    pub isolated_cpus: String,
    /// CPUs that stop their tick while one task runs (`nohz_full=`), as a list.
    #[serde(default)]
    pub nohz_full_cpus: String,
    /// CPUs of cores that are slower than the fastest core of the machine, as a list.
    #[serde(default)]
    pub efficiency_cpus: String,
    /// CPUs with a maximum frequency below that of the fastest CPU of the machine, as a list. Also empty if the
    /// frequencies are unknown.
    #[serde(default)]
    pub lower_frequency_cpus: String,
    /// Size of a memory block, the unit of memory hotplug; 0 if the machine has no memory blocks.
    pub memory_block_size_bytes: u64,
}

/// A NUMA node of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TopologyNode {
    /// The id of the node.
    pub node: u32,
    /// The CPUs of the node, as a list; empty for a memory-only node.
    pub cpus: String,
    /// The usable memory of the node, hugepage pools included.
    pub memory_bytes: u64,
    /// The hugepage pools of the node, by page size.
    pub hugepages: Vec<HugepagePool>,
    /// Relative distances to all nodes, by id; the distance to the node itself is 10.
    // JSON objects have text keys.
    #[schema(value_type = BTreeMap<String, u32>)]
    pub distances: BTreeMap<u32, u32>,
    /// True if the node has memory but no CPUs.
    pub memory_only: bool,
    /// The type of memory of the node, from the kernel's memory tiers; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_tier: Option<MemoryTier>,
}

/// A pool of hugepages of one size on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Hugepages)]
pub struct HugepagePool {
    /// The page size in Kubernetes' notation.
    #[schema(examples("2Mi", "1Gi"))]
    pub size: String,
    /// The page size in bytes.
    pub size_bytes: u64,
    /// The number of pages in the pool.
    pub total_pages: u64,
    /// The number of free pages.
    pub free_pages: u64,
    /// The number of surplus pages, which exceed the configured size of the pool.
    pub surplus_pages: u64,
}

/// A socket (physical package).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Socket {
    /// The id of the socket (`physical_package_id`).
    pub socket: u32,
    /// The online CPUs of the socket, as a list.
    pub cpus: String,
    /// The NUMA nodes of these CPUs, as a list.
    pub nodes: String,
    /// The number of physical cores with an online CPU.
    pub cores: u32,
}

/// A last-level cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cache {
    /// The CPUs that share the cache, as a list.
    pub cpus: String,
}

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Core {
    /// The online CPUs of the core (SMT siblings), as a list.
    #[schema(examples("2,34"))]
    pub cpus: String,
}

impl From<&Machine> for Topology {
    fn from(machine: &Machine) -> Self {
        let mut sockets: BTreeMap<SocketId, (CpuSet, NodeSet, BTreeSet<_>)> = BTreeMap::new();
        let mut caches: BTreeMap<_, CpuSet> = BTreeMap::new();
        let mut siblings: BTreeMap<_, CpuSet> = BTreeMap::new();
        for (&id, cpu) in &machine.cpus {
            let (cpus, nodes, cores) = sockets.entry(cpu.socket).or_default();
            cpus.insert(id);
            nodes.insert(cpu.node);
            cores.insert(cpu.core);
            siblings.entry(cpu.core).or_default().insert(id);
            if let Some(cache) = cpu.last_level_cache {
                caches.entry(cache).or_default().insert(id);
            }
        }
        Self {
            nodes: machine
                .nodes
                .iter()
                .map(|(id, node)| TopologyNode {
                    node: id.0,
                    cpus: node.cpus.to_string(),
                    memory_bytes: node.memory.0,
                    hugepages: node
                        .hugepages
                        .iter()
                        .map(|(size, pool)| HugepagePool {
                            size: size.to_string(),
                            size_bytes: size.0.0,
                            total_pages: pool.total,
                            free_pages: pool.free,
                            surplus_pages: pool.surplus,
                        })
                        .collect(),
                    distances: node.distances.iter().map(|(node, distance)| (node.0, *distance)).collect(),
                    memory_only: node.cpus.is_empty() && node.memory.0 > 0,
                    memory_tier: numaward_engine::native::memory_tier(node),
                })
                .collect(),
            sockets: sockets
                .into_iter()
                .map(|(id, (cpus, nodes, cores))| Socket {
                    socket: id.0,
                    cpus: cpus.to_string(),
                    nodes: nodes.to_string(),
                    cores: u32::try_from(cores.len()).unwrap_or(u32::MAX),
                })
                .collect(),
            last_level_caches: caches.values().map(|cpus| Cache { cpus: cpus.to_string() }).collect(),
            cores: siblings.values().map(|cpus| Core { cpus: cpus.to_string() }).collect(),
            online_cpus: machine.cpu_ids().to_string(),
            possible_cpus: machine.possible_cpus.to_string(),
            isolated_cpus: machine.isolated_cpus.to_string(),
            nohz_full_cpus: machine.nohz_full_cpus.to_string(),
            efficiency_cpus: machine.efficiency_cpus.to_string(),
            lower_frequency_cpus: machine.lower_frequency_cpus.clone().unwrap_or_default().to_string(),
            memory_block_size_bytes: machine.memory_block_size.0,
        }
    }
}

/// The nodes and their usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Nodes {
    /// The online nodes, by id.
    pub nodes: Vec<Node>,
    /// Pages that all workloads touched, by scan of NUMA balancing, by the node of the CPU; absent if no probe counts
    /// them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<Vec<NodeAccesses>>,
}

/// A node and its usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// The id of the node.
    pub node: u32,
    /// The CPUs of the node, as a list; empty for a memory-only node.
    pub cpus: String,
    /// The memory of the node, by kind.
    pub memory: Vec<NodeMemory>,
    /// Memory that all workloads allocated on the node; absent if no probe counts allocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<AllocatedBytes>,
}

/// Memory of one kind on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// The kind of memory.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// The total memory of this kind.
    pub total_bytes: u64,
    /// The memory of this kind that is not in use; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
}

/// Bytes allocated on a node since numaward first saw the workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Allocated)]
pub struct AllocatedBytes {
    /// User memory that CPUs of this node allocated.
    pub local_bytes: u64,
    /// User memory that CPUs of other nodes allocated.
    pub remote_bytes: u64,
    /// Kernel memory; a lower bound.
    pub kernel_bytes: u64,
}

/// The workloads of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Workloads {
    /// The workloads, by name.
    pub workloads: Vec<Workload>,
}

/// A workload and its memory since its cgroup was first seen.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// The label `workload` of its metrics. Workloads without a name of their own, such as containers in delegated
    /// subtrees, share one label; their metrics are sums.
    #[schema(examples("postgresql@17-main.service", "docker/web"))]
    pub workload: String,
    /// The kind of workload.
    #[schema(examples("unit", "container", "exec", "cgroup", "other"))]
    pub kind: String,
    /// The cgroup of the workload, as a path below the cgroup mount; deeper cgroups are counted with it. Absent for
    /// `other` and for a removed workload.
    pub cgroup: Option<String>,
    /// The container; absent if the workload is not a container.
    pub container: Option<Container>,
    /// The counters in which its allocations are counted.
    pub counters: Counters,
    /// The memory of the workload, by node.
    pub nodes: Vec<WorkloadNode>,
    /// The user memory of the workload and of the cgroups below it on and off its guaranteed nodes, by kind. Empty
    /// without a memory guarantee, and if it cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residency: Vec<GuaranteeResidency>,
    /// Those of its exclusive CPUs, and of their hidden siblings, on which other tasks ran for at least 0.1 % of five seconds
    /// within the last minute, in the kernel's list format; absent if there are none, and if no probe watches them. Kernel
    /// threads do not count.
    #[schema(examples("2-3"))]
    pub intruded_cpus: Option<String>,
    /// The time that its tasks waited for memory; absent if it cannot be read, or if other workloads are below this
    /// one.
    pub pressure: Option<Pressure>,
    /// The number of processes that the OOM killer killed; absent like `pressure`.
    pub oom_kills: Option<u64>,
    /// Memory that the kernel moved between memory tiers; absent like `pressure`, before Linux 6.12, and on a machine
    /// with one tier.
    pub tiering: Option<Tiering>,
    /// The workload's activity other than allocations; absent if it is not counted separately.
    pub activity: Option<Activity>,
}

/// User memory of one kind of a workload with a memory guarantee, and the verdict on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuaranteeResidency {
    /// The kind of memory.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// Memory on the guaranteed nodes.
    pub on: UserMemory,
    /// Memory on other nodes. The memory of a Burstable workload beyond its guarantee may be on any node, and is not
    /// included.
    pub off: UserMemory,
    /// True if the guarantee is broken: more than 16 MiB and more than 1 % of the anonymous and shared memory are on
    /// other nodes.
    pub broken: bool,
}

/// User memory by type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct UserMemory {
    /// Anonymous memory; of a kind of hugepages, all of it.
    pub anon_bytes: u64,
    /// Shared memory and tmpfs.
    pub shmem_bytes: u64,
    /// Page cache without shared memory.
    pub file_bytes: u64,
}

impl UserMemory {
    /// Returns the memory of all types.
    pub fn total_bytes(&self) -> u64 {
        self.anon_bytes.saturating_add(self.shmem_bytes).saturating_add(self.file_bytes)
    }
}

/// Memory that the kernel moved between memory tiers since the cgroup was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tiering {
    /// Memory moved to a slower tier.
    pub demoted_bytes: u64,
    /// Memory moved to a faster tier.
    pub promoted_bytes: u64,
}

/// A container, as identified by its cgroup.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// The container id of the runtime.
    pub id: String,
    /// The UID of the pod; absent outside Kubernetes.
    pub pod_uid: Option<String>,
    /// The container runtime, by its name in cgroup paths; absent if the path does not contain one.
    #[schema(examples("cri-containerd", "docker"))]
    pub runtime: Option<String>,
}

/// The counters in which a workload's allocations are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Counters {
    /// The workload has its own counters.
    Own,
    /// The workload is counted together with other workloads, because no slot is free.
    Other,
    /// The workload is not counted, because no probe counts allocations.
    None,
    /// The workload had its own counters until its cgroup was removed; these are the last values.
    Removed,
}

/// A workload's memory on one node.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadNode {
    /// The node.
    pub node: u32,
    /// Memory that the workload allocated on the node; absent if it is not counted separately.
    pub allocated: Option<AllocatedBytes>,
    /// Memory that the workload allocated on the node outside its guarantee; absent if it has no memory guarantee, or
    /// if it is not counted separately.
    pub missed_bytes: Option<u64>,
    /// The memory of the workload that is on the node now, without hugepages; absent if it cannot be read.
    pub resident: Option<Resident>,
    /// The time that the workload ran on CPUs of the node, since the daemon first saw it; absent if it cannot be read.
    pub cpu_micros: Option<u64>,
    /// The hugepages of the workload on the node, for each size of which the host has a pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hugepages: Vec<WorkloadHugepages>,
}

/// A workload's hugepages of one size on one node.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadHugepages {
    /// The page size.
    #[schema(examples("2Mi", "1Gi"))]
    pub size: String,
    /// The hugepages that are on the node now (`hugetlb.*.numa_stat`); absent if they cannot be read.
    pub resident_bytes: Option<u64>,
    /// Hugepages that the workload took from the node's pool; absent if it is not counted separately.
    pub allocated: Option<AllocatedHugepages>,
    /// Hugepages that the workload took from the node's pool outside its guarantee; absent if it has no memory
    /// guarantee, or if it is not counted separately.
    pub missed_bytes: Option<u64>,
}

/// Bytes of hugepages taken from a node's pool since the daemon first saw the workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedHugepages {
    /// Hugepages taken by CPUs of this node.
    pub local_bytes: u64,
    /// Hugepages taken by CPUs of other nodes.
    pub remote_bytes: u64,
}

/// Bytes of memory that are on a node (`memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resident {
    /// Anonymous memory.
    pub anon_bytes: u64,
    /// Page cache, tmpfs and shared memory.
    pub file_bytes: u64,
    /// The part of `fileBytes` that is shared memory and tmpfs.
    #[serde(default)]
    pub shmem_bytes: u64,
    /// Kernel stacks, page tables and slabs.
    pub kernel_bytes: u64,
}

/// Time in which tasks waited for memory (`memory.pressure`), in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pressure {
    /// Time in which at least one task waited.
    pub waiting_micros: u64,
    /// Time in which all runnable tasks waited.
    pub stalled_micros: u64,
}

/// The state of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The name of the host; the name of the Kubernetes node, if it is configured.
    #[serde(default)]
    pub host: String,
    /// The version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: u64,
    /// The probes.
    pub probes: Vec<Probe>,
    /// The BPF maps of the probes.
    pub maps: Vec<Map>,
    /// Kernel memory of the BPF maps in bytes, by family of probes.
    #[serde(default)]
    pub map_memory: BTreeMap<String, u64>,
    /// The number of workloads.
    pub workloads: WorkloadCount,
    /// The exclusive CPUs and the time that other tasks used them.
    #[serde(default)]
    pub exclusive_cpus: Vec<ExclusiveCpu>,
    /// The nodes with memory guarantees, at the last check of the guard; empty if the guard is off.
    #[serde(default)]
    pub headroom: Vec<NodeHeadroom>,
    /// The degraded parts, with the reason and what to do.
    pub degraded: Vec<DegradedPart>,
    /// The origin of the reserved CPUs and memory on a Kubernetes node; absent elsewhere, and before it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservations: Option<ReservationOrigin>,
    /// The container runtime of the present or previous connection by NRI; absent before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_runtime: Option<ContainerRuntime>,
}

/// A container runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRuntime {
    /// The name.
    #[schema(examples("containerd"))]
    pub name: String,
    /// The version.
    pub version: String,
    /// The known faults of this version that concern NRI plugins.
    pub faults: Vec<RuntimeFault>,
}

/// A known fault of a container runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeFault {
    /// The fault and its consequence.
    pub finding: String,
    /// The action that avoids the fault.
    pub fix: String,
    /// True if a release of the runtime repairs the fault.
    pub repaired: bool,
}

/// The origin of the reserved CPUs and memory on a Kubernetes node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Reservations)]
pub struct ReservationOrigin {
    /// The source of the reservations that are not configured.
    pub source: String,
    /// The CPUs and memory that the Kubernetes node offers to pods but numaward does not allocate; absent if there are
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess: Option<String>,
}

/// The memory headroom of a node, compared with its guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeHeadroom {
    /// The node.
    pub node: u32,
    /// The available memory of the node: free or reclaimable, without memory that is protected by a guarantee.
    pub obtainable_bytes: u64,
    /// The guaranteed memory that is not used yet.
    pub unused_bytes: u64,
    /// The margin that should be available in addition.
    pub margin_bytes: u64,
    /// True if the headroom is low: less was available, and enough has not been available for long enough since.
    pub low: bool,
}

/// A BPF probe.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Probe {
    /// The name of the probe.
    pub probe: String,
    /// The method by which the probe is attached.
    #[schema(examples("tp_btf", "tracepoint", "absent"))]
    pub mode: String,
    /// The reason why the probe is not attached by the best method; absent for the best method.
    pub reason: Option<String>,
    /// The result of the check at startup, which compares the probe's counts with known allocations.
    pub self_check: Option<String>,
    /// The average time of one run in nanoseconds; absent if the kernel has measured none.
    pub nanoseconds_per_event: Option<u64>,
    /// The number of runs that the kernel measured: for some seconds after the start, and while measuring is requested.
    /// Absent if the probe is not attached.
    pub measured_runs: Option<u64>,
    /// The total time of the measured runs, in nanoseconds.
    pub measured_nanoseconds: Option<u64>,
    /// Events that the kernel dropped before they reached the probe, or that did not fit into its maps; absent if the
    /// probe is not attached.
    pub events_lost: Option<u64>,
    /// The pages that the probe has seen in the last hour, in thousandths of those that the kernel has allocated. Bulk
    /// allocations of the kernel are missing. Absent for probes of other events, with a duty cycle, and while the kernel
    /// has allocated few pages.
    pub coverage_permille: Option<u32>,
    /// The part of the time in which the probe is attached. Its counts are scaled accordingly and are estimates. Absent
    /// if the probe is always attached.
    #[schema(examples("5s/1m"))]
    pub duty_cycle: Option<String>,
}

/// An exclusive CPU, and the tasks that used it since it became exclusive.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExclusiveCpu {
    /// The CPU.
    pub cpu: u32,
    /// The workload with exclusive use of the CPU.
    pub workload: String,
    /// Time of the workload's own tasks, in microseconds, like all times here.
    pub own_micros: u64,
    /// Time of kernel threads.
    pub kernel_thread_micros: u64,
    /// Time of processes that belong to no workload.
    pub host_micros: u64,
    /// Time of processes of other workloads.
    pub workload_micros: u64,
    /// Interrupts of devices, timers and other CPUs; absent if they cannot be read.
    pub hard_interrupts: Option<u64>,
    /// Softirqs; absent if they cannot be read.
    pub soft_interrupts: Option<u64>,
}

/// The maximum number of intruders in a list.
pub const MAX_INTRUDERS: usize = 50;

/// Tasks of other workloads that ran on the exclusive CPUs of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Intruders {
    /// True if intruders are measured now: a CPU is exclusive, and the probe is attached.
    pub watching: bool,
    /// The exclusive CPUs of the workload.
    pub cpus: Vec<ExclusiveCpu>,
    /// The intruders by name, longest time first; at most 50.
    pub intruders: Vec<Intruder>,
}

/// Tasks with the same name that ran on exclusive CPUs of another workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Intruder {
    /// The class of the tasks.
    #[schema(examples("kernel_thread", "host", "workload"))]
    pub class: String,
    /// The workload of the tasks; absent if they belong to none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// The name of the tasks, at most 15 bytes.
    pub command: String,
    /// The time that the tasks ran, in microseconds.
    pub micros: u64,
    /// The number of times that a task was switched in.
    pub runs: u64,
}

/// A BPF map of the probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Map {
    /// The name of the map.
    pub map: String,
    /// Entries in use.
    pub entries: u64,
    /// The maximum number of entries.
    pub capacity: u64,
}

/// The number of workloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadCount {
    /// Workloads with their own counters.
    pub own: u64,
    /// Workloads that are counted together as `other`.
    pub other: u64,
}

/// A part of the daemon that does not work as it should.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Degraded)]
pub struct DegradedPart {
    /// The name of the part.
    #[schema(examples("cgroups", "topology"))]
    pub part: String,
    /// The reason, and what to do.
    pub reason: String,
}

/// The version of the daemon and its environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// The version of numaward.
    pub version: String,
    /// The release of the kernel.
    pub kernel: String,
    /// The architecture for which numaward was built.
    pub architecture: String,
}

impl Version {
    /// Returns this version of numaward on the given kernel release.
    pub fn on(kernel: impl Into<String>) -> Self {
        Self {
            version: VERSION.to_owned(),
            kernel: kernel.into(),
            architecture: std::env::consts::ARCH.to_owned(),
        }
    }
}

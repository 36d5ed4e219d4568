//! What the API serves and `-o json` prints. Names are camelCase, sizes are in bytes, sets are lists in
//! the kernel's format (`0-3,8`), nodes are numbers.

#![forbid(unsafe_code)]

mod activity;
mod allocation;
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
pub mod restore;
pub mod safe_text;
mod sample;
pub mod simulation;
mod stacks;

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
        ResizeOutcome, ResourceHints, Shortfall, Target, Tiers, TopologyManagerPolicy, UnknownName,
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
    sample::Sample,
    stacks::{CallStack, MAX_STACKS, StackKind, Stacks},
};

/// This version of numaward.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The machine: nodes, distances, sockets, caches.
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
    /// CPUs whose tick stops while one task runs (`nohz_full=`), as a list.
    #[serde(default)]
    pub nohz_full_cpus: String,
    /// CPUs of cores that are slower than the fastest of the machine, as a list.
    #[serde(default)]
    pub efficiency_cpus: String,
    /// CPUs that do not reach the frequency of the fastest of the machine, as a list. Empty as well while that is not known.
    #[serde(default)]
    pub lower_frequency_cpus: String,
    /// Size of a memory block (the unit of memory hotplug); 0 where there are none.
    pub memory_block_size_bytes: u64,
}

/// A NUMA node as part of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TopologyNode {
    /// Its id.
    pub node: u32,
    /// Its CPUs, as a list; empty for a memory-only node.
    pub cpus: String,
    /// Its usable memory, hugepage pools included.
    pub memory_bytes: u64,
    /// Its hugepage pools, by page size.
    pub hugepages: Vec<HugepagePool>,
    /// Relative distance to each node by id; 10 is the node itself.
    // Keys of JSON are text.
    #[schema(value_type = BTreeMap<String, u32>)]
    pub distances: BTreeMap<u32, u32>,
    /// Whether it has memory but no CPUs.
    pub memory_only: bool,
    /// What sort of memory it has, by the kernel's memory tiers; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_tier: Option<MemoryTier>,
}

/// Huge pages of one size on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Hugepages)]
pub struct HugepagePool {
    /// The page size, as Kubernetes writes it.
    #[schema(examples("2Mi", "1Gi"))]
    pub size: String,
    /// The page size.
    pub size_bytes: u64,
    /// Pages in the pool.
    pub total_pages: u64,
    /// Pages not in use.
    pub free_pages: u64,
    /// Pages above the configured number.
    pub surplus_pages: u64,
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Socket {
    /// Its id (`physical_package_id`).
    pub socket: u32,
    /// Its online CPUs, as a list.
    pub cpus: String,
    /// The nodes of its CPUs, as a list.
    pub nodes: String,
    /// Number of physical cores that are online.
    pub cores: u32,
}

/// A last-level cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cache {
    /// The CPUs that share it, as a list.
    pub cpus: String,
}

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Core {
    /// Its online CPUs, as a list: SMT siblings.
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

/// The nodes and what happens on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Nodes {
    /// The online nodes, by id.
    pub nodes: Vec<Node>,
    /// Sampled accesses of all workloads, by the node of the CPUs; absent where no probe samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<Vec<NodeAccesses>>,
}

/// A node and what happens on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Its id.
    pub node: u32,
    /// Its CPUs, as a list; empty for a memory-only node.
    pub cpus: String,
    /// Its memory by kind.
    pub memory: Vec<NodeMemory>,
    /// What all workloads allocated on it; absent where no probe counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<AllocatedBytes>,
}

/// Memory of one kind on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// The kind.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// All of it.
    pub total_bytes: u64,
    /// What is not in use; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
}

/// Bytes allocated on a node since numaward saw the workload first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Allocated)]
pub struct AllocatedBytes {
    /// User memory, allocated by a CPU of this node.
    pub local_bytes: u64,
    /// User memory, allocated by a CPU of another node.
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

/// A workload and its memory, since its cgroup was seen first.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// The label `workload` of its metrics. Workloads without a name of their own, such as containers, share
    /// one; their metrics are sums.
    #[schema(examples("postgresql@17-main.service", "docker"))]
    pub workload: String,
    /// What it is.
    #[schema(examples("unit", "container", "exec", "cgroup", "other"))]
    pub kind: String,
    /// Its cgroup below the cgroup mount; deeper ones fold into it. Absent for `other`, and for a workload that
    /// was removed.
    pub cgroup: Option<String>,
    /// Which container it is; absent where it is none.
    pub container: Option<Container>,
    /// Where its allocations are counted.
    pub counters: Counters,
    /// Its memory by node.
    pub nodes: Vec<WorkloadNode>,
    /// Time its tasks lost waiting for memory; absent where it cannot be read, or where other workloads are
    /// below this one.
    pub pressure: Option<Pressure>,
    /// Processes that the OOM killer took; absent like `pressure`.
    pub oom_kills: Option<u64>,
    /// What the kernel moved between memory tiers; absent like `pressure`, before Linux 6.12, and on a machine with one tier.
    pub tiering: Option<Tiering>,
    /// What it did beside allocating; absent where it is not counted by itself.
    pub activity: Option<Activity>,
}

/// Memory that the kernel moved between memory tiers since the cgroup was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tiering {
    /// To slower memory.
    pub demoted_bytes: u64,
    /// To faster memory.
    pub promoted_bytes: u64,
}

/// A container, as far as its cgroup shows.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// The runtime's id.
    pub id: String,
    /// The UID of its pod; absent outside Kubernetes.
    pub pod_uid: Option<String>,
    /// The runtime, as it calls itself in cgroups; absent where it does not.
    #[schema(examples("cri-containerd", "docker"))]
    pub runtime: Option<String>,
}

/// Where a workload's allocations are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Counters {
    /// In counters of its own.
    Own,
    /// Together with others, because no slot is free.
    Other,
    /// Nowhere: no probe counts.
    None,
    /// In counters of its own until its cgroup was removed; these are its last values.
    Removed,
}

/// A workload's memory on one node.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadNode {
    /// The node.
    pub node: u32,
    /// What it allocated there; absent where it is not counted by itself.
    pub allocated: Option<AllocatedBytes>,
    /// What it allocated there although the node is not promised to it; absent where nothing is promised to
    /// it, or where it is not counted by itself.
    pub missed_bytes: Option<u64>,
    /// What lies there now, hugepages apart; absent where it cannot be read.
    pub resident: Option<Resident>,
    /// Its hugepages there, by size: of sizes that the host has pools of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hugepages: Vec<WorkloadHugepages>,
}

/// A workload's hugepages of one size on one node.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadHugepages {
    /// The size of a page.
    #[schema(examples("2Mi", "1Gi"))]
    pub size: String,
    /// What lies there now (`hugetlb.*.numa_stat`); absent where it cannot be read.
    pub resident_bytes: Option<u64>,
    /// What it took from the node's pool; absent where it is not counted by itself.
    pub allocated: Option<AllocatedHugepages>,
    /// What it took there although the node is not promised to it; absent where nothing is promised to it, or where it
    /// is not counted by itself.
    pub missed_bytes: Option<u64>,
}

/// Bytes of hugepages taken from a node's pool since the daemon saw the workload first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedHugepages {
    /// By a CPU of this node.
    pub local_bytes: u64,
    /// By a CPU of another node.
    pub remote_bytes: u64,
}

/// Bytes that lie on a node (`memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resident {
    /// Anonymous memory.
    pub anon_bytes: u64,
    /// Page cache, tmpfs and shared memory.
    pub file_bytes: u64,
    /// Kernel stacks, page tables and slabs.
    pub kernel_bytes: u64,
}

/// Time lost waiting for memory (`memory.pressure`), in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pressure {
    /// At least one task waited.
    pub waiting_micros: u64,
    /// All tasks that had work waited.
    pub stalled_micros: u64,
}

/// How numaward itself is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The name of the host: that of the Kubernetes node where it is configured.
    #[serde(default)]
    pub host: String,
    /// Its version.
    pub version: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// The probes.
    pub probes: Vec<Probe>,
    /// The maps of the probes.
    pub maps: Vec<Map>,
    /// Bytes of kernel memory that the maps of each family of probes take.
    #[serde(default)]
    pub map_memory: BTreeMap<String, u64>,
    /// How many workloads there are.
    pub workloads: WorkloadCount,
    /// The exclusive CPUs, and how clean each is.
    #[serde(default)]
    pub exclusive_cpus: Vec<ExclusiveCpu>,
    /// The nodes on which memory is promised, as the guard saw them last; none where it does not look.
    #[serde(default)]
    pub headroom: Vec<NodeHeadroom>,
    /// What does not work, why, and what to do.
    pub degraded: Vec<DegradedPart>,
}

/// How a node is doing against what is promised on it and not used yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeHeadroom {
    /// The node.
    pub node: u32,
    /// Memory that is still available: free or reclaimable, and not held by a promise.
    pub obtainable_bytes: u64,
    /// What is promised there and not used yet.
    pub unused_bytes: u64,
    /// How much more than that is to be there.
    pub margin_bytes: u64,
    /// Whether the node is low: there was less, and there has not been enough for a while since.
    pub low: bool,
}

/// A probe.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Probe {
    /// Its name.
    pub probe: String,
    /// How it is attached.
    #[schema(examples("tp_btf", "tracepoint", "absent"))]
    pub mode: String,
    /// Why not better; absent for the best way.
    pub reason: Option<String>,
    /// Its counts against known allocations at the start.
    pub self_check: Option<String>,
    /// Nanoseconds of a run on average; absent unless the kernel measured some.
    pub nanoseconds_per_event: Option<u64>,
    /// Runs that the kernel measured: for some seconds after the start, and while it is asked to. Absent where the
    /// probe is not attached.
    pub measured_runs: Option<u64>,
    /// The time of all these runs, in nanoseconds.
    pub measured_nanoseconds: Option<u64>,
    /// Events that the kernel did not hand to it, or for which its maps had no room; absent where it is not attached.
    pub events_lost: Option<u64>,
    /// For which part of the time it is attached: what it counts is then multiplied accordingly, and so is an estimate.
    /// Absent where that is all the time.
    #[schema(examples("5s/1m"))]
    pub duty_cycle: Option<String>,
}

/// A CPU that is exclusive to a workload, and who used it since it first was.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExclusiveCpu {
    /// The CPU.
    pub cpu: u32,
    /// The workload.
    pub workload: String,
    /// Time of the workload's own tasks, in microseconds like the others.
    pub own_micros: u64,
    /// Time of kernel threads.
    pub kernel_thread_micros: u64,
    /// Time of processes of no workload.
    pub host_micros: u64,
    /// Time of processes of other workloads.
    pub workload_micros: u64,
    /// Interrupts of devices, timers and other CPUs; absent where they cannot be read.
    pub hard_interrupts: Option<u64>,
    /// Softirqs; absent where they cannot be read.
    pub soft_interrupts: Option<u64>,
}

/// Intruders that are listed, at most.
pub const MAX_INTRUDERS: usize = 50;

/// Who ran on the exclusive CPUs of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Intruders {
    /// Whether this is measured now: a CPU is exclusive, and the probe is attached.
    pub watching: bool,
    /// Its CPUs.
    pub cpus: Vec<ExclusiveCpu>,
    /// Who ran there, by name, the longest first; 50 at most.
    pub intruders: Vec<Intruder>,
}

/// Tasks of one name that ran on exclusive CPUs of a workload that they are not of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Intruder {
    /// What they are.
    #[schema(examples("kernel_thread", "host", "workload"))]
    pub class: String,
    /// The workload they are of; absent where they are of none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// Their name, at most 15 bytes.
    pub command: String,
    /// How long they ran, in microseconds.
    pub micros: u64,
    /// How often they were switched in.
    pub runs: u64,
}

/// A map of the probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Map {
    /// Its name.
    pub map: String,
    /// Entries in use.
    pub entries: u64,
    /// Entries it has room for.
    pub capacity: u64,
}

/// How many workloads there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadCount {
    /// With counters of their own.
    pub own: u64,
    /// Counted together as `other`.
    pub other: u64,
}

/// Something that does not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Degraded)]
pub struct DegradedPart {
    /// The part.
    #[schema(examples("cgroups", "topology"))]
    pub part: String,
    /// Why, and what to do.
    pub reason: String,
}

/// The version that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// numaward's version.
    pub version: String,
    /// The kernel's release.
    pub kernel: String,
    /// The architecture it was built for.
    pub architecture: String,
}

impl Version {
    /// This version, on this release of the kernel.
    pub fn on(kernel: impl Into<String>) -> Self {
        Self {
            version: VERSION.to_owned(),
            kernel: kernel.into(),
            architecture: std::env::consts::ARCH.to_owned(),
        }
    }
}

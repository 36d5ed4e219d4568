//! The figures of one scrape: plain numbers, all taken at the same time. Tests and benchmarks construct their own.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use numaward_topology::{Bytes, CpuId, HugepageSize, NodeId, ZoneKind};

use crate::verdict::{ResidencySplit, UserMemory};

/// A source of snapshots.
pub trait SnapshotSource: fmt::Debug + Send + Sync + 'static {
    /// Takes a snapshot. Called once per scrape, on a thread that may block.
    fn snapshot(&self) -> Snapshot;
}

/// All figures of this host at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The online nodes.
    pub nodes: Vec<NodeMemoryFigures>,
    /// The workloads, including the collective `other`.
    pub workloads: Vec<WorkloadFigures>,
    pub page_size: Bytes,
    /// Sampled accesses of all workloads in pages, if a probe samples: the node of the CPU, the node of the memory
    /// (`None` if unknown), and the number.
    pub accesses: Option<Vec<(NodeId, Option<NodeId>, u64)>>,
    /// The current and former exclusive CPUs.
    pub exclusive_cpus: Vec<(CpuId, CpuFigures)>,
    /// Bytes that were allocated for no workload, by node in the order of [`Snapshot::nodes`], if the probe runs.
    pub unattributed: Option<Vec<UnattributedFigures>>,
    /// Pages that the allocation probe has seen in the last hour, in thousandths of those that the kernel has allocated.
    pub coverage_permille: Option<u32>,
    /// Bytes on a node that the probe could not determine, if it runs.
    pub unknown_node: Option<Bytes>,
    pub probes: Vec<ProbeFigures>,
    /// The BPF maps of the probes.
    pub maps: Vec<MapFigures>,
    /// Bytes of the BPF maps, by family of probes.
    pub map_memory: Vec<(&'static str, u64)>,
    /// The number of workloads with their own counters.
    pub workloads_with_slot: u64,
    /// The number of workloads that are counted as `other` because no slot is free.
    pub workloads_without_slot: u64,
    /// The parts of the daemon, with true if degraded.
    pub degraded: Vec<(&'static str, bool)>,
    /// The guarantees, from the same reading of the counters.
    pub guarantees: GuaranteeFigures,
    /// The resources of the daemon's own process, if they can be read.
    pub process: Option<ProcessFigures>,
}

/// The resources of the daemon's own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessFigures {
    /// CPU time in user mode and in the kernel.
    pub cpu: Duration,
    /// The size of the address space.
    pub virtual_memory: Bytes,
    /// The memory in use.
    pub resident_memory: Bytes,
    /// The start time of the process.
    pub start: Option<SystemTime>,
    /// The number of open file descriptors.
    pub open_fds: Option<u64>,
    /// The maximum number of open file descriptors.
    pub max_fds: Option<u64>,
}

/// The memory of a node, by kind.
#[derive(Clone, Debug)]
pub struct NodeMemoryFigures {
    pub node: NodeId,
    /// The kind, the total, and the free memory, if known.
    pub kinds: Vec<(ZoneKind, Bytes, Option<Bytes>)>,
}

/// The figures of a workload. A figure that cannot be read is `None`, never zero.
#[derive(Clone, Debug)]
pub struct WorkloadFigures {
    /// The value of the label `workload`.
    pub name: Arc<str>,
    /// Time at which the counters started at zero; `None`: at the start of the daemon.
    pub start: Option<SystemTime>,
    /// Bytes allocated since the daemon first saw the workload, by node in the order of [`Snapshot::nodes`].
    pub allocated: Option<Vec<AllocatedFigures>>,
    /// CPU time since the daemon first saw the workload, by node of the CPU in the order of [`Snapshot::nodes`].
    pub cpu: Option<Vec<Duration>>,
    /// The current memory, by node in the order of [`Snapshot::nodes`].
    pub resident: Option<Arc<[ResidentFigures]>>,
    /// Hugepages, which are not part of `resident`: the sizes for which the host has pools, and that could be read.
    pub hugepages: Arc<ResidentHugepages>,
    /// The figures of `memory.pressure`.
    pub pressure: Option<PressureFigures>,
    /// The number of processes that the OOM killer killed (`oom_kill` of `memory.events`).
    pub oom_kills: Option<u64>,
    /// Memory that the kernel moved between memory tiers; `None` on machines with one tier.
    pub tiering: Option<TieringFigures>,
    /// The figures of all probes other than the allocation probe.
    pub activity: Option<WorkloadActivity>,
}

/// Bytes of hugepages (`hugetlb.*.numa_stat`), by size, then by node in the order of [`Snapshot::nodes`].
pub type ResidentHugepages = BTreeMap<HugepageSize, Vec<Bytes>>;

/// The figures of all probes other than the allocation probe. A figure is `None` if its probe is not attached.
#[derive(Clone, Debug, Default)]
pub struct WorkloadActivity {
    /// Pages of other nodes that were touched, by scan, by the node of the CPU in the order of [`Snapshot::nodes`].
    pub remote: Option<Vec<u64>>,
    /// Pages of the CPU's own node that were touched, by scan.
    pub local: Option<u64>,
    /// Pages that were moved because another node accessed them (`memory.stat`); only if no probe samples.
    pub moved: Option<u64>,
    /// The states of access sampling of the workloads with this name.
    pub sampling: Vec<&'static str>,
    /// The estimated share of remote accesses in thousandths; only if requested and accesses are not sampled.
    pub estimated_remote_permille: Option<u32>,
    /// Pages moved to other nodes, by reason and nodes.
    pub migrated: Option<Vec<MigratedFigures>>,
    /// Time spent in direct reclaim.
    pub stalls: Option<StallFigures>,
    /// The OOM kills, by constraint of the allocation.
    pub oom_kills: Option<[OomKillFigures; 4]>,
    /// Hugepages taken from the pools for which the host has pools, by size, then by node in the order of
    /// [`Snapshot::nodes`].
    pub hugepages: Option<BTreeMap<HugepageSize, Vec<AllocatedHugepages>>>,
    /// Accesses to DRAM by the node of the CPU in the order of [`Snapshot::nodes`]: local (if the processor counts
    /// them) and remote.
    pub dram: Option<Vec<(Option<u64>, u64)>>,
}

/// Pages moved to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigratedFigures {
    pub reason: &'static str,
    /// The source and the destination; `None` if they are unknown.
    pub nodes: Option<(NodeId, NodeId)>,
    pub pages: u64,
}

/// OOM kills with one constraint. With `memory.oom.group`, all processes that are killed at once count as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OomKillFigures {
    pub constraint: &'static str,
    pub count: u64,
    /// The part of `count` at which no other node had free memory; `None` if the constraint does not come from pinning.
    pub without_room: Option<u64>,
}

impl OomKillFigures {
    /// Returns the kills with a constraint; at all of them, other nodes had free memory.
    pub fn new(constraint: &'static str, count: u64) -> Self {
        Self { constraint, count, without_room: is_pinned(constraint).then_some(0) }
    }
}

/// Returns true for the constraints of allocations that come from pinning.
pub fn is_pinned(constraint: &str) -> bool {
    ["cpuset", "mempolicy"].contains(&constraint)
}

/// Hugepages of one size taken from the pool of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatedHugepages {
    /// Hugepages taken by CPUs for which this is the nearest node with memory.
    pub local: Bytes,
    /// Hugepages taken by other CPUs.
    pub remote: Bytes,
}

/// The number of buckets of [`StallFigures`].
pub const STALL_BUCKETS: usize = 24;

/// Times in which tasks had to reclaim memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallFigures {
    /// The number of stalls by length: bucket `i` has those from 2^(i-1) to below 2^i microseconds, the last bucket all
    /// longer ones.
    pub buckets: [u64; STALL_BUCKETS],
    /// The total time of all stalls.
    pub total: Duration,
}

/// The use of a CPU while it was exclusive.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuFigures {
    /// The time of tasks of other workloads, by class.
    pub intruders: [(&'static str, Duration); 3],
    /// Interrupts while the CPU was exclusive; `None` if they cannot be read.
    pub interrupts: Option<InterruptFigures>,
}

/// Interrupts on a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterruptFigures {
    /// Interrupts of devices, timers and other CPUs (`/proc/interrupts`).
    pub hard: u64,
    /// Deferred work of interrupts (`/proc/softirqs`).
    pub soft: u64,
    /// Time of `hard` (`/proc/stat`).
    pub hard_time: Duration,
    /// Time of `soft` (`/proc/stat`).
    pub soft_time: Duration,
}

/// Bytes allocated on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatedFigures {
    /// User memory that CPUs of this node allocated.
    pub local: Bytes,
    /// User memory that CPUs of other nodes allocated.
    pub remote: Bytes,
    /// Kernel memory; a lower bound.
    pub kernel: Bytes,
}

/// Bytes on a node that were allocated by tasks that do not use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnattributedFigures {
    /// Memory allocated without permission to sleep, as in interrupts.
    pub atomic: Bytes,
    /// Memory allocated by tasks that free memory.
    pub reclaim: Bytes,
}

/// Memory that the kernel moved between memory tiers (`pgdemote_*` and `pgpromote_success` of `memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieringFigures {
    /// Memory moved to a slower tier.
    pub demoted: Bytes,
    /// Memory moved to a faster tier.
    pub promoted: Bytes,
}

impl TieringFigures {
    /// Returns the sum of two workloads.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let plus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_add(b.0));
        Self { demoted: plus(self.demoted, other.demoted), promoted: plus(self.promoted, other.promoted) }
    }
}

/// Bytes of memory that are on a node (`memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentFigures {
    pub anon: Bytes,
    /// Page cache, tmpfs and shared memory.
    pub file: Bytes,
    /// Kernel stacks, page tables and slabs.
    pub kernel: Bytes,
    /// The part of `file` that tasks have mapped.
    pub mapped: Bytes,
    /// The part of `file` that is shared memory and tmpfs.
    pub shmem: Bytes,
    /// The part of the total that the kernel drops when memory is needed.
    pub droppable: Bytes,
}

impl From<ResidentFigures> for UserMemory {
    fn from(of: ResidentFigures) -> Self {
        Self { anon: of.anon, shmem: of.shmem, file: Bytes(of.file.0.saturating_sub(of.shmem.0)) }
    }
}

impl ResidentFigures {
    /// Returns the user memory: anonymous memory and page cache.
    pub fn user(&self) -> Bytes {
        Bytes(self.anon.0.saturating_add(self.file.0))
    }

    /// Returns the user and kernel memory.
    pub fn sum(&self) -> Bytes {
        Bytes(self.user().0.saturating_add(self.kernel.0))
    }

    /// Returns the sum of two workloads.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let plus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_add(b.0));
        Self {
            anon: plus(self.anon, other.anon),
            file: plus(self.file, other.file),
            kernel: plus(self.kernel, other.kernel),
            mapped: plus(self.mapped, other.mapped),
            shmem: plus(self.shmem, other.shmem),
            droppable: plus(self.droppable, other.droppable),
        }
    }
}

/// Time in which tasks waited for memory (`memory.pressure`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureFigures {
    /// Time in which at least one task waited.
    pub waiting: Duration,
    /// Time in which all runnable tasks waited.
    pub stalled: Duration,
}

/// A probe and its state.
#[derive(Clone, Debug)]
pub struct ProbeFigures {
    pub probe: String,
    /// The method by which the probe is attached, or `absent`.
    pub mode: String,
    /// The reason, in one word, why no better method is used; empty for the best method.
    pub reason: &'static str,
    /// The run time of the probe while the kernel measured it (`kernel.bpf_stats_enabled`).
    pub runtime: Option<Duration>,
    /// The number of runs while the kernel measured them.
    pub runs: Option<u64>,
    /// The part of the time in which the probe is attached, from 0 to 1; `None` if it is not attached.
    pub sampled_ratio: Option<f64>,
    /// Events that the kernel dropped before they reached the probe, or that did not fit into its maps.
    pub events_lost: Option<u64>,
}

/// The fill level of a BPF map.
#[derive(Clone, Debug)]
pub struct MapFigures {
    pub map: &'static str,
    pub entries: u64,
    /// The maximum number of entries.
    pub capacity: u64,
}

/// The guarantees on this host and their fulfilment. Empty if guarantees are not possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuaranteeFigures {
    /// Memory that each workload with a guarantee allocated outside its guaranteed nodes.
    pub missed: Vec<MissFigures>,
    /// Hugepages that each workload allocated outside its guaranteed nodes, if a probe counts them.
    pub missed_hugepages: Vec<HugepagesOutside>,
    /// Hugepages of each workload with a guarantee that are outside its guaranteed nodes now.
    pub misplaced_hugepages: Vec<HugepagesOutside>,
    /// The capacity, by node and kind of memory.
    pub kinds: Vec<KindFigures>,
    /// The number of exclusive CPUs, by node.
    pub exclusive_cpus: Vec<(NodeId, u64)>,
    /// The guaranteed capacity of each workload that is missing.
    pub missing: Vec<MissingCapacityFigures>,
    /// The guaranteed memory of each workload, and the nodes of its current memory, by kind.
    pub residency: Vec<GuaranteeResidency>,
    /// Available memory without the unused guarantees, by node and kind, in bytes; negative if more is guaranteed than
    /// available.
    pub headroom: Vec<(NodeId, ZoneKind, i64)>,
    /// The nodes with guarantees, with true if their headroom is low; empty if the guard is off.
    pub low: Vec<(NodeId, bool)>,
    /// Memory above the share on a node, for each workload with memory on several nodes and a budget.
    pub over_budget: Vec<BudgetExcess>,
    /// The number of CPUs in the shared pool; `None` if guarantees are not possible.
    pub shared_pool_cpus: Option<u64>,
    /// The number of CPUs that can still become exclusive, without the reserved ones.
    pub free_cpus: u64,
}

/// User memory that a workload allocated outside its guaranteed nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissFigures {
    pub workload: Arc<str>,
    /// Bytes by the node of the page.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// Guaranteed memory of one kind of a workload, and the nodes of its current memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuaranteeResidency {
    pub workload: Arc<str>,
    pub kind: ZoneKind,
    /// Guaranteed bytes, by charged node, in order.
    pub guaranteed: Vec<(NodeId, Bytes)>,
    /// Current user memory on the guaranteed nodes and on other nodes; `None` if unknown.
    pub resident: Option<ResidencySplit>,
    /// True if the guarantee of one of the workloads with this name is broken.
    pub is_broken: bool,
}

impl GuaranteeResidency {
    /// Adds guaranteed bytes on a node.
    pub fn add_guaranteed(&mut self, node: NodeId, bytes: Bytes) {
        match self.guaranteed.binary_search_by_key(&node, |(node, _)| *node) {
            Ok(at) => self.guaranteed[at].1.0 = self.guaranteed[at].1.0.saturating_add(bytes.0),
            Err(at) => self.guaranteed.insert(at, (node, bytes)),
        }
    }

    /// Adds current memory.
    pub fn add(&mut self, more: ResidencySplit) {
        self.resident.get_or_insert_default().add(more);
        self.is_broken |= more.is_broken();
    }
}

/// Memory of a workload above its share, by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExcess {
    pub workload: Arc<str>,
    /// Bytes by guaranteed node; 0 if the workload is within its share.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// Hugepages of one size, of a workload, outside its guaranteed nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugepagesOutside {
    pub workload: Arc<str>,
    pub size: HugepageSize,
    /// Bytes by the node of the page, for every node.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// Guaranteed capacity of a workload that is missing because the machine changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingCapacityFigures {
    pub workload: Arc<str>,
    /// The number of exclusive CPUs that are offline.
    pub offline_cpus: u64,
    /// Guaranteed memory of all kinds that the nodes do not have.
    pub uncovered: Bytes,
}

/// The capacity of one kind of memory on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindFigures {
    pub node: NodeId,
    pub kind: ZoneKind,
    /// Memory reserved for the system.
    pub reserved: Bytes,
    /// Memory that can be guaranteed in total.
    pub allocatable: Bytes,
    /// Memory that is guaranteed.
    pub guaranteed: Bytes,
    /// Memory that can still be guaranteed.
    pub free: Bytes,
}

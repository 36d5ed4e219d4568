//! What one scrape serves: plain numbers, taken at one time. Tests and benchmarks make their own.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use numaward_topology::{Bytes, CpuId, HugepageSize, NodeId, ZoneKind};

/// Gives the current figures. Called once for each scrape, on a thread that may block.
pub trait SnapshotSource: fmt::Debug + Send + Sync + 'static {
    /// Takes them.
    fn snapshot(&self) -> Snapshot;
}

/// Everything that is known of this host at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The online nodes.
    pub nodes: Vec<NodeMemoryFigures>,
    /// The workloads, the collective `other` among them.
    pub workloads: Vec<WorkloadFigures>,
    /// The size of a page.
    pub page_size: Bytes,
    /// Sampled accesses of all workloads together, in pages, if a probe samples: from the CPUs of a node to the memory
    /// of a node, `None` where that is not known.
    pub accesses: Option<Vec<(NodeId, Option<NodeId>, u64)>>,
    /// Who used CPUs that are exclusive, or were: by CPU.
    pub exclusive_cpus: Vec<(CpuId, CpuFigures)>,
    /// Allocations on a node that the probe could not determine, if it runs.
    pub unknown_node: Option<Bytes>,
    /// The probes.
    pub probes: Vec<ProbeFigures>,
    /// The maps of the probes.
    pub maps: Vec<MapFigures>,
    /// Bytes that the maps of each family of probes take.
    pub map_memory: Vec<(&'static str, u64)>,
    /// Workloads with counters of their own.
    pub workloads_with_slot: u64,
    /// Workloads that are counted as `other` because no slot is free.
    pub workloads_without_slot: u64,
    /// The parts of the daemon, and whether they work less well than they should.
    pub degraded: Vec<(&'static str, bool)>,
    /// What is promised, by the same reading of the counters.
    pub promises: GuaranteeFigures,
    /// What the daemon's own process takes, if that can be read.
    pub process: Option<ProcessFigures>,
}

/// What the daemon's own process takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessFigures {
    /// CPU time, in user mode and in the kernel.
    pub cpu: Duration,
    /// Address space.
    pub virtual_memory: Bytes,
    /// Memory in use.
    pub resident_memory: Bytes,
    /// When it was started.
    pub start: Option<SystemTime>,
    /// Open file descriptors.
    pub open_fds: Option<u64>,
    /// How many there may be at most.
    pub max_fds: Option<u64>,
}

/// A node's memory by kind.
#[derive(Clone, Debug)]
pub struct NodeMemoryFigures {
    /// The node.
    pub node: NodeId,
    /// Kind, all of it, and what is free where that is known.
    pub kinds: Vec<(ZoneKind, Bytes, Option<Bytes>)>,
}

/// A workload's figures. A part that cannot be read is absent, never zero.
#[derive(Clone, Debug)]
pub struct WorkloadFigures {
    /// The value of the label `workload`.
    pub name: Arc<str>,
    /// By node, in the order of [`Snapshot::nodes`]: what was allocated since the daemon saw it first.
    pub allocated: Option<Vec<AllocatedFigures>>,
    /// By node, in the order of [`Snapshot::nodes`]: where its memory lies.
    pub resident: Option<Arc<[ResidentFigures]>>,
    /// Its hugepages, which are not part of `resident`: of sizes that the host has pools of and that could be read.
    pub hugepages: Arc<ResidentHugepages>,
    /// From `memory.pressure`.
    pub pressure: Option<PressureFigures>,
    /// Processes that the OOM killer took (`oom_kill` of `memory.events`).
    pub oom_kills: Option<u64>,
    /// What the kernel moved between memory tiers; absent on machines with one tier.
    pub tiering: Option<TieringFigures>,
    /// What the probes other than that of allocations counted.
    pub activity: Option<WorkloadActivity>,
}

/// Hugepages that lie on nodes (`hugetlb.*.numa_stat`), in bytes: by size, then by node in the order of
/// [`Snapshot::nodes`].
pub type ResidentHugepages = BTreeMap<HugepageSize, Vec<Bytes>>;

/// What the probes other than that of allocations counted; a part whose probe is not attached is absent.
#[derive(Clone, Debug, Default)]
pub struct WorkloadActivity {
    /// Sampled accesses to memory of other nodes, in pages, by the node of the CPU in the order of
    /// [`Snapshot::nodes`].
    pub remote: Option<Vec<u64>>,
    /// Where no probe samples: pages that were moved because another node accessed them (`memory.stat`).
    pub moved: Option<u64>,
    /// Whether accesses are sampled: the states of the workloads of this name.
    pub sampling: Vec<&'static str>,
    /// Where that is asked for and accesses are not sampled: the share of remote ones as estimated, in thousandths.
    pub estimated_remote_permille: Option<u32>,
    /// Pages moved to other nodes, by reason.
    pub migrated: Option<Vec<(&'static str, u64)>>,
    /// Time lost in reclaim.
    pub stalls: Option<StallFigures>,
    /// Kills by constraint.
    pub oom_kills: Option<[(&'static str, u64); 4]>,
    /// Hugepages that were taken from the pools, of sizes that the host has pools of: by size, then by node in the order
    /// of [`Snapshot::nodes`].
    pub hugepages: Option<BTreeMap<HugepageSize, Vec<AllocatedHugepages>>>,
    /// Accesses to DRAM from the CPUs of each node, in the order of [`Snapshot::nodes`]: local (where the processor counts
    /// them) and remote.
    pub dram: Option<Vec<(Option<u64>, u64)>>,
}

/// Hugepages of one size that were taken from the pool of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatedHugepages {
    /// By a CPU of this node, or for which it is the nearest node with memory.
    pub local: Bytes,
    /// By a CPU of another node.
    pub remote: Bytes,
}

/// Buckets of [`StallFigures`].
pub const STALL_BUCKETS: usize = 24;

/// How long tasks had to reclaim memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallFigures {
    /// How many took less than 2^index microseconds, and not less than half of that; the last has all longer ones.
    pub buckets: [u64; STALL_BUCKETS],
    /// All of them together.
    pub total: Duration,
}

/// Who used a CPU while it was exclusive.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuFigures {
    /// The time of others, by what they are.
    pub intruders: [(&'static str, Duration); 3],
    /// Interrupts, hard and soft, while it was exclusive; absent where they cannot be read.
    pub interrupts: Option<InterruptFigures>,
}

/// Interrupts on one CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterruptFigures {
    /// Of devices, timers and other CPUs (`/proc/interrupts`).
    pub hard: u64,
    /// What they left for later (`/proc/softirqs`).
    pub soft: u64,
}

/// Bytes allocated on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatedFigures {
    /// User memory, by a CPU of this node.
    pub local: Bytes,
    /// User memory, by a CPU of another node.
    pub remote: Bytes,
    /// Kernel memory; a lower bound.
    pub kernel: Bytes,
}

/// What the kernel moved between memory tiers (`pgdemote_*` and `pgpromote_success` of `memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieringFigures {
    /// To slower memory.
    pub demoted: Bytes,
    /// To faster memory.
    pub promoted: Bytes,
}

impl TieringFigures {
    /// With that of another workload.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let plus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_add(b.0));
        Self { demoted: plus(self.demoted, other.demoted), promoted: plus(self.promoted, other.promoted) }
    }
}

/// Bytes that lie on one node (`memory.numa_stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentFigures {
    /// Anonymous memory.
    pub anon: Bytes,
    /// Page cache, tmpfs and shared memory.
    pub file: Bytes,
    /// Kernel stacks, page tables and slabs.
    pub kernel: Bytes,
    /// The part of `file` that tasks have mapped.
    pub mapped: Bytes,
    /// The part of all that the kernel drops when memory is needed.
    pub droppable: Bytes,
}

impl ResidentFigures {
    /// User memory: anonymous memory and page cache.
    pub fn user(&self) -> Bytes {
        Bytes(self.anon.0.saturating_add(self.file.0))
    }

    /// All of it.
    pub fn sum(&self) -> Bytes {
        Bytes(self.user().0.saturating_add(self.kernel.0))
    }

    /// With that of another workload.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let plus = |a: Bytes, b: Bytes| Bytes(a.0.saturating_add(b.0));
        Self {
            anon: plus(self.anon, other.anon),
            file: plus(self.file, other.file),
            kernel: plus(self.kernel, other.kernel),
            mapped: plus(self.mapped, other.mapped),
            droppable: plus(self.droppable, other.droppable),
        }
    }
}

/// Time lost waiting for memory (`memory.pressure`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureFigures {
    /// At least one task waited.
    pub waiting: Duration,
    /// All tasks that had work waited.
    pub stalled: Duration,
}

/// A probe and how it runs.
#[derive(Clone, Debug)]
pub struct ProbeFigures {
    /// Its name.
    pub probe: String,
    /// How it is attached, or `absent`.
    pub mode: String,
    /// Why not better, in a word; empty where nothing is wanting.
    pub reason: &'static str,
    /// Time spent in it while the kernel measures that (`kernel.bpf_stats_enabled`).
    pub runtime: Option<Duration>,
    /// Runs while the kernel measures that.
    pub runs: Option<u64>,
    /// Which part of the time it watches; `None` where it is not attached.
    pub sampled_ratio: Option<f64>,
    /// Events that the kernel did not hand to it, or for which its maps had no room.
    pub events_lost: Option<u64>,
}

/// How full a map is.
#[derive(Clone, Debug)]
pub struct MapFigures {
    /// Its name.
    pub map: &'static str,
    /// Entries in use.
    pub entries: u64,
    /// Entries it has room for.
    pub capacity: u64,
}

/// What is promised on this host, and what came of it. Empty where nothing can be promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuaranteeFigures {
    /// Of each workload with an allocation.
    pub missed: Vec<MissFigures>,
    /// The same of hugepages, where a probe counts them.
    pub missed_hugepages: Vec<HugepagesOutside>,
    /// Of each workload with an allocation, hugepages that lie outside the nodes promised to it now.
    pub misplaced_hugepages: Vec<HugepagesOutside>,
    /// Memory, by node and kind.
    pub kinds: Vec<KindFigures>,
    /// By node.
    pub exclusive_cpus: Vec<(NodeId, u64)>,
    /// Of each workload with an allocation, what of it is not there.
    pub missing: Vec<MissingCapacityFigures>,
    /// Of each workload with an allocation of memory, by kind: what is promised, and where what it has lies now.
    pub residency: Vec<GuaranteeResidency>,
    /// Memory that is still available, less what is promised and not yet used: by node and kind, in bytes. Below zero
    /// where more is promised than is available now.
    pub headroom: Vec<(NodeId, ZoneKind, i64)>,
    /// Whether a node on which memory is promised may soon not have it; empty where nobody looks.
    pub low: Vec<(NodeId, bool)>,
    /// Of each workload with memory on several nodes that is held to its share: what it has above that, by node.
    pub over_budget: Vec<BudgetExcess>,
    /// CPUs that are exclusive to nobody; absent where nothing can be promised.
    pub shared_pool_cpus: Option<u64>,
    /// CPUs that can still become exclusive: those without the reserved ones.
    pub free_cpus: u64,
}

/// User memory that a workload allocated outside the nodes promised to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissFigures {
    /// The workload.
    pub workload: Arc<str>,
    /// By the node of the page.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// What is promised to a workload of one kind of memory, and where what it has of that lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuaranteeResidency {
    /// The workload.
    pub workload: Arc<str>,
    /// The kind.
    pub kind: ZoneKind,
    /// By the nodes that are charged, in their order.
    pub promised: Vec<(NodeId, Bytes)>,
    /// User memory on the nodes promised to it, and on others; absent where it is not known.
    pub resident: Option<ResidencySplit>,
}

/// Memory on promised nodes, and off them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencySplit {
    /// On nodes that are promised.
    pub on: Bytes,
    /// On others.
    pub off: Bytes,
}

impl GuaranteeResidency {
    /// This much more is promised on a node.
    pub fn promise(&mut self, node: NodeId, bytes: Bytes) {
        match self.promised.binary_search_by_key(&node, |(node, _)| *node) {
            Ok(at) => self.promised[at].1.0 = self.promised[at].1.0.saturating_add(bytes.0),
            Err(at) => self.promised.insert(at, (node, bytes)),
        }
    }

    /// This much more lies there.
    pub fn add(&mut self, more: ResidencySplit) {
        let resident = self.resident.get_or_insert_default();
        for (sum, more) in [(&mut resident.on, more.on), (&mut resident.off, more.off)] {
            sum.0 = sum.0.saturating_add(more.0);
        }
    }
}

/// What a workload has above what is promised to it, by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExcess {
    /// The workload.
    pub workload: Arc<str>,
    /// By the nodes that are promised to it; 0 where it has no more.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// Hugepages of one size that a workload has, or was given, outside the nodes promised to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugepagesOutside {
    /// The workload.
    pub workload: Arc<str>,
    /// Their size.
    pub size: HugepageSize,
    /// By the node of the pages: every node.
    pub bytes: Vec<(NodeId, Bytes)>,
}

/// What is promised to a workload and not there (any more), as the machine changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingCapacityFigures {
    /// The workload.
    pub workload: Arc<str>,
    /// Exclusive CPUs that are offline.
    pub offline_cpus: u64,
    /// Memory of all kinds that its nodes do not have.
    pub uncovered: Bytes,
}

/// Promises of one kind of memory on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindFigures {
    /// The node.
    pub node: NodeId,
    /// The kind.
    pub kind: ZoneKind,
    /// Kept for the system.
    pub reserved: Bytes,
    /// What can be promised at all.
    pub allocatable: Bytes,
    /// What is promised.
    pub promised: Bytes,
    /// What can still be promised.
    pub free: Bytes,
}

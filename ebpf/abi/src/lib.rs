//! Types and constants that the probes and userspace share.
//!
//! These types are stored in eBPF maps. Their layouts are fixed (`repr(C)`, explicit padding), and values are in the
//! host's byte order. The programs in `ebpf/src` document the meaning of the maps.
//!
//! # Terms
//! - *node index*: maps are indexed by a dense number instead of the node id, because ids may have gaps (0, 8, 252) and
//!   each unused row would cost memory on every CPU. Userspace numbers the nodes 0, 1, 2… in the order of their ids,
//!   and nodes that are added later after them.
//! - *memory node* of a CPU: its own node or, if that has no memory, the nearest node with memory (the kernel's
//!   `cpu_to_mem`).
//! - *slot*: the number under which the counters of one registered workload are kept.

#![no_std]

/// The maximum number of nodes that are counted.
pub const MAX_NODES: usize = 256;

/// The number of node ids that the kernel supports: the largest `MAX_NUMNODES` (`CONFIG_NODES_SHIFT=10`).
pub const MAX_NODE_IDS: usize = 1024;

/// The node index of pages that are on no known node.
pub const UNKNOWN_NODE: u16 = u16::MAX;

/// The slot of all tasks that belong to no registered workload.
pub const OTHER_SLOT: u32 = 0;

/// The kernel's id of a cgroup: the inode number of its directory in the v2 hierarchy.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupId(pub u64);

/// The task that an event is about.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTask {
    pub cgroup: CgroupId,
    /// The slot of its workload.
    pub slot: u32,
    /// Its process id in the host's PID namespace.
    pub pid: u32,
    /// Its name, padded with zeros.
    pub comm: [u8; 16],
}

/// Pages allocated for one slot on one node. One CPU or several write to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocCounters {
    /// User pages on the memory node of the allocating CPU.
    pub user_local: u64,
    /// User pages on other nodes.
    pub user_remote: u64,
    /// User pages, local or remote, on nodes outside [`Slot::allowed`].
    pub user_outside: u64,
    /// Pages for the kernel's own use.
    pub kernel: u64,
}

/// Pages on one node that are booked to no slot, because the allocating task does not use them. One CPU writes to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnattributedCounters {
    /// Pages allocated without permission to sleep: by interrupts, and by tasks that must not wait.
    pub atomic: u64,
    /// Pages allocated by tasks that free memory, for the pages that they move or compress.
    pub reclaim: u64,
}

/// Counts of the allocation probe that belong to no slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocTotals {
    /// Pages on no known node.
    pub unknown_node: u64,
    /// The number of times that the slot of a cgroup was looked up because it was not cached.
    pub resolved: u64,
    /// The number of these lookups in which the kernel could preempt the task inside the probe.
    pub preemptible: u64,
}

/// An allocation outside the nodes that are guaranteed to the workload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Miss {
    /// The task that allocated the pages.
    pub task: EventTask,
    /// Pages of this one allocation.
    pub pages: u64,
    /// The index of the node of the pages.
    pub node: u32,
    /// Zero.
    pub padding: u32,
}

/// The place where a program finds the memory cgroup to which a page was charged.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeOwner {
    /// The second argument of the function.
    Argument = 0,
    /// A typed pointer in the page.
    Pointer = 1,
    /// A number in the page, which is the address of a memory cgroup.
    MemoryCgroup = 2,
    /// A number in the page, which is the address of an object cgroup.
    ObjectCgroup = 3,
}

/// Settings of a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The nodes guaranteed to the workload, one bit for each node index. Without a guarantee, all bits are set, so
    /// that no page is outside.
    pub allowed: [u64; MAX_NODES / 64],
    /// 1 if this probe counts the workload's misses; 0 if another one does.
    pub counts_misses: u64,
}

/// The nodes of the machine, by node id.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeTable {
    /// The node's index; [`UNKNOWN_NODE`] for ids that the machine does not have.
    pub index: [u16; MAX_NODE_IDS],
    /// The index of the *memory node* of the node's CPUs; [`UNKNOWN_NODE`] for ids that the machine does not have.
    pub memory_node: [u16; MAX_NODE_IDS],
}

/// The number of counters for `enum migrate_reason`; the last counter is for all further reasons.
pub const MIGRATE_REASONS: usize = 12;

/// Pages of mappings that NUMA balancing scanned.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCounters {
    /// The memory policy permits sampling.
    pub sampled: u64,
    /// The memory policy prevents sampling.
    pub excluded: u64,
}

/// The number of hugepage sizes that are counted: no processor has more.
pub const HUGEPAGE_SIZES: usize = 4;

/// Pages of one size that a slot took from the pool of one node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugepageCounters {
    /// Pages on the memory node of the allocating CPU.
    pub local: u64,
    /// Pages on other nodes.
    pub remote: u64,
    /// Pages, local or remote, on nodes outside [`Slot::allowed`].
    pub outside: u64,
}

/// Accesses to DRAM, counted by the processor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramCounters {
    /// Accesses to memory of the CPU's own node.
    pub local: u64,
    /// Accesses to memory of other nodes.
    pub remote: u64,
}

/// The last reading of a CPU's counters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramReading {
    pub local: u64,
    pub remote: u64,
    /// 1 if `local` and `remote` are valid, else 0.
    pub is_known: u32,
    /// The number of switches since then, between tasks of one workload.
    pub skipped: u32,
}

/// The number of buckets in the histogram of stalls.
pub const STALL_BUCKETS: usize = 24;

/// The time that tasks were stalled in reclaim.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallCounters {
    /// Stalls by duration: bucket `index` counts those of at least 2^(index-1) and less than 2^index microseconds; the
    /// last bucket also counts all longer ones.
    pub buckets: [u64; STALL_BUCKETS],
    /// The total time.
    pub nanoseconds: u64,
}

/// A long stall of a task in reclaim.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LongStall {
    /// The stalled task.
    pub task: EventTask,
    pub nanoseconds: u64,
}

/// The number of values of `enum oom_constraint`: none, cpuset, memory policy, memory cgroup.
pub const OOM_CONSTRAINTS: usize = 4;

/// A kill by the OOM killer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomKill {
    /// The victim.
    pub task: EventTask,
    /// The constraint of the failed allocation: a value of `enum oom_constraint`.
    pub constraint: u32,
    /// Zero.
    pub padding: u32,
}

/// The class of a task on an exclusive CPU. Its number is the index in [`CpuTimes::nanoseconds`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunClass {
    /// A task of the workload that owns the CPU.
    Own = 0,
    KernelThread = 1,
    /// A process that belongs to no registered workload.
    Host = 2,
    /// A process of another workload.
    Workload = 3,
    /// The idle task. Its time is not counted.
    Idle = 4,
}

/// The time that each class of tasks ran on a CPU while that was exclusive.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// The time at which the current task was switched in, in nanoseconds of the monotonic clock; 0 if unknown.
    pub since: u64,
    /// The slot that owned the CPU at that time.
    pub owner: u32,
    /// The slot of the current task.
    pub slot: u32,
    /// The [`RunClass`] of the current task.
    pub class: u32,
    /// Zero.
    pub padding: u32,
    /// The time by [`RunClass`], without [`RunClass::Idle`], of tasks that were already switched out.
    pub nanoseconds: [u64; 4],
}

/// The key of a group of intruders: tasks of one name on CPUs that are exclusive to another workload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IntruderKey {
    /// The slot that owns the CPUs.
    pub owner: u32,
    /// The slot of the intruder.
    pub slot: u32,
    /// A [`RunClass`].
    pub class: u32,
    /// Zero.
    pub padding: u32,
    /// The intruder's name, padded with zeros.
    pub comm: [u8; 16],
}

/// The running time of a group of intruders.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntruderTime {
    pub nanoseconds: u64,
    /// The number of times that one was switched in.
    pub runs: u64,
}

/// The event that a call chain led to: [`ChainKey::kind`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// User pages were allocated on another node than the CPU's memory node.
    Allocations = 0,
    /// NUMA balancing sampled an access to memory of another node.
    Accesses = 1,
}

/// The number of kinds of call chains.
pub const CHAIN_KINDS: u32 = 2;

/// A stack id that stands for an empty stack, such as the user part of a kernel thread's chain.
pub const NO_STACK: i32 = -1;

/// A stack id that stands for a stack that did not fit into the map of stacks.
pub const NO_ROOM: i32 = -2;

/// A node index that stands for an unknown node.
pub const NO_NODE: u32 = u32::MAX;

/// The key of a call chain.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChainKey {
    /// The workload's slot.
    pub slot: u32,
    /// A [`ChainKind`].
    pub kind: u32,
    /// The index of the memory's node, or [`NO_NODE`].
    pub node: u32,
    /// The stack id of the user part, or [`NO_STACK`] or [`NO_ROOM`].
    pub user: i32,
    /// The stack id of the kernel part, or [`NO_STACK`] or [`NO_ROOM`].
    pub kernel: i32,
}

/// The pages that a call chain stands for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainPages {
    /// Pages: those of the sampled event, and those since the last sample, for which it stands.
    pub pages: u64,
    /// The process id of the first sample, in the host's PID namespace.
    pub pid: u32,
    /// Zero.
    pub padding: u32,
}

/// The number of CPUs of which one run of a program reads the CPU time of a cgroup.
pub const CPU_TIME_BATCH: u32 = 128;

/// The CPU time of a cgroup on one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// The offset of the CPU's data; 0 if it is unknown.
    pub offset: u64,
    /// The time in the last reading, or [`CpuTime::UNREADABLE`].
    pub nanoseconds: u64,
}

impl CpuTime {
    /// Stands for a time that could not be read.
    pub const UNREADABLE: u64 = u64::MAX;
}

/// Implements [`aya::Pod`], so that userspace can read the types from maps and write them.
#[cfg(feature = "user")]
macro_rules! pod {
    ($($type:ty),*) => {
        // SAFETY: `repr(C)` or transparent, made of integers only, without padding: any bytes are a value.
        $(unsafe impl aya::Pod for $type {})*
    };
}

#[cfg(feature = "user")]
pod!(
    AllocTotals,
    CgroupId,
    ChainKey,
    ChainPages,
    CpuTimes,
    IntruderKey,
    IntruderTime,
    LongStall,
    Miss,
    NodeTable,
    OomKill,
    Slot,
    UnattributedCounters
);

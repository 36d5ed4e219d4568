//! Types and constants shared by the probes and userspace.
//!
//! Everything here lies in eBPF maps, so layouts are fixed (`repr(C)`, padding spelled out) and values
//! are in the host's byte order. How they come about is
//! explained in the probes.
//!
//! **Node indices.** Maps are indexed by a dense *node index*, not by node id: ids may have gaps (0, 8,
//! 252), and a row for each unused id would be paid for on every CPU. Userspace numbers the machine's
//! nodes 0, 1, 2… in the order of their ids, and those that come later after them.

#![no_std]

/// How many nodes a machine may have for all of them to be counted.
pub const MAX_NODES: usize = 256;

/// Node ids that the kernel may use: `MAX_NUMNODES` at its largest, `CONFIG_NODES_SHIFT=10`.
pub const MAX_NODE_IDS: usize = 1024;

/// The node index of what is on no known node.
pub const UNKNOWN_NODE: u16 = u16::MAX;

/// The slot of all that belongs to no registered workload.
pub const OTHER_SLOT: u32 = 0;

/// The kernel's id of a cgroup: the inode number of its directory in the v2 hierarchy.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupId(pub u64);

/// A task of which an event is reported.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTask {
    /// Its cgroup.
    pub cgroup: CgroupId,
    /// Its workload's slot.
    pub slot: u32,
    /// Its process id, in the host's namespace.
    pub pid: u32,
    /// Its name, ended by zeros.
    pub comm: [u8; 16],
}

/// Pages allocated for one slot on one node, counted on one CPU or by several.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocCounters {
    /// User pages on the home node of the allocating CPU.
    pub user_local: u64,
    /// User pages on other nodes.
    pub user_remote: u64,
    /// User pages, local or remote, on nodes outside [`Slot::allowed`].
    pub user_outside: u64,
    /// Pages for the kernel's own use.
    pub kernel: u64,
}

/// What the allocation probe counts apart from the slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocTotals {
    /// Pages on no known node.
    pub unknown_node: u64,
    /// How often the slot of a cgroup had to be searched.
    pub resolved: u64,
    /// How often, of these, the task could be preempted inside the probe.
    pub preemptible: u64,
}

/// A workload was given memory outside the nodes promised to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Miss {
    /// The one that allocated it.
    pub task: EventTask,
    /// How many pages, as one allocation.
    pub pages: u64,
    /// The index of the node on which they are.
    pub node: u32,
    /// Zero.
    pub padding: u32,
}

/// What the probes know of a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The nodes promised to the workload, a bit for each node index. All set where nothing is
    /// promised, so that nothing is outside.
    pub allowed: [u64; MAX_NODES / 64],
}

/// What the probes know of the machine's nodes, by node id.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeTable {
    /// The node's index; [`UNKNOWN_NODE`] for ids that the machine does not have.
    pub index: [u16; MAX_NODE_IDS],
    /// The index of the *home node* of the node's CPUs: itself, or the nearest node with memory.
    /// [`UNKNOWN_NODE`] as above.
    pub home: [u16; MAX_NODE_IDS],
}

/// Reasons of `enum migrate_reason` that are distinguished; the last counter is for all others.
pub const MIGRATE_REASONS: usize = 12;

/// Mappings that NUMA balancing came across, in pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCounters {
    /// Their memory policy lets them be sampled.
    pub sampled: u64,
    /// Their memory policy keeps them from being sampled.
    pub excluded: u64,
}

/// Sizes of pages in pools that are counted: no processor has more.
pub const HUGEPAGE_SIZES: usize = 4;

/// Pages of one size that a slot was given from the pool of one node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugepageCounters {
    /// On the home node of the allocating CPU.
    pub local: u64,
    /// On other nodes.
    pub remote: u64,
    /// Of both, those on nodes outside [`Slot::allowed`].
    pub outside: u64,
}

/// Accesses to DRAM, as the processor's own counters have them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramCounters {
    /// To memory of the CPU's own node.
    pub local: u64,
    /// To memory of other nodes.
    pub remote: u64,
}

/// What a CPU's counters had when they were read last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramReading {
    /// Accesses to local memory.
    pub local: u64,
    /// Accesses to remote memory.
    pub remote: u64,
    /// 0 where these are not yet known, else 1.
    pub is_known: u32,
    /// Switches since then, between tasks of one workload.
    pub skipped: u32,
}

/// Buckets of the histogram of stalls.
pub const STALL_BUCKETS: usize = 24;

/// How long tasks were stalled in reclaim.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallCounters {
    /// How many took less than 2^index microseconds and not less than half of that; the last has all longer ones.
    pub buckets: [u64; STALL_BUCKETS],
    /// All of them together.
    pub nanoseconds: u64,
}

/// A task was stalled in reclaim for long.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LongStall {
    /// The one that was stalled.
    pub task: EventTask,
    /// How long.
    pub nanoseconds: u64,
}

/// Values of `enum oom_constraint`: none, cpuset, memory policy, memory cgroup.
pub const OOM_CONSTRAINTS: usize = 4;

/// The OOM killer takes a process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomKill {
    /// The victim.
    pub task: EventTask,
    /// What constrained the allocation that found nothing: a value of `enum oom_constraint`.
    pub constraint: u32,
    /// Zero.
    pub padding: u32,
}

/// What sort of task runs on an exclusive CPU, and the index of its time in [`CpuTimes::nanoseconds`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunClass {
    /// One of the CPU's owner.
    Own = 0,
    /// A kernel thread.
    KernelThread = 1,
    /// A process of no registered workload.
    Host = 2,
    /// A process of another workload.
    Workload = 3,
    /// None: the CPU is idle. Its time is not counted.
    Idle = 4,
}

/// How long each class of tasks ran on a CPU while that was exclusive.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// Since when the task runs that is on the CPU now, in nanoseconds of the monotonic clock; 0 if not known.
    pub since: u64,
    /// The slot to which the CPU was exclusive at that time.
    pub owner: u32,
    /// The slot of the task.
    pub slot: u32,
    /// A [`RunClass`]: that of the task.
    pub class: u32,
    /// Zero.
    pub padding: u32,
    /// By [`RunClass`], without [`RunClass::Idle`]; what was switched out already.
    pub nanoseconds: [u64; 4],
}

/// Who ran on CPUs that are exclusive to another.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IntruderKey {
    /// The slot to which the CPU is exclusive.
    pub owner: u32,
    /// The slot of the intruder.
    pub slot: u32,
    /// A [`RunClass`].
    pub class: u32,
    /// Zero.
    pub padding: u32,
    /// The intruder's name, ended by zeros.
    pub comm: [u8; 16],
}

/// For how long, and how often.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntruderTime {
    /// How long.
    pub nanoseconds: u64,
    /// How often it was switched in.
    pub runs: u64,
}

/// What a call chain led to: [`ChainKey::kind`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// User pages were allocated on another node than that of the CPU.
    Allocations = 0,
    /// NUMA balancing saw an access to memory of another node.
    Accesses = 1,
}

/// Kinds of call chains.
pub const CHAIN_KINDS: u32 = 2;

/// In place of the id of a stack: there is none, as for the user's part in a kernel thread.
pub const NO_STACK: i32 = -1;

/// In place of the id of a stack: the map of stacks had no room for it.
pub const NO_ROOM: i32 = -2;

/// In place of the index of a node: it is not known.
pub const NO_NODE: u32 = u32::MAX;

/// Which code it was, and what it did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChainKey {
    /// The workload's slot.
    pub slot: u32,
    /// A [`ChainKind`].
    pub kind: u32,
    /// The index of the memory's node, or [`NO_NODE`].
    pub node: u32,
    /// The id of the user's part of the chain, or [`NO_STACK`] or [`NO_ROOM`].
    pub user: i32,
    /// The id of the kernel's part, likewise.
    pub kernel: i32,
}

/// How much it did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainPages {
    /// Pages, with those for which this chain stands because they were not looked at.
    pub pages: u64,
    /// The process that was seen first, in the host's namespace.
    pub pid: u32,
    /// Zero.
    pub padding: u32,
}

/// Marks types that may be read from and written to maps.
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
    Slot
);

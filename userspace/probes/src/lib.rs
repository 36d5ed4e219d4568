//! Loads the eBPF probes, attaches them, and reads what they count.
//!
//! **Slots.** Counters are kept per *slot*: a number that a workload holds from [`Probes::register`] to
//! [`Probes::release`]. A page is booked to the deepest registered cgroup at or above the cgroup of the
//! task that allocated it; what no registered cgroup owns is booked to [`Snapshot::other`].
//!
//! **Nothing here is fatal.** A probe that cannot be attached is reported as [`Mode::Absent`] with its
//! reason, and the calls that need it do nothing: registering still works, counters are empty.
//!
//! **Privileges.** [`Probes::load`] needs `CAP_BPF` and `CAP_PERFMON` (for the classic tracepoint
//! `CAP_SYS_ADMIN`, where `kernel.perf_event_paranoid` is above 2). All file descriptors are held from
//! then on, and everything but [`Probes::stats_window`] works after these privileges are gone.

#![forbid(unsafe_code)]

pub mod report;

use std::collections::BTreeMap;

use numaward_topology::{Machine, NodeId, NodeSet};

pub use report::{MapUsage, Mode, Probe, ProbeReport, ProbeStats, SelfCheck};

/// Slots where [`Options::slots`] is not set otherwise.
pub const DEFAULT_SLOTS: u32 = 512;

/// What [`Probes::load`] needs to know.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// The machine that the probes run on.
    pub machine: &'a Machine,
    /// Workloads that can be registered at the same time.
    pub slots: u32,
    /// The ways to attach the allocation probe, best first.
    pub alloc_modes: &'a [Mode],
    /// Whether to compare the counts with known allocations at the start.
    pub self_check: bool,
    /// Whether the probes write debug messages; they are read by [`Probes::flush_log`].
    pub debug_log: bool,
    /// For tests on hosts with one node: every CPU is taken to be of this node.
    pub fake_cpu_node: Option<NodeId>,
}

impl<'a> Options<'a> {
    /// The options of a daemon on `machine`.
    pub fn new(machine: &'a Machine) -> Self {
        Self {
            machine,
            slots: DEFAULT_SLOTS,
            alloc_modes: &[Mode::TpBtf, Mode::Tracepoint],
            self_check: true,
            debug_log: false,
            fake_cpu_node: None,
        }
    }
}

/// The kernel's id of a cgroup: the inode number of its directory in the v2 hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupId(pub u64);

/// The place of a registered workload in the probes' maps. Reused after [`Probes::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(u32);

/// A number of base pages (4 KiB on `x86_64`; `sysconf(_SC_PAGESIZE)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pages(pub u64);

/// Pages allocated on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// User pages (anonymous memory and page cache: movable ones) allocated by CPUs of this node, or
    /// by CPUs for which it is the nearest node with memory.
    pub user_local: Pages,
    /// User pages allocated by CPUs of other nodes.
    pub user_remote: Pages,
    /// Those of `user_local` and `user_remote` that are outside the nodes allowed to the workload.
    pub user_outside: Pages,
    /// Pages for the kernel's own use (page tables, slab, buffers): a lower bound, since the kernel's
    /// bulk allocations pass the tracepoint only from some kernels on.
    pub kernel: Pages,
}

/// [`Counters`] by the node on which the pages are.
pub type NodeCounters = BTreeMap<NodeId, Counters>;

/// All counters at (nearly) one time. None of them ever goes down while its slot stays registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Pages allocated by each registered workload since it was registered.
    pub slots: BTreeMap<SlotId, NodeCounters>,
    /// Pages allocated by everything else since the probe was attached.
    pub other: NodeCounters,
    /// Pages whose node is not known, of any owner: on a node or in a memory block that was added
    /// after [`Probes::load`]. Not part of the other counters.
    pub unknown_node: Pages,
}

/// A workload cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The cgroup holds a slot already.
    #[error("cgroup {0:?} is registered already")]
    Registered(CgroupId),
    /// Every slot is taken, or was freed so recently that late events could be booked to it.
    #[error("all {slots} slots of the probes are taken; raise their number")]
    NoSlot {
        /// How many there are.
        slots: u32,
    },
    /// A map could not be read or written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// A map of the probes cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the map {map} of the probes")]
pub struct MapAccessError {
    /// The map's name.
    pub map: &'static str,
    /// What was tried.
    pub action: &'static str,
    /// What the kernel said.
    #[source]
    pub source: std::io::Error,
}

/// A slot is not registered.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// No workload holds the slot.
    #[error("no workload holds {0:?}")]
    Free(SlotId),
    /// A map could not be read or written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// The probes of this host.
#[derive(Debug)]
pub struct Probes {
    reports: Vec<ProbeReport>,
}

impl Probes {
    /// Loads and attaches every probe, each on its own.
    pub fn load(_options: &Options<'_>) -> Self {
        Self {
            reports: vec![ProbeReport {
                probe: Probe::Alloc,
                mode: Mode::Absent,
                reason: Some("not built".to_owned()),
                self_check: None,
            }],
        }
    }

    /// The state of every probe.
    pub fn reports(&self) -> &[ProbeReport] {
        &self.reports
    }

    /// Gives a workload a slot: from now on, pages allocated in `cgroup` and below are counted for it.
    ///
    /// `allowed` are the nodes promised to it; `None` where nothing is promised. Deeper registered
    /// cgroups keep their own slots.
    pub fn register(
        &mut self,
        _cgroup: CgroupId,
        _allowed: Option<&NodeSet>,
    ) -> Result<SlotId, RegisterError> {
        Err(RegisterError::NoSlot { slots: 0 })
    }

    /// Changes the nodes promised to a registered workload.
    pub fn set_allowed(&mut self, slot: SlotId, _allowed: Option<&NodeSet>) -> Result<(), SlotError> {
        Err(SlotError::Free(slot))
    }

    /// Takes a workload's slot back and returns its last counts. Afterwards its cgroups, if they
    /// still exist, are counted for the next registered cgroup above, or as [`Snapshot::other`].
    pub fn release(&mut self, slot: SlotId) -> Result<NodeCounters, SlotError> {
        Err(SlotError::Free(slot))
    }

    /// Reads all counters.
    pub fn counters(&self) -> Result<Snapshot, MapAccessError> {
        Ok(Snapshot::default())
    }

    /// How full the maps are.
    pub fn map_usage(&self) -> Vec<MapUsage> {
        Vec::new()
    }

    /// What each attached probe has cost so far.
    pub fn stats(&self) -> Vec<ProbeStats> {
        Vec::new()
    }
}

//! Errors while attaching probes and accessing their maps.

use std::{error::Error, io};

use numaward_abi::CgroupId;
use numaward_topology::NodeSet;

use crate::{
    btf::BtfError, explain::explain, nodes::NoSections, pmu::PmuError, report::Obstacle, self_check, tracefs,
    types::SlotId,
};

/// A workload cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The cgroup already has a slot.
    #[error("cgroup {0:?} is registered already")]
    AlreadyRegistered(CgroupId),
    /// Every slot is taken, or was freed so recently that late events could be booked to it.
    #[error("all {slots} slots of the probes are taken; raise `probes.slots`")]
    NoSlot {
        /// The number of slots.
        slots: u32,
    },
    /// A map cannot be read or written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// A map of the probes cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the map {map} of the probes")]
pub struct MapAccessError {
    pub map: &'static str,
    /// The failed operation.
    pub action: &'static str,
    #[source]
    pub source: io::Error,
}

/// The CPU time of a cgroup cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CpuTimeError {
    /// There is no room for another cgroup.
    #[error("CPU time is read of at most {0} cgroups; that of further ones is not counted")]
    TooMany(u32),
    /// The program was not run.
    #[error("the kernel did not run the program that reads CPU time: {0}")]
    Run(String),
    /// The kernel's account is not where it was expected.
    #[error("the kernel's account of the CPU time of a cgroup cannot be read")]
    Unreadable,
    /// A map cannot be read or written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// An operation on a slot failed.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// No workload holds the slot.
    #[error("no workload holds {0:?}")]
    NotRegistered(SlotId),
    /// A map cannot be read or written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// Some pages of a changed machine cannot be counted for their node: they are counted in
/// [`AllocationSnapshot::unknown_node`](crate::AllocationSnapshot::unknown_node). All other changes are applied.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// There is no room for these new nodes.
    #[error("the probes' maps have no room for the new nodes {0}; restart numaward to count their pages")]
    Nodes(NodeSet),
    /// New memory has addresses beyond the maps.
    #[error("the probes' maps do not cover all of the new memory; restart numaward to count its pages")]
    Sections,
    /// The memory blocks are no longer known.
    #[error(transparent)]
    NoSections(#[from] NoSections),
    /// A map cannot be written.
    #[error(transparent)]
    Map(#[from] MapAccessError),
}

/// The allocation probe cannot be attached or detached.
#[derive(Debug, thiserror::Error)]
#[error("cannot apply the duty cycle of the allocation probe: {0}")]
pub struct DutyError(pub(crate) String);

/// The kernel's BPF statistics cannot be enabled.
#[derive(Debug, thiserror::Error)]
#[error("cannot enable the kernel's BPF statistics: {0}")]
pub struct StatsError(pub(crate) String);

/// The reason why a probe does not run, or not in one mode.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("this binary has no probes: {0}")]
    NotBuilt(&'static str),
    #[error(transparent)]
    Btf(#[from] BtfError),
    #[error(transparent)]
    Tracepoint(#[from] tracefs::FormatError),
    #[error(transparent)]
    NoSections(#[from] NoSections),
    #[error(transparent)]
    Pmu(#[from] PmuError),
    #[error("no map can hold {slots} slots for {nodes} nodes; configure fewer slots")]
    TooManySlots { slots: u32, nodes: u32 },
    #[error("cannot determine the number of CPUs: {0}")]
    Cpus(io::Error),
    #[error("the eBPF object has no {0}; rebuild the program")]
    Incomplete(&'static str),
    /// An object has a map that an earlier object has sized.
    #[error("internal error: the probes set no size for the map {0} of this object")]
    Unsized(&'static str),
    #[error("the kernel has no BTF")]
    NoBtf,
    #[error(
        "cannot determine the workload of a task: {0} (Linux 5.14 and newer have a helper that does not need it)"
    )]
    NoAncestors(String),
    #[error("lockdown=confidentiality: programs must not read the kernel's memory")]
    Confidential,
    #[error("the kernel's data of single CPUs was not found")]
    NoCpuOffsets,
    #[error("{0}")]
    Permission(String),
    #[error("{0}")]
    Kernel(String),
    #[error(transparent)]
    Map(#[from] MapAccessError),
    #[error(transparent)]
    SelfCheck(#[from] self_check::Mismatch),
    #[error("switched off")]
    Unwanted,
}

impl ProbeError {
    pub(crate) fn kernel(error: &(dyn Error + 'static)) -> Self {
        match explain(error) {
            (Obstacle::Permission, text) => Self::Permission(text),
            (_, text) => Self::Kernel(text),
        }
    }

    /// Returns the kind of obstacle for the metric label.
    pub(crate) const fn obstacle(&self) -> Obstacle {
        match self {
            Self::NotBuilt(_) => Obstacle::NotBuilt,
            Self::Btf(_) | Self::NoBtf | Self::NoAncestors(_) => Obstacle::Btf,
            Self::Tracepoint(_) => Obstacle::Tracepoint,
            Self::Permission(_) | Self::Confidential | Self::Pmu(PmuError::Denied(_)) => Obstacle::Permission,
            Self::Kernel(_) | Self::NoCpuOffsets => Obstacle::Kernel,
            Self::TooManySlots { .. } | Self::Pmu(PmuError::FdLimit { .. }) => Obstacle::Limit,
            Self::Pmu(_) => Obstacle::HardwareCounters,
            Self::NoSections(_) => Obstacle::MemoryBlocks,
            Self::SelfCheck(_) => Obstacle::SelfCheck,
            Self::Unwanted => Obstacle::SwitchedOff,
            Self::Cpus(_) | Self::Incomplete(_) | Self::Unsized(_) | Self::Map(_) => Obstacle::Setup,
        }
    }
}

//! Errors of enforcement.

use numaward_cgroup::{
    CgroupPath, ReadError,
    knob::{Knob, KnobError, KnobValue},
};
use numaward_model::SettingsError;
use numaward_topology::Bytes;

use super::map_locks::LockHolder;

/// Settings could not be enforced.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// The settings contradict themselves.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The root of the hierarchy is the whole host.
    #[error("/: the root of the hierarchy takes no settings; name a cgroup below it")]
    Root,
    /// The cgroup does not exist.
    #[error("{cgroup}: no such cgroup")]
    Gone { cgroup: CgroupPath },
    /// The children of a cgroup could not be listed.
    #[error("{cgroup}: cannot list its children: {source}")]
    List { cgroup: CgroupPath, source: std::io::Error },
    /// An ancestor does not have the wanted CPUs or nodes.
    #[error(
        "{cgroup}: {knob} is to be {wanted}, but only {allowed} is available to it (see {knob}.effective of {by}): \
         widen its ancestors, or choose others"
    )]
    Excluded {
        cgroup: CgroupPath,
        /// `cpuset.cpus` or `cpuset.mems`.
        knob: Knob,
        /// The value to write.
        wanted: Box<KnobValue>,
        /// The available CPUs or nodes.
        allowed: Box<KnobValue>,
        /// The ancestor that limits them.
        by: CgroupPath,
    },
    /// A partition deeper than the first level needs `cpuset.cpus.exclusive`.
    #[error(
        "{cgroup}: this kernel makes partitions only of children of a partition (the root is one); nested \
         ones need Linux 6.7"
    )]
    NestedPartition { cgroup: CgroupPath },
    /// The kernel took the write, but the partition is invalid.
    #[error("{cgroup}: the partition is invalid: {reason}{}", in_the_way(beside))]
    InvalidPartition {
        cgroup: CgroupPath,
        /// The kernel's message.
        reason: String,
        /// Siblings with a `cpuset.cpus` that overlaps that of the cgroup.
        beside: Vec<CgroupPath>,
    },
    /// The write succeeded, but the knob holds another value.
    #[error("{cgroup}: {knob} is {found} after {wanted} was written")]
    NotTaken {
        cgroup: CgroupPath,
        knob: Knob,
        /// The written value.
        wanted: Box<KnobValue>,
        /// The value that was read back.
        found: Box<KnobValue>,
    },
    /// A limit would fall below the memory in use: the kernel would kill processes of the cgroup.
    #[error("{cgroup}: {knob} stays {held}: {used} are in use, more than {limit}")]
    InUse {
        cgroup: CgroupPath,
        knob: Knob,
        /// The present value.
        held: Box<KnobValue>,
        /// The limit to write.
        limit: Bytes,
        /// Memory in use, without page cache that can be dropped.
        used: Bytes,
    },
    /// A limit of huge pages would fall below those that processes have mapped: the kernel would kill them at the next touch.
    #[error(
        "{cgroup}: {knob} stays {held}: its processes have mapped {mapped} of huge pages, more than {limit}"
    )]
    HugePagesMapped {
        cgroup: CgroupPath,
        knob: Knob,
        /// The present value.
        held: Box<KnobValue>,
        /// The limit to write.
        limit: Bytes,
        /// Huge pages in use, and those that are mapped and not touched.
        mapped: Bytes,
    },
    /// The kernel could not lock the memory map of a process, and would wait with the lock of all cpusets.
    #[error("{cgroup}: cpuset.mems is not changed: {holder}")]
    MapLocked { cgroup: CgroupPath, holder: LockHolder },
    /// The memory in use could not be read.
    #[error(transparent)]
    Use(#[from] ReadError),
    /// A knob could not be read or written.
    #[error(transparent)]
    Knob(#[from] KnobError),
    /// systemd cannot be reached.
    #[error("the system bus, which is necessary to write the knobs of units, cannot be reached: {message}")]
    NoBus {
        /// The error of the bus.
        message: String,
    },
    /// systemd has no such unit.
    #[error("{unit}: systemd has no such unit")]
    UnknownUnit { unit: String },
    /// The daemon may not change the unit.
    #[error("{unit}: systemd does not let this process change the unit ({message}); run as root")]
    AccessDenied {
        unit: String,
        /// systemd's message.
        message: String,
    },
    /// systemd refused for another reason.
    #[error("{unit}: systemd refused: {message}")]
    Systemd {
        unit: String,
        /// The name of systemd's error, and its message.
        message: String,
    },
    /// Copy of an error that concerns several cgroups.
    #[error("{message}")]
    Shared { message: String },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// Describes the siblings that keep a cgroup from being a partition.
fn in_the_way(beside: &[CgroupPath]) -> String {
    if beside.is_empty() {
        return String::new();
    }
    let names: Vec<_> = beside.iter().map(ToString::to_string).collect();
    format!(" (its CPUs are also in cpuset.cpus of {})", names.join(", "))
}

impl EnforceError {
    /// Returns whether the cgroup is gone, so that nothing remains to be done for it.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Knob(error) => error.is_gone(),
            Self::Use(error) => error.is_gone(),
            _ => false,
        }
    }

    /// Returns whether a limit was not lowered because more than it is in use.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. } | Self::HugePagesMapped { .. })
    }

    /// Returns whether the knob does not exist because its controller is not enabled.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Knob(KnobError::Missing { .. }))
    }
}

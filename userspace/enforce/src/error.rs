//! What can go wrong between settings and the kernel.

use numaward_cgroup::{
    CgroupPath, ReadError,
    knob::{Knob, KnobError, KnobValue},
};
use numaward_model::SettingsError;
use numaward_topology::Bytes;

/// Settings could not be enforced.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// The settings cannot mean what they say.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The root of the hierarchy is the whole host.
    #[error("/: the root of the hierarchy takes no settings; name a cgroup below it")]
    Root,
    /// The cgroup is not there.
    #[error("{cgroup}: no such cgroup")]
    Gone {
        /// The cgroup.
        cgroup: CgroupPath,
    },
    /// The children of a cgroup could not be listed.
    #[error("{cgroup}: cannot list its children: {source}")]
    List {
        /// The cgroup.
        cgroup: CgroupPath,
        /// Why.
        source: std::io::Error,
    },
    /// An ancestor does not have what is wanted.
    #[error(
        "{cgroup}: {knob} is to be {wanted}, but only {allowed} is available to it (see {knob}.effective of {by}): \
         widen its ancestors, or choose others"
    )]
    Excluded {
        /// The cgroup.
        cgroup: CgroupPath,
        /// `cpuset.cpus` or `cpuset.mems`.
        knob: Knob,
        /// What it was to hold.
        wanted: Box<KnobValue>,
        /// What is available.
        allowed: Box<KnobValue>,
        /// The ancestor that limits it.
        by: CgroupPath,
    },
    /// A partition deeper than the first level needs `cpuset.cpus.exclusive`.
    #[error(
        "{cgroup}: this kernel makes partitions only of children of a partition (the root is one); nested \
         ones need Linux 6.7"
    )]
    NestedPartition {
        /// The cgroup.
        cgroup: CgroupPath,
    },
    /// The kernel took the write and made no valid partition.
    #[error("{cgroup}: the kernel does not make it a partition: {reason}{}", in_the_way(beside))]
    InvalidPartition {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The kernel's words.
        reason: String,
        /// The siblings that name CPUs of it in `cpuset.cpus`.
        beside: Vec<CgroupPath>,
    },
    /// The write succeeded, and the knob holds something else.
    #[error("{cgroup}: {knob} was written {wanted} and holds {found}")]
    NotTaken {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The knob.
        knob: Knob,
        /// What was written.
        wanted: Box<KnobValue>,
        /// What was read back.
        found: Box<KnobValue>,
    },
    /// A limit is lower than what is in use: the kernel would kill processes of the cgroup.
    #[error("{cgroup}: {knob} stays {held}: {used} are in use, more than {limit}")]
    InUse {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The knob.
        knob: Knob,
        /// What it holds.
        held: Box<KnobValue>,
        /// What it was to hold.
        limit: Bytes,
        /// What is in use, without page cache that can be dropped.
        used: Bytes,
    },
    /// It is not known how much memory is in use.
    #[error(transparent)]
    Use(#[from] ReadError),
    /// A knob could not be read or written.
    #[error(transparent)]
    Knob(#[from] KnobError),
    /// systemd cannot be asked.
    #[error("the system bus is not reachable, and this host's units are systemd's: {message}")]
    NoBus {
        /// What the bus said.
        message: String,
    },
    /// systemd has no such unit.
    #[error("{unit}: systemd has no such unit")]
    UnknownUnit {
        /// The unit.
        unit: String,
    },
    /// We may not change the unit.
    #[error("{unit}: systemd does not let this process change the unit ({message}); run as root")]
    AccessDenied {
        /// The unit.
        unit: String,
        /// systemd's words.
        message: String,
    },
    /// systemd refused for another reason.
    #[error("{unit}: systemd refused: {message}")]
    Systemd {
        /// The unit.
        unit: String,
        /// systemd's words, with the name of the error.
        message: String,
    },
    /// It failed for several cgroups at once.
    #[error("{message}")]
    Shared {
        /// Why, in words.
        message: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// Who keeps a cgroup from being a partition, in words.
fn in_the_way(beside: &[CgroupPath]) -> String {
    if beside.is_empty() {
        return String::new();
    }
    let names: Vec<_> = beside.iter().map(ToString::to_string).collect();
    format!(" (cpuset.cpus of {} names CPUs of it)", names.join(", "))
}

impl EnforceError {
    /// Whether the cgroup is gone, so that nothing is left to do for it.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Knob(error) => error.is_gone(),
            Self::Use(error) => error.is_gone(),
            _ => false,
        }
    }

    /// Whether the knob is not there, as its controller is not enabled.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Knob(KnobError::Missing { .. }))
    }
}

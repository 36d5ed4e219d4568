//! What one part of the daemon asks of another, without knowing which.

use std::sync::Arc;

use numaward_cgroup::{CgroupEvent, CgroupPath};
use numaward_topology::Machine;

use crate::{EventReport, Guarantees, accesses::WorkloadAccesses, headroom::Headroom};

/// The machine as it is now.
pub trait MachineSource: Send + Sync {
    /// The machine. As long as it is the same one, it did not change.
    fn machine(&self) -> Arc<Machine>;
}

/// Learns what is assigned. It is called before a request is answered; where a container runtime waits for the answer, it
/// may be called after it.
pub trait AssignmentSink: Send + Sync {
    /// This is assigned now.
    fn publish_guarantees(&self, promises: Guarantees);
}

/// Takes events.
pub trait EventSink: Send + Sync {
    /// Reports an event; `cgroup` is that of the workload it concerns, if there is one.
    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport);
}

/// Knows whether the nodes can keep what is promised on them.
pub trait HeadroomSource: Send + Sync {
    /// What was seen last. Waits for nothing.
    fn headroom(&self) -> Arc<Headroom>;
}

/// Knows which memory workloads use.
pub trait AccessSource: Send + Sync {
    /// What was counted up to now of each workload that has no other below it. Reads maps of probes: not for threads that
    /// others wait for.
    fn accesses(&self) -> Vec<WorkloadAccesses>;
}

/// Takes news of cgroups; `false`: no more.
pub type CgroupListener = Box<dyn Fn(&[CgroupEvent]) -> bool + Send + Sync>;

/// Knows which cgroups come and go.
pub trait CgroupEvents: Send + Sync {
    /// This listener is called from now on, until it answers `false`.
    fn subscribe(&self, listener: CgroupListener);
}

/// Takes the names of containers of pods.
pub trait ContainerNames: Send + Sync {
    /// The names, `NAMESPACE/POD/CONTAINER`, by the runtime's ids; where they are `all` there are, others are forgotten.
    fn update_containers(&self, named: Vec<(String, String)>, all: bool);
    /// A container is gone.
    fn remove_container(&self, id: &str);
}

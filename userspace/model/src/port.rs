//! Traits by which the parts of the daemon call each other without a dependency on the implementation.

use std::sync::Arc;

use numaward_cgroup::{CgroupEvent, CgroupPath};
use numaward_topology::Machine;

use crate::{EventReport, Guarantees, accesses::WorkloadAccesses, headroom::Headroom};

/// A source of the machine's current state.
pub trait MachineSource: Send + Sync {
    /// Returns the machine. The same `Arc` means an unchanged machine.
    fn machine(&self) -> Arc<Machine>;
}

/// A receiver of guarantees. It is called before a request is answered; if a container runtime waits for the answer, it
/// may be called afterwards.
pub trait AssignmentSink: Send + Sync {
    /// Replaces the known guarantees.
    fn publish_guarantees(&self, guarantees: Guarantees);
}

/// A receiver of events.
pub trait EventSink: Send + Sync {
    /// Reports an event; `cgroup` is the cgroup of the workload concerned, if there is one.
    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport);
}

/// A source of the memory headroom of nodes.
pub trait HeadroomSource: Send + Sync {
    /// Returns the result of the last check without blocking.
    fn headroom(&self) -> Arc<Headroom>;
}

/// A source of memory accesses.
pub trait AccessSource: Send + Sync {
    /// Returns the accesses so far of each workload that has no workload below it. Reads maps of probes, so it must not
    /// run on a thread that other threads wait for.
    fn accesses(&self) -> Vec<WorkloadAccesses>;
}

/// A listener for changes of cgroups; it returns `false` to unsubscribe.
pub type CgroupListener = Box<dyn Fn(&[CgroupEvent]) -> bool + Send + Sync>;

/// A source of created and removed cgroups.
pub trait CgroupEvents: Send + Sync {
    /// Adds a listener, which is called until it returns `false`.
    fn subscribe(&self, listener: CgroupListener);
}

/// A receiver of the names of containers.
pub trait ContainerNames: Send + Sync {
    /// Sets names (`NAMESPACE/POD/CONTAINER`) by container id. With `all`, containers that are not in the list are
    /// removed.
    fn update_containers(&self, named: Vec<(String, String)>, all: bool);
    fn remove_container(&self, id: &str);
}

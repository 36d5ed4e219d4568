//! The trait by which the parts of the daemon use the observer without a dependency on it.

use std::sync::Arc;

use numaward_cgroup::{CgroupEvent, CgroupPath};
use numaward_topology::Machine;

use crate::{EventReport, Guarantees, accesses::WorkloadAccesses, headroom::Headroom};

/// A listener for changes of cgroups; it returns `false` to unsubscribe.
pub type CgroupListener = Box<dyn Fn(&[CgroupEvent]) -> bool + Send + Sync>;

/// The observed host: its current state, and the receiver of guarantees, events and names.
pub trait ObservedHost: Send + Sync {
    /// Returns the machine. The same `Arc` means an unchanged machine.
    fn machine(&self) -> Arc<Machine>;

    /// Returns the memory headroom of nodes at the last check, without blocking.
    fn headroom(&self) -> Arc<Headroom>;

    /// Returns the accesses so far of each workload that has no workload below it. Reads maps of probes, so it must not
    /// run on a thread that other threads wait for.
    fn accesses(&self) -> Vec<WorkloadAccesses>;

    /// Adds a listener for created and removed cgroups, which is called until it returns `false`.
    fn subscribe(&self, listener: CgroupListener);

    /// Replaces the known guarantees. It is called before a request is answered; if a container runtime waits for the
    /// answer, it may be called afterwards.
    fn publish_guarantees(&self, guarantees: Guarantees);

    /// Reports an event; `cgroup` is the cgroup of the workload concerned, if there is one.
    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport);

    /// Sets names of containers (`NAMESPACE/POD/CONTAINER`) by container id. With `all`, containers that are not in the
    /// list are removed.
    fn update_containers(&self, named: Vec<(String, String)>, all: bool);

    fn remove_container(&self, id: &str);
}

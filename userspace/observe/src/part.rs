//! Health of the parts of the daemon. A degraded part does not stop the daemon: it continues with less information or
//! fewer functions.

use std::{collections::BTreeMap, error::Error};

use numaward_model::error_chain;
use parking_lot::{Mutex, MutexGuard};

/// A part of the daemon that can be degraded. Its name is the metric label `part`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DaemonPart {
    /// Following the configuration; degraded if its files are invalid.
    Configuration,
    /// Changes of the configuration that wait for the next start or for `numaward reload`. No fault, so no alert.
    PendingConfiguration,
    /// Reading the CPUs, nodes and memory of the machine.
    Topology,
    /// Writing nodes and memory that were added to the probes' maps.
    ProbeNodes,
    /// Reading the cgroup hierarchy.
    Cgroups,
    /// Notifications of new cgroups; without them, the hierarchy is polled.
    CgroupWatch,
    /// Following all cgroups; there is a limit on their number.
    CgroupCount,
    /// Assigning counters (slots) to workloads.
    Slots,
    /// Reading the memory of the nodes.
    NodeMemory,
    /// Reading the counters of allocations.
    Counters,
    /// Comparing the counters of allocations with the kernel's.
    Coverage,
    /// Reading the CPU time of cgroups.
    CpuTimes,
    /// Reading the counters of all other activity.
    Activity,
    /// Reading the probes' events: misses, kills, stalls.
    ProbeEvents,
    /// Reading the costs of the probes.
    ProbeStats,
    /// Attaching and detaching the allocation probe according to its duty cycle.
    DutyCycle,
    /// Reading the resident memory of workloads by node.
    Residency,
    /// Admitting new guarantees; degraded if the policy does not fit the machine.
    Policy,
    /// Reading the kubelet's guarantees; degraded as well if it pins containers that are also pinned here.
    Kubelet,
    /// Repeating the decisions of the kubelet (strategy `kubelet`); degraded if its version is unknown, or newer than the recorded ones.
    KubeletVersion,
    /// Reading the kubelet's configuration from its API.
    KubeletConfiguration,
    /// Reading pods from the API server.
    KubernetesApi,
    /// Evicting pods that run without the guarantee they request.
    Evictions,
    /// Publishing the free capacity of the nodes for the scheduler.
    NodeResourceTopology,
    /// Publishing the NUMA nodes as devices of resource claims.
    ResourceSlices,
    /// Serving the kubelet's calls for resource claims.
    ResourceClaims,
    /// Removing the startup taint of the Kubernetes node.
    StartupTaint,
    /// Reading the use of exclusive CPUs by intruders.
    Intruders,
    /// Counting interrupts on exclusive CPUs.
    Interrupts,
}

impl DaemonPart {
    /// Returns the value of the metric label `part`.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

/// Degraded parts, each with the reason.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<BTreeMap<DaemonPart, String>>);

impl Health {
    /// Notes that a part works, or the reason why it is degraded. Logs changes.
    pub(crate) fn note(&self, part: DaemonPart, result: Result<(), String>) {
        let mut degraded = self.degraded();
        match result {
            Ok(()) => {
                if degraded.remove(&part).is_some() {
                    tracing::info!(part = part.name(), "this part of the daemon works again");
                }
            }
            Err(reason) => {
                if degraded.get(&part) != Some(&reason) {
                    tracing::warn!(part = part.name(), reason, "this part of the daemon is degraded");
                    degraded.insert(part, reason);
                }
            }
        }
    }

    /// Notes the health of a part from the result of an operation. Returns the value, or `None` after an error.
    pub(crate) fn note_result<T>(&self, part: DaemonPart, result: Result<T, impl Error>) -> Option<T> {
        let (value, noted) = match result {
            Ok(value) => (Some(value), Ok(())),
            Err(error) => (None, Err(error_chain(&error))),
        };
        self.note(part, noted);
        value
    }

    pub(crate) fn degraded(&self) -> MutexGuard<'_, BTreeMap<DaemonPart, String>> {
        self.0.lock()
    }
}

//! The parts of the daemon that can work less well than they should.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A part of the daemon that can work less well than it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Reading the machine.
    Topology,
    /// Reporting to the probes nodes and memory that came.
    ProbeNodes,
    /// Finding workloads.
    Cgroups,
    /// Noticing new workloads without looking for them.
    CgroupWatch,
    /// Giving workloads counters of their own.
    Slots,
    /// Reading the nodes' memory.
    NodeMemory,
    /// Counting.
    Counters,
    /// Counting what workloads do beside allocating.
    Activity,
    /// Reading of misses, kills and stalls as they happen.
    ProbeEvents,
    /// Reading what the probes cost.
    ProbeStats,
    /// Attaching the allocation probe for a part of the time.
    DutyCycle,
    /// Reading where memory lies.
    Residency,
    /// Reading what the kubelet promised.
    Kubelet,
    /// Reading pods from the API server.
    KubernetesApi,
    /// Telling the scheduler what is free.
    NodeResourceTopology,
    /// Telling who runs on exclusive CPUs.
    Intruders,
    /// Counting interrupts on exclusive CPUs.
    Interrupts,
}

impl Part {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Topology => "topology",
            Self::ProbeNodes => "probe nodes",
            Self::Cgroups => "cgroups",
            Self::CgroupWatch => "cgroup watch",
            Self::Slots => "slots",
            Self::NodeMemory => "node memory",
            Self::Counters => "counters",
            Self::Activity => "activity",
            Self::ProbeEvents => "probe events",
            Self::ProbeStats => "probe statistics",
            Self::DutyCycle => "duty cycle",
            Self::Residency => "residency",
            Self::Kubelet => "kubelet",
            Self::KubernetesApi => "Kubernetes API",
            Self::NodeResourceTopology => "NodeResourceTopology",
            Self::Intruders => "intruders",
            Self::Interrupts => "interrupts",
        }
    }
}

/// The parts that work less well than they should, and why.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<BTreeMap<Part, String>>);

impl Health {
    /// Notes that a part works, or why not; logs what changed.
    pub(crate) fn note(&self, part: Part, result: Result<(), String>) {
        let mut degraded = self.degraded();
        match result {
            Ok(()) => {
                if degraded.remove(&part).is_some() {
                    tracing::info!(part = part.name(), "works again");
                }
            }
            Err(reason) => {
                if degraded.get(&part) != Some(&reason) {
                    tracing::warn!(part = part.name(), reason, "works less well than it should");
                    degraded.insert(part, reason);
                }
            }
        }
    }

    pub(crate) fn degraded(&self) -> MutexGuard<'_, BTreeMap<Part, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

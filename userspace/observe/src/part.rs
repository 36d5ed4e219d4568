//! The parts of the daemon that can work less well than they should.

use std::{collections::BTreeMap, error::Error};

use numaward_model::error_chain;
use parking_lot::{Mutex, MutexGuard};

/// A part of the daemon that can work less well than it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DaemonPart {
    /// Reading the machine.
    Topology,
    /// Reporting to the probes nodes and memory that came.
    ProbeNodes,
    /// Finding workloads.
    Cgroups,
    /// Noticing new workloads without looking for them.
    CgroupWatch,
    /// Following all cgroups that there are.
    CgroupCount,
    /// Giving workloads counters of their own.
    Slots,
    /// Reading the nodes' memory.
    NodeMemory,
    /// Counting.
    Counters,
    /// Counting what workloads do apart from allocating.
    Activity,
    /// Reading of misses, kills and stalls as they happen.
    ProbeEvents,
    /// Reading what the probes cost.
    ProbeStats,
    /// Attaching the allocation probe for a part of the time.
    DutyCycle,
    /// Reading where memory lies.
    Residency,
    /// Giving new guarantees: the policy does not fit the machine.
    Policy,
    /// Reading what the kubelet promised.
    Kubelet,
    /// Reading pods from the API server.
    KubernetesApi,
    /// Evicting pods that run without what they ask for.
    Evictions,
    /// Publishing to the scheduler what is free.
    NodeResourceTopology,
    /// Finding out who runs on exclusive CPUs.
    Intruders,
    /// Counting interrupts on exclusive CPUs.
    Interrupts,
}

impl DaemonPart {
    /// The value of the metric label `part`.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

/// The parts that work less well than they should, and why.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<BTreeMap<DaemonPart, String>>);

impl Health {
    /// Notes that a part works, or why not; logs what changed.
    pub(crate) fn note(&self, part: DaemonPart, result: Result<(), String>) {
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

    /// Notes whether something worked, and hands on what came of it.
    pub(crate) fn noted<T>(&self, part: DaemonPart, result: Result<T, impl Error>) -> Option<T> {
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

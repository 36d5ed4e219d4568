//! The probes and the data derived from them. Each reading of a map notes whether it succeeded.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_probes::{CpuUsage, Intruder, ProbeEvent, Probes};
use numaward_topology::{CpuId, NodeSet};

use crate::{
    activity::AttachedProbes,
    intrusions::Intrusions,
    part::{DaemonPart, Health},
    stacks::KernelSymbols,
};

/// Duration for which the cost of the probes is measured after the start.
///
/// The kernel measures BPF programs only on request, which costs every program of the host a little. The request
/// needs a privilege that the daemon drops; a request made earlier stays in force until it is closed. `numaward
/// status --cost` measures again with its own request to the kernel.
pub(crate) const COST_MEASUREMENT_TIME: Duration = Duration::from_secs(10);

/// Attributes of the workload that an event is about.
#[derive(Debug)]
pub(crate) struct EventSubject {
    pub(crate) name: Arc<str>,
    pub(crate) guaranteed: Option<NodeSet>,
}

pub(crate) struct Probing {
    pub(crate) probes: Probes,
    /// The attached probes.
    pub(crate) attached: Arc<AttachedProbes>,
    /// Handle that keeps the kernel measuring, and the time when it is closed.
    pub(crate) cost: Option<(OwnedFd, Instant)>,
    /// Use of exclusive CPUs by intruders.
    pub(crate) intrusions: Intrusions,
    /// Events that were read but not reported yet.
    pub(crate) events: Vec<(ProbeEvent, Option<EventSubject>)>,
    pub(crate) health: Arc<Health>,
    /// Symbols of the kernel, if call chains are sampled.
    pub(crate) kernel_symbols: Option<Arc<KernelSymbols>>,
}

impl Probing {
    /// Reads the use of all CPUs that are exclusive or have been.
    pub(crate) fn cpu_use(&mut self) -> Option<BTreeMap<CpuId, CpuUsage>> {
        let used = self.probes.cpu_usage();
        self.health.note_result(DaemonPart::Intruders, used)
    }

    /// Reads the intruders on exclusive CPUs.
    pub(crate) fn intruders(&self) -> Vec<Intruder> {
        self.health.note_result(DaemonPart::Intruders, self.probes.intruders()).unwrap_or_default()
    }

    /// Reads the probes' events since the last call.
    pub(crate) fn events(&mut self) -> Option<Vec<ProbeEvent>> {
        let events = self.probes.events();
        self.health.note_result(DaemonPart::ProbeEvents, events)
    }

    /// Stops the measurement when its time is over; attaches or detaches probes with a duty cycle.
    pub(crate) fn follow_cost(&mut self, now: Instant) {
        self.cost.take_if(|(_, until)| now >= *until);
        let kept = self.probes.apply_duty_cycle(now);
        self.health.note_result(DaemonPart::DutyCycle, kept);
    }
}

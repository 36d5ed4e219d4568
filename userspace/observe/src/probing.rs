//! The probes and what is known of them. Each reading of a map notes whether it worked.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_probes::{CpuUsage, Intruder, ProbeEvent, Probes};
use numaward_topology::{CpuId, NodeSet};

use crate::{
    activity::Attached,
    intrusions::Intrusions,
    part::{Health, Part},
    stacks::KernelSymbols,
};

/// How long the probes are measured after the start: how long they run.
///
/// The kernel measures BPF programs only while somebody asks it to, and that costs every program of the host a little. To
/// ask takes a privilege that the daemon gives up; what it asked for before holds until it is done. `numaward status
/// --cost` measures anew: it asks the kernel itself.
pub(crate) const MEASURED: Duration = Duration::from_secs(10);

/// What is known of the workload that an event is about.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: Arc<str>,
    pub(crate) promised: Option<NodeSet>,
}

pub(crate) struct Probing {
    pub(crate) probes: Probes,
    /// Those that are attached.
    pub(crate) attached: Arc<Attached>,
    /// While the kernel measures them, and until when.
    pub(crate) cost: Option<(OwnedFd, Instant)>,
    /// What others did on exclusive CPUs.
    pub(crate) intrusions: Intrusions,
    /// Events that are read and not yet reported.
    pub(crate) events: Vec<(ProbeEvent, Option<Subject>)>,
    pub(crate) health: Arc<Health>,
    /// The kernel's functions, where call chains are taken.
    pub(crate) kernel_symbols: Option<Arc<KernelSymbols>>,
}

impl Probing {
    /// Who used the CPUs that are exclusive, or were.
    pub(crate) fn cpu_use(&mut self) -> Option<BTreeMap<CpuId, CpuUsage>> {
        let used = self.probes.cpu_usage();
        self.health.noted(Part::Intruders, used)
    }

    /// Who ran on CPUs that are exclusive to others.
    pub(crate) fn intruders(&self) -> Vec<Intruder> {
        self.health.noted(Part::Intruders, self.probes.intruders()).unwrap_or_default()
    }

    /// What the probes reported since it was asked last.
    pub(crate) fn events(&mut self) -> Option<Vec<ProbeEvent>> {
        let events = self.probes.events();
        self.health.noted(Part::ProbeEvents, events)
    }

    /// Ends measuring when it is time; attaches or detaches what has a duty cycle.
    pub(crate) fn follow_cost(&mut self, now: Instant) {
        self.cost.take_if(|(_, until)| now >= *until);
        let kept = self.probes.apply_duty_cycle(now);
        self.health.noted(Part::DutyCycle, kept);
    }
}

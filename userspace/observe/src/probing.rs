//! The probes and what is known of them. Each reading of a map notes whether it worked.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use numaward_model::error_chain;
use numaward_probes::{
    self as probes, Activity, CpuUse, Intruder, Mode, Probe, ProbeEvent, ProbeReport, ProbeStats, Probes,
    SlotId,
};
use numaward_topology::{CpuId, NodeSet};

use crate::{
    cost::Cost,
    intrusions::Intrusions,
    part::{Health, Part},
};

/// What is known of the workload that an event is about.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: Arc<str>,
    /// The nodes promised to it.
    pub(crate) promised: Option<NodeSet>,
}

/// The probes.
#[derive(Debug)]
pub(crate) struct Probing {
    pub(crate) probes: Probes,
    /// While the kernel measures them.
    pub(crate) cost: Option<Cost>,
    /// What others did on exclusive CPUs.
    pub(crate) intrusions: Intrusions,
    /// Events that are read and not yet reported.
    pub(crate) events: Vec<(ProbeEvent, Option<Subject>)>,
    pub(crate) health: Arc<Health>,
}

impl Probing {
    /// Notes whether reading worked.
    fn noted<T>(&self, part: Part, read: Result<T, impl std::error::Error>) -> Option<T> {
        match read {
            Ok(value) => {
                self.health.note(part, Ok(()));
                Some(value)
            }
            Err(error) => {
                self.health.note(part, Err(error_chain(&error)));
                None
            }
        }
    }

    /// Whether a probe is attached.
    pub(crate) fn has(&self, probe: Probe) -> bool {
        self.probes.reports().iter().any(|report| report.probe == probe && report.mode != Mode::Absent)
    }

    /// Whether any probe counts by workload.
    pub(crate) fn needs_slots(&self) -> bool {
        self.probes.reports().iter().any(|report| report.mode != Mode::Absent)
    }

    /// What was allocated; `None` where no probe counts that.
    pub(crate) fn counters(&self) -> Option<probes::Snapshot> {
        self.has(Probe::Alloc).then(|| self.noted(Part::Counters, self.probes.counters())).flatten()
    }

    /// What the probes beside that of allocations counted; nothing where that fails.
    pub(crate) fn activity(&self) -> (BTreeMap<SlotId, Activity>, Activity) {
        self.noted(Part::Activity, self.probes.activity()).unwrap_or_default()
    }

    /// Who used the CPUs that are exclusive, or were.
    pub(crate) fn cpu_use(&mut self) -> Option<BTreeMap<CpuId, CpuUse>> {
        let used = self.probes.cpu_use();
        self.noted(Part::Intruders, used)
    }

    /// Who ran on CPUs that are exclusive to others.
    pub(crate) fn intruders(&self) -> Vec<Intruder> {
        self.noted(Part::Intruders, self.probes.intruders()).unwrap_or_default()
    }

    /// What the probes reported since it was asked last.
    pub(crate) fn events(&mut self) -> Option<Vec<ProbeEvent>> {
        let events = self.probes.events();
        self.noted(Part::ProbeEvents, events)
    }

    /// What the probes cost; nothing where that cannot be read.
    pub(crate) fn stats(&self) -> Vec<ProbeStats> {
        self.noted(Part::ProbeStats, self.probes.stats()).unwrap_or_default()
    }

    /// Ends measuring when it is time; attaches or detaches what has a duty cycle.
    pub(crate) fn follow_cost(&mut self, now: Instant) {
        self.cost.take_if(|cost| now >= cost.until);
        let kept = self.probes.keep_duty(now);
        self.noted(Part::DutyCycle, kept);
    }

    /// Which part of the time a probe watches; `None` where it is not attached.
    pub(crate) fn sampled_ratio(&self, report: &ProbeReport) -> Option<f64> {
        match (report.probe, report.mode) {
            (_, Mode::Absent) => None,
            (Probe::Alloc, _) => Some(self.probes.duty_cycle().map_or(1.0, probes::DutyCycle::ratio)),
            _ => Some(1.0),
        }
    }

    /// The memory of the maps of each family.
    pub(crate) fn map_memory(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.probes.map_memory().into_iter().map(|memory| (memory.family, memory.bytes))
    }
}

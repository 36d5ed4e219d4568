//! The costs of the probes, read without a lock.

use numaward_probes::{DutyCycle, MapUsage, Mode, Probe, ProbeReport, ProbeStats};

use crate::{observer::Observer, part::DaemonPart};

/// The state of the probes, and their costs.
pub(crate) struct ProbeReadings {
    pub(crate) reports: Vec<ProbeReport>,
    /// Empty where they cannot be read.
    pub(crate) costs: Vec<ProbeStats>,
    pub(crate) maps: Vec<MapUsage>,
    /// Bytes that the maps of each family take.
    pub(crate) map_memory: Vec<(&'static str, u64)>,
    duty_cycle: Option<DutyCycle>,
}

impl ProbeReadings {
    /// The part of the time that a probe watches; `None` where it is not attached.
    pub(crate) fn sampled_ratio(&self, report: &ProbeReport) -> Option<f64> {
        match (report.probe, report.mode) {
            (_, Mode::Absent) => None,
            (Probe::Alloc, _) => Some(self.duty_cycle.map_or(1.0, DutyCycle::ratio)),
            _ => Some(1.0),
        }
    }

    pub(crate) fn cost(&self, probe: Probe) -> Option<&ProbeStats> {
        self.costs.iter().find(|cost| cost.probe == probe)
    }
}

impl Observer {
    /// Reads the costs of the probes from files.
    pub(crate) fn probe_figures(&self) -> ProbeReadings {
        let (mut figures, costs) = {
            let probes = &self.probing().probes;
            let figures = ProbeReadings {
                reports: probes.reports().to_vec(),
                costs: Vec::new(),
                maps: probes.map_usage(),
                map_memory: probes.map_memory().collect(),
                duty_cycle: probes.duty_cycle(),
            };
            (figures, probes.costs())
        };
        figures.costs = self.health.noted(DaemonPart::ProbeStats, costs.read()).unwrap_or_default();
        figures
    }
}

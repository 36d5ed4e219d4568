//! State and costs of the probes. Files are read without a lock.

use numaward_probes::{DutyCycle, MapUsage, Mode, Probe, ProbeReport, ProbeStats};

use crate::{observer::Observer, part::DaemonPart};

/// State and costs of the probes at one time.
pub(crate) struct ProbeReadings {
    pub(crate) reports: Vec<ProbeReport>,
    /// Empty if the costs cannot be read.
    pub(crate) costs: Vec<ProbeStats>,
    pub(crate) maps: Vec<MapUsage>,
    /// Bytes of the maps of each family of probes.
    pub(crate) map_memory: Vec<(&'static str, u64)>,
    duty_cycle: Option<DutyCycle>,
}

impl ProbeReadings {
    /// Returns the share of the time in which a probe is attached; `None` if it is absent.
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

    /// Reads the state of the probes, and their costs from files of the kernel.
    pub(crate) fn take(observer: &Observer) -> Self {
        let (mut readings, costs) = {
            let probes = &observer.registry.probing().probes;
            let readings = Self {
                reports: probes.reports().to_vec(),
                costs: Vec::new(),
                maps: probes.map_usage(),
                map_memory: probes.map_memory().collect(),
                duty_cycle: probes.duty_cycle(),
            };
            (readings, probes.costs())
        };
        readings.costs =
            observer.health.note_result(DaemonPart::ProbeStats, costs.read()).unwrap_or_default();
        readings
    }
}

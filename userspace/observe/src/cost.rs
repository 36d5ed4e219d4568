//! What watching costs: how long the probes run, how much memory their maps take, which part of the time is watched.
//!
//! The kernel measures BPF programs only while somebody asks it to, and that costs every program of the host a little. To
//! ask takes a privilege that the daemon gives up; what it asked for before holds until it is done. So it measures
//! for a short time after its start. `numaward status --cost` measures anew: it asks the kernel itself.

use std::time::{Duration, Instant};

use numaward_probes::{Mode, Probe, ProbeReport, StatsWindow, stats_window};

use super::{Part, State, chain};

/// How long the probes are measured.
const MEASURED: Duration = Duration::from_secs(10);

/// Until it is dropped, the kernel measures all BPF programs.
#[derive(Debug)]
pub(super) struct Cost {
    _window: StatsWindow,
    until: Instant,
}

impl Cost {
    /// Begins to measure; `None` where the kernel does not let us.
    pub(super) fn measure(now: Instant) -> Option<Self> {
        match stats_window() {
            Ok(window) => Some(Self { _window: window, until: now + MEASURED }),
            Err(error) => {
                tracing::info!(%error, "what the probes cost is not measured");
                None
            }
        }
    }
}

impl State {
    /// Ends measuring when it is time; attaches or detaches what has a duty cycle.
    pub(super) fn follow_cost(&mut self, now: Instant) {
        self.cost.take_if(|cost| now >= cost.until);
        let kept = self.probes.keep_duty(now).map_err(|error| chain(&error));
        self.note(Part::DutyCycle, kept);
    }

    /// Which part of the time a probe watches; `None` where it is not attached.
    pub(super) fn sampled_ratio(&self, report: &ProbeReport) -> Option<f64> {
        match (report.probe, report.mode) {
            (_, Mode::Absent) => None,
            (Probe::Alloc, _) => {
                Some(self.probes.duty_cycle().map_or(1.0, numaward_probes::DutyCycle::ratio))
            }
            _ => Some(1.0),
        }
    }

    /// The memory of the maps of each family.
    pub(super) fn map_memory(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.probes.map_memory().into_iter().map(|memory| (memory.family, memory.bytes))
    }
}

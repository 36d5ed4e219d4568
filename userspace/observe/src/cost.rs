//! What watching costs: how long the probes run, how much memory their maps take, which part of the time is watched.
//!
//! The kernel measures BPF programs only while somebody asks it to, and that costs every program of the host a little. To
//! ask takes a privilege that the daemon gives up; what it asked for before holds until it is done. So it measures
//! for a short time after its start. `numaward status --cost` measures anew: it asks the kernel itself.

use std::time::{Duration, Instant};

use numaward_probes::{StatsWindow, stats_window};

/// How long the probes are measured.
const MEASURED: Duration = Duration::from_secs(10);

/// Until it is dropped, the kernel measures all BPF programs.
#[derive(Debug)]
pub(crate) struct Cost {
    _window: StatsWindow,
    pub(crate) until: Instant,
}

impl Cost {
    /// Begins to measure; `None` where the kernel does not let us.
    pub(crate) fn measure(now: Instant) -> Option<Self> {
        match stats_window() {
            Ok(window) => Some(Self { _window: window, until: now + MEASURED }),
            Err(error) => {
                tracing::info!(%error, "what the probes cost is not measured");
                None
            }
        }
    }
}

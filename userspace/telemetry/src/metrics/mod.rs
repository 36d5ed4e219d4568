//! Metrics: what this host does, in the text formats of Prometheus and OpenMetrics.
//!
//! Nothing is counted twice: at each reading, typed families are made of what their source says ([`SnapshotSource`]). A
//! scrape writes them straight to the response ([`Metrics::encode`]); who sends or watches them takes samples
//! (`Metrics::visit`). Only what numaward itself does (scrapes) is kept in the registry, which is made once and passed
//! in.

mod activity;
mod collector;
mod exposition;
mod family;
mod kubelet;
mod samples;
mod text;

use std::{fmt, sync::Arc, time::Instant};

use bytes::Bytes;
use numaward_model::snapshot::SnapshotSource;
use prometheus_client::{
    metrics::{histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};

pub use self::exposition::Format;
use self::{family::Sink, text::Lines};
pub(crate) use self::{
    family::{Description, Kind, Number},
    samples::{Sample, Value},
};

/// All metrics of the daemon.
#[derive(Debug)]
pub struct Metrics {
    root: Registry,
    source: Arc<dyn SnapshotSource>,
    scrape_duration: Histogram,
    /// Whether the kubelet's gauges are served.
    kubelet_names: bool,
}

/// The label of a NUMA node. In Kubernetes, `node` is a host.
const NODE: &str = "numa_node";
/// Of all names but the kubelet's.
const PREFIX: &str = "numaward";

impl Metrics {
    /// Registers what the source gives and what numaward says of itself.
    pub fn new(source: Arc<dyn SnapshotSource>) -> Self {
        let mut root = Registry::default();
        let registry = root.sub_registry_with_prefix(PREFIX);
        registry.register(
            "build",
            "The build of numaward that runs",
            Info::new([("version", numaward_api::VERSION)]),
        );
        let scrape_duration = Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0]);
        registry.register_with_unit(
            "scrape_duration",
            "Time taken to write the metrics, until the reader had them",
            Unit::Seconds,
            scrape_duration.clone(),
        );
        Self { root, source, scrape_duration, kubelet_names: false }
    }

    /// Serves what somebody counts, too. Names get the prefix.
    #[must_use]
    pub fn with(mut self, register: impl FnOnce(&mut Registry)) -> Self {
        register(self.root.sub_registry_with_prefix(PREFIX));
        self
    }

    /// Serves what the kubelet has series for under its names, too (`exportKubeletNames`).
    #[must_use]
    pub fn with_kubelet_names(mut self, register: impl FnOnce(&mut Registry)) -> Self {
        register(&mut self.root);
        self.kubelet_names = true;
        self
    }

    /// Writes all metrics, piece by piece. Blocks; ends early when the sink returns `false`.
    pub fn encode(&self, format: Format, sink: impl FnMut(Bytes) -> bool) -> fmt::Result {
        let start = Instant::now();
        self.write(format, sink)?;
        self.scrape_duration.observe(start.elapsed().as_secs_f64());
        Ok(())
    }

    fn write(&self, format: Format, sink: impl FnMut(Bytes) -> bool) -> fmt::Result {
        let others = |out: &mut dyn fmt::Write| {
            let mut lines = Lines::new(out);
            self.collect(&mut lines)?;
            lines.hand_on()
        };
        exposition::encode(&self.root, others, format, sink)
    }

    /// Takes a reading of all that is not kept in the registry.
    fn collect(&self, sink: &mut impl Sink) -> fmt::Result {
        let snapshot = self.source.snapshot();
        collector::collect(&snapshot, sink)?;
        if self.kubelet_names { kubelet::collect(&snapshot.promises, sink) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;

//! Metrics of this host in the text formats of Prometheus and OpenMetrics.
//!
//! The families are created at each reading from a snapshot of the daemon's figures ([`SnapshotSource`]), so no figure
//! is counted twice. A scrape writes them directly to the response ([`Metrics::encode`]); OTLP and alerts read them as
//! samples (`Metrics::visit`). Only counters of numaward's own work, such as scrapes, are kept in a registry.

mod activity;
mod collector;
mod exposition;
mod family;
mod filter;
mod kubelet;
mod samples;
mod text;

use std::{fmt, sync::Arc, time::Instant};

use bytes::Bytes;
use numaward_config::exported::ExportedMetrics;
use numaward_model::snapshot::SnapshotSource;
use prometheus_client::{
    encoding,
    metrics::{histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};

pub use self::exposition::Format;
use self::{exposition::TextWriter, family::FamilySink, text::LineWriter};
pub(crate) use self::{
    family::{FamilyDescription, FamilyKind, Number},
    samples::{MetricSample, SampleValue},
};

/// All metrics of the daemon.
#[derive(Debug)]
pub struct Metrics {
    root: Registry,
    source: Arc<dyn SnapshotSource>,
    scrape_duration: Histogram,
    /// True if the kubelet's gauges are exported.
    kubelet_names: bool,
    /// The filter for exported metrics.
    exported: ExportedMetrics,
}

/// The label of a NUMA node. The label `node` is a host in Kubernetes.
const NODE: &str = "numa_node";
/// The prefix of all names, except the kubelet's.
const PREFIX: &str = "numaward";

impl Metrics {
    /// Creates the metrics of a source, with the registry of numaward's own metrics.
    pub fn new(source: Arc<dyn SnapshotSource>) -> Self {
        let mut root = Registry::default();
        let registry = root.sub_registry_with_prefix(PREFIX);
        registry.register(
            "build",
            "Version of the running numaward",
            Info::new([("version", numaward_api::VERSION)]),
        );
        let scrape_duration = Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0]);
        registry.register_with_unit(
            "scrape_duration",
            "Time from the start of a scrape until the client received all metrics",
            Unit::Seconds,
            scrape_duration.clone(),
        );
        let exported = ExportedMetrics::default();
        Self { root, source, scrape_duration, kubelet_names: false, exported }
    }

    /// Registers further metrics. Their names get the prefix.
    #[must_use]
    pub fn with(mut self, register: impl FnOnce(&mut Registry)) -> Self {
        register(self.root.sub_registry_with_prefix(PREFIX));
        self
    }

    /// Registers metrics under the kubelet's names (`exportKubeletNames`), without the prefix.
    #[must_use]
    pub fn with_kubelet_names(mut self, register: impl FnOnce(&mut Registry)) -> Self {
        register(&mut self.root);
        self.kubelet_names = true;
        self
    }

    /// Sets the filter for exported metrics (`metrics` in the configuration), for scrapes and OTLP. Alerts use all
    /// metrics.
    #[must_use]
    pub fn exporting(self, exported: ExportedMetrics) -> Self {
        Self { exported, ..self }
    }

    /// Writes the exported metrics, piece by piece. Blocks, and stops if the sink returns `false`.
    pub fn encode(&self, format: Format, sink: impl FnMut(Bytes) -> bool) -> fmt::Result {
        let start = Instant::now();
        self.write(format, sink)?;
        self.scrape_duration.observe(start.elapsed().as_secs_f64());
        Ok(())
    }

    fn write<S: FnMut(Bytes) -> bool>(&self, format: Format, sink: S) -> fmt::Result {
        let unregistered =
            |out: &mut TextWriter<S>| self.collect(&mut LineWriter::new(out), Some(&self.exported));
        exposition::encode(&self.registered(Some(&self.exported))?, unregistered, format, sink)
    }

    /// Returns the metrics of the registry as OpenMetrics text, without the end mark.
    fn registered(&self, exported: Option<&ExportedMetrics>) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encoding::text::encode_registry(&mut text, &self.root)?;
        Ok(match exported {
            Some(exported) => filter::keep_families(exported, text),
            None => text,
        })
    }

    /// Takes a snapshot and adds its families to a sink.
    fn collect(&self, sink: &mut impl FamilySink, exported: Option<&ExportedMetrics>) -> fmt::Result {
        let mut snapshot = self.source.snapshot();
        let families = exported.map(|exported| &exported.families).filter(|families| !families.is_open());
        if let Some(exported) = exported {
            filter::keep_workloads(&exported.workloads, &mut snapshot);
        }
        collector::collect(&snapshot, sink, families)?;
        if self.kubelet_names { kubelet::collect(&snapshot.guarantees, sink, families) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;

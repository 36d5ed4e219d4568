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
use self::{exposition::Writer, family::Sink, text::Lines};
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
    /// What of all this is exported.
    exported: ExportedMetrics,
}

/// The label of a NUMA node. In Kubernetes, `node` is a host.
const NODE: &str = "numa_node";
/// Of all names but the kubelet's.
const PREFIX: &str = "numaward";

impl Metrics {
    /// Registers what the source gives and what numaward says about itself.
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
        let exported = ExportedMetrics::default();
        Self { root, source, scrape_duration, kubelet_names: false, exported }
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

    /// Exports only these (`metrics` in the configuration): to scrapers and by OTLP. Alerts see all.
    #[must_use]
    pub fn exporting(self, exported: ExportedMetrics) -> Self {
        Self { exported, ..self }
    }

    /// Writes what is exported, piece by piece. Blocks; ends early when the sink returns `false`.
    pub fn encode(&self, format: Format, sink: impl FnMut(Bytes) -> bool) -> fmt::Result {
        let start = Instant::now();
        self.write(format, sink)?;
        self.scrape_duration.observe(start.elapsed().as_secs_f64());
        Ok(())
    }

    fn write<S: FnMut(Bytes) -> bool>(&self, format: Format, sink: S) -> fmt::Result {
        let others = |out: &mut Writer<S>| self.collect(&mut Lines::new(out), Some(&self.exported));
        exposition::encode(&self.registered(Some(&self.exported))?, others, format, sink)
    }

    /// What is kept in the registry, as text in the format of OpenMetrics without its end.
    fn registered(&self, exported: Option<&ExportedMetrics>) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encoding::text::encode_registry(&mut text, &self.root)?;
        Ok(match exported {
            Some(exported) => filter::keep_families(exported, text),
            None => text,
        })
    }

    /// Takes a reading of all that is not kept in the registry.
    fn collect(&self, sink: &mut impl Sink, exported: Option<&ExportedMetrics>) -> fmt::Result {
        let mut snapshot = self.source.snapshot();
        let families = exported.map(|exported| &exported.families).filter(|families| !families.is_open());
        if let Some(exported) = exported {
            filter::keep_workloads(&exported.workloads, &mut snapshot);
        }
        collector::collect(&snapshot, sink, families)?;
        if self.kubelet_names { kubelet::collect(&snapshot.promises, sink, families) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;

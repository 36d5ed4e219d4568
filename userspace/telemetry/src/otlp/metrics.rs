//! Conversion of samples to OTLP messages.
//!
//! It follows "Prometheus and OpenMetrics compatibility" of the OpenTelemetry specification: a family keeps its name
//! without `_total`, counters are cumulative sums since the start of the daemon or of the workload, and an info is a
//! gauge. So a Prometheus that receives OTLP has the same series as one that scrapes, with the names of containers by
//! the semantic conventions as further labels.

use std::{fmt, mem, time::SystemTime};

use opentelemetry_proto::{
    tonic::{
        collector::metrics::v1::ExportMetricsServiceRequest,
        common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
        metrics::v1::{
            AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
            ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point::Value,
        },
        resource::v1,
    },
    transform::common::tonic::ResourceAttributesWithSchema,
};
use opentelemetry_sdk::Resource;
use prost::Message as _;

use super::{SCOPE, outbox::Batch};
use crate::metrics::{self, FamilyDescription, FamilyKind, MetricSample, Metrics, Number};

/// The maximum number of data points in one request: about a megabyte.
const MAX_POINTS_PER_REQUEST: u64 = 5000;

/// The start of counting, and the time of the reading.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeRange {
    pub(super) start: SystemTime,
    pub(super) now: SystemTime,
}

pub(super) fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads all metrics and passes them on as requests. Blocks.
pub(super) fn requests(
    metrics: &Metrics,
    resource: &Resource,
    times: TimeRange,
    send: impl FnMut(Batch),
) -> fmt::Result {
    let ResourceAttributesWithSchema { attributes, schema_url } = resource.into();
    let mut builder = RequestBuilder {
        resource: v1::Resource { attributes: attributes.0, ..v1::Resource::default() },
        schema_url: schema_url.unwrap_or_default(),
        start: nanoseconds(times.start),
        now: nanoseconds(times.now),
        family: FamilyDescription::default(),
        data: None,
        metrics: Vec::new(),
        points: 0,
        send,
    };
    metrics.visit_exported(|family, sample| builder.take(family, sample))?;
    builder.flush();
    Ok(())
}

struct RequestBuilder<S> {
    resource: v1::Resource,
    schema_url: String,
    start: u64,
    now: u64,
    family: FamilyDescription,
    /// The data points of the current family.
    data: Option<Data>,
    metrics: Vec<Metric>,
    points: u64,
    send: S,
}

impl<S: FnMut(Batch)> RequestBuilder<S> {
    fn take(&mut self, family: &FamilyDescription, sample: &MetricSample<'_>) {
        if self.points >= MAX_POINTS_PER_REQUEST {
            self.flush();
        }
        if self.family.name != family.name {
            self.end_family();
            self.family = family.clone();
        }
        self.points += 1;
        let cumulative = AggregationTemporality::Cumulative.into();
        let data = self.data.get_or_insert_with(|| match family.kind {
            FamilyKind::Counter => {
                Data::Sum(Sum { aggregation_temporality: cumulative, is_monotonic: true, ..Sum::default() })
            }
            FamilyKind::Gauge | FamilyKind::Info => Data::Gauge(Gauge::default()),
            FamilyKind::Histogram => {
                Data::Histogram(Histogram { aggregation_temporality: cumulative, ..Histogram::default() })
            }
        });
        let semantic =
            sample.labels().filter_map(|(name, value)| Some(attribute(semantic_name(name)?, value)));
        let attributes =
            sample.labels().map(|(name, value)| attribute(name, value)).chain(semantic).collect();
        let start_time_unix_nano = sample.start.map_or(self.start, nanoseconds);
        let point = |number| NumberDataPoint {
            time_unix_nano: self.now,
            value: Some(value(number)),
            ..NumberDataPoint::default()
        };
        match (data, sample.value) {
            (Data::Sum(Sum { data_points, .. }), metrics::SampleValue::Number(number)) => {
                data_points.push(NumberDataPoint { attributes, start_time_unix_nano, ..point(number) });
            }
            (Data::Gauge(Gauge { data_points }), metrics::SampleValue::Number(number)) => {
                data_points.push(NumberDataPoint { attributes, ..point(number) });
            }
            (
                Data::Histogram(Histogram { data_points, .. }),
                metrics::SampleValue::Histogram { sum, up_to },
            ) => {
                // Prometheus counts all values up to a bound, OTLP those between two bounds; the last bucket has no
                // upper bound.
                let below = [0].into_iter().chain(up_to.iter().map(|(_, count)| *count));
                data_points.push(HistogramDataPoint {
                    attributes,
                    start_time_unix_nano,
                    time_unix_nano: self.now,
                    count: up_to.last().map_or(0, |(_, count)| *count),
                    sum: Some(sum),
                    bucket_counts: up_to
                        .iter()
                        .zip(below)
                        .map(|((_, count), below)| count.saturating_sub(below))
                        .collect(),
                    explicit_bounds: up_to
                        .iter()
                        .map(|(bound, _)| *bound)
                        .filter(|bound| bound.is_finite())
                        .collect(),
                    ..HistogramDataPoint::default()
                });
            }
            // A family has only one kind of value.
            _ => {}
        }
    }

    fn end_family(&mut self) {
        if let Some(data) = self.data.take() {
            let suffix = if self.family.kind == FamilyKind::Info { "_info" } else { "" };
            self.metrics.push(Metric {
                name: format!("{}{suffix}", self.family.name),
                description: self.family.help.clone(),
                unit: unit(&self.family.unit).to_owned(),
                metadata: Vec::new(),
                data: Some(data),
            });
        }
    }

    fn flush(&mut self) {
        self.end_family();
        if self.points == 0 {
            return;
        }
        let scope = InstrumentationScope {
            name: SCOPE.to_owned(),
            version: numaward_api::VERSION.to_owned(),
            ..InstrumentationScope::default()
        };
        let metrics = ScopeMetrics {
            scope: Some(scope),
            metrics: mem::take(&mut self.metrics),
            schema_url: self.schema_url.clone(),
        };
        let metrics = ResourceMetrics {
            resource: Some(self.resource.clone()),
            scope_metrics: vec![metrics],
            schema_url: self.schema_url.clone(),
        };
        let request = ExportMetricsServiceRequest { resource_metrics: vec![metrics] };
        (self.send)(Batch { body: request.encode_to_vec().into(), items: mem::take(&mut self.points) });
    }
}

/// Returns an integer if the number is one and fits.
fn value(number: Number) -> Value {
    let whole = match number {
        Number::Unsigned(number) => i64::try_from(number).ok(),
        Number::Signed(number) => Some(number),
        Number::Real(_) => None,
    };
    whole.map_or_else(|| Value::AsDouble(number.as_f64()), Value::AsInt)
}

/// Returns the name of the semantic conventions for a label of a container. It stands beside the label, which the rules
/// and dashboards need.
fn semantic_name(label: &str) -> Option<&'static str> {
    match label {
        "namespace" => Some("k8s.namespace.name"),
        "pod" => Some("k8s.pod.name"),
        "container" => Some("k8s.container.name"),
        _ => None,
    }
}

fn attribute(name: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// Returns the unit in UCUM notation.
fn unit(unit: &str) -> &str {
    match unit {
        "bytes" => "By",
        "seconds" => "s",
        unit => unit,
    }
}

//! The samples of `/metrics` as OTLP's messages.
//!
//! By the rules of "Prometheus and OpenMetrics compatibility" of the OpenTelemetry specification: a family keeps its name
//! without `_total`, counters are cumulative sums since the daemon's start, an info is a gauge. So a Prometheus that takes
//! OTLP has the same series as one that scrapes.

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
use crate::metrics::{Description, Kind, Metrics, Sample};

/// Data points in one request: about a megabyte.
const PER_REQUEST: u64 = 5000;

/// Between which times things were counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) start: SystemTime,
    pub(super) now: SystemTime,
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Takes all metrics and hands on requests. Blocks.
pub(super) fn requests(
    metrics: &Metrics,
    resource: &Resource,
    times: Times,
    send: impl FnMut(Batch),
) -> fmt::Result {
    let ResourceAttributesWithSchema { attributes, schema_url } = resource.into();
    let mut writer = Writer {
        resource: v1::Resource { attributes: attributes.0, ..v1::Resource::default() },
        schema_url: schema_url.unwrap_or_default(),
        start: nanoseconds(times.start),
        now: nanoseconds(times.now),
        family: Description::default(),
        data: None,
        metrics: Vec::new(),
        points: 0,
        send,
    };
    metrics.visit(|family, sample| writer.take(family, sample))?;
    writer.flush();
    Ok(())
}

struct Writer<S> {
    resource: v1::Resource,
    schema_url: String,
    start: u64,
    now: u64,
    family: Description,
    /// Of the family, so far.
    data: Option<Data>,
    metrics: Vec<Metric>,
    points: u64,
    send: S,
}

impl<S: FnMut(Batch)> Writer<S> {
    fn take(&mut self, family: &Description, sample: Sample<'_>) {
        if self.family.name != family.name {
            self.end_family();
            self.family = family.clone();
        }
        let starts_point = match family.kind {
            Kind::Counter | Kind::Gauge | Kind::Info => true,
            // The lines of a histogram are written as a block that begins with the sum.
            Kind::Histogram => sample.name.ends_with("_sum"),
        };
        if starts_point {
            if self.points >= PER_REQUEST {
                self.flush();
            }
            self.points += 1;
        }
        let cumulative = AggregationTemporality::Cumulative.into();
        match family.kind {
            Kind::Counter => {
                let point = self.number(sample, self.start);
                let new = || {
                    Data::Sum(Sum {
                        aggregation_temporality: cumulative,
                        is_monotonic: true,
                        ..Sum::default()
                    })
                };
                if let Data::Sum(sum) = self.data.get_or_insert_with(new) {
                    sum.data_points.extend(point);
                }
            }
            Kind::Gauge | Kind::Info => {
                let point = self.number(sample, 0);
                if let Data::Gauge(gauge) = self.data.get_or_insert_with(|| Data::Gauge(Gauge::default())) {
                    gauge.data_points.extend(point);
                }
            }
            Kind::Histogram => {
                let (start, now) = (self.start, self.now);
                let new = || {
                    Data::Histogram(Histogram { aggregation_temporality: cumulative, ..Histogram::default() })
                };
                if let Data::Histogram(histogram) = self.data.get_or_insert_with(new) {
                    add_to(histogram, sample, (start, now));
                }
            }
        }
    }

    fn number(&self, sample: Sample<'_>, start: u64) -> Option<NumberDataPoint> {
        let value = match sample.value.parse() {
            Ok(whole) => Value::AsInt(whole),
            Err(_) => Value::AsDouble(sample.value.parse().ok()?),
        };
        Some(NumberDataPoint {
            attributes: sample.labels().map(|(name, value)| attribute(name, &value)).collect(),
            start_time_unix_nano: start,
            time_unix_nano: self.now,
            value: Some(value),
            ..NumberDataPoint::default()
        })
    }

    fn end_family(&mut self) {
        if let Some(data) = self.data.take() {
            let suffix = if self.family.kind == Kind::Info { "_info" } else { "" };
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

/// A line of a histogram: the sum begins a point, the rest belongs to the last one.
fn add_to(histogram: &mut Histogram, sample: Sample<'_>, (start, now): (u64, u64)) {
    if sample.name.ends_with("_sum") {
        histogram.data_points.push(HistogramDataPoint {
            attributes: sample.labels().map(|(name, value)| attribute(name, &value)).collect(),
            start_time_unix_nano: start,
            time_unix_nano: now,
            sum: sample.value.parse().ok(),
            ..HistogramDataPoint::default()
        });
        return;
    }
    let (Some(point), Ok(count)) = (histogram.data_points.last_mut(), sample.value.parse::<u64>()) else {
        return;
    };
    if sample.name.ends_with("_count") {
        point.count = count;
    } else if let Some((_, bound)) = sample.labels().find(|(name, _)| *name == "le") {
        // Prometheus counts all below the bound, OTLP those between two.
        let below: u64 = point.bucket_counts.iter().sum();
        point.bucket_counts.push(count.saturating_sub(below));
        if let Some(bound) = bound.parse().ok().filter(|bound: &f64| bound.is_finite()) {
            point.explicit_bounds.push(bound);
        }
    }
}

fn attribute(name: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// In the notation of UCUM.
fn unit(unit: &str) -> &str {
    match unit {
        "bytes" => "By",
        "seconds" => "s",
        unit => unit,
    }
}

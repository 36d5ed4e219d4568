//! The samples of a reading as typed values, for OTLP and alerts: the same numbers as in `/metrics`.

use std::{fmt, time::SystemTime};

use numaward_config::exported::ExportedMetrics;

use super::{
    Metrics,
    family::{
        Bound, FamilyDescription, FamilyKind, FamilySink, Label, Number, WorkloadLabel, workload_labels,
    },
};

/// The value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SampleValue<'a> {
    /// The value of a counter, a gauge or an info.
    Number(Number),
    /// The value of a histogram.
    Histogram {
        /// The sum of all values.
        sum: f64,
        /// The number of values up to each bound. The last bound is infinite.
        up_to: &'a [(f64, u64)],
    },
}

/// A sample of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MetricSample<'a> {
    /// The labels of the workload.
    workload: &'a [(&'static str, String)],
    /// The further labels of the sample.
    labels: &'a [(&'a str, &'a str)],
    /// The time at which a counter of a workload started at zero; `None`: at the start of the daemon.
    pub(crate) start: Option<SystemTime>,
    pub(crate) value: SampleValue<'a>,
}

impl<'a> MetricSample<'a> {
    /// Creates a sample with the given labels.
    #[cfg(test)]
    pub(crate) const fn new(labels: &'a [(&'a str, &'a str)], value: SampleValue<'a>) -> Self {
        Self { workload: &[], labels, start: None, value }
    }

    /// Returns the labels, in order.
    pub(crate) fn labels(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let workload = self.workload.iter().map(|(name, value)| (*name, value.as_str()));
        workload.chain(self.labels.iter().copied())
    }
}

/// A sink that passes samples to a closure.
struct Visitor<V> {
    visit: V,
    family: FamilyDescription,
    workload: Vec<(&'static str, String)>,
    start: Option<SystemTime>,
}

impl<V: FnMut(&FamilyDescription, &MetricSample<'_>)> Visitor<V> {
    fn visit_sample(&mut self, labels: &[(&str, &str)], value: SampleValue<'_>) {
        (self.visit)(
            &self.family,
            &MetricSample { workload: &self.workload, labels, start: self.start, value },
        );
    }
}

impl<V: FnMut(&FamilyDescription, &MetricSample<'_>)> FamilySink for Visitor<V> {
    fn begin(&mut self, family: FamilyDescription) -> fmt::Result {
        self.family = family;
        self.workload.clear();
        self.start = None;
        Ok(())
    }

    fn workload(&mut self, workload: WorkloadLabel<'_>) {
        self.workload.clear();
        self.start = workload.start;
        self.workload.extend(workload_labels(workload.name).map(|(name, value)| (name, value.to_owned())));
    }

    fn add<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result {
        let labels = labels.each_ref().map(|label| (label.name(), label.value()));
        self.visit_sample(&labels, SampleValue::Number(number));
        Ok(())
    }

    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        let up_to: Vec<_> = up_to.iter().map(|(bound, count)| (bound.0, *count)).collect();
        self.visit_sample(&[], SampleValue::Histogram { sum, up_to: &up_to });
        Ok(())
    }
}

/// Visits the samples of the registry.
///
/// `prometheus-client` provides its metrics only through its encoders: as text, or as protobuf messages, which convert
/// all counts to `f64` and need a `.proto` compiler at build time. So these few families are parsed from text. Families
/// of workloads are never parsed.
fn visit_registered<V>(written: &str, visitor: &mut Visitor<V>) -> fmt::Result
where
    V: FnMut(&FamilyDescription, &MetricSample<'_>),
{
    // The lines of a histogram are its sum, its count and its buckets, of which the last is infinite.
    let (mut sum, mut up_to) = (0.0, Vec::new());
    for line in written.lines() {
        if let Some(metadata) = line.strip_prefix("# ") {
            update_family(&mut visitor.family, metadata);
            continue;
        }
        let (labels, value) = parse_line(line).ok_or(fmt::Error)?;
        let mut labels: Vec<_> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
        if visitor.family.kind != FamilyKind::Histogram {
            visitor.visit_sample(&labels, SampleValue::Number(value));
        } else if let Some(at) = labels.iter().position(|(name, _)| *name == "le") {
            let bound: f64 = labels.remove(at).1.parse().map_err(|_| fmt::Error)?;
            let Number::Unsigned(count) = value else { return Err(fmt::Error) };
            up_to.push((bound, count));
            if bound.is_infinite() {
                visitor.visit_sample(&labels, SampleValue::Histogram { sum, up_to: &up_to });
                up_to.clear();
            }
        } else if up_to.is_empty() && matches!(value, Number::Real(_)) {
            sum = value.as_f64();
        }
    }
    Ok(())
}

fn update_family(family: &mut FamilyDescription, metadata: &str) {
    let mut words = metadata.splitn(3, ' ');
    let (Some(what), Some(name)) = (words.next(), words.next()) else { return };
    if family.name != name {
        *family = FamilyDescription { name: name.to_owned(), ..FamilyDescription::default() };
    }
    let rest = words.next().unwrap_or_default();
    match what {
        "HELP" => rest.clone_into(&mut family.help),
        "UNIT" => rest.clone_into(&mut family.unit),
        "TYPE" => {
            family.kind = rest.parse().unwrap_or_default();
            family.sample_name = format!("{name}{}", family.kind.suffix());
        }
        _ => {}
    }
}

/// Parses the labels and the value of a line.
fn parse_line(line: &str) -> Option<(Vec<(&str, String)>, Number)> {
    // Names and values contain neither braces nor spaces; labels may contain both.
    let (mut rest, value) = match line.split_once('{') {
        Some((_, rest)) => rest.rsplit_once("} ")?,
        None => ("", line.split_once(' ')?.1),
    };
    let mut labels = Vec::new();
    while let Some((name, text)) = rest.trim_start_matches(',').split_once("=\"") {
        let (mut value, mut chars) = (String::new(), text.chars());
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => value.push(chars.next().map(|c| if c == 'n' { '\n' } else { c })?),
                c => value.push(c),
            }
        }
        labels.push((name, value));
        rest = chars.as_str();
    }
    let number = value.parse().map(Number::Unsigned);
    let number = number.or_else(|_| value.parse().map(Number::Signed));
    let number = number.or_else(|_| value.parse().map(Number::Real)).ok()?;
    Some((labels, number))
}

impl Metrics {
    /// Visits all samples with their families. Blocks, and does not count as a scrape.
    pub(crate) fn visit(&self, visit: impl FnMut(&FamilyDescription, &MetricSample<'_>)) -> fmt::Result {
        self.visit_some(visit, None)
    }

    /// Visits the exported samples, like [`Self::visit`].
    pub(crate) fn visit_exported(
        &self,
        visit: impl FnMut(&FamilyDescription, &MetricSample<'_>),
    ) -> fmt::Result {
        self.visit_some(visit, Some(&self.exported))
    }

    fn visit_some(
        &self,
        visit: impl FnMut(&FamilyDescription, &MetricSample<'_>),
        exported: Option<&ExportedMetrics>,
    ) -> fmt::Result {
        let mut visitor =
            Visitor { visit, family: FamilyDescription::default(), workload: Vec::new(), start: None };
        visit_registered(&self.registered(exported)?, &mut visitor)?;
        self.collect(&mut visitor, exported)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{
        encoding::text,
        metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
        registry::{Registry, Unit},
    };

    use super::*;

    #[test]
    fn visits_registry_unchanged() {
        let mut registry = Registry::default();
        let counter = Family::<[(&str, &str); 2], Counter>::default();
        counter.get_or_create(&[("reason", "a\\b\"c\nd} 7,x=\""), ("node", "")]).inc_by(u64::MAX);
        registry.register_with_unit("a", "What it is", Unit::Bytes, counter);
        let gauge = Gauge::<i64>::default();
        gauge.set(-3);
        registry.register("b", "Below", gauge);
        let histogram =
            Family::<[(&str, &str); 1], Histogram>::new_with_constructor(|| Histogram::new([0.5]));
        histogram.get_or_create(&[("k", "v")]).observe(0.25);
        histogram.get_or_create(&[("k", "v")]).observe(2.0);
        registry.register("c", "How long", histogram);
        registry.register("d", "Who", Info::new([("version", "1")]));
        let mut seen = Vec::new();
        let visit = |family: &FamilyDescription, sample: &MetricSample<'_>| {
            let labels: Vec<_> = sample.labels().collect();
            seen.push(format!("{} {:?} {labels:?} {:?}", family.sample_name, family.kind, sample.value));
        };
        let mut visitor =
            Visitor { visit, family: FamilyDescription::default(), workload: Vec::new(), start: None };
        let mut written = String::new();
        text::encode_registry(&mut written, &registry).unwrap();
        visit_registered(&written, &mut visitor).unwrap();
        let last = FamilyDescription {
            name: "d".to_owned(),
            sample_name: "d_info".to_owned(),
            kind: FamilyKind::Info,
            unit: String::new(),
            help: "Who.".to_owned(),
        };
        assert_eq!(visitor.family, last);
        assert_eq!(
            seen,
            [
                r#"a_bytes_total Counter [("reason", "a\\b\"c\nd} 7,x=\""), ("node", "")] Number(Unsigned(18446744073709551615))"#,
                "b Gauge [] Number(Signed(-3))",
                r#"c Histogram [("k", "v")] Histogram { sum: 2.25, up_to: [(0.5, 1), (inf, 2)] }"#,
                r#"d_info Info [("version", "1")] Number(Unsigned(1))"#,
            ]
        );
    }

    #[test]
    fn refuses_invalid_samples() {
        for line in ["", "a", "a{b=\"c\" 1", "#", "a x", "a{b=\"c} 1", "a{b=\"c\\} 1"] {
            assert_eq!(parse_line(line), None, "{line}");
        }
    }
}

//! The samples of a reading, for those who send or watch them: the same numbers as in `/metrics`, typed.

use std::fmt;

use numaward_config::exported::ExportedMetrics;

use super::{
    Metrics,
    family::{Bound, Description, Kind, Label, Named, Number, Sink, workload_labels},
};

/// The value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    /// Of a counter, a gauge or an info.
    Number(Number),
    /// Of a histogram.
    Histogram {
        /// Of all that was counted.
        sum: f64,
        /// How many there were up to each bound, of which the last is infinite.
        up_to: &'a [(f64, u64)],
    },
}

/// A sample of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    /// Those of the workload.
    workload: &'a [(&'static str, String)],
    /// Its own.
    labels: &'a [(&'a str, &'a str)],
    /// The value.
    pub(crate) value: Value<'a>,
}

impl<'a> Sample<'a> {
    /// One with these labels.
    #[cfg(test)]
    pub(crate) const fn new(labels: &'a [(&'a str, &'a str)], value: Value<'a>) -> Self {
        Self { workload: &[], labels, value }
    }

    /// The labels, in order.
    pub(crate) fn labels(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let workload = self.workload.iter().map(|(name, value)| (*name, value.as_str()));
        workload.chain(self.labels.iter().copied())
    }
}

/// Hands on samples.
struct Visitor<V> {
    visit: V,
    family: Description,
    workload: Vec<(&'static str, String)>,
}

impl<V: FnMut(&Description, &Sample<'_>)> Visitor<V> {
    fn hand_on(&mut self, labels: &[(&str, &str)], value: Value<'_>) {
        (self.visit)(&self.family, &Sample { workload: &self.workload, labels, value });
    }
}

impl<V: FnMut(&Description, &Sample<'_>)> Sink for Visitor<V> {
    fn begin(&mut self, family: Description) -> fmt::Result {
        self.family = family;
        self.workload.clear();
        Ok(())
    }

    fn workload(&mut self, workload: Named<'_>) {
        self.workload.clear();
        self.workload.extend(workload_labels(workload.name).map(|(name, value)| (name, value.to_owned())));
    }

    fn put<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result {
        let labels = labels.each_ref().map(|label| (label.name(), label.value()));
        self.hand_on(&labels, Value::Number(number));
        Ok(())
    }

    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        let up_to: Vec<_> = up_to.iter().map(|(bound, count)| (bound.0, *count)).collect();
        self.hand_on(&[], Value::Histogram { sum, up_to: &up_to });
        Ok(())
    }
}

/// Hands on what is kept in the registry.
///
/// `prometheus-client` gives its metrics to nothing but its own encoders: of text, or of protobuf messages, which turn all
/// counts into `f64` and need a compiler of `.proto` files at build time. So these few families are read from its text;
/// those of workloads never are.
fn visit_registered<V>(written: &str, visitor: &mut Visitor<V>) -> fmt::Result
where
    V: FnMut(&Description, &Sample<'_>),
{
    // A histogram's lines are its sum, its count and its buckets, the last of which is infinite.
    let (mut sum, mut up_to) = (0.0, Vec::new());
    for line in written.lines() {
        if let Some(metadata) = line.strip_prefix("# ") {
            describe(&mut visitor.family, metadata);
            continue;
        }
        let (labels, value) = sample(line).ok_or(fmt::Error)?;
        let mut labels: Vec<_> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
        if visitor.family.kind != Kind::Histogram {
            visitor.hand_on(&labels, Value::Number(value));
        } else if let Some(at) = labels.iter().position(|(name, _)| *name == "le") {
            let bound: f64 = labels.remove(at).1.parse().map_err(|_| fmt::Error)?;
            let Number::Unsigned(count) = value else { return Err(fmt::Error) };
            up_to.push((bound, count));
            if bound.is_infinite() {
                visitor.hand_on(&labels, Value::Histogram { sum, up_to: &up_to });
                up_to.clear();
            }
        } else if up_to.is_empty() && matches!(value, Number::Real(_)) {
            sum = value.as_f64();
        }
    }
    Ok(())
}

fn describe(family: &mut Description, metadata: &str) {
    let mut words = metadata.splitn(3, ' ');
    let (Some(what), Some(name)) = (words.next(), words.next()) else { return };
    if family.name != name {
        *family = Description { name: name.to_owned(), ..Description::default() };
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

/// The labels and the value of a line.
fn sample(line: &str) -> Option<(Vec<(&str, String)>, Number)> {
    // Neither names nor values have braces or spaces; labels may have both.
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
    /// Visits all samples, each with its family. Blocks. It is no scrape, and not counted as one.
    pub(crate) fn visit(&self, visit: impl FnMut(&Description, &Sample<'_>)) -> fmt::Result {
        self.visit_some(visit, None)
    }

    /// The same with those that are exported.
    pub(crate) fn visit_exported(&self, visit: impl FnMut(&Description, &Sample<'_>)) -> fmt::Result {
        self.visit_some(visit, Some(&self.exported))
    }

    fn visit_some(
        &self,
        visit: impl FnMut(&Description, &Sample<'_>),
        exported: Option<&ExportedMetrics>,
    ) -> fmt::Result {
        let mut visitor = Visitor { visit, family: Description::default(), workload: Vec::new() };
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
    fn what_the_registry_keeps_is_handed_on_as_it_is() {
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
        let visit = |family: &Description, sample: &Sample<'_>| {
            let labels: Vec<_> = sample.labels().collect();
            seen.push(format!("{} {:?} {labels:?} {:?}", family.sample_name, family.kind, sample.value));
        };
        let mut visitor = Visitor { visit, family: Description::default(), workload: Vec::new() };
        let mut written = String::new();
        text::encode_registry(&mut written, &registry).unwrap();
        visit_registered(&written, &mut visitor).unwrap();
        let last = Description {
            name: "d".to_owned(),
            sample_name: "d_info".to_owned(),
            kind: Kind::Info,
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
    fn what_is_no_sample_is_refused() {
        for line in ["", "a", "a{b=\"c\" 1", "#", "a x", "a{b=\"c} 1", "a{b=\"c\\} 1"] {
            assert_eq!(sample(line), None, "{line}");
        }
    }
}

//! Typed metric families, as they are created for each reading: [`FamilyWriter`] begins families, [`Family`] adds
//! samples, and a [`FamilySink`] receives both.
//!
//! There are two sinks: [`super::text`] writes lines, [`super::samples`] passes values on. The sink is a type
//! parameter, so that the compiler removes the abstraction for hundreds of thousands of lines.

use std::{fmt, time::SystemTime};

use numaward_config::exported::MetricFilter;

/// The type of a metric family, with the names of OpenMetrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum FamilyKind {
    /// A number that only grows.
    Counter,
    /// A number that can fall.
    #[default]
    Gauge,
    /// Counts by size.
    Histogram,
    /// Always 1; the labels contain the information.
    Info,
}

impl FamilyKind {
    /// Returns the suffix of sample names after the name of the family.
    pub(super) const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Histogram => "",
            Self::Info => "_info",
        }
    }
}

/// The metadata of a metric family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FamilyDescription {
    /// The name, without a suffix such as `_total`.
    pub(crate) name: String,
    /// The name of the samples.
    pub(crate) sample_name: String,
    /// The type.
    pub(crate) kind: FamilyKind,
    /// The unit, as in the name; empty for a number without a unit.
    pub(crate) unit: String,
    /// The help text.
    pub(crate) help: String,
}

/// The value of a counter or a gauge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Number {
    /// A natural number.
    Unsigned(u64),
    /// An integer.
    Signed(i64),
    /// A real number.
    Real(f64),
}

impl Number {
    /// Returns the nearest real number.
    #[expect(clippy::cast_precision_loss, reason = "as every reader of the text does")]
    pub(crate) const fn as_f64(self) -> f64 {
        match self {
            Self::Unsigned(number) => number as f64,
            Self::Signed(number) => number as f64,
            Self::Real(number) => number,
        }
    }
}

macro_rules! number {
    ($($from:ty => $kind:ident),*) => {$(
        impl From<$from> for Number {
            fn from(number: $from) -> Self {
                Self::$kind(number.into())
            }
        }

        impl From<&$from> for Number {
            fn from(number: &$from) -> Self {
                (*number).into()
            }
        }
    )*};
}

number!(u32 => Unsigned, u64 => Unsigned, i64 => Signed, f64 => Real);

/// The upper bound of a bucket, and its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound(pub(super) f64, pub(super) &'static str);

/// A receiver of families and their samples.
pub(super) trait FamilySink {
    /// Begins a family. The next samples belong to no workload until [`Self::workload`] is called.
    fn begin(&mut self, family: FamilyDescription) -> fmt::Result;

    /// Sets the workload of the next samples.
    fn workload(&mut self, workload: WorkloadLabel<'_>);

    /// Adds a sample. These labels follow those of the workload.
    fn add<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result;

    /// Adds a histogram: the sum, and the number of values up to each bound. The last bound is infinite.
    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result;
}

/// A writer of families.
#[derive(Debug)]
pub(super) struct FamilyWriter<'s, S> {
    sink: &'s mut S,
    /// The prefix of all names.
    prefix: Option<&'static str>,
    /// The filter of families; `None`: all.
    families: Option<&'s MetricFilter>,
}

/// A family, or an error if the client has closed the connection.
type FamilyResult<'s, S> = Result<Family<'s, S>, fmt::Error>;

impl<'s, S: FamilySink> FamilyWriter<'s, S> {
    pub(super) const fn new(
        sink: &'s mut S,
        prefix: Option<&'static str>,
        families: Option<&'s MetricFilter>,
    ) -> Self {
        Self { sink, prefix, families }
    }

    pub(super) fn counter(&mut self, name: &str, help: &str) -> FamilyResult<'_, S> {
        self.begin(FamilyKind::Counter, name, help)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str) -> FamilyResult<'_, S> {
        self.begin(FamilyKind::Gauge, name, help)
    }

    /// Begins a gauge with the value 1, and with information in the labels.
    pub(super) fn info(&mut self, name: &str, help: &str) -> FamilyResult<'_, S> {
        self.begin(FamilyKind::Info, name, help)
    }

    pub(super) fn begin(&mut self, kind: FamilyKind, name: &str, help: &str) -> FamilyResult<'_, S> {
        let name = self.prefix.map_or_else(|| name.to_owned(), |prefix| format!("{prefix}_{name}"));
        let sample_name = format!("{name}{}", kind.suffix());
        let unit = name.rsplit('_').next().filter(|last| ["bytes", "seconds"].contains(last));
        let (unit, help) = (unit.unwrap_or_default().to_owned(), help.to_owned());
        if self.families.is_some_and(|families| !families.admits(&sample_name)) {
            return Ok(Family(None));
        }
        self.sink.begin(FamilyDescription { name, sample_name, kind, unit, help })?;
        Ok(Family(Some(self.sink)))
    }
}

/// A family that accepts samples; `None` if the filter excludes it.
#[derive(Debug)]
pub(super) struct Family<'s, S>(Option<&'s mut S>);

impl<S: FamilySink> Family<'_, S> {
    /// Sets the workload of the next samples.
    pub(super) fn for_workload<'n>(&mut self, workload: impl Into<WorkloadLabel<'n>>) -> &mut Self {
        if let Some(sink) = &mut self.0 {
            sink.workload(workload.into());
        }
        self
    }

    /// Adds samples, each with its labels.
    pub(super) fn add_all<const N: usize, L: Label, V: Into<Number>>(
        &mut self,
        samples: impl IntoIterator<Item = ([L; N], V)>,
    ) -> fmt::Result {
        samples.into_iter().try_for_each(|(labels, number)| self.add(labels, number))
    }

    /// Adds a sample without further labels for each workload.
    pub(super) fn add_for_each<'n, V: Into<Number>>(
        &mut self,
        workloads: impl IntoIterator<Item = (impl Into<WorkloadLabel<'n>>, V)>,
    ) -> fmt::Result {
        workloads
            .into_iter()
            .try_for_each(|(workload, number)| self.for_workload(workload).add(NO_LABELS, number))
    }

    /// Adds a sample. These labels follow those of the workload.
    #[inline]
    pub(super) fn add<const N: usize>(
        &mut self,
        labels: [impl Label; N],
        number: impl Into<Number>,
    ) -> fmt::Result {
        match &mut self.0 {
            Some(sink) => sink.add(labels, number.into()),
            None => Ok(()),
        }
    }

    /// Adds a histogram: see [`FamilySink::histogram`].
    pub(super) fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        self.0.as_mut().map_or(Ok(()), |sink| sink.histogram(sum, up_to))
    }
}

/// No further labels.
pub(super) const NO_LABELS: [FormattedLabel<'static>; 0] = [];

/// A label of a sample.
pub(super) trait Label {
    fn name(&self) -> &str;

    fn value(&self) -> &str;

    /// Returns the formatted and escaped label, if it exists already.
    fn text(&self) -> Option<&str> {
        None
    }
}

/// A label that is formatted once for many lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct FormattedLabel<'a> {
    pub(super) name: &'static str,
    pub(super) value: &'a str,
    pub(super) text: &'a str,
}

impl Label for FormattedLabel<'_> {
    fn name(&self) -> &str {
        self.name
    }

    fn value(&self) -> &str {
        self.value
    }

    fn text(&self) -> Option<&str> {
        Some(self.text)
    }
}

/// Creates a [`FormattedLabel`] from literals for the name and the value.
macro_rules! formatted_label {
    ($name:literal, $value:literal) => {
        $crate::metrics::family::FormattedLabel {
            name: $name,
            value: $value,
            text: concat!($name, "=\"", $value, "\""),
        }
    };
}

pub(super) use formatted_label;

/// The workload of samples.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkloadLabel<'a> {
    pub(super) name: &'a str,
    /// The formatted and escaped labels, if they exist already.
    pub(super) text: Option<&'a str>,
    /// The time at which the counters of the workload started at zero, if it is known.
    pub(super) start: Option<SystemTime>,
}

impl<'a, N: AsRef<str> + ?Sized> From<&'a N> for WorkloadLabel<'a> {
    fn from(name: &'a N) -> Self {
        Self { name: name.as_ref(), text: None, start: None }
    }
}

/// A label as name and value.
impl<V: AsRef<str>> Label for (&str, V) {
    fn name(&self) -> &str {
        self.0
    }

    fn value(&self) -> &str {
        self.1.as_ref()
    }
}

/// Returns the labels of a workload. A container of a pod, with the name `NAMESPACE/POD/CONTAINER`, gets the labels
/// that other exporters use; any other workload gets its name. No other name contains two slashes.
pub(super) fn workload_labels(workload: &str) -> impl Iterator<Item = (&'static str, &str)> {
    let pod = pod_labels(workload);
    let other = pod.is_none().then_some(("workload", workload));
    pod.into_iter().flatten().chain(other)
}

fn pod_labels(workload: &str) -> Option<[(&'static str, &str); 3]> {
    let mut parts = workload.split('/');
    let (namespace, pod, container) = (parts.next()?, parts.next()?, parts.next()?);
    let is_whole = parts.next().is_none() && ![namespace, pod, container].contains(&"");
    is_whole.then_some([("namespace", namespace), ("pod", pod), ("container", container)])
}

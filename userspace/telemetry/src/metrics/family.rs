//! Families of metrics as they are made at each reading, typed: [`Out`] begins one after another, [`Family`] puts samples
//! into it, and a [`Sink`] takes both.
//!
//! There are two sinks: [`super::text`] writes lines, [`super::samples`] hands on values. Which of them it is is known when
//! the program is compiled, so that the text of hundreds of thousands of lines costs no more than writing it.

use std::fmt;

use numaward_config::exported::MetricFilter;

/// What a family is. Its text is that of OpenMetrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Kind {
    /// Grows.
    Counter,
    /// Goes up and down.
    #[default]
    Gauge,
    /// Counts by size.
    Histogram,
    /// Always 1; the information is in the labels.
    Info,
}

impl Kind {
    /// What the name of a sample has after that of the family.
    pub(super) const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Histogram => "",
            Self::Info => "_info",
        }
    }
}

/// A family as it is described.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Description {
    /// The name, without `_total` and the like.
    pub(crate) name: String,
    /// The name of its samples.
    pub(crate) sample_name: String,
    /// What it is.
    pub(crate) kind: Kind,
    /// In what it counts, as in the name; empty where it only counts.
    pub(crate) unit: String,
    /// What it says.
    pub(crate) help: String,
}

/// The value of a counter or a gauge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Number {
    /// A count.
    Unsigned(u64),
    /// A count that may be below zero.
    Signed(i64),
    /// Anything else.
    Real(f64),
}

impl Number {
    /// The nearest real number.
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

/// The upper bound of a bucket, and how it is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound(pub(super) f64, pub(super) &'static str);

/// Takes families, one after another, each with its samples.
pub(super) trait Sink {
    /// A family begins. Its samples are of no workload until there is one.
    fn begin(&mut self, family: Description) -> fmt::Result;

    /// The next samples are of this workload.
    fn workload(&mut self, workload: Named<'_>);

    /// A sample of the family with these labels, after those of the workload.
    fn put<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result;

    /// A sample of a family of histograms: the sum, and how many there were up to each bound, of which the last is
    /// infinite.
    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result;
}

/// Where families are put.
#[derive(Debug)]
pub(super) struct Out<'s, S> {
    sink: &'s mut S,
    /// Of all their names.
    prefix: Option<&'static str>,
    /// Which families are wanted, if not all.
    families: Option<&'s MetricFilter>,
}

/// A family, or an error where nobody listens any more.
type Begun<'s, S> = Result<Family<'s, S>, fmt::Error>;

impl<'s, S: Sink> Out<'s, S> {
    pub(super) const fn new(
        sink: &'s mut S,
        prefix: Option<&'static str>,
        families: Option<&'s MetricFilter>,
    ) -> Self {
        Self { sink, prefix, families }
    }

    pub(super) fn counter(&mut self, name: &str, help: &str) -> Begun<'_, S> {
        self.begin(Kind::Counter, name, help)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str) -> Begun<'_, S> {
        self.begin(Kind::Gauge, name, help)
    }

    /// A gauge that only carries information: it is always 1, and what it says is in the labels.
    pub(super) fn info(&mut self, name: &str, help: &str) -> Begun<'_, S> {
        self.begin(Kind::Info, name, help)
    }

    pub(super) fn begin(&mut self, kind: Kind, name: &str, help: &str) -> Begun<'_, S> {
        let name = self.prefix.map_or_else(|| name.to_owned(), |prefix| format!("{prefix}_{name}"));
        let sample_name = format!("{name}{}", kind.suffix());
        let unit = name.rsplit('_').next().filter(|last| ["bytes", "seconds"].contains(last));
        let (unit, help) = (unit.unwrap_or_default().to_owned(), help.to_owned());
        if self.families.is_some_and(|families| !families.admits(&sample_name)) {
            return Ok(Family(None));
        }
        self.sink.begin(Description { name, sample_name, kind, unit, help })?;
        Ok(Family(Some(self.sink)))
    }
}

/// One family, which takes samples; nothing comes of them where it is not wanted.
#[derive(Debug)]
pub(super) struct Family<'s, S>(Option<&'s mut S>);

impl<S: Sink> Family<'_, S> {
    /// The next samples are of this workload.
    pub(super) fn of<'n>(&mut self, workload: impl Into<Named<'n>>) -> &mut Self {
        if let Some(sink) = &mut self.0 {
            sink.workload(workload.into());
        }
        self
    }

    /// Puts samples, each with its labels.
    pub(super) fn put_all<const N: usize, L: Label, V: Into<Number>>(
        &mut self,
        samples: impl IntoIterator<Item = ([L; N], V)>,
    ) -> fmt::Result {
        samples.into_iter().try_for_each(|(labels, number)| self.put(labels, number))
    }

    /// Puts a sample without other labels for each of these workloads.
    pub(super) fn put_each<'n, V: Into<Number>>(
        &mut self,
        workloads: impl IntoIterator<Item = (impl Into<Named<'n>>, V)>,
    ) -> fmt::Result {
        workloads.into_iter().try_for_each(|(workload, number)| self.of(workload).put(NONE, number))
    }

    /// Puts a sample with these labels, after those of the workload.
    #[inline]
    pub(super) fn put<const N: usize>(
        &mut self,
        labels: [impl Label; N],
        number: impl Into<Number>,
    ) -> fmt::Result {
        match &mut self.0 {
            Some(sink) => sink.put(labels, number.into()),
            None => Ok(()),
        }
    }

    /// Puts a histogram: see [`Sink::histogram`].
    pub(super) fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        self.0.as_mut().map_or(Ok(()), |sink| sink.histogram(sum, up_to))
    }
}

/// No labels.
pub(super) const NONE: [Made<'static>; 0] = [];

/// A label of a sample.
pub(super) trait Label {
    fn name(&self) -> &str;

    fn value(&self) -> &str;

    /// As it is written, escapes and all, where it is made already.
    fn text(&self) -> Option<&str> {
        None
    }
}

/// A label that many lines have, whose text is made once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made<'a> {
    pub(super) name: &'static str,
    pub(super) value: &'a str,
    pub(super) text: &'a str,
}

impl Label for Made<'_> {
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

/// [`Made`], of name and value.
macro_rules! made {
    ($name:literal, $value:literal) => {
        $crate::metrics::family::Made {
            name: $name,
            value: $value,
            text: concat!($name, "=\"", $value, "\""),
        }
    };
}

pub(super) use made;

/// A workload of which samples are put.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named<'a> {
    pub(super) name: &'a str,
    /// Its labels as they are written, escapes and all, where they are made already.
    pub(super) text: Option<&'a str>,
}

impl<'a, N: AsRef<str> + ?Sized> From<&'a N> for Named<'a> {
    fn from(name: &'a N) -> Self {
        Self { name: name.as_ref(), text: None }
    }
}

/// Its name and value.
impl<V: AsRef<str>> Label for (&str, V) {
    fn name(&self) -> &str {
        self.0
    }

    fn value(&self) -> &str {
        self.1.as_ref()
    }
}

/// The labels of a workload: of a container of a pod, whose name is `NAMESPACE/POD/CONTAINER`, those by which other
/// exporters know it; of any other its name. No other workload's name has two slashes.
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

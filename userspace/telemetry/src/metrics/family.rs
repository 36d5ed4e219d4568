//! Writes families whose samples are made at each scrape, line by line.
//!
//! `prometheus-client` writes what is kept in the registry. Of workloads there are hundreds of thousands of lines, which
//! share nearly all of their text; it takes each apart into some fifteen writes, which alone is more than a scrape may
//! cost. Here the name of a family and the labels of a workload are made once for all their lines.
//!
//! The text is OpenMetrics 1.0, as the registry's is: [`super::exposition`] turns both into the older format.

use std::fmt::{self, Write};

/// As much text as is handed on at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Where families are written.
pub(super) struct Lines<'w> {
    out: &'w mut dyn Write,
    /// Of all their names.
    prefix: Option<&'static str>,
    text: String,
}

impl<'w> Lines<'w> {
    pub(super) fn new(out: &'w mut dyn Write, prefix: Option<&'static str>) -> Self {
        Self { out, prefix, text: String::with_capacity(CHUNK_BYTES + 1024) }
    }

    pub(super) fn counter(&mut self, name: &str, unit: Option<&str>, help: &str) -> Begun<'_, 'w> {
        self.begin("counter", "_total", name, unit, help)
    }

    pub(super) fn gauge(&mut self, name: &str, unit: Option<&str>, help: &str) -> Begun<'_, 'w> {
        self.begin("gauge", "", name, unit, help)
    }

    /// See [`Family::histogram`].
    pub(super) fn histogram(&mut self, name: &str, unit: Option<&str>, help: &str) -> Begun<'_, 'w> {
        self.begin("histogram", "", name, unit, help)
    }

    /// Writes what describes a family, whose samples have its name with a suffix.
    fn begin(
        &mut self,
        kind: &str,
        suffix: &str,
        name: &str,
        unit: Option<&str>,
        help: &str,
    ) -> Begun<'_, 'w> {
        self.hand_on()?;
        let parts = self.prefix.into_iter().chain([name]).chain(unit);
        let name = parts.collect::<Vec<_>>().join("_");
        self.out.write_str(&format!("# HELP {name} {help}\n"))?;
        self.out.write_str(&format!("# TYPE {name} {kind}\n"))?;
        if let Some(unit) = unit {
            self.out.write_str(&format!("# UNIT {name} {unit}\n"))?;
        }
        Ok(Family { lines: self, start: name + suffix, workload: String::new() })
    }

    /// Writes what is left.
    pub(super) fn hand_on(&mut self) -> fmt::Result {
        if !self.text.is_empty() {
            self.out.write_str(&self.text)?;
            self.text.clear();
        }
        Ok(())
    }
}

/// A family, or an error where nobody listens any more.
type Begun<'l, 'w> = Result<Family<'l, 'w>, fmt::Error>;

/// One family being written.
pub(super) struct Family<'l, 'w> {
    lines: &'l mut Lines<'w>,
    /// The name of its samples.
    start: String,
    /// The labels of the workload that the next samples are of, as they are written.
    workload: String,
}

impl Family<'_, '_> {
    /// The next samples are of this workload.
    pub(super) fn of(&mut self, workload: &str) -> &mut Self {
        let own = ("workload", workload);
        self.workload.clear();
        own.push_to(&mut self.workload);
        for label in pod_labels(workload).into_iter().flatten() {
            self.workload.push(',');
            label.push_to(&mut self.workload);
        }
        self
    }

    /// Writes a sample with these labels, after those of the workload.
    pub(super) fn put<const N: usize>(&mut self, labels: [impl Label; N], value: impl Value) -> fmt::Result {
        self.put_as("", labels, value)
    }

    fn put_as<const N: usize>(
        &mut self,
        suffix: &str,
        labels: [impl Label; N],
        value: impl Value,
    ) -> fmt::Result {
        let text = &mut self.lines.text;
        text.push_str(&self.start);
        text.push_str(suffix);
        if N > 0 || !self.workload.is_empty() {
            text.push('{');
            text.push_str(&self.workload);
            for (i, label) in labels.into_iter().enumerate() {
                if i > 0 || !self.workload.is_empty() {
                    text.push(',');
                }
                label.push_to(text);
            }
            text.push('}');
        }
        text.push(' ');
        value.push_to(text);
        text.push('\n');
        if text.len() >= CHUNK_BYTES { self.lines.hand_on() } else { Ok(()) }
    }

    /// Writes a histogram: its sum, how many there were in all, and how many up to each bound, of all of which the last
    /// is `+Inf`.
    pub(super) fn histogram(&mut self, sum: f64, up_to: &[(&str, u64)]) -> fmt::Result {
        self.put_as("_sum", NONE, sum)?;
        self.put_as("_count", NONE, up_to.last().map_or(0, |(_, count)| *count))?;
        up_to.iter().try_for_each(|(bound, count)| self.put_as("_bucket", [("le", *bound)], *count))
    }
}

/// No labels.
pub(super) const NONE: [Made<'static>; 0] = [];

/// A label of a sample.
pub(super) trait Label {
    /// Writes it.
    fn push_to(&self, text: &mut String);
}

/// A label as it is written, escapes and all: of those that most lines have, made once.
#[derive(Clone, Copy)]
pub(super) struct Made<'a>(pub(super) &'a str);

impl Label for Made<'_> {
    fn push_to(&self, text: &mut String) {
        text.push_str(self.0);
    }
}

/// Its key and value.
impl<V: AsRef<str>> Label for (&str, V) {
    fn push_to(&self, text: &mut String) {
        let (key, value) = (self.0, self.1.as_ref());
        text.push_str(key);
        text.push_str("=\"");
        if value.bytes().any(|byte| matches!(byte, b'\\' | b'"' | b'\n')) {
            for c in value.chars() {
                match c {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    c => text.push(c),
                }
            }
        } else {
            text.push_str(value);
        }
        text.push('"');
    }
}

/// The value of a sample.
pub(super) trait Value {
    /// Writes it.
    fn push_to(&self, text: &mut String);
}

impl<V: Value> Value for &V {
    fn push_to(&self, text: &mut String) {
        (**self).push_to(text);
    }
}

macro_rules! whole {
    ($($number:ty),*) => {$(
        impl Value for $number {
            fn push_to(&self, text: &mut String) {
                // Writing to a String cannot fail.
                let _ = write!(text, "{self}");
            }
        }
    )*};
}

whole!(u32, u64, i64);

impl Value for f64 {
    fn push_to(&self, text: &mut String) {
        let start = text.len();
        let _ = write!(text, "{self}");
        // As OpenMetrics wants it.
        if self.is_finite() && !text[start..].contains('.') {
            text.push_str(".0");
        }
    }
}

/// What goes with the label `workload` of a container of a pod, whose name is `NAMESPACE/POD/CONTAINER`: the labels by
/// which other exporters know it. No other workload's name has two slashes.
fn pod_labels(workload: &str) -> Option<[(&'static str, &str); 3]> {
    let mut parts = workload.split('/');
    let [namespace, pod, container] = [parts.next()?, parts.next()?, parts.next()?];
    let is_whole = parts.next().is_none() && ![namespace, pod, container].contains(&"");
    is_whole.then_some([("namespace", namespace), ("pod", pod), ("container", container)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_written_as_open_metrics() {
        let mut text = String::new();
        let mut lines = Lines::new(&mut text, None);
        let mut family = lines.counter("a", Some("bytes"), "What it is").unwrap();
        family.put(NONE, 7_u64).unwrap();
        family.put([("k", "v\\\"\n"), ("l", "")], 1.5).unwrap();
        family.of("web.service").put([Made("node=\"0\"")], 0.0).unwrap();
        family.of("ns/pod/main").put(NONE, 0.000_016).unwrap();
        lines.gauge("b", None, "Below").unwrap().put(NONE, -3_i64).unwrap();
        let mut family = lines.histogram("c", Some("seconds"), "How long").unwrap();
        family.of("w").histogram(2.0, &[("0.5", 1), ("+Inf", 3)]).unwrap();
        lines.hand_on().unwrap();
        assert_eq!(
            text,
            "# HELP a_bytes What it is\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
             a_bytes_total 7\n\
             a_bytes_total{k=\"v\\\\\\\"\\n\",l=\"\"} 1.5\n\
             a_bytes_total{workload=\"web.service\",node=\"0\"} 0.0\n\
             a_bytes_total{workload=\"ns/pod/main\",namespace=\"ns\",pod=\"pod\",container=\"main\"} 0.000016\n\
             # HELP b Below\n# TYPE b gauge\nb -3\n\
             # HELP c_seconds How long\n# TYPE c_seconds histogram\n# UNIT c_seconds seconds\n\
             c_seconds_sum{workload=\"w\"} 2.0\nc_seconds_count{workload=\"w\"} 3\n\
             c_seconds_bucket{workload=\"w\",le=\"0.5\"} 1\nc_seconds_bucket{workload=\"w\",le=\"+Inf\"} 3\n"
        );
    }

    #[test]
    fn what_is_large_leaves_in_chunks() {
        #[derive(Default)]
        struct Sink(Vec<usize>);
        impl Write for Sink {
            fn write_str(&mut self, part: &str) -> fmt::Result {
                self.0.push(part.len());
                Ok(())
            }
        }
        let mut sink = Sink::default();
        let mut lines = Lines::new(&mut sink, Some("x"));
        let mut family = lines.gauge("a", None, "Many").unwrap();
        for i in 0..10_000_u64 {
            family.of("w").put([("i", &i.to_string())], i).unwrap();
        }
        lines.hand_on().unwrap();
        let chunks = &sink.0[2..];
        assert!(chunks.len() > 10, "{chunks:?}");
        assert!(
            chunks[..chunks.len() - 1].iter().all(|bytes| (CHUNK_BYTES..CHUNK_BYTES + 1024).contains(bytes))
        );
    }
}

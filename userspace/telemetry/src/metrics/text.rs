//! Output of families as lines of OpenMetrics 1.0, which [`super::exposition`] converts to the older format.
//!
//! `prometheus-client` writes the registry. For hundreds of thousands of lines of workloads it is too slow, because it
//! writes each line in about fifteen parts. The lines share most of their text: here, the name of a family and the
//! labels of a workload are formatted only once.

use std::fmt::{self, Write as _};

use bytes::Bytes;

use super::{
    exposition::TextWriter,
    family::{
        Bound, FamilyDescription, FamilySink, Label, NO_LABELS, Number, WorkloadLabel, workload_labels,
    },
};

/// A sink that writes lines.
pub(super) struct LineWriter<'w, S> {
    out: &'w mut TextWriter<S>,
    /// The beginning of the next lines: the name of the family's samples, a brace, and the labels of the workload.
    start: String,
    /// The position of these labels in `start`.
    labels_at: usize,
}

impl<'w, S: FnMut(Bytes) -> bool> LineWriter<'w, S> {
    pub(super) const fn new(out: &'w mut TextWriter<S>) -> Self {
        Self { out, start: String::new(), labels_at: 0 }
    }

    /// Writes a line of a family. `suffix` distinguishes the lines of a histogram.
    #[inline]
    fn line<const N: usize>(&mut self, suffix: &str, labels: [impl Label; N], value: Number) -> fmt::Result {
        let text = self.out.text();
        let (name, of_workload) = self.start.split_at(self.labels_at);
        let name = name.strip_suffix('{').unwrap_or(name);
        if N > 0 || !of_workload.is_empty() {
            if suffix.is_empty() {
                text.push_str(&self.start);
            } else {
                text.extend([name, suffix, "{", of_workload]);
            }
            for (i, label) in labels.into_iter().enumerate() {
                if i > 0 || !of_workload.is_empty() {
                    text.push(',');
                }
                push_label(text, &label);
            }
            text.push_str("} ");
        } else {
            text.extend([name, suffix, " "]);
        }
        push_number(text, value);
        text.push('\n');
        self.out.flush_if_full()
    }
}

impl<S: FnMut(Bytes) -> bool> FamilySink for LineWriter<'_, S> {
    fn begin(&mut self, family: FamilyDescription) -> fmt::Result {
        let FamilyDescription { name, sample_name, kind, unit, help } = family;
        self.out.write_str(&format!("# HELP {name} {help}\n"))?;
        self.out.write_str(&format!("# TYPE {name} {}\n", <&str>::from(kind)))?;
        if !unit.is_empty() {
            self.out.write_str(&format!("# UNIT {name} {unit}\n"))?;
        }
        self.start = sample_name + "{";
        self.labels_at = self.start.len();
        Ok(())
    }

    fn workload(&mut self, workload: WorkloadLabel<'_>) {
        self.start.truncate(self.labels_at);
        match workload.text {
            Some(text) => self.start.push_str(text),
            None => push_labels(&mut self.start, workload.name),
        }
    }

    #[inline]
    fn add<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result {
        self.line("", labels, number)
    }

    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        self.line("_sum", NO_LABELS, sum.into())?;
        self.line("_count", NO_LABELS, up_to.last().map_or(0, |(_, count)| *count).into())?;
        up_to.iter().try_for_each(|(bound, count)| self.line("_bucket", [("le", bound.1)], count.into()))
    }
}

/// The formatted labels of all workloads. They are formatted once for all families, and stored contiguously, because
/// scattered texts would be fetched from memory again for each family.
pub(super) struct WorkloadTexts {
    text: String,
    /// The end of the labels of each workload.
    ends: Vec<usize>,
}

impl WorkloadTexts {
    pub(super) fn new<'n>(workloads: impl Iterator<Item = &'n str>) -> Self {
        let mut text = String::new();
        let end = |name| {
            push_labels(&mut text, name);
            text.len()
        };
        Self { ends: workloads.map(end).collect(), text }
    }

    /// Returns the labels of each workload.
    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(&start, &end)| &self.text[start..end])
    }
}

fn push_labels(text: &mut String, workload: &str) {
    let start = text.len();
    for label in workload_labels(workload) {
        if text.len() > start {
            text.push(',');
        }
        push_label(text, &label);
    }
}

#[inline]
fn push_label(text: &mut String, label: &impl Label) {
    if let Some(made) = label.text() {
        text.push_str(made);
        return;
    }
    let value = label.value();
    text.push_str(label.name());
    text.push_str("=\"");
    if memchr::memchr3(b'\\', b'"', b'\n', value.as_bytes()).is_some() {
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

/// The compiler knows the variant at most call sites.
#[inline]
fn push_number(text: &mut String, number: Number) {
    match number {
        Number::Unsigned(number) => text.push_str(itoa::Buffer::new().format(number)),
        Number::Signed(number) => text.push_str(itoa::Buffer::new().format(number)),
        Number::Real(number) => push_real(text, number),
    }
}

fn push_real(text: &mut String, number: f64) {
    let start = text.len();
    // Writing to a String cannot fail.
    let _ = write!(text, "{number}");
    // OpenMetrics requires a decimal point.
    if number.is_finite() && !text[start..].contains('.') {
        text.push_str(".0");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            exposition::{Format, PIECE_BYTES},
            family::{FamilyKind, FamilyWriter, formatted_label},
        },
        *,
    };

    /// Returns the pieces of the text that `make` writes.
    fn pieces(
        make: impl FnOnce(&mut LineWriter<'_, &mut dyn FnMut(Bytes) -> bool>) -> fmt::Result,
    ) -> Vec<String> {
        let mut pieces = Vec::new();
        let mut sink = |piece: Bytes| {
            pieces.push(String::from_utf8(piece.into()).unwrap());
            true
        };
        let mut writer = TextWriter::new(Format::OpenMetrics, &mut sink as &mut dyn FnMut(Bytes) -> bool);
        make(&mut LineWriter::new(&mut writer)).unwrap();
        writer.flush().unwrap();
        pieces
    }

    #[test]
    fn writes_open_metrics() {
        let pieces = pieces(|lines| {
            let mut out = FamilyWriter::new(lines, None, None);
            let mut family = out.counter("a_bytes", "What it is")?;
            family.add(NO_LABELS, 7_u64)?;
            family.add([("k", "v\\\"\n"), ("l", "")], 1.5)?;
            family.for_workload("web.service").add([formatted_label!("numa_node", "0")], 0.0)?;
            family.for_workload("ns/pod/main").add(NO_LABELS, 0.000_016)?;
            out.gauge("b", "Below")?.add(NO_LABELS, -3_i64)?;
            let mut family = out.begin(FamilyKind::Histogram, "c_seconds", "How long")?;
            family
                .for_workload("w")
                .histogram(2.0, &[(Bound(0.5, "0.5"), 1), (Bound(f64::INFINITY, "+Inf"), 3)])?;
            family.add([formatted_label!("k", "v")], u64::MAX)
        });
        assert_eq!(
            pieces.concat(),
            "# HELP a_bytes What it is\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
             a_bytes_total 7\n\
             a_bytes_total{k=\"v\\\\\\\"\\n\",l=\"\"} 1.5\n\
             a_bytes_total{workload=\"web.service\",numa_node=\"0\"} 0.0\n\
             a_bytes_total{namespace=\"ns\",pod=\"pod\",container=\"main\"} 0.000016\n\
             # HELP b Below\n# TYPE b gauge\nb -3\n\
             # HELP c_seconds How long\n# TYPE c_seconds histogram\n# UNIT c_seconds seconds\n\
             c_seconds_sum{workload=\"w\"} 2.0\nc_seconds_count{workload=\"w\"} 3\n\
             c_seconds_bucket{workload=\"w\",le=\"0.5\"} 1\nc_seconds_bucket{workload=\"w\",le=\"+Inf\"} 3\n\
             c_seconds{workload=\"w\",k=\"v\"} 18446744073709551615\n"
        );
    }

    #[test]
    fn large_text_is_sent_in_pieces() {
        let pieces = pieces(|lines| {
            let mut out = FamilyWriter::new(lines, Some("x"), None);
            let mut family = out.gauge("a", "Many")?;
            (0..10_000_u64).try_for_each(|i| family.for_workload("w").add([("i", &i.to_string())], i))
        });
        let (last, whole) = pieces.split_last().unwrap();
        assert!(whole.len() > 2 && last.ends_with("x_a{workload=\"w\",i=\"9999\"} 9999\n"), "{last}");
        assert!(whole.iter().all(|piece| (PIECE_BYTES..PIECE_BYTES + 1024).contains(&piece.len())));
    }
}

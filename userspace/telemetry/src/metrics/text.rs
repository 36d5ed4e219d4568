//! Writes families line by line, as OpenMetrics 1.0: [`super::exposition`] turns it into the older format.
//!
//! `prometheus-client` writes what is kept in the registry. Of workloads there are hundreds of thousands of lines, which
//! share nearly all of their text; it takes each apart into some fifteen writes, which alone is more than a scrape may
//! cost. Here the name of a family and the labels of a workload are made once for all their lines.

use std::fmt::{self, Write as _};

use bytes::Bytes;

use super::{
    exposition::Writer,
    family::{Bound, Description, Label, NONE, Number, Sink, workload_labels},
};

/// Writes lines.
pub(super) struct Lines<'w, S> {
    out: &'w mut Writer<S>,
    /// The name of the samples of the family.
    name: String,
    /// The labels of the workload that the next samples are of, as they are written.
    workload: String,
    /// What the next lines begin with: name, brace and labels of the workload.
    start: String,
}

impl<'w, S: FnMut(Bytes) -> bool> Lines<'w, S> {
    pub(super) const fn new(out: &'w mut Writer<S>) -> Self {
        Self { out, name: String::new(), workload: String::new(), start: String::new() }
    }

    /// A line of a family of which there are others with more in the name.
    fn line_of<const N: usize>(
        &mut self,
        suffix: &str,
        labels: [impl Label; N],
        value: Number,
    ) -> fmt::Result {
        self.begin_lines(suffix);
        self.line(labels, value)?;
        self.begin_lines("");
        Ok(())
    }

    fn begin_lines(&mut self, suffix: &str) {
        self.start.clear();
        self.start.extend([&self.name, suffix, "{", &self.workload]);
    }

    #[inline]
    fn line<const N: usize>(&mut self, labels: [impl Label; N], value: Number) -> fmt::Result {
        let text = self.out.text();
        if N > 0 || !self.workload.is_empty() {
            text.push_str(&self.start);
            for (i, label) in labels.into_iter().enumerate() {
                if i > 0 || !self.workload.is_empty() {
                    text.push(',');
                }
                push_label(text, &label);
            }
            text.push_str("} ");
        } else {
            text.push_str(self.start.strip_suffix('{').unwrap_or(&self.start));
            text.push(' ');
        }
        push_number(text, value);
        text.push('\n');
        self.out.hand_on_what_is_long()
    }
}

impl<S: FnMut(Bytes) -> bool> Sink for Lines<'_, S> {
    fn begin(&mut self, family: Description) -> fmt::Result {
        let Description { name, sample_name, kind, unit, help } = family;
        self.out.write_str(&format!("# HELP {name} {help}\n"))?;
        self.out.write_str(&format!("# TYPE {name} {}\n", <&str>::from(kind)))?;
        if !unit.is_empty() {
            self.out.write_str(&format!("# UNIT {name} {unit}\n"))?;
        }
        self.name = sample_name;
        self.workload.clear();
        self.begin_lines("");
        Ok(())
    }

    fn workload(&mut self, name: &str) {
        self.workload.clear();
        for label in workload_labels(name) {
            if !self.workload.is_empty() {
                self.workload.push(',');
            }
            push_label(&mut self.workload, &label);
        }
        self.begin_lines("");
    }

    #[inline]
    fn put<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result {
        self.line(labels, number)
    }

    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        self.line_of("_sum", NONE, sum.into())?;
        self.line_of("_count", NONE, up_to.last().map_or(0, |(_, count)| *count).into())?;
        up_to.iter().try_for_each(|(bound, count)| self.line_of("_bucket", [("le", bound.1)], count.into()))
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

/// The compiler knows in most places which of them it is.
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
    // As OpenMetrics wants it.
    if number.is_finite() && !text[start..].contains('.') {
        text.push_str(".0");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            exposition::{Format, PIECE_BYTES},
            family::{Kind, Out, made},
        },
        *,
    };

    /// The pieces that come of what `make` puts.
    fn pieces(
        make: impl FnOnce(&mut Lines<'_, &mut dyn FnMut(Bytes) -> bool>) -> fmt::Result,
    ) -> Vec<String> {
        let mut pieces = Vec::new();
        let mut sink = |piece: Bytes| {
            pieces.push(String::from_utf8(piece.into()).unwrap());
            true
        };
        let mut writer = Writer::new(Format::OpenMetrics, &mut sink as &mut dyn FnMut(Bytes) -> bool);
        make(&mut Lines::new(&mut writer)).unwrap();
        writer.hand_on().unwrap();
        pieces
    }

    #[test]
    fn families_are_written_as_open_metrics() {
        let pieces = pieces(|lines| {
            let mut out = Out::new(lines, None, None);
            let mut family = out.counter("a_bytes", "What it is")?;
            family.put(NONE, 7_u64)?;
            family.put([("k", "v\\\"\n"), ("l", "")], 1.5)?;
            family.of("web.service").put([made!("numa_node", "0")], 0.0)?;
            family.of("ns/pod/main").put(NONE, 0.000_016)?;
            out.gauge("b", "Below")?.put(NONE, -3_i64)?;
            let mut family = out.begin(Kind::Histogram, "c_seconds", "How long")?;
            family.of("w").histogram(2.0, &[(Bound(0.5, "0.5"), 1), (Bound(f64::INFINITY, "+Inf"), 3)])?;
            family.put([made!("k", "v")], u64::MAX)
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
    fn what_is_large_leaves_in_pieces() {
        let pieces = pieces(|lines| {
            let mut out = Out::new(lines, Some("x"), None);
            let mut family = out.gauge("a", "Many")?;
            (0..10_000_u64).try_for_each(|i| family.of("w").put([("i", &i.to_string())], i))
        });
        let (last, whole) = pieces.split_last().unwrap();
        assert!(whole.len() > 2 && last.ends_with("x_a{workload=\"w\",i=\"9999\"} 9999\n"), "{last}");
        assert!(whole.iter().all(|piece| (PIECE_BYTES..PIECE_BYTES + 1024).contains(&piece.len())));
    }
}

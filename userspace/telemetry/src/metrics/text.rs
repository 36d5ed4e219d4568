//! Writes families line by line, as OpenMetrics 1.0: [`super::exposition`] turns it into the older format.
//!
//! `prometheus-client` writes what is kept in the registry. Of workloads there are hundreds of thousands of lines, which
//! share nearly all of their text; it takes each apart into some fifteen writes, which alone is more than a scrape may
//! cost. Here the name of a family and the labels of a workload are made once for all their lines.

use std::fmt::{self, Write};

use super::family::{Bound, Description, Label, NONE, Number, Sink, workload_labels};

/// As much text as is handed on at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Writes lines.
pub(super) struct Lines<'w> {
    out: &'w mut dyn Write,
    text: String,
    /// The name of the samples of the family.
    name: String,
    /// The labels of the workload that the next samples are of, as they are written.
    workload: String,
}

impl<'w> Lines<'w> {
    pub(super) fn new(out: &'w mut dyn Write) -> Self {
        let text = String::with_capacity(CHUNK_BYTES + 1024);
        Self { out, text, name: String::new(), workload: String::new() }
    }

    /// Writes what is left.
    pub(super) fn hand_on(&mut self) -> fmt::Result {
        if !self.text.is_empty() {
            self.out.write_str(&self.text)?;
            self.text.clear();
        }
        Ok(())
    }

    #[inline]
    fn line<const N: usize>(&mut self, suffix: &str, labels: [impl Label; N], value: Number) -> fmt::Result {
        let text = &mut self.text;
        text.push_str(&self.name);
        text.push_str(suffix);
        if N > 0 || !self.workload.is_empty() {
            text.push('{');
            text.push_str(&self.workload);
            for (i, label) in labels.into_iter().enumerate() {
                if i > 0 || !self.workload.is_empty() {
                    text.push(',');
                }
                push_label(text, &label);
            }
            text.push('}');
        }
        text.push(' ');
        push_number(text, value);
        text.push('\n');
        if text.len() >= CHUNK_BYTES { self.hand_on() } else { Ok(()) }
    }
}

impl Sink for Lines<'_> {
    fn begin(&mut self, family: Description) -> fmt::Result {
        self.hand_on()?;
        let Description { name, sample_name, kind, unit, help } = family;
        self.out.write_str(&format!("# HELP {name} {help}\n"))?;
        self.out.write_str(&format!("# TYPE {name} {}\n", <&str>::from(kind)))?;
        if !unit.is_empty() {
            self.out.write_str(&format!("# UNIT {name} {unit}\n"))?;
        }
        self.name = sample_name;
        self.workload.clear();
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
    }

    #[inline]
    fn put<const N: usize>(&mut self, labels: [impl Label; N], number: Number) -> fmt::Result {
        self.line("", labels, number)
    }

    fn histogram(&mut self, sum: f64, up_to: &[(Bound, u64)]) -> fmt::Result {
        self.line("_sum", NONE, sum.into())?;
        self.line("_count", NONE, up_to.last().map_or(0, |(_, count)| *count).into())?;
        up_to.iter().try_for_each(|(bound, count)| self.line("_bucket", [("le", bound.1)], count.into()))
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

/// The compiler knows in most places which of them it is.
#[inline]
fn push_number(text: &mut String, number: Number) {
    // Writing to a String cannot fail.
    match number {
        Number::Unsigned(number) => drop(write!(text, "{number}")),
        Number::Signed(number) => drop(write!(text, "{number}")),
        Number::Real(number) => push_real(text, number),
    }
}

fn push_real(text: &mut String, number: f64) {
    let start = text.len();
    let _ = write!(text, "{number}");
    // As OpenMetrics wants it.
    if number.is_finite() && !text[start..].contains('.') {
        text.push_str(".0");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::family::{Kind, Out, made},
        *,
    };

    #[test]
    fn families_are_written_as_open_metrics() {
        let mut text = String::new();
        let mut lines = Lines::new(&mut text);
        let mut out = Out::new(&mut lines, None, None);
        let mut family = out.counter("a_bytes", "What it is").unwrap();
        family.put(NONE, 7_u64).unwrap();
        family.put([("k", "v\\\"\n"), ("l", "")], 1.5).unwrap();
        family.of("web.service").put([made!("numa_node", "0")], 0.0).unwrap();
        family.of("ns/pod/main").put(NONE, 0.000_016).unwrap();
        out.gauge("b", "Below").unwrap().put(NONE, -3_i64).unwrap();
        let mut family = out.begin(Kind::Histogram, "c_seconds", "How long").unwrap();
        family.of("w").histogram(2.0, &[(Bound(0.5, "0.5"), 1), (Bound(f64::INFINITY, "+Inf"), 3)]).unwrap();
        lines.hand_on().unwrap();
        assert_eq!(
            text,
            "# HELP a_bytes What it is\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
             a_bytes_total 7\n\
             a_bytes_total{k=\"v\\\\\\\"\\n\",l=\"\"} 1.5\n\
             a_bytes_total{workload=\"web.service\",numa_node=\"0\"} 0.0\n\
             a_bytes_total{namespace=\"ns\",pod=\"pod\",container=\"main\"} 0.000016\n\
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
        let mut lines = Lines::new(&mut sink);
        let mut out = Out::new(&mut lines, Some("x"), None);
        let mut family = out.gauge("a", "Many").unwrap();
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

//! The samples of a scrape, for those who send or watch them: the same numbers as in `/metrics`, as they are taken from
//! what is written there.

use std::{borrow::Cow, fmt, str};

use super::{Format, Metrics};

/// What a family is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Grows.
    Counter,
    /// Goes up and down.
    #[default]
    Gauge,
    /// Counts by size.
    Histogram,
    /// Always 1; the labels tell.
    Info,
}

/// A family as it is described.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The name, without `_total` and the like.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// In what it counts, as in the name; empty where it only counts.
    pub unit: String,
    /// What it says.
    pub help: String,
}

/// A line of `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample<'a> {
    /// The name, with `_total` and the like.
    pub name: &'a str,
    /// As written, escapes and all.
    labels: &'a str,
    /// As written.
    pub value: &'a str,
}

impl<'a> Sample<'a> {
    /// One of that name, with labels as they are written.
    pub const fn new(name: &'a str, labels: &'a str, value: &'a str) -> Self {
        Self { name, labels, value }
    }

    /// Names the series among those of the same name.
    pub const fn raw_labels(&self) -> &'a str {
        self.labels
    }

    /// The labels, in order.
    pub const fn labels(&self) -> Labels<'a> {
        Labels(self.labels)
    }
}

/// Goes through labels as they are written.
#[derive(Clone, Debug)]
pub struct Labels<'a>(&'a str);

impl<'a> Iterator for Labels<'a> {
    type Item = (&'a str, Cow<'a, str>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, rest) = self.0.split_once("=\"")?;
        let mut end = 0;
        let mut escaped = false;
        let mut has_escapes = false;
        for byte in rest.bytes() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => (escaped, has_escapes) = (true, true),
                b'"' => break,
                _ => {}
            }
            end += 1;
        }
        let value = rest.get(..end)?;
        let rest = rest.get(end + 1..)?;
        self.0 = rest.strip_prefix(',').unwrap_or(rest);
        Some((name, if has_escapes { unescaped(value).into() } else { value.into() }))
    }
}

fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => plain.extend(chars.next().map(|c| if c == 'n' { '\n' } else { c })),
            (c, false) => plain.push(c),
        }
    }
    plain
}

/// Understands what [`exposition`] writes, line by line.
#[derive(Debug, Default)]
struct Reader {
    family: Description,
}

impl Reader {
    fn read(&mut self, text: &str, visit: &mut impl FnMut(&Description, Sample<'_>)) {
        for line in text.lines() {
            match line.strip_prefix("# ") {
                Some(metadata) => self.describe(metadata),
                None => {
                    if let Some(sample) = sample(line) {
                        visit(&self.family, sample);
                    }
                }
            }
        }
    }

    fn describe(&mut self, metadata: &str) {
        let mut words = metadata.splitn(3, ' ');
        let (Some(what), Some(name)) = (words.next(), words.next()) else { return };
        if self.family.name != name {
            self.family = Description { name: name.to_owned(), ..Description::default() };
        }
        let rest = words.next().unwrap_or_default();
        match what {
            "HELP" => rest.clone_into(&mut self.family.help),
            "UNIT" => rest.clone_into(&mut self.family.unit),
            "TYPE" => {
                self.family.kind = match rest {
                    "counter" => Kind::Counter,
                    "histogram" => Kind::Histogram,
                    "info" => Kind::Info,
                    _ => Kind::Gauge,
                };
            }
            _ => {}
        }
    }
}

fn sample(line: &str) -> Option<Sample<'_>> {
    // Neither names nor values have braces or spaces; labels may have both.
    let (name, labels, value) = if let Some((name, rest)) = line.split_once('{') {
        let (labels, value) = rest.rsplit_once("} ")?;
        (name, labels, value)
    } else {
        let (name, value) = line.split_once(' ')?;
        (name, "", value)
    };
    Some(Sample { name, labels, value })
}

impl Metrics {
    /// Visits all samples, each with its family. Blocks. It is no scrape, and not counted as one.
    pub fn visit(&self, mut visit: impl FnMut(&Description, Sample<'_>)) -> fmt::Result {
        let mut reader = Reader::default();
        self.write(Format::OpenMetrics, |piece| match str::from_utf8(&piece) {
            Ok(text) => {
                reader.read(text, &mut visit);
                true
            }
            Err(_) => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_apart_and_labels_are_as_they_were() {
        let text = "# HELP a_bytes What it is.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
                    a_bytes_total{workload=\"a\\\\b\\\"c\\nd} 7,x=\\\"\",node=\"2\"} 4096\na_bytes_total 1.5\n# EOF\n";
        let mut seen = Vec::new();
        Reader::default().read(text, &mut |family, sample| {
            let labels: Vec<_> =
                sample.labels().map(|(name, value)| (name.to_owned(), value.into_owned())).collect();
            seen.push((family.clone(), sample.name.to_owned(), labels, sample.value.to_owned()));
        });
        let family = Description {
            name: "a_bytes".to_owned(),
            kind: Kind::Counter,
            unit: "bytes".to_owned(),
            help: "What it is.".to_owned(),
        };
        let labels = vec![
            ("workload".to_owned(), "a\\b\"c\nd} 7,x=\"".to_owned()),
            ("node".to_owned(), "2".to_owned()),
        ];
        let name = "a_bytes_total".to_owned();
        assert_eq!(
            seen,
            [
                (family.clone(), name.clone(), labels, "4096".to_owned()),
                (family, name, Vec::new(), "1.5".to_owned())
            ]
        );
    }

    #[test]
    fn what_is_no_sample_is_left_out() {
        for line in ["", "a", "a{b=\"c\" 1", "#"] {
            assert_eq!(sample(line), None, "{line}");
        }
        for labels in ["a", "a=", "a=\"", "a=\"b", "a=\"b\\\""] {
            assert_eq!(Labels(labels).next(), None, "{labels}");
        }
    }
}

//! Writes metrics as text, in pieces, in either of the two formats that scrapers ask for.
//!
//! Everything is written as OpenMetrics 1.0 at first. The older Prometheus text format 0.0.4 has the same
//! sample lines but other metadata: a counter is declared by the name of its samples (with `_total`),
//! an info is a gauge, and there are neither units nor an end mark. So the metadata lines are rewritten on their
//! way and all others pass. A scrape of thousands of workloads is tens of megabytes; it leaves in
//! pieces so that it is never held as a whole.
//!
//! Sources: <https://prometheus.io/docs/instrumenting/exposition_formats/>, OpenMetrics 1.0.

use std::fmt::{self, Write};

use bytes::Bytes;
use prometheus_client::encoding::text;

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The media type, for `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Size of a piece, about: large against the cost of handing one on.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// Writes all metrics to `sink`, piece by piece: those that are `registered`, then `others`. Ends early when the sink returns
/// `false`: nobody listens any more.
pub(super) fn encode<S: FnMut(Bytes) -> bool>(
    registered: &str,
    others: impl FnOnce(&mut Writer<S>) -> fmt::Result,
    format: Format,
    sink: S,
) -> fmt::Result {
    let mut writer = Writer::new(format, sink);
    registered.split_inclusive('\n').try_for_each(|line| writer.write_str(line))?;
    others(&mut writer)?;
    text::encode_eof(&mut writer)?;
    writer.hand_on()
}

/// Text on its way. Metadata is written by [`Write`], and whole lines of samples may go to its text as they are.
pub(super) struct Writer<S> {
    format: Format,
    sink: S,
    text: String,
    /// Where in `text` the metadata line starts that is being written.
    metadata: Option<usize>,
    /// The help that waits for its type, which decides the name.
    help: Option<String>,
}

impl<S: FnMut(Bytes) -> bool> Write for Writer<S> {
    #[inline]
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if part.starts_with('#')
            && self.format == Format::Prometheus
            && (self.text.is_empty() || self.text.ends_with('\n'))
        {
            self.metadata = Some(self.text.len());
        }
        self.text.push_str(part);
        if part.ends_with('\n') {
            if let Some(start) = self.metadata.take() {
                self.rewrite(start)?;
            }
            self.hand_on_what_is_long()?;
        }
        Ok(())
    }
}

impl<S: FnMut(Bytes) -> bool> Writer<S> {
    pub(super) fn new(format: Format, sink: S) -> Self {
        Self { format, sink, text: String::with_capacity(PIECE_BYTES + 1024), metadata: None, help: None }
    }

    /// To push lines of samples to.
    pub(super) const fn text(&mut self) -> &mut String {
        &mut self.text
    }

    /// Hands on what is long enough for a piece.
    #[inline]
    pub(super) fn hand_on_what_is_long(&mut self) -> fmt::Result {
        if self.text.len() >= PIECE_BYTES { self.hand_on() } else { Ok(()) }
    }

    /// Hands on what is there. An error means that nobody listens any more.
    pub(super) fn hand_on(&mut self) -> fmt::Result {
        let piece = std::mem::replace(&mut self.text, String::with_capacity(PIECE_BYTES + 1024));
        if piece.is_empty() || (self.sink)(piece.into()) { Ok(()) } else { Err(fmt::Error) }
    }

    /// Turns the OpenMetrics metadata line at `start` into Prometheus text.
    fn rewrite(&mut self, start: usize) -> fmt::Result {
        let line = self.text.split_off(start);
        let mut words = line.trim_end().splitn(4, ' ').skip(1);
        match (words.next(), words.next(), words.next()) {
            (Some("HELP"), Some(_), help) => self.help = help.map(str::to_owned),
            (Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                if let Some(help) = self.help.take() {
                    writeln!(self.text, "# HELP {name}{suffix} {help}")?;
                }
                writeln!(self.text, "# TYPE {name}{suffix} {kind}")?;
            }
            // Units and the end mark have no place in this format.
            _ => {}
        }
        Ok(())
    }
}

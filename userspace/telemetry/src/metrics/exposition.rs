//! Output of metrics as text, piece by piece, in one of two formats.
//!
//! Families are written as OpenMetrics 1.0. The older Prometheus text format 0.0.4 has the same sample lines but other
//! metadata: a counter is declared by the name of its samples (with `_total`), an info is a gauge, and there are
//! neither units nor an end mark. So only the metadata lines are rewritten. A scrape of thousands of workloads has tens
//! of megabytes, so it is sent in pieces instead of being collected in memory.
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
    /// Returns the media type for `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The approximate size of a piece, which is large compared with the cost of sending one.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// Writes all metrics to `sink`, piece by piece: first the text of the registry (`registered`), then the families that
/// `unregistered` writes. Stops if the sink returns `false`, because the client has closed the connection.
pub(super) fn encode<S: FnMut(Bytes) -> bool>(
    registered: &str,
    unregistered: impl FnOnce(&mut TextWriter<S>) -> fmt::Result,
    format: Format,
    sink: S,
) -> fmt::Result {
    let mut writer = TextWriter::new(format, sink);
    registered.split_inclusive('\n').try_for_each(|line| writer.write_str(line))?;
    unregistered(&mut writer)?;
    text::encode_eof(&mut writer)?;
    writer.flush()
}

/// A buffer of text for the sink. Metadata is written by [`Write`]; sample lines may be added to the text directly.
pub(super) struct TextWriter<S> {
    format: Format,
    sink: S,
    text: String,
    /// The start of the current metadata line in `text`.
    metadata: Option<usize>,
    /// The help text, which is kept until the type is known.
    help: Option<String>,
}

impl<S: FnMut(Bytes) -> bool> Write for TextWriter<S> {
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
            self.flush_if_full()?;
        }
        Ok(())
    }
}

impl<S: FnMut(Bytes) -> bool> TextWriter<S> {
    pub(super) fn new(format: Format, sink: S) -> Self {
        Self { format, sink, text: String::with_capacity(PIECE_BYTES + 1024), metadata: None, help: None }
    }

    /// Returns the text, to which sample lines can be added.
    pub(super) const fn text(&mut self) -> &mut String {
        &mut self.text
    }

    /// Sends the text if it is long enough for a piece.
    #[inline]
    pub(super) fn flush_if_full(&mut self) -> fmt::Result {
        if self.text.len() >= PIECE_BYTES { self.flush() } else { Ok(()) }
    }

    /// Sends the text. Fails if the client has closed the connection.
    pub(super) fn flush(&mut self) -> fmt::Result {
        let piece = std::mem::replace(&mut self.text, String::with_capacity(PIECE_BYTES + 1024));
        if piece.is_empty() || (self.sink)(piece.into()) { Ok(()) } else { Err(fmt::Error) }
    }

    /// Converts the OpenMetrics metadata line at `start` to the Prometheus format.
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
            // This format has no units and no end mark.
            _ => {}
        }
        Ok(())
    }
}

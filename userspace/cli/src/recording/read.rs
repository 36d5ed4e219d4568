//! Reader of recordings.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use flate2::{Decompress, FlushDecompress};

use super::{
    FILE_HEADER_BYTES, FRAME_HEADER_BYTES, MAGIC, MAX_MOMENT_BYTES, Moment, MomentFlags, MomentHeader,
    VERSION, format_time,
};

/// Reason why a file cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordingError {
    #[error("{}: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{} is empty: nothing was recorded", .0.display())]
    Empty(PathBuf),
    #[error("{} is not a recording; `numaward record` makes one", .0.display())]
    NotARecording(PathBuf),
    #[error(
        "{} has version {version} of the format, but this numaward reads versions up to {VERSION}: \
         replay it with the version of numaward that recorded it", path.display()
    )]
    NewerVersion { path: PathBuf, version: u32 },
    #[error("{} has no moment: recording ended before the first moment was written", .0.display())]
    NoMoment(PathBuf),
    #[error("{}: the moment of {at} cannot be read: {reason}; is it of another version?", path.display())]
    Malformed { path: PathBuf, at: String, reason: String },
}

/// Position of a frame in the file.
#[derive(Clone, Copy, Debug)]
struct Frame {
    header: MomentHeader,
    /// Offset of the payload.
    offset: u64,
    length: u32,
    plain: u32,
}

/// A recording that is read.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    file: File,
    frames: Vec<Frame>,
    /// Headers of the readable moments, at least one.
    pub(crate) headers: Vec<MomentHeader>,
    /// Descriptions of torn or damaged parts.
    pub(crate) warnings: Vec<String>,
    decompress: Decompress,
    /// Index of the moment that the DEFLATE stream continues with.
    next: Option<usize>,
}

impl Recording {
    /// Scans a file for its moments and for damaged parts.
    pub(crate) fn open(path: &Path) -> Result<Self, RecordingError> {
        let unreadable = |error| RecordingError::Unreadable { path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut reader = BufReader::with_capacity(1 << 18, file);
        if size == 0 {
            return Err(RecordingError::Empty(path.to_owned()));
        }
        let mut head = [0; FILE_HEADER_BYTES];
        reader.read_exact(&mut head).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => RecordingError::NotARecording(path.to_owned()),
            _ => unreadable(error),
        })?;
        let (magic, version) = head.split_at(MAGIC.len());
        let version = number(version, 0);
        if magic != MAGIC || version == 0 {
            return Err(RecordingError::NotARecording(path.to_owned()));
        }
        if version > VERSION {
            return Err(RecordingError::NewerVersion { path: path.to_owned(), version });
        }
        let mut frames = Vec::new();
        let mut warnings = Vec::new();
        let mut damage: Option<Damage> = None;
        let mut at = FILE_HEADER_BYTES as u64;
        while at < size {
            let Some((frame, is_whole)) = next_frame(&mut reader, at, size).map_err(unreadable)? else {
                let last: Option<&Frame> = frames.last();
                let until = last.map_or_else(String::new, |last| {
                    format!(": the moments after {} are lost", format_time(last.header.at_millis))
                });
                warnings.push(format!("the recording breaks off at byte {at}{until}"));
                break;
            };
            at = frame.offset + u64::from(frame.length);
            if is_whole && frame.header.flags.is_complete {
                warnings.extend(damage.take().map(|damage| damage.to_string()));
            } else if !is_whole || damage.is_some() || frames.is_empty() {
                damage.get_or_insert(Damage { at: frame.header.at_millis, moments: 0 }).moments += 1;
                continue;
            }
            frames.push(frame);
        }
        warnings.extend(damage.map(|damage| damage.to_string()));
        if frames.is_empty() && warnings.is_empty() {
            return Err(RecordingError::NoMoment(path.to_owned()));
        }
        if frames.is_empty() {
            let reason = warnings.join("; ");
            return Err(RecordingError::Unreadable {
                path: path.to_owned(),
                error: io::Error::other(reason),
            });
        }
        let headers = frames.iter().map(|frame| frame.header).collect();
        let decompress = Decompress::new(false);
        let file = reader.into_inner();
        Ok(Self { path: path.to_owned(), file, frames, headers, warnings, decompress, next: None })
    }

    /// Returns the index of the first moment of a moment's run.
    pub(crate) fn run_start(&self, at: usize) -> usize {
        (0..=at).rev().find(|at| self.frames[*at].header.flags.is_complete).unwrap_or(0)
    }

    /// Reads a moment. In sequence, each moment is decompressed once; a jump decompresses the run from its start.
    pub(crate) fn moment(&mut self, at: usize) -> Result<Moment, RecordingError> {
        if self.next != Some(at) {
            for before in self.run_start(at)..at {
                self.inflate(before)?;
            }
        }
        let plain = self.inflate(at)?;
        self.next = Some(at + 1);
        serde_json::from_slice(&plain).map_err(|error| self.malformed(at, &error.to_string()))
    }

    fn malformed(&self, at: usize, reason: &str) -> RecordingError {
        let at = format_time(self.frames[at].header.at_millis);
        RecordingError::Malformed { path: self.path.clone(), at, reason: reason.to_owned() }
    }

    fn inflate(&mut self, at: usize) -> Result<Vec<u8>, RecordingError> {
        self.next = None;
        let Frame { header, offset, length, plain } = self.frames[at];
        if header.flags.is_complete {
            self.decompress.reset(false);
        }
        let mut payload = vec![0; length as usize];
        self.file
            .read_exact_at(&mut payload, offset)
            .map_err(|error| RecordingError::Unreadable { path: self.path.clone(), error })?;
        // One byte more than the expected size, so that decompress_vec can signal the end.
        let mut text = Vec::with_capacity(plain as usize + 1);
        let done = self.decompress.decompress_vec(&payload, &mut text, FlushDecompress::Sync);
        match done {
            Ok(_) if text.len() == plain as usize => Ok(text),
            Ok(_) => Err(self.malformed(at, &format!("{} bytes of {plain}", text.len()))),
            Err(error) => Err(self.malformed(at, &error.to_string())),
        }
    }
}

/// A range of moments that cannot be read.
#[derive(derive_more::Display)]
#[display("the recording is damaged: {moments} moments from {} on are skipped", format_time(*at))]
struct Damage {
    at: u64,
    moments: usize,
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Reads the frame at an offset, and whether its checksum is correct; `None` if the file ends within the frame.
fn next_frame(reader: &mut impl Read, at: u64, size: u64) -> io::Result<Option<(Frame, bool)>> {
    let left = size - at;
    if left < FRAME_HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mut head = [0; FRAME_HEADER_BYTES];
    reader.read_exact(&mut head)?;
    let [crc, flags, length, plain] = [0, 4, 8, 12].map(|at| number(&head, at));
    let at_millis = head.last_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    // A payload is never empty: this is space that was never written.
    if length == 0 || u64::from(length) > left - FRAME_HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mut hash = crc32fast::Hasher::new();
    hash.update(&head[4..]);
    let mut payload = reader.take(u64::from(length));
    let mut piece = [0; 1 << 14];
    loop {
        match payload.read(&mut piece)? {
            0 => break,
            count => hash.update(&piece[..count]),
        }
    }
    let is_whole = hash.finalize() == crc && plain <= MAX_MOMENT_BYTES;
    let header = MomentHeader { at_millis, flags: MomentFlags::from_bits(flags) };
    Ok(Some((Frame { header, offset: at + FRAME_HEADER_BYTES as u64, length, plain }, is_whole)))
}

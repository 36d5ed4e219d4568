//! Reads a recording.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use flate2::{Decompress, FlushDecompress};

use super::{FRAME, HEAD, MAGIC, MOST, Mark, Moment, Sort, VERSION, time};

/// A file cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordingError {
    #[error("{}: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{} is empty: nothing was recorded", .0.display())]
    Empty(PathBuf),
    #[error("{} is no recording; `numaward record` makes one", .0.display())]
    Foreign(PathBuf),
    #[error(
        "{} has version {version} of the format, and this numaward reads up to {VERSION}: \
         replay it with the version of numaward that recorded it", path.display()
    )]
    Newer { path: PathBuf, version: u32 },
    #[error("{} holds nothing: recording ended before the first moment was written", .0.display())]
    Nothing(PathBuf),
    #[error("{}: what was recorded at {at} cannot be read: {reason}; is it of another version?", path.display())]
    Malformed { path: PathBuf, at: String, reason: String },
}

/// A frame in the file.
#[derive(Clone, Copy, Debug)]
struct Frame {
    mark: Mark,
    /// Where its payload is.
    offset: u64,
    length: u32,
    plain: u32,
}

/// A file that is replayed.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    file: File,
    frames: Vec<Frame>,
    /// The moments, at least one.
    pub(crate) marks: Vec<Mark>,
    /// What is torn or damaged.
    pub(crate) warnings: Vec<String>,
    decompress: Decompress,
    /// The moment that the stream of DEFLATE goes on with.
    next: Option<usize>,
}

impl Recording {
    /// Looks through a file: which moments it has, and which are damaged.
    pub(crate) fn open(path: &Path) -> Result<Self, RecordingError> {
        let unreadable = |error| RecordingError::Unreadable { path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut reader = BufReader::with_capacity(1 << 18, file);
        if size == 0 {
            return Err(RecordingError::Empty(path.to_owned()));
        }
        let mut head = [0; HEAD];
        reader.read_exact(&mut head).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => RecordingError::Foreign(path.to_owned()),
            _ => unreadable(error),
        })?;
        let (magic, version) = head.split_at(MAGIC.len());
        let version = number(version, 0);
        if magic != MAGIC || version == 0 {
            return Err(RecordingError::Foreign(path.to_owned()));
        }
        if version > VERSION {
            return Err(RecordingError::Newer { path: path.to_owned(), version });
        }
        let mut frames = Vec::new();
        let mut warnings = Vec::new();
        let mut damage: Option<Damage> = None;
        let mut at = HEAD as u64;
        while at < size {
            let Some((frame, is_whole)) = next(&mut reader, at, size).map_err(unreadable)? else {
                let last: Option<&Frame> = frames.last();
                let until = last.map_or_else(String::new, |last| {
                    format!(": what came after {} is lost", time(last.mark.at_millis))
                });
                warnings.push(format!("the recording breaks off at byte {at}{until}"));
                break;
            };
            at = frame.offset + u64::from(frame.length);
            if is_whole && frame.mark.sort.is_complete {
                warnings.extend(damage.take().map(|damage| damage.to_string()));
            } else if !is_whole || damage.is_some() || frames.is_empty() {
                damage.get_or_insert(Damage { at: frame.mark.at_millis, moments: 0 }).moments += 1;
                continue;
            }
            frames.push(frame);
        }
        warnings.extend(damage.map(|damage| damage.to_string()));
        if frames.is_empty() && warnings.is_empty() {
            return Err(RecordingError::Nothing(path.to_owned()));
        }
        if frames.is_empty() {
            let reason = warnings.join("; ");
            return Err(RecordingError::Unreadable {
                path: path.to_owned(),
                error: io::Error::other(reason),
            });
        }
        let marks = frames.iter().map(|frame| frame.mark).collect();
        let decompress = Decompress::new(false);
        let file = reader.into_inner();
        Ok(Self { path: path.to_owned(), file, frames, marks, warnings, decompress, next: None })
    }

    /// Where the run of a moment begins.
    pub(crate) fn run_of(&self, at: usize) -> usize {
        (0..=at).rev().find(|at| self.frames[*at].mark.sort.is_complete).unwrap_or(0)
    }

    /// Reads a moment. One that follows the one that was read before takes no other to be read.
    pub(crate) fn moment(&mut self, at: usize) -> Result<Moment, RecordingError> {
        if self.next != Some(at) {
            for before in self.run_of(at)..at {
                self.inflate(before)?;
            }
        }
        let plain = self.inflate(at)?;
        self.next = Some(at + 1);
        serde_json::from_slice(&plain).map_err(|error| self.malformed(at, &error.to_string()))
    }

    fn malformed(&self, at: usize, reason: &str) -> RecordingError {
        let at = time(self.frames[at].mark.at_millis);
        RecordingError::Malformed { path: self.path.clone(), at, reason: reason.to_owned() }
    }

    fn inflate(&mut self, at: usize) -> Result<Vec<u8>, RecordingError> {
        self.next = None;
        let Frame { mark, offset, length, plain } = self.frames[at];
        if mark.sort.is_complete {
            self.decompress.reset(false);
        }
        let mut payload = vec![0; length as usize];
        self.file
            .read_exact_at(&mut payload, offset)
            .map_err(|error| RecordingError::Unreadable { path: self.path.clone(), error })?;
        // One byte more than there is: room that is left says that all of it is there.
        let mut text = Vec::with_capacity(plain as usize + 1);
        let done = self.decompress.decompress_vec(&payload, &mut text, FlushDecompress::Sync);
        match done {
            Ok(_) if text.len() == plain as usize => Ok(text),
            Ok(_) => Err(self.malformed(at, &format!("{} bytes of {plain}", text.len()))),
            Err(error) => Err(self.malformed(at, &error.to_string())),
        }
    }
}

/// Moments that cannot be read.
#[derive(derive_more::Display)]
#[display("the recording is damaged: {moments} moments from {} on are skipped", time(*at))]
struct Damage {
    at: u64,
    moments: usize,
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The frame at a place, and whether it is as it was written; none where the file breaks off.
fn next(reader: &mut impl Read, at: u64, size: u64) -> io::Result<Option<(Frame, bool)>> {
    let left = size - at;
    if left < FRAME as u64 {
        return Ok(None);
    }
    let mut head = [0; FRAME];
    reader.read_exact(&mut head)?;
    let [crc, flags, length, plain] = [0, 4, 8, 12].map(|at| number(&head, at));
    let at_millis = head.last_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    // No payload is empty: this is space that was never written.
    if length == 0 || u64::from(length) > left - FRAME as u64 {
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
    let is_whole = hash.finalize() == crc && plain <= MOST;
    let mark = Mark { at_millis, sort: Sort::of(flags) };
    Ok(Some((Frame { mark, offset: at + FRAME as u64, length, plain }, is_whole)))
}

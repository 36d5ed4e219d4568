//! Writer of recordings.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::Context as _;
use flate2::{Compress, Compression, FlushCompress};

use super::{
    FILE_HEADER_BYTES, FRAME_HEADER_BYTES, FRAMES_PER_RUN, MAGIC, MAX_MOMENT_BYTES, Moment, MomentFlags,
    VERSION,
};

/// A recording that is written.
#[derive(Debug)]
pub(crate) struct RecordingWriter {
    file: File,
    compress: Compress,
    /// Number of frames in the current run.
    run: usize,
    /// Number of bytes that were written.
    pub(crate) bytes: u64,
    max_bytes: u64,
}

impl RecordingWriter {
    /// Creates a file, which must not exist, with a maximum size.
    pub(crate) fn create(path: &Path, max_bytes: u64) -> anyhow::Result<Self> {
        // The recording describes the host in detail: only its owner may read it.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let mut file =
            file.with_context(|| format!("{}: the recording cannot be created", path.display()))?;
        file.write_all(&[&MAGIC[..], &VERSION.to_le_bytes()].concat())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        let compress = Compress::new(Compression::default(), false);
        Ok(Self { file, compress, run: 0, bytes: FILE_HEADER_BYTES as u64, max_bytes })
    }

    /// Returns whether the next moment has to be complete.
    pub(crate) fn begins_run(&self) -> bool {
        self.run == 0 || self.run >= FRAMES_PER_RUN
    }

    /// Appends a moment. Returns `false` without writing if the file would exceed its maximum size.
    pub(crate) fn add(
        &mut self,
        at_millis: u64,
        moment: &Moment,
        flags: MomentFlags,
    ) -> anyhow::Result<bool> {
        if flags.is_complete {
            self.compress.reset();
            self.run = 0;
        }
        let plain = serde_json::to_vec(moment)?;
        let mut frame = vec![0; FRAME_HEADER_BYTES];
        self.deflate(&plain, &mut frame)?;
        let too_large = || format!("a moment of {} bytes is too large for a frame", plain.len());
        let length = u32::try_from(frame.len() - FRAME_HEADER_BYTES).with_context(too_large)?;
        let plain = u32::try_from(plain.len())
            .ok()
            .filter(|plain| *plain <= MAX_MOMENT_BYTES)
            .with_context(too_large)?;
        for (at, value) in [(4, flags.to_bits()), (8, length), (12, plain)] {
            frame[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        frame[16..FRAME_HEADER_BYTES].copy_from_slice(&at_millis.to_le_bytes());
        let crc = crc32fast::hash(&frame[4..]);
        frame[..4].copy_from_slice(&crc.to_le_bytes());
        let after = self.bytes + frame.len() as u64;
        if after > self.max_bytes {
            return Ok(false);
        }
        // A single write, so that a concurrent reader sees all of the frame or none of it.
        self.file.write_all(&frame).context("the recording cannot be written")?;
        (self.bytes, self.run) = (after, self.run + 1);
        Ok(true)
    }

    /// Compresses a moment into a frame and flushes the stream, so that the frame can be read without the following
    /// ones.
    fn deflate(&mut self, plain: &[u8], frame: &mut Vec<u8>) -> anyhow::Result<()> {
        let begun = self.compress.total_in();
        loop {
            frame.reserve(plain.len() / 8 + 1024);
            let done = usize::try_from(self.compress.total_in() - begun)?;
            self.compress.compress_vec(&plain[done..], frame, FlushCompress::Sync)?;
            let done = usize::try_from(self.compress.total_in() - begun)?;
            // Spare capacity means that the compressor has no pending output.
            if done == plain.len() && frame.len() < frame.capacity() {
                return Ok(());
            }
        }
    }
}

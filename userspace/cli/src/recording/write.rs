//! Writes a recording.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::Context as _;
use flate2::{Compress, Compression, FlushCompress};

use super::{FRAME, HEAD, MAGIC, MOST, Moment, RUN, Sort, VERSION};

/// A file that is written.
#[derive(Debug)]
pub(crate) struct Writer {
    file: File,
    compress: Compress,
    /// Frames of this run.
    run: usize,
    /// Bytes that were written.
    pub(crate) bytes: u64,
    most: u64,
}

impl Writer {
    /// Begins a file, which must not exist, of so many bytes at most.
    pub(crate) fn create(path: &Path, most: u64) -> anyhow::Result<Self> {
        // It says much of the host: nobody else has to read it.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let mut file = file.with_context(|| format!("{}: the recording cannot be made", path.display()))?;
        file.write_all(&[&MAGIC[..], &VERSION.to_le_bytes()].concat())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        let compress = Compress::new(Compression::default(), false);
        Ok(Self { file, compress, run: 0, bytes: HEAD as u64, most })
    }

    /// Whether the next moment has to be complete.
    pub(crate) fn begins_run(&self) -> bool {
        self.run == 0 || self.run >= RUN
    }

    /// Adds a moment. Not if the file would become too large: then there is nothing more to add.
    pub(crate) fn add(&mut self, at_millis: u64, moment: &Moment, sort: Sort) -> anyhow::Result<bool> {
        if sort.is_complete {
            self.compress.reset();
            self.run = 0;
        }
        let plain = serde_json::to_vec(moment)?;
        let mut frame = vec![0; FRAME];
        self.deflate(&plain, &mut frame)?;
        let too_large = || format!("a moment of {} bytes is too large for a frame", plain.len());
        let length = u32::try_from(frame.len() - FRAME).with_context(too_large)?;
        let plain = u32::try_from(plain.len()).ok().filter(|plain| *plain <= MOST).with_context(too_large)?;
        for (at, value) in [(4, sort.flags()), (8, length), (12, plain)] {
            frame[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        frame[16..FRAME].copy_from_slice(&at_millis.to_le_bytes());
        let crc = crc32fast::hash(&frame[4..]);
        frame[..4].copy_from_slice(&crc.to_le_bytes());
        let after = self.bytes + frame.len() as u64;
        if after > self.most {
            return Ok(false);
        }
        // In one piece: who reads meanwhile sees all of it, or nothing.
        self.file.write_all(&frame).context("the recording cannot be written")?;
        (self.bytes, self.run) = (after, self.run + 1);
        Ok(true)
    }

    /// Compresses into a frame, so that it can be read without what follows.
    fn deflate(&mut self, plain: &[u8], frame: &mut Vec<u8>) -> anyhow::Result<()> {
        let begun = self.compress.total_in();
        loop {
            frame.reserve(plain.len() / 8 + 1024);
            let done = usize::try_from(self.compress.total_in() - begun)?;
            self.compress.compress_vec(&plain[done..], frame, FlushCompress::Sync)?;
            let done = usize::try_from(self.compress.total_in() - begun)?;
            // Room that is left says that nothing waits to be written.
            if done == plain.len() && frame.len() < frame.capacity() {
                return Ok(());
            }
        }
    }
}

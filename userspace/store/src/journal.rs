//! The journal: the last two saves, in preallocated space.
//!
//! It is a file of two slots of the same size. Each contains a text ([`super::envelope`]), followed by a NUL, which no
//! text contains. The space is preallocated by writing zeros: a file system that only marks space as reserved would
//! have to commit metadata at the first write.

use std::{io, path::Path};

use serde::de::DeserializeOwned;

use super::{
    disk::{DiskFile, FileSystem, SyncPoint, missing_as_none},
    envelope::{self, Content},
    error::StoreError,
    fault,
};

/// Zeros that overwrite the beginning of a text to invalidate it.
const INVALID_TEXT: [u8; 512] = [0; 512];

/// The number of bytes of a slot that are read or preallocated at a time.
const CHUNK: usize = 64 << 10;
static ZEROS: [u8; CHUNK] = [0; CHUNK];

/// A journal. Its file is opened for each save: if it was removed, or if something was mounted over it, a save to the
/// old file would be lost.
#[derive(Debug)]
pub(super) struct Journal {
    /// The size of a slot in bytes.
    slot: usize,
    /// The slot of the next save: the one with the older save.
    next: usize,
    /// True if that slot may contain a failed save that is not yet withdrawn.
    is_doubtful: bool,
}

/// The content of the journal's path.
pub(super) enum FoundJournal<T> {
    Missing,
    /// The reason why it is not a usable journal.
    Unusable(String),
    Journal(Journal, [Content<T>; 2]),
}

/// Reads the journal at this path. Its slots must have at least `min_slot` bytes.
pub(super) fn read<T: DeserializeOwned>(
    disk: &dyn FileSystem,
    path: &Path,
    min_slot: usize,
) -> Result<FoundJournal<T>, StoreError> {
    let Some(file) = missing_as_none(disk.open(path)).map_err(StoreError::io(path, "open it"))? else {
        return Ok(FoundJournal::Missing);
    };
    let slots = || {
        let all = file.len()?;
        let first = all / 2;
        Ok((all, [slot_text(&*file, 0, first)?, slot_text(&*file, first, all - first)?]))
    };
    let (all, [first, second]) = slots().map_err(StoreError::io(path, "read it"))?;
    let slots = [decode_slot(first, path)?, decode_slot(second, path)?];
    let size = usize::try_from(all / 2).unwrap_or(usize::MAX);
    if all % 2 != 0 || size < min_slot {
        return Ok(FoundJournal::Unusable(format!("its {all} bytes are not two slots")));
    }
    // The next save must overwrite damaged data: it could not be recognized as the last save as long as the damaged
    // data remained.
    let next = match &slots {
        [Content::Damaged { reason, .. }, Content::Damaged { .. }] => {
            return Ok(FoundJournal::Unusable(format!("both slots are damaged, the first one: {reason}")));
        }
        [Content::Missing, Content::Damaged { .. }] => 1,
        [first, second] => usize::from(first.generation() > second.generation()),
    };
    Ok(FoundJournal::Journal(Journal { slot: size, next, is_doubtful: false }, slots))
}

/// Reads the text of a slot, which ends at the first NUL. A slot may be much larger than its text: only the chunks of
/// the text are read.
fn slot_text(file: &dyn DiskFile, mut at: u64, mut left: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    while left > 0 {
        let size = left.min(CHUNK as u64);
        let chunk = file.read_at(at, usize::try_from(size).unwrap_or(CHUNK))?;
        if let Some(end) = chunk.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(chunk.get(..end).unwrap_or_default());
            break;
        }
        text.extend_from_slice(&chunk);
        (at, left) = (at + size, left - size);
    }
    Ok(text)
}

/// Decodes the text of a slot.
fn decode_slot<T: DeserializeOwned>(text: Vec<u8>, path: &Path) -> Result<Content<T>, StoreError> {
    if text.is_empty() { Ok(Content::Missing) } else { envelope::decode(text, path) }
}

impl Journal {
    /// Creates a journal that contains `saved`, the last saved text, and has room for a text of `room` bytes. It
    /// replaces an existing journal. Its name is not durable yet.
    pub(super) fn create(
        disk: &dyn FileSystem,
        [path, new]: [&Path; 2],
        saved: &[u8],
        room: usize,
        min_slot: usize,
    ) -> Result<Self, StoreError> {
        let slot = (2 * saved.len().max(room)).next_power_of_two().max(min_slot);
        missing_as_none(disk.remove(new)).map_err(StoreError::io(new, LEFTOVER))?;
        let file = disk.create(new).map_err(StoreError::io(new, "create it"))?;
        fault::point("journal.created");
        let reserve = || {
            file.write_at(0, saved)?;
            for at in (saved.len()..2 * slot).step_by(CHUNK) {
                file.write_at(at as u64, ZEROS.get(..2 * slot - at).unwrap_or(&ZEROS))?;
            }
            file.sync(SyncPoint::NewJournal)
        };
        reserve().map_err(StoreError::io(new, "write it"))?;
        fault::point("journal.synced");
        disk.rename(new, path).map_err(StoreError::io(path, "replace it"))?;
        fault::point("journal.renamed");
        Ok(Self { slot, next: usize::from(!saved.is_empty()), is_doubtful: false })
    }

    /// Opens the file if it exists and has room for this text.
    pub(super) fn open(
        &self,
        disk: &dyn FileSystem,
        path: &Path,
        text: &[u8],
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        let Some(file) = missing_as_none(disk.open(path))? else { return Ok(None) };
        let has_room = text.len() < self.slot && file.len()? == 2 * self.slot as u64;
        Ok(has_room.then_some(file))
    }

    /// Overwrites the older text, which must be older than save `last`, by this one. On return, the text is durable; on
    /// an error, it is not found by the next start.
    pub(super) fn write(&mut self, file: &dyn DiskFile, text: &[u8], last: u64) -> io::Result<()> {
        if self.is_doubtful {
            self.withdraw(file)?;
        }
        self.check_older(file, last)?;
        let written = self.overwrite(file, text);
        match written {
            Ok(()) => self.next ^= 1,
            Err(_) => self.is_doubtful = self.withdraw(file).is_err(),
        }
        written
    }

    /// Refuses to overwrite a save that is newer than `last`: another process saves here, or the file was replaced.
    fn check_older(&self, file: &dyn DiskFile, last: u64) -> io::Result<()> {
        let begins = file.read_at(self.offset(0), INVALID_TEXT.len().min(self.slot))?;
        if envelope::claimed_generation(&begins).is_none_or(|claimed| claimed <= last) {
            return Ok(());
        }
        match envelope::intact_generation(&slot_text(file, self.offset(0), self.slot as u64)?) {
            Some(found) if found > last => Err(io::Error::other(format!(
                "it contains save {found}, but this process last saved {last}: another process writes to this file, or it was \
                 replaced; restart the daemon"
            ))),
            // A crash interrupted this save.
            _ => Ok(()),
        }
    }

    fn overwrite(&self, file: &dyn DiskFile, text: &[u8]) -> io::Result<()> {
        let (first, second) = text.split_at(text.len() / 2);
        file.write_at(self.offset(0), first)?;
        fault::point("ledger.half-written");
        file.write_at(self.offset(first.len()), second)?;
        file.write_at(self.offset(text.len()), &[0])?;
        fault::point("ledger.written");
        file.sync(SyncPoint::Save)
    }

    fn withdraw(&self, file: &dyn DiskFile) -> io::Result<()> {
        file.write_at(self.offset(0), &INVALID_TEXT)?;
        file.sync(SyncPoint::Withdrawal)
    }

    fn offset(&self, within: usize) -> u64 {
        (self.next * self.slot + within) as u64
    }
}

/// The failed operation if an unfinished file of an earlier save cannot be removed.
pub(super) const LEFTOVER: &str = "remove the rest of a save that failed";

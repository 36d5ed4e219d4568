//! The journal: the last two saves, in space that was reserved for them.
//!
//! A file of two slots of the same size. In each is a text ([`super::envelope`]) and after it a NUL, which no text
//! contains. What was reserved is written, with zeros: a file system that only notes space as reserved has to commit
//! that it is in use at the first write.

use std::{io, path::Path};

use serde::de::DeserializeOwned;

use super::{
    disk::{Disk, DiskFile, SyncPoint, unless_missing},
    envelope::{self, Content},
    error::StoreError,
    fault,
};

/// What is written over the beginning of a text to make it none.
const NOTHING: [u8; 512] = [0; 512];

/// Bytes of a slot that are read or reserved at a time.
const PIECE: usize = 64 << 10;
/// What a slot is reserved with.
static NO_TEXT: [u8; PIECE] = [0; PIECE];

/// A journal, which is opened for each save: one that was removed, or over which something was mounted, would take what
/// nobody finds again.
#[derive(Debug)]
pub(super) struct Journal {
    /// How large a slot is, in bytes.
    slot: usize,
    /// The slot that is written next: the older one.
    next: usize,
    /// Whether a save that failed may still be found there.
    is_doubtful: bool,
}

/// What is found where the journal is.
pub(super) enum Found<T> {
    Missing,
    /// Why it cannot be one.
    Unusable(String),
    Journal(Journal, [Content<T>; 2]),
}

/// Reads the journal at this path, whose slots have at least so many bytes.
pub(super) fn read<T: DeserializeOwned>(
    disk: &dyn Disk,
    path: &Path,
    least: usize,
) -> Result<Found<T>, StoreError> {
    let Some(file) = unless_missing(disk.open(path)).map_err(StoreError::io(path, "open it"))? else {
        return Ok(Found::Missing);
    };
    let slots = || {
        let all = file.len()?;
        let first = all / 2;
        Ok((all, [text(&*file, 0, first)?, text(&*file, first, all - first)?]))
    };
    let (all, [first, second]) = slots().map_err(StoreError::io(path, "read it"))?;
    let slots = [slot(first, path)?, slot(second, path)?];
    let size = usize::try_from(all / 2).unwrap_or(usize::MAX);
    if all % 2 != 0 || size < least {
        return Ok(Found::Unusable(format!("{all} bytes are not two slots")));
    }
    // Were something damaged still there after the next save, that save could not be taken for the last one.
    let next = match &slots {
        [Content::Damaged { reason, .. }, Content::Damaged { .. }] => {
            return Ok(Found::Unusable(format!("both slots are damaged, the first one: {reason}")));
        }
        [Content::Missing, Content::Damaged { .. }] => 1,
        [first, second] => usize::from(first.generation() > second.generation()),
    };
    Ok(Found::Journal(Journal { slot: size, next, is_doubtful: false }, slots))
}

/// The text in a slot of so many bytes, without what is left of a longer one. A slot may be much larger than what is in it: no more is
/// read than the text and the rest of a piece.
fn text(file: &dyn DiskFile, mut at: u64, mut left: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    while left > 0 {
        let size = left.min(PIECE as u64);
        let piece = file.read_at(at, usize::try_from(size).unwrap_or(PIECE))?;
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(piece.get(..end).unwrap_or_default());
            break;
        }
        text.extend_from_slice(&piece);
        (at, left) = (at + size, left - size);
    }
    Ok(text)
}

/// What is in a slot with this text.
fn slot<T: DeserializeOwned>(text: Vec<u8>, path: &Path) -> Result<Content<T>, StoreError> {
    if text.is_empty() { Ok(Content::Missing) } else { envelope::open(text, path) }
}

impl Journal {
    /// Makes a journal that holds this text, the last one that was saved, and has room for a new one of so many bytes, in
    /// place of the one that is there. Its name is not durable yet.
    pub(super) fn create(
        disk: &dyn Disk,
        [path, new]: [&Path; 2],
        saved: &[u8],
        room: usize,
        least: usize,
    ) -> Result<Self, StoreError> {
        let slot = (2 * saved.len().max(room)).next_power_of_two().max(least);
        unless_missing(disk.remove(new)).map_err(StoreError::io(new, LEFTOVER))?;
        let file = disk.create(new).map_err(StoreError::io(new, "create it"))?;
        fault::point("journal.created");
        let reserve = || {
            file.write_at(0, saved)?;
            for at in (saved.len()..2 * slot).step_by(PIECE) {
                file.write_at(at as u64, NO_TEXT.get(..2 * slot - at).unwrap_or(&NO_TEXT))?;
            }
            file.sync(SyncPoint::NewJournal)
        };
        reserve().map_err(StoreError::io(new, "write it"))?;
        fault::point("journal.synced");
        disk.rename(new, path).map_err(StoreError::io(path, "replace it"))?;
        fault::point("journal.renamed");
        Ok(Self { slot, next: usize::from(!saved.is_empty()), is_doubtful: false })
    }

    /// Opens it, if it is there and has room for this.
    pub(super) fn open(
        &self,
        disk: &dyn Disk,
        path: &Path,
        text: &[u8],
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        let Some(file) = unless_missing(disk.open(path))? else { return Ok(None) };
        let has_room = text.len() < self.slot && file.len()? == 2 * self.slot as u64;
        Ok(has_room.then_some(file))
    }

    /// Puts this text in the place of the older one, which is older than save `last`. When this returns, it is durable; if
    /// it fails, no start finds it.
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

    /// Nothing that is newer than what we know is written over: somebody else saves here, or put another journal there.
    fn check_older(&self, file: &dyn DiskFile, last: u64) -> io::Result<()> {
        let begins = file.read_at(self.offset(0), NOTHING.len().min(self.slot))?;
        if envelope::claimed(&begins).is_none_or(|claimed| claimed <= last) {
            return Ok(());
        }
        match envelope::whole(&text(file, self.offset(0), self.slot as u64)?) {
            Some(found) if found > last => Err(io::Error::other(format!(
                "save {found} is there and {last} was the last one here: another process writes to this file, or it was \
                 replaced; restart the daemon"
            ))),
            // What a crash cut off.
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
        file.write_at(self.offset(0), &NOTHING)?;
        file.sync(SyncPoint::Withdrawal)
    }

    fn offset(&self, within: usize) -> u64 {
        (self.next * self.slot + within) as u64
    }
}

/// What cannot be done where the rest of a save that was not finished is in the way.
pub(super) const LEFTOVER: &str = "remove the rest of a save that failed";

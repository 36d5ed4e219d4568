//! The journal: the last two saves, in space that was reserved for them.
//!
//! A file of two slots of the same size. In each is a text ([`super::envelope`]) and after it a NUL, which no text
//! contains. What was reserved is written, with zeros: a file system that only notes space as reserved has to commit
//! that it is in use at the first write.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use serde::de::DeserializeOwned;

use super::{
    envelope::{self, Content, Whole},
    error::StoreError,
    fault,
};

/// How large a slot is at least: enough for more than a thousand workloads.
const SLOT: usize = 1 << 20;

/// A journal, which is opened for each save: one that was removed, or over which something was mounted, would take what
/// nobody finds again.
#[derive(Debug)]
pub(super) struct Journal {
    /// How large a slot is, in bytes.
    slot: usize,
    /// The slot that is written next: the older one.
    next: usize,
}

/// What is in a slot.
pub(super) struct Slot<T> {
    /// Without what is left of a longer one.
    pub(super) text: Vec<u8>,
    pub(super) content: Content<T>,
}

/// What is found where the journal is.
pub(super) enum Found<T> {
    Missing,
    /// Why it cannot be one.
    Unusable(String),
    Journal(Journal, [Slot<T>; 2]),
}

/// Reads the journal at this path.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<Found<T>, StoreError> {
    let all = match fs::read(path) {
        Ok(all) => all,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Missing),
        Err(error) => return Err(StoreError::io(path, "read it")(error)),
    };
    let (first, second) = all.split_at(all.len() / 2);
    let slots = [slot(first, path)?, slot(second, path)?];
    let size = second.len();
    if first.len() != size || size < SLOT {
        return Ok(Found::Unusable(format!("{} bytes are not two slots", all.len())));
    }
    let [first, second] = slots.each_ref().map(Slot::generation);
    Ok(Found::Journal(Journal { slot: size, next: usize::from(first > second) }, slots))
}

fn slot<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<Slot<T>, StoreError> {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let content = if text.is_empty() { Content::Missing } else { envelope::open(text, path)? };
    Ok(Slot { text: text.to_owned(), content })
}

impl<T> Slot<T> {
    /// Which save it holds, if it is whole.
    pub(super) fn generation(&self) -> Option<u64> {
        match &self.content {
            Content::Whole(Whole { generation, .. }) => Some(*generation),
            _ => None,
        }
    }
}

impl Journal {
    /// Makes a journal that holds this text and has room for longer ones, in place of the one that is there.
    pub(super) fn create(path: &Path, new: &Path, text: &[u8]) -> Result<Self, StoreError> {
        let slot = (2 * text.len()).next_power_of_two().max(SLOT);
        let mut file = create_new(new)?;
        fault::point("journal.created");
        let mut reserve = || {
            file.write_all(text)?;
            io::copy(&mut io::repeat(0).take((2 * slot - text.len()) as u64), &mut file)?;
            file.sync_all()
        };
        reserve().map_err(StoreError::io(new, "write it"))?;
        fault::point("journal.synced");
        fs::rename(new, path).map_err(StoreError::io(path, "replace it"))?;
        fault::point("journal.renamed");
        Ok(Self { slot, next: 1 })
    }

    /// Whether it is there, with room for this.
    pub(super) fn has_room(&self, path: &Path, text: &[u8]) -> bool {
        text.len() < self.slot && fs::metadata(path).is_ok_and(|file| file.len() == 2 * self.slot as u64)
    }

    /// Puts this text in the place of the older one. When this returns, it is durable.
    pub(super) fn write(&mut self, path: &Path, text: &[u8]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        let written = self.overwrite(&file, text);
        match written {
            Ok(()) => self.next ^= 1,
            // What failed must not be found by the next start.
            Err(_) => drop(file.write_all_at(&[0], self.offset(0))),
        }
        written
    }

    fn overwrite(&self, file: &File, text: &[u8]) -> io::Result<()> {
        let (first, second) = text.split_at(text.len() / 2);
        file.write_all_at(first, self.offset(0))?;
        fault::point("ledger.half-written");
        file.write_all_at(second, self.offset(first.len()))?;
        file.write_all_at(&[0], self.offset(text.len()))?;
        fault::point("ledger.written");
        file.sync_data()
    }

    fn offset(&self, within: usize) -> u64 {
        (self.next * self.slot + within) as u64
    }
}

/// Makes a file that only we can read. What is left of one that was not finished goes.
pub(super) fn create_new(path: &Path) -> Result<File, StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(StoreError::io(path, "remove the rest of a save that failed")(error));
        }
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(StoreError::io(path, "create it"))
}

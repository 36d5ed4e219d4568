//! The files of a ledger's directory, opened, saved and written out.

use std::{
    io,
    marker::PhantomData,
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    disk::{Disk, DiskFile, HostDisk, Lock, SyncPoint, unless_missing},
    envelope::{self, Content, MOST_SAVES, Whole},
    error::StoreError,
    fault,
    journal::{self, Found, Journal, LEFTOVER},
};

const CURRENT: &str = "ledger.json";
const PREVIOUS: &str = "ledger.json.1";
const NEW: &str = "ledger.json.new";
const JOURNAL: &str = "ledger.journal";
const NEW_JOURNAL: &str = "ledger.journal.new";
const DAMAGED: &str = "ledger.json.damaged-";
const LOCK: &str = "ledger.lock";
/// Of a file of the first version, which had no journal.
const FIRST_VERSION: u64 = 0;

/// How large a slot of the journal is at least: enough for more than a thousand workloads.
const SLOT: usize = 1 << 20;

/// An open ledger store. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Store<T> {
    disk: Box<dyn Disk>,
    dir: PathBuf,
    /// How large a slot of the journal is at least.
    least_slot: usize,
    /// Absent until the first save.
    journal: Option<Journal>,
    /// Of the last save.
    generation: u64,
    /// The last save. Empty if there was none.
    last: Vec<u8>,
    /// Whether `ledger.json` is behind it.
    is_behind: bool,
    /// The kernel unlocks it however the process ends.
    _lock: Lock,
    holds: PhantomData<fn(&T)>,
}

/// What a store held when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadedLedger<T> {
    /// Nothing: it is new.
    Fresh,
    /// The last ledger that was saved.
    Current {
        /// The ledger.
        ledger: T,
        /// What was set aside, without which nothing is missing.
        set_aside: Vec<SetAsideFile>,
    },
    /// One before the last, as the last is damaged or missing. What was promised since is to be learnt from live
    /// cgroups.
    Previous {
        /// The ledger.
        ledger: T,
        /// What was set aside.
        set_aside: Vec<SetAsideFile>,
    },
    /// Nothing that can be read. All that is promised is to be learnt from live cgroups.
    Rebuild {
        /// What was set aside, now or earlier.
        set_aside: Vec<SetAsideFile>,
    },
}

impl<T> LoadedLedger<T> {
    /// The ledger, if there is one that can be read.
    pub fn ledger(self) -> Option<T> {
        match self {
            Self::Current { ledger, .. } | Self::Previous { ledger, .. } => Some(ledger),
            Self::Fresh | Self::Rebuild { .. } => None,
        }
    }
}

/// A damaged file that was kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAsideFile {
    /// Where it is now.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What the journal holds.
struct Saved<T> {
    /// The last save that is whole.
    last: Option<Whole<T>>,
    /// Whether none can have been saved since, here or in `ledger.json`.
    is_certain: bool,
}

impl<T: Serialize + DeserializeOwned> Store<T> {
    /// Opens the store in this directory, which is made if it is not there, and reads what it holds. Damaged
    /// files are set aside.
    pub fn open(dir: &Path) -> Result<(Self, LoadedLedger<T>), StoreError> {
        Self::open_on(Box::new(HostDisk), dir, SLOT)
    }

    /// The same, with a journal so small that a test can fill it.
    #[cfg(feature = "testing")]
    pub fn open_small(dir: &Path) -> Result<(Self, LoadedLedger<T>), StoreError> {
        Self::open_on(Box::new(HostDisk), dir, 1 << 10)
    }

    /// The same on this disk, with a journal whose slots have at least so many bytes.
    pub(super) fn open_on(
        disk: Box<dyn Disk>,
        dir: &Path,
        least_slot: usize,
    ) -> Result<(Self, LoadedLedger<T>), StoreError> {
        make_dirs(&*disk, dir)?;
        let lock = disk.lock(&dir.join(LOCK))?;
        let mut store = Self {
            disk,
            dir: dir.to_owned(),
            least_slot,
            journal: None,
            generation: 0,
            last: Vec::new(),
            is_behind: false,
            _lock: lock,
            holds: PhantomData,
        };
        let disk = &*store.disk;
        // All are looked at before anything is touched: one may be of a newer version.
        let current = envelope::read(disk, &dir.join(CURRENT))?;
        let previous = envelope::read(disk, &dir.join(PREVIOUS))?;
        let journal = journal::read(disk, &dir.join(JOURNAL), least_slot)?;

        for unfinished in [NEW, NEW_JOURNAL] {
            // What is still there is in the way of the next one, which says so.
            let _ = disk.remove(&dir.join(unfinished));
        }
        store.sync_found(&journal)?;
        let mut set_aside = Vec::new();
        let current = store.whole(CURRENT, current, &mut set_aside)?;
        let previous = store.whole(PREVIOUS, previous, &mut set_aside)?;
        let written_out = current.as_ref().map(|current| current.generation);
        let Saved { last, is_certain } = match journal {
            Found::Missing => Saved { last: None, is_certain: written_out == Some(FIRST_VERSION) },
            Found::Unusable(reason) => {
                set_aside.push(store.set_aside(JOURNAL, &reason)?);
                Saved { last: None, is_certain: false }
            }
            Found::Journal(journal, slots) => {
                store.journal = Some(journal);
                store.saved(slots, written_out, &mut set_aside)?
            }
        };
        let (last, is_certain) = match last {
            Some(last) if Some(last.generation) >= written_out => {
                store.is_behind = Some(last.generation) > written_out;
                (Some(last), is_certain)
            }
            _ => match current {
                Some(current) => (Some(current), is_certain),
                None => (previous, false),
            },
        };
        let last = last.map(|Whole { generation, ledger, text }| {
            (store.generation, store.last) = (generation, text);
            ledger
        });
        let loaded = match last {
            Some(ledger) if is_certain => LoadedLedger::Current { ledger, set_aside },
            Some(ledger) => LoadedLedger::Previous { ledger, set_aside },
            None => {
                // Of an earlier start that ended before the first save.
                set_aside.extend(store.set_aside_earlier(&set_aside)?);
                if set_aside.is_empty() { LoadedLedger::Fresh } else { LoadedLedger::Rebuild { set_aside } }
            }
        };
        Ok((store, loaded))
    }

    /// What an earlier process left, and may not have made durable before it was killed, is built upon from now on.
    fn sync_found(&self, journal: &Found<T>) -> Result<(), StoreError> {
        if matches!(journal, Found::Missing) {
            // Nor may the directory be.
            return self.dir.ancestors().skip(1).try_for_each(|above| sync_above(&*self.disk, above));
        }
        let path = self.dir.join(JOURNAL);
        let synced = self.disk.open(&path).and_then(|file| file.sync(SyncPoint::Found));
        synced.map_err(StoreError::io(&path, "make durable what was found in it"))?;
        self.sync_dir(SyncPoint::FoundNames)
    }

    /// The last save that is in the journal. What is damaged there is kept elsewhere, as it will be written over.
    fn saved(
        &self,
        slots: [Content<T>; 2],
        written_out: Option<u64>,
        set_aside: &mut Vec<SetAsideFile>,
    ) -> Result<Saved<T>, StoreError> {
        let newest = slots.iter().map(Content::generation).max().flatten();
        let known = newest.max(written_out);
        let mut saved = Saved { last: None, is_certain: newest.is_some() };
        for content in slots {
            let (text, reason) = match content {
                Content::Whole(whole) => {
                    if Some(whole.generation) == newest {
                        saved.last = Some(whole);
                    }
                    continue;
                }
                Content::Missing => continue,
                Content::Damaged { text, reason } => (text, reason),
            };
            let claimed = envelope::claimed(&text);
            if claimed == Some(known.unwrap_or(0) + 1) {
                tracing::info!("a save was cut off by a crash: nothing had been done for it");
                continue;
            }
            let path = self.free_name()?;
            let kept = self.disk.create(&path).and_then(|file| {
                file.write_at(0, &text)?;
                file.sync(SyncPoint::SetAside)
            });
            kept.map_err(StoreError::io(&path, "keep there what is damaged"))?;
            self.sync_dir(SyncPoint::SetAsideName)?;
            set_aside.push(SetAsideFile { path, reason });
            // Unless it says that it is an older one, it may have been the last.
            saved.is_certain &= claimed.is_some_and(|claimed| Some(claimed) <= known);
        }
        Ok(saved)
    }

    /// Saves a ledger. When this returns, it is durable; if it fails, the one before still is.
    pub fn save(&mut self, ledger: &T) -> Result<(), StoreError> {
        self.save_text(&serde_json::value::to_raw_value(ledger).map_err(StoreError::Serialize)?)
    }

    /// Saves a ledger that is in words already.
    pub fn save_text(&mut self, ledger: &RawValue) -> Result<(), StoreError> {
        let path = self.dir.join(JOURNAL);
        if self.generation >= MOST_SAVES {
            return Err(StoreError::GenerationsExhausted { path, last: self.generation });
        }
        let generation = self.generation + 1;
        let text = envelope::seal(generation, ledger).map_err(StoreError::Serialize)?;
        let (mut journal, file) = self.with_room(&path, &text)?;
        let written = journal.write(&*file, &text, self.generation);
        self.journal = Some(journal);
        written.map_err(StoreError::io(&path, "write it"))?;
        (self.generation, self.last, self.is_behind) = (generation, text, true);
        fault::point("ledger.saved");
        Ok(())
    }

    /// The journal, made anew if it has no room for this text. It holds the last save and no other until then.
    fn with_room(&mut self, path: &Path, text: &[u8]) -> Result<(Journal, Box<dyn DiskFile>), StoreError> {
        let disk = &*self.disk;
        if let Some(journal) = &self.journal
            && let Some(file) = journal.open(disk, path, text).map_err(StoreError::io(path, "open it"))?
            && let Some(journal) = self.journal.take()
        {
            return Ok((journal, file));
        }
        let new = self.dir.join(NEW_JOURNAL);
        let made = Journal::create(disk, [path, &new], &self.last, text.len(), self.least_slot);
        let made = made.inspect_err(|_| {
            // It takes space that may be what is missing. If it stays, the next save replaces it.
            let _ = disk.remove(&new);
        })?;
        // The old one is no longer there.
        self.journal = None;
        self.sync_dir(SyncPoint::JournalName)?;
        let file = disk.open(path).map_err(StoreError::io(path, "open it"))?;
        Ok((made, file))
    }

    /// The number of the last save, if `ledger.json` is not what was saved with it.
    pub fn pending_write_out(&self) -> Option<u64> {
        self.is_behind.then_some(self.generation)
    }

    /// Writes the last save to `ledger.json`, for anybody who reads that, and for a journal that gets damaged. If it
    /// fails, nothing is lost.
    pub fn write_out(&mut self) -> Result<(), StoreError> {
        if !self.is_behind {
            return Ok(());
        }
        let new = self.dir.join(NEW);
        self.write_new(&new).and_then(|()| self.put_in_place(&new)).inspect_err(|_| {
            // Half a file takes space that may be what is missing. If it stays, the next one replaces it.
            let _ = self.disk.remove(&new);
        })?;
        self.is_behind = false;
        Ok(())
    }

    fn write_new(&self, new: &Path) -> Result<(), StoreError> {
        unless_missing(self.disk.remove(new)).map_err(StoreError::io(new, LEFTOVER))?;
        let file = self.disk.create(new).map_err(StoreError::io(new, "create it"))?;
        fault::point("file.created");
        file.write_at(0, &self.last).map_err(StoreError::io(new, "write it"))?;
        file.sync(SyncPoint::WrittenOut).map_err(StoreError::io(new, "sync it"))?;
        fault::point("file.synced");
        Ok(())
    }

    fn put_in_place(&self, new: &Path) -> Result<(), StoreError> {
        let (current, previous) = (self.dir.join(CURRENT), self.dir.join(PREVIOUS));
        unless_missing(self.disk.remove(&previous)).map_err(StoreError::io(&previous, "replace it"))?;
        fault::point("file.older-removed");
        unless_missing(self.disk.link(&current, &previous))
            .map_err(StoreError::io(&previous, "keep the previous ledger under this name"))?;
        fault::point("file.previous-kept");
        self.disk.rename(new, &current).map_err(StoreError::io(&current, "replace it"))?;
        fault::point("file.renamed");
        self.sync_dir(SyncPoint::WrittenOutName)
    }

    fn sync_dir(&self, why: SyncPoint) -> Result<(), StoreError> {
        sync_dir(&*self.disk, &self.dir, why)
    }

    /// What a file holds, if it is whole. A damaged one is set aside.
    fn whole(
        &self,
        name: &str,
        content: Content<T>,
        set_aside: &mut Vec<SetAsideFile>,
    ) -> Result<Option<Whole<T>>, StoreError> {
        match content {
            Content::Missing => Ok(None),
            Content::Whole(whole) => Ok(Some(whole)),
            Content::Damaged { reason, .. } => {
                set_aside.push(self.set_aside(name, &reason)?);
                Ok(None)
            }
        }
    }

    /// Keeps a damaged file under another name.
    fn set_aside(&self, name: &str, reason: &str) -> Result<SetAsideFile, StoreError> {
        let (from, path) = (self.dir.join(name), self.free_name()?);
        self.disk.rename(&from, &path).map_err(StoreError::io(&from, "set it aside"))?;
        self.sync_dir(SyncPoint::SetAsideName)?;
        Ok(SetAsideFile { path, reason: reason.to_owned() })
    }

    /// The first name for what is damaged that is free. The lock keeps others from taking it meanwhile.
    fn free_name(&self) -> Result<PathBuf, StoreError> {
        let taken = self.list()?;
        let named = (1..).map(|number: u64| self.dir.join(format!("{DAMAGED}{number}")));
        Ok(named.into_iter().find(|name| !taken.contains(name)).unwrap_or_default())
    }

    /// Files that were set aside before these.
    fn set_aside_earlier(&self, now: &[SetAsideFile]) -> Result<Vec<SetAsideFile>, StoreError> {
        let is_damaged =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DAMAGED));
        let is_earlier = |path: &PathBuf| is_damaged(path) && now.iter().all(|aside| aside.path != *path);
        let mut earlier: Vec<_> = self.list()?.into_iter().filter(is_earlier).collect();
        earlier.sort();
        let reason = "set aside at an earlier start";
        Ok(earlier.into_iter().map(|path| SetAsideFile { path, reason: reason.to_owned() }).collect())
    }

    fn list(&self) -> Result<Vec<PathBuf>, StoreError> {
        self.disk.list(&self.dir).map_err(StoreError::io(&self.dir, "list it"))
    }
}

/// Makes a directory and those above it, as far as they are not there.
fn make_dirs(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
    match (disk.make_dir(dir), dir.parent()) {
        (Ok(()), _) => Ok(()),
        (Err(error), Some(above)) if error.kind() == io::ErrorKind::NotFound => {
            make_dirs(disk, above)?;
            disk.make_dir(dir).map_err(StoreError::io(dir, "create it"))
        }
        (Err(error), _) => Err(StoreError::io(dir, "create it")(error)),
    }
}

/// Makes the names in a directory above durable, unless its file system is read-only or cannot sync directories. If the
/// store's directory is on such a file system, the sync of the store's own names reports it.
fn sync_above(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
    match sync_dir(disk, dir, SyncPoint::Directory) {
        Err(StoreError::Io { source, .. }) if is_without_sync(&source) => Ok(()),
        synced => synced,
    }
}

fn is_without_sync(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, ReadOnlyFilesystem, Unsupported};
    matches!(error.kind(), InvalidInput | ReadOnlyFilesystem | Unsupported)
}

fn sync_dir(disk: &dyn Disk, dir: &Path, why: SyncPoint) -> Result<(), StoreError> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    disk.sync_dir(dir, why).map_err(StoreError::io(dir, "sync it"))
}

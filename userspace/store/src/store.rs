//! Opens, saves and writes out the files of a ledger's directory.

use std::{
    io,
    marker::PhantomData,
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    disk::{DiskFile, FileSystem, HostFileSystem, Lock, SyncPoint, missing_as_none},
    envelope::{self, Content, IntactLedger, MAX_GENERATION},
    error::StoreError,
    fault,
    journal::{self, FoundJournal, Journal, LEFTOVER},
};

/// The ledger, for readers of the file and as a fallback for a damaged journal. The journal may contain a newer one.
const CURRENT_FILE: &str = "ledger.json";
/// The ledger that was in [`CURRENT_FILE`] before.
const PREVIOUS_FILE: &str = "ledger.json.1";
/// The next content of [`CURRENT_FILE`], renamed as soon as it is durable.
const NEW_FILE: &str = "ledger.json.new";
const JOURNAL_FILE: &str = "ledger.journal";
const NEW_JOURNAL_FILE: &str = "ledger.journal.new";
/// The name of a damaged file that was set aside; a number follows.
const DAMAGED_FILE_PREFIX: &str = "ledger.json.damaged-";
const LOCK_FILE: &str = "ledger.lock";
/// Mode of a new directory of a store.
const PRIVATE_MODE: u32 = 0o700;
/// Mode of its missing ancestors, which other programs may use.
const PARENT_MODE: u32 = 0o755;
/// The generation of files of the first version, which had no journal.
const FIRST_VERSION_GENERATION: u64 = 0;

/// The minimum size of the journal's slots: enough for more than a thousand workloads.
const MIN_SLOT_SIZE: usize = 1 << 20;

/// An open ledger store. Other processes cannot open it meanwhile.
#[derive(Debug)]
pub struct Store<T> {
    disk: Box<dyn FileSystem>,
    dir: PathBuf,
    /// The minimum size of the journal's slots.
    min_slot: usize,
    /// `None` until the first save.
    journal: Option<Journal>,
    /// The generation of the last save.
    generation: u64,
    /// The text of the last save; empty if there was none.
    last_text: Vec<u8>,
    /// True if `ledger.json` is older than the last save.
    is_behind: bool,
    /// The kernel releases it when the process ends.
    _lock: Lock,
    ledger_type: PhantomData<fn(&T)>,
}

/// The result of opening a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadedLedger<T> {
    /// The store is new.
    Fresh,
    /// The last saved ledger.
    Current {
        ledger: T,
        /// Damaged files that were set aside. They contain nothing newer than the ledger.
        set_aside: Vec<SetAsideFile>,
    },
    /// A ledger that may be older than the last one, which is damaged or missing. Newer guarantees have to be recovered
    /// from live cgroups.
    Previous {
        ledger: T,
        /// Damaged files that were set aside.
        set_aside: Vec<SetAsideFile>,
    },
    /// There is no readable ledger. All guarantees have to be recovered from live cgroups.
    Rebuild {
        /// Damaged files that were set aside now or earlier.
        set_aside: Vec<SetAsideFile>,
    },
}

impl<T> LoadedLedger<T> {
    /// Returns the ledger, if there is a readable one.
    pub fn ledger(self) -> Option<T> {
        match self {
            Self::Current { ledger, .. } | Self::Previous { ledger, .. } => Some(ledger),
            Self::Fresh | Self::Rebuild { .. } => None,
        }
    }
}

/// A damaged file that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAsideFile {
    /// The new path.
    pub path: PathBuf,
    /// The kind of damage.
    pub reason: String,
}

/// The saves found in the journal.
struct JournalSaves<T> {
    /// The last intact save.
    last: Option<IntactLedger<T>>,
    /// True if there cannot have been a later save, here or in `ledger.json`.
    is_certain: bool,
}

impl<T: Serialize + DeserializeOwned> Store<T> {
    /// Opens the store in this directory, which is created if it is missing, and reads the ledger. Damaged files are
    /// set aside.
    pub fn open(dir: &Path) -> Result<(Self, LoadedLedger<T>), StoreError> {
        Self::open_on(Box::new(HostFileSystem), dir, MIN_SLOT_SIZE)
    }

    /// Opens the store with a journal so small that a test can fill it.
    #[cfg(feature = "testing")]
    pub fn open_small(dir: &Path) -> Result<(Self, LoadedLedger<T>), StoreError> {
        Self::open_on(Box::new(HostFileSystem), dir, 1 << 10)
    }

    /// Opens the store on this file system, with a journal that has slots of at least `min_slot` bytes.
    pub(super) fn open_on(
        disk: Box<dyn FileSystem>,
        dir: &Path,
        min_slot: usize,
    ) -> Result<(Self, LoadedLedger<T>), StoreError> {
        make_dirs(&*disk, dir, PRIVATE_MODE)?;
        let lock = disk.lock(&dir.join(LOCK_FILE))?;
        let mut store = Self {
            disk,
            dir: dir.to_owned(),
            min_slot,
            journal: None,
            generation: 0,
            last_text: Vec::new(),
            is_behind: false,
            _lock: lock,
            ledger_type: PhantomData,
        };
        let disk = &*store.disk;
        // All files are read before one is changed: a file of a newer version ends the start, and must find the others unchanged.
        let current = envelope::read(disk, &dir.join(CURRENT_FILE))?;
        let previous = envelope::read(disk, &dir.join(PREVIOUS_FILE))?;
        let journal = journal::read(disk, &dir.join(JOURNAL_FILE), min_slot)?;

        for unfinished in [NEW_FILE, NEW_JOURNAL_FILE] {
            // If this fails, the next write fails with an error about the file.
            let _ = disk.remove(&dir.join(unfinished));
        }
        store.sync_found(&journal)?;
        let mut set_aside = Vec::new();
        let current = store.load_file(CURRENT_FILE, current, &mut set_aside)?;
        let previous = store.load_file(PREVIOUS_FILE, previous, &mut set_aside)?;
        let written_out = current.as_ref().map(|current| current.generation);
        let JournalSaves { last, is_certain } = match journal {
            FoundJournal::Missing => {
                JournalSaves { last: None, is_certain: written_out == Some(FIRST_VERSION_GENERATION) }
            }
            FoundJournal::Unusable(reason) => {
                set_aside.push(store.set_aside(JOURNAL_FILE, &reason)?);
                JournalSaves { last: None, is_certain: false }
            }
            FoundJournal::Journal(journal, slots) => {
                store.journal = Some(journal);
                store.last_save(slots, written_out, &mut set_aside)?
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
        let last = last.map(|IntactLedger { generation, ledger, text }| {
            (store.generation, store.last_text) = (generation, text);
            ledger
        });
        let loaded = match last {
            Some(ledger) if is_certain => LoadedLedger::Current { ledger, set_aside },
            Some(ledger) => LoadedLedger::Previous { ledger, set_aside },
            None => {
                // An earlier start set files aside and ended before its first save.
                set_aside.extend(store.set_aside_earlier(&set_aside)?);
                if set_aside.is_empty() { LoadedLedger::Fresh } else { LoadedLedger::Rebuild { set_aside } }
            }
        };
        Ok((store, loaded))
    }

    /// Syncs the files that an earlier process has left: it may have been killed before its own sync.
    fn sync_found(&self, journal: &FoundJournal<T>) -> Result<(), StoreError> {
        if matches!(journal, FoundJournal::Missing) {
            // The directory's name may not be durable either.
            return self.dir.ancestors().skip(1).try_for_each(|above| sync_above(&*self.disk, above));
        }
        let path = self.dir.join(JOURNAL_FILE);
        let synced = self.disk.open(&path).and_then(|file| file.sync(SyncPoint::Found));
        synced.map_err(StoreError::io(&path, "sync it"))?;
        self.sync_dir(SyncPoint::FoundNames)
    }

    /// Returns the last save in the journal. Copies damaged slots to new files, because the next saves overwrite them.
    fn last_save(
        &self,
        slots: [Content<T>; 2],
        written_out: Option<u64>,
        set_aside: &mut Vec<SetAsideFile>,
    ) -> Result<JournalSaves<T>, StoreError> {
        let newest = slots.iter().map(Content::generation).max().flatten();
        let known = newest.max(written_out);
        let mut saves = JournalSaves { last: None, is_certain: newest.is_some() };
        for content in slots {
            let (text, reason) = match content {
                Content::Intact(intact) => {
                    if Some(intact.generation) == newest {
                        saves.last = Some(intact);
                    }
                    continue;
                }
                Content::Missing => continue,
                Content::Damaged { text, reason } => (text, reason),
            };
            let claimed = envelope::claimed_generation(&text);
            if claimed == Some(known.unwrap_or(0) + 1) {
                tracing::info!(
                    "a crash interrupted the last save: it is ignored, as nothing was changed because of it"
                );
                continue;
            }
            let path = self.free_name()?;
            let kept = self.disk.create(&path).and_then(|file| {
                file.write_at(0, &text)?;
                file.sync(SyncPoint::SetAside)
            });
            kept.map_err(StoreError::io(&path, "copy the damaged data to it"))?;
            self.sync_dir(SyncPoint::SetAsideName)?;
            set_aside.push(SetAsideFile { path, reason });
            // Unless the beginning of the damaged text shows an older generation, it may have been the last save.
            saves.is_certain &= claimed.is_some_and(|claimed| Some(claimed) <= known);
        }
        Ok(saves)
    }

    /// Saves a ledger. On return, it is durable; on an error, the previous one still is.
    pub fn save(&mut self, ledger: &T) -> Result<(), StoreError> {
        self.save_text(&serde_json::value::to_raw_value(ledger).map_err(StoreError::Serialize)?)
    }

    /// Saves a ledger that is already serialized.
    pub fn save_text(&mut self, ledger: &RawValue) -> Result<(), StoreError> {
        let path = self.dir.join(JOURNAL_FILE);
        if self.generation >= MAX_GENERATION {
            return Err(StoreError::GenerationsExhausted { path, last: self.generation });
        }
        let generation = self.generation + 1;
        let text = envelope::encode(generation, ledger).map_err(StoreError::Serialize)?;
        let (mut journal, file) = self.journal_with_room(&path, &text)?;
        let written = journal.write(&*file, &text, self.generation);
        self.journal = Some(journal);
        written.map_err(StoreError::io(&path, "write it"))?;
        (self.generation, self.last_text, self.is_behind) = (generation, text, true);
        fault::point("ledger.saved");
        Ok(())
    }

    /// Returns the journal and its file; creates a new journal, which contains only the last save, if the text does not
    /// fit.
    fn journal_with_room(
        &mut self,
        path: &Path,
        text: &[u8],
    ) -> Result<(Journal, Box<dyn DiskFile>), StoreError> {
        let disk = &*self.disk;
        if let Some(journal) = &self.journal
            && let Some(file) = journal.open(disk, path, text).map_err(StoreError::io(path, "open it"))?
            && let Some(journal) = self.journal.take()
        {
            return Ok((journal, file));
        }
        let new = self.dir.join(NEW_JOURNAL_FILE);
        let made = Journal::create(disk, [path, &new], &self.last_text, text.len(), self.min_slot);
        let made = made.inspect_err(|_| {
            // The unfinished file may take the space that is missing. If it cannot be removed, the next save replaces
            // it.
            let _ = disk.remove(&new);
        })?;
        // The old journal no longer exists.
        self.journal = None;
        self.sync_dir(SyncPoint::JournalName)?;
        let file = disk.open(path).map_err(StoreError::io(path, "open it"))?;
        Ok((made, file))
    }

    /// Returns the number of the last save if `ledger.json` is older than that.
    pub fn pending_write_out(&self) -> Option<u64> {
        self.is_behind.then_some(self.generation)
    }

    /// Writes the last save to `ledger.json`, for readers of that file and as a fallback for a damaged journal. An
    /// error loses no data.
    pub fn write_out(&mut self) -> Result<(), StoreError> {
        if !self.is_behind {
            return Ok(());
        }
        let new = self.dir.join(NEW_FILE);
        self.write_new(&new).and_then(|()| self.put_in_place(&new)).inspect_err(|_| {
            // The unfinished file may take the space that is missing. If it cannot be removed, the next one replaces
            // it.
            let _ = self.disk.remove(&new);
        })?;
        self.is_behind = false;
        Ok(())
    }

    fn write_new(&self, new: &Path) -> Result<(), StoreError> {
        missing_as_none(self.disk.remove(new)).map_err(StoreError::io(new, LEFTOVER))?;
        let file = self.disk.create(new).map_err(StoreError::io(new, "create it"))?;
        fault::point("file.created");
        file.write_at(0, &self.last_text).map_err(StoreError::io(new, "write it"))?;
        file.sync(SyncPoint::WrittenOut).map_err(StoreError::io(new, "sync it"))?;
        fault::point("file.synced");
        Ok(())
    }

    fn put_in_place(&self, new: &Path) -> Result<(), StoreError> {
        let (current, previous) = (self.dir.join(CURRENT_FILE), self.dir.join(PREVIOUS_FILE));
        missing_as_none(self.disk.remove(&previous)).map_err(StoreError::io(&previous, "replace it"))?;
        fault::point("file.older-removed");
        missing_as_none(self.disk.link(&current, &previous))
            .map_err(StoreError::io(&previous, "link the previous ledger to it"))?;
        fault::point("file.previous-kept");
        self.disk.rename(new, &current).map_err(StoreError::io(&current, "replace it"))?;
        fault::point("file.renamed");
        self.sync_dir(SyncPoint::WrittenOutName)
    }

    fn sync_dir(&self, reason: SyncPoint) -> Result<(), StoreError> {
        sync_dir(&*self.disk, &self.dir, reason)
    }

    /// Returns the content of an intact file; sets a damaged file aside.
    fn load_file(
        &self,
        name: &str,
        content: Content<T>,
        set_aside: &mut Vec<SetAsideFile>,
    ) -> Result<Option<IntactLedger<T>>, StoreError> {
        match content {
            Content::Missing => Ok(None),
            Content::Intact(intact) => Ok(Some(intact)),
            Content::Damaged { reason, .. } => {
                set_aside.push(self.set_aside(name, &reason)?);
                Ok(None)
            }
        }
    }

    /// Renames a damaged file.
    fn set_aside(&self, name: &str, reason: &str) -> Result<SetAsideFile, StoreError> {
        let (from, path) = (self.dir.join(name), self.free_name()?);
        self.disk.rename(&from, &path).map_err(StoreError::io(&from, "set it aside"))?;
        self.sync_dir(SyncPoint::SetAsideName)?;
        Ok(SetAsideFile { path, reason: reason.to_owned() })
    }

    /// Returns the first unused name for damaged data. The lock prevents another process from taking it.
    fn free_name(&self) -> Result<PathBuf, StoreError> {
        let taken = self.list()?;
        let named = (1..).map(|number: u64| self.dir.join(format!("{DAMAGED_FILE_PREFIX}{number}")));
        Ok(named.into_iter().find(|name| !taken.contains(name)).unwrap_or_default())
    }

    /// Returns the files that were set aside before `now`.
    fn set_aside_earlier(&self, now: &[SetAsideFile]) -> Result<Vec<SetAsideFile>, StoreError> {
        let is_damaged = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DAMAGED_FILE_PREFIX))
        };
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

/// Creates a directory with this mode, and its missing ancestors.
fn make_dirs(disk: &dyn FileSystem, dir: &Path, mode: u32) -> Result<(), StoreError> {
    match (disk.make_dir(dir, mode), dir.parent()) {
        (Ok(()), _) => Ok(()),
        (Err(error), Some(above)) if error.kind() == io::ErrorKind::NotFound => {
            make_dirs(disk, above, PARENT_MODE)?;
            disk.make_dir(dir, mode).map_err(StoreError::io(dir, "create it"))
        }
        (Err(error), _) => Err(StoreError::io(dir, "create it")(error)),
    }
}

/// Makes the names in an ancestor directory durable, unless its file system is read-only or cannot sync directories. If
/// the store's own directory is on such a file system, the sync of the store's names reports it.
fn sync_above(disk: &dyn FileSystem, dir: &Path) -> Result<(), StoreError> {
    match sync_dir(disk, dir, SyncPoint::Directory) {
        Err(StoreError::Io { source, .. }) if cannot_sync(&source) => Ok(()),
        synced => synced,
    }
}

fn cannot_sync(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, ReadOnlyFilesystem, Unsupported};
    matches!(error.kind(), InvalidInput | ReadOnlyFilesystem | Unsupported)
}

fn sync_dir(disk: &dyn FileSystem, dir: &Path, reason: SyncPoint) -> Result<(), StoreError> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    disk.sync_dir(dir, reason).map_err(StoreError::io(dir, "sync it"))
}

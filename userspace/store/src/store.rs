//! The files of a ledger's directory, opened, saved and written out.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    envelope::{self, Content, Whole},
    error::StoreError,
    fault,
    journal::{self, Found, Journal, Slot},
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

/// An open ledger store. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Store<T> {
    dir: PathBuf,
    /// Absent until the first save.
    journal: Option<Journal>,
    /// Of the last save.
    generation: u64,
    /// The last save, if `ledger.json` is behind it.
    behind: Option<Vec<u8>>,
    /// Locked; the kernel unlocks it however the process ends.
    _lock: File,
    holds: PhantomData<fn(&T)>,
}

/// What a store held when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loaded<T> {
    /// Nothing: it is new.
    Fresh,
    /// The last ledger that was saved.
    Current {
        /// The ledger.
        ledger: T,
        /// What was set aside, without which nothing is missing.
        set_aside: Vec<SetAside>,
    },
    /// One before the last, as the last is damaged or missing. What was promised since is to be learnt from live
    /// cgroups.
    Previous {
        /// The ledger.
        ledger: T,
        /// What was set aside.
        set_aside: Vec<SetAside>,
    },
    /// Nothing that can be read. All that is promised is to be learnt from live cgroups.
    Rebuild {
        /// What was set aside, now or earlier.
        set_aside: Vec<SetAside>,
    },
}

/// A damaged file that was kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// Where it is now.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What the journal holds.
struct Saved<T> {
    /// The last save that is whole, and its text.
    last: Option<(Whole<T>, Vec<u8>)>,
    /// Whether none can have been saved since, here or in `ledger.json`.
    is_certain: bool,
}

impl<T: Serialize + DeserializeOwned> Store<T> {
    /// Opens the store in this directory, which is made if it is not there, and reads what it holds. Damaged
    /// files are set aside.
    pub fn open(dir: &Path) -> Result<(Self, Loaded<T>), StoreError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(StoreError::io(dir, "create it"))?;
        let mut store = Self {
            dir: dir.to_owned(),
            journal: None,
            generation: 0,
            behind: None,
            _lock: lock(&dir.join(LOCK))?,
            holds: PhantomData,
        };
        // All are looked at before anything is touched: one may be of a newer version.
        let current = envelope::read(&dir.join(CURRENT))?;
        let previous = envelope::read(&dir.join(PREVIOUS))?;
        let journal = journal::read(&dir.join(JOURNAL))?;

        for unfinished in [NEW, NEW_JOURNAL] {
            // What is still there is in the way of the next one, which says so.
            let _ = fs::remove_file(dir.join(unfinished));
        }
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
            Some((last, text)) if Some(last.generation) >= written_out => {
                store.behind = (Some(last.generation) > written_out).then_some(text);
                (Some(last), is_certain)
            }
            _ => match current {
                Some(current) => (Some(current), is_certain),
                None => (previous, false),
            },
        };
        store.generation = last.as_ref().map_or(0, |last| last.generation);
        let loaded = match last.map(|last| last.ledger) {
            Some(ledger) if is_certain => Loaded::Current { ledger, set_aside },
            Some(ledger) => Loaded::Previous { ledger, set_aside },
            None => {
                // Of an earlier start that ended before the first save.
                set_aside.extend(store.set_aside_earlier(&set_aside)?);
                if set_aside.is_empty() { Loaded::Fresh } else { Loaded::Rebuild { set_aside } }
            }
        };
        Ok((store, loaded))
    }

    /// The last save that is in the journal. What is damaged there is kept elsewhere, as it will be written over.
    fn saved(
        &self,
        slots: [Slot<T>; 2],
        written_out: Option<u64>,
        set_aside: &mut Vec<SetAside>,
    ) -> Result<Saved<T>, StoreError> {
        let newest = slots.iter().map(Slot::generation).max().flatten();
        let known = newest.max(written_out);
        let mut saved = Saved { last: None, is_certain: newest.is_some() };
        for Slot { text, content } in slots {
            let reason = match content {
                Content::Whole(whole) => {
                    if Some(whole.generation) == newest {
                        saved.last = Some((whole, text));
                    }
                    continue;
                }
                Content::Missing => continue,
                Content::Damaged(reason) => reason,
            };
            let claimed = envelope::claimed(&text);
            if known.is_some() && claimed == known.map(|known| known + 1) {
                tracing::info!("a save was cut off by a crash: nothing had been done for it");
                continue;
            }
            let path = self.free_name();
            let mut file = journal::create_new(&path)?;
            file.write_all(&text)
                .and_then(|()| file.sync_all())
                .map_err(StoreError::io(&path, "write it"))?;
            self.sync_dir()?;
            set_aside.push(SetAside { path, reason });
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
        let generation = self.generation + 1;
        let text = envelope::seal(generation, ledger).map_err(StoreError::Serialize)?;
        let path = self.dir.join(JOURNAL);
        match &mut self.journal {
            Some(journal) if journal.has_room(&path, &text) => {
                journal.write(&path, &text).map_err(StoreError::io(&path, "write it"))?;
            }
            _ => {
                let new = self.dir.join(NEW_JOURNAL);
                let made = Journal::create(&path, &new, &text).inspect_err(|_| {
                    // It takes space that may be what is missing. If it stays, the next save replaces it.
                    let _ = fs::remove_file(&new);
                })?;
                // It is in place, whether that is durable or not.
                (self.journal, self.generation) = (Some(made), generation);
                self.sync_dir()?;
            }
        }
        (self.generation, self.behind) = (generation, Some(text));
        fault::point("ledger.saved");
        Ok(())
    }

    /// The number of the last save, if `ledger.json` is not what was saved with it.
    pub fn behind(&self) -> Option<u64> {
        self.behind.as_ref().map(|_| self.generation)
    }

    /// Writes the last save to `ledger.json`, for whoever reads that, and for a journal that gets damaged. If it
    /// fails, nothing is lost.
    pub fn write_out(&mut self) -> Result<(), StoreError> {
        let Some(text) = &self.behind else { return Ok(()) };
        let new = self.dir.join(NEW);
        write_new(&new, text).and_then(|()| self.put_in_place(&new)).inspect_err(|_| {
            // Half a file takes space that may be what is missing. If it stays, the next one replaces it.
            let _ = fs::remove_file(&new);
        })?;
        self.behind = None;
        Ok(())
    }

    fn put_in_place(&self, new: &Path) -> Result<(), StoreError> {
        let (current, previous) = (self.dir.join(CURRENT), self.dir.join(PREVIOUS));
        if current.exists() {
            match fs::remove_file(&previous) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(StoreError::io(&previous, "replace it")(error));
                }
                _ => {}
            }
            fault::point("file.older-removed");
            fs::hard_link(&current, &previous)
                .map_err(StoreError::io(&previous, "keep the previous ledger under this name"))?;
            fault::point("file.previous-kept");
        }
        fs::rename(new, &current).map_err(StoreError::io(&current, "replace it"))?;
        fault::point("file.renamed");
        self.sync_dir()
    }

    fn sync_dir(&self) -> Result<(), StoreError> {
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(StoreError::io(&self.dir, "sync it"))
    }

    /// What a file holds, if it is whole. A damaged one is set aside.
    fn whole(
        &self,
        name: &str,
        content: Content<T>,
        set_aside: &mut Vec<SetAside>,
    ) -> Result<Option<Whole<T>>, StoreError> {
        match content {
            Content::Missing => Ok(None),
            Content::Whole(whole) => Ok(Some(whole)),
            Content::Damaged(reason) => {
                set_aside.push(self.set_aside(name, &reason)?);
                Ok(None)
            }
        }
    }

    /// Keeps a damaged file under another name.
    fn set_aside(&self, name: &str, reason: &str) -> Result<SetAside, StoreError> {
        let (from, path) = (self.dir.join(name), self.free_name());
        fs::rename(&from, &path).map_err(StoreError::io(&from, "set it aside"))?;
        self.sync_dir()?;
        Ok(SetAside { path, reason: reason.to_owned() })
    }

    /// The first name for what is damaged that is free. The lock keeps others from taking it meanwhile.
    fn free_name(&self) -> PathBuf {
        let named = |number| self.dir.join(format!("{DAMAGED}{number}"));
        let mut number = 1;
        while named(number).exists() {
            number += 1;
        }
        named(number)
    }

    /// Files that were set aside before these.
    fn set_aside_earlier(&self, now: &[SetAside]) -> Result<Vec<SetAside>, StoreError> {
        let cannot_list = |error| StoreError::io(&self.dir, "list it")(error);
        let mut earlier = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(cannot_list)? {
            let path = entry.map_err(cannot_list)?.path();
            let is_damaged = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DAMAGED));
            if is_damaged && now.iter().all(|aside| aside.path != path) {
                earlier.push(SetAside { path, reason: "set aside at an earlier start".to_owned() });
            }
        }
        earlier.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(earlier)
    }
}

fn write_new(new: &Path, text: &[u8]) -> Result<(), StoreError> {
    let mut file = journal::create_new(new)?;
    fault::point("file.created");
    file.write_all(text).map_err(StoreError::io(new, "write it"))?;
    file.sync_all().map_err(StoreError::io(new, "sync it"))?;
    fault::point("file.synced");
    Ok(())
}

fn lock(path: &Path) -> Result<File, StoreError> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(StoreError::io(path, "open it"))?;
    // A child that is between fork and exec holds its parent's lock for a moment longer.
    let mut locked = file.try_lock();
    for _ in 0..20 {
        if !matches!(locked, Err(TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
        locked = file.try_lock();
    }
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            return Err(StoreError::Locked { path: path.to_owned(), holder: holder.trim().parse().ok() });
        }
        Err(TryLockError::Error(error)) => return Err(StoreError::io(path, "lock it")(error)),
    }
    // Only to name us to others; a full disk must not keep the daemon from starting.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

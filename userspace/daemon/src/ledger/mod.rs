//! The ledger store: the only durable state, safe against a crash at any instant.
//!
//! Problem: what is promised must survive a crash, a full disk and a damaged file; a promise is stored before any
//! knob is written for it, so a save has to be durable when it returns, or have changed nothing.
//!
//! Files, in one directory: `ledger.json`; `ledger.json.1`, the one before; `ledger.json.new`, being written;
//! `ledger.json.damaged-N`, set aside; `ledger.lock`, held as long as the store is open.
//!
//! Algorithm of a save: write and sync `ledger.json.new`; make `ledger.json.1` another name of `ledger.json`;
//! rename `ledger.json.new` to `ledger.json`; sync the directory.
//!
//! Invariants: once saved, there is a whole `ledger.json` at every instant, the old one or the new. Nothing that
//! cannot be read is ever deleted or written over. A file of a newer version is not touched.
//!
//! The store knows nothing of what it holds but how to serialize it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::fault;

/// The version of the format that is written. Older ones are read.
pub const VERSION: u32 = 1;

const CURRENT: &str = "ledger.json";
const PREVIOUS: &str = "ledger.json.1";
const NEW: &str = "ledger.json.new";
const DAMAGED: &str = "ledger.json.damaged-";
const LOCK: &str = "ledger.lock";

/// An open ledger store. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Store<T> {
    dir: PathBuf,
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
    Current(T),
    /// The one before the last, as the last is damaged or missing. What was promised since is to be learnt
    /// from live cgroups.
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

/// A ledger could not be opened or saved. What was saved before is as it was.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it open.
    #[error("{path}: another process{} has the ledger open; two daemons must not share a state directory",
        .holder.map_or_else(String::new, |pid| format!(" ({pid})")), path = .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process, if it said who it is.
        holder: Option<u32>,
    },
    /// A file was written by a newer version. It was not touched.
    #[error("{path}: written in version {found} of the format, this program knows {VERSION}; run the newer program, \
        or move the file away to begin anew", path = .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// A file or the directory cannot be used: a full disk, a read-only file system, missing rights.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The ledger cannot be put into JSON.
    #[error("the ledger cannot be serialized: {0}")]
    Serialize(#[source] serde_json::Error),
}

impl StoreError {
    fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, source }
    }
}

/// What is around the ledger in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    version: u32,
    /// CRC-32 (IEEE) of the ledger's text, in hexadecimal.
    checksum: String,
    ledger: Box<RawValue>,
}

/// The part of a file that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// What a file holds.
enum Content<T> {
    Missing,
    Whole(T),
    Damaged(String),
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
        let store = Self { dir: dir.to_owned(), _lock: lock(&dir.join(LOCK))?, holds: PhantomData };

        // Both are looked at before anything is touched: one may be of a newer version.
        let current = read(&dir.join(CURRENT))?;
        let previous = read(&dir.join(PREVIOUS))?;
        let mut set_aside = Vec::new();
        if let Content::Damaged(reason) = &current {
            set_aside.push(store.set_aside(CURRENT, reason)?);
        }
        if let Content::Damaged(reason) = &previous {
            set_aside.push(store.set_aside(PREVIOUS, reason)?);
        }
        let loaded = match (current, previous) {
            (Content::Whole(ledger), _) => Loaded::Current(ledger),
            (_, Content::Whole(ledger)) => Loaded::Previous { ledger, set_aside },
            _ => {
                // Of an earlier start that ended before the first save.
                set_aside.extend(store.set_aside_earlier(&set_aside)?);
                if set_aside.is_empty() { Loaded::Fresh } else { Loaded::Rebuild { set_aside } }
            }
        };
        Ok((store, loaded))
    }

    /// Saves a ledger. When this returns, it is durable; if it fails, the one before still is.
    pub fn save(&mut self, ledger: &T) -> Result<(), StoreError> {
        self.save_text(serde_json::value::to_raw_value(ledger).map_err(StoreError::Serialize)?)
    }

    /// Saves a ledger that is in words already.
    pub fn save_text(&mut self, ledger: Box<RawValue>) -> Result<(), StoreError> {
        let envelope = Envelope { version: VERSION, checksum: checksum(ledger.get()), ledger };
        let mut text = serde_json::to_vec(&envelope).map_err(StoreError::Serialize)?;
        text.push(b'\n');

        let new = self.dir.join(NEW);
        let result = write_new(&new, &text).and_then(|()| self.put_in_place(&new));
        if result.is_err() {
            // Half a file takes space that may be what is missing. If it stays, the next save replaces it.
            let _ = fs::remove_file(&new);
        }
        result
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
            fault::point("ledger.older-removed");
            fs::hard_link(&current, &previous)
                .map_err(StoreError::io(&previous, "keep the previous ledger under this name"))?;
            fault::point("ledger.previous-kept");
        }
        fs::rename(new, &current).map_err(StoreError::io(&current, "replace it"))?;
        fault::point("ledger.renamed");
        self.sync_dir()?;
        fault::point("ledger.saved");
        Ok(())
    }

    fn sync_dir(&self) -> Result<(), StoreError> {
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(StoreError::io(&self.dir, "sync it"))
    }

    /// Keeps a damaged file under the first name that is free.
    fn set_aside(&self, name: &str, reason: &str) -> Result<SetAside, StoreError> {
        let from = self.dir.join(name);
        let mut number = 1;
        let mut path = self.dir.join(format!("{DAMAGED}{number}"));
        // The lock keeps others from taking the name meanwhile.
        while path.exists() {
            number += 1;
            path = self.dir.join(format!("{DAMAGED}{number}"));
        }
        fs::rename(&from, &path).map_err(StoreError::io(&from, "set it aside"))?;
        self.sync_dir()?;
        Ok(SetAside { path, reason: reason.to_owned() })
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
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(StoreError::io(new, "remove the rest of a save that failed")(error));
        }
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(new)
        .map_err(StoreError::io(new, "create it"))?;
    fault::point("ledger.created");
    let (first, second) = text.split_at(text.len() / 2);
    file.write_all(first).map_err(StoreError::io(new, "write it"))?;
    fault::point("ledger.half-written");
    file.write_all(second).map_err(StoreError::io(new, "write it"))?;
    fault::point("ledger.written");
    file.sync_all().map_err(StoreError::io(new, "sync it"))?;
    fault::point("ledger.synced");
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

fn checksum(text: &str) -> String {
    format!("crc32:{:08x}", crc32fast::hash(text.as_bytes()))
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Content<T>, StoreError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Missing),
        Err(error) => return Err(StoreError::io(path, "read it")(error)),
    };
    let damaged = |what: String| Ok(Content::Damaged(what));
    let Version { version } = match serde_json::from_slice(&text) {
        Ok(version) => version,
        Err(error) => return damaged(format!("not a ledger: {error}")),
    };
    if version > VERSION {
        return Err(StoreError::Newer { path: path.to_owned(), found: version });
    }
    if version == 0 {
        return damaged("there is no version 0 of the format".to_owned());
    }
    let envelope: Envelope = match serde_json::from_slice(&text) {
        Ok(envelope) => envelope,
        Err(error) => return damaged(format!("not a ledger: {error}")),
    };
    let sum = checksum(envelope.ledger.get());
    if sum != envelope.checksum {
        return damaged(format!("its checksum is {sum}, the file says {}", envelope.checksum));
    }
    match serde_json::from_str(envelope.ledger.get()) {
        Ok(ledger) => Ok(Content::Whole(ledger)),
        Err(error) => damaged(format!("whole, but not a ledger of this program: {error}")),
    }
}

#[cfg(test)]
mod tests;

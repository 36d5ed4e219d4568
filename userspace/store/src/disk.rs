//! The operations on the disk that the store needs. Tests replace the disk by a model that loses everything that was
//! not synced.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::error::StoreError;

/// A file system. A name is durable once its directory was synced.
pub(super) trait FileSystem: fmt::Debug + Send {
    /// Creates a directory with this mode, unless it exists.
    fn make_dir(&self, dir: &Path, mode: u32) -> io::Result<()>;
    /// Takes the lock of the store, which prevents other processes from opening it. Dropping the result releases it.
    fn lock(&self, path: &Path) -> Result<Lock, StoreError>;
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Creates a file that only its owner can read. It is an error if the file exists.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path, reason: SyncPoint) -> io::Result<()>;
}

/// An open file. Written data is durable once the file was synced.
pub(super) trait DiskFile {
    fn len(&self) -> io::Result<u64>;
    fn read_at(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>>;
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    fn sync(&self, reason: SyncPoint) -> io::Result<()>;
}

/// A held lock.
pub(super) type Lock = Box<dyn fmt::Debug + Send>;

/// The reason for a sync. Without any one of them, a loss of power can lose a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SyncPoint {
    /// The name of the directory, in its parent.
    Directory,
    /// Data that a killed process had written.
    Found,
    /// Names that a killed process had created.
    FoundNames,
    /// A new journal, before it is renamed.
    NewJournal,
    /// The name of a new journal.
    JournalName,
    Save,
    /// The withdrawal of a failed save.
    Withdrawal,
    /// `ledger.json`, before it is renamed.
    WrittenOut,
    /// The name of `ledger.json`.
    WrittenOutName,
    /// A copy of damaged data.
    SetAside,
    /// The name of a copy of damaged data.
    SetAsideName,
}

/// Returns `None` instead of an error if the file is missing.
pub(super) fn missing_as_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[derive(Debug)]
pub(super) struct HostFileSystem;

impl FileSystem for HostFileSystem {
    fn make_dir(&self, dir: &Path, mode: u32) -> io::Result<()> {
        match DirBuilder::new().mode(mode).create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
            created => created,
        }
    }

    fn lock(&self, path: &Path) -> Result<Lock, StoreError> {
        lock(path).map(|file| Box::new(file) as Lock)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(file))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(OpenOptions::new().read(true).write(true).open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path())).collect()
    }

    fn sync_dir(&self, dir: &Path, _: SyncPoint) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }
}

impl DiskFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut read = vec![0; bytes];
        self.read_exact_at(&mut read, at)?;
        Ok(read)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self, _: SyncPoint) -> io::Result<()> {
        // `fdatasync` also writes a changed size, which is necessary to read the data.
        self.sync_data()
    }
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
    // A child between fork and exec holds its parent's lock for a moment longer.
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
    // The process id is only for other processes' error messages; a full disk must not prevent the start.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

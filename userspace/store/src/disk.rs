//! What the store asks of the disk. Tests put one in its place that loses whatever was not made durable.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::error::StoreError;

/// What is done to names. A name is durable once its directory was synced.
pub(super) trait Disk: fmt::Debug + Send {
    /// Makes a directory that only we can read, unless it is there.
    fn make_dir(&self, dir: &Path) -> io::Result<()>;
    /// Takes the lock that keeps others from this store, until what is returned is dropped.
    fn lock(&self, path: &Path) -> Result<Lock, StoreError>;
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Makes a file that only we can read. It is an error if there is one.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens a file that is there, to read and write it.
    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path, why: SyncPoint) -> io::Result<()>;
}

/// An open file. What is written is durable once it was synced.
pub(super) trait DiskFile {
    fn len(&self) -> io::Result<u64>;
    fn read_at(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>>;
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    fn sync(&self, why: SyncPoint) -> io::Result<()>;
}

/// A lock that is held.
pub(super) type Lock = Box<dyn fmt::Debug + Send>;

/// What is made durable. Without any one of them a loss of power loses a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SyncPoint {
    /// The name of the directory, in the one above it.
    Directory,
    /// What a process that was killed had written.
    Found,
    /// The names it had given.
    FoundNames,
    /// A journal, before it has its name.
    NewJournal,
    /// Its name.
    JournalName,
    /// A save.
    Save,
    /// That a save which failed is none.
    Withdrawal,
    /// `ledger.json`, before it has its name.
    WrittenOut,
    /// Its name.
    WrittenOutName,
    /// What is kept of something damaged.
    SetAside,
    /// Its name.
    SetAsideName,
}

/// Whether something is missing, which is no error here.
pub(super) fn unless_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The disk of this host.
#[derive(Debug)]
pub(super) struct HostDisk;

impl Disk for HostDisk {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
            made => made,
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
        // Its size too, where that changed: all that it takes to read the data.
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

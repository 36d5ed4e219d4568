//! Checks of the ledger store on file systems that refuse writes.

use std::{fs, io, path::Path};

use anyhow::{Result, bail, ensure};
use numaward_store::{LoadedLedger, Store, StoreError};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use crate::check::Check;

pub(crate) const ALL: &[Check] = &[("ledger-full-disk", full), ("ledger-read-only", read_only)];

/// A small file system, which is unmounted on drop.
struct SmallFileSystem(&'static str);

impl SmallFileSystem {
    fn new(path: &'static str, size: &std::ffi::CStr) -> Result<Self> {
        fs::create_dir_all(path)?;
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), Some(size))?;
        Ok(Self(path))
    }

    fn dir(&self) -> &Path {
        Path::new(self.0)
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        if let Err(error) = unmount(self.0, UnmountFlags::DETACH) {
            println!("note: {} stays mounted: {error}", self.0);
        }
    }
}

/// Opens the store, and checks the ledger that is loaded.
fn find(disk: &SmallFileSystem, expected: &str) -> Result<Store<String>> {
    let (store, loaded) = Store::open(disk.dir())?;
    let expected = LoadedLedger::Current { ledger: expected.to_owned(), set_aside: Vec::new() };
    ensure!(loaded == expected, "{loaded:?}");
    Ok(store)
}

fn no_space(result: Result<(), StoreError>) -> Result<String> {
    match result {
        Err(StoreError::Io { source, path, action }) if source.kind() == io::ErrorKind::StorageFull => {
            Ok(format!("{}: cannot {action}: {source}", path.display()))
        }
        other => bail!("{other:?}"),
    }
}

fn full() -> Result<String> {
    let disk = SmallFileSystem::new("/run/check-full", c"size=3m")?;
    let (mut store, _) = Store::<String>::open(disk.dir())?;
    store.save(&"old".to_owned())?;
    store.write_out()?;
    // More than fits into the journal, and than the file system has space for.
    let said = no_space(store.save(&"x".repeat(2_000_000)))?;
    drop(store);
    find(&disk, "old")?.save(&"new".to_owned())?;

    // No space is left: changes that fit into the journal are still saved, but the file cannot be rewritten.
    let mut filler = fs::File::create(disk.dir().join("filler"))?;
    while io::Write::write_all(&mut filler, &[1; 512]).is_ok() {}
    let long = "x".repeat(9000);
    let mut store = find(&disk, "new")?;
    store.save(&long)?;
    no_space(store.write_out())?;
    drop(store);
    find(&disk, &long)?;
    Ok(said)
}

fn read_only() -> Result<String> {
    let disk = SmallFileSystem::new("/run/check-read-only", c"size=3m")?;
    let (mut store, _) = Store::<String>::open(disk.dir())?;
    store.save(&"old".to_owned())?;
    drop(store);
    mount_remount(disk.dir(), MountFlags::RDONLY, "")?;
    let said = match Store::<String>::open(disk.dir()) {
        Err(error @ StoreError::Io { .. }) => error.to_string(),
        other => bail!("{other:?}"),
    };
    ensure!(said.contains("Read-only file system"), "{said}");
    mount_remount(disk.dir(), MountFlags::empty(), "")?;
    find(&disk, "old")?;
    Ok(said)
}

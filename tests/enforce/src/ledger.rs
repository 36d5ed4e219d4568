//! Checks of the ledger store on file systems that refuse.

use std::{fs, path::Path};

use anyhow::{Result, bail, ensure};
use numaward_daemon::ledger::{Loaded, Store, StoreError};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use crate::Check;

pub(crate) const ALL: &[Check] = &[("ledger-full-disk", full), ("ledger-read-only", read_only)];

/// A small file system, unmounted at the end.
struct Disk(&'static str);

impl Disk {
    fn new(path: &'static str, size: &std::ffi::CStr) -> Result<Self> {
        fs::create_dir_all(path)?;
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), Some(size))?;
        Ok(Self(path))
    }

    fn dir(&self) -> &Path {
        Path::new(self.0)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = unmount(self.0, UnmountFlags::DETACH) {
            println!("note: {} stays mounted: {error}", self.0);
        }
    }
}

fn full() -> Result<String> {
    let disk = Disk::new("/run/check-full", c"size=64k")?;
    let (mut store, _) = Store::<String>::open(disk.dir())?;
    store.save(&"old".to_owned())?;
    let said = match store.save(&"x".repeat(100_000)) {
        Err(StoreError::Io { source, path, action }) if source.kind() == std::io::ErrorKind::StorageFull => {
            format!("{}: cannot {action}: {source}", path.display())
        }
        other => bail!("{other:?}"),
    };
    drop(store);
    let (mut store, loaded) = Store::<String>::open(disk.dir())?;
    ensure!(loaded == Loaded::Current("old".to_owned()), "{loaded:?}");
    store.save(&"new".to_owned())?;
    drop(store);

    // Nothing left at all: what is there can be read still.
    let mut filler = fs::File::create(disk.dir().join("filler"))?;
    while std::io::Write::write_all(&mut filler, &[1; 512]).is_ok() {}
    let (mut store, loaded) = Store::<String>::open(disk.dir())?;
    ensure!(loaded == Loaded::Current("new".to_owned()), "{loaded:?}");
    ensure!(store.save(&"x".repeat(9000)).is_err(), "saved to a full disk");
    drop(store);
    let loaded = Store::<String>::open(disk.dir())?.1;
    ensure!(loaded == Loaded::Current("new".to_owned()), "{loaded:?}");
    Ok(said)
}

fn read_only() -> Result<String> {
    let disk = Disk::new("/run/check-read-only", c"size=64k")?;
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
    let loaded = Store::<String>::open(disk.dir())?.1;
    ensure!(loaded == Loaded::Current("old".to_owned()), "{loaded:?}");
    Ok(said)
}

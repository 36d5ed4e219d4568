//! [`HierarchyLock`]: the lock that prevents a second daemon on the same hierarchy.
//!
//! # Problem
//! Two daemons with separate state directories, such as one from a package and one in a pod, would take over each
//! other's guarantees, because both read the marks on the cgroups. They may share neither a directory nor a network
//! namespace, so the lock must be in the hierarchy.
//!
//! # Algorithm
//! `flock` on `memory.reclaim` of the root cgroup. The kernel has one inode for this file, wherever the hierarchy is
//! mounted, and releases the lock when the process ends. Only root can open the file, so no other user can take the
//! lock. Before Linux 5.19 the file does not exist, and there is no lock.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufRead, BufReader},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::fs::{major, minor};

use crate::{Hierarchy, TruncatedLines, files::read_lossy};

/// The locked file. Only root can open it.
const LOCKED_FILE: &str = "memory.reclaim";
/// The number of attempts: a child between fork and exec holds the lock of its parent for a moment.
const MAX_ATTEMPTS: u32 = 20;
/// The time between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The lock of a hierarchy, held until it is dropped.
#[derive(Debug)]
pub struct HierarchyLock {
    _file: File,
}

/// The hierarchy cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has the lock.
    #[error(
        "another numaward{holder} gives guarantees in the cgroup hierarchy {root}; two daemons would take over each \
         other's guarantees: stop one of them",
        holder = .holder.as_ref().map_or_else(String::new, |holder| format!(" (process {holder})")),
        root = .root.display()
    )]
    Held {
        /// The root of the hierarchy.
        root: PathBuf,
        /// Id and name of the process; `None` if it is in another PID namespace or `/proc/locks` cannot be read.
        holder: Option<String>,
    },
    /// The file cannot be locked.
    #[error("cannot lock {path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Hierarchy {
    /// Takes the lock of this hierarchy; `None` if the kernel does not have `memory.reclaim`.
    pub fn lock(&self) -> Result<Option<HierarchyLock>, LockError> {
        let path = self.root().join(LOCKED_FILE);
        let file = match OpenOptions::new().write(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(LockError::Io { path, source }),
        };
        for attempt in 1.. {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if attempt < MAX_ATTEMPTS => thread::sleep(RETRY_INTERVAL),
                Err(TryLockError::WouldBlock) => {
                    return Err(LockError::Held { root: self.root().into(), holder: holder(&file) });
                }
                Err(TryLockError::Error(source)) => return Err(LockError::Io { path, source }),
            }
        }
        Ok(Some(HierarchyLock { _file: file }))
    }
}

/// Returns the process that has the lock, from `/proc/locks`.
fn holder(file: &File) -> Option<String> {
    let file = file.metadata().ok()?;
    let locked = format!("{:02x}:{:02x}:{}", major(file.dev()), minor(file.dev()), file.ino());
    // Any user can have any number of locks.
    let pid = pid_of_lock(BufReader::new(File::open("/proc/locks").ok()?), &locked)?;
    // `/proc/locks` shows 0 for a process in another PID namespace.
    if pid == "0" {
        return None;
    }
    let name = read_lossy(&Path::new("/proc").join(&pid).join("comm")).unwrap_or_default();
    Some(if name.is_empty() { pid } else { format!("{pid}, {}", name.trim_end()) })
}

/// Returns the process that holds the `flock` on a file, from `/proc/locks`.
fn pid_of_lock(locks: impl BufRead, locked: &str) -> Option<String> {
    let mut lines = TruncatedLines::new(locks);
    // `1: FLOCK  ADVISORY  WRITE 708 00:1b:13 0 EOF`; a waiting process has `->` after the number.
    while let Some(line) = lines.next_line().ok()? {
        let line = String::from_utf8_lossy(line);
        let mut fields = line.split_whitespace().skip(1);
        if fields.next() == Some("FLOCK")
            && let Some((pid, file)) = fields.nth(2).zip(fields.next())
            && file == locked
        {
            return Some(pid.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn holder_found_among_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 5 00:1b:13 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 6 00:1b:14 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 708 00:1b:13 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 9 00:1b:13 0 EOF\nodd\n";
        assert_eq!(pid_of_lock(locks.as_bytes(), "00:1b:13").as_deref(), Some("708"));
        assert_eq!(pid_of_lock(locks.as_bytes(), "00:1b:99"), None);
    }

    #[test]
    fn only_one_process_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        assert!(hierarchy.lock().unwrap().is_none());
        fs::write(dir.path().join(LOCKED_FILE), "").unwrap();
        let lock = hierarchy.lock().unwrap().unwrap();
        let refused = hierarchy.lock().unwrap_err().to_string();
        assert!(refused.contains(&std::process::id().to_string()), "{refused}");
        drop(lock);
        assert!(hierarchy.lock().unwrap().is_some());
    }
}

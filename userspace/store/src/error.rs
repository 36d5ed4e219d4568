//! Errors while opening and saving a ledger.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The written version of the format. Older ones can be read.
///
/// Version 1 had no generation, and its checksum covered only the ledger's text.
pub(crate) const VERSION: u32 = 2;

/// An error while opening or saving a ledger. The previously saved ledger is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has the ledger open.
    #[error("{path}: another process{} has the ledger open; two daemons must not share a state directory",
        .holder.map_or_else(String::new, |pid| format!(" ({pid})")), path = .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process id, if the lock file contains it.
        holder: Option<u32>,
    },
    /// A newer version has written a file. The file is unchanged.
    #[error("{path}: written in version {found} of the format, this program knows {VERSION}; run the newer program, \
        or move the file away to start with an empty ledger", path = .path.display())]
    Newer {
        path: PathBuf,
        /// The version of its format.
        found: u32,
    },
    /// A file is intact, but this program cannot decode the ledger. The file is unchanged.
    #[error("{path}: intact, but not a ledger of this program: {source}; run the program that wrote it, or move the \
        file away to start with an empty ledger", path = .path.display())]
    Foreign { path: PathBuf, source: serde_json::Error },
    /// A file or the directory cannot be used: a full disk, a read-only file system, missing permissions.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        path: PathBuf,
        /// The failed operation, an infinitive phrase such as `open it`.
        action: &'static str,
        source: io::Error,
    },
    /// The last save has the highest possible number. No store reaches it: another program must have written it into a
    /// file.
    #[error("{path}: its last save has the highest possible number, {last}, so no further save is possible; \
        stop the daemon and move the files of this directory away to start with an empty ledger", path = .path.display())]
    GenerationsExhausted {
        /// The journal.
        path: PathBuf,
        last: u64,
    },
    /// The ledger cannot be serialized to JSON.
    #[error("the ledger cannot be serialized: {0}")]
    Serialize(#[source] serde_json::Error),
}

impl StoreError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, source }
    }
}

//! Why a ledger cannot be opened or saved.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The version of the format that is written. Older ones are read.
///
/// 1 had no generation, and its checksum is that of the ledger's text alone.
pub(crate) const VERSION: u32 = 2;

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
    /// A file is whole and holds what this program cannot read. It was not touched.
    #[error("{path}: whole, but not a ledger of this program: {source}; run the program that wrote it, or move the \
        file away to begin anew", path = .path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is not understood.
        source: serde_json::Error,
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
    /// The last save has the highest number that a save can have: somebody wrote that into a file, as no store saves so
    /// often.
    #[error("{path}: its last save has the number {last}, the highest one there is, so nothing can be saved after it; \
        stop the daemon and move the files of this directory away to begin anew", path = .path.display())]
    GenerationsExhausted {
        /// The journal.
        path: PathBuf,
        /// The number.
        last: u64,
    },
    /// The ledger cannot be put into JSON.
    #[error("the ledger cannot be serialized: {0}")]
    Serialize(#[source] serde_json::Error),
}

impl StoreError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, source }
    }
}

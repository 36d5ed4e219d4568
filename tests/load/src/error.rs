use std::{
    io,
    path::{Path, PathBuf},
};

/// Reasons why the memory could not be touched as requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot register for signals: {0}")]
    Signal(io::Error),
    #[error("cannot enter the cgroup through {}: {source} (it must exist, have no controllers for children, and be writable)", path.display())]
    Cgroup { path: PathBuf, source: io::Error },
    #[error("cannot run on CPU {cpu}: {source} (is it online, and in this process's cpuset?)")]
    Pin { cpu: u32, source: io::Error },
    #[error("cannot read the nodes from {}: {source}", path.display())]
    Nodes { path: PathBuf, source: io::Error },
    #[error("there is no node {node} with memory: this machine has {there}")]
    NoNode { node: u32, there: String },
    #[error("cannot set the memory policy {policy}: {source} (are its nodes in this process's cpuset.mems?)")]
    MemoryPolicy { policy: String, source: io::Error },
    #[error("--size {size} is not a multiple of the page size {page}")]
    Unaligned { size: u64, page: u64 },
    #[error("cannot map {size} bytes: {source}{hint}")]
    Map { size: u64, source: io::Error, hint: &'static str },
    #[error("cannot prepare {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(
        "transparent huge pages are off: {} holds `{value}`; write `madvise` or `always` there",
        path.display()
    )]
    TransparentOff { path: PathBuf, value: String },
    #[error("cannot touch page {page}: {source}{hint}")]
    Touch { page: usize, source: io::Error, hint: &'static str },
    #[error("cannot ask for the nodes of the pages (move_pages): {0}")]
    MovePages(io::Error),
    #[error("cannot start a thread: {0}")]
    Spawn(io::Error),
    #[error("a thread panicked")]
    Thread,
    #[error("cannot print the report: {0}")]
    Print(io::Error),
}

impl Error {
    pub(crate) fn cgroup(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Cgroup { path: path.to_owned(), source }
    }

    pub(crate) fn file(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::File { path: path.to_owned(), source }
    }
}

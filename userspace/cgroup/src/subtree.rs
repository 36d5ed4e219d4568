//! The directories of a cgroup and of its descendants, read one after the other.
//!
//! # Problem
//! The owner of a delegated subtree chooses the number and the names of its cgroups. The paths of 60,000 cgroups can have
//! 240 MB.
//!
//! # Algorithm
//! Of each level on the path to the current directory, only the names of one buffer of the kernel are kept, and the
//! position after them. The rest of the level is read when these names have been visited. No directory stays open,
//! because there can be more levels than file descriptors.
//!
//! Source: `getdents(2)`, `fs/kernfs/dir.c` (a position remains valid when other entries come and go).

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, FileType, Mode, OFlags, RawDir, SeekFrom, openat, seek};

/// Size of the buffer for names. A name has at most 255 bytes.
const BUFFER_SIZE: usize = 4 << 10;

/// Iterator over the directories of a cgroup and of its descendants. A directory that is gone has no descendants.
pub struct Subtree<F> {
    path: PathBuf,
    /// The levels of `path`, the top one first. Empty before the first directory.
    levels: Vec<Level>,
    has_begun: bool,
    is_included: F,
}

/// The subdirectories of a directory that have not been visited.
struct Level {
    /// Some of their names.
    names: Vec<OsString>,
    /// The position of the others; `None` if there are none.
    rest: Option<u64>,
}

/// Returns the directories of a cgroup and of its descendants.
pub fn subtree(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    subtree_with(dir, |_| true)
}

/// Returns the directories of a cgroup and of those descendants for which `is_included` returns true, as it does for their
/// ancestors.
pub fn subtree_with<F: FnMut(&Path) -> bool>(dir: &Path, is_included: F) -> Subtree<F> {
    Subtree { path: dir.to_owned(), levels: Vec::new(), has_begun: false, is_included }
}

impl<F> fmt::Debug for Subtree<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Subtree").field("path", &self.path).finish_non_exhaustive()
    }
}

impl<F: FnMut(&Path) -> bool> Iterator for Subtree<F> {
    type Item = PathBuf;

    fn next(&mut self) -> Option<PathBuf> {
        if !self.has_begun {
            self.has_begun = true;
            self.levels.push(Level::default());
            return Some(self.path.clone());
        }
        loop {
            let level = self.levels.last_mut()?;
            if let Some(name) = level.names.pop() {
                self.path.push(name);
                if (self.is_included)(&self.path) {
                    self.levels.push(Level::default());
                    return Some(self.path.clone());
                }
                self.path.pop();
            } else if let Some(position) = level.rest.take() {
                level.rest = read_names(&self.path, position, &mut level.names).ok().flatten();
            } else {
                self.levels.pop();
                self.path.pop();
            }
        }
    }
}

impl Default for Level {
    fn default() -> Self {
        Self { names: Vec::new(), rest: Some(0) }
    }
}

/// Reads names of subdirectories from this position. Returns the position of the rest; `None` at the end.
fn read_names(dir: &Path, position: u64, names: &mut Vec<OsString>) -> io::Result<Option<u64>> {
    let dir = openat(CWD, dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    seek(&dir, SeekFrom::Start(position))?;
    let mut buffer = [MaybeUninit::uninit(); BUFFER_SIZE];
    let mut entries = RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if entry.file_type() == FileType::Directory && name != "." && name != ".." {
            names.push(name.to_owned());
        }
        let rest = entry.next_entry_cookie();
        if entries.is_buffer_empty() {
            return Ok(Some(rest));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use numaward_tests_support::{create_long_paths, is_alone, peak, reset_peak};

    use super::*;

    #[test]
    fn visits_each_directory_once() {
        let root = tempfile::tempdir().unwrap();
        let mut expected = BTreeSet::from([root.path().to_owned()]);
        for name in ["a", "a/b", "a/b/c", "a/d", "e", "e/x", "e/x/y"] {
            let dir = root.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("cgroup.procs"), "").unwrap();
            expected.insert(dir);
        }
        // More names than a buffer has room for.
        for number in 0..500 {
            let dir = root.path().join(format!("a/{number:0100}"));
            fs::create_dir(&dir).unwrap();
            expected.insert(dir);
        }
        let found: Vec<_> = subtree(root.path()).collect();
        assert_eq!(found.len(), expected.len());
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);

        let without: Vec<_> = subtree_with(&root.path().join("e"), |path| !path.ends_with("x")).collect();
        assert_eq!(without, [root.path().join("e")]);
        assert_eq!(subtree(&root.path().join("gone")).count(), 1);
    }

    #[test]
    fn removed_directory_has_no_descendants() {
        let root = tempfile::tempdir().unwrap();
        for number in 0..3 {
            fs::create_dir_all(root.path().join(format!("{number}/below"))).unwrap();
        }
        let mut found = subtree(root.path());
        found.next().unwrap();
        let first = found.next().unwrap();
        fs::remove_dir_all(&first).unwrap();
        assert_eq!(found.count(), 4, "two others with a descendant each");
    }

    /// Any user with a delegated subtree can have as many cgroups under names that long.
    #[test]
    fn bounds_memory_for_many_long_paths() {
        const DIRECTORIES: usize = 4000;
        const CEILING: u64 = 4 << 20;
        if !is_alone() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let below = create_long_paths(root.path(), DIRECTORIES, "cgroup.procs", "");
        reset_peak();
        let before = peak();
        assert_eq!(subtree(root.path()).count(), 1 + below);
        let most = peak();
        assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
    }
}

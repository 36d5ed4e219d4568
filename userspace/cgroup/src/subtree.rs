//! The directories of a cgroup and of its descendants, read one after the other.
//!
//! # Problem
//! The owner of a delegated subtree chooses the number and the names of its cgroups. The paths of 60,000 cgroups can have
//! 240 MB.
//!
//! # Algorithm
//! Of each level on the path to the current directory, only the names of about one buffer of the kernel are kept, and
//! the position of the last one. The rest of the level is read when these names have been visited. No directory stays
//! open, because there can be more levels than file descriptors.
//!
//! The position of a cgroup is a hash of its name with 31 bits, so several names can have the same one, also on purpose. A
//! seek to this position leads to any of them. Therefore reading stops only behind a *run*, all names with the same position;
//! it resumes in the same run, and skips the names up to the last one. The names of a run are read from the same open
//! directory, up to a maximum. The number of names of all levels has a maximum, too, so that they take some 5 MiB at most.
//!
//! Source: `getdents(2)`, `fs/kernfs/dir.c` (a position remains valid when other entries come and go).

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use crate::gone::is_gone;
use rustix::fs::{CWD, FileType, Mode, OFlags, RawDir, SeekFrom, openat, seek};

/// Size of the buffer for names. A name has at most 255 bytes.
const BUFFER_SIZE: usize = 4 << 10;
/// Maximum number of names with the same position. Two of a million random names have the same one at times.
const MAX_RUN: usize = 1024;
/// Maximum number of names that are kept for all levels. A hundred levels with short names have as many.
const MAX_NAMES: usize = 16 << 10;

/// Iterator over the directories of a cgroup and of its descendants. A directory that is gone has no descendants.
pub struct Subtree<F> {
    path: PathBuf,
    /// The levels of `path`, the top one first. Empty before the first directory.
    levels: Vec<Level>,
    /// Number of names that may still be kept.
    room: usize,
    has_begun: bool,
    is_complete: bool,
    is_included: F,
}

/// The subdirectories of a directory that have not been visited.
struct Level {
    /// Some of their names.
    names: Vec<OsString>,
    /// The end of the names that have been read; `None` if there are no others.
    rest: Option<End>,
}

/// The end of a part of a directory.
#[derive(Debug, Default)]
struct End {
    /// Position of the last entry.
    position: u64,
    /// Name of the last entry; empty at the start of the directory.
    name: OsString,
}

/// A part of a directory while it is read: whole runs of entries.
struct Part<'a> {
    names: &'a mut Vec<OsString>,
    is_complete: &'a mut bool,
    /// Number of names that may still be added.
    room: &'a mut usize,
    /// The end of the part before.
    before: End,
    /// True in the run of `before`.
    is_in_known_run: bool,
    /// Position of the next entry.
    position: u64,
    /// Number of the entries of the present run.
    run: usize,
    /// True if the names of a buffer have been read.
    is_full: bool,
}

/// An entry of a directory.
#[derive(Clone, Copy)]
struct Entry<'a> {
    name: &'a OsStr,
    is_directory: bool,
    /// Position of the entry behind it.
    next: u64,
    /// True for the last entry in the kernel's buffer.
    is_buffer_end: bool,
}

/// Returns the directories of a cgroup and of its descendants.
pub fn subtree(dir: &Path) -> Subtree<fn(&Path) -> bool> {
    subtree_with(dir, |_| true)
}

/// Returns the directories of a cgroup and of those descendants for which `is_included` returns true, as it does for their
/// ancestors.
pub fn subtree_with<F: FnMut(&Path) -> bool>(dir: &Path, is_included: F) -> Subtree<F> {
    Subtree {
        path: dir.to_owned(),
        levels: Vec::new(),
        room: MAX_NAMES,
        has_begun: false,
        is_complete: true,
        is_included,
    }
}

impl<F> Subtree<F> {
    /// Returns false if directories were skipped: a directory cannot be read, its path is too long, or there are more names, with the
    /// same position or on all levels together, than any user has by chance.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }
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
                self.room += 1;
                self.path.push(name);
                if (self.is_included)(&self.path) {
                    self.levels.push(Level::default());
                    return Some(self.path.clone());
                }
                self.path.pop();
            } else if let Some(before) = level.rest.take() {
                let part = Part::behind(before, &mut level.names, &mut self.is_complete, &mut self.room);
                level.rest = match read_part(&self.path, part) {
                    Ok(end) => end,
                    Err(error) => {
                        self.is_complete &= is_gone(&error);
                        None
                    }
                };
            } else {
                self.levels.pop();
                self.path.pop();
            }
        }
    }
}

impl Default for Level {
    fn default() -> Self {
        Self { names: Vec::new(), rest: Some(End::default()) }
    }
}

impl<'a> Part<'a> {
    fn behind(
        before: End,
        names: &'a mut Vec<OsString>,
        is_complete: &'a mut bool,
        room: &'a mut usize,
    ) -> Self {
        let (position, is_in_known_run) = (before.position, !before.name.is_empty());
        Self { names, is_complete, room, before, is_in_known_run, position, run: 0, is_full: false }
    }

    /// Adds an entry. Returns the end of the part behind its last entry.
    fn add(&mut self, entry: Entry<'_>) -> Option<End> {
        let Entry { name, is_directory, next, is_buffer_end } = entry;
        let position = std::mem::replace(&mut self.position, next);
        self.run += 1;
        if self.is_in_known_run && name == self.before.name {
            *self.room += self.names.len();
            self.names.clear();
        } else if is_directory && name != "." && name != ".." {
            if self.run <= MAX_RUN && *self.room > 0 {
                *self.room -= 1;
                self.names.push(name.to_owned());
            } else {
                *self.is_complete = false;
            }
        }
        let is_run_end = next != position;
        if is_run_end {
            self.run = 0;
        }
        if self.is_in_known_run {
            // A part that ends here again would be read for ever.
            self.is_in_known_run = !is_run_end;
            return None;
        }
        self.is_full |= is_buffer_end;
        (self.is_full && is_run_end).then(|| End { position, name: name.to_owned() })
    }
}

/// Reads a part of a directory. Returns its end; `None` at the end of the directory.
fn read_part(dir: &Path, mut part: Part<'_>) -> io::Result<Option<End>> {
    let dir = openat(CWD, dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    seek(&dir, SeekFrom::Start(part.position))?;
    let mut buffer = [MaybeUninit::uninit(); BUFFER_SIZE];
    let mut entries = RawDir::new(dir, &mut buffer);
    loop {
        let Some(entry) = entries.next() else { return Ok(None) };
        let entry = entry?;
        let is_directory = entry.file_type() == FileType::Directory;
        let (name, next) = (entry.file_name().to_owned(), entry.next_entry_cookie());
        let is_buffer_end = entries.is_buffer_empty();
        let name = OsStr::from_bytes(name.to_bytes());
        let end = part.add(Entry { name, is_directory, next, is_buffer_end });
        if end.is_some() {
            return Ok(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use numaward_tests_support::{create_long_paths, create_too_long_path, is_alone, peak, reset_peak};

    use super::*;
    use crate::read::processes_below;

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
    fn unreadable_directory_is_reported() {
        let root = tempfile::tempdir().unwrap();
        create_too_long_path(root.path(), "cgroup.procs", "");
        fs::create_dir(root.path().join("other")).unwrap();
        let mut found = subtree(root.path());
        assert!(found.by_ref().any(|dir| dir.ends_with("other")) && found.by_ref().count() < 20);
        assert!(!found.is_complete());
        assert!(processes_below(root.path(), 1).is_partial);
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

    /// A directory of kernfs with names by position.
    struct Fake(Vec<(u64, String)>);

    impl Fake {
        fn new(runs: &[(u64, usize)]) -> Self {
            let names = runs.iter().flat_map(|&(position, count)| {
                (0..count).map(move |number| (position, format!("{position}-{number:05}")))
            });
            Self([(0, ".".to_owned()), (1, "..".to_owned())].into_iter().chain(names).collect())
        }

        /// Reads a part from the middle of the names with its position, or else those of the next position.
        fn read_part(&self, mut part: Part<'_>) -> Option<End> {
            const BUFFER: usize = 4;
            let first = self.0.partition_point(|(position, _)| *position < part.position);
            let behind = self.0.partition_point(|(position, _)| *position <= part.position);
            let start = first.midpoint(behind);
            let entries = self.0.get(start..)?.iter().enumerate().map(|(index, (_, name))| Entry {
                name: OsStr::new(name),
                is_directory: true,
                next: self.0.get(start + index + 1).map_or(u64::from(u32::MAX >> 1), |(next, _)| *next),
                is_buffer_end: index % BUFFER == BUFFER - 1,
            });
            entries.into_iter().find_map(|entry| part.add(entry))
        }

        /// Returns the names in the order in which they are read, and whether they are complete.
        fn names(&mut self, mut after_part: impl FnMut(&mut Self, &End)) -> (Vec<String>, bool) {
            let (mut found, mut end, mut is_complete) = (Vec::new(), Some(End::default()), true);
            let mut room = MAX_NAMES;
            for _ in 0..=self.0.len() {
                let Some(before) = end.take() else { return (found, is_complete) };
                let mut names = Vec::new();
                end = self.read_part(Part::behind(before, &mut names, &mut is_complete, &mut room));
                room += names.len();
                found.extend(names.into_iter().map(|name| name.into_string().unwrap()));
                if let Some(end) = &end {
                    after_part(self, end);
                }
            }
            panic!("endless: {} names of {}", found.len(), self.0.len());
        }
    }

    /// Any user can choose names with the same position, which is a hash without salt.
    #[test]
    fn names_with_same_position_are_read_once() {
        for runs in [
            &[(7, 1), (8, 1), (9, 1), (10, 1), (11, 1), (12, 1)][..],
            &[(7, 3), (8, 2), (9, 3), (10, 2), (11, 1)],
            &[(7, 100)],
            &[(7, 2), (8, 100), (9, 4), (10, 50)],
        ] {
            let mut dir = Fake::new(runs);
            let (found, is_complete) = dir.names(|_, _| {});
            let all: Vec<_> = dir.0.into_iter().map(|(_, name)| name).skip(2).collect();
            assert!(found == all && is_complete, "{runs:?}: {found:?}");
        }
        let (found, is_complete) = Fake::new(&[(7, MAX_RUN + 1), (8, 1)]).names(|_, _| {});
        assert!(found.len() == MAX_RUN + 1 && !is_complete, "{} names", found.len());
    }

    #[test]
    fn number_of_names_is_limited() {
        let (mut names, mut is_complete, mut room) = (Vec::new(), true, 3);
        let part = Part::behind(End::default(), &mut names, &mut is_complete, &mut room);
        assert!(Fake::new(&[(7, 100)]).read_part(part).is_some());
        assert_eq!((names.len(), is_complete, room), (3, false, 0));
    }

    #[test]
    fn no_name_is_lost_behind_a_removed_one() {
        let mut dir = Fake::new(&[(7, 3), (8, 2), (9, 3), (10, 2), (11, 1), (12, 6), (13, 1)]);
        let all: BTreeSet<_> = dir.0.iter().map(|(_, name)| name.clone()).skip(2).collect();
        let (found, _) = dir.names(|dir, end| dir.0.retain(|(_, name)| end.name != name.as_str()));
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), all);
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
        let mut found = subtree(root.path());
        assert_eq!(found.by_ref().count(), 1 + below);
        assert!(found.is_complete() && found.room == MAX_NAMES);
        let most = peak();
        assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
    }
}

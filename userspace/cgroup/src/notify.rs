//! Reports what changes in chosen cgroups, so that they need not be read again and again.
//!
//! The kernel announces to inotify when it changes `cgroup.events` or `memory.events` ("a file modified event"), and
//! which cgroups come and go in a directory. A change is announced after it has happened, so who reads then sees it.
//!
//! An announcement is a hint. A watch ends with its cgroup, and another cgroup at the same path is not watched; who
//! relies on it looks by himself now and then, and watches again: doing so twice does no harm.
//!
//! Source: inotify(7), Documentation/admin-guide/cgroup-v2.rst.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    os::fd::OwnedFd,
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};

use crate::{
    CgroupPath, Hierarchy,
    gone::is_gone,
    inotify::{drain, why_unwatched},
};

/// What of a cgroup is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WatchSubject {
    /// `cgroup.events`: it, or one below it, got its first process or lost its last.
    Processes,
    /// `memory.events`: it, or one below it, met one of its limits.
    Memory,
    /// The cgroups directly below it come and go.
    Children,
}

impl WatchSubject {
    fn flags(self) -> WatchFlags {
        match self {
            Self::Processes | Self::Memory => WatchFlags::MODIFY,
            Self::Children => {
                WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW
            }
        }
    }
}

/// What was reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Notice {
    /// `cgroup.events` or `memory.events` of this cgroup changed.
    Changed(CgroupPath, WatchSubject),
    /// This cgroup, directly below one whose children are watched, came or went.
    ChildChanged(CgroupPath),
    /// More happened than the kernel keeps: anything may have changed.
    Overflow,
}

/// Nothing (more) can be watched.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct NotifyError {
    reason: String,
    #[source]
    source: io::Error,
}

impl NotifyError {
    fn new(errno: Errno, watches: usize) -> Self {
        Self { reason: why_unwatched(errno, watches), source: errno.into() }
    }
}

type Key = (CgroupPath, WatchSubject);

/// Watches chosen cgroups.
#[derive(Debug)]
pub struct Notifier {
    hierarchy: Hierarchy,
    inotify: OwnedFd,
    watched: HashMap<i32, Key>,
    watches: BTreeMap<Key, i32>,
}

impl Notifier {
    /// Watches nothing yet.
    pub fn new(hierarchy: Hierarchy) -> Result<Self, NotifyError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|errno| NotifyError::new(errno, 0))?;
        Ok(Self { hierarchy, inotify, watched: HashMap::new(), watches: BTreeMap::new() })
    }

    /// Watches this of a cgroup, also if it was watched before; `false` if it is not there.
    pub fn watch(&mut self, path: &CgroupPath, subject: WatchSubject) -> Result<bool, NotifyError> {
        let dir = self.hierarchy.dir(path);
        let target = match subject {
            WatchSubject::Processes => dir.join("cgroup.events"),
            WatchSubject::Memory => dir.join("memory.events"),
            WatchSubject::Children => dir,
        };
        let watch = match inotify::add_watch(&self.inotify, target, subject.flags()) {
            Ok(watch) => watch,
            Err(errno) if is_gone(&errno.into()) => {
                self.unwatch(path, subject);
                return Ok(false);
            }
            Err(errno) => return Err(NotifyError::new(errno, self.watches.len())),
        };
        let key = (path.clone(), subject);
        if let Some(before) = self.watches.insert(key.clone(), watch).filter(|before| *before != watch) {
            // That of a cgroup that had the path before.
            self.end(before);
        }
        self.watched.insert(watch, key);
        Ok(true)
    }

    /// Stops watching this of a cgroup. To be done also where it is gone: older kernels keep a removed cgroup, and its
    /// memory, for as long as it is watched.
    pub fn unwatch(&mut self, path: &CgroupPath, subject: WatchSubject) {
        if let Some(watch) = self.watches.remove(&(path.clone(), subject)) {
            self.end(watch);
        }
    }

    fn end(&mut self, watch: i32) {
        self.watched.remove(&watch);
        // The kernel may have ended it already.
        let _ = inotify::remove_watch(&self.inotify, watch);
    }

    /// What happened since the last call; does not wait. What repeats itself is reported once.
    pub fn read(&mut self) -> Result<BTreeSet<Notice>, NotifyError> {
        let mut reported = Vec::new();
        let drained = drain(&self.inotify, &mut reported);
        let mut notices = BTreeSet::new();
        for reported in reported {
            if reported.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                notices.insert(Notice::Overflow);
                continue;
            }
            let Some((path, subject)) = self.watched.get(&reported.watch) else { continue };
            if reported.flags.contains(ReadFlags::IGNORED) {
                let key = (path.clone(), *subject);
                self.watched.remove(&reported.watch);
                self.watches.remove(&key);
            } else if *subject != WatchSubject::Children {
                notices.insert(Notice::Changed(path.clone(), *subject));
            } else if let Some(name) = reported.name.filter(|_| reported.flags.contains(ReadFlags::ISDIR))
                && let Ok(child) = path.child(&name)
            {
                notices.insert(Notice::ChildChanged(child));
            }
        }
        drained.map_err(|errno| NotifyError::new(errno, self.watches.len()))?;
        Ok(notices)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn path(text: &str) -> CgroupPath {
        text.parse().unwrap()
    }

    /// Plain files that a process writes are announced as those are that the kernel changes.
    fn tree(cgroups: &[&str]) -> (tempfile::TempDir, Notifier) {
        let dir = tempfile::tempdir().unwrap();
        for cgroup in cgroups {
            fs::create_dir_all(dir.path().join(cgroup)).unwrap();
            fs::write(dir.path().join(cgroup).join("cgroup.events"), "populated 1\n").unwrap();
        }
        let notifier = Notifier::new(Hierarchy::at(dir.path())).unwrap();
        (dir, notifier)
    }

    #[test]
    fn changes_are_reported_once_and_of_what_is_watched() {
        let (dir, mut notifier) = tree(&["a", "b"]);
        assert!(notifier.watch(&path("/a"), WatchSubject::Processes).unwrap());
        assert!(notifier.watch(&path("/a"), WatchSubject::Processes).unwrap(), "twice does no harm");
        assert!(!notifier.watch(&path("/a"), WatchSubject::Memory).unwrap(), "not there");
        assert!(!notifier.watch(&path("/c"), WatchSubject::Processes).unwrap());
        assert_eq!(notifier.read().unwrap(), BTreeSet::new());
        for cgroup in ["a", "a", "b"] {
            fs::write(dir.path().join(cgroup).join("cgroup.events"), "populated 0\n").unwrap();
        }
        assert_eq!(notifier.read().unwrap(), [Notice::Changed(path("/a"), WatchSubject::Processes)].into());
        assert_eq!(notifier.read().unwrap(), BTreeSet::new());
        notifier.unwatch(&path("/a"), WatchSubject::Processes);
        fs::write(dir.path().join("a/cgroup.events"), "populated 1\n").unwrap();
        assert_eq!(notifier.read().unwrap(), BTreeSet::new());
    }

    #[test]
    fn children_that_come_and_go_are_reported() {
        let (dir, mut notifier) = tree(&["a", "a/b"]);
        assert!(notifier.watch(&path("/a"), WatchSubject::Children).unwrap());
        fs::remove_file(dir.path().join("a/b/cgroup.events")).unwrap();
        fs::remove_dir(dir.path().join("a/b")).unwrap();
        fs::create_dir_all(dir.path().join("a/c/d")).unwrap();
        fs::write(dir.path().join("a/file"), "").unwrap();
        let reported = notifier.read().unwrap();
        assert_eq!(reported, ["/a/b", "/a/c"].map(|child| Notice::ChildChanged(path(child))).into());
    }

    #[test]
    fn another_cgroup_at_the_same_path_is_watched_anew() {
        let (dir, mut notifier) = tree(&["a"]);
        assert!(notifier.watch(&path("/a"), WatchSubject::Processes).unwrap());
        fs::remove_dir_all(dir.path().join("a")).unwrap();
        notifier.read().unwrap();
        assert!(notifier.watched.is_empty() && notifier.watches.is_empty(), "{notifier:?}");
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/cgroup.events"), "populated 0\n").unwrap();
        assert_eq!(notifier.read().unwrap(), BTreeSet::new());
        assert!(notifier.watch(&path("/a"), WatchSubject::Processes).unwrap());
        fs::write(dir.path().join("a/cgroup.events"), "populated 1\n").unwrap();
        assert_eq!(notifier.read().unwrap().len(), 1);
        assert_eq!((notifier.watched.len(), notifier.watches.len()), (1, 1));
    }

    #[test]
    fn an_overflow_says_that_anything_may_have_changed() {
        let (dir, mut notifier) = tree(&["a", "b"]);
        for cgroup in ["/a", "/b"] {
            assert!(notifier.watch(&path(cgroup), WatchSubject::Processes).unwrap());
        }
        let limit: usize =
            fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
        // In turns: what repeats itself at once is merged.
        for turn in 0..=limit {
            let cgroup = ["a", "b"][turn % 2];
            fs::write(dir.path().join(cgroup).join("cgroup.events"), "1").unwrap();
        }
        assert!(notifier.read().unwrap().contains(&Notice::Overflow));
    }
}

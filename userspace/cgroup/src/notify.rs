//! Notifications about changes in selected cgroups, so that they need not be polled.
//!
//! The kernel notifies inotify when it changes `cgroup.events` or `memory.events` ("a file modified event"), and when
//! cgroups are created or removed in a directory. The notification comes after the change, so a reader then sees the
//! new value.
//!
//! A notification is only a hint. A watch ends with its cgroup, and a new cgroup at the same path is not watched.
//! Callers that rely on the values therefore also read them periodically and set the watch again each time. Setting a
//! watch twice does no harm.
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
    inotify::{drain, watch_problem},
};

/// The watched aspect of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WatchSubject {
    /// `cgroup.events`: the cgroup or its descendants got their first process or lost their last one.
    Processes,
    /// `memory.events`: the cgroup or one of its descendants reached a limit.
    Memory,
    /// A child of the cgroup was created or removed.
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

/// A notification.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Notice {
    /// `cgroup.events` or `memory.events` of this cgroup changed.
    Changed(CgroupPath, WatchSubject),
    /// This cgroup was created or removed; the children of its parent are watched.
    ChildChanged(CgroupPath),
    /// The kernel's queue overflowed: anything may have changed.
    Overflow,
}

/// No (further) cgroup can be watched.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct NotifyError {
    reason: String,
    #[source]
    source: io::Error,
}

impl NotifyError {
    fn new(errno: Errno, watches: usize) -> Self {
        Self { reason: watch_problem(errno, watches), source: errno.into() }
    }
}

type Key = (CgroupPath, WatchSubject);

/// A set of watches on selected cgroups.
#[derive(Debug)]
pub struct Notifier {
    hierarchy: Hierarchy,
    inotify: OwnedFd,
    watched: HashMap<i32, Key>,
    watches: BTreeMap<Key, i32>,
}

impl Notifier {
    /// Creates a notifier without watches.
    pub fn new(hierarchy: Hierarchy) -> Result<Self, NotifyError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|errno| NotifyError::new(errno, 0))?;
        Ok(Self { hierarchy, inotify, watched: HashMap::new(), watches: BTreeMap::new() })
    }

    /// Watches an aspect of a cgroup, even if it is already watched. Returns `false` if the cgroup does not exist.
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
            // The old watch belongs to an earlier cgroup at this path.
            self.end_watch(before);
        }
        self.watched.insert(watch, key);
        Ok(true)
    }

    /// Stops watching an aspect of a cgroup. Also necessary for a removed cgroup: older kernels keep it and its memory
    /// as long as it is watched.
    pub fn unwatch(&mut self, path: &CgroupPath, subject: WatchSubject) {
        if let Some(watch) = self.watches.remove(&(path.clone(), subject)) {
            self.end_watch(watch);
        }
    }

    fn end_watch(&mut self, watch: i32) {
        self.watched.remove(&watch);
        // The kernel may already have ended it.
        let _ = inotify::remove_watch(&self.inotify, watch);
    }

    /// Returns the notifications since the last call, without duplicates. Does not wait.
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

    /// Plain files that a process writes cause the same notifications as files that the kernel changes.
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
    fn reports_each_change_once() {
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
    fn reports_new_and_removed_children() {
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
    fn new_cgroup_at_old_path_is_watched() {
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
    fn overflow_is_reported() {
        let (dir, mut notifier) = tree(&["a", "b"]);
        for cgroup in ["/a", "/b"] {
            assert!(notifier.watch(&path(cgroup), WatchSubject::Processes).unwrap());
        }
        let limit: usize =
            fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
        // The files alternate, because the kernel merges consecutive equal events.
        for turn in 0..=limit {
            let cgroup = ["a", "b"][turn % 2];
            fs::write(dir.path().join(cgroup).join("cgroup.events"), "1").unwrap();
        }
        assert!(notifier.read().unwrap().contains(&Notice::Overflow));
    }
}

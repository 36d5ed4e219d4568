//! Reports new and removed cgroups.
//!
//! # Algorithm
//! Every directory of the hierarchy is watched with inotify. A periodic sweep (a walk of the whole hierarchy) finds
//! changes that the watches missed. If inotify is not available (its limits are reached, or it is not permitted), the
//! watcher polls: it only sweeps, at intervals below a second, and [`Watcher::mode`] returns the reason.
//!
//! A directory is first watched and then listed, so each new entry is in the list, reported by the watch, or both. An
//! inotify event may be outdated: the watcher only uses its name and checks the current state of that path.
//!
//! # Invariants
//! - Each cgroup is reported as added exactly once before it is reported as removed.
//! - A parent is added before and removed after its descendants.
//! - A new cgroup at the path of a removed one is another cgroup.
//! - A cgroup that was created and removed between two checks is not reported.
//!
//! Source: inotify(7).

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    time::Timespec,
};

use crate::{
    Cgroup, CgroupId, CgroupPath, Hierarchy, WalkError,
    gone::is_gone,
    hierarchy::DirStat,
    inotify::{InotifyEvent, drain, watch_problem},
    tracking_limits::{Delegation, TrackedCounts},
};

/// A change of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupEvent {
    /// The cgroup is new, or existed when the watch began.
    Added(Cgroup),
    /// The cgroup is gone.
    Removed(Cgroup),
}

/// The method by which new cgroups are detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchMode {
    /// Each directory is watched by inotify; sweeps are only a safety net.
    Inotify,
    /// Sweeps only.
    Polling {
        /// The reason why inotify is not used, and the remedy.
        reason: String,
    },
}

/// The intervals between sweeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// The interval while directories are watched.
    pub sweep_watched: Duration,
    /// The interval without watches. It limits the delay with which a new cgroup is detected.
    pub sweep_unwatched: Duration,
}

impl Default for WatchOptions {
    /// Returns 30 seconds and 800 milliseconds.
    fn default() -> Self {
        Self { sweep_watched: Duration::from_secs(30), sweep_unwatched: Duration::from_millis(800) }
    }
}

/// The inverse of the share of time that sweeps may take.
const SWEEP_INTERVAL_FACTOR: u32 = 10;

/// Tracks the cgroups of a hierarchy.
///
/// [`next`](Self::next) blocks at most for the given time, so that a thread can call it in a loop.
#[derive(Debug)]
pub struct Watcher {
    hierarchy: Hierarchy,
    options: WatchOptions,
    inotify: Option<OwnedFd>,
    mode: WatchMode,
    known: BTreeMap<CgroupPath, TrackedCgroup>,
    watched: HashMap<i32, CgroupPath>,
    counts: TrackedCounts,
    events: Vec<CgroupEvent>,
    /// The earliest start of the next sweep, so that many cgroups or events cannot keep the watcher busy.
    no_sweep_before: Instant,
    sweep_due: Instant,
}

#[derive(Clone, Debug)]
struct TrackedCgroup {
    id: CgroupId,
    watch: Option<i32>,
    delegation: Delegation,
}

impl Watcher {
    /// Creates a watcher. The first call of [`next`](Self::next) reports all existing cgroups.
    pub fn new(hierarchy: Hierarchy, options: WatchOptions) -> Self {
        let (inotify, mode) = match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
            Ok(fd) => (Some(fd), WatchMode::Inotify),
            Err(error) => (None, WatchMode::Polling { reason: watch_problem(error, 0) }),
        };
        Self {
            hierarchy,
            options,
            inotify,
            mode,
            known: BTreeMap::new(),
            watched: HashMap::new(),
            counts: TrackedCounts::default(),
            events: Vec::new(),
            no_sweep_before: Instant::now(),
            sweep_due: Instant::now(),
        }
    }

    /// Returns the changes since the last call. If there are none, waits at most `timeout` for one.
    ///
    /// # Errors
    ///
    /// The hierarchy itself cannot be listed. Changes that were found are returned by the next call.
    pub fn next(&mut self, timeout: Duration) -> Result<Vec<CgroupEvent>, WalkError> {
        let start = Instant::now();
        loop {
            self.read_inotify()?;
            let now = Instant::now();
            if now >= self.sweep_due {
                // Also after an error: a broken hierarchy must not keep the watcher busy.
                self.sweep_due = now + self.sweep_interval();
                let swept = self.sweep();
                self.no_sweep_before = Instant::now() + now.elapsed() * SWEEP_INTERVAL_FACTOR;
                swept?;
                // The sweep may have switched to polling.
                self.sweep_due = (now + self.sweep_interval()).max(self.no_sweep_before);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if !self.events.is_empty() || left.is_zero() {
                return Ok(std::mem::take(&mut self.events));
            }
            self.wait(left.min(self.sweep_due.saturating_duration_since(Instant::now())));
        }
    }

    /// Returns a descriptor that becomes readable when there is a change; `None` if nothing is watched.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Returns the method of detection. It changes at most once, from inotify to polling.
    pub fn mode(&self) -> &WatchMode {
        &self.mode
    }

    /// Describes the subtrees in which cgroups are not tracked because there are too many, if there are any.
    pub fn limit_exceeded(&self) -> Option<String> {
        self.counts.limit_problem()
    }

    /// Returns the current cgroups, including changes that the next call reports. Each comes before its descendants.
    pub fn cgroups(&self) -> impl Iterator<Item = Cgroup> + '_ {
        self.known.iter().map(|(path, known)| Cgroup { id: known.id, path: path.clone() })
    }

    fn sweep_interval(&self) -> Duration {
        match self.mode {
            WatchMode::Inotify => self.options.sweep_watched,
            WatchMode::Polling { .. } => self.options.sweep_unwatched,
        }
    }

    fn wait(&self, time: Duration) {
        let Some(inotify) = &self.inotify else { return std::thread::sleep(time) };
        let Ok(timeout) = Timespec::try_from(time) else { return std::thread::sleep(time) };
        // The caller checks for events after any result.
        let _ = poll(&mut [PollFd::new(inotify, PollFlags::IN)], Some(&timeout));
    }

    fn read_inotify(&mut self) -> Result<(), WalkError> {
        for event in self.read_events() {
            if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.sweep_due = Instant::now().max(self.no_sweep_before);
            } else if event.flags.contains(ReadFlags::IGNORED) {
                self.watched.remove(&event.watch);
            } else if let Some(name) = event.name.filter(|_| event.flags.contains(ReadFlags::ISDIR))
                && let Some(parent) = self.watched.get(&event.watch)
                && let Ok(path) = parent.child(&name)
            {
                self.update(path)?;
            }
        }
        Ok(())
    }

    /// Reads all pending inotify events.
    fn read_events(&mut self) -> Vec<InotifyEvent> {
        let mut all = Vec::new();
        let drained = self.inotify.as_ref().map_or(Ok(()), |fd| drain(fd, &mut all));
        if let Err(error) = drained {
            self.stop_watching(format!("cannot read inotify events: {error}"));
        }
        all
    }

    /// Compares the whole hierarchy with the tracked cgroups.
    fn sweep(&mut self) -> Result<(), WalkError> {
        let mut counts = self.counts.new_counts();
        let found = self.hierarchy.walk_with_counts(&mut counts)?;
        self.counts.note_exceeded(counts);
        let mut gone: BTreeMap<&CgroupPath, CgroupId> =
            self.known.iter().map(|(path, known)| (path, known.id)).collect();
        let new: Vec<&Cgroup> =
            found.iter().filter(|cgroup| gone.remove(&cgroup.path) != Some(cgroup.id)).collect();
        let gone: Vec<CgroupPath> = gone.into_keys().cloned().collect();
        for path in gone {
            self.update(path)?;
        }
        for cgroup in new {
            self.update(cgroup.path.clone())?;
        }
        Ok(())
    }

    /// Updates the state of `path`, and of its descendants if it is new.
    fn update(&mut self, path: CgroupPath) -> Result<(), WalkError> {
        let mut unseen = vec![path];
        while let Some(path) = unseen.pop() {
            // The parent is not tracked.
            let Some(above) = self.delegation_above(&path) else { continue };
            let known = self.known.get(&path).cloned();
            if known.is_none() && above.is_some() && !self.counts.has_room(&path, &above) {
                continue;
            }
            let dir = self.hierarchy.dir(&path);
            let watch = self.watch(&path);
            let stat = match DirStat::read(&dir) {
                Ok(stat) => stat,
                Err(error) if is_gone(&error) => {
                    self.forget(&path);
                    self.unwatch(watch);
                    continue;
                }
                Err(source) => return Err(WalkError { path: dir, source }),
            };
            let delegation = match known {
                Some(known) if known.id == stat.id && known.watch == watch => continue,
                // The watch belongs to an earlier cgroup at this path.
                Some(known) if known.id == stat.id => {
                    self.unwatch(known.watch);
                    known.delegation
                }
                _ => {
                    self.forget(&path);
                    let delegation = self.counts.delegation(&path, stat.owner, &above);
                    if !self.counts.add(&path, &delegation) {
                        self.unwatch(watch);
                        continue;
                    }
                    self.events.push(CgroupEvent::Added(Cgroup { id: stat.id, path: path.clone() }));
                    delegation
                }
            };
            // One more than allowed, to detect that the limit is exceeded.
            let most = self.counts.remaining(&delegation) + 1;
            self.known.insert(path.clone(), TrackedCgroup { id: stat.id, watch, delegation });
            if let Some(watch) = watch {
                self.watched.insert(watch, path.clone());
            }
            if stat.is_leaf {
                continue;
            }
            match self.hierarchy.children(&path, most) {
                Ok(children) => unseen.extend(children.into_iter().map(|(child, _)| child)),
                Err(error) if is_gone(&error) => self.forget(&path),
                Err(source) => return Err(WalkError { path: dir, source }),
            }
        }
        Ok(())
    }

    /// Returns the delegation of a cgroup's parent, if the parent is tracked.
    fn delegation_above(&self, path: &CgroupPath) -> Option<Delegation> {
        match path.parent() {
            Some(parent) => Some(self.known.get(&parent)?.delegation.clone()),
            None => Some(None),
        }
    }

    /// Stops tracking a cgroup and its descendants.
    fn forget(&mut self, path: &CgroupPath) {
        let below = self.known.range(path..).take_while(|(other, _)| path.contains(other));
        let gone: Vec<(CgroupPath, TrackedCgroup)> =
            below.map(|(path, known)| (path.clone(), known.clone())).collect();
        for (path, known) in gone.into_iter().rev() {
            self.known.remove(&path);
            self.unwatch(known.watch);
            self.counts.remove(&known.delegation);
            self.events.push(CgroupEvent::Removed(Cgroup { id: known.id, path }));
        }
    }

    /// Watches a directory. `None` if it does not exist or cannot be watched.
    fn watch(&mut self, path: &CgroupPath) -> Option<i32> {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        match inotify::add_watch(self.inotify.as_ref()?, self.hierarchy.dir(path), flags) {
            Ok(watch) => Some(watch),
            Err(error) if is_gone(&io::Error::from(error)) => None,
            Err(error) => {
                self.stop_watching(watch_problem(error, self.watched.len()));
                None
            }
        }
    }

    /// Ends a watch. Older kernels otherwise keep the watch of a removed cgroup, and the cgroup's memory with it.
    fn unwatch(&mut self, watch: Option<i32>) {
        if let (Some(watch), Some(inotify)) = (watch, &self.inotify) {
            self.watched.remove(&watch);
            // Newer kernels have already ended it.
            let _ = inotify::remove_watch(inotify, watch);
        }
    }

    /// Switches to polling. All watches are released for other programs.
    fn stop_watching(&mut self, reason: String) {
        self.inotify = None;
        self.watched.clear();
        for known in self.known.values_mut() {
            known.watch = None;
        }
        self.mode = WatchMode::Polling { reason };
        self.sweep_due = self.sweep_due.min(Instant::now() + self.options.sweep_unwatched);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, process::Command};

    use numaward_tests_support::skip_outside_ci;

    use super::*;
    use crate::tracking_limits::{MAX_DELEGATED_PATH, MAX_PER_DELEGATION};

    /// Long enough for every pending event to be reported.
    const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

    struct Tree {
        dir: tempfile::TempDir,
        watcher: Watcher,
    }

    impl Tree {
        /// Creates a tree with these directories, all of them reported.
        fn new(dirs: &[&str], options: WatchOptions) -> Self {
            // In memory if possible, because thousands of directories are created and removed.
            let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
            for path in dirs {
                fs::create_dir_all(dir.path().join(path)).unwrap();
            }
            let watcher = Watcher::new(Hierarchy::at(dir.path()), options);
            let mut tree = Self { dir, watcher };
            assert_eq!(tree.read_events().len(), tree.watcher.cgroups().count());
            tree
        }

        /// Creates a tree that sweeps only once, so that all further events come from a watch.
        fn without_sweeps(dirs: &[&str]) -> Self {
            let never = Duration::from_hours(1);
            Self::new(dirs, WatchOptions { sweep_watched: never, sweep_unwatched: never })
        }

        /// Returns the events as `+PATH` and `-PATH`.
        fn read_events(&mut self) -> Vec<String> {
            let events = self.watcher.next(REPORT_TIMEOUT).unwrap();
            events
                .iter()
                .map(|event| match event {
                    CgroupEvent::Added(cgroup) => format!("+{}", cgroup.path),
                    CgroupEvent::Removed(cgroup) => format!("-{}", cgroup.path),
                })
                .collect()
        }

        fn path(&self, path: &str) -> std::path::PathBuf {
            self.dir.path().join(path)
        }

        /// Asserts that the watcher's state matches the tree.
        fn check(&self) {
            let mut there = self.watcher.hierarchy.walk().unwrap();
            there.sort_by(|a, b| a.path.cmp(&b.path));
            assert_eq!(self.watcher.cgroups().collect::<Vec<_>>(), there);
        }
    }

    #[test]
    fn reports_parents_before_children() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir_all(tree.path().join("a/b/c")).unwrap();
        fs::write(tree.path().join("a/cgroup.procs"), "").unwrap();
        let mut watcher = Watcher::new(Hierarchy::at(tree.path()), WatchOptions::default());
        let events = watcher.next(REPORT_TIMEOUT).unwrap();
        let paths: Vec<&str> = events
            .iter()
            .map(|event| match event {
                CgroupEvent::Added(cgroup) => cgroup.path.as_str(),
                CgroupEvent::Removed(cgroup) => panic!("{cgroup:?}"),
            })
            .collect();
        assert_eq!(paths, ["/", "/a", "/a/b", "/a/b/c"]);
        assert_eq!(watcher.mode(), &WatchMode::Inotify);
        assert_eq!(watcher.next(Duration::ZERO).unwrap(), []);
    }

    #[test]
    fn limits_cgroups_of_delegated_tree() {
        let options = WatchOptions { sweep_watched: Duration::from_millis(1), ..WatchOptions::default() };
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let watcher = Watcher::new(Hierarchy::at(dir.path()), options);
        let mut tree = Tree { dir, watcher };
        // The directories have another owner than the root.
        tree.watcher.counts = TrackedCounts::owned_by(u32::MAX);
        fs::create_dir_all(tree.path("user/a/flood")).unwrap();
        for number in 0..MAX_PER_DELEGATION {
            fs::create_dir(tree.path(&format!("user/a/flood/{number}"))).unwrap();
        }
        fs::create_dir_all(tree.path("ours/one")).unwrap();
        let below = |tree: &Tree, path: &str| {
            let path: CgroupPath = path.parse().unwrap();
            tree.watcher.cgroups().filter(|cgroup| path.contains(&cgroup.path)).count()
        };
        tree.watcher.next(REPORT_TIMEOUT).unwrap();
        assert_eq!((below(&tree, "/user"), below(&tree, "/ours")), (MAX_PER_DELEGATION, 2));
        let problem = tree.watcher.limit_exceeded().unwrap();
        assert!(
            problem
                .starts_with("there are too many cgroups, or too long paths, below /user: 4096 are followed"),
            "{problem}"
        );
        assert_eq!(
            tree.watcher.hierarchy.walk().unwrap().len(),
            MAX_PER_DELEGATION + 6,
            "a new walk takes the root's owner from its directory"
        );

        // After some were removed, further ones are tracked, until none is missing.
        for number in 0..10 {
            fs::remove_dir(tree.path(&format!("user/a/flood/{number}"))).unwrap();
        }
        let until = Instant::now() + Duration::from_mins(1);
        while tree.watcher.limit_exceeded().is_some() && Instant::now() < until {
            tree.watcher.next(Duration::from_millis(100)).unwrap();
        }
        assert_eq!((below(&tree, "/user"), tree.watcher.limit_exceeded()), (MAX_PER_DELEGATION - 7, None));
    }

    #[test]
    fn limits_paths_of_delegated_tree() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let watcher = Watcher::new(Hierarchy::at(dir.path()), WatchOptions::default());
        let mut tree = Tree { dir, watcher };
        tree.watcher.counts = TrackedCounts::owned_by(u32::MAX);
        let long = vec!["x".repeat(250); 5].join("/");
        fs::create_dir_all(tree.path(&format!("user/{long}"))).unwrap();
        fs::create_dir_all(tree.path("user/short")).unwrap();
        tree.watcher.next(REPORT_TIMEOUT).unwrap();
        let below: Vec<_> =
            tree.watcher.cgroups().filter(|of| of.path.as_str().starts_with("/user")).collect();
        assert_eq!(below.len(), 6, "the fifth long name exceeds the limit");
        assert!(below.iter().all(|of| of.path.as_str().len() <= MAX_DELEGATED_PATH));
        let problem = tree.watcher.limit_exceeded().unwrap();
        assert!(problem.contains("below /user: ") && problem.contains("1024 bytes"), "{problem}");
        // A long path outside of delegations is tracked.
        let (root, _) = (tree.dir, tree.watcher);
        let mut own = Watcher::new(Hierarchy::at(root.path()), WatchOptions::default());
        own.next(REPORT_TIMEOUT).unwrap();
        assert_eq!((own.cgroups().count(), own.limit_exceeded()), (8, None));
    }

    #[test]
    fn watches_report_changes() {
        let mut tree = Tree::without_sweeps(&["a"]);
        fs::create_dir(tree.path("a/b")).unwrap();
        assert_eq!(tree.read_events(), ["+/a/b"]);
        fs::create_dir(tree.path("a/b/c")).unwrap();
        assert_eq!(tree.read_events(), ["+/a/b/c"], "a new directory is watched too");
        fs::remove_dir(tree.path("a/b/c")).unwrap();
        fs::remove_dir(tree.path("a/b")).unwrap();
        assert_eq!(tree.read_events(), ["-/a/b/c", "-/a/b"]);
        fs::write(tree.path("a/file"), "").unwrap();
        assert!(tree.read_events().is_empty());
        tree.check();
    }

    #[test]
    fn reports_children_of_new_directory() {
        let mut tree = Tree::without_sweeps(&[]);
        fs::create_dir_all(tree.path("a/b/c")).unwrap();
        assert_eq!(tree.read_events(), ["+/a", "+/a/b", "+/a/b/c"]);
        fs::create_dir(tree.path("a/b/c/d")).unwrap();
        assert_eq!(tree.read_events(), ["+/a/b/c/d"]);
        tree.check();
    }

    #[test]
    fn skips_short_lived_cgroups() {
        let mut tree = Tree::without_sweeps(&[]);
        fs::create_dir_all(tree.path("a/b")).unwrap();
        fs::remove_dir_all(tree.path("a")).unwrap();
        assert!(tree.read_events().is_empty());
    }

    #[test]
    fn new_cgroup_at_old_path_is_reported() {
        let mut tree = Tree::without_sweeps(&["a/b"]);
        fs::remove_dir_all(tree.path("a")).unwrap();
        // Prevents the file system from reusing the inode, which the kernel never does for cgroups.
        fs::create_dir_all(tree.path("other")).unwrap();
        fs::create_dir_all(tree.path("other2")).unwrap();
        fs::create_dir_all(tree.path("a/c")).unwrap();
        let mut reported = tree.read_events();
        reported.sort();
        assert_eq!(reported, ["+/a", "+/a/c", "+/other", "+/other2", "-/a", "-/a/b"]);
        fs::create_dir(tree.path("a/c/d")).unwrap();
        assert_eq!(tree.read_events(), ["+/a/c/d"]);
        tree.check();
    }

    #[test]
    fn reports_many_changes() {
        let mut tree = Tree::without_sweeps(&["a"]);
        let dir = tree.path("a");
        let maker = std::thread::spawn(move || {
            for turn in 0..200 {
                let path = dir.join(format!("{}", turn % 7));
                fs::create_dir_all(path.join("x/y")).unwrap();
                if turn % 3 != 0 {
                    fs::remove_dir_all(&path).unwrap();
                }
            }
        });
        let mut known: BTreeMap<CgroupPath, CgroupId> =
            tree.watcher.cgroups().map(|cgroup| (cgroup.path, cgroup.id)).collect();
        loop {
            let done = maker.is_finished();
            let events = tree.watcher.next(Duration::from_millis(50)).unwrap();
            if done && events.is_empty() {
                break;
            }
            for event in events {
                match event {
                    CgroupEvent::Added(cgroup) => {
                        assert!(
                            known.contains_key(&cgroup.path.parent().unwrap()),
                            "{cgroup:?} before its parent"
                        );
                        assert_eq!(known.insert(cgroup.path, cgroup.id), None);
                    }
                    CgroupEvent::Removed(cgroup) => assert_eq!(known.remove(&cgroup.path), Some(cgroup.id)),
                }
            }
        }
        maker.join().unwrap();
        tree.check();
        assert_eq!(known.len(), tree.watcher.cgroups().count());
        assert_eq!(tree.watcher.watched.len(), known.len(), "no watch is left behind");
    }

    #[test]
    fn sweeps_report_without_watches() {
        let sweep = Duration::from_millis(20);
        let mut tree =
            Tree::new(&["a/b"], WatchOptions { sweep_watched: sweep * 1000, sweep_unwatched: sweep });
        tree.watcher.stop_watching("asked to".into());
        assert_eq!(tree.watcher.mode(), &WatchMode::Polling { reason: "asked to".into() });
        assert!(tree.watcher.fd().is_none());
        fs::create_dir_all(tree.path("c/d")).unwrap();
        assert_eq!(tree.read_events(), ["+/c", "+/c/d"]);
        fs::remove_dir_all(tree.path("a")).unwrap();
        assert_eq!(tree.read_events(), ["-/a/b", "-/a"]);
        tree.check();
    }

    #[test]
    fn sweeps_after_overflow() {
        let mut tree = Tree::without_sweeps(&["a"]);
        let limit: usize =
            fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
        for _ in 0..=limit / 2 {
            fs::create_dir(tree.path("a/again")).unwrap();
            fs::remove_dir(tree.path("a/again")).unwrap();
        }
        fs::create_dir(tree.path("late")).unwrap();
        assert_eq!(tree.read_events(), ["+/late"]);
        assert_eq!(tree.watcher.mode(), &WatchMode::Inotify);
    }

    #[test]
    fn missing_hierarchy_is_an_error() {
        let mut watcher = Watcher::new(Hierarchy::at(Path::new("/no/such/dir")), WatchOptions::default());
        let error = watcher.next(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("/no/such/dir") && error.contains("No such file"), "{error}");
    }

    /// The limit is per user namespace: the test runs itself in a namespace with a limit of four.
    #[test]
    fn polls_at_the_limit_of_watches() {
        const INSIDE: &str = "NUMAWARD_TEST_FOUR_WATCHES";
        if std::env::var_os(INSIDE).is_some() {
            let sweep = Duration::from_millis(20);
            let options = WatchOptions { sweep_watched: sweep * 1000, sweep_unwatched: sweep };
            let mut tree = Tree::new(&["a", "b"], options);
            assert_eq!(tree.watcher.mode(), &WatchMode::Inotify);
            fs::create_dir_all(tree.path("c/d/e")).unwrap();
            assert_eq!(tree.read_events(), ["+/c", "+/c/d", "+/c/d/e"]);
            let WatchMode::Polling { reason } = tree.watcher.mode() else { panic!("more than four watches") };
            assert!(reason.contains("fs.inotify.max_user_watches"), "{reason}");
            fs::create_dir_all(tree.path("c/d/f")).unwrap();
            assert_eq!(tree.read_events(), ["+/c/d/f"]);
            return;
        }
        let namespace = |script: &str| {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "sh", "-c", script]).env(INSIDE, "1");
            command
        };
        let limit = "echo 4 > /proc/sys/user/max_inotify_watches";
        if !namespace(limit).status().is_ok_and(|status| status.success()) {
            return skip_outside_ci("there are no user namespaces here");
        }
        let name = "watch::tests::polls_at_the_limit_of_watches";
        let script = format!("{limit} && exec \"$0\" --exact {name}");
        let status = namespace(&script).arg(std::env::current_exe().unwrap()).status().unwrap();
        assert!(status.success());
    }
}

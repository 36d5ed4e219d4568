//! Reports which cgroups came and went.
//!
//! Every directory of the hierarchy is watched with inotify, and a sweep (a walk of the whole hierarchy) now and
//! then finds whatever the watches missed. Where inotify cannot serve (its limits are reached, or it may not
//! be used), sweeps alone do, each within a second of the last, and [`Watcher::mode`] says why.
//!
//! Invariants: each cgroup is reported as added once before it is reported as removed; a parent is added before and
//! removed after those below it; a new cgroup at the path of a removed one is another cgroup. A cgroup that
//! came and went between two looks is not reported.
//!
//! A directory is watched first and listed then, so that whatever is made in it is either listed or reported by
//! its watch, or both. When an event has a name, only what is found there now counts: events are old.
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
    census::{Census, Delegation},
    gone::is_gone,
    hierarchy::Stat,
    inotify::{Reported, drain, why_unwatched},
};

/// A cgroup came or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupEvent {
    /// It is new, or was there when the watch began.
    Added(Cgroup),
    /// It is gone.
    Removed(Cgroup),
}

/// How new cgroups are noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchMode {
    /// Each directory is watched; sweeps are only a safety net.
    Inotify,
    /// By sweeps alone.
    Polling {
        /// Why, and what to do.
        reason: String,
    },
}

/// How often to sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// Between two sweeps while directories are watched.
    pub sweep_watched: Duration,
    /// Between two sweeps where they cannot be. Bounds how late a cgroup is noticed then.
    pub sweep_unwatched: Duration,
}

impl Default for WatchOptions {
    /// 30 seconds, and 800 milliseconds.
    fn default() -> Self {
        Self { sweep_watched: Duration::from_secs(30), sweep_unwatched: Duration::from_millis(800) }
    }
}

/// Sweeps take no more than one of so many parts of the time.
const SWEEP_COST: u32 = 10;

/// Follows a hierarchy.
///
/// [`next`](Self::next) blocks for at most the time it is given, so a thread can drive it.
#[derive(Debug)]
pub struct Watcher {
    hierarchy: Hierarchy,
    options: WatchOptions,
    inotify: Option<OwnedFd>,
    mode: WatchMode,
    known: BTreeMap<CgroupPath, Known>,
    watched: HashMap<i32, CgroupPath>,
    census: Census,
    events: Vec<CgroupEvent>,
    /// No sweep begins before: so that a flood of cgroups or events does not keep us busy.
    rests_until: Instant,
    sweep_due: Instant,
}

#[derive(Clone, Debug)]
struct Known {
    id: CgroupId,
    watch: Option<i32>,
    delegation: Delegation,
}

impl Watcher {
    /// Begins to follow a hierarchy. The first [`next`](Self::next) reports every cgroup that is there.
    pub fn new(hierarchy: Hierarchy, options: WatchOptions) -> Self {
        let (inotify, mode) = match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
            Ok(fd) => (Some(fd), WatchMode::Inotify),
            Err(error) => (None, WatchMode::Polling { reason: why_unwatched(error, 0) }),
        };
        Self {
            hierarchy,
            options,
            inotify,
            mode,
            known: BTreeMap::new(),
            watched: HashMap::new(),
            census: Census::default(),
            events: Vec::new(),
            rests_until: Instant::now(),
            sweep_due: Instant::now(),
        }
    }

    /// What came and went since the last call; waits for something at most `timeout`.
    ///
    /// An error says that the hierarchy itself cannot be listed. What was found is reported by the next call.
    pub fn next(&mut self, timeout: Duration) -> Result<Vec<CgroupEvent>, WalkError> {
        let start = Instant::now();
        loop {
            self.read_inotify()?;
            let now = Instant::now();
            if now >= self.sweep_due {
                // Also where it fails, or a broken hierarchy would keep us busy.
                self.sweep_due = now + self.sweep_interval();
                let swept = self.sweep();
                self.rests_until = Instant::now() + now.elapsed() * SWEEP_COST;
                swept?;
                // It may have ended the watching.
                self.sweep_due = (now + self.sweep_interval()).max(self.rests_until);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if !self.events.is_empty() || left.is_zero() {
                return Ok(std::mem::take(&mut self.events));
            }
            self.wait(left.min(self.sweep_due.saturating_duration_since(Instant::now())));
        }
    }

    /// Readable when there is something to report; `None` where nothing is watched.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// How new cgroups are noticed. Falls from watching to sweeping for good.
    pub fn mode(&self) -> &WatchMode {
        &self.mode
    }

    /// Where cgroups are not followed as there are too many, if some are not.
    pub fn limit_exceeded(&self) -> Option<String> {
        self.census.problem()
    }

    /// The cgroups that are there now, as reported so far and by the next call. Each before those below it.
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
        // However this ends, the caller looks what there is.
        let _ = poll(&mut [PollFd::new(inotify, PollFlags::IN)], Some(&timeout));
    }

    fn read_inotify(&mut self) -> Result<(), WalkError> {
        for reported in self.reported() {
            if reported.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.sweep_due = Instant::now().max(self.rests_until);
            } else if reported.flags.contains(ReadFlags::IGNORED) {
                self.watched.remove(&reported.watch);
            } else if let Some(name) = reported.name.filter(|_| reported.flags.contains(ReadFlags::ISDIR))
                && let Some(parent) = self.watched.get(&reported.watch)
                && let Ok(path) = parent.child(&name)
            {
                self.look(path)?;
            }
        }
        Ok(())
    }

    /// All that inotify has to report.
    fn reported(&mut self) -> Vec<Reported> {
        let mut all = Vec::new();
        let drained = self.inotify.as_ref().map_or(Ok(()), |fd| drain(fd, &mut all));
        if let Err(error) = drained {
            self.stop_watching(format!("cannot read inotify events: {error}"));
        }
        all
    }

    /// Compares the whole hierarchy with what is known.
    fn sweep(&mut self) -> Result<(), WalkError> {
        let mut census = self.census.anew();
        let found = self.hierarchy.walk_counting(&mut census)?;
        self.census.note_crowded(census);
        let mut gone: BTreeMap<&CgroupPath, CgroupId> =
            self.known.iter().map(|(path, known)| (path, known.id)).collect();
        let new: Vec<&Cgroup> =
            found.iter().filter(|cgroup| gone.remove(&cgroup.path) != Some(cgroup.id)).collect();
        let gone: Vec<CgroupPath> = gone.into_keys().cloned().collect();
        for path in gone {
            self.look(path)?;
        }
        for cgroup in new {
            self.look(cgroup.path.clone())?;
        }
        Ok(())
    }

    /// Makes what is known of `path`, and of all below if it is new, what is found there.
    fn look(&mut self, path: CgroupPath) -> Result<(), WalkError> {
        let mut unseen = vec![path];
        while let Some(path) = unseen.pop() {
            // What is above it is not followed.
            let Some(above) = self.delegation_above(&path) else { continue };
            let known = self.known.get(&path).cloned();
            if known.is_none() && above.is_some() && !self.census.has_room(&above) {
                continue;
            }
            let dir = self.hierarchy.dir(&path);
            let watch = self.watch(&path);
            let stat = match Stat::of(&dir) {
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
                // The watch was put on a cgroup that had the path before.
                Some(known) if known.id == stat.id => {
                    self.unwatch(known.watch);
                    known.delegation
                }
                _ => {
                    self.forget(&path);
                    let delegation = self.census.delegation(&path, stat.owner, &above);
                    if !self.census.take(&delegation) {
                        self.unwatch(watch);
                        continue;
                    }
                    self.events.push(CgroupEvent::Added(Cgroup { id: stat.id, path: path.clone() }));
                    delegation
                }
            };
            // One more, to know that there are more.
            let most = self.census.room(&delegation) + 1;
            self.known.insert(path.clone(), Known { id: stat.id, watch, delegation });
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

    /// The delegation that a cgroup's parent is in, if that is known.
    fn delegation_above(&self, path: &CgroupPath) -> Option<Delegation> {
        match path.parent() {
            Some(parent) => Some(self.known.get(&parent)?.delegation.clone()),
            None => Some(None),
        }
    }

    /// Forgets the cgroup and all below it.
    fn forget(&mut self, path: &CgroupPath) {
        let below = self.known.range(path..).take_while(|(other, _)| path.contains(other));
        let gone: Vec<(CgroupPath, Known)> =
            below.map(|(path, known)| (path.clone(), known.clone())).collect();
        for (path, known) in gone.into_iter().rev() {
            self.known.remove(&path);
            self.unwatch(known.watch);
            self.census.give_back(&known.delegation);
            self.events.push(CgroupEvent::Removed(Cgroup { id: known.id, path }));
        }
    }

    /// Watches a directory, if there is one. `None` where it is not watched.
    fn watch(&mut self, path: &CgroupPath) -> Option<i32> {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        match inotify::add_watch(self.inotify.as_ref()?, self.hierarchy.dir(path), flags) {
            Ok(watch) => Some(watch),
            Err(error) if is_gone(&io::Error::from(error)) => None,
            Err(error) => {
                self.stop_watching(why_unwatched(error, self.watched.len()));
                None
            }
        }
    }

    /// Ends a watch. Older kernels keep that of a removed cgroup otherwise, and with it the cgroup's memory.
    fn unwatch(&mut self, watch: Option<i32>) {
        if let (Some(watch), Some(inotify)) = (watch, &self.inotify) {
            self.watched.remove(&watch);
            // Other kernels have ended it already.
            let _ = inotify::remove_watch(inotify, watch);
        }
    }

    /// Leaves it to sweeps. The watches that there are go, for others to use.
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
    use crate::census::MOST_OF_ONE;

    /// Long enough for whatever is already there to be reported.
    const SOON: Duration = Duration::from_millis(500);

    struct Tree {
        dir: tempfile::TempDir,
        watcher: Watcher,
    }

    impl Tree {
        /// A tree with these directories, all reported.
        fn new(dirs: &[&str], options: WatchOptions) -> Self {
            // In memory where that is possible: thousands of directories come and go.
            let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
            for path in dirs {
                fs::create_dir_all(dir.path().join(path)).unwrap();
            }
            let watcher = Watcher::new(Hierarchy::at(dir.path()), options);
            let mut tree = Self { dir, watcher };
            assert_eq!(tree.reported().len(), tree.watcher.cgroups().count());
            tree
        }

        /// Sweeps only to begin with, so that whatever is reported comes from a watch.
        fn without_sweeps(dirs: &[&str]) -> Self {
            let never = Duration::from_hours(1);
            Self::new(dirs, WatchOptions { sweep_watched: never, sweep_unwatched: never })
        }

        /// As `+PATH` and `-PATH`.
        fn reported(&mut self) -> Vec<String> {
            let events = self.watcher.next(SOON).unwrap();
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

        /// Whether what the watcher knows is what is there.
        fn check(&self) {
            let mut there = self.watcher.hierarchy.walk().unwrap();
            there.sort_by(|a, b| a.path.cmp(&b.path));
            assert_eq!(self.watcher.cgroups().collect::<Vec<_>>(), there);
        }
    }

    #[test]
    fn all_that_is_there_is_reported_first_and_parents_before_children() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir_all(tree.path().join("a/b/c")).unwrap();
        fs::write(tree.path().join("a/cgroup.procs"), "").unwrap();
        let mut watcher = Watcher::new(Hierarchy::at(tree.path()), WatchOptions::default());
        let events = watcher.next(SOON).unwrap();
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
    fn of_a_delegated_subtree_only_so_many_are_followed() {
        let options = WatchOptions { sweep_watched: Duration::from_millis(1), ..WatchOptions::default() };
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let watcher = Watcher::new(Hierarchy::at(dir.path()), options);
        let mut tree = Tree { dir, watcher };
        // The directories here belong to somebody else than the root does.
        tree.watcher.census = Census::owned_by(u32::MAX);
        fs::create_dir_all(tree.path("user/a/flood")).unwrap();
        for number in 0..MOST_OF_ONE {
            fs::create_dir(tree.path(&format!("user/a/flood/{number}"))).unwrap();
        }
        fs::create_dir_all(tree.path("ours/one")).unwrap();
        let below = |tree: &Tree, path: &str| {
            let path: CgroupPath = path.parse().unwrap();
            tree.watcher.cgroups().filter(|cgroup| path.contains(&cgroup.path)).count()
        };
        tree.watcher.next(SOON).unwrap();
        assert_eq!((below(&tree, "/user"), below(&tree, "/ours")), (MOST_OF_ONE, 2));
        let problem = tree.watcher.limit_exceeded().unwrap();
        assert!(
            problem.starts_with("there are too many cgroups below /user: 4096 are followed"),
            "{problem}"
        );
        assert_eq!(
            tree.watcher.hierarchy.walk().unwrap().len(),
            MOST_OF_ONE + 6,
            "its root's owner is its own"
        );

        // Where some go, others are found, and then none is missing.
        for number in 0..10 {
            fs::remove_dir(tree.path(&format!("user/a/flood/{number}"))).unwrap();
        }
        let until = Instant::now() + Duration::from_mins(1);
        while tree.watcher.limit_exceeded().is_some() && Instant::now() < until {
            tree.watcher.next(Duration::from_millis(100)).unwrap();
        }
        assert_eq!((below(&tree, "/user"), tree.watcher.limit_exceeded()), (MOST_OF_ONE - 7, None));
    }

    #[test]
    fn what_comes_and_goes_is_reported_by_the_watches() {
        let mut tree = Tree::without_sweeps(&["a"]);
        fs::create_dir(tree.path("a/b")).unwrap();
        assert_eq!(tree.reported(), ["+/a/b"]);
        fs::create_dir(tree.path("a/b/c")).unwrap();
        assert_eq!(tree.reported(), ["+/a/b/c"], "a new directory is watched too");
        fs::remove_dir(tree.path("a/b/c")).unwrap();
        fs::remove_dir(tree.path("a/b")).unwrap();
        assert_eq!(tree.reported(), ["-/a/b/c", "-/a/b"]);
        fs::write(tree.path("a/file"), "").unwrap();
        assert!(tree.reported().is_empty());
        tree.check();
    }

    #[test]
    fn what_is_made_in_a_directory_before_it_is_watched_is_reported() {
        let mut tree = Tree::without_sweeps(&[]);
        fs::create_dir_all(tree.path("a/b/c")).unwrap();
        assert_eq!(tree.reported(), ["+/a", "+/a/b", "+/a/b/c"]);
        fs::create_dir(tree.path("a/b/c/d")).unwrap();
        assert_eq!(tree.reported(), ["+/a/b/c/d"]);
        tree.check();
    }

    #[test]
    fn what_came_and_went_meanwhile_is_not_reported() {
        let mut tree = Tree::without_sweeps(&[]);
        fs::create_dir_all(tree.path("a/b")).unwrap();
        fs::remove_dir_all(tree.path("a")).unwrap();
        assert!(tree.reported().is_empty());
    }

    #[test]
    fn a_new_cgroup_of_an_old_name_is_another() {
        let mut tree = Tree::without_sweeps(&["a/b"]);
        fs::remove_dir_all(tree.path("a")).unwrap();
        // Keeps the file system from giving the same inode again, as the kernel never does for cgroups.
        fs::create_dir_all(tree.path("other")).unwrap();
        fs::create_dir_all(tree.path("other2")).unwrap();
        fs::create_dir_all(tree.path("a/c")).unwrap();
        let mut reported = tree.reported();
        reported.sort();
        assert_eq!(reported, ["+/a", "+/a/c", "+/other", "+/other2", "-/a", "-/a/b"]);
        fs::create_dir(tree.path("a/c/d")).unwrap();
        assert_eq!(tree.reported(), ["+/a/c/d"]);
        tree.check();
    }

    #[test]
    fn many_that_come_and_go_are_reported_right() {
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
    fn without_watches_sweeps_serve() {
        let sweep = Duration::from_millis(20);
        let mut tree =
            Tree::new(&["a/b"], WatchOptions { sweep_watched: sweep * 1000, sweep_unwatched: sweep });
        tree.watcher.stop_watching("asked to".into());
        assert_eq!(tree.watcher.mode(), &WatchMode::Polling { reason: "asked to".into() });
        assert!(tree.watcher.fd().is_none());
        fs::create_dir_all(tree.path("c/d")).unwrap();
        assert_eq!(tree.reported(), ["+/c", "+/c/d"]);
        fs::remove_dir_all(tree.path("a")).unwrap();
        assert_eq!(tree.reported(), ["-/a/b", "-/a"]);
        tree.check();
    }

    #[test]
    fn an_overflow_is_made_up_for() {
        let mut tree = Tree::without_sweeps(&["a"]);
        let limit: usize =
            fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
        for _ in 0..=limit / 2 {
            fs::create_dir(tree.path("a/again")).unwrap();
            fs::remove_dir(tree.path("a/again")).unwrap();
        }
        fs::create_dir(tree.path("late")).unwrap();
        assert_eq!(tree.reported(), ["+/late"]);
        assert_eq!(tree.watcher.mode(), &WatchMode::Inotify);
    }

    #[test]
    fn a_hierarchy_that_is_not_there_is_an_error() {
        let mut watcher = Watcher::new(Hierarchy::at(Path::new("/no/such/dir")), WatchOptions::default());
        let error = watcher.next(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("/no/such/dir") && error.contains("No such file"), "{error}");
    }

    /// The limit is one of the user namespace, so this test runs itself in one with a limit of four.
    #[test]
    fn at_the_limit_of_watches_sweeps_take_over() {
        const INSIDE: &str = "NUMAWARD_TEST_FOUR_WATCHES";
        if std::env::var_os(INSIDE).is_some() {
            let sweep = Duration::from_millis(20);
            let options = WatchOptions { sweep_watched: sweep * 1000, sweep_unwatched: sweep };
            let mut tree = Tree::new(&["a", "b"], options);
            assert_eq!(tree.watcher.mode(), &WatchMode::Inotify);
            fs::create_dir_all(tree.path("c/d/e")).unwrap();
            assert_eq!(tree.reported(), ["+/c", "+/c/d", "+/c/d/e"]);
            let WatchMode::Polling { reason } = tree.watcher.mode() else { panic!("more than four watches") };
            assert!(reason.contains("fs.inotify.max_user_watches"), "{reason}");
            fs::create_dir_all(tree.path("c/d/f")).unwrap();
            assert_eq!(tree.reported(), ["+/c/d/f"]);
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
        let name = "watch::tests::at_the_limit_of_watches_sweeps_take_over";
        let script = format!("{limit} && exec \"$0\" --exact {name}");
        let status = namespace(&script).arg(std::env::current_exe().unwrap()).status().unwrap();
        assert!(status.success());
    }
}

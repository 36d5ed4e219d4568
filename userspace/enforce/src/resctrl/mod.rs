//! Shares of L3 caches and memory bandwidth, and monitoring of both: the kernel's file system resctrl.
//!
//! # Problem
//! A workload that streams through memory evicts the data of other workloads from the shared cache and uses their
//! bandwidth, regardless of its CPUs and nodes. Some processors (Intel: RDT) divide both and count the use.
//!
//! # Terms
//! - A *class* is a named share.
//! - Its *group* is the directory `numaward-CLASS` with a file `schemata` for the share of its threads.
//! - A *monitoring group* `mon_groups/numaward-WORKLOAD` counts the use by its threads.
//! - Threads without a group are in the *default group*, the root. A new thread begins in the group of its parent.
//!
//! # Algorithm
//! [`Resctrl::reconcile`] compares the file system with the [`ResctrlSpec`]: it removes groups that are not specified,
//! creates missing ones, and writes shares that differ. Then it moves the threads of the workloads' cgroups to their
//! groups, and threads that have left these cgroups to the default group, until no thread remains to be moved. The
//! file system is read anew in each call, so groups of an earlier daemon are found.
//!
//! # Invariants
//! - Only groups with names that begin with `numaward-` are changed or removed, and no thread is moved out of another
//!   program's group.
//! - The default group loses only the ways of exclusive classes and the ways below them (see [`default_group`]), and
//!   only after the caller has stored the original masks.
//! - A class is held completely or not at all. A workload without its class is in the default group.
//!
//! Sources: Documentation/filesystems/resctrl.rst (before Linux 6.17 Documentation/arch/x86/resctrl.rst), `fs/resctrl`.

mod default_group;
mod exclusive;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod schemata;
mod tree;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use numaward_model::{hash::fnv1a, health};

pub use self::{
    default_group::ReducedWays,
    schemata::{Bandwidth, Caches, ClassShare, Info, Monitoring, Ways},
    tree::{CacheCounters, FAKE_MARKER, HostKernel, ResctrlError, ResctrlKernel},
};
use self::{
    exclusive::Refusals,
    schemata::{GroupTarget, targets},
    tree::{PREFIX, ResctrlTree, read_threads},
};

/// Maximum number of attempts to find threads that began during a move. The next call continues.
const MAX_ROUNDS: usize = 8;
/// Maximum length of a workload's name in that of its monitoring group.
const MAX_NAME_LENGTH: usize = 100;

/// A workload in a [`ResctrlSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResctrlWorkload {
    pub class: Option<String>,
    /// Directory of its cgroup.
    pub cgroup: PathBuf,
}

/// Desired state of the file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResctrlSpec {
    /// All configured classes by name, in use or not.
    pub classes: BTreeMap<String, ClassShare>,
    /// Workloads by name.
    pub workloads: BTreeMap<String, ResctrlWorkload>,
    /// If true, all workloads are monitored.
    pub monitors: bool,
    /// Stored state of the default group.
    pub reduced: ReducedWays,
}

impl ResctrlSpec {
    /// Returns whether anything is specified or has to be restored.
    pub fn is_needed(&self) -> bool {
        self.monitors && !self.workloads.is_empty()
            || self.workloads.values().any(|of| of.class.is_some())
            || !self.reduced.is_empty()
    }
}

/// Counters of a workload on one cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheReading {
    pub workload: String,
    /// Id of the cache.
    pub cache: u32,
    pub counted: CacheCounters,
}

/// Result of a reconciliation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResctrlOutcome {
    /// True if the file system is a fake for tests.
    pub is_made_up: bool,
    /// Classes with a written share, and the lines of `schemata`.
    pub set: Vec<String>,
    /// Classes without workloads, of which the group was removed.
    pub removed: Vec<String>,
    /// Differences from the specification, with their reasons.
    pub problems: BTreeSet<String>,
    /// Workloads that have their class.
    pub held: BTreeSet<String>,
    /// Workloads that do not have their class.
    pub refused: BTreeSet<String>,
    /// Number of groups of classes, and of monitoring groups.
    pub groups: [usize; 2],
    /// Number of threads that were moved to a group or to the default group.
    pub moved: u64,
    /// Counters of all monitored workloads.
    pub readings: Vec<CacheReading>,
    /// State of the default group to store.
    pub reduced: ReducedWays,
    /// If true, `reduced` has to be stored before the next call changes the default group.
    pub waits: bool,
}

/// The resctrl file system of a host.
#[derive(Debug)]
pub struct Resctrl {
    root: PathBuf,
    kernel: Arc<dyn ResctrlKernel>,
    /// False until the first reconciliation, which may find groups of another configuration.
    has_followed: bool,
    refusals: Refusals,
    /// Changes of reconciliations that had to wait: set and removed classes, moved threads.
    unreported: (Vec<String>, Vec<String>, u64),
}

impl Resctrl {
    /// Creates the access to the file system mounted at this directory.
    pub fn new(root: &Path, kernel: Arc<dyn ResctrlKernel>) -> Self {
        Self {
            root: root.to_owned(),
            kernel,
            has_followed: false,
            refusals: Refusals::new(),
            unreported: Default::default(),
        }
    }

    /// Returns the capabilities of the host, and whether the file system is a fake for tests.
    pub fn read_info(&self) -> Result<(Info, bool), ResctrlError> {
        let tree = ResctrlTree::open(&self.root, self.kernel.clone())?;
        Ok((tree.info()?, tree.is_made_up))
    }

    /// Returns the daemon's groups; none if the file system is not mounted.
    pub fn own_groups(&self) -> Vec<PathBuf> {
        let Ok(tree) = ResctrlTree::open(&self.root, self.kernel.clone()) else { return Vec::new() };
        let in_root = tree.groups(&tree.root).map(|(ours, _)| ours).unwrap_or_default();
        let counting = tree.groups(&tree.root.join("mon_groups")).map(|(ours, _)| ours);
        in_root.into_iter().chain(counting.unwrap_or_default()).collect()
    }

    /// Changes the file system to the specification as far as possible, and reads the counters. May take long: for each
    /// list of a group's threads, the kernel iterates over all threads of the host.
    pub fn reconcile(&mut self, wanted: &ResctrlSpec) -> ResctrlOutcome {
        let mut done = ResctrlOutcome { reduced: wanted.reduced.clone(), ..ResctrlOutcome::default() };
        let run = ResctrlTree::open(&self.root, self.kernel.clone()).and_then(|tree| {
            let info = tree.info()?;
            Ok((tree, info))
        });
        match run {
            Ok((tree, info)) => {
                done.is_made_up = tree.is_made_up;
                let adopts = !std::mem::replace(&mut self.has_followed, true);
                let run = TreeUpdate { tree: &tree, info: &info, wanted, adopts };
                if let Err(error) = run.run(&mut done, &mut self.refusals) {
                    done.problems.insert(error.to_string());
                }
            }
            Err(error) if wanted.is_needed() => drop(done.problems.insert(error.to_string())),
            Err(_) => {}
        }
        let with_class = wanted.workloads.iter().filter(|(_, of)| of.class.is_some()).map(|(name, _)| name);
        done.refused = with_class.filter(|name| !done.held.contains(*name)).cloned().collect();
        let (set, removed, moved) = &mut self.unreported;
        set.append(&mut done.set);
        removed.append(&mut done.removed);
        *moved += done.moved;
        if done.waits {
            done.moved = 0;
        } else {
            (done.set, done.removed, done.moved) = std::mem::take(&mut self.unreported);
        }
        // The group of a refused class was created and removed again.
        let is_of = |line: &str, class: &str| {
            line.strip_prefix(class).is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
        };
        done.set.retain(|line| !self.refusals.keys().any(|class| is_of(line, class)));
        done
    }
}

/// Returns the name of a workload's monitoring group. Characters that a directory should not have are replaced, and a
/// checksum of the original name keeps such names distinct.
fn group_of(workload: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@' | ':');
    if workload.len() <= MAX_NAME_LENGTH && workload.chars().all(is_plain) {
        return format!("{PREFIX}{workload}");
    }
    let name: String =
        workload.chars().take(MAX_NAME_LENGTH).map(|c| if is_plain(c) { c } else { '_' }).collect();
    format!("{PREFIX}{name}+{:016x}", fnv1a(workload.bytes()))
}

/// Threads in groups of other programs, with the name of the group.
type ForeignThreads = BTreeMap<u32, String>;

/// One reconciliation.
struct TreeUpdate<'a> {
    tree: &'a ResctrlTree,
    info: &'a Info,
    wanted: &'a ResctrlSpec,
    /// True if groups may have been made for another configuration.
    adopts: bool,
}

impl TreeUpdate<'_> {
    fn run(&self, done: &mut ResctrlOutcome, refusals: &mut Refusals) -> Result<(), ResctrlError> {
        let in_use = self.in_use(done);
        let mut targets =
            targets(self.wanted.classes.iter().map(|(name, share)| (name.as_str(), *share)), self.info);
        targets.retain(|name, _| in_use.contains_key(name));
        let (ours, others) = self.tree.groups(&self.tree.root)?;
        for group in &ours {
            let name = name_of(group).trim_start_matches(PREFIX).to_owned();
            if !in_use.contains_key(name.as_str()) {
                match self.tree.remove(group) {
                    Ok(()) => done.removed.push(name),
                    Err(error) => drop(done.problems.insert(error.to_string())),
                }
            }
        }
        self.refuse_exclusive(&mut targets, &others, refusals);
        let (mut ready, mut exclusive) = (BTreeSet::new(), BTreeMap::new());
        for (class, target) in self.known(targets, done) {
            match self.class(class, target, done) {
                Ok(()) => {
                    ready.insert(class);
                    exclusive
                        .extend(target.mask.filter(|_| self.is_exclusive(class)).map(|ways| (class, ways)));
                }
                Err(error) => drop(done.problems.insert(format!("class {class}: {error}"))),
            }
        }
        let waiting = self.reduce(&exclusive, &mut ready, done, refusals);
        done.groups[0] = ready.len() + waiting.len();
        let foreign = self.foreign(&others)?;
        for class in &ready {
            health::beat();
            let group = self.tree.class(class);
            let cgroups: Vec<(&str, &Path)> = in_use[class].clone();
            match self.gather(&group, &cgroups, &foreign, true, done) {
                Ok(left) => {
                    let names = cgroups.iter().map(|(name, _)| (*name).to_owned());
                    done.held.extend(names.filter(|name| !left.contains(name)));
                }
                Err(error) => drop(done.problems.insert(format!("class {class}: {error}"))),
            }
        }
        self.count(&ready, &waiting, &foreign, done)
    }

    /// Returns the classes in use, each with the names and cgroups of its workloads.
    fn in_use(&self, done: &mut ResctrlOutcome) -> BTreeMap<&str, Vec<(&str, &Path)>> {
        let mut in_use: BTreeMap<&str, Vec<(&str, &Path)>> = BTreeMap::new();
        for (name, of) in &self.wanted.workloads {
            let Some(class) = &of.class else { continue };
            if self.wanted.classes.contains_key(class) {
                in_use.entry(class).or_default().push((name, &of.cgroup));
            } else {
                let problem =
                    format!("class {class}, which {name} has, is not in the configuration any more");
                done.problems.insert(problem);
            }
        }
        in_use
    }

    /// Returns the values of the groups of classes that can be held. Removes the other groups.
    fn known<'a>(
        &self,
        targets: BTreeMap<&'a str, Result<GroupTarget, String>>,
        done: &mut ResctrlOutcome,
    ) -> Vec<(&'a str, GroupTarget)> {
        let known = targets.into_iter().filter_map(|(name, target)| match target {
            Ok(target) => Some((name, target)),
            Err(problem) => {
                // A group that was made before has another share.
                if let Err(error) = self.tree.remove(&self.tree.class(name)) {
                    done.problems.insert(error.to_string());
                }
                done.problems.insert(format!("class {name}: {problem}"));
                None
            }
        });
        known.collect()
    }

    /// Creates the group of a class and writes its share. Removes the group if the share cannot be held.
    fn class(&self, name: &str, target: GroupTarget, done: &mut ResctrlOutcome) -> Result<(), ResctrlError> {
        let (tree, group) = (self.tree, self.tree.class(name));
        let mut is_new = !group.is_dir();
        if !is_new && self.adopts && tree.is_reduced(&group, target, self.info)? {
            tree.remove(&group)?;
            is_new = true;
        }
        if is_new {
            tree.make(&group)?;
        }
        match tree.apply(&group, target, self.info) {
            Ok(written) => {
                if is_new || !written.is_empty() {
                    let lines = written.join(", ");
                    done.set.push(if lines.is_empty() {
                        name.to_owned()
                    } else {
                        format!("{name} ({lines})")
                    });
                }
                Ok(())
            }
            Err(error) => {
                // The threads are in the default group then.
                tree.remove(&group)?;
                Err(error)
            }
        }
    }

    /// Returns the threads that another program has put into a group.
    fn foreign(&self, others: &[PathBuf]) -> Result<ForeignThreads, ResctrlError> {
        let mut foreign = ForeignThreads::new();
        let (_, counting) = self.tree.groups(&self.tree.root.join("mon_groups"))?;
        for group in others.iter().chain(&counting) {
            // The group may be gone by now, and a locked one has no list.
            let tasks = self.tree.tasks(group).unwrap_or_default();
            foreign.extend(tasks.into_iter().map(|thread| (thread, name_of(group).to_owned())));
        }
        Ok(foreign)
    }

    /// Moves all threads of these cgroups to a group. If `is_alone`, moves other threads of the group to the default
    /// group. Returns the workloads of which not all threads are in the group: some are in other programs' groups, or cannot be read.
    fn gather(
        &self,
        group: &Path,
        cgroups: &[(&str, &Path)],
        foreign: &ForeignThreads,
        is_alone: bool,
        done: &mut ResctrlOutcome,
    ) -> Result<BTreeSet<String>, ResctrlError> {
        let mut left = BTreeSet::new();
        for _ in 0..MAX_ROUNDS {
            // The group is listed first: a thread that is added meanwhile is in a cgroup as well, and is not moved
            // away.
            let there = self.tree.tasks(group)?;
            let mut all = BTreeSet::new();
            let mut has_moved = false;
            for (name, cgroup) in cgroups {
                let mut own = BTreeSet::new();
                if let Err(error) = read_threads(cgroup, &mut own) {
                    left.insert((*name).to_owned());
                    done.problems.insert(format!("threads of {name}: {error}"));
                }
                let mut elsewhere = BTreeSet::new();
                for thread in own.difference(&there) {
                    if let Some(other) = foreign.get(thread) {
                        elsewhere.insert(other);
                    } else if self.tree.add(group, *thread)? {
                        (has_moved, done.moved) = (true, done.moved + 1);
                    }
                }
                for other in elsewhere {
                    left.insert((*name).to_owned());
                    done.problems.insert(format!(
                        "threads of {name} are in the group {other}, which is not numaward's, and stay there"
                    ));
                }
                all.extend(own);
            }
            for thread in there.difference(&all).filter(|_| is_alone) {
                if self.tree.add(&self.tree.root, *thread)? {
                    (has_moved, done.moved) = (true, done.moved + 1);
                }
            }
            if !has_moved {
                break;
            }
        }
        Ok(left)
    }

    /// Creates the monitoring groups of workloads, removes the daemon's other ones, and reads the counters.
    fn count(
        &self,
        ready: &BTreeSet<&str>,
        waiting: &BTreeSet<&str>,
        foreign: &ForeignThreads,
        done: &mut ResctrlOutcome,
    ) -> Result<(), ResctrlError> {
        let is_known = self.info.monitoring.is_some();
        if self.wanted.monitors && !is_known && !self.wanted.workloads.is_empty() {
            done.problems.insert("nothing can be counted on this host (there is no info/L3_MON)".to_owned());
        }
        let counts = self.wanted.monitors && is_known;
        let mut by_parent: BTreeMap<PathBuf, BTreeMap<PathBuf, (&str, &Path)>> = BTreeMap::new();
        for parent in ready.iter().map(|class| self.tree.class(class)).chain([self.tree.root.clone()]) {
            by_parent.insert(parent.join("mon_groups"), BTreeMap::new());
        }
        let waits = |of: &ResctrlWorkload| of.class.as_deref().is_some_and(|class| waiting.contains(class));
        for (name, of) in self.wanted.workloads.iter().filter(|(_, of)| counts && !waits(of)) {
            let class = of.class.as_deref().filter(|class| ready.contains(class));
            let parent = class.map_or_else(|| self.tree.root.clone(), |class| self.tree.class(class));
            let parent = parent.join("mon_groups");
            let group = parent.join(group_of(name));
            by_parent.entry(parent).or_default().insert(group, (name, &of.cgroup));
        }
        for (parent, wanted) in &by_parent {
            let (ours, _) = self.tree.groups(parent)?;
            for group in ours.iter().filter(|group| !wanted.contains_key(*group)) {
                if let Err(error) = self.tree.remove(group) {
                    done.problems.insert(error.to_string());
                }
            }
        }
        // After the removals, because these free monitoring ids.
        for (parent, wanted) in &by_parent {
            let is_root = parent.parent() == Some(self.tree.root.as_path());
            for (group, (name, cgroup)) in wanted {
                health::beat();
                match self.count_one(group, (name, cgroup), foreign, is_root, done) {
                    Ok(()) => done.groups[1] += 1,
                    Err(error) => drop(done.problems.insert(format!("{name} is not counted: {error}"))),
                }
            }
        }
        Ok(())
    }

    fn count_one(
        &self,
        group: &Path,
        workload: (&str, &Path),
        foreign: &ForeignThreads,
        is_root: bool,
        done: &mut ResctrlOutcome,
    ) -> Result<(), ResctrlError> {
        if !group.is_dir() {
            self.tree.make(group)?;
        }
        self.gather(group, &[workload], foreign, is_root, done)?;
        let readings = self.tree.counted(group)?;
        let name = workload.0;
        done.readings.extend(readings.into_iter().map(|(cache, counted)| CacheReading {
            workload: name.to_owned(),
            cache,
            counted,
        }));
        Ok(())
    }
}

fn name_of(group: &Path) -> &str {
    group.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests;

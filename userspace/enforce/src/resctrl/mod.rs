//! Shares of L3 caches and memory bandwidth, and what workloads have of both: the kernel's file tree resctrl.
//!
//! Problem: a workload that streams through memory pushes what others use out of the shared cache, and takes the bandwidth,
//! whatever its CPUs and nodes are. Some processors (Intel: RDT) share both out, and count who has what.
//!
//! Terms: a *class* is a share with a name. Its *group* is the directory `numaward-CLASS` of the tree: its threads have what
//! the file `schemata` there says. A *monitoring group* `mon_groups/numaward-WORKLOAD` counts the threads in it. Threads that
//! are in no group are in the default one, the root. A new thread is where its parent is.
//!
//! Algorithm: [`Resctrl::reconcile`] compares the tree with what is [`ResctrlSpec`] and changes it accordingly: groups that nobody wants
//! are removed, those that are missing are made, and what a group holds is written where it differs. Then the threads of the
//! workloads' cgroups are put into their groups, and those that are no longer in these cgroups back into the default one, again
//! and again until none is left to move. Nothing of the tree is kept between two calls, so that it does not matter who made a
//! group.
//!
//! Invariants: of groups, only those whose names begin with `numaward-` are changed or removed, and no thread is taken out of
//! another. Of the default group, only the ways of exclusive classes and those below them are taken, see [`default_group`], and
//! none is taken before the caller has stored what was found. A class is held as a whole or not at all. A workload whose class
//! cannot be held is in the default group.
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
    schemata::{Target, targets},
    tree::{PREFIX, Tree, threads},
};

/// How often threads are looked for that came while others were moved. The next call goes on.
const ROUNDS: usize = 8;
/// The longest part of a workload's name in that of its group.
const LONGEST_NAME: usize = 100;

/// A workload as the tree is to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResctrlWorkload {
    /// Its class, if it has one.
    pub class: Option<String>,
    /// The directory of its cgroup.
    pub cgroup: PathBuf,
}

/// What the tree is to hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResctrlSpec {
    /// All classes that there are, in use or not, by name.
    pub classes: BTreeMap<String, ClassShare>,
    /// Workloads by name.
    pub workloads: BTreeMap<String, ResctrlWorkload>,
    /// Whether each of them is counted.
    pub monitors: bool,
    /// What is stored of the default group.
    pub reduced: ReducedWays,
}

impl ResctrlSpec {
    /// Whether anything is, or is to be given back.
    pub fn is_needed(&self) -> bool {
        self.monitors && !self.workloads.is_empty()
            || self.workloads.values().any(|of| of.class.is_some())
            || !self.reduced.is_empty()
    }
}

/// What a workload has on one cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheReading {
    /// The name of the workload.
    pub workload: String,
    /// The id of the cache.
    pub cache: u32,
    /// What is counted.
    pub counted: CacheCounters,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResctrlOutcome {
    /// Whether the tree is made up, and not the kernel's.
    pub is_made_up: bool,
    /// Classes that were given something, with the lines of `schemata` that were written.
    pub set: Vec<String>,
    /// Classes whose group was removed.
    pub removed: Vec<String>,
    /// What is not as it is wanted, and why.
    pub problems: BTreeSet<String>,
    /// Workloads that have their class.
    pub held: BTreeSet<String>,
    /// Workloads that do not have theirs.
    pub refused: BTreeSet<String>,
    /// Groups that there are now, of classes and for counting.
    pub groups: [usize; 2],
    /// Threads that were put into a group or back into the default one.
    pub moved: u64,
    /// What is counted.
    pub readings: Vec<CacheReading>,
    /// What is to be stored of the default group.
    pub reduced: ReducedWays,
    /// Whether that has to be stored before the default group is changed.
    pub waits: bool,
}

/// The tree of a host.
#[derive(Debug)]
pub struct Resctrl {
    root: PathBuf,
    kernel: Arc<dyn ResctrlKernel>,
    /// Whether all groups that are there are as this configuration makes them.
    has_followed: bool,
    refusals: Refusals,
    /// What looks that waited have set, removed and moved.
    unreported: (Vec<String>, Vec<String>, u64),
}

impl Resctrl {
    /// The tree mounted at this directory.
    pub fn new(root: &Path, kernel: Arc<dyn ResctrlKernel>) -> Self {
        Self {
            root: root.to_owned(),
            kernel,
            has_followed: false,
            refusals: Refusals::new(),
            unreported: Default::default(),
        }
    }

    /// What the host can do, and whether the tree is made up.
    pub fn read_info(&self) -> Result<(Info, bool), ResctrlError> {
        let tree = Tree::open(&self.root, self.kernel.clone())?;
        Ok((tree.info()?, tree.is_made_up))
    }

    /// Which groups are ours. None where there is no tree.
    pub fn own_groups(&self) -> Vec<PathBuf> {
        let Ok(tree) = Tree::open(&self.root, self.kernel.clone()) else { return Vec::new() };
        let in_root = tree.groups(&tree.root).map(|(ours, _)| ours).unwrap_or_default();
        let counting = tree.groups(&tree.root.join("mon_groups")).map(|(ours, _)| ours);
        in_root.into_iter().chain(counting.unwrap_or_default()).collect()
    }

    /// Makes the tree hold what is wanted, as far as it can, and reads what is counted. Takes as long as the kernel does: for
    /// each group whose threads are listed, it goes through all threads of the host.
    pub fn reconcile(&mut self, wanted: &ResctrlSpec) -> ResctrlOutcome {
        let mut done = ResctrlOutcome { reduced: wanted.reduced.clone(), ..ResctrlOutcome::default() };
        let run = Tree::open(&self.root, self.kernel.clone()).and_then(|tree| {
            let info = tree.info()?;
            Ok((tree, info))
        });
        match run {
            Ok((tree, info)) => {
                done.is_made_up = tree.is_made_up;
                let adopts = !std::mem::replace(&mut self.has_followed, true);
                let run = Run { tree: &tree, info: &info, wanted, adopts };
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
        // Such a class was made, and is gone again.
        let is_of = |line: &str, class: &str| {
            line.strip_prefix(class).is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
        };
        done.set.retain(|line| !self.refusals.keys().any(|class| is_of(line, class)));
        done
    }
}

/// The name of the monitoring group of a workload. What the name of a directory should not have is replaced, and a checksum
/// of the whole keeps such names different.
fn group_of(workload: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@' | ':');
    if workload.len() <= LONGEST_NAME && workload.chars().all(is_plain) {
        return format!("{PREFIX}{workload}");
    }
    let name: String =
        workload.chars().take(LONGEST_NAME).map(|c| if is_plain(c) { c } else { '_' }).collect();
    format!("{PREFIX}{name}+{:016x}", fnv1a(workload.bytes()))
}

/// Threads in groups of others, by thread.
type Foreign = BTreeMap<u32, String>;

/// One way through the tree.
struct Run<'a> {
    tree: &'a Tree,
    info: &'a Info,
    wanted: &'a ResctrlSpec,
    /// Whether an earlier run may have made groups.
    adopts: bool,
}

impl Run<'_> {
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

    /// The classes that workloads have, with the workloads: their names and cgroups.
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

    /// What the groups of classes are to hold, where that is known. Others are not there afterwards.
    fn known<'a>(
        &self,
        targets: BTreeMap<&'a str, Result<Target, String>>,
        done: &mut ResctrlOutcome,
    ) -> Vec<(&'a str, Target)> {
        let known = targets.into_iter().filter_map(|(name, target)| match target {
            Ok(target) => Some((name, target)),
            Err(problem) => {
                // One that was made before holds something else.
                if let Err(error) = self.tree.remove(&self.tree.class(name)) {
                    done.problems.insert(error.to_string());
                }
                done.problems.insert(format!("class {name}: {problem}"));
                None
            }
        });
        known.collect()
    }

    /// Makes the group of a class hold its share. One that cannot is not there afterwards.
    fn class(&self, name: &str, target: Target, done: &mut ResctrlOutcome) -> Result<(), ResctrlError> {
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
                // The tasks are in the default group then.
                tree.remove(&group)?;
                Err(error)
            }
        }
    }

    /// Threads that somebody else has put into a group.
    fn foreign(&self, others: &[PathBuf]) -> Result<Foreign, ResctrlError> {
        let mut foreign = Foreign::new();
        let (_, counting) = self.tree.groups(&self.tree.root.join("mon_groups"))?;
        for group in others.iter().chain(&counting) {
            // It may be gone by now; a locked one has no list.
            let tasks = self.tree.tasks(group).unwrap_or_default();
            foreign.extend(tasks.into_iter().map(|thread| (thread, name_of(group).to_owned())));
        }
        Ok(foreign)
    }

    /// Puts all threads of these cgroups into a group, and others that are in it into the default one, if `is_alone`. Gives the
    /// workloads of which threads stay elsewhere.
    fn gather(
        &self,
        group: &Path,
        cgroups: &[(&str, &Path)],
        foreign: &Foreign,
        is_alone: bool,
        done: &mut ResctrlOutcome,
    ) -> Result<BTreeSet<String>, ResctrlError> {
        let mut left = BTreeSet::new();
        for _ in 0..ROUNDS {
            // First who is there: who comes meanwhile is in a cgroup as well, and is no stray.
            let there = self.tree.tasks(group)?;
            let mut all = BTreeSet::new();
            let mut has_moved = false;
            for (name, cgroup) in cgroups {
                let own = threads(cgroup)?;
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

    /// Makes the groups in which workloads are counted, removes others of ours, and reads what is counted.
    fn count(
        &self,
        ready: &BTreeSet<&str>,
        waiting: &BTreeSet<&str>,
        foreign: &Foreign,
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
        // Only now, as what was removed gives its numbers back.
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
        foreign: &Foreign,
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

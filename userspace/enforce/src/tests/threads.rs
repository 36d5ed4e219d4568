//! Threads of narrowed cgroups: real ones, in a tree of plain files.

use std::{
    collections::BTreeSet,
    os::unix::fs::chown,
    path::Path,
    sync::mpsc::{self, Sender},
    thread::{self, JoinHandle},
};

use numaward_tests_support::{create_long_paths, create_too_long_path, is_alone, peak, reset_peak};
use numaward_topology::{
    CpuId,
    affinity::{affinity, set_affinity},
};

use super::*;

/// A waiting thread of this process, bound to CPUs if some are given.
struct Thread {
    id: i32,
    end: Option<Sender<()>>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    fn start(cpus: Option<&CpuSet>) -> Self {
        let (end, ended) = mpsc::channel();
        let (started, id) = mpsc::channel();
        let cpus = cpus.cloned();
        let handle = thread::spawn(move || {
            if let Some(cpus) = cpus {
                set_affinity(None, &cpus).unwrap();
            }
            started.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = ended.recv();
        });
        Self { id: id.recv().unwrap(), end: Some(end), handle: Some(handle) }
    }

    fn cpus(&self) -> CpuSet {
        affinity(Some(self.id)).unwrap()
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.end.take());
        self.handle.take().map(JoinHandle::join);
    }
}

/// Returns all CPUs of this process and the first of them; `None`, outside of CI, if there is only one.
fn all_and_first() -> Option<(CpuSet, CpuSet)> {
    let all = affinity(None).unwrap();
    let first = CpuSet::single(all.first().unwrap());
    if all == first {
        skip_outside_ci("it needs two CPUs");
        return None;
    }
    Some((all, first))
}

impl FakeHierarchy {
    fn run(&self, cgroup: &str, threads: &[&Thread], available: &CpuSet) {
        let threads: Vec<String> = threads.iter().map(|thread| thread.id.to_string()).collect();
        let threads = threads.join("\n");
        fs::write(path(cgroup).dir(self.root.path()).join("cgroup.threads"), threads).unwrap();
        self.write_file(cgroup, "cpuset.cpus.effective", &available.to_string());
    }

    /// Narrows the cgroup.
    fn narrow(&self, applied: &AppliedSettings, cgroup: &str, cpus: &CpuSet) -> AppliedSettings {
        self.hold(applied, cgroup, Settings { cpus: Some(cpus.clone()), ..Settings::default() })
    }

    /// Restores the CPUs of the cgroup, and resets the threads that kept the narrow set.
    fn widen(&self, before: &AppliedSettings, cgroup: &str) -> ResetThreads {
        let applied = self.release(before, cgroup);
        let ended = applied.resets_since(before);
        let [(path, PendingReset { masks, .. })] = &ended[..] else { return ResetThreads::default() };
        masks.reset(self.root.path(), path, None, Duration::from_secs(10))
    }
}

fn reset(threads: usize) -> ResetThreads {
    ResetThreads { reset: threads, ..ResetThreads::default() }
}

#[test]
fn narrow_affinities_are_reset() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    let (kept, other) = (Thread::start(None), Thread::start(None));
    tree.run("/a", &[&kept], &all);
    tree.run("/a/b", &[&other], &all);
    let applied = tree.narrow(&AppliedSettings::default(), "/a", &first);
    set_affinity(Some(kept.id), &first).unwrap();
    assert_eq!(tree.widen(&applied, "/a"), reset(1));
    assert_eq!([kept.cpus(), other.cpus()], [all.clone(), all]);
}

#[test]
fn own_affinities_are_kept() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    let (own, new, kept) = (Thread::start(Some(&first)), Thread::start(Some(&first)), Thread::start(None));
    tree.run("/a", &[&own], &all);
    tree.run("/a/b", &[&kept], &all);
    let applied = tree.narrow(&AppliedSettings::default(), "/a", &first);
    // One that was started by a thread with an affinity of its own has the same one.
    tree.run("/a", &[&own, &new], &all);
    set_affinity(Some(kept.id), &first).unwrap();
    // The record outlives the daemon.
    let applied: AppliedSettings = serde_json::from_str(&serde_json::to_string(&applied).unwrap()).unwrap();
    assert_eq!(tree.widen(&applied, "/a"), reset(1));
    assert_eq!([own.cpus(), new.cpus(), kept.cpus()], [first.clone(), first, all]);
}

#[test]
fn own_affinity_outlives_narrowing() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    let own = Thread::start(Some(&first));
    tree.run("/a", &[], &all);
    tree.run("/a/b", &[&own], &all);
    let applied = tree.narrow(&AppliedSettings::default(), "/a", &first);
    // As the kernel has it then: the thread has all CPUs of its cgroup.
    tree.run("/a/b", &[&own], &first);
    let applied = tree.narrow(&applied, "/a/b", &first);
    let applied = tree.release(&applied, "/a");
    tree.run("/a/b", &[&own], &all);
    assert_eq!(tree.widen(&applied, "/a/b"), reset(0));
    assert_eq!(own.cpus(), first);
}

#[test]
fn unknown_affinities_are_kept() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a"]);
    let thread = Thread::start(None);
    tree.run("/a", &[&thread], &all);
    // A thread of another PID namespace.
    fs::write(tree.root.path().join("a/cgroup.threads"), format!("0\n{}\n", thread.id)).unwrap();
    let applied = tree.narrow(&AppliedSettings::default(), "/a", &first);
    tree.run("/a", &[&thread], &all);
    set_affinity(Some(thread.id), &first).unwrap();
    let unread = BTreeSet::from([path("/a")]);
    assert_eq!(tree.widen(&applied, "/a"), ResetThreads { unread, ..reset(0) });
    assert_eq!(thread.cpus(), first);
}

#[test]
fn other_affinities_are_kept() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a"]);
    let thread = Thread::start(None);
    tree.run("/a", &[&thread], &all);
    let applied = tree.narrow(&AppliedSettings::default(), "/a", &first);
    let others = &all - &first;
    set_affinity(Some(thread.id), &others).unwrap();
    assert_eq!(tree.widen(&applied, "/a"), reset(0));
    assert_eq!(thread.cpus(), others);
}

/// Any user with a delegated subtree can have as many cgroups under names that long.
#[test]
fn bounds_memory_for_many_long_paths() {
    const CGROUPS: usize = 4000;
    const CEILING: u64 = 4 << 20;
    if !is_alone() {
        return;
    }
    let tree = FakeHierarchy::new(&["/a"]);
    create_long_paths(&tree.root.path().join("a"), CGROUPS, "cgroup.threads", "");
    let deadline = Instant::now() + Duration::from_mins(1);
    reset_peak();
    let before = peak();
    let masks = ThreadMasks::read(tree.root.path(), &path("/a"), [], deadline);
    let most = peak();
    assert_eq!(masks, ThreadMasks::default());
    assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
}

/// The record is part of the ledger.
#[test]
fn long_paths_with_own_affinities_are_recorded_together() {
    const CEILING: u64 = 4 << 20;
    if !is_alone() {
        return;
    }
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a"]);
    let own = Thread::start(Some(&first));
    tree.run("/a", &[&own], &all);
    create_long_paths(&tree.root.path().join("a"), 3000, "cgroup.threads", &own.id.to_string());
    tree.write_file("/a", "cpuset.cpus.effective", &all.to_string());
    let deadline = Instant::now() + Duration::from_mins(1);
    reset_peak();
    let before = peak();
    let masks = ThreadMasks::read(tree.root.path(), &path("/a"), [], deadline);
    let most = peak();
    let record = serde_json::to_string(&masks).unwrap();
    assert!(record.len() < 2 << 10, "{record}");
    assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
}

/// Creates that many cgroups with these threads.
fn create_many(dir: &Path, count: usize, threads: &str) {
    for number in 0..count {
        let dir = dir.join(number.to_string());
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("cgroup.threads"), threads).unwrap();
    }
}

/// Asserts that threads beside a cgroup get their CPUs back, also if another user owns it. `fill` is called with its directory and a
/// thread with its own affinity. Any user with a delegated subtree, with sessions or with containers can fill them.
fn assert_others_are_reset(fill: impl Fn(&Path, &str)) {
    const TIME: Duration = Duration::from_secs(2);
    let Some((all, first)) = all_and_first() else { return };
    let own = Thread::start(Some(&first));
    for owner in [None, Some(65_534)] {
        let tree = FakeHierarchy::new(&["/a", "/a/1", "/a/crowded", "/a/z"]);
        let (root, crowded) = (tree.root.path(), path("/a/crowded"));
        // Only root can make another user the owner.
        if owner.is_some() && chown(crowded.dir(root), owner, None).is_err() {
            continue;
        }
        let kept = [Thread::start(None), Thread::start(None)];
        tree.run("/a", &[], &all);
        tree.run("/a/1", &[&kept[0]], &all);
        tree.run("/a/crowded", &[&own], &all);
        tree.run("/a/z", &[&kept[1]], &all);
        fill(&crowded.dir(root), &format!("{}\n", own.id));
        let mut masks = ThreadMasks::read(root, &path("/a"), [], Instant::now() + TIME);
        masks.give(&first);
        for thread in &kept {
            set_affinity(Some(thread.id), &first).unwrap();
        }
        let done = masks.reset(root, &path("/a"), None, TIME);
        assert_eq!(done.reset, 2, "{owner:?}: {done:?}");
        assert_eq!(kept.each_ref().map(Thread::cpus), [all.clone(), all.clone()], "{owner:?}");
        assert_eq!(own.cpus(), first, "{owner:?}");
        assert!(done.unread.iter().all(|cgroup| crowded.contains(cgroup)), "{owner:?}: {done:?}");
    }
}

#[test]
fn too_long_paths_affect_no_other_cgroup() {
    assert_others_are_reset(|dir, own| create_too_long_path(dir, "cgroup.threads", own));
}

#[test]
fn many_own_affinities_affect_no_other_cgroup() {
    assert_others_are_reset(|dir, own| create_many(dir, 200, own));
}

#[test]
fn many_threads_affect_no_other_cgroup() {
    assert_others_are_reset(|dir, own| {
        fs::write(dir.join("cgroup.threads"), own.repeat(1_000_000)).unwrap();
    });
}

#[test]
fn many_cgroups_affect_no_other_cgroup() {
    assert_others_are_reset(|dir, _| create_many(dir, 4200, ""));
}

#[test]
fn hidden_threads_affect_no_other_cgroup() {
    assert_others_are_reset(|dir, _| create_many(dir, 200, "0\n"));
}

#[test]
fn last_given_sets_are_known() {
    let Some((all, first)) = all_and_first() else { return };
    let tree = FakeHierarchy::new(&["/a"]);
    let kept = Thread::start(None);
    tree.run("/a", &[&kept], &all);
    let (root, deadline) = (tree.root.path(), Instant::now() + Duration::from_secs(10));
    let mut masks = ThreadMasks::read(root, &path("/a"), [], deadline);
    for other in 1000..1040 {
        masks.give(&(&first | &CpuSet::single(CpuId(other))));
    }
    set_affinity(Some(kept.id), &first).unwrap();
    assert_eq!(masks.reset(root, &path("/a"), None, Duration::from_secs(10)), reset(1));
    assert!(serde_json::to_string(&masks).unwrap().len() < 512, "{masks:?}");
}

//! Tests on this host's cgroup v2 hierarchy, with ten thousand temporary cgroups.
//!
//! They need root and a mounted hierarchy. Without these, they fail in CI and are skipped elsewhere.

#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_cgroup::{
    Cgroup, CgroupEvent, CgroupId, CgroupPath, Hierarchy, ReadError, WatchMode, WatchOptions, Watcher,
    knob::{Knob, KnobValue},
    read,
};
use numaward_tests_support::skip_outside_ci;

/// The number of parents; each has [`CHILDREN`] children.
const PARENTS: usize = 100;
const CHILDREN: usize = 99;

/// A cgroup with its descendants, which are removed when the value is dropped.
struct TemporaryCgroup {
    dir: PathBuf,
    path: CgroupPath,
}

impl TemporaryCgroup {
    fn new(hierarchy: &Hierarchy, purpose: &str) -> Result<Self, io::Error> {
        let name = format!("numaward-test-{purpose}-{}", std::process::id());
        let path = CgroupPath::root().child(&name).unwrap();
        let dir = hierarchy.dir(&path);
        fs::create_dir(&dir)?;
        Ok(Self { dir, path })
    }

    fn make_all(&self) {
        for parent in 0..PARENTS {
            let parent = self.dir.join(format!("p{parent}"));
            fs::create_dir(&parent).unwrap();
            for child in 0..CHILDREN {
                fs::create_dir(parent.join(format!("c{child}"))).unwrap();
            }
        }
    }

    fn remove_below(&self) {
        for parent in fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
            for child in fs::read_dir(&parent).into_iter().flatten().flatten().map(|entry| entry.path()) {
                // Files cannot be removed, and need not be.
                let _ = fs::remove_dir(child);
            }
            let _ = fs::remove_dir(parent);
        }
    }
}

impl Drop for TemporaryCgroup {
    fn drop(&mut self) {
        self.remove_below();
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Returns the hierarchy and a new cgroup in it; `None` if the host is not suitable.
fn host(purpose: &str) -> Option<(Hierarchy, TemporaryCgroup)> {
    let made = Hierarchy::open().map_err(|error| error.to_string()).and_then(|hierarchy| {
        let made = TemporaryCgroup::new(&hierarchy, purpose).map_err(|error| error.to_string())?;
        Ok((hierarchy, made))
    });
    match made {
        Ok(made) => Some(made),
        Err(reason) => {
            skip_outside_ci(reason);
            None
        }
    }
}

/// Collects events about the descendants of `made` until `count` were reported or a second has passed.
fn reported(watcher: &mut Watcher, made: &TemporaryCgroup, count: usize) -> Vec<(bool, Cgroup)> {
    let start = Instant::now();
    let mut reported = Vec::new();
    while reported.len() < count && start.elapsed() < Duration::from_secs(1) {
        reported.extend(watcher.next(Duration::from_millis(100)).unwrap().into_iter().filter_map(|event| {
            let (added, cgroup) = match event {
                CgroupEvent::Added(cgroup) => (true, cgroup),
                CgroupEvent::Removed(cgroup) => (false, cgroup),
            };
            (made.path.contains(&cgroup.path) && cgroup.path != made.path).then_some((added, cgroup))
        }));
    }
    println!("reported: {} of {count} after {:?}", reported.len(), start.elapsed());
    reported
}

/// Returns the number of inotify watches of the watcher.
fn kernel_watches(watcher: &Watcher) -> usize {
    let fd = watcher.fd().unwrap().as_raw_fd();
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
    info.lines().filter(|line| line.starts_with("inotify ")).count()
}

#[test]
fn walks_and_watches_10_000_cgroups() {
    let Some((hierarchy, made)) = host("many") else { return };
    let mut watcher = Watcher::new(hierarchy.clone(), WatchOptions::default());
    watcher.next(Duration::ZERO).unwrap();
    let before = kernel_watches(&watcher);
    assert_eq!(before, watcher.cgroups().count());

    let count = PARENTS * (CHILDREN + 1);
    made.make_all();
    let added = reported(&mut watcher, &made, count);
    assert_eq!(added.len(), count);
    assert!(added.iter().all(|(added, _)| *added));
    assert_eq!(watcher.mode(), &WatchMode::Inotify);
    let ids: BTreeMap<CgroupPath, CgroupId> =
        added.into_iter().map(|(_, cgroup)| (cgroup.path, cgroup.id)).collect();

    let start = Instant::now();
    let walked: BTreeMap<CgroupPath, CgroupId> = hierarchy
        .walk()
        .unwrap()
        .into_iter()
        .filter(|cgroup| made.path.contains(&cgroup.path) && cgroup.path != made.path)
        .map(|cgroup| (cgroup.path, cgroup.id))
        .collect();
    println!("walked in {:?}", start.elapsed());
    assert_eq!(walked, ids);

    let start = Instant::now();
    for (path, &id) in ids.iter().step_by(10) {
        assert_eq!(hierarchy.id_of(path).unwrap(), Some(id));
    }
    println!("{} ids of paths in {:?}", count.div_ceil(10), start.elapsed());

    made.remove_below();
    let removed = reported(&mut watcher, &made, count);
    assert_eq!(removed.len(), count);
    assert!(removed.iter().all(|(added, cgroup)| !added && ids[&cgroup.path] == cgroup.id));
    // A test that runs at the same time may have its own cgroup.
    assert!(kernel_watches(&watcher) <= before + 2, "watches are left behind");
    let gone = ids.keys().next().unwrap();
    assert_eq!(hierarchy.id_of(gone).unwrap(), None);
}

/// Returns all processes of the cgroup itself.
fn processes(dir: &Path) -> Result<Vec<u32>, ReadError> {
    let mut found = Vec::new();
    read::visit_processes(dir, |process| {
        found.push(process);
        true
    })?;
    Ok(found)
}

#[test]
fn reads_a_cgroup_of_this_host() {
    let Some((hierarchy, made)) = host("read") else { return };
    assert!(!read::populated(&made.dir).unwrap());
    assert!(processes(&made.dir).unwrap().is_empty());
    fs::create_dir(made.dir.join("p")).unwrap();
    let path = made.path.child("p").unwrap();
    let id = hierarchy.id_of(&path).unwrap();
    assert!(id.is_some());
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("cgroup");
    std::os::unix::fs::symlink(hierarchy.root(), &link).unwrap();
    assert_eq!(Hierarchy::open_at(&link).unwrap().id_of(&path).unwrap(), id);

    let mut sleeper = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    fs::write(hierarchy.dir(&path).join("cgroup.procs"), sleeper.id().to_string()).unwrap();
    let populated = read::populated(&made.dir);
    let found = processes(&hierarchy.dir(&path));
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    assert!(populated.unwrap());
    assert_eq!(found.unwrap(), [sleeper.id()]);

    match read::memory_pressure(&made.dir) {
        Ok(pressure) => assert!(pressure.full <= pressure.some),
        Err(error) => assert!(error.is_absent(), "{error}"),
    }
    let enabled = Knob::SubtreeControl.read(hierarchy.root()).unwrap();
    if matches!(enabled, KnobValue::Controllers(names) if names.contains("memory")) {
        assert!(!read::memory_numa_stat(&made.dir).unwrap().is_empty());
        assert_eq!(read::memory_events(&made.dir).unwrap().oom_kill, 0);
    } else {
        assert!(read::memory_numa_stat(&made.dir).unwrap_err().is_absent());
    }
    let dir = made.dir.clone();
    drop(made);
    assert!(read::populated(&dir).unwrap_err().is_gone());
}

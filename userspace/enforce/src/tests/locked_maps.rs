//! Tests with processes that keep their memory maps locked.

use std::{fs::File, path::PathBuf};

use rustix::fs::{CWD, Mode, mkfifoat};

use super::*;

/// A busy host delays the threads that check.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// A hierarchy with processes 7 and 8 below `/a`, and process 9 in `/b`.
struct LockBench {
    tree: FakeHierarchy,
    proc: PathBuf,
}

impl LockBench {
    fn new() -> Self {
        let mut tree = FakeHierarchy::new(&["/a", "/a/below", "/b"]);
        let proc = tree.root.path().join("proc");
        let mut options = EnforcerOptions::new("0-7".parse().unwrap(), "0-1".parse().unwrap());
        options.proc.clone_from(&proc);
        options.lock_wait = LOCK_WAIT;
        tree.enforcer = Enforcer::new(tree.root.path().to_owned(), None, options);
        let bench = Self { tree, proc };
        for process in ["7", "8", "9"] {
            bench.write(&format!("{process}/clear_refs"), "");
        }
        bench.write("7/comm", "evil\n");
        bench.tree.write_file("/a/below", "cgroup.procs", "8\n7");
        bench.tree.write_file("/b", "cgroup.procs", "9");
        bench
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.proc.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    /// Locks the memory map of process 7.
    fn lock(&self) -> PathBuf {
        let file = self.proc.join("7/clear_refs");
        fs::remove_file(&file).unwrap();
        mkfifoat(CWD, &file, Mode::RUSR | Mode::WUSR).unwrap();
        file
    }

    fn hold(&self, cgroup: &str) -> Result<AppliedSettings, String> {
        let settings = Settings { memory_min: Some(mib(64)), ..pinned("2-3", "1") };
        self.execute(&AppliedSettings::default(), &SettingsChange::Hold(path(cgroup), settings))
    }

    fn execute(&self, applied: &AppliedSettings, change: &SettingsChange) -> Result<AppliedSettings, String> {
        let plan = self.tree.enforcer.plan(applied, change).unwrap();
        match self.tree.enforcer.execute(&plan) {
            Ok(report) => Ok(plan.outcome_of(&report)),
            Err(failure) => Err(failure.to_string()),
        }
    }
}

const LOCKED: &str = "cpuset.mems is not changed: process 7 (evil) keeps its memory map locked";

#[test]
fn locked_map_is_not_waited_for() {
    let bench = LockBench::new();
    let fifo = bench.lock();
    let error = bench.hold("/a").unwrap_err();
    assert!(error.contains(LOCKED), "{error}");
    assert_eq!(bench.tree.all("/a"), LockBench::new().tree.all("/a"), "nothing is half applied");

    // The same lock takes no time again, and none of another cgroup.
    let began = Instant::now();
    for _ in 0..10 {
        let error = bench.hold("/a").unwrap_err();
        assert!(error.contains(LOCKED), "{error}");
    }
    bench.hold("/b").unwrap();
    assert!(began.elapsed() < LOCK_WAIT * 5, "{:?}", began.elapsed());
    assert_eq!(fs::read_to_string(bench.proc.join("9/clear_refs")).unwrap(), "5");

    let _reader = File::options().read(true).write(true).open(fifo).unwrap();
    let began = Instant::now();
    while bench.hold("/a").is_err() {
        assert!(began.elapsed() < Duration::from_mins(1));
    }
    assert_eq!(bench.tree.get("/a", "cpuset.mems"), "1");
}

#[test]
fn threaded_cgroup_is_checked() {
    let bench = LockBench::new();
    fs::remove_file(bench.tree.root.path().join("a/below/cgroup.procs")).unwrap();
    bench.tree.write_file("/a/below", "cgroup.threads", "7\n8");
    bench.lock();
    let error = bench.hold("/a").unwrap_err();
    assert!(error.contains(LOCKED), "{error}");
}

/// It is also written while as many checks hang as may run.
#[test]
fn empty_cgroup_needs_no_check() {
    let bench = LockBench::new();
    fs::write(bench.tree.root.path().join("b/cgroup.procs"), "").unwrap();
    fs::remove_dir_all(&bench.proc).unwrap();
    bench.hold("/b").unwrap();
}

#[test]
fn restore_of_locked_cgroup_is_retried() {
    let bench = LockBench::new();
    let applied = bench.hold("/a").unwrap();
    let fifo = bench.lock();
    let release = SettingsChange::Release(path("/a"));
    let error = bench.execute(&applied, &release).unwrap_err();
    assert!(error.contains(LOCKED), "{error}");
    assert_eq!(
        (bench.tree.get("/a", "cpuset.mems"), bench.tree.get("/a", "memory.min")),
        ("1".into(), "0".into())
    );

    let drift = Drift {
        cgroup: path("/a"),
        knob: Knob::CpusetMems,
        wanted: "1".parse().map(KnobValue::Nodes).unwrap(),
        found: Some(unset(Knob::CpusetMems)),
        kind: DriftKind::Rewritten,
    };
    bench.tree.enforcer.repair(&applied, &drift).expect("it holds the nodes already");
    bench.tree.write_file("/a", "cpuset.mems", "0");
    let error = bench.tree.enforcer.repair(&applied, &drift).unwrap_err().to_string();
    assert!(error.contains(LOCKED), "{error}");
    bench.tree.write_file("/a", "cpuset.mems", "1");

    let _reader = File::options().read(true).write(true).open(fifo).unwrap();
    let began = Instant::now();
    while bench.execute(&applied, &release).is_err() {
        assert!(began.elapsed() < Duration::from_mins(1));
    }
    assert_eq!(bench.tree.get("/a", "cpuset.mems"), "");
}

/// The kernel has no `clear_refs`, or not for the daemon.
#[test]
fn arguments_are_read_instead() {
    let bench = LockBench::new();
    fs::remove_file(bench.proc.join("7/clear_refs")).unwrap();
    let cmdline = bench.proc.join("7/cmdline");
    mkfifoat(CWD, &cmdline, Mode::RUSR | Mode::WUSR).unwrap();
    let error = bench.hold("/a").unwrap_err();
    assert!(error.contains(LOCKED), "{error}");
    drop(File::options().read(true).write(true).open(cmdline).unwrap());
}

#[test]
fn own_map_is_not_locked() {
    let mut bench = LockBench::new();
    let mut options = EnforcerOptions::new("0-7".parse().unwrap(), "0-1".parse().unwrap());
    options.lock_wait = Duration::from_mins(1);
    bench.tree.enforcer = Enforcer::new(bench.tree.root.path().to_owned(), None, options);
    bench.tree.write_file("/a/below", "cgroup.procs", &std::process::id().to_string());
    bench.hold("/a").unwrap();
}

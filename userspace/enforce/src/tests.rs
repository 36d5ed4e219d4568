//! Tests against trees of plain files: which values are read, planned and written. The kernel's reaction is tested in
//! virtual machines (tests/vm).

mod drop_ins;
mod locked_maps;
mod threads;

use std::{
    fs,
    os::unix::fs::chown,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue, Limit, Partition},
};
use numaward_model::Settings;
use numaward_tests_support::skip_outside_ci;
use numaward_topology::{Bytes, CpuSet, HugepageSize};
use tempfile::TempDir;

use super::{backend::unset, *};

/// A hierarchy in which every cgroup has every knob, unset, on a machine with CPUs 0-7 and nodes 0-1.
struct FakeHierarchy {
    root: TempDir,
    enforcer: Enforcer,
}

impl FakeHierarchy {
    fn new(cgroups: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut options = EnforcerOptions::new("0-7".parse().unwrap(), "0-1".parse().unwrap());
        options.proc = root.path().join("proc");
        let tree = Self { enforcer: Enforcer::new(root.path().to_owned(), None, options), root };
        tree.write_file("/", "cgroup.subtree_control", "cpuset memory hugetlb");
        tree.write_file("/", "cpuset.cpus.effective", "0-7");
        tree.write_file("/", "cpuset.mems.effective", "0-1");
        for cgroup in cgroups {
            tree.make(cgroup);
        }
        tree
    }

    fn make(&self, cgroup: &str) {
        fs::create_dir(path(cgroup).dir(self.root.path())).unwrap();
        for (file, value) in [
            ("cgroup.type", "domain"),
            ("cgroup.subtree_control", "cpuset memory hugetlb"),
            ("cpuset.cpus", ""),
            ("cpuset.cpus.effective", "0-7"),
            ("cpuset.cpus.partition", "member"),
            ("cpuset.cpus.exclusive", ""),
            ("cpuset.mems", ""),
            ("cpuset.mems.effective", "0-1"),
            ("memory.min", "0"),
            ("memory.low", "0"),
            ("memory.high", "max"),
            ("memory.max", "max"),
            ("hugetlb.2MB.max", "max"),
        ] {
            self.write_file(cgroup, file, value);
        }
        fs::write(path(cgroup).dir(self.root.path()).join("cgroup.procs"), "").unwrap();
    }

    fn write_file(&self, cgroup: &str, file: &str, value: &str) {
        fs::write(path(cgroup).dir(self.root.path()).join(file), format!("{value}\n")).unwrap();
    }

    fn get(&self, cgroup: &str, file: &str) -> String {
        let text = fs::read_to_string(path(cgroup).dir(self.root.path()).join(file)).unwrap();
        text.lines().next().unwrap_or_default().to_owned()
    }

    /// Returns the content of all knobs.
    fn all(&self, cgroup: &str) -> Vec<String> {
        [
            "cpuset.cpus",
            "cpuset.mems",
            "memory.min",
            "memory.low",
            "memory.high",
            "memory.max",
            "hugetlb.2MB.max",
        ]
        .iter()
        .map(|file| self.get(cgroup, file))
        .collect()
    }

    /// Plans and executes a change. Returns the resulting state.
    fn apply(
        &self,
        applied: &AppliedSettings,
        change: &SettingsChange,
    ) -> (AppliedSettings, EnforcementReport) {
        let plan = self.enforcer.plan(applied, change).unwrap();
        let report = self.enforcer.execute(&plan).unwrap();
        let outcome = plan.outcome_of(&report);
        assert_eq!(
            self.enforcer.plan(&outcome, &SettingsChange::Upkeep).unwrap().steps,
            [],
            "nothing is left"
        );
        (outcome, report)
    }

    fn hold(&self, applied: &AppliedSettings, cgroup: &str, settings: Settings) -> AppliedSettings {
        self.apply(applied, &SettingsChange::Hold(path(cgroup), settings)).0
    }

    fn release(&self, applied: &AppliedSettings, cgroup: &str) -> AppliedSettings {
        self.apply(applied, &SettingsChange::Release(path(cgroup))).0
    }
}

fn path(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn mib(count: u64) -> Limit {
    Limit::Bytes(Bytes::mib(count))
}

fn protected(min: u64) -> Settings {
    Settings { memory_min: Some(mib(min)), ..Settings::default() }
}

fn pinned(cpus: &str, mems: &str) -> Settings {
    Settings { cpus: Some(cpus.parse().unwrap()), mems: Some(mems.parse().unwrap()), ..Settings::default() }
}

fn bytes(mib: u64) -> String {
    (mib << 20).to_string()
}

#[test]
fn writes_settings_and_restores_values() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "cpuset.cpus", "0-3");
    tree.write_file("/a", "memory.max", &bytes(512));
    let found = tree.all("/a");
    let settings = Settings {
        memory_min: Some(mib(64)),
        memory_low: Some(mib(96)),
        memory_high: Some(mib(128)),
        memory_max: Some(mib(256)),
        hugetlb: [(HugepageSize(Bytes::mib(2)), mib(4))].into(),
        ..pinned("2-3", "1")
    };
    let (applied, report) =
        tree.apply(&AppliedSettings::default(), &SettingsChange::Hold(path("/a"), settings.clone()));
    assert_eq!(tree.all("/a"), ["2-3", "1", &bytes(64), &bytes(96), &bytes(128), &bytes(256), &bytes(4)]);
    assert_eq!(report.written.len(), 7);
    assert_eq!(applied.held().collect::<Vec<_>>(), [(&path("/a"), &settings)]);

    let text = serde_json::to_string(&applied).unwrap();
    assert_eq!(serde_json::from_str::<AppliedSettings>(&text).unwrap(), applied, "{text}");

    let applied = tree.release(&applied, "/a");
    assert_eq!(tree.all("/a"), found);
    assert!(applied.is_empty());
}

#[test]
fn replaced_settings_restore_knobs() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.high", &bytes(100));
    let applied = tree.hold(
        &AppliedSettings::default(),
        "/a",
        Settings { memory_high: Some(mib(50)), ..pinned("0-1", "0") },
    );
    let (again, report) = tree.apply(
        &applied,
        &SettingsChange::Hold(path("/a"), Settings { memory_high: Some(mib(50)), ..pinned("0-1", "0") }),
    );
    assert_eq!((report.written, &again), (vec![], &applied));

    let (applied, report) = tree.apply(&applied, &SettingsChange::Hold(path("/a"), pinned("0-1", "1")));
    let written: Vec<_> = report.written.iter().map(|step| step.knob).collect();
    assert_eq!(written, [Knob::MemoryHigh, Knob::CpusetMems], "a limit rises first");
    assert_eq!(tree.get("/a", "memory.high"), bytes(100));
    assert!(tree.release(&applied, "/a").is_empty());
    assert_eq!(tree.get("/a", "cpuset.mems"), "");
}

#[test]
fn ancestors_protect_sum_of_claims() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/b/c", "/a/b/d", "/a/other"]);
    tree.write_file("/a", "memory.min", &bytes(10));
    tree.write_file("/a/other", "memory.min", &bytes(7));
    let mins = || ["/a", "/a/b", "/a/b/c", "/a/b/d"].map(|cgroup| tree.get(cgroup, "memory.min"));

    let applied = tree.hold(&AppliedSettings::default(), "/a/b/c", protected(20));
    assert_eq!(mins(), [27, 20, 20, 0].map(bytes), "and what another already claims");
    let applied = tree.hold(&applied, "/a/b/d", protected(30));
    assert_eq!(mins(), [57, 50, 20, 30].map(bytes));
    let applied = tree.hold(&applied, "/a/b/d", protected(1));
    assert_eq!(mins(), [28, 21, 20, 1].map(bytes));
    let applied = tree.release(&applied, "/a/b/c");
    assert_eq!(mins(), [10, 1, 0, 1].map(bytes), "8 are needed, and an admin had set 10");
    let applied = tree.release(&applied, "/a/b/d");
    assert_eq!(mins(), [10, 0, 0, 0].map(bytes));
    assert!(applied.is_empty());
    assert_eq!(tree.get("/a/other", "memory.min"), bytes(7));
}

#[test]
fn unlimited_claim_counts_by_usage() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/other"]);
    for knob in ["memory.min", "memory.low"] {
        tree.write_file("/a/other", knob, "max");
    }
    let settings = Settings { memory_low: Some(mib(30)), ..protected(20) };
    let protection = || ["memory.min", "memory.low"].map(|knob| tree.get("/a", knob));
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", settings.clone());
    assert_eq!(protection(), [20, 30].map(bytes), "what it uses is not known");
    assert!(tree.release(&applied, "/a/b").is_empty());
    tree.write_file("/a/other", "memory.current", &bytes(7));
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", settings);
    assert_eq!(protection(), [27, 37].map(bytes));
    assert!(tree.release(&applied, "/a/b").is_empty());
    assert_eq!(protection(), [0, 0].map(bytes));
    assert_eq!(tree.get("/a/other", "memory.min"), "max");
}

/// The owner of a delegated subtree may claim any amount there.
#[test]
fn claims_of_delegated_cgroups_are_ignored() {
    let tree = FakeHierarchy::new(&["/a", "/a/u", "/a/u/b", "/a/u/b/c", "/a/u/b/d", "/a/u/other"]);
    let delegate = |cgroup| chown(path(cgroup).dir(tree.root.path()), Some(65534), None);
    if delegate("/a/u").and_then(|()| delegate("/a/u/b")).is_err() {
        return skip_outside_ci("only root can change the owner of a directory");
    }
    let terabyte = bytes(1 << 20);
    for cgroup in ["/a/u/b", "/a/u/other"] {
        tree.write_file(cgroup, "memory.min", &terabyte);
    }
    let mins = || ["/a", "/a/u", "/a/u/b"].map(|cgroup| tree.get(cgroup, "memory.min"));
    let applied = tree.hold(&AppliedSettings::default(), "/a/u/b/c", protected(20));
    assert_eq!(mins(), [bytes(20), bytes(20), terabyte.clone()]);
    let with_sidecar = Settings { beside: Some(Bytes::mib(5)), ..protected(30) };
    let applied = tree.hold(&applied, "/a/u/b/d", with_sidecar);
    assert_eq!(mins(), [bytes(55), bytes(55), terabyte.clone()]);
    let applied = tree.release(&tree.release(&applied, "/a/u/b/c"), "/a/u/b/d");
    assert_eq!(mins(), [bytes(0), bytes(0), terabyte]);
    assert!(applied.is_empty());
}

#[test]
fn forgets_claims_of_gone_cgroup() {
    let tree = FakeHierarchy::new(&["/a", "/a/pod", "/a/pod/c", "/a/pod/d"]);
    let applied = tree.hold(&AppliedSettings::default(), "/a/pod/c", protected(20));
    let applied = tree.hold(&applied, "/a/pod/d", protected(30));
    fs::remove_dir_all(path("/a/pod/c").dir(tree.root.path())).unwrap();
    let applied = tree.release(&applied, "/a/pod/c");
    assert_eq!(["/a", "/a/pod"].map(|cgroup| tree.get(cgroup, "memory.min")), [30, 30].map(bytes));
    assert!(tree.release(&applied, "/a/pod/d").is_empty());
}

#[test]
fn protects_sidecars_once() {
    let tree = FakeHierarchy::new(&["/a", "/a/pod", "/a/pod/c", "/a/pod/d"]);
    let beside = |min| Settings { beside: Some(Bytes::mib(5)), ..protected(min) };
    let mins = || ["/a", "/a/pod"].map(|cgroup| tree.get(cgroup, "memory.min"));
    let applied = tree.hold(&AppliedSettings::default(), "/a/pod/c", beside(20));
    assert_eq!(mins(), [25, 25].map(bytes));
    let applied = tree.hold(&applied, "/a/pod/d", beside(10));
    assert_eq!(mins(), [35, 35].map(bytes));
    let stored: AppliedSettings = serde_json::from_str(&serde_json::to_string(&applied).unwrap()).unwrap();
    assert_eq!(stored, applied);
    let applied = tree.hold(&stored, "/a/pod/c", beside(0));
    assert_eq!(mins(), [15, 15].map(bytes));
    let applied = tree.release(&tree.release(&applied, "/a/pod/c"), "/a/pod/d");
    assert_eq!(mins(), [0, 0].map(bytes));
    assert!(applied.is_empty());
}

#[test]
fn ancestor_keeps_own_protection() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    tree.write_file("/a", "memory.min", &bytes(3));
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(20));
    assert_eq!(tree.get("/a", "memory.min"), bytes(20));
    let applied = tree.hold(&applied, "/a", protected(40));
    assert_eq!(tree.get("/a", "memory.min"), bytes(40));
    let applied = tree.hold(&applied, "/a/b", protected(50));
    assert_eq!(tree.get("/a", "memory.min"), bytes(50));
    let applied = tree.release(&applied, "/a");
    assert_eq!(tree.get("/a", "memory.min"), bytes(50), "the child still needs it");
    let applied = tree.release(&applied, "/a/b");
    assert_eq!(tree.get("/a", "memory.min"), bytes(3), "found before all of it");
    assert!(applied.is_empty());
}

#[test]
fn keeps_values_of_ancestors() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/c"]);
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(20));
    tree.write_file("/a", "memory.min", &bytes(99));
    assert_eq!(tree.enforcer.drift(&applied, &path("/a")).unwrap(), [], "more is no drift");
    let applied = tree.hold(&applied, "/a/c", protected(20));
    assert_eq!(tree.get("/a", "memory.min"), bytes(99), "and is not lowered");
    let applied = tree.release(&applied, "/a/c");
    let (applied, report) = tree.apply(&applied, &SettingsChange::Release(path("/a/b")));
    assert_eq!(tree.get("/a", "memory.min"), bytes(99));
    assert_eq!(report.kept.len(), 1);
    assert!(applied.is_empty());
}

#[test]
fn equal_original_is_not_restored() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    // A container runtime writes requested values by itself, and removes them when the container ends.
    tree.write_file("/a/b", "memory.min", &bytes(20));
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(20));
    tree.write_file("/a/b", "memory.min", &bytes(0));
    let (applied, report) = tree.apply(&applied, &SettingsChange::Release(path("/a/b")));
    assert_eq!(tree.get("/a/b", "memory.min"), bytes(0));
    assert_eq!(report.kept, []);
    assert!(applied.is_empty());
}

#[test]
fn refresh_reads_claims_again() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/c"]);
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(20));
    tree.write_file("/a/c", "memory.min", &bytes(5));
    tree.enforcer.refresh();
    tree.apply(&applied, &SettingsChange::Upkeep);
    assert_eq!(tree.get("/a", "memory.min"), bytes(25));
}

#[test]
fn recovers_from_crash_at_any_write() {
    let changes: [(&str, SettingsChange); 3] = [
        (
            "hold",
            SettingsChange::Hold(path("/a/b"), Settings { memory_min: Some(mib(8)), ..pinned("1", "1") }),
        ),
        (
            "other",
            SettingsChange::Hold(path("/a/b"), Settings { memory_max: Some(mib(9)), ..pinned("2", "0") }),
        ),
        ("release", SettingsChange::Release(path("/a/b"))),
    ];
    for upto in 0..changes.len() {
        for written in 0.. {
            let tree = FakeHierarchy::new(&["/a", "/a/b"]);
            tree.write_file("/a/b", "cpuset.cpus", "0-6");
            let before = [tree.all("/a"), tree.all("/a/b")];
            let mut applied = AppliedSettings::default();
            for (_, change) in &changes[..upto] {
                applied = tree.apply(&applied, change).0;
            }
            let mut plan = tree.enforcer.plan(&applied, &changes[upto].1).unwrap();
            let all = plan.steps.len();
            plan.steps.truncate(written);
            tree.enforcer.execute(&plan).unwrap();

            // The daemon starts again with the intent.
            let mut applied = tree.apply(&plan.intent, &SettingsChange::Upkeep).0;
            if upto < 2 {
                assert_eq!(
                    tree.get("/a/b", "cpuset.cpus"),
                    ["1", "2"][upto],
                    "{} {written}",
                    changes[upto].0
                );
                assert_eq!(tree.get("/a", "memory.min"), [bytes(8), bytes(0)][upto]);
                applied = tree.release(&applied, "/a/b");
            }
            assert_eq!([tree.all("/a"), tree.all("/a/b")], before, "{} {written}", changes[upto].0);
            assert!(applied.is_empty(), "{applied:?}");
            if written == all {
                break;
            }
        }
    }
}

#[test]
fn restores_after_unfinished_change() {
    for (crashes, again) in [(true, false), (true, true), (false, false)] {
        for of_first in ["1", "0-1"] {
            let tree = FakeHierarchy::new(&["/a"]);
            let hold = |cpus: &str| SettingsChange::Each(vec![(path("/a"), Some(pinned(cpus, "0")))]);
            let (mut applied, _) = tree.apply(&AppliedSettings::default(), &hold(of_first));
            let plan = tree.enforcer.plan(&applied, &hold("0-2")).unwrap();
            // The knob keeps the first value: the daemon dies, or the write fails.
            applied = if crashes { plan.intent } else { plan.outcome_of(&EnforcementReport::default()) };
            if again {
                applied = tree.enforcer.plan(&applied, &hold("2")).unwrap().intent;
            }
            assert_eq!(tree.get("/a", "cpuset.cpus"), of_first);

            let release = SettingsChange::Each(vec![(path("/a"), None)]);
            let (applied, report) = tree.apply(&applied, &release);
            assert_eq!(tree.get("/a", "cpuset.cpus"), "", "{crashes} {again}");
            assert!(applied.is_empty() && report.kept.is_empty(), "{report:?}");
        }
    }
}

#[test]
fn restores_set_without_partition_cpus() {
    let tree = FakeHierarchy::new(&["/a", "/b"]);
    tree.write_file("/b", "cpuset.cpus", "3");
    tree.write_file("/b", "cpuset.cpus.partition", "isolated");
    for cgroup in ["/", "/a"] {
        tree.write_file(cgroup, "cpuset.cpus.effective", "0-2,4-7");
    }
    let hold = SettingsChange::Each(vec![(path("/a"), Some(pinned("1-3", "0")))]);
    let plan = tree.enforcer.plan(&AppliedSettings::default(), &hold).unwrap();
    let report = tree.enforcer.execute(&plan).unwrap();
    assert_eq!(tree.get("/a", "cpuset.cpus"), "1-2");
    let release = SettingsChange::Each(vec![(path("/a"), None)]);
    let plan = tree.enforcer.plan(&plan.outcome_of(&report), &release).unwrap();
    let report = tree.enforcer.execute(&plan).unwrap();
    assert_eq!((tree.get("/a", "cpuset.cpus").as_str(), report.kept.len()), ("", 0));
}

#[test]
fn finished_change_replaces_nothing() {
    let tree = FakeHierarchy::new(&["/a"]);
    let hold = |cpus: &str| SettingsChange::Hold(path("/a"), pinned(cpus, "0"));
    let (applied, _) = tree.apply(&AppliedSettings::default(), &hold("1"));
    let plan = tree.enforcer.plan(&applied, &hold("2")).unwrap();
    let report = tree.enforcer.execute(&plan).unwrap();
    let applied = plan.outcome_of(&report);
    assert!(applied != plan.intent && applied.is_equal_when_written(&plan.intent));
    // Another program has set the value of before.
    tree.write_file("/a", "cpuset.cpus", "1");
    let (_, report) = tree.apply(&applied, &SettingsChange::Release(path("/a")));
    assert_eq!((report.kept.len(), tree.get("/a", "cpuset.cpus").as_str()), (1, "1"));
}

#[test]
fn crash_in_release_keeps_protection() {
    let protected = |min| Settings { memory_min: Some(mib(min)), ..Settings::default() };
    for written in 0.. {
        let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/c"]);
        let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(8));
        let applied = tree.hold(&applied, "/a/c", protected(4));
        assert_eq!(tree.get("/a", "memory.min"), bytes(12));
        let mut plan = tree.enforcer.plan(&applied, &SettingsChange::Release(path("/a/c"))).unwrap();
        let all = plan.steps.len();
        plan.steps.truncate(written);
        tree.enforcer.execute(&plan).unwrap();

        // The daemon starts again with the intent, and may die again before it writes.
        tree.enforcer.refresh();
        let again = tree.enforcer.plan(&plan.intent, &SettingsChange::Upkeep).unwrap().intent;
        let (applied, _) = tree.apply(&again, &SettingsChange::Upkeep);
        assert_eq!(tree.get("/a", "memory.min"), bytes(8), "{written}");
        assert_eq!(tree.get("/a/c", "memory.min"), bytes(0), "{written}");
        assert!(tree.release(&applied, "/a/b").is_empty(), "{written}");
        assert_eq!(tree.get("/a", "memory.min"), bytes(0), "{written}");
        if written == all {
            break;
        }
    }
}

#[test]
fn failed_write_undoes_plan() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    let before = [tree.all("/a"), tree.all("/a/b")];
    let settings = Settings { memory_min: Some(mib(8)), memory_max: Some(mib(64)), ..pinned("1", "1") };
    let plan = tree
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a/b"), settings))
        .unwrap();
    fs::remove_file(path("/a/b").dir(tree.root.path()).join("cpuset.mems")).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    assert_eq!(failure.step.as_ref().map(|step| step.knob), Some(Knob::CpusetMems));
    assert!(failure.to_string().contains("a/b/cpuset.mems: no such knob (writing \"1\")"), "{failure}");
    assert!(failure.undo.is_empty(), "{failure}");
    tree.write_file("/a/b", "cpuset.mems", "");
    assert_eq!([tree.all("/a"), tree.all("/a/b")], before);
}

#[test]
fn hold_all_skips_failed_cgroups() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/c", "/a/d", "/e"]);
    let settings =
        |cpus| Settings { memory_min: Some(mib(8)), memory_max: Some(mib(64)), ..pinned(cpus, "1") };
    let paths = ["/a/b", "/a/c", "/a/d", "/e"].map(path);
    let holds = paths.iter().zip(["0", "1", "2", "3"]).map(|(path, cpus)| (path.clone(), settings(cpus)));
    let plan =
        tree.enforcer.plan(&AppliedSettings::default(), &SettingsChange::HoldAll(holds.collect())).unwrap();
    assert!(plan.holds_several() && !plan.is_undone());
    fs::remove_file(path("/a/c").dir(tree.root.path()).join("cpuset.mems")).unwrap();
    // A cgroup that disappears gets no settings either, and its workload has to learn this.
    fs::remove_dir_all(path("/e").dir(tree.root.path())).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    let outcome = plan.outcome_of(&failure.report);
    let paths: Vec<_> = paths.iter().collect();
    let parts = failure.split(&paths);
    let parts: Vec<_> = parts.iter().map(|part| part.as_ref().map(ToString::to_string)).collect();
    assert!(parts[0].is_none() && parts[2].is_none(), "{parts:?}");
    assert!(parts[1].as_ref().is_some_and(|part| part.contains("c/cpuset.mems")), "{parts:?}");
    assert!(parts[3].as_ref().is_some_and(|part| part.contains("/e")), "{parts:?}");
    let held = |path: &str| (tree.get(path, "cpuset.cpus"), tree.get(path, "memory.min"));
    assert_eq!((held("/a/b"), held("/a/d")), (("0".to_owned(), bytes(8)), ("2".to_owned(), bytes(8))));
    assert_eq!(tree.get("/a/c", "memory.max"), "max", "what follows is not written");
    assert_eq!(tree.get("/a", "memory.min"), bytes(24));
    // It is undone, and the ancestors hold no more than the other cgroups need.
    tree.write_file("/a/c", "cpuset.mems", "");
    tree.apply(&outcome, &SettingsChange::Each(vec![(path("/a/c"), None), (path("/e"), None)]));
    assert_eq!((tree.get("/a", "memory.min"), tree.get("/a/c", "memory.min")), (bytes(16), "0".to_owned()));
}

#[test]
fn ancestor_error_fails_all_children() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/c", "/d"]);
    let paths = ["/a/b", "/a/c", "/d"].map(path);
    let holds = paths.iter().map(|path| (path.clone(), protected(8)));
    let plan =
        tree.enforcer.plan(&AppliedSettings::default(), &SettingsChange::HoldAll(holds.collect())).unwrap();
    fs::remove_file(path("/a").dir(tree.root.path()).join("memory.min")).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    let parts = failure.split(&paths.each_ref());
    let parts: Vec<_> = parts.iter().map(|part| part.as_ref().map(ToString::to_string)).collect();
    assert_eq!((parts[0].is_some(), &parts[2]), (true, &None));
    assert_eq!(parts[0], parts[1]);
}

#[test]
fn restores_no_limit_below_usage() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.max", &bytes(64));
    let settings = Settings { memory_max: Some(mib(128)), ..pinned("1", "1") };
    let applied = tree.hold(&AppliedSettings::default(), "/a", settings);
    let uses = |current: u64, cache: u64, dirty: u64| {
        tree.write_file("/a", "memory.current", &bytes(current));
        let stat = [("active_file", cache / 2), ("inactive_file", cache / 2), ("file_dirty", dirty)];
        let stat = stat.map(|(key, mib)| format!("{key} {}", bytes(mib)));
        tree.write_file("/a", "memory.stat", &stat.join("\n"));
    };
    let give_back = |applied: &AppliedSettings| {
        let plan = tree.enforcer.plan(applied, &SettingsChange::Each(vec![(path("/a"), None)])).unwrap();
        let report = tree.enforcer.execute(&plan).unwrap();
        (plan.outcome_of(&report), report)
    };
    uses(100, 40, 8);
    let (applied, report) = give_back(&applied);
    assert_eq!(
        ["cpuset.cpus", "cpuset.mems", "memory.max"].map(|file| tree.get("/a", file)),
        ["", "", &bytes(128)]
    );
    let [late] = &report.late[..] else { panic!("{report:?}") };
    assert_eq!(late.error.to_string(), "/a: memory.max stays 134217728: 68Mi are in use, more than 64Mi");
    let pending: Vec<_> =
        applied.pending_restores().map(|(path, _, knobs)| (path.to_string(), knobs)).collect();
    assert_eq!(pending, [("/a".to_owned(), vec![Knob::MemoryMax])]);
    assert_eq!(tree.enforcer.drift(&applied, &path("/a")).unwrap(), []);

    // Clean page cache can be dropped.
    uses(100, 44, 8);
    let (applied, report) = give_back(&applied);
    assert_eq!((tree.get("/a", "memory.max"), report.late.len()), (bytes(64), 0));
    assert!(applied.is_empty());
}

#[test]
fn lowered_limit_may_wait_for_reclaim() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.current", &bytes(100));
    let may_wait = |settings| {
        let plan = tree
            .enforcer
            .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a"), settings))
            .unwrap();
        tree.enforcer.may_wait(plan.steps())
    };
    let high = |limit| Settings { memory_high: Some(mib(limit)), ..Settings::default() };
    let max = |limit| Settings { memory_max: Some(mib(limit)), ..Settings::default() };
    assert!(may_wait(high(99)) && may_wait(max(99)));
    assert!(!may_wait(high(100)) && !may_wait(max(100)) && !may_wait(protected(1)));
    tree.write_file("/a", "memory.high", &bytes(10));
    assert!(!may_wait(high(20)), "it rises");
}

#[test]
fn repairs_no_limit_below_usage() {
    let tree = FakeHierarchy::new(&["/a"]);
    let settings = Settings { memory_max: Some(mib(128)), ..Settings::default() };
    let applied = tree.hold(&AppliedSettings::default(), "/a", settings);
    tree.write_file("/a", "memory.max", &bytes(512));
    tree.write_file("/a", "memory.current", &bytes(200));
    let drift = tree.enforcer.drift(&applied, &path("/a")).unwrap();
    assert!(tree.enforcer.repair(&applied, &drift[0]).is_err());
    assert_eq!(tree.get("/a", "memory.max"), bytes(512));
    tree.write_file("/a", "memory.current", &bytes(100));
    tree.enforcer.repair(&applied, &drift[0]).unwrap();
    assert_eq!(tree.get("/a", "memory.max"), bytes(128));
}

#[test]
fn failed_undo_stays_pending() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.max", &bytes(64));
    tree.write_file("/a", "memory.current", &bytes(100));
    let settings = Settings { memory_max: Some(mib(128)), ..pinned("1", "1") };
    let plan =
        tree.enforcer.plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a"), settings)).unwrap();
    fs::remove_file(path("/a").dir(tree.root.path()).join("cpuset.mems")).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    assert_eq!(failure.undo.len(), 1, "{failure}");
    let applied = plan.undone(&failure.undo);
    let record = applied.get(&path("/a")).unwrap();
    assert_eq!(record.written.0, [(Knob::MemoryMax, KnobValue::Limit(mib(128)))].into());
    assert_eq!(record.found.0, [(Knob::MemoryMax, KnobValue::Limit(mib(64)))].into());
    assert!(record.settings.is_empty());
    tree.write_file("/a", "memory.current", &bytes(10));
    assert!(tree.release(&applied, "/a").is_empty());
    assert_eq!(tree.get("/a", "memory.max"), bytes(64));
}

#[test]
fn failed_undo_of_resize_keeps_original() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.max", &bytes(64));
    let settings = Settings { memory_max: Some(mib(128)), ..pinned("1", "1") };
    let applied = tree.hold(&AppliedSettings::default(), "/a", settings);
    let larger = Settings { memory_max: Some(mib(256)), ..pinned("1", "0") };
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Hold(path("/a"), larger)).unwrap();
    tree.write_file("/a", "memory.current", &bytes(200));
    fs::remove_file(path("/a").dir(tree.root.path()).join("cpuset.mems")).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    // Neither the nodes nor the limit can be restored.
    assert_eq!((failure.undo.len(), tree.get("/a", "memory.max")), (2, bytes(256)), "{failure}");
    let applied = plan.undone(&failure.undo);
    tree.write_file("/a", "cpuset.mems", "1");
    assert_eq!(tree.enforcer.drift(&applied, &path("/a")).unwrap()[0].wanted, KnobValue::Limit(mib(128)));
    tree.write_file("/a", "memory.current", &bytes(10));
    assert!(tree.release(&applied, "/a").is_empty());
    assert_eq!(tree.get("/a", "memory.max"), bytes(64));
}

/// A process can hold the lock of its memory map for ever; a pipe that nothing writes hangs likewise.
#[test]
fn hung_process_delays_no_limit() {
    let tree = FakeHierarchy::new(&["/a"]);
    let process = tree.root.path().join("proc/77");
    fs::create_dir_all(&process).unwrap();
    tree.write_file("/a", "cgroup.procs", "77");
    tree.write_file("/a", "hugetlb.2MB.current", "0");
    tree.write_file("/a", "hugetlb.2MB.max", "max");
    let maps = process.join("maps");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &maps,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let settings =
        Settings { hugetlb: [(HugepageSize(Bytes::mib(2)), mib(8))].into(), ..Settings::default() };
    let start = Instant::now();
    tree.hold(&AppliedSettings::default(), "/a", settings);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(tree.get("/a", "hugetlb.2MB.max"), bytes(8));
    // The thread ends.
    drop(fs::File::options().write(true).open(maps).unwrap());
}

#[test]
fn keeps_limit_of_mapped_huge_pages() {
    let tree = FakeHierarchy::new(&["/a"]);
    let process = tree.root.path().join("proc/77");
    fs::create_dir_all(&process).unwrap();
    tree.write_file("/a", "cgroup.procs", "77");
    let touched = |touched: u64| {
        // 16 MiB are mapped.
        let maps = "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n";
        fs::write(process.join("maps"), maps).unwrap();
        fs::write(process.join("status"), format!("HugetlbPages:\t{} kB\n", touched << 10)).unwrap();
        tree.write_file("/a", "hugetlb.2MB.current", &bytes(touched));
    };
    let huge = |limit| Settings {
        hugetlb: [(HugepageSize(Bytes::mib(2)), mib(limit))].into(),
        ..Settings::default()
    };
    let plan = |limit| {
        let change = SettingsChange::Hold(path("/a"), huge(limit));
        tree.enforcer.plan(&AppliedSettings::default(), &change).unwrap()
    };
    touched(4);
    assert!(tree.enforcer.execute(&plan(16)).is_ok());
    tree.write_file("/a", "hugetlb.2MB.max", "max");
    let failure = tree.enforcer.execute(&plan(8)).unwrap_err().to_string();
    let reason = "/a: hugetlb.2MB.max stays max: its processes have mapped 16Mi of huge pages, more than 8Mi";
    assert_eq!((failure.as_str(), tree.get("/a", "hugetlb.2MB.max").as_str()), (reason, "max"));

    // The limit of before is restored when no process needs more.
    touched(0);
    tree.write_file("/a", "hugetlb.2MB.max", &bytes(8));
    let applied = tree.hold(&AppliedSettings::default(), "/a", huge(16));
    let give_back = |applied: &AppliedSettings| {
        let plan = tree.enforcer.plan(applied, &SettingsChange::Each(vec![(path("/a"), None)])).unwrap();
        assert!(tree.enforcer.may_wait(plan.steps()));
        let report = tree.enforcer.execute(&plan).unwrap();
        (plan.outcome_of(&report), report.late.len())
    };
    let (applied, late) = give_back(&applied);
    assert_eq!((tree.get("/a", "hugetlb.2MB.max"), late), (bytes(16), 1));
    assert_eq!(applied.pending_knobs(&path("/a")), [Knob::HugetlbMax(HugepageSize(Bytes::mib(2)))]);
    fs::remove_dir_all(&process).unwrap();
    let (applied, _) = give_back(&applied);
    assert!(applied.is_empty());
    assert_eq!(tree.get("/a", "hugetlb.2MB.max"), bytes(8));
}

#[test]
fn upkeep_survives_gone_cgroup() {
    let tree = FakeHierarchy::new(&["/a", "/b"]);
    let applied = tree.hold(&AppliedSettings::default(), "/a", pinned("1", "0"));
    let applied = tree.hold(&applied, "/b", pinned("2", "0"));
    tree.write_file("/b", "cpuset.cpus", "0-7");
    // A path below a file cannot be opened, as a knob of a cgroup that is gone.
    let knob = path("/a").dir(tree.root.path()).join("cpuset.cpus");
    fs::remove_file(&knob).unwrap();
    std::os::unix::fs::symlink("/dev/null/gone", &knob).unwrap();
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Upkeep).unwrap();
    tree.enforcer.execute(&plan).unwrap();
    assert_eq!(tree.get("/b", "cpuset.cpus"), "2");
    let hold = tree.enforcer.plan(&applied, &SettingsChange::Hold(path("/a"), pinned("3", "0")));
    assert!(hold.is_err_and(|error| error.is_gone()));
}

#[test]
fn replaced_cgroup_is_not_written() {
    let tree = FakeHierarchy::new(&["/a", "/b"]);
    let applied = tree.hold(&AppliedSettings::default(), "/b", pinned("2", "0"));
    let replace = |cgroup: &str| {
        let dir = path(cgroup).dir(tree.root.path());
        // The old directory is kept, so that its inode is not reused.
        fs::rename(&dir, tree.root.path().join(format!("old-{}", &cgroup[1..]))).unwrap();
        tree.make(cgroup);
    };
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Hold(path("/a"), pinned("1", "0"))).unwrap();
    replace("/a");
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    assert!(failure.error.is_gone(), "{failure}");
    assert_eq!(tree.get("/a", "cpuset.cpus"), "");

    let plan = tree.enforcer.plan(&applied, &SettingsChange::Each(vec![(path("/b"), None)])).unwrap();
    replace("/b");
    tree.write_file("/b", "cpuset.cpus", "7");
    let report = tree.enforcer.execute(&plan).unwrap();
    assert_eq!((report.written.len(), report.gone.len()), (0, 2));
    assert_eq!(tree.get("/b", "cpuset.cpus"), "7");
    // The original value is read again.
    assert_eq!(tree.enforcer.cpus_found(&applied, &path("/b")).unwrap().to_string(), "7");
}

#[test]
fn reboot_forgets_originals_of_units() {
    let tree = FakeHierarchy::new(&["/a"]);
    tree.write_file("/a", "memory.max", &bytes(512));
    let settings = Settings { memory_max: Some(mib(1024)), ..protected(8) };
    let mut applied = tree.hold(&AppliedSettings::default(), "/a", settings);
    let record = Record::clone(applied.get(&path("/a")).unwrap());
    let of_a_unit = Record { owner: Owner::Systemd("a.service".to_owned()), ..record };
    applied.insert(path("/a"), of_a_unit.into());
    assert_eq!(applied.unwritten().count(), 0);

    // The runtime properties ended with the boot, and the administrator has edited the unit.
    applied.forget_boot();
    tree.write_file("/a", "memory.min", "0");
    tree.write_file("/a", "memory.max", &bytes(700));
    assert_eq!(applied.unwritten().collect::<Vec<_>>(), [&path("/a")]);
    let (applied, _) = tree.apply(&applied, &SettingsChange::Upkeep);
    assert_eq!(applied.unwritten().count(), 0);
    let held = || (tree.get("/a", "memory.min"), tree.get("/a", "memory.max"));
    assert_eq!(held(), (bytes(8), bytes(1024)));
    assert!(tree.release(&applied, "/a").is_empty());
    assert_eq!(held(), ("0".to_owned(), bytes(700)));
}

#[test]
fn release_continues_after_error() {
    let tree = FakeHierarchy::new(&["/a"]);
    let applied = tree.hold(
        &AppliedSettings::default(),
        "/a",
        Settings { memory_max: Some(mib(64)), ..pinned("1", "1") },
    );
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Release(path("/a"))).unwrap();
    fs::remove_file(path("/a").dir(tree.root.path()).join("memory.max")).unwrap();
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    assert_eq!(failure.step.as_ref().map(|step| step.knob), Some(Knob::MemoryMax));
    assert_eq!(
        (tree.get("/a", "cpuset.cpus"), tree.get("/a", "cpuset.mems")),
        (String::new(), String::new())
    );
}

#[test]
fn forgets_gone_and_replaced_cgroups() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    let applied = tree.hold(&AppliedSettings::default(), "/a/b", protected(8));
    fs::remove_dir_all(path("/a/b").dir(tree.root.path())).unwrap();
    assert!(tree.enforcer.drift(&applied, &path("/a/b")).unwrap_err().is_gone());
    let after = tree.apply(&applied, &SettingsChange::Upkeep).0;
    assert!(after.is_empty());
    assert_eq!(tree.get("/a", "memory.min"), "0");

    // Plain files reuse inode numbers; another directory keeps the inode of this one in use.
    let applied = tree.hold(&AppliedSettings::default(), "/a", protected(8));
    fs::rename(path("/a").dir(tree.root.path()), tree.root.path().join("old")).unwrap();
    tree.make("/a");
    tree.write_file("/a", "memory.min", &bytes(8));
    assert!(tree.enforcer.drift(&applied, &path("/a")).unwrap_err().is_gone());
    assert!(tree.release(&applied, "/a").is_empty());
    assert_eq!(tree.get("/a", "memory.min"), bytes(8), "not ours");
}

#[test]
fn refuses_impossible_settings() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    tree.write_file("/a", "cpuset.cpus.effective", "0-3");
    tree.write_file("/a/b", "cpuset.cpus.effective", "0-3");
    for (cgroup, settings, words) in [
        ("/", pinned("0", "0"), "/: the root of the hierarchy takes no settings"),
        ("/none", pinned("0", "0"), "/none: no such cgroup"),
        (
            "/a/b",
            pinned("3-4", "0"),
            "/a/b: cpuset.cpus is to be 3-4, but only 0-3 is available to it (see cpuset.cpus.effective of /a)",
        ),
        ("/a/b", pinned("3", "2"), "/a/b: cpuset.mems is to be 2, but only 0-1 is available"),
        (
            "/a/b",
            Settings { cpus: Some(CpuSet::new()), ..Settings::default() },
            "cpuset.cpus: the set is empty",
        ),
        (
            "/a/b",
            Settings { partition: Some(Partition::Root), ..pinned("3", "0") },
            "/a/b: this kernel makes partitions only",
        ),
    ] {
        let error = tree
            .enforcer
            .plan(&AppliedSettings::default(), &SettingsChange::Hold(path(cgroup), settings))
            .unwrap_err();
        assert!(error.to_string().starts_with(words), "{error}");
    }
}

#[test]
fn enables_controllers_from_root() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    tree.write_file("/", "cgroup.subtree_control", "memory");
    tree.write_file("/a", "cgroup.subtree_control", "");
    let plan = tree
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a/b"), pinned("1", "1")))
        .unwrap();
    tree.enforcer.execute(&plan).unwrap();
    assert_eq!(tree.get("/", "cgroup.subtree_control"), "+cpuset");
    assert_eq!(tree.get("/a", "cgroup.subtree_control"), "+cpuset");

    tree.write_file("/a", "cgroup.subtree_control", "");
    tree.write_file("/a", "cgroup.procs", "12");
    let failure = tree.enforcer.execute(&plan).unwrap_err();
    assert!(failure.to_string().contains("the cgroup holds processes itself"), "{failure}");
}

/// Describes which controllers are enabled in which cgroup.
fn enabled(controllers: &EnabledControllers) -> Vec<String> {
    let words = controllers.iter().flat_map(|(path, enabled)| {
        enabled.controllers.iter().map(move |controller| format!("{path} {controller}"))
    });
    words.collect()
}

#[test]
fn disables_controllers_from_leaves() {
    let tree = FakeHierarchy::new(&["/a", "/a/b", "/a/b/c"]);
    for (cgroup, before) in [("/", "memory"), ("/a", ""), ("/a/b", "cpuset memory"), ("/a/b/c", "")] {
        tree.write_file(cgroup, "cgroup.subtree_control", before);
    }
    let hold = SettingsChange::Hold(path("/a/b/c"), pinned("1", "1"));
    let mut ours = tree.enforcer.plan(&AppliedSettings::default(), &hold).unwrap().enable;
    assert_eq!(enabled(&ours), ["/ cpuset", "/a cpuset"]);
    tree.write_file("/", "cgroup.subtree_control", "memory cpuset");
    tree.write_file("/a", "cgroup.subtree_control", "cpuset");
    assert_eq!(tree.enforcer.still_enabled(&ours), ours);

    // Controllers that /a/b had enabled before stay, and need /a, which needs the root.
    let left = controllers::disable(tree.root.path(), &mut ours);
    let words: Vec<_> =
        left.iter().map(|left| format!("{} {}: {}", left.cgroup, left.controller, left.reason)).collect();
    let expected = [
        "/a cpuset: /a/b has it enabled for its own children",
        "/ cpuset: /a has it enabled for its own children",
    ];
    assert_eq!(words, expected);
    assert_eq!(enabled(&ours), ["/ cpuset", "/a cpuset"]);
    assert_eq!(tree.get("/a", "cgroup.subtree_control"), "cpuset", "it is not written");

    tree.write_file("/a/b", "cgroup.subtree_control", "");
    let late = controllers::disable_within(tree.root.path(), &mut ours, Duration::ZERO);
    assert_eq!(late[0].reason, "/a has too many children to check that none uses it");
    assert_eq!(enabled(&ours), ["/ cpuset", "/a cpuset"]);
    assert_eq!(controllers::disable(tree.root.path(), &mut ours), []);
    assert!(ours.is_empty());
    assert_eq!(tree.get("/a", "cgroup.subtree_control"), "-cpuset");
    assert_eq!(tree.get("/", "cgroup.subtree_control"), "-cpuset");
}

#[test]
fn keeps_controllers_in_use() {
    let tree = FakeHierarchy::new(&["/a", "/a/b"]);
    tree.write_file("/", "cgroup.subtree_control", "");
    tree.write_file("/a", "cgroup.subtree_control", "");
    tree.write_file("/a/b", "cgroup.subtree_control", "");
    let hold = SettingsChange::Hold(path("/a/b"), pinned("1", "1"));
    let ours = tree.enforcer.plan(&AppliedSettings::default(), &hold).unwrap().enable;
    assert_eq!(enabled(&ours), ["/ cpuset", "/a cpuset"]);
    let reasons = |ours: &EnabledControllers| -> Vec<_> {
        let left = controllers::disable(tree.root.path(), &mut ours.clone());
        left.into_iter().map(|left| left.reason).collect()
    };
    // Another program disabled the controller of the root, and may have enabled it again.
    tree.write_file("/a", "cgroup.subtree_control", "cpuset");
    let ours = tree.enforcer.still_enabled(&ours);
    assert_eq!(enabled(&ours), ["/a cpuset"]);

    for (knob, value) in [("cpuset.cpus", "0-3"), ("cpuset.mems", "1"), ("cpuset.cpus.partition", "root")] {
        let before = tree.get("/a/b", knob);
        tree.write_file("/a/b", knob, value);
        assert_eq!(reasons(&ours), [format!("/a/b has {knob} {value}")]);
        assert_eq!(tree.get("/a", "cgroup.subtree_control"), "cpuset", "it is not written");
        tree.write_file("/a/b", knob, &before);
    }
    // A knob of another controller is no use of this one.
    tree.write_file("/a/b", "memory.low", "4096");
    // A set of everything stands for the empty set.
    tree.write_file("/a/b", "cpuset.cpus", "0-7");
    tree.write_file("/a/b", "cpuset.mems", "0-1");
    assert_eq!(reasons(&ours), [""; 0]);
    assert_eq!(tree.get("/a", "cgroup.subtree_control"), "-cpuset");

    // A new cgroup at the same path.
    tree.write_file("/a", "cgroup.subtree_control", "cpuset");
    fs::rename(tree.root.path().join("a"), tree.root.path().join("old")).unwrap();
    tree.make("/a");
    assert!(tree.enforcer.still_enabled(&ours).is_empty());
    assert_eq!(reasons(&ours), [""; 0]);
    assert_eq!(tree.get("/a", "cgroup.subtree_control"), "cpuset memory hugetlb", "it is not written");
}

#[test]
fn detects_and_repairs_drift() {
    let tree = FakeHierarchy::new(&["/a"]);
    let applied = tree.hold(
        &AppliedSettings::default(),
        "/a",
        Settings { memory_min: Some(Limit::Bytes(Bytes(5000))), ..pinned("1-3", "1") },
    );
    tree.write_file("/a", "cpuset.cpus", "1,2,3");
    tree.write_file("/a", "memory.min", "4096");
    tree.write_file("/a", "cpuset.cpus.effective", "1-3");
    tree.write_file("/a", "cpuset.mems.effective", "1");
    assert_eq!(tree.enforcer.drift(&applied, &path("/a")).unwrap(), [], "the same in other words");

    tree.write_file("/a", "cpuset.cpus", "0-7");
    tree.write_file("/a", "cpuset.mems.effective", "0");
    let drifts = tree.enforcer.drift(&applied, &path("/a")).unwrap();
    let told: Vec<_> = drifts.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["/a: cpuset.cpus is 0-7, should be 1-3", "/a: of cpuset.mems 1 only 0 is effective"]);
    assert_eq!(drifts[1].kind, DriftKind::Ineffective);
    let emptied = Drift { found: Some(KnobValue::Cpus(CpuSet::new())), ..drifts[0].clone() };
    assert_eq!(emptied.to_string(), "/a: cpuset.cpus is empty, should be 1-3");
    let report = tree.enforcer.repair(&applied, &drifts[0]).unwrap();
    assert_eq!((report.written.len(), tree.get("/a", "cpuset.cpus")), (1, "1-3".to_owned()));
}

#[test]
fn restores_cpus_after_partition() {
    for (found, taken, back) in [("0-3", "3", "0-2"), ("3", "3", "0-2,4-7"), ("", "3", "")] {
        let tree = FakeHierarchy::new(&["/a", "/b"]);
        tree.write_file("/a", "cpuset.cpus", found);
        let applied = tree.hold(&AppliedSettings::default(), "/a", pinned("1", "0"));
        tree.write_file("/b", "cpuset.cpus", taken);
        tree.write_file("/b", "cpuset.cpus.partition", "isolated");
        tree.write_file("/", "cpuset.cpus.effective", "0-2,4-7");
        tree.write_file("/a", "cpuset.cpus.effective", "1");
        let release = SettingsChange::Release(path("/a"));
        let plan = tree.enforcer.plan(&applied, &release).unwrap();
        let report = tree.enforcer.execute(&plan).unwrap();
        assert_eq!(tree.get("/a", "cpuset.cpus"), back, "{found}");
        // The missing CPUs are known and restored later, even if a crash has kept this from being stored.
        let applied = plan.outcome_of(&report);
        let crashed = tree.enforcer.plan(&plan.intent, &SettingsChange::Upkeep).unwrap();
        let report_after = tree.enforcer.execute(&crashed).unwrap();
        assert_eq!(crashed.outcome_of(&report_after), applied, "{found}");
        assert_eq!(
            (applied.is_empty(), report.owed.is_empty()),
            (found.is_empty(), found.is_empty()),
            "{found}"
        );
        assert_eq!(tree.enforcer.drift(&applied, &path("/a")).unwrap(), []);
        let again = tree.enforcer.plan(&applied, &SettingsChange::Upkeep).unwrap();
        let report = tree.enforcer.execute(&again).unwrap();
        assert_eq!(
            (again.outcome_of(&report), tree.get("/a", "cpuset.cpus")),
            (applied.clone(), back.to_owned())
        );
        tree.write_file("/b", "cpuset.cpus.partition", "member");
        tree.write_file("/", "cpuset.cpus.effective", "0-7");
        let applied = tree.apply(&applied, &SettingsChange::Upkeep).0;
        assert_eq!((applied.is_empty(), tree.get("/a", "cpuset.cpus")), (true, found.to_owned()));
    }
}

#[test]
fn restores_cpus_beside_nested_partition() {
    for set in [None, Some("0-1")] {
        let tree = FakeHierarchy::new(&["/a", "/b", "/b/c"]);
        tree.write_file("/", "cpuset.cpus.isolated", "");
        tree.write_file("/a", "cpuset.cpus", "0-3");
        let applied = tree.hold(&AppliedSettings::default(), "/a", pinned("1", "0"));
        let partition = Settings { partition: Some(Partition::Root), ..pinned("3", "0") };
        let applied = tree.hold(&applied, "/b/c", partition);
        assert_eq!(tree.get("/b", "cpuset.cpus.exclusive"), "3");
        tree.write_file("/", "cpuset.cpus.effective", "0-2,4-7");
        tree.write_file("/a", "cpuset.cpus.effective", "1");
        let plan = tree.enforcer.plan(&applied, &SettingsChange::Release(path("/a"))).unwrap();
        let applied = plan.outcome_of(&tree.enforcer.execute(&plan).unwrap());
        assert_eq!(tree.get("/a", "cpuset.cpus"), "0-2");
        if let Some(set) = set {
            tree.write_file("/a", "cpuset.cpus", set);
            // A guarantee that is made now restores them.
            let held = tree.hold(&applied, "/a", pinned("2", "0"));
            let released = tree.release(&held, "/a");
            assert!(released.get(&path("/a")).is_none());
            assert_eq!(tree.get("/a", "cpuset.cpus"), set);
        }
        let applied = tree.release(&applied, "/b/c");
        assert_eq!(
            (applied.is_empty(), tree.get("/a", "cpuset.cpus").as_str()),
            (true, set.unwrap_or("0-3"))
        );
    }
}

#[test]
fn ended_partition_restores_siblings() {
    let tree = FakeHierarchy::new(&["/a", "/b", "/c"]);
    tree.write_file("/a", "cpuset.cpus", "0-3");
    let applied = tree.hold(&AppliedSettings::default(), "/a", pinned("1", "0"));
    let partition = Settings { partition: Some(Partition::Root), ..pinned("3", "0") };
    let applied = tree.hold(&applied, "/b", partition);
    tree.write_file("/", "cpuset.cpus.effective", "0-2,4-7");
    tree.write_file("/a", "cpuset.cpus.effective", "1");
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Release(path("/a"))).unwrap();
    let applied = plan.outcome_of(&tree.enforcer.execute(&plan).unwrap());
    assert_eq!(tree.get("/a", "cpuset.cpus"), "0-2");
    // A change of an unrelated cgroup does not restore the CPUs.
    let plan = tree.enforcer.plan(&applied, &SettingsChange::Hold(path("/c"), protected(1))).unwrap();
    assert_eq!(plan.cgroups(), [path("/c")].into());
    let applied = tree.release(&applied, "/b");
    assert_eq!((applied.is_empty(), tree.get("/a", "cpuset.cpus")), (true, "0-3".to_owned()));
}

#[test]
fn untaken_write_is_error() {
    let tree = FakeHierarchy::new(&["/a"]);
    let settings = Settings { partition: Some(Partition::Root), ..pinned("1", "1") };
    let plan =
        tree.enforcer.plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a"), settings)).unwrap();
    tree.enforcer.execute(&plan).unwrap();
    assert_eq!(tree.get("/a", "cpuset.cpus.partition"), "root");
    tree.write_file("/a", "cpuset.cpus.partition", "root invalid (Cpu list in cpuset.cpus not exclusive)");
    let drifts = tree.enforcer.drift(&plan.outcome, &path("/a")).unwrap();
    assert!(drifts[0].to_string().contains("is root invalid (Cpu list"), "{drifts:?}");
}

mod order_never_widens {
    //! Replays plans between random settings: no set is ever empty, and each holds the old or the new value.

    use proptest::prelude::*;

    use super::*;

    fn settings() -> impl Strategy<Value = Settings> {
        let set = |n: u32| prop::option::of(prop::collection::btree_set(0..n, 1..=n as usize));
        let limit = || prop::option::of(1u64..64);
        (set(8), set(2), limit(), limit(), limit(), limit()).prop_map(|(cpus, mems, min, low, high, max)| {
            Settings {
                cpus: cpus.map(|cpus| cpus.into_iter().map(numaward_topology::CpuId).collect()),
                mems: mems.map(|mems| mems.into_iter().map(numaward_topology::NodeId).collect()),
                memory_min: min.map(mib),
                memory_low: low.map(mib),
                memory_high: high.map(mib),
                memory_max: max.map(mib),
                ..Settings::default()
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn sets_are_never_widened_or_empty(old in settings(), new in settings()) {
            let tree = FakeHierarchy::new(&["/a", "/a/b"]);
            let applied = tree.hold(&AppliedSettings::default(), "/a/b", old);
            let plan = tree.enforcer.plan(&applied, &SettingsChange::Hold(path("/a/b"), new.clone())).unwrap();
            let start = |knob| knob_in(&tree, knob);
            let limits = |knob: Knob| (start(knob), plan.outcome.get(&path("/a/b")).and_then(|record| record.written.0.get(&knob).cloned()));
            let ends = [Knob::CpusetCpus, Knob::CpusetMems].map(|knob| (knob, limits(knob)));
            for step in &plan.steps {
                tree.enforcer.cgroupfs.write(std::slice::from_ref(step)).map_err(|e| e.error).unwrap();
                for (knob, (from, to)) in &ends {
                    let now = knob_in(&tree, *knob);
                    let back = unset(*knob);
                    prop_assert!(now == *from || now == to.clone().unwrap_or(back), "{knob} {now}");
                }
                // The parent always has the protection that the child claims, as it rises and as it falls.
                prop_assert!(limit_in(&tree, "/a", Knob::MemoryMin) >= limit_in(&tree, "/a/b", Knob::MemoryMin));
                prop_assert!(limit_in(&tree, "/a", Knob::MemoryLow) >= limit_in(&tree, "/a/b", Knob::MemoryLow));
            }
            let (applied, _) = tree.apply(&plan.outcome, &SettingsChange::Release(path("/a/b")));
            prop_assert!(applied.is_empty());
        }
    }

    fn knob_in(tree: &FakeHierarchy, knob: Knob) -> KnobValue {
        knob.read(&path("/a/b").dir(tree.root.path())).unwrap()
    }

    fn limit_in(tree: &FakeHierarchy, cgroup: &str, knob: Knob) -> Limit {
        match knob.read(&path(cgroup).dir(tree.root.path())).unwrap() {
            KnobValue::Limit(limit) => limit,
            value => panic!("{value}"),
        }
    }
}

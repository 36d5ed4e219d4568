//! Tests against a fake of resctrl, see [`fake`](super::fake).

use std::fs;

use numaward_tests_support::{create_long_paths, is_alone, peak, reset_peak};

use super::{
    fake::{self, FakeResctrl},
    *,
};

/// A fake of resctrl, and cgroups made of plain files.
struct ResctrlFixture {
    dir: tempfile::TempDir,
    fake: Arc<FakeResctrl>,
    resctrl: Resctrl,
    wanted: ResctrlSpec,
}

impl ResctrlFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("resctrl");
        let fake = FakeResctrl::new(&root);
        let resctrl = Resctrl::new(&root, fake.clone());
        let share = |ways, bandwidth_percent| ClassShare {
            ways: Some(Ways::Count(ways)),
            bandwidth_percent,
            is_exclusive: false,
        };
        let classes = [("batch".to_owned(), share(4, Some(25))), ("db".to_owned(), share(6, None))].into();
        Self { dir, fake, resctrl, wanted: ResctrlSpec { classes, ..ResctrlSpec::default() } }
    }

    /// Creates a cgroup with these threads, which begin in the default group.
    fn cgroup(&self, path: &str, threads: &[u32]) -> PathBuf {
        let dir = self.dir.path().join("cgroup").join(path);
        fs::create_dir_all(&dir).unwrap();
        let text = fake::list(threads);
        fs::write(dir.join("cgroup.threads"), text).unwrap();
        let known: BTreeSet<u32> = [""]
            .into_iter()
            .map(str::to_owned)
            .chain(self.fake.groups())
            .flat_map(|of| self.fake.tasks(&of))
            .collect();
        threads.iter().filter(|thread| !known.contains(thread)).for_each(|thread| self.fake.begin(*thread));
        dir
    }

    fn want(&mut self, name: &str, class: Option<&str>, threads: &[u32]) {
        let cgroup = self.cgroup(name, threads);
        self.wanted
            .workloads
            .insert(name.to_owned(), ResctrlWorkload { class: class.map(str::to_owned), cgroup });
    }

    fn follow(&mut self) -> ResctrlOutcome {
        self.resctrl.reconcile(&self.wanted)
    }

    /// Recreates the state of a daemon that has restarted.
    fn restart(&mut self) {
        self.resctrl = Resctrl::new(&self.dir.path().join("resctrl"), self.fake.clone());
    }
}

fn set<const N: usize>(threads: [u32; N]) -> BTreeSet<u32> {
    threads.into()
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn class_group_exists_while_used() {
    let mut bench = ResctrlFixture::new();
    bench.cgroup("other", &[9]);
    assert_eq!(bench.follow(), ResctrlOutcome { is_made_up: true, ..ResctrlOutcome::default() });
    assert_eq!(bench.fake.commands(), [""; 0], "nothing is wanted");
    bench.want("web", Some("db"), &[10, 11]);
    bench.cgroup("web/deep", &[]);
    bench.cgroup("web/deep/er", &[12]);
    let done = bench.follow();
    assert_eq!(done.set, ["db (L3:0=3f0;1=3f0)"], "above the ways of the class before it");
    assert_eq!((done.held, done.moved, done.problems), (names(["web"]), 3, BTreeSet::new()));
    assert_eq!(bench.fake.tasks("numaward-db"), set([10, 11, 12]));
    assert!(bench.fake.text("numaward-db/schemata").contains("L3:0=3f0;1=3f0\n     MB:0=100"));
    assert_eq!(bench.fake.tasks(""), set([9]));
    bench.fake.commands();
    // Nothing is written if nothing differs.
    let again = bench.follow();
    assert!(again.set.is_empty() && again.moved == 0 && bench.fake.commands().is_empty(), "{again:?}");
    // A child begins in the group of its parent; a thread that was moved to the cgroup is moved to the group.
    bench.fake.fork(10, 13);
    bench.want("web", Some("db"), &[10, 11, 13, 14]);
    assert_eq!(bench.follow().moved, 1);
    assert_eq!(bench.fake.tasks("numaward-db"), set([10, 11, 12, 13, 14]));
    // A thread that ended meanwhile is no problem.
    bench.fake.end(14);
    fs::write(bench.dir.path().join("cgroup/web/cgroup.threads"), "10\n11\n13\n14\n").unwrap();
    assert_eq!(bench.follow().problems, BTreeSet::new());
    bench.wanted.workloads.clear();
    let done = bench.follow();
    assert_eq!((done.removed, bench.fake.groups()), (vec!["db".to_owned()], Vec::new()));
    assert_eq!(bench.fake.tasks(""), set([9, 10, 11, 12, 13]), "the kernel puts them back");
}

#[test]
fn released_workload_leaves_class() {
    let mut bench = ResctrlFixture::new();
    bench.wanted.monitors = true;
    bench.want("a", Some("batch"), &[1, 2]);
    bench.want("b", Some("batch"), &[3]);
    let done = bench.follow();
    assert_eq!(done.set, ["batch (L3:0=f;1=f, MB:0=25;1=25)"]);
    assert_eq!((done.held, done.groups), (names(["a", "b"]), [1, 2]));
    assert!(bench.fake.text("numaward-batch/schemata").contains("MB:0= 30;1= 30"), "the kernel rounds it up");
    assert_eq!(bench.fake.tasks("numaward-batch/mon_groups/numaward-a"), set([1, 2]));
    assert_eq!(bench.follow().set, [""; 0], "what was rounded is held");
    // The workload is released, and continues to run.
    bench.wanted.workloads.remove("a");
    assert_eq!(bench.follow().moved, 2);
    assert_eq!((bench.fake.tasks("numaward-batch"), bench.fake.tasks("")), (set([3]), set([1, 2])));
    assert_eq!(bench.fake.groups(), ["numaward-batch", "numaward-batch/mon_groups/numaward-b"]);
}

#[test]
fn reads_counters() {
    let mut bench = ResctrlFixture::new();
    bench.wanted.monitors = true;
    bench.want("a", None, &[1]);
    bench.want("shop/web-0/main", Some("db"), &[2]);
    let done = bench.follow();
    assert_eq!((done.problems, done.held), (BTreeSet::new(), names(["shop/web-0/main"])));
    let groups = bench.fake.groups();
    assert_eq!(groups[..2], ["numaward-db", "mon_groups/numaward-a"]);
    assert!(groups[2].starts_with("numaward-db/mon_groups/numaward-shop_web-0_main+"), "{groups:?}");
    for (file, text) in [
        ("mon_L3_00/llc_occupancy", "4096"),
        ("mon_L3_00/mbm_total_bytes", "70000"),
        ("mon_L3_00/mbm_local_bytes", "Unavailable"),
        ("mon_L3_01/llc_occupancy", "Error"),
        ("mon_L3_01/mbm_total_bytes", "Unassigned"),
        ("mon_L3_01/mbm_local_bytes", "-1"),
        ("mon_L3_x/mbm_local_bytes", "1"),
    ] {
        bench.fake.write_file(&format!("mon_groups/numaward-a/mon_data/{file}"), text);
    }
    let done = bench.follow();
    let of = |cache, counted| CacheReading { workload: "a".to_owned(), cache, counted };
    let counted = CacheCounters { occupancy: Some(4096), total: Some(70_000), local: None };
    assert_eq!(done.readings[..2], [of(0, counted), of(1, CacheCounters::default())]);
    assert_eq!(done.readings.len(), 4);
    // Monitoring is switched off.
    bench.wanted.monitors = false;
    assert!(bench.follow().readings.is_empty());
    assert_eq!(bench.fake.groups(), ["numaward-db"]);
}

#[test]
fn keeps_groups_of_other_programs() {
    let mut bench = ResctrlFixture::new();
    bench.wanted.monitors = true;
    bench.cgroup("others", &[5, 6, 7]);
    for (group, thread) in [("pqos", "5"), ("mon_groups/theirs", "6")] {
        bench.fake.make(&bench.dir.path().join("resctrl").join(group)).unwrap();
        bench.fake.write(&bench.dir.path().join("resctrl").join(group).join("tasks"), thread).unwrap();
    }
    bench.fake.commands();
    bench.want("web", Some("db"), &[5, 6, 7]);
    let done = bench.follow();
    let stays =
        |group| format!("threads of web are in the group {group}, which is not numaward's, and stay there");
    assert_eq!(done.problems, [stays("pqos"), stays("theirs")].into());
    assert_eq!((done.held, done.refused), (BTreeSet::new(), names(["web"])));
    assert_eq!(bench.fake.tasks("numaward-db"), set([7]));
    assert_eq!((bench.fake.tasks("pqos"), bench.fake.tasks("mon_groups/theirs")), (set([5]), set([6])));
    bench.wanted.workloads.clear();
    bench.follow();
    assert_eq!(bench.fake.groups(), ["pqos", "mon_groups/theirs"]);
    let touched = bench.fake.commands();
    assert!(
        !touched.iter().any(|command| command.contains("pqos") || command.contains("theirs")),
        "{touched:?}"
    );
}

#[test]
fn adopts_groups_after_crash() {
    let mut bench = ResctrlFixture::new();
    bench.wanted.monitors = true;
    bench.want("a", Some("batch"), &[1]);
    bench.want("b", Some("db"), &[2]);
    bench.want("c", None, &[3]);
    bench.follow();
    bench.fake.commands();
    bench.restart();
    let done = bench.follow();
    assert_eq!((bench.fake.commands(), done.held), (Vec::new(), names(["a", "b"])), "nothing is made anew");
    // Meanwhile two threads have ended, and the configuration has changed.
    bench.restart();
    bench.wanted.workloads.remove("b");
    bench.wanted.workloads.remove("c");
    bench.wanted.classes.insert(
        "batch".to_owned(),
        ClassShare { ways: Some(Ways::Count(2)), bandwidth_percent: None, ..ClassShare::default() },
    );
    let done = bench.follow();
    assert_eq!((done.removed, done.set), (vec!["db".to_owned()], vec!["batch (L3:0=3;1=3)".to_owned()]));
    assert_eq!(bench.fake.groups(), ["numaward-batch", "numaward-batch/mon_groups/numaward-a"]);
    assert!(bench.fake.text("numaward-batch/schemata").contains("MB:0=100"), "it is no longer slowed down");
    assert_eq!(bench.fake.tasks("numaward-batch"), set([1]));
    // A daemon without classes and monitoring removes all groups.
    bench.restart();
    assert_eq!(bench.resctrl.own_groups().len(), 1);
    let done = bench.resctrl.reconcile(&ResctrlSpec::default());
    assert_eq!((done.removed, bench.resctrl.own_groups()), (vec!["batch".to_owned()], Vec::new()));
    assert_eq!(bench.fake.tasks(""), set([1, 2, 3]));
}

#[test]
fn reports_refusal_and_retries() {
    let mut bench = ResctrlFixture::new();
    bench.fake.make(&bench.dir.path().join("resctrl/pqos")).unwrap();
    bench.fake.write_file("info/L3/num_closids", "3");
    bench.want("a", Some("batch"), &[1]);
    bench.want("b", Some("db"), &[2]);
    let done = bench.follow();
    assert_eq!((&done.held, &done.refused), (&names(["a"]), &names(["b"])), "{:?}", done.problems);
    let problem = done.problems.first().unwrap();
    assert!(problem.starts_with("class db: ") && problem.contains("No space left"), "{problem}");
    assert!(problem.ends_with("(the kernel says: Out of CLOSIDs)"), "{problem}");
    assert_eq!(bench.fake.tasks(""), set([2]), "it runs in the default group");
    bench.wanted.workloads.remove("a");
    assert_eq!(bench.follow().held, names(["b"]), "its number is given to the other");
    // A class has no group if its share is refused.
    bench.wanted.classes.insert(
        "db".to_owned(),
        ClassShare { ways: None, bandwidth_percent: Some(40), ..ClassShare::default() },
    );
    bench.fake.write_file("info/MB/min_bandwidth", "5");
    bench.wanted.classes.insert(
        "low".to_owned(),
        ClassShare { ways: None, bandwidth_percent: Some(5), ..ClassShare::default() },
    );
    bench.want("b", Some("low"), &[2]);
    let done = bench.follow();
    let problem = done.problems.first().unwrap();
    assert!(problem.ends_with("(the kernel says: MB value 5 out of range [10,100])"), "{problem}");
    assert_eq!((bench.fake.groups(), bench.fake.tasks("")), (vec!["pqos".to_owned()], set([1, 2])));
    // A class that the configuration does not have any more.
    bench.wanted.classes.clear();
    let done = bench.follow();
    assert!(done.problems.first().unwrap().contains("is not in the configuration any more"), "{done:?}");
}

#[test]
fn code_and_data_get_same_ways() {
    let mut bench = ResctrlFixture::new();
    let info = bench.dir.path().join("resctrl/info");
    fs::rename(info.join("L3"), info.join("L3CODE")).unwrap();
    fs::create_dir(info.join("L3DATA")).unwrap();
    let (found, is_made_up) = bench.resctrl.read_info().unwrap();
    assert_eq!((found.caches.unwrap().resources, is_made_up), (vec!["L3CODE", "L3DATA"], true));
    bench.wanted.classes.insert(
        "db".to_owned(),
        ClassShare { ways: Some(Ways::Percent(50)), bandwidth_percent: None, ..ClassShare::default() },
    );
    bench.want("a", Some("db"), &[1]);
    let done = bench.follow();
    assert_eq!(done.set, ["db (L3CODE:0=3f0;1=3f0, L3DATA:0=3f0;1=3f0)"], "{:?}", done.problems);
}

#[test]
fn refuses_bandwidth_in_other_units() {
    let mut bench = ResctrlFixture::new();
    bench.want("a", Some("batch"), &[1]);
    // As on processors of AMD.
    bench.follow();
    bench.fake.write_file("numaward-batch/schemata", "    MB:0=2048;1=2048\n    L3:0=00f;1=00f");
    let done = bench.follow();
    let problem = done.problems.first().unwrap();
    assert!(problem.contains("not in percent on this host (it shows 2048"), "{problem}");
    assert_eq!((bench.fake.groups().len(), done.refused), (0, names(["a"])));
}

#[test]
fn missing_mount_is_problem_if_needed() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = ResctrlFixture::new();
    bench.want("a", Some("db"), &[1]);
    for root in [dir.path().to_owned(), dir.path().join("none")] {
        // A directory that is neither the kernel's nor marked as a fake.
        let mut resctrl = Resctrl::new(&root, Arc::new(HostKernel));
        assert_eq!(resctrl.reconcile(&ResctrlSpec::default()), ResctrlOutcome::default());
        let done = resctrl.reconcile(&bench.wanted);
        let problem = done.problems.first().unwrap();
        assert!(problem.starts_with("resctrl is not mounted at ") && done.refused.len() == 1, "{problem}");
        assert!(matches!(resctrl.read_info(), Err(ResctrlError::NotMounted(_))));
    }
    // Files with contents that no kernel writes.
    for (file, text) in
        [("info/L3/cbm_mask", "0"), ("info/MB/min_bandwidth", "ten"), ("numaward-db/tasks", "x")]
    {
        let mut bench = ResctrlFixture::new();
        bench.want("a", Some("db"), &[1]);
        bench.follow();
        bench.fake.write_file(file, text);
        let done = bench.follow();
        let problem = done.problems.first().unwrap();
        assert!(problem.contains(file) && problem.contains(&format!("{text:?} is not")), "{problem}");
    }
}

#[test]
fn group_names_are_valid_and_distinct() {
    assert_eq!(group_of("db@1.service"), "numaward-db@1.service");
    let (a, b) = (group_of("a/b"), group_of("a_b"));
    assert!(a.starts_with("numaward-a_b+") && a != b, "{a} {b}");
    assert_eq!(a, group_of("a/b"));
    assert!(group_of(&"é\n/".repeat(200)).len() < 255 && !group_of("a\nb").contains('\n'));
}

/// Reconciles as the daemon does: stores the state of the default group, and reconciles again.
fn store(bench: &mut ResctrlFixture) -> ResctrlOutcome {
    bench.fake.commands();
    let mut done = bench.follow();
    bench.wanted.reduced = done.reduced.clone();
    if done.waits {
        let commands = bench.fake.commands();
        assert!(
            !commands.iter().any(|of| of.starts_with("schemata")),
            "not before it is stored: {commands:?}"
        );
        assert!(done.set.is_empty() && done.removed.is_empty(), "it is said with the next look: {done:?}");
        done = bench.follow();
        assert!(!done.waits);
        bench.wanted.reduced = done.reduced.clone();
    }
    done
}

fn exclusive(bench: &mut ResctrlFixture, class: &str, ways: u32) {
    let share = bench.wanted.classes.get_mut(class).unwrap();
    (share.is_exclusive, share.ways) = (true, Some(Ways::Count(ways)));
}

fn default_has(bench: &ResctrlFixture, masks: &str) {
    let text = bench.fake.text("schemata");
    assert!(text.lines().any(|line| line.trim() == format!("L3:{masks}")), "{text}");
}

#[test]
fn exclusive_ways_are_restored() {
    let mut bench = ResctrlFixture::new();
    exclusive(&mut bench, "db", 6);
    bench
        .wanted
        .classes
        .insert("slow".to_owned(), ClassShare { bandwidth_percent: Some(10), ..ClassShare::default() });
    bench.want("a", Some("batch"), &[1]);
    bench.want("s", Some("slow"), &[3]);
    let done = store(&mut bench);
    assert_eq!(done.held, names(["a", "s"]), "{:?}", done.problems);
    assert!(
        bench.fake.text("numaward-batch/schemata").contains("L3:0=3c0;1=3c0"),
        "above the exclusive ones"
    );
    assert!(bench.fake.text("numaward-slow/schemata").contains("L3:0=fc0;1=fc0"), "all but those");
    default_has(&bench, "0=fff;1=fff");
    bench.fake.commands();
    bench.want("web", Some("db"), &[2]);
    let done = store(&mut bench);
    assert_eq!(done.set, ["db (L3:0=3f;1=3f)", "the default group (L3:0=fc0;1=fc0)"]);
    assert_eq!((done.held, done.problems), (names(["a", "s", "web"]), BTreeSet::new()));
    default_has(&bench, "0=fc0;1=fc0");
    bench.fake.commands();
    bench.restart();
    assert!(store(&mut bench).set.is_empty() && bench.fake.commands().is_empty(), "after a crash as well");
    bench.wanted.workloads.remove("web");
    assert_eq!(store(&mut bench).removed, ["db"]);
    default_has(&bench, "0=fff;1=fff");
    assert!(bench.wanted.reduced.is_empty());
}

#[test]
fn keeps_masks_of_other_programs() {
    let mut bench = ResctrlFixture::new();
    exclusive(&mut bench, "db", 6);
    bench.fake.write_file("schemata", "     L3:0=3ff;1=fff\n     MB:0=100;1=100");
    bench.want("web", Some("db"), &[2]);
    store(&mut bench);
    default_has(&bench, "0=3c0;1=fc0");
    // Another program gives the default group some of the ways.
    bench.fake.write_file("schemata", "     L3:0=3c0;1=00f\n     MB:0=100;1=100");
    let done = store(&mut bench);
    let problem = done.problems.first().unwrap();
    assert!(problem.contains("class db: another program has given the default group L3:1=f"), "{problem}");
    assert_eq!((done.refused, bench.fake.groups().len()), (names(["web"]), 0), "as a whole or not at all");
    default_has(&bench, "0=3ff;1=00f");
    // A mask that leaves enough ways stays too, however often it is read.
    bench.fake.write_file("schemata", "     L3:0=3ff;1=7ff\n     MB:0=100;1=100");
    for _ in 0..3 {
        assert_eq!(store(&mut bench).refused, names(["web"]));
        default_has(&bench, "0=3ff;1=7ff");
    }
    // The other program removes them again.
    bench.fake.write_file("schemata", "     L3:0=3ff;1=fc0\n     MB:0=100;1=100");
    assert_eq!(store(&mut bench).held, names(["web"]));
    bench.fake.write_file("schemata", "     L3:0=3c0;1=fff\n     MB:0=100;1=100");
    bench.wanted.workloads.clear();
    store(&mut bench);
    default_has(&bench, "0=3ff;1=fff");
    assert!(bench.wanted.reduced.is_empty());
}

#[test]
fn refused_class_takes_no_ways() {
    let mut bench = ResctrlFixture::new();
    exclusive(&mut bench, "batch", 4);
    exclusive(&mut bench, "db", 7);
    bench.want("a", Some("batch"), &[1]);
    bench.want("web", Some("db"), &[2]);
    let done = store(&mut bench);
    let problem = done.problems.first().unwrap();
    assert!(
        problem.starts_with("class db: it would leave 1 of the ways of L3:0 to those without a class"),
        "{problem}"
    );
    assert_eq!(done.held, names(["a"]), "the other one is held");
    default_has(&bench, "0=ff0;1=ff0");
    exclusive(&mut bench, "db", 6);
    bench.fake.make(&bench.dir.path().join("resctrl/pqos")).unwrap();
    bench.fake.write_file("pqos/schemata", "     L3:0=030;1=fc0\n     MB:0=100;1=100");
    let done = store(&mut bench);
    let problem = done.problems.first().unwrap();
    assert!(
        problem.ends_with("class db: the group pqos, which is not numaward's, has some of its ways"),
        "{problem}"
    );
    default_has(&bench, "0=ff0;1=ff0");
    bench.fake.write_file("pqos/schemata", "     L3:0=c00;1=c00\n     MB:0=100;1=100");
    assert_eq!(store(&mut bench).held, names(["a", "web"]));
    default_has(&bench, "0=c00;1=c00");
    // There is no free group for the class.
    bench
        .wanted
        .classes
        .insert("low".to_owned(), ClassShare { bandwidth_percent: Some(50), ..ClassShare::default() });
    bench.wanted.workloads.remove("web");
    bench.want("low", Some("low"), &[4]);
    store(&mut bench);
    default_has(&bench, "0=ff0;1=ff0");
    bench.want("web", Some("db"), &[2]);
    let done = store(&mut bench);
    assert_eq!(done.refused, names(["web"]), "{:?}", done.problems);
    default_has(&bench, "0=ff0;1=ff0");
}

#[test]
fn refused_reduction_changes_nothing() {
    let mut bench = ResctrlFixture::new();
    exclusive(&mut bench, "db", 4);
    // The remaining ways have gaps, which processors of this kind refuse.
    bench.fake.write_file("schemata", "     L3:0=fff;1=fbf\n     MB:0=100;1=100");
    bench.want("web", Some("db"), &[2]);
    let done = store(&mut bench);
    let problem = done.problems.first().unwrap();
    assert!(problem.starts_with("class db: cannot remove its ways from the default group: "), "{problem}");
    assert_eq!((&done.refused, bench.fake.groups().len()), (&names(["web"]), 0));
    assert!(!done.set.iter().any(|set| set.starts_with("db")), "{:?}", done.set);
    default_has(&bench, "0=fff;1=fbf");
    assert!(bench.wanted.reduced.is_empty());
    // The write is repeated only if it may succeed by now.
    bench.fake.commands();
    let again = bench.follow();
    assert_eq!((again.waits, again.refused), (false, names(["web"])));
    let commands = bench.fake.commands();
    assert!(!commands.iter().any(|of| of.starts_with("mkdir") || of.starts_with("schemata")), "{commands:?}");
    bench.fake.write_file("schemata", "     L3:0=fff;1=ff0\n     MB:0=100;1=100");
    assert_eq!(store(&mut bench).held, names(["web"]));
    default_has(&bench, "0=ff0;1=ff0");
}

#[test]
fn refusal_keeps_other_classes() {
    let mut bench = ResctrlFixture::new();
    exclusive(&mut bench, "batch", 2);
    exclusive(&mut bench, "db", 2);
    bench.want("a", Some("batch"), &[1]);
    store(&mut bench);
    default_has(&bench, "0=ffc;1=ffc");
    bench.fake.refuse(0xff0);
    bench.want("web", Some("db"), &[2]);
    let done = store(&mut bench);
    assert_eq!((done.held, done.refused), (names(["a"]), names(["web"])), "{:?}", done.problems);
    assert_eq!(bench.fake.groups(), ["numaward-batch"]);
    default_has(&bench, "0=ffc;1=ffc");
    assert_eq!(bench.fake.tasks("numaward-batch"), set([1]));
}

#[test]
fn lifts_limits_of_old_configuration() {
    let mut bench = ResctrlFixture::new();
    bench.want("a", Some("batch"), &[1]);
    store(&mut bench);
    bench.restart();
    bench.wanted.classes.get_mut("batch").unwrap().bandwidth_percent = None;
    exclusive(&mut bench, "batch", 4);
    assert_eq!(store(&mut bench).held, names(["a"]));
    assert!(bench.fake.text("numaward-batch/schemata").contains("MB:0=100"), "it is made anew");
    default_has(&bench, "0=ff0;1=ff0");
}

/// Any user with a delegated subtree can have as many cgroups under names that long.
#[test]
fn bounds_memory_for_many_long_paths() {
    const CGROUPS: usize = 4000;
    const CEILING: u64 = 4 << 20;
    if !is_alone() {
        return;
    }
    let mut bench = ResctrlFixture::new();
    bench.want("web", Some("db"), &[10]);
    create_long_paths(&bench.dir.path().join("cgroup/web"), CGROUPS, "cgroup.threads", "10\n");
    reset_peak();
    let before = peak();
    let done = bench.follow();
    let most = peak();
    assert_eq!((done.held, done.problems), (names(["web"]), names([])));
    assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
}

/// The path of the unreadable cgroup is longer than the kernel accepts.
#[test]
fn workload_with_unreadable_cgroup_disturbs_no_other_of_its_class() {
    let mut bench = ResctrlFixture::new();
    bench.want("web", Some("db"), &[10]);
    bench.want("worse", Some("db"), &[11]);
    fs::create_dir_all(bench.dir.path().join("cgroup/worse/below/cgroup.threads")).unwrap();
    let done = bench.follow();
    assert_eq!((done.held, done.refused), (names(["web"]), names(["worse"])));
    assert!(done.problems.iter().any(|problem| problem.contains("worse/below")), "{:?}", done.problems);
    assert_eq!(bench.fake.tasks("numaward-db"), set([10, 11]));
}

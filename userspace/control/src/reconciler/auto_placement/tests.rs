use std::{fs, path::PathBuf, sync::Arc};

use numaward_api as api;
use numaward_config::{
    Config, Interval,
    enforcement::{CgroupPattern, Size},
    home::Home as HomeConfig,
};
use numaward_guarantee::request::Request;
use numaward_topology::{CpuSet, NodeSet};

use super::{measure::tests::reading, *};
use crate::{
    policy_worker::PolicyFinding,
    reconciler::{Event, ReconcilerLoop, tests::reconciler_loop},
    testing::{self as fixture, Host},
};

/// Two nodes with four CPUs each, and cgroups that the thread has looked at.
struct Bench {
    dir: tempfile::TempDir,
    host: Arc<Host>,
    config: Config,
    reconciler: Option<ReconcilerLoop>,
    now: Instant,
    /// What each cgroup has counted so far: local and remote accesses, CPU seconds.
    counted: BTreeMap<String, ([u64; 2], u64)>,
    /// Why one cannot have a home because of its memory policies.
    policies: BTreeMap<String, String>,
}

/// A window of one workload: remote accesses of a thousand, memory in MiB by node, CPUs in use in tenths.
type Window = (&'static str, u64, [u64; 2], u64);

impl Bench {
    fn new(cgroups: &[&str]) -> Self {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Host::small()));
        let root = dir.path().join("cgroup");
        for cgroup in [&[""], cgroups].concat() {
            fixture::cgroup(&root.join(cgroup), &host.machine.lock().unwrap());
        }
        let home = HomeConfig {
            mode: HomeMode::Place,
            min_memory: Size(Bytes::mib(64)),
            window: Interval(Duration::from_secs(10)),
            ..HomeConfig::default()
        };
        let config = Config { state_directory: dir.path().join("state"), home, ..Config::default() };
        let reconciler = Some(reconciler_loop(&config, &root, &host));
        Self {
            dir,
            host,
            config,
            reconciler,
            now: Instant::now(),
            counted: BTreeMap::new(),
            policies: BTreeMap::new(),
        }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("cgroup")
    }

    fn restart(&mut self) {
        self.reconciler = None;
        self.reconciler = Some(reconciler_loop(&self.config, &self.root(), &self.host));
    }

    fn inner(&mut self) -> &mut ReconcilerLoop {
        self.reconciler.as_mut().unwrap()
    }

    /// The controller and the core, without the thread.
    fn with<T>(&mut self, act: impl FnOnce(&mut AutoPlacement, &mut Core, Instant) -> T) -> T {
        let now = self.now;
        let ReconcilerLoop { controllers, core, .. } = self.inner();
        controllers.auto_placement.follow(core, now);
        act(&mut controllers.auto_placement, core, now)
    }

    /// One look, ten seconds after the last; each node has room for so many MiB.
    fn look_with(&mut self, windows: &[Window], room: [u64; 2]) {
        self.now += Duration::from_secs(10);
        let (now, top) = (self.now, self.root());
        let workloads = windows.iter().map(|(path, remote, mib, tenths)| {
            let (counted, cpu) = self.counted.entry((*path).to_owned()).or_default();
            *counted = [counted[0] + 1000 - remote, counted[1] + remote];
            *cpu += tenths;
            let mut reading = reading(path, now, *counted, *mib, *cpu);
            reading.id = id_of(&top.join(&path[1..]));
            reading
        });
        let policies: BTreeMap<_, _> = windows
            .iter()
            .map(|(path, ..)| {
                let policies = self.policies.get(*path).map_or(Ok(()), |why| Err(why.clone()));
                let finding = PolicyFinding { policies, untouched: Ok(Bytes(0)), is_denied: false };
                (path.parse().unwrap(), (id_of(&top.join(&path[1..])), finding))
            })
            .collect();
        let room = [0, 1].map(NodeId).into_iter().zip(room.map(Bytes::mib)).collect();
        let look = Survey { workloads: workloads.collect(), room, took: Duration::ZERO };
        self.with(|auto_placement, core, now| {
            auto_placement.policies.known = policies;
            auto_placement.looked(core, look, now);
        });
    }

    fn look(&mut self, windows: &[Window]) {
        self.look_with(windows, [2000, 2000]);
    }

    /// All pages that are to be moved are moved.
    fn move_pages(&mut self) -> Vec<(u32, u32, u64)> {
        self.with(|auto_placement, core, _| {
            let mut orders = Vec::new();
            while let Some((path, order)) = auto_placement.next_order(core) {
                let moved = PagesMoved([(PageOutcome::Moved, order.bytes)].into());
                auto_placement.moved(core, &path, &order, &moved);
                orders.push((order.from.0, order.to.0, order.bytes.0 >> 20));
            }
            orders
        })
    }

    fn cpus(&self, path: &str) -> String {
        fixture::line(&self.root().join(&path[1..]).join("cpuset.cpus"))
    }

    fn mems(&self, path: &str) -> String {
        fixture::line(&self.root().join(&path[1..]).join("cpuset.mems"))
    }

    fn preferred_nodes(&self) -> Vec<(String, u32, bool)> {
        let state = &self.reconciler.as_ref().unwrap().core.store.state;
        state
            .preferred_nodes()
            .iter()
            .map(|(path, home)| (path.to_string(), home.node.0, home.is_kept))
            .collect()
    }

    fn steps(&self) -> Vec<String> {
        let happened = self.host.happened.lock().unwrap();
        let homes = happened.iter().filter(|(_, report)| report.kind == EventKind::Home);
        homes.map(|(_, report)| report.details["step"].clone()).collect()
    }

    fn reported(&self) -> String {
        let happened = self.host.happened.lock().unwrap();
        happened.iter().map(|(_, report)| report.message.as_str()).collect::<Vec<_>>().join("\n")
    }

    fn guarantee(&mut self, name: &str, path: &str) {
        self.guarantee_with(name, path, api::Placement::default());
    }

    fn guarantee_on(&mut self, name: &str, path: &str, nodes: &str) {
        let preferred_nodes = Some(nodes.parse().unwrap());
        self.guarantee_with(name, path, api::Placement { preferred_nodes, ..api::Placement::default() });
    }

    fn guarantee_with(&mut self, name: &str, path: &str, placement: api::Placement) {
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(1)),
            placement,
            ..api::AllocationRequest::new(name, api::Target::Cgroup(path.to_owned()), "256Mi")
        });
        let admitted = self.inner().admit(&request.unwrap(), false);
        assert!(admitted.is_ok(), "{:?}", admitted.err());
        self.inner().process_effects();
    }
}

fn id_of(dir: &std::path::Path) -> numaward_cgroup::CgroupId {
    use std::os::unix::fs::MetadataExt;
    numaward_cgroup::CgroupId(fs::metadata(dir).map_or(0, |dir| dir.ino()))
}

/// Most of its memory is on node 1, and half of its accesses are remote.
const AWAY: Window = ("/a", 500, [100, 300], 10);

#[test]
fn one_that_gains_keeps_its_home_over_a_restart_until_the_mode_is_off() {
    let mut bench = Bench::new(&["a"]);
    bench.look(&[AWAY]);
    assert_eq!(bench.preferred_nodes(), [], "one reading is no window");
    bench.look(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("4-7".to_owned(), String::new()));
    assert_eq!(bench.move_pages(), [(0, 1, 100)]);
    // What was counted while pages moved does not count.
    bench.look(&[("/a", 900, [0, 400], 10)]);
    bench.look(&[("/a", 350, [0, 400], 10)]);
    assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, true)]);
    assert_eq!(bench.steps(), ["placed", "kept"]);
    assert!(
        bench.reported().contains("50 % of its accesses were remote before, 35 % are now"),
        "{}",
        bench.reported()
    );
    bench.restart();
    bench.look(&[("/a", 0, [0, 400], 10)]);
    bench.look(&[("/a", 0, [0, 400], 10)]);
    assert_eq!(
        (bench.preferred_nodes(), bench.cpus("/a")),
        (vec![("/a".to_owned(), 1, true)], "4-7".to_owned())
    );
    bench.config.home.mode = HomeMode::Report;
    bench.restart();
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
    assert!(bench.inner().core.store.state.applied.is_empty());
    assert_eq!(bench.steps().last().unwrap(), "ended");
}

#[test]
fn workload_with_a_policy_that_names_nodes_gets_no_home() {
    let mut bench = Bench::new(&["a"]);
    let policy = "process 7 has the memory policy bind:0";
    bench.policies.insert("/a".to_owned(), policy.to_owned());
    for _ in 0..3 {
        bench.look(&[AWAY]);
    }
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
    assert_eq!(bench.steps(), ["refused"], "said once");
    assert!(bench.reported().contains(&format!("/a gets no home: {policy}")), "{}", bench.reported());
    bench.policies.clear();
    bench.look(&[AWAY]);
    assert_eq!(bench.cpus("/a"), "4-7");
}

#[test]
fn home_ends_on_a_node_that_the_guard_keeps_the_workload_off_and_none_begins_there() {
    let mut bench = Bench::new(&["a"]);
    let path: CgroupPath = "/a".parse().unwrap();
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("4-7".to_owned(), String::new()));
    bench.with(|_, core, _| core.keep_off(&path, &"1".parse().unwrap()).unwrap());
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), (String::new(), "0".to_owned()));
    assert_eq!((bench.preferred_nodes(), bench.steps().last().unwrap().as_str()), (Vec::new(), "ended"));
    // Most of its memory is still on node 1.
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("0-3".to_owned(), "0".to_owned()));
    bench.with(|_, core, _| core.keep_off(&path, &NodeSet::new()).unwrap());
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("0-3".to_owned(), String::new()));
}

#[test]
fn others_are_told_where_homes_are() {
    let mut bench = Bench::new(&["a"]);
    let told = |bench: &Bench| bench.host.assigned.lock().unwrap().homes.clone();
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    let home = BTreeMap::from([("/a".parse().unwrap(), NodeId(1))]);
    bench.inner().publish();
    assert_eq!(told(&bench), home);
    bench.restart();
    assert_eq!(told(&bench), home, "after a restart");
    bench.config.home.mode = HomeMode::Off;
    bench.restart();
    bench.inner().publish();
    assert!(told(&bench).is_empty());
}

#[test]
fn one_that_does_not_gain_is_put_back_with_its_pages_and_left_alone_for_longer_each_time() {
    let mut bench = Bench::new(&["a"]);
    let mut until = Vec::new();
    for _ in 0..3 {
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        assert_eq!((bench.cpus("/a"), bench.move_pages()), ("4-7".to_owned(), vec![(0, 1, 100)]));
        bench.look(&[("/a", 400, [0, 400], 10)]);
        bench.look(&[("/a", 400, [0, 400], 10)]);
        assert_eq!((bench.cpus("/a"), bench.preferred_nodes()), (String::new(), Vec::new()));
        assert_eq!(bench.move_pages(), [(1, 0, 100)], "its pages go back too");
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        assert_eq!(bench.preferred_nodes(), [], "it is left alone");
        let path = "/a".parse().unwrap();
        let left = bench.inner().core.store.state.left_alone.get_mut(&path).unwrap();
        until.push(left.until - seconds_now());
        // The time is over.
        left.until = 0;
    }
    let half_hour = 1800;
    for (pause, expected) in until.iter().zip([half_hour, 2 * half_hour, 4 * half_hour]) {
        assert!((expected - 60..=expected).contains(pause), "{until:?}");
    }
    assert_eq!(bench.steps(), ["placed", "no_gain", "placed", "no_gain", "placed", "no_gain"]);
}

#[test]
fn one_that_is_kept_is_put_back_when_it_has_no_use_of_its_home_any_more() {
    for (window, step) in [
        (("/a", 500, [0, 400], 10), Some("no_gain")),
        (("/a", 0, [0, 400], 39), Some("outgrown")),
        (("/a", 300, [0, 400], 30), None),
    ] {
        let mut bench = Bench::new(&["a"]);
        bench.config.home.cool_down = Interval(Duration::from_mins(1));
        bench.restart();
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        bench.move_pages();
        bench.look(&[("/a", 0, [0, 400], 10)]);
        bench.look(&[("/a", 0, [0, 400], 10)]);
        if step == Some("no_gain") {
            bench.look(&[window]);
            assert_eq!(bench.preferred_nodes().len(), 1, "it stays for a while");
        }
        bench.now += Duration::from_secs(50);
        bench.look(&[(window.0, window.1, window.2, window.3 * 6)]);
        assert_eq!(bench.steps().get(2).map(String::as_str), step);
        assert_eq!(bench.preferred_nodes().is_empty(), step.is_some());
    }
}

#[test]
fn one_whose_cpus_somebody_else_sets_has_no_home_any_more() {
    // All CPUs are what it had before, in other words.
    for set in ["2-5", "0-7"] {
        let mut bench = Bench::new(&["a"]);
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        let write = |bench: &mut Bench, cpus: &str| {
            fs::write(bench.root().join("a/cpuset.cpus"), format!("{cpus}\n")).unwrap();
            let now = bench.now;
            let ReconcilerLoop { controllers, core, .. } = bench.inner();
            controllers.drift.check_all(core, now);
        };
        // Emptied, as by somebody who makes a cgroup anew.
        write(&mut bench, "");
        assert_eq!((bench.cpus("/a"), bench.preferred_nodes().len()), ("4-7".to_owned(), 1));
        write(&mut bench, set);
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), (set, Vec::new()));
        assert!(bench.inner().core.store.state.applied.is_empty());
        assert_eq!(bench.steps(), ["placed", "ended"]);
        let expected = format!("somebody else set its CPUs to {set}");
        assert!(bench.reported().contains(&expected), "{}", bench.reported());
        // It is theirs now.
        for _ in 0..2 {
            bench.look(&[AWAY]);
        }
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), (set, Vec::new()));
    }
}

#[test]
fn what_somebody_sets_while_the_daemon_is_stopped_stays_and_the_home_ends() {
    for mode in [HomeMode::Place, HomeMode::Off] {
        let mut bench = Bench::new(&["a"]);
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        assert_eq!(bench.cpus("/a"), "4-7");
        bench.reconciler = None;
        fs::write(bench.root().join("a/cpuset.cpus"), "2-5\n").unwrap();
        bench.config.home.mode = mode;
        bench.restart();
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), ("2-5", Vec::new()), "{mode:?}");
        assert!(bench.inner().core.store.state.applied.is_empty());
        assert_eq!(bench.steps(), ["placed", "ended"]);
        assert!(bench.reported().contains("somebody else set its CPUs to 2-5"), "{}", bench.reported());
        bench.restart();
        assert_eq!(bench.cpus("/a"), "2-5", "it is theirs");
    }
}

#[test]
fn a_home_stays_where_a_crash_kept_its_cpus_from_being_written() {
    let mut bench = Bench::new(&["a", "kept"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    // It died before the first write.
    fs::write(bench.root().join("a/cpuset.cpus"), "\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes().len()), ("4-7", 1));
    // It died when it had stored that a guarantee takes a CPU away from it, and had not written so yet.
    bench.guarantee_on("kept", "/kept", "1");
    bench.inner().dispatch(&Event::StateChanged);
    bench.look(&[AWAY]);
    let narrowed = bench.cpus("/a");
    assert_ne!(narrowed, "4-7");
    bench.inner().core.note_home(&"/a".parse().unwrap(), |home| home.cpus_before = "4-7".parse().ok());
    fs::write(bench.root().join("a/cpuset.cpus"), "4-7\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a"), bench.preferred_nodes().len()), (narrowed, 1));
    assert_eq!(bench.steps(), ["placed"]);
}

#[test]
fn what_somebody_sets_ends_the_home_also_where_it_is_what_the_home_was_before() {
    let mut bench = Bench::new(&["a", "kept"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    bench.guarantee_on("kept", "/kept", "1");
    bench.inner().dispatch(&Event::StateChanged);
    bench.look(&[AWAY]);
    assert_ne!(bench.cpus("/a"), "4-7");
    bench.reconciler = None;
    fs::write(bench.root().join("a/cpuset.cpus"), "4-7\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), ("4-7", Vec::new()));
}

#[test]
fn one_whose_accesses_are_not_counted_at_home_is_put_back() {
    let mut bench = Bench::new(&["a"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    bench.move_pages();
    let silent = |bench: &mut Bench| {
        bench.now += Duration::from_secs(10);
        let (counted, _) = bench.counted["/a"];
        let mut reading = reading("/a", bench.now, counted, [0, 400], 0);
        reading.id = id_of(&bench.root().join("a"));
        let look = Survey { workloads: vec![reading], ..Survey::default() };
        bench.with(|auto_placement, core, now| auto_placement.looked(core, look, now));
    };
    for _ in 0..WINDOWS {
        silent(&mut bench);
        assert_eq!(bench.preferred_nodes().len(), 1);
    }
    silent(&mut bench);
    assert_eq!(
        (bench.preferred_nodes(), bench.steps()),
        (Vec::new(), vec!["placed".to_owned(), "not_measured".to_owned()])
    );
}

#[test]
fn one_of_which_nothing_is_counted_any_more_is_put_back_unless_its_home_was_of_use() {
    for is_kept in [false, true] {
        let mut bench = Bench::new(&["a"]);
        bench.look(&[AWAY]);
        bench.look(&[AWAY]);
        bench.move_pages();
        bench.look(&[("/a", 0, [0, 400], 10)]);
        if is_kept {
            bench.look(&[("/a", 0, [0, 400], 10)]);
        }
        for _ in 1..WINDOWS {
            bench.look(&[]);
        }
        assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, is_kept)]);
        bench.look(&[]);
        assert_eq!(bench.preferred_nodes().len(), usize::from(is_kept));
    }
}

#[test]
fn one_that_the_configuration_excludes_now_has_no_home_any_more() {
    let mut bench = Bench::new(&["a"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.config.home.exclude = vec![CgroupPattern::new("/a").unwrap()];
    bench.restart();
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
}

#[test]
fn one_whose_cpus_cannot_be_given_back_gets_them_later() {
    let mut bench = Bench::new(&["a"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    let (at_home, knob) = (bench.cpus("/a"), bench.root().join("a/cpuset.cpus"));
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.move_pages();
    let refused = fixture::refuse(&knob);
    for _ in 0..3 {
        bench.look(&[AWAY]);
    }
    // It is left alone all the same, and its pages are moved back.
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), at_home.clone()));
    assert_eq!(bench.steps(), ["placed", "no_gain"]);
    assert_eq!(bench.move_pages().len(), 1);
    drop(refused);
    fs::remove_file(&knob).unwrap();
    fs::write(&knob, format!("{at_home}\n")).unwrap();
    let now = bench.now;
    let ReconcilerLoop { controllers, core, .. } = bench.inner();
    controllers.restores.tick(core, now);
    assert_eq!((controllers.restores.shown(), bench.cpus("/a")), (Vec::new(), String::new()));
}

#[test]
fn small_idle_and_local_ones_are_left_where_they_are() {
    let mut bench = Bench::new(&["a"]);
    for window in [("/a", 500, [20, 43], 10), ("/a", 500, [100, 300], 0), ("/a", 299, [100, 300], 10)] {
        bench.counted.clear();
        bench.restart();
        bench.look(&[window]);
        bench.look(&[window]);
        assert_eq!(
            (bench.preferred_nodes(), bench.steps()),
            (Vec::new(), Vec::<String>::new()),
            "{window:?}"
        );
    }
}

#[test]
fn it_is_said_why_one_gets_no_home() {
    let mut bench = Bench::new(&["busy", "large", "bound"]);
    fs::write(bench.root().join("bound/cpuset.cpus"), "0-5\n").unwrap();
    let windows =
        [("/busy", 500, [100, 300], 33), ("/large", 500, [1100, 1300], 10), ("/bound", 500, [100, 300], 10)];
    for _ in 0..3 {
        bench.look_with(&windows, [1000, 1000]);
    }
    assert_eq!(
        (bench.preferred_nodes(), bench.steps()),
        (Vec::new(), vec!["refused".to_owned(); 3]),
        "each is said once"
    );
    for words in [
        "/busy gets no home: it uses 3.3 CPUs",
        "/large gets no home: no node has room",
        "/bound gets no home: its cpuset is set already",
    ] {
        assert!(bench.reported().contains(words), "{words}: {}", bench.reported());
    }
}

#[test]
fn no_more_are_on_trial_at_once_than_configured_and_the_farthest_comes_first() {
    let mut bench = Bench::new(&["a", "b", "c"]);
    bench.config.home.max_at_once = 1;
    bench.restart();
    let windows = [AWAY, ("/b", 900, [100, 300], 10), ("/c", 400, [100, 300], 10)];
    bench.look(&windows);
    bench.look(&windows);
    assert_eq!(bench.preferred_nodes(), [("/b".to_owned(), 1, false)]);
    bench.look(&windows);
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.move_pages();
    let there = [AWAY, ("/b", 0, [0, 400], 10), ("/c", 400, [100, 300], 10)];
    bench.look(&there);
    bench.look(&there);
    assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, false), ("/b".to_owned(), 1, true)]);
}

#[test]
fn a_report_writes_nothing_and_says_once_where_it_would_be() {
    let mut bench = Bench::new(&["a"]);
    bench.config.home.mode = HomeMode::Report;
    bench.restart();
    for _ in 0..4 {
        bench.look(&[AWAY]);
    }
    assert_eq!(
        (bench.preferred_nodes(), bench.cpus("/a"), bench.move_pages()),
        (Vec::new(), String::new(), Vec::new())
    );
    assert_eq!(bench.steps(), ["would"]);
    assert!(bench.reported().contains("/a would get a home on node 1"), "{}", bench.reported());
}

#[test]
fn who_gets_a_guarantee_has_no_home_any_more_and_exclusive_cpus_are_nobody_elses() {
    let mut bench = Bench::new(&["a", "above", "above/below", "kept"]);
    let windows = [AWAY, ("/above", 500, [100, 300], 10)];
    bench.look(&windows);
    bench.look(&windows);
    assert_eq!(bench.preferred_nodes().len(), 2);
    bench.move_pages();
    bench.guarantee("below", "/above/below");
    assert_eq!(bench.cpus("/above"), "", "what is above a guarantee has no home");
    bench.guarantee("kept", "/kept");
    let exclusive: CpuSet = bench.cpus("/kept").parse().unwrap();
    bench.inner().dispatch(&Event::StateChanged);
    bench.look(&[AWAY]);
    let home: CpuSet = bench.cpus("/a").parse().unwrap();
    assert!((&home & &exclusive).is_empty() && !home.is_empty(), "{home} {exclusive}");
    bench.guarantee("a", "/a");
    assert_eq!(bench.preferred_nodes(), []);
    assert!(!bench.mems("/a").is_empty(), "it holds what it was promised");
    bench.inner().core.release("a").unwrap();
    assert_eq!(
        (bench.cpus("/a"), bench.mems("/a")),
        (String::new(), String::new()),
        "and gets back what was found first"
    );
    bench.look(&[("/kept", 900, [100, 300], 10)]);
    bench.look(&[("/kept", 900, [100, 300], 10)]);
    assert_eq!(bench.preferred_nodes(), [], "who has a guarantee gets no home");
}

#[test]
fn a_new_cgroup_of_the_same_path_has_no_home() {
    let mut bench = Bench::new(&["a"]);
    bench.look(&[AWAY]);
    bench.look(&[AWAY]);
    bench.move_pages();
    let root = bench.root();
    fs::rename(root.join("a"), root.join("old")).unwrap();
    fixture::cgroup(&root.join("a"), &bench.host.machine.lock().unwrap());
    bench.look(&[AWAY]);
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
}

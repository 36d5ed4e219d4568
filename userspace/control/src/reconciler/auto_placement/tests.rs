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
    core::{narrowing, preferred_node, release},
    policy_worker::PolicyFinding,
    reconciler::{ControllerEvent, ReconcilerLoop, tests::reconciler_loop},
    testing::{self as fixture, TestHost},
};

/// A reconciler on a machine with two nodes of four CPUs, and surveys that replace the thread.
struct AutoPlacementBench {
    dir: tempfile::TempDir,
    host: Arc<TestHost>,
    config: Config,
    reconciler: Option<ReconcilerLoop>,
    now: Instant,
    /// Counters of each cgroup: local and remote accesses, CPU seconds.
    counted: BTreeMap<String, ([u64; 2], u64)>,
    /// Reasons by which memory policies keep cgroups from being placed.
    policies: BTreeMap<String, String>,
}

/// Usage of a workload in a window: remote accesses of 1000, memory in MiB by node, CPU use in tenths of one CPU.
type Window = (&'static str, u64, [u64; 2], u64);

impl AutoPlacementBench {
    fn new(cgroups: &[&str]) -> Self {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
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

    /// Calls a function with the controller and the core.
    fn with<T>(&mut self, act: impl FnOnce(&mut AutoPlacement, &mut Core, Instant) -> T) -> T {
        let now = self.now;
        let ReconcilerLoop { controllers, core, .. } = self.inner();
        controllers.auto_placement.follow(core, now);
        act(&mut controllers.auto_placement, core, now)
    }

    /// Evaluates a survey ten seconds after the last. The nodes have this much free memory in MiB.
    fn survey_with_room(&mut self, windows: &[Window], room: [u64; 2]) {
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
                let finding = PolicyFinding { policies, untouched: Ok(Bytes(0)), is_unknown: false };
                (path.parse().unwrap(), (id_of(&top.join(&path[1..])), finding))
            })
            .collect();
        let room = [0, 1].map(NodeId).into_iter().zip(room.map(Bytes::mib)).collect();
        let survey = Survey { workloads: workloads.collect(), room, took: Duration::ZERO };
        self.with(|auto_placement, core, now| {
            auto_placement.policies.known = policies;
            auto_placement.evaluate(core, survey, now);
        });
    }

    fn survey(&mut self, windows: &[Window]) {
        self.survey_with_room(windows, [2000, 2000]);
    }

    /// Completes all page moves and returns them: source node, target node, MiB.
    fn move_pages(&mut self) -> Vec<(u32, u32, u64)> {
        self.with(|auto_placement, core, _| {
            let mut orders = Vec::new();
            while let Some((path, order)) = auto_placement.next_order(core) {
                let moved = PagesMoved([(PageOutcome::Moved, order.bytes)].into());
                auto_placement.record_move(core, &path, &order, &moved);
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

/// Most of the memory is on node 1, and half of the accesses are remote.
const AWAY: Window = ("/a", 500, [100, 300], 10);

#[test]
fn kept_until_mode_is_off() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.survey(&[AWAY]);
    assert_eq!(bench.preferred_nodes(), [], "one survey is not a window");
    bench.survey(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("4-7".to_owned(), String::new()));
    assert_eq!(bench.move_pages(), [(0, 1, 100)]);
    // Accesses during the move are not measured.
    bench.survey(&[("/a", 900, [0, 400], 10)]);
    bench.survey(&[("/a", 350, [0, 400], 10)]);
    assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, true)]);
    assert_eq!(bench.steps(), ["placed", "kept"]);
    assert!(
        bench.reported().contains("50 % of the pages it touched (by scan) were remote before, 35 % are now"),
        "{}",
        bench.reported()
    );
    bench.restart();
    bench.survey(&[("/a", 0, [0, 400], 10)]);
    bench.survey(&[("/a", 0, [0, 400], 10)]);
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
fn policy_that_names_nodes_prevents_placement() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    let policy = "process 7 has the memory policy bind:0";
    bench.policies.insert("/a".to_owned(), policy.to_owned());
    for _ in 0..3 {
        bench.survey(&[AWAY]);
    }
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
    assert_eq!(bench.steps(), ["refused"], "reported once");
    assert!(
        bench.reported().contains(&format!("/a gets no preferred node: {policy}")),
        "{}",
        bench.reported()
    );
    bench.policies.clear();
    bench.survey(&[AWAY]);
    assert_eq!(bench.cpus("/a"), "4-7");
}

#[test]
fn guard_ends_placement_on_node() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    let path: CgroupPath = "/a".parse().unwrap();
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("4-7".to_owned(), String::new()));
    bench.with(|_, core, _| narrowing::keep_off(core, &path, &"1".parse().unwrap()).unwrap());
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), (String::new(), "0".to_owned()));
    assert_eq!((bench.preferred_nodes(), bench.steps().last().unwrap().as_str()), (Vec::new(), "ended"));
    // Most of its memory is still on node 1.
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("0-3".to_owned(), "0".to_owned()));
    bench.with(|_, core, _| narrowing::keep_off(core, &path, &NodeSet::new()).unwrap());
    assert_eq!((bench.cpus("/a"), bench.mems("/a")), ("0-3".to_owned(), String::new()));
}

#[test]
fn publishes_preferred_nodes() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    let published = |bench: &AutoPlacementBench| bench.host.assigned.lock().unwrap().homes.clone();
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    let home = BTreeMap::from([("/a".parse().unwrap(), NodeId(1))]);
    bench.inner().publish();
    assert_eq!(published(&bench), home);
    bench.restart();
    assert_eq!(published(&bench), home, "after a restart");
    bench.config.home.mode = HomeMode::Off;
    bench.restart();
    bench.inner().publish();
    assert!(published(&bench).is_empty());
}

#[test]
fn failed_trials_double_backoff() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    let mut until = Vec::new();
    for _ in 0..3 {
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        assert_eq!((bench.cpus("/a"), bench.move_pages()), ("4-7".to_owned(), vec![(0, 1, 100)]));
        bench.survey(&[("/a", 400, [0, 400], 10)]);
        bench.survey(&[("/a", 400, [0, 400], 10)]);
        assert_eq!((bench.cpus("/a"), bench.preferred_nodes()), (String::new(), Vec::new()));
        assert_eq!(bench.move_pages(), [(1, 0, 100)], "its pages return too");
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        assert_eq!(bench.preferred_nodes(), [], "it is in back-off");
        let path = "/a".parse().unwrap();
        let backoff = bench.inner().core.store.state.left_alone.get_mut(&path).unwrap();
        until.push(backoff.until - seconds_now());
        // Ends the back-off.
        backoff.until = 0;
    }
    let half_hour = 1800;
    for (pause, expected) in until.iter().zip([half_hour, 2 * half_hour, 4 * half_hour]) {
        assert!((expected - 60..=expected).contains(pause), "{until:?}");
    }
    assert_eq!(bench.steps(), ["placed", "no_gain", "placed", "no_gain", "placed", "no_gain"]);
}

#[test]
fn kept_placement_ends_without_gain() {
    for (window, step) in [
        (("/a", 500, [0, 400], 10), Some("no_gain")),
        (("/a", 0, [0, 400], 39), Some("outgrown")),
        (("/a", 300, [0, 400], 30), None),
    ] {
        let mut bench = AutoPlacementBench::new(&["a"]);
        bench.config.home.cool_down = Interval(Duration::from_mins(1));
        bench.restart();
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        bench.move_pages();
        bench.survey(&[("/a", 0, [0, 400], 10)]);
        bench.survey(&[("/a", 0, [0, 400], 10)]);
        if step == Some("no_gain") {
            bench.survey(&[window]);
            assert_eq!(bench.preferred_nodes().len(), 1, "it stays until the cool-down ends");
        }
        bench.now += Duration::from_secs(50);
        bench.survey(&[(window.0, window.1, window.2, window.3 * 6)]);
        assert_eq!(bench.steps().get(2).map(String::as_str), step);
        assert_eq!(bench.preferred_nodes().is_empty(), step.is_some());
    }
}

#[test]
fn foreign_cpus_end_placement() {
    // "0-7" is equivalent to the empty set from before the placement.
    for set in ["2-5", "0-7"] {
        let mut bench = AutoPlacementBench::new(&["a"]);
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        let write = |bench: &mut AutoPlacementBench, cpus: &str| {
            fs::write(bench.root().join("a/cpuset.cpus"), format!("{cpus}\n")).unwrap();
            let now = bench.now;
            let ReconcilerLoop { controllers, core, .. } = bench.inner();
            controllers.drift.check_all(core, now);
        };
        // An empty set, as in a cgroup that was created again, is no foreign value.
        write(&mut bench, "");
        assert_eq!((bench.cpus("/a"), bench.preferred_nodes().len()), ("4-7".to_owned(), 1));
        write(&mut bench, set);
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), (set, Vec::new()));
        assert!(bench.inner().core.store.state.applied.is_empty());
        assert_eq!(bench.steps(), ["placed", "ended"]);
        let expected = format!("another program set its CPUs to {set}");
        assert!(bench.reported().contains(&expected), "{}", bench.reported());
        // The foreign value prevents a new placement.
        for _ in 0..2 {
            bench.survey(&[AWAY]);
        }
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), (set, Vec::new()));
    }
}

#[test]
fn foreign_cpus_during_stop_are_kept() {
    for mode in [HomeMode::Place, HomeMode::Off] {
        let mut bench = AutoPlacementBench::new(&["a"]);
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        assert_eq!(bench.cpus("/a"), "4-7");
        bench.reconciler = None;
        fs::write(bench.root().join("a/cpuset.cpus"), "2-5\n").unwrap();
        bench.config.home.mode = mode;
        bench.restart();
        assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), ("2-5", Vec::new()), "{mode:?}");
        assert!(bench.inner().core.store.state.applied.is_empty());
        assert_eq!(bench.steps(), ["placed", "ended"]);
        assert!(bench.reported().contains("another program set its CPUs to 2-5"), "{}", bench.reported());
        bench.restart();
        assert_eq!(bench.cpus("/a"), "2-5", "the foreign value stays");
    }
}

#[test]
fn crash_before_write_keeps_placement() {
    let mut bench = AutoPlacementBench::new(&["a", "kept"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    // The daemon died before the first write.
    fs::write(bench.root().join("a/cpuset.cpus"), "\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes().len()), ("4-7", 1));
    // The daemon died after it had stored smaller CPUs for the workload, and before it wrote them.
    bench.guarantee_on("kept", "/kept", "1");
    bench.inner().dispatch(&ControllerEvent::StateChanged);
    bench.survey(&[AWAY]);
    let narrowed = bench.cpus("/a");
    assert_ne!(narrowed, "4-7");
    preferred_node::update(&mut bench.inner().core, &"/a".parse().unwrap(), |home| {
        home.cpus_before = "4-7".parse().ok();
    });
    fs::write(bench.root().join("a/cpuset.cpus"), "4-7\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a"), bench.preferred_nodes().len()), (narrowed, 1));
    assert_eq!(bench.steps(), ["placed"]);
}

#[test]
fn foreign_former_cpus_end_placement() {
    let mut bench = AutoPlacementBench::new(&["a", "kept"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    bench.guarantee_on("kept", "/kept", "1");
    bench.inner().dispatch(&ControllerEvent::StateChanged);
    bench.survey(&[AWAY]);
    assert_ne!(bench.cpus("/a"), "4-7");
    bench.reconciler = None;
    fs::write(bench.root().join("a/cpuset.cpus"), "4-7\n").unwrap();
    bench.restart();
    assert_eq!((bench.cpus("/a").as_str(), bench.preferred_nodes()), ("4-7", Vec::new()));
}

#[test]
fn too_few_accesses_end_trial() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    bench.move_pages();
    let add_idle_window = |bench: &mut AutoPlacementBench| {
        bench.now += Duration::from_secs(10);
        let (counted, _) = bench.counted["/a"];
        let mut reading = reading("/a", bench.now, counted, [0, 400], 0);
        reading.id = id_of(&bench.root().join("a"));
        let survey = Survey { workloads: vec![reading], ..Survey::default() };
        bench.with(|auto_placement, core, now| auto_placement.evaluate(core, survey, now));
    };
    for _ in 0..MAX_WINDOWS {
        add_idle_window(&mut bench);
        assert_eq!(bench.preferred_nodes().len(), 1);
    }
    add_idle_window(&mut bench);
    assert_eq!(
        (bench.preferred_nodes(), bench.steps()),
        (Vec::new(), vec!["placed".to_owned(), "not_measured".to_owned()])
    );
}

#[test]
fn missing_in_surveys_ends_trial() {
    for is_kept in [false, true] {
        let mut bench = AutoPlacementBench::new(&["a"]);
        bench.survey(&[AWAY]);
        bench.survey(&[AWAY]);
        bench.move_pages();
        bench.survey(&[("/a", 0, [0, 400], 10)]);
        if is_kept {
            bench.survey(&[("/a", 0, [0, 400], 10)]);
        }
        for _ in 1..MAX_WINDOWS {
            bench.survey(&[]);
        }
        assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, is_kept)]);
        bench.survey(&[]);
        assert_eq!(bench.preferred_nodes().len(), usize::from(is_kept));
    }
}

#[test]
fn excluded_workload_is_not_placed() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.config.home.exclude = vec![CgroupPattern::new("/a").unwrap()];
    bench.restart();
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
}

#[test]
fn failed_restore_of_cpus_is_retried() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    let (placed, knob) = (bench.cpus("/a"), bench.root().join("a/cpuset.cpus"));
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.move_pages();
    let refused = fixture::refuse(&knob);
    for _ in 0..3 {
        bench.survey(&[AWAY]);
    }
    // The back-off begins nevertheless, and the pages return.
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), placed.clone()));
    assert_eq!(bench.steps(), ["placed", "no_gain"]);
    assert_eq!(bench.move_pages().len(), 1);
    drop(refused);
    fs::remove_file(&knob).unwrap();
    fs::write(&knob, format!("{placed}\n")).unwrap();
    let now = bench.now;
    let ReconcilerLoop { controllers, core, .. } = bench.inner();
    controllers.restores.tick(core, now);
    assert_eq!((controllers.restores.pending(), bench.cpus("/a")), (Vec::new(), String::new()));
}

#[test]
fn needs_memory_cpu_and_remote_accesses() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    for window in [("/a", 500, [20, 43], 10), ("/a", 500, [100, 300], 0), ("/a", 299, [100, 300], 10)] {
        bench.counted.clear();
        bench.restart();
        bench.survey(&[window]);
        bench.survey(&[window]);
        assert_eq!(
            (bench.preferred_nodes(), bench.steps()),
            (Vec::new(), Vec::<String>::new()),
            "{window:?}"
        );
    }
}

#[test]
fn refusals_are_reported() {
    let mut bench = AutoPlacementBench::new(&["busy", "large", "bound"]);
    fs::write(bench.root().join("bound/cpuset.cpus"), "0-5\n").unwrap();
    let windows =
        [("/busy", 500, [100, 300], 33), ("/large", 500, [1100, 1300], 10), ("/bound", 500, [100, 300], 10)];
    for _ in 0..3 {
        bench.survey_with_room(&windows, [1000, 1000]);
    }
    assert_eq!(
        (bench.preferred_nodes(), bench.steps()),
        (Vec::new(), vec!["refused".to_owned(); 3]),
        "each is reported once"
    );
    for words in [
        "/busy gets no preferred node: it uses 3.3 CPUs",
        "/large gets no preferred node: no node has room",
        "/bound gets no preferred node: its cpuset is set already",
    ] {
        assert!(bench.reported().contains(words), "{words}: {}", bench.reported());
    }
}

#[test]
fn limits_concurrent_trials() {
    let mut bench = AutoPlacementBench::new(&["a", "b", "c"]);
    bench.config.home.max_at_once = 1;
    bench.restart();
    let windows = [AWAY, ("/b", 900, [100, 300], 10), ("/c", 400, [100, 300], 10)];
    bench.survey(&windows);
    bench.survey(&windows);
    assert_eq!(bench.preferred_nodes(), [("/b".to_owned(), 1, false)]);
    bench.survey(&windows);
    assert_eq!(bench.preferred_nodes().len(), 1);
    bench.move_pages();
    let moved = [AWAY, ("/b", 0, [0, 400], 10), ("/c", 400, [100, 300], 10)];
    bench.survey(&moved);
    bench.survey(&moved);
    assert_eq!(bench.preferred_nodes(), [("/a".to_owned(), 1, false), ("/b".to_owned(), 1, true)]);
}

#[test]
fn report_mode_writes_nothing() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.config.home.mode = HomeMode::Report;
    bench.restart();
    for _ in 0..4 {
        bench.survey(&[AWAY]);
    }
    assert_eq!(
        (bench.preferred_nodes(), bench.cpus("/a"), bench.move_pages()),
        (Vec::new(), String::new(), Vec::new())
    );
    assert_eq!(bench.steps(), ["would"]);
    assert!(bench.reported().contains("/a would get preferred node 1"), "{}", bench.reported());
}

#[test]
fn guarantees_take_precedence() {
    let mut bench = AutoPlacementBench::new(&["a", "above", "above/below", "kept"]);
    let windows = [AWAY, ("/above", 500, [100, 300], 10)];
    bench.survey(&windows);
    bench.survey(&windows);
    assert_eq!(bench.preferred_nodes().len(), 2);
    bench.move_pages();
    bench.guarantee("below", "/above/below");
    assert_eq!(bench.cpus("/above"), "", "an ancestor of a guarantee is not placed");
    bench.guarantee("kept", "/kept");
    let exclusive: CpuSet = bench.cpus("/kept").parse().unwrap();
    bench.inner().dispatch(&ControllerEvent::StateChanged);
    bench.survey(&[AWAY]);
    let home: CpuSet = bench.cpus("/a").parse().unwrap();
    assert!((&home & &exclusive).is_empty() && !home.is_empty(), "{home} {exclusive}");
    bench.guarantee("a", "/a");
    assert_eq!(bench.preferred_nodes(), []);
    assert!(!bench.mems("/a").is_empty(), "the guarantee is applied");
    release::release(&mut bench.inner().core, "a").unwrap();
    assert_eq!(
        (bench.cpus("/a"), bench.mems("/a")),
        (String::new(), String::new()),
        "the release restores the first original"
    );
    bench.survey(&[("/kept", 900, [100, 300], 10)]);
    bench.survey(&[("/kept", 900, [100, 300], 10)]);
    assert_eq!(bench.preferred_nodes(), [], "a workload with a guarantee is not placed");
}

#[test]
fn recreated_cgroup_is_not_placed() {
    let mut bench = AutoPlacementBench::new(&["a"]);
    bench.survey(&[AWAY]);
    bench.survey(&[AWAY]);
    bench.move_pages();
    let root = bench.root();
    fs::rename(root.join("a"), root.join("old")).unwrap();
    fixture::cgroup(&root.join("a"), &bench.host.machine.lock().unwrap());
    bench.survey(&[AWAY]);
    assert_eq!((bench.preferred_nodes(), bench.cpus("/a")), (Vec::new(), String::new()));
}

//! Tests of CPU isolation, enforcement modes and declared guarantees.

use std::time::{Duration, Instant};

use numaward_api::EnforcementMode;
use numaward_cgroup::{Cgroup, CgroupEvent};
use numaward_topology::{
    CpuId, CpuSet,
    affinity::{affinity, set_affinity},
};

use super::*;

/// A running daemon.
struct RunningReconciler {
    reconciler: ReconcilerHandle,
    thread: JoinHandle<()>,
    stop: CancellationToken,
}

impl RunningReconciler {
    fn start(bench: &DaemonBench, config: &str) -> Self {
        let config: Config = serde_json::from_str(config).unwrap();
        let (reconciler, thread, stop) = bench.start_with(config);
        Self { reconciler, thread, stop }
    }

    fn end(self) {
        self.stop.cancel();
        self.thread.join().unwrap();
    }

    /// Waits until the published state has a value, and returns it.
    fn until<T>(&self, what: &str, find: impl Fn(&api::Allocations) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            let view = self.reconciler.allocations();
            if let Some(found) = find(&view) {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: {view:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn confined(&self) -> Vec<(String, String, api::ConfinementState)> {
        let status = self.reconciler.allocations().enforcement.herding.clone();
        status.cgroups.into_iter().map(|of| (of.cgroup, of.cpus, of.state)).collect()
    }
}

impl DaemonBench {
    fn cpus<const N: usize>(&self, cgroups: [&str; N]) -> [String; N] {
        cgroups.map(|cgroup| self.knob(&format!("{cgroup}/cpuset.cpus")))
    }

    fn write(&self, path: &str, text: &str) {
        fs::write(self.dir.path().join("cgroup").join(path), format!("{text}\n")).unwrap();
    }

    /// Creates a cgroup and reports it to the daemon.
    fn appear(&self, path: &str) {
        self.cgroup(path);
        self.report(path, CgroupEvent::Added);
    }

    /// Reports a created or removed cgroup to the daemon.
    fn report(&self, path: &str, event: fn(Cgroup) -> CgroupEvent) {
        let hierarchy = Hierarchy::at(&self.dir.path().join("cgroup"));
        let path: CgroupPath = format!("/{path}").parse().unwrap();
        let id = hierarchy.id_of(&path).unwrap().unwrap_or(numaward_cgroup::CgroupId(1));
        let listener = self.host.cgroup_listener.lock().unwrap();
        assert!(listener.as_ref().unwrap()(&[event(Cgroup { id, path })]));
    }
}

const CPU_ISOLATION: &str = r#"{"enforcement": {"herding": {"mode": "on"}}}"#;

#[tokio::test]
async fn isolated_workload_confines_others() {
    let bench = DaemonBench::new(&["init.scope", "system", "a", "b"]);
    // CPU isolation is a dry run unless it is configured.
    let run = RunningReconciler::start(&bench, "{}");
    assert_eq!(admit(&run.reconciler, "a", 2).await.unwrap().cpus, "1-2");
    let entry = |cgroup: &str, cpus: &str, state| (cgroup.to_owned(), cpus.to_owned(), state);
    let would =
        |cpus: &str| ["/b", "/system"].map(|cgroup| entry(cgroup, cpus, api::ConfinementState::DryRun));
    assert_eq!(run.confined(), would("0,3-7"));
    assert_eq!(bench.cpus(["system", "b"]), ["", ""]);

    let asked = api::AllocationRequest {
        cpus: Some(api::Cpus::whole(2)),
        placement: api::Placement { isolate: true, ..api::Placement::default() },
        ..api::AllocationRequest::new("b", api::Target::Cgroup("/b".to_owned()), "64Mi")
    };
    let isolated = run.reconciler.admit(Request::new(&asked).unwrap(), false).await.unwrap();
    let AdmissionOutcome::Admitted(isolated) = isolated else { panic!("{isolated:?}") };
    assert!(isolated.cpus == "4-5" && isolated.placement.isolate, "{isolated:?}");
    // Only the CPUs of "b" are isolated, not those of "a".
    assert_eq!(bench.cpus(["init.scope", "system", "a", "b"]), ["", "0-3,6-7", "1-2", "4-5"]);
    assert_eq!(run.confined(), [entry("/system", "0-3,6-7", api::ConfinementState::Confined)]);

    // The isolation survives a restart and includes new cgroups. It ends with the release.
    run.end();
    let run = RunningReconciler::start(&bench, "{}");
    bench.appear("new");
    run.until("the new cgroup is confined", |_| {
        (bench.cpus(["new", "system"]) == ["0-3,6-7"; 2]).then_some(())
    });
    run.reconciler.release("b".to_owned()).await.unwrap();
    run.until("the CPUs are restored", |_| (bench.cpus(["new", "system"]) == ["", ""]).then_some(()));
    let states = || run.confined().into_iter().map(|(_, _, state)| state).collect::<Vec<_>>();
    assert_eq!(states(), [api::ConfinementState::DryRun; 3]);
    run.end();
}

#[tokio::test]
async fn confined_affinities_are_widened() {
    let all = affinity(None).unwrap();
    let shared: CpuSet = &all & &"0,3-7".parse().unwrap();
    if !all.contains(CpuId(1)) || shared.is_empty() {
        return;
    }
    let (started, id) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let runtime = std::thread::spawn(move || {
        started.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let _ = ended.recv();
    });
    let id = id.recv().unwrap();
    let bench = DaemonBench::new(&["a", "b"]);
    bench.write("b/cgroup.threads", &id.to_string());
    bench.write("b/cpuset.cpus.effective", &all.to_string());
    for is_restarted in [false, true] {
        let mut run = RunningReconciler::start(&bench, CPU_ISOLATION);
        admit(&run.reconciler, "a", 2).await.unwrap();
        assert_eq!(bench.cpus(["b"]), ["0,3-7"]);
        set_affinity(Some(id), &shared).unwrap();
        if is_restarted {
            run.end();
            run = RunningReconciler::start(&bench, CPU_ISOLATION);
        }
        run.reconciler.release("a".to_owned()).await.unwrap();
        run.until("the thread may use all CPUs", |_| (affinity(Some(id)).unwrap() == all).then_some(()));
        run.end();
    }
    drop(end);
    runtime.join().unwrap();
}

#[tokio::test]
async fn recreated_cgroup_is_confined() {
    let bench = DaemonBench::new(&["a", "b", "c"]);
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    admit(&run.reconciler, "a", 2).await.unwrap();
    assert_eq!(bench.cpus(["b", "c"]), ["0,3-7", "0,3-7"]);
    let root = bench.dir.path().join("cgroup");
    for name in ["b", "c"] {
        fs::rename(root.join(name), bench.dir.path().join(name)).unwrap();
    }
    bench.cgroup("c");
    bench.write("c/cpuset.cpus", "2-4");
    bench.appear("b");
    run.until("they are confined", |_| (bench.cpus(["b", "c"]) == ["0,3-7", "3-4"]).then_some(()));
    run.reconciler.release("a".to_owned()).await.unwrap();
    run.until("the originals are restored", |_| (bench.cpus(["b", "c"]) == ["", "2-4"]).then_some(()));
    run.end();
}

#[tokio::test]
async fn command_without_guarantee_is_confined() {
    let bench = DaemonBench::new(&["a", "numaward"]);
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    let asked = api::AllocationRequest::without_guarantee("plain", api::Target::Exec);
    let held = run.reconciler.admit(Request::new(&asked).unwrap(), false).await.unwrap();
    let AdmissionOutcome::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!((held.cgroup.as_str(), held.cpus.as_str(), held.nodes.as_str()), ("/numaward/plain", "", ""));
    assert!(held.settings.is_empty() && held.memory.is_empty(), "{held:?}");
    let more = api::Resize { memory: Some("1Gi".to_owned()), ..api::Resize::default() };
    let more = Resize::new("plain".to_owned(), &more).unwrap();
    let error = run.reconciler.resize_allocation(more, false).await.unwrap_err().to_string();
    assert!(error.contains("\"plain\" has no guarantee"), "{error}");
    // The kernel would create the knobs.
    bench.cgroup("numaward/plain");
    // It is confined like other cgroups, now and after a restart.
    admit(&run.reconciler, "a", 2).await.unwrap();
    assert_eq!(bench.cpus(["a", "numaward/plain"]), ["1-2", "0,3-7"]);
    run.end();
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(bench.cpus(["a", "numaward/plain"]), ["1-2", "0,3-7"]);
    run.reconciler.release("plain".to_owned()).await.unwrap();
    assert_eq!(run.reconciler.allocations().allocations.len(), 1);
    run.end();
}

#[tokio::test]
async fn guarantees_cpus_without_memory() {
    let bench = DaemonBench::new(&["a", "b"]);
    let run = RunningReconciler::start(&bench, "{}");
    let asked = |name: &str, cpus| api::AllocationRequest {
        cpus: Some(api::Cpus::whole(cpus)),
        memory: None,
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), "")
    };
    let held = run.reconciler.admit(Request::new(&asked("a", 2)).unwrap(), false).await.unwrap();
    let AdmissionOutcome::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!((held.cpus.as_str(), held.nodes.as_str(), held.memory.len()), ("1-2", "", 0));
    let settings: Vec<_> =
        held.settings.iter().map(|(knob, value)| (knob.as_str(), value.as_str())).collect();
    assert_eq!(settings, [("cpuset.cpus", "1-2")]);
    let elsewhere = api::AllocationRequest {
        placement: api::Placement { nodes: Some("1".parse().unwrap()), ..api::Placement::default() },
        ..asked("b", 2)
    };
    let held = run.reconciler.admit(Request::new(&elsewhere).unwrap(), false).await.unwrap();
    let AdmissionOutcome::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!(held.cpus, "4-5", "the CPUs of node 1");

    // The CPUs can be resized. Memory cannot be added by a resize.
    let resize = |cpus, memory: Option<&str>| api::Resize {
        cpus,
        memory: memory.map(str::to_owned),
        ..api::Resize::default()
    };
    let more = Resize::new("a".to_owned(), &resize(Some(api::Cpus::whole(3)), None)).unwrap();
    run.reconciler.resize_allocation(more, false).await.unwrap();
    assert_eq!(bench.cpus(["a"]), ["1-3"]);
    let memory = Resize::new("a".to_owned(), &resize(None, Some("64Mi"))).unwrap();
    let refused = run.reconciler.resize_allocation(memory, false).await.unwrap_err().to_string();
    assert!(refused.contains("memory: it has no guaranteed memory"), "{refused}");
    run.end();
    let run = RunningReconciler::start(&bench, "{}");
    assert_eq!(bench.cpus(["a", "b"]), ["1-3", "4-5"]);
    run.end();
}

#[tokio::test]
async fn partition_cpus_are_not_shared() {
    let bench = DaemonBench::new(&["system", "user", "user/a", "user/b"]);
    // Another program has CPU 7 in a cpuset partition.
    bench.write("cpuset.cpus.effective", "0-6");
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(admit(&run.reconciler, "user/a", 3).await.unwrap().cpus, "1-3");
    assert_eq!(bench.cpus(["system", "user/b"]), ["0,4-6", "0,4-6"]);
    assert_eq!(run.reconciler.allocations().shared_cpus, "0,4-6");
}

#[tokio::test]
async fn confines_and_restores_cgroups() {
    let cgroups = ["init.scope", "system", "user", "user/a", "user/b", "pinned", "outside", "numaward"];
    let bench = DaemonBench::new(&cgroups);
    bench.write("pinned/cpuset.cpus", "0-1");
    bench.write("outside/cpuset.cpus", "7");
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(
        bench.cpus(["system", "user", "pinned", "outside"]),
        ["", "", "0-1", "7"],
        "nothing is exclusive"
    );

    // Siblings of a cgroup with a guarantee are confined. A cgroup with its own set keeps the shared part of the set.
    assert_eq!(admit(&run.reconciler, "user/a", 3).await.unwrap().cpus, "1-3");
    assert_eq!(bench.cpus(["init.scope", "system", "user", "user/a"]), ["", "0,4-7", "", "1-3"]);
    assert_eq!(bench.cpus(["user/b", "pinned", "outside", "numaward"]), ["0,4-7", "0", "7", ""]);
    let confined =
        |cgroup: &str, cpus: &str| (cgroup.to_owned(), cpus.to_owned(), api::ConfinementState::Confined);
    assert_eq!(
        run.confined(),
        [confined("/pinned", "0"), confined("/system", "0,4-7"), confined("/user/b", "0,4-7")]
    );

    // The shared pool shrinks. A cgroup without a CPU in it is reported, and keeps its CPUs.
    assert_eq!(admit(&run.reconciler, "system", 4).await.unwrap().cpus, "4-7");
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "outside"]), ["4-7", "0", "0", "7"]);
    let refused = run.reconciler.allocations().enforcement.herding.cgroups.clone();
    let refused: Vec<_> = refused.iter().filter(|of| of.state == api::ConfinementState::Refused).collect();
    let [outside] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!(outside.cgroup, "/outside");
    assert!(outside.reason.as_ref().unwrap().contains("CPUs 7, none of which"), "{outside:?}");
    let reported = format!("{:?}", bench.host.happened.lock().unwrap());
    assert_eq!(reported.matches("/outside cannot be kept off exclusive CPUs").count(), 1, "{reported}");

    // New cgroups are confined as they appear, below the root and beside a guarantee.
    bench.appear("new");
    bench.appear("user/c");
    run.until("both are confined", |_| (bench.cpus(["new", "user/c"]) == ["0", "0"]).then_some(()));

    // Drift of confined cgroups is repaired.
    bench.write("user/b/cpuset.cpus", "0-7");
    run.until("the drift is repaired", |_| (bench.cpus(["user/b"]) == ["0"]).then_some(()));

    // A restart changes nothing.
    run.end();
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "new"]), ["4-7", "0", "0", "0"]);

    // A released cgroup is confined as long as other guarantees exist.
    run.reconciler.release("system".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "new"]), ["0,4-7", "0,4-7", "0", "0,4-7"]);
    run.reconciler.release("user/a".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["system", "user", "user/a", "user/b"]), ["", "", "", ""]);
    assert_eq!(bench.cpus(["pinned", "outside", "new", "user/c"]), ["0-1", "7", "", ""]);
    assert_eq!(run.confined(), []);
    run.end();
}

#[tokio::test]
async fn disabled_isolation_restores_cpus() {
    let bench = DaemonBench::new(&["user", "user/a", "user/b", "c"]);
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    admit(&run.reconciler, "c", 2).await.unwrap();
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["0,3-7", "", ""]);
    // The parent was confined, and has to have the CPUs of its child.
    assert_eq!(admit(&run.reconciler, "user/a", 4).await.unwrap().cpus, "4-7");
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["", "4-7", "0,3"]);
    // A refused request changes nothing.
    admit(&run.reconciler, "user/b", 2).await.unwrap_err();
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["", "4-7", "0,3"]);
    run.end();
    let off = r#"{"enforcement": {"herding": {"mode": "off"}}}"#;
    let run = RunningReconciler::start(&bench, off);
    assert_eq!(bench.cpus(["user", "user/a", "user/b", "c"]), ["", "4-7", "", "1-2"]);
    assert_eq!(run.confined(), []);
    run.end();
}

#[tokio::test]
async fn failed_confinement_affects_one_cgroup() {
    let bench = DaemonBench::new(&["a", "bad", "good"]);
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    let knob = bench.dir.path().join("cgroup/bad/cpuset.cpus");
    fs::remove_file(&knob).unwrap();
    fs::create_dir(&knob).unwrap();
    admit(&run.reconciler, "a", 1).await.unwrap();
    assert_eq!(bench.cpus(["a", "good"]), ["1", "0,2-7"]);
    let confined = run.confined();
    let states: Vec<_> = confined.iter().map(|(cgroup, _, state)| (cgroup.as_str(), *state)).collect();
    assert_eq!(
        states,
        [("/bad", api::ConfinementState::Refused), ("/good", api::ConfinementState::Confined)]
    );
    run.reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["a", "good"]), ["", ""]);
    run.end();
}

#[tokio::test]
async fn dry_run_writes_nothing() {
    let dry = r#"{"enforcement": {"mode": "dry-run", "herding": {"mode": "on"}}}"#;
    let bench = DaemonBench::new(&["a", "b"]);
    let run = RunningReconciler::start(&bench, dry);
    let held = admit(&run.reconciler, "a", 2).await.unwrap();
    assert!(!held.enforced);
    assert_eq!((held.cpus.as_str(), held.settings["cpuset.cpus"].as_str()), ("1-2", "1-2"));
    assert_eq!(
        (bench.cpus(["a", "b"]), bench.knob("a/memory.min")),
        (["", ""].map(str::to_owned), "0".to_owned())
    );
    assert_eq!(run.confined(), [("/b".to_owned(), "0,3-7".to_owned(), api::ConfinementState::DryRun)]);
    assert_eq!(run.reconciler.allocations().enforcement.mode, EnforcementMode::DryRun);
    run.end();

    // With mode `on`, the guarantee is enforced. Back in the dry run, the originals are restored, and the guarantee remains.
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(bench.cpus(["a", "b"]), ["1-2", "0,3-7"]);
    run.end();
    let run = RunningReconciler::start(&bench, dry);
    assert_eq!(
        (bench.cpus(["a", "b"]), bench.knob("a/memory.min")),
        (["", ""].map(str::to_owned), "0".to_owned())
    );
    assert_eq!(run.reconciler.allocations().allocations[0].cpus, "1-2");
    assert_eq!(admit(&run.reconciler, "b", 3).await.unwrap().cpus, "4-6");
    run.reconciler.release("b".to_owned()).await.unwrap();
    run.end();

    // With mode `off`, there are no guarantees.
    let run = RunningReconciler::start(&bench, CPU_ISOLATION);
    assert_eq!(bench.cpus(["a", "b"]), ["1-2", "0,3-7"]);
    run.end();
    let run =
        RunningReconciler::start(&bench, r#"{"enforcement": {"mode": "off", "herding": {"mode": "on"}}}"#);
    assert_eq!(bench.cpus(["a", "b"]), ["", ""]);
    assert_eq!(run.reconciler.allocations().allocations, []);
    let refused = admit(&run.reconciler, "a", 2).await.unwrap_err();
    assert!(matches!(refused, AdmissionError::Off), "{refused}");
    assert!(
        matches!(run.reconciler.admit(request("a", 2), true).await, Ok(AdmissionOutcome::Dry(dry)) if dry.admitted)
    );
    run.end();
}

#[tokio::test]
async fn declared_guarantee_may_have_cpus_alone() {
    let bench = DaemonBench::new(&["batch", "batch/a"]);
    let rule = |rest: &str| format!(r#"{{"guarantees": [{{"cgroup": "/batch/*", {rest}}}]}}"#);
    // The amount changes in place; memory is added and taken away by a new decision.
    for (rest, cpus, has_memory) in [
        (r#""cpus": 3"#, "1-3", false),
        (r#""cpus": 2"#, "1-2", false),
        (r#""cpus": 2, "memory": "1Gi""#, "1-2", true),
        (r#""cpus": 2"#, "1-2", false),
    ] {
        let run = RunningReconciler::start(&bench, &rule(rest));
        let held = run.reconciler.allocations().allocations.clone();
        assert_eq!((held.len(), held[0].cpus.as_str()), (1, cpus), "{rest}");
        assert_eq!(!held[0].memory.is_empty(), has_memory, "{rest}: {held:?}");
        assert_eq!(bench.cpus(["batch/a"]), [cpus], "{rest}");
        run.end();
    }
}

#[tokio::test]
async fn declarations_are_replaced_while_running() {
    let bench = DaemonBench::new(&["batch", "batch/a", "batch/b", "web"]);
    // Nothing is declared at first, and cgroups that appear later are followed all the same.
    let run = RunningReconciler::start(&bench, r#"{"enforcement": {"herding": {"mode": "off"}}}"#);
    admit(&run.reconciler, "web", 1).await.unwrap();
    let declare = async |rules: &str| {
        run.reconciler.declare(serde_json::from_str(rules).unwrap()).await.unwrap();
        run.reconciler.allocations().waiting.clone()
    };
    assert_eq!(declare(r#"[{"cgroup": "/batch/*", "cpus": 2}]"#).await, []);
    assert_eq!(bench.cpus(["web", "batch/a", "batch/b"]), ["1", "2-3", "4-5"]);
    bench.appear("batch/c");
    run.until("the new one is guaranteed", |view| (view.allocations.len() == 4).then_some(()));

    // One rule changes an amount, one is gone, and one does not fit.
    let waiting = declare(r#"[{"cgroup": "/batch/a", "cpus": 1}, {"cgroup": "/batch/b", "cpus": 9}]"#).await;
    assert_eq!(bench.cpus(["web", "batch/a", "batch/b", "batch/c"]), ["1", "2", "4-5", ""]);
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    assert!(
        waiting[0].cgroup == "/batch/b" && waiting[0].reason.contains("keeps its present guarantee"),
        "{waiting:?}"
    );

    // Without rules, only the requested guarantee is left.
    assert_eq!(declare("[]").await, []);
    assert_eq!(bench.cpus(["web", "batch/a", "batch/b"]), ["1", "", ""]);
    assert_eq!(run.reconciler.allocations().allocations.len(), 1);
    run.end();
}

#[tokio::test]
async fn declared_guarantees_are_retried() {
    let rules = r#"{"guarantees": [
        {"cgroup": "/batch/*", "cpus": 3, "memory": "1Gi"},
        {"unit": "db*.service", "cpus": 1, "memory": "64Mi", "policy": "single-numa-node"}
    ]}"#;
    let bench = DaemonBench::new(&["batch", "batch/a", "system.slice"]);
    let run = RunningReconciler::start(&bench, rules);
    assert_eq!(bench.cpus(["batch", "batch/a"]), ["", "1-3"]);
    let held = run.reconciler.allocations().allocations.clone();
    assert_eq!((held[0].name.as_str(), held[0].declared.as_deref()), ("batch/a", Some("/batch/*")));

    bench.appear("batch/b");
    bench.appear("batch/b/deeper");
    bench.appear("system.slice/db@1.service");
    run.until("both are guaranteed", |view| (view.allocations.len() == 3).then_some(()));
    assert_eq!(bench.cpus(["batch/b", "batch/b/deeper", "system.slice/db@1.service"]), ["4-6", "", "7"]);

    // A declared guarantee that does not fit waits.
    bench.appear("batch/c");
    let waiting = run.until("the third one waits", |view| view.waiting.first().cloned());
    assert_eq!((waiting.cgroup.as_str(), waiting.declared.as_str()), ("/batch/c", "/batch/*"));
    assert!(waiting.rejection.is_some() && waiting.reason.contains("cpu requested 3"), "{waiting:?}");
    let reported = format!("{:?}", bench.host.happened.lock().unwrap());
    assert!(
        reported.contains("GuaranteeRefused") && reported.contains("/batch/c: the guarantee declared for"),
        "{reported}"
    );
    let refused = run.reconciler.release("batch/a".to_owned()).await.unwrap_err();
    assert!(
        matches!(&refused, AdmissionError::Conflict(error)
            if error.problem.contains("/batch/*") && error.allowed.ends_with("run `numaward reload`")),
        "{refused}"
    );
    fs::remove_dir_all(bench.dir.path().join("cgroup/batch/a")).unwrap();
    bench.report("batch/a", CgroupEvent::Removed);
    run.until("it is admitted", |view| {
        view.allocations.iter().any(|held| held.name == "batch/c").then_some(())
    });
    assert_eq!(bench.cpus(["batch/c"]), ["1-3"]);
    run.until("none is waiting", |view| view.waiting.is_empty().then_some(()));

    // After a change of the rules, declared guarantees are resized. A requested guarantee takes precedence and is kept.
    run.end();
    let run = RunningReconciler::start(
        &bench,
        r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 2, "memory": "1Gi"}]}"#,
    );
    let held = bench.cpus(["batch/b", "batch/c", "system.slice/db@1.service"]);
    assert_eq!(held, ["4-5", "1-2", ""], "each keeps two of its CPUs");
    run.end();
    let run = RunningReconciler::start(&bench, "{}");
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["", ""]);
    admit(&run.reconciler, "batch/b", 1).await.unwrap();
    run.end();
    let run = RunningReconciler::start(
        &bench,
        r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 2, "memory": "1Gi"}]}"#,
    );
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["1", "2-3"]);
    assert_eq!(run.reconciler.allocations().waiting, []);
    run.reconciler.release("batch/b".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["4-5", "2-3"], "now as declared");
    run.end();
}

#[tokio::test]
async fn edited_rule_is_applied_first() {
    let bench = DaemonBench::new(&["z"]);
    let rules = |z: &str, rest: &str| format!(r#"{{"guarantees": [{{{z}, "memory": "1Gi"}}{rest}]}}"#);
    let a = r#", {"cgroup": "/a", "cpus": 6, "memory": "1Gi"}"#;
    let run = RunningReconciler::start(&bench, &rules(r#""cgroup": "/z", "cpus": 2"#, a));
    assert_eq!(bench.cpus(["z"]), ["1-2"]);
    bench.appear("a");
    run.until("the second one waits", |view| (view.waiting.len() == 1).then_some(()));
    run.end();
    // Another pattern and more CPUs: the guarantee keeps its CPUs and grows.
    let run = RunningReconciler::start(&bench, &rules(r#""cgroup": "/z*", "cpus": 3"#, a));
    assert_eq!(bench.cpus(["z", "a"]), ["1-3", ""]);
    let view = run.reconciler.allocations();
    assert_eq!(view.allocations[0].declared.as_deref(), Some("/z*"));
    assert_eq!(view.waiting.len(), 1);
    run.end();
    // Another placement: the guarantee is placed again.
    let placement = r#""placement": {"preferredNodes": "1"}"#;
    let run =
        RunningReconciler::start(&bench, &rules(&format!(r#""cgroup": "/z", "cpus": 3, {placement}"#), a));
    assert_eq!(bench.cpus(["z", "a"]), ["4-6", ""]);
    run.end();
}

#[tokio::test]
async fn unsatisfiable_rule_keeps_guarantee() {
    let bench = DaemonBench::new(&["y", "z"]);
    let rules = |z: &str| {
        let y = r#"{"cgroup": "/y", "cpus": 4, "memory": "1Gi"}"#;
        format!(r#"{{"guarantees": [{y}, {{"cgroup": "/z", {z}, "memory": "1Gi"}}]}}"#)
    };
    let run = RunningReconciler::start(&bench, &rules(r#""cpus": 3"#));
    assert_eq!(bench.cpus(["y", "z"]), ["4-7", "1-3"]);
    run.end();
    for z in [r#""cpus": 4"#, r#""cpus": 4, "policy": "single-numa-node""#] {
        let run = RunningReconciler::start(&bench, &rules(z));
        assert_eq!(bench.cpus(["y", "z"]), ["4-7", "1-3"], "{z}");
        let waiting = run.reconciler.allocations().waiting.clone();
        assert_eq!(waiting.len(), 1, "{waiting:?}");
        assert!(
            waiting[0].cgroup == "/z" && waiting[0].reason.contains("it keeps its present guarantee"),
            "{waiting:?}"
        );
        run.end();
    }
    let run = RunningReconciler::start(&bench, &rules(r#""cpus": 4"#));
    fs::remove_dir_all(bench.dir.path().join("cgroup/y")).unwrap();
    bench.report("y", CgroupEvent::Removed);
    run.until("the rule is applied", |view| view.waiting.is_empty().then_some(()));
    assert_eq!(bench.cpus(["z"]), ["4-7"], "its node has no more than three");
    run.end();
}

#[tokio::test]
async fn failed_change_to_edited_rule_keeps_guarantee() {
    let bench = DaemonBench::new(&["z"]);
    let run = RunningReconciler::start(&bench, r#"{"guarantees": [{"cgroup": "/z", "cpus": 2}]}"#);
    let limit = bench.dir.path().join("cgroup/z/memory.max");
    let edit = async || {
        let rules = r#"[{"cgroup": "/z", "cpus": 2, "memory": "1Gi"}]"#;
        run.reconciler.declare(serde_json::from_str(rules).unwrap()).await.unwrap();
        run.reconciler.allocations()
    };
    let sealed = fixture::refuse(&limit);
    let view = edit().await;
    assert_eq!(bench.cpus(["z"]), ["1-2"]);
    assert!(view.allocations[0].declared.is_some() && view.allocations[0].memory.is_empty(), "{view:?}");
    let reason = &view.waiting[0].reason;
    assert!(reason.contains("memory.max") && reason.ends_with("it keeps its present guarantee"), "{reason}");
    drop(sealed);
    fs::remove_file(&limit).unwrap();
    fs::write(&limit, "max\n").unwrap();
    let view = edit().await;
    assert_eq!((view.waiting.as_slice(), bench.knob("z/memory.max")), (&[][..], Bytes::gib(1).0.to_string()));
    run.end();
}

#[tokio::test]
async fn sets_partition_and_reads_it_back() {
    let bench = DaemonBench::new(&["a", "a/b"]);
    for cgroup in ["a", "a/b"] {
        bench.write(&format!("{cgroup}/cpuset.cpus.partition"), "member");
        bench.write(&format!("{cgroup}/cpuset.cpus.exclusive"), "");
    }
    let run = RunningReconciler::start(&bench, "{}");
    let asked = |cgroup: &str| Request {
        partition: numaward_cgroup::knob::Partition::Isolated,
        ..request(cgroup, 2)
    };
    // Without cpuset.cpus.exclusive, only a child of a partition can be one, and the root is the only one here.
    let refused = run.reconciler.admit(asked("a/b"), false).await.unwrap_err();
    assert!(refused.to_string().contains("need Linux 6.7"), "{refused}");
    assert_eq!(bench.cpus(["a/b"]), [""]);
    let Ok(AdmissionOutcome::Admitted(held)) = run.reconciler.admit(asked("a"), false).await else {
        panic!("refused")
    };
    assert_eq!(held.settings["cpuset.cpus.partition"], "isolated");
    assert_eq!(bench.knob("a/cpuset.cpus.partition"), "isolated");
    run.reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(bench.knob("a/cpuset.cpus.partition"), "member");
    run.end();
}

/// If events arrive faster than they are handled, some are dropped, and the whole hierarchy is scanned.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_events_of_flood_are_recovered() {
    let bench = DaemonBench::new(&["a", "batch"]);
    let declared = r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 1, "memory": "1Gi"}]}"#;
    let run = RunningReconciler::start(&bench, declared);
    // The reconciler blocks at this lock when it publishes the first guarantee.
    let assigned = bench.host.assigned.lock().unwrap();
    let client = run.reconciler.clone();
    let admission = tokio::spawn(async move { admit(&client, "a", 1).await });
    let flood: Vec<_> = (0..10_000)
        .map(|id| Cgroup {
            id: numaward_cgroup::CgroupId(id + 1_000_000),
            path: format!("/user/{id}").parse().unwrap(),
        })
        .map(CgroupEvent::Added)
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    {
        let listener = bench.host.cgroup_listener.lock().unwrap();
        let report = listener.as_ref().unwrap();
        (0..10).for_each(|_| assert!(report(&flood)));
    }
    bench.appear("batch/b");
    drop(assigned);
    run.until("the cgroup of the dropped event is found", |view| {
        view.allocations.iter().find(|of| of.name == "batch/b").cloned()
    });
    admission.await.unwrap().unwrap();
    run.end();
}

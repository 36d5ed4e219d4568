//! Modes, the herd, and guarantees that are declared.

use std::time::{Duration, Instant};

use numaward_api::EnforcementMode;
use numaward_cgroup::{Cgroup, CgroupEvent};
use numaward_topology::{
    CpuId, CpuSet,
    affinity::{affinity, set_affinity},
};

use super::*;

/// A daemon that runs on a bench.
struct Run {
    reconciler: ReconcilerHandle,
    thread: JoinHandle<()>,
    stop: CancellationToken,
}

impl Run {
    fn start(bench: &Bench, config: &str) -> Self {
        let config: Config = serde_json::from_str(config).unwrap();
        let (reconciler, thread, stop) = bench.start_with(config);
        Self { reconciler, thread, stop }
    }

    fn end(self) {
        self.stop.cancel();
        self.thread.join().unwrap();
    }

    /// Waits until this is said.
    fn until<T>(&self, what: &str, said: impl Fn(&api::Allocations) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            let view = self.reconciler.allocations();
            if let Some(said) = said(&view) {
                return said;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: {view:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn herd(&self) -> Vec<(String, String, api::ConfinementState)> {
        let herding = self.reconciler.allocations().enforcement.herding.clone();
        herding.cgroups.into_iter().map(|herded| (herded.cgroup, herded.cpus, herded.state)).collect()
    }
}

impl Bench {
    fn cpus<const N: usize>(&self, cgroups: [&str; N]) -> [String; N] {
        cgroups.map(|cgroup| self.knob(&format!("{cgroup}/cpuset.cpus")))
    }

    fn put(&self, path: &str, text: &str) {
        fs::write(self.dir.path().join("cgroup").join(path), format!("{text}\n")).unwrap();
    }

    /// A cgroup appears, and this is reported.
    fn appear(&self, path: &str) {
        self.cgroup(path);
        self.tell(path, CgroupEvent::Added);
    }

    fn tell(&self, path: &str, event: fn(Cgroup) -> CgroupEvent) {
        let hierarchy = Hierarchy::at(&self.dir.path().join("cgroup"));
        let path: CgroupPath = format!("/{path}").parse().unwrap();
        let id = hierarchy.id_of(&path).unwrap().unwrap_or(numaward_cgroup::CgroupId(1));
        let told = self.host.cgroup_listener.lock().unwrap();
        assert!(told.as_ref().unwrap()(&[event(Cgroup { id, path })]));
    }
}

const HERDING: &str = r#"{"enforcement": {"herding": {"mode": "on"}}}"#;

#[tokio::test]
async fn a_workload_that_asks_has_others_kept_off_its_cpus_alone() {
    let bench = Bench::new(&["init.scope", "system", "a", "b"]);
    // The default: others are reported.
    let run = Run::start(&bench, "{}");
    assert_eq!(admit(&run.reconciler, "a", 2).await.unwrap().cpus, "1-2");
    let entry = |cgroup: &str, cpus: &str, state| (cgroup.to_owned(), cpus.to_owned(), state);
    let would =
        |cpus: &str| ["/b", "/system"].map(|cgroup| entry(cgroup, cpus, api::ConfinementState::DryRun));
    assert_eq!(run.herd(), would("0,3-7"));
    assert_eq!(bench.cpus(["system", "b"]), ["", ""]);

    let asked = api::AllocationRequest {
        cpus: Some(api::Cpus::whole(2)),
        placement: api::Placement { isolate: true, ..api::Placement::default() },
        ..api::AllocationRequest::new("b", api::Target::Cgroup("/b".to_owned()), "64Mi")
    };
    let isolated = run.reconciler.admit(Request::new(&asked).unwrap(), false).await.unwrap();
    let Answer::Admitted(isolated) = isolated else { panic!("{isolated:?}") };
    assert!(isolated.cpus == "4-5" && isolated.placement.isolate, "{isolated:?}");
    // The CPUs of the other one are not kept free.
    assert_eq!(bench.cpus(["init.scope", "system", "a", "b"]), ["", "0-3,6-7", "1-2", "4-5"]);
    assert_eq!(run.herd(), [entry("/system", "0-3,6-7", api::ConfinementState::Confined)]);

    // It holds over a restart, and for what comes later; it ends with the workload that asked.
    run.end();
    let run = Run::start(&bench, "{}");
    bench.appear("new");
    run.until("it is kept off", |_| (bench.cpus(["new", "system"]) == ["0-3,6-7"; 2]).then_some(()));
    run.reconciler.release("b".to_owned()).await.unwrap();
    run.until("they have their CPUs back", |_| (bench.cpus(["new", "system"]) == ["", ""]).then_some(()));
    let states = || run.herd().into_iter().map(|(_, _, state)| state).collect::<Vec<_>>();
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
    let bench = Bench::new(&["a", "b"]);
    bench.put("b/cgroup.threads", &id.to_string());
    bench.put("b/cpuset.cpus.effective", &all.to_string());
    for is_restarted in [false, true] {
        let mut run = Run::start(&bench, HERDING);
        admit(&run.reconciler, "a", 2).await.unwrap();
        assert_eq!(bench.cpus(["b"]), ["0,3-7"]);
        set_affinity(Some(id), &shared).unwrap();
        if is_restarted {
            run.end();
            run = Run::start(&bench, HERDING);
        }
        run.reconciler.release("a".to_owned()).await.unwrap();
        run.until("it has all CPUs", |_| (affinity(Some(id)).unwrap() == all).then_some(()));
        run.end();
    }
    drop(end);
    runtime.join().unwrap();
}

#[tokio::test]
async fn a_confined_cgroup_that_is_made_again_is_confined_again() {
    let bench = Bench::new(&["a", "b", "c"]);
    let run = Run::start(&bench, HERDING);
    admit(&run.reconciler, "a", 2).await.unwrap();
    assert_eq!(bench.cpus(["b", "c"]), ["0,3-7", "0,3-7"]);
    let root = bench.dir.path().join("cgroup");
    for name in ["b", "c"] {
        fs::rename(root.join(name), bench.dir.path().join(name)).unwrap();
    }
    bench.cgroup("c");
    bench.put("c/cpuset.cpus", "2-4");
    bench.appear("b");
    run.until("they are confined", |_| (bench.cpus(["b", "c"]) == ["0,3-7", "3-4"]).then_some(()));
    run.reconciler.release("a".to_owned()).await.unwrap();
    run.until("they have what they had", |_| (bench.cpus(["b", "c"]) == ["", "2-4"]).then_some(()));
    run.end();
}

#[tokio::test]
async fn a_command_may_have_a_name_and_nothing_promised() {
    let bench = Bench::new(&["a", "numaward"]);
    let run = Run::start(&bench, HERDING);
    let asked = api::AllocationRequest::unpromised("plain", api::Target::Exec);
    let held = run.reconciler.admit(Request::new(&asked).unwrap(), false).await.unwrap();
    let Answer::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!((held.cgroup.as_str(), held.cpus.as_str(), held.nodes.as_str()), ("/numaward/plain", "", ""));
    assert!(held.settings.is_empty() && held.memory.is_empty(), "{held:?}");
    let more = api::Resize { memory: Some("1Gi".to_owned()), ..api::Resize::default() };
    let more = Resize::new("plain".to_owned(), &more).unwrap();
    let error = run.reconciler.resize_allocation(more, false).await.unwrap_err().to_string();
    assert!(error.contains("nothing is promised to \"plain\""), "{error}");
    // The kernel makes the knobs.
    bench.cgroup("numaward/plain");
    // It is herded like all others, now and after a restart.
    admit(&run.reconciler, "a", 2).await.unwrap();
    assert_eq!(bench.cpus(["a", "numaward/plain"]), ["1-2", "0,3-7"]);
    run.end();
    let run = Run::start(&bench, HERDING);
    assert_eq!(bench.cpus(["a", "numaward/plain"]), ["1-2", "0,3-7"]);
    run.reconciler.release("plain".to_owned()).await.unwrap();
    assert_eq!(run.reconciler.allocations().allocations.len(), 1);
    run.end();
}

#[tokio::test]
async fn cpus_may_be_promised_without_memory() {
    let bench = Bench::new(&["a", "b"]);
    let run = Run::start(&bench, "{}");
    let asked = |name: &str, cpus| api::AllocationRequest {
        cpus: Some(api::Cpus::whole(cpus)),
        memory: None,
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), "")
    };
    let held = run.reconciler.admit(Request::new(&asked("a", 2)).unwrap(), false).await.unwrap();
    let Answer::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!((held.cpus.as_str(), held.nodes.as_str(), held.memory.len()), ("1-2", "", 0));
    let settings: Vec<_> =
        held.settings.iter().map(|(knob, value)| (knob.as_str(), value.as_str())).collect();
    assert_eq!(settings, [("cpuset.cpus", "1-2")]);
    let elsewhere = api::AllocationRequest {
        placement: api::Placement { nodes: Some("1".parse().unwrap()), ..api::Placement::default() },
        ..asked("b", 2)
    };
    let held = run.reconciler.admit(Request::new(&elsewhere).unwrap(), false).await.unwrap();
    let Answer::Admitted(held) = held else { panic!("{held:?}") };
    assert_eq!(held.cpus, "4-5", "the CPUs of node 1");

    // They can be resized, and get memory only when they are asked for anew.
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
    assert!(refused.contains("memory: it holds no memory"), "{refused}");
    run.end();
    let run = Run::start(&bench, "{}");
    assert_eq!(bench.cpus(["a", "b"]), ["1-3", "4-5"]);
    run.end();
}

#[tokio::test]
async fn others_keep_off_exclusive_cpus_and_get_back_what_they_had() {
    let cgroups = ["init.scope", "system", "user", "user/a", "user/b", "pinned", "outside", "numaward"];
    let bench = Bench::new(&cgroups);
    bench.put("pinned/cpuset.cpus", "0-1");
    bench.put("outside/cpuset.cpus", "7");
    let run = Run::start(&bench, HERDING);
    assert_eq!(
        bench.cpus(["system", "user", "pinned", "outside"]),
        ["", "", "0-1", "7"],
        "nothing is exclusive"
    );

    // What is beside a promised cgroup is herded itself, what had a set of its own keeps to it.
    assert_eq!(admit(&run.reconciler, "user/a", 3).await.unwrap().cpus, "1-3");
    assert_eq!(bench.cpus(["init.scope", "system", "user", "user/a"]), ["", "0,4-7", "", "1-3"]);
    assert_eq!(bench.cpus(["user/b", "pinned", "outside", "numaward"]), ["0,4-7", "0", "7", ""]);
    let herded =
        |cgroup: &str, cpus: &str| (cgroup.to_owned(), cpus.to_owned(), api::ConfinementState::Confined);
    assert_eq!(run.herd(), [herded("/pinned", "0"), herded("/system", "0,4-7"), herded("/user/b", "0,4-7")]);

    // The pool shrinks; what has nothing left in it is reported, and left alone.
    assert_eq!(admit(&run.reconciler, "system", 4).await.unwrap().cpus, "4-7");
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "outside"]), ["4-7", "0", "0", "7"]);
    let refused = run.reconciler.allocations().enforcement.herding.cgroups.clone();
    let refused: Vec<_> =
        refused.iter().filter(|herded| herded.state == api::ConfinementState::Refused).collect();
    let [outside] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!(outside.cgroup, "/outside");
    assert!(outside.reason.as_ref().unwrap().contains("CPUs 7, of which none"), "{outside:?}");
    let told = format!("{:?}", bench.host.happened.lock().unwrap());
    assert_eq!(told.matches("/outside cannot be kept off exclusive CPUs").count(), 1, "{told}");

    // New ones are herded as they appear, at the top and beside what is promised.
    bench.appear("new");
    bench.appear("user/c");
    run.until("both are herded", |_| (bench.cpus(["new", "user/c"]) == ["0", "0"]).then_some(()));

    // Drift is repaired as ever.
    bench.put("user/b/cpuset.cpus", "0-7");
    run.until("the drift is repaired", |_| (bench.cpus(["user/b"]) == ["0"]).then_some(()));

    // A restart changes nothing.
    run.end();
    let run = Run::start(&bench, HERDING);
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "new"]), ["4-7", "0", "0", "0"]);

    // One that ends goes on with the herd.
    run.reconciler.release("system".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["system", "user/b", "pinned", "new"]), ["0,4-7", "0,4-7", "0", "0,4-7"]);
    run.reconciler.release("user/a".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["system", "user", "user/a", "user/b"]), ["", "", "", ""]);
    assert_eq!(bench.cpus(["pinned", "outside", "new", "user/c"]), ["0-1", "7", "", ""]);
    assert_eq!(run.herd(), []);
    run.end();
}

#[tokio::test]
async fn a_herd_that_is_switched_off_gets_all_back_and_one_above_a_promise_is_let_go_first() {
    let bench = Bench::new(&["user", "user/a", "user/b", "c"]);
    let run = Run::start(&bench, HERDING);
    admit(&run.reconciler, "c", 2).await.unwrap();
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["0,3-7", "", ""]);
    // Its parent is herded, and has to have its CPUs.
    assert_eq!(admit(&run.reconciler, "user/a", 4).await.unwrap().cpus, "4-7");
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["", "4-7", "0,3"]);
    // AdmissionError, so that nothing changes.
    admit(&run.reconciler, "user/b", 2).await.unwrap_err();
    assert_eq!(bench.cpus(["user", "user/a", "user/b"]), ["", "4-7", "0,3"]);
    run.end();
    let off = r#"{"enforcement": {"herding": {"mode": "off"}}}"#;
    let run = Run::start(&bench, off);
    assert_eq!(bench.cpus(["user", "user/a", "user/b", "c"]), ["", "4-7", "", "1-2"]);
    assert_eq!(run.herd(), []);
    run.end();
}

#[tokio::test]
async fn what_the_kernel_refuses_is_told_and_the_others_are_herded() {
    let bench = Bench::new(&["a", "bad", "good"]);
    let run = Run::start(&bench, HERDING);
    let knob = bench.dir.path().join("cgroup/bad/cpuset.cpus");
    fs::remove_file(&knob).unwrap();
    fs::create_dir(&knob).unwrap();
    admit(&run.reconciler, "a", 1).await.unwrap();
    assert_eq!(bench.cpus(["a", "good"]), ["1", "0,2-7"]);
    let herd = run.herd();
    let states: Vec<_> = herd.iter().map(|(cgroup, _, state)| (cgroup.as_str(), *state)).collect();
    assert_eq!(
        states,
        [("/bad", api::ConfinementState::Refused), ("/good", api::ConfinementState::Confined)]
    );
    run.reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["a", "good"]), ["", ""]);
    run.end();
}

#[tokio::test]
async fn a_dry_run_promises_and_writes_nothing() {
    let dry = r#"{"enforcement": {"mode": "dry-run", "herding": {"mode": "on"}}}"#;
    let bench = Bench::new(&["a", "b"]);
    let run = Run::start(&bench, dry);
    let held = admit(&run.reconciler, "a", 2).await.unwrap();
    assert!(!held.enforced);
    assert_eq!((held.cpus.as_str(), held.settings["cpuset.cpus"].as_str()), ("1-2", "1-2"));
    assert_eq!(
        (bench.cpus(["a", "b"]), bench.knob("a/memory.min")),
        (["", ""].map(str::to_owned), "0".to_owned())
    );
    assert_eq!(run.herd(), [("/b".to_owned(), "0,3-7".to_owned(), api::ConfinementState::DryRun)]);
    assert_eq!(run.reconciler.allocations().enforcement.mode, EnforcementMode::DryRun);
    run.end();

    // Switched on, it is enforced; switched back, it is given back and still promised.
    let run = Run::start(&bench, HERDING);
    assert_eq!(bench.cpus(["a", "b"]), ["1-2", "0,3-7"]);
    run.end();
    let run = Run::start(&bench, dry);
    assert_eq!(
        (bench.cpus(["a", "b"]), bench.knob("a/memory.min")),
        (["", ""].map(str::to_owned), "0".to_owned())
    );
    assert_eq!(run.reconciler.allocations().allocations[0].cpus, "1-2");
    assert_eq!(admit(&run.reconciler, "b", 3).await.unwrap().cpus, "4-6");
    run.reconciler.release("b".to_owned()).await.unwrap();
    run.end();

    // Switched off, nothing is promised.
    let run = Run::start(&bench, HERDING);
    assert_eq!(bench.cpus(["a", "b"]), ["1-2", "0,3-7"]);
    run.end();
    let run = Run::start(&bench, r#"{"enforcement": {"mode": "off", "herding": {"mode": "on"}}}"#);
    assert_eq!(bench.cpus(["a", "b"]), ["", ""]);
    assert_eq!(run.reconciler.allocations().allocations, []);
    let refused = admit(&run.reconciler, "a", 2).await.unwrap_err();
    assert!(matches!(refused, AdmissionError::Off), "{refused}");
    assert!(
        matches!(run.reconciler.admit(request("a", 2), true).await, Ok(Answer::Dry(dry)) if dry.admitted)
    );
    run.end();
}

#[tokio::test]
async fn declared_guarantees_hold_from_the_start_and_are_tried_again() {
    let rules = r#"{"guarantees": [
        {"cgroup": "/batch/*", "cpus": 3, "memory": "1Gi"},
        {"unit": "db*.service", "cpus": 1, "memory": "64Mi", "policy": "single-numa-node"}
    ]}"#;
    let bench = Bench::new(&["batch", "batch/a", "system.slice"]);
    let run = Run::start(&bench, rules);
    assert_eq!(bench.cpus(["batch", "batch/a"]), ["", "1-3"]);
    let held = run.reconciler.allocations().allocations.clone();
    assert_eq!((held[0].name.as_str(), held[0].declared.as_deref()), ("batch/a", Some("/batch/*")));

    bench.appear("batch/b");
    bench.appear("batch/b/deeper");
    bench.appear("system.slice/db@1.service");
    run.until("they hold theirs", |view| (view.allocations.len() == 3).then_some(()));
    assert_eq!(bench.cpus(["batch/b", "batch/b/deeper", "system.slice/db@1.service"]), ["4-6", "", "7"]);

    // One that does not fit waits until it does.
    bench.appear("batch/c");
    let waiting = run.until("it waits", |view| view.waiting.first().cloned());
    assert_eq!((waiting.cgroup.as_str(), waiting.declared.as_str()), ("/batch/c", "/batch/*"));
    assert!(waiting.rejection.is_some() && waiting.reason.contains("cpu requested 3"), "{waiting:?}");
    let told = format!("{:?}", bench.host.happened.lock().unwrap());
    assert!(
        told.contains("GuaranteeRefused") && told.contains("/batch/c: the guarantee declared for"),
        "{told}"
    );
    let refused = run.reconciler.release("batch/a".to_owned()).await.unwrap_err();
    assert!(
        matches!(&refused, AdmissionError::Conflict(error) if error.problem.contains("/batch/*")),
        "{refused}"
    );
    fs::remove_dir_all(bench.dir.path().join("cgroup/batch/a")).unwrap();
    bench.tell("batch/a", CgroupEvent::Removed);
    run.until("it is given", |view| view.allocations.iter().any(|held| held.name == "batch/c").then_some(()));
    assert_eq!(bench.cpus(["batch/c"]), ["1-3"]);
    run.until("nobody waits", |view| view.waiting.is_empty().then_some(()));

    // What was asked for is in the way, and is not refused.
    run.end();
    let run = Run::start(&bench, r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 2, "memory": "1Gi"}]}"#);
    let held = bench.cpus(["batch/b", "batch/c", "system.slice/db@1.service"]);
    assert_eq!(held, ["4-5", "1-2", ""], "each keeps two of its CPUs");
    run.end();
    let run = Run::start(&bench, "{}");
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["", ""]);
    admit(&run.reconciler, "batch/b", 1).await.unwrap();
    run.end();
    let run = Run::start(&bench, r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 2, "memory": "1Gi"}]}"#);
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["1", "2-3"]);
    assert_eq!(run.reconciler.allocations().waiting, []);
    run.reconciler.release("batch/b".to_owned()).await.unwrap();
    assert_eq!(bench.cpus(["batch/b", "batch/c"]), ["4-5", "2-3"], "now as declared");
    run.end();
}

#[tokio::test]
async fn an_edited_rule_changes_what_is_held_before_others_are_given_anything() {
    let bench = Bench::new(&["z"]);
    let rules = |z: &str, rest: &str| format!(r#"{{"guarantees": [{{{z}, "memory": "1Gi"}}{rest}]}}"#);
    let a = r#", {"cgroup": "/a", "cpus": 6, "memory": "1Gi"}"#;
    let run = Run::start(&bench, &rules(r#""cgroup": "/z", "cpus": 2"#, a));
    assert_eq!(bench.cpus(["z"]), ["1-2"]);
    bench.appear("a");
    run.until("it waits", |view| (view.waiting.len() == 1).then_some(()));
    run.end();
    // Another pattern and more CPUs: it keeps those that it has.
    let run = Run::start(&bench, &rules(r#""cgroup": "/z*", "cpus": 3"#, a));
    assert_eq!(bench.cpus(["z", "a"]), ["1-3", ""]);
    let view = run.reconciler.allocations();
    assert_eq!(view.allocations[0].declared.as_deref(), Some("/z*"));
    assert_eq!(view.waiting.len(), 1);
    run.end();
    // Another placement: it is decided anew.
    let placement = r#""placement": {"preferredNodes": "1"}"#;
    let run = Run::start(&bench, &rules(&format!(r#""cgroup": "/z", "cpus": 3, {placement}"#), a));
    assert_eq!(bench.cpus(["z", "a"]), ["4-6", ""]);
    run.end();
}

#[tokio::test]
async fn a_rule_that_cannot_be_followed_leaves_what_is_held_until_it_can() {
    let bench = Bench::new(&["y", "z"]);
    let rules = |z: &str| {
        let y = r#"{"cgroup": "/y", "cpus": 4, "memory": "1Gi"}"#;
        format!(r#"{{"guarantees": [{y}, {{"cgroup": "/z", {z}, "memory": "1Gi"}}]}}"#)
    };
    let run = Run::start(&bench, &rules(r#""cpus": 3"#));
    assert_eq!(bench.cpus(["y", "z"]), ["4-7", "1-3"]);
    run.end();
    for z in [r#""cpus": 4"#, r#""cpus": 4, "policy": "single-numa-node""#] {
        let run = Run::start(&bench, &rules(z));
        assert_eq!(bench.cpus(["y", "z"]), ["4-7", "1-3"], "{z}");
        let waiting = run.reconciler.allocations().waiting.clone();
        assert_eq!(waiting.len(), 1, "{waiting:?}");
        assert!(
            waiting[0].cgroup == "/z" && waiting[0].reason.contains("it keeps what it holds"),
            "{waiting:?}"
        );
        run.end();
    }
    let run = Run::start(&bench, &rules(r#""cpus": 4"#));
    fs::remove_dir_all(bench.dir.path().join("cgroup/y")).unwrap();
    bench.tell("y", CgroupEvent::Removed);
    run.until("it has four", |view| view.waiting.is_empty().then_some(()));
    assert_eq!(bench.cpus(["z"]), ["4-7"], "its node has no more than three");
    run.end();
}

#[tokio::test]
async fn a_partition_is_asked_for_and_read_back() {
    let bench = Bench::new(&["a", "a/b"]);
    for cgroup in ["a", "a/b"] {
        bench.put(&format!("{cgroup}/cpuset.cpus.partition"), "member");
        bench.put(&format!("{cgroup}/cpuset.cpus.exclusive"), "");
    }
    let run = Run::start(&bench, "{}");
    let asked = |cgroup: &str| Request {
        partition: numaward_cgroup::knob::Partition::Isolated,
        ..request(cgroup, 2)
    };
    // Without cpuset.cpus.exclusive, only a child of a partition can be one, and the root is the only one here.
    let refused = run.reconciler.admit(asked("a/b"), false).await.unwrap_err();
    assert!(refused.to_string().contains("need Linux 6.7"), "{refused}");
    assert_eq!(bench.cpus(["a/b"]), [""]);
    let Ok(Answer::Admitted(held)) = run.reconciler.admit(asked("a"), false).await else { panic!("refused") };
    assert_eq!(held.settings["cpuset.cpus.partition"], "isolated");
    assert_eq!(bench.knob("a/cpuset.cpus.partition"), "isolated");
    run.reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(bench.knob("a/cpuset.cpus.partition"), "member");
    run.end();
}

/// News that come faster than they are handled are lost at some point; then all cgroups are looked at.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_of_a_flood_of_cgroups_is_found() {
    let bench = Bench::new(&["a", "batch"]);
    let declared = r#"{"guarantees": [{"cgroup": "/batch/*", "cpus": 1, "memory": "1Gi"}]}"#;
    let run = Run::start(&bench, declared);
    // It waits in here, with what is promised to the first.
    let assigned = bench.host.assigned.lock().unwrap();
    let asking = run.reconciler.clone();
    let asked = tokio::spawn(async move { admit(&asking, "a", 1).await });
    let flood: Vec<_> = (0..10_000)
        .map(|id| Cgroup {
            id: numaward_cgroup::CgroupId(id + 1_000_000),
            path: format!("/user/{id}").parse().unwrap(),
        })
        .map(CgroupEvent::Added)
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    {
        let told = bench.host.cgroup_listener.lock().unwrap();
        let tell = told.as_ref().unwrap();
        (0..10).for_each(|_| assert!(tell(&flood)));
    }
    bench.appear("batch/b");
    drop(assigned);
    run.until("what was lost is found", |view| {
        view.allocations.iter().find(|of| of.name == "batch/b").cloned()
    });
    asked.await.unwrap().unwrap();
    run.end();
}

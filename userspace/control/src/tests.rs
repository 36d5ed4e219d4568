//! Tests of the reconciler on a hierarchy of plain files.

mod claims;
mod controllers;
mod cpu_isolation;
mod liveness;
mod resize;
mod two_daemons;
mod unfit;

use std::{fs, path::Path, sync::Arc, thread::JoinHandle};

use numaward_api as api;
use numaward_config::policy::StrategyKind;
use numaward_guarantee::{
    command::AdmissionOutcome,
    error::AdmissionError,
    request::{Request, Resize},
    state::State,
};
use numaward_model::port::ObservedHost as _;
use numaward_store::{LoadedLedger, Store};
use numaward_tests_support::skip_outside_ci;
use numaward_topology::{Bytes, Machine};

use super::*;
use crate::{testing as fixture, testing::TestHost};

/// A machine and a cgroup hierarchy in a temporary directory, in which a test starts the reconciler.
struct DaemonBench {
    dir: tempfile::TempDir,
    host: Arc<TestHost>,
}

impl DaemonBench {
    fn new(cgroups: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bench = Self { dir, host: Arc::new(TestHost::small()) };
        bench.cgroup("");
        for cgroup in cgroups {
            bench.cgroup(cgroup);
        }
        bench
    }

    fn cgroup(&self, path: &str) {
        fixture::cgroup(&self.dir.path().join("cgroup").join(path), &self.host.machine());
    }

    fn knob(&self, path: &str) -> String {
        fixture::line(&self.dir.path().join("cgroup").join(path))
    }

    fn start(&self) -> (ReconcilerHandle, JoinHandle<()>, CancellationToken) {
        self.start_with(Config::default())
    }

    fn start_with(&self, config: Config) -> (ReconcilerHandle, JoinHandle<()>, CancellationToken) {
        let config = Config { state_directory: self.dir.path().join("state"), ..config };
        let root = self.dir.path().join("cgroup");
        // Plain files are watched like knobs. Without the privilege, they are polled.
        fixture::reconciler(&config, &root, Ports::new(self.host.clone()), KnobWatch::new(&root).ok(), None)
    }
}

fn until(what: &str, holds: &dyn Fn() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < std::time::Duration::from_mins(1), "{what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn request(cgroup: &str, cpus: u32) -> Request {
    Request::new(&api::AllocationRequest {
        cpus: Some(api::Cpus::whole(cpus)),
        ..api::AllocationRequest::new(cgroup, api::Target::Cgroup(format!("/{cgroup}")), "1Gi")
    })
    .unwrap()
}

async fn admit(
    reconciler: &ReconcilerHandle,
    cgroup: &str,
    cpus: u32,
) -> Result<api::Allocation, AdmissionError> {
    match reconciler.admit(request(cgroup, cpus), false).await? {
        AdmissionOutcome::Admitted(allocation) => Ok(allocation),
        AdmissionOutcome::Dry(dry) => panic!("{dry:?}"),
    }
}

/// The explanation has the candidates, and a refusal has nodes and amounts. A restart with the strategy `kubelet` keeps the
/// guarantees.
#[tokio::test]
async fn native_strategy_explains_decisions() {
    let bench = DaemonBench::new(&["a", "b", "c"]);
    let native = Config { strategy: StrategyKind::Native, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(native);
    let a = admit(&reconciler, "a", 3).await.unwrap();
    assert_eq!((a.cpus.as_str(), a.nodes.as_str()), ("1-3", "0"));
    assert_eq!((bench.knob("a/cpuset.cpus").as_str(), bench.knob("a/cpuset.mems").as_str()), ("1-3", "0"));
    let explanation = a.explanation.unwrap();
    let chosen = explanation.merges.iter().flat_map(|merge| &merge.candidates).next().unwrap();
    assert_eq!((chosen.nodes.as_str(), chosen.verdict.as_str()), ("0", "chosen"));
    admit(&reconciler, "b", 4).await.unwrap();
    let refused = admit(&reconciler, "c", 1).await.unwrap_err().to_string();
    assert!(refused.contains("node 0: cpu requested 1, free 0"), "{refused}");

    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start();
    let held = reconciler.allocations();
    let cpus: Vec<_> = held.allocations.iter().map(|held| (held.name.as_str(), held.cpus.as_str())).collect();
    assert_eq!(cpus, [("a", "1-3"), ("b", "4-7")]);
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(admit(&reconciler, "c", 1).await.unwrap().cpus, "1");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn restart_keeps_exclusive_cpus() {
    let bench = DaemonBench::new(&["a", "b", "c"]);
    let (reconciler, thread, stop) = bench.start();
    let (a, b) = tokio::join!(admit(&reconciler, "a", 3), admit(&reconciler, "b", 4));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_eq!((a.cpus.as_str(), a.nodes.as_str()), ("1-3", "0"));
    assert_eq!((b.cpus.as_str(), b.nodes.as_str()), ("4-7", "1"));
    assert_eq!((bench.knob("a/cpuset.cpus").as_str(), bench.knob("a/cpuset.mems").as_str()), ("1-3", "0"));
    assert_eq!(bench.knob("a/memory.min"), Bytes::gib(1).0.to_string());
    assert_eq!(bench.host.assigned.lock().unwrap().workloads().len(), 2);

    let refused = admit(&reconciler, "c", 1).await.unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("node 0: cpu requested 1, free 0"), "{text}");
    assert!(matches!(refused, AdmissionError::Rejected(..)));

    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start();
    let held = reconciler.allocations();
    let cpus: Vec<_> = held.allocations.iter().map(|held| (held.name.as_str(), held.cpus.as_str())).collect();
    assert_eq!(cpus, [("a", "1-3"), ("b", "4-7")]);
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!((bench.knob("a/memory.min").as_str(), bench.knob("a/memory.max").as_str()), ("0", "max"));
    assert_eq!(admit(&reconciler, "c", 1).await.unwrap().cpus, "1");
    assert!(matches!(reconciler.release("a".to_owned()).await, Err(AdmissionError::Unknown(_))));
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn failed_admission_changes_nothing() {
    let bench = DaemonBench::new(&["a", "b", "b/c"]);
    // The ledger cannot be saved.
    let obstacle = bench.dir.path().join("state/ledger.journal.new");
    fs::create_dir_all(&obstacle).unwrap();
    let (reconciler, thread, stop) = bench.start();
    let error = admit(&reconciler, "b", 1).await.unwrap_err();
    assert!(matches!(error, AdmissionError::Store(_)), "{error}");
    assert_eq!((bench.knob("b/cpuset.cpus").as_str(), reconciler.allocations().allocations.len()), ("", 0));
    fs::remove_dir(&obstacle).unwrap();

    // A knob cannot be written.
    fs::remove_file(bench.dir.path().join("cgroup/a/memory.max")).unwrap();
    let error = admit(&reconciler, "a", 1).await.unwrap_err();
    assert!(error.to_string().contains("memory.max"), "{error}");
    assert_eq!(reconciler.allocations().allocations, []);
    assert_eq!((bench.knob("a/cpuset.cpus").as_str(), bench.knob("a/memory.min").as_str()), ("", "0"));

    // The name or the cgroup conflicts with a guarantee, the cgroup does not exist, or its memory use exceeds the request.
    admit(&reconciler, "b", 1).await.unwrap();
    for (cgroup, field) in [("b", "name"), ("b/c", "target")] {
        let error = admit(&reconciler, cgroup, 1).await.unwrap_err();
        assert!(
            matches!(&error, AdmissionError::Conflict(error) if error.field == field),
            "{cgroup}: {error}"
        );
    }
    let error = admit(&reconciler, "nowhere", 1).await.unwrap_err();
    assert!(matches!(&error, AdmissionError::Field(error) if error.field == "target.cgroup"), "{error}");
    fs::write(bench.dir.path().join("cgroup/a/memory.current"), "99999999999\n").unwrap();
    let error = admit(&reconciler, "a", 1).await.unwrap_err();
    assert!(matches!(&error, AdmissionError::Field(error) if error.field == "memory"), "{error}");

    // A dry run changes nothing.
    bench.cgroup("d");
    let Ok(AdmissionOutcome::Dry(dry)) = reconciler.admit(request("d", 1), true).await else {
        panic!("no dry run")
    };
    assert!(dry.admitted && dry.explanation.merges.len() == 1);
    assert_eq!(reconciler.allocations().allocations.len(), 1);
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn cgroup_of_commands_is_recreated() {
    let bench = DaemonBench::new(&[]);
    let (reconciler, thread, stop) = bench.start();
    let request = api::AllocationRequest::new("command", api::Target::Exec, "64Mi");
    let error = reconciler.admit(Request::new(&request).unwrap(), false).await.unwrap_err();
    // A plain directory has no knobs.
    assert!(matches!(error, AdmissionError::Enforce(_)), "{error}");
    assert!(bench.dir.path().join("cgroup/numaward").is_dir());
    stop.cancel();
    thread.join().unwrap();
}

/// A second writer of memory protection named `kubelet` wins after one repair.
#[tokio::test]
async fn yields_memory_min_to_kubelet() {
    let bench = DaemonBench::new(&["kubepods"]);
    if KnobWatch::new(bench.dir.path()).is_err() {
        return skip_outside_ci("writes to knobs are reported only with CAP_SYS_ADMIN");
    }
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "kubepods", 1).await.unwrap();
    let knob = bench.dir.path().join("cgroup/kubepods/memory.min");
    let protected = (1_u64 << 30).to_string();
    assert_eq!(bench.knob("kubepods/memory.min"), protected);
    // The kernel names the process after the file that was executed.
    let kubelet = bench.dir.path().join("kubelet");
    std::os::unix::fs::symlink("/bin/sh", &kubelet).unwrap();
    let script = "while [ -e \"$0\" ]; do read -r has <\"$0\"; [ \"$has\" = 4096 ] || echo 4096 >\"$0\"; sleep 0.3; done";
    let mut kubelet = std::process::Command::new(kubelet).arg("-c").arg(script).arg(&knob).spawn().unwrap();
    let drift = || reconciler.allocations().allocations[0].drift.clone();
    until("the knob is left", &|| drift().iter().any(|drift| drift.state == api::DriftState::Left));
    std::thread::sleep(std::time::Duration::from_secs(2));
    kubelet.kill().unwrap();
    kubelet.wait().unwrap();
    assert_eq!(bench.knob("kubepods/memory.min"), "4096", "its value is kept");
    // The sets that are effective are no files of a kernel here, so they drift, too.
    let left = drift().into_iter().find(|drift| drift.knob == "memory.min").unwrap();
    assert_eq!((left.state, left.count), (api::DriftState::Left, 1), "one repair: {left:?}");
    assert_eq!(left.writer.and_then(|by| by.command).as_deref(), Some("kubelet"));
    let reported = format!("{:?}", bench.host.happened.lock().unwrap());
    assert!(reported.contains("Memory QoS") && !reported.contains("Critical"), "{reported}");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn repairs_drift_and_releases_vanished() {
    let bench = DaemonBench::new(&["a", "b"]);
    let is_watched = KnobWatch::new(bench.dir.path()).is_ok();
    if !is_watched {
        skip_outside_ci("in part: writes to knobs are reported only with CAP_SYS_ADMIN");
    }
    let (reconciler, thread, stop) = bench.start();
    for cgroup in ["a", "b"] {
        let held = admit(&reconciler, cgroup, 1).await.unwrap();
        // The kernel writes these files.
        let dir = bench.dir.path().join("cgroup").join(cgroup);
        fs::write(dir.join("cpuset.cpus.effective"), &held.cpus).unwrap();
        fs::write(dir.join("cpuset.mems.effective"), &held.nodes).unwrap();
    }
    let knob: &Path = &bench.dir.path().join("cgroup/b/cpuset.cpus");
    fs::write(knob, "0-7\n").unwrap();
    until("the drift is repaired", &|| bench.knob("b/cpuset.cpus") == "2");
    let drift = |name: &str| {
        let held = reconciler.allocations();
        held.allocations
            .iter()
            .find(|held| held.name == name)
            .map(|held| held.drift.clone())
            .unwrap_or_default()
    };
    until("the drift is reported", &|| {
        drift("b").iter().any(|drift| drift.state == api::DriftState::Repaired)
    });
    let reported = drift("b");
    // The kernel does not report writes of this process.
    assert_eq!((reported.len(), reported[0].count, reported[0].noticed), (1, 1, api::DriftDetection::Check));
    assert_eq!((reported[0].found.as_deref(), reported[0].writer.clone()), (Some("0-7"), None));
    assert_eq!(drift("a"), []);

    // Another program rewrites the knob repeatedly.
    let script = "while [ -e \"$0\" ]; do echo 0-7 >\"$0\"; sleep 0.1; done";
    let mut other = std::process::Command::new("sh").arg("-c").arg(script).arg(knob).spawn().unwrap();
    until("the knob is repaired more than once", &|| drift("b").iter().any(|drift| drift.count > 2));
    // A check may precede the kernel's report. Then the writer is unknown until the next write.
    let writer = || drift("b")[0].writer.clone().map(|by| (by.pid, by.command));
    until("the writer is known", &|| !is_watched || writer().is_some());
    let by = writer();
    other.kill().unwrap();
    other.wait().unwrap();
    until("the last drift is repaired", &|| {
        bench.knob("b/cpuset.cpus") == "2" && drift("b")[0].state == api::DriftState::Repaired
    });
    if is_watched {
        assert_eq!(by, Some((other.id(), Some("sh".to_owned()))));
    }
    fs::remove_dir_all(bench.dir.path().join("cgroup/a")).unwrap();
    until("the allocation is released", &|| reconciler.allocations().allocations.len() == 1);
    stop.cancel();
    thread.join().unwrap();
}

/// Damages files of the state directory. The daemon keeps them under other names.
fn damage(bench: &DaemonBench, files: &[&str]) {
    for file in files {
        fs::write(bench.dir.path().join("state").join(file), "{ damaged").unwrap();
    }
}

fn held(reconciler: &ReconcilerHandle) -> Vec<(String, String, String)> {
    let held = reconciler.allocations();
    let rows = held.allocations.iter();
    rows.map(|held| (held.name.clone(), held.cpus.clone(), held.nodes.clone())).collect()
}

#[tokio::test]
async fn damaged_ledger_is_rebuilt() {
    let bench = DaemonBench::new(&["a", "b", "c", "d"]);
    let (reconciler, thread, stop) = bench.start();
    for (cgroup, cpus) in [("a", 2), ("b", 4), ("c", 1)] {
        admit(&reconciler, cgroup, cpus).await.unwrap();
    }
    let allocations = reconciler.allocations();
    reconciler.release("c".to_owned()).await.unwrap();
    let before = held(&reconciler);
    stop.cancel();
    thread.join().unwrap();
    let knobs = |cgroup: &str| {
        ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.max"]
            .map(|knob| bench.knob(&format!("{cgroup}/{knob}")))
    };
    let knobs_before = [knobs("a"), knobs("b"), knobs("c")];

    // The last ledger is damaged, both are, and all files are removed.
    let files: [&[&str]; 3] = [&["ledger.json"], &["ledger.json", "ledger.json.1"], &[]];
    for (round, damaged) in files.into_iter().enumerate() {
        damage(&bench, damaged);
        if damaged.is_empty() {
            for file in fs::read_dir(bench.dir.path().join("state")).unwrap() {
                fs::remove_file(file.unwrap().path()).unwrap();
            }
        }
        let (reconciler, thread, stop) = bench.start();
        assert_eq!(held(&reconciler), before, "round {round}");
        assert_eq!([knobs("a"), knobs("b"), knobs("c")], knobs_before, "round {round}");
        let found = reconciler.allocations();
        for (now, then) in found.allocations.iter().zip(&allocations.allocations) {
            assert_eq!((&now.settings, &now.memory), (&then.settings, &then.memory), "round {round}");
        }
        // Of the four CPUs of node 0, one is reserved for the system and two are exclusive.
        let refused = admit(&reconciler, "d", 2).await.unwrap_err();
        assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");
        stop.cancel();
        thread.join().unwrap();
        let kept = fs::read_dir(bench.dir.path().join("state")).unwrap().flatten();
        let kept = kept.filter(|file| file.file_name().to_string_lossy().contains("damaged")).count();
        assert_eq!(kept, [1, 3, 0][round], "damaged files are kept");
    }

    // The originals are still known.
    let (reconciler, thread, stop) = bench.start();
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(knobs("a"), ["", "", "0", "max"].map(str::to_owned));
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn foreign_marks_are_not_adopted() {
    let bench = DaemonBench::new(&["a", "b"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 2).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
    let dir = |path: &str| bench.dir.path().join("cgroup").join(path);
    let marks = |path: &str| {
        let mut names = [0_u8; 1024];
        let length = rustix::fs::listxattr(dir(path), &mut names[..]).unwrap();
        let names = String::from_utf8(names[..length].to_vec()).unwrap();
        names
            .split('\0')
            .filter(|name| name.starts_with("user.numaward"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let [mark] = marks("a").try_into().unwrap();
    let mut text = vec![0_u8; 65_536];
    let length = rustix::fs::getxattr(dir("a"), mark.as_str(), &mut text[..]).unwrap();
    let text = String::from_utf8(text[..length].to_vec()).unwrap();
    let set = |path: &str, name: &str, text: &str| {
        rustix::fs::setxattr(dir(path), name, text.as_bytes(), rustix::fs::XattrFlags::empty()).unwrap();
    };
    // Forged marks: that of another cgroup, an invalid one, one of a removed cgroup, and a second one with the same CPUs.
    set("b", &mark, &text);
    let id = std::os::unix::fs::MetadataExt::ino(&fs::metadata(dir("b")).unwrap());
    let (own, other) = (mark.rsplit_once('.').unwrap().1, id.to_string());
    let forged = text.replace(own, &other).replace("\"/a\"", "\"/b\"").replace("\"a\"", "\"b\"");
    set("b", &format!("user.numaward.{other}"), &forged);
    set("b", "user.numaward.1", &text);
    set("b", "user.numaward.x", "{}");
    damage(&bench, &["ledger.json", "ledger.json.1"]);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler), [("a".to_owned(), "1-2".to_owned(), "0".to_owned())]);
    assert_eq!((marks("a").len(), marks("b").len()), (1, 0), "stale marks are removed");
    stop.cancel();
    thread.join().unwrap();

    // Marks on a directory of another user are not trusted.
    if !rustix::process::geteuid().is_root() {
        return skip_outside_ci("in part: only root can change the owner of a directory");
    }
    set("b", &format!("user.numaward.{other}"), &forged.replace("1-2", "3"));
    std::os::unix::fs::chown(dir("b"), Some(65_534), Some(65_534)).unwrap();
    damage(&bench, &["ledger.json", "ledger.json.1"]);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler).len(), 1);
    // The daemon's own mark for this cgroup is on the parent directory.
    admit(&reconciler, "b", 1).await.unwrap();
    assert_eq!((marks("b").len(), marks("").len()), (1, 1), "the forged mark is not even removed");
    stop.cancel();
    thread.join().unwrap();
    damage(&bench, &["ledger.json", "ledger.json.1"]);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler).len(), 2);
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn unmarked_command_is_rebuilt_from_knobs() {
    let bench = DaemonBench::new(&["numaward", "numaward/job", "numaward/idle", "d"]);
    for (knob, text) in [
        ("cpuset.cpus", "4-5"),
        ("cpuset.mems", "1"),
        ("memory.min", "1073741824"),
        ("memory.max", "1073741824"),
    ] {
        fs::write(bench.dir.path().join("cgroup/numaward/job").join(knob), text).unwrap();
    }
    fs::write(bench.dir.path().join("cgroup/numaward/memory.min"), "1073741824").unwrap();
    fs::create_dir_all(bench.dir.path().join("state")).unwrap();
    damage(&bench, &["ledger.json"]);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler), [("job".to_owned(), "4-5".to_owned(), "1".to_owned())]);
    let node = &reconciler.allocations().nodes[1];
    assert_eq!((node.free_cpus.as_str(), node.memory[0].guaranteed_bytes), ("6-7", 1 << 30));
    reconciler.release("job".to_owned()).await.unwrap();
    assert_eq!(bench.knob("numaward/memory.min"), "0");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn reports_missing_cpu_kind() {
    let bench = DaemonBench::new(&["a"]);
    let change = |isolated: &str| {
        let mut machine = Machine::clone(&bench.host.machine());
        machine.isolated_cpus = isolated.parse().unwrap();
        *bench.host.machine.lock().unwrap() = Arc::new(machine);
    };
    change("2-3");
    let native = Config { strategy: StrategyKind::Native, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(native.clone());
    let mut isolated = request("a", 2);
    isolated.terms.cpu_kinds = [api::CpuKind::Isolated].into();
    assert!(
        matches!(reconciler.admit(isolated, false).await.unwrap(), AdmissionOutcome::Admitted(held) if held.cpus == "2-3")
    );
    assert_eq!(reconciler.allocations().allocations[0].missing, None);

    // The host boots with another kernel command line, and then with the old one.
    stop.cancel();
    thread.join().unwrap();
    change("3");
    let (reconciler, thread, stop) = bench.start_with(native);
    let missing = || reconciler.allocations().allocations[0].missing.clone();
    let kind = api::MissingKind { kind: api::CpuKind::Isolated, cpus: "2".to_owned() };
    assert_eq!(missing().unwrap().kinds, [kind]);
    let happened = format!("{:?}", bench.host.happened.lock().unwrap());
    assert!(happened.contains("are missing: the kind isolated of CPUs 2"), "{happened}");
    assert_eq!(bench.knob("a/cpuset.cpus"), "2-3");
    change("2-3");
    until("nothing is missing", &|| missing().is_none());
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn shrunk_machine_reports_missing() {
    let bench = DaemonBench::new(&["a", "b", "c", "d"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 2).await.unwrap();
    admit(&reconciler, "b", 1).await.unwrap();
    let whole = bench.host.machine();
    let change = |machine: Machine| *bench.host.machine.lock().unwrap() = Arc::new(machine);
    let missing = |name: &str| {
        let held = reconciler.allocations();
        held.allocations.iter().find(|held| held.name == name).and_then(|held| held.missing.clone())
    };
    let count_reports = |words: &str| {
        let happened = bench.host.happened.lock().unwrap();
        happened
            .iter()
            .filter(|(cgroup, report)| cgroup.is_some() && format!("{report:?}").contains(words))
            .count()
    };
    // CPU 1 goes offline, and node 0 shrinks below the two gibibytes that are guaranteed on it.
    let mut smaller = Machine::clone(&whole);
    smaller.cpus.remove(&numaward_topology::CpuId(1));
    let node = smaller.nodes.get_mut(&numaward_topology::NodeId(0)).unwrap();
    node.cpus = "0,2-3".parse().unwrap();
    node.memory = Bytes::mib(1600);
    change(smaller);
    until("the missing resources are reported", &|| missing("a").is_some() && missing("b").is_some());
    assert_eq!((missing("a").unwrap().cpus, missing("b").unwrap().cpus), ("1".to_owned(), String::new()));
    assert_eq!(count_reports("Guaranteed resources of a are missing: CPUs 1"), 1);
    assert_eq!(missing("b").unwrap().memory.len(), 1);
    assert_eq!((held(&reconciler).len(), bench.knob("a/cpuset.cpus").as_str()), (2, "1-2"));
    let guarantees = bench.host.assigned.lock().unwrap().workloads().to_vec();
    let of_a = guarantees.iter().find(|guarantee| guarantee.cgroup.as_str() == "/a").unwrap();
    assert_eq!(of_a.offline_cpus.to_string(), "1");
    assert!(admit(&reconciler, "c", 1).await.is_ok_and(|held| held.nodes == "1"), "node 0 has nothing left");

    // Released resources cover the missing ones of "b" before they are guaranteed to "d".
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!(missing("b"), None);
    admit(&reconciler, "d", 1).await.unwrap();
    assert_eq!(reconciler.allocations().allocations.iter().find(|held| held.name == "d").unwrap().nodes, "1");
    reconciler.release("d".to_owned()).await.unwrap();

    // The machine is whole again.
    change(Machine::clone(&whole));
    until("node 0 has room again", &|| reconciler.allocations().nodes[0].free_cpus == "1-2");
    let reserved = Bytes::gib(4).0 / 20;
    assert_eq!(reconciler.allocations().nodes[0].memory[0].free_bytes, Bytes::gib(3).0 - reserved);
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn unfit_policy_refuses_requests() {
    let bench = DaemonBench::new(&["a", "b"]);
    let config = Config {
        reserved_system_cpus: Some(numaward_config::policy::CpuList("7".parse().unwrap())),
        ..Config::default()
    };
    let (reconciler, thread, stop) = bench.start_with(config);
    admit(&reconciler, "a", 2).await.unwrap();
    let whole = bench.host.machine();
    let mut smaller = Machine::clone(&whole);
    smaller.cpus.remove(&numaward_topology::CpuId(7));
    smaller.nodes.get_mut(&numaward_topology::NodeId(1)).unwrap().cpus = "4-6".parse().unwrap();
    *bench.host.machine.lock().unwrap() = Arc::new(smaller);
    let count_reports = || {
        let happened = bench.host.happened.lock().unwrap();
        happened.iter().filter(|(_, report)| format!("{report:?}").contains("policy")).count()
    };
    until("the unfit policy is reported", &|| count_reports() == 1);
    let refused = admit(&reconciler, "b", 1).await.unwrap_err();
    assert!(matches!(&refused, AdmissionError::Unfit(why) if why.contains('7')), "{refused}");
    assert_eq!(held(&reconciler).len(), 1);
    *bench.host.machine.lock().unwrap() = whole;
    until("the policy fits again", &|| count_reports() == 2);
    admit(&reconciler, "b", 1).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn begun_release_is_continued() {
    let bench = DaemonBench::new(&["a", "b"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 1).await.unwrap();
    admit(&reconciler, "b", 1).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    // The state after a crash right after the first save of a release.
    let (mut store, loaded) = Store::<State>::open(&bench.dir.path().join("state")).unwrap();
    let LoadedLedger::Current { ledger: mut state, .. } = loaded else { panic!("{loaded:?}") };
    state.releasing.insert("a".to_owned());
    store.save(&state).unwrap();
    drop(store);

    let (reconciler, thread, stop) = bench.start();
    let held = reconciler.allocations();
    let names: Vec<_> = held.allocations.iter().map(|held| held.name.as_str()).collect();
    assert_eq!(names, ["b"]);
    assert_eq!((bench.knob("a/memory.min").as_str(), bench.knob("a/memory.max").as_str()), ("0", "max"));
    assert_eq!(bench.knob("b/memory.min"), Bytes::gib(1).0.to_string());
    stop.cancel();
    thread.join().unwrap();
}

/// After a reboot, a different cgroup may have the path and the id of a known one.
#[tokio::test]
async fn cgroup_of_another_boot_is_distinct() {
    let bench = DaemonBench::new(&["a", "system.slice", "system.slice/nginx.service"]);
    let root = bench.dir.path().join("root");
    let boot_id = root.join("proc/sys/kernel/random/boot_id");
    fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
    let config = || Config { host_root: root.clone(), ..Config::default() };
    let held = |reconciler: &ReconcilerHandle| -> Vec<String> {
        reconciler.allocations().allocations.iter().map(|held| held.name.clone()).collect()
    };
    fs::write(&boot_id, "one\n").unwrap();
    let (reconciler, thread, stop) = bench.start_with(config());
    admit(&reconciler, "a", 1).await.unwrap();
    let unit = api::AllocationRequest::new("web", api::Target::Unit("nginx.service".to_owned()), "1Gi");
    reconciler.admit(Request::new(&unit).unwrap(), false).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    let (reconciler, thread, stop) = bench.start_with(config());
    assert_eq!(held(&reconciler), ["a", "web"]);
    stop.cancel();
    thread.join().unwrap();

    // Fresh cgroups, as after a reboot.
    for path in ["a", "system.slice", "system.slice/nginx.service"] {
        bench.cgroup(path);
    }
    fs::write(&boot_id, "two\n").unwrap();
    let (reconciler, thread, stop) = bench.start_with(config());
    until("the guarantee of the cgroup is released", &|| held(&reconciler) == ["web"]);
    until("the unit is guaranteed again", &|| {
        bench.knob("system.slice/nginx.service/memory.min") == "1073741824"
    });
    assert_eq!(bench.knob("a/memory.min"), "0", "the new cgroup has no guarantee");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn unit_is_a_system_unit() {
    const OF_A_USER: &str = "a.slice/user-1000.slice/user@1000.service/app.slice/nginx.service";
    let bench = DaemonBench::new(&["system.slice"]);
    let (reconciler, thread, stop) = bench.start();
    let unit = |name: &str| api::AllocationRequest {
        cpus: Some(api::Cpus::whole(1)),
        ..api::AllocationRequest::new("web", api::Target::Unit(name.to_owned()), "1Gi")
    };
    let new_request = || Request::new(&unit("nginx.service")).unwrap();
    // A walk of the hierarchy finds these cgroups first.
    for path in [OF_A_USER, "kubepods/nginx.service", "other.slice/nginx.service"] {
        let path = Path::new(path);
        let above: Vec<_> = path.ancestors().filter(|path| !path.as_os_str().is_empty()).collect();
        above.iter().rev().for_each(|path| bench.cgroup(path.to_str().unwrap()));
    }
    let refused = reconciler.admit(new_request(), false).await.unwrap_err();
    let AdmissionError::Field(error) = &refused else { panic!("{refused}") };
    assert_eq!(error.field, "target.unit");
    assert!(error.to_string().contains("no cgroup in /system.slice"), "{error}");

    bench.cgroup("system.slice/nginx.service");
    let Ok(AdmissionOutcome::Admitted(held)) = reconciler.admit(new_request(), false).await else {
        panic!("refused")
    };
    assert_eq!(held.cgroup, "/system.slice/nginx.service");
    stop.cancel();
    thread.join().unwrap();
}

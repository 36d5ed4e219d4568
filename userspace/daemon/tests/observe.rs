//! Tests of the observer's threads on a host of plain files: cgroups are created, read and removed.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{Counters, Workload};
use numaward_config::{Config, Interval};
use numaward_model::{
    health::{Heartbeats, Readiness},
    snapshot::SnapshotSource,
};
use numaward_observe::{CgroupSource, Latches, Observer, spawn};
use tokio_util::sync::CancellationToken;

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn cgroup(root: &Path, path: &str, anon: [u64; 2], oom_kills: u64) {
    let dir = root.join(path);
    let zeros = "file N0=0 N1=0\nkernel_stack N0=16384 N1=0\n";
    write(&dir.join("memory.numa_stat"), &format!("anon N0={} N1={}\n{zeros}", anon[0], anon[1]));
    write(&dir.join("memory.events"), &format!("low 0\nhigh 0\nmax 0\noom 0\noom_kill {oom_kills}\n"));
    let line = "avg10=0.00 avg60=0.00 avg300=0.00 total";
    write(&dir.join("memory.pressure"), &format!("some {line}=1500000\nfull {line}=500000\n"));
}

/// Waits until `find` returns a value.
fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn follows_workloads_until_removed() {
    let host = tempfile::tempdir().unwrap();
    write(&host.path().join("sys/devices/system/cpu/online"), "0\n");
    write(&host.path().join("sys/devices/system/node/online"), "0-1\n");
    for (node, cpus) in [(0, "0\n"), (1, "\n")] {
        let path = host.path().join(format!("sys/devices/system/node/node{node}"));
        write(&path.join("cpulist"), cpus);
        write(
            &path.join("meminfo"),
            &format!("Node {node} MemTotal: 1024 kB\nNode {node} MemFree: 512 kB\n"),
        );
    }
    let cgroups = tempfile::tempdir().unwrap();
    cgroup(cgroups.path(), "system.slice", [5 << 20, 0], 1);
    cgroup(cgroups.path(), "system.slice/a.service", [1 << 20, 2 << 20], 1);
    cgroup(cgroups.path(), "system.slice/a.service/deep", [1 << 20, 2 << 20], 1);

    let mut config = Config { host_root: host.path().to_owned(), ..Config::default() };
    config.probes = config.probes.all_off();
    config.observe.residency_interval = Interval(Duration::from_millis(50));
    config.observe.keep_removed = Interval(Duration::from_millis(1500));
    let observer = Arc::new(Observer::new(&config));
    let (mut readiness, heartbeats, stop) =
        (Readiness::default(), Heartbeats::default(), CancellationToken::new());
    let latches = Latches::new(&mut readiness);
    let source = CgroupSource::Directory(cgroups.path().into());
    let threads = spawn(&observer, source, latches, &heartbeats, &stop).unwrap();

    wait_for("ready", || readiness.is_ready().then_some(()));
    let find = |name: &str| observer.workloads().workloads.into_iter().find(|w| w.workload == name);
    let read = |name: &str| find(name).filter(|workload: &Workload| workload.nodes[0].resident.is_some());
    let service = wait_for("the service's residency", || read("a.service"));
    assert_eq!((service.kind.as_str(), service.cgroup.as_deref()), ("unit", Some("/system.slice/a.service")));
    let resident: Vec<_> =
        service.nodes.iter().filter_map(|n| n.resident).map(|r| (r.anon_bytes, r.kernel_bytes)).collect();
    assert_eq!(resident, [(1 << 20, 16384), (2 << 20, 0)]);
    assert_eq!((service.counters, service.oom_kills), (Counters::None, Some(1)));
    assert_eq!(service.pressure.map(|p| (p.waiting_micros, p.stalled_micros)), Some((1_500_000, 500_000)));
    // The slice has the rest of the memory, and no figures that would count those of the service twice.
    let slice = wait_for("the slice's residency", || read("system.slice"));
    assert_eq!(slice.nodes[0].resident.map(|r| r.anon_bytes), Some(4 << 20));
    assert_eq!((slice.oom_kills, slice.pressure), (None, None));
    let names: Vec<_> = observer.workloads().workloads.into_iter().map(|w| w.workload).collect();
    assert_eq!(names, ["a.service", "system.slice"], "deeper cgroups fold into their workload");

    // The history stays after the removal: it has the nodes of the memory, and no figures without a probe.
    let past = wait_for("a step of the history", || {
        let past = observer.workload_history("/system.slice/a.service")?;
        (!past.recent.resident_bytes.is_empty()).then_some(past)
    });
    assert_eq!(past.recent.resident_bytes[0], Some((3 << 20) + 16384));
    assert_eq!((past.recent.step_seconds, past.recent.local_bytes_per_second[0]), (5, None));
    let host = observer.history();
    assert_eq!((host.kept, host.dropped), (2, 0));
    assert_eq!(host.recent.nodes[1].free_bytes[0], Some(512 << 10));
    assert!(host.recent.end_millis >= 5000);

    cgroup(cgroups.path(), "batch", [0, 0], 0);
    cgroup(cgroups.path(), "batch/job", [0, 0], 0);
    wait_for("the new workload", || find("batch"));
    fs::remove_dir_all(cgroups.path().join("system.slice/a.service")).unwrap();
    let gone = wait_for("the removal", || {
        find("a.service").filter(|w| w.counters == Counters::Removed || w.cgroup.is_none())
    });
    assert_eq!(gone.oom_kills, Some(1), "the last figures stay");
    let figures = observer.snapshot();
    let gone = figures.workloads.iter().find(|w| &*w.name == "a.service").unwrap();
    assert!(gone.resident.is_none() && gone.oom_kills == Some(1), "{gone:?}");
    wait_for("the end of its series", || find("a.service").is_none().then_some(()));
    assert!(observer.workload_history("a.service").is_some(), "the history stays for an hour");
    // With plain files, a directory may be found before its files are written.
    wait_for("the end of all degradations", || observer.status().degraded.is_empty().then_some(()));
    assert!(heartbeats.late_thread().is_none());

    // An unreadable file is reported once, and the other files are read.
    fs::write(cgroups.path().join("batch/memory.numa_stat"), "anon N0=x\n").unwrap();
    // With plain files, the file may be read before it is written.
    let is_line = |reason: &str| reason.contains("batch/memory.numa_stat:1");
    let fault = || observer.status().degraded.pop().filter(|degraded| is_line(&degraded.reason));
    assert_eq!(wait_for("the fault", fault).part, "residency");
    cgroup(cgroups.path(), "batch", [0, 0], 0);
    wait_for("the recovery", || observer.status().degraded.is_empty().then_some(()));

    stop.cancel();
    for thread in threads {
        thread.thread().unpark();
        thread.join().unwrap();
    }
}

#[test]
fn is_ready_without_cgroups() {
    let host = tempfile::tempdir().unwrap();
    let mut config = Config { host_root: host.path().to_owned(), ..Config::default() };
    config.probes = config.probes.all_off();
    let observer = Arc::new(Observer::new(&config));
    let (mut readiness, stop) = (Readiness::default(), CancellationToken::new());
    let latches = Latches::new(&mut readiness);
    // The directory is not a cgroup file system.
    let source = CgroupSource::Mount(host.path().into());
    let threads = spawn(&observer, source, latches, &Heartbeats::default(), &stop).unwrap();
    wait_for("ready", || readiness.is_ready().then_some(()));
    let degraded = observer.status().degraded;
    let reason = &degraded.iter().find(|degraded| degraded.part == "cgroups").unwrap().reason;
    assert!(reason.contains("cgroup v2") && reason.contains("boot with"), "{reason}");
    stop.cancel();
    for thread in threads {
        thread.thread().unpark();
        thread.join().unwrap();
    }
}

/// A host with the state files of Docker and Podman.
struct ContainerHost {
    root: tempfile::TempDir,
    cgroups: tempfile::TempDir,
}

impl ContainerHost {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap(), cgroups: tempfile::tempdir().unwrap() }
    }

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn state_file(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        write(&path, text);
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    }

    fn docker(&self, digit: char, name: &str) {
        let id = Self::id(digit);
        let text =
            format!(r#"{{"State":{{}},"ID":"{id}","Config":{{"Env":["Name=/no"]}},"Name":"/{name}"}}"#);
        self.state_file(&format!("var/lib/docker/containers/{id}/config.v2.json"), &text);
    }

    fn podman(&self, file: &str, digit: char, name: &str) {
        let id = Self::id(digit);
        let text = format!(r#"[{{"id":"{id}","names":["{name}"],"metadata":"{{\"name\":\"no\"}}"}}]"#);
        self.state_file(&format!("var/lib/containers/storage/overlay-containers/{file}"), &text);
    }

    fn cgroup(&self, path: &str, digit: char) -> PathBuf {
        let path = path.replace("{ID}", &Self::id(digit));
        cgroup(self.cgroups.path(), &path, [0, 0], 0);
        self.cgroups.path().join(path)
    }
}

#[test]
fn names_containers_of_docker_and_podman() {
    let host = ContainerHost::new();
    let web = host.cgroup("system.slice/docker-{ID}.scope", 'a');
    host.cgroup("system.slice/docker-{ID}.scope/init", 'a');
    host.docker('a', "web");
    host.cgroup("docker/{ID}", 'b');
    host.docker('b', "nginx.service");
    host.cgroup("docker/{ID}", 'c');
    host.cgroup("machine.slice/libpod-{ID}.scope/container", 'd');
    host.cgroup("machine.slice/libpod-conmon-{ID}.scope", 'd');
    host.podman("containers.json", 'd', "web");
    host.cgroup("libpod_parent/libpod-{ID}", 'e');
    host.podman("volatile-containers.json", 'e', "job");
    // Users create these cgroups: they get no name of a container of root.
    host.cgroup("user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", 'd');
    host.cgroup("batch/docker-{ID}.scope", 'a');

    let mut config = Config { host_root: host.root.path().to_owned(), ..Config::default() };
    config.probes = config.probes.all_off();
    config.observe.keep_removed = Interval(Duration::ZERO);
    let observer = Arc::new(Observer::new(&config));
    let (mut readiness, stop) = (Readiness::default(), CancellationToken::new());
    let latches = Latches::new(&mut readiness);
    let source = CgroupSource::Directory(host.cgroups.path().into());
    let threads = spawn(&observer, source, latches, &Heartbeats::default(), &stop).unwrap();
    wait_for("ready", || readiness.is_ready().then_some(()));
    let workloads = || {
        let workloads = observer.workloads().workloads;
        workloads.into_iter().filter(|w| w.cgroup.is_some()).map(|w| (w.workload, w.kind)).collect::<Vec<_>>()
    };
    let containers = || {
        let containers = workloads().into_iter().filter(|(_, kind)| kind == "container");
        containers.map(|(name, _)| name).collect::<Vec<_>>()
    };
    let expected =
        ["docker", "docker/cccccccccccc", "docker/nginx.service", "docker/web", "podman/job", "podman/web"];
    wait_for("the containers", || (containers() == expected).then_some(()));
    let others = workloads().into_iter().filter(|(_, kind)| kind != "container").map(|(name, _)| name);
    let expected = [
        "batch",
        "docker",
        "libpod-conmon-*.scope",
        "libpod_parent",
        "machine.slice",
        "system.slice",
        "user.slice",
        "user@1000.service",
    ];
    assert_eq!(others.collect::<Vec<_>>(), expected);

    // A name is read when the container starts, and not again.
    host.docker('a', "shop");
    host.cgroup("system.slice/docker-{ID}.scope", '1');
    wait_for("another container", || containers().contains(&"docker/111111111111".to_owned()).then_some(()));
    assert!(containers().contains(&"docker/web".to_owned()));
    fs::remove_dir_all(web).unwrap();
    wait_for("the end", || (!containers().contains(&"docker/web".to_owned())).then_some(()));
    host.cgroup("system.slice/docker-{ID}.scope", 'a');
    wait_for("the new name", || containers().contains(&"docker/shop".to_owned()).then_some(()));

    stop.cancel();
    for thread in threads {
        thread.thread().unpark();
        thread.join().unwrap();
    }
}

//! Faults of pods, the runtime, the API server and systemd: each has a defined outcome and a message, and a metric if it can recur.
//! `numaward_kube` tests the faults of the connection itself (garbage, silence, other versions).

use numaward_kube::nri::{EventMask, RuntimeInfo, Status};
use numaward_observe::Observer;
use tokio::sync::watch;

use super::super::note_runtime;
use super::*;

/// Returns the notes in the explanation of the only guarantee.
fn notes(daemon: &NriDaemon) -> Vec<String> {
    let held = daemon.reconciler.allocations();
    let [held] = held.allocations.as_slice() else { panic!("{held:?}") };
    held.explanation.clone().unwrap().notes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_annotations_are_reported() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let wrong = [
        ("numaward.io/placement", "never"),
        ("numaward.io/prefered-nodes", "1"),
        ("db.numaward.io/preferred-nodes", "one"),
        ("numaward.io/topology-policy", "single"),
    ];
    let pod = bench.pod("db", "", &wrong).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!((bench.cpus(&db).len(), bench.mems(&db).as_str()), (2, "0"));
    let notes = notes(&daemon);
    for words in [
        "numaward.io/placement: \"never\" is ignored (expected auto, shared or off)",
        "numaward.io/prefered-nodes: \"1\" is ignored",
        "db.numaward.io/preferred-nodes: \"one\" is ignored (expected a list of nodes",
        "numaward.io/topology-policy: \"single\" is ignored (expected none, best-effort",
    ] {
        assert!(notes.iter().any(|note| note.contains(words)), "{words}: {notes:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn yields_to_other_plugin() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let pinned =
        |name: &str| ContainerSpec { cpus: "40-41".to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
    let foreign = pinned("foreign");
    bench.run(&foreign).await.unwrap();
    assert_eq!(bench.cpus(&foreign), "40-41".parse().unwrap());
    assert_eq!(daemon.figures.unpinned_for("pinned_by_other"), 1);
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    daemon.stop(&bench.runtime).await;

    bench.config.kubernetes.nri.when_pinned = numaward_config::kubernetes::PinnedPolicy::Override;
    let daemon = bench.start().await;
    let own = pinned("own");
    bench.run(&own).await.unwrap();
    let held = daemon.reconciler.allocations();
    assert!(held.allocations.iter().any(|held| held.name.ends_with("/own")), "{held:?}");
    assert_eq!(bench.mems(&own), "0");
    assert_eq!(daemon.figures.unpinned_for("pinned_by_other"), 0);
}

/// Returns the CPUs that the runtime writes for a container.
fn runtime_cpus(bench: &NriBench, spec: &ContainerSpec) -> CpuSet {
    bench.runtime.container(&spec.id).unwrap().resources.cpus.unwrap()
}

/// Starts a container that has ended: the runtime writes the settings that it knows.
async fn start_again(bench: &NriBench, spec: &ContainerSpec) {
    let cpus = runtime_cpus(bench, spec);
    let knob = bench.dir.path().join("cgroup").join(path_of(spec)).join("cpuset.cpus");
    fs::write(knob, format!("{cpus}\n")).unwrap();
    bench.runtime.start_container(&spec.id).await.unwrap();
}

/// The runtime reports a container that has ended with the CPUs of its previous guarantee, which another workload may have by now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adopts_container_started_again() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let web = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let web = container(&web, "web", 4, Bytes(0));
    let db = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&db, "db", 2, Bytes::gib(1));
    for spec in [&web, &db] {
        bench.run(spec).await.unwrap();
        bench.runtime.stop_container(&spec.id).await.unwrap();
    }
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    let other = bench.pod("other", "", &[]).await.unwrap();
    let other = container(&other, "db", 2, Bytes::gib(1));
    bench.run(&other).await.unwrap();
    assert_eq!(bench.cpus(&other), runtime_cpus(&bench, &db), "the other workload has the released CPUs");
    for spec in [&web, &db] {
        start_again(&bench, spec).await;
    }
    let check = || {
        assert_eq!((bench.cpus(&other), bench.cpus(&db)), ("1-2".parse().unwrap(), "3-4".parse().unwrap()));
        assert_eq!(bench.cpus(&web), "0,5-63".parse().unwrap());
    };
    check();
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 2);
    bench.await_update(&db).await;

    // The container was placed before a restart of the daemon, and ends after it.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("all have guarantees", || daemon.reconciler.allocations().allocations.len() == 2).await;
    bench.runtime.stop_container(&db.id).await.unwrap();
    assert_eq!(bench.cpus(&db), CpuSet::new(), "the value without numaward is not that of an earlier start");
    bench.runtime.stop_container(&web.id).await.unwrap();
    for spec in [&web, &db] {
        start_again(&bench, spec).await;
    }
    check();
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 2);

    // A container that another plugin has pinned stays as it is.
    let foreign = ContainerSpec {
        cpus: "40-41".to_owned(),
        ..container(&bench.spec("own", "", &[]), "own", 2, Bytes::gib(1))
    };
    bench.runtime.run_pod(&bench.spec("own", "", &[])).await.unwrap();
    bench.run(&foreign).await.unwrap();
    bench.runtime.stop_container(&foreign.id).await.unwrap();
    start_again(&bench, &foreign).await;
    assert_eq!(bench.cpus(&foreign), "40-41".parse().unwrap());
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn yields_to_running_pinned_container() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let pod = bench.spec("early", "", &[]);
    let running = |name: &str, cpus: &str| {
        let spec = ContainerSpec { cpus: cpus.to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        fs::write(bench.dir.path().join("cgroup").join(path_of(&spec)).join("cpuset.cpus"), cpus).unwrap();
        spec
    };
    let (foreign, wide) = (running("foreign", "40-41"), running("wide", "0-63"));
    let daemon = bench.start().await;
    until("the container that was not confined is pinned", || bench.cpus(&wide).len() == 2).await;
    let shared = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let shared = container(&shared, "web", 4, Bytes(0));
    bench.run(&shared).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    let check = || {
        assert_eq!(bench.cpus(&foreign), "40-41".parse().unwrap());
        let known_to_runtime = bench.runtime.container(&foreign.id).unwrap().resources;
        assert_eq!((known_to_runtime.cpus, known_to_runtime.mems), (Some("40-41".parse().unwrap()), None));
        assert_eq!([&db, &wide].map(|spec| bench.cpus(spec).len()), [2, 2]);
        assert_eq!(bench.cpus(&shared).len(), 60);
    };
    check();
    assert_eq!(daemon.figures.unpinned_for("away"), 1, "the container that was not confined");
    // After restarts of the runtime and the daemon, the daemon does not take its own settings for those of another plugin.
    bench.runtime.stop();
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    check();
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("all have guarantees", || daemon.reconciler.allocations().allocations.len() == 2).await;
    let late = container(&pod, "late", 2, Bytes::gib(1));
    bench.run(&late).await.unwrap();
    // On a busy machine, the answer may be late; the container is pinned afterwards then.
    until("the shared container is confined", || bench.cpus(&shared).len() == 58).await;
    assert_eq!(bench.cpus(&foreign).len(), 2);

    // Without the ledger, a confined container cannot be distinguished from one that another plugin has pinned.
    daemon.stop(&bench.runtime).await;
    for file in fs::read_dir(&bench.config.state_directory).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() {
            fs::write(path, "damaged").unwrap();
        }
    }
    let daemon = bench.start().await;
    until("the daemon places the foreign container", || !bench.mems(&foreign).is_empty()).await;
    daemon.stop(&bench.runtime).await;

    bench.config.kubernetes.nri.when_pinned = numaward_config::kubernetes::PinnedPolicy::Override;
    let other = bench.spec("other", "", &[]);
    let other = ContainerSpec { cpus: "50-51".to_owned(), ..container(&other, "other", 3, Bytes::gib(1)) };
    bench.runtime.add_running(&bench.spec("other", "", &[]), &other);
    bench.cgroup(&path_of(&other));
    let _daemon = bench.start().await;
    until("the pinned container is placed", || bench.cpus(&other).len() == 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_burstable_is_not_unpinned() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let running = |uid: &str, class: &str| {
        let pod = bench.spec(uid, class, &[]);
        let spec = container(&pod, uid, 2, Bytes::gib(1));
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        spec
    };
    // The pod of the daemon itself is such a container.
    let (shared, db) = (running("numaward", "/burstable"), running("db", ""));
    let daemon = bench.start().await;
    until("the Guaranteed container is pinned", || bench.cpus(&db).len() == 2).await;
    until("the Burstable container is confined", || bench.cpus(&shared).len() == 62).await;
    assert_eq!(daemon.figures.unpinned_for("away"), 1, "the Guaranteed container");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_costs_one_connection() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    // A frame of 4 GiB, and one that is not the start of a message.
    for (lost, garbage) in [(1, [0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]), (2, *b"HTTP/1.1")] {
        bench.runtime.send_raw(PLUGIN, &garbage).await.unwrap();
        until("the plugin has connected again", || {
            daemon.figures.disconnects.get() == lost && daemon.figures.connected.get() == 1
        })
        .await;
        assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    }
    let next = container(&pod, "next", 2, Bytes::gib(1));
    bench.run(&next).await.unwrap();
    assert_eq!((bench.cpus(&db), bench.cpus(&next)), ("1-2".parse().unwrap(), "3-4".parse().unwrap()));
    assert_eq!(daemon.figures.unpinned_for("away"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_adoption_is_pinned_and_counted() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    bench.limit_times();
    bench.runtime.stop();
    let daemon = bench.start_unconnected();
    let pod = bench.spec("early", "", &[]);
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.runtime.add_running(&pod, &db);
    bench.cgroup(db.cgroups_path.trim_start_matches('/'));

    // The publication of the guarantees takes longer than the timeout of the runtime.
    let host = bench.host.clone();
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let (locked, is_locked) = std::sync::mpsc::channel();
    let slow = std::thread::spawn(move || {
        let guarantees = host.assigned.lock().unwrap();
        locked.send(()).unwrap();
        wait.recv().unwrap();
        drop(guarantees);
    });
    is_locked.recv().unwrap();
    bench.runtime.start();
    until("the runtime continues", || daemon.figures.connected.get() == 1).await;
    assert_eq!(daemon.figures.unpinned_for("away"), 0);
    go_on.send(()).unwrap();
    slow.join().unwrap();
    until("the container is counted", || daemon.figures.unpinned_for("away") == 1).await;
    until("the container is pinned", || bench.cpus(&db).len() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_runtime_with_nri() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    // No process listens on the socket: there is no runtime, or its NRI is off.
    bench.runtime.stop();
    let daemon = bench.start_unconnected();
    assert_eq!(daemon.figures.connected.get(), 0);
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    until("the connection is reported", || daemon.figures.connected.get() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_unreported_static_pod() {
    let known = Arc::new(FakePods::default());
    // The mirror pod of a static pod was refused: the API server is synced and never reports the pod.
    known.synced.store(true, Ordering::Relaxed);
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("static", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db).len(), 2);
    assert!(notes(&daemon).iter().any(|note| note.contains("the API server has not reported")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_pod_keeps_its_guarantee() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    let daemon = bench.start().await;
    let add_pod = |cpus: &str| {
        let amounts = Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap());
        known.add_pod("a", vec![ContainerRequest::guaranteed("db", amounts)], None);
    };
    add_pod("2");
    let pod = bench.pod("a", "", &[]).await.unwrap();
    // The resources change before the container is created. The runtime passes the change on as a resize later.
    add_pod("40");
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db), "1-2".parse().unwrap());

    // The API server removes the running pod: a new container of the same name gets the same CPUs.
    known.pods.lock().unwrap().clear();
    bench.remove(&db).await;
    let again = ContainerSpec { id: "db-again".to_owned(), ..db.clone() };
    let again = ContainerSpec { cgroups_path: format!("{}/db-again", pod.cgroup_parent), ..again };
    bench.run(&again).await.unwrap();
    assert_eq!(bench.cpus(&again), "1-2".parse().unwrap());

    // The sandbox is replaced: the end of the old sandbox releases nothing of the new one.
    let new = PodSpec { id: "sandbox-new".to_owned(), ..pod.clone() };
    add_pod("2");
    bench.runtime.run_pod(&new).await.unwrap();
    fs::remove_dir_all(bench.dir.path().join("cgroup").join(path_of(&again))).unwrap();
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0,3-63");
    let last = ContainerSpec {
        cgroups_path: format!("{}/db-last", new.cgroup_parent),
        id: "db-last".to_owned(),
        pod_id: new.id.clone(),
        ..db
    };
    bench.run(&last).await.unwrap();
    assert_eq!(bench.cpus(&last), "1-2".parse().unwrap());
    bench.remove(&last).await;
    bench.runtime.remove_pod(&new.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

/// The fake bus accepts connections and never answers. Only the request for a unit waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_systemd_delays_no_container() {
    /// The timeout of the daemon for calls of systemd.
    const SYSTEMD_TIMEOUT: Duration = Duration::from_secs(10);
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let bus = bench.dir.path().join("bus");
    let listener = tokio::net::UnixListener::bind(&bus).unwrap();
    let (called, mut calls) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            connections.push(connection);
            called.send(()).unwrap();
        }
    });
    for path in ["system.slice", "system.slice/slow.service"] {
        bench.cgroup(path);
    }
    let address = format!("unix:path={}", bus.display());
    let daemon =
        bench.start_with(Some(Systemd::at(tokio::runtime::Handle::current(), bench.dir.path(), address)));
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    let before = bench.pod("before", "", &[]).await.unwrap();
    let shares = container(&before, "shares", 0, Bytes(0));
    bench.run(&shares).await.unwrap();

    let request = numaward_guarantee::request::Request::new(&numaward_api::AllocationRequest {
        cpus: Some(numaward_api::Cpus::whole(4)),
        ..numaward_api::AllocationRequest::new(
            "slow",
            numaward_api::Target::Cgroup("/system.slice/slow.service".to_owned()),
            "1Gi",
        )
    });
    let (reconciler, started) = (daemon.reconciler.clone(), Instant::now());
    let slow = tokio::spawn(async move { reconciler.admit(request.unwrap(), false).await });
    calls.recv().await.unwrap();
    let mut given = BTreeSet::new();
    for number in 0..12 {
        let pod = bench.pod(&format!("p{number}"), "", &[]).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        let cpus = bench.cpus(&db);
        assert_eq!(cpus.len(), 2);
        assert!((&bench.cpus(&shares) & &cpus).is_empty(), "the shared container was confined before");
        if number % 2 == 0 {
            bench.remove(&db).await;
        } else {
            assert!(cpus.iter().all(|cpu| given.insert(cpu)), "{cpus} are used twice: {given:?}");
        }
    }
    assert!(started.elapsed() < SYSTEMD_TIMEOUT && !slow.is_finished(), "containers waited for systemd");
    // Only the decision for the unit is reversed.
    let refused = slow.await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("system bus"), "{refused}");
    let held = daemon.reconciler.allocations();
    let names: BTreeSet<_> = held.allocations.iter().map(|held| held.name.clone()).collect();
    let expected = (1..12).step_by(2).map(|number| format!("default/pod-p{number}/db")).collect();
    assert_eq!(names, expected);
    let pool: CpuSet = held.shared_cpus.parse().unwrap();
    assert_eq!(pool.len() + given.len(), 64, "the CPUs of the unit are in the pool again");
    assert_eq!(bench.cpus(&shares), pool);
}

#[tokio::test]
async fn status_names_runtime_faults() {
    let observer = Arc::new(Observer::new(&Config::default()));
    let runtime = |version: &str| Status {
        runtime: Some(RuntimeInfo {
            name: "containerd".to_owned(),
            version: version.to_owned(),
            nri_version: None,
            events: EventMask::BASIC,
            request_timeout: Duration::from_secs(2),
        }),
        ..Status::default()
    };
    for (version, issues) in [("2.1.4", &["#13355", "#14083"][..]), ("2.3.4", &["#14083"])] {
        let (_, status) = watch::channel(runtime(version));
        note_runtime(status, observer.clone()).await;
        let noted = observer.status().container_runtime.unwrap();
        assert_eq!((noted.version.as_str(), noted.faults.len()), (version, issues.len()));
        for (fault, issue) in noted.faults.iter().zip(issues) {
            assert!(fault.finding.contains(issue), "{fault:?}");
        }
    }
}

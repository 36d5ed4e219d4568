//! What comes from outside and is wrong: each has an outcome that was chosen, a message, and a metric where it recurs.
//! What the connection itself is asked to bear (garbage, silence, other versions) is tested beside it, in
//! `numaward_kube`.

use super::*;

/// The notes of the decision on the only allocation.
fn notes(daemon: &Daemon) -> Vec<String> {
    let held = daemon.reconciler.allocations();
    let [held] = held.allocations.as_slice() else { panic!("{held:?}") };
    held.explanation.clone().unwrap().notes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn annotations_that_mean_nothing_are_reported_and_keep_no_pod_from_running() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
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
async fn what_somebody_else_has_pinned_is_left_alone_unless_configured_otherwise() {
    let mut bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let pinned =
        |name: &str| ContainerSpec { cpus: "40-41".to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
    let theirs = pinned("theirs");
    bench.run(&theirs).await.unwrap();
    assert_eq!(bench.cpus(&theirs), "40-41".parse().unwrap());
    assert_eq!(daemon.figures.unpinned_for("pinned_by_other"), 1);
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    daemon.stop(&bench.runtime).await;

    bench.config.kubernetes.nri.when_pinned = numaward_config::kubernetes::PinnedPolicy::Override;
    let daemon = bench.start().await;
    let ours = pinned("ours");
    bench.run(&ours).await.unwrap();
    let held = daemon.reconciler.allocations();
    assert!(held.allocations.iter().any(|of| of.name.ends_with("/ours")), "{held:?}");
    assert_eq!(bench.mems(&ours), "0");
    assert_eq!(daemon.figures.unpinned_for("pinned_by_other"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_else_has_pinned_is_left_alone_where_it_runs_already() {
    let mut bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let pod = bench.spec("early", "", &[]);
    let running = |name: &str, cpus: &str| {
        let spec = ContainerSpec { cpus: cpus.to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        fs::write(bench.dir.path().join("cgroup").join(path_of(&spec)).join("cpuset.cpus"), cpus).unwrap();
        spec
    };
    let (theirs, wide) = (running("theirs", "40-41"), running("wide", "0-63"));
    let daemon = bench.start().await;
    until("what may run everywhere is pinned", || bench.cpus(&wide).len() == 2).await;
    let shared = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let shared = container(&shared, "web", 4, Bytes(0));
    bench.run(&shared).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    let check = || {
        assert_eq!(bench.cpus(&theirs), "40-41".parse().unwrap());
        let said = bench.runtime.container(&theirs.id).unwrap().resources;
        assert_eq!((said.cpus, said.mems), (Some("40-41".parse().unwrap()), None));
        assert_eq!([&db, &wide].map(|spec| bench.cpus(spec).len()), [2, 2]);
        assert_eq!(bench.cpus(&shared).len(), 60);
    };
    check();
    assert_eq!(daemon.figures.unpinned_for("away"), 1, "that which may run everywhere");
    // Either side restarts. Our own pins are none of somebody else's.
    bench.runtime.stop();
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    check();
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("all are held", || daemon.reconciler.allocations().allocations.len() == 2).await;
    let late = container(&pod, "late", 2, Bytes::gib(1));
    bench.run(&late).await.unwrap();
    // On a busy machine the answer may come too late; then it follows.
    until("its CPUs are nobody else's", || bench.cpus(&shared).len() == 58).await;
    assert_eq!(bench.cpus(&theirs).len(), 2);

    // Where the ledger is lost, what shares what is left cannot be distinguished from what others have pinned.
    daemon.stop(&bench.runtime).await;
    for file in fs::read_dir(&bench.config.state_directory).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() {
            fs::write(path, "damaged").unwrap();
        }
    }
    let daemon = bench.start().await;
    until("it is taken for ours", || !bench.mems(&theirs).is_empty()).await;
    daemon.stop(&bench.runtime).await;

    bench.config.kubernetes.nri.when_pinned = numaward_config::kubernetes::PinnedPolicy::Override;
    let others = bench.spec("others", "", &[]);
    let others = ContainerSpec { cpus: "50-51".to_owned(), ..container(&others, "others", 3, Bytes::gib(1)) };
    bench.runtime.add_running(&bench.spec("others", "", &[]), &others);
    bench.cgroup(&path_of(&others));
    let _daemon = bench.start().await;
    until("it is placed all the same", || bench.cpus(&others).len() == 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_no_claim_and_ran_before_us_gets_the_pool_and_is_not_counted() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let running = |uid: &str, class: &str| {
        let pod = bench.spec(uid, class, &[]);
        let spec = container(&pod, uid, 2, Bytes::gib(1));
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        spec
    };
    // Our own daemon is one of these.
    let (shared, db) = (running("numaward", "/burstable"), running("db", ""));
    let daemon = bench.start().await;
    until("one is pinned", || bench.cpus(&db).len() == 2).await;
    until("the other keeps off its CPUs", || bench.cpus(&shared).len() == 62).await;
    assert_eq!(daemon.figures.unpinned_for("away"), 1, "that which has a claim");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_costs_a_connection_which_is_counted_and_nothing_else() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    // A frame of 4 GiB, and one that begins no message.
    for (lost, garbage) in [(1, [0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]), (2, *b"HTTP/1.1")] {
        bench.runtime.send_raw(PLUGIN, &garbage).await.unwrap();
        until("the connection is lost and made again", || {
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
async fn what_is_adopted_too_late_for_the_runtime_is_pinned_and_reported_nevertheless() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    bench.runtime.stop();
    let daemon = bench.start_unconnected();
    let pod = bench.spec("early", "", &[]);
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.runtime.add_running(&pod, &db);
    bench.cgroup(db.cgroups_path.trim_start_matches('/'));

    // Whatever promises are reported to takes longer than the runtime waits.
    let host = bench.host.clone();
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let (locked, is_locked) = std::sync::mpsc::channel();
    let slow = std::thread::spawn(move || {
        let reported = host.assigned.lock().unwrap();
        locked.send(()).unwrap();
        wait.recv().unwrap();
        drop(reported);
    });
    is_locked.recv().unwrap();
    bench.runtime.start();
    until("the runtime goes on", || daemon.figures.connected.get() == 1).await;
    assert_eq!(daemon.figures.unpinned_for("away"), 0);
    go_on.send(()).unwrap();
    slow.join().unwrap();
    until("it is counted", || daemon.figures.unpinned_for("away") == 1).await;
    until("it is pinned", || bench.cpus(&db).len() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_runtime_that_speaks_nri_the_rest_works_and_it_is_waited_for() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    // Nobody listens, be it that there is no runtime or that its NRI is off.
    bench.runtime.stop();
    let daemon = bench.start_unconnected();
    assert_eq!(daemon.figures.connected.get(), 0);
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    until("it is reported", || daemon.figures.connected.get() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_the_api_server_never_tells_of_is_placed_by_what_the_runtime_tells() {
    let known = Arc::new(Known::default());
    // A static pod whose mirror was refused: the API server has reported all that it knows.
    known.synced.store(true, Ordering::Relaxed);
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let pod = bench.pod("static", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db).len(), 2);
    assert!(notes(&daemon).iter().any(|note| note.contains("the API server has not reported")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_changes_under_our_hands_keeps_what_it_was_admitted_with() {
    let known = Arc::new(Known::default());
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_3);
    let daemon = bench.start().await;
    let tell = |cpus: &str| {
        let amounts = Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap());
        known.tell("a", vec![ContainerRequest::guaranteed("db", amounts)], None);
    };
    tell("2");
    let pod = bench.pod("a", "", &[]).await.unwrap();
    // Its resources change before its container is created: the runtime says so again, when it is resized.
    tell("40");
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db), "1-2".parse().unwrap());

    // The API server forgets it while it runs: a container that is created again gets the same.
    known.pods.lock().unwrap().clear();
    bench.remove(&db).await;
    let again = ContainerSpec { id: "db-again".to_owned(), ..db.clone() };
    let again = ContainerSpec { cgroups_path: format!("{}/db-again", pod.cgroup_parent), ..again };
    bench.run(&again).await.unwrap();
    assert_eq!(bench.cpus(&again), "1-2".parse().unwrap());

    // Its sandbox is replaced: the end of the old one takes nothing from the new one.
    let new = PodSpec { id: "sandbox-new".to_owned(), ..pod.clone() };
    tell("2");
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

/// The bus is a fake: it takes connections and says nothing. What is shown is that nobody else waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_are_placed_and_given_back_while_systemd_does_not_answer() {
    /// As long as the daemon waits for systemd.
    const PATIENCE: Duration = Duration::from_secs(10);
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let bus = bench.dir.path().join("bus");
    let listener = tokio::net::UnixListener::bind(&bus).unwrap();
    let (called, mut calls) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            kept.push(connection);
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
        assert!((&bench.cpus(&shares) & &cpus).is_empty(), "who shares left them before they were given");
        if number % 2 == 0 {
            bench.remove(&db).await;
        } else {
            assert!(cpus.iter().all(|cpu| given.insert(cpu)), "{cpus} twice: {given:?}");
        }
    }
    assert!(started.elapsed() < PATIENCE && !slow.is_finished(), "systemd was waited for");
    // What was decided for the unit is undone, and nothing else is.
    let refused = slow.await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("system bus"), "{refused}");
    let held = daemon.reconciler.allocations();
    let names: BTreeSet<_> = held.allocations.iter().map(|of| of.name.clone()).collect();
    let expected = (1..12).step_by(2).map(|number| format!("default/pod-p{number}/db")).collect();
    assert_eq!(names, expected);
    let pool: CpuSet = held.shared_cpus.parse().unwrap();
    assert_eq!(pool.len() + given.len(), 64, "the CPUs of the unit are in the pool again");
    assert_eq!(bench.cpus(&shares), pool);
}

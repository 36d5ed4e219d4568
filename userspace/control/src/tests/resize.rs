//! Guarantees without CPUs of their own, and guarantees that change while they hold.

use super::*;

/// A request for memory, without CPUs of its own.
fn shared(cgroup: &str, cpus: Option<&str>) -> api::AllocationRequest {
    let target = api::Target::Cgroup(format!("/{cgroup}"));
    let cpus = cpus.map(|cpus| cpus.parse().unwrap());
    api::AllocationRequest { cpus, ..api::AllocationRequest::new(cgroup, target, "1Gi") }
}

async fn give(reconciler: &ReconcilerHandle, asked: &api::AllocationRequest) -> api::Allocation {
    match reconciler.admit(Request::new(asked).unwrap(), false).await.unwrap() {
        Answer::Admitted(allocation) => allocation,
        Answer::Dry(dry) => panic!("{dry:?}"),
    }
}

fn to(cpus: Option<&str>, memory: Option<&str>) -> api::Resize {
    let cpus = cpus.map(|cpus| cpus.parse().unwrap());
    api::Resize { cpus, memory: memory.map(str::to_owned), ..api::Resize::default() }
}

async fn resize(
    reconciler: &ReconcilerHandle,
    name: &str,
    asked: &api::Resize,
) -> Result<api::Allocation, AdmissionError> {
    match reconciler.resize_allocation(Resize::new(name.to_owned(), asked)?, false).await? {
        Answer::Admitted(allocation) => Ok(allocation),
        Answer::Dry(dry) => panic!("{dry:?}"),
    }
}

#[tokio::test]
async fn memory_alone_is_bound_and_follows_the_shared_pool_of_its_node() {
    for strategy in [StrategyKind::Kubelet, StrategyKind::Native] {
        let bench = Bench::new(&["a", "b", "c", "d"]);
        let (reconciler, thread, stop) = bench.start_with(Config { strategy, ..Config::default() });
        let a = give(&reconciler, &shared("a", None)).await;
        assert_eq!((a.cpus.as_str(), a.nodes.as_str()), ("", "0"));
        let knobs = |cgroup: &str| {
            ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.max"]
                .map(|knob| bench.knob(&format!("{cgroup}/{knob}")))
        };
        let gib = Bytes::gib(1).0.to_string();
        assert_eq!(knobs("a"), ["0-3", "0", gib.as_str(), gib.as_str()]);
        // No rule ties its CPUs to its memory.
        let any = api::AllocationRequest {
            policy: Some(numaward_config::policy::TopologyManagerPolicy::None),
            ..shared("b", Some("500m"))
        };
        give(&reconciler, &any).await;
        assert_eq!(knobs("b")[0], "0-7");
        admit(&reconciler, "c", 3).await.unwrap();
        let exclusive = bench.knob("c/cpuset.cpus");
        let (near, all) = if exclusive == "1-3" { ("0", "0,4-7") } else { ("0-3", "0-4") };
        assert_eq!((knobs("a")[0].as_str(), knobs("b")[0].as_str()), (near, all), "{exclusive}");
        reconciler.release("c".to_owned()).await.unwrap();
        assert_eq!((knobs("a")[0].as_str(), knobs("b")[0].as_str()), ("0-3", "0-7"));
        assert_eq!(reconciler.allocations().allocations[0].settings["cpuset.cpus"], "0-3");
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn a_guarantee_grows_and_shrinks_where_it_is() {
    for strategy in [StrategyKind::Kubelet, StrategyKind::Native] {
        let bench = Bench::new(&["a", "b"]);
        let config = Config { strategy, ..Config::default() };
        let (reconciler, thread, stop) = bench.start_with(config.clone());
        admit(&reconciler, "a", 1).await.unwrap();
        let before = bench.knob("a/cpuset.cpus");
        let grown = resize(&reconciler, "a", &to(Some("3"), Some("2Gi"))).await.unwrap();
        assert_eq!((before.as_str(), grown.cpus.as_str(), grown.nodes.as_str()), ("1", "1-3", "0"));
        let gib = |gib| Bytes::gib(gib).0.to_string();
        let knobs =
            || ["cpuset.cpus", "memory.min", "memory.max"].map(|knob| bench.knob(&format!("a/{knob}")));
        assert_eq!(knobs(), ["1-3".to_owned(), gib(2), gib(2)]);

        // Its node does not have more; nothing changes.
        let held = reconciler.allocations();
        for (asked, words) in [
            (to(Some("4"), None), "node 0: cpu requested 1, free 0"),
            (to(Some("1"), Some("400Gi")), "node 0: memory requested 398Gi, free "),
            (to(Some("1500m"), None), "1500m: it has exclusive CPUs"),
        ] {
            let error = resize(&reconciler, "a", &asked).await.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let huge = api::Resize { hugepages: [("2Mi".to_owned(), "2Mi".to_owned())].into(), ..to(None, None) };
        for (asked, field) in [
            (huge, "hugepages.2Mi"),
            (api::Resize { memory_limit: Some("1Gi".to_owned()), ..to(None, None) }, "memoryLimit"),
            (to(None, None), "cpus"),
        ] {
            let error = resize(&reconciler, "a", &asked).await.unwrap_err();
            assert!(matches!(&error, AdmissionError::Field(error) if error.field == field), "{error}");
        }
        // It uses more than it is to have.
        fs::write(bench.dir.path().join("cgroup/a/memory.current"), "600000000\n").unwrap();
        let error = resize(&reconciler, "a", &to(None, Some("512Mi"))).await.unwrap_err();
        assert!(matches!(&error, AdmissionError::Field(error) if error.field == "memory"), "{error}");
        let unknown = resize(&reconciler, "b", &to(Some("1"), None)).await.unwrap_err();
        assert!(matches!(unknown, AdmissionError::Unknown(_)));
        assert_eq!((knobs(), &reconciler.allocations()), (["1-3".to_owned(), gib(2), gib(2)], &held));

        // A dry run changes nothing either.
        let dry = Resize::new("a".to_owned(), &to(Some("2"), Some("1Gi"))).unwrap();
        let Ok(Answer::Dry(dry)) = reconciler.resize_allocation(dry, true).await else { panic!() };
        assert_eq!(dry.allocation.unwrap().cpus, "1-2");
        let dry = Resize::new("a".to_owned(), &to(Some("4"), None)).unwrap();
        let Ok(Answer::Dry(dry)) = reconciler.resize_allocation(dry, true).await else { panic!() };
        assert!(!dry.admitted && dry.rejection.is_some_and(|of| of.shortfalls[0].node == 0));
        assert_eq!(knobs(), ["1-3".to_owned(), gib(2), gib(2)]);

        // It survives a restart, shrinks, and gives all back.
        stop.cancel();
        thread.join().unwrap();
        let (reconciler, thread, stop) = bench.start_with(config);
        let shrunk = resize(&reconciler, "a", &to(Some("1"), Some("1Gi"))).await.unwrap();
        assert_eq!((shrunk.cpus.as_str(), knobs()), ("1", ["1".to_owned(), gib(1), gib(1)]));
        admit(&reconciler, "b", 2).await.unwrap();
        let both = to(None, Some("1536Mi"));
        let above = api::Resize { memory_limit: Some("2Gi".to_owned()), ..both };
        resize(&reconciler, "a", &above).await.unwrap();
        assert_eq!(bench.knob("a/memory.max"), gib(2));
        resize(&reconciler, "a", &to(None, Some("1Gi"))).await.unwrap();
        assert_eq!(bench.knob("a/memory.max"), gib(2), "a limit of its own stays");
        for name in ["a", "b"] {
            reconciler.release(name.to_owned()).await.unwrap();
        }
        assert_eq!(reconciler.allocations().shared_cpus, "0-7");
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn what_cannot_be_written_is_as_before() {
    let bench = Bench::new(&["a"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 1).await.unwrap();
    let held = reconciler.allocations();
    let max = bench.dir.path().join("cgroup/a/memory.max");
    fs::remove_file(&max).unwrap();
    fs::create_dir(&max).unwrap();
    let error = resize(&reconciler, "a", &to(Some("2"), Some("2Gi"))).await.unwrap_err();
    assert!(error.to_string().contains("memory.max"), "{error}");
    fs::remove_dir(&max).unwrap();
    fs::write(&max, format!("{}\n", Bytes::gib(1).0)).unwrap();
    let after = reconciler.allocations();
    assert_eq!((after.shared_cpus.as_str(), &after.nodes), (held.shared_cpus.as_str(), &held.nodes));
    assert_eq!((after.allocations[0].cpus.as_str(), bench.knob("a/cpuset.cpus").as_str()), ("1", "1"));
    stop.cancel();
    thread.join().unwrap();
}

/// Has the memory of a cgroup be on these nodes, in MiB.
fn lies(bench: &Bench, cgroup: &str, mib: [u64; 2]) {
    let [first, second] = mib.map(|mib| Bytes::mib(mib).0);
    let text = format!("anon N0={first} N1={second}\nfile N0=0 N1=0\n");
    fs::write(bench.dir.path().join("cgroup").join(cgroup).join("memory.numa_stat"), text).unwrap();
}

#[tokio::test]
async fn a_burstable_guarantee_has_a_home_and_follows_its_memory() {
    let bench = Bench::new(&["a", "b", "c"]);
    let mut config = Config { strategy: StrategyKind::Native, ..Config::default() };
    config.enforcement.home_dwell_time = numaward_config::Interval(std::time::Duration::from_millis(400));
    let (reconciler, thread, stop) = bench.start_with(config);
    lies(&bench, "a", [100, 300]);
    let mut asked = shared("a", None);
    asked.memory_limit = Some("3Gi".to_owned());
    asked.placement.burstable = true;
    let a = give(&reconciler, &asked).await;
    assert_eq!(a.nodes, "1", "its memory is there");
    let knobs = ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.low", "memory.max"]
        .map(|knob| bench.knob(&format!("a/{knob}")));
    let gib = |gib| Bytes::gib(gib).0.to_string();
    assert_eq!(knobs, ["0-7".to_owned(), String::new(), "0".to_owned(), gib(1), gib(3)]);

    // Half of it elsewhere is not most of it.
    lies(&bench, "a", [200, 200]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let home = || reconciler.allocations().allocations[0].nodes.clone();
    assert_eq!(home(), "1");
    // No room there.
    let resources = api::AllocationRequest { memory: Some("3500Mi".to_owned()), ..shared("b", None) };
    assert_eq!(give(&reconciler, &resources).await.nodes, "0");
    lies(&bench, "a", [300, 100]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(home(), "1");
    reconciler.release("b".to_owned()).await.unwrap();
    until("the promise follows", &|| home() == "0");
    {
        let happened = bench.host.happened.lock().unwrap();
        let moved = happened.iter().find(|(_, report)| report.kind == api::EventKind::HomeMoved);
        let (cgroup, report) = moved.unwrap();
        assert_eq!(cgroup.as_ref().unwrap().to_string(), "/a");
        assert!(
            report.message.contains("now node 0") && report.message.contains("it was node 1"),
            "{report:?}"
        );
    }

    // It grows where it is, and keeps its class.
    resize(&reconciler, "a", &to(Some("500m"), Some("2Gi"))).await.unwrap();
    assert_eq!(
        (bench.knob("a/memory.low"), bench.knob("a/memory.max"), home()),
        (gib(2), gib(3), "0".to_owned())
    );
    reconciler.release("a".to_owned()).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    // The kubelet knows no such thing, and says so.
    let kubelet = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(kubelet);
    let error = reconciler.admit(Request::new(&asked).unwrap(), false).await.unwrap_err();
    assert!(matches!(&error, AdmissionError::Field(error) if error.field == "placement"), "{error}");
    assert!(error.to_string().contains("burstable is known only to the strategy native"), "{error}");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn terms_are_kept_and_shown() {
    let bench = Bench::new(&["a", "b"]);
    let native = Config { strategy: StrategyKind::Native, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(native.clone());
    let mut asked = shared("a", Some("2"));
    asked.placement.preferred_nodes = Some("1".parse().unwrap());
    asked.placement.labels = [("app".to_owned(), "db".to_owned())].into();
    let a = give(&reconciler, &asked).await;
    assert_eq!((a.nodes.as_str(), &a.placement), ("1", &asked.placement));
    let mut near = shared("b", Some("1"));
    near.placement.with = ["app=db".to_owned()].into();
    near.placement.immovable = true;
    assert_eq!(give(&reconciler, &near).await.nodes, "1");
    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start_with(native);
    let held = reconciler.allocations();
    assert_eq!(held.allocations[0].placement, asked.placement);
    assert_eq!(held.allocations[1].placement, near.placement);
    stop.cancel();
    thread.join().unwrap();
}

//! Tests of guarantees without exclusive CPUs, and of resizes.

use super::*;

/// Returns a request for 1 GiB of memory and, if any, shared CPUs.
fn shared(cgroup: &str, cpus: Option<&str>) -> api::AllocationRequest {
    let target = api::Target::Cgroup(format!("/{cgroup}"));
    let cpus = cpus.map(|cpus| cpus.parse().unwrap());
    api::AllocationRequest { cpus, ..api::AllocationRequest::new(cgroup, target, "1Gi") }
}

async fn admit_request(reconciler: &ReconcilerHandle, request: &api::AllocationRequest) -> api::Allocation {
    match reconciler.admit(Request::new(request).unwrap(), false).await.unwrap() {
        AdmissionOutcome::Admitted(allocation) => allocation,
        AdmissionOutcome::Dry(dry) => panic!("{dry:?}"),
    }
}

fn new_resize(cpus: Option<&str>, memory: Option<&str>) -> api::Resize {
    let cpus = cpus.map(|cpus| cpus.parse().unwrap());
    api::Resize { cpus, memory: memory.map(str::to_owned), ..api::Resize::default() }
}

async fn resize(
    reconciler: &ReconcilerHandle,
    name: &str,
    request: &api::Resize,
) -> Result<api::Allocation, AdmissionError> {
    match reconciler.resize_allocation(Resize::new(name.to_owned(), request)?, false).await? {
        AdmissionOutcome::Admitted(allocation) => Ok(allocation),
        AdmissionOutcome::Dry(dry) => panic!("{dry:?}"),
    }
}

#[tokio::test]
async fn memory_guarantee_follows_shared_pool() {
    for strategy in [StrategyKind::Kubelet, StrategyKind::Native] {
        let bench = DaemonBench::new(&["a", "b", "c", "d"]);
        let (reconciler, thread, stop) = bench.start_with(Config { strategy, ..Config::default() });
        let a = admit_request(&reconciler, &shared("a", None)).await;
        assert_eq!((a.cpus.as_str(), a.nodes.as_str()), ("", "0"));
        let knobs = |cgroup: &str| {
            ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.max"]
                .map(|knob| bench.knob(&format!("{cgroup}/{knob}")))
        };
        let gib = Bytes::gib(1).0.to_string();
        assert_eq!(knobs("a"), ["0-3", "0", gib.as_str(), gib.as_str()]);
        // With the policy `none`, its CPUs may be on any node.
        let any = api::AllocationRequest {
            policy: Some(numaward_config::policy::TopologyManagerPolicy::None),
            ..shared("b", Some("500m"))
        };
        admit_request(&reconciler, &any).await;
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
async fn guarantee_is_resized_in_place() {
    for strategy in [StrategyKind::Kubelet, StrategyKind::Native] {
        let bench = DaemonBench::new(&["a", "b"]);
        let config = Config { strategy, ..Config::default() };
        let (reconciler, thread, stop) = bench.start_with(config.clone());
        admit(&reconciler, "a", 1).await.unwrap();
        let before = bench.knob("a/cpuset.cpus");
        let grown = resize(&reconciler, "a", &new_resize(Some("3"), Some("2Gi"))).await.unwrap();
        assert_eq!((before.as_str(), grown.cpus.as_str(), grown.nodes.as_str()), ("1", "1-3", "0"));
        let gib = |gib| Bytes::gib(gib).0.to_string();
        let knobs =
            || ["cpuset.cpus", "memory.min", "memory.max"].map(|knob| bench.knob(&format!("a/{knob}")));
        assert_eq!(knobs(), ["1-3".to_owned(), gib(2), gib(2)]);

        // The node has no more free resources: the resize is refused, and nothing changes.
        let held = reconciler.allocations();
        for (request, words) in [
            (new_resize(Some("4"), None), "node 0: cpu requested 1, free 0"),
            (new_resize(Some("1"), Some("400Gi")), "node 0: memory requested 398.0 GiB, free "),
            (new_resize(Some("1500m"), None), "1.5: it has exclusive CPUs"),
        ] {
            let error = resize(&reconciler, "a", &request).await.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let huge = api::Resize {
            hugepages: [("2Mi".to_owned(), "2Mi".to_owned())].into(),
            ..new_resize(None, None)
        };
        for (request, field) in [
            (huge, "hugepages.2Mi"),
            (api::Resize { memory_limit: Some("1Gi".to_owned()), ..new_resize(None, None) }, "memoryLimit"),
            (new_resize(None, None), "cpus"),
        ] {
            let error = resize(&reconciler, "a", &request).await.unwrap_err();
            assert!(matches!(&error, AdmissionError::Field(error) if error.field == field), "{error}");
        }
        // The memory use exceeds the new size.
        fs::write(bench.dir.path().join("cgroup/a/memory.current"), "600000000\n").unwrap();
        let error = resize(&reconciler, "a", &new_resize(None, Some("512Mi"))).await.unwrap_err();
        assert!(matches!(&error, AdmissionError::Field(error) if error.field == "memory"), "{error}");
        let unknown = resize(&reconciler, "b", &new_resize(Some("1"), None)).await.unwrap_err();
        assert!(matches!(unknown, AdmissionError::Unknown(_)));
        assert_eq!((knobs(), &reconciler.allocations()), (["1-3".to_owned(), gib(2), gib(2)], &held));

        // A dry run changes nothing either.
        let dry = Resize::new("a".to_owned(), &new_resize(Some("2"), Some("1Gi"))).unwrap();
        let Ok(AdmissionOutcome::Dry(dry)) = reconciler.resize_allocation(dry, true).await else { panic!() };
        assert_eq!(dry.allocation.unwrap().cpus, "1-2");
        let dry = Resize::new("a".to_owned(), &new_resize(Some("4"), None)).unwrap();
        let Ok(AdmissionOutcome::Dry(dry)) = reconciler.resize_allocation(dry, true).await else { panic!() };
        assert!(!dry.admitted && dry.rejection.is_some_and(|of| of.shortfalls[0].node == 0));
        assert_eq!(knobs(), ["1-3".to_owned(), gib(2), gib(2)]);

        // The guarantee survives a restart, shrinks, and is released.
        stop.cancel();
        thread.join().unwrap();
        let (reconciler, thread, stop) = bench.start_with(config);
        let shrunk = resize(&reconciler, "a", &new_resize(Some("1"), Some("1Gi"))).await.unwrap();
        assert_eq!((shrunk.cpus.as_str(), knobs()), ("1", ["1".to_owned(), gib(1), gib(1)]));
        admit(&reconciler, "b", 2).await.unwrap();
        let grown = new_resize(None, Some("1536Mi"));
        let above = api::Resize { memory_limit: Some("2Gi".to_owned()), ..grown };
        resize(&reconciler, "a", &above).await.unwrap();
        assert_eq!(bench.knob("a/memory.max"), gib(2));
        resize(&reconciler, "a", &new_resize(None, Some("1Gi"))).await.unwrap();
        assert_eq!(bench.knob("a/memory.max"), gib(2), "an explicit limit stays");
        for name in ["a", "b"] {
            reconciler.release(name.to_owned()).await.unwrap();
        }
        assert_eq!(reconciler.allocations().shared_cpus, "0-7");
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn failed_resize_changes_nothing() {
    let bench = DaemonBench::new(&["a"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 1).await.unwrap();
    let held = reconciler.allocations();
    let max = bench.dir.path().join("cgroup/a/memory.max");
    fs::remove_file(&max).unwrap();
    fs::create_dir(&max).unwrap();
    let error = resize(&reconciler, "a", &new_resize(Some("2"), Some("2Gi"))).await.unwrap_err();
    assert!(error.to_string().contains("memory.max"), "{error}");
    fs::remove_dir(&max).unwrap();
    fs::write(&max, format!("{}\n", Bytes::gib(1).0)).unwrap();
    let after = reconciler.allocations();
    assert_eq!((after.shared_cpus.as_str(), &after.nodes), (held.shared_cpus.as_str(), &held.nodes));
    assert_eq!((after.allocations[0].cpus.as_str(), bench.knob("a/cpuset.cpus").as_str()), ("1", "1"));
    stop.cancel();
    thread.join().unwrap();
}

/// Sets the memory of a cgroup on each node, in MiB.
fn set_memory(bench: &DaemonBench, cgroup: &str, mib: [u64; 2]) {
    let [first, second] = mib.map(|mib| Bytes::mib(mib).0);
    let text = format!("anon N0={first} N1={second}\nfile N0=0 N1=0\n");
    fs::write(bench.dir.path().join("cgroup").join(cgroup).join("memory.numa_stat"), text).unwrap();
}

#[tokio::test]
async fn burstable_guarantee_follows_memory() {
    let bench = DaemonBench::new(&["a", "b", "c"]);
    let mut config = Config { strategy: StrategyKind::Native, ..Config::default() };
    config.enforcement.home_dwell_time = numaward_config::Interval(std::time::Duration::from_millis(400));
    let (reconciler, thread, stop) = bench.start_with(config);
    set_memory(&bench, "a", [100, 300]);
    let mut request = shared("a", None);
    request.memory_limit = Some("3Gi".to_owned());
    request.placement.burstable = true;
    let a = admit_request(&reconciler, &request).await;
    assert_eq!(a.nodes, "1", "its memory is there");
    let knobs = ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.low", "memory.max"]
        .map(|knob| bench.knob(&format!("a/{knob}")));
    let gib = |gib| Bytes::gib(gib).0.to_string();
    assert_eq!(knobs, ["0-7".to_owned(), String::new(), "0".to_owned(), gib(1), gib(3)]);

    // Half of the memory on another node is not enough.
    set_memory(&bench, "a", [200, 200]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let preferred_node = || reconciler.allocations().allocations[0].nodes.clone();
    assert_eq!(preferred_node(), "1");
    // The other node has no room.
    let resources = api::AllocationRequest { memory: Some("3500Mi".to_owned()), ..shared("b", None) };
    assert_eq!(admit_request(&reconciler, &resources).await.nodes, "0");
    set_memory(&bench, "a", [300, 100]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(preferred_node(), "1");
    reconciler.release("b".to_owned()).await.unwrap();
    until("the guarantee follows", &|| preferred_node() == "0");
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

    // A resize keeps the node and the QoS class.
    resize(&reconciler, "a", &new_resize(Some("500m"), Some("2Gi"))).await.unwrap();
    assert_eq!(
        (bench.knob("a/memory.low"), bench.knob("a/memory.max"), preferred_node()),
        (gib(2), gib(3), "0".to_owned())
    );
    reconciler.release("a".to_owned()).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    // The strategy `kubelet` has no Burstable guarantees.
    let kubelet = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(kubelet);
    let error = reconciler.admit(Request::new(&request).unwrap(), false).await.unwrap_err();
    assert!(matches!(&error, AdmissionError::Field(error) if error.field == "placement"), "{error}");
    assert!(error.to_string().contains("burstable is known only to the strategy native"), "{error}");
    stop.cancel();
    thread.join().unwrap();
}

#[tokio::test]
async fn terms_survive_restart() {
    let bench = DaemonBench::new(&["a", "b"]);
    let native = Config { strategy: StrategyKind::Native, ..Config::default() };
    let (reconciler, thread, stop) = bench.start_with(native.clone());
    let mut request = shared("a", Some("2"));
    request.placement.preferred_nodes = Some("1".parse().unwrap());
    request.placement.labels = [("app".to_owned(), "db".to_owned())].into();
    let a = admit_request(&reconciler, &request).await;
    assert_eq!((a.nodes.as_str(), &a.placement), ("1", &request.placement));
    let mut near = shared("b", Some("1"));
    near.placement.with = ["app=db".to_owned()].into();
    near.placement.immovable = true;
    assert_eq!(admit_request(&reconciler, &near).await.nodes, "1");
    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start_with(native);
    let held = reconciler.allocations();
    assert_eq!(held.allocations[0].placement, request.placement);
    assert_eq!(held.allocations[1].placement, near.placement);
    stop.cancel();
    thread.join().unwrap();
}

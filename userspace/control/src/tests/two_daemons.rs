//! Tests of a second daemon for the same cgroups.

use numaward_guarantee::error::StartError;

use super::*;

#[tokio::test]
async fn refuses_second_daemon() {
    let bench = DaemonBench::new(&["a"]);
    let root = bench.dir.path().join("cgroup");
    fs::write(root.join("memory.reclaim"), "").unwrap();
    let second_stop = CancellationToken::new();
    let second = || {
        let config = Config { state_directory: bench.dir.path().join("other"), ..Config::default() };
        let enforcer = fixture::enforcer(&config, &root, &bench.host.machine(), None);
        let (ports, metrics) = (Ports::new(bench.host.clone()), ControlMetrics::default());
        start(&config, Hierarchy::at(&root), enforcer, ports, metrics, None, second_stop.clone())
    };
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 3).await.unwrap();
    let refused = second().unwrap_err();
    assert!(matches!(refused, StartError::Lock(_)), "{refused}");
    assert!(refused.to_string().contains(&std::process::id().to_string()), "{refused}");
    assert_eq!(bench.knob("a/cpuset.cpus"), "1-3");
    stop.cancel();
    thread.join().unwrap();
    let (_, thread) = second().unwrap();
    second_stop.cancel();
    thread.join().unwrap();
}

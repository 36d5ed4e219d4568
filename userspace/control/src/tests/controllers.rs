//! Tests of the controllers that the daemon enables for the children of cgroups.

use super::*;

/// Returns the enabled controllers of each cgroup in the ledger, as JSON.
fn enabled(bench: &DaemonBench) -> serde_json::Value {
    let (_, loaded) = Store::<State>::open(&bench.dir.path().join("state")).unwrap();
    let mut enabled = serde_json::to_value(loaded.ledger().unwrap().enabled).unwrap();
    enabled.as_object_mut().unwrap().values_mut().for_each(|of| *of = of["controllers"].take());
    enabled
}

/// An enabled controller stays in the ledger after the release, until it is disabled.
#[tokio::test]
async fn enabled_controllers_are_recorded() {
    let bench = DaemonBench::new(&["a", "a/b", "c", "c/d"]);
    let root = bench.dir.path().join("cgroup");
    for (cgroup, enabled) in [("a", ""), ("a/b", ""), ("c", "memory"), ("c/d", "")] {
        fs::write(root.join(cgroup).join("cgroup.subtree_control"), enabled).unwrap();
    }
    // The kernel would refuse to enable controllers here.
    fs::write(root.join("c/cgroup.type"), "domain\n").unwrap();
    fs::write(root.join("c/cgroup.procs"), "12\n").unwrap();
    let (reconciler, thread, stop) = bench.start();
    let request_for = |cgroup: &str| {
        let target = api::Target::Cgroup(format!("/{cgroup}"));
        let name = cgroup.replace('/', "-");
        let request = api::AllocationRequest::new(&name, target, "1Gi");
        Request::new(&api::AllocationRequest { cpus: Some(api::Cpus::whole(1)), ..request }).unwrap()
    };
    reconciler.admit(request_for("a/b"), false).await.unwrap();
    assert_eq!(bench.knob("a/cgroup.subtree_control"), "+cpuset +memory");
    // The kernel shows the enabled controllers like this.
    fs::write(root.join("a/cgroup.subtree_control"), "cpuset memory\n").unwrap();
    let refused = reconciler.admit(request_for("c/d"), false).await.unwrap_err();
    assert!(refused.to_string().contains("the cgroup holds processes itself"), "{refused}");
    reconciler.release("a-b".to_owned()).await.unwrap();
    stop.cancel();
    thread.join().unwrap();
    assert_eq!(enabled(&bench), serde_json::json!({"/a": ["cpuset", "memory"]}));

    let config = Config { state_directory: bench.dir.path().join("state"), ..Config::default() };
    let disable = || {
        let (_, left) = restore::disable_controllers(&config, &Hierarchy::at(&root)).unwrap();
        left.into_iter().map(|left| left.reason).collect::<Vec<_>>()
    };
    // Another program has disabled one controller, and uses the other.
    fs::write(root.join("a/cgroup.subtree_control"), "memory\n").unwrap();
    fs::write(root.join("a/b/memory.high"), "4096\n").unwrap();
    assert_eq!(disable(), ["/a/b has memory.high 4096"]);
    assert_eq!(enabled(&bench), serde_json::json!({"/a": ["memory"]}));
    fs::write(root.join("a/b/memory.high"), "max\n").unwrap();
    assert_eq!(disable(), [""; 0]);
    assert_eq!(bench.knob("a/cgroup.subtree_control"), "-memory");
    assert_eq!(enabled(&bench), serde_json::json!({}));
}

/// With enforcement off, unused controllers are disabled. A dry run leaves them enabled.
#[tokio::test]
async fn enforcement_off_disables_controllers() {
    for mode in [api::EnforcementMode::DryRun, api::EnforcementMode::Off] {
        let bench = DaemonBench::new(&["a", "a/b", "c", "c/d"]);
        let root = bench.dir.path().join("cgroup");
        for cgroup in ["a", "a/b", "c", "c/d"] {
            fs::write(root.join(cgroup).join("cgroup.subtree_control"), "").unwrap();
        }
        let (reconciler, thread, stop) = bench.start();
        for cgroup in ["a/b", "c/d"] {
            let target = api::Target::Cgroup(format!("/{cgroup}"));
            let request = api::AllocationRequest::new(cgroup.replace('/', "-"), target, "64Mi");
            let request =
                Request::new(&api::AllocationRequest { cpus: Some(api::Cpus::whole(1)), ..request });
            reconciler.admit(request.unwrap(), false).await.unwrap();
        }
        stop.cancel();
        thread.join().unwrap();
        // The kernel shows the enabled controllers like this. Another program uses one of them.
        for cgroup in ["a", "c"] {
            fs::write(root.join(cgroup).join("cgroup.subtree_control"), "cpuset memory\n").unwrap();
        }
        fs::write(root.join("c/d/cpuset.cpus.exclusive"), "3\n").unwrap();
        let mut off = Config::default();
        off.enforcement.mode = mode;
        let (reconciler, thread, stop) = bench.start_with(off);
        stop.cancel();
        thread.join().unwrap();
        drop(reconciler);
        assert_eq!(bench.knob("a/b/memory.min"), "0");
        if mode == api::EnforcementMode::DryRun {
            assert_eq!(bench.knob("a/cgroup.subtree_control"), "cpuset memory");
            assert_eq!(enabled(&bench)["/a"], serde_json::json!(["cpuset", "memory"]));
            continue;
        }
        // The plain file has only the last write.
        assert_eq!(bench.knob("a/cgroup.subtree_control"), "-cpuset", "{mode:?}");
        assert_eq!(bench.knob("c/cgroup.subtree_control"), "-memory", "{mode:?}");
        assert_eq!(enabled(&bench), serde_json::json!({"/c": ["cpuset"]}), "{mode:?}");
    }
}

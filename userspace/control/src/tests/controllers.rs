//! Controllers that were enabled for the children of cgroups.

use super::*;

/// What the ledger says that was enabled where, as JSON.
fn enabled(bench: &Bench) -> serde_json::Value {
    let (_, loaded) = Store::<State>::open(&bench.dir.path().join("state")).unwrap();
    let mut enabled = serde_json::to_value(loaded.ledger().unwrap().enabled).unwrap();
    enabled.as_object_mut().unwrap().values_mut().for_each(|of| *of = of["controllers"].take());
    enabled
}

/// A controller is in the ledger when it is enabled, stays there when what it was for is over, and is disabled in the end.
#[tokio::test]
async fn controllers_that_were_enabled_are_remembered_until_they_are_disabled() {
    let bench = Bench::new(&["a", "a/b", "c", "c/d"]);
    let root = bench.dir.path().join("cgroup");
    for (cgroup, enabled) in [("a", ""), ("a/b", ""), ("c", "memory"), ("c/d", "")] {
        fs::write(root.join(cgroup).join("cgroup.subtree_control"), enabled).unwrap();
    }
    // Here the kernel would refuse, so that nothing is enabled.
    fs::write(root.join("c/cgroup.type"), "domain\n").unwrap();
    fs::write(root.join("c/cgroup.procs"), "12\n").unwrap();
    let (reconciler, thread, stop) = bench.start();
    let of = |cgroup: &str| {
        let target = api::Target::Cgroup(format!("/{cgroup}"));
        let name = cgroup.replace('/', "-");
        let asked = api::AllocationRequest::new(&name, target, "1Gi");
        Request::new(&api::AllocationRequest { cpus: Some(api::Cpus::whole(1)), ..asked }).unwrap()
    };
    reconciler.admit(of("a/b"), false).await.unwrap();
    assert_eq!(bench.knob("a/cgroup.subtree_control"), "+cpuset +memory");
    // As the kernel has it.
    fs::write(root.join("a/cgroup.subtree_control"), "cpuset memory\n").unwrap();
    let refused = reconciler.admit(of("c/d"), false).await.unwrap_err();
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
    // Somebody else has disabled one, and uses the other.
    fs::write(root.join("a/cgroup.subtree_control"), "memory\n").unwrap();
    fs::write(root.join("a/b/memory.high"), "4096\n").unwrap();
    assert_eq!(disable(), ["/a/b has memory.high 4096"]);
    assert_eq!(enabled(&bench), serde_json::json!({"/a": ["memory"]}));
    fs::write(root.join("a/b/memory.high"), "max\n").unwrap();
    assert_eq!(disable(), [""; 0]);
    assert_eq!(bench.knob("a/cgroup.subtree_control"), "-memory");
    assert_eq!(enabled(&bench), serde_json::json!({}));
}

/// Where nothing is enforced any more, controllers go once nothing is held.
#[tokio::test]
async fn controllers_that_were_enabled_are_disabled_with_enforcement_off_but_not_in_a_dry_run() {
    for mode in [api::EnforcementMode::DryRun, api::EnforcementMode::Off] {
        let bench = Bench::new(&["a", "a/b", "c", "c/d"]);
        let root = bench.dir.path().join("cgroup");
        for cgroup in ["a", "a/b", "c", "c/d"] {
            fs::write(root.join(cgroup).join("cgroup.subtree_control"), "").unwrap();
        }
        let (reconciler, thread, stop) = bench.start();
        for cgroup in ["a/b", "c/d"] {
            let target = api::Target::Cgroup(format!("/{cgroup}"));
            let asked = api::AllocationRequest::new(cgroup.replace('/', "-"), target, "64Mi");
            let asked = Request::new(&api::AllocationRequest { cpus: Some(api::Cpus::whole(1)), ..asked });
            reconciler.admit(asked.unwrap(), false).await.unwrap();
        }
        stop.cancel();
        thread.join().unwrap();
        // As the kernel has it. Somebody uses one of them.
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
        // A plain file has forgotten the other controllers then.
        assert_eq!(bench.knob("a/cgroup.subtree_control"), "-cpuset", "{mode:?}");
        assert_eq!(bench.knob("c/cgroup.subtree_control"), "-memory", "{mode:?}");
        assert_eq!(enabled(&bench), serde_json::json!({"/c": ["cpuset"]}), "{mode:?}");
    }
}

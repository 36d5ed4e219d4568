//! After numaward is removed, every knob of every cgroup has its original value, also if the daemon was killed.

use std::{collections::BTreeMap, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;

/// Returns the value of each knob of each cgroup.
fn tree(report: &ScriptReport, name: &str) -> BTreeMap<String, String> {
    let knobs = report.section(name).lines().map(|line| line.split_once('=').unwrap());
    knobs.map(|(knob, value)| (knob.to_owned(), value.to_owned())).collect()
}

#[test]
fn restores_every_knob() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("4,4"), Some("512M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(5)), include_str!("uninstall.sh"));
    let (before, held) = (tree(&report, "before"), tree(&report, "held"));
    for knob in [
        "./cgroup.subtree_control",
        "./bare/cgroup.subtree_control",
        "./bare/inner/cpuset.cpus",
        "./bare/inner/memory.min",
        "./batch/one/cpuset.cpus",
        "./loose/memory.low",
        "./loose/memory.max",
        "./other/memory.min",
        "./plain/cpuset.cpus",
        "./slice/cgroup.subtree_control",
        "./slice/a/cpuset.cpus",
        "./slice/a/cpuset.mems",
        "./slice/a/hugetlb.2MB.max",
        "./slice/a/memory.min",
    ] {
        assert!(held.contains_key(knob) && before.get(knob) != held.get(knob), "{knob}: {held:#?}");
    }
    assert!(before.len() > 50, "{before:#?}");
    let refused = report.section("while the daemon runs");
    assert!(refused.contains("has the ledger open") && refused.contains("stop it first"), "{refused}");

    let mut after = tree(&report, "after");
    // The kernel does not accept an empty set for a cgroup with processes; all CPUs and all nodes have the same effect.
    for (knob, value) in &mut after {
        let all = [("/cpuset.cpus", "0-7"), ("/cpuset.mems", "0-1")];
        let is_all = all.iter().any(|(name, all)| knob.ends_with(name) && value == all);
        if is_all && before.get(knob).is_some_and(String::is_empty) {
            value.clear();
        }
    }
    assert_eq!(after, before);
    let restored = report.json("restored");
    assert_eq!(restored["left"], serde_json::json!([]));
    let of = |cgroup: &str| {
        let all = restored["cgroups"].as_array().unwrap();
        all.iter().find(|of| of["cgroup"] == cgroup).unwrap_or_else(|| panic!("{restored:#}"))["knobs"]
            .clone()
    };
    assert_eq!(of("/slice/a")["memory.min"], "0");
    assert_eq!(of("/plain")["cpuset.cpus"], "");
    assert_eq!(of("/bare")["cgroup.subtree_control"], "");
    assert_eq!(report.section("again"), "0 cgroups have their previous settings.");

    let in_use = report.json("in use");
    let left = serde_json::json!([{
        "name": "/bare",
        "reason": format!("the controller memory stays enabled: /bare/theirs has memory.high {}", 40 << 20),
    }]);
    assert_eq!(in_use["left"], left);
    assert_eq!(report.section("in use: controllers"), "memory");
    let text = report.section("no longer in use");
    assert!(text.ends_with("1 cgroups have their previous settings."), "{text}");
    assert_eq!(report.section("no longer in use: controllers"), "");
}

//! CPU isolation: cgroups without exclusive CPUs are confined to the shared pool, and restored later. Also declared guarantees,
//! dry runs, and scheduler partitions.

use std::{collections::BTreeMap, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;

/// Returns `cpuset.cpus` and the allowed CPUs of the process, for each cgroup of a section.
fn sets(report: &ScriptReport, name: &str) -> BTreeMap<String, [String; 2]> {
    let line = |line: &str| {
        let (cgroup, rest) = line.split_once(" [")?;
        let (set, allowed) = rest.split_once(']')?;
        Some((cgroup.to_owned(), [set.to_owned(), allowed.trim().to_owned()]))
    };
    let lines = report.section(name).lines();
    let sets: BTreeMap<_, _> = lines
        .map(|text| line(text).unwrap_or_else(|| panic!("section {name:?}: cannot read {text:?}")))
        .collect();
    assert!(sets.len() >= 2, "section {name:?} has too few cgroups:\n{report}");
    sets
}

/// Returns the shared pool, and the CPUs of each guarantee.
fn guarantees(report: &ScriptReport, name: &str) -> (String, BTreeMap<String, String>) {
    let view = report.json(name);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let cpus = view["allocations"].as_array().unwrap().iter();
    (text(&view["sharedCpus"]), cpus.map(|held| (text(&held["name"]), text(&held["cpus"]))).collect())
}

/// Asserts that all other cgroups, except for the exempt one, are confined to the shared pool, by knob and by process.
fn assert_herded(report: &ScriptReport, name: &str, allocations: &str) {
    let (shared, cpus) = guarantees(report, allocations);
    for (cgroup, [set, allowed]) in sets(report, name) {
        let own = cpus.get(&cgroup).or_else(|| cpus.get(cgroup.trim_start_matches("numaward/")));
        match (cgroup.as_str(), own) {
            (_, Some(own)) => assert_eq!([&set, &allowed], [own, own], "{name}: {cgroup}"),
            // It has no processes itself, and children with and without exclusive CPUs.
            ("slice", None) if cpus.contains_key("slice/a") => {
                assert!(["", "0-3"].contains(&set.as_str()), "{name}: {cgroup} has {set}");
            }
            ("exempt", None) => assert_eq!([set.as_str(), allowed.as_str()], ["", "0-3"], "{name}: {cgroup}"),
            // It had CPUs 0-1; CPU 0 is never exclusive.
            ("pinned", None) => {
                assert!(["0", "0-1"].contains(&set.as_str()) && set == allowed, "{name}: {set}");
            }
            _ => assert_eq!([&set, &allowed], [&shared, &shared], "{name}: {cgroup}"),
        }
    }
}

fn check(machine: GuestTopology) {
    let Some(bench) = TestEnvironment::open() else { return };
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(8)), include_str!("herd.sh"));

    for (cgroup, [set, _]) in sets(&report, "before") {
        assert_eq!(set, if cgroup == "pinned" { "0-1" } else { "" }, "{cgroup}: nothing is exclusive yet");
    }
    let zero = report.section("zero metrics");
    for series in ["herd_cgroups{state=\"herded\"} 0", "declared_guarantees{state=\"refused\"} 0"] {
        assert!(zero.contains(&format!("numaward_{series}")), "{series} in\n{zero}");
    }

    let (shared, cpus) = guarantees(&report, "herded allocations");
    assert_eq!((cpus.len(), shared.contains(&cpus["first"])), (1, false), "{shared} {cpus:?}");
    let herded = sets(&report, "herded");
    assert_eq!(herded["slice"][0], shared, "the slice is herded as a whole");
    assert_eq!(herded["slice/a"], [String::new(), shared.clone()], "with all below");
    assert_eq!(herded["other"], [shared.clone(), shared.clone()]);
    assert_eq!(herded["exempt"], ["", "0-3"]);
    assert_eq!(herded["numaward/first"], [cpus["first"].clone(), cpus["first"].clone()]);

    assert_herded(&report, "opened", "opened allocations");
    assert_eq!(sets(&report, "opened")["slice/b"][0], guarantees(&report, "opened allocations").0);
    assert_herded(&report, "late", "opened allocations");
    let herding = &report.json("opened allocations")["enforcement"]["herding"];
    assert_eq!(
        (&herding["mode"], &herding["cgroups"][0]["state"]),
        (&"on".into(), &"herded".into()),
        "{herding}"
    );

    assert_herded(&report, "restarted", "restarted allocations");
    // A knob that already has the right value is not written again.
    report.assert_no_writes("restarted writes");

    let dry = sets(&report, "dry run");
    for cgroup in ["other", "slice/a", "slice/b", "numaward/first"] {
        assert_eq!(dry[cgroup][1], "0-3", "{cgroup} has everything back");
    }
    assert_eq!(dry["pinned"], ["0-1", "0-1"]);
    let view = report.json("dry run allocations");
    assert_eq!(
        (&view["enforcement"]["mode"], view["allocations"].as_array().unwrap().len()),
        (&"dry-run".into(), 2)
    );
    assert_eq!(view["allocations"][0]["enforced"], false, "{view}");
    assert!(report.section("dry run status").contains("enforcement dry-run, CPU isolation dry-run"));
    assert_herded(&report, "on again", "on again allocations");

    for (cgroup, [set, allowed]) in sets(&report, "given back") {
        let all = if cgroup == "pinned" { "0-1" } else { "0-3" };
        // The kernel refuses to empty the set of a cgroup with processes; all CPUs have the same effect.
        assert!(set == all || set.is_empty() && cgroup != "pinned", "{cgroup}: {set}");
        assert!(allowed == all || cgroup == "slice", "{cgroup}: {allowed}");
    }

    let (_, cpus) = guarantees(&report, "declared allocations");
    assert_eq!(cpus.len(), 3, "{cpus:?}");
    for (cgroup, [set, allowed]) in sets(&report, "declared") {
        assert_eq!([&set, &allowed], [&cpus[&cgroup], &cpus[&cgroup]], "{cgroup}");
    }
    let waiting = &report.json("declared allocations")["waiting"][0];
    assert_eq!(
        (&waiting["cgroup"], &waiting["declared"]),
        (&"/batch/d".into(), &"/batch/*".into()),
        "{waiting}"
    );
    assert!(waiting["reason"].as_str().unwrap().contains("cpu requested 1, free 0"), "{waiting}");
    let refused = report.section("release of a declared one");
    assert!(refused.contains("declared in the configuration") && refused.ends_with("code 1"), "{refused}");
    let (_, later) = guarantees(&report, "given later");
    assert_eq!((&later["batch/d"], later.contains_key("batch/a")), (&cpus["batch/a"], false), "{later:?}");
    assert!(report.section("declared metrics").contains("{state=\"held\"} 3"));

    assert_eq!(report.section("partition"), "root");
    assert_herded(&report, "partition herd", "partition allocations");
    assert_eq!(report.section("partition released"), "member");
    let nested = report.section("nested partition");
    let version = bench.kernel().version().to_owned();
    if version.starts_with("6.1.") {
        assert!(nested.contains("nested ones need Linux 6.7") && nested.ends_with("code 125"), "{nested}");
    } else {
        // A nested partition requires CAP_SYS_ADMIN, which the daemon drops: it reports the kernel's reason and undoes the
        // request.
        let reason = "the partition is invalid: Enable partition not permitted";
        assert!(nested.contains(reason) && nested.ends_with("code 125"), "{nested}");
    }
    let end = sets(&report, "at the end");
    assert_eq!([&end["other"][1], &end["pinned"][1], &end["slice/b"][1]], ["0-3", "0-1", "0-3"]);
}

#[test]
fn confines_cgroups_on_two_nodes() {
    check(GuestTopology::parse(None, Some("2,2"), Some("768M,768M"), None).unwrap());
}

#[test]
fn confines_cgroups_on_four_nodes() {
    check(GuestTopology::parse(None, Some("1,1,1,1"), Some("512M,384M,384M,384M"), None).unwrap());
}

//! Guarantees of memory alone and of fractions of CPUs, and resizes of guarantees in use.

use std::collections::BTreeMap;

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Returns the knobs of a section, by name.
fn knobs<'a>(report: &'a ScriptReport, section: &str) -> BTreeMap<&'a str, &'a str> {
    report.section(section).lines().filter_map(|line| line.split_once(' ')).collect()
}

#[test]
fn resizes_guarantees_in_place() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("resize.sh"));

    let bytes = |mib: u64| (mib * MIB).to_string();
    let memory = knobs(&report, "memory alone");
    let node: u32 = memory["cpuset.mems"].parse().unwrap_or_else(|_| panic!("one node: {memory:?}"));
    assert_eq!((memory["memory.min"], memory["memory.max"]), (&*bytes(256), &*bytes(256)));
    let anon = &report.numa_stat("memory alone numa_stat")["anon"];
    assert_near("its anonymous memory", anon[&node], 128 * MIB, 128 * MIB, 4);
    assert_near("elsewhere", anon[&(1 - node)], 0, 128 * MIB, 2);
    let part = knobs(&report, "a part of a CPU");
    assert!(["0", "1"].contains(&part["cpuset.mems"]), "{part:?}");

    let held = knobs(&report, "held");
    assert_eq!((held["cpuset.cpus"], held["cpuset.mems"]), ("2-3", "1"), "CPU 0 is kept for the system");
    for shared in [&memory, &part] {
        assert!(!shared["cpuset.cpus"].contains(['2', '3']), "exclusive to another: {shared:?}");
    }
    assert!(report.section("dry").ends_with("code 0"), "{}", report.section("dry"));
    assert_eq!(knobs(&report, "after dry"), held, "a dry run changes nothing");
    assert!(report.section("shrink").ends_with("code 0"), "{}", report.section("shrink"));
    let shrunk = knobs(&report, "shrunk");
    assert!(["2", "3"].contains(&shrunk["cpuset.cpus"]) && shrunk["cpuset.mems"] == "1", "{shrunk:?}");
    assert!(report.section("grow").ends_with("code 0"), "{}", report.section("grow"));
    let grown = knobs(&report, "grown");
    assert_eq!((grown["cpuset.cpus"], grown["cpuset.mems"]), ("2-3", "1"));
    assert_eq!((grown["memory.min"], grown["memory.max"]), (&*bytes(192), &*bytes(192)));

    let refused = report.section("refused");
    assert!(
        refused.ends_with("code 3") && refused.contains("node 1") && refused.contains("free"),
        "{refused}"
    );
    let below = report.section("below what is used");
    assert!(below.ends_with("code 1") && below.contains("uses"), "{below}");
    let after = report.section("after refusals");
    assert!(
        after.starts_with("cpuset.cpus 2-3") && after.contains(&format!("memory.max {}", bytes(256))),
        "{after}"
    );

    let adopted = report.json("adopted");
    let cpus: BTreeMap<_, _> = adopted["allocations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|held| (held["name"].as_str().unwrap(), held["cpus"].as_str().unwrap()))
        .collect();
    assert_eq!(cpus, BTreeMap::from([("held", "2-3"), ("memory", ""), ("part", "")]));
    assert_eq!(knobs(&report, "adopted knobs"), grown);
    let released = report.json("released");
    assert_eq!(released["allocations"].as_array().unwrap().len(), 0, "{released}");
    assert_eq!(released["nodes"].as_array().unwrap().len(), 2, "{released}");
    for node in released["nodes"].as_array().unwrap() {
        assert_eq!(node["memory"][0]["promisedBytes"], 0, "{node}");
    }
}

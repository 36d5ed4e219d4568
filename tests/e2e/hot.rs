//! Access monitoring with DAMON: reports which memory of a workload is accessed, and on which node it is.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Returns the bytes on a node in accessed or idle areas. The program shares its CPU with another busy program.
fn bytes_on(hot: &Value, node: u64, is_accessed: bool) -> u64 {
    let areas = hot["areas"].as_array().unwrap().iter();
    let of = areas.filter(|area| {
        let percent = area["accessedPercent"].as_f64().unwrap();
        area["region"] == "[anonymous]" && if is_accessed { percent >= 50.0 } else { percent < 10.0 }
    });
    let nodes = of.flat_map(|area| area["nodes"].as_array().unwrap());
    nodes.filter(|on| on["node"] == node).map(|on| on["bytes"].as_u64().unwrap()).sum()
}

fn monitors(report: &ScriptReport, section: &str) -> u32 {
    report.section(section).trim().parse().unwrap_or_else(|_| panic!("{section}: {report}"))
}

#[test]
fn finds_pages_accessed_remotely() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("640M,640M"), None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(6));
    let report = boot(&vm, include_str!("hot.sh"));

    // A quarter of 64 MiB is accessed, all of it on node 1, from node 0.
    let hot = report.json("hot as JSON");
    let (used, unused) = (bytes_on(&hot, 1, true), bytes_on(&hot, 1, false));
    assert!((12 * MIB..=20 * MIB).contains(&used), "{used} bytes are used: {report}");
    assert!((40 * MIB..=52 * MIB).contains(&unused), "{unused} bytes are not: {report}");
    // The pages that the program got before its policy, such as those of its thread, are on node 0.
    let own = bytes_on(&hot, 0, true);
    assert!(own < MIB / 16, "{own} bytes on node 0 are used: {report}");
    let first = &hot["areas"][0];
    assert!(first["remotePercent"].as_f64().unwrap() > 90.0, "{report}");
    let process = &hot["processes"][0];
    assert_eq!((&process["command"], &process["ranOn"][0]["node"]), (&"numaward-load".into(), &0.into()));
    assert!(process["monitorMillis"].is_u64(), "{report}");
    assert!(report.section("hot").contains("numaward-load) ran on: node 0"), "{report}");

    // The daemon removes its monitors and leaves those of other users unchanged.
    assert_eq!(monitors(&report, "afterwards"), 0, "{report}");
    let interrupted = report.section("interrupted");
    assert!(interrupted.contains("not accessed: ") && interrupted.ends_with("\ncode 0"), "{report}");
    assert_eq!(monitors(&report, "after an interrupt"), 0, "{report}");
    assert!(report.section("in use").contains("another program uses DAMON (monitors: 1)"), "{report}");
    assert_eq!(monitors(&report, "after that"), 1, "{report}");
    assert!(report.section("nobody").contains("there is no workload named \"nobody\""), "{report}");
}

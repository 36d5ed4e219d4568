//! Call chains: names the function that allocates on another node, and none if all allocations are local.

use std::{path::Path, process::Command, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Builds the load with frame pointers, statically linked.
fn build(folder: &Path) -> String {
    let program = folder.join("fills");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/stacks.c");
    let mut compiler = Command::new("cc");
    // With optimization, a leaf function would have no frame.
    compiler.args(["-O0", "-static", "-fno-omit-frame-pointer", "-o"]);
    let status = compiler.arg(&program).arg(source).status().unwrap();
    assert!(status.success(), "{status}");
    program.to_str().unwrap().to_owned()
}

/// Returns the lines of folded stacks: frames and bytes.
fn folded<'a>(report: &'a ScriptReport, section: &str) -> Vec<(&'a str, u64)> {
    let lines = report.section(section).lines().filter(|line| !line.is_empty());
    let parsed = lines.map(|line| {
        let (frames, bytes) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}: {report}"));
        (frames, bytes.parse().unwrap_or_else(|_| panic!("{line}: {report}")))
    });
    parsed.collect()
}

fn bytes_with(stacks: &[(&str, u64)], part: &str) -> u64 {
    stacks.iter().filter(|(frames, _)| frames.contains(part)).map(|(_, bytes)| bytes).sum()
}

#[test]
fn names_function_of_remote_pages() {
    let Some(bench) = TestEnvironment::open() else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path());
    let machine = GuestTopology::parse(None, Some("2,2"), Some("640M,640M"), None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(6)).file(program, "/bin/fills");
    let report = boot(&vm, include_str!("stacks.sh"));

    let off = report.section("off");
    assert!(off.contains("observe.callChains.enabled"), "{report}");

    let remote = folded(&report, "remote");
    let filled = bytes_with(&remote, ";main;outer_caller;fill_pages;");
    // Each CPU retains less than one sample.
    assert!((31 * MIB..=33 * MIB).contains(&filled), "{filled} bytes: {report}");
    let faults = bytes_with(&remote, "fill_pages;asm_exc_page_fault_[k];");
    assert!(faults >= 31 * MIB, "{faults} bytes: {report}");
    assert_eq!(report.section("remote on node 0").trim(), "", "{report}");
    let json = report.json("remote as JSON");
    assert_eq!(json["sampleEvery"], 16, "{report}");
    assert_eq!(json["lost"], 0, "{report}");
    assert_eq!(json["stacks"][0]["node"], 1, "{report}");

    let profile: Vec<&str> = report.section("remote for pprof").lines().collect();
    for name in ["remote_allocations", "bytes", "numa_node", "outer_caller", "fill_pages"] {
        assert!(profile.iter().any(|line| line.contains(name)), "{name}: {report}");
    }

    // Libraries and the shell allocated remotely before; the load itself did not.
    let counted = report.samples("counted", "numaward_memory_allocated_bytes_total");
    let labels = "workload=\"local\",numa_node=\"0\",locality=\"local\"";
    assert!(counted[labels] >= 31.0 * f64::from(1 << 20), "{counted:#?}");
    let local = folded(&report, "local");
    assert_eq!(bytes_with(&local, "fill_pages"), 0, "{report}");
    assert!(local.iter().map(|(_, bytes)| bytes).sum::<u64>() < MIB, "{report}");

    // The C library maps a large allocation separately.
    let regions = report.json("regions as JSON");
    let all = regions["regions"].as_array().unwrap();
    let anonymous = all.iter().find(|region| region["name"] == "[anonymous]").unwrap();
    let on = |node: u64| {
        let nodes = anonymous["nodes"].as_array().unwrap();
        nodes.iter().find(|on| on["node"] == node).map_or(0, |on| on["bytes"].as_u64().unwrap())
    };
    assert!(on(1) >= 32 * MIB && on(0) < MIB, "{report}");
    assert_eq!(anonymous.get("offBytes"), None, "there is no guarantee: {report}");

    assert!(report.section("nobody").contains("there is no workload named \"nobody\""), "{report}");
    let accesses = folded(&report, "accesses");
    assert!(bytes_with(&accesses, "main;use_pages") > 0, "{report}");
    // Without the process, the names are not available.
    let ended = report.section("ended");
    assert!(ended.contains("[ended]") && !ended.contains("fill_pages"), "{report}");
}

//! Hosts with cgroup v1. If a cgroup v2 hierarchy exists too, workloads are observed through it; otherwise `doctor` and the
//! daemon report the missing hierarchy.

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

fn check(doctor: &serde_json::Value, name: &str) -> (String, String) {
    let mut checks = doctor.as_array().unwrap().iter();
    let found = checks.find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}: {doctor}"));
    let text = |key: &str| found[key].as_str().unwrap().to_owned();
    (text("verdict"), text("finding"))
}

fn degraded(report: &ScriptReport, round: &str) -> Option<String> {
    let status = report.json(&format!("{round} status"));
    let mut parts = status["degraded"].as_array().unwrap().iter();
    let found = parts.find(|part| part["part"] == "cgroups")?;
    Some(found["reason"].as_str().unwrap().to_owned())
}

#[test]
fn observes_by_v2_or_names_the_reason() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("cgroup_v1.sh"));

    // Only v1: all memory is counted in one sum, and every response has the reason.
    let (verdict, finding) = check(&report.json("legacy doctor"), "cgroup v2");
    assert_eq!(verdict, "fail");
    assert!(finding.contains("cgroup v1"), "{finding}");
    let reason = degraded(&report, "legacy").unwrap();
    assert!(reason.contains("no cgroup v2 hierarchy is mounted"), "{reason}");
    let log = report.section("legacy log");
    assert!(log.contains("guarantees are not available without cgroup v2"), "{log}");
    assert!(report.section("legacy guarantee").ends_with("code 125"), "{report}");

    // v1 and v2: allocations are counted by workload; figures of the controllers are missing.
    let (verdict, finding) = check(&report.json("hybrid doctor"), "cgroup v2");
    assert_eq!(verdict, "warn");
    assert!(finding.contains("/sys/fs/cgroup/unified, beside cgroup v1"), "{finding}");
    for controller in ["controller memory", "controller cpuset"] {
        let (verdict, finding) = check(&report.json("hybrid doctor"), controller);
        assert!(verdict == "warn" && finding.starts_with("missing in cgroup v2"), "{finding}");
    }
    assert_eq!(degraded(&report, "hybrid"), None, "{}", report.section("hybrid status"));
    let counted: f64 = report
        .section("hybrid counted")
        .lines()
        .filter(|line| line.contains("numa_node=\"1\""))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
    let counted = counted as u64;
    assert_near("allocated on node 1", counted, 64 * MIB, 64 * MIB, 3);
    let guarantee = report.section("hybrid guarantee");
    assert!(guarantee.contains("cpuset") && guarantee.ends_with("code 125"), "{guarantee}");
    for round in ["legacy", "hybrid"] {
        assert_eq!(report.section(&format!("{round} end")), "0");
    }
}

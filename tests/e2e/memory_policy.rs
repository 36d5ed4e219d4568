//! `numaward exec --memory-policy`: a command with guaranteed memory on two nodes has the policy over these nodes, and its pages
//! are distributed accordingly.

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

/// Returns the pages of the 128 MiB load on each node.
fn pages(report: &str) -> [u64; 2] {
    let report: Value = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {report}"));
    let pages = ["0", "1"].map(|node| report["pages_by_node"][node].as_u64().unwrap_or(0));
    assert_eq!(pages[0] + pages[1], 128 << 8, "{report}");
    pages
}

#[test]
fn pages_follow_memory_policy() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("512M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("memory_policy.sh"));

    assert_eq!(report.section("policy of none"), "default");
    assert_eq!(report.section("policy of bind"), "bind:0-1");
    assert_eq!(report.section("policy of interleave"), "interleave:0-1");
    if bench.kernel().version().starts_with("5.10.") {
        assert!(
            report.section("policy of preferred-many").contains("requires Linux 5.15 or newer"),
            "{report}"
        );
    } else {
        assert_eq!(report.section("policy of preferred-many"), "prefer (many):0-1");
    }
    let weighted = report.section("policy of weighted-interleave");
    let is_old = ["5.10.", "6.1."].iter().any(|old| bench.kernel().version().starts_with(old));
    if is_old {
        assert!(
            weighted.contains("requires Linux 6.9 or newer") && weighted.ends_with("code 125"),
            "{weighted}"
        );
    } else {
        assert_eq!(weighted, "weighted interleave:0-1");
    }

    let [first, second] = pages(report.section("load of none"));
    assert!(first.min(second) == 0, "{first} and {second} pages: without a policy, they are near the CPU");
    let [first, second] = pages(report.section("load of interleave"));
    assert!(first.abs_diff(second) < 256, "{first} and {second} pages");
    if !is_old {
        let [first, second] = pages(report.section("load of weighted-interleave"));
        assert!(first.abs_diff(3 * second) < 1024, "{first} and {second} pages");
    }
    assert!(report.section("described").contains("memory policy interleave"), "{report}");
    assert!(report.section("refused").contains("runs already"), "{report}");
    assert!(
        report.section("refused").ends_with("code 3") || report.section("refused").ends_with("code 1"),
        "{report}"
    );
}

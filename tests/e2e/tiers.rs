//! A machine with a slow node, which the firmware reports: the kernel demotes unused pages to it, and promotes used pages. Guaranteed
//! memory stays in fast memory, and a request for slow memory is placed on the slow node.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

const SLOW: &str = "2";
/// The test runs on x86-64 only.
const PAGE: u64 = 4096;
const KEPT_CGROUP: &str = "numaward/kept";

/// Returns the value of a series in a section with metrics.
fn value(report: &ScriptReport, section: &str, family: &str, labels: &str) -> u64 {
    let begins = format!("{family}{{{labels}}} ");
    let line = report.section(section).lines().find_map(|line| line.strip_prefix(&*begins));
    line.unwrap_or_else(|| panic!("{section}: no {begins}:\n{report}")).parse().unwrap()
}

fn moved(report: &ScriptReport, section: &str, workload: &str, direction: &str) -> u64 {
    let labels = format!("workload=\"{workload}\",direction=\"{direction}\"");
    value(report, section, "numaward_tiering_bytes_total", &labels)
}

fn anon(report: &ScriptReport, section: &str, workload: &str, node: &str) -> u64 {
    let labels = format!("workload=\"{workload}\",numa_node=\"{node}\",type=\"anon\"");
    value(report, section, "numaward_memory_resident_bytes", &labels)
}

#[test]
fn guarantee_stays_in_fast_memory() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine =
        GuestTopology::parse(None, Some("2,2,0"), Some("1G,768M,1G"), None).unwrap().with_slow(&[2]).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(8)), include_str!("tiers.sh"));

    assert!(report.section("doctor").contains("nodes 0-1, then 2; unused pages are demoted"), "{report}");
    for name in [KEPT_CGROUP, "idle"] {
        assert_eq!(moved(&report, "before", name, "demoted"), 0, "{report}");
        assert_eq!(anon(&report, "before", name, SLOW), 0, "{report}");
    }
    assert_eq!(moved(&report, "short", KEPT_CGROUP, "demoted"), 0, "{report}");
    assert_eq!(anon(&report, "short", KEPT_CGROUP, SLOW), 0, "{report}");
    let demoted = moved(&report, "short", "idle", "demoted");
    assert!(demoted > 8 << 20, "{demoted} bytes: {report}");
    let slow = anon(&report, "short", "idle", SLOW);
    assert!(slow.abs_diff(demoted) < 1 << 20, "{slow} bytes are there, {demoted} came: {report}");
    let stat = report.numa_stat("short numa_stat");
    let demotions = stat.iter().filter(|(key, _)| key.starts_with("pgdemote_"));
    let by_kernel = demotions.flat_map(|(_, nodes)| nodes.values()).sum::<u64>() * PAGE;
    assert_eq!((demoted, slow), (by_kernel, stat["anon"][&2]), "{report}");
    println!(
        "{slow} bytes are on the slow node; pages demoted by kswapd {:?}, by others {:?}",
        stat["pgdemote_kswapd"], stat["pgdemote_direct"]
    );
    // Tasks that reclaim memory allocate pages on the slow node that are not theirs.
    let labels = format!("numa_node=\"{SLOW}\",reason=\"reclaim\"");
    let unattributed = value(&report, "reclaimed", "numaward_unattributed_allocated_bytes_total", &labels);
    assert!(unattributed >= slow / 10 * 9, "{unattributed} of {slow} bytes: {report}");
    let promoted = moved(&report, "used", "busy", "promoted");
    assert!(promoted >= 16 << 20, "{promoted} bytes: {report}");
    assert!(report.section("described").contains("moved to slower memory: "), "{report}");

    let pages = |section: &str, node: &str| {
        let load: Value =
            serde_json::from_str(report.section(section)).unwrap_or_else(|error| panic!("{error}: {report}"));
        load["pages_by_node"][node].as_u64().unwrap_or(0)
    };
    assert_eq!(pages("slow", SLOW), 32 << 8, "{report}");
    let (fast, slow) = (pages("weighted", "0") + pages("weighted", "1"), pages("weighted", SLOW));
    assert_eq!(fast + slow, 128 << 8, "{report}");
    assert!(fast.abs_diff(3 * slow) <= 4, "{fast} and {slow} pages are not 3 to 1: {report}");
}

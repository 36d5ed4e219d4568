//! The headroom guard keeps guaranteed memory available on a node that another workload fills with page cache.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Returns a script after the common part.
fn script(script: &str) -> String {
    format!("{}\n{script}", include_str!("guard_common.sh"))
}

#[test]
fn guard_stops_page_cache_hog() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,768M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(15)), &script(include_str!("guard.sh")));

    // Without the guard, the hog fills the node, and the guaranteed memory is not available.
    let node: u32 = report.section("off node").parse().unwrap();
    let hog = report.numa_stat("off hog");
    let written = report.section("off parts").parse::<u64>().unwrap() * 8 * MIB;
    assert!(hog["file"][&node] > written - 50 * MIB, "the hog writes where it runs: {hog:?}");
    assert_eq!(report.section("off mems"), "");
    let killed = report.section("off killed");
    assert!(killed != "0", "the workload is killed when it uses its guaranteed memory: {killed}");
    let events = report.json("off events")["events"].as_array().unwrap().clone();
    assert!(events.iter().all(|event| event["kind"] != "headroom_low"), "{events:#?}");

    // With the guard, further pages of the hog go to another node.
    let node: u32 = report.section("act node").parse().unwrap();
    let other = 1 - node;
    assert_eq!(report.section("act mems"), other.to_string());
    let hog = report.numa_stat("act hog");
    assert!(hog["file"][&other] > 50 * MIB, "{hog:?}");
    assert_eq!(report.section("act killed"), "0");
    let db = report.json("act db");
    assert_eq!(db["pages_by_node"][node.to_string()], 280 * MIB / 4096, "{db}");
    let metrics = report.section("act metrics");
    for line in [
        format!("numaward_numa_miss_bytes_total{{workload=\"numaward/db\",numa_node=\"{node}\"}} 0"),
        format!("numaward_node_headroom_low{{numa_node=\"{node}\"}} 1"),
        "numaward_guard_steered_cgroups 1".to_owned(),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}:\n{metrics}");
    }
    let events = report.section("act events");
    // Page cache can grow past both thresholds between two readings of the node.
    let shortages = ["may soon not have", "does not have"]
        .map(|words| format!("Node {node} {words} the memory that is guaranteed on it"));
    assert!(shortages.iter().any(|words| events.contains(words)), "{shortages:?}: {events}");
    assert!(events.contains(&format!("/hog is kept off node {node}")), "{events}");

    // The restriction outlives a crash, and ends as soon as the node has free memory again.
    assert_eq!(report.section("act after a crash"), other.to_string());
    let found = report.section("act in the end");
    assert!(found.is_empty() || found == "0-1", "{found}");
    let events = report.section("act last events");
    assert!(events.contains(&format!("/hog may use nodes {node} again")), "{events}");
}

#[test]
fn guard_reclaims_unused_page_cache() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,768M"), None).unwrap();
    let mut disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file_mut().set_len(1 << 30).unwrap();
    let vm = bench.vm(machine).disk(disk.path()).limit(Duration::from_mins(15));
    let report = boot(&vm, &script(include_str!("guard_reclaim.sh")));
    let number = |name: &str| report.section(name).parse::<u64>().unwrap();

    // Without the guard: page cache counts as available memory, so no workload is moved, and the kernel reclaims it on demand.
    let node: u32 = report.section("off node").parse().unwrap();
    assert!(number("off free") < 100_000, "the node is full");
    assert!(report.numa_stat("off hog")["file"][&node] > 300 * MIB);
    assert!(number("off scanned") > 0);
    assert!(
        !report.json("off events")["events"]
            .as_array()
            .unwrap()
            .iter()
            .any(|event| { event["message"].as_str().unwrap().contains("is dropped,") })
    );

    // The guard reclaims it in advance: the guaranteed memory is available at once.
    let node: u32 = report.section("on node").parse().unwrap();
    assert!(number("on free") > 300 * 1024, "{}", report.section("on free"));
    assert_eq!(number("on scanned"), 0, "nothing has to be reclaimed");
    assert_eq!(report.json("on db")["pages_by_node"][node.to_string()], 280 * MIB / 4096);
    let events = report.section("on events");
    assert!(events.contains("page cache of workloads without a guarantee is dropped,"), "{events}");
    let metrics = report.section("on metrics");
    let name = format!("numaward_guard_reclaimed_bytes_total{{numa_node=\"{node}\"}} ");
    let dropped = metrics.lines().find_map(|line| line.strip_prefix(&name)).unwrap().parse::<u64>().unwrap();
    assert!(dropped > 100 * MIB, "{metrics}");
    assert!(metrics.lines().any(|line| line == "numaward_guard_steered_cgroups 0"), "{metrics}");

    // Page cache that is in use is read again, and the guard does not reclaim it again.
    let events = report.section("used events");
    assert!(events.contains("page cache of workloads without a guarantee is dropped,"), "{events}");
}

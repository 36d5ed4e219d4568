//! Hugepages of pools are counted by workload, where they are allocated and where they are resident. Those outside the guaranteed
//! nodes count as misses.

use std::collections::BTreeMap;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Returns the non-zero samples of workloads in a section, by their labels. Asserts that zero samples exist too.
fn samples<'a>(report: &'a ScriptReport, section: &str, metric: &str) -> BTreeMap<&'a str, u64> {
    let samples = report.samples(section, &format!("numaward_{metric}"));
    let of_workload = |(labels, bytes): (&'a str, f64)| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
        let bytes = bytes as u64;
        Some((labels.strip_prefix("workload=")?, bytes))
    };
    samples.into_iter().filter_map(of_workload).filter(|(_, bytes)| *bytes > 0).collect()
}

#[test]
fn counts_hugepages_by_node() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,768M"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("hugepages.sh"));
    let probes = report.section("probes");
    let attached = "{probe=\"hugepages\",mode=\"fexit\",reason=\"\"}";
    assert!(probes.contains(attached), "{probes}");
    let nothing = BTreeMap::new();
    assert_eq!(samples(&report, "before", "hugepages_allocated_bytes_total"), nothing);
    let before = report.section("before");
    assert!(
        before.contains("kind=\"hugepages-2Mi\"") && !before.contains("1Gi"),
        "of pools with pages: {before}"
    );

    let guaranteed = report.json("guarantee")["nodes"].as_str().unwrap().parse::<u32>().unwrap();
    let taken = samples(&report, "after", "hugepages_allocated_bytes_total");
    let expected = BTreeMap::from([
        ("\"local\",numa_node=\"0\",kind=\"hugepages-2Mi\",locality=\"local\"", 16 * MIB),
        ("\"remote\",numa_node=\"1\",kind=\"hugepages-2Mi\",locality=\"remote\"", 16 * MIB),
        ("\"spread\",numa_node=\"0\",kind=\"hugepages-2Mi\",locality=\"remote\"", 8 * MIB),
        ("\"spread\",numa_node=\"1\",kind=\"hugepages-2Mi\",locality=\"local\"", 8 * MIB),
        ("\"kept\",numa_node=\"0\",kind=\"hugepages-2Mi\",locality=\"local\"", 8 * MIB),
        ("\"kept\",numa_node=\"1\",kind=\"hugepages-2Mi\",locality=\"remote\"", 4 * MIB),
    ]);
    assert_eq!(taken, expected);
    let resident = samples(&report, "after", "memory_resident_bytes");
    let expected = BTreeMap::from([
        ("\"local\",numa_node=\"0\",type=\"hugepages-2Mi\"", 16 * MIB),
        ("\"remote\",numa_node=\"1\",type=\"hugepages-2Mi\"", 16 * MIB),
        ("\"spread\",numa_node=\"0\",type=\"hugepages-2Mi\"", 8 * MIB),
        ("\"spread\",numa_node=\"1\",type=\"hugepages-2Mi\"", 8 * MIB),
        ("\"kept\",numa_node=\"0\",type=\"hugepages-2Mi\"", 8 * MIB),
        ("\"kept\",numa_node=\"1\",type=\"hugepages-2Mi\"", 4 * MIB),
    ]);
    assert_eq!(resident, expected);
    let book = report.section("kernel's book");
    for line in ["local total=16777216 N0=16777216 N1=0", "kept total=12582912 N0=8388608 N1=4194304"] {
        assert!(book.lines().any(|found| found == line), "{line}: {book}");
    }

    let (other, outside) = if guaranteed == 0 { (1, 4 * MIB) } else { (0, 8 * MIB) };
    let label = format!("\"kept\",numa_node=\"{other}\",kind=\"hugepages-2Mi\"");
    let missed = BTreeMap::from([(label.as_str(), outside)]);
    assert_eq!(samples(&report, "after", "numa_miss_bytes_total"), missed);
    assert_eq!(samples(&report, "after", "hugepages_misplaced_bytes"), missed);
    let workloads = report.json("workloads");
    let workloads = workloads["workloads"].as_array().unwrap();
    let kept = workloads.iter().find(|of| of["workload"] == "kept").unwrap();
    let (local, remote) = if other == 0 { (outside, 0) } else { (0, outside) };
    assert_eq!(
        kept["nodes"][other]["hugepages"],
        json!([{
            "size": "2Mi",
            "residentBytes": outside,
            "allocated": {"localBytes": local, "remoteBytes": remote},
            "missedBytes": outside,
        }])
    );

    // Freed pages are no longer resident; their allocation stays counted.
    assert_eq!(samples(&report, "freed", "memory_resident_bytes"), nothing);
    assert_eq!(samples(&report, "freed", "hugepages_misplaced_bytes"), nothing);
    assert_eq!(samples(&report, "freed", "numa_miss_bytes_total"), missed);
    assert_eq!(samples(&report, "freed", "hugepages_allocated_bytes_total"), taken);
    assert_eq!(report.section("log"), "");
    assert_eq!(report.section("exit code"), "0");
}

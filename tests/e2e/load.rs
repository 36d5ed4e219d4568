//! `numaward-load` allocates pages on the requested nodes and reports them, and the kernel confirms the report.

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Asserts the bytes by node, in the load's report and under `booked` in the kernel's `memory.numa_stat`.
fn check(report: &ScriptReport, name: &str, booked: &str, nodes: [u64; 2]) {
    let said = report.json(&format!("{name} report"));
    let total: u64 = nodes.iter().sum();
    assert_eq!(said["bytes"], total, "{name}");
    assert_eq!(said["pages"], total / PAGE, "{name}");
    assert_eq!(said["absent_pages"], 0, "{name}");
    let stat = report.numa_stat(&format!("{name} numa_stat"));
    for (node, expected) in (0_u32..).zip(nodes) {
        let pages = said["pages_by_node"][node.to_string()].as_u64().unwrap_or_default();
        assert_eq!(pages * PAGE, expected, "{name}: the load's own word on node {node}");
        assert_near(&format!("{name}: {booked} of node {node}"), stat[booked][&node], expected, total, 1);
    }
}

#[test]
fn loads_are_placed_or_refused() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("load.sh"));
    let all = 64 * MIB;

    check(&report, "local", "anon", [all, 0]);
    check(&report, "bound", "anon", [0, all]);
    check(&report, "preferred", "anon", [all, 0]);
    check(&report, "interleaved", "anon", [all / 2, all / 2]);
    check(&report, "thp", "anon_thp", [0, all]);
    assert_eq!(report.json("thp report")["transparent_huge_bytes"], all);
    assert_eq!(report.json("local report")["transparent_huge_bytes"], 0);
    check(&report, "tmpfs", "shmem", [0, all]);
    check(&report, "file", "file", [0, all]);
    check(&report, "walking", "anon", [8 * MIB, 8 * MIB]);
    assert_eq!(report.section("left"), "", "the file is removed");

    // `memory.numa_stat` does not contain hugepages.
    let hugetlb = report.json("hugetlb report");
    assert_eq!(hugetlb["pages_by_node"]["1"], 32 * MIB / PAGE);
    assert_near("hugetlb: anon of node 1", report.numa_stat("hugetlb numa_stat")["anon"][&1], 0, 32 * MIB, 1);

    // Each walking thread stays on its CPU.
    let mut threads: Vec<_> = report.section("walking threads").lines().collect();
    threads.sort_unstable();
    assert_eq!(threads, ["Cpus_allowed_list:\t0", "Cpus_allowed_list:\t0-3", "Cpus_allowed_list:\t2"]);
    // Impossible requests are refused with a clear message.
    for (name, message) in [
        ("node", "there is no node 7 with memory: this machine has 0-1"),
        ("hugepages", "not enough free hugepages"),
        ("pool", "the policy's nodes are full"),
        ("cpu", "cannot run on CPU 77"),
        ("cgroup", "cannot enter the cgroup through /tmp/cgroup.procs"),
        ("cpuset", "cannot set the memory policy bind:1"),
        ("thp", "transparent huge pages are off"),
    ] {
        let said = report.section(&format!("refused {name}"));
        assert!(said.starts_with("error: ") && said.contains(message), "{name}: {said}");
    }
}

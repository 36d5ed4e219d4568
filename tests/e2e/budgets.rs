//! A workload on one node and a workload on both nodes share a node, as in the example of the Kubernetes blog on the Memory
//! Manager (5 GiB and 10 GiB), scaled down. With budgets both run; without budgets, one of the two is killed.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;
/// Tolerated excess over a budget: 2 %, at least 4 MiB, plus pages that are still in per-CPU counters.
const TOLERANCE: u64 = 8 * MIB;

/// Returns the guaranteed bytes on a node.
fn guaranteed(report: &ScriptReport, section: &str, node: u32) -> u64 {
    let all = report.json(section);
    let of_node = all["nodes"].as_array().unwrap().iter().find(|of| of["node"] == node).unwrap();
    let memory = of_node["memory"].as_array().unwrap().iter().find(|of| of["kind"] == "memory").unwrap();
    memory["promisedBytes"].as_u64().unwrap()
}

fn value(metrics: &str, series: &str) -> u64 {
    let found = metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("{series} in\n{metrics}"))
}

#[test]
fn budgets_let_workloads_share_a_node() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1280M,1G"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(15)), include_str!("budgets.sh"));

    for run in ["on", "off"] {
        let node: u32 = report.section(&format!("{run} node")).parse().unwrap();
        // Both workloads have guaranteed memory on the node, and the spanning workload took more than its share.
        let share = guaranteed(&report, &format!("{run} guaranteed"), node) - 200 * MIB;
        let before = report.json(&format!("{run} before"));
        let taken = before["pages_by_node"][node.to_string()].as_u64().unwrap() * 4096;
        assert!(taken > share + 20 * MIB, "{run}: {taken} of {share}");
        let wide = report.numa_stat(&format!("{run} wide"))["anon"][&node];
        let killed = report.section(&format!("{run} killed"));
        let metrics = report.section(&format!("{run} metrics"));
        let moved = value(metrics, "numaward_budget_moved_bytes_total{outcome=\"moved\"}");
        let events = report.section(&format!("{run} events"));
        if run == "off" {
            assert!(wide > share + 20 * MIB, "it keeps what it took: {wide} of {share}");
            assert!(killed.lines().any(|count| count != "0"), "somebody is killed: {killed}");
            assert!(report.json("off events")["events"].is_array(), "{events}");
            assert_eq!((moved, events.contains("budget_exceeded")), (0, false));
            assert!(report.section("off capabilities").ends_with("800002"), "nobody is to be traced");
            continue;
        }
        assert!(wide <= share + TOLERANCE, "{wide} of {share}");
        assert_eq!(killed.lines().collect::<Vec<_>>(), ["0", "0"], "nobody is killed");
        let single = report.json("on single");
        assert_eq!(single["pages_by_node"][node.to_string()], 180 * MIB / 4096, "{single}");
        // Some pages may have moved before the last page was touched.
        assert!(moved + TOLERANCE >= taken - share, "{moved} moved of {}", taken - share);
        for words in ["more on node", "no more than its share on node"] {
            assert!(events.contains(words), "{words}: {events}");
        }
        for workload in ["single", "wide"] {
            let series = format!(
                "numaward_numa_miss_bytes_total{{workload=\"numaward/{workload}\",numa_node=\"{node}\"}}"
            );
            assert_eq!(value(metrics, &series), 0, "{metrics}");
        }
    }
}

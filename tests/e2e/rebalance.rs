//! Rebalancing: a workload that runs, writes memory and forks moves to another node to free capacity for a request, without a
//! miss. If the move is cancelled or the daemon is killed, the workload is on its previous node again.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Returns name, CPUs and nodes of the only guarantee in a section.
fn held(report: &ScriptReport, section: &str) -> [String; 3] {
    let view = report.json(section);
    let [held] = view["allocations"].as_array().unwrap().as_slice() else { panic!("{section}: {view}") };
    ["name", "cpus", "nodes"].map(|key| held[key].as_str().unwrap().to_owned())
}

/// Returns the guaranteed memory on a node, in MiB.
fn guaranteed_mib(report: &ScriptReport, section: &str, node: usize) -> u64 {
    let view = report.json(section);
    let kinds = view["nodes"][node]["memory"].as_array().unwrap();
    let memory = kinds.iter().find(|of| of["kind"] == "memory").unwrap();
    memory["promisedBytes"].as_u64().unwrap() / MIB
}

#[test]
fn moves_workload_without_miss() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(12)), include_str!("rebalance.sh"));

    let before: Vec<_> = report.section("before").lines().collect();
    assert_eq!(before, ["2", "1"], "it is on node 1, one of whose two CPUs it has");
    let zero = report.section("zero metrics");
    for series in
        ["rebalances_total{outcome=\"done\"} 0", "rebalance_running 0", "rebalance_moved_bytes_total 0"]
    {
        assert!(zero.contains(&format!("numaward_{series}")), "{series} in\n{zero}");
    }
    assert!(report.section("refused").ends_with("code 125"), "{}", report.section("refused"));

    let plan = report.json("plan");
    let [of] = plan["moves"].as_array().unwrap().as_slice() else { panic!("{plan}") };
    assert_eq!([&of["workload"], &of["fromNodes"], &of["toNodes"]], ["held", "1", "0"]);
    assert_eq!((&of["bytesSource"], &plan["rate"]["source"]), (&"resident".into(), &"assumed".into()));
    assert_near("bytes of the plan", of["bytes"].as_u64().unwrap(), 256 * MIB, 256 * MIB, 4);
    assert_eq!((&plan["allocation"]["cpus"], &plan["allocation"]["nodes"]), (&"2-3".into(), &"1".into()));
    let text = report.section("plan for people");
    assert!(text.contains("held") && text.contains("1 -> 0") && text.contains("which is assumed"), "{text}");
    let none = report.section("no plan");
    assert!(none.contains("no moves within the limits") && none.ends_with("code 3"), "{none}");

    let cancelled = report.section("cancelled");
    assert!(
        cancelled.starts_with("code 1") && cancelled.contains("Cancelled: it was cancelled"),
        "{cancelled}"
    );
    assert_eq!(report.section("after cancel").lines().collect::<Vec<_>>(), before);
    let stat = report.numa_stat("numa_stat after cancel");
    assert_near("anon of node 0 after the cancel", stat["anon"][&0], 0, 256 * MIB, 2);
    assert_eq!(report.section("killed").lines().collect::<Vec<_>>(), before, "rolled back by the next start");
    for section in ["allocations after cancel", "allocations after kill"] {
        assert_eq!(held(&report, section), ["held", "2", "1"], "{section}");
        assert_eq!([0, 1].map(|node| guaranteed_mib(&report, section, node)), [0, 320], "{section}");
    }

    let done = report.section("rebalance");
    assert!(done.contains("The request fits now.") && done.ends_with("code 0"), "{done}");
    let progress = report.section("progress");
    assert!(progress.contains("held was moved from node 1 to 0"), "{progress}");
    assert_eq!(report.section("after").lines().collect::<Vec<_>>(), ["1", "0"]);
    let stat = report.numa_stat("numa_stat after");
    assert_near("anon of node 0 after", stat["anon"][&0], 256 * MIB, 256 * MIB, 4);
    assert_near("anon of node 1 after", stat["anon"][&1], 0, 256 * MIB, 2);
    let misses = report.samples("misses", "numaward_numa_miss_bytes_total");
    assert!(misses.len() == 2 && misses.values().all(|bytes| *bytes == 0.0), "{misses:?}");

    let figures = report.section("figures");
    for series in ["rebalances_total{outcome=\"done\"} 1", "rebalance_moves_total{outcome=\"moved\"} 1"] {
        assert!(figures.contains(&format!("numaward_{series}")), "{series} in\n{figures}");
    }
    let fits = report.section("fits");
    assert_eq!(
        fits.lines().collect::<Vec<_>>(),
        ["Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t1", "code 0"]
    );
    assert_eq!(report.json("measured")["rate"]["source"], "measured");
    let events = report.json("events");
    let steps: Vec<_> =
        events["events"].as_array().unwrap().iter().map(|of| of["details"]["step"].clone()).collect();
    assert!(
        steps.ends_with(&["started".into(), "moved".into(), "done".into(), "planned".into()]),
        "{steps:?}"
    );
    assert_eq!(report.json("end")["allocations"].as_array().unwrap().len(), 0);
}

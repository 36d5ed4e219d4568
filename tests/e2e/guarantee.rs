//! Guarantees from the request to the cpuset: the kernel and the probes confirm the CPUs and nodes of a command, also after the
//! daemon was killed. A request that cannot be satisfied is refused with the reason.

use std::collections::BTreeSet;

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Returns the value of a series in the Prometheus text format.
fn value(metrics: &str, series: &str) -> Option<u64> {
    metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// The report contains the topology hints for two CPUs and memory that fits on both nodes, and the hint that was chosen.
fn every_hint_is_shown(report: &ScriptReport) {
    let merges = &report.json("explained")["explanation"]["merges"];
    let text = report.section("explained to people");
    let rows: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for (resource, sets) in
        [("cpu", &[("1", true), ("0-1", false)][..]), ("memory", &[("0", true), ("1", true), ("0-1", false)])]
    {
        let hints = merges[0]["hints"].as_array().unwrap();
        let hints = hints.iter().find(|hints| hints["resource"] == resource).unwrap();
        let found: Vec<_> = hints["sets"].as_array().unwrap().iter().collect();
        let found: BTreeSet<_> =
            found.iter().map(|set| (set["nodes"].as_str().unwrap(), set["preferred"] == true)).collect();
        assert_eq!(found, sets.iter().copied().collect(), "{resource}: {merges}");
        for (nodes, preferred) in sets {
            let row = format!("{resource} {nodes} {}", if *preferred { "yes" } else { "no" });
            assert!(rows.contains(&row), "{row}:\n{text}");
        }
    }
    assert_eq!(merges[0]["nodes"], "1");
    assert!(text.ends_with("Result: nodes 1, accepted by the topology policy"), "{text}");
}

#[test]
fn guarantees_outlive_the_daemon() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,768M"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("guarantee.sh"));

    // CPU 0 is reserved for the system, so only node 1 has two exclusive CPUs.
    let zero = report.section("zero metrics");
    for series in [
        "numaward_topology_manager_admission_requests_total",
        "numaward_cpu_manager_pinning_requests_total",
        "numaward_enforcement_writes_total{backend=\"cgroupfs\",knob=\"cpuset.mems\",result=\"error\"}",
        "numaward_drift_total{knob=\"cpuset.cpus\"}",
        "numaward_cpu_manager_exclusive_cpus{numa_node=\"1\"}",
    ] {
        assert_eq!(value(zero, series), Some(0), "{series} in\n{zero}");
    }
    assert_eq!(value(zero, "numaward_cpu_manager_shared_pool_cpus"), Some(4), "{zero}");

    let exec: Vec<_> = report.section("exec").lines().collect();
    assert_eq!(
        exec,
        ["Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t1", "0::/numaward/first", "code 7"],
        "the command runs under its guarantee from its start, and its exit code is passed on"
    );
    let load = report.json("exec load");
    // Linux 6.1 does not report the node of a page that NUMA balancing has just marked.
    let on_node_1 = load["pages_by_node"]["1"].as_u64().unwrap();
    assert_eq!(
        on_node_1 + load["absent_pages"].as_u64().unwrap(),
        128 * MIB / bench.kernel().page_size(),
        "{load}"
    );
    assert_eq!(load["pages_by_node"].as_object().unwrap().len(), 1, "{load}");
    for node in [0, 1] {
        let series =
            format!("numaward_numa_miss_bytes_total{{workload=\"numaward/first\",numa_node=\"{node}\"}}");
        assert_eq!(
            value(report.section("exec misses"), &series),
            Some(0),
            "{}",
            report.section("exec misses")
        );
    }
    assert_eq!(report.json("after exec")["allocations"].as_array().unwrap().len(), 0, "released at its end");
    assert_eq!(report.section("signal"), "code 143");
    assert_eq!(report.section("not found"), "code 127");

    let refused = report.section("refused");
    assert!(refused.contains("node 0: cpu requested 2, free 1, too little"), "{refused}");
    assert!(refused.contains("node 1: cpu requested 2, free 0, too little"), "{refused}");
    assert!(refused.ends_with("code 125"), "{refused}");
    let explained = report.section("would be refused");
    assert!(explained.starts_with("would be refused: ") && explained.ends_with("code 3"), "{explained}");
    assert!(explained.contains("node 0: cpu requested 2, free 1, too little"), "{explained}");
    every_hint_is_shown(&report);
    let bytes = (256 * MIB).to_string();
    assert_eq!(report.section("knobs").lines().collect::<Vec<_>>(), ["2-3", "1", &bytes, &bytes, &bytes]);
    assert_eq!(report.section("the daemon's CPUs"), "0-1", "its own threads keep off exclusive CPUs");
    let stat = report.numa_stat("held numa_stat");
    assert_near("anon of node 1", stat["anon"][&1], 128 * MIB, 128 * MIB, 2);
    assert_eq!(stat["anon"][&0], 0);
    assert_eq!(report.section("repaired"), "2-3", "drift is repaired");

    let adopted = &report.json("adopted")["allocations"];
    assert_eq!((&adopted[0]["name"], &adopted[0]["cpus"]), (&"held".into(), &"2-3".into()), "{adopted}");
    assert_eq!(report.section("adopted knobs"), "2-3");
    // A knob that already has the right value is not written again.
    report.assert_no_writes("adopted writes");
    assert_eq!(report.json("released")["allocations"].as_array().unwrap().len(), 0);

    assert_eq!(report.section("the daemon's CPUs later"), "0-3", "all of them when nothing is held any more");

    let before = report.numa_stat("before guarantee");
    assert_near("anon of node 1 before", before["anon"][&1], 128 * MIB, 128 * MIB, 2);
    let guarantee = report.json("guarantee");
    assert_eq!((&guarantee["nodes"], &guarantee["cpus"]), (&"0".into(), &"1".into()), "{guarantee}");
    let after = report.numa_stat("after guarantee");
    assert_near("anon of node 0 after", after["anon"][&0], 128 * MIB, 128 * MIB, 2);
    assert_near("anon of node 1 after", after["anon"][&1], 0, 128 * MIB, 2);
    let release = report.section("release");
    assert!(release.starts_with("0\nmax\n"), "what was found is given back: {release}");
    assert!(release.contains("no guarantee named \"batch\"") && release.ends_with("code 1"), "{release}");

    let (container, path) = (report.section("container"), format!("/docker/{:0>64}", 7));
    for words in [
        "\"docker/web\" is not the name of a unit that has a cgroup",
        &format!("\n{path}\n"),
        "\"name\": \"web\"",
        &format!("\"cgroup\": \"{path}\""),
    ] {
        assert!(container.contains(words), "{words} in\n{container}");
    }
    // Two nodes, each with local and remote memory.
    assert!(container.lines().any(|line| line == "4"), "{container}");

    let bad = report.section("bad input");
    for words in [
        "invalid value '0' for '--cpus <NUMBER>': not a number of CPUs above 0",
        "invalid value '0' for '--memory <SIZE>': not an amount of memory above 0",
        "invalid value '1gb' for '--memory <SIZE>': not an amount of memory above 0",
        "refused: CPUs: 1000 requested, ",
        "numaward: /nowhere does not exist",
    ] {
        assert!(bad.contains(words), "{words} in\n{bad}");
    }
    assert_eq!(report.section("nothing left"), "");
    assert_eq!(report.section("unreachable"), "code 125\ncode 4");
}

//! Memory is plugged in while the daemon runs: into a node with memory, and into an offline node without memory and CPUs. The
//! daemon notices it and counts pages of it for the right node.

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot_and_change};
use numaward_vm::{GuestNode, GuestTopology};

const MIB: u64 = 1 << 20;
/// Memory that is plugged into each of nodes 1 and 2, in blocks of 128 MiB. It exceeds what the test needs by more than the
/// kernel may keep in lists per CPU: 53 MiB of node 1, which the kernel does not take back before it kills a process.
const PLUGGED_MIB: u64 = 384;

/// Returns the counted bytes of a workload on a node.
fn counted(report: &ScriptReport, name: &str, node: u32) -> u64 {
    let lines = report.section(&format!("{name} counters")).lines();
    let of_node = lines.filter_map(|line| line.strip_prefix(&format!("{node} "))?.split_once(' '));
    of_node.map(|(_, bytes)| bytes.parse::<u64>().unwrap()).sum()
}

fn unknown(report: &ScriptReport, section: &str) -> u64 {
    report.section(section).parse().unwrap()
}

#[test]
fn counts_memory_added_later() {
    let Some(bench) = TestEnvironment::open() else { return };
    // `tp_btf` reads the node from the page, `tracepoint` derives it from the address. Some kernels have only the latter.
    for mode in ["tp_btf", "tracepoint"] {
        let node = |cpus, memory_mib| GuestNode { cpus, memory_mib };
        let nodes = vec![node(2, 512), node(2, 256), node(0, 0)];
        let vm = bench.vm(GuestTopology::with_room(nodes, None, 1024).unwrap());
        let script = format!("mode={mode} plugged={}\n{}", PLUGGED_MIB / 128, include_str!("hotplug.sh"));
        let report = boot_and_change(&vm, &script, "plug memory now", |monitor| {
            monitor.plug_memory(1, PLUGGED_MIB)?;
            monitor.plug_memory(2, PLUGGED_MIB)
        });
        check(&report, mode);
        if report.section("probes").contains("mode=\"tracepoint\"") {
            break;
        }
    }
}

fn check(report: &ScriptReport, mode: &str) {
    // Kernels whose `tp_btf` loses events use `tracepoint` in both cases.
    let probes = report.section("probes");
    assert!(
        probes.contains("mode=\"tracepoint\"") || (mode == "tp_btf" && probes.contains("mode=\"tp_btf\""))
    );
    assert_eq!(report.json("before")["nodes"].as_array().unwrap().len(), 2, "node 2 is not there yet");

    // A guarantee that was released restricts its workload to no nodes, also not to those of that time.
    let nodes = ["with guarantee", "after release", "after plugging"]
        .map(|when| report.section(&format!("nodes {when}")));
    assert_eq!(nodes, ["1", "0-1", "0-2"], "{report}");

    // Node 1 had 256 MiB at first.
    for (name, node, size) in [("late", 2, 64 * MIB), ("filling", 1, 288 * MIB)] {
        assert_near(name, counted(report, name, node), size, size, 1);
        let resident = report.numa_stat(&format!("{name} numa_stat"))["anon"][&node];
        assert_near(name, resident, size, size, 1);
    }
    assert_eq!(
        unknown(report, "unknown at the end"),
        unknown(report, "unknown"),
        "every node is known by now"
    );
    assert_eq!(report.json("status")["degraded"], serde_json::json!([]));

    let nodes = report.json("after");
    let node = &nodes["nodes"][2];
    assert_eq!((&node["node"], &node["cpus"]), (&2.into(), &"".into()));
    assert_eq!(node["memory"].as_array().unwrap().last().unwrap()["totalBytes"], PLUGGED_MIB * MIB);
    assert!(node["allocated"]["remoteBytes"].as_u64().unwrap() >= 63 * MIB, "{node}");
}

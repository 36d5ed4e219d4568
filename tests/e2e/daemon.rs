//! What the daemon says of workloads whose truth is known, held against the kernel's own book.

use std::collections::BTreeMap;

use numaward_tests::{Bench, Report, assert_near, boot};
use numaward_vm::Machine;

const MIB: u64 = 1 << 20;

/// `[local, remote]` bytes per node.
fn counters(report: &Report, name: &str) -> BTreeMap<u32, [u64; 2]> {
    let mut counters = BTreeMap::new();
    for line in report.section(&format!("{name} counters")).lines() {
        let words: Vec<_> = line.split(' ').collect();
        let [node, locality, bytes] = words[..] else { return BTreeMap::new() };
        let both: &mut [u64; 2] = counters.entry(node.parse().unwrap()).or_default();
        both[usize::from(locality == "remote")] += bytes.parse::<u64>().unwrap();
    }
    counters
}

/// A workload of which node 0 and 1 shall have `local` and `remote` bytes.
fn check(report: &Report, name: &str, local: [u64; 2], remote: [u64; 2]) {
    let size = 64 * MIB;
    let found = counters(report, name);
    let stat = report.numa_stat(&format!("{name} numa_stat"));
    for node in 0..2_u32 {
        let index = usize::try_from(node).unwrap();
        let [near, far] = found[&node];
        let resident = stat["anon"][&node] + stat["file"][&node];
        assert_near(&format!("{name}: allocated on node {node}"), near + far, resident, size, 1);
        assert_near(&format!("{name}: local on node {node}"), near, local[index], size, 1);
        assert_near(&format!("{name}: remote on node {node}"), far, remote[index], size, 1);
    }
}

#[test]
fn allocations_agree_with_the_kernels_book() {
    let Some(bench) = Bench::open() else { return };
    let machine = Machine::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine), include_str!("daemon.sh"));
    let (all, half) = (64 * MIB, 32 * MIB);
    check(&report, "local", [all, 0], [0, 0]);
    check(&report, "bound", [0, 0], [0, all]);
    check(&report, "interleaved", [half, 0], [0, half]);
    check(&report, "thp", [0, all], [0, 0]);
    check(&report, "tmpfs", [0, 0], [0, all]);
    // What a cgroup further down allocates is booked to its workload.
    check(&report, "nested", [0, 0], [0, all]);
    // Which of the two hooks serves depends on the kernel: see the probes' documentation.
    let probes = report.section("probes");
    assert!(
        ["tp_btf", "tracepoint"].iter().any(|mode| probes.contains(&format!("mode=\"{mode}\""))),
        "{probes}"
    );
    assert_eq!(report.section("exit code"), "0");
}

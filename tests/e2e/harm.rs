//! Guarantees, releases and the guard do no harm to workloads without a guarantee.

use std::{env, time::Duration};

use numaward_tests::{TestEnvironment, boot, seed};
use numaward_vm::GuestTopology;

/// Name of the variable with the number of random sequences.
const SEQUENCES: &str = "NUMAWARD_HARM_SEQUENCES";

#[test]
fn other_cgroups_are_not_harmed() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("3,3"), Some("700M,700M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(5)), include_str!("harm.sh"));

    // A limit is not lowered below the memory in use.
    let mib = |count: u64| (count << 20).to_string();
    assert_ne!(report.section("raised"), mib(120), "{report}");
    let pending = report.section("pending");
    assert_eq!(pending.lines().next(), Some(report.section("raised")), "{report}");
    assert!(pending.contains("memory.max") && pending.contains("/limited"), "{report}");
    assert_eq!(report.section("kills by the limit"), "0", "{report}");

    // No workload is left nodes without the huge pages that it has reserved.
    let refused = report.section("reserved huge pages");
    assert!(refused.contains("of huge pages that they have not touched yet"), "{report}");
    // The shell reports the process that is ended at last.
    assert!(report.section("reserved huge pages after").starts_with("nodes \nlives"), "{report}");

    // A move that a release overtakes leaves all nodes.
    // All nodes stand for none: the kernel takes no empty set while processes run there.
    assert_eq!(report.section("moved"), ["nodes 0-1"; 3].join("\n"), "{report}");

    // CPUs of another program's partition are not given to workloads.
    let mut partition = report.section("partition").lines();
    assert_eq!((partition.next(), partition.last()), (Some("isolated"), Some("3,5")), "{report}");
    assert_eq!(report.section("partition after"), "isolated\n4", "{report}");

    // The guard moves no workload to a node without free memory.
    assert!(report.section("low").ends_with(" 1"), "{report}");
    assert_eq!(report.section("bystander"), "nodes , killed 0", "{report}");
    let events = report.json("events");
    let reasons = events["events"].as_array().unwrap().iter().filter_map(|event| event["message"].as_str());
    assert!(reasons.into_iter().any(|message| message.contains("have room for")), "{report}");
}

#[test]
fn random_sequences_harm_no_cgroup() {
    let Some(bench) = TestEnvironment::open() else { return };
    let sequences: u64 = match env::var(SEQUENCES) {
        Ok(text) => text.parse().unwrap(),
        Err(_) if bench.is_slow() => 200,
        Err(_) => 2,
    };
    let minutes = 5 + 3 * sequences;
    let machine = GuestTopology::parse(None, Some("3,3"), Some("800M,800M"), None).unwrap();
    let disks = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    let vm = disks.iter().fold(bench.vm_with_systemd(machine), |vm, disk| {
        disk.as_file().set_len(32 << 20).unwrap();
        vm.disk(disk.path())
    });
    let vm = vm.limit(Duration::from_mins(minutes));
    let seed = seed();
    let script = format!(
        "set -eu\nsection check\necho 1 >/proc/sys/kernel/numa_balancing\n\
         numaward-harm-check check --sequences {sequences} --seed {seed} || {{ tail -n 60 /tmp/daemon.log; exit 1; }}"
    );
    let report = boot(&vm, &script);
    let said = report.section("check");
    println!("{said}");
    assert!(said.contains(&format!("ok: {sequences} sequences")), "{report}");
}

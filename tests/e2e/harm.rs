//! Guarantees, releases and the guard do no harm to workloads without a guarantee.

use std::{env, time::Duration};

use numaward_tests::{TestEnvironment, boot, seed};
use numaward_vm::{Cache, GuestTopology};

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
fn own_policies_and_masks_are_kept() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("3,3"), Some("800M,800M"), None).unwrap();
    let folder = Cache::locate().unwrap().root().join("tools/numactl");
    let files = ["numactl", "ld-linux-x86-64.so.2", "libc.so.6", "libnuma.so.1"];
    let vm = files.iter().fold(bench.vm_with_systemd(machine), |vm, file| {
        vm.file(folder.join(file), format!("/numactl/{file}"))
    });
    let report = boot(&vm.limit(Duration::from_mins(10)), include_str!("harm_own_settings.sh"));

    // The kernel remaps the policy of a process with a guarantee, and does not undo that: `numaward guarantee` says so.
    assert_eq!(report.section("policy"), "interleave:0-1", "{report}");
    assert_eq!(report.section("policy with guarantee"), "interleave:1", "{report}");
    let after = report.section("policy after guarantee");
    assert!(["interleave:0", "interleave:1"].contains(&after), "{report}");
    let remark = report.section("policy and guarantee");
    assert!(remark.contains("of spread has the memory policy interleave:1"), "{report}");

    // A command has all its CPUs, whatever the affinity of its shell is.
    assert_eq!(report.section("narrow shell"), "3", "{report}");
    assert_eq!(report.section("command of narrow shell"), "3-5", "{report}");

    // A unit keeps its `CPUAffinity=`, and all commands show it.
    let remark = report.section("bound unit");
    let narrow = "1 threads of web.service run on CPUs 3 of 3-5 only";
    assert!(remark.contains(narrow) && remark.ends_with("\n3"), "{report}");
    let status = report.section("bound unit in status");
    assert!(status.lines().any(|line| has_words(line, &["web.service", "1", "3", "3-5"])), "{report}");
    let doctor = report.section("bound unit in doctor");
    assert!(doctor.contains("/system.slice/web.service (1 on CPUs 3 of 3-5)"), "{report}");

    // A stopped unit keeps its guarantee, with an event and in each view.
    let has_stopped = |section: &str, words: &[&str]| {
        report.section(section).lines().any(|line| has_words(line, &[&["web.service"], words].concat()))
    };
    assert!(has_stopped("stopped unit", &["stopped"]), "{report}");
    assert!(report.section("stopped unit in status").contains("web.service (stopped)"), "{report}");
    let event = "web.service does not run. Its guarantee is kept for a day";
    assert!(report.section("stopped unit events").contains(event), "{report}");
    assert!(has_stopped("started unit", &["held"]), "{report}");
    assert!(report.section("started unit").ends_with("\n3-5"), "{report}");

    // The release of a stopped unit's guarantee leaves neither drop-ins nor properties.
    let released = "no drop-ins\nAllowedCPUs=\nAllowedMemoryNodes=\nMemoryMax=infinity\nMemoryMin=0";
    assert_eq!(report.section("released while stopped"), released, "{report}");

    // The guard leaves a process with a memory policy alone, with the reason, and steers another one.
    assert_eq!(report.section("low"), "spread '' interleave:0-1", "{report}");
    let (events, node) = (report.section("low events"), report.section("low node"));
    assert!(events.contains(&format!("/spread cannot be kept off node {node}: process ")), "{report}");
    assert!(events.contains("has the memory policy interleave:0-1"), "{report}");
    assert_eq!(report.section("new knobs"), "", "{report}");
}

/// Returns true if each of the words is in the line, in this order.
fn has_words(line: &str, words: &[&str]) -> bool {
    let mut found = line.split_whitespace();
    words.iter().all(|word| found.any(|found| found == *word))
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

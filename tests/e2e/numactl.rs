//! `numaward numactl` against numactl itself on four nodes: each command has the same CPUs, nodes and policy, or is refused
//! by both. With a daemon it is a workload. And CPUs alone, on a node that is named, with others moved off them.

use numaward_tests::{Bench, Report, boot};
use numaward_vm::{Cache, Machine};

/// What both made of the same options.
fn both<'a>(report: &'a Report, name: &str) -> (&'a str, &'a str) {
    let section = report.section(name);
    let (theirs, ours) = section.split_once("\n--\n").unwrap_or_else(|| panic!("{name}: {section}"));
    (theirs, ours)
}

#[test]
fn a_command_has_what_numactl_gives_it_on_four_nodes() {
    let Some(bench) = Bench::open() else { return };
    let machine = Machine::parse(None, Some("2,2,2,0"), Some("512M,256M,256M,256M"), None).unwrap();
    let folder = Cache::locate().unwrap().root().join("tools/numactl");
    let files = ["numactl", "ld-linux-x86-64.so.2", "libc.so.6", "libnuma.so.1"];
    let vm = files
        .iter()
        .fold(bench.vm(machine), |vm, file| vm.file(folder.join(file), format!("/numactl/{file}")));
    let report = boot(&vm, include_str!("numactl.sh"));

    let (mut given, mut refused) = (0, 0);
    let text = report.to_string();
    let names: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("=== "))
        .filter(|name| name.starts_with('-') || name.starts_with("narrow "))
        .collect();
    for name in names {
        let (theirs, ours) = both(&report, name);
        if theirs.ends_with("code 0") {
            assert_eq!(ours, theirs, "{name}");
            given += 1;
        } else {
            // It prints why, on either stream.
            assert_eq!(ours.lines().last(), theirs.lines().last(), "{name}: {theirs}");
            refused += 1;
        }
    }
    assert!(given > 20 && refused > 5, "{given} were given, {refused} refused");

    let weighted = report.section("weighted");
    let version = bench.kernel().version();
    if version.starts_with("6.1.") {
        assert!(
            weighted.contains("it takes Linux 6.9 or newer") && weighted.ends_with("code 1"),
            "{weighted}"
        );
    } else {
        assert!(weighted.ends_with("code 0"), "{weighted}");
    }
    // Releases of numactl put more or fewer spaces between the distances.
    let words = |name: &str| {
        let lines = report.section(name).lines();
        lines.map(|line| line.split_whitespace().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    assert_eq!(words("our hardware"), words("hardware"));

    assert!(report.section("alone").contains("is not registered, and runs all the same"), "{report}");
    let registered = report.section("registered");
    let lines: Vec<_> = registered.lines().collect();
    let [cgroup, cpus, mems, policy, process, code] = lines.as_slice() else { panic!("{registered}") };
    assert_eq!(*cgroup, format!("0::/numaward/sh-{process}"), "{registered}");
    assert_eq!(
        (*cpus, *mems, *policy, *code),
        ("Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t0-3", "bind:2", "code 7")
    );
    let process = report.section("counted");
    assert_eq!(report.section("process"), format!("sleep\n0::/numaward/sleep-{process}"));
    let described = report.section("described");
    assert!(described.contains(&format!("numaward/sleep-{process}: exec")), "{described}");
    assert_eq!(report.section("left"), "nothing is promised");
    assert_eq!(
        report.section("isolated").lines().collect::<Vec<_>>(),
        ["Cpus_allowed_list:\t4-5", "Mems_allowed_list:\t0-3", "2-3", "code 0"]
    );
}

//! Compares `numaward numactl` with numactl on four nodes: both give a command the same CPUs, nodes and policy, or both refuse
//! it. If a daemon runs, the command is a workload. Also exclusive CPUs on a named node, with other cgroups confined.

use std::{fs::File, process::Command, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Cache, GuestTopology, find_tool};

/// Options that numactl accepts and `numaward numactl` refuses, as documented in the book, with a word of the reason.
const REFUSED: [(&str, &str); 9] = [
    ("-L 1m -f /dev/shm/a -m 1", "shared memory"),
    ("--length=1m --file=/dev/shm/a --interleave=0,2 --touch --dump-nodes", "shared memory"),
    ("-L 1m -o 4k -f /dev/shm/a -p 1 -T -V", "shared memory"),
    ("-L 1m -M 600 -S /dev/shm/key -m 1 -t -d", "shared memory"),
    ("--length 1m --shmid=7 --shmmode=600 --shm /dev/shm/key --localalloc", "shared memory"),
    ("--version", "numaward --version"),
    ("-H --cpu-compress", "numaward topology"),
    ("-m ip:10.0.2.2 true", "name the network interface"),
    ("-m 2-1 true", "is before its beginning"),
];
/// Options that only `numaward numactl` accepts, and the resulting setting. The last two run in a narrower cpuset.
const MORE: [(&str, &str); 6] = [
    ("-m block:/dev/vda", "bind:3"),
    ("-m pci:81:00.0", "bind:2"),
    ("-m netdev:eth0,0", "bind:0,2"),
    ("-i block:vda,netdev:eth0", "interleave:2-3"),
    ("-N netdev:eth0", "Cpus_allowed_list:\t4-5"),
    ("-m netdev:eth0", "bind:2"),
];

/// Returns the results of both programs for the same options.
fn both<'a>(report: &'a ScriptReport, name: &str) -> (&'a str, &'a str) {
    let section = report.section(name);
    let (theirs, ours) = section.split_once("\n--\n").unwrap_or_else(|| panic!("{name}: {section}"));
    (theirs, ours)
}

#[test]
fn agrees_with_numactl_on_four_nodes() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2,2,0"), Some("512M,256M,256M,256M"), None).unwrap();
    let disk = tempfile::NamedTempFile::new().unwrap();
    File::set_len(disk.as_file(), 16 << 20).unwrap();
    let made = Command::new(find_tool("mkfs.ext4").unwrap()).arg("-q").arg(disk.path()).status().unwrap();
    assert!(made.success());
    let folder = Cache::locate().unwrap().root().join("tools/numactl");
    let files = ["numactl", "ld-linux-x86-64.so.2", "libc.so.6", "libnuma.so.1"];
    let vm = files
        .iter()
        .fold(bench.vm(machine), |vm, file| vm.file(folder.join(file), format!("/numactl/{file}")));
    let vm = vm.network_on(2).disk_on(disk.path(), 3).limit(Duration::from_mins(15));
    let report = boot(&vm, include_str!("numactl.sh"));

    let (mut given, mut refused, mut faults) = (0, 0, Vec::new());
    let mut compare = |name: &str, ours: &str, theirs: &str| {
        if ours != theirs {
            faults.push(format!("{name}: numactl has\n{theirs}\nand ours\n{ours}"));
        }
    };
    let text = report.to_string();
    let names: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("=== "))
        .filter(|name| name.starts_with('-') || name.starts_with("narrow "))
        .collect();
    for name in names {
        let (theirs, ours) = both(&report, name);
        if theirs.ends_with("code 0") {
            compare(name, ours, theirs);
            given += 1;
        } else {
            // The message may be on either stream.
            compare(name, ours.lines().last().unwrap_or_default(), theirs.lines().last().unwrap_or_default());
            refused += 1;
        }
    }
    for name in text.lines().filter_map(|line| line.strip_prefix("=== shown ")) {
        let (theirs, ours) = both(&report, &format!("shown {name}"));
        // The number of spaces between distances differs among releases of numactl.
        let [theirs, ours] = [theirs, ours].map(|text| {
            // For preferred-many, numactl always shows node 0.
            let lines = text.lines().filter(|line| !line.ends_with(" (preferred-many)"));
            // The next interleave node depends on the number of pages that the program has allocated.
            let lines = lines.map(|line| match line.split_once(':') {
                Some((key @ "interleavenode", _)) => key.to_owned(),
                Some((key, value)) if value.ends_with("(interleave next)") => format!("{key}: of interleave"),
                _ => line.split_whitespace().collect::<Vec<_>>().join(" "),
            });
            lines.collect::<Vec<_>>().join("\n")
        });
        compare(&format!("shown {name}"), &ours, &theirs);
        given += 1;
    }
    assert!(faults.is_empty(), "{} of {} differ:\n{}", faults.len(), given + refused, faults.join("\n\n"));
    eprintln!("{given} forms are taken by both, {refused} refused by both");
    assert!(given + refused >= 155 && refused >= 40, "{given} were given, {refused} refused");
    for (options, reason) in REFUSED {
        let (theirs, ours) = both(&report, &format!("only numactl {options}"));
        assert_eq!(theirs, "code 0", "{options}");
        assert!(ours.contains(reason) && ours.ends_with("code 1"), "{options}: {ours}");
    }
    for (options, has) in MORE {
        let (theirs, ours) = both(&report, &format!("only ours {options}"));
        assert!(theirs.ends_with("code 1"), "{options}: {theirs}");
        assert!(ours.contains(has) && ours.ends_with("code 0"), "{options}: {ours}");
    }

    let weighted = report.section("weighted");
    let version = bench.kernel().version();
    if version.starts_with("6.1.") {
        assert!(
            weighted.contains("requires Linux 6.9 or newer") && weighted.ends_with("code 1"),
            "{weighted}"
        );
    } else {
        assert!(weighted.ends_with("code 0"), "{weighted}");
    }
    assert!(report.section("alone").contains("is not registered, and runs all the same"), "{report}");
    let registered = report.section("registered");
    let lines: Vec<_> = registered.lines().collect();
    let [cgroup, cpus, mems, policy, .., process, code] = lines.as_slice() else { panic!("{registered}") };
    assert_eq!(*cgroup, format!("0::/numaward/sh-{process}"), "{registered}");
    assert_eq!(
        (*cpus, *mems, *policy, *code),
        ("Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t0-3", "bind:2", "code 7")
    );
    let process = report.section("counted");
    assert_eq!(report.section("process"), format!("sleep\n0::/numaward/sleep-{process}"));
    let described = report.section("described");
    assert!(described.contains(&format!("numaward/sleep-{process}: exec")), "{described}");
    assert_eq!(report.section("left"), "there are no guarantees");
    assert_eq!(
        report.section("isolated").lines().collect::<Vec<_>>(),
        ["Cpus_allowed_list:\t4-5", "Mems_allowed_list:\t0-3", "2-3", "code 0"]
    );
}

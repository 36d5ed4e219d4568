//! Comparison of `numaward numactl` with numactl: a command must have the same settings with each option.

use std::process::{Command, Output};

use numaward_tests_support::skip_outside_ci;

use crate::common::numaward;

/// A command that prints its CPUs, its nodes, and its policy from `get_mempolicy` and `numa_maps`.
const PROBE: &str = "\
    grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status
    numactl --show | grep -E '^(policy|physcpubind|cpubind|nodebind|membind):'
    sed -n '/stack/{s/^[0-9a-f]* \\([^ ]*\\) .*/\\1/p;q}' /proc/self/numa_maps";

/// Returns true if Debian's numactl is installed.
fn has_numactl() -> bool {
    let found = Command::new("numactl").arg("--version").output().is_ok();
    if !found {
        skip_outside_ci("numactl (Debian package numactl) is missing");
    }
    found
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs both programs with the same arguments. No daemon is reachable.
fn both(arguments: &[&str]) -> [Output; 2] {
    let ours = numaward(&[&["numactl"], arguments].concat())
        .env("NUMAWARD_SERVER", "/nonexistent/control.sock")
        .output()
        .unwrap();
    [Command::new("numactl").args(arguments).output().unwrap(), ours]
}

#[test]
fn command_gets_settings_of_numactl() {
    if !has_numactl() {
        return;
    }
    let table: &[&[&str]] = &[
        &[],
        &["--"],
        &["-N", "0"],
        &["-N0"],
        &["--cpunodebind=0"],
        &["--cpunodebind", "all"],
        &["--cpubind", "0"],
        &["-c", "0"],
        &["-C", "0"],
        &["-C", "+0"],
        &["-C", "all"],
        &["-C", "!0"],
        &["-C", "0x0"],
        &["--physcpubind=0"],
        &["--physcpu=0"],
        &["-m", "0"],
        &["-m0"],
        &["--membind=+0"],
        &["--membind", "all"],
        &["--mem=0"],
        &["-m", "00"],
        &["-p", "0"],
        &["--preferred=0"],
        &["--preferred", "+0"],
        &["-P", "0"],
        &["--preferred-many=all"],
        &["-i", "0"],
        &["--interleave=all"],
        &["--interleave", "!0"],
        &["-l"],
        &["--localalloc"],
        &["-a", "-C", "0"],
        &["--all", "--membind=0"],
        &["-al"],
        &["-aN", "0", "-m", "0"],
        &["-N", "0", "-C", "0", "-i", "0"],
        &["-b", "-m", "0"],
        &["--balancing", "--membind=0"],
        &["-b", "-N", "0"],
        &["-b", "-i", "0"],
        &["-b", "-P", "0"],
        &["-b", "-p", "0"],
        &["-b", "-l"],
        &["-N", "0", "-m", "same"],
        &["--preferred-many", "0"],
        &["--physcpubind=+0"],
    ];
    for options in table {
        let [theirs, ours] = both(&[options, &["sh", "-c", PROBE][..]].concat());
        assert!(theirs.status.success(), "{options:?}: {theirs:?}");
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{options:?}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{options:?}");
        let said = text(&ours.stderr);
        assert!(
            said.lines().count() == 1 && said.contains("is not registered, and runs all the same"),
            "{said}"
        );
    }
}

#[test]
fn refuses_what_numactl_refuses() {
    if !has_numactl() {
        return;
    }
    let table: &[&[&str]] = &[
        &[],
        &["-m", "0"],
        &["-m"],
        &["-N"],
        &["--bogus", "true"],
        &["-Z", "true"],
        &["--pref", "0", "true"],
        &["--all=1", "true"],
        &["-m", "1023", "true"],
        &["-m", "0,1023", "true"],
        &["-m", "0-1023", "true"],
        &["-m", "x", "true"],
        &["-m", "0-", "true"],
        &["-m", ",", "true"],
        &["-m", "+1", "true"],
        &["-m", "!0", "true"],
        &["-p", "!0", "true"],
        &["-P", "!0", "true"],
        &["-N", "!0", "true"],
        &["-C", "99999", "true"],
        &["-C", "+99", "true"],
        &["-l", "-m", "0", "true"],
        &["-m", "0", "-i", "0", "true"],
        &["-m", "netdev:lo", "true"],
        &["-m", "netdev:none", "true"],
        &["-m", "file:/nonexistent", "true"],
        &["-p", "netdev:lo", "true"],
        &["-N", "netdev:none", "true"],
        &["-m", "block:none", "true"],
        &["-m", "pci:none", "true"],
        &["-m", "ip:127.0.0.1", "true"],
        &["-m", "same", "true"],
        &["-C", "same", "true"],
        &["-w", "x", "true"],
        &["-m", "0", "no-such-command"],
        &["-m", "0", "/etc/passwd"],
    ];
    for arguments in table {
        let [theirs, ours] = both(arguments);
        assert_eq!(theirs.status.code(), Some(1), "{arguments:?}: {theirs:?}");
        assert_eq!(ours.status.code(), Some(1), "{arguments:?}: {ours:?}");
        assert!(
            text(&ours.stderr).contains("numaward: ") && ours.stdout.is_empty(),
            "{arguments:?}: {ours:?}"
        );
    }
}

#[test]
fn passes_exit_codes_and_arguments() {
    if !has_numactl() {
        return;
    }
    for arguments in [
        &["-m", "0", "sh", "-c", "exit 7"][..],
        &["-m", "0", "--", "sh", "-c", "echo -m \"$0\"; exit 3", "-N"],
        &["sh", "-c", "kill -TERM $$"],
        &["echo", "-m", "9", "--show"],
    ] {
        let [theirs, ours] = both(arguments);
        assert_eq!((ours.status, text(&ours.stdout)), (theirs.status, text(&theirs.stdout)), "{arguments:?}");
    }
}

#[test]
fn shows_policy_and_hardware_alike() {
    if !has_numactl() {
        return;
    }
    let same = |line: &&str| {
        !line.contains("free:") && !line.trim_end().is_empty() && !line.starts_with("preferred")
    };
    for arguments in [
        &["--show"][..],
        &["-s"],
        &["-m", "0", "-s"],
        &["-p", "0", "-C", "0", "--show"],
        &["-i", "0", "--show"],
        &["-P", "0", "-s"],
        &["-N", "0", "--show"],
        &["-H"],
        &["--hardware"],
    ] {
        let [theirs, ours] = both(arguments).map(|output| {
            assert!(output.status.success(), "{arguments:?}: {output:?}");
            let printed = text(&output.stdout);
            printed.lines().filter(same).map(str::trim_end).collect::<Vec<_>>().join("\n")
        });
        assert_eq!(ours, theirs, "{arguments:?}");
    }
}

/// A kernel with the policy applies it; for an older kernel, the error names the required version.
#[test]
fn weighted_interleave_needs_kernel() {
    for options in [&["-w", "0"][..], &["--weighted-interleave=0"], &["--weighted-interleave", "0"]] {
        let look = ["grep", "-m1", "-o", " weighted interleave:0 ", "/proc/self/numa_maps"];
        let output = numaward(&[&["numactl"], options, &look].concat())
            .env("NUMAWARD_SERVER", "/nonexistent/control.sock")
            .output()
            .unwrap();
        match output.status.code() {
            Some(0) => assert_eq!(text(&output.stdout), " weighted interleave:0 \n", "{options:?}"),
            code => {
                assert_eq!(code, Some(1), "{output:?}");
                assert!(text(&output.stderr).contains("requires Linux 6.9 or newer"), "{output:?}");
            }
        }
    }
}

#[test]
fn help_lists_options_of_numactl() {
    let output = numaward(&["numactl", "--help"]).output().unwrap();
    let help = text(&output.stdout);
    assert!(output.status.success() && help.contains("--weighted-interleave/-w"), "{output:?}");
}

//! Runs the test program of the probes, which `cargo xtask test host` runs on the host, on the kernel and nodes of a machine.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::{GuestTopology, Vm};

/// File name of the test program. In the machine it has the name that it expects in events.
const PROGRAM: &str = "numaward-probes-host";

fn check(change: impl FnOnce(Vm) -> Vm) {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("512M,512M"), Some("10,21;21,10")).unwrap();
    let vm = bench.vm(machine).file(bench.program(PROGRAM), "/bin/host");
    let script = "section nodes\ncat /sys/devices/system/node/node*/distance\nsection said\nhost";
    let report = boot(&change(vm.limit(Duration::from_mins(20))), script);
    assert_eq!(report.section("nodes"), "10 21\n21 10", "the kernel sees the nodes");
    let said = report.section("said");
    let passed = said.lines().filter(|line| line.starts_with("host: ") && line.ends_with(": ok")).count();
    assert!(passed >= 26, "it skips nothing that matters:\n{said}");
}

#[test]
fn probes_pass_their_own_test() {
    check(|vm| vm);
}

#[test]
fn probes_pass_with_device_tree() {
    check(Vm::device_tree);
}

//! `enforcement.cpuPower`: the wake-up latency of exclusive CPUs. Virtual machines have no frequency scaling, so for governors
//! the test only shows that a missing one is no failure.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

use crate::systemd::boot_unit;

#[test]
fn sets_and_restores_cpu_power() {
    let Some(bench) = TestEnvironment::open() else { return };
    // CPUs 2 and 3 are on node 1.
    let machine = GuestTopology::parse(None, Some("2,2"), Some("512M,512M"), None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(10));
    let report = boot(&vm, include_str!("cpu_power.sh"));
    eprintln!("{report}");

    assert!(
        !report.section("frequencies").contains("cpufreq\n"),
        "frequencies could be tested here:\n{report}"
    );
    let doctor = report.section("doctor");
    assert!(doctor.contains("scaling_governor"), "{report}");
    // The following line is the shell's message about the killed daemon.
    let of = |section: &str| report.section(section).lines().next().unwrap_or_default();
    let found = "0 0 150 0";
    assert_eq!(of("before"), found);
    for section in ["held", "held by nobody", "held again"] {
        assert_eq!(of(section), "0 0 n/a n/a", "{section}:\n{report}");
    }
    let events = report.section("events");
    for says in [
        "Set on exclusive CPUs 2-3: wake-up latency n/a (CPUs 2-3).",
        "Not as configured on exclusive CPUs 2-3: governor: there is no cpufreq/scaling_governor for them (CPUs 2-3).",
    ] {
        assert!(events.contains(says), "{says}\n{report}");
    }
    let figures = report.section("figures");
    for line in [
        "numaward_cpu_power_settings{state=\"set\"} 2",
        "numaward_cpu_power_settings{state=\"refused\"} 2",
        "numaward_cpu_power_writes_total{result=\"ok\"} 2",
        "numaward_cpu_power_writes_total{result=\"error\"} 0",
    ] {
        assert!(figures.contains(line), "{line}\n{report}");
    }
    assert_eq!(of("released"), found, "the daemon was killed twice in between");
    assert_eq!(of("of somebody else"), "0 0 150 70", "what others write stays");
    assert_eq!(of("another value"), "0 0 20 20");
    assert_eq!(of("not configured"), found);
    assert_eq!(of("uninstalled"), found);
}

#[test]
fn drop_in_of_page_allows_settings() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,512M"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).limit(Duration::from_mins(15));
    let report = boot_unit(vm, "power", include_str!("cpu_power_unit.sh"));
    eprintln!("{report}");

    assert_eq!(report.section("closed"), "latency: 0", "{report}");
    assert!(report.section("closed events").contains("Read-only file system"), "{report}");
    assert_eq!(report.section("open"), "latency: n/a", "{report}");
    let events = report.section("open events");
    assert!(events.contains("Set on exclusive CPUs 2-3: "), "{report}");
    assert!(!events.contains("Read-only file system"), "{report}");
    assert_eq!(report.section("outside of it").matches("ead-only file system").count(), 3, "{report}");
}

//! The Debian package under systemd, and the program in the root file system of the container image.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::{Arch, GuestTopology};

/// Version of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[test]
fn hardened_package_leaves_nothing() {
    let Some(bench) = TestEnvironment::open() else { return };
    let arch = bench.kernel().arch();
    let layer = tempfile::NamedTempFile::new().unwrap();
    let status = std::process::Command::new("tar")
        .args(["--create", "--owner=0", "--group=0", "--file"])
        .arg(layer.path())
        .arg("--directory")
        .arg(bench.made(&format!("rootfs-{arch}")))
        .arg(".")
        .status();
    assert!(status.unwrap().success());
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let vm = bench
        .vm_with_systemd(machine)
        .limit(Duration::from_mins(30))
        .file(bench.made(&format!("numaward_{VERSION}_{arch}.deb")), "/numaward.deb")
        .file(layer.path(), "/layer.tar");
    let report = boot(
        &vm,
        concat!(include_str!("calls.sh"), include_str!("packages/load.sh"), include_str!("package.sh")),
    );
    eprintln!("{report}");
    let ends_with = |section: &str, lines: &[&str]| {
        let found: Vec<_> = report.section(section).lines().collect();
        assert!(found.ends_with(lines), "{section}:\n{report}");
    };

    // The package does not start the service: the administrator does.
    ends_with(
        "installed",
        &["disabled", "inactive", "755 root /usr/bin/numaward", "644 root /etc/numaward/config.yaml"],
    );
    let unit = report.section("unit");
    assert!(unit.starts_with("→ Overall exposure level") && unit.ends_with("\nverified"), "{unit}");

    // The hardening of the unit disables no feature of the daemon.
    let status = report.json("status");
    let alloc = status["probes"].as_array().unwrap().iter().find(|probe| probe["probe"] == "alloc");
    assert_eq!(alloc.unwrap()["mode"], "tp_btf", "{status}");
    let guarantee = report.json("guarantee");
    assert_eq!((&guarantee["cpus"], &guarantee["nodes"]), (&"2-3".into(), &"1".into()), "{guarantee}");
    assert_eq!(report.section("exec"), "0::/numaward/job");
    let drifted = &report.json("drift")["allocations"][0]["drift"][0];
    assert_eq!(
        (&drifted["noticed"], &drifted["writer"]["command"]),
        (&"write".into(), &"sh".into()),
        "{report}"
    );

    let reloaded: Vec<_> = report.section("reloaded").lines().collect();
    let expected = [
        "755 root /etc/numaward/conf.d",
        "755 root /etc/numaward/guarantees.d",
        "1",
        "applied: guarantees (/etc/numaward/guarantees.d/other.yaml:2:3)",
        "needs a restart: probes.slots (/etc/numaward/conf.d/slots.yaml:1:17)",
        "1",
        "the same process",
        "active",
    ];
    assert_eq!(reloaded, expected, "{report}");
    assert_eq!(report.section("upgraded"), "2-3");
    let upgraded = report.json("upgraded allocations");
    assert_eq!(upgraded["allocations"][0]["name"], "load.service", "{upgraded}");
    assert_eq!(report.section("journal"), "", "no warning");

    // The daemon makes only system calls that the unit allows, except for clone3(2): glibc tries it first and falls back to
    // clone(2), because a filter cannot inspect its flags. The C library of the programs for Arm does not call it.
    assert_eq!(report.section("more of its life"), "");
    assert_eq!(report.section("refused calls"), if arch == Arch::Amd64 { "clone3" } else { "" });
    let made: Vec<_> = report.section("made calls").lines().collect();
    for name in ["bpf", "fanotify_mark", "setxattr", "sched_setaffinity", "restart_syscall"] {
        assert!(made.contains(&name), "the kernel counts calls: {name}:\n{report}");
    }
    assert_eq!(
        report.section("filtered"),
        "Seccomp:\t2\nrefused: kill: can't kill pid 1: Operation not permitted\nallowed: done"
    );

    // Until the package is purged, the knobs keep the guarantees, and the configuration and the ledger stay on the host.
    let removed = ["inactive", "/etc/numaward/config.yaml", "/var/lib/numaward/ledger.json", "2-3"];
    assert_eq!(report.section("removed").lines().collect::<Vec<_>>(), removed, "{report}");
    assert_eq!(report.section("purged"), "nothing", "{report}");

    let asked = report.section("names");
    assert!(
        asked.starts_with("GET /api/v1/pods?") && asked.contains("fieldSelector=spec.nodeName"),
        "{asked}"
    );
    ends_with("in a cluster", &["TLS"]);
    report.section("end");
}

//! Installation, upgrade and removal by package managers: apt with a signed repository, and rpm, in a machine with systemd and
//! Debian 13; and a rollout with Ansible.
//!
//! Fedora's systemd package and dnf are not available here. rpm is Debian's, and runs without dependency checks.

mod newcomer;

use std::{path::PathBuf, process::Command, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Cache, GuestTopology, PACKAGE_MANAGERS, SOFTWARE_IMAGE, Vm};

const SHARED: &str = concat!(include_str!("packages/load.sh"), include_str!("packages/common.sh"));
/// Version of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns a machine with package managers, and with packages of this version and of the next.
fn machine(bench: &TestEnvironment, machine: GuestTopology, archives: &tempfile::TempDir) -> Vm {
    let image = Cache::locate().unwrap().root().join(PACKAGE_MANAGERS).join(SOFTWARE_IMAGE);
    let packed = |name: &str, files: &[&str]| {
        let archive = archives.path().join(name);
        let folder = bench.made("..").join(name);
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--file").arg(&archive).arg("--directory").arg(folder).args(files);
        assert!(tar.status().unwrap().success(), "{name}");
        archive
    };
    let [now, next] =
        [format!("numaward-{VERSION}-1.x86_64.rpm"), format!("numaward-{VERSION}+next-1.x86_64.rpm")];
    let dist = packed("dist", &["apt", &now, "SHA256SUMS", "SHA256SUMS.asc", "numaward.asc"]);
    let next = packed("next", &["apt", &next]);
    bench
        .vm(machine)
        .systemd_on_disk(image)
        .limit(Duration::from_mins(20))
        .file(dist, "/dist.tar")
        .file(next, "/next.tar")
}

fn report(script: &str) -> Option<ScriptReport> {
    report_of(script, |vm| vm)
}

/// Runs a script in the machine with additions.
fn report_of(script: &str, add: impl FnOnce(Vm) -> Vm) -> Option<ScriptReport> {
    let bench = TestEnvironment::open()?;
    let archives = tempfile::tempdir().unwrap();
    let topology = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&add(machine(&bench, topology, &archives)), &[SHARED, script].concat());
    eprintln!("{report}");
    Some(report)
}

/// Asserts the last lines of a section, after the output of the package manager.
fn assert_ends(report: &ScriptReport, section: &str, lines: &[&str]) {
    let found: Vec<_> = report.section(section).lines().collect();
    assert!(found.ends_with(lines), "{section} does not end with {lines:#?}:\n{report}");
}

#[test]
fn apt_installs_upgrades_and_removes() {
    let Some(report) = report(include_str!("packages/apt.sh")) else { return };
    let signature = report.section("verified");
    assert!(signature.contains("Good signature from \"numaward dry run"), "{report}");
    assert_ends(&report, "verified", &[&format!("numaward-{VERSION}-1.x86_64.rpm: OK")]);
    assert_ends(&report, "changed download", &["refused"]);
    for (section, why) in
        [("no key", "No such file"), ("another key", "Missing key"), ("changed index", "Hash Sum mismatch")]
    {
        assert!(report.section(section).contains(why), "{section}:\n{report}");
        assert_ends(&report, section, &["refused"]);
    }
    assert_ends(&report, "found", &[VERSION]);

    let program =
        ["755 root /usr/bin/numaward", "644 root /etc/numaward/config.yaml", "disabled", "inactive"];
    assert_ends(&report, "installed", &[VERSION, program[0], program[1], program[2], program[3], "intact"]);
    assert_ends(&report, "preset", &["disabled"]);
    let guarantee = report.json("guarantee");
    assert_eq!((&guarantee["cpus"], &guarantee["nodes"]), (&"2-3".into(), &"1".into()), "{guarantee}");

    let next = format!("{VERSION}+next");
    assert_ends(&report, "upgraded", &[&next, "another process", "enabled", "active", "2-3", "# changed"]);
    let allocations = report.json("upgraded allocations");
    assert_eq!(allocations["allocations"][0]["name"], "load.service", "{allocations}");
    assert_ends(&report, "downgraded", &[VERSION, "active", "2-3"]);

    // Until the package is purged, the knobs keep the guarantees, and the configuration and the ledger stay on the host.
    let kept = ["inactive", "/etc/numaward/config.yaml", "/var/lib/numaward/ledger.json", "2-3"];
    assert_ends(&report, "removed", &kept);
    assert_ends(&report, "installed again", &["enabled", "inactive", "# changed"]);
    assert_ends(&report, "restored", &["before: 2-3", "after: ", "active"]);
    assert_ends(&report, "purged", &["nothing"]);
    assert!(!report.section("purged").contains("/numaward"), "{report}");
}

#[test]
fn rpm_installs_upgrades_and_erases() {
    let Some(report) = report(include_str!("packages/rpm.sh")) else { return };
    let digests = report.section("digests");
    assert!(digests.contains("Payload SHA256 digest: OK") && !digests.contains("BAD"), "{report}");
    assert_ends(&report, "requires", &["/bin/sh", &format!("config(numaward) = {VERSION}-1"), "systemd"]);
    assert_ends(
        &report,
        "installed",
        &[
            "755 root /usr/bin/numaward",
            "644 root /etc/numaward/config.yaml",
            "disabled",
            "inactive",
            "intact",
        ],
    );
    assert_ends(&report, "preset of the administrator", &["enabled", "inactive"]);
    let next = format!("{VERSION}+next");
    assert_ends(&report, "upgraded", &[&next, "another process", "enabled", "active", "2-3", "# changed"]);
    assert_ends(&report, "changed files", &["S.5....T.  c /etc/numaward/config.yaml"]);
    let kept = ["inactive", "/etc/numaward/config.yaml.rpmsave", "/var/lib/numaward/ledger.json", "2-3"];
    assert_ends(&report, "erased", &kept);
}

/// Returns the playbook of docs/rollout.md.
fn playbook() -> String {
    let page = include_str!("../../docs/rollout.md");
    let (_, section) = page.split_once("### With Ansible").unwrap();
    let (_, code) = section.split_once("```yaml\n").unwrap();
    code.split_once("```").unwrap().0.to_owned()
}

#[test]
fn playbook_rolls_out_and_stops_at_faults() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("playbook.yaml");
    std::fs::write(&file, playbook()).unwrap();
    let Some(report) = report_of(include_str!("packages/ansible.sh"), |vm| vm.file(file, "/playbook.yaml"))
    else {
        return;
    };
    let config = "listen: 127.0.0.1:9560";
    let changed_config = format!("{config}\nlog: {{level: debug}}");
    let counts = |section: &str| {
        let text = report.section(section);
        let counts = text.lines().find(|line| line.starts_with("ok=")).unwrap();
        let count = |name: &str| -> u32 {
            let found = counts.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.unwrap_or_else(|| panic!("{name}: {counts}")).parse().unwrap()
        };
        (count("changed"), count("failed"))
    };
    assert_eq!(counts("installed").1, 0, "{report}");
    assert_ends(
        &report,
        "installed",
        &["code 0", "enabled", "active", config, "/api/v1/query up{job=\"numaward\"} == 0"],
    );
    assert_eq!(counts("again"), (0, 0), "{report}");
    // The configuration, and the restart for it.
    assert_eq!(counts("checked"), (2, 0), "{report}");
    assert_ends(&report, "checked", &["code 0", config, "the same process"]);
    assert_eq!(counts("changed"), (2, 0), "{report}");
    let [first, second] = changed_config.lines().collect::<Vec<_>>().try_into().unwrap();
    assert_ends(&report, "changed", &["code 0", first, second, "another process"]);
    assert_eq!(counts("invalid"), (0, 1), "{report}");
    assert!(report.section("invalid").contains("unknown key"), "{report}");
    assert_ends(&report, "invalid", &["code 2", first, second, "the same process"]);
    assert_eq!(counts("closed gate"), (0, 1), "{report}");
    assert_ends(&report, "closed gate", &["code 2"]);
    report.section("end");
}

#[test]
fn lintian_has_no_objection() {
    let Some(bench) = TestEnvironment::open() else { return };
    let package: PathBuf = bench.made(&format!("numaward_{VERSION}_amd64.deb"));
    let output =
        Command::new("lintian").args(["--allow-root", "--fail-on=error,warning"]).arg(package).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

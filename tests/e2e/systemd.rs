//! Guarantees for units on a host with systemd: they hold through reloads and restarts of the unit, of systemd and of the daemon.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{GuestTopology, Vm};

use crate::deploy::checkout;

const MIB: u64 = 1 << 20;

/// Asserts the settings of a unit's process and cgroup.
fn assert_pins(report: &ScriptReport, section: &str, expected: &[&str]) {
    let found: Vec<_> = report.section(section).lines().collect();
    assert_eq!(found[..expected.len().min(found.len())], *expected, "{section}:\n{report}");
}

/// Units and slices without exclusive CPUs are confined by properties, and restored afterwards.
fn assert_herd(report: &ScriptReport) {
    let lines = |section: &str| report.section(section).lines().map(str::to_owned).collect::<Vec<_>>();
    let free = ["load [] 0-3", "other [] 0-3", "exempt [] 0-3", "batched [] 0-3", "batch.slice []"];
    assert_eq!(lines("before"), free, "nothing is exclusive yet");
    let herded = ["load [2-3] 2-3", "other [0-1] 0-1", "exempt [] 0-3", "batched [] 0-1"];
    for section in ["herded", "herded and reloaded"] {
        assert_eq!(lines(section), [&herded[..], &["batch.slice [0-1]"]].concat(), "{section}");
    }
    let late = ["late [0-1] 0-1", "batch.slice [0-1]"];
    for section in ["herded and restarted", "herded and adopted"] {
        assert_eq!(lines(section), [&herded[..], &late].concat(), "{section}");
    }
    let herding = &report.json("herded allocations")["enforcement"]["herding"];
    let cgroups = herding["cgroups"].as_array().unwrap();
    assert!(cgroups.len() >= 2, "{herding}");
    for cgroup in cgroups {
        assert_eq!((&cgroup["state"], &cgroup["cpus"]), (&"herded".into(), &"0-1".into()), "{herding}");
    }
    let late = ["late [] 0-3", "batch.slice []"];
    for section in ["given back", "given back and restarted"] {
        assert_eq!(lines(section), [&free[..4], &late].concat(), "{section}");
    }
}

/// Boots with the packaged unit, first as it is and then with the drop-in of the page `docs/PAGE.md`. `script` defines the
/// variables and functions that `unit_with_drop_in.sh` needs.
pub(crate) fn boot_unit(vm: Vm, page: &str, script: &str) -> ScriptReport {
    let text = std::fs::read_to_string(checkout(&format!("docs/{page}.md"))).unwrap();
    let (_, rest) = text.split_once("```ini\n").unwrap();
    let (drop_in, _) = rest.split_once("```").unwrap();
    let script = format!(
        "drop_in() {{ cat <<'END'\n{drop_in}END\n}}\n{script}\n{}",
        include_str!("unit_with_drop_in.sh")
    );
    boot(&vm.file(checkout("deploy/systemd/numaward.service"), "/numaward.service"), &script)
}

#[test]
fn unit_keeps_pins_after_restart() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).limit(Duration::from_mins(15));
    let report = boot(&vm, include_str!("systemd.sh"));

    let bytes = (64 * MIB).to_string();
    let (min, max) = (format!("MemoryMin={bytes}"), format!("MemoryMax={bytes}"));
    let mut pinned = vec!["Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t1", "2-3", "1", &bytes, &bytes];
    pinned.extend(["AllowedCPUs=2-3", "AllowedMemoryNodes=1", &max, &min]);
    let guarantee = report.json("guarantee");
    assert_eq!((&guarantee["cpus"], &guarantee["nodes"]), (&"2-3".into(), &"1".into()), "{guarantee}");
    for section in ["held", "reloaded", "restarted", "repaired", "adopted", "without the daemon"] {
        assert_pins(&report, section, &pinned);
    }
    assert_eq!(report.section("held").lines().last(), Some(bytes.as_str()), "the slice protects its unit");

    // The restarted unit has a new cgroup; the daemon and the probes follow it.
    assert_eq!(report.section("restarted policy"), "interleave:1");
    let load = report.json("restarted load");
    assert_eq!(load["pages_by_node"]["1"], 32 * MIB / 4096, "{load}");
    let misses = report.samples("restarted misses", "numaward_numa_miss_bytes_total");
    assert!(misses.len() == 2 && misses.values().all(|bytes| *bytes == 0.0), "{misses:?}");
    for section in ["restarted allocations", "adopted allocations"] {
        let held = &report.json(section)["allocations"];
        assert_eq!(held.as_array().map(Vec::len), Some(1), "{held}");
        assert_eq!((&held[0]["name"], &held[0]["cpus"]), (&"load.service".into(), &"2-3".into()), "{held}");
    }

    let free = ["Cpus_allowed_list:\t0-3", "Mems_allowed_list:\t0-1"];
    assert_pins(&report, "released", &free);
    assert_pins(&report, "released and restarted", &free);
    for section in ["released", "released and restarted"] {
        let text = report.section(section);
        for line in ["AllowedCPUs=", "AllowedMemoryNodes=", "MemoryMin=0", "MemoryMax=infinity"] {
            assert!(text.lines().any(|found| found == line), "{section}: {line}:\n{text}");
        }
    }

    let exec: Vec<_> = report.section("exec").lines().collect();
    assert_eq!(exec, ["Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t1", "0::/numaward/job", "code 0"]);
    assert!(report.section("no such unit").contains("there is no such unit, or it does not run"), "{report}");
    assert!(report.section("not running").ends_with("code 1"), "{report}");
    assert_herd(&report);
    let checks = report.section("checks");
    for check in ["systemd-unit", "systemd-refuses"] {
        assert!(checks.lines().any(|line| line.starts_with(&format!("ok {check}: "))), "{check}:\n{checks}");
    }
}

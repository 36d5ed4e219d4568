//! Guarantees are repaired after changes by other programs, a damaged ledger, and CPUs and memory that go offline.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Returns a guarantee by name.
fn allocation(report: &ScriptReport, section: &str, name: &str) -> Value {
    let all = report.json(section);
    let found = all["allocations"].as_array().unwrap().iter().find(|held| held["name"] == name).cloned();
    found.unwrap_or_else(|| panic!("{section}: no {name}: {all}"))
}

/// Returns the first drift of a guarantee.
fn drift(report: &ScriptReport, section: &str, name: &str) -> Value {
    allocation(report, section, name)["drift"][0].clone()
}

#[test]
fn repairs_changed_guarantees() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(15)), include_str!("reconcile.sh"));

    // The daemon keeps CAP_DAC_OVERRIDE and CAP_SYS_NICE, which suffice to write files of a user, and CAP_SYS_PTRACE, because the
    // strategy `native` enforces budgets.
    assert_eq!(report.section("delegated knobs"), "1\n0\n67108864\n67108864");
    assert!(
        report.section("capabilities").ends_with("0000000000880002"),
        "{}",
        report.section("capabilities")
    );

    // After the ledger was damaged, the same guarantees hold, and no knob was written for that.
    for name in ["app", "job"] {
        let (before, after) = (allocation(&report, "guaranteed", name), allocation(&report, "rebuilt", name));
        for what in ["cgroup", "target", "cpus", "nodes", "memory", "settings"] {
            assert_eq!(before[what], after[what], "{name}: {what}");
        }
    }
    assert_eq!(report.section("rebuilt process"), "Cpus_allowed_list:\t2-3\nMems_allowed_list:\t1");
    // The following text is the shell's message about the killed daemon.
    assert!(report.section("process").starts_with(report.section("rebuilt process")));
    report.assert_no_writes("rebuilt writes");
    assert_eq!(
        report.section("set aside"),
        "ledger.json.damaged-1\nledger.json.damaged-2\nledger.json.damaged-3"
    );
    let log = report.section("rebuilt log");
    assert!(log.contains("a damaged ledger was set aside, and rebuilt from live cgroups"), "{log}");
    assert!(report.section("nothing twice").ends_with("code 125"), "{}", report.section("nothing twice"));

    // A program that keeps writing a knob is named; repairs become rarer, and finally the knob is left alone.
    let writer: u64 = report.section("writer").parse().unwrap();
    for (section, state) in [("fought over", "waiting"), ("left", "left")] {
        let drift = drift(&report, section, "job");
        assert_eq!(
            (drift["state"].as_str(), drift["noticed"].as_str()),
            (Some(state), Some("write")),
            "{drift}"
        );
        let by = &drift["writer"];
        assert_eq!(
            (&by["pid"], &by["command"], &by["cgroup"]),
            (&writer.into(), &"sh".into(), &"/writer".into())
        );
    }
    assert_eq!(drift(&report, "left", "job")["count"], 10);
    assert_eq!(report.section("left knob"), "0-3");
    assert!(report.section("status").contains("job         2-3   1      256.0 MiB  cpuset.cpus"));
    let events = report.section("events");
    let reported = format!("Written by: sh (process {writer}, cgroup /writer).");
    assert!(events.contains(&reported) && events.contains("its value is kept"), "{events}");
    let metrics = report.section("drift metrics");
    assert!(metrics.contains("numaward_drift_total{knob=\"cpuset.cpus\"} 10"), "{metrics}");

    // Guaranteed memory is protected, and memory above it is throttled until `memory.high` is raised.
    let high = (32 * MIB + (256 - 32) * MIB / 10) / 4096 * 4096;
    let expected = [0, 32 * MIB, high, 256 * MIB].map(|bytes| bytes.to_string());
    assert_eq!(report.section("limits").lines().collect::<Vec<_>>(), expected);
    let raised: Vec<_> = report.section("raised limits").lines().collect();
    assert!(raised[2] == "max" || raised[2].parse().is_ok_and(|bytes: u64| bytes > 128 * MIB), "{raised:?}");
    let stalls = report.section("stalls");
    assert!(
        stalls.contains("hungry is slowed down at memory.high") && stalls.contains("is raised to"),
        "{stalls}"
    );
    for series in ["numaward_memory_high_stalls_total", "numaward_memory_high_raised_total"] {
        let metrics = report.section("stall metrics");
        let value = metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        assert!(value.is_some_and(|value: u64| value > 0), "{series}: {metrics}");
    }

    // A write to an ancestor is noticed, with its writer.
    let narrowed = drift(&report, "narrowed", "app");
    assert_eq!(
        (narrowed["knob"].as_str(), narrowed["state"].as_str()),
        (Some("cpuset.mems"), Some("ineffective"))
    );
    assert_eq!(narrowed["writer"]["command"], "sh", "{narrowed}");

    // A guaranteed CPU that goes offline stays reserved for its workload, and is restored when it is online again.
    assert_eq!(allocation(&report, "offline", "app")["missing"]["cpus"], "1");
    assert!(
        report
            .section("offline metrics")
            .contains("numaward_promised_cpus_offline{workload=\"/delegated/app\"} 1")
    );
    assert_eq!(allocation(&report, "online", "app")["missing"], Value::Null);
    assert_eq!(report.section("online knobs"), "1\n1");
    let missing = allocation(&report, "less memory", "job")["missing"].clone();
    assert!(missing["memory"][0]["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{missing}");
    let reported = report.section("machine events");
    for words in [
        "CPUs 1 went offline",
        "Guaranteed resources of app are missing",
        "All guaranteed resources of job are available",
    ] {
        assert!(reported.contains(words), "{words}: {reported}");
    }
}

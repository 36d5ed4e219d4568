//! Faults of a host and the daemon's reaction: no running workload is disturbed, and no guarantee is lost.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Returns the names of the guarantees in a section.
fn names(report: &ScriptReport, section: &str) -> Vec<String> {
    let said = report.json(section);
    let held = said["allocations"].as_array().unwrap().iter();
    held.map(|held| held["name"].as_str().unwrap().to_owned()).collect()
}

fn assert_contains(report: &ScriptReport, section: &str, words: &[&str]) {
    let text = report.section(section);
    for word in words {
        assert!(text.contains(word), "{section}: no {word:?} in\n{text}\n{report}");
    }
}

#[test]
fn host_faults_end_in_known_state() {
    let Some(bench) = TestEnvironment::open() else { return };
    let memory = Some("384M,384M,384M,384M");
    let machine = GuestTopology::parse(None, Some("2,2,1,1"), memory, None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(15));
    let report = boot(&vm, include_str!("faults.sh"));

    // In each case, the running workload keeps its CPUs and nodes.
    let pins = report.section("held");
    assert_eq!(pins.lines().count(), 5, "{pins}");
    for section in [
        "full disk held",
        "full disk: adopted",
        "read-only held",
        "damaged file held",
        "damaged held",
        "lost held",
    ] {
        assert_eq!(report.section(section), pins, "{section}:\n{report}");
    }

    let no_space = "the ledger cannot be stored, and nothing was changed: ";
    assert_contains(&report, "no room", &[no_space, "No space left on device", "code 125\n"]);
    assert_contains(&report, "no room", &["numaward/room: No such file or directory"]);
    assert!(report.section("no room").ends_with("ledger.lock"), "{report}");
    assert!(names(&report, "no room allocations").is_empty());
    assert_eq!(report.section("full disk"), "code 0");
    assert_eq!(report.section("full disk file"), "0");
    for section in ["full disk allocations", "full disk: started"] {
        assert_eq!(names(&report, section), ["fought", "held", "late"], "{section}");
    }
    assert_eq!(names(&report, "read-write allocations"), ["fought", "held"]);
    assert_eq!(report.section("room again"), "code 0");
    assert_eq!(report.section("gone"), format!("{}\n0", 16 * MIB));

    fight(&report);

    assert_contains(&report, "read-only", &[no_space, "Read-only file system", "code 125"]);
    assert_contains(&report, "read-only: start", &["/state/ledger.lock", "Read-only file system", "code 1"]);
    assert_contains(&report, "damaged file", &["ledger.json.damaged-1\n", "\nnonsense\n1"]);
    assert_eq!(names(&report, "damaged file allocations"), ["fought", "held"]);
    assert_contains(&report, "damaged", &["ledger.json.damaged-1\n", "\nkept\n1"]);
    // The previous copy of the ledger is intact and contains both.
    assert_eq!(names(&report, "damaged allocations"), ["fought", "held"]);
    // No copy is intact: the guarantees are rebuilt from the cgroups.
    assert_contains(&report, "lost", &["damaged-2\n", "damaged-3\n", "damaged-4"]);
    assert_eq!(names(&report, "lost allocations"), ["fought", "held"]);
}

/// Two knobs are left to the process that keeps writing them, and allocations outside the guarantee are counted.
fn fight(report: &ScriptReport) {
    let guaranteed = &report.json("fought")["nodes"];
    let elsewhere: u32 = report.section("elsewhere").parse().unwrap();
    assert!(*guaranteed != *elsewhere.to_string(), "{guaranteed}");
    let said = report.json("left to the other");
    let fought =
        said["allocations"].as_array().unwrap().iter().find(|held| held["name"] == "fought").unwrap();
    let drift = |knob: &str| -> Option<&Value> {
        fought["drift"].as_array()?.iter().find(|drift| drift["knob"] == knob && drift["state"] == "left")
    };
    assert_eq!(drift("cpuset.cpus").unwrap()["found"], "0-5", "{fought}");
    for drift in fought["drift"].as_array().unwrap() {
        // The writer is known only if the kernel reported the write before the daemon read the knob.
        if let Some(writer) = drift["writer"].as_object() {
            assert_eq!(writer["command"], "sh", "{fought}");
        }
    }
    assert_eq!(drift("cpuset.mems").unwrap()["found"], "0-3", "{fought}");
    let metrics = report.section("fight metrics");
    for knob in ["cpuset.cpus", "cpuset.mems"] {
        let value = |series: &str| -> u64 {
            let series = format!("numaward_{series}_total{{knob=\"{knob}\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(series.as_str())?.parse().ok()).unwrap()
        };
        let (drifted, repaired) = (value("drift"), value("drift_repaired"));
        assert!((2..=drifted).contains(&repaired), "{knob}: {drifted} drifted, {repaired} repaired");
    }

    // The kernel and the probe agree on the number of pages outside the guarantee.
    assert_eq!(report.json("missing load")["pages_by_node"][elsewhere.to_string()], 64 * MIB / 4096);
    let stat = report.numa_stat("missing numa_stat");
    let reported = report.section("misses");
    let series = format!("numaward_numa_miss_bytes_total{{workload=\"fought\",numa_node=\"{elsewhere}\"}} ");
    let missed: u64 =
        reported.lines().find_map(|line| line.strip_prefix(series.as_str())?.parse().ok()).unwrap();
    assert_near("missed", missed, stat["anon"][&elsewhere] + stat["file"][&elsewhere], 64 * MIB, 1);
    assert_near("missed", missed, 64 * MIB, 64 * MIB, 1);
    // Only the first of thousands of misses becomes an event, with the command that caused it.
    let reported = report.json("miss events");
    let [event] = reported["events"].as_array().unwrap().as_slice() else { panic!("one event: {reported}") };
    // The miss may be an allocation that the load makes before it sets its policy, on the node where it runs.
    let is_miss = event["node"].as_u64().is_some_and(|found| *guaranteed != *found.to_string());
    assert!(event["workload"] == "fought" && is_miss, "{reported}");
    assert_eq!(event["details"]["command"], "numaward-load", "{reported}");
    assert_eq!(event["details"]["promisedNodes"], *guaranteed, "{reported}");
}

//! Automatic placement: a workload without a guarantee, with its threads and memory on different nodes, gets a preferred node, if
//! that reduces remote accesses.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Returns the sampled local and remote accesses of a workload, in pages.
fn accesses(report: &ScriptReport, section: &str, workload: &str) -> [u64; 2] {
    let all = report.json(section);
    let of = all["workloads"].as_array().unwrap().iter().find(|of| of["workload"] == workload);
    let of = of.unwrap_or_else(|| panic!("{workload}: {all:#}"));
    let nodes = of["activity"]["accesses"].as_array().unwrap();
    let sum = |key: &str| nodes.iter().filter_map(|node| node[key].as_u64()).sum::<u64>();
    ["localPages", "remotePages"].map(sum)
}

/// Returns the percentage of remote accesses between two readings.
fn remote_percent(before: [u64; 2], after: [u64; 2]) -> u64 {
    let [local, remote] = [0, 1].map(|index| after[index] - before[index]);
    assert!(local + remote > 0, "nothing was sampled: {before:?} {after:?}");
    remote * 100 / (local + remote)
}

fn steps<'a>(events: &'a Value, workload: &str) -> Vec<&'a str> {
    let events = events["events"].as_array().unwrap().iter();
    let of = events.filter(|event| event["kind"] == "home" && event["workload"] == workload);
    of.map(|event| event["details"]["step"].as_str().unwrap()).collect()
}

/// Returns the percentages of remote accesses before and after the placement, from the event with `words` in its message.
fn shares(events: &Value, words: &str) -> (u64, u64) {
    let mut messages =
        events["events"].as_array().unwrap().iter().filter_map(|event| event["message"].as_str());
    let message =
        messages.find(|message| message.contains(words)).unwrap_or_else(|| panic!("{words}: {events:#}"));
    let mut percents = message.split(" %").filter_map(|part| part.rsplit(' ').next()?.parse().ok());
    (percents.next().unwrap(), percents.next().unwrap())
}

#[test]
fn places_workloads_automatically() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("3,1"), Some("768M,768M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(20)), include_str!("home.sh"));

    // The workload spreads over both nodes and is then placed on one, with its memory. The window before the placement is the
    // reference.
    let events = report.json("events of spread");
    let (before, _) = shares(&events, "spread keeps preferred node 0: ");
    assert!(before >= 10, "{before} % remote");
    for section in ["spread at home", "spread without a daemon", "spread after a crash"] {
        assert_eq!(report.section(section), "0-2", "{section}");
    }
    let memory = report.numa_stat("spread at home memory");
    assert!(memory["anon"][&0] >= 60 * MIB, "{memory:?}");
    let regions = report.json("regions");
    assert_eq!((&regions["home"], &regions["promised"]), (&"0".into(), &Value::Null));
    let off: u64 =
        regions["regions"].as_array().unwrap().iter().map(|of| of["offBytes"].as_u64().unwrap()).sum();
    assert!(off < 8 * MIB, "{regions:#}");
    let processes = |section| report.json(section)["processes"].as_u64().unwrap();
    assert_eq!(processes("regions of cgroups at one position"), processes("regions") + 256);
    assert!(report.section("regions for people").contains("automatic placement: nodes 0"));
    let [first, then] = ["spread at home, first", "spread at home, then"];
    let after = remote_percent(accesses(&report, first, "spread"), accesses(&report, then, "spread"));
    assert!(after * 2 <= before, "{before} % remote before, {after} % at home");
    println!("{before} % of the accesses were remote before, {after} % at home");

    // A workload with a memory policy for a node is not placed.
    let found = report.section("bound in the end");
    assert!(found.is_empty() || found == "0-3", "{found}");
    let memory = report.numa_stat("bound in the end memory");
    assert!(memory["anon"][&1] >= 60 * MIB, "{memory:?}");

    let events = report.json("events of bound");
    assert_eq!(steps(&events, "bound"), ["refused"], "{events:#}");
    let metrics = report.section("metrics");
    for line in [
        "numaward_home_workloads{numa_node=\"0\"} 0",
        "numaward_home_placements_total{outcome=\"placed\"} 0",
        "numaward_home_refused_workloads{reason=\"memory_policy\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}:\n{metrics}");
    }
    let off = report.section("spread when it is off");
    assert!(off.is_empty() || off == "0-3", "{off}");
}

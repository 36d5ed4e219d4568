//! Accesses, stalls, kills and intruders: what the daemon says, held against what the kernel says of each.

use std::time::Duration;

use numaward_tests::{Bench, Report, assert_near, boot};
use numaward_vm::Machine;

const PAGES: u64 = 64 * 256;

/// The sum of a metric's samples in a section that have all of these labels.
fn sum(report: &Report, section: &str, metric: &str, labels: &[&str]) -> f64 {
    let lines = report.section(section).lines();
    let matching = lines.filter(|line| {
        line.starts_with(&format!("{metric}{{")) && labels.iter().all(|label| line.contains(label))
    });
    matching.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counters of pages, and small")]
fn pages(report: &Report, section: &str, metric: &str, labels: &[&str]) -> u64 {
    sum(report, section, metric, labels) as u64
}

fn has_probe(report: &Report, probe: &str, mode: &str) -> bool {
    let wanted = format!("{{probe=\"{probe}\",mode=\"{mode}\"");
    report.section("probes").lines().any(|line| line.contains(&wanted))
}

/// Who samples whom (the table is that of the kernel's own `memory.stat` where it has one).
fn accesses(report: &Report) {
    let (remote, migrated) = ("numaward_remote_access_pages_total", "numaward_migrated_bytes_total");
    // All of it is seen once, as it is moved at once; and moved.
    let seen = pages(report, "moved", remote, &["source=\"hint_fault\"", "node=\"0\""]);
    assert_near("moved: seen from node 0", seen, PAGES, PAGES, 3);
    let moved = pages(report, "moved", migrated, &["reason=\"numa_misplaced\""]) / 4096;
    assert_near("moved: moved", moved, PAGES, PAGES, 3);
    let mut stat = report.section("moved memory.stat").lines();
    if let Some(line) = stat.find_map(|line| line.strip_prefix("numa_pages_migrated ")) {
        assert_near("moved: as memory.stat has it", moved, line.parse().unwrap(), PAGES, 3);
    }
    // As a matrix, for the host.
    let from = &report.json("bound API")["accesses"];
    let from = from.as_array().unwrap().iter().find(|of| of["node"] == 0).unwrap();
    assert_near("moved: in the API", from["remotePages"].as_u64().unwrap(), seen, seen, 3);
    let to: u64 = from["remote"].as_array().unwrap().iter().map(|to| to["pages"].as_u64().unwrap()).sum();
    assert_eq!(from["remotePages"].as_u64(), Some(to), "of two nodes it is known which: {from}");
    let estimate = sum(report, "bound workload", "numaward_remote_access_estimated_ratio", &["\"bound\""]);
    assert!((0.9..=1.0).contains(&estimate), "{}", report.section("bound workload"));
    // What is bound is not sampled; the program's own text, which is not bound, may be.
    assert!(pages(report, "bound", remote, &[]) < PAGES / 10, "{}", report.section("bound"));
    let pinned = report.section("pinned");
    let is_sampled = pinned.contains("state=\"on\"");
    assert!(is_sampled != pinned.contains("state=\"skipped_cpuset\""), "{pinned}");
    assert_eq!(is_sampled, pages(report, "pinned", remote, &[]) >= PAGES, "{pinned}");
    assert!(sum(report, "pinned", migrated, &["numa_misplaced"]) < 0.5, "it may not move");
}

fn stalls_and_kills(report: &Report) {
    let events = report.section("tight events");
    let high = events.lines().find_map(|line| line.strip_prefix("high ")).unwrap().parse().unwrap();
    let stalls = pages(report, "tight stalls", "numaward_reclaim_stall_seconds_count", &[]);
    // Reclaim that is not for memory.high may come on top.
    assert_near("stalls", stalls, high, high, 10);
    assert!(sum(report, "tight stalls", "numaward_reclaim_stall_seconds_sum", &[]) > 0.0);

    let told = &report.json("stall events")["events"];
    assert_eq!(told[0]["details"]["command"], "numaward-load", "{told}");

    for (name, constraint, severity) in [
        ("limited", "memcg", "warning"),
        ("cpuset", "cpuset", "critical"),
        ("policy", "mempolicy", "critical"),
    ] {
        let section = format!("killed {name} metrics");
        let kills = |labels: &[&str]| sum(report, &section, "numaward_oom_kills_total", labels);
        let label = format!("constraint=\"{constraint}\"");
        assert_eq!((kills(&[&label]), kills(&[])), (1.0, 1.0), "{name}: {report}");
        let told = &report.json(&format!("killed {name} events"))["events"][0];
        assert_eq!(told["details"]["constraint"], constraint, "{told}");
        assert_eq!(told["details"]["command"], "numaward-load", "{told}");
        assert_eq!(told["severity"], severity, "{told}");
    }
}

fn intruders(report: &Report) {
    let metric = "numaward_exclusive_cpu_intruder_seconds_total";
    for class in ["host", "workload"] {
        let before = sum(report, "clean", metric, &[&format!("class=\"{class}\"")]);
        assert!(before < 0.1, "{class}: {before} s although nobody was there");
    }
    let ticks: u64 = report.section("intruder ticks").trim().parse().unwrap();
    let host = sum(report, "intruder metrics", metric, &["class=\"host\""]);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some seconds")]
    let hundredths = (host * 100.0) as u64;
    assert_near("intruders, in hundredths of a second", hundredths, ticks, ticks, 5);
    let told = report.json("intruders");
    assert_eq!(told["watching"], true);
    let first = &told["intruders"][0];
    assert_eq!(
        (first["command"].as_str(), first["class"].as_str()),
        (Some("numaward-load"), Some("host")),
        "{told}"
    );
    let cpu = &report.json("status")["exclusiveCpus"][0];
    assert_eq!(cpu["workload"], "numaward/owner");
    assert!(cpu["hardInterrupts"].as_u64().is_some_and(|count| count > 0), "{cpu}");
    let people = report.section("status for people");
    assert!(people.contains("EXCLUSIVE CPU") && people.contains("SAMPLED"), "{people}");
    let told = &report.json("intruder events")["events"];
    let event = told.as_array().unwrap().iter().find(|event| event["details"]["command"] == "numaward-load");
    let event = event.unwrap_or_else(|| panic!("{told}"));
    assert_eq!(
        (event["workload"].as_str(), event["details"]["class"].as_str()),
        (Some("numaward/owner"), Some("host"))
    );
    assert_eq!(event["details"]["cpus"], cpu["cpu"].to_string(), "{told}");
}

#[test]
fn what_the_other_probes_tell_is_what_the_kernel_says() {
    let Some(bench) = Bench::open() else { return };
    let machine = Machine::parse(None, Some("2,2"), Some("768M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(20)), include_str!("probes.sh"));
    for (probe, mode) in [
        ("hint", "fentry"),
        ("scan", "fexit"),
        ("migrate", "tp_btf"),
        ("stall", "tp_btf"),
        ("oom_kill", "fentry"),
        ("switch", "tp_btf"),
    ] {
        assert!(has_probe(&report, probe, mode), "{}", report.section("probes"));
    }
    accesses(&report);
    stalls_and_kills(&report);
    intruders(&report);
    assert_eq!(report.section("exit code"), "0");
}

//! Accesses, stalls, OOM kills, intruders, misses, and the assignment of few slots: the daemon's figures match the kernel's own.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;
use serde_json::{Value, json};

/// Bytes that a load touches.
const LOAD: u64 = 64 << 20;

/// Returns the sum of the samples of a metric in a section that have all of these labels.
fn sum(report: &ScriptReport, section: &str, metric: &str, labels: &[&str]) -> f64 {
    let lines = report.section(section).lines();
    let matching = lines.filter(|line| {
        line.starts_with(&format!("{metric}{{")) && labels.iter().all(|label| line.contains(label))
    });
    matching.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counters of pages, and small")]
fn pages(report: &ScriptReport, section: &str, metric: &str, labels: &[&str]) -> u64 {
    sum(report, section, metric, labels) as u64
}

fn has_probe(report: &ScriptReport, probe: &str, mode: &str) -> bool {
    let wanted = format!("{{probe=\"{probe}\",mode=\"{mode}\"");
    report.section("probes").lines().any(|line| line.contains(&wanted))
}

/// Returns the pages that NUMA balancing moved, from `memory.stat`, which counts them since about Linux 6.12.
fn migrated_by_kernel(report: &ScriptReport, workload: &str) -> Option<u64> {
    let mut stat = report.section(&format!("{workload} memory.stat")).lines();
    stat.find_map(|line| line.strip_prefix("numa_pages_migrated "))?.parse().ok()
}

/// Sampled accesses by workload, compared with the kernel's `memory.stat` if it has these figures.
fn accesses(report: &ScriptReport, page: u64) {
    let of_load = LOAD / page;
    let (remote, migrated) = ("numaward_remote_access_pages_total", "numaward_migrated_bytes_total");
    // NUMA balancing samples each page and moves it at once; a page that it cannot move is sampled again.
    let seen = pages(report, "moved", remote, &["source=\"hint_fault\"", "numa_node=\"0\""]);
    let sampled = report.section("moved as sampled by the kernel").parse().unwrap();
    assert_near("moved: seen from node 0", seen, sampled, sampled, 3);
    assert!(seen >= of_load / 100 * 97, "{seen} of {of_load} pages: {report}");
    let labels = ["reason=\"numa_misplaced\",from_numa_node=\"1\",to_numa_node=\"0\""];
    let moved = pages(report, "moved", migrated, &labels) / page;
    assert_near("moved: moved", moved, of_load, of_load, 3);
    if let Some(pages) = migrated_by_kernel(report, "moved") {
        assert_near("moved: as memory.stat has it", moved, pages, of_load, 3);
    }
    // The matrix of the host includes the accesses of other workloads.
    let from = &report.json("bound API")["accesses"];
    let from = from.as_array().unwrap().iter().find(|of| of["node"] == 0).unwrap();
    let all = pages(report, "all accesses", remote, &["source=\"hint_fault\"", "numa_node=\"0\""]);
    assert!(all >= seen, "{report}");
    assert_near("moved: in the API", from["remotePages"].as_u64().unwrap(), all, all, 3);
    let to: u64 = from["remote"].as_array().unwrap().iter().map(|to| to["pages"].as_u64().unwrap()).sum();
    assert_eq!(from["remotePages"].as_u64(), Some(to), "of two nodes it is known which: {from}");
    let estimate = sum(report, "bound workload", "numaward_remote_access_estimated_ratio", &["\"bound\""]);
    assert!((0.9..=1.0).contains(&estimate), "{}", report.section("bound workload"));
    // The kernel does not sample bound memory.
    assert_eq!(pages(report, "bound", remote, &[]), 0, "{}", report.section("bound"));
    assert_eq!(migrated_by_kernel(report, "bound").unwrap_or(0), 0, "{report}");
    let pinned = report.section("pinned");
    let is_sampled = pinned.contains("state=\"on\"");
    assert!(is_sampled != pinned.contains("state=\"skipped_cpuset\""), "{pinned}");
    assert_eq!(is_sampled, pages(report, "pinned", remote, &[]) >= of_load, "{pinned}");
    assert!(sum(report, "pinned", migrated, &["numa_misplaced"]) < 0.5, "it may not move");
}

/// CPU time by node, compared with `cpu.stat`.
fn cpu_time(report: &ScriptReport) {
    let on = |section, node: u32| {
        let labels = [&*format!("numa_node=\"{node}\"")];
        sum(report, section, "numaward_cpu_seconds_total", &labels)
    };
    let usage = report.section("CPU time of cpu.stat").lines();
    let usage: Vec<f64> = usage.map(|line| line.parse::<f64>().unwrap() / 1e6).collect();
    let [all, inner] = usage[..] else { panic!("{usage:?}") };
    let [on_0, on_1] = [0, 1].map(|node| on("CPU time", node));
    assert!((on_0 + on_1 - all).abs() < 0.01, "{on_0} + {on_1} s, cpu.stat has {all} s");
    // A load starts on any CPU, and is then bound to one.
    for (node, found, expected) in [(0, on_0, inner), (1, on_1, all - inner)] {
        assert!(
            (found - expected).abs() <= 0.05 * expected,
            "node {node}: {found} s, {expected} s were used"
        );
    }
    let left = on("CPU time without inner", 0);
    assert!(left >= on_0, "the time of a removed cgroup stays: {left} s after {on_0} s");
}

/// A changed cpuset, which moves pages to the other node, and compaction, which moves them within their nodes.
fn migrations(report: &ScriptReport, page: u64) {
    let metric = "numaward_migrated_bytes_total";
    let labels = ["workload=\"other\",reason=\"syscall\",from_numa_node=\"0\",to_numa_node=\"1\""];
    let grown = pages(report, "migrations after cpuset", metric, &labels)
        - pages(report, "migrations before cpuset", metric, &labels);
    let driven: u64 = report.section("pages moved by cpuset").trim().parse().unwrap();
    assert!(driven >= LOAD / page, "{report}");
    assert_near("driven from node 0 to node 1", grown / page, driven, driven, 1);
    let compacted: u64 = report.section("pages moved by compaction").trim().parse().unwrap();
    assert!(compacted > 0, "{report}");
    let after = report.section("migrations after compaction");
    assert_eq!(pages(report, "migrations after compaction", metric, &["compaction"]), 0, "{after}");
    assert_eq!(
        pages(report, "migrations after compaction", metric, &[]),
        pages(report, "migrations before compaction", metric, &[]),
        "{compacted} pages moved within their nodes: {after}"
    );
    assert!(!after.contains("unknown"), "{after}");
}

fn stalls_and_kills(report: &ScriptReport) {
    let events = report.section("tight events");
    let high = events.lines().find_map(|line| line.strip_prefix("high ")).unwrap().parse().unwrap();
    let stalls = pages(report, "tight stalls", "numaward_reclaim_stall_seconds_count", &[]);
    // Reclaim for reasons other than memory.high may be counted too.
    assert_near("stalls", stalls, high, high, 10);
    assert!(sum(report, "tight stalls", "numaward_reclaim_stall_seconds_sum", &[]) > 0.0);

    let reported = &report.json("stall events")["events"];
    assert_eq!(reported[0]["details"]["command"], "numaward-load", "{reported}");

    for (name, constraint, severity) in [
        ("limited", "memcg", "warning"),
        ("cpuset", "cpuset", "critical"),
        ("policy", "mempolicy", "critical"),
    ] {
        // 128 plus the number of SIGKILL.
        assert_eq!(report.section(&format!("killed {name} code")), "code 137", "{report}");
        let section = format!("killed {name} metrics");
        let kills = |labels: &[&str]| sum(report, &section, "numaward_oom_kills_total", labels);
        let label = format!("constraint=\"{constraint}\"");
        assert_eq!((kills(&[&label]), kills(&[])), (1.0, 1.0), "{name}: {report}");
        let has_room = kills(&[&label, "elsewhere=\"free\""]) > 0.0;
        assert_eq!(has_room, constraint != "memcg", "{name}: {report}");
        let reported = &report.json(&format!("killed {name} events"))["events"][0];
        assert_eq!(reported["details"]["constraint"], constraint, "{reported}");
        assert_eq!(reported["details"]["command"], "numaward-load", "{reported}");
        assert_eq!(reported["severity"], severity, "{reported}");
    }
}

fn intruders(report: &ScriptReport) {
    let metric = "numaward_exclusive_cpu_intruder_seconds_total";
    for class in ["host", "workload"] {
        let before = sum(report, "clean", metric, &[&format!("class=\"{class}\"")]);
        assert!(before < 0.001, "{class}: {before} s although nobody was there");
    }
    // Each class has one intruder, and the kernel reports its CPU time.
    let grown = |of: &dyn Fn(&str) -> f64| of("after") - of("before");
    for (class, used, scale) in [("host", "intruder ticks", 100.0), ("workload", "neighbour usage", 1e6)] {
        let used = grown(&|when| {
            let section = report.section(&format!("{used} {when}"));
            section.trim().parse::<f64>().unwrap() / scale
        });
        let reported = grown(&|when| {
            sum(report, &format!("intruder metrics {when}"), metric, &[&format!("class=\"{class}\"")])
        });
        assert!(
            (reported - used).abs() <= 0.05 * used,
            "{class}: {reported} s are reported, {used} s were used"
        );
    }
    let reported = report.json("intruders");
    assert_eq!(reported["watching"], true);
    let first: Vec<_> = reported["intruders"].as_array().unwrap().iter().take(2).collect();
    for (class, workload) in [("host", Value::Null), ("workload", json!("neighbour"))] {
        let found = first.iter().find(|intruder| intruder["class"] == class);
        let found = found.unwrap_or_else(|| panic!("no {class} in {reported}"));
        assert_eq!(
            (&found["command"], &found["workload"]),
            (&json!("numaward-load"), &workload),
            "{reported}"
        );
    }
    let cpu = &report.json("status")["exclusiveCpus"][0];
    assert_eq!(cpu["workload"], "numaward/owner");
    assert!(cpu["hardInterrupts"].as_u64().is_some_and(|count| count > 0), "{cpu}");
    let people = report.section("status for people");
    assert!(people.contains("EXCLUSIVE CPU") && people.contains("SAMPLED"), "{people}");
    let reported = &report.json("intruder events")["events"];
    let event =
        reported.as_array().unwrap().iter().find(|event| event["details"]["command"] == "numaward-load");
    let event = event.unwrap_or_else(|| panic!("{reported}"));
    assert_eq!(event["workload"], "numaward/owner", "{reported}");
    assert!(["host", "workload"].contains(&event["details"]["class"].as_str().unwrap()), "{reported}");
    assert_eq!(event["details"]["cpus"], cpu["cpu"].to_string(), "{reported}");
    let workloads = report.json("intruded workloads")["workloads"].take();
    let of = |name: &str| workloads.as_array().unwrap().iter().find(|of| of["workload"] == name).unwrap();
    assert_eq!(of("numaward/owner")["intrudedCpus"], cpu["cpu"].to_string(), "{workloads}");
    assert!(of("neighbour")["intrudedCpus"].is_null(), "{workloads}");
    let owner = report.section("guarantees").lines().find(|line| line.starts_with("owner "));
    assert!(owner.is_some_and(|line| line.ends_with("intruders")), "{report}");
}

/// The cost of the probes is reported.
fn cost(report: &ScriptReport) {
    let cost = report.json("cost")["cost"].clone();
    let of = |probe: &str| {
        let probes = cost["probes"].as_array().unwrap_or_else(|| panic!("{cost}"));
        probes
            .iter()
            .find(|of| of["probe"] == probe)
            .unwrap_or_else(|| panic!("no {probe} in {cost}"))
            .clone()
    };
    let alloc = of("alloc");
    assert!(alloc["runs"].as_u64() > Some(0) && alloc["nanoseconds"].as_u64() > Some(0), "{alloc}");
    assert_eq!(of("oom_kill")["runs"], 0, "nobody was killed");
    let memory = report.section("memory of maps").lines();
    let bytes: Vec<u64> = memory.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
    assert!(bytes.len() == 7 && bytes.iter().all(|bytes| (1 << 10..16 << 20).contains(bytes)), "{bytes:?}");
}

/// The stream delivers the same events to each listener, in the same order.
fn stream(report: &ScriptReport) {
    let reported: Vec<Value> = report
        .section("stream")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for kind in ["stall", "oom_kill", "intruder"] {
        assert!(reported.iter().any(|event| event["kind"] == kind), "no {kind} in {reported:?}");
    }
    for section in ["stall events", "killed cpuset events", "intruder events"] {
        for event in report.json(section)["events"].as_array().unwrap() {
            assert!(reported.contains(event), "{event} is not in {reported:?}");
        }
    }
    assert!(reported.is_sorted_by_key(|event| event["id"].as_u64()), "{reported:?}");
}

/// Three slots for five workloads: workloads with a guarantee get one at once, then the busy ones.
fn few_slots(report: &ScriptReport) {
    assert_eq!(report.section("counters of those that came late"), "", "all slots are taken");
    assert!(report.section("busy counters").contains("workload=\"busy\""));
    assert!(report.section("few slots").contains("numaward_workloads{counters=\"own\"} 3\n"), "{report}");
    assert!(report.section("few slots").contains("numaward_workloads{counters=\"other\"} 2\n"), "{report}");
    let workloads = report.json("few workloads");
    let without = |name: &str| {
        let mut workloads = workloads["workloads"].as_array().unwrap().iter();
        let found = workloads.find(|workload| workload["workload"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {workloads:?}"))["counters"] == "other"
    };
    assert!(!without("late") && !without("busy"), "{workloads}");
    // Workloads without a slot are counted in one sum, with processes outside of workloads.
    let rest = |section: &str| pages(report, section, "numaward_memory_allocated_bytes_total", &[]) >> 20;
    let (grown, loads) = (
        rest("other after") - rest("other before"),
        ["early", "lazy"].into_iter().filter(|name| without(name)).count() as u64,
    );
    assert!(loads > 0 && (32 * loads..48 * loads).contains(&grown), "{loads} loads, {grown} MiB");
    assert_eq!(report.json("few workloads then")["workloads"].as_array().unwrap().len(), 6, "{report}");

    // The first page outside the guaranteed nodes becomes an event with the command; the metric counts all of them.
    let nodes = report.json("guaranteed")["nodes"].clone();
    let other = u64::from(nodes == "0");
    let reported = report.json("miss events");
    let [event] = reported["events"].as_array().unwrap().as_slice() else { panic!("one event: {reported}") };
    assert_eq!(
        (event["workload"].as_str(), event["node"].as_u64()),
        (Some("late"), Some(other)),
        "{reported}"
    );
    assert_eq!(event["details"]["command"], "numaward-load", "{reported}");
    assert_eq!(event["details"]["promisedNodes"], nodes, "{reported}");
    let missed = |labels: &[&str]| pages(report, "misses", "numaward_numa_miss_bytes_total", labels);
    let node = format!("numa_node=\"{other}\"");
    assert_near("misses", missed(&["workload=\"late\"", &node]), 16 << 20, 16 << 20, 3);
    assert_eq!(missed(&[]), missed(&[&node]), "{}", report.section("misses"));
}

#[test]
fn probes_agree_with_kernel() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,512M"), None).unwrap();
    let page = bench.kernel().page_size();
    let script = format!("pages_of_load={}\n{}", LOAD / page, include_str!("probes.sh"));
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(20)), &script);
    for (probe, mode) in [
        ("charge", "fexit"),
        ("hugepages", "fexit"),
        ("hint", "fentry"),
        ("scan", "fexit"),
        ("migrate", "fexit"),
        ("stall", "tp_btf"),
        ("oom_kill", "fentry"),
        ("switch", "tp_btf"),
        ("cpu_time", "on_demand"),
    ] {
        assert!(has_probe(&report, probe, mode), "{}", report.section("probes"));
    }
    cost(&report);
    cpu_time(&report);
    accesses(&report, page);
    migrations(&report, page);
    stalls_and_kills(&report);
    intruders(&report);
    stream(&report);
    few_slots(&report);
    for daemon in ["first", "few"] {
        assert_eq!(report.section(&format!("{daemon} exit code")), "code 0");
    }
}

#[test]
fn map_memory_is_bounded() {
    let Some(bench) = TestEnvironment::open() else { return };
    // Many possible CPUs, few of them online: the size of per-CPU maps depends on the possible ones. The load is bound to node 0,
    // where most of the kernel's own memory is.
    let memory = format!("768M,{}", ["448M"; 7].join(","));
    let machine = GuestTopology::parse(Some(8), Some(&["30"; 8].join(",")), Some(&memory), None);
    let vm = bench.vm(machine.unwrap()).append("maxcpus=8").limit(Duration::from_mins(20));
    let report = boot(&vm, include_str!("maps.sh"));
    assert_eq!(report.section("possible CPUs"), "0-239");
    let status = report.json("status");
    let memory = status["mapMemory"].as_object().unwrap();
    let families: Vec<_> = memory.keys().collect();
    assert_eq!(
        families,
        ["alloc", "charge", "cpu_time", "faults", "hugepages", "switch", "trouble"],
        "{status}"
    );
    let total: u64 = memory.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(total < 128 << 20, "{memory:?}");
    // The metrics and the text output have the same figures.
    let metrics = report.section("metrics").lines();
    let reported: u64 = metrics.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
    assert_eq!(reported, total, "{}", report.section("metrics"));
    assert!(report.section("status for people").contains("memory of all maps: alloc "), "{report}");
    // If per-CPU counters would be too large, CPUs share counters; the sums stay right.
    let counters = status["maps"].as_array().unwrap().iter().find(|map| map["map"] == "CTR").unwrap();
    assert_eq!(counters["capacity"], 10_011 * 8 * 8, "each node's, {counters}");
    let counted =
        pages(&report, "counted by itself", "numaward_memory_allocated_bytes_total", &["locality=\"local\""]);
    assert_near(report.section("counted by itself"), counted, 16 << 20, 16 << 20, 5);
    assert_eq!(report.section("series").trim(), "10000");
    let kib = |key: &str| {
        let mut lines = report.section("daemon").lines();
        let line = lines.find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap()
    };
    // The program of the tests is larger than the released one, so only anonymous memory is checked.
    assert!(kib("RssAnon:") < 128 << 10, "{}", report.section("daemon"));
    assert_eq!(report.section("exit code"), "0");
}

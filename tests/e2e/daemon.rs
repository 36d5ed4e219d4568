//! The daemon's figures for workloads with known allocations match the kernel's `memory.numa_stat`: with all privileges, with
//! few, without BTF, and under lockdown. A daemon that cannot count reports the reason.

use std::{collections::BTreeMap, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const NODES: usize = 4;

/// Bytes per node.
type PerNode = [u64; NODES];

/// Returns a machine with nodes of different sizes; the last node has no CPUs.
fn machine() -> GuestTopology {
    let distances = "10,21,31,41;21,10,22,32;31,22,10,23;41,32,23,10";
    GuestTopology::parse(None, Some("2,2,1,0"), Some("1G,768M,512M,256M"), Some(distances)).unwrap()
}

/// Boots and runs these rounds of `daemon.sh`.
fn run(bench: &TestEnvironment, rounds: &str, append: &str) -> ScriptReport {
    let vm = bench.vm(machine()).append(append).limit(Duration::from_mins(10));
    let report = boot(&vm, &format!("rounds='{rounds}'\n{}", include_str!("daemon.sh")));
    for round in rounds.split(' ') {
        assert_eq!(report.section(&format!("{round} exit code")), "0");
    }
    report
}

/// Returns the local and remote bytes by node.
fn counters(report: &ScriptReport, round: &str, name: &str) -> [PerNode; 2] {
    let mut counters = [PerNode::default(); 2];
    let section = format!("{round} {name} counters");
    for line in report.section(&section).lines() {
        let words: Vec<_> = line.split(' ').collect();
        let [node, locality, bytes] = words[..] else { panic!("section {section:?}: cannot read {line:?}") };
        counters[usize::from(locality == "remote")][node.parse::<usize>().unwrap()] = bytes.parse().unwrap();
    }
    counters
}

/// Asserts that a workload has these bytes by node.
fn check(report: &ScriptReport, round: &str, name: &str, local: PerNode, remote: PerNode) {
    let size = 64 * MIB;
    let [near, far] = counters(report, round, name);
    let stat = report.numa_stat(&format!("{round} {name} numa_stat"));
    for node in 0..NODES {
        let what = |locality: &str| format!("{round}: {name}: {locality} on node {node}");
        let id = u32::try_from(node).unwrap();
        let resident = stat["anon"][&id] + stat["file"][&id];
        assert_near(&what("allocated"), near[node] + far[node], resident, size, 1);
        assert_near(&what("local"), near[node], local[node], size, 1);
        assert_near(&what("remote"), far[node], remote[node], size, 1);
    }
}

fn check_all(report: &ScriptReport, round: &str) {
    let (all, half, none) = (64 * MIB, 32 * MIB, PerNode::default());
    let check = |name, local, remote| check(report, round, name, local, remote);
    check("local", [all, 0, 0, 0], none);
    check("bound", none, [0, all, 0, 0]);
    check("interleaved", [half, 0, 0, 0], [0, half, 0, 0]);
    check("thp", [0, all, 0, 0], none);
    check("tmpfs", none, [0, all, 0, 0]);
    // Allocations of a descendant cgroup count for its workload.
    check("nested", none, [0, all, 0, 0]);
    check("third", [0, 0, all, 0], none);
    // A node without CPUs has remote allocations only.
    check("expander", none, [0, 0, 0, all]);
}

/// Returns the attach mode of the allocation probe, and the reason if a better mode was not possible.
fn mode(report: &ScriptReport, round: &str) -> (String, String) {
    let mut lines = report.section(&format!("{round} probes")).lines();
    let line = lines.find(|line| line.starts_with("numaward_probe_info{probe=\"alloc\""));
    let label = |name: &str| {
        let (_, rest) = line?.split_once(&format!("{name}=\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    (label("mode").unwrap(), label("reason").unwrap())
}

/// Asserts the attach modes of the other probes.
fn check_others(report: &ScriptReport, round: &str, modes: [&str; 6]) {
    let probes = report.section(&format!("{round} probes"));
    for (probe, mode) in ["hint", "scan", "migrate", "stall", "oom_kill", "switch"].into_iter().zip(modes) {
        let expected = format!("numaward_probe_info{{probe=\"{probe}\",mode=\"{mode}\"");
        assert!(probes.lines().any(|line| line.starts_with(&expected)), "{round}, {probe}: {probes}");
    }
}

/// Asserts that the probe of charges has one of these modes.
fn check_charge(report: &ScriptReport, round: &str, modes: &[&str]) {
    let probes = report.section(&format!("{round} probes"));
    let is_expected =
        |mode: &&str| probes.contains(&format!("numaward_probe_info{{probe=\"charge\",{mode}}} 1"));
    assert!(modes.iter().any(is_expected), "{round}: {probes}");
}

const BEST: [&str; 6] = ["fentry", "fexit", "fexit", "tp_btf", "fentry", "tp_btf"];
const WITHOUT_BTF: [&str; 6] =
    ["kprobe", "absent", "tracepoint", "tracepoint", "memory_events", "tracepoint"];

#[test]
fn counters_match_the_kernel() {
    let Some(bench) = TestEnvironment::open() else { return };
    let rounds = "plain unprivileged without-btf slots nobody without-cgroups";
    let report = run(&bench, rounds, "");
    check_all(&report, "plain");
    // The kernel version decides between the two hooks: see the documentation of the probes.
    assert!(["tp_btf", "tracepoint"].contains(&mode(&report, "plain").0.as_str()));
    check_all(&report, "unprivileged");
    assert_eq!(mode(&report, "unprivileged").0, "tp_btf", "the tracepoint needs CAP_SYS_ADMIN");
    check_all(&report, "without-btf");
    let (mode, reason) = mode(&report, "without-btf");
    assert!(mode == "tracepoint" && reason == "btf", "{mode}: {reason}");
    for (round, modes) in [("plain", BEST), ("unprivileged", BEST), ("without-btf", WITHOUT_BTF)] {
        check_others(&report, round, modes);
        let is_attached = round != "without-btf";
        let charge = if is_attached { r#"mode="fexit",reason="""# } else { r#"mode="absent",reason="btf""# };
        check_charge(&report, round, &[charge]);
    }

    check_machine(&report);
    check_slots(&report);
    let second = report.section("second daemon");
    assert!(second.contains("127.0.0.1:9560") && second.contains("in use"), "{second}");
    check_degraded(&report);
}

#[test]
fn counters_match_under_lockdown() {
    let Some(bench) = TestEnvironment::open() else { return };
    let report = run(&bench, "lockdown", "lockdown=confidentiality");
    assert!(report.section("lockdown").contains("[confidentiality]"), "{}", report.section("lockdown"));
    check_all(&report, "lockdown");
    assert_eq!(mode(&report, "lockdown").0, "tp_btf", "lockdown closes the tracepoint");
    check_others(&report, "lockdown", BEST);
    // Where the owner of a page is no argument of the function, it has to be read.
    check_charge(&report, "lockdown", &[r#"mode="fexit",reason="""#, r#"mode="absent",reason="permission""#]);
    let doctor = report.json("doctor");
    let lockdown = doctor.as_array().unwrap().iter().find(|check| check["check"] == "lockdown").unwrap();
    assert!(lockdown["finding"].as_str().unwrap().contains("confidentiality"), "{lockdown}");
}

/// The reported nodes match the requested machine.
fn check_machine(report: &ScriptReport) {
    let topology = report.json("topology");
    let nodes = report.json("nodes");
    assert_eq!(topology["nodes"].as_array().unwrap().len(), NODES);
    assert_eq!(nodes["nodes"].as_array().unwrap().len(), NODES);
    let expected = [
        ("0-1", 1024, [10, 21, 31, 41]),
        ("2-3", 768, [21, 10, 22, 32]),
        ("4", 512, [31, 22, 10, 23]),
        ("", 256, [41, 32, 23, 10]),
    ];
    for (id, (cpus, mib, distances)) in expected.into_iter().enumerate() {
        let total: u64 = report.section(&format!("node{id} MemTotal")).parse::<u64>().unwrap() * 1024;
        // The kernel reserves a part of the memory.
        assert!((mib * MIB * 3 / 4..=mib * MIB).contains(&total), "node {id} of {mib} MiB has {total} bytes");
        let node = &topology["nodes"][id];
        let distances: serde_json::Map<_, _> =
            distances.iter().enumerate().map(|(to, distance)| (to.to_string(), json!(distance))).collect();
        let found = ["node", "cpus", "memoryBytes", "memoryOnly", "distances"].map(|key| node[key].clone());
        assert_eq!(found, [json!(id), json!(cpus), json!(total), json!(id == 3), Value::Object(distances)]);
        let hugepages = if id == 1 { 16 } else { 0 };
        let pool = |node: &Value| {
            let pools = node["hugepages"].as_array().unwrap();
            pools.iter().find(|pool| pool["size"] == "2Mi").unwrap()["totalPages"].as_u64().unwrap()
        };
        assert_eq!(pool(node), hugepages);

        let node = &nodes["nodes"][id];
        assert_eq!([&node["node"], &node["cpus"]], [&json!(id), &json!(cpus)]);
        let kind = |name: &str| {
            let kinds = node["memory"].as_array().unwrap();
            kinds.iter().find(|kind| kind["kind"] == name).unwrap()["totalBytes"].as_u64().unwrap()
        };
        assert_eq!(kind("hugepages-2Mi"), hugepages * 2 * MIB);
        assert_eq!(kind("memory"), total - hugepages * 2 * MIB);
        // Each node has allocations of at least one workload.
        let allocated = ["localBytes", "remoteBytes"].map(|key| node["allocated"][key].as_u64().unwrap());
        assert!(allocated.iter().sum::<u64>() >= 63 * MIB, "{node}");
    }
    assert_eq!(topology["onlineCpus"], "0-4");
    let table = report.section("topology for people");
    for line in ["3         41  32  23  10", "3     none: memory only"] {
        assert!(table.contains(line), "{table}");
    }
}

/// Returns the values of all series of a sample.
fn sample(report: &ScriptReport, number: u32) -> BTreeMap<&str, f64> {
    let lines = report.section(&format!("sample {number}")).lines();
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

/// A slot and a workload name are reused, and no counter decreases.
fn check_slots(report: &ScriptReport) {
    let samples: Vec<_> = (1..=5).map(|number| sample(report, number)).collect();
    assert!(samples.iter().all(|sample| sample.len() > 20), "{samples:#?}");
    for (before, after) in samples.iter().zip(&samples[1..]) {
        for (name, value) in before {
            let now = after.get(name).unwrap_or_else(|| panic!("{name} has gone"));
            assert!(now >= value, "{name} went back from {value} to {now}");
        }
    }
    let allocated = |sample: usize, workload: &str| -> u64 {
        let start = format!("numaward_memory_allocated_bytes_total{{workload=\"{workload}\",");
        let series = samples[sample - 1].iter().filter(|(name, _)| name.starts_with(&start));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
        let bytes: Vec<_> = series.map(|(_, &bytes)| bytes as u64).collect();
        assert!(!bytes.is_empty(), "sample {sample} has nothing of {workload}");
        bytes.iter().sum()
    };
    let size = 64 * MIB;
    assert_near("the first workload", allocated(1, "first"), size, size, 1);
    assert_near("when it is gone", allocated(2, "first"), allocated(1, "first"), size, 1);
    assert_eq!(allocated(3, "heir"), 0, "the slot's next holder begins at nothing");
    assert_near("the slot's next holder", allocated(4, "heir"), size / 2, size, 1);
    assert_eq!(allocated(4, "first"), allocated(2, "first"));
    assert_near("the name that came back", allocated(5, "first"), 2 * size, size, 1);
    assert_eq!(allocated(5, "filler"), 0);
}

/// A daemon that cannot count, or finds no workload, runs and reports the reason.
fn check_degraded(report: &ScriptReport) {
    let probe = |round: &str| {
        let status = report.json(&format!("{round} status"));
        let mut probes = status["probes"].as_array().unwrap().iter();
        probes.find(|probe| probe["probe"] == "alloc").unwrap().clone()
    };
    let workloads =
        |round: &str| report.json(&format!("{round} workloads"))["workloads"].as_array().unwrap().clone();
    let refused = probe("nobody");
    assert_eq!(refused["mode"], "absent");
    let reason = refused["reason"].as_str().unwrap();
    assert!(reason.contains("EPERM") && reason.contains("CAP_BPF"), "{reason}");
    let probes = report.json("nobody status")["probes"].as_array().unwrap().clone();
    assert_eq!(probes.len(), 10, "{probes:#?}");
    for other in probes {
        let is_attached =
            !["absent", "memory_stat", "memory_events"].contains(&other["mode"].as_str().unwrap());
        let reason = other["reason"].as_str().unwrap_or_default();
        assert!(!is_attached && reason.contains("EPERM"), "{other}");
    }
    let doctor = report.json("nobody doctor");
    let check = |name: &str| {
        let found = doctor.as_array().unwrap().iter().find(|check| check["check"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {doctor}")).clone()
    };
    assert_eq!(check("privileges")["verdict"], "fail", "{doctor}");
    for probe in ["probe alloc", "probe oom_kill", "probe switch"] {
        assert!(check(probe)["finding"].as_str().unwrap().contains("EPERM"), "{doctor}");
    }
    let log = report.section("nobody log");
    assert!(log.contains("takes no requests for guarantees") && log.contains("/run/numaward"), "{log}");
    let found = workloads("nobody");
    let watched = found.iter().find(|workload| workload["workload"] == "watched").unwrap();
    assert_eq!(watched["counters"], "none", "{watched}");

    assert_ne!(probe("without-cgroups")["mode"], "absent");
    let degraded = report.json("without-cgroups status")["degraded"].clone();
    let cgroups = degraded.as_array().unwrap().iter().find(|degraded| degraded["part"] == "cgroups").unwrap();
    assert!(cgroups["reason"].as_str().unwrap().contains("cgroup v2"), "{cgroups}");
    let found: Vec<_> =
        workloads("without-cgroups").iter().map(|workload| workload["workload"].clone()).collect();
    assert_eq!(found, ["other"], "everything is counted together");
}

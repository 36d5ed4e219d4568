//! Follows the guides with real software under systemd: the figures that numaward shows before and after a guarantee. The script
//! of each guide contains every command of its page.

use std::{fs, path::PathBuf, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Cache, GuestTopology, NEW_SOFTWARE, SOFTWARE, SOFTWARE_IMAGE, Vm};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A guide: page, script and workload.
struct Guide {
    page: &'static str,
    script: &'static str,
    workload: &'static str,
}

impl Guide {
    /// Boots the machine of the guides with additions, and runs the script.
    fn follow(&self, add: impl FnOnce(Vm) -> Vm) -> Option<GuideRun> {
        let bench = TestEnvironment::open()?;
        self.assert_commands();
        let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
        let vm = bench
            .vm(machine)
            .systemd_on_disk(image(SOFTWARE))
            .file(repository("deploy/systemd/numaward.service"), "/usr/lib/systemd/system/numaward.service")
            .append("systemd.default_timeout_start_sec=600")
            .limit(Duration::from_hours(1));
        let report = boot(&add(vm), &format!("{}\n{}", include_str!("guides/common.sh"), self.script));
        // Prints the tables, which are copied into the page.
        let sections = report.to_string();
        let sections = sections.lines().filter_map(|line| line.strip_prefix("=== "));
        for section in sections.filter(|section| section.starts_with("top ") || *section == "trial") {
            println!("{section}:\n{}", report.section(section));
        }
        Some(GuideRun { report, workload: self.workload })
    }

    /// Asserts that the script contains each command of the page.
    fn assert_commands(&self) {
        let page = fs::read_to_string(repository("docs/guides").join(self.page)).unwrap();
        let script: Vec<_> = self.script.lines().collect();
        let mut inside = false;
        let mut commands = 0;
        for line in page.lines() {
            if line.starts_with("```") {
                inside = line == "```sh";
            } else if inside {
                assert!(script.contains(&line), "{}: the test does not run: {line}", self.page);
                commands += 1;
            }
        }
        assert!(commands > 3, "{} has {commands} lines of commands", self.page);
    }
}

fn image(folder: &str) -> PathBuf {
    Cache::locate().unwrap().root().join(folder).join(SOFTWARE_IMAGE)
}

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// The report of a guide, and its workload.
struct GuideRun {
    report: ScriptReport,
    workload: &'static str,
}

/// Figures of the workload at one moment.
#[derive(Debug)]
struct MemorySnapshot {
    /// Bytes allocated so far on the CPU's node, and on other nodes.
    local: u64,
    remote: u64,
    /// Resident bytes by node.
    resident: Vec<u64>,
    /// Estimated percentage of accesses to other nodes.
    estimate: Option<u64>,
}

impl MemorySnapshot {
    /// Returns the percentage of remote allocations since an earlier snapshot.
    fn remote_since(&self, before: &Self) -> u64 {
        let (local, remote) = (self.local - before.local, self.remote - before.remote);
        assert!(local + remote > MIB, "hardly anything was allocated: {before:?}, {self:?}");
        remote * 100 / (local + remote)
    }

    /// Returns the percentage of resident memory on a node.
    fn on(&self, node: usize) -> u64 {
        self.resident[node] * 100 / self.resident.iter().sum::<u64>()
    }
}

impl GuideRun {
    fn snapshot(&self, name: &str) -> MemorySnapshot {
        let workloads = self.report.json(name);
        let of = workloads["workloads"].as_array().unwrap();
        let workload = of.iter().find(|of| of["workload"] == self.workload && of["counters"] == "own");
        let workload = workload.unwrap_or_else(|| panic!("{name}: {} is not there", self.workload));
        let nodes = workload["nodes"].as_array().unwrap();
        let sum = |key: &str| nodes.iter().map(|node| number(&node["allocated"][key])).sum();
        let resident = |node: &Value| {
            let of = &node["resident"];
            number(&of["anonBytes"]) + number(&of["fileBytes"])
        };
        MemorySnapshot {
            local: sum("localBytes"),
            remote: sum("remoteBytes"),
            resident: nodes.iter().map(resident).collect(),
            estimate: workload["activity"]["estimatedRemotePercent"].as_u64(),
        }
    }

    /// Returns the sum of the series of a metric that have these labels.
    fn metric(&self, look: &str, name: &str, labels: &str) -> u64 {
        let lines = self.report.section(&format!("{look} metrics")).lines();
        let values: Vec<_> = lines
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} "))
            .filter(|(found, _)| found.contains(labels))
            .map(|(_, value)| value.parse::<u64>().unwrap())
            .collect();
        assert!(!values.is_empty(), "{look}: no {name} with {labels}:\n{}", self.report);
        values.iter().sum()
    }

    /// Returns the resident bytes of a kind of memory on the guaranteed nodes, and outside them.
    fn on_and_off(&self, look: &str, kind: &str) -> (u64, u64) {
        let of = |place: &str| {
            let labels = format!("kind=\"{kind}\",where=\"{place}\"");
            self.metric(look, "numaward_promise_resident_bytes", &labels)
        };
        (of("on"), of("off"))
    }

    /// Asserts that the trial has compared as many runs, missed no page, and has left no guarantee. An emulated machine has no figures
    /// of a gain.
    fn assert_trial(&self, figure: &str) {
        let trial = self.report.section("trial");
        for text in [format!("{}, {figure}, 6 rounds: ", self.workload), "95 % interval: ".to_owned()] {
            assert!(trial.contains(&text), "no {text:?}:\n{trial}");
        }
        for arm in ["with ", "without "] {
            let row = trial.lines().find(|line| line.starts_with(arm)).unwrap();
            let fields: Vec<_> = row.split_whitespace().collect();
            assert!(fields[1].parse::<f64>().unwrap() > 0.0, "{row}");
            let missed = if arm == "with " { "0 B" } else { "-" };
            assert!(row.trim_end().ends_with(missed), "{row}");
        }
        let left = self.report.section("left by the trial");
        assert!(!left.contains(self.workload), "{left}");
    }

    /// Asserts that at least `percent` of the memory and at least `bytes` are on the guaranteed nodes.
    fn assert_kept(&self, look: &str, percent: u64, bytes: u64) {
        let (on, off) = self.on_and_off(look, "memory");
        assert!(on >= bytes && on * 100 >= (on + off) * percent, "{look}: {on} bytes on, {off} off");
    }
}

/// Returns the number, or 0 if the field is absent.
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

#[test]
fn postgresql() {
    let guide = Guide {
        page: "postgresql.md",
        script: include_str!("guides/postgresql.sh"),
        workload: "postgresql@17-main.service",
    };
    let Some(found) = guide.follow(|vm| vm) else { return };
    // Allocations are local, but accesses are not.
    let (loaded, before) = (found.snapshot("loaded"), found.snapshot("before"));
    assert!(before.remote_since(&loaded) <= 5, "{loaded:?} {before:?}");
    let estimates = [&before, &found.snapshot("before, again")].map(|look| look.estimate.unwrap());
    assert!(estimates.into_iter().max() >= Some(20), "{estimates:?}");
    // The processes run on their node with most of their memory, except for buffers that earlier processes filled.
    assert!(found.snapshot("guaranteed").estimate.unwrap() <= 15, "{}", found.report);
    found.assert_kept("guaranteed", 60, 64 * MIB);
    // After a restart, all memory is on the node.
    let after = found.snapshot("after");
    assert!(after.estimate.unwrap() <= 3 && after.on(1) >= 98, "{after:?}");
    found.assert_kept("after", 98, 64 * MIB);
    assert_eq!(found.metric("after", "numaward_numa_miss_bytes_total", ""), 0);
    found.assert_trial("tps =");
}

#[test]
fn redis() {
    let guide =
        Guide { page: "redis.md", script: include_str!("guides/redis.sh"), workload: "redis-server.service" };
    let Some(found) = guide.follow(|vm| vm) else { return };
    let (started, before) = (found.snapshot("started"), found.snapshot("before"));
    assert!(before.remote_since(&started) >= 40, "{started:?} {before:?}");
    // The memory has moved, although the cpusets of all units were created at the same time.
    let guaranteed = found.snapshot("guaranteed");
    found.assert_kept("guaranteed", 85, 48 * MIB);
    assert!(guaranteed.estimate.unwrap() <= 15, "{guaranteed:?}");
    let after = found.snapshot("after");
    assert!(after.remote_since(&guaranteed) <= 3, "{guaranteed:?} {after:?}");
    assert!(after.estimate.unwrap() <= 15, "{after:?}");
    found.assert_kept("after", 85, 48 * MIB);
    assert_eq!(found.metric("after", "numaward_numa_miss_bytes_total", ""), 0);
    found.assert_trial("SET:");
}

#[test]
fn jvm() {
    let guide = Guide { page: "jvm.md", script: include_str!("guides/jvm.sh"), workload: "tomcat10.service" };
    let Some(found) = guide.follow(|vm| vm) else { return };
    let before = found.snapshot("before");
    assert!(before.estimate.unwrap() >= 20, "{before:?}");
    // The heap has moved; the page cache of the libraries has not.
    found.assert_kept("guaranteed", 75, 128 * MIB);
    assert!(found.snapshot("guaranteed").estimate.unwrap() <= 25, "{}", found.report);
    let after = found.snapshot("after");
    assert!(after.estimate.unwrap() <= 5, "{after:?}");
    found.assert_kept("after", 95, 128 * MIB);
    assert!(found.report.section("cpus").contains("Cpus_allowed_list:\t2-3"), "{}", found.report);
    // Number of garbage collector threads: one for each CPU.
    let collectors =
        |look: &str| found.report.section(&format!("threads {look}")).lines().next().map(str::to_owned);
    assert_eq!(collectors("before").as_deref(), Some("4"), "{}", found.report);
    assert_eq!(collectors("after").as_deref(), Some("2"), "{}", found.report);
    // With one CPU of one node, the heap is half of the guaranteed memory.
    let option = |section: &str, name: &str| {
        let mut lines = found.report.section(section).lines();
        let fields = lines.find_map(|line| line.split_once(&format!(" {name} "))).map(|(_, rest)| rest);
        fields.and_then(|rest| rest.split_whitespace().nth(1)).unwrap().to_owned()
    };
    assert_eq!(option("options", "MaxHeapSize"), (128 * MIB).to_string());
    for (section, collectors, numa) in [("options on all nodes", "4", "true"), ("options", "1", "false")] {
        assert_eq!(option(section, "ParallelGCThreads"), collectors);
        assert_eq!(option(section, "UseNUMA"), numa);
    }
    assert_eq!(found.metric("after", "numaward_numa_miss_bytes_total", ""), 0);
}

#[test]
fn dpdk() {
    let guide =
        Guide { page: "dpdk.md", script: include_str!("guides/dpdk.sh"), workload: "forwarder.service" };
    let Some(found) = guide.follow(|vm| vm) else { return };
    let taken = |look: &str, locality: &str| {
        let labels = format!("kind=\"hugepages-2Mi\",locality=\"{locality}\"");
        found.metric(look, "numaward_hugepages_allocated_bytes_total", &labels)
    };
    let (local, remote) = (taken("before", "local"), taken("before", "remote"));
    assert!(remote * 100 >= (local + remote) * 20 && local > 0, "{local} bytes local, {remote} remote");
    // Hugepages follow a guarantee that is given after the start. A thread that lost its core may use all guaranteed CPUs.
    let pages = |node: &str| -> u64 {
        let fields = found.report.section("late pages").split_whitespace();
        fields.filter_map(|field| field.strip_prefix(node)?.parse::<u64>().ok()).sum()
    };
    assert!(pages("N1=") > 16 && pages("N0=") <= 2, "{}", found.report);
    assert!(found.report.section("late threads").contains("Cpus_allowed_list:\t2-3"), "{}", found.report);
    let other = found.report.section("other sockets");
    assert!(other.contains("set_mempolicy: Invalid argument") && !other.ends_with("code 0"), "{other}");
    let (on, off) = found.on_and_off("after", "hugepages-2Mi");
    assert!(on > 16 * MIB && off == 0, "{on} bytes on, {off} off");
    assert_eq!(taken("after", "remote"), 0);
    assert_eq!(taken("after", "local"), on);
}

#[test]
fn qemu() {
    let guide = Guide { page: "qemu.md", script: include_str!("guides/qemu.sh"), workload: "guest.service" };
    let Some(found) = guide.follow(|vm| vm) else { return };
    let (started, before) = (found.snapshot("started"), found.snapshot("before"));
    assert!(started.on(0) >= 80, "{started:?}");
    assert!(before.estimate.unwrap() >= 80, "{before:?}");
    let after = found.snapshot("after");
    assert!(after.estimate.unwrap() <= 10 && after.on(1) >= 90, "{after:?}");
    found.assert_kept("after", 90, 256 * MIB);
    assert!(found.report.section("stopped").contains(" held"), "{}", found.report);
    let bound = found.report.section("bound elsewhere");
    assert!(bound.contains("cannot bind memory to host NUMA nodes") && !bound.ends_with("code 0"), "{bound}");
    // A scope with libvirt's naming scheme matches a pattern of the configuration.
    let declared = found.report.section("declared");
    assert!(declared.contains(r"machine-qemu\x2d1\x2dweb.scope") && declared.contains(" held"), "{declared}");
}

#[test]
fn libvirt() {
    let guide = Guide {
        page: "libvirt.md",
        script: include_str!("guides/libvirt.sh"),
        workload: "machine-qemu-*-web.scope",
    };
    let page = fs::read_to_string(repository("docs/guides").join(guide.page)).unwrap();
    let xml = page.split("```xml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let domain = tempfile::NamedTempFile::new().unwrap();
    fs::write(domain.path(), xml).unwrap();
    let Some(found) = guide.follow(|vm| vm.file(domain.path(), "/srv/web.xml")) else { return };
    let report = &found.report;
    // The threads run on both nodes, and the memory is not on their node.
    let before = found.snapshot("seen before");
    assert!(before.estimate.unwrap() >= 20, "{before:?}");
    let after = found.snapshot("seen after");
    assert!(after.estimate.unwrap() <= 5 && after.on(1) >= 90, "{after:?}");
    found.assert_kept("seen after", 90, 128 * MIB);
    // Asserts the CPUs and nodes of the scope and of each thread, by thread name.
    let may_use = |section: &str, expected: &[(&str, &str)]| {
        let lines: Vec<_> = report.section(section).lines().map(str::trim).collect();
        assert_eq!(
            lines.iter().filter(|line| line.starts_with("./libvirt/")).count(),
            4,
            "{section}:\n{report}"
        );
        for (thread, has) in expected {
            let of: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix(thread)).collect();
            assert!(
                !of.is_empty() && of.iter().all(|of| of.trim() == *has),
                "{section}: {thread}:\n{report}"
            );
        }
    };
    let threads = ["qemu-system-x86", "IO iothread1", "CPU 0/TCG", "CPU 1/TCG"];
    may_use("before", &threads.map(|thread| (thread, "0-3 0-1")));
    for section in ["guaranteed", "again"] {
        may_use(section, &threads.map(|thread| (thread, "2-3 1")));
        let scope = ". cpus=2-3 mems=1 effective=2-3/1 type=domain";
        assert!(report.section(section).starts_with(scope), "{section}:\n{report}");
    }
    let pages = report.numa_stat("resident");
    let (off, on) = (pages["anon"][&0], pages["anon"][&1]);
    assert!(on >= 128 * MIB && off * 50 <= on, "{off} bytes are on node 0, {on} on node 1");
    // Pinning by libvirt applies within the guarantee, and has no effect outside.
    let pinned = ["3 1", "3 1", "2 1", "2-3 1"];
    for section in ["pinned", "pinned outside", "restarted"] {
        let expected: Vec<_> = threads.into_iter().zip(pinned).collect();
        may_use(section, &expected);
        assert!(report.section(section).starts_with(". cpus=2-3 mems=1 "), "{section}:\n{report}");
    }
    let outside = report.section("pin outside");
    assert!(outside.contains("Invalid argument") && outside.ends_with("code 1"), "{outside}");
    assert!(report.section("memory outside").ends_with("code 0"), "{report}");
    let held = report.section("held");
    assert!(held.contains(" held") && held.ends_with("nobody rewrote anything"), "{held}");
    assert!(report.section("machined").contains("qemu-2-web"), "{report}");
}

#[test]
fn llama() {
    let guide =
        Guide { page: "llama.md", script: include_str!("guides/llama.sh"), workload: "llama-server.service" };
    let newer = |vm: Vm| {
        vm.systemd_on_disk(image(NEW_SOFTWARE)).file(repository("tests/e2e/guides/model.py"), "/srv/model.py")
    };
    let Some(found) = guide.follow(newer) else { return };
    let before = found.snapshot("before");
    assert!(before.estimate.unwrap() >= 20, "{before:?}");
    let guaranteed = found.snapshot("guaranteed");
    assert!(guaranteed.estimate.unwrap() <= 10, "{guaranteed:?}");
    found.assert_kept("guaranteed", 90, 60 * MIB);
    // The model is page cache of a process on the other node until it is read again.
    let pages = |section: &str, node: &str| {
        let fields = found.report.section(section).split_whitespace();
        fields.filter_map(|field| field.strip_prefix(node)?.parse::<u64>().ok()).sum::<u64>() * 4096
    };
    assert!(pages("mapped", "N0=") > 60 * MIB, "{}", found.report);
    assert_eq!(found.report.json("words")["tokens_predicted"], 8);
    assert!(pages("read again", "N1=") > 60 * MIB && pages("read again", "N0=") == 0, "{}", found.report);
    found.assert_kept("after", 90, 60 * MIB);
    assert_eq!(found.metric("after", "numaward_numa_miss_bytes_total", ""), 0);
}

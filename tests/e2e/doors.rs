//! Attempts of an unprivileged user and of a process in a container to read or change foreign data: SECURITY.md.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Clock, GuestTopology, Vm};

use crate::deploy::checkout;

/// Asserts that each command of a section failed with this message.
fn assert_refused(report: &ScriptReport, section: &str, times: usize, words: &str) {
    let text = report.section(section);
    assert_eq!(text.matches(words).count(), times, "{section}: {words:?}:\n{report}");
    let codes: Vec<_> = text.lines().filter(|line| line.starts_with("code ")).collect();
    assert!(codes.len() == times && !codes.contains(&"code 0"), "{section}:\n{report}");
}

/// Returns the names of workloads with a guarantee.
fn names(report: &ScriptReport, section: &str) -> Vec<String> {
    let all = report.json(section);
    let name = |of: &serde_json::Value| of["name"].as_str().unwrap().to_owned();
    all["allocations"].as_array().unwrap().iter().map(name).collect()
}

/// Upper limit of the daemon's memory under attack, in KiB.
const MOST_MEMORY: u64 = 96 << 10;

fn assert_memory_is_bounded(report: &ScriptReport, section: &str) {
    let peak: u64 = report.section(section).trim().parse().unwrap();
    assert!(peak > 0 && peak < MOST_MEMORY, "{section}: {peak} KiB");
}

/// Precedes each script.
const WATCH: &str = include_str!("doors_watch.sh");

/// Checks that the daemon answered within a second throughout.
fn assert_answers_in_time(report: &ScriptReport) {
    assert_eq!(report.section("latest answers in milliseconds").lines().count(), 5, "{report}");
    assert_eq!(report.section("late"), "", "/livez is answered within a second:\n{report}");
}

/// Loads the modules by which the kernel finds the user of a client among any number of sockets.
fn with_socket_diagnosis(vm: Vm) -> Vm {
    ["inet_diag", "tcp_diag"].into_iter().fold(vm, Vm::module)
}

#[test]
fn unprivileged_users_get_no_access() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).limit(Duration::from_mins(25));
    let vm = with_socket_diagnosis(vm);
    let vm = vm.file(checkout("deploy/systemd/numaward.service"), "/numaward.service");
    let report = boot(&vm, &[WATCH, include_str!("doors.sh")].concat());
    eprintln!("{report}");

    let modes = "700 root /run/numaward\n600 root /run/numaward/control.sock\n700 root /var/lib/numaward\n\
                 600 root /var/lib/numaward/ledger.json\n600 root /var/lib/numaward/ledger.journal";
    assert_eq!(report.section("modes"), modes);
    assert_refused(&report, "files", 4, "Permission denied");
    assert_refused(&report, "control", 1, "Permission denied");
    assert_refused(&report, "signals", 3, "Operation not permitted");
    assert_refused(&report, "process", 4, "Permission denied");
    assert_refused(&report, "knobs", 1, "Permission denied");
    assert_eq!(report.section("read"), "code 0", "everybody may read");
    assert_refused(&report, "foreign mappings", 2, "403 Forbidden");
    let change = report.section("change");
    assert!(change.contains(" 405 ") && change.contains("HTTP/1.1 404"), "{report}");
    assert!(report.section("rebound").starts_with("HTTP/1.1 421"), "{report}");

    let container = report.section("container");
    assert!(container.starts_with("0\n"), "it is root there:\n{report}");
    assert!(container.contains("Permission denied") && container.contains("No such process"), "{report}");
    assert!(!container.ends_with("code 0") && !container.contains("\nok"), "{report}");
    // The daemon's message may be lost if its answer arrives while the request is still being written.
    for section in ["opened socket", "opened socket in a container"] {
        assert_refused(&report, section, 1, "numaward: ");
    }
    assert_eq!(report.section("host's network"), "0\nok\ncode 0", "root there, who may read");
    assert_refused(&report, "host's network: files", 3, "No such file or directory");
    assert_refused(&report, "host's network: control", 1, "No such file or directory");
    let change = report.section("host's network: change");
    let answers: Vec<_> = change.lines().filter_map(|line| line.strip_prefix("HTTP/1.0 ")).collect();
    let status: Vec<_> = answers.iter().filter_map(|answer| answer.split(' ').next()).collect();
    assert_eq!(status, ["405", "401", "404", "401"], "{report}");
    assert_refused(&report, "host's network: process", 2, "No such ");
    let knobs = report.section("host's network: knobs");
    assert!(knobs.contains("Read-only file system") && knobs.matches("code 0").count() == 0, "{report}");
    assert_eq!(knobs.matches("\ncode ").count(), 3, "{report}");
    // The kernel shows the name under which the socket was bound, before it was renamed.
    assert_eq!(
        report.section("the daemon's sockets"),
        "/run/numaward/control.sock.new",
        "none has a name alone"
    );
    assert_eq!(report.section("with the token"), "code 0", "the address is served");
    assert_eq!(names(&report, "still held"), ["victim.service"]);

    let workloads = report.json("forged");
    let tenants: Vec<_> = workloads["workloads"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|of| of["cgroup"].as_str().is_some_and(|path| path.contains("tenant.service")))
        .collect();
    assert_eq!(tenants.len(), 1, "its unit alone, whatever its cgroups look like:\n{workloads:#}");
    assert_eq!(tenants[0]["workload"], "tenant.service", "{workloads:#}");
    assert!(tenants[0]["container"].is_null(), "{workloads:#}");
    let figures = report.section("forged figures");
    assert!(!figures.contains("pods") && !figures.contains("namespace="), "{figures}");
    let bytes = |name: &str| -> u64 {
        let of_name = figures.lines().filter(|line| line.contains(&format!("workload=\"{name}\"")));
        of_name.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    assert!(!figures.contains("cri-containerd"), "{figures}");
    assert!(bytes("tenant.service") >= 64 << 20, "its loads are its own:\n{figures}");

    let marks: Vec<_> = report.section("marks").lines().collect();
    assert!(marks[0].starts_with('{') && marks[0].contains("victim.service"), "{report}");
    assert!(marks.iter().any(|line| line.starts_with("set user.numaward.")), "{report}");
    assert!(marks.iter().any(|line| line.starts_with("cannot set trusted.numaward.")), "{report}");
    assert_eq!(names(&report, "rebuilt"), ["victim.service"]);
    assert!(report.section("rebuilt log").contains("are not searched for marks"), "{report}");

    let status = report.json("flood");
    assert!(status.to_string().contains("below /system.slice/tenant.service"), "{status:#}");
    let after = report.section("after the flood");
    assert!(after.ends_with("ok\nrestarts 0"), "{after}");
    let cpus = after.lines().rev().nth(2).unwrap();
    assert_eq!(report.section("regions of the flood"), "code 0", "{report}");
    // In real time, a busy host delays the answers of the machine.
    if Clock::of_kernel(bench.kernel().arch(), bench.kernel().name()) == Clock::Instructions {
        assert_answers_in_time(&report);
    }
    let attributes: u32 = report.section("attributes").lines().next().unwrap().parse().unwrap();
    assert!(attributes > 240_000, "{report}");
    for section in ["peak before the marks", "peak", "peak of the last start"] {
        assert_memory_is_bounded(&report, section);
    }
    assert_eq!(report.section("after six kills"), format!("0\n{cpus}\nactive"), "{report}");
    report.section("end");
}

#[test]
fn floods_of_one_user_delay_no_other() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).limit(Duration::from_mins(25));
    let vm = with_socket_diagnosis(vm);
    let vm = ["numaward.service", "numaward.socket"]
        .into_iter()
        .fold(vm, |vm, unit| vm.file(checkout(&format!("deploy/systemd/{unit}")), format!("/{unit}")));
    let report = boot(&vm, &[WATCH, include_str!("doors_floods.sh")].concat());
    eprintln!("{report}");

    let sizes: Vec<u64> = report.section("sizes").lines().map(|line| line.parse().unwrap()).collect();
    let &[scrape, samples, sample_bytes] = &*sizes else { panic!("{report}") };
    assert!(scrape > 1 << 20, "a client with small buffers holds a scrape of {scrape} bytes");
    assert!(samples > 0 && sample_bytes > 128 << 10, "{samples} samples of {sample_bytes} bytes");
    for attack in ["connections", "scrapes", "samples", "events"] {
        let codes: Vec<_> = report.section(attack).lines().collect();
        assert_eq!(codes, ["code 0"; 8], "scrapes, streams, changes and repairs under {attack}:\n{report}");
    }
    // The daemon noticed the slow clients, and kept the share of other users from them.
    for attack in ["connections", "scrapes", "samples", "events"] {
        let ended: Vec<u64> =
            report.section(&format!("ended {attack}")).lines().map(|n| n.parse().unwrap()).collect();
        let &[closed, refused] = &*ended else { panic!("{report}") };
        let is_slow = ["scrapes", "samples"].contains(&attack);
        assert!(closed >= 16 || !is_slow, "{attack}: {closed} slow clients were closed");
        assert_eq!(
            refused > 0,
            ["samples", "events"].contains(&attack),
            "{attack}: {refused} streams were refused"
        );
    }
    let files: Vec<_> = report.section("files").lines().collect();
    assert_eq!(
        files[..18],
        ["code 0"; 18],
        "a scrape, a repair, eight lists of regions and eight of stacks:\n{report}"
    );
    assert_eq!(files[18..], ["1", "1"], "{report}");
    let regions = report.json("regions of 1");
    let regions = regions["regions"].as_array().unwrap();
    assert!((1..=200).contains(&regions.len()), "{}", regions.len());
    assert!(regions.iter().all(|region| region["name"].as_str().unwrap().len() <= 1 << 10), "{regions:?}");
    for section in ["regions of 1", "regions as text"] {
        let text = report.section(section);
        assert!(text.contains("[2J"), "the names are shown: {text}");
        assert!(!text.contains(['\x1b', '\r']), "{section}: a name reaches the terminal: {text:?}");
    }
    let budget = report.section("budget");
    assert_eq!(
        budget.matches("code 0").count(),
        4,
        "a guarantee, a scrape, a repair and a release: {budget}"
    );
    assert!(budget.contains("numaward_budget_moved_bytes_total{outcome=\"moved\"} "), "{budget}");
    for section in ["stacks of 1", "stacks of 8"] {
        assert!(report.section(section).len() < 8 << 20, "{section}");
        let stacks = report.json(section);
        let of_attack = |stack: &serde_json::Value| {
            let frames = stack["frames"].as_array().unwrap();
            frames.len() > 1 && frames[0] == "perl" && stack["bytes"].as_u64().unwrap() > 0
        };
        assert!(stacks["stacks"].as_array().unwrap().iter().any(of_attack), "{stacks:#}");
    }
    assert_eq!(report.section("port"), "forged");
    let alone = report.section("root without a daemon");
    assert!(!alone.contains("forged") && !alone.contains("code 0"), "{alone}");
    assert_eq!(alone.matches("a program of another user than root").count(), 2, "{alone}");
    let port = report.section("root with a daemon");
    assert!(port.starts_with("forged\n") && port.matches("forged").count() == 1, "{port}");
    assert!(port.contains("victim.service") && port.ends_with("\ncode 0\nactive"), "it repairs:\n{port}");
    assert_eq!(report.section("own port"), "code 0");
    let port = report.section("port of the socket unit");
    assert_eq!(port, "code 0\ncode 0\ncode 0", "{report}");
    assert_eq!(report.section("attack on the socket unit"), "not taken\nstill tries", "{report}");
    let shared = report.section("shared address");
    assert_eq!(shared, "code 0\ncode 0\ncode 0\nstill tries", "{report}");
    let answers: u32 = report.section("answers at the shared address").parse().unwrap();
    assert!(answers > 50, "{answers}");
    assert_answers_in_time(&report);
    let restarted = ["peak before the restart", "peak after the port was taken", "peak with the socket unit"];
    for section in restarted.into_iter().chain(["peak"]) {
        assert_memory_is_bounded(&report, section);
    }
    assert_eq!(report.section("held"), "same\nrestarts 0", "{report}");
    report.section("end");
}

/// Longest time of a request for data from inside of a hung workload, in seconds. The daemon's limit is 20 s.
const HUNG_READ_LIMIT: u64 = 25;

/// Returns the seconds of a request, and the output before.
fn timed(text: &str) -> (&str, u64) {
    let (output, took) = text.rsplit_once("took ").unwrap();
    (output, took.parse().unwrap())
}

#[test]
fn hung_workloads_hold_no_place() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).limit(Duration::from_mins(15));
    let vm = vm.file(checkout("deploy/systemd/numaward.service"), "/numaward.service");
    let report = boot(&vm, &[WATCH, include_str!("doors_hung.sh")].concat());
    eprintln!("{report}");

    assert!(report.section("before").contains("\"syscall\""), "its functions have names:\n{report}");
    // Linux 7 reads the mappings nevertheless, under the locks of single ones.
    let is_readable = bench.kernel().version().starts_with("7.");
    let expected = if is_readable { "readable" } else { "locked" };
    assert_eq!(report.section("locked map").lines().next(), Some(expected));
    let assert_answer = |section: &str, is_hung: bool| {
        let (output, took) = timed(report.section(section));
        let expected = if is_hung { ("does not respond", "code 1") } else { ("[heap]", "code 0") };
        assert!(output.contains(expected.0) && output.contains(expected.1), "{section}: {output}");
        let limits = if is_hung { 10..=HUNG_READ_LIMIT } else { 0..=2 };
        assert!(limits.contains(&took), "{section}: {took} s");
        let (output, took) = timed(report.section(&format!("{section} again")));
        assert!(output.contains(expected.0) && took <= 2, "{section} again: {took} s: {output}");
    };
    assert_answer("hung library", true);
    assert_answer("regions of the locked map", !is_readable);
    for section in ["beside the hung library", "beside the locked map"] {
        let text = report.section(section);
        assert!(
            text.contains("code 0\n") && !text.contains("code 1") && text.contains("ok"),
            "{section}: {text}"
        );
        let mut times = text.lines().filter_map(|line| line.strip_prefix("took "));
        assert!(times.all(|took| took.parse::<u64>().unwrap() <= 2), "{section}: {text}");
    }
    // No write waits with the lock of all cpusets.
    for section in ["guarantee of the locked map", "release of the locked map"] {
        let text = report.section(section);
        assert!(text.contains("keeps its memory map locked") && text.contains("code 1"), "{section}: {text}");
        assert_eq!(text.lines().filter(|line| *line == "in time").count(), 4, "{section}: {text}");
    }
    let release: Vec<_> = report.section("release of the locked map").lines().collect();
    assert_eq!(release.first(), release.last(), "it keeps its nodes meanwhile");
    let after = report.section("after the end of both");
    assert_eq!(after.matches("code 0").count(), 2, "{after}");
    assert!(after.ends_with("restarts 0"), "{after}");
    assert_answers_in_time(&report);
    assert_memory_is_bounded(&report, "peak");
    report.section("end");
}

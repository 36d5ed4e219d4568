//! Commands on a daemon that gives guarantees: exit codes, words about the cause of a refusal, and names.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "../../daemon/tests/support/mod.rs"]
mod support;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use numaward_api::EventKind;
use numaward_daemon::{
    allocations::{self, ReloadHandle},
    socket,
};
use numaward_http::{ControlListener, serve};
use numaward_model::EventReport;
use numaward_topology::{Bytes, Machine};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    common::{daemon, numaward},
    support::{GuaranteeDaemon, TempHost},
};

const REQUESTS: [&[&str]; 4] =
    [&["explain"], &["plan"], &["guarantee", "/batch", "--dry-run"], &["exec", "--dry-run"]];

/// Returns the exit code and the output of a command.
fn run(server: &str, args: &[&str]) -> (i32, String) {
    let output = numaward(&[&["--server", server], args].concat()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

/// Returns a command that requests resources.
fn request<'a>(command: &[&'a str], resources: &[&'a str]) -> Vec<&'a str> {
    let executed: &[&str] = if ["exec", "trial"].contains(&command[0]) { &["--", "true"] } else { &[] };
    [command, resources, executed].concat()
}

/// Starts a daemon on two nodes of four CPUs and 4 GiB, with its control socket.
fn guaranteeing_daemon() -> (TempHost, GuaranteeDaemon, PathBuf) {
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build();
    let host = TempHost::new(machine.unwrap());
    for cgroup in ["batch", "numaward"] {
        host.cgroup(cgroup);
    }
    let daemon = host.start();
    let (path, listener) = listen(&host, "control.sock");
    let router =
        allocations::control_router(daemon.app.clone(), daemon.reconciler.clone(), ReloadHandle::new().0);
    tokio::spawn(serve(listener, router, daemon.stop.clone()));
    (host, daemon, path)
}

fn listen(host: &TempHost, name: &str) -> (PathBuf, ControlListener) {
    let path = host.dir.path().join("run").join(name);
    let listener = ControlListener::new(socket::listen(&path, "controlSocket").unwrap());
    (path, listener.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_requests_name_their_cause() {
    let (_host, _daemon, socket) = guaranteeing_daemon();
    let server = socket.to_str().unwrap();
    for (resources, first_line) in [
        (&["--memory", "1Gi", "--node", "7"][..], "there is no node 7 (TopologyAffinityError)"),
        (&["--memory", "1Gi", "--memory-tier", "cxl"], "no node has CXL memory (TopologyAffinityError)"),
        (
            &["--cpus", "1", "--cpu-kind", "isolated"],
            "no CPU is of the kind isolated (TopologyAffinityError)",
        ),
        (&["--memory", "1Gi", "--hugepages-2Mi", "2Mi"], "no node has hugepages-2Mi (TopologyAffinityError)"),
        (&["--memory", "1Ti"], "memory: 1.0 TiB requested, "),
        (&["--cpus", "100"], "CPUs: 100 requested, 7 free on all nodes together"),
        (&["--cpus", "5", "--policy", "single-numa-node"], "CPUs: 5 requested, at most 4 free on one node"),
    ] {
        for command in REQUESTS {
            let args = request(command, resources);
            let (code, said) = run(server, &args);
            assert_eq!(code, 3, "{args:?}: {said}");
            let line = said.lines().find_map(|line| line.split_once("refused: ")).unwrap().1;
            let expected =
                if command[0] == "plan" { line.contains(first_line) } else { line.starts_with(first_line) };
            assert!(expected, "{args:?}: {said}");
            assert!(!said.contains("container"), "{args:?}: {said}");
        }
    }
    for command in REQUESTS {
        let args = request(command, &["--cpus", "1", "--memory", "1Gi"]);
        let (code, said) = run(server, &args);
        assert!(
            code == 0 && said.starts_with("would hold CPUs 1 and memory on node 0\n"),
            "{args:?}: {said}"
        );
    }
    let (code, held) = run(server, &["get", "-o", "name"]);
    assert_eq!((code, held.as_str()), (0, ""), "dry runs hold nothing");
    let (code, said) = run(server, &["release", "--all"]);
    assert_eq!((code, said.as_str()), (0, "numaward: there is no guarantee to end\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn guarantee_is_found_by_each_of_its_names() {
    let (_host, _daemon, socket) = guaranteeing_daemon();
    let server = socket.to_str().unwrap();
    let request = ["--cpus", "1", "--memory", "1Gi", "--node", "0,7", "--name", "db"];
    let (code, said) = run(server, &[&["guarantee", "/batch"][..], &request].concat());
    let absent = "there is no node 7 here: the other nodes are used\n";
    assert!(code == 0 && said.contains(&format!("numaward: {absent}")), "{said}");
    for name in ["db", "batch", "/batch"] {
        for command in [&["get", "guarantees"][..], &["describe"], &["explain"]] {
            let (code, said) = run(server, &[command, &[name]].concat());
            assert!(code == 0 && said.contains("db"), "{command:?} {name}: {said}");
            assert_eq!(command[0] != "get", said.contains(absent), "{command:?} {name}: {said}");
        }
    }
    assert_eq!(run(server, &["get", "guarantees", "batch", "-o", "name"]), (0, "db\n".to_owned()));
    let (code, said) = run(server, &["resize", "db", "--memory", "8Gi", "--dry-run"]);
    let words = "would be refused: memory: 7.0 GiB more requested, 2.8 GiB free on its nodes\n";
    assert!(code == 3 && said.starts_with(words), "{said}");
    for command in
        [&["get", "guarantees"][..], &["get", "workloads"], &["get", "nodes"], &["describe"], &["explain"]]
    {
        let (code, said) = run(server, &[command, &["nobody"]].concat());
        assert!(code == 1 && said.contains("named \"nobody\""), "{command:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watched_list_is_printed_when_it_changes() {
    let (_host, _daemon, socket) = guaranteeing_daemon();
    let server = socket.to_str().unwrap();
    let list = ["--server", server, "get", "--watch"];
    let mut watch = numaward(&list).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "there are no guarantees");
    let given = run(server, &["guarantee", "/batch", "--cpus", "1", "--name", "db"]);
    assert_eq!(given.0, 0, "{}", given.1);
    let printed: Vec<_> = lines.take(3).collect();
    watch.kill().unwrap();
    watch.wait().unwrap();
    assert_eq!(printed[..2], ["", "NAME  CPUS  NODES  MEMORY  STATE"]);
    assert!(printed[2].starts_with("db    1 "), "{printed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_found_by_each_name() {
    let (_host, daemon, socket) = guaranteeing_daemon();
    let server = socket.to_str().unwrap();
    let given = run(server, &["guarantee", "/batch", "--cpus", "1", "--name", "db"]);
    assert_eq!(given.0, 0, "{}", given.1);
    let report = |name: &str, message: &str| {
        daemon.observer.events().report(EventReport::new(EventKind::Drift, message).workload(name));
    };
    report("db", "past");
    report("stranger", "unrelated");
    for name in ["db", "batch", "/batch"] {
        for command in [&["events", "--workload"][..], &["get", "events"]] {
            let (code, said) = run(server, &[command, &[name]].concat());
            assert!(code == 0 && said.contains("past"), "{command:?} {name}: {said}");
            assert!(!said.contains("unrelated"), "{command:?} {name}: {said}");
        }
    }
    for number in 0..110 {
        report(&format!("of {number}"), "many");
    }
    let count = |args: &[&str]| run(server, args).1.matches("many").count();
    assert_eq!(count(&["events"]), 100);
    assert_eq!(count(&["events", "--since", "10m"]), 110, "none is cut off");
    assert_eq!(count(&["events", "--since", "10m", "--limit", "5"]), 5);
    for (follow, line) in [
        (&["events", "-f", "--workload", "batch"][..], " drift db: past"),
        (&["get", "events", "--watch", "nobody", "batch"], " drift db: past"),
        (&["get", "events", "--watch", "-o", "name", "batch"], ""),
    ] {
        let args = [&["--server", server], follow].concat();
        let mut watch = numaward(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
        let first = lines.next().unwrap();
        report("stranger", "unrelated");
        report("db", "new");
        let second = lines.next().unwrap();
        watch.kill().unwrap();
        watch.wait().unwrap();
        let is_expected = |said: &str, line: &str| match line {
            "" => said.parse::<u64>().is_ok(),
            line => said.ends_with(line),
        };
        assert!(is_expected(&first, line), "{follow:?}: {first}");
        assert!(is_expected(&second, &line.replace("past", "new")), "{follow:?}: {second}");
    }
}

#[test]
fn wrong_quantities_are_usage_errors() {
    let amount = "not an amount of memory above 0, such as 512Mi or 8Gi";
    let cpus = "not a number of CPUs above 0, such as 2 or 500m";
    for command in [
        &["explain"][..],
        &["plan"],
        &["rebalance"],
        &["guarantee", "/batch"],
        &["resize", "db"],
        &["exec"],
        &["trial", "/batch"],
    ] {
        // Failures of `exec` itself end with 125.
        let expected_code = if command[0] == "exec" { 125 } else { 2 };
        for (option, words) in [
            ("--memory", amount),
            ("--memory-limit", amount),
            ("--hugepages-2Mi", amount),
            ("--hugepages-1Gi", amount),
            ("--cpus", cpus),
        ] {
            for wrong in ["5GB", "-1", "abc", "0"] {
                let (code, said) = run("/nonexistent.sock", &request(command, &[option, wrong]));
                let expected = format!("error: invalid value '{wrong}' for '{option} <");
                assert!(
                    code == expected_code && said.starts_with(&expected),
                    "{command:?} {option} {wrong}: {code} {said}"
                );
                assert!(said.contains(words), "{command:?} {option} {wrong}: {said}");
            }
        }
    }
    for command in REQUESTS.into_iter().chain([
        &["rebalance"][..],
        &["guarantee", "/batch"],
        &["resize", "db"],
        &["trial", "/batch"],
        &["exec"],
    ]) {
        let expected_code = if command[0] == "exec" { 125 } else { 2 };
        for (resources, words) in [
            (
                &["--memory", "2Gi", "--memory-limit", "1Gi"][..],
                "error: --memory-limit 1Gi is less than the guaranteed memory, --memory 2Gi\n",
            ),
            (
                &["--cpus", "500m"],
                "error: --cpus 0.5 is not a whole number, so the CPUs are shared and nothing is guaranteed",
            ),
            (
                &["--cpus", "1.0001"],
                "error: --cpus 1.0001 is not a whole number, so the CPUs are shared and nothing is guaranteed",
            ),
        ] {
            // A resize keeps the guaranteed memory.
            if command[0] == "resize" && resources[0] == "--cpus" {
                continue;
            }
            let (code, said) = run("/nonexistent.sock", &request(command, resources));
            assert!(
                code == expected_code && said.starts_with(words),
                "{command:?} {resources:?}: {code} {said}"
            );
        }
    }
    for (wrong, words) in [
        (&["explain", "--memory", "1Gi", "--hugepages", "2Mi=5GB"][..], amount),
        (&["explain", "--memory", "1Gi", "--hugepages", "abc=2Mi"], "\"abc\" is not a size of huge pages"),
        (&["explain", "--memory", "1Gi", "--near", "x"], "--near x: \"x\" is no device of this host"),
        (&["record", "--max-size", "5GB"], amount),
        (&["record", "--max-size", "-1"], amount),
        (&["plan", "--memory", "1Gi", "--bytes", "-1"], amount),
        (&["rebalance", "--memory", "1Gi", "--bytes", "5GB"], amount),
        (&["trial", "/batch", "--", "true"], "<--cpus <NUMBER>|--memory <SIZE>>"),
        (&["trial", "/batch", "--cpus", "1"], "<COMMAND>..."),
        (&["trial", "--cpus", "1", "--", "true"], "<CGROUP-OR-UNIT>"),
        (&["trial", "/batch", "--cpus", "1", "--rounds", "5", "--", "true"], "5 is not in 6..=100"),
        (
            &["trial", "/batch", "--cpus", "1", "--settle", "soon", "--", "true"],
            "invalid value 'soon' for '--settle <TIME>'",
        ),
        (
            &["trial", "/batch", "--cpus", "1", "-o", "wide", "--", "true"],
            "[possible values: table, json, yaml]",
        ),
        (&["resize", "db"], "<--cpus <NUMBER>|--memory <SIZE>|--memory-limit <SIZE>|"),
        (&["explain"], "numaward explain [OPTIONS] <--cpus NUMBER|--memory SIZE>..."),
        (&["explain", "--with", "db"], "numaward explain [OPTIONS] NAME"),
        (&["events", "--since", "yesterday"], "invalid value 'yesterday' for '--since <TIME>'"),
        (&["events", "--since", "0s"], "a duration must be above zero"),
        (&["events", "--after", "10m"], "invalid value '10m' for '--after <ID>'"),
        (&["events", "--after", "-1"], "invalid value '-1' for '--after <ID>'"),
        (&["get", "pods"], "[possible values: guarantees, workloads, nodes, events]"),
        (&["get", "-o", "names"], "[possible values: table, wide, name, json, yaml]"),
        (&["uninstall", "--restore"], "unexpected argument '--restore'"),
    ] {
        let (code, said) = run("/nonexistent.sock", wrong);
        assert!(code == 2 && said.contains(words), "{wrong:?}: {code} {said}");
    }
}

const CHANGES: [&[&str]; 12] = [
    &["guarantee", "/batch", "--memory", "1Gi"],
    &["guarantee", "/batch", "--memory", "1Gi", "--memory-limit", "2Gi", "--dry-run"],
    &["explain", "--memory", "1Gi"],
    &["resize", "db", "--memory", "1Gi"],
    &["release", "db"],
    &["release", "--all"],
    &["release", "--all", "--yes"],
    &["plan", "--memory", "1Gi"],
    &["rebalance", "--memory", "1Gi"],
    &["export-kubelet-state"],
    &["exec", "--memory", "1Gi", "--", "true"],
    &["trial", "/batch", "--memory", "1Gi", "--", "true"],
];

/// Returns the exit code of a command that fails.
fn failure_code(command: &[&str]) -> i32 {
    if command[0] == "exec" { 125 } else { 1 }
}

#[test]
fn read_only_address_refuses_changes() {
    let daemon = daemon();
    let address = format!("http://{}", daemon.address);
    for change in CHANGES.into_iter().chain([&["reload"][..]]) {
        let (code, said) = run(&address, change);
        let said = said.lines().last().unwrap();
        let words = if matches!(change[0], "exec" | "trial" | "reload") {
            &format!(
                "numaward: --server {address}: this command requires the daemon of this host: give the path of its control \
                 socket"
            )
        } else {
            "numaward: this address is read-only; use the control socket (by default /run/numaward/control.sock) or the \
             address in control.listen"
        };
        assert_eq!((code, said), (failure_code(change), words), "{change:?}");
    }
    let nodes = ["get", "nodes", "-o", "name"];
    assert_eq!(run(&address, &nodes), run(daemon.socket.to_str().unwrap(), &nodes), "both can be read");
}

/// The guarantee ends with the trial, also if the benchmark fails or a signal ends the trial.
#[tokio::test(flavor = "multi_thread")]
async fn trial_leaves_no_guarantee() {
    let (host, daemon, socket) = guaranteeing_daemon();
    let server = socket.to_str().unwrap();
    let seen = host.dir.path().join("seen");
    let knob = host.root().join("batch/cpuset.cpus");
    let script = format!("head -n 1 {} >>{}; echo tps: 5", knob.display(), seen.display());
    let trial = [
        "trial", "/batch", "--cpus", "1", "--rounds", "6", "--settle", "1ms", "--after", "tps", "--", "sh",
        "-c",
    ];
    let (code, said) = run(server, &[&trial[..], &[&script]].concat());
    assert!(code == 0 && said.contains("no difference is shown: the interval contains 0"), "{said}");
    let cpus = fs::read_to_string(&seen).unwrap();
    let with_guarantee: Vec<bool> = cpus.lines().map(|line| line == "1").collect();
    assert_eq!(with_guarantee, [false, true, true, false].repeat(3), "{cpus}");
    let is_free = || daemon.reconciler.allocations().allocations.is_empty();
    assert!(is_free());

    for (script, words) in [
        ("exit 7", "round 1: sh failed: exit status: 7"),
        ("echo tps", "no plain number, such as 1234.5, after \"tps\""),
    ] {
        let (code, said) = run(server, &[&trial[..], &[script]].concat());
        assert!(code == 1 && said.contains(words) && is_free(), "{said}");
    }

    let begun = host.dir.path().join("begun");
    let script = format!("touch {}", begun.display());
    let (code, said) = run(server, &["trial", "/batch", "--cpus", "100", "--", "sh", "-c", &script]);
    assert!(code == 3 && said.starts_with("would be refused: CPUs: 100 requested, 7 free"), "{said}");
    assert!(!begun.exists(), "no benchmark runs");

    let prepared = host.dir.path().join("prepared");
    let prepare = format!("head -n 1 {} >>{}", knob.display(), prepared.display());
    let (code, said) =
        run(server, &[&["trial", "--prepare", &prepare], &trial[1..], &["echo tps 5"]].concat());
    assert_eq!(code, 0, "{said}");
    assert_eq!(fs::read_to_string(&prepared).unwrap(), cpus, "each run has the state of its arm");
    let (code, said) = run(server, &[&["trial", "--prepare", "exit 7"], &trial[1..], &["true"]].concat());
    assert!(code == 1 && said.contains("round 1: the command before each run, \"exit 7\", failed"), "{said}");

    let wait = format!("touch {} && exec sleep 60", begun.display());
    let script = format!("head -n 1 {} | grep -qx 1 && {wait}; echo tps 5", knob.display());
    for signal in [Signal::TERM, Signal::HUP] {
        let mut command = numaward(&[&["--server", server], &trial[..], &[&script]].concat());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        while !begun.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(!is_free());
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{signal:?}");
        assert!(is_free(), "{signal:?}");
        fs::remove_file(&begun).unwrap();
    }

    let (code, said) = run(server, &["guarantee", "/batch", "--cpus", "1"]);
    assert_eq!(code, 0, "{said}");
    let (code, said) = run(server, &[&trial[..], &["true"]].concat());
    assert!(code == 1 && said.contains("batch has a guarantee: release it first"), "{said}");
    assert!(!is_free(), "it is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn observing_daemon_refuses_changes() {
    let (host, daemon, _) = guaranteeing_daemon();
    let (socket, listener) = listen(&host, "observing.sock");
    let router = allocations::observing_router(daemon.app.clone(), None, ReloadHandle::new().0);
    tokio::spawn(serve(listener, router, daemon.stop.clone()));
    for change in CHANGES {
        let (code, said) = run(socket.to_str().unwrap(), change);
        let words = "numaward: this daemon gives no guarantees; its log has the reason (mode: observe, or no cgroup v2)";
        assert_eq!((code, said.lines().last().unwrap()), (failure_code(change), words), "{change:?}");
    }
}

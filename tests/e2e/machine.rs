//! The test environment itself: exit codes, kernel panics and hanging machines are reported, and a machine has the requested
//! nodes.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    panic::{self, AssertUnwindSafe},
    thread,
    time::{Duration, Instant},
};

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::{Error, Forward, GuestTopology};

fn small() -> GuestTopology {
    GuestTopology::parse(Some(1), None, None, None).unwrap()
}

#[test]
fn returns_output_and_exit_code() {
    let Some(bench) = TestEnvironment::open() else { return };
    let script = "printf 'exit 0\\nraw\\r\\001\\377' >&2; seq 1 20000; exit 7";
    let mut output = Vec::new();
    assert_eq!(bench.vm(small()).run(script, &mut output).unwrap(), 7);
    let mut expected = b"exit 0\nraw\r\x01\xff".to_vec();
    expected.extend((1..=20000).flat_map(|number| format!("{number}\n").into_bytes()));
    assert!(output == expected, "{} bytes came, {} were expected", output.len(), expected.len());
}

#[test]
fn failed_machine_is_an_error() {
    let Some(bench) = TestEnvironment::open() else { return };
    let run = |script: &str| bench.vm(small()).run(script, &mut Vec::new()).unwrap_err();

    let error = run("echo c >/proc/sysrq-trigger");
    assert!(matches!(&error, Error::Panic { reason, .. } if reason.contains("sysrq")), "{error}");
    assert!(error.to_string().contains("The console's last lines"), "{error}");

    // The machine panics before the script, also after a second start.
    let error = bench.vm(small()).append("rdinit=/none").run("exit 0", &mut Vec::new()).unwrap_err();
    assert!(matches!(error, Error::Panic { .. }), "{error}");

    let error = run("echo 'exit 0'; echo last words >/dev/ttyS0; poweroff -f");
    assert!(matches!(error, Error::NoExitCode { .. }), "{error}");
    assert!(error.to_string().contains("last words"), "{error}");

    assert_bad_scripts_fail(&bench);
}

/// Asserts that a script fails its test if a command fails, if an error is logged but not declared or declared but not logged, or
/// if it leaves a process or cgroup although it declared otherwise.
fn assert_bad_scripts_fail(bench: &TestEnvironment) {
    let message = |script: &str| {
        let vm = bench.vm(small());
        let panic = panic::catch_unwind(AssertUnwindSafe(|| boot(&vm, script))).unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    };
    let failed = message("set -eu\nsection first\ntrue\nfalse\nsection second");
    assert!(failed.contains("FAILED: code 1 in section \"first\", line 4 of the script"), "{failed}");
    let error = "2026-11-28T02:54:47.683166Z ERROR the ledger is lost";
    let failed = message(&format!("set -eu\nsection first\necho '{error}' >/tmp/daemon.log"));
    assert!(failed.contains("unexpected errors") && failed.contains(error), "{failed}");
    let failed = message("set -eu\nsection first\nexpect_error lost");
    assert!(failed.contains("=== errors that did not occur\nlost\n"), "{failed}");
    let failed = message("set -eu\nleaves_nothing\nmkdir $cgroups/left\nsleep 1000 &");
    for left in ["left: cgroup /sys/fs/cgroup/left\n", "left: process sleep 1000\n"] {
        assert!(failed.contains(left), "{failed}");
    }
}

#[test]
fn hung_machine_is_stopped() {
    let Some(bench) = TestEnvironment::open() else { return };
    let limit = Duration::from_secs(10);
    for vm in [bench.vm(small()), bench.vm(small()).real_time()] {
        let error = vm.limit(limit).run("while :; do :; done", &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

#[test]
fn dropped_machine_is_stopped() {
    let Some(bench) = TestEnvironment::open() else { return };
    let running = bench.vm(small()).start("while :; do :; done").unwrap();
    let group = |pid: u32| {
        let children = format!("/proc/{pid}/task/{pid}/children");
        fs::read_to_string(children).ok().and_then(|text| text.split_whitespace().next()?.parse::<u32>().ok())
    };
    let started = Instant::now();
    let qemu = loop {
        if let Some(qemu) = group(running.stopper().pid()) {
            break qemu;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "QEMU did not start");
        thread::sleep(Duration::from_millis(50));
    };
    drop(running);
    let name = fs::read_to_string(format!("/proc/{qemu}/comm")).unwrap_or_default();
    assert!(!name.starts_with("qemu"), "process {qemu} is still {name}");
}

#[test]
fn machine_has_requested_nodes() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(
        Some(3),
        Some("2,1,0"),
        Some("512M,1G,256M"),
        Some("10,21,31;21,10,41;31,41,10"),
    );
    let script = r"
        for node in /sys/devices/system/node/node*; do
            section ${node##*/}
            cat $node/cpulist $node/distance
            awk '/MemTotal/ {print $4}' $node/meminfo
        done
        section controllers
        cat $cgroups/cgroup.subtree_control
        section online
        cat /sys/devices/system/node/online /sys/devices/system/cpu/online";
    let report = boot(&bench.vm(machine.unwrap()), script);
    assert_eq!(report.section("online"), "0-2\n0-2");
    let nodes = [("0-1", "10 21 31", 512), ("2", "21 10 41", 1024), ("", "31 41 10", 256)];
    for (id, (cpus, distances, mib)) in nodes.into_iter().enumerate() {
        let section = report.section(&format!("node{id}"));
        let lines: Vec<_> = section.lines().collect();
        assert_eq!(lines[..2], [cpus, distances], "node {id}");
        // The kernel reserves memory for its image and the map of pages.
        let total: u64 = lines[2].parse().unwrap();
        assert!((mib * 1024 * 3 / 4..=mib * 1024).contains(&total), "node {id} of {mib} MiB has {total} KiB");
    }
    for controller in ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"] {
        let found = report.section("controllers").split(' ').any(|name| name == controller);
        assert!(found, "no {controller} in {}", report.section("controllers"));
    }
}

#[test]
fn forwards_port_to_loopback() {
    let Some(bench) = TestEnvironment::open() else { return };
    // The port was free a moment ago. If another process takes it meanwhile, QEMU reports that.
    let host = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let script = "mkdir /www && echo -n hello >/www/index.html && httpd -f -p 8080 -h /www";
    let vm = bench.vm(small()).forward(Forward { host, guest: 8080 });
    let mut running = vm.start(script).unwrap();
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", host))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        std::io::Result::Ok(answer)
    };
    let started = Instant::now();
    loop {
        // Before the server listens, QEMU accepts the connection and closes it.
        let answer = ask();
        if matches!(&answer, Ok(text) if text.ends_with("hello")) {
            break;
        }
        assert!(!running.ended().unwrap(), "the machine ended: {}", running.console_tail());
        assert!(started.elapsed() < Duration::from_mins(2), "{answer:?}\n{}", running.console_tail());
        thread::sleep(Duration::from_millis(200));
    }
}

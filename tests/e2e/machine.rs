//! The test environment itself: exit codes, kernel panics and hanging machines are reported, and a machine has the requested
//! nodes.

use std::{
    fs,
    io::{self, Read as _, Write},
    net::{TcpListener, TcpStream},
    panic, thread,
    time::{Duration, Instant},
};

use numaward_tests::{TestEnvironment, boot, report, with_prelude};
use numaward_vm::{Error, Forward, GuestTopology, Vm};

/// Returns a machine with one node and without the programs under test.
fn small(bench: &TestEnvironment) -> Vm {
    Vm::new(bench.kernel().clone(), GuestTopology::parse(Some(1), None, None, None).unwrap())
}

#[test]
fn returns_output_and_exit_code() {
    let Some(bench) = TestEnvironment::open() else { return };
    let script = "printf 'exit 0\\nraw\\r\\001\\377' >&2; seq 1 20000; exit 7";
    let mut output = Vec::new();
    assert_eq!(small(&bench).run(script, &mut output).unwrap(), 7);
    let mut expected = b"exit 0\nraw\r\x01\xff".to_vec();
    expected.extend((1..=20000).flat_map(|number| format!("{number}\n").into_bytes()));
    assert!(output == expected, "{} bytes came, {} were expected", output.len(), expected.len());
}

#[test]
fn failed_machine_is_an_error() {
    let Some(bench) = TestEnvironment::open() else { return };
    let run = |script: &str| small(&bench).run(script, &mut Vec::new()).unwrap_err();

    let error = run("echo c >/proc/sysrq-trigger");
    assert!(matches!(&error, Error::Panic { reason, .. } if reason.contains("sysrq")), "{error}");
    assert!(error.to_string().contains("The console's last lines"), "{error}");

    // The machine panics before the script, also after a second start.
    let error = small(&bench).append("rdinit=/none").run("exit 0", &mut Vec::new()).unwrap_err();
    assert!(matches!(error, Error::Panic { .. }), "{error}");

    let error = run("echo 'exit 0'; echo last words >/dev/ttyS0; poweroff -f");
    assert!(matches!(error, Error::NoExitCode { .. }), "{error}");
    assert!(error.to_string().contains("last words"), "{error}");

    assert_bad_scripts_fail(&bench);
}

/// Asserts that a script fails its test if a command fails, if an error is logged but not declared or declared but not logged, or
/// if it leaves a process or cgroup although it declared otherwise.
fn assert_bad_scripts_fail(bench: &TestEnvironment) {
    let error = "2026-11-28T02:54:47.683166Z ERROR the ledger is lost";
    let logs = format!("set -eu\nsection first\necho '{error}' >/tmp/daemon.log");
    let bad = [
        (
            "set -eu\nsection first\ntrue\nfalse\nsection second",
            vec!["FAILED: code 1 in section \"first\", line 4 of the script"],
        ),
        (&*logs, vec!["=== unexpected errors\n", error]),
        ("set -eu\nsection first\nexpect_error lost", vec!["=== errors that did not occur\nlost\n"]),
        (
            "set -eu\nleaves_nothing\nmkdir $cgroups/left\nsleep 1000 &",
            vec!["left: cgroup /sys/fs/cgroup/left\n", "left: process sleep 1000\n"],
        ),
    ];
    // One machine runs all of them, each as if it were the machine's own.
    let all = bad.iter().fold(String::new(), |all, (script, _)| {
        let script = format!("cat >/script <<'END OF SCRIPT'\n{}\nEND OF SCRIPT\n", with_prelude(script));
        all + &script + "sh /script; printf '\\nCODE %s\\n' $?\nrm -rf /tmp/*\n"
    });
    let mut output = Vec::new();
    assert_eq!(small(bench).run(&all, &mut output).unwrap(), 0);
    let output = String::from_utf8(output).unwrap();
    let mut rest = output.as_str();
    for (script, messages) in bad {
        let (printed, after) = rest.split_once("\nCODE ").unwrap_or_else(|| panic!("{script} in:\n{output}"));
        let (code, after) = after.split_once('\n').unwrap();
        rest = after;
        let code = code.parse().unwrap();
        let panic = panic::catch_unwind(|| report(Ok(code), printed.as_bytes())).unwrap_err();
        let failed = panic.downcast_ref::<String>().unwrap();
        for message in messages {
            assert!(failed.contains(message), "{failed}");
        }
    }
}

#[test]
fn hung_machine_is_stopped() {
    let Some(bench) = TestEnvironment::open() else { return };
    let limit = Duration::from_secs(10);
    for vm in [small(&bench), small(&bench).real_time()] {
        let error = vm.limit(limit).run("while :; do :; done", &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

#[test]
fn dropped_machine_is_stopped() {
    let Some(bench) = TestEnvironment::open() else { return };
    let running = small(&bench).start("while :; do :; done").unwrap();
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
    let vm = small(&bench).forward(Forward { host, guest: 8080 });
    let mut running = vm.start(script).unwrap();
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", host))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        io::Result::Ok(answer)
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

/// A writer that keeps the text and when each byte came.
#[derive(Default)]
struct TimedOutput(Vec<(Instant, u8)>);

impl TimedOutput {
    /// Returns the lines, and when each ended.
    fn lines(&self) -> Vec<(Instant, String)> {
        let lines = self.0.split_inclusive(|(_, byte)| *byte == b'\n');
        let text = |line: &[(Instant, u8)]| line.iter().map(|(_, byte)| char::from(*byte)).collect();
        lines.filter_map(|line| Some((line.last()?.0, text(line)))).collect()
    }
}

impl Write for TimedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = Instant::now();
        self.0.extend(bytes.iter().map(|byte| (now, *byte)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The guest does not measure its counter, which fails if the host does not run it meanwhile.
#[test]
fn real_time_is_that_of_host() {
    let Some(bench) = TestEnvironment::open() else { return };
    let mut output = TimedOutput::default();
    let script = "cat /proc/uptime; sleep 5; cat /proc/uptime";
    assert_eq!(small(&bench).real_time().run(script, &mut output).unwrap(), 0);
    let lines = output.lines();
    let [(start, before), (end, after)] = &lines[..] else { panic!("{lines:?}") };
    let uptime = |line: &str| line.split(' ').next().unwrap().parse::<f64>().unwrap();
    let ratio = (uptime(after) - uptime(before)) / end.duration_since(*start).as_secs_f64();
    assert!((0.8..1.2).contains(&ratio), "the guest's clock has {ratio:.2} times the rate of the host's");
}

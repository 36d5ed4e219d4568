//! Tests of the `numaward` command as a user runs it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;
#[path = "cli/numactl.rs"]
mod numactl;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use numaward_tests_support::{assert_golden, skip_outside_ci};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{daemon, host, numaward};

fn output(args: &[&str]) -> Output {
    numaward(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the standard output and the exit code of a command.
fn run_command(args: &[&str]) -> (String, i32) {
    let output = output(args);
    (text(&output.stdout), output.status.code().unwrap())
}

/// Returns the error output and the exit code of a command without standard output.
fn run_failing(args: &[&str]) -> (String, i32) {
    let output = output(args);
    assert_eq!(text(&output.stdout), "", "{args:?}");
    (text(&output.stderr), output.status.code().unwrap())
}

fn json(args: &[&str]) -> Value {
    let output = output(args);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{args:?}: {error}: {}", text(&output.stdout)))
}

fn path(dir: &tempfile::TempDir) -> &str {
    dir.path().to_str().unwrap()
}

/// Compares the help of every command with a file in the repository, which `cargo xtask generate` writes.
#[test]
fn the_help_is_checked_in() {
    fn collect(command: &[&str], all: &mut Vec<String>) {
        let (help, _) = run_command(&[command, &["--help"]].concat());
        all.push(format!("$ {}\n{help}", [&["numaward"], command, &["--help"]].concat().join(" ")));
        // Continuation lines are indented further, and options begin with a hyphen.
        let lines = help.lines().take_while(|line| *line != "Options:");
        let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        let names = names.filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
        for name in names.filter(|name| !["help", "numaward"].contains(name)) {
            collect(&[command, &[name]].concat(), all);
        }
    }
    let mut all = Vec::new();
    collect(&[], &mut all);
    let all = all.join("\n");
    for command in ["run", "doctor", "config view"] {
        assert!(all.contains(&format!("$ numaward {command} --help\n")), "{command}");
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help.txt");
    assert_golden(&file, &all);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in
        [&["bogus"][..], &[], &["topology", "-o", "xml"], &["run", "--colour"], &["completions", "tcsh"]]
    {
        let (error, code) = run_failing(args);
        assert_eq!(code, 2, "{args:?}: {error}");
        assert!(error.contains("Usage:") || error.contains("possible values"), "{args:?}: {error}");
    }
    let (help, _) = run_failing(&[]);
    let first = ["\nBegin with:\n  numaward doctor ", "\n  numaward run ", "\n  numaward top "];
    assert!(first.iter().all(|command| help.contains(command)), "{help}");
    let (help, code) = run_failing(&["explain"]);
    assert!(
        code == 2 && help.contains("Explain the placement of a workload") && help.contains("--cpus <NUMBER>"),
        "{help}"
    );
}

/// The options of the connection have one page, and the help and manual page of each command that has them name it.
#[test]
fn help_names_place_of_connection_options() {
    let place = "numaward options";
    assert!(run_command(&["--help"]).0.contains(place));
    for (command, is_named) in
        [("get", true), ("exec", true), ("numactl", true), ("run", false), ("man", false)]
    {
        for help in ["-h", "--help"] {
            let (help, _) = run_command(&[command, help]);
            assert_eq!(help.contains(place), is_named, "{command}: {help}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run_command(&["man", "--dir", path(&dir)]).1, 0);
    let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    assert!(page("numaward-get.1").contains(place) && page("numaward.1").contains("token\\-file"));
    assert!(!page("numaward-get.1").contains("token"), "{}", page("numaward-get.1"));
}

/// The daemon may take long to answer.
#[test]
fn waiting_exec_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, ran) = (dir.path().join("control.sock"), dir.path().join("ran"));
    let listener = UnixListener::bind(&socket).unwrap();
    let arguments = ["--server", socket.to_str().unwrap(), "exec", "--memory", "1Mi", "--", "touch"];
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        // The process that runs the tests may ignore SIGINT, and numaward does not change that.
        let ours = numaward(&arguments);
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").arg(ours.get_program()).args(ours.get_args()).arg(&ran);
        for (name, _) in ours.get_envs() {
            command.env_remove(name);
        }
        let mut command = command.spawn().unwrap();
        let (mut asked, _) = listener.accept().unwrap();
        assert!(asked.read(&mut [0; 16]).unwrap() > 0);
        kill_process(Pid::from_child(&command), signal).unwrap();
        assert_eq!(command.wait().unwrap().code(), Some(code));
        assert!(!ran.exists(), "the command was started");
    }
}

/// The exit codes are those of env(1): 125 for errors of numaward itself, 126 and 127 for the command.
#[test]
fn own_errors_of_exec_are_exit_code_125() {
    let socket = "/nonexistent/control.sock";
    for args in [
        &["exec"][..],
        &["exec", "--bogus", "--", "true"],
        &["exec", "--", "true"],
        &["exec", "--cpus", "1"],
        &["exec", "--cpus", "many", "--", "true"],
        &["exec", "--cpus", "1", "--near", "no-such-device", "--", "true"],
        &["exec", "--cpus", "1", "--server", "http://127.0.0.1:1", "--", "true"],
        &["exec", "--cpus", "1", "--server", socket, "--", "true"],
        &["--server", socket, "exec", "--memory", "1Mi", "--", "true"],
    ] {
        let (error, code) = run_failing(args);
        assert!(code == 125 && !error.is_empty(), "{args:?}: {code} {error}");
    }
    let (error, _) = run_failing(&["exec", "--cpus", "1", "--server", "http://127.0.0.1:1", "--", "true"]);
    assert!(error.contains("give the path of its control socket"), "{error}");
    assert_eq!(run_command(&["exec", "--help"]).1, 0);
    // Entering the cgroup is the first step of the command.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cgroup.procs"), "").unwrap();
    for (directory, command, expected) in [
        (path(&dir), "no-such-command", 127),
        (path(&dir), "/etc/passwd", 126),
        (path(&dir), "false", 1),
        ("/nonexistent", "true", 125),
    ] {
        assert_eq!(output(&["enter", directory, "--", command]).status.code(), Some(expected), "{command}");
    }
}

/// A daemon that cannot be reached has not acted yet.
#[test]
fn memory_limit_is_named_in_advance() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    let guarantee = |options: &[&str]| {
        let command = ["--server", socket.to_str().unwrap(), "guarantee", "db.service", "--memory", "8Gi"];
        run_failing(&[&command[..], options].concat()).0
    };
    let limit = "numaward: --memory 8Gi also limits db.service to 8Gi (MemoryMax, memory.max)";
    let said = guarantee(&[]);
    assert!(said.starts_with(limit) && said.contains(socket.to_str().unwrap()), "{said}");
    assert!(!guarantee(&["--memory-limit", "12Gi"]).contains("limits"));

    let page = include_str!("../../../docs/start.md");
    assert!(page.contains("`--memory 8Gi` is a limit as well") && page.contains("--memory-limit 12Gi`"));
}

/// A child process inherits the CPU affinity of its shell.
#[test]
fn all_cpus_undoes_inherited_affinity() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cgroup.procs"), "").unwrap();
    let allowed =
        || fs::read_to_string("/proc/thread-self/status").map(|status| allowed_cpus(&status)).unwrap();
    let mut every = rustix::thread::CpuSet::new();
    (0..rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| every.set(cpu));
    rustix::thread::sched_setaffinity(None, &every).unwrap();
    let all = allowed();
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let bound = allowed();
    let entered = |options: &[&str]| {
        let (status, _) =
            run_command(&[&["enter", path(&dir)], options, &["--", "cat", "/proc/self/status"]].concat());
        allowed_cpus(&status)
    };
    assert_eq!(entered(&[]), bound, "one without CPUs of its own keeps what it inherits");
    assert_eq!(entered(&["--all-cpus"]), all);
}

fn allowed_cpus(status: &str) -> String {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
}

/// A flag overrides the variable, and the variable overrides the default daemon.
#[test]
fn finds_daemon_by_precedence() {
    let daemon = daemon();
    let ask = |args: &[&str], variable: Option<&str>| {
        let mut command = numaward(&[&["status", "-o", "json"], args].concat());
        if let Some(server) = variable {
            command.env("NUMAWARD_SERVER", server);
        }
        command
            .env("NUMAWARD_CONTROL_SOCKET", "/nonexistent/default.sock")
            .env("NUMAWARD_LISTEN", "127.0.0.1:1")
            .output()
            .unwrap()
    };
    let (socket, address) = (daemon.socket.to_str().unwrap(), format!("http://{}", daemon.address));
    for server in [socket, &address] {
        assert!(ask(&["--server", server], None).status.success(), "{server}");
        assert!(ask(&[], Some(server)).status.success(), "{server}");
        assert!(ask(&["--server", server], Some("/nonexistent/variable.sock")).status.success(), "{server}");
    }
    let variable = ask(&[], Some("/nonexistent/variable.sock"));
    assert!(text(&variable.stderr).contains("/nonexistent/variable.sock"), "{variable:?}");
    let default = ask(&[], None);
    let said = text(&default.stderr);
    assert!(default.status.code() == Some(4) && said.contains("/nonexistent/default.sock"), "{said}");
    assert!(said.contains("nor at 127.0.0.1:1"), "where the socket cannot be used, it is read there: {said}");
    // A user without permission for the socket reads from the HTTP address of the same daemon.
    let read = numaward(&["status"])
        .env("NUMAWARD_CONTROL_SOCKET", "/nonexistent/default.sock")
        .env("NUMAWARD_LISTEN", daemon.address.to_string())
        .output()
        .unwrap();
    assert!(read.status.success(), "{read:?}");
    // Changes are never sent to that address.
    let change = numaward(&["release", "nobody"])
        .env("NUMAWARD_CONTROL_SOCKET", "/nonexistent/default.sock")
        .env("NUMAWARD_LISTEN", daemon.address.to_string())
        .output()
        .unwrap();
    assert_eq!(change.status.code(), Some(4), "{change:?}");
}

#[test]
fn prints_objects_in_each_format() {
    let daemon = daemon();
    let server = format!("http://{}", daemon.address);
    let (table, code) = run_command(&["get", "--server", &server]);
    assert_eq!((table.as_str(), code), ("there are no guarantees\n", 0));
    assert_eq!(json(&["get", "-o", "json", "--server", &server])["allocations"], serde_json::json!([]));
    assert_eq!(run_command(&["get", "-o", "name", "--server", &server]), (String::new(), 0));
    assert_eq!(run_command(&["get", "nodes", "-o", "name", "--server", &server]), ("0\n2\n".to_owned(), 0));
    let (nodes, code) = run_command(&["get", "nodes", "2", "--server", &server]);
    assert!(code == 0 && nodes.starts_with("NODE  CPUS") && nodes.contains("\n2     none"), "{nodes}");
    assert!(json(&["get", "workloads", "-o", "json", "--server", &server])["workloads"].is_array());
    assert!(json(&["get", "events", "-o", "json", "--server", &server])["events"].is_array());
    assert_eq!(
        json(&["events", "--since", "1ms", "-o", "json", "--server", &server])["events"],
        serde_json::json!([])
    );
    let (error, code) = run_failing(&["get", "guarantees", "nobody", "--server", &server]);
    assert!(code == 1 && error.contains("no guarantee named \"nobody\""), "{error}");
    let (error, code) = run_failing(&["describe", "nobody", "--server", &server]);
    assert!(code == 1 && error.contains("no workload named \"nobody\""), "{error}");
    let (events, code) = run_command(&["events", "--server", &server]);
    assert!(code == 0 && events.starts_with("ID"), "{events}");
    let (error, code) = run_failing(&["events", "--kind", "nonsense", "--server", &server]);
    assert!(code == 2 && error.contains("oom_kill"), "{error}");

    // The machine of the daemon is shown with its guarantees.
    let (table, code) = run_command(&["topology", "--server", &server]);
    assert!(code == 0 && table.contains("NODE  KIND    ALLOCATABLE  GUARANTEED"), "{table}");
    let machine = json(&["topology", "--server", daemon.socket.to_str().unwrap(), "-o", "json"]);
    assert_eq!(machine["nodes"][1]["node"], 2);
    assert_eq!(machine["promised"][1]["memory"][0]["promisedBytes"], 0);
    let (yaml, _) = run_command(&["topology", "--server", &server, "-o", "yaml"]);
    assert!(yaml.contains("onlineCpus: 0-3\n"), "{yaml}");

    for wrong in [&["release"][..], &["release", "db", "--all"], &["release", "db", "--yes"]] {
        assert_eq!(run_failing(wrong).1, 2, "{wrong:?}");
    }
}

#[test]
fn bugtool_hides_secrets_and_lists_gaps() {
    let daemon = daemon();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.tar.gz");
    let config = dir.path().join("numaward.yaml");
    fs::write(&config, "otlp: {endpoint: \"http://127.0.0.1:1\", headers: {authorization: sesame}}\n")
        .unwrap();
    let bugtool = || {
        let mut command =
            numaward(&["bugtool", file.to_str().unwrap(), "--server", daemon.socket.to_str().unwrap()]);
        command.env("NUMAWARD_CONFIG", &config).output().unwrap()
    };
    let made = bugtool();
    assert!(made.status.success(), "{made:?}");
    assert_eq!(text(&made.stdout), format!("{}\n", file.display()));
    let unpacked = Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(dir.path()).output().unwrap();
    assert!(unpacked.status.success() && unpacked.stderr.is_empty(), "{unpacked:?}");
    let root = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.is_dir())
        .unwrap();
    let read =
        |name: &str| fs::read_to_string(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(read("metrics.txt").contains("numaward_build_info"), "metrics");
    for name in [
        "version.json",
        "daemon-version.json",
        "status.json",
        "allocations.json",
        "events.json",
        "topology.json",
    ] {
        serde_json::from_str::<Value>(&read(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for name in ["doctor.txt", "readyz.txt", "kernel/proc/version"] {
        assert!(root.join(name).is_file(), "{name}");
    }
    let configured = read("config.yaml");
    assert!(configured.contains("authorization: hidden") && !configured.contains("sesame"), "{configured}");
    // In this test, systemd does not run the daemon.
    let missing = read("missing.txt");
    for name in ["log.txt", "cgroups.txt"] {
        assert!(root.join(name).exists() || missing.contains(&format!("{name}: ")), "{missing}");
    }
    let again = bugtool();
    assert!(again.status.code() == Some(1) && text(&again.stderr).contains("File exists"), "{again:?}");

    // An archive is created even without a daemon.
    let other = dir.path().join("other.tar.gz");
    let made = numaward(&["bugtool", other.to_str().unwrap(), "--server", "/nonexistent/control.sock"])
        .env("NUMAWARD_CGROUP_MOUNT", dir.path())
        .output()
        .unwrap();
    assert!(made.status.success() && text(&made.stderr).contains("missing.txt"), "{made:?}");
    let missing =
        Command::new("tar").args(["-xzOf", other.to_str().unwrap(), "--wildcards", "*/missing.txt"]).output();
    let missing = text(&missing.unwrap().stdout);
    assert!(missing.contains("status.json: no numaward daemon is reachable"), "{missing}");
    assert!(missing.contains("cgroups.txt: ") && missing.contains("cgroup v2"), "{missing}");
}

#[test]
fn prints_topology_of_directory() {
    let host = host();
    let (table, code) = run_command(&["topology", "--root", path(&host)]);
    assert_eq!(code, 0);
    let expected = "\
2 nodes, 1 socket, 4 cores, 4 CPUs, 4.0 GiB

NODE  CPUS               MEMORY
0     0-3                2.0 GiB
2     none: memory only  2.0 GiB

DISTANCE  0   2
0         10  17
2         17  10

SOCKET  NODES  CORES  CPUS
0       0      4      0-3
";
    assert_eq!(table, expected);
    let machine = json(&["topology", "--root", path(&host), "-o", "json"]);
    assert_eq!(machine["nodes"][1]["distances"]["0"], 17);
    assert_eq!(machine["nodes"][1]["memoryOnly"], true);
}

#[test]
fn unreadable_machine_is_one_message() {
    let host = host();
    let file = host.path().join("sys/devices/system/node/node2/meminfo");
    fs::write(&file, "junk\n").unwrap();
    let (error, code) = run_failing(&["topology", "--root", path(&host)]);
    assert_eq!((error.lines().count(), code), (1, 1), "{error}");
    assert!(error.contains(file.to_str().unwrap()), "{error}");
    fs::remove_dir_all(host.path().join("sys")).unwrap();
    let (error, code) = run_failing(&["topology", "--root", path(&host)]);
    assert_eq!((error.lines().count(), code), (1, 1), "{error}");
    assert_eq!(error.matches("No such file").count(), 1, "said once: {error}");
}

#[test]
fn reports_all_configuration_errors() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("numaward.yaml");
    fs::write(&file, "lisen: x\nlog: {level: loud}\n").unwrap();
    let file = file.to_str().unwrap();
    let expected = format!(
        "numaward: the configuration has 2 problems:\n  {file}:1:1: unknown key \"lisen\"; did you mean \"listen\"?\n  \
         {file}:2:14: log.level: unknown variant `loud`, expected one of `error`, `warn`, `info`, `debug`, `trace`\n"
    );
    assert_eq!(run_failing(&["config", "check", file]), (expected.clone(), 1));
    assert_eq!(run_failing(&["run", "--config", file]), (expected, 1));
    let report = json(&["config", "check", file, "-o", "json"]);
    assert_eq!(report["valid"], false);
    assert_eq!(report["errors"][1]["line"], 2);

    fs::write(file, "log: {level: warn}\n").unwrap();
    assert_eq!(run_command(&["config", "check", file]), (format!("{file}: valid\n"), 0));
    let checked = numaward(&["config", "check", file]).env("NUMAWARD_LISTEN", "here").output().unwrap();
    assert_eq!(checked.status.code(), Some(1));
    assert!(text(&checked.stderr).contains("variable NUMAWARD_LISTEN: listen: \"here\""), "{checked:?}");

    let group = |name: &str| dir.path().join(format!("group.{name}.yaml"));
    fs::write(group("gpu"), "probes: {slots: 9}\n").unwrap();
    let both = format!("{file}, {}: valid\n", group("gpu").display());
    assert_eq!(run_command(&["config", "check", file]), (both.clone(), 0));
    fs::write(group("bad"), "probes: {slots: 0}\n").unwrap();
    let (error, code) = run_failing(&["config", "check", file]);
    assert_eq!(code, 1);
    assert!(error.contains("has a problem") && error.contains("group.bad.yaml:1:17"), "{error}");
    assert_eq!(run_command(&["config", "check", file, "--group", "gpu"]), (both, 0), "only this group");

    let (error, code) = run_failing(&["config", "check", "/nonexistent/numaward.yaml"]);
    assert_eq!(code, 1);
    assert!(error.contains("/nonexistent/numaward.yaml: cannot be read"), "{error}");
}

#[test]
fn shows_effective_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("numaward.yaml");
    fs::write(&file, "log: {level: warn}\nfeatureGates: {NodeSwap: true}\n").unwrap();
    let args = ["config", "view", "--config", file.to_str().unwrap()];
    let shown = numaward(&args).env("NUMAWARD_KUBE_RESERVED", "memory=1Gi").output().unwrap();
    let yaml = text(&shown.stdout);
    for lines in ["log:\n  format: text\n  level: warn\n", "kubeReserved:\n  memory: 1Gi\n", "  rate: 64Mi\n"]
    {
        assert!(yaml.contains(lines), "{lines}: {yaml}");
    }
    assert_eq!(text(&shown.stderr), "numaward: featureGates.NodeSwap has no effect here\n");
    // The shown configuration is valid.
    fs::write(&file, &yaml).unwrap();
    assert_eq!(run_command(&args), (yaml, 0));
    let view = json(&[&args[..], &["-o", "json"]].concat());
    assert_eq!(
        (&view["log"]["level"], &view["topologyManagerPolicy"]),
        (&"warn".into(), &"restricted".into())
    );
    fs::write(&file, "log: {level: loud}\n").unwrap();
    assert_eq!(run_failing(&args).1, 1);
}

#[test]
fn prints_schema_and_completions() {
    let schema = json(&["config", "schema"]);
    assert_eq!(schema["properties"]["probes"]["properties"]["slots"]["maximum"], 16_384);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (script, code) = run_command(&["completions", shell]);
        assert!(code == 0 && script.contains("import-kubelet-state"), "{shell}");
    }
}

/// Runs a program that checks a file. Skips the check outside CI if the program is not installed.
fn assert_accepted_by(program: &str, arguments: &[&str], package: &str) {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            let said = text(&output.stdout) + &text(&output.stderr);
            // The pages contain no date, so that they are reproducible.
            let wrong: Vec<_> = said.lines().filter(|line| !line.contains("missing date")).collect();
            assert!(wrong.is_empty(), "{program} {arguments:?}: {wrong:?}");
            assert!(
                output.status.success() || !said.is_empty(),
                "{program} {arguments:?}: {}",
                output.status
            );
        }
        Err(error) => {
            let missing = format!("{program} (Debian package {package}): {error}");
            skip_outside_ci(missing);
        }
    }
}

#[test]
fn completions_and_man_pages_are_valid() {
    let dir = tempfile::tempdir().unwrap();
    for (shell, package) in [("bash", "bash"), ("zsh", "zsh")] {
        let file = dir.path().join(shell);
        fs::write(&file, run_command(&["completions", shell]).0).unwrap();
        assert_accepted_by(shell, &["-n", file.to_str().unwrap()], package);
    }
    assert_eq!(run_command(&["man", "--dir", path(&dir)]).1, 0);
    let mut pages = 0;
    for entry in fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        let page = entry.path();
        if page.extension().is_some_and(|extension| extension == "1") {
            pages += 1;
            assert_accepted_by("mandoc", &["-Tlint", "-Wwarning", page.to_str().unwrap()], "mandoc");
        }
    }
    assert!(pages > 20, "{pages} pages");
}

#[test]
fn man_page_for_each_command() {
    let (page, code) = run_command(&["man"]);
    assert!(code == 0 && page.contains(".TH numaward 1"), "{page}");
    let (_, variables) = page.split_once(".SH ENVIRONMENT\n").unwrap();
    for name in ["SERVER", "CONFIG", "LOG_LEVEL"] {
        assert!(variables.contains(&format!("\\fBNUMAWARD_{name}\\fR\n")), "{name}: {variables}");
    }
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man1");
    assert_eq!(run_command(&["man", "--dir", pages.to_str().unwrap()]), (String::new(), 0));
    for page in ["numaward.1", "numaward-run.1", "numaward-import-kubelet-state.1"] {
        assert!(pages.join(page).is_file(), "{page}");
    }
    let (error, code) = run_failing(&["man", "--dir", "/proc/nowhere"]);
    assert!(code == 1 && error.contains("/proc/nowhere"), "{error}");
}

#[test]
fn import_refuses_invalid_state() {
    let host = host();
    let import = |directory: &Path| {
        numaward(&["import-kubelet-state", directory.to_str().unwrap()])
            .env("NUMAWARD_HOST_ROOT", host.path())
            .env("NUMAWARD_STATE_DIRECTORY", host.path().join("state"))
            .output()
            .unwrap()
    };
    let nothing = import(host.path());
    assert_eq!(nothing.status.code(), Some(1), "{nothing:?}");
    let said = text(&nothing.stderr);
    assert!(said.contains("neither cpu_manager_state nor memory_manager_state"), "{said}");
    fs::write(host.path().join("cpu_manager_state"), "{\"policyName\":").unwrap();
    let damaged = import(host.path());
    let said = text(&damaged.stderr);
    assert!(damaged.status.code() == Some(1) && said.contains("cpu_manager_state"), "{said}");
    assert!(!host.path().join("state").exists());
}

#[test]
fn import_uses_configuration_of_group() {
    let dir = tempfile::tempdir().unwrap();
    let [file, group] = ["config.yaml", "group.gpu.yaml"].map(|name| dir.path().join(name));
    fs::write(&file, "{}\n").unwrap();
    fs::write(&group, "probes: {slots: 0}\n").unwrap();
    let import = ["import-kubelet-state", path(&dir), "--config", file.to_str().unwrap(), "--dry-run"];
    let (error, code) = run_failing(&[&import[..], &["--group", "gpu"]].concat());
    assert!(code == 1 && error.contains("group.gpu.yaml:1:17"), "{error}");
    let (error, _) = run_failing(&[&import[..], &["--group", "none"]].concat());
    assert!(error.contains("numaward.io/group: none has no effect"), "{error}");
}

#[test]
fn socket_of_systemd_is_served() {
    let host = host();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // As systemd does: file descriptor 3, for this process.
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" run";
    let mut daemon = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_numaward")])
        .env("NUMAWARD_HOST_ROOT", host.path())
        .env("NUMAWARD_STATE_DIRECTORY", host.path().join("state"))
        .env("NUMAWARD_CONTROL_SOCKET", host.path().join("control.sock"))
        .env("NUMAWARD_PROBES_ALLOCATION_ENABLED", "false")
        .env("NUMAWARD_LISTEN", address.to_string())
        .stdin(OwnedFd::from(listener))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It waits in the kernel until the daemon serves it.
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(read.is_ok() && answer.starts_with("HTTP/1.1 200"), "{read:?} {answer}");
}

#[test]
fn refuses_invalid_server_addresses() {
    // This port was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (http, https) = (format!("http://{free}"), format!("https://{free}"));
    let table: &[(&[&str], i32, &str)] = &[
        (&["--server", &http], 4, "control.listen"),
        (&["--server", "somewhere"], 2, "is not a host and a port"),
        (&["--server", "http://somewhere"], 2, "is not a host and a port"),
        (&["--server", "ftp://somewhere:1"], 2, "neither https nor http"),
        (&["--server", "http://10.0.0.1:1", "--token-file", "/x"], 1, "unencrypted: use https"),
        (&["--server", &https], 1, "--ca FILE"),
        (&["--server", &https, "--ca", "/nonexistent"], 1, "--ca /nonexistent: cannot be read"),
        (&["--server", &http, "--ca", "/nonexistent"], 1, "TLS requires https"),
        (
            &["--server", &http, "--token-file", "/nonexistent"],
            1,
            "--token-file /nonexistent: cannot be read",
        ),
        (&["--server", &https, "--cert", "/x"], 2, "--key"),
    ];
    for (args, code, words) in table {
        let args: Vec<&str> = ["release", "nobody"].iter().chain(*args).copied().collect();
        let (error, ended) = run_failing(&args);
        assert!(ended == *code && error.contains(words), "{args:?}: {ended} {error}");
    }
}

#[test]
fn prints_version() {
    let (version, _) = run_command(&["version"]);
    assert!(version.starts_with(&format!("numaward {}", env!("CARGO_PKG_VERSION"))), "{version}");
    assert_eq!(json(&["version", "-o", "json"])["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(run_command(&["--version"]).0, format!("numaward {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn doctor_finds_problems() {
    let host = host();
    let (table, code) = run_command(&["doctor", "--root", path(&host)]);
    assert_eq!(code, 1, "no cgroup v2 here: {table}");
    assert!(table.contains("FAIL  cgroup v2"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80 || !line.contains(' ')), "{table}");
    let checks = json(&["doctor", "--root", path(&host), "-o", "json"]);
    let checks = checks.as_array().unwrap();
    let verdict = |name: &str| &checks.iter().find(|check| check["check"] == name).unwrap()["verdict"];
    assert_eq!(verdict("NUMA nodes"), "ok");
    assert_eq!(verdict("cgroup v2"), "fail");
    let has_fix = |check: &Value| check["fix"].is_string();
    assert!(
        checks
            .iter()
            .all(|check| ["ok", "unknown"].contains(&check["verdict"].as_str().unwrap()) || has_fix(check))
    );

    // The configuration of that host is used.
    let file = |name: &str, text: &str| {
        let path = host.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    file("var/lib/kubelet/config.yaml", "cpuManagerPolicy: static\n");
    file("etc/numaward/config.yaml", "mode: enforce\n");
    let (table, _) = run_command(&["doctor", "--root", path(&host)]);
    assert!(table.contains("FAIL  kubelet"), "{table}");
}

#[test]
fn no_daemon_is_exit_code_4() {
    // This port was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (error, code) = run_failing(&["status", "--server", &format!("http://{free}")]);
    assert_eq!((error.lines().count(), code), (1, 4), "{error}");
    assert!(error.contains(&free) && error.contains("numaward run"), "{error}");
}

#[test]
fn other_server_is_exit_code_1() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (stream, answer) in listener.incoming().zip(["404 Not Found", "200 OK"]) {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = write!(stream, "HTTP/1.1 {answer}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi");
        }
    });
    let (error, code) = run_failing(&["status", "--server", &server]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("404") && error.contains("no valid answer of numaward"), "{error}");
    let (error, code) = run_failing(&["status", "--server", &server]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("200") && error.contains("no valid answer of numaward"), "{error}");
}

/// Returns the answer of the daemon to a raw request.
fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn daemon_serves_and_stops() {
    let mut daemon = daemon();
    let address = daemon.address.to_string();
    let get = |path: &str| {
        ask(daemon.address, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
    };
    assert!(get("/livez").starts_with("HTTP/1.1 200"));
    assert!(get("/metrics").contains("numaward_build_info{"));
    let bad = ask(daemon.address, "NONSENSE\r\n\r\n");
    assert!(bad.starts_with("HTTP/1.1 400"), "{bad}");

    let server = format!("http://{address}");
    let (table, code) = run_command(&["status", "--server", &server]);
    assert_eq!(code, 0);
    assert!(table.contains("alloc: switched off by probes.allocation.enabled"), "{table}");
    assert_eq!(json(&["status", "--server", &server, "-o", "json"])["probes"][0]["mode"], "absent");
    let socket = daemon.socket.to_str().unwrap();
    assert_eq!(json(&["status", "--server", socket, "-o", "json"])["probes"][0]["mode"], "absent");

    // A second observing daemon on the same port reports the conflict and ends.
    let second = numaward(&["run", "--listen", &address, "--log-level", "error"])
        .env("NUMAWARD_MODE", "observe")
        .output()
        .unwrap();
    let error = text(&second.stderr);
    assert_eq!((error.lines().count(), second.status.code()), (1, Some(1)), "{error}");
    assert!(error.contains(&address) && error.contains("in use") && error.contains("--listen"), "{error}");

    let sent = Command::new("kill").args(["-TERM", &daemon.child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
}

#[test]
fn simulates_strategies_and_machines() {
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/cxl.json.gz");
    let shares = |args: &[&str]| {
        let simulated = json(&[&["simulate", traces, "-o", "json"], args].concat());
        let offered = simulated["offered"]["memoryMibTicks"].as_u64().unwrap();
        let strategies = simulated["strategies"].as_array().unwrap().clone();
        let admitted = strategies.iter().map(|of| {
            let admitted = of["admitted"]["memoryMibTicks"].as_u64().unwrap();
            assert!(admitted > 0 && admitted <= offered, "{of}");
            (of["strategy"].as_str().unwrap().to_owned(), admitted)
        });
        admitted.collect::<Vec<_>>()
    };
    let own = shares(&[]);
    assert_eq!(own.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["kubelet", "native"]);
    assert!(own[1].1 > own[0].1, "{own:?}");
    let strict = shares(&["--strategy", "native", "--tiers", "strict"]);
    assert!(strict[0].1 < own[1].1, "{strict:?}");
    let larger = shares(&["--strategy", "native", "--machine", "4x64,512Gi,smt=2,sockets=2"]);
    assert!(larger[0].1 > own[1].1, "{larger:?}");
}

#[test]
fn simulates_fleet_with_schedulers() {
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/cxl.json.gz");
    let fleet = |args: &[&str]| json(&[&["simulate", traces, "-o", "json"], args].concat());
    let seventh = fleet(&["--hosts", "12", "--seed", "7"]);
    assert_eq!(seventh, fleet(&["--hosts", "12", "--seed", "7"]));
    assert_ne!(seventh, fleet(&["--hosts", "12", "--seed", "8"]));
    let groups = seventh["groups"].as_array().unwrap();
    let hosts: Vec<_> = groups.iter().map(|group| group["hosts"].as_u64().unwrap()).collect();
    assert_eq!(hosts.iter().sum::<u64>(), 12, "{hosts:?}");
    let outcomes = seventh["outcomes"].as_array().unwrap();
    let text = |of: &Value, key: &str| of[key].as_str().unwrap().to_owned();
    let who: Vec<_> =
        outcomes.iter().map(|of| ["strategy", "scheduler", "refused"].map(|key| text(of, key))).collect();
    let (fit, topology) = ("NodeResourcesFit", "NodeResourceTopologyMatch");
    let (claims, host) = ("ResourceClaims", "ResourceClaims, host device");
    let expected = [
        ["kubelet", fit, "fail"],
        ["kubelet", topology, "fail"],
        ["native", fit, "wait"],
        ["native", topology, "wait"],
        ["native", fit, "evict"],
        ["native", topology, "evict"],
        ["native", fit, "make-room"],
        ["native", topology, "make-room"],
        ["native", claims, "wait"],
        ["native", host, "make-room"],
        ["none", fit, "fail"],
    ];
    assert_eq!(who, expected);
    let time = |of: &Value| of["admitted"]["memoryMibTicks"].as_i64().unwrap();
    for (number, of) in outcomes.iter().enumerate() {
        assert_eq!(of["lostToNumaMibTicks"].as_i64().unwrap(), time(&outcomes[10]) - time(of));
        let sum: i64 = groups.iter().map(|group| time(&group["outcomes"][number])).sum();
        assert_eq!(sum, time(of));
        // The assumptions: hosts, scheduler, refused pods, order.
        let assumed: Vec<_> =
            of["assumptions"].as_array().unwrap().iter().map(|of| of.as_str().unwrap()).collect();
        assert_eq!(assumed.len(), 4, "{assumed:?}");
        assert!(assumed[1].contains(fit) && assumed[1].contains(topology) == (who[number][1] == topology));
        let setting = format!("kubernetes.refused: {}", who[number][2]);
        assert_eq!(assumed[2].contains(&setting), who[number][2] != "fail", "{assumed:?}");
        let has_claims = [claims, host].contains(&who[number][1].as_str());
        assert_eq!(assumed[1].contains("DynamicResources"), has_claims, "{assumed:?}");
        assert!(!has_claims || of["refusals"] == 0, "hosts have room for the claims that they get: {of}");
        assert_eq!(of["retries"].as_u64() > Some(0), who[number][2] != "wait" && !has_claims, "{of}");
        let moves = ["moves", "movedBytes"].map(|key| of[key].as_u64() > Some(0));
        // With claims, the hosts of this trace have room for every pod.
        assert_eq!(moves, [who[number][2] == "make-room" && !has_claims; 2], "{of}");
    }
    assert!(time(&outcomes[0]) < time(&outcomes[2]), "{outcomes:?}");
    let (printed, code) =
        run_command(&["simulate", traces, "--hosts", "6", "--strategy", "native", "--each"]);
    assert!(code == 0 && printed.contains("6 hosts in") && printed.contains("no NUMA"), "{printed}");
    for words in [
        "What the rows rest on:",
        "(rows 3, 4)",
        "kubernetes.refused: evict",
        "(rows 1, 2, 3, 4, 5, 6, 7, 8, 9)",
    ] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}

/// Runs each `numaward simulate` of the book with fewer hosts, and checks that it prints what its comment says.
#[test]
fn simulations_of_the_book_run() {
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/");
    let dir = tempfile::tempdir().unwrap();
    let traces = dir.path().join("traces");
    fs::create_dir(&traces).unwrap();
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/cxl.json.gz");
    fs::copy(trace, traces.join("cxl.json.gz")).unwrap();
    let config = dir.path().join("config.yaml");
    fs::write(&config, "topologyManagerPolicy: restricted\n").unwrap();
    for (page, count) in [("strategies.md", 3), ("fleet.md", 4)] {
        let text = fs::read_to_string(Path::new(book).join(page)).unwrap();
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with("numaward simulate ")).collect();
        assert_eq!(lines.len(), count, "{page}: {lines:#?}");
        for line in lines {
            let command = line.split(" #").next().unwrap().trim();
            let args = command.split(' ').skip(1).map(|word| match word {
                "traces/" => traces.to_str().unwrap(),
                "1000" => "6",
                "/etc/numaward/config.yaml" => config.to_str().unwrap(),
                word => word,
            });
            let args: Vec<_> = args.collect();
            let (printed, code) = run_command(&args);
            assert_eq!(code, 0, "{page}: {command}: {printed}");
            // Words that are printed only with these options.
            let words: &[&str] = match (args.contains(&"json"), args.contains(&"--hosts")) {
                (true, true) => &["\"groups\"", "\"lostToNumaMibTicks\""],
                (true, false) => &["\"strategies\"", "\"admitted\""],
                (false, true) => &["6 hosts", "kubelet", "native"],
                (false, false) => &["kubelet", "native"],
            };
            assert!(words.iter().all(|word| printed.contains(word)), "{page}: {command}: {printed}");
        }
    }
}

#[test]
fn reports_impossible_simulations() {
    let (error, code) = run_failing(&["simulate", "/nowhere.json"]);
    assert!(code == 1 && error.contains("/nowhere.json cannot be read"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let (error, code) = run_failing(&["simulate", path(&dir)]);
    assert!(code == 1 && error.contains("no files *.json or *.json.gz"), "{error}");
    fs::write(dir.path().join("a.json"), "{}").unwrap();
    let (error, code) = run_failing(&["simulate", path(&dir)]);
    assert!(code == 1 && error.contains("a.json has no traces: expected a JSON array"), "{error}");
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/cxl.json.gz");
    let (error, code) = run_failing(&["simulate", traces, "--machine", "2x7,1Gi,smt=2"]);
    assert!(code == 1 && error.contains("7 CPUs of a node are no whole cores of 2 threads"), "{error}");
    // If the strategy does not start on the machine, nothing is admitted, and the reason is printed.
    let (printed, code) =
        run_command(&["simulate", traces, "--strategy", "kubelet", "--machine", "64x1,1Gi"]);
    assert!(code == 0 && printed.contains("kubelet does not start in"), "{printed}");
    let (error, code) = run_failing(&["simulate"]);
    assert!(code == 2 && error.contains("FILE-OR-DIR"), "{error}");
    for hosts in ["0", "10001", "many"] {
        let (error, code) = run_failing(&["simulate", traces, "--hosts", hosts]);
        assert!(code == 2 && error.contains("--hosts"), "{error}");
    }
    let (error, code) = run_failing(&["simulate", traces, "--hosts", "5"]);
    assert!(code == 1 && error.contains("5 hosts are too few for 6 traces"), "{error}");
    let (error, code) = run_failing(&["simulate", traces, "--seed", "5"]);
    assert!(code == 2 && error.contains("--hosts"), "{error}");
}

#[test]
fn suggests_reserved_memory() {
    let suggested = json(&["simulate", "--reserved-memory", "--observe", "1ms", "-o", "json"]);
    let nodes = suggested["nodes"].as_array().unwrap();
    let sum: u64 = nodes.iter().map(|node| node["reservedBytes"].as_u64().unwrap()).sum();
    assert_eq!(suggested["totalBytes"].as_u64(), Some(sum));
    for node in nodes {
        let (used, reserved) = (node["usedBytes"].as_u64().unwrap(), node["reservedBytes"].as_u64().unwrap());
        assert!(used > 0 && reserved > used && reserved % (64 << 20) == 0, "{node}");
    }
}

#[test]
fn writes_claim_templates() {
    let files = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../daemon/tests/claim_template"));
    let (manifest, read) =
        (files.join("db.yaml"), |name: &str| fs::read_to_string(files.join(name)).unwrap());
    let manifest = manifest.to_str().unwrap();
    let written = output(&["claim-template", manifest]);
    assert_eq!(
        (text(&written.stdout), text(&written.stderr), written.status.code()),
        (read("claims.yaml"), String::new(), Some(0))
    );
    let policy = run_command(&["claim-template", manifest, "--admission-policy", "app=db"]);
    assert_eq!(policy, (read("policy.yaml"), 0));
    let (written, _) = run_command(&["claim-template", "--device-class", "fast", manifest]);
    assert_eq!(written.matches("deviceClassName: fast\n").count(), 2);
    let mut piped =
        numaward(&["claim-template", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    piped.stdin.take().unwrap().write_all(read("db.yaml").as_bytes()).unwrap();
    assert_eq!(text(&piped.wait_with_output().unwrap().stdout), read("claims.yaml"));

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pod.yaml");
    fs::write(
        &file,
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: \"a\\e[1m\"}]}\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let (error, code) = run_failing(&["claim-template", file]);
    let expected =
        format!("numaward: {file}: document 1 (Pod web, line 1): no claim: its class is BestEffort");
    assert!(code == 2 && error.starts_with(&expected), "{error}");
    for label in ["app", "=db", "a b=c", "app=d b", "/a=b", "a/b/c=d"] {
        let (error, code) = run_failing(&["claim-template", file, "--admission-policy", label]);
        assert!(code == 2 && error.contains("--admission-policy"), "{label}: {error}");
    }
    let (error, code) = run_failing(&["claim-template", "/nowhere.yaml"]);
    assert!(code == 1 && error.contains("/nowhere.yaml: cannot be opened"), "{error}");
}

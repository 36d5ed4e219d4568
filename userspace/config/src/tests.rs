use std::{
    collections::BTreeMap, fs::Permissions, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration,
};

use super::{enforcement::DeclaredGuarantee, *};

fn with_file(text: &str, variables: &[(&str, &str)], flags: Vec<Flag>) -> Result<LoadedConfig, Vec<String>> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let prefix = format!("{}/", dir.path().display());
    load(&Sources { file: Some(file), variables, flags, node: None })
        .map_err(|problems| problems.0.iter().map(|p| p.to_string().replace(&prefix, "")).collect())
}

#[test]
fn empty_file_gives_defaults() {
    for text in ["", "# only a comment\n", "---\n", "probes:\nlog:\n"] {
        assert_eq!(with_file(text, &[], vec![]).unwrap().config, Config::default(), "{text:?}");
    }
}

#[test]
fn flags_override_variables_and_file() {
    let file = "listen: 127.0.0.1:1\nlog: {level: warn, format: json}\nprobes: {slots: 7, allocation: {enabled: true}}";
    let variables = [
        ("NUMAWARD_LISTEN", "127.0.0.1:2"),
        ("NUMAWARD_LOG_LEVEL", "error"),
        ("NUMAWARD_PROBES_ALLOCATION_ENABLED", "false"),
        ("NUMAWARD_HOST_ROOT", "/host"),
        ("NUMAWARD_OBSERVE_KEEP_REMOVED", "1m30s"),
        ("HOME", "/x"),
    ];
    let flags = vec![Flag { name: "--listen", key: "listen", value: "[::1]:3".to_owned() }];
    let loaded = with_file(file, &variables, flags).unwrap();
    let expected = Config {
        listen: "[::1]:3".parse().unwrap(),
        log: Log { level: LogLevel::Error, format: LogFormat::Json },
        probes: Probes {
            slots: 7,
            allocation: AllocationProbe { enabled: false, ..AllocationProbe::default() },
            ..Probes::default()
        },
        observe: Observe { keep_removed: Interval(Duration::from_secs(90)), ..Observe::default() },
        host_root: PathBuf::from("/host"),
        ..Config::default()
    };
    assert_eq!(loaded.config, expected);
    assert_eq!(loaded.warnings, Vec::<String>::new());
}

#[test]
fn readable_file_with_secrets_warns() {
    let secrets = "otlp: {endpoint: 'http://c:4318/?key=s3cret', headers: {authorization: Bearer s3cret}}";
    let warnings = |text: &str, mode: u32, variables: &[(&str, &str)]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).unwrap();
        let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let file = Some(file.path().to_owned());
        load(&Sources { file, variables, ..Sources::default() }).unwrap().warnings
    };
    let found = warnings(secrets, 0o644, &[]);
    assert!(found.len() == 1 && found[0].contains("mode 0644"), "{found:?}");
    assert!(found[0].contains("otlp.headers, otlp.endpoint") && !found[0].contains("s3cret"), "{found:?}");
    assert_eq!(warnings(secrets, 0o640, &[]), [""; 0]);
    assert_eq!(warnings("otlp: {endpoint: 'http://c:4318'}", 0o644, &[]), [""; 0]);
    let variables = [("NUMAWARD_ALERTS_WEBHOOK", "https://hooks.example/s3cret")];
    assert_eq!(warnings("", 0o644, &variables), [""; 0], "a variable is no file");
}

#[test]
fn files_of_group_and_node_override_the_first_one() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    place("config.yaml", "log: {level: warn, format: json}\nprobes: {slots: 7}\nlisten: 127.0.0.1:1\n");
    place("group.gpu.yaml", "log:\n  level: error\nprobes: {slots: 9}\nlisten:\n");
    place("group.other.yaml", "probes: {slots: 11}\n");
    place("node.a.yaml", "# comment\nprobes: {slots: 10}\n");
    let load_as = |node: Option<NodeScope>, variables: &[(&str, &str)]| {
        let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let file = Some(dir.path().join("config.yaml"));
        load(&Sources { file, node, variables, flags: vec![] }).unwrap()
    };
    let node = |name: &str, group: Option<&str>| {
        Some(NodeScope { name: name.to_owned(), group: group.map(str::to_owned) })
    };
    let state = ("NUMAWARD_STATE_DIRECTORY", dir.path().to_str().unwrap());

    let base = load_as(None, &[state]);
    assert_eq!((base.config.probes.slots, base.config.log.level), (7, LogLevel::Warn));
    assert!(base.has_scoped_files && base.node.is_none() && base.files.len() == 1);
    let scoped = load_as(node("a", Some("gpu")), &[state]);
    assert_eq!((scoped.config.probes.slots, scoped.config.log.level), (10, LogLevel::Error));
    assert_eq!(scoped.config.log.format, LogFormat::Json, "mappings are merged");
    assert_eq!(scoped.config.listen, Config::default().listen, "a key without a value has its default");
    assert_eq!(load_as(node("b", None), &[state]).config.probes.slots, 7);
    let variables = [state, ("NUMAWARD_PROBES_SLOTS", "12")];
    assert_eq!(load_as(node("a", Some("gpu")), &variables).config.probes.slots, 12);

    // A group that has no file, and one that is no name of a file.
    let warnings = load_as(node("b", Some("gpus")), &[state]).warnings;
    assert!(
        warnings.len() == 1
            && warnings[0].contains("there is no file")
            && warnings[0].contains("group.gpus.yaml")
    );
    assert_eq!(load_as(node("../a", Some("../group.gpu")), &[state]).config.probes.slots, 7);

    // Commands find the node in the state directory of the daemon.
    place("node.json", "{\"name\": \"a\", \"group\": \"gpu\"}");
    assert_eq!(load_as(None, &[state]).config.probes.slots, 10);

    let prefix = format!("{}/", dir.path().display());
    let yaml = scoped.yaml_with_origins().unwrap().replace(&prefix, "");
    for line in [
        "  level: error  # group.gpu.yaml:2:10",
        "  format: json  # config.yaml:1:28",
        "  slots: 10  # node.a.yaml:2:17",
        "listen: 127.0.0.1:9560  # group.gpu.yaml:4:1",
        "strategy: native  # default",
    ] {
        assert!(yaml.lines().any(|found| found == line), "{line}: {yaml}");
    }
    assert_eq!(scoped.sourced_values().unwrap().iter().filter(|value| value.origin.is_some()).count(), 5);
    let changed: Vec<_> = scoped.changed_keys(&base).unwrap().iter().map(ToString::to_string).collect();
    let changed: Vec<_> = changed.iter().map(|key| key.replace(&prefix, "")).collect();
    let expected =
        ["listen (group.gpu.yaml:4:1)", "log.level (group.gpu.yaml:2:10)", "probes.slots (node.a.yaml:2:17)"];
    assert_eq!(changed, expected);

    // An error names its file.
    place("node.a.yaml", "probes: {slots: 0}\n");
    let file = Some(dir.path().join("config.yaml"));
    let problems = load(&Sources { file, node: node("a", None), ..Sources::default() }).unwrap_err();
    assert!(problems.to_string().contains("node.a.yaml:1:17"), "{problems}");
}

/// A directory with configuration files that only their owner can change, whatever the umask of the test.
struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for name in ["conf.d", "guarantees.d"] {
            let path = folder.0.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        }
        folder.place("config.yaml", "");
        folder
    }

    fn place(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    }

    fn load(&self) -> Result<LoadedConfig, Problems> {
        load(&Sources { file: Some(self.0.path().join("config.yaml")), ..Sources::default() })
    }

    fn errors(&self) -> Vec<String> {
        let problems = self.load().unwrap_err().0;
        problems.iter().map(|problem| self.short(&problem.to_string())).collect()
    }

    fn short(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.0.path().display()), "")
    }
}

#[test]
fn drop_in_files_are_merged_in_byte_order() {
    let folder = TestFolder::new();
    folder.place(
        "config.yaml",
        "probes: {slots: 7}\nlog: {level: warn}\nguarantees:\n- {unit: a.service, cpus: 1}\n",
    );
    folder.place("conf.d/9.yaml", "probes: {slots: 9}\nguardExempt: [/a/**]\n");
    folder.place("conf.d/10.yaml", "probes: {slots: 10}\nlog: {format: json}\nguardExempt: [/b/**, /c/**]\n");
    folder.place("conf.d/B.yaml", "log: {level: error}\n");
    folder.place("conf.d/.hidden.yaml", "nonsense");
    folder.place("conf.d/9.yaml.dpkg-new", "nonsense");
    folder.place("conf.d/late.yml", "nonsense");
    folder.place(
        "guarantees.d/b.yaml",
        "guarantees:\n- unit: b*.service\n  memory: 1Gi\n- cgroup: /b\n  cpus: 2\n",
    );
    folder.place("guarantees.d/a.yaml", "# of a tool\nguarantees: [{unit: c.service, cpus: 3}]\n");
    folder.place("guarantees.d/empty.yaml", "guarantees:\n");
    let loaded = folder.load().unwrap();
    let config = &loaded.config;
    assert_eq!(
        (config.probes.slots, config.log.level, config.log.format),
        (9, LogLevel::Error, LogFormat::Json)
    );
    assert_eq!(config.guard_exempt.iter().map(ToString::to_string).collect::<Vec<_>>(), ["/a/**"]);
    let patterns: Vec<_> = config.guarantees.iter().map(DeclaredGuarantee::pattern).collect();
    assert_eq!(patterns, ["a.service", "c.service", "b*.service", "/b"]);
    let files: Vec<_> = loaded.files.iter().map(|file| folder.short(&file.display().to_string())).collect();
    let expected = [
        "config.yaml",
        "conf.d/10.yaml",
        "conf.d/9.yaml",
        "conf.d/B.yaml",
        "guarantees.d/a.yaml",
        "guarantees.d/b.yaml",
        "guarantees.d/empty.yaml",
    ];
    assert_eq!(files, expected);
    let warnings: Vec<_> = loaded.warnings.iter().map(|warning| folder.short(warning)).collect();
    assert_eq!(warnings, ["conf.d/late.yml: has no effect: a name has to end in .yaml"]);

    let yaml = folder.short(&loaded.yaml_with_origins().unwrap());
    for line in [
        "  slots: 9  # conf.d/9.yaml:1:17",
        "  format: json  # conf.d/10.yaml:2:15",
        "  - cpus: 1  # config.yaml:4:3",
        "  - cpus: 3  # guarantees.d/a.yaml:2:14",
        "  - memory: 1Gi  # guarantees.d/b.yaml:2:3",
        "  - cgroup: /b  # guarantees.d/b.yaml:4:3",
    ] {
        assert!(yaml.lines().any(|found| found == line), "{line}: {yaml}");
    }
    let values = loaded.sourced_values().unwrap();
    let guarantees = values.iter().find(|value| value.key == "guarantees").unwrap();
    assert_eq!(guarantees.elements.len(), 4);

    // Without a list in the configuration file, the first file makes one.
    folder.place("config.yaml", "guarantees:\n");
    let fewer = folder.load().unwrap();
    assert_eq!(fewer.config.guarantees.len(), 3);
    let changed = loaded.changed_keys(&fewer).unwrap();
    let changed: Vec<_> = changed.iter().map(|key| folder.short(&key.to_string())).collect();
    assert_eq!(changed, ["guarantees (config.yaml:4:3)", "log.level (conf.d/B.yaml:1:14)"][..1]);
    folder.place("guarantees.d/b.yaml", "guarantees:\n- {unit: b*.service, memory: 2Gi}\n");
    let changed = folder.load().unwrap().changed_keys(&fewer).unwrap();
    assert_eq!(folder.short(&changed[0].to_string()), "guarantees (guarantees.d/b.yaml:2:3)");
}

#[test]
fn errors_of_drop_in_files_name_them() {
    let folder = TestFolder::new();
    folder.place("config.yaml", "guarantees:\n- {unit: a.service, cpus: 1}\n");
    folder.place("conf.d/a.yaml", "strategie: native\nguarantees: []\n");
    folder.place("conf.d/b.yaml", "- x\n");
    folder.place("guarantees.d/a.yaml", "guarantees:\n- unit: a.service\n  cpus: 1\n- unit: x.service\n");
    folder.place("guarantees.d/b.yaml", "probes: {slots: 9}\nguarantees: {}\n");
    folder.place("guarantees.d/c.yaml", "guarantees:\n- unit: b.service\n  cpus: [\n");
    assert_eq!(
        folder.errors(),
        [
            "conf.d/a.yaml:1:1: unknown key \"strategie\"; did you mean \"strategy\"?",
            "conf.d/a.yaml:2:1: guarantees: not in conf.d: put them into a file of guarantees.d beside it",
            "conf.d/b.yaml:1:1: expected keys and values, such as \"listen: 127.0.0.1:9560\"",
            "guarantees.d/a.yaml:2:9: guarantees.0.unit: \"a.service\" already has a guarantee, at config.yaml:2:10",
            "guarantees.d/a.yaml:4:3: guarantees.1: give memory, or whole CPUs in cpus",
            "guarantees.d/b.yaml:1:1: the key \"probes\" is not allowed in guarantees.d, whose files have the key \
             \"guarantees\" only: put it into a file of conf.d beside it",
            "guarantees.d/b.yaml:2:13: guarantees: expected a list, such as \"- unit: db.service\"",
            "guarantees.d/c.yaml:3:9: guarantees.0.cpus: invalid type: sequence, expected a number of CPUs such as 2, 1.5 or 500m",
            "guarantees.d/c.yaml:4:1: not valid YAML: while parsing a node, did not find expected node content",
        ]
    );
}

#[test]
fn drop_in_files_are_protected_and_limited() {
    let folder = TestFolder::new();
    let set_mode = |name: &str, mode: u32| {
        std::fs::set_permissions(folder.0.path().join(name), Permissions::from_mode(mode)).unwrap();
    };
    folder.place("conf.d/a.yaml", "probes: {slots: 9}\n");
    set_mode("conf.d/a.yaml", 0o664);
    assert_eq!(
        folder.errors(),
        ["conf.d/a.yaml: cannot be read: its mode is 0664, so that other users can change it: chmod go-w"]
    );
    set_mode("conf.d/a.yaml", 0o644);
    set_mode("conf.d", 0o777);
    assert!(
        folder.errors()[0].starts_with("conf.d: cannot be read: its mode is 0777"),
        "{:?}",
        folder.errors()
    );
    set_mode("conf.d", 0o755);
    folder.load().unwrap();

    folder.place("conf.d/b.yaml", &format!("# {}\n", "x".repeat(1 << 20)));
    let errors = folder.errors();
    assert!(
        errors.len() == 1 && errors[0].starts_with("conf.d/b.yaml: cannot be read: it has more"),
        "{errors:?}"
    );
    assert!(errors[0].ends_with("the files of a folder may have 1048576 bytes together"), "{errors:?}");
    folder.place("conf.d/b.yaml", "");
    std::fs::create_dir(folder.0.path().join("conf.d/c.yaml")).unwrap();
    set_mode("conf.d/c.yaml", 0o755);
    assert_eq!(folder.errors(), ["conf.d/c.yaml: cannot be read: it is not a regular file"]);
    std::fs::remove_dir(folder.0.path().join("conf.d/c.yaml")).unwrap();
    for number in 0..255 {
        folder.place(&format!("guarantees.d/{number}.yaml"), "");
    }
    folder.load().unwrap();
    folder.place("guarantees.d/255.yaml", "");
    folder.place("guarantees.d/256.yaml", "");
    assert_eq!(
        folder.errors(),
        ["guarantees.d: cannot be read: it has 257 files, and may have 256: put several into one"]
    );
}

#[test]
fn sockets_in_one_directory_warn() {
    let warnings = |socket: &str| {
        let file = format!("kubernetes: {{podResources: {{socket: {socket}}}}}");
        with_file(&file, &[], vec![]).unwrap().warnings
    };
    let found = warnings("/run/numaward/pod-resources.sock");
    assert!(found.len() == 1 && found[0].contains("the directory of the control socket"), "{found:?}");
    assert_eq!(warnings("/run/kubelet.sock").len(), 1, "a mount of /run includes /run/numaward");
    assert_eq!(warnings("/run/numaward/pod-resources/kubelet.sock"), [""; 0]);
}

#[test]
fn parses_duty_cycles() {
    let cycle = "5s/1m".parse::<DutyCycle>().unwrap();
    assert_eq!((cycle.on.0, cycle.period.0), (Duration::from_secs(5), Duration::from_mins(1)));
    assert_eq!(" 5s / 60s ".parse::<DutyCycle>().unwrap().to_string(), "5s/1m");
    for (text, error) in [
        ("5s", "\"5s\" is not a duty cycle such as 5s/60s"),
        ("5s/", "such as 5s/60s (5 seconds of each minute): \"\" is not a duration"),
        ("0s/60s", "a duration must be above zero"),
        ("100ms/1s", "100ms is too short; the least is 1s"),
        ("60s/60s", "1m is not shorter than 1m; remove the key"),
        ("61s/60s", "1m1s is not shorter than 1m"),
    ] {
        let found = text.parse::<DutyCycle>().unwrap_err();
        assert!(found.contains(error), "{found}");
    }
    let loaded = with_file("probes: {allocation: {dutyCycle: 5s/60s}}", &[], Vec::new()).unwrap();
    assert_eq!(loaded.config.probes.allocation.duty_cycle, Some(cycle));
}

#[test]
fn reports_all_errors_with_place() {
    let file = "\
lisen: 127.0.0.1:9560
log:
  level: loud
  debugLog: true
probes:
  slots: 0
  allocation: {enabled: yes, color: red}
observe:
  residencyInterval: 10
hostRoot: [a]
";
    let variables = [("NUMAWARD_OBSERVE_KEEP_REMOVED", "soon"), ("NUMAWARD_PROBES_SLOTS", "70000")];
    let flags = vec![Flag { name: "--listen", key: "listen", value: "localhost".to_owned() }];
    assert_eq!(
        with_file(file, &variables, flags).unwrap_err(),
        [
            "config.yaml:1:1: unknown key \"lisen\"; did you mean \"listen\"?",
            "config.yaml:3:10: log.level: unknown variant `loud`, expected one of `error`, `warn`, `info`, `debug`, `trace`",
            "config.yaml:4:3: unknown key \"debugLog\" in \"log\"; did you mean \"probes.allocation.debugLog\"?",
            "config.yaml:7:25: probes.allocation.enabled: invalid type: string \"yes\", expected a boolean",
            "config.yaml:7:30: unknown key \"color\" in \"probes.allocation\"; known keys are debugLog, dutyCycle, enabled",
            "config.yaml:9:22: observe.residencyInterval: invalid type: integer `10`, expected a string",
            "config.yaml:10:11: hostRoot: invalid type: sequence, expected path string",
            "variable NUMAWARD_OBSERVE_KEEP_REMOVED: observe.keepRemoved: \"soon\" is not a duration such as 10s or \
             1m30s: expected number at 0",
            "variable NUMAWARD_PROBES_SLOTS: probes.slots: 70000 is not between 1 and 16384",
            "flag --listen: listen: \"localhost\" is not an address and port (write it like 127.0.0.1:9560, \
             0.0.0.0:9560 or [::]:9560)",
        ]
    );
}

#[test]
fn syntax_error_hides_no_other_error() {
    let errors = with_file("lisen: x\nlog: {level: [", &[("NUMAWARD_LISTEN", "x")], vec![]).unwrap_err();
    assert_eq!(errors.len(), 4, "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("not valid YAML")), "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("\"lisen\"")), "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("NUMAWARD_LISTEN")), "{errors:?}");
}

#[test]
fn refuses_file_without_mapping() {
    for text in ["- a\n- b\n", "just words\n", "42\n"] {
        let errors = with_file(text, &[], vec![]).unwrap_err();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].starts_with("config.yaml:1:1: expected keys and values"), "{errors:?}");
    }
}

#[test]
fn named_file_must_exist() {
    for file in ["/nonexistent/config.yaml", "/"] {
        let sources = Sources { file: Some(PathBuf::from(file)), ..Sources::default() };
        let error = load(&sources).unwrap_err().to_string();
        assert!(error.contains(&format!("{file}: cannot be read")), "{error}");
    }
    let variables = BTreeMap::from([(FILE_VARIABLE.to_owned(), "/nonexistent.yaml".to_owned())]);
    assert!(load(&Sources { variables, ..Sources::default() }).is_err());
}

#[test]
fn unknown_variable_is_a_warning() {
    let loaded =
        with_file("", &[("NUMAWARD_LOGLEVEL", "info"), ("NUMAWARD_SERVICE_HOST", "10.0.0.1")], vec![])
            .unwrap();
    assert_eq!(
        loaded.warnings,
        [
            "variable NUMAWARD_LOGLEVEL has no effect; did you mean NUMAWARD_LOG_LEVEL?",
            "variable NUMAWARD_SERVICE_HOST has no effect",
        ]
    );
}

#[test]
fn refuses_incomplete_credentials() {
    let text = "listen: 0.0.0.0:1\nlistenTokenFile: /t\nlistenTls:\n  certFile: /c\n  clientCaFile: /a\n  clientNames: []\n";
    let problems = with_file(text, &[], vec![]).unwrap_err();
    let expected = [
        "config.yaml:4:13: listenTls.certFile: needs listenTls.keyFile, which is not given",
        "config.yaml:6:16: listenTls.clientNames: is empty: no client would be accepted",
    ];
    assert_eq!(problems, expected);
    for text in [
        "listenTokenFile: /t",
        "listen: 0.0.0.0:1\nlistenTokenFile: /t\nlistenTls: {certFile: /c, keyFile: /k}",
    ] {
        assert_eq!(with_file(text, &[], vec![]).unwrap().warnings, [""; 0], "{text}");
    }
    let problems = with_file("listen: 0.0.0.0:1\nlistenTokenFile: /t", &[], vec![]).unwrap_err();
    assert!(
        problems[0].starts_with("config.yaml:2:18: listenTokenFile: the token would cross the network"),
        "{problems:?}"
    );
    let problems = with_file("listenTls: {certFile: /c, keyFile: /k, clientCrlFile: /r}", &[], vec![]);
    assert!(problems.unwrap_err()[0].contains("listenTls.clientCrlFile: needs listenTls.clientCaFile"));
}

#[test]
fn refuses_unprotected_control_address() {
    let table: &[(&str, &[&str])] = &[
        ("control: {listen: '127.0.0.1:1', tokenFile: /t}", &[]),
        ("control: {listen: '[::1]:1', tokenFile: /t}", &[]),
        ("control: {listen: '10.0.0.1:1', tokenFile: /t, allowUnencrypted: true}", &[]),
        ("control: {listen: '0.0.0.0:1', tokenFile: /t, tls: {certFile: /c, keyFile: /k}}", &[]),
        ("control: {listen: '0.0.0.0:1', tls: {certFile: /c, keyFile: /k, clientCaFile: /a}}", &[]),
        (
            "control: {listen: '127.0.0.1:1'}",
            &["config.yaml:1:19: control.listen: anyone who reaches this address could change allocations"],
        ),
        (
            "control: {listen: '0.0.0.0:1', tokenFile: /t}",
            &["config.yaml:1:19: control.listen: the token would cross the network to 0.0.0.0:1 unencrypted"],
        ),
        (
            "control:\n  listen: 127.0.0.1:1\n  tls: {certFile: /c, clientCaFile: /a}",
            &["config.yaml:3:19: control.tls.certFile: needs control.tls.keyFile"],
        ),
        (
            "control: {tls: {clientCaFile: /a, clientNames: []}}",
            &[
                "config.yaml:1:31: control.tls.clientCaFile: needs control.tls.certFile",
                "config.yaml:1:48: control.tls.clientNames: is empty",
            ],
        ),
        (
            "listen: 127.0.0.1:1\ncontrol: {listen: '127.0.0.1:1', tokenFile: /t}",
            &["config.yaml:2:19: control.listen: 127.0.0.1:1 is also the address of \"listen\""],
        ),
    ];
    for (text, expected) in table {
        let errors =
            with_file(text, &[], vec![]).map(|loaded| assert_eq!(loaded.warnings, [""; 0], "{text}"));
        let errors = errors.err().unwrap_or_default();
        assert_eq!(errors.len(), expected.len(), "{text}: {errors:?}");
        for (error, expected) in errors.iter().zip(*expected) {
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
    let variables = [("NUMAWARD_CONTROL_LISTEN", "0.0.0.0:1"), ("NUMAWARD_CONTROL_TOKEN_FILE", "/t")];
    let error = with_file("", &variables, vec![]).unwrap_err();
    assert!(error[0].starts_with("variable NUMAWARD_CONTROL_LISTEN: control.listen: "), "{error:?}");
    let loaded = with_file("control: {tokenFile: /t}", &[("NUMAWARD_SERVER", "x")], vec![]).unwrap();
    assert_eq!(loaded.warnings, ["control has no effect without control.listen"]);
}

/// Checks that the defaults fit the schema, that every key has a description, and that the schema has exactly the keys
/// of the defaults.
#[test]
fn defaults_fit_schema() {
    use serde_json::Value;

    /// Checks a value against the subset of JSON schema that the generator uses.
    fn fits(schema: &Value, value: &Value) -> bool {
        if let Some(choices) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
            return choices.iter().any(|choice| fits(choice, value));
        }
        if let Some(choices) = schema["enum"].as_array() {
            return choices.contains(value);
        }
        if let Some(constant) = schema.get("const") {
            return constant == value;
        }
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        match &schema["type"] {
            Value::String(only) => only == kind,
            Value::Array(several) => several.contains(&kind.into()),
            _ => false,
        }
    }

    fn check(schema: &Value, value: &Value, path: &str) {
        assert!(fits(schema, value), "{path}: {value} does not fit {schema}");
        let Some(properties) = schema["properties"].as_object() else { return };
        assert_eq!(schema["additionalProperties"], false, "{path}");
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(properties.keys().collect::<Vec<_>>(), keys, "{path}");
        for (key, schema) in properties {
            let choices = schema["oneOf"].as_array().or_else(|| schema["anyOf"].as_array());
            let described = schema["description"].is_string() || choices.is_some();
            assert!(described, "{path}.{key} has no description");
            check(schema, &value[key], &format!("{path}.{key}"));
        }
    }

    check(&json_schema(), &serde_json::to_value(Config::default()).unwrap(), "");
    let mut unfit = serde_json::to_value(Config::default()).unwrap();
    unfit["log"]["level"] = "loud".into();
    assert!(!fits(&json_schema()["properties"]["log"]["properties"]["level"], &unfit["log"]["level"]));
}

#[test]
fn reads_enforcement_and_guarantees() {
    use numaward_api::EnforcementMode;
    let file = "\
enforcement:
  mode: on
  herding: {mode: dry-run, systemSlices: [/init.scope, /system.slice/sshd.service]}
guarantees:
- unit: db@*.service
  cpus: 4
  memory: 8Gi
  hugepages: {2Mi: 64Mi}
  policy: single-numa-node
  partition: isolated
- {cgroup: /batch/*, cpus: 1, memory: 1073741824}
- {cgroup: /web/*, cpus: 500m, memory: 1Gi, placement: {with: [db], memoryTiers: [dram], preferredNodes: 0-1}}
- {cgroup: /cache/*, memory: 1Gi, memoryLimit: 2Gi, placement: {burstable: true}}
- {cgroup: /spin/*, cpus: 2}
";
    let config = with_file(file, &[], vec![]).unwrap().config;
    assert_eq!(
        (config.enforcement.mode, config.enforcement.herding.mode),
        (EnforcementMode::On, EnforcementMode::DryRun)
    );
    let patterns: Vec<_> = config.guarantees.iter().map(DeclaredGuarantee::pattern).collect();
    assert_eq!(patterns, ["db@*.service", "/batch/*", "/web/*", "/cache/*", "/spin/*"]);
    let cpus: Vec<_> = config.guarantees.iter().map(|of| of.cpus.map(|cpus| cpus.to_string())).collect();
    assert_eq!(cpus, [Some("4"), Some("1"), Some("0.5"), None, Some("2")].map(|of| of.map(str::to_owned)));
    assert_eq!(config.guarantees[4].memory, None);
    assert!(config.guarantees[2].placement.with.contains("db") && config.guarantees[3].placement.burstable);
    assert_eq!(config.guarantees[1].memory.unwrap().0, numaward_topology::Bytes::gib(1));
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
    // Tools that follow YAML 1.1 write booleans.
    let config = with_file("enforcement: {mode: false, herding: {mode: true}}", &[], vec![]).unwrap().config;
    assert_eq!(
        (config.enforcement.mode, config.enforcement.herding.mode),
        (EnforcementMode::Off, EnforcementMode::On)
    );
    let variables = [("NUMAWARD_ENFORCEMENT_MODE", "dry-run")];
    assert_eq!(with_file("", &variables, vec![]).unwrap().config.enforcement.mode, EnforcementMode::DryRun);
}

#[test]
fn invalid_guarantee_names_line_and_key() {
    let file = "\
enforcement:
  mode: maybe
  herding: {systemSlices: [init.scope]}
guarantees:
- {unit: a.timer, cpus: 1, memory: 1Gi}
- {cgroup: /a, cpu: 1, memory: 1Gi}
- cgroup: /b
  cpus: 0
  memory: none
- {cgroup: /c, unit: c.service, cpus: 1, memory: 0}
- cpus: 1
  memory: 1Gi
  hugepages: {2Mi: 3Mi, 7X: 1Mi}
- {cgroup: \"/d/[\", cpus: 1, memory: 1Gi, partition: alone}
- {cgroup: /e, cpus: 1, memory: 1Gi, hugepages: {2Mi: 3Mi}}
- {cgroup: /e, cpus: 1, memory: 1Gi}
- {cpus: 1, memory: 1Gi}
- {unit: f.service, cgroup: /f, cpus: 1, memory: 1Gi}
- {cgroup: /g, cpus: 500m}
";
    let found = with_file(file, &[], vec![]).unwrap_err();
    let expected = [
        "2:9: enforcement.mode: unknown variant `maybe`, expected one of `off`, `dry-run`, `on`",
        "3:28: enforcement.herding.systemSlices.0: \"init.scope\" is not the path of a cgroup; expected the path of",
        "5:10: guarantees.0.unit: \"a.timer\" is not the name of a unit with a cgroup; expected a name",
        "6:16: unknown key \"cpu\" in \"guarantees.1\"; did you mean \"cpus\"?",
        "8:9: guarantees.2.cpus: 0 is not between 0.001 and 65536",
        "9:11: guarantees.2.memory: \"none\" is not a quantity",
        "10:12: guarantees.3.cgroup: a unit is given as well: give only one of the two",
        "10:50: guarantees.3.memory: it is 0; expected a number of bytes above 0, such as 256Mi or 8Gi",
        "11:3: guarantees.4: give unit or cgroup",
        "13:20: guarantees.4.hugepages.2Mi: 3Mi is not a whole number of pages of 2Mi",
        "13:29: guarantees.4.hugepages.7X: \"7X\" is not a page size (expected one such as 2Mi or 1Gi)",
        "14:12: guarantees.5.cgroup: \"/d/[\" is not a pattern: invalid range pattern (at character 4)",
        "14:53: guarantees.5.partition: unknown variant `alone`, expected one of `member`, `root`, `isolated`",
        "15:55: guarantees.6.hugepages.2Mi: 3Mi is not a whole number of pages of 2Mi",
        "16:12: guarantees.7.cgroup: \"/e\" already has a guarantee, at ",
        "17:3: guarantees.8: give unit or cgroup",
        "18:29: guarantees.9.cgroup: a unit is given as well: give only one of the two",
        "19:3: guarantees.10: give memory, or whole CPUs in cpus",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(&format!("config.yaml:{expected}")), "{found}");
    }
}

#[test]
fn invalid_class_names_line_and_key() {
    let file = "\
resctrl:
  monitor: all
  classes:
    batch: {l3Ways: 0, memoryBandwidthPercent: 101}
    db: {l3Way: 4}
    Web: {l3Ways: 4}
";
    let found = with_file(file, &[], vec![]).unwrap_err();
    let expected = [
        "2:12: resctrl.monitor: unknown variant `all`, expected `off` or `guaranteed`",
        "4:21: resctrl.classes.batch.l3Ways: 0 is not between 1 and 32",
        "4:48: resctrl.classes.batch.memoryBandwidthPercent: 101 is not between 1 and 100",
        "5:10: unknown key \"l3Way\" in \"resctrl.classes.db\"; did you mean \"l3Ways\"?",
        "6:10: resctrl.classes.Web: \"Web\" is not a class name; expected up to 32 lower-case letters",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(&format!("config.yaml:{expected}")), "{found}");
    }
    let file = "\
resctrl: {root: sys, classes: {a: {l3Percent: 60}, b: {l3Percent: 41}}}
guarantees: [{unit: a.service, memory: 1Gi, placement: {resctrlClass: c}}]
";
    let found = with_file(file, &[], vec![]).unwrap_err();
    let expected = [
        "1:17: resctrl.root: \"sys\" does not begin with a slash",
        "1:67: resctrl.classes.b.l3Percent: with the classes before it, 101 % of the ways, more than 100 %",
        "2:71: guarantees.0.placement.resctrlClass: there is no class \"c\"; resctrl.classes in the",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(&format!("config.yaml:{expected}")), "{found}");
    }
    let file = "resctrl: {monitor: guaranteed, classes: {db: {l3Ways: 4}}}\nhostRoot: /host";
    let config = with_file(file, &[], vec![]).unwrap().config;
    assert_eq!(config.resctrl_root(), PathBuf::from("/host/sys/fs/resctrl"));
    assert!(config.enabled_resctrl().is_some() && Config::default().enabled_resctrl().is_none());
}

/// A part of a `KubeletConfiguration`, which the test compares with the kubelet's flags.
const KUBELET_CONFIGURATION: &str = "\
kubeReserved: {cpu: 500m, memory: 1Gi, ephemeral-storage: 1Gi, pid: '1000'}
systemReserved: {memory: 1Gi}
evictionHard: {memory.available: 5%, nodefs.available: 10%, imagefs.inodesFree: 5%, pid.available: '1000'}
reservedMemory:
- numaNode: 0
  limits: {memory: 1Gi, hugepages-2Mi: 100Mi}
- numaNode: 1
  limits: {memory: 1Gi}
cpuManagerPolicyOptions: {full-pcpus-only: 'true', align-by-socket: 'true'}
topologyManagerPolicyOptions: {prefer-closest-numa-nodes: 'true'}
featureGates: {CPUManagerPolicyAlphaOptions: true, MemoryQoS: false}
";

#[test]
fn kubelet_flags_equal_its_file() {
    let variables = [
        ("NUMAWARD_KUBE_RESERVED", "cpu=500m,memory=1Gi,ephemeral-storage=1Gi,pid=1000"),
        ("NUMAWARD_SYSTEM_RESERVED", "memory=1Gi"),
        (
            "NUMAWARD_EVICTION_HARD",
            "memory.available<5%,nodefs.available<10%,imagefs.inodesFree<5%,pid.available<1000",
        ),
        ("NUMAWARD_RESERVED_MEMORY", "0:memory=1Gi,hugepages-2Mi=100Mi;1:memory=1Gi"),
        ("NUMAWARD_CPU_MANAGER_POLICY_OPTIONS", "full-pcpus-only=true,align-by-socket=true"),
        ("NUMAWARD_TOPOLOGY_MANAGER_POLICY_OPTIONS", "prefer-closest-numa-nodes=true"),
        ("NUMAWARD_FEATURE_GATES", "CPUManagerPolicyAlphaOptions=true,MemoryQoS=false"),
    ];
    let from_file = with_file(KUBELET_CONFIGURATION, &[], vec![]).unwrap().config;
    assert_eq!(with_file("", &variables, vec![]).unwrap().config, from_file);
    // A variable replaces the complete value of the file.
    let file = "kubeReserved: {memory: 7Gi, hugepages-1Gi: 1Gi}";
    assert_eq!(with_file(file, &variables, vec![]).unwrap().config, from_file);
    let text = serde_json::to_string(&from_file).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), from_file);
    let empty = with_file(KUBELET_CONFIGURATION, &[("NUMAWARD_EVICTION_HARD", "")], vec![]).unwrap().config;
    assert_eq!(empty.eviction_hard, Some(BTreeMap::new()));
    // A variable with feature gates sets only those that it names.
    let merged = with_file(KUBELET_CONFIGURATION, &[("NUMAWARD_FEATURE_GATES", "MemoryQoS=true")], vec![])
        .unwrap()
        .config;
    let gates: Vec<_> = merged.feature_gates.iter().map(|(name, is_on)| format!("{name}={is_on}")).collect();
    assert_eq!(gates, ["CPUManagerPolicyAlphaOptions=true", "MemoryQoS=true"]);
}

#[test]
fn invalid_reservation_names_its_place() {
    let file = "\
evictionHard:
  memory.available: 101%
  nodefs.available: 0
  imagefs.available: [5%]
  memory.avail: 5%
";
    let variables = [
        ("NUMAWARD_KUBE_RESERVED", "cpu=500m,memory"),
        ("NUMAWARD_SYSTEM_RESERVED", "memory=lots"),
        ("NUMAWARD_RESERVED_MEMORY", "0:memory=1Gi;disk=1Gi"),
    ];
    let found = with_file(file, &variables, vec![]).unwrap_err();
    let expected = [
        "config.yaml:2:21: evictionHard.memory.available: \"101%\" is not a percentage from 0% to 100%",
        "config.yaml:3:21: evictionHard.nodefs.available: a threshold must be above 0",
        "config.yaml:4:22: evictionHard.imagefs.available: expected an amount such as 100Mi, or a percentage such as 5%",
        "config.yaml:5:17: evictionHard.memory.avail: unsupported eviction signal memory.avail (known are",
        "variable NUMAWARD_KUBE_RESERVED: kubeReserved: \"memory\" has no '='",
        "variable NUMAWARD_RESERVED_MEMORY: reservedMemory: \"disk=1Gi\" is not a node with its reservation",
        "variable NUMAWARD_SYSTEM_RESERVED: systemReserved.memory: \"lots\" is not a quantity",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn checks_feature_gates_like_kubelet() {
    let errors = |file: &str| with_file(file, &[], vec![]).map(|loaded| loaded.warnings).unwrap_err();
    for (file, error) in [
        (
            "featureGates: {MemoryManager: false}",
            "1:31: featureGates.MemoryManager: cannot set feature gate MemoryManager to false, feature is locked to true",
        ),
        (
            "kubeletVersion: '1.32'\nfeatureGates: {PodLevelResourceManagers: false}",
            "2:42: featureGates.PodLevelResourceManagers: unrecognized feature gate: PodLevelResourceManagers",
        ),
        (
            "featureGates: {CPUManagerPolicyAlphaOption: true}",
            "1:45: featureGates.CPUManagerPolicyAlphaOption: unrecognized feature gate: CPUManagerPolicyAlphaOption (did \
             you mean \"CPUManagerPolicyAlphaOptions\"?)",
        ),
        (
            "featureGates: {MemoryQoS: 'yes'}",
            "1:27: featureGates.MemoryQoS: invalid type: string \"yes\", expected a boolean",
        ),
        (
            "kubeletVersion: 1.32\nfeatureGates: {CPUManagerPolicyOptions: false}\n\
             cpuManagerPolicyOptions: {full-pcpus-only: 'true'}",
            "3:26: cpuManagerPolicyOptions: CPU Manager policy options map[full-pcpus-only:true] require feature gates \
             \"CPUManager\", \"CPUManagerPolicyOptions\" enabled",
        ),
        (
            "featureGates: {MemoryQoS: false}\nmemoryReservationPolicy: TieredReservation",
            "2:26: memoryReservationPolicy: TieredReservation needs the feature gate MemoryQoS, which is off",
        ),
        (
            "featureGates: {PodLevelResources: false, PodLevelResourceManagers: true}",
            "1:68: featureGates.PodLevelResourceManagers: PodLevelResourceManagers is enabled, but depends on features that \
             are disabled: [PodLevelResources]",
        ),
        (
            "strategy: kubelet\nkubeletVersion: 1.32\nfeatureGates: {AllAlpha: true}",
            "3:26: featureGates.AllAlpha: PodLevelResources is on, but the strategy kubelet does not imitate the kubelet 1.32",
        ),
        (
            "kubeletVersion: '1.30'",
            "1:17: kubeletVersion: unknown version of the kubelet (1.32 and 1.36 are known; ",
        ),
        (
            "kubeletVersion: 1.37",
            "1:17: kubeletVersion: unknown version of the kubelet (1.32 and 1.36 are known; the decisions of 1.37 were not recorded, and some \
             differ from those of 1.36): \"1.37\"",
        ),
        (
            "memoryThrottlingFormula: 1.23",
            "1:26: memoryThrottlingFormula: unknown formula (1.22 and 1.27 are known)",
        ),
        ("kubeletVersion: [1]", "1:17: kubeletVersion: expected a version such as \"1.36\""),
    ] {
        let found = errors(file);
        assert!(
            found.len() == 1 && found[0].starts_with(&format!("config.yaml:{error}")),
            "{file}: {found:#?}"
        );
    }
    for version in ["1.36", "'1.36'"] {
        let loaded = with_file(&format!("kubeletVersion: {version}"), &[], vec![]).unwrap();
        assert_eq!(loaded.config.kubelet_version, Some(policy::KubeletVersion::V1_36));
    }
    let file = "strategy: kubelet\nfeatureGates: {NodeSwap: true, CPUManager: true, PodLevelResourceManagers: true, AllBeta: true}";
    let loaded = with_file(file, &[], vec![]).unwrap();
    assert_eq!(loaded.warnings, ["featureGates.NodeSwap has no effect here"]);
    // A problem of only one version is reported after the version of the node is known.
    let file = "featureGates: {CPUManagerPolicyOptions: false}";
    assert_eq!(errors(file).len(), 1);
    assert!(with_file(file, &[("NUMAWARD_KUBERNETES_NODE_NAME", "a")], vec![]).is_ok());
}

//! Runs the commands of the book as written there, on a machine with systemd, and checks the output that the pages describe.
//!
//! # Algorithm
//! Every line of a shell block is a command. [`RUNS`] defines how a command is run and which text its output must contain. A
//! command that is neither in this table nor in [`NOT_HERE`] fails the test, so no page can have an untested command. A command
//! that does not end by itself is stopped; a command that needs a terminal gets one, with typed keys.
//!
//! Sizes and durations are reduced for the emulated machine. `book.sh` provides `./server`, `postgresql@17-main.service` and the
//! other programs and services of the examples.

use std::{fs, path::PathBuf, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Cache, GuestTopology};

/// Pages in reading order, each with the minimum number of commands that are run and the shell commands that prepare the page.
const PAGES: [(&str, usize, &str); 8] = [
    ("start.md", 11, ""),
    ("see.md", 12, ""),
    ("commands.md", 12, "guarantee"),
    ("rebalancing.md", 3, "crowd"),
    ("strategies.md", 3, ""),
    ("fleet.md", 4, ""),
    ("runbooks/README.md", 1, ""),
    ("systemd.md", 7, "numaward release --all --yes || true; guarantee"),
];
/// Part of the script that prepares a host with services and a program.
pub(crate) const HOST: &str = include_str!("book/host.sh");
/// The traces of pods that are replayed.
const TRACES: [&str; 2] = ["cxl", "four"];
/// Texts of the book and their replacements.
const SMALLER: [(&str, &str); 4] = [
    ("--for 10m", "--for 30s"),
    ("+5m", "+5s"),
    ("--hosts 1000", "--hosts 12"),
    ("https://HOST/PATH", "file:/srv/now/apt"),
];

/// How a command of a page is run, and how it ends.
#[derive(Clone, Copy)]
pub(crate) enum RunMode {
    /// The command ends by itself.
    Ends,
    /// The command is stopped after this number of seconds.
    Goes(u32),
    /// The command runs in a terminal: the keys (second text) are typed as soon as the first text is on the screen.
    Types(&'static str, &'static str),
}

/// A command, identified by its first words, and its expected output. The longest match applies.
pub(crate) struct CommandExpectation {
    begins: &'static str,
    mode: RunMode,
    shows: &'static [&'static str],
    /// Shell commands that run before, without output.
    before: &'static str,
    /// Shell commands that run afterwards, and the text that their output must contain.
    after: (&'static str, &'static str),
}

pub(crate) const fn run(
    begins: &'static str,
    mode: RunMode,
    shows: &'static [&'static str],
) -> CommandExpectation {
    CommandExpectation { begins, mode, shows, before: "true", after: ("true", "") }
}

impl CommandExpectation {
    pub(crate) const fn before(self, before: &'static str) -> Self {
        Self { before, ..self }
    }

    pub(crate) const fn after(self, look: &'static str, shows: &'static str) -> Self {
        Self { after: (look, shows), ..self }
    }
}

/// Rows of the report about a fleet, and its section about assumptions.
const FLEET: &[&str] = &[
    "12 hosts in ",
    "seed 1: ",
    " kubelet ",
    " native, attached ",
    " evict ",
    " no NUMA ",
    "What the rows rest on:",
];

pub(crate) const RUNS: &[CommandExpectation] = &[
    run("curl -s http://127.0.0.1:9560/metrics", RunMode::Ends, &["numaward_memory_allocated_bytes_total{"]),
    run("curl -s http://127.0.0.1:9560/api/v1/history", RunMode::Ends, &["\"stepSeconds\""]),
    run("curl -s http://127.0.0.1:9560/api/v1/history/workloads", RunMode::Ends, &["redis.service"]),
    run(
        "curl -s http://127.0.0.1:9560/api/v1/workloads/%2Fsystem.slice%2Fredis.service/history",
        RunMode::Ends,
        &["\"stepSeconds\""],
    ),
    run("journalctl -u numaward", RunMode::Ends, &["numaward"]),
    run("numaward bugtool", RunMode::Ends, &["numaward-bugtool-"])
        .after("tar -tzf numaward-bugtool-*.tar.gz", "missing.txt"),
    run("numaward describe postgresql@17-main.service", RunMode::Ends, &["postgresql@17-main.service"]),
    run("numaward config check", RunMode::Ends, &["valid"]),
    run("numaward doctor", RunMode::Ends, &["ok"]),
    run("numaward events -f", RunMode::Goes(20), &[" miss ", "postgresql@17-main.service"]).before("stray"),
    run("numaward exec", RunMode::Ends, &["served"]),
    run("numaward exec --cpus 2 --memory 4Gi --cpu-kind isolated", RunMode::Ends, &["traded on 6-7 by "]),
    run("numaward exec --cpus 2 --memory 4Gi --hide-siblings", RunMode::Ends, &["traded on "]),
    run("numaward exec --cpus 2 --near eth0", RunMode::Ends, &["forwarded on 8-9"]),
    run("numaward exec --cpus 8 --memory 64Gi", RunMode::Ends, &["scanned on ", "by interleave:"]),
    run("numaward explain", RunMode::Ends, &["would"]),
    run("numaward get", RunMode::Ends, &["NAME", "postgresql@17-main.service"]),
    run("numaward guarantee", RunMode::Ends, &["postgresql@17-main.service", "80.0 MiB"]).before("forget"),
    run("numaward numactl --cpunodebind=1 --membind=1 ./server", RunMode::Ends, &["served"]),
    run("numaward numactl --hardware", RunMode::Ends, &["available: 2 nodes (0-1)", "node 1 cpus: 8 9"]),
    run("numaward numactl --interleave=all ./batch", RunMode::Ends, &["done on 0-9 by interleave:0-1"]),
    run("numaward numactl -m netdev:eth0 -C 4-7 ./forwarder", RunMode::Ends, &["forwarded on 4-7 by bind:1"]),
    run("numaward plan", RunMode::Ends, &["would hold", "small.service", "1 -> 0"]),
    run("numaward rebalance --cpus", RunMode::Ends, &["was moved from node 1 to 0", "The request fits now."]),
    run(
        "numaward rebalance postgresql@17-main.service",
        RunMode::Ends,
        &["The request fits now.", "postgresql@17-main.service"],
    )
    .after("numaward get", "80.0 MiB"),
    run("numaward recommend", RunMode::Ends, &["WORKLOAD", "redis.service"]),
    run("numaward recommend -o guarantees", RunMode::Ends, &[])
        .before("mkdir -p /etc/numaward/guarantees.d")
        .after("ls /etc/numaward/guarantees.d; rm -r /etc/numaward", "recommended-"),
    run(
        "numaward recommend postgresql@17-main.service",
        RunMode::Ends,
        &["\"workload\": \"postgresql@17-main.service\""],
    ),
    run("numaward record", RunMode::Ends, &["moments from"])
        .before("night")
        .after("ls -l night.record", "-rw-------"),
    run("numaward release --all", RunMode::Types("[y/N]", "y\\n"), &["postgresql@17-main.service released"])
        .after("numaward get", "there are no guarantees"),
    run("numaward release postgresql@17-main.service", RunMode::Ends, &[])
        .after("numaward get", "there are no guarantees"),
    run("numaward replay night.record", RunMode::Types("paused", "q"), &["1/", "redis.service"]),
    run("numaward replay night.record --begin +5m --once", RunMode::Ends, &["T02:3", "NODE", "WORKLOAD"]),
    run("numaward replay night.record --begin 02:30", RunMode::Types("paused", "q"), &[" 02:3", "1/"]),
    run("numaward replay night.record -o json", RunMode::Ends, &["T02:3", "small.service"]),
    run("numaward resize", RunMode::Ends, &["postgresql@17-main.service", "120.0 MiB"]),
    run("numaward simulate traces/ --hosts 1000", RunMode::Ends, FLEET),
    run("numaward simulate traces/ --hosts 1000 --each", RunMode::Ends, FLEET)
        .after("true", "hosts of 4 nodes, "),
    run(
        "numaward simulate traces/ --hosts 1000 --seed 2 -o json",
        RunMode::Ends,
        &["\"seed\": 2,", "\"lostToNumaMibTicks\"", "\"strategy\": \"none\""],
    ),
    run(
        "numaward simulate traces/ --machine 4x32,128Gi,sockets=2",
        RunMode::Ends,
        &["Guaranteed pods on 4x32,128Gi,sockets=2\n", "\nkubelet ", "\nnative, attached "],
    ),
    run(
        "numaward simulate traces/ --machine here",
        RunMode::Ends,
        &["\"machine\": \"here\"", "\"strategy\": \"kubelet\"", "\"strategy\": \"native\""],
    )
    .before("configured")
    .after("rm /etc/numaward/config.yaml", ""),
    run(
        "numaward simulate traces/ --tiers strict",
        RunMode::Ends,
        &["12 traces, ", "\nkubelet ", "\nnative, strict "],
    ),
    run("numaward status", RunMode::Ends, &["PROBE", "alloc"]),
    run("numaward top", RunMode::Types("redis.service", "q"), &["WORKLOAD"]),
    run("numaward top --batch", RunMode::Goes(20), &["NODE", "WORKLOAD", "redis.service"]),
    run("numaward top --once", RunMode::Ends, &["NODE", "WORKLOAD", "redis.service"]),
    run("numaward top -o json | jq", RunMode::Goes(20), &["\"distant\""]).before("distant"),
    run("numaward topology", RunMode::Ends, &["0-7", "8-9", "ALLOCATABLE"]),
    run("numaward uninstall", RunMode::Ends, &["postgresql@17-main.service"])
        .after("echo \"cpus: $(cpus_of postgresql@17-main.service).\"", "cpus: ."),
    run(
        "sed -E 's#http://.*/runbooks/#https://wiki.example.com/numaward/#' prometheusrule.yaml",
        RunMode::Ends,
        &[
            "runbook_url: https://wiki.example.com/numaward/NumawardIntruders\n",
            " https://wiki.example.com/numaward/NumawardDown\n",
        ],
    ),
    run("systemctl edit numaward", RunMode::Types("", ""), &[])
        .after("systemctl show -p MemoryMax numaward", "MemoryMax=1073741824"),
    run("systemctl enable --now numaward", RunMode::Ends, &[])
        .after("systemctl is-enabled numaward", "enabled"),
    run("systemctl reload numaward", RunMode::Ends, &[]).after("systemctl is-active numaward", "active"),
    run("systemctl stop numaward", RunMode::Ends, &[]).after("systemctl is-active numaward", "inactive"),
    run("systemctl stop numaward && systemctl enable --now numaward.socket", RunMode::Ends, &[])
        .after("systemctl is-active numaward numaward.socket", "active\nactive"),
];

/// Commands that are not run, by their first words, with the reason.
const NOT_HERE: &[(&str, &str)] = &[
    ("alias ", "there is no checkout here: `numaward` is on the `PATH`"),
    ("apt install ", "there is no package here: `packages::newcomer` installs it"),
    ("apt update ", "there is no repository here: `packages::newcomer` has one"),
    (
        "cargo ",
        "there is neither a checkout nor a compiler here: `cargo xtask screenshots` goes through the demo",
    ),
    ("cp numaward.asc ", "there is no download here: `packages::newcomer` does it"),
    ("dnf install ", "Debian has no dnf: `packages::rpm` installs with rpm"),
    ("gpg ", "there is no download here: `packages::newcomer` verifies one"),
    ("sed 's#^URIs: ADDRESS#", "there is no download here: `packages::newcomer` does it"),
    ("sha256sum --check ", "there is no download here: `packages::newcomer` verifies one"),
    ("numaward trial ", "there is no benchmark here: `guides::postgresql` runs one"),
    (
        "target/x86_64-unknown-linux-gnu/release/numaward ",
        "there is no checkout here: `cargo xtask screenshots` runs what the demo prints",
    ),
];

/// A command of a page.
#[derive(Debug)]
pub(crate) struct BookCommand {
    page: &'static str,
    /// The nearest heading above the command.
    pub(crate) heading: String,
    /// The line of the page with those that continue it, without the comment after `#`.
    pub(crate) text: String,
}

impl BookCommand {
    /// Returns the name of the section with the output.
    fn section(&self) -> String {
        format!("{}: {}", self.page, self.text)
    }

    /// Returns true if the command consists of these words or begins with them.
    pub(crate) fn begins_with(&self, begins: &str) -> bool {
        let rest = self.text.strip_prefix(begins);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ') || begins.ends_with([' ', '#']))
    }

    /// Returns the row that applies to the command.
    pub(crate) fn find_row<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a CommandExpectation>,
    ) -> Option<&'a CommandExpectation> {
        let rows = rows.into_iter().filter(|row| self.begins_with(row.begins));
        rows.max_by_key(|row| row.begins.len())
    }

    /// Returns the shell script that runs the command.
    pub(crate) fn script(&self, run: &CommandExpectation) -> String {
        let mut words: Vec<String> = self.text.split(' ').map(str::to_owned).collect();
        // Reduces memory of requests. Memory of a machine that is only described (`4x32,128Gi`) ends in another word and is kept.
        for amount in words.iter_mut().filter(|word| word.ends_with("Gi")) {
            *amount = amount.replace("Gi", "0Mi");
        }
        let smaller = SMALLER.iter().fold(words.join(" "), |text, (of, is)| text.replace(of, is));
        let command = match run.mode {
            RunMode::Ends => smaller,
            RunMode::Goes(seconds) => format!("timeout {seconds} {smaller}"),
            RunMode::Types(words, keys) => format!("types '{words}' '{keys}' '{smaller}'"),
        };
        let section = self.section().replace('\'', r"'\''");
        let (before, (look, _)) = (run.before, run.after);
        format!(
            "{before} >/dev/null 2>&1\nsection '{section}'\ncode=0\n{command} || code=$?\n{look} || true\necho \"code $code\"\n"
        )
    }

    /// Returns the error message if the output or the exit code is not as expected.
    pub(crate) fn fault(&self, run: &CommandExpectation, report: &ScriptReport) -> Option<String> {
        let section = report.section(&self.section());
        let (said, code) = section.rsplit_once("code ").unwrap_or((section, "none"));
        // The exit code of `timeout` if the command was still running.
        let expected = if matches!(run.mode, RunMode::Goes(_)) { "143" } else { "0" };
        let words = run.shows.iter().chain([&run.after.1]);
        let missing: Vec<_> = words.filter(|word| !said.contains(**word)).collect();
        // `jq` prints `null` for a name that does not exist.
        let is_null = self.text.contains("jq") && said.lines().any(|line| line.trim_matches('"') == "null");
        (code.trim() != expected || !missing.is_empty() || is_null).then(|| {
            let Self { page, text, .. } = self;
            format!("{page}: {text} does not show {missing:?} or does not end with {expected}:\n{section}")
        })
    }
}

/// Returns the commands of the shell blocks of a page.
pub(crate) fn commands(page: &'static str) -> Vec<BookCommand> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let text = fs::read_to_string(path).unwrap().replace(" \\\n", " ");
    let (mut commands, mut heading, mut language) = (Vec::new(), String::new(), None);
    for line in text.lines() {
        match (line.strip_prefix("```"), &language) {
            (Some(of), None) => language = Some(of.to_owned()),
            (Some(_), Some(_)) => language = None,
            (None, None) if line.starts_with('#') => {
                line.trim_start_matches(['#', ' ']).clone_into(&mut heading);
            }
            (None, Some(of)) if ["", "sh"].contains(&of.as_str()) && !line.trim().is_empty() => {
                // A comment begins with ` #`; a `#` within a word does not begin one.
                let text = line.split_once(" #").map_or(line, |(command, _)| command).trim().to_owned();
                commands.push(BookCommand { page, heading: heading.clone(), text });
            }
            (None, _) => {}
        }
    }
    commands
}

/// The commands of the book by how they are treated.
struct BookPlan {
    script: String,
    run: Vec<(BookCommand, &'static CommandExpectation)>,
    skipped: Vec<&'static str>,
}

impl BookPlan {
    /// Returns the plan, or the commands that are in no table and the rows without a command.
    fn new() -> Result<Self, String> {
        let mut faults = Vec::new();
        let mut script = [HOST, include_str!("book.sh")].concat();
        let mut run: Vec<(BookCommand, &CommandExpectation)> = Vec::new();
        let mut skipped = Vec::new();
        for (page, least, before) in PAGES {
            script = format!("{script}\nsection 'before {page}'\n{before} 2>&1\n");
            let begun = run.len();
            for command in commands(page) {
                let not_here = NOT_HERE.iter().find(|(begins, _)| command.begins_with(begins));
                match (command.find_row(RUNS), not_here) {
                    (Some(how), None) => {
                        script += &command.script(how);
                        run.push((command, how));
                    }
                    (None, Some((begins, _))) => skipped.push(*begins),
                    _ => faults.push(format!("{page}: is it run, and what is it to show? {}", command.text)),
                }
            }
            let count = run.len() - begun;
            if count < least {
                faults.push(format!("{count} commands of {page} are run, and {least} should be"));
            }
        }
        for (begins, why) in NOT_HERE.iter().filter(|(begins, _)| !skipped.contains(begins)) {
            faults.push(format!("no page has a command {begins:?}, which is not run because {why}"));
        }
        if faults.is_empty() { Ok(Self { script, run, skipped }) } else { Err(faults.join("\n")) }
    }
}

#[test]
fn each_command_is_in_a_table() {
    let Some(_bench) = TestEnvironment::open() else { return };
    let plan = BookPlan::new().unwrap_or_else(|faults| panic!("{faults}"));
    println!("{} commands are run, and {} not", plan.run.len(), plan.skipped.len());
}

#[test]
fn book_commands_do_what_pages_say() {
    let Some(bench) = TestEnvironment::open() else { return };
    let BookPlan { script, run, .. } = BookPlan::new().unwrap_or_else(|faults| panic!("{faults}"));

    let repository = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let machine = GuestTopology::parse(None, Some("8,2"), Some("1536M,768M"), None).unwrap();
    let tools = Cache::locate().unwrap().root().join("tools/jq");
    let libraries = "/usr/lib/x86_64-linux-gnu";
    let vm = bench
        .vm_with_systemd(machine)
        .network_on(1)
        // With `net.ifnames=0`, the interface is named eth0. A page requests isolated CPUs.
        .append("net.ifnames=0 isolcpus=6-7 nohz_full=6-7")
        .file(tools.join("jq"), "/usr/bin/jq")
        .file(tools.join("libjq.so.1"), format!("{libraries}/libjq.so.1"))
        .file(tools.join("libonig.so.5"), format!("{libraries}/libonig.so.5"))
        .file(repository.join("deploy/systemd/numaward.service"), "/usr/lib/systemd/system/numaward.service")
        .file(repository.join("deploy/systemd/numaward.socket"), "/usr/lib/systemd/system/numaward.socket")
        .file(
            repository.join("deploy/overlays/prometheus-operator/prometheusrule.yaml"),
            "/srv/prometheusrule.yaml",
        )
        .limit(Duration::from_mins(20));
    let vm = TRACES.into_iter().fold(vm, |vm, name| {
        let file = format!("traces/{name}.json.gz");
        vm.file(repository.join("tests").join(&file), format!("/srv/{file}"))
    });
    let report = boot(&vm, &script);
    let faults: Vec<_> = run.iter().filter_map(|(command, how)| command.fault(how, &report)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

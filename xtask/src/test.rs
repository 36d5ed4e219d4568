//! `cargo xtask test`: the tests of a lane, in stages. All stages run, even after one has failed.
//!
//! Each stage except for the machines is a separate process with its output in a file: the terminal shows progress, and
//! after a failure an excerpt that explains it. A single stage shows all of its output.

use std::env;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use numaward_vm::{Arch, Cache};
use regex::Regex;

use crate::report::{self, Times};
use crate::setup::{self, CargoTool, DebianTool, Part, PythonTool, kernels};
use crate::vm::{self, Lane};
use crate::{
    api, architecture, book, budgets, build, command, commits, dashboards, dependencies, fuzz, generate,
    language, manifests, modules, units,
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these stages, or end-to-end tests with a name that contains one of these [default: those of the lane]
    #[arg(value_name = "STAGE|TEST")]
    names: Vec<String>,
    /// Lane of tests: `quick` takes minutes, `ci` is required for each change, `rest` is everything else
    #[arg(long, value_enum, default_value_t = Lane::Quick)]
    lane: Lane,
    /// Runs the end-to-end tests, by default all of the lane `ci`, this number of times, while as many other processes
    /// as there are CPUs keep this host busy
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// Kernel of the end-to-end tests; may be repeated [default: those of the lane]
    #[arg(long = "kernel", value_parser = kernels::all_names())]
    kernels: Vec<String>,
    /// Seed of random inputs [default: 1 in the lanes `quick` and `ci`, else another in each run]
    #[arg(long, env = "NUMAWARD_SEED")]
    seed: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting
    Fmt,
    /// Lints, warnings denied
    Clippy,
    /// Unit and in-process tests, with the corpus of the fuzz targets, and the next two
    Unit,
    /// The probes on this host's kernel (needs root and BPF)
    Host,
    /// The kubelet's recorded decisions
    Conformance,
    /// Parsers of files, pods, NRI and requests, with inputs from libFuzzer
    Fuzz,
    /// The crates' dependencies against the table of allowed ones, cycles of modules, input and output of large types,
    /// and the names on the page about the architecture
    Deps,
    /// Licenses, sources, duplicates and advisories of all dependencies
    Deny,
    /// Alerts and recording rules: firing and quiet cases; and the book's settings for Alertmanager
    Rules,
    /// The Kubernetes manifests against the schemas of Kubernetes and of the Prometheus operator, and the Helm chart
    /// against the manifests; the list of system calls, and the exposure of the unit
    Manifests,
    /// The book: it is made, its links lead somewhere, and the language of code and pages is within its limits
    Book,
    /// The page in a headless browser, and that of a daemon on this host
    Page,
    /// The API of a daemon: random requests
    Api,
    /// Generated files: the generators do not change them
    Generated,
    /// Benchmarks with a budget
    Budgets,
    /// The released program: built twice, in different folders, it has the same bytes
    Reproducible,
    /// Dashboards and rules on a real Prometheus that scrapes a virtual machine
    Dashboards,
    /// The way of a new user: clone, demo, red page, fix, green page, and its duration
    Newcomer,
    /// End-to-end tests in virtual machines
    Vm,
}

impl Stage {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn parse(name: &str) -> Option<Self> {
        Self::from_str(name, false).ok()
    }

    /// Returns the stages of a lane.
    const fn in_lane(lane: Lane) -> &'static [Self] {
        match lane {
            Lane::Quick => &[Self::Fmt, Self::Unit, Self::Vm],
            Lane::Ci => &[
                Self::Fmt,
                Self::Clippy,
                Self::Unit,
                Self::Generated,
                Self::Deps,
                Self::Deny,
                Self::Rules,
                Self::Manifests,
                Self::Book,
                Self::Page,
                Self::Api,
                Self::Vm,
            ],
            Lane::Rest => &[
                Self::Fuzz,
                Self::Api,
                Self::Budgets,
                Self::Reproducible,
                Self::Dashboards,
                Self::Newcomer,
                Self::Vm,
            ],
            Lane::Cluster => &[Self::Vm],
        }
    }
}

/// Returns whether a stage has this name.
#[cfg(test)]
pub(crate) fn is_stage(name: &str) -> bool {
    Stage::parse(name).is_some()
}

/// Variable with the path of a copy of the database of advisories, a git repository.
const ADVISORIES: &str = "NUMAWARD_ADVISORIES";
/// Address of the database for cargo-deny.
const DATABASE: &str = "https://github.com/RustSec/advisory-db";

/// The interval at which a stage reports that it is still running.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(30);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    run_lane(arguments).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run_lane(arguments: &Arguments) -> Result<ExitCode> {
    let (stages, tests): (Vec<_>, Vec<_>) =
        arguments.names.iter().cloned().partition(|name| Stage::parse(name).is_some());
    ensure!(
        stages.is_empty() || tests.is_empty(),
        "name stages or end-to-end tests, not both: {}",
        arguments.names.join(" ")
    );
    let is_of_machines = arguments.repeat.is_some() || !tests.is_empty() || !arguments.kernels.is_empty();
    ensure!(
        stages.is_empty() || !is_of_machines,
        "--repeat and --kernel are for end-to-end tests, not for stages"
    );
    let stages: Vec<_> = if is_of_machines {
        vec![Stage::Vm]
    } else if stages.is_empty() {
        Stage::in_lane(arguments.lane).to_vec()
    } else {
        stages.iter().filter_map(|name| Stage::parse(name)).collect()
    };
    let seed = arguments.seed.unwrap_or_else(|| match arguments.lane {
        Lane::Quick | Lane::Ci => 1,
        Lane::Rest | Lane::Cluster => command::new_seed(),
    });
    // A single stage shows all of its output.
    if let [stage] = stages[..]
        && stage != Stage::Vm
    {
        setup::ensure(&parts(stage)?)?;
        run(stage, arguments.lane, seed)?;
        println!("\n1 passed, 0 failed");
        return Ok(ExitCode::SUCCESS);
    }
    println!("seed of made-up inputs: {seed}");
    let target = build::target_directory()?;
    let mut times = Times::read(&target);
    let mut outcomes = Vec::new();
    for (number, &stage) in stages.iter().enumerate() {
        let key = |stage: Stage| format!("stage {} of {:?}", stage.name(), arguments.lane);
        let left = report::time_left(stages[number..].iter().map(|&stage| times.get(&key(stage))), 1);
        println!("\n=== {} (stage {} of {}{left})", stage.name(), number + 1, stages.len());
        let started = Instant::now();
        let result = match stage {
            Stage::Vm => machines(arguments, &tests, seed),
            _ => attend(stage, arguments.lane, seed, times.get(&key(stage))),
        };
        let took = started.elapsed();
        match &result {
            Ok(()) => {
                // The machines' tests have written times meanwhile.
                times = Times::read(&target);
                times.set(key(stage), took);
                times.write()?;
                println!("{}: ok, {}", stage.name(), report::spell(took));
            }
            Err(error) => eprintln!("error: {}: {error:#}", stage.name()),
        }
        outcomes.push(StageOutcome { stage, took, is_ok: result.is_ok() });
    }
    Ok(summary(&outcomes))
}

fn machines(arguments: &Arguments, tests: &[String], seed: u32) -> Result<()> {
    let lane = match arguments.lane {
        // Named tests run on their kernels in the table.
        Lane::Quick if !tests.is_empty() => None,
        Lane::Quick if arguments.repeat.is_some() || !arguments.kernels.is_empty() => Some(Lane::Ci),
        lane => Some(lane),
    };
    let selection = vm::Selection {
        arch: Arch::Amd64,
        names: tests,
        lane,
        kernels: &arguments.kernels,
        is_long: false,
        seed,
    };
    let results = vm::test(&selection, &vm::Folders::from_environment(), arguments.repeat)?;
    results.print();
    results.check()
}

/// Runs a stage in a separate process, with its output in a file.
fn attend(stage: Stage, lane: Lane, seed: u32, last: Option<Duration>) -> Result<()> {
    let folder = build::target_directory()?.join("test-logs");
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{}.log", stage.name()));
    let mut log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let (reader, writer) = std::io::pipe()?;
    let of_lane = lane.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    // A build may have replaced the file of this program; the running one is available by this name.
    let mut command = Command::new("/proc/self/exe");
    command.args(["test", &stage.name(), "--lane", &of_lane, "--seed", &seed.to_string()]);
    let mut child = command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // The ends of the pipe in this process would keep the reader waiting.
    drop(command);
    let (sender, printed) = mpsc::channel();
    thread::spawn(move || {
        for text in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            if sender.send(text).is_err() {
                break;
            }
        }
    });
    let (started, mut shown, mut passed, mut latest) = (Instant::now(), Instant::now(), 0, String::new());
    loop {
        match printed.recv_timeout((shown + PROGRESS_INTERVAL).saturating_duration_since(Instant::now())) {
            Ok(text) => {
                log.write_all(&text)?;
                log.write_all(b"\n")?;
                let text = String::from_utf8_lossy(&text);
                if text.starts_with("test ") && text.ends_with("... ok") {
                    passed += 1;
                } else if !text.trim().is_empty() {
                    latest = text.trim().chars().take(80).collect();
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if shown.elapsed() >= PROGRESS_INTERVAL {
            shown = Instant::now();
            let tests = if passed > 0 { format!(", {passed} tests passed") } else { String::new() };
            let of_last =
                last.map_or_else(String::new, |last| format!(" of {} in the last run", report::spell(last)));
            println!("{}: {}{of_last}{tests}: {latest}", stage.name(), report::spell(started.elapsed()));
        }
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(());
    }
    println!("{}", report::excerpt(&fs::read_to_string(&path).unwrap_or_default()));
    bail!("failed\n  all of it: {}\n  again:     cargo xtask test {}", path.display(), stage.name())
}

/// Returns the parts that a stage needs; machines install their own.
fn parts(stage: Stage) -> Result<Vec<Part>> {
    let machine = || {
        anyhow::Ok([
            Part::Qemu(Arch::Amd64),
            Part::Kernel(Arch::Amd64, kernels::find(Arch::Amd64, kernels::DEFAULT)?),
        ])
    };
    let mut parts = Vec::new();
    match stage {
        Stage::Clippy | Stage::Host | Stage::Budgets => parts.push(Part::Ebpf),
        Stage::Unit | Stage::Generated => parts.extend([Part::Ebpf, Part::Commands]),
        Stage::Fuzz => parts.push(Part::Cpp),
        Stage::Deny => parts.push(Part::Tool(&CargoTool::DENY)),
        Stage::Rules => {
            parts.extend([&DebianTool::PROMETHEUS, &DebianTool::ALERTMANAGER].map(Part::DebianTool));
        }
        Stage::Manifests => {
            parts.extend([Part::DebianTool(&DebianTool::KUSTOMIZE), Part::Node, Part::Systemd]);
            parts.extend([&PythonTool::HELM, &PythonTool::KUBERNETES_VALIDATE].map(Part::PythonTool));
        }
        Stage::Book => parts.push(Part::DebianTool(&DebianTool::MDBOOK)),
        Stage::Page => parts.extend([Part::Ebpf, Part::Browser]),
        Stage::Api => parts.extend([Part::Ebpf, Part::PythonTool(&PythonTool::SCHEMATHESIS)]),
        Stage::Dashboards => {
            parts.push(Part::Ebpf);
            parts.extend([&DebianTool::PROMETHEUS, &DebianTool::VICTORIA_METRICS].map(Part::DebianTool));
            parts.extend(machine()?);
        }
        Stage::Newcomer => {
            parts.extend([Part::Ebpf, Part::Browser]);
            parts.extend(machine()?);
        }
        Stage::Reproducible => parts.extend([Part::Ebpf, Part::Compiler(Arch::Amd64)]),
        Stage::Fmt | Stage::Conformance | Stage::Deps | Stage::Vm => {}
    }
    Ok(parts)
}

fn run(stage: Stage, lane: Lane, seed: u32) -> Result<()> {
    let mut cargo = command::cargo();
    match stage {
        Stage::Fmt => cargo.args(["fmt", "--all", "--check"]),
        Stage::Clippy => {
            // With the profile and the target of the tests, so that build scripts and procedural macros are built once.
            let clippy = |target: &[&str]| {
                let mut cargo = build::tested_cargo("clippy")?;
                cargo.args(target).args(["--", "-D", "warnings"]);
                command::run(&mut cargo)
            };
            // The program of the end-to-end tests is not among "all targets", because cargo does not run it by
            // default.
            return clippy(&["--all-targets"]).and_then(|()| clippy(&["--test", "e2e"]));
        }
        Stage::Unit => return units::test(),
        Stage::Host => return units::test_by_name("host"),
        Stage::Conformance => return units::test_by_name("conformance"),
        Stage::Fuzz => return fuzz::test(seed),
        Stage::Deps => {
            dependencies::check()?;
            modules::check()?;
            return architecture::check();
        }
        Stage::Deny => return deny(),
        Stage::Rules => return rules(),
        Stage::Manifests => return manifests::check(),
        Stage::Book => return language::check().and_then(|()| commits::check()).and_then(|()| book::test()),
        Stage::Page => return page(),
        Stage::Api => return api::test(lane == Lane::Rest, seed),
        Stage::Generated => return generate::check(),
        Stage::Budgets => {
            ensure!(budgets::run(&[])? == ExitCode::SUCCESS, "a budget is exceeded");
            return Ok(());
        }
        Stage::Reproducible => {
            cargo.args(["xtask", "dist", "--check-reproducible", "--only-program", "numaward"])
        }
        Stage::Dashboards => return dashboards::test(command::root()),
        Stage::Newcomer => cargo.args(["xtask", "screenshots", "--newcomer"]),
        Stage::Vm => bail!("machines have a queue of their own"),
    };
    command::run(&mut cargo)
}

fn deny() -> Result<()> {
    let program = CargoTool::DENY.path(&Cache::locate()?);
    let deny = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.current_dir(command::root()).arg("--workspace").args(arguments);
        command
    };
    command::run(&mut deny(&["check", "licenses", "bans", "sources"]))?;
    // The database of advisories is a separate repository, which not every network reaches; a copy is accepted.
    let mut fetch = deny(&["fetch", "db"]);
    if let Some(copy) = env::var_os(ADVISORIES) {
        let copy = fs::canonicalize(&copy).with_context(|| format!("{ADVISORIES}={}", copy.display()))?;
        println!("advisories: of the copy in {}", copy.display());
        fetch.env("GIT_CONFIG_COUNT", "1").env("GIT_CONFIG_VALUE_0", DATABASE);
        fetch.env("GIT_CONFIG_KEY_0", format!("url.file://{}.insteadOf", copy.display()));
    }
    match command::read(&mut fetch) {
        Ok(_) => command::run(&mut deny(&["--offline", "check", "advisories"])),
        Err(error) => {
            println!("advisories: NOT CHECKED, the database cannot be fetched: {error:#}");
            Ok(())
        }
    }
}

fn rules() -> Result<()> {
    let cache = Cache::locate()?;
    let rules = command::root().join("dashboards/prometheus");
    for (action, files) in
        [("check", ["rules.yaml", "capacity.yaml"]), ("test", ["rules_test.yaml", "capacity_test.yaml"])]
    {
        let mut promtool = DebianTool::PROMETHEUS.command(&cache, "promtool");
        command::run(promtool.args([action, "rules"]).args(files).current_dir(&rules))?;
    }
    alertmanager(&cache, &fs::read_to_string(rules.join("rules.yaml"))?)
}

/// Checks that Alertmanager accepts the settings in the documentation, and that the named alerts exist.
fn alertmanager(cache: &Cache, rules: &str) -> Result<()> {
    let page = fs::read_to_string(command::root().join("docs/alerts.md"))?;
    let mut blocks = page.split("```yaml\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0));
    let settings = blocks.find(|block| block.starts_with("route:"));
    let settings = settings.context("docs/alerts.md has no settings for Alertmanager")?;
    for alert in Regex::new(r"Numaward[A-Za-z]+")?.find_iter(settings).map(|found| found.as_str()) {
        if !rules.contains(&format!("alert: {alert}\n")) {
            bail!("docs/alerts.md: no rule has the alert {alert}");
        }
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("alertmanager.yaml");
    // The receivers are the reader's choice.
    fs::write(&file, format!("{settings}receivers: [{{name: default}}, {{name: pager}}]\n"))?;
    command::run(DebianTool::ALERTMANAGER.command(cache, "amtool").arg("check-config").arg(&file))
}

fn page() -> Result<()> {
    let tests = page_tests()?;
    let (daemon, controlled) = (build::tested_program("numaward")?, build::tested_test("control")?.path);
    let mut node = Command::new("node");
    node.arg("--test").env("NUMAWARD", daemon).env("CONTROLLED_NUMAWARD", controlled);
    command::run(node.current_dir(tests))
}

/// Returns the folder of the page's tests, with their dependencies installed.
pub(crate) fn page_tests() -> Result<PathBuf> {
    let tests = command::root().join("tests/page");
    // The browser is that of the system.
    command::run(command::npm_ci(&tests).env("PUPPETEER_SKIP_DOWNLOAD", "1"))?;
    Ok(tests)
}

/// Result of a stage.
struct StageOutcome {
    stage: Stage,
    took: Duration,
    is_ok: bool,
}

fn summary(outcomes: &[StageOutcome]) -> ExitCode {
    println!("\n=== summary");
    for StageOutcome { stage, took, is_ok } in outcomes {
        let word = if *is_ok { "ok" } else { "FAILED" };
        println!("{:<12} {word:<6} {:>5} s", stage.name(), took.as_secs());
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.took).sum();
    println!("{:<19} {:>5} s", "all", total.as_secs());
    let failed = outcomes.iter().filter(|outcome| !outcome.is_ok).count();
    println!("\n{} passed, {failed} failed", outcomes.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_is_in_a_lane() {
        for stage in Stage::value_variants() {
            let lanes =
                Lane::value_variants().iter().filter(|&&lane| Stage::in_lane(lane).contains(stage)).count();
            let is_part_of_unit = matches!(stage, Stage::Host | Stage::Conformance);
            assert!((lanes > 0) != is_part_of_unit, "{stage:?} is in {lanes} lanes");
        }
    }
}

//! `cargo xtask test`: everything that must hold, in stages. All stages run, also after one has failed.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use numaward_vm::{Arch, Cache};
use regex::Regex;

use crate::setup::{self, CargoTool, DebianTool, Part, PythonTool, kernels};
use crate::{
    api, architecture, book, build, command, dashboards, dependencies, fuzz, manifests, modules, vm, words,
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these stages [default: all; host and conformance are part of unit]
    #[arg(value_enum)]
    stages: Vec<Stage>,
    /// Also what is slow: the newest kernel, and long tests in virtual machines
    #[arg(long)]
    all: bool,
    /// Only what an ordinary run skips, on one kernel, but for the tests with a Kubernetes cluster
    #[arg(long, conflicts_with_all = ["stages", "all"])]
    rest: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting
    Fmt,
    /// Lints, warnings denied
    Clippy,
    /// Unit and in-process tests, the next two included
    Unit,
    /// What reads files, pods, NRI and requests, on made-up inputs
    Fuzz,
    /// The probes on this host's kernel (needs root and BPF)
    Host,
    /// The kubelet's recorded decisions
    Conformance,
    /// The crates' dependencies against the table of allowed ones, that their modules form no circle, that no large type
    /// does input or output, and that what the page about the architecture names is there
    Deps,
    /// Licences, sources, duplicates and advisories of all dependencies
    Deny,
    /// Alerts and recording rules: firing and quiet cases; and the book's settings for Alertmanager
    Rules,
    /// The Kubernetes manifests against the schemas of Kubernetes and of the Prometheus operator, and the Helm chart
    /// against the manifests; the list of system calls, and the exposure of the unit
    Manifests,
    /// The book: it is made, and its links lead somewhere; and no text has words that docs/style.md rules out
    Book,
    /// The page in a headless browser, and that of a daemon on this host
    Page,
    /// The API of a daemon: made-up requests
    Api,
    /// Dashboards and rules on a real Prometheus that scrapes a virtual machine (with --all)
    Dashboards,
    /// The way of somebody new: clone, demo, red page, fix, green page, and how long that takes (with --all)
    Newcomer,
    /// End-to-end tests in virtual machines, kernel after kernel (those with a Kubernetes cluster or with containerd 2.3:
    /// with --all, where `NUMAWARD_KUBERNETES` and `NUMAWARD_CONTAINERD` name their programs; see `vm test --help`)
    Vm,
}

const DEFAULT: &[Stage] = &[
    Stage::Fmt,
    Stage::Clippy,
    Stage::Unit,
    Stage::Fuzz,
    Stage::Deps,
    Stage::Deny,
    Stage::Rules,
    Stage::Manifests,
    Stage::Book,
    Stage::Page,
    Stage::Api,
    Stage::Vm,
];
/// What `--all` adds.
const SLOW: &[Stage] = &[Stage::Dashboards, Stage::Newcomer];
/// Names a copy of the database of advisories, a git repository.
const ADVISORIES: &str = "NUMAWARD_ADVISORIES";
/// Where cargo-deny has it from.
const DATABASE: &str = "https://github.com/RustSec/advisory-db";
/// What is not built for this host.
const EBPF: &str = "numaward-ebpf";

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    let slow = if arguments.all { SLOW } else { &[] };
    let usual = if arguments.rest { [SLOW, &[Stage::Vm]].concat() } else { [DEFAULT, slow].concat() };
    let stages = if arguments.stages.is_empty() { &usual } else { &arguments.stages };
    let kernels = if arguments.all {
        kernels::names(Arch::Amd64)
    } else if arguments.rest {
        vec![kernels::DEFAULT]
    } else {
        kernels::USUAL.to_vec()
    };
    let names = if arguments.rest { vm::rest() } else { Vec::new() };

    let folders = vm::Folders::from_environment();

    let mut results = Vec::new();
    record(&mut results, "setup", || setup::ensure(&parts(stages, &kernels)?));
    for &stage in stages {
        match stage {
            Stage::Vm => {
                for kernel in &kernels {
                    let test = || vm::test(Arch::Amd64, kernel, &names, arguments.all, &folders);
                    record(&mut results, &format!("vm {kernel}"), test);
                }
            }
            _ => record(&mut results, &format!("{stage:?}").to_lowercase(), || run(stage, arguments.all)),
        }
    }
    summary(&results)
}

fn parts(stages: &[Stage], kernels: &[&str]) -> Result<Vec<Part>> {
    let kernel = |name: &str| kernels::find(Arch::Amd64, name).map(|of| Part::Kernel(Arch::Amd64, of));
    let mut parts = Vec::new();
    for stage in stages {
        match stage {
            Stage::Unit => parts.extend([Part::Ebpf, Part::Commands]),
            Stage::Clippy | Stage::Host => parts.push(Part::Ebpf),
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
                parts.extend([Part::Ebpf, Part::Qemu(Arch::Amd64)]);
                parts.extend([&DebianTool::PROMETHEUS, &DebianTool::VICTORIA_METRICS].map(Part::DebianTool));
                parts.push(kernel(kernels::DEFAULT)?);
            }
            Stage::Newcomer => {
                parts.extend([Part::Ebpf, Part::Qemu(Arch::Amd64), Part::Browser]);
                parts.push(kernel(kernels::DEFAULT)?);
            }
            Stage::Vm => {
                parts.extend([Part::Ebpf, Part::Qemu(Arch::Amd64), Part::Debian(Arch::Amd64)]);
                for name in kernels {
                    parts.push(kernel(name)?);
                }
            }
            Stage::Fmt | Stage::Conformance | Stage::Deps => {}
        }
    }
    parts.dedup();
    Ok(parts)
}

fn run(stage: Stage, thorough: bool) -> Result<()> {
    let mut cargo = command::cargo();
    match stage {
        Stage::Fmt => cargo.args(["fmt", "--all", "--check"]),
        Stage::Clippy => {
            cargo.args(["clippy", "--workspace", "--exclude", EBPF, "--all-targets", "--", "-D", "warnings"])
        }
        Stage::Unit => cargo.arg("test").args(build::WORKSPACE),
        Stage::Host => cargo.args(["test", "--package", "numaward-probes", "--test", "host"]),
        Stage::Conformance => cargo.args(["test", "--package", "numaward-engine", "--test", "conformance"]),
        Stage::Fuzz => return fuzz::test(1),
        Stage::Deps => {
            dependencies::check()?;
            modules::check()?;
            return architecture::check();
        }
        Stage::Deny => return deny(),
        Stage::Rules => return rules(),
        Stage::Manifests => return manifests::check(),
        Stage::Book => return words::check().and_then(|()| book::test()),
        Stage::Page => return page(),
        Stage::Api => return api::test(thorough, if thorough { command::new_seed() } else { 1 }),
        Stage::Dashboards => return dashboards::test(command::root()),
        Stage::Newcomer => cargo.args(["xtask", "screenshots", "--newcomer"]),
        Stage::Vm => bail!("virtual machines are tested kernel by kernel"),
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
    // The database of advisories is a repository of its own, which not every network reaches: a copy of it will do.
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
    for (action, file) in [("check", "rules.yaml"), ("test", "rules_test.yaml")] {
        let mut promtool = DebianTool::PROMETHEUS.command(&cache, "promtool");
        command::run(promtool.args([action, "rules", file]).current_dir(&rules))?;
    }
    alertmanager(&cache, &fs::read_to_string(rules.join("rules.yaml"))?)
}

/// The settings for Alertmanager in the book are ones that it takes, and name alerts that there are.
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
    // Whom it sends to is the reader's.
    fs::write(&file, format!("{settings}receivers: [{{name: default}}, {{name: pager}}]\n"))?;
    command::run(DebianTool::ALERTMANAGER.command(cache, "amtool").arg("check-config").arg(&file))
}

fn page() -> Result<()> {
    let tests = page_tests()?;
    let (daemon, controlled) = (build::tested_program()?, build::tested_test("control")?);
    let mut node = Command::new("node");
    node.arg("--test").env("NUMAWARD", daemon).env("CONTROLLED_NUMAWARD", controlled);
    command::run(node.current_dir(tests))
}

/// The folder of what drives the page, with what it needs.
pub(crate) fn page_tests() -> Result<PathBuf> {
    let tests = command::root().join("tests/page");
    // The browser is the system's.
    command::run(command::npm_ci(&tests).env("PUPPETEER_SKIP_DOWNLOAD", "1"))?;
    Ok(tests)
}

struct Outcome {
    name: String,
    took: Duration,
    result: Result<()>,
}

fn record(results: &mut Vec<Outcome>, name: &str, run: impl FnOnce() -> Result<()>) {
    println!("\n=== {name}");
    let started = Instant::now();
    let result = run();
    if let Err(error) = &result {
        eprintln!("error: {name}: {error:#}");
    }
    results.push(Outcome { name: name.to_owned(), took: started.elapsed(), result });
}

fn summary(results: &[Outcome]) -> ExitCode {
    println!("\n=== summary");
    for Outcome { name, took, result } in results {
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        println!("{name:<12} {word:<6} {:>5} s", took.as_secs());
    }
    let failed = results.iter().filter(|outcome| outcome.result.is_err()).count();
    println!("\n{} passed, {failed} failed", results.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! `cargo xtask bench`, `cargo xtask conformance` and `cargo xtask simulate`: short names of cargo commands.

use std::ffi::OsString;
use std::path::{self, Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use numaward_vm::{Arch, Cache, GuestTopology, Kernel, Vm};

use crate::setup::{self, DebianTool, Part, kernels};
use crate::{budgets, build, command, idle, vm};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum BenchName {
    /// Nanoseconds per event of each probe, compared with a program that does nothing (needs root and BPF)
    Probes,
    /// A scrape of 10,000 workloads on 8 nodes
    Scrape,
    /// A decision of each strategy, on growing machines
    Engine,
    /// From a request to the last written knob, with up to 1,000 workloads
    Enforce,
    /// CPU and memory that the daemon uses while nothing happens
    Idle,
    /// Each of the above, or the named ones: fails if a budget is exceeded
    Budgets,
    /// Creation of containers while 50 clients read the state of 1,000 workloads
    Answers,
    /// 1,000 admissions a second, 50 scrapers and 1,000 clients that read a byte a second, for a minute
    Load,
    /// Memory of the daemon during the creation and removal of 10,000 pods by a fake container runtime
    Soak,
    /// The scheduler of Kubernetes with resource claims on many synthetic hosts (needs --kubernetes; `-- --help` lists its options)
    Scheduler,
}

#[derive(Args)]
pub(crate) struct BenchArguments {
    #[arg(value_enum)]
    name: BenchName,
    /// enforce, probes: run in an emulated machine with two nodes, with a kernel that has all features; the times then
    /// mean nothing
    #[arg(long)]
    vm: bool,
    /// idle: duration in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// scheduler: folder with kube-apiserver, kube-controller-manager and kube-scheduler, each unpacked or as .xz
    #[arg(long, value_name = "DIR", env = vm::KUBERNETES)]
    kubernetes: Option<PathBuf>,
    /// Arguments for the benchmark
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    let (package, bench) = match arguments.name {
        BenchName::Probes if arguments.vm => return in_vm("numaward-probes", "probes", "probes"),
        BenchName::Probes => ("numaward-probes", "probes"),
        BenchName::Scrape => ("numaward-daemon", "scrape"),
        BenchName::Enforce if arguments.vm => return in_vm("numaward-daemon", "enforce", "enforce --real"),
        BenchName::Enforce => ("numaward-daemon", "enforce"),
        BenchName::Answers => ("numaward-daemon", "answers"),
        BenchName::Load => ("numaward-daemon", "load"),
        BenchName::Soak => ("numaward-daemon", "soak"),
        BenchName::Budgets => return budgets::run(&arguments.arguments),
        BenchName::Idle => return idle::measure(Duration::from_secs(arguments.seconds)),
        BenchName::Scheduler => return scheduler(arguments),
        BenchName::Engine => {
            for bench in ["native", "admission"] {
                run("numaward-engine", bench, &arguments.arguments)?;
            }
            return Ok(ExitCode::SUCCESS);
        }
    };
    setup::ensure(&[Part::Ebpf])?;
    run(package, bench, &arguments.arguments).map(|()| ExitCode::SUCCESS)
}

/// Runs many synthetic hosts against a control plane.
fn scheduler(arguments: &BenchArguments) -> Result<ExitCode> {
    let Some(of_kubernetes) = scheduler_arguments(arguments)? else {
        // Also if `CI=true`: Debian has no package of Kubernetes.
        println!(
            "skipped: the programs of Kubernetes are not part of this repository: give --kubernetes DIR"
        );
        return Ok(ExitCode::SUCCESS);
    };
    setup::ensure(&[Part::DebianTool(&DebianTool::CLUSTER)])?;
    let mut cargo = command::cargo();
    cargo.args(["run", "--quiet", "--profile", build::DIST, "--package=numaward-scale", "--"]);
    cargo.arg("--etcd").arg(Cache::locate()?.root().join("tools/cluster/etcd"));
    cargo.args(of_kubernetes);
    command::run(&mut cargo).map(|()| ExitCode::SUCCESS)
}

/// Returns the arguments of `numaward-scale`; `None` if no argument names the programs of Kubernetes.
fn scheduler_arguments(arguments: &BenchArguments) -> Result<Option<Vec<OsString>>> {
    let mut more: Vec<OsString> = arguments.arguments.iter().map(OsString::from).collect();
    let has =
        |name: &str| arguments.arguments.iter().any(|argument| argument.split('=').next() == Some(name));
    // After another argument for the benchmark, all arguments are for the benchmark.
    if has("--kubernetes") || has("--help") {
        return Ok(Some(more));
    }
    let Some(folder) = &arguments.kubernetes else { return Ok(None) };
    // Cargo runs in the checkout's root.
    let folder = path::absolute(folder).with_context(|| format!("cannot resolve {}", folder.display()))?;
    more.extend(["--kubernetes".into(), folder.into()]);
    Ok(Some(more))
}

fn run(package: &str, bench: &str, arguments: &[String]) -> Result<()> {
    let mut cargo = command::cargo();
    // With the profile of released programs, and in the same folder, so that no crate is built twice.
    cargo.args(["bench", "--profile", build::DIST, "--package", package, "--bench", bench, "--"]);
    cargo.args(arguments);
    command::run(&mut cargo)
}

/// Runs a benchmark in a machine with two nodes.
fn in_vm(package: &str, bench: &str, command: &str) -> Result<ExitCode> {
    let (arch, kernel) = (Arch::Amd64, kernels::DEFAULT);
    setup::ensure(&[Part::Ebpf, Part::Qemu(arch), Part::Kernel(arch, kernels::find(arch, kernel)?)])?;
    let program = build::static_bench(package, bench, "release")?;
    let machine = GuestTopology::parse(Some(2), None, None, None)?;
    let vm = Vm::new(Kernel::find(&Cache::locate()?, arch, kernel)?, machine).limit(Duration::from_mins(15));
    println!("Linux {kernel} under emulation: these times mean nothing, regardless of the budget");
    match vm::attend(vm.file(program, format!("/bin/{bench}")).start(command)?, || {})?.1 {
        // 1: over the budget, which is ignored here. A benchmark that could not run has printed the reason.
        Ok(0 | 1) => Ok(ExitCode::SUCCESS),
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => Err(error.into()),
    }
}

#[derive(Args)]
pub(crate) struct Conformance {
    /// The folder of vectors [default: the repository's own]
    folder: Option<PathBuf>,
    /// A folder of fault scenarios: `kubelet` is compared with the record, `native` with the desired results
    #[arg(long, value_name = "DIR", conflicts_with = "folder")]
    faults: Option<PathBuf>,
}

pub(crate) fn conformance(arguments: &Conformance) -> Result<ExitCode> {
    match &arguments.faults {
        Some(folder) => engine("faults", Some(folder)),
        None => engine("conformance", arguments.folder.as_deref()),
    }
}

#[derive(Args)]
pub(crate) struct Simulate {
    /// The folder of traces [default: the repository's own]
    folder: Option<PathBuf>,
}

pub(crate) fn simulate(arguments: &Simulate) -> Result<ExitCode> {
    engine("simulate", arguments.folder.as_deref())
}

/// Runs an example program of the engine on a folder.
fn engine(example: &str, folder: Option<&Path>) -> Result<ExitCode> {
    let mut cargo = command::cargo();
    cargo.args(["run", "--quiet", "--profile=dist", "--package=numaward-engine", "--example", example, "--"]);
    if let Some(folder) = folder {
        // Cargo runs in the checkout's root.
        cargo.arg(path::absolute(folder).with_context(|| format!("cannot resolve {}", folder.display()))?);
    }
    command::run(&mut cargo).map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        bench: BenchArguments,
    }

    #[test]
    fn scheduler_needs_programs() {
        let arguments = |text: &[&str]| {
            let command = Command::parse_from(["bench", "scheduler"].iter().chain(text));
            let found = scheduler_arguments(&BenchArguments {
                kubernetes: command.bench.kubernetes.filter(|_| text.contains(&"--kubernetes")),
                ..command.bench
            });
            found
                .unwrap()
                .map(|all| all.into_iter().map(|one| one.into_string().unwrap()).collect::<Vec<_>>())
        };
        assert_eq!(arguments(&["--hosts", "100"]), None);
        let named = ["--kubernetes", "/k8s"];
        let hosts = ["--hosts", "300", "--run", "plain", "fixed"];
        assert_eq!(arguments(&[&named[..], &hosts].concat()).unwrap(), [&hosts[..], &named].concat());
        assert_eq!(arguments(&[&hosts[..], &named].concat()).unwrap(), [&hosts[..], &named].concat());
        assert_eq!(arguments(&["--seed", "2", "--help"]).unwrap(), ["--seed", "2", "--help"]);
    }
}

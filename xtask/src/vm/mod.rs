//! `cargo xtask vm`: a machine for one script, and the end-to-end tests.

mod lanes;
mod runner;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand, ValueEnum};
use numaward_tests_support::is_ci;
use numaward_vm::{Arch, Cache, Debian, Forward, GuestTopology, Kernel, RunningVm, Vm};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

pub(crate) use self::lanes::{Lane, Programs, ROWS, TestRow};
use self::runner::{CpuLoad, Job, JobOutcome, JobVerdict, Runner};
use crate::setup::{self, DebianTool, DiskImage, Part, PythonTool, kernels};
use crate::{build, command, dist};

/// Exit code of `vm run` if the script has none (the same as in docker and podman).
const NO_EXIT_CODE: u8 = 125;

/// Packages and their programs.
const DAEMON: &str = "numaward";
const LOAD: &str = "numaward-load";
/// Programs that only the tests need inside a machine. They are built together with `numaward`, which therefore has two
/// features that the released program does not have: the crash check's `fault-points`, at which a variable makes the daemon
/// die, and kube's `testing`, with the fakes of the container runtime (for the answers check) and of the API server
/// (for `numaward-cri`). Only these three use them.
const HELPERS: &[&str] = &[
    "numaward-answers-check",
    "numaward-capabilities",
    "numaward-crash-check",
    "numaward-cri",
    "numaward-enforce-check",
    "numaward-harm-check",
];
/// Default folder of Kubernetes' programs, relative to the checkout.
const DEFAULT_KUBERNETES: &str = "../shared/kubernetes";
/// File names of one of these programs, unpacked or packed.
const KUBELET: [&str; 2] = ["kubelet", "kubelet.xz"];
/// Variables with the folders of [`Folders`], also for the tests.
pub(crate) const KUBERNETES: &str = "NUMAWARD_KUBERNETES";
const NEW_CONTAINERD: &str = "NUMAWARD_CONTAINERD";
const CRIO: &str = "NUMAWARD_CRIO";
/// Variable with the folder of the generator of gRPC clients, for the same tests.
const GRPC_TOOLS: &str = "NUMAWARD_GRPC_TOOLS";
/// Variable with the folder of the Helm library, for the same tests.
const HELM: &str = "NUMAWARD_HELM";

#[derive(Subcommand)]
pub(crate) enum Task {
    /// Boots a machine, runs a script as root inside, and ends with its exit code (125 if the machine failed)
    Run(Box<RunArguments>),
    /// Runs end-to-end tests in machines
    Test(TestArguments),
}

pub(crate) fn main(task: &Task) -> Result<ExitCode> {
    match task {
        Task::Run(run) => run.main(),
        Task::Test(test) => test.main(),
    }
}

#[derive(Args)]
pub(crate) struct TestArguments {
    /// Only tests with a name that contains one of these [default: those of a lane]
    names: Vec<String>,
    /// Processor of the machines
    #[arg(long, default_value_t)]
    arch: Arch,
    /// Kernel to test on; may be repeated [default: those on which the tests run in any lane]
    #[arg(long = "kernel", value_parser = kernels::all_names())]
    kernels: Vec<String>,
    /// The tests and kernels of this lane [default: ci, unless tests are named]
    #[arg(long)]
    lane: Option<Lane>,
    /// Runs long tests in full: 200 kills and losses of power
    #[arg(long)]
    full: bool,
    /// Seed of random inputs
    #[arg(long, env = "NUMAWARD_SEED", default_value_t = 1)]
    seed: u32,
    #[command(flatten)]
    folders: Folders,
}

/// Folders with programs that Debian does not have, or not in a new enough version.
#[derive(Args, Default)]
pub(crate) struct Folders {
    /// Folder with kube-apiserver, kube-controller-manager, kube-scheduler and kubelet, each unpacked or as .xz, for
    /// the tests `cluster::`. If such a test is named, the default is the folder `kubernetes` in `shared` beside the
    /// checkout, if it exists
    #[arg(long, value_name = "DIR", env = KUBERNETES)]
    kubernetes: Option<PathBuf>,
    /// Folder with containerd, containerd-shim-runc-v2 and ctr of containerd 2.3 or newer, instead of Debian's
    /// containerd 2.1, and for the tests `containerd::newer`, which also need runc 1.4 or newer there
    #[arg(long, value_name = "DIR", env = NEW_CONTAINERD)]
    containerd: Option<PathBuf>,
    /// Folder with crio and pinns of CRI-O, for the tests `containerd::crio`
    #[arg(long, value_name = "DIR", env = CRIO)]
    crio: Option<PathBuf>,
}

impl Folders {
    pub(crate) fn from_environment() -> Self {
        let folder = |name: &str| env::var_os(name).map(PathBuf::from);
        Self { kubernetes: folder(KUBERNETES), containerd: folder(NEW_CONTAINERD), crio: folder(CRIO) }
    }

    /// Returns the folders with defaults for missing ones, if one of the named tests needs them.
    fn or_default(&self, names: &[String], checkout: &Path) -> Self {
        let beside = || {
            let folder = checkout.join(DEFAULT_KUBERNETES);
            let is_there = KUBELET.iter().any(|name| folder.join(name).is_file());
            (is_there && names.iter().any(|name| name.starts_with(CLUSTER))).then_some(folder)
        };
        Self {
            kubernetes: self.kubernetes.clone().or_else(beside),
            containerd: self.containerd.clone(),
            crio: self.crio.clone(),
        }
    }

    fn folder_of(&self, programs: Programs) -> Option<&PathBuf> {
        match programs {
            Programs::Kubernetes => self.kubernetes.as_ref(),
            Programs::Containerd => self.containerd.as_ref(),
            Programs::Crio => self.crio.as_ref(),
        }
    }

    /// Returns the variables by which the tests find the folders.
    fn variables(&self) -> Result<BTreeMap<&'static str, String>> {
        let folders = [
            (KUBERNETES, "--kubernetes", &self.kubernetes),
            (NEW_CONTAINERD, "--containerd", &self.containerd),
            (CRIO, "--crio", &self.crio),
        ];
        folders
            .into_iter()
            .filter_map(|(name, option, folder)| Some((name, option, folder.as_ref()?)))
            .map(|(name, option, folder)| {
                let path = fs::canonicalize(folder);
                let path = path.with_context(|| format!("{option} {}", folder.display()))?;
                Ok((name, path.display().to_string()))
            })
            .collect()
    }
}

impl TestArguments {
    fn main(&self) -> Result<ExitCode> {
        let folders = self.folders.or_default(&self.names, command::root());
        let selection = Selection {
            arch: self.arch,
            names: &self.names,
            lane: self.lane,
            kernels: &self.kernels,
            is_long: self.full,
            seed: self.seed,
        };
        test(&selection, &folders, None)?.finish()
    }
}

/// The tests to run.
pub(crate) struct Selection<'a> {
    pub(crate) arch: Arch,
    /// Parts of names; all tests if there are none.
    pub(crate) names: &'a [String],
    /// Only the tests and kernels of this lane.
    pub(crate) lane: Option<Lane>,
    /// Only these kernels; named tests run on each of these, regardless of the lanes.
    pub(crate) kernels: &'a [String],
    /// Runs long tests in full, which the lane [`Lane::Rest`] does anyway.
    pub(crate) is_long: bool,
    /// Seed of random inputs.
    pub(crate) seed: u32,
}

impl Selection<'_> {
    /// Returns the jobs, and the tests that do not run because their programs are missing.
    fn jobs(&self, folders: &Folders) -> Result<(Vec<Job>, Vec<&'static str>)> {
        let is_named = |row: &&TestRow| {
            self.names.is_empty() || self.names.iter().any(|name| row.test.contains(name.as_str()))
        };
        let rows: Vec<_> = ROWS.iter().filter(is_named).filter(|row| row.runs_on(self.arch)).collect();
        anyhow::ensure!(
            !rows.is_empty(),
            "no end-to-end test for {} is called {}",
            self.arch,
            self.names.join(" or ")
        );
        let lane = self.lane.or_else(|| self.names.is_empty().then_some(Lane::Ci));
        let (mut jobs, mut without_programs) = (Vec::new(), Vec::new());
        for row in rows {
            let of_table: Vec<_> = match (self.arch, lane) {
                (Arch::Arm64, _) => row.arm64_kernels().to_vec(),
                (Arch::Amd64, Some(lane)) => row.kernels(lane).collect(),
                (Arch::Amd64, None) => row.all_kernels(),
            };
            let kernels = if self.kernels.is_empty() {
                of_table
            } else {
                let wanted = self.kernels.iter().map(|name| Ok(kernels::find(self.arch, name)?.name));
                let wanted = wanted.collect::<Result<Vec<_>>>()?;
                let is_wanted = |kernel: &&str| !self.names.is_empty() || of_table.contains(kernel);
                wanted.into_iter().filter(is_wanted).collect()
            };
            if !kernels.is_empty()
                && row.programs.is_some_and(|programs| folders.folder_of(programs).is_none())
            {
                without_programs.push(row.test);
                continue;
            }
            let is_long = self.is_long || lane == Some(Lane::Rest);
            jobs.extend(kernels.into_iter().map(|kernel| Job { test: row.test, kernel, is_long, round: 1 }));
        }
        Ok((jobs, without_programs))
    }
}

/// The results of end-to-end tests.
pub(crate) struct Results {
    pub(crate) outcomes: Vec<JobOutcome>,
}

/// Number of tests in the list of the slowest.
const MAX_SLOWEST: usize = 5;

impl Results {
    /// Prints the slowest tests, and the failed tests with the number of rounds in which they failed.
    pub(crate) fn print(&self) {
        let mut slowest: Vec<_> = self.outcomes.iter().filter(|outcome| outcome.job.round == 1).collect();
        slowest.sort_by_key(|outcome| Reverse(outcome.took));
        println!("\nslowest tests:");
        for outcome in slowest.into_iter().take(MAX_SLOWEST) {
            println!("{:>6} s  {}", outcome.took.as_secs(), outcome.job);
        }
        let restarts: usize = self.outcomes.iter().map(|outcome| outcome.restarts).sum();
        println!("machines that did not come up and were started again: {restarts}");
        let rounds = self.outcomes.iter().map(|outcome| outcome.job.round).max().unwrap_or(0);
        let mut failures: BTreeMap<(&str, &str), u32> = BTreeMap::new();
        for Job { test, kernel, .. } in self.failed() {
            *failures.entry((test, kernel)).or_default() += 1;
        }
        for ((test, kernel), count) in failures {
            println!("FAILED: {test} on {kernel}, in {count} of {rounds} rounds");
        }
    }

    fn failed(&self) -> impl Iterator<Item = &Job> {
        self.outcomes
            .iter()
            .filter(|outcome| outcome.verdict == JobVerdict::Failed)
            .map(|outcome| &outcome.job)
    }

    /// Fails if a test failed, or was skipped in continuous integration.
    pub(crate) fn check(&self) -> Result<()> {
        let failed = self.failed().count();
        anyhow::ensure!(failed == 0, "{failed} of {} end-to-end tests failed", self.outcomes.len());
        let skipped = self.outcomes.iter().filter(|outcome| outcome.verdict == JobVerdict::Skipped).count();
        anyhow::ensure!(!is_ci() || skipped == 0, "{skipped} end-to-end tests were skipped");
        Ok(())
    }

    fn finish(&self) -> Result<ExitCode> {
        self.print();
        self.check()?;
        println!("\n{} passed, 0 failed", self.outcomes.len());
        Ok(ExitCode::SUCCESS)
    }
}

/// Prefixes of tests that need files of `cargo xtask dist`.
const NEEDS_PACKAGES: [&str; 4] = ["cluster::", "deploy::", "package::", PACKAGES];
/// Prefix of tests with package managers.
const PACKAGES: &str = "packages::";
/// Prefix of tests with a Kubernetes cluster, which need its programs.
const CLUSTER: &str = "cluster::";
/// Prefix of tests that run the probes' own test program, and the name of this program.
const HOST: &str = "host::";
const HOST_PROGRAM: &str = "numaward-probes-host";
/// Prefix of tests of the guides, which need their software.
const GUIDES: &str = "guides::";
/// Prefix of tests with a container runtime.
const CONTAINERD: &str = "containerd::";

/// Builds everything that the selected tests need, once, and runs them; `rounds` times under load if given.
pub(crate) fn test(selection: &Selection<'_>, folders: &Folders, rounds: Option<u32>) -> Result<Results> {
    let arch = selection.arch;
    let (jobs, without_programs) = selection.jobs(folders)?;
    if !without_programs.is_empty() {
        println!(
            "not run: {}: give --kubernetes DIR, --containerd DIR or --crio DIR (see CONTRIBUTING.md)",
            without_programs.join(", ")
        );
    }
    anyhow::ensure!(!jobs.is_empty(), "no test is left to run: the lane or the kernels exclude all of them");
    let uses = |beginnings: &[&str]| {
        jobs.iter().any(|job| beginnings.iter().any(|beginning| job.test.starts_with(beginning)))
    };
    let mut parts = vec![Part::Compiler(arch), Part::Qemu(arch), Part::Debian(arch)];
    for kernel in jobs.iter().map(|job| job.kernel).collect::<BTreeSet<_>>() {
        parts.push(Part::Kernel(arch, kernels::find(arch, kernel)?));
    }
    if uses(&[CONTAINERD, CLUSTER, "deploy::", "doors::"]) {
        parts.push(Part::Containerd(arch));
        parts.push(Part::DebianTool(&DebianTool::KUSTOMIZE));
    }
    if arch == Arch::Amd64 {
        parts.push(Part::DebianTool(&DebianTool::IRQBALANCE));
        parts.push(Part::DebianTool(&DebianTool::JQ));
        parts.push(Part::DebianTool(&DebianTool::NUMACTL));
    }
    if uses(&[CLUSTER]) {
        parts.push(Part::DebianTool(&DebianTool::CLUSTER));
        parts.push(Part::PythonTool(&PythonTool::GRPC));
        parts.push(Part::PythonTool(&PythonTool::HELM));
    }
    if uses(&[GUIDES]) {
        parts.extend([Part::Image(&DiskImage::GUIDES), Part::Image(&DiskImage::NEW_GUIDES)]);
    }
    if uses(&[PACKAGES]) {
        parts.extend([Part::Image(&DiskImage::PACKAGES), Part::Packages]);
    }
    setup::ensure(&parts)?;

    let programs = all_programs(arch)?;
    let folder =
        programs.iter().find_map(|(_, path)| path.parent()).context("cargo has built no programs")?;
    if uses(&[HOST]) {
        let program = build::static_test(arch, "numaward-probes", "host", "release")?;
        fs::copy(&program, folder.join(HOST_PROGRAM))
            .with_context(|| format!("cannot copy {}", program.display()))?;
    }
    if uses(&NEEDS_PACKAGES) {
        make_packages(daemon(&programs)?, folder, uses(&[PACKAGES]))
            .context("cannot make what users are given")?;
    }
    let mut variables = folders.variables()?;
    variables.insert("NUMAWARD_VM_PROGRAMS", folder.display().to_string());
    variables.insert("NUMAWARD_SEED", selection.seed.to_string());
    variables.insert("NUMAWARD_VM_ARCH", arch.name().to_owned());
    variables.insert(HELM, PythonTool::HELM.folder(&Cache::locate()?).display().to_string());
    variables.insert(GRPC_TOOLS, PythonTool::GRPC.folder(&Cache::locate()?).display().to_string());
    let program = build::tested_test("e2e")?.path;
    // A run of named tests continues while another test is being written.
    if selection.names.is_empty() {
        let listed = command::read(Command::new(&program).arg("--list"))?;
        let tests = listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned);
        lanes::check(&tests.collect::<Vec<_>>())?;
    }

    let slots = thread::available_parallelism()?.get();
    println!("{} tests, {slots} at once", jobs.len());
    let runner = Runner { arch, program, variables, slots };
    let Some(rounds) = rounds else { return Ok(Results { outcomes: runner.run(jobs)? }) };
    let _load = CpuLoad::start()?;
    let repeated = |round| jobs.iter().map(move |job| Job { round, ..job.clone() });
    Ok(Results { outcomes: runner.run((1..=rounds).flat_map(repeated).collect())? })
}

/// Makes the packages of this program in the folder `dist` beside it, and if requested the packages of the next version
/// in `next`. Both are signed with a temporary key.
fn make_packages(program: &PathBuf, folder: &Path, has_next: bool) -> Result<()> {
    setup::ensure(&[Part::Gpg])?;
    // Another run may make the same packages; the lock ends with this function.
    let lock = fs::File::create(folder.join("dist.lock"))?;
    lock.lock()?;
    let signer = dist::Signer::throw_away()?;
    let out = folder.join("dist");
    let programs = slice::from_ref(program);
    dist::make(programs, &dist::ProgramOrigin::Given(programs), &out, None, Some(&signer))?;
    if has_next {
        dist::make_next(program, &folder.join("next"), &out, &signer)?;
    }
    Ok(())
}

/// The nodes of a machine.
#[derive(Args, Clone)]
pub(crate) struct Layout {
    /// Number of NUMA nodes [default: as many as the lists below have entries, else 2]
    #[arg(long)]
    nodes: Option<usize>,
    /// CPUs of each node, such as 2,2,0; 0 makes a memory-only node [default: 2 each]
    #[arg(long)]
    cpus: Option<String>,
    /// Memory of each node, such as 512M,1G,256M [default: 512M each]
    #[arg(long)]
    memory: Option<String>,
    /// Distances row by row, such as '10,21;21,10' [default: the kernel's 10 and 20]
    #[arg(long)]
    distances: Option<String>,
    /// CPUs of each core
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,
    /// Memory-only nodes with memory that the firmware reports as slow, such as 2,3 (ACPI)
    #[arg(long, value_delimiter = ',')]
    slow: Vec<usize>,
}

/// The first process of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Init {
    /// A minimal script, which boots in a few seconds
    Busybox,
    /// systemd, on a Debian root file system
    Systemd,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// Processor of the machine
    #[arg(long, default_value_t)]
    arch: Arch,
    /// Kernel to boot
    #[arg(long, default_value = kernels::DEFAULT, value_parser = kernels::all_names())]
    kernel: String,
    /// Describes the machine by a device tree instead of ACPI (arm64 only)
    #[arg(long)]
    device_tree: bool,
    #[command(flatten)]
    layout: Layout,
    /// First process in the machine
    #[arg(long, value_enum, default_value_t = Init::Busybox)]
    init: Init,
    /// More arguments for the kernel
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    append: Option<String>,
    /// Seconds after which the machine is stopped
    #[arg(long, value_name = "S", default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Copies a file into the machine with its mode; may be repeated
    #[arg(long, value_name = "HOSTFILE:GUESTPATH", value_parser = copy)]
    copy: Vec<(PathBuf, String)>,
    /// Forwards a TCP port of 127.0.0.1 to a port of the machine; may be repeated
    #[arg(long, value_name = "HOSTPORT:GUESTPORT")]
    forward: Vec<Forward>,
    /// Does not build numaward into the machine
    #[arg(long)]
    no_daemon: bool,
    /// The script (busybox sh) to run
    #[arg(long, value_name = "FILE", required_unless_present = "command")]
    script: Option<PathBuf>,
    /// A command to run instead of a script
    #[arg(last = true, conflicts_with = "script")]
    command: Vec<String>,
}

impl RunArguments {
    fn main(&self) -> Result<ExitCode> {
        let layout = &self.layout;
        let machine = GuestTopology::parse(
            layout.nodes,
            layout.cpus.as_deref(),
            layout.memory.as_deref(),
            layout.distances.as_deref(),
        )?
        .with_threads(layout.threads)?
        .with_slow(&layout.slow)?;
        let script = match &self.script {
            Some(path) => fs::read_to_string(path)
                .with_context(|| format!("cannot read the script {}", path.display()))?,
            None => self.command.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "),
        };
        let arch = self.arch;
        let kernel = Part::Kernel(arch, kernels::find(arch, &self.kernel)?);
        setup::ensure(&[Part::Compiler(arch), Part::Qemu(arch), kernel])?;
        let cache = Cache::locate()?;
        let kernel = Kernel::find(&cache, arch, &self.kernel)?;
        let mut vm = Vm::new(kernel, machine).limit(Duration::from_secs(self.timeout));
        if self.device_tree {
            anyhow::ensure!(arch == Arch::Arm64, "--device-tree: there is none on {arch}");
            vm = vm.device_tree();
        }
        if self.init == Init::Systemd {
            setup::ensure(&[Part::Debian(arch)])?;
            vm = vm.systemd(Debian::find(&cache, arch)?);
        }
        for (name, path) in programs(arch, !self.no_daemon)? {
            vm = vm.file(path, format!("/bin/{name}"));
        }
        for (host, guest) in &self.copy {
            vm = vm.file(host, guest);
        }
        for &forward in &self.forward {
            vm = vm.forward(forward);
        }
        if let Some(arguments) = &self.append {
            vm = vm.append(arguments);
        }
        match attend(vm.start(&script)?, || {})?.1 {
            Ok(code) => Ok(ExitCode::from(code)),
            Err(error) => {
                eprintln!("error: {error}");
                Ok(ExitCode::from(NO_EXIT_CODE))
            }
        }
    }
}

/// Prints the output of a machine's script until the machine ends; SIGINT and SIGTERM stop it. Calls `check`
/// repeatedly. Returns whether there was a signal, and the script's result.
pub(crate) fn attend(
    running: RunningVm,
    mut check: impl FnMut() + Send,
) -> Result<(bool, Result<u8, numaward_vm::Error>)> {
    const CHECK_INTERVAL: Duration = Duration::from_millis(200);
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::clone(&signalled)).context("cannot register for signals")?;
    }
    let (stopper, ended) = (running.stopper(), AtomicBool::new(false));
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                if signalled.load(Ordering::Relaxed) {
                    stopper.stop();
                } else {
                    check();
                }
                thread::sleep(CHECK_INTERVAL);
            }
        });
        // Standard output is not locked here, because `check` may print.
        let result = running.finish(&mut io::stdout());
        ended.store(true, Ordering::Relaxed);
        result
    });
    Ok((signalled.load(Ordering::Relaxed), result))
}

/// Returns the static programs that every machine has on its PATH.
pub(crate) fn programs(arch: Arch, with_daemon: bool) -> Result<Vec<(String, PathBuf)>> {
    if !with_daemon {
        return build::static_programs(arch, &[LOAD], "release");
    }
    let mut programs = all_programs(arch)?;
    programs.retain(|(name, _)| [DAEMON, LOAD].contains(&name.as_str()));
    Ok(programs)
}

/// Returns the program that is daemon and command line. It is static, so it runs on this host too.
pub(crate) fn daemon(programs: &[(String, PathBuf)]) -> Result<&PathBuf> {
    let daemon = programs.iter().find(|(name, _)| name == DAEMON);
    daemon.map(|(_, path)| path).context("cargo has not built numaward")
}

/// Builds the daemon and the load only, because the programs of the tests take minutes to build.
pub(crate) fn few_programs(arch: Arch) -> Result<Vec<(String, PathBuf)>> {
    build::static_programs(arch, &[DAEMON, LOAD], "release")
}

/// Builds these programs together with those of the tests, so that each build serves both.
fn all_programs(arch: Arch) -> Result<Vec<(String, PathBuf)>> {
    setup::ensure(&[Part::Ebpf])?;
    let names = [&[DAEMON, LOAD], HELPERS].concat();
    if Arch::of_host() != Some(arch) {
        return build::static_programs(arch, &names, "release");
    }
    let targets: Vec<_> = names.iter().flat_map(|name| ["--bin", name]).collect();
    let programs = build::tested(&targets)?.into_iter().map(|built| (built.name, built.path));
    Ok(programs.filter(|(name, _)| names.contains(&name.as_str())).collect())
}

fn copy(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(':') {
        Some((host, guest)) if !host.is_empty() && guest.starts_with('/') => {
            Ok((host.into(), guest.to_owned()))
        }
        _ => Err("give HOSTFILE:GUESTPATH, with an absolute GUESTPATH".to_owned()),
    }
}

/// Quotes a word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_survive_shell() {
        let words = ["plain", "two words", "it's", "$HOME `x` \"y\" \\"];
        let script = format!("printf '%s\\n' {}", words.map(quote).join(" "));
        let output = command::read(Command::new("sh").args(["-c", &script])).unwrap();
        assert_eq!(output.lines().collect::<Vec<_>>(), words);
    }

    #[test]
    fn finds_kubernetes_beside_checkout() {
        let folder = tempfile::tempdir().unwrap();
        let checkout = folder.path().join("checkout");
        fs::create_dir(&checkout).unwrap();
        let beside = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            Folders::default().or_default(&names, &checkout).kubernetes
        };
        assert_eq!(beside(&["cluster::life"]), None);
        let programs = checkout.join(DEFAULT_KUBERNETES);
        fs::create_dir_all(&programs).unwrap();
        assert_eq!(beside(&["cluster::life"]), None, "there is none");
        fs::write(programs.join(KUBELET[1]), "").unwrap();
        assert_eq!(beside(&["soak::", "cluster::life"]), Some(programs));
        assert_eq!(beside(&["soak::"]), None);
        assert_eq!(beside(&[]), None);
        let given = Folders { kubernetes: Some("given".into()), ..Folders::default() };
        let found = given.or_default(&["cluster::".to_owned()], &checkout).kubernetes;
        assert_eq!(found, Some("given".into()));
    }

    #[test]
    fn parses_copies() {
        assert_eq!(copy("a:b:/c"), Ok(("a:b".into(), "/c".to_owned())));
        for wrong in ["", "a", "a:", ":/b", "a:b"] {
            assert!(copy(wrong).is_err(), "{wrong}");
        }
    }
}

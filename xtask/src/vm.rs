//! `cargo xtask vm`: a machine for one script.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand, ValueEnum};
use numaward_vm::{Arch, Cache, Debian, Forward, Kernel, Machine, Running, Vm};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::setup::{self, DebianTool, Image, Part, PythonTool, kernels};
use crate::{build, command, dist};

/// `vm run` ends with the script's exit code; with this one where there is none (as docker and podman do).
const NO_EXIT_CODE: u8 = 125;

/// The package of the end-to-end tests.
const TESTS: &str = "numaward-tests";
/// Packages, and their programs.
const DAEMON: &str = "numaward";
const LOAD: &str = "numaward-load";
/// Programs that only the tests need inside a machine. They are built together with `numaward`, which so has two
/// features more than what users get: the crash check's `fault-points`, at which a variable makes the daemon die, and
/// kube's `testing`, with the fakes by which the answers check plays the container runtime and `numaward-cri` the API server.
/// Only these three use them.
const HELPERS: &[&str] = &[
    "numaward-answers-check",
    "numaward-capabilities",
    "numaward-crash-check",
    "numaward-cri",
    "numaward-enforce-check",
];
/// Makes the tests run what is slow as well.
const SLOW: &str = "NUMAWARD_VM_SLOW";
/// The programs of Kubernetes, where no folder is given: seen from the checkout.
const BESIDE: &str = "../shared/kubernetes";
/// One of them, as it is or packed.
const KUBELET: [&str; 2] = ["kubelet", "kubelet.xz"];
/// Name the folders of [`Folders`], for the tests too.
pub(crate) const KUBERNETES: &str = "NUMAWARD_KUBERNETES";
const CONTAINERD: &str = "NUMAWARD_CONTAINERD";
/// Names the folder of what makes clients of gRPC, for the same tests.
const GRPC_TOOLS: &str = "NUMAWARD_GRPC_TOOLS";
/// A machine booting keeps one CPU of the host busy.
const MACHINES_AT_ONCE: usize = 2;

#[derive(Subcommand)]
pub(crate) enum Task {
    /// Boots a machine, runs a script as root inside, and ends with its exit code (125 if the machine failed)
    Run(Box<Run>),
    /// Runs the end-to-end tests in machines, kernel after kernel
    Test(Test),
}

pub(crate) fn main(task: &Task) -> Result<ExitCode> {
    match task {
        Task::Run(run) => run.main(),
        Task::Test(test) => test.main(),
    }
}

#[derive(Args)]
pub(crate) struct Test {
    /// Only tests whose name contains one of these
    names: Vec<String>,
    /// Processor of the machines
    #[arg(long, default_value_t)]
    arch: Arch,
    /// Kernel to test on; may be repeated [default: all]
    #[arg(long = "kernel", value_parser = kernels::all_names())]
    kernels: Vec<String>,
    /// Also what is slow
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    folders: Folders,
}

/// Folders with programs that Debian does not have, or not new enough.
#[derive(Args, Default)]
pub(crate) struct Folders {
    /// Folder with kube-apiserver, kube-controller-manager, kube-scheduler and kubelet, each as it is or as .xz, for the
    /// tests `cluster::`. Where such a test is named, it is by default the folder `kubernetes` in `shared` beside the checkout,
    /// if that is there
    #[arg(long, value_name = "DIR", env = KUBERNETES)]
    kubernetes: Option<PathBuf>,
    /// Folder with containerd, containerd-shim-runc-v2 and ctr of containerd 2.3 or newer, instead of Debian's
    /// containerd 2.1, and for the tests `containerd::newer`, which also need runc 1.4 or newer there
    #[arg(long, value_name = "DIR", env = CONTAINERD)]
    containerd: Option<PathBuf>,
}

impl Folders {
    pub(crate) fn from_environment() -> Self {
        let folder = |name: &str| env::var_os(name).map(PathBuf::from);
        Self { kubernetes: folder(KUBERNETES), containerd: folder(CONTAINERD) }
    }

    /// The same, with the default of what is not given, if one of the tests that are named needs it.
    fn or_default(&self, names: &[String], checkout: &Path) -> Self {
        let beside = || {
            let folder = checkout.join(BESIDE);
            let is_there = KUBELET.iter().any(|name| folder.join(name).is_file());
            (is_there && names.iter().any(|name| name.starts_with(CLUSTER))).then_some(folder)
        };
        Self { kubernetes: self.kubernetes.clone().or_else(beside), containerd: self.containerd.clone() }
    }

    /// The variables by which the tests find them.
    fn variables(&self) -> Result<Vec<(&'static str, PathBuf)>> {
        let folders =
            [(KUBERNETES, "--kubernetes", &self.kubernetes), (CONTAINERD, "--containerd", &self.containerd)];
        folders
            .into_iter()
            .filter_map(|(name, option, folder)| Some((name, option, folder.as_ref()?)))
            .map(|(name, option, folder)| {
                let path = fs::canonicalize(folder);
                Ok((name, path.with_context(|| format!("{option} {}", folder.display()))?))
            })
            .collect()
    }
}

impl Test {
    fn main(&self) -> Result<ExitCode> {
        let mut kernels: Vec<_> = self.kernels.iter().map(String::as_str).collect();
        if kernels.is_empty() {
            kernels = kernels::names(self.arch);
        }
        let folders = self.folders.or_default(&self.names, command::root());
        let mut failed = Vec::new();
        for kernel in kernels {
            println!("kernel {kernel}");
            if let Err(error) = test(self.arch, kernel, &self.names, self.all, &folders) {
                eprintln!("error: kernel {kernel}: {error:#}");
                failed.push(kernel);
            }
        }
        anyhow::ensure!(failed.is_empty(), "end-to-end tests failed on {}", failed.join(", "));
        Ok(ExitCode::SUCCESS)
    }
}

/// Tests of what `cargo xtask dist` makes, which is made for them.
const MADE: [&str; 4] = [CLUSTER, "deploy::", "package::", PACKAGES];
/// Tests with package managers, and what judges packages.
const PACKAGES: &str = "packages::";
/// Tests with a Kubernetes cluster, which need its programs.
const CLUSTER: &str = "cluster::";
/// Tests of what containerd can do from 2.2 and 2.3 on, which need its programs.
const NEWER_CONTAINERD: &str = "containerd::newer";
/// Tests that run the probes' own test program, which is built for them, and its name for them.
const HOST: &str = "host::";
const HOST_PROGRAM: &str = "numaward-probes-host";
/// Tests of what the guides say, with the software that they are about.
const GUIDES: &str = "guides::";
/// Tests that ordinary runs skip, by the beginning of their names, but for some kernels: they take minutes under
/// emulation, or what they show hardly depends on the kernel.
const LEFT_OUT: &[(&str, &[&str])] = &[
    ("answers::", &["6.12"]),
    ("book::", &["6.12"]),
    ("cgroup_v1::", &[kernels::OLDEST]),
    ("chaos::", &["6.12"]),
    (CLUSTER, &[]),
    ("containerd::a_tenant", &[]),
    ("containerd::containerd_1_7", &[]),
    ("containerd::containerd_2", &["6.12"]),
    ("containerd::containerd_with_systemd", &[]),
    ("containerd::forty_at_once", &[]),
    (NEWER_CONTAINERD, &[]),
    ("cpu_kinds::", &["6.12"]),
    ("cpu_power::exclusive", &["6.12"]),
    ("cpu_power::the_unit", &[]),
    ("crash::", &["6.12"]),
    (MADE[1], &[]),
    ("doors::", &["6.12"]),
    ("faults::", &["6.12"]),
    (GUIDES, &[]),
    ("herd::", &["6.12"]),
    ("home::", &[]),
    (HOST, &[]),
    ("hot::", &["6.12"]),
    ("hotplug::", &["6.12"]),
    ("interrupts::", &["6.12"]),
    ("kernels::", &[kernels::OLDEST, "6.12"]),
    ("load::", &["6.12"]),
    ("machine::", &["6.12"]),
    (MADE[2], &[]),
    ("numactl::", &[]),
    (PACKAGES, &[]),
    ("power::", &["6.12"]),
    ("probes::", &[]),
    ("rebalance::", &["6.12"]),
    ("reconcile::", &["6.12"]),
    ("soak::", &[]),
    ("stacks::", &[]),
    ("systemd::", &["6.12"]),
    ("tiers::", &[]),
    ("weights::", &["6.12"]),
];

/// What only Arm has.
const OF_ARM64: &str = "host::nodes_of_a_device_tree";

/// The tests on the oldest kernel, where none is named: what it does not have, what takes the place of that, and that guarantees
/// and their enforcement hold.
const ON_OLDEST: &[&str] = &["cgroup_v1::", "enforce::", "guarantee::", "kernels::"];

/// What runs on Arm: what could be otherwise there, which is the probes, cgroups, system calls and containers.
const ON_ARM64: &[&str] = &[
    "containerd::containerd_2",
    "daemon::",
    "deploy::",
    "enforce::",
    "guarantee::",
    HOST,
    "observe::",
    "package::",
    "probes::what_the_other_probes",
];

/// Tests that no ordinary run includes, without those of a cluster.
pub(crate) fn rest() -> Vec<String> {
    let rest = LEFT_OUT.iter().filter(|(name, kernels)| kernels.is_empty() && *name != CLUSTER);
    rest.map(|(name, _)| (*name).to_owned()).collect()
}

/// Runs the end-to-end tests whose names contain one of `names` on one kernel; if there are none all, but for
/// [`LEFT_OUT`] unless `slow`, on the oldest kernel [`ON_OLDEST`], and on Arm [`ON_ARM64`]. What is slow runs in full with
/// `slow`. [`CLUSTER`] and [`NEWER_CONTAINERD`] run where their folders are given.
pub(crate) fn test(arch: Arch, kernel: &str, names: &[String], slow: bool, folders: &Folders) -> Result<()> {
    let few = match arch {
        Arch::Arm64 => ON_ARM64,
        Arch::Amd64 if kernel == kernels::OLDEST => ON_OLDEST,
        Arch::Amd64 => &[],
    };
    let few: Vec<String> = few.iter().map(|name| (*name).to_owned()).collect();
    let names = if names.is_empty() && !few.is_empty() {
        println!("only {}: name others to run them", few.join(", "));
        few.as_slice()
    } else {
        names
    };
    let mut parts = vec![
        Part::Compiler(arch),
        Part::Qemu(arch),
        Part::Kernel(arch, kernels::find(arch, kernel)?),
        Part::Containerd(arch),
        Part::Debian(arch),
        Part::DebianTool(&DebianTool::KUSTOMIZE),
    ];
    if arch == Arch::Amd64 {
        parts.push(Part::DebianTool(&DebianTool::IRQBALANCE));
        parts.push(Part::DebianTool(&DebianTool::JQ));
        parts.push(Part::DebianTool(&DebianTool::NUMACTL));
    }
    setup::ensure(&parts)?;
    let variables = folders.variables()?;
    if folders.kubernetes.is_some() {
        setup::ensure(&[Part::DebianTool(&DebianTool::CLUSTER), Part::PythonTool(&PythonTool::GRPC)])?;
    }
    let grpc_tools = PythonTool::GRPC.folder(&Cache::locate()?);
    let programs = all_programs(arch)?;
    let folder =
        programs.iter().find_map(|(_, path)| path.parent()).context("cargo has built no programs")?;
    let mut left_out: Vec<_> = LEFT_OUT
        .iter()
        .filter(|(_, kernels)| !slow && names.is_empty() && !kernels.contains(&kernel))
        .map(|(name, _)| *name)
        .collect();
    if !left_out.is_empty() {
        println!("skipped, see --all: {}", left_out.join(", "));
    }
    if arch != Arch::Arm64 {
        left_out.push(OF_ARM64);
    }
    let cargo = || {
        let mut cargo = command::cargo();
        cargo.args(["test", "--package", TESTS, "--test", "e2e", "--"]).args(names);
        cargo.args(left_out.iter().flat_map(|name| ["--skip", name]));
        cargo.env("NUMAWARD_VM_KERNEL", kernel).env("NUMAWARD_VM_PROGRAMS", folder);
        cargo.env("NUMAWARD_VM_ARCH", arch.name());
        cargo.env(SLOW, slow.to_string()).envs(variables.iter().map(|(name, folder)| (name, folder)));
        cargo.env(GRPC_TOOLS, &grpc_tools);
        cargo
    };
    let listed = command::read(cargo().arg("--list").stderr(Stdio::inherit()))?;
    anyhow::ensure!(
        listed.lines().any(|line| line.ends_with(": test")),
        "no test is called {}",
        names.join(" or ")
    );
    if listed.lines().any(|line| line.starts_with(HOST)) {
        let program = build::static_test(arch, "numaward-probes", "host", "release")?;
        fs::copy(&program, folder.join(HOST_PROGRAM))
            .with_context(|| format!("cannot copy {}", program.display()))?;
    }
    if listed.lines().any(|line| line.starts_with(GUIDES)) {
        setup::ensure(&[Part::Image(&Image::GUIDES), Part::Image(&Image::NEW_GUIDES)])?;
    }
    if listed.lines().any(|line| line.starts_with(PACKAGES)) {
        setup::ensure(&[Part::Image(&Image::PACKAGES), Part::Packages])?;
    }
    for (tests, folder, programs, option) in [
        (CLUSTER, &folders.kubernetes, "Kubernetes", "--kubernetes"),
        (NEWER_CONTAINERD, &folders.containerd, "containerd 2.3 or newer", "--containerd"),
    ] {
        if folder.is_none() && listed.lines().any(|line| line.starts_with(tests)) {
            println!("skipped: {tests} needs the programs of {programs}: give {option} DIR");
        }
    }
    if listed.lines().any(|line| MADE.iter().any(|name| line.starts_with(name))) {
        let program = daemon(&programs)?;
        let has_next = listed.lines().any(|line| line.starts_with(PACKAGES));
        make_packages(program, folder, has_next).context("cannot make what users are given")?;
    }
    command::run(cargo().arg(format!("--test-threads={MACHINES_AT_ONCE}")))
}

/// Makes what users are given of this program, in `dist` beside it, and if asked the packages of the version after that in
/// `next`. Both have signatures, of a key that nobody has afterwards.
fn make_packages(program: &PathBuf, folder: &Path, has_next: bool) -> Result<()> {
    setup::ensure(&[Part::Gpg])?;
    let signer = dist::Signer::throw_away()?;
    let out = folder.join("dist");
    let programs = slice::from_ref(program);
    dist::make(programs, &dist::Origin::Given(programs), &out, None, Some(&signer))?;
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
    /// Memory-only nodes whose memory the firmware reports as slow, such as 2,3 (ACPI)
    #[arg(long, value_delimiter = ',')]
    slow: Vec<usize>,
}

/// The first process of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Init {
    /// A script that does the least: up in a few seconds
    Busybox,
    /// systemd, on a Debian root file system
    Systemd,
}

#[derive(Args)]
pub(crate) struct Run {
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
    /// What runs first in the machine
    #[arg(long, value_enum, default_value_t = Init::Busybox)]
    init: Init,
    /// More arguments for the kernel
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    append: Option<String>,
    /// Seconds after which the machine is stopped
    #[arg(long, value_name = "S", default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Copies a file into the machine, mode included; may be repeated
    #[arg(long, value_name = "HOSTFILE:GUESTPATH", value_parser = copy)]
    copy: Vec<(PathBuf, String)>,
    /// Leads a TCP port of 127.0.0.1 to a port of the machine; may be repeated
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

impl Run {
    fn main(&self) -> Result<ExitCode> {
        let layout = &self.layout;
        let machine = Machine::parse(
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

/// Passes the output of a machine's script on until the machine ends, which SIGINT and SIGTERM hasten. Now and then
/// calls `look`. Returns whether there was a signal, and how the script ended.
pub(crate) fn attend(
    running: Running,
    mut look: impl FnMut() + Send,
) -> Result<(bool, Result<u8, numaward_vm::Error>)> {
    const PACE: Duration = Duration::from_millis(200);
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
                    look();
                }
                thread::sleep(PACE);
            }
        });
        // Not locked meanwhile: `look` may print.
        let result = running.finish(&mut io::stdout());
        ended.store(true, Ordering::Relaxed);
        result
    });
    Ok((signalled.load(Ordering::Relaxed), result))
}

/// The static programs that every machine has on its PATH.
pub(crate) fn programs(arch: Arch, with_daemon: bool) -> Result<Vec<(String, PathBuf)>> {
    if !with_daemon {
        return build::static_programs(arch, &[LOAD], "release");
    }
    let mut programs = all_programs(arch)?;
    programs.retain(|(name, _)| [DAEMON, LOAD].contains(&name.as_str()));
    Ok(programs)
}

/// The one that is daemon and command line. It is static, so it runs on this host too.
pub(crate) fn daemon(programs: &[(String, PathBuf)]) -> Result<&PathBuf> {
    let daemon = programs.iter().find(|(name, _)| name == DAEMON);
    daemon.map(|(_, path)| path).context("cargo has not built numaward")
}

/// The daemon and the load alone, for somebody who builds nothing else: those of the tests take minutes.
pub(crate) fn few_programs(arch: Arch) -> Result<Vec<(String, PathBuf)>> {
    build::static_programs(arch, &[DAEMON, LOAD], "release")
}

/// They and those of the tests, always together: what is built for one serves the other.
fn all_programs(arch: Arch) -> Result<Vec<(String, PathBuf)>> {
    setup::ensure(&[Part::Ebpf])?;
    build::static_programs(arch, &[&[DAEMON, LOAD], HELPERS].concat(), "release")
}

fn copy(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(':') {
        Some((host, guest)) if !host.is_empty() && guest.starts_with('/') => {
            Ok((host.into(), guest.to_owned()))
        }
        _ => Err("give HOSTFILE:GUESTPATH, with an absolute GUESTPATH".to_owned()),
    }
}

/// A word as one word of a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let words = ["plain", "two words", "it's", "$HOME `x` \"y\" \\"];
        let script = format!("printf '%s\\n' {}", words.map(quote).join(" "));
        let output = command::read(std::process::Command::new("sh").args(["-c", &script])).unwrap();
        assert_eq!(output.lines().collect::<Vec<_>>(), words);
    }

    #[test]
    fn programs_of_kubernetes_may_be_beside_the_checkout() {
        let folder = tempfile::tempdir().unwrap();
        let checkout = folder.path().join("checkout");
        fs::create_dir(&checkout).unwrap();
        let beside = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            Folders::default().or_default(&names, &checkout).kubernetes
        };
        assert_eq!(beside(&["cluster::life"]), None);
        let programs = checkout.join(BESIDE);
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
    fn copies_are_read() {
        assert_eq!(copy("a:b:/c"), Ok(("a:b".into(), "/c".to_owned())));
        for wrong in ["", "a", "a:", ":/b", "a:b"] {
            assert!(copy(wrong).is_err(), "{wrong}");
        }
    }
}

//! `cargo xtask setup`: installs missing tools, once.
//!
//! # Problem
//! eBPF, QEMU and kernels are no ordinary dependencies. Each [`Part`] first detects installed tools and installs only
//! missing ones. A complete machine therefore needs no network, and an interrupted setup continues where it stopped.
//!
//! # Algorithm
//! Programs of the distribution are installed by apt. Packages that are only unpacked (kernels, container runtimes) are
//! fetched by apt into the cache with a private list of sources ([`apt`]), so that signatures are checked and the
//! system's configuration does not change.
//!
//! # Invariants
//! - The cache has complete entries only: they are made beside their place and renamed.
//! - A damaged entry is detected by its checksums and fetched again.
//! - Two setups do not run at the same time.

mod apt;
mod containerd;
mod cross;
mod debian;
mod debian_tools;
mod ebpf;
mod explain;
mod guests;
pub(crate) mod kernels;
mod packages;
mod python;
mod software;
mod sources;
mod steps;
mod store;
mod tools;

use std::fs::{self, File, TryLockError};

use anyhow::{Context as _, Result};
use clap::Args;
use numaward_vm::{Arch, Cache};

pub(crate) use cross::Compiler;
pub(crate) use debian_tools::DebianTool;
pub(crate) use ebpf::tools as ebpf_tools;
use kernels::KernelSource;
pub(crate) use python::PythonTool;
pub(crate) use software::DiskImage;
use steps::{Steps, say};
pub(crate) use tools::CargoTool;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Also installs the requirements of later or rare tests: container runtimes, and the software of the guides
    #[arg(long)]
    all: bool,
    /// Fetches the newest kernels and container runtimes even if the cache has some
    #[arg(long)]
    update: bool,
    /// Processor of the programs to build and test
    #[arg(long, default_value_t)]
    arch: Arch,
}

/// A requirement of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// A Rust toolchain for the BPF target and bpf-linker.
    Ebpf,
    /// A compiler and a linker for this processor.
    Compiler(Arch),
    /// QEMU, the programs that pack a machine's files, and the files that every machine with this processor needs.
    Qemu(Arch),
    /// A kernel for virtual machines with this processor.
    Kernel(Arch, &'static KernelSource),
    /// A root file system with systemd for this processor.
    Debian(Arch),
    /// A root file system with software, as an image.
    Image(&'static DiskImage),
    /// gpg, for signatures.
    Gpg,
    /// Checkers of packages.
    Packages,
    /// containerd and runc for this processor, with the libraries they need.
    Containerd(Arch),
    /// A browser, and the programs that control it.
    Browser,
    /// A compiler for libFuzzer.
    Cpp,
    /// Node.js, which runs the schemas of the Prometheus operator.
    Node,
    /// Checker of the unit.
    Systemd,
    /// Programs that are compared with those of this project, or that check their output.
    Commands,
    /// A program that is unpacked into the cache.
    DebianTool(&'static DebianTool),
    /// A program that cargo installs into the cache.
    Tool(&'static CargoTool),
    /// A program that Python installs into the cache.
    PythonTool(&'static PythonTool),
}

/// Programs that control the page, with their packages.
const BROWSER: &[(&str, &str)] = &[("chromium", "chromium"), ("node", "nodejs"), ("npm", "npm")];
/// Compilers of C++.
const CPP: &[(&str, &str)] = &[("c++", "g++")];
const SYSTEMD: &[(&str, &str)] = &[("systemd-analyze", "systemd")];
const COMMANDS: &[(&str, &str)] = &[("numactl", "numactl"), ("mandoc", "mandoc"), ("zsh", "zsh")];
const GPG: &[(&str, &str)] = &[("gpg", "gnupg")];
const PACKAGES: &[(&str, &str)] = &[("lintian", "lintian"), ("rpm", "rpm")];
const NODE: &[(&str, &str)] = &[("node", "nodejs"), ("npm", "npm")];

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let arch = arguments.arch;
    let mut parts = vec![Part::Ebpf, Part::Compiler(arch), Part::Qemu(arch)];
    parts.extend(kernels::sources(arch).iter().map(|source| Part::Kernel(arch, source)));
    if arch == Arch::Amd64 || arguments.all {
        parts.push(Part::Debian(arch));
    }
    if arguments.all {
        parts.push(Part::Containerd(arch));
    }
    if arguments.all && arch == Arch::Amd64 {
        parts.extend([&DiskImage::GUIDES, &DiskImage::NEW_GUIDES, &DiskImage::PACKAGES].map(Part::Image));
    }
    install(&parts, arguments.update, true)
}

/// Ensures that these parts are installed.
pub(crate) fn ensure(parts: &[Part]) -> Result<()> {
    install(parts, false, false)
}

fn install(parts: &[Part], update: bool, verbose: bool) -> Result<()> {
    let steps = Steps { cache: Cache::locate()?, update, verbose };
    let root = steps.cache.root();
    fs::create_dir_all(root).with_context(|| format!("cannot create the cache {}", root.display()))?;
    let _lock = lock(&steps.cache)?;
    store::remove_leftovers(root)?;
    for part in parts {
        match part {
            Part::Ebpf => ebpf::ensure(&steps),
            Part::Compiler(arch) => cross::ensure(&steps, *arch),
            Part::Qemu(arch) => guests::ensure(&steps, *arch),
            Part::Kernel(arch, source) => kernels::ensure(&steps, *arch, source),
            Part::Debian(arch) => debian::ensure(&steps, *arch),
            Part::Image(image) => software::ensure(&steps, image),
            Part::Gpg => packages::ensure(&steps, "gpg", GPG),
            Part::Packages => packages::ensure(&steps, "lintian and rpm", PACKAGES),
            Part::Containerd(arch) => containerd::ensure(&steps, *arch),
            Part::Browser => packages::ensure(&steps, "browser", BROWSER),
            Part::Cpp => packages::ensure(&steps, "C++ compiler", CPP),
            Part::Node => packages::ensure(&steps, "Node.js", NODE),
            Part::Commands => packages::ensure(&steps, "numactl, mandoc and zsh", COMMANDS),
            Part::Systemd => packages::ensure(&steps, "systemd", SYSTEMD),
            Part::DebianTool(tool) => debian_tools::ensure(&steps, tool),
            Part::Tool(tool) => tools::ensure(&steps, tool),
            Part::PythonTool(tool) => python::ensure(&steps, tool),
        }?;
    }
    Ok(())
}

/// Takes the lock that prevents a second setup; it ends with the process.
fn lock(cache: &Cache) -> Result<File> {
    let path = cache.root().join("lock");
    let context = || format!("cannot lock {}", path.display());
    let file = File::create(&path).with_context(context)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            say("cache", "another setup is at work, waiting for it");
            file.lock().with_context(context)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(context),
    }
    Ok(file)
}

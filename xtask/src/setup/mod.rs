//! `cargo xtask setup`: installs what is missing, once.
//!
//! The problem: eBPF, QEMU and kernels are no ordinary dependencies. Each [`Part`] detects first and installs only
//! what is missing, so that a machine where all is there never touches the network, and an interrupted setup goes on
//! where it stopped.
//!
//! What comes from the distribution as a program is installed by apt. What is only unpacked (kernels, container
//! runtimes) is fetched by apt into the cache from a private list of sources ([`apt`]), so that signatures are checked
//! and the system's configuration stays as it is.
//!
//! Invariants: the cache holds only whole entries (they are made beside their place and renamed); a damaged entry is
//! noticed by its checksums and fetched again; two setups do not run at once.

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
use kernels::Source;
pub(crate) use python::PythonTool;
pub(crate) use software::Image;
use steps::{Steps, say};
pub(crate) use tools::CargoTool;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Also what only later or rare tests need: container runtimes, and the software of the guides
    #[arg(long)]
    all: bool,
    /// Fetches the newest kernels and container runtimes even if the cache holds some
    #[arg(long)]
    update: bool,
    /// What building and testing for this processor takes
    #[arg(long, default_value_t)]
    arch: Arch,
}

/// Something that a task may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// A Rust toolchain for the BPF target and bpf-linker.
    Ebpf,
    /// What compiles and links for this processor.
    Compiler(Arch),
    /// QEMU, what packs a machine's files, and those that a machine with this processor needs in any case.
    Qemu(Arch),
    /// A kernel for virtual machines with this processor.
    Kernel(Arch, &'static Source),
    /// A root file system with systemd for this processor.
    Debian(Arch),
    /// A root file system with software, as an image.
    Image(&'static Image),
    /// What signs.
    Gpg,
    /// What judges packages.
    Packages,
    /// containerd and runc for this processor, with the libraries they need.
    Containerd(Arch),
    /// A browser, and what drives it.
    Browser,
    /// What compiles libFuzzer.
    Cpp,
    /// What runs the schemas of the Prometheus operator.
    Node,
    /// What judges the unit.
    Systemd,
    /// Programs that ours are compared with, or that judge what ours print.
    Commands,
    /// A program that is unpacked into the cache.
    DebianTool(&'static DebianTool),
    /// A program that cargo installs into the cache.
    Tool(&'static CargoTool),
    /// A program that Python installs into the cache.
    PythonTool(&'static PythonTool),
}

/// Programs that drive the page, with their packages.
const BROWSER: &[(&str, &str)] = &[("chromium", "chromium"), ("node", "nodejs"), ("npm", "npm")];
/// What builds programs in C++.
const CPP: &[(&str, &str)] = &[("c++", "g++")];
const SYSTEMD: &[(&str, &str)] = &[("systemd-analyze", "systemd")];
const COMMANDS: &[(&str, &str)] = &[("numactl", "numactl"), ("mandoc", "mandoc"), ("zsh", "zsh")];
const GPG: &[(&str, &str)] = &[("gpg", "gnupg")];
const PACKAGES: &[(&str, &str)] = &[("lintian", "lintian"), ("rpm", "rpm")];
const NODE: &[(&str, &str)] = &[("node", "nodejs"), ("npm", "npm")];

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let arch = arguments.arch;
    let mut parts = vec![Part::Ebpf, Part::Compiler(arch), Part::Qemu(arch)];
    parts.extend(kernels::of(arch).iter().map(|source| Part::Kernel(arch, source)));
    if arch == Arch::Amd64 || arguments.all {
        parts.push(Part::Debian(arch));
    }
    if arguments.all {
        parts.push(Part::Containerd(arch));
    }
    if arguments.all && arch == Arch::Amd64 {
        parts.extend([&Image::GUIDES, &Image::NEW_GUIDES, &Image::PACKAGES].map(Part::Image));
    }
    install(&parts, arguments.update, true)
}

/// Makes sure that these parts are there.
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

/// Held while setting up; ends with the process, however that ends.
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

//! Cross compilation: a linker with a C library, and a Rust compiler with the standard library for another processor.
//!
//! The usual compiler is used if it has that library (`rustup target add`). Otherwise Debian's compiler is used, which
//! can build the probes too: the library of exactly its version is fetched from Debian's security archive, from which
//! new compilers come, and unpacked into the cache.
//! new compilers come from, and unpacked into the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use numaward_vm::{Arch, Cache};

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{packages, sources, store};
use crate::command;

/// Debian's compiler, and its library for programs.
const DEBIAN: [&str; 2] = ["rustc-web", "cargo-web"];
const DEBIAN_LIBRARY: &str = "libstd-rust-web-dev";
const DEBIAN_BIN: &str = "/usr/bin";

/// Compiler for a processor, after setup.
pub(crate) struct Compiler {
    arch: Arch,
    /// Folder of the library for Debian's compiler; `None` for the usual compiler.
    sysroot: Option<PathBuf>,
}

impl Compiler {
    /// Returns the compiler that [`ensure`] has set up.
    pub(crate) fn find(arch: Arch) -> Result<Self> {
        let is_usual = is_host(arch) || has_library(arch);
        let sysroot = if is_usual { None } else { Some(sysroot(&Cache::locate()?, arch)) };
        Ok(Self { arch, sysroot })
    }

    /// Returns cargo in the checkout with this compiler.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = command::cargo();
        if self.sysroot.is_some() {
            let bin = Path::new(DEBIAN_BIN);
            cargo = command::in_checkout(bin.join("cargo"));
            cargo.env("RUSTC", bin.join("rustc"));
        }
        if !is_host(self.arch) {
            let variable = self.arch.rust_target().replace('-', "_").to_uppercase();
            cargo.env(format!("CARGO_TARGET_{variable}_LINKER"), linker(self.arch));
        }
        cargo
    }

    /// Returns the compiler's version.
    pub(crate) fn version(&self) -> Result<String> {
        let usual = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let rustc = self.sysroot.as_ref().map_or(usual, |_| Path::new(DEBIAN_BIN).join("rustc").into());
        command::read(Command::new(rustc).arg("-vV").current_dir(command::root()))
    }

    /// Returns the flags that the compiler needs in any case.
    pub(crate) fn flags(&self) -> Option<String> {
        self.sysroot.as_ref().map(|sysroot| format!("--sysroot={}", sysroot.display()))
    }
}

fn linker(arch: Arch) -> String {
    format!("{}-linux-gnu-gcc", arch.kernel_name())
}

fn is_host(arch: Arch) -> bool {
    Some(arch) == Arch::of_host()
}

/// Returns whether the usual compiler has the library.
fn has_library(arch: Arch) -> bool {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print=target-libdir", "--target", arch.rust_target()]).current_dir(command::root());
    command::read(&mut rustc).is_ok_and(|folder| Path::new(folder.trim()).is_dir())
}

fn sysroot(cache: &Cache, arch: Arch) -> PathBuf {
    cache.root().join("tools").join(format!("rust-{arch}"))
}

/// Ensures that programs can be built for the processor; does nothing for that of this host.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    let part = format!("compiler for {arch}");
    if is_host(arch) {
        return Ok(());
    }
    let (program, name) = (linker(arch), arch.kernel_name().replace('_', "-"));
    let c_library = format!("/usr/{}-linux-gnu/lib/libc.a", arch.kernel_name());
    if command::find(&program).is_none() || !Path::new(&c_library).is_file() {
        packages::install(&part, &[&format!("gcc-{name}-linux-gnu"), &format!("libc6-dev-{arch}-cross")])?;
    }
    if has_library(arch) {
        steps.found(&part, "the usual one");
        return Ok(());
    }
    if sources::debian_codename(Path::new("/")).is_none() {
        bail!("{part}: run `rustup target add {}`, then this again", arch.rust_target());
    }
    let version = || command::read(Command::new("dpkg-query").args(["-Wf", "${Version}", DEBIAN[0]]));
    let version = match version() {
        Ok(version) if Path::new(DEBIAN_BIN).join("cargo").is_file() => version,
        _ => {
            packages::install(&part, &DEBIAN)?;
            version()?
        }
    };
    let folder = sysroot(&steps.cache, arch);
    let recipe = format!("{DEBIAN_LIBRARY} {version} for {arch}\n");
    if store::state(&folder, &recipe) == store::EntryState::Whole {
        steps.found(&part, &format!("Debian's, {version}"));
        return Ok(());
    }
    let (mirror, release) = sources::security(Path::new("/"))?;
    let suite = Suite::fetch_for(&steps.cache, &mirror, &release, arch)?;
    let library = suite.newest(DEBIAN_LIBRARY)?;
    if library.version != version {
        bail!(
            "{part}: {} is of version {version}, and its library for {arch} of {}: run `apt-get update && \
             apt-get install {}`, then this again",
            DEBIAN[0],
            library.version,
            DEBIAN.join(" ")
        );
    }
    store::replace(&folder, &recipe, |folder| {
        let scratch = store::scratch(folder.parent().unwrap_or(folder))?;
        let tree = scratch.path().join("tree");
        unpack(&suite.download(&library, scratch.path())?, &tree)?;
        let libraries = Path::new("lib/rustlib").join(arch.rust_target()).join("lib");
        fs::create_dir_all(folder.join(&libraries))?;
        let from = tree.join("usr").join(&libraries);
        for file in
            fs::read_dir(&from).with_context(|| format!("{DEBIAN_LIBRARY} has no {}", from.display()))?
        {
            let file = file?;
            // The shared library is a link into another package.
            if file.file_type()?.is_file() {
                fs::copy(file.path(), folder.join(&libraries).join(file.file_name()))?;
            }
        }
        Ok(())
    })?;
    say(&part, &format!("ready: Debian's, {version}"));
    Ok(())
}

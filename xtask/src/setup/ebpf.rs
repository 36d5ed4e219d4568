//! The toolchain that builds the probes: a Rust compiler with unstable features and the sources of `core`, and
//! bpf-linker, which must be linked to an LLVM that is not older than the compiler's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

use super::apt::explained;
use super::steps::{Steps, say};
use super::{packages, sources};
use crate::command;

const LINKER: &str = "bpf-linker";
const LINKER_VERSION: &str = "0.13.0";
/// LLVM versions for which this bpf-linker can be built.
const LINKER_LLVMS: std::ops::RangeInclusive<u32> = 19..=22;
/// Debian's compiler for browsers, which is new and has packaged sources.
const DEBIAN_TOOLCHAIN: [&str; 3] = ["rustc-web", "rust-web-src", "cargo-web"];

struct Toolchain {
    name: String,
    /// The compiler's version.
    verbose: String,
    /// Major version of the compiler's LLVM.
    llvm: u32,
}

pub(crate) fn ensure(steps: &Steps) -> Result<()> {
    let part = "eBPF toolchain";
    let toolchain = match detect() {
        Some(toolchain) => toolchain,
        None if sources::debian_codename(Path::new("/")).is_some() => {
            packages::install(part, &DEBIAN_TOOLCHAIN)?;
            detect()
                .context("rustc-web is installed, but /usr/bin/rustc has no sources of `core` beside it")?
        }
        None => bail!(
            "{part}: no nightly with the sources of `core` is here: run `rustup toolchain install nightly --component rust-src`, \
             then this again"
        ),
    };
    steps.found(part, &format!("{}, LLVM {}", toolchain.name, toolchain.llvm));
    linker(steps, &toolchain)
}

/// Returns the compiler's and the linker's version; `None` if one is missing.
pub(crate) fn tools() -> Option<(String, String)> {
    let linker = command::read(Command::new(linker_path()?).arg("--version")).ok()?;
    Some((detect()?.verbose, linker.split_whitespace().nth(1)?.to_owned()))
}

/// Finds a nightly of rustup with its sources, or Debian's compiler with its sources, like the probes' build script.
fn detect() -> Option<Toolchain> {
    let nightly = command::read(Command::new("rustup").args(["which", "--toolchain=nightly", "rustc"])).ok();
    let nightly = nightly.map(|path| PathBuf::from(path.trim()));
    let debian = Some(PathBuf::from("/usr/bin/rustc"));
    [("nightly", nightly), ("Debian's", debian)]
        .into_iter()
        .find_map(|(name, rustc)| toolchain(name, &rustc?))
}

fn toolchain(name: &str, rustc: &Path) -> Option<Toolchain> {
    let sysroot = command::read(Command::new(rustc).arg("--print=sysroot")).ok()?;
    let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/Cargo.toml");
    let has_cargo = rustc.with_file_name("cargo").is_file();
    let verbose = command::read(Command::new(rustc).arg("-vV")).ok()?;
    let (version, llvm) = version(&verbose)?;
    (sources.is_file() && has_cargo).then(|| Toolchain {
        name: format!("{name} rustc {version}"),
        verbose,
        llvm,
    })
}

/// Parses the compiler's version and its LLVM's major version from `rustc --version --verbose`.
fn version(text: &str) -> Option<(String, u32)> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    let llvm = field("LLVM version: ")?.split('.').next()?.parse().ok()?;
    Some((field("release: ")?.to_owned(), llvm))
}

/// Returns the path of the linker: cargo's own, or one on the PATH.
fn linker_path() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let own = home.map(|home| home.join("bin").join(LINKER)).filter(|own| own.is_file());
    own.or_else(|| command::find(LINKER))
}

fn linker(steps: &Steps, toolchain: &Toolchain) -> Result<()> {
    let llvm = toolchain.llvm;
    if let Some(path) = linker_path() {
        let version = command::read(Command::new(&path).arg("--version"));
        let linked =
            command::read(Command::new("ldd").arg(&path)).ok().and_then(|libraries| linked_llvm(&libraries));
        match (version, linked) {
            (Ok(version), Some(linked)) if linked < llvm => say(
                LINKER,
                &format!(
                    "{} is linked to LLVM {linked}, the compiler to {llvm}: building another",
                    version.trim()
                ),
            ),
            (Ok(version), linked) => {
                let linked =
                    linked.map_or_else(|| "its own LLVM".to_owned(), |linked| format!("LLVM {linked}"));
                steps.found(
                    LINKER,
                    &format!("{}, {linked}", version.trim().trim_start_matches("bpf-linker ")),
                );
                return Ok(());
            }
            (Err(error), _) => say(LINKER, &format!("it does not start, building it again: {error:#}")),
        }
    }
    if !LINKER_LLVMS.contains(&llvm) {
        bail!(
            "{LINKER} {LINKER_VERSION} can be built for LLVM {LINKER_LLVMS:?}, but {} has LLVM {llvm}",
            toolchain.name
        );
    }
    let prefix = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    let headers =
        [prefix.join("include/llvm-c/Core.h"), "/usr/include/zlib.h".into(), "/usr/include/zstd.h".into()];
    if !headers.iter().all(|path| path.exists()) || !has_polly(&prefix) {
        let [llvm_dev, polly] = [format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev")];
        packages::install(LINKER, &[&llvm_dev, &polly, "zlib1g-dev", "libzstd-dev", "g++"])?;
    }
    say(LINKER, &format!("building {LINKER_VERSION} for LLVM {llvm}, this takes some minutes"));
    let feature = format!("llvm-{llvm}");
    let mut install = command::cargo();
    install
        .args(["install", "--locked", "--force", "--no-default-features", "--features", &feature])
        .arg(format!("{LINKER}@{LINKER_VERSION}"))
        .current_dir(env::temp_dir())
        .env("LLVM_PREFIX", &prefix)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR");
    command::run_slowly(LINKER, &mut install)
        .map_err(|error| explained(&error, &format!("cannot build {LINKER} {LINKER_VERSION}")))?;
    say(LINKER, &format!("installed {LINKER_VERSION}"));
    Ok(())
}

fn has_polly(prefix: &Path) -> bool {
    fs::read_dir(prefix.join("lib")).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libPolly"))
    })
}

/// Parses the major version in `ldd`'s line for libLLVM; `None` if LLVM is linked statically.
fn linked_llvm(libraries: &str) -> Option<u32> {
    let name = libraries.split_whitespace().find_map(|word| word.strip_prefix("libLLVM"))?;
    name.trim_start_matches(['.', '-', 's', 'o']).split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions() {
        let text = "rustc 1.96.0 (x)\nbinary: rustc\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        assert_eq!(version(text), Some(("1.96.0".to_owned(), 22)));
        assert_eq!(version("release: 1.96.0\nLLVM version: x\n"), None);
        assert_eq!(version(""), None);
        assert_eq!(
            linked_llvm("\tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x0)\n"),
            Some(22)
        );
        assert_eq!(linked_llvm("\tlibLLVM-19.so => /x (0x0)\n"), Some(19));
        assert_eq!(linked_llvm("\tlibc.so.6 => /x (0x0)\n"), None);
    }
}

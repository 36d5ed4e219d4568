//! `cargo xtask build`, and builds of the static programs for virtual machines.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use numaward_vm::Arch;
use serde::Deserialize;

use crate::command;
use crate::setup::{self, Compiler, Part};

/// Selection of all packages except for the programs for the kernel. Tests that boot machines are built by name only.
pub(crate) const WORKSPACE: &[&str] = &["--workspace", "--exclude", "numaward-ebpf"];

/// Profile of released and measured programs, with all optimizations, which takes minutes.
pub(crate) const DIST: &str = "dist";

const PACKED_RELOCATIONS: &str = " -C link-arg=-Wl,-z,pack-relative-relocs";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Builds a static program that runs on any Linux instead of one for this host. Both are quick builds; `dist`
    /// builds released programs
    #[arg(long = "static")]
    is_static: bool,
    /// The processor of a static program
    #[arg(long, default_value_t, requires = "is_static")]
    arch: Arch,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    setup::ensure(&[Part::Ebpf, Part::Compiler(arguments.arch)])?;
    let programs = if arguments.is_static {
        static_programs(arguments.arch, &["numaward"], "release")?
    } else {
        programs(&["numaward"], "release")?
    };
    for (name, path) in programs {
        println!("{name}: {}", path.display());
    }
    Ok(())
}

/// Builds the packages' programs statically, because virtual machines have no shared libraries. Returns the name and
/// path of each.
pub(crate) fn static_programs(
    arch: Arch,
    packages: &[&str],
    profile: &str,
) -> Result<Vec<(String, PathBuf)>> {
    build(packages, &["--bins"], profile, Some((arch, &[])))
}

/// The needed fields of cargo's messages.
#[derive(Deserialize)]
struct CargoMessage {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    profile: Option<MessageProfile>,
}

#[derive(Deserialize)]
struct MessageProfile {
    test: bool,
}

/// A program built by cargo.
pub(crate) struct BuiltProgram {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Folder of the program's package.
    pub(crate) package: PathBuf,
    pub(crate) is_test: bool,
}

/// The needed fields of cargo's metadata.
#[derive(Deserialize)]
struct CargoMetadata {
    target_directory: PathBuf,
}

/// Returns cargo's target directory.
pub(crate) fn target_directory() -> Result<PathBuf> {
    command::metadata().map(|metadata: CargoMetadata| metadata.target_directory)
}

/// Builds a package's program statically, with all optimizations and without paths of this machine: the same sources
/// and tools make the same program.
pub(crate) fn portable_program(arch: Arch, package: &str) -> Result<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let target = Some(target_directory()?);
    // If several paths match, the last one counts.
    let flags = [(home, "/cargo"), (Some(command::root().to_owned()), "/numaward"), (target, "/target")]
        .into_iter()
        .filter_map(|(path, name)| Some(format!("--remap-path-prefix={}={name}", path?.display())));
    let built = build(&[package], &["--bins"], DIST, Some((arch, &flags.collect::<Vec<_>>())))?;
    let program = built.into_iter().next().map(|(_, path)| path);
    program.with_context(|| format!("cargo has built no program of {package}"))
}

/// Builds targets of the workspace for tests on this host and in machines. All tests share one selection of packages,
/// one profile and one target, so that each dependency is built once, with one set of features.
pub(crate) fn tested(targets: &[&str]) -> Result<Vec<BuiltProgram>> {
    let mut cargo = tested_cargo("build")?;
    // A test among the targets enables the features that tests need.
    cargo.args(["--message-format=json-render-diagnostics", "--test", "conformance"]).args(targets);
    built(&mut cargo).context("cannot build tests and programs")
}

/// Builds tests with the selection of [`tested`]; `--lib` among the targets builds those in the libraries.
pub(crate) fn tests(targets: &[&str]) -> Result<Vec<BuiltProgram>> {
    let mut cargo = tested_cargo("test")?;
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]).args(targets);
    let mut tests = built(&mut cargo).context("cannot build tests")?;
    tests.retain(|built| built.is_test);
    Ok(tests)
}

/// Returns cargo's subcommand `build` or `test` with the selection of [`tested`].
pub(crate) fn tested_cargo(subcommand: &str) -> Result<Command> {
    let arch = Arch::of_host().context("tests run on x86-64 and 64-bit Arm only")?;
    let mut cargo = static_cargo(arch, "release", &[])?;
    cargo.arg(subcommand).args(WORKSPACE).args(["--profile", "release", "--target", arch.rust_target()]);
    Ok(cargo)
}

/// Builds a program of the workspace with the selection of [`tested`].
pub(crate) fn tested_program(name: &str) -> Result<PathBuf> {
    let program = tested(&["--bin", name])?.into_iter().find(|built| built.name == name);
    program.map(|built| built.path).with_context(|| format!("cargo has built no program {name}"))
}

/// Builds the integration tests of this name, one for each package that has one, with the selection of [`tested`].
pub(crate) fn tests_by_name(name: &str) -> Result<Vec<BuiltProgram>> {
    let start = format!("{name}-");
    let mut tests = tested(&["--test", name])?;
    tests.retain(|built| built.name.starts_with(&start));
    ensure!(!tests.is_empty(), "cargo has built no test {name}");
    Ok(tests)
}

/// Builds the only integration test of this name with the selection of [`tested`].
pub(crate) fn tested_test(name: &str) -> Result<BuiltProgram> {
    let [test] = <[BuiltProgram; 1]>::try_from(tests_by_name(name)?)
        .map_err(|tests| anyhow!("{} packages have a test {name}", tests.len()))?;
    Ok(test)
}

/// Builds the packages' programs for this host.
pub(crate) fn programs(packages: &[&str], profile: &str) -> Result<Vec<(String, PathBuf)>> {
    build(packages, &["--bins"], profile, None)
}

/// Builds a benchmark statically and returns its path.
pub(crate) fn static_bench(package: &str, bench: &str, profile: &str) -> Result<PathBuf> {
    static_one(Arch::Amd64, package, ["--bench", bench], profile)
}

/// Builds a test statically and returns its path.
pub(crate) fn static_test(arch: Arch, package: &str, test: &str, profile: &str) -> Result<PathBuf> {
    static_one(arch, package, ["--test", test], profile)
}

fn static_one(arch: Arch, package: &str, what: [&str; 2], profile: &str) -> Result<PathBuf> {
    let built = build(&[package], &what, profile, Some((arch, &[])))?;
    let path = built.into_iter().next().map(|(_, path)| path);
    path.with_context(|| format!("cargo has built nothing for {}", what.join(" ")))
}

/// Builds targets of the packages, statically if a processor and flags are given (the flags may be empty).
fn build(
    packages: &[&str],
    what: &[&str],
    profile: &str,
    static_for: Option<(Arch, &[String])>,
) -> Result<Vec<(String, PathBuf)>> {
    let mut cargo = match static_for {
        Some((arch, flags)) => static_cargo(arch, profile, flags)?,
        None => command::cargo(),
    };
    cargo.args(["build", "--message-format=json-render-diagnostics", "--profile", profile]).args(what);
    cargo.args(packages.iter().flat_map(|package| ["-p", package]));
    if let Some((arch, _)) = static_for {
        cargo.args(["--target", arch.rust_target()]);
    }
    let built = built(&mut cargo).with_context(|| format!("cannot build {}", packages.join(", ")))?;
    Ok(built.into_iter().map(|built| (built.name, built.path)).collect())
}

/// Returns cargo with the compiler and the flags of static programs. With an explicit target, the flags do not apply to
/// build scripts and procedural macros.
fn static_cargo(arch: Arch, profile: &str, flags: &[String]) -> Result<Command> {
    let compiler = Compiler::find(arch)?;
    let own = compiler.flags();
    let mut all = "-C target-feature=+crt-static".to_owned();
    // A position-independent program relocates itself at each start, which takes most of the time of a short command
    // in an
    // emulated machine. Released programs are position-independent for random addresses.
    // Each start reads the whole table of relocations, so it is packed (glibc 2.36; not for Arm in binutils 2.40).
    if arch == Arch::Amd64 {
        all += if profile == DIST { PACKED_RELOCATIONS } else { " -C relocation-model=static" };
    }
    let all = flags.iter().chain(&own).fold(all, |all, flag| all + " " + flag);
    let mut cargo = compiler.cargo();
    cargo.env("RUSTDOCFLAGS", &all).env("RUSTFLAGS", all);
    Ok(cargo)
}

/// Runs cargo, and returns the programs that it has built.
fn built(cargo: &mut Command) -> Result<Vec<BuiltProgram>> {
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "see above");
    let mut programs = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let message: CargoMessage = serde_json::from_slice(line).context("cannot read cargo's messages")?;
        if let Some(path) = message.executable {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let package = message.manifest_path.as_deref().and_then(Path::parent).unwrap_or(command::root());
            let is_test = message.profile.is_some_and(|profile| profile.test);
            programs.push(BuiltProgram { name, path, package: package.to_owned(), is_test });
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    /// Returns a table of the workspace's `Cargo.toml`: values by key.
    fn table(name: &str) -> BTreeMap<&'static str, &'static str> {
        let lines = include_str!("../../Cargo.toml").lines();
        let lines = lines.skip_while(|line| *line != name).skip(1).take_while(|line| !line.starts_with('['));
        lines.filter_map(|line| line.split_once(" = ")).collect()
    }

    /// `dist` inherits from `release`, so a missing setting of `dist` would reach users as in `release`.
    #[test]
    fn dist_overrides_settings_of_each_package() {
        let (release, dist) = (table("[profile.release.package]"), table("[profile.dist.package]"));
        assert_eq!(release.get("numaward-cli.opt-level"), Some(&"0"));
        assert_eq!(dist.keys().collect::<Vec<_>>(), release.keys().collect::<Vec<_>>());
        for (key, value) in dist {
            let wanted = match key.split_once('.') {
                Some((_, "strip")) => "\"none\"",
                _ => "\"s\"",
            };
            assert_eq!(value, wanted, "{key}");
        }
    }
}

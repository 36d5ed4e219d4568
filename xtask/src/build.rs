//! `cargo xtask build`, and the static programs that go into virtual machines.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use numaward_vm::Arch;
use serde::Deserialize;

use crate::command;
use crate::setup::{self, Compiler, Part};

/// What is built and tested on this host: all but the programs for the kernel. The tests that boot machines are built by name only.
pub(crate) const WORKSPACE: &[&str] = &["--workspace", "--exclude", "numaward-ebpf"];

/// What users get, and what is measured: with all optimisations, which takes minutes.
pub(crate) const DIST: &str = "dist";

const PACKED_RELOCATIONS: &str = " -C link-arg=-Wl,-z,pack-relative-relocs";

#[derive(Args)]
pub(crate) struct Arguments {
    /// A static program, that runs on any Linux, instead of one for this host. Both are quick builds: `dist` makes what
    /// users get
    #[arg(long = "static")]
    is_static: bool,
    /// The processor that a static program is for
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

/// Builds the packages' programs statically, since virtual machines have no shared libraries, and returns the name and path
/// of each.
pub(crate) fn static_programs(
    arch: Arch,
    packages: &[&str],
    profile: &str,
) -> Result<Vec<(String, PathBuf)>> {
    build(packages, &["--bins"], profile, Some((arch, &[])))
}

/// The part of cargo's messages that matters here.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    profile: Option<MessageProfile>,
}

#[derive(Deserialize)]
struct MessageProfile {
    test: bool,
}

/// A program that cargo has built.
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// True for a program of tests.
    pub(crate) is_test: bool,
}

/// The part of cargo's metadata that matters here.
#[derive(Deserialize)]
struct Metadata {
    target_directory: PathBuf,
}

/// Where cargo puts what it builds.
pub(crate) fn target_directory() -> Result<PathBuf> {
    command::metadata().map(|metadata: Metadata| metadata.target_directory)
}

/// Builds a package's program statically, with all optimisations, and with no path of this machine in it: the same sources and tools
/// make the same program.
pub(crate) fn portable_program(arch: Arch, package: &str) -> Result<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let target = Some(target_directory()?);
    // Of paths that match, the last counts.
    let flags = [(home, "/cargo"), (Some(command::root().to_owned()), "/numaward"), (target, "/target")]
        .into_iter()
        .filter_map(|(path, name)| Some(format!("--remap-path-prefix={}={name}", path?.display())));
    let built = build(&[package], &["--bins"], DIST, Some((arch, &flags.collect::<Vec<_>>())))?;
    let program = built.into_iter().next().map(|(_, path)| path);
    program.with_context(|| format!("cargo has built no program of {package}"))
}

/// Builds targets of the workspace for tests on this host and in machines. All tests share one selection of packages, one profile and
/// one target, so that each dependency is built once, with one set of features.
pub(crate) fn tested(targets: &[&str]) -> Result<Vec<Built>> {
    let mut cargo = tested_cargo("build")?;
    // A test among the targets adds the features that tests need.
    cargo.args(["--message-format=json-render-diagnostics", "--test", "conformance"]).args(targets);
    built(&mut cargo).context("cannot build tests and programs")
}

/// Builds tests likewise, those in the libraries with `--lib` among the targets.
pub(crate) fn tests(targets: &[&str]) -> Result<Vec<Built>> {
    let mut cargo = tested_cargo("test")?;
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]).args(targets);
    let mut tests = built(&mut cargo).context("cannot build tests")?;
    tests.retain(|built| built.is_test);
    Ok(tests)
}

/// Cargo's subcommand `build` or `test` with that selection.
pub(crate) fn tested_cargo(subcommand: &str) -> Result<Command> {
    let arch = Arch::of_host().context("tests run on x86-64 and 64-bit Arm only")?;
    let mut cargo = static_cargo(arch, "release", &[])?;
    cargo.arg(subcommand).args(WORKSPACE).args(["--profile", "release", "--target", arch.rust_target()]);
    Ok(cargo)
}

/// Builds a program of the workspace likewise.
pub(crate) fn tested_program(name: &str) -> Result<PathBuf> {
    let program = tested(&["--bin", name])?.into_iter().find(|built| built.name == name);
    program.map(|built| built.path).with_context(|| format!("cargo has built no program {name}"))
}

/// Builds an integration test likewise.
pub(crate) fn tested_test(name: &str) -> Result<Built> {
    let start = format!("{name}-");
    let test = tested(&["--test", name])?.into_iter().find(|built| built.name.starts_with(&start));
    test.with_context(|| format!("cargo has built no test {name}"))
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

/// Builds `what` of the packages: statically if there are a processor and flags for that, be it none.
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

/// Cargo with the compiler and the flags of static programs. With a target named, the flags do not touch build scripts and procedural
/// macros.
fn static_cargo(arch: Arch, profile: &str, flags: &[String]) -> Result<Command> {
    let compiler = Compiler::find(arch)?;
    let own = compiler.flags();
    let mut all = "-C target-feature=+crt-static".to_owned();
    // A program that can be loaded anywhere relocates itself at each start: most of the time of a short command in an emulated
    // machine. Users get one, since its addresses are random.
    // The table of its relocations, of which each start reads all, is packed (glibc 2.36; not for Arm in binutils 2.40).
    if arch == Arch::Amd64 {
        all += if profile == DIST { PACKED_RELOCATIONS } else { " -C relocation-model=static" };
    }
    let all = flags.iter().chain(&own).fold(all, |all, flag| all + " " + flag);
    let mut cargo = compiler.cargo();
    cargo.env("RUSTDOCFLAGS", &all).env("RUSTFLAGS", all);
    Ok(cargo)
}

/// Runs cargo, and returns the programs that it has built.
fn built(cargo: &mut Command) -> Result<Vec<Built>> {
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "see above");
    let mut programs = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Message = serde_json::from_slice(line).context("cannot read cargo's messages")?;
        if let Some(path) = message.executable {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let package = message.manifest_path.as_deref().and_then(Path::parent).unwrap_or(command::root());
            let is_test = message.profile.is_some_and(|profile| profile.test);
            programs.push(Built { name, path, package: package.to_owned(), is_test });
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    /// A table of the workspace's `Cargo.toml`: values by key.
    fn table(name: &str) -> BTreeMap<&'static str, &'static str> {
        let lines = include_str!("../../Cargo.toml").lines();
        let lines = lines.skip_while(|line| *line != name).skip(1).take_while(|line| !line.starts_with('['));
        lines.filter_map(|line| line.split_once(" = ")).collect()
    }

    /// `dist` inherits from `release`: what it does not set itself would reach users as `release` has it.
    #[test]
    fn dist_has_settings_of_its_own_for_each_package() {
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

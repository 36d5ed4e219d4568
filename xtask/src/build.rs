//! `cargo xtask build`, and the static programs that go into virtual machines.

use std::env;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result};
use clap::Args;
use numaward_vm::Arch;
use serde::Deserialize;

use crate::command;
use crate::setup::{self, Compiler, Part};

/// What is built and tested on this host: all but the programs for the kernel. The tests that boot machines are built by name only.
pub(crate) const WORKSPACE: &[&str] = &["--workspace", "--exclude", "numaward-ebpf"];

/// What users get, and what is measured: with all optimisations, which takes minutes.
pub(crate) const DIST: &str = "dist";

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

/// Builds the program of the end-to-end tests. The selection is that of the unit tests, so that cargo builds each dependency with
/// the features that it has there, and not again.
pub(crate) fn end_to_end_tests() -> Result<PathBuf> {
    tested_test("e2e")
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

/// Builds `numaward` as the unit tests do: what they have built is taken as it is, which saves a run of all tests minutes.
pub(crate) fn tested_program() -> Result<PathBuf> {
    // The features of a dependency are those that any of the named packages wants, for tests too if there is one.
    let target = ["--bin", "numaward", "--test", "conformance"];
    let selection = WORKSPACE.iter().chain(&target).copied().collect::<Vec<_>>();
    let program = build(&[], &selection, "dev", None)?.into_iter().find(|(name, _)| name == "numaward");
    program.map(|(_, path)| path).context("cargo has built no program `numaward`")
}

/// Builds a test of the daemon, likewise.
pub(crate) fn tested_test(test: &str) -> Result<PathBuf> {
    let selection = WORKSPACE.iter().chain(&["--test", test]).copied().collect::<Vec<_>>();
    let start = format!("{test}-");
    let program = build(&[], &selection, "dev", None)?.into_iter().find(|(name, _)| name.starts_with(&start));
    program.map(|(_, path)| path).with_context(|| format!("cargo has built no test {test}"))
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

/// Builds `what` of the packages: statically where there are a processor and flags for that, be it none.
fn build(
    packages: &[&str],
    what: &[&str],
    profile: &str,
    static_for: Option<(Arch, &[String])>,
) -> Result<Vec<(String, PathBuf)>> {
    let static_for = match static_for {
        Some((arch, flags)) => Some((arch, Compiler::find(arch)?, flags)),
        None => None,
    };
    let mut cargo = static_for.as_ref().map_or_else(command::cargo, |(_, compiler, _)| compiler.cargo());
    cargo.args(["build", "--message-format=json-render-diagnostics", "--profile", profile]).args(what);
    cargo.args(packages.iter().flat_map(|package| ["-p", package]));
    if let Some((arch, compiler, flags)) = static_for {
        // With a target named, the flags do not touch build scripts and procedural macros.
        let own = compiler.flags();
        let flags = flags.iter().chain(&own);
        let mut all = "-C target-feature=+crt-static".to_owned();
        // A program that can be loaded anywhere relocates itself at each start: most of the time of a short command in an emulated
        // machine. Users get one, since its addresses are random.
        if profile != DIST && arch == Arch::Amd64 {
            all += " -C relocation-model=static";
        }
        let flags = flags.fold(all, |all, flag| all + " " + flag);
        cargo.args(["--target", arch.rust_target()]).env("RUSTFLAGS", flags);
    }
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    anyhow::ensure!(output.status.success(), "cannot build {}: see above", packages.join(", "));
    let mut programs = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Message = serde_json::from_slice(line).context("cannot read cargo's messages")?;
        if let Some(path) = message.executable {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            programs.push((name, path));
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

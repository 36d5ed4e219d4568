//! Provenance of the released files: an in-toto statement (version 1) with SLSA's provenance (version 1).
//!
//! The statement itself is not signed; the publisher signs the files. Anyone can verify it by another build of the
//! commit with these tools, because the same commit and the same tools make the same bytes. It therefore names no time
//! and no machine.
//!
//! Sources: in-toto attestation framework, `spec/v1/statement.md` and `resource_descriptor.md`; SLSA 1.0, provenance.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use numaward_vm::Arch;
use serde_json::{Value, json};

use super::VERSION;
use super::tree::sha256;
use crate::setup::Compiler;
use crate::{build, command, setup};

/// Type of the build: `cargo xtask dist`, as SECURITY.md describes it.
const BUILD_TYPE: &str = "urn:numaward:dist:1";
/// Builder: a person's own machine.
const BUILDER: &str = "urn:numaward:builder:local";

/// Origin of a program.
pub(crate) enum ProgramOrigin<'a> {
    /// The checkout, with the tools of this machine, for these processors.
    Built(&'a [Arch]),
    /// Existing files, made by unknown tools.
    Given(&'a [PathBuf]),
}

/// Writes the statement about the released files.
pub(crate) fn write(
    path: &Path,
    made: &[PathBuf],
    origin: &ProgramOrigin<'_>,
    epoch: u64,
) -> Result<PathBuf> {
    let materials = match origin {
        ProgramOrigin::Built(archs) => [source()?, tools(archs)?].concat(),
        ProgramOrigin::Given(programs) => {
            let of = |path: &PathBuf| Ok(json!({ "name": "program", "digest": { "sha256": sha256(path)? } }));
            programs.iter().map(of).collect::<Result<_>>()?
        }
    };
    let mut text = serde_json::to_string_pretty(&statement(made, &materials, epoch)?)?;
    text.push('\n');
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.to_owned())
}

fn statement(made: &[PathBuf], materials: &[Value], epoch: u64) -> Result<Value> {
    let mut subjects = Vec::new();
    for path in made {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        subjects.push(json!({ "name": name, "digest": { "sha256": sha256(path)? } }));
    }
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": { "command": "cargo xtask dist", "version": VERSION },
                "internalParameters": { "SOURCE_DATE_EPOCH": epoch, "profile": build::DIST },
                "resolvedDependencies": materials,
            },
            "runDetails": { "builder": { "id": BUILDER } },
        },
    }))
}

/// Returns the commit, if this is a checkout, and the crates of the build.
fn source() -> Result<Vec<Value>> {
    let git = |arguments: &[&str]| {
        command::read(Command::new("git").args(arguments).current_dir(command::root()))
            .map(|text| text.trim().to_owned())
    };
    let mut materials = Vec::new();
    if let Ok(commit) = git(&["rev-parse", "HEAD"]) {
        let is_modified = !git(&["status", "--porcelain"])?.is_empty();
        materials.push(json!({
            "name": "source",
            "digest": { "gitCommit": commit },
            "annotations": { "modified": is_modified },
        }));
    }
    let lock = sha256(&command::root().join("Cargo.lock"))?;
    materials.push(json!({ "name": "Cargo.lock", "digest": { "sha256": lock } }));
    Ok(materials)
}

/// Returns the compilers and the linker, with their versions.
fn tools(archs: &[Arch]) -> Result<Vec<Value>> {
    let mut tools = Vec::new();
    for &arch in archs {
        tools.push(compiler(&format!("rustc for {arch}"), &Compiler::find(arch)?.version()?)?);
    }
    let (ebpf, linker) = setup::ebpf_tools().context("the tools that built the probes are gone")?;
    tools.push(compiler("rustc of the probes", &ebpf)?);
    tools.push(json!({ "name": "bpf-linker", "uri": format!("pkg:cargo/bpf-linker@{linker}") }));
    Ok(tools)
}

/// Parses the output of a compiler with `-vV`.
fn compiler(name: &str, text: &str) -> Result<Value> {
    let field = |field: &str| text.lines().find_map(|line| line.strip_prefix(field)).map(str::trim);
    let release = field("release:").with_context(|| format!("{name} -vV has no release:\n{text}"))?;
    let mut tool = json!({
        "name": name,
        "uri": format!("pkg:generic/rustc@{release}"),
        "annotations": { "llvm": field("LLVM version:"), "host": field("host:") },
    });
    if let Some(commit) = field("commit-hash:").filter(|commit| *commit != "unknown") {
        tool["digest"] = json!({ "gitCommit": commit });
    }
    Ok(tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPILER: &str = "rustc 1.95.0 (abc 2026-01-01)\nbinary: rustc\ncommit-hash: abc\nrelease: 1.95.0\n\
        host: x86_64-unknown-linux-gnu\nLLVM version: 22.1.0\n";

    #[test]
    fn names_products_and_materials() {
        let folder = tempfile::tempdir().unwrap();
        let made = ["a.tar.gz", "b.deb"].map(|name| {
            let path = folder.path().join(name);
            fs::write(&path, name).unwrap();
            path
        });
        let [statement, again] = [(); 2].map(|()| {
            let materials = [source().unwrap(), vec![compiler("rustc", COMPILER).unwrap()]].concat();
            statement(&made, &materials, 1_700_000_000).unwrap()
        });
        assert_eq!(statement, again, "the same each time");
        let text = statement.to_string();
        for path in [command::root(), folder.path()] {
            assert!(!text.contains(&*path.to_string_lossy()), "a path of this machine:\n{text}");
        }
        assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
        for (subject, path) in statement["subject"].as_array().unwrap().iter().zip(&made) {
            assert_eq!(subject["name"], path.file_name().unwrap().to_str().unwrap());
            assert_eq!(subject["digest"]["sha256"], sha256(path).unwrap());
        }
        assert_eq!(statement["subject"].as_array().unwrap().len(), 2);

        let build = &statement["predicate"]["buildDefinition"];
        let materials = build["resolvedDependencies"].as_array().unwrap();
        let of = |name: &str| materials.iter().find(|of| of["name"] == name).unwrap_or(&Value::Null);
        let lock = sha256(&command::root().join("Cargo.lock")).unwrap();
        assert_eq!(of("Cargo.lock")["digest"]["sha256"], lock);
        assert_eq!(of("rustc")["uri"], "pkg:generic/rustc@1.95.0");
        // As the specification requires, each material has an address or a digest.
        for material in materials {
            assert!(material["uri"].is_string() || material["digest"].is_object(), "{material}");
        }
        assert_eq!(statement["predicate"]["runDetails"]["builder"]["id"], BUILDER);
    }

    #[test]
    fn given_program_has_no_tools() {
        let folder = tempfile::tempdir().unwrap();
        let [program, path] = ["program", "statement"].map(|name| folder.path().join(name));
        fs::write(&program, "x").unwrap();
        write(&path, &[], &ProgramOrigin::Given(std::slice::from_ref(&program)), 0).unwrap();
        let statement: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let materials = &statement["predicate"]["buildDefinition"]["resolvedDependencies"];
        let digest = sha256(&program).unwrap();
        assert_eq!(*materials, json!([{ "name": "program", "digest": { "sha256": digest } }]));
    }

    #[test]
    fn names_tools_of_this_machine() {
        if setup::ebpf_tools().is_none() {
            return numaward_tests_support::skip_outside_ci("the tools that build the probes are missing");
        }
        let archs: Vec<_> = Arch::of_host().into_iter().collect();
        let tools = tools(&archs).unwrap();
        let names: Vec<_> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
        let own = archs.iter().map(|arch| format!("rustc for {arch}"));
        let all = own.chain(["rustc of the probes", "bpf-linker"].map(str::to_owned));
        assert_eq!(names, all.collect::<Vec<_>>());
        for tool in tools {
            let uri = tool["uri"].as_str().unwrap();
            let version = uri.split_once('@').unwrap().1;
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{uri}");
        }
    }

    #[test]
    fn parses_compiler_version() {
        let tool = compiler("rustc", COMPILER).unwrap();
        assert_eq!(
            (&tool["uri"], &tool["digest"]["gitCommit"]),
            (&json!("pkg:generic/rustc@1.95.0"), &json!("abc"))
        );
        let debian = compiler("rustc", &COMPILER.replace("hash: abc", "hash: unknown")).unwrap();
        assert!(debian.get("digest").is_none(), "{debian}");
        assert!(compiler("rustc", "").is_err());
    }
}

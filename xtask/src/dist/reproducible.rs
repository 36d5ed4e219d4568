//! `cargo xtask dist --check-reproducible`: checks that the same commit and the same tools make the same bytes, in any
//! folder.
//!
//! The last commit is cloned into two folders with names of different lengths. In each, `cargo xtask dist` builds
//! everything from scratch, with another umask, time zone and language. Then all files must have the same digests.
//!
//! Both builds run on this machine with its tools, so they do not show that another machine makes the same bytes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_vm::Arch;

use super::tree::sha256;
use crate::{build, command};

/// Folder and environment of a build.
struct BuildEnvironment {
    folder: &'static str,
    umask: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const BUILDS: [BuildEnvironment; 2] = [
    BuildEnvironment { folder: "a", umask: "022", environment: &[("TZ", "UTC"), ("LC_ALL", "C")] },
    BuildEnvironment {
        folder: "a-folder-with-another-name",
        umask: "077",
        environment: &[("TZ", "Asia/Tokyo"), ("LC_ALL", "C.UTF-8")],
    },
];
/// Variables that would lead both builds to the same folder, or sign their files, which depends on the time.
const REMOVED_VARIABLES: [&str; 3] = ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR", "NUMAWARD_KEY"];

/// Builds the last commit twice for these processors, or only the program of a package, and compares all files.
pub(super) fn check(archs: &[Arch], package: Option<&str>) -> Result<()> {
    let git = |arguments: &[&str]| {
        command::read(Command::new("git").args(arguments).current_dir(command::root()))
            .map(|text| text.trim().to_owned())
    };
    let commit = git(&["rev-parse", "HEAD"]).context("only a commit can be built twice")?;
    if !git(&["status", "--porcelain"])?.is_empty() {
        println!("changes that are not committed are not part of what is built");
    }
    let folder = build::target_directory()?.join("reproducible");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let mut made = Vec::new();
    for build in &BUILDS {
        let parent = folder.join(build.folder);
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let (checkout, out) = (parent.join("checkout"), parent.join("made"));
        let mut clone = Command::new("git");
        clone.args(["clone", "--quiet", "--no-checkout"]).arg(command::root()).arg(&checkout);
        command::run(&mut clone)?;
        let mut switch = Command::new("git");
        switch.args(["checkout", "--quiet", "--detach", &commit]).current_dir(&checkout);
        command::run(&mut switch)?;
        println!("building {commit} in {}", checkout.display());
        command::run(&mut dist(build, &checkout, &out, archs, package))?;
        // It needs gigabytes, and is not compared.
        let target = checkout.join("target");
        fs::remove_dir_all(&target).with_context(|| format!("cannot remove {}", target.display()))?;
        made.push(digests(&out)?);
    }
    let [first, second] = &made[..] else { bail!("two builds were made") };
    ensure!(!first.is_empty(), "nothing was made");
    let differences = differences(first, second);
    if !differences.is_empty() {
        let folder = folder.display();
        bail!(
            "the same commit made other bytes in another folder ({folder}):\n  {}",
            differences.join("\n  ")
        );
    }
    for (path, digest) in first {
        println!("{digest}  {path}");
    }
    println!("{commit}: two checkouts made the same {} files", first.len());
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// Returns the command that builds everything in a checkout.
fn dist(
    build: &BuildEnvironment,
    checkout: &Path,
    out: &Path,
    archs: &[Arch],
    package: Option<&str>,
) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("umask {} && exec \"$@\"", build.umask)).arg("sh");
    shell.args(["cargo", "xtask", "dist", "--out"]).arg(out);
    for arch in archs {
        shell.args(["--arch", &arch.to_string()]);
    }
    if let Some(package) = package {
        shell.args(["--only-program", package]);
    }
    shell.envs(build.environment.iter().copied()).current_dir(checkout);
    for variable in REMOVED_VARIABLES {
        shell.env_remove(variable);
    }
    shell
}

/// Returns the digest of each file in a folder, by its path there.
fn digests(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut digests = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(&at).with_context(|| format!("cannot list {}", at.display()))? {
            let path = entry?.path();
            let name = path.strip_prefix(folder)?.display().to_string();
            let kind = fs::symlink_metadata(&path)?.file_type();
            if kind.is_dir() {
                open.push(path);
            } else if kind.is_symlink() {
                digests.insert(name, format!("link to {}", fs::read_link(&path)?.display()));
            } else {
                digests.insert(name, sha256(&path)?);
            }
        }
    }
    Ok(digests)
}

/// Returns one line for each file that differs.
fn differences(first: &BTreeMap<String, String>, second: &BTreeMap<String, String>) -> Vec<String> {
    let paths: BTreeSet<_> = first.keys().chain(second.keys()).collect();
    let different = paths.into_iter().filter(|path| first.get(*path) != second.get(*path));
    let digest = |of: Option<&String>| of.map_or("missing".to_owned(), String::clone);
    different
        .map(|path| format!("{path}: {}, {}", digest(first.get(path)), digest(second.get(path))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_differences_between_folders() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| {
            let folder = dir.path().join(name);
            fs::create_dir_all(folder.join("apt/pool")).unwrap();
            for file in ["SHA256SUMS", "apt/pool/a.deb"] {
                fs::write(folder.join(file), file).unwrap();
            }
            folder
        });
        let found = || differences(&digests(&first).unwrap(), &digests(&second).unwrap());
        assert_eq!(digests(&first).unwrap().len(), 2);
        assert_eq!(found(), [""; 0]);
        fs::write(second.join("apt/pool/a.deb"), "other").unwrap();
        fs::write(first.join("b.rpm"), "").unwrap();
        std::os::unix::fs::symlink("b.rpm", second.join("c")).unwrap();
        let found = found();
        let starts = ["apt/pool/a.deb: ", "b.rpm: e3b0c442", "c: missing, link to b.rpm"];
        assert_eq!(found.len(), starts.len(), "{found:?}");
        assert!(found.iter().zip(starts).all(|(line, start)| line.starts_with(start)), "{found:?}");
        assert!(found[1].ends_with(", missing"), "{found:?}");
    }

    #[test]
    fn build_environments_differ() {
        let [first, second] = &BUILDS;
        assert_ne!(first.folder.len(), second.folder.len());
        assert_ne!(first.umask, second.umask);
        for ((name, value), (other_name, other)) in first.environment.iter().zip(second.environment) {
            assert_eq!(name, other_name);
            assert_ne!(value, other);
        }
    }
}

//! A Debian root file system with systemd, as an archive that machines boot from.
//!
//! mmdebstrap makes it from this system's mirror, with or without root. The archive is the same, byte for byte, as long
//! as the mirror has the same packages: times are clamped, files sorted, and all files are owned by root.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result};
use numaward_vm::{Arch, DEBIAN, DEBIAN_ARCHIVE};

use super::apt::explained;
use super::steps::{Steps, say};
use super::{packages, sources, store};
use crate::command;

const PART: &str = "Debian with systemd";
const PACKAGES: &[&str] = &["dbus", "systemd-sysv"];
/// Programs that run another processor's programs on this host, to configure packages.
const FOREIGN: &[(&str, &str)] = &[("arch-test", "arch-test"), ("qemu-aarch64-static", "qemu-user-static")];
/// Paths that no machine needs, or that differ each time.
const EXCLUDED_PATHS: &[&str] = &[
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl",
    "usr/share/perl5",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/log",
];

/// Unnecessary folders below that of the processor's libraries.
const EXCLUDED_LIBRARIES: &[&str] = &["gconv", "perl"];

/// Returns the paths that are not packed, relative to the root.
fn excluded_paths(arch: Arch) -> Vec<String> {
    let of_arch = |name: &&str| format!("usr/lib/{}-linux-gnu/{name}", arch.kernel_name());
    let others = EXCLUDED_PATHS.iter().map(|path| (*path).to_owned());
    EXCLUDED_LIBRARIES.iter().map(of_arch).chain(others).collect()
}

/// Ensures that the archive is in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    let folder = steps.cache.debian_dir(arch, DEBIAN);
    let excluded_paths = excluded_paths(arch);
    let recipe = format!("{DEBIAN}: {} without {}\n", PACKAGES.join(" "), excluded_paths.join(" "));
    match store::state(&folder, &recipe) {
        store::EntryState::Whole if !steps.update => {
            steps.found(PART, &folder.display().to_string());
            return Ok(());
        }
        store::EntryState::Damaged => say(PART, "the cache entry is damaged or outdated: making it again"),
        store::EntryState::Whole | store::EntryState::Missing => {}
    }
    packages::ensure(steps, "mmdebstrap", &[("mmdebstrap", "mmdebstrap")])?;
    if Arch::of_host() != Some(arch) {
        packages::ensure(steps, "programs of another processor", FOREIGN)?;
    }
    let started = Instant::now();
    let mirror = sources::mirror(Path::new("/")).with_context(|| format!("cannot make {PART}"))?;
    let source = mirror.line(DEBIAN);
    say(PART, "making a root file system, which takes a minute or two");
    store::replace(&folder, &recipe, |folder| {
        let scratch = store::scratch(folder.parent().unwrap_or(folder))?;
        let tar = scratch.path().join("root.tar");
        bootstrap(PART, arch, DEBIAN, PACKAGES, &source, &tar)?;
        let tree = scratch.path().join("tree");
        fs::create_dir(&tree)?;
        command::read(Command::new("tar").arg("-xpf").arg(&tar).arg("-C").arg(&tree))?;
        pack(&tree, &excluded_paths, &folder.join(DEBIAN_ARCHIVE))
    })?;
    say(PART, &format!("ready after {} s", started.elapsed().as_secs()));
    Ok(())
}

/// Makes the archive `tar` of a root file system with these packages and their dependencies.
pub(super) fn bootstrap(
    part: &str,
    arch: Arch,
    release: &str,
    packages: &[&str],
    source: &str,
    tar: &Path,
) -> Result<()> {
    let mut mmdebstrap = Command::new("mmdebstrap");
    // mmdebstrap does not read this system's configuration, which may disable the expiry of indexes because the mirror
    // is a copy
    // of an earlier day.
    let dates = command::read(Command::new("apt-config").args(["dump", "Acquire::Check-Valid-Until"]))?;
    for option in dates.lines() {
        mmdebstrap.arg(format!("--aptopt={option}"));
    }
    mmdebstrap
        .env("LC_ALL", "C")
        // No file gets a later time.
        .env("SOURCE_DATE_EPOCH", "0")
        .args(["--variant=essential", "--format=tar", "--skip=output/dev"])
        .arg(format!("--architectures={arch}"))
        .arg(format!("--include={}", packages.join(",")))
        .arg(release)
        .arg(tar)
        .arg(source);
    command::run_slowly(part, &mut mmdebstrap)
        .map_err(|error| explained(&error, &format!("cannot make a root file system of Debian {release}")))
}

/// Packs a tree, owned by root, for the kernel to unpack.
fn pack(tree: &Path, excluded_paths: &[String], archive: &Path) -> Result<()> {
    let mut names = Vec::new();
    list(tree, Path::new(""), excluded_paths, &mut names)?;
    let mut cpio = Command::new("cpio")
        .args(["--create", "--quiet", "--null", "--reproducible", "--format=newc", "--owner=0:0"])
        .current_dir(tree)
        .stdin(Stdio::piped())
        .stdout(File::create(archive)?)
        .spawn()
        .context("cannot run cpio")?;
    cpio.stdin.take().context("cpio takes no input")?.write_all(names.join("\0").as_bytes())?;
    anyhow::ensure!(cpio.wait()?.success(), "cpio could not pack {}", tree.display());
    Ok(())
}

/// Lists paths relative to `root`, folders before their content.
fn list(root: &Path, below: &Path, excluded_paths: &[String], names: &mut Vec<String>) -> Result<()> {
    let folder = root.join(below);
    let mut entries = fs::read_dir(&folder)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("cannot list {}", folder.display()))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = below.join(entry.file_name());
        if excluded_paths.iter().any(|excluded_paths| path == Path::new(excluded_paths)) {
            continue;
        }
        names.push(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned());
        if entry.file_type()?.is_dir() {
            list(root, &path, excluded_paths, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn archive_is_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let archives = ["a", "b"].map(|name| {
            let tree = folder.path().join(name);
            for path in ["usr/bin", "usr/share/man", "var/log"] {
                fs::create_dir_all(tree.join(path)).unwrap();
            }
            // In another order.
            for file in if name == "a" { ["x", "y"] } else { ["y", "x"] } {
                fs::write(tree.join("usr/bin").join(file), file).unwrap();
            }
            fs::write(tree.join("usr/share/man/page"), "").unwrap();
            symlink("usr/bin", tree.join("bin")).unwrap();
            let touched = Command::new("sh")
                .args(["-c", "find . -exec touch -h -d @0 {} +"])
                .current_dir(&tree)
                .status();
            assert!(touched.unwrap().success());
            let archive = folder.path().join(format!("{name}.cpio"));
            pack(&tree, &excluded_paths(Arch::Amd64), &archive).unwrap();
            archive
        });
        let [a, b] = archives.map(|archive| fs::read(archive).unwrap());
        assert!(a == b, "the archives differ");
        let mut listing = Command::new("cpio");
        listing.args(["--list", "--quiet", "--file"]).arg(folder.path().join("a.cpio"));
        assert_eq!(
            command::read(&mut listing).unwrap(),
            "bin\nusr\nusr/bin\nusr/bin/x\nusr/bin/y\nusr/share\nvar\n"
        );
    }
}

//! A package for Debian and its derivatives, built by dpkg-deb.
//!
//! An installation neither starts nor enables the service, because the administrator has to decide this. An upgrade
//! restarts the service if it is running; the kernel keeps the guarantees meanwhile. A removal stops it, and keeps the
//! package's configuration and the ledger; a purge removes these too.
//!
//! The scripts are those of debhelper's `dh_installsystemd --no-enable --no-start`: the administrator's choice to
//! enable the unit outlives a removal, and `policy-rc.d` is respected before anything is stopped or restarted.
//!
//! Sources: Debian policy 4.6, sections 5, 6 and 12; debhelper 13.11, `autoscripts`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use numaward_vm::Arch;

use super::tree::{FileTree, gzipped};
use super::{
    CONFIGURATION, CONFIGURATION_FOLDERS, Contents, EXECUTABLE, MAINTAINER, PLAIN, PackageFile, Program,
    SUMMARY,
};
use super::{changelog, checkout, entry};
use crate::command;

const DESCRIPTION: &str = " Gives services exclusive CPUs and memory on NUMA nodes, and counts by eBPF
 whether their memory is on the guaranteed nodes.
 .
 The service is neither enabled nor started: `systemctl enable --now numaward`
 begins to watch the host.
";

const AFTER_INSTALLING: &str = r#"#!/bin/sh
set -e
case "$1" in
configure | abort-upgrade | abort-deconfigure | abort-remove)
    for unit in numaward.service numaward.socket; do
        if deb-systemd-helper --quiet was-enabled $unit; then
            deb-systemd-helper enable $unit >/dev/null || true
        fi
        deb-systemd-helper update-state $unit >/dev/null || true
    done
    if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload >/dev/null || true
        if [ -n "$2" ]; then
            deb-systemd-invoke try-restart numaward.service >/dev/null || true
        fi
    fi
    ;;
esac
"#;

const BEFORE_REMOVING: &str = r#"#!/bin/sh
set -e
if [ -z "${DPKG_ROOT:-}" ] && [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    deb-systemd-invoke stop numaward.socket numaward.service >/dev/null || true
fi
"#;

const AFTER_REMOVING: &str = r#"#!/bin/sh
set -e
if [ -z "${DPKG_ROOT:-}" ] && [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload >/dev/null || true
fi
if [ "$1" = purge ]; then
    deb-systemd-helper purge numaward.service numaward.socket >/dev/null || true
    rm -rf "${DPKG_ROOT:-}/var/lib/numaward"
fi
"#;

/// Objections of lintian that are overridden, with the reason.
const LINTIAN_OVERRIDES: [(&str, &str); 4] = [
    ("shared-library-lacks-prerequisites", "It is static, for every distribution: it needs no library."),
    ("statically-linked-binary", "Programs of tests are static at fixed addresses."),
    ("embedded-library", "libyaml is a translation into Rust, which Debian does not have as a library."),
    ("unstripped-binary-or-object", "The names in a backtrace are all that a report of a panic has."),
];

const COPYRIGHT_HEAD: &str =
    "numaward is licensed under the Apache License, version 2.0, or the MIT license, at your choice.

On Debian systems, the complete text of the Apache License, version 2.0, is in
/usr/share/common-licenses/Apache-2.0. The MIT license:

";

/// Returns the name of the package.
pub(crate) fn name(version: &str, arch: Arch) -> String {
    format!("numaward_{version}_{arch}.deb")
}

/// Writes the package; `tree` is an empty tree for its content.
pub(crate) fn build(contents: &Contents, program: &Program, tree: &FileTree, package: &Path) -> Result<()> {
    for PackageFile { path, bytes, mode } in entries(contents, program, tree.epoch())? {
        tree.file(&path, &bytes, mode)?;
    }
    for folder in CONFIGURATION_FOLDERS {
        tree.folder(Path::new(folder))?;
    }
    let kibibytes = size(tree.root())?.div_ceil(1024);
    let control = format!(
        "Package: numaward\nVersion: {}\nArchitecture: {}\nMaintainer: {MAINTAINER}\n\
         Section: admin\nPriority: optional\nInstalled-Size: {kibibytes}\n\
         Description: {SUMMARY}\n{DESCRIPTION}",
        contents.version, program.arch
    );
    let sums = sums(tree.root())?;
    tree.file("DEBIAN/control", control.as_bytes(), PLAIN)?;
    tree.file("DEBIAN/conffiles", format!("/{CONFIGURATION}\n").as_bytes(), PLAIN)?;
    tree.file("DEBIAN/md5sums", sums.as_bytes(), PLAIN)?;
    for (name, script) in
        [("postinst", AFTER_INSTALLING), ("prerm", BEFORE_REMOVING), ("postrm", AFTER_REMOVING)]
    {
        tree.file(&format!("DEBIAN/{name}"), script.as_bytes(), EXECUTABLE)?;
    }
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.args(["--build", "--root-owner-group", "-Zxz", "-z3", "--threads-max=1"])
        .arg(tree.root())
        .arg(package)
        .env("SOURCE_DATE_EPOCH", tree.epoch().to_string());
    command::read(&mut dpkg).context("a Debian package takes dpkg-deb, which other systems call dpkg")?;
    Ok(())
}

fn entries(contents: &Contents, program: &Program, epoch: u64) -> Result<Vec<PackageFile>> {
    let mut entries = contents.installed(program, "usr/share/zsh/vendor-completions")?;
    let documents = "usr/share/doc/numaward";
    let history = changelog::debian(&changelog::read()?, epoch)?;
    entries.push(entry(format!("{documents}/changelog.gz"), gzipped(history.as_bytes())?));
    entries.push(entry(format!("{documents}/copyright"), copyright()?));
    entries.push(entry(format!("{documents}/README.md"), checkout("README.md")?));
    let overrides = LINTIAN_OVERRIDES.map(|(tag, why)| format!("# {why}\nnumaward: {tag}\n"));
    entries.push(entry("usr/share/lintian/overrides/numaward", overrides.concat()));
    Ok(entries)
}

fn copyright() -> Result<String> {
    Ok(COPYRIGHT_HEAD.to_owned() + &String::from_utf8(checkout("LICENSE-MIT")?)?)
}

/// Returns the size of all files below a folder, in bytes.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for file in files(folder, Path::new(""))? {
        bytes += fs::metadata(folder.join(file))?.len();
    }
    Ok(bytes)
}

/// Returns the checksums by which dpkg verifies installed files, without those of the configuration.
fn sums(root: &Path) -> Result<String> {
    let mut files = files(root, Path::new(""))?;
    files.retain(|file| file != Path::new(CONFIGURATION));
    files.sort();
    command::read(Command::new("md5sum").arg("--").args(&files).current_dir(root))
}

/// Returns all files below, as paths in `root`.
fn files(root: &Path, below: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            found.extend(files(root, &path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

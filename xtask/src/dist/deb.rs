//! A package for Debian and its like, by dpkg-deb.
//!
//! Installed, the service neither runs nor is enabled: to watch a host is for its administrator to decide. An upgrade
//! restarts it if it runs. What is promised meanwhile is held by the kernel.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use numaward_vm::Arch;

use super::tree::Tree;
use super::{EXECUTABLE, PLAIN, VERSION};
use crate::command;

const CONFIGURATION: &str = "/etc/numaward/config.yaml\n";

const AFTER_INSTALLING: &str = r#"#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    if [ -n "$2" ]; then
        systemctl try-restart numaward.service || true
    fi
fi
"#;

const BEFORE_REMOVING: &str = r#"#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now numaward.service || true
fi
"#;

const AFTER_REMOVING: &str = r#"#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
if [ "$1" = purge ]; then
    rm -rf /var/lib/numaward
fi
"#;

/// Packs the tree, to which it adds what dpkg needs to know.
pub(crate) fn build(tree: &Tree, arch: Arch, package: &Path) -> Result<()> {
    let kibibytes = size(tree.root())?.div_ceil(1024);
    let control = format!(
        "Package: numaward\nVersion: {VERSION}\nArchitecture: {arch}\nMaintainer: The numaward developers\n\
         Section: admin\nPriority: optional\nInstalled-Size: {kibibytes}\n\
         Description: keeps memory near the CPUs that use it, and proves it\n \
         Gives services exclusive CPUs and memory on NUMA nodes, and counts by eBPF whether\n \
         their memory is where it was promised.\n"
    );
    tree.file("DEBIAN/control", control.as_bytes(), PLAIN)?;
    tree.file("DEBIAN/conffiles", CONFIGURATION.as_bytes(), PLAIN)?;
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

/// Bytes of all files below.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
}

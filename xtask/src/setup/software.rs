//! Software under test, on a root file system with systemd, as a disk image that machines boot from.
//!
//! Such software takes hundreds of megabytes, which would not fit into the memory of a small machine. mmdebstrap
//! installs it as apt does on a host, with the units, the users and `PostgreSQL`'s first cluster that a user gets.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use numaward_vm::{Arch, NEW_SOFTWARE, PACKAGE_MANAGERS, SOFTWARE, SOFTWARE_IMAGE};

use super::steps::{Steps, say};
use super::{debian, packages, sources, store};
use crate::command;

/// A disk image with software.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DiskImage {
    /// Name in messages.
    name: &'static str,
    /// Folder in the cache; the last part is the Debian release.
    folder: &'static str,
    packages: &'static [&'static str],
    megabytes: u32,
}

impl DiskImage {
    /// Software of the guides.
    pub(crate) const GUIDES: Self = Self {
        name: "software of the guides",
        folder: SOFTWARE,
        packages: &[
            "dbus",
            "systemd-sysv",
            "postgresql",
            "redis-server",
            "tomcat10",
            // `ab`, a client of web servers.
            "apache2-utils",
            // `dpdk-testpmd`.
            "dpdk-dev",
            "qemu-system-x86",
            "libvirt-daemon-system",
            "libvirt-clients",
            // A guest that starts immediately, even under nested emulation, and uses all of its memory.
            "memtest86+",
        ],
        megabytes: 270,
    };

    /// Software of the guides that no stable Debian release has.
    pub(crate) const NEW_GUIDES: Self = Self {
        name: "new software of the guides",
        folder: NEW_SOFTWARE,
        packages: &[
            "dbus",
            // systemd's units need it, and its package no longer depends on it.
            "mount",
            "systemd-sysv",
            "llama.cpp-tools",
            "llama.cpp-services",
            // Writes a model.
            "python3-gguf",
        ],
        megabytes: 80,
    };

    /// Package managers, and Ansible.
    pub(crate) const PACKAGES: Self = Self {
        name: "package managers",
        folder: PACKAGE_MANAGERS,
        packages: &["dbus", "systemd-sysv", "apt", "gpg", "gpg-agent", "rpm", "ansible-core", "python3-apt"],
        megabytes: 130,
    };
}

/// Files that no machine needs, and links that would start services at boot: each guide starts its own.
const REMOVED: &[&str] = &[
    "etc/systemd/system/multi-user.target.wants",
    "etc/systemd/system/timers.target.wants",
    "usr/include",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
];
/// Free space for files of tests and programs, in MiB; the image is a sparse file.
const FREE_MIB: u64 = 1024;

/// Ensures that the image is in the cache.
pub(crate) fn ensure(steps: &Steps, image: &DiskImage) -> Result<()> {
    let DiskImage { name: part, packages: names, megabytes, .. } = *image;
    let folder = steps.cache.root().join(image.folder);
    let release = folder.file_name().unwrap_or_default().to_string_lossy();
    let recipe =
        format!("{release}: {} without {}, and {FREE_MIB} MiB\n", names.join(" "), REMOVED.join(" "));
    match store::state(&folder, &recipe) {
        store::EntryState::Whole if !steps.update => {
            steps.found(part, &folder.display().to_string());
            return Ok(());
        }
        store::EntryState::Damaged => say(part, "the cache entry is damaged or outdated: making it again"),
        store::EntryState::Whole | store::EntryState::Missing => {}
    }
    packages::ensure(steps, "mmdebstrap", &[("mmdebstrap", "mmdebstrap")])?;
    packages::ensure(steps, "e2fsprogs", &[("mkfs.ext4", "e2fsprogs")])?;
    let started = Instant::now();
    let mirror = sources::mirror(Path::new("/")).with_context(|| format!("cannot fetch {part}"))?;
    say(part, &format!("fetching {megabytes} MB and making an image of them, which takes some minutes"));
    store::replace(&folder, &recipe, |folder| {
        let scratch = store::scratch(folder.parent().unwrap_or(folder))?;
        let tar = scratch.path().join("root.tar");
        debian::bootstrap(part, Arch::Amd64, &release, names, &mirror.line(&release), &tar)?;
        let tree = scratch.path().join("tree");
        fs::create_dir(&tree)?;
        pack(&tar, &tree, &folder.join(SOFTWARE_IMAGE))
    })?;
    say(part, &format!("ready after {} s", started.elapsed().as_secs()));
    Ok(())
}

/// Makes a file system with the content of the archive; `tree` is an empty folder for it. Files keep their owners even
/// if this user is not root: as in mmdebstrap, the other users are then the subordinate ones of this user.
fn pack(tar: &Path, tree: &Path, image: &Path) -> Result<()> {
    const SCRIPT: &str = r#"
        tar -xpf "$1" -C "$2"
        (cd "$2" && rm -rf $4)
        size=$(du -s -B1M "$2")
        # A tenth more for what the file system keeps of itself.
        mkfs.ext4 -q -O ^has_journal -m 0 -d "$2" "$3" $((${size%%[!0-9]*} * 11 / 10 + $5))M
        # With owners that are not this user, only this namespace can remove it.
        rm -rf "$2"/* "#;
    let is_root = command::read(Command::new("id").arg("-u"))?.trim() == "0";
    let mut sh = Command::new(if is_root { "env" } else { "unshare" });
    if !is_root {
        sh.args(["--map-root-user", "--map-auto"]);
    }
    sh.args(["sh", "-e", "-c", SCRIPT, "sh"]).args([tar, tree, image]);
    command::read(sh.arg(REMOVED.join(" ")).arg(FREE_MIB.to_string())).map(drop)
}

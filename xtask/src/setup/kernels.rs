//! Kernels for virtual machines: the images and a few modules of Debian's cloud kernels.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use numaward_vm::Arch;

use super::apt::{self, Suite};
use super::steps::{Steps, say};
use super::{sources, store};
use crate::command;

/// The default kernel of machines.
pub(crate) const DEFAULT: &str = "6.12";

/// Source of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KernelSource {
    /// Name as in `--kernel`.
    pub(crate) name: &'static str,
    /// Debian release.
    suite: &'static str,
}

/// The oldest supported kernel, two later long-term kernels, and the newest one.
pub(crate) const SOURCES: &[KernelSource] = &[
    KernelSource { name: OLDEST, suite: "bullseye" },
    KernelSource { name: "6.1", suite: "bookworm" },
    KernelSource { name: "6.12", suite: "bookworm-backports" },
    KernelSource { name: "latest", suite: "sid" },
];

/// The kernels for Arm, including a long-term one with larger pages, for which Debian has no cloud kernel.
const ARM64: &[KernelSource] = &[
    KernelSource { name: "6.1", suite: "bookworm" },
    KernelSource { name: "6.12", suite: "bookworm-backports" },
    KernelSource { name: LARGE_PAGES, suite: "bookworm-backports" },
    KernelSource { name: "latest", suite: "sid" },
];

/// The kernel with pages of 16 KiB.
const LARGE_PAGES: &str = "6.12-16k";

/// Modules that machines may need: for the network of a machine with a forwarded port, its disk, container images, the
/// network of pods, and the users of sockets.
const MODULES: &[&str] = &[
    "bridge",
    "failover",
    "inet_diag",
    "llc",
    "net_failover",
    "overlay",
    "stp",
    "tcp_diag",
    "veth",
    "virtio",
    "virtio_blk",
    "virtio_net",
    "virtio_pci",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_ring",
];

/// The oldest of them, on which ordinary test runs are short.
pub(crate) const OLDEST: &str = "5.10";

/// Returns all kernels for a processor.
pub(crate) const fn sources(arch: Arch) -> &'static [KernelSource] {
    match arch {
        Arch::Amd64 => SOURCES,
        Arch::Arm64 => ARM64,
    }
}

/// Returns the names of all kernels.
pub(crate) fn names(arch: Arch) -> Vec<&'static str> {
    sources(arch).iter().map(|source| source.name).collect()
}

/// Returns the names of the kernels for any processor: the values of `--kernel` together with `--arch`.
pub(crate) fn all_names() -> Vec<&'static str> {
    let mut names = names(Arch::Amd64);
    let others = ARM64.iter().map(|source| source.name).filter(|name| !names.contains(name));
    let others: Vec<_> = others.collect();
    names.extend(others);
    names
}

/// Returns the source with this name.
pub(crate) fn find(arch: Arch, name: &str) -> Result<&'static KernelSource> {
    sources(arch).iter().find(|source| source.name == name).with_context(|| {
        format!("there is no kernel called {name} for {arch}: give {}", names(arch).join(", "))
    })
}

/// Returns the name of a small package that depends on the release's current kernel.
fn meta_package(arch: Arch, source: &KernelSource) -> String {
    match source.name {
        LARGE_PAGES => format!("linux-image-{arch}-16k"),
        _ => format!("linux-image-cloud-{arch}"),
    }
}

/// Ensures that the kernel is in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch, source: &KernelSource) -> Result<()> {
    let part = match arch {
        Arch::Amd64 => format!("kernel {}", source.name),
        Arch::Arm64 => format!("kernel {} for {arch}", source.name),
    };
    let folder = steps.cache.kernel_dir(arch, source.name);
    let meta_package = meta_package(arch, source);
    let recipe = format!("{meta_package} of {}: {}\n", source.suite, MODULES.join(" "));
    match store::state(&folder, &recipe) {
        store::EntryState::Whole if !steps.update => {
            steps.found(&part, &version(&folder));
            return Ok(());
        }
        store::EntryState::Damaged => say(&part, "the cache entry is damaged or outdated: fetching it again"),
        store::EntryState::Whole | store::EntryState::Missing => {}
    }
    let started = Instant::now();
    let mirror = sources::mirror(Path::new("/")).with_context(|| {
        format!(
            "cannot fetch {part} (or put vmlinuz, modules/*.ko and version into {} yourself)",
            folder.display()
        )
    })?;
    let suite = Suite::fetch_for(&steps.cache, &mirror, source.suite, arch)?;
    store::replace(&folder, &recipe, |folder| fetch(&suite, &meta_package, folder))?;
    say(&part, &format!("ready after {} s: {}", started.elapsed().as_secs(), version(&folder)));
    Ok(())
}

fn version(folder: &Path) -> String {
    fs::read_to_string(folder.join("version")).unwrap_or_default().trim().to_owned()
}

fn fetch(suite: &Suite, meta_package: &str, folder: &Path) -> Result<()> {
    // The image's package, or several if a release splits it; without the tools that would install it.
    let flavour = meta_package.trim_start_matches("linux-image");
    let packages =
        suite.closure(meta_package, |name| name.starts_with("linux-") && name.ends_with(flavour))?;
    let scratch = store::scratch(folder.parent().unwrap_or(folder))?;
    let tree = scratch.path().join("tree");
    for package in &packages {
        let deb = suite.download(package, scratch.path())?;
        apt::unpack(&deb, &tree)?;
    }
    pick(&tree, folder)
}

/// Copies the needed files of an unpacked kernel. In Debian 12 and 13 the image and its configuration are
/// `/boot/NAME-RELEASE`, in later releases `/usr/lib/modules/RELEASE/NAME`.
fn pick(tree: &Path, folder: &Path) -> Result<()> {
    let mut files = Vec::new();
    walk(tree, &mut files)?;
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let find = |stem: &str| {
        files.iter().find_map(|path| {
            let release = match name(path).strip_prefix(stem)? {
                "" => name(path.parent()?),
                suffix => suffix.strip_prefix('-')?.to_owned(),
            };
            Some((path, release))
        })
    };
    let (image, release) =
        find("vmlinuz").context("the kernel's packages hold no vmlinuz: Debian has changed their layout")?;
    fs::copy(image, folder.join("vmlinuz"))?;
    fs::write(folder.join("version"), format!("{release}\n"))?;
    if let Some((config, _)) = find("config") {
        fs::copy(config, folder.join("config"))?;
    }
    let modules = folder.join("modules");
    fs::create_dir(&modules)?;
    for path in &files {
        let file = name(path);
        let Some((module, compressed)) = file
            .strip_suffix(".ko.xz")
            .map(|name| (name, true))
            .or(file.strip_suffix(".ko").map(|name| (name, false)))
        else {
            continue;
        };
        if MODULES.contains(&module) {
            fs::copy(path, modules.join(&file))?;
            if compressed {
                command::run(Command::new("xz").args(["--decompress", "--"]).arg(modules.join(&file)))?;
            }
        }
    }
    Ok(())
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_image_and_known_modules() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        let drivers = tree.join("usr/lib/modules/7.2-cloud/kernel/drivers");
        for folder in [tree.join("boot"), drivers.clone(), root.path().join("made")] {
            fs::create_dir_all(folder).unwrap();
        }
        for name in ["virtio_net.ko", "e1000.ko", "virtio.ko.txt"] {
            fs::write(drivers.join(name), name).unwrap();
        }
        fs::write(drivers.join("overlay.ko"), "overlay").unwrap();
        command::run(Command::new("xz").arg(drivers.join("overlay.ko"))).unwrap();
        let made = root.path().join("made");
        let error = pick(&tree, &made).unwrap_err().to_string();
        assert!(error.contains("hold no vmlinuz"), "{error}");

        fs::write(tree.join("boot/vmlinuz-7.2-cloud"), "kernel").unwrap();
        fs::write(tree.join("boot/config-7.2-cloud"), "CONFIG_NUMA=y").unwrap();
        pick(&tree, &made).unwrap();
        let mut kept = Vec::new();
        walk(&made, &mut kept).unwrap();
        kept.sort();
        let kept: Vec<_> =
            kept.iter().map(|path| path.strip_prefix(&made).unwrap().to_str().unwrap()).collect();
        assert_eq!(kept, ["config", "modules/overlay.ko", "modules/virtio_net.ko", "version", "vmlinuz"]);
        assert_eq!(version(&made), "7.2-cloud");

        let newer = root.path().join("newer");
        let modules = newer.join("usr/lib/modules/7.3-cloud");
        let made_newer = root.path().join("made-newer");
        for folder in [&modules, &made_newer] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(modules.join("vmlinuz"), "kernel").unwrap();
        pick(&newer, &made_newer).unwrap();
        assert_eq!(version(&made_newer), "7.3-cloud");

        assert_eq!(fs::read_to_string(made.join("modules/overlay.ko")).unwrap(), "overlay");
    }
}

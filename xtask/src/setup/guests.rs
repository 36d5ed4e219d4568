//! Requirements for booting machines: QEMU and tools of the host; for another processor than x86-64, also the shell of
//! the machine and the firmware that describes it to the kernel.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use numaward_vm::{Arch, GUEST_BUSYBOX, GUEST_FIRMWARE, TOOLS};

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{packages, sources, store};

/// Debian release of the firmware. Debian 12's reports its flash as memory without a node, and the kernel then sees a
/// single node.
const RELEASE: &str = "trixie";
/// Packages and their needed files.
const FILES: [(&str, &str, &str); 2] = [
    ("busybox-static", "usr/bin/busybox", GUEST_BUSYBOX),
    ("qemu-efi-aarch64", "usr/share/qemu-efi-aarch64/QEMU_EFI.fd", GUEST_FIRMWARE),
];

/// Ensures that QEMU is installed, and that the files are in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    packages::ensure(steps, "QEMU", &[&[arch.emulator()], TOOLS].concat())?;
    match arch {
        Arch::Amd64 => Ok(()),
        Arch::Arm64 => files(steps, arch),
    }
}

fn files(steps: &Steps, arch: Arch) -> Result<()> {
    let part = format!("machines with {arch}");
    let folder = steps.cache.guest_dir(arch);
    let names: Vec<_> = FILES.iter().map(|(package, ..)| *package).collect();
    let recipe = format!("{} of {RELEASE} for {arch}\n", names.join(" "));
    if store::state(&folder, &recipe) == store::EntryState::Whole && !steps.update {
        steps.found(&part, &folder.display().to_string());
        return Ok(());
    }
    let suite = Suite::fetch_for(&steps.cache, &sources::mirror(Path::new("/"))?, RELEASE, arch)?;
    store::replace(&folder, &recipe, |folder| {
        let scratch = store::scratch(folder.parent().unwrap_or(folder))?;
        for (package, from, name) in FILES {
            let tree = scratch.path().join(package);
            unpack(&suite.download(&suite.newest(package)?, scratch.path())?, &tree)?;
            fs::copy(tree.join(from), folder.join(name))
                .with_context(|| format!("{package} has no {from}"))?;
        }
        Ok(())
    })?;
    say(&part, "ready");
    Ok(())
}

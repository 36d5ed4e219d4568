//! Two generations of containerd with runc, and crun with conmon, stored as packages that machines unpack into their own root.

use std::path::Path;

use anyhow::Result;
use numaward_vm::Arch;

use super::apt::Suite;
use super::steps::{Steps, say};
use super::{sources, store};

/// Packages of a release of Debian that are stored together.
struct PackageSet {
    release: &'static str,
    /// Name of the folder in the cache.
    folder: &'static str,
    packages: &'static [&'static str],
}

/// runc needs a newer libc than an old host has, so the libc is included.
const SETS: &[PackageSet] = &[
    PackageSet {
        release: "trixie",
        folder: "trixie",
        packages: &["containerd", "runc", "libc6", "libseccomp2"],
    },
    PackageSet { release: "sid", folder: "sid", packages: &["containerd", "runc", "libc6", "libseccomp2"] },
    PackageSet {
        release: "sid",
        folder: "sid-crun",
        packages: &[
            "conmon",
            "crun",
            "libatomic1",
            "libblake3-0",
            "libcap2",
            "libglib2.0-0t64",
            "libjson-c5",
            "libpcre2-8-0",
            "libsystemd0",
        ],
    },
];

/// Ensures that the packages are in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    for PackageSet { release, folder, packages } in SETS {
        let part = format!("containerd of {folder}");
        let folder = steps.cache.containerd_dir(arch, folder);
        let recipe = format!("{}\n", packages.join(" "));
        match store::state(&folder, &recipe) {
            store::EntryState::Whole if !steps.update => {
                steps.found(&part, &folder.display().to_string());
                continue;
            }
            store::EntryState::Damaged => {
                say(&part, "the cache entry is damaged or outdated: fetching it again");
            }
            store::EntryState::Whole | store::EntryState::Missing => {}
        }
        let suite = Suite::fetch_for(&steps.cache, &sources::mirror(Path::new("/"))?, release, arch)?;
        store::replace(&folder, &recipe, |folder| {
            for package in *packages {
                suite.download(&suite.newest(package)?, folder)?;
            }
            Ok(())
        })?;
        say(&part, "ready");
    }
    Ok(())
}

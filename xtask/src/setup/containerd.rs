//! Two generations of containerd with runc, stored as packages that machines unpack into their own root.

use std::path::Path;

use anyhow::Result;
use numaward_vm::Arch;

use super::apt::Suite;
use super::steps::{Steps, say};
use super::{sources, store};

/// The releases and their packages. runc needs a newer libc than an old host has, so the libc is included.
const SETS: &[(&str, &[&str])] = &[
    ("trixie", &["containerd", "runc", "libc6", "libseccomp2"]),
    ("sid", &["containerd", "runc", "libc6", "libseccomp2"]),
];

/// Ensures that the packages are in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    for (release, packages) in SETS {
        let part = format!("containerd of {release}");
        let folder = steps.cache.containerd_dir(arch, release);
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

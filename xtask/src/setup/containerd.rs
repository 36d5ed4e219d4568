//! Two generations of containerd with runc, kept as packages: machines unpack them into their own root.

use std::path::Path;

use anyhow::Result;
use numaward_vm::Arch;

use super::apt::Suite;
use super::steps::{Steps, say};
use super::{sources, store};

/// The release and its packages. runc needs a newer libc than an old host has, so that comes along.
const SETS: &[(&str, &[&str])] = &[
    ("trixie", &["containerd", "runc", "libc6", "libseccomp2"]),
    ("sid", &["containerd", "runc", "libc6", "libseccomp2"]),
];

/// Makes sure that the packages are in the cache.
pub(crate) fn ensure(steps: &Steps, arch: Arch) -> Result<()> {
    for (release, packages) in SETS {
        let part = format!("containerd of {release}");
        let folder = steps.cache.containerd_dir(arch, release);
        let recipe = format!("{}\n", packages.join(" "));
        match store::state(&folder, &recipe) {
            store::State::Whole if !steps.update => {
                steps.found(&part, &folder.display().to_string());
                continue;
            }
            store::State::Damaged => {
                say(&part, "what the cache holds is damaged or outdated: fetching it again");
            }
            store::State::Whole | store::State::Missing => {}
        }
        let suite = Suite::fetch_for(&steps.cache, &sources::mirror(Path::new("/"))?, release, arch)?;
        store::replace(&folder, &recipe, |folder| {
            for package in *packages {
                suite.download(&suite.show(package)?, folder)?;
            }
            Ok(())
        })?;
        say(&part, "ready");
    }
    Ok(())
}

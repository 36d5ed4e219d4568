//! mdbook, unpacked into the cache: not every release of Debian has it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use numaward_vm::Cache;

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{sources, store};

const PART: &str = "mdbook";
/// The first release that has it. Its program needs a newer libc than the release before has, so that comes along.
const RELEASE: &str = "trixie";
const PACKAGES: [&str; 3] = ["mdbook", "libc6", "libgcc-s1"];
const LOADER: &str = "ld-linux-x86-64.so.2";
/// What is kept of the packages, by folder.
const FILES: [(&str, &[&str]); 2] = [
    ("usr/bin", &["mdbook"]),
    ("usr/lib/x86_64-linux-gnu", &[LOADER, "libc.so.6", "libgcc_s.so.1", "libm.so.6"]),
];

/// Runs it, after setup.
pub(crate) fn command(cache: &Cache) -> Command {
    let folder = folder(cache);
    let mut command = Command::new(folder.join(LOADER));
    command.arg("--library-path").arg(&folder).arg(folder.join("mdbook"));
    command
}

fn folder(cache: &Cache) -> PathBuf {
    cache.root().join("tools").join(PART)
}

/// Makes sure that it is in the cache.
pub(crate) fn ensure(steps: &Steps) -> Result<()> {
    let folder = folder(&steps.cache);
    let recipe = format!("{} of {RELEASE}\n", PACKAGES.join(" "));
    if store::state(&folder, &recipe) == store::State::Whole && !steps.update {
        steps.found(PART, &folder.display().to_string());
        return Ok(());
    }
    let suite = Suite::fetch(&steps.cache, &sources::mirror(Path::new("/"))?, RELEASE)?;
    store::replace(&folder, &recipe, |folder| {
        let download = tempfile::Builder::new().prefix("numaward-mdbook-").tempdir()?;
        let root = download.path().join("root");
        for package in PACKAGES {
            unpack(&suite.download(&suite.show(package)?, download.path())?, &root)?;
        }
        for (from, names) in FILES {
            for name in names {
                let from = root.join(from).join(name);
                fs::copy(&from, folder.join(name))
                    .with_context(|| format!("cannot copy {}", from.display()))?;
            }
        }
        Ok(())
    })?;
    say(PART, "ready");
    Ok(())
}

//! Prometheus with promtool, unpacked into the cache: installed, it would start as a service.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use numaward_vm::Cache;

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{sources, store};

const PART: &str = "Prometheus";
/// What is kept of the package; its web pages are links to packages that are not there.
const PROGRAMS: [&str; 2] = ["prometheus", "promtool"];

/// Where promtool is after setup.
pub(crate) fn promtool(cache: &Cache) -> PathBuf {
    folder(cache).join("promtool")
}

/// Where the server is after setup.
pub(crate) fn server(cache: &Cache) -> PathBuf {
    folder(cache).join("prometheus")
}

fn folder(cache: &Cache) -> PathBuf {
    cache.root().join("prometheus")
}

/// Makes sure that the package of this system's release is in the cache.
pub(crate) fn ensure(steps: &Steps) -> Result<()> {
    let folder = folder(&steps.cache);
    let system = Path::new("/");
    let release = sources::debian_codename(system)
        .context("Prometheus: only Debian's package is known; run this stage on Debian")?;
    let recipe = format!("prometheus of {release}\n");
    if store::state(&folder, &recipe) == store::State::Whole && !steps.update {
        steps.found(PART, &folder.display().to_string());
        return Ok(());
    }
    let suite = Suite::fetch(&steps.cache, &sources::mirror(system)?, &release)?;
    store::replace(&folder, &recipe, |folder| {
        let download = tempfile::Builder::new().prefix("numaward-prometheus-").tempdir()?;
        let package = suite.download(&suite.show("prometheus")?, download.path())?;
        let root = download.path().join("root");
        unpack(&package, &root)?;
        for program in PROGRAMS {
            let from = root.join("usr/bin").join(program);
            fs::copy(&from, folder.join(program))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Ok(())
    })?;
    say(PART, "ready");
    Ok(())
}

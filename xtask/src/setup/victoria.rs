//! VictoriaMetrics, unpacked into the cache: it takes OTLP and answers as Prometheus does. Debian builds its Prometheus
//! without OTLP.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use numaward_vm::Cache;

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{sources, store};

const PART: &str = "victoria-metrics";
/// The first release whose version takes OTLP; its program runs on the one before as well.
const RELEASE: &str = "trixie";

/// Where the server is after setup.
pub(crate) fn server(cache: &Cache) -> PathBuf {
    folder(cache).join(PART)
}

fn folder(cache: &Cache) -> PathBuf {
    cache.root().join("tools").join(PART)
}

/// Makes sure that it is in the cache.
pub(crate) fn ensure(steps: &Steps) -> Result<()> {
    let folder = folder(&steps.cache);
    let recipe = format!("{PART} of {RELEASE}\n");
    if store::state(&folder, &recipe) == store::State::Whole && !steps.update {
        steps.found(PART, &folder.display().to_string());
        return Ok(());
    }
    let suite = Suite::fetch(&steps.cache, &sources::mirror(Path::new("/"))?, RELEASE)?;
    store::replace(&folder, &recipe, |folder| {
        let download = tempfile::Builder::new().prefix("numaward-victoria-").tempdir()?;
        let package = suite.download(&suite.show(PART)?, download.path())?;
        let root = download.path().join("root");
        unpack(&package, &root)?;
        let from = root.join("usr/bin").join(PART);
        fs::copy(&from, folder.join(PART)).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    })?;
    say(PART, "ready");
    Ok(())
}

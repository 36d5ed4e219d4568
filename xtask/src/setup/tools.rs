//! Programs that cargo builds into the cache: `CACHE/tools/NAME-VERSION/bin/NAME`.

use std::env;
use std::path::PathBuf;

use anyhow::Result;
use numaward_vm::Cache;

use super::apt::explained;
use super::steps::{Steps, say};
use super::store;
use crate::command;

/// A package of the Rust registry with a program of the same name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CargoTool {
    name: &'static str,
    version: &'static str,
}

impl CargoTool {
    /// Checker of licenses, duplicates and advisories of dependencies.
    pub(crate) const DENY: Self = Self { name: "cargo-deny", version: "0.20.2" };

    /// Returns the path of the program, after setup.
    pub(crate) fn path(&self, cache: &Cache) -> PathBuf {
        self.folder(cache).join("bin").join(self.name)
    }

    fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join("tools").join(format!("{}-{}", self.name, self.version))
    }
}

/// Ensures that the program is in the cache.
pub(crate) fn ensure(steps: &Steps, tool: &CargoTool) -> Result<()> {
    let folder = tool.folder(&steps.cache);
    let recipe = format!("{} {}\n", tool.name, tool.version);
    if store::state(&folder, &recipe) == store::EntryState::Whole {
        steps.found(tool.name, tool.version);
        return Ok(());
    }
    say(tool.name, &format!("building {}, this takes some minutes", tool.version));
    store::replace(&folder, &recipe, |folder| {
        let build = tempfile::Builder::new().prefix("numaward-tool-").tempdir()?;
        let mut install = command::cargo();
        install
            // Not optimized: the programs run for a second or two, and build in a third of the time.
            .args(["install", "--locked", "--no-track", "--debug"])
            .arg(format!("{}@{}", tool.name, tool.version))
            .arg("--root")
            .arg(folder)
            .arg("--target-dir")
            .arg(build.path())
            // With neither this workspace's settings nor its target.
            .current_dir(env::temp_dir())
            .env_remove("RUSTFLAGS");
        command::run_slowly(tool.name, &mut install)
            .map_err(|error| explained(&error, &format!("cannot build {} {}", tool.name, tool.version)))
    })?;
    say(tool.name, "ready");
    Ok(())
}

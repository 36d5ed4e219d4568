//! Programs of the Python registry, with their dependencies: `CACHE/tools/NAME-VERSION`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use numaward_vm::Cache;

use super::apt::explained;
use super::steps::{Steps, say};
use super::{packages, store};
use crate::command;

/// Programs that install and run them, with their Debian packages.
const PYTHON: &[(&str, &str)] = &[("python3", "python3"), ("pip3", "python3-pip")];

/// A package of the Python registry that is run as a module, or used by a script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PythonTool {
    name: &'static str,
    version: &'static str,
    module: &'static str,
}

impl PythonTool {
    /// Generator of gRPC clients from descriptions.
    pub(crate) const GRPC: Self =
        Self { name: "grpcio-tools", version: "1.85.1", module: "grpc_tools.protoc" };

    /// Helm as a library, which renders charts.
    pub(crate) const HELM: Self = Self { name: "helm-python-sdk", version: "0.2.2", module: "helm_python" };

    /// Validator of Kubernetes resources against the schemas of each version.
    pub(crate) const KUBERNETES_VALIDATE: Self =
        Self { name: "kubernetes-validate", version: "1.37.0", module: "kubernetes_validate" };

    /// Generator of requests to an API from its description.
    pub(crate) const SCHEMATHESIS: Self =
        Self { name: "schemathesis", version: "4.32.5", module: "schemathesis.cli" };

    /// Returns the command that runs the module, after setup.
    pub(crate) fn command(&self, cache: &Cache) -> Command {
        let mut command = self.python(cache);
        command.args(["-m", self.module]);
        command
    }

    /// Returns the command that runs a script with the package, after setup.
    pub(crate) fn script(&self, cache: &Cache, script: &Path) -> Command {
        let mut command = self.python(cache);
        command.arg(script);
        command
    }

    fn python(&self, cache: &Cache) -> Command {
        let mut command = Command::new("python3");
        // No file must be added to the cache.
        command.arg("-B").env("PYTHONPATH", self.folder(cache));
        command
    }

    /// Returns the folder of the package, after setup.
    pub(crate) fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join("tools").join(format!("{}-{}", self.name, self.version))
    }
}

/// Ensures that the package is in the cache.
pub(crate) fn ensure(steps: &Steps, tool: &PythonTool) -> Result<()> {
    packages::ensure(steps, "Python", PYTHON)?;
    let folder = tool.folder(&steps.cache);
    // Some dependencies are compiled for one version of Python.
    let python = command::read(Command::new("python3").arg("--version"))?;
    let recipe = format!("{} {} for {}\n", tool.name, tool.version, python.trim());
    if store::state(&folder, &recipe) == store::EntryState::Whole {
        steps.found(tool.name, tool.version);
        return Ok(());
    }
    say(tool.name, &format!("fetching {}", tool.version));
    store::replace(&folder, &recipe, |folder| {
        let mut install = Command::new("pip3");
        install
            .args(["install", "--quiet", "--no-compile", "--disable-pip-version-check", "--target"])
            .arg(folder)
            .arg(format!("{}=={}", tool.name, tool.version))
            .env("PIP_ROOT_USER_ACTION", "ignore");
        command::run_slowly(tool.name, &mut install)
            .map_err(|error| explained(&error, &format!("cannot fetch {} {}", tool.name, tool.version)))
    })?;
    say(tool.name, "ready");
    Ok(())
}

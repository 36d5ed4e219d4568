//! Programs of the Python registry, with what they need: `CACHE/tools/NAME-VERSION`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use numaward_vm::Cache;

use super::apt::explained;
use super::steps::{Steps, say};
use super::{packages, store};
use crate::command;

/// What it takes to install and run them, with its Debian packages.
const PYTHON: &[(&str, &str)] = &[("python3", "python3"), ("pip3", "python3-pip")];

/// A package of the Python registry that is run as a module, or that a script uses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PythonTool {
    name: &'static str,
    version: &'static str,
    module: &'static str,
}

impl PythonTool {
    /// Clients of gRPC that are made of nothing but a description.
    pub(crate) const GRPC: Self =
        Self { name: "grpcio-tools", version: "1.85.1", module: "grpc_tools.protoc" };

    /// Renders charts: Helm itself, as a library.
    pub(crate) const HELM: Self = Self { name: "helm-python-sdk", version: "0.2.2", module: "helm_python" };

    /// Holds Kubernetes resources against the schemas of each version.
    pub(crate) const KUBERNETES_VALIDATE: Self =
        Self { name: "kubernetes-validate", version: "1.37.0", module: "kubernetes_validate" };

    /// Makes up requests to an API from its description.
    pub(crate) const SCHEMATHESIS: Self =
        Self { name: "schemathesis", version: "4.32.5", module: "schemathesis.cli" };

    /// Runs it, after setup.
    pub(crate) fn command(&self, cache: &Cache) -> Command {
        let mut command = self.python(cache);
        command.args(["-m", self.module]);
        command
    }

    /// Runs a script that uses it, after setup.
    pub(crate) fn script(&self, cache: &Cache, script: &Path) -> Command {
        let mut command = self.python(cache);
        command.arg(script);
        command
    }

    fn python(&self, cache: &Cache) -> Command {
        let mut command = Command::new("python3");
        // Nothing is to be added to what the cache holds.
        command.arg("-B").env("PYTHONPATH", self.folder(cache));
        command
    }

    /// Where it is, after setup.
    pub(crate) fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join("tools").join(format!("{}-{}", self.name, self.version))
    }
}

/// Makes sure that it is in the cache.
pub(crate) fn ensure(steps: &Steps, tool: &PythonTool) -> Result<()> {
    packages::ensure(steps, "Python", PYTHON)?;
    let folder = tool.folder(&steps.cache);
    // Some of what it needs is compiled for one version of Python.
    let python = command::read(Command::new("python3").arg("--version"))?;
    let recipe = format!("{} {} for {}\n", tool.name, tool.version, python.trim());
    if store::state(&folder, &recipe) == store::State::Whole {
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

//! A client of the cluster that runs kubectl.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

/// Limit of a command in the format of `timeout`: longer than any wait of a command.
const WAIT_TIMEOUT: &str = "45m";

/// kubectl with the administrator's kubeconfig.
pub(super) struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    /// Folder of the discovery cache.
    cache: PathBuf,
}

impl Kubectl {
    pub(super) fn new(program: PathBuf, kubeconfig: PathBuf, folder: &Path) -> Self {
        Self { program, kubeconfig, cache: folder.join("kubectl") }
    }

    /// Runs a command and returns its output, or its error message.
    pub(super) fn run(&self, arguments: &[&str]) -> Result<String, String> {
        self.run_with(arguments, "")
    }

    /// Runs a command that has to succeed.
    pub(super) fn must(&self, arguments: &[&str]) -> String {
        self.run(arguments).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs a command and parses its output as JSON.
    pub(super) fn json(&self, arguments: &[&str]) -> Result<Value, String> {
        let text = self.run(&[arguments, &["--output=json"]].concat())?;
        serde_json::from_str(&text).map_err(|error| format!("kubectl {}: {error}", arguments.join(" ")))
    }

    /// Creates or changes an object.
    pub(super) fn apply(&self, object: &Value) {
        self.apply_text(&object.to_string());
    }

    /// Creates or changes the objects of a text.
    pub(super) fn apply_text(&self, text: &str) {
        self.run_with(&["apply", "--filename=-"], text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }

    /// Asserts that the API server would accept an object with all of its fields.
    pub(super) fn check(&self, object: &Value) {
        let strictly =
            ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts"];
        let checked = self.run_with(&[&strictly[..], &["--filename=-"]].concat(), &object.to_string());
        checked.unwrap_or_else(|error| panic!("{error}\n{object:#}"));
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let mut child = Command::new("timeout")
            .arg(WAIT_TIMEOUT)
            .arg(&self.program)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--cache-dir")
            .arg(&self.cache)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("timeout (Debian package coreutils): {error}"));
        // The input fits into the pipe. Dropping the handle closes it.
        let written = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if output.status.success() {
            written.unwrap();
            return Ok(text(&output.stdout));
        }
        Err(format!("kubectl {}: {}: {}", arguments.join(" "), output.status, text(&output.stderr)))
    }
}

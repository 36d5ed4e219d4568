//! Execution of other programs.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsStr;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;

/// The interval at which a long command prints a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Prefixes of the variables that cargo sets for a program that it runs.
const PACKAGE_VARIABLES: [&str; 2] = ["CARGO_MANIFEST_", "CARGO_PKG_"];
/// Number of last lines of a failed command's output in its error.
const TAIL_LINES: usize = 25;

/// Returns the root of the checkout.
pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// Returns cargo, to be run in the checkout.
pub(crate) fn cargo() -> Command {
    in_checkout(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns a program to be run in the checkout.
pub(crate) fn in_checkout(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    // `cargo run` sets variables of this package. A build script that depends on one of them would run again after
    // each call of
    // cargo without them.
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| PACKAGE_VARIABLES.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns cargo's metadata of this workspace, limited to the caller's fields.
pub(crate) fn metadata<T: DeserializeOwned>() -> Result<T> {
    let text = read(cargo().args(["metadata", "--no-deps", "--format-version=1"]))?;
    serde_json::from_str(&text).context("cannot read cargo's metadata")
}

/// Returns the installation of the packages in `folder/package-lock.json`, in the same folder.
pub(crate) fn npm_ci(folder: &Path) -> Command {
    let mut command = Command::new("npm");
    command.args(["ci", "--no-audit", "--no-fund"]).current_dir(folder);
    command
}

/// Returns a nonzero number that differs from run to run, for tests with random inputs.
pub(crate) fn new_seed() -> u32 {
    // The keys of the hasher are random.
    let random = RandomState::new().hash_one(());
    u32::try_from(random >> 32).unwrap_or_default().max(1)
}

/// Runs a command with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = display(command);
    let status = command.status().with_context(|| format!("cannot run `{name}`"))?;
    if !status.success() {
        bail!("`{name}` failed ({status})");
    }
    Ok(())
}

/// Returns the standard output of a command, with its errors on the terminal.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let name = display(command);
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{name}`"))?;
    if !status.success() {
        bail!("`{name}` failed ({status}): {}", String::from_utf8_lossy(&stderr).trim());
    }
    String::from_utf8(stdout).with_context(|| format!("`{name}` printed something that is not UTF-8"))
}

/// Runs a command that takes long: its output is shown only as a sign of life, and its last lines in the error.
pub(crate) fn run_slowly(what: &str, command: &mut Command) -> Result<()> {
    let name = display(command);
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot run `{name}`"))?;
    // The ends of the pipe in this process would keep the reader waiting.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    let started = Instant::now();
    let mut beat = started;
    let mut tail = VecDeque::new();
    loop {
        match lines.recv_timeout((beat + HEARTBEAT).saturating_duration_since(Instant::now())) {
            Ok(line) if line.is_empty() => {}
            Ok(line) => {
                tail.push_back(line);
                if tail.len() > TAIL_LINES {
                    tail.pop_front();
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                beat = Instant::now();
                let last = tail.back().map_or("", String::as_str);
                eprintln!("setup: {what}: {} s: {last}", started.elapsed().as_secs());
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait()?;
    if !status.success() {
        let tail = tail.make_contiguous().join("\n    ");
        bail!("`{name}` failed ({status}):\n    {tail}");
    }
    Ok(())
}

/// Returns the path of a program as the shell would find it.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    numaward_vm::find_tool(program)
}

fn display(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

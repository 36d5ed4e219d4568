//! `cargo xtask bench` and `cargo xtask conformance`: names for what cargo runs.

use std::path::{self, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::command;
use crate::setup::{self, Part};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    /// Nanoseconds per event of the page-allocation probe (needs root and BPF)
    Probes,
    /// A scrape of 10,000 workloads on 8 nodes
    Scrape,
    /// An admission
    Engine,
}

#[derive(Args)]
pub(crate) struct Bench {
    #[arg(value_enum)]
    name: Name,
    /// Arguments for the benchmark
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn bench(arguments: &Bench) -> Result<ExitCode> {
    let (package, bench) = match arguments.name {
        Name::Probes => ("numaward-probes", "alloc"),
        Name::Scrape => ("numaward-daemon", "scrape"),
        Name::Engine => ("numaward-engine", "admission"),
    };
    if !matches!(arguments.name, Name::Engine) {
        setup::ensure(&[Part::Ebpf])?;
    }
    let mut cargo = command::cargo();
    cargo.args(["bench", "--package", package, "--bench", bench, "--"]).args(&arguments.arguments);
    command::run(&mut cargo).map(|()| ExitCode::SUCCESS)
}

#[derive(Args)]
pub(crate) struct Conformance {
    /// The folder of vectors [default: the repository's own]
    folder: Option<PathBuf>,
}

pub(crate) fn conformance(arguments: &Conformance) -> Result<ExitCode> {
    let mut cargo = command::cargo();
    cargo.args([
        "run",
        "--quiet",
        "--release",
        "--package",
        "numaward-engine",
        "--example",
        "conformance",
        "--",
    ]);
    if let Some(folder) = &arguments.folder {
        // Cargo runs in the checkout's root.
        cargo.arg(path::absolute(folder).with_context(|| format!("cannot resolve {}", folder.display()))?);
    }
    command::run(&mut cargo).map(|()| ExitCode::SUCCESS)
}

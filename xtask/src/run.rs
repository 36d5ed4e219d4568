//! `cargo xtask run`: runs the daemon on this host.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::build;
use crate::setup::{self, Part};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Builds with optimizations
    #[arg(long)]
    release: bool,
    /// Arguments for `numaward run`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<ExitCode> {
    setup::ensure(&[Part::Ebpf])?;
    let profile = if arguments.release { "release" } else { "dev" };
    let programs = build::programs(&["numaward"], profile)?;
    let (_, path) = programs.into_iter().next().context("cargo has built no program `numaward`")?;
    eprintln!("running {} run {}", path.display(), arguments.arguments.join(" "));
    // Replaces this process, so that the daemon gets all signals, and its exit code is returned.
    let error = Command::new(&path).arg("run").args(&arguments.arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", path.display()))
}

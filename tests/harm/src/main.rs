//! `numaward-harm-check` runs workloads without a guarantee beside a daemon with random requests, and checks that none is killed and each
//! gets back the settings that it had.
//!
//! The problem: guarantees, releases, CPU isolation, automatic placement, the guard, modes, kills of the daemon and its removal each
//! change cgroups without a guarantee. A test with one order of these steps shows nothing about other orders.
//!
//! Terms: a *bystander* is a workload without a guarantee ([`bystander`]). A *sequence* is a number of random steps, after which the
//! daemon is removed.
//!
//! Algorithm: start the bystanders and take a snapshot of their settings ([`snapshot`]). For each sequence, start the daemon, take
//! the steps ([`sequence`]), end the commands and the daemon, run `numaward uninstall`, and compare with the snapshot.
//!
//! Invariants checked: no bystander is killed, neither by the kernel nor by a signal; afterwards the knobs of all cgroups, the memory
//! policies and the affinity masks have their old values.
//!
//! Run it as root in a virtual machine with systemd, two nodes, two small disks, and cgroup v2 at /sys/fs/cgroup.

#![forbid(unsafe_code)]

mod bystander;
mod sequence;
mod snapshot;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

use crate::{
    bystander::{Behavior, Bystanders},
    snapshot::HostSnapshot,
};

#[derive(Parser)]
#[command(
    name = "numaward-harm-check",
    about = "Checks that no workload is harmed by what the daemon does around it"
)]
struct HarmArguments {
    #[command(subcommand)]
    task: HarmCommand,
}

#[derive(Subcommand)]
enum HarmCommand {
    /// Runs random sequences of steps, and checks the bystanders
    Check {
        /// Number of sequences
        #[arg(long, default_value_t = 3)]
        sequences: u32,
        /// Number of steps of each sequence
        #[arg(long, default_value_t = 12)]
        steps: u32,
        /// The seed of the random steps
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Runs a bystander, which enters a cgroup and behaves as given until it is killed
    #[command(hide = true)]
    Bystander {
        behavior: Behavior,
        /// Cgroup to enter
        #[arg(long)]
        cgroup: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match HarmArguments::parse().task {
        HarmCommand::Check { sequences, steps, seed } => check(sequences, steps, seed),
        HarmCommand::Bystander { behavior, cgroup } => bystander::main(behavior, cgroup.as_deref()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(sequences: u32, steps: u32, seed: u64) -> Result<()> {
    let mut bystanders = Bystanders::start()?;
    let before = HostSnapshot::take(&mut bystanders)?;
    println!("{} bystanders", bystanders.count());
    for number in 0..sequences {
        let seed = seed.wrapping_add(u64::from(number));
        println!("sequence {number}, seed {seed}");
        sequence::run(&mut bystanders, &before, seed, steps)
            .with_context(|| format!("sequence {number}, --seed {seed}"))?;
    }
    println!("ok: {sequences} sequences of {steps} steps");
    Ok(())
}

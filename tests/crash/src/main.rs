//! `numaward-crash-check` kills the daemon again and again while it admits and releases, and checks what each restart
//! makes of it.
//!
//! The problem: a crash may come between any two steps, and whether the next start makes it good can only be shown by
//! one that really came there, against a real kernel, with workloads that run.
//!
//! Terms: a *round* is one life of the daemon, from its start to its death. A *fault point* is where the daemon, built
//! with them for this program, kills itself when asked to (`NUMAWARD_FAULT`); in other rounds it is killed from
//! outside at a random moment.
//!
//! Algorithm: in each round, start the daemon; compare what it says with what was promised before, with cgroupfs, with
//! its ledger file and its metrics ([`agreement`]); then admit and release at random until it dies. Meanwhile a thread
//! looks at every workload that holds a promise ([`workload::Watch`]): what it may use must never change.
//!
//! Invariants checked: what was answered stands, what was not answered is there in whole or not at all, no CPU is
//! promised twice, nothing is left behind.
//!
//! To be run as root on a machine that nobody needs, with cgroup v2 at /sys/fs/cgroup.

#![forbid(unsafe_code)]

mod agreement;
mod client;
mod daemon;
mod script;
mod workload;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "numaward-crash-check", about = "Kills the daemon and checks what a restart makes of it")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Kills the daemon so often, and checks
    Check {
        /// How often
        #[arg(long, default_value_t = 30)]
        kills: u32,
        /// What the script and the moments of death follow from
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Is the daemon
    #[command(hide = true)]
    Daemon { config: PathBuf },
    /// Is a workload: enters a cgroup and waits
    #[command(hide = true)]
    Workload { cgroup: PathBuf },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Check { kills, seed } => check(kills, seed),
        Task::Daemon { config } => daemon::main(config),
        Task::Workload { cgroup } => workload::main(&cgroup),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(kills: u32, seed: u64) -> Result<()> {
    let said = script::run(kills, seed)?;
    println!("ok: {said}");
    Ok(())
}

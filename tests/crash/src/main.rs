//! `numaward-crash-check` kills the daemon again and again while it admits and releases guarantees, and checks the
//! state after each restart.
//!
//! # Problem
//! A crash may come between any two steps. Only a real crash, on a real kernel, with running workloads, can show that
//! the next start recovers.
//!
//! # Terms
//! A *round* lasts from a start of the daemon to its death. At a *fault point*, the daemon kills itself if
//! `NUMAWARD_FAULT` names the point; a daemon for this test is built with fault points. In other rounds it is killed
//! from outside at a random moment.
//!
//! # Algorithm
//! Each round starts the daemon and compares its answer with the earlier guarantees, with cgroupfs, with its ledger
//! file and its metrics ([`agreement`]). Then it makes random admissions and releases until the daemon dies. Meanwhile
//! a thread watches every workload with a guarantee ([`workload::Watch`]): its allowed CPUs and nodes must never
//! change.
//!
//! # Checked invariants
//! - Every answered request has taken effect.
//! - An unanswered request has taken effect completely or not at all.
//! - No CPU is guaranteed twice.
//! - Nothing is left behind.
//!
//! Run it as root on a machine that can be discarded, with cgroup v2 at /sys/fs/cgroup.

#![forbid(unsafe_code)]

mod agreement;
mod client;
mod daemon;
mod power;
mod script;
mod workload;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::daemon::DaemonFolder;

#[derive(Parser)]
#[command(name = "numaward-crash-check", about = "Kills the daemon and checks each restart")]
struct CheckArguments {
    #[command(subcommand)]
    task: CheckCommand,
}

#[derive(Subcommand)]
enum CheckCommand {
    /// Kills the daemon and checks each restart
    Check {
        /// Number of kills
        #[arg(long, default_value_t = 30)]
        kills: u32,
        /// Seed of the random requests and moments of death
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Sends requests to a daemon, and notes on the disk when each was answered
    Write {
        /// Folder of the daemon's files, on that disk
        dir: PathBuf,
        /// The disk
        disk: PathBuf,
        /// Offset of the first byte behind the disk's file system
        offset: u64,
        /// Number of requests
        #[arg(long, default_value_t = 40)]
        steps: u32,
        /// Seed of the random requests
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Prints the guarantees in the ledger of a daemon that is not running
    Ledger { dir: PathBuf },
    /// Waits until a daemon, its ledger, its metrics and the kernel agree, and prints the duration
    Agree {
        /// Folder of the daemon's control socket, with its state in a subfolder
        dir: PathBuf,
        /// Maximum time to wait, in seconds
        #[arg(long)]
        within: u64,
    },
    /// Limits the file descriptors of a process
    Files {
        pid: i32,
        /// Maximum number of file descriptors
        count: u64,
    },
    /// Runs the daemon
    #[command(hide = true)]
    Daemon { config: PathBuf },
    /// Runs a workload, which enters a cgroup and waits
    #[command(hide = true)]
    Workload { cgroup: PathBuf },
}

fn main() -> ExitCode {
    let result = match CheckArguments::parse().task {
        CheckCommand::Check { kills, seed } => script::run(kills, seed).map(|said| format!("ok: {said}")),
        CheckCommand::Write { dir, disk, offset, steps, seed } => {
            power::write(&dir, &disk, offset, steps, seed).map(|said| format!("ok: {said}"))
        }
        CheckCommand::Ledger { dir } => power::read(&dir),
        CheckCommand::Agree { dir, within } => {
            agreement::wait(&DaemonFolder::at(dir), Duration::from_secs(within))
                .map(|took| format!("after {:.1} s", took.as_secs_f64()))
        }
        CheckCommand::Files { pid, count } => limit_files(pid, count).map(|()| String::new()),
        CheckCommand::Daemon { config } => daemon::main(config).map(|()| String::new()),
        CheckCommand::Workload { cgroup } => workload::main(&cgroup).map(|()| String::new()),
    };
    match result {
        Ok(said) => {
            if !said.is_empty() {
                println!("{said}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn limit_files(pid: i32, count: u64) -> Result<()> {
    let pid = Pid::from_raw(pid).context("no process has the number 0")?;
    let limit = Rlimit { current: Some(count), maximum: Some(4096) };
    prlimit(Some(pid), Resource::Nofile, limit)?;
    Ok(())
}

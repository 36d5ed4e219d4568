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
mod power;
mod script;
mod workload;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::daemon::Home;

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
    /// Asks a daemon for something again and again, and notes on the disk when that was answered
    Write {
        /// Where the daemon has its files, on that disk
        dir: PathBuf,
        /// The disk
        disk: PathBuf,
        /// The first byte of the disk that is behind its file system
        offset: u64,
        /// How often
        #[arg(long, default_value_t = 40)]
        steps: u32,
        /// What is asked for follows from it
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Prints what is promised by the ledger of such a daemon, which does not run
    Ledger { dir: PathBuf },
    /// Waits until a daemon, its ledger, its metrics and the kernel say the same, and prints after how long
    Agree {
        /// Where the daemon has its control socket, and below it its state
        dir: PathBuf,
        /// How long to wait, in seconds
        #[arg(long)]
        within: u64,
    },
    /// Limits the file descriptors of a process
    Files {
        pid: i32,
        /// The limit
        count: u64,
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
        Task::Check { kills, seed } => script::run(kills, seed).map(|said| format!("ok: {said}")),
        Task::Write { dir, disk, offset, steps, seed } => {
            power::write(&dir, &disk, offset, steps, seed).map(|said| format!("ok: {said}"))
        }
        Task::Ledger { dir } => power::read(&dir),
        Task::Agree { dir, within } => agreement::wait(&Home::at(dir), Duration::from_secs(within))
            .map(|took| format!("after {:.1} s", took.as_secs_f64())),
        Task::Files { pid, count } => limit_files(pid, count).map(|()| String::new()),
        Task::Daemon { config } => daemon::main(config).map(|()| String::new()),
        Task::Workload { cgroup } => workload::main(&cgroup).map(|()| String::new()),
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

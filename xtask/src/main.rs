//! The project's chores. `cargo xtask --help` lists them.
//!
//! Thin on purpose: it calls cargo, apt and QEMU, and depends on no library of the project but the one that boots
//! virtual machines.

#![forbid(unsafe_code)]

mod build;
mod command;
mod setup;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The chores of numaward")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Installs what is missing to build and test: eBPF toolchain, QEMU, kernels
    Setup(setup::Arguments),
    /// Builds the programs
    Build(build::Arguments),
    /// Virtual machines with several NUMA nodes
    #[command(subcommand)]
    Vm(vm::Task),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Setup(arguments) => setup::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Build(arguments) => build::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Vm(task) => vm::main(&task),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

//! The project's chores. `cargo xtask --help` lists them.
//!
//! Thin on purpose: it calls cargo, apt and QEMU, and depends on no library of the project but the one that boots
//! virtual machines.

#![forbid(unsafe_code)]

mod api;
mod architecture;
mod bench;
mod book;
mod budgets;
mod build;
mod command;
mod commits;
mod dashboards;
mod demo;
mod dependencies;
mod dist;
#[cfg(test)]
mod documented;
mod evidence;
mod fuzz;
mod generate;
mod idle;
mod language;
mod manifests;
mod modules;
mod release;
mod report;
mod run;
mod screenshots;
mod setup;
mod test;
mod units;
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
    /// Installs the missing tools to build and test: eBPF toolchain, QEMU, kernels
    Setup(setup::Arguments),
    /// Builds the programs
    Build(build::Arguments),
    /// Builds the daemon and runs it on this host
    Run(run::Arguments),
    /// Runs the tests of a lane, stages of it, or end-to-end tests
    Test(test::Arguments),
    /// Shows numaward at work in a machine with four nodes
    Demo(demo::Arguments),
    /// Runs a benchmark
    Bench(bench::BenchArguments),
    /// Replays the kubelet's recorded decisions, or runs fault scenarios
    Conformance(bench::Conformance),
    /// Fuzzes the parsers of files, pods, NRI and requests with libFuzzer
    Fuzz(fuzz::Arguments),
    /// Replays traces of pods with both strategies
    Simulate(bench::Simulate),
    /// Generates Grafana's dashboards from their tables, and the rules for the Prometheus operator
    Dashboards,
    /// Regenerates all generated files that are checked in
    Generate(generate::Arguments),
    /// Measures the language of code and pages, and lowers its limits
    Language(language::Arguments),
    /// Makes the released files: static program, packages for Debian and Fedora, apt repository, container image
    Dist(dist::DistArguments),
    /// Checks, makes, signs and tags a release; publishes nothing
    Release(release::ReleaseArguments),
    /// Makes the pictures of the documentation in the demo's machine
    Screenshots(screenshots::Arguments),
    /// Virtual machines with several NUMA nodes
    #[command(subcommand)]
    Vm(vm::Task),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Setup(arguments) => setup::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Build(arguments) => build::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Run(arguments) => run::main(&arguments),
        Task::Test(arguments) => Ok(test::main(&arguments)),
        Task::Demo(arguments) => demo::main(&arguments),
        Task::Bench(arguments) => bench::bench(&arguments),
        Task::Conformance(arguments) => bench::conformance(&arguments),
        Task::Fuzz(arguments) => fuzz::main(&arguments),
        Task::Simulate(arguments) => bench::simulate(&arguments),
        Task::Dashboards => dashboards::run(command::root())
            .and_then(|()| manifests::write_rules(command::root()))
            .map(|()| ExitCode::SUCCESS),
        Task::Generate(arguments) => generate::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Language(arguments) => language::run(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Dist(arguments) => dist::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Release(arguments) => release::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Screenshots(arguments) => screenshots::main(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Vm(task) => vm::main(&task),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

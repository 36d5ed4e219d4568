//! The command line.

#![expect(clippy::doc_markdown, reason = "these comments are the help, printed as they are")]

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// Keeps memory near the CPUs that use it, and proves it.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused, 4 the daemon is not reachable.
#[derive(Debug, Parser)]
#[command(name = "numaward", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon
    ///
    /// Without any configuration it watches every cgroup of this host and serves HTTP on 127.0.0.1:9560:
    /// /metrics for Prometheus, /livez, /readyz, and an API that /openapi.json describes. It stops on SIGTERM
    /// and SIGINT.
    ///
    /// The configuration is read from a file, then from variables named after its keys (log.level:
    /// NUMAWARD_LOG_LEVEL), then from these flags; later ones win.
    Run(Run),
    /// Print the machine: nodes, distances, CPUs, caches, hugepages
    Topology(Topology),
    /// Print how the daemon is doing: probes, workloads, what is missing and why
    Status(Status),
    /// Check what this host lacks for numaward, and say how to mend it
    ///
    /// Exits with 1 if a check fails; a warning is no failure.
    Doctor(Doctor),
    /// Check a configuration and report every error in it
    CheckConfig(CheckConfig),
    /// Print the JSON schema of the configuration
    ConfigSchema,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the version of numaward and of the kernel
    Version(Output),
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address and port of the HTTP server [default: 127.0.0.1:9560]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<String>,
    /// Least severe level that is logged: error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// Form of the logs: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Topology {
    /// Read sys and proc below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Address of the daemon [default: where the configuration has it listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) address: Option<String>,
    /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Examine the host whose file system is below this directory; for / the probes are tried too
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct CheckConfig {
    /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Output {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For programs
    Json,
}

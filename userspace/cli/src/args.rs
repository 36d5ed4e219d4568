//! The command line.

#![expect(clippy::doc_markdown, reason = "these comments are the help, printed as they are")]

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, str::FromStr, time::Duration};

use clap::{
    ArgGroup, ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser},
};
use clap_complete::Shell;
use numaward_api::{
    CpuKind, Cpus, EventKind, MemoryPolicy, MemoryTier, PartitionKind, StackKind, Tiers,
    TopologyManagerPolicy, UnknownName,
};
use numaward_config::Interval;
use numaward_engine::Quantity;
use numaward_topology::NodeSet;

use crate::{column::Column, mempolicy::Spread, recording::When};

/// Headings of the help.
const RESOURCES: &str = "CPUs and memory";
const NODES: &str = "Nodes (native: only with strategy: native of the daemon's configuration)";
const HELD: &str = "How it is held (native: as above)";
const REACHING: &str = "Reaching the daemon";

/// Keeps memory near the CPUs that use it, and proves it.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused, 4 the daemon is not reachable. `exec` passes on the code
/// of its command, and ends with 125 if it fails itself.
#[derive(Debug, Parser)]
#[command(name = "numaward", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) reached: Reached,
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
    /// Print the machine: nodes, distances, CPUs, caches, hugepages, and what is promised on each node
    ///
    /// What is promised is shown where a daemon is reachable. With --server, the machine is that of the daemon.
    Topology {
        /// Read sys and proc below this directory, and ask no daemon
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Print how the daemon is doing: probes, workloads, what is missing and why
    Status {
        /// Also measure what the probes cost, for this long; needs root on the daemon's own host
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s")]
        cost: Option<Interval>,
        #[command(flatten)]
        output: Output,
    },
    /// Watch nodes and workloads live
    ///
    /// Keys: arrows and Enter to look into a workload, s to sort, / to filter, ? for the others, q to quit. No colours
    /// are used where NO_COLOR is set, and no characters beyond ASCII where the locale is not UTF-8.
    Top {
        #[command(flatten)]
        shown: Shown,
        #[command(flatten)]
        output: Output,
    },
    /// Record what the daemon shows, to be replayed later
    ///
    /// Writes nodes, workloads, events, and what is promised, once a second, until Ctrl-C. The file is compressed, and is good
    /// up to the last moment however recording ends.
    Record(Record),
    /// Show what was recorded, as top does
    ///
    /// Keys: those of top, and t and T for the next moment and the one before, ] and [ for a minute forward or back, n and N for
    /// the next or the previous moment with an event, p to play, b and e for the beginning and the end. Needs no daemon.
    Replay(Replay),
    /// List allocations: what is promised to whom
    Get {
        /// Names of workloads [default: all]
        #[arg(value_name = "NAME", value_parser = allocation())]
        names: Vec<String>,
        #[command(flatten)]
        output: ListOutput,
    },
    /// Print everything about a workload: what it holds and why, its memory by node, its last events
    Describe {
        /// Name of the workload
        name: String,
        #[command(flatten)]
        output: Output,
    },
    /// Print which code of a workload allocates or accesses memory of other nodes, as folded call chains
    ///
    /// Each line is the process, its functions and those of the kernel, separated by semicolons, then bytes: what
    /// flamegraph.pl and similar programs take. Needs `observe.callChains.enabled` in the daemon's configuration.
    Stacks {
        /// Name of the workload
        name: String,
        /// Only memory of this node
        #[arg(long, value_name = "NODE")]
        node: Option<u32>,
        /// What the code did
        #[arg(long, value_enum, default_value_t)]
        kind: StackChoice,
        #[command(flatten)]
        output: Output,
    },
    /// Print where the memory of a workload lies, by what it is for: heap, stacks, files
    ///
    /// The kernel goes through the page tables of its processes for that, some milliseconds for each GiB of small pages.
    /// With --hot, its monitor of accesses (DAMON, Linux 6.2 or newer) watches the processes for a while; with --sampled,
    /// the processor samples addresses (IBS of AMD since Linux 6.2, PEBS of Intel, SPE of Arm), which most virtual machines
    /// cannot.
    #[command(group = ArgGroup::new("watched").args(["hot", "sampled"]))]
    Regions {
        /// Name of the workload
        name: String,
        /// Which areas are accessed, and how much of that reaches across nodes; takes root on the workload's own host
        #[arg(long)]
        hot: bool,
        /// Which areas are accessed, and from CPUs of which nodes, as sampled by the processor; also takes root
        #[arg(long)]
        sampled: bool,
        /// Watch for this long, or until Ctrl-C
        #[arg(long = "for", value_name = "TIME", value_parser = seconds, default_value = "10s", requires = "watched")]
        span: Interval,
        #[command(flatten)]
        output: Output,
    },
    /// Print what happened: misses, OOM kills, drift, intruders and other notable things
    Events {
        /// Keep printing new events, until Ctrl-C
        #[arg(short, long)]
        follow: bool,
        #[command(flatten)]
        filter: EventChoice,
        #[command(flatten)]
        output: Output,
    },
    /// Run a command with memory on nodes, and with CPUs there
    ///
    /// Whole CPUs are exclusive. Without any, or with a part of one, the command shares those that are exclusive to
    /// nobody.
    ///
    /// The command runs in a cgroup of its own and ends the guarantee with its last process.
    ///
    /// Exit codes: that of the command; 125 if numaward itself fails, for example because the guarantee is refused or no
    /// daemon is reachable; 126 if the command cannot be executed; 127 if it is not found.
    Exec(Exec),
    /// Give memory, and CPUs, to a cgroup or a unit that runs
    Guarantee(Guarantee),
    /// Change what a guarantee that runs holds, all of it or nothing
    ///
    /// It stays on its nodes. Exits with 3 if these do not have what is missing.
    Resize(Resize),
    /// End a guarantee; the cgroup gets back what it had
    Release(Release),
    /// Run a command like numactl, and register it as a workload
    ///
    /// Takes the options of numactl(8): --cpunodebind/-N, --physcpubind/-C, --membind/-m, --preferred/-p,
    /// --preferred-many/-P, --interleave/-i, --weighted-interleave/-w, --localalloc/-l, --all/-a, --show/-s and --hardware/-H.
    /// Nodes are lists such as 0-1,3, all, !0 (all but 0), +0 (counted within the nodes that are allowed), or
    /// netdev:eth0, block:nvme0n1, pci:0000:3b:00.0 and file:PATH (the node of the device).
    ///
    /// Nothing is promised: the command gets the memory policy and the CPUs, and a cgroup of its own in which it is counted
    /// under its name. Without a daemon it runs all the same. The command replaces this process, as with numactl, and
    /// what fails before that ends with 1.
    #[command(disable_help_flag = true, override_usage = "numaward numactl [NUMACTL-OPTIONS] COMMAND...")]
    Numactl {
        /// Options of numactl, the command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<OsString>,
    },
    /// Say why a workload was placed where it is, or what would happen to a request now
    Explain(Explain),
    /// Say what strategies would do with pods that come and go
    ///
    /// Replays traces, on the machines they were recorded for or on another, and compares what is admitted, how far
    /// memory is from its CPUs, and how much of what is free cannot be used. Needs neither a daemon nor privileges.
    Simulate(Simulate),
    /// Show which workloads would have to move so that a request fits
    ///
    /// Nothing is moved. Exits with 3 where no moves within the limits make it fit. Takes the strategy native.
    Plan(PlanMoves),
    /// Move workloads to other nodes so that a request fits
    ///
    /// Without --apply it prints the plan. With it, the moves are made one after the other. Ctrl-C, or a move that fails,
    /// undoes those that were made. If a cgroup or a unit is given, it gets the guarantee in the end; otherwise only the
    /// room is made.
    Rebalance(Rebalance),
    /// Moves into a cgroup and becomes a command.
    #[command(hide = true)]
    Enter {
        /// Its directory
        directory: PathBuf,
        /// The memory policy of the command, as POLICY:NODES
        #[arg(long)]
        spread: Option<Spread>,
        /// Let it run on all CPUs of the cgroup, whatever this process is bound to
        #[arg(long)]
        all_cpus: bool,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Check what is missing on this host for numaward, and say how to fix it
    ///
    /// Exits with 1 if a check fails; a warning is no failure.
    Doctor {
        /// Examine the host whose file system is below this directory; for / the probes are tried too
        #[arg(long, value_name = "DIR", default_value = "/")]
        root: PathBuf,
        /// Configuration file, which must exist [default: etc/numaward/config.yaml below the root if it exists]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Write an archive for a bug report
    ///
    /// It holds the version, the configuration without secrets, the daemon's status, allocations, metrics, events and log, the
    /// topology, the checks of doctor, and the cgroup knobs of workloads. The archive also lists what could not be read,
    /// and why. It names workloads, units and this host: look through it before you share it.
    Bugtool {
        /// The archive, which must not exist [default: numaward-bugtool-TIME.tar.gz]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check, show or describe the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write those of all commands
    Man {
        /// Write them all into this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Take over what a kubelet with static policies has promised
    ///
    /// Reads cpu_manager_state and memory_manager_state and writes the ledger, so that pods keep their CPUs and
    /// nodes when the kubelet's policies are set to none and numaward takes over. The configuration must have the
    /// kubelet's policies and reserved memory, the ledger must hold nothing, and the daemon must not run.
    ImportKubeletState(ImportKubeletState),
    /// Write what is promised as the kubelet's state files
    ///
    /// For readers that know only cpu_manager_state and memory_manager_state, and for the way back to a kubelet with
    /// static policies. Without --into, both are printed as one JSON object. Workloads that are not pods are in the files
    /// under their own names; standard error names them, and what a kubelet would not take over.
    ExportKubeletState(ExportKubeletState),
    /// Give back all that was written, before numaward is removed
    ///
    /// Every cgroup gets back what it had: CPUs, nodes, memory protection, quota. Nothing is promised afterwards. The
    /// daemon must not run. On Kubernetes, set enforcement.mode to off in the daemon's configuration instead; the
    /// container runtime is then informed, too.
    Uninstall(Uninstall),
    /// Print the version of numaward and of the kernel
    Version(Output),
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration and report every error in it
    Check {
        /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
        file: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Print the configuration as it applies: file, variables and defaults together
    ///
    /// What has no value depends on the machine, or is not used. Headers for a collector and the path of a webhook are
    /// hidden.
    View {
        #[command(flatten)]
        config: ConfigFile,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Notation,
    },
    /// Print the JSON schema of the configuration
    Schema,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Notation {
    /// As in the configuration file
    #[default]
    Yaml,
    /// For programs
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) config: ConfigFile,
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

/// How the daemon is reached: the same for each command. An option goes before its variable, and both before the default.
#[derive(Debug, Args)]
pub(crate) struct Reached {
    /// The daemon: its control socket (a path) or one of its addresses (a URL)
    ///
    /// /run/numaward/control.sock, http://127.0.0.1:9560 (only reads) or https://host.example:9561 (control.listen).
    /// Default: the control socket of this host. A user who may not open it reads from the address that the daemon of
    /// this host listens on.
    #[arg(
        long, global = true, help_heading = REACHING, value_name = "PATH|URL", env = "NUMAWARD_SERVER",
        hide_env_values = true, hide_short_help = true
    )]
    pub(crate) server: Option<String>,
    /// File with the bearer token
    #[arg(
        long, global = true, help_heading = REACHING, value_name = "FILE", env = "NUMAWARD_TOKEN_FILE",
        hide_env_values = true, hide_short_help = true
    )]
    pub(crate) token_file: Option<PathBuf>,
    /// Send the token over http to other hosts: only where the network is encrypted in another way
    #[arg(long, global = true, help_heading = REACHING, hide_short_help = true)]
    pub(crate) allow_unencrypted: bool,
    /// File with the authority that signed the daemon's certificate
    #[arg(
        long, global = true, help_heading = REACHING, value_name = "FILE", env = "NUMAWARD_CA_FILE",
        hide_env_values = true, hide_short_help = true
    )]
    pub(crate) ca: Option<PathBuf>,
    /// File with the client certificate
    #[arg(
        long, global = true, help_heading = REACHING, value_name = "FILE", env = "NUMAWARD_CERT_FILE",
        hide_env_values = true, hide_short_help = true, requires = "key"
    )]
    pub(crate) cert: Option<PathBuf>,
    /// File with its private key
    #[arg(
        long, global = true, help_heading = REACHING, value_name = "FILE", env = "NUMAWARD_KEY_FILE",
        hide_env_values = true, hide_short_help = true, requires = "cert"
    )]
    pub(crate) key: Option<PathBuf>,
}

/// A command, and what it is to hold.
#[derive(Debug, Args)]
#[command(group = amounts())]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Name of the workload [default: made from the command and the process id]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Which workloads are shown, and in which order.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Choice {
    /// Sort workloads by this
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    pub(crate) sort: Column,
    /// Against the order that the sort has by itself.
    #[arg(skip)]
    pub(crate) reversed: bool,
    /// Show only workloads with this in their name, kind or cgroup; node:N for those with memory on a node
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) filter: String,
    /// Show only workloads with a guarantee
    #[arg(long)]
    pub(crate) guaranteed: bool,
}

/// Which guarantees end.
#[derive(Debug, Args)]
pub(crate) struct Release {
    /// Name of the workload
    #[arg(required_unless_present = "all", value_parser = allocation())]
    pub(crate) name: Option<String>,
    /// End all but those of containers and those that the configuration declares; asks first
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
    /// Do not ask
    #[arg(short, long, requires = "all", conflicts_with = "name")]
    pub(crate) yes: bool,
}

/// Which events are printed.
#[derive(Debug, Args)]
pub(crate) struct EventChoice {
    /// Only those about this workload
    #[arg(long, value_name = "NAME")]
    pub(crate) workload: Option<String>,
    /// Only those of this kind
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(EventKind::ALL.iter().map(|kind| kind.as_str())))]
    pub(crate) kind: Option<String>,
    /// Only those after the one with this id
    #[arg(long, value_name = "ID")]
    pub(crate) since: Option<u64>,
    /// At most this many earlier events
    #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) limit: u16,
}

/// What is shown, and how often.
#[derive(Debug, Args)]
pub(crate) struct Shown {
    #[command(flatten)]
    pub(crate) choice: Choice,
    /// Print tables, one after the other, instead of taking the whole terminal
    #[arg(long)]
    pub(crate) batch: bool,
    /// Print one table and end
    #[arg(long, conflicts_with = "count")]
    pub(crate) once: bool,
    /// Print this many tables and end
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Seconds between tables
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) interval: u64,
}

/// What is recorded, and how long.
#[derive(Debug, Args)]
pub(crate) struct Record {
    /// The recording, which must not exist [default: numaward-TIME.record]
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Record for this long, such as 10m [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME")]
    pub(crate) span: Option<Interval>,
    /// Time between two moments, at least one second
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = seconds)]
    pub(crate) every: Interval,
    /// The most that the file may take; recording ends there
    #[arg(long, value_name = "SIZE", default_value = "256Mi", value_parser = bytes)]
    pub(crate) max_size: u64,
}

/// What is replayed.
#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// The recording
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Begin at this time: 14:30, 14:30:05, 2026-11-21T14:30:05Z (all UTC), or +5m after the beginning of the
    /// recording
    #[arg(long, value_name = "TIME")]
    pub(crate) begin: Option<When>,
    /// End at this time, in the same form
    #[arg(long, value_name = "TIME")]
    pub(crate) end: Option<When>,
    #[command(flatten)]
    pub(crate) shown: Shown,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// A duration of a second at least.
fn seconds(text: &str) -> Result<Interval, String> {
    let interval: Interval = text.parse()?;
    if interval.0 < Duration::from_secs(1) {
        return Err(format!("{text}: it takes a second at least"));
    }
    Ok(interval)
}

/// An amount of bytes.
fn bytes(text: &str) -> Result<u64, String> {
    let amount = text.parse::<Quantity>().map_err(|error| error.to_string())?;
    amount.units().ok_or_else(|| format!("{text} is no number of bytes such as 100Mi"))
}

/// What is asked for.
#[derive(Debug, Args)]
pub(crate) struct Wanted {
    /// CPUs: whole ones (4) are exclusive, parts (500m, 1.5) are shared [default: shared]
    #[arg(long, help_heading = RESOURCES, value_name = "NUMBER")]
    pub(crate) cpus: Option<Cpus>,
    /// Memory that is promised on the nodes [default: none is promised, and none is bound to nodes]
    #[arg(long, help_heading = RESOURCES, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// The most memory that may be used [default: what is promised]
    #[arg(long, help_heading = RESOURCES, value_name = "SIZE")]
    pub(crate) memory_limit: Option<String>,
    #[command(flatten)]
    pub(crate) hugepages: Hugepages,
    #[command(flatten)]
    pub(crate) placement: Placement,
    /// Make the CPUs a scheduling domain of their own (cpuset.cpus.partition)
    #[arg(long, help_heading = HELD, value_parser = partitions())]
    pub(crate) partition: Option<PartitionKind>,
}

/// There is no request without CPUs and memory.
fn amounts() -> ArgGroup {
    ArgGroup::new("amounts").args(["cpus", "memory"]).required(true).multiple(true)
}

/// Huge pages by their size.
#[derive(Debug, Args)]
pub(crate) struct Hugepages {
    /// Huge pages of 2 MiB, in bytes
    #[arg(long = "hugepages-2Mi", help_heading = RESOURCES, value_name = "SIZE")]
    pub(crate) two_mib: Option<String>,
    /// Huge pages of 1 GiB, in bytes
    #[arg(long = "hugepages-1Gi", help_heading = RESOURCES, value_name = "SIZE")]
    pub(crate) one_gib: Option<String>,
    /// Huge pages of any size, such as 2Mi=64Mi; can be repeated
    #[arg(long = "hugepages", help_heading = RESOURCES, value_name = "SIZE=BYTES", value_parser = pair)]
    pub(crate) sized: Vec<(String, String)>,
}

/// Where it is to be, and how it is held there.
#[derive(Debug, Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "conditions of which each holds or not, whatever the others are"
)]
pub(crate) struct Placement {
    /// How the nodes of CPUs and memory have to agree [default: topologyManagerPolicy of the configuration]
    #[arg(long, help_heading = NODES, value_parser = policies())]
    pub(crate) policy: Option<TopologyManagerPolicy>,
    /// The only nodes on which it may be, such as 1 or 0-1; refused if it does not fit there (native)
    #[arg(long = "node", help_heading = NODES, value_name = "NODES")]
    pub(crate) nodes: Option<NodeSet>,
    /// Nodes on which it should be if it can, such as 0-1
    #[arg(long, help_heading = NODES, value_name = "NODES")]
    pub(crate) preferred_nodes: Option<NodeSet>,
    /// Put it on the node of a device of this host if possible: a network interface (eth0), a block device (nvme0n1) or a
    /// PCI address (0000:3b:00.0); can be repeated
    #[arg(long, help_heading = NODES, value_name = "DEVICE")]
    pub(crate) near: Vec<String>,
    /// Put it on the nodes of another if possible: by its name (a pod: namespace/name), or by a label; can be repeated
    /// (native)
    #[arg(long, help_heading = NODES, value_name = "NAME|KEY=VALUE")]
    pub(crate) with: Vec<String>,
    /// Put it on other nodes than another if possible, named likewise; can be repeated (native)
    #[arg(long, help_heading = NODES, value_name = "NAME|KEY=VALUE")]
    pub(crate) apart: Vec<String>,
    /// A label by which others can name it; can be repeated (native)
    #[arg(long = "label", help_heading = NODES, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// How memory-only nodes count (native) [default: tiers of the configuration]
    #[arg(long, help_heading = NODES, value_parser = named(Tiers::ALL, Tiers::as_str, tiers_help))]
    pub(crate) tiers: Option<Tiers>,
    /// The only sort of memory that it takes; can be repeated (native) [default: any]
    #[arg(
        long = "memory-tier", help_heading = NODES, value_name = "TIER",
        value_parser = named(MemoryTier::ALL, MemoryTier::as_str, memory_tier_help)
    )]
    pub(crate) memory_tiers: Vec<MemoryTier>,
    /// The kind of its exclusive CPUs; can be repeated: each CPU is then of all these kinds (native) [default: any]
    #[arg(
        long = "cpu-kind", help_heading = NODES, value_name = "KIND",
        value_parser = named(CpuKind::ALL, CpuKind::as_str, cpu_kind_help)
    )]
    pub(crate) cpu_kinds: Vec<CpuKind>,
    /// Take each exclusive CPU from a different core, and give the other threads of these cores to nobody (native)
    #[arg(long, help_heading = NODES)]
    pub(crate) hide_siblings: bool,
    /// Take CPUs that share a last-level cache if possible (native)
    #[arg(long, help_heading = NODES)]
    pub(crate) same_cache: bool,
    /// Move other processes off its exclusive CPUs, whatever enforcement.herding.mode of the configuration is
    #[arg(long, help_heading = HELD)]
    pub(crate) isolate: bool,
    /// How the kernel chooses among its nodes for each new page; only for a command that is started
    #[arg(
        long, help_heading = HELD, value_name = "POLICY",
        value_parser = named(MemoryPolicy::ALL, MemoryPolicy::as_str, memory_policy_help)
    )]
    pub(crate) memory_policy: Option<MemoryPolicy>,
    /// Its class of L3 caches and memory bandwidth, one of resctrl.classes of the configuration
    #[arg(long, help_heading = HELD, value_name = "CLASS")]
    pub(crate) resctrl_class: Option<String>,
    /// Never move it to other nodes (native)
    #[arg(long, help_heading = HELD)]
    pub(crate) immovable: bool,
    /// Promise its memory on a home node without binding it there: it may use more, up to --memory-limit, on any node
    /// (native)
    #[arg(long, help_heading = HELD)]
    pub(crate) burstable: bool,
}

impl Hugepages {
    /// All of them, in bytes by size.
    pub(crate) fn by_size(self) -> BTreeMap<String, String> {
        let named = [("2Mi", self.two_mib), ("1Gi", self.one_gib)];
        let named = named.into_iter().filter_map(|(size, bytes)| Some((size.to_owned(), bytes?)));
        named.chain(self.sized).collect()
    }
}

/// Two texts with `=` between them.
fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| format!("{text:?} has no key and value, such as key=value"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn tiers_help(tiers: Tiers) -> &'static str {
    match tiers {
        Tiers::Attached => "Together with the nodes with CPUs that they are nearest to",
        Tiers::Strict => "As nodes of their own",
    }
}

fn memory_tier_help(tier: MemoryTier) -> &'static str {
    match tier {
        MemoryTier::Dram => "Ordinary memory",
        MemoryTier::Hbm => "High-bandwidth memory",
        MemoryTier::Cxl => "Memory behind a CXL link, and whatever is slower than ordinary memory",
    }
}

fn cpu_kind_help(kind: CpuKind) -> &'static str {
    match kind {
        CpuKind::Performance => "Of cores as fast as any of the machine",
        CpuKind::Efficiency => "Of cores that are slower than others of the machine, and take less power",
        CpuKind::HighFrequency => {
            "Of the highest base frequency; where all have the same, of the highest maximum frequency"
        }
        CpuKind::Isolated => "Kept from the scheduler's load balancing (isolcpus=)",
        CpuKind::NohzFull => "Without a tick while one task runs (nohz_full=)",
    }
}

fn memory_policy_help(policy: MemoryPolicy) -> &'static str {
    match policy {
        MemoryPolicy::Bind => "The nearest with a free page",
        MemoryPolicy::PreferredMany => "The same, and any other node before memory is reclaimed",
        MemoryPolicy::Interleave => "One after the other",
        MemoryPolicy::WeightedInterleave => {
            "One after the other, each as many pages as its weight in /sys/kernel/mm/mempolicy/weighted_interleave"
        }
    }
}

/// The name of an allocation. That of a cgroup is its path without the first slash, with which it may be asked for.
fn allocation() -> impl TypedValueParser<Value = String> {
    StringValueParser::new().map(|name| name.trim_start_matches('/').to_owned())
}

/// The policies by the kubelet's names.
fn policies() -> impl TypedValueParser<Value = TopologyManagerPolicy> {
    named(TopologyManagerPolicy::ALL, TopologyManagerPolicy::as_str, |policy| match policy {
        TopologyManagerPolicy::None => "No rule ties them",
        TopologyManagerPolicy::BestEffort => "The same nodes if possible",
        TopologyManagerPolicy::Restricted => {
            "The same nodes, as few as could ever be enough, or it is refused"
        }
        TopologyManagerPolicy::SingleNumaNode => "One node, or it is refused",
    })
}

/// Values by their names.
fn named<T>(
    all: &'static [T],
    name: fn(T) -> &'static str,
    help: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T>
where
    T: Copy + FromStr<Err = UnknownName> + Send + Sync,
{
    let named = all.iter().map(|&of| PossibleValue::new(name(of)).help(help(of)));
    PossibleValuesParser::new(named).try_map(|name| name.parse())
}

/// The partitions by the kernel's names.
fn partitions() -> impl TypedValueParser<Value = PartitionKind> {
    PossibleValuesParser::new([
        PossibleValue::new("root").help("No other cgroup gets these CPUs, whatever it asks for"),
        PossibleValue::new("isolated").help("The same, and the scheduler does not balance load among them"),
    ])
    .map(|name| if name == "root" { PartitionKind::Root } else { PartitionKind::Isolated })
}

/// The file of the configuration.
#[derive(Debug, Args)]
pub(crate) struct ConfigFile {
    /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(group = amounts())]
pub(crate) struct Guarantee {
    /// A cgroup as in /proc/PID/cgroup (/batch/render), or a unit of systemd (nginx.service)
    #[arg(value_name = "CGROUP-OR-UNIT")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Name of the workload [default: the unit, or the cgroup without the leading slash]
    #[arg(long)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Resize {
    /// Name of the workload
    #[arg(value_parser = allocation())]
    pub(crate) name: String,
    /// CPUs: a whole number for a workload with exclusive ones, a part (500m) for one that shares them
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpus: Option<Cpus>,
    /// Memory that is promised on its nodes
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// The most memory that may be used [default: what is promised, where both were equal, else as it was]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_limit: Option<String>,
    #[command(flatten)]
    pub(crate) hugepages: Hugepages,
    /// Only say what would happen
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// Name of a workload that holds an allocation
    #[arg(
        value_parser = allocation(),
        required_unless_present_any = ["cpus", "memory"],
        conflicts_with_all = ["cpus", "memory", "memory_limit", "partition", "Hugepages", "Placement"]
    )]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) wanted: MaybeWanted,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// What is asked for, if anything is: there is no request without CPUs and memory.
///
/// `Option<Wanted>` would never be there: to clap, a struct with flattened parts is a group without members.
#[derive(Debug)]
pub(crate) struct MaybeWanted(pub(crate) Option<Wanted>);

impl FromArgMatches for MaybeWanted {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_asked = ["cpus", "memory"].iter().any(|id| matches.contains_id(id));
        is_asked.then(|| Wanted::from_arg_matches(matches)).transpose().map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for MaybeWanted {
    fn augment_args(command: clap::Command) -> clap::Command {
        // Nothing is required of what is updated.
        Wanted::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Wanted::augment_args_for_update(command)
    }
}

/// How much may be moved.
#[derive(Debug, Args)]
pub(crate) struct MoveLimits {
    /// The most workloads that may move [default: 3]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) moves: Option<u32>,
    /// The most memory that may move [default: any amount]
    #[arg(long, value_name = "SIZE")]
    pub(crate) bytes: Option<String>,
}

#[derive(Debug, Args)]
#[command(group = amounts())]
pub(crate) struct PlanMoves {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    #[command(flatten)]
    pub(crate) limits: MoveLimits,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
#[command(group = amounts())]
pub(crate) struct Rebalance {
    /// A cgroup or a unit that gets the guarantee in the end
    #[arg(value_name = "CGROUP-OR-UNIT")]
    pub(crate) target: Option<String>,
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Name of the workload [default: the unit, or the cgroup without the leading slash]
    #[arg(long, requires = "target")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) limits: MoveLimits,
    /// Make the moves
    #[arg(long)]
    pub(crate) apply: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Simulate {
    /// Traces: JSON files, also compressed by gzip, or directories of them
    #[arg(value_name = "FILE-OR-DIR", required_unless_present = "reserved_memory")]
    pub(crate) traces: Vec<PathBuf>,
    /// Strategy to replay; can be repeated [default: both]
    #[arg(long, value_name = "STRATEGY")]
    pub(crate) strategy: Vec<StrategyName>,
    /// How memory-only nodes count with native [default: as --config says, else attached]
    #[arg(long, value_name = "TIERS", value_parser = named(Tiers::ALL, Tiers::as_str, tiers_help))]
    pub(crate) tiers: Option<Tiers>,
    /// Replay native also with at most so many containers moved for a request
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) moves: Option<u16>,
    /// Another machine: "here", the directory of a host's root, or a description such as 4x32,128Gi
    ///
    /// Descriptions: nodes x CPUs of each, memory of each, and after further commas smt=THREADS, sockets=NUMBER,
    /// distances=WITHIN/BETWEEN (sockets), hugepages-2Mi=PAGES or hugepages-1Gi=PAGES of each node, and
    /// memory-only=SIZE for a further node without CPUs. Reservations are those of --config, or the default ones.
    #[arg(long, value_name = "MACHINE")]
    pub(crate) machine: Option<String>,
    /// Configuration of numaward, for policies and reservations [default: those of the trace]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Topology policy, instead of the configured one
    #[arg(long, value_parser = policies())]
    pub(crate) policy: Option<TopologyManagerPolicy>,
    /// Replay a fleet of so many hosts, whose pods a scheduler sends to hosts
    ///
    /// Each host brings the pods of one trace, shifted in time. Printed is what is admitted with the default scheduler
    /// and with the plugin NodeResourceTopologyMatch, and on hosts without nodes.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) hosts: Option<u16>,
    /// What the fleet's random numbers begin with: the same number, the same fleet
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "hosts")]
    pub(crate) seed: u64,
    /// Print each trace, or each group of hosts alike, not only the sum
    #[arg(long)]
    pub(crate) each: bool,
    /// Suggest reservedMemory from what this host uses beside containers and commands of numaward exec
    #[arg(long, conflicts_with_all = [
        "traces", "strategy", "tiers", "moves", "machine", "config", "policy", "hosts", "each",
    ])]
    pub(crate) reserved_memory: bool,
    /// How long this host is watched for that, such as 10m
    #[arg(long, value_name = "TIME", default_value = "10s", requires = "reserved_memory")]
    pub(crate) observe: Interval,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyName {
    /// The decisions of the kubelet's managers
    Kubelet,
    /// numaward's own
    Native,
}

/// What call chains led to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StackChoice {
    /// Memory was allocated on another node than that of the CPU
    #[default]
    Allocations,
    /// Memory of another node was accessed, as the kernel samples it
    Accesses,
}

impl From<StackChoice> for StackKind {
    fn from(choice: StackChoice) -> Self {
        match choice {
            StackChoice::Allocations => Self::Allocations,
            StackChoice::Accesses => Self::Accesses,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ImportKubeletState {
    /// The kubelet's directory, usually /var/lib/kubelet
    pub(crate) directory: PathBuf,
    /// Only print what would be taken over
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Uninstall {
    /// Give back what was written; there is nothing else to do yet
    #[arg(long, required = true)]
    pub(crate) restore: bool,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct ExportKubeletState {
    /// Write the two files into this directory, which is made if it is absent and must not be a kubelet's own
    #[arg(long, value_name = "DIR")]
    pub(crate) into: Option<PathBuf>,
    /// Replace files of an earlier export
    #[arg(long, requires = "into")]
    pub(crate) replace: bool,
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
    /// For programs and people
    Yaml,
}

// No doc comment: clap would take it for the command's own. As `Output`, for a command whose table can have more columns.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ListOutput {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = ListFormat::Table)]
    pub(crate) output: ListFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListFormat {
    /// For people
    Table,
    /// For people, with more columns
    Wide,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

impl From<ListOutput> for Output {
    fn from(ListOutput { output }: ListOutput) -> Self {
        let output = match output {
            ListFormat::Table | ListFormat::Wide => Format::Table,
            ListFormat::Json => Format::Json,
            ListFormat::Yaml => Format::Yaml,
        };
        Self { output }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_is_refused_where_it_prints_nothing_more() {
        let parsed = |command: &str| Cli::try_parse_from(["numaward", command, "-o", "wide"]);
        assert!(parsed("get").is_ok());
        for command in ["events", "topology", "status", "top", "doctor"] {
            let error = parsed(command).unwrap_err().to_string();
            assert!(error.contains("[possible values: table, json, yaml]"), "{error}");
        }
    }

    #[test]
    fn what_is_explained_is_a_workload_or_a_request() {
        let explain = |arguments: &[&str]| {
            let parsed = Cli::try_parse_from([&["numaward", "explain"], arguments].concat());
            parsed.map(|cli| match cli.command {
                Command::Explain(explain) => {
                    (explain.name, explain.wanted.0.map(|wanted| (wanted.cpus, wanted.memory)))
                }
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(explain(&["db"]).unwrap(), (Some("db".to_owned()), None));
        assert_eq!(
            explain(&["/batch/db"]).unwrap(),
            (Some("batch/db".to_owned()), None),
            "a cgroup by its path"
        );
        let asked = explain(&["--cpus", "1", "--memory", "1Gi", "--with", "db"]).unwrap();
        assert_eq!(asked, (None, Some((Some(Cpus::whole(1)), Some("1Gi".to_owned())))));
        assert_eq!(explain(&["--cpus", "1"]).unwrap().1, Some((Some(Cpus::whole(1)), None)));
        assert_eq!(explain(&["--memory", "1Gi"]).unwrap().1, Some((None, Some("1Gi".to_owned()))));
        for wrong in [
            &[][..],
            &["--with", "db"],
            &["db", "--memory", "1Gi"],
            &["db", "--burstable"],
            &["db", "--policy", "none"],
            &["db", "--hugepages-2Mi", "2Mi"],
        ] {
            assert!(explain(wrong).is_err(), "{wrong:?}");
        }
    }
}

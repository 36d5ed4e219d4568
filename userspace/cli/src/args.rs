//! Command line: subcommands, their options and the help texts.

#![expect(clippy::doc_markdown, reason = "these comments are the help, printed as they are")]

use std::{
    collections::BTreeMap, ffi::OsString, fmt::Write as _, ops::RangeInclusive, path::PathBuf, str::FromStr,
    time::Duration,
};

use clap::{
    ArgGroup, ArgMatches, Args, CommandFactory as _, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser},
    error::ErrorKind,
};
use clap_complete::Shell;
use numaward_api::{
    CpuKind, Cpus, EventKind, MemoryPolicy, MemoryTier, PartitionKind, StackKind, Tiers,
    TopologyManagerPolicy, UnknownName,
};
use numaward_config::{Interval, NodeScope};
use numaward_engine::Quantity;
use numaward_topology::{NodeSet, ZoneKind};

use crate::{column::Column, mempolicy::NodeMemoryPolicy, recording::ReplayTime, table::wrap};

/// Wrong value of an option, found after the arguments were parsed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// Numbers of rounds of a trial: with fewer, no interval of signed ranks has 95 %.
pub(crate) const ROUNDS: RangeInclusive<i64> = 6..=100;

// Headings of the help.
const RESOURCES_HEADING: &str = "CPUs and memory";
const NODES_HEADING: &str = "Nodes (native: requires strategy: native in the daemon's configuration)";
const ISOLATION_HEADING: &str = "Isolation and memory policy (native: as above)";
const CONNECTION_HEADING: &str = "Reaching the daemon";

/// Keeps memory near the CPUs that use it, and proves it.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused, 4 the daemon is not reachable. `exec` passes on the code
/// of its command, and ends with 125 if it fails itself.
#[derive(Debug, Parser)]
#[command(name = "numaward", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Checks that the amounts of a request do not contradict each other.
    pub(crate) fn with_consistent_amounts(self) -> Result<Self, clap::Error> {
        let (cpus, memory, limit) = match &self.command {
            Command::Exec(ExecArgs { resources, .. })
            | Command::Guarantee(GuaranteeArgs { resources, .. })
            | Command::Trial(TrialArgs { resources, .. })
            | Command::Plan(PlanArgs { resources, .. })
            | Command::Rebalance(RebalanceArgs { resources, .. })
            | Command::Explain(ExplainArgs { resources: OptionalResourceArgs(Some(resources)), .. }) => {
                (resources.cpus, &resources.memory, &resources.memory_limit)
            }
            // The workload may have memory already.
            Command::Resize(ResizeArgs { memory, memory_limit, .. }) => (None, memory, memory_limit),
            _ => return Ok(self),
        };
        let units = |quantity: &str| quantity.parse::<Quantity>().ok().and_then(Quantity::units);
        let problem = match (cpus, memory, limit) {
            (Some(cpus), None, _) if cpus.0.whole_cpus().is_none() => format!(
                "--cpus {cpus} is not a whole number, so the CPUs are shared and nothing is guaranteed: add --memory, or give a whole number \
                 of CPUs"
            ),
            (_, Some(memory), Some(limit))
                if units(limit).zip(units(memory)).is_some_and(|(limit, memory)| limit < memory) =>
            {
                format!("--memory-limit {limit} is less than the guaranteed memory, --memory {memory}")
            }
            _ => return Ok(self),
        };
        Err(clap::Error::raw(ErrorKind::ValueValidation, format!("{problem}\n")))
    }
}

/// Returns the option that sets a field of a request, such as `placement.cpuKinds`; `None` if there is none.
pub(crate) fn option_of_field(field: &str) -> Option<String> {
    let field = field.strip_prefix("placement.").unwrap_or(field);
    let name = field.chars().fold(String::new(), |name, c| match c {
        'A'..='Z' => name + "-" + c.to_ascii_lowercase().encode_utf8(&mut [0; 4]),
        _ => name + c.encode_utf8(&mut [0; 4]),
    });
    let command = Cli::command();
    let mut options = command.find_subcommand("guarantee")?.get_arguments().filter_map(clap::Arg::get_long);
    let option = options.find(|option| name.strip_suffix('s') == Some(option) || name == *option)?;
    Some(format!("--{option}"))
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
    Run(RunArgs),
    /// Print the machine: nodes, distances, CPUs, caches, hugepages, and the guarantees on each node
    ///
    /// Guarantees are shown if a daemon is reachable. With --server, the machine is the one of that daemon.
    Topology {
        /// Read sys and proc below this directory, without asking a daemon
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Print the state of the daemon: probes, workloads, missing features and their reasons
    Status {
        /// Also measure the cost of the probes for this long; needs root on the daemon's own host
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s")]
        cost: Option<Interval>,
        #[command(flatten)]
        output: Output,
    },
    /// Watch nodes and workloads live
    ///
    /// Keys: arrows and Enter to open a workload, s to sort, / to filter, ? for all keys, q to quit. No colours
    /// are used if NO_COLOR is set, and only ASCII characters if the locale is not UTF-8.
    Top {
        /// Show the details of this workload first; with tables, only this workload
        #[arg(value_parser = workload_name())]
        name: Option<String>,
        #[command(flatten)]
        top: TopArgs,
        #[command(flatten)]
        output: Output,
    },
    /// Record nodes, workloads and events, to replay them later
    ///
    /// Writes nodes, workloads, events and guarantees once a second, until Ctrl-C. The file is compressed. However
    /// recording ends, the file is readable up to the last complete moment.
    Record(RecordArgs),
    /// Show a recording, as top does
    ///
    /// Keys: those of top; t and T for the next and the previous moment, ] and [ for a minute forward or back, n and N
    /// for the next or the previous moment with an event, p to play, b and e for the beginning and the end. Needs no
    /// daemon.
    Replay(ReplayArgs),
    /// List guarantees, workloads, nodes or events
    Get(GetArgs),
    /// Print everything about a workload: its guarantee with reasons, memory by node, latest events
    Describe {
        /// Name of the workload
        #[arg(value_parser = workload_name())]
        name: String,
        #[command(flatten)]
        output: Output,
    },
    /// Print the call chains that allocate or access memory of other nodes, in folded form
    ///
    /// Each line has the process, its functions and those of the kernel, separated by semicolons, then bytes: the
    /// input of flamegraph.pl and similar programs. With -o pprof, a profile for pprof, which can also show the difference
    /// of two. Needs `observe.callChains.enabled` in the daemon's configuration.
    Stacks {
        /// Name of the workload
        name: String,
        /// Only memory of this node
        #[arg(long, value_name = "NODE")]
        node: Option<u32>,
        /// Operation that led to the call chain
        #[arg(long, value_enum, default_value_t)]
        kind: StackKindArg,
        #[command(flatten)]
        output: StackOutput,
    },
    /// Print the nodes of a workload's memory, by purpose: heap, stacks, files
    ///
    /// The kernel walks the page tables of the workload's processes, which takes some milliseconds per GiB of small
    /// pages. With --hot, its monitor of accesses (DAMON, Linux 6.2 or newer) watches the processes for a while; with
    /// --sampled, the processor samples addresses (IBS of AMD since Linux 6.2, PEBS of Intel, SPE of Arm), which most
    /// virtual machines cannot.
    #[command(group = ArgGroup::new("watched").args(["hot", "sampled"]))]
    Regions {
        /// Name of the workload
        name: String,
        /// Show which areas are accessed, and the share of accesses across nodes; needs root on the workload's own host
        #[arg(long)]
        hot: bool,
        /// Experimental: show which areas are accessed, and from CPUs of which nodes, as sampled by the processor; needs root, too
        #[arg(long)]
        sampled: bool,
        /// Watch for this long, or until Ctrl-C
        #[arg(long = "for", value_name = "TIME", value_parser = parse_interval, default_value = "10s", requires = "watched")]
        span: Interval,
        #[command(flatten)]
        output: Output,
    },
    /// Print notable events: misses, OOM kills, drift, intruders
    Events {
        /// Keep printing new events, until Ctrl-C
        #[arg(short, long)]
        follow: bool,
        #[command(flatten)]
        filter: EventFilterArgs,
        #[command(flatten)]
        output: Output,
    },
    /// Run a command with guaranteed memory and CPUs
    ///
    /// Whole CPUs are exclusive. Without --cpus, or with a fraction of a CPU, the command uses the shared pool.
    ///
    /// The command runs in a cgroup of its own. The guarantee ends with the last process in it.
    ///
    /// Exit codes: that of the command; 125 if numaward itself fails, for example because the guarantee is refused or
    /// no daemon is reachable; 126 if the command cannot be executed; 127 if it is not found. With --dry-run: 0 if the
    /// guarantee would be given, 3 if it would be refused.
    Exec(ExecArgs),
    /// Guarantee memory and CPUs to a running cgroup or systemd unit
    ///
    /// Exits with 3 if the guarantee is refused, or would be with --dry-run.
    Guarantee(GuaranteeArgs),
    /// Change the resources of a guarantee, all of them or none
    ///
    /// The guarantee stays on its nodes. Exits with 3 if these nodes do not have enough free resources.
    Resize(ResizeArgs),
    /// End a guarantee and restore the previous settings of the cgroup
    Release(ReleaseArgs),
    /// Run a command like numactl, and register it as a workload
    ///
    /// Takes the options of numactl(8): --cpunodebind/-N, --physcpubind/-C, --membind/-m, --preferred/-p,
    /// --preferred-many/-P, --interleave/-i, --weighted-interleave/-w, --localalloc/-l, --all/-a, --show/-s and
    /// --hardware/-H. Nodes are lists such as 0-1,3, all, !0 (all but 0), +0 (counted within the nodes that are
    /// allowed), or netdev:eth0, block:nvme0n1, pci:0000:3b:00.0 and file:PATH (the node of the device).
    ///
    /// Nothing is guaranteed: the command gets the memory policy and the CPUs, and a cgroup of its own, so that its
    /// memory is counted under its name. The command runs without a daemon, too. It replaces this process, as with
    /// numactl. Failures before that end with exit code 1.
    #[command(disable_help_flag = true, override_usage = "numaward numactl [NUMACTL-OPTIONS] COMMAND...")]
    Numactl {
        /// Options of numactl, the command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<OsString>,
    },
    /// Explain the placement of a workload, or the outcome of a request if it were made now
    ///
    /// Exits with 3 if the request would be refused.
    #[command(
        arg_required_else_help = true,
        override_usage = "numaward explain [OPTIONS] NAME\n       numaward explain [OPTIONS] <--cpus NUMBER|--memory SIZE>..."
    )]
    Explain(ExplainArgs),
    /// Recommend guarantees for workloads, from their usage in the last hour
    ///
    /// A workload should get a guarantee if a tenth of its accesses, allocations or memory is remote. The amounts are the peak plus a
    /// quarter; workloads that never use half a CPU stay on the shared pool. The daemon must have observed a workload for ten minutes.
    /// With -o guarantees, the output is a file for /etc/numaward/guarantees.d, which `numaward reload` applies.
    Recommend(RecommendArgs),
    /// Compare a benchmark with and without a guarantee of a running workload
    ///
    /// Each round runs the command once without the guarantee and once with it, in alternating order. The figure is the time in seconds, or
    /// with --after the number behind a text in the output. Prints medians, the 95 % interval of the difference by signed ranks, the share of
    /// remote allocations and the misses, and says if no difference is shown. Memory that the guarantee has moved stays there without it, so
    /// that later runs have it near, too: restart the workload with --prepare to measure that. The workload must have no guarantee, and has
    /// none after the trial, even if the command fails or Ctrl-C ends it.
    Trial(TrialArgs),
    /// Simulate the decisions of strategies for pods that start and end
    ///
    /// Replays traces, on the machines they were recorded for or on another, and compares the admitted requests, the distance of
    /// memory from its CPUs, and the free memory that cannot be used. Needs neither a daemon nor privileges.
    Simulate(Simulate),
    /// Experimental: write templates of resource claims for the pods of a manifest
    ///
    /// Each container that has a guarantee by its requests gets a claim of the same CPUs, memory and hugepages of one NUMA node. Prints a
    /// ResourceClaimTemplate for each claim, and the manifest with pods that use them; everything else of it stays. The input can have
    /// several documents: Pod, Deployment, StatefulSet, DaemonSet, Job and CronJob are changed, if a container has a guarantee. Needs
    /// neither a daemon nor a cluster. Exits with 2 if the manifest is invalid or no pod gets a claim.
    ClaimTemplate(ClaimTemplateArgs),
    /// Show which workloads have to move so that a request fits
    ///
    /// Nothing is moved. Exits with 3 if no moves within the limits make the request fit. Requires the strategy native.
    Plan(PlanArgs),
    /// Move workloads to other nodes so that a request fits
    ///
    /// Without --apply, only the plan is printed. With it, the moves are made one after another. Ctrl-C, or a move that
    /// fails, undoes the moves that were made. If a cgroup or a unit is given, it gets the guarantee in the end;
    /// otherwise the capacity stays free.
    Rebalance(RebalanceArgs),
    /// Moves into a cgroup and executes a command.
    #[command(hide = true)]
    Enter {
        /// Directory of the cgroup
        directory: PathBuf,
        /// Memory policy of the command, as POLICY:NODES
        #[arg(long)]
        spread: Option<NodeMemoryPolicy>,
        /// Run on all CPUs of the cgroup, independent of the affinity of this process
        #[arg(long)]
        all_cpus: bool,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Check whether this host meets the requirements of numaward, and print fixes
    ///
    /// Exits with 1 if a check fails. A warning is not a failure.
    Doctor {
        /// Check the host with its file system below this directory; the probes are tried for / only
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
    /// The archive holds the version, the configuration without secrets, the daemon's status, allocations, metrics,
    /// events and log, the topology, the checks of doctor, and the cgroup knobs of workloads. It also lists the files
    /// that could not be read, with the reasons. It names workloads, units and this host: check it before you share it.
    Bugtool {
        /// Path of the archive, which must not exist [default: numaward-bugtool-TIME.tar.gz]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check, show or describe the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Load the daemon's configuration again
    ///
    /// Changes of `guarantees`, `log.level` and some keys of `kubernetes` take effect at once. Other changed keys are
    /// listed, and take effect with a restart. If a file is invalid, nothing changes and the command fails. `systemctl
    /// reload numaward` runs this command.
    Reload(Output),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write the pages of all commands
    Man {
        /// Write the pages of all commands into this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Import the guarantees of a kubelet with static policies
    ///
    /// Reads cpu_manager_state and memory_manager_state and writes the ledger, so that pods keep their CPUs and
    /// nodes when the kubelet's policies are set to none and numaward takes over. The configuration must have the
    /// kubelet's policies and reserved memory, the ledger must be empty, and the daemon must not run.
    ImportKubeletState(ImportArgs),
    /// Write the guarantees as the kubelet's state files
    ///
    /// For readers that know only cpu_manager_state and memory_manager_state, and for the return to a kubelet with
    /// static policies. Without --into, both are printed as one JSON object. Workloads that are not pods are in the
    /// files under their own names; standard error lists them, and the entries that a kubelet would not accept.
    ExportKubeletState(ExportArgs),
    /// Restore all settings that numaward changed, before it is removed
    ///
    /// Every cgroup gets its previous settings: CPUs, nodes, memory protection, quota. All guarantees end. The
    /// daemon must not run. On Kubernetes, set enforcement.mode to off in the daemon's configuration instead; the
    /// container runtime is then informed, too.
    Uninstall(UninstallArgs),
    /// Print the options that all commands have: those of the connection to the daemon
    Options,
    /// Print the version of numaward and of the kernel
    Version(Output),
}

/// Commands of the help, by topic.
const COMMAND_GROUPS: [(&str, &[&str]); 5] = [
    (
        "See",
        &["status", "top", "get", "describe", "events", "topology", "stacks", "regions", "record", "replay"],
    ),
    ("Guarantee", &["exec", "guarantee", "resize", "release", "numactl"]),
    ("Decide", &["recommend", "trial", "explain", "plan", "rebalance", "simulate"]),
    (
        "Operate",
        &[
            "run",
            "doctor",
            "config",
            "reload",
            "bugtool",
            "import-kubelet-state",
            "export-kubelet-state",
            "claim-template",
            "uninstall",
        ],
    ),
    ("Other", &["options", "completions", "man", "version", "help"]),
];

/// First commands of a new user.
const FIRST_COMMANDS: &str = "\
Begin with:
  numaward doctor       Check this host, and print what is missing
  numaward run          Run the daemon, as root; from a package: systemctl enable --now numaward
  numaward top          Watch nodes and workloads live
";

/// Commands that ask no daemon.
const LOCAL_COMMANDS: [&str; 11] = [
    "run",
    "replay",
    "simulate",
    "claim-template",
    "config",
    "import-kubelet-state",
    "uninstall",
    "options",
    "completions",
    "man",
    "version",
];

/// Place of the connection options, in the help of each command that has them.
const CONNECTION_HELP: &str =
    "`numaward options` and numaward(1) list the options of the connection to the daemon.";

/// Returns the commands. The help of each command that asks a daemon names the place of the connection options.
pub(crate) fn commands() -> clap::Command {
    Cli::command().mut_subcommands(|command| match command.get_name() {
        name if LOCAL_COMMANDS.contains(&name) || command.is_hide_set() => command,
        _ => command.after_help(CONNECTION_HELP),
    })
}

/// Returns the parser, with a help that groups the commands.
pub(crate) fn command() -> clap::Command {
    let mut command = commands();
    command.build();
    let mut groups = String::new();
    // Writing to a String cannot fail.
    for (title, names) in COMMAND_GROUPS {
        let _ = writeln!(groups, "{title}:");
        for name in names {
            let about = command.find_subcommand(name).and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(groups, "  {name:20}  {}", wrap(&about, 24, 24));
        }
        groups.push('\n');
    }
    let more = "`numaward COMMAND --help` explains a command. `numaward options` lists the options of the connection to the daemon, \
                which all commands have.";
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{FIRST_COMMANDS}\n{groups}Options:\n{{options}}\n\n{}",
        wrap(more, 0, 0)
    );
    commands().help_template(template)
}

/// Returns the help of the options that all commands have.
pub(crate) fn options() -> clap::Command {
    let shown = |arg: clap::Arg| arg.hide(false);
    Cli::command()
        .disable_help_flag(true)
        .disable_version_flag(true)
        .mut_args(shown)
        .help_template("{options}")
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration and report all its errors
    ///
    /// Without --node and --group, the files of all groups and nodes beside it are checked as well.
    Check {
        /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
        file: Option<PathBuf>,
        #[command(flatten)]
        node: NodeArgs,
        #[command(flatten)]
        output: Output,
    },
    /// Print the effective configuration: files, variables and defaults together
    ///
    /// A key without a value depends on the machine, or is not used. Headers for a collector and the path of a webhook
    /// are hidden.
    View {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        node: NodeArgs,
        /// Show the source of each value: file and line, variable, or default
        #[arg(long)]
        origins: bool,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: ConfigFormat,
    },
    /// Print the JSON schema of the configuration
    Schema,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConfigFormat {
    /// The format of the configuration file
    #[default]
    Yaml,
    /// For programs
    Json,
}

/// Kubernetes node with its own configuration files.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// Kubernetes node, which selects the file node.NAME.yaml [default: that of this host]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Group of the node, which selects the file group.NAME.yaml [default: that of this host's node]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
}

impl NodeArgs {
    /// Returns the given node; `None` for that of this host.
    pub(crate) fn scope(self) -> Option<NodeScope> {
        let Self { node, group } = self;
        (node.is_some() || group.is_some()).then(|| NodeScope { name: node.unwrap_or_default(), group })
    }
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
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

/// Options of the connection to the daemon, the same for each command. An option has precedence over its environment
/// variable, and both over the default.
#[derive(Debug, Args)]
pub(crate) struct ConnectionArgs {
    /// Daemon: path of its control socket, or URL of one of its addresses
    ///
    /// /run/numaward/control.sock, http://127.0.0.1:9560 (read-only) or https://host.example:9561 (control.listen).
    /// Default: the control socket of this host. A user without permission to open it reads from the address that the
    /// daemon of this host listens on.
    #[arg(
        long, global = true, help_heading = CONNECTION_HEADING, value_name = "PATH|URL", env = "NUMAWARD_SERVER",
        hide_env_values = true, hide = true
    )]
    pub(crate) server: Option<String>,
    /// File with the bearer token
    #[arg(
        long, global = true, help_heading = CONNECTION_HEADING, value_name = "FILE", env = "NUMAWARD_TOKEN_FILE",
        hide_env_values = true, hide = true
    )]
    pub(crate) token_file: Option<PathBuf>,
    /// Send the token over http to other hosts: only if the network is encrypted in another way
    #[arg(long, global = true, help_heading = CONNECTION_HEADING, hide = true)]
    pub(crate) allow_unencrypted: bool,
    /// File with the certificate of the authority that signed the daemon's certificate
    #[arg(
        long, global = true, help_heading = CONNECTION_HEADING, value_name = "FILE", env = "NUMAWARD_CA_FILE",
        hide_env_values = true, hide = true
    )]
    pub(crate) ca: Option<PathBuf>,
    /// File with the client certificate
    #[arg(
        long, global = true, help_heading = CONNECTION_HEADING, value_name = "FILE", env = "NUMAWARD_CERT_FILE",
        hide_env_values = true, hide = true, requires = "key"
    )]
    pub(crate) cert: Option<PathBuf>,
    /// File with the private key of the client certificate
    #[arg(
        long, global = true, help_heading = CONNECTION_HEADING, value_name = "FILE", env = "NUMAWARD_KEY_FILE",
        hide_env_values = true, hide = true, requires = "cert"
    )]
    pub(crate) key: Option<PathBuf>,
}

/// Arguments of `exec`: a command and its guarantee.
#[derive(Debug, Args)]
#[command(group = required_amounts())]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    /// Name of the workload [default: made from the command and the process id]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Only print what would happen
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Selection and order of the workloads that are shown.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct WorkloadListArgs {
    /// Sort workloads by this column
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    pub(crate) sort: Column,
    /// Reverses the order that the column has by default.
    #[arg(skip)]
    pub(crate) reversed: bool,
    /// Show only workloads with this text in name, kind or cgroup; node:N for workloads with memory on a node
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) filter: String,
    /// Show only workloads with a guarantee
    #[arg(long)]
    pub(crate) guaranteed: bool,
    /// Key of the only workload that is shown; all if absent.
    #[arg(skip)]
    pub(crate) key: Option<String>,
}

/// Guarantees that `release` ends.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    /// Name of the workload
    #[arg(required_unless_present = "all", value_parser = workload_name())]
    pub(crate) name: Option<String>,
    /// End all guarantees except those of containers and those that the configuration declares; asks first
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
    /// Do not ask for confirmation
    #[arg(short, long, requires = "all", conflicts_with = "name")]
    pub(crate) yes: bool,
}

/// Arguments of `get`.
#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Kind of the list
    #[arg(value_enum, default_value_t)]
    pub(crate) kind: ListKind,
    /// Names of workloads or numbers of nodes [default: all]
    ///
    /// A workload has the name of its guarantee, else the one of its unit, container or cgroup. The path of its cgroup and
    /// the name of its unit are accepted, too.
    #[arg(value_name = "NAME", value_parser = workload_name())]
    pub(crate) names: Vec<String>,
    /// Print the list again whenever it changes, until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) output: ListOutput,
}

/// Kinds of lists of `get`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListKind {
    /// CPUs, nodes and memory of each workload with a guarantee
    #[default]
    Guarantees,
    /// Memory of each workload
    Workloads,
    /// CPUs and memory of each node
    Nodes,
    /// Latest events
    Events,
}

/// Filter of the events that are printed.
#[derive(Debug, Args)]
pub(crate) struct EventFilterArgs {
    /// Only events about this workload
    #[arg(long, value_name = "NAME", value_parser = workload_name())]
    pub(crate) workload: Option<String>,
    /// Only events of this kind
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(EventKind::ALL.iter().map(|kind| kind.as_str())))]
    pub(crate) kind: Option<String>,
    /// Only events of this last time, such as 10m
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<Interval>,
    /// Only events after the one with this id
    #[arg(long, value_name = "ID", allow_negative_numbers = true)]
    pub(crate) after: Option<u64>,
    /// Maximum number of earlier events [default: 100; with --since, all]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) limit: Option<u16>,
}

impl EventFilterArgs {
    /// Returns the filter of the latest events.
    pub(crate) fn latest(limit: u16) -> Self {
        Self { workload: None, kind: None, since: None, after: None, limit: Some(limit) }
    }
}

/// Options of `top`, and of `replay` for the same output.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) list: WorkloadListArgs,
    /// Print tables, one after another, instead of using the whole terminal
    #[arg(long)]
    pub(crate) batch: bool,
    /// Print one table and exit
    #[arg(long, conflicts_with = "count")]
    pub(crate) once: bool,
    /// Print this many tables and exit
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Seconds between tables
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) interval: u64,
}

/// Arguments of `record`.
#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Path of the recording, which must not exist [default: numaward-TIME.record]
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Record for this long, such as 10m [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME")]
    pub(crate) span: Option<Interval>,
    /// Interval between two moments, at least one second
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    pub(crate) every: Interval,
    /// Maximum size of the file; recording ends when it is reached
    #[arg(long, value_name = "SIZE", default_value = "256Mi", value_parser = parse_bytes, allow_negative_numbers = true)]
    pub(crate) max_size: u64,
}

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Path of the recording
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Begin at this time: 14:30, 14:30:05, 2026-11-21T14:30:05Z (all UTC), or +5m for 5 minutes after the beginning of
    /// the recording
    #[arg(long, value_name = "TIME")]
    pub(crate) begin: Option<ReplayTime>,
    /// End at this time, in the same form
    #[arg(long, value_name = "TIME")]
    pub(crate) end: Option<ReplayTime>,
    #[command(flatten)]
    pub(crate) top: TopArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Parses a duration of at least one second.
fn parse_interval(text: &str) -> Result<Interval, String> {
    let interval: Interval = text.parse()?;
    if interval.0 < Duration::from_secs(1) {
        return Err(format!("{text}: must be at least one second"));
    }
    Ok(interval)
}

/// Parses an amount of bytes.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let amount = parse_amount(text)?.parse::<Quantity>().map_err(|error| error.to_string())?;
    amount.units().ok_or_else(|| format!("{text} is more than any file can have"))
}

/// Checks an amount of memory, which the request contains as it was given.
fn parse_amount(text: &str) -> Result<String, &'static str> {
    match text.parse::<Quantity>() {
        Ok(amount) if !amount.is_zero() => Ok(text.to_owned()),
        _ => Err("not an amount of memory above 0, such as 512Mi or 8Gi"),
    }
}

/// Parses a number of CPUs.
fn parse_cpus(text: &str) -> Result<Cpus, &'static str> {
    let cpus = text.parse::<Cpus>().ok().filter(|cpus| !cpus.0.is_zero());
    cpus.ok_or("not a number of CPUs above 0, such as 2 or 500m")
}

/// Parses huge pages as `SIZE=BYTES`.
fn parse_hugepages(text: &str) -> Result<(String, String), String> {
    let (size, bytes) = parse_pair(text)?;
    if !matches!(format!("hugepages-{size}").parse(), Ok(ZoneKind::Hugepages(_))) {
        return Err(format!("{size:?} is not a size of huge pages, such as 2Mi or 1Gi"));
    }
    Ok((size, parse_amount(&bytes)?))
}

/// Resources of a request, and their placement.
#[derive(Debug, Args)]
pub(crate) struct ResourceArgs {
    /// CPUs: whole numbers (4) are exclusive, fractions (500m, 1.5) are shared [default: shared]
    #[arg(long, help_heading = RESOURCES_HEADING, value_name = "NUMBER", value_parser = parse_cpus, allow_negative_numbers = true)]
    pub(crate) cpus: Option<Cpus>,
    /// Memory that is guaranteed on the nodes [default: none is guaranteed or bound to nodes]
    #[arg(long, help_heading = RESOURCES_HEADING, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) memory: Option<String>,
    /// Limit of the memory (memory.max) [default: the guaranteed amount]
    #[arg(long, help_heading = RESOURCES_HEADING, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) memory_limit: Option<String>,
    #[command(flatten)]
    pub(crate) hugepages: HugepageArgs,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
    /// Make the CPUs a scheduling domain of their own (cpuset.cpus.partition)
    #[arg(long, help_heading = ISOLATION_HEADING, value_parser = partitions())]
    pub(crate) partition: Option<PartitionKind>,
}

/// Returns the group that requires CPUs or memory in each request.
fn required_amounts() -> ArgGroup {
    ArgGroup::new("amounts").args(["cpus", "memory"]).required(true).multiple(true)
}

/// Returns the group that requires a changed amount in each resize.
fn required_changes() -> ArgGroup {
    let amounts = ["cpus", "memory", "memory_limit", "two_mib", "one_gib", "sized"];
    ArgGroup::new("changes").args(amounts).required(true).multiple(true)
}

/// Huge pages by size.
#[derive(Debug, Args)]
pub(crate) struct HugepageArgs {
    /// Huge pages of 2 MiB, as an amount of bytes
    #[arg(long = "hugepages-2Mi", help_heading = RESOURCES_HEADING, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) two_mib: Option<String>,
    /// Huge pages of 1 GiB, as an amount of bytes
    #[arg(long = "hugepages-1Gi", help_heading = RESOURCES_HEADING, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) one_gib: Option<String>,
    /// Huge pages of any size, such as 2Mi=64Mi; can be repeated
    #[arg(long = "hugepages", help_heading = RESOURCES_HEADING, value_name = "SIZE=BYTES", value_parser = parse_hugepages)]
    pub(crate) sized: Vec<(String, String)>,
}

/// Placement of a workload, and its isolation.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "independent conditions")]
pub(crate) struct PlacementArgs {
    /// Topology policy for the nodes of CPUs and memory [default: topologyManagerPolicy of the configuration]
    #[arg(long, help_heading = NODES_HEADING, value_parser = policies())]
    pub(crate) policy: Option<TopologyManagerPolicy>,
    /// Allow only these nodes, such as 1 or 0-1; refused if the request does not fit there (native)
    #[arg(long = "node", help_heading = NODES_HEADING, value_name = "NODES")]
    pub(crate) nodes: Option<NodeSet>,
    /// Prefer these nodes, such as 0-1
    #[arg(long, help_heading = NODES_HEADING, value_name = "NODES")]
    pub(crate) preferred_nodes: Option<NodeSet>,
    /// Prefer the node of a device of this host: a network interface (eth0), a block device (nvme0n1) or a PCI address
    /// (0000:3b:00.0); can be repeated
    #[arg(long, help_heading = NODES_HEADING, value_name = "DEVICE")]
    pub(crate) near: Vec<String>,
    /// Prefer the nodes of another workload: by its name (a pod: namespace/name), or by a label; can be repeated
    /// (native)
    #[arg(long, help_heading = NODES_HEADING, value_name = "NAME|KEY=VALUE")]
    pub(crate) with: Vec<String>,
    /// Avoid the nodes of another workload, named likewise; can be repeated (native)
    #[arg(long, help_heading = NODES_HEADING, value_name = "NAME|KEY=VALUE")]
    pub(crate) apart: Vec<String>,
    /// Label by which other workloads can name this one; can be repeated (native)
    #[arg(long = "label", help_heading = NODES_HEADING, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Experimental: role of memory-only nodes (native) [default: tiers of the configuration]
    #[arg(long, help_heading = NODES_HEADING, value_parser = named(Tiers::ALL, Tiers::as_str, tiers_help))]
    pub(crate) tiers: Option<Tiers>,
    /// Experimental: use only memory of this tier; can be repeated (native) [default: any]
    #[arg(
        long = "memory-tier", help_heading = NODES_HEADING, value_name = "TIER",
        value_parser = named(MemoryTier::ALL, MemoryTier::as_str, memory_tier_help)
    )]
    pub(crate) memory_tiers: Vec<MemoryTier>,
    /// Kind of the exclusive CPUs; if repeated, each CPU has all these kinds (native) [default: any]
    #[arg(
        long = "cpu-kind", help_heading = NODES_HEADING, value_name = "KIND",
        value_parser = named(CpuKind::ALL, CpuKind::as_str, cpu_kind_help)
    )]
    pub(crate) cpu_kinds: Vec<CpuKind>,
    /// Take each exclusive CPU from a different core, and keep the other threads of these cores unused (native)
    #[arg(long, help_heading = NODES_HEADING)]
    pub(crate) hide_siblings: bool,
    /// Prefer CPUs that share a last-level cache (native)
    #[arg(long, help_heading = NODES_HEADING)]
    pub(crate) same_cache: bool,
    /// Move other processes off the exclusive CPUs, independent of enforcement.herding.mode of the configuration
    #[arg(long, help_heading = ISOLATION_HEADING)]
    pub(crate) isolate: bool,
    /// Kernel policy that chooses a node for each new page; only for a command that is started
    #[arg(
        long, help_heading = ISOLATION_HEADING, value_name = "POLICY",
        value_parser = named(MemoryPolicy::ALL, MemoryPolicy::as_str, memory_policy_help)
    )]
    pub(crate) memory_policy: Option<MemoryPolicy>,
    /// Experimental: class of L3 cache and memory bandwidth, one of resctrl.classes of the configuration
    #[arg(long, help_heading = ISOLATION_HEADING, value_name = "CLASS")]
    pub(crate) resctrl_class: Option<String>,
    /// Never move the workload to other nodes (native)
    #[arg(long, help_heading = ISOLATION_HEADING)]
    pub(crate) immovable: bool,
    /// Guarantee the memory on one node without binding it there: the workload may use more, up to --memory-limit, on
    /// any node (native)
    #[arg(long, help_heading = ISOLATION_HEADING)]
    pub(crate) burstable: bool,
}

impl HugepageArgs {
    /// Returns all amounts, in bytes by page size.
    pub(crate) fn by_size(self) -> BTreeMap<String, String> {
        let named = [("2Mi", self.two_mib), ("1Gi", self.one_gib)];
        let named = named.into_iter().filter_map(|(size, bytes)| Some((size.to_owned(), bytes?)));
        named.chain(self.sized).collect()
    }
}

/// Parses `KEY=VALUE`.
fn parse_pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| format!("{text:?} has no key and value, such as key=value"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Parses a label of Kubernetes.
fn parse_label(text: &str) -> Result<(String, String), String> {
    let is_part = |text: &str, max: usize| {
        let ends = [text.chars().next(), text.chars().next_back()];
        text.len() <= max
            && ends.into_iter().all(|end| end.is_some_and(|end| end.is_ascii_alphanumeric()))
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let (key, value) = parse_pair(text)?;
    let (domain, name) =
        key.split_once('/').map_or((None, key.as_str()), |(domain, name)| (Some(domain), name));
    let is_valid = is_part(name, 63) && domain.is_none_or(|domain| is_part(domain, 253));
    if is_valid && (value.is_empty() || is_part(&value, 63)) {
        Ok((key, value))
    } else {
        Err(format!("{text:?} is not a label, such as app=db or example.com/numa=true"))
    }
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
        CpuKind::Performance => "Experimental: CPUs of the fastest cores of the machine",
        CpuKind::Efficiency => {
            "Experimental: CPUs of cores that are slower than the fastest ones, and use less power"
        }
        CpuKind::HighFrequency => {
            "Experimental: CPUs with the highest base frequency, or with the highest maximum frequency if all base frequencies are equal"
        }
        CpuKind::Isolated => "CPUs without load balancing by the scheduler (isolcpus=)",
        CpuKind::NohzFull => "CPUs without a tick while one task runs (nohz_full=)",
    }
}

fn memory_policy_help(policy: MemoryPolicy) -> &'static str {
    match policy {
        MemoryPolicy::Bind => "The nearest node with a free page",
        MemoryPolicy::PreferredMany => "The same, then any other node before memory is reclaimed",
        MemoryPolicy::Interleave => "The nodes in turn",
        MemoryPolicy::WeightedInterleave => {
            "The nodes in turn, each with as many pages as its weight in /sys/kernel/mm/mempolicy/weighted_interleave"
        }
    }
}

/// Returns a parser of workload names. The name of a cgroup is its path without the leading slash, which is accepted,
/// too.
fn workload_name() -> impl TypedValueParser<Value = String> {
    StringValueParser::new().map(|name| name.trim_start_matches('/').to_owned())
}

/// Returns a parser of topology policies by the kubelet's names.
fn policies() -> impl TypedValueParser<Value = TopologyManagerPolicy> {
    named(TopologyManagerPolicy::ALL, TopologyManagerPolicy::as_str, |policy| match policy {
        TopologyManagerPolicy::None => "Nodes of CPUs and memory are independent",
        TopologyManagerPolicy::BestEffort => "The same nodes if possible",
        TopologyManagerPolicy::Restricted => {
            "The same nodes, and no more of them than on an empty machine, or the request is refused"
        }
        TopologyManagerPolicy::SingleNumaNode => "One node, or the request is refused",
    })
}

/// Returns a parser of values by their names.
fn named<T>(
    all: &'static [T],
    name: fn(T) -> &'static str,
    help: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T>
where
    T: Copy + FromStr<Err = UnknownName> + Send + Sync,
{
    let named = all.iter().map(|&value| PossibleValue::new(name(value)).help(help(value)));
    PossibleValuesParser::new(named).try_map(|name| name.parse())
}

/// Returns a parser of cpuset partitions by the kernel's names.
fn partitions() -> impl TypedValueParser<Value = PartitionKind> {
    PossibleValuesParser::new([
        PossibleValue::new("root").help("No other cgroup gets these CPUs"),
        PossibleValue::new("isolated").help("The same, without load balancing by the scheduler"),
    ])
    .map(|name| if name == "root" { PartitionKind::Root } else { PartitionKind::Isolated })
}

/// Configuration file of a command.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Configuration file, which must exist [default: /etc/numaward/config.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(group = required_amounts())]
pub(crate) struct GuaranteeArgs {
    /// A cgroup as in /proc/PID/cgroup (/batch/render), or a systemd unit (nginx.service)
    #[arg(value_name = "CGROUP-OR-UNIT")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    /// Name of the workload [default: the unit, or the cgroup without the leading slash]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Only print what would happen
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
#[command(group = required_changes())]
pub(crate) struct ResizeArgs {
    /// Name of the workload
    #[arg(value_parser = workload_name())]
    pub(crate) name: String,
    /// CPUs: a whole number for a workload with exclusive CPUs, a fraction (500m) for a workload with shared CPUs
    #[arg(long, value_name = "NUMBER", value_parser = parse_cpus, allow_negative_numbers = true)]
    pub(crate) cpus: Option<Cpus>,
    /// Memory that is guaranteed on the workload's nodes
    #[arg(long, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) memory: Option<String>,
    /// Limit of the memory [default: the guaranteed amount if both were equal, else unchanged]
    #[arg(long, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) memory_limit: Option<String>,
    #[command(flatten)]
    pub(crate) hugepages: HugepageArgs,
    /// Only print what would happen
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Name of a workload with a guarantee
    #[arg(
        value_parser = workload_name(),
        required_unless_present_any = ["cpus", "memory"],
        conflicts_with_all = ["cpus", "memory", "memory_limit", "partition", "HugepageArgs", "PlacementArgs"]
    )]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) resources: OptionalResourceArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Optional resources of `explain`: absent if neither CPUs nor memory are given, as each request needs one of them.
///
/// `Option<ResourceArgs>` would always be `None`: to clap, a struct of flattened parts is a group without
/// members.
#[derive(Debug)]
pub(crate) struct OptionalResourceArgs(pub(crate) Option<ResourceArgs>);

impl FromArgMatches for OptionalResourceArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_asked = ["cpus", "memory"].iter().any(|id| matches.contains_id(id));
        is_asked.then(|| ResourceArgs::from_arg_matches(matches)).transpose().map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for OptionalResourceArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        // An update requires no argument.
        ResourceArgs::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        ResourceArgs::augment_args_for_update(command)
    }
}

#[derive(Debug, Args)]
pub(crate) struct RecommendArgs {
    /// Units or workloads [default: all]
    #[arg(value_name = "UNIT", value_parser = workload_name())]
    pub(crate) names: Vec<String>,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = RecommendFormat::Table)]
    pub(crate) output: RecommendFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecommendFormat {
    /// For people
    Table,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
    /// A file for guarantees.d with the recommended guarantees
    Guarantees,
}

#[derive(Debug, Args)]
#[command(group = required_amounts())]
pub(crate) struct TrialArgs {
    /// A cgroup as in /proc/PID/cgroup (/batch/render), or a systemd unit (nginx.service)
    #[arg(value_name = "CGROUP-OR-UNIT")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    /// Number of rounds
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = clap::value_parser!(u16).range(ROUNDS))]
    pub(crate) rounds: u16,
    /// Shell command before each run, such as "systemctl restart db"
    #[arg(long, value_name = "COMMAND")]
    pub(crate) prepare: Option<String>,
    /// Pause before each run, in which memory moves
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub(crate) settle: Interval,
    /// Text in the command's output before the figure, such as "tps"
    #[arg(long, value_name = "TEXT")]
    pub(crate) after: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
    /// The benchmark and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Limits of a plan.
#[derive(Debug, Args)]
pub(crate) struct MoveLimitArgs {
    /// Maximum number of workloads that move [default: 3]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) moves: Option<u32>,
    /// Maximum amount of memory that moves [default: any amount]
    #[arg(long, value_name = "SIZE", value_parser = parse_amount, allow_negative_numbers = true)]
    pub(crate) bytes: Option<String>,
}

#[derive(Debug, Args)]
#[command(group = required_amounts())]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    #[command(flatten)]
    pub(crate) limits: MoveLimitArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
#[command(group = required_amounts())]
pub(crate) struct RebalanceArgs {
    /// A cgroup or a unit that gets the guarantee after the moves
    #[arg(value_name = "CGROUP-OR-UNIT")]
    pub(crate) target: Option<String>,
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    /// Name of the workload [default: the unit, or the cgroup without the leading slash]
    #[arg(long, requires = "target")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) limits: MoveLimitArgs,
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
    /// Experimental: use of memory-only nodes by native [default: that of --config, else attached]
    #[arg(long, value_name = "TIERS", value_parser = named(Tiers::ALL, Tiers::as_str, tiers_help))]
    pub(crate) tiers: Option<Tiers>,
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
    /// Replay a fleet of this number of hosts, with a scheduler that assigns the pods to hosts
    ///
    /// The pods are those of one trace for each host, shifted in time. Prints the admitted requests with the default scheduler
    /// and with the plugin NodeResourceTopologyMatch, with native for each setting of kubernetes.refused, and on hosts
    /// without nodes, and the assumptions of the simulation.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) hosts: Option<u16>,
    /// Seed of the fleet's random numbers: the same seed creates the same fleet
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "hosts")]
    pub(crate) seed: u64,
    /// Print each trace, or each group of hosts alike, not only the sum
    #[arg(long)]
    pub(crate) each: bool,
    /// Suggest reservedMemory from what this host uses beside containers and commands of numaward exec
    #[arg(long, conflicts_with_all = [
        "traces", "strategy", "tiers", "machine", "config", "policy", "hosts", "each",
    ])]
    pub(crate) reserved_memory: bool,
    /// Time for which the use of this host is observed, such as 10m
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

/// Kind of the call chains of `stacks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StackKindArg {
    /// Allocations on another node than that of the CPU
    #[default]
    Allocations,
    /// Accesses to memory of another node, as sampled by the kernel
    Accesses,
}

impl From<StackKindArg> for StackKind {
    fn from(choice: StackKindArg) -> Self {
        match choice {
            StackKindArg::Allocations => Self::Allocations,
            StackKindArg::Accesses => Self::Accesses,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Directory of the kubelet, usually /var/lib/kubelet
    pub(crate) directory: PathBuf,
    /// Only print what would be imported
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct ClaimTemplateArgs {
    /// The manifest, in YAML; - is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    pub(crate) file: PathBuf,
    /// DeviceClass of the claims, which selects the devices node-N
    #[arg(long, value_name = "NAME", default_value = "numa-node")]
    pub(crate) device_class: String,
    /// Print an admission policy instead of the manifest
    ///
    /// It makes the change to pods with this label as they are created, if they have the containers and the amounts of the manifest,
    /// whose metadata.namespace is required. For pods of operators and charts.
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_label)]
    pub(crate) admission_policy: Option<(String, String)>,
}

#[derive(Debug, Args)]
pub(crate) struct UninstallArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Write the two files into this directory, which is created if it is absent and must not be a kubelet's own
    #[arg(long, value_name = "DIR")]
    pub(crate) into: Option<PathBuf>,
    /// Replace files of an earlier export
    #[arg(long, requires = "into")]
    pub(crate) replace: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Output {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    pub(crate) output: OutputFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people
    Table,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

// Like `Output`, for call chains.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StackOutput {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = StackFormat::Table)]
    pub(crate) output: StackFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StackFormat {
    /// Folded: a line for each call chain
    Table,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
    /// A compressed profile for pprof
    Pprof,
}

// Like `Output`, for a command with an optional wide table. This is no doc comment, which clap would use as the
// command's own.
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
    /// Names alone, one a line
    Name,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

impl From<OutputFormat> for ListFormat {
    fn from(output: OutputFormat) -> Self {
        match output {
            OutputFormat::Table => Self::Table,
            OutputFormat::Json => Self::Json,
            OutputFormat::Yaml => Self::Yaml,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_is_for_lists_only() {
        let parsed = |command: &str| Cli::try_parse_from(["numaward", command, "-o", "wide"]);
        assert!(parsed("get").is_ok());
        for command in ["events", "topology", "status", "top", "doctor"] {
            let error = parsed(command).unwrap_err().to_string();
            assert!(error.contains("[possible values: table, json, yaml]"), "{error}");
        }
    }

    #[test]
    fn help_lists_each_command_once() {
        let mut listed: Vec<_> = COMMAND_GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        listed.sort_unstable();
        let command = Cli::command();
        let shown = command.get_subcommands().filter(|of| !of.is_hide_set()).map(clap::Command::get_name);
        let mut shown: Vec<_> = shown.chain(["help"]).collect();
        shown.sort_unstable();
        assert_eq!(listed, shown);
        assert!(LOCAL_COMMANDS.iter().all(|name| shown.contains(name)), "{LOCAL_COMMANDS:?}");
    }

    #[test]
    fn explains_a_workload_or_a_request() {
        let explain = |arguments: &[&str]| {
            let parsed = Cli::try_parse_from([&["numaward", "explain"], arguments].concat());
            parsed.map(|cli| match cli.command {
                Command::Explain(explain) => {
                    (explain.name, explain.resources.0.map(|resources| (resources.cpus, resources.memory)))
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

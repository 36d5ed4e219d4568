//! Subcommands of `numaward`: requests to the daemon, and commands that read this host.
//!
//! Commands that need code of the daemon call it through functions that the caller passes in ([`DaemonHooks`]): this
//! crate does not depend on the daemon's crate.

#![deny(unsafe_code)]

mod affinity;
mod areas;
mod args;
mod bugtool;
mod claim_template;
mod client;
mod column;
mod control;
mod device;
mod doctor;
#[cfg(test)]
mod documented;
mod events;
mod exec;
mod exit_signals;
mod explain;
mod export;
mod get;
mod heap;
mod import;
mod listening;
mod mempolicy;
mod numactl;
mod rebalance;
mod recommend;
mod record;
mod recording;
mod regions;
mod reload;
mod remapped_policy;
mod remote;
mod residency;
mod simulate;
mod stacks;
mod status;
mod table;
mod text;
mod top;
mod topology;
mod trial;
mod uninstall;
mod workload_names;

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::{CommandFactory, FromArgMatches as _, error::ErrorKind};
use numaward_api::{self as api, Version};
use numaward_api::{
    claim_template::{ClaimManifests, ManifestRequest},
    doctor::{CheckResult, HostCheck},
    import::ImportReport,
    restore::RestoreReport,
};
use numaward_config::{self as config, Flag, Interval, LoadedConfig, NodeScope, Sources};
use numaward_engine::PolicyConfig;
use numaward_probes::{ProbeOptions, ProbeReport, Probes};
use numaward_topology::{KernelFeature, Machine};
use serde::Serialize;

use crate::{
    args::{
        ClaimTemplateArgs, Cli, Command, ConfigArgs, ConfigCommand, ConfigFormat, ConnectionArgs,
        EventFilterArgs, ExecArgs, ExplainArgs, ExportArgs, GetArgs, GuaranteeArgs, ImportArgs, ListFormat,
        ListKind, ListOutput, MoveLimitArgs, Output, OutputFormat, PlanArgs, RebalanceArgs, RecommendArgs,
        RecommendFormat, RecordArgs, ReleaseArgs, ReplayArgs, ResizeArgs, ResourceArgs, RunArgs, Simulate,
        StackFormat, TopArgs, TrialArgs, UninstallArgs, UsageError,
    },
    client::{ClientError, Server},
    events::EventNames,
    remote::Remote,
};

/// Exit code: wrong usage or input.
const EXIT_USAGE: u8 = 2;
/// Exit code: the engine refused a request.
const EXIT_REFUSED: u8 = 3;
/// Exit code: the daemon is not reachable.
const EXIT_UNREACHABLE: u8 = 4;

/// Function that checks the host with this root directory, given its probes, the probes' needs and the configuration.
pub type ExamineHost = fn(
    &Path,
    &[ProbeReport],
    &[(KernelFeature, Option<bool>)],
    Result<&config::Config, &config::Problems>,
) -> Vec<HostCheck>;

/// Functions of the daemon that commands call.
#[derive(Clone, Copy, Debug)]
pub struct DaemonHooks {
    /// Runs the daemon with a configuration from these sources until it is stopped.
    pub run: fn(&Sources, LoadedConfig) -> anyhow::Result<()>,
    /// Checks a host for missing requirements.
    pub examine: ExamineHost,
    /// Returns the engine's configuration on a machine.
    pub policy: fn(&config::Config, &Machine) -> anyhow::Result<PolicyConfig>,
    /// Imports the guarantees of a kubelet from the state files in a directory; a dry run changes nothing.
    pub import: fn(&config::Config, &Machine, &Path, bool) -> anyhow::Result<ImportReport>,
    /// Restores all settings that a daemon with this configuration changed.
    pub restore: fn(&config::Config, Machine) -> anyhow::Result<RestoreReport>,
    /// Returns manifests with resource claims, or the problem of the manifest.
    pub claim_manifests: fn(&ManifestRequest) -> Result<ClaimManifests, String>,
}

/// Executes the command of this process's arguments.
pub fn main(daemon: &DaemonHooks) -> ExitCode {
    let parsed = args::command().try_get_matches();
    let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    let Cli { connection, command } = match parsed.and_then(Cli::with_consistent_amounts) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return match error.exit_code() {
                _ if !is_help && passes_on_exit_code() => ExitCode::from(exec::EXIT_FAILED),
                code => ExitCode::from(u8::try_from(code).unwrap_or(1)),
            };
        }
    };
    let executes_a_command =
        matches!(command, Command::Exec(ExecArgs { dry_run: false, .. }) | Command::Enter { .. });
    let result = match command {
        Command::Run(args) => run(daemon, args),
        Command::Topology { root, output } => topology(&connection, root.as_deref(), output),
        Command::Status { cost, output } => status(&connection, cost, output),
        Command::Top { name, top: args, output } => top(name.as_deref(), args, &connection, output),
        Command::Record(args) => record(&connection, args),
        Command::Replay(args) => replay(&args),
        Command::Get(args) => get(&connection, args),
        Command::Describe { name, output } => describe(&connection, &name, output),
        Command::Stacks { name, node, kind, output } => {
            stacks(&connection, &name, node, kind.into(), output.output)
        }
        Command::Regions { name, hot: true, span, output, .. } => hot(&connection, &name, span, output),
        Command::Regions { name, sampled: true, span, output, .. } => {
            sampled(&connection, &name, span, output)
        }
        Command::Regions { name, output, .. } => regions(&connection, &name, output),
        Command::Events { follow, filter, output } => events(&connection, follow, &filter, output),
        Command::Exec(args) => exec(&connection, args),
        Command::Numactl { arguments } => numactl(&connection, &arguments),
        Command::Guarantee(args) => guarantee(&connection, args),
        Command::Resize(args) => resize(&connection, args),
        Command::Release(args) => release(&connection, &args),
        Command::Explain(args) => explain(&connection, args),
        Command::Recommend(args) => recommend(&connection, &args),
        Command::Trial(args) => trial(&connection, args),
        Command::Plan(args) => plan(&connection, args),
        Command::Rebalance(args) => rebalance(&connection, args),
        Command::Enter { directory, spread, all_cpus, command } => {
            exec::enter(&directory, spread.as_ref(), all_cpus, &command)
        }
        Command::Doctor { root, config, output } => doctor(daemon, &connection, (&root, config), output),
        Command::Bugtool { file } => bugtool(daemon, &connection, file),
        Command::Config(ConfigCommand::Check { file, node, output }) => {
            check_config(&sources(file, node.scope()), output)
        }
        Command::Config(ConfigCommand::View { config, node, origins, output }) => {
            view_config(&sources(config.config, node.scope()), origins, output)
        }
        Command::Config(ConfigCommand::Schema) => print_json(&config::json_schema()),
        Command::Reload(output) => reload(&connection, output),
        Command::Completions { shell } => completions(shell),
        Command::Man { dir } => man(dir.as_deref()),
        Command::Simulate(args) => simulate(daemon, &args),
        Command::ImportKubeletState(args) => import_kubelet_state(daemon, args),
        Command::ExportKubeletState(args) => export_kubelet_state(&connection, &args),
        Command::ClaimTemplate(args) => claim_template(daemon, args),
        Command::Uninstall(args) => uninstall(daemon, args),
        Command::Options => print_text(&args::options().render_long_help().to_string()),
        Command::Version(output) => version(output),
    };
    match result {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("numaward: {}", text::clean_lines(&error_chain(&error)));
            match error.downcast_ref() {
                _ if executes_a_command => ExitCode::from(exec::EXIT_FAILED),
                _ if error.is::<UsageError>() => ExitCode::from(EXIT_USAGE),
                Some(ClientError::Unreachable { .. }) => ExitCode::from(EXIT_UNREACHABLE),
                Some(ClientError::Refused(refusal)) if refusal.rejection.is_some() => {
                    ExitCode::from(EXIT_REFUSED)
                }
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Returns whether the arguments, which do not parse, name a subcommand that passes on the exit code of another
/// command.
fn passes_on_exit_code() -> bool {
    let matches = Cli::command().ignore_errors(true).try_get_matches();
    matches.is_ok_and(|matches| matches.subcommand_name() == Some("exec"))
}

/// Joins an error and its causes in one line. A cause that the text already contains is skipped.
fn error_chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match () {
        () if text.is_empty() => cause,
        () if text.contains(&cause) => text,
        () => format!("{text}: {cause}"),
    })
}

/// Returns whether the reader of the output has closed it, as in `numaward topology | head -1`.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn run(daemon: &DaemonHooks, args: RunArgs) -> anyhow::Result<ExitCode> {
    let flag = |name, key, value: Option<String>| value.map(|value| Flag { name, key, value });
    let flags = [
        flag("--listen", "listen", args.listen),
        flag("--log-level", "log.level", args.log_level),
        flag("--log-format", "log.format", args.log_format),
    ];
    let sources =
        Sources { flags: flags.into_iter().flatten().collect(), ..sources(args.config.config, None) };
    let loaded = config::load(&sources)?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    heap::share_among_threads();
    (daemon.run)(&sources, loaded)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the sources of a configuration: a file, and this process's environment variables. Invalid bytes of a variable are replaced, so
/// that its key is still checked.
fn sources(file: Option<PathBuf>, node: Option<NodeScope>) -> Sources {
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    Sources { file, node, variables: variables.collect(), flags: Vec::new() }
}

/// Loads the configuration of this host's daemon.
fn load_config(file: ConfigArgs) -> Result<config::Config, config::Problems> {
    Ok(config::load(&sources(file.config, None))?.config)
}

fn topology(connection: &ConnectionArgs, root: Option<&Path>, output: Output) -> anyhow::Result<ExitCode> {
    let server = if root.is_some() { None } else { Some(server(connection)?) };
    let report = match &server {
        // A daemon that was named explicitly, maybe of another host, must be reachable.
        Some(server @ (Server::Remote(_) | Server::Socket(_))) => runtime()?.block_on(async {
            let topology = server.get("/api/v1/topology").await?;
            Ok::<_, ClientError>(topology::TopologyReport {
                topology,
                guarantees: node_guarantees(server).await,
            })
        })?,
        local => {
            let topology = api::Topology::from(&topology::machine(root.unwrap_or(Path::new("/")))?);
            let guarantees = match local {
                Some(server) => runtime()?.block_on(node_guarantees(server)),
                None => None,
            };
            topology::TopologyReport { topology, guarantees }
        }
    };
    print(output, &report, topology::render)
}

/// Returns the guarantees on each node; `None` if the daemon does not provide them, as one that only observes.
async fn node_guarantees(server: &Server) -> Option<Vec<api::NodeCapacity>> {
    server.allocations().await.ok().map(|allocations| allocations.nodes)
}

/// Returns the address of the daemon.
fn server(connection: &ConnectionArgs) -> anyhow::Result<Server> {
    Ok(match connection.server.as_deref() {
        Some(path) if path.starts_with('/') => Server::Socket(PathBuf::from(path)),
        Some(url) => Server::Remote(Box::new(Remote::new(url, connection)?)),
        None => {
            let config = load_config(ConfigArgs { config: None })?;
            Server::Local { socket: config.control_socket, address: local_address(config.listen.0) }
        }
    })
}

/// Returns the address of this host's daemon. Fails if the arguments name a daemon by URL.
fn local_server(connection: &ConnectionArgs) -> anyhow::Result<Server> {
    match server(connection)? {
        Server::Remote(remote) => {
            bail!(
                "--server {}: this command requires the daemon of this host: give the path of its control socket",
                remote.url
            )
        }
        local => Ok(local),
    }
}

fn status(connection: &ConnectionArgs, cost: Option<Interval>, output: Output) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    // Before the first request, so that missing privileges are reported at once.
    let window = cost.map(|_| numaward_probes::stats_window()).transpose();
    let window = window.context("--cost: requires root (CAP_SYS_ADMIN) on the daemon's own host")?;
    let report = runtime()?.block_on(async {
        let mut status: api::Status = server.get("/api/v1/status").await?;
        let mut measured = None;
        if let Some(Interval(span)) = cost {
            tokio::time::sleep(span).await;
            let after = server.get("/api/v1/status").await?;
            measured = Some(status::ProbeCosts::between(&status, &after, span));
            status = after;
        }
        drop(window);
        let api::Workloads { workloads } = server.get("/api/v1/workloads").await?;
        // A daemon that only observes has no guarantees.
        let allocations = server.allocations().await.ok();
        let bound_threads = match (&server, &allocations) {
            (Server::Remote(_), _) | (_, None) => Vec::new(),
            (_, Some(allocations)) => {
                let allocations = allocations.allocations.iter();
                allocations
                    .filter_map(|allocation| affinity::bound_threads(Path::new("/proc"), allocation))
                    .collect()
            }
        };
        Ok::<_, ClientError>(status::StatusReport {
            status,
            workloads,
            allocations,
            bound_threads,
            cost: measured,
        })
    })?;
    print(output, &report, status::render)
}

fn top(
    name: Option<&str>,
    args: TopArgs,
    connection: &ConnectionArgs,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let runtime = runtime()?;
    let result = runtime.block_on(top::run(server, name, args, output.output));
    // The thread that reads keys blocks until the next key.
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

fn record(connection: &ConnectionArgs, args: RecordArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    runtime()?.block_on(record::run(server, args)).map(|()| ExitCode::SUCCESS)
}

fn replay(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let result = runtime.block_on(top::replay(args));
    // As in `top`.
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

/// Returns the address at which this host reaches a daemon that listens on `listen`.
fn local_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// Returns the request for some resources. Devices are looked up on this host.
fn allocation_request(
    name: String,
    target: api::Target,
    resources: ResourceArgs,
    server: &Server,
) -> anyhow::Result<api::AllocationRequest> {
    let ResourceArgs { cpus, memory, memory_limit, hugepages, partition, placement } = resources;
    if let (Server::Remote(remote), Some(device)) = (server, placement.near.first()) {
        bail!("--near {device}: the devices of this host are read, and {} may be another", remote.url);
    }
    let mut preferred = placement.preferred_nodes.unwrap_or_default();
    for device in &placement.near {
        let node = device::node(Path::new("/"), device);
        preferred.insert(node.map_err(|error| UsageError(format!("--near {device}: {error}")))?);
    }
    Ok(api::AllocationRequest {
        name,
        target,
        cpus,
        memory,
        memory_limit,
        hugepages: hugepages.by_size(),
        policy: placement.policy,
        partition,
        placement: api::Placement {
            preferred_nodes: Some(preferred).filter(|nodes| !nodes.is_empty()),
            nodes: placement.nodes.filter(|nodes| !nodes.is_empty()),
            tiers: placement.tiers,
            memory_tiers: placement.memory_tiers.into_iter().collect(),
            cpu_kinds: placement.cpu_kinds.into_iter().collect(),
            hide_siblings: placement.hide_siblings,
            labels: placement.labels.into_iter().collect(),
            with: placement.with.into_iter().collect(),
            apart: placement.apart.into_iter().collect(),
            same_cache: placement.same_cache,
            isolate: placement.isolate,
            memory_policy: placement.memory_policy,
            resctrl_class: placement.resctrl_class,
            immovable: placement.immovable,
            burstable: placement.burstable,
        },
    })
}

/// Returns the default name of a command's workload, which is unique on this host while the command runs.
fn default_name(command: &[OsString]) -> String {
    let program = command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    let program: String = program
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(64)
        .collect();
    format!("{program}-{}", std::process::id())
}

fn exec(connection: &ConnectionArgs, args: ExecArgs) -> anyhow::Result<ExitCode> {
    let server = local_server(connection)?;
    let name = args.name.unwrap_or_else(|| default_name(&args.command));
    let request = allocation_request(name, api::Target::Exec, args.resources, &server)?;
    if args.dry_run {
        return dry_run(&server, &request, Output { output: OutputFormat::Table });
    }
    runtime()?.block_on(exec::run(&server, &request, &args.command))
}

fn numactl(connection: &ConnectionArgs, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    match numactl::parse(arguments)? {
        numactl::Invocation::Help => print_text(
            &built_subcommand("numactl")
                .map_or_else(String::new, |mut help| help.render_long_help().to_string()),
        ),
        numactl::Invocation::Show(binding) => print_text(&numactl::render_policy(&binding)?),
        numactl::Invocation::Hardware => print_text(&numactl::hardware(&topology::machine(Path::new("/"))?)),
        numactl::Invocation::Run(run) => {
            let server = local_server(connection);
            runtime()?.block_on(numactl::run(server, &run, &default_name(&run.command)))
        }
    }
}

/// Returns a subcommand with the global options.
fn built_subcommand(name: &str) -> Option<clap::Command> {
    let mut all = args::commands().bin_name("numaward");
    all.build();
    all.find_subcommand(name).cloned()
}

fn guarantee(connection: &ConnectionArgs, args: GuaranteeArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let request = request_for_target(args.target, args.name, args.resources, &server)?;
    exec::warn_about_memory_limit(&request);
    if args.dry_run {
        return dry_run(&server, &request, args.output);
    }
    let allocation = runtime()?.block_on(async {
        let allocation = server.admit(&request).await?;
        exec::warn_about_shared_cpus(&server, &allocation).await;
        Ok::<_, ClientError>(allocation)
    })?;
    exec::warn_about_absent_nodes(&allocation);
    affinity::warn_about_bound_threads(&allocation);
    remapped_policy::warn_about_remapped_policy(&allocation);
    print(args.output, &allocation, explain::render_summary)
}

fn resize(connection: &ConnectionArgs, args: ResizeArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let request = api::Resize {
        cpus: args.cpus,
        memory: args.memory,
        memory_limit: args.memory_limit,
        hugepages: args.hugepages.by_size(),
    };
    match runtime()?.block_on(server.resize(&args.name, &request, args.dry_run))? {
        api::ResizeOutcome::Applied(allocation) => print(args.output, &*allocation, explain::render_summary),
        api::ResizeOutcome::DryRun(dry) => print_dry_run(args.output, &dry),
    }
}

/// Prints the decision about a request that is not made.
fn dry_run(server: &Server, request: &api::AllocationRequest, output: Output) -> anyhow::Result<ExitCode> {
    print_dry_run(output, &runtime()?.block_on(server.dry_run(request))?)
}

/// Prints a dry run. Its exit code is that of a refusal if the request would be refused.
fn print_dry_run(output: Output, dry: &api::DryRun) -> anyhow::Result<ExitCode> {
    let code = print(output, dry, explain::render_dry_run)?;
    Ok(if dry.admitted { code } else { ExitCode::from(EXIT_REFUSED) })
}

/// Returns the request of a cgroup or a unit.
fn request_for_target(
    target: String,
    name: Option<String>,
    resources: ResourceArgs,
    server: &Server,
) -> anyhow::Result<api::AllocationRequest> {
    let name = name.unwrap_or_else(|| target.trim_start_matches('/').to_owned());
    let is_cgroup = target.starts_with('/');
    let target = if is_cgroup { api::Target::Cgroup(target) } else { api::Target::Unit(target) };
    allocation_request(name, target, resources, server)
}

/// Returns a request without a target, for which only capacity is planned.
fn request_without_target(
    resources: ResourceArgs,
    server: &Server,
) -> anyhow::Result<api::AllocationRequest> {
    // A unique name; the request is not stored.
    allocation_request(format!("plan-{}", std::process::id()), api::Target::Exec, resources, server)
}

fn plan(connection: &ConnectionArgs, args: PlanArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let MoveLimitArgs { moves, bytes } = args.limits;
    let request = request_without_target(args.resources, &server)?;
    let request = api::PlanRequest { request, max_moves: moves, max_bytes: bytes };
    print(args.output, &runtime()?.block_on(server.plan(&request))?, rebalance::render_plan)
}

fn rebalance(connection: &ConnectionArgs, args: RebalanceArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let MoveLimitArgs { moves, bytes } = args.limits;
    let admit = args.target.is_some();
    let request = match args.target {
        Some(target) => request_for_target(target, args.name, args.resources, &server)?,
        None => request_without_target(args.resources, &server)?,
    };
    let planned = api::PlanRequest { request, max_moves: moves, max_bytes: bytes };
    let runtime = runtime()?;
    let plan = runtime.block_on(server.plan(&planned))?;
    if !args.apply {
        return print(args.output, &plan, rebalance::render_plan);
    }
    exec::warn_about_memory_limit(&planned.request);
    let outcome = runtime.block_on(rebalance::apply(&server, planned, &plan, admit))?;
    print(args.output, &outcome, rebalance::render_outcome)?;
    Ok(if outcome.state == api::RebalanceState::Done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn release(connection: &ConnectionArgs, args: &ReleaseArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    let runtime = runtime()?;
    if let Some(name) = &args.name {
        runtime.block_on(server.release(name))?;
        return Ok(ExitCode::SUCCESS);
    }
    let held = runtime.block_on(async {
        server.check_changes_allowed().await?;
        server.allocations().await
    })?;
    // A declared workload would be admitted again at once, and a container's guarantee ends with its pod.
    let names: Vec<&str> = held
        .allocations
        .iter()
        .filter(|held| held.declared.is_none() && !matches!(held.target, api::Target::Container(_)))
        .map(|held| held.name.as_str())
        .collect();
    if names.is_empty() {
        eprintln!("numaward: there is no guarantee to end");
        return Ok(ExitCode::SUCCESS);
    }
    if !args.yes && !confirm_release(&names)? {
        bail!("nothing is released");
    }
    let mut code = ExitCode::SUCCESS;
    for name in names {
        match runtime.block_on(server.release(name)) {
            Ok(()) => println!("{} released", text::clean(name)),
            // The guarantee has ended meanwhile.
            Err(ClientError::Refused(refusal)) if refusal.status == 404 => {}
            Err(error @ ClientError::Unreachable { .. }) => return Err(error.into()),
            Err(error) => {
                eprintln!("numaward: {}: {}", text::clean(name), text::clean_lines(&error.to_string()));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// Asks for confirmation on the terminal.
fn confirm_release(names: &[&str]) -> anyhow::Result<bool> {
    let guarantees = match names.len() {
        1 => "this guarantee".to_owned(),
        number => format!("these {number} guarantees"),
    };
    if !io::stdin().is_terminal() {
        bail!("this is no terminal on which to confirm the end of {guarantees}: add --yes");
    }
    eprint!("{}", text::clean_lines(&format!("  {}\nEnd {guarantees}? [y/N] ", names.join("\n  "))));
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Interval between two lists of `get --watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

fn get(connection: &ConnectionArgs, args: GetArgs) -> anyhow::Result<ExitCode> {
    let GetArgs { kind, names, watch, output: ListOutput { output: format } } = args;
    let server = server(connection)?;
    runtime()?.block_on(async {
        if kind == ListKind::Events && watch {
            let filter = EventFilterArgs::latest(events::DEFAULT_LIMIT);
            let names = EventNames::fetch(&server, names).await?;
            match events::follow(&server, &filter, names, format).await? {}
        }
        let mut last = String::new();
        loop {
            let text = get::list(&server, kind, &names, format).await?.text(format)?;
            if text != last {
                let gap = match format {
                    _ if last.is_empty() => "",
                    ListFormat::Table | ListFormat::Wide => "\n",
                    ListFormat::Yaml => "---\n",
                    ListFormat::Name | ListFormat::Json => "",
                };
                print_text(&format!("{gap}{text}"))?;
            }
            if !watch {
                return Ok(ExitCode::SUCCESS);
            }
            last = text;
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    })
}

fn describe(connection: &ConnectionArgs, name: &str, output: Output) -> anyhow::Result<ExitCode> {
    let description = runtime()?.block_on(get::describe(&server(connection)?, name))?;
    print(output, &description, get::render_description)
}

fn stacks(
    connection: &ConnectionArgs,
    name: &str,
    node: Option<u32>,
    kind: numaward_api::StackKind,
    format: StackFormat,
) -> anyhow::Result<ExitCode> {
    if format == StackFormat::Pprof && io::stdout().is_terminal() {
        bail!("-o pprof writes a binary profile, which a terminal cannot show: add >FILE.pb.gz");
    }
    let stacks = runtime()?.block_on(stacks::fetch(&server(connection)?, name, kind, node))?;
    stacks::warn(&stacks);
    let output = match format {
        StackFormat::Table => OutputFormat::Table,
        StackFormat::Json => OutputFormat::Json,
        StackFormat::Yaml => OutputFormat::Yaml,
        StackFormat::Pprof => {
            io::stdout().write_all(&stacks::pprof::encode(&stacks, kind)?)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    print(Output { output }, &stacks, |stacks| stacks.folded(kind, node))
}

fn regions(connection: &ConnectionArgs, name: &str, output: Output) -> anyhow::Result<ExitCode> {
    let regions = runtime()?.block_on(regions::fetch(&server(connection)?, name))?;
    print(output, &regions, regions::render)
}

fn hot(
    connection: &ConnectionArgs,
    name: &str,
    Interval(span): Interval,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let hot = runtime()?.block_on(areas::watch_hot(&local_server(connection)?, name, span))?;
    print(output, &hot, areas::hot::render)
}

fn sampled(
    connection: &ConnectionArgs,
    name: &str,
    Interval(span): Interval,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let sampled = runtime()?.block_on(areas::watch_sampled(&local_server(connection)?, name, span))?;
    print(output, &sampled, areas::sampled::render)
}

fn events(
    connection: &ConnectionArgs,
    follow: bool,
    filter: &EventFilterArgs,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    runtime()?.block_on(async {
        let names = EventNames::fetch(&server, filter.workload.iter().cloned().collect()).await?;
        if follow {
            match events::follow(&server, filter, names, output.output.into()).await? {}
        }
        let page = events::page(&server, filter, &names).await?;
        print(output, &page, |page| events::render(&page.events))
    })
}

fn bugtool(
    daemon: &DaemonHooks,
    connection: &ConnectionArgs,
    file: Option<PathBuf>,
) -> anyhow::Result<ExitCode> {
    let server = local_server(connection)?;
    let config = load_config(ConfigArgs { config: None });
    let checks = run_checks(daemon, Path::new("/"), config.as_ref());
    let file = runtime()?.block_on(bugtool::write(&server, file, config.as_ref(), &checks))?;
    println!("{}", file.display());
    Ok(ExitCode::SUCCESS)
}

fn explain(connection: &ConnectionArgs, args: ExplainArgs) -> anyhow::Result<ExitCode> {
    let server = server(connection)?;
    match (args.name, args.resources.0) {
        (None, Some(resources)) => {
            // A unique name; the request is not stored.
            let name = format!("explain-{}", std::process::id());
            let request = allocation_request(name, api::Target::Exec, resources, &server)?;
            dry_run(&server, &request, args.output)
        }
        (name, _) => {
            let name = name.unwrap_or_default();
            let held = runtime()?.block_on(server.allocations())?;
            let found = held.allocations.iter().find(|held| workload_names::is_named(held, &name));
            let found = found.with_context(|| format!("there is no guarantee named {name:?}"))?;
            print(args.output, &**found, explain::render_allocation)
        }
    }
}

fn recommend(connection: &ConnectionArgs, args: &RecommendArgs) -> anyhow::Result<ExitCode> {
    let mut all = runtime()?.block_on(recommend::fetch(&server(connection)?))?;
    if let Some(missing) = args.names.iter().find(|name| !all.iter().any(|one| one.is_named(name))) {
        bail!("no workload named {missing:?} was observed: the daemon reads each about once a minute");
    }
    all.retain(|one| args.names.is_empty() || args.names.iter().any(|name| one.is_named(name)));
    let output = match args.output {
        RecommendFormat::Guarantees => {
            return print_text(&text::clean_lines(&recommend::render_guarantees(&all)?));
        }
        RecommendFormat::Table => OutputFormat::Table,
        RecommendFormat::Json => OutputFormat::Json,
        RecommendFormat::Yaml => OutputFormat::Yaml,
    };
    print(Output { output }, &all, |all| recommend::render(all))
}

fn trial(connection: &ConnectionArgs, args: TrialArgs) -> anyhow::Result<ExitCode> {
    let server = local_server(connection)?;
    let request = request_for_target(args.target, None, args.resources, &server)?;
    exec::warn_about_memory_limit(&request);
    let benchmark = trial::Benchmark {
        command: args.command,
        after: args.after,
        rounds: args.rounds,
        prepare: args.prepare,
        settle: args.settle.0,
    };
    let runtime = runtime()?;
    runtime.block_on(server.check_changes_allowed())?;
    let dry = runtime.block_on(trial::dry_run(&server, &request))?;
    if !dry.admitted {
        return print_dry_run(args.output, &dry);
    }
    let trial = runtime.block_on(trial::run(&server, &request, &benchmark))?;
    print(args.output, &trial, trial::render)
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn doctor(
    daemon: &DaemonHooks,
    connection: &ConnectionArgs,
    (root, config): (&Path, Option<PathBuf>),
    output: Output,
) -> anyhow::Result<ExitCode> {
    let mut checks = run_checks(daemon, root, config_of_root(root, config).as_ref());
    // Only the daemon of this host knows its container runtime. The checks are for hosts without a daemon, too.
    if root == Path::new("/")
        && let Ok(server) = local_server(connection)
    {
        let status = runtime()?.block_on(server.get::<api::Status>("/api/v1/status"));
        let runtime = status.ok().and_then(|status| status.container_runtime);
        checks.extend(runtime.as_ref().map(doctor::container_runtime));
    }
    print(output, &checks, |checks| doctor::render(checks))?;
    let fails = checks.iter().any(|check| check.verdict == CheckResult::Fail);
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Checks a host. Probes are tried only on the running kernel.
fn run_checks(
    daemon: &DaemonHooks,
    root: &Path,
    config: Result<&config::Config, &config::Problems>,
) -> Vec<HostCheck> {
    let probes = (root == Path::new("/")).then(|| {
        let machine = numaward_topology::sysfs::read(root).unwrap_or_default();
        let charges_memory = numaward_cgroup::has_controller(root, "memory").unwrap_or(true);
        Probes::load(&ProbeOptions { charges_memory, ..ProbeOptions::new(&machine) })
    });
    let needs = probes.as_ref().map(Probes::kernel_features).unwrap_or_default();
    (daemon.examine)(root, probes.as_ref().map_or(&[], Probes::reports), &needs, config)
}

/// Loads the configuration of the examined host. This process's environment variables are for this host only.
fn config_of_root(root: &Path, file: Option<PathBuf>) -> Result<config::Config, config::Problems> {
    if root == Path::new("/") {
        return load_config(ConfigArgs { config: file });
    }
    let usual = root.join(config::DEFAULT_FILE.trim_start_matches('/'));
    match file.or_else(|| usual.exists().then_some(usual)) {
        None => Ok(config::Config::default()),
        file => config::load(&Sources { file, ..Sources::default() }).map(|loaded| loaded.config),
    }
}

#[derive(Serialize)]
struct ConfigReport<'a> {
    valid: bool,
    files: &'a [PathBuf],
    errors: &'a [config::Problem],
    warnings: &'a [String],
}

fn check_config(sources: &Sources, output: Output) -> anyhow::Result<ExitCode> {
    match config::check(sources) {
        Ok(checked) => {
            let (files, warnings) = (checked.files.as_slice(), checked.warnings.as_slice());
            print(output, &ConfigReport { valid: true, files, errors: &[], warnings }, |_| {
                let source = if files.is_empty() {
                    format!("no file ({} is absent): the defaults are", config::DEFAULT_FILE)
                } else {
                    let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
                    format!("{}:", files.join(", "))
                };
                let warnings = warnings.iter().map(|warning| format!("warning: {warning}\n"));
                warnings.collect::<String>() + &source + " valid\n"
            })
        }
        Err(problems) if matches!(output.output, OutputFormat::Json | OutputFormat::Yaml) => {
            print(
                output,
                &ConfigReport { valid: false, files: &[], errors: &problems.0, warnings: &[] },
                |_| String::new(),
            )?;
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
    }
}

fn view_config(sources: &Sources, shows_origins: bool, output: ConfigFormat) -> anyhow::Result<ExitCode> {
    let loaded = config::load(sources)?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    match (output, shows_origins) {
        (ConfigFormat::Yaml, false) => print_text(&config::yaml(&loaded.config.view()?)),
        (ConfigFormat::Yaml, true) => print_text(&loaded.yaml_with_origins()?),
        (ConfigFormat::Json, false) => print_json(&loaded.config.view()?),
        (ConfigFormat::Json, true) => print_json(&loaded.sourced_values()?),
    }
}

fn reload(connection: &ConnectionArgs, output: Output) -> anyhow::Result<ExitCode> {
    let reloaded = runtime()?.block_on(local_server(connection)?.reload())?;
    print(output, &reloaded, reload::render)
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "numaward", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

fn man(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut command = args::commands().disable_help_subcommand(true);
    command.build();
    match dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .and_then(|()| write_manual_pages(&command, dir))
                .with_context(|| format!("{}: manual pages cannot be written", dir.display()))?;
        }
        None => io::stdout().write_all(&manual_page(&command)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the manual page of a command and those of its subcommands, named after them: `numaward-run.1`.
fn write_manual_pages(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        write_manual_pages(subcommand, dir)?;
    }
    let name = clap_mangen::Man::new(command.clone()).get_filename();
    std::fs::write(dir.join(name), manual_page(command)?)
}

/// Returns a manual page with a header of its own: the library's header leaves an empty date without quotes, so that
/// the next field is taken for the date. The date is empty because it would differ from build to build.
fn manual_page(command: &clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    // The options that all commands have are on the first page only.
    let is_first = command.get_name() == "numaward";
    let shown = if is_first { command.clone().mut_args(|arg| arg.hide(false)) } else { command.clone() };
    clap_mangen::Man::new(shown).render(&mut page)?;
    let mut page = String::from_utf8(page).map_err(io::Error::other)?;
    if is_first {
        page += &environment_section(command);
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let head = format!(".TH {name} 1 \"\" \"numaward {}\" \"\"", env!("CARGO_PKG_VERSION"));
    let lines: Vec<_> =
        page.lines().map(|line| if line.starts_with(".TH ") { &head } else { line }).collect();
    // A break beside a blank line has no effect, and mandoc(1) warns about it.
    let is_blank = |at: Option<usize>| at.and_then(|at| lines.get(at)) == Some(&"");
    let kept = (0..lines.len())
        .filter(|&at| lines[at] != ".br" || !is_blank(at.checked_sub(1)) && !is_blank(Some(at + 1)));
    Ok(kept.fold(String::new(), |page, at| page + lines[at] + "\n").into_bytes())
}

/// Returns the section of the manual about environment variables: those of options, and those of the configuration.
fn environment_section(command: &clap::Command) -> String {
    let of_options = command.get_arguments().filter_map(|arg| {
        let variable = arg.get_env()?.to_string_lossy().into_owned();
        Some((variable, format!("\\-\\-{}, unless the option is given", arg.get_long()?.replace('-', "\\-"))))
    });
    let file =
        (config::FILE_VARIABLE.to_owned(), "the configuration file, unless \\-\\-config is given".to_owned());
    let no_color = ("NO_COLOR".to_owned(), "if set and not empty, top and replay use no colours".to_owned());
    let keys = config::key_variables().into_iter();
    let of_keys = keys.map(|(variable, key)| (variable, format!("the key {key} of the configuration")));
    let all = of_options.chain([file, no_color]).chain(of_keys);
    let entries = all.map(|(variable, text)| format!(".TP\n\\fB{variable}\\fR\n{text}\n"));
    entries.fold(".SH ENVIRONMENT\n".to_owned(), |section, entry| section + &entry)
}

fn simulate(daemon: &DaemonHooks, args: &Simulate) -> anyhow::Result<ExitCode> {
    if args.reserved_memory {
        return print(args.output, &simulate::suggested(args.observe.0)?, simulate::render_suggested);
    }
    let config =
        args.config.as_ref().map(|file| config::load(&sources(Some(file.clone()), None))).transpose()?;
    let config = config.map(|loaded| loaded.config);
    if let Some(hosts) = args.hosts {
        let fleet = simulate::fleet(args, hosts, config.as_ref(), daemon.policy)?;
        return print(args.output, &fleet, |fleet| simulate::render_fleet(fleet, args.each));
    }
    let simulation = simulate::simulate(args, config.as_ref(), daemon.policy)?;
    print(args.output, &simulation, |simulation| simulate::render(simulation, args.each))
}

fn import_kubelet_state(daemon: &DaemonHooks, args: ImportArgs) -> anyhow::Result<ExitCode> {
    let loaded = config::load(&sources(args.config.config, args.node.scope()))?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    let config = loaded.config;
    let imported =
        (daemon.import)(&config, &topology::machine(&config.host_root)?, &args.directory, args.dry_run)?;
    print(args.output, &imported, import::render)
}

fn claim_template(daemon: &DaemonHooks, args: ClaimTemplateArgs) -> anyhow::Result<ExitCode> {
    let ClaimTemplateArgs { file, device_class, admission_policy: label } = args;
    let text = claim_template::read(&file)?;
    match (daemon.claim_manifests)(&ManifestRequest { text, device_class, label }) {
        Ok(ClaimManifests { text, notes }) => {
            for note in notes {
                eprintln!("numaward: {}", text::clean_lines(&note));
            }
            print_text(&text)
        }
        Err(problem) => {
            eprintln!("numaward: {}: {}", file.display(), text::clean_lines(&problem));
            Ok(ExitCode::from(EXIT_USAGE))
        }
    }
}

fn uninstall(daemon: &DaemonHooks, args: UninstallArgs) -> anyhow::Result<ExitCode> {
    let config = load_config(args.config)?;
    let restored = (daemon.restore)(&config, topology::machine(&config.host_root)?)?;
    let code = print(args.output, &restored, uninstall::render)?;
    Ok(if restored.left.is_empty() { code } else { ExitCode::FAILURE })
}

fn export_kubelet_state(connection: &ConnectionArgs, args: &ExportArgs) -> anyhow::Result<ExitCode> {
    // Before the request, so that a wrong directory is reported at once.
    if let Some(directory) = &args.into {
        export::check(directory, args.replace)?;
    }
    let state = runtime()?.block_on(server(connection)?.kubelet_state())?;
    for line in export::notes(&state) {
        eprintln!("numaward: {}", text::clean_lines(&line));
    }
    match &args.into {
        Some(directory) => export::write(directory, &state).map(|()| ExitCode::SUCCESS),
        None => print_text(&export::json(&state)),
    }
}

fn version(output: Output) -> anyhow::Result<ExitCode> {
    print(output, &Version::on(rustix::system::uname().release().to_string_lossy()), |version| {
        format!("numaward {} ({}), Linux {}\n", version.version, version.architecture, version.kernel)
    })
}

fn print<T: Serialize>(
    output: Output,
    value: &T,
    render: impl FnOnce(&T) -> String,
) -> anyhow::Result<ExitCode> {
    match output.output {
        OutputFormat::Json => print_json(value),
        OutputFormat::Yaml => print_text(&config::yaml(&text::clean_value(serde_json::to_value(value)?))),
        OutputFormat::Table => print_text(&text::clean_lines(&render(value))),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<ExitCode> {
    print_text(&text::clean_json(&(serde_json::to_string_pretty(value)? + "\n")))
}

fn print_text(text: &str) -> anyhow::Result<ExitCode> {
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

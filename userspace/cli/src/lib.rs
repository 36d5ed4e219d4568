//! The commands of `numaward`: what asks the daemon, and what reads from this host.
//!
//! What is the daemon's own comes in as functions ([`DaemonHooks`]), so that this crate does without it.

#![deny(unsafe_code)]

mod affinity;
mod areas;
mod args;
mod bugtool;
mod client;
mod column;
mod control;
mod device;
mod doctor;
#[cfg(test)]
mod documented;
mod events;
mod exec;
mod explain;
mod export;
mod get;
mod heap;
mod import;
mod listening;
mod mempolicy;
mod numactl;
mod rebalance;
mod record;
mod recording;
mod regions;
mod remote;
mod simulate;
mod stacks;
mod status;
mod table;
mod text;
mod top;
mod topology;
mod uninstall;

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{CommandFactory, Parser, error::ErrorKind};
use numaward_api::{self as api, Version};
use numaward_api::{
    doctor::{CheckResult, HostCheck},
    import::ImportReport,
    restore::RestoreReport,
};
use numaward_config::{self as config, Flag, Interval, Sources};
use numaward_engine::PolicyConfig;
use numaward_probes::{ProbeOptions, ProbeReport, Probes};
use numaward_topology::{KernelFeature, Machine};
use serde::Serialize;

use crate::{
    args::{
        Cli, Command, ConfigCommand, ConfigFile, Exec, Explain, ExportKubeletState, Format, Guarantee,
        ImportKubeletState, ListFormat, ListOutput, MoveLimits, Notation, Output, PlanMoves, Reached,
        Rebalance, Record, Release, Replay, Resize, Run, Shown, Simulate, Uninstall, Wanted,
    },
    client::{ClientError, Server},
    remote::Remote,
};

/// The engine decided against a request.
const REFUSED: u8 = 3;
/// The daemon is not reachable.
const UNREACHABLE: u8 = 4;

/// Says what is missing on the host with this root directory, with these probes and this configuration.
pub type ExamineHost = fn(
    &Path,
    &[ProbeReport],
    &[(KernelFeature, Option<bool>)],
    Result<&config::Config, &config::Problems>,
) -> Vec<HostCheck>;

/// What the daemon does for a command.
#[derive(Clone, Copy, Debug)]
pub struct DaemonHooks {
    /// Is the daemon until it is stopped.
    pub run: fn(&config::Config) -> anyhow::Result<()>,
    /// Examines a host.
    pub examine: ExamineHost,
    /// What the engine is configured to do on a machine.
    pub policy: fn(&config::Config, &Machine) -> anyhow::Result<PolicyConfig>,
    /// Takes over what a kubelet promised, from the state files in a directory; a dry run changes nothing.
    pub import: fn(&config::Config, &Machine, &Path, bool) -> anyhow::Result<ImportReport>,
    /// Gives back all that a daemon with this configuration wrote.
    pub restore: fn(&config::Config, Machine) -> anyhow::Result<RestoreReport>,
}

/// Does what the arguments of this process say.
pub fn main(daemon: &DaemonHooks) -> ExitCode {
    let Cli { reached, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return match error.exit_code() {
                _ if !is_help && runs_a_command() => ExitCode::from(exec::FAILED),
                code => ExitCode::from(u8::try_from(code).unwrap_or(1)),
            };
        }
    };
    let becomes_another = matches!(command, Command::Exec(_) | Command::Enter { .. });
    let done = match command {
        Command::Run(args) => run(daemon, args),
        Command::Topology { root, output } => topology(&reached, root.as_deref(), output),
        Command::Status { cost, output } => status(&reached, cost, output),
        Command::Top { shown, output } => top(&shown, &reached, output),
        Command::Record(args) => record(&reached, args),
        Command::Replay(args) => replay(&args),
        Command::Get { names, output } => get(&reached, &names, output),
        Command::Describe { name, output } => describe(&reached, &name, output),
        Command::Stacks { name, node, kind, output } => stacks(&reached, &name, node, kind.into(), output),
        Command::Regions { name, hot: true, span, output, .. } => hot(&reached, &name, span, output),
        Command::Regions { name, sampled: true, span, output, .. } => sampled(&reached, &name, span, output),
        Command::Regions { name, output, .. } => regions(&reached, &name, output),
        Command::Events { follow, filter, output } => events(&reached, follow, &filter, output),
        Command::Exec(args) => exec(&reached, args),
        Command::Numactl { arguments } => numactl(&reached, &arguments),
        Command::Guarantee(args) => guarantee(&reached, args),
        Command::Resize(args) => resize(&reached, args),
        Command::Release(args) => release(&reached, &args),
        Command::Explain(args) => explain(&reached, args),
        Command::Plan(args) => plan(&reached, args),
        Command::Rebalance(args) => rebalance(&reached, args),
        Command::Enter { directory, spread, all_cpus, command } => {
            exec::enter(&directory, spread.as_ref(), all_cpus, &command)
        }
        Command::Doctor { root, config, output } => doctor(daemon, &root, config, output),
        Command::Bugtool { file } => bugtool(daemon, &reached, file),
        Command::Config(ConfigCommand::Check { file, output }) => check_config(file, output),
        Command::Config(ConfigCommand::View { config, output }) => view_config(config, output),
        Command::Config(ConfigCommand::Schema) => print_json(&config::json_schema()),
        Command::Completions { shell } => completions(shell),
        Command::Man { dir } => man(dir.as_deref()),
        Command::Simulate(args) => simulate(daemon, &args),
        Command::ImportKubeletState(args) => import_kubelet_state(daemon, args),
        Command::ExportKubeletState(args) => export_kubelet_state(&reached, &args),
        Command::Uninstall(args) => uninstall(daemon, args),
        Command::Version(output) => version(output),
    };
    match done {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("numaward: {}", text::clean_lines(&one_line(&error)));
            match error.downcast_ref() {
                _ if becomes_another => ExitCode::from(exec::FAILED),
                Some(ClientError::Unreachable { .. }) => ExitCode::from(UNREACHABLE),
                Some(ClientError::Refused(refusal)) if refusal.rejection.is_some() => ExitCode::from(REFUSED),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Whether these arguments, wrong as they may be, name a subcommand that passes on the exit code of another command.
fn runs_a_command() -> bool {
    let matches = Cli::command().ignore_errors(true).try_get_matches();
    matches.is_ok_and(|matches| matches.subcommand_name() == Some("exec"))
}

/// An error with its causes. Some errors repeat their cause: once is enough.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match () {
        () if text.is_empty() => cause,
        () if text.contains(&cause) => text,
        () => format!("{text}: {cause}"),
    })
}

/// The reader of the output has enough: `numaward topology | head -1`.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn run(daemon: &DaemonHooks, args: Run) -> anyhow::Result<ExitCode> {
    let flag = |name, key, value: Option<String>| value.map(|value| Flag { name, key, value });
    let flags = [
        flag("--listen", "listen", args.listen),
        flag("--log-level", "log.level", args.log_level),
        flag("--log-format", "log.format", args.log_format),
    ];
    let loaded = load(args.config.config, flags.into_iter().flatten().collect())?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    heap::share();
    (daemon.run)(&loaded.config)?;
    Ok(ExitCode::SUCCESS)
}

/// The configuration from a file, this process's variables and flags. A variable that is not Unicode is kept as far as
/// it is, so that its key is checked.
fn load(file: Option<PathBuf>, flags: Vec<Flag>) -> Result<config::LoadedConfig, config::Problems> {
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    config::load(&Sources { file, variables: variables.collect(), flags })
}

/// The configuration of this host's daemon.
fn configured(file: ConfigFile) -> anyhow::Result<config::Config> {
    Ok(load(file.config, Vec::new())?.config)
}

fn topology(reached: &Reached, root: Option<&Path>, output: Output) -> anyhow::Result<ExitCode> {
    let server = if root.is_some() { None } else { Some(server(reached)?) };
    let shown = match &server {
        // Another host's, or what this user named: it has to be there.
        Some(server @ (Server::Remote(_) | Server::Socket(_))) => runtime()?.block_on(async {
            let topology = server.get("/api/v1/topology").await?;
            Ok::<_, ClientError>(topology::Shown { topology, promised: promised(server).await })
        })?,
        local => {
            let topology = api::Topology::from(&topology::machine(root.unwrap_or(Path::new("/")))?);
            let promised = match local {
                Some(server) => runtime()?.block_on(promised(server)),
                None => None,
            };
            topology::Shown { topology, promised }
        }
    };
    print(output, &shown, topology::render)
}

/// What is promised on the nodes, where it can be asked: not every host can promise.
async fn promised(server: &Server) -> Option<Vec<api::NodeCapacity>> {
    server.allocations().await.ok().map(|held| held.nodes)
}

/// The way to the daemon.
fn server(reached: &Reached) -> anyhow::Result<Server> {
    Ok(match reached.server.as_deref() {
        Some(path) if path.starts_with('/') => Server::Socket(PathBuf::from(path)),
        Some(url) => Server::Remote(Box::new(Remote::new(url, reached)?)),
        None => {
            let config = load(None, Vec::new())?.config;
            Server::Local { socket: config.control_socket, address: reachable(config.listen.0) }
        }
    })
}

/// The way to the daemon of this host.
fn local_server(reached: &Reached) -> anyhow::Result<Server> {
    match server(reached)? {
        Server::Remote(remote) => {
            bail!("--server {}: this is for a daemon of this host: name its control socket", remote.url)
        }
        local => Ok(local),
    }
}

fn status(reached: &Reached, cost: Option<Interval>, output: Output) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    // Before the daemon is asked: what the kernel refuses is an error at once.
    let window = cost.map(|_| numaward_probes::stats_window()).transpose();
    let window = window.context("--cost: it takes root (CAP_SYS_ADMIN) on the daemon's own host")?;
    let report = runtime()?.block_on(async {
        let mut status: api::Status = server.get("/api/v1/status").await?;
        let mut measured = None;
        if let Some(Interval(span)) = cost {
            tokio::time::sleep(span).await;
            let after = server.get("/api/v1/status").await?;
            measured = Some(status::Cost::between(&status, &after, span));
            status = after;
        }
        drop(window);
        let api::Workloads { workloads } = server.get("/api/v1/workloads").await?;
        // Not every host can promise.
        let promised = server.allocations().await.ok();
        let narrow = match (&server, &promised) {
            (Server::Remote(_), _) | (_, None) => Vec::new(),
            (_, Some(promised)) => {
                let held = promised.allocations.iter();
                held.filter_map(|held| affinity::narrow(Path::new("/proc"), held)).collect()
            }
        };
        Ok::<_, ClientError>(status::Report { status, workloads, promised, narrow, cost: measured })
    })?;
    print(output, &report, status::render)
}

fn top(shown: &Shown, reached: &Reached, output: Output) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let runtime = runtime()?;
    let done = runtime.block_on(top::run(server, shown, output.output));
    // The thread that reads keys waits for one.
    runtime.shutdown_background();
    done.map(|()| ExitCode::SUCCESS)
}

fn record(reached: &Reached, args: Record) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    runtime()?.block_on(record::run(server, args)).map(|()| ExitCode::SUCCESS)
}

fn replay(args: &Replay) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let done = runtime.block_on(top::replay(args));
    // As for top.
    runtime.shutdown_background();
    done.map(|()| ExitCode::SUCCESS)
}

/// Where a daemon that listens on all addresses is reached from its own host.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// What is asked for. Devices are those of this host.
fn asked(
    name: String,
    target: api::Target,
    wanted: Wanted,
    server: &Server,
) -> anyhow::Result<api::AllocationRequest> {
    let Wanted { cpus, memory, memory_limit, hugepages, partition, placement } = wanted;
    if let (Server::Remote(remote), Some(device)) = (server, placement.near.first()) {
        bail!("--near {device}: the devices of this host are read, and {} may be another", remote.url);
    }
    let mut preferred = placement.preferred_nodes.unwrap_or_default();
    for device in &placement.near {
        preferred.insert(device::node(Path::new("/"), device)?);
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

/// The name of a command's workload that was given none: unique on this host while the command runs.
fn name_of(command: &[OsString]) -> String {
    let program = command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    let program: String = program
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(64)
        .collect();
    format!("{program}-{}", std::process::id())
}

fn exec(reached: &Reached, args: Exec) -> anyhow::Result<ExitCode> {
    let server = local_server(reached)?;
    let name = args.name.unwrap_or_else(|| name_of(&args.command));
    let asked = asked(name, api::Target::Exec, args.wanted, &server)?;
    runtime()?.block_on(exec::run(&server, &asked, &args.command))
}

fn numactl(reached: &Reached, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    match numactl::read(arguments)? {
        numactl::Asked::Help => print_text(
            &help_of("numactl").map_or_else(String::new, |mut help| help.render_long_help().to_string()),
        ),
        numactl::Asked::Show(binding) => print_text(&numactl::show(&binding)?),
        numactl::Asked::Hardware => print_text(&numactl::hardware(&topology::machine(Path::new("/"))?)),
        numactl::Asked::Run(run) => {
            let server = local_server(reached);
            runtime()?.block_on(numactl::run(server, &run, &name_of(&run.command)))
        }
    }
}

/// A subcommand, with the options that are the same for all.
fn help_of(name: &str) -> Option<clap::Command> {
    let mut all = Cli::command().bin_name("numaward");
    all.build();
    all.find_subcommand(name).cloned()
}

fn guarantee(reached: &Reached, args: Guarantee) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let asked = asked_for(args.target, args.name, args.wanted, &server)?;
    exec::report_limit(&asked);
    let allocation = runtime()?.block_on(async {
        let allocation = server.admit(&asked).await?;
        exec::report_others(&server, &allocation).await;
        Ok::<_, ClientError>(allocation)
    })?;
    affinity::report(&allocation);
    print(args.output, &allocation, |allocation| explain::placed(allocation, "holds"))
}

fn resize(reached: &Reached, args: Resize) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let asked = api::Resize {
        cpus: args.cpus,
        memory: args.memory,
        memory_limit: args.memory_limit,
        hugepages: args.hugepages.by_size(),
    };
    let resized = runtime()?.block_on(server.resize(&args.name, &asked, args.dry_run))?;
    print(args.output, &resized, |resized| match resized {
        api::ResizeOutcome::Applied(allocation) => explain::placed(allocation, "holds"),
        api::ResizeOutcome::DryRun(dry) => explain::render_dry_run(dry),
    })
}

/// What is asked for, for a cgroup or a unit.
fn asked_for(
    target: String,
    name: Option<String>,
    wanted: Wanted,
    server: &Server,
) -> anyhow::Result<api::AllocationRequest> {
    let name = name.unwrap_or_else(|| target.trim_start_matches('/').to_owned());
    let is_cgroup = target.starts_with('/');
    let target = if is_cgroup { api::Target::Cgroup(target) } else { api::Target::Unit(target) };
    asked(name, target, wanted, server)
}

/// A request that room is made for, without a target.
fn asked_for_room(wanted: Wanted, server: &Server) -> anyhow::Result<api::AllocationRequest> {
    // A name that no other request has: it is not kept.
    asked(format!("plan-{}", std::process::id()), api::Target::Exec, wanted, server)
}

fn plan(reached: &Reached, args: PlanMoves) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let MoveLimits { moves, bytes } = args.limits;
    let request = asked_for_room(args.wanted, &server)?;
    let asked = api::PlanRequest { request, max_moves: moves, max_bytes: bytes };
    print(args.output, &runtime()?.block_on(server.plan(&asked))?, rebalance::render_plan)
}

fn rebalance(reached: &Reached, args: Rebalance) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let MoveLimits { moves, bytes } = args.limits;
    let admit = args.target.is_some();
    let request = match args.target {
        Some(target) => asked_for(target, args.name, args.wanted, &server)?,
        None => asked_for_room(args.wanted, &server)?,
    };
    let planned = api::PlanRequest { request, max_moves: moves, max_bytes: bytes };
    let runtime = runtime()?;
    let plan = runtime.block_on(server.plan(&planned))?;
    if !args.apply {
        return print(args.output, &plan, rebalance::render_plan);
    }
    let over = runtime.block_on(rebalance::apply(&server, planned, &plan, admit))?;
    print(args.output, &over, rebalance::render_over)?;
    Ok(if over.state == api::RebalanceState::Done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn release(reached: &Reached, args: &Release) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    let runtime = runtime()?;
    if let Some(name) = &args.name {
        runtime.block_on(server.release(name))?;
        return Ok(ExitCode::SUCCESS);
    }
    let held = runtime.block_on(server.allocations())?;
    // What is declared would be given again at once, and a container's ends with its pod.
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
    if !args.yes && !is_confirmed(&names)? {
        bail!("nothing is released");
    }
    let mut code = ExitCode::SUCCESS;
    for name in names {
        match runtime.block_on(server.release(name)) {
            Ok(()) => println!("{} released", text::clean(name)),
            // It ended meanwhile.
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

/// Asks on the terminal.
fn is_confirmed(names: &[&str]) -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("this is no terminal on which to confirm that {} guarantees end: add --yes", names.len());
    }
    eprint!(
        "{}",
        text::clean_lines(&format!("  {}\nEnd these {} guarantees? [y/N] ", names.join("\n  "), names.len()))
    );
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn get(reached: &Reached, names: &[String], output: ListOutput) -> anyhow::Result<ExitCode> {
    let held = runtime()?.block_on(server(reached)?.allocations())?;
    if let Some(missing) = names.iter().find(|name| held.allocations.iter().all(|held| held.name != **name)) {
        bail!("there is no allocation named {missing:?}");
    }
    let chosen: Vec<_> =
        held.allocations.into_iter().filter(|held| names.is_empty() || names.contains(&held.name)).collect();
    print(output.into(), &chosen, |chosen| get::render(chosen, output.output == ListFormat::Wide))
}

fn describe(reached: &Reached, name: &str, output: Output) -> anyhow::Result<ExitCode> {
    let description = runtime()?.block_on(get::describe(&server(reached)?, name))?;
    print(output, &description, get::render_description)
}

fn stacks(
    reached: &Reached,
    name: &str,
    node: Option<u32>,
    kind: numaward_api::StackKind,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let stacks = runtime()?.block_on(stacks::fetch(&server(reached)?, name, kind, node))?;
    stacks::warn(&stacks);
    print(output, &stacks, |stacks| stacks.folded(kind, node))
}

fn regions(reached: &Reached, name: &str, output: Output) -> anyhow::Result<ExitCode> {
    let regions = runtime()?.block_on(regions::fetch(&server(reached)?, name))?;
    print(output, &regions, regions::render)
}

fn hot(reached: &Reached, name: &str, Interval(span): Interval, output: Output) -> anyhow::Result<ExitCode> {
    let hot = runtime()?.block_on(areas::hot::watch(&local_server(reached)?, name, span))?;
    print(output, &hot, areas::hot::render)
}

fn sampled(
    reached: &Reached,
    name: &str,
    Interval(span): Interval,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let sampled = runtime()?.block_on(areas::sampled::watch(&local_server(reached)?, name, span))?;
    print(output, &sampled, areas::sampled::render)
}

fn events(
    reached: &Reached,
    follow: bool,
    filter: &args::EventChoice,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    runtime()?.block_on(async {
        let page = events::page(&server, filter).await?;
        if !follow {
            return print(output, &page.events, |events| events::render(events));
        }
        match events::follow(&server, filter, page, output.output).await? {}
    })
}

fn bugtool(daemon: &DaemonHooks, reached: &Reached, file: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    let server = local_server(reached)?;
    let config = load(None, Vec::new()).map(|loaded| loaded.config);
    let checks = examined(daemon, Path::new("/"), config.as_ref());
    let file = runtime()?.block_on(bugtool::write(&server, file, config.as_ref(), &checks))?;
    println!("{}", file.display());
    Ok(ExitCode::SUCCESS)
}

fn explain(reached: &Reached, args: Explain) -> anyhow::Result<ExitCode> {
    let server = server(reached)?;
    match (args.name, args.wanted.0) {
        (None, Some(wanted)) => {
            // A name that no other request has: it is not kept.
            let name = format!("explain-{}", std::process::id());
            let asked = asked(name, api::Target::Exec, wanted, &server)?;
            let dry = runtime()?.block_on(server.dry_run(&asked))?;
            print(args.output, &dry, explain::render_dry_run)
        }
        (name, _) => {
            let name = name.unwrap_or_default();
            let held = runtime()?.block_on(server.allocations())?;
            let found = held.allocations.iter().find(|held| held.name == name);
            let found = found.with_context(|| format!("there is no allocation named {name:?}"))?;
            print(args.output, &**found, explain::render_allocation)
        }
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn doctor(
    daemon: &DaemonHooks,
    root: &Path,
    config: Option<PathBuf>,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let checks = examined(daemon, root, examined_config(root, config).as_ref());
    print(output, &checks, |checks| doctor::render(checks))?;
    let fails = checks.iter().any(|check| check.verdict == CheckResult::Fail);
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The checks of a host.
fn examined(
    daemon: &DaemonHooks,
    root: &Path,
    config: Result<&config::Config, &config::Problems>,
) -> Vec<HostCheck> {
    // Probes can be tried on the running kernel only.
    let probes = (root == Path::new("/")).then(|| {
        let machine = numaward_topology::sysfs::read(root).unwrap_or_default();
        Probes::load(&ProbeOptions::new(&machine))
    });
    let needs = probes.as_ref().map(Probes::kernel_features).unwrap_or_default();
    (daemon.examine)(root, probes.as_ref().map_or(&[], Probes::reports), &needs, config)
}

/// What the daemon of the examined host is configured to do. Another host does not have our variables.
fn examined_config(root: &Path, file: Option<PathBuf>) -> Result<config::Config, config::Problems> {
    if root == Path::new("/") {
        return load(file, Vec::new()).map(|loaded| loaded.config);
    }
    let usual = root.join(config::DEFAULT_FILE.trim_start_matches('/'));
    match file.or_else(|| usual.exists().then_some(usual)) {
        None => Ok(config::Config::default()),
        file => config::load(&Sources { file, ..Sources::default() }).map(|loaded| loaded.config),
    }
}

#[derive(Serialize)]
struct Checked<'a> {
    valid: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a Path>,
    errors: &'a [config::Problem],
    warnings: &'a [String],
}

fn check_config(file: Option<PathBuf>, output: Output) -> anyhow::Result<ExitCode> {
    match load(file, Vec::new()) {
        Ok(loaded) => {
            let (file, warnings) = (loaded.file.as_deref(), loaded.warnings.as_slice());
            print(output, &Checked { valid: true, file, errors: &[], warnings }, |_| {
                let source = file.map_or_else(
                    || format!("no file ({} is absent): the defaults are", config::DEFAULT_FILE),
                    |file| format!("{}:", file.display()),
                );
                let warnings = warnings.iter().map(|warning| format!("warning: {warning}\n"));
                warnings.collect::<String>() + &source + " valid\n"
            })
        }
        Err(problems) if matches!(output.output, Format::Json | Format::Yaml) => {
            print(output, &Checked { valid: false, file: None, errors: &problems.0, warnings: &[] }, |_| {
                String::new()
            })?;
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
    }
}

fn view_config(file: ConfigFile, output: Notation) -> anyhow::Result<ExitCode> {
    let loaded = load(file.config, Vec::new())?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    let view = loaded.config.view()?;
    match output {
        Notation::Yaml => print_text(&config::yaml(&view)),
        Notation::Json => print_json(&view),
    }
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "numaward", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

fn man(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    match dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .and_then(|()| pages(&command, dir))
                .with_context(|| format!("{}: manual pages cannot be written", dir.display()))?;
        }
        None => io::stdout().write_all(&page(&command)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command and those of its subcommands, named after them: `numaward-run.1`.
fn pages(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        pages(subcommand, dir)?;
    }
    let name = clap_mangen::Man::new(command.clone()).get_filename();
    std::fs::write(dir.join(name), page(command)?)
}

/// A manual page. Its head is ours: the one of the library leaves an empty date without quotes, so that what follows is taken
/// for one. A date would differ from build to build.
fn page(command: &clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    let page = String::from_utf8(page).map_err(io::Error::other)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let head = format!(".TH {name} 1 \"\" \"numaward {}\" \"\"", env!("CARGO_PKG_VERSION"));
    let lines: Vec<_> =
        page.lines().map(|line| if line.starts_with(".TH ") { &head } else { line }).collect();
    // Beside a blank line, a break does nothing but make mandoc(1) complain.
    let is_blank = |at: Option<usize>| at.and_then(|at| lines.get(at)) == Some(&"");
    let kept = (0..lines.len())
        .filter(|&at| lines[at] != ".br" || !is_blank(at.checked_sub(1)) && !is_blank(Some(at + 1)));
    Ok(kept.fold(String::new(), |page, at| page + lines[at] + "\n").into_bytes())
}

fn simulate(daemon: &DaemonHooks, args: &Simulate) -> anyhow::Result<ExitCode> {
    if args.reserved_memory {
        return print(args.output, &simulate::suggested(args.observe.0)?, simulate::render_suggested);
    }
    let config = args.config.as_ref().map(|file| load(Some(file.clone()), Vec::new())).transpose()?;
    let config = config.map(|loaded| loaded.config);
    if let Some(hosts) = args.hosts {
        let fleet = simulate::fleet(args, hosts, config.as_ref(), daemon.policy)?;
        return print(args.output, &fleet, |fleet| simulate::render_fleet(fleet, args.each));
    }
    let simulation = simulate::simulate(args, config.as_ref(), daemon.policy)?;
    print(args.output, &simulation, |simulation| simulate::render(simulation, args.each))
}

fn import_kubelet_state(daemon: &DaemonHooks, args: ImportKubeletState) -> anyhow::Result<ExitCode> {
    let config = configured(args.config)?;
    let imported =
        (daemon.import)(&config, &topology::machine(&config.host_root)?, &args.directory, args.dry_run)?;
    print(args.output, &imported, import::render)
}

fn uninstall(daemon: &DaemonHooks, args: Uninstall) -> anyhow::Result<ExitCode> {
    let config = configured(args.config)?;
    let restored = (daemon.restore)(&config, topology::machine(&config.host_root)?)?;
    let code = print(args.output, &restored, uninstall::render)?;
    Ok(if restored.left.is_empty() { code } else { ExitCode::FAILURE })
}

fn export_kubelet_state(reached: &Reached, args: &ExportKubeletState) -> anyhow::Result<ExitCode> {
    // Before the daemon is asked: what is wrong with the directory is an error at once.
    if let Some(directory) = &args.into {
        export::check(directory, args.replace)?;
    }
    let state = runtime()?.block_on(server(reached)?.kubelet_state())?;
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
        Format::Json => print_json(value),
        Format::Yaml => print_text(&config::yaml(&text::clean_value(serde_json::to_value(value)?))),
        Format::Table => print_text(&text::clean_lines(&render(value))),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<ExitCode> {
    print_text(&text::clean_json(&(serde_json::to_string_pretty(value)? + "\n")))
}

fn print_text(text: &str) -> anyhow::Result<ExitCode> {
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

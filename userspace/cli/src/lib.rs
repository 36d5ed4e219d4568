//! The commands of `numaward`: what asks the daemon, and what reads from this host.
//!
//! What is the daemon's own comes in as functions ([`Daemon`]), so that this crate does without it.

#![forbid(unsafe_code)]

mod args;
mod client;
mod column;
mod control;
mod doctor;
mod exec;
mod explain;
mod export;
mod import;
mod rebalance;
mod remote;
mod simulate;
mod status;
mod table;
mod text;
mod top;
mod topology;
mod uninstall;

use std::{
    ffi::OsString,
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{CommandFactory, Parser};
use numaward_api::{self as api, Version};
use numaward_api::{
    doctor::{Check, Verdict},
    import::Imported,
    restore::Restored,
};
use numaward_config::{self as config, Flag, Interval, Sources};
use numaward_engine::PolicyConfig;
use numaward_probes::{Options, ProbeReport, Probes};
use numaward_topology::Machine;
use serde::Serialize;

use crate::{
    args::{
        Cli, Command, ConfigCommand, ConfigFile, Controlled, Explain, ExportKubeletState, Format, Guarantee,
        ImportKubeletState, MoveLimits, Notation, Output, PlanMoves, Reached, Rebalance, Resize, Run, Shown,
        Simulate, Socket, Uninstall, Wanted,
    },
    client::{ClientError, Server},
    remote::Remote,
};

/// The engine decided against a request.
const REFUSED: u8 = 3;
/// The daemon is not reachable.
const UNREACHABLE: u8 = 4;

/// Says what is missing on the host with this root directory, with these probes and this configuration.
pub type Examine = fn(&Path, &[ProbeReport], Result<&config::Config, &config::Problems>) -> Vec<Check>;

/// What the daemon does for a command.
#[derive(Clone, Copy, Debug)]
pub struct Daemon {
    /// Is the daemon until it is stopped.
    pub run: fn(&config::Config) -> anyhow::Result<()>,
    /// Examines a host.
    pub examine: Examine,
    /// What the engine is configured to do on a machine.
    pub policy: fn(&config::Config, &Machine) -> anyhow::Result<PolicyConfig>,
    /// Takes over what a kubelet promised, from the state files in a directory; a dry run changes nothing.
    pub import: fn(&config::Config, &Machine, &Path, bool) -> anyhow::Result<Imported>,
    /// Gives back all that a daemon with this configuration wrote.
    pub restore: fn(&config::Config, Machine) -> anyhow::Result<Restored>,
}

/// Does what the arguments of this process say.
pub fn main(daemon: &Daemon) -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => run(daemon, args),
        Command::Topology { root, output } => topology(&root, output),
        Command::Status { reached, cost, output } => status(reached, cost, output),
        Command::Top { shown, reached, output } => top(&shown, reached, output),
        Command::Exec { wanted, name, socket, command } => exec(wanted, name, socket, &command),
        Command::Guarantee(args) => guarantee(args),
        Command::Resize(args) => resize(args),
        Command::Release { name, control } => release(&name, control),
        Command::Explain(args) => explain(args),
        Command::Plan(args) => plan(args),
        Command::Rebalance(args) => rebalance(args),
        Command::Enter { directory, command } => exec::enter(&directory, &command),
        Command::Doctor { root, config, output } => doctor(daemon, &root, config, output),
        Command::Config(ConfigCommand::Check { file, output }) => check_config(file, output),
        Command::Config(ConfigCommand::View { config, output }) => view_config(config, output),
        Command::Config(ConfigCommand::Schema) => print_json(&config::json_schema()),
        Command::Completions { shell } => completions(shell),
        Command::Man { dir } => man(dir.as_deref()),
        Command::Simulate(args) => simulate(daemon, &args),
        Command::ImportKubeletState(args) => import_kubelet_state(daemon, args),
        Command::ExportKubeletState(args) => export_kubelet_state(args),
        Command::Uninstall(args) => uninstall(daemon, args),
        Command::Version(output) => version(output),
    };
    match done {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("numaward: {}", text::clean_lines(&one_line(&error)));
            match error.downcast_ref() {
                Some(ClientError::Unreachable { .. }) => ExitCode::from(UNREACHABLE),
                Some(ClientError::Refused(refusal)) if refusal.rejection.is_some() => ExitCode::from(REFUSED),
                _ => ExitCode::FAILURE,
            }
        }
    }
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

fn run(daemon: &Daemon, args: Run) -> anyhow::Result<ExitCode> {
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
    (daemon.run)(&loaded.config)?;
    Ok(ExitCode::SUCCESS)
}

/// The configuration from a file, this process's variables and flags. A variable that is not Unicode is kept as far as
/// it is, so that its key is checked.
fn load(file: Option<PathBuf>, flags: Vec<Flag>) -> Result<config::Loaded, config::Problems> {
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    config::load(&Sources { file, variables: variables.collect(), flags })
}

/// The configuration of this host's daemon.
fn configured(file: ConfigFile) -> anyhow::Result<config::Config> {
    Ok(load(file.config, Vec::new())?.config)
}

fn topology(root: &Path, output: Output) -> anyhow::Result<ExitCode> {
    print(output, &api::Topology::from(&topology::machine(root)?), topology::render)
}

/// The way to the daemon that is to be read.
fn reached(reached: Reached) -> anyhow::Result<Server> {
    Ok(match (reached.address, reached.socket, &reached.remote.server) {
        (Some(text), _, _) => {
            Server::Address(text.parse::<config::ListenAddress>().map_err(anyhow::Error::msg)?.0)
        }
        (None, Some(path), _) => Server::Socket(path),
        (None, None, Some(url)) => Server::Remote(Box::new(Remote::new(url, &reached.remote)?)),
        (None, None, None) => Server::Address(reachable(configured(reached.config)?.listen.0)),
    })
}

fn status(reached: Reached, cost: Option<Interval>, output: Output) -> anyhow::Result<ExitCode> {
    let server = self::reached(reached)?;
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
        Ok::<_, ClientError>(status::Report { status, workloads, promised, cost: measured })
    })?;
    print(output, &report, status::render)
}

fn top(shown: &Shown, reached: Reached, output: Output) -> anyhow::Result<ExitCode> {
    let server = self::reached(reached)?;
    let runtime = runtime()?;
    let done = runtime.block_on(top::run(server, shown, output.output));
    // The thread that reads keys waits for one.
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

fn local_control(socket: Socket) -> anyhow::Result<Server> {
    Ok(Server::Socket(match socket.socket {
        Some(path) => path,
        None => configured(socket.config)?.control_socket,
    }))
}

fn control(args: Controlled) -> anyhow::Result<Server> {
    match &args.remote.server {
        Some(url) if args.socket.socket.is_none() => {
            Ok(Server::Remote(Box::new(Remote::new(url, &args.remote)?)))
        }
        _ => local_control(args.socket),
    }
}

fn asked(name: String, target: api::Target, wanted: Wanted) -> api::AllocationRequest {
    let Wanted { cpus, memory, memory_limit, hugepages, policy, partition, placement } = wanted;
    let (hugepages, placement) = (hugepages.by_size(), placement.into());
    api::AllocationRequest {
        name,
        target,
        cpus,
        memory,
        memory_limit,
        hugepages,
        policy,
        partition,
        placement,
    }
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

fn exec(
    wanted: Wanted,
    name: Option<String>,
    socket: Socket,
    command: &[OsString],
) -> anyhow::Result<ExitCode> {
    let control = local_control(socket)?;
    let asked = asked(name.unwrap_or_else(|| name_of(command)), api::Target::Exec, wanted);
    runtime()?.block_on(exec::run(&control, &asked, command))
}

fn guarantee(args: Guarantee) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    let asked = asked_for(args.target, args.name, args.wanted);
    let allocation = runtime()?.block_on(control.admit(&asked))?;
    print(args.output, &allocation, |allocation| explain::placed(allocation, "holds"))
}

fn resize(args: Resize) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    let asked = api::Resize {
        cpus: args.cpus,
        memory: args.memory,
        memory_limit: args.memory_limit,
        hugepages: args.hugepages.by_size(),
    };
    let resized = runtime()?.block_on(control.resize(&args.name, &asked, args.dry_run))?;
    print(args.output, &resized, |resized| match resized {
        api::Resized::Held(allocation) => explain::placed(allocation, "holds"),
        api::Resized::Dry(dry) => explain::render_dry_run(dry),
    })
}

/// What is asked for, for a cgroup or a unit.
fn asked_for(target: String, name: Option<String>, wanted: Wanted) -> api::AllocationRequest {
    let name = name.unwrap_or_else(|| target.trim_start_matches('/').to_owned());
    let is_cgroup = target.starts_with('/');
    let target = if is_cgroup { api::Target::Cgroup(target) } else { api::Target::Unit(target) };
    asked(name, target, wanted)
}

/// A request that room is made for, without a target.
fn asked_for_room(wanted: Wanted) -> api::AllocationRequest {
    // A name that no other request has: it is not kept.
    asked(format!("plan-{}", std::process::id()), api::Target::Exec, wanted)
}

fn plan(args: PlanMoves) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    let MoveLimits { moves, bytes } = args.limits;
    let asked = api::PlanRequest { request: asked_for_room(args.wanted), max_moves: moves, max_bytes: bytes };
    print(args.output, &runtime()?.block_on(control.plan(&asked))?, rebalance::render_plan)
}

fn rebalance(args: Rebalance) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    let MoveLimits { moves, bytes } = args.limits;
    let admit = args.target.is_some();
    let request = match args.target {
        Some(target) => asked_for(target, args.name, args.wanted),
        None => asked_for_room(args.wanted),
    };
    let planned = api::PlanRequest { request, max_moves: moves, max_bytes: bytes };
    let runtime = runtime()?;
    let plan = runtime.block_on(control.plan(&planned))?;
    if !args.apply {
        return print(args.output, &plan, rebalance::render_plan);
    }
    let over = runtime.block_on(rebalance::apply(&control, planned, &plan, admit))?;
    print(args.output, &over, rebalance::render_over)?;
    Ok(if over.state == api::RebalanceState::Done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn release(name: &str, control: Controlled) -> anyhow::Result<ExitCode> {
    let control = self::control(control)?;
    runtime()?.block_on(control.release(name))?;
    Ok(ExitCode::SUCCESS)
}

fn explain(args: Explain) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    match (args.name, args.wanted.0) {
        (None, Some(wanted)) => {
            // A name that no other request has: it is not kept.
            let name = format!("explain-{}", std::process::id());
            let dry = runtime()?.block_on(control.dry_run(&asked(name, api::Target::Exec, wanted)))?;
            print(args.output, &dry, explain::render_dry_run)
        }
        (name, _) => {
            let name = name.unwrap_or_default();
            let held = runtime()?.block_on(control.allocations())?;
            let found = held.allocations.iter().find(|held| held.name == name);
            let found = found.with_context(|| format!("there is no allocation named {name:?}"))?;
            print(args.output, &**found, explain::render_allocation)
        }
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn doctor(daemon: &Daemon, root: &Path, config: Option<PathBuf>, output: Output) -> anyhow::Result<ExitCode> {
    // Probes can be tried on the running kernel only.
    let probes = (root == Path::new("/")).then(|| {
        let machine = numaward_topology::sysfs::read(root).unwrap_or_default();
        Probes::load(&Options::new(&machine))
    });
    let configured = examined_config(root, config);
    let checks = (daemon.examine)(root, probes.as_ref().map_or(&[], Probes::reports), configured.as_ref());
    print(output, &checks, |checks| doctor::render(checks))?;
    let fails = checks.iter().any(|check| check.verdict == Verdict::Fail);
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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
        Err(problems) if output.output == Format::Json => {
            print_json(&Checked { valid: false, file: None, errors: &problems.0, warnings: &[] })?;
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
    // Pages are named after their commands: `numaward-run(1)`.
    let command = Cli::command();
    match dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .and_then(|()| clap_mangen::generate_to(command, dir))
                .with_context(|| format!("{}: manual pages cannot be written", dir.display()))?;
        }
        None => clap_mangen::Man::new(command).render(&mut io::stdout())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn simulate(daemon: &Daemon, args: &Simulate) -> anyhow::Result<ExitCode> {
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

fn import_kubelet_state(daemon: &Daemon, args: ImportKubeletState) -> anyhow::Result<ExitCode> {
    let config = configured(args.config)?;
    let imported =
        (daemon.import)(&config, &topology::machine(&config.host_root)?, &args.directory, args.dry_run)?;
    print(args.output, &imported, import::render)
}

fn uninstall(daemon: &Daemon, args: Uninstall) -> anyhow::Result<ExitCode> {
    let config = configured(args.config)?;
    let restored = (daemon.restore)(&config, topology::machine(&config.host_root)?)?;
    let code = print(args.output, &restored, uninstall::render)?;
    Ok(if restored.left.is_empty() { code } else { ExitCode::FAILURE })
}

fn export_kubelet_state(args: ExportKubeletState) -> anyhow::Result<ExitCode> {
    // Before the daemon is asked: what is wrong with the directory is an error at once.
    if let Some(directory) = &args.into {
        export::check(directory, args.replace)?;
    }
    let state = runtime()?.block_on(control(args.control)?.kubelet_state())?;
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
        Format::Table => print_text(&text::clean_lines(&render(value))),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<ExitCode> {
    print_text(&(serde_json::to_string_pretty(value)? + "\n"))
}

fn print_text(text: &str) -> anyhow::Result<ExitCode> {
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

//! The command `numaward`: the daemon, and what reads from it and from this host.

#![forbid(unsafe_code)]

mod args;
mod client;
mod control;
mod doctor;
mod exec;
mod explain;
mod import;
mod refusal;
mod remote;
mod status;
mod table;
mod text;
mod top;
mod topology;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    process::ExitCode,
};

use anyhow::Context;
use clap::{CommandFactory, Parser};
use numaward_api::{self as api, Version};
use numaward_config::{self as config, Flag, Sources};
use numaward_daemon::{doctor::examine, import::import};
use numaward_probes::{Options, Probes};
use serde::Serialize;

use crate::{
    args::{
        CheckConfig, Cli, Command, ConfigFile, Controlled, Doctor, Exec, Explain, Format, Guarantee,
        ImportKubeletState, Output, Reached, Release, Run, Socket, Status, Top, Topology, Wanted,
    },
    client::{ClientError, Server},
    control::Control,
    remote::Remote,
};

/// The engine decided against a request.
const REFUSED: u8 = 3;
/// The daemon is not reachable.
const UNREACHABLE: u8 = 4;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => run(args),
        Command::Topology(args) => topology(&args),
        Command::Status(args) => status(args),
        Command::Top(args) => top(args),
        Command::Exec(args) => exec(args),
        Command::Guarantee(args) => guarantee(args),
        Command::Release(args) => release(args),
        Command::Explain(args) => explain(args),
        Command::Enter { directory, command } => exec::enter(&directory, &command),
        Command::Doctor(args) => doctor(&args),
        Command::CheckConfig(args) => check_config(args),
        Command::ConfigSchema => print_json(&config::json_schema()).map(|()| ExitCode::SUCCESS),
        Command::Completions { shell } => completions(shell),
        Command::Man { dir } => man(dir.as_deref()),
        Command::ImportKubeletState(args) => import_kubelet_state(args),
        Command::Version(output) => version(output),
    };
    match done {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("numaward: {}", text::clean_lines(&one_line(&error)));
            match error.downcast_ref() {
                Some(ClientError::Unreachable { .. }) => ExitCode::from(UNREACHABLE),
                Some(error) if error.is_rejection() => ExitCode::from(REFUSED),
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

/// Whoever read the output has enough: `numaward topology | head -1`.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn run(args: Run) -> anyhow::Result<ExitCode> {
    let flag = |name, key, value: Option<String>| value.map(|value| Flag { name, key, value });
    let flags = [
        flag("--listen", "listen", args.listen),
        flag("--log-level", "log.level", args.log_level),
        flag("--log-format", "log.format", args.log_format),
    ];
    let flags = flags.into_iter().flatten().collect();
    let file = args.config.config;
    let loaded = config::load(&Sources { file, variables: variables(), flags })?;
    for warning in &loaded.warnings {
        eprintln!("numaward: {warning}");
    }
    numaward_daemon::run(&loaded.config)?;
    Ok(ExitCode::SUCCESS)
}

fn topology(args: &Topology) -> anyhow::Result<ExitCode> {
    let machine = numaward_topology::sysfs::read(&args.root).context("the machine cannot be read")?;
    let topology = api::Topology::from(&machine);
    print(args.output, &topology, topology::render)?;
    Ok(ExitCode::SUCCESS)
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

fn status(args: Status) -> anyhow::Result<ExitCode> {
    let server = reached(args.reached)?;
    // Before the daemon is asked: what the kernel refuses is told at once.
    let window = args.cost.map(|_| numaward_probes::stats_window()).transpose();
    let window = window.context("--cost: it takes root (CAP_SYS_ADMIN) on the daemon's own host")?;
    let report = runtime()?.block_on(async {
        let mut status: api::Status = server.get("/api/v1/status").await?;
        let mut cost = None;
        if let Some(span) = args.cost.map(|span| span.0) {
            tokio::time::sleep(span).await;
            let after = server.get("/api/v1/status").await?;
            cost = Some(status::Cost::between(&status, &after, span));
            status = after;
        }
        drop(window);
        let workloads = server.get("/api/v1/workloads").await?;
        // Not every host can promise.
        let promised = server.get("/api/v1/allocations").await.ok();
        Ok::<_, ClientError>(status::Report { cost, ..status::Report::new(status, workloads).with(promised) })
    })?;
    print(args.output, &report, status::render)?;
    Ok(ExitCode::SUCCESS)
}

fn top(args: Top) -> anyhow::Result<ExitCode> {
    let server = reached(args.reached)?;
    let runtime = runtime()?;
    let done = runtime.block_on(top::run(server, &args.shown, args.output.output));
    // The thread that reads keys waits for one.
    runtime.shutdown_background();
    done.map(|()| ExitCode::SUCCESS)
}

/// The configuration of this host's daemon.
fn configured(file: ConfigFile) -> anyhow::Result<config::Config> {
    let sources = Sources { file: file.config, variables: variables(), flags: Vec::new() };
    Ok(config::load(&sources)?.config)
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

fn local_control(socket: Socket) -> anyhow::Result<Control> {
    let path = match socket.socket {
        Some(path) => path,
        None => configured(socket.config)?.control_socket,
    };
    Ok(Control(Server::Socket(path)))
}

fn control(args: Controlled) -> anyhow::Result<Control> {
    match &args.remote.server {
        Some(url) if args.socket.socket.is_none() => {
            Ok(Control(Server::Remote(Box::new(Remote::new(url, &args.remote)?))))
        }
        _ => local_control(args.socket),
    }
}

fn asked(name: String, target: api::Target, wanted: Wanted) -> api::AllocationRequest {
    let hugepages = [("2Mi", wanted.hugepages_2mi), ("1Gi", wanted.hugepages_1gi)];
    let hugepages = hugepages.into_iter().filter_map(|(size, bytes)| Some((size.to_owned(), bytes?)));
    let (cpus, memory, memory_limit) = (wanted.cpus, wanted.memory, wanted.memory_limit);
    let (policy, partition) = (wanted.policy, wanted.partition.map(Into::into));
    let hugepages = hugepages.collect();
    api::AllocationRequest { name, target, cpus, memory, memory_limit, hugepages, policy, partition }
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

fn exec(args: Exec) -> anyhow::Result<ExitCode> {
    let control = local_control(args.socket)?;
    let name = args.name.unwrap_or_else(|| name_of(&args.command));
    let asked = asked(name, api::Target::Exec, args.wanted);
    runtime()?.block_on(exec::run(&control, &asked, &args.command))
}

fn guarantee(args: Guarantee) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    let is_cgroup = args.target.starts_with('/');
    let name = args.name.unwrap_or_else(|| args.target.trim_start_matches('/').to_owned());
    let target = if is_cgroup { api::Target::Cgroup(args.target) } else { api::Target::Unit(args.target) };
    let allocation = runtime()?.block_on(control.admit(&asked(name, target, args.wanted)))?;
    print(args.output, &allocation, |allocation| explain::placed(allocation, "holds"))?;
    Ok(ExitCode::SUCCESS)
}

fn release(args: Release) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    runtime()?.block_on(control.release(&args.name))?;
    Ok(ExitCode::SUCCESS)
}

fn explain(args: Explain) -> anyhow::Result<ExitCode> {
    let control = control(args.control)?;
    match (args.name, args.wanted) {
        (None, Some(wanted)) => {
            // A name that no other request has: it is not kept.
            let name = format!("explain-{}", std::process::id());
            let dry = runtime()?.block_on(control.dry_run(&asked(name, api::Target::Exec, wanted)))?;
            print(args.output, &dry, explain::render_dry_run)?;
        }
        (name, _) => {
            let name = name.unwrap_or_default();
            let held = runtime()?.block_on(control.allocations())?;
            let found = held.allocations.iter().find(|held| held.name == name);
            let found = found.with_context(|| format!("there is no allocation named {name:?}"))?;
            print(args.output, &**found, explain::render_allocation)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn doctor(args: &Doctor) -> anyhow::Result<ExitCode> {
    // Probes can be tried on the running kernel only.
    let probes = if args.root == Path::new("/") {
        let machine = numaward_topology::sysfs::read(&args.root).unwrap_or_default();
        Some(Probes::load(&Options::new(&machine)))
    } else {
        None
    };
    let configured = examined_config(args);
    let checks = examine(&args.root, probes.as_ref().map_or(&[], Probes::reports), configured.as_ref());
    print(args.output, &checks, |checks| doctor::render(checks))?;
    Ok(if doctor::passes(&checks) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the daemon of the examined host is configured to do. Another host does not have our variables.
fn examined_config(args: &Doctor) -> Result<config::Config, config::Problems> {
    let is_here = args.root == Path::new("/");
    let usual = args.root.join(config::DEFAULT_FILE.trim_start_matches('/'));
    let file = args.config.clone().or_else(|| (!is_here && usual.exists()).then_some(usual));
    if file.is_none() && !is_here {
        return Ok(config::Config::default());
    }
    let variables = if is_here { variables() } else { BTreeMap::new() };
    config::load(&Sources { file, variables, flags: Vec::new() }).map(|loaded| loaded.config)
}

#[derive(Serialize)]
struct Checked<'a> {
    valid: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a Path>,
    errors: &'a [config::Problem],
    warnings: &'a [String],
}

fn check_config(args: CheckConfig) -> anyhow::Result<ExitCode> {
    let sources = Sources { file: args.file, variables: variables(), flags: Vec::new() };
    match config::load(&sources) {
        Ok(loaded) => {
            let (file, warnings) = (loaded.file.as_deref(), loaded.warnings.as_slice());
            print(args.output, &Checked { valid: true, file, errors: &[], warnings }, |checked| {
                let source = checked.file.map_or_else(
                    || format!("no file ({} is absent): the defaults are", config::DEFAULT_FILE),
                    |file| format!("{}:", file.display()),
                );
                let mut text = String::new();
                for warning in warnings {
                    text.extend(["warning: ", warning, "\n"]);
                }
                text.extend([&source, " valid\n"]);
                text
            })?;
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) if args.output.output == Format::Json => {
            print_json(&Checked { valid: false, file: None, errors: &problems.0, warnings: &[] })?;
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
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

fn import_kubelet_state(args: ImportKubeletState) -> anyhow::Result<ExitCode> {
    let config = configured(args.config)?;
    let machine = numaward_topology::sysfs::read(&config.host_root).context("the machine cannot be read")?;
    let imported = import(&config, &machine, &args.directory, args.dry_run)?;
    print(args.output, &imported, import::render)?;
    Ok(ExitCode::SUCCESS)
}

fn version(output: Output) -> anyhow::Result<ExitCode> {
    print(output, &Version::on(rustix::system::uname().release().to_string_lossy()), |version| {
        format!("numaward {} ({}), Linux {}\n", version.version, version.architecture, version.kernel)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// numaward's variables. One that is not Unicode is kept as far as it is, so that its key is checked.
fn variables() -> BTreeMap<String, String> {
    std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| name.starts_with(config::VARIABLE_PREFIX))
        .collect()
}

fn print<T: Serialize>(output: Output, value: &T, render: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    match output.output {
        Format::Json => print_json(value),
        Format::Table => Ok(io::stdout().write_all(text::clean_lines(&render(value)).as_bytes())?),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(io::stdout().write_all(text.as_bytes())?)
}

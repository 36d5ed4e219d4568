//! `numaward numactl`: runs a command like numactl(8), and registers it as a workload.
//!
//! # Problem
//! A command that numactl binds is not known to the daemon, so its memory is not counted under its name.
//!
//! # Algorithm
//! The daemon first creates a cgroup for the command, without a guarantee. Then this process enters the cgroup, sets
//! the memory policy and the CPUs, and executes the command, as numactl does. The command keeps the process id, and the
//! daemon detects its end by the empty cgroup. Without a daemon, all other steps are done.
//!
//! The options are those of numactl 2.0.19, parsed like `getopt_long(3)`. Its options for shared memory are refused.

mod lists;
mod show;

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, bail};
use numaward_api as api;
use numaward_topology::{CpuSet, Machine, NodeSet, affinity::set_affinity};

use self::lists::{named_node, parse_list};
pub(crate) use self::show::hardware;
use crate::{
    client::Server,
    exec,
    mempolicy::{self, sys::Mode},
    text, topology,
};

const USAGE: &str =
    "usage: numaward numactl [OPTION]... COMMAND [ARGUMENT]...; `numaward numactl --help` lists the options";

/// CPUs and memory policy of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Binding {
    cpus: Option<CpuSet>,
    policy: Option<(Mode, NodeSet)>,
    balancing: bool,
}

/// A command with its binding.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RunRequest {
    binding: Binding,
    /// `--strict` was given, which has no effect on a command.
    is_strict: bool,
    pub(crate) command: Vec<OsString>,
}

/// Action that the arguments request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Invocation {
    /// Run a command.
    Run(RunRequest),
    /// Print the policy of this process with this binding.
    Show(Binding),
    /// Print the nodes of this host.
    Hardware,
    /// Print the help.
    Help,
}

/// Options: short name, long name, and whether the option has a value. The options after `help` are refused.
const OPTIONS: [(char, &str, bool); 28] = [
    ('a', "all", false),
    ('b', "balancing", false),
    ('i', "interleave", true),
    ('w', "weighted-interleave", true),
    ('p', "preferred", true),
    ('P', "preferred-many", true),
    ('c', "cpubind", true),
    ('N', "cpunodebind", true),
    ('C', "physcpubind", true),
    ('m', "membind", true),
    ('l', "localalloc", false),
    ('t', "strict", false),
    ('s', "show", false),
    ('H', "hardware", false),
    ('h', "help", false),
    ('S', "shm", true),
    ('f', "file", true),
    ('o', "offset", true),
    ('L', "length", true),
    ('M', "shmmode", true),
    ('d', "dump", false),
    ('D', "dump-nodes", false),
    ('I', "shmid", true),
    ('u', "huge", false),
    ('T', "touch", false),
    ('V', "verify", false),
    // These two options have no short name.
    (COMPRESS, "cpu-compress", false),
    (VERSION, "version", false),
];
/// Placeholder for a missing short name, as no letter of the command line is a control character.
const COMPRESS: char = '\0';
const VERSION: char = '\u{1}';

/// Returns the reason why an option of numactl is not available; `None` for an available option.
fn refusal(option: char) -> Option<String> {
    let (_, name, _) = OPTIONS.iter().find(|(short, ..)| *short == option)?;
    match option {
        COMPRESS => {
            Some("--cpu-compress is not available: `numaward topology` lists CPUs as ranges".to_owned())
        }
        VERSION => Some(
            "this is not numactl, and has no version of it: `numaward --version` prints its own".to_owned(),
        ),
        'S' | 'f' | 'o' | 'L' | 'M' | 'd' | 'D' | 'I' | 'u' | 'T' | 'V' => Some(format!(
            "--{name} is about shared memory, which `numaward numactl` does not set up; use numactl itself"
        )),
        _ => None,
    }
}

/// Resources of the host, and those that this process may use.
struct HostResources {
    machine: Machine,
    cpus: CpuSet,
    nodes: NodeSet,
}

impl HostResources {
    /// Reads the resources from sysfs and procfs.
    fn read() -> anyhow::Result<Self> {
        let machine = topology::machine(Path::new("/"))?;
        let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
        let allowed = |key: &str| {
            let list = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            list.map(str::trim).with_context(|| format!("/proc/self/status has no {key}"))
        };
        let (cpus, nodes) = (allowed("Cpus_allowed_list")?.parse()?, allowed("Mems_allowed_list")?.parse()?);
        Ok(Self { machine, cpus, nodes })
    }

    /// Returns the CPUs of nodes.
    fn cpus_of(&self, nodes: &NodeSet) -> CpuSet {
        nodes
            .iter()
            .filter_map(|node| self.machine.nodes.get(&node))
            .flat_map(|node| node.cpus.iter())
            .collect()
    }

    /// Returns the nodes of CPUs.
    fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        let nodes = self.machine.nodes.iter().filter(|(_, node)| node.cpus.intersects(cpus));
        nodes.map(|(id, _)| *id).collect()
    }

    /// Adds the nodes without memory to an error about a list of nodes.
    fn with_nodes_without_memory(&self, error: anyhow::Error) -> anyhow::Error {
        let without = self.machine.nodes.iter().filter(|(_, node)| node.memory.0 == 0);
        let without: NodeSet = without.map(|(id, _)| *id).collect();
        if without.is_empty() { error } else { error.context(format!("nodes {without} have no memory")) }
    }

    /// Returns the CPUs and nodes that lists can name.
    fn allowed(&self, all: bool) -> (CpuSet, NodeSet) {
        let nodes: NodeSet = self.machine.nodes.keys().copied().collect();
        // A node that is offline cannot be used.
        if all { (self.machine.cpu_ids(), nodes) } else { (self.cpus.clone(), &self.nodes & &nodes) }
    }
}

/// Parses the arguments.
pub(crate) fn parse(arguments: &[OsString]) -> anyhow::Result<Invocation> {
    parse_on(&HostResources::read()?, arguments)
}

fn parse_on(host: &HostResources, arguments: &[OsString]) -> anyhow::Result<Invocation> {
    let mut binding = Binding::default();
    let (mut all, mut is_strict, mut is_hardware) = (false, false, false);
    let mut rest = arguments.iter();
    let mut options = 0;
    // The last list of nodes; and whether any list was given, also one of CPUs.
    let mut last = None;
    let mut has_list = false;
    while let Some(argument) = rest.as_slice().first() {
        if argument == "--" {
            rest.next();
            break;
        }
        // The first argument that is no option is the command.
        let Some(given) =
            argument.to_str().filter(|text| text.len() > 1).and_then(|text| text.strip_prefix('-'))
        else {
            break;
        };
        rest.next();
        options += 1;
        for (option, value) in split_options(given, &mut rest)? {
            if let Some(refusal) = refusal(option) {
                bail!("{refusal}");
            }
            if matches!(option, 'b' | 'H') && binding.policy.is_some() {
                bail!("-{option} comes before the memory policy, or without one");
            }
            match option {
                'a' if has_list => bail!("-a comes before all lists of nodes and CPUs"),
                'a' => all = true,
                'b' => binding.balancing = true,
                't' => is_strict = true,
                's' => return Ok(Invocation::Show(binding)),
                'H' => is_hardware = true,
                'h' => return Ok(Invocation::Help),
                option => {
                    // `same` is not available for CPUs.
                    let value = if value == "same" && option != 'C' {
                        last.clone()
                            .with_context(|| format!("-{option} same: no list of nodes was given before"))?
                    } else {
                        value
                    };
                    binding.add(option, &value, host, all)?;
                    has_list |= option != 'l';
                    if !matches!(option, 'C' | 'l') {
                        last = Some(value);
                    }
                }
            }
        }
    }
    if is_hardware {
        return Ok(Invocation::Hardware);
    }
    let command = rest.as_slice().to_vec();
    if command.is_empty() {
        let problem = if options == 0 { "no command is given" } else { "options are given, but no command" };
        bail!("{problem}; {USAGE}");
    }
    Ok(Invocation::Run(RunRequest { binding, is_strict, command }))
}

/// Splits an argument into options with their values: `--membind=0`, `--mem 0` (a unique prefix), `-m0`, `-al`.
fn split_options(
    given: &str,
    rest: &mut std::slice::Iter<'_, OsString>,
) -> anyhow::Result<Vec<(char, String)>> {
    let mut value_of = |name: &str| {
        let value = rest.next().with_context(|| format!("{name} takes a list; {USAGE}"))?;
        value
            .to_str()
            .map(str::to_owned)
            .with_context(|| format!("{name}: {} is not Unicode", value.display()))
    };
    if let Some(long) = given.strip_prefix('-') {
        let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
        let mut found: Vec<_> = OPTIONS.iter().filter(|(_, long, _)| long.starts_with(name)).collect();
        if let Some(exact) = found.iter().position(|(_, long, _)| *long == name) {
            found = vec![found[exact]];
        }
        return match (found.as_slice(), value) {
            ([(option, _, true)], Some(value)) => Ok(vec![(*option, value.to_owned())]),
            ([(option, long, true)], None) => Ok(vec![(*option, value_of(&format!("--{long}"))?)]),
            ([(option, _, false)], None) => Ok(vec![(*option, String::new())]),
            ([(_, long, false)], Some(_)) => bail!("--{long} takes no value; {USAGE}"),
            ([], _) => bail!("unknown option --{name}; {USAGE}"),
            (several, _) => {
                let names: Vec<_> = several.iter().map(|(_, long, _)| format!("--{long}")).collect();
                bail!("--{name} may be {}", names.join(" or "))
            }
        };
    }
    let mut options = Vec::new();
    let mut letters = given.chars();
    while let Some(letter) = letters.next() {
        let is_short = |(short, ..): &&(char, &str, bool)| *short == letter && !short.is_control();
        let Some((option, _, has_value)) = OPTIONS.iter().find(is_short) else {
            bail!("unknown option -{letter}; {USAGE}");
        };
        if *has_value {
            let value = letters.as_str();
            let value = if value.is_empty() { value_of(&format!("-{letter}"))? } else { value.to_owned() };
            options.push((*option, value));
            break;
        }
        options.push((*option, String::new()));
    }
    Ok(options)
}

impl Binding {
    /// Adds an option with its value.
    fn add(&mut self, option: char, value: &str, host: &HostResources, all: bool) -> anyhow::Result<()> {
        let (allowed_cpus, allowed_nodes) = host.allowed(all);
        let list_of =
            |allowed: &NodeSet| parse_list("node", value, allowed, |part| named_node(Path::new("/"), part));
        let nodes = || list_of(&allowed_nodes).map_err(|error| host.with_nodes_without_memory(error));
        match option {
            'C' => self.cpus = Some(parse_list("CPU", value, &allowed_cpus, |_| Ok(None))?),
            'N' | 'c' => {
                // A node without memory also has CPUs.
                let nodes = list_of(&(&allowed_nodes | &host.nodes_of(&allowed_cpus)))?;
                let cpus = &host.cpus_of(&nodes) & &allowed_cpus;
                if cpus.is_empty() {
                    bail!(
                        "--cpunodebind {value}: these nodes ({nodes}) have no CPUs that this process may use"
                    );
                }
                self.cpus = Some(cpus);
            }
            _ => {
                let (mode, nodes) = match option {
                    'l' => (Mode::Local, NodeSet::new()),
                    'm' => (Mode::Bind, nodes()?),
                    'p' => (Mode::Preferred, nodes()?),
                    'P' => (Mode::PreferredMany, nodes()?),
                    'w' => (Mode::WeightedInterleave, nodes()?),
                    _ => (Mode::Interleave, nodes()?),
                };
                if self.policy.is_some() {
                    bail!(
                        "two memory policies: choose one of membind, preferred, preferred-many, interleave, \
                           weighted-interleave and localalloc"
                    );
                }
                self.policy = Some(check_nodes(mode, nodes, value)?);
            }
        }
        Ok(())
    }

    /// Applies the binding to this process.
    fn apply(&self) -> anyhow::Result<()> {
        if let Some(cpus) = &self.cpus {
            set_affinity(None, cpus)
                .with_context(|| format!("this process cannot be bound to the CPUs {cpus}"))?;
        }
        let Some((mode, nodes)) = &self.policy else { return Ok(()) };
        mempolicy::set_policy(*mode, self.balancing && *mode == Mode::Bind, nodes)
    }
}

/// Returns the policy and nodes that numactl derives from the option.
fn check_nodes(mode: Mode, nodes: NodeSet, given: &str) -> anyhow::Result<(Mode, NodeSet)> {
    match (mode, nodes.len()) {
        (Mode::Local, _) => Ok((mode, nodes)),
        // Interleaving over no nodes is the default policy.
        (Mode::Interleave | Mode::WeightedInterleave, 0) => Ok((Mode::Default, nodes)),
        (_, 0) => bail!("{given:?} contains no node"),
        (Mode::Preferred, 2..) => bail!("--preferred takes one node, but {given:?} is {nodes}"),
        _ => Ok((mode, nodes)),
    }
}

/// Applies a binding, and renders the resulting policy of this process like numactl.
pub(crate) fn render_policy(binding: &Binding) -> anyhow::Result<String> {
    binding.apply()?;
    show::policy(&HostResources::read()?)
}

/// Executes the command. Returns only if that fails.
pub(crate) async fn run(
    server: anyhow::Result<Server>,
    run: &RunRequest,
    name: &str,
) -> anyhow::Result<ExitCode> {
    let registered = match server {
        Ok(server) => register(&server, name).await,
        Err(error) => Err(error),
    };
    if let Err(error) = registered {
        let error = text::clean_lines(&format!("{error:#}")).replace('\n', " ");
        eprintln!("numaward: {name} is not registered, and runs all the same: {error}");
    }
    if run.is_strict {
        eprintln!("numaward: --strict is about shared memory, and has no effect on a command");
    }
    run.binding.apply()?;
    let (program, arguments) = run.command.split_first().context(USAGE)?;
    let error = Command::new(program).args(arguments).exec();
    bail!("{}: {error}", OsStr::display(program))
}

/// Enters a cgroup that the daemon creates for the command.
async fn register(server: &Server, name: &str) -> anyhow::Result<()> {
    let request = api::AllocationRequest::without_guarantee(name, api::Target::Exec);
    let registered = server.admit(&request).await?;
    exec::enter_cgroup(Path::new(&registered.directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostResources {
        let machine = Machine::builder().nodes(4).cores_per_node(2).build().unwrap();
        HostResources { machine, cpus: "0-5".parse().unwrap(), nodes: "0-2".parse().unwrap() }
    }

    fn parse_on_host(arguments: &str) -> Result<Invocation, String> {
        let arguments: Vec<OsString> =
            arguments.split(' ').filter(|word| !word.is_empty()).map(Into::into).collect();
        parse_on(&host(), &arguments).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn parses_options_like_getopt() {
        for (arguments, cpus, policy) in [
            ("-N1 true", Some("2-3"), None),
            ("--cpunodebind=0,1 true", Some("0-3"), None),
            ("--cpun 2 true", Some("4-5"), None),
            ("-a -N 3 true", Some("6-7"), None),
            ("-C !0 -m0 true", Some("1-5"), Some((Mode::Bind, "0"))),
            ("--membind +1 -- true", None, Some((Mode::Bind, "1"))),
            ("-al true", None, Some((Mode::Local, ""))),
            ("-i all true", None, Some((Mode::Interleave, "0-2"))),
            ("-i !all true", None, Some((Mode::Default, ""))),
            ("-ai all true", None, Some((Mode::Interleave, "0-3"))),
            ("-p 2 true", None, Some((Mode::Preferred, "2"))),
            ("-P 0,2 true", None, Some((Mode::PreferredMany, "0,2"))),
            ("-w 0-1 true", None, Some((Mode::WeightedInterleave, "0-1"))),
            ("-C 1 -N 0 true", Some("0-1"), None),
            ("-N 0 -m same true", Some("0-1"), Some((Mode::Bind, "0"))),
            ("-b -i 0 true", None, Some((Mode::Interleave, "0"))),
            ("-t -m 0 true", None, Some((Mode::Bind, "0"))),
            ("-l -a -N 3 true", Some("6-7"), Some((Mode::Local, ""))),
            ("true -m 9", None, None),
        ] {
            let Ok(Invocation::Run(run)) = parse_on_host(arguments) else {
                panic!("{arguments}: {:?}", parse_on_host(arguments))
            };
            let found = run.binding.cpus.map(|cpus| cpus.to_string());
            assert_eq!(found.as_deref(), cpus, "{arguments}");
            let found = run.binding.policy.map(|(mode, nodes)| (mode, nodes.to_string()));
            assert_eq!(found, policy.map(|(mode, nodes)| (mode, nodes.to_owned())), "{arguments}");
            assert_eq!(run.command[0], "true");
        }
        assert!(matches!(parse_on_host("-m 0 --show"), Ok(Invocation::Show(_))));
        for arguments in ["--hardware", "-H -m 0", "-b -N 0 -H", "--har"] {
            assert_eq!(parse_on_host(arguments), Ok(Invocation::Hardware), "{arguments}");
        }
    }

    #[test]
    fn nodes_without_memory_have_cpus() {
        let mut machine = Machine::builder().nodes(4).cores_per_node(2).build().unwrap();
        for node in [0, 3].map(numaward_topology::NodeId) {
            machine.nodes.get_mut(&node).unwrap().memory = numaward_topology::Bytes(0);
        }
        let host = HostResources { machine, cpus: "0-7".parse().unwrap(), nodes: "1-2".parse().unwrap() };
        let parse_on_host = |arguments: &str| {
            let arguments: Vec<OsString> = arguments.split(' ').map(Into::into).collect();
            match parse_on(&host, &arguments) {
                Ok(Invocation::Run(run)) => Ok(run.binding),
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(format!("{error:#}")),
            }
        };
        let one = Some((Mode::Preferred, "1".parse().unwrap()));
        for (arguments, cpus, policy) in [
            ("-N 0 true", "0-1", None),
            ("--cpunodebind=0,3 true", "0-1,6-7", None),
            ("-a -N 0 true", "0-1", None),
            ("-N 0 --localalloc true", "0-1", Some((Mode::Local, NodeSet::new()))),
            ("-N 0 --preferred=1 true", "0-1", one),
            ("-N all true", "0-7", None),
            ("-N !0 true", "2-7", None),
            ("-C 0 true", "0", None),
        ] {
            let binding = parse_on_host(arguments).unwrap();
            let found = binding.cpus.map(|cpus| cpus.to_string());
            assert_eq!((found.as_deref(), binding.policy), (Some(cpus), policy), "{arguments}");
        }
        let error = parse_on_host("--membind=0 true").unwrap_err();
        assert!(
            error.contains("nodes 0,3 have no memory") && error.contains("node 0 does not exist"),
            "{error}"
        );
    }

    #[test]
    fn names_wrong_arguments() {
        for (arguments, words) in [
            ("", "no command is given"),
            ("-m 0", "but no command"),
            ("-m", "takes a list"),
            ("-x true", "unknown option -x"),
            ("--bogus true", "unknown option --bogus"),
            ("--pre 0 true", "--preferred or --preferred-many"),
            ("--all=1 true", "takes no value"),
            ("-m 3 true", "node 3 does not exist"),
            ("-m !all true", "contains no node"),
            ("-N 3 true", "node 3 does not exist"),
            ("-C 9 true", "CPU 9 does not exist"),
            ("-p 0,1 true", "takes one node"),
            ("-m 0 -l true", "two memory policies"),
            ("-N same true", "no list of nodes was given before"),
            ("-m foo:bar true", "unknown kind of device"),
            ("-m 0 -b true", "-b comes before the memory policy"),
            ("-m 0 -H", "-H comes before the memory policy"),
            ("-N 0 -a -m 1 true", "-a comes before all lists"),
            ("-C 0 --all true", "-a comes before all lists"),
            ("-H --cpu-compress", "--cpu-compress is not available"),
            ("--version", "numaward --version"),
            ("-H -x", "unknown option -x"),
            ("-L 1m --file=/dev/shm/a -m 0", "--length is about shared memory"),
            ("-f /dev/shm/a -T", "--file is about shared memory"),
            ("--touch true", "--touch is about shared memory"),
            ("-V true", "--verify is about shared memory"),
            ("--sh 0 true", "--show or --shm or --shmmode or --shmid"),
            ("--l true", "--localalloc or --length"),
            ("-\u{1} true", "unknown option"),
        ] {
            let error = parse_on_host(arguments).unwrap_err();
            assert!(error.contains(words), "{arguments}: {error}");
        }
    }
}

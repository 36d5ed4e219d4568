//! `numaward numactl`: numactl(8), and the command is a workload.
//!
//! Problem: numactl binds a command without anybody knowing of it. Here the daemon makes a cgroup for it first, in which it
//! is counted under its name; nothing is promised. Then this process enters the cgroup, takes the memory policy and the
//! CPUs, and becomes the command, as numactl does: it keeps its process id, and its end is what the daemon sees. Without
//! a daemon the rest happens all the same.
//!
//! Options are those of numactl 2.0.19, read as `getopt_long(3)` reads them. What it offers for shared memory is refused.

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

use self::lists::{list, named_node};
pub(crate) use self::show::hardware;
use crate::{
    client::Server,
    exec,
    mempolicy::{self, sys::Mode},
    text, topology,
};

const USAGE: &str =
    "usage: numaward numactl [OPTION]... COMMAND [ARGUMENT]...; `numaward numactl --help` lists the options";

/// What a process is to have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Binding {
    cpus: Option<CpuSet>,
    policy: Option<(Mode, NodeSet)>,
    balancing: bool,
}

/// A command and its binding.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    binding: Binding,
    /// `--strict` was given, which says nothing about a command.
    is_strict: bool,
    pub(crate) command: Vec<OsString>,
}

/// What the arguments ask for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A command.
    Run(Run),
    /// The policy of this process, with this binding.
    Show(Binding),
    /// The nodes of this host.
    Hardware,
    /// The help.
    Help,
}

/// The options: the short one, the long one, and whether it takes a value. Those after `help` are refused.
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
    // These two have no short form.
    (COMPRESS, "cpu-compress", false),
    (VERSION, "version", false),
];
/// No letter that can be typed as an option.
const COMPRESS: char = '\0';
const VERSION: char = '\u{1}';

/// Why an option of numactl is not available; none for one that is.
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

/// What a process may use, and all that there is.
struct Host {
    machine: Machine,
    cpus: CpuSet,
    nodes: NodeSet,
}

impl Host {
    /// Reads what this process may use.
    fn read() -> anyhow::Result<Self> {
        let machine = topology::machine(Path::new("/"))?;
        let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
        let of = |key: &str| {
            let list = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            list.map(str::trim).with_context(|| format!("/proc/self/status has no {key}"))
        };
        let (cpus, nodes) = (of("Cpus_allowed_list")?.parse()?, of("Mems_allowed_list")?.parse()?);
        Ok(Self { machine, cpus, nodes })
    }

    /// The CPUs of nodes.
    fn cpus_of(&self, nodes: &NodeSet) -> CpuSet {
        nodes
            .iter()
            .filter_map(|node| self.machine.nodes.get(&node))
            .flat_map(|node| node.cpus.iter())
            .collect()
    }

    /// The nodes of CPUs.
    fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        let nodes = self.machine.nodes.iter().filter(|(_, node)| node.cpus.intersects(cpus));
        nodes.map(|(id, _)| *id).collect()
    }

    /// An error about a list of nodes for memory, with those that have none.
    fn with_nodes_without_memory(&self, error: anyhow::Error) -> anyhow::Error {
        let without = self.machine.nodes.iter().filter(|(_, node)| node.memory.0 == 0);
        let without: NodeSet = without.map(|(id, _)| *id).collect();
        if without.is_empty() { error } else { error.context(format!("nodes {without} have no memory")) }
    }

    /// What the lists of options are chosen from.
    fn allowed(&self, all: bool) -> (CpuSet, NodeSet) {
        let nodes: NodeSet = self.machine.nodes.keys().copied().collect();
        // A node that is not online cannot be used.
        if all { (self.machine.cpu_ids(), nodes) } else { (self.cpus.clone(), &self.nodes & &nodes) }
    }
}

/// Reads the arguments.
pub(crate) fn read(arguments: &[OsString]) -> anyhow::Result<Asked> {
    read_on(&Host::read()?, arguments)
}

fn read_on(host: &Host, arguments: &[OsString]) -> anyhow::Result<Asked> {
    let mut binding = Binding::default();
    let (mut all, mut is_strict, mut is_hardware) = (false, false, false);
    let mut rest = arguments.iter();
    let mut options = 0;
    // Of nodes; and whether there was a list, also of CPUs.
    let mut last = None;
    let mut has_list = false;
    while let Some(argument) = rest.as_slice().first() {
        if argument == "--" {
            rest.next();
            break;
        }
        // The first that is no option is the command.
        let Some(given) =
            argument.to_str().filter(|text| text.len() > 1).and_then(|text| text.strip_prefix('-'))
        else {
            break;
        };
        rest.next();
        options += 1;
        for (option, value) in split(given, &mut rest)? {
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
                's' => return Ok(Asked::Show(binding)),
                'H' => is_hardware = true,
                'h' => return Ok(Asked::Help),
                option => {
                    // Of CPUs, there is no such word.
                    let value = if value == "same" && option != 'C' {
                        last.clone()
                            .with_context(|| format!("-{option} same: there is no list of nodes before"))?
                    } else {
                        value
                    };
                    binding.take(option, &value, host, all)?;
                    has_list |= option != 'l';
                    if !matches!(option, 'C' | 'l') {
                        last = Some(value);
                    }
                }
            }
        }
    }
    if is_hardware {
        return Ok(Asked::Hardware);
    }
    let command = rest.as_slice().to_vec();
    if command.is_empty() {
        let problem = if options == 0 { "no command is given" } else { "options, and no command" };
        bail!("{problem}; {USAGE}");
    }
    Ok(Asked::Run(Run { binding, is_strict, command }))
}

/// The options of one argument, each with its value: `--membind=0`, `--mem 0` (a start that no other has), `-m0`, `-al`.
fn split(given: &str, rest: &mut std::slice::Iter<'_, OsString>) -> anyhow::Result<Vec<(char, String)>> {
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
    /// Takes an option with its value.
    fn take(&mut self, option: char, value: &str, host: &Host, all: bool) -> anyhow::Result<()> {
        let (allowed_cpus, allowed_nodes) = host.allowed(all);
        let list_of =
            |allowed: &NodeSet| list("node", value, allowed, |part| named_node(Path::new("/"), part));
        let nodes = || list_of(&allowed_nodes).map_err(|error| host.with_nodes_without_memory(error));
        match option {
            'C' => self.cpus = Some(list("CPU", value, &allowed_cpus, |_| Ok(None))?),
            'N' | 'c' => {
                // Also a node without memory has CPUs.
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

    /// Gives it to this process.
    fn apply(&self) -> anyhow::Result<()> {
        if let Some(cpus) = &self.cpus {
            set_affinity(None, cpus)
                .with_context(|| format!("this process cannot be bound to the CPUs {cpus}"))?;
        }
        let Some((mode, nodes)) = &self.policy else { return Ok(()) };
        mempolicy::set(*mode, self.balancing && *mode == Mode::Bind, nodes)
    }
}

/// The policy and the nodes that numactl makes of what was given.
fn check_nodes(mode: Mode, nodes: NodeSet, given: &str) -> anyhow::Result<(Mode, NodeSet)> {
    match (mode, nodes.len()) {
        (Mode::Local, _) => Ok((mode, nodes)),
        // To spread over no nodes is no policy.
        (Mode::Interleave | Mode::WeightedInterleave, 0) => Ok((Mode::Default, nodes)),
        (_, 0) => bail!("{given:?} leaves no node"),
        (Mode::Preferred, 2..) => bail!("--preferred takes one node, and {given:?} is {nodes}"),
        _ => Ok((mode, nodes)),
    }
}

/// The policy of this process as numactl shows it, with a binding.
pub(crate) fn show(binding: &Binding) -> anyhow::Result<String> {
    binding.apply()?;
    show::policy(&Host::read()?)
}

/// Becomes the command. Returns only if that fails.
pub(crate) async fn run(server: anyhow::Result<Server>, run: &Run, name: &str) -> anyhow::Result<ExitCode> {
    let registered = match server {
        Ok(server) => register(&server, name).await,
        Err(error) => Err(error),
    };
    if let Err(error) = registered {
        let error = text::clean_lines(&format!("{error:#}")).replace('\n', " ");
        eprintln!("numaward: {name} is not registered, and runs all the same: {error}");
    }
    if run.is_strict {
        eprintln!("numaward: --strict is about shared memory, and changes nothing for a command");
    }
    run.binding.apply()?;
    let (program, arguments) = run.command.split_first().context(USAGE)?;
    let error = Command::new(program).args(arguments).exec();
    bail!("{}: {error}", OsStr::display(program))
}

/// Enters a cgroup that the daemon makes for it.
async fn register(server: &Server, name: &str) -> anyhow::Result<()> {
    let asked = api::AllocationRequest::unpromised(name, api::Target::Exec);
    let registered = server.admit(&asked).await?;
    exec::enter_cgroup(Path::new(&registered.directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let machine = Machine::builder().nodes(4).cores_per_node(2).build().unwrap();
        Host { machine, cpus: "0-5".parse().unwrap(), nodes: "0-2".parse().unwrap() }
    }

    fn asked(arguments: &str) -> Result<Asked, String> {
        let arguments: Vec<OsString> =
            arguments.split(' ').filter(|word| !word.is_empty()).map(Into::into).collect();
        read_on(&host(), &arguments).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn options_are_read_as_getopt_does() {
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
            let Ok(Asked::Run(run)) = asked(arguments) else { panic!("{arguments}: {:?}", asked(arguments)) };
            let found = run.binding.cpus.map(|cpus| cpus.to_string());
            assert_eq!(found.as_deref(), cpus, "{arguments}");
            let found = run.binding.policy.map(|(mode, nodes)| (mode, nodes.to_string()));
            assert_eq!(found, policy.map(|(mode, nodes)| (mode, nodes.to_owned())), "{arguments}");
            assert_eq!(run.command[0], "true");
        }
        assert!(matches!(asked("-m 0 --show"), Ok(Asked::Show(_))));
        for arguments in ["--hardware", "-H -m 0", "-b -N 0 -H", "--har"] {
            assert_eq!(asked(arguments), Ok(Asked::Hardware), "{arguments}");
        }
    }

    #[test]
    fn nodes_without_memory_have_cpus() {
        let mut machine = Machine::builder().nodes(4).cores_per_node(2).build().unwrap();
        for node in [0, 3].map(numaward_topology::NodeId) {
            machine.nodes.get_mut(&node).unwrap().memory = numaward_topology::Bytes(0);
        }
        let host = Host { machine, cpus: "0-7".parse().unwrap(), nodes: "1-2".parse().unwrap() };
        let asked = |arguments: &str| {
            let arguments: Vec<OsString> = arguments.split(' ').map(Into::into).collect();
            match read_on(&host, &arguments) {
                Ok(Asked::Run(run)) => Ok(run.binding),
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
            let binding = asked(arguments).unwrap();
            let found = binding.cpus.map(|cpus| cpus.to_string());
            assert_eq!((found.as_deref(), binding.policy), (Some(cpus), policy), "{arguments}");
        }
        let error = asked("--membind=0 true").unwrap_err();
        assert!(
            error.contains("nodes 0,3 have no memory") && error.contains("node 0 is not there"),
            "{error}"
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (arguments, words) in [
            ("", "no command is given"),
            ("-m 0", "and no command"),
            ("-m", "takes a list"),
            ("-x true", "unknown option -x"),
            ("--bogus true", "unknown option --bogus"),
            ("--pre 0 true", "--preferred or --preferred-many"),
            ("--all=1 true", "takes no value"),
            ("-m 3 true", "node 3 is not there"),
            ("-m !all true", "leaves no node"),
            ("-N 3 true", "node 3 is not there"),
            ("-C 9 true", "CPU 9 is not there"),
            ("-p 0,1 true", "takes one node"),
            ("-m 0 -l true", "two memory policies"),
            ("-N same true", "no list of nodes before"),
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
            let error = asked(arguments).unwrap_err();
            assert!(error.contains(words), "{arguments}: {error}");
        }
    }
}

//! The configuration: a YAML file, then `NUMAWARD_*` variables, then flags; later ones win.
//!
//! All three become one tree that knows where each value was given ([`tree`]). The tree is held
//! against the JSON schema that is generated from [`Config`] (unknown keys, ranges), then read by
//! serde as often as it takes: each value that does not fit is reported and taken out, until the rest
//! fits. So one run reports every error, each with its line, variable or flag.
//!
//! Nothing here reads the environment or the command line: the caller passes both in [`Sources`].

pub mod cluster;
mod control;
pub mod enforcement;
pub mod kubernetes;
pub mod memory_qos;
pub mod outgoing;
pub mod policy;
mod schema;
pub mod tree;
mod types;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_engine::policy::TopologyManagerPolicy;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::{
    cluster::OperatingMode,
    control::{Control, Tls},
    schema::json_schema,
    tree::{Origin, Position},
    types::{DutyCycle, HttpUrl, Interval, ListenAddress, LogFormat, LogLevel},
};
use self::{
    enforcement::{Declared, Enforcement},
    kubernetes::Kubernetes,
    memory_qos::{Factor, MemoryQos, MemoryReservationPolicy},
    outgoing::{Alerts, Otlp},
    policy::{
        CpuList, CpuManagerPolicy, MemoryManagerPolicy, Reservation, ReservedMemory, TopologyManagerScope,
    },
    schema::{Known, closest},
    tree::{Node, Value},
};

/// Where the configuration is looked for when no file is named.
pub const DEFAULT_FILE: &str = "/etc/numaward/config.yaml";
/// Names the file, like the flag `--config`.
pub const FILE_VARIABLE: &str = "NUMAWARD_CONFIG";
/// All variables start with this.
pub const VARIABLE_PREFIX: &str = "NUMAWARD_";
/// With the same prefix, but for the commands that ask a daemon, and no part of its configuration.
pub const CLIENT_VARIABLES: [&str; 5] =
    ["NUMAWARD_SERVER", "NUMAWARD_TOKEN_FILE", "NUMAWARD_CA_FILE", "NUMAWARD_CERT_FILE", "NUMAWARD_KEY_FILE"];

/// A file above this size is not a configuration.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// numaward's configuration. Every key may be left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// Whether numaward places workloads, or only observes. Left out: it places them, unless the kubelet of this host
    /// pins containers itself (its policies `static` and `Static`).
    pub mode: Option<OperatingMode>,
    /// Address and port of the read-only HTTP server: metrics, health, API.
    pub listen: ListenAddress,
    /// What is logged, and how.
    pub log: Log,
    /// The eBPF probes.
    pub probes: Probes,
    /// How this host is observed.
    pub observe: Observe,
    /// Also serves the kubelet's own series of its CPU, memory and topology managers, under their names, with
    /// numaward's figures. Only where the kubelet's own are not scraped with the same labels.
    pub export_kubelet_names: bool,
    /// Where the host's file system is found; not `/` where a container mounts it elsewhere.
    pub host_root: PathBuf,
    /// Where cgroup v2 is mounted. Left out: found in the host's mount table.
    pub cgroup_mount: Option<PathBuf>,
    /// The socket on which guarantees are asked for. Only root and the daemon's own user may.
    pub control_socket: PathBuf,
    /// Changes of allocations over TCP.
    pub control: Control,
    /// Where the ledger is kept.
    pub state_directory: PathBuf,
    /// What is written to the kernel.
    pub enforcement: Enforcement,
    /// Guarantees for workloads that are yet to come, by unit or cgroup. The first that matches counts.
    pub guarantees: Vec<Declared>,
    /// Whether memory is promised. Left out: `Static`.
    pub memory_manager_policy: Option<MemoryManagerPolicy>,
    /// Memory kept for the system, by node. Left out: a twentieth of each node, at least 64Mi and at most 1Gi.
    pub reserved_memory: Option<Vec<ReservedMemory>>,
    /// Whether CPUs are made exclusive. Left out: `static`.
    pub cpu_manager_policy: Option<CpuManagerPolicy>,
    /// Options of the CPU policy, as in Kubernetes.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// CPUs that are never exclusive. Left out: the first core, unless a reservation below says how many.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: Option<CpuList>,
    /// How the nodes of CPUs and memory have to agree. Left out: `restricted`.
    pub topology_manager_policy: Option<TopologyManagerPolicy>,
    /// For what they have to agree. Left out: `container`.
    pub topology_manager_scope: Option<TopologyManagerScope>,
    /// Options of the topology policy, as in Kubernetes.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Whether what is promised is protected from reclaim. Left out: `TieredReservation`.
    pub memory_reservation_policy: Option<MemoryReservationPolicy>,
    /// Where a workload whose limit is above what is promised to it is slowed down: at what is promised plus this share of
    /// what is between it and the limit. Left out: nowhere.
    pub memory_throttling_factor: Option<Factor>,
    /// What is done for workloads that are slowed down.
    pub memory_qos: MemoryQos,
    /// What Kubernetes itself is kept. Where this, `systemReserved` or `evictionHard` is given, their sum must
    /// be that of `reservedMemory`.
    pub kube_reserved: Option<Reservation>,
    /// What the system is kept.
    pub system_reserved: Option<Reservation>,
    /// The memory at which Kubernetes evicts: `memory.available`.
    pub eviction_hard: Option<Reservation>,
    /// Kubernetes: placing and watching the pods of this host.
    pub kubernetes: Kubernetes,
    /// Alerts without Prometheus.
    pub alerts: Alerts,
    /// OpenTelemetry.
    pub otlp: Otlp,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: None,
            listen: ListenAddress(SocketAddr::from((Ipv4Addr::LOCALHOST, 9560))),
            log: Log::default(),
            probes: Probes::default(),
            observe: Observe::default(),
            export_kubelet_names: false,
            host_root: PathBuf::from("/"),
            cgroup_mount: None,
            control_socket: PathBuf::from("/run/numaward/control.sock"),
            control: Control::default(),
            state_directory: PathBuf::from("/var/lib/numaward"),
            enforcement: Enforcement::default(),
            guarantees: Vec::new(),
            memory_manager_policy: None,
            reserved_memory: None,
            cpu_manager_policy: None,
            cpu_manager_policy_options: BTreeMap::new(),
            reserved_system_cpus: None,
            topology_manager_policy: None,
            topology_manager_scope: None,
            topology_manager_policy_options: BTreeMap::new(),
            memory_reservation_policy: None,
            memory_throttling_factor: None,
            memory_qos: MemoryQos::default(),
            kube_reserved: None,
            system_reserved: None,
            eviction_hard: None,
            kubernetes: Kubernetes::default(),
            alerts: Alerts::default(),
            otlp: Otlp::default(),
        }
    }
}

/// What is logged, and how. Logs go to standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Log {
    /// The least severe level that is logged.
    pub level: LogLevel,
    /// One line of text or one JSON object for each event.
    pub format: LogFormat,
}

/// The eBPF probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Probes {
    /// Counts page allocations.
    pub allocation: AllocationProbe,
    /// Counts sampled accesses to memory of other nodes, and pages that move between nodes.
    pub accesses: ProbeSwitch,
    /// Measures the time that tasks lose in reclaim.
    pub stalls: StallProbe,
    /// Tells why the OOM killer took a process.
    pub oom_kills: ProbeSwitch,
    /// Measures who else runs on exclusive CPUs. It costs something only while a CPU is exclusive.
    pub intruders: ProbeSwitch,
    /// Counts accesses to local and remote DRAM by the processor's own counters: two of them on each CPU, which others
    /// (perf, the NMI watchdog) cannot use then.
    pub hardware: HardwareProbe,
    /// How many workloads can have counters of their own. Those that come later are counted together
    /// as `other`. The counters of allocations take 32 bytes for each workload and node, on most hosts
    /// times CPUs.
    #[schemars(range(min = 1, max = 16_384))]
    pub slots: u32,
}

impl Default for Probes {
    fn default() -> Self {
        Self {
            allocation: AllocationProbe::default(),
            accesses: ProbeSwitch::default(),
            stalls: StallProbe::default(),
            oom_kills: ProbeSwitch::default(),
            intruders: ProbeSwitch::default(),
            hardware: HardwareProbe::default(),
            slots: 512,
        }
    }
}

impl Probes {
    /// Whether a probe may be attached; the key that says so.
    pub fn is_enabled(&self, probe: numaward_probes::Probe) -> (bool, &'static str) {
        use numaward_probes::Probe::{Alloc, Hardware, Hint, Migrate, OomKill, Scan, Stall, Switch};
        match probe {
            Alloc => (self.allocation.enabled, "probes.allocation.enabled"),
            Hint | Scan | Migrate => (self.accesses.enabled, "probes.accesses.enabled"),
            Stall => (self.stalls.enabled, "probes.stalls.enabled"),
            OomKill => (self.oom_kills.enabled, "probes.oomKills.enabled"),
            Switch => (self.intruders.enabled, "probes.intruders.enabled"),
            Hardware => (self.hardware.enabled, "probes.hardware.enabled"),
        }
    }

    /// Switches all of them off.
    #[must_use]
    pub fn all_off(mut self) -> Self {
        self.allocation.enabled = false;
        self.stalls.enabled = false;
        for switch in [&mut self.accesses, &mut self.oom_kills, &mut self.intruders] {
            switch.enabled = false;
        }
        self.hardware.enabled = false;
        self
    }
}

/// Whether a probe is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProbeSwitch {
    /// Whether it is attached.
    pub enabled: bool,
}

impl Default for ProbeSwitch {
    fn default() -> Self {
        Self { enabled: true }
    }
}

/// Whether the processor's counters are used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HardwareProbe {
    /// Whether they are opened.
    pub enabled: bool,
}

/// The probe that measures the time that tasks lose in reclaim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StallProbe {
    /// Whether it is attached.
    pub enabled: bool,
    /// How long a stall has to be for an event of its own; one a minute for each workload.
    pub event_from: Interval,
}

impl Default for StallProbe {
    fn default() -> Self {
        Self { enabled: true, event_from: Interval(numaward_probes::DEFAULT_LONG_STALL) }
    }
}

/// The probe that counts page allocations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AllocationProbe {
    /// Whether it is attached.
    pub enabled: bool,
    /// For which part of the time it is attached, `5s/60s` for five seconds of each minute; all the time where this is
    /// absent. What it counts is then multiplied accordingly: estimates, and shown as such.
    pub duty_cycle: Option<DutyCycle>,
    /// Lets the probe log what it decides, at level `debug`. For fault finding only.
    pub debug_log: bool,
}

impl Default for AllocationProbe {
    fn default() -> Self {
        Self { enabled: true, duty_cycle: None, debug_log: false }
    }
}

/// How this host is observed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Observe {
    /// How often where each workload's memory lies is read (`memory.numa_stat`). At least 5s: the
    /// kernel adds the numbers up on each reading.
    pub residency_interval: Interval,
    /// How often the machine is read again: hotplug, hugepage pools.
    pub topology_interval: Interval,
    /// How long the series of a workload that went away are still served, so that the last
    /// values are scraped.
    pub keep_removed: Interval,
    /// An estimate of remote accesses where the kernel samples none.
    pub remote_estimate: RemoteEstimate,
}

/// An estimate of how much workloads use memory of other nodes, where the kernel does not sample their accesses: by where
/// their threads run and where their memory lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RemoteEstimate {
    /// Whether it is made, each `residencyInterval`.
    pub enabled: bool,
    /// How many files (one for each thread, two for each cgroup) are read each time, at most; some 10 µs each. Where it
    /// takes more, workloads take turns.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_files: u32,
}

impl Default for RemoteEstimate {
    fn default() -> Self {
        Self { enabled: false, max_files: 1024 }
    }
}

impl Default for Observe {
    fn default() -> Self {
        Self {
            residency_interval: Interval(Duration::from_secs(10)),
            topology_interval: Interval(Duration::from_mins(1)),
            keep_removed: Interval(Duration::from_mins(5)),
            remote_estimate: RemoteEstimate::default(),
        }
    }
}

/// From where the configuration is taken.
#[derive(Debug, Default)]
pub struct Sources {
    /// The file that was named, by `--config` for one. It must exist, unlike [`DEFAULT_FILE`].
    pub file: Option<PathBuf>,
    /// The environment. Only names with [`VARIABLE_PREFIX`] are looked at.
    pub variables: BTreeMap<String, String>,
    /// Flags that were given.
    pub flags: Vec<Flag>,
}

/// A flag that sets a value.
#[derive(Debug)]
pub struct Flag {
    /// The flag, dashes included: `--listen`.
    pub name: &'static str,
    /// The key it sets, with dots: `log.level`.
    pub key: &'static str,
    /// Its value as given.
    pub value: String,
}

/// A configuration and how it came about.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// The file that was read, if there was one.
    pub file: Option<PathBuf>,
    /// What is odd but no error.
    pub warnings: Vec<String>,
}

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Where it was given.
    #[serde(flatten)]
    pub origin: Origin,
    /// The key, with dots; empty if none is concerned.
    pub path: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.message)
    }
}

/// Everything that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => write!(f, "the configuration has a problem:")?,
            count => write!(f, "the configuration has {count} problems:")?,
        }
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

/// Reads, merges and checks the configuration.
pub fn load(sources: &Sources) -> Result<Loaded, Problems> {
    let known = Known::new();
    let mut problems = Vec::new();
    let mut warnings = Vec::new();

    let named = sources.file.clone().or_else(|| sources.variables.get(FILE_VARIABLE).map(PathBuf::from));
    let path = named.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE));
    let (mut tree, file) = match read(&path) {
        Ok(text) => (tree::parse(&text, &path, &mut problems), Some(path.clone())),
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
            (tree::empty(&path), None)
        }
        Err(error) => {
            let origin = Origin::File { file: path.clone(), position: None };
            let message = format!("cannot be read: {error}");
            problems.push(Problem { origin, path: String::new(), message });
            (tree::empty(&path), None)
        }
    };
    if let Value::Scalar(serde_json::Value::Null) = tree.value {
        tree = tree::empty(&path);
    }
    if !matches!(tree.value, Value::Mapping(_)) {
        problems.push(Problem {
            origin: tree.origin.clone(),
            path: String::new(),
            message: "expected keys and values, such as \"listen: 127.0.0.1:9560\"".to_owned(),
        });
        tree = tree::empty(&path);
    }

    overlay(&mut tree, sources, &known, &mut warnings);
    known.check(&mut tree, &mut problems);
    let given = tree.clone();
    let config = read_values(&mut tree, &mut problems);
    let numbered: Vec<_> = tree.left_of("guarantees").into_iter().zip(&config.guarantees).collect();
    for (path, message) in enforcement::problems(&numbered, |path| given.at(path).is_ok()) {
        let (Ok(origin) | Err(origin)) = given.at(&path).cloned().map_err(Clone::clone);
        let path = path.join(".");
        problems.push(Problem { origin, message: format!("{path}: {message}"), path });
    }
    // Between values that could not be read, nothing can be told.
    if problems.is_empty() {
        let between = control::problems(&config).into_iter().chain(outgoing::problems(&config));
        problems.extend(between.map(|(key, message)| {
            let path: Vec<String> = key.split('.').map(str::to_owned).collect();
            let (Ok(origin) | Err(origin)) = given.at(&path).cloned().map_err(Clone::clone);
            Problem { origin, path: key.to_owned(), message: format!("{key}: {message}") }
        }));
    }
    if problems.is_empty() {
        warnings.extend(control::warnings(&config));
        warnings.extend(outgoing::warnings(&config));
        return Ok(Loaded { config, file, warnings });
    }
    problems.sort_by(|a, b| a.origin.cmp(&b.origin));
    Err(Problems(problems))
}

/// Reads a YAML text that is not numaward's own configuration.
pub fn read_yaml(text: &str, file: &Path) -> Result<serde_json::Value, Problems> {
    let mut problems = Vec::new();
    let tree = tree::parse(text, file, &mut problems);
    if problems.is_empty() { Ok(tree.to_json()) } else { Err(Problems(problems)) }
}

fn read(path: &Path) -> std::io::Result<String> {
    let size = std::fs::metadata(path)?.len();
    if size > MAX_FILE_BYTES {
        let message = format!("{size} bytes are more than the {MAX_FILE_BYTES} a configuration may have");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
    }
    std::fs::read_to_string(path)
}

/// Puts variables and flags over what the file says.
fn overlay(tree: &mut Node, sources: &Sources, known: &Known, warnings: &mut Vec<String>) {
    let keys: BTreeMap<String, &[String]> = known.leaves().map(|path| (variable_name(path), path)).collect();
    let ours = sources.variables.iter().filter(|(name, _)| name.starts_with(VARIABLE_PREFIX));
    let is_value = |name: &str| name != FILE_VARIABLE && !CLIENT_VARIABLES.contains(&name);
    for (name, text) in ours.filter(|(name, _)| is_value(name)) {
        let Some(path) = keys.get(name) else {
            // No error: Kubernetes gives every container variables named after the services around
            // it, and one may be called numaward.
            let hint =
                closest(name, keys.keys()).map_or(String::new(), |key| format!("; did you mean {key}?"));
            warnings.push(format!("variable {name} sets nothing{hint}"));
            continue;
        };
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        tree.set(&path, known.scalar(&path, text), &Origin::Variable { variable: name.clone() });
    }
    for flag in &sources.flags {
        let path: Vec<&str> = flag.key.split('.').collect();
        tree.set(&path, known.scalar(&path, &flag.value), &Origin::Flag { flag: flag.name.to_owned() });
    }
}

/// `log.level` is set by `NUMAWARD_LOG_LEVEL`, `hostRoot` by `NUMAWARD_HOST_ROOT`, `reservedSystemCPUs` by
/// `NUMAWARD_RESERVED_SYSTEM_CPUS`.
fn variable_name(path: &[String]) -> String {
    let mut name = VARIABLE_PREFIX.trim_end_matches('_').to_owned();
    for key in path {
        name.push('_');
        let mut before = 'A';
        for c in key.chars() {
            if c.is_ascii_uppercase() && !before.is_ascii_uppercase() {
                name.push('_');
            }
            name.push(c.to_ascii_uppercase());
            before = c;
        }
    }
    name
}

/// Reads the tree by serde, taking out what does not fit until the rest does.
fn read_values(tree: &mut Node, problems: &mut Vec<Problem>) -> Config {
    let mut taken_out: BTreeSet<String> = problems.iter().map(|problem| problem.path.clone()).collect();
    loop {
        let error = match serde_path_to_error::deserialize::<_, Config>(tree.to_json()) {
            Ok(config) => return config,
            Err(error) => error,
        };
        let mut path: Vec<String> = error
            .path()
            .iter()
            .filter_map(|segment| match segment {
                serde_path_to_error::Segment::Map { key } => Some(key.clone()),
                serde_path_to_error::Segment::Seq { index } => Some(index.to_string()),
                serde_path_to_error::Segment::Enum { .. } | serde_path_to_error::Segment::Unknown => None,
            })
            .collect();
        let removed = tree.remove(&mut path);
        let key = path.join(".");
        let name = if key.is_empty() { String::new() } else { format!("{key}: ") };
        let found = removed.is_some();
        // What was taken out before is not missing.
        let is_missing = |field: &str| taken_out.contains(&format!("{key}.{field}"));
        let message = error.inner().to_string();
        if found
            && message
                .strip_prefix("missing field `")
                .and_then(|rest| rest.strip_suffix('`'))
                .is_some_and(is_missing)
        {
            continue;
        }
        taken_out.insert(key.clone());
        problems.push(Problem {
            origin: removed.unwrap_or_else(|| tree.origin.clone()),
            path: key,
            message: format!("{name}{message}"),
        });
        if !found {
            return Config::default();
        }
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

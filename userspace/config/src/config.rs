//! The keys of the configuration and their defaults.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use educe::Educe;
use numaward_api::EnforcementMode;
use numaward_engine::{
    memory_qos::ThrottlingFormula,
    policy::{TopologyManagerPolicy, gates::FeatureGates},
};
use numaward_topology::NodeId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    cluster::OperatingMode,
    control::{AccessCredentials, Control, Tls},
    enforcement::{CgroupPattern, DeclaredGuarantee, Enforcement},
    exported::ExportedMetrics,
    guard::{Budgets, GuardMode, GuardReclaim, essential_services},
    home::{Home, HomeMode},
    kubernetes::Kubernetes,
    memory_qos::{Factor, MemoryQos, MemoryReservationPolicy},
    outgoing::{Alerts, Otlp},
    policy::{
        CpuList, CpuManagerPolicy, DEFAULT_THRESHOLD, KubeletVersion, MEMORY_AVAILABLE, MemoryManagerPolicy,
        MemoryTier, Reservation, ReservedMemory, StrategyKind, Thresholds, Tiers, TopologyManagerScope,
        optional_version, version,
    },
    rebalance::Rebalance,
    resctrl::Resctrl,
    types::{DutyCycle, Interval, ListenAddress, LogFormat, LogLevel},
};

/// The configuration of numaward. Every key is optional.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// The operating mode: numaward places workloads, or only observes. Default: it places workloads, unless the
    /// kubelet of this host pins containers itself (its policies `static` and `Static`).
    pub mode: Option<OperatingMode>,
    /// Address and port of the read-only HTTP server: metrics, health, API.
    #[educe(Default(expression = ListenAddress(SocketAddr::from((Ipv4Addr::LOCALHOST, 9560)))))]
    pub listen: ListenAddress,
    /// TLS of the read-only address, and the client certificates that it requires. Replaced files are read again.
    pub listen_tls: Tls,
    /// File with a bearer token that the read-only address requires; only its owner may have read permission. If client
    /// certificates are required too, one of the two is sufficient. `/livez` and `/readyz` need neither.
    pub listen_token_file: Option<PathBuf>,
    /// Names by which the read-only address and the control address are reached from this host, such as the name of a
    /// local reverse proxy, in addition to IP addresses, `localhost` and the names of this host (`/etc/hosts`).
    /// Requests for other names are refused, because web pages could use them to reach the daemon (DNS rebinding).
    pub listen_names: Vec<String>,
    /// Level and format of the log.
    pub log: Log,
    /// The eBPF probes.
    pub probes: Probes,
    /// Intervals and methods of observation.
    pub observe: Observe,
    /// Also exports the kubelet's series of its CPU, memory and topology managers under the kubelet's names, with
    /// numaward's values. As in the kubelet, they count containers; the series of admissions count pods. numaward does
    /// not count pods without resource requests, while the kubelet counts the admission of every pod. With `mode:
    /// observe`, only gauges are exported, because the decisions are the kubelet's. Use this only if the kubelet's own
    /// series are not scraped with the same labels.
    pub export_kubelet_names: bool,
    /// The path of the host's root file system; not `/` if a container mounts it elsewhere.
    #[educe(Default(expression = PathBuf::from("/")))]
    pub host_root: PathBuf,
    /// The mount point of cgroup v2. Default: from the host's mount table.
    pub cgroup_mount: Option<PathBuf>,
    /// The socket for requests for guarantees. Only root and the daemon's own user may connect.
    #[educe(Default(expression = PathBuf::from("/run/numaward/control.sock")))]
    pub control_socket: PathBuf,
    /// Changes of guarantees over TCP.
    pub control: Control,
    /// The directory of the ledger.
    #[educe(Default(expression = PathBuf::from("/var/lib/numaward")))]
    pub state_directory: PathBuf,
    /// Settings for writing to the kernel.
    pub enforcement: Enforcement,
    /// Experimental: shares of L3 caches and memory bandwidth.
    pub resctrl: Resctrl,
    /// Guarantees for future workloads, by unit or cgroup. The first match applies.
    pub guarantees: Vec<DeclaredGuarantee>,
    /// The strategy by which requests are decided.
    pub strategy: StrategyKind,
    /// The version of the kubelet that the strategy `kubelet` imitates. Default: the version that the Kubernetes
    /// node reports, if `kubernetes.nodeName` is set and the API server is reachable at startup; otherwise the newest.
    #[serde(deserialize_with = "optional_version")]
    pub kubelet_version: Option<KubeletVersion>,
    /// The kubelet's feature gates. The gates of its managers determine the accepted policy options, and `MemoryQoS`
    /// determines whether workloads are throttled; other gates are ignored. Default: with the strategy `kubelet` as in the
    /// kubelet; with `native`, all options are accepted.
    pub feature_gates: BTreeMap<String, bool>,
    /// Experimental: the way to count memory-only nodes: together with the nearest node that has CPUs (`attached`), or separately
    /// (`strict`). Only for the strategy `native`.
    pub tiers: Tiers,
    /// Experimental: the type of memory of each node: `dram`, `hbm` or `cxl`. Default: from the kernel's memory tiers; without
    /// tiers, `dram` for nodes with CPUs. A request for a type of memory uses no node of an unknown type. Only for the
    /// strategy `native`.
    #[schemars(with = "BTreeMap<String, MemoryTier>")]
    pub memory_tiers: BTreeMap<NodeId, MemoryTier>,
    /// Moves of running workloads, to make room for a request. Only for the strategy `native`.
    pub rebalance: Rebalance,
    /// The memory policy, which determines whether memory is guaranteed. Default: `Static`.
    pub memory_manager_policy: Option<MemoryManagerPolicy>,
    /// Memory reserved for the system, by node. Default: beside a kubelet, its reservations, unless this or one of the three
    /// keys `kubeReserved`, `systemReserved` and `evictionHard` is given; else a twentieth of each node, at least 64Mi and
    /// at most 1Gi.
    pub reserved_memory: Option<Vec<ReservedMemory>>,
    /// The CPU policy, which determines whether CPUs are exclusive. Default: `static`.
    pub cpu_manager_policy: Option<CpuManagerPolicy>,
    /// Options of the CPU policy, as in Kubernetes.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// CPUs that are never exclusive. Default: beside a kubelet that reserves CPUs, the same; else as many as `kubeReserved` and
    /// `systemReserved` reserve, or the first core.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: Option<CpuList>,
    /// The topology policy: how CPUs and memory must be aligned to nodes. Default: `restricted`.
    pub topology_manager_policy: Option<TopologyManagerPolicy>,
    /// The unit of the alignment: each `container` by itself, or the `pod` as a whole. Default: `container`.
    pub topology_manager_scope: Option<TopologyManagerScope>,
    /// Options of the topology policy, as in Kubernetes.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// The protection of guaranteed memory from reclaim. Default: `TieredReservation`.
    pub memory_reservation_policy: Option<MemoryReservationPolicy>,
    /// The threshold at which a workload with a limit above its guarantee is throttled (`memory.high`): the guarantee plus
    /// this share of the difference between guarantee and limit. Default: no throttling; 0.9, as in Kubernetes up to 1.36, if
    /// `featureGates` has `MemoryQoS`.
    pub memory_throttling_factor: Option<Factor>,
    /// The formula of `memory.high`, named after the version of Kubernetes that introduced it.
    #[serde(deserialize_with = "version")]
    pub memory_throttling_formula: ThrottlingFormula,
    /// Help for throttled workloads.
    pub memory_qos: MemoryQos,
    /// Budgets: shares of the nodes for workloads with memory on several nodes.
    pub budgets: Budgets,
    /// The headroom guard, which checks whether each node has enough memory for the guarantees on it that are not used
    /// yet. `off`, `report`, `act` (also keeps workloads without a guarantee off a node that is about to run short), or
    /// `evict` (also evicts pods without a guarantee if that is not enough).
    pub guard: GuardMode,
    /// Dropping of page cache of workloads without a guarantee, so that guaranteed memory is free.
    pub guard_reclaim: GuardReclaim,
    /// Cgroups that the guard does not touch, as patterns: `*` matches any text without a slash, `**` any number of
    /// levels. The guard never touches workloads with a guarantee, the cgroups above and below them, and other
    /// containers of their pods. Default: services that are needed to reach the host and to run workloads.
    #[educe(Default(expression = essential_services()))]
    pub guard_exempt: Vec<CgroupPattern>,
    /// Experimental: automatic placement of workloads without a guarantee on preferred nodes.
    pub home: Home,
    /// Resources reserved for Kubernetes. If this, `systemReserved` or `evictionHard` is given, their sum must equal
    /// that of `reservedMemory`; with `strategy: kubelet` also if none is given.
    pub kube_reserved: Option<Reservation>,
    /// Resources reserved for the system.
    pub system_reserved: Option<Reservation>,
    /// Thresholds at which Kubernetes evicts, by signal: an amount, or a percentage of the capacity. Only
    /// `memory.available` is used; other signals are ignored. Default, as in Kubernetes: 100Mi of memory if
    /// `kubeReserved` or `systemReserved` is given, or, with `strategy: kubelet`, `reservedMemory`; none if other
    /// signals are given.
    pub eviction_hard: Option<Thresholds>,
    /// Kubernetes: placement and observation of the pods of this host.
    pub kubernetes: Kubernetes,
    /// Alerts without Prometheus.
    pub alerts: Alerts,
    /// Selection of the exported metrics.
    pub metrics: ExportedMetrics,
    /// OpenTelemetry.
    pub otlp: Otlp,
}

impl Config {
    /// Returns the memory policy, or its default.
    pub fn memory_policy(&self) -> MemoryManagerPolicy {
        self.memory_manager_policy.unwrap_or(MemoryManagerPolicy::Static)
    }

    /// Returns the CPU policy, or its default.
    pub fn cpu_policy(&self) -> CpuManagerPolicy {
        self.cpu_manager_policy.unwrap_or(CpuManagerPolicy::Static)
    }

    /// Returns the eviction thresholds; `None` if nothing is reserved for Kubernetes.
    pub fn thresholds(&self) -> Option<Thresholds> {
        // A kubelet always requires `reservedMemory` to equal the sum; a host without a kubelet may have no other
        // reservation.
        let is_kubelets = self.reserved_memory.is_some() && self.strategy == StrategyKind::Kubelet;
        let is_reserved = self.kube_reserved.is_some() || self.system_reserved.is_some() || is_kubelets;
        let default = || [(MEMORY_AVAILABLE.to_owned(), DEFAULT_THRESHOLD)].into();
        self.eviction_hard.clone().or_else(|| is_reserved.then(default))
    }

    /// Returns the credentials of the read-only address.
    pub fn read_access(&self) -> AccessCredentials {
        AccessCredentials::for_reading(self.listen_token_file.as_deref(), &self.listen_tls)
    }

    /// Returns the topology policy, or its default.
    pub fn topology_policy(&self) -> TopologyManagerPolicy {
        self.topology_manager_policy.unwrap_or(TopologyManagerPolicy::Restricted)
    }

    /// Returns the scope of the topology policy, or its default.
    pub fn topology_scope(&self) -> TopologyManagerScope {
        self.topology_manager_scope.unwrap_or_default()
    }

    /// Returns the kubelet's feature gates.
    pub fn gates(&self) -> FeatureGates<'_> {
        FeatureGates { set: &self.feature_gates, version: self.kubelet_version.unwrap_or_default() }
    }

    /// Returns the settings of resctrl; `None` if it is not used.
    pub fn enabled_resctrl(&self) -> Option<&Resctrl> {
        Some(&self.resctrl).filter(|of| self.enforcement.mode == EnforcementMode::On && of.is_used())
    }

    /// Returns true if automatic placement moves workloads; false if it only reports.
    pub fn places_workloads(&self) -> bool {
        self.home.mode == HomeMode::Place && self.enforcement.mode == EnforcementMode::On
    }

    /// Returns true if the guard keeps workloads off nodes; false if it only reports.
    pub fn keeps_off_nodes(&self) -> bool {
        self.guard.acts() && self.enforcement.mode == EnforcementMode::On
    }

    /// Returns the mount point of resctrl, as seen by this process.
    pub fn resctrl_root(&self) -> PathBuf {
        let root = &self.resctrl.root;
        self.host_root.join(root.strip_prefix("/").unwrap_or(root))
    }

    /// Returns true if the guard drops page cache.
    pub fn drops_page_cache(&self) -> bool {
        self.guard_reclaim.enabled && self.guard.acts() && self.enforcement.mode == EnforcementMode::On
    }

    /// Returns true if budgets of workloads on several nodes are enforced.
    pub fn holds_budgets(&self) -> bool {
        self.strategy == StrategyKind::Native
            && self.budgets.enabled
            && self.enforcement.mode == EnforcementMode::On
    }
}

/// Level and format of the log, which is written to standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Log {
    /// The least severe level to log.
    pub level: LogLevel,
    /// The format: one line of text or one JSON object per event.
    pub format: LogFormat,
}

/// The eBPF probes.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Probes {
    /// Counts page allocations.
    pub allocation: AllocationProbe,
    /// Counts sampled accesses to memory of other nodes, and pages that move between nodes.
    pub accesses: ProbeSwitch,
    /// Measures the time that tasks spend in direct reclaim.
    pub stalls: StallProbe,
    /// Reports the constraint of each OOM kill.
    pub oom_kills: ProbeSwitch,
    /// Measures tasks of other workloads on exclusive CPUs. It has a cost only while a CPU is exclusive.
    pub intruders: ProbeSwitch,
    /// Reads the CPU time of workloads by node from the kernel's account. It has a cost only when it is read.
    pub cpu_time: ProbeSwitch,
    /// Experimental: counts accesses to local and remote DRAM with two hardware counters of each CPU, which other programs
    /// (perf, the NMI watchdog) cannot use meanwhile.
    pub hardware: HardwareProbe,
    /// The maximum number of workloads with their own counters. Further workloads are counted together as `other`. The
    /// allocation counters take 32 bytes per workload and node, on most hosts also per CPU.
    #[schemars(range(min = 1, max = 16_384))]
    #[educe(Default = 512)]
    pub slots: u32,
}

impl Probes {
    /// Disables all probes.
    #[must_use]
    pub fn all_off(mut self) -> Self {
        self.allocation.enabled = false;
        self.stalls.enabled = false;
        for switch in [&mut self.accesses, &mut self.oom_kills, &mut self.intruders, &mut self.cpu_time] {
            switch.enabled = false;
        }
        self.hardware.enabled = false;
        self
    }
}

/// The switch of a probe.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProbeSwitch {
    /// Attaches the probe.
    #[educe(Default = true)]
    pub enabled: bool,
}

/// The switch of the processor's hardware counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HardwareProbe {
    /// Opens the counters.
    pub enabled: bool,
}

/// The probe that measures the time that tasks spend in direct reclaim.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StallProbe {
    /// Attaches the probe.
    #[educe(Default = true)]
    pub enabled: bool,
    /// The minimum length of a stall that is reported as an event; at most one event a minute per workload.
    #[educe(Default(expression = Interval(Duration::from_millis(100))))]
    pub event_from: Interval,
}

/// The probe that counts page allocations.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AllocationProbe {
    /// Attaches the probe.
    #[educe(Default = true)]
    pub enabled: bool,
    /// The part of the time in which the probe is attached: `5s/60s` is five seconds of each minute. Absent: always.
    /// Its counts are then scaled accordingly and marked as estimates.
    pub duty_cycle: Option<DutyCycle>,
    /// Lets the probe log its decisions at level `debug`. Only for debugging.
    pub debug_log: bool,
}

/// Intervals and methods of observation.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Observe {
    /// The interval at which the memory of each workload by node (`memory.numa_stat`) is read. At least 5s, because the
    /// kernel computes the sums on each reading.
    #[educe(Default(expression = Interval(Duration::from_secs(10))))]
    pub residency_interval: Interval,
    /// The interval at which the machine is read again: hotplug, hugepage pools.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub topology_interval: Interval,
    /// The time for which the series of a removed workload are still exported, so that the last values are scraped.
    #[educe(Default(expression = Interval(Duration::from_mins(5))))]
    pub keep_removed: Interval,
    /// Experimental: names of the containers of Docker and Podman.
    pub container_names: ContainerNames,
    /// Estimation of remote accesses if the kernel samples none.
    pub remote_estimate: RemoteEstimate,
    /// Recording of the code that allocates and accesses memory of other nodes.
    pub call_chains: CallChains,
}

/// Names of root's containers of Docker and Podman, from the files in which the runtimes keep them. A file is read when a
/// container starts, if only root can change it.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerNames {
    /// Counts each container under its name (`docker/NAME`, `podman/NAME`), or its id of twelve digits if the name cannot be
    /// read. Otherwise, all containers of a runtime are counted together.
    #[educe(Default = true)]
    pub enabled: bool,
    /// The directory of Docker's state (its `data-root`); a path of the host.
    #[educe(Default(expression = PathBuf::from("/var/lib/docker")))]
    pub docker_root: PathBuf,
    /// The directory of Podman's storage (its `graphroot`); a path of the host.
    #[educe(Default(expression = PathBuf::from("/var/lib/containers/storage")))]
    pub podman_root: PathBuf,
}

/// Estimation of accesses to memory of other nodes, for workloads without sampled accesses: from the
/// placement of their threads and their memory.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RemoteEstimate {
    /// Makes an estimate each `residencyInterval`.
    pub enabled: bool,
    /// The maximum number of files that are read each time (one per thread, two per cgroup); about 10 µs each. If more
    /// are needed, workloads take turns.
    #[schemars(range(min = 1, max = 65_536))]
    #[educe(Default = 1024)]
    pub max_files: u32,
}

/// Recording of call chains that allocate and access memory of other nodes, for `numaward stacks`, the page and the
/// API. Every client that may read the API sees the names of functions. The daemon then keeps `CAP_SYS_PTRACE` if it has it;
/// otherwise functions of workloads have no names.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CallChains {
    /// Records call chains.
    pub enabled: bool,
    /// One call chain is recorded per this many remote pages on each CPU.
    #[schemars(range(min = 1, max = 1_048_576))]
    #[educe(Default = 64)]
    pub sample_every: u32,
    /// The maximum number of different chains of all workloads. Each takes about 1.2 KiB of kernel memory.
    #[schemars(range(min = 64, max = 65_536))]
    #[educe(Default = 4096)]
    pub max_stacks: u32,
}

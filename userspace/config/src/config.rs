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
    guard::{Budgets, GuardMode, GuardReclaim, essential},
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

/// numaward's configuration. Every key is optional.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// Whether numaward places workloads, or only observes. Default: it places them, unless the kubelet of this host
    /// pins containers itself (its policies `static` and `Static`).
    pub mode: Option<OperatingMode>,
    /// Address and port of the read-only HTTP server: metrics, health, API.
    #[educe(Default(expression = ListenAddress(SocketAddr::from((Ipv4Addr::LOCALHOST, 9560)))))]
    pub listen: ListenAddress,
    /// TLS of the read-only address, and whose client certificates it asks for. Files that are replaced are read again.
    pub listen_tls: Tls,
    /// File with a bearer token that the read-only address asks for; nobody but its owner may read it. Where client
    /// certificates are asked for too, either will do. `/livez` and `/readyz` are open to all.
    pub listen_token_file: Option<PathBuf>,
    /// Names by which the read-only address and the control address are reached from this host, such as that of a reverse
    /// proxy here, besides addresses, `localhost` and what this host calls itself (`/etc/hosts`). Others are refused: a page
    /// from elsewhere could get at them by one.
    pub listen_names: Vec<String>,
    /// What is logged, and how.
    pub log: Log,
    /// The eBPF probes.
    pub probes: Probes,
    /// How this host is observed.
    pub observe: Observe,
    /// Also serves the kubelet's own series of its CPU, memory and topology managers, under their names, with
    /// numaward's figures. As the kubelet's, they count containers; those of admissions count pods. numaward counts no pod
    /// that asks for nothing, while the kubelet counts the admission of every pod. With `mode: observe` there are the gauges only: the kubelet's decisions are its own to count. Only
    /// where the kubelet's own are not scraped with the same labels.
    pub export_kubelet_names: bool,
    /// Where the host's file system is found; not `/` where a container mounts it elsewhere.
    #[educe(Default(expression = PathBuf::from("/")))]
    pub host_root: PathBuf,
    /// Where cgroup v2 is mounted. Default: found in the host's mount table.
    pub cgroup_mount: Option<PathBuf>,
    /// The socket on which guarantees are asked for. Only root and the daemon's own user may.
    #[educe(Default(expression = PathBuf::from("/run/numaward/control.sock")))]
    pub control_socket: PathBuf,
    /// Changes of allocations over TCP.
    pub control: Control,
    /// Where the ledger is kept.
    #[educe(Default(expression = PathBuf::from("/var/lib/numaward")))]
    pub state_directory: PathBuf,
    /// What is written to the kernel.
    pub enforcement: Enforcement,
    /// Shares of L3 caches and memory bandwidth.
    pub resctrl: Resctrl,
    /// Guarantees for workloads that are yet to come, by unit or cgroup. The first that matches counts.
    pub guarantees: Vec<DeclaredGuarantee>,
    /// By which rules it is decided who gets what.
    pub strategy: StrategyKind,
    /// Whose decisions the strategy `kubelet` repeats. Default: what the Kubernetes node reports of its kubelet, where
    /// `kubernetes.nodeName` is set and the API server is reached at the start; else the newest.
    #[serde(deserialize_with = "optional_version")]
    pub kubelet_version: Option<KubeletVersion>,
    /// The kubelet's feature gates. Those of its managers say which options of policies are accepted, and `MemoryQoS` whether
    /// workloads are slowed down; others are ignored. Default: with the strategy `kubelet` as in the kubelet; with
    /// `native` all options are accepted.
    pub feature_gates: BTreeMap<String, bool>,
    /// How memory-only nodes count where a policy wants few nodes: with the nodes with CPUs that they are nearest to, or
    /// as nodes of their own. Only for the strategy `native`.
    pub tiers: Tiers,
    /// What sort of memory nodes have, by node: `dram`, `hbm` or `cxl`. Default: as the kernel's memory tiers say; where it
    /// reports none, `dram` for nodes with CPUs. A request for a sort gets nothing of a node whose sort is not known. Only
    /// for the strategy `native`.
    #[schemars(with = "BTreeMap<String, MemoryTier>")]
    pub memory_tiers: BTreeMap<NodeId, MemoryTier>,
    /// Moves of workloads that run, to make room for a request. Only for the strategy `native`.
    pub rebalance: Rebalance,
    /// Whether memory is promised. Default: `Static`.
    pub memory_manager_policy: Option<MemoryManagerPolicy>,
    /// Memory kept for the system, by node. Default: a twentieth of each node, at least 64Mi and at most 1Gi.
    pub reserved_memory: Option<Vec<ReservedMemory>>,
    /// Whether CPUs are made exclusive. Default: `static`.
    pub cpu_manager_policy: Option<CpuManagerPolicy>,
    /// Options of the CPU policy, as in Kubernetes.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// CPUs that are never exclusive. Default: the first core, unless a reservation below says how many.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: Option<CpuList>,
    /// How the nodes of CPUs and memory have to agree. Default: `restricted`.
    pub topology_manager_policy: Option<TopologyManagerPolicy>,
    /// For what they have to agree. Default: `container`.
    pub topology_manager_scope: Option<TopologyManagerScope>,
    /// Options of the topology policy, as in Kubernetes.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Whether what is promised is protected from reclaim. Default: `TieredReservation`.
    pub memory_reservation_policy: Option<MemoryReservationPolicy>,
    /// Where a workload whose limit is above what is promised to it is slowed down: at what is promised plus this share of
    /// what is between it and the limit. Default: nowhere; 0.9, as in Kubernetes, if `featureGates` has `MemoryQoS`.
    pub memory_throttling_factor: Option<Factor>,
    /// Of which version of Kubernetes the formula is.
    #[serde(deserialize_with = "version")]
    pub memory_throttling_formula: ThrottlingFormula,
    /// What is done for workloads that are slowed down.
    pub memory_qos: MemoryQos,
    /// Shares of the nodes of workloads with memory on several.
    pub budgets: Budgets,
    /// The headroom guard: whether each node can still give what is promised on it and not yet used. `off`, `report`,
    /// `act`, which also keeps workloads without a guarantee off a node that is about to run short, or `evict`, which
    /// also evicts pods without one where that does not help.
    pub guard: GuardMode,
    /// Page cache of workloads without a guarantee, where what is promised is not free.
    pub guard_reclaim: GuardReclaim,
    /// Cgroups that the guard leaves alone, as patterns: `*` stands for any text without a slash, `**` for any number of
    /// levels. Workloads with a guarantee, what is above or below one, and other containers of its pod are left alone
    /// always. Default: what a host needs to be reached and to run workloads.
    #[educe(Default(expression = essential()))]
    pub guard_exempt: Vec<CgroupPattern>,
    /// Homes for workloads without a guarantee.
    pub home: Home,
    /// What Kubernetes itself is kept. Where this, `systemReserved` or `evictionHard` is given, their sum must
    /// be that of `reservedMemory`; with `strategy: kubelet` also where none of them is.
    pub kube_reserved: Option<Reservation>,
    /// What the system is kept.
    pub system_reserved: Option<Reservation>,
    /// When Kubernetes evicts, by signal: an amount, or a share of what there is. `memory.available` counts; the others
    /// are ignored. Default, as in Kubernetes: 100Mi of memory where `kubeReserved` or `systemReserved` is given, or, with
    /// `strategy: kubelet`, `reservedMemory`; and none where other signals are given.
    pub eviction_hard: Option<Thresholds>,
    /// Kubernetes: placing and watching the pods of this host.
    pub kubernetes: Kubernetes,
    /// Alerts without Prometheus.
    pub alerts: Alerts,
    /// Which metrics are exported.
    pub metrics: ExportedMetrics,
    /// OpenTelemetry.
    pub otlp: Otlp,
}

impl Config {
    /// Whether memory is promised.
    pub fn memory_policy(&self) -> MemoryManagerPolicy {
        self.memory_manager_policy.unwrap_or(MemoryManagerPolicy::Static)
    }

    /// Whether CPUs are made exclusive.
    pub fn cpu_policy(&self) -> CpuManagerPolicy {
        self.cpu_manager_policy.unwrap_or(CpuManagerPolicy::Static)
    }

    /// When Kubernetes evicts. None where nothing says what is kept for it.
    pub fn thresholds(&self) -> Option<Thresholds> {
        // A kubelet holds `reservedMemory` to the sum always; a host without one may have no other reservation.
        let is_kubelets = self.reserved_memory.is_some() && self.strategy == StrategyKind::Kubelet;
        let is_reserved = self.kube_reserved.is_some() || self.system_reserved.is_some() || is_kubelets;
        let default = || [(MEMORY_AVAILABLE.to_owned(), DEFAULT_THRESHOLD)].into();
        self.eviction_hard.clone().or_else(|| is_reserved.then(default))
    }

    /// Who may reach the read-only address.
    pub fn read_access(&self) -> AccessCredentials {
        AccessCredentials::for_reading(self.listen_token_file.as_deref(), &self.listen_tls)
    }

    /// How the nodes of CPUs and memory have to agree.
    pub fn topology_policy(&self) -> TopologyManagerPolicy {
        self.topology_manager_policy.unwrap_or(TopologyManagerPolicy::Restricted)
    }

    /// For what they have to agree.
    pub fn topology_scope(&self) -> TopologyManagerScope {
        self.topology_manager_scope.unwrap_or_default()
    }

    /// The kubelet's feature gates.
    pub fn gates(&self) -> FeatureGates<'_> {
        FeatureGates { set: &self.feature_gates, version: self.kubelet_version.unwrap_or_default() }
    }

    /// How `resctrl` is used; nothing where it is not.
    pub fn enabled_resctrl(&self) -> Option<&Resctrl> {
        Some(&self.resctrl).filter(|of| self.enforcement.mode == EnforcementMode::On && of.is_used())
    }

    /// Whether workloads without a guarantee are given homes, as against only a report of it.
    pub fn places_workloads(&self) -> bool {
        self.home.mode == HomeMode::Place && self.enforcement.mode == EnforcementMode::On
    }

    /// Returns true where the guard keeps workloads off nodes; false where it only reports.
    pub fn keeps_off_nodes(&self) -> bool {
        self.guard.acts() && self.enforcement.mode == EnforcementMode::On
    }

    /// Where resctrl is mounted, as this process sees it.
    pub fn resctrl_root(&self) -> PathBuf {
        let root = &self.resctrl.root;
        self.host_root.join(root.strip_prefix("/").unwrap_or(root))
    }

    /// Whether the guard keeps what is promised free.
    pub fn drops_page_cache(&self) -> bool {
        self.guard_reclaim.enabled && self.guard.acts() && self.enforcement.mode == EnforcementMode::On
    }

    /// Whether workloads on several nodes are held to their budgets.
    pub fn holds_budgets(&self) -> bool {
        self.strategy == StrategyKind::Native
            && self.budgets.enabled
            && self.enforcement.mode == EnforcementMode::On
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
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Probes {
    /// Counts page allocations.
    pub allocation: AllocationProbe,
    /// Counts sampled accesses to memory of other nodes, and pages that move between nodes.
    pub accesses: ProbeSwitch,
    /// Measures the time that tasks lose in reclaim.
    pub stalls: StallProbe,
    /// Reports why the OOM killer took a process.
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
    #[educe(Default = 512)]
    pub slots: u32,
}

impl Probes {
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
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProbeSwitch {
    /// Whether it is attached.
    #[educe(Default = true)]
    pub enabled: bool,
}

/// Whether the processor's counters are used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HardwareProbe {
    /// Whether they are opened.
    pub enabled: bool,
}

/// The probe that measures the time that tasks lose in reclaim.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StallProbe {
    /// Whether it is attached.
    #[educe(Default = true)]
    pub enabled: bool,
    /// How long a stall has to be for an event of its own; one a minute for each workload.
    #[educe(Default(expression = Interval(Duration::from_millis(100))))]
    pub event_from: Interval,
}

/// The probe that counts page allocations.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AllocationProbe {
    /// Whether it is attached.
    #[educe(Default = true)]
    pub enabled: bool,
    /// For which part of the time it is attached, `5s/60s` for five seconds of each minute; all the time where this is
    /// absent. What it counts is then multiplied accordingly: estimates, and shown as such.
    pub duty_cycle: Option<DutyCycle>,
    /// Lets the probe log what it decides, at level `debug`. For fault finding only.
    pub debug_log: bool,
}

/// How this host is observed.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Observe {
    /// How often where each workload's memory lies is read (`memory.numa_stat`). At least 5s: the
    /// kernel adds the numbers up on each reading.
    #[educe(Default(expression = Interval(Duration::from_secs(10))))]
    pub residency_interval: Interval,
    /// How often the machine is read again: hotplug, hugepage pools.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub topology_interval: Interval,
    /// How long the series of a workload that went away are still served, so that the last
    /// values are scraped.
    #[educe(Default(expression = Interval(Duration::from_mins(5))))]
    pub keep_removed: Interval,
    /// An estimate of remote accesses where the kernel samples none.
    pub remote_estimate: RemoteEstimate,
    /// Which code allocates and accesses memory of other nodes.
    pub call_chains: CallChains,
}

/// An estimate of how much workloads use memory of other nodes, where the kernel does not sample their accesses: by where
/// their threads run and where their memory lies.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RemoteEstimate {
    /// Whether it is made, each `residencyInterval`.
    pub enabled: bool,
    /// How many files (one for each thread, two for each cgroup) are read each time, at most; some 10 µs each. Where it
    /// takes more, workloads take turns.
    #[schemars(range(min = 1, max = 65_536))]
    #[educe(Default = 1024)]
    pub max_files: u32,
}

/// Which code allocates and accesses memory of other nodes: call chains, for `numaward stacks`, the page and the API. They
/// show names of functions to everybody who may read the API. With this on, the daemon keeps `CAP_SYS_PTRACE` where it has
/// it: without, functions of workloads have no names.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CallChains {
    /// Whether they are taken.
    pub enabled: bool,
    /// For how many remote pages one chain is taken, on each CPU.
    #[schemars(range(min = 1, max = 1_048_576))]
    #[educe(Default = 64)]
    pub sample_every: u32,
    /// How many different chains there is room for, of all workloads. Each takes some 1.2 KiB of the kernel's memory.
    #[schemars(range(min = 64, max = 65_536))]
    #[educe(Default = 4096)]
    pub max_stacks: u32,
}

//! The configuration of a strategy, and everything that can be wrong with it.
//!
//! [`PolicyConfig`] has the fields and the spellings of a `KubeletConfiguration`. The parsers here make typed
//! options of them; what depends on the machine is checked where the strategy is made
//! ([`crate::kubelet::KubeletStrategy::new`]).
//!
//! A fault is a [`StartError`]: which component refuses, at which phase, and why. Its text is the kubelet's
//! own wherever the kubelet has one.

pub mod gates;
mod problem;

use std::collections::BTreeMap;

use numaward_topology::{CpuSet, NodeId, ZoneKind};
use serde::{Deserialize, Serialize};

pub use self::gates::PodLevelSupport;
pub use self::problem::{
    Component, MachineProblem, OptionProblem, RestoreProblem, StartError, StartPhase, StartProblem,
    StaticCpuProblem,
};
pub use crate::policy_names::{
    CpuKind, CpuManagerPolicy, KubeletVersion, MemoryManagerPolicy, MemoryPolicy, MemoryTier, Tiers,
    TopologyManagerPolicy, TopologyManagerScope, UnknownName,
};
use crate::quantity::Quantity;

/// Memory of one node that is kept for the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryReservation {
    /// The node.
    pub numa_node: NodeId,
    /// Bytes by kind.
    pub limits: BTreeMap<ZoneKind, Quantity>,
}

/// The configuration, spelt as in a `KubeletConfiguration`.
///
/// By default, as with the kubelet, nothing is managed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Who manages memory.
    pub memory_manager_policy: MemoryManagerPolicy,
    /// Memory kept for the system on each node.
    pub reserved_memory: Vec<MemoryReservation>,
    /// What kube-reserved, system-reserved and hard eviction thresholds add up to, in bytes by kind. The sums
    /// of `reserved_memory` must equal it. Where it is absent they are not compared.
    pub node_reservation: Option<BTreeMap<ZoneKind, Quantity>>,
    /// Who manages CPUs.
    pub cpu_manager_policy: CpuManagerPolicy,
    /// Options of the static CPU policy.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// CPUs kept for the system. If empty, the policy picks as many as `cpu_reservation` needs.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: CpuSet,
    /// The CPUs of kube-reserved and system-reserved together; rounded up. Without effect where
    /// `reserved_system_cpus` are given.
    pub cpu_reservation: Option<Quantity>,
    /// How the nodes of several resources have to agree.
    pub topology_manager_policy: TopologyManagerPolicy,
    /// For what they have to agree.
    pub topology_manager_scope: TopologyManagerScope,
    /// Options of the topology policy.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Groups of options that are switched on or off. Absent means on.
    pub feature_gates: BTreeMap<String, bool>,
    /// Whose decisions the strategy `kubelet` repeats, and whose levels options have.
    pub kubelet_version: KubeletVersion,
}

/// How settled an option is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Alpha,
    Beta,
    Stable,
}

impl PolicyConfig {
    /// What the feature gates say about pods with resources as a whole.
    pub fn pod_level_support(&self) -> PodLevelSupport {
        gates::FeatureGates { set: &self.feature_gates, version: self.kubelet_version }.pod_level_support()
    }

    /// Whether a manager's options of this level are switched on. The level is that of version 1.32, then that of 1.36.
    fn check_gate(
        &self,
        manager: &'static str,
        levels: [Level; 2],
        option: &str,
    ) -> Result<(), OptionProblem> {
        let level = match self.kubelet_version.select(levels) {
            Level::Alpha => "Alpha",
            Level::Beta => "Beta",
            Level::Stable => return Ok(()),
        };
        let gate = format!("{manager}ManagerPolicy{level}Options");
        if self.feature_gates.get(&gate).copied().unwrap_or(true) {
            return Ok(());
        }
        Err(OptionProblem::NotEnabled { option: option.to_owned(), manager, level })
    }
}

/// `full-pcpus-only`: give whole cores only.
pub const FULL_PCPUS_ONLY: &str = "full-pcpus-only";
/// `distribute-cpus-across-numa`: take evenly from several nodes where one does not suffice.
pub const DISTRIBUTE_ACROSS_NUMA: &str = "distribute-cpus-across-numa";
/// `align-by-socket`: nodes of one socket count as aligned.
pub const ALIGN_BY_SOCKET: &str = "align-by-socket";
/// `distribute-cpus-across-cores`: take one CPU a core where possible.
pub const DISTRIBUTE_ACROSS_CORES: &str = "distribute-cpus-across-cores";
/// `strict-cpu-reservation`: nobody runs on reserved CPUs, the shared pool included.
pub const STRICT_RESERVATION: &str = "strict-cpu-reservation";
/// `prefer-align-cpus-by-uncorecache`: take CPUs that share a last-level cache where possible.
pub const ALIGN_BY_CACHE: &str = "prefer-align-cpus-by-uncorecache";
/// The options of the CPU Manager's policy `static`.
pub const CPU_OPTIONS: [&str; 6] = [
    FULL_PCPUS_ONLY,
    DISTRIBUTE_ACROSS_NUMA,
    ALIGN_BY_SOCKET,
    DISTRIBUTE_ACROSS_CORES,
    STRICT_RESERVATION,
    ALIGN_BY_CACHE,
];
/// `prefer-closest-numa-nodes`: among sets of equal size prefer the one with the least distances.
pub const PREFER_CLOSEST: &str = "prefer-closest-numa-nodes";
/// `max-allowable-numa-nodes`: the most nodes with which hints are merged.
pub const MAX_NODES: &str = "max-allowable-numa-nodes";

/// The nodes that `max-allowable-numa-nodes` allows by default; it cannot be less.
const DEFAULT_MAX_NODES: u64 = 8;

/// The options of the static CPU policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "these are the kubelet's six switches")]
pub struct CpuOptions {
    /// [`FULL_PCPUS_ONLY`]
    pub full_pcpus_only: bool,
    /// [`DISTRIBUTE_ACROSS_NUMA`]
    pub distribute_across_numa: bool,
    /// [`ALIGN_BY_SOCKET`]
    pub align_by_socket: bool,
    /// [`DISTRIBUTE_ACROSS_CORES`]
    pub distribute_across_cores: bool,
    /// [`STRICT_RESERVATION`]
    pub strict_reservation: bool,
    /// [`ALIGN_BY_CACHE`]
    pub align_by_cache: bool,
}

/// A truth value in any of Go's spellings.
pub fn go_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

fn parse_bool(option: &str, value: &str) -> Result<bool, OptionProblem> {
    go_bool(value).ok_or_else(|| OptionProblem::NotBool(option.to_owned(), value.to_owned()))
}

impl CpuOptions {
    /// Reads the options, in the order of their names, and checks which exclude each other.
    pub fn parse(config: &PolicyConfig) -> Result<Self, StaticCpuProblem> {
        use Level::{Alpha, Beta, Stable};
        let mut options = Self::default();
        for (name, value) in &config.cpu_manager_policy_options {
            let (target, levels) = match name.as_str() {
                FULL_PCPUS_ONLY => (&mut options.full_pcpus_only, [Beta, Stable]),
                DISTRIBUTE_ACROSS_NUMA => (&mut options.distribute_across_numa, [Alpha, Beta]),
                ALIGN_BY_SOCKET => (&mut options.align_by_socket, [Alpha, Alpha]),
                DISTRIBUTE_ACROSS_CORES => (&mut options.distribute_across_cores, [Alpha, Alpha]),
                STRICT_RESERVATION => (&mut options.strict_reservation, [Alpha, Stable]),
                ALIGN_BY_CACHE => (&mut options.align_by_cache, [Alpha, Stable]),
                _ => return Err(OptionProblem::Unknown(name.clone(), "CPU").into()),
            };
            config.check_gate("CPU", levels, name)?;
            *target = parse_bool(name, value)?;
        }
        let Self { full_pcpus_only, distribute_across_numa, distribute_across_cores, .. } = options;
        for (both, first, second) in [
            (full_pcpus_only && distribute_across_cores, FULL_PCPUS_ONLY, DISTRIBUTE_ACROSS_CORES),
            (
                distribute_across_numa && distribute_across_cores,
                DISTRIBUTE_ACROSS_NUMA,
                DISTRIBUTE_ACROSS_CORES,
            ),
            (options.align_by_cache && distribute_across_cores, ALIGN_BY_CACHE, DISTRIBUTE_ACROSS_CORES),
            (options.align_by_cache && distribute_across_numa, ALIGN_BY_CACHE, DISTRIBUTE_ACROSS_NUMA),
        ] {
            if both {
                return Err(StaticCpuProblem::Incompatible(first, second));
            }
        }
        Ok(options)
    }
}

/// The topology policy with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyOptions {
    /// The policy.
    pub policy: TopologyManagerPolicy,
    /// The scope.
    pub scope: TopologyManagerScope,
    /// [`PREFER_CLOSEST`]
    pub prefer_closest: bool,
}

impl TopologyOptions {
    /// Reads policy, scope and options for a machine of so many nodes. Policy `none` ignores scope and options.
    pub fn parse(config: &PolicyConfig, nodes: usize) -> Result<Self, StartProblem> {
        let (mut prefer_closest, mut allowed) = (false, DEFAULT_MAX_NODES);
        let policy = config.topology_manager_policy;
        if policy == TopologyManagerPolicy::None {
            return Ok(Self { policy, scope: TopologyManagerScope::Container, prefer_closest });
        }
        for (name, value) in &config.topology_manager_policy_options {
            match name.as_str() {
                PREFER_CLOSEST => prefer_closest = parse_bool(name, value)?,
                MAX_NODES => {
                    config.check_gate("Topology", [Level::Beta, Level::Stable], name)?;
                    allowed = parse_max_nodes(name, value)?;
                }
                _ => return Err(OptionProblem::Unknown(name.clone(), "Topology").into()),
            }
        }
        if u64::try_from(nodes).is_ok_and(|nodes| nodes > allowed) {
            return Err(StartProblem::TooManyNodes(allowed));
        }
        Ok(Self { policy, scope: config.topology_manager_scope, prefer_closest })
    }
}

fn parse_max_nodes(option: &str, value: &str) -> Result<u64, OptionProblem> {
    let number: i64 = value.parse().map_err(|error: std::num::ParseIntError| {
        use std::num::IntErrorKind::{NegOverflow, PosOverflow};
        let problem = match error.kind() {
            PosOverflow | NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        OptionProblem::NotInteger(option.to_owned(), value.to_owned(), problem)
    })?;
    u64::try_from(number)
        .ok()
        .filter(|&number| number >= DEFAULT_MAX_NODES)
        .ok_or_else(|| OptionProblem::BelowMinimum(option.to_owned(), DEFAULT_MAX_NODES))
}

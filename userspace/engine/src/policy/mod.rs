//! The configuration of a strategy, and its possible errors.
//!
//! [`PolicyConfig`] has the fields and spellings of a `KubeletConfiguration`. The parsers here convert its options to
//! types. Conditions that depend on the machine are checked when the strategy is made
//! ([`crate::kubelet::KubeletStrategy::new`]).
//!
//! An error is a [`StartError`]: the component, the phase and the problem. The text is the kubelet's own if the
//! kubelet has one.

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

/// Memory of one node that is reserved for the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryReservation {
    pub numa_node: NodeId,
    /// Bytes by kind.
    pub limits: BTreeMap<ZoneKind, Quantity>,
}

/// Configuration, spelled as in a `KubeletConfiguration`.
///
/// As in the kubelet, nothing is managed by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Policy of the memory manager.
    pub memory_manager_policy: MemoryManagerPolicy,
    /// Memory reserved for the system on each node.
    pub reserved_memory: Vec<MemoryReservation>,
    /// Sum of kube-reserved, system-reserved and the hard eviction thresholds, in bytes by kind. The sum of
    /// `reserved_memory` must be equal; it is not checked if this field is absent.
    pub node_reservation: Option<BTreeMap<ZoneKind, Quantity>>,
    /// Policy of the CPU manager.
    pub cpu_manager_policy: CpuManagerPolicy,
    /// Options of the static CPU policy.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// CPUs reserved for the system. If empty, the policy selects as many as `cpu_reservation` needs.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: CpuSet,
    /// Sum of the CPUs of kube-reserved and system-reserved, rounded up. Ignored if `reserved_system_cpus` is set.
    pub cpu_reservation: Option<Quantity>,
    /// Alignment of the nodes of several resources.
    pub topology_manager_policy: TopologyManagerPolicy,
    /// Unit of the alignment: container or pod.
    pub topology_manager_scope: TopologyManagerScope,
    /// Options of the topology policy.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Feature gates. An absent gate has its default.
    pub feature_gates: BTreeMap<String, bool>,
    /// Version of the kubelet that the strategy `kubelet` repeats. Also determines the maturity of
    /// options.
    pub kubelet_version: KubeletVersion,
}

/// Maturity of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Alpha,
    Beta,
    Stable,
}

impl PolicyConfig {
    /// Returns the treatment of pods with pod-level resources.
    pub fn pod_level_support(&self) -> PodLevelSupport {
        gates::FeatureGates { set: &self.feature_gates, version: self.kubelet_version }.pod_level_support()
    }

    /// Checks that the feature gate for an option's maturity is on. `levels` has the maturity in v1.32 and in v1.36.
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

/// `full-pcpus-only`: allocate whole cores only.
pub const FULL_PCPUS_ONLY: &str = "full-pcpus-only";
/// `distribute-cpus-across-numa`: take CPUs evenly from several nodes if one does not suffice.
pub const DISTRIBUTE_ACROSS_NUMA: &str = "distribute-cpus-across-numa";
/// `align-by-socket`: nodes of one socket count as aligned.
pub const ALIGN_BY_SOCKET: &str = "align-by-socket";
/// `distribute-cpus-across-cores`: take one CPU of each core if possible.
pub const DISTRIBUTE_ACROSS_CORES: &str = "distribute-cpus-across-cores";
/// `strict-cpu-reservation`: no container runs on reserved CPUs; the shared pool excludes them.
pub const STRICT_RESERVATION: &str = "strict-cpu-reservation";
/// `prefer-align-cpus-by-uncorecache`: take CPUs that share a last-level cache if possible.
pub const ALIGN_BY_CACHE: &str = "prefer-align-cpus-by-uncorecache";
/// Options of the CPU manager's policy `static`.
pub const CPU_OPTIONS: [&str; 6] = [
    FULL_PCPUS_ONLY,
    DISTRIBUTE_ACROSS_NUMA,
    ALIGN_BY_SOCKET,
    DISTRIBUTE_ACROSS_CORES,
    STRICT_RESERVATION,
    ALIGN_BY_CACHE,
];
/// `prefer-closest-numa-nodes`: among sets of equal size, prefer the one with the smallest distances.
pub const PREFER_CLOSEST: &str = "prefer-closest-numa-nodes";
/// `max-allowable-numa-nodes`: maximum number of nodes for which hints are merged.
pub const MAX_NODES: &str = "max-allowable-numa-nodes";

/// Default and minimum of `max-allowable-numa-nodes`.
const DEFAULT_MAX_NODES: u64 = 8;

/// Options of the static CPU policy.
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

/// Parses a boolean in any spelling that Go accepts.
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
    /// Parses the options in the order of their names and checks that they are compatible.
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

/// Topology policy with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyOptions {
    pub policy: TopologyManagerPolicy,
    pub scope: TopologyManagerScope,
    /// [`PREFER_CLOSEST`]
    pub prefer_closest: bool,
}

impl TopologyOptions {
    /// Parses policy, scope and options for a machine with this number of nodes. The policy `none` ignores scope and
    /// options.
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
